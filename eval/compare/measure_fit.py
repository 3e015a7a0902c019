"""Run `contaccum fit` on several data sets with several seeds, and show all results in tables.

    python eval/compare/measure_fit.py run medquad=FILE nqg=FILE pubmedqa=FILE \\
        scifact=contaccum/data/scifact --model MODEL --budget 8m
    python eval/compare/measure_fit.py table

A cell is one fit: `contaccum split` with a seed, and `contaccum fit` of the split with the same
seed. Options of `contaccum fit` may follow as --key=value. A cell that is finished in WORK is not
run again. `table` may be called at any time: it adds the finished cells of WORK to the record, and
writes the tables of all cells of the record into the page.

A FILE has pairs in any format of docs/data.md. If it has more than 2,000, a sample of its passages
is used, with all questions of each. A BEIR folder keeps its corpus and its own test set.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shlex
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from comparison.processes import Job, exit_with_parent, run_jobs

from contaccum.cli import main as run_command
from contaccum.data import read_records
from contaccum.data.beir import is_beir_folder
from contaccum.data.records import Record
from contaccum.errors import DataError, UserError
from contaccum.evaluation.results import fill_page, markdown_table
from contaccum.experiments.verdict import SYSTEMS
from contaccum.files import atomic_folder, hash_file, read_json, write_json, write_text
from contaccum.report.fit_page import RUNGS
from contaccum.work import RESULT_FILE

ROOT = Path(__file__).resolve().parents[2]
CELL_FILE = "cell.json"
MAX_PAIRS = 2000
LEFT_OUT = ("model", "train_data", "output_dir", "passage_store", "second_stage", "learning_rates")
"""Settings of a training that are paths on this machine, or as long as the training."""
PUBLISHED = {
    "https://github.com/texttron/tevatron/blob/main/examples/scifact/README.md": {
        "data": "scifact",
        "metric": "NDCG@10",
        "scores": {
            "Tevatron: bert-base, 80 epochs on a GPU": 0.7473,
            "Tevatron: Condenser, 80 epochs on a GPU": 0.7841,
        },
    },
}
"""Results of others on the same data, by their source."""
NAMES = {
    "bm25": "BM25",
    "base": "base model",
    "base_with_bm25": "base model with BM25",
    "trained": "`fit`",
    "trained_with_bm25": "`fit` with BM25",
}
"""{system of `contaccum fit`: its name in the tables}."""

Cell = dict[str, Any]
"""The result of a fit as JSON; see `run_cell`."""


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """Return the program's options, and the options of `contaccum fit`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    actions = parser.add_subparsers(dest="action", required=True)
    run = actions.add_parser("run", allow_abbrev=False)
    run.add_argument("data", nargs="+", metavar="NAME=PATH", help="pairs, or a BEIR folder")
    run.add_argument("--model", required=True, help="the model to train")
    run.add_argument("--budget", default="8m", help="budget of each fit; default: %(default)s")
    run.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    run.add_argument("--jobs", type=int, default=2, help="fits at the same time")
    table = actions.add_parser("table")
    table.add_argument("--record", type=Path, default=ROOT / "benchmarks" / "fit.json")
    table.add_argument("--page", type=Path, default=ROOT / "benchmarks" / "README.md")
    for action in (run, table):
        action.add_argument("--work", type=Path, default=Path("runs/measure_fit"))
    return parser.parse_known_args()


# Data ---------------------------------------------------------------------------------------------


def prepare_data(name: str, path: Path, work: Path) -> dict[str, Any]:
    """Write the data of a set, and return their ``path`` and a description of the source."""
    if is_beir_folder(path):
        return {"path": str(path), "source": {"folder": path.name}}
    records = list(read_records(path))
    source = {"file": path.name, "sha256": hash_file(path), "pairs": len(records)}
    folder = work / "data" / name
    with atomic_folder(folder) as new_folder:
        rows = [
            {"query": record.query, "positive": record.positives[0]}
            for record in sample_passages(records, MAX_PAIRS)
        ]
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
        write_text(new_folder / "pairs.jsonl", lines)
    return {"path": str(folder / "pairs.jsonl"), "source": source}


def sample_passages(records: Sequence[Record], num_pairs: int) -> list[Record]:
    """Return the records of the passages with the smallest hashes, at least ``num_pairs`` in all.

    A passage has all its records.
    """
    by_hash: dict[str, list[Record]] = {}
    for record in records:
        digest = hashlib.sha256(record.positives[0].encode()).hexdigest()
        by_hash.setdefault(digest, []).append(record)
    sampled: list[Record] = []
    for digest in sorted(by_hash):
        if len(sampled) < num_pairs:
            sampled += by_hash[digest]
    return sampled


# Cells --------------------------------------------------------------------------------------------


def make_jobs(args: argparse.Namespace, fit_options: list[str]) -> list[Job]:
    """Write the data, and return the jobs of the cells that are not finished.

    The cells of a seed come first for all data sets, so that a table that is made early has all.
    """
    prepared = {}
    for source in args.data:
        name, sign, path = source.partition("=")
        if not sign:
            raise DataError(f"{source}: give NAME=PATH, and options of fit as --key=value")
        prepared[name] = {"data": name, **prepare_data(name, Path(path), args.work)}
    jobs = []
    for seed in args.seeds:
        for name, data in prepared.items():
            folder = args.work / f"{name}-{args.budget}-{seed}"
            if (folder / CELL_FILE).exists():
                continue
            split, fit = str(folder / "split"), str(folder / "fit")
            options = ["--model", args.model, "--budget", args.budget, "--seed", str(seed)]
            commands = [
                ["split", data["path"], split, "--seed", str(seed)],
                ["fit", split, "--output", fit, *options, *fit_options],
            ]
            job = {"name": folder.name, "folder": str(folder), "seed": seed, "model": args.model}
            jobs.append({**job, **data, "commands": commands})
    return jobs


def run_cell(job: Job) -> None:
    """Split and fit the data of a job, and write the `Cell` to its folder."""
    for command in job["commands"]:
        if exit_code := run_command(command):
            sys.exit(exit_code)
    folder = Path(job["folder"])
    fit = read_json(folder / "fit" / RESULT_FILE)
    commands = []
    for command in job["commands"]:
        # The path of a local model is replaced by its name.
        words = [fit["model"] if word == job["model"] else word for word in command]
        commands.append(shlex.join(["contaccum", *words]))
    scores = {}
    for system, row in zip(SYSTEMS, fit["scores"], strict=True):
        scores[system] = {name: value for name, value in row.items() if name != "name"}
    candidates = []
    for candidate in fit["candidates"]:
        settings = {
            key: value for key, value in candidate["settings"].items() if key not in LEFT_OUT
        }
        candidates.append({**candidate, "settings": settings})
    kept = ("free", "chosen", "recommended", "lines", "warnings", "seconds", "budget_seconds")
    cell = {
        "data": job["data"],
        "seed": job["seed"],
        "commands": commands,
        "model": fit["model"],
        "source": job["source"],
        "split": fit["split"],
        "candidates": candidates,
        "scores": scores,
        "verdicts": fit["verdicts"],
        **{name: fit[name] for name in kept},
        "threads": int(os.environ["OMP_NUM_THREADS"]),
        **fit["made_with"],
    }
    write_json(folder / CELL_FILE, cell)


# Tables -------------------------------------------------------------------------------------------


def make_tables(record: dict[str, Any]) -> dict[str, str]:
    """Return {name of a table in the page: its Markdown}."""
    by_row: dict[tuple[str, float, str], list[Cell]] = {}
    for cell in record["cells"]:
        for kind in cell["verdicts"]:
            by_row.setdefault((cell["data"], cell["budget_seconds"], kind), []).append(cell)
    rows = []
    for (data, budget, kind), cells in by_row.items():
        means = []
        for system in SYSTEMS:
            scores = [cell["scores"][system] for cell in cells]
            # A system has a score for each kind of documents if both have verdicts.
            means.append(format_mean([row.get(kind, row["NDCG@10"]) for row in scores]))
        queries = [cell["verdicts"][kind]["queries"] for cell in cells]
        words = Counter(cell["verdicts"][kind]["word"] for cell in cells)
        chosen = Counter(name_chosen(cell) for cell in cells)
        seconds = [cell["seconds"]["total"] for cell in cells]
        rows.append(
            [
                data,
                kind,
                format_range(queries),
                *means,
                format_counts(chosen),
                format_counts(words),
                f"{format_range(seconds)} s of {budget:.0f}",
            ]
        )
    header = ["data", "documents", "test queries", *NAMES.values(), "chosen", "verdicts", "time"]
    compared = []
    for published in record["published"].values():
        start = [published["data"], published["metric"]]
        of_data = [cell for cell in record["cells"] if cell["data"] == published["data"]]
        largest = max((cell["budget_seconds"] for cell in of_data), default=0.0)
        for system, score in published["scores"].items():
            compared.append([*start, system, format_mean([score])])
        for system, name in NAMES.items():
            scores = [
                cell["scores"][system][published["metric"]]
                for cell in of_data
                if cell["budget_seconds"] == largest
            ]
            compared.append([*start, name, format_mean(scores)])
    return {
        "fit": markdown_table(header, rows),
        "fit and published results": markdown_table(["data", "metric", "", "test"], compared),
    }


def name_chosen(cell: Cell) -> str:
    """Return the name of the rung of the chosen candidate."""
    return RUNGS[cell["candidates"][cell["chosen"]]["rung"]]


def get_key(cell: Cell) -> tuple[str, float, int]:
    """Return the data, the budget and the seed of a cell, by which cells are sorted."""
    return cell["data"], -cell["budget_seconds"], cell["seed"]


def format_counts(counts: Counter[str]) -> str:
    """Return each word with its count."""
    return ", ".join(f"{count} {word}" for word, count in counts.items())


def format_range(values: Sequence[float]) -> str:
    """Return the least and the largest value, or one of them if they are equal."""
    return " to ".join(dict.fromkeys(f"{value:.0f}" for value in (min(values), max(values))))


def format_mean(scores: Sequence[float]) -> str:
    """Return the mean of scores x 100, with the standard deviation in brackets."""
    if not scores:
        return "not yet run"
    text = f"{100 * fmean(scores):.1f}"
    if len(scores) > 1:
        text += f" ({100 * stdev(scores):.1f})"
    return text


def write_tables(work: Path, record_file: Path, page: Path) -> None:
    """Add the finished cells of a work folder to the record, and write the tables."""
    cells = {}
    if record_file.exists():
        cells = {get_key(cell): cell for cell in read_json(record_file)["cells"]}
    for file in work.glob(f"*/{CELL_FILE}"):
        cell = read_json(file)
        cells[get_key(cell)] = cell
    record = {"published": PUBLISHED, "cells": [cells[key] for key in sorted(cells)]}
    write_json(record_file, record)
    write_text(page, fill_page(page.read_text(encoding="utf-8"), make_tables(record)))


def main() -> int:
    """Do what the command line says; return 1 if a fit failed."""
    if sys.argv[1:2] == ["cell"]:  # a process of `run_jobs`
        threading.Thread(target=exit_with_parent, daemon=True).start()
        run_cell(read_json(sys.argv[2]))
        return 0
    args, fit_options = parse_arguments()
    if fit_options and args.action != "run":
        raise DataError(f"{fit_options[0]}: unknown option of {args.action}")
    if args.action == "table":
        write_tables(args.work, args.record, args.page)
        return 0
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = (sys.executable, __file__, "cell")
    failures = run_jobs(make_jobs(args, fit_options), args.jobs, command=command)
    return 1 if failures else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        print(f"measure_fit: error: {error}", file=sys.stderr)
        sys.exit(2)
