"""Reading training and evaluation data. Importing it is cheap: `datasets` is imported by the functions that need it."""

from __future__ import annotations

from contaccum.data.beir import (
    BEIR_NAMES,
    CQADUPSTACK_FORUMS,
    NOT_PUBLIC,
    PUBLIC_NAMES,
    BeirDataset,
    default_split,
    load_beir_folder,
    resolve_beir_data,
    shipped_scifact,
)
from contaccum.data.dataset import (
    TrainingData,
    TrainingSet,
    TrainingSets,
    load_training_data,
    load_training_sets,
    parse_training_sets,
)
from contaccum.data.questions import Passage, Questions, count_roughly, load_questions, read_passages
from contaccum.data.readers import DATA_FORMATS, Record, parse_columns, read_records, sniff_format
from contaccum.data.records import RecordReport, passage_text
from contaccum.data.sampling import EpochSampling, Selection, samplings_of

__all__ = [
    "BEIR_NAMES",
    "CQADUPSTACK_FORUMS",
    "DATA_FORMATS",
    "NOT_PUBLIC",
    "PUBLIC_NAMES",
    "BeirDataset",
    "EpochSampling",
    "Passage",
    "Questions",
    "Record",
    "RecordReport",
    "Selection",
    "TrainingData",
    "TrainingSet",
    "TrainingSets",
    "count_roughly",
    "default_split",
    "load_beir_folder",
    "load_questions",
    "load_training_data",
    "load_training_sets",
    "parse_columns",
    "parse_training_sets",
    "passage_text",
    "read_passages",
    "read_records",
    "resolve_beir_data",
    "samplings_of",
    "shipped_scifact",
    "sniff_format",
]
