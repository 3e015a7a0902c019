"""Scores of embeddings in smaller forms: fewer dimensions, smaller number types.

A form is a number of dimensions and a number type. The form (256, "int8") keeps the first 256
dimensions of each embedding and stores them as int8. The first dimensions of a Matryoshka model are
trained to be used alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from contaccum.data import BeirDataset
from contaccum.errors import ConfigError
from contaccum.evaluation.metrics import paired_bootstrap, score_run
from contaccum.evaluation.results import JsonObject, Run
from contaccum.retrieval.exact_search import prepare_vectors
from contaccum.retrieval.index import build_index, search
from contaccum.retrieval.quantization import QuantizedEmbeddings, check_binary_dimension

SearchForm = Callable[[np.ndarray, int], list[list[tuple[int, float]]]]
"""Function from queries (n, d) and k to the (row, score) of each query's k best documents."""

_NUM_TIMED_SEARCHES = 3


def plan_forms(
    dimension: int, dims: Sequence[int] | None, types: Sequence[str], rescore: int, metric: str
) -> dict[str, Any]:
    """Return the ``form_plan`` of `evaluate_beir`: all combinations of sizes and types.

    The first form is always float32 with all dimensions; the others are compared with it.

    Args:
        dimension: dimension of the model's embeddings.
        dims: numbers of leading dimensions to keep, as in a model trained with
            `matryoshka_dims`; None: all dimensions.
        types: types of "float32", "float16", "int8" and "binary".
        rescore: for binary embeddings, this many times the number of results is retrieved by
            Hamming distance, and then rescored with the float32 queries.
        metric: metric to compare by, such as "NDCG@10".

    Raises:
        ConfigError: a size is larger than the dimension, or a binary size is not a multiple of 8.
    """
    sizes = list(dict.fromkeys(dims or [dimension]))
    if min(sizes) < 1 or max(sizes) > dimension:
        raise ConfigError(
            f"--dims {' '.join(map(str, sizes))}: the model's embeddings have {dimension} "
            f"dimensions (choose sizes from 1 to {dimension})"
        )
    forms = [(dimension, "float32")]
    for dtype in types:
        for size in sizes:
            check_binary_dimension(dtype, size)
            if (size, dtype) not in forms:
                forms.append((size, dtype))
    return {"forms": [list(form) for form in forms], "rescore": rescore, "metric": metric}


def score_forms(
    dataset: BeirDataset,
    queries: np.ndarray,
    documents: np.ndarray,
    similarity: Literal["cos", "dot"],
    forms: Sequence[tuple[int, str] | list[Any]],
    rescore: int,
    metric: str,
) -> list[dict[str, Any]]:
    """Score the embeddings of a corpus in each form. Queries are always float32.

    Args:
        dataset: the data set that was searched.
        queries: float32 (n, d), embeddings of its queries.
        documents: float32 (N, d), embeddings of its corpus.
        similarity: "cos" or "dot".
        forms: pairs of number of dimensions and type; see `plan_forms`.
        rescore: see `plan_forms`.
        metric: metric to compare by, such as "NDCG@10".

    Returns:
        A dict for each form: score, paired bootstrap against the first form, bytes per document
        and queries per second (the fastest of three searches of all queries at once).
    """
    cut_off = int(metric.partition("@")[2])
    document_ids = list(dataset.corpus)
    k = min(cut_off + 1, len(document_ids))  # one more: the query's own document is dropped
    rows: list[JsonObject] = []
    first_scores: list[float] = []
    for size, dtype in forms:
        query_vectors = prepare_vectors(queries[:, :size], similarity, "query embedding")
        document_vectors = prepare_vectors(documents[:, :size], similarity, "document embedding")
        quantized = QuantizedEmbeddings.quantize(document_vectors, dtype)
        search_form = _make_exact_search(quantized)
        if dtype == "binary":
            search_form = _make_binary_search(quantized, rescore)
        seconds = float("inf")
        for _ in range(_NUM_TIMED_SEARCHES):
            started = time.perf_counter()
            hits = search_form(query_vectors, k)
            seconds = min(seconds, time.perf_counter() - started)
        run: Run = {}
        for query_id, query_hits in zip(dataset.queries, hits, strict=True):
            run[query_id] = {document_ids[row]: score for row, score in query_hits}
        means, per_query = score_run(dataset.qrels, run, [cut_off])
        scores = [query_scores[metric] for query_scores in per_query.values()]
        if not first_scores:
            first_scores = scores
        rows.append(
            {
                "dimensions": size,
                "type": dtype,
                metric: means[metric],
                **paired_bootstrap(scores, first_scores),
                "bytes_per_document": quantized.values.nbytes // len(quantized),
                "queries_per_second": len(run) / seconds,
            }
        )
    return rows


def _make_binary_search(documents: QuantizedEmbeddings, rescore: int) -> SearchForm:
    """Return a search by Hamming distance with rescoring, by sentence-transformers."""
    import faiss
    from sentence_transformers.util.quantization import semantic_search_faiss

    index = faiss.IndexBinaryFlat(documents.shape[1])
    index.add(documents.values)

    def search_binary(queries: np.ndarray, k: int) -> list[list[tuple[int, float]]]:
        # FAISS cannot retrieve more candidates than there are documents.
        multiplier = min(rescore, len(documents) // k)  # candidates per result
        results, *_ = semantic_search_faiss(
            queries,
            corpus_index=index,  # type: ignore[arg-type]  # its type leaves out binary indexes
            top_k=k,
            corpus_precision="ubinary",
            rescore_multiplier=multiplier,
        )
        hits = []
        for query_results in results:
            hits.append([(int(hit["corpus_id"]), float(hit["score"])) for hit in query_results])
        return hits

    return search_binary


def _make_exact_search(documents: QuantizedEmbeddings) -> SearchForm:
    """Return an exact search by `search`, which decodes the documents."""
    index = build_index(documents, metric="dot")

    def search_exactly(queries: np.ndarray, k: int) -> list[list[tuple[int, float]]]:
        scores, rows = search(index, queries, k)
        hits = []
        for query_rows, query_scores in zip(rows.tolist(), scores.tolist(), strict=True):
            hits.append(list(zip(query_rows, query_scores, strict=True)))
        return hits

    return search_exactly
