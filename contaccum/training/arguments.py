"""ContAccumTrainingArguments: the arguments of `ContAccumTrainer`.

`contaccum.settings` declares the settings and refuses combinations that cannot work. This module
adds them to the arguments of sentence-transformers, and has what depends on a device: the machine,
and the sizes of micro-batch and update on several devices. It loads neither models nor data.
"""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass, fields, make_dataclass
from typing import TYPE_CHECKING, Any, get_type_hints

import torch
from sentence_transformers import SentenceTransformerTrainingArguments
from transformers.trainer_utils import SaveStrategy

from contaccum.errors import ConfigError, check_choice
from contaccum.evaluation.metrics import check_metric
from contaccum.redaction import redact
from contaccum.settings import (
    DEFAULT_BANK_SIZE,
    DEFAULT_TEMPERATURE,
    WITH_BANK,
    WITH_CACHE,
    LossSettings,
    MethodSettings,
    Settings,
    SimilaritySettings,
    check_training,
    get_engine,
    to_dict,
)
from contaccum.training.engines import configure_deepspeed, require_deepspeed

if TYPE_CHECKING:

    @dataclass
    class _Arguments(  # type: ignore[misc]  # the settings are frozen, these arguments are not
        SimilaritySettings, LossSettings, MethodSettings, SentenceTransformerTrainingArguments
    ):
        pass
else:
    _added = []
    for _group in (MethodSettings, LossSettings, SimilaritySettings):
        for _setting in fields(_group):
            # For HfArgumentParser, all metadata of a field are arguments of argparse.
            _argument = copy.copy(_setting)
            _argument.metadata = {"help": _setting.metadata["help"].replace("%", "%%")}
            _added.append((_setting.name, get_type_hints(_group)[_setting.name], _argument))
    _Arguments = make_dataclass("_Arguments", _added, bases=(SentenceTransformerTrainingArguments,))


class ContAccumTrainingArguments(_Arguments):
    """Arguments of `ContAccumTrainer`, which extend SentenceTransformerTrainingArguments.

    With every method, ``per_device_train_batch_size`` are the pairs of a micro-batch, and
    ``gradient_accumulation_steps`` the micro-batches of an update. ``grad_cache`` and
    ``contaccum_cached`` join these into one batch, and encode it one micro-batch at a time; the two
    arguments become the size of the batch and 1. ``contaccum train --help`` has the others.

    Raises:
        ConfigError: for combinations that cannot work; the message names both settings.
    """

    def __post_init__(self) -> None:
        self._sizes_of_user = {
            "per_device_train_batch_size": self.per_device_train_batch_size,
            "gradient_accumulation_steps": self.gradient_accumulation_steps,
        }
        self.has_auto_micro_batch = str(self.per_device_train_batch_size) == "auto"
        # This check comes before transformers' own, whose messages do not name the way out.
        check_training(self)
        if get_engine(self) == "deepspeed":
            require_deepspeed()
        if self.has_auto_micro_batch:
            self.per_device_train_batch_size = 1  # until the trainer has found the size that fits
        if self.save_strategy == SaveStrategy.BEST and self.metric_for_best_model is None:
            # transformers does the same for load_best_model_at_end only.
            self.metric_for_best_model = "loss"
        if self.learning_rates is not None:
            self.max_steps = len(self.learning_rates)
        if not torch.accelerator.is_available():
            self.use_cpu = True  # otherwise transformers refuses bf16 without a GPU
        super().__post_init__()  # it determines the device and the number of ranks
        self._check_machine()
        self._make_sizes_consistent()
        if self.deepspeed_plugin is not None:
            configure_deepspeed(self)
        if self.method in WITH_BANK and self.bank_size is None:
            self.bank_size = DEFAULT_BANK_SIZE  # type: ignore[misc]  # not frozen; see _Arguments

    @classmethod
    def from_settings(cls, settings: Settings) -> ContAccumTrainingArguments:
        """Return the arguments with these settings; those of model and data are left out."""
        arguments = {}
        for name, value in to_dict(settings).items():
            if name in cls.__dataclass_fields__:
                arguments[name] = value
                if choices := cls.__dataclass_fields__[name].metadata.get("choices"):
                    check_choice(name, value, choices)
        if settings.metric_for_best_model not in (None, "loss"):
            metric = check_metric(str(settings.metric_for_best_model))
            arguments["metric_for_best_model"] = f"eval_{metric}"
        if settings.device == "cpu":
            arguments["use_cpu"] = True
        try:
            return cls(**arguments)
        except ConfigError:
            raise
        except (ValueError, ImportError) as error:  # raised by transformers
            raise ConfigError(str(error)) from error

    def get_temperature(self, similarity: str) -> float:
        """Return ``temperature``; its default depends on the similarity, ``"cos"`` or ``"dot"``."""
        if self.temperature is None:
            return DEFAULT_TEMPERATURE[similarity]
        return self.temperature

    def _check_machine(self) -> None:
        """Refuse settings that need other hardware, or another start of processes."""
        if self.fp16 and self.device.type == "cpu":
            raise ConfigError("fp16=true needs an accelerator. On a CPU set bf16=true")
        fsdp_config = self.fsdp_plugin_args or {}
        fsdp_version = fsdp_config.get("fsdp_version") or os.environ.get("FSDP_VERSION") or 2
        if int(fsdp_version) != 2:
            raise ConfigError("FSDP version 1 is not supported: set version: 2 in fsdp_config")
        if self.n_gpu > 1:
            raise ConfigError(
                f"one process with {self.n_gpu} GPUs: DataParallel would multiply the pairs per "
                "update and lose the bank. Start one process per GPU with torchrun, or make only "
                "one GPU visible with CUDA_VISIBLE_DEVICES"
            )

    def _make_sizes_consistent(self) -> None:
        """Make pairs per update = pairs per micro-batch x accumulation steps x ranks."""
        micro_batch = self.per_device_train_batch_size
        num_steps = self.gradient_accumulation_steps
        num_ranks = self.world_size
        num_pairs = self.total_train_batch_size
        if num_pairs is not None:
            # 1 is the default of the steps, so the user may not have set it; with in_batch, it is
            # the only possible value. With an automatic micro-batch, the steps are computed anyway.
            sets_steps = num_steps > 1 and not self.has_auto_micro_batch
            if not (sets_steps or self.method == "in_batch"):
                num_steps = max(1, num_pairs // (micro_batch * num_ranks))
            if micro_batch * num_steps * num_ranks != num_pairs:
                raise ConfigError(
                    f"total_train_batch_size={num_pairs} is not per_device_train_batch_size="
                    f"{micro_batch} x gradient_accumulation_steps={num_steps} x {num_ranks} "
                    "devices: change or drop one of them"
                )
            self.gradient_accumulation_steps = num_steps
        num_pairs = micro_batch * num_steps * num_ranks
        self.total_train_batch_size = num_pairs  # type: ignore[misc]
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
        """Return the arguments as in transformers, without credentials, with the user's sizes."""
        return redact({**super().to_dict(), **self._sizes_of_user})

    @property
    def has_gradient_cache(self) -> bool:
        """True if the method has a gradient cache."""
        return self.method in WITH_CACHE

    @property
    def order_seed(self) -> int:
        """Seed of the order of the training data."""
        return self.seed if self.data_seed is None else self.data_seed

    @property
    def is_gathered(self) -> bool:
        """True if the loss contrasts the pairs of all devices: by default, for a shared bank."""
        if self.gather_across_devices is None:
            return self.method in WITH_BANK and self.world_size > 1
        return self.gather_across_devices

    @property
    def pairs_per_micro_batch(self) -> int:
        """Number of pairs whose activations are in memory at the same time, on one device."""
        return self._pairs_encoded_at_once or self.per_device_train_batch_size


def get_name(value: Any) -> str:
    """Return the value of an enum member, or the name of a class or function, as text."""
    if hasattr(value, "value"):
        return str(value.value)
    return str(getattr(value, "__name__", value))
