"""Draw the pictures of the studies, and of the memory on a GPU, from their committed results.

    python eval/study/draw_study.py

Writes to docs/pictures: gain.png and time_study.png (study by time), bank_in_use.png and study.png
(study of the bank), gpu_memory.png (docs/gpu.md).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from time_study.plan import Plan, read_plan
from time_study.results import Results, choose_value

from contaccum.files import read_json

ROOT = Path(__file__).resolve().parents[2]

COLORS = {
    "accumulation": "C7",
    "grad_cache": "C0",
    "contaccum": "C1",
    "contaccum_cached": "C3",
    "query_side_corpus": "C2",
    "contaccum_then_query_side": "C4",
}
"""{entry of the study by time: colour of matplotlib}."""

LABELS = {
    "accumulation": "micro-batches of 8, accumulated",
    "grad_cache": "GradCache (128 pairs)",
    "contaccum": "contaccum (micro-batches of 8)",
    "contaccum_cached": "contaccum_cached",
    "query_side_corpus": "query side",
    "contaccum_then_query_side": "contaccum, then query side",
}
TITLES = {
    "scifact": "SciFact: claims",
    "scifact_float32": "SciFact: claims",
    "nqg": "nqg: SQuAD's questions",
    "medquad": "MedQuAD: medical questions",
    "wikiqa": "WikiQA: questions",
    "pubmedqa": "PubMedQA: questions",
}
STUDY_ENTRIES = {
    "contaccum_cached": "contaccum_cached",
    "contaccum": "contaccum",
    "in_batch": "one batch of 128",
    "in_batch_512": "one batch of 512",
    "in_batch_1024": "one batch of 1,024",
    "grad_accum": "accumulation",
}
"""{entry of the reports of the study of the bank, from top to bottom: label}."""
MEMORY_LINES = {
    "contaccum": ("contaccum", "o-C1"),
    "mnrl": ("accumulation (mnrl)", "x:C7"),
    "grad_cache": ("grad_cache", "o-C0"),
    "mnrl_cached": ("mnrl_cached", "x:k"),
}
"""{method of the GPU benchmark: label, format of matplotlib}."""

FAILED_BELOW = 3.0
"""A seed that is this many points or more below the best one of its method is a hollow dot."""


def read_time_study(folder: Path) -> dict[str, Results]:
    """Return {data set with a panel: its runs}; a table of variants has no panel."""
    plan = read_plan(ROOT / "eval" / "study" / "by_time.yaml")
    return {
        data: Results(plan, folder / data)
        for data, data_plan in plan.data.items()
        if data_plan.folder is None
    }


def draw_gain(by_time: dict[str, Results], first_figures: Path) -> Figure:
    """Draw the score of each method on each data set, on one scale.

    Args:
        by_time: the runs of the study by time.
        first_figures: folder of the earlier runs on WikiQA and PubMedQA, which have `contaccum`
            only.
    """
    rows: list[tuple[str, float, dict[str, list[float]]]] = []
    for data, results in by_time.items():
        methods = {}
        for entry in ("accumulation", "grad_cache", "contaccum"):
            methods[entry] = [run["scores"]["test"] for run in results.get_final_runs(entry)]
        rows.append((data, results.get_base()["scores"]["test"], methods))
    for data in ("wikiqa", "pubmedqa"):
        runs = [read_json(file) for file in sorted(first_figures.glob(f"{data}-contaccum-*.json"))]
        rate = choose_value({run["rate"]: run["scores"]["dev"] for run in runs if run["seed"] == 0})
        scores = [run["scores"]["test"] for run in runs if run["rate"] == rate]
        base = read_json(first_figures / f"{data}-base.json")["scores"]["test"]
        rows.append((data, base, {"contaccum": scores}))

    figure = Figure(figsize=(9.0, 4.4), layout="constrained")
    axes = figure.subplots()
    for row, (_, base, methods) in enumerate(rows):
        axes.plot([100 * base] * 2, [row - 0.32, row + 0.32], color="black", linewidth=1.5)
        left = 100 * min(base, *list(methods.values())[len(methods) // 2]) - 0.6
        axes.text(left, row, f"{100 * base:.1f}", ha="right", va="center", fontsize=9)
        if len(methods) == 1:
            axes.text(59, row, "no run of the other methods", color="C7", va="center", fontsize=9)
        for place, (entry, scores) in enumerate(methods.items()):
            height = row + 0.28 * (place - (len(methods) - 1) / 2)
            draw_seeds(axes, scores, height, COLORS[entry])
            mean, end = 100 * fmean(scores), 100 * max(*scores, base)
            text = f"{mean:.1f}"
            axes.text(end + 0.6, height, text, va="center", fontsize=9, color=COLORS[entry])
    axes.set_yticks(range(len(rows)), [TITLES[data] for data, _, _ in rows])
    axes.invert_yaxis()
    axes.set_xlabel("nDCG@10 x 100 on test: mean of the seeds, and a small dot per seed")
    axes.set_xlim(58, 102)
    axes.grid(axis="x", alpha=0.3)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    handles = [Line2D([], [], color="black", label="base model")]
    for entry in ("accumulation", "grad_cache", "contaccum"):
        handles.append(
            Line2D([], [], marker="o", linestyle="", color=COLORS[entry], label=LABELS[entry])
        )
    figure.legend(handles=handles, loc="outside upper center", ncols=4, frameon=False, fontsize=9)
    return figure


def draw_seeds(axes: Axes, scores: list[float], height: float, color: str) -> None:
    """Draw the mean of scores and a small dot per seed, at a height."""
    percent = [100 * score for score in scores]
    axes.plot([min(percent), max(percent)], [height] * 2, color=color, alpha=0.5)
    axes.plot(percent, [height] * len(percent), "o", color=color, markersize=3, alpha=0.5)
    axes.plot([fmean(percent)], [height], "o", color=color, markersize=7)


def draw_time(by_time: dict[str, Results], encoding: dict[str, Any]) -> Figure:
    """Draw the scores against time: training, and one encoding of the corpus for each method.

    A line joins the base model and the mean over seeds; it is not the course of training, which was
    scored for one seed only. Query-side training starts when the corpus is encoded. The others
    encode it later: all end when the corpus can be searched with the trained model.

    Args:
        by_time: the runs of the study by time.
        encoding: record of `time_encoding.py`.
    """
    figure = Figure(figsize=(11.5, 4.6), layout="constrained")
    panels = figure.subplots(1, len(by_time), squeeze=False)[0]
    for axes, (data, results) in zip(panels, by_time.items(), strict=True):
        encoding_minutes = get_encoding_minutes(results, encoding["corpora"][data])
        base = 100 * results.get_base()["scores"]["test"]
        for entry, color in COLORS.items():
            runs = results.get_final_runs(entry)
            scores = [100 * run["scores"]["test"] for run in runs]
            start = encoding_minutes if entry == "query_side_corpus" else 0.0
            end = encoding_minutes + results.get_cost(entry, runs[0]["updates"]).minutes
            axes.plot([start, end], [base, fmean(scores)], "--", color=color, linewidth=0.8)
            axes.vlines(end, min(scores), max(scores), color=color, linewidth=1.5)
            failed = [score for score in scores if score <= max(scores) - FAILED_BELOW]
            axes.plot([end] * len(failed), failed, "o", color=color, fillstyle="none", markersize=5)
            axes.plot(end, fmean(scores), "o", color=color, markersize=7, label=LABELS[entry])
        axes.plot([0, encoding_minutes], [base, base], "|-", color="black", linewidth=1)
        axes.set_title(TITLES[data], fontsize=11)
        axes.set_xlabel("minutes of one core")
        axes.set_xlim(left=-0.4)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("nDCG@10 x 100 on test")
    handles, _ = panels[0].get_legend_handles_labels()
    handles += [
        Line2D([], [], color="black", marker="|", label="base model; encoding of the corpus"),
        Line2D([], [], color="black", marker="o", label="mean of three seeds, lowest to highest"),
        Line2D(
            [],
            [],
            color="black",
            linestyle="",
            marker="o",
            fillstyle="none",
            markersize=5,
            label=f"a seed {FAILED_BELOW:.0f} points or more below the best; it counts in the mean",
        ),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure


def get_encoding_minutes(results: Results, corpus: dict[str, Any]) -> float:
    """Return the minutes that encoding a corpus takes on the core that trained.

    The encoding was measured in updates of contaccum in float32, so it is charged with those.
    """
    data = results.folder.name
    float32 = results
    if results.plan.data[data].bf16:
        float32 = Results(results.plan, results.folder.with_name(f"{data}_float32"))
    seconds_per_update = float32.get_timing("contaccum")["seconds_per_update"]
    return corpus["documents"] * corpus["updates_per_document"] * seconds_per_update / 60


def draw_bank_in_use(plan: Plan, folder: Path) -> Figure:
    """Draw the number of bank entries in use in each update of `contaccum`, a line per seed."""
    figure = Figure(figsize=(10.0, 3.2), layout="constrained")
    names = ("scifact_float32", "nqg", "medquad")
    for axes, data in zip(figure.subplots(1, len(names)), names, strict=True):
        results = Results(plan, folder / data)
        for run in results.get_final_runs("contaccum"):
            if fills := run.get("bank_fill"):
                axes.plot(range(1, len(fills) + 1), fills, color=COLORS["contaccum"])
        size = plan.data[data].bank_size
        rate = results.choose_rate("contaccum")
        axes.axhline(size, color="C7", linestyle="--")
        axes.text(1, 0.97 * size, f"bank_size {size:,}", color="C7", va="top", fontsize=9)
        pairs = plan.settings["total_train_batch_size"]
        axes.axhline(pairs, color="black", linestyle=":", linewidth=1)
        axes.text(1, 0.93 * pairs, f"{pairs} pairs of an update", va="top", fontsize=9)
        axes.set_title(f"{TITLES[data].split(':')[0]}, learning rate {rate}", fontsize=10)
        axes.set_ylim(0, 1.04 * size)
        axes.set_xlabel("update")
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("entries in use")
    return figure


def draw_small_encoders(folder: Path) -> Figure:
    """Draw a panel per data set of the study of the bank, with a dot per seed."""
    names = ("arxiv", "nqg", "scifact", "medquad", "pubmedqa")
    figure = Figure(figsize=(13.0, 2.6), layout="constrained")
    entries = list(STUDY_ENTRIES)
    panels = figure.subplots(1, len(names), sharey=True)
    for name, axes in zip(names, panels, strict=True):
        report = read_json(folder / f"study_{name}.json")
        test = report["data"]["evaluation"][0]["name"]
        for group in report["groups"].values():
            scores = [100 * score for score in group["metrics"][test]["NDCG@10"]["values"]]
            height = entries.index(group["entry"])
            color = "C1" if group["entry"].startswith("contaccum") else "C0"
            axes.plot(scores, [height] * len(scores), "o", color=color, alpha=0.4, markersize=4)
            axes.plot([fmean(scores)], [height], "|", color=color, markersize=14, markeredgewidth=2)
        axes.set_title(name, fontsize=10)
        axes.margins(x=0.1, y=0.1)
        axes.grid(axis="x", alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_yticks(range(len(entries)), list(STUDY_ENTRIES.values()))
    panels[0].invert_yaxis()
    figure.supxlabel("nDCG@10 x 100 on test: a dot per seed, a bar for the mean", fontsize=9)
    return figure


def draw_gpu_memory(update_time: dict[str, Any], card_gb: int = 8) -> Figure:
    """Draw peak memory against the micro-batch: a line for each encoder and method.

    Args:
        update_time: record of the part `update_time` of benchmarks/gpu.py.
        card_gb: memory of the card whose line is drawn. 1 GB is 1,024 MB, as for the memory of
            cards.
    """
    figure = Figure(figsize=(7.5, 3.8), layout="constrained")
    axes = figure.subplots()
    cases = sorted(update_time["cases"], key=lambda case: case["local"])
    for backbone, name in (("minilm", "MiniLM"), ("bert-base", "BERT-base")):
        measured = [case for case in cases if case["backbone"] == backbone]
        sizes = [case["local"] for case in measured]
        for method, (label, style) in MEMORY_LINES.items():
            memory = [case["methods"][method]["peak_mb"] / 1024 for case in measured]
            axes.plot(sizes, memory, style, label=label if backbone == "minilm" else None)
        axes.text(1.15 * sizes[-1], memory[-1], name, va="center")
    axes.axhline(card_gb, color="black", linewidth=1)
    axes.text(1, card_gb + 0.1, f"{card_gb} GB card", va="bottom")
    axes.set_xscale("log", base=2)
    sizes = sorted({case["local"] for case in cases})
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set_xlim(right=2.2 * sizes[-1])
    axes.set_ylim(0, card_gb + 1)
    axes.set_xlabel("pairs per micro-batch")
    axes.set_ylabel("peak memory, GB")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=4, frameon=False, fontsize=9)
    return figure


def main() -> None:
    """Write all pictures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks")
    parser.add_argument("--pictures", type=Path, default=ROOT / "docs" / "pictures")
    args = parser.parse_args()
    folder = args.results / "by_time"
    by_time = read_time_study(folder)
    plan = next(iter(by_time.values())).plan
    update_time = read_json(args.results / "gpu" / "update_time.json")
    figures = {
        "gain": draw_gain(by_time, args.results / "query_side"),
        "time_study": draw_time(by_time, read_json(folder / "encoding.json")),
        "bank_in_use": draw_bank_in_use(plan, folder),
        "study": draw_small_encoders(args.results / "quality"),
        "gpu_memory": draw_gpu_memory(update_time["result"]),
    }
    for name, figure in figures.items():
        figure.savefig(args.pictures / f"{name}.png", dpi=150)


if __name__ == "__main__":
    main()
