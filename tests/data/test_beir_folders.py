"""BEIR data: bad records are named, contents equal BEIR's own, downloads are complete or absent."""

import hashlib
import io
import urllib.error
import zipfile
from pathlib import Path
from typing import Any

import pytest
import pytrec_eval
from data_files import put

from contaccum.data import (
    PUBLIC_NAMES,
    RecordReport,
    get_default_split,
    load_beir_folder,
    load_training_data,
)
from contaccum.data.beir import ARCHIVE_MD5, resolve_beir_data, shipped_scifact
from contaccum.data.split import write_part
from contaccum.errors import DataError
from contaccum.evaluation.beir import describe_data, load_data, score_beir_run
from contaccum.evaluation.evaluator import sample
from contaccum.mining import load_mining_data

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


FILE_OF_PART = {"corpus": "corpus.jsonl", "queries": "queries.jsonl", "qrels": "qrels/test.tsv"}
LINES_OF_PART = {"corpus": CORPUS, "queries": QUERIES, "qrels": QRELS}


def write_folder(
    folder: Path, split: str = "test", is_packed: bool = False, **lines_of_part: list[str]
) -> Path:
    """Write a BEIR folder with the lines of each part, or with the usual ones.

    A packed one has all that may differ between equal folders.
    """
    for part, lines in {**LINES_OF_PART, **lines_of_part}.items():
        name = FILE_OF_PART[part].replace("test", split)
        if is_packed:
            put(folder / f"{name}.gz", "\ufeff" + "\r\n".join(lines) + "\r\n")
        else:
            put(folder / name, "\n".join(lines) + "\n")
    return folder


def test_a_document_may_have_a_null_text_and_a_query_may_not(tmp_path):
    """`contaccum encode` reads the same documents."""
    corpus = [*CORPUS, '{"_id": "d4", "title": "Four", "text": null}']
    data = load_beir_folder(write_folder(tmp_path / "documents", corpus=corpus))
    assert data.corpus["d4"] == {"title": "Four", "text": ""}
    queries = [*QUERIES, '{"_id": "q4", "text": null}']
    with pytest.raises(DataError, match=r"queries\.jsonl:4: missing text"):
        load_beir_folder(write_folder(tmp_path / "queries", queries=queries))


def test_contents_equal_those_of_the_files(tmp_path):
    data = load_beir_folder(write_folder(tmp_path / "tiny"))
    assert (data.name, data.split, data.path) == ("tiny", "test", tmp_path / "tiny")
    assert data.corpus == {
        "d1": {"title": "One", "text": "first text"},
        "d2": {"title": "", "text": "second text"},
        "3": {"title": "", "text": "third text"},
    }
    assert list(data.queries.items()) == [("q2", "second query"), ("q1", "first query")]
    assert list(data.qrels) == ["q2", "q1"]
    assert data.qrels == {"q2": {"d1": 1}, "q1": {"d2": 2, "3": 0}}
    assert (data.report.seen, data.report.reported) == (9, 0)
    without_header = load_beir_folder(write_folder(tmp_path / "headless", qrels=QRELS[1:]))
    assert without_header.qrels == data.qrels


def test_the_fingerprint_ignores_packing_and_sees_every_content(tmp_path):
    plain = load_beir_folder(write_folder(tmp_path / "plain"))
    packed_folder = write_folder(tmp_path / "packed", is_packed=True)
    assert load_beir_folder(packed_folder).fingerprint == plain.fingerprint
    assert len(plain.fingerprint) == 64
    changes = {
        "corpus": [*CORPUS[:2], CORPUS[2].replace("third", "fourth")],
        "queries": [QUERIES[0].replace("first", "other"), *QUERIES[1:]],
        "qrels": [*QRELS[:3], "q1\t3\t1"],
    }
    fingerprints = {plain.fingerprint}
    for part, lines in changes.items():
        changed = load_beir_folder(write_folder(tmp_path / part, **{part: lines}))
        fingerprints.add(changed.fingerprint)
    assert len(fingerprints) == 4


@pytest.mark.parametrize(
    ("part", "bad_line", "reason"),
    [
        ("corpus", '{"_id": "3", "text": "again, once as an integer"}', "duplicate _id"),
        ("corpus", '{"_id": "d9", "title": "no text"}', "missing text"),
        ("qrels", "q1 0 d1 1", "not 3 columns"),
        ("qrels", "q1\td1\t1.5", "score is not an integer"),
        ("qrels", "q9\td1\t1", "unknown query"),
        ("qrels", "q1\td2\t2", "duplicate judgement"),
    ],
)
def test_every_bad_record_names_its_file_line_and_reason(tmp_path, part, bad_line, reason):
    good_lines = LINES_OF_PART[part]
    folder = write_folder(tmp_path, **{part: [*good_lines, "", bad_line]})
    location = f"{folder / FILE_OF_PART[part]}:{len(good_lines) + 2}"
    with pytest.raises(DataError) as caught:
        load_beir_folder(folder)
    error = str(caught.value)
    assert error.startswith(f"{location}: {reason}")
    assert error.endswith("leave such records out with --on_bad_record skip)")
    report = RecordReport("skip")
    data = load_beir_folder(folder, report=report)
    assert (data.report, report.first, report.seen) == (report, location, 10)
    assert report.by_reason == {reason: 1}
    assert data.fingerprint == load_beir_folder(write_folder(tmp_path / "clean")).fingerprint


# The corpus lacks a positive of q1 and the only positive of q2.
OUTSIDE = [*QRELS[:1], "q1\td2\t1", "q1\td9\t2", "q1\td8\t0", "q2\td7\t1"]


def test_judged_documents_outside_the_corpus_count_as_not_found(tmp_path, caplog):
    folder = write_folder(tmp_path / "partly", qrels=OUTSIDE)
    data = load_beir_folder(folder)
    load_beir_folder(folder)
    (warning,) = caplog.messages
    assert "2 judgements above 0 name documents that are not in the corpus, such as 'd9'" in warning
    assert describe_data(data)["judgements_outside_corpus"] == 2
    qrels = {"q1": {"d2": 1, "d9": 2, "d8": 0}, "q2": {"d7": 1}}
    assert data.qrels == qrels
    run = {"q1": {"d1": 2.0, "d2": 1.0}, "q2": {"d1": 1.0}}
    expected = pytrec_eval.RelevanceEvaluator(qrels, {"ndcg_cut.10", "recall.10"}).evaluate(run)
    for part in (data, sample(data, corpus=2)):
        scores = score_beir_run(part, run, [10], "made up").per_query
        for query_id, query_scores in expected.items():
            assert scores[query_id]["NDCG@10"] == query_scores["ndcg_cut_10"]
            assert scores[query_id]["Recall@10"] == query_scores["recall_10"]
    assert expected["q1"]["recall_10"] == 0.5


def test_pairs_whose_document_is_outside_the_corpus_are_not_trained_on(tmp_path, caplog):
    folder = write_folder(tmp_path / "partly", "train", qrels=OUTSIDE)
    data = load_training_data(folder)
    assert [row["positive"] for row in data.dataset] == ["second text"]
    assert data.report.by_reason == {"relevant document outside the corpus": 2}
    assert [query.text for query in load_mining_data(folder).queries] == ["first query"]
    assert len(caplog.messages) == 1


def test_a_part_of_a_set_keeps_judgements_outside_the_corpus(tmp_path):
    folder = write_folder(tmp_path / "partly", qrels=[*OUTSIDE, "q9\td1\t1"])
    data = load_beir_folder(folder, report=RecordReport("skip"))
    write_part(data, {"d2"}, tmp_path / "pool")
    assert load_beir_folder(tmp_path / "pool").qrels == data.qrels


def test_judgements_of_another_corpus_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"test\.tsv: no relevant document is in the corpus"):
        load_beir_folder(write_folder(tmp_path, qrels=["q1\t0001\t1", "q2\td1\t0"]))


def test_empty_documents_are_evaluated_but_not_trained_on(tmp_path):
    corpus = [*CORPUS, '{"_id": "d9", "title": " ", "text": ""}']
    qrels = [QRELS[0], "q1\td1\t1", "q1\td9\t1"]
    folder = write_folder(tmp_path, corpus=corpus, qrels=qrels)
    assert load_beir_folder(folder).corpus["d9"] == {"title": " ", "text": ""}
    data = load_training_data(folder, split="test")
    assert len(data.dataset) == 1
    assert data.report.by_reason == {"empty document": 1}


def test_what_is_missing_in_a_folder_is_named(tmp_path):
    write_folder(tmp_path, split="dev")
    write_folder(tmp_path, split="train", is_packed=True)
    with pytest.raises(DataError, match="no split 'test'; it has: dev, train"):
        load_beir_folder(tmp_path)
    with pytest.raises(DataError, match="no such file"):
        load_beir_folder(tmp_path / "nothing")


def test_shipped_scifact_is_the_published_one(tmp_path):
    test = load_beir_folder(shipped_scifact(), "test")
    num_judgements = sum(len(judgements) for judgements in test.qrels.values())
    assert (len(test.corpus), len(test.queries), num_judgements) == (5183, 300, 339)
    train = load_training_data(shipped_scifact())
    assert len(train.dataset) == 919
    assert test.report.reported == train.report.reported == 0
    # There are 809 judged claims. Two of them occur under two ids each.
    assert len({row["query"] for row in train.dataset}) == 807


# Public sets by name


@pytest.fixture
def server(monkeypatch, tmp_path) -> dict[str, Any]:
    """Replace the network by a dictionary.

    Its keys are "content" (the bytes of each download, the archive of the set fiqa, or an error)
    and "urls" (those requested).
    """
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as packed:
        for part, file_name in FILE_OF_PART.items():
            packed.writestr(f"fiqa/{file_name}", "\n".join(LINES_OF_PART[part]))
    state: dict[str, Any] = {"content": archive.getvalue(), "urls": []}

    def urlopen(url: str, timeout: float) -> io.BytesIO:
        state["urls"].append(url)
        if isinstance(state["content"], Exception):
            raise state["content"]
        return io.BytesIO(state["content"])

    monkeypatch.setattr("urllib.request.urlopen", urlopen)
    monkeypatch.setitem(ARCHIVE_MD5, "fiqa", hashlib.md5(archive.getvalue()).hexdigest())
    monkeypatch.setenv("CONTACCUM_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return state


def test_a_name_is_fetched_once(tmp_path, server):
    folder = resolve_beir_data("fiqa")
    assert folder == tmp_path / "cache" / "beir" / "fiqa"
    assert resolve_beir_data("fiqa") == folder
    assert {path.name for path in folder.iterdir()} == {"corpus.jsonl", "qrels", "queries.jsonl"}
    assert server["urls"] == [
        "https://public.ukp.informatik.tu-darmstadt.de/thakur/BEIR/datasets/fiqa.zip"
    ]


def test_a_folder_with_the_name_of_a_public_set_is_used_as_it_is(tmp_path, server):
    write_folder(tmp_path / "nfcorpus")
    assert resolve_beir_data("nfcorpus") == Path("nfcorpus")
    assert server["urls"] == []
    with pytest.raises(DataError, match="no split 'dev'; it has: test"):
        load_data("nfcorpus", "dev")


@pytest.mark.parametrize("content", [urllib.error.URLError("no\nroute"), b"half a zip"])
def test_a_failed_download_is_one_line_and_leaves_nothing_behind(tmp_path, server, content):
    server["content"] = content
    with pytest.raises(DataError, match=r"^scifact: "):
        resolve_beir_data("scifact")
    assert list((tmp_path / "cache" / "beir").iterdir()) == []


def test_the_default_split_is_test_except_for_msmarco():
    assert len(PUBLIC_NAMES) == 15
    assert get_default_split("/data/msmarco/") == get_default_split("msmarco") == "dev"
    assert get_default_split("nq") == "test"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("data/Nfcorpsu", "; did you mean 'nfcorpus'"),
        ("x" * 5000, "; names are"),
        ("cqadupstack", "; did you mean 'cqadupstack/"),
    ],
    ids=["misspelt", "long", "a set in parts"],
)
def test_an_unknown_name_is_refused_with_the_closest_public_name(server, name, hint):
    with pytest.raises(DataError, match=f"neither a folder nor .*{hint}"):
        resolve_beir_data(name)
    assert server["urls"] == []
