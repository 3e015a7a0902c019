"""Hard negatives that a search may try: those of the data, or some that BM25 finds once."""

from __future__ import annotations

from pathlib import Path

from contaccum.mining import mine_hard_negatives, write_mined
from contaccum.training.config import load_mining_set
from contaccum.training.options import DataArguments

MOST_SCORES = 2e9
"""Queries times documents that BM25 is asked to score; some minutes on a CPU."""

_MOST_OF_POSITIVE = 0.05  # a document that scores more than 95% of the positive may be one, too


def mine_once(data: DataArguments, corpus: str | None, file: Path) -> Path | None:
    """Write the training pairs with a hard negative each, found by BM25.

    A file that an earlier start has written is kept.

    Args:
        corpus: to find them in; None: the positives of the data.

    Returns:
        The file; None where there are several training sets, or too many documents.

    Raises:
        DataError: for data that cannot be read.
    """
    if file.is_file():
        return file
    if len(data.sets) != 1:
        return None
    mining_data = load_mining_set(data, corpus)
    if len(mining_data.queries) * mining_data.pool_size > MOST_SCORES:
        return None
    mined = mine_hard_negatives(mining_data, relative_margin=_MOST_OF_POSITIVE, num_negatives=1, show_progress=False)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_mined(mined, file)
    return file
