"""Panels draw their numbers, as SVG for the page and as one PNG."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from contaccum.report.charts import (
    Line,
    difference_panel,
    line_panel,
    map_panel,
    save_png,
    stacked_panel,
    to_svg,
)

RUNS = [[(0, 0.0), (10, 1.0)], [(0, 1.0), (10, 2.0), (20, 9.0)]]


def test_lines_are_means_over_seeds_with_a_band_as_far_as_all_runs_last() -> None:
    axes = Figure().subplots()
    line_panel("x", [Line("a", RUNS), Line("b", RUNS[:1], 1, dashed=True)], level=1.2).draw(axes)
    mean, other, level = axes.lines
    assert mean.get_xydata().tolist() == [[0, 0.5], [10, 1.5]] and mean.get_gid() == "series-0"
    assert other.get_linestyle() == "--" and other.get_gid() == "series-1"
    (band,) = axes.collections
    assert {tuple(point) for point in band.get_paths()[0].vertices} == {(0, 0), (0, 1), (10, 1), (10, 2)}
    assert level.get_ydata()[0] == 1.2
    far = Figure().subplots()
    line_panel("x", [Line("a", RUNS)], level=100.0).draw(far)
    assert len(far.lines) == 1


def test_shares_are_stacked_and_differences_are_in_order() -> None:
    axes = Figure().subplots()
    stacked_panel("x", [1, 2], {"batch": [0.5, 0.4], "young": [0.3, 0.3], "old": [0.1, 0.2]}).draw(axes)
    tops = [max(vertex[1] for vertex in part.get_paths()[0].vertices) for part in axes.collections]
    assert tops == pytest.approx([0.5, 0.8, 0.9])
    axes = Figure().subplots()
    difference_panel("x", [0.1, -0.2, 0.0, 0.5]).draw(axes)
    gains, losses = ([vertex[1] for vertex in part.get_paths()[0].vertices] for part in axes.collections)
    assert (max(gains), min(gains), max(losses), min(losses)) == (0.5, 0.0, 0.0, -0.2)


def test_a_map_has_a_number_in_every_cell_that_has_one() -> None:
    axes = Figure().subplots()
    map_panel("x", ["m=1", "m=2"], {"a": [0.25, math.nan], "b": [0.5, 0.75]}).draw(axes)
    assert [text.get_text() for text in axes.texts] == ["0.2500", "", "0.5000", "0.7500"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "b"]


def test_svg_has_the_pages_ink_escaped_texts_and_ids_of_its_own() -> None:
    panels = [line_panel(title, [Line("<a>", RUNS)], unit="$x <b>") for title in ('one "&"', "two")]
    one, two = map(to_svg, panels)
    assert one.startswith('<svg role="img" aria-label="one &quot;&amp;&quot;" viewBox=') and one.endswith("</svg>\n")
    assert "currentColor" in one and "$x &lt;b&gt;" in one and "<b>" not in one
    assert 'data-series="0"' in one and "<style" not in one and "<metadata" not in one
    ids = [set(re.findall(r'id="([^"]+)"', svg)) for svg in (one, two)]
    assert ids[0] and not ids[0] & ids[1] and to_svg(panels[0]) == one


def test_png_holds_all_panels(tmp_path: Path) -> None:
    panels = [line_panel("x", [Line("a", RUNS)])] * 4 + [map_panel("m", ["c"], {"a": [1.0], "b": [2.0]})]
    save_png(panels, tmp_path / "report.png", "cell")
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
    save_png(panels[4:], tmp_path / "map.png")
    assert (tmp_path / "map.png").stat().st_size > 2_000
