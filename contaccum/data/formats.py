"""Telling the format of training data from its content. It reads the beginning of a file and judges no record."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from contaccum.data.arrow_tables import is_saved_dataset
from contaccum.data.beir_folder import is_beir_folder
from contaccum.data.delimited import DELIMITERS, has_known_columns, split_header
from contaccum.data.fields import NEGATIVE_FIELDS, POSITIVE_FIELDS, QUERY_FIELDS
from contaccum.data.msmarco import is_msmarco_folder
from contaccum.data.records import BYTE_ORDER_MARK, UNREADABLE, one_line, open_data_file, quoted
from contaccum.errors import DataError

DataFormat = Literal["beir", "dpr", "tevatron", "msmarco", "pairs", "triplets", "csv", "parquet", "hub"]
DATA_FORMATS: tuple[DataFormat, ...] = (
    "beir",
    "dpr",
    "tevatron",
    "msmarco",
    "pairs",
    "triplets",
    "csv",
    "parquet",
    "hub",
)
# Those whose fields a column mapping can name.
NAMED_COLUMNS: tuple[DataFormat, ...] = ("pairs", "triplets", "csv", "parquet", "hub")
# A record of these is a query with all its judgements, each of which is a pair. There is no place for a topic.
JUDGED: tuple[DataFormat, ...] = ("beir", "msmarco")

_HEAD_BYTES = 1 << 16
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?(:[\w.-]+)?")
_FILE_SUFFIXES = {".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".txt", ".parquet", ".arrow", ".gz", ".zip", ".yaml"}
_TEVATRON = re.compile(rb'(?<!\\)"positive_passages"\s*:')
_FOREIGN = (
    (b"PK\x03\x04", "a zip archive", "unpack it first"),
    (b"BZh", "a bzip2 file", "unpack it first"),
    (b"\xfd7zXZ", "an xz file", "unpack it first"),
    (b"(\xb5/\xfd", "a zstandard file", "unpack it first"),
    (b"\xff\xfe", "UTF-16 text", "save it as UTF-8"),
    (b"\xfe\xff", "UTF-16 text", "save it as UTF-8"),
)


def sniff_format(source: str | Path, columns: Mapping[str, str] | None = None) -> DataFormat:
    """The format of a file, a folder or a dataset of the hub; "pairs" stands for "triplets" too.

    Args:
        columns: {role: name}, by which a table is known whose columns have other than the usual names.

    Raises:
        DataError: nothing is there, or it is in none of the formats.
    """
    path = Path(source)
    if os.path.isdir(path):
        return _sniff_folder(path)
    if not os.path.exists(path) and _HUB_NAME.fullmatch(str(source)) and not _FILE_SUFFIXES & set(path.suffixes):
        return "hub"
    head, damaged = _head(path)
    suffixes = set(path.suffixes)
    if head.startswith(b"PAR1") or ".parquet" in suffixes:
        return "parquet"
    for magic, what, mend in _FOREIGN:
        if head.startswith(magic):
            raise DataError(one_line(f"{path}: is {what} ({mend})"))
    if head[257:262] == b"ustar":
        raise DataError(one_line(f"{path}: is a tar archive (unpack it first)"))
    start = head.removeprefix(BYTE_ORDER_MARK).decode("utf-8", errors="replace").strip()
    if not start and damaged:
        # The reader meets the same damage and can name its line.
        return _by_name(path)
    # "[" may also begin a bad line of a jsonl file; an array of records goes on with an object or a new line.
    if re.match(r"\[[ \t]*([{\r\n]|$)", start):
        return "dpr"
    if start.startswith("{"):
        return "pairs" if columns or not _TEVATRON.search(head) else "tevatron"
    # A blank file is refused by the reader, in the same words for every format.
    if not start or {".jsonl", ".ndjson"} & suffixes:
        return "pairs"
    if start.startswith("["):
        return "dpr"
    return _sniff_text(path, start, columns or {})


def _sniff_folder(path: Path) -> DataFormat:
    if is_beir_folder(path):
        return "beir"
    if is_msmarco_folder(path):
        return "msmarco"
    if is_saved_dataset(path):
        return "hub"
    raise DataError(
        one_line(
            f"{path}: a folder without corpus.jsonl (BEIR), collection.tsv (MS MARCO) or a dataset that save_to_disk "
            "wrote (name such a folder, or a file of training pairs)"
        )
    )


def _sniff_text(path: Path, start: str, columns: Mapping[str, str]) -> DataFormat:
    line = start.split("\n", 1)[0].rstrip("\r")
    _, names = split_header(line, columns)
    if has_known_columns(names, columns):
        return "csv"
    cells = {cell.strip().lower() for cell in re.split("[,;\t]", line)}
    known = {*QUERY_FIELDS, *POSITIVE_FIELDS, *NEGATIVE_FIELDS, *columns.values()}
    # Three texts, none of which is a name of ours, are no header.
    if line.count("\t") == 2 and not cells & known:
        return "msmarco"
    if {".csv", ".tsv"} & set(path.suffixes):
        return "csv"
    if any(delimiter in line for delimiter in DELIMITERS) and cells & known:
        return "csv"
    raise DataError(
        one_line(
            f"{path}:1: neither JSON lines nor a JSON array; it starts with {quoted(start[:20])}, which is no header "
            f"of a table either (convert it, or set --data_format to one of {', '.join(DATA_FORMATS)})"
        )
    )


def _head(path: Path) -> tuple[bytes, bool]:
    """The first bytes of a file, unpacked, from its first line that is not blank; and whether it breaks off there."""
    head = b""
    with open_data_file(path) as file:
        try:
            while len(head) < _HEAD_BYTES and (piece := file.read1(_HEAD_BYTES)):
                # A file may begin with any number of blank lines.
                head = (head + piece) if head.strip() else piece
        except UNREADABLE:
            return head, True
    return head, False


def _by_name(path: Path) -> DataFormat:
    suffixes = set(path.suffixes)
    if {".csv", ".tsv"} & suffixes:
        return "msmarco" if "triples" in path.name else "csv"
    return "dpr" if ".json" in suffixes else "pairs"
