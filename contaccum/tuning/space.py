"""The search space of `contaccum tune` and `contaccum fit`: the settings and their possible values.

The methods are tried first, at several learning rates, because a wrong learning rate costs most.
Then all settings are searched together, around the best ones so far.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from optuna import Trial

from contaccum.tuning.choice import Settings


class Span(NamedTuple):
    """A positive number that is searched on a logarithmic axis.

    Attributes:
        low, high: the limits, as multiples of the value at which the search starts.
    """

    low: float
    high: float


Setting = list[Any] | Span
"""The possible values of a setting, or the span in which its values lie."""

FIRST_RATES = (1.0, 3.0, 1 / 3)
"""The learning rates that are tried first with a method, as multiples of its start rate."""

RATE_FACTOR = 3.0
"""The factor between the smallest or largest rate that was tried and the next rate beyond it."""

MAX_RATES = 5
"""The largest number of rates tried with a method before all settings are searched together."""

METHODS = ("query_side", "contaccum", "grad_cache")
"""The methods, in the order in which they are tried; query_side needs a store of documents."""

SPACE: Mapping[str, Setting] = {
    "method": list(METHODS),  # queries against all documents; a bank; one batch and no bank
    "learning_rate": Span(1 / 30, 30.0),  # around the start rate of the method
    "temperature": Span(0.4, 2.0),  # 0.02 to 0.1 with cosine
    "total_train_batch_size": [32, 64, 128, 256],  # pairs of an update
    "num_train_epochs": [1, 2, 3, 5],  # passes over the training data
    "num_hard_negatives": [0, 1],  # none, or one: from the data, or mined by BM25
}
"""All settings that are searched; a setting that the user gives is removed from the search."""

_DECIDES = {
    "gradient_accumulation_steps": "total_train_batch_size",
    "max_steps": "num_train_epochs",
}
"""{setting that a user may give: the setting that is then not searched}; both decide the same."""

QUERY_SIDE_START_RATE = 1.6e-4
START_RATE = 1e-4
"""The learning rate at which the search of a method starts, except query_side.

Both rates are for full training of a pretrained retriever with 384 hidden dimensions.
`compute_start_rate` adapts them to other encoders.
"""

_START_RATE_WIDTH = 384  # a wider encoder needs a smaller rate, about in proportion
_ADAPTER_FACTOR = 10.0  # LoRA adapters need larger rates
_WEAK_BASE_FACTOR = 5.0  # an encoder that cannot retrieve yet needs larger rates


def compute_start_rate(method: str, width: int, has_adapter: bool, is_base_weak: bool) -> float:
    """Return the learning rate at which the search of a method starts.

    Args:
        width: the number of dimensions of the encoder's hidden states.
        has_adapter: True if a LoRA adapter is trained.
        is_base_weak: True if the encoder scores far below BM25 before training.
    """
    rate = QUERY_SIDE_START_RATE if method == "query_side" else START_RATE
    rate *= _START_RATE_WIDTH / width
    if has_adapter:
        rate *= _ADAPTER_FACTOR
    if is_base_weak:
        rate *= _WEAK_BASE_FACTOR
    return rate


def make_space(
    num_pairs: int, pairs_per_step: int, fixed_keys: Collection[str]
) -> dict[str, Setting]:
    """Return the settings to search, with the values that are possible for the training data.

    Args:
        num_pairs: the number of training pairs. Batch sizes above half of it are left out.
        pairs_per_step: the number of pairs of the micro-batches of all processes. Batch sizes that
            are not multiples of it are left out.
        fixed_keys: the settings that are not searched.
    """
    fixed = set(fixed_keys)
    for key, decided_key in _DECIDES.items():
        if key in fixed:
            fixed.add(decided_key)
    space = {key: setting for key, setting in SPACE.items() if key not in fixed}
    batch_sizes = space.get("total_train_batch_size")
    if isinstance(batch_sizes, list):
        possible = []
        for size in batch_sizes:
            if size <= num_pairs / 2 and size % pairs_per_step == 0:
                possible.append(size)
        space["total_train_batch_size"] = possible
        if len(possible) < 2:
            del space["total_train_batch_size"]
    return space


def name_method_parameter(methods: Collection[str]) -> str:
    """Return the name of Optuna's parameter for the method.

    The name contains the methods, because the choices of a parameter in Optuna must never change,
    and a method that is too slow is dropped during the search.
    """
    return f"method among {', '.join(methods)}"


def name_span_parameter(key: str, method: str) -> str:
    """Return the name of Optuna's parameter for a `Span`.

    Every method has a parameter of its own, because the rates of two methods are not comparable.
    """
    return f"{key} of {method}"


def suggest(
    trial: Trial,
    starts: Mapping[str, Mapping[str, float]],
    space: Mapping[str, Setting],
    max_updates: Mapping[str, int],
) -> Settings:
    """Let Optuna choose a value for each setting of a space.

    Args:
        starts: {method: {key of a `Span`: value at which its search starts}}. The keys of
            ``starts`` are the methods to choose from.
        space: the settings to choose values for.
        max_updates: {method: number of updates} of the methods whose trials are cut to fit the
            budget. It becomes ``max_steps``, and their number of epochs has no value.

    Returns:
        {key: value}.
    """
    values: Settings = {}
    methods = tuple(starts)
    method = methods[0]
    if len(methods) > 1:
        method = trial.suggest_categorical(name_method_parameter(methods), methods)
    values["method"] = method
    for key, setting in space.items():
        if key == "method":
            continue
        if key == "num_hard_negatives" and method == "query_side":
            continue  # query_side uses all documents as negatives already
        if key == "num_train_epochs" and method in max_updates:
            continue
        if isinstance(setting, list):
            values[key] = trial.suggest_categorical(key, setting)
        else:
            multiple = trial.suggest_float(
                name_span_parameter(key, method), setting.low, setting.high, log=True
            )
            value = starts[method][key] * multiple  # the span is relative to the start value
            values[key] = float(f"{value:.2g}")
    if method in max_updates:
        values["max_steps"] = max_updates[method]
    return values
