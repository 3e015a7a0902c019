"""Hard negatives for training data: passages that score high for a query and are not known to be relevant.

FAISS with a model, or BM25, finds candidates; sentence-transformers' `mine_hard_negatives` decides which of them become
negatives. Here is what that lacks: data of every format, copies of positives under other spelling, ids or titles, any
index or similarity, a cross-encoder whose margin holds beside the others. Reading data, writing files, and when to mine
while training are others' business.
"""

from __future__ import annotations

import contextlib
import io
import random
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np

from contaccum.errors import ConfigError, DataError, check_choice
from contaccum.mining.cross_encoder import second_opinion
from contaccum.mining.data import MiningData, load_mining_data
from contaccum.retrieval.bm25 import BM25Index, best_rows, check_bm25

METHODS = ("dense", "bm25")

# Candidates per wanted negative where a rule may drop some, as in sentence-transformers.
_SPARE = 10
# torch.quantile, of which the statistics are made, takes no more numbers.
_STATISTICS_OF = 2**24


# Rules ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SelectionRules:
    """What a negative must be like: sentence-transformers' rules by their names, and those of docs/mining.md.

    s is the score of a candidate, p the lowest of its query's positives. `range_max` None is `num_negatives` +
    `range_min`, with 10 `num_negatives` where a rule may drop candidates or sampling may choose.
    """

    num_negatives: int = 3  # per query
    range_min: int = 0  # skip so many of the closest of what the score rules leave
    range_max: int | None = None  # no candidate beyond this rank; known positives have no rank
    absolute_margin: float | None = None  # keep s <= p - margin
    relative_margin: float | None = None  # keep s <= p - margin * abs(p)
    max_score: float | None = None
    min_score: float | None = None
    cross_encoder_margin: float | None = None  # keep what it scores at least this far below the positives (logits)
    sampling: Literal["top", "random"] = "top"
    seed: int = 0  # of random sampling

    def check(self) -> None:
        """Raise `ConfigError` for rules that are out of range or leave no room for the negatives."""
        for name, least in (("num_negatives", 1), ("range_min", 0), ("seed", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be at least {least}, got {getattr(self, name)}")
        room = self.range_min + self.num_negatives
        if self.range_max is not None and self.range_max < room:
            what = f"num_negatives={self.num_negatives} after range_min={self.range_min}"
            raise ConfigError(f"range_max={self.range_max} leaves no room for {what}; raise it to {room} or more")
        if self.relative_margin is not None and not 0 <= self.relative_margin <= 1:
            what = "0.05 keeps what scores up to 95 % of the positive's score"
            raise ConfigError(f"relative_margin={self.relative_margin} must be between 0 and 1: {what}")
        if self.max_score is not None and self.min_score is not None and self.max_score < self.min_score:
            raise ConfigError(f"max_score={self.max_score} is below min_score={self.min_score}: nothing could be kept")
        check_choice("sampling", self.sampling, ("top", "random"))

    @property
    def depth(self) -> int:
        """How many candidates of a query, known positives apart, are considered."""
        if self.range_max is not None:
            return self.range_max
        names = ("absolute_margin", "relative_margin", "max_score", "min_score", "cross_encoder_margin")
        choosy = self.sampling == "random" or any(getattr(self, name) is not None for name in names)
        return self.range_min + self.num_negatives * (_SPARE if choosy else 1)


# Mining --------------------------------------------------------------------------------------------------------------


@dataclass
class MinedNegatives:
    """What `mine_hard_negatives` found, for Q queries.

    Attributes:
        data, rules: what it was given.
        rows: (Q, num_negatives) int64, rows of `data.documents`, best first, -1 where there are fewer.
        scores: the same shape, -inf where there are fewer.
        positive_scores: for each query the scores of `data.positives`.
        cross_encoder_scores: like `scores`, NaN where there are none; None without a cross-encoder.
        statistics: lines in which sentence-transformers says what the rules dropped, and how scores are spread.
        search: its settings.
    """

    data: MiningData
    rules: SelectionRules
    rows: np.ndarray
    scores: np.ndarray
    positive_scores: list[np.ndarray]
    cross_encoder_scores: np.ndarray | None = None
    statistics: list[str] = field(default_factory=list)
    search: dict[str, Any] = field(default_factory=dict)

    def kept(self, on_too_few: str = "drop") -> np.ndarray:
        """bool (Q,): queries to write. "drop" leaves out those with fewer than `num_negatives`, "keep" none."""
        full = np.asarray((self.rows >= 0).all(axis=1))
        return full if on_too_few == "drop" else np.ones_like(full)

    def record(self, on_too_few: str = "drop") -> dict[str, Any]:
        """Settings, counts and timing, for a report; counts are of what `on_too_few` leaves."""
        found, left = (self.rows >= 0).sum(axis=1), self.kept(on_too_few)
        full = found == self.rules.num_negatives
        pairs = np.array(self.data.pair_counts)
        negative = self.scores[self.rows >= 0]
        return {
            "data": self.data.record,
            "search": self.search,
            "rules": {**asdict(self.rules), "range_max": self.rules.depth},
            "on_too_few": on_too_few,
            "queries": len(found),
            "queries_with_fewer": int((~full & (found > 0)).sum()),
            "queries_with_none": int((found == 0).sum()),
            "queries_kept": int(left.sum()),
            "pairs": int(pairs.sum()),
            "pairs_kept": int(pairs[left].sum()),
            "negatives_kept": int(found[left].sum()),
            "mean_positive_score": float(np.concatenate(self.positive_scores).mean()),
            "mean_negative_score": float(negative.mean()) if len(negative) else None,
            "statistics": self.statistics,
        }


def mine_hard_negatives(
    data: Any,
    model: Any = None,
    *,
    method: str = "dense",
    cross_encoder: Any = None,
    similarity: Literal["cos", "dot"] | None = None,
    index: str = "Flat",
    index_parameters: str | None = None,
    batch_size: int = 32,
    autocast_dtype: str | None = None,
    bm25_k1: float = 0.9,
    bm25_b: float = 0.4,
    show_progress: bool = True,
    **rules: Any,
) -> MinedNegatives:
    """Find for each query of training data passages that score high and are not known to be relevant.

    A model in training may be asked too: it is back in its mode afterwards; its weights and the random state stay as
    they are, and no file is written.

    Args:
        data: a `MiningData`, or what `load_mining_data` takes.
        model: a SentenceTransformer, or an object with `encode_queries` and `encode_corpus` as BEIR calls them; None
            for BM25.
        method: "dense", or "bm25" where there is no model yet that is worth asking.
        cross_encoder: a sentence-transformers CrossEncoder with one output; `cross_encoder_margin` is 3.0 then, if it
            is not given.
        similarity: "cos" or "dot"; None is the model's own.
        index, index_parameters: see `build_index`.
        batch_size, autocast_dtype: see `encode_texts`.
        bm25_k1, bm25_b: see `BM25Index`.
        rules: fields of `SelectionRules`, by name.

    Raises:
        ConfigError: settings that cannot work, before anything is encoded.
        DataError: data that cannot be used, or no negative for any query.
        UserError: a model that gives NaN or infinity.
    """
    if cross_encoder is not None:
        rules = {"cross_encoder_margin": 3.0, **rules}
    checked = SelectionRules(**rules)
    check_settings(checked, method, model is not None, cross_encoder is not None, bm25_k1, bm25_b)
    if not isinstance(data, MiningData):
        data = load_mining_data(data)
    k = min(checked.depth + max(map(len, data.excluded)), data.pool_size)
    if method == "bm25":
        search: dict[str, Any] = {"method": "bm25", "k1": bm25_k1, "b": bm25_b}
        found = _search_bm25(data, k, bm25_k1, bm25_b, show_progress)
    else:
        encoding = (batch_size, autocast_dtype, show_progress)
        search, found = _search_dense(data, model, k, similarity, index, index_parameters, encoding)
    scores, rows, positive_scores = found
    for number, out in enumerate(data.excluded):
        scores[number, np.isin(rows[number], out)] = -np.inf
    lowest = np.array([values.min() for values in positive_scores], dtype=np.float32)
    chosen, statistics = _choose(scores, lowest, checked, cross_encoder is not None)
    second = None
    if cross_encoder is not None:
        seed = checked.seed if checked.sampling == "random" else None
        margin = checked.cross_encoder_margin or 0.0
        settings = (checked.num_negatives, margin, seed, batch_size)
        chosen, second = second_opinion(data, rows, chosen, cross_encoder, *settings)
    if not (chosen >= 0).any():
        what = "loosen the rules, raise range_max, or give a larger corpus"
        raise DataError(f"{data.record['path']}: no query has a negative left ({what})")
    there = chosen >= 0
    mined_rows = np.where(there, np.take_along_axis(rows, np.maximum(chosen, 0), axis=1), -1)
    mined_scores = np.where(there, np.take_along_axis(scores, np.maximum(chosen, 0), axis=1), -np.inf)
    return MinedNegatives(data, checked, mined_rows, mined_scores, positive_scores, second, statistics, search)


def check_settings(
    rules: SelectionRules,
    method: str,
    has_model: bool,
    has_cross_encoder: bool,
    bm25_k1: float = 0.9,
    bm25_b: float = 0.4,
) -> None:
    """Raise `ConfigError` for settings that cannot work together; cheap, before data or models are loaded."""
    rules.check()
    check_choice("method", method, METHODS)
    if has_model != (method == "dense"):
        mend = "method bm25 uses no MODEL: leave it out" if has_model else "method dense needs a MODEL (or use bm25)"
        raise ConfigError(mend)
    if has_cross_encoder != (rules.cross_encoder_margin is not None):
        raise ConfigError("cross_encoder and cross_encoder_margin need each other: give both or neither")
    if method == "bm25":
        check_bm25(bm25_k1, bm25_b)


# Candidates ----------------------------------------------------------------------------------------------------------

# Scores float32 and rows int64 (Q, k), best first, row -1 for none; and the scores of each query's positives.
_Found = tuple[np.ndarray, np.ndarray, list[np.ndarray]]


def _search_dense(
    data: MiningData,
    model: Any,
    k: int,
    similarity: Literal["cos", "dot"] | None,
    index: str,
    index_parameters: str | None,
    encoding: tuple[int, str | None, bool],
) -> tuple[dict[str, Any], _Found]:
    """The settings that were used, and what a model and FAISS find."""
    from contaccum.retrieval.encode import encode_corpus, encode_queries
    from contaccum.retrieval.exact import prepared
    from contaccum.retrieval.index import build_index, check_factory, search
    from contaccum.retrieval.searcher import FaissSearcher

    metric = FaissSearcher(model).metric(similarity)
    if hasattr(model, "get_embedding_dimension"):
        check_factory(index, model.get_embedding_dimension(), data.pool_size, metric, index_parameters)
    documents = [{"title": document.title, "text": document.text} for document in data.documents]
    passages, queries = encode_corpus(model, documents, *encoding), encode_queries(model, data.queries, *encoding)
    built = build_index(passages[: data.pool_size], index, metric, parameters=index_parameters)
    scores, rows = search(built, queries, k)
    queries, _ = prepared(queries, metric, "query embedding")
    positives = [
        prepared(passages[of_query], metric, "document embedding")[0] @ queries[number]
        for number, of_query in enumerate(data.positives)
    ]
    about = {"similarity": metric, "index": built.factory, "index_parameters": built.parameters, "gpus": built.gpus}
    about |= {"precision": encoding[1] or "float32", "dimension": built.dimension}
    return {"method": "dense", **about}, (scores, rows, positives)


def _search_bm25(data: MiningData, k: int, k1: float, b: float, show_progress: bool) -> _Found:
    """What BM25 finds. Positives from outside the pool are part of its statistics, so that they have a score."""
    from tqdm.auto import tqdm

    index = BM25Index([d.passage for d in data.documents], data.record["path"], k1, b, show_progress)
    scores = np.full((len(data.queries), k), -np.inf, dtype=np.float32)
    rows: np.ndarray = np.full(scores.shape, -1, dtype=np.int64)
    positives = []
    for number, query in enumerate(tqdm(data.queries, desc="Searching", disable=not show_progress)):
        of_all = index.scores(query)
        of_all = np.zeros(len(data.documents), dtype=np.float32) if of_all is None else of_all
        positives.append(of_all[data.positives[number]])
        best = best_rows(of_all[: data.pool_size], k)
        rows[number, : len(best)], scores[number, : len(best)] = best, of_all[best]
    return scores, rows, positives


# Selection -----------------------------------------------------------------------------------------------------------


class _FoundAlready:
    """What sentence-transformers' miner asks of a model, answered with candidates that were found already.

    It is given names instead of texts: query "3", and passage "7" for the candidate at place 7 of whichever query. Its
    one positive per query stands for the lowest of all, and is no candidate.
    """

    def __init__(self, scores: np.ndarray, lowest: np.ndarray) -> None:
        import torch

        self.device, self.scores, self.lowest = torch.device("cpu"), scores, lowest

    def encode_query(self, names: list[str], **settings: Any) -> np.ndarray:
        return np.array(names, dtype=np.int64)[:, None]

    def encode_document(self, names: list[str], **settings: Any) -> np.ndarray:
        return np.zeros((len(names), 1))

    def similarity(self, queries: np.ndarray, passages: Any) -> Any:
        import torch

        return torch.from_numpy(np.pad(self.scores[queries[:, 0]], ((0, 0), (0, 1)), constant_values=-np.inf))

    def similarity_pairwise(self, queries: np.ndarray, passages: Any) -> Any:
        import torch

        return torch.from_numpy(self.lowest[queries[:, 0]])


def _choose(
    scores: np.ndarray, lowest: np.ndarray, rules: SelectionRules, all_of_them: bool
) -> tuple[np.ndarray, list[str]]:
    """Places of the negatives among candidates (Q, k), best first, -1 for none, and the miner's statistics.

    Args:
        scores: (Q, k), -inf for what may not be a negative.
        lowest: (Q,), of each query's positives.
        all_of_them: give all that pass the rules, in order, for somebody else to choose from.
    """
    from datasets import Dataset
    from sentence_transformers.util import mine_hard_negatives as miner

    count, width = scores.shape
    # Its own bound on ranks makes room for positives, and lets in as many candidates more.
    scores = np.where(np.cumsum(scores > -np.inf, axis=1) <= rules.depth, scores, -np.inf)
    range_max = min(rules.depth, max(width, rules.range_min + rules.num_negatives))
    wanted = range_max - rules.range_min if all_of_them else rules.num_negatives
    names = ("range_min", "absolute_margin", "relative_margin", "max_score", "min_score")
    settings = {name: getattr(rules, name) for name in names}
    said, random_state = io.StringIO(), random.getstate()
    random.seed(rules.seed)
    try:
        # It prints its statistics, and shows bars that cannot be turned off, for what takes a moment.
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(io.StringIO()):
            mined = miner(
                Dataset.from_dict({"query": list(map(str, range(count))), "positive": ["positive"] * count}),
                _FoundAlready(scores, lowest),  # type: ignore[arg-type]  # all of a model that it asks for
                corpus=list(map(str, range(width))),
                num_negatives=wanted,
                range_max=range_max,
                sampling_strategy="top" if all_of_them else rules.sampling,
                output_format="labeled-list",
                output_scores=True,
                verbose=count * wanted < _STATISTICS_OF,
                **settings,
            )
    finally:
        random.setstate(random_state)
    places: np.ndarray = np.full((count, wanted), -1, dtype=np.int64)
    for query, passages in zip(mined["query"], mined["positive"], strict=True):
        places[int(query), : len(passages) - 1] = np.array(passages[1:], dtype=np.int64)
    return places, [line for line in said.getvalue().splitlines() if line.strip()]
