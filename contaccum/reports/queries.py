"""Two results query by query: how many were won and lost, by how much, and on which queries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from contaccum.evaluation.significance import holm, paired_bootstrap
from contaccum.reports.blocks import Block, Cell, Chart, Charts, Table, cell, p_value
from contaccum.reports.svg import difference_chart

RESAMPLES, SEED = 10_000, 0
SHOWN = 50
"""Gains, and losses, that are listed."""
HEADER = ("difference", "95% interval", "p", "p (Holm)", "wins", "ties", "losses")
NOTE = f"Paired bootstrap over queries, {RESAMPLES:,} resamples, two-sided; Holm's correction over the rows."

# Scores of a metric that differ at all differ by more.
_TIE = 1e-9

Scores = Mapping[str, float]


class Against(NamedTuple):
    """A result beside the one that it is compared with."""

    name: str
    scores: Scores
    baseline: str
    baseline_scores: Scores

    @property
    def changes(self) -> list[tuple[float, str]]:
        """(difference, query), greatest gain first."""
        found = [(score - self.baseline_scores[query], query) for query, score in self.scores.items()]
        return sorted(found, key=lambda change: (-round(change[0], 9), change[1]))


def compared(pairs: Sequence[Against]) -> list[list[Cell]]:
    """Cells under `HEADER` for each pair. Holm's correction is over all of them."""
    found = [
        paired_bootstrap([*pair.scores.values()], [pair.baseline_scores[q] for q in pair.scores], RESAMPLES, SEED)
        for pair in pairs
    ]
    corrected = holm([one.p_value for one in found])
    rows = []
    for pair, one, p_holm in zip(pairs, found, corrected, strict=True):
        changes = [difference for difference, _ in pair.changes]
        wins, losses = sum(x > _TIE for x in changes), sum(x < -_TIE for x in changes)
        interval = Cell(f"{one.low:+.4f} to {one.high:+.4f}", one.low, True)
        rows.append(
            [
                cell(one.difference, "+.4f"),
                interval,
                p_value(one.p_value),
                p_value(p_holm),
                *(cell(count) for count in (wins, len(changes) - wins - losses, losses)),
            ]
        )
    return rows


def query_blocks(pairs: Sequence[tuple[Against, str]], texts: Mapping[str, str]) -> list[Block]:
    """The differences of pairs by a metric as pictures, and the queries with the greatest ones as tables to filter."""
    charts, tables = [], []
    for pair, metric in pairs:
        found = _by_query(pair, metric, texts)
        if found is not None:
            charts.append(found[0])
            tables.append(found[1])
    return [Charts(charts), *tables] if charts else []


def _by_query(pair: Against, metric: str, texts: Mapping[str, str]) -> tuple[Chart, Table] | None:
    changes = pair.changes
    gains = [change for change in changes if change[0] > _TIE]
    losses = [change for change in changes if change[0] < -_TIE]
    if not gains and not losses:
        return None
    title = f"{pair.name} against {pair.baseline}, {metric} by query"
    svg = difference_chart([difference for difference, _ in changes], title)
    note = f"{len(gains):,} better, {len(changes) - len(gains) - len(losses):,} equal, {len(losses):,} worse"
    listed = [*gains[:SHOWN], *losses[-SHOWN:]]
    rows = [
        [
            cell(query),
            *([cell(texts.get(query, ""))] if texts else []),
            cell(float(pair.baseline_scores[query])),
            cell(float(pair.scores[query])),
            cell(difference, "+.4f"),
        ]
        for difference, query in listed
    ]
    header = ["query", *(["text"] if texts else []), pair.baseline, pair.name, "difference"]
    left_out = len(gains) + len(losses) - len(listed)
    told = f"The {SHOWN} greatest gains and losses; {left_out:,} others are left out." if left_out else ""
    table = Table(header, rows, f"{title}: greatest gains and losses", told, folded=True, filtered=True)
    return Chart(title, svg, note), table


def mean_over_seeds(by_seed: Sequence[Scores]) -> dict[str, float]:
    """Scores by query, averaged over runs that have the same queries."""
    return {query: fmean(scores[query] for scores in by_seed) for query in by_seed[0]}


def scores_of(record: Mapping[str, Any], metric: str) -> dict[str, float]:
    """{query id: score} of an evaluation's record."""
    return {str(query): float(values[metric]) for query, values in record["per_query"].items()}
