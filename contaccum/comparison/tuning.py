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
from contaccum.comparison.summary import METRICS, Results
from contaccum.errors import ConfigError

Scores = Mapping[str, float | None]
"""{value as text: its mean score on dev}, None where a run of it failed."""


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


def read_ladder(plan: Plan, given: str | None, factor: float, most: int, seeds: Sequence[int] | None) -> Ladder:
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
        raise ConfigError(f"--tune {given}: write key=value,value with two positive numbers or more")
    if key in plan.grid:
        raise ConfigError(f"--tune {key} with --grid {key}: drop one of them")
    if not 1.1 <= factor < math.inf:  # a smaller one would be lost in rounding
        raise ConfigError(f"--tune_factor must be at least 1.1, got {factor}")
    refuse_own([key])
    return Ladder(key, list(values.values()), factor, most, list(dict.fromkeys(seeds or plan.seeds[:1])))


def best_of(scores: Scores) -> str | None:
    """The value that scores highest; of equal ones one inside what was tried, then the smallest. None: all failed."""
    tried = sorted(scores, key=float)
    found = [value for value in tried if scores[value] is not None]
    return max(found, key=lambda value: (scores[value], value not in (tried[0], tried[-1])), default=None)


def next_values(ladder: Ladder, scores: Scores) -> list[str]:
    """What a group needs yet: of the values given those that were not tried, else one beyond a best that is at an end.

    A value that failed is an end: nothing is tried beyond it.
    """
    missing = [value for value in ladder.values if value not in scores]
    best = best_of(scores)
    if missing or best is None or len(scores) >= ladder.most:
        return missing
    down, up = (float(best) == end(map(float, scores)) for end in (min, max))
    beyond = float(best) / ladder.factor if down else float(best) * ladder.factor
    return [f"{float(f'{beyond:.1e}'):.6g}".replace("e-0", "e-")] if down or up else []


def climb(
    plan: Plan, ladder: Ladder, train: Callable[[Plan], tuple[Results, dict[str, str]]]
) -> tuple[dict[str, dict[str, float | None]], dict[str, str]]:
    """Tune all groups, in rounds, each with the runs that every group still needs; returns scores and failures by name.

    Args:
        train: does what is missing of a plan; gives results and failures by name of the run.
    """
    scores: dict[str, dict[str, float | None]] = {group.name: {} for group in tunable(plan, ladder.key)}
    failed: dict[str, str] = {}
    main = next(iter(METRICS))
    while wanted := [(name, value) for name, tried in scores.items() for value in next_values(ladder, tried)]:
        rungs = [(name, value, with_value(plan.groups[name], ladder.key, value)) for name, value in wanted]
        results, lost = train(plan._replace(seeds=ladder.seeds, groups={group.name: group for *_, group in rungs}))
        failed |= {f"tune/{name}": why for name, why in lost.items()}
        for name, value, group in rungs:
            runs = [results.get(group.run(seed)) for seed in ladder.seeds]
            found = [one["metrics"][main] for run in runs if run for one in run["evaluations"].values()]
            scores[name][value] = fmean(found) if all(runs) else None
    return scores, failed


def about_tuning(
    plan: Plan, ladder: Ladder, scores: Mapping[str, Scores], sets: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """What a report says of it: the ladder, all values ``tried``, the data, each group's scores and chosen value."""
    groups = {}
    for name, tried in scores.items():
        group, chosen, ordered = plan.groups[name], best_of(tried), sorted(tried, key=float)
        groups[name] = {
            "entry": group.entry,
            "labels": dict(group.labels),
            "scores": {value: tried[value] for value in ordered},
            "chosen": chosen,
            "at_end": chosen in (ordered[0], ordered[-1]),
            "final": chosen and with_value(group, ladder.key, chosen).name,
        }
    tried_by_all = sorted({value for tried in scores.values() for value in tried}, key=float)
    metric = next(iter(METRICS.values()))
    return {**ladder._asdict(), "metric": metric, "tried": tried_by_all, "data": list(sets), "groups": groups}
