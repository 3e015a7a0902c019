"""Exact search gives the k best by score and id however a corpus is sliced; other indexes, and what cannot work."""

import json
from typing import Any

import faiss
import numpy as np
import pytest

from contaccum.errors import ConfigError, DataError, UserError
from contaccum.retrieval import exact_search
from contaccum.retrieval import index as index_module
from contaccum.retrieval.index import build_index, open_index, recall_against_exact, search
from contaccum.retrieval.store import EmbeddingStore, StoreWriter


def vectors(n: int, d: int = 16, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(n, d)).astype(np.float32)


@pytest.fixture
def slices_of(monkeypatch) -> Any:
    """Set how many rows of 16 numbers a slice has."""
    return lambda rows: monkeypatch.setattr(exact_search, "SLICE_BYTES", 4 * 16 * rows)


def by_numpy(documents: np.ndarray, queries: np.ndarray, k: int, metric: str) -> Any:
    """Scores in float64, and rows by score."""
    documents, queries = documents.astype(np.float64), queries.astype(np.float64)
    if metric == "cos":
        documents, queries = (
            x / np.linalg.norm(x, axis=1, keepdims=True) for x in (documents, queries)
        )
    scores = queries @ documents.T
    rows = np.argsort(-scores, axis=1)[:, :k]
    return np.take_along_axis(scores, rows, axis=1), rows


@pytest.mark.parametrize("metric", ["cos", "dot"])
@pytest.mark.parametrize(("k", "queries"), [(1, 9), (7, 300), (65, 300), (500, 9)])
def test_sliced_search_equals_numpy(metric, k, queries, slices_of, monkeypatch):
    slices_of(64)
    monkeypatch.setattr(exact_search, "_MAX_QUERIES_PER_GROUP", 100)
    documents, asked = vectors(200), vectors(queries, seed=1)
    before = documents.copy(), asked.copy(), faiss.cvar.distance_compute_blas_threshold
    scores, rows = search(build_index(documents, metric=metric), asked, k)
    expected_scores, expected = by_numpy(documents, asked, k, metric)
    np.testing.assert_array_equal(rows, expected)
    np.testing.assert_allclose(scores, expected_scores, rtol=1e-5, atol=1e-6)
    # What belongs to others is as it was.
    np.testing.assert_array_equal(documents, before[0])
    np.testing.assert_array_equal(asked, before[1])
    assert faiss.cvar.distance_compute_blas_threshold == before[2]


@pytest.mark.parametrize("factory", ["Flat", "HNSW32"])
def test_equal_scores_are_ordered_by_id_across_slices_and_at_the_kth_place(factory, slices_of):
    slices_of(29)
    rng = np.random.default_rng(0)
    # Whole numbers, whose products are exact: ten equal documents each.
    documents = np.repeat(rng.integers(-9, 9, (13, 16)), 10, axis=0)[rng.permutation(130)].astype(
        np.float32
    )
    ids = [f"d{number}" for number in rng.permutation(130)]
    queries = rng.integers(-9, 9, (30, 16)).astype(np.float32)
    exact = queries @ documents.T
    for k in (1, 5, 10, 11, 129) if factory == "Flat" else (130,):
        scores, rows = search(build_index(documents, factory, "dot", ids=ids), queries, k)
        for line in range(30):
            there = rows[line][rows[line] >= 0]
            best = sorted(
                range(130) if factory == "Flat" else there,
                key=lambda row: (-exact[line, row], ids[row]),
            )
            assert there.tolist() == best[:k]
            np.testing.assert_array_equal(scores[line][: len(there)], exact[line, there])


def test_nan_and_numbers_that_are_too_large_are_refused_by_their_row(slices_of):
    slices_of(10)
    for wrong in (np.inf, np.nan, 1e30):
        documents = vectors(100)
        documents[77, 3] = wrong
        with pytest.raises(
            UserError, match="document embedding 77 holds NaN, infinity or numbers too large"
        ):
            search(build_index(documents), vectors(2), 5)
        with pytest.raises(UserError, match="document embedding 77"):
            build_index(documents, "HNSW8")
    queries = vectors(5)
    queries[3, 2] = np.nan
    with pytest.raises(UserError, match="query embedding 3"):
        search(build_index(vectors(10)), queries, 2)


def test_gpus_search_slices_as_far_as_their_bound_on_k_allows(monkeypatch, slices_of):
    slices_of(2100)
    documents, queries = vectors(3000), vectors(20, seed=1)
    expected = search(build_index(documents), queries, 2500)
    sent = []
    monkeypatch.setattr(faiss, "get_num_gpus", lambda: 2)
    monkeypatch.setattr(
        faiss, "index_cpu_to_all_gpus", lambda index: sent.append(index) or index, raising=False
    )
    index = build_index(documents)
    for k in (5, 2500):
        np.testing.assert_array_equal(search(index, queries, k)[1], expected[1][:, :k])
    assert index.num_gpus == 2 and [one.ntotal for one in sent] == [2100, 900]


def test_an_inverted_index_probes_more_than_one_list_unless_told():
    for factory, given, expected in [
        ("PCA8,IVF16,Flat", None, "nprobe=2"),
        ("IVF16,Flat", "nprobe=9", "nprobe=9"),
        ("HNSW8", None, None),
    ]:
        assert build_index(vectors(400), factory, parameters=given).parameters == expected


def test_recall_counts_the_rows_of_the_exact_result_that_were_found():
    documents, queries = vectors(200), vectors(30, seed=1)
    index = build_index(documents, "HNSW32")
    _, exact = search(build_index(documents), queries, 20)
    half = exact.copy()
    half[:, :5] = -1
    assert recall_against_exact(index, queries, exact) == {"queries": 30, "recall@20": 1.0}
    assert recall_against_exact(index, queries, half) == {"queries": 30, "recall@20": 0.75}
    assert recall_against_exact(build_index(documents), queries, exact) is None


@pytest.mark.parametrize(
    ("factory", "parameters", "words"),
    [
        ("Falt", None, "could not parse index string Falt"),
        ("PQ7", None, "multiple of the number of subquantizers"),
        ("IVF512,Flat", None, "needs 512 vectors to train, the corpus has 100"),
        ("PQ4", None, "should be at least as large as number of clusters"),
        ("IDMap,Flat", None, "cannot build index 'IDMap,Flat'"),
        ("IVF4,Flat", "nprobes=4", "does not take parameters 'nprobes=4'"),
    ],
)
def test_an_index_that_cannot_work_is_refused_with_the_reason(factory, parameters, words):
    with pytest.raises(ConfigError, match=words) as caught:
        build_index(vectors(100), factory, parameters=parameters)
    assert "\n" not in str(caught.value) and ".cpp" not in str(caught.value)


@pytest.fixture
def store(tmp_path) -> EmbeddingStore:
    writer = StoreWriter(
        tmp_path / "store", {"kind": "document", "dtype": "float32", "shard_size": 250}
    )
    writer.fill(
        ((f"d{n}", "", str(n)) for n in range(600)),
        lambda texts: vectors(600)[[int(text) for text in texts]],
    )
    return EmbeddingStore.open(tmp_path / "store")


@pytest.mark.parametrize("factory", ["HNSW8", "IVF16,Flat", "IVF4,PQ4x4", "SQ8", "IVF8,Flat,RFlat"])
def test_an_index_is_built_once_and_finds_the_same_from_its_file(
    store, tmp_path, factory, monkeypatch
):
    first = open_index(tmp_path / "index.faiss", store, factory)
    monkeypatch.setattr(index_module, "build_index", None)
    again = open_index(tmp_path / "index.faiss", store, factory)
    assert again.parameters == first.parameters
    for one, other in zip(
        search(first, vectors(9, seed=1), 20), search(again, vectors(9, seed=1), 20), strict=True
    ):
        np.testing.assert_array_equal(one, other)


def test_a_file_of_something_else_or_broken_is_refused_in_one_line(store, tmp_path):
    path, described = tmp_path / "index.faiss", tmp_path / "index.faiss.json"
    open_index(path, store, "HNSW8")
    about = described.read_text()

    def refused(words, factory="HNSW8"):
        with pytest.raises(DataError, match=words) as caught:
            open_index(path, store, factory)
        assert "\n" not in str(caught.value) and str(path) in str(caught.value)

    refused("index with factory HNSW8, but factory HNSW16 is required", "HNSW16")
    described.write_text(json.dumps({**json.loads(about), "fingerprint": "aaaa"}))
    refused("index with fingerprint aaaa")
    described.unlink()
    refused("not a JSON file")
    described.write_text(about)
    path.write_bytes(path.read_bytes()[:-100])
    refused("cannot be read")
    path.unlink()  # as a process leaves it that is killed while it writes the index
    assert open_index(path, store, "HNSW8").faiss_index.ntotal == 600 and path.is_file()
