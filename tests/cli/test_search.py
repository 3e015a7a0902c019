"""`contaccum search`: runs and records of a store that `contaccum encode` wrote."""

import io
import json
import shutil
from pathlib import Path

import pytest
from sample_texts import sentences
from small_data import read_lines, write_beir

from contaccum import DualEncoder
from contaccum.cli import main
from contaccum.evaluation.results import read_trec_run
from contaccum.retrieval import bm25
from contaccum.retrieval.store import EmbeddingStore

QUERIES = sentences(12, 2)


@pytest.fixture(scope="module")
def root(tiny_config, tiny_tokenizer, tmp_path_factory) -> Path:
    """Return a folder with two saved encoders, a BEIR set, and a store of its documents.

    The BEIR set has 60 documents, 10 of them duplicates. The store has four shards.
    """
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
    argv = ["encode", str(root / "encoder"), "--device", "cpu", "--no_progress"]
    argv += ["--corpus", str(root / texts), "--output", str(output), *options]
    assert main(argv) == 0


def run(root: Path, output: Path, *options: object, model: str | Path = "encoder") -> int:
    argv = ["search", str(root / model), "--device", "cpu"]
    argv += ["--store", str(root / "store"), "--queries", str(root / "queries.jsonl")]
    argv += ["--output", str(output), "--no_progress"]
    return main([*argv, *map(str, options)])


def test_run_has_the_largest_products_of_all_embeddings(root, tmp_path):
    assert run(root, tmp_path / "run.trec", "--top_k", 7) == 0
    hits = read_trec_run(tmp_path / "run.trec")
    store = EmbeddingStore.open(root / "store")
    model = DualEncoder.from_pretrained(str(root / "encoder"), device="cpu")
    products = model.similarity(model.encode_query(QUERIES), store[:]).numpy()
    row_of_id = {document_id: row for row, document_id in enumerate(store.ids(range(60)))}
    for number, scores in enumerate(products):
        query_hits = hits[f"q{number}"]
        best = sorted(scores.tolist(), reverse=True)[:7]
        assert sorted(query_hits.values(), reverse=True) == pytest.approx(best, abs=1e-5)
        for document_id, score in query_hits.items():
            assert score == pytest.approx(scores[row_of_id[document_id]], abs=1e-5)
    record = json.loads((tmp_path / "run.trec.json").read_text())
    assert (record["search"]["index"], record["search"]["k"]) == ("Flat", 7)
    assert record["store"]["rows"] == 60
    assert record["queries"]["count"] == 12


def test_split_selects_the_queries_of_a_beir_folder(root, tmp_path):
    queries = tmp_path / "queries"  # without a corpus, which is not needed
    shutil.copytree(root, queries, ignore=shutil.ignore_patterns("corpus.jsonl", "store*"))
    for options, count in ((["--split", "test"], 2), ([], 12)):
        assert run(root, tmp_path / "run.trec", "--queries", queries, *options) == 0
        assert len(read_trec_run(tmp_path / "run.trec")) == count


def test_index_file_is_written_once_and_used_again(root, tmp_path, capsys):
    options = ["--index", "IVF4,Flat", "--index_parameters", "nprobe=2"]
    options += ["--index_file", tmp_path / "ivf.faiss"]
    for name in ("first", "second"):
        assert run(root, tmp_path / f"{name}.trec", "--top_k", 5, *options) == 0
    assert (tmp_path / "first.trec").read_text() == (tmp_path / "second.trec").read_text()
    record = json.loads((tmp_path / "second.trec.json").read_text())["search"]
    assert record["recall"]["queries"] == 12
    assert 0 < record["recall"]["recall@5"] <= 1
    assert record["index_parameters"] == "nprobe=2"
    assert run(root, tmp_path / "third.trec", "--top_k", 5, *options, "--no_recall") == 0
    assert "recall not measured" in capsys.readouterr().out
    assert json.loads((tmp_path / "third.trec.json").read_text())["search"]["recall"] is None


def test_bm25_is_added_with_its_weight(root, tmp_path, capsys):
    """The scores of the 60 documents are scaled, although only 7 of them are in the run."""
    store = tmp_path / "store"
    encode(root, "corpus.jsonl", store, "--shard_size", "17")
    options = ["--store", store, "--bm25_weight", 0.3, "--top_k", 7]
    assert run(root, tmp_path / "run.trec", *options) == 2
    assert "--bm25" in capsys.readouterr().err.splitlines()[-1]
    encode(root, "corpus.jsonl", store, "--shard_size", "17", "--bm25")  # only the index is written
    assert run(root, tmp_path / "run.trec", *options) == 0
    hits = read_trec_run(tmp_path / "run.trec")

    assert run(root, tmp_path / "dense.trec", "--store", store) == 0
    opened = EmbeddingStore.open(store)
    queries = {f"q{number}": text for number, text in enumerate(QUERIES)}
    words = bm25.search(bm25.open_index(opened), opened.ids, queries, 60)
    fused = bm25.fuse_runs(read_trec_run(tmp_path / "dense.trec"), words, 0.3)
    assert any(0 < len(found) < 60 for found in words.values())
    for query, scores in fused.items():
        assert hits[query] == pytest.approx(dict(list(scores.items())[:7]), abs=1e-5)
    record = json.loads((tmp_path / "run.trec.json").read_text())["search"]
    assert (record["bm25_weight"], record["k"]) == (0.3, 7)

    # A store that is written anew loses the index of the old one.
    encode(root, "corpus.jsonl", store, "--overwrite")
    assert not (store / "bm25").exists()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("other", {}, "another model"),
        # A model that cuts its embeddings does not search uncut ones.
        ("encoder", {"truncate_dim": 8}, "another tokenizer, prompt"),
    ],
)
def test_a_store_of_another_model_is_refused_in_one_line(
    root, tmp_path, capsys, name, options, message
):
    model = DualEncoder.from_pretrained(str(root / name), device="cpu", **options)
    model.save_pretrained(str(tmp_path / "encoder"))
    assert run(root, tmp_path / "run.trec", model=tmp_path / "encoder") == 2
    # The lines before the error are messages of loading a model.
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("contaccum: error")
    assert message in error
    assert not (tmp_path / "run.trec").exists()


def test_a_store_is_searched_with_the_passage_length_that_it_was_encoded_with(
    root, tmp_path, capsys
):
    encode(root, "corpus.jsonl", tmp_path / "short", "--passage_max_length", "8")
    options = ["--store", tmp_path / "short"]
    assert run(root, tmp_path / "run.trec", *options) == 2
    assert "--passage_max_length" in capsys.readouterr().err.splitlines()[-1]
    assert run(root, tmp_path / "run.trec", *options, "--passage_max_length", 8) == 0
    assert len(read_trec_run(tmp_path / "run.trec")) == len(QUERIES)


def ask(root: Path, store: Path, *words: str, model: str = "encoder") -> int:
    return main(["search", str(root / model), "--device", "cpu", "--store", str(store), *words])


def test_a_question_shows_the_best_documents_of_its_run_with_their_texts(root, tmp_path, capsys):
    assert run(root, tmp_path / "run.trec", "--top_k", 3) == 0
    expected = read_trec_run(tmp_path / "run.trec")["q3"]
    texts = {row["_id"]: row["text"] for row in read_lines(root / "corpus.jsonl")}
    capsys.readouterr()
    assert ask(root, root / "store", QUERIES[3]) == 0
    lines = capsys.readouterr().out.splitlines()
    shown = lines[lines.index(QUERIES[3]) + 1 :]
    scores = sorted(expected.values(), reverse=True)
    for line, text, best in zip(shown[::2], shown[1::2], scores, strict=True):
        _, document_id, score = line.split()
        assert text.strip() == texts[document_id]
        assert float(score) == pytest.approx(best, abs=6e-4)


def test_questions_are_typed_until_an_empty_line(root, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{QUERIES[1]}\n{QUERIES[2]}\n\nnot read\n"))
    assert ask(root, root / "store") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines.index(QUERIES[1]) < lines.index(QUERIES[2])
    assert "not read" not in lines


def test_bm25_has_the_weight_that_fit_has_chosen(root, tmp_path, capsys):
    """With the weight 1, the best document is BM25's; a store without texts or words says so."""
    model = tmp_path / "model"
    shutil.copytree(root / "encoder", model)
    bm25.write_bm25_weight(model, 1.0)
    encode(root, "corpus.jsonl", tmp_path / "words", "--bm25")
    encode(root, "corpus.jsonl", tmp_path / "bare", "--no_texts")
    store = EmbeddingStore.open(tmp_path / "words")
    bm25_run = bm25.search(bm25.open_index(store), store.ids, {"q": QUERIES[4]}, 3)
    capsys.readouterr()
    assert ask(tmp_path, tmp_path / "words", QUERIES[4], model="model") == 0
    output = capsys.readouterr().out
    assert all(f". {document_id} " in output for document_id in bm25_run["q"])
    assert ask(tmp_path, tmp_path / "bare", QUERIES[4], model="model") == 0
    output = capsys.readouterr().out
    assert "no texts" in output
    assert "without BM25" in output
