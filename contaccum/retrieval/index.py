"""Search in embeddings: exactly, or with a FAISS index of any `index_factory` string.

A factory string names the kind of index for `faiss.index_factory`, such as "Flat" (exact) or
"IVF1024,Flat" (an inverted file of 1,024 lists, of which a search reads only the nearest).

Scores are inner products; higher is better. With the metric "cos", L2-normalised copies are
compared. The factory "Flat" builds no index: the embeddings themselves, an array or a store of any
size, are searched slice by slice (see `exact_search`). A document is named by its row in the
embeddings. Texts and models belong to `encode` and `searcher`.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from contaccum.distributed import world_size
from contaccum.errors import ConfigError, DataError
from contaccum.files import (
    AnyPath,
    atomic_file,
    read_json,
    write_json,
)
from contaccum.retrieval.device_blocks import Embeddings
from contaccum.retrieval.encode import Similarity
from contaccum.retrieval.exact_search import (
    GpuSearch,
    compute_slice_size,
    prepare_vectors,
    search_slices,
)
from contaccum.retrieval.store import EmbeddingStore

if TYPE_CHECKING:
    import faiss

logger = logging.getLogger(__name__)

# Number of results that an exact search returns beyond the k best. If the documents at positions k
# and k + 1 have equal scores, the ids decide which of them is among the k best.
_NUM_EXTRA_RESULTS = 32
# FAISS warns below 39 training points per centroid.
_TRAINING_POINTS_PER_CENTROID = 64
# Minimum of training points, for factories with further centroids, such as those of PQ codes.
_MIN_TRAINING_POINTS = 2**16
_REMEDY_FOR_FILE = "name another file, or remove it to build it anew"


@dataclass
class DenseIndex:
    """Index of N embeddings of d dimensions; `build_index` and `open_index` make it.

    Attributes:
        corpus: the embeddings, (N, d).
        ids: function that returns the ids of some rows.
        factory: FAISS factory string.
        metric: "cos" or "dot".
        parameters: FAISS search parameters; None if the factory has none.
        faiss_index: the FAISS index; None for "Flat", which searches the embeddings themselves.
        gpus: numbers of the GPUs that search a "Flat" index; the CPU searches if there are none.
            The embeddings stay in their memory, if they have room, as long as the index lives.
    """

    corpus: Embeddings
    ids: Callable[[np.ndarray], Sequence[str] | np.ndarray]
    factory: str
    metric: Similarity
    parameters: str | None
    faiss_index: faiss.Index | None = None
    gpus: Sequence[int] = ()
    _gpu_search: GpuSearch | None = field(default=None, init=False, repr=False)


def build_index(
    embeddings: Embeddings,
    factory: str = "Flat",
    metric: Similarity | None = None,
    ids: Sequence[str] | None = None,
    parameters: str | None = None,
) -> DenseIndex:
    """Index N embeddings of d dimensions.

    Args:
        embeddings: an array (N, d), or a store. "Flat" copies nothing: an array must not change
            as long as the index is used.
        factory: FAISS factory string. "Flat" is exact and runs on the GPUs of `find_gpus`, else
            on the CPU. "HNSW32", "IVF1024,Flat", "SQ8", "OPQ16_64,IVF256,PQ16" and others trade
            exactness for speed or memory and run on the CPU.
        metric: "cos" or "dot"; None: the similarity of the store, "cos" for an array. With "cos",
            normalised copies are compared; the array of the caller does not change.
        ids: N document ids for an array; None: the row numbers. Documents with equal scores are
            ordered by id, descending, as by trec_eval.
        parameters: FAISS search parameters, such as "nprobe=32" or "efSearch=128"; None: one
            eighth of the lists of an inverted file, FAISS's default for others.

    Raises:
        ConfigError: see `check_factory`.
        UserError: an embedding holds NaN or infinity ("Flat" raises it during the search).
    """
    num_rows, dimension = embeddings.shape
    metric = metric or _get_metric(embeddings)
    index, parameters = check_factory(factory, dimension, num_rows, metric, parameters)
    get_ids = _make_id_lookup(embeddings, ids)
    if factory == "Flat":
        return DenseIndex(embeddings, get_ids, factory, metric, parameters, gpus=find_gpus())
    try:
        _train_index(index, embeddings, metric)
        slice_size = compute_slice_size(dimension)
        for start in range(0, num_rows, slice_size):
            vectors = embeddings[start : start + slice_size]
            index.add(prepare_vectors(vectors, metric, "document embedding", start))
    except RuntimeError as error:
        raise ConfigError(
            f"FAISS cannot build index {factory!r} on {num_rows} vectors: {_get_reason(error)} "
            "(choose fewer lists or smaller codes, or 'Flat')"
        ) from error
    return DenseIndex(embeddings, get_ids, factory, metric, parameters, index)


def find_gpus() -> list[int]:
    """Return the numbers of all GPUs that torch has; of several ranks, each has its own GPU."""
    if torch.cuda.is_available() and world_size() > 1:
        return [torch.cuda.current_device()]
    return list(range(torch.cuda.device_count()))


def _get_metric(embeddings: Embeddings) -> Similarity:
    """Return the similarity of a store; "cos" for other embeddings."""
    if isinstance(embeddings, EmbeddingStore) and embeddings.similarity == "dot":
        return "dot"
    return "cos"


def _make_id_lookup(
    embeddings: Embeddings, ids: Sequence[str] | None
) -> Callable[[np.ndarray], Sequence[str] | np.ndarray]:
    """Return a function from rows to ids: the store's ids, the caller's, or row numbers."""
    if isinstance(embeddings, EmbeddingStore):
        return embeddings.ids
    if ids is None:
        return np.asarray
    return np.array(ids, dtype=object).__getitem__


def _train_index(index: faiss.Index, embeddings: Embeddings, metric: Similarity) -> None:
    """Train an index on a random sample of the embeddings, if it needs training."""
    if index.is_trained:
        return
    num_rows = len(embeddings)
    # Each inverted list has one centroid.
    num_points = _TRAINING_POINTS_PER_CENTROID * _count_inverted_lists(index)
    num_points = max(num_points, _MIN_TRAINING_POINTS)
    num_points = min(num_points, num_rows)
    rows = np.random.default_rng(0).choice(num_rows, num_points, replace=False)
    sample = embeddings[np.sort(rows)]  # a store reads ascending rows fastest
    index.train(prepare_vectors(sample, metric, "embedding of the training sample"))


def open_index(
    path: AnyPath,
    store: EmbeddingStore,
    factory: str,
    metric: Similarity | None = None,
    parameters: str | None = None,
) -> DenseIndex:
    """Open the index of a store from a file, memory-mapped; without a file, build and write it.

    FAISS does not check what it reads: never open a file from an untrusted source. The file
    PATH.json beside the index records store, factory and metric.

    Args:
        path: file of the index.
        store: the store that is indexed.
        factory: FAISS factory string, other than "Flat".
        metric: "cos" or "dot"; None: the similarity of the store.
        parameters: FAISS search parameters; see `build_index`.

    Raises:
        ConfigError: see `build_index`.
        DataError: the file belongs to another store, factory or metric, has embeddings of another
            number or dimension, or FAISS cannot read it.
        UserError: the file cannot be written.
    """
    import faiss

    path = Path(path)
    metric = metric or _get_metric(store)
    description_path = Path(f"{path}.json")
    description = {"fingerprint": store.fingerprint, "factory": factory, "metric": metric}
    if not path.exists():
        # FAISS writes search parameters into the file, and they would stay in force when it is
        # opened without parameters. So the index is built without them.
        index = build_index(store, factory, metric)
        assert index.faiss_index is not None, "a Flat index has no file"
        # The description is written first: an index file without one would be refused.
        origin = {"store": str(store.folder), "faiss": faiss.__version__}
        write_json(description_path, {**description, **origin})
        # FAISS does not notice a full disk when it closes a file of its own.
        with atomic_file(path) as part, part.open("wb") as file:
            writer = faiss.PyCallbackIOWriter(file.write)  # type: ignore[attr-defined]  # in C++
            faiss.write_index(index.faiss_index, writer)
        index.parameters = _set_parameters(index.faiss_index, factory, parameters)
        return index
    stored_description = read_json(description_path)
    for name, expected in description.items():
        stored = stored_description.get(name)
        if stored != expected:
            raise DataError(
                f"{path}: is an index with {name} {stored}, but {name} {expected} is required "
                f"({_REMEDY_FOR_FILE})"
            )
    try:
        faiss_index = faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC)
    except RuntimeError as error:
        raise DataError(
            f"{path}: cannot be read: {_get_reason(error)} ({_REMEDY_FOR_FILE})"
        ) from error
    if (faiss_index.ntotal, faiss_index.d) != store.shape:
        raise DataError(
            f"{path}: indexes {faiss_index.ntotal} embeddings of {faiss_index.d} dimensions, but "
            f"{store.folder} has {len(store)} of {store.shape[1]} ({_REMEDY_FOR_FILE})"
        )
    parameters = _set_parameters(faiss_index, factory, parameters)
    return DenseIndex(store, store.ids, factory, metric, parameters, faiss_index)


def search(
    index: DenseIndex, queries: np.ndarray, k: int, show_progress: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Find the k best documents of n queries.

    An exact search on the CPU holds one slice of the corpus in memory.

    Args:
        index: an index of N documents.
        queries: float32 (n, d).
        k: number of documents per query.
        show_progress: show a progress bar of an exact search on the CPU.

    Returns:
        Scores, float32 (n, min(k, N)), and rows, int64 (n, min(k, N)), of each query's documents:
        by score, and for equal scores by id, both descending. (If more than 32 documents have the
        score of position k, or the index is approximate, any of these may be left out.) An
        approximate index may find fewer documents; then the last entries are row -1 with score
        -inf.

    Raises:
        DataError: queries and documents have different dimensions.
        UserError: a vector holds NaN or infinity.
    """
    num_documents, dimension = index.corpus.shape
    if queries.shape[1] != dimension:
        raise DataError(
            f"queries have {queries.shape[1]} dimensions, and documents {dimension}: encode both "
            "with the same model and settings, such as truncate_dim"
        )
    k = min(k, num_documents)
    queries = prepare_vectors(queries, index.metric, "query embedding")
    if index.faiss_index is None:
        num_results = min(k + _NUM_EXTRA_RESULTS, num_documents)
        scores, rows = _search_exactly(index, queries, num_results, show_progress)
    else:
        scores, rows = index.faiss_index.search(queries, k)
    scores[rows < 0] = -np.inf
    _order_ties_by_id(index.ids, scores, rows)
    return scores[:, :k], rows[:, :k]


def _search_exactly(
    index: DenseIndex, queries: np.ndarray, k: int, show_progress: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Search on the GPUs of an index. The CPU searches if it has none, or they have no memory."""
    if index.gpus and len(queries) > 0:
        if index._gpu_search is None:
            devices = [torch.device("cuda", number) for number in index.gpus]
            index._gpu_search = GpuSearch(index.corpus, index.metric, devices)
        try:
            return index._gpu_search.search(queries, k)
        except torch.OutOfMemoryError:
            index._gpu_search = None
            logger.warning("exact search: the GPU's memory is full, so the CPU searches")
    return search_slices(index.corpus, queries, k, index.metric, show_progress)


def _order_ties_by_id(
    ids: Callable[[np.ndarray], Sequence[str] | np.ndarray], scores: np.ndarray, rows: np.ndarray
) -> None:
    """Order documents with equal scores by id, descending, in place.

    This is the order of trec_eval, so metrics do not depend on how many documents are kept.

    Args:
        ids: function that returns the ids of some rows.
        scores: (n, k), one line per query, in descending order.
        rows: (n, k), changed in place.
    """
    equals_previous = (scores[:, 1:] == scores[:, :-1]) & (rows[:, 1:] >= 0)
    for line in np.flatnonzero(equals_previous.any(axis=1)).tolist():
        equals_next_document = np.append(equals_previous[line], False)
        equals_previous_document = np.append(False, equals_previous[line])
        tied = np.flatnonzero(equals_next_document | equals_previous_document)
        # The line may have several ties, so that the documents are sorted by score and then by id.
        tied_scores = scores[line, tied].tolist()
        sort_keys = list(zip(tied_scores, ids(rows[line, tied]), strict=True))
        order = sorted(range(len(sort_keys)), key=sort_keys.__getitem__, reverse=True)
        rows[line, tied] = rows[line, tied[order]]


def recall_against_exact(
    index: DenseIndex, queries: np.ndarray, rows: np.ndarray, show_progress: bool = False
) -> dict[str, float] | None:
    """Compute the share of the exact results that an approximate index found.

    Args:
        index: the index that was searched.
        queries: float32 (n, d), all queries. At most 100 of them, evenly spread, are compared.
        rows: (n, k), the rows that `search` returned for them.
        show_progress: show a progress bar of the exact search, which reads the whole corpus.

    Returns:
        {"queries": number of compared queries, "recall@k": share}; None for an exact index or no
        query.
    """
    if index.faiss_index is None or len(queries) == 0:
        return None
    k = rows.shape[1]
    sample = np.unique(np.linspace(0, len(queries) - 1, 100).astype(np.int64))
    exact_index = build_index(index.corpus, metric=index.metric)
    _, exact_rows = search(exact_index, queries[sample], k, show_progress)
    recalls = []
    for exact_line, line in zip(exact_rows, rows[sample], strict=True):
        recalls.append(np.isin(exact_line, line).mean())
    return {"queries": len(sample), f"recall@{k}": float(np.mean(recalls))}


def check_factory(
    factory: str,
    dimension: int,
    n: int,
    metric: Similarity = "cos",
    parameters: str | None = None,
) -> tuple[faiss.Index, str | None]:
    """Check index settings. Call this before a corpus is encoded, which may take hours.

    Args:
        factory: FAISS factory string.
        dimension: d, dimension of the embeddings.
        n: number of embeddings to index.
        metric: "cos" or "dot"; both are searched as inner products.
        parameters: FAISS search parameters; see `build_index`.

    Returns:
        An empty FAISS index, and its search parameters.

    Raises:
        ConfigError: FAISS does not accept the factory or the parameters, the factory does not
            work with that dimension or inner products, or n is smaller than the number of inverted
            lists. Only `build_index` finds that n is too small to train other parts, such as codes.
    """
    import faiss

    try:
        index = faiss.index_factory(dimension, factory, faiss.METRIC_INNER_PRODUCT)
    except RuntimeError as error:
        raise ConfigError(
            f"FAISS cannot make index {factory!r} for {dimension} dimensions and an inner product "
            f"({_get_reason(error)}); 'Flat' always works"
        ) from error
    num_lists = _count_inverted_lists(index)
    if n < num_lists:
        raise ConfigError(
            f"index {factory!r} needs {num_lists} vectors to train, the corpus has {n}; use 'Flat'"
        )
    return index, _set_parameters(index, factory, parameters)


def _set_parameters(index: faiss.Index, factory: str, parameters: str | None) -> str | None:
    """Set the search parameters of an index, and return them.

    Without parameters, an inverted file probes one eighth of its lists: FAISS's default of one list
    finds few of the best documents.
    """
    import faiss

    if not parameters:
        num_lists = _count_inverted_lists(index)
        if num_lists == 0:
            return None
        parameters = f"nprobe={math.ceil(num_lists / 8)}"
    space: Any = faiss.ParameterSpace()  # FAISS's type stub has only one of the two overloads
    try:
        space.set_index_parameters(index, parameters)
    except RuntimeError as error:
        raise ConfigError(
            f"index {factory!r} does not take parameters {parameters!r} (correct or drop them)"
        ) from error
    return parameters


def _count_inverted_lists(index: faiss.Index) -> int:
    """Return the number of lists of the inverted file in an index; 0 if it has none."""
    import faiss

    inverted_file = faiss.try_extract_index_ivf(index)
    if inverted_file is None:
        return 0
    return int(inverted_file.nlist)


def _get_reason(error: Exception) -> str:
    """Return the message of a FAISS error without FAISS's source file and line number."""
    message = " ".join(str(error).split())
    return re.sub(r"^Error in .*?:\d+: (Error: )?", "", message)
