"""Exact search: the k best rows of each query over a corpus read in slices, whatever finds the candidates.

A matrix product in float32 (or float16, on a GPU) gives other last bits for another slice, batch, thread or machine,
and equal documents then come in an order of luck. So it only finds candidates here: all rows whose score may, within
the bound on its rounding error, be among the k best. These are scored again in float64, each pair by itself, and
rounded to float32; documents of equal scores are ordered by id. How the corpus was sliced plays no part in the result.

What a slice is searched with is the caller's: `CpuSlices` or `GpuSlices`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Protocol

import numpy as np

from contaccum.retrieval import exact_scores
from contaccum.retrieval.cpu_slices import BFLOAT16, CpuSlices, Pairs, rounding_pays, threads
from contaccum.retrieval.exact_scores import ExactScores, Metric, ordered, ranks_of
from contaccum.retrieval.rows import EmbeddingRows, growing_slices, norms_of, scale_to_unit, slices, unit_or_same

logger = logging.getLogger(__name__)

# Candidates (float32 and int64) held for the queries that are searched together: half a gigabyte.
_HELD = 2**25
# Rows of the first slice, which sets a bound for those that follow.
_FIRST_ROWS = 2**14


class SliceSearch(Protocol):
    """Finds the best rows of one slice of the corpus.

    Attributes:
        max_fetch: how many rows it can give per query; None for any number.
        slice_rows: how many rows it takes at a time; None for the default.
    """

    max_fetch: int | None
    slice_rows: int | None

    def margin(self, k: int) -> int:
        """How many candidates beyond k are worth fetching, so that few queries have to be looked at again."""

    def error(self, dimension: int) -> tuple[float, float]:
        """Bounds on the error of a score: relative to |query||document|, and to |query| + |document|."""

    def search(self, documents: np.ndarray, first: int, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Scores (q, k), best first, and places in `documents` (q, k); `first` is the row of documents[0]."""


def exact_search(
    corpus: EmbeddingRows,
    queries: np.ndarray,
    k: int,
    metric: Metric,
    searcher: SliceSearch | None = None,
    slice_rows: int | None = None,
    on_slice: Callable[[int], object] = lambda rows: None,
) -> tuple[np.ndarray, np.ndarray]:
    """The k best rows of each query (n, d): scores float32 and rows int64, both of shape (n, min(k, corpus)).

    Ordered by score, descending, then by id, ascending. A score is the float64 inner product (or cosine) of the pair,
    rounded to float32. Memory holds a slice and some 1.5 k candidates per query.

    Args:
        slice_rows: rows read at a time; by default what the searcher takes.
        on_slice: called with the number of rows of each slice that was searched, for each batch of queries.

    Raises:
        UserError: NaN or infinity in a query or a document, or vectors too long for float32 scores.
    """
    k = min(k, len(corpus))
    scores = np.empty((len(queries), k), dtype=np.float32)
    rows = np.empty((len(queries), k), dtype=np.int64)
    searcher = searcher or CpuSlices()
    together = max(1, _HELD // (2 * (k + searcher.margin(k))))
    for start in range(0, len(queries), together):
        part = slice(start, start + together)
        batch = np.ascontiguousarray(queries[part], dtype=np.float32)
        scores[part], rows[part] = _Search(corpus, batch, k, metric, searcher, slice_rows, start).run(on_slice)
    return scores, rows


class _Search:
    """The candidates of a batch of queries, slice by slice."""

    def __init__(
        self,
        corpus: EmbeddingRows,
        queries: np.ndarray,
        k: int,
        metric: Metric,
        searcher: SliceSearch,
        slice_rows: int | None,
        first_query: int,
    ) -> None:
        self.corpus, self.queries, self.k, self.metric, self.searcher = corpus, queries, k, metric, searcher
        norms = norms_of(queries, "query embedding", first_query)
        self.scaled = np.ascontiguousarray(unit_or_same(queries, norms, metric))
        self.norms = norms if metric == "dot" else np.ones_like(norms)
        self.exact = ExactScores(queries, metric)
        # A k beyond what a slice can give comes together from several.
        size = slice_rows or searcher.slice_rows
        if searcher.max_fetch is not None and k > searcher.max_fetch:
            most = max(searcher.max_fetch // 2, len(corpus) * searcher.max_fetch // (4 * k))
            size = most if size is None else min(size, most)
        if size is None and isinstance(searcher, CpuSlices):
            self.slices = list(growing_slices(corpus, max(_FIRST_ROWS, 8 * k)))
        else:
            self.slices = list(slices(corpus, size))
        self.scores: np.ndarray = np.empty((len(queries), 0), dtype=np.float32)
        self.rows: np.ndarray = np.empty((len(queries), 0), dtype=np.int64)
        # The greatest error so far of a candidate's score, per query.
        self.error = np.zeros(len(queries), dtype=np.float32)
        # And what it is besides, as a share of the score.
        self.relative_error = 0.0
        self.rounded = rounding_pays()
        longest = max(stop - start for start, stop in self.slices)
        self.buffer = np.empty((longest if metric == "cos" else 0, corpus.dim), dtype=np.float32)

    def run(self, on_slice: Callable[[int], object]) -> tuple[np.ndarray, np.ndarray]:
        with ThreadPoolExecutor(threads()) as self.pool:
            # The last score that each slice gave; what it did not give is no better.
            last = []
            for start, stop in self.slices:
                last.append(self._candidates_of(start, stop))
                on_slice(stop - start)
            self._settle(last)
            return self._ranked(np.arange(len(self.queries)))

    def _candidates_of(self, start: int, stop: int) -> np.ndarray:
        documents = self.corpus.slice(start, stop)
        norms = self.corpus.norms(start, documents)
        longest = float(norms.max()) if self.metric == "dot" else 1.0
        # Before the bound below, which these scores are held against.
        relative, absolute = self.searcher.error(self.corpus.dim)
        error = relative * self.norms * longest + absolute * (self.norms + longest)
        self.error = np.maximum(self.error, error.astype(np.float32))
        if self._add_all_above_bound(documents, norms, start):
            return np.full(len(self.queries), -np.inf)
        fetch = min(self.k + self.searcher.margin(self.k), stop - start)
        if self.searcher.max_fetch is not None:
            fetch = min(fetch, self.searcher.max_fetch)
        documents = unit_or_same(documents, norms, self.metric, self.buffer)
        scores, places = self.searcher.search(documents, start, self.scaled, fetch)
        self._add(np.arange(len(self.queries)), scores, np.where(places >= 0, places + start, -1))
        return np.full(len(scores), -np.inf) if fetch == stop - start else scores[:, -1]

    def _add_all_above_bound(self, documents: np.ndarray, norms: np.ndarray, start: int) -> bool:
        """Whether the slice could be settled with what is known: all that may be better than the k-th best so far."""
        kth, error = self._kth(self.scores)
        if not isinstance(self.searcher, CpuSlices) or not np.isfinite(kth).all():
            return False
        most = 4 * len(kth) * (self.k + self.searcher.margin(self.k))
        bound = kth - error
        scale = scale_to_unit(norms) if self.metric == "cos" else None
        pairs = None
        if self.rounded:
            pairs = self.searcher.above(documents, self.scaled, bound, most, True, scale)
            self.rounded = pairs is not None
            self.relative_error = BFLOAT16 if self.rounded else self.relative_error
        if pairs is None:
            pairs = self.searcher.above(documents, self.scaled, bound, most, False, scale)
        if pairs is None:
            return False
        self.error = np.maximum(self.error, pairs.error.astype(np.float32))
        self._add(*_in_lines(pairs, start))
        return True

    def _add(self, chosen: np.ndarray, scores: np.ndarray, rows: np.ndarray) -> None:
        """More candidates, of the chosen queries; drops all that cannot be among the k best any more."""
        width = self.scores.shape[1]
        held: np.ndarray = np.full((len(self.queries), width + scores.shape[1]), -np.inf, dtype=np.float32)
        held_rows: np.ndarray = np.full(held.shape, -1, dtype=np.int64)
        held[:, :width], held_rows[:, :width] = self.scores, self.rows
        held[chosen, width:], held_rows[chosen, width:] = scores, rows
        self.scores, self.rows = held, held_rows
        keep = int(self._possible(held).sum(axis=1).max())
        if keep < held.shape[1]:
            best = np.argpartition(-held, keep - 1, axis=1)[:, :keep]
            self.scores = np.take_along_axis(held, best, axis=1)
            self.rows = np.take_along_axis(held_rows, best, axis=1)
        limit = 4 * (self.k + self.searcher.margin(self.k))
        if self.scores.shape[1] > limit:
            # Scores closer than the rounding error, slice after slice: settle who is in, or memory would grow.
            crowded = np.flatnonzero(self._possible(self.scores).sum(axis=1) > limit)
            exact, exact_rows = self._ranked(crowded)
            self.scores[crowded], self.rows[crowded] = -np.inf, -1
            self.scores[crowded, : self.k], self.rows[crowded, : self.k] = exact, exact_rows
            self._add(chosen[:0], scores[:0, :0], rows[:0, :0])

    def _kth(self, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The k-th best score of each query, -inf while fewer are known, and how far it may be off; both (n,).

        What is relative in the error is taken at that score: better ones stay better, and worse ones are off by less.
        """
        if scores.shape[1] < self.k:
            return np.full(len(scores), -np.inf), np.zeros(len(scores))
        kth = np.partition(scores, scores.shape[1] - self.k, axis=1)[:, -self.k].astype(np.float64)
        return kth, np.where(kth > -np.inf, self.error + self.relative_error * np.abs(kth), 0)

    def _least(self, scores: np.ndarray) -> np.ndarray:
        """(n, 1): a row of a lower score is not among the k best."""
        kth, error = self._kth(scores)
        # Rounded down, as a bound is.
        return np.nextafter((kth - 2 * error).astype(np.float32), np.float32(-np.inf))[:, None]

    def _possible(self, scores: np.ndarray) -> np.ndarray:
        return (scores >= self._least(scores)) & (scores > -np.inf)

    def _settle(self, last: Sequence[np.ndarray]) -> None:
        """Search the slices again that may hold more for some queries than they gave, now in float64."""
        told = False
        for (start, stop), least in zip(self.slices, last, strict=True):
            chosen = np.flatnonzero((least >= self._least(self.scores)[:, 0]) & (least > -np.inf))
            if not len(chosen):
                continue
            if not told:
                told = True
                logger.info("%d queries have more documents of close scores than were fetched", len(chosen))
            drawn = (self.rows[chosen] >= start) & (self.rows[chosen] < stop)
            self.scores[chosen] = np.where(drawn, -np.inf, self.scores[chosen])
            self.rows[chosen] = np.where(drawn, -1, self.rows[chosen])
            self._add(chosen, *self._best_of_slice(chosen, start, stop))

    def _best_of_slice(self, chosen: np.ndarray, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """The k best rows of a slice, exact scores, for queries that it may hold many equally good ones for."""
        documents = self.corpus.slice(start, stop)
        k = min(self.k, stop - start)
        scores = np.empty((len(chosen), k), dtype=np.float32)
        rows = np.empty((len(chosen), k), dtype=np.int64)
        rank = None
        size = max(1, exact_scores.BLOCK_BYTES // (8 * (stop - start)))
        for begin in range(0, len(chosen), size):
            of_all = self.exact.of_all(chosen[begin : begin + size], documents)
            for line, of_one in enumerate(of_all, start=begin):
                kth = np.partition(of_one, len(of_one) - k)[-k]
                places = np.flatnonzero(of_one >= kth)
                if len(places) > k:
                    if rank is None:
                        rank = ranks_of(self.corpus.ids(np.arange(start, stop)))
                    ties = places[of_one[places] == kth]
                    ties = ties[np.argsort(rank[ties])]
                    places = np.concatenate([places[of_one[places] > kth], ties])[:k]
                scores[line], rows[line] = of_one[places], places + start
        return scores, rows

    def _ranked(self, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The k best of all candidates of the chosen queries, by exact score and id; float32 and int64 (chosen, k)."""
        held, rows = self.scores[chosen], self.rows[chosen]
        least = self._least(self.scores)[chosen]
        rows = np.where((held >= least) & (held > -np.inf), rows, -1)
        scores = np.full(rows.shape, -np.inf, dtype=np.float32)
        if self.corpus.in_memory:
            self._score(chosen, rows, scores, rows >= 0, self.corpus.gather)
            return ordered(scores, rows, self.k, self.corpus.ids)
        used = np.zeros(len(self.corpus), dtype=bool)
        used[rows[rows >= 0]] = True
        wanted = np.flatnonzero(used)
        # Each row is read once, in the order in which the rows lie, and as many together as memory should hold.
        size = max(1, exact_scores.BLOCK_BYTES // (4 * self.corpus.dim))
        for start in range(0, len(wanted), size):
            part = wanted[start : start + size]
            inside = (rows >= part[0]) & (rows <= part[-1])
            self._score(chosen, rows, scores, inside, partial(_rows_among, part, self.corpus.gather(part)))
        return ordered(scores, rows, self.k, self.corpus.ids)

    def _score(
        self,
        chosen: np.ndarray,
        rows: np.ndarray,
        scores: np.ndarray,
        inside: np.ndarray,
        documents: Callable[[np.ndarray], np.ndarray],
    ) -> None:
        """Fill in `scores` where `inside`, query by query, shared out to threads."""

        def score(line: int) -> None:
            places = np.flatnonzero(inside[line])
            found = documents(rows[line, places])
            scores[line, places] = self.exact.of(chosen[line], found)

        for _ in self.pool.map(score, np.flatnonzero(inside.any(axis=1)).tolist()):
            pass


def _in_lines(pairs: Pairs, start: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pairs as `_Search._add` takes them: queries, ascending, and lines of scores and rows, -inf and -1 for none."""
    order = np.argsort(pairs.queries, kind="stable")
    queries, counts = np.unique(pairs.queries, return_counts=True)
    width = int(counts.max(initial=0))
    scores: np.ndarray = np.full((len(queries), width), -np.inf, dtype=np.float32)
    rows: np.ndarray = np.full((len(queries), width), -1, dtype=np.int64)
    there = np.arange(width) < counts[:, None]
    scores[there], rows[there] = pairs.scores[order], pairs.places[order] + start
    return queries, scores, rows


def _rows_among(known: np.ndarray, documents: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Of documents whose rows are known, ascending, those of some rows."""
    return documents[np.searchsorted(known, rows)]
