"""Search in embeddings: exact or with any FAISS index, and from texts behind BEIR's interface.

`build_index`, `open_index` and `search` work on embeddings, an array or a store of any size. "Flat"
is exact and builds no index: `contaccum.retrieval.exact_search` searches the embeddings themselves.
All other indexes are FAISS's, on the CPU or, with faiss-gpu, on GPUs. Scores are inner products;
with the metric "cos", of L2-normalised copies. A document is named by its row.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sentence_transformers import SentenceTransformer

# isort: split
import faiss  # after torch: each of them brings a library of OpenMP

from contaccum import work
from contaccum.data.corpus import Corpus, get_passage_texts
from contaccum.distributed import world_size
from contaccum.encoders.settings import Kind
from contaccum.errors import ConfigError, DataError
from contaccum.files import AnyPath, atomic_file, read_json, write_json
from contaccum.retrieval.encode import encode_texts, get_similarity
from contaccum.retrieval.exact_search import (
    DeviceEmbeddings,
    Embeddings,
    list_slices,
    prepare_vectors,
    search_on_devices,
    search_slices,
)
from contaccum.retrieval.store import EmbeddingStore, Similarity

# Number of results that an exact search returns beyond the k best. If the documents at positions k
# and k + 1 have equal scores, the ids decide which of them is among the k best.
_NUM_EXTRA_RESULTS = 32
_TRAINING_POINTS_PER_CENTROID = 64  # FAISS warns below 39
_MIN_TRAINING_POINTS = 2**16  # for factories with further centroids, such as those of PQ codes
_QUERIES_PER_LOOKUP = 4096  # queries whose documents' ids are read together, shard by shard
_REMEDY_FOR_FILE = "name another file, or remove it to build it anew"

logger = logging.getLogger(__name__)


@dataclass
class FaissSearcher:
    """Searcher with the interface of BEIR's, for `EvaluateRetrieval`.

    Args:
        model: a SentenceTransformer, which encodes the corpus and the queries on its device.
        batch_size, precision: see `encode_texts`.
        index, index_parameters: FAISS factory string and search parameters; see `build_index`.
        embeddings: embeddings (n, d) of all queries, or of all documents, in place of the model's.

    Attributes:
        search_details: the number of ``gpus`` of the last search and, for an approximate index, the
            ``recall`` (see `recall_against_exact`).
    """

    model: SentenceTransformer
    batch_size: int = 32
    index: str = "Flat"
    index_parameters: str | None = None
    precision: str = "float32"
    show_progress_bar: bool = True
    embeddings: Mapping[Kind, Embeddings] | None = None
    search_details: dict[str, int | dict[str, float]] = field(default_factory=dict, init=False)

    def search(
        self,
        corpus: Corpus,
        queries: Mapping[str, str],
        top_k: int,
        score_function: str | None = None,
        **kwargs: Any,
    ) -> dict[str, dict[str, float]]:
        """Find the ``top_k`` best documents of every query.

        A document with the query's id is dropped from the results, as BEIR does.

        Args:
            corpus: {document id: {"title": title, "text": text}}.
            queries: {query id: text}.
            score_function: "cos_sim" or "dot"; None: the model's own similarity.
            kwargs: further keywords of BEIR; they are ignored.

        Returns:
            {query id: {document id: score}}, best documents first. An unknown score function, or an
            index that cannot be built, raises `ConfigError`.
        """
        metric = get_similarity(self.model, score_function)
        query_embeddings = self._encode("query", list(queries.values()))
        assert isinstance(query_embeddings, np.ndarray)  # only documents may be those of a store
        documents = self._encode("document", get_passage_texts(corpus))
        index = build_index(documents, self.index, metric, list(corpus), self.index_parameters)
        # One more than top_k, because the document with the query's id is dropped.
        scores, rows = search(index, query_embeddings, top_k + 1, self.show_progress_bar)
        self.search_details = {"gpus": len(index.gpus)}
        recall = recall_against_exact(index, query_embeddings, rows[:, :top_k])
        if recall is not None:
            self.search_details["recall"] = recall
        run = {}
        for query_id, hits in zip(queries, list_hits(index, scores, rows), strict=True):
            hits.pop(query_id, None)
            run[query_id] = dict(list(hits.items())[:top_k])
        return run

    def _encode(self, kind: Kind, texts: Sequence[str]) -> Embeddings:
        if self.embeddings is not None and kind in self.embeddings:
            return self.embeddings[kind]
        return encode_texts(
            self.model, texts, kind, self.batch_size, self.precision, self.show_progress_bar
        )


# Indexes of embeddings ----------------------------------------------------------------------------


@dataclass
class DenseIndex:
    """Index of N embeddings of d dimensions; `build_index` and `open_index` make it.

    Attributes:
        corpus: the embeddings, (N, d).
        ids: function that returns the ids of some rows.
        factory, metric, parameters: see `build_index`.
        faiss_index: the FAISS index; None for "Flat", which searches the embeddings themselves.
        gpus: devices that search instead of the CPU; they keep what is copied to them.
    """

    corpus: Embeddings
    ids: Callable[[np.ndarray], Sequence[str] | np.ndarray]
    factory: str
    metric: Similarity
    parameters: str | None
    faiss_index: faiss.Index | None = None
    gpus: Sequence[torch.device] = ()
    _on_gpus: Any = field(default=None, init=False, repr=False)


def build_index(
    embeddings: Embeddings,
    factory: str = "Flat",
    metric: Similarity | None = None,
    ids: Sequence[str] | None = None,
    parameters: str | None = None,
) -> DenseIndex:
    """Index N embeddings of d dimensions.

    Args:
        embeddings: an array (N, d), or a store. "Flat" copies nothing: the array must not change.
        factory: FAISS factory string. "Flat" is exact, and uses the GPUs of `find_gpus`. Others,
            such as "HNSW32" or "OPQ16_64,IVF256,PQ16", trade exactness for speed or memory. With
            faiss-gpu, inverted files with flat vectors, PQ or SQ are built on the first GPU and
            searched on all of them; others run on the CPU.
        metric: "cos" or "dot"; None: the similarity of the store, "cos" for an array.
        ids: N document ids; None: those of the store, or the row numbers of an array.
        parameters: FAISS search parameters, such as "nprobe=32" or "efSearch=128". Unless they have
            another ``nprobe``, one eighth of the lists of an inverted file is searched.

    Raises:
        ConfigError: see `check_factory`.
        UserError: an embedding holds NaN or infinity ("Flat" raises it during the search).
    """
    num_rows, dimension = embeddings.shape
    if metric is None:
        metric = embeddings.similarity if isinstance(embeddings, EmbeddingStore) else "cos"
    index, parameters = check_factory(factory, dimension, num_rows, parameters)
    get_ids: Callable[..., Any] = np.asarray  # row numbers
    if ids is not None:
        get_ids = np.array(ids, dtype=object).__getitem__
    elif isinstance(embeddings, EmbeddingStore):
        get_ids = embeddings.ids
    if factory == "Flat":
        return DenseIndex(embeddings, get_ids, factory, metric, parameters, gpus=find_gpus())
    gpus = _find_gpus_of_faiss(index)
    if gpus:
        try:
            # A GPU refuses an index that searches more than 2,048 lists, while it is built too.
            faiss.extract_index_ivf(index).nprobe = 1
            index_on_gpu = _copy_to_gpus(index, gpus[:1])
            _fill(index_on_gpu, embeddings, metric, _count_inverted_lists(index))
            index = faiss.index_gpu_to_cpu(index_on_gpu)
        except RuntimeError as error:
            reason = _get_reason(error)
            logger.warning(f"index {factory!r}: built on the CPU, not a GPU: {reason}")
            gpus = []
    if not gpus:
        try:
            _fill(index, embeddings, metric, _count_inverted_lists(index))
        except RuntimeError as error:
            raise ConfigError(
                f"FAISS cannot build index {factory!r} on {num_rows} vectors: {_get_reason(error)} "
                "(choose fewer lists or smaller codes, or 'Flat')"
            ) from error
    _set_parameters(index, factory, parameters)
    return DenseIndex(embeddings, get_ids, factory, metric, parameters, index, gpus)


def _fill(index: faiss.Index, embeddings: Embeddings, metric: Similarity, num_lists: int) -> None:
    """Train a FAISS index of some inverted lists with a sample of the embeddings, and add all."""
    num_rows = len(embeddings)
    if not index.is_trained:
        # Each inverted list has one centroid.
        num_points = max(_TRAINING_POINTS_PER_CENTROID * num_lists, _MIN_TRAINING_POINTS)
        num_points = min(num_points, num_rows)
        sample = np.random.default_rng(0).choice(num_rows, num_points, replace=False)
        vectors = embeddings[np.sort(sample)]  # a store reads ascending rows fastest
        index.train(prepare_vectors(vectors, metric, "embedding of the training sample"))
    for _, documents in list_slices(embeddings, metric):
        index.add(documents)


def find_gpus() -> list[torch.device]:
    """Return the GPUs to search on: all, or the rank's own if there are several ranks."""
    if torch.cuda.is_available() and world_size() > 1:
        return [torch.device("cuda", torch.cuda.current_device())]
    return [torch.device("cuda", number) for number in range(torch.cuda.device_count())]


def _find_gpus_of_faiss(index: faiss.Index) -> list[torch.device]:
    """Return the GPUs for an index; none with faiss-cpu."""
    inverted_file = faiss.try_extract_index_ivf(index)
    if faiss.get_num_gpus() == 0 or inverted_file is None:
        return []
    # FAISS copies an index of a subclass, too, but without what the subclass adds.
    types = (faiss.IndexIVFFlat, faiss.IndexIVFPQ, faiss.IndexIVFScalarQuantizer)
    return find_gpus() if type(faiss.downcast_index(inverted_file)) in types else []


def _copy_to_gpus(index: faiss.Index, gpus: Sequence[torch.device]) -> faiss.Index:
    """Copy the whole index to each GPU, which searches a part of the queries; or RuntimeError."""
    options = faiss.GpuMultipleClonerOptions()
    numbers = [gpu.index for gpu in gpus]
    try:
        return faiss.index_cpu_to_gpus_list(index, options, numbers)
    except RuntimeError:
        # The lookup tables of PQ with more than 48 bytes fit into a GPU's shared memory in float16.
        options.useFloat16 = True
        return faiss.index_cpu_to_gpus_list(index, options, numbers)


def open_index(
    path: AnyPath | None,
    store: EmbeddingStore,
    factory: str,
    metric: Similarity | None = None,
    parameters: str | None = None,
) -> DenseIndex:
    """Open the index of a store from a file, memory-mapped; if there is none, build and write it.

    Without a path, the index is only built. FAISS does not check what it reads: never open a
    file from an untrusted source. PATH.json beside it records store, factory and metric; a file of
    others, or a broken one, raises `DataError`. "Flat" has no file. For the arguments see
    `build_index`.
    """
    if path is None:
        return build_index(store, factory, metric, parameters=parameters)
    path = Path(path)
    metric = metric or store.similarity
    description_path = Path(f"{path}.json")
    description = {"fingerprint": store.fingerprint, "factory": factory, "metric": metric}
    if not path.exists():
        # Search parameters are left out: they would stay in force whenever the file is opened.
        faiss_index = build_index(store, factory, metric).faiss_index
        assert faiss_index is not None, "a Flat index has no file"
        # The description is written first: an index file without one would be refused.
        origin = {"store": str(store.folder), "faiss": faiss.__version__}
        write_json(description_path, {**description, **origin})
        # FAISS does not notice a full disk when it closes a file of its own.
        with atomic_file(path) as part, part.open("wb") as file:
            writer = faiss.PyCallbackIOWriter(file.write)  # type: ignore[attr-defined]  # in C++
            faiss.write_index(faiss_index, writer)
    stored = read_json(description_path)
    changes = work.list_changes({name: stored.get(name) for name in description}, description)
    if changes:
        raise DataError(f"{path}: is an index of another {', '.join(changes)} ({_REMEDY_FOR_FILE})")
    try:
        faiss_index = faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC)
    except RuntimeError as error:
        raise DataError(
            f"{path}: cannot be read: {_get_reason(error)} ({_REMEDY_FOR_FILE})"
        ) from error
    parameters = _set_parameters(faiss_index, factory, parameters)
    gpus = _find_gpus_of_faiss(faiss_index)
    return DenseIndex(store, store.ids, factory, metric, parameters, faiss_index, gpus)


def search(
    index: DenseIndex, queries: np.ndarray, k: int, show_progress: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Find the k best documents of n queries, float32 (n, d).

    Returns:
        Scores, float32 (n, min(k, N)), and rows, int64 (n, min(k, N)), of each query's documents:
        by score, and for equal scores by id, both descending. (If more than 32 documents have the
        score of position k, any of these may be left out.) An approximate index may find fewer
        documents; then the last entries are row -1 with score -inf. A vector with NaN or infinity
        raises `UserError`.
    """
    num_documents = len(index.corpus)
    k = min(k, num_documents)
    queries = prepare_vectors(queries, index.metric, "query embedding")
    is_exact = index.faiss_index is None
    num_results = min(k + _NUM_EXTRA_RESULTS, num_documents) if is_exact else k
    found = None
    if index.gpus and len(queries) > 0:
        try:
            found = _search_on_gpus(index, queries, num_results)
        except RuntimeError as error:  # no memory, or a limit of FAISS, such as k above 2,048
            reason = _get_reason(error)
            logger.warning(f"index {index.factory!r}: searched on the CPU, not a GPU: {reason}")
            index.gpus = ()
            index._on_gpus = None
    if found is None and index.faiss_index is not None:
        found = index.faiss_index.search(queries, num_results)
    elif found is None:
        found = search_slices(index.corpus, queries, num_results, index.metric, show_progress)
    scores, rows = found
    scores[rows < 0] = -np.inf
    _order_ties_by_id(index, scores, rows)
    return scores[:, :k], rows[:, :k]


def _search_on_gpus(
    index: DenseIndex, queries: np.ndarray, k: int
) -> tuple[np.ndarray, np.ndarray]:
    """Search on the GPUs of an index, which keep what is copied to them."""
    if index.faiss_index is not None:
        if index._on_gpus is None:
            index._on_gpus = _copy_to_gpus(index.faiss_index, index.gpus)
        return index._on_gpus.search(queries, k)
    if index._on_gpus is None:  # one part for each GPU
        num_parts = len(index.gpus)
        index._on_gpus = [
            DeviceEmbeddings(index.corpus, gpu, part, num_parts)
            for part, gpu in enumerate(index.gpus)
        ]
    return search_on_devices(index._on_gpus, queries, k, index.metric)


def _order_ties_by_id(index: DenseIndex, scores: np.ndarray, rows: np.ndarray) -> None:
    """Order documents with equal scores by id, descending, in place; both arrays are (n, k).

    This is the order of trec_eval, so metrics do not depend on how many documents are kept.
    """
    equals_previous = (scores[:, 1:] == scores[:, :-1]) & (rows[:, 1:] >= 0)
    for line in np.flatnonzero(equals_previous.any(axis=1)).tolist():
        found = rows[line][rows[line] >= 0]  # the last rows may be -1
        hits = zip(scores[line].tolist(), index.ids(found), found.tolist(), strict=False)
        rows[line, : len(found)] = [row for _, _, row in sorted(hits, reverse=True)]


def list_hits(
    index: DenseIndex, scores: np.ndarray, rows: np.ndarray
) -> Iterator[dict[str, float]]:
    """Yield {document id: score} of each query, best first, of scores and rows of `search`."""
    for start in range(0, len(rows), _QUERIES_PER_LOOKUP):
        group = rows[start : start + _QUERIES_PER_LOOKUP]
        found_rows = np.unique(group[group >= 0])
        id_of_row = dict(zip(found_rows.tolist(), index.ids(found_rows), strict=True))
        for query_rows, query_scores in zip(group, scores[start:], strict=False):
            ids = [id_of_row[row] for row in query_rows.tolist() if row >= 0]
            yield dict(zip(ids, query_scores.tolist(), strict=False))


def recall_against_exact(
    index: DenseIndex, queries: np.ndarray, rows: np.ndarray, show_progress: bool = False
) -> dict[str, float] | None:
    """Return the share of the exact results that an approximate index found; None if it is exact.

    At most 100 of the queries, float32 (n, d), are searched for again, which reads the whole
    corpus; ``rows`` (n, k) are what `search` has returned for them. The result is
    {"queries": number of compared queries, "recall@k": share}.
    """
    if index.faiss_index is None or len(queries) == 0:
        return None
    k = rows.shape[1]
    sample = np.unique(np.linspace(0, len(queries) - 1, 100).astype(np.int64))
    exact_index = build_index(index.corpus, metric=index.metric)
    _, exact_rows = search(exact_index, queries[sample], k, show_progress)
    pairs = zip(exact_rows, rows[sample], strict=True)
    recalls = [np.isin(exact_line, line).mean() for exact_line, line in pairs]
    return {"queries": len(sample), f"recall@{k}": float(np.mean(recalls))}


def check_factory(
    factory: str, dimension: int, num_rows: int, parameters: str | None = None
) -> tuple[faiss.Index, str | None]:
    """Return an empty FAISS index for some embeddings, and its search parameters.

    Raises `ConfigError` if FAISS does not accept them, or if there are fewer rows than inverted
    lists. Only `build_index` finds that there are too few rows to train codes.
    """
    try:
        index = faiss.index_factory(dimension, factory, faiss.METRIC_INNER_PRODUCT)
    except RuntimeError as error:
        raise ConfigError(
            f"FAISS cannot make index {factory!r} for {dimension} dimensions and an inner product "
            f"({_get_reason(error)}); 'Flat' always works"
        ) from error
    num_lists = _count_inverted_lists(index)
    if num_rows < num_lists:
        raise ConfigError(
            f"index {factory!r} needs {num_lists} vectors to train, the corpus has {num_rows}; use "
            "'Flat'"
        )
    return index, _set_parameters(index, factory, parameters)


def _set_parameters(index: faiss.Index, factory: str, parameters: str | None) -> str | None:
    """Set the search parameters of an index, and return them."""
    num_lists = _count_inverted_lists(index)
    # FAISS's default, one list, finds few of the best documents.
    default = f"nprobe={math.ceil(num_lists / 8)}" if num_lists > 0 else None
    space: Any = faiss.ParameterSpace()  # FAISS's type stub has only one of the two overloads
    try:
        for values in filter(None, (default, parameters)):
            space.set_index_parameters(index, values)
    except RuntimeError as error:
        raise ConfigError(
            f"index {factory!r} does not take parameters {parameters!r} (correct or drop them)"
        ) from error
    return parameters or default


def _count_inverted_lists(index: faiss.Index) -> int:
    inverted_file = faiss.try_extract_index_ivf(index)
    return 0 if inverted_file is None else int(inverted_file.nlist)


def _get_reason(error: Exception) -> str:
    """Return the message of an error in one line, without FAISS's source file and line number."""
    return re.sub(r"^Error in .*?:\d+: (Error: )?", "", " ".join(str(error).split()))
