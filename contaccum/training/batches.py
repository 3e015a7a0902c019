"""Which batches a run trains on: from its arguments, and from columns that say something about rows, to a sampler.

How batches are put together is in ``contaccum.data``. Nothing here knows the loss.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sentence_transformers.base.sampler import DefaultBatchSampler
from torch import nn

from contaccum.data.draws import Draws
from contaccum.data.samplers import EpochBatchSampler, PlannedBatchSampler, text_columns
from contaccum.data.text_columns import column_codes, column_lengths, column_numbers
from contaccum.drift import MOVES_ENTRIES
from contaccum.errors import ConfigError
from contaccum.losses import ContAccumLoss
from contaccum.training.arguments import ContAccumTrainingArguments

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RowFacts:
    """What columns other than texts say about the N rows of a data set: (N,) each, or None."""

    topics: np.ndarray | None = None
    lengths: np.ndarray | None = None


def take_row_facts(args: ContAccumTrainingArguments, dataset: Any) -> tuple[Any, dict[str | None, RowFacts]]:
    """The training data without its columns of topics and lengths, which are no texts to encode, and what they say.

    Returns:
        the data set (or data sets by name), and the facts by its name (None for a single one).

    Raises:
        ConfigError: when there is no such column, or the data is a stream, whose rows cannot be put together.
    """
    if dataset is None or not (args.topic_column or args.groups_by_length):
        return dataset, {}
    parts = dict(dataset) if isinstance(dataset, dict) else {None: dataset}
    facts = {}
    for name, part in parts.items():
        if not hasattr(part, "__len__"):
            asked = (
                f"topic_column={args.topic_column}" if args.topic_column else "train_sampling_strategy=group_by_length"
            )
            raise ConfigError(f"{asked} with streamed training data: rows of a stream cannot be grouped. Drop it")
        facts[name] = RowFacts(_topics(args, part), _lengths(args, part))
    return without_facts(args, dataset), facts


def without_facts(args: ContAccumTrainingArguments, dataset: Any) -> Any:
    """A data set (or data sets by name) without the columns of topics and, where they group, lengths."""
    if isinstance(dataset, dict):
        return type(dataset)({name: without_facts(args, part) for name, part in dataset.items()})
    names = {args.topic_column, args.length_column_name if args.groups_by_length else None}
    found = [name for name in getattr(dataset, "column_names", None) or [] if name in names]
    return dataset.remove_columns(found) if found else dataset


def _topics(args: ContAccumTrainingArguments, dataset: Any) -> np.ndarray | None:
    if not args.topic_column:
        return None
    if args.topic_column not in dataset.column_names:
        raise ConfigError(
            f"topic_column={args.topic_column}: the training data has only the columns "
            f"{', '.join(dataset.column_names)}. Name one of them, or add one with a label for each row"
        )
    return column_codes(dataset, args.topic_column)


def _lengths(args: ContAccumTrainingArguments, dataset: Any) -> np.ndarray | None:
    if not args.groups_by_length or args.length_column_name not in dataset.column_names:
        return None
    return column_numbers(dataset, args.length_column_name)


def known_positives(
    args: ContAccumTrainingArguments, draws: Sequence[Draws]
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Ids of queries and passages, int64 (r,) each, that data sets know to belong together; None: there are none.

    Raises:
        ConfigError: batches are to be made by label, where the label of data that is drawn from numbers its rows.
    """
    if draws and getattr(args.batch_sampler, "value", args.batch_sampler) == "group_by_label":
        raise ConfigError(
            "batch_sampler=group_by_label with training data whose label is a row's number, to draw its texts by: use "
            "topic_column for batches of one kind"
        )
    found = [part.known for part in draws if part.known is not None]
    if not found:
        return None
    pairs = torch.from_numpy(np.concatenate(found))
    return pairs[:, 0].contiguous(), pairs[:, 1].contiguous()


def make_batch_sampler(
    args: ContAccumTrainingArguments,
    dataset: Any,
    facts: RowFacts | None,
    batch_size: int,
    drop_last: bool,
    valid_label_columns: list[str] | None,
    generator: torch.Generator | None,
    seed: int,
) -> DefaultBatchSampler | None:
    """The sampler that the arguments ask for; None where it is sentence-transformers' own or the user's.

    Args:
        facts: of the rows of ``dataset``; None for one that is not trained on, whose rows are not grouped.
    """
    if args.own_batch_sampler or not hasattr(dataset, "__len__"):
        return None
    given = (dataset, batch_size, drop_last, valid_label_columns, generator, seed)
    grouped = facts is not None and (facts.topics is not None or args.groups_by_length)
    if not (grouped or args.avoids_duplicates):
        return EpochBatchSampler(*given)
    lengths = facts.lengths if facts is not None else None
    if facts is not None and args.groups_by_length and lengths is None:
        lengths = column_lengths(dataset, text_columns(dataset, valid_label_columns)).sum(axis=1)
    return PlannedBatchSampler(
        *given,
        no_duplicates=args.avoids_duplicates,
        lengths=lengths,
        topics=facts.topics if facts is not None else None,
        length_window=args.lengths_sorted,
    )


def describe_batches(args: ContAccumTrainingArguments) -> str | None:
    """How batches are made, for the start of a run; None for plainly shuffled ones."""
    parts = ["no duplicates"] if args.avoids_duplicates else []
    parts += [f"similar lengths, sorted {args.lengths_sorted} at a time"] if args.groups_by_length else []
    parts += [f"one {args.topic_column} each"] if args.topic_column else []
    return "; ".join(parts) or None


def warn_about_means(args: ContAccumTrainingArguments, loss: Any) -> None:
    """A running mean of embeddings takes batches of one topic for drift: say so where no probe replaces it."""
    if not (args.topic_column or args.groups_by_length) or not isinstance(loss, nn.Module):
        return
    wrapped = [] if isinstance(loss, ContAccumLoss) else [x for x in loss.modules() if isinstance(x, ContAccumLoss)]
    if any(x.settings["drift_compensation"] in MOVES_ENTRIES for x in wrapped):
        logger.warning(
            f"{type(loss).__name__} leaves ContAccumLoss no probe for drift, only running means of embeddings, which "
            "batches of one topic or length throw off: set drift_compensation to fresh or none, or batch at random"
        )
