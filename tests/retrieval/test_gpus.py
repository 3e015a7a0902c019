"""What search decides where FAISS sees GPUs, tried with a FAISS that only claims to: no GPU is used here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import faiss
import numpy as np
import pytest

from contaccum.errors import ConfigError
from contaccum.retrieval import gpus as gpus_module
from contaccum.retrieval.gpus import GPU_MAX_K, Gpus, find_gpus, rows_that_fit
from contaccum.retrieval.index import build_index, search


def vectors(n: int, d: int = 16, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(n, d)).astype(np.float32)


class FakeGpus:
    """Two GPUs of a fixed memory: the calls that they get, and what happens on them."""

    def __init__(self) -> None:
        self.memory = 100_000
        self.held: list[int] = []
        self.options: list[tuple[bool, bool, int]] = []
        self.fails_after: int | None = None

    def to_all_gpus(self, index: Any, co: Any = None, ngpu: int = -1) -> Any:
        if self.fails_after is not None and len(self.held) >= self.fails_after:
            raise RuntimeError("Error in virtual void* alloc() at StandardGpuResources.cpp:530: out of memory")
        self.options.append((co.shard, co.useFloat16, ngpu))
        size = index.ntotal * index.d * (2 if co.useFloat16 else 4) // (ngpu if co.shard else 1)
        assert size <= self.memory, "does not fit"
        self.held.append(index.ntotal)
        return OnGpu(index, co.useFloat16)


class OnGpu:
    def __init__(self, index: Any, float16: bool) -> None:
        self.index, self.float16 = faiss.downcast_index(index), float16

    def search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        assert k <= GPU_MAX_K, "FAISS on GPUs refuses this k"
        if not self.float16:
            return self.index.search(queries, k)
        documents = self.index.reconstruct_n(0, self.index.ntotal)
        with np.errstate(over="ignore", invalid="ignore"):
            scores = queries.astype(np.float16).astype(np.float32) @ documents.astype(np.float16).astype(np.float32).T
        rows = np.argsort(-scores, axis=1)[:, :k]
        return np.take_along_axis(scores, rows, axis=1), rows


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpus]:
    class Options:
        shard = False
        useFloat16 = False

    fake = FakeGpus()
    monkeypatch.setattr(faiss, "get_num_gpus", lambda: 2)
    monkeypatch.setattr(faiss, "GpuMultipleClonerOptions", Options, raising=False)
    monkeypatch.setattr(faiss, "index_cpu_to_all_gpus", fake.to_all_gpus)
    monkeypatch.setattr(gpus_module, "free_bytes", lambda gpus: [fake.memory] * gpus.count)
    yield fake


@pytest.mark.parametrize("mode", ["replicate", "shard"])
@pytest.mark.parametrize("float16", [False, True])
@pytest.mark.parametrize("metric", ["cos", "dot"])
def test_a_corpus_larger_than_the_gpus_gives_the_same_bits(fake: FakeGpus, mode: Any, float16: bool, metric: Any):
    documents, queries = np.repeat(vectors(1500), 2, axis=0), vectors(40, seed=1)
    expected = search(build_index(documents, metric=metric, use_gpu=False), queries, 30)
    index = build_index(documents, metric=metric, gpu_mode=mode, gpu_float16=float16)
    found = search(index, queries, 30)
    np.testing.assert_array_equal(found[0], expected[0])
    np.testing.assert_array_equal(found[1], expected[1])
    assert index.gpus == 2 and set(fake.options) == {(mode == "shard", float16, 2)}
    assert sum(fake.held) == 3000 and len(fake.held) == (2 if mode == "shard" else 4)


def test_rows_at_a_time_follow_the_fullest_gpu():
    assert rows_that_fit(10, Gpus(2), [8_000, 4_000]) == 50
    assert rows_that_fit(10, Gpus(2, "shard"), [8_000, 4_000]) == 100
    assert rows_that_fit(1000, Gpus(1), [100]) == 1
    assert rows_that_fit(256, Gpus(1), [2**40]) == 2**31 // 1024


@pytest.mark.parametrize("factory", ["Flat", "IVF4,Flat"])
def test_k_beyond_what_a_gpu_can_do_is_found_all_the_same_and_said(fake: FakeGpus, factory: str, caplog: Any):
    fake.memory = 10**9
    documents = vectors(6000, d=4)
    parameters = None if factory == "Flat" else "nprobe=4"
    index = build_index(documents, factory, parameters=parameters)
    assert index.gpus == 2
    with caplog.at_level("INFO"):
        _, rows = search(index, documents[:3], k=2500)
    assert "gives 2048 documents per query" in caplog.text
    on_cpu = build_index(documents, factory, use_gpu=False, parameters=parameters)
    np.testing.assert_array_equal(rows, search(on_cpu, documents[:3], k=2500)[1])
    if factory == "Flat":
        assert len(fake.held) > 1


def test_a_gpu_that_gives_up_leaves_the_rest_to_the_cpu_and_says_so(fake: FakeGpus, caplog: Any):
    documents, queries = vectors(3000), vectors(5, seed=1)
    fake.fails_after = 2
    index = build_index(documents)
    _, rows = search(index, queries, 30)
    np.testing.assert_array_equal(rows, search(build_index(documents, use_gpu=False), queries, 30)[1])
    assert index.gpus == 0 and "goes on on the CPU from row 1562: out of memory" in caplog.text
    with pytest.raises(ConfigError, match="rows from 0 cannot be searched on a GPU: out of memory"):
        search(build_index(documents, use_gpu=True), queries, 30)


def test_numbers_beyond_float16_are_left_to_the_cpu(fake: FakeGpus, caplog: Any):
    documents, queries = np.float32(1e5) * vectors(300), vectors(5, seed=1)
    _, rows = search(build_index(documents, metric="dot", gpu_float16=True), queries, 10)
    np.testing.assert_array_equal(rows, search(build_index(documents, metric="dot", use_gpu=False), queries, 10)[1])
    assert "too large for float16" in caplog.text


def test_an_index_that_a_gpu_refuses_stays_on_the_cpu_and_says_so(fake: FakeGpus, caplog: Any):
    fake.fails_after = 0
    index = build_index(vectors(10), "HNSW32")
    assert index.gpus == 0 and "stays on the CPU: out of memory" in caplog.text
    with pytest.raises(ConfigError, match="cannot go to a GPU"):
        build_index(vectors(10), "HNSW32", use_gpu=True)


def test_gpus_are_used_only_where_there_are_any_and_as_asked(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(faiss, "get_num_gpus", lambda: 0)
    assert find_gpus("auto") is None
    with pytest.raises(ConfigError, match="sees no GPU"):
        build_index(vectors(10), use_gpu=True)
    monkeypatch.setattr(faiss, "get_num_gpus", lambda: 3)
    assert find_gpus(False) is None and find_gpus("auto", "shard", True) == Gpus(3, "shard", True)
    with pytest.raises(ConfigError, match="replicate or shard"):
        find_gpus("auto", "spread")  # type: ignore[arg-type]  # what a caller may get wrong
