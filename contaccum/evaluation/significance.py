"""Whether one system is better than another on the same queries: paired bootstrap, and Holm's correction.

Numbers in, numbers out: nothing here knows models, data sets or metrics.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from contaccum.errors import DataError

# Indices drawn at a time: 16 MB of them.
_CHUNK_DRAWS = 2**21


class PairedDifference(NamedTuple):
    """Mean of a minus mean of b; its confidence interval; the two-sided p-value of "there is no difference"."""

    difference: float
    low: float
    high: float
    p_value: float


def paired_bootstrap(
    a: Sequence[float] | np.ndarray,
    b: Sequence[float] | np.ndarray,
    resamples: int = 10_000,
    seed: int = 0,
    confidence: float = 0.95,
) -> PairedDifference:
    """Compare two systems by their scores on the same queries, (n,) each, in the same order.

    Queries are drawn n at a time with replacement. The interval holds the middle ``confidence`` of the resampled
    differences (percentile bootstrap). The p-value is how often a resampled difference is as far from the observed one
    as that is from zero: the bootstrap's distribution shifted to the null hypothesis (Efron and Tibshirani 1993,
    chapter 16), with one added to both counts, so that it is never 0.

    Raises:
        DataError: scores of different lengths, none, or some that are not numbers.
    """
    x, y = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    if x.shape != y.shape or x.ndim != 1 or not x.size:
        raise DataError(f"paired scores are two lists of one length, one score a query; got {x.shape} and {y.shape}")
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        raise DataError("paired scores hold a value that is not a number")
    differences = x - y
    n, observed = len(differences), float(differences.mean())
    generator = np.random.default_rng(seed)
    means = np.empty(resamples)
    chunk = max(1, _CHUNK_DRAWS // n)
    for start in range(0, resamples, chunk):
        rows = min(chunk, resamples - start)
        means[start : start + rows] = differences[generator.integers(0, n, size=(rows, n))].mean(axis=1)
    # Sums in another order differ in the last bits: that must not turn a tie into a miss.
    slack = 1e-12 * max(1.0, float(np.abs(differences).max()))
    as_far = int((np.abs(means - observed) >= abs(observed) - slack).sum())
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return PairedDifference(observed, float(low), float(high), (1 + as_far) / (1 + resamples))


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down adjustment of the p-values of one family of tests, in the given order.

    Rejecting those at most alpha keeps the chance of any false rejection at most alpha (Holm 1979).
    """
    p: Any = np.asarray(p_values, dtype=np.float64)
    order = np.argsort(p, kind="stable")
    steps = p[order] * np.arange(len(p), 0, -1)
    adjusted = np.empty_like(p)
    adjusted[order] = np.minimum(1.0, np.maximum.accumulate(steps))
    return adjusted.tolist()
