"""A budget of wall time, shared by all starts of the same command, and the time to encode texts."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

from contaccum.distributed import broadcast, rank
from contaccum.encoders.dual_encoder import DualEncoder
from contaccum.files import read_json, write_json
from contaccum.retrieval.encode import encode_texts

USED_TIME_FILE = "used_time.json"
"""The file of a `Budget` in the folder of a command."""

_NUM_MEASURED_DOCUMENTS = 64  # documents on which the time of encoding is measured
_WARM_UP_DOCUMENTS = 4


def format_duration(seconds: float) -> str:
    """Return "45 seconds", "14 minutes" or "2.5 hours"."""
    if seconds < 90:
        return f"{seconds:.0f} seconds"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} minutes"
    return f"{seconds / 3600:.1f} hours"


class Budget:
    """The wall time that a command may take in all its starts together.

    Args:
        seconds: the whole budget.
        file: the file of the time that was used so far, and of the time of each stage. The next
            start of the command reads it.
    """

    def __init__(self, seconds: float, file: Path) -> None:
        self.seconds = seconds
        self.stage_seconds: dict[str, float] = {}
        self._file = file
        self._started = time.monotonic()
        self._used_before = 0.0
        if file.is_file():
            record = read_json(file)
            self._used_before = float(record["used_seconds"])
            self.stage_seconds = record["stages"]

    def used(self) -> float:
        """Return the seconds that were used so far, by the clock of the first process.

        All processes must call it, so that they make the same decisions.
        """
        return broadcast(self.used_here())

    def left(self) -> float:
        """Return the seconds that are left; negative if the budget is exceeded."""
        return self.seconds - self.used()

    def save(self) -> None:
        """Write the time that was used so far."""
        if rank() == 0:
            record = {"used_seconds": round(self.used_here(), 1), "stages": self.stage_seconds}
            write_json(self._file, record)

    @contextmanager
    def measure(self, stage: str) -> Iterator[None]:
        """Add the time of a ``with`` block to that of a stage, and save it."""
        started = time.monotonic()
        try:
            yield
        finally:
            seconds = self.stage_seconds.get(stage, 0.0) + time.monotonic() - started
            self.stage_seconds[stage] = round(seconds, 1)
            self.save()

    def left_here(self) -> float:
        """Return the seconds that are left by the clock of this process."""
        return self.seconds - self.used_here()

    def used_here(self) -> float:
        """Return the seconds that were used so far, by the clock of this process."""
        return self._used_before + time.monotonic() - self._started


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
