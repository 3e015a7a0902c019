"""Exact search gives the k best by score and id, however a corpus is sliced and whatever the products round."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import faiss
import numpy as np
import pytest

from contaccum.errors import UserError
from contaccum.retrieval.exact import ArrayRows, exact_search


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
    documents, queries = vectors(200), vectors(9, seed=1)
    scores, rows = exact_search(ArrayRows(documents), queries, k, metric, slice_rows=64)
    expected_scores, expected = by_numpy(documents, None, queries, k, metric)
    np.testing.assert_array_equal(rows, expected)
    np.testing.assert_allclose(scores, expected_scores, rtol=1e-5, atol=1e-6)


KINDS = ["random", "twins", "all alike", "nearly alike", "best last", "long and short"]


def corpus_of(kind: str, queries: np.ndarray) -> np.ndarray:
    rng = np.random.default_rng(3)
    documents = vectors(600, d=24)
    if kind == "twins":
        return documents[rng.integers(0, 60, 600)]
    if kind == "all alike":
        return np.tile(documents[:1], (600, 1))
    if kind == "nearly alike":
        return documents[:1] + np.float32(1e-7) * documents
    if kind == "best last":
        return documents[np.argsort(documents @ queries[0])]
    if kind == "long and short":
        return documents * np.float32(10.0) ** rng.integers(-3, 4, (600, 1)).astype(np.float32)
    return documents


@pytest.mark.parametrize("metric", ["cos", "dot"])
@pytest.mark.parametrize("kind", KINDS)
def test_slices_batches_and_the_order_of_the_corpus_decide_nothing(metric, kind, monkeypatch):
    rng = np.random.default_rng(3)
    queries = vectors(50, d=24, seed=1)
    documents = corpus_of(kind, queries)
    ids = [f"d{number}" for number in rng.permutation(600)]
    once = exact_search(ArrayRows(documents, ids), queries, 40, metric)
    monkeypatch.setattr("contaccum.retrieval.exact._HELD", 2000)
    for size in (41, 100, 599):
        found = exact_search(ArrayRows(documents, ids), queries, 40, metric, slice_rows=size)
        np.testing.assert_array_equal(found[0], once[0])
        np.testing.assert_array_equal(found[1], once[1])
    shuffle = rng.permutation(600)
    shuffled = ArrayRows(documents[shuffle], [ids[row] for row in shuffle])
    scores, rows = exact_search(shuffled, queries, 40, metric, slice_rows=64)
    np.testing.assert_array_equal(scores, once[0])
    np.testing.assert_array_equal(shuffle[rows], once[1])


@pytest.mark.parametrize("kind", ["random", "twins", "all alike"])
@pytest.mark.parametrize("batch", [1, 30])
def test_ties_are_ordered_by_id_across_slices_and_at_the_kth_place(kind, batch):
    rng = np.random.default_rng(0)
    documents = {
        "random": vectors(130, d=4),
        "twins": np.repeat(vectors(13, d=4), 10, axis=0)[rng.permutation(130)],
        "all alike": np.tile(vectors(1, d=4), (130, 1)),
    }[kind]
    ids = [f"d{number}" for number in rng.permutation(130)]
    queries = vectors(batch, d=4, seed=1)
    for k in (1, 5, 10, 11, 129):
        _, rows = exact_search(ArrayRows(documents, ids), queries, k, "dot", slice_rows=29)
        np.testing.assert_array_equal(rows, by_numpy(documents, ids, queries, k, "dot")[1])


def test_equal_documents_have_equal_scores_wherever_they_lie():
    # The last bits of a product depend on the place in a block of columns, and this corpus has every place.
    documents = np.tile(vectors(1, d=384), (3000, 1))
    scores, rows = exact_search(ArrayRows(documents), vectors(40, d=384, seed=1), 100, "cos", slice_rows=1777)
    assert (scores == scores[:, :1]).all()
    np.testing.assert_array_equal(rows, np.tile(np.arange(100), (40, 1)))


class RoundedGpus:
    """What `faiss.index_cpu_to_all_gpus` would return: an index that rounds to eleven bits, and no k beyond 2,048."""

    def __init__(self, index: Any, co: Any) -> None:
        self.documents = index.reconstruct_n(0, index.ntotal).astype(np.float16).astype(np.float32)
        assert co.useFloat16

    def search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        assert k <= 2048
        return faiss.knn(queries.astype(np.float16).astype(np.float32), self.documents, k, faiss.METRIC_INNER_PRODUCT)


@pytest.mark.parametrize("metric", ["cos", "dot"])
@pytest.mark.parametrize("k", [12, 2000])
def test_a_search_on_gpus_in_float16_is_exact(metric, k, monkeypatch):
    documents, queries = vectors(3000), vectors(20, seed=1)
    expected = exact_search(ArrayRows(documents), queries, k, metric)
    monkeypatch.setattr(faiss, "index_cpu_to_all_gpus", RoundedGpus, raising=False)
    found = exact_search(ArrayRows(documents), queries, k, metric, SimpleNamespace(useFloat16=True), slice_rows=2100)
    np.testing.assert_array_equal(found[1], expected[1])
    np.testing.assert_array_equal(found[0], expected[0])


def test_nan_and_vectors_that_are_too_long_are_refused_by_their_row():
    documents = vectors(100)
    documents[77, 3] = np.inf
    with pytest.raises(UserError, match="document embedding 77 holds NaN or infinity"):
        exact_search(ArrayRows(documents), vectors(2), 5, "cos", slice_rows=10)
    documents[77] = 1e30
    with pytest.raises(UserError, match="document embedding 77 is too large"):
        exact_search(ArrayRows(documents), vectors(2), 5, "cos", slice_rows=10)
    queries = vectors(5)
    queries[3, 2] = np.nan
    with pytest.raises(UserError, match="query embedding 3"):
        exact_search(ArrayRows(vectors(10)), queries, 2)


def test_a_zero_vector_scores_zero():
    documents = np.float32([[0, 0], [1, 0], [-1, 0]])
    scores, rows = exact_search(ArrayRows(documents), np.float32([[2, 0], [0, 0]]), 3, "cos", slice_rows=1)
    np.testing.assert_array_equal(rows, [[1, 0, 2], [0, 1, 2]])
    np.testing.assert_array_equal(scores, [[1, 0, -1], [0, 0, 0]])


def test_settings_of_faiss_and_the_callers_embeddings_are_left_as_they_were():
    documents, queries = vectors(20), vectors(9, seed=1)
    before = documents.copy(), queries.copy(), faiss.cvar.distance_compute_blas_threshold
    exact_search(ArrayRows(documents), queries, 5, "cos")
    np.testing.assert_array_equal(documents, before[0])
    np.testing.assert_array_equal(queries, before[1])
    assert faiss.cvar.distance_compute_blas_threshold == before[2]
