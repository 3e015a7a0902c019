"""Training data: records of any format in a cache of Arrow files, as rows that are sampled when they are read.

The cache holds each record once, with all its positives and negatives; what rows take of them is `sampling`'s affair.
`datasets` writes the files, locks them, and maps them into memory.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from contaccum.data import sampling
from contaccum.data.readers import DATA_FORMATS, JUDGED, DataFormat, Source, parse_columns
from contaccum.data.records import OnBadRecord, RecordReport, one_line, quoted
from contaccum.data.sampling import (
    EpochSampling,
    MissingNegatives,
    PositivesUsed,
    Selection,
    several_positives,
)
from contaccum.errors import ConfigError, DataError, check_choice
from contaccum.files import AnyPath, Fingerprint, cache_folder, fingerprint, read_json, write_json

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict

_TRIPLES = (
    30  # of an MS MARCO query that are sampled from unless said otherwise: published are hundreds
)


@dataclass(frozen=True)
class TrainingData:
    """Training pairs, and where they came from."""

    # Rows {"query", "positive", "negative_1" .. "negative_h"} of texts, in this order, and "label" for the loss: ids
    # where queries have several positives, a teacher's scores where they are asked for, or both.
    dataset: Dataset
    path: str
    data_format: DataFormat
    report: RecordReport  # what became of every record
    fingerprint: str  # sha256, in hex, of the texts in order and of all that is sampled from
    transform: EpochSampling  # what makes the rows
    pairs: np.ndarray  # int64 (n, 2), hashes of query and positive for every pair, mapped
    unused_scores: bool = False  # there are a teacher's scores, which nobody asked for

    @property
    def known_positives(self) -> np.ndarray | None:
        """int64 (r, 2), hashes of query and positive for every pair of the queries that have several positives, in one
        record or in many; None: there are none."""
        return self.transform.known_positives

    def record(self) -> dict[str, Any]:
        """What a result says of it."""
        about = {"path": self.path, "format": self.data_format, "fingerprint": self.fingerprint}
        return about | {"rows": len(self.dataset)}


def load_training_data(
    path: AnyPath,
    data_format: DataFormat | None = None,
    split: str = "train",
    num_hard_negatives: int = 0,
    on_bad_record: OnBadRecord = "stop",
    columns: Mapping[str, str] | None = None,
    positives: PositivesUsed | None = None,
    negatives_from: int | None = None,
    missing_negatives: MissingNegatives = "fill",
    negatives_to_come: bool = False,
    teacher_scores: bool = False,
    corpus: AnyPath | None = None,
    min_score: float | None = None,
) -> TrainingData:
    """Read training pairs with `num_hard_negatives` (h) hard negatives each; a second time, open what was read.

    Rows hold the texts of the epoch that was set with ``transform.set_epoch``, or of epoch 0.

    Args:
        path, data_format, split, columns, on_bad_record, corpus, min_score: see `read_records`.
        num_hard_negatives, positives, negatives_from, missing_negatives: see `Selection`.
        negatives_to_come: a source without hard negatives is no mistake, as they will be mined while training.
        teacher_scores: rows hold those of their positive and negatives; a record without them is a bad record.

    Raises:
        ConfigError: an unknown format, or settings that cannot be used.
        DataError: a source, a record or a cache that cannot be used, no row is left, or no record has a negative.
    """
    report = RecordReport(on_bad_record)
    source = Source(
        path,
        data_format,
        split,
        columns,
        needs_scores=teacher_scores,
        corpus=corpus,
        min_score=min_score,
    )
    if source.data_format == "msmarco":
        source.num_negatives = 0
        if num_hard_negatives:
            source.num_negatives = negatives_from or max(_TRIPLES, num_hard_negatives)
    if not positives:
        positives = "all" if source.data_format in JUDGED else "draw"
    selection = Selection(num_hard_negatives, positives, negatives_from, missing_negatives)
    records, pairs, facts = _cached(source, report)
    report.restore(facts["report"])
    num_positives = _list_lengths(records, "positives")
    num_negatives = _list_lengths(records, "negatives")
    if num_hard_negatives and not num_negatives.any() and not negatives_to_come:
        message = (
            f"num_hard_negatives={num_hard_negatives}, but no record has a negative (mine some)"
        )
        raise DataError(one_line(f"{path}: {message}"))
    if teacher_scores:
        _refuse_fillers_without_score(path, selection, num_negatives)
    kept = np.arange(len(records))
    if missing_negatives == "drop":
        kept = np.flatnonzero(num_negatives >= num_hard_negatives)
    report.leave_out(source.path, sampling.TOO_FEW, len(records) - len(kept))
    report.refuse_if_nothing_left(path, len(kept), "training pairs")
    names = ["query", "positive", *(f"negative_{i + 1}" for i in range(num_hard_negatives))]
    rows = _rows_of_records(kept, len(records), selection, num_positives)
    transform = EpochSampling(records, names, selection, rows, several_positives(pairs))
    transform.gives_scores = teacher_scores
    return TrainingData(
        sampling.as_rows(transform),
        str(path),
        source.data_format,
        report,
        _content_fingerprint(facts, selection, num_positives, num_negatives, teacher_scores),
        transform,
        pairs,
        unused_scores=facts["scores"] != fingerprint() and not teacher_scores,
    )


def _list_lengths(records: Dataset, name: str) -> np.ndarray:
    """Return the number of texts in each record's list, without reading the texts."""
    import pyarrow.compute as pc

    return pc.list_value_length(records.data.column(name)).to_numpy()


def _refuse_fillers_without_score(
    path: AnyPath, selection: Selection, num_negatives: np.ndarray
) -> None:
    """Refuse records that would be filled up with passages for which there is no teacher's score."""
    h = selection.num_hard_negatives
    num_short = int((num_negatives < h).sum())
    if selection.missing_negatives == "fill" and num_short:
        message = f"{num_short} records have fewer than num_hard_negatives={h} negatives, and what fills up has no score"
        remedy = "set missing_negatives=drop, or lower num_hard_negatives"
        raise DataError(one_line(f"{path}: {message} ({remedy})"))


def _rows_of_records(
    kept: np.ndarray, num_records: int, selection: Selection, num_positives: np.ndarray
) -> np.ndarray | None:
    """Return the record of each row, and which of its positives the row has, int64 (N, 2).

    None: row i is record i.
    """
    rows_per_record = np.ones_like(kept)
    if selection.positives == "all":
        rows_per_record = num_positives[kept]
    if len(kept) == num_records and rows_per_record.max() <= 1:
        return None
    first_rows = np.cumsum(rows_per_record) - rows_per_record
    which_positive = np.arange(rows_per_record.sum()) - np.repeat(first_rows, rows_per_record)
    return np.column_stack([np.repeat(kept, rows_per_record), which_positive])


def _content_fingerprint(
    facts: Mapping[str, Any],
    selection: Selection,
    num_positives: np.ndarray,
    num_negatives: np.ndarray,
    teacher_scores: bool,
) -> str:
    """Return the fingerprint of the texts and of the settings that make a difference to them."""
    parts: list[Any] = [facts["texts"]]
    parts.append(selection.positives if num_positives.max() > 1 else "one")
    if selection.num_hard_negatives:
        most = num_negatives.max()
        parts += [facts["negatives"], selection.num_hard_negatives]
        parts.append(int(min(selection.negatives_from or most, most)))
        has_missing = num_negatives.min() < selection.num_hard_negatives
        parts.append(selection.missing_negatives if has_missing else None)
    if teacher_scores:
        parts.append(facts["scores"])
    return fingerprint(*parts)


SET_KEYS = {
    "path": "path",
    "name": "name",
    "format": "data_format",
    "columns": "columns",
    "split": "split",
}
SET_KEYS |= {"corpus": "corpus", "min_score": "min_score"}
"""What may be said of one set, and the arguments of `load_training_data` that it becomes."""


@dataclass(frozen=True)
class TrainingSets:
    """Several sets that were read, by name, or one."""

    parts: Mapping[str, TrainingData]
    fingerprint: str  # sha256, in hex, of those of all in order

    @property
    def dataset(self) -> Dataset | DatasetDict:
        """The rows, of several by the names of the sets."""
        from datasets import DatasetDict

        rows = {name: part.dataset for name, part in self.parts.items()}
        return DatasetDict(rows) if len(rows) > 1 else next(iter(rows.values()))

    def record(self) -> dict[str, Any]:
        """What a result says of them."""
        return {
            "fingerprint": self.fingerprint,
            "sets": {name: part.record() for name, part in self.parts.items()},
        }

    def summary(self) -> str:
        """A line for each set: what became of its records, and of scores."""
        unused = {True: "; its teacher scores are not used (set distill)", False: ""}
        return "\n".join(
            f"{name}: {x.report.summary()}{unused[x.unused_scores]}"
            for name, x in self.parts.items()
        )


def load_training_sets(sets: Mapping[str, Mapping[str, Any]], **common: Any) -> TrainingSets:
    """Read each set as `load_training_data` does with its arguments and `common`; of several, all know the positives
    of all: what any set calls a positive of a query is no negative of it in another.

    Raises:
        ConfigError, DataError: as `load_training_data`.
    """
    parts = {name: load_training_data(**{**common, **how}) for name, how in sets.items()}
    if len(parts) > 1:
        known = several_positives(np.concatenate([part.pairs for part in parts.values()]))
        for part in parts.values():  # whose rows meet, and equal texts must be known for that
            part.transform.gives_ids, part.transform.known_positives = True, known
    found = [part.fingerprint for part in parts.values()]
    return TrainingSets(parts, found[0] if len(found) == 1 else fingerprint(*found))


def parse_training_sets(
    given: Sequence[str | Mapping[str, Any]], common: Mapping[str, Any] | None = None
) -> dict[str, dict[str, Any]]:
    """The arguments of `load_training_data` for each set by its name, from paths and mappings with keys of `SET_KEYS`.

    A mapping, or a text that is one in JSON, overrides what is `common` to all. Raises `ConfigError` for what cannot be
    used, and for two sets of one name.
    """
    sets: dict[str, dict[str, Any]] = {}
    for item in given:
        try:
            said: Any = item
            if isinstance(item, str):
                said = json.loads(item) if item.lstrip().startswith("{") else {"path": item}
            for key in said:
                check_choice("a key of a set", key, SET_KEYS)
            how = {**(common or {}), **{SET_KEYS[key]: value for key, value in said.items()}}
            if not isinstance(how.get("path"), str):
                raise ConfigError("a set has a path, as {path: FILE}")
            how["columns"] = parse_columns(how.get("columns"))
            check_choice("format", how.get("data_format"), (None, *DATA_FORMATS))
            Selection(**{one.name: how[one.name] for one in fields(Selection) if one.name in how})
        except ValueError as error:  # a ConfigError is one too
            raise ConfigError(one_line(f"train_data: {quoted(item)}: {error}")) from error
        file = re.sub(
            r"(\.(jsonl|json|csv|tsv|parquet))?(\.gz)?$", "", Path(how["path"]).resolve().name
        )
        name = how.pop("name", file)
        if name in sets:
            raise ConfigError(
                f"train_data: two sets are called {name!r}: give one of them another name"
            )
        sets[name] = how
    return sets


_ABOUT, _PAIRS = "about.json", "pairs.int64"


def _cached(source: Source, report: RecordReport) -> tuple[Dataset, np.ndarray, dict[str, Any]]:
    """The records of a source in the cache, their `pairs`, and facts; one process writes what is not there."""
    from datasets import Dataset, Features, List, Value, disable_progress_bars
    from datasets.exceptions import DatasetGenerationError

    key = source.key(report.on_bad_record)[:32]
    folder = cache_folder("datasets", key)
    texts = List(Value("string"))
    features = Features(
        query=Value("string"), positives=texts, negatives=texts, scores=List(Value("float32"))
    )

    def generate() -> Iterator[dict[str, Any]]:
        content, negatives, scores, count = Fingerprint(), Fingerprint(), Fingerprint(), 0
        with open(folder / _PAIRS, "wb") as pairs_file:
            for count, record in enumerate(source.records(report), start=1):  # noqa: B007  # used when it ends
                query, *positives = sampling.text_ids([record.query, *record.positives])
                pairs_file.write(
                    b"".join(query.tobytes() + positive.tobytes() for positive in positives)
                )
                content.add(record.query, *record.positives, "")
                negatives.add(*record.negatives, "")
                if record.scores is not None:
                    scores.add(record.scores)
                yield record._asdict()
        report.refuse_if_nothing_left(source.path, count, "training pairs")
        about = {"texts": content.hex(), "negatives": negatives.hex(), "scores": scores.hex()}
        write_json(folder / _ABOUT, about | {"report": vars(report)})
        _remove_unused(folder.parent)

    if not sys.stderr.isatty():  # no bars in a log
        disable_progress_bars()
    try:
        records = Dataset.from_generator(generate, features, str(folder), fingerprint=key)
        os.utime(folder / _ABOUT)
    except (DatasetGenerationError, OSError) as error:
        cause = error.__cause__ or error
        if isinstance(cause, OSError):
            raise DataError(
                one_line(f"{folder}: the data cannot be stored: {cause} (set CONTACCUM_CACHE)")
            ) from error
        raise cause from None
    pairs = np.memmap(folder / _PAIRS, dtype=np.int64, mode="r").reshape(-1, 2)
    return records, pairs, read_json(folder / _ABOUT)


def _remove_unused(folder: Path) -> None:
    """Remove what has not been opened for `$CONTACCUM_CACHE_DAYS` days, 30 by default."""
    oldest = time.time() - float(os.environ.get("CONTACCUM_CACHE_DAYS") or 30) * 86_400
    for entry in folder.iterdir():
        with suppress(OSError):
            opened = max(path.stat().st_mtime for path in (entry, entry / _ABOUT) if path.exists())
            if opened < oldest:
                shutil.rmtree(entry, ignore_errors=True)
