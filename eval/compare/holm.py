"""Compare entries of several studies in one table, with one Holm correction over all comparisons.

    python eval/compare/holm.py REPORT.json ... --pairs contaccum:grad_accum ... --output OUT

`compare.py` writes one folder per training data set, with a report and the results of its
runs. The results contain the score of each query. For each pair of entries, this program computes
the difference on the report's first data set. It averages the scores of a query over the seeds that
both entries have, and tests the difference with a sign-flip test over groups of queries. Holm's
correction is applied over all pairs of all reports. Instead of a report, you can pass an OUT.json
of an earlier call; its rows are added to the table.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

from comparison.report import average_by_query

from contaccum.errors import ConfigError, UserError
from contaccum.evaluation.metrics import add_holm, sign_flip_test
from contaccum.evaluation.results import markdown_table
from contaccum.files import provenance, read_json, write_json, write_text


def compare_entries(path: Path, pair: str, metric: str) -> dict[str, Any]:
    """Compare two entries of a report.

    Args:
        path: the report.
        pair: names of two entries or groups, ENTRY:ENTRY.
        metric: name of the metric.

    Returns:
        A row of the table: names, seeds, means, and the result of `sign_flip_test`, whose
        ``groups`` are groups of queries.

    Raises:
        UserError: an entry does not exist or has several groups, or results are missing.
    """
    report = read_json(path)
    training_data = path.resolve().parent.name
    names = [find_group(report, path, name) for name in pair.split(":")]
    if len(names) != 2:
        raise ConfigError(f"--pairs {pair}: write a pair as ENTRY:ENTRY")
    first_group, second_group = names
    evaluation_set = report["data"]["evaluation"][0]
    data = evaluation_set["name"]
    common_seeds = set(report["groups"][first_group]["seeds"])
    common_seeds &= set(report["groups"][second_group]["seeds"])
    if not common_seeds:
        raise ConfigError(
            f"{training_data} {pair}: the entries have no finished seed in common; "
            "run `compare.py` again"
        )
    seeds = sorted(common_seeds)
    first_scores = read_query_scores(path, first_group, seeds, data, metric)
    second_scores = read_query_scores(path, second_group, seeds, data, metric)
    test = sign_flip_test(first_scores, second_scores, evaluation_set["query_groups"])
    return {
        "report": str(path),
        "training": training_data,
        "data": data,
        "pair": pair,
        "compared": names,
        "seeds": seeds,
        "queries": len(first_scores),
        "means": [fmean(first_scores.values()), fmean(second_scores.values())],
        **test,
    }


def read_query_scores(
    report: Path, group: str, seeds: list[int], data: str, metric: str
) -> dict[str, float]:
    """Read the scores of a group by query, averaged over seeds."""
    evaluations = []
    for seed in seeds:
        result_file = report.parent / "runs" / f"{group}_seed-{seed}" / "result.json"
        evaluations.append(read_json(result_file)["evaluations"][data])
    return average_by_query(evaluations, metric)


def find_group(report: dict[str, Any], path: Path, name: str) -> str:
    """Return the group with this name, or the only group of the entry with this name."""
    matches = []
    for group_name, group in report["groups"].items():
        if name in (group_name, group["entry"]):
            matches.append(group_name)
    if not matches:
        raise ConfigError(f"{path}: {name} is no group; name one of: {', '.join(report['groups'])}")
    if len(matches) > 1:
        raise ConfigError(f"{path}: {name} has several groups; name one of: {', '.join(matches)}")
    return matches[0]


def make_rows(path: Path, pairs: list[str], metric: str) -> list[dict[str, Any]]:
    """Compare all pairs of a report, or read the rows of an earlier table with the same metric."""
    report = read_json(path)
    if "rows" not in report:
        return [compare_entries(path, pair, metric) for pair in pairs]
    if report["metric"] != metric:
        raise ConfigError(
            f"{path}: the metric of this table is {report['metric']}, not {metric}; set --metric"
        )
    return list(report["rows"])


def format_table(rows: list[dict[str, Any]]) -> str:
    """Format the rows as a markdown table."""
    header = ["training", "data", "entries", "means", "difference", "95% interval", "p"]
    header.append(f"p (Holm of {len(rows)})")
    cells = []
    for row in rows:
        first_mean, second_mean = row["means"]
        cells.append(
            [
                row["training"],
                row["data"],
                row["pair"].replace(":", " - "),
                f"{first_mean:.4f}, {second_mean:.4f}",
                f"{row['difference']:+.4f}",
                f"{row['low']:+.4f} to {row['high']:+.4f}",
                row["p_value"],
                row["p_holm"],
            ]
        )
    return markdown_table(header, cells)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "reports",
        nargs="+",
        type=Path,
        metavar="REPORT.json",
        help="reports of `compare.py`, or OUT.json files of earlier calls",
    )
    parser.add_argument(
        "--pairs",
        nargs="+",
        required=True,
        metavar="ENTRY:ENTRY",
        help="entries to compare; the difference is the first minus the second",
    )
    parser.add_argument("--metric", default="NDCG@10")
    parser.add_argument(
        "--output", required=True, metavar="OUT", help="write the table to OUT.md and OUT.json"
    )
    args = parser.parse_args()
    rows = []
    for path in args.reports:
        rows.extend(make_rows(path, args.pairs, args.metric))
    add_holm(rows)
    command = shlex.join(["python", *sys.argv])
    table = format_table(rows)
    record = {"command": command, "metric": args.metric, "rows": rows, **provenance()}
    write_json(f"{args.output}.json", record)
    write_text(f"{args.output}.md", f"`{command}`\n\n{args.metric}\n\n{table}\n")
    print(table)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        print(f"holm: error: {error}", file=sys.stderr)
        sys.exit(2)
