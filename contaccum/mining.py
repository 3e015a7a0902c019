"""Selection rules: which candidates of a query become its hard negatives.

The rules and their names are those of sentence-transformers' `mine_hard_negatives`, with a margin
for a cross-encoder besides. docs/mining.md explains them.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from tqdm.auto import tqdm

from contaccum.data import (
    BeirDataset,
    Passage,
    RecordReport,
    load_beir_folder,
    read_passages,
)
from contaccum.data.beir import OUTSIDE_CORPUS
from contaccum.data.near_duplicates import normalise
from contaccum.data.readers import Source
from contaccum.data.records import Fault, parse_text
from contaccum.errors import ConfigError, DataError, UserError, check_choice
from contaccum.files import AnyPath, Fingerprint, require_writable, write_json, write_text
from contaccum.retrieval.bm25 import bm25_scores
from contaccum.retrieval.encode import Similarity, encode_texts, get_similarity
from contaccum.retrieval.search import build_index, prepare_vectors, search

SAMPLING = ("top", "random")

_CANDIDATES_PER_NEGATIVE = 10
"""Number of candidates per negative that are ranked if a rule may drop some of them. It is the
number of sentence-transformers."""


def _define_rule(
    default: Any, help_text: str, value_type: type = float, choices: Sequence[str] | None = None
) -> Any:
    """Return a dataclass field whose metadata are the keyword arguments of its CLI option."""
    metadata = {"type": value_type, "help": help_text}
    if choices is not None:
        return field(default=default, metadata={**metadata, "choices": choices})
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class SelectionRules:
    """Rules that a candidate must pass to become a hard negative of its query.

    In the help texts, p is the lowest score of the query's positives. A candidate with a score
    close to p may be relevant although nobody judged it, and the margins drop such candidates.

    If `range_max` is None, it is `range_min` + `num_negatives`; with a rule that may drop
    candidates, or with random sampling, it is `range_min` + 10 `num_negatives`.
    """

    num_negatives: int = _define_rule(3, "number of negatives per query", int)
    range_min: int = _define_rule(
        0, "number of the best candidates to skip, after the score rules", int
    )
    range_max: int | None = _define_rule(
        None, "rank of the last candidate; known positives are not counted in the rank", int
    )
    absolute_margin: float | None = _define_rule(
        None,
        "keep candidates with a score of at most p - margin; p is the lowest score of the query's "
        "positives",
    )
    relative_margin: float | None = _define_rule(
        None, "keep candidates with a score of at most p - margin * abs(p)"
    )
    max_score: float | None = _define_rule(None, "keep candidates with at most this score")
    min_score: float | None = _define_rule(None, "keep candidates with at least this score")
    cross_encoder_margin: float | None = _define_rule(
        None,
        "keep candidates whose cross-encoder logit is at least this far below p; "
        "3.0 with --cross_encoder",
    )
    sampling: Literal["top", "random"] = _define_rule(
        "top", "use the best candidates, or a random choice of them", str, choices=SAMPLING
    )
    seed: int = _define_rule(0, "seed of the random sampling", int)

    def check(self, has_cross_encoder: bool) -> None:
        """Raise `ConfigError` for settings that cannot work together.

        The check is cheap. Call it before data or models are loaded.
        """
        check_choice("sampling", self.sampling, SAMPLING)
        least_range_max = self.range_min + self.num_negatives
        if self.range_max is not None and self.range_max < least_range_max:
            raise ConfigError(
                f"range_max={self.range_max} leaves too few candidates: "
                f"raise it to {least_range_max} or more"
            )
        if self.relative_margin is not None and not 0 <= self.relative_margin <= 1:
            raise ConfigError(f"relative_margin={self.relative_margin} must be between 0 and 1")
        if self.cross_encoder_margin is not None and not has_cross_encoder:
            raise ConfigError(
                "cross_encoder_margin needs a cross_encoder: give both, or leave it out"
            )

    @property
    def depth(self) -> int:
        """Number of candidates per query that the rules are applied to, the best of the ranking.

        Known positives are not counted.
        """
        if self.range_max is not None:
            return self.range_max
        rules_that_drop_none = SelectionRules(self.num_negatives, self.range_min, seed=self.seed)
        if self == rules_that_drop_none:
            return self.range_min + self.num_negatives
        return self.range_min + _CANDIDATES_PER_NEGATIVE * self.num_negatives


def select_candidates(
    scores: np.ndarray,
    lowest_positive_score: np.float32,
    rules: SelectionRules,
    rng: np.random.Generator,
) -> np.ndarray:
    """Return the positions of the candidates that pass the rules, those to use first at the start.

    Args:
        scores: the candidates' scores, float32 (c,), in descending order.
        lowest_positive_score: the lowest score of the query's positives.
        rules: the rules; the rule for a cross-encoder is not applied here.
        rng: a random generator, for random sampling.
    """
    highest: float | np.floating = np.inf if rules.max_score is None else rules.max_score
    if rules.absolute_margin is not None:
        highest = min(highest, lowest_positive_score - np.float32(rules.absolute_margin))
    if rules.relative_margin is not None:
        margin = np.abs(lowest_positive_score) * np.float32(rules.relative_margin)
        highest = min(highest, lowest_positive_score - margin)
    has_allowed_score = scores <= highest
    if rules.min_score is not None:
        has_allowed_score &= scores >= rules.min_score
    positions = np.flatnonzero(has_allowed_score)[rules.range_min :]
    if rules.sampling == "random":
        return rng.permutation(positions)
    return positions


# Cross-encoders: a second score for candidates that have passed the other selection rules ---------

# A cross-encoder reads query and passage together. Its scores are better than those of the search,
# and show more often that a candidate is a relevant passage which was not judged.


class Reranking(NamedTuple):
    """The candidates of a query whose cross-encoder scores are low enough for negatives.

    Attributes:
        positions: positions of these candidates among all candidates, int64 (c,).
        scores: their logits, float32 (c,).
        positive_scores: logits of the query's positives, float32 (p,).
    """

    positions: np.ndarray
    scores: np.ndarray
    positive_scores: np.ndarray


@dataclass(frozen=True)
class CandidateFilter:
    """A filter that drops candidates which a cross-encoder scores too close to the positives.

    Scores are logits, because a distance such as 3 has no meaning for scores between 0 and 1.

    Attributes:
        cross_encoder: a sentence-transformers CrossEncoder.
        margin: a candidate is kept if its logit is at least this much below the lowest logit of the
            query's positives.
        num_negatives: number of candidates that are needed. When so many are kept, the next
            candidates are not scored.
        batch_size: largest number of text pairs that the cross-encoder scores at once. They are
            pairs of one query, with at most ``num_negatives`` candidates.
    """

    cross_encoder: Any
    margin: float
    num_negatives: int
    batch_size: int

    def apply(self, query: str, positives: list[str], candidates: list[str]) -> Reranking:
        """Score candidates in their order, in groups, until at least `num_negatives` are kept.

        Args:
            query: text of the query.
            positives: texts of its known positives.
            candidates: texts of the candidates, in the order of preference.
        """
        positive_scores = self._score(query, positives)
        highest = positive_scores.min() - self.margin
        positions: list[int] = []
        kept_scores: list[float] = []
        for start in range(0, len(candidates), self.num_negatives):
            if len(positions) >= self.num_negatives:
                break
            scores = self._score(query, candidates[start : start + self.num_negatives])
            for offset in np.flatnonzero(scores <= highest).tolist():
                positions.append(start + offset)
                kept_scores.append(float(scores[offset]))
        return Reranking(
            np.array(positions, dtype=np.int64),
            np.array(kept_scores, dtype=np.float32),
            positive_scores,
        )

    def _score(self, query: str, passages: list[str]) -> np.ndarray:
        """Return the logits of a query with some passages."""
        return self.cross_encoder.predict(
            [(query, passage) for passage in passages],
            batch_size=self.batch_size,
            activation_fn=torch.nn.Identity(),
            show_progress_bar=False,
        )


def load_cross_encoder(
    name: str, device: str | None = None, trust_remote_code: bool = False
) -> Any:
    """Load a sentence-transformers CrossEncoder.

    Args:
        name: a folder, or a name on the model hub.
        device: where the model runs, such as "cuda:1"; None: a GPU if there is one.
        trust_remote_code: True to run code that comes with the model.

    Raises:
        UserError: for a model that cannot be loaded, or was not trained to give one score.
    """
    from sentence_transformers import CrossEncoder

    from contaccum.encoders.loading import loading

    with loading(name, trust_remote_code) as path:
        cross_encoder = CrossEncoder(path, device=device, trust_remote_code=trust_remote_code)
    config = cross_encoder.model.config
    # sentence-transformers adds a random head to an encoder without a classification head, and its
    # scores are noise. The architecture of a model with a head has this name.
    has_trained_head = any(
        architecture.endswith("ForSequenceClassification")
        for architecture in config.architectures or []
    )
    if config.num_labels != 1 or not has_trained_head:
        raise UserError(
            f"{name}: is not a cross-encoder that was trained to give a pair of texts one score "
            "(name a reranker, such as cross-encoder/ms-marco-MiniLM-L6-v2)"
        )
    return cross_encoder


# Data to mine in: queries, their known positives, and the passages that may become negatives ------

# Texts that are equal after `normalise` count as one passage, whatever their ids. Otherwise a copy
# of a positive could be mined as a negative.


JsonObject = dict[str, Any]
"""A JSON object of a report."""


@dataclass(frozen=True)
class MiningData:
    """Q queries with their known positives, and the passages that are searched for negatives.

    A passage is named by its row in `documents`.

    Attributes:
        query_ids: ids of the queries, (Q,).
        queries: texts of the queries, (Q,).
        documents: distinct passages. The first `pool_size` are the pool, the candidates for
            negatives; the rest are positives that are not in the pool.
        pool_size: number of passages in the pool.
        positives: for each query the rows of its known positives: first the positives of its own
            records, then all other positives that the data have for the same query text.
        record_positives: for each query and each of its own records the rows of the record's
            positives, for example [[0, 4], [2]] for a query with two records. Equal records are
            kept once. Each judgement of a BEIR folder counts as a record.
        excluded: for each query the pool rows that must not become its negatives, because they are
            a known positive, share a text or id with one, or repeat the query.
        record: path, format, fingerprint and counts of the data, for reports.
    """

    query_ids: list[str]
    queries: list[str]
    documents: list[Passage]
    pool_size: int
    positives: list[list[int]]
    record_positives: list[list[list[int]]]
    excluded: list[list[int]]
    record: JsonObject = field(repr=False, compare=False)


class _JudgedQuery(NamedTuple):
    """A query and its relevant passages, from one record of the source."""

    query_id: str | None
    text: str
    positives: list[Passage]


@dataclass
class _KnownPositives:
    """The positives of all queries of a source.

    Attributes:
        of_records: the positives of each record of a query, by the query's id and text.
        of_text: all positives of the queries with the same text key; see `_compute_text_key`.
    """

    of_records: dict[tuple[str | None, str], list[list[Passage]]]
    of_text: dict[bytes, list[Passage]]

    def iter_passages(self) -> Iterator[Passage]:
        """Yield the positives of all queries."""
        return chain.from_iterable(self.of_text.values())


def load_mining_data(
    source: AnyPath | Iterable[Mapping[str, Any]],
    corpus: AnyPath | None = None,
    *,
    data_format: Any = None,
    split: str = "train",
    on_bad_record: Literal["stop", "skip"] = "stop",
    columns: Mapping[str, str] | None = None,
    min_score: float | None = None,
) -> MiningData:
    """Load queries with their known positives, and the passages that are searched for negatives.

    The searched passages, the pool, are the passages of `corpus`. Without `corpus`, the pool is the
    whole corpus of a BEIR folder, or the distinct positives of other data. Negatives that the data
    list are not added to the pool.

    Args:
        source: training data in any format that `read_records` reads; or records in memory, each a
            mapping with "query" (a text) and "positive" (a text, or a list of texts).
        corpus: a file of passages, or a BEIR folder, as `read_passages` reads them.
        data_format, split, columns, min_score: see `read_records`.
        on_bad_record: "stop" raises an error at the first bad record, "skip" counts it.

    Raises:
        ConfigError: for an unknown format, or settings that the format does not have.
        DataError: for data that cannot be read, no query with a positive, or an empty pool.
    """
    report = RecordReport(on_bad_record)
    pool: list[Passage] | None = None
    record: JsonObject = {"path": "records", "format": "records"}
    record["corpus"] = None if corpus is None else str(corpus)
    queries: Iterable[_JudgedQuery]
    if not isinstance(source, (str, os.PathLike)):
        queries = _iter_queries_in_memory(source)
    else:
        training_source = Source(source, data_format, split, columns, min_score=min_score)
        record["path"] = str(source)
        record["format"] = training_source.data_format
        record["split"] = split
        if record["format"] == "beir":
            dataset = load_beir_folder(training_source.path, split, report=report)
            num_missing = len(dataset.list_missing_documents())
            report.leave_out(training_source.path, OUTSIDE_CORPUS, num_missing)
            passages = {}
            for document_id, document in dataset.corpus.items():
                passages[document_id] = Passage(document_id, **document)
            pool = _drop_blank_passages(passages.values())
            queries = _iter_beir_queries(dataset, passages)
        else:
            queries = (
                _JudgedQuery(None, row.query, _make_passages(row.positives))
                for row in training_source.records(report)
            )
    content = Fingerprint()
    # By default, training makes a row of each judgement of a BEIR folder, and a row of each record
    # of other formats (`positives` in docs/data.md). Training on mined data makes the same rows.
    one_record_per_positive = record["format"] == "beir"
    known_positives = _collect_positives(queries, one_record_per_positive, content)
    if corpus is not None:
        pool = _drop_blank_passages(read_passages(corpus, report, may_be_blank=True))
    for passage in pool or ():
        content.add(*passage)
    record["records"] = report.summary()
    record["fingerprint"] = content.hex()
    return _build_mining_data(known_positives, pool, record)


def _drop_blank_passages(passages: Iterable[Passage]) -> list[Passage]:
    """Drop the passages without title and text, which published sets have."""
    return [passage for passage in passages if passage.passage]


def _iter_queries_in_memory(records: Iterable[Mapping[str, Any]]) -> Iterator[_JudgedQuery]:
    for number, record in enumerate(records):
        positive = record.get("positive")
        texts: Sequence[Any] = [positive]
        if isinstance(positive, Sequence) and not isinstance(positive, str):
            texts = positive
        try:
            query = parse_text(record.get("query"), "query")
            passages = _make_passages([parse_text(text, "positive") for text in texts])
        except Fault as fault:
            raise DataError(f"record {number}: {fault} (correct the record)") from fault
        yield _JudgedQuery(None, query, passages)


def _iter_beir_queries(
    dataset: BeirDataset, passages: Mapping[str, Passage]
) -> Iterator[_JudgedQuery]:
    for query_id, judgements in dataset.qrels.items():
        relevant_ids = [name for name, grade in judgements.items() if grade > 0]
        positives = [passages[name] for name in relevant_ids if name in passages]
        yield _JudgedQuery(query_id, dataset.queries[query_id], positives)


def _make_passages(texts: Iterable[str]) -> list[Passage]:
    """Return texts without ids as passages whose ids are hashes of the texts."""
    passages = []
    for text in texts:
        hash_prefix = _compute_text_key(text).hex()[:16]
        passages.append(Passage(f"passage-{hash_prefix}", "", text))
    return passages


def _collect_positives(
    queries: Iterable[_JudgedQuery], one_record_per_positive: bool, content: Fingerprint
) -> _KnownPositives:
    """Collect the positives of all queries.

    Args:
        queries: records of the source.
        one_record_per_positive: True to make a record of each positive.
        content: a fingerprint, to which all texts are added.
    """
    collected = _KnownPositives(of_records=defaultdict(list), of_text=defaultdict(list))
    for query in queries:
        # Some of BEIR's published sets judge empty documents as relevant.
        positives = [passage for passage in query.positives if passage.passage]
        if not positives:
            continue
        records = [positives]
        if one_record_per_positive:
            records = [[passage] for passage in positives]
        collected.of_records[query.query_id, query.text] += records
        collected.of_text[_compute_text_key(query.text)] += positives
        content.add(query.text, *(passage.passage for passage in positives))
    return collected


def _build_mining_data(
    known_positives: _KnownPositives, pool: list[Passage] | None, record: JsonObject
) -> MiningData:
    """Give each distinct passage a row, and find the excluded rows of each query.

    Args:
        known_positives: the positives of all queries.
        pool: passages to search; None: the known positives.
        record: a description of the data, to which counts are added.

    Raises:
        DataError: if there is no query with a positive, or no passage to search.
    """
    documents: dict[bytes, Passage] = {}
    searched_passages = known_positives.iter_passages() if pool is None else pool
    for passage in searched_passages:
        documents.setdefault(_compute_text_key(passage.passage), passage)
    pool_size = len(documents)
    if pool_size == 0:
        raise DataError(f"{record['path']}: no passage is left to mine in (correct the data)")
    if not known_positives.of_records:
        raise DataError(f"{record['path']}: no query has a positive (correct the data)")
    excluded_by_query = _find_excluded_rows(list(documents.values()), known_positives)
    for passage in known_positives.iter_passages():
        documents.setdefault(_compute_text_key(passage.passage), passage)
    row_by_text = {text_key: row for row, text_key in enumerate(documents)}

    data = MiningData([], [], list(documents.values()), pool_size, [], [], [], record)
    num_pairs = 0
    for number, (query, records) in enumerate(known_positives.of_records.items()):
        query_id, text = query
        text_key = _compute_text_key(text)
        own_positives = list(chain.from_iterable(records))
        all_positives = [*own_positives, *known_positives.of_text[text_key]]
        data.query_ids.append(query_id or f"query-{number}")
        data.queries.append(text)
        data.positives.append(_find_rows(all_positives, row_by_text))
        data.record_positives.append(_find_rows_of_records(records, row_by_text))
        data.excluded.append(sorted(excluded_by_query[text_key]))
        num_pairs += len(_find_rows(own_positives, row_by_text))
    record["queries"] = len(data.queries)
    record["pairs"] = num_pairs
    record["passages"] = pool_size
    return data


def _find_excluded_rows(
    pool: list[Passage], known_positives: _KnownPositives
) -> dict[bytes, set[int]]:
    """Return, for each text key of a query, the pool rows that must not become its negatives."""
    keys_by_query: dict[bytes, set[bytes | str]] = {}
    for query_key, positives in known_positives.of_text.items():
        keys: set[bytes | str] = {query_key}
        for passage in positives:
            keys.update(_compute_copy_keys(passage))
        keys_by_query[query_key] = keys
    # A table of the keys of all passages would take much memory for a large corpus. Only the keys
    # of queries and known positives are needed.
    needed_keys = set().union(*keys_by_query.values())
    rows_by_key: dict[bytes | str, list[int]] = defaultdict(list)
    for row, passage in enumerate(pool):
        for key in needed_keys.intersection(_compute_copy_keys(passage)):
            rows_by_key[key].append(row)

    excluded_by_query = {}
    for query_key, keys in keys_by_query.items():
        excluded: set[int] = set()
        for key in keys:
            excluded.update(rows_by_key[key])
        excluded_by_query[query_key] = excluded
    return excluded_by_query


def _find_rows(passages: Iterable[Passage], row_by_text: Mapping[bytes, int]) -> list[int]:
    """Return the distinct rows of some passages, in their order."""
    rows = [row_by_text[_compute_text_key(passage.passage)] for passage in passages]
    return list(dict.fromkeys(rows))


def _find_rows_of_records(
    records: Iterable[list[Passage]], row_by_text: Mapping[bytes, int]
) -> list[list[int]]:
    """Return the rows of each record's positives, without records that are equal to others."""
    distinct_records = {}
    for positives in records:
        rows = _find_rows(positives, row_by_text)
        distinct_records[tuple(rows)] = rows
    return list(distinct_records.values())


def _compute_text_key(text: str) -> bytes:
    """Return a hash that is equal for texts that are equal after `normalise`."""
    return hashlib.blake2b(normalise(text).encode(), digest_size=16).digest()


def _compute_copy_keys(passage: Passage) -> list[bytes | str]:
    """Return the keys of a passage; a passage that shares one of them counts as its copy.

    The keys are the id, the text with its title, and the text alone: another document may hold the
    same text under another title.
    """
    keys: list[bytes | str] = [passage.id]
    for text in (passage.passage, passage.text):
        if text.strip():
            keys.append(_compute_text_key(text))
    return keys


# Mining: rank the passages for each query, and select hard negatives among the best of them -------

# The steps for a query are:
#
# 1. Rank the passages of the pool by the model's similarity or by BM25.
# 2. Drop the passages that are known to be relevant (`MiningData.excluded`). The rest are
#    candidates.
# 3. Drop candidates by the selection rules, such as a score too close to that of a positive.
# 4. Drop candidates that a cross-encoder, if there is one, scores too close to the positives.
# 5. Use the first `num_negatives` of the remaining candidates.
#
# A passage is named by its row in `MiningData.documents`.


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


# Files of mined negatives, in the formats that training data are read from, and their reports -----


OUTPUT_FORMATS = ("pairs", "dpr", "tevatron", "ntuples")


class _ScoredPassage(NamedTuple):
    passage: Passage
    score: float


class _MinedQuery(NamedTuple):
    """A query with its known positives and mined negatives.

    Attributes:
        query_id: id of the query.
        text: text of the query.
        positives: all known positives, also those of other queries with the same text.
        record_positives: the positives of each of the query's own records.
        negatives: the mined negatives, best first.
        has_all_negatives: True if no negative is missing.
    """

    query_id: str
    text: str
    positives: list[_ScoredPassage]
    record_positives: list[list[_ScoredPassage]]
    negatives: list[_ScoredPassage]
    has_all_negatives: bool


def write_mined(
    mined: MinedNegatives,
    path: AnyPath,
    output_format: str = "pairs",
    report: JsonObject | None = None,
) -> tuple[Path, Path]:
    """Write negatives to `path`, and a report to `path` + ".report.json".

    A file is written completely or not at all. "pairs" has a record for each record of the data,
    with all its positives; "ntuples" a record for each pair of query and positive; "dpr" and
    "tevatron" a record for each query with all its known positives. docs/mining.md lists the
    fields. Queries with too few negatives are written with the negatives they have, but "ntuples"
    leaves them out.

    Args:
        mined: the negatives.
        path: a file that does not exist.
        output_format: one of `OUTPUT_FORMATS`.
        report: entries for the report, besides `mined.record()`.

    Returns:
        The path of the negatives and the path of the report.

    Raises:
        UserError: see `check_output`.
        DataError: if there is no record to write.
    """
    path = check_output(path, output_format)
    format_records = _FORMATTERS[output_format]
    if output_format == "pairs" and not _has_several_positives(mined):
        format_records = _format_single_pairs
    lines = _format_lines(mined, format_records)
    first_line = next(lines, None)
    if first_line is None:
        num_negatives = mined.rows.shape[1]
        raise DataError(f"{path}: no query has {num_negatives} negatives (lower num_negatives)")
    if output_format == "dpr":
        parts = chain(["[\n", first_line], (f",\n{line}" for line in lines), ["\n]\n"])
    else:
        parts = chain([first_line], (f"\n{line}" for line in lines), ["\n"])
    write_text(path, parts)
    report_path = _get_report_path(path)
    write_json(report_path, {**(report or {}), "output_format": output_format, **mined.record()})
    return path, report_path


def _format_lines(
    mined: MinedNegatives, format_records: Callable[[_MinedQuery], Iterable[JsonObject]]
) -> Iterator[str]:
    """Yield the records of all queries as JSON, one in memory at a time."""
    for query in range(len(mined.rows)):
        for record in format_records(_collect_query(mined, query)):
            yield json.dumps(record, ensure_ascii=False)


def check_output(path: AnyPath, output_format: str) -> Path:
    """Check that negatives can be written to `path`, and make its folder; return the path.

    Raises:
        UserError: for an unknown format, a file or report that exists, or a folder that is not
            writable.
    """
    path = Path(path)
    check_choice("output_format", output_format, OUTPUT_FORMATS)
    require_writable(path)
    for file in (path, _get_report_path(path)):
        if file.exists():
            raise ConfigError(f"{file}: exists already (name another file, or remove it)")
    return path


def _get_report_path(path: Path) -> Path:
    return Path(f"{path}.report.json")


def _collect_query(mined: MinedNegatives, query: int) -> _MinedQuery:
    """Return a query, by its number, with its passages and their scores."""
    data = mined.data
    has_negative = mined.rows[query] >= 0

    def make_scored(rows: Iterable[int], scores: Iterable[float]) -> list[_ScoredPassage]:
        pairs = zip(rows, scores, strict=True)
        return [_ScoredPassage(data.documents[row], score) for row, score in pairs]

    positives = make_scored(data.positives[query], mined.positive_scores[query].tolist())
    positive_by_row = dict(zip(data.positives[query], positives, strict=True))
    record_positives = []
    for rows in data.record_positives[query]:
        record_positives.append([positive_by_row[row] for row in rows])
    return _MinedQuery(
        query_id=data.query_ids[query],
        text=data.queries[query],
        positives=positives,
        record_positives=record_positives,
        negatives=make_scored(
            mined.rows[query][has_negative].tolist(), mined.scores[query][has_negative].tolist()
        ),
        has_all_negatives=bool(has_negative.all()),
    )


def _format_dpr(query: _MinedQuery) -> list[JsonObject]:
    """Return the record of a query in DPR's format."""
    record = {
        "question": query.text,
        "answers": [],
        "positive_ctxs": _format_passages(query.positives, "passage_id"),
        "negative_ctxs": [],
        "hard_negative_ctxs": _format_passages(query.negatives, "passage_id"),
    }
    return [record]


def _format_tevatron(query: _MinedQuery) -> list[JsonObject]:
    """Return the record of a query in Tevatron's format."""
    record = {
        "query_id": query.query_id,
        "query": query.text,
        "positive_passages": _format_passages(query.positives, "docid"),
        "negative_passages": _format_passages(query.negatives, "docid"),
    }
    return [record]


def _format_passages(passages: list[_ScoredPassage], id_field: str) -> list[JsonObject]:
    records = []
    for passage, score in passages:
        record = {id_field: passage.id, "title": passage.title, "text": passage.text}
        records.append({**record, "score": score})
    return records


def _has_several_positives(mined: MinedNegatives) -> bool:
    """Return True if any record of the data has several positives."""
    records = chain.from_iterable(mined.data.record_positives)
    return any(len(rows) > 1 for rows in records)


def _format_pairs(query: _MinedQuery) -> list[JsonObject]:
    """Return a record for each record of a query, with lists of passages and scores."""
    records = []
    for positives in query.record_positives:
        record = {
            "query": query.text,
            "positive": [positive.passage.passage for positive in positives],
            "negatives": [negative.passage.passage for negative in query.negatives],
            "positive_score": [positive.score for positive in positives],
            "negative_scores": [negative.score for negative in query.negatives],
        }
        records.append(record)
    return records


def _format_single_pairs(query: _MinedQuery) -> list[JsonObject]:
    """Return the records of `_format_pairs` with one positive each, which is no list.

    A file has either only lists or no lists, so that each of its columns has one type.
    """
    records = _format_pairs(query)
    for record in records:
        [record["positive"]] = record["positive"]
        [record["positive_score"]] = record["positive_score"]
    return records


def _format_ntuples(query: _MinedQuery) -> list[JsonObject]:
    """Return a record for each pair of a query and a positive, with a field for each negative.

    A query with too few negatives has no records: all records must have the same fields.
    """
    if not query.has_all_negatives:
        return []
    records = []
    for passage, score in dict.fromkeys(chain.from_iterable(query.record_positives)):
        record: JsonObject = {"query": query.text, "positive": passage.passage}
        for number, negative in enumerate(query.negatives, start=1):
            record[f"negative_{number}"] = negative.passage.passage
        record["scores"] = [score, *(negative.score for negative in query.negatives)]
        records.append(record)
    return records


_FORMATTERS: dict[str, Callable[[_MinedQuery], list[JsonObject]]] = {
    "pairs": _format_pairs,
    "dpr": _format_dpr,
    "tevatron": _format_tevatron,
    "ntuples": _format_ntuples,
}
