"""Comparison of the embeddings of a model with those of its export or of a server."""

from __future__ import annotations

import numpy as np

LEAST_COSINE = 0.9999
"""Two embeddings of the same text agree if their cosine is at least this."""


def compute_cosines(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return the cosines (n,) between the rows of two arrays (n, d) at the same position.

    They are computed in float64. The cosine with a row of zeros is 0.
    """
    first = first.astype(np.float64)
    second = second.astype(np.float64)
    norms = np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)
    return (first * second).sum(axis=1) / np.maximum(norms, 1e-12)
