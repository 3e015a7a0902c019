"""eval/compare/measure_fit.py: fits of several data sets, and the tables of benchmarks/."""

import importlib
import json
from types import ModuleType

import pytest
from programs import ROOT, run_program
from sample_texts import sentences
from small_data import write_pairs

from contaccum.data.records import Record
from contaccum.evaluation.results import fill_page

PROGRAM = "eval/compare/measure_fit.py"
PAGE = ROOT / "benchmarks" / "README.md"
TABLES = ("fit", "fit and published results")


@pytest.fixture
def measure_fit(monkeypatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "eval" / "compare"))
    return importlib.import_module("measure_fit")


def test_tables_of_the_page_are_those_of_the_record(measure_fit):
    record = json.loads((ROOT / "benchmarks" / "fit.json").read_text(encoding="utf-8"))
    page = PAGE.read_text(encoding="utf-8")
    assert fill_page(page, measure_fit.make_tables(record)) == page


def test_a_sampled_passage_has_all_its_questions(measure_fit):
    records = [Record(f"q{n}", [f"p{n % 20}"], []) for n in range(60)]
    sampled = measure_fit.sample_passages(records, 30)
    assert 30 <= len(sampled) < 33
    assert {len([r for r in sampled if r.positives == s.positives]) for s in sampled} == {3}


@pytest.mark.long
def test_finished_fits_are_in_the_tables_and_are_not_run_again(
    measure_fit, tiny_model_path, tmp_path, capsys
):
    pairs = write_pairs(tmp_path / "pairs.jsonl", sentences(80, 1), sentences(80, 2, 9))
    work = tmp_path / "work"
    options = ["--model", tiny_model_path, "--budget", "60s", "--seeds", 3, "--work", work]
    options += ["--method=contaccum", "--use_cpu=true", "--learning_rate=0.01", "--max_steps=3"]
    for is_finished in (False, True):
        with pytest.raises(SystemExit) as end:
            run_program(PROGRAM, "run", f"scifact={pairs}", *options)
        assert end.value.code == 0
        assert ("started" in capsys.readouterr().out) is not is_finished

    page = tmp_path / "page.md"
    marks = "<!-- table: {} -->\n<!-- end of table -->\n"
    page.write_text("".join(map(marks.format, TABLES)))
    record_file = tmp_path / "fit.json"
    with pytest.raises(SystemExit) as end:
        run_program(PROGRAM, "table", "--work", work, "--record", record_file, "--page", page)
    assert end.value.code == 0
    record = json.loads(record_file.read_text())
    assert [cell["data"] for cell in record["cells"]] == ["scifact"]
    for cell in record["cells"]:
        assert all("--seed 3" in command for command in cell["commands"])
        assert cell["split"]["settings"]["seed"] == 3
        assert cell["threads"] >= 1
        assert [row["rung"] for row in cell["candidates"]][-1] == 3
        assert cell["candidates"][-1]["updates"] == 3
        assert cell["seconds"]["total"] < cell["budget_seconds"] == 60
        chosen = measure_fit.RUNGS[cell["candidates"][cell["chosen"]]["rung"]]
        assert f"| 1 {chosen} " in page.read_text()
    text = json.dumps(record["cells"])
    assert str(tmp_path) not in text.replace(str(work), "WORK").replace(str(pairs), "PAIRS")
    assert fill_page(page.read_text(), measure_fit.make_tables(record)) == page.read_text()
    scores = record["cells"][0]["scores"]
    for system in ("base", "trained_with_bm25"):
        assert f"| {100 * scores[system]['NDCG@10']:.1f}" in page.read_text()
