"""Reading training and evaluation data.

Importing this package is cheap: `datasets` and `beir` are imported by the functions that need them.
"""

from __future__ import annotations

from contaccum.data.beir_folder import BeirDataset, load_beir_folder, passage_text
from contaccum.data.beir_names import BEIR_NAMES, resolve_beir_data, shipped_scifact
from contaccum.data.formats import DATA_FORMATS, sniff_format
from contaccum.data.pairs import TrainingData, load_training_data
from contaccum.data.reading import read_records
from contaccum.data.record import Record
from contaccum.data.records import BadRecord, RecordReport

__all__ = [
    "BEIR_NAMES",
    "DATA_FORMATS",
    "BadRecord",
    "BeirDataset",
    "Record",
    "RecordReport",
    "TrainingData",
    "load_beir_folder",
    "load_training_data",
    "passage_text",
    "read_records",
    "resolve_beir_data",
    "shipped_scifact",
    "sniff_format",
]
