"""BEIR data: bad records are named, contents equal BEIR's own, downloads are complete or absent."""

import gzip
import hashlib
import io
import json
import subprocess
import sys
import urllib.error
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from contaccum.data import (
    PUBLIC_NAMES,
    RecordReport,
    get_default_split,
    load_beir_folder,
    load_training_data,
)
from contaccum.data.beir import shipped_scifact
from contaccum.data.public_sets import ARCHIVE_MD5, resolve_beir_data
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


def make(
    folder: Path,
    split: str = "test",
    ending: str = "",
    end: str = "\n",
    mark: str = "",
    **parts: Any,
) -> Path:
    (folder / "qrels").mkdir(parents=True, exist_ok=True)
    files = {"corpus.jsonl": "corpus", "queries.jsonl": "queries", f"qrels/{split}.tsv": "qrels"}
    for name, part in files.items():
        lines = parts.get(part, {"corpus": CORPUS, "queries": QUERIES, "qrels": QRELS}[part])
        content = (mark + end.join(lines) + end).encode()
        (folder / (name + ending)).write_bytes(gzip.compress(content) if ending else content)
    return folder


def test_a_document_may_have_a_null_text_and_a_query_may_not(tmp_path):
    """`contaccum encode` reads the same documents."""
    corpus = [*CORPUS, '{"_id": "d4", "title": "Four", "text": null}']
    data = load_beir_folder(make(tmp_path / "documents", corpus=corpus))
    assert data.corpus["d4"] == {"title": "Four", "text": ""}
    queries = [*QUERIES, '{"_id": "q4", "text": null}']
    with pytest.raises(DataError, match=r"queries\.jsonl:4: missing text"):
        load_beir_folder(make(tmp_path / "queries", queries=queries))


def test_contents_equal_those_of_the_files(tmp_path):
    data = load_beir_folder(make(tmp_path / "tiny"))
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
    headless = load_beir_folder(make(tmp_path / "headless", qrels=QRELS[1:]))
    assert headless.qrels == data.qrels


def test_the_fingerprint_ignores_packing_and_sees_every_content(tmp_path):
    plain = load_beir_folder(make(tmp_path / "plain"))
    packed = load_beir_folder(make(tmp_path / "packed", ending=".gz", end="\r\n", mark="\ufeff"))
    assert plain.fingerprint == packed.fingerprint and len(plain.fingerprint) == 64
    changes = {
        "corpus": [*CORPUS[:2], CORPUS[2].replace("third", "fourth")],
        "queries": [QUERIES[0].replace("first", "other"), *QUERIES[1:]],
        "qrels": [*QRELS[:3], "q1\t3\t1"],
    }
    fingerprints = {
        load_beir_folder(make(tmp_path / part, **{part: lines})).fingerprint
        for part, lines in changes.items()
    }
    assert len(fingerprints | {plain.fingerprint}) == 4


CASES = [
    ("corpus", "corpus.jsonl", CORPUS, '{"_id": 1.5, "text": "t"}', "_id is not text"),
    (
        "corpus",
        "corpus.jsonl",
        CORPUS,
        '{"_id": "3", "text": "again, once as an integer"}',
        "duplicate _id",
    ),
    ("corpus", "corpus.jsonl", CORPUS, '{"_id": "d9", "title": "no text"}', "missing text"),
    ("queries", "queries.jsonl", QUERIES, '{"_id": "q9", "text": " \\n"}', "empty text"),
    ("qrels", "qrels/test.tsv", QRELS, "q1 0 d1 1", "not 3 columns"),
    ("qrels", "qrels/test.tsv", QRELS, "q1\td1\t1.5", "score is not an integer"),
    ("qrels", "qrels/test.tsv", QRELS, "q9\td1\t1", "unknown query"),
    ("qrels", "qrels/test.tsv", QRELS, "q1\td9\t1", "unknown document"),
    ("qrels", "qrels/test.tsv", QRELS, "q1\td2\t2", "duplicate judgement"),
]


@pytest.mark.parametrize(("part", "name", "lines", "bad", "reason"), CASES)
def test_every_bad_record_names_its_file_line_and_reason(tmp_path, part, name, lines, bad, reason):
    folder = make(tmp_path, **{part: [*lines, "", bad]})
    line = len(lines) + 2
    with pytest.raises(DataError) as caught:
        load_beir_folder(folder)
    assert str(caught.value).startswith(f"{folder / name}:{line}: {reason}")
    assert "\n" not in str(caught.value) and "--on_bad_record skip" in str(caught.value)
    report = RecordReport("skip")
    data = load_beir_folder(folder, report=report)
    assert data.report is report and report.first == f"{folder / name}:{line}"
    assert (report.seen, report.used, report.reported, report.by_reason) == (10, 9, 1, {reason: 1})
    assert data.fingerprint == load_beir_folder(make(tmp_path / "clean")).fingerprint


def test_empty_documents_are_evaluated_but_not_trained_on(tmp_path):
    qrels = [QRELS[0], "q1\td1\t1", "q1\td9\t1"]
    folder = make(
        tmp_path, corpus=[*CORPUS, '{"_id": "d9", "title": " ", "text": ""}'], qrels=qrels
    )
    assert load_beir_folder(folder).corpus["d9"] == {"title": " ", "text": ""}
    data = load_training_data(folder, split="test")
    assert len(data.dataset) == 1 and data.report.by_reason == {"empty document": 1}


def test_what_is_missing_in_a_folder_is_named(tmp_path):
    make(tmp_path, split="dev")
    make(tmp_path, split="train", ending=".gz")
    with pytest.raises(DataError, match="no split 'test'; it has: dev, train"):
        load_beir_folder(tmp_path)
    with pytest.raises(DataError, match="no such folder"):
        load_beir_folder(tmp_path / "nothing")
    for part in ("corpus", "queries", "qrels"):
        with pytest.raises(DataError, match=f"{part}.*: no records left to use; .* 2 left out"):
            load_beir_folder(
                make(tmp_path / part, **{part: ["bad", "worse"]}), on_bad_record="skip"
            )


def test_shipped_scifact_is_the_published_one(tmp_path):
    test = load_beir_folder(shipped_scifact(), "test")
    assert (len(test.corpus), len(test.queries)) == (5183, 300)
    assert sum(len(judged) for judged in test.qrels.values()) == 339
    assert test.report.reported == 0 and test.name == "scifact"
    train = load_training_data(shipped_scifact())
    assert train.data_format == "beir" and len(train.dataset) == 919 and train.report.reported == 0
    # 809 judged claims, two of which occur under two ids each.
    assert len({row["query"] for row in train.dataset}) == 807


# Public sets by name


def archive(*names: str) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as packed:
        for name, lines in (
            ("corpus.jsonl", CORPUS),
            ("queries.jsonl", QUERIES),
            ("qrels/test.tsv", QRELS),
        ):
            packed.writestr(f"fiqa/{name}", "\n".join(lines))
        for name in names:
            packed.writestr(name, "x")
    return content.getvalue()


@pytest.fixture
def server(monkeypatch, tmp_path) -> dict[str, Any]:
    """Replace the network: {"content": bytes or an error, "urls": requested URLs, "hub": sets}."""
    state: dict[str, Any] = {"content": archive(), "urls": [], "hub": {}}

    def urlopen(url: str, timeout: float) -> io.BytesIO:
        state["urls"].append(url)
        if isinstance(state["content"], Exception):
            raise state["content"]
        return io.BytesIO(state["content"])

    monkeypatch.setattr("urllib.request.urlopen", urlopen)
    monkeypatch.setattr(
        "huggingface_hub.HfApi.dataset_info", lambda self, name, timeout: state["hub"][name]
    )
    monkeypatch.setenv("CONTACCUM_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return state


def test_a_name_is_fetched_once_and_a_folder_is_used_as_it_is(tmp_path, server, monkeypatch):
    monkeypatch.setitem(ARCHIVE_MD5, "fiqa", hashlib.md5(server["content"]).hexdigest())
    folder = resolve_beir_data("fiqa")
    assert folder == tmp_path / "cache" / "beir" / "fiqa" and resolve_beir_data("fiqa") == folder
    assert sorted(path.name for path in folder.iterdir()) == [
        "corpus.jsonl",
        "qrels",
        "queries.jsonl",
    ]
    assert server["urls"] == [
        "https://public.ukp.informatik.tu-darmstadt.de/thakur/BEIR/datasets/fiqa.zip"
    ]
    make(tmp_path / "nfcorpus")
    assert resolve_beir_data("nfcorpus") == Path("nfcorpus") and len(server["urls"]) == 1
    with pytest.raises(DataError, match="no split 'dev'; it has: test"):
        resolve_beir_data("nfcorpus", "dev")


def test_two_processes_may_fetch_the_same_set_at_once(tmp_path, server, monkeypatch):
    monkeypatch.setitem(ARCHIVE_MD5, "fiqa", hashlib.md5(server["content"]).hexdigest())
    fetch = urllib.request.urlopen
    inodes: list[int] = []

    def interleaved(url: str, timeout: float) -> Any:
        monkeypatch.setattr("urllib.request.urlopen", fetch)
        inodes.append(
            resolve_beir_data("fiqa").stat().st_ino
        )  # another process, while this one has begun
        return fetch(url, timeout=timeout)

    monkeypatch.setattr("urllib.request.urlopen", interleaved)
    folder = resolve_beir_data("fiqa")
    assert [folder.stat().st_ino] == inodes  # that of the other, who may be reading in it
    assert sorted(path.name for path in folder.iterdir()) == [
        "corpus.jsonl",
        "qrels",
        "queries.jsonl",
    ]
    assert [path.name for path in folder.parent.iterdir()] == ["fiqa"]


@pytest.mark.parametrize("content", [urllib.error.URLError("no\nroute"), b"half a zip"])
def test_a_failed_download_is_one_line_and_leaves_nothing_behind(tmp_path, server, content):
    server["content"] = content
    with pytest.raises(DataError, match=r"^scifact: "):
        resolve_beir_data("scifact")
    assert list((tmp_path / "cache" / "beir").iterdir()) == []


def test_an_archive_never_writes_outside_its_folder(tmp_path, server, monkeypatch):
    server["content"] = archive("../outside", "fiqa/../../outside", "/outside", "C:\\outside")
    monkeypatch.setitem(ARCHIVE_MD5, "fiqa", hashlib.md5(server["content"]).hexdigest())
    folder = resolve_beir_data("fiqa")
    unpacked = list(tmp_path.rglob("*outside*"))
    assert unpacked
    assert all(path.is_relative_to(folder) for path in unpacked)
    assert not Path("/outside").exists()


def test_a_misspelt_name_gets_the_closest_public_name(server):
    assert len(PUBLIC_NAMES) == 15
    assert [get_default_split(name) for name in ("msmarco", "/data/msmarco/", "nq")] == [
        "dev",
        "dev",
        "test",
    ]
    for wrong, right in (
        ("scifct", "scifact"),
        ("Trec-Covid", "trec-covid"),
        ("data/nfcorpsu", "nfcorpus"),
    ):
        with pytest.raises(
            DataError, match=f"'{wrong}': neither a folder nor .*did you mean '{right}'"
        ):
            resolve_beir_data(wrong)
    for nonsense in (
        "zzzz",
        "x" * 5000,
        "../msmarco/",
        "robust04",
        "cqadupstack",
        "scifact/android",
    ):
        with pytest.raises(DataError, match="neither a folder nor the name"):
            resolve_beir_data(nonsense)
    assert server["urls"] == []


def test_importing_the_readers_is_cheap():
    code = "import json, sys, contaccum.data; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"beir", "datasets", "torch", "pyarrow", "ijson"} & {*json.loads(done.stdout)}


class Item(SimpleNamespace):
    def default_text(self) -> str:
        return self.text


@pytest.mark.parametrize("name", ["mteb/fiqa", "BeIR/fiqa", "ir_datasets:beir/fiqa/test"])
def test_sets_of_hub_and_ir_datasets_become_beir_folders(tmp_path, server, monkeypatch, name):
    texts = {"corpus": [json.loads(x) for x in CORPUS], "queries": [json.loads(x) for x in QUERIES]}
    judged = [
        dict(zip(("query-id", "corpus-id", "score"), x.split("\t"), strict=True)) for x in QRELS[1:]
    ]
    requested = []

    def load_dataset(*arguments: str, split: str | None = None) -> Any:
        requested.append(arguments)
        graded = [{**row, "score": float(row["score"])} for row in judged]
        return {"corpus": texts[arguments[1]]} if split is None else graded

    docs = [Item(doc_id=x["_id"], title=x["title"], text=x["text"]) for x in texts["corpus"]]
    queries = [Item(query_id=x["_id"], text=x["text"]) for x in texts["queries"]]
    qrels = [
        Item(query_id=x["query-id"], doc_id=x["corpus-id"], relevance=x["score"]) for x in judged
    ]
    iters = {
        "docs_iter": lambda: docs,
        "queries_iter": lambda: queries,
        "qrels_iter": lambda: qrels,
    }
    library = SimpleNamespace(load={"beir/fiqa/test": SimpleNamespace(**iters)}.__getitem__)
    monkeypatch.setitem(sys.modules, "ir_datasets", library)
    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    parts = ["corpus", "queries", "default"][: 3 if name.startswith("mteb") else 2]
    monkeypatch.setattr("datasets.get_dataset_config_names", lambda name: parts)
    server["hub"][name] = None
    folder = resolve_beir_data(name, get_default_split(name))
    data = load_beir_folder(folder)
    expected = load_beir_folder(make(tmp_path / "same"))
    assert data.fingerprint == expected.fingerprint and data.name == {"ir": "beir-fiqa-test"}.get(
        name[:2], "fiqa"
    )
    assert requested[:1] == {"mt": [("mteb/fiqa", "default")], "Be": [("BeIR/fiqa-qrels",)]}.get(
        name[:2], []
    )
    monkeypatch.setattr("datasets.load_dataset", None)
    monkeypatch.setitem(sys.modules, "ir_datasets", None)
    assert resolve_beir_data(name) == folder
    with pytest.raises(
        DataError,
        match="pip install .*ir_datasets"
        if name[:2] == "ir"
        else "on the hub, it cannot be loaded either",
    ):
        resolve_beir_data(f"{name}2", get_default_split(f"{name}2"))
    if name[:2] == "ir":
        with pytest.raises(DataError, match="its id names the split 'test', and not 'dev'"):
            resolve_beir_data(name, "dev")
