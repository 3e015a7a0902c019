"""ContAccumTrainingArguments: the method, the bank and the batches of a run.

Combinations that cannot work are refused here, before a model is loaded. The settings of the loss
are passed to it by name, and the loss checks them itself. This module loads neither models nor
data. `contaccum.training.options` declares the options, and describes the methods.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

import torch
from sentence_transformers import SentenceTransformerTrainingArguments
from transformers.integrations import get_available_reporting_integrations
from transformers.trainer_utils import SaveStrategy

from contaccum.bank.settings import DEFAULT_TEMPERATURE, LossOptions, LossSettings
from contaccum.errors import ConfigError, check_choice
from contaccum.files import redact
from contaccum.losses.distillation import Distillation
from contaccum.training.engines import configure_deepspeed, require_deepspeed
from contaccum.training.options import (
    DEFAULT_BANK_SIZE,
    DistillationArguments,
    LossArguments,
    MethodArguments,
    get_default,
    refuse_without_effect,
)

BANK_METHODS = ("contaccum", "pre_batch", "contaccum_cached")
"""Methods with a bank of past embeddings."""
CACHED_METHODS = ("grad_cache", "contaccum_cached")
"""Methods with a gradient cache: the pairs of an update are one batch, which is encoded twice."""

_METHODS_WITH_SETTING = {
    "bank_size": BANK_METHODS,
    "query_bank_size": ("contaccum", "contaccum_cached"),
}
"""The only methods that accept each of these settings."""
BANK_SETTINGS = (
    "bank_size",
    "query_bank_size",
    "bank_hard_negatives",
    "bank_weight",
    "normalize_by",
    "drift_compensation",
)
"""Settings of the loss that have no effect without a bank."""
QUERY_SIDE_SETTINGS = ("passage_store", "corpus", "missing")
"""Settings that only query-side training has."""
DISTILL_SETTINGS = ("distill", "distill_weight", "distill_temperature")
"""The arguments of `Distillation`, in its order."""


@dataclass
class ContAccumTrainingArguments(
    DistillationArguments, LossArguments, MethodArguments, SentenceTransformerTrainingArguments
):
    """Arguments of `ContAccumTrainer`, which extend SentenceTransformerTrainingArguments.

    With every method, the user sets the pairs of a micro-batch with ``per_device_train_batch_size``
    and the micro-batches of an update with ``gradient_accumulation_steps``. The methods
    ``grad_cache`` and ``contaccum_cached`` join the micro-batches of an update into one batch, and
    encode it one micro-batch at a time; the two arguments are then changed to the size of the batch
    and 1. Every setting that needs no bank can be used with every method but ``query_side``.

    Raises:
        ConfigError: for combinations that cannot work; the message names both settings.
    """

    def __post_init__(self) -> None:
        batch_size = str(self.per_device_train_batch_size).lower()
        self.has_auto_micro_batch = batch_size == "auto"
        if self.has_auto_micro_batch:
            self.per_device_train_batch_size = 1  # until the trainer has found the size that fits
        if self.save_strategy == SaveStrategy.BEST and self.metric_for_best_model is None:
            # transformers does the same for load_best_model_at_end only.
            self.metric_for_best_model = "loss"
        # These checks come before transformers' own, whose messages do not name the way out.
        self._check_choices()
        self._check_method()
        self._check_updates()
        self._check_evaluation()
        self._check_engine()
        if not torch.accelerator.is_available():
            self.use_cpu = True  # otherwise transformers refuses bf16 without a GPU
        super().__post_init__()  # it determines the device and the number of ranks
        self._check_machine()
        self._make_sizes_consistent()
        if self.deepspeed_plugin is not None:
            configure_deepspeed(
                self.deepspeed_plugin,
                self.per_device_train_batch_size,
                self.gradient_accumulation_steps,
                self.world_size,
                self.max_grad_norm,
            )
        if self.has_bank and self.bank_size is None:
            self.bank_size = DEFAULT_BANK_SIZE
        if self.method == "pre_batch":
            self.query_bank_size = 0
        # These two objects are created only because their constructors check the settings. The
        # similarity of the model, which is not loaded yet, does not change the result.
        settings = self.make_loss_settings("cos")
        distill_settings = [settings.pop(name) for name in DISTILL_SETTINGS]
        LossSettings(**settings)
        if self.distill is not None:
            Distillation(*distill_settings)

    def _check_choices(self) -> None:
        """Check the value of each setting that has a fixed set of choices."""
        for group in (MethodArguments, LossArguments, DistillationArguments):
            for setting in fields(group):
                choices = setting.metadata.get("choices")
                value = getattr(self, setting.name)
                if choices and value is not None:
                    check_choice(setting.name, value, choices)

    def make_loss_settings(self, model_similarity: str) -> dict[str, Any]:
        """Return the fields of `LossSettings` and the arguments of `Distillation`, by name.

        Args:
            model_similarity: ``"cos"`` or ``"dot"``, used if the user has not set ``similarity``.
        """
        settings = {name: getattr(self, name) for name in LOSS_SETTINGS}
        similarity = self.similarity or model_similarity
        temperature = self.temperature
        if temperature is None:
            temperature = DEFAULT_TEMPERATURE[similarity]
        settings["bank_size"] = self.bank_size or 0
        settings["similarity"] = similarity
        settings["temperature"] = temperature
        settings["gather_across_devices"] = self.is_gathered
        return settings

    def _check_method(self) -> None:
        """Refuse settings that the method does not have."""
        for name, methods in _METHODS_WITH_SETTING.items():
            value = getattr(self, name)
            if value and self.method not in methods:
                raise ConfigError(
                    f"method={self.method} with {name}={value}: only the methods "
                    f"{' and '.join(methods)} have it. Drop {name}"
                )
        refused: Iterable[str] = QUERY_SIDE_SETTINGS
        if self.method == "query_side":
            if (self.passage_store is None) == (self.corpus is None):
                raise ConfigError(
                    "method=query_side: set passage_store (written by contaccum encode) or corpus "
                    "(a file or folder to encode), one of them"
                )
            loss_options = [setting.name for setting in fields(LossOptions)]
            refused = [*loss_options, "gather_across_devices", "matryoshka_dims", "distill"]
        for name in refused:
            value = getattr(self, name)
            if value != get_default(self.__dataclass_fields__[name]):
                raise ConfigError(
                    f"method={self.method} with {name}={value}: the method has no such setting. "
                    f"Drop {name}"
                )
        refuse_without_effect(self, DISTILL_SETTINGS[1:], "distill")

    def _check_updates(self) -> None:
        """Refuse runs without updates, and updates without the pairs that they should have."""
        if self.max_steps == 0:  # transformers would train for num_train_epochs
            raise ConfigError(
                "max_steps=0: set the number of updates, or drop it to train for num_train_epochs"
            )
        if self.num_train_epochs <= 0 and self.max_steps < 0:
            raise ConfigError(
                f"num_train_epochs={self.num_train_epochs:g}: set it above 0, or set max_steps"
            )
        if self.learning_rate <= 0:
            raise ConfigError(f"learning_rate={self.learning_rate:g}: set it above 0")
        is_auto = self.has_auto_micro_batch
        if self.method == "in_batch" and (is_auto or self.gradient_accumulation_steps > 1):
            raise ConfigError(
                "method=in_batch with gradient_accumulation_steps or "
                "per_device_train_batch_size=auto: its update is a single batch. Drop them, or set "
                "method=grad_accum"
            )
        if self.auto_find_batch_size:
            raise ConfigError(
                "auto_find_batch_size: it would change the pairs per update. Set "
                "per_device_train_batch_size=auto instead, which does not"
            )
        if is_auto and self.total_train_batch_size is None:
            raise ConfigError(
                "per_device_train_batch_size=auto: set the number of pairs per update with "
                "total_train_batch_size"
            )

    def _check_evaluation(self) -> None:
        """Refuse early stopping without evaluation, and a best model without a checkpoint."""
        if self.early_stopping_patience is not None and get_name(self.eval_strategy) == "no":
            raise ConfigError(
                "early_stopping_patience with eval_strategy=no: set eval_strategy and eval_steps"
            )
        # transformers requires equal strategies, but accepts evaluations between two checkpoints.
        eval_steps = self.eval_steps or self.logging_steps  # as in transformers
        have_steps = get_name(self.save_strategy) == get_name(self.eval_strategy) == "steps"
        if self.load_best_model_at_end and have_steps and self.save_steps != eval_steps:
            raise ConfigError(
                f"load_best_model_at_end with save_steps={self.save_steps:g} and "
                f"eval_steps={eval_steps:g}: the best model may have no checkpoint. Set "
                "save_strategy=best, or equal steps"
            )

    def _check_engine(self) -> None:
        """Refuse settings that FSDP or DeepSpeed cannot work with."""
        engine = self._get_requested_engine()
        if engine is None:
            return
        if self.method == "query_side":
            raise ConfigError(
                f"method=query_side with {engine}: it is not supported. Drop {engine}"
            )
        if self.has_auto_micro_batch:
            raise ConfigError(
                f"per_device_train_batch_size=auto with {engine}: set per_device_train_batch_size "
                "to a number"
            )
        if engine != "deepspeed":
            return
        if self.method in CACHED_METHODS:
            raise ConfigError(
                f"method={self.method} with deepspeed: DeepSpeed allows only one backward pass per "
                "micro-step, and a gradient cache needs several. Set fsdp=true instead"
            )
        if self.fp16:
            raise ConfigError(
                "fp16=true with deepspeed: DeepSpeed scales the loss itself, so that the logged "
                "gradient norms would be scaled too. Set bf16=true"
            )
        require_deepspeed()

    def _get_requested_engine(self) -> str | None:
        """Return "deepspeed" or "fsdp" if the arguments or `accelerate launch` have enabled it."""
        for name in ("deepspeed", "fsdp"):
            launcher_value = os.environ.get(f"ACCELERATE_USE_{name.upper()}", "")
            if getattr(self, name) or launcher_value.lower() == "true":
                return name
        return None

    def _check_machine(self) -> None:
        """Refuse settings that need other hardware or packages than this machine has."""
        trackers = set(get_available_reporting_integrations())
        missing = sorted(set(self.report_to or ()) - trackers)
        if missing:
            raise ConfigError(
                f"report_to={', '.join(missing)}: not a tracker of transformers, or not installed. "
                "Install it, or drop it from report_to"
            )
        fsdp_config = self.fsdp_plugin_args or {}
        fsdp_version = fsdp_config.get("fsdp_version") or os.environ.get("FSDP_VERSION") or 2
        if int(fsdp_version) != 2:
            raise ConfigError("FSDP version 1 is not supported: set version: 2 in fsdp_config")
        if self.fp16 and self.device.type == "cpu":
            raise ConfigError("fp16=true needs an accelerator. On a CPU set bf16=true")
        if self.n_gpu > 1:
            raise ConfigError(
                f"one process with {self.n_gpu} GPUs: DataParallel would multiply the pairs per "
                "update and lose the bank. Start one process per GPU with torchrun, or make only "
                "one GPU visible with CUDA_VISIBLE_DEVICES"
            )

    def _make_sizes_consistent(self) -> None:
        """Make the sizes of micro-batch and update consistent.

        Pairs per update (``total_train_batch_size``) = pairs per micro-batch x accumulation steps x
        ranks. If the user has set the pairs per update, the steps are computed from them.
        """
        micro_batch = self.per_device_train_batch_size
        num_steps = self.gradient_accumulation_steps
        num_ranks = self.world_size
        num_pairs = self.total_train_batch_size
        if num_pairs is not None:
            # 1 is the default of the steps, so the user may not have set it; with in_batch, it is
            # the only possible value. With an automatic micro-batch, the steps are computed anyway.
            sets_steps = num_steps > 1 and not self.has_auto_micro_batch
            has_fixed_steps = sets_steps or self.method == "in_batch"
            is_multiple = num_pairs >= 1 and num_pairs % (micro_batch * num_ranks) == 0
            disagrees = has_fixed_steps and micro_batch * num_steps * num_ranks != num_pairs
            if not is_multiple or disagrees:
                shown_steps = f"={num_steps}" if has_fixed_steps else ""
                raise ConfigError(
                    f"total_train_batch_size={num_pairs} is not per_device_train_batch_size="
                    f"{micro_batch} x gradient_accumulation_steps{shown_steps} x {num_ranks} "
                    "devices: change or drop one of them"
                )
            num_steps = num_pairs // (micro_batch * num_ranks)
            self.gradient_accumulation_steps = num_steps
        self.total_train_batch_size = micro_batch * num_steps * num_ranks
        # With a gradient cache, one batch is a whole update: 16 steps of 8 pairs become one step of
        # 128 pairs, of which the cache encodes 8 at a time.
        self._pairs_encoded_at_once: int | None = None
        if self.has_gradient_cache:
            self._pairs_encoded_at_once = micro_batch
            self.per_device_train_batch_size = micro_batch * num_steps
            self.gradient_accumulation_steps = 1

    def set_micro_batch_size(self, num_pairs: int) -> None:
        """Set the pairs per micro-batch; the pairs per update stay the same."""
        if self.has_gradient_cache:
            self._pairs_encoded_at_once = num_pairs
        else:
            pairs_per_update = self.per_device_train_batch_size * self.gradient_accumulation_steps
            self.gradient_accumulation_steps = pairs_per_update // num_pairs
            self.per_device_train_batch_size = num_pairs
        self.has_auto_micro_batch = False

    def to_dict(self) -> dict[str, Any]:
        """Return the arguments as in transformers, without credentials.

        With a gradient cache or "auto", the sizes are converted back to the user's values, so that
        the result can be passed to the constructor.
        """
        arguments = super().to_dict()
        if self.has_auto_micro_batch:
            arguments["gradient_accumulation_steps"] = 1
            arguments["per_device_train_batch_size"] = "auto"
        elif self._pairs_encoded_at_once is not None:
            num_steps = self.per_device_train_batch_size // self._pairs_encoded_at_once
            arguments["gradient_accumulation_steps"] = num_steps
            arguments["per_device_train_batch_size"] = self._pairs_encoded_at_once
        return redact(arguments)

    @property
    def has_bank(self) -> bool:
        """True if the method has a bank."""
        return self.method in BANK_METHODS

    @property
    def has_gradient_cache(self) -> bool:
        """True if the method has a gradient cache; see `CACHED_METHODS`."""
        return self.method in CACHED_METHODS

    @property
    def order_seed(self) -> int:
        """Seed of the order of the training data."""
        return self.seed if self.data_seed is None else self.data_seed

    @property
    def is_gathered(self) -> bool:
        """True if the loss contrasts the pairs of all devices.

        ``gather_across_devices`` sets it. By default, it is True for a method with a bank if there
        are several devices.
        """
        if self.gather_across_devices is None:
            return self.has_bank and self.world_size > 1
        return self.gather_across_devices

    @property
    def pairs_per_micro_batch(self) -> int:
        """Number of pairs whose activations are in memory at the same time, on one device."""
        return self._pairs_encoded_at_once or self.per_device_train_batch_size

    @property
    def needs_best_checkpoint(self) -> bool:
        """True if the run loads or saves the best model, or stops early."""
        saves_best = self.save_strategy == SaveStrategy.BEST
        stops_early = self.early_stopping_patience is not None
        return self.load_best_model_at_end or saves_best or stops_early


_LOSS_FIELDS = [setting.name for setting in fields(LossSettings)] + list(DISTILL_SETTINGS)
LOSS_SETTINGS = tuple(
    name for name in _LOSS_FIELDS if name in ContAccumTrainingArguments.__dataclass_fields__
)
"""Arguments of the trainer that are passed to the loss by the same name."""


def get_name(value: Any) -> str:
    """Return the value of an enum member, or the name of a class or function, as text."""
    if hasattr(value, "value"):
        return str(value.value)
    return str(getattr(value, "__name__", value))
