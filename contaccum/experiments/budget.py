"""Durations for the user, and the time to encode texts."""

from __future__ import annotations

import time
from collections.abc import Iterable
from itertools import islice

from contaccum.encoders.dual_encoder import DualEncoder
from contaccum.retrieval.encode import encode_texts

_NUM_MEASURED_DOCUMENTS = 64  # documents on which the time of encoding is measured
_WARM_UP_DOCUMENTS = 4


def format_duration(seconds: float) -> str:
    """Return "45 seconds", "14 minutes" or "2.5 hours"."""
    if seconds < 90:
        return f"{seconds:.0f} seconds"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} minutes"
    return f"{seconds / 3600:.1f} hours"


def measure_seconds_per_document(
    encoder: DualEncoder,
    documents: Iterable[str],
    num_documents: int,
    batch_size: int,
    precision: str = "float32",
) -> float:
    """Return the seconds to encode one document, as a mean over a sample of a corpus.

    The sample is evenly spread, because training passages come first, and may be shorter than the
    others.

    Args:
        num_documents: number of documents in the corpus.
        precision: type of autocast; see `encode_texts`.
    """
    step = max(1, num_documents // _NUM_MEASURED_DOCUMENTS)
    sample = list(islice(documents, 0, step * _NUM_MEASURED_DOCUMENTS, step))
    # The first batch is slower than all others, because it allocates memory.
    encode_texts(encoder, sample[:_WARM_UP_DOCUMENTS], "document", batch_size, precision)
    started = time.perf_counter()
    encode_texts(encoder, sample, "document", batch_size, precision)
    return (time.perf_counter() - started) / len(sample)
