"""Exact search gives the same bits however a corpus is sliced, and whatever finds the candidates."""

from __future__ import annotations

from typing import Any

import faiss
import numpy as np
import pytest
import torch

from contaccum.errors import UserError
from contaccum.retrieval import exact, exact_scores
from contaccum.retrieval.cpu_slices import BFLOAT16, CpuSlices
from contaccum.retrieval.exact import exact_search
from contaccum.retrieval.exact_scores import ExactScores
from contaccum.retrieval.rows import ArrayRows


def vectors(n: int, d: int = 16, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(n, d)).astype(np.float32)


def by_numpy(documents: np.ndarray, ids: list[str] | None, queries: np.ndarray, k: int, metric: str) -> Any:
    """Scores in float64 from one pair at a time, and rows by score and id."""
    documents, queries = documents.astype(np.float64), queries.astype(np.float64)
    if metric == "cos":
        documents = documents / np.maximum(np.linalg.norm(documents, axis=1, keepdims=True), 1e-300)
        queries = queries / np.linalg.norm(queries, axis=1, keepdims=True)
    scores = np.array([[float(np.dot(q, d)) for d in documents] for q in queries]).astype(np.float32)
    names = list(range(len(documents))) if ids is None else ids
    rows = [sorted(range(len(documents)), key=lambda row: (-line[row], names[row]))[:k] for line in scores]
    return np.take_along_axis(scores, np.array(rows), axis=1), np.array(rows)


@pytest.mark.parametrize("metric", ["cos", "dot"])
@pytest.mark.parametrize("k", [1, 7, 63, 64, 65, 199, 200, 500])
def test_sliced_search_equals_numpy(metric, k):
    documents, queries = vectors(200), vectors(5, seed=1)
    scores, rows = exact_search(ArrayRows(documents), queries, k, metric, slice_rows=64)
    expected_scores, expected = by_numpy(documents, None, queries, k, metric)
    np.testing.assert_array_equal(rows, expected)
    np.testing.assert_allclose(scores, expected_scores, rtol=3e-7, atol=1e-7)


@pytest.mark.parametrize("metric", ["cos", "dot"])
@pytest.mark.parametrize("kind", ["random", "twins", "all alike", "nearly alike", "best last", "long and short"])
def test_slices_threads_and_batches_change_no_bit(metric, kind, monkeypatch):
    rng = np.random.default_rng(3)
    documents, queries = vectors(600, d=24), vectors(150, d=24, seed=1)
    if kind == "twins":
        documents = documents[rng.integers(0, 60, 600)]
    elif kind == "all alike":
        documents[:] = documents[0]
    elif kind == "nearly alike":
        documents = documents[:1] + np.float32(1e-7) * documents
    elif kind == "best last":
        documents = documents[np.argsort(documents @ queries[0])]
    elif kind == "long and short":
        documents *= np.float32(10.0) ** rng.integers(-3, 4, (600, 1)).astype(np.float32)
    ids = [f"d{number}" for number in rng.permutation(600)]
    once = exact_search(ArrayRows(documents, ids), queries, 40, metric)
    for size in (7, 64, 599):
        for one, other in zip(
            once, exact_search(ArrayRows(documents, ids), queries, 40, metric, slice_rows=size), strict=True
        ):
            np.testing.assert_array_equal(one, other)
    before = faiss.omp_get_max_threads()
    try:
        faiss.omp_set_num_threads(2)
        monkeypatch.setattr(exact, "_HELD", 4000)
        monkeypatch.setattr(exact_scores, "BLOCK_BYTES", 5000)
        for one, other in zip(
            once, exact_search(ArrayRows(documents, ids), queries, 40, metric, slice_rows=100), strict=True
        ):
            np.testing.assert_array_equal(one, other)
    finally:
        faiss.omp_set_num_threads(before)
    # The order of the corpus says nothing either.
    shuffle = rng.permutation(600)
    shuffled = ArrayRows(documents[shuffle], [ids[row] for row in shuffle])
    scores, rows = exact_search(shuffled, queries, 40, metric, slice_rows=64)
    np.testing.assert_array_equal(scores, once[0])
    np.testing.assert_array_equal(shuffle[rows], once[1])


@pytest.mark.parametrize("kind", ["random", "twins", "all alike"])
def test_ties_are_ordered_by_id_across_slices(kind):
    rng = np.random.default_rng(0)
    documents = {
        "random": vectors(130, d=4),
        "twins": np.repeat(vectors(13, d=4), 10, axis=0)[rng.permutation(130)],
        "all alike": np.tile(vectors(1, d=4), (130, 1)),
    }[kind]
    ids = [f"d{number}" for number in rng.permutation(130)]
    for k in (1, 5, 10, 11, 129):
        _, rows = exact_search(ArrayRows(documents, ids), vectors(3, d=4, seed=1), k, "dot", slice_rows=9)
        np.testing.assert_array_equal(rows, by_numpy(documents, ids, vectors(3, d=4, seed=1), k, "dot")[1])


class Careless:
    """Wrong by as much as it admits, and stingy."""

    slice_rows: int | None = None

    def __init__(self, error: float, max_fetch: int | None = None) -> None:
        self.wrong, self.max_fetch = error, max_fetch
        self.fetched: list[int] = []

    def margin(self, k: int) -> int:
        return 1

    def error(self, dimension: int) -> tuple[float, float]:
        return self.wrong, 0.0

    def search(self, documents, first, queries, k):
        assert self.max_fetch is None or k <= self.max_fetch
        self.fetched.append(k)
        scores = queries @ documents.T
        limit = self.wrong * np.linalg.norm(queries, axis=1)[:, None] * np.linalg.norm(documents, axis=1)
        noise = np.random.default_rng(first).choice([-0.99, 0.99], scores.shape)
        scores = (scores + noise * limit).astype(np.float32)
        rows = np.argsort(-scores, axis=1)[:, :k]
        return np.take_along_axis(scores, rows, axis=1), rows


@pytest.mark.parametrize("metric", ["cos", "dot"])
@pytest.mark.parametrize("error", [1e-5, 1e-3, 0.05])
def test_candidates_may_be_as_wrong_as_they_say(metric, error):
    documents, queries = vectors(500), vectors(20, seed=1)
    expected = exact_search(ArrayRows(documents), queries, 12, metric)
    for size in (50, 500):
        found = exact_search(ArrayRows(documents), queries, 12, metric, Careless(error), slice_rows=size)
        np.testing.assert_array_equal(found[1], expected[1])
        np.testing.assert_array_equal(found[0], expected[0])


@pytest.mark.parametrize("kind", ["random", "best first"])
def test_a_k_beyond_what_a_slice_can_give_is_put_together_from_several(kind):
    documents, queries = vectors(900), vectors(6, seed=1)
    if kind == "best first":
        documents = documents[np.argsort(-(documents @ queries[0]))]
    stingy = Careless(1e-5, max_fetch=32)
    found = exact_search(ArrayRows(documents), queries, 100, "dot", stingy)
    assert stingy.fetched and max(stingy.fetched) == 32
    np.testing.assert_array_equal(found[1], exact_search(ArrayRows(documents), queries, 100, "dot")[1])


def test_nan_in_a_slice_is_refused_by_its_row():
    documents = vectors(100)
    documents[77, 3] = np.inf
    with pytest.raises(UserError, match="document embedding 77 holds NaN or infinity"):
        exact_search(ArrayRows(documents), vectors(2), 5, "cos", slice_rows=10)
    documents[77] = 1e30
    with pytest.raises(UserError, match="document embedding 77 is too large"):
        exact_search(ArrayRows(documents), vectors(2), 5, "cos", slice_rows=10)


def test_a_zero_vector_scores_zero():
    documents = np.float32([[0, 0], [1, 0], [-1, 0]])
    scores, rows = exact_search(ArrayRows(documents), np.float32([[2, 0], [0, 0]]), 3, "cos", slice_rows=1)
    np.testing.assert_array_equal(rows, [[1, 0, 2], [0, 1, 2]])
    np.testing.assert_array_equal(scores, [[1, 0, -1], [0, 0, 0]])


def test_a_score_depends_on_its_pair_alone():
    # Products whose sum in float64 decides between two float32 numbers, and depends on the order of summation.
    rng = np.random.default_rng(0)
    terms = np.concatenate([[1, 2.0**-24], [2.0**-53, -(2.0**-53)] * 15]).astype(np.float32)
    documents = np.stack([rng.permutation(terms) for _ in range(300)])
    exact = ExactScores(np.ones((2, 32), dtype=np.float32), "dot")
    scores = exact.of(1, documents)
    assert len(np.unique(scores)) > 1
    np.testing.assert_array_equal(exact.of_all(np.array([1, 0]), documents)[0], scores)
    for size in (1, 3, 50):
        parts = [exact.of(1, documents[start : start + size]) for start in range(0, 300, size)]
        np.testing.assert_array_equal(np.concatenate(parts), scores)


KINDS = ["random", "twins", "nearly alike", "close", "best last", "long and short", "far"]


@pytest.mark.parametrize("metric", ["cos", "dot"])
@pytest.mark.parametrize(("kind", "k"), [*((kind, 40) for kind in KINDS), ("random", 200), ("short numbers", 200)])
def test_products_in_bfloat16_change_no_bit(metric, kind, k, monkeypatch):
    rng = np.random.default_rng(3)
    documents, queries = vectors(5000, d=24), vectors(30, d=24, seed=1)
    if kind == "twins":
        documents = documents[rng.integers(0, 300, 5000)]
    elif kind == "nearly alike":
        documents = documents[:1] + np.float32(1e-3) * documents
    elif kind == "best last":
        documents = documents[np.argsort(documents @ queries[0])]
    elif kind == "long and short":
        documents *= np.float32(10.0) ** rng.integers(-3, 4, (5000, 1)).astype(np.float32)
    elif kind == "short numbers":  # only their products are rounded
        documents, queries = (
            torch.from_numpy(np.abs(each[:, :4])).bfloat16().float().numpy() for each in (documents, queries)
        )
    elif kind == "close":
        documents = documents[:1] + np.float32(0.1) * documents
        queries = documents[:1] + queries
    elif kind == "far":  # the best scores are below zero
        documents = -np.abs(documents)
        queries = np.abs(queries)
    settled = []

    class Told(CpuSlices):
        def above(self, documents, queries, bound, most, rounded=False, scale=None):
            pairs = super().above(documents, queries, bound, most, rounded, scale)
            settled.append((rounded, pairs is not None))
            return pairs

    expected = exact_search(ArrayRows(documents), queries, k, metric, Careless(1e-5), slice_rows=5000)
    for rounding in (True, False):
        monkeypatch.setattr(exact, "rounding_pays", lambda rounding=rounding: rounding)
        found = exact_search(ArrayRows(documents), queries, k, metric, Told(), slice_rows=10 * k)
        np.testing.assert_array_equal(found[1], expected[1])
        np.testing.assert_array_equal(found[0], expected[0])
    if kind in ("random", "close"):
        assert (True, True) in settled and (False, True) in settled


def test_rounded_products_are_not_trusted():
    before = torch.get_float32_matmul_precision()
    documents, queries = vectors(3000, d=64), vectors(20, d=64, seed=1)
    expected = exact_search(ArrayRows(documents), queries, 30, "cos", slice_rows=500)
    try:
        torch.set_float32_matmul_precision("medium")
        assert CpuSlices().above(documents, queries, np.full(20, 0.5), 10**9) is None
        found = exact_search(ArrayRows(documents), queries, 30, "cos", slice_rows=500)
    finally:
        torch.set_float32_matmul_precision(before)
    np.testing.assert_array_equal(found[1], expected[1])


def test_all_pairs_above_a_bound_are_found_and_threads_are_left_as_they_were():
    documents, queries = vectors(700), vectors(9, seed=1)
    before = torch.get_num_threads()
    least = np.linspace(0.1, 4, 9)
    scores = queries @ documents.T
    for rounded, error, share in ((False, 1e-4, 0), (True, 0.2, BFLOAT16)):
        pairs = CpuSlices().above(documents, queries, least, 10**6, rounded)
        assert pairs is not None and torch.get_num_threads() == before and (pairs.error < error).all()
        found = np.zeros(scores.shape, dtype=bool)
        found[pairs.queries, pairs.places] = True
        assert (
            found[scores >= least[:, None]].all() and not found[scores < least[:, None] * (1 - 2 * share) - error].any()
        )
        off = np.abs(pairs.scores - scores[pairs.queries, pairs.places])
        assert (off <= pairs.error[pairs.queries] + share * np.abs(pairs.scores)).all()
        assert CpuSlices().above(documents, queries, least, 10, rounded) is None
