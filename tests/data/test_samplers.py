"""Batch samplers: the promise of sentence-transformers' NO_DUPLICATES, kept on any number of ranks, and fast."""

from __future__ import annotations

import logging
import time
from itertools import chain, zip_longest
from typing import Any

import numpy as np
import pytest
from accelerate.data_loader import BatchSamplerShard, skip_first_batches
from datasets import Dataset
from sentence_transformers.base.sampler import NoDuplicatesBatchSampler
from torch.utils.data import DataLoader

from contaccum.data.samplers import EpochBatchSampler, PlannedBatchSampler
from contaccum.errors import ConfigError


def rows(n: int, seed: int = 0, different: int | None = None) -> Dataset:
    """Queries, positives and negatives drawn from one pool of texts, and a label that is no text."""
    rng = np.random.default_rng(seed)
    pool = np.array([f"text {i} " * (1 + i % 5) for i in range(different or 4 * n)], dtype=object)
    columns = {name: pool[rng.integers(0, len(pool), n)].tolist() for name in ("query", "positive", "negative")}
    return Dataset.from_dict({**columns, "label": [1] * n})


def assert_no_repeats(batches: list[list[int]], dataset: Dataset) -> None:
    """As sentence-transformers has it: a row's values are disjoint from those of the batch before it."""
    for batch in batches:
        seen: set[str] = set()
        for row in batch:
            values = {dataset[row][name] for name in ("query", "positive", "negative")}
            assert seen.isdisjoint(values)
            seen |= values


def samplers(dataset: Dataset) -> dict[str, Any]:
    n = len(dataset)
    given: Any = (dataset, 8, False, ["label"], None, 3)
    lengths, topics = np.arange(n) % 37, np.arange(n) % 5
    return {
        "shuffled": EpochBatchSampler(*given),
        "no_duplicates": PlannedBatchSampler(*given),
        "lengths": PlannedBatchSampler(*given, no_duplicates=False, lengths=lengths),
        "topics": PlannedBatchSampler(*given, no_duplicates=False, topics=topics),
        "all": PlannedBatchSampler(*given, lengths=lengths, topics=topics, length_window=4),
    }


KINDS = ["shuffled", "no_duplicates", "lengths", "topics", "all"]


def test_promise_of_no_duplicates_is_kept_with_full_batches() -> None:
    dataset = rows(600, different=700)  # three texts a row: each occurs some 2.6 times
    ours = list(PlannedBatchSampler(dataset, 8, False, ["label"]))
    theirs = list(NoDuplicatesBatchSampler(dataset, 8, False, ["label"]))
    assert_no_repeats(theirs, dataset)
    assert_no_repeats(ours, dataset)
    assert sorted(chain(*ours)) == list(range(600)) and {len(batch) for batch in ours} == {8}


def test_labels_are_no_texts() -> None:
    dataset = rows(64)
    assert PlannedBatchSampler(dataset, 8, False, ["label"]).plan().repeats == 0
    assert PlannedBatchSampler(dataset, 8, False, []).plan().repeats > 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("n", [512, 499])
def test_ranks_together_see_the_plan_of_one(kind: str, ranks: int, n: int) -> None:
    dataset = rows(n)
    alone = list(samplers(dataset)[kind])
    shards = [
        list(BatchSamplerShard(samplers(dataset)[kind], ranks, rank, even_batches=False)) for rank in range(ranks)
    ]
    together = [batch for turn in zip_longest(*shards) for batch in turn if batch is not None]
    assert together == alone and sorted(chain(*alone)) == list(range(n))


@pytest.mark.parametrize("kind", KINDS)
def test_order_is_that_of_seed_and_epoch_however_it_is_reached(kind: str) -> None:
    dataset = rows(300)
    running = samplers(dataset)[kind]
    epochs = []
    for epoch in range(3):
        running.set_epoch(epoch)
        epochs.append(list(running))
    assert epochs[0] != epochs[1] != epochs[2]
    fresh = samplers(dataset)[kind]
    fresh.set_epoch(2)
    assert list(fresh) == epochs[2] and len(fresh) == len(epochs[2])
    # As a resumed run reaches it: the first batches of the epoch are passed over.
    loader = DataLoader(list(range(300)), batch_sampler=fresh, collate_fn=lambda batch: batch)
    assert list(skip_first_batches(loader, 7)) == epochs[2][7:]


def test_drop_last_leaves_full_batches() -> None:
    dataset = rows(100)
    sampler = PlannedBatchSampler(dataset, 8, True, ["label"], lengths=np.arange(100), topics=np.arange(100) % 3)
    assert [len(batch) for batch in sampler] == [8] * 12 and len(sampler) == 12


def test_what_must_repeat_is_told_once_with_counts(caplog: pytest.LogCaptureFixture) -> None:
    dataset = Dataset.from_dict({"query": [f"q{i}" for i in range(80)], "positive": ["yes", "no"] * 40})
    sampler = PlannedBatchSampler(dataset, 8, False)
    with caplog.at_level(logging.WARNING, logger="contaccum.data.samplers"):
        for epoch in range(2):
            sampler.set_epoch(epoch)
            assert sorted(chain(*sampler)) == list(range(80))
    (record,) = caplog.records
    assert "in 60 cases a batch of 8 holds a text again" in record.message and "\n" not in record.message
    assert "2 texts are in more rows (up to 40) than the 10 batches" in record.message


def test_facts_about_other_rows_are_refused() -> None:
    with pytest.raises(ConfigError, match="9 topics for 10 rows"):
        PlannedBatchSampler(rows(10), 4, False, topics=np.zeros(9))


def test_planning_is_several_times_as_fast_as_the_sampler_it_replaces() -> None:
    dataset = rows(4000)
    seconds = {}
    for kind in (PlannedBatchSampler, NoDuplicatesBatchSampler):
        sampler = kind(dataset, 8, False, ["label"])
        next(iter(sampler))  # what is done once
        times = []
        for epoch in range(3):
            sampler.set_epoch(epoch)
            started = time.perf_counter()
            assert sum(len(batch) for batch in sampler) == 4000
            times.append(time.perf_counter() - started)
        seconds[kind] = min(times)
    assert seconds[NoDuplicatesBatchSampler] > 5 * seconds[PlannedBatchSampler]  # at rest: some 100
