"""Training and evaluation data: reading, caching, sampling and splitting them.

Importing this package is cheap: the functions that need `datasets` import it.
"""
# ruff: noqa: F401  # the package's public names

from contaccum.data.beir import (
    CQADUPSTACK_PARTS,
    PUBLIC_NAMES,
    BeirDataset,
    get_default_split,
    load_beir_folder,
)
from contaccum.data.dataset import (
    TrainingSets,
    load_training_data,
    load_training_sets,
    parse_training_sets,
)
from contaccum.data.records import (
    Passage,
    Record,
    parse_columns,
    read_passages,
    read_records,
    sniff_format,
)
from contaccum.data.rows import RecordReport, passage_text
