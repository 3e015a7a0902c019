"""A FAISS index over document embeddings, and search in it with an order that does not depend on luck.

Built from an `index_factory` string, on GPUs when FAISS sees any. Scores are inner products, higher is better;
"cos" normalises copies of the vectors. Texts, models and files are not its business: see `encoding` and `searcher`.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from contaccum.errors import ConfigError, UserError

logger = logging.getLogger(__name__)

Metric = Literal["cos", "dot"]

# Rows normalised and added at a time, so that "cos" never holds a second copy of a corpus.
_ADD_ROWS = 65_536
# FAISS samples at most 256 points per centroid itself; reading more into a training set only costs memory.
_POINTS_PER_CENTROID = 256
# Candidates fetched beyond k, to see whether a tie crosses the boundary.
_TIE_MARGIN = 8
# FAISS keeps its top k on the GPU in shared memory, which bounds k.
_GPU_MAX_K = 2048


@dataclass
class DenseIndex:
    """What `build_index` returns. `id_rank[row]` is the row's place in the order of document ids, for ties."""

    faiss_index: Any
    factory: str
    metric: Metric
    dimension: int
    id_rank: np.ndarray
    parameters: str | None = None
    gpus: int = 0
    # Kept beside an index on GPUs, for a k beyond what they can do.
    cpu_index: Any = None

    def __len__(self) -> int:
        return len(self.id_rank)


def build_index(
    embeddings: np.ndarray,
    factory: str = "Flat",
    metric: Metric = "cos",
    use_gpu: bool | Literal["auto"] = "auto",
    ids: Sequence[str] | None = None,
    parameters: str | None = None,
) -> DenseIndex:
    """Index embeddings (n, d), float32, one row per document.

    Args:
        factory: a FAISS factory string. "Flat" is exact; "HNSW32", "IVF1024,Flat", "SQ8", "OPQ16_64,IVF256,PQ16"
            trade exactness for speed or memory.
        metric: "cos" (copies are normalised, the caller's array is left alone) or "dot".
        use_gpu: "auto" uses every GPU that FAISS sees and falls back to the CPU with a message; True insists.
        ids: document ids, n of them; equal scores are ordered by them, ascending. Without ids, by row.
        parameters: FAISS search parameters, such as "nprobe=32" or "efSearch=128". An IVF index without any
            probes an eighth of its lists: FAISS's own default of one list finds too little to be of use.

    Raises:
        ConfigError: the factory string is wrong or cannot hold d dimensions or an inner product, there are too few
            vectors to train it, or a GPU was insisted on and none will do.
        UserError: an embedding is NaN or infinite.
    """

    if embeddings.ndim != 2 or not len(embeddings):
        raise ConfigError(f"an index needs embeddings of shape (n, d) with n > 0, not {embeddings.shape}")
    n, d = embeddings.shape
    if ids is not None and len(ids) != n:
        raise ConfigError(f"{len(ids)} ids for {n} embeddings")
    _require_finite(embeddings, "document embedding")

    index = check_factory(factory, d, n, metric, parameters)
    try:
        if not index.is_trained:
            index.train(_prepared(_training_sample(embeddings, _centroids(index)), metric))
        for start in range(0, n, _ADD_ROWS):
            index.add(_prepared(embeddings[start : start + _ADD_ROWS], metric))
    except RuntimeError as error:
        raise ConfigError(f"FAISS cannot build index {factory!r} on {n} vectors: {_reason(error)}") from error

    if parameters is None:
        parameters = default_parameters(index)
    if parameters is not None:
        _set_parameters(index, parameters)

    id_rank = np.arange(n)
    if ids is not None:
        id_rank[sorted(range(n), key=ids.__getitem__)] = np.arange(n)
    built = DenseIndex(index, factory, metric, d, id_rank, parameters)
    if use_gpu:
        _move_to_gpus(built, insist=use_gpu is True)
    return built


def check_factory(factory: str, dimension: int, n: int, metric: Metric = "cos", parameters: str | None = None) -> Any:
    """An empty FAISS index for n vectors of that dimension; raises `ConfigError` when it cannot work.

    Cheap, so that a mistake is found before a corpus is encoded.
    """
    import faiss

    if metric not in ("cos", "dot"):
        raise ConfigError(f"similarity must be 'cos' or 'dot', not {metric!r}")
    try:
        index = faiss.index_factory(dimension, factory, faiss.METRIC_INNER_PRODUCT)
    except RuntimeError as error:
        raise ConfigError(
            f"FAISS cannot make index {factory!r} for {dimension} dimensions and an inner product "
            f"({_reason(error)}); 'Flat' always works"
        ) from error
    if index.metric_type != faiss.METRIC_INNER_PRODUCT or isinstance(faiss.downcast_index(index), faiss.IndexIDMap):
        raise ConfigError(f"index {factory!r} does not rank rows by inner product; use 'Flat', 'HNSW32' or 'IVF...'")
    centroids = _centroids(index)
    if n < centroids:
        raise ConfigError(
            f"index {factory!r} needs at least {centroids} vectors to train and the corpus has {n}; "
            "use a smaller one, or 'Flat'"
        )
    if parameters is not None:
        try:
            _set_parameters(index, parameters)
        except RuntimeError as error:
            raise ConfigError(f"index {factory!r} does not take parameters {parameters!r}") from error
    return index


def default_parameters(index: Any) -> str | None:
    """The search parameters of a FAISS index that was asked for without any; see `build_index`."""
    nlist = _inverted_lists(index)
    return f"nprobe={math.ceil(nlist / 8)}" if nlist else None


def search(index: DenseIndex, queries: np.ndarray, k: int, batch_size: int = 1024) -> tuple[np.ndarray, np.ndarray]:
    """The k best documents of each query (n, d): scores float32 and rows int64, both of shape (n, min(k, corpus)).

    Ordered by score, descending, then by document id, ascending, at the k-th place too when the index is "Flat":
    a tie across it is fetched whole before it is cut. An approximate index may find fewer; the rest of a line is
    then row -1 with score -inf.

    Raises `ConfigError` for k < 1 or queries of another dimension, `UserError` for NaN or infinite queries.
    """
    if k < 1:
        raise ConfigError(f"k must be at least 1, not {k}")
    if queries.ndim != 2 or queries.shape[1] != index.dimension:
        raise ConfigError(f"queries have shape {queries.shape}, the index holds {index.dimension} dimensions")
    _require_finite(queries, "query embedding")
    k = min(k, len(index))
    scores = np.empty((len(queries), k), dtype=np.float32)
    rows = np.empty((len(queries), k), dtype=np.int64)
    for start in range(0, len(queries), batch_size):
        batch = _prepared(queries[start : start + batch_size], index.metric)
        part = slice(start, start + len(batch))
        scores[part], rows[part] = _search_batch(index, batch, k)
    return scores, rows


def _search_batch(index: DenseIndex, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    exact = index.factory == "Flat"
    scores = np.empty((len(queries), k), dtype=np.float32)
    rows = np.empty((len(queries), k), dtype=np.int64)
    open_queries = np.arange(len(queries))
    fetch = min(k + _TIE_MARGIN, len(index)) if exact else k
    while len(open_queries):
        found_scores, found_rows = _faiss_search(index, queries[open_queries], fetch)
        # The boundary is settled when something strictly worse than the k-th score was seen, or nothing is left.
        settled = (found_scores[:, -1] < found_scores[:, k - 1]) | (fetch == len(index)) | (not exact)
        rank = np.where(found_rows >= 0, index.id_rank[found_rows], len(index))
        order = np.lexsort((rank, -found_scores), axis=1)[:, :k]
        done = open_queries[settled]
        scores[done] = np.take_along_axis(found_scores, order, axis=1)[settled]
        rows[done] = np.take_along_axis(found_rows, order, axis=1)[settled]
        open_queries = open_queries[~settled]
        fetch = min(2 * fetch, len(index))
    return scores, rows


def _faiss_search(index: DenseIndex, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    on_cpu = index.gpus and k > _GPU_MAX_K
    scores, rows = (index.cpu_index if on_cpu else index.faiss_index).search(queries, k)
    scores[rows < 0] = -np.inf
    return scores, rows


def _move_to_gpus(index: DenseIndex, insist: bool) -> None:
    import faiss

    gpus = faiss.get_num_gpus()
    if not gpus:
        if insist:
            raise ConfigError("use_gpu=True, but FAISS sees no GPU; install faiss-gpu in place of faiss-cpu")
        return
    try:
        moved = faiss.index_cpu_to_all_gpus(index.faiss_index)
    except (RuntimeError, AttributeError) as error:
        if insist:
            raise ConfigError(f"index {index.factory!r} cannot go to a GPU: {_reason(error)}") from error
        logger.warning("Index %r stays on the CPU: %s", index.factory, _reason(error))
        return
    index.cpu_index, index.faiss_index, index.gpus = index.faiss_index, moved, gpus


def _prepared(vectors: np.ndarray, metric: Metric) -> np.ndarray:
    """float32, C-contiguous, and for "cos" a normalised copy. A zero vector stays zero and scores zero."""
    if metric == "dot":
        return np.ascontiguousarray(vectors, dtype=np.float32)
    import faiss

    copy = np.array(vectors, dtype=np.float32, order="C")
    faiss.normalize_L2(copy)
    return copy


def _set_parameters(index: Any, parameters: str) -> None:
    import faiss

    # FAISS takes nprobe=0 here and fails at the first search.
    if re.search(r"=\s*(-|0+\s*(,|$))", parameters):
        raise RuntimeError("search parameters are positive")
    space: Any = faiss.ParameterSpace()  # its stub knows one of two overloads
    space.set_index_parameters(index, parameters)


def _require_finite(vectors: np.ndarray, what: str) -> None:
    # FAISS answers NaN with row -1 and no word, which would read as a poor model.
    finite = np.isfinite(vectors).all(axis=1)
    if not finite.all():
        raise UserError(f"{what} {int(np.flatnonzero(~finite)[0])} holds NaN or infinity")


def _training_sample(embeddings: np.ndarray, centroids: int) -> np.ndarray:
    wanted = max(centroids * _POINTS_PER_CENTROID, _ADD_ROWS)
    if len(embeddings) <= wanted:
        return embeddings
    rows = np.random.default_rng(0).choice(len(embeddings), wanted, replace=False)
    return embeddings[np.sort(rows)]


def _parts(index: Any) -> list[Any]:
    """The index and the ones inside it (under a transform, a refinement, a coarse quantiser), outermost first."""
    import faiss

    index = faiss.downcast_index(index)
    inner = [getattr(index, name) for name in ("index", "base_index", "quantizer") if hasattr(index, name)]
    return [index, *(part for each in inner if each is not None for part in _parts(each))]


def _inverted_lists(index: Any) -> int:
    return max((part.nlist for part in _parts(index) if hasattr(part, "nlist")), default=0)


def _centroids(index: Any) -> int:
    """The most centroids that any part of the index has to find: what it needs vectors for, at the least."""
    codes = [part.pq.ksub for part in _parts(index) if hasattr(part, "pq")]
    return max([_inverted_lists(index), *codes])


def _reason(error: Exception) -> str:
    """The last clause of a FAISS error: the part that is about the user's settings, not FAISS's source lines."""
    return re.sub(r"^Error in .*?:\d+: (Error: )?", "", " ".join(str(error).split()))
