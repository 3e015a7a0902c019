"""What is refused whatever the model and the data are, before anything is loaded: one table, a message for each rule.

A message names both settings and the way out; beside it stands when it is shown, of the training arguments ``a`` and
the data arguments ``d``. The settings of the loss are checked by the loss.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers.integrations import get_available_reporting_integrations

from contaccum.errors import ConfigError

Rules = Mapping[str, Callable[..., Any]]


def refuse(rules: Rules, **given: Any) -> None:
    """Raise the first rule that is broken.

    Raises:
        ConfigError: with its message, formatted with the arguments.
    """
    for message, broken in rules.items():
        if broken(**given):
            raise ConfigError(message.format(**given))


def name_of(kind: Any) -> str:
    """Of an enumeration its value, of a class or function its name."""
    return str(getattr(kind, "value", getattr(kind, "__name__", kind)))


def _at_least(of: str, names: Mapping[str, int]) -> Rules:
    def below(name: str, least: int) -> Callable[..., bool]:
        return lambda **given: (value := getattr(given[of], name)) is not None and value < least

    return {f"{name} must be at least {n}, got {{{of}.{name}}}": below(name, n) for name, n in names.items()}


def _unless_changed(of: str, names: tuple[str, ...], message: str, broken: Callable[..., Any]) -> Rules:
    """Rules for settings that mean nothing while ``broken`` holds, and so must have their defaults."""

    def changed(name: str) -> Callable[..., bool]:
        return lambda **given: (
            broken(**given) and getattr(given[of], name) != given[of].__dataclass_fields__[name].default
        )

    return {f"{name}={{{of}.{name}}} {message}, or drop {name}": changed(name) for name in names}


RULES: Rules = {
    "deepspeed is not supported: its engine owns backward, accumulation and clipping, so that gradient norms per tower "
    "could not be read or balanced, and checkpoints would be its own. FSDP shards the same things: drop deepspeed, and "
    "set fsdp=true": lambda a: a.deepspeed or _in_environment("ACCELERATE_USE_DEEPSPEED"),
    **_at_least("a", {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1, "max_skipped_updates": 0}),
    **_at_least("a", {"learning_rate_base_batch_size": 1, "refresh_negatives_every": 1}),
    **_at_least("a", {"early_stopping_patience": 1, "early_stopping_threshold": 0}),
    "method=in_batch with gradient_accumulation_steps={a.gradient_accumulation_steps}: an in-batch update is one "
    "batch. Set gradient_accumulation_steps=1, or method=grad_accum": lambda a: (
        a.method == "in_batch" and a.gradient_accumulation_steps > 1
    ),
    "method={a.method} with bank_size={a.bank_size}: only contaccum and pre_batch keep a bank. Drop bank_size, or set "
    "method=contaccum": lambda a: not a.keeps_bank and a.bank_size,
    "method={a.method} with query_bank_size={a.query_bank_size}: only contaccum has a query bank. Drop "
    "query_bank_size, or set method=contaccum": lambda a: a.method != "contaccum" and a.query_bank_size,
    "method={a.method} with grad_cache_mini_batch_size={a.grad_cache_mini_batch_size}: only grad_cache encodes in "
    "mini-batches. Drop it, or set method=grad_cache": lambda a: (
        a.method != "grad_cache" and a.grad_cache_mini_batch_size is not None
    ),
    "auto_find_batch_size=true would change the pairs per update as it goes: set total_train_batch_size and "
    "per_device_train_batch_size=auto, which keep them": lambda a: a.auto_find_batch_size,
    "per_device_train_batch_size=auto without total_train_batch_size: say how many pairs an update has": lambda a: (
        a.finds_micro_batch and a.total_train_batch_size is None
    ),
    "method=in_batch with per_device_train_batch_size=auto: an in-batch update is one batch. Set method=grad_cache, "
    "which encodes it in parts that fit, with the same gradient": lambda a: (
        a.finds_micro_batch and a.method == "in_batch"
    ),
    "per_device_train_batch_size=auto with gradient_accumulation_steps={a.gradient_accumulation_steps}: it follows "
    "from what fits. Drop gradient_accumulation_steps": lambda a: (
        a.finds_micro_batch and a.gradient_accumulation_steps > 1
    ),
    "train_sampling_strategy={a.train_sampling_strategy}: the order here depends on seed and epoch alone, so that runs "
    "resume. Drop it": lambda a: str(a.train_sampling_strategy) != "random",
    "sampling_weights: {a.sampling_weights!r} is no mapping of names to numbers above 0, as {{a: 2, b: 1}}": (
        lambda a: a.sampling_weights is not None and not _are_weights(a.sampling_weights)
    ),
    "multi_dataset_batch_sampler={a.set_sampler} with weights of sets, {a.sampling_weights}: each says how they are "
    "sampled. Drop one of them": lambda a: a.sampling_weights is not None and a.set_sampler not in (None, "weights"),
    "sampling_temperature must be above 0, got {a.sampling_temperature}": (
        lambda a: not 0 < a.sampling_temperature < float("inf")
    ),
    **_unless_changed(
        "a",
        ("sampling_temperature",),
        "without multi_dataset_batch_sampler=temperature: it does nothing there. Set that",
        lambda a: a.set_sampler != "temperature",
    ),
    **_unless_changed(
        "a",
        ("refresh_corpus", "refresh_pool", "refresh_range_max", "refresh_relative_margin"),
        "without refresh_negatives_every: nothing is mined. Set it to a number of updates",
        lambda a: a.refresh_negatives_every is None,
    ),
    "restore_callback_states_from_checkpoint=true: patience is restored in any case. Drop it": (
        lambda a: a.restore_callback_states_from_checkpoint
    ),
    "refresh_negatives_every with fsdp: one rank mines, and would need the whole model. Drop one of them": (
        lambda a: a.refresh_negatives_every is not None and a.fsdp
    ),
    **_unless_changed(
        "a",
        ("early_stopping_threshold",),
        "without early_stopping_patience: nothing stops early. Set early_stopping_patience",
        lambda a: a.early_stopping_patience is None,
    ),
    "early_stopping_patience={a.early_stopping_patience} with eval_strategy=no: there is nothing to lose patience "
    "with. Set eval_strategy=steps and eval_steps, or drop it": lambda a: (
        a.early_stopping_patience is not None and name_of(a.eval_strategy) == "no"
    ),
}

MACHINE_RULES: Rules = {  # once device, ranks and trackers are known
    "report_to={a.report_to}: one of them is no tracker of transformers, or its package is not installed. Install it, "
    "or drop it": lambda a: set(a.report_to or ()) - set(get_available_reporting_integrations()),
    "FSDP version 1 is not supported (transformers has deprecated it, too): set version: 2 in fsdp_config, or "
    "fsdp_version: 2 in the config of accelerate": lambda a: _fsdp_version(a) != 2,
    "fp16=true needs an accelerator; on a CPU set bf16=true, or neither": lambda a: a.fp16 and a.device.type == "cpu",
    "method={a.method} in one process over {a.n_gpu} GPUs would use torch's DataParallel, whose replicas forget what "
    "they put into the bank: start one process per GPU with torchrun, or show one GPU with CUDA_VISIBLE_DEVICES": (
        lambda a: a.keeps_bank and a.n_gpu > 1
    ),
    "memory_limit_gb={a.memory_limit_gb} on a {a.device.type}: only CUDA can keep a process below a limit. Drop it": (
        lambda a: a.memory_limit_gb is not None and a.device.type != "cuda"
    ),
    "memory_limit_gb={a.memory_limit_gb} is not above 0, or is more than this GPU has": lambda a: (
        a.memory_limit_gb is not None
        and not 0 < a.memory_limit_gb * 2**30 <= torch.cuda.get_device_properties(a.device).total_memory
    ),
}

_STREAM = "with streaming=true: rows of a stream are not known beforehand"
DATA_RULES: Rules = {  # of the command line, whose data is known by its arguments
    "shuffle_buffer_size={d.shuffle_buffer_size} with streaming={d.streaming}: set streaming=true and a buffer of 1 or "
    "more, or drop it": lambda d, a: (
        d.shuffle_buffer_size is not None and (not d.streaming or d.shuffle_buffer_size < 1)
    ),
    "multi_dataset_batch_sampler={a.set_sampler} with one training set: there is nothing to sample from. Drop it, or "
    "give train_data several": lambda d, a: (
        len(d.train_data) == 1 and a.set_sampler not in (None, "proportional") and not a.sampling_weights
    ),
    "multi_dataset_batch_sampler=weights without any: give sets a weight, as train_data: [{{path: ..., weight: 2}}, "
    "...], or set sampling_weights": lambda d, a: a.set_sampler == "weights" and not a.sampling_weights,
    "refresh_negatives_every={a.refresh_negatives_every} with num_hard_negatives=0: no query takes a negative. Set "
    "num_hard_negatives, or drop refresh_negatives_every": lambda d, a: (
        a.refresh_negatives_every is not None and not d.num_hard_negatives
    ),
    "refresh_negatives_every={a.refresh_negatives_every} with streaming=true or several sets in train_data: it mines "
    "in one set whose rows can be looked up. Drop one of them": lambda d, a: (
        a.refresh_negatives_every is not None and (d.streaming or not d.is_one_path)
    ),
    f"batch_sampler {_STREAM} (the bank methods mask duplicates). Drop one of them": (
        lambda d, a: d.streaming and name_of(a.batch_sampler) != "batch_sampler"
    ),
    f"per_device_train_batch_size=auto {_STREAM}, nor the longest. Give a number": (
        lambda d, a: d.streaming and a.finds_micro_batch
    ),
    "dataloader_num_workers={a.dataloader_num_workers} with streaming=true: each worker would read the whole stream. "
    "Drop one of them": lambda d, a: d.streaming and a.dataloader_num_workers,
    "streaming=true without max_steps: a stream has no end by which to count epochs. Set max_steps": (
        lambda d, a: d.streaming and a.max_steps <= 0
    ),
    **_unless_changed(
        "d",
        ("eval_split", "eval_queries", "eval_corpus_size"),
        "without eval_data: nothing is evaluated. Add eval_data, a BEIR folder",
        lambda d, a: d.eval_data is None,
    ),
    "eval_strategy={a.eval_strategy.value} without eval_data: there is nothing to evaluate on. Add eval_data, a BEIR "
    "folder, or drop it": lambda d, a: d.eval_data is None and name_of(a.eval_strategy) != "no",
    "eval_data={d.eval_data} with eval_strategy=no: it would never be looked at. Set eval_strategy=steps and "
    "eval_steps, or drop eval_data": lambda d, a: d.eval_data is not None and name_of(a.eval_strategy) == "no",
    **_at_least("d", {"eval_queries": 1, "eval_corpus_size": 1}),
    "eval_data={d.eval_data} with eval_split={d.eval_split}: the best model would be chosen by the very pairs it "
    "trains on. Set eval_split to another split": lambda d, a: (
        d.eval_data is not None and a.keeps_best and _is_trained_on(d, d.eval_data, d.eval_split)
    ),
}


def _in_environment(name: str) -> bool:
    return os.environ.get(name, "false").lower() == "true"


def _fsdp_version(a: Any) -> int:
    # `accelerate launch` says its version in the environment.
    by_launcher = os.environ.get("FSDP_VERSION") if _in_environment("ACCELERATE_USE_FSDP") else None
    return int((a.fsdp_plugin_args or {}).get("fsdp_version") or by_launcher or 2)


def _are_weights(weights: Any) -> bool:
    if not isinstance(weights, dict) or not weights:
        return False
    return all(isinstance(x, (int, float)) and 0 < x < float("inf") for x in weights.values())


def _is_trained_on(d: Any, path: str, split: str) -> bool:
    here = os.path.realpath(path)
    return any(one.reading.get("split") == split for one in d.sets if os.path.realpath(one.path) == here)
