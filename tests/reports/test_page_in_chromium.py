"""The page in a real browser: what it shows with its script and without, and that it reaches for nothing."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from contaccum.cli import main

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium here (Debian: apt-get install chromium)")
QUIET = "--disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-component-update"
QUIET += " --disable-sync --disable-dev-shm-usage --no-sandbox --allow-file-access-from-files"

# A page around the report, since the report's own policy lets no other script in.
HARNESS = """<!DOCTYPE html><meta charset="utf-8"><iframe src="%s" width="%d" height="900" %s></iframe><pre></pre>
<script>
const frame = document.querySelector("iframe");
frame.addEventListener("load", () => {
  const page = frame.contentDocument, found = {};
  const texts = (nodes) => [...nodes].map((node) => node.textContent.trim());
  const table = (title) => [...page.querySelectorAll("h3")].find((h) => h.textContent === title)
    .nextElementSibling.querySelector("table");
  try { %s } catch (error) { found.error = String(error); }
  document.querySelector("pre").textContent = JSON.stringify(found);
});
</script>"""


class Seen(NamedTuple):
    """What the script of the harness found, what the console said, and which addresses were asked for."""

    found: dict[str, Any]
    console: list[str]
    addresses: list[str]


def look(page: Path, script: str, width: int = 1280, sandbox: str = "") -> Seen:
    folder = page.parent / "browser"
    harness, net = page.parent / "harness.html", page.parent / "net.json"
    harness.write_text(HARNESS % (page.as_uri(), width, sandbox, script), encoding="utf-8")
    command = [str(BROWSER), "--headless", *QUIET.split(), f"--user-data-dir={folder}", f"--log-net-log={net}"]
    command += ["--host-resolver-rules=MAP * ~NOTFOUND", "--enable-logging=stderr", "--dump-dom", harness.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    shutil.rmtree(folder, ignore_errors=True)
    found = json.loads(unescape(re.findall(r"<pre>(.*?)</pre>", done.stdout, re.S)[0]))
    asked = re.findall(r'"url":"(https?://[^/"]+)', net.read_text(encoding="utf-8"))
    # What the browser asks its maker for, whatever page it shows.
    addresses = [one for one in asked if not re.search(r"\.(google|googleapis|gstatic)\.com(:\d+)?$", one)]
    return Seen(found, [line for line in done.stderr.splitlines() if "CONSOLE" in line], addresses)


@pytest.fixture
def report(made: Any, tmp_path: Path) -> Path:
    paths = [made.training_run("one"), made.training_run("two", offset=0.05, bank_size=2048)]
    paths += [made.evaluation("base"), made.evaluation("tuned", 0.2), made.comparison()]
    output = tmp_path / "report.html"
    assert main(["report", *map(str, paths), "--output", str(output)]) == 0
    return output


def test_page_shows_its_numbers_and_curves_sorts_hides_and_filters(report: Path) -> None:
    seen = look(
        report,
        """
        found.title = page.title;
        found.heads = texts(page.querySelectorAll("h2"));
        const overview = page.querySelector("table");
        found.best = texts(overview.querySelectorAll("tbody tr")).map((row) => row.match(/ndcg@10 \\d.\\d{4}/)[0]);
        found.against = texts(table("NDCG@10 against base").querySelectorAll("tbody td"));
        const loss = [...page.querySelectorAll("figure")].find((f) => f.textContent.includes("Loss"));
        found.curves = loss.querySelectorAll("g.line").length;
        found.charts = page.querySelectorAll("#section-1 svg").length;
        found.width = loss.getBoundingClientRect().width;
        found.harm = [...page.querySelectorAll("td")].filter((td) => td.textContent.startsWith("<script>")).length;
        found.images = page.querySelectorAll("img").length;
        const head = overview.querySelectorAll("th button")[6];
        head.click();
        found.down = texts(overview.querySelectorAll("tbody td:first-child"));
        head.click();
        found.up = texts(overview.querySelectorAll("tbody td:first-child"));
        const button = loss.closest(".charts-block").querySelector("button[data-series='0']");
        button.click();
        found.left = [...loss.querySelectorAll("g.line")].filter((g) => getComputedStyle(g).display !== "none").length;
        const box = page.querySelector("input[type=search]");
        const rows = box.parentElement.querySelectorAll("tbody tr");
        found.rows = rows.length;
        box.value = "number 7";
        box.dispatchEvent(new Event("input"));
        found.filtered = [...rows].filter((row) => !row.hidden).length;
        """,
    )
    found = seen.found
    assert "error" not in found and seen.console == [] and seen.addresses == []
    assert found["title"] == "one, two, base, tuned, compared"
    assert found["heads"] == ["Training", "made (test)", "Comparison compared"]
    assert found["best"] == ["ndcg@10 0.7234", "ndcg@10 0.7734"]
    assert found["against"][:2] == ["tuned", "+0.0260"] and found["against"][-3:] == ["14", "5", "1"]
    assert found["curves"] == 2 and found["left"] == 1
    assert found["charts"] == 17 and 300 < found["width"] < 420  # a figure, 14 panels and two of masses; three a row
    assert found["harm"] == 2 and found["images"] == 0  # as text, beside both comparisons
    assert found["down"] == ["two", "one"] and found["up"] == ["one", "two"]
    assert found["rows"] == 15 and found["filtered"] == 1


def test_page_is_whole_without_its_script_and_fits_a_telephone(report: Path) -> None:
    # A frame without leave to run scripts.
    seen = look(
        report,
        """
        found.tables = page.querySelectorAll("table").length;
        found.legend = texts(page.querySelectorAll(".legend button")).slice(0, 2);
        found.first = texts(page.querySelector("tbody").rows[0].cells)[0];
        found.curves = page.querySelectorAll("g.line").length;
        found.overflow = page.documentElement.scrollWidth - page.documentElement.clientWidth;
        found.live = page.body.classList.contains("live");
        """,
        width=400,
        sandbox='sandbox="allow-same-origin"',
    )
    found = seen.found
    assert "error" not in found and found["live"] is False and seen.addresses == []
    assert found["tables"] >= 6 and found["legend"] == ["one", "two"] and found["first"] == "one"
    assert found["curves"] > 30 and found["overflow"] == 0


def test_a_text_that_slipped_through_could_not_run_or_load_anything(report: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.html"
    inside = "<script>document.title = 'taken'</script><img src='http://evil.invalid/x.png'></main>"
    broken.write_text(report.read_text().replace("</main>", inside))
    seen = look(broken, "found.title = page.title; found.images = page.querySelectorAll('img').length;")
    assert seen.found == {"title": "one, two, base, tuned, compared", "images": 1}
    assert seen.addresses == [] and any("Content Security Policy" in line for line in seen.console)


def test_the_net_log_would_show_a_request(report: Path, tmp_path: Path) -> None:
    open_page = tmp_path / "open.html"
    page = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", report.read_text())
    open_page.write_text(page.replace("</main>", "<img src='http://evil.invalid/x.png'></main>"))
    assert set(look(open_page, "found.ok = 1;").addresses) == {"http://evil.invalid"}
