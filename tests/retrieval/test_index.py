"""Exact search finds the k best documents by score and id, for any slicing; other FAISS indexes."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import faiss
import numpy as np
import pytest
import torch

from contaccum.errors import ConfigError, DataError, UserError
from contaccum.retrieval import search as search_module
from contaccum.retrieval.search import (
    DenseIndex,
    build_index,
    list_hits,
    open_index,
    recall_against_exact,
    search,
)
from contaccum.retrieval.store import EmbeddingStore, StoreWriter

TWO_PARTS = [torch.device("cpu")] * 2
"""In place of two GPUs, for the program of GPUs."""


def make_vectors(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(n, 16)).astype(np.float32)


def write_store(folder: Path, embeddings: np.ndarray, shard_size: int, **identity: Any) -> Any:
    """Write a store, in which row n has the id "dn"; return it. A slice ends with its shard."""
    writer = StoreWriter(folder, {"dtype": "float32", "shard_size": shard_size, **identity})
    passages = [(f"d{number}", "", str(number)) for number in range(len(embeddings))]
    writer.fill(passages, lambda texts: embeddings[[int(text) for text in texts]])
    return EmbeddingStore.open(folder)


@pytest.fixture(params=["faiss", "torch"])
def build(request) -> Callable[..., DenseIndex]:
    """Build an index that searches exactly by FAISS, or by the program of GPUs in two parts."""

    def build(*args: Any, **kwargs: Any) -> DenseIndex:
        index = build_index(*args, **kwargs)
        if request.param == "torch" and index.factory == "Flat":
            index.gpus = TWO_PARTS
        return index

    return build


@pytest.mark.parametrize("metric", ["cos", "dot"])
@pytest.mark.parametrize(("k", "num_queries"), [(1, 9), (7, 4200), (65, 300), (500, 9)])
def test_sliced_search_equals_numpy(metric, k, num_queries, build, tmp_path):
    """By the similarity of the store; queries are searched for in groups."""
    documents = make_vectors(200) * np.linspace(0.5, 2, 200, dtype=np.float32)[:, None]
    queries = make_vectors(num_queries, seed=1)
    queries_before = queries.copy()
    threshold_before = faiss.cvar.distance_compute_blas_threshold
    store = write_store(tmp_path / "store", documents, 64, similarity=metric)
    scores, rows = search(build(store), queries, k)
    # The caller's array and FAISS's global settings have not changed.
    np.testing.assert_array_equal(queries, queries_before)
    assert faiss.cvar.distance_compute_blas_threshold == threshold_before

    documents, queries = documents.astype(np.float64), queries.astype(np.float64)
    if metric == "cos":
        documents /= np.linalg.norm(documents, axis=1, keepdims=True)
        queries /= np.linalg.norm(queries, axis=1, keepdims=True)
    expected_scores = queries @ documents.T
    expected_rows = np.argsort(-expected_scores, axis=1)[:, :k]
    np.testing.assert_array_equal(rows, expected_rows)
    expected_scores = np.take_along_axis(expected_scores, expected_rows, axis=1)
    np.testing.assert_allclose(scores, expected_scores, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("factory", "k_values"), [("Flat", (1, 5, 10, 11, 129)), ("HNSW32", (130,))]
)
def test_equal_scores_are_ordered_by_id_as_by_trec_eval(factory, k_values, tmp_path, build):
    """The order holds across slices, and at position k too."""
    rng = np.random.default_rng(0)
    # Whole numbers, so that products are exact: ten equal copies of each of 13 documents.
    distinct = rng.integers(-9, 9, (13, 16))
    documents = np.repeat(distinct, 10, axis=0)[rng.permutation(130)].astype(np.float32)
    queries = rng.integers(-9, 9, (30, 16)).astype(np.float32)
    exact_scores = queries @ documents.T
    index = build(write_store(tmp_path / "store", documents, 29), factory, "dot")
    for k in k_values:
        scores, rows = search(index, queries, k)
        for query in range(30):
            query_scores = exact_scores[query]
            result = rows[query][rows[query] >= 0]
            candidates = range(130) if factory == "Flat" else result
            keys = {row: (query_scores[row], f"d{row}") for row in candidates}
            expected = sorted(keys, key=lambda row: keys[row], reverse=True)
            assert result.tolist() == expected[:k]
            np.testing.assert_array_equal(scores[query][: len(result)], query_scores[result])


def test_nan_and_too_large_numbers_are_refused_with_their_row(build, tmp_path):
    message = "document embedding 77 holds NaN, infinity or numbers too large"
    for bad_number in (np.inf, np.nan, 1e30):
        documents = make_vectors(100)
        documents[77, 3] = bad_number
        store = write_store(tmp_path / str(bad_number), documents, 10)
        with pytest.raises(UserError, match=message):
            search(build(store), make_vectors(2), 5)
        with pytest.raises(UserError, match="document embedding 77"):
            build_index(store, "HNSW8")
    queries = make_vectors(5)
    queries[3, 2] = np.nan
    with pytest.raises(UserError, match="query embedding 3"):
        search(build(make_vectors(10)), queries, 2)


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_gpus_search_arrays_of_any_type(dtype):
    documents = make_vectors(3000).astype(dtype)[::-1]
    documents.flags.writeable = False
    queries = make_vectors(20, seed=1)
    expected_scores, expected_rows = search(build_index(documents), queries, 50)
    index = build_index(documents)
    index.gpus = TWO_PARTS
    for _ in range(2):
        scores, rows = search(index, queries, 50)
        np.testing.assert_array_equal(rows, expected_rows)
        np.testing.assert_allclose(scores, expected_scores, atol=1e-6)


def test_the_cpu_searches_if_a_gpu_fails(caplog):
    documents = make_vectors(50)
    _, expected_rows = search(build_index(documents), documents, 5)
    index = build_index(documents)
    index.gpus = [torch.device("meta")]  # it computes nothing, and raises an error for each result
    _, rows = search(index, documents, 5)
    np.testing.assert_array_equal(rows, expected_rows)
    assert len(index.gpus) == 0
    assert "searched on the CPU, not a GPU" in caplog.text


@pytest.mark.parametrize(
    ("factory", "parameters", "expected", "nprobe"),
    [
        ("PCA8,IVF16,Flat", None, "nprobe=2", 2),
        ("IVF16,Flat", "nprobe=9", "nprobe=9", 9),
        ("IVF16_HNSW8,Flat", "quantizer_efSearch=64", "quantizer_efSearch=64", 2),
        ("HNSW8", None, None, None),
    ],
)
def test_an_inverted_file_probes_an_eighth_of_its_lists(factory, parameters, expected, nprobe):
    """The default holds only for an inverted file without another ``nprobe``."""
    index = build_index(make_vectors(400), factory, parameters=parameters)
    assert index.parameters == expected
    if nprobe is not None:
        assert faiss.extract_index_ivf(index.faiss_index).nprobe == nprobe


def test_an_approximate_index_may_find_fewer_documents():
    index = build_index(make_vectors(400), "IVF8,Flat", parameters="nprobe=1")
    scores, rows = search(index, make_vectors(30, seed=1), 300)
    assert (rows < 0).any() and np.isneginf(scores[rows < 0]).all()
    for hits, line in zip(list_hits(index, scores, rows), rows, strict=True):
        assert list(hits) == line[line >= 0].tolist()


def test_recall_is_the_share_of_exact_results_that_were_found():
    documents = make_vectors(200)
    queries = make_vectors(30, seed=1)
    index = build_index(documents, "HNSW32")
    exact_index = build_index(documents)
    _, rows = search(exact_index, queries, 20)
    assert recall_against_exact(exact_index, queries, rows) is None
    assert recall_against_exact(index, queries, rows) == {"queries": 30, "recall@20": 1.0}
    rows[:, :5] = -1
    assert recall_against_exact(index, queries, rows) == {"queries": 30, "recall@20": 0.75}


@pytest.mark.parametrize(
    ("factory", "parameters", "message"),
    [
        ("Falt", None, "could not parse index string Falt"),
        ("IVF512,Flat", None, "needs 512 vectors to train, the corpus has 100"),
        ("PQ4", None, "cannot build index 'PQ4'"),
        ("IVF4,Flat", "nprobes=4", "does not take parameters 'nprobes=4'"),
    ],
)
def test_impossible_index_settings_are_refused(factory, parameters, message):
    """The error is one line with FAISS's reason, without FAISS's source lines."""
    with pytest.raises(ConfigError, match=message) as caught:
        build_index(make_vectors(100), factory, parameters=parameters)
    assert "\n" not in str(caught.value)
    assert ".cpp" not in str(caught.value)


@pytest.fixture
def store(tmp_path) -> EmbeddingStore:
    return write_store(tmp_path / "store", make_vectors(600), 250, similarity="cos")


class IndexOnFakeGpus:
    """A FAISS index on the CPU that records its work, and has limits as those of GPUs."""

    def __init__(self, work: list, index, options, gpus) -> None:
        self.work = work
        self.index = faiss.clone_index(index)
        self.gpus = gpus
        if isinstance(index, faiss.IndexRefine):
            raise RuntimeError("This index type is not implemented on GPU.")
        inverted_file = faiss.downcast_index(faiss.extract_index_ivf(index))
        if inverted_file.nprobe > 12:
            raise RuntimeError("GPU IVF index only supports nprobe selection up to 12")
        is_long_code = isinstance(inverted_file, faiss.IndexIVFPQ) and inverted_file.pq.M > 8
        if is_long_code and not options.useFloat16:
            raise RuntimeError("Consider useFloat16LookupTables")

    def __getattr__(self, name: str) -> Any:
        if name in ("train", "add"):
            self.work.append((name, self.gpus))
        return getattr(self.index, name)

    def search(self, queries, k):
        if k > 100:
            raise RuntimeError("GPU index only supports min/max-K selection up to 100")
        self.work.append(("search", self.gpus))
        return self.index.search(queries, k)


@pytest.fixture
def add_gpus(monkeypatch) -> Callable[[], list]:
    """Return a function that gives FAISS two fake GPUs, and returns the list of their work."""

    def add() -> list:
        work: list = []
        gpus = [torch.device("cuda", number) for number in (0, 1)]
        options = partial(SimpleNamespace, useFloat16=False)
        monkeypatch.setattr(search_module, "find_gpus", lambda: gpus)
        for name, value in {
            "get_num_gpus": lambda: 2,
            "GpuMultipleClonerOptions": options,
            "index_cpu_to_gpus_list": partial(IndexOnFakeGpus, work),
            "index_gpu_to_cpu": lambda index: index.index,
        }.items():
            monkeypatch.setattr(faiss, name, value, raising=False)
        return work

    return add


@pytest.mark.parametrize("factory", ["PCA8,IVF16,Flat", "IVF16,SQ8", "IVF4,PQ16np"])
def test_gpus_build_and_search_an_inverted_file_as_the_cpu_does(store, tmp_path, factory, add_gpus):
    """The file has the same bytes, and is searched on the GPUs when it is opened again."""
    queries = make_vectors(9, seed=1)
    index = open_index(tmp_path / "cpu.faiss", store, factory, parameters="nprobe=3")
    expected = search(index, queries, 20)
    work = add_gpus()
    for _ in range(2):
        index = open_index(tmp_path / "gpu.faiss", store, factory, parameters="nprobe=3")
        for _ in range(2):
            np.testing.assert_array_equal(search(index, queries, 20), expected)
        assert len(index.gpus) == 2
    assert (tmp_path / "gpu.faiss").read_bytes() == (tmp_path / "cpu.faiss").read_bytes()
    shards = 3 * [("add", [0])]
    assert work == [("train", [0]), *shards, *4 * [("search", [0, 1])]]


@pytest.mark.parametrize(
    ("factory", "parameters", "k", "gpu_work", "warning"),
    [
        ("HNSW8", None, 20, [], ""),
        ("IVF16,FlatDedup", None, 20, [], ""),  # on a GPU it would be an IVF16,Flat
        ("IVF8,Flat,RFlat", None, 20, [], "built on the CPU, not a GPU: This index type"),
        ("IVF16,Flat", "nprobe=13", 20, ["train", "add"], "searched on the CPU, not a GPU"),
        ("IVF16,Flat", None, 101, ["train", "add"], "searched on the CPU, not a GPU"),
    ],
)
def test_the_cpu_does_what_gpus_cannot(factory, parameters, k, gpu_work, warning, add_gpus, caplog):
    documents = make_vectors(600)
    queries = make_vectors(9, seed=1)
    index = build_index(documents, factory, parameters=parameters)
    expected = search(index, queries, k)
    work = add_gpus()
    index = build_index(documents, factory, parameters=parameters)
    np.testing.assert_array_equal(search(index, queries, k), expected)
    assert list(index.gpus) == []
    assert [name for name, _ in work] == gpu_work
    assert warning in caplog.text
    assert bool(warning) == bool(caplog.text)


@pytest.mark.parametrize("factory", ["HNSW8", "IVF16,Flat", "IVF4,PQ4x4", "SQ8", "IVF8,Flat,RFlat"])
def test_an_index_is_built_once_and_read_from_its_file(store, tmp_path, factory):
    path = tmp_path / "index.faiss"
    built_index = open_index(path, store, factory)
    written = path.stat().st_mtime_ns
    read_index = open_index(path, store, factory)
    assert path.stat().st_mtime_ns == written
    assert read_index.metric == "cos"
    assert read_index.parameters == built_index.parameters
    queries = make_vectors(9, seed=1)
    expected = search(built_index, queries, 20)
    np.testing.assert_array_equal(search(read_index, queries, 20), expected)


def test_search_parameters_are_not_stored_in_the_index_file(store, tmp_path):
    path = tmp_path / "index.faiss"
    first_index = open_index(path, store, "HNSW8", parameters="efSearch=300")
    assert first_index.faiss_index.hnsw.efSearch == 300
    assert first_index.parameters == "efSearch=300"
    default_search = build_index(store, "HNSW8").faiss_index.hnsw.efSearch
    assert open_index(path, store, "HNSW8").faiss_index.hnsw.efSearch == default_search != 300


def test_a_foreign_or_broken_index_file_is_refused_in_one_line(store, tmp_path):
    path = tmp_path / "index.faiss"
    description_path = tmp_path / "index.faiss.json"
    open_index(path, store, "HNSW8")
    description = description_path.read_text()

    def assert_refused(message, factory="HNSW8"):
        with pytest.raises(DataError, match=message) as caught:
            open_index(path, store, factory)
        assert "\n" not in str(caught.value)
        assert str(path) in str(caught.value)

    assert_refused(r"another factory \(HNSW8, now HNSW16\)", "HNSW16")
    other_description = {**json.loads(description), "fingerprint": "aaaa"}
    description_path.write_text(json.dumps(other_description))
    assert_refused("another fingerprint")
    description_path.unlink()
    assert_refused(r"index\.faiss\.json")
    description_path.write_text(description)
    path.write_bytes(path.read_bytes()[:-100])
    assert_refused("cannot be read")
    # A process that is killed while it writes the index leaves the description alone.
    path.unlink()
    assert open_index(path, store, "HNSW8").faiss_index.ntotal == 600


def test_an_index_that_cannot_be_written_is_reported_in_one_line(store, tmp_path, limit_file_size):
    path = tmp_path / "index.faiss"
    message = r"^\S*index\.faiss: cannot be written \(File too large"
    with limit_file_size(20_000), pytest.raises(UserError, match=message):
        open_index(path, store, "HNSW8")
    assert not path.exists()
