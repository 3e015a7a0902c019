"""All settings of a training. Each one is declared once, as a field of a dataclass below.

A field says everything about its setting: type and choices, default, help, limits, the methods that
use it, what a changed value means for an unfinished run, and whether `contaccum fit` sets it. The
settings are in groups. `LossSettings` is the group of the loss, `TrainingSettings` has all groups
that a trainer reads, and `Settings` adds those of model and data. `TrainingSettings` and
`Settings` are immutable and checked when they are made, so whoever has one need not check it again.

`read` parses YAML files and the command line, `to_yaml` writes a YAML file, and `replace` changes
settings. This module imports neither torch nor transformers, so that `--help` and refusals come at
once. What depends on a device, a package or the content of files is checked where it is used.
"""

from __future__ import annotations

import argparse
import ast
import copy
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
from types import UnionType
from typing import (
    Any,
    Concatenate,
    Literal,
    NoReturn,
    ParamSpec,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import yaml

from contaccum.errors import ConfigError, check_choice, closest

Method = Literal[
    "in_batch",
    "grad_accum",
    "grad_cache",
    "contaccum",
    "contaccum_cached",
    "query_side",
]
METHODS: tuple[str, ...] = get_args(Method)
"""The methods differ in the source of a query's negatives.

- in_batch: the other passages of a batch. An update is a single batch.
- grad_accum: the other passages of a micro-batch. An update has several micro-batches.
- grad_cache: the other passages of all micro-batches of the update, which are encoded twice.
- contaccum: as grad_accum, and the past passages in a bank. The past queries in a second bank are
  contrasted with the new and past passages as well.
- contaccum_cached: as grad_cache, with the banks of contaccum.
- query_side: all documents of a store. Their embeddings are fixed, and only queries are encoded.
"""
WITH_BANK = ("contaccum", "contaccum_cached")
"""Methods with a bank of past embeddings."""
WITH_CACHE = ("grad_cache", "contaccum_cached")
"""Methods with a gradient cache: the pairs of an update are one batch, which is encoded twice."""
WITH_PASSAGES = METHODS[:-1]
"""Methods that encode passages in training: all but query_side, which has a loss of its own."""

Similarity = Literal["cos", "dot"]
NormalizeBy = Literal["local", "all"]
DriftCompensationMode = Literal["auto", "none"]
Strategy = Literal["no", "steps", "epoch"]

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
        default: the default value. A list or dictionary is copied for each object.
        help_text: the line of `--help`.
        least, above: limits of a number, or of each number in a list.
        methods: the methods that use the setting. With another method, any value but the default is
            refused.
        needs: name of a setting without which this one has no effect, and is refused.
        on_change: what a value that differs from the one that an unfinished run was started with
            means: "restart": its checkpoints are not valid any more. "continue": the run may go on
            from its checkpoint, but the result is another one. "ignore": the result stays the same.
        is_path: the value may name a file or folder. Its content counts then, and not its name.
        set_by_fit: `contaccum fit` decides it or does without it, so the user cannot give it there.
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


# The settings, in groups --------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """The encoder to train, and an adapter for it."""

    model: str = option(
        "",
        "Folder or hub name of a SentenceTransformer or of a transformers backbone.",
        is_path=True,
    )
    tied: bool = option(
        True,
        "False: two encoders. True: one encoder for queries and passages; but a saved model with "
        "two encoders keeps both.",
    )
    towers: Literal["one"] | None = option(
        None,
        "one: refuse whatever gives two encoders, so that `encode` serves queries and passages.",
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
    load_in_4bit: bool = option(
        False, "Load the weights of the base model in 4 bits, with bitsandbytes."
    )
    merge_adapter: bool = option(
        False, "At the end, save a full model: the weights with the adapter added."
    )
    blend: float = option(
        1.0,
        "At the end, save this share of the trained weights plus the rest of the earlier ones.",
        above=0,
        set_by_fit=True,
    )
    trust_remote_code: bool = option(
        False, "Run code that comes with the model; only the command line can allow it, no config."
    )
    device: str | None = changeable(
        None, "Device of the training: cpu or cuda. Default: an accelerator, if there is one."
    )


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """Training and evaluation data, in the formats of docs/data.md."""

    train_data: list[str] = option(
        [],
        'A file, a folder or a Hugging Face data set; several: paths or {"path": ...}.',
        is_path=True,
        set_by_fit=True,
    )
    data_columns: list[str] | None = option(
        None, "Names of the data's columns by role: query=question ..."
    )
    split: str = option(
        "train", "Split of a BEIR folder, or of a Hugging Face data set.", set_by_fit=True
    )
    num_hard_negatives: int = option(0, "Hard negatives per query.", least=0, methods=WITH_PASSAGES)
    positives: Literal["draw", "first", "all"] | None = option(
        None, "Of several positives: sample one in each epoch, use the first, or use all."
    )
    missing_negatives: Literal["fill", "drop"] = option(
        "fill",
        "A record with too few negatives: fill up with passages of other records, or drop it.",
    )
    on_bad_record: Literal["stop", "skip"] = option(
        "stop", "A record that cannot be used: stop, or skip and count it."
    )
    eval_data: str | None = changeable(
        None,
        "Evaluation data: a BEIR folder, or the name of a public set.",
        is_path=True,
        set_by_fit=True,
    )
    eval_split: str = changeable("dev", "Split of eval_data.", set_by_fit=True)
    eval_queries: int | None = changeable(
        None,
        "Number of queries of eval_data, always the same sample. Default: all.",
        set_by_fit=True,
    )
    eval_corpus_size: int | None = changeable(
        None,
        "Number of documents of eval_data, with all relevant ones. Default: all.",
        set_by_fit=True,
    )


@dataclass(frozen=True, kw_only=True)
class MethodSettings:
    """The method and its updates."""

    method: Method = option(
        "contaccum",
        "The source of an update's negatives; see docs/training.md.",
    )
    passage_store: str | None = option(
        None,
        "With query_side: the store of the corpus, written by contaccum encode.",
        methods=("query_side",),
        is_path=True,
        set_by_fit=True,
    )
    corpus: str | None = option(
        None,
        "With query_side: a file or BEIR folder to encode, instead of passage_store.",
        methods=("query_side",),
        is_path=True,
    )
    missing: Literal["stop", "add", "drop"] = option(
        "stop",
        "Positives that the store lacks: stop, add them, or drop their rows.",
        methods=("query_side",),
        set_by_fit=True,
    )
    second_stage: str | None = option(
        None,
        "Documents (a file or BEIR folder) that the trained model encodes; then its query tower is "
        "trained against them by query_side.",
        methods=WITH_PASSAGES,
        is_path=True,
        set_by_fit=True,
    )
    total_train_batch_size: int | None = option(
        None,
        "Pairs per update on all devices; determines gradient_accumulation_steps.",
        least=1,
    )
    gather_across_devices: bool | None = changeable(
        None,
        "Contrast the pairs of all devices. Default: true for methods with a bank.",
        methods=WITH_PASSAGES,
    )
    learning_rates: list[float] | None = option(
        None,
        "The learning rate of each update, and thus their number, as contaccum fit writes it.",
        least=0,
        set_by_fit=True,
    )
    max_skipped_updates: int = changeable(
        10, "Updates that may be skipped because they are not finite; one more ends the run."
    )
    early_stopping_patience: int | None = changeable(
        None, "Stop after this many evaluations in a row without improvement.", set_by_fit=True
    )
    card_examples: bool = option(
        False, "Show texts of the training data in the model card.", on_change="ignore"
    )
    overwrite_output_dir: bool = option(
        False,
        "Allow a new run in a folder with another run; its checkpoints are removed.",
        on_change="ignore",
        set_by_fit=True,
    )


@dataclass(frozen=True)
class LossSettings:
    """The loss, its bank, and the exclusion of false negatives."""

    bank_size: int | None = option(
        None,
        f"Rows of each bank, for methods that have one. Default: {DEFAULT_BANK_SIZE}.",
        least=0,
        methods=WITH_BANK,
    )
    _: KW_ONLY
    query_bank_size: int | None = option(
        None,
        "Rows of the query bank: bank_size, or 0 for a passage bank alone. Default: bank_size.",
        methods=WITH_BANK,
    )
    normalize_by: NormalizeBy = option(
        "local",
        "local: divide the summed row losses by the local rows. all: by all rows (the paper).",
        methods=WITH_BANK,
    )
    mask_duplicates: bool = option(
        True,
        "Exclude known positives of a query from its negatives. Texts are compared by ids.",
        methods=WITH_PASSAGES,
    )
    bank_hard_negatives: bool = option(True, "Store hard negatives in the bank.", methods=WITH_BANK)
    drift_compensation: DriftCompensationMode = option(
        "auto",
        "Correction of bank entries that an older encoder encoded; see docs/drift.md.",
        methods=WITH_BANK,
    )


@dataclass(frozen=True, kw_only=True)
class SimilaritySettings:
    """Scores of embeddings, and the sizes to which the embeddings are truncated."""

    similarity: Similarity | None = option(
        None, "Similarity of embeddings. Default: the model's own.", set_by_fit=True
    )
    temperature: float | None = option(
        None,
        "Divisor of the similarities. Default: 0.05 with cos, 1.0 with dot.",
        above=0,
    )
    matryoshka_dims: list[int] | None = option(
        None,
        "Train embeddings truncated to each of these sizes. List the full size too: 384 128 64.",
        methods=WITH_PASSAGES,
    )


@dataclass(frozen=True, kw_only=True)
class TrainerSettings:
    """Arguments of transformers that contaccum reads, sets or restricts.

    The defaults are those of transformers, except for ``output_dir``. All its other arguments are
    in ``TrainingSettings.transformers``.
    """

    output_dir: str = option("", "Folder of the run.", on_change="ignore", set_by_fit=True)
    resume_from_checkpoint: str | None = option(
        None,
        "Continue a run: last, auto (if there is one), or the folder of a checkpoint.",
        on_change="ignore",
        set_by_fit=True,
    )
    learning_rate: float = changeable(5e-5, "Peak of the learning rate.", above=0)
    lr_scheduler_type: str = changeable("linear", "Course of the learning rate.")
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
    eval_strategy: Strategy = option(
        "no", "When to evaluate.", on_change="continue", set_by_fit=True
    )
    eval_steps: float | None = changeable(
        None, "Updates between two evaluations. Default: logging_steps.", set_by_fit=True
    )
    eval_on_start: bool = changeable(False, "Evaluate before the first update.", set_by_fit=True)
    save_strategy: Literal["no", "steps", "epoch", "best"] = changeable(
        "steps", "When to save a checkpoint.", set_by_fit=True
    )
    save_steps: float = changeable(500, "Updates between two checkpoints.", set_by_fit=True)
    save_total_limit: int | None = option(
        None, "Number of checkpoints to keep. Default: all.", on_change="ignore", set_by_fit=True
    )
    load_best_model_at_end: bool = changeable(
        False, "Save the best checkpoint as the result.", set_by_fit=True
    )
    metric_for_best_model: str | None = option(
        None, "Metric of the best checkpoint. Default: the evaluator's.", set_by_fit=True
    )
    greater_is_better: bool | None = changeable(
        None,
        "True if higher values of that metric are better. Default: by its name.",
        set_by_fit=True,
    )
    push_to_hub: bool = option(
        False, "Upload the model to the hub.", on_change="ignore", set_by_fit=True
    )
    logging_strategy: Strategy = option("steps", "When to log.", on_change="ignore")
    logging_steps: float = option(500, "Updates between two log lines.", on_change="ignore")
    disable_tqdm: bool | None = option(None, "Show no progress bars.", on_change="ignore")
    dataloader_num_workers: int = option(
        0, "Processes that prepare batches.", least=0, on_change="ignore"
    )


@dataclass(frozen=True, kw_only=True)
class TrainingSettings(TrainerSettings, SimilaritySettings, LossSettings, MethodSettings):
    """All settings that a trainer reads, without those of its model and its data.

    Attributes:
        transformers: other arguments of transformers, by name.

    Raises:
        ConfigError: for a value or a combination that cannot work.
    """

    transformers: dict[str, Any] = option({}, "Other arguments of transformers.")

    def __post_init__(self) -> None:
        check(self)

    @property
    def has_gradient_cache(self) -> bool:
        """True if the method has a gradient cache; see `WITH_CACHE`."""
        return self.method in WITH_CACHE

    @property
    def has_auto_micro_batch(self) -> bool:
        """True if the trainer finds the largest micro-batch that memory allows."""
        return self.per_device_train_batch_size == "auto"

    @property
    def engine(self) -> str | None:
        """ "deepspeed" or "fsdp" if the settings or `accelerate launch` have enabled it."""
        for name in ("deepspeed", "fsdp"):
            launcher_value = os.environ.get(f"ACCELERATE_USE_{name.upper()}", "")
            if self.transformers.get(name) or launcher_value.lower() == "true":
                return name
        return None


@dataclass(frozen=True, kw_only=True)
class Settings(TrainingSettings, DataSettings, ModelSettings):
    """All settings of a training.

    ``model``, ``train_data`` and ``output_dir`` may be empty; `require_complete` asks for them.
    """


GROUPS = (
    ModelSettings,
    DataSettings,
    MethodSettings,
    LossSettings,
    SimilaritySettings,
    TrainerSettings,
)
"""All groups of settings, in the order of `contaccum train --help`."""

AnySettings = TypeVar("AnySettings", bound=TrainingSettings)


@dataclass(frozen=True)
class InfoNCESettings(LossSettings):
    """Settings of `BankedInfoNCE`, which `contaccum.bank.info_nce` documents: none is left open."""

    bank_size: int = DEFAULT_BANK_SIZE
    query_bank_size: int | None = None
    temperature: float = 1.0
    similarity: Similarity = "dot"
    _: KW_ONLY
    gather_across_devices: bool = False
    pairs_per_update: int | None = None

    def __post_init__(self) -> None:
        check(self)


# Combinations that cannot work --------------------------------------------------------------------

REFUSALS: tuple[tuple[type, Callable[[Any], object], str], ...] = (
    (
        LossSettings,
        lambda s: (
            s.query_bank_size
            and s.query_bank_size != (DEFAULT_BANK_SIZE if s.bank_size is None else s.bank_size)
        ),
        "query_bank_size must be 0 (no query bank) or equal to bank_size ({s.bank_size}), got "
        "{s.query_bank_size}",
    ),
    (
        Settings,
        lambda s: s.towers and (s.method == "query_side" or s.second_stage or not s.tied),
        "towers=one with method=query_side, second_stage or tied=false, which give two encoders. "
        "Drop one of them",
    ),
    (
        Settings,
        lambda s: s.second_stage is not None and s.lora_r is not None,
        "second_stage with lora_r: the second stage trains a whole query tower. Drop one of them",
    ),
    (
        TrainingSettings,
        lambda s: s.method == "query_side" and (s.passage_store is None) == (s.corpus is None),
        "method=query_side: set passage_store (written by contaccum encode) or corpus (a file or "
        "folder to encode), one of them",
    ),
    (
        TrainingSettings,
        lambda s: (
            s.method == "in_batch" and (s.has_auto_micro_batch or s.gradient_accumulation_steps > 1)
        ),
        "method=in_batch with gradient_accumulation_steps or per_device_train_batch_size=auto: its "
        "update is a single batch. Drop them, or set method=grad_accum",
    ),
    (
        TrainingSettings,
        lambda s: s.transformers.get("auto_find_batch_size"),
        "auto_find_batch_size: it would change the pairs per update. Set "
        "per_device_train_batch_size=auto instead, which does not",
    ),
    (
        TrainingSettings,
        lambda s: s.has_auto_micro_batch and s.total_train_batch_size is None,
        "per_device_train_batch_size=auto: set the number of pairs per update with "
        "total_train_batch_size",
    ),
    (
        TrainingSettings,
        lambda s: s.early_stopping_patience is not None and s.eval_strategy == "no",
        "early_stopping_patience with eval_strategy=no: set eval_strategy and eval_steps",
    ),
    (
        TrainingSettings,
        lambda s: s.method == "query_side" and s.engine,
        "method=query_side with {s.engine}: it is not supported. Drop {s.engine}",
    ),
    (
        TrainingSettings,
        lambda s: s.has_auto_micro_batch and s.engine,
        "per_device_train_batch_size=auto with {s.engine}: set per_device_train_batch_size to a "
        "number",
    ),
    (
        TrainingSettings,
        lambda s: s.max_steps == 0,  # transformers would train for num_train_epochs
        "max_steps=0: set the number of updates, or drop it to train for num_train_epochs",
    ),
    (
        TrainingSettings,
        lambda s: s.has_gradient_cache and s.engine == "deepspeed",
        "method={s.method} with deepspeed: DeepSpeed allows only one backward pass per micro-step, "
        "and a gradient cache needs several. Set fsdp=true instead",
    ),
    (
        TrainingSettings,
        lambda s: s.fp16 and s.engine == "deepspeed",
        "fp16=true with deepspeed: DeepSpeed scales the loss itself, so that the logged gradient "
        "norms would be scaled too. Set bf16=true",
    ),
    (
        Settings,
        lambda s: (
            s.merge_adapter
            and s.output_dir
            and Path(s.model).resolve() == Path(s.output_dir).resolve()
        ),
        "merge_adapter with model as output_dir: the merged model would overwrite the base model "
        "that the checkpoints need. Set another output_dir",
    ),
    (
        Settings,
        lambda s: s.merge_adapter and s.push_to_hub,
        "merge_adapter with push_to_hub: the adapter would be uploaded before it is merged. Drop "
        "push_to_hub, and upload the merged folder afterwards",
    ),
)
"""(class of the settings, condition, message); ``{s.name}`` in a message is a setting's value."""


def check(settings: InfoNCESettings | TrainingSettings) -> None:
    """Raise `ConfigError` for a value or a combination that cannot work."""
    method = getattr(settings, "method", None)  # the settings of a loss alone have no method
    settings_class: Any = type(settings)
    hints = _get_type_hints(settings_class)
    for name, value in list_changed(settings).items():
        rule = Settings.__dataclass_fields__[name].metadata
        _check_value(name, value, hints[name], rule)
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
    for settings_class, is_wrong, message in REFUSALS:
        if isinstance(settings, settings_class) and is_wrong(settings):
            raise ConfigError(message.format(s=settings))


def _check_value(name: str, value: Any, hint: Any, rule: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for a value of another type than the field's, or out of its limits."""
    if not _has_type(value, hint):
        choices = get_choices(name)
        if choices:
            check_choice(name, value, choices)
        type_name = getattr(hint, "__name__", str(hint))
        raise ConfigError(f"{name} must be of type {type_name}, got {value!r}")
    for number in value if isinstance(value, list) else [value]:
        if not isinstance(number, numbers.Real):
            continue
        if rule["least"] is not None and number < rule["least"]:
            raise ConfigError(f"{name}={value}: it must be at least {rule['least']}")
        if rule["above"] is not None and number <= rule["above"]:
            raise ConfigError(f"{name}={value}: it must be above {rule['above']}")


_get_type_hints = functools.cache(get_type_hints)


def get_choices(name: str) -> tuple[str, ...]:
    """Return the allowed values of a setting that has a fixed set of them; else an empty tuple."""
    hint = _get_type_hints(Settings).get(name)
    choices: tuple[str, ...] = ()
    for part in (hint, *get_args(hint)):
        if part is int:  # a number, or auto
            return ()
        if get_origin(part) is Literal:
            choices = get_args(part)
    return choices


def _has_type(value: Any, hint: Any) -> bool:
    origin = get_origin(hint) or hint
    if origin in (Union, UnionType):
        return any(_has_type(value, part) for part in get_args(hint))
    if origin is Literal:
        return value in get_args(hint)
    if origin is list:
        [item_hint] = get_args(hint)
        return isinstance(value, list) and all(_has_type(item, item_hint) for item in value)
    if origin in (int, float):
        # The numbers of numpy are of these kinds as well.
        kind = numbers.Integral if origin is int else numbers.Real
        return isinstance(value, kind) and not isinstance(value, bool) and math.isfinite(value)
    return isinstance(value, origin)


def require_complete(settings: Settings) -> None:
    """Raise `ConfigError` unless settings name all that a training from the command line needs.

    A training in Python gets its data and its evaluator as objects, so they may be empty there.
    """
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


def replace(settings: AnySettings, **changes: Any) -> AnySettings:
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
    """Return {name: value} of the settings that do not have their defaults.

    The fields of a dataclass that are no settings, such as a loss's model, are left out.
    """
    changed = {}
    for own_field in fields(settings):
        value = getattr(settings, own_field.name)
        if own_field.name in Settings.__dataclass_fields__ and value != get_default(own_field):
            changed[own_field.name] = value
    return changed


def to_dict(settings: TrainingSettings) -> dict[str, Any]:
    """Return {name: value} of all changed settings; the arguments of `replace` that make them."""
    changed = list_changed(settings)
    others = changed.pop("transformers", {})
    return {**changed, **others}


def select(settings: Any, names_of: type) -> dict[str, Any]:
    """Return {name: value} of the settings that a dataclass, ``names_of``, has as well."""
    names = {own_field.name for own_field in fields(settings)}
    return {
        setting.name: getattr(settings, setting.name)
        for setting in fields(names_of)
        if setting.name in names
    }


def find(key: str, value: Any = True) -> dict[str, Any]:
    """Return {name: default} of the settings with a value of a key of `option`."""
    found = {}
    for setting in fields(Settings):
        if setting.metadata[key] == value:
            found[setting.name] = get_default(setting)
    return found


def get_default(setting: dataclasses.Field[Any]) -> Any:
    """Return the default value of a dataclass field."""
    if setting.default_factory is not dataclasses.MISSING:
        return setting.default_factory()
    return setting.default


@functools.cache
def get_types_of_transformers() -> dict[str, str]:
    """Return {name: type as text} of the arguments of transformers that have no field here.

    They are read from the source of the classes, because importing the classes takes ten seconds.
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

    So the arguments of a loss are the fields of its settings: for type checkers and editors, in
    `help` and in `inspect.signature`.
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


def extend_arguments(base: type, settings_class: type) -> Any:
    """Return a dataclass with the fields of ``base`` and those settings that it does not have.

    It is a class for HfArgumentParser, for which all metadata of a field are arguments of argparse.
    """
    names_of_base = {argument.name for argument in fields(base)}
    hints = _get_type_hints(settings_class)
    added: list[tuple[str, Any, Any]] = []
    for setting in fields(settings_class):
        if setting.name in names_of_base or setting.name == "transformers":
            continue
        plain_field: Any = copy.copy(setting)
        plain_field.metadata = {"help": setting.metadata["help"].replace("%", "%%")}
        added.append((setting.name, hints[setting.name], plain_field))
    return dataclasses.make_dataclass(base.__name__, added, bases=(base,))


# Text: YAML files and the command line ------------------------------------------------------------


def read(argv: Sequence[str], command_options: Collection[str] = ()) -> dict[str, Any]:
    """Read ``[CONFIG.yaml ...] [--key value ...]``; return {name: value} of what is given.

    Later files override earlier ones, and the command line overrides all files. The values have the
    types of the fields: ``replace(Settings(), **read(argv))`` makes the settings and checks them.
    transformers itself checks the choices of its other arguments, when the training starts.

    Args:
        command_options: names of the command's other options, one of which may be misspelt.

    Raises:
        ConfigError: for a file that cannot be read or allows remote code, an unknown key, or a
            value of another type.
    """
    # Without defaults, the result has only what is given.
    parser = _Parser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    add_options(parser)
    for name, annotation in get_types_of_transformers().items():
        _add_option(parser, name, annotation)
    # Private: argparse has no other list. The options --no_NAME have no value, so 0 arguments.
    actions = {action.dest: action for action in parser._actions if action.nargs != 0}
    command_line = list(argv)
    given: dict[str, Any] = {}
    while command_line and not command_line[0].startswith("-"):
        given |= _read_yaml(command_line.pop(0), actions)
    namespace, unknown = parser.parse_known_args(command_line)
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


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}. `contaccum train --help` lists the options")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add an option for each setting to a parser, in the order of `GROUPS`."""
    for group in GROUPS:
        section = parser.add_argument_group((group.__doc__ or "").partition(".")[0])
        for setting in fields(group):
            text = setting.metadata["help"].replace("%", "%%")  # argparse formats it
            # By identity, because 0 equals False.
            is_shown = not any(setting.default is value for value in _DEFAULTS_NOT_SHOWN)
            if is_shown and "efault" not in text:
                text += f" Default: {str(setting.default).lower()}."
            _add_option(section, setting.name, str(setting.type), text)


def _add_option(parser: Any, name: str, annotation: str, help_text: str | None = None) -> None:
    """Add an option to a parser; ``annotation`` is its type as it is written in the source."""
    types = annotation.split(" | ")
    is_list = types[0].startswith("list[")
    if is_list:
        types = [types[0].removeprefix("list[").removesuffix("]")]
    type_name = next((parsed for parsed in _PARSERS if parsed in types), "str")
    keywords: dict[str, Any] = {"type": _PARSERS[type_name], "help": help_text}
    if name == "per_device_train_batch_size":
        keywords["type"] = _parse_int_or_auto
    if choices := get_choices(name):
        keywords["choices"] = choices
    else:
        keywords["metavar"] = type_name.upper()
    if is_list:
        keywords["nargs"] = "+"
    if type_name == "bool":
        keywords |= {"nargs": "?", "const": True}
        no_option = {"dest": name, "action": "store_false", "help": argparse.SUPPRESS}
        parser.add_argument(f"--no_{name}", **no_option)
    parser.add_argument(f"--{name}", **keywords)


def parse_bool(text: str) -> bool:
    """Return the value of an option that is true or false."""
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"must be true or false, got {text!r}")
    return text.lower() == "true"


def _parse_int_or_auto(text: str) -> int | str:
    if text.lower() == "auto":
        return "auto"
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number or auto, got {text!r}") from None


_PARSERS = {"bool": parse_bool, "int": int, "float": float, "str": str}
"""{type: parser of its values}. Of several types of an option, the first one here is parsed."""
_DEFAULTS_NOT_SHOWN = (None, False, "", dataclasses.MISSING)


def _read_yaml(name: str, actions: Mapping[str, argparse.Action]) -> dict[str, Any]:
    """Return {key: value} of a YAML file, with the types of the options in ``actions``."""
    path = Path(name)
    if not path.is_file():
        raise ConfigError(f"{name}: no such config file")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        location = f"{name}:{mark.line + 1}" if mark else name
        problem = getattr(error, "problem", None) or error
        raise ConfigError(f"{location}: not valid YAML ({problem})") from error
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
    if isinstance(value, (bool, dict, list)):
        return value
    return parse(str(value))  # YAML reads 1e-5 as a text, and 1 as an integer


def to_yaml(settings: TrainingSettings | Mapping[str, Any]) -> str:
    """Return settings, or {name: value}, as ``key: value`` lines, which `read` can read.

    Defaults of settings are left out. ``trust_remote_code`` becomes a comment, because only the
    command line can set it.
    """
    values = to_dict(settings) if isinstance(settings, TrainingSettings) else dict(settings)
    comment = ""
    if values.pop("trust_remote_code", False):
        comment = "# The model comes with code: add --trust_remote_code to the command line.\n"
    return comment + yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
