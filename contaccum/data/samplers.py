"""The order of training data: batches that depend on the seed and the epoch alone.

sentence-transformers' default sampler draws each epoch's order from one generator that runs on, so a run resumed in
its second epoch would see the first epoch's order again. Here the order is a function of (seed, epoch), and the same
however many ranks take turns with its batches. How rows are put together is ``batch_plan``'s affair.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from sentence_transformers.base.sampler import DefaultBatchSampler

from contaccum.data.batch_plan import LENGTH_WINDOW, BatchPlan, plan_batches
from contaccum.data.repeats import SharedTexts
from contaccum.data.text_columns import column_hashes
from contaccum.errors import ConfigError

logger = logging.getLogger(__name__)


class EpochBatchSampler(DefaultBatchSampler):
    """Shuffled batches whose order is determined by ``seed`` and ``set_epoch``; the last may be shorter."""

    def __iter__(self) -> Iterator[list[int]]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        order = torch.randperm(len(self.sampler), generator=generator)  # type: ignore[arg-type]  # a Dataset
        for start in range(0, len(order), self.batch_size):
            # A list of them all would take five times the memory of the tensor.
            batch = order[start : start + self.batch_size].tolist()
            if len(batch) == self.batch_size or not self.drop_last:
                yield batch


class PlannedBatchSampler(DefaultBatchSampler):
    """Batches without duplicates, of similar lengths, of one topic, or any of these together.

    Each epoch's batches are planned at once by :func:`~contaccum.data.batch_plan.plan_batches`, which says what is
    promised. As it is, it takes the place of sentence-transformers' ``NO_DUPLICATES``, in its trainer too::

        SentenceTransformerTrainingArguments(..., batch_sampler=PlannedBatchSampler)

    No two rows of a batch share a text in any of the columns (labels and ``dataset_name`` apart). Unlike there, all
    batches but the last are full and every row is in one of them; where that is impossible without a repeat, it
    repeats as little as it can, and warns.

    Args:
        dataset, batch_size, drop_last, valid_label_columns, generator, seed: as sentence-transformers gives them; the
            generator is not used.
        no_duplicates: whether texts may not occur twice in a batch. They are hashed once, in the first epoch.
        lengths: (N,) numbers; rows of similar length come together, and need less padding.
        topics: (N,) labels; batches are of one topic.
        length_window: batches sorted by length together.

    Raises:
        ConfigError: when there are not as many lengths or topics as rows.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        drop_last: bool,
        valid_label_columns: list[str] | None = None,
        generator: torch.Generator | None = None,
        seed: int = 0,
        *,
        no_duplicates: bool = True,
        lengths: np.ndarray | None = None,
        topics: np.ndarray | None = None,
        length_window: int = LENGTH_WINDOW,
    ) -> None:
        super().__init__(dataset, batch_size, drop_last, valid_label_columns, generator, seed)
        for name, values in (("lengths", lengths), ("topics", topics)):
            if values is not None and len(values) != len(dataset):
                raise ConfigError(f"{len(values):,} {name} for {len(dataset):,} rows: give one for each row")
        self.dataset = dataset
        self.no_duplicates = no_duplicates
        self.lengths = lengths
        self.topics = None if topics is None else np.unique(np.asarray(topics), return_inverse=True)[1]
        self.length_window = length_window
        self._texts: SharedTexts | None = None
        self._warned = False

    @property
    def texts(self) -> SharedTexts:
        """Which rows share texts; found once, on first use."""
        if self._texts is None:
            names = text_columns(self.dataset, self.valid_label_columns)
            self._texts = SharedTexts.from_hashes(column_hashes(self.dataset, names))
        return self._texts

    def plan(self) -> BatchPlan:
        """The batches of ``self.epoch``."""
        plan = plan_batches(
            len(self.dataset),
            self.batch_size,
            self.seed,
            self.epoch,
            texts=self.texts if self.no_duplicates else None,
            lengths=self.lengths,
            topics=self.topics,
            length_window=self.length_window,
            drop_last=self.drop_last,
        )
        if plan.repeats and not self._warned:
            self._warned = True
            logger.warning(describe_repeats(plan, self.texts))
        return plan

    def __iter__(self) -> Iterator[list[int]]:
        yield from self.plan()


def text_columns(dataset: Any, label_columns: list[str] | None = None) -> list[str]:
    """The columns that a loss encodes: all but labels and the name of the data set."""
    return [name for name in dataset.column_names if name not in {*(label_columns or ()), "dataset_name"}]


def describe_repeats(plan: BatchPlan, texts: SharedTexts) -> str:
    """Why a plan holds texts twice, in one line, with the way out."""
    excess = texts.counts[texts.counts > len(plan)]
    most = f"{len(excess):,} texts are in more rows (up to {excess.max(initial=0):,}) than the {len(plan):,} batches"
    return (
        f"no_duplicates: in {plan.repeats:,} cases a batch of {plan.slots.shape[1]} holds a text again, because "
        f"{most if len(excess) else 'too many rows share texts'}. Lower the batch size, or take out rows of such texts"
    )
