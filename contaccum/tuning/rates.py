"""The ladders of learning rates, which a search tries before it searches all settings together.

Each method has a ladder of its own. Its rungs are learning rates as multiples of the start rate of
the method, such as 1, 3 and 1/3; see `contaccum.tuning.ladder`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from contaccum.tuning.choice import FinishedTrial
from contaccum.tuning.ladder import format_value, next_values
from contaccum.tuning.space import FIRST_RATES, MAX_RATES, RATE_FACTOR


class Rung(NamedTuple):
    """A learning rate on the ladder of a method.

    Attributes:
        method: the name of the method.
        multiple: the learning rate as a multiple of the start rate of the method.
    """

    method: str
    multiple: float


def find_next_rung(methods: Sequence[str], finished: Sequence[FinishedTrial]) -> Rung | None:
    """Return the learning rate to try next; None if all ladders are complete.

    First every method is tried at its start rate. Then the ladder of the method with the best score
    is completed, then the ladder of the second best method, and so on.

    Args:
        methods: the methods to try, in their order.
        finished: the trials that have ended.
    """
    ladders = {method: _read_ladder(method, finished) for method in methods}
    best_scores = {}
    for method, scores in ladders.items():
        if not scores:
            return Rung(method, FIRST_RATES[0])
        scored = [score for score in scores.values() if score is not None]
        best_scores[method] = max(scored, default=0.0)
    first_values = [format_value(multiple) for multiple in FIRST_RATES]
    for method in sorted(ladders, key=lambda name: -best_scores[name]):
        values = next_values(first_values, RATE_FACTOR, MAX_RATES, ladders[method])
        if values:
            return Rung(method, float(values[0]))
    return None


def find_untried_method(methods: Sequence[str], finished: Sequence[FinishedTrial]) -> Rung | None:
    """Return the start rate of the first method that was not tried; None if all were tried.

    This replaces the ladders if the user gives the learning rate.
    """
    tried_methods = {trial.settings["method"] for trial in finished}
    for method in methods:
        if method not in tried_methods:
            return Rung(method, FIRST_RATES[0])
    return None


def _read_ladder(method: str, finished: Sequence[FinishedTrial]) -> dict[str, float | None]:
    """Return {learning rate as a multiple of the method's start rate, as text: score}."""
    scores = {}
    for trial in finished:
        if trial.rung is not None and trial.settings["method"] == method:
            scores[trial.rung] = trial.score
    return scores
