"""Draw the results of a study: a panel for each data set, with a dot for each seed.

    python eval/study/draw_study.py REPORT.json ... --output PNG

Reads what `contaccum compare` left, each report with one group for each entry. A dot is a seed, a bar their mean.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import fmean

from matplotlib.figure import Figure

from contaccum.files import read_json


def draw(reports: list[Path], metric: str, entries: list[str]) -> Figure:
    """A figure of panels side by side; the first of the ``entries`` is on top."""
    figure = Figure(
        figsize=(1.5 + 2.4 * len(reports), 0.7 + 0.3 * len(entries)), layout="constrained"
    )
    panels = figure.subplots(1, len(reports), sharey=True, squeeze=False)[0]
    for path, axes in zip(reports, panels, strict=True):
        report = read_json(path)
        data = report["data"]["evaluation"][0]["name"]
        for group in report["groups"].values():
            values = [100 * value for value in group["metrics"][data][metric]["values"]]
            height = entries.index(group["entry"])
            color = "C1" if group["entry"].startswith("contaccum") else "C0"
            axes.plot(values, [height] * len(values), "o", color=color, alpha=0.4, markersize=4)
            axes.plot([fmean(values)], [height], "|", color=color, markersize=14, markeredgewidth=2)
        axes.set_title(path.stem.removeprefix("study_"), fontsize=10)
        axes.margins(x=0.1, y=0.1)
        axes.grid(axis="x", alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_yticks(range(len(entries)), [entry.replace("_", " ") for entry in entries])
    panels[0].invert_yaxis()
    figure.supxlabel(f"{metric.replace('NDCG', 'nDCG')} x 100 on test, a dot per seed", fontsize=9)
    return figure


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("reports", nargs="+", type=Path, metavar="REPORT.json")
    parser.add_argument(
        "--entries", nargs="+", required=True, metavar="ENTRY", help="of the reports, from the top"
    )
    parser.add_argument("--metric", default="NDCG@10")
    parser.add_argument("--output", type=Path, required=True, metavar="PNG")
    args = parser.parse_args()
    draw(args.reports, args.metric, args.entries).savefig(args.output, dpi=150)
