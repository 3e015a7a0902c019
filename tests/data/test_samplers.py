"""Batch samplers: orders that seed and epoch determine, every row once, and what a batch is asked to be."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import Any

import numpy as np
import pytest
from accelerate.data_loader import BatchSamplerShard, skip_first_batches
from datasets import Dataset, DatasetDict
from torch.utils.data import DataLoader

from contaccum.data.samplers import (
    EpochBatchSampler,
    RowFacts,
    WeightedBatchSampler,
    make_batch_sampler,
    make_set_sampler,
    set_shares,
    set_weights,
    take_row_facts,
)
from contaccum.errors import ConfigError


@dataclass
class Args:
    """What samplers read of the training arguments."""

    topic_column: str | None = None
    groups_by_length: bool = False
    lengths_sorted: int = 16
    own_batch_sampler: bool = False
    avoids_duplicates: bool = False
    set_sampler: str | None = "proportional"
    sampling_temperature: float = 2.0
    sampling_weights: dict[str, float] = field(default_factory=dict)


def rows(n: int, seed: int = 0, different: int | None = None) -> Dataset:
    """Queries, positives and negatives drawn from one pool of texts, and a label that is no text."""
    rng = np.random.default_rng(seed)
    pool = np.array([f"text {i} " * (1 + i % 5) for i in range(different or 4 * n)], dtype=object)
    columns = {name: pool[rng.integers(0, len(pool), n)].tolist() for name in ("query", "positive", "negative")}
    return Dataset.from_dict({**columns, "label": [1] * n})


def made(args: Args, dataset: Any, batch_size: int = 8, drop_last: bool = False, seed: int = 3) -> Any:
    dataset, facts = take_row_facts(args, dataset)
    sampler = make_batch_sampler(
        args, dataset, facts.get(None, RowFacts()), batch_size, drop_last, ["label"], None, seed
    )
    assert sampler is not None
    return sampler


KINDS = [Args(), Args(groups_by_length=True), Args(topic_column="topic"), Args(avoids_duplicates=True)]
KINDS += [Args(topic_column="topic", groups_by_length=True)]


@pytest.mark.parametrize("args", KINDS)
def test_an_order_is_a_function_of_seed_and_epoch_and_holds_every_row_once(args: Args) -> None:
    dataset = rows(203, different=2000)
    if args.topic_column:
        dataset = dataset.add_column("topic", [i % 3 for i in range(203)])
    one, other = made(args, dataset), made(args, dataset)
    orders = []
    for epoch in (2, 0, 1):  # not one after the other
        one.set_epoch(epoch)
        other.set_epoch(epoch)
        orders.append(list(one))
        assert orders[-1] == list(other) and len(orders[-1]) == len(one) == 26
        assert sorted(chain(*orders[-1])) == list(range(203))
    assert len({str(order) for order in orders}) == 3 and list(made(args, dataset, seed=4)) != orders[1]
    dropping = made(args, dataset, drop_last=True)
    assert {len(batch) for batch in dropping} == {8} and len(list(dropping)) == len(dropping) == 25


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_take_turns_with_one_order_and_a_resumed_run_goes_on_with_it(ranks: int) -> None:
    sampler = made(KINDS[1], rows(256))
    sampler.set_epoch(1)
    order = list(sampler)
    shards = [list(BatchSamplerShard(sampler, ranks, rank, even_batches=False)) for rank in range(ranks)]
    assert [batch for turn in zip(*shards, strict=True) for batch in turn] == order
    loader = skip_first_batches(DataLoader(range(256), batch_sampler=sampler), 5)  # type: ignore[arg-type]  # has a length
    assert [batch.tolist() for batch in loader] == order[5:]


def test_no_text_is_twice_in_a_batch_and_a_row_is_deferred_not_lost() -> None:
    dataset = rows(400, different=300)
    texts = list(zip(*(dataset[name] for name in ("query", "positive", "negative")), strict=True))
    sampler = made(Args(avoids_duplicates=True), dataset)
    batches = list(sampler)
    for batch in batches:
        held = [text for row in batch for text in {*texts[row]}]
        assert len(held) == len({*held})
    assert sorted(chain(*batches)) == list(range(400))
    plain = list(made(Args(), dataset))
    assert any(len({*(t := [x for row in batch for x in {*texts[row]}])}) < len(t) for batch in plain)


def test_batches_are_of_similar_length_and_an_update_is_a_sample_of_all() -> None:
    lengths = np.random.default_rng(0).lognormal(4, 0.7, 4096).astype(int)
    dataset = Dataset.from_dict({"query": ["q"] * 4096, "positive": ["x" * n for n in lengths]})
    random, sorted_ = made(Args(), dataset), made(Args(groups_by_length=True), dataset)
    order = np.array(list(sorted_))

    def padded(order: np.ndarray) -> float:
        return float((lengths[order].max(axis=1) * 8).sum() / lengths.sum())

    assert padded(np.array(list(random))) > 1.7 > 1.3 > padded(order)
    assert lengths[order].var(axis=1).mean() < 0.1 * lengths.var()
    # But for the random batches, which come first, windows are updates of 16 batches.
    updates = lengths[order[8 : 8 + 496]].reshape(31, -1)
    expected = lengths.var() / 128
    assert updates.mean(axis=1).var() < 3 * expected
    first = lengths[order[:8]]
    assert first.var(axis=1).mean() > 0.3 * lengths.var()


def test_batches_are_of_one_topic_but_for_the_first_and_what_is_left_over() -> None:
    topics = [["a", "b", "c"][min(i // 100, 2)] for i in range(330)]
    dataset = rows(330).add_column("topic", topics)
    args = Args(topic_column="topic")
    left, facts = take_row_facts(args, dataset)
    assert left.column_names == ["query", "positive", "negative", "label"] and facts[None].topics is not None
    batches = list(made(args, dataset))
    mixed = [i for i, batch in enumerate(batches) if len({topics[row] for row in batch}) > 1]
    assert 0 in mixed and len(mixed) <= 4
    kinds = [topics[batch[0]] for i, batch in enumerate(batches) if i not in mixed]
    assert sum(a != b for a, b in pairwise(kinds)) > 8  # all in random order
    with pytest.raises(ConfigError, match="topic_column=topic: the training data has only the columns query, positive"):
        made(args, rows(10))
    with pytest.raises(ConfigError, match="with streamed training data"):
        take_row_facts(args, dataset.to_iterable_dataset())


def test_samplers_of_the_users_own_are_left_to_sentence_transformers() -> None:
    assert make_batch_sampler(Args(own_batch_sampler=True), rows(8), RowFacts(), 4, False) is None
    assert make_batch_sampler(Args(), iter(()), None, 4, False) is None


# Several sets


def sets(**sizes: int) -> dict[str, Any]:
    return {name: rows(size) for name, size in sizes.items()}


def set_sampler(args: Args, parts: dict[str, Any], seed: int = 5) -> Any:
    batches: list[Any] = [EpochBatchSampler(part, 4, False, seed=seed) for part in parts.values()]
    return make_set_sampler(args, parts, batches, seed), batches


def of_sets(order: list[list[int]], parts: dict[str, Any]) -> Counter[str]:
    """How many batches each set has; no batch is of two."""
    ends = np.cumsum([len(part) for part in parts.values()])
    found = [{int(np.searchsorted(ends, row, side="right")) for row in batch} for batch in order]
    assert all(len(one) == 1 for one in found)
    return Counter(list(parts)[next(iter(one))] for one in found)


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (Args(), {"a": 40, "b": 10, "c": 10}),
        (Args(set_sampler="round_robin"), {"a": 10, "b": 10, "c": 10}),
        (Args(set_sampler="temperature"), {"a": 30, "b": 15, "c": 15}),
        (Args(set_sampler="temperature", sampling_temperature=1.0), {"a": 40, "b": 10, "c": 10}),
        (Args(set_sampler="weights", sampling_weights={"b": 4}), {"a": 10, "b": 40, "c": 10}),
    ],
)
def test_each_set_has_its_share_of_an_epoch_in_an_order_that_resumes(args: Args, expected: dict[str, int]) -> None:
    parts = sets(a=160, b=40, c=40)
    (one, batches), (other, _) = set_sampler(args, parts), set_sampler(args, parts)
    orders = []
    for epoch in (3, 0):
        one.set_epoch(epoch)
        other.set_epoch(epoch)
        orders.append(list(one))
        assert orders[-1] == list(other) and len(one) == sum(expected.values())
        assert of_sets(orders[-1], parts) == expected
    assert orders[0] != orders[1]
    shares = set_shares(args, parts, batches, one)
    assert {name: about["batches_per_epoch"] for name, about in shares.items()} == expected
    assert sum(about["share"] for about in shares.values()) == pytest.approx(1)


def test_passes_over_a_set_go_on_over_the_ends_of_epochs() -> None:
    parts = sets(a=40, b=160)
    sampler, _ = set_sampler(Args(set_sampler="weights", sampling_weights={"a": 7, "b": 3}), parts)
    assert sampler.counts == [35, 15]
    seen: list[int] = []
    for epoch in range(8):
        sampler.set_epoch(epoch)
        seen += [row for batch in sampler for row in batch]
    for rows_of_set in ([row for row in seen if row < 40], [row for row in seen if row >= 40]):
        size = 40 if rows_of_set[0] < 40 else 160
        for start in range(0, len(rows_of_set) - size, size):
            assert len({*rows_of_set[start : start + size]}) == size


def test_sets_that_cannot_be_sampled_are_refused() -> None:
    parts = {"a": rows(8), "b": rows(3)}
    batches: list[Any] = [EpochBatchSampler(part, 4, True, seed=0) for part in parts.values()]
    with pytest.raises(ConfigError, match="training set 'b' has no whole batch of 4 rows"):
        make_set_sampler(Args(), parts, batches)
    with pytest.raises(ConfigError, match=r"there is no training set 'faw', only faq, mined; did you mean 'faq'"):
        set_weights(Args(set_sampler="weights", sampling_weights={"faw": 2}), {"faq": 1, "mined": 1})
    assert make_set_sampler(Args(set_sampler=None), sets(a=8), set_sampler(Args(), sets(a=8))[1]) is None
    assert set_shares(Args(set_sampler=None), sets(a=8), [batches[0]], None) == {"a": {"rows": 8}}
    assert WeightedBatchSampler.__len__ and DatasetDict(sets(a=8)).num_rows == {"a": 8}
