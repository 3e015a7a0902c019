"""One setting, chosen for each group by itself on dev data: values tried as on a ladder, which is climbed to its best.

Every group begins with the same values. While its best is the smallest or the largest of those tried, one more is
tried beyond it. That follows from scores alone, so that the same command tries the same again. Nothing here sees the
data that the final runs are scored on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from contaccum.comparison.plan import Plan, refuse_own, tunable, with_value
from contaccum.comparison.summary import METRICS, Results, by_query
from contaccum.errors import ConfigError
from contaccum.tuning.choice import compare_scores
from contaccum.tuning.ladder import Scores, best_of, next_values


class Ladder(NamedTuple):
    """What is tuned, and how far.

    Attributes:
        values: that every group tries, as text.
        factor: between the last value and one beyond it, which has two significant digits.
        most: values that a group tries.
    """

    key: str
    values: Sequence[str]
    factor: float
    most: int
    seeds: Sequence[int]


def read_ladder(
    plan: Plan, given: str | None, factor: float, most: int, seeds: Sequence[int] | None
) -> Ladder:
    """What was asked for with ``key=value,value``; raises `ConfigError` for what cannot be climbed."""
    if given is None:
        raise ConfigError(
            "--tune_data without --tune: it does nothing. Say what to tune, such as learning_rate=1e-4,3e-4"
        )
    key, _, text = given.partition("=")
    try:
        values = {float(value): value for value in text.split(",")}
    except ValueError:
        values = {}
    if len(values) < 2 or not all(0 < value < math.inf for value in values):
        raise ConfigError(
            f"--tune {given}: write key=value,value with two positive numbers or more"
        )
    if key in plan.grid:
        raise ConfigError(f"--tune {key} with --grid {key}: drop one of them")
    if not 1.1 <= factor < math.inf:  # a smaller one would be lost in rounding
        raise ConfigError(f"--tune_factor must be at least 1.1, got {factor}")
    refuse_own([key])
    return Ladder(
        key, list(values.values()), factor, most, list(dict.fromkeys(seeds or plan.seeds[:1]))
    )


class Climb(NamedTuple):
    """What the runs of tuning have found.

    Attributes:
        scores: {group: {value as text: its mean score on dev, None where a run failed}}.
        query_scores: {group: {value as text: {query: its score, averaged over seeds}}}, of values
            whose runs have all scored.
        failed: {name of the run: why}.
    """

    scores: dict[str, dict[str, float | None]]
    query_scores: dict[str, dict[str, dict[str, float]]]
    failed: dict[str, str]


def climb(
    plan: Plan, ladder: Ladder, train: Callable[[Plan], tuple[Results, dict[str, str]]]
) -> Climb:
    """Tune all groups, in rounds, each with the runs that every group still needs.

    Args:
        train: does what is missing of a plan; gives results and failures by name of the run.
    """
    names = [group.name for group in tunable(plan, ladder.key)]
    found = Climb({name: {} for name in names}, {name: {} for name in names}, {})
    while True:
        rungs = []
        for name, tried in found.scores.items():
            for value in next_values(ladder.values, ladder.factor, ladder.most, tried):
                rungs.append((name, value, with_value(plan.groups[name], ladder.key, value)))
        if not rungs:
            return found
        groups = {group.name: group for _, _, group in rungs}
        results, failed = train(plan._replace(seeds=ladder.seeds, groups=groups))
        found.failed.update({f"tune/{run}": why for run, why in failed.items()})
        for name, value, group in rungs:
            runs = [results[group.run(seed)] for seed in ladder.seeds if group.run(seed) in results]
            found.scores[name][value] = None
            if len(runs) == len(ladder.seeds):
                found.scores[name][value] = _mean_score(runs)
                found.query_scores[name][value] = _query_scores(runs)


def _mean_score(runs: Sequence[Mapping[str, Any]]) -> float:
    """Return the mean of the main metric over runs and data sets."""
    metric = next(iter(METRICS))
    scores = []
    for run in runs:
        for evaluation in run["evaluations"].values():
            scores.append(evaluation["metrics"][metric])
    return fmean(scores)


def _query_scores(runs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return {data set and query: its score by the main metric, averaged over runs}."""
    metric = next(iter(METRICS))
    scores = {}
    for data in runs[0]["evaluations"]:
        evaluations = [run["evaluations"][data] for run in runs]
        for query, score in by_query(evaluations, metric).items():
            scores[f"{data} {query}"] = score
    return scores


def about_tuning(
    plan: Plan, ladder: Ladder, found: Climb, sets: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return what a report says of the tuning.

    That is the ladder, all values ``tried``, the data, and of each group the scores, the chosen
    value, and ``worst``: how far the chosen value is from the one that scores lowest.
    """
    groups = {}
    for name, tried in found.scores.items():
        group = plan.groups[name]
        chosen = best_of(tried)
        ordered = sorted(tried, key=float)
        groups[name] = {
            "entry": group.entry,
            "labels": dict(group.labels),
            "scores": {value: tried[value] for value in ordered},
            "chosen": chosen,
            "at_end": chosen in (ordered[0], ordered[-1]),
            "worst": _compare_with_worst(chosen, tried, found.query_scores[name]),
            "final": chosen and with_value(group, ladder.key, chosen).name,
        }
    tried_by_all = sorted({value for tried in found.scores.values() for value in tried}, key=float)
    metric = next(iter(METRICS.values()))
    return {
        **ladder._asdict(),
        "metric": metric,
        "tried": tried_by_all,
        "data": list(sets),
        "groups": groups,
    }


def _compare_with_worst(
    chosen: str | None, scores: Scores, query_scores: Mapping[str, Mapping[str, float]]
) -> dict[str, Any] | None:
    """Compare the chosen value with the one that scores lowest, by a paired bootstrap over queries.

    Returns:
        None if nothing else has scored.
    """
    others = [value for value, score in scores.items() if score is not None and value != chosen]
    if chosen is None or not others:
        return None
    worst = min(others, key=lambda value: scores[value] or 0.0)
    return {"value": worst, **compare_scores(query_scores[chosen], query_scores[worst])}
