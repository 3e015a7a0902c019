"""All settings of a training. Each one is declared once, as a field of a dataclass below.

The fields are in groups; `Settings` has all of them, is immutable, and is checked when it is made.
`read` parses YAML files and the command line, `to_yaml` writes a YAML file, and `replace` changes
settings. This module imports neither torch nor transformers, so that `--help` and refusals come at
once. What depends on a device, a package or the content of files is checked where it is used.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import functools
import importlib.util
import inspect
import json
import math
import numbers
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from pathlib import Path
from typing import (
    Any,
    Concatenate,
    Literal,
    ParamSpec,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

import yaml

from contaccum.errors import ConfigError, check_choice, closest

Method = Literal[
    "in_batch", "grad_accum", "grad_cache", "contaccum", "contaccum_cached", "query_side"
]
METHODS: tuple[str, ...] = get_args(Method)
"""The methods differ in the source of a query's negatives; docs/training.md has a table."""
WITH_BANK = ("contaccum", "contaccum_cached")
"""Methods with a bank of past embeddings."""
WITH_CACHE = ("grad_cache", "contaccum_cached")
"""Methods with a gradient cache: the pairs of an update are one batch, which is encoded twice."""
WITH_PASSAGES = METHODS[:-1]
"""Methods that encode passages in training: all but query_side, which has a loss of its own."""

Similarity = Literal["cos", "dot"]

DEFAULT_BANK_SIZE = 1024
DEFAULT_TEMPERATURE = {"cos": 0.05, "dot": 1.0}
"""{similarity: temperature} where none is given."""


def option(
    default: Any,
    help_text: str,
    *,
    least: float | None = None,
    above: float | None = None,
    methods: Sequence[str] = METHODS,
    needs: str | None = None,
    on_change: Literal["restart", "continue", "ignore"] = "restart",
    is_path: bool = False,
    set_by_fit: bool = False,
) -> Any:
    """Return a dataclass field with everything that the program knows about a setting.

    Args:
        help_text: the line of `--help`.
        least, above: limits of a number, or of each number in a list.
        methods: the methods that use the setting; others refuse any value but the default.
        needs: name of a setting without which this one has no effect, and is refused.
        on_change: effect of another value on an unfinished run. "restart": its checkpoints are not
            valid any more. "continue": it may go on, with another result. "ignore": none.
        is_path: the value may name a file or folder, whose content counts, and not its name.
        set_by_fit: `contaccum fit` decides it or does without it, so users cannot give it there.
    """
    metadata = {
        "help": help_text,
        "least": least,
        "above": above,
        "methods": tuple(methods),
        "needs": needs,
        "on_change": on_change,
        "is_path": is_path,
        "set_by_fit": set_by_fit,
    }
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


changeable = functools.partial(option, on_change="continue")
"""`option` for a setting with another value of which an unfinished run may go on."""
decided_by_fit = functools.partial(changeable, set_by_fit=True)
"""`changeable` for a setting that `contaccum fit` decides or does without."""
of_output = functools.partial(option, on_change="ignore", set_by_fit=True)
"""`option` for a setting of the output, which `contaccum fit` decides or does without."""
of_bank = functools.partial(option, methods=WITH_BANK)
of_query_side = functools.partial(option, methods=("query_side",))

# The settings, in groups --------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """The encoder to train, and an adapter for it."""

    model: str = option(
        "", "Folder or hub name of a SentenceTransformer or transformers backbone.", is_path=True
    )
    tied: bool = option(
        True, "One encoder for queries and passages. A model that was saved with two keeps both."
    )
    towers: Literal["one"] | None = option(
        None, "one: refuse all that gives two encoders, so that `encode` is right for any text."
    )
    pooling: Literal["cls", "mean", "lasttoken"] | None = option(
        None, "Pooling of a backbone. Default: chosen by its architecture."
    )
    normalize: bool = option(False, "Scale the embeddings of a backbone to length 1.")
    query_prompt: str | None = option(None, "Text put before every query.")
    passage_prompt: str | None = option(None, "Text put before every passage.")
    query_max_length: int | None = option(
        None, "Maximum tokens of a query. Default: the model's own, 32 for a backbone.", least=1
    )
    passage_max_length: int | None = option(
        None, "Maximum tokens of a passage. Default: the model's own, 256 for a backbone.", least=1
    )
    dropout: float | None = changeable(
        None, "Dropout of every layer. Default: the model's own. 0 is faster on a CPU.", least=0
    )
    attn_implementation: str | None = changeable(
        None, "Attention: eager, sdpa, ... On a CPU, eager is faster for short texts."
    )
    lora_r: int | None = option(
        None, "Train an adapter (LoRA) of this rank; the model's weights do not change.", least=1
    )
    lora_alpha: float | None = option(
        None, "The adapter's output is multiplied by alpha / r. Default: 2 r.", needs="lora_r"
    )
    lora_dropout: float = option(0.0, "Dropout on the adapter's input.", least=0, needs="lora_r")
    lora_target_modules: list[str] | None = option(
        None, "Names of the layers with an adapter. Default: every linear layer.", needs="lora_r"
    )
    load_in_4bit: bool = option(False, "Load the weights under an adapter in 4 bits.")
    blend: float = option(
        1.0, "Share of the trained weights in the saved ones.", above=0, set_by_fit=True
    )
    trust_remote_code: bool = option(
        False, "Run code that comes with the model; only the command line can allow it, no config."
    )
    device: Literal["cpu"] | None = changeable(None, "cpu: train without the accelerator.")


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """Training and evaluation data, in the formats of docs/data.md."""

    train_data: list[str] = option(
        [], 'Files, folders, hub data sets; or {"path": ...}.', is_path=True, set_by_fit=True
    )
    data_columns: list[str] | None = option(None, "Columns of the data: query=question ...")
    split: str = option("train", "Split of a BEIR folder or a hub data set.", set_by_fit=True)
    num_hard_negatives: int = option(0, "Hard negatives per query.", least=0, methods=WITH_PASSAGES)
    positives: Literal["draw", "first", "all"] | None = option(
        None, "Of several positives: sample one in each epoch, use the first, or use all."
    )
    missing_negatives: Literal["fill", "drop"] = option(
        "fill", "A record with too few negatives: fill up with passages of others, or drop it."
    )
    on_bad_record: Literal["stop", "skip"] = option(
        "stop", "A record that cannot be used: stop, or skip and count it."
    )
    eval_data: str | None = decided_by_fit(
        None, "Evaluation data: a BEIR folder, or the name of a public set.", is_path=True
    )
    eval_split: str = decided_by_fit("dev", "Split of eval_data.")
    eval_queries: int | None = decided_by_fit(
        None, "Number of queries of eval_data, always the same sample. Default: all."
    )
    eval_corpus_size: int | None = decided_by_fit(
        None, "Number of documents of eval_data, with all relevant ones. Default: all."
    )


@dataclass(frozen=True, kw_only=True)
class MethodSettings:
    """The method and its updates."""

    method: Method = option("contaccum", "Source of an update's negatives; see docs/training.md.")
    passage_store: str | None = of_query_side(
        None, "query_side: store by contaccum encode.", is_path=True, set_by_fit=True
    )
    corpus: str | None = of_query_side(
        None, "query_side: a file or BEIR folder to encode, instead of passage_store.", is_path=True
    )
    missing: Literal["stop", "add"] = of_query_side(
        "stop", "query_side: positives that the store lacks: stop, or add them.", set_by_fit=True
    )
    second_stage: str | None = option(
        None,
        "Documents, against which query_side then trains the model's query tower.",
        methods=WITH_PASSAGES,
        is_path=True,
        set_by_fit=True,
    )
    total_train_batch_size: int | None = option(
        None, "Pairs per update on all devices; sets gradient_accumulation_steps.", least=1
    )
    gather_across_devices: bool | None = changeable(
        None, "Contrast pairs of all devices. Default: with a bank.", methods=WITH_PASSAGES
    )
    learning_rates: list[float] | None = option(
        None, "Rate of each update, as contaccum fit writes them.", least=0, set_by_fit=True
    )
    max_skipped_updates: int = changeable(10, "Updates that are not finite before a run ends.")
    early_stopping_patience: int | None = decided_by_fit(
        None, "Stop after this many evaluations in a row without improvement."
    )
    card_examples: bool = option(False, "Show training texts in the card.", on_change="ignore")
    overwrite_output_dir: bool = of_output(False, "Replace a run that is in the folder.")


@dataclass(frozen=True)
class LossSettings:
    """The loss, its bank, and the exclusion of false negatives."""

    bank_size: int | None = of_bank(
        None, f"Rows of each bank. Default: {DEFAULT_BANK_SIZE}.", least=0
    )
    _: KW_ONLY
    query_bank_size: int | None = of_bank(None, "Rows of the query bank: bank_size (default) or 0.")
    normalize_by: Literal["local", "all"] = of_bank(
        "local", "Divide the summed row losses by the local rows, or by all."
    )
    mask_duplicates: bool = option(
        True, "Exclude known positives of a query from its negatives.", methods=WITH_PASSAGES
    )
    bank_hard_negatives: bool = of_bank(True, "Store hard negatives in the bank.")
    drift_compensation: Literal["auto", "none"] = of_bank(
        "auto", "Correction of old bank entries; see docs/drift.md."
    )


@dataclass(frozen=True, kw_only=True)
class SimilaritySettings:
    """Scores of embeddings, and the sizes to which the embeddings are truncated."""

    similarity: Similarity | None = option(
        None, "Similarity of embeddings. Default: the model's own.", set_by_fit=True
    )
    temperature: float | None = option(
        None, "Divisor of the similarities. Default: 0.05 with cos, 1.0 with dot.", above=0
    )
    matryoshka_dims: list[int] | None = option(
        None, "Train embeddings truncated to these sizes, the full one too.", methods=WITH_PASSAGES
    )


@dataclass(frozen=True, kw_only=True)
class TrainerSettings:
    """Arguments of transformers that contaccum reads, sets or restricts.

    The defaults are those of transformers, except for ``output_dir``.
    """

    output_dir: str = of_output("", "Folder of the run.")
    resume_from_checkpoint: str | None = of_output(None, "Continue from last, auto, or a folder.")
    learning_rate: float = changeable(5e-5, "Peak of the learning rate.", above=0)
    warmup_steps: float = changeable(
        0, "Updates in which the learning rate rises, or their share if below 1.", least=0
    )
    num_train_epochs: float = changeable(3.0, "Passes over the training data.", above=0)
    max_steps: int = changeable(-1, "Updates of the run. Default: as num_train_epochs says.")
    per_device_train_batch_size: int | Literal["auto"] = changeable(
        8, "Pairs per micro-batch on each device. auto: as many as memory allows.", least=1
    )
    gradient_accumulation_steps: int = changeable(1, "Micro-batches per update.", least=1)
    per_device_eval_batch_size: int = option(
        8, "Texts per forward pass in evaluations.", least=1, on_change="ignore"
    )
    seed: int = option(42, "Seed of new weights, of dropout and of the order of the data.")
    data_seed: int | None = option(None, "Seed of the order of the data. Default: seed.")
    optim: str = option("adamw_torch_fused", "Optimizer.")
    batch_sampler: str = option("batch_sampler", "Composition of a batch.")
    multi_dataset_batch_sampler: str = option(
        "proportional", "Order of the batches of several training sets."
    )
    bf16: bool = changeable(False, "Train in mixed precision with bfloat16.")
    fp16: bool = changeable(False, "Train in mixed precision with float16.")
    eval_strategy: Literal["no", "steps", "epoch"] = decided_by_fit("no", "When to evaluate.")
    eval_steps: float | None = decided_by_fit(
        None, "Updates between two evaluations. Default: logging_steps."
    )
    save_strategy: Literal["no", "steps", "epoch", "best"] = decided_by_fit(
        "steps", "When to save a checkpoint."
    )
    save_steps: float = decided_by_fit(500, "Updates between two checkpoints.")
    save_total_limit: int | None = of_output(None, "Number of checkpoints to keep. Default: all.")
    load_best_model_at_end: bool = decided_by_fit(False, "Save the best checkpoint as the result.")
    metric_for_best_model: str | None = option(
        None, "Metric of the best checkpoint. Default: the evaluator's.", set_by_fit=True
    )
    push_to_hub: bool = of_output(False, "Upload the model to the hub.")


@dataclass(frozen=True, kw_only=True)
class Settings(
    TrainerSettings, SimilaritySettings, LossSettings, MethodSettings, DataSettings, ModelSettings
):
    """All settings of a training, with ``transformers``: its other arguments, by name.

    ``model``, ``train_data`` and ``output_dir`` may be empty; `require_complete` asks for them.

    Raises:
        ConfigError: for a value or a combination that cannot work.
    """

    transformers: dict[str, Any] = option({}, "Other arguments of transformers.")

    def __post_init__(self) -> None:
        check_training(self)
        gives_two_towers = self.method == "query_side" or self.second_stage or not self.tied
        if self.towers and gives_two_towers:
            raise ConfigError(
                "towers=one with method=query_side, second_stage or tied=false, which give two "
                "encoders. Drop one of them"
            )
        if self.second_stage is not None and self.lora_r is not None:
            raise ConfigError(
                "second_stage with lora_r: the second stage trains a whole query tower. Drop one "
                "of them"
            )


@dataclass(frozen=True)
class InfoNCESettings(LossSettings):
    """Settings of `BankedInfoNCE`, which documents them: none is left open."""

    bank_size: int = DEFAULT_BANK_SIZE
    query_bank_size: int | None = None
    temperature: float = 1.0
    similarity: Similarity = "dot"
    _: KW_ONLY
    gather_across_devices: bool = False
    pairs_per_update: int | None = None

    def __post_init__(self) -> None:
        check_values(self)


# Settings that cannot work ------------------------------------------------------------------------


def check_values(settings: Any) -> None:
    """Raise `ConfigError` for a value that is no choice, is out of its limits, or has no effect.

    ``settings`` is a dataclass with any of the fields of `Settings`.
    """
    method = getattr(settings, "method", None)  # the settings of a loss alone have no method
    for name, value in list_changed(settings).items():
        rule = Settings.__dataclass_fields__[name].metadata
        if choices := get_choices(name):
            check_choice(name, value, choices)
        for number in value if isinstance(value, list) else [value]:
            if not isinstance(number, numbers.Real):  # the numbers of numpy are of this kind too
                continue
            if rule["least"] is not None and not rule["least"] <= number < math.inf:
                raise ConfigError(f"{name}={value}: it must be at least {rule['least']}")
            if rule["above"] is not None and not rule["above"] < number < math.inf:
                raise ConfigError(f"{name}={value}: it must be above {rule['above']}")
        # A size of 0 means no bank, which is what the other methods have.
        is_no_bank = name in ("bank_size", "query_bank_size") and value == 0
        if method is not None and method not in rule["methods"] and not is_no_bank:
            raise ConfigError(
                f"method={method} with {name}={value}: only {', '.join(rule['methods'])} have this "
                f"setting. Drop {name}"
            )
        needed = rule["needs"]
        if needed is not None and not getattr(settings, needed, True):
            raise ConfigError(
                f"{name}={value} without {needed}: it has no effect. Set {needed}, or drop {name}"
            )
    bank_size = DEFAULT_BANK_SIZE if settings.bank_size is None else settings.bank_size
    if settings.query_bank_size and settings.query_bank_size != bank_size:
        raise ConfigError(
            f"query_bank_size must be 0 (no query bank) or equal to bank_size ({bank_size}), got "
            f"{settings.query_bank_size}"
        )


def check_training(settings: Any) -> None:
    """Raise `ConfigError` for `Settings`, or arguments of a trainer, that cannot work."""
    check_values(settings)
    method = settings.method
    engine = get_engine(settings)
    is_auto = settings.per_device_train_batch_size == "auto"
    if method == "query_side" and (settings.passage_store is None) == (settings.corpus is None):
        raise ConfigError(
            "method=query_side: set passage_store (written by contaccum encode) or corpus (a file "
            "or folder to encode), one of them"
        )
    if method == "in_batch" and (is_auto or settings.gradient_accumulation_steps > 1):
        raise ConfigError(
            "method=in_batch with gradient_accumulation_steps or per_device_train_batch_size=auto: "
            "its update is a single batch. Drop them, or set method=grad_accum"
        )
    if is_auto and settings.total_train_batch_size is None:
        raise ConfigError(
            "per_device_train_batch_size=auto: set the number of pairs per update with "
            "total_train_batch_size"
        )
    if settings.early_stopping_patience is not None and settings.eval_strategy == "no":
        raise ConfigError(
            "early_stopping_patience with eval_strategy=no: set eval_strategy and eval_steps"
        )
    if engine and method == "query_side":
        raise ConfigError(f"method=query_side with {engine}: it is not supported. Drop {engine}")
    if engine and is_auto:
        raise ConfigError(
            f"per_device_train_batch_size=auto with {engine}: set per_device_train_batch_size to a "
            "number"
        )
    if engine == "deepspeed" and method in WITH_CACHE:
        raise ConfigError(
            f"method={method} with deepspeed: DeepSpeed allows only one backward pass per "
            "micro-step, and a gradient cache needs several. Set fsdp=true instead"
        )
    if engine == "deepspeed" and settings.fp16:
        raise ConfigError(
            "fp16=true with deepspeed: DeepSpeed scales the loss itself, so that the logged "
            "gradient norms would be scaled too. Set bf16=true"
        )


def get_engine(settings: Any) -> str | None:
    """Return "deepspeed" or "fsdp" if the settings or `accelerate launch` have enabled it."""
    given = getattr(settings, "transformers", vars(settings))
    for name in ("deepspeed", "fsdp"):
        launcher_value = os.environ.get(f"ACCELERATE_USE_{name.upper()}", "")
        if given.get(name) or launcher_value.lower() == "true":
            return name
    return None


_get_type_hints = functools.cache(get_type_hints)


def get_choices(name: str) -> tuple[str, ...]:
    """Return the allowed values of a setting that has a fixed set of them; else an empty tuple."""
    hint = _get_type_hints(Settings).get(name)
    parts = (hint, *get_args(hint))
    if int in parts:  # a number, or auto
        return ()
    return next((get_args(part) for part in parts if get_origin(part) is Literal), ())


def require_complete(settings: Settings) -> None:
    """Raise `ConfigError` unless settings name all that a training from the command line needs."""
    for name in ("model", "train_data", "output_dir"):
        if not getattr(settings, name):
            raise ConfigError(
                f"{name} is not set: add `{name}: ...` to the config, or --{name} on the command "
                "line"
            )
    if (settings.eval_data is None) != (settings.eval_strategy == "no"):
        raise ConfigError(
            f"eval_data={settings.eval_data} with eval_strategy={settings.eval_strategy}: set "
            "both, or none of them"
        )


# Use of settings ----------------------------------------------------------------------------------


def replace(settings: Settings, **changes: Any) -> Settings:
    """Return settings with some of them changed, such as ``replace(settings, seed=1)``.

    Arguments of transformers that have no field of their own are added to ``transformers``.

    Raises:
        ConfigError: for an unknown name, with the most similar one, or settings that cannot work.
    """
    names = {setting.name for setting in fields(settings)}
    others = {}
    for name in changes.keys() - names:
        if name not in get_types_of_transformers():
            suggestion = closest(name, names | get_types_of_transformers().keys())
            raise ConfigError(f"unknown setting {name!r}{suggestion}")
        others[name] = changes.pop(name)
    if others:
        given = changes.get("transformers", settings.transformers)
        changes["transformers"] = {**given, **others}
    return dataclasses.replace(settings, **changes)


def uses(method: str, name: str) -> bool:
    """Return True if a method uses a setting; all methods use those of transformers."""
    setting = Settings.__dataclass_fields__.get(name)
    return setting is None or method in setting.metadata["methods"]


def for_method(settings: Settings, method: str, **changes: Any) -> Settings:
    """Return the settings for another method, with ``changes``, and without those it ignores."""
    unused = {}
    for setting in fields(settings):
        if not uses(method, setting.name) or setting.metadata["needs"] in unused:
            unused[setting.name] = get_default(setting)
    return replace(settings, **{**unused, **changes, "method": method})


def list_changed(settings: Any) -> dict[str, Any]:
    """Return {name: value} of the settings, among any fields, that do not have their defaults."""
    changed = {}
    for own_field in fields(settings):
        value = getattr(settings, own_field.name)
        if own_field.name in Settings.__dataclass_fields__ and value != get_default(own_field):
            changed[own_field.name] = value
    return changed


def to_dict(settings: Settings) -> dict[str, Any]:
    """Return {name: value} of all changed settings; the arguments of `replace` that make them."""
    changed = list_changed(settings)
    others = changed.pop("transformers", {})
    return {**changed, **others}


def select(settings: Any, names_of: type) -> dict[str, Any]:
    """Return {name: value} of the settings that a dataclass, ``names_of``, has as well."""
    names = [setting.name for setting in fields(names_of)]
    return {name: getattr(settings, name) for name in names if hasattr(settings, name)}


def find(key: str, value: Any = True) -> dict[str, Any]:
    """Return {name: default} of the settings with a value of a key of `option`."""
    found = [setting for setting in fields(Settings) if setting.metadata[key] == value]
    return {setting.name: get_default(setting) for setting in found}


def get_default(setting: dataclasses.Field[Any]) -> Any:
    """Return the default value of a dataclass field."""
    if setting.default_factory is not dataclasses.MISSING:
        return setting.default_factory()
    return setting.default


@functools.cache
def get_types_of_transformers() -> dict[str, str]:
    """Return {name: type as text} of the arguments of transformers that have no field here.

    They are read from the source of the classes, whose import takes ten seconds.
    """
    types = {}
    for package, path in (
        ("transformers", "training_args.py"),
        ("sentence_transformers", "base/training_args.py"),
    ):
        spec = importlib.util.find_spec(package)
        assert spec is not None and spec.origin is not None, f"{package} is not installed"
        source = (Path(spec.origin).parent / path).read_text(encoding="utf-8")
        for statement in ast.parse(source).body:
            for line in statement.body if isinstance(statement, ast.ClassDef) else []:
                if isinstance(line, ast.AnnAssign):
                    types[ast.unparse(line.target)] = ast.unparse(line.annotation)
    return {name: types[name] for name in types if name not in Settings.__dataclass_fields__}


# Keywords of a class ------------------------------------------------------------------------------

P = ParamSpec("P")
SelfT = TypeVar("SelfT")
KeywordsT = TypeVar("KeywordsT")


def takes_settings(
    keywords: Callable[P, KeywordsT],
) -> Callable[[Callable[[SelfT, KeywordsT], None]], Callable[Concatenate[SelfT, P], None]]:
    """Give ``__init__(self, settings)`` the arguments of the dataclass ``keywords`` instead.

    So they are declared once, also for type checkers, editors and `help`.
    """
    signature = inspect.signature(keywords)

    def decorate(init: Callable[[SelfT, KeywordsT], None]) -> Any:
        @functools.wraps(init)
        def __init__(self: SelfT, *args: P.args, **kwargs: P.kwargs) -> None:
            init(self, keywords(*args, **kwargs))

        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        parameters = [own, *signature.parameters.values()]
        __init__.__signature__ = signature.replace(  # type: ignore[attr-defined]  # inspect reads it
            parameters=parameters, return_annotation=None
        )
        return __init__

    return decorate


# Text: YAML files and the command line ------------------------------------------------------------


def read(argv: Sequence[str], command_options: Collection[str] = ()) -> dict[str, Any]:
    """Read ``[CONFIG.yaml ...] [--key value ...]``; return {name: value} of what is given.

    Later files override earlier ones, and the command line overrides all files. The values have the
    types of the fields: ``replace(Settings(), **read(argv))`` makes the settings and checks them.

    Args:
        command_options: names of the command's other options, one of which may be misspelt.

    Raises:
        ConfigError: for a file that cannot be read or allows remote code, an unknown key, or a
            value of another type.
    """
    parser = argparse.ArgumentParser(
        add_help=False,
        allow_abbrev=False,
        exit_on_error=False,
        argument_default=argparse.SUPPRESS,  # the result has only what is given
    )
    add_options(parser)
    for name, annotation in get_types_of_transformers().items():
        _add_option(parser, name, annotation)
    actions = {action.dest: action for action in parser._actions}  # argparse has no public list
    command_line = list(argv)
    given: dict[str, Any] = {}
    while command_line and not command_line[0].startswith("-"):
        given |= _read_yaml(command_line.pop(0), actions)
    try:
        namespace, unknown = parser.parse_known_args(command_line)
    except argparse.ArgumentError as error:
        raise ConfigError(f"{error}. `contaccum train --help` lists the options") from error
    if unknown:
        key = unknown[0].lstrip("-").split("=")[0]
        suggestion = closest(key, actions.keys() | {*command_options})
        raise ConfigError(f"unknown key {key!r} on the command line{suggestion}")
    if given.get("trust_remote_code") and "trust_remote_code" not in namespace:
        configs = ", ".join(argv[: len(argv) - len(command_line)])
        raise ConfigError(
            f"{configs}: a config cannot set trust_remote_code. Read the code that comes with the "
            "model, then add --trust_remote_code to the command line"
        )
    given |= vars(namespace)
    for name in find("is_path").keys() & given.keys():
        if isinstance(given[name], str):
            given[name] = os.path.expanduser(given[name])
    return given


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add an option for each setting to a parser, in a section for each group."""
    for group in reversed(Settings.__bases__):  # the first group is the last base
        section = parser.add_argument_group((group.__doc__ or "").partition(".")[0])
        for setting in fields(group):
            add_option(section, setting.name)


def add_option(parser: Any, name: str) -> None:
    """Add the option for a setting to a parser, or to a section of it."""
    setting = Settings.__dataclass_fields__[name]
    text = setting.metadata["help"].replace("%", "%%")  # argparse formats it
    default = get_default(setting)
    if default and "efault" not in text:
        text += f" Default: {str(default).lower()}."
    _add_option(parser, name, str(setting.type), text)


def _add_option(parser: Any, name: str, annotation: str, help_text: str | None = None) -> None:
    """Add an option to a parser; ``annotation`` is its type as it is written in the source."""
    types = annotation.split(" | ")
    is_list = types[0].startswith("list[")
    if is_list:
        types = [types[0].removeprefix("list[").removesuffix("]")]
    type_name = next((parsed for parsed in _PARSERS if parsed in types), "str")
    keywords: dict[str, Any] = {"type": _PARSERS[type_name], "help": help_text}
    if name == "per_device_train_batch_size":
        keywords["type"] = number_or_auto
    if choices := get_choices(name):
        keywords["choices"] = choices
    else:
        keywords["metavar"] = type_name.upper()
    if is_list:
        keywords["nargs"] = "+"
    if type_name == "bool":
        keywords |= {"nargs": "?", "const": True}
    parser.add_argument(f"--{name}", **keywords)


def parse_bool(text: str) -> bool:
    """Return the value of an option that is true or false."""
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"must be true or false, got {text!r}")
    return text.lower() == "true"


def number_or_auto(text: str) -> int | str:
    return "auto" if text.lower() == "auto" else int(text)


_PARSERS = {"bool": parse_bool, "int": int, "float": float, "str": str}
"""{type: parser of its values}. Of several types of an option, the first one here is parsed."""


def _read_yaml(name: str, actions: Mapping[str, argparse.Action]) -> dict[str, Any]:
    """Return {key: value} of a YAML file, with the types of the options in ``actions``."""
    try:
        with open(name, encoding="utf-8") as file:
            content = yaml.safe_load(file) or {}
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:  # YAML's names the line
        raise ConfigError(f"{name}: not a YAML file that can be read ({error})") from error
    if not isinstance(content, dict):
        raise ConfigError(
            f"{name}: a config consists of `key: value` lines, got a {type(content).__name__}"
        )
    values: dict[str, Any] = {}
    for key, value in content.items():
        if key not in actions:
            raise ConfigError(f"unknown key {str(key)!r} in {name}{closest(key, actions)}")
        if value is None:
            continue
        if value is False and key.endswith("_strategy"):
            value = "no"  # YAML reads the unquoted word no as false
        try:
            values[key] = _convert(value, actions[key])
        except (ValueError, TypeError, argparse.ArgumentTypeError) as error:
            raise ConfigError(f"{name}: {key} cannot be {value!r} ({error})") from error
    return values


def _convert(value: Any, action: argparse.Action) -> Any:
    """Return a value of a YAML file with the type of an option."""
    parse: Any = action.type
    if action.nargs == "+":  # a list of texts or numbers; a mapping in it becomes JSON
        items = value if isinstance(value, list) else [value]
        return [json.dumps(item) if isinstance(item, dict) else parse(str(item)) for item in items]
    is_own = action.dest in Settings.__dataclass_fields__
    if not is_own and parse is str and isinstance(value, (bool, dict, list)):
        return value  # transformers has arguments of several types, such as a text or a mapping
    return parse(str(value))  # YAML reads 1e-5 as a text, and 1 as an integer


def to_yaml(settings: Settings | Mapping[str, Any]) -> str:
    """Return settings without defaults, or {name: value}, as YAML that `read` can read.

    ``trust_remote_code`` becomes a comment, because only the command line can set it.
    """
    values = to_dict(settings) if isinstance(settings, Settings) else dict(settings)
    comment = ""
    if values.pop("trust_remote_code", False):
        comment = "# The model comes with code: add --trust_remote_code to the command line.\n"
    return comment + yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
