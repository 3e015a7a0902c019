"""The user's pairs, and how dev and test sets are held out of them."""

from __future__ import annotations

import math
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from contaccum.data.readers import Source
from contaccum.data.records import RecordReport
from contaccum.data.split import (
    CORPUS_FILE,
    FEW_TEST_QUERIES,
    RECORD_FILE,
    TRAIN_FILE,
    Split,
    SplitSettings,
    read_split,
    split_data,
)
from contaccum.errors import ConfigError, DataError
from contaccum.files import atomic_folder
from contaccum.fitting.folder import content_of

MOST_FOLDS = 5
"""Splits that few data are judged by, at most: each takes a training."""


@dataclass(frozen=True)
class DataSource:
    """Question-passage pairs, or a split of them that was made before.

    Attributes:
        path: pairs in any format of docs/data.md, or a folder that `contaccum split` wrote.
        corpus: documents, all of which dev and test are searched in.
        data_format, columns, on_bad_record: how the pairs are read, as `contaccum train` does.
        dev, test: sizes of the held-out sets; see `SplitSettings`.
    """

    path: Path
    corpus: Path | None = None
    data_format: str | None = None
    columns: list[str] | None = None
    on_bad_record: Any = "stop"
    dev: float | None = None
    test: float | None = None

    def record(self) -> dict[str, Any]:
        """Return what decides the split, with hashes of the files; raises `ConfigError`."""
        hashes = {"content": content_of(self.path), "corpus_content": None}
        if self.corpus is not None:
            hashes["corpus_content"] = content_of(self.corpus)
        record = {**asdict(self), **hashes}
        for key in ("path", "corpus"):
            record[key] = None if record[key] is None else str(record[key])
        return record

    @property
    def is_split(self) -> bool:
        """Whether the data are a folder that `contaccum split` wrote."""
        return (self.path / RECORD_FILE).is_file()

    def hold_out(self, folder: Path, fold: int = 0) -> str | None:
        """Write the split into a folder, unless it lies there already.

        Args:
            fold: another one has other test queries.

        Returns:
            A line on records that were left out, if there were some.

        Raises:
            UserError: for data that cannot be read or split.
        """
        if folder.exists():
            return None
        if self.is_split:
            self._copy_split(folder)
            return None
        report = RecordReport(self.on_bad_record)
        source = Source(self.path, self.data_format, columns=self.columns)
        settings = SplitSettings(self.dev, self.test, fold=fold)
        split_data(source, folder, settings, self.corpus, report)
        return f"{self.path}: {report.summary()}" if report.reported else None

    def _copy_split(self, folder: Path) -> None:
        """Copy a split; raises `DataError` where it is not whole, `ConfigError` for sizes and a corpus."""
        for name in ("corpus", "dev", "test", "data_format", "columns"):
            if getattr(self, name) is not None:
                raise ConfigError(
                    f"{name} is set, but {self.path} is a split already: drop it, or give the pairs"
                )
        parts = (TRAIN_FILE, CORPUS_FILE, "dev", "test", RECORD_FILE)
        for name in parts:
            if not (self.path / name).exists():
                raise DataError(
                    f"{self.path}: lacks {name}; split the data again with contaccum split"
                )
        read_split(self.path)
        with atomic_folder(folder) as new_folder:
            for name in parts:
                part = self.path / name
                copy = shutil.copytree if part.is_dir() else shutil.copyfile
                copy(part, new_folder / name)

    def count_folds(self, split: Split) -> int:
        """Return how many splits it takes to have enough test queries; 1 where that is enough, or all there is."""
        keeps_its_test = self.is_split or split.test == 0 or split.held_out_by == "query"
        if split.test >= FEW_TEST_QUERIES or keeps_its_test or has_test_of_its_own(self.path):
            return 1
        queries = split.train + split.dev + split.test
        return min(MOST_FOLDS, math.ceil(FEW_TEST_QUERIES / split.test), queries // split.test)


def has_test_of_its_own(path: Path) -> bool:
    """Return whether data come with a test set, which is kept."""
    return any(path.glob("qrels/test.tsv*"))
