"""Approximate indexes, what cannot work, and an index as a file."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import faiss
import numpy as np
import pytest

from contaccum.errors import ConfigError, DataError, UserError
from contaccum.retrieval.exact import ArrayRows
from contaccum.retrieval.index import build_index, find_gpus, load_index, recall_against_exact, save_index, search

FINGERPRINT = "a" * 64


def vectors(n: int, d: int = 16, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(n, d)).astype(np.float32)


def test_k_beyond_the_corpus_gives_the_whole_corpus():
    scores, rows = search(build_index(vectors(4)), vectors(2, seed=1), k=100)
    assert scores.shape == rows.shape == (2, 4)
    assert all(sorted(line) == [0, 1, 2, 3] for line in rows.tolist())


def test_what_an_approximate_index_does_not_find_is_marked_and_last():
    scores, rows = search(build_index(vectors(64), "IVF8,Flat", parameters="nprobe=1"), vectors(5, seed=1), k=60)
    assert (rows == -1).any()
    np.testing.assert_array_equal(rows == -1, np.isneginf(scores))
    assert (np.diff(scores[:, :3]) <= 0).all()


@pytest.mark.parametrize("factory", ["HNSW32", "IVF4,Flat", "SQ8", "PCA15,Flat", "IVF4,Flat,RFlat", "Flat"])
@pytest.mark.parametrize("metric", ["cos", "dot"])
def test_every_kind_of_index_finds_a_document_by_itself(factory, metric):
    documents = vectors(300)
    documents /= np.linalg.norm(documents, axis=1, keepdims=True)
    index = build_index(documents, factory, metric, parameters="nprobe=4" if "IVF" in factory else None)
    _, rows = search(index, documents[:50], k=1)
    assert (rows[:, 0] == np.arange(50)).mean() >= 0.9


def test_an_inverted_index_probes_more_than_one_list_unless_told():
    assert build_index(vectors(400), "IVF16,Flat").parameters == "nprobe=2"
    assert build_index(vectors(400), "PCA8,IVF16,Flat").parameters == "nprobe=2"
    assert build_index(vectors(400), "IVF16,Flat", parameters="nprobe=9").parameters == "nprobe=9"
    assert build_index(vectors(400), "HNSW8").parameters is None


def test_recall_counts_the_rows_of_the_exact_result_that_were_found():
    documents, queries = vectors(200), vectors(30, seed=1)
    index = build_index(documents, "HNSW32")
    _, exact = search(build_index(documents), queries, 20)
    half = exact.copy()
    half[:, :5] = -1
    assert recall_against_exact(index, queries, exact) == {"queries": 30, "recall@10": 1.0, "recall@20": 1.0}
    assert recall_against_exact(index, queries, half) == {"queries": 30, "recall@10": 0.5, "recall@20": 0.75}
    assert recall_against_exact(build_index(documents), queries, exact) is None


@pytest.mark.parametrize(
    ("factory", "parameters", "words"),
    [
        ("Falt", None, "could not parse index string Falt"),
        ("PQ7", None, "multiple of the number of subquantizers"),
        ("IVF512,Flat", None, "at least 512 vectors to train and the corpus has 100"),
        ("PQ4", None, "should be at least as large as number of clusters"),
        ("IDMap,Flat", None, "does not rank rows"),
        ("IVF4,Flat", "nprobes=4", "does not take parameters 'nprobes=4'"),
        ("IVF4,Flat", "nprobe=0", "does not take parameters 'nprobe=0'"),
    ],
)
def test_an_index_that_cannot_work_is_refused_with_the_reason(factory, parameters, words):
    with pytest.raises(ConfigError, match=words) as caught:
        build_index(vectors(100), factory, parameters=parameters)
    assert "\n" not in str(caught.value) and ".cpp" not in str(caught.value)


def test_queries_of_another_dimension_and_nan_are_refused():
    with pytest.raises(ConfigError, match="16 dimensions"):
        search(build_index(vectors(10)), vectors(2, d=8), k=1)
    documents = vectors(10)
    documents[3, 2] = np.nan
    with pytest.raises(UserError, match="document embedding 3"):
        build_index(documents, "HNSW8")


class Gpus:
    """A FAISS that claims to see two GPUs; what is sent there stays where it is, and is asked for no k beyond 2,048."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, refuses: bool = False) -> None:
        self.sent: list[Any] = []
        self.refuses = refuses
        monkeypatch.setattr(faiss, "get_num_gpus", lambda: 2)
        monkeypatch.setattr(faiss, "GpuMultipleClonerOptions", SimpleNamespace, raising=False)
        monkeypatch.setattr(faiss, "index_cpu_to_all_gpus", self.send, raising=False)

    def send(self, index: Any, co: Any) -> Any:
        if self.refuses:
            raise RuntimeError("Error in x at y.cpp:1: this type of index is not for GPUs")
        self.sent.append(co)
        return SimpleNamespace(search=lambda queries, k: index.search(queries, k) if k <= 2048 else pytest.fail())


def test_gpus_are_used_as_asked_and_given_no_more_than_they_can_do(monkeypatch):
    gpus = Gpus(monkeypatch)
    documents, queries = vectors(3000), vectors(9, seed=1)
    for factory in ("Flat", "SQ8"):
        expected = search(build_index(documents, factory, use_gpu=False), queries, 2500)
        index = build_index(documents, factory, gpu_mode="shard")
        assert index.gpus == 2
        for k in (5, 2500):
            np.testing.assert_array_equal(search(index, queries, k)[1], expected[1][:, :k])
    assert len(gpus.sent) == 2 and all(co.shard and not co.useFloat16 for co in gpus.sent)
    assert find_gpus(False) is None and build_index(documents, use_gpu=False).gpus == 0


def test_an_index_that_gpus_refuse_stays_on_the_cpu_unless_one_insists(monkeypatch, caplog):
    Gpus(monkeypatch, refuses=True)
    assert build_index(vectors(100), "HNSW8").gpus == 0
    assert "stays on the CPU: this type of index is not for GPUs" in caplog.text
    with pytest.raises(ConfigError, match="cannot go to a GPU"):
        build_index(vectors(100), "HNSW8", use_gpu=True)
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="FAISS sees no GPU"):
        build_index(vectors(100), use_gpu=True)


def written(folder: Path, factory: str = "HNSW8") -> Path:
    save_index(build_index(vectors(600), factory), folder / "index.faiss", FINGERPRINT, "a store")
    return folder / "index.faiss"


@pytest.mark.parametrize("factory", ["HNSW8", "IVF16,Flat", "IVF4,PQ4x4", "SQ8", "IVF8,Flat,RFlat"])
def test_an_index_finds_the_same_after_a_round_trip(tmp_path: Path, factory: str) -> None:
    path = written(tmp_path, factory)
    before, after = build_index(vectors(600), factory), load_index(path, ArrayRows(vectors(600)), FINGERPRINT, factory)
    assert after.parameters == before.parameters
    for one, other in zip(search(before, vectors(9, seed=1), 20), search(after, vectors(9, seed=1), 20), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"fingerprint": "b" * 64}, "index of other embeddings"),
        ({"corpus": vectors(599)}, "index of other embeddings"),
        ({"factory": "HNSW16"}, "has factory 'HNSW8', asked for is 'HNSW16'"),
        ({"metric": "dot"}, "has metric 'cos', asked for is 'dot'"),
        ({"parameters": "nprobe=3"}, "does not take parameters"),
    ],
)
def test_an_index_of_anything_else_is_refused(tmp_path: Path, changed: dict[str, Any], words: str) -> None:
    settings = {"corpus": vectors(600), "fingerprint": FINGERPRINT, "factory": "HNSW8", **changed}
    corpus = ArrayRows(settings.pop("corpus"))
    with pytest.raises((DataError, ConfigError), match=words):
        load_index(written(tmp_path), corpus, **settings)


@pytest.mark.parametrize("what", ["no index", "no description", "cut off", "no json", "other kind", "other metric"])
def test_what_is_broken_is_refused_in_one_line(tmp_path: Path, what: str) -> None:
    path = written(tmp_path)
    described = Path(f"{path}.json")
    if what == "no index":
        path.unlink()
    elif what == "no description":
        described.unlink()
    elif what == "cut off":
        path.write_bytes(path.read_bytes()[:-100])
    elif what == "no json":
        described.write_text("{")
    else:
        metric = faiss.METRIC_L2 if what == "other metric" else faiss.METRIC_INNER_PRODUCT
        index = faiss.index_factory(16, "SQ8" if what == "other kind" else "HNSW8", metric)
        index.train(vectors(600))
        index.add(vectors(600))
        faiss.write_index(index, str(path))
        described.write_text(json.dumps(json.loads(described.read_text()) | {"bytes": path.stat().st_size}))
    with pytest.raises(UserError) as caught:
        load_index(path, ArrayRows(vectors(600)), FINGERPRINT, "HNSW8")
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)


def test_a_flat_index_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="searches the store itself"):
        save_index(build_index(vectors(9)), tmp_path / "flat.faiss", FINGERPRINT, "a store")


def test_rows_that_the_corpus_lacks_are_never_handed_out() -> None:
    # As of a file whose lists were tampered with.
    index = build_index(vectors(600), "IVF4,Flat")
    index.corpus = ArrayRows(vectors(300))
    with pytest.raises(DataError, match="finds row"):
        search(index, vectors(9, seed=1), 300)
