"""Training on streams: what cannot be combined with them, their loader, and how a resumed run finds its place.

transformers takes an endless stream for one long epoch of ``max_steps`` updates. Passes over the files are the affair
of ``contaccum.data.streams``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from contaccum.data.set_schedule import block_size, whole_shares
from contaccum.data.stream_batches import StreamedSets
from contaccum.data.training_sets import TrainingSet
from contaccum.errors import ConfigError
from contaccum.training.set_sampling import named_weights

if TYPE_CHECKING:
    from contaccum.training.arguments import ContAccumTrainingArguments


def check_stream(args: ContAccumTrainingArguments, dataset: Any) -> None:
    """`check_streaming`, where the data set is a stream of ours."""
    if isinstance(dataset, StreamedSets):
        check_streaming(args, dataset.sets)


def check_streaming(args: ContAccumTrainingArguments, sets: Sequence[TrainingSet]) -> None:
    """Refuse what needs to know all rows beforehand.

    Raises:
        ConfigError: naming both settings and the way out.
    """
    kind = getattr(args.batch_sampler, "value", getattr(args.batch_sampler, "__name__", args.batch_sampler))
    why = "rows of a stream are not known beforehand"
    refused = {
        "train_sampling_strategy=group_by_length": (args.groups_by_length, why),
        f"topic_column={args.topic_column}": (args.topic_column is not None, why),
        f"batch_sampler={kind}": (kind != "batch_sampler", f"{why} (the bank methods mask duplicates)"),
        f"dataloader_num_workers={args.dataloader_num_workers}": (
            args.dataloader_num_workers > 0,
            "each worker would read the whole stream",
        ),
    }
    for setting, (asked, reason) in refused.items():
        if asked:
            raise ConfigError(f"{setting} with streaming=true: {reason}. Drop one of them")
    if args.max_steps <= 0:
        raise ConfigError(
            "streaming=true without max_steps: a stream has no end by which to count epochs. Set max_steps"
        )
    if len(sets) > 1 and args.set_sampler not in ("weights", "round_robin"):
        raise ConfigError(
            f"multi_dataset_batch_sampler={args.set_sampler} with streaming=true: the sizes of streams are not known. "
            "Give the sets weights, as train_data: [{path: ..., weight: 2}, ...], or set it to round_robin"
        )


def shares_of(args: ContAccumTrainingArguments, data: StreamedSets) -> list[int]:
    """The micro-batches of each set, in proportion."""
    names = [one.name for one in data.sets]
    if args.set_sampler != "weights":
        return [1] * len(names)
    return whole_shares(named_weights(args, names))


def describe_streams(args: ContAccumTrainingArguments, data: StreamedSets) -> dict[str, dict[str, Any]]:
    """What a run takes of each set, by name."""
    shares = shares_of(args, data)
    parts = [share / sum(shares) for share in shares]
    return {one.name: {"rows": None, "weight": part, "share": part} for one, part in zip(data.sets, parts, strict=True)}


def stream_loader(args: ContAccumTrainingArguments, data: StreamedSets, collate: Any, seed: int) -> DataLoader:
    """A loader of this rank's micro-batches."""
    data.begin(
        batch_size=args.train_batch_size,
        counts=shares_of(args, data),
        block=block_size(args.gradient_accumulation_steps),
        seed=seed,
        rank=args.process_index,
        ranks=args.world_size,
    )
    # The stream makes the batches itself, so that each is of one set.
    return DataLoader(
        data, batch_size=None, collate_fn=partial(_collate, collate), pin_memory=args.dataloader_pin_memory
    )


def _collate(collate: Any, rows: list[dict[str, Any]] | None) -> Any:
    # What was trained on before the checkpoint is skipped without being tokenized.
    return {} if rows is None else collate(rows)


class StreamCallback(TrainerCallback):
    """Tells a stream where a resumed run goes on."""

    def __init__(self, data: StreamedSets) -> None:
        self.data = data

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        done = 0 if args.ignore_data_skip else state.global_step * args.gradient_accumulation_steps
        self.data.skip(done)
