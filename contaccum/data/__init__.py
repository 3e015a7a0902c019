"""Reading training and evaluation data.

Importing this package is cheap: `datasets` and `beir` are imported by the functions that need them.
"""

from __future__ import annotations

from contaccum.data.beir_folder import BeirDataset, load_beir_folder, passage_text
from contaccum.data.beir_names import BEIR_NAMES, resolve_beir_data, shipped_scifact
from contaccum.data.pairs import DATA_FORMATS, TrainingData, load_training_data
from contaccum.data.records import BadRecord, RecordReport

__all__ = [
    "BEIR_NAMES",
    "DATA_FORMATS",
    "BadRecord",
    "BeirDataset",
    "RecordReport",
    "TrainingData",
    "load_beir_folder",
    "load_training_data",
    "passage_text",
    "resolve_beir_data",
    "shipped_scifact",
]
