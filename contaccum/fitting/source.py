"""The question-passage pairs of the user, and the dev and test sets that are held out of them."""

from __future__ import annotations

import math
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from contaccum.data.readers import SPLIT_RECORD, Source
from contaccum.data.records import RecordReport
from contaccum.data.split import (
    CORPUS_FILE,
    FEW_TEST_QUERIES,
    TRAIN_FILE,
    Split,
    SplitSettings,
    read_split,
    split_data,
)
from contaccum.errors import ConfigError
from contaccum.files import atomic_folder
from contaccum.fitting.folder import hash_content

MAX_FOLDS = 5
"""The largest number of splits of a small data set; each split needs a training."""


@dataclass(frozen=True)
class DataSource:
    """Question-passage pairs, or a folder in which the pairs are split already.

    Attributes:
        path: pairs in any format of docs/data.md, or a folder that `contaccum split` wrote.
        corpus: the documents in which dev and test queries are searched; None: the held-out
            passages and a sample of the others.
        data_format, columns, on_bad_record: how the pairs are read, as in `contaccum train`.
        dev, test: the sizes of the held-out sets; see `SplitSettings`.
        min_score: the least score or label of a pair that is a match; see `read_records`.
    """

    path: Path
    corpus: Path | None = None
    data_format: str | None = None
    columns: dict[str, str] | None = None
    on_bad_record: Literal["stop", "skip"] = "stop"
    dev: float | None = None
    test: float | None = None
    min_score: float | None = None

    def __post_init__(self) -> None:
        """Raise `ConfigError` for sizes out of range."""
        SplitSettings(self.dev, self.test)

    def make_record(self, output: Path) -> dict[str, Any]:
        """Return everything that decides the split, with hashes of the files, as a JSON record.

        Args:
            output: the output folder of the fit, which is not hashed.

        Raises:
            ConfigError: for a file that cannot be read.
        """
        record = asdict(self)
        record["path"] = str(self.path)
        record["content"] = hash_content(self.path, output)
        record["corpus_content"] = None
        if self.corpus is not None:
            record["corpus"] = str(self.corpus)
            record["corpus_content"] = hash_content(self.corpus, output)
        return record

    @property
    def is_split(self) -> bool:
        """True if the data are a folder that `contaccum split` wrote."""
        return (self.path / SPLIT_RECORD).is_file()

    def hold_out(self, folder: Path, fold: int = 0, show_progress: bool = False) -> list[str]:
        """Split the pairs into train, dev and test in a folder, unless the folder exists.

        Args:
            fold: the number of the split, from 0. The test sets of two folds have no query in
                common.
            show_progress: True for a progress bar.

        Returns:
            Lines for the user: the first record as it was read, and the number of records that were
            bad or left out, if there are any. No lines if nothing was read.

        Raises:
            UserError: for data that cannot be read or split.
        """
        if folder.exists():
            return []
        if self.is_split:
            self._copy_split(folder)
            return []
        report = RecordReport(self.on_bad_record)
        pairs = Source(self.path, self.data_format, columns=self.columns, min_score=self.min_score)
        settings = SplitSettings(self.dev, self.test, fold=fold)
        split_data(pairs, folder, settings, self.corpus, report, show_progress)
        lines = [f"{self.path}: {pairs.describe_first_record()}"]
        if report.reported:
            lines.append(f"{self.path}: {report.summary()}")
        return lines

    def _copy_split(self, folder: Path) -> None:
        """Copy a folder that `contaccum split` wrote.

        Raises:
            ConfigError: if options are set that only apply to data which are not split yet.
            DataError: if the record of the split cannot be read.
        """
        for name in ("corpus", "dev", "test", "data_format", "columns", "min_score"):
            if getattr(self, name) is not None:
                raise ConfigError(
                    f"{name} is set, but {self.path} is a split already: drop it, or give the pairs"
                )
        parts = (TRAIN_FILE, CORPUS_FILE, "dev", "test", SPLIT_RECORD)
        read_split(self.path)
        with atomic_folder(folder) as new_folder:
            for name in parts:
                part = self.path / name
                if part.is_dir():
                    shutil.copytree(part, new_folder / name)
                else:
                    shutil.copyfile(part, new_folder / name)

    def count_folds(self, split: Split) -> int:
        """Return the number of folds that together have enough test queries, at most `MAX_FOLDS`.

        It is 1 if the first split has enough test queries, or if the data allow only one split.

        Args:
            split: the first split.
        """
        # A BEIR folder may have a test set of its own, which is then used.
        has_test_set = any(self.path.glob("qrels/test.tsv*"))
        is_fixed = self.is_split or split.test == 0 or split.held_out_by == "query" or has_test_set
        if split.test >= FEW_TEST_QUERIES or is_fixed:
            return 1
        needed = math.ceil(FEW_TEST_QUERIES / split.test)
        possible = split.available // split.test
        return max(1, min(MAX_FOLDS, needed, possible))
