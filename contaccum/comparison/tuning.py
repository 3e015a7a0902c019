"""Tuning of one setting in `contaccum compare`: the best value for each group, on dev data.

A group has the runs of one method or variant in one cell of the grid. Every group starts with the
same values. While the best value of a group is the smallest or the largest one that was tried, one
more value is tried beyond it (see `contaccum.tuning.ladder`). The next values depend only on the
scores, so the same command tries the same values again. The data on which the final runs are scored
are not used here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from contaccum.comparison.options import refuse_reserved_keys
from contaccum.comparison.plan import Group, Plan, add_setting, select_tunable_groups
from contaccum.comparison.summary import MAIN_METRIC, METRICS, Results, average_by_query
from contaccum.errors import ConfigError
from contaccum.tuning.choice import compare_scores
from contaccum.tuning.ladder import Scores, choose_value, next_values

_MIN_FACTOR = 1.1  # values that differ by a smaller factor would be equal after rounding


class Ladder(NamedTuple):
    """The setting that is tuned, and the values to try.

    Attributes:
        key: the name of the setting.
        values: the values that every group tries, as text.
        factor: the ratio between the smallest or largest value and a value beyond it.
        max_values: the largest number of values that a group tries.
        seeds: the seeds of the runs of each value.
    """

    key: str
    values: Sequence[str]
    factor: float
    max_values: int
    seeds: Sequence[int]


def read_ladder(
    plan: Plan,
    text: str | None,
    factor: float,
    max_values: int,
    seeds: Sequence[int] | None,
) -> Ladder:
    """Parse ``--tune key=value,value`` and check the other options of tuning.

    Args:
        plan: the plan of the comparison.
        text: the argument of ``--tune``; None if it is missing.
        factor, max_values: see `Ladder`.
        seeds: the seeds of the runs of each value; None: the first seed of the plan.

    Raises:
        ConfigError: for a missing or wrong argument, or a setting that cannot be tuned.
    """
    if text is None:
        raise ConfigError(
            "--tune_data without --tune: no setting would be tuned. Add a setting with its values, "
            "such as --tune learning_rate=1e-4,3e-4"
        )
    key, _, value_text = text.partition("=")
    try:
        # By number, so that 1e-4 and 0.0001 count once.
        values = {float(value): value for value in value_text.split(",")}
    except ValueError:
        values = {}
    is_positive = all(0 < value < math.inf for value in values)
    if len(values) < 2 or not is_positive:
        raise ConfigError(f"--tune {text}: write key=value,value with two positive numbers or more")
    if key in plan.grid:
        raise ConfigError(f"--tune {key} with --grid {key}: drop one of them")
    if not _MIN_FACTOR <= factor < math.inf:
        raise ConfigError(f"--tune_factor must be at least {_MIN_FACTOR}, got {factor}")
    refuse_reserved_keys([key])
    distinct_seeds = list(dict.fromkeys(seeds or plan.seeds[:1]))
    return Ladder(key, list(values.values()), factor, max_values, distinct_seeds)


class TuningResult(NamedTuple):
    """The scores of all values that were tried.

    Attributes:
        scores: {group: {value as text: its mean score on dev, None if a run failed}}.
        query_scores: {group: {value as text: {query: its score, averaged over seeds}}} for the
            values whose runs have all finished.
        failed: {name of the run: why it failed}.
    """

    scores: dict[str, dict[str, float | None]]
    query_scores: dict[str, dict[str, dict[str, float]]]
    failed: dict[str, str]


class _Candidate(NamedTuple):
    """A value to try for a group.

    Attributes:
        group: the name of the group that is tuned.
        value: the value, as text.
        tuning_group: the group with the value added to its options and to its name.
    """

    group: str
    value: str
    tuning_group: Group


def tune_groups(
    plan: Plan, ladder: Ladder, train: Callable[[Plan], tuple[Results, dict[str, str]]]
) -> TuningResult:
    """Tune all groups that use the setting, in rounds.

    A round has the runs that every group needs next, so that they can run at the same time.

    Args:
        plan: the plan of the comparison.
        ladder: the setting and its values.
        train: a function that does the missing runs of a plan, and returns {name of the run:
            result} and {name of the run: why it failed}.
    """
    tuning = TuningResult({}, {}, {})
    for group in select_tunable_groups(plan, ladder.key):
        tuning.scores[group.name] = {}
        tuning.query_scores[group.name] = {}
    while True:
        candidates = _select_candidates(plan, ladder, tuning)
        if not candidates:
            return tuning
        groups = {}
        for candidate in candidates:
            groups[candidate.tuning_group.name] = candidate.tuning_group
        results, failed = train(plan._replace(seeds=ladder.seeds, groups=groups))
        for run_name, reason in failed.items():
            tuning.failed[f"tune/{run_name}"] = reason
        for name, value, tuning_group in candidates:
            tuning.scores[name][value] = None
            runs = []
            for seed in ladder.seeds:
                run_name = tuning_group.run_name(seed)
                if run_name in results:
                    runs.append(results[run_name])
            if len(runs) == len(ladder.seeds):
                tuning.scores[name][value] = _average_score(runs)
                tuning.query_scores[name][value] = _average_query_scores(runs)


def _select_candidates(plan: Plan, ladder: Ladder, tuning: TuningResult) -> list[_Candidate]:
    """Return the values to try next in all groups; empty if all ladders are complete."""
    candidates = []
    for name, scores in tuning.scores.items():
        for value in next_values(ladder.values, ladder.factor, ladder.max_values, scores):
            try:
                tuning_group = add_setting(plan.groups[name], ladder.key, value)
            except ConfigError:
                if value in ladder.values:
                    raise
                # A value beyond those of the user may be impossible, such as half a hard negative.
                # Without a score it ends the ladder.
                scores[value] = None
                continue
            candidates.append(_Candidate(name, value, tuning_group))
    return candidates


def _average_score(runs: Sequence[Mapping[str, Any]]) -> float:
    """Return the mean of the main metric over runs and data sets."""
    scores = []
    for run in runs:
        for evaluation in run["evaluations"].values():
            scores.append(evaluation["metrics"][MAIN_METRIC])
    return fmean(scores)


def _average_query_scores(runs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return {data set and query: mean of the main metric over runs}."""
    scores = {}
    for data in runs[0]["evaluations"]:
        evaluations = [run["evaluations"][data] for run in runs]
        for query, score in average_by_query(evaluations, MAIN_METRIC).items():
            scores[f"{data} {query}"] = score
    return scores


def summarize_tuning(
    plan: Plan, ladder: Ladder, tuning: TuningResult, sets: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the part of report.json on the tuning.

    It has the ladder, all values that were ``tried`` and the dev data. For each group it has the
    scores, the ``chosen`` value, the name of the ``final`` group with this value, and under
    ``worst`` the comparison of the chosen value with the value that has the lowest score.

    Args:
        sets: the descriptions of the dev data sets.
    """
    groups = {}
    all_values = set()
    for name, scores in tuning.scores.items():
        group = plan.groups[name]
        chosen = choose_value(scores)
        final_name = None
        if chosen is not None:
            final_name = add_setting(group, ladder.key, chosen).name
        ordered_values = sorted(scores, key=float)
        all_values.update(ordered_values)
        groups[name] = {
            "entry": group.entry,
            "labels": dict(group.labels),
            "scores": {value: scores[value] for value in ordered_values},
            "chosen": chosen,
            "at_end": chosen in (ordered_values[0], ordered_values[-1]),
            "worst": _compare_with_worst(chosen, scores, tuning.query_scores[name]),
            "final": final_name,
        }
    return {
        "key": ladder.key,
        "values": ladder.values,
        "factor": ladder.factor,
        "most": ladder.max_values,
        "seeds": ladder.seeds,
        "metric": METRICS[MAIN_METRIC],
        "tried": sorted(all_values, key=float),
        "data": list(sets),
        "groups": groups,
    }


def _compare_with_worst(
    chosen: str | None, scores: Scores, query_scores: Mapping[str, Mapping[str, float]]
) -> dict[str, Any] | None:
    """Compare the chosen value with the value that has the lowest score, by a paired bootstrap.

    Returns:
        None if no other value was scored.
    """
    other_scores = {}
    for value, score in scores.items():
        if score is not None and value != chosen:
            other_scores[value] = score
    if chosen is None or not other_scores:
        return None
    worst = min(other_scores, key=other_scores.__getitem__)
    return {"value": worst, **compare_scores(query_scores[chosen], query_scores[worst])}
