"""An index over document embeddings, and search in it with an order that does not depend on luck.

Built from a FAISS `index_factory` string. "Flat" is no copy of the embeddings: `exact` searches them where they lie.
Scores are inner products, higher is better; "cos" normalises copies of the vectors. Texts and models are not its
business: see `encoding` and `searcher`; index files are `index_file`'s.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from contaccum.errors import ConfigError, DataError
from contaccum.retrieval.cpu_slices import CpuSlices
from contaccum.retrieval.exact import SliceSearch, exact_search
from contaccum.retrieval.exact_scores import Metric, ordered
from contaccum.retrieval.gpus import GPU_MAX_K, GpuMode, Gpus, GpuSlices, find_gpus, reason, to_gpus
from contaccum.retrieval.rows import ArrayRows, EmbeddingRows, norms_of, slices, unit_or_same

logger = logging.getLogger(__name__)

# Rows normalised and added at a time, so that "cos" never holds a second copy of a corpus.
_ADD_ROWS = 65_536
# FAISS samples at most 256 points per centroid itself; reading more into a training set only costs memory. It asks
# for 39 at the least.
_POINTS_PER_CENTROID, _FEWEST_POINTS = 256, 40
# A training set grows to this, and beyond it only as far as the fewest points demand.
_TRAINING_BYTES = 2**31


@dataclass
class DenseIndex:
    """What `build_index` returns.

    Attributes:
        corpus: the embeddings.
        faiss_index: None where the embeddings themselves are searched ("Flat").
        slices: what searches their slices then.
        gpus: how many GPUs are used.
        cpu_index: kept beside an index on GPUs, for a k beyond what they can do.
    """

    corpus: EmbeddingRows
    faiss_index: Any
    factory: str
    metric: Metric
    parameters: str | None = None
    slices: SliceSearch | None = None
    gpus: int = 0
    cpu_index: Any = None

    @property
    def dimension(self) -> int:
        return self.corpus.dim

    @property
    def is_exact(self) -> bool:
        return self.faiss_index is None

    def __len__(self) -> int:
        return len(self.corpus)


def build_index(
    embeddings: np.ndarray | EmbeddingRows,
    factory: str = "Flat",
    metric: Metric = "cos",
    use_gpu: bool | Literal["auto"] = "auto",
    ids: Sequence[str] | None = None,
    parameters: str | None = None,
    gpu_mode: GpuMode = "replicate",
    gpu_float16: bool = False,
) -> DenseIndex:
    """Index n embeddings of d dimensions.

    Args:
        embeddings: an array (n, d), or rows that are read in slices. "Flat" holds it without a copy: leave it as it is
            while the index is used.
        factory: a FAISS factory string. "Flat" is exact; "HNSW32", "IVF1024,Flat", "SQ8", "OPQ16_64,IVF256,PQ16"
            trade exactness for speed or memory.
        metric: "cos" (copies are normalised, the caller's array is left alone) or "dot".
        use_gpu: "auto" uses every GPU that FAISS sees and falls back to the CPU with a message; True insists.
        ids: document ids, n of them, for an array; equal scores are ordered by them, ascending. Without, by row.
        parameters: FAISS search parameters, such as "nprobe=32" or "efSearch=128". An IVF index without any
            probes an eighth of its lists: FAISS's own default of one list finds too little to be of use.
        gpu_mode, gpu_float16: see `Gpus`.

    Raises:
        ConfigError: the factory string is wrong or cannot hold d dimensions or an inner product, there are too few
            vectors to train it, or a GPU was insisted on and none will do.
        UserError: an embedding is NaN or infinite ("Flat" finds that out when it searches, of what is no array).
    """

    corpus = ArrayRows(embeddings, ids) if isinstance(embeddings, np.ndarray) else embeddings
    gpus = find_gpus(use_gpu, gpu_mode, gpu_float16)
    index = check_factory(factory, corpus.dim, len(corpus), metric, parameters)
    if factory == "Flat":
        if isinstance(corpus, ArrayRows):
            for start, stop in slices(corpus):
                corpus.norms(start, corpus.slice(start, stop))
        searcher = GpuSlices(gpus, corpus.dim, use_gpu is True) if gpus else CpuSlices()
        return DenseIndex(corpus, None, factory, metric, parameters, searcher, gpus.count if gpus else 0)
    try:
        if not index.is_trained:
            rows = _training_rows(len(corpus), corpus.dim, _centroids(index))
            index.train(_prepared(corpus.gather(rows), metric))
        for start, stop in slices(corpus, _ADD_ROWS):
            index.add(_prepared(corpus.slice(start, stop), metric, "document embedding", start))
    except RuntimeError as error:
        raise ConfigError(f"FAISS cannot build index {factory!r} on {len(corpus)} vectors: {reason(error)}") from error
    return ready_index(corpus, index, factory, metric, parameters, gpus, use_gpu is True)


def ready_index(
    corpus: EmbeddingRows,
    index: Any,
    factory: str,
    metric: Metric,
    parameters: str | None = None,
    gpus: Gpus | None = None,
    insist: bool = False,
) -> DenseIndex:
    """A filled FAISS index, from wherever, with its search parameters set, on its GPUs; raises `ConfigError`."""
    if parameters is None:
        parameters = default_parameters(index)
    if parameters is not None:
        _require_parameters(index, factory, parameters)
    built = DenseIndex(corpus, index, factory, metric, parameters)
    if gpus:
        _move_to_gpus(built, gpus, insist)
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
            f"({reason(error)}); 'Flat' always works"
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
        _require_parameters(index, factory, parameters)
    return index


def default_parameters(index: Any) -> str | None:
    """The search parameters of a FAISS index that was asked for without any; see `build_index`."""
    nlist = _inverted_lists(index)
    return f"nprobe={math.ceil(nlist / 8)}" if nlist else None


def search(
    index: DenseIndex, queries: np.ndarray, k: int, batch_size: int = 1024, show_progress: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """The k best documents of each query (n, d): scores float32 and rows int64, both of shape (n, min(k, corpus)).

    Ordered by score, descending, then by document id, ascending. With "Flat" that holds for the whole corpus: what is
    left out at the k-th place has a lower score, or the same and a later id (see `exact_search`). An approximate index
    may find fewer; the rest of a line is then row -1 with score -inf.

    Args:
        batch_size: queries that an approximate index is given at a time.

    Raises `ConfigError` for k < 1 or queries of another dimension, `UserError` for NaN or infinite vectors, `DataError`
    for an index from a broken file.
    """
    if k < 1:
        raise ConfigError(f"k must be at least 1, not {k}")
    if queries.ndim != 2 or queries.shape[1] != index.dimension:
        raise ConfigError(f"queries have shape {queries.shape}, the index holds {index.dimension} dimensions")
    k = min(k, len(index))
    if index.gpus and k > GPU_MAX_K:
        way = "from several slices" if index.is_exact else "on the CPU"
        logger.info("A GPU gives %d documents per query at the most: the best %d are found %s", GPU_MAX_K, k, way)
    from tqdm.auto import tqdm

    if index.is_exact:
        with tqdm(unit=" rows", desc="Searching", unit_scale=True, disable=not show_progress) as bar:
            found = exact_search(index.corpus, queries, k, index.metric, index.slices, on_slice=bar.update)
        if isinstance(index.slices, GpuSlices) and index.slices.given_up:
            index.gpus = 0
        return found
    searched = index.cpu_index if index.gpus and k > GPU_MAX_K else index.faiss_index
    scores = np.empty((len(queries), k), dtype=np.float32)
    rows = np.empty((len(queries), k), dtype=np.int64)
    for start in tqdm(range(0, len(queries), batch_size), desc="Searching", disable=not show_progress):
        part = slice(start, start + batch_size)
        best, best_rows = searched.search(_prepared(queries[part], index.metric, "query embedding", start), k)
        if best_rows.size and best_rows.max() >= len(index):
            raise DataError(f"the index finds row {best_rows.max()} of {len(index)}: it is broken (build it anew)")
        best[best_rows < 0] = -np.inf
        scores[part], rows[part] = ordered(best, best_rows, k, index.corpus.ids)
    return scores, rows


def _move_to_gpus(index: DenseIndex, gpus: Gpus, insist: bool) -> None:
    try:
        moved = to_gpus(index.faiss_index, gpus)
    except (RuntimeError, AttributeError) as error:
        if insist:
            raise ConfigError(f"index {index.factory!r} cannot go to a GPU: {reason(error)}") from error
        logger.warning("Index %r stays on the CPU: %s", index.factory, reason(error))
        return
    index.cpu_index, index.faiss_index, index.gpus = index.faiss_index, moved, gpus.count


def _prepared(vectors: np.ndarray, metric: Metric, what: str = "document embedding", first: int = 0) -> np.ndarray:
    """float32, C-contiguous, finite, and for "cos" a normalised copy. A zero vector stays zero and scores zero."""
    vectors = np.ascontiguousarray(vectors, dtype=np.float32)
    return unit_or_same(vectors, norms_of(vectors, what, first), metric)


def _require_parameters(index: Any, factory: str, parameters: str) -> None:
    try:
        _set_parameters(index, parameters)
    except RuntimeError as error:
        raise ConfigError(f"index {factory!r} does not take parameters {parameters!r}") from error


def _set_parameters(index: Any, parameters: str) -> None:
    import faiss

    # FAISS takes nprobe=0 here and fails at the first search.
    if re.search(r"=\s*(-|0+\s*(,|$))", parameters):
        raise RuntimeError("search parameters are positive")
    space: Any = faiss.ParameterSpace()  # its stub knows one of two overloads
    space.set_index_parameters(index, parameters)


def _training_rows(n: int, dimension: int, centroids: int) -> np.ndarray:
    """Rows to train on: all, or a sample, ascending, the same in every run."""
    most = max(_TRAINING_BYTES // (4 * dimension), centroids * _FEWEST_POINTS)
    wanted = max(min(centroids * _POINTS_PER_CENTROID, most), _ADD_ROWS)
    if n <= wanted:
        return np.arange(n)
    return np.sort(np.random.default_rng(0).choice(n, wanted, replace=False))


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
