"""Reading training and evaluation data.

Importing this package is cheap: `datasets` and `beir` are imported by the functions that need them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from contaccum.data.beir_folder import BeirDataset, load_beir_folder, passage_text
from contaccum.data.beir_names import BEIR_NAMES, resolve_beir_data, shipped_scifact
from contaccum.data.formats import DATA_FORMATS, sniff_format
from contaccum.data.pairs import TrainingData, load_training_data
from contaccum.data.reading import read_records
from contaccum.data.record import Record
from contaccum.data.records import BadRecord, RecordReport
from contaccum.data.training_sets import TrainingSet, TrainingSets, load_training_sets, parse_training_sets

if TYPE_CHECKING:
    from contaccum.data.stream_batches import StreamedSets


def __getattr__(name: str) -> Any:
    # Streams are data sets of torch, which is imported with them alone.
    if name == "StreamedSets":
        from contaccum.data.stream_batches import StreamedSets

        return StreamedSets
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "BEIR_NAMES",
    "DATA_FORMATS",
    "BadRecord",
    "BeirDataset",
    "Record",
    "RecordReport",
    "StreamedSets",
    "TrainingData",
    "TrainingSet",
    "TrainingSets",
    "load_beir_folder",
    "load_training_data",
    "load_training_sets",
    "parse_training_sets",
    "passage_text",
    "read_records",
    "resolve_beir_data",
    "shipped_scifact",
    "sniff_format",
]
