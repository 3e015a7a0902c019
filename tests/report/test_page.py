"""What stands on the page, and that it can do no harm."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from contaccum.errors import ConfigError, UserError
from contaccum.evaluation.metrics import paired_bootstrap
from contaccum.report.page import build_page

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def page(everything: list[Path]) -> str:
    return build_page(everything)


def rows_of(page: str) -> list[list[str]]:
    """The rows of all tables of a page, as texts."""
    rows = [re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row) for row in re.findall(r"<tr>(.*?)</tr>", page)]
    return [[unescape(cell) for cell in row] for row in rows]


def test_everything_mixes_on_one_page_that_needs_nothing_else(page: str) -> None:
    for title in ("Training", "made (test)", "Comparison compared", "nDCG@10 by update", "drift_cosine_query"):
        assert f">{title}</" in page
    assert page.count("<script>") == page.count("<style>") == 1 and page.count("<svg ") > 20
    assert not re.search(r"<(link|img|image|iframe|object|base|a)\b", page)
    tags = re.sub(r"<script>.*?</script>", "", page, flags=re.S)
    assert not re.search(r"<[^>]* (src|href|on\w+)=", tags) and set(re.findall(r'xlink:href="(.)', page)) <= {"#"}
    (policy,) = re.findall(r'<meta http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    assert policy.startswith("default-src &#39;none&#39;; ") and "script-src &#39;sha256-" in policy
    assert "@import" not in page and set(re.findall(r"url\((.)", page)) == {"#"}  # clip paths


def test_texts_from_files_are_escaped_wherever_they_stand(made: Any) -> None:
    harm = "<script>taken()</script>"
    run = made.training_run("run", bank_dtype=harm, metric_for_best_model=harm)
    (run / "run.json").write_text((run / "run.json").read_text().replace("MiniLM", harm))
    shutil.move(run, run.with_name("x<b>$\\n$"))
    named = made.evaluation(f'x">{harm}', 0.2)
    page = build_page([run.with_name("x<b>$\\n$"), made.evaluation("base"), named], title=harm)
    assert page.count("<script>") == 1 and page.count("taken") > 3 and "<b>$" not in page and "<img" not in page


def test_differences_are_those_of_the_paired_bootstrap(everything: list[Path], page: str) -> None:
    base, tuned = (json.loads(path.read_text())["per_query"] for path in everything[2:4])
    expected = paired_bootstrap([v["NDCG@10"] for v in tuned.values()], [v["NDCG@10"] for v in base.values()])
    rows = rows_of(page)
    (row,) = [row for row in rows if row[0] == "tuned" and row[-3:] == ["14", "5", "1"]]
    assert row[1:3] == [f"{expected.difference:+.4f}", f"{expected.low:+.4f} to {expected.high:+.4f}"]
    listed = [row for row in rows if re.fullmatch(r"q\d+", row[0]) and row[2] == "0.5000"][:15]
    assert (listed[0][0], listed[0][-1]) == ("q0", "+0.2000") and listed[0][1].startswith("<script>")
    assert (listed[-1][0], listed[-1][-1]) == ("q1", "-0.2000")


def test_only_results_on_the_same_data_and_queries_are_compared(made: Any) -> None:
    other, fewer = made.evaluation("other", 0.1, fingerprint="e" * 64), made.evaluation("fewer", 0.1)
    record = json.loads(fewer.read_text())
    del record["per_query"]["q3"]
    fewer.write_text(json.dumps(record))
    page = build_page([made.evaluation("base"), other, fewer])
    assert page.count("<section>") == 2 and "fewer has no scores of the same queries" in page
    assert "against base" not in page


def test_runs_differ_by_their_settings_and_their_best_figure_is_named(everything: list[Path], page: str) -> None:
    rows = rows_of(page)
    assert ["bank_size", "512", "2048"] in rows
    assert not any(row[0] == "learning_rate" for row in rows if len(row) > 2)
    overview = next(row for row in rows if row[0] == "one")
    assert overview[:9] == ["one", "contaccum", "7", "128", "512", "12", "0.2500", "ndcg@10 0.7234", "8"]


def test_a_log_warns_as_its_run_did_and_is_drawn_up_to_where_a_kill_cut_it(made: Any) -> None:
    folder = made.training_run("mine")
    lines = [{"update": n, "loss": 1.0, "columns": 100, "embedding_spread": 1e-6} for n in range(9)]
    lines[4]["skipped"] = "gradient"
    (folder / "train_log.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines) + '{"update": 13, "lo')
    page = build_page([folder])
    assert "mine: update 2: collapse: all passages" in page and "mine: 1 updates were skipped" in page


def test_the_comparison_shows_its_tables_and_notes(page: str) -> None:
    rows = rows_of(page)
    assert ["contaccum", "0.6000", "", "+0.1000", "+0.0500 to +0.1500", "<0.001", "<0.001"] in rows
    assert ["contaccum", "1", "0.500", "", "", "", ""] in rows and "one run saw other pairs" in page


def test_reports_of_the_version_before_are_still_read() -> None:
    path = ROOT / "docs" / "benchmarks" / "quality" / "nqg_k16.json"
    group = json.loads(path.read_text())["groups"]["published"]["metrics"]["test"]["NDCG@10"]
    figures = {f"{group['mean']:.4f}", f"{group['sd']:.4f}"}
    assert any(row[0] == "published" and figures <= set(row) for row in rows_of(build_page([path])))


@pytest.mark.parametrize("what", ["missing", "empty folder", "text file", "other json", "a list", "no figures"])
def test_what_is_nothing_to_report_is_named(made: Any, tmp_path: Path, what: str) -> None:
    path = tmp_path / "thing.json"
    contents = {"text file": "hello", "other json": '{"a": 1}', "a list": "[1]"}
    if what == "empty folder":
        path.mkdir()
    elif what == "no figures":
        path = made.training_run("mine")
        (path / "run.json").write_text('{"arguments": [1, 2]}')
    elif what != "missing":
        path.write_text(contents[what])
    with pytest.raises(UserError, match=re.escape(str(path))):
        build_page([path])


def test_a_metric_that_no_result_has_is_refused(everything: list[Path]) -> None:
    assert "Recall@100 against base" in build_page(everything[2:4], "Recall@100")
    with pytest.raises(ConfigError, match="--metric NDCG@7: no result has it; there are NDCG@10, Recall@100"):
        build_page(everything[2:4], "NDCG@7")


BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --allow-file-access-from-files --dump-dom"
# A page around the report, since the report's own policy lets no other script in.
HARNESS = """<!DOCTYPE html><iframe src="page.html" width="400" height="900"></iframe><pre></pre>
<script>
document.querySelector("iframe").addEventListener("load", (event) => {
  const page = event.target.contentDocument, found = {};
  found.title = page.title;
  const table = page.querySelector("table"), heads = table.querySelectorAll("th");
  const first = () => table.tBodies[0].rows[0].cells[0].textContent;
  heads[6].click(); found.largest = first(); heads[6].click(); found.smallest = first();
  const box = page.querySelector("input[type=search]"), rows = [...box.nextElementSibling.querySelectorAll("tbody tr")];
  box.value = "number 7"; box.dispatchEvent(new Event("input"));
  found.rows = [rows.length, rows.filter((row) => !row.hidden).length];
  page.querySelector(".legend button").click();
  found.hidden = getComputedStyle(page.querySelector(".charts svg g[data-series='0']")).display;
  document.querySelector("pre").textContent = JSON.stringify(found);
});
</script>"""


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no Chromium here (Debian: apt-get install chromium)")
def test_in_a_browser_the_page_sorts_filters_hides_and_lets_no_other_script_in(page: str, tmp_path: Path) -> None:
    slipped = "<script>document.title = 'taken'</script><img src='http://evil.invalid/x.png'></main>"
    (tmp_path / "page.html").write_text(page.replace("</main>", slipped), encoding="utf-8")
    (tmp_path / "harness.html").write_text(HARNESS, encoding="utf-8")
    command = [str(BROWSER), *FLAGS.split(), "--virtual-time-budget=5000", f"--user-data-dir={tmp_path / 'profile'}"]
    command += ["--host-resolver-rules=MAP * ~NOTFOUND", (tmp_path / "harness.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    found = json.loads(unescape(re.findall(r"<pre>(.*?)</pre>", done.stdout, re.S)[0]))
    assert found["title"] == "one, two, base, tuned, compared"
    assert (found["largest"], found["smallest"]) == ("two", "one")
    assert found["rows"] == [15, 1] and found["hidden"] == "none"
