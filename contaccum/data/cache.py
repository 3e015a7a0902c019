"""Cache of training records: Arrow files that `datasets` writes once and maps into memory.

An entry of the cache holds all records of a source, the text ids (64-bit hashes) of its pairs of
query and positive, and a description. One process writes an entry; other processes that need it at
the same time wait.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from contaccum.data.readers import Source
from contaccum.data.records import RecordReport, one_line
from contaccum.data.sampling import text_ids
from contaccum.errors import DataError
from contaccum.files import Fingerprint, cache_folder, fingerprint, read_json, write_json

if TYPE_CHECKING:
    from datasets import Dataset

_DESCRIPTION_FILE = "about.json"
_PAIRS_FILE = "pairs.int64"
_MAX_SECONDS_UNUSED = 30 * 86_400  # 30 days


@dataclass(frozen=True)
class CachedRecords:
    """The records of a source.

    Attributes:
        records: the records, with the fields of a `Record`.
        pairs: int64 (n, 2), text ids of query and positive for every pair, mapped from a file.
        texts_fingerprint: sha256, in hex, of queries and positives.
        negatives_fingerprint: sha256, in hex, of negatives.
        scores_fingerprint: sha256, in hex, of teacher scores.
    """

    records: Dataset
    pairs: np.ndarray
    texts_fingerprint: str
    negatives_fingerprint: str
    scores_fingerprint: str

    @property
    def has_scores(self) -> bool:
        """True if any record has teacher scores."""
        fingerprint_of_nothing = fingerprint()
        return self.scores_fingerprint != fingerprint_of_nothing


def cache_records(source: Source, report: RecordReport) -> CachedRecords:
    """Open the records of a source in the cache, and read the source first if it is not there.

    Args:
        source: the source.
        report: receives the counts of records, also if they were read by an earlier run.

    Raises:
        DataError: for a source or a record that cannot be used, or a cache that cannot be written.
    """
    from datasets import Dataset, Features, List, Value, disable_progress_bars
    from datasets.exceptions import DatasetGenerationError

    key = source.key(report.on_bad_record)[:32]
    folder = cache_folder("datasets", key)
    texts = List(Value("string"))
    features = Features(
        query=Value("string"), positives=texts, negatives=texts, scores=List(Value("float32"))
    )

    def generate() -> Iterator[dict[str, Any]]:
        return _write_entry(folder, source, report)

    if not sys.stderr.isatty():  # progress bars would fill a log file
        disable_progress_bars()
    try:
        records = Dataset.from_generator(generate, features, str(folder), fingerprint=key)
        # The file's time is the time of the last use, see `_remove_unused_entries`.
        os.utime(folder / _DESCRIPTION_FILE)
    except (DatasetGenerationError, OSError) as error:
        cause = error.__cause__ or error
        if isinstance(cause, OSError):  # such as a full disk
            raise DataError(
                one_line(f"{folder}: the data cannot be stored: {cause} (set CONTACCUM_CACHE)")
            ) from error
        # `datasets` wraps the errors of the reader. The reader's own error names file and line.
        raise cause from None
    pairs = np.memmap(folder / _PAIRS_FILE, dtype=np.int64, mode="r").reshape(-1, 2)
    description = read_json(folder / _DESCRIPTION_FILE)
    report.restore(description["report"])
    return CachedRecords(
        records, pairs, description["texts"], description["negatives"], description["scores"]
    )


def _write_entry(folder: Path, source: Source, report: RecordReport) -> Iterator[dict[str, Any]]:
    """Yield the records of a source as dicts, and write the files beside them.

    At the end, the entries that were not opened for 30 days are removed.
    """
    texts_content = Fingerprint()
    negatives_content = Fingerprint()
    scores_content = Fingerprint()
    num_records = 0
    with open(folder / _PAIRS_FILE, "wb") as pairs_file:
        for record in source.records(report):
            num_records += 1
            query_id, *positive_ids = text_ids([record.query, *record.positives]).tolist()
            pairs = [(query_id, positive_id) for positive_id in positive_ids]
            pairs_file.write(np.array(pairs, dtype=np.int64).tobytes())
            texts_content.add(record.query, *record.positives, "")
            negatives_content.add(*record.negatives, "")
            if record.scores is not None:
                scores_content.add(record.scores)
            yield record._asdict()
    report.refuse_if_nothing_left(source.path, num_records, "training pairs")
    description = {
        "texts": texts_content.hex(),
        "negatives": negatives_content.hex(),
        "scores": scores_content.hex(),
        "report": vars(report),
    }
    write_json(folder / _DESCRIPTION_FILE, description)
    _remove_unused_entries(folder)


def _remove_unused_entries(new_entry: Path) -> None:
    """Remove the entries beside a new one that were not opened for 30 days."""
    oldest_used = time.time() - _MAX_SECONDS_UNUSED
    for entry in new_entry.parent.iterdir():
        if entry == new_entry:
            continue
        with suppress(OSError):  # another process may remove the entry at the same time
            last_used = entry.stat().st_mtime
            if (entry / _DESCRIPTION_FILE).exists():
                last_used = max(last_used, (entry / _DESCRIPTION_FILE).stat().st_mtime)
            if last_used < oldest_used:
                shutil.rmtree(entry, ignore_errors=True)
