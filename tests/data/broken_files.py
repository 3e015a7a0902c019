"""Deliberately broken files: what is no data at all, damaged, of other characters, or of records that lack something.

Every case is a function that writes its files and returns what to read, the line that is expected under "stop" (a
regular expression), and what is expected under "skip": (rows, records reported), or None where nothing can be used.
"""

from __future__ import annotations

import gzip
import io
import json
import random
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from data_files import (
    delimited,
    dpr_records,
    lines,
    put,
    put_beir,
    put_msmarco,
    put_parquet,
    rows,
    tevatron_records,
    text_triples,
)

JSONL = lines(rows()).encode()
FIRST = JSONL.split(b"\n")[0] + b"\n"
CSV = delimited(",", end="\n")
# What does not compress, so that half a gzip file is about half of its content.
NOISE = random.Random(0)


class Case(NamedTuple):
    make: Callable[[Path], Path]
    stop: str | None  # None: it is read whole
    skip: tuple[int, int] | None
    options: dict[str, Any] = {}  # noqa: RUF012  # never written to


CASES: dict[str, Case] = {}


def file(name: str, content: str | bytes) -> Callable[[Path], Path]:
    return lambda folder: put(folder / name, content)


def case(
    name: str, make: Callable[[Path], Path], stop: str | None, skip: tuple[int, int] | None, **options: Any
) -> None:
    assert name not in CASES
    CASES[name] = Case(make, stop, skip, options)


def jsonl(name: str, bad: str | bytes, reason: str, skip: tuple[int, int] = (3, 1), **options: Any) -> None:
    """A bad second line among three sound records."""
    line = bad.encode() if isinstance(bad, str) else bad
    content = FIRST + line + b"\n" + JSONL[len(FIRST) :]
    case(name, file("a.jsonl", content), rf"a\.jsonl:2: {reason}", skip, **options)


def beir(name: str, part: str, content: str, stop: str | None, skip: tuple[int, int] | None) -> None:
    def make(folder: Path) -> Path:
        put_beir(folder / "b")
        put(folder / "b" / part, content)
        return folder / "b"

    case(name, make, stop, skip)


def msmarco(
    name: str, part: str, content: str | bytes, stop: str, skip: tuple[int, int] | None, **options: Any
) -> None:
    def make(folder: Path) -> Path:
        put_msmarco(folder / "m")
        path = folder / "m" / part
        put(path, path.read_bytes() + (content.encode() if isinstance(content, str) else content))
        return folder / "m"

    case(name, make, stop, skip, **options)


def cut(data: bytes, share: float = 0.6) -> bytes:
    packed = gzip.compress(data, mtime=0)
    return packed[: int(len(packed) * share)]


def raw(name: str, data: bytes) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        (folder / name).write_bytes(data)
        return folder / name

    return make


def dpr(change: Callable[[list[Any]], None], **options: Any) -> Callable[[Path], Path]:
    records: list[Any] = dpr_records()
    change(records)
    return file("dpr.json", "[\n" + ",\n".join(json.dumps(record) for record in records) + "\n]\n")


# Nothing there, or something else than data
case("missing file", lambda folder: folder / "none.jsonl", r"none\.jsonl: no such file", None)
case("missing folder", lambda folder: folder / "no" / "folder", r"folder: no such file", None)
case("directory without data", lambda folder: folder, r": a folder without corpus\.jsonl", None)
case("directory for a file", lambda folder: folder, r": is a directory, a file is expected", None, data_format="pairs")
case(
    "file for a folder", file("a.jsonl", JSONL), r"a\.jsonl: is a file, a folder is expected", None, data_format="beir"
)
case("empty file", file("a.jsonl", b""), r"a\.jsonl: the file is empty", None)
case("empty gzip file", file("a.jsonl.gz", b""), r"a\.jsonl\.gz: the file is empty", None)
case("empty csv", file("a.csv", b""), r"a\.csv: the file is empty", None)
case("empty parquet", file("a.parquet", b""), r"a\.parquet: the file is empty", None)
case("empty dpr", file("dpr.json", b""), r"dpr\.json: the file is empty", None, data_format="dpr")
case("byte-order mark alone", file("a.jsonl", b"\xef\xbb\xbf"), r"a\.jsonl: the file is empty", None)
case("blank lines alone", file("a.jsonl", b"\n \r\n\n"), r"a\.jsonl: the file is empty", None)
case("empty array", file("dpr.json", b"[]"), r"dpr\.json: no training pairs left to use; 0 records", None)
case("random bytes", file("a.bin", b"\x00\x01\xfe\x9c" * 99), r"a\.bin:1: neither JSON lines nor a JSON array", None)
case("binary named jsonl", file("a.jsonl", b"\x7fELF\x02\n\xff\xfe\n"), r"a\.jsonl:1: broken JSON", None)
case("picture", file("a.png", b"\x89PNG\r\n\x1a\n\0\0"), r"a\.png:1: neither JSON lines", None)
case(
    "UTF-16 text",
    file("a.jsonl", JSONL.decode().encode("utf-16")),
    r"a\.jsonl: is UTF-16 text \(save it as UTF-8",
    None,
)
case("UTF-16 without a mark", file("a.jsonl", "{}\n".encode("utf-16-le")), r"a\.jsonl:1: NUL byte", None)
case("xz file", file("a.jsonl.xz", b"\xfd7zXZ\0\0"), r"a\.jsonl\.xz: is an xz file \(unpack it first\)", None)


def _zip(folder: Path) -> Path:
    with zipfile.ZipFile(folder / "a.zip", "w") as archive:
        archive.writestr("a.jsonl", JSONL)
    return folder / "a.zip"


def _tar(folder: Path) -> Path:
    with tarfile.open(folder / "triples.train.small.tar.gz", "w:gz") as archive:
        member = tarfile.TarInfo("triples.train.small.tsv")
        member.size = len(text_triples().encode())
        archive.addfile(member, io.BytesIO(text_triples().encode()))
    return folder / "triples.train.small.tar.gz"


case("zip archive", _zip, r"a\.zip: is a zip archive \(unpack it first\)", None)
case("tar archive", _tar, r"small\.tar\.gz: is a tar archive \(unpack it first\)", None)

# Compression
MANY = b"".join(FIRST.replace(b"first", NOISE.randbytes(12).hex().encode()) for _ in range(50))
case("truncated gz", raw("a.jsonl.gz", cut(MANY)), r"a\.jsonl\.gz:\d+: the file breaks off", (-1, 1))
case(
    "gz with wrong checksum",
    raw("a.jsonl.gz", gzip.compress(JSONL)[:-8] + bytes(8)),
    r"a\.jsonl\.gz:4: the file breaks",
    (3, 1),
)
case("not gz but named so", raw("a.jsonl.gz", JSONL), r"a\.jsonl\.gz:1: the file breaks off: Not a gzipped", None)
case(
    "truncated gz csv", raw("a.csv.gz", cut((CSV * 40).encode(), 0.7)), r"a\.csv\.gz:\d+: the file breaks off", (-1, -1)
)
case(
    "truncated gz dpr",
    raw(
        "dpr.json.gz",
        cut(json.dumps([{**r, "answers": [NOISE.randbytes(99).hex()]} for r in dpr_records()]).encode(), 0.8),
    ),
    r"dpr\.json\.gz:1: the file breaks off",
    (2, 1),
)


def _cut_collection(folder: Path) -> Path:
    put_msmarco(folder / "m", ".gz")
    path = folder / "m" / "collection.tsv.gz"
    path.write_bytes(cut(b"".join(b"%d\t%s\n" % (i, NOISE.randbytes(20).hex().encode()) for i in range(200))))
    return folder / "m"


case("truncated gz collection", _cut_collection, r"collection\.tsv\.gz:\d+: the file breaks off", (3, 1))

# Characters
case("byte-order mark", file("a.jsonl", b"\xef\xbb\xbf" + JSONL), None, (3, 0))
case("byte-order mark in csv", file("a.csv", "\ufeff" + CSV), None, (3, 0))
case("CRLF", file("a.jsonl", JSONL.replace(b"\n", b"\r\n")), None, (3, 0))
case("CR alone in csv", file("a.csv", CSV.replace("\n", "\r")), r"a\.csv:1: .*lines end in CR alone", None)
jsonl("latin-1 bytes", '{"query": "Käse", "positive": "p"}'.encode("latin-1"), "not UTF-8 text")
case(
    "latin-1 csv",
    file("a.csv", (CSV + "q,,K\xe4se,,\n").encode("latin-1", "replace")),
    r"a\.csv:3: not UTF-8 text",
    (2, 2),
)
case(
    "latin-1 dpr",
    file("dpr.json", json.dumps(dpr_records()).encode().replace(b"first", b"f\xefrst")),
    r"dpr\.json:1: not UTF-8 text: in record 1",
    (2, 1),
)
msmarco("latin-1 collection", "collection.tsv", b"77\tK\xe4se\n", r"collection\.tsv:10: not UTF-8 text", (3, 1))
jsonl("NUL byte", b'{"query": "q\0", "positive": "p"}', "NUL byte")
jsonl("escaped NUL", '{"query": "q", "positive": "p\\u0000"}', "NUL character in positive")
case("NUL in csv", file("a.csv", CSV + "q,,p\0,,\n"), r"a\.csv:5: NUL byte", (3, 1))
msmarco("NUL in qrels", "qrels.train.tsv", b"100\t0\t1\0\t1\n", r"qrels\.train\.tsv:4: NUL byte", (3, 1))
case(
    "NUL in parquet",
    lambda folder: put_parquet(folder / "a.parquet", [*rows(), {**rows()[0], "positive": "\0"}]),
    r"a\.parquet:4: NUL character in positive",
    (3, 1),
)
jsonl("half a surrogate pair", '{"query": "q", "positive": "\\ud800"}', "positive is not valid Unicode")
jsonl("10 MB line", json.dumps({"query": "q", "positive": "x" * 10_000_000}), "", (4, 0))
jsonl("10 MB of broken JSON", '{"query": "' + "x" * 10_000_000, "broken JSON")
case("10 MB csv cell", file("a.csv", CSV + f'q,,"{"x" * 10_000_000}",,\n'), None, (4, 0))
CASES["10 MB line"] = CASES["10 MB line"]._replace(stop=None)

# JSON
jsonl("broken JSON", '{"query": "q"', "broken JSON")
jsonl("two objects on a line", '{"query": "q", "positive": "p"} {}', "broken JSON")
jsonl("NaN", '{"query": "q", "positive": NaN}', "broken JSON")
jsonl("endless integer", '{"query": ' + "9" * 5000 + "}", "broken JSON")
jsonl("nested without end", '{"query": ' + "[" * 100_000, "broken JSON")
jsonl("array on a line", '["q", "p"]', "not a JSON object")
jsonl("null on a line", "null", "not a JSON object")
case(
    "array for lines",
    file("a.jsonl", json.dumps(tevatron_records())),
    r"a\.jsonl:1: not a JSON object",
    None,
    data_format="tevatron",
)
case(
    "lines for an array",
    file("dpr.json", lines(dpr_records())),
    r"dpr\.json:1: not a JSON array",
    None,
    data_format="dpr",
)
case(
    "array cut short",
    file("dpr.json", json.dumps(dpr_records(), indent=0)[:-90]),
    r"dpr\.json:\d+: broken JSON: .*in record 3",
    (2, 1),
)
case(
    "comma too many",
    file("dpr.json", json.dumps(dpr_records())[:-1] + ",]"),
    r"dpr\.json:1: broken JSON: no record after",
    (3, 1),
)
case(
    "two arrays",
    file("dpr.json", json.dumps(dpr_records()) + "\n[]"),
    r"dpr\.json:2: broken JSON: text after the end",
    (3, 1),
)

# What a record must have
jsonl("null query", '{"query": null, "positive": "p"}', "missing query")
jsonl("empty query", '{"query": " ", "positive": "p"}', "empty query")
jsonl("empty text", '{"query": "q", "positive": ""}', "empty positive")
jsonl("number for text", '{"query": "q", "positive": 7}', "positive is not text: found 7")
jsonl("null among positives", '{"query": "q", "positive": [null, "p"]}', "missing positive")
jsonl("null in a passage", '{"query": "q", "positive": {"title": "t", "text": null}}', "missing positive text")
jsonl(
    "null among negatives",
    '{"query": "q", "positive": "p", "negatives": [null]}',
    "missing negatives",
    num_hard_negatives=1,
)
jsonl(
    "too few negatives",
    '{"query": "q", "positive": "p", "negatives": []}',
    "too few hard negatives: 0 where",
    num_hard_negatives=1,
    missing_negatives="stop",
)
case(
    "unknown field names",
    file("a.jsonl", '{"q": "x", "p": "y"}\n'),
    r"a\.jsonl:1: missing query: its fields are 'q, p' .*--data_columns",
    None,
)
case(
    "array of pairs",
    file("a.json", '[{"query": "q", "positive": "p"}]'),
    r"a\.json:1: missing question: its fields are 'query, positive' \(other records than DPR's go one a line",
    None,
)
case("no positives in dpr", dpr(lambda r: r[1].update(positive_ctxs=[])), r"dpr\.json:3: empty positive_ctxs", (2, 1))
case(
    "null passages in dpr",
    dpr(lambda r: r[1].update(positive_ctxs=None)),
    r"dpr\.json:3: missing positive_ctxs",
    (2, 1),
)
case(
    "null passage in dpr",
    dpr(lambda r: r[1].update(positive_ctxs=[None])),
    r"dpr\.json:3: missing positive_ctxs",
    (2, 1),
)
case(
    "text for a list in dpr",
    dpr(lambda r: r[1].update(positive_ctxs="p")),
    r"dpr\.json:3: positive_ctxs is not a list",
    (2, 1),
)
case("string for a record in dpr", dpr(lambda r: r.insert(1, "q")), r"dpr\.json:3: not a JSON object", (3, 1))
TEVATRON = tevatron_records()
case("ids as integers", file("a.jsonl", lines(TEVATRON)), None, (3, 0))
case(
    "no positives in tevatron",
    file("a.jsonl", lines([*TEVATRON, {**TEVATRON[0], "positive_passages": []}])),
    r"a\.jsonl:4: empty positive_passages",
    (3, 1),
)
case(
    "null query in tevatron",
    file("a.jsonl", lines([*TEVATRON, {**TEVATRON[0], "query": None}])),
    r"a\.jsonl:4: missing query",
    (3, 1),
)
