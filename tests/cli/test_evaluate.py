"""`contaccum evaluate`: records, tables, reuse of results, comparisons."""

import json
import shutil
from pathlib import Path

import pytest
from sample_texts import sentences
from small_data import write_beir, write_judged_places

from contaccum import DualEncoder
from contaccum.cli import main
from contaccum.data import CQADUPSTACK_PARTS, load_beir_folder
from contaccum.evaluation.results import read_result
from contaccum.files import provenance
from contaccum.retrieval.encode import model_fingerprint


@pytest.fixture
def evaluate(tiny_model_path, tmp_path):
    def run(*argv: str, model: object = tiny_model_path, output: str = "out.json") -> int:
        options = [str(model), "--device", "cpu", "--no_progress"]
        if "--run" in argv:
            options = []
        return main(["evaluate", *options, "--output", str(tmp_path / output), *argv])

    return run


@pytest.fixture
def two(tmp_path):
    return [str(write_judged_places(tmp_path / name)) for name in ("one", "two")]


def add_document(folder: str) -> None:
    with Path(folder, "corpus.jsonl").open("a") as file:
        file.write('{"_id": "new", "title": "", "text": "one new bird"}\n')


def test_bars_do_not_stay_in_the_terminal(two, tmp_path, tiny_model_path, capsys):
    argv = ["evaluate", tiny_model_path, "--device", "cpu", "--data", two[0]]
    assert main([*argv, "--output", str(tmp_path / "out.json")]) == 0
    *bars, blanks, rest = capsys.readouterr().err.split("\r")
    assert any(bar.startswith("Searching") for bar in bars)
    assert blanks.isspace()
    assert rest == ""


def test_record_describes_data_model_and_search(evaluate, two, tmp_path, tiny_model_path):
    argv = ["--data", two[0], "--query_max_length", "9", "--precision", "bfloat16"]
    assert evaluate(*argv, output="new/out.json") == 0
    record = read_result(tmp_path / "new" / "out.json")
    data = load_beir_folder(two[0])
    assert record["data"] == {
        "name": "one",
        "split": "test",
        "path": two[0],
        "fingerprint": data.fingerprint,
        "documents": 24,
        "queries": 6,
        "judgements": 24,
    }
    fingerprint = model_fingerprint(DualEncoder.from_pretrained(tiny_model_path, device="cpu"))
    assert record["model"] == {
        "name": tiny_model_path,
        "similarity": "cos",
        "dimension": 32,
        "fingerprint": fingerprint,
    }
    assert len(record["tokenisation"]) == 64
    assert record["search"] == {"index": "Flat", "index_parameters": None, "k": 1000, "gpus": 0}
    assert record["precision"] == "bfloat16"
    assert record["versions"] == provenance()["versions"]
    assert set(record["per_query"]) == set(data.qrels)
    written = {path.name for path in (tmp_path / "new").iterdir()}
    assert written == {"out.json", "out.md", "out.trec"}


def test_results_are_kept_unless_something_changed_or_is_damaged(
    evaluate, two, tiny_model_path, tmp_path, capsys
):
    def count_kept_results(*argv: str, **options: object) -> int:
        assert evaluate("--data", *two, *argv, **options) == 0
        return capsys.readouterr().out.count("kept: ")

    assert count_kept_results() == 0
    suffixes = ("one.json", "one.trec", "two.json", "two.trec", "json", "md")
    expected_files = {f"out.{suffix}" for suffix in suffixes}
    assert {path.name for path in tmp_path.glob("out*")} == expected_files
    record = (tmp_path / "out.one.json").read_bytes()
    page = (tmp_path / "out.md").read_bytes()
    assert count_kept_results() == 2
    assert (tmp_path / "out.one.json").read_bytes() == record
    assert (tmp_path / "out.md").read_bytes() == page
    add_document(two[1])
    assert count_kept_results() == 1
    for changed in (
        ["--passage_max_length", "9"],
        ["--index", "IVF2,Flat"],
        ["--metrics", "NDCG@7"],
    ):
        assert count_kept_results(*changed) == 0
        assert count_kept_results(*changed) == 2
    assert count_kept_results() == 0
    copy = shutil.copytree(tiny_model_path, tmp_path / "copy")
    assert count_kept_results(model=copy) == 0
    damaged = json.loads((tmp_path / "out.one.json").read_text())
    damaged["per_query"] = dict.fromkeys(damaged["per_query"])
    for text in (json.dumps(damaged), '{"search": ', "[]"):
        (tmp_path / "out.one.json").write_text(text)
        assert count_kept_results(model=copy) == 1


def test_cqadupstack_is_one_row_with_the_mean_of_its_parts(evaluate, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CONTACCUM_CACHE", str(tmp_path / "cache"))
    for name in (*CQADUPSTACK_PARTS, "scifact"):
        write_judged_places(tmp_path / "cache" / "beir" / name)
    assert evaluate("--data", "cqadupstack", "scifact", "--metrics", "NDCG@10", "recall@20") == 0
    summary = json.loads((tmp_path / "out.json").read_text())
    scifact, cqa = summary["sets"]
    values = [read_result(tmp_path / part["file"])["metrics"]["NDCG@10"] for part in cqa["parts"]]
    assert len(values) == 12
    mean = sum(values) / 12
    assert cqa["metrics"]["NDCG@10"] == pytest.approx(mean)
    expected = (mean + scifact["metrics"]["NDCG@10"]) / 2
    assert summary["mean"]["NDCG@10"] == pytest.approx(expected)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert lines[0].split()[1::2] == ["data", "split", "queries", "NDCG@10", "Recall@20"]
    assert [line.split()[1] for line in lines[2:]] == ["scifact", "cqadupstack", "mean"]
    assert lines[3].split()[5] == "72"
    assert lines[3] in (tmp_path / "out.md").read_text()


@pytest.mark.parametrize("baseline", ["old.one.json", "old.json"])
def test_a_result_is_compared_with_an_earlier_one(evaluate, two, tmp_path, baseline):
    """The earlier result is a table, or in the file that the new result replaces."""
    evaluate("--data", *two, "--passage_max_length", "5", output="old.json")
    previous = read_result(tmp_path / "old.one.json")["metrics"]["MRR@10"]
    argv = ["--data", two[0], "--baseline", str(tmp_path / baseline), "--metrics", "MRR@10", "P@5"]
    assert evaluate(*argv, output="old.one.json") == 0
    current = read_result(tmp_path / "old.one.json")["metrics"]["MRR@10"]
    comparison = json.loads((tmp_path / "old.one.compare.json").read_text())
    assert comparison["metric"] == "MRR@10"
    assert comparison["rows"][0]["ours"] == pytest.approx(current)
    assert comparison["rows"][0]["earlier"] == pytest.approx(previous)
    assert comparison["rows"][0]["p_holm"] == comparison["rows"][0]["p_value"]
    assert current != previous
    assert "## MRR@10 against" in (tmp_path / "old.one.md").read_text()


def test_a_baseline_of_other_data_or_queries_is_refused_in_one_line(
    evaluate, two, tmp_path, capsys
):
    assert evaluate("--data", two[0], output="old.json") == 0
    capsys.readouterr()
    record = read_result(tmp_path / "old.json")
    for _ in range(2):  # without a query, and with another corpus
        record["per_query"].popitem()
        (tmp_path / "old.json").write_text(json.dumps(record))
        assert evaluate("--data", two[0], "--baseline", str(tmp_path / "old.json")) == 2
        *_, error = capsys.readouterr().err.splitlines()
        assert error.startswith("contaccum: error: ")
        assert "is on other data or queries than one" in error
        assert not (tmp_path / "out.json").exists()
        add_document(two[0])


def test_require_decides_the_exit_code_by_a_test_on_every_set(evaluate, tmp_path, capsys):
    """In the mixed baseline, all scores of the first set are 0, and all of the second are 1."""
    sets = []
    for number, name in enumerate(("one", "two")):
        documents = {f"d{row}": ("", text) for row, text in enumerate(sentences(12, number))}
        queries = {f"q{row}": text for row, text in enumerate(sentences(12, number + 2))}
        qrels = [(f"q{row}", f"d{row}", 1) for row in range(12)]
        sets.append(str(write_beir(tmp_path / name, documents, queries, qrels, "test")))
    for output in ("same.json", "mixed.json"):
        assert evaluate("--data", *sets, output=output) == 0
    for name, score in (("one", 0.0), ("two", 1.0)):
        record = read_result(tmp_path / f"mixed.{name}.json")
        scores = dict.fromkeys(record["metrics"], score)
        record["per_query"] = dict.fromkeys(record["per_query"], scores)
        (tmp_path / f"mixed.{name}.json").write_text(json.dumps(record))
    for name, requirement, exit_code, titles in (
        ("same", "not-worse", 0, ["NOT WORSE", "NOT WORSE"]),
        ("same", "better", 1, ["NOT BETTER", "NOT BETTER"]),
        ("mixed", "not-worse", 1, ["NOT WORSE", "WORSE"]),
        ("mixed", "better", 1, ["BETTER", "NOT BETTER"]),
    ):
        options = ["--baseline", str(tmp_path / f"{name}.json"), "--require", requirement]
        assert evaluate("--data", *sets, *options) == exit_code
        lines = capsys.readouterr().out.splitlines()[-2:]
        assert [line.partition(":")[0] for line in lines] == titles
        assert lines[0].endswith(f"; baseline {tmp_path}/{name}.json")
    assert ": nDCG@10 1.000 -> " in lines[1]
    better = ["--baseline", str(tmp_path / "mixed.one.json"), "--require", "better"]
    assert evaluate("--data", sets[0], *better) == 0


def test_records_that_are_left_out_of_data_and_of_a_run_are_counted(
    evaluate, two, tmp_path, caplog
):
    with Path(two[0], "corpus.jsonl").open("a") as file:
        file.write('{"_id": "new"}\n')
    run = tmp_path / "run.trec"
    run.write_text("q0 Q0 cat-tree 1 0.5 x\nq0 Q0 dog-tree\n")
    options = ["--run", str(run), "--data", two[0], "--on_bad_record", "skip"]
    assert evaluate(*options) == 0
    messages = [message for message in caplog.messages if "1 left out" in message]
    assert len(messages) == 2
    assert f"1 missing text; first: {two[0]}/corpus.jsonl:25" in messages[0]
    assert f"first: {run}:2" in messages[1]


def test_a_run_has_the_scores_of_the_model_that_made_it(evaluate, two, tmp_path):
    assert evaluate("--data", two[0]) == 0
    run = str(tmp_path / "out.trec")
    assert evaluate("--run", run, "--data", two[0], output="scored.json") == 0
    model_record = read_result(tmp_path / "out.json")
    run_record = read_result(tmp_path / "scored.json")
    assert run_record["metrics"] == model_record["metrics"]
    assert run_record["per_query"] == model_record["per_query"]
    assert run_record["precision"] == "unknown"
    assert run_record["tokenisation"] is None
    assert run_record["search"] == {"k": 1000}
