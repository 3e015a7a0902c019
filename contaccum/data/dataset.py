"""Training data: rows whose texts are sampled from stored records.

A record is a query with all its positives and negatives. The library `datasets` stores the records
in an Arrow file, which is mapped into memory. A row is one training example, which
`contaccum.data.sampling` samples from a record when the row is read.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from contaccum.data.records import RecordSource, parse_columns
from contaccum.data.rows import OnBadRecord, RecordReport
from contaccum.data.sampling import EpochSampling, collect_known_positives, text_ids
from contaccum.errors import ConfigError, DataError, check_choice, quoted
from contaccum.files import AnyPath, Fingerprint, cache_folder, fingerprint

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict

SET_KEYS = ("path", "name", "columns", "split", "min_score")
"""Keys of a training set in the settings: its name, and arguments of `load_training_data`."""


def store_records(source: RecordSource, report: RecordReport) -> tuple[Dataset, dict[str, str]]:
    """Return the records of a source, which is read only if `datasets` has not stored it yet.

    This is the cache of `datasets`: one process writes an entry, while others that need it wait.
    Its last row is no record: it holds, as JSON, what was counted and hashed during reading, which
    ``report`` receives.

    Returns:
        A data set with the fields of a `Record`, "query_id" and "positive_ids" (see `text_ids`);
            and the sha256, in hex, of queries and positives ("texts"), and of "negatives".
    """
    from datasets import Dataset, Features, List, Value, disable_progress_bars
    from datasets.exceptions import DatasetGenerationError

    features = Features(
        query=Value("string"),
        positives=List(Value("string")),
        negatives=List(Value("string")),
        query_id=Value("int64"),
        positive_ids=List(Value("int64")),
    )

    def generate() -> Iterator[dict[str, Any]]:
        contents = {name: Fingerprint() for name in ("texts", "negatives")}
        num_records = 0
        for record in source.records(report):
            num_records += 1
            contents["texts"].add(record.query, *record.positives, "")
            contents["negatives"].add(*record.negatives, "")
            query_id, *positive_ids = text_ids([record.query, *record.positives]).tolist()
            yield {**record._asdict(), "query_id": query_id, "positive_ids": positive_ids}
        report.refuse_if_nothing_left(source.path, num_records, "training pairs")
        hashes = {name: content.hex() for name, content in contents.items()}
        last_row = dict.fromkeys(features)
        yield {**last_row, "query": json.dumps({"report": vars(report), "hashes": hashes})}

    if not sys.stderr.isatty():  # progress bars would fill a log file
        disable_progress_bars()
    folder = cache_folder("datasets")
    try:
        key = source.key(report.on_bad_record)
        stored = Dataset.from_generator(generate, features, str(folder), fingerprint=key[:32])
    except (DatasetGenerationError, OSError) as error:
        cause = error.__cause__ or error
        if isinstance(cause, OSError):  # such as a full disk
            message = f"{folder}: the data cannot be stored: {cause} (set CONTACCUM_CACHE)"
            raise DataError(message) from error
        # `datasets` wraps the errors of the reader. The reader's own error names file and line.
        raise cause from None
    last_row = json.loads(stored[-1]["query"])
    report.restore(last_row["report"])
    return stored.select(range(len(stored) - 1)), last_row["hashes"]


@dataclass(frozen=True)
class TrainingData:
    """The rows of one training set, and where they come from.

    Attributes:
        dataset: rows of the texts "query", "positive", "negative_1" .. "negative_h", in this order,
            with a "label" of text ids for the loss if a query has several positives.
        path: file, folder or hub name of the data.
        report: counts of used and bad records.
        fingerprint: sha256, in hex, of the texts in order and of everything that is sampled from.
        transform: the transform of `dataset`, which samples the texts of the rows.
        pairs: text ids (see `text_ids`) of each query and positive, int64 (n, 2).
        has_negatives: True if a record has a hard negative.
    """

    dataset: Dataset
    path: str
    data_format: str
    report: RecordReport
    fingerprint: str
    transform: EpochSampling
    pairs: np.ndarray
    has_negatives: bool

    @property
    def known_positives(self) -> np.ndarray | None:
        """Text ids of query and positive of all queries with several positives, int64 (r, 2)."""
        return self.transform.known_positives

    def record(self) -> dict[str, Any]:
        """Return a description of the data, for results."""
        return {
            "path": self.path,
            "format": self.data_format,
            "fingerprint": self.fingerprint,
            "rows": len(self.dataset),
        }


def load_training_data(
    path: AnyPath,
    split: str = "train",
    num_hard_negatives: int = 0,
    on_bad_record: OnBadRecord = "stop",
    columns: Mapping[str, str] | None = None,
    positives: Literal["draw", "first", "all"] | None = None,
    missing_negatives: Literal["fill", "drop"] = "fill",
    min_score: float | None = None,
) -> TrainingData:
    """Load the rows of a training set, with `num_hard_negatives` (h) hard negatives each.

    A row holds the texts of the current epoch, which is set with ``transform.set_epoch``.

    Args:
        path, split, columns, min_score: see `read_records`.
        on_bad_record: "stop" raises an error at the first bad record, "skip" counts it.
        positives: "draw": a row for each record, with one of its positives, sampled anew in each
            epoch. "first": a row for each record, with its first positive. "all": a row for each
            positive. None: "all" for a BEIR folder, "draw" for the other formats.
        missing_negatives: for a record with fewer than h negatives, "fill" adds passages of other
            records, and "drop" leaves the record out.

    Raises:
        ConfigError: for settings that cannot work together.
        DataError: for data or a cache that cannot be used, or if no row or no negative is left.
    """
    import pyarrow as pa
    import pyarrow.compute as pc
    from datasets import Dataset

    check_choice("positives", positives, (None, "draw", "first", "all"))
    check_choice("missing_negatives", missing_negatives, ("fill", "drop"))
    report = RecordReport(on_bad_record)
    source = RecordSource(path, split, columns, min_score)
    if positives is None:
        # A record of a BEIR folder has all judgements of a query, and each is a training pair.
        positives = "all" if source.data_format == "beir" else "draw"
    stored, hashes = store_records(source, report)
    column = stored.data.column
    num_positives = pc.list_value_length(column("positives")).to_numpy()
    num_negatives = pc.list_value_length(column("negatives")).to_numpy()
    query_ids = np.repeat(column("query_id").to_numpy(), num_positives)
    pairs = np.column_stack([query_ids, pc.list_flatten(column("positive_ids")).to_numpy()])
    has_negatives = bool(num_negatives.any())

    if num_hard_negatives and not has_negatives:
        raise DataError(f"{path}: no record has a negative for num_hard_negatives (mine some)")
    rows_per_record = num_positives if positives == "all" else np.ones_like(num_positives)
    has_too_few = num_negatives < num_hard_negatives
    if missing_negatives == "drop":
        rows_per_record = rows_per_record * ~has_too_few
        report.leave_out(path, "too few hard negatives", int(has_too_few.sum()))
    num_rows = int(rows_per_record.sum())
    report.refuse_if_nothing_left(path, num_rows, "training pairs")
    rows = None  # saves memory if row i is simply record i
    if (rows_per_record != 1).any():
        # Two records with 1 and 2 positives, each with a row, give [[0, 0], [1, 0], [1, 1]].
        record_numbers = np.repeat(np.arange(len(rows_per_record)), rows_per_record)
        first_rows = np.cumsum(rows_per_record) - rows_per_record
        rows = np.column_stack([record_numbers, np.arange(num_rows) - first_rows[record_numbers]])

    # A setting without effect on these data is left out, such as `positives` if no record has
    # several: runs that train on the same texts have the same fingerprint.
    parts: list[object] = [hashes["texts"], positives if num_positives.max() > 1 else "one"]
    if num_hard_negatives:
        parts += [hashes["negatives"], num_hard_negatives, int(num_negatives.max())]
        parts.append(missing_negatives if has_too_few.any() else None)

    transform = EpochSampling(
        stored.select_columns(["query", "positives", "negatives"]),
        num_hard_negatives,
        positives == "draw",
        rows,
        collect_known_positives(pairs),
    )
    # The columns share one buffer of row numbers, which the transform replaces by texts. Without a
    # fingerprint, datasets would copy the table to hash it.
    numbers = pa.table(dict.fromkeys(transform.columns, pa.array(np.arange(num_rows))))
    dataset = Dataset(numbers, fingerprint=f"{num_rows} rows").with_transform(transform)
    return TrainingData(
        dataset,
        str(path),
        source.data_format,
        report,
        fingerprint(*parts),
        transform,
        pairs,
        has_negatives,
    )


@dataclass(frozen=True)
class TrainingSets:
    """One or several training sets by name, and the sha256, in hex, of their fingerprints."""

    parts: Mapping[str, TrainingData]
    fingerprint: str

    @property
    def dataset(self) -> Dataset | DatasetDict:
        """The rows of the set; of several sets, a dict of their rows by name."""
        from datasets import DatasetDict

        rows = {name: part.dataset for name, part in self.parts.items()}
        return DatasetDict(rows) if len(rows) > 1 else next(iter(rows.values()))

    def record(self) -> dict[str, Any]:
        """Return a description of the sets, for results."""
        sets = {name: part.record() for name, part in self.parts.items()}
        return {"fingerprint": self.fingerprint, "sets": sets}

    def summary(self) -> str:
        """Return a line for each set: the counts of its records, and unused negatives."""
        lines = []
        for name, part in self.parts.items():
            line = f"{name}: {part.report.summary()}"
            if part.has_negatives and "negative_1" not in part.transform.columns:
                line += "; its hard negatives are not used (num_hard_negatives=0)"
            lines.append(line)
        return "\n".join(lines)


def load_training_sets(sets: Mapping[str, Mapping[str, Any]], **common: Any) -> TrainingSets:
    """Load one or several training sets, {name: arguments of `load_training_data`}.

    Several sets share their known positives: a passage that is a positive of a query in one set is
    not used as a negative of this query in any set. A set may override arguments in ``common``.
    """
    parts = {name: load_training_data(**{**common, **given}) for name, given in sets.items()}
    fingerprints = [part.fingerprint for part in parts.values()]
    if len(parts) == 1:
        return TrainingSets(parts, fingerprints[0])
    if parts:
        all_pairs = np.concatenate([part.pairs for part in parts.values()])
        known_positives = collect_known_positives(all_pairs)
        for part in parts.values():
            part.transform.known_positives = known_positives
            # The bank of the loss holds passages of every set, whose equal texts need equal ids.
            part.transform.has_text_ids = True
    return TrainingSets(parts, fingerprint(*fingerprints))


def parse_training_sets(
    sets: Sequence[str | Mapping[str, Any]], common: Mapping[str, Any] | None = None
) -> dict[str, dict[str, Any]]:
    """Return the arguments of `load_training_data` for each training set, by its name.

    ``sets`` has a path, a mapping with the keys of `SET_KEYS`, or such a mapping as JSON text, for
    each set. It may override arguments in ``common``. Raises `ConfigError` for what cannot be used.
    """
    arguments_by_name: dict[str, dict[str, Any]] = {}
    for item in sets:
        arguments = dict(common or {})
        settings: Mapping[str, Any]
        try:
            if isinstance(item, Mapping):
                settings = item
            elif isinstance(item, str) and item.lstrip().startswith("{"):
                settings = json.loads(item)
            else:
                settings = {"path": os.fspath(item)}
            for key, value in settings.items():
                check_choice("a key of a set", key, SET_KEYS)
                if value is not None:
                    arguments[key] = value
            if not isinstance(arguments.get("path"), str):
                raise ConfigError('a set has a path, as {"path": FILE}')
            if not isinstance(arguments.get("min_score"), float | int | None):
                raise ConfigError(f"min_score must be a number, got {arguments['min_score']!r}")
            arguments["columns"] = parse_columns(arguments.get("columns"))
        except ValueError as error:  # ConfigError and the errors of json are ValueErrors
            raise ConfigError(f"train_data: {quoted(item)}: {error}") from error
        # The file or folder without extension: "train" for "x/train.jsonl.gz"
        file_name = Path(arguments["path"]).resolve().name
        stem = re.sub(r"(\.(jsonl|json|csv|tsv|parquet))?(\.gz)?$", "", file_name)
        name = arguments.pop("name", stem)
        if name in arguments_by_name:
            raise ConfigError(
                f"train_data: two sets are called {name!r}: give one of them another name"
            )
        arguments_by_name[name] = arguments
    return arguments_by_name
