"""ContAccumTrainingArguments: the method, the bank and the batches of a run.

It extends sentence-transformers' training arguments. Combinations that cannot work are refused
here, before a model is loaded. The settings of the loss are passed on by name, and the loss checks
them. This module touches neither models nor data.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, fields
from typing import Any

import torch
from accelerate.utils import compare_versions, is_deepspeed_available
from sentence_transformers import SentenceTransformerTrainingArguments
from transformers.integrations import get_available_reporting_integrations
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from transformers.trainer_utils import SaveStrategy

from contaccum.bank.settings import LossOptions, LossSettings
from contaccum.errors import ConfigError, check_choice
from contaccum.files import redact
from contaccum.losses.distillation import Distillation
from contaccum.training.options import (
    DEFAULT_BANK_SIZE,
    LossArguments,
    MethodArguments,
    NegativesArguments,
)

BANK_METHODS = ("contaccum", "pre_batch", "contaccum_cached")
CACHED_METHODS = ("grad_cache", "contaccum_cached")
DEFAULT_TEMPERATURE = {"cos": 0.05, "dot": 1.0}
# The version tested. Early ones apply updates that are not finite, in bfloat16.
DEEPSPEED = "0.19.8"
_METHODS_OF_SETTING = {
    "bank_size": BANK_METHODS,
    "query_bank_size": ("contaccum", "contaccum_cached"),
}
OF_A_BANK = (
    "bank_size",
    "query_bank_size",
    "bank_hard_negatives",
    "bank_weight",
    "normalize_by",
    "drift_compensation",
)
"""Settings of the loss that mean nothing without a bank; the others are every method's."""
NOT_OF_QUERY_SIDE = (
    *(setting.name for setting in fields(LossOptions)),
    "gather_across_devices",
    "matryoshka_dims",
    "distill",
    "refresh_negatives_every",
)
"""Settings that query-side training has no use for."""
OVERWRITES_EACH_START = (
    "overwrite_output_dir=true with resume_from_checkpoint=auto: every start would remove what the "
    "one before it has trained. Drop overwrite_output_dir, or resume_from_checkpoint"
)
QUERY_SIDE_SETTINGS = ("passage_store", "corpus", "missing")
DISTILL_SETTINGS = ("distill", "distill_weight", "distill_temperature")
_REFRESH_SETTINGS = (
    "refresh_corpus",
    "refresh_pool",
    "refresh_range_max",
    "refresh_relative_margin",
)


def refuse(rules: Mapping[str, object]) -> None:
    """Raise `ConfigError` with the first message whose condition holds."""
    for message, is_broken in rules.items():
        if is_broken:
            raise ConfigError(message)


def refuse_alone(settings: Any, needs: Mapping[str, str], others: Any = None) -> None:
    """Refuse settings that do nothing without another one, unless they are at their default.

    Args:
        settings: a dataclass.
        needs: the setting that each one needs, by name.
        others: the dataclass with the needed settings; None: ``settings``.
    """
    for name, needed in needs.items():
        value = getattr(settings, name)
        is_default = value == _default_of(settings.__dataclass_fields__[name])
        if not is_default and not getattr(others or settings, needed):
            raise ConfigError(
                f"{name}={value} without {needed}: it does nothing. Set {needed}, or drop {name}"
            )


@dataclass
class ContAccumTrainingArguments(
    NegativesArguments, LossArguments, MethodArguments, SentenceTransformerTrainingArguments
):
    """Arguments of `ContAccumTrainer`, beside those of SentenceTransformerTrainingArguments.

    A micro-batch is ``per_device_train_batch_size`` pairs, an update
    ``gradient_accumulation_steps`` of them, for every method: ``grad_cache`` and
    ``contaccum_cached`` turn them into one batch that is encoded a micro-batch at a time. Every
    setting that needs no bank is for every method.

    Raises:
        ConfigError: for combinations that cannot work; the message names both settings.
    """

    def __post_init__(self) -> None:
        self.finds_micro_batch = str(self.per_device_train_batch_size).lower() == "auto"
        if self.finds_micro_batch:
            self.per_device_train_batch_size = 1  # until the trainer has found it
        if self.save_strategy == SaveStrategy.BEST and self.metric_for_best_model is None:
            self.metric_for_best_model = "loss"  # transformers' for load_best_model_at_end
        self._check_choices()
        self._refuse_sizes()
        self._refuse_combinations()
        self._refuse_with_query_side()
        if not torch.accelerator.is_available():
            self.use_cpu = True  # otherwise transformers takes bf16 for a GPU setting
        super().__post_init__()
        self._refuse_on_this_machine()
        self._fit_sizes()
        if self.deepspeed_plugin is not None:
            self._configure_deepspeed()
        if self.keeps_bank and self.bank_size is None:
            self.bank_size = DEFAULT_BANK_SIZE
        if self.method == "pre_batch":
            self.query_bank_size = 0
        settings = self.loss_settings("cos")
        distillation = [settings.pop(name) for name in DISTILL_SETTINGS]
        LossSettings(**settings)  # refuses combinations of its own
        if self.distill is not None:
            Distillation(*distillation)

    def _check_choices(self) -> None:
        """Refuse values that are none of a setting's choices."""
        for group in (MethodArguments, LossArguments, NegativesArguments):
            for setting in fields(group):
                choices = setting.metadata.get("choices")
                value = getattr(self, setting.name)
                if choices and value is not None:
                    check_choice(setting.name, value, choices)

    def loss_settings(self, model_similarity: str) -> dict[str, Any]:
        """Return the fields of `LossSettings` and the arguments of `Distillation`.

        Args:
            model_similarity: ``"cos"`` or ``"dot"``, used where the user chose none.
        """
        settings = {name: getattr(self, name) for name in LOSS_SETTINGS}
        similarity = self.similarity or model_similarity
        temperature = self.temperature
        if temperature is None:
            temperature = DEFAULT_TEMPERATURE[similarity]
        return settings | {
            "bank_size": self.bank_size or 0,
            "similarity": similarity,
            "temperature": temperature,
            "gather_across_devices": self.gathers,
        }

    def _refuse_sizes(self) -> None:
        """Refuse numbers below 1, and sizes of banks that the method does not have."""
        for name in (
            "per_device_train_batch_size",
            "gradient_accumulation_steps",
            "refresh_negatives_every",
        ):
            value = getattr(self, name)
            refuse({f"{name} must be at least 1, got {value}": value is not None and value < 1})
        for name, methods in _METHODS_OF_SETTING.items():
            value = getattr(self, name)
            if value and self.method not in methods:
                raise ConfigError(
                    f"method={self.method} with {name}={value}: it is for "
                    f"{' and '.join(methods)}. Drop it"
                )

    def _refuse_combinations(self) -> None:
        """Refuse combinations of settings that cannot work on any machine."""
        method = self.method
        auto = self.finds_micro_batch
        has_several_batches = auto or self.gradient_accumulation_steps > 1
        resumes_by_auto = str(self.resume_from_checkpoint).lower() == "auto"
        has_patience = self.early_stopping_patience is not None
        rules: dict[str, object] = {
            OVERWRITES_EACH_START: self.overwrite_output_dir and resumes_by_auto,
            "method=in_batch with gradient_accumulation_steps or auto: its update is one batch": (
                method == "in_batch" and has_several_batches
            ),
            "auto_find_batch_size: set per_device_train_batch_size=auto, which keeps pairs": (
                self.auto_find_batch_size
            ),
            "per_device_train_batch_size=auto: say how many pairs an update has with "
            "total_train_batch_size": auto and self.total_train_batch_size is None,
            "early_stopping_patience with eval_strategy=no: set eval_strategy and eval_steps": (
                has_patience and name_of(self.eval_strategy) == "no"
            ),
            "refresh_negatives_every with distill: negatives mined meanwhile have no teacher "
            "scores. Drop one": self.distill and self.refresh_negatives_every,
        }
        engine = self._requested_engine()
        if engine is not None:
            rules |= {
                f"per_device_train_batch_size=auto with {engine}: give a number": auto,
                f"refresh_negatives_every with {engine}: drop one of them": (
                    self.refresh_negatives_every
                ),
            }
        if engine == "deepspeed":
            is_installed = is_deepspeed_available()
            rules |= {
                f"method={method} with deepspeed: ZeRO takes a gradient once per micro-step. Set "
                "fsdp=true": method in CACHED_METHODS,
                "fp16=true with deepspeed: it scales losses by itself, and the norms with them. "
                "Set bf16=true": self.fp16,
                f"deepspeed needs DeepSpeed {DEEPSPEED} or later: pip install "
                f"'deepspeed>={DEEPSPEED}', or set fsdp=true": (
                    not (is_installed and compare_versions("deepspeed", ">=", DEEPSPEED))
                ),
            }
        refuse(rules)
        refuse_alone(self, dict.fromkeys(_REFRESH_SETTINGS, "refresh_negatives_every"))
        refuse_alone(self, dict.fromkeys(DISTILL_SETTINGS[1:], "distill"))
        refuse_alone(self, {"hardness_strength": "hardness_mode"})

    def _refuse_with_query_side(self) -> None:
        """Refuse settings that query-side training needs or cannot use, and its own without it."""
        defaults = self.__dataclass_fields__
        if self.method != "query_side":
            for name in QUERY_SIDE_SETTINGS:
                if getattr(self, name) != _default_of(defaults[name]):
                    raise ConfigError(
                        f"{name}={getattr(self, name)} with method={self.method}: it is for "
                        "query_side. Drop it"
                    )
            return
        if (self.passage_store is None) == (self.corpus is None):
            raise ConfigError(
                "method=query_side: set passage_store (made by contaccum encode) or corpus (a file "
                "to encode), one of them"
            )
        for name in NOT_OF_QUERY_SIDE:
            value = getattr(self, name)
            if value != _default_of(defaults[name]):
                raise ConfigError(
                    f"method=query_side with {name}={value}: it contrasts every query with all "
                    f"documents of a store, and has no such setting. Drop {name}"
                )
        engine = self._requested_engine()
        refuse({f"method=query_side with {engine}: start it without": engine is not None})

    def _requested_engine(self) -> str | None:
        """Return the engine that the arguments or the launcher's environment ask for."""
        for name in ("deepspeed", "fsdp"):
            of_launcher = os.environ.get(f"ACCELERATE_USE_{name.upper()}", "")
            if getattr(self, name) or of_launcher.lower() == "true":
                return name
        return None

    def _refuse_on_this_machine(self) -> None:
        """Refuse settings that need other hardware or packages than there are."""
        trackers = set(get_available_reporting_integrations())
        missing = sorted(set(self.report_to or ()) - trackers)
        fsdp_plugin = self.fsdp_plugin_args or {}
        fsdp_version = fsdp_plugin.get("fsdp_version") or os.environ.get("FSDP_VERSION") or 2
        rules = {
            f"report_to={', '.join(missing)}: no tracker of transformers, or not installed": (
                missing
            ),
            "FSDP version 1 is not supported: set version: 2 in fsdp_config": (
                int(fsdp_version) != 2
            ),
            "fp16=true needs an accelerator; on a CPU set bf16=true": (
                self.fp16 and self.device.type == "cpu"
            ),
            f"method={self.method} in one process over {self.n_gpu} GPUs: DataParallel forgets the "
            "bank. Start one process per GPU with torchrun, or show one with "
            "CUDA_VISIBLE_DEVICES": self.keeps_bank and self.n_gpu > 1,
        }
        refuse(rules)

    def _fit_sizes(self) -> None:
        """Compute the third of micro-batch, accumulation steps and pairs per update."""
        micro_batch = self.per_device_train_batch_size
        steps = self.gradient_accumulation_steps
        ranks = self.world_size
        pairs = self.total_train_batch_size
        has_steps = steps > 1 or self.method == "in_batch"
        if pairs is not None:
            is_multiple = pairs >= 1 and pairs % (micro_batch * ranks) == 0
            if not is_multiple or (has_steps and micro_batch * steps * ranks != pairs):
                shown_steps = f"={steps}" if has_steps else ""
                raise ConfigError(
                    f"total_train_batch_size={pairs} is not per_device_train_batch_size="
                    f"{micro_batch} x gradient_accumulation_steps{shown_steps} x {ranks} devices: "
                    "change or drop one of them"
                )
            steps = pairs // (micro_batch * ranks)
            self.gradient_accumulation_steps = steps
        self.total_train_batch_size = micro_batch * steps * ranks
        # Pairs that a gradient cache encodes at once, of a batch that is a whole update.
        self._encoded_at_once: int | None = None
        if self.caches:
            self._encoded_at_once = micro_batch
            self.per_device_train_batch_size = micro_batch * steps
            self.gradient_accumulation_steps = 1

    def _configure_deepspeed(self) -> None:
        """Set the sizes, and whatever saving of whole models needs, in DeepSpeed's config."""
        plugin: Any = self.deepspeed_plugin  # of no declared type
        stage = plugin.hf_ds_config.get_value("zero_optimization.stage")
        if stage not in (1, 2, 3):
            raise ConfigError(f"deepspeed with zero_optimization.stage={stage}: set 1, 2 or 3")
        config = plugin.deepspeed_config
        config.setdefault("gradient_clipping", self.max_grad_norm)
        # transformers filled them in before they were fitted to each other.
        config["train_micro_batch_size_per_gpu"] = self.per_device_train_batch_size
        config["gradient_accumulation_steps"] = self.gradient_accumulation_steps
        config["train_batch_size"] = self.total_train_batch_size
        config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
        # Otherwise models would be loaded in shards, and called before there is an engine.
        unset_hf_deepspeed_config()

    def take_micro_batch(self, num_pairs: int) -> None:
        """Use micro-batches of ``num_pairs``, as many of them as the pairs of an update need."""
        if self.caches:
            self._encoded_at_once = num_pairs
        else:
            pairs_of_update = self.per_device_train_batch_size * self.gradient_accumulation_steps
            self.gradient_accumulation_steps = pairs_of_update // num_pairs
            self.per_device_train_batch_size = num_pairs
        self.finds_micro_batch = False

    def to_dict(self) -> dict[str, Any]:
        """Return the arguments as in transformers, without credentials.

        Sizes are those that the user gave, so that the same arguments can be made of the result.
        """
        arguments = super().to_dict()
        if self._encoded_at_once is not None:
            steps = self.per_device_train_batch_size // self._encoded_at_once
            arguments["gradient_accumulation_steps"] = steps
            arguments["per_device_train_batch_size"] = self._encoded_at_once
        return redact(arguments)

    @property
    def keeps_bank(self) -> bool:
        """True for a method with a bank."""
        return self.method in BANK_METHODS

    @property
    def caches(self) -> bool:
        """True for a method with a gradient cache, which encodes an update's pairs twice."""
        return self.method in CACHED_METHODS

    @property
    def order_seed(self) -> int:
        """The seed of the order of data."""
        return self.seed if self.data_seed is None else self.data_seed

    @property
    def gathers(self) -> bool:
        """True if a loss with a bank gets the batch of all devices."""
        if self.gather_across_devices is None:
            return self.keeps_bank and self.world_size > 1
        return self.gather_across_devices

    @property
    def pairs_per_micro_batch(self) -> int:
        """Pairs whose activations are in memory at once, on one device."""
        return self._encoded_at_once or self.per_device_train_batch_size

    @property
    def keeps_best(self) -> bool:
        """True if the run depends on which evaluation was the best."""
        saves_best = self.save_strategy == SaveStrategy.BEST
        stops_early = self.early_stopping_patience is not None
        return self.load_best_model_at_end or saves_best or stops_early


LOSS_SETTINGS = tuple(
    name
    for name in (*(setting.name for setting in fields(LossSettings)), *DISTILL_SETTINGS)
    if name in ContAccumTrainingArguments.__dataclass_fields__
)
"""Arguments that are the loss's own, and are passed on to it by name."""


def _default_of(setting: Field[Any]) -> Any:
    """Return the default of a dataclass's field that has one."""
    if setting.default_factory is not MISSING:
        return setting.default_factory()
    return setting.default


def name_of(value: Any) -> str:
    """Return the value of an enumeration's member, or the name of a class or function."""
    if hasattr(value, "value"):
        return str(value.value)
    return str(getattr(value, "__name__", value))
