"""Hard negatives: passages that score high for a query and are not known to be relevant.

`load_mining_data` reads queries, their known positives and the passages to search.
`mine_hard_negatives` ranks the passages for each query by a model or by BM25, scores the best again
by a cross-encoder if there is one, and applies `SelectionRules`. `write_mined` writes the result as
training data.

The rules and their names are those of sentence-transformers' `mine_hard_negatives`. That function
itself is not used: it has no BM25, and it would mine copies of a positive that differ in spelling,
title or id.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from tqdm.auto import tqdm

from contaccum.data import Passage, RecordReport, read_passages
from contaccum.data.near_duplicates import normalise
from contaccum.data.records import Columns, RecordSource
from contaccum.data.rows import OnBadRecord
from contaccum.errors import ConfigError, DataError, UserError, check_choice
from contaccum.files import AnyPath, Fingerprint, require_writable, write_json, write_text
from contaccum.retrieval import bm25

CROSS_ENCODER_MARGIN = 3.0
"""The absolute margin with a cross-encoder, if no rule limits the scores from above."""

_CANDIDATES_PER_NEGATIVE = 10  # as in sentence-transformers
_QUERIES_PER_SEARCH = 4096  # each search reads the whole pool, and holds all of its results

Ranking = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Of a query: scores, float32 (k,), descending, and rows, int64 (k,), of the k best passages of the
pool, excluded ones among them; and the scores of its positives, float32 (p,)."""


def _define_rule(default: Any, help_text: str, value_type: type = float, **metadata: Any) -> Any:
    """Return a dataclass field whose metadata are the keyword arguments of its CLI option."""
    return field(default=default, metadata={"type": value_type, "help": help_text, **metadata})


@dataclass(frozen=True)
class SelectionRules:
    """Rules that a candidate must pass to become a hard negative of its query.

    The margins drop candidates with a score close to that of a positive: they may be relevant
    although nobody judged them. A value out of range raises `ConfigError`.
    """

    num_negatives: int = _define_rule(3, "number of negatives to mine per query", int)
    range_min: int = _define_rule(
        0, "number of the best candidates to skip, after the score rules", int
    )
    range_max: int | None = _define_rule(
        None, "rank of the last candidate; known positives are not counted in the rank", int
    )
    absolute_margin: float | None = _define_rule(
        None,
        "keep candidates with a score of at most p - margin; p is the lowest score of the query's "
        "positives; default with --cross_encoder and no other margin: 3.0",
    )
    relative_margin: float | None = _define_rule(
        None, "keep candidates with a score of at most p - margin * abs(p)"
    )
    sampling: Literal["top", "random"] = _define_rule(
        "top", "use the best candidates, or a random choice of them", str, choices=("top", "random")
    )
    seed: int = _define_rule(0, "seed of the random sampling", int)

    def __post_init__(self) -> None:
        check_choice("sampling", self.sampling, ("top", "random"))
        least_range_max = self.range_min + self.num_negatives
        if self.range_max is not None and self.range_max < least_range_max:
            raise ConfigError(
                f"range_max={self.range_max} leaves too few candidates: "
                f"raise it to {least_range_max} or more"
            )
        if self.relative_margin is not None and not 0 <= self.relative_margin <= 1:
            raise ConfigError(f"relative_margin={self.relative_margin} must be between 0 and 1")

    @property
    def depth(self) -> int:
        """Number of candidates per query that the rules are applied to, without positives."""
        if self.range_max is not None:
            return self.range_max
        if self == SelectionRules(self.num_negatives, self.range_min, seed=self.seed):
            return self.range_min + self.num_negatives  # no rule drops a candidate
        return self.range_min + _CANDIDATES_PER_NEGATIVE * self.num_negatives

    def select(
        self, scores: np.ndarray, lowest_positive: np.float32, rng: np.random.Generator
    ) -> np.ndarray:
        """Return the positions of the candidates that become negatives, int64, ascending.

        ``scores`` of c candidates are float32 (c,), in the order of the search; ``lowest_positive``
        is the lowest score of the query's positives.
        """
        highest = np.float32(np.inf)
        if self.absolute_margin is not None:
            highest = lowest_positive - np.float32(self.absolute_margin)
        if self.relative_margin is not None:
            margin = np.abs(lowest_positive) * np.float32(self.relative_margin)
            highest = min(highest, lowest_positive - margin)
        positions = np.flatnonzero(scores <= highest)[self.range_min :]
        if self.sampling == "random":
            positions = rng.permutation(positions)
        return np.sort(positions[: self.num_negatives])


class MiningQuery(NamedTuple):
    """A query and its passages, which are named by their rows in `MiningData.documents`.

    Attributes:
        records: positives (rows) and negatives (texts) of its distinct records, for example
            [([0, 4], ["a text"]), ([2], [])].
        positives: all positives that the data have for its text.
        excluded: rows of the pool that must not be mined: known positives, passages that share a
            text with one, copies of the query, and negatives that the data list.
    """

    text: str
    records: list[tuple[list[int], list[str]]]
    positives: list[int]
    excluded: list[int]


@dataclass(frozen=True)
class MiningData:
    """Queries with their known passages, and the passages that are searched for negatives.

    Texts that are equal after `normalise` are one passage, so that no copy of a positive is mined.
    The first `pool_size` documents are the pool, the candidates for negatives; the rest are
    positives that it lacks. ``record`` has path, format and counts of the data, for reports.
    """

    queries: list[MiningQuery]
    documents: list[Passage]
    pool_size: int
    record: dict[str, Any] = field(repr=False, compare=False)


def load_mining_data(
    source: AnyPath,
    corpus: AnyPath | None = None,
    *,
    split: str = "train",
    on_bad_record: OnBadRecord = "stop",
    columns: Mapping[str, str] | None = None,
    min_score: float | None = None,
    corpus_columns: Columns = None,
) -> MiningData:
    """Load queries with their known positives, and the passages that are searched for negatives.

    The searched passages, the pool, are those of `corpus`; without it, the corpus of a BEIR folder,
    or the distinct positives of other data.

    Args:
        source, split, columns, min_score: training data; see `read_records`.
        corpus, corpus_columns: see `read_passages`.
        on_bad_record: "stop" raises an error at the first bad record, "skip" counts it.

    Raises:
        ConfigError: for settings that the format does not have.
        DataError: for data that cannot be read, no query with a positive, or an empty pool.
    """
    report = RecordReport(on_bad_record)
    data_source = RecordSource(source, split, columns, min_score)
    if corpus_columns and corpus is None:
        raise ConfigError("corpus_columns: there is no corpus (drop it, or give a corpus)")
    pool_path = data_source.path if data_source.data_format == "beir" else None
    pool_path = pool_path if corpus is None else Path(corpus)

    content = Fingerprint()
    documents: list[Passage] = []
    row_of_text: dict[bytes, int] = {}

    def find_row(passage: Passage) -> int:
        row = row_of_text.setdefault(_hash_text(passage.passage), len(documents))
        if row == len(documents):
            documents.append(passage)
        return row

    if pool_path is not None:
        for passage in read_passages(pool_path, report, may_be_blank=True, columns=corpus_columns):
            if passage.passage:  # published sets have passages without title and text
                find_row(passage)
                content.add(*passage)
    pool_size = len(documents)
    # The distinct records of each query, {rows of the positives: {hash: negative}}, and what all
    # queries of equal text have: the rows of their positives, and the hashes of passages that are
    # copies of a positive, a negative or the query.
    records_of_query: dict[str, dict[tuple[int, ...], dict[bytes, str]]] = defaultdict(dict)
    positives_of_text: dict[bytes, dict[int, None]] = defaultdict(dict)
    copies: dict[bytes, set[bytes]] = defaultdict(set)
    for query, positives, negatives in data_source.records(report):
        content.add(query, *positives, *negatives)
        rows = tuple(dict.fromkeys(find_row(Passage("", "", text)) for text in positives))
        own_negatives = records_of_query[query].setdefault(rows, {})
        for text in negatives:
            own_negatives.setdefault(_hash_text(text), text)
        text_hash = _hash_text(query)
        positives_of_text[text_hash] |= dict.fromkeys(rows)
        copies[text_hash].update([text_hash], own_negatives)
        copies[text_hash].update(*(_hash_forms(documents[row]) for row in rows))
    if pool_path is None:
        pool_size = len(documents)
    if pool_size == 0:
        raise DataError(f"{source}: no passage is left to mine in (correct the data)")
    if not records_of_query:
        raise DataError(f"{source}: no query has a positive (correct the data)")

    # A table of the hashes of all passages would take much memory for a large corpus.
    needed = set().union(*copies.values())
    rows_of_hash: dict[bytes, list[int]] = defaultdict(list)
    for row, passage in enumerate(documents[:pool_size]):
        for text_hash in needed.intersection(_hash_forms(passage)):
            rows_of_hash[text_hash].append(row)
    queries = []
    for query, negatives_of_record in records_of_query.items():
        text_hash = _hash_text(query)
        all_positives = positives_of_text[text_hash]
        records = []
        for rows, texts in negatives_of_record.items():
            kept = [
                text for key, text in texts.items() if row_of_text.get(key) not in all_positives
            ]
            records.append((list(rows), kept))
        excluded = set().union(*(rows_of_hash[each] for each in copies[text_hash]))
        queries.append(MiningQuery(query, records, list(all_positives), sorted(excluded)))
    record = {
        "path": str(source),
        "format": data_source.data_format,
        "split": split,
        "corpus": None if corpus is None else str(corpus),
        "records": report.summary(),
        "fingerprint": content.hex(),
        "queries": len(queries),
        "passages": pool_size,
    }
    return MiningData(queries, documents, pool_size, record)


def _hash_text(text: str) -> bytes:
    """Return a hash that is equal for texts that are equal after `normalise`."""
    return hashlib.blake2b(normalise(text).encode(), digest_size=16).digest()


def _hash_forms(passage: Passage) -> set[bytes]:
    """Return the hashes of a passage with its title and without it, which its copies share."""
    return {_hash_text(text) for text in (passage.passage, passage.text.strip()) if text}


@dataclass
class MinedNegatives:
    """The result of `mine_hard_negatives`; each list has an entry per query of the data.

    Attributes:
        settings: settings of the search, and the selection rules.
        rows: rows of the mined negatives in `data.documents`, int64 (n,), n <= `num_negatives`, in
            the order of the search.
        scores: their logits of the cross-encoder, or their scores of the search, float32 (n,).
        positive_scores: the same of the query's known positives.
    """

    data: MiningData
    settings: dict[str, Any]
    rows: list[np.ndarray] = field(default_factory=list)
    scores: list[np.ndarray] = field(default_factory=list)
    positive_scores: list[np.ndarray] = field(default_factory=list)

    def record(self) -> dict[str, Any]:
        """Return settings, counts and mean scores, for a report."""
        num_negatives = self.settings["num_negatives"]
        return {
            "data": self.data.record,
            "settings": self.settings,
            "queries_with_too_few": sum(len(rows) < num_negatives for rows in self.rows),
            "mean_positive_score": float(np.concatenate(self.positive_scores).mean()),
            "mean_negative_score": float(np.concatenate(self.scores).mean()),
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

    The model may be in training: neither it nor the random state changes. Memory holds the passages
    and, with a model, their float32 embeddings: 27 GB for 8.8 million of 768 dimensions.

    Args:
        data: a `MiningData`, or a source that `load_mining_data` reads.
        model: a SentenceTransformer; None: BM25.
        cross_encoder: a CrossEncoder whose logits replace the scores; see `load_cross_encoder`.
            Without a margin, `absolute_margin` is then `CROSS_ENCODER_MARGIN`.
        similarity: "cos" or "dot"; None: the model's own similarity.
        batch_size, precision: see `encode_texts`.
        rules: fields of `SelectionRules`, by name.

    Raises:
        ConfigError: for rules out of range, before anything is encoded.
        DataError: for data that cannot be used, or if no query has a negative.
        UserError: if the model's embeddings hold NaN or infinity.
    """
    margins = (rules.get("absolute_margin"), rules.get("relative_margin"))
    if cross_encoder is not None and margins == (None, None):
        rules = {**rules, "absolute_margin": CROSS_ENCODER_MARGIN}
    selection_rules = SelectionRules(**rules)
    depth = selection_rules.depth
    if not isinstance(data, MiningData):
        data = load_mining_data(data)
    settings: dict[str, Any] = {"method": "bm25" if model is None else "dense"}
    settings |= {**asdict(selection_rules), "range_max": depth}
    if model is None:
        rankings = _rank_by_bm25(data, depth, show_progress)
    else:
        from contaccum.retrieval.encode import encode_texts, get_similarity

        metric = get_similarity(model, similarity)
        settings |= {"similarity": metric, "precision": precision}

        def encode(texts: list[str], kind: Any) -> np.ndarray:
            return encode_texts(model, texts, kind, batch_size, precision, show_progress)

        rankings = _rank_by_model(data, depth, metric, encode)

    mined = MinedNegatives(data, settings)
    rng = np.random.default_rng(selection_rules.seed)
    progress = tqdm(rankings, desc="Mining", total=len(data.queries), disable=not show_progress)
    for query, (scores, rows, positive_scores) in zip(data.queries, progress, strict=True):
        candidates = np.flatnonzero(~np.isin(rows, query.excluded))[:depth]
        rows = rows[candidates]
        scores = scores[candidates]
        if cross_encoder is not None:
            from torch.nn import Identity

            # Logits, because a margin such as 3 has no meaning for scores between 0 and 1.
            logits = cross_encoder.predict(
                [(query.text, data.documents[row].passage) for row in [*query.positives, *rows]],
                batch_size=batch_size,
                activation_fn=Identity(),
                show_progress_bar=False,
            )
            positive_scores, scores = np.split(logits, [len(query.positives)])
        selected = selection_rules.select(scores, positive_scores.min(), rng)
        mined.rows.append(rows[selected])
        mined.scores.append(scores[selected])
        mined.positive_scores.append(positive_scores)
    if not any(map(len, mined.rows)):
        raise DataError(
            f"{data.record['path']}: no query has a negative left "
            "(loosen the rules, or raise range_max)"
        )
    return mined


def _rank_by_model(
    data: MiningData, depth: int, metric: Any, encode: Callable[..., np.ndarray]
) -> Iterator[Ranking]:
    """Yield the best passages for each query, of which `depth` are not excluded, if possible."""
    from contaccum.retrieval.exact_search import prepare_vectors
    from contaccum.retrieval.search import build_index, search

    texts = [document.passage for document in data.documents]
    passage_embeddings = encode(texts, "document")
    query_embeddings = encode([query.text for query in data.queries], "query")
    query_embeddings = prepare_vectors(query_embeddings, metric, "query embedding")
    index = build_index(passage_embeddings[: data.pool_size], metric=metric)
    for start in range(0, len(data.queries), _QUERIES_PER_SEARCH):
        queries = data.queries[start : start + _QUERIES_PER_SEARCH]
        embeddings = query_embeddings[start : start + _QUERIES_PER_SEARCH]
        most_excluded = max(len(query.excluded) for query in queries)
        results = zip(*search(index, embeddings, depth + most_excluded), strict=True)
        for query, embedding, (scores, rows) in zip(queries, embeddings, results, strict=True):
            positives = passage_embeddings[query.positives]
            positives = prepare_vectors(positives, metric, "document embedding")
            yield scores, rows, positives @ embedding


def _rank_by_bm25(data: MiningData, depth: int, show_progress: bool) -> Iterator[Ranking]:
    """Yield the best passages for each query that share a word with it, as `_rank_by_model`."""
    # Positives outside the pool are included, so that they have scores too.
    index = bm25.build_index([document.passage for document in data.documents], show_progress)
    all_scores = bm25.score_queries(index, [query.text for query in data.queries])
    for query, scores in zip(data.queries, all_scores, strict=True):
        rows = bm25.find_best(scores[: data.pool_size], depth + len(query.excluded))
        yield scores[rows], rows, scores[query.positives]


def load_cross_encoder(
    name: str, device: str | None = None, trust_remote_code: bool = False
) -> Any:
    """Load a sentence-transformers CrossEncoder from a folder, or by its name on the model hub.

    Raises `UserError` if it cannot be loaded, or was not trained to give one score.
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


def check_output(path: AnyPath) -> Path:
    """Check that negatives can be written to `path`, and make its folder; return the path.

    Raises `UserError` for a file or report that exists, or a folder that is not writable.
    """
    path = Path(path)
    require_writable(path)
    for file in (path, Path(f"{path}.report.json")):
        if file.exists():
            raise ConfigError(f"{file}: exists already (name another file, or remove it)")
    return path


def write_mined(
    mined: MinedNegatives, path: AnyPath, report: dict[str, Any] | None = None
) -> tuple[Path, Path]:
    """Write negatives to `path` as JSON lines and a report beside it; return the paths of both.

    A line is a record of the data, with all its positives, its own negatives and then those mined
    for its query. ``report`` has further entries for the report. For errors see `check_output`.
    """
    path = check_output(path)
    data = mined.data
    # A file has either only lists or no lists, so that each of its columns has one type.
    has_lists = any(len(rows) > 1 for query in data.queries for rows, _ in query.records)

    def format_lines() -> Iterator[str]:
        for query, mined_rows in zip(data.queries, mined.rows, strict=True):
            mined_texts = [data.documents[row].passage for row in mined_rows]
            for rows, own_negatives in query.records:
                positives = [data.documents[row].passage for row in rows]
                record = {
                    "query": query.text,
                    "positive": positives if has_lists else positives[0],
                    "negatives": own_negatives + mined_texts,
                }
                yield json.dumps(record, ensure_ascii=False) + "\n"

    write_text(path, format_lines())
    report_path = Path(f"{path}.report.json")
    write_json(report_path, {**(report or {}), **mined.record()})
    return path, report_path
