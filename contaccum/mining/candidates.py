"""Candidate search: the passages closest to each query, by a model's embeddings and FAISS, or by BM25.

Both answer one question, `find`: the best rows of the pool, and how the known positives score. Which candidates become
negatives is decided in `filters`.
"""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Any, Literal, Protocol

import numpy as np

from contaccum.data.records import one_line
from contaccum.errors import ConfigError, DataError
from contaccum.mining.pool import MiningData

# Pairs of embeddings multiplied at a time, so that a query with hundreds of positives costs no gigabytes.
_PAIRS_AT_A_TIME = 65_536


class CandidateSearch(Protocol):
    """Searches the pool of some `MiningData` for its queries, which are called by their numbers."""

    timing: dict[str, float]

    def find(self, numbers: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
        """For queries (q,): scores (q, k') and rows (q, k') of the k' <= k best, best first, row -1 for none; and for
        each query the scores of `data.positives`, in that order.
        """

    def record(self) -> dict[str, Any]:
        """The settings, for a report."""


class DenseSearch:
    """Passages by inner product or cosine of embeddings. Passages are encoded here, queries as they are asked for.

    Holds the index, and one more float32 (n, d) for the n passages that are a positive.

    Args:
        model: a SentenceTransformer, or an object with `encode_queries` and `encode_corpus` as BEIR calls them.
        similarity: "cos" or "dot"; None is the model's own.
        index, index_parameters, use_gpu: see `build_index`.
        batch_size, autocast_dtype: see `encode_texts`.

    Raises:
        ConfigError: settings that do not fit the model or the pool, before anything is encoded.
    """

    def __init__(
        self,
        model: Any,
        data: MiningData,
        similarity: Literal["cos", "dot"] | None = None,
        index: str = "Flat",
        index_parameters: str | None = None,
        batch_size: int = 32,
        autocast_dtype: str | None = None,
        use_gpu: bool | Literal["auto"] = "auto",
        show_progress: bool = True,
    ) -> None:
        from contaccum.retrieval.encoding import check_autocast_dtype, encode_corpus
        from contaccum.retrieval.index import build_index, check_factory
        from contaccum.retrieval.searcher import FaissSearcher

        if batch_size < 1:
            raise ConfigError(f"batch_size must be at least 1, not {batch_size}")
        check_autocast_dtype(autocast_dtype)
        self.model, self.data = model, data
        self.metric = FaissSearcher(model).metric(similarity)
        # In the order of `encode_corpus` and `encode_queries`.
        self.encoding = (batch_size, autocast_dtype, show_progress)
        dimension = getattr(model, "truncate_dim", None)
        if dimension is None and hasattr(model, "get_embedding_dimension"):
            dimension = model.get_embedding_dimension()
        if dimension is not None:
            check_factory(index, dimension, data.pool_size, self.metric, index_parameters)

        self.timing: dict[str, float] = defaultdict(float)
        started = time.perf_counter()
        documents = [{"title": document.title, "text": document.text} for document in data.documents]
        embeddings = encode_corpus(model, documents, *self.encoding)
        self.timing["encode_passages_seconds"] = time.perf_counter() - started
        started = time.perf_counter()
        self.index = build_index(embeddings[: data.pool_size], index, self.metric, use_gpu, parameters=index_parameters)
        positives = np.unique(np.fromiter((row for rows in data.positives for row in rows), dtype=np.int64))
        self._place = np.full(len(data.documents), -1, dtype=np.int64)
        self._place[positives] = np.arange(len(positives))
        self._positives = self._units(embeddings[positives])
        self.timing["index_seconds"] = time.perf_counter() - started

    def find(self, numbers: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
        from contaccum.retrieval.encoding import encode_queries
        from contaccum.retrieval.index import search

        started = time.perf_counter()
        queries = encode_queries(self.model, [self.data.queries[number] for number in numbers], *self.encoding)
        encoded = time.perf_counter()
        scores, rows = search(self.index, queries, k)
        positive_scores = self._positive_scores(self._units(queries), numbers)
        self.timing["encode_queries_seconds"] += encoded - started
        self.timing["search_seconds"] += time.perf_counter() - encoded
        return scores, rows, positive_scores

    def record(self) -> dict[str, Any]:
        return {
            "method": "dense",
            "similarity": self.metric,
            "index": self.index.factory,
            "index_parameters": self.index.parameters,
            "gpus": self.index.gpus,
            "precision": self.encoding[1] or "float32",
            "dimension": self.index.dimension,
        }

    def _units(self, embeddings: np.ndarray) -> np.ndarray:
        """Scaled to length 1 for cosine; a zero vector stays zero, as in the index."""
        if self.metric == "dot":
            return embeddings
        return embeddings / np.maximum(np.linalg.norm(embeddings, axis=1, keepdims=True), 1e-30)

    def _positive_scores(self, queries: np.ndarray, numbers: np.ndarray) -> list[np.ndarray]:
        counts = [len(self.data.positives[number]) for number in numbers]
        line = np.repeat(np.arange(len(numbers)), counts)
        place = self._place[[row for number in numbers for row in self.data.positives[number]]]
        scores = np.empty(len(line), dtype=np.float32)
        for start in range(0, len(line), _PAIRS_AT_A_TIME):
            part = slice(start, start + _PAIRS_AT_A_TIME)
            scores[part] = np.einsum("nd,nd->n", queries[line[part]], self._positives[place[part]])
        return np.split(scores, np.cumsum(counts)[:-1])


class BM25Index:
    """Passages by BM25 (bm25s, Lucene's variant): lower-cased words of two letters or more, no stemming, no stop words.

    Args:
        where: what the passages are from, for the message.
        k1, b: saturation of term frequency, and how far long passages are held back; 0.9 and 0.4 are DPR's.

    Raises:
        ConfigError: bm25s is not installed, or a parameter out of range.
        DataError: no passage has a word.
    """

    def __init__(
        self, passages: list[str], where: str, k1: float = 0.9, b: float = 0.4, show_progress: bool = True
    ) -> None:
        check_bm25(k1, b)
        import bm25s

        words = self._words(passages, show_progress)
        if not any(words):
            raise DataError(one_line(f"{where}: no passage has a word of two letters for BM25 to find"))
        self.bm25 = bm25s.BM25(k1=k1, b=b)
        self.bm25.index(words, show_progress=show_progress)

    @staticmethod
    def _words(texts: list[str], show_progress: bool = False) -> list[list[str]]:
        import bm25s

        return bm25s.tokenize(texts, stopwords=[], return_ids=False, show_progress=show_progress)

    def scores(self, query: str) -> np.ndarray | None:
        """Of all passages (n,); None for a query without a word."""
        (words,) = self._words([query])
        return self.bm25.get_scores(words) if words else None

    def best(self, query: str, k: int) -> np.ndarray:
        """Rows of the k' <= k passages that score best, above 0, best first; equal ones in order of the row."""
        scores = self.scores(query)
        return np.empty(0, dtype=np.int64) if scores is None else _best(scores, k)


class BM25Search:
    """Passages by :class:`BM25Index`.

    A passage without a word of the query is no candidate. Positives from outside the pool are part of the statistics,
    so that they have a score.

    Args:
        k1, b: see `BM25Index`.

    Raises:
        ConfigError: bm25s is not installed, or a parameter out of range.
        DataError: no passage has a word.
    """

    def __init__(self, data: MiningData, k1: float = 0.9, b: float = 0.4, show_progress: bool = True) -> None:
        self.data, self.k1, self.b = data, k1, b
        self.timing: dict[str, float] = defaultdict(float)
        started = time.perf_counter()
        passages = [document.passage for document in data.documents]
        self.index = BM25Index(passages, str(data.record["path"]), k1, b, show_progress)
        self.timing["index_seconds"] = time.perf_counter() - started

    def find(self, numbers: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
        started = time.perf_counter()
        k = min(k, self.data.pool_size)
        rows = np.full((len(numbers), k), -1, dtype=np.int64)
        scores = np.full((len(numbers), k), -np.inf, dtype=np.float32)
        positive_scores = []
        for line, number in enumerate(numbers):
            positives = self.data.positives[number]
            of_all = self.index.scores(self.data.queries[number])
            if of_all is None:
                positive_scores.append(np.zeros(len(positives), dtype=np.float32))
                continue
            positive_scores.append(of_all[positives])
            best = _best(of_all[: self.data.pool_size], k)
            rows[line, : len(best)], scores[line, : len(best)] = best, of_all[best]
        self.timing["search_seconds"] += time.perf_counter() - started
        return scores, rows, positive_scores

    def record(self) -> dict[str, Any]:
        return {"method": "bm25", "k1": self.k1, "b": self.b}


def check_bm25(k1: float, b: float) -> None:
    """Raise `ConfigError` where bm25s is missing or a parameter is out of range."""
    if k1 < 0 or not 0 <= b <= 1:
        raise ConfigError(f"bm25_k1={k1} and bm25_b={b} are out of range: k1 is 0 or more, b between 0 and 1")
    try:
        import bm25s  # noqa: F401
    except ImportError as error:
        raise ConfigError("BM25 needs the package bm25s: pip install 'contaccum[mining]'") from error


def _best(scores: np.ndarray, k: int) -> np.ndarray:
    """Rows of the k best scores above 0, equal ones in order of the row, at the k-th place too."""
    rows = np.flatnonzero(scores > 0)
    if len(rows) > k:
        least = np.partition(scores[rows], len(rows) - k)[len(rows) - k]
        above, equal = rows[scores[rows] > least], rows[scores[rows] == least]
        rows = np.concatenate([above, equal[: k - len(above)]])
    return rows[np.lexsort((rows, -scores[rows]))]
