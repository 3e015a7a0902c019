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
