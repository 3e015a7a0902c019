"""`contaccum report`: what it finds out about a path, what stands on the page, and what it refuses."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from contaccum.cli import main
from contaccum.evaluation.significance import paired_bootstrap
from contaccum.reports.command import build_sections
from contaccum.reports.runs import best_figure, warnings_of
from contaccum.reports.sources import read_sources
from contaccum.reports.svg import Line, difference_chart, line_chart


def page_of(paths: list[Path], tmp_path: Path, *more: str) -> str:
    output = tmp_path / "out" / "report.html"
    assert main(["report", *map(str, paths), "--output", str(output), *more]) == 0
    return output.read_text()


class Tags(HTMLParser):
    """Names and attributes of all elements."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.found.append((tag, dict(attrs)))


def test_everything_mixes_on_one_page_that_needs_nothing_else(made: Any, tmp_path: Path) -> None:
    paths = [made.training_run(), made.evaluation("base"), made.evaluation("tuned", 0.2), made.comparison()]
    page = page_of(paths, tmp_path)
    for title in (">Training</h2>", ">made (test)</h2>", ">Comparison compared</h2>"):
        assert title in page
    tags = Tags(page).found
    assert sum(tag == "svg" for tag, _ in tags) > 20 and [tag for tag, _ in tags].count("script") == 1
    for tag, attributes in tags:
        assert tag not in ("link", "img", "iframe", "object", "base")
        assert not {"src", "onerror", "onclick", "onload", "style"} & attributes.keys()
        assert (attributes.get("href") or "#").startswith("#")
    assert "url(" not in page and "@import" not in page


def test_texts_from_files_are_escaped_wherever_they_stand(made: Any, tmp_path: Path) -> None:
    harm = "<script>taken()</script>"
    run = made.training_run("run", bank_dtype=harm)
    (run / "run.json").write_text((run / "run.json").read_text().replace("MiniLM", harm))
    paths = [run, made.evaluation("base"), made.evaluation('x"><script>taken()<', 0.2, versions={harm: harm})]
    page = page_of(paths, tmp_path, "--title", harm)
    assert page.count("<script>") == 1 and "taken()" in page
    assert not re.search(r"<(script|img)[^>]*>\s*taken", page)


def test_differences_are_those_of_the_paired_bootstrap(made: Any) -> None:
    base, tuned = made.evaluation("base"), made.evaluation("tuned", 0.2)
    (section,) = build_sections([base, tuned])
    table = section.blocks[1]
    assert table.title == "NDCG@10 against base"  # type: ignore[union-attr]  # a table
    (row,) = table.rows  # type: ignore[union-attr]
    scores = [[v["NDCG@10"] for v in json.loads(p.read_text())["per_query"].values()] for p in (tuned, base)]
    expected = paired_bootstrap(*scores)
    shown = [cell.text for cell in row]
    assert shown[:2] == ["tuned", f"{expected.difference:+.4f}"]
    assert shown[2] == f"{expected.low:+.4f} to {expected.high:+.4f}"
    assert shown[5:] == ["14", "5", "1"]
    queries = next(block for block in section.blocks if getattr(block, "filtered", False))
    listed = [[cell.text for cell in row] for row in queries.rows]  # type: ignore[union-attr]
    assert listed[0][0] == "q0" and listed[0][1].startswith("<script>") and listed[0][-1] == "+0.2000"
    assert listed[-1][0] == "q1" and listed[-1][-1] == "-0.2000" and len(listed) == 15


def test_only_results_on_the_same_data_and_queries_are_compared(made: Any) -> None:
    other = made.evaluation("other", 0.1, fingerprint="e" * 64)
    fewer = made.evaluation("fewer", 0.1)
    record = json.loads(fewer.read_text())
    del record["per_query"]["q3"]
    fewer.write_text(json.dumps(record))
    sections = build_sections([made.evaluation("base"), other, fewer])
    assert len(sections) == 2
    assert "fewer has no scores of the same queries" in str(sections[0].blocks)
    assert "against" not in str(sections[1].blocks)


def test_summary_of_several_sets_stands_for_its_records(made: Any, tmp_path: Path) -> None:
    names = [made.evaluation("a").name, made.evaluation("b", 0.1, "e" * 64).name]
    summary = tmp_path / "all.json"
    summary.write_text(json.dumps({"sets": [{"name": name, "file": name} for name in names], "mean": {}}))
    assert [source.path.name for source in read_sources([summary])] == names


def test_results_of_open_domain_qa_are_compared_too(made: Any, tmp_path: Path) -> None:
    questions = tmp_path / "nq.jsonl"
    questions.write_text("".join(json.dumps({"question": f"who {n}", "answer": ["x"]}) + "\n" for n in range(2)))
    for name, hits in (("one", (1.0, 0.0)), ("two", (1.0, 1.0))):
        scores = {f"question-{n + 1}": {"Accuracy@20": hit} for n, hit in enumerate(hits)}
        data = {"questions": 2, "questions_fingerprint": "q", "passages": 9, "match": "string", "path": str(questions)}
        record = {"metrics": {"Accuracy@20": sum(hits) / 2}, "per_query": scores, "data": data}
        (tmp_path / f"{name}.json").write_text(json.dumps(record))
    (section,) = build_sections([tmp_path / "one.json", tmp_path / "two.json"])
    assert section.intro == "2 questions, 9 passages"
    assert "Accuracy@20 against one" in str(section.blocks) and "who 1" in str(section.blocks)


def test_runs_are_told_apart_by_what_differs(made: Any, tmp_path: Path) -> None:
    paths = [made.training_run("one"), made.training_run("two", offset=0.01, bank_size=2048)]
    (section,) = build_sections(paths)
    differing = next(b for b in section.blocks if getattr(b, "title", "") == "What differs between the runs")
    assert [[cell.text for cell in row] for row in differing.rows] == [["bank_size", "512", "2048"]]  # type: ignore[union-attr]
    (one, _) = read_sources(paths)
    assert best_figure(one) == ("ndcg@10", 0.7234, 8)  # type: ignore[arg-type]  # a training run
    page = page_of(paths, tmp_path)
    assert "ndcg@10 0.7234" in page and "a sample of 900 of 5,183 documents" in page and "c0ffee" in page
    for title in ("Cosine then and now", "Shift of the towers", "Drift beside the shift", "Age of the oldest", "Loss"):
        assert title in page
    assert "banked, 2+ updates old" in page


def test_warnings_of_a_log_are_those_of_the_run() -> None:
    log: list[dict[str, Any]] = [{"update": n, "loss": 1.0, "columns": 100, "embedding_spread": 1e-6} for n in range(9)]
    log[4]["skipped"] = "gradient"
    collapse, skipped = warnings_of(log)
    assert collapse.startswith("update 2: collapse: all passages") and skipped.startswith("1 updates were skipped")


def test_a_log_that_a_kill_cut_short_is_drawn_up_to_there(made: Any) -> None:
    folder = made.training_run()
    with open(folder / "train_log.jsonl", "a") as file:
        file.write('{"update": 13, "lo')
    (run,) = read_sources([folder])
    assert len(run.log) == 12  # type: ignore[union-attr]  # a training run


def test_lines_are_where_their_numbers_are() -> None:
    svg = line_chart([Line("a", [(0, 0.0), (10, 1.0)]), Line("b", [(0, 1.0), (10, 0.0)], 1)], "x")
    paths = re.findall(r'<path d="M([\d.]+) ([\d.]+)L([\d.]+) ([\d.]+)"', svg)
    (x0, y0, x1, y1), (_, z0, _, z1) = [tuple(map(float, path)) for path in paths]
    assert x0 == 54 and x1 == 408 and y0 == z1 > y1 == z0 and y0 == 196.0  # SVG counts from the top
    assert "<title>a: 1 at update 10</title>" in svg
    thousand = line_chart([Line("a", [(n, n % 2) for n in range(1000)])], "x")
    assert thousand.count("L") == 333  # means of three, since more would not be seen
    bars = difference_chart([0.5, 0.0, -0.2, 0.1], "x")
    assert bars.count("Z") == 3 and 'class="bar gain"' in bars and 'class="bar loss"' in bars


@pytest.mark.parametrize("what", ["missing", "empty folder", "text file", "other json", "a list", "cut", "no figures"])
def test_what_is_nothing_to_report_is_said_in_one_line(
    made: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    path = tmp_path / "thing.json"
    contents = {"text file": "hello", "other json": '{"a": 1}', "a list": "[1]", "cut": '{"metrics": {"NDC'}
    expected = {
        "missing": "no such file or folder",
        "empty folder": "nothing to report in this folder",
        "text file": "damaged, or no JSON",
        "other json": "nothing that can be reported",
        "a list": "holds a list",
        "cut": "damaged, or no JSON",
        "no figures": "damaged: it does not hold what contaccum writes",
    }[what]
    if what == "empty folder":
        path.mkdir()
    elif what == "no figures":
        path = made.training_run()
        (path / "run.json").write_text('{"arguments": [1, 2]}')
    elif what != "missing":
        path.write_text(contents[what])
    output = tmp_path / "report.html"
    assert main(["report", str(path), "--output", str(output)]) == 2
    error = capsys.readouterr().err.strip()
    assert expected in error and str(path) in error and len(error.splitlines()) == 1
    assert not output.exists()


def test_a_metric_that_no_result_has_is_refused(made: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(made.evaluation("base")), "--metric", "NDCG@7"]) == 2
    assert "--metric NDCG@7: no result has it; there are NDCG@10, Recall@100" in capsys.readouterr().err
