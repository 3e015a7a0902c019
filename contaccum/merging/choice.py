"""The rule that chooses the weight of an interpolation between a base model and a trained model.

A weight w stands for the model with the tensors (1 - w) * base + w * trained, so weight 0 is the
base model and weight 1 is the trained model. See `contaccum.encoders.interpolation`. The rule
compares nDCG@10 on data sets of two roles. Own data are like the data that the model was trained
on. Guard data are other data, on which a weight may lose only a little against the base model.
Models are not run here: the scores of each query come from `contaccum.merging.scoring`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, Literal, NamedTuple

from contaccum.encoders.interpolation import check_weight
from contaccum.errors import ConfigError
from contaccum.evaluation.metrics import paired_bootstrap
from contaccum.evaluation.tables import markdown_table

METRIC = "NDCG@10"

# Means that differ by less than this are equal, because adding the same scores in another order
# changes the last bits of the sum.
_TOLERANCE = 1e-9

BEST_OF_SEVERAL = (
    "the score of the chosen weight on the own data is the best of several, so it is optimistic; "
    "only other data, such as a test set, give a fair score"
)

QueryScores = Mapping[str, float]
"""{query id: nDCG@10}"""


class SetScores(NamedTuple):
    """The scores of all weights on one data set.

    Attributes:
        role: "own" or "guard"; see the top of this module.
        data: the description of the data set; see `contaccum.evaluation.beir_sets.describe_data`.
        scores: {weight: {query id: nDCG@10}}; weight 0 is the base model.
    """

    role: Literal["own", "guard"]
    data: Mapping[str, Any]
    scores: Mapping[float, QueryScores]

    @property
    def title(self) -> str:
        """The role and the name of the data set, for tables."""
        return f"{self.role}: {self.data['name']}"

    def mean(self, weight: float) -> float:
        """Return the mean score of a weight."""
        return fmean(self.scores[weight].values())

    def compare(self, weight: float, other_weight: float) -> dict[str, float]:
        """Return the mean difference of two weights and its interval; see `paired_bootstrap`.

        A positive difference is in favour of ``weight``.
        """
        scores = self.scores[weight]
        other_scores = self.scores[other_weight]
        query_ids = list(scores)
        return paired_bootstrap(
            [scores[query_id] for query_id in query_ids],
            [other_scores[query_id] for query_id in query_ids],
        )


class WeightChoice(NamedTuple):
    """The chosen weight, with everything that records and tables show.

    Attributes:
        weight: the chosen weight of the trained model; 0 stands for the base model.
        rule: the rule, as a sentence.
        failed_guards: {weight: titles of the guard sets on which the weight loses too much}. All
            weights are keys, in ascending order.
        data_sets: one dict per data set: "role", "data" (its description) and "rows". There is a
            row for each weight, in the order of ``failed_guards``: the mean score, its difference
            to the base model, and the 95% interval of the difference.
        warnings: warnings, one line each.
    """

    weight: float
    rule: str
    failed_guards: dict[float, list[str]]
    data_sets: list[dict[str, Any]]
    warnings: list[str]

    def record(self) -> dict[str, Any]:
        """Return the choice as the content of a JSON file."""
        return {
            "weight": self.weight,
            "rule": self.rule,
            "metric": METRIC,
            "data_sets": self.data_sets,
            "warnings": self.warnings,
            "note": BEST_OF_SEVERAL,
            "table": self.table(),
        }

    def describe(self) -> str:
        """Return one line with the chosen weight and its meaning."""
        if self.weight == 0:
            return (
                "chosen: weight 0, the base model: no other weight is better on the own data and "
                "loses little enough on every guard set; keep the base model"
            )
        if self.weight == 1:
            return "chosen: weight 1, the trained model as it is"
        return f"chosen: weight {self.weight:g} of the trained model"

    def table(self) -> str:
        """Return a Markdown table with a row for each weight and a column for each data set."""
        header = ["weight"]
        for data_set in self.data_sets:
            header.append(f"{data_set['role']}: {data_set['data']['name']}")
        header.append("note")
        cells: list[list[str]] = []
        for index, weight in enumerate(self.failed_guards):
            line = [f"{weight:g}"]
            for data_set in self.data_sets:
                line.append(_format_scores(data_set["rows"][index]))
            line.append(self._describe_weight(weight))
            cells.append(line)
        return markdown_table(header, cells)

    def _describe_weight(self, weight: float) -> str:
        """Return the note in the last column of the table, such as "base model, **chosen**"."""
        notes = []
        if weight == 0:
            notes.append("base model")
        if weight == 1:
            notes.append("trained model")
        for title in self.failed_guards[weight]:
            notes.append(f"loses too much on {title.removeprefix('guard: ')}")
        if weight == self.weight:
            notes.append("**chosen**")
        return ", ".join(notes)


def _format_scores(row: Mapping[str, float]) -> str:
    """Return a mean score, its difference to the base model, and the interval of the difference."""
    if row["weight"] == 0:
        return f"{row[METRIC]:.4f}"
    interval = f"{row['low']:+.4f} to {row['high']:+.4f}"
    return f"{row[METRIC]:.4f} ({row['difference']:+.4f}, 95% {interval})"


def check_weights(weights: Sequence[float]) -> list[float]:
    """Return the weights in ascending order, without repetitions, and always with 0 and 1.

    Raises:
        ConfigError: if a weight is outside [0, 1].
    """
    for weight in weights:
        check_weight(weight)
    return sorted({0.0, 1.0, *weights})


def check_guard_loss(guard_loss: float) -> None:
    """Raise `ConfigError` if the allowed loss on guard data is negative or not a number."""
    if not 0 <= guard_loss <= 1:
        raise ConfigError(
            f"guard_loss={guard_loss:g}: the allowed loss of nDCG@10 must be between 0 and 1"
        )


def describe_rule(guard_loss: float) -> str:
    """Return the rule of `choose_weight` as a sentence."""
    return (
        f"Rule: among the weights whose mean nDCG@10 is at most {guard_loss:g} below that of the "
        "base model on every guard set, choose the weight with the best mean nDCG@10 on the own "
        "data; of equal weights, choose the smaller one."
    )


def choose_weight(sets: Sequence[SetScores], guard_loss: float) -> WeightChoice:
    """Choose a weight by the rule of `describe_rule`.

    Weight 0, the base model, loses nothing on the guard sets, so it is always allowed. If there are
    several own sets, weights are compared by the mean of the mean scores on them.

    Args:
        sets: the scores on at least one own set and on the guard sets, for the same weights.
        guard_loss: the mean nDCG@10 that a weight may lose on each guard set.
    """
    weights = sorted(sets[0].scores)
    own_sets = [scores for scores in sets if scores.role == "own"]
    guard_sets = [scores for scores in sets if scores.role == "guard"]
    failed_guards: dict[float, list[str]] = {}
    for weight in weights:
        failed_guards[weight] = []
        for guard in guard_sets:
            if guard.mean(weight) < guard.mean(0.0) - guard_loss - _TOLERANCE:
                failed_guards[weight].append(guard.title)
    allowed_weights = [weight for weight in weights if not failed_guards[weight]]
    best = allowed_weights[0]
    for weight in allowed_weights[1:]:
        if _compute_own_mean(own_sets, weight) > _compute_own_mean(own_sets, best) + _TOLERANCE:
            best = weight
    return WeightChoice(
        weight=best,
        rule=describe_rule(guard_loss),
        failed_guards=failed_guards,
        data_sets=[_make_set_record(scores, weights) for scores in sets],
        warnings=_collect_warnings(own_sets, best, allowed_weights),
    )


def _compute_own_mean(own_sets: Sequence[SetScores], weight: float) -> float:
    """Return the mean of a weight's mean scores on the own sets."""
    return fmean(scores.mean(weight) for scores in own_sets)


def _make_set_record(scores: SetScores, weights: Sequence[float]) -> dict[str, Any]:
    """Return the role and the description of a data set, and a row for each weight."""
    rows = []
    for weight in weights:
        row = {"weight": weight, METRIC: scores.mean(weight)}
        if weight != 0:
            row.update(scores.compare(weight, 0.0))
        rows.append(row)
    return {"role": scores.role, "data": dict(scores.data), "rows": rows}


def _collect_warnings(
    own_sets: Sequence[SetScores], best: float, allowed_weights: Sequence[float]
) -> list[str]:
    """Return a warning if the own data do not separate the chosen weight from its neighbours.

    The neighbours are the next smaller and the next larger allowed weight. The chosen weight is
    separated from a neighbour if it is significantly better on an own set and significantly worse
    on none, judged by the 95% interval of the difference.

    Args:
        own_sets: the scores on the own sets.
        best: the chosen weight.
        allowed_weights: weights that satisfy the rule on the guard sets, in ascending order.
    """
    position = allowed_weights.index(best)
    # The first and the last weight have only one neighbour: the other slice is empty for them.
    neighbours = list(allowed_weights[max(0, position - 1) : position])
    neighbours += allowed_weights[position + 1 : position + 2]
    not_separated = []
    for neighbour in neighbours:
        comparisons = [scores.compare(best, neighbour) for scores in own_sets]
        is_better = any(comparison["low"] > 0 for comparison in comparisons)
        is_worse = any(comparison["high"] < 0 for comparison in comparisons)
        if is_worse or not is_better:
            not_separated.append(f"{neighbour:g}")
    if not not_separated:
        return []
    weights = " or ".join(not_separated)
    return [
        f"the own data do not decide between weight {best:g} and {weights}: the first is not "
        "significantly better on any own set, or is significantly worse on one; more own queries "
        "may decide"
    ]
