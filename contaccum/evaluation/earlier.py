"""Comparing an evaluation with an earlier one, query by query: which is better, by how much, and on which queries.

Earlier results are records of one set, or summaries of several, as `contaccum evaluate` writes them. Only results on
the same data are compared. Nothing is encoded or searched here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from contaccum.data.beir_names import CQADUPSTACK_FORUMS
from contaccum.data.records import one_line
from contaccum.errors import DataError
from contaccum.evaluation.results import read_result
from contaccum.evaluation.significance import holm, paired_bootstrap
from contaccum.evaluation.table import aligned, markdown_table

RESAMPLES = 10_000
SEED = 0
QUERIES_SHOWN = 5
# Scores of a metric that differ at all differ by more.
_TIE = 1e-9

Scores = dict[str, float]  # query id -> score


@dataclass(frozen=True)
class DataIdentity:
    """Which data a result is of. `name` is the table's; `row` the row that it belongs to."""

    name: str
    row: str
    split: str
    fingerprint: str


@dataclass(frozen=True)
class Earlier:
    """An earlier result, as far as it is compared. `scores` are of `metric`, by the name of our data set."""

    path: Path
    metric: str
    scores: Mapping[str, Scores]
    left_out: Sequence[str]


def read_earlier(path: Path, ours: Sequence[DataIdentity], metric: str) -> Earlier:
    """The scores of an earlier result on the sets of this evaluation.

    Raises:
        DataError: no result, none of our data sets, one of the same name and split with other content, or a result
            without this metric.
    """
    scores: dict[str, Scores] = {}
    left_out: list[str] = []
    for file in record_files(path):
        record = read_result(file)
        theirs = record["data"]
        about = f"{theirs.get('name')} {theirs.get('split')} (fingerprint {str(theirs.get('fingerprint'))[:12]})"
        # Two sets may hold the same; names tell which is meant, and are free to have changed since.
        alike = [data for data in ours if data.fingerprint == theirs.get("fingerprint")]
        same = next((data for data in alike if _named_alike(data, theirs)), alike[0] if alike else None)
        if same is None:
            namesake = next((d for d in ours if _named_alike(d, theirs)), None)
            if namesake is not None:
                raise DataError(
                    one_line(
                        f"{file}: is on other data: {about}, and this evaluation on {namesake.name} {namesake.split} "
                        f"(fingerprint {namesake.fingerprint[:12]}) (compare results of the same data)"
                    )
                )
            left_out.append(about)
            continue
        try:
            scores[same.name] = {query: float(values[metric]) for query, values in record["per_query"].items()}
        except (KeyError, TypeError, ValueError, AttributeError):
            raise DataError(
                f"{file}: has no {metric} of every query (name another as the first of --metrics, or evaluate again)"
            ) from None
    if not scores:
        here = ", ".join(f"{d.name} {d.split} (fingerprint {d.fingerprint[:12]})" for d in ours[:3])
        raise DataError(
            one_line(f"{path}: is on other data: {', '.join(left_out[:3])}; here: {here} (compare results of the same)")
        )
    return Earlier(path, metric, scores, left_out)


def _named_alike(data: DataIdentity, theirs: Mapping[str, Any]) -> bool:
    return theirs.get("split") == data.split and theirs.get("name") == data.name.rpartition("/")[2]


def record_files(path: Path) -> list[Path]:
    """The record that `path` is, or those that a summary lists, beside which they lie."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(one_line(f"{path}: not a results file that can be read ({error})")) from error
    if not isinstance(content, dict) or "sets" not in content:
        return [path]
    try:
        parts = [part for row in content["sets"] for part in row.get("parts", [row])]
        return [path.parent / Path(part["file"]).name for part in parts]
    except (TypeError, KeyError, AttributeError) as error:
        raise DataError(f"{path}: not a summary that `contaccum evaluate` wrote ({error!r})") from error


def compare(ours: Mapping[str, Scores], earlier: Earlier, sets: Sequence[DataIdentity]) -> dict[str, Any]:
    """Per row of the table: both means, their difference with a paired bootstrap, and the queries that it is made of.

    A row of several parts compares means over the parts: queries are weighted so that each part counts alike. Holm's
    correction is over the rows. Positive differences are in favour of `ours`.

    Raises:
        DataError: the two have scores of different queries.
    """
    rows = []
    for name, members in _rows(sets, earlier).items():
        mine, theirs, weights = [], [], []
        for member in members:
            a, b = ours[member], earlier.scores[member]
            if a.keys() != b.keys():
                raise DataError(f"{earlier.path}: has scores of other queries on {member} (evaluate it again)")
            prefix = f"{member.rpartition('/')[2]}/" if len(members) > 1 else ""
            mine += [(prefix + query, score) for query, score in a.items()]
            theirs += [b[query] for query in a]
            weights += [1.0 / (len(members) * len(a))] * len(a)
        rows.append({"data": name, **_row(mine, theirs, weights)})
    for row, p in zip(rows, holm([row["p_value"] for row in rows]), strict=True):
        row["p_holm"] = p
    return {
        "earlier": str(earlier.path),
        "metric": earlier.metric,
        "resamples": RESAMPLES,
        "seed": SEED,
        "rows": rows,
        "left_out": list(earlier.left_out),
    }


def _rows(sets: Sequence[DataIdentity], earlier: Earlier) -> dict[str, list[str]]:
    """{row: names of its sets}, of those that both have; a row of which the earlier lacks parts falls apart."""
    rows: dict[str, list[str]] = {}
    for data in sets:
        rows.setdefault(data.row, []).append(data.name)
    found: dict[str, list[str]] = {}
    for row, members in rows.items():
        both = [name for name in members if name in earlier.scores]
        if len(both) == len(members) and len(members) in (1, len(CQADUPSTACK_FORUMS)):
            found[row] = both
        else:
            found |= {name: [name] for name in both}
    return found


def _row(mine: Sequence[tuple[str, float]], theirs: Sequence[float], weights: Sequence[float]) -> dict[str, Any]:
    n = len(mine)
    # Scaled so that the plain mean over all queries is the mean over the parts.
    a = [score * weight * n for (_, score), weight in zip(mine, weights, strict=True)]
    b = [score * weight * n for score, weight in zip(theirs, weights, strict=True)]
    changes = [(score - other, query, score, other) for (query, score), other in zip(mine, theirs, strict=True)]
    # Rounded, so that equal changes are in the order of their queries.
    gains = sorted((c for c in changes if c[0] > _TIE), key=lambda c: (-round(c[0], 9), c[1]))
    losses = sorted((c for c in changes if c[0] < -_TIE), key=lambda c: (round(c[0], 9), c[1]))
    return {
        "queries": n,
        "ours": fmean(a),
        "earlier": fmean(b),
        **paired_bootstrap(a, b, RESAMPLES, SEED)._asdict(),
        "wins": len(gains),
        "ties": n - len(gains) - len(losses),
        "losses": len(losses),
        "greatest_gains": [_change(c) for c in gains[:QUERIES_SHOWN]],
        "greatest_losses": [_change(c) for c in losses[:QUERIES_SHOWN]],
    }


def _change(change: tuple[float, str, float, float]) -> dict[str, Any]:
    difference, query, ours, earlier = change
    return {"query": query, "difference": difference, "ours": ours, "earlier": earlier}


# What is shown ---------------------------------------------------------------------------------------------------

_HEADER = ["data", "ours", "earlier", "difference", "95% interval", "p", "p (Holm)", "wins", "ties", "losses"]


def as_text(comparison: Mapping[str, Any]) -> str:
    """What the terminal shows of `compare`."""
    lines = [f"{comparison['metric']} against {comparison['earlier']}", aligned(_HEADER, _cells(comparison))]
    return "\n".join([*lines, *_queries(comparison), *_left_out(comparison)])


def as_markdown(comparison: Mapping[str, Any]) -> list[str]:
    """The same as lines of a page."""
    return [
        f"## {comparison['metric']} against {comparison['earlier']}",
        "",
        *markdown_table(_HEADER, _cells(comparison)),
        "",
        *(f"- {line}" for line in (*_queries(comparison), *_left_out(comparison))),
        f"- paired bootstrap over queries, {comparison['resamples']:,} resamples, two-sided; Holm's correction over "
        "the rows",
    ]


def _cells(comparison: Mapping[str, Any]) -> list[list[Any]]:
    return [
        [
            row["data"],
            row["ours"],
            row["earlier"],
            f"{row['difference']:+.4f}",
            f"{row['low']:+.4f} to {row['high']:+.4f}",
            *("<0.001" if row[p] < 0.001 else f"{row[p]:.3f}" for p in ("p_value", "p_holm")),
            *(str(row[key]) for key in ("wins", "ties", "losses")),
        ]
        for row in comparison["rows"]
    ]


def _queries(comparison: Mapping[str, Any]) -> list[str]:
    lines = []
    for row in comparison["rows"]:
        for key, what in (("greatest_gains", "greatest gains"), ("greatest_losses", "greatest losses")):
            if row[key]:
                shown = ", ".join(f"{c['query']} {c['difference']:+.4f}" for c in row[key])
                lines.append(one_line(f"{row['data']}, {what}: {shown}"))
    return lines


def _left_out(comparison: Mapping[str, Any]) -> list[str]:
    return [one_line(f"not compared, since only the earlier has it: {about}") for about in comparison["left_out"]]
