"""Reading training and evaluation data. Importing it is cheap: `datasets` is imported by the functions that need it."""
# ruff: noqa: F401  # these names are here for others

from contaccum.data.beir import (
    CQADUPSTACK_FORUMS,
    PUBLIC_NAMES,
    BeirDataset,
    default_split,
    load_beir_folder,
)
from contaccum.data.dataset import (
    TrainingSets,
    load_training_data,
    load_training_sets,
    parse_training_sets,
)
from contaccum.data.questions import Questions, load_questions
from contaccum.data.readers import (
    DATA_FORMATS,
    Passage,
    Record,
    parse_columns,
    read_passages,
    read_records,
    sniff_format,
)
from contaccum.data.records import RecordReport, passage_text
