"""Pairs per update, micro-batch and accumulation steps: any two give the third. And how much memory there may be."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from contaccum.errors import ConfigError

if TYPE_CHECKING:
    from contaccum.training.arguments import ContAccumTrainingArguments


def pairs_per_update(args: ContAccumTrainingArguments) -> int:
    """N_total of the paper: micro-batch times accumulation steps times devices."""
    return args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size


def keep_asked(args: ContAccumTrainingArguments, pairs: int | None) -> None:
    """Remember the pairs per update that were given."""
    args._asked_pairs = pairs  # type: ignore[attr-defined]  # beside the fields: what was asked is no setting


def fit_sizes(args: ContAccumTrainingArguments) -> None:
    """Set the accumulation steps by the pairs per update, if those were given.

    Raises:
        ConfigError: when no whole number of steps comes to them.
    """
    pairs: int | None = args._asked_pairs  # type: ignore[attr-defined]  # see above
    n, steps, ranks = args.per_device_train_batch_size, args.gradient_accumulation_steps, args.world_size
    if args.auto_find_batch_size:
        raise ConfigError(
            "auto_find_batch_size=true would change the pairs per update as it goes: set total_train_batch_size and "
            "per_device_train_batch_size=auto, which keep them"
        )
    if pairs is None:
        if args.finds_micro_batch:
            raise ConfigError(
                "per_device_train_batch_size=auto without total_train_batch_size: say how many pairs an update has"
            )
        return
    if pairs < 1 or pairs % ranks:
        raise ConfigError(f"total_train_batch_size={pairs} is not a whole number of pairs on each of {ranks} devices")
    local = pairs // ranks
    if args.finds_micro_batch:
        if args.method == "in_batch":
            raise ConfigError(
                "method=in_batch with per_device_train_batch_size=auto: an in-batch update is one batch. Set "
                "method=grad_cache, which encodes it in parts that fit, with the same gradient"
            )
        if steps > 1 or args.grad_cache_mini_batch_size is not None:
            name = "gradient_accumulation_steps" if steps > 1 else "grad_cache_mini_batch_size"
            raise ConfigError(f"per_device_train_batch_size=auto with {name}: it follows from what fits. Drop {name}")
    elif (steps > 1 or args.method == "in_batch") and n * steps != local:
        raise ConfigError(
            f"total_train_batch_size={pairs} is not per_device_train_batch_size={n} x gradient_accumulation_steps="
            f"{steps} x {ranks} devices = {n * steps * ranks}: drop one of them"
        )
    elif local % n:
        raise ConfigError(
            f"total_train_batch_size={pairs} is no multiple of per_device_train_batch_size={n} x {ranks} devices: "
            "change one of them"
        )
    args.gradient_accumulation_steps = local // n


def set_micro_batch(args: ContAccumTrainingArguments, n: int) -> None:
    """Micro-batches of ``n`` pairs, as many pairs per update as before."""
    local = args.per_device_train_batch_size * args.gradient_accumulation_steps
    if local % n:
        raise ConfigError(f"micro-batches of {n} pairs do not come to {local} pairs per update and device")
    if args.method == "grad_cache":
        args.grad_cache_mini_batch_size = n
    else:
        args.per_device_train_batch_size, args.gradient_accumulation_steps = n, local // n
    args.finds_micro_batch = False


def check_memory_limit(args: ContAccumTrainingArguments) -> None:
    """Refuse a limit that cannot be kept.

    Raises:
        ConfigError: without a CUDA device, or with a smaller one.
    """
    limit = args.memory_limit_gb
    if limit is None:
        return
    if args.device.type != "cuda":
        raise ConfigError(
            f"memory_limit_gb={limit:g} on a {args.device.type}: only CUDA can keep a process below a limit. Drop it"
        )
    total = torch.cuda.get_device_properties(args.device).total_memory / 2**30
    if not 0 < limit <= total:
        raise ConfigError(f"memory_limit_gb={limit:g} is not between 0 and the {total:.1f} GB that this GPU has")


def keep_memory_limit(args: ContAccumTrainingArguments) -> None:
    """From now on allocations beyond the limit fail as on a card that has no more."""
    if args.memory_limit_gb is not None:
        total = torch.cuda.get_device_properties(args.device).total_memory
        torch.cuda.set_per_process_memory_fraction(args.memory_limit_gb * 2**30 / total, args.device)
