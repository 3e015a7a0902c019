"""The settings of `contaccum train` that are not transformers', in groups.

Each has its default and one line of help. Importing this module loads neither torch nor
transformers, so that `contaccum train --help` is quick. `arguments` and `config` refuse what cannot
work together; the loss checks its own settings.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from contaccum.bank.settings import LossOptions
from contaccum.data import DATA_FORMATS, parse_columns, parse_training_sets
from contaccum.data.selection import MISSING_NEGATIVES, POSITIVES_USED
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
"""The settings of transformers that `--help` names."""


@dataclass
class ModelArguments:
    """The encoder to train, or an adapter beside its weights."""

    model: str = option(
        "", "A folder or hub name: a SentenceTransformer, or a transformers backbone."
    )
    guide: str | None = option(
        None, "A SentenceTransformer that says which texts are no negatives; it stays as it is."
    )
    tied: bool = option(True, "One encoder for queries and passages, or two.")
    pooling: str | None = option(
        None, "For a backbone. Default: by architecture.", ("cls", "mean", "lasttoken")
    )
    normalize: bool = option(False, "For a backbone: scale embeddings to length 1.")
    query_prompt: str | None = option(None, "Put before every query.")
    passage_prompt: str | None = option(None, "Put before every passage.")
    query_max_length: int | None = option(
        None, "Tokens of a query. Default: the model's own, 32 for a backbone."
    )
    passage_max_length: int | None = option(
        None, "Tokens of a passage. Default: the model's own, 256 for a backbone."
    )
    dropout: float | None = option(
        None, "Of every layer. Default: the model's own. 0 is faster on a CPU."
    )
    freeze_word_embeddings: bool = option(
        False, "Do not train them: half of a small encoder's weights."
    )
    attn_implementation: str | None = option(
        None, "eager, sdpa, ... On a CPU, eager is faster for short texts."
    )
    lora_r: int | None = option(
        None, "Train an adapter (LoRA) of this rank, and keep the model as it is."
    )
    lora_alpha: float | None = option(None, "The adapter counts alpha / r times. Default: 2 r.")
    lora_dropout: float = option(0.0, "Of what the adapter reads.")
    lora_target_modules: list[str] | None = option(
        None, "Layers with an adapter. Default: every linear one."
    )
    load_in_4bit: bool = option(
        False, "Hold the weights beside an adapter in 4 bits, by bitsandbytes."
    )
    merge_adapter: bool = option(
        False, "Save a full model in the end: the weights with the adapter added."
    )
    trust_remote_code: bool = option(False, "Run code that comes with the model.")


@dataclass
class DataArguments:
    """Data to train on, and to evaluate on meanwhile; docs/data.md has the formats."""

    train_data: list[str] = option(
        [], "A folder, a file or a Hugging Face data set; or several, paths or {path: ...}."
    )
    data_format: str | None = option(
        None, "Default: detected from the content.", tuple(DATA_FORMATS)
    )
    data_columns: list[str] | None = option(None, "The data's names of fields: query=question ...")
    split: str = option("train", "Of a BEIR or MS MARCO folder, or of a Hugging Face data set.")
    num_hard_negatives: int = option(0, "Hard negatives per query to use.")
    positives: str | None = option(
        None, "Of several: draw one in each epoch, the first, or all.", POSITIVES_USED
    )
    negatives_from: int | None = option(
        None, "Sample hard negatives from the first so many of a record. Default: all."
    )
    missing_negatives: str = option(
        "fill", "Fill up with others' passages, or drop the record.", MISSING_NEGATIVES
    )
    on_bad_record: str = option(
        "stop", "At a record that cannot be used; skip counts them.", ("stop", "skip")
    )
    eval_data: str | None = option(
        None, "A BEIR folder, the name of a public set, or nanobeir, to evaluate on."
    )
    eval_split: str = option("dev", "Of eval_data: which judgements.")
    eval_queries: int | None = option(
        None, "Evaluate on so many of its queries, the same each time. Default: all."
    )
    eval_corpus_size: int | None = option(
        None, "Search among so many of its documents, all relevant ones included."
    )

    @property
    def sets(self) -> dict[str, dict[str, Any]]:
        """The options of reading each training set, by its name; `ConfigError` for invalid ones."""
        names = (
            "split",
            "num_hard_negatives",
            "positives",
            "negatives_from",
            "missing_negatives",
            "data_format",
        )
        common = {name: getattr(self, name) for name in names}
        return parse_training_sets(
            self.train_data, common | {"columns": parse_columns(self.data_columns)}
        )


@dataclass
class MethodArguments:
    """The method, its bank and its updates."""

    method: str = option(
        "contaccum", "How an update gets its negatives; see docs/training.md.", METHODS
    )
    bank_size: int | None = option(
        None, f"Rows of each bank, for methods that have one. Default: {DEFAULT_BANK_SIZE}."
    )
    query_bank_size: int | None = option(
        None, "Rows of the query bank: bank_size (default), or 0, which is pre_batch."
    )
    passage_store: str | None = option(
        None, "With query_side: embeddings of the corpus, written by contaccum encode."
    )
    corpus: str | None = option(
        None, "With query_side: a file or BEIR folder to encode into output_dir instead."
    )
    missing: str = option(
        "stop",
        "Positives that the store lacks: stop, add them, or drop their pairs.",
        ("stop", "add", "drop"),
    )
    total_train_batch_size: int | None = option(
        None, "Pairs per update, on all devices; the steps follow from it."
    )
    gather_across_devices: bool | None = option(
        None, "One batch, and bank, of all devices. Default: with a bank."
    )
    max_skipped_updates: int = option(
        10, "Updates that are not finite to skip in a run; one more ends it."
    )
    early_stopping_patience: int | None = option(
        None, "Stop after so many evaluations in a row without a better one."
    )
    overwrite_output_dir: bool = option(
        False, "Train anew where another run lies: its checkpoints are removed."
    )


@dataclass
class LossArguments(LossOptions):
    """The loss, and which texts are no negatives."""

    similarity: str | None = option(None, "Default: the model's own.", ("cos", "dot"))
    temperature: float | None = option(
        None, "Divides the scores. Default: 0.05 with cos, 1.0 with dot."
    )
    matryoshka_dims: list[int] | None = option(
        None, "Train the first so many numbers of embeddings too: 384 128 64."
    )


@dataclass
class NegativesArguments:
    """Teachers, and hard negatives that are mined while training."""

    distill: str | None = option(
        None, "Learn from the teacher's scores in the data too.", ("margin_mse", "kl")
    )
    distill_weight: float = option(
        1.0, "Of the distillation term, which is added to the contrastive loss."
    )
    distill_temperature: float = option(1.0, "With kl: divides the scores of student and teacher.")
    refresh_negatives_every: int | None = option(
        None, "Updates after which hard negatives are mined anew."
    )
    refresh_corpus: str | None = option(
        None, "Where to mine. Default: a BEIR folder's corpus, else the positives."
    )
    refresh_pool: int = option(
        30, "Negatives mined per query; each epoch samples as many as a row takes."
    )
    refresh_range_max: int | None = option(
        None, "Mine none beyond this rank. Default: ten times refresh_pool."
    )
    refresh_relative_margin: float = option(
        0.05, "Mine none that scores above (1 - this) of the positive's score."
    )


GROUPS = (ModelArguments, DataArguments, MethodArguments, LossArguments, NegativesArguments)
"""All groups, in the order of `--help`."""
