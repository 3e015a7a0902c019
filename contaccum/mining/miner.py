"""Mining hard negatives in Python: `mine_hard_negatives(model, data)`.

Searches candidates, applies the rules, and keeps the result as rows and scores; `writer` turns it into files. Queries
are worked off in blocks: memory holds the passages and the result, but never all candidates of all queries.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from contaccum.data.passages import Passage
from contaccum.errors import ConfigError, DataError
from contaccum.mining.candidates import BM25Search, CandidateSearch, DenseSearch, check_bm25
from contaccum.mining.filters import SelectionRules, select_negatives
from contaccum.mining.pool import MiningData
from contaccum.mining.rescoring import CrossEncoderScores
from contaccum.mining.sources import load_mining_data

if TYPE_CHECKING:
    from datasets import Dataset

OnTooFew = Literal["drop", "keep"]

# Queries in a block, and scores in a block: some 100 MB of scores, rows and masks.
_BLOCK_QUERIES = 16_384
_BLOCK_SCORES = 4_000_000


class Scored(NamedTuple):
    """A passage with its score towards a query, and that of a cross-encoder where it was asked."""

    document: Passage
    score: float
    cross_encoder_score: float | None = None


class MinedQuery(NamedTuple):
    """One query with all its known positives, the first `pair_count` of which make pairs, and its negatives."""

    id: str
    query: str
    positives: list[Scored]
    pair_count: int
    negatives: list[Scored]


@dataclass
class MinedNegatives:
    """What `mine_hard_negatives` found, for Q queries.

    Attributes:
        data: queries and passages; rows are its.
        rules: what the negatives obey.
        rows: (Q, num_negatives) int64, best first, -1 where there are fewer.
        scores: the same shape, -inf where there are fewer.
        positive_scores: for each query the scores of `data.positives`.
        cross_encoder_scores: like `scores`, NaN where there are none; None without a cross-encoder.
        candidates, dropped, rescored: see `Selection`, over all queries.
        search: the settings of the search.
        timing: seconds per stage.
    """

    data: MiningData
    rules: SelectionRules
    rows: np.ndarray
    scores: np.ndarray
    positive_scores: list[np.ndarray]
    cross_encoder_scores: np.ndarray | None = None
    candidates: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    rescored: int = 0
    search: dict[str, Any] = field(default_factory=dict)
    timing: dict[str, float] = field(default_factory=dict)

    def queries(self, on_too_few: OnTooFew = "drop") -> Iterator[MinedQuery]:
        """The queries in the order of the data. "drop" leaves out those with fewer than `num_negatives`."""
        data = self.data
        for number, rows in enumerate(self.rows.tolist()):
            negatives = [
                Scored(data.documents[row], float(self.scores[number, place]), self._second(number, place))
                for place, row in enumerate(rows)
                if row >= 0
            ]
            if on_too_few == "drop" and len(negatives) < self.rules.num_negatives:
                continue
            positives = [
                Scored(document, score)
                for document, score in zip(
                    data.positive_documents[number], self.positive_scores[number].tolist(), strict=True
                )
            ]
            yield MinedQuery(
                data.query_ids[number], data.queries[number], positives, data.pair_counts[number], negatives
            )

    def dataset(self) -> Dataset:
        """Training data: a row for each pair of every query that has `num_negatives`, with the columns "query",
        "positive", "negative_1" .. "negative_h" that `ContAccumTrainer` and sentence-transformers' losses read.

        Raises:
            DataError: no query has enough negatives.
        """
        from datasets import Dataset

        self.require_full_queries()
        columns: dict[str, list[str]] = {"query": [], "positive": []}
        columns |= {f"negative_{place}": [] for place in range(1, self.rules.num_negatives + 1)}
        for query in self.queries("drop"):
            negatives = [negative.document.passage for negative in query.negatives]
            for positive in query.positives[: query.pair_count]:
                texts = (query.query, positive.document.passage, *negatives)
                for column, text in zip(columns.values(), texts, strict=True):
                    column.append(text)
        return Dataset.from_dict(columns)

    def require_full_queries(self) -> None:
        """Raise `DataError` when no query has `num_negatives` negatives."""
        if not (self.rows >= 0).all(axis=1).any():
            raise DataError(
                f"{self.data.record['path']}: no query has {self.rules.num_negatives} negatives (lower num_negatives, "
                "loosen the rules, or use on_too_few keep)"
            )

    def _second(self, number: int, place: int) -> float | None:
        return None if self.cross_encoder_scores is None else float(self.cross_encoder_scores[number, place])

    def counts(self, on_too_few: OnTooFew = "drop") -> dict[str, int]:
        """Queries by how many negatives they have, and the pairs and queries that `on_too_few` leaves."""
        found = (self.rows >= 0).sum(axis=1)
        full = found == self.rules.num_negatives
        left = full if on_too_few == "drop" else np.ones_like(full)
        pairs = np.array(self.data.pair_counts)
        return {
            "queries": len(found),
            "queries_with_fewer": int((~full & (found > 0)).sum()),
            "queries_with_none": int((found == 0).sum()),
            "queries_kept": int(left.sum()),
            "pairs": int(pairs.sum()),
            "pairs_kept": int(pairs[left].sum()),
            "negatives_kept": int(found[left].sum()),
        }

    def record(self, on_too_few: OnTooFew = "drop") -> dict[str, Any]:
        """Settings, counts and timing, for a report."""
        positive = np.concatenate(self.positive_scores)
        negative = self.scores[self.rows >= 0]
        return {
            "data": self.data.record,
            "search": self.search,
            "rules": {**asdict(self.rules), "range_max": self.rules.depth},
            "candidates": self.candidates,
            "dropped_by_rule": dict(self.dropped),
            "cross_encoder_read": self.rescored,
            "on_too_few": on_too_few,
            **self.counts(on_too_few),
            "mean_positive_score": float(positive.mean()),
            "mean_negative_score": float(negative.mean()) if len(negative) else None,
            "timing": self.timing,
        }


def mine_hard_negatives(
    model: Any,
    data: MiningData | str | os.PathLike[str] | Iterable[Mapping[str, Any] | Sequence[Any]],
    corpus: str | os.PathLike[str] | Iterable[Mapping[str, Any] | str] | None = None,
    rules: SelectionRules | None = None,
    method: Literal["dense", "bm25"] = "dense",
    cross_encoder: Any = None,
    similarity: Literal["cos", "dot"] | None = None,
    index: str = "Flat",
    index_parameters: str | None = None,
    batch_size: int = 32,
    autocast_dtype: str | None = None,
    use_gpu: bool | Literal["auto"] = "auto",
    bm25_k1: float = 0.9,
    bm25_b: float = 0.4,
    show_progress: bool = True,
) -> MinedNegatives:
    """Find for each query of training data passages that score high and are not known to be relevant.

    A known positive of a query is every passage that the data pair with its text, or judge above 0 for it. None of them
    becomes its negative, nor does any passage of the same text (white space and case apart, with or without a title)
    or, in BEIR data, the same id, nor a passage that repeats the query.

    A model in training may be asked too: it is put in eval mode, without gradients, and back in the mode that it had;
    its weights and the random state stay as they are, and no file is written.

    Args:
        model: a SentenceTransformer, or an object with `encode_queries` and `encode_corpus` as BEIR calls them; None
            for BM25.
        data, corpus: what `load_mining_data` takes, files or records in memory; or what it gave, which saves reading
            and comparing texts where the same data are mined again.
        rules: what a negative must be like; None: the 3 best.
        method: "dense", or "bm25" where there is no model yet that is worth asking.
        cross_encoder: a sentence-transformers CrossEncoder; `rules.cross_encoder_margin` says how it is used.
        similarity, index, index_parameters, batch_size, autocast_dtype, use_gpu: see `DenseSearch`.
        bm25_k1, bm25_b: see `BM25Search`.

    Raises:
        ConfigError: settings that cannot work, before anything is encoded.
        DataError: data that cannot be used.
        UserError: a model that gives NaN or infinity.

    Example::

        mined = mine_hard_negatives(model, "pairs.jsonl", rules=SelectionRules(relative_margin=0.05, num_negatives=4))
        write_mined(mined, "hard.jsonl")  # or mined.dataset(), to train on at once
    """
    rules = rules or SelectionRules()
    check_settings(rules, method, model is not None, cross_encoder is not None, bm25_k1, bm25_b)
    if not isinstance(data, MiningData):
        data = load_mining_data(data, corpus)
    elif corpus is not None:
        raise ConfigError("corpus is read together with the data: pass it to load_mining_data")
    rescorer = CrossEncoderScores(cross_encoder, data, batch_size, show_progress) if cross_encoder is not None else None
    search: CandidateSearch
    if method == "bm25":
        search = BM25Search(data, bm25_k1, bm25_b, show_progress)
    else:
        search = DenseSearch(
            model, data, similarity, index, index_parameters, batch_size, autocast_dtype, use_gpu, show_progress
        )
    mined = _mine(data, rules, search, rescorer, show_progress)
    mined.search, mined.timing = search.record(), mined.timing | search.timing
    if rescorer is not None:
        mined.timing["cross_encoder_seconds"] = rescorer.seconds
        mined.timing["select_seconds"] -= rescorer.seconds
    return mined


def check_settings(
    rules: SelectionRules, method: str, has_model: bool, has_cross_encoder: bool, bm25_k1: float, bm25_b: float
) -> None:
    """Raise `ConfigError` for settings that cannot work together; cheap, before data or models are loaded."""
    rules.check()
    if method not in ("dense", "bm25"):
        raise ConfigError(f"method must be dense or bm25, got {method!r}")
    if has_model != (method == "dense"):
        mend = "method bm25 uses no MODEL: leave it out" if has_model else "method dense needs a MODEL (or use bm25)"
        raise ConfigError(mend)
    if has_cross_encoder != (rules.cross_encoder_margin is not None):
        raise ConfigError("cross_encoder and cross_encoder_margin need each other: give both or neither")
    if method == "bm25":
        check_bm25(bm25_k1, bm25_b)


def _mine(
    data: MiningData,
    rules: SelectionRules,
    search: CandidateSearch,
    rescorer: CrossEncoderScores | None,
    show_progress: bool,
) -> MinedNegatives:
    from tqdm.auto import tqdm

    count = len(data.queries)
    shape = (count, rules.num_negatives)
    nothing: list[np.ndarray] = [np.empty(0, dtype=np.float32)] * count
    mined = MinedNegatives(data, rules, np.full(shape, -1, np.int64), np.full(shape, -np.inf, np.float32), nothing)
    if rescorer is not None:
        mined.cross_encoder_scores = np.full(shape, np.nan)
    selecting = 0.0
    with tqdm(total=count, unit=" queries", desc="Mining", disable=not show_progress) as progress:
        for numbers, k in _blocks(data, rules):
            scores, rows, positive_scores = search.find(numbers, k)
            started = time.perf_counter()
            for number, values in zip(numbers.tolist(), positive_scores, strict=True):
                mined.positive_scores[number] = values
            selection = select_negatives(
                scores,
                rows,
                np.array([values.min() for values in positive_scores]),
                rules,
                {
                    "known_positive": data.marked(data.excluded, numbers, rows),
                    "same_as_query": data.marked(data.same_as_query, numbers, rows),
                },
                numbers,
                rescorer,
            )
            mined.rows[numbers], mined.scores[numbers] = selection.rows, selection.scores
            if selection.rescores is not None and mined.cross_encoder_scores is not None:
                mined.cross_encoder_scores[numbers] = selection.rescores
            mined.candidates += selection.candidates
            mined.dropped.update(selection.dropped)
            mined.rescored += selection.rescored
            selecting += time.perf_counter() - started
            progress.update(len(numbers))
    mined.timing["select_seconds"] = selecting
    if not (mined.rows >= 0).any():
        reasons = ", ".join(f"{name} {dropped}" for name, dropped in mined.dropped.most_common())
        raise DataError(
            f"{data.record['path']}: no query has a negative left; dropped: {reasons or 'nothing, none was found'} "
            "(loosen the rules, raise range_max, or give a larger corpus)"
        )
    return mined


def _blocks(data: MiningData, rules: SelectionRules) -> Iterator[tuple[np.ndarray, int]]:
    """Numbers of queries, and how deep to search for them: past their own exclusions, `rules.depth` must be left."""
    skipped = np.array([len(a) + len(b) for a, b in zip(data.excluded, data.same_as_query, strict=True)])
    # Beyond the pool there is nothing to hold scores of, however large range_max may be.
    depth = min(rules.depth, data.pool_size)
    # Those with many exclusions come together, so that they alone pay for the depth.
    order = np.argsort(skipped, kind="stable")
    start = 0
    while start < len(order):
        size = min(_BLOCK_QUERIES, len(order) - start)
        while size > 1 and size * (depth + int(skipped[order[start + size - 1]])) > _BLOCK_SCORES:
            size //= 2
        numbers = order[start : start + size]
        yield numbers, min(depth + int(skipped[numbers[-1]]), data.pool_size)
        start += size
