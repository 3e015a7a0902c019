"""BM25 by bm25s (Lucene's variant), for those who have no model yet: lower-cased words, no stemming, no stop words."""

from __future__ import annotations

import numpy as np

from contaccum.errors import ConfigError, DataError


class BM25Index:
    """Passages by their words of two letters or more.

    Args:
        where: what the passages are from, for the message.
        k1, b: saturation of term frequency, and how far long passages are held back; 0.9 and 0.4 are DPR's.

    Raises:
        ConfigError: bm25s is not installed, or a parameter out of range.
        DataError: no passage has a word.
    """

    def __init__(
        self, passages: list[str], where: str, k1: float = 0.9, b: float = 0.4, show_progress: bool = False
    ) -> None:
        check_bm25(k1, b)
        import bm25s

        words = bm25s.tokenize(passages, stopwords=[], return_ids=False, show_progress=show_progress)
        if not any(words):
            raise DataError(f"{where}: no passage has a word of two letters for BM25 to find")
        self.bm25 = bm25s.BM25(k1=k1, b=b)
        self.bm25.index(words, show_progress=show_progress)

    def scores(self, query: str) -> np.ndarray | None:
        """Of all passages (n,); None for a query without a word."""
        import bm25s

        (words,) = bm25s.tokenize([query], stopwords=[], return_ids=False, show_progress=False)
        return self.bm25.get_scores(words) if words else None

    def best(self, query: str, k: int) -> np.ndarray:
        """Rows of the k' <= k passages that score best, above 0, best first; equal ones in order of the row."""
        scores = self.scores(query)
        return np.empty(0, dtype=np.int64) if scores is None else best_rows(scores, k)


def best_rows(scores: np.ndarray, k: int) -> np.ndarray:
    """Rows of the k best scores above 0, equal ones in order of the row, at the k-th place too."""
    rows = np.flatnonzero(scores > 0)
    if len(rows) > k:
        least = np.partition(scores[rows], len(rows) - k)[len(rows) - k]
        above, equal = rows[scores[rows] > least], rows[scores[rows] == least]
        rows = np.concatenate([above, equal[: k - len(above)]])
    return rows[np.lexsort((rows, -scores[rows]))]


def check_bm25(k1: float = 0.9, b: float = 0.4) -> None:
    """Raise `ConfigError` where bm25s is missing or a parameter is out of range."""
    if k1 < 0 or not 0 <= b <= 1:
        raise ConfigError(f"bm25_k1={k1} and bm25_b={b} are out of range: k1 is 0 or more, b between 0 and 1")
    try:
        import bm25s  # noqa: F401
    except ImportError as error:
        raise ConfigError("BM25 needs the package bm25s: pip install 'contaccum[mining]'") from error
