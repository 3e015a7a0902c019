"""Training records in Arrow tables: parquet files, and Hugging Face datasets by name or saved in a folder.

A batch of rows is in memory at a time, and of the columns only those that are needed. Where other formats have a
line, these have a row; the first is 1.
"""

from __future__ import annotations

import inspect
import os
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from contaccum.data.fields import Fields
from contaccum.data.record import Record, RecordRules
from contaccum.data.records import Fault, RecordReport, object_of, one_line, open_data_file, quoted, refuse_empty
from contaccum.errors import DataError

BATCH_ROWS = 1000

# What save_to_disk leaves in the folder of a DatasetDict, and of a Dataset.
_SAVED = (("dataset_dict.json",), ("dataset_info.json", "state.json"))


def read_parquet(path: Path, fields: Fields, rules: RecordRules, report: RecordReport) -> Iterator[Record]:
    """The rows of a parquet file, row group by row group.

    What a damaged row group does not give is counted as reported, and the next one is read.

    Raises:
        DataError: no parquet file, a column is missing, or a bad record under "stop".
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    with open_data_file(path) as raw:
        if not raw.read(1):
            refuse_empty(path)
    try:
        file = pq.ParquetFile(path)
        names = [str(name) for name in file.schema_arrow.names]
    except (pa.ArrowException, OSError, ValueError) as error:
        mend = "get it again, or name its format with --data_format"
        raise DataError(one_line(f"{path}: not a parquet file, or a damaged one: {_short(error)} ({mend})")) from error
    with file:
        needed = fields.settle_table(names, path)
        row = 0
        for group in range(file.num_row_groups):
            left = max(0, file.metadata.row_group(group).num_rows)
            reason = "the row group has fewer rows than the file says"
            batches = file.iter_batches(batch_size=BATCH_ROWS, row_groups=[group], columns=needed)
            while True:
                try:
                    batch = next(batches, None)
                except (pa.ArrowException, OSError, ValueError) as error:
                    batch, reason = None, _short(error)
                if batch is None:
                    break
                yield from _records(_rows(batch), row, path, fields, rules, report)
                row += batch.num_rows
                left -= batch.num_rows
            if left > 0:
                fault = Fault("damaged row group", f"{left} rows cannot be read: {reason}", "get the file again")
                report.see(left)
                report.reject(path, row + 1, fault, left)
                row += left


def read_hub(
    source: str, split: str, fields: Fields, rules: RecordRules, report: RecordReport, streaming: bool = False
) -> Iterator[Record]:
    """The rows of a Hugging Face dataset.

    Args:
        source: `NAME` or `NAME:CONFIG` on the hub, which `datasets` fetches once into its own cache; or a folder that
            `save_to_disk` wrote, of a Dataset or of a DatasetDict.
        split: as `datasets.load_dataset` takes it; a saved Dataset has none, and there it does nothing.
        streaming: fetch a dataset of the hub as it is read, and store nothing; one that is saved is read as ever.

    Raises:
        DataError: it cannot be loaded, has no such split, lacks a column, or a bad record under "stop". Code that
            comes with a dataset is never run.
    """
    dataset = _load_saved(source, split) if os.path.isdir(source) else _load_from_hub(source, split, streaming)
    # Of a stream they may be known only when something has been read.
    needed = fields.settle_table(list(dataset.column_names or next(iter(dataset), ())), source)
    tables = iter(dataset.select_columns(needed).with_format("arrow").iter(batch_size=BATCH_ROWS))
    row = 0
    while True:
        try:
            table = next(tables, None)
        except Exception as error:  # Arrow's and datasets' own: a file in the cache may be damaged in many ways
            left = len(dataset) - row if hasattr(dataset, "__len__") else 1  # nobody knows how many a stream has
            report.see(left)
            report.reject(source, row + 1, Fault("the dataset breaks off", _short(error), "get it again"), left)
            return
        if table is None:
            return
        yield from _records(_rows(table), row, source, fields, rules, report)
        row += table.num_rows


def hub_fingerprint(source: str, split: str) -> str:
    """What `datasets` calls the content of a dataset of the hub: another one when it changes there.

    Raises:
        DataError: it cannot be loaded, or has no such split.
    """
    return str(_load_from_hub(source, split)._fingerprint)


def is_saved_dataset(path: str | Path) -> bool:
    """Whether `path` is a folder that `datasets.save_to_disk` wrote."""
    return any(all(os.path.isfile(os.path.join(path, name)) for name in names) for names in _SAVED)


def _records(
    rows: Iterable[Any], before: int, source: str | Path, fields: Fields, rules: RecordRules, report: RecordReport
) -> Iterator[Record]:
    for number, row in enumerate(rows, start=before + 1):
        report.see()
        try:
            if isinstance(row, Fault):
                raise row
            record, negatives = fields.read(object_of(row), rules)
        except Fault as fault:
            report.reject(source, number, fault)
            continue
        report.accept()
        rules.note_unused(report, negatives)
        yield record


def _rows(table: Any) -> list[Any]:
    """The rows of a table or batch as dictionaries; `Fault` for one that is damaged or that Python cannot hold."""
    try:
        # Arrow believes what a file says of itself, and ends the whole process where that is wrong.
        table.validate(full=True)
        return table.to_pylist()
    except Exception:  # one bad value (bytes that are no UTF-8, a date before Christ) must not cost the whole batch
        return [_row(table.slice(index, 1)) for index in range(table.num_rows)]


def _row(table: Any) -> dict[str, Any] | Fault:
    try:
        table.validate(full=True)
        return table.to_pylist()[0]
    except Exception as error:  # as above
        if isinstance(error, UnicodeDecodeError) or "UTF8" in str(error):
            return Fault("not UTF-8 text", _short(error))
        return Fault("a value cannot be read", _short(error))


def _load_saved(folder: str, split: str) -> Any:
    import datasets

    if not is_saved_dataset(folder):
        mend = "name a folder that datasets.save_to_disk wrote, a dataset of the hub, or a file"
        raise DataError(one_line(f"{folder}: not a saved dataset ({mend})"))
    try:
        found = datasets.load_from_disk(folder)
    except Exception as error:  # a damaged folder fails in many ways: json, Arrow, missing keys
        raise DataError(
            one_line(f"{folder}: a saved dataset that cannot be loaded: {_short(error)} (save it again)")
        ) from error
    if isinstance(found, datasets.Dataset):
        return found
    if split not in found:
        there = ", ".join(map(str, found)) or "none"
        raise DataError(one_line(f"{folder}: no split {quoted(split)}; it has: {there} (choose one with --split)"))
    return found[split]


def _load_from_hub(source: str, split: str, streaming: bool = False) -> Any:
    import datasets

    name, _, config = source.partition(":")
    _require_hub(source, name)
    options: dict[str, Any] = {"split": split, **({"streaming": True} if streaming else {})}
    # Older releases ran a dataset's own code when told to; newer ones cannot, and refuse the word.
    if "trust_remote_code" in inspect.signature(datasets.load_dataset).parameters:
        options["trust_remote_code"] = False
    try:
        return datasets.load_dataset(name, config or None, **options)
    except Exception as error:  # the hub's, the network's and the builders' errors have no common ancestor
        raise DataError(
            one_line(
                f"{source}: no such file or folder, and it cannot be loaded as a Hugging Face dataset with split "
                f"{quoted(split)}: {_short(error)} (check the path, or the name as NAME or NAME:CONFIG)"
            )
        ) from error


def _require_hub(source: str, name: str) -> None:
    """Refuse at once what cannot be fetched now: asking the hub while offline takes half a minute of retries."""
    import datasets
    from huggingface_hub.constants import ENDPOINT

    cached = os.path.isdir(os.path.join(datasets.config.HF_DATASETS_CACHE, name.replace("/", "___")))
    proxies = any(os.environ.get(key) for key in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"))
    if cached or proxies:
        return
    address = urlparse(ENDPOINT)
    try:
        if datasets.config.HF_HUB_OFFLINE:
            raise OSError("HF_HUB_OFFLINE is set")
        socket.create_connection((address.hostname or "huggingface.co", address.port or 443), timeout=5).close()
    except OSError as error:
        raise DataError(
            one_line(
                f"{source}: no such file or folder, and the Hugging Face hub cannot be reached to look it up as a "
                f"dataset: {_short(error)} (check the path, or try again online)"
            )
        ) from error


def _short(error: BaseException, longest: int = 300) -> str:
    text = one_line(str(error)) or type(error).__name__
    return text if len(text) <= longest else text[: longest - 3] + "..."
