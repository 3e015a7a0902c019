"""ContAccumTrainingArguments: the method, the bank and the batches, beside sentence-transformers' training arguments.

What cannot work together is refused here, before a model is loaded. The settings of the loss are passed on by name, and
checked by the loss itself. Nothing here touches a model or data.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from accelerate.utils import compare_versions, is_deepspeed_available
from sentence_transformers import SentenceTransformerTrainingArguments
from transformers.integrations import get_available_reporting_integrations
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from transformers.trainer_utils import SaveStrategy

from contaccum.bank.info_nce import BankedInfoNCE
from contaccum.errors import ConfigError, check_choice
from contaccum.files import redact
from contaccum.losses.distillation import Distillation
from contaccum.training.options import DEFAULT_BANK_SIZE, LossArguments, MethodArguments, NegativesArguments

BANK_METHODS = ("contaccum", "pre_batch", "contaccum_cached")
CACHED_METHODS = ("grad_cache", "contaccum_cached")
DEFAULT_TEMPERATURE = {"cos": 0.05, "dot": 1.0}
DEEPSPEED = "0.19.8"  # the version tested; early ones apply updates that are not finite, in bfloat16
_ONLY = {"bank_size": BANK_METHODS, "query_bank_size": ("contaccum", "contaccum_cached")}
OF_A_BANK = (
    *("bank_size", "query_bank_size", "bank_hard_negatives", "bank_weight"),
    *("normalize_by", "drift_compensation"),
)
"""Settings of the loss that mean nothing without a bank; the others are every method's."""
OVERWRITES_EACH_START = (
    "overwrite_output_dir=true with resume_from_checkpoint=auto: every start would remove what the one before it has "
    "trained. Drop overwrite_output_dir, or resume_from_checkpoint"
)
DISTILL_SETTINGS = ("distill", "distill_weight", "distill_temperature")


def refuse(rules: Mapping[str, Any]) -> None:
    """Raise `ConfigError` with the first message whose condition holds."""
    for message, broken in rules.items():
        if broken:
            raise ConfigError(message)


def refuse_alone(settings: Any, needs: Mapping[str, str], others: Any = None) -> None:
    """Refuse settings that are not at their default and do nothing without another, by {setting: the other}.

    The other is one of ``others``, by default of the same.
    """
    for name, other in needs.items():
        value = getattr(settings, name)
        if value != settings.__dataclass_fields__[name].default and not getattr(others or settings, other):
            raise ConfigError(f"{name}={value} without {other}: it does nothing. Set {other}, or drop {name}")


@dataclass
class ContAccumTrainingArguments(
    NegativesArguments, LossArguments, MethodArguments, SentenceTransformerTrainingArguments
):
    """Arguments of `ContAccumTrainer`: those of SentenceTransformerTrainingArguments, and these.

    A micro-batch is ``per_device_train_batch_size`` pairs, an update ``gradient_accumulation_steps`` of them, for every
    method: ``grad_cache`` and ``contaccum_cached`` turn them into one batch that is encoded a micro-batch at a time.
    Every setting that needs no bank is for every method. Raises `ConfigError`
    for combinations that cannot work, naming both settings.
    """

    def __post_init__(self) -> None:
        self.finds_micro_batch = str(self.per_device_train_batch_size).lower() == "auto"
        if self.finds_micro_batch:
            self.per_device_train_batch_size = 1  # until the trainer has found it
        if self.save_strategy == SaveStrategy.BEST and self.metric_for_best_model is None:
            self.metric_for_best_model = "loss"  # as transformers has it for load_best_model_at_end
        for one in (*fields(MethodArguments), *fields(LossArguments), *fields(NegativesArguments)):
            if one.metadata.get("choices") and getattr(self, one.name) is not None:
                check_choice(one.name, getattr(self, one.name), one.metadata["choices"])
        self._refuse()
        if not torch.accelerator.is_available():
            self.use_cpu = True  # transformers takes bf16 for a GPU setting otherwise
        super().__post_init__()
        self._refuse_on_this_machine()
        self._fit_sizes()
        if self.deepspeed_plugin is not None:
            self._settle_deepspeed()
        if self.keeps_bank and self.bank_size is None:
            self.bank_size = DEFAULT_BANK_SIZE
        if self.method == "pre_batch":
            self.query_bank_size = 0
        settings = self.loss_settings("cos")
        distillation = [settings.pop(name) for name in DISTILL_SETTINGS]
        BankedInfoNCE(**settings)  # refuses what cannot work; nothing is allocated yet
        if self.distill is not None:
            Distillation(*distillation)

    def loss_settings(self, model_similarity: str) -> dict[str, Any]:
        """The arguments of `BankedInfoNCE` and of distillation, for a model whose own similarity is given."""
        settings = {name: getattr(self, name) for name in LOSS_SETTINGS}
        similarity = self.similarity or model_similarity
        return settings | {
            "bank_size": self.bank_size or 0,
            "similarity": similarity,
            "temperature": DEFAULT_TEMPERATURE[similarity] if self.temperature is None else self.temperature,
            "gather_across_devices": self.gathers,
        }

    def _refuse(self) -> None:
        method, auto = self.method, self.finds_micro_batch
        for name in ("per_device_train_batch_size", "gradient_accumulation_steps", "refresh_negatives_every"):
            value = getattr(self, name)
            refuse({f"{name} must be at least 1, got {value}": value is not None and value < 1})
        for name, methods in _ONLY.items():
            value, others = getattr(self, name), " and ".join(methods)
            wrong = value and method not in methods
            refuse({f"method={method} with {name}={value}: it is for {others}. Drop it": wrong})
        asked = {x: os.environ.get(f"ACCELERATE_USE_{x.upper()}", "") for x in ("deepspeed", "fsdp")}  # of the launcher
        engine = next((name for name, said in asked.items() if getattr(self, name) or said.lower() == "true"), None)
        deepspeed = engine == "deepspeed"
        cached, scaled = deepspeed and method in CACHED_METHODS, deepspeed and self.fp16
        unsized = auto and self.total_train_batch_size is None
        one_batch = method == "in_batch" and (auto or self.gradient_accumulation_steps > 1)
        resumes_by_auto = str(self.resume_from_checkpoint).lower() == "auto"
        patient = self.early_stopping_patience is not None and name_of(self.eval_strategy) == "no"
        rules = {
            OVERWRITES_EACH_START: self.overwrite_output_dir and resumes_by_auto,
            f"method={method} with deepspeed: ZeRO takes a gradient once per micro-step. Set fsdp=true": cached,
            "fp16=true with deepspeed: it scales losses by itself, and the norms with them. Set bf16=true": scaled,
            "method=in_batch with gradient_accumulation_steps or auto: its update is one batch": one_batch,
            "auto_find_batch_size: set per_device_train_batch_size=auto, which keeps pairs": self.auto_find_batch_size,
            "per_device_train_batch_size=auto: say how many pairs an update has with total_train_batch_size": unsized,
            "early_stopping_patience with eval_strategy=no: set eval_strategy and eval_steps": patient,
            f"per_device_train_batch_size=auto with {engine}: give a number": engine and auto,
            "refresh_negatives_every with distill: negatives mined meanwhile have no teacher scores. Drop one": (
                self.distill and self.refresh_negatives_every
            ),
            f"refresh_negatives_every with {engine}: drop one of them": engine and self.refresh_negatives_every,
            f"deepspeed needs DeepSpeed {DEEPSPEED} or later: pip install 'deepspeed>={DEEPSPEED}', or set fsdp=true": (
                deepspeed and not (is_deepspeed_available() and compare_versions("deepspeed", ">=", DEEPSPEED))
            ),
        }
        refuse(rules)
        refreshes = ("refresh_corpus", "refresh_pool", "refresh_range_max", "refresh_relative_margin")
        refuse_alone(self, dict.fromkeys(refreshes, "refresh_negatives_every"))
        refuse_alone(self, dict.fromkeys(DISTILL_SETTINGS[1:], "distill") | {"hardness_strength": "hardness_mode"})

    def _refuse_on_this_machine(self) -> None:
        missing = sorted(set(self.report_to or ()) - set(get_available_reporting_integrations()))
        fsdp_version = (self.fsdp_plugin_args or {}).get("fsdp_version") or os.environ.get("FSDP_VERSION") or 2
        rules = {
            f"report_to={', '.join(missing)}: no tracker of transformers, or not installed": missing,
            "FSDP version 1 is not supported: set version: 2 in fsdp_config": int(fsdp_version) != 2,
            "fp16=true needs an accelerator; on a CPU set bf16=true": self.fp16 and self.device.type == "cpu",
            f"method={self.method} in one process over {self.n_gpu} GPUs: DataParallel forgets the bank. Start one "
            "process per GPU with torchrun, or show one with CUDA_VISIBLE_DEVICES": self.keeps_bank and self.n_gpu > 1,
        }
        refuse(rules)

    def _fit_sizes(self) -> None:
        """Any two of micro-batch, accumulation steps and pairs per update give the third."""
        n, steps, ranks = self.per_device_train_batch_size, self.gradient_accumulation_steps, self.world_size
        pairs = self.total_train_batch_size
        given = steps > 1 or self.method == "in_batch"
        if pairs is not None and (pairs < 1 or pairs % (n * ranks) or (given and n * steps * ranks != pairs)):
            raise ConfigError(
                f"total_train_batch_size={pairs} is not per_device_train_batch_size={n} x gradient_accumulation_steps"
                f"{f'={steps}' if given else ''} x {ranks} devices: change or drop one of them"
            )
        if pairs is not None:
            self.gradient_accumulation_steps = pairs // (n * ranks)
        self.total_train_batch_size = n * self.gradient_accumulation_steps * ranks
        self._encoded_at_once: int | None = None  # of a batch that is a whole update
        if self.caches:  # one batch per update, encoded in micro-batches: what GradCache computes
            self._encoded_at_once = n
            self.per_device_train_batch_size *= self.gradient_accumulation_steps
            self.gradient_accumulation_steps = 1

    def _settle_deepspeed(self) -> None:
        """Put into the engine's configuration what the arguments say, and what saving whole models needs."""
        plugin: Any = self.deepspeed_plugin  # of no declared type
        stage = plugin.hf_ds_config.get_value("zero_optimization.stage")
        refuse({f"deepspeed with zero_optimization.stage={stage}: set 1, 2 or 3": stage not in (1, 2, 3)})
        config = plugin.deepspeed_config
        config.setdefault("gradient_clipping", self.max_grad_norm)
        config |= {  # transformers filled them in before they were fitted to each other
            "train_micro_batch_size_per_gpu": self.per_device_train_batch_size,
            "gradient_accumulation_steps": self.gradient_accumulation_steps,
            "train_batch_size": self.total_train_batch_size,
        }
        config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
        unset_hf_deepspeed_config()  # else models would be loaded in shards, and called before there is an engine

    def take_micro_batch(self, n: int) -> None:
        """From now on micro-batches of ``n`` pairs, and as many of them as an update's pairs need."""
        if self.caches:
            self._encoded_at_once = n
        else:
            self.gradient_accumulation_steps = self.per_device_train_batch_size * self.gradient_accumulation_steps // n
            self.per_device_train_batch_size = n
        self.finds_micro_batch = False

    def to_dict(self) -> dict[str, Any]:
        """As in transformers, which blanks its own tokens; nor are credentials of the environment or in URLs shown."""
        found, n = super().to_dict(), self._encoded_at_once
        if n is not None:  # as it was given, so that the same arguments can be made of it
            found["gradient_accumulation_steps"] = self.per_device_train_batch_size // n
            found["per_device_train_batch_size"] = n
        return redact(found)

    @property
    def keeps_bank(self) -> bool:
        """Whether the method is one with a bank."""
        return self.method in BANK_METHODS

    @property
    def caches(self) -> bool:
        """Whether the method encodes an update's pairs twice, for it has a gradient cache."""
        return self.method in CACHED_METHODS

    @property
    def order_seed(self) -> int:
        """The seed of the order of data."""
        return self.seed if self.data_seed is None else self.data_seed

    @property
    def gathers(self) -> bool:
        """Whether the batch of all devices is built before the loss."""
        default = self.keeps_bank and self.world_size > 1
        return default if self.gather_across_devices is None else self.gather_across_devices

    @property
    def pairs_per_micro_batch(self) -> int:
        """Pairs whose activations are in memory at once, on one device."""
        return self._encoded_at_once or self.per_device_train_batch_size

    @property
    def keeps_best(self) -> bool:
        """Whether anything depends on which evaluation was the best."""
        by_save = self.save_strategy == SaveStrategy.BEST
        return self.load_best_model_at_end or by_save or self.early_stopping_patience is not None


LOSS_SETTINGS = tuple(
    name
    for name in (*inspect.signature(BankedInfoNCE).parameters, *DISTILL_SETTINGS)
    if name in ContAccumTrainingArguments.__dataclass_fields__
)
"""Arguments that are the loss's own, and are passed on to it by name."""


def name_of(kind: Any) -> str:
    """Of an enumeration its value, of a class or function its name."""
    return str(getattr(kind, "value", getattr(kind, "__name__", kind)))
