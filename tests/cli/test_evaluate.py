"""`contaccum evaluate`: records with all they depend on, one table, nothing done twice, comparisons, early refusals."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from beir_folders import write_beir_folder

from contaccum import DualEncoder
from contaccum.cli import main
from contaccum.data import CQADUPSTACK_FORUMS, load_beir_folder
from contaccum.evaluation import beir
from contaccum.evaluation.results import read_result
from contaccum.files import package_versions
from contaccum.retrieval.encode import model_fingerprint

Evaluate = Callable[..., int]


@pytest.fixture
def evaluated(monkeypatch):
    """The names of the sets that were encoded, in order."""
    done: list[str] = []
    original = beir.evaluate_beir

    def counted(model: Any, dataset: Any, *args: Any, **settings: Any) -> Any:
        done.append(dataset.name)
        return original(model, dataset, *args, **settings)

    monkeypatch.setattr(beir, "evaluate_beir", counted)
    return done


@pytest.fixture
def evaluate(tiny_model_path, tmp_path):
    def run(*argv: str, output: str = "out.json", model: str = tiny_model_path) -> int:
        return main(["evaluate", model, "--output", str(tmp_path / output), "--device", "cpu", "--no_progress", *argv])

    return run


@pytest.fixture
def two(tmp_path):
    return [str(write_beir_folder(tmp_path / name)) for name in ("one", "two")]


def test_the_record_of_one_set_names_everything_it_depends_on(evaluate, two, tmp_path, tiny_model_path):
    assert evaluate("--data", two[0], "--query_max_length", "9", "--precision", "bfloat16", output="new/out.json") == 0
    record, data = read_result(tmp_path / "new" / "out.json"), load_beir_folder(two[0])
    counts = {"documents": 24, "queries": 6, "judgements": 24}
    names = {"name": "one", "split": "test", "path": two[0], "fingerprint": data.fingerprint}
    assert record["data"] == {**names, **counts}
    fingerprint = model_fingerprint(DualEncoder.from_pretrained(tiny_model_path, device="cpu"))
    about = {"name": tiny_model_path, "similarity": "cos", "dimension": 32, "fingerprint": fingerprint}
    assert record["model"] == about
    lengths = {"query_max_length": 9, "document_max_length": 40, "pooling": "mean", "normalize": True}
    assert lengths.items() <= record["tokenisation"].items()
    assert record["search"] == {"index": "Flat", "index_parameters": None, "k": 1000, "gpus": 0}
    assert (record["precision"], record["versions"]) == ("bfloat16", package_versions())
    assert all(value > 0 for value in record["timing"].values()) and set(record["per_query"]) == set(data.qrels)
    assert {path.name for path in (tmp_path / "new").iterdir()} == {"out.json", "out.trec"}


def test_what_is_done_is_not_done_again_and_what_differs_is(evaluate, evaluated, two, tmp_path, capsys):
    assert evaluate("--data", *two) == 0
    first = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert first == ["data", "one", "two", "mean", "written:"]
    files = {f"out.{name}" for name in ("one.json", "one.trec", "two.json", "two.trec", "json", "md", "csv")}
    assert {path.name for path in tmp_path.glob("out*")} == files
    before = (tmp_path / "out.one.json").read_bytes(), (tmp_path / "out.csv").read_bytes()
    assert evaluate("--data", *two) == 0
    shown = capsys.readouterr().out
    assert evaluated == ["one", "two"] and shown.count("kept: ") == 2 and "same model, data and settings" in shown
    assert before == ((tmp_path / "out.one.json").read_bytes(), (tmp_path / "out.csv").read_bytes())

    with Path(two[1], "corpus.jsonl").open("a") as file:
        file.write('{"_id": "new", "title": "", "text": "one new bird"}\n')
    assert evaluate("--data", *two) == 0
    assert evaluated[2:] == ["two"] and "done again: " in (shown := capsys.readouterr().out)
    assert "out.two.json (it had other data fingerprint)" in shown
    assert evaluate("--data", *two, "--passage_max_length", "9", "--index", "IVF2,Flat") == 0
    assert evaluate("--data", *two, "--passage_max_length", "9", "--index", "IVF2,Flat") == 0  # nprobe is by default
    assert evaluated[3:] == ["one", "two"]
    why = "tokenisation document_max_length, search index, search index_parameters)"
    assert capsys.readouterr().out.count(why) == 2
    for _ in range(2):  # a single set is always done again
        assert evaluate("--data", two[0]) == 0
    assert evaluated[5:] == ["one", "one"]


def test_cqadupstack_by_name_is_one_row_and_published_figures_stand_beside(evaluate, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CONTACCUM_CACHE", str(tmp_path / "cache"))
    for name in (*(f"cqadupstack/{forum}" for forum in CQADUPSTACK_FORUMS), "scifact"):
        write_beir_folder(tmp_path / "cache" / "beir" / name)
    assert evaluate("--data", "cqadupstack", "scifact", "--metrics", "NDCG@10", "recall@20") == 0
    summary = json.loads((tmp_path / "out.json").read_text())
    cqa, scifact = summary["sets"]
    values = [read_result(tmp_path / part["file"])["metrics"]["NDCG@10"] for part in cqa["parts"]]
    assert len(values) == 12 and cqa["metrics"]["NDCG@10"] == pytest.approx(sum(values) / 12)
    assert summary["mean"]["NDCG@10"] == pytest.approx((sum(values) / 12 + scifact["metrics"]["NDCG@10"]) / 2)
    assert summary["model"]["fingerprint"] and summary["shown"] == ["NDCG@10", "Recall@20"]
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line]
    assert lines[0] == ["data", "split", "queries", "NDCG@10", "Recall@20"]
    assert [line[0] for line in lines[1:4]] == ["cqadupstack", "scifact", "mean"]
    assert ["scifact*", "0.6789"] in [[line[0], line[2]] for line in lines if len(line) > 6]
    assert [row["data"] for row in csv.DictReader((tmp_path / "out.csv").open())] == ["cqadupstack", "scifact", "mean"]
    assert "| cqadupstack | test | 72 |" in (tmp_path / "out.md").read_text()


def test_results_are_compared_with_those_before_also_with_the_file_that_is_replaced(evaluate, two, tmp_path, capsys):
    evaluate("--data", *two, "--passage_max_length", "5", output="old.json")
    previous = read_result(tmp_path / "old.one.json")
    old = [str(tmp_path / name) for name in ("old.one.json", "old.json")]
    assert evaluate("--data", two[0], "--compare", *old, "--metrics", "MRR@10", "P@5", output="old.one.json") == 0
    now = read_result(tmp_path / "old.one.json")
    first, second = json.loads((tmp_path / "old.one.compare.json").read_text())
    assert first["metric"] == "MRR@10" and first["rows"] == second["rows"]
    assert first["rows"][0]["earlier"] == pytest.approx(previous["metrics"]["MRR@10"])
    assert first["rows"][0]["ours"] == pytest.approx(now["metrics"]["MRR@10"]) != first["rows"][0]["earlier"]
    assert "MRR@10 against" in capsys.readouterr().out
    assert "## MRR@10 against" in (tmp_path / "old.one.md").read_text()


def test_a_run_scores_as_the_model_that_made_it(evaluate, two, tmp_path, capsys):
    assert evaluate("--data", two[0]) == 0
    line = ["evaluate", "--run", str(tmp_path / "out.trec"), "--data", two[0]]
    line += ["--output", str(tmp_path / "scored.json")]
    assert main([*line, "--compare", str(tmp_path / "out.json")]) == 0
    of_model, of_run = read_result(tmp_path / "out.json"), read_result(tmp_path / "scored.json")
    assert of_run["metrics"] == of_model["metrics"] and of_run["per_query"] == of_model["per_query"]
    assert (of_run["precision"], of_run["tokenisation"], of_run["search"]) == ("unknown", None, {"k": 1000})
    rows = [row for row in (tmp_path / "out.trec").read_text().splitlines() if not row.startswith("q0 ")]
    (tmp_path / "out.trec").write_text("\n".join([*rows, "unjudged Q0 cat-tree 1 1.0 x"]) + "\n")
    capsys.readouterr()
    assert main(line) == 0
    assert "1 of 6 judged queries have no results" in capsys.readouterr().out


def test_mistakes_are_one_line_and_exit_2_before_anything_is_encoded(evaluate, evaluated, two, tmp_path, capsys):
    data, run = ["--data", two[0]], ["--run", str(tmp_path / "run.trec")]
    (tmp_path / "run.trec").write_text("another Q0 cat-tree 1 1.0 x\n")
    (tmp_path / "old.json").write_text(json.dumps({"metrics": {}, "per_query": {}, "data": {"name": "x"}}))
    with Path(two[1], "corpus.jsonl").open("a") as file:
        file.write("{broken\n")
    for argv, words in (
        ([*data, "--index", "IVF64,Flat"], "64"),
        ([*data, "--metrics", "nDCG@7"], "nDCG@7 is not computed with k_values"),
        ([*data, "--compare", str(tmp_path / "old.json")], "is on other data"),
        ([*data, "--query_max_length", "2"], "query_max_length=2"),
        ([*data, "--split", "dev"], "no split 'dev'"),
        ([*data, "--indx", "Flat"], "did you mean '--index'"),
        ([*data, "--device", "tpu7"], "'tpu7'"),
        (["--data", *two], "two/corpus.jsonl:25"),  # the last set, before the first is encoded
        ([*data, "--output", "out.txt"], "end its name in .json"),
        ([*data, "--output", str(tmp_path / "run.trec" / "out.json")], "cannot be written"),
        ([*data, *run], "one of the two"),
        ([*run, "--data", *two], "--run is of one set"),
        ([*run, *data], "for none of one's judged queries"),
        ([*run, *data, "--output", str(tmp_path / "run.json")], "would replace the run itself"),
    ):
        if run[0] in argv and "one of the two" not in words:
            assert main(["evaluate", "--output", str(tmp_path / "out.json"), *argv]) == 2
        else:
            assert evaluate(*argv) == 2
        shown = capsys.readouterr().err.splitlines()  # a bar of loading weights, and the error
        assert words in shown[-1] and "error" not in "".join(shown[:-1]), shown
    assert evaluate(*data, model="./no/such/model") == 2 and "no/such/model" in capsys.readouterr().err
    assert evaluated == [] and not list(tmp_path.glob("out*"))
