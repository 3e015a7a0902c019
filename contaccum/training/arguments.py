"""ContAccumTrainingArguments: the method and the bank, on top of sentence-transformers' training arguments.

Combinations that cannot work are refused here, before a model is loaded. Nothing here touches a model or data.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from contaccum.data.batch_plan import LENGTH_WINDOW
from contaccum.drift import DRIFT_COMPENSATIONS
from contaccum.errors import ConfigError
from contaccum.grad_norms import BALANCES
from contaccum.settings import check_settings, check_sharding
from contaccum.training.engines import refuse_engines, refuse_first_fsdp
from contaccum.training.eval_arguments import EvaluationArguments
from contaccum.training.set_sampling import DEFAULT_SAMPLING_TEMPERATURE, SET_SAMPLERS, take_set_sampling
from contaccum.training.sizes import check_memory_limit, fit_sizes, keep_asked, pairs_per_update

METHODS = ("in_batch", "grad_accum", "grad_cache", "contaccum", "pre_batch")
BANK_METHODS = ("contaccum", "pre_batch")
DEFAULT_BANK_SIZE = 1024
DEFAULT_TEMPERATURE = {"cos": 0.05, "dot": 1.0}
BANK_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


@dataclass
class ContAccumTrainingArguments(EvaluationArguments):
    """Arguments of :class:`ContAccumTrainer`: those of SentenceTransformerTrainingArguments, and these.

    A micro-batch is ``per_device_train_batch_size`` pairs, an update ``gradient_accumulation_steps`` of them, for
    every method: ``grad_cache`` turns them into one batch that is encoded a micro-batch at a time.

    Raises:
        ConfigError: for combinations that cannot work, naming both settings and the way out.
    """

    method: str = field(
        default="contaccum",
        metadata={
            "help": "in_batch: one batch per update. grad_accum: micro-batches, each with its own negatives. "
            "grad_cache: one large batch encoded twice, micro-batch by micro-batch. contaccum: micro-batches and two "
            "banks. pre_batch: micro-batches and the passage bank alone.",
            "choices": METHODS,
        },
    )
    bank_size: int | None = field(
        default=None,
        metadata={"help": f"Rows of the passage bank (contaccum, pre_batch). Default {DEFAULT_BANK_SIZE}."},
    )
    query_bank_size: int | None = field(
        default=None, metadata={"help": "Rows of the query bank, at most bank_size. Default: bank_size."}
    )
    similarity: str | None = field(
        default=None, metadata={"help": "cos or dot. Default: the model's own.", "choices": ("cos", "dot")}
    )
    temperature: float | None = field(
        default=None, metadata={"help": "Divides the scores. Default 0.05 with cos, 1.0 with dot."}
    )
    normalize_by: str = field(
        default="local",
        metadata={
            "help": "local: row losses over the local rows, the full batch's gradient when nothing drifts. all: over "
            "local and bank rows, as in the paper.",
            "choices": ("local", "all"),
        },
    )
    mask_duplicates: bool = field(
        default=True,
        metadata={"help": "Do not treat known positives of a query as its negatives (contaccum, pre_batch)."},
    )
    bank_hard_negatives: bool = field(default=True, metadata={"help": "Keep hard negatives in the bank."})
    drift_compensation: str = field(
        default="auto",
        metadata={
            "help": "mean: banked entries move along with the mean of their tower. auto: and retire when they have "
            "drifted too far in spite of it. fresh: the bank is emptied after every update. none: as in the paper.",
            "choices": DRIFT_COMPENSATIONS,
        },
    )
    bank_dtype: str | None = field(
        default=None,
        metadata={"help": "Storage dtype of the bank. Default: that of the embeddings, float32 at least."},
    )
    bank_device: str | None = field(
        default=None,
        metadata={"help": "Where the bank lives. Default: with the model; cpu for banks that the GPU has no room for."},
    )
    gather_across_devices: bool | None = field(
        default=None,
        metadata={
            "help": "Build the batch of all devices before the loss; with a bank, all then hold one and the same. "
            "Default: with a bank (contaccum, pre_batch) yes, else no."
        },
    )
    shard_bank: bool = field(
        default=False,
        metadata={"help": "Keep on each of R devices 1/R of the bank's rows instead of all, for very large banks."},
    )
    balance_grad_norms: str = field(
        default="none",
        metadata={
            "help": "geometric: scale the two towers' gradients to the geometric mean of their norms, smoothed over "
            "updates, before clipping. For what the two banks do not balance: pre_batch, unequal banks, frozen parts.",
            "choices": BALANCES,
        },
    )
    learning_rate_scaling: str = field(
        default="none",
        metadata={
            "help": "Multiply learning_rate by (pairs per update / learning_rate_base_batch_size): linear, or its "
            "square root: sqrt.",
            "choices": ("none", "linear", "sqrt"),
        },
    )
    learning_rate_base_batch_size: int = field(
        default=128, metadata={"help": "Pairs per update at which learning_rate holds as given."}
    )
    topic_column: str | None = field(
        default=None,
        metadata={"help": "Column with a label for each row: batches are of one topic. It is not encoded."},
    )
    length_window: int | None = field(
        default=None,
        metadata={
            "help": "Micro-batches sorted by length together, with train_sampling_strategy=group_by_length. Default: "
            "those of an update if they are 8 or more, else of as many updates as make 16."
        },
    )
    refresh_negatives_every: int | None = field(
        default=None,
        metadata={
            "help": "Mine the hard negatives anew with the model in training, every so many updates, as ANCE does; and "
            "before the first where the data have none. Default: never."
        },
    )
    refresh_corpus: str | None = field(
        default=None,
        metadata={"help": "Where to mine. Default: the corpus of a BEIR folder, else the positives of the data."},
    )
    refresh_pool: int = field(
        default=30, metadata={"help": "Negatives mined per query; each epoch draws as many as a row takes."}
    )
    refresh_range_max: int | None = field(
        default=None, metadata={"help": "Mine none beyond this rank. Default: ten times refresh_pool."}
    )
    refresh_relative_margin: float = field(
        default=0.05,
        metadata={"help": "Mine none that scores above (1 - this) of the positive's score, as it may be relevant."},
    )
    # A sampler of the user's may be given too; for a parser it is a text.
    multi_dataset_batch_sampler: str = field(
        default="proportional",
        metadata={
            "help": "Several training sets. proportional: each batch of each once an epoch. round_robin: in turn, "
            "until one is used up. temperature: in proportion to size**(1/sampling_temperature). weights: as "
            "sampling_weights say.",
            "choices": SET_SAMPLERS,
        },
    )
    sampling_temperature: float = field(
        default=DEFAULT_SAMPLING_TEMPERATURE,
        metadata={
            "help": "T: with multi_dataset_batch_sampler=temperature, sets are sampled in proportion to size**(1/T); 1 "
            "is proportional, and large ones come to equal shares."
        },
    )
    sampling_weights: dict | str | None = field(
        default=None,
        metadata={
            "help": "Shares of micro-batches by the name of the training set, as {a: 2, b: 1}; 1 for sets not named. "
            "In train_data: {path: ..., weight: 2}."
        },
    )
    grad_cache_mini_batch_size: int | None = field(
        default=None,
        metadata={"help": "Pairs encoded at once by grad_cache. Default: per_device_train_batch_size."},
    )

    # Given, or else what the sizes come to: always read as pairs per update. See the property at the end of this file.
    total_train_batch_size: int | None = field(
        default=None,
        metadata={
            "help": "Pairs per update, on all devices. Given, gradient_accumulation_steps follows from it; "
            "per_device_train_batch_size=auto then finds the largest micro-batch that memory has room for."
        },
    )
    memory_limit_gb: float | None = field(
        default=None,
        metadata={
            "help": "Use no more of the GPU's memory than this, in GB of 2^30 bytes, as if the card had no more."
        },
    )
    max_skipped_updates: int = field(
        default=10,
        metadata={"help": "Updates with a loss or gradient that is not finite to skip in a run; one more ends it."},
    )
    resume_with_changes: bool = field(
        default=False,
        metadata={
            "help": "Resume although the data, its order or the pairs per update are others than the checkpoint's: "
            "some pairs are then left out or repeated."
        },
    )

    def __post_init__(self) -> None:
        refuse_engines(self.deepspeed)
        own_sampler = take_set_sampling(self)
        self.finds_micro_batch = str(self.per_device_train_batch_size).lower() == "auto"
        if self.finds_micro_batch:
            self.per_device_train_batch_size = 1  # until the trainer has found it
        self._check()
        if not torch.accelerator.is_available():
            self.use_cpu = True  # transformers takes bf16 for a GPU setting otherwise
        super().__post_init__()
        self.multi_dataset_batch_sampler = own_sampler or self.multi_dataset_batch_sampler
        refuse_first_fsdp(self.fsdp_plugin_args)
        if self.fp16 and self.device.type == "cpu":
            raise ConfigError("fp16=true needs an accelerator; on a CPU set bf16=true, or neither")
        if self.method in BANK_METHODS and self.n_gpu > 1:
            raise ConfigError(
                f"method={self.method} in one process over {self.n_gpu} GPUs would use torch's DataParallel, whose "
                "replicas forget what they put into the bank: start one process per GPU with torchrun, or show one GPU "
                "with CUDA_VISIBLE_DEVICES"
            )
        fit_sizes(self)
        check_memory_limit(self)
        if self.method == "grad_cache" and self.grad_cache_mini_batch_size is None:
            # One batch per update, encoded in micro-batches: what GradCache computes.
            self.grad_cache_mini_batch_size = self.per_device_train_batch_size
            self.per_device_train_batch_size *= self.gradient_accumulation_steps
            self.gradient_accumulation_steps = 1
        if self.bank_size is None:
            self.bank_size = DEFAULT_BANK_SIZE if self.method in BANK_METHODS else 0
        if self.method == "pre_batch":
            self.query_bank_size = 0

    def _check(self) -> None:
        choices: dict[str, tuple[str | None, tuple[Any, ...]]] = {
            "method": (self.method, METHODS),
            "similarity": (self.similarity, (None, "cos", "dot")),
            "bank_dtype": (self.bank_dtype, (None, *BANK_DTYPES)),
            "balance_grad_norms": (self.balance_grad_norms, BALANCES),
            "learning_rate_scaling": (self.learning_rate_scaling, ("none", "linear", "sqrt")),
        }
        for name, (value, allowed) in choices.items():
            if value not in allowed:
                shown = ", ".join(str(x) for x in allowed if x is not None)
                raise ConfigError(f"{name} must be one of {shown}, got {value!r}")
        for name in ("per_device_train_batch_size", "gradient_accumulation_steps", "learning_rate_base_batch_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.method == "in_batch" and self.gradient_accumulation_steps > 1:
            raise ConfigError(
                f"method=in_batch with gradient_accumulation_steps={self.gradient_accumulation_steps}: an in-batch "
                "update is one batch. Set gradient_accumulation_steps=1, or method=grad_accum"
            )
        if self.method not in BANK_METHODS:
            for name in ("bank_size", "query_bank_size", "shard_bank"):
                if getattr(self, name):
                    raise ConfigError(
                        f"method={self.method} with {name}={getattr(self, name)}: only {' and '.join(BANK_METHODS)} "
                        f"keep a bank. Drop {name}, or set method=contaccum"
                    )
        if self.method == "pre_batch" and self.query_bank_size:
            raise ConfigError(
                f"method=pre_batch with query_bank_size={self.query_bank_size}: pre_batch is the passage bank alone. "
                "Drop query_bank_size, or set method=contaccum"
            )
        if self.method != "grad_cache" and self.grad_cache_mini_batch_size is not None:
            raise ConfigError(
                f"method={self.method} with grad_cache_mini_batch_size={self.grad_cache_mini_batch_size}: only "
                "grad_cache encodes in mini-batches. Drop it, or set method=grad_cache"
            )
        if self.fp16 and self.bf16:
            raise ConfigError("fp16=true with bf16=true: choose one")
        self._check_refresh()
        if self.max_skipped_updates < 0:
            raise ConfigError(f"max_skipped_updates must be at least 0, got {self.max_skipped_updates}")
        self._check_batches()
        check_sharding(self.shard_bank, self.gather_across_devices, self.bank_device)
        bank_size = DEFAULT_BANK_SIZE if self.bank_size is None else self.bank_size
        check_settings(
            bank_size,
            self.query_bank_size,
            1.0 if self.temperature is None else self.temperature,
            self.similarity or "cos",
            self.normalize_by,
            self.drift_compensation,
        )

    def _check_refresh(self) -> None:
        if self.refresh_negatives_every is None:
            for name in ("refresh_corpus", "refresh_pool", "refresh_range_max", "refresh_relative_margin"):
                if getattr(self, name) != type(self).__dataclass_fields__[name].default:
                    raise ConfigError(
                        f"{name}={getattr(self, name)} without refresh_negatives_every: nothing is mined. Set it to a "
                        f"number of updates, or drop {name}"
                    )
            return
        if self.refresh_negatives_every < 1:
            raise ConfigError(
                f"refresh_negatives_every must be at least 1 update, got {self.refresh_negatives_every}; drop it to "
                "keep the negatives of the data"
            )
        if self.fsdp:
            raise ConfigError(
                "refresh_negatives_every with fsdp: one rank mines, and would need the whole model. Drop one of them"
            )

    def _check_batches(self) -> None:
        strategy = str(getattr(self, "train_sampling_strategy", "random"))
        if strategy not in ("random", "group_by_length"):
            raise ConfigError(
                f"train_sampling_strategy={strategy}: batches are shuffled here. Set it to random or group_by_length"
            )
        if self.length_window is not None and self.length_window < 2:
            raise ConfigError(f"length_window must be at least 2 batches, got {self.length_window}")
        asked = [f"topic_column={self.topic_column}"] if self.topic_column else []
        asked += ["group_by_length"] if self.groups_by_length else []
        if asked and self.own_batch_sampler:
            shown = getattr(self.batch_sampler, "value", getattr(self.batch_sampler, "__name__", self.batch_sampler))
            raise ConfigError(
                f"batch_sampler={shown} with {asked[0]}: that sampler makes its own batches. Drop {asked[0]}, or set "
                "batch_sampler=batch_sampler or no_duplicates"
            )
        whole = self.gradient_accumulation_steps if self.method == "grad_cache" else 1
        if asked and self.per_device_train_batch_size * whole == 1 and not self.finds_micro_batch:
            raise ConfigError(
                f"per_device_train_batch_size=1 with {asked[0]}: a batch of one row has nothing to group. Raise "
                f"per_device_train_batch_size, or drop {asked[0]}"
            )

    @property
    def groups_by_length(self) -> bool:
        """Whether rows of similar length come together; older versions of transformers call it ``group_by_length``."""
        strategy = getattr(self, "train_sampling_strategy", None)
        return strategy == "group_by_length" or getattr(self, "group_by_length", False) is True

    @property
    def lengths_sorted(self) -> int:
        """Micro-batches sorted by length together: whole updates, which are then samples of all lengths."""
        k = self.gradient_accumulation_steps
        return self.length_window or (k if k >= LENGTH_WINDOW // 2 else -(-LENGTH_WINDOW // k) * k)

    @property
    def avoids_duplicates(self) -> bool:
        """Whether no text may occur twice in a batch."""
        return getattr(self.batch_sampler, "value", self.batch_sampler) in ("no_duplicates", "no_duplicates_hashed")

    @property
    def set_sampler(self) -> str | None:
        """How several sets are sampled, one of ``SET_SAMPLERS``; None for a sampler of the user's."""
        kind = getattr(self.multi_dataset_batch_sampler, "value", self.multi_dataset_batch_sampler)
        return kind if isinstance(kind, str) else None

    @property
    def own_batch_sampler(self) -> bool:
        """Whether batches are made by ``group_by_label`` or by a sampler of the user's."""
        kind = getattr(self.batch_sampler, "value", self.batch_sampler)
        return kind not in ("batch_sampler", "no_duplicates", "no_duplicates_hashed")

    @property
    def gathers(self) -> bool:
        """Whether the batch of all devices is built before the loss."""
        default = self.method in BANK_METHODS and self.world_size > 1
        return default if self.gather_across_devices is None else self.gather_across_devices

    @property
    def pairs_per_micro_batch(self) -> int:
        """Pairs whose activations are in memory at once, on one device."""
        return self.grad_cache_mini_batch_size or self.per_device_train_batch_size

    @property
    def scaled_learning_rate(self) -> float:
        """The learning rate after ``learning_rate_scaling``."""
        ratio = pairs_per_update(self) / self.learning_rate_base_batch_size
        factor = {"none": 1.0, "linear": ratio, "sqrt": ratio**0.5}[self.learning_rate_scaling]
        return self.learning_rate * factor


# Not in the class: there it would be taken for the field's default.
ContAccumTrainingArguments.total_train_batch_size = property(pairs_per_update, keep_asked)  # type: ignore[assignment]
