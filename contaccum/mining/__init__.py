"""Hard negatives for training data: passages that score high for a query and are not known to be relevant.

FAISS with a model, or BM25, finds candidates; the rules of sentence-transformers' `mine_hard_negatives` decide which of
them become negatives, with a cross-encoder's margin beside the others. What is mined in is read in `data`; when to mine
while training is others' business.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from contaccum.errors import ConfigError, DataError, UserError, check_choice
from contaccum.files import AnyPath, require_writable, write_json, write_text
from contaccum.mining.data import MiningData, load_mining_data

# Candidates per wanted negative where a rule may drop some, as in sentence-transformers.
_SPARE = 10


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

    def check(self, method: str, has_model: bool, has_cross_encoder: bool) -> None:
        """Raise `ConfigError` for settings that cannot work together; cheap, before data or models are loaded."""
        check_choice("sampling", self.sampling, ("top", "random"))
        check_choice("method", method, ("dense", "bm25"))
        if self.num_negatives < 1 or self.range_min < 0:
            raise ConfigError(f"num_negatives={self.num_negatives} and range_min={self.range_min}: 1 and 0 or more")
        room = self.range_min + self.num_negatives
        if self.range_max is not None and self.range_max < room:
            what = f"num_negatives={self.num_negatives} after range_min={self.range_min}"
            raise ConfigError(f"range_max={self.range_max} leaves no room for {what}; raise it to {room} or more")
        if self.relative_margin is not None and not 0 <= self.relative_margin <= 1:
            what = "0.05 keeps what scores up to 95 % of the positive's score"
            raise ConfigError(f"relative_margin={self.relative_margin} must be between 0 and 1: {what}")
        if has_model != (method == "dense"):
            raise ConfigError("method bm25 uses no MODEL: leave it out" if has_model else "method dense needs a MODEL")
        if self.cross_encoder_margin is not None and not has_cross_encoder:
            raise ConfigError("cross_encoder_margin needs a cross_encoder: give both, or leave it out")

    @property
    def depth(self) -> int:
        """How many candidates of a query, known positives apart, are considered."""
        if self.range_max is not None:
            return self.range_max
        plain = SelectionRules(self.num_negatives, self.range_min, seed=self.seed)
        return self.range_min + self.num_negatives * (1 if self == plain else _SPARE)


# Mining --------------------------------------------------------------------------------------------------------------


@dataclass
class MinedNegatives:
    """What `mine_hard_negatives` found, for Q queries.

    Attributes:
        data, rules: what it was given.
        rows: (Q, num_negatives) int64, rows of `data.documents`, best first, -1 where there are fewer.
        scores: the same shape, -inf where there are fewer.
        positive_scores: for each query the scores of `data.positives`.
        dropped: how many candidates each rule dropped.
        search: its settings.
    """

    data: MiningData
    rules: SelectionRules
    rows: np.ndarray
    scores: np.ndarray
    positive_scores: list[np.ndarray]
    dropped: dict[str, int] = field(default_factory=dict)
    search: dict[str, Any] = field(default_factory=dict)

    def kept(self, on_too_few: str = "drop") -> np.ndarray:
        """bool (Q,): queries to write. "drop" leaves out those with fewer than `num_negatives`, "keep" none."""
        return np.asarray((self.rows >= 0).all(axis=1) | (on_too_few == "keep"))

    def record(self, on_too_few: str = "drop") -> dict[str, Any]:
        """Settings and counts, for a report; counts are of what `on_too_few` leaves."""
        found, left = (self.rows >= 0).sum(axis=1), self.kept(on_too_few)
        pairs, negative = np.array(self.data.pair_counts), self.scores[self.rows >= 0]
        return {
            "data": self.data.record,
            "search": self.search,
            "rules": {**asdict(self.rules), "range_max": self.rules.depth},
            "dropped": self.dropped,
            "on_too_few": on_too_few,
            "queries": len(found),
            "queries_with_too_few": int((found < self.rules.num_negatives).sum()),
            "queries_kept": int(left.sum()),
            "pairs": int(pairs.sum()),
            "pairs_kept": int(pairs[left].sum()),
            "negatives_kept": int(found[left].sum()),
            "mean_positive_score": float(np.concatenate(self.positive_scores).mean()),
            "mean_negative_score": float(negative.mean()),
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
        model: what `FaissSearcher` takes; None for BM25.
        method: "dense", or "bm25" where there is no model yet that is worth asking.
        cross_encoder: see `load_cross_encoder`; its margin is 3.0, if it is not given.
        similarity: "cos" or "dot"; None is the model's own.
        index, index_parameters, batch_size, autocast_dtype, bm25_k1, bm25_b: see `build_index`, `encode_texts` and
            `BM25Index`.
        rules: fields of `SelectionRules`, by name.

    Raises:
        ConfigError: settings that cannot work, before anything is encoded.
        DataError: data that cannot be used, or no negative for any query.
        UserError: a model that gives NaN or infinity.
    """
    if cross_encoder is not None:
        rules = {"cross_encoder_margin": 3.0, **rules}
    checked = SelectionRules(**rules)
    checked.check(method, model is not None, cross_encoder is not None)
    if not isinstance(data, MiningData):
        data = load_mining_data(data)
    k = min(checked.depth + max(map(len, data.excluded)), data.pool_size)
    if method == "bm25":
        search, scores, rows, positive_scores = _search_bm25(data, k, bm25_k1, bm25_b, show_progress)
    else:
        settings = (similarity, index, index_parameters, batch_size, autocast_dtype, show_progress)
        search, scores, rows, positive_scores = _search_dense(data, model, k, *settings)
    for number, out in enumerate(data.excluded):
        scores[number, np.isin(rows[number], out)] = -np.inf

    # One more than there are, to stand for none.
    missing = ((0, 0), (0, max(1, checked.num_negatives - k)))
    scores, rows = np.pad(scores, missing, constant_values=-np.inf), np.pad(rows, missing, constant_values=-1)
    lowest = np.array([min(of_query) for of_query in positive_scores], dtype=np.float32)
    places, dropped = _candidates(scores, lowest, checked)
    passed = places >= 0
    if cross_encoder is not None:
        passed = _second_opinion(data, rows, places, cross_encoder, checked, batch_size)
    passed &= np.cumsum(passed, axis=1) <= checked.num_negatives
    if not passed.any():
        what = "loosen the rules, raise range_max, or give a larger corpus"
        raise DataError(f"{data.record['path']}: no query has a negative left ({what})")
    # Places are in the order of scores, so that the smallest are the best, and the last stands for none.
    best = np.sort(np.where(passed, places, rows.shape[1] - 1), axis=1)[:, : checked.num_negatives]
    rows, scores = np.take_along_axis(rows, best, axis=1), np.take_along_axis(scores, best, axis=1)
    return MinedNegatives(data, checked, rows, scores, positive_scores, dropped, search)


# The settings for a report; scores float32 and rows int64 (Q, k), best first, row -1 for none; scores of positives.
_Found = tuple[dict[str, Any], np.ndarray, np.ndarray, list[np.ndarray]]


def _search_dense(
    data: MiningData, model: Any, k: int, similarity: str | None, factory: str, parameters: str | None, *encoding: Any
) -> _Found:
    """What a model and FAISS find."""
    from contaccum.retrieval.encode import encode_corpus, encode_queries, metric_of
    from contaccum.retrieval.index import build_index, check_factory, prepared, search

    metric = metric_of(model, similarity)
    if hasattr(model, "get_embedding_dimension"):
        check_factory(factory, model.get_embedding_dimension(), data.pool_size, metric, parameters)
    documents = [passage._asdict() for passage in data.documents]
    passages, queries = encode_corpus(model, documents, *encoding), encode_queries(model, data.queries, *encoding)
    built = build_index(passages[: data.pool_size], factory, metric, parameters=parameters)
    scores, rows = search(built, queries, k)
    queries = prepared(queries, metric, "query embedding")
    positives = [
        prepared(passages[of_query], metric, "document embedding") @ queries[number]
        for number, of_query in enumerate(data.positives)
    ]
    about = {"similarity": metric, "index": built.factory, "index_parameters": built.parameters, "gpus": built.gpus}
    return {"method": "dense", **about, "precision": encoding[1] or "float32"}, scores, rows, positives


def _search_bm25(data: MiningData, k: int, k1: float, b: float, show_progress: bool) -> _Found:
    """What BM25 finds. Positives from outside the pool are part of its statistics, so that they have a score."""
    from tqdm.auto import tqdm

    from contaccum.retrieval.searcher import BM25Index, best_rows

    index = BM25Index([d.passage for d in data.documents], data.record["path"], k1, b, show_progress)
    scores = np.full((len(data.queries), k), -np.inf, dtype=np.float32)
    rows: np.ndarray = np.full(scores.shape, -1, dtype=np.int64)
    positives = []
    for number, query in enumerate(tqdm(data.queries, desc="Searching", disable=not show_progress)):
        of_all = index.scores(query)
        positives.append(of_all[data.positives[number]])
        best = best_rows(of_all[: data.pool_size], k)
        rows[number, : len(best)], scores[number, : len(best)] = best, of_all[best]
    return {"method": "bm25", "k1": k1, "b": b}, scores, rows, positives


def _candidates(scores: np.ndarray, lowest: np.ndarray, rules: SelectionRules) -> tuple[np.ndarray, dict[str, int]]:
    """Places (Q, k) of what passes the rules, in the order in which it is taken, -1 beyond; what each rule dropped.

    Args:
        scores: (Q, k), best first, -inf for what may not be a negative.
        lowest: (Q,), the score of each query's lowest positive.
    """
    left = scores > -np.inf
    left &= np.cumsum(left, axis=1) <= rules.depth
    lowest, dropped = lowest[:, None], {}
    passes: dict[str, Callable[[float], np.ndarray]] = {
        "absolute_margin": lambda margin: scores <= lowest - np.float32(margin),
        "relative_margin": lambda margin: scores <= lowest - np.abs(lowest) * np.float32(margin),
        "max_score": lambda bound: scores <= bound,
        "min_score": lambda bound: scores >= bound,
    }
    for name, passing in passes.items():
        if (value := getattr(rules, name)) is not None:
            before, left = left, left & passing(value)
            dropped[name] = int(before.sum() - left.sum())
    left &= np.cumsum(left, axis=1) > rules.range_min
    order = np.broadcast_to(np.arange(scores.shape[1], dtype=np.float32), scores.shape)
    if rules.sampling == "random":
        order = np.random.default_rng(rules.seed).random(scores.shape, dtype=np.float32)
    places = np.argsort(np.where(left, order, np.inf), axis=1, kind="stable")
    return np.where(np.take_along_axis(left, places, axis=1), places, -1), dropped


def _second_opinion(
    data: MiningData, rows: np.ndarray, places: np.ndarray, cross_encoder: Any, rules: SelectionRules, batch_size: int
) -> np.ndarray:
    """Which candidates a cross-encoder scores low enough, bool (Q, k) as `places`.

    It reads candidates in the order in which they would be taken, and no more than it takes to fill up. Scores are
    logits: "3 points below the positive" has no meaning between 0 and 1.
    """
    import torch

    def read(numbers: np.ndarray, documents: np.ndarray) -> np.ndarray:
        pairs = [(data.queries[n], data.documents[row].passage) for n, row in zip(numbers, documents, strict=True)]
        identity = torch.nn.Identity()
        return cross_encoder.predict(pairs, batch_size=batch_size, activation_fn=identity, show_progress_bar=False)

    counts, h = [len(of_query) for of_query in data.positives], rules.num_negatives
    of_positives = read(np.repeat(np.arange(len(counts)), counts), np.concatenate(data.positives))
    bound = np.minimum.reduceat(of_positives, np.cumsum([0, *counts[:-1]])) - (rules.cross_encoder_margin or 0.0)
    passed: np.ndarray = np.zeros(places.shape, dtype=bool)
    # Rounds of as many as are wanted: most queries are full after one or two, and the rest is never read.
    for start in range(0, places.shape[1], h):
        line, column = np.nonzero((places[:, start : start + h] >= 0) & (passed.sum(axis=1) < h)[:, None])
        if len(line):
            read_now = read(line, rows[line, places[line, column + start]])
            passed[line, column + start] = read_now <= bound[line]
    return passed


def load_cross_encoder(name: str, device: str | None = None, trust_remote_code: bool = False) -> Any:
    """A CrossEncoder from a folder or a hub name.

    Raises:
        UserError: there is no such model, it cannot be loaded, or it was not trained to give one score for a pair.
    """
    from sentence_transformers import CrossEncoder

    from contaccum.encoders import loading

    with loading(name, trust_remote_code) as path:
        cross_encoder = CrossEncoder(path, device=device, trust_remote_code=trust_remote_code)
    config = cross_encoder.model.config
    # sentence-transformers puts a fresh head on an encoder that has none, and its scores are noise.
    trained = any("For" in architecture for architecture in config.architectures or ["For"])
    if config.num_labels != 1 or not trained:
        raise UserError(f"{name}: is not a cross-encoder that was trained to give a pair of texts one score")
    return cross_encoder


# Files ---------------------------------------------------------------------------------------------------------------

OUTPUT_FORMATS = ("pairs", "dpr", "tevatron", "ntuples")


def write_mined(
    mined: MinedNegatives,
    path: AnyPath,
    output_format: str = "pairs",
    on_too_few: str = "drop",
    report: dict[str, Any] | None = None,
    overwrite: bool = False,
) -> tuple[Path, Path]:
    """Write negatives to `path` and a report to `path` + ".report.json", each whole or not at all; returns both paths.

    "pairs" and "ntuples" have a line for each pair, "dpr" and "tevatron" one for each query with all its known
    positives; docs/mining.md has the fields.

    Args:
        on_too_few: "drop" leaves out queries with fewer negatives than `num_negatives`, "keep" writes what there is.
        report: more for the report, beside `mined.record()`.
        overwrite: replace what is there.

    Raises:
        ConfigError, UserError: see `check_output`.
        DataError: under "drop", when no query has enough negatives.
    """
    path, about = check_output(path, output_format, overwrite), mined.record(on_too_few)
    report_path = Path(f"{path}.report.json")
    check_choice("on_too_few", on_too_few, ("drop", "keep"))
    if not about["queries_kept"]:
        mend = "lower num_negatives, loosen the rules, or use on_too_few keep"
        raise DataError(f"{mined.data.record['path']}: no query has {mined.rules.num_negatives} negatives ({mend})")
    kept = np.flatnonzero(mined.kept(on_too_few)).tolist()
    lines = [json.dumps(line, ensure_ascii=False) for query in kept for line in _lines_of(mined, query, output_format)]
    write_text(path, "[\n" + ",\n".join(lines) + "\n]\n" if output_format == "dpr" else (f"{line}\n" for line in lines))
    write_json(report_path, {**(report or {}), "output_format": output_format, **about})
    return path, report_path


def check_output(path: AnyPath, output_format: str, overwrite: bool = False, inputs: Iterable[Any] = ()) -> Path:
    """`path`, once its folder is there and can be written to.

    Args:
        inputs: files that must not be replaced, whatever `overwrite` says.

    Raises:
        ConfigError: an unknown format, a name that does not fit it, or a file that is there already.
        UserError: the path is a folder, or cannot be written to.
    """
    path = Path(path)
    check_choice("output_format", output_format, OUTPUT_FORMATS)
    require_writable(path)
    suffix = ".json" if output_format == "dpr" else ".jsonl"
    if path.suffix != suffix:
        raise ConfigError(f"{path}: output_format {output_format} is written to a file that ends in {suffix}")
    for written in (path, Path(f"{path}.report.json")):
        if written.resolve() in [Path(name).resolve() for name in inputs if name is not None]:
            raise ConfigError(f"{written}: is also the input; name another file")
        if written.exists() and not overwrite:
            raise ConfigError(f"{written}: exists already (name another file, or replace it with --overwrite)")
    return path


def _lines_of(mined: MinedNegatives, query: int, output_format: str) -> Iterator[dict[str, Any]]:
    """What is written of one query: a line for each of its pairs, or one for all of its known positives."""
    data, there = mined.data, mined.rows[query] >= 0
    negatives = [data.documents[row] for row in mined.rows[query][there]]
    scores = _short(mined.scores[query][there])
    positives = [data.documents[row] for row in data.positives[query]]
    of_positives = _short(mined.positive_scores[query])
    if output_format in ("dpr", "tevatron"):
        name = "passage_id" if output_format == "dpr" else "docid"
        above, below = (
            [{name: p.id, "title": p.title, "text": p.text, "score": score} for p, score in zip(*part, strict=True)]
            for part in ((positives, of_positives), (negatives, scores))
        )
        if output_format == "dpr":
            contexts = {"positive_ctxs": above, "negative_ctxs": [], "hard_negative_ctxs": below}
            yield {"question": data.queries[query], "answers": [], **contexts}
        else:
            about = {"query_id": data.query_ids[query], "query": data.queries[query]}
            yield {**about, "positive_passages": above, "negative_passages": below}
        return
    texts = [passage.passage for passage in negatives]
    for positive, score in list(zip(positives, of_positives, strict=True))[: data.pair_counts[query]]:
        line: dict[str, Any] = {"query": data.queries[query], "positive": positive.passage}
        if output_format == "ntuples":
            line |= {f"negative_{number}": text for number, text in enumerate(texts, 1)}
            line["scores"] = [score, *scores]
        else:
            line |= {"negatives": texts, "positive_score": score, "negative_scores": scores}
        yield line


def _short(scores: np.ndarray) -> list[float]:
    """Seven digits, about what a float32 has."""
    return [float(f"{score:.7g}") for score in scores]
