"""Which of several values is best on dev data, when their scores are noisy.

The largest of a few noisy scores is often that of a lucky value. So a curve is laid through each
score and those of its neighbours, and the value is chosen where the curve is highest: a rate among
good ones is preferred to a lonely peak. `contaccum tune`, `fit` and `compare --tune` choose by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from contaccum.evaluation.metrics import paired_bootstrap

REACH = 10.0
"""Values that differ by this factor or more do not count for each other."""

_LEAST_VALUES = 4  # of fewer, a parabola runs through every point


def smooth(scores: Mapping[float, float]) -> dict[float, float]:
    """Replace each score by that of a curve through it and its neighbours, on a logarithmic axis.

    The curve is a parabola, fitted by least squares. The weight of a neighbour falls linearly with
    the logarithm of the factor between the two values, from 1 at the value itself to 0 at a factor
    of `REACH`. A score with fewer than three neighbours stays as it is.

    Args:
        scores: {value, positive: its score}.

    Returns:
        {value: height of its curve}, in the order of ``scores``.
    """
    positions = np.log(list(scores))
    heights = np.array(list(scores.values()))
    smoothed = {}
    for value, score in scores.items():
        offsets = positions - np.log(value)
        weights = np.clip(1.0 - np.abs(offsets) / np.log(REACH), 0.0, None)
        is_near = weights > 0.0
        if is_near.sum() < _LEAST_VALUES:
            smoothed[value] = score
            continue
        # polyfit multiplies residuals by its weights, before it squares them.
        curve = np.polyfit(offsets[is_near], heights[is_near], deg=2, w=np.sqrt(weights[is_near]))
        smoothed[value] = float(curve[-1])  # at offset 0
    return smoothed


def best_value(scores: Mapping[float, float]) -> float:
    """Return the value with the largest smoothed score; of equal ones an inner one, then the smallest."""
    smoothed = smooth(scores)
    ends = (min(scores), max(scores))
    return max(sorted(scores), key=lambda value: (round(smoothed[value], 12), value not in ends))


def compare_scores(scores: Mapping[str, float], others: Mapping[str, float]) -> dict[str, Any]:
    """Compare two settings by their scores of the same queries; see `paired_bootstrap`.

    Args:
        scores, others: {query id: score}.
    """
    return paired_bootstrap(list(scores.values()), [others[query] for query in scores])
