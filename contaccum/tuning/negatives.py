"""Hard negatives for a search whose training data have none: BM25 mines them once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from contaccum.errors import DataError
from contaccum.mining import load_mining_data, mine_hard_negatives, write_mined
from contaccum.settings import Settings
from contaccum.training.run import list_training_sets

MINED_FILE = "mined.jsonl"

MAX_SCORES = 2e9
"""The largest number of query-document scores that BM25 computes; some minutes on a CPU."""

# A document that scores more than 95% of the positive is left out: it may be relevant as well.
_RELATIVE_MARGIN = 0.05


def mine_once(train_data: list[str], corpus: str | None, file: Path, **options: Any) -> Path | None:
    """Mine one hard negative per query with BM25, and write the training data with them to a file.

    The file has the records of the training data with all their positives, so training on it masks
    the same known positives.

    If an earlier start of the command has written the file, it is not written again.

    Args:
        train_data: the value of the option ``train_data`` of `contaccum train`.
        corpus: the documents to search for negatives; None: the positives of the training data.
        file: the file to write.
        options: further options of the training data, such as ``data_columns``.

    Returns:
        The file. None if there are several training sets, if BM25 would have to compute more than
        `MAX_SCORES` scores, or if it finds no negatives.

    Raises:
        DataError: for data that cannot be read.
    """
    if file.is_file():
        return file
    data = Settings(train_data=train_data, **options)
    sets = list_training_sets(data)
    if len(sets) != 1:
        return None
    [training_set] = sets.values()
    source_options = {}
    for name in ("data_format", "split", "columns", "min_score"):
        if name in training_set:
            source_options[name] = training_set[name]
    mining_data = load_mining_data(
        training_set["path"],
        corpus,
        on_bad_record=data.on_bad_record,
        **source_options,
    )
    if len(mining_data.queries) * mining_data.pool_size > MAX_SCORES:
        return None
    try:
        mined = mine_hard_negatives(
            mining_data, relative_margin=_RELATIVE_MARGIN, num_negatives=1, show_progress=False
        )
    except DataError:  # queries and passages have no words in common
        return None
    file.parent.mkdir(parents=True, exist_ok=True)
    write_mined(mined, file)
    return file
