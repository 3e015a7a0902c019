"""Values that the command line shares with the Python functions.

They are in a module of their own because the command line must not import torch to print its help.
"""

from __future__ import annotations

DEFAULT_MODEL = "sentence-transformers/all-MiniLM-L6-v2"
"""Model that is trained if the user names none."""

PRECISIONS = ("float32", "bfloat16", "float16")
"""Types of autocast, and "float32" for none; see `contaccum.retrieval.encode.encode_texts`."""

DEFAULT_K_VALUES = (1, 3, 5, 10, 20, 100, 1000)
"""Cut-offs of the metrics of an evaluation."""

DEFAULT_WEIGHTS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Weights of the trained model at which it is merged with the base model, to choose the best."""

DEFAULT_GUARD_LOSS = 0.01
"""The nDCG@10 that a merged model may lose on each guard set."""
