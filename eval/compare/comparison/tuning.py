"""Tuning of one setting: the best value for each group, on dev data.

Every group starts with the same values. While the best value of a group is the smallest or the
largest one that was tried, one more value is tried beyond it; see `comparison.ladder`.
The next values depend only on the scores, so the same command tries the same values again. The data
on which the final runs are scored are not used here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from comparison.ladder import find_best_value, next_values
from comparison.plan import Group, add_setting, is_tunable, refuse_reserved_keys
from comparison.report import MAIN_METRIC, average_by_query
from comparison.run import Results
from contaccum.errors import ConfigError
from contaccum.evaluation.metrics import sign_flip_test


class Ladder(NamedTuple):
    """The setting that is tuned, and the values to try.

    Attributes:
        key: the name of the setting.
        values: the values that every group tries, as text.
        factor: the ratio between the smallest or largest value and a value beyond it.
        max_values: the largest number of values that a group tries.
        seed: the seed of the runs.
    """

    key: str
    values: Sequence[str]
    factor: float
    max_values: int
    seed: int


def read_ladder(text: str, factor: float, max_values: int, seed: int) -> Ladder:
    """Parse ``key=value,value`` to a ladder; raise `ConfigError` for fewer than two values."""
    key, _, value_text = text.partition("=")
    # By number, so that 1e-4 and 0.0001 count once.
    values = {float(value): value for value in value_text.split(",")}
    if len(values) < 2 or min(values) <= 0 or factor < 1.1:
        raise ConfigError(f"--tune {text}: write key=value,value with two positive numbers or more")
    refuse_reserved_keys([key])
    return Ladder(key, list(values.values()), factor, max_values, seed)


def tune_groups(
    groups: Sequence[Group],
    ladder: Ladder,
    sets: Sequence[Mapping[str, Any]],
    train: Callable[[Sequence[Group]], tuple[Results, dict[str, str]]],
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Tune all groups that use the setting, in rounds.

    A round has the runs that every group needs next, so that they can run at the same time.

    Args:
        sets: the dev sets, as `describe_evaluation_sets` returns them.
        train: a function that does the missing runs of groups, with the seed of the ladder. It
            returns {name of the run: result} and {name of the run: why it failed}.

    Returns:
        {name of the group: its tuning}, and {name of the run: why it failed}. A tuning has the
        ``entry``, the ``scores`` {value: its score on dev, None if the run failed}, the ``chosen``
        value, ``at_end``, and under ``worst`` the comparison with the value of the lowest score.
    """
    scores: dict[str, dict[str, float | None]] = {}
    query_scores: dict[str, dict[str, dict[str, float]]] = {}
    for group in groups:
        if is_tunable(group, ladder.key):
            scores[group.name] = {}
            query_scores[group.name] = {}
    groups_by_name = {group.name: group for group in groups}
    all_failed: dict[str, str] = {}
    while True:
        candidates = []
        for name, tried in scores.items():
            for value in next_texts(ladder.values, ladder.factor, ladder.max_values, tried):
                tried[value] = None
                try:
                    candidate = add_setting(groups_by_name[name], ladder.key, value)
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
        for run_name, reason in failed.items():
            all_failed[f"tune/{run_name}"] = reason
        for name, value, candidate in candidates:
            result = results.get(candidate.run_name(ladder.seed))
            if result is not None:
                evaluations = result["evaluations"]
                scores[name][value] = fmean(
                    evaluation["metrics"][MAIN_METRIC] for evaluation in evaluations.values()
                )
                query_scores[name][value] = _join_query_scores(evaluations)
    query_groups = {}  # with the keys of `_join_query_scores`
    for data in sets:
        name = data["name"]
        for query, group in data["query_groups"].items():
            query_groups[f"{name} {query}"] = f"{name} {group}"
    tunings = {}
    for name, tried in scores.items():
        chosen = choose_value(tried)
        ordered = sorted(tried, key=float)
        tunings[name] = {
            "entry": groups_by_name[name].entry,
            "scores": {value: tried[value] for value in ordered},
            "chosen": chosen,
            "at_end": chosen in (ordered[0], ordered[-1]),
            "worst": _compare_with_worst(chosen, tried, query_scores[name], query_groups),
        }
    return tunings, all_failed


def next_texts(
    values: Sequence[str], factor: float, max_values: int, scores: Mapping[str, float | None]
) -> list[str]:
    """Return the values that `next_values` returns, as text: those of the user as they are."""
    texts = {float(text): text for text in (*values, *scores)}
    scores_by_value = {float(text): score for text, score in scores.items()}
    numbers = next_values([float(text) for text in values], factor, max_values, scores_by_value)
    return [texts.get(number, f"{number:.6g}".replace("e-0", "e-")) for number in numbers]


def choose_value(scores: Mapping[str, float | None]) -> str | None:
    """Return the value that `find_best_value` selects; None if no value has a score."""
    scored = {float(value): score for value, score in scores.items() if score is not None}
    if not scored:
        return None
    best = find_best_value(scored)
    return next(value for value in scores if float(value) == best)


def _join_query_scores(evaluations: Mapping[str, Any]) -> dict[str, float]:
    """Return {data set and query: its score by the main metric}."""
    scores = {}
    for data, evaluation in evaluations.items():
        for query, score in average_by_query([evaluation], MAIN_METRIC).items():
            scores[f"{data} {query}"] = score
    return scores


def _compare_with_worst(
    chosen: str | None,
    scores: Mapping[str, float | None],
    query_scores: Mapping[str, Mapping[str, float]],
    query_groups: Mapping[str, Any],
) -> dict[str, Any] | None:
    """Compare the chosen value with the value that has the lowest score; see `sign_flip_test`.

    Returns:
        None if no other value was scored.
    """
    others = {
        value: score for value, score in scores.items() if score is not None and value != chosen
    }
    if chosen is None or not others:
        return None
    worst = min(others, key=others.__getitem__)
    test = sign_flip_test(query_scores[chosen], query_scores[worst], query_groups)
    return {"value": worst, **test}


def apply_chosen_values(
    groups: Sequence[Group], key: str, tunings: Mapping[str, Mapping[str, Any]]
) -> list[Group]:
    """Return the groups with their chosen values, without those whose tuning runs all failed."""
    tuned = []
    for group in groups:
        if group.name not in tunings:
            tuned.append(group)
        elif tunings[group.name]["chosen"] is not None:
            tuned.append(add_setting(group, key, tunings[group.name]["chosen"]))
    return tuned
