"""`contaccum search`: what `contaccum encode` wrote, searched as an array would be; what does not belong is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sample_texts import sentences

from contaccum import DualEncoder
from contaccum.cli import main
from contaccum.evaluation.results import read_trec_run
from contaccum.retrieval import index as index_module
from contaccum.retrieval.index import build_index, search
from contaccum.retrieval.store import EmbeddingStore


@pytest.fixture(scope="module")
def places(tiny_config: Any, tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A saved encoder, another one, 60 documents (some twins) in a store of four shards, and 12 queries."""
    root = tmp_path_factory.mktemp("search")
    found = {}
    for name in ("encoder", "other"):
        model = DualEncoder.from_backbone(
            tiny_config, tokenizer=tiny_tokenizer, pooling="mean", normalize=False, device="cpu"
        )
        found[name] = root / name
        model.save_pretrained(str(found[name]))
    texts = sentences(50, 1)
    found["corpus"] = root / "corpus.jsonl"
    lines = [{"_id": f"d{7 * n % 60}", "text": text} for n, text in enumerate([*texts, *texts[:10]])]
    found["corpus"].write_text("".join(json.dumps(line) + "\n" for line in lines))
    found["queries"] = root / "queries.jsonl"
    queries = [{"_id": f"q{n}", "text": text} for n, text in enumerate(sentences(12, 2))]
    found["queries"].write_text("".join(json.dumps(line) + "\n" for line in queries))
    (root / "qrels").mkdir()
    (root / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\nq3\td0\t1\nq5\td0\t1\n")
    found["store"] = root / "store"
    options = ["--output", str(root / "store"), "--shard_size", "17", "--device", "cpu", "--no_progress"]
    assert main(["encode", str(found["encoder"]), "--corpus", str(found["corpus"]), *options]) == 0
    return found


def run(places: dict[str, Path], output: Path, *options: str, model: str | None = "encoder") -> int:
    given = [] if model is None else [str(places[model]), "--device", "cpu"]
    source = [] if "--queries" in options else ["--queries", str(places["queries"])]
    where = ["--store", str(places["store"]), *source, "--output", str(output), "--no_progress"]
    return main(["search", *given, *where, *options])


def test_a_run_is_what_an_array_gives(places: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "SLICE_BYTES", 4 * 32 * 25)
    assert run(places, tmp_path / "run.trec", "--top_k", "7") == 0
    found = read_trec_run(tmp_path / "run.trec")
    store = EmbeddingStore.open(places["store"])
    ids = store.ids(range(60))
    queries = [json.loads(line)["text"] for line in places["queries"].read_text().splitlines()]
    model = DualEncoder.from_pretrained(str(places["encoder"]), device="cpu")
    scores, rows = search(build_index(store[:], metric=store.similarity, ids=ids), model.encode_query(queries), 7)
    for number, (line, line_scores) in enumerate(zip(rows, scores, strict=True)):
        assert set(found[f"q{number}"]) == {ids[row] for row in line}
        assert sorted(found[f"q{number}"].values(), reverse=True) == pytest.approx(line_scores.tolist(), abs=1e-6)
    record = json.loads((tmp_path / "run.json").read_text())
    about = {"index": "Flat", "index_parameters": None, "index_file": None, "k": 7, "gpus": 0, "recall": None}
    assert record["search"] == about
    assert record["store"]["rows"] == 60 and record["queries"]["count"] == 12
    assert min(record["timing"].values()) > 0


def test_queries_that_were_encoded_before_need_no_model(places: dict[str, Path], tmp_path: Path) -> None:
    encoded = tmp_path / "encoded"
    options = ["--kind", "query", "--device", "cpu", "--no_progress", "--output", str(encoded)]
    assert main(["encode", str(places["encoder"]), "--corpus", str(places["queries"]), *options]) == 0
    assert run(places, tmp_path / "a.trec", "--top_k", "5") == 0
    assert run(places, tmp_path / "b.trec", "--top_k", "5", "--queries", str(encoded), model=None) == 0
    assert read_trec_run(tmp_path / "a.trec") == read_trec_run(tmp_path / "b.trec")


def test_of_a_beir_folder_the_queries_of_a_split_are_searched_if_one_is_named(
    places: dict[str, Path], tmp_path: Path
) -> None:
    for options, count in ((["--split", "test"], 2), ([], 12)):
        assert run(places, tmp_path / "run.trec", "--queries", str(places["queries"].parent), *options) == 0
        assert len(read_trec_run(tmp_path / "run.trec")) == count


def test_an_index_file_is_written_once_and_searched_again(places: dict[str, Path], tmp_path: Path) -> None:
    options = ["--index", "IVF4,Flat", "--index_parameters", "nprobe=2", "--index_file", str(tmp_path / "ivf.faiss")]
    for name in ("first", "second"):
        assert run(places, tmp_path / f"{name}.trec", "--top_k", "5", *options) == 0
    assert (tmp_path / "first.trec").read_text() == (tmp_path / "second.trec").read_text()
    record = json.loads((tmp_path / "second.json").read_text())
    assert record["search"]["recall"]["queries"] == 12 and 0 < record["search"]["recall"]["recall@5"] <= 1
    assert record["search"]["index_parameters"] == "nprobe=2"


@pytest.mark.parametrize(
    ("options", "model", "words"),
    [
        ([], "other", "was encoded by another model"),
        ([], None, "name a MODEL"),
        (["--output", "run.json"], "encoder", "end its name in .trec"),
        (["--top_k", "0"], "encoder", "--top_k: must be at least 1"),
        (["--index", "IVF1000,Flat"], "encoder", "needs 1000 vectors"),
        (["--index_file", "x.faiss"], "encoder", "leave --index_file out"),
        (["--store", "nowhere"], "encoder", "not a store"),
        (["--index_parameter", "nprobe=2"], "encoder", "did you mean '--index_parameters'"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(
    places: dict[str, Path], tmp_path: Path, capsys: Any, options: list[str], model: str | None, words: str
) -> None:
    assert run(places, tmp_path / "run.trec", *options, model=model) == 2
    # What loading a model says goes there too.
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("contaccum: error") and words in error
    assert not (tmp_path / "run.trec").exists()
