"""ContAccumTrainingArguments: the method, the bank and the batches, beside sentence-transformers' training arguments.

What cannot work together is refused before a model is loaded, by the table in ``rules``. The settings of the loss are
passed on by name, and checked by the loss itself. Nothing here touches a model or data.
"""

from __future__ import annotations

import inspect
import json
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from sentence_transformers import SentenceTransformerTrainingArguments
from transformers.trainer_utils import SaveStrategy

from contaccum.data.samplers import SET_SAMPLERS
from contaccum.errors import ConfigError, check_choice
from contaccum.files import redact_record
from contaccum.grad_norms import BALANCES
from contaccum.info_nce import BankedInfoNCE
from contaccum.training.rules import MACHINE_RULES, RULES, name_of, refuse

METHODS = ("in_batch", "grad_accum", "grad_cache", "contaccum", "pre_batch")
BANK_METHODS = ("contaccum", "pre_batch")
DEFAULT_BANK_SIZE = 1024
DEFAULT_TEMPERATURE = {"cos": 0.05, "dot": 1.0}
BANK_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


def option(default: Any, help_text: str, choices: tuple[str, ...] | None = None) -> Any:
    """A field with its default, what `--help` says of it, and the values it may have."""
    return field(default=default, metadata={"help": help_text, **({"choices": choices} if choices else {})})


@dataclass
class ContAccumTrainingArguments(SentenceTransformerTrainingArguments):
    """Arguments of :class:`ContAccumTrainer`: those of SentenceTransformerTrainingArguments, and these.

    A micro-batch is ``per_device_train_batch_size`` pairs, an update ``gradient_accumulation_steps`` of them, for
    every method: ``grad_cache`` turns them into one batch that is encoded a micro-batch at a time.

    Raises:
        ConfigError: for combinations that cannot work, naming both settings and the way out.
    """

    method: str = option(
        "contaccum",
        "in_batch: one batch per update. grad_accum: micro-batches, each with its own negatives. grad_cache: one "
        "large batch encoded twice, micro-batch by micro-batch. contaccum: micro-batches and two banks. pre_batch: "
        "micro-batches and the passage bank alone.",
        METHODS,
    )
    bank_size: int | None = option(None, f"Rows of each bank (contaccum, pre_batch). Default {DEFAULT_BANK_SIZE}.")
    query_bank_size: int | None = option(None, "Rows of the query bank: bank_size (default), or 0, which is pre_batch.")
    similarity: str | None = option(None, "cos or dot. Default: the model's own.", ("cos", "dot"))
    temperature: float | None = option(None, "Divides the scores. Default 0.05 with cos, 1.0 with dot.")
    normalize_by: str = option(
        "local",
        "local: row losses over the local rows, the full batch's gradient when nothing drifts. all: over local and "
        "bank rows, as in the paper.",
    )
    mask_duplicates: bool = option(
        True, "Do not treat known positives of a query as its negatives (contaccum, pre_batch)."
    )
    bank_hard_negatives: bool = option(True, "Keep hard negatives in the bank.")
    drift_compensation: str = option(
        "auto",
        "mean: banked entries move along with the mean of their tower. auto: and retire when they have drifted too "
        "far in spite of it. fresh: the bank is emptied after every update. none: as in the paper.",
    )
    bank_dtype: str | None = option(
        None, "Storage dtype of the bank. Default: that of the embeddings, float32 at least.", tuple(BANK_DTYPES)
    )
    gather_across_devices: bool | None = option(
        None,
        "Build the batch of all devices before the loss; with a bank, all then hold one and the same. Default: with a "
        "bank (contaccum, pre_batch) yes, else no.",
    )
    balance_grad_norms: str = option(
        "none",
        "geometric: scale the two towers' gradients to the geometric mean of their norms, smoothed over updates, "
        "before clipping. For what the two banks do not balance: pre_batch, frozen parts.",
        BALANCES,
    )
    learning_rate_scaling: str = option(
        "none",
        "Multiply learning_rate by (pairs per update / learning_rate_base_batch_size): linear, or its square root: "
        "sqrt.",
        ("none", "linear", "sqrt"),
    )
    learning_rate_base_batch_size: int = option(128, "Pairs per update at which learning_rate holds as given.")
    refresh_negatives_every: int | None = option(
        None,
        "Mine the hard negatives anew with the model in training, every so many updates, as ANCE does; and before the "
        "first where the data have none. Default: never.",
    )
    refresh_corpus: str | None = option(
        None, "Where to mine. Default: the corpus of a BEIR folder, else the positives of the data."
    )
    refresh_pool: int = option(30, "Negatives mined per query; each epoch samples as many as a row takes.")
    refresh_range_max: int | None = option(None, "Mine none beyond this rank. Default: ten times refresh_pool.")
    refresh_relative_margin: float = option(
        0.05, "Mine none that scores above (1 - this) of the positive's score, as it may be relevant."
    )
    # A sampler of the user's may be given too; for a parser it is a text.
    multi_dataset_batch_sampler: str = option(
        "proportional",
        "Several training sets. proportional: each batch of each once an epoch. round_robin: in turn, until one is "
        "used up. temperature: in proportion to size**(1/sampling_temperature). weights: as sampling_weights say.",
        SET_SAMPLERS,
    )
    sampling_temperature: float = option(
        2.0,
        "T: with multi_dataset_batch_sampler=temperature, sets are sampled in proportion to size**(1/T); 1 is "
        "proportional, and large ones come to equal shares.",
    )
    sampling_weights: dict | str | None = option(  # noqa: RUF009  # a field, as those above
        None,
        "Shares of micro-batches by the name of the training set, as {a: 2, b: 1}; 1 for sets not named. In "
        "train_data: {path: ..., weight: 2}.",
    )
    grad_cache_mini_batch_size: int | None = option(
        None, "Pairs encoded at once by grad_cache. Default: per_device_train_batch_size."
    )
    total_train_batch_size: int | None = option(
        None,
        "Pairs per update, on all devices. Given, gradient_accumulation_steps follows from it; "
        "per_device_train_batch_size=auto then finds the largest micro-batch that memory has room for.",
    )
    memory_limit_gb: float | None = option(
        None, "Use no more of the GPU's memory than this, in GB of 2^30 bytes, as if the card had no more."
    )
    max_skipped_updates: int = option(
        10, "Updates with a loss or gradient that is not finite to skip in a run; one more ends it."
    )
    resume_with_changes: bool = option(
        False,
        "Resume although the data, its order or the pairs per update are others than the checkpoint's: some pairs are "
        "then left out or repeated.",
    )
    early_stopping_patience: int | None = option(
        None, "Stop after so many evaluations in a row without a better metric_for_best_model. Default: never."
    )
    early_stopping_threshold: float = option(
        0.0, "With early_stopping_patience: better means better by more than this."
    )

    def __post_init__(self) -> None:
        self.finds_micro_batch = str(self.per_device_train_batch_size).lower() == "auto"
        if self.finds_micro_batch:
            self.per_device_train_batch_size = 1  # until the trainer has found it
        for name in ContAccumTrainingArguments.__annotations__:
            value, choices = getattr(self, name), self.__dataclass_fields__[name].metadata.get("choices")
            if choices and isinstance(value, str):
                check_choice(name, value, choices)
        self._take_set_sampler()
        refuse(RULES, a=self)
        if not torch.accelerator.is_available():
            self.use_cpu = True  # transformers takes bf16 for a GPU setting otherwise
        given = self.multi_dataset_batch_sampler
        if self.set_sampler in ("temperature", "weights"):
            self.multi_dataset_batch_sampler = "proportional"  # the base class knows no others
        super().__post_init__()
        if self.set_sampler is not None:
            self.multi_dataset_batch_sampler = given
        refuse(MACHINE_RULES, a=self)
        self._fit_sizes()
        if self.keeps_bank and self.bank_size is None:
            self.bank_size = DEFAULT_BANK_SIZE
        if self.method == "pre_batch":
            self.query_bank_size = 0
        BankedInfoNCE(**self.loss_settings("cos"))  # refuses what cannot work; nothing is allocated yet

    def loss_settings(self, model_similarity: str) -> dict[str, Any]:
        """The arguments of :class:`BankedInfoNCE`, by name, for a model whose own similarity is given."""
        settings = {name: getattr(self, name) for name in LOSS_SETTINGS}
        similarity = self.similarity or model_similarity
        return settings | {
            "bank_size": self.bank_size or 0,
            "bank_dtype": None if self.bank_dtype is None else BANK_DTYPES[self.bank_dtype],
            "similarity": similarity,
            "temperature": DEFAULT_TEMPERATURE[similarity] if self.temperature is None else self.temperature,
            "gather_across_devices": self.gathers,
        }

    def _take_set_sampler(self) -> None:
        """Settle ``set_sampler``: one of ``SET_SAMPLERS``, or None for a sampler of the user's."""
        if isinstance(self.sampling_weights, str):
            with suppress(ValueError):  # what is no mapping is refused by a rule
                self.sampling_weights = json.loads(self.sampling_weights)
        kind = getattr(self.multi_dataset_batch_sampler, "value", self.multi_dataset_batch_sampler)
        self.set_sampler = kind if isinstance(kind, str) else None
        if self.sampling_weights is not None and kind == "proportional":  # the default
            self.multi_dataset_batch_sampler = self.set_sampler = "weights"

    def _fit_sizes(self) -> None:
        """Any two of micro-batch, accumulation steps and pairs per update give the third."""
        n, steps, ranks, pairs = (
            self.per_device_train_batch_size,
            self.gradient_accumulation_steps,
            self.world_size,
            self.total_train_batch_size,
        )
        given = pairs is not None and (steps > 1 or self.method == "in_batch")
        if pairs is not None and (pairs < 1 or pairs % (n * ranks) or (given and n * steps * ranks != pairs)):
            raise ConfigError(
                f"total_train_batch_size={pairs} is not per_device_train_batch_size={n} x gradient_accumulation_steps"
                f"{f'={steps}' if given else ''} x {ranks} devices: change or drop one of them"
            )
        if pairs is not None:
            self.gradient_accumulation_steps = pairs // (n * ranks)
        self.total_train_batch_size = n * self.gradient_accumulation_steps * ranks
        if self.method == "grad_cache" and self.grad_cache_mini_batch_size is None:
            # One batch per update, encoded in micro-batches: what GradCache computes.
            self.grad_cache_mini_batch_size = n
            self.per_device_train_batch_size *= self.gradient_accumulation_steps
            self.gradient_accumulation_steps = 1

    def take_micro_batch(self, n: int) -> None:
        """From now on micro-batches of ``n`` pairs, and as many of them as an update's pairs need."""
        local = self.per_device_train_batch_size * self.gradient_accumulation_steps
        if local % n:
            raise ConfigError(f"micro-batches of {n} pairs do not come to {local} pairs per update and device")
        if self.method == "grad_cache":
            self.grad_cache_mini_batch_size = n
        else:
            self.per_device_train_batch_size, self.gradient_accumulation_steps = n, local // n
        self.finds_micro_batch = False

    def to_dict(self) -> dict[str, Any]:
        """As in transformers, which blanks its own tokens; nor are credentials of the environment or in URLs shown."""
        return redact_record(super().to_dict())

    @property
    def keeps_bank(self) -> bool:
        """Whether the method is one with a bank."""
        return self.method in BANK_METHODS

    @property
    def order_seed(self) -> int:
        """The seed of the order of data."""
        return self.seed if self.data_seed is None else self.data_seed

    @property
    def avoids_duplicates(self) -> bool:
        """Whether no text may occur twice in a batch."""
        return name_of(self.batch_sampler) in ("no_duplicates", "no_duplicates_hashed")

    @property
    def own_batch_sampler(self) -> bool:
        """Whether batches are made by ``group_by_label`` or by a sampler of the user's."""
        return not self.avoids_duplicates and name_of(self.batch_sampler) != "batch_sampler"

    @property
    def gathers(self) -> bool:
        """Whether the batch of all devices is built before the loss."""
        default = self.keeps_bank and self.world_size > 1
        return default if self.gather_across_devices is None else self.gather_across_devices

    @property
    def pairs_per_micro_batch(self) -> int:
        """Pairs whose activations are in memory at once, on one device."""
        return self.grad_cache_mini_batch_size or self.per_device_train_batch_size

    @property
    def scaled_learning_rate(self) -> float:
        """The learning rate after ``learning_rate_scaling``."""
        ratio = (self.total_train_batch_size or 1) / self.learning_rate_base_batch_size
        return self.learning_rate * {"none": 1.0, "linear": ratio, "sqrt": ratio**0.5}[self.learning_rate_scaling]

    @property
    def keeps_best(self) -> bool:
        """Whether anything depends on which evaluation was the best."""
        by_save = self.save_strategy == SaveStrategy.BEST
        return self.load_best_model_at_end or by_save or self.early_stopping_patience is not None


LOSS_SETTINGS = tuple(
    name
    for name in inspect.signature(BankedInfoNCE).parameters
    if name in ContAccumTrainingArguments.__dataclass_fields__
)
"""Arguments that are the loss's own, and are passed on to it by name."""
