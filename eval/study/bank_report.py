"""Tables of the study of the bank, from its reports in benchmarks/quality.

    python eval/study/bank_report.py

Rewrites the tables of docs/study.md.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from contaccum.evaluation.results import fill_page, markdown_table
from contaccum.files import read_json, write_text

ROOT = Path(__file__).resolve().parents[2]
REPORTS = ROOT / "benchmarks" / "quality"
DATA = ("arxiv", "nqg", "scifact", "medquad", "pubmedqa")
ENTRIES = {
    "grad_accum": "accumulation",
    "in_batch": "one batch of 128",
    "contaccum": "`contaccum`",
    "contaccum_cached": "`contaccum_cached`",
    "in_batch_512": "one batch of 512",
    "in_batch_1024": "one batch of 1,024",
}
PARTS = {
    "contaccum": "**`contaccum`** (`drift_compensation: auto`)",
    "contaccum_mean": "entries never retire, gradients are not centred (`mean`)",
    "contaccum_fresh": "without entries of past updates (`fresh`)",
    "pre_batch": "without the query bank (`pre_batch`)",
    "grad_accum": "without a bank",
    "pre_batch_mean": "`pre_batch` with `mean`",
    "pre_batch_mean_balanced": "the same, both gradient norms scaled to their geometric mean",
    "contaccum_paper": "both banks, as published (`none`)",
    "pre_batch_paper": "`pre_batch`, as published",
}
"""{entry of the report nqg_ablation.json: what the table calls it}."""


def make_score_table() -> str:
    """Return nDCG@10 of each method: mean and standard deviation over seeds, learning rate."""
    cells: dict[str, dict[str, str]] = {entry: {} for entry in ENTRIES}
    for data in DATA:
        report = read_json(REPORTS / f"study_{data}.json")
        test = report["data"]["evaluation"][0]["name"]
        for group in report["groups"].values():
            score = group["metrics"][test]["NDCG@10"]
            rate = f"{float(group['labels']['learning_rate']):.1e}".replace("e-0", "e-")
            text = f"{100 * score['mean']:.1f} ({100 * score['sd']:.1f}), {rate.replace('.0', '')}"
            cells[group["entry"]][data] = text
    rows = [[label, *(cells[entry].get(data) for data in DATA)] for entry, label in ENTRIES.items()]
    return markdown_table(["", *DATA], rows)


def make_difference_table() -> str:
    """Return the tested differences, with a star where p (Holm) is below 0.05."""
    cells: dict[str, dict[str, str]] = {}
    for row in read_json(REPORTS / "study_holm.json")["rows"]:
        low, high = 100 * row["low"], 100 * row["high"]
        star = "*" if row["p_holm"] < 0.05 else ""
        text = f"{100 * row['difference']:+.1f} ({low:+.1f} to {high:+.1f}){star}"
        cells.setdefault(row["pair"], {})[row["training"]] = text
    rows = []
    for pair, by_data in cells.items():
        entry, _, other = pair.partition(":")
        name = f"{ENTRIES[entry]} - {ENTRIES[other]}"
        rows.append([name, *(by_data.get(data) for data in DATA)])
    return markdown_table(["", *DATA], rows)


def make_part_table() -> str:
    """Return the effect of each part of the method on nqg."""
    report = read_json(REPORTS / "nqg_ablation.json")
    groups, test = report["groups"], report["data"]["evaluation"][0]["name"]
    rows = []
    for entry, label in PARTS.items():
        score = groups[entry]["metrics"][test]["NDCG@10"]["mean"]
        rows.append([label, f"{100 * score:.1f}", f"{groups[entry]['grad_norm_ratio']:.2f}"])
    return markdown_table(["", "nDCG@10", "`grad_norm_ratio`"], rows)


def main() -> None:
    """Write the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "study.md")
    args = parser.parse_args()
    tables = {
        "scores": make_score_table(),
        "differences": make_difference_table(),
        "parts": make_part_table(),
    }
    write_text(args.page, fill_page(args.page.read_text(encoding="utf-8"), tables))


if __name__ == "__main__":
    main()
