"""`contaccum evaluate`: records with all they depend on, one table, nothing done twice, comparisons, early refusals."""

import json
import shutil
from pathlib import Path

import pytest
from huggingface_hub import EvalResult, ModelCard
from small_data import write_judged_places

from contaccum import DualEncoder
from contaccum.cli import main
from contaccum.data import CQADUPSTACK_FORUMS, load_beir_folder
from contaccum.evaluation import beir_sets
from contaccum.evaluation.results import read_result
from contaccum.files import package_versions
from contaccum.retrieval.encode import model_fingerprint


@pytest.fixture
def evaluate(tiny_model_path, tmp_path):
    def run(*argv: str, output: str = "out.json") -> int:
        model = [] if "--run" in argv else [tiny_model_path, "--device", "cpu", "--no_progress"]
        return main(["evaluate", *model, "--output", str(tmp_path / output), *argv])

    return run


@pytest.fixture
def two(tmp_path):
    return [str(write_judged_places(tmp_path / name)) for name in ("one", "two")]


def test_the_record_of_one_set_names_everything_it_depends_on(
    evaluate, two, tmp_path, tiny_model_path
):
    assert (
        evaluate(
            "--data",
            two[0],
            "--query_max_length",
            "9",
            "--precision",
            "bfloat16",
            output="new/out.json",
        )
        == 0
    )
    record, data = read_result(tmp_path / "new" / "out.json"), load_beir_folder(two[0])
    about = {"name": "one", "split": "test", "path": two[0], "fingerprint": data.fingerprint}
    assert record["data"] == {**about, "documents": 24, "queries": 6, "judgements": 24}
    fingerprint = model_fingerprint(DualEncoder.from_pretrained(tiny_model_path, device="cpu"))
    model = {
        "name": tiny_model_path,
        "similarity": "cos",
        "dimension": 32,
        "fingerprint": fingerprint,
    }
    assert record["model"] == model
    assert len(record["tokenisation"]) == 64
    assert record["search"] == {"index": "Flat", "index_parameters": None, "k": 1000, "gpus": 0}
    assert (record["precision"], record["versions"]) == ("bfloat16", package_versions())
    assert all(value > 0 for value in record["timing"].values()) and set(
        record["per_query"]
    ) == set(data.qrels)
    assert {path.name for path in (tmp_path / "new").iterdir()} == {
        "out.json",
        "out.md",
        "out.trec",
    }


def test_of_several_sets_what_is_done_is_kept_and_what_differs_is_done_again(
    evaluate, two, tmp_path, capsys
):
    def kept(*argv: str) -> int:
        assert evaluate("--data", *two, *argv) == 0
        return capsys.readouterr().out.count("kept: ")

    assert kept() == 0
    files = {
        f"out.{name}" for name in ("one.json", "one.trec", "two.json", "two.trec", "json", "md")
    }
    assert {path.name for path in tmp_path.glob("out*")} == files
    before = (tmp_path / "out.one.json").read_bytes(), (tmp_path / "out.md").read_bytes()
    assert kept() == 2
    assert before == ((tmp_path / "out.one.json").read_bytes(), (tmp_path / "out.md").read_bytes())
    with Path(two[1], "corpus.jsonl").open("a") as file:
        file.write('{"_id": "new", "title": "", "text": "one new bird"}\n')
    assert kept() == 1
    for changed in (
        ["--passage_max_length", "9"],
        ["--index", "IVF2,Flat"],
        ["--k_values", "10", "1000"],
    ):
        assert (kept(*changed), kept(*changed)) == (0, 2)


def test_cqadupstack_by_name_is_one_row_the_mean_of_its_parts(
    evaluate, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("CONTACCUM_CACHE", str(tmp_path / "cache"))
    for name in (*(f"cqadupstack/{forum}" for forum in CQADUPSTACK_FORUMS), "scifact"):
        write_judged_places(tmp_path / "cache" / "beir" / name)
    assert evaluate("--data", "cqadupstack", "scifact", "--metrics", "NDCG@10", "recall@20") == 0
    summary = json.loads((tmp_path / "out.json").read_text())
    scifact, cqa = summary["sets"]
    values = [read_result(tmp_path / part["file"])["metrics"]["NDCG@10"] for part in cqa["parts"]]
    assert len(values) == 12 and cqa["metrics"]["NDCG@10"] == pytest.approx(sum(values) / 12)
    assert summary["mean"]["NDCG@10"] == pytest.approx(
        (sum(values) / 12 + scifact["metrics"]["NDCG@10"]) / 2
    )
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert lines[0].split()[1::2] == ["data", "split", "queries", "NDCG@10", "Recall@20"]
    assert [line.split()[1] for line in lines[2:]] == ["scifact", "cqadupstack", "mean"]
    assert lines[3].split()[5] == "72" and lines[3] in (tmp_path / "out.md").read_text()


def test_results_are_compared_with_those_before_also_with_the_file_that_is_replaced(
    evaluate, two, tmp_path
):
    evaluate("--data", *two, "--passage_max_length", "5", output="old.json")
    previous = read_result(tmp_path / "old.one.json")["metrics"]["MRR@10"]
    old = [str(tmp_path / name) for name in ("old.one.json", "old.json")]
    assert (
        evaluate(
            "--data", two[0], "--compare", *old, "--metrics", "MRR@10", "P@5", output="old.one.json"
        )
        == 0
    )
    now = read_result(tmp_path / "old.one.json")["metrics"]["MRR@10"]
    first, second = json.loads((tmp_path / "old.one.compare.json").read_text())
    assert first["metric"] == "MRR@10" and first["rows"] == second["rows"]
    assert (first["rows"][0]["ours"], first["rows"][0]["earlier"]) == pytest.approx(
        (now, previous)
    ) and now != previous
    assert "## MRR@10 against" in (tmp_path / "old.one.md").read_text()


def test_served_forms_are_scored_beside_float32_of_all_dimensions(evaluate, two, tmp_path, capsys):
    forms = ["--dims", "32", "16", "--quantize", "float32", "int8", "binary", "--metrics", "MRR@10"]
    for rescore in ("2", "100", "100"):
        assert evaluate("--data", *two, *forms, "--rescore", rescore) == 0
    assert capsys.readouterr().out.count("kept: ") == 2  # the same again, and no other
    record = read_result(tmp_path / "out.one.json")
    first, *others = record["served"]["rows"]
    assert first["MRR@10"] == pytest.approx(record["metrics"]["MRR@10"])
    sizes = [
        (row["dimensions"], row["type"], row["bytes_per_document"]) for row in (first, *others)
    ]
    expected = [
        ("float32", 128),
        ("float32", 64),
        ("int8", 32),
        ("int8", 16),
        ("binary", 4),
        ("binary", 2),
    ]
    assert sizes == [((32, 16)[n % 2], *form) for n, form in enumerate(expected)]
    for row in others:
        assert row["difference"] == pytest.approx(row["MRR@10"] - first["MRR@10"])
        assert row["low"] <= row["difference"] <= row["high"] and row["queries_per_second"] > 0
    assert "## two: as served" in (tmp_path / "out.md").read_text()


def test_a_model_card_gets_the_figures_and_the_command_and_keeps_what_else_it_says(
    tiny_model_path, two, tmp_path
):
    shutil.copytree(tiny_model_path, tmp_path / "mine")
    card = tmp_path / "mine" / "README.md"
    other = {
        "task_type": "t",
        "dataset_type": "d",
        "dataset_name": "d",
        "metric_type": "m",
        "metric_value": 0.5,
    }
    first = ModelCard.load(card)
    first.data.eval_results, first.data.model_name = [EvalResult(**other)], "Mine"
    first.save(card)
    argv = [
        str(tmp_path / "mine"),
        "--device",
        "cpu",
        "--metrics",
        "NDCG@10",
        "--output",
        str(tmp_path / "out.json"),
    ]
    for length in ("5", "9"):
        assert (
            main(["evaluate", *argv, "--data", *two, "--update_card", "--query_max_length", length])
            == 0
        )
    now = ModelCard.load(card)
    values = {
        row["name"]: row["metrics"]["NDCG@10"]
        for row in json.loads((tmp_path / "out.json").read_text())["sets"]
    }
    assert {one.dataset_name: one.metric_value for one in now.data.eval_results} == {
        "d": 0.5,
        **values,
    }
    assert now.data.model_name == "Mine" and now.text.startswith(first.text.rstrip())
    assert now.text.count("contaccum evaluate mine --device") == 1 and "--data one two" in now.text
    assert "| one  |" in now.text and str(tmp_path) not in now.text.removeprefix(
        first.text.rstrip()
    )
    card.unlink()
    assert main(["evaluate", *argv, "--data", *two, "--update_card"]) == 2


def test_a_run_scores_as_the_model_that_made_it(evaluate, two, tmp_path):
    assert evaluate("--data", two[0]) == 0
    assert (
        evaluate("--run", str(tmp_path / "out.trec"), "--data", two[0], output="scored.json") == 0
    )
    of_model, of_run = read_result(tmp_path / "out.json"), read_result(tmp_path / "scored.json")
    assert of_run["metrics"] == of_model["metrics"] and of_run["per_query"] == of_model["per_query"]
    assert (of_run["precision"], of_run["tokenisation"], of_run["search"]) == (
        "unknown",
        None,
        {"k": 1000},
    )


def test_mistakes_are_one_line_and_exit_2_before_anything_is_encoded(
    evaluate, two, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(beir_sets, "score_run", None)
    data, run = ["--data", two[0]], ["--run", str(tmp_path / "run.trec")]
    (tmp_path / "run.trec").write_text("another Q0 cat-tree 1 1.0 x\n")
    (tmp_path / "old.json").write_text(
        json.dumps({"metrics": {}, "per_query": {}, "data": {"name": "x"}})
    )
    with Path(two[1], "corpus.jsonl").open("a") as file:
        file.write("{broken\n")
    for argv, words in (
        ([*data, "--compare", str(tmp_path / "old.json")], "is on other data"),
        (["--data", *two], "two/corpus.jsonl:25"),  # the last set, before the first is encoded
        ([*data, "--output", "out.txt"], "end its name in .json"),
        ([*data, *run, "model"], "name either a MODEL to search with, or a --run to score"),
        ([*data, "--dims", "64"], "--dims 64: the model's embeddings have 32 dimensions"),
        ([*data, "--dims", "12", "--quantize", "binary"], "take a multiple of 8"),
        ([*run, *data, "--quantize", "int8"], "a --run has no embeddings"),
        ([*run, "--data", *two], "--run has the results of one data set"),
        ([*run, *data], "for none of one's judged queries"),
        ([*run, *data, "--output", str(tmp_path / "run.json")], "would replace the --run"),
    ):
        assert evaluate(*argv) == 2
        shown = capsys.readouterr().err.splitlines()  # a bar of loading weights, and the error
        assert words in shown[-1] and "error" not in "".join(shown[:-1]), shown
    assert not list(tmp_path.glob("out*"))
