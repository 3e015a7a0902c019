"""Search embeddings by FAISS: exactly, or with an index of any `index_factory` string, in memory or in a file.

Scores are inner products, higher is better; "cos" compares copies of length 1. "Flat" builds nothing: embeddings are
searched where they lie, an array or a store of any size, slice by slice. Texts and models are the business of `encode`
and `searcher`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from contaccum.errors import ConfigError, DataError, UserError
from contaccum.files import AnyPath, atomic_file, read_json, write_json
from contaccum.retrieval.encode import Metric
from contaccum.retrieval.store import Codes, EmbeddingStore

# Rows of float32 searched at a time: enough for products to run at full speed, little beside a corpus.
SLICE_BYTES = 2**28
# So many results more than k are held until the end, so that equal scores are ordered by id at the k-th place too.
_MARGIN = 32
# FAISS keeps its top k on a GPU in shared memory, which bounds k.
_GPU_MAX_K = 2048
# Fewer queries are not worth a thread of their own; the results of more are not merged at once.
_FEWEST_QUERIES, _MOST_QUERIES = 64, 4096
# To train on: FAISS asks for 39 points per centroid; 2**16 rows are enough for what has centroids of its own.
_POINTS_PER_CENTROID, _LEAST_ROWS = 64, 2**16

_Hits = tuple[np.ndarray, np.ndarray]  # scores and rows


@dataclass
class DenseIndex:
    """What `build_index` returns: embeddings (N, d), what gives the ids of rows, and how they are searched.

    `faiss_index` is None where the embeddings themselves are searched, exactly ("Flat"), by `gpus` GPUs or the CPU.
    """

    corpus: np.ndarray | EmbeddingStore | Codes
    ids: Callable[[np.ndarray], Any]
    factory: str
    metric: Metric
    parameters: str | None
    faiss_index: Any = None
    gpus: int = 0


def build_index(
    embeddings: np.ndarray | EmbeddingStore | Codes,
    factory: str = "Flat",
    metric: Metric = "cos",
    ids: Sequence[str] | None = None,
    parameters: str | None = None,
) -> DenseIndex:
    """Index N embeddings of d dimensions.

    Args:
        embeddings: an array (N, d), a store, or codes. "Flat" copies nothing: leave an array alone while it is used.
        factory: "Flat" is exact, on all GPUs that FAISS sees, if it sees any; "HNSW32", "IVF1024,Flat", "SQ8",
            "OPQ16_64,IVF256,PQ16" trade that for speed or room, on the CPU.
        metric: "cos" (copies are normalised, the caller's array is left alone) or "dot".
        ids: N document ids of an array; equal scores are ordered by them, ascending. Without, by row.
        parameters: FAISS search parameters, such as "nprobe=32" or "efSearch=128"; None: of an inverted
            file an eighth of its lists.

    Raises:
        ConfigError: see `check_factory`.
        UserError: an embedding is NaN or infinite ("Flat" finds that out when it searches).
    """
    import faiss

    n, dimension = embeddings.shape
    index, parameters = check_factory(factory, dimension, n, metric, parameters)
    if isinstance(embeddings, EmbeddingStore):
        of_rows: Any = embeddings.ids
    else:
        of_rows = np.asarray if ids is None else np.array(ids, dtype=object).__getitem__
    if factory == "Flat":
        return DenseIndex(
            embeddings, of_rows, factory, metric, parameters, gpus=faiss.get_num_gpus()
        )
    try:
        if not index.is_trained:
            most = min(max(_POINTS_PER_CENTROID * _inverted_lists(index), _LEAST_ROWS), n)
            sample = np.sort(np.random.default_rng(0).choice(n, most, replace=False))
            index.train(prepared(embeddings[sample], metric, "document embedding"))
        size = max(1, SLICE_BYTES // (4 * dimension))
        for start in range(0, n, size):
            index.add(
                prepared(embeddings[start : start + size], metric, "document embedding", start)
            )
    except RuntimeError as error:
        raise ConfigError(
            f"FAISS cannot build index {factory!r} on {n} vectors: {_reason(error)}"
        ) from error
    return DenseIndex(embeddings, of_rows, factory, metric, parameters, index)


def open_index(
    path: AnyPath,
    store: EmbeddingStore,
    factory: str,
    metric: Metric = "cos",
    parameters: str | None = None,
) -> DenseIndex:
    """The index of a store in a file, mapped into memory; where there is none, it is built and written first.

    FAISS trusts what it reads: open no stranger's file. PATH.json says of what the index is.

    Raises:
        ConfigError: see `build_index`.
        DataError: the file is of something else, or no index that FAISS reads.
    """
    import faiss

    path, described = Path(path), Path(f"{path}.json")
    about = {"fingerprint": store.fingerprint, "factory": factory, "metric": metric}
    mend = "name another file, or remove it to build it anew"
    if not path.exists():
        index = build_index(store, factory, metric, parameters=parameters)
        write_json(described, about | {"store": str(store.folder), "faiss": faiss.__version__})
        with atomic_file(path) as part:
            faiss.write_index(index.faiss_index, str(part))
        return index
    there = read_json(described)
    for name, wanted in about.items():
        if there.get(name) != wanted:
            raise DataError(
                f"{path}: is an index of {name} {there.get(name)}, asked for is {wanted} ({mend})"
            )
    try:
        found = faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC)
    except RuntimeError as error:
        raise DataError(f"{path}: cannot be read: {_reason(error)} ({mend})") from error
    return DenseIndex(
        store, store.ids, factory, metric, _set_parameters(found, factory, parameters), found
    )


def search(index: DenseIndex, queries: np.ndarray, k: int, show_progress: bool = False) -> _Hits:
    """The k best documents of each query (n, d): scores float32 and rows int64, both (n, min(k, N)).

    Ordered by score, descending, then by id, ascending. An approximate index may find fewer; the rest of a line is then
    row -1 with score -inf. Of a corpus that is searched exactly, memory holds a slice.

    Raises:
        UserError: NaN or infinite vectors.
    """
    k = min(k, len(index.corpus))
    queries = prepared(queries, index.metric, "query embedding")
    if index.faiss_index is None:
        scores, rows = _search_slices(
            index, queries, min(k + _MARGIN, len(index.corpus)), show_progress
        )
    else:
        scores, rows = index.faiss_index.search(queries, k)
    scores[rows < 0] = -np.inf
    # Lines are sorted by score: what is left is to bring equal ones into the order of ids.
    equal = (scores[:, 1:] == scores[:, :-1]) & (rows[:, 1:] >= 0)
    for line in np.flatnonzero(equal.any(axis=1)).tolist():
        tied = np.flatnonzero(np.r_[equal[line], False] | np.r_[False, equal[line]])
        keys = list(zip((-scores[line, tied]).tolist(), index.ids(rows[line, tied]), strict=True))
        rows[line, tied] = rows[line, tied[sorted(range(len(keys)), key=keys.__getitem__)]]
    return scores[:, :k], rows[:, :k]


def _search_slices(index: DenseIndex, queries: np.ndarray, k: int, show_progress: bool) -> _Hits:
    """Exact search, equal scores in any order."""
    import faiss
    from tqdm.auto import trange

    (n, dimension), on_gpus = index.corpus.shape, index.gpus > 0 and k <= _GPU_MAX_K
    # Threads that share a block of FAISS's wait for each other at each: a group of queries for each takes half the CPU
    # time, and on a busy machine a fraction of the wall time.
    threads = faiss.omp_get_max_threads()
    groups = 1 if on_gpus else max(1, min(threads, len(queries) // _FEWEST_QUERIES))
    parts = np.array_split(queries, max(groups, -(-len(queries) // _MOST_QUERIES)))
    heaps = [faiss.ResultHeap(len(part), k, keep_max=True) for part in parts]

    size = min(max(1, SLICE_BYTES // (4 * dimension)), n)
    # Fresh memory for every slice would cost more than what is written to it.
    buffer = np.empty((size, dimension), dtype=np.float32) if index.metric == "cos" else None
    # FAISS takes products one by one below 128,000 numbers of queries, at a fifteenth of the speed.
    before, faiss.cvar.distance_compute_blas_threshold = (
        faiss.cvar.distance_compute_blas_threshold,
        8 * dimension,
    )
    try:
        with ThreadPoolExecutor(
            groups, initializer=faiss.omp_set_num_threads, initargs=(threads // groups,)
        ) as pool:
            for start in trange(0, n, size, desc="Searching", disable=not show_progress):
                documents = index.corpus[start : start + size]
                documents = prepared(documents, index.metric, "document embedding", start, buffer)
                find: Any = partial(faiss.knn, xb=documents, metric=faiss.METRIC_INNER_PRODUCT)
                if on_gpus:
                    flat = faiss.IndexFlatIP(dimension)
                    flat.add(documents)
                    find = faiss.index_cpu_to_all_gpus(flat).search
                list(pool.map(partial(_add, find, start, min(k, len(documents))), parts, heaps))
    finally:
        faiss.cvar.distance_compute_blas_threshold = before
    for heap in heaps:
        heap.finalize()
    return np.concatenate([heap.D for heap in heaps]), np.concatenate([heap.I for heap in heaps])


def _add(find: Callable[..., Any], start: int, k: int, queries: np.ndarray, heap: Any) -> None:
    scores, rows = find(queries, k=k)
    heap.add_result(scores, rows + start)


def recall_against_exact(
    index: DenseIndex, queries: np.ndarray, rows: np.ndarray
) -> dict[str, Any] | None:
    """{"queries": 100, "recall@k": ...}: the share of the exact result that `search` found; None for an exact index.

    Args:
        queries, rows: all queries (n, d) and the rows (n, k) found for them. A hundred, spread evenly, are compared.
    """
    if index.faiss_index is None or not len(queries):
        return None
    sample = np.unique(np.linspace(0, len(queries) - 1, 100).astype(np.int64))
    _, exact = search(
        build_index(index.corpus, metric=index.metric), queries[sample], rows.shape[1]
    )
    hits = [np.isin(line, found).mean() for line, found in zip(exact, rows[sample], strict=True)]
    return {"queries": len(sample), f"recall@{rows.shape[1]}": float(np.mean(hits))}


def check_factory(
    factory: str, dimension: int, n: int, metric: Metric = "cos", parameters: str | None = None
) -> tuple[Any, str | None]:
    """An empty FAISS index for n vectors of that dimension, and its search parameters, before a corpus is encoded.

    Raises:
        ConfigError: the factory string or the parameters are wrong, it cannot hold that dimension or an inner product,
            or there are too few vectors to train it.
    """
    import faiss

    try:
        index = faiss.index_factory(dimension, factory, faiss.METRIC_INNER_PRODUCT)
    except RuntimeError as error:
        what = (
            f"FAISS cannot make index {factory!r} for {dimension} dimensions and an inner product"
        )
        raise ConfigError(f"{what} ({_reason(error)}); 'Flat' always works") from error
    if n < (lists := _inverted_lists(index)):
        raise ConfigError(
            f"index {factory!r} needs {lists} vectors to train, the corpus has {n}; use 'Flat'"
        )
    return index, _set_parameters(index, factory, parameters)


def prepared(
    vectors: np.ndarray, metric: Metric, what: str, first: int = 0, out: np.ndarray | None = None
) -> np.ndarray:
    """float32, C-contiguous; for "cos" a copy of length 1 (a zero vector stays zero).

    Args:
        what, first: name a vector in errors, and the row of the first one.
        out: memory of at least that shape for the copy.

    Raises:
        UserError: NaN or infinity, of squares too. FAISS answers NaN with row -1 and no word, which would read as a
            poor model.
    """
    vectors = np.ascontiguousarray(vectors, dtype=np.float32)
    norms = np.sqrt(np.einsum("nd,nd->n", vectors, vectors))
    if not np.isfinite(norms).all():
        row = first + int(np.flatnonzero(~np.isfinite(norms))[0])
        raise UserError(f"{what} {row} holds NaN, infinity or numbers too large for float32 scores")
    if metric == "dot":
        return vectors
    return np.divide(
        vectors,
        np.where(norms > 0, norms, 1)[:, None],
        out=None if out is None else out[: len(vectors)],
    )


def _set_parameters(index: Any, factory: str, parameters: str | None) -> str | None:
    """Set and return search parameters; None: an eighth of the lists, for FAISS's own default of one finds little."""
    import faiss

    lists = _inverted_lists(index)
    wanted = parameters or (f"nprobe={math.ceil(lists / 8)}" if lists else None)
    if wanted:
        try:
            space: Any = faiss.ParameterSpace()  # its stub knows one of two overloads
            space.set_index_parameters(index, wanted)
        except RuntimeError as error:
            raise ConfigError(
                f"index {factory!r} does not take parameters {parameters!r}"
            ) from error
    return wanted


def _inverted_lists(index: Any) -> int:
    """The lists of the inverted file that an index is or holds; 0 without one."""
    import faiss

    ivf = faiss.try_extract_index_ivf(index)
    return 0 if ivf is None else int(ivf.nlist)


def _reason(error: Exception) -> str:
    """The last clause of a FAISS error: the part that is about the user's settings, not FAISS's source lines."""
    return re.sub(r"^Error in .*?:\d+: (Error: )?", "", " ".join(str(error).split()))
