"""Formats of training data, and their detection from the content of a file or folder."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, get_args

from contaccum.data.columns import FIELDS
from contaccum.data.records import one_line, quoted, read_head
from contaccum.data.tables import parse_header
from contaccum.errors import DataError
from contaccum.files import AnyPath

DataFormat = Literal[
    "beir", "dpr", "nemo", "tevatron", "msmarco", "pairs", "triplets", "csv", "parquet", "hub"
]
DATA_FORMATS: tuple[DataFormat, ...] = get_args(DataFormat)

JUDGED_FORMATS: tuple[DataFormat, ...] = ("beir", "msmarco")
"""Formats with relevance judgements. Each record is a query with all its judgements, and each
judgement is a pair. The formats have no field names."""

_FORMAT_BY_FILE: dict[str, DataFormat] = {
    "corpus.jsonl": "beir",
    "collection.tsv": "msmarco",
    "state.json": "hub",
    "dataset_dict.json": "hub",
}
"""{name of a file: format of a folder that contains it}. `save_to_disk` of `datasets` writes
state.json for a dataset and dataset_dict.json for a dict of splits; both have the format "hub"."""

_FIRST_THAI_CHARACTER = "\u0e00"

_SAVED_DATASET_FILES = ("state.json", "dataset_dict.json")
_HUB_NAME = r"([\w.-]+/)?[\w-]+(\.[0-9][\w.-]*)?(:[\w.-]+)?"


SPLIT_RECORD = "split.json"
"""The file that marks a folder of `contaccum split`, and has its counts."""


def sniff_format(source: AnyPath, columns: Mapping[str, str] | None = None) -> DataFormat:
    """Detect the format of training data from their content.

    "pairs" is returned for "triplets" too, as both are read in the same way. A table is recognised
    by the usual names of its columns.

    Args:
        source: a file, a folder, or the name of a dataset on the hub.
        columns: names of columns by role, which a table may have instead of the usual names.

    Raises:
        DataError: if the format is unknown, or the file does not exist or is empty.
    """
    path = Path(source)
    if path.is_dir():
        return _sniff_folder(path)
    if is_hub_name(source):
        return "hub"
    head = read_head(path)
    if not head:
        raise DataError(one_line(f"{path}: is empty, or damaged at its start"))
    if head.startswith(b"PAR1"):  # the first bytes of every parquet file
        return "parquet"
    if head.startswith(b"["):
        return "dpr"
    if re.match(rb'\{\s*"(corpus|data)"\s*:\s*[\[{]', head):
        return "nemo"
    if head.startswith(b"{"):
        has_tevatron_field = re.search(b'"positive_(passages|document_ids)"', head)
        return "tevatron" if has_tevatron_field else "pairs"
    known_names = set(columns.values()) if columns else set()
    known_names.update(*FIELDS.values())
    if not known_names.isdisjoint(parse_header(head).names):
        return "csv"
    if _is_text_triple(head.split(b"\n")[0]):
        return "msmarco"
    message = (
        "neither JSON nor a table with a header of known column names; "
        f"it starts with {quoted(head[:20])}"
    )
    raise DataError(one_line(f"{path}: {message} (set --data_columns or --data_format)"))


def _is_text_triple(line: bytes) -> bool:
    """Return True for a query, a positive and a negative, or their ids, separated by tabs.

    Three cells of one word each are rather the header of a table with unknown column names. Thai,
    Chinese and Japanese have no blanks between words; their characters come after Thai's first one.
    """
    cells = [cell.strip() for cell in line.decode("utf-8", "replace").strip().split("\t")]
    has_ids = all(cell.isdigit() for cell in cells)
    has_sentence = any(
        " " in cell or max(cell, default="") >= _FIRST_THAI_CHARACTER for cell in cells
    )
    return len(cells) == 3 and (has_sentence or has_ids)


def _sniff_folder(folder: Path) -> DataFormat:
    if (folder / SPLIT_RECORD).is_file():
        raise DataError(
            one_line(f"{folder}: a folder of contaccum split (give {folder}/train.jsonl)")
        )
    for file_name, data_format in _FORMAT_BY_FILE.items():
        if any(folder.glob(f"{file_name}*")):
            return data_format
    expected = ", ".join(_FORMAT_BY_FILE)
    raise DataError(one_line(f"{folder}: a folder without any of {expected} (see docs/data.md)"))


def is_hub_name(source: AnyPath) -> bool:
    """Return True for the name of a dataset on the hub that is not the path of an existing file."""
    is_name = re.fullmatch(_HUB_NAME, str(source)) is not None
    return is_name and not Path(source).exists()


def is_saved_dataset(path: Path) -> bool:
    """Return True for a folder that `datasets` has written with `save_to_disk`."""
    return any((path / name).exists() for name in _SAVED_DATASET_FILES)
