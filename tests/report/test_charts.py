"""Panels draw their numbers, as SVG for the page and as one PNG."""

from __future__ import annotations

import re
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.image import imread

from contaccum.report.charts import line_panel, log_panels, save_png, to_svg

RUNS = [[(0, 0.0), (10, 1.0)], [(0, 1.0), (10, 2.0), (20, 9.0)]]


def test_lines_are_means_over_seeds_with_a_band_as_far_as_all_runs_last() -> None:
    axes = Figure().subplots()
    line_panel("x", {"none": [], "a": RUNS, "b": RUNS[:1]}).draw(axes)
    mean, other = axes.lines
    assert mean.get_xydata().tolist() == [[0, 0.5], [10, 1.5]]
    assert (mean.get_color(), other.get_color()) == ("C1", "C2")  # as the page's legend has them
    (band,) = axes.collections
    assert {tuple(point) for point in band.get_paths()[0].vertices} == {(0, 0), (0, 1), (10, 1), (10, 2)}


def test_logs_are_drawn_by_what_they_hold_and_what_is_no_number_is_left_out() -> None:
    log = [{"update": n, "loss": value, "bank_age": None} for n, value in enumerate([3.0, None, 1.0])]
    (panel,) = log_panels({"a": [log]})
    axes = Figure().subplots()
    panel.draw(axes)
    assert panel.title == "loss" and axes.lines[0].get_xydata().tolist() == [[0, 3.0], [2, 1.0]]


def test_svg_has_the_pages_ink_escaped_texts_and_ids_of_its_own() -> None:
    panels = [line_panel(title, {"<a>": RUNS}, unit="$x <b>") for title in ('one "&"', "two")]
    one, two = map(to_svg, panels)
    assert one.startswith('<svg role="img" aria-label="one &quot;&amp;&quot;" viewBox=') and one.endswith("</svg>\n")
    assert "currentColor" in one and "$x &lt;b&gt;" in one and "<b>" not in one
    assert "<style" not in one and "<metadata" not in one
    ids = [set(re.findall(r'id="([^"]+)"', svg)) for svg in (one, two)]
    assert ids[0] and not ids[0] & ids[1] and to_svg(panels[0]) == one


def test_png_holds_all_panels(tmp_path: Path) -> None:
    heights = []
    for panels in (3, 4):
        save_png([line_panel("x", {"a": RUNS})] * panels, tmp_path / "report.png")
        heights.append(len(imread(tmp_path / "report.png")))
    assert heights[1] == 2 * heights[0]  # three in a row
