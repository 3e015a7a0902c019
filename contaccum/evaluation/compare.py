"""Comparing an evaluation with a previous one, query by query: which is better, by how much, and on which queries.

A previous result is a record of one set or a table of several, by this version of ``contaccum evaluate`` or by one
before. Only results on the same data are compared. Nothing is encoded or searched here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from contaccum.data import CQADUPSTACK_FORUMS
from contaccum.errors import DataError
from contaccum.evaluation.beir import EvaluationSet
from contaccum.evaluation.metrics import holm, paired_bootstrap
from contaccum.evaluation.results import read_result, result_files
from contaccum.evaluation.tables import Section

RESAMPLES = 10_000
SEED = 0
QUERIES_SHOWN = 5

Scores = Mapping[str, float]
"""{query id: score}"""


@dataclass(frozen=True)
class PreviousResult:
    """A previous result: its scores of one metric by the label of our data set, and what only it has."""

    path: Path
    metric: str
    scores: Mapping[str, Scores]
    left_out: Sequence[str]


def read_previous(path: Path, sets: Sequence[EvaluationSet], metric: str) -> PreviousResult:
    """The scores of a previous result on the sets of this evaluation.

    Raises:
        DataError: no result, none of our data sets, one of the same name and split with other content, or a result
            without this metric.
    """
    scores: dict[str, Scores] = {}
    left_out: list[str] = []
    for file in result_files(path):
        record = read_result(file)
        theirs = record["data"]
        about = f"{theirs.get('name')} {theirs.get('split')} (fingerprint {str(theirs.get('fingerprint'))[:12]})"
        namesakes = [one for one in sets if _same_name(one, theirs)]
        # Two sets may hold the same texts; names decide which is meant, and are free to have changed since.
        alike = [one for one in (*namesakes, *sets) if one.fingerprint == theirs.get("fingerprint")]
        if not alike and namesakes:
            raise DataError(
                f"{file}: is on other data: {about}, and this evaluation on {_about(namesakes[0])} (compare results of "
                "the same data)"
            )
        if not alike or (alike[0].label in scores and not namesakes):
            left_out.append(about)
            continue
        scores[alike[0].label] = scores_of(record, metric, file)
    if not scores:
        here = ", ".join(map(_about, sets[:3]))
        raise DataError(
            f"{path}: is on other data: {', '.join(left_out[:3])}; here: {here} (compare results of the same)"
        )
    return PreviousResult(path, metric, scores, left_out)


def scores_of(record: Mapping[str, Any], metric: str, path: Path) -> Scores:
    """A metric of every query of a result; raises `DataError` where some have none."""
    try:
        return {query: float(values[metric]) for query, values in record["per_query"].items()}
    except (KeyError, TypeError, ValueError):
        what = f"has no {metric} of every query"
        raise DataError(f"{path}: {what} (name another as the first of --metrics, or evaluate again)") from None


def compare(ours: Mapping[str, Scores], previous: PreviousResult, sets: Sequence[EvaluationSet]) -> dict[str, Any]:
    """Per row of the table: both means, their difference with a paired bootstrap, and the queries that it is made of.

    A row of several parts compares means over the parts: queries are weighted so that each part counts alike. Holm's
    correction is over the rows. Positive differences are in favour of ``ours`` {label: scores}.

    Raises:
        DataError: the two have scores of different queries.
    """
    rows = []
    for name, labels in _rows(sets, previous).items():
        mine: dict[str, float] = {}
        theirs: dict[str, float] = {}
        weights: list[float] = []
        for label in labels:
            if ours[label].keys() != previous.scores[label].keys():
                raise DataError(f"{previous.path}: has scores of other queries on {label} (evaluate it again)")
            prefix = f"{label.rpartition('/')[2]}/" if len(labels) > 1 else ""
            mine |= {prefix + query: score for query, score in ours[label].items()}
            theirs |= {prefix + query: score for query, score in previous.scores[label].items()}
            weights += [1.0 / (len(labels) * len(ours[label]))] * len(ours[label])
        rows.append({"data": name, **compare_queries(mine, theirs, weights)})
    for row, p in zip(rows, holm([row["p_value"] for row in rows]), strict=True):
        row["p_holm"] = p
    about = {"earlier": str(previous.path), "metric": previous.metric, "resamples": RESAMPLES, "seed": SEED}
    return {**about, "rows": rows, "left_out": list(previous.left_out)}


def compare_queries(
    ours: Scores, theirs: Scores, weights: Sequence[float] | None = None, shown: int = QUERIES_SHOWN
) -> dict[str, Any]:
    """Two results over the same queries: means, a paired bootstrap, wins, ties and losses, and the greatest changes.

    Args:
        weights: of the queries of ``ours``, in their order, summing to 1; None: all alike.
        shown: how many gains, and how many losses.
    """
    n = len(ours)
    # Scaled so that the plain mean over all queries is the weighted one.
    scale = [weight * n for weight in weights] if weights else [1.0] * n
    a = [score * x for score, x in zip(ours.values(), scale, strict=True)]
    b = [theirs[query] * x for query, x in zip(ours, scale, strict=True)]
    # Rounded, so that what differs in the last bits is a tie, and equal changes are in the order of their queries.
    changes: list[dict[str, Any]] = [
        {"query": query, "difference": round(score - theirs[query], 9), "ours": score, "earlier": theirs[query]}
        for query, score in ours.items()
    ]
    gains = sorted((c for c in changes if c["difference"] > 0), key=lambda c: (-c["difference"], c["query"]))
    losses = sorted((c for c in changes if c["difference"] < 0), key=lambda c: (c["difference"], c["query"]))
    return {
        "queries": n,
        "ours": fmean(a),
        "earlier": fmean(b),
        **paired_bootstrap(a, b, RESAMPLES, SEED)._asdict(),
        "wins": len(gains),
        "ties": n - len(gains) - len(losses),
        "losses": len(losses),
        "greatest_gains": gains[:shown],
        "greatest_losses": losses[:shown],
    }


def section(comparison: Mapping[str, Any]) -> Section:
    """What the terminal and the page show of :func:`compare`."""
    notes = []
    for row in comparison["rows"]:
        for key in ("greatest_gains", "greatest_losses"):
            if row[key]:
                shown = ", ".join(f"{c['query']} {c['difference']:+.4f}" for c in row[key])
                notes.append(f"{row['data']}, {key.replace('_', ' ')}: {shown}")
    notes += [f"not compared, since only the earlier has it: {about}" for about in comparison["left_out"]]
    return Section(
        f"{comparison['metric']} against {comparison['earlier']}",
        ["data", "ours", "earlier", "difference", "95% interval", "p", "p (Holm)", "wins", "ties", "losses"],
        [_cells(row) for row in comparison["rows"]],
        [" ".join(note.split()) for note in notes],  # ids may hold line ends
        [f"paired bootstrap over queries, {RESAMPLES:,} resamples, two-sided; Holm's correction over the rows"],
    )


def _same_name(one: EvaluationSet, theirs: Mapping[str, Any]) -> bool:
    return theirs.get("split") == one.split and theirs.get("name") == one.label.rpartition("/")[2]


def _about(one: EvaluationSet) -> str:
    return f"{one.label} {one.split} (fingerprint {one.fingerprint[:12]})"


def _rows(sets: Sequence[EvaluationSet], previous: PreviousResult) -> dict[str, list[str]]:
    """{row: labels of its sets}, of those that both have; parts of a row that is not whole are rows of their own."""
    rows: dict[str, list[str]] = {}
    for one in sets:
        rows.setdefault(one.row, []).append(one.label)
    found: dict[str, list[str]] = {}
    for row, labels in rows.items():
        both = [label for label in labels if label in previous.scores]
        whole = len(both) == len(labels) and len(labels) in (1, len(CQADUPSTACK_FORUMS))
        found |= {row: both} if whole else {label: [label] for label in both}
    return found


def _cells(row: Mapping[str, Any]) -> list[Any]:
    interval = f"{row['low']:+.4f} to {row['high']:+.4f}"
    p = ["<0.001" if row[key] < 0.001 else f"{row[key]:.3f}" for key in ("p_value", "p_holm")]
    counts = (row[key] for key in ("wins", "ties", "losses"))
    return [row["data"], row["ours"], row["earlier"], f"{row['difference']:+.4f}", interval, *p, *counts]
