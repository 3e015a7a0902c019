"""Training data as a `datasets.Dataset`: a query, its positive passage, and hard negatives if asked for.

It takes the records of any format (`reading`) and gives text columns in the order that sentence-transformers' losses
expect. It does not tokenize, shuffle, split or mine, and it writes nothing to a cache.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from contaccum.data.fields import parse_columns
from contaccum.data.formats import DATA_FORMATS, JUDGED, DataFormat, sniff_format
from contaccum.data.reading import read_records
from contaccum.data.record import NEGATIVES_NOT_USED
from contaccum.data.records import OnBadRecord, RecordReport, add_to_fingerprint, one_line
from contaccum.errors import ConfigError

if TYPE_CHECKING:
    from datasets import Dataset

_REPEATED = "pairs that occur again, kept"


@dataclass(frozen=True)
class TrainingData:
    """Training pairs, and where they came from.

    Attributes:
        dataset: text columns "query", "positive", "negative_1" .. "negative_h", in this order, and the topic if asked.
        report: what became of every record that was read.
        fingerprint: sha256, in hex, of the texts in order, whatever format they were in.
        data_format: one of `DATA_FORMATS`.
        path: the file or folder, or the name of a dataset on the hub.
        name: its name without the extension.
    """

    dataset: Dataset
    report: RecordReport = field(repr=False, compare=False)
    fingerprint: str
    data_format: DataFormat
    path: Path
    name: str


def load_training_data(
    path: str | Path,
    data_format: DataFormat | None = None,
    split: str = "train",
    num_hard_negatives: int = 0,
    on_bad_record: OnBadRecord = "stop",
    title_separator: str = " ",
    columns: Mapping[str, str] | None = None,
    topic_column: str | None = None,
) -> TrainingData:
    """Read training pairs with `num_hard_negatives` (h) hard negatives each.

    The formats are those of `read_records`. A judgement above 0 of a BEIR or MS MARCO folder is one row; of any other
    record, the first positive is used. A passage is (title + separator + text).strip(). Pairs that occur twice are
    kept, and noted in the report.

    Args:
        path: a file, plain or gzip, a folder, or the name of a Hugging Face dataset.
        data_format: one of `DATA_FORMATS`; None: told from the content.
        split: of a BEIR or MS MARCO folder or of a dataset; a file has no splits, and there it does nothing.
        num_hard_negatives: h, the first of each record. One with fewer is a bad record; with 0, negatives are not
            used and not checked.
        on_bad_record: "stop" or "skip".
        title_separator: between a title and its text.
        columns: {role: name} for formats with named fields; see `read_records`.
        topic_column: a field with a text or number in every record of a file, to become the last column.

    Raises:
        ConfigError: an unknown format, hard negatives or topics from a format that has none, or columns that cannot
            be used.
        DataError: the source cannot be used, a bad record under "stop", or no row is left.
    """
    source = Path(path)
    if data_format is not None and data_format not in DATA_FORMATS:
        raise ConfigError(f"data_format={data_format!r} is unknown (use one of {', '.join(DATA_FORMATS)})")
    if isinstance(num_hard_negatives, bool) or not isinstance(num_hard_negatives, int) or num_hard_negatives < 0:
        raise ConfigError(f"num_hard_negatives={num_hard_negatives!r} is not a number of texts (use 0 or more)")
    names = ["query", "positive", *(f"negative_{i + 1}" for i in range(num_hard_negatives))]
    if topic_column in names:
        raise ConfigError(
            f"topic_column={topic_column} is the name of a text column (call the topic's field otherwise)"
        )
    report = RecordReport(on_bad_record)
    mapping = parse_columns(columns)
    found = data_format or sniff_format(path, mapping)
    if num_hard_negatives and (found == "beir" or data_format == "pairs"):
        raise ConfigError(
            one_line(
                f"num_hard_negatives={num_hard_negatives}, but data_format={found} has no hard negatives: "
                f"{source} (mine them first, or set num_hard_negatives to 0)"
            )
        )
    most = None if found in JUDGED else 1
    records = read_records(path, found, split, mapping, report, title_separator, most, num_hard_negatives, topic_column)
    names += [topic_column] if topic_column else []
    rows: list[list[str]] = [[] for _ in names]
    digest = hashlib.sha256()
    pairs: set[int] = set()
    for query, positives, negatives, topic in records:
        for positive in positives:
            texts = (query, positive, *negatives, *([topic] if topic is not None else []))
            add_to_fingerprint(digest, *texts)
            for column, text in zip(rows, texts, strict=True):
                column.append(text)
            # A hash is enough to count by, and keeps the texts from being held twice.
            pairs.add(hash((query, positive)))
    report.note(_REPEATED, len(rows[0]) - len(pairs))
    report.refuse_if_nothing_left(source, len(rows[0]), "training pairs")
    if data_format is None and found == "pairs" and (num_hard_negatives or report.notes[NEGATIVES_NOT_USED]):
        found = "triplets"

    from datasets import Dataset

    return TrainingData(
        dataset=Dataset.from_dict(dict(zip(names, rows, strict=True))),
        report=report,
        fingerprint=digest.hexdigest(),
        data_format=found,
        path=source,
        # resolve(), so that "." has a name too.
        name=re.sub(r"(\.(jsonl|ndjson|json|csv|tsv|parquet))?(\.gz)?$", "", source.resolve().name),
    )
