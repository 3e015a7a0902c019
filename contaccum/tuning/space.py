"""The search space of `contaccum tune` and `fit`: which settings are tried, with which values, in which order.

First the methods at several rates, because a wrong rate costs more than anything else. Then all
settings together, around the best so far.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from optuna import Trial


class Choices(NamedTuple):
    """A setting with a few values."""

    values: tuple[Any, ...]
    meaning: str


class Span(NamedTuple):
    """A positive number, searched on a logarithmic axis, as a multiple of where the search starts."""

    low: float
    high: float
    meaning: str


Setting = Choices | Span


FIRST_RATES = (1.0, 3.0, 1 / 3)
"""Rates that each method tries first, as multiples of its start."""

RATE_FACTOR = 3.0
"""One more rate is tried beyond an end of those tried, by this factor, while the best lies there."""

MOST_RATES = 5
"""Rates that a method tries before the other settings are searched, at most."""

METHODS = ("query_side", "contaccum", "grad_cache")
"""In the order in which they are tried. query_side only where there is a store of documents."""

SPACE: Mapping[str, Setting] = {
    "method": Choices(METHODS, "queries against all documents; a bank; one batch and no bank"),
    "learning_rate": Span(1 / 30, 30.0, "around the start of the method"),
    "temperature": Span(0.4, 2.0, "0.02 to 0.1 with cosine"),
    "total_train_batch_size": Choices((32, 64, 128, 256), "pairs of an update"),
    "num_train_epochs": Choices((1, 2, 3, 5), "passes over the training data"),
    "num_hard_negatives": Choices((0, 1), "none, or one of the data's, or one that BM25 finds"),
}
"""All settings that are searched. One that the user gives is not."""

START_RATES = {"query_side": 1.6e-4, "contaccum": 1e-4, "grad_cache": 1e-4}
"""Where the search of a method starts, for a pretrained encoder of 384 dimensions, trained in full."""

_WIDTH = 384  # a wider encoder wants a smaller rate, about in proportion
_OF_ADAPTERS = 10.0  # adapters want larger rates
_OF_FRESH_WEIGHTS = 5.0


def start_rate(method: str, width: int, has_adapter: bool, is_fresh: bool) -> float:
    """Return the learning rate that the search of a method starts from.

    Args:
        width: dimensions of the encoder's hidden states.
        is_fresh: whether the encoder knows nothing of retrieval yet.
    """
    rate = START_RATES[method] * _WIDTH / width
    if has_adapter:
        rate *= _OF_ADAPTERS
    if is_fresh:
        rate *= _OF_FRESH_WEIGHTS
    return rate


def space_for(pairs: int, micro_batch: int, given: Collection[str]) -> dict[str, Setting]:
    """Return what there is to search in some data.

    Args:
        pairs: of the training data; an update has at most half of them.
        micro_batch: pairs that are encoded at once; those of an update are a multiple.
        given: keys that stay as they are.
    """
    space = {key: setting for key, setting in SPACE.items() if key not in given}
    sizes = space.get("total_train_batch_size")
    if isinstance(sizes, Choices):
        possible = tuple(
            size for size in sizes.values if size <= pairs / 2 and size % micro_batch == 0
        )
        space["total_train_batch_size"] = sizes._replace(values=possible)
        if len(possible) < 2:
            del space["total_train_batch_size"]
    return space


def name_of_method(methods: Collection[str]) -> str:
    """Return Optuna's name for the choice among some methods: its choices must never change."""
    return f"method among {', '.join(methods)}"


def suggest(
    trial: Trial, starts: Mapping[str, Mapping[str, float]], space: Mapping[str, Setting]
) -> dict[str, Any]:
    """Let Optuna choose a value for each setting of a space.

    Args:
        starts: {method: {key of a `Span`: where its search starts}}. The keys of ``starts`` are the
            methods to choose from.
    """
    values: dict[str, Any] = {}
    methods = tuple(starts)
    method = methods[0]
    if len(methods) > 1:
        method = trial.suggest_categorical(name_of_method(methods), methods)
    values["method"] = method
    for key, setting in space.items():
        if key == "method" or (key == "num_hard_negatives" and method == "query_side"):
            continue  # of query_side all documents are negatives
        if isinstance(setting, Choices):
            values[key] = trial.suggest_categorical(key, setting.values)
        else:
            start = starts[method][key]
            # A parameter of its own for each method, whose rates are not comparable.
            multiple = trial.suggest_float(
                f"{key} of {method}", setting.low, setting.high, log=True
            )
            values[key] = float(f"{start * multiple:.2g}")
    return values
