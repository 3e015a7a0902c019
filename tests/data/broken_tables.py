"""Deliberately broken tables, data sets and folders, as cases beside those of `broken_files`."""

from __future__ import annotations

from pathlib import Path

from broken_files import CSV, JSONL, beir, case, file, msmarco
from data_files import put, put_beir, put_msmarco, put_parquet, put_saved, rows, text_triples

# Tables
case(
    "csv without the column",
    file("a.csv", "query,postive\nq,p\n"),
    r"a\.csv:1: missing positive: its columns are 'query, postive'",
    None,
)
case("csv without a header", file("a.csv", "what is a,it is b\n"), r"a\.csv:1: missing query: its columns are", None)
case(
    "csv with a column twice",
    file("a.csv", "query,positive,query\nq,p,r\n"),
    r"a\.csv:1: two columns are called 'query'",
    None,
)
case("csv header alone", file("a.csv", "query,positive\n"), r"a\.csv: no training pairs left to use", None)
case(
    "csv row too long",
    file("a.csv", CSV + "q,,one, two,,\n"),
    r"a\.csv:5: wrong number of columns: found 6 where the header has 5",
    (3, 1),
)
case(
    "csv row too short",
    file("a.csv", "query,positive\nq\nr,p\n"),
    r"a\.csv:2: wrong number of columns: found 1",
    (1, 1),
)
case("csv quote left open", file("a.csv", 'query,positive\nq,"open\nr,p\n'), r"a\.csv:2: broken quoting", (1, 1))
case("csv empty text", file("a.csv", "query,positive\nq,\nr,p\n"), r"a\.csv:2: empty positive", (1, 1))
case(
    "triples without a column",
    file("t.tsv", text_triples() + "q\tp\n"),
    r"t\.tsv:4: not three columns: found 2",
    (3, 1),
    data_format="msmarco",
)
case("triples with an empty text", file("t.tsv", text_triples() + "q\t \tn\n"), r"t\.tsv:4: empty positive", (3, 1))
case(
    "triples of ids",
    file("qidpidtriples.tsv", "1\t2\t3\n"),
    r"qidpidtriples\.tsv:1: triples of ids, not of texts",
    None,
)
case("text named parquet", file("a.parquet", JSONL), r"a\.parquet: not a parquet file, or a damaged one", None)


def _cut_parquet(folder: Path) -> Path:
    path = put_parquet(folder / "a.parquet")
    path.write_bytes(path.read_bytes()[:-20])
    return path


case("parquet cut short", _cut_parquet, r"a\.parquet: not a parquet file, or a damaged one", None)
case(
    "parquet of numbers",
    lambda folder: put_parquet(folder / "a.parquet", [{"query": 1, "positive": "p"}]),
    r"a\.parquet:1: query is not text: found 1",
    None,
)
case(
    "parquet without the column",
    lambda folder: put_parquet(folder / "a.parquet", [{"query": "q", "score": 1}]),
    r"a\.parquet: missing positive: its columns are 'query, score'",
    None,
)
case(
    "parquet with nulls",
    lambda folder: put_parquet(folder / "a.parquet", [*rows(), {**rows()[0], "query": None}]),
    r"a\.parquet:4: missing query",
    (3, 1),
)


def _damaged_dataset(folder: Path) -> Path:
    path = put_saved(folder / "saved")
    for shard in path.glob("*.arrow"):
        shard.write_bytes(shard.read_bytes()[:100])
    return path


def _unreadable_dataset(folder: Path) -> Path:
    put(folder / "saved" / "state.json", "{")
    put(folder / "saved" / "dataset_info.json", "{}")
    return folder / "saved"


case("saved dataset cut short", _damaged_dataset, r"saved: a saved dataset that cannot be loaded", None)
case("saved dataset without a state", _unreadable_dataset, r"saved: a saved dataset that cannot be loaded", None)
case(
    "saved dataset of numbers",
    lambda folder: put_saved(folder / "saved", [{"query": "q", "positive": 1.5}]),
    r"saved:1: positive is not text",
    None,
)

# Folders whose files name each other's records
DOCUMENT = '{"_id": "d0", "title": "", "text": "t"}\n{"_id": 1, "text": "u"}\n'
beir(
    "duplicate document",
    "corpus.jsonl",
    DOCUMENT + '{"_id": "1", "text": "again"}\n',
    r"corpus\.jsonl:3: duplicate _id: '1'",
    (1, 3),
)
beir(
    "duplicate query",
    "queries.jsonl",
    '{"_id": "q0", "text": "a"}\n' * 2,
    r"queries\.jsonl:2: duplicate _id: 'q0'",
    (1, 3),
)
beir("integer ids", "corpus.jsonl", DOCUMENT, r"train\.tsv:3: unknown document: 'd1'", (1, 2))
beir(
    "empty document",
    "corpus.jsonl",
    DOCUMENT + '{"_id": "d1", "text": ""}\n',
    r"corpus\.jsonl:3: empty document",
    (1, 3),
)
beir("unknown query", "qrels/train.tsv", "q0\td0\t1\nq9\td0\t1\n", r"train\.tsv:2: unknown query: 'q9'", (1, 1))
beir("unknown document", "qrels/train.tsv", "q0\td0\t1\nq0\td9\t1\n", r"train\.tsv:2: unknown document: 'd9'", (1, 1))
beir("negative score", "qrels/train.tsv", "q0\td0\t1\nq1\td1\t-1\n", None, (1, 0))
beir(
    "negative scores alone",
    "qrels/train.tsv",
    "q1\td1\t-1\n",
    r"b: no training pairs left .*judgements of 0 or less, not a pair: 1",
    None,
)
beir(
    "score that is no number",
    "qrels/train.tsv",
    "q0\td0\t1\nq1\td1\thigh\n",
    r"train\.tsv:2: score is not an integer: found 'high'",
    (1, 1),
)
beir(
    "qrels of two columns",
    "qrels/train.tsv",
    "q0\td0\t1\nq1\td1\n",
    r"train\.tsv:2: not three columns: found 2",
    (1, 1),
)
case("no such split", lambda folder: put_beir(folder / "b"), r"qrels: no split 'dev'; it has: train", None, split="dev")
msmarco("duplicate passage", "collection.tsv", "10\tagain\n", r"collection\.tsv:10: duplicate id: '10'", (3, 1))
msmarco(
    "duplicate query id", "queries.train.tsv", "100\tagain\n", r"queries\.train\.tsv:5: duplicate id: '100'", (3, 1)
)
msmarco("empty passage", "collection.tsv", "77\t \n", r"collection\.tsv:10: empty text: of '77'", (3, 1))
msmarco("passage without an id", "collection.tsv", "\ttext\n", r"collection\.tsv:10: missing id", (3, 1))
msmarco("passage with a tab", "collection.tsv", "77\ta\tb\n", r"collection\.tsv:10: not two columns: found 3", (3, 1))
msmarco(
    "judged query unknown", "qrels.train.tsv", "999\t0\t1\t1\n", r"qrels\.train\.tsv:4: unknown query: '999'", (3, 1)
)
msmarco(
    "judged passage unknown",
    "qrels.train.tsv",
    "100\t0\t999\t1\n",
    r"qrels\.train\.tsv:4: unknown passage: '999'",
    (3, 1),
)
msmarco("judged twice", "qrels.train.tsv", "100\t0\t0\t1\n", r"qrels\.train\.tsv:4: duplicate judgement", (3, 1))
msmarco(
    "qrels of three columns",
    "qrels.train.tsv",
    "100\t1\t1\n",
    r"qrels\.train\.tsv:4: not four columns: found 3",
    (3, 1),
)
msmarco(
    "qrels score 0.5", "qrels.train.tsv", "100\t0\t1\t0.5\n", r"qrels\.train\.tsv:4: score is not an integer", (3, 1)
)
msmarco(
    "triple of an unknown query",
    "qidpidtriples.train.full.2.tsv",
    "9\t0\t10\n",
    r"full\.2\.tsv:7: unknown query: '9'",
    (3, 1),
    num_hard_negatives=1,
)
msmarco(
    "triple of an unknown passage",
    "qidpidtriples.train.full.2.tsv",
    "100\t0\t9\n",
    r"full\.2\.tsv:7: unknown passage: '9'",
    (3, 1),
    num_hard_negatives=1,
)
msmarco(
    "triple without a column",
    "qidpidtriples.train.full.2.tsv",
    "100\t0\n",
    r"full\.2\.tsv:7: not three columns",
    (3, 1),
    num_hard_negatives=1,
)
msmarco(
    "too few triples",
    "qrels.train.tsv",
    "103\t0\t1\t1\n",
    r"qrels\.train\.tsv:4: too few hard negatives: 0 where",
    (3, 1),
    num_hard_negatives=2,
    missing_negatives="stop",
)
case(
    "no msmarco split",
    lambda folder: put_msmarco(folder / "m"),
    r"queries\.dev\.tsv: no such file; qrels are there of: train",
    None,
    split="dev",
)


def _two_triples(folder: Path) -> Path:
    put(put_msmarco(folder / "m") / "qidpidtriples.train.full.tsv", "100\t0\t10\n")
    return folder / "m"


case(
    "two files of triples",
    _two_triples,
    r"m: several files of triples: .* \(keep one there\)",
    None,
    num_hard_negatives=1,
)
