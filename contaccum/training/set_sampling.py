"""How several training sets are sampled: from the arguments to shares and a sampler, and what a run says about it.

Proportional and round-robin sampling are sentence-transformers' own. What is added are temperature and weights, whose
schedule is in ``contaccum.data.set_schedule``.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from contaccum.data.set_samplers import WeightedBatchSampler
from contaccum.data.set_schedule import block_size
from contaccum.data.training_sets import checked_weight
from contaccum.errors import ConfigError

if TYPE_CHECKING:
    from contaccum.training.arguments import ContAccumTrainingArguments

OWN_SET_SAMPLERS = ("temperature", "weights")
SET_SAMPLERS = ("proportional", "round_robin", *OWN_SET_SAMPLERS)
DEFAULT_SAMPLING_TEMPERATURE = 2.0


def take_set_sampling(args: ContAccumTrainingArguments) -> str | None:
    """Check what arguments say about sampling sets.

    Returns:
        what only this library knows, which in the arguments is replaced by what sentence-transformers takes; else None.

    Raises:
        ConfigError: for settings that cannot work, or not together.
    """
    kind = args.set_sampler
    if kind is None:
        return None
    if kind not in SET_SAMPLERS:
        raise ConfigError(f"multi_dataset_batch_sampler must be one of {', '.join(SET_SAMPLERS)}, got {kind!r}")
    weights = args.sampling_weights
    if isinstance(weights, str):
        with suppress(ValueError):  # what is no mapping is refused below
            weights = json.loads(weights)
    if weights is not None:
        if not isinstance(weights, dict) or not weights:
            raise ConfigError(f"sampling_weights: {weights!r} is no mapping of names to weights, as {{a: 2, b: 1}}")
        for name, weight in weights.items():
            checked_weight(weight, f"sampling_weights: {name}")
        if kind not in ("proportional", "weights"):  # the default, and what it means to give weights
            raise ConfigError(
                f"multi_dataset_batch_sampler={kind} with weights of sets, {weights}: each says how they are sampled. "
                "Drop one of them"
            )
        args.sampling_weights, kind = weights, "weights"
    elif kind == "weights":
        raise ConfigError(
            "multi_dataset_batch_sampler=weights without any: give sets a weight, as train_data: [{path: ..., weight: "
            "2}, ...], or set sampling_weights"
        )
    if not 0 < args.sampling_temperature < float("inf"):
        raise ConfigError(f"sampling_temperature must be above 0, got {args.sampling_temperature}")
    if args.sampling_temperature != DEFAULT_SAMPLING_TEMPERATURE and kind != "temperature":
        raise ConfigError(
            f"sampling_temperature={args.sampling_temperature} with multi_dataset_batch_sampler={kind}: it does "
            "nothing there. Drop it, or set multi_dataset_batch_sampler=temperature"
        )
    if kind not in OWN_SET_SAMPLERS:
        return None
    args.multi_dataset_batch_sampler = "proportional"
    return kind


def weights_of(args: ContAccumTrainingArguments, sizes: Mapping[str, int]) -> list[float]:
    """The weight of each set by (name, number of rows), under "temperature" or "weights".

    Raises:
        ConfigError: weights for sets that are not there.
    """
    if args.set_sampler == "temperature":
        return [float(size) ** (1.0 / args.sampling_temperature) for size in sizes.values()]
    return named_weights(args, list(sizes))


def named_weights(args: ContAccumTrainingArguments, names: Sequence[str]) -> list[float]:
    """The weights that arguments give to sets by name, 1 for those not named."""
    weights: dict[str, float] = args.sampling_weights or {}  # type: ignore[assignment]  # no text after the check
    for name in weights:
        if name not in names:
            close = difflib.get_close_matches(name, names, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ConfigError(f"sampling_weights: there is no training set {name!r}, only {', '.join(names)}{hint}")
    return [weights.get(name, 1) for name in names]


def make_set_sampler(
    args: ContAccumTrainingArguments,
    sizes: Mapping[str, int],
    dataset: Any,
    batch_samplers: list[Any],
    generator: Any = None,
    seed: int = 0,
) -> WeightedBatchSampler | None:
    """The sampler over sets that the arguments ask for; None where it is sentence-transformers' own or the user's.

    Args:
        sizes: rows by name, in the order of the samplers.
    """
    if args.set_sampler not in OWN_SET_SAMPLERS:
        return None
    return WeightedBatchSampler(
        dataset,
        batch_samplers,
        generator,
        seed,
        weights=weights_of(args, sizes),
        block=block_size(args.gradient_accumulation_steps),
    )


def describe_shares(
    args: ContAccumTrainingArguments, sizes: Mapping[str, int], batch_samplers: Sequence[Any], sampler: Any
) -> dict[str, dict[str, Any]]:
    """What an epoch takes of each set, by name: rows there are, weight, batches, their share, passes over the set."""
    lengths = [len(batches) for batches in batch_samplers]
    counts = {"proportional": lengths, "round_robin": [min(lengths)] * len(lengths)}.get(args.set_sampler or "")
    counts = list(sampler.counts) if isinstance(sampler, WeightedBatchSampler) else counts
    if counts is None:  # a sampler of the user's
        return {name: {"rows": size} for name, size in sizes.items()}
    weights = weights_of(args, sizes) if args.set_sampler in OWN_SET_SAMPLERS else counts
    return {
        name: {
            "rows": sizes[name],
            "weight": weight / sum(weights),
            "batches_per_epoch": count,
            "share": count / sum(counts),
            "passes_per_epoch": count / length,
        }
        for name, weight, count, length in zip(sizes, weights, counts, lengths, strict=True)
    }


def set_lines(args: ContAccumTrainingArguments, shares: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A heading, and a line for each set, for the start of a run."""
    how = args.set_sampler or "a sampler of your own"
    how += f" {args.sampling_temperature:g}" if how == "temperature" else ""
    lines = [f"training sets         {len(shares)}, sampled by {how}"]
    for name, about in shares.items():
        parts = [f"{about['rows']:,} rows"] if about.get("rows") is not None else ["a stream"]
        if "share" in about:
            parts += [f"weight {about['weight']:.4g}", f"{100 * about['share']:.4g} % of micro-batches"]
        if "batches_per_epoch" in about:
            parts += [f"{about['batches_per_epoch']:,} an epoch", f"{about['passes_per_epoch']:.4g} passes"]
        lines.append(f"  {name:<20}{', '.join(parts)}")
    return lines
