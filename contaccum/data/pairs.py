"""Training data as a `datasets.Dataset`: a query, its positive passage, and hard negatives if asked for.

It takes the records of any format (`reading`), keeps the rows that are made of them (`selection`) in files that are
mapped into memory (`row_files`, `cache`), and gives text columns in the order that sentence-transformers' losses
expect. It does not tokenize, shuffle, split or mine.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contaccum.data.arrow_tables import hub_fingerprint
from contaccum.data.cache import files_of, source_key, stored
from contaccum.data.fields import parse_columns
from contaccum.data.formats import DATA_FORMATS, JUDGED, DataFormat, sniff_format
from contaccum.data.reading import read_records
from contaccum.data.record import NEGATIVES_NOT_USED, Record
from contaccum.data.records import OnBadRecord, RecordReport, one_line
from contaccum.data.row_files import FORMAT, RowWriter, open_rows, row_number_column
from contaccum.data.selection import DROPPED, MissingNegatives, PositivesUsed, Selection
from contaccum.errors import ConfigError, DataError
from contaccum.version import __version__

if TYPE_CHECKING:
    import numpy as np
    from datasets import Dataset

    from contaccum.data.draws import Draws

_REPEATED = "pairs that occur again, kept"


@dataclass(frozen=True)
class TrainingData:
    """Training pairs, and where they came from.

    Attributes:
        dataset: text columns "query", "positive", "negative_1" .. "negative_h", in this order, and the topic if asked.
            Where ``transform`` is at work, also a number for each row, "label".
        report: what became of every record that was read.
        fingerprint: sha256, in hex, of the texts in order, whatever format they were in, with all that is drawn from.
        data_format: one of `DATA_FORMATS`.
        path: the file or folder, or the name of a dataset on the hub.
        name: its name without the extension.
        transform: the dataset's transform, which draws what an epoch takes and gives the loss its ids; None where there
            is nothing to draw and no query has several positives.
        known_positives: int64 (r, 2), hashes of query and positive (`hash_texts`) for every pair of the queries that
            have several positives, in one record or in many; None: there are none.
        stored: the folder of the cache, what it says about itself, and the topic's column.
    """

    dataset: Dataset
    report: RecordReport = field(repr=False, compare=False)
    fingerprint: str
    data_format: DataFormat
    path: Path
    name: str
    transform: Draws | None = field(default=None, repr=False, compare=False)
    stored: tuple[Path, dict[str, Any], str | None] | None = field(default=None, repr=False, compare=False)

    @property
    def known_positives(self) -> np.ndarray | None:
        return None if self.transform is None else self.transform.known

    def summary(self) -> str:
        """One line: what became of the records."""
        return self.report.summary()

    def prompts(self, model_prompts: Mapping[str, str | None]) -> None:
        """A set alone has no prompts of its own; see `TrainingSets`."""

    def records(self) -> dict[str, dict[str, Any]]:
        """Nor is there anything to say of each of several."""
        return {}

    def among_others(self, known: np.ndarray | None) -> TrainingData:
        """The same rows as one of several sets: with ids in any case, and what all of the sets together know."""
        assert self.stored is not None
        dataset, transform = _open(*self.stored, known_to_all=(known,))
        return replace(self, dataset=dataset, transform=transform)


def load_training_data(
    path: str | Path,
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
) -> TrainingData:
    """Read training pairs with `num_hard_negatives` (h) hard negatives each; a second time, open what was read.

    The formats are those of `read_records`. Rows are kept in a cache on disk (`cache_folder`) under the path, size and
    time of every file and the settings, and mapped into memory. A passage is (title + separator + text).strip(). Pairs
    that occur twice are kept, and noted in the report.

    Columns hold each row's first positive and first h negatives, which is what samplers see. Where something is drawn,
    ``dataset[i]`` and a loader give the texts of the epoch instead: that which `ContAccumTrainer` has told
    ``transform``, with its seed, or epoch 0. ``dataset.with_format(None)`` gives the columns as they are.

    Args:
        path: a file, plain or gzip, a folder, or the name of a Hugging Face dataset.
        data_format: one of `DATA_FORMATS`; None: told from the content.
        split: of a BEIR or MS MARCO folder or of a dataset; a file has no splits, and there it does nothing.
        num_hard_negatives: h; with 0, negatives are not used and not checked.
        on_bad_record: "stop" or "skip".
        title_separator: between a title and its text.
        columns: {role: name} for formats with named fields; see `read_records`.
        topic_column: a field with a text or number in every record of a file, to become a column after the texts.
        positives, negatives_from, draw_negatives, missing_negatives: see `Selection`.
        negatives_to_come: a source without hard negatives is no mistake, as they will be mined while training.

    Raises:
        ConfigError: an unknown format, hard negatives or topics from a format that has none, or settings that cannot
            be used.
        DataError: the source cannot be used, a bad record under "stop", no row is left, no record has a negative and
            some were asked for, or the cache cannot be written.
    """
    source = Path(path)
    if data_format is not None and data_format not in DATA_FORMATS:
        raise ConfigError(f"data_format={data_format!r} is unknown (use one of {', '.join(DATA_FORMATS)})")
    selection = Selection(num_hard_negatives, positives, negatives_from, draw_negatives, missing_negatives)
    if topic_column is not None and re.fullmatch("query|positive|negative_[0-9]+", topic_column):
        raise ConfigError(
            f"topic_column={topic_column} is the name of a text column (call the topic's field otherwise)"
        )
    report = RecordReport(on_bad_record)
    mapping = parse_columns(columns)
    found = data_format or sniff_format(path, mapping)
    if num_hard_negatives and not negatives_to_come and (found == "beir" or data_format == "pairs"):
        raise ConfigError(
            one_line(
                f"num_hard_negatives={num_hard_negatives}, but data_format={found} has no hard negatives: "
                f"{source} (mine them first, or set num_hard_negatives to 0)"
            )
        )
    selection = selection.resolved(found, source.is_dir())
    records = read_records(
        path,
        found,
        split,
        mapping,
        report,
        title_separator,
        None,
        selection.negatives_read,
        topic_column,
        selection.negatives_required,
    )

    def write(folder: Path) -> dict[str, Any]:
        about = _write(source, records, folder, selection, topic_column, found, report)
        _refuse_unusable(source, selection, about, report, negatives_to_come)
        return {**about, "report": report.to_dict()}

    # Of a dataset of the hub, its own fingerprint stands for its content.
    content = [str(path), hub_fingerprint(str(path), split)] if found == "hub" and not source.exists() else []
    settings = [found, split, on_bad_record, title_separator, mapping, topic_column, *astuple(selection)]
    settings += ["negatives_to_come"] if negatives_to_come else []
    folder, about = stored(source_key(files_of(source), __version__, FORMAT, content, settings), write)
    report.restore(about["report"])
    if data_format is None and found == "pairs" and (num_hard_negatives or report.notes[NEGATIVES_NOT_USED]):
        found = "triplets"
    dataset, transform = _open(folder, about, topic_column)
    return TrainingData(
        dataset=dataset,
        report=report,
        fingerprint=about["fingerprint"],
        data_format=found,
        path=source,
        name=name_of(source),
        transform=transform,
        stored=(folder, about, topic_column),
    )


def name_of(path: str | Path) -> str:
    """The name of a file without its extension, of a folder, or of a dataset of the hub."""
    # resolve(), so that "." has a name too.
    return re.sub(r"(\.(jsonl|ndjson|json|csv|tsv|parquet))?(\.gz)?$", "", Path(path).resolve().name)


def _write(
    source: Path,
    records: Iterable[Record],
    folder: Path,
    selection: Selection,
    topic_column: str | None,
    found: DataFormat,
    report: RecordReport,
) -> dict[str, Any]:
    any_negative = False
    with RowWriter(folder, selection, topic_column) as writer:
        for record in records:
            any_negative = any_negative or bool(record.negatives)
            some = False
            for row in selection.rows(record):
                some = True
                writer.add(row)
            if not some:
                report.leave_out(source, DROPPED, len(record.positives) if found in JUDGED else 1)
        about = writer.finish()
    report.note(_REPEATED, about["repeated"])
    if selection.positives == "draw":
        report.note("rows with several positives, one drawn in each epoch", about["several"])
    report.note("rows whose hard negatives are drawn in each epoch", about["drawn"])
    report.note("rows with too few hard negatives, filled up with other passages", about["short"])
    return {**about, "any_negative": any_negative}


def _refuse_unusable(
    source: Path, selection: Selection, about: Mapping[str, Any], report: RecordReport, negatives_to_come: bool
) -> None:
    h = selection.num_hard_negatives
    any_record = about["rows"] or report.by_reason[DROPPED]
    if h and any_record and not (about["any_negative"] or negatives_to_come):
        mend = "mine some with `contaccum mine`, or set num_hard_negatives to 0"
        raise DataError(one_line(f"{source}: num_hard_negatives={h}, but no record has a negative ({mend})"))
    report.refuse_if_nothing_left(source, about["rows"], "training pairs")


def _open(
    folder: Path,
    about: Mapping[str, Any],
    topic_column: str | None,
    known_to_all: tuple[np.ndarray | None] | None = None,
) -> tuple[Dataset, Draws | None]:
    """The rows, with a transform where something is drawn or known; as one of several sets, always."""
    rows, lists, known = open_rows(folder)
    number = row_number_column(topic_column)
    if lists is None and known is None and not about["short"] and known_to_all is None:
        return rows.remove_columns(number), None
    from contaccum.data.draws import Draws

    known = known if known_to_all is None else known_to_all[0]
    transform = Draws(rows, lists, known, number, ids=known_to_all is not None)
    return rows.with_transform(transform), transform
