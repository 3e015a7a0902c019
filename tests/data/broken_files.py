"""Deliberately broken files: what is no data at all, damaged, of other characters, or of records that lack something.

Every case writes its files and says what to read, the line that is expected under "stop" (a regular expression; None:
it is read whole), and what under "skip": (rows, records reported; -1: some), or None where nothing can be used.
"""

from __future__ import annotations

import gzip
import json
import random
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
    put_saved,
    rows,
    tevatron_records,
    text_triples,
)

JSONL = lines(rows()).encode()
FIRST = JSONL.split(b"\n")[0] + b"\n"
CSV = delimited(",", end="\n")
DPR = json.dumps(dpr_records())
NOISE = random.Random(0)  # what does not compress, so that half a gzip file is about half of its content


class Case(NamedTuple):
    make: Callable[[Path], Path]
    stop: str | None
    skip: tuple[int, int] | None
    options: dict[str, Any] = {}  # noqa: RUF012  # never written to


CASES: dict[str, Case] = {}


def case(name: str, make: Any, stop: str | None, skip: tuple[int, int] | None, **options: Any) -> None:
    assert name not in CASES
    CASES[name] = Case(make, stop, skip, options)


def file(name: str, content: str | bytes) -> Callable[[Path], Path]:
    return lambda folder: put(folder / name, content)


def raw(name: str, content: bytes) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        (folder / name).write_bytes(content)
        return folder / name

    return make


def cut(data: bytes, share: float = 0.6) -> bytes:
    packed = gzip.compress(data, mtime=0)
    return packed[: int(len(packed) * share)]


def jsonl(name: str, bad: str | bytes, reason: str, **options: Any) -> None:
    """A bad second line among three sound records."""
    line = bad.encode() if isinstance(bad, str) else bad
    content = FIRST + line + b"\n" + JSONL[len(FIRST) :]
    case(name, file("a.jsonl", content), rf"a\.jsonl:2: {reason}", (3, 1), **options)


def dpr(name: str, change: Callable[[list[Any]], Any], reason: str, rows_left: int = 2) -> None:
    records: list[Any] = dpr_records()
    change(records)
    case(name, file("dpr.json", json.dumps(records)), rf"dpr\.json:2: {reason}", (rows_left, 1))


def beir(name: str, part: str, content: str, stop: str | None, skip: tuple[int, int] | None) -> None:
    def make(folder: Path) -> Path:
        put(put_beir(folder / "b") / part, content)
        return folder / "b"

    case(name, make, stop, skip)


def msmarco(name: str, part: str, line: str | bytes, stop: str, **options: Any) -> None:
    """A bad last line of one of the files."""

    def make(folder: Path) -> Path:
        path = put_msmarco(folder / "m") / part
        put(path, path.read_bytes() + (line.encode() if isinstance(line, str) else line))
        return folder / "m"

    case(name, make, stop, (3, 1), **options)


def parquet(name: str, record: dict[str, Any], reason: str) -> None:
    records = [*rows(), {**rows()[0], **record}]
    case(name, lambda folder: put_parquet(folder / "a.parquet", records), rf"a\.parquet:4: {reason}", (3, 1))


# Nothing there, or something else than data
case("missing file", lambda folder: folder / "none.jsonl", r"none\.jsonl: no such file", None)
case("directory without data", lambda folder: folder, r": a folder without corpus\.jsonl", None)
case("file for a folder", file("a.jsonl", JSONL), "is a file, a folder is expected", None, data_format="beir")
for ending in (".jsonl", ".jsonl.gz", ".csv", ".parquet", ".json"):
    case(f"empty {ending}", file(f"a{ending}", b""), r"a\.\w+(\.gz)?: the file is empty", None)
case("empty array", file("dpr.json", b"[]"), r"dpr\.json: no training pairs left to use; 0 records", None)
case("random bytes", file("a.bin", b"\x00\x01\xfe\x9c" * 99), r"a\.bin: neither JSON nor a table", None)
case(
    "UTF-16",
    file("a.jsonl", JSONL.decode().encode("utf-16")),
    r"a\.jsonl:1: not UTF-8 text \(save the file as UTF-8",
    None,
)


# Compression
MANY = b"".join(FIRST.replace(b"first", NOISE.randbytes(12).hex().encode()) for _ in range(50))
case("truncated gz", raw("a.jsonl.gz", cut(MANY)), r"a\.jsonl\.gz:\d+: the file breaks off", (-1, 1))
case("not gz but named so", raw("a.jsonl.gz", JSONL), r"a\.jsonl\.gz:1: the file breaks off: Not a gzipped", None)
case(
    "truncated gz dpr",
    raw("dpr.json.gz", cut(DPR.encode(), 0.9)),
    r"dpr\.json\.gz:\d: broken JSON, or the file breaks off",
    None,
)


def _packed_collection(folder: Path) -> Path:
    path = put_msmarco(folder / "m") / "collection.tsv"
    put(path.with_suffix(".tsv.gz"), path.read_bytes())
    path.unlink()
    return folder / "m"


case("gz collection", _packed_collection, r"collection\.tsv\.gz: is compressed, .* \(unpack it first\)", None)

# Characters
case("byte-order mark", file("a.jsonl", b"\xef\xbb\xbf" + JSONL), None, (3, 0))
case("CRLF", file("a.jsonl", JSONL.replace(b"\n", b"\r\n")), None, (3, 0))
case("CR alone in csv", file("a.csv", CSV.replace("\n", "\r")), r"a\.csv:1: the header cannot be read", None)
jsonl("latin-1 bytes", '{"query": "Käse", "positive": "p"}'.encode("latin-1"), "not UTF-8 text")
msmarco("latin-1 collection", "collection.tsv", b"77\tK\xe4se\n", r"collection\.tsv:10: not UTF-8 text")
jsonl("NUL byte", b'{"query": "q\0", "positive": "p"}', "NUL byte")
jsonl("escaped NUL", '{"query": "q", "positive": "p\\u0000"}', "NUL character in positive")
jsonl("half a surrogate pair", '{"query": "q", "positive": "\\ud800"}', "positive is not valid Unicode")
jsonl("10 MB of broken JSON", '{"query": "' + "x" * 10_000_000, "broken JSON")

# JSON
jsonl("broken JSON", '{"query": "q"', "broken JSON")
jsonl("NaN", '{"query": "q", "positive": NaN}', "broken JSON")
jsonl("endless integer", '{"query": ' + "9" * 5000 + "}", "broken JSON")
case("array cut short", file("dpr.json", DPR[:-90]), r"dpr\.json:3: broken JSON, or .*premature EOF", None)
case("two arrays", file("dpr.json", DPR + "\n[]"), r"dpr\.json:4: broken JSON, or .*trailing garbage", None)

# What a record must have
jsonl("empty query", '{"query": " ", "positive": "p"}', "empty query")
jsonl("no positive", '{"query": "q", "text": "another field than in the record before"}', "missing positive")
jsonl("number for a title", '{"query": "q", "positive": "p", "title": 3}', "title is not text")
jsonl("null among positives", '{"query": "q", "positive": [null, "p"]}', "missing positive")
jsonl(
    "too few negatives",
    '{"query": "q", "positive": "p", "negatives": []}',
    r"too few hard negatives: 0 where num_hard_negatives is 1 \(lower num_hard_negatives",
    num_hard_negatives=1,
    missing_negatives="stop",
)
case("unknown fields", file("a.jsonl", '{"q": "x", "p": "y"}\n'), r":1: missing query: .*'q, p' .*--data_columns", None)
case("array of pairs", file("a.json", '[{"query": "q", "positive": "p"}]'), None, (1, 0))
dpr("null passage in dpr", lambda r: r[1].update(positive_ctxs=[None]), "missing positive_ctxs")
dpr("empty negative in dpr", lambda r: r[1].update(hard_negative_ctxs=[{"text": ""}]), "empty hard_negative_ctxs text")
dpr("string for a record in dpr", lambda r: r.insert(1, "q"), "not a JSON object", 3)
TEVATRON = tevatron_records()
for what, change, reason in (
    ("no positives", {"positive_passages": []}, "empty positive_passages"),
    ("null query", {"query": None}, "missing query"),
):
    records = lines([*TEVATRON, {**TEVATRON[0], **change}])
    case(f"{what} in tevatron", file("a.jsonl", records), rf"a\.jsonl:4: {reason}", (3, 1))

# Tables
case("csv without the column", file("a.csv", "query,postive\nq,p\n"), r":2: missing positive: .*'query, postive'", None)
case("csv with a column twice", file("a.csv", "query,positive,query\nq,p,r\n"), r":1: two columns are called 'qu", None)
case("csv row too long", file("a.csv", CSV + "q,,one, two,,\n"), r":5: wrong number of columns: found 6 where", (3, 1))
case("csv quote left open", file("a.csv", 'query,positive\nq,"open\nr,p\n'), r":2: broken quoting: lines 2 to 3", None)
case("csv empty text", file("a.csv", "query,positive\nq,\nr,p\n"), r"a\.csv:2: missing positive", (1, 1))
case("triples, two columns", file("t.tsv", text_triples() + "q\tp\n"), r"t\.tsv:4: not three columns: found 2", (3, 1))
case("triples of ids", file("qidpidtriples.tsv", "1\t2\t3\n"), r"\.tsv:1: ids where texts are expected", None)
case("no parquet", file("a.parquet", "PAR1"), r"a\.parquet:1: damaged, or of another format", None)
case(
    "parquet without the column",
    lambda folder: put_parquet(folder / "a.parquet", [{"query": "q", "score": 1}]),
    r"a\.parquet:1: missing positive: its fields are 'query, score'",
    None,
)


def _damaged_dataset(folder: Path) -> Path:
    for shard in put_saved(folder / "saved").glob("*.arrow"):
        shard.write_bytes(shard.read_bytes()[:100])
    return folder / "saved"


case("saved dataset cut short", _damaged_dataset, r"saved: as a Hugging Face dataset .* it cannot be loaded", None)

# Folders whose files name each other's records
DOCUMENT = '{"_id": "d0", "title": "", "text": "t"}\n{"_id": 1, "text": "u"}\n'
beir("integer ids", "corpus.jsonl", DOCUMENT, r"train\.tsv:3: unknown document: 'd1'", (1, 2))
beir("same document", "corpus.jsonl", DOCUMENT + '{"_id": "1", "text": "x"}\n', r":3: duplicate _id: '1'", (1, 3))
beir("empty document", "corpus.jsonl", DOCUMENT + '{"_id": "d1", "text": ""}\n', r":3: empty document", (1, 3))
beir("negative score", "qrels/train.tsv", "q0\td0\t1\nq1\td1\t-1\n", None, (1, 0))
case("no such split", lambda folder: put_beir(folder / "b"), r"qrels: no split 'dev'; it has: train", None, split="dev")
TRIPLES = "qidpidtriples.train.full.2.tsv"
msmarco(
    "judged query unknown",
    "qrels.train.tsv",
    "999\t0\t1\t1\n",
    r"qrels\.train\.tsv:4: unknown id in queries\.train\.tsv: '999'",
)
msmarco("qrels score 0.5", "qrels.train.tsv", "100\t0\t1\t0.5\n", r"qrels\.train\.tsv:4: score is not an integer")
msmarco(
    "triple, unknown query",
    TRIPLES,
    "9\t0\t10\n",
    r"full\.2\.tsv:7: unknown id in queries\.train\.tsv: '9'",
    num_hard_negatives=1,
)
msmarco(
    "too few triples",
    "qrels.train.tsv",
    "103\t0\t1\t1\n",
    r"m:4: too few hard negatives: 0 where",
    num_hard_negatives=2,
    missing_negatives="stop",
)


def _twice(name: str, line: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        put(put_msmarco(folder / "m") / name, line)
        return folder / "m"

    return make


case("two triples", _twice("qidpidtriples.train.tsv", "1"), r"m: several files of triples", None, num_hard_negatives=1)
case("duplicate passage", _twice("collection.tsv", "1\ta\n1\tb\n"), r"n\.tsv: two lines have the id '1' \(keep", None)
case(
    "no msmarco split",
    lambda folder: put_msmarco(folder / "m"),
    r"qrels\.dev\.tsv: no such file; beside it: .*qrels\.train\.tsv",
    None,
    split="dev",
)
