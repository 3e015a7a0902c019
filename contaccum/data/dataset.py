"""Training data: records of any format in a cache of Arrow files, as rows that are sampled when they are read.

The cache holds each record once, with all its positives and negatives; what rows take of them is `sampling`'s affair.
`datasets` writes the files, locks them, and maps them into memory. Data too large for the disk are streamed.
"""

from __future__ import annotations

import os
import re
import shutil
import struct
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from contaccum.data.columns import RecordRules
from contaccum.data.msmarco import qrels_file
from contaccum.data.readers import JUDGED, DataFormat, Source, source_of
from contaccum.data.records import Fault, OnBadRecord, RecordReport, name_of, one_line
from contaccum.data.sampling import (
    DROPPED,
    NONE_LISTED,
    EpochSampling,
    MissingNegatives,
    PositivesUsed,
    Selection,
    as_rows,
    several_positives,
    stream_rows,
    text_hash,
)
from contaccum.errors import ConfigError, DataError, UserError
from contaccum.files import AnyPath, cache_folder, fingerprint, read_json, write_json
from contaccum.files import Fingerprint as Content

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

SHUFFLE_BUFFER = 10_000


@dataclass(frozen=True)
class TrainingData:
    """Training pairs, and where they came from.

    Attributes:
        dataset: rows {"query", "positive", "negative_1" .. "negative_h"} of texts, in this order, and "label", ids for
            the loss, where queries have several positives.
        report: what became of every record that was read; of a stream, in the pass that is being read.
        fingerprint: sha256, in hex, of the texts in order, whatever format they were in, with all that is sampled from;
            of a stream, of its files' names, sizes and times.
        data_format: one of `DATA_FORMATS`.
        path: the file or folder, or the name of a dataset on the hub.
        name: its name without the extension.
        transform: what makes the rows; None of a stream.
        pairs: int64 (n, 2), hashes of query and positive for every pair, mapped.
    """

    dataset: Dataset | IterableDataset
    report: RecordReport = field(repr=False, compare=False)
    fingerprint: str
    data_format: DataFormat
    path: Path
    name: str
    transform: EpochSampling | None = field(default=None, repr=False, compare=False)
    pairs: np.ndarray | None = field(default=None, repr=False, compare=False)

    @property
    def known_positives(self) -> np.ndarray | None:
        """int64 (r, 2), hashes of query and positive for every pair of the queries that have several positives, in one
        record or in many; None: there are none, or nobody knows, of a stream."""
        return None if self.transform is None else self.transform.known_positives

    def summary(self) -> str:
        """One line: what became of the records."""
        return self.report.summary()

    def prompts(self, model_prompts: Mapping[str, str | None]) -> None:
        """A set alone has no prompts of its own; see `TrainingSets`."""

    def records(self) -> dict[str, dict[str, Any]]:
        """Nor is there anything to say of each of several."""
        return {}


def load_training_data(
    path: AnyPath,
    data_format: DataFormat | None = None,
    split: str = "train",
    num_hard_negatives: int = 0,
    on_bad_record: OnBadRecord = "stop",
    title_separator: str = " ",
    columns: Mapping[str, str] | None = None,
    topic_column: str | None = None,
    positives: PositivesUsed | None = None,
    negatives_from: int | None = None,
    draw_negatives: bool = True,
    missing_negatives: MissingNegatives = "fill",
    negatives_to_come: bool = False,
    streaming: bool = False,
    shuffle_buffer_size: int = SHUFFLE_BUFFER,
    seed: int = 0,
) -> TrainingData:
    """Read training pairs with `num_hard_negatives` (h) hard negatives each; a second time, open what was read.

    The formats are those of `read_records`. Rows hold the texts of the epoch that `ContAccumTrainer` has set with
    ``transform.set_epoch``, with its seed, or epoch 0.

    Args:
        path: a file, plain or gzip, a folder, or the name of a Hugging Face dataset.
        data_format: one of `DATA_FORMATS`; None: told from the content.
        split: of a BEIR or MS MARCO folder or of a dataset; a file has no splits, and there it does nothing.
        num_hard_negatives, positives, negatives_from, draw_negatives, missing_negatives: see `Selection`.
        on_bad_record: "stop" or "skip".
        title_separator: between a title and its text.
        columns: {role: name} for formats with named fields; see `read_records`.
        topic_column: a field with a text or number in every record of a file, to become a column after the texts.
        negatives_to_come: a source without hard negatives is no mistake, as they will be mined while training.
        streaming: store nothing, and read the files anew in each pass; an endless `datasets.IterableDataset`.
        shuffle_buffer_size, seed: of a stream: rows that are held, and what order and samples depend on.

    Raises:
        ConfigError: an unknown format, hard negatives or topics from a format that has none, or settings that cannot
            be used.
        DataError: the source cannot be used, a bad record under "stop", no row is left, no record has a negative and
            some were asked for, or the cache cannot be written.
    """
    selection = Selection(num_hard_negatives, positives, negatives_from, draw_negatives, missing_negatives)
    if topic_column is not None and re.fullmatch("query|positive|negative_[0-9]+", topic_column):
        raise ConfigError(
            f"topic_column={topic_column} is the name of a text column (call the topic's field otherwise)"
        )
    source = source_of(path, data_format, split, columns, RecordRules(title_separator, None, topic_column))
    found, report = source.data_format, RecordReport(on_bad_record)
    if num_hard_negatives and not negatives_to_come and (found == "beir" or data_format == "pairs"):
        mend = "mine them first, or set num_hard_negatives to 0"
        raise ConfigError(
            f"num_hard_negatives={num_hard_negatives}, but data_format={found} has no hard negatives: {path} ({mend})"
        )
    selection = selection.resolved(found)
    # Published triples list hundreds of negatives: no more are read than are sampled from.
    most = (selection.negatives_from or num_hard_negatives) if num_hard_negatives else 0
    if found == "msmarco" and source.path.is_dir():
        source = replace(source, rules=replace(source.rules, num_negatives=most))
    if streaming:
        rows = stream_rows(source, selection, report, shuffle_buffer_size, seed)
        content = source.key("stream", on_bad_record, *astuple(selection), shuffle_buffer_size)
        return TrainingData(rows, report, content, found, source.path, name_of(path))
    return _stored(source, selection, report, negatives_to_come, data_format is None)


# The cache -----------------------------------------------------------------------------------------------------------


def _stored(
    source: Source, selection: Selection, report: RecordReport, negatives_to_come: bool, sniffed: bool
) -> TrainingData:
    folder, records, about = _cached(source, report)
    report.restore(about["report"])
    counts = np.memmap(folder / _COUNTS, dtype="<i4", mode="r").reshape(-1, 2).T
    rows = _rows(source, selection, counts, records, report)
    size = len(records) if rows is None else len(rows)
    h = selection.num_hard_negatives
    if h and not counts[0].any() and not negatives_to_come:
        raise DataError(one_line(f"{source.path}: num_hard_negatives={h}, {NONE_LISTED}"))
    report.refuse_if_nothing_left(source.path, size, "training pairs")
    _note(report, selection, counts, about)
    pairs = np.memmap(folder / _PAIRS, dtype=np.int64, mode="r").reshape(-1, 2)
    known = np.memmap(folder / _KNOWN, dtype=np.int64, mode="r").reshape(-1, 2) if about["known"] else None
    columns = ["query", "positive", *(f"negative_{i + 1}" for i in range(h))]
    sampling = EpochSampling(records, columns, selection, rows, known)
    topic_column, topics = source.rules.topic_column, records.data.column("topic")
    found = source.data_format
    return TrainingData(
        dataset=as_rows(sampling, topics if rows is None else topics.take(rows[:, 0]), topic_column),
        report=report,
        fingerprint=_fingerprint(about, selection, counts),
        data_format="triplets" if sniffed and found == "pairs" and counts[0].any() else found,
        path=source.path,
        name=name_of(source.path),
        transform=sampling,
        pairs=pairs,
    )


_ABOUT, _COUNTS, _PAIRS, _KNOWN = "about.json", "counts.int32", "pairs.int64", "known.int64"
_COUNT = struct.Struct("<2i")  # negatives and positives of a record


def _cached(source: Source, report: RecordReport) -> tuple[Path, Dataset, dict[str, Any]]:
    """The folder of the cache, its records, and what is known about them; written first where there are none.

    `datasets` lets one process write and others wait. What else is in the folder is there before they go on.
    """
    from datasets import Dataset, Features, List, Value
    from datasets.exceptions import DatasetGenerationError

    key = source.key(report.on_bad_record)
    folder = cache_folder("datasets", key[:32])
    text, whole = Value("string"), Value("int64")
    features = Features(query=text, positives=List(text), negatives=List(text), topic=text, line=whole)

    def generate() -> Iterator[dict[str, Any]]:
        yield from _written(source, report, folder)
        _remove_unused(folder.parent)

    for _ in range(2):
        try:
            with _quietly():
                records = Dataset.from_generator(generate, features, str(folder), fingerprint=key[:32])
            about = read_json(folder / _ABOUT)
            if len(records) == about["records"]:
                os.utime(folder / _ABOUT)
                return folder, records, about
        except DatasetGenerationError as error:
            cause = error.__cause__ or error
            if isinstance(cause, OSError):
                raise _cannot_store(cause) from error
            raise cause from None
        except OSError as error:
            raise _cannot_store(error) from error
        except (UserError, ValueError):  # somebody has removed or damaged a part of it
            pass
        shutil.rmtree(folder, ignore_errors=True)
    raise DataError(f"{folder}: what was stored is gone again (is somebody clearing the cache?)")


def _written(source: Source, report: RecordReport, folder: Path) -> Iterator[dict[str, Any]]:
    """The records for Arrow; what is known about them lies beside them at the end."""
    texts, with_negatives = Content(), Content()
    count = 0
    with open(folder / _PAIRS, "wb") as pairs_file, open(folder / _COUNTS, "wb") as counts_file:
        for line, record in source.records(report):
            query = text_hash(record.query)
            pairs_file.write(b"".join(query + text_hash(positive) for positive in record.positives))
            counts_file.write(_COUNT.pack(len(record.negatives), len(record.positives)))
            texts.add(record.query, *record.positives, "", record.topic or "")
            with_negatives.add(*record.negatives, "")
            count += 1
            yield {**record._asdict(), "line": line}
    report.refuse_if_nothing_left(source.path, count, "training pairs")
    pairs = np.memmap(folder / _PAIRS, dtype=np.int64, mode="r").reshape(-1, 2)
    known = several_positives(pairs)
    known.tofile(folder / _KNOWN)
    mixed = pairs[:, 0] * np.int64(-7046029254386353131)  # an odd number: one number for each pair
    mixed += pairs[:, 1]
    mixed.sort()
    about = {
        "records": count,
        "known": len(known),
        "repeated": int(np.count_nonzero(mixed[1:] == mixed[:-1])),
        "texts": texts.hex(),
        "negatives": with_negatives.hex(),
        "report": report.to_dict(),
    }
    write_json(folder / _ABOUT, about)


def _remove_unused(folder: Path) -> None:
    """Remove what has not been opened for `$CONTACCUM_CACHE_DAYS` days, 30 by default."""
    oldest = time.time() - float(os.environ.get("CONTACCUM_CACHE_DAYS") or 30) * 86_400
    for entry in folder.iterdir():
        with suppress(OSError):
            opened = max(path.stat().st_mtime for path in (entry, entry / _ABOUT) if path.exists())
            if opened < oldest:
                shutil.rmtree(entry, ignore_errors=True)


@contextmanager
def _quietly() -> Iterator[None]:
    """No bars of progress in a log."""
    from datasets import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if are_progress_bars_disabled() or sys.stderr.isatty():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def _cannot_store(error: BaseException) -> DataError:
    reason = getattr(error, "strerror", None) or str(error)
    mend = "free some space, or name another folder in the environment variable CONTACCUM_CACHE"
    return DataError(one_line(f"{cache_folder()}: the data cannot be stored: {reason} ({mend})"))


# Rows of records -----------------------------------------------------------------------------------------------------


def _rows(
    source: Source, selection: Selection, counts: np.ndarray, records: Dataset, report: RecordReport
) -> np.ndarray | None:
    """int64 (N, 2), the record of each row and which of its positives; None where row i is record i."""
    negatives, positives = counts
    short = negatives < selection.num_hard_negatives
    if short.any() and selection.missing_negatives != "fill":
        file = source.path
        if source.data_format == "msmarco" and file.is_dir():
            file = qrels_file(file, source.split)
        lost = np.where(source.data_format in JUDGED, positives, 1)
        report.used -= int(lost[short].sum())
        if selection.missing_negatives == "drop":
            report.leave_out(file, DROPPED, int(lost[short].sum()))
        for place in np.flatnonzero(short).tolist() if selection.missing_negatives == "stop" else ():
            detail = f"{negatives[place]} where num_hard_negatives is {selection.num_hard_negatives}"
            fault = Fault(
                "too few hard negatives", detail, "lower num_hard_negatives, or set missing_negatives to fill"
            )
            report.reject(file, records[place]["line"], fault, int(lost[place]))
    whole = selection.missing_negatives == "fill" or not short.any()
    if whole and (selection.positives != "all" or positives.max() == 1):
        return None
    kept = np.arange(len(short)) if whole else np.flatnonzero(~short)
    if selection.positives != "all":
        return np.column_stack([kept, np.zeros_like(kept)])
    each = positives[kept].astype(np.int64)
    which = np.arange(each.sum()) - np.repeat(np.cumsum(each) - each, each)
    return np.column_stack([np.repeat(kept, each), which])


def _note(report: RecordReport, selection: Selection, counts: np.ndarray, about: Mapping[str, Any]) -> None:
    negatives, positives = counts
    h = selection.num_hard_negatives
    report.note("pairs that occur again, kept", about["repeated"])
    if h == 0:
        report.note("negatives not used, num_hard_negatives is 0", int(np.count_nonzero(negatives)))
    if selection.positives == "draw":
        report.note("rows with several positives, one drawn in each epoch", int(np.count_nonzero(positives > 1)))
    if h and selection.draw_negatives:
        drawn = int(np.count_nonzero(negatives > h))
        report.note("rows whose hard negatives are drawn in each epoch", drawn)
    if selection.missing_negatives == "fill":
        remark = "rows with too few hard negatives, filled up with other passages"
        report.note(remark, int(np.count_nonzero(negatives < h)))


def _fingerprint(about: Mapping[str, Any], selection: Selection, counts: np.ndarray) -> str:
    """Of the content, and of those settings alone that make a difference to it."""
    negatives, positives = counts
    h, most = selection.num_hard_negatives, int(negatives.max())
    used: list[Any] = [about["texts"], selection.positives if positives.max() > 1 else "one"]
    if h:
        drawn = min(selection.negatives_from or most, most) if selection.draw_negatives and most > h else 0
        used += [about["negatives"], h, drawn, selection.missing_negatives if negatives.min() < h else None]
    return fingerprint(*used)
