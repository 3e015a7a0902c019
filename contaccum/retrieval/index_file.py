"""A FAISS index on disk: written once, mapped into memory when it is searched, and never taken for another corpus's.

Beside INDEX lies INDEX.json: factory, metric, dimension, rows, the fingerprint of what was indexed. Both are checked
before the file is read here: FAISS's reader is C++ that trusts what it reads, so a process of its own tries it first.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import numpy as np

from contaccum.data.records import one_line
from contaccum.errors import ConfigError, DataError, UserError
from contaccum.evaluation.results import write_atomically
from contaccum.retrieval.exact_scores import Metric
from contaccum.retrieval.gpus import GpuMode, find_gpus, reason
from contaccum.retrieval.index import DenseIndex, check_factory, ready_index
from contaccum.retrieval.rows import EmbeddingRows
from contaccum.retrieval.store import EmbeddingStore

FORMAT, VERSION = "contaccum FAISS index", 1
_TRIAL = """
import json, sys
sys.path[:] = json.loads(sys.argv[3])
import faiss
import numpy as np
index = faiss.read_index(sys.argv[1], int(sys.argv[2]))
print(type(index).__name__, index.d, index.ntotal, index.metric_type, index.is_trained, flush=True)
queries = np.random.default_rng(0).standard_normal((64, index.d)).astype(np.float32)
scores, rows = index.search(queries, 10)
print(rows.min(), rows.max(), flush=True)
"""
_TRIAL_SECONDS = 600


def store_fingerprint(store: EmbeddingStore) -> str:
    """sha256, in hex, of what decides a store's rows: texts, model, tokenisation, types, number."""
    names = ("kind", "model", "similarity", "tokenisation", "precision", "dtype", "dimension", "rows")
    about = {name: store.about.get(name) for name in names}
    about["corpus"] = (store.about.get("corpus") or {}).get("fingerprint")
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


def description_path(path: Path) -> Path:
    """Where the description of an index file lies."""
    return path.with_name(f"{path.name}.json")


def save_index(index: DenseIndex, path: str | os.PathLike[str], fingerprint: str, store: str) -> None:
    """Write an approximate index and its description, each whole or not at all, the description last.

    Args:
        fingerprint: of what was indexed (`store_fingerprint`).
        store: where that lies, for people.

    Raises:
        ConfigError: a Flat index, which is the embeddings themselves.
        UserError: the file cannot be written.
    """
    import faiss

    path = Path(path)
    if index.is_exact:
        raise ConfigError("a Flat index searches the store itself: there is nothing to write to an index file")
    partial = path.with_name(f"{path.name}.partial")
    described = description_path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # A description that outlived its index would vouch for another one.
        described.unlink(missing_ok=True)
        faiss.write_index(index.cpu_index if index.gpus else index.faiss_index, str(partial))
        os.replace(partial, path)
        about = {
            "format": FORMAT,
            "version": VERSION,
            "factory": index.factory,
            "metric": index.metric,
            "dimension": index.dimension,
            "rows": len(index),
            "fingerprint": fingerprint,
            "store": store,
            "bytes": path.stat().st_size,
            "faiss": faiss.__version__,
        }
        write_atomically(described, [json.dumps(about, indent=1, ensure_ascii=False), "\n"])
    except (OSError, RuntimeError) as error:
        partial.unlink(missing_ok=True)
        raise UserError(one_line(f"{path}: the index cannot be written: {reason(error)}")) from error


def read_description(path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """What INDEX.json says; None where there is neither an index nor a description.

    Raises:
        DataError: one without the other, a description of something else, or a size that is not the file's.
    """
    path, described = Path(path), description_path(Path(path))
    if not path.exists() and not described.exists():
        return None
    for file in (path, described):
        if not file.is_file():
            raise DataError(
                one_line(f"{file}: no such file, but its index is half there (remove it, to build it anew)")
            )
    try:
        about = json.loads(described.read_text(encoding="utf-8"))
        if about["format"] != FORMAT or about["version"] != VERSION:
            raise ValueError(f"format {about['format']!r}, version {about['version']!r}")
        wanted = {"factory": str, "metric": str, "dimension": int, "rows": int, "fingerprint": str, "bytes": int}
        for name, kind in wanted.items():
            if not isinstance(about[name], kind):
                raise ValueError(f"{name} is {about[name]!r}")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(one_line(f"{described}: does not describe an index of contaccum ({error!r})")) from error
    if path.stat().st_size != about["bytes"]:
        raise DataError(
            one_line(f"{path}: has {path.stat().st_size} bytes, its description says {about['bytes']} (build it anew)")
        )
    return about


def load_index(
    path: str | os.PathLike[str],
    corpus: EmbeddingRows,
    fingerprint: str,
    factory: str | None = None,
    metric: Metric = "cos",
    use_gpu: bool | Literal["auto"] = "auto",
    parameters: str | None = None,
    gpu_mode: GpuMode = "replicate",
    gpu_float16: bool = False,
) -> DenseIndex:
    """The index that `save_index` wrote, mapped into memory.

    Args:
        corpus: what was indexed.
        fingerprint: of that; an index of anything else is refused.
        factory: refuse another one; None takes whatever it is.
        metric: refuse another one.
        use_gpu, parameters, gpu_mode, gpu_float16: see `build_index`.

    Raises:
        ConfigError: the index is of another kind than asked for, or the search parameters do not fit it.
        DataError: the files are missing, broken, of another corpus, or no index that FAISS reads.
    """
    path = Path(path)
    about = read_description(path)
    if about is None:
        raise DataError(one_line(f"{path}: no such file"))
    mend = "name another file, or remove it to build it anew"
    if about["fingerprint"] != fingerprint or (about["dimension"], about["rows"]) != (corpus.dim, len(corpus)):
        raise DataError(
            one_line(f"{path}: is an index of other embeddings: {about['rows']} rows of {about.get('store')} ({mend})")
        )
    for name, wanted in (("factory", factory), ("metric", metric)):
        if wanted is not None and about[name] != wanted:
            raise ConfigError(one_line(f"{path}: has {name} {about[name]!r}, asked for is {wanted!r} ({mend})"))
    empty = check_factory(about["factory"], corpus.dim, len(corpus), metric)
    _try_in_a_process(path, type(empty).__name__, corpus)
    index = read_faiss(path)
    return ready_index(
        corpus,
        index,
        about["factory"],
        metric,
        parameters,
        find_gpus(use_gpu, gpu_mode, gpu_float16),
        use_gpu is True,
    )


def read_faiss(path: str | os.PathLike[str]) -> Any:
    """A FAISS index file, its vectors, codes and lists mapped; memory holds what is searched."""
    import faiss

    return faiss.read_index(os.fspath(path), _flags())


def _flags() -> int:
    import faiss

    # Older FAISS maps inverted lists alone.
    return getattr(faiss, "IO_FLAG_MMAP_IFC", faiss.IO_FLAG_MMAP)


def _try_in_a_process(path: Path, kind: str, corpus: EmbeddingRows) -> None:
    """Read and search the file where a crash costs nothing; raises `DataError` where it is not what was described."""
    import faiss

    # -I: nothing of the folder that this runs in is imported.
    command = [sys.executable, "-I", "-c", _TRIAL, os.fspath(path), str(_flags()), json.dumps(sys.path)]
    try:
        tried = subprocess.run(command, capture_output=True, text=True, timeout=_TRIAL_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise DataError(one_line(f"{path}: cannot be read within {_TRIAL_SECONDS} seconds (build it anew)")) from error
    lines = tried.stdout.splitlines()
    wanted = f"{kind} {corpus.dim} {len(corpus)} {faiss.METRIC_INNER_PRODUCT} True"
    if tried.returncode or len(lines) != 2:
        last = (tried.stderr.strip().splitlines() or [f"it ended with {tried.returncode}"])[-1]
        raise DataError(one_line(f"{path}: FAISS cannot read or search it: {last[-200:]} (build it anew)"))
    least, greatest = np.array(lines[1].split(), dtype=np.int64)
    if lines[0] != wanted or least < -1 or greatest >= len(corpus):
        raise DataError(one_line(f"{path}: holds {lines[0]}, not {wanted} as described (build it anew)"))
