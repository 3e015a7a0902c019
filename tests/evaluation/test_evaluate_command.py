"""`contaccum evaluate` on several sets: one table, nothing done twice, and comparisons with what was before."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from contaccum.cli import main
from contaccum.data.beir_names import CQADUPSTACK_FORUMS
from contaccum.evaluation import command
from contaccum.evaluation.results import read_result


@pytest.fixture
def evaluated(monkeypatch):
    """The names of the sets that were encoded, in order."""
    done: list[str] = []
    original = command.evaluate_beir

    def counted(model, dataset, **settings):
        done.append(dataset.name)
        return original(model, dataset, **settings)

    monkeypatch.setattr(command, "evaluate_beir", counted)
    return done


@pytest.fixture
def evaluate(tiny_model_path, tmp_path):
    def run(*argv: str, output: str = "out.json", model: str = tiny_model_path) -> int:
        common = ["--output", str(tmp_path / output), "--device", "cpu", "--no_progress", "--batch_size", "64"]
        return main(["evaluate", model, *common, *argv])

    return run


@pytest.fixture
def two(tmp_path, write_beir_folder) -> list[str]:
    return [str(write_beir_folder(tmp_path / name)) for name in ("one", "two")]


def test_what_is_done_is_kept_and_what_differs_is_done_again(evaluate, evaluated, two, tmp_path, capsys):
    assert evaluate("--data", *two) == 0
    assert evaluated == ["one", "two"]
    before = (tmp_path / "out.one.json").read_bytes(), (tmp_path / "out.csv").read_bytes()
    assert evaluate("--data", *two) == 0
    shown = capsys.readouterr().out
    assert evaluated == ["one", "two"] and shown.count("kept: ") == 2 and "same model, data and settings" in shown
    assert before == ((tmp_path / "out.one.json").read_bytes(), (tmp_path / "out.csv").read_bytes())

    with Path(two[1], "corpus.jsonl").open("a") as file:
        file.write('{"_id": "new", "title": "", "text": "one new bird"}\n')
    assert evaluate("--data", *two) == 0
    assert evaluated[2:] == ["two"]
    assert "out.two.json (it had other data)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "what"),
    [
        (("--precision", "bfloat16"), "precision"),
        (("--passage_max_length", "9"), "tokenisation"),
        (("--similarity", "dot"), "similarity"),
        (("--index", "HNSW8"), "index"),
        (("--k_values", "1", "10"), "depth, metrics"),
        (("--k_values", "1", "10", "1000"), "metrics"),
    ],
)
def test_another_setting_is_another_result(evaluate, evaluated, two, capsys, more, what):
    evaluate("--data", *two)
    evaluate("--data", *two, *more)
    evaluate("--data", *two)  # and back
    assert evaluated == ["one", "two"] * 3
    assert capsys.readouterr().out.count(f"(it had other {what})") == 4


def test_other_weights_are_another_result_and_another_path_is_not(
    evaluate, evaluated, two, tiny_model_path, tmp_path, capsys
):
    import torch

    from contaccum import DualEncoder

    evaluate("--data", *two)
    model = DualEncoder.from_pretrained(tiny_model_path, device="cpu")
    model.save_pretrained(str(tmp_path / "copy"))
    evaluate("--data", *two, model=str(tmp_path / "copy"))
    assert evaluated == ["one", "two"]
    with torch.no_grad():
        next(model.parameters())[0, 0] += 1e-3
    model.save_pretrained(str(tmp_path / "other"))
    evaluate("--data", *two, model=str(tmp_path / "other"))
    assert evaluated == ["one", "two"] * 2 and "(it had other model)" in capsys.readouterr().out


@pytest.mark.parametrize("damage", ["{broken", '{"metrics": 1, "per_query": 1, "data": 1}', None])
def test_a_damaged_result_is_done_again(evaluate, evaluated, two, tmp_path, damage):
    evaluate("--data", *two)
    if damage is None:
        (tmp_path / "out.one.trec").unlink()
    else:
        (tmp_path / "out.one.json").write_text(damage)
    assert evaluate("--data", *two) == 0
    assert evaluated == ["one", "two", "one"]
    assert read_result(tmp_path / "out.one.json")["data"]["name"] == "one"


def test_an_approximate_index_is_recognised_with_the_parameters_that_it_was_given_by_default(evaluate, evaluated, two):
    for more in (("--index", "IVF2,Flat"), ("--index", "IVF2,Flat"), ("--index", "IVF2,Flat", "--index_parameters")):
        evaluate("--data", *two, *more, *(("nprobe=2",) if "--index_parameters" in more else ()))
    assert evaluated == ["one", "two"] * 2


def test_one_set_is_always_done_again_and_its_files_are_as_they_were(evaluate, evaluated, two, tmp_path, capsys):
    for _ in range(2):
        assert evaluate("--data", two[0]) == 0
    assert evaluated == ["one", "one"] and f"replaced: {tmp_path / 'out.json'}" in capsys.readouterr().out
    assert {path.name for path in tmp_path.glob("out*")} == {"out.json", "out.trec"}


def test_cqadupstack_by_name_is_one_row_and_published_figures_stand_beside(
    evaluate, tmp_path, write_beir_folder, monkeypatch, capsys
):
    monkeypatch.setenv("CONTACCUM_CACHE", str(tmp_path / "cache"))
    for forum in CQADUPSTACK_FORUMS:
        write_beir_folder(tmp_path / "cache" / "cqadupstack" / forum)
    write_beir_folder(tmp_path / "cache" / "scifact")
    assert evaluate("--data", "cqadupstack", "scifact", "--metrics", "NDCG@10", "Recall@20") == 0
    summary = json.loads((tmp_path / "out.json").read_text())
    cqa, scifact = summary["sets"]
    values = [read_result(tmp_path / part["file"])["metrics"]["NDCG@10"] for part in cqa["parts"]]
    assert len(values) == 12 and cqa["metrics"]["NDCG@10"] == pytest.approx(sum(values) / 12)
    assert summary["mean"]["NDCG@10"] == pytest.approx((sum(values) / 12 + scifact["metrics"]["NDCG@10"]) / 2)
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line]
    assert [line[0] for line in lines[:4]] == ["data", "cqadupstack", "scifact", "mean"]
    assert lines[0] == ["data", "NDCG@10", "Recall@20"]
    assert ["scifact*", "0.6789"] in [[line[0], line[2]] for line in lines if len(line) > 6]
    table = list(csv.DictReader((tmp_path / "out.csv").open()))
    assert [row["data"] for row in table] == ["cqadupstack", "scifact", "mean"]
    assert "| cqadupstack | test | 72 |" in (tmp_path / "out.md").read_text()


def test_ms_marco_is_scored_on_dev_unless_a_split_is_asked_for(evaluate, tmp_path, write_beir_folder):
    folder = write_beir_folder(tmp_path / "msmarco")
    (folder / "qrels" / "dev.tsv").write_text("query-id\tcorpus-id\tscore\nunjudged\tcat-tree\t1\n")
    evaluate("--data", str(folder), output="dev.json")
    evaluate("--data", str(folder), "--split", "test", output="test.json")
    assert [read_result(tmp_path / f"{s}.json")["data"]["split"] for s in ("dev", "test")] == ["dev", "test"]


def test_a_result_is_compared_with_what_its_file_held_before_it_was_replaced(evaluate, two, tmp_path, capsys):
    evaluate("--data", two[0], "--passage_max_length", "5")
    earlier = read_result(tmp_path / "out.json")
    assert evaluate("--data", two[0], "--compare", str(tmp_path / "out.json"), "--metrics", "MRR@10", "P@5") == 0
    now = read_result(tmp_path / "out.json")
    (comparison,) = json.loads((tmp_path / "out.compare.json").read_text())
    (row,) = comparison["rows"]
    assert comparison["metric"] == "MRR@10" and row["earlier"] == pytest.approx(earlier["metrics"]["MRR@10"])
    assert row["ours"] == pytest.approx(now["metrics"]["MRR@10"]) != row["earlier"]
    shown = capsys.readouterr().out
    assert "MRR@10 against" in shown and "greatest" in shown
    assert "## MRR@10 against" in (tmp_path / "out.md").read_text()


def test_several_sets_are_compared_with_an_earlier_summary_and_one_of_its_records(evaluate, two, tmp_path):
    evaluate("--data", *two, "--passage_max_length", "5", output="old.json")
    compare = ("--compare", str(tmp_path / "old.json"), str(tmp_path / "old.two.json"))
    assert evaluate("--data", *two, *compare) == 0
    first, second = json.loads((tmp_path / "out.compare.json").read_text())
    assert [row["data"] for row in first["rows"]] == ["one", "two"]
    assert [row["data"] for row in second["rows"]] == ["two"]
    assert first["rows"][1]["difference"] == second["rows"][0]["difference"]


def test_earlier_results_of_other_data_are_refused_before_anything_is_encoded(
    evaluate, evaluated, two, tmp_path, capsys
):
    evaluate("--data", two[0], output="old.json")
    with Path(two[0], "corpus.jsonl").open("a") as file:
        file.write('{"_id": "new", "title": "", "text": "one new bird"}\n')
    capsys.readouterr()
    assert evaluate("--data", two[0], "--compare", str(tmp_path / "old.json")) == 2
    assert evaluated == ["one"]
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "is on other data: one test" in error


def test_a_run_scores_as_the_model_that_made_it(evaluate, tmp_path, beir_folder, capsys):
    data = ["--data", str(beir_folder)]
    assert evaluate(*data) == 0
    line = ["evaluate", "--run", str(tmp_path / "out.trec"), *data, "--output", str(tmp_path / "scored.json")]
    assert main(line) == 0
    of_model, of_run = read_result(tmp_path / "out.json"), read_result(tmp_path / "scored.json")
    assert of_run["metrics"] == of_model["metrics"] and of_run["per_query"] == of_model["per_query"]
    assert of_run["data"]["fingerprint"] == of_model["data"]["fingerprint"]
    # and so the two can be compared
    assert main([*line[:-1], str(tmp_path / "again.json"), "--compare", str(tmp_path / "out.json")]) == 0

    kept = [row for row in (tmp_path / "out.trec").read_text().splitlines() if not row.startswith("q0 ")]
    (tmp_path / "out.trec").write_text("\n".join([*kept, "unjudged Q0 cat-tree 1 1.0 x"]) + "\n")
    capsys.readouterr()
    assert main(line) == 0
    assert "1 of 6 judged queries have no results" in capsys.readouterr().out
    fewer = read_result(tmp_path / "scored.json")
    assert fewer["per_query"]["q0"]["Recall@100"] == 0.0 and fewer["metrics"]["MAP@10"] < of_model["metrics"]["MAP@10"]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--run", "RUN", "--data", "ONE", "TWO"], "--run is of one set"),
        (["MODEL", "--run", "RUN", "--data", "ONE"], "one of the two"),
        (["--data", "ONE"], "one of the two"),
        (["--run", "RUN", "--data", "ONE"], "none of one's judged queries"),
        (["--run", "RUN", "--data", "ONE", "--output", "RUN.json"], "would replace the run itself"),
    ],
)
def test_a_run_that_cannot_be_scored_is_refused(argv, said, tmp_path, two, capsys):
    run = tmp_path / "run.trec"
    run.write_text("another Q0 cat-tree 1 1.0 x\n")
    names = {"RUN": str(run), "ONE": two[0], "TWO": two[1], "RUN.json": str(tmp_path / "run.json")}
    given = [names.get(word, word) for word in argv]
    if "--output" not in given:
        given += ["--output", str(tmp_path / "out.json")]
    assert main(["evaluate", *given]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out.json").exists() and run.read_text().startswith("another")
