"""Compare entries of several studies in one table, with one Holm correction.

    python eval/study/holm.py REPORT.json ... --pairs contaccum:grad_accum ... --output OUT

Reads what `contaccum compare` left, a folder for each training data set: the report, and its runs' results, which hold
the scores of queries. A pair is the difference of two entries on the report's first data set, by paired bootstrap over
queries, scores averaged over the seeds that both have. Holm's correction is over all pairs of all reports. A table that
was written before can stand for reports: its rows are taken as they are.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

from contaccum.comparison.summary import average_by_query
from contaccum.errors import ConfigError, UserError
from contaccum.evaluation.metrics import add_holm, paired_bootstrap
from contaccum.evaluation.tables import markdown_table
from contaccum.files import provenance, read_json, write_json, write_text


def compare(path: Path, pair: str, metric: str) -> dict[str, Any]:
    """One row; raises `UserError` for an entry that is not there or has several groups, or results that are missing."""
    report = read_json(path)
    name = f"{path.resolve().parent.name} {pair}"
    groups = [_group(report, path, one) for one in pair.split(":")]
    if len(groups) != 2:
        raise ConfigError(f"{pair}: write ENTRY:ENTRY")
    data = report["data"]["evaluation"][0]["name"]
    seeds = sorted(set.intersection(*(set(report["groups"][group]["seeds"]) for group in groups)))
    if not seeds:
        raise ConfigError(f"{name}: no seed that both finished; run `contaccum compare` again")
    results = [
        [path.parent / "runs" / f"{group}_seed-{seed}" / "result.json" for seed in seeds]
        for group in groups
    ]
    ours, theirs = (
        average_by_query([read_json(file)["evaluations"][data] for file in files], metric)
        for files in results
    )
    row = {
        "report": str(path),
        "training": path.resolve().parent.name,
        "data": data,
        "pair": pair,
        "groups": groups,
    }
    row |= {
        "seeds": seeds,
        "queries": len(ours),
        "means": [fmean(x.values()) for x in (ours, theirs)],
    }
    return row | paired_bootstrap(list(ours.values()), [theirs[query] for query in ours])


def _rows(path: Path, pairs: list[str], metric: str) -> list[dict[str, Any]]:
    """Those of a report, or of a table with the same metric."""
    before = read_json(path)
    if "rows" not in before:
        return [compare(path, pair, metric) for pair in pairs]
    if before["metric"] != metric:
        raise ConfigError(f"{path}: its metric is {before['metric']}, not {metric}; give --metric")
    return list(before["rows"])


def _group(report: dict[str, Any], path: Path, given: str) -> str:
    """The group that is called so, or the only one of the entry that is."""
    found = [name for name, of in report["groups"].items() if given in (name, of["entry"])]
    if len(found) != 1:
        there = ", ".join(found or report["groups"])
        raise ConfigError(
            f"{path}: {given} is {'several groups' if found else 'no group'}; name one of: {there}"
        )
    return found[0]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "reports", nargs="+", type=Path, metavar="REPORT.json", help="or an OUT.json of before"
    )
    parser.add_argument(
        "--pairs", nargs="+", required=True, metavar="ENTRY:ENTRY", help="the second is taken away"
    )
    parser.add_argument("--metric", default="NDCG@10")
    parser.add_argument(
        "--output", required=True, metavar="OUT", help="OUT.md and OUT.json are written"
    )
    args = parser.parse_args()
    rows = [row for path in args.reports for row in _rows(path, args.pairs, args.metric)]
    add_holm(rows)
    command = shlex.join(["python", *sys.argv])
    header = [
        "training",
        "data",
        "entries",
        "means",
        "difference",
        "95% interval",
        "p",
        f"p (Holm of {len(rows)})",
    ]
    cells = [
        [
            *(
                row["training"],
                row["data"],
                row["pair"].replace(":", " - "),
                "{:.4f}, {:.4f}".format(*row["means"]),
            ),
            *(
                f"{row['difference']:+.4f}",
                f"{row['low']:+.4f} to {row['high']:+.4f}",
                row["p_value"],
                row["p_holm"],
            ),
        ]
        for row in rows
    ]
    write_json(
        f"{args.output}.json",
        {"command": command, "metric": args.metric, "rows": rows, **provenance()},
    )
    write_text(
        f"{args.output}.md", f"`{command}`\n\n{args.metric}\n\n{markdown_table(header, cells)}\n"
    )
    print(markdown_table(header, cells))


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        print(f"holm: error: {error}", file=sys.stderr)
        sys.exit(2)
