"""Hard negatives for training data: passages that score high for a query and are not known to be relevant.

FAISS with a model, or BM25, finds candidates; the rules of sentence-transformers' `mine_hard_negatives` decide which of
them become negatives, with a cross-encoder's margin beside the others. Equal texts are one passage here, whatever their
ids, spacing or case, so that a copy of a positive cannot come back as a negative. When to mine while training is
others' business.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from tqdm.auto import tqdm

from contaccum.data import (
    Passage,
    RecordReport,
    load_beir_folder,
    read_passages,
    read_records,
    sniff_format,
)
from contaccum.errors import ConfigError, DataError, UserError, check_choice
from contaccum.files import AnyPath, Fingerprint, require_writable, write_json, write_text
from contaccum.retrieval.encode import Metric, encode_texts, get_metric
from contaccum.retrieval.exact_search import prepare_vectors
from contaccum.retrieval.index import build_index, search
from contaccum.retrieval.searcher import bm25_scores

OUTPUT_FORMATS = ("pairs", "dpr", "tevatron", "ntuples")


@dataclass(frozen=True)
class MiningData:
    """Q queries, and passages that are called by their row.

    Attributes:
        query_ids, queries: (Q,).
        documents: distinct passages; from `pool_size` on positives from outside the pool, which are no candidates.
        positives: for each query the rows of its known positives: those of its own pairs (`pair_counts` of them), then
            whatever else the data call a positive of the same query text.
        excluded: for each query the pool rows that are a known positive, have its text or id, or repeat the query.
        record: path, format, fingerprint and counts, for reports.
    """

    query_ids: list[str]
    queries: list[str]
    documents: list[Passage]
    pool_size: int
    positives: list[list[int]]
    pair_counts: list[int]
    excluded: list[list[int]]
    record: dict[str, Any] = field(repr=False, compare=False)


def load_mining_data(
    source: AnyPath | Iterable[Mapping[str, Any]],
    corpus: AnyPath | None = None,
    *,
    data_format: Any = None,
    split: str = "train",
    on_bad_record: Literal["stop", "skip"] = "stop",
    columns: Mapping[str, str] | None = None,
    texts: AnyPath | None = None,
    min_score: float | None = None,
) -> MiningData:
    """Queries with their known positives, and the passages among which their negatives are sought.

    The pool is the whole corpus of a BEIR folder, and else the data's distinct positives (negatives that the data list
    are not part of it). With `corpus` it is that corpus instead, and nothing else.

    Args:
        source: training data in any format that `read_records` takes; or records in memory, mappings with "query" and
            "positive": a text, or a list of texts of which the first makes the pair.
        corpus: a file of passages, or a BEIR folder whose corpus it is; see `read_passages`.
        data_format, split, columns, min_score: see `read_records`; of files, as is `texts`, its `corpus`.

    Raises:
        ConfigError, DataError: data that cannot be used, or an empty pool.
    """
    report, pool = RecordReport(on_bad_record), None
    record: dict[str, Any] = {
        "path": "records",
        "format": "records",
        "corpus": corpus and str(corpus),
    }
    judged: Iterable[
        tuple[str | None, str, list[Passage]]
    ]  # a query's id, where it has one, text and positives
    if not isinstance(source, (str, os.PathLike)):
        judged = ((None, row["query"], _as_passages(row["positive"])) for row in source)
    else:
        record |= {
            "path": str(source),
            "format": data_format or sniff_format(source, columns),
            "split": split,
        }
        if record["format"] == "beir":
            data = load_beir_folder(source, split, report=report)
            passages = {name: Passage(name, **document) for name, document in data.corpus.items()}
            pool = [passage for passage in passages.values() if passage.passage]
            judged = (
                (
                    name,
                    data.queries[name],
                    [passages[document] for document, grade in found.items() if grade > 0],
                )
                for name, found in data.qrels.items()
            )
        else:
            rows = read_records(
                source, record["format"], split, columns, report, 0, texts, min_score
            )
            judged = ((None, row.query, _as_passages(row.positives)) for row in rows)
    # Of a record with several positives the first is trained on, unless people have judged them all.
    paired = None if record["format"] in ("beir", "msmarco") else 1
    pairs: dict[tuple[str | None, str], list[Passage]] = defaultdict(list)
    known: dict[bytes, list[Passage]] = defaultdict(list)  # of all queries that look the same
    content = Fingerprint()
    for name, query, positives in judged:
        there = [
            passage for passage in positives if passage.passage
        ]  # BEIR's published sets have empty ones
        if there:
            pairs[name, query] += there[:paired]
            known[_key(query)] += there
            content.add(query, *(passage.passage for passage in there))
    if corpus is not None:
        pool = list(read_passages(corpus, report))
    for passage in pool or ():
        content.add(*passage)
    record |= {"records": report.summary(), "fingerprint": content.hex()}
    return _assemble(pairs, known, pool, record)


def _assemble(
    pairs: dict[tuple[str | None, str], list[Passage]],
    known: dict[bytes, list[Passage]],
    pool: list[Passage] | None,
    record: dict[str, Any],
) -> MiningData:
    """Equal passages become one row; rows that look like a positive of a query, or like the query, are excluded."""
    documents: dict[bytes, Passage] = {}
    for passage in chain.from_iterable(known.values()) if pool is None else pool:
        documents.setdefault(_key(passage.passage), passage)
    pool_size = len(documents)
    if not pool_size or not pairs:
        what = "no query has a positive" if pool_size else "no passage is left to mine in"
        raise DataError(f"{record['path']}: {what} (correct the data)")
    names_of = {
        key: {key, *(name for one in found for name in _names(one))} for key, found in known.items()
    }
    wanted = set().union(*names_of.values())
    rows_called: dict[bytes | str, list[int]] = defaultdict(list)
    for row, passage in enumerate(documents.values()):
        for name in wanted.intersection(_names(passage)):
            rows_called[name].append(row)
    for passage in chain.from_iterable(known.values()):
        documents.setdefault(_key(passage.passage), passage)
    row_of = {key: row for row, key in enumerate(documents)}

    def rows(passages: Iterable[Passage]) -> list[int]:
        return list(dict.fromkeys(row_of[_key(passage.passage)] for passage in passages))

    keys, counts = [_key(query) for _, query in pairs], [len(rows(own)) for own in pairs.values()]
    positives = [rows([*own, *known[key]]) for own, key in zip(pairs.values(), keys, strict=True)]
    excluded = [
        sorted({row for name in names_of[key] for row in rows_called[name]}) for key in keys
    ]
    record |= {"queries": len(pairs), "pairs": sum(counts), "passages": pool_size}
    ids = [name or f"query-{number}" for number, (name, _) in enumerate(pairs)]
    queries = [query for _, query in pairs]
    return MiningData(
        ids, queries, list(documents.values()), pool_size, positives, counts, excluded, record
    )


def _as_passages(texts: str | Iterable[str]) -> list[Passage]:
    texts = [texts] if isinstance(texts, str) else texts
    return [Passage(f"passage-{_key(text).hex()[:16]}", "", text) for text in texts]


def _key(text: str) -> bytes:
    """Equal for texts that differ in spacing or case alone."""
    return hashlib.blake2b(" ".join(text.split()).casefold().encode(), digest_size=16).digest()


def _names(passage: Passage) -> list[bytes | str]:
    """What a copy has too: the id, the text with its title, or without, for it may lie elsewhere under another one."""
    return [passage.id, *(_key(part) for part in (passage.passage, passage.text) if part.strip())]


def _rule(default: Any, explained: str, kind: type = float, **more: Any) -> Any:
    return field(default=default, metadata={"type": kind, "help": explained, **more})


@dataclass(frozen=True)
class SelectionRules:
    """What a negative must be like: sentence-transformers' rules by their names, and those of docs/mining.md.

    s is the score of a candidate, p the lowest of its query's positives. `range_max` None is `num_negatives` +
    `range_min`, with 10 `num_negatives` where a rule may drop candidates or sampling may choose.
    """

    num_negatives: int = _rule(3, "per query", int)
    range_min: int = _rule(0, "skip so many of the closest of what the score rules leave", int)
    range_max: int | None = _rule(
        None, "no candidate beyond this rank; known positives have no rank", int
    )
    absolute_margin: float | None = _rule(None, "keep s <= p - margin")
    relative_margin: float | None = _rule(None, "keep s <= p - margin * abs(p)")
    max_score: float | None = _rule(None, "keep s <= max_score")
    min_score: float | None = _rule(None, "keep s >= min_score")
    cross_encoder_margin: float | None = _rule(
        None, "keep what it scores so far below the positives, in logits; 3.0"
    )
    sampling: Literal["top", "random"] = _rule(
        "top", "the best, or some at random", str, choices=("top", "random")
    )
    seed: int = _rule(0, "of random sampling", int)

    def check(self, has_cross_encoder: bool) -> None:
        """Raise `ConfigError` for settings that cannot work together; cheap, before data or models are loaded."""
        check_choice("sampling", self.sampling, ("top", "random"))
        if self.num_negatives < 1 or self.range_min < 0:
            raise ConfigError(
                f"num_negatives={self.num_negatives} and range_min={self.range_min}: 1 and 0 or more"
            )
        room = self.range_min + self.num_negatives
        if self.range_max is not None and self.range_max < room:
            raise ConfigError(
                f"range_max={self.range_max} leaves too few candidates: raise it to {room} or more"
            )
        if self.relative_margin is not None and not 0 <= self.relative_margin <= 1:
            raise ConfigError(f"relative_margin={self.relative_margin} must be between 0 and 1")
        if self.cross_encoder_margin is not None and not has_cross_encoder:
            raise ConfigError(
                "cross_encoder_margin needs a cross_encoder: give both, or leave it out"
            )

    @property
    def depth(self) -> int:
        """How many candidates of a query, known positives apart, are considered."""
        plain = SelectionRules(self.num_negatives, self.range_min, seed=self.seed)
        # As in sentence-transformers: ten candidates per wanted negative where a rule may drop some.
        most = self.range_min + self.num_negatives * (1 if self == plain else 10)
        return most if self.range_max is None else self.range_max


@dataclass
class MinedNegatives:
    """What `mine_hard_negatives` found, for Q queries.

    Attributes:
        data: what it was found in.
        settings: of the search, and the rules.
        rows: (Q, num_negatives) int64, rows of `data.documents`, best first, -1 where there are fewer.
        scores: the same shape, -inf where there are fewer; a cross-encoder's logits, if there is one.
        positive_scores: for each query the scores of `data.positives`.
    """

    data: MiningData
    settings: dict[str, Any]
    rows: np.ndarray
    scores: np.ndarray
    positive_scores: list[np.ndarray]

    def record(self) -> dict[str, Any]:
        """Settings, counts and mean scores, for a report."""
        found = self.rows >= 0
        return {
            "data": self.data.record,
            "settings": self.settings,
            "queries_with_too_few": int((~found.all(axis=1)).sum()),
            "mean_positive_score": float(np.concatenate(self.positive_scores).mean()),
            "mean_negative_score": float(self.scores[found].mean()),
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
    """Find for each query of training data passages that score high and are not known to be relevant.

    A model in training may be asked too: it and the random state are left as they are, and no file is written.

    Args:
        data: a `MiningData`, or what `load_mining_data` takes.
        model: a SentenceTransformer; None for BM25, where there is none yet that is worth asking.
        cross_encoder: see `load_cross_encoder`; its margin is 3.0, if it is not given.
        similarity: "cos" or "dot"; None is the model's own.
        batch_size, precision: see `encode_texts`.
        rules: fields of `SelectionRules`, by name.

    Raises:
        ConfigError: settings that cannot work, before anything is encoded.
        DataError: data that cannot be used, or no negative for any query.
        UserError: a model that gives NaN or infinity.
    """
    checked = SelectionRules(
        **({} if cross_encoder is None else {"cross_encoder_margin": 3.0}) | rules
    )
    checked.check(cross_encoder is not None)
    if not isinstance(data, MiningData):
        data = load_mining_data(data)
    k = min(checked.depth + max(map(len, data.excluded)), data.pool_size)
    settings: dict[str, Any] = {"method": "bm25", **asdict(checked), "range_max": checked.depth}
    if model is None:
        found = _search_bm25(data, k, show_progress)
    else:
        metric = get_metric(model, similarity)
        settings |= {"method": "dense", "similarity": metric, "precision": precision}
        encoding = {
            "batch_size": batch_size,
            "precision": precision,
            "show_progress": show_progress,
        }
        found = _search_dense(data, model, k, metric, encoding)
    shape, rng = (len(data.queries), checked.num_negatives), np.random.default_rng(checked.seed)
    mined = MinedNegatives(
        data, settings, np.full(shape, -1), np.full(shape, -np.inf, dtype=np.float32), []
    )
    bar = tqdm(found, desc="Mining", total=len(data.queries), disable=not show_progress)
    for query, (scores, rows, of_positives) in enumerate(bar):
        places = np.flatnonzero((rows >= 0) & ~np.isin(rows, data.excluded[query]))[: checked.depth]
        places = places[_selected(scores[places], of_positives.min(), checked, rng)]
        if cross_encoder is not None:
            passed, of_positives = _second_opinion(
                data, query, rows[places], cross_encoder, checked, batch_size
            )
            places = places[list(passed)]
            scores[places] = list(passed.values())
        best = np.sort(places[: checked.num_negatives])  # in the order of the search
        mined.positive_scores.append(of_positives)
        mined.rows[query, : len(best)], mined.scores[query, : len(best)] = rows[best], scores[best]
    if (mined.rows < 0).all():
        raise DataError(
            f"{data.record['path']}: no query has a negative left (loosen the rules, or raise range_max)"
        )
    return mined


def _search_dense(
    data: MiningData, model: Any, k: int, metric: Metric, encoding: dict[str, Any]
) -> Iterator[Any]:
    """Of each query scores and rows (k,), best first, -1 for none, and the scores of its positives."""
    passages = encode_texts(
        model, [document.passage for document in data.documents], "document", **encoding
    )
    queries = prepare_vectors(
        encode_texts(model, data.queries, "query", **encoding), metric, "query embedding"
    )
    scores, rows = search(build_index(passages[: data.pool_size], metric=metric), queries, k)
    for query, positives in enumerate(data.positives):
        vectors = prepare_vectors(passages[positives], metric, "document embedding")
        yield scores[query], rows[query], vectors @ queries[query]


def _search_bm25(data: MiningData, k: int, show_progress: bool) -> Iterator[Any]:
    # Positives from outside the pool are part of the statistics, so that they have a score.
    scored = bm25_scores(
        [document.passage for document in data.documents], data.queries, show_progress
    )
    for scores, positives in zip(scored, data.positives, strict=True):
        rows = np.flatnonzero(scores[: data.pool_size] > 0)
        rows = rows[np.argsort(-scores[rows], kind="stable")[:k]]
        yield scores[rows], rows, scores[positives]


def _selected(
    scores: np.ndarray, lowest: np.float32, rules: SelectionRules, rng: np.random.Generator
) -> np.ndarray:
    """Places of the candidates that pass, in the order in which they are taken; their scores (c,) come best first."""
    highest: Any = np.inf if rules.max_score is None else rules.max_score
    if rules.absolute_margin is not None:
        highest = min(highest, lowest - np.float32(rules.absolute_margin))
    if rules.relative_margin is not None:
        highest = min(highest, lowest - np.abs(lowest) * np.float32(rules.relative_margin))
    left = (scores <= highest) & (
        scores >= (-np.inf if rules.min_score is None else rules.min_score)
    )
    places = np.flatnonzero(left)[rules.range_min :]
    return rng.permutation(places) if rules.sampling == "random" else places


def _second_opinion(
    data: MiningData,
    query: int,
    rows: np.ndarray,
    cross_encoder: Any,
    rules: SelectionRules,
    batch_size: int,
) -> tuple[dict[int, float], np.ndarray]:
    """{place: score} of the rows that a cross-encoder scores low enough, and the scores of the query's positives.

    It reads no more than it takes to fill up. Scores are logits: "3 points below" has no meaning between 0 and 1.
    """

    def read(some: Iterable[int]) -> np.ndarray:
        pairs = [(data.queries[query], data.documents[row].passage) for row in some]
        identity = torch.nn.Identity()
        return cross_encoder.predict(
            pairs, batch_size=batch_size, activation_fn=identity, show_progress_bar=False
        )

    h, passed, of_positives = rules.num_negatives, dict[int, float](), read(data.positives[query])
    bound = of_positives.min() - rules.cross_encoder_margin
    for start in range(0, len(rows), h):
        if len(passed) < h:
            found = read(rows[start : start + h])
            passed |= {
                start + place: float(found[place])
                for place in np.flatnonzero(found <= bound).tolist()
            }
    return passed, of_positives


def load_cross_encoder(
    name: str, device: str | None = None, trust_remote_code: bool = False
) -> Any:
    """A CrossEncoder by folder or hub name; raises `UserError` where none that gives a pair one score can be loaded."""
    from sentence_transformers import CrossEncoder

    from contaccum.encoders.loading import loading

    with loading(name, trust_remote_code) as path:
        cross_encoder = CrossEncoder(path, device=device, trust_remote_code=trust_remote_code)
    config = cross_encoder.model.config
    # sentence-transformers puts a fresh head on an encoder that has none, and its scores are noise.
    trained = any("For" in architecture for architecture in config.architectures or ["For"])
    if config.num_labels != 1 or not trained:
        raise UserError(
            f"{name}: is not a cross-encoder that was trained to give a pair of texts one score"
        )
    return cross_encoder


def write_mined(
    mined: MinedNegatives,
    path: AnyPath,
    output_format: str = "pairs",
    report: dict[str, Any] | None = None,
) -> tuple[Path, Path]:
    """Write negatives to `path` and a report to `path` + ".report.json", each whole or not at all; returns both paths.

    "pairs" and "ntuples" have a line for each pair, "dpr" and "tevatron" one for each query with all its known
    positives; docs/mining.md has the fields. What there is is written, but "ntuples" leaves queries with too few out.

    Args:
        report: more for the report, beside `mined.record()`.

    Raises:
        UserError: see `check_output`.
        DataError: nothing is left to write.
    """
    path = check_output(path, output_format)
    found = chain.from_iterable(
        _lines_of(mined, query, output_format) for query in range(len(mined.rows))
    )
    lines = [json.dumps(line, ensure_ascii=False) for line in found]
    if not lines:
        raise DataError(
            f"{path}: no query has {mined.rows.shape[1]} negatives (lower num_negatives)"
        )
    write_text(
        path,
        "[\n" + ",\n".join(lines) + "\n]\n"
        if output_format == "dpr"
        else (f"{line}\n" for line in lines),
    )
    report_path = Path(f"{path}.report.json")
    write_json(report_path, {**(report or {}), "output_format": output_format, **mined.record()})
    return path, report_path


def check_output(path: AnyPath, output_format: str) -> Path:
    """`path`, once its folder is there and can be written to.

    Raises:
        UserError: an unknown format, a file that is there already, or no way to write it.
    """
    path = Path(path)
    check_choice("output_format", output_format, OUTPUT_FORMATS)
    require_writable(path)
    if path.exists():
        raise ConfigError(f"{path}: exists already (name another file, or remove it)")
    return path


def _lines_of(mined: MinedNegatives, query: int, output_format: str) -> Iterator[dict[str, Any]]:
    """What is written of one query: a line for each of its pairs, or one for all of its known positives."""
    data, text = mined.data, mined.data.queries[query]
    there = mined.rows[query] >= 0
    positives = data.positives[query], mined.positive_scores[query].tolist()
    negatives = mined.rows[query][there].tolist(), mined.scores[query][there].tolist()

    def records(found: tuple[list[int], list[float]], name: str) -> list[dict[str, Any]]:
        scored = [(data.documents[row], score) for row, score in zip(*found, strict=True)]
        return [
            {name: p.id, "title": p.title, "text": p.text, "score": score} for p, score in scored
        ]

    if output_format == "dpr":
        contexts = {"positive_ctxs": records(positives, "passage_id"), "negative_ctxs": []}
        yield {
            "question": text,
            "answers": [],
            **contexts,
            "hard_negative_ctxs": records(negatives, "passage_id"),
        }
    elif output_format == "tevatron":
        line = {
            "query_id": data.query_ids[query],
            "query": text,
            "positive_passages": records(positives, "docid"),
        }
        yield {**line, "negative_passages": records(negatives, "docid")}
    else:
        texts, scores = [data.documents[row].passage for row in negatives[0]], negatives[1]
        for row, score in islice(zip(*positives, strict=True), data.pair_counts[query]):
            line = {"query": text, "positive": data.documents[row].passage}
            if output_format == "pairs":
                yield line | {
                    "negatives": texts,
                    "positive_score": score,
                    "negative_scores": scores,
                }
            elif there.all():
                columns = {
                    f"negative_{number}": negative for number, negative in enumerate(texts, 1)
                }
                yield line | columns | {"scores": [score, *scores]}
