"""Batch samplers: orders that seed and epoch determine, every row once, and what a batch is asked to be."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import pytest
from accelerate.data_loader import BatchSamplerShard, skip_first_batches
from datasets import Dataset
from torch.utils.data import DataLoader

from contaccum.data.samplers import EpochBatchSampler, make_batch_sampler, make_set_sampler, set_shares
from contaccum.errors import ConfigError


@dataclass
class Args:
    """What samplers read of the training arguments."""

    own_batch_sampler: bool = False
    avoids_duplicates: bool = False
    set_sampler: str | None = "proportional"
    sampling_temperature: float = 2.0
    sampling_weights: dict[str, float] = field(default_factory=dict)


def rows(n: int, seed: int = 0, different: int | None = None) -> Dataset:
    """Queries, positives and negatives drawn from one pool of texts, and a label that is no text."""
    rng = np.random.default_rng(seed)
    pool = np.array([f"text {i}" for i in range(different or 4 * n)], dtype=object)
    columns = {name: pool[rng.integers(0, len(pool), n)].tolist() for name in ("query", "positive", "negative")}
    return Dataset.from_dict({**columns, "label": [1] * n})


def made(args: Args, dataset: Any, batch_size: int = 8, drop_last: bool = False, seed: int = 3) -> Any:
    return make_batch_sampler(args, dataset, batch_size=batch_size, drop_last=drop_last, seed=seed)


@pytest.mark.parametrize("args", [Args(), Args(avoids_duplicates=True)])
def test_an_order_is_a_function_of_seed_and_epoch_and_holds_every_row_once(args: Args) -> None:
    dataset = rows(203, different=2000)
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
    sampler = made(Args(), rows(256))
    sampler.set_epoch(1)
    order = list(sampler)
    shards = [list(BatchSamplerShard(sampler, ranks, rank, even_batches=False)) for rank in range(ranks)]
    assert [batch for turn in zip(*shards, strict=True) for batch in turn] == order
    loader = skip_first_batches(DataLoader(range(256), batch_sampler=sampler), 5)  # type: ignore[arg-type]  # has a length
    assert [batch.tolist() for batch in loader] == order[5:]


def test_no_text_is_twice_in_a_batch_and_a_row_is_deferred_not_lost() -> None:
    dataset = rows(400, different=300)
    texts = list(zip(*(dataset[name] for name in ("query", "positive", "negative")), strict=True))
    batches = list(made(Args(avoids_duplicates=True), dataset))
    for batch in batches:
        held = [text for row in batch for text in {*texts[row]}]
        assert len(held) == len({*held})
    assert sorted(chain(*batches)) == list(range(400))


def test_samplers_of_the_users_own_are_left_to_sentence_transformers() -> None:
    assert made(Args(own_batch_sampler=True), rows(8)) is made(Args(), iter(())) is None


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
        (Args(), {"a": 4, "b": 1, "c": 1}),
        (Args(set_sampler="round_robin"), {"a": 1, "b": 1, "c": 1}),
        (Args(set_sampler="temperature"), {"a": 2, "b": 1, "c": 1}),
        (Args(set_sampler="temperature", sampling_temperature=1.0), {"a": 4, "b": 1, "c": 1}),
        (Args(set_sampler="weights", sampling_weights={"b": 4}), {"a": 1, "b": 4, "c": 1}),
    ],
)
def test_each_set_has_its_share_of_an_epoch_in_an_order_that_resumes(args: Args, expected: dict[str, int]) -> None:
    parts = sets(a=640, b=160, c=160)
    (one, batches), (other, _) = set_sampler(args, parts), set_sampler(args, parts)
    orders = []
    for epoch in (3, 0):
        one.set_epoch(epoch)
        other.set_epoch(epoch)
        orders.append(list(one))
        assert orders[-1] == list(other) and len(one) == len(orders[-1])
    assert orders[0] != orders[1]
    shares, counts = set_shares(args, parts, batches, one), of_sets(orders[0], parts)
    for name, weight in expected.items():
        assert shares[name] == {"rows": len(parts[name]), "share": pytest.approx(weight / sum(expected.values()))}
        # By chance, five standard deviations at most.
        assert abs(counts[name] / len(one) - shares[name]["share"]) < (0.16 if "weights" in dir(one) else 1e-9)


def test_a_set_that_is_used_up_begins_again_in_another_order() -> None:
    parts = sets(a=16, b=400)
    sampler, _ = set_sampler(Args(set_sampler="weights", sampling_weights={"a": 9}), parts)
    taken = [tuple(batch) for batch in sampler if batch[0] < 16]
    passes = [taken[start : start + 4] for start in range(0, len(taken) - 4, 4)]
    assert len(passes) > 9 and all(sorted(chain(*one)) == list(range(16)) for one in passes)
    assert len({*passes[0]} & {*passes[1]}) < 4


def test_sets_that_cannot_be_sampled_are_refused() -> None:
    parts = {"a": rows(8), "b": rows(3)}
    batches: list[Any] = [EpochBatchSampler(part, 4, True, seed=0) for part in parts.values()]
    with pytest.raises(ConfigError, match="training set 'b' has no whole batch"):
        make_set_sampler(Args(), parts, batches)
    with pytest.raises(ConfigError, match="a training set must be one of faq, mined, got 'faw'; did you mean 'faq'"):
        set_sampler(Args(set_sampler="weights", sampling_weights={"faw": 2}), sets(faq=8, mined=8))
    assert make_set_sampler(Args(set_sampler=None), sets(a=8), set_sampler(Args(), sets(a=8))[1]) is None
    assert set_shares(Args(set_sampler=None), sets(a=8), [batches[0]], None) == {"a": {"rows": 8}}
