"""An index over embeddings by any FAISS `index_factory` string, exact or not, in memory or as a file; search in it.

Scores are inner products, higher is better; "cos" compares copies of length 1. "Flat" is no index: `exact` searches the
embeddings where they lie. Texts and models are the business of `encode` and `searcher`.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from contaccum.errors import ConfigError, DataError, check_choice
from contaccum.files import AnyPath, atomic_file, read_json, write_json
from contaccum.retrieval.exact import GPU_MAX_K, SLICE_BYTES, ArrayRows, Metric, Rows, exact_search, ordered, prepared

logger = logging.getLogger(__name__)

GPU_MODES = ("replicate", "shard")

_FORMAT, _VERSION = "contaccum FAISS index", 1
# FAISS samples at most 256 points per centroid to train on, and asks for 39 at the least; 2**16 rows are enough for
# what has centroids of its own (256 in a product quantiser, say).
_POINTS_PER_CENTROID, _FEWEST_POINTS, _TRAINING_BYTES, _LEAST_ROWS = 256, 40, 2**31, 2**16


@dataclass
class DenseIndex:
    """What `build_index` returns.

    Attributes:
        corpus: the embeddings.
        faiss_index: None where the embeddings themselves are searched ("Flat").
        gpu: FAISS's cloner options where GPUs are used.
        cpu_index: held beside an index on GPUs, for a k beyond what they can do and to be written.
    """

    corpus: Rows
    faiss_index: Any
    factory: str
    metric: Metric
    parameters: str | None = None
    gpu: Any = None
    cpu_index: Any = None

    @property
    def dimension(self) -> int:
        return self.corpus.dim

    @property
    def is_exact(self) -> bool:
        return self.faiss_index is None

    @property
    def gpus(self) -> int:
        """How many GPUs are used."""
        import faiss

        return faiss.get_num_gpus() if self.gpu is not None else 0

    def __len__(self) -> int:
        return len(self.corpus)


def build_index(
    embeddings: np.ndarray | Rows,
    factory: str = "Flat",
    metric: Metric = "cos",
    use_gpu: bool | Literal["auto"] = "auto",
    ids: Sequence[str] | None = None,
    parameters: str | None = None,
    gpu_mode: str = "replicate",
    gpu_float16: bool = False,
) -> DenseIndex:
    """Index N embeddings of d dimensions.

    Args:
        embeddings: an array (N, d), or a store. "Flat" copies nothing: leave an array as it is while the index is used.
        factory: "Flat" is exact; "HNSW32", "IVF1024,Flat", "SQ8", "OPQ16_64,IVF256,PQ16" trade that for speed or room.
        metric: "cos" (copies are normalised, the caller's array is left alone) or "dot".
        use_gpu, gpu_mode, gpu_float16: see `find_gpus`.
        ids: N document ids of an array; equal scores are ordered by them, ascending. Without, by row.
        parameters: FAISS search parameters, such as "nprobe=32" or "efSearch=128". An IVF index without any probes an
            eighth of its lists: FAISS's own default of one list finds too little to be of use.

    Raises:
        ConfigError: the factory string is wrong or cannot hold d dimensions or an inner product, there are too few
            vectors to train it, or a GPU was insisted on and none will do.
        UserError: an embedding is NaN or infinite ("Flat" finds that out when it searches).
    """
    corpus = ArrayRows(embeddings, ids) if isinstance(embeddings, np.ndarray) else embeddings
    gpu = find_gpus(use_gpu, gpu_mode, gpu_float16)
    index = check_factory(factory, corpus.dim, len(corpus), metric, parameters)
    if factory == "Flat":
        return DenseIndex(corpus, None, factory, metric, parameters, gpu)
    try:
        if not index.is_trained:
            sample = corpus.take(_training_rows(len(corpus), corpus.dim, _inverted_lists(index)))
            index.train(prepared(sample, metric, "document embedding")[0])
        size = max(1, SLICE_BYTES // (4 * corpus.dim))
        for start in range(0, len(corpus), size):
            rows = corpus.slice(start, min(start + size, len(corpus)))
            index.add(prepared(rows, metric, "document embedding", start)[0])
    except RuntimeError as error:
        raise ConfigError(f"FAISS cannot build index {factory!r} on {len(corpus)} vectors: {_reason(error)}") from error
    return _ready(DenseIndex(corpus, index, factory, metric, parameters), gpu, use_gpu is True)


def search(
    index: DenseIndex, queries: np.ndarray, k: int, show_progress: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """The k best documents of each query (n, d): scores float32 and rows int64, both (n, min(k, N)).

    Ordered by score, descending, then by id, ascending. An approximate index may find fewer; the rest of a line is then
    row -1 with score -inf.

    Raises:
        ConfigError: k < 1, or queries of another dimension.
        UserError: NaN or infinite vectors.
        DataError: an index that finds rows which the corpus lacks.
    """
    from tqdm.auto import tqdm

    if k < 1:
        raise ConfigError(f"k must be at least 1, not {k}")
    if queries.ndim != 2 or queries.shape[1] != index.dimension:
        raise ConfigError(f"queries have shape {queries.shape}, the index holds {index.dimension} dimensions")
    k = min(k, len(index))
    if index.gpu is not None and k > GPU_MAX_K:
        logger.info("A GPU gives %d documents per query at the most: the best %d are found on the CPU", GPU_MAX_K, k)
    if index.is_exact:
        with tqdm(unit=" rows", desc="Searching", unit_scale=True, disable=not show_progress) as bar:
            return exact_search(index.corpus, queries, k, index.metric, index.gpu, on_slice=bar.update)
    searched = index.cpu_index if index.gpu is not None and k > GPU_MAX_K else index.faiss_index
    scores, rows = searched.search(prepared(queries, index.metric, "query embedding")[0], k)
    if rows.size and rows.max() >= len(index):
        raise DataError(f"the index finds row {rows.max()} of {len(index)}: it is broken (build it anew)")
    scores[rows < 0] = -np.inf
    return ordered(scores, rows, k, index.corpus.ids)


def recall_against_exact(
    index: DenseIndex, queries: np.ndarray, rows: np.ndarray, k_values: Sequence[int] = (10, 100, 1000)
) -> dict[str, Any] | None:
    """{"queries": 100, "recall@10": ...}: the share of the exact result that `search` found; None for an exact index.

    Args:
        queries, rows: all queries (n, d) and the rows (n, k) found for them. A hundred, spread evenly, are compared.
        k_values: those up to k are reported, and k.
    """
    k = rows.shape[1]
    if index.is_exact or not len(queries):
        return None
    sample = np.unique(np.linspace(0, len(queries) - 1, 100).astype(np.int64))
    _, exact = exact_search(index.corpus, queries[sample], k, index.metric)
    recall: dict[str, Any] = {"queries": len(sample)}
    for cut in sorted({cut for cut in k_values if cut < k} | {k}):
        hits = [np.isin(line[:cut], found[:cut]).mean() for line, found in zip(exact, rows[sample], strict=True)]
        recall[f"recall@{cut}"] = float(np.mean(hits))
    return recall


# What can work -------------------------------------------------------------------------------------------------------


def check_factory(factory: str, dimension: int, n: int, metric: Metric = "cos", parameters: str | None = None) -> Any:
    """An empty FAISS index for n vectors of that dimension; raises `ConfigError` when it cannot work.

    Cheap, so that a mistake is found before a corpus is encoded.
    """
    import faiss

    check_choice("similarity", metric, ("cos", "dot"))
    try:
        index = faiss.index_factory(dimension, factory, faiss.METRIC_INNER_PRODUCT)
    except RuntimeError as error:
        raise ConfigError(
            f"FAISS cannot make index {factory!r} for {dimension} dimensions and an inner product "
            f"({_reason(error)}); 'Flat' always works"
        ) from error
    if index.metric_type != faiss.METRIC_INNER_PRODUCT or isinstance(faiss.downcast_index(index), faiss.IndexIDMap):
        raise ConfigError(f"index {factory!r} does not rank rows by inner product; use 'Flat', 'HNSW32' or 'IVF...'")
    lists = _inverted_lists(index)
    if n < lists:
        raise ConfigError(
            f"index {factory!r} needs at least {lists} vectors to train and the corpus has {n}; use 'Flat'"
        )
    if parameters is not None:
        _set_parameters(index, factory, parameters)
    return index


def default_parameters(index: Any) -> str | None:
    """The search parameters of a FAISS index that was asked for without any; see `build_index`."""
    lists = _inverted_lists(index)
    return f"nprobe={math.ceil(lists / 8)}" if lists else None


def find_gpus(use_gpu: bool | Literal["auto"] = "auto", mode: str = "replicate", float16: bool = False) -> Any:
    """FAISS's cloner options for all GPUs that it sees; None to search on the CPU.

    Args:
        use_gpu: "auto" takes what there is; True insists.
        mode: "replicate" (each GPU holds all, and they share the queries) or "shard" (each holds a part).
        float16: vectors take half the memory there. A Flat search is exact all the same.

    Raises:
        ConfigError: an unknown mode, or True where FAISS sees no GPU.
    """
    import faiss

    check_choice("gpu_mode", mode, GPU_MODES)
    if not use_gpu or not faiss.get_num_gpus():
        if use_gpu is True:
            raise ConfigError("use_gpu=True, but FAISS sees no GPU; install faiss-gpu in place of faiss-cpu")
        return None
    options = faiss.GpuMultipleClonerOptions()
    options.shard, options.useFloat16 = mode == "shard", float16
    return options


# An index as a file --------------------------------------------------------------------------------------------------


def save_index(index: DenseIndex, path: AnyPath, fingerprint: str, store: str) -> None:
    """Write an approximate index to PATH and its description to PATH.json, each whole or not at all.

    Args:
        fingerprint: of what was indexed (`EmbeddingStore.fingerprint`).
        store: where that lies, for people.

    Raises:
        ConfigError: a Flat index, which is the embeddings themselves.
        UserError: the file cannot be written.
    """
    import faiss

    if index.is_exact:
        raise ConfigError("a Flat index searches the store itself: there is nothing to write to an index file")
    # A description that outlived its index would vouch for another one.
    description_path(path).unlink(missing_ok=True)
    with atomic_file(path) as part:
        faiss.write_index(index.cpu_index or index.faiss_index, str(part))
    about = {"format": _FORMAT, "version": _VERSION, "factory": index.factory, "metric": index.metric}
    about |= {"dimension": index.dimension, "rows": len(index), "fingerprint": fingerprint, "store": store}
    write_json(description_path(path), {**about, "bytes": Path(path).stat().st_size, "faiss": faiss.__version__})


def load_index(
    path: AnyPath,
    corpus: Rows,
    fingerprint: str,
    factory: str,
    metric: Metric = "cos",
    parameters: str | None = None,
    gpu: Any = None,
    insist: bool = False,
) -> DenseIndex:
    """The index that `save_index` wrote, mapped into memory. FAISS trusts what it reads: load no file of a stranger's.

    Args:
        corpus, fingerprint, factory, metric: what must have been indexed, and how; anything else is refused.
        parameters: see `build_index`.
        gpu, insist: see `find_gpus`.

    Raises:
        ConfigError: the index is of another kind than asked for, or the search parameters do not fit it.
        DataError: the files are missing, cut off, of another corpus, or no index that FAISS reads.
    """
    import faiss

    mend = "name another file, or remove it to build it anew"
    about = read_json(description_path(path))
    if (about.get("format"), about.get("version")) != (_FORMAT, _VERSION):
        raise DataError(f"{description_path(path)}: does not describe an index that this version reads ({mend})")
    if (about.get("fingerprint"), about.get("dimension"), about.get("rows")) != (fingerprint, corpus.dim, len(corpus)):
        raise DataError(f"{path}: is an index of other embeddings: {about.get('store')} ({mend})")
    for name, wanted in (("factory", factory), ("metric", metric)):
        if about.get(name) != wanted:
            raise ConfigError(f"{path}: has {name} {about.get(name)!r}, asked for is {wanted!r} ({mend})")
    try:
        if Path(path).stat().st_size != about.get("bytes"):
            raise RuntimeError(f"{Path(path).stat().st_size} bytes, and not {about.get('bytes')} as described")
        index = faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC)
        found = (type(index), index.d, index.ntotal, index.metric_type)
        if found != (type(check_factory(factory, corpus.dim, len(corpus), metric)), corpus.dim, len(corpus), 0):
            raise RuntimeError(f"{found[0].__name__} of {index.ntotal} x {index.d}, and not {factory} as described")
    except (OSError, RuntimeError) as error:
        raise DataError(f"{path}: cannot be read: {_reason(error)} ({mend})") from error
    return _ready(DenseIndex(corpus, index, factory, metric, parameters), gpu, insist)


def description_path(path: AnyPath) -> Path:
    """Where the description of an index file lies."""
    return Path(f"{path}.json")


# Details -------------------------------------------------------------------------------------------------------------


def _ready(index: DenseIndex, gpu: Any, insist: bool) -> DenseIndex:
    """A filled index with its search parameters set, on its GPUs."""
    import faiss

    index.parameters = index.parameters or default_parameters(index.faiss_index)
    if index.parameters is not None:
        _set_parameters(index.faiss_index, index.factory, index.parameters)
    if gpu is not None:
        try:
            moved = faiss.index_cpu_to_all_gpus(index.faiss_index, co=gpu)
        except (RuntimeError, AttributeError) as error:
            if insist:
                raise ConfigError(f"index {index.factory!r} cannot go to a GPU: {_reason(error)}") from error
            logger.warning("Index %r stays on the CPU: %s", index.factory, _reason(error))
        else:
            index.cpu_index, index.faiss_index, index.gpu = index.faiss_index, moved, gpu
    return index


def _set_parameters(index: Any, factory: str, parameters: str) -> None:
    import faiss

    try:
        # FAISS takes nprobe=0 here and fails at the first search.
        if re.search(r"=\s*(-|0+\s*(,|$))", parameters):
            raise RuntimeError("search parameters are positive")
        space: Any = faiss.ParameterSpace()  # its stub knows one of two overloads
        space.set_index_parameters(index, parameters)
    except RuntimeError as error:
        raise ConfigError(f"index {factory!r} does not take parameters {parameters!r}") from error


def _training_rows(n: int, dimension: int, lists: int) -> np.ndarray:
    """Rows to train on: all, or a sample, ascending, the same in every run."""
    most = max(_TRAINING_BYTES // (4 * dimension), lists * _FEWEST_POINTS)
    wanted = max(min(lists * _POINTS_PER_CENTROID, most), _LEAST_ROWS)
    return np.arange(n) if n <= wanted else np.sort(np.random.default_rng(0).choice(n, wanted, replace=False))


def _inverted_lists(index: Any) -> int:
    """The lists of the inverted file that an index is or holds; 0 without one."""
    import faiss

    ivf = faiss.try_extract_index_ivf(index)
    return 0 if ivf is None else int(ivf.nlist)


def _reason(error: Exception) -> str:
    """The last clause of a FAISS error: the part that is about the user's settings, not FAISS's source lines."""
    return re.sub(r"^Error in .*?:\d+: (Error: )?", "", " ".join(str(error).split()))
