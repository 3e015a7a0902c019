"""Draw the pictures of README.md and docs/ from the committed records beside this file.

    python benchmarks/draw_pictures.py

It writes gain.png, time_study.png and bank_in_use.png (docs/time_study.md and docs/study.md, from
by_time/ and query_side/), study.png (docs/study.md, from quality/) and gpu_memory.png (docs/gpu.md,
from gpu/) into docs/pictures.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from contaccum.files import read_json

RECORDS = Path(__file__).resolve().parent

METHODS = {
    "accumulation": ("micro-batches of 8, accumulated", "C7"),
    "grad_cache": ("GradCache (128 pairs)", "C0"),
    "contaccum": ("contaccum (micro-batches of 8)", "C1"),
    "contaccum_cached": ("contaccum_cached", "C3"),
    "query_side_corpus": ("query side", "C2"),
    "contaccum_then_query_side": ("contaccum, then query side", "C4"),
}
"""{entry of the study by time: (label, colour of matplotlib)}"""
GAIN_METHODS = ("accumulation", "grad_cache", "contaccum")
BY_TIME_SETS = ("scifact", "nqg", "medquad")
TITLES = {
    "scifact": "SciFact: claims",
    "scifact_float32": "SciFact: claims",
    "nqg": "nqg: SQuAD's questions",
    "medquad": "MedQuAD: medical questions",
    "wikiqa": "WikiQA: questions",
    "pubmedqa": "PubMedQA: questions",
}
SMALL_ENCODERS = {
    "contaccum_cached": "contaccum_cached",
    "contaccum": "contaccum",
    "in_batch": "one batch of 128",
    "in_batch_512": "one batch of 512",
    "in_batch_1024": "one batch of 1,024",
    "grad_accum": "accumulation",
}
"""{entry of the study of the bank, from top to bottom: label}"""
MEMORY_LINES = {
    "contaccum": ("contaccum", "o-C1"),
    "mnrl": ("accumulation (mnrl)", "x:C7"),
    "grad_cache": ("grad_cache", "o-C0"),
    "mnrl_cached": ("mnrl_cached", "x:k"),
}
"""{method of the part update_time of gpu.py: (label, format of matplotlib)}"""

CARD_GB = 8
FAILED_BELOW = 3.0
"""A seed that is this many points or more below the best one of its method is a hollow dot."""


def read_final_runs(data: str, entry: str) -> list[dict[str, Any]]:
    """Return the runs of an entry of the study by time at its chosen rate, one for each seed.

    That is the only learning rate with a run of all three seeds.
    """
    by_rate: dict[str, list[dict[str, Any]]] = {}
    for file in sorted((RECORDS / "by_time" / data).glob(f"{entry}-*.json")):
        run = read_json(file)
        by_rate.setdefault(run["rate"], []).append(run)
    [runs] = [runs for runs in by_rate.values() if len(runs) == 3]
    return runs


def read_minutes(data: str, entry: str, updates: float) -> float:
    """Return the minutes of some updates of an entry of the study by time, as it charges them."""
    timings = read_json(RECORDS / "by_time" / data / "seconds.json")["entries"]
    return updates * timings[entry]["seconds_per_update"] / 60


def get_scores(*runs: dict[str, Any]) -> list[float]:
    """Return the test scores of runs, x 100."""
    return [100 * run["scores"]["test"] for run in runs]


def draw_gain() -> Figure:
    """Draw the score of each method on each data set, on one scale."""
    rows: list[tuple[str, dict[str, list[float]]]] = []
    for data in BY_TIME_SETS:
        scores = {"base": get_scores(read_json(RECORDS / "by_time" / data / "base.json"))}
        for entry in GAIN_METHODS:
            scores[entry] = get_scores(*read_final_runs(data, entry))
        rows.append((data, scores))
    folder = RECORDS / "query_side"  # the earlier runs, of which these two sets have `contaccum`
    for data in ("wikiqa", "pubmedqa"):
        runs = [read_json(file) for file in sorted(folder.glob(f"{data}-contaccum-*.json"))]
        first_runs = [run for run in runs if run["seed"] == 0]
        rate = max(first_runs, key=lambda run: run["scores"]["dev"])["rate"]
        final_scores = get_scores(*(run for run in runs if run["rate"] == rate))
        base = get_scores(read_json(folder / f"{data}-base.json"))
        rows.append((data, {"base": base, "contaccum": final_scores}))

    figure = Figure(figsize=(9.0, 4.4), layout="constrained")
    axes = figure.subplots()
    for row, (_, methods) in enumerate(rows):
        [base] = methods.pop("base")
        axes.plot([base] * 2, [row - 0.32, row + 0.32], color="black", linewidth=1.5)
        left = min(base, *list(methods.values())[len(methods) // 2]) - 0.6
        axes.text(left, row, f"{base:.1f}", ha="right", va="center", fontsize=9)
        if len(methods) == 1:
            axes.text(59, row, "no run of the other methods", color="C7", va="center", fontsize=9)
        for place, (entry, scores) in enumerate(methods.items()):
            height = row + 0.28 * (place - (len(methods) - 1) / 2)
            _, color = METHODS[entry]
            axes.plot([min(scores), max(scores)], [height] * 2, color=color, alpha=0.5)
            axes.plot(scores, [height] * len(scores), "o", color=color, markersize=3, alpha=0.5)
            axes.plot([fmean(scores)], [height], "o", color=color, markersize=7)
            text, end = f"{fmean(scores):.1f}", max(*scores, base)
            axes.text(end + 0.6, height, text, va="center", fontsize=9, color=color)
    axes.set_yticks(range(len(rows)), [TITLES[data] for data, _ in rows])
    axes.invert_yaxis()
    axes.set_xlabel("nDCG@10 x 100 on test: mean of the seeds, and a small dot per seed")
    axes.set_xlim(58, 102)
    axes.grid(axis="x", alpha=0.3)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    handles = [Line2D([], [], color="black", label="base model")]
    for entry in GAIN_METHODS:
        label, color = METHODS[entry]
        handles.append(Line2D([], [], marker="o", linestyle="", color=color, label=label))
    figure.legend(handles=handles, loc="outside upper center", ncols=4, frameon=False, fontsize=9)
    return figure


def draw_time() -> Figure:
    """Draw the scores against time: training, and one encoding of the corpus for each method.

    A line joins the base model and the mean over seeds; it is not the course of training.
    Query-side training starts when the corpus is encoded. The others encode it later: all end when
    the corpus can be searched with the trained model.
    """
    figure = Figure(figsize=(11.5, 4.6), layout="constrained")
    panels = figure.subplots(1, len(BY_TIME_SETS))
    for axes, data in zip(panels, BY_TIME_SETS, strict=True):
        encoding_minutes = read_encoding_minutes(data)
        [base] = get_scores(read_json(RECORDS / "by_time" / data / "base.json"))
        for entry, (label, color) in METHODS.items():
            runs = read_final_runs(data, entry)
            scores = get_scores(*runs)
            timed_entry, end = entry, encoding_minutes
            if entry == "contaccum_then_query_side":
                second_stage = "query_side_corpus"
                updates = read_final_runs(data, second_stage)[0]["updates"]
                timed_entry, end = "contaccum", end + read_minutes(data, second_stage, updates)
            end += read_minutes(data, timed_entry, runs[0]["updates"])
            start = encoding_minutes if entry == "query_side_corpus" else 0.0
            axes.plot([start, end], [base, fmean(scores)], "--", color=color, linewidth=0.8)
            axes.vlines(end, min(scores), max(scores), color=color, linewidth=1.5)
            failed = [score for score in scores if score <= max(scores) - FAILED_BELOW]
            axes.plot([end] * len(failed), failed, "o", color=color, fillstyle="none", markersize=5)
            axes.plot(end, fmean(scores), "o", color=color, markersize=7, label=label)
        axes.plot([0, encoding_minutes], [base, base], "|-", color="black", linewidth=1)
        axes.set_title(TITLES[data], fontsize=11)
        axes.set_xlabel("minutes of one core")
        axes.set_xlim(left=-0.4)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("nDCG@10 x 100 on test")
    handles, _ = panels[0].get_legend_handles_labels()
    failed = f"a seed {FAILED_BELOW:.0f} points or more below the best; it counts in the mean"
    for style in (
        {"marker": "|", "label": "base model; encoding of the corpus"},
        {"marker": "o", "label": "mean of three seeds, lowest to highest"},
        {"marker": "o", "label": failed, "linestyle": "", "fillstyle": "none", "markersize": 5},
    ):
        handles.append(Line2D([], [], color="black", **style))
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure


def read_encoding_minutes(data: str) -> float:
    """Return the minutes that encoding a corpus takes on the core that trained.

    The encoding was measured in updates of contaccum in float32, so it is charged with those.
    """
    corpus = read_json(RECORDS / "by_time" / "encoding.json")["corpora"][data]
    float32_data = "scifact_float32" if data == "scifact" else data
    updates = corpus["documents"] * corpus["updates_per_document"]
    return read_minutes(float32_data, "contaccum", updates)


def draw_bank_in_use() -> Figure:
    """Draw the number of bank entries in use in each update of `contaccum`, a line per seed."""
    figure = Figure(figsize=(10.0, 3.2), layout="constrained")
    names = ("scifact_float32", "nqg", "medquad")
    for axes, data in zip(figure.subplots(1, len(names)), names, strict=True):
        runs = read_final_runs(data, "contaccum")
        for run in runs:
            if fills := run.get("bank_fill"):  # not recorded by the first runs
                axes.plot(range(1, len(fills) + 1), fills, color="C1")
        settings = runs[0]["identity"]
        size, pairs = settings["bank_size"], settings["total_train_batch_size"]
        axes.axhline(size, color="C7", linestyle="--")
        axes.text(1, 0.97 * size, f"bank_size {size:,}", color="C7", va="top", fontsize=9)
        axes.axhline(pairs, color="black", linestyle=":", linewidth=1)
        axes.text(1, 0.93 * pairs, f"{pairs} pairs of an update", va="top", fontsize=9)
        title = f"{TITLES[data].split(':')[0]}, learning rate {settings['learning_rate']}"
        axes.set_title(title, fontsize=10)
        axes.set_ylim(0, 1.04 * size)
        axes.set_xlabel("update")
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("entries in use")
    return figure


def draw_small_encoders() -> Figure:
    """Draw a panel per data set of the study of the bank, with a dot per seed."""
    names = ("arxiv", "nqg", "scifact", "medquad", "pubmedqa")
    figure = Figure(figsize=(13.0, 2.6), layout="constrained")
    entries = list(SMALL_ENCODERS)
    panels = figure.subplots(1, len(names), sharey=True)
    for name, axes in zip(names, panels, strict=True):
        report = read_json(RECORDS / "quality" / f"study_{name}.json")
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
    panels[0].set_yticks(range(len(entries)), list(SMALL_ENCODERS.values()))
    panels[0].invert_yaxis()
    figure.supxlabel("nDCG@10 x 100 on test: a dot per seed, a bar for the mean", fontsize=9)
    return figure


def draw_gpu_memory() -> Figure:
    """Draw peak memory against the micro-batch: a line for each encoder and method, and a card."""
    figure = Figure(figsize=(7.5, 3.8), layout="constrained")
    axes = figure.subplots()
    cases = read_json(RECORDS / "gpu" / "update_time.json")["result"]["cases"].values()
    cases = sorted(cases, key=lambda case: case["local"])
    for backbone, name in (("minilm", "MiniLM"), ("bert-base", "BERT-base")):
        measured = [case for case in cases if case["backbone"] == backbone]
        sizes = [case["local"] for case in measured]
        for method, (label, style) in MEMORY_LINES.items():
            # 1 GB is 1,024 MB, as for the memory of cards.
            memory = [case["methods"][method]["peak_mb"] / 1024 for case in measured]
            axes.plot(sizes, memory, style, label=label if backbone == "minilm" else None)
        axes.text(1.15 * sizes[-1], memory[-1], name, va="center")
    axes.axhline(CARD_GB, color="black", linewidth=1)
    axes.text(1, CARD_GB + 0.1, f"{CARD_GB} GB card", va="bottom")
    axes.set_xscale("log", base=2)
    sizes = sorted({case["local"] for case in cases})
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set_xlim(right=2.2 * sizes[-1])
    axes.set_ylim(0, CARD_GB + 1)
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
    parser.add_argument("--pictures", type=Path, default=RECORDS.parent / "docs" / "pictures")
    args = parser.parse_args()
    figures = {
        "gain": draw_gain(),
        "time_study": draw_time(),
        "bank_in_use": draw_bank_in_use(),
        "study": draw_small_encoders(),
        "gpu_memory": draw_gpu_memory(),
    }
    for name, figure in figures.items():
        figure.savefig(args.pictures / f"{name}.png", dpi=150)


if __name__ == "__main__":
    main()
