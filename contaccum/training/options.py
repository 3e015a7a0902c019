"""Settings of `contaccum train` besides those of transformers, in groups.

Each setting is a dataclass field with its default, its line of help and, if they are limited, its
allowed values: ``option(default, help, choices)``. This module imports neither torch nor
transformers, so that `contaccum train --help` is quick. `contaccum.training.arguments` and
`contaccum.training.config` refuse combinations that cannot work; the loss checks its own settings.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import MISSING, Field, dataclass
from typing import Any

from contaccum.bank.settings import LossOptions
from contaccum.data import DATA_FORMATS, parse_columns, parse_training_sets
from contaccum.data.sampling import MISSING_NEGATIVES, POSITIVES_USED
from contaccum.errors import ConfigError
from contaccum.options import option

METHODS = (
    "in_batch",
    "grad_accum",
    "grad_cache",
    "contaccum",
    "pre_batch",
    "contaccum_cached",
    "query_side",
)
"""The methods differ in the source of a query's negatives.

- in_batch: the other passages of a batch. An update is a single batch.
- grad_accum: the other passages of a micro-batch. An update has several micro-batches.
- grad_cache: the other passages of all micro-batches of the update, which are encoded twice.
- contaccum: as grad_accum, and the past passages in a bank. The past queries in a second bank are
  contrasted with the new and past passages as well.
- pre_batch: as contaccum, without the bank of past queries.
- contaccum_cached: as grad_cache, with the banks of contaccum.
- query_side: all documents of a store. Their embeddings are fixed, and only queries are encoded.
"""
DEFAULT_BANK_SIZE = 1024
MOST_USED = (
    "output_dir",
    "num_train_epochs",
    "learning_rate",
    "warmup_steps",
    "bf16",
    "seed",
    "resume_from_checkpoint",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "save_strategy",
    "eval_strategy",
)
"""Settings of transformers that the help lists; `contaccum train --help all` lists all of them."""


@dataclass
class ModelArguments:
    """The encoder to train, and an adapter for it."""

    model: str = option(
        "", "Folder or hub name of a SentenceTransformer or of a transformers backbone."
    )
    guide: str | None = option(
        None, "A SentenceTransformer whose scores exclude false negatives; it is not trained."
    )
    tied: bool = option(
        True,
        "False: two encoders. True: one encoder for queries and passages; but a saved model with "
        "two encoders keeps both.",
    )
    pooling: str | None = option(
        None,
        "Pooling of a backbone. Default: chosen by its architecture.",
        ("cls", "mean", "lasttoken"),
    )
    normalize: bool = option(False, "Scale the embeddings of a backbone to length 1.")
    query_prompt: str | None = option(None, "Text put before every query.")
    passage_prompt: str | None = option(None, "Text put before every passage.")
    query_max_length: int | None = option(
        None, "Maximum tokens of a query. Default: the model's own, 32 for a backbone."
    )
    passage_max_length: int | None = option(
        None, "Maximum tokens of a passage. Default: the model's own, 256 for a backbone."
    )
    dropout: float | None = option(
        None, "Dropout of every layer. Default: the model's own. 0 is faster on a CPU."
    )
    freeze_word_embeddings: bool = option(
        False, "Do not train the word embeddings: half of a small encoder's weights."
    )
    attn_implementation: str | None = option(
        None, "Attention: eager, sdpa, ... On a CPU, eager is faster for short texts."
    )
    lora_r: int | None = option(
        None, "Train an adapter (LoRA) of this rank; the model's weights do not change."
    )
    lora_alpha: float | None = option(
        None, "The adapter's output is multiplied by alpha / r. Default: 2 r."
    )
    lora_dropout: float = option(0.0, "Dropout on the adapter's input.")
    lora_target_modules: list[str] | None = option(
        None, "Names of the layers with an adapter. Default: every linear layer."
    )
    load_in_4bit: bool = option(
        False, "Load the weights of the base model in 4 bits, with bitsandbytes."
    )
    merge_adapter: bool = option(
        False, "At the end, save a full model: the weights with the adapter added."
    )
    trust_remote_code: bool = option(False, "Run code that comes with the model.")


@dataclass
class DataArguments:
    """Training and evaluation data, in the formats of docs/data.md."""

    train_data: list[str] = option(
        [], 'A file, a folder or a Hugging Face data set; several: paths or {"path": ...}.'
    )
    data_format: str | None = option(
        None, "Format of the data. Default: detected from the content.", tuple(DATA_FORMATS)
    )
    data_columns: list[str] | None = option(
        None, "Names of the data's columns by role: query=question ..."
    )
    split: str = option("train", "Split of a BEIR folder, or of a Hugging Face data set.")
    num_hard_negatives: int = option(0, "Hard negatives per query.")
    positives: str | None = option(
        None,
        "Of several positives: sample one in each epoch, use the first, or use all.",
        POSITIVES_USED,
    )
    negatives_from: int | None = option(
        None, "Sample hard negatives from the first N of a record. Default: from all."
    )
    missing_negatives: str = option(
        "fill",
        "A record with too few negatives: fill up with passages of other records, or drop it.",
        MISSING_NEGATIVES,
    )
    on_bad_record: str = option(
        "stop", "A record that cannot be used: stop, or skip and count it.", ("stop", "skip")
    )
    eval_data: str | None = option(
        None, "Evaluation data: a BEIR folder, the name of a public set, or nanobeir."
    )
    eval_split: str = option("dev", "Split of eval_data.")
    eval_queries: int | None = option(
        None, "Number of queries of eval_data, always the same sample. Default: all."
    )
    eval_corpus_size: int | None = option(
        None, "Number of documents of eval_data, with all relevant ones. Default: all."
    )

    @property
    def sets(self) -> dict[str, dict[str, Any]]:
        """Options of each training set in ``train_data``, by the name of the set.

        An option that a set does not set itself has the value of these arguments.

        Raises:
            ConfigError: for invalid options.
        """
        names = (
            "split",
            "num_hard_negatives",
            "positives",
            "negatives_from",
            "missing_negatives",
            "data_format",
        )
        default_options = {name: getattr(self, name) for name in names}
        default_options["columns"] = parse_columns(self.data_columns)
        return parse_training_sets(self.train_data, default_options)


@dataclass
class MethodArguments:
    """The method, its bank and its updates."""

    method: str = option(
        "contaccum", "The source of an update's negatives; see docs/training.md.", METHODS
    )
    bank_size: int | None = option(
        None, f"Rows of each bank, for methods that have one. Default: {DEFAULT_BANK_SIZE}."
    )
    query_bank_size: int | None = option(
        None, "Rows of the query bank: bank_size or 0 (as pre_batch). Default: bank_size."
    )
    passage_store: str | None = option(
        None, "With query_side: the store of the corpus, written by contaccum encode."
    )
    corpus: str | None = option(
        None, "With query_side: a file or BEIR folder to encode, instead of passage_store."
    )
    missing: str = option(
        "stop",
        "Positives that the store lacks: stop, add them, or drop their rows.",
        ("stop", "add", "drop"),
    )
    total_train_batch_size: int | None = option(
        None, "Pairs per update on all devices; determines gradient_accumulation_steps."
    )
    gather_across_devices: bool | None = option(
        None, "Contrast the pairs of all devices. Default: true for methods with a bank."
    )
    max_skipped_updates: int = option(
        10, "Updates that may be skipped because they are not finite; one more ends the run."
    )
    early_stopping_patience: int | None = option(
        None, "Stop after this many evaluations in a row without improvement."
    )
    overwrite_output_dir: bool = option(
        False, "Allow a new run in a folder with another run; its checkpoints are removed."
    )


@dataclass
class LossArguments(LossOptions):
    """The loss, and the exclusion of false negatives."""

    similarity: str | None = option(
        None, "Similarity of embeddings. Default: the model's own.", ("cos", "dot")
    )
    temperature: float | None = option(
        None, "Divisor of the similarities. Default: 0.05 with cos, 1.0 with dot."
    )
    matryoshka_dims: list[int] | None = option(
        None,
        "Train embeddings truncated to each of these sizes. List the full size too: 384 128 64.",
    )


@dataclass
class DistillationArguments:
    """Distillation from a teacher."""

    distill: str | None = option(
        None, "Distillation loss for the teacher's scores in the data.", ("margin_mse", "kl")
    )
    distill_weight: float = option(
        1.0, "Weight of the distillation loss, which is added to the contrastive loss."
    )
    distill_temperature: float = option(
        1.0, "With kl: divisor of the scores of student and teacher."
    )


GROUPS = (ModelArguments, DataArguments, MethodArguments, LossArguments, DistillationArguments)
"""All groups of settings, in the order of `contaccum train --help`."""


def get_default(setting: Field[Any]) -> Any:
    """Return the default value of a dataclass field."""
    if setting.default_factory is not MISSING:
        return setting.default_factory()
    return setting.default


def refuse_without_effect(
    settings: Any, names: Iterable[str], needed: str, needed_in: Any = None
) -> None:
    """Raise `ConfigError` for a setting that has no effect because another one is not set.

    For example, ``distill_weight=0.5`` has no effect without ``distill``.

    Args:
        settings: a dataclass with the settings.
        names: names of the settings to check; a setting with its default value is accepted.
        needed: name of the setting without which they have no effect.
        needed_in: the dataclass with the needed setting. Default: ``settings``.
    """
    has_needed = bool(getattr(needed_in or settings, needed))
    for name in names:
        value = getattr(settings, name)
        is_default = value == get_default(settings.__dataclass_fields__[name])
        if not is_default and not has_needed:
            raise ConfigError(
                f"{name}={value} without {needed}: it has no effect. Set {needed}, or drop {name}"
            )
