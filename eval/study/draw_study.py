"""Plot the results of a study: one panel per data set, with one dot per seed.

    python eval/study/draw_study.py REPORT.json ... --output PNG

The reports are those of `eval/compare/compare.py`, with one group per entry. A dot is the score of
one seed, a bar is the mean over seeds.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import fmean

from matplotlib.figure import Figure

from contaccum.files import read_json


def draw_figure(reports: list[Path], metric: str, entries: list[str]) -> Figure:
    """Draw one panel per report, side by side, with the first of the ``entries`` on top."""
    figure = Figure(
        figsize=(1.5 + 2.4 * len(reports), 0.7 + 0.3 * len(entries)), layout="constrained"
    )
    panels = figure.subplots(1, len(reports), sharey=True, squeeze=False)[0]
    for path, axes in zip(reports, panels, strict=True):
        report = read_json(path)
        data_name = report["data"]["evaluation"][0]["name"]
        for group in report["groups"].values():
            scores = [100 * value for value in group["metrics"][data_name][metric]["values"]]
            height = entries.index(group["entry"])
            color = "C1" if group["entry"].startswith("contaccum") else "C0"
            axes.plot(scores, [height] * len(scores), "o", color=color, alpha=0.4, markersize=4)
            axes.plot([fmean(scores)], [height], "|", color=color, markersize=14, markeredgewidth=2)
        axes.set_title(path.stem.removeprefix("study_"), fontsize=10)
        axes.margins(x=0.1, y=0.1)
        axes.grid(axis="x", alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_yticks(range(len(entries)), [entry.replace("_", " ") for entry in entries])
    panels[0].invert_yaxis()
    metric_name = metric.replace("NDCG", "nDCG")
    figure.supxlabel(f"{metric_name} x 100 on test, one dot per seed", fontsize=9)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("reports", nargs="+", type=Path, metavar="REPORT.json")
    parser.add_argument(
        "--entries",
        nargs="+",
        required=True,
        metavar="ENTRY",
        help="names of the reports' entries, from top to bottom",
    )
    parser.add_argument("--metric", default="NDCG@10")
    parser.add_argument("--output", type=Path, required=True, metavar="PNG")
    args = parser.parse_args()
    draw_figure(args.reports, args.metric, args.entries).savefig(args.output, dpi=150)


if __name__ == "__main__":
    main()
