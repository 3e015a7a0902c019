"""Invariants of reading BEIR folders: every bad record is named, and what is read is what BEIR would read."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from contaccum.data import RecordReport, load_beir_folder, passage_text, shipped_scifact
from contaccum.data.records import BadRecord
from contaccum.errors import DataError

CORPUS = [
    '{"_id": "d1", "title": "One", "text": "first text"}',
    '{"_id": "d2", "title": "", "text": "second text", "metadata": {"x": 1}}',
    '{"_id": 3, "title": null, "text": "third text"}',
]
QUERIES = [
    '{"_id": "q1", "text": "first query"}',
    '{"_id": "q2", "text": "second query"}',
    '{"_id": "q3", "text": "not judged"}',
]
QRELS = ["query-id\tcorpus-id\tscore", "q2\td1\t1", "q1\td2\t2", "q1\t3\t0"]


def make_folder(
    folder: Path,
    corpus=CORPUS,
    queries=QUERIES,
    qrels=QRELS,
    split="test",
    ending="",
    end="\n",
    mark="",
) -> Path:
    (folder / "qrels").mkdir(parents=True, exist_ok=True)
    for name, lines in (("corpus.jsonl", corpus), ("queries.jsonl", queries), (f"qrels/{split}.tsv", qrels)):
        content = (mark + end.join(lines) + end).encode()
        (folder / (name + ending)).write_bytes(gzip.compress(content) if ending else content)
    return folder


def test_corpus_judged_queries_and_judgements_are_those_of_the_files(tmp_path):
    data = load_beir_folder(make_folder(tmp_path / "tiny"))
    assert data.name == "tiny" and data.split == "test" and data.path == tmp_path / "tiny"
    assert data.corpus == {
        "d1": {"title": "One", "text": "first text"},
        "d2": {"title": "", "text": "second text"},
        "3": {"title": "", "text": "third text"},
    }
    assert data.queries == {"q2": "second query", "q1": "first query"}
    assert list(data.queries) == list(data.qrels) == ["q2", "q1"]
    assert data.qrels == {"q2": {"d1": 1}, "q1": {"d2": 2, "3": 0}}
    assert (data.report.seen, data.report.used, data.report.reported) == (9, 9, 0)


def test_fingerprint_ignores_packing_and_sees_every_content(tmp_path):
    plain = load_beir_folder(make_folder(tmp_path / "plain"))
    packed = load_beir_folder(make_folder(tmp_path / "packed", ending=".gz", end="\r\n", mark="\ufeff"))
    assert plain.fingerprint == packed.fingerprint and len(plain.fingerprint) == 64
    assert (plain.corpus, plain.queries, plain.qrels) == (packed.corpus, packed.queries, packed.qrels)
    changes = {
        "corpus": [*CORPUS[:2], CORPUS[2].replace("third", "fourth")],
        "queries": [QUERIES[0].replace("first", "other"), *QUERIES[1:]],
        "qrels": [*QRELS[:3], "q1\t3\t1"],
    }
    prints = {
        load_beir_folder(make_folder(tmp_path / name, **{name: lines})).fingerprint for name, lines in changes.items()
    }
    assert len(prints | {plain.fingerprint}) == 4


def test_headerless_judgements_keep_their_first_line(tmp_path):
    data = load_beir_folder(make_folder(tmp_path, qrels=QRELS[1:]))
    assert data.qrels == {"q2": {"d1": 1}, "q1": {"d2": 2, "3": 0}}


def test_bad_first_judgement_is_not_taken_for_a_header(tmp_path):
    with pytest.raises(DataError, match=r"test\.tsv:1: score is not an integer: found 'high'"):
        load_beir_folder(make_folder(tmp_path, qrels=["q1\td1\thigh", *QRELS[1:]]))


BAD_DOCUMENTS = [
    ('{"_id": "d9", "text": ', "broken JSON"),
    ('{"_id": "d9", "text": NaN}', "broken JSON"),
    ('["d9"]', "not a JSON object"),
    ('{"text": "no id"}', "missing _id"),
    ('{"_id": null, "text": "no id"}', "missing _id"),
    ('{"_id": " ", "text": "no id"}', "missing _id"),
    ('{"_id": 1.5, "text": "t"}', "_id is not text"),
    ('{"_id": true, "text": "t"}', "_id is not text"),
    ('{"_id": "d1", "text": "again"}', "duplicate _id"),
    ('{"_id": "3", "text": "again, once as an integer"}', "duplicate _id"),
    ('{"_id": "d9", "title": "no text"}', "missing text"),
    ('{"_id": "d9", "text": 5}', "text is not text"),
    ('{"_id": "d9", "text": "\\ud800"}', "text is not valid Unicode"),
    ('{"_id": "d9", "title": ["t"], "text": "t"}', "title is not text"),
]
BAD_QUERIES = [
    ("nothing", "broken JSON"),
    ('{"text": "no id"}', "missing _id"),
    ('{"_id": "q1", "text": "again"}', "duplicate _id"),
    ('{"_id": "q9"}', "missing text"),
    ('{"_id": "q9", "text": " \\n"}', "empty text"),
]
BAD_JUDGEMENTS = [
    ("q1\td1", "not three columns"),
    ("q1 0 d1 1", "not three columns"),
    ("q1\t0\td1\t1", "not three columns"),
    ("q1\td1\t1.5", "score is not an integer"),
    ("q1\td1\tyes", "score is not an integer"),
    ("q1\td1\t" + "9" * 5000, "score is not an integer"),
    ("q9\td1\t1", "unknown query"),
    ("q1\td9\t1", "unknown document"),
    ("q1\td2\t2", "duplicate judgement"),
    ("query-id\tcorpus-id\tscore", "score is not an integer"),
]
CASES = [
    *(("corpus", "corpus.jsonl", CORPUS, *case) for case in BAD_DOCUMENTS),
    *(("queries", "queries.jsonl", QUERIES, *case) for case in BAD_QUERIES),
    *(("qrels", "qrels/test.tsv", QRELS, *case) for case in BAD_JUDGEMENTS),
]


@pytest.mark.parametrize(("part", "name", "lines", "bad", "reason"), CASES)
def test_every_bad_record_names_its_file_line_and_reason(tmp_path, part, name, lines, bad, reason):
    folder = make_folder(tmp_path, **{part: [*lines, "", bad]})
    line = len(lines) + 2
    with pytest.raises(DataError) as caught:
        load_beir_folder(folder)
    assert str(caught.value).startswith(f"{folder / name}:{line}: {reason}")
    assert "\n" not in str(caught.value) and "--on_bad_record skip" in str(caught.value)

    report = RecordReport("skip")
    data = load_beir_folder(folder, report=report)
    assert data.report is report
    assert report.entries == [BadRecord(str(folder / name), line, reason)]
    assert (report.seen, report.used, report.reported) == (10, 9, 1)
    assert data.fingerprint == load_beir_folder(make_folder(tmp_path / "clean")).fingerprint


def test_a_document_left_out_takes_its_judgements_along_and_both_are_counted(tmp_path):
    folder = make_folder(tmp_path, corpus=["broken", *CORPUS[1:]])
    data = load_beir_folder(folder, on_bad_record="skip")
    assert data.qrels == {"q1": {"d2": 2, "3": 0}}
    assert data.report.by_reason == {"broken JSON": 1, "unknown document": 1}
    assert (data.report.seen, data.report.used) == (9, 7)


def test_empty_documents_are_kept_for_evaluation_and_refused_for_training(tmp_path):
    empty = '{"_id": "d9", "title": " ", "text": ""}'
    folder = make_folder(tmp_path, corpus=[*CORPUS, empty])
    data = load_beir_folder(folder)
    assert data.corpus["d9"] == {"title": " ", "text": ""}
    assert data.report.notes == {"empty documents kept": 1} and data.report.reported == 0
    with pytest.raises(DataError, match=r"corpus\.jsonl:4: empty document: 'd9'"):
        load_beir_folder(folder, allow_empty_documents=False)
    skipped = load_beir_folder(folder, on_bad_record="skip", allow_empty_documents=False)
    assert "d9" not in skipped.corpus and skipped.report.by_reason == {"empty document": 1}


def test_a_title_alone_is_no_empty_document(tmp_path):
    folder = make_folder(tmp_path, corpus=[*CORPUS, '{"_id": "d9", "title": "t", "text": ""}'])
    assert len(load_beir_folder(folder, allow_empty_documents=False).corpus) == 4


def test_missing_split_names_the_splits_that_exist(tmp_path):
    make_folder(tmp_path, split="dev")
    make_folder(tmp_path, split="train", ending=".gz")
    with pytest.raises(DataError, match="no split 'test'; it has: dev, train"):
        load_beir_folder(tmp_path)
    assert load_beir_folder(tmp_path, "train").split == "train"


@pytest.mark.parametrize("name", ["corpus.jsonl", "queries.jsonl"])
def test_missing_file_is_named(tmp_path, name):
    make_folder(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(DataError, match=f"{name}: no such file"):
        load_beir_folder(tmp_path)


def test_missing_folder_and_file_instead_of_folder_are_told_apart(tmp_path):
    with pytest.raises(DataError, match="no such folder"):
        load_beir_folder(tmp_path / "nothing")
    (tmp_path / "file").write_text("x")
    with pytest.raises(DataError, match="is a file, a folder is expected"):
        load_beir_folder(tmp_path / "file")
    (tmp_path / "bare").mkdir()
    with pytest.raises(DataError, match=r"corpus\.jsonl: no such file \(a BEIR folder holds"):
        load_beir_folder(tmp_path / "bare")


@pytest.mark.parametrize(("part", "what"), [("corpus", "documents"), ("queries", "queries"), ("qrels", "judgements")])
def test_nothing_left_is_an_error_under_skip_too(tmp_path, part, what):
    folder = make_folder(tmp_path, **{part: ["bad", "worse"]})
    with pytest.raises(DataError, match=f"no {what} left to use; .* 2 left out"):
        load_beir_folder(folder, on_bad_record="skip")


def test_judgements_with_a_header_alone_are_an_error(tmp_path):
    with pytest.raises(DataError, match="no judgements left to use"):
        load_beir_folder(make_folder(tmp_path, qrels=QRELS[:1]))


@pytest.mark.parametrize(
    ("title", "text", "separator", "passage"),
    [
        ("T", "x ", " ", "T x"),
        ("", " x", " ", "x"),
        (" ", "x", " [SEP] ", "x"),
        ("T", " ", " [SEP] ", "T"),
        ("T", "x", " [SEP] ", "T [SEP] x"),
        ("", "", " ", ""),
    ],
)
def test_passage_is_title_and_text_without_a_stray_separator(title, text, separator, passage):
    assert passage_text(title, text, separator) == passage


def test_shipped_scifact_is_the_published_one():
    test = load_beir_folder(shipped_scifact(), "test")
    assert len(test.corpus) == 5183
    assert len(test.queries) == 300
    assert sum(len(judged) for judged in test.qrels.values()) == 339
    assert test.report.reported == 0 and test.name == "scifact"
    train = load_beir_folder(shipped_scifact(), "train", allow_empty_documents=False)
    assert len(train.queries) == 809
    assert sum(len(judged) for judged in train.qrels.values()) == 919
    assert not set(train.queries) & set(test.queries)
    assert train.fingerprint != test.fingerprint


def test_unpacked_scifact_has_the_fingerprint_of_the_shipped_one(tmp_path):
    for packed in shipped_scifact().glob("*.gz"):
        (tmp_path / packed.stem).write_bytes(gzip.decompress(packed.read_bytes()))
    (tmp_path / "qrels").mkdir()
    (tmp_path / "qrels" / "test.tsv").write_bytes((shipped_scifact() / "qrels" / "test.tsv").read_bytes())
    first = json.loads((tmp_path / "corpus.jsonl").read_text(encoding="utf-8").split("\n")[0])
    plain = load_beir_folder(tmp_path)
    assert plain.corpus[first["_id"]]["title"] == first["title"]
    assert plain.fingerprint == load_beir_folder(shipped_scifact()).fingerprint
