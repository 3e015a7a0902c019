"""Dense retrieval behind BEIR's interface: `EvaluateRetrieval(FaissSearcher(model), score_function="cos_sim")`.

Joins `encode` and `index`. It computes no metric, writes no file, and does not import beir.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from contaccum.errors import ConfigError, DataError
from contaccum.retrieval.encode import check_autocast_dtype, encode_corpus, encode_queries
from contaccum.retrieval.exact import Metric
from contaccum.retrieval.index import DenseIndex, build_index, recall_against_exact, search

Run = dict[str, dict[str, float]]

# BEIR's names, and those of sentence-transformers, for the two similarities that an inner product can rank by.
_METRICS: dict[str, Metric] = {"cos_sim": "cos", "cos": "cos", "cosine": "cos", "dot": "dot"}


class FaissSearcher:
    """Encodes a corpus and queries with one model and searches them with FAISS.

    Args:
        model: a SentenceTransformer (see `encode_texts`), or any object with `encode_queries` and `encode_corpus` as
            BEIR calls them.
        index: a FAISS factory string; "Flat" is exact and equals BEIR's DenseRetrievalExactSearch.
        index_parameters, use_gpu, gpu_mode, gpu_float16: see `build_index`. The model stays on the device it is on.
        batch_size, autocast_dtype: see `encode_texts`.

    Attributes:
        timing: of the last search, seconds per stage.
        last_index: what was searched.
        recall: of an approximate index, what `recall_against_exact` says; else None.
    """

    def __init__(
        self,
        model: Any,
        batch_size: int = 32,
        index: str = "Flat",
        index_parameters: str | None = None,
        use_gpu: bool | Literal["auto"] = "auto",
        autocast_dtype: str | None = None,
        show_progress_bar: bool = True,
        gpu_mode: str = "replicate",
        gpu_float16: bool = False,
    ) -> None:
        check_autocast_dtype(autocast_dtype)
        self.model, self.index, self.index_parameters = model, index, index_parameters
        self.gpu = (use_gpu, gpu_mode, gpu_float16)
        self.encoding = (batch_size, autocast_dtype, show_progress_bar)
        self.timing: dict[str, float] = {}
        self.last_index: DenseIndex | None = None
        self.recall: dict[str, Any] | None = None

    def search(
        self,
        corpus: Mapping[str, Mapping[str, str]],
        queries: Mapping[str, str],
        top_k: int,
        score_function: str | None = None,
        **kwargs: Any,
    ) -> Run:
        """The `top_k` best documents of every query as {query id: {document id: score}}, best first.

        `score_function` is "cos_sim" or "dot"; None is the model's own. A document with the query's id is dropped,
        as BEIR does, which is why one more than `top_k` is asked for. Further keywords are BEIR's and are ignored.

        Raises:
            ConfigError: an unknown score function, or an index that cannot be built.
            DataError: an empty corpus.
        """
        metric = self.metric(score_function)
        if not corpus:
            raise DataError("the corpus has no documents to search")
        document_ids, (use_gpu, mode, float16) = list(corpus), self.gpu
        self.timing, self.recall = {}, None
        embedded = self._timed("encode_queries", encode_queries, self.model, list(queries.values()), *self.encoding)
        documents = self._timed("encode_corpus", encode_corpus, self.model, list(corpus.values()), *self.encoding)
        settings = (self.index, metric, use_gpu, document_ids, self.index_parameters, mode, float16)
        self.last_index = self._timed("index", build_index, documents, *settings)
        if not queries:
            return {}
        scores, rows = self._timed("search", search, self.last_index, embedded, top_k + 1)
        if not self.last_index.is_exact:
            self.recall = self._timed("recall", recall_against_exact, self.last_index, embedded, rows[:, :top_k])
        run: Run = {}
        names = np.array(document_ids, dtype=object)
        for query, line_scores, line_rows in zip(queries, scores, rows, strict=True):
            there = int((line_rows >= 0).sum())  # rows that are not there come last
            hits = dict(zip(names[line_rows[:there]].tolist(), line_scores[:there].tolist(), strict=True))
            if hits.pop(query, None) is None and len(hits) > top_k:
                hits.popitem()
            run[query] = hits
        return run

    def metric(self, score_function: str | None = None) -> Metric:
        """The index's metric for a score function's name; None is the model's own, cosine where it has none."""
        if score_function is None:
            score_function = getattr(self.model, "similarity_fn_name", None) or "cosine"
            if score_function not in _METRICS:
                raise ConfigError(
                    f"the model compares by {score_function!r}, and an index here ranks by cosine or dot product: "
                    "choose one of the two"
                )
        if score_function not in _METRICS:
            raise ConfigError(f"score function must be 'cos_sim' or 'dot', not {score_function!r}")
        return _METRICS[score_function]

    def _timed(self, stage: str, function: Any, *args: Any) -> Any:
        started = time.perf_counter()
        result = function(*args)
        self.timing[f"{stage}_seconds"] = time.perf_counter() - started
        return result
