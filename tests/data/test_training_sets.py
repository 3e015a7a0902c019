"""Invariants of several training sets: what is said of each, what all know, the fingerprint, shares and passes."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import ConcatDataset

from contaccum.data import load_training_data
from contaccum.data.draws import text_ids
from contaccum.data.samplers import EpochBatchSampler
from contaccum.data.set_samplers import RowsOfSets, WeightedBatchSampler
from contaccum.data.training_sets import TrainingSets, load_training_sets, parse_training_sets
from contaccum.errors import ConfigError


def put(path: Path, *records: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def rows(name: str, n: int, **more: Any) -> list[dict[str, Any]]:
    return [{"query": f"{name} query {i}", "positive": f"{name} passage {i}", **more} for i in range(n)]


def load(*given: Any, **common: Any) -> TrainingSets:
    return load_training_sets(parse_training_sets(given, common))


def test_each_set_is_read_with_settings_of_its_own(tmp_path: Path) -> None:
    plain = put(tmp_path / "plain.jsonl", *rows("a", 3))
    table = tmp_path / "faq.txt"
    table.write_text("frage,antwort,falsch\nq,p,n\n")
    mapped = {"path": str(table), "name": "faq", "format": "csv", "num_hard_negatives": 1}
    mapped["columns"] = {"query": "frage", "positive": "antwort", "negatives": "falsch"}
    sets = load(plain, json.dumps(mapped))
    assert {name: len(part) for name, part in sets.dataset.items()} == {"plain": 3, "faq": 1}
    row = sets.dataset["faq"][0]
    assert (row["query"], row["positive"], row["negative_1"]) == ("q", "p", "n")
    assert sets.summary().splitlines() == [
        "plain: 3 records: 3 used, 0 left out",
        "faq: 1 records: 1 used, 0 left out",
    ]


def test_equal_texts_of_all_sets_have_one_id(tmp_path: Path) -> None:
    sets = load(put(tmp_path / "a.jsonl", *rows("a", 2)), put(tmp_path / "b.jsonl", *rows("b", 2), *rows("a", 1)))
    assert sets.known_positives is None
    assert sets.dataset["a"][0]["label"] == sets.dataset["b"][2]["label"] == text_ids(["a query 0", "a passage 0"])


def test_positives_of_a_query_are_known_whichever_set_tells_of_them(tmp_path: Path) -> None:
    """Also one positive in each of two sets; against all pairs of all records."""
    records: dict[str, list[dict[str, Any]]] = {"a": [], "b": [], "c": []}
    for i in range(60):
        for place, name in enumerate(records):
            if i % (place + 2) == 0:  # queries are shared by some sets, by all, or by none
                positives = [f"p{i}-{place}", *([f"p{i}-9"] if i % 5 == 0 else [])]
                records[name].append({"query": f"q{i}", "positives": positives})
    sets = load(*(put(tmp_path / f"{name}.jsonl", *found) for name, found in records.items()))
    pairs = {(r["query"], p) for found in records.values() for r in found for p in r["positives"]}
    per_query = Counter(query for query, _ in pairs)
    expected = sorted(tuple(text_ids([q, p])) for q, p in pairs if per_query[q] > 1)
    assert [tuple(pair) for pair in sets.known_positives.tolist()] == expected
    alone = [load_training_data(tmp_path / f"{name}.jsonl").known_positives for name in records]
    told = {tuple(pair) for known in alone if known is not None for pair in known.tolist()}
    assert told < set(expected)


def test_a_missing_negative_is_never_filled_with_a_positive_of_another_set(tmp_path: Path) -> None:
    listed = [{"query": f"q{i}", "positive": f"p{i}", "negatives": ["n"]} for i in range(3)]
    asked = {"query": "q0", "positive": "other"}
    one = put(tmp_path / "a.jsonl", {"query": "x", "positive": "p0"}, asked, *listed[1:])
    sets = load(put(tmp_path / "b.jsonl", *listed), one, num_hard_negatives=1)
    draws = sets.parts[1].transform
    assert draws is not None
    seen = set()
    for epoch in range(40):
        draws.set_epoch(epoch)
        seen.add(sets.dataset["a"][1]["negative_1"])
    assert seen == {"p1", "p2"}  # never p0, which the other set calls a positive of q0


def test_the_fingerprint_is_of_all_sets_in_their_order(tmp_path: Path) -> None:
    a, b = put(tmp_path / "a.jsonl", *rows("a", 3)), put(tmp_path / "b.jsonl", *rows("b", 3))
    base, turned = load(a, b).fingerprint, load(b, a).fingerprint
    assert base == load(a, {"path": b, "query_prompt": "x", "weight": 3}).fingerprint != turned
    assert load({"path": a, "weight": 2}).fingerprint == load_training_data(a).fingerprint
    for path, name in ((a, "a"), (b, "b")):
        put(Path(path), *rows(name, 2), {"query": "changed", "positive": "too"})
        assert load(a, b).fingerprint not in (base, turned)
        put(Path(path), *rows(name, 3))
    assert load(a, b).fingerprint == base


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([{"path": "a", "wieght": 2}], "unknown key 'wieght'; did you mean 'weight'"),
        ([{"weight": 2}], "has no path"),
        ([3], "3 has no path"),
        (["{path: a}"], "is not a JSON object"),
        ([{"path": "a", "weight": 0}], "train_data: a: weight must be a number above 0, got 0"),
        ([{"path": "a", "weight": True}], "weight must be a number above 0"),
        ([{"path": "a", "weight": float("inf")}], "weight must be a number above 0"),
        ([{"path": "a", "query_prompt": 3}], "query_prompt must be a text, got 3"),
        ([{"path": "a", "name": "query"}], "'query' is no name for a set"),
        ([{"path": "a", "format": "tevatorn"}], "format 'tevatorn' is unknown"),
        ([{"path": "a", "negatives_from": 3}], "train_data: a: negatives_from=3 with num_hard_negatives=0"),
        (["one/a.jsonl", "two/a.csv.gz"], "two sets are called 'a'"),
    ],
)
def test_what_cannot_be_said_of_a_set_is_one_clear_line(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        parse_training_sets(given, {})
    assert "\n" not in str(caught.value)


SIZES, N = (40, 12, 7), 4


def sampler(weights: tuple[float, ...], seed: int = 3, block: int = 8, **kwargs: Any) -> WeightedBatchSampler:
    parts: list[Any] = [list(range(size)) for size in SIZES]
    batches: list[Any] = [EpochBatchSampler(part, N, False, seed=seed) for part in parts]
    return WeightedBatchSampler(ConcatDataset(parts), batches, seed=seed, weights=weights, block=block, **kwargs)


def taken(order: list[list[int]]) -> list[tuple[int, int, tuple[int, ...]]]:
    """Set, pass and rows of each batch."""
    dataset = RowsOfSets([torch.arange(size) for size in SIZES])
    found = []
    for batch in order:
        places = [dataset._place(number) for number in batch]
        assert len({place[:2] for place in places}) == 1  # of one set, and read in one pass
        found.append((*places[0][:2], tuple(row for _, _, row in places)))
    return [(part, turn - 1, rows_) for part, turn, rows_ in found]


@pytest.mark.parametrize("weights", [(1.0, 1.0, 1.0), (40.0, 12.0, 7.0), (1, 5, 0.5), (40**0.5, 12**0.5, 7**0.5)])
def test_shares_are_exact_and_every_row_comes_before_any_comes_again(weights: tuple[float, ...]) -> None:
    batches = sampler(weights)
    lengths = [-(-size // N) for size in SIZES]
    assert len(batches) == sum(lengths) == sum(batches.counts)
    seen: list[list[tuple[int, tuple[int, ...]]]] = [[], [], []]
    for epoch in range(5):
        batches.set_epoch(epoch)
        order = taken(list(batches))
        assert Counter(part for part, _, _ in order) == dict(enumerate(batches.counts))
        for start in range(0, len(order), batches.block):
            had = Counter(part for part, _, _ in order[: start + batches.block])
            end = min(start + batches.block, len(order))
            assert all(abs(had[i] - c * end / len(order)) < 1 for i, c in enumerate(batches.counts))
        for part, turn, found in order:
            seen[part].append((turn, found))
    for size, length, stream in zip(SIZES, lengths, seen, strict=True):
        for place in range(0, len(stream) - length + 1, length):  # pass by pass, over the ends of epochs
            one = stream[place : place + length]
            assert {turn for turn, _ in one} == {place // length}
            assert sorted(row for _, found in one for row in found) == list(range(size))


def test_the_order_is_a_function_of_seed_and_epoch() -> None:
    one, other = sampler((1, 5, 0.5)), sampler((1, 5, 0.5))
    one.set_epoch(0)
    list(one)  # whoever resumes has not seen the first epoch
    for epoch in (2, 1):
        for batches in (one, other):
            batches.set_epoch(epoch)
        assert list(one) == list(other)
    assert list(one) != list(sampler((1, 5, 0.5), seed=4))


def test_a_set_without_a_batch_is_refused() -> None:
    parts: list[Any] = [list(range(8)), list(range(3))]
    batches: list[Any] = [EpochBatchSampler(part, N, True, seed=0) for part in parts]
    with pytest.raises(ConfigError, match="training set 2 of 2 has no whole batch of 4 rows"):
        WeightedBatchSampler(ConcatDataset(parts), batches, weights=(1, 1), block=8)


def test_a_row_draws_anew_in_every_pass(tmp_path: Path) -> None:
    listed = [{"query": f"q{i}", "positives": ["a", "b", "c"], "negatives": list("vwxyz")} for i in range(6)]
    one = put(tmp_path / "a.jsonl", *listed)
    sets = load(one, put(tmp_path / "b.jsonl", *listed), num_hard_negatives=2)
    dataset = RowsOfSets(list(sets.dataset.values()))
    draws = sets.parts[1].transform
    reference = load_training_data(one, num_hard_negatives=2)
    assert draws is not None and reference.transform is not None
    for epoch in (0, 3):
        draws.set_epoch(epoch, seed=1)
        for turn in (None, 0, 1, 5):
            first = 6 + (0 if turn is None else (turn + 1) * 12)
            reference.transform.set_epoch(epoch if turn is None else turn, seed=1)
            expected = [dict(row) for row in islice(reference.dataset, 6)]
            assert dataset.__getitems__([first + i for i in range(6)]) == [
                {**row, "label": ids} for row, ids in zip(expected, (r["label"] for r in expected), strict=True)
            ]
            assert dataset[first] == expected[0]
        assert draws.epoch == epoch  # as it was
