"""Hard negatives: passages that score high for a query and are not known to be relevant.

`load_mining_data` reads queries, their known positives and the passages to search.
`mine_hard_negatives` takes these steps for each query:

1. Rank the passages by the similarity of a model, or by BM25.
2. Drop the passages that are known to be relevant (`MiningData.excluded`). The rest are candidates.
3. Drop candidates by `SelectionRules`, such as a score too close to that of a positive.
4. Drop candidates that a cross-encoder, if there is one, scores too close to the positives.
5. Use the first `num_negatives` of the remaining candidates.

`write_mined` writes the result as training data. The rules and their names are those of
sentence-transformers' `mine_hard_negatives`, with a margin for a cross-encoder besides. That
function itself is not used: it has no BM25, and it would mine copies of a positive that differ in
spelling, title or id. docs/mining.md explains the rules.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from tqdm.auto import tqdm

from contaccum.data import Passage, RecordReport, load_beir_folder, read_passages
from contaccum.data.beir import OUTSIDE_CORPUS
from contaccum.data.near_duplicates import normalise
from contaccum.data.records import RecordSource
from contaccum.data.rows import Fault, parse_text
from contaccum.errors import ConfigError, DataError, UserError, check_choice
from contaccum.files import AnyPath, Fingerprint, require_writable, write_json, write_text
from contaccum.retrieval.bm25 import bm25_scores
from contaccum.retrieval.encode import Similarity, encode_texts, get_similarity
from contaccum.retrieval.search import build_index, prepare_vectors, search

SAMPLING = ("top", "random")
OUTPUT_FORMATS = ("pairs", "dpr", "tevatron", "ntuples")
DEFAULT_CROSS_ENCODER_MARGIN = 3.0

_CANDIDATES_PER_NEGATIVE = 10
"""Number of candidates per negative that are ranked if a rule may drop some of them. It is the
number of sentence-transformers."""

# Results of the queries that are searched together: about 0.8 GB. Each search reads the whole pool.
_RESULTS_PER_SEARCH = 2**26

JsonObject = dict[str, Any]
"""A JSON object of a report or of an output file."""

Ranking = tuple[np.ndarray, np.ndarray, np.ndarray]
"""The k best passages of the pool for one query, including known positives.

- scores of the passages, float32 (k,), in descending order
- their rows in the pool, int64 (k,); -1 where the search returned fewer than k
- scores of the query's known positives, float32 (p,)
"""


def _define_rule(default: Any, help_text: str, value_type: type = float, **metadata: Any) -> Any:
    """Return a dataclass field whose metadata are the keyword arguments of its CLI option."""
    return field(default=default, metadata={"type": value_type, "help": help_text, **metadata})


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


@dataclass(frozen=True)
class MiningData:
    """Q queries with their known positives, and the passages that are searched for negatives.

    A passage is named by its row in `documents`. Texts that are equal after `normalise` count as
    one passage, whatever their ids. Otherwise a copy of a positive could be mined as a negative.

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
    # The id, the text and the positives of the query of each record.
    queries: Iterable[tuple[str | None, str, list[Passage]]]
    if not isinstance(source, (str, os.PathLike)):
        queries = _iter_records_in_memory(source)
    else:
        training_source = RecordSource(source, data_format, split, columns, min_score=min_score)
        record["path"] = str(source)
        record["format"] = training_source.data_format
        record["split"] = split
        if record["format"] == "beir":
            dataset = load_beir_folder(training_source.path, split, report=report)
            num_missing = len(dataset.list_missing_documents())
            report.leave_out(training_source.path, OUTSIDE_CORPUS, num_missing)
            passages = {name: Passage(name, **texts) for name, texts in dataset.corpus.items()}
            pool = list(passages.values())
            queries = []
            for name, grades in dataset.qrels.items():
                relevant_ids = [document for document, grade in grades.items() if grade > 0]
                judged = [passages[document] for document in relevant_ids if document in passages]
                queries.append((name, dataset.queries[name], judged))
        else:
            queries = (
                (None, row.query, _make_passages(row.positives))
                for row in training_source.records(report)
            )

    content = Fingerprint()
    # The text keys of the positives of each record, by the query's id and text.
    records_of_query: dict[tuple[str | None, str], list[list[bytes]]] = defaultdict(list)
    # The positives of all queries with the same text key, with their own text keys.
    positives_of_text: dict[bytes, list[tuple[bytes, Passage]]] = defaultdict(list)
    for query_id, text, judged in queries:
        # Published sets have passages without title and text, and some judge them as relevant.
        positives = [passage for passage in judged if passage.passage]
        if not positives:
            continue
        keys = [_compute_text_key(passage.passage) for passage in positives]
        # By default, training makes a row of each judgement of a BEIR folder, and a row of each
        # record of other formats. Training on mined data makes the same rows.
        records = [[key] for key in keys] if record["format"] == "beir" else [keys]
        records_of_query[query_id, text] += records
        positives_of_text[_compute_text_key(text)] += zip(keys, positives, strict=True)
        content.add(text, *(passage.passage for passage in positives))
    if corpus is not None:
        pool = list(read_passages(corpus, report, may_be_blank=True))
    if pool is not None:
        pool = [passage for passage in pool if passage.passage]
    for passage in pool or ():
        content.add(*passage)
    record["records"] = report.summary()
    record["fingerprint"] = content.hex()
    return _number_passages(records_of_query, positives_of_text, pool, record)


def _iter_records_in_memory(
    records: Iterable[Mapping[str, Any]],
) -> Iterator[tuple[None, str, list[Passage]]]:
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
        yield None, query, passages


def _make_passages(texts: Iterable[str]) -> list[Passage]:
    """Return texts without ids as passages whose ids are hashes of the texts."""
    return [Passage(f"passage-{_compute_text_key(text).hex()[:16]}", "", text) for text in texts]


def _number_passages(
    records_of_query: Mapping[tuple[str | None, str], list[list[bytes]]],
    positives_of_text: Mapping[bytes, list[tuple[bytes, Passage]]],
    pool: list[Passage] | None,
    record: JsonObject,
) -> MiningData:
    """Give each distinct passage a row, find the excluded rows of each query, and add the counts.

    Raises:
        DataError: if there is no query with a positive, or no passage to search.
    """
    known_positives: dict[bytes, Passage] = {}
    # A copy of a positive has its id, its text with title, or its text alone. A copy of the query
    # has its text.
    copies_of_text: dict[bytes, set[bytes | str]] = {}
    for text_key, positives in positives_of_text.items():
        copies_of_text[text_key] = {text_key}
        for key, passage in positives:
            known_positives.setdefault(key, passage)
            copies_of_text[text_key].update(_compute_copy_keys(passage))
    documents = {} if pool is not None else dict(known_positives)
    for passage in pool or ():
        documents.setdefault(_compute_text_key(passage.passage), passage)
    pool_size = len(documents)
    if pool_size == 0:
        raise DataError(f"{record['path']}: no passage is left to mine in (correct the data)")
    if not records_of_query:
        raise DataError(f"{record['path']}: no query has a positive (correct the data)")

    # A table of the keys of all passages would take much memory for a large corpus. Only the keys
    # of queries and known positives are needed.
    needed_keys = set().union(*copies_of_text.values())
    rows_by_key: dict[bytes | str, list[int]] = defaultdict(list)
    for row, passage in enumerate(documents.values()):
        for copy_key in needed_keys.intersection(_compute_copy_keys(passage)):
            rows_by_key[copy_key].append(row)

    for key, passage in known_positives.items():  # those outside the pool get the rows after it
        documents.setdefault(key, passage)
    row_of_key = {key: row for row, key in enumerate(documents)}
    data = MiningData([], [], list(documents.values()), pool_size, [], [], [], record)
    num_pairs = 0
    for number, ((query_id, text), records) in enumerate(records_of_query.items()):
        text_key = _compute_text_key(text)
        # Dictionaries without values hold distinct rows, and distinct records, in their order.
        rows_of_records: dict[tuple[int, ...], None] = {}
        for keys in records:
            rows = dict.fromkeys(row_of_key[key] for key in keys)
            rows_of_records[tuple(rows)] = None
        known_rows = dict.fromkeys(chain.from_iterable(rows_of_records))
        num_pairs += len(known_rows)
        known_rows |= dict.fromkeys(row_of_key[key] for key, _ in positives_of_text[text_key])
        excluded: set[int] = set()
        for copy_key in copies_of_text[text_key]:
            excluded.update(rows_by_key[copy_key])
        data.query_ids.append(query_id or f"query-{number}")
        data.queries.append(text)
        data.positives.append(list(known_rows))
        data.record_positives.append(list(map(list, rows_of_records)))
        data.excluded.append(sorted(excluded))
    record["queries"] = len(data.queries)
    record["pairs"] = num_pairs
    record["passages"] = pool_size
    return data


def _compute_text_key(text: str) -> bytes:
    """Return a hash that is equal for texts that are equal after `normalise`."""
    return hashlib.blake2b(normalise(text).encode(), digest_size=16).digest()


def _compute_copy_keys(passage: Passage) -> list[bytes | str]:
    """Return the keys of a passage; a passage that shares one of them counts as its copy.

    The keys are the id, the text with its title, and the text alone: another document may hold the
    same text under another title.
    """
    texts = [text for text in (passage.passage, passage.text) if text.strip()]
    return [passage.id, *map(_compute_text_key, texts)]


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
    num_negatives = selection_rules.num_negatives
    settings: JsonObject = {"method": "bm25" if model is None else "dense"}
    settings.update(asdict(selection_rules))
    settings["range_max"] = depth
    if model is None:
        rankings = _rank_by_bm25(data, depth, show_progress)
    else:
        metric = get_similarity(model, similarity)
        settings["similarity"] = metric
        settings["precision"] = precision
        encode = partial(
            encode_texts,
            model,
            batch_size=batch_size,
            precision=precision,
            show_progress=show_progress,
        )
        rankings = _rank_by_model(data, encode, depth, metric)
    if cross_encoder is not None:
        # Scores are logits, because a distance such as 3 has no meaning for scores between 0 and 1.
        predict = partial(
            cross_encoder.predict,
            batch_size=batch_size,
            activation_fn=torch.nn.Identity(),
            show_progress_bar=False,
        )

    shape = (len(data.queries), num_negatives)
    mined = MinedNegatives(
        data,
        settings,
        rows=np.full(shape, -1),
        scores=np.full(shape, -np.inf, dtype=np.float32),
        positive_scores=[],
    )
    rng = np.random.default_rng(selection_rules.seed)
    progress = tqdm(rankings, desc="Mining", total=len(data.queries), disable=not show_progress)
    for query, (ranked_scores, ranked_rows, positive_scores) in enumerate(progress):
        is_candidate = (ranked_rows >= 0) & ~np.isin(ranked_rows, data.excluded[query])
        ranks = np.flatnonzero(is_candidate)[:depth]
        lowest = positive_scores.min()
        ranks = ranks[select_candidates(ranked_scores[ranks], lowest, selection_rules, rng)]
        scores = ranked_scores[ranks]
        if cross_encoder is not None:
            text = data.queries[query]
            positives = data.positives[query]
            positive_scores = predict([(text, data.documents[row].passage) for row in positives])
            highest = positive_scores.min() - selection_rules.cross_encoder_margin
            candidates = [(text, data.documents[row].passage) for row in ranked_rows[ranks]]
            kept, scores = _rescore(predict, candidates, highest, num_negatives)
            ranks = ranks[kept]
        mined.positive_scores.append(positive_scores)
        ranks = ranks[:num_negatives]
        order = np.argsort(ranks)  # best first again, also after random sampling
        mined.rows[query, : len(order)] = ranked_rows[ranks[order]]
        mined.scores[query, : len(order)] = scores[order]
    if (mined.rows < 0).all():
        raise DataError(
            f"{data.record['path']}: no query has a negative left "
            "(loosen the rules, or raise range_max)"
        )
    return mined


def _rank_by_model(
    data: MiningData, encode: Any, depth: int, metric: Similarity
) -> Iterator[Ranking]:
    """Yield the best passages for each query, by the similarity of embeddings.

    At least ``depth`` of them are not excluded, if the pool has so many.
    """
    passage_embeddings = encode([document.passage for document in data.documents], "document")
    query_embeddings = prepare_vectors(encode(data.queries, "query"), metric, "query embedding")
    index = build_index(passage_embeddings[: data.pool_size], metric=metric)
    for group, k in _group_queries(data, depth):
        scores, rows = search(index, query_embeddings[group.start : group.stop], k)
        for query, query_scores, query_rows in zip(group, scores, rows, strict=True):
            positive_embeddings = prepare_vectors(
                passage_embeddings[data.positives[query]], metric, "document embedding"
            )
            yield query_scores, query_rows, positive_embeddings @ query_embeddings[query]


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


def _rank_by_bm25(data: MiningData, depth: int, show_progress: bool) -> Iterator[Ranking]:
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
        yield scores[rows], rows, scores[data.positives[query]]


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


def _rescore(
    predict: Any, candidates: list[tuple[str, str]], highest: float, num_negatives: int
) -> tuple[np.ndarray, np.ndarray]:
    """Score pairs of query and passage by a cross-encoder until enough of them score low.

    Returns:
        The positions of at least `num_negatives` candidates with a logit up to `highest`, or of all
        of them if there are fewer, int64 (c,), and their logits, float32 (c,).
    """
    positions: list[int] = []
    logits: list[float] = []
    for start in range(0, len(candidates), num_negatives):
        if len(positions) >= num_negatives:
            break
        scores = predict(candidates[start : start + num_negatives])
        is_low = scores <= highest
        positions.extend(start + np.flatnonzero(is_low))
        logits.extend(scores[is_low])
    return np.array(positions, dtype=np.int64), np.array(logits, dtype=np.float32)


def load_cross_encoder(
    name: str, device: str | None = None, trust_remote_code: bool = False
) -> Any:
    """Load a sentence-transformers CrossEncoder.

    It reads query and passage together. Its scores are better than those of the search, and show
    more often that a candidate is a relevant passage which was not judged.

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


def check_output(path: AnyPath, output_format: str) -> Path:
    """Check that negatives can be written to `path`, and make its folder; return the path.

    Raises:
        UserError: for an unknown format, a file or report that exists, or a folder that is not
            writable.
    """
    path = Path(path)
    check_choice("output_format", output_format, OUTPUT_FORMATS)
    require_writable(path)
    for file in (path, Path(f"{path}.report.json")):
        if file.exists():
            raise ConfigError(f"{file}: exists already (name another file, or remove it)")
    return path


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
    records = _iter_output_records(mined, output_format)
    lines = (json.dumps(record, ensure_ascii=False) for record in records)
    first_line = next(lines, None)
    if first_line is None:
        num_negatives = mined.rows.shape[1]
        raise DataError(f"{path}: no query has {num_negatives} negatives (lower num_negatives)")
    if output_format == "dpr":
        parts = chain(["[\n", first_line], (f",\n{line}" for line in lines), ["\n]\n"])
    else:
        parts = chain([first_line], (f"\n{line}" for line in lines), ["\n"])
    write_text(path, parts)
    report_path = Path(f"{path}.report.json")
    write_json(report_path, {**(report or {}), "output_format": output_format, **mined.record()})
    return path, report_path


def _iter_output_records(mined: MinedNegatives, output_format: str) -> Iterator[JsonObject]:
    """Yield the records of all queries in one of `OUTPUT_FORMATS`, one in memory at a time."""
    data = mined.data
    documents = data.documents
    # A file has either only lists or no lists, so that each of its columns has one type.
    has_lists = any(len(rows) > 1 for rows in chain.from_iterable(data.record_positives))

    def format_passages(score_of_row: Mapping[int, float], id_field: str) -> list[JsonObject]:
        passages = []
        for row, score in score_of_row.items():
            name, title, text = documents[row]
            passages.append({id_field: name, "title": title, "text": text, "score": score})
        return passages

    for query, text in enumerate(data.queries):
        scores = mined.positive_scores[query].tolist()
        positives = dict(zip(data.positives[query], scores, strict=True))  # {row: score}
        has_negative = mined.rows[query] >= 0
        rows = mined.rows[query][has_negative].tolist()
        scores = mined.scores[query][has_negative].tolist()
        negatives = dict(zip(rows, scores, strict=True))
        if output_format == "dpr":
            yield {
                "question": text,
                "answers": [],
                "positive_ctxs": format_passages(positives, "passage_id"),
                "negative_ctxs": [],
                "hard_negative_ctxs": format_passages(negatives, "passage_id"),
            }
        elif output_format == "tevatron":
            yield {
                "query_id": data.query_ids[query],
                "query": text,
                "positive_passages": format_passages(positives, "docid"),
                "negative_passages": format_passages(negatives, "docid"),
            }
        elif output_format == "pairs":
            for rows in data.record_positives[query]:
                record_texts = [documents[row].passage for row in rows]
                record_scores = [positives[row] for row in rows]
                yield {
                    "query": text,
                    "positive": record_texts if has_lists else record_texts[0],
                    "negatives": [documents[row].passage for row in negatives],
                    "positive_score": record_scores if has_lists else record_scores[0],
                    "negative_scores": scores,
                }
        elif has_negative.all():  # all records of ntuples have the same fields
            for row in dict.fromkeys(chain.from_iterable(data.record_positives[query])):
                record: JsonObject = {"query": text, "positive": documents[row].passage}
                for number, negative in enumerate(negatives, start=1):
                    record[f"negative_{number}"] = documents[negative].passage
                record["scores"] = [positives[row], *scores]
                yield record
