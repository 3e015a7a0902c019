"""Tuning of one setting: the best value for each group, on dev data.

Every group starts with the same values. While the best value of a group is the smallest or the
largest one that was tried, one more value beyond it is tried. The values to try next depend only on
the scores, so a search that was killed and started again tries the same values. The data on which
the final runs are scored are not used here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from comparison.plan import Group, add_setting, refuse_reserved_keys
from comparison.report import MAIN_METRIC
from comparison.run import Results
from contaccum.errors import ConfigError
from contaccum.settings import uses

FACTOR = 1.8
"""The ratio between the smallest or largest value and a value beyond it."""
MAX_VALUES = 12
"""The largest number of values that a group tries."""


class Ladder(NamedTuple):
    """The setting that is tuned, the values that every group tries, and the seed of the runs."""

    key: str
    values: Sequence[float]
    seed: int


def read_ladder(text: str, seed: int) -> Ladder:
    """Parse ``key=value,value`` to a ladder; raise `ConfigError` for fewer than two values."""
    key, _, value_text = text.partition("=")
    values = list(dict.fromkeys(float(value) for value in value_text.split(",")))
    if len(values) < 2 or min(values) <= 0:
        raise ConfigError(f"--tune {text}: write key=value,value with two positive numbers or more")
    refuse_reserved_keys([key])
    return Ladder(key, values, seed)


def tune_groups(
    groups: Sequence[Group],
    ladder: Ladder,
    train: Callable[[Sequence[Group]], tuple[Results, dict[str, str]]],
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Tune all groups that use the setting and have no value of their own for it, in rounds.

    A round has the runs that every group needs next, so that they can run at the same time.

    Args:
        train: a function that does the missing runs of groups, with the seed of the ladder. It
            returns {name of the run: result} and {name of the run: why it failed}.

    Returns:
        {name of the group: its tuning}, and {name of the run: why it failed}. A tuning has the
        ``entry``, the ``scores`` {value: its score on dev, None if the run failed}, the ``chosen``
        value, None if all failed, and ``at_end``.
    """
    tunable = {}
    for group in groups:
        if ladder.key not in group.overrides and uses(group.method, ladder.key):
            tunable[group.name] = group
    scores: dict[str, dict[float, float | None]] = {name: {} for name in tunable}
    all_failed: dict[str, str] = {}
    while True:
        candidates = []
        for name, tried in scores.items():
            for value in next_values(ladder.values, tried):
                tried[value] = None
                try:
                    candidate = add_setting(tunable[name], ladder.key, value)
                except ConfigError:
                    if value in ladder.values:
                        raise
                    # A value beyond those of the user may be impossible, such as half a hard
                    # negative. Without a score it ends the ladder.
                    continue
                candidates.append((name, value, candidate))
        if not candidates:
            break
        results, failed = train([candidate for _, _, candidate in candidates])
        all_failed |= {f"tune/{run_name}": reason for run_name, reason in failed.items()}
        for name, value, candidate in candidates:
            result = results.get(candidate.run_name(ladder.seed))
            if result is not None:
                evaluations = result["evaluations"].values()
                scores[name][value] = fmean(data["metrics"][MAIN_METRIC] for data in evaluations)
    tunings = {}
    for name, tried in scores.items():
        chosen = find_best_value(tried)
        tunings[name] = {
            "entry": tunable[name].entry,
            "scores": dict(sorted(tried.items())),
            "chosen": chosen,
            "at_end": chosen in (min(tried), max(tried)),
        }
    return tunings, all_failed


def next_values(values: Sequence[float], scores: Mapping[float, float | None]) -> list[float]:
    """Return the values to try next; empty if the ladder is complete.

    First all ``values`` are tried. Then, while the best value is the smallest or the largest one,
    one value beyond it is tried, rounded to two significant digits. A value without a score still
    counts as an end of the ladder, so no value beyond it is tried.

    Args:
        scores: {value: its score on dev} of the values that were tried; the score is None if the
            run failed.
    """
    untried_values = [value for value in values if value not in scores]
    if untried_values:
        return untried_values
    best = find_best_value(scores)
    if best not in (min(scores), max(scores)) or len(scores) >= MAX_VALUES:
        return []
    beyond = best / FACTOR if best == min(scores) else best * FACTOR
    return [float(f"{beyond:.1e}")]


def find_best_value(scores: Mapping[float, float | None]) -> float | None:
    """Return the value with the highest score; None if no value has a score.

    Of values with equal scores, one that is neither the smallest nor the largest is preferred, then
    the smaller one.
    """
    scored = {value: score for value, score in scores.items() if score is not None}
    ends = (min(scores), max(scores))
    return max(sorted(scored), key=lambda value: (scored[value], value not in ends), default=None)


def apply_chosen_values(
    groups: Sequence[Group], key: str, tunings: Mapping[str, Mapping[str, Any]]
) -> list[Group]:
    """Return the groups with their chosen values, without those whose tuning runs all failed."""
    tuned = []
    for group in groups:
        if group.name not in tunings:
            tuned.append(group)
        elif (chosen := tunings[group.name]["chosen"]) is not None:
            tuned.append(add_setting(group, key, chosen))
    return tuned
