"""Mining: rank the passages for each query, and select hard negatives among the best of them.

The steps for a query are:

1. Rank the passages of the pool by the model's similarity or by BM25.
2. Drop the passages that are known to be relevant (`MiningData.excluded`). The rest are candidates.
3. Drop candidates by the selection rules, such as a score too close to that of a positive.
4. Drop candidates that a cross-encoder, if there is one, scores too close to the positives.
5. Use the first `num_negatives` of the remaining candidates.

A passage is named by its row in `MiningData.documents`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from tqdm.auto import tqdm

from contaccum.errors import DataError
from contaccum.mining.cross_encoder import CandidateFilter
from contaccum.mining.data import JsonObject, MiningData, load_mining_data
from contaccum.mining.rules import SelectionRules, select_candidates
from contaccum.retrieval.encode import Similarity, encode_texts, get_similarity
from contaccum.retrieval.exact_search import prepare_vectors
from contaccum.retrieval.index import build_index, search
from contaccum.retrieval.searcher import bm25_scores

DEFAULT_CROSS_ENCODER_MARGIN = 3.0

# Results of the queries that are searched together: about 0.8 GB. Each search reads the whole pool.
_RESULTS_PER_SEARCH = 2**26


@dataclass
class MinedNegatives:
    """The result of `mine_hard_negatives` for Q queries.

    Attributes:
        data: the queries and passages.
        settings: settings of the search, and the selection rules.
        rows: the mined negatives of each query, as rows of `data.documents`, int64
            (Q, num_negatives), in the order of the search, also with a cross-encoder; -1 for a
            missing negative.
        scores: scores of these negatives, float32 (Q, num_negatives); -inf for a missing negative.
            They are the logits of the cross-encoder, or, without one, the scores of the ranking.
        positive_scores: for each query the scores of its `data.positives`, of the same kind.
    """

    data: MiningData
    settings: JsonObject
    rows: np.ndarray
    scores: np.ndarray
    positive_scores: list[np.ndarray]

    def record(self) -> JsonObject:
        """Return settings, counts and mean scores, for a report."""
        has_negative = self.rows >= 0
        has_too_few = ~has_negative.all(axis=1)
        return {
            "data": self.data.record,
            "settings": self.settings,
            "queries_with_too_few": int(has_too_few.sum()),
            "mean_positive_score": float(np.concatenate(self.positive_scores).mean()),
            "mean_negative_score": float(self.scores[has_negative].mean()),
        }


class _Ranking(NamedTuple):
    """The k best passages of the pool for one query, including known positives.

    Attributes:
        scores: scores of the passages, float32 (k,), in descending order.
        rows: their rows in the pool, int64 (k,); -1 where the search returned fewer than k.
        positive_scores: scores of the query's known positives, float32 (p,).
    """

    scores: np.ndarray
    rows: np.ndarray
    positive_scores: np.ndarray


def mine_hard_negatives(
    data: Any,
    model: Any = None,
    *,
    cross_encoder: Any = None,
    similarity: Literal["cos", "dot"] | None = None,
    batch_size: int = 32,
    precision: str = "float32",
    show_progress: bool = True,
    **rules: Any,
) -> MinedNegatives:
    """Find hard negatives: passages that score high for a query and are not known to be relevant.

    The model may be in training: neither the model nor the random state changes. No file is
    written. The passages and, with a model, their float32 embeddings are in memory: 8.8 million
    passages of 768 dimensions need 27 GB.

    Args:
        data: a `MiningData`, or a source that `load_mining_data` reads.
        model: a SentenceTransformer; None ranks passages with BM25, which needs no model.
        cross_encoder: a CrossEncoder that scores the candidates again; see `load_cross_encoder`.
        similarity: "cos" or "dot"; None: the model's own similarity.
        batch_size, precision: see `encode_texts`.
        show_progress: True for progress bars.
        rules: fields of `SelectionRules`, by name. With a `cross_encoder`, `cross_encoder_margin`
            is 3.0 unless it is set.

    Raises:
        ConfigError: for settings that cannot work together, before anything is encoded.
        DataError: for data that cannot be used, or if no query has a negative.
        UserError: if the model's embeddings hold NaN or infinity.
    """
    if cross_encoder is not None and rules.get("cross_encoder_margin") is None:
        rules = {**rules, "cross_encoder_margin": DEFAULT_CROSS_ENCODER_MARGIN}
    selection_rules = SelectionRules(**rules)
    selection_rules.check(cross_encoder is not None)
    if not isinstance(data, MiningData):
        data = load_mining_data(data)

    depth = selection_rules.depth
    method = "bm25" if model is None else "dense"
    settings: JsonObject = {"method": method, **asdict(selection_rules)}
    settings["range_max"] = depth
    if model is None:
        rankings = _rank_by_bm25(data, depth, show_progress)
    else:
        metric = get_similarity(model, similarity)
        settings["similarity"] = metric
        settings["precision"] = precision
        encode_options = {
            "batch_size": batch_size,
            "precision": precision,
            "show_progress": show_progress,
        }
        rankings = _rank_by_model(data, model, depth, metric, encode_options)
    candidate_filter = None
    if selection_rules.cross_encoder_margin is not None:
        candidate_filter = CandidateFilter(
            cross_encoder,
            margin=selection_rules.cross_encoder_margin,
            num_negatives=selection_rules.num_negatives,
            batch_size=batch_size,
        )
    progress = tqdm(rankings, desc="Mining", total=len(data.queries), disable=not show_progress)
    mined = _select_negatives(data, settings, progress, selection_rules, candidate_filter)
    if (mined.rows < 0).all():
        raise DataError(
            f"{data.record['path']}: no query has a negative left "
            "(loosen the rules, or raise range_max)"
        )
    return mined


def _rank_by_model(
    data: MiningData, model: Any, depth: int, metric: Similarity, encode_options: dict[str, Any]
) -> Iterator[_Ranking]:
    """Yield the best passages for each query, by the similarity of embeddings.

    At least ``depth`` of them are not excluded, if the pool has so many.
    """
    texts = [document.passage for document in data.documents]
    passage_embeddings = encode_texts(model, texts, "document", **encode_options)
    query_embeddings = encode_texts(model, data.queries, "query", **encode_options)
    query_embeddings = prepare_vectors(query_embeddings, metric, "query embedding")
    index = build_index(passage_embeddings[: data.pool_size], metric=metric)
    for group, k in _group_queries(data, depth):
        scores, rows = search(index, query_embeddings[group.start : group.stop], k)
        for query, query_scores, query_rows in zip(group, scores, rows, strict=True):
            positive_embeddings = prepare_vectors(
                passage_embeddings[data.positives[query]], metric, "document embedding"
            )
            positive_scores = positive_embeddings @ query_embeddings[query]
            yield _Ranking(query_scores, query_rows, positive_scores)


def _group_queries(data: MiningData, depth: int) -> Iterator[tuple[range, int]]:
    """Yield groups of consecutive queries, each with the length k of its rankings.

    Rankings contain excluded passages too, so all rankings of a group are longer by the largest
    number of them in the group. Few queries have many, and these must not lengthen all rankings.
    """
    start = 0
    k = 0
    for query, excluded in enumerate(data.excluded):
        longer_k = max(k, min(depth + len(excluded), data.pool_size))
        if query > start and (query + 1 - start) * longer_k > _RESULTS_PER_SEARCH:
            yield range(start, query), k
            start = query
            longer_k = min(depth + len(excluded), data.pool_size)
        k = longer_k
    yield range(start, len(data.queries)), k


def _rank_by_bm25(data: MiningData, depth: int, show_progress: bool) -> Iterator[_Ranking]:
    """Yield the best passages for each query that share a word with it, by BM25.

    At least ``depth`` of them are not excluded, if there are so many.
    """
    # Positives outside the pool are included, so that they have scores too.
    texts = [document.passage for document in data.documents]
    scores_by_query = bm25_scores(texts, data.queries, show_progress)
    for query, scores in enumerate(scores_by_query):
        rows = np.flatnonzero(scores[: data.pool_size] > 0)
        order = np.argsort(-scores[rows], kind="stable")  # equal scores in the order of rows
        rows = rows[order[: depth + len(data.excluded[query])]]
        yield _Ranking(scores[rows], rows, scores[data.positives[query]])


def _select_negatives(
    data: MiningData,
    settings: JsonObject,
    rankings: Iterable[_Ranking],
    rules: SelectionRules,
    candidate_filter: CandidateFilter | None,
) -> MinedNegatives:
    """Select the negatives of each query from its ranking.

    Args:
        data: the queries and passages.
        settings: settings of the search, for the result.
        rankings: a ranking for each query, in order.
        rules: the selection rules.
        candidate_filter: the cross-encoder's filter; None: no cross-encoder.
    """
    shape = (len(data.queries), rules.num_negatives)
    mined = MinedNegatives(
        data,
        settings,
        rows=np.full(shape, -1),
        scores=np.full(shape, -np.inf, dtype=np.float32),
        positive_scores=[],
    )
    rng = np.random.default_rng(rules.seed)
    for query, ranking in enumerate(rankings):
        is_candidate = (ranking.rows >= 0) & ~np.isin(ranking.rows, data.excluded[query])
        positions = np.flatnonzero(is_candidate)[: rules.depth]  # positions in the ranking
        lowest_positive_score = ranking.positive_scores.min()
        selected = select_candidates(ranking.scores[positions], lowest_positive_score, rules, rng)
        positions = positions[selected]
        scores = ranking.scores[positions]
        positive_scores = ranking.positive_scores
        if candidate_filter is not None:
            reranking = candidate_filter.apply(
                data.queries[query],
                _get_texts(data, data.positives[query]),
                _get_texts(data, ranking.rows[positions].tolist()),
            )
            positions = positions[reranking.positions]
            scores = reranking.scores
            positive_scores = reranking.positive_scores
        mined.positive_scores.append(positive_scores)
        positions = positions[: rules.num_negatives]
        order = np.argsort(positions)  # best first again, also after random sampling
        mined.rows[query, : len(order)] = ranking.rows[positions[order]]
        mined.scores[query, : len(order)] = scores[order]
    return mined


def _get_texts(data: MiningData, rows: list[int]) -> list[str]:
    return [data.documents[row].passage for row in rows]
