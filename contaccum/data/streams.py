"""Where training records come from, and the stream of rows that is read anew in each pass and stored nowhere.

What a row takes of its record is what it would take of stored data. `datasets` shuffles the rows in a buffer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contaccum.data.columns import Record, RecordRules
from contaccum.data.readers import JUDGED, DataFormat, read_numbered
from contaccum.data.records import Fault, OnBadRecord, RecordReport, one_line
from contaccum.data.sampling import Selection, row_generator, text_ids
from contaccum.data.tables import load_hub
from contaccum.errors import ConfigError, DataError
from contaccum.files import fingerprint

if TYPE_CHECKING:
    from datasets import IterableDataset

FORMAT = 1
"""To be raised when the readers or the files of the cache change, so that older ones are not taken for new."""

DROPPED = "too few hard negatives, dropped"
NONE_LISTED = "but no record has a negative (mine some with `contaccum mine`, or set num_hard_negatives to 0)"

_RECENT = 1000  # passages that missing negatives are filled from
_TRIES = 256


@dataclass(frozen=True)
class Source:
    """Where records come from, and how they are read; everything that decides what the cache holds of them."""

    path: Path
    data_format: DataFormat
    split: str
    on_bad_record: OnBadRecord
    columns: Mapping[str, str]
    rules: RecordRules

    def records(self, report: RecordReport, streaming: bool = False) -> Iterator[tuple[int, Record]]:
        """Records, each with its line."""
        given = (self.path, self.data_format, self.split, self.columns, report, self.rules, streaming)
        return read_numbered(*given)

    def key(self, streaming: bool = False) -> str:
        """Another one when a file's path, size or time changes, or a setting. sha256, in hex."""
        files = [self.path]
        if self.path.is_dir():
            files = sorted(path for path in self.path.rglob("*") if path.is_file())
        elif self.data_format == "hub" and not streaming:
            # What datasets has fetched: other files when it changes on the hub.
            files = [Path(file["filename"]) for file in load_hub(str(self.path), self.split).cache_files]
        stats = [(str(path.resolve()), path.stat()) for path in files if path.exists()]
        facts = [(name, stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in stats]
        settings = (self.data_format, self.split, self.on_bad_record, dict(self.columns), astuple(self.rules))
        return fingerprint(FORMAT, str(self.path) if not facts else "", facts, settings)


def stream_rows(
    source: Source, selection: Selection, report: RecordReport, buffer_size: int, seed: int
) -> IterableDataset:
    """Rows {"query", "positive", "negative_1", ..., "label"} of a source, pass after pass without end.

    They are in an order that (seed, buffer_size) determine; `.skip(n)` goes on after the first n, which are then read
    but not given. A negative that is missing is filled with the positive of a row read shortly before.

    Args:
        report: of the pass that is being read.

    Raises:
        ConfigError: a format that cannot be streamed, or settings that cannot be used.
    """
    from datasets import Features, IterableDataset, List, Value

    if buffer_size < 1:
        raise ConfigError(f"shuffle_buffer_size must be at least 1 row, got {buffer_size}")
    if source.data_format == "beir":
        raise ConfigError(
            f"streaming=true with data_format=beir: {source.path}: its corpus would have to be held in memory. Drop "
            "streaming, or write its pairs as jsonl"
        )
    names = ["query", "positive", *(f"negative_{i + 1}" for i in range(selection.num_hard_negatives))]
    features = Features({**dict.fromkeys(names, Value("string")), "label": List(Value("int64"))})

    def generate() -> Iterator[dict[str, Any]]:
        for turn in count():
            report.restore(RecordReport().to_dict())
            for row, ids in _one_pass(source, selection, report, seed, turn):
                yield {**dict(zip(names, row, strict=True)), "label": ids}

    # Its own fingerprint: datasets would hash all that the generator can reach.
    rows = IterableDataset.from_generator(generate, features)
    return rows.shuffle(seed & (2**63 - 1), buffer_size=buffer_size)


def _one_pass(
    source: Source, selection: Selection, report: RecordReport, seed: int, turn: int
) -> Iterator[tuple[list[str], list[int]]]:
    """Texts of each row, and their ids."""
    h, number, any_negative = selection.num_hard_negatives, 0, False
    recent: deque[str] = deque(maxlen=_RECENT)
    for line, record in source.records(report, streaming=True):
        any_negative = any_negative or bool(record.negatives)
        if h and not any_negative and report.seen >= _RECENT:
            break
        if len(record.negatives) < h and selection.missing_negatives != "fill":
            lost = len(record.positives) if source.data_format in JUDGED else 1
            report.used -= lost
            if selection.missing_negatives == "stop":
                report.reject(source.path, line, Fault("too few hard negatives", f"{len(record.negatives)}"), lost)
            else:
                report.leave_out(source.path, DROPPED, lost)
            continue
        recent.append(record.positives[0])
        for which in range(len(record.positives) if selection.positives == "all" else 1):
            rng = row_generator(seed, turn, number)
            positive, texts = selection.sample(rng, record.positives, record.negatives, which)
            for _ in range(_TRIES if len(texts) < h else 0):
                text = recent[int(rng.integers(len(recent)))]
                if text not in record.positives and text not in texts:
                    texts.append(text)
                if len(texts) == h:
                    break
            if h and texts:  # in a tiny set there may be too few other passages: then one is there twice
                texts = [texts[place % len(texts)] for place in range(h)]
            if len(texts) == h:  # else there is no passage yet that is not a positive of the query
                # To the loss, a listed negative that is another positive of its record is the one that was taken.
                same = [positive if text in record.positives else text for text in texts]
                yield [record.query, positive, *texts], text_ids([record.query, positive, *same]).tolist()
                number += 1
    if h and not any_negative and report.seen:
        raise DataError(one_line(f"{source.path}: num_hard_negatives={h}, {NONE_LISTED}"))
    report.refuse_if_nothing_left(source.path, number, "training pairs")
