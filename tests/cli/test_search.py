"""`contaccum search`: what `contaccum encode` wrote, searched as an array would be; what does not belong is refused."""

import json
from pathlib import Path

import numpy as np
import pytest
from sample_texts import sentences
from small_data import write_beir

from contaccum import DualEncoder
from contaccum.cli import main
from contaccum.evaluation.results import read_trec_run
from contaccum.retrieval import exact_search
from contaccum.retrieval.index import build_index, search
from contaccum.retrieval.store import EmbeddingStore

QUERIES = sentences(12, 2)


@pytest.fixture(scope="module")
def root(tiny_config, tiny_tokenizer, tmp_path_factory) -> Path:
    """A saved encoder, another one, a BEIR folder of 60 documents (some twins), and a store of them in four shards."""
    root = tmp_path_factory.mktemp("search")
    for name in ("encoder", "other"):
        model = DualEncoder.from_backbone(
            tiny_config, tokenizer=tiny_tokenizer, pooling="mean", device="cpu"
        )
        model.save_pretrained(str(root / name))
    texts = sentences(50, 1)
    documents = {f"d{7 * n % 60}": ("", text) for n, text in enumerate([*texts, *texts[:10]])}
    queries = {f"q{n}": text for n, text in enumerate(QUERIES)}
    write_beir(root, documents, queries, [("q3", "d0", 1), ("q5", "d0", 1)], "test")
    encode(root, "corpus.jsonl", root / "store", "--shard_size", "17")
    return root


def encode(root: Path, texts: str, output: Path, *options: str) -> None:
    words = [
        root / "encoder",
        "--corpus",
        root / texts,
        "--output",
        output,
        "--device",
        "cpu",
        "--no_progress",
    ]
    assert main(["encode", *map(str, words), *options]) == 0


def run(root: Path, output: Path, *options: object, model: str | None = "encoder") -> int:
    given = [] if model is None else [root / model, "--device", "cpu"]
    where = [
        "--store",
        root / "store",
        "--queries",
        root / "queries.jsonl",
        "--output",
        output,
        "--no_progress",
    ]
    return main(["search", *map(str, [*given, *where, *options])])


def test_a_run_is_what_an_array_gives(root, tmp_path, monkeypatch):
    monkeypatch.setattr(exact_search, "SLICE_BYTES", 4 * 32 * 25)
    assert run(root, tmp_path / "run.trec", "--top_k", 7) == 0
    found, store = read_trec_run(tmp_path / "run.trec"), EmbeddingStore.open(root / "store")
    model, ids = (
        DualEncoder.from_pretrained(str(root / "encoder"), device="cpu"),
        store.ids(range(60)),
    )
    expected = search(
        build_index(store[:], metric=store.similarity, ids=ids), model.encode_query(QUERIES), 7
    )
    for number, (scores, rows) in enumerate(zip(*expected, strict=True)):
        assert set(found[f"q{number}"]) == {ids[row] for row in rows}
        assert sorted(found[f"q{number}"].values(), reverse=True) == pytest.approx(
            scores.tolist(), abs=1e-6
        )
    record = json.loads((tmp_path / "run.json").read_text())
    about = {
        "index": "Flat",
        "index_parameters": None,
        "index_file": None,
        "k": 7,
        "gpus": 0,
        "recall": None,
    }
    assert about.items() <= record["search"].items()
    assert record["store"]["rows"] == 60 and record["queries"]["count"] == 12


def test_a_store_of_codes_is_searched_by_float_queries(root, tmp_path):
    whole = EmbeddingStore.open(root / "store")
    model, ids = (
        DualEncoder.from_pretrained(str(root / "encoder"), device="cpu"),
        whole.ids(range(60)),
    )
    asked = model.encode_query(QUERIES)
    for dtype, expected in (("int8", whole[:]), ("binary", np.where(whole[:] > 0, 1.0, -1.0))):
        encode(root, "corpus.jsonl", tmp_path / dtype, "--dtype", dtype, "--shard_size", "17")
        assert (
            run(
                root, tmp_path / f"{dtype}.trec", "--store", tmp_path / dtype, "--similarity", "dot"
            )
            == 0
        )
        found, scores = read_trec_run(tmp_path / f"{dtype}.trec"), asked @ expected.T
        for number, line in enumerate(scores):
            off = [found[f"q{number}"][name] - score for name, score in zip(ids, line, strict=True)]
            assert np.abs(off).max() < 0.01 * np.abs(scores).max()


def test_queries_that_were_encoded_before_need_no_model(root, tmp_path):
    encode(root, "queries.jsonl", tmp_path / "encoded", "--kind", "query")
    assert run(root, tmp_path / "a.trec") == 0
    assert run(root, tmp_path / "b.trec", "--queries", tmp_path / "encoded", model=None) == 0
    assert read_trec_run(tmp_path / "a.trec") == read_trec_run(tmp_path / "b.trec")


def test_of_a_beir_folder_the_queries_of_a_split_are_searched_if_one_is_named(root, tmp_path):
    for options, count in ((["--split", "test"], 2), ([], 12)):
        assert run(root, tmp_path / "run.trec", "--queries", root, *options) == 0
        assert len(read_trec_run(tmp_path / "run.trec")) == count


def test_an_index_file_is_written_once_and_searched_again(root, tmp_path):
    options = [
        "--index",
        "IVF4,Flat",
        "--index_parameters",
        "nprobe=2",
        "--index_file",
        tmp_path / "ivf.faiss",
    ]
    for name in ("first", "second"):
        assert run(root, tmp_path / f"{name}.trec", "--top_k", 5, *options) == 0
    assert (tmp_path / "first.trec").read_text() == (tmp_path / "second.trec").read_text()
    about = json.loads((tmp_path / "second.json").read_text())["search"]
    assert about["recall"]["queries"] == 12 and 0 < about["recall"]["recall@5"] <= 1
    assert about["index_parameters"] == "nprobe=2"


@pytest.mark.parametrize(
    ("options", "model", "words"),
    [
        ([], "other", "was encoded by another model"),
        ([], None, "name a MODEL"),
        (["--output", "run.json"], "encoder", "end its name in .trec"),
        (["--index_file", "x.faiss"], "encoder", "leave --index_file out"),
        (["--store", "nowhere"], "encoder", "not a store"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(root, tmp_path, capsys, options, model, words):
    assert run(root, tmp_path / "run.trec", *options, model=model) == 2
    # What loading a model says goes there too.
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("contaccum: error") and words in error
    assert not (tmp_path / "run.trec").exists()
