"""An index file is mapped, serves the embeddings that it was built from alone, and cannot crash who reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest

from contaccum.errors import ConfigError, DataError, UserError
from contaccum.retrieval.index import build_index, search
from contaccum.retrieval.index_file import description_path, load_index, save_index
from contaccum.retrieval.rows import ArrayRows

FINGERPRINT = "a" * 64


def vectors(n: int = 600, d: int = 16, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(n, d)).astype(np.float32)


def written(folder: Path, factory: str = "HNSW8") -> Path:
    path = folder / "index.faiss"
    save_index(build_index(vectors(), factory), path, FINGERPRINT, "a store")
    return path


@pytest.mark.parametrize("factory", ["HNSW8", "IVF16,Flat", "IVF4,PQ4x4", "SQ8", "IVF8,Flat,RFlat"])
def test_an_index_finds_the_same_after_a_round_trip(tmp_path: Path, factory: str) -> None:
    path = written(tmp_path, factory)
    before, after = build_index(vectors(), factory), load_index(path, ArrayRows(vectors()), FINGERPRINT, factory)
    assert after.parameters == before.parameters
    for one, other in zip(search(before, vectors(9, seed=1), 20), search(after, vectors(9, seed=1), 20), strict=True):
        np.testing.assert_array_equal(one, other)


def test_vectors_are_mapped_and_not_read(tmp_path: Path) -> None:
    import psutil

    path = tmp_path / "index.faiss"
    save_index(build_index(vectors(40_000, 128), "SQ8"), path, FINGERPRINT, "a store")
    corpus = ArrayRows(vectors(40_000, 128))
    before = psutil.Process().memory_full_info().uss
    index = load_index(path, corpus, FINGERPRINT)
    assert index.faiss_index.ntotal == 40_000 and path.stat().st_size > 5_000_000
    assert psutil.Process().memory_full_info().uss - before < 2_500_000


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
    settings = {"corpus": vectors(), "fingerprint": FINGERPRINT, "factory": "HNSW8", **changed}
    corpus = ArrayRows(settings.pop("corpus"))
    with pytest.raises((DataError, ConfigError), match=words):
        load_index(written(tmp_path), corpus, **settings)


def test_a_flat_index_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="searches the store itself"):
        save_index(build_index(vectors()), tmp_path / "flat.faiss", FINGERPRINT, "a store")


def describe(path: Path, **changed: Any) -> None:
    described = description_path(path)
    about = json.loads(described.read_text())
    described.write_text(json.dumps({**about, "bytes": path.stat().st_size, **changed}))


@pytest.mark.parametrize(
    "what",
    [
        "no index",
        "no description",
        "cut off",
        "other size",
        "no json",
        "other format",
        "a pickle",
        "other kind",
        "other metric",
        "other rows",
        "flipped",
    ],
)
def test_what_is_broken_is_refused_in_one_line(tmp_path: Path, what: str) -> None:
    path = written(tmp_path)
    content = path.read_bytes()
    if what == "no index":
        path.unlink()
    elif what == "no description":
        description_path(path).unlink()
    elif what == "other size":
        path.write_bytes(content[:-1])
    elif what == "no json":
        description_path(path).write_text("{")
    elif what == "other format":
        describe(path, format="something else")
    else:
        if what == "cut off":
            path.write_bytes(content[: len(content) // 2])
        elif what == "a pickle":
            path.write_bytes(b"\x80\x04cos\nsystem\n(S'true'\ntR." + content)
        elif what == "flipped":
            # The links of the graph, or the sizes before them: FAISS would follow them anywhere.
            path.write_bytes(content[:100] + b"\xff" * 200 + content[300:])
        else:
            metric = faiss.METRIC_L2 if what == "other metric" else faiss.METRIC_INNER_PRODUCT
            index = faiss.index_factory(16, "SQ8" if what == "other kind" else "HNSW8", metric)
            rows = vectors(500 if what == "other rows" else 600)
            index.train(rows)
            index.add(rows)
            faiss.write_index(index, str(path))
        describe(path)
    with pytest.raises(UserError) as caught:
        load_index(path, ArrayRows(vectors()), FINGERPRINT)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)


def test_rows_that_the_corpus_lacks_are_never_handed_out() -> None:
    # As of a file whose lists were tampered with.
    index = build_index(vectors(), "IVF4,Flat")
    index.corpus = ArrayRows(vectors(300))
    with pytest.raises(DataError, match="finds row"):
        search(index, vectors(9, seed=1), 300)
