"""README.md: every number is that of a committed result, or of no measurement."""

import csv
import json
import re
from collections import Counter
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

ROOT = Path(__file__).parents[1]
SETS = ("scifact", "nqg", "medquad")
FITTED_SETS = ("medquad", "nqg", "squad", "scifact", "pubmedqa")
STUDY = {
    "accumulation": "gradient accumulation",
    "grad_cache": "GradCache",
    "contaccum": "`contaccum`",
}
SPLIT_PARTS = ("train", "dev", "test")
MODELS = {"minilm": "all-MiniLM-L6-v2", "bert-base": "BERT-base"}
CORES = {1: "one CPU core", 2: "two CPU cores"}
NOT_MEASURED = (
    "nDCG@10 x 100",
    "nDCG@10",
    "BM25",
    "--bm25",
    "All-MiniLM-L6-v2",
    "all-MiniLM-L6-v2",
    "bfloat16",
    "float64",
    "Micro-batches of 8",
    "p <= 0.05",
    "[![docs](https://img.shields.io/badge/docs-contaccum-blue)]",
    "![Python 3.11 to 3.13](https://img.shields.io/badge/python-3.11%20to%203.13-blue)",
    "![release: 0.1.0 is coming]"
    "(https://img.shields.io/badge/release-0.1.0%20is%20coming-lightgrey)",
    "Python 3.11 or newer",
    "in 5 to 30 minutes on a laptop",
    "--budget 30m",
    '{"_id": "d1", "text": "..."}',
    "Have 100 questions, better 500.",
    "fewer than 100 pairs",
    "a plain batch of 128",
    "bank_size=1024, pairs_per_update=128",
    "per_device_train_batch_size=8, gradient_accumulation_steps=16",
    "[NeurIPS 2024](https://arxiv.org/abs/2406.12356)",
    "Status: 0.1.0",
    "Apache-2.0",
)
"""Names, settings, versions and advice."""


def read(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / name).read_text(encoding="utf-8"))


def read_final_runs(data: str, entry: str) -> list[dict[str, Any]]:
    """Return the runs of an entry of the study by time at its rate, the only one with 3 seeds."""
    by_rate: dict[str, list[dict[str, Any]]] = {}
    for file in sorted((ROOT / "benchmarks" / "by_time" / data).glob(f"{entry}-*.json")):
        run = json.loads(file.read_text(encoding="utf-8"))
        by_rate.setdefault(run["rate"], []).append(run)
    [runs] = [runs for runs in by_rate.values() if len(runs) == 3]
    return runs


def make_gains() -> list[str]:
    """Return the table of the study by time, and the statements about gains."""
    sets = ("nqg", "medquad", "scifact")
    base = [100 * read(f"by_time/{data}/base.json")["scores"]["test"] for data in sets]
    statements = [f"| not trained | {' | '.join(f'{score:.1f}' for score in base)} |"]
    for entry, name in STUDY.items():
        columns = [name]
        for data in sets:
            values = [100 * run["scores"]["test"] for run in read_final_runs(data, entry)]
            columns.append(f"{fmean(values):.1f} ({stdev(values):.1f})")
        statements.append(f"| {' | '.join(columns)} |")
    for test in read("by_time/tests.json")["tests"]:
        if test["entry"] == "contaccum" and test["compared_with"] in STUDY:
            is_level = (test["compared_with"], test["data"]) == ("grad_cache", "scifact")
            assert (test["p_holm"] > 0.05) == is_level
    points = [
        100 * row["difference"]
        for row in read("quality/study_holm.json")["rows"]
        if row["pair"] == "contaccum:in_batch"
    ]
    return [*statements, f"adds {min(points):.0f} to {max(points):.0f} points"]


def make_time() -> str:
    """Return the statement about training time."""
    minutes = []
    for data in SETS:
        timings = read(f"by_time/{data}/seconds.json")["entries"]
        for entry in STUDY:
            updates = read_final_runs(data, entry)[0]["updates"]
            minutes.append(updates * timings[entry]["seconds_per_update"] / 60)
    return f"is trained for {min(minutes):.0f} to {max(minutes):.0f} minutes,"


def make_quickstart() -> list[str]:
    """Return the statements about the example, and the lines that it prints."""
    record = read("quickstart.json")
    split = record["split"]
    minutes = record["seconds"]["total"] / 60
    gigabytes = record["peak_memory_mb"] / 1024
    with (ROOT / "contaccum" / "data" / "medquad" / "medquad.csv").open(
        encoding="utf-8", newline=""
    ) as file:
        num_pairs = len(list(csv.DictReader(file)))
    return [
        f"{num_pairs:,} questions and answers of MedQuAD",
        f"On {CORES[record['cpu_cores']]} it takes {minutes:.0f} minutes and {gigabytes:.1f} GB of "
        "memory",
        f"held out: {split['dev']} dev and {split['test']} test queries on new documents; "
        f"{split['train']:,} queries to train on",
        record["verdict"]["line"],
        *record["lines"],
        *map(describe_candidate, record["candidates"]),
    ]


def describe_candidate(candidate: dict[str, Any]) -> str:
    """Return the line that `contaccum fit` prints of a candidate, without the best one so far."""
    name = candidate["name"] + (" with BM25" if candidate["bm25_weight"] > 0 else "")
    return f"{candidate['number']}. {name}: {candidate['scores']['mean']:.3f} on dev"


def make_fits() -> list[str]:
    """Return the rows of the table of `contaccum fit`, and the statements about it."""
    fits: dict[tuple[str, str], list[dict[str, Any]]] = {}
    cells = [cell for cell in read("fit.json")["cells"] if cell["data"] in FITTED_SETS]
    for cell in cells:
        budgets = [each["budget_seconds"] for each in cells if each["data"] == cell["data"]]
        if cell["budget_seconds"] == max(budgets):
            for kind in cell["verdicts"]:
                fits.setdefault((cell["data"], kind), []).append(cell)
    statements = []
    minutes = []
    for (data, kind), cells in fits.items():
        scores = {}
        for system in ("base", "base_with_bm25", "trained_with_bm25"):
            rows = [cell["scores"][system] for cell in cells]
            scores[system] = [100 * row.get(kind, row["NDCG@10"]) for row in rows]
        free, trained = scores["base_with_bm25"], scores["trained_with_bm25"]
        gains = [after - before for before, after in zip(free, trained, strict=True)]
        words = Counter(cell["verdicts"][kind]["word"] for cell in cells)
        columns = [
            f"{data}, {kind}",
            f"{fmean(free):.1f}",
            f"{fmean(trained):.1f}",
            f"{fmean(gains):+.1f} ({stdev(gains):.1f})",
            ", ".join(f"{number} {word}" for word, number in sorted(words.items())),
        ]
        statements.append(f"| {' | '.join(columns)} |")
        if data == "pubmedqa":
            statements.append(f"has {fmean(scores['base']):.0f} of 100 already, as on PubMedQA")
        minutes += [cell["budget_seconds"] / 60 for cell in cells]
        assert all(sum(cell["split"][part] for part in SPLIT_PARTS) < 2050 for cell in cells)
    statements.append(
        f"some 2,000 questions or fewer, given {min(minutes):.0f} to {max(minutes):.0f} minutes"
    )
    return statements


def make_memory() -> list[str]:
    """Return all rows that the table of memory may have, and the statement above it."""
    record = read("gpu/update_time.json")
    sizes = record["result"]["sizes"]
    statements = [
        f"a bank of {sizes['bank_size']:,}, in bfloat16, questions of {sizes['query_length']} and "
        f"passages of {sizes['passage_length']} tokens",
        f"[an {record['device']['name'].removeprefix('NVIDIA ')}]",
    ]
    for case in record["result"]["cases"].values():
        measured = case["methods"]["contaccum"]
        memory = f"{measured['peak_mb'] / 1024:.1f} GB"
        speed = f"{measured['pairs_per_second']:,.0f}"
        statements.append(f"| {MODELS[case['backbone']]} | {case['local']} | {memory} | {speed} |")
    return statements


def test_every_number_is_in_a_record_or_measures_nothing():
    """README without the statements that the records make, and without NOT_MEASURED, has no digit.

    Words are separated by single spaces.
    """
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    statements = [*make_gains(), make_time(), *make_quickstart()]
    statements += make_fits() + make_memory()
    for statement in [*statements, *NOT_MEASURED]:
        text = text.replace(statement, "")
    assert re.findall(r"\S*\d\S*", text) == []
