"""Hard negatives that a search may try: those of the data, or some that BM25 finds once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from contaccum.errors import DataError
from contaccum.mining import mine_hard_negatives, write_mined
from contaccum.training.config import load_mining_set
from contaccum.training.options import DataArguments

MINED_FILE = "mined.jsonl"
MOST_SCORES = 2e9
"""Queries times documents that BM25 is asked to score; some minutes on a CPU."""

_MARGIN = 0.05  # a document that scores more than 95% of the positive may be one, too


def mine_once(train_data: list[str], corpus: str | None, file: Path, **options: Any) -> Path | None:
    """Write the training pairs with a hard negative each, found by BM25.

    A file that an earlier start has written is kept.

    Args:
        train_data: as `contaccum train` takes it.
        corpus: to find them in; None: the positives of the data.
        options: of the training data, such as ``data_columns``.

    Returns:
        The file; None where there are several training sets, too many documents, or no negatives.

    Raises:
        DataError: for data that cannot be read.
    """
    if file.is_file():
        return file
    data = DataArguments(train_data=train_data, **options)
    if len(data.sets) != 1:
        return None
    mining_data = load_mining_set(data, corpus)
    if len(mining_data.queries) * mining_data.pool_size > MOST_SCORES:
        return None
    try:
        mined = mine_hard_negatives(
            mining_data, relative_margin=_MARGIN, num_negatives=1, show_progress=False
        )
    except DataError:  # queries and passages have no words in common
        return None
    file.parent.mkdir(parents=True, exist_ok=True)
    write_mined(mined, file)
    return file
