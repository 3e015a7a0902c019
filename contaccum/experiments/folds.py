"""The user's pairs, and their splits into train, dev and test: one, or several folds of few pairs.

A small data set has several splits, because a single test set would have too few queries. As in
cross-validation, each fold has other test queries, and the test queries of all folds together
decide the verdict. Fold 0 is the first split. A candidate is chosen on its dev set, and the user
gets its model. On each further fold a model is trained in the same way, tested and removed. Dev
queries of fold 0 may be test queries of another fold. They are left out there, because the
candidate was chosen by them.
"""

from __future__ import annotations

import math
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from contaccum import work
from contaccum.data.beir import load_beir_folder
from contaccum.data.records import SPLIT_RECORD, RecordSource
from contaccum.data.rows import OnBadRecord, RecordReport
from contaccum.data.split import (
    CORPUS_FILE,
    FEW_TEST_QUERIES,
    TRAIN_FILE,
    WITH_GENERATED_FILE,
    Future,
    Split,
    SplitSettings,
    add_to_training,
    read_split,
    split_data,
)
from contaccum.errors import ConfigError
from contaccum.experiments.candidates import Candidate, encode_corpus
from contaccum.experiments.ladder import Ladder
from contaccum.experiments.run import train
from contaccum.experiments.verdict import ScoreColumns, collect_scores, search_test_set
from contaccum.files import atomic_folder, hash_path, require_exists
from contaccum.retrieval.documents import StoreDocuments
from contaccum.retrieval.store import EmbeddingStore
from contaccum.settings import Settings, replace
from contaccum.training.linear_map import write_linear_maps

MAX_FOLDS = 5  # each needs a training


@dataclass(frozen=True)
class Pairs:
    """Question-passage pairs, or a folder in which the pairs are split already.

    The attributes are arguments of `contaccum.fit`, with ``path`` for ``data`` and ``columns`` for
    ``data_columns``. A size or a ``future`` that does not exist raises `ConfigError`.
    """

    path: Path
    corpus: Path | None = None
    corpus_columns: dict[str, str] | None = None
    columns: dict[str, str] | None = None
    on_bad_record: OnBadRecord = "stop"
    dev: float | None = None
    test: float | None = None
    future: Future | None = None
    min_score: float | None = None
    generated: Path | None = None

    def __post_init__(self) -> None:
        SplitSettings(self.dev, self.test, future=self.future)

    def describe(self, output: Path) -> dict[str, Any]:
        """Return everything that decides the split, with hashes of the files.

        ``output``, the folder of the fit, is not hashed. A file that does not exist or cannot be
        read raises `ConfigError`.
        """
        description = asdict(self)
        files = {"data": self.path, "corpus": self.corpus, "generated": self.generated}
        for name, path in files.items():
            description[name] = None
            if path is not None:
                require_exists(path)
                description[name] = hash_path(str(path), left_out=output)
        del description["path"]
        return description

    @property
    def is_split(self) -> bool:
        """True if the data are a folder that `contaccum split` wrote."""
        return (self.path / SPLIT_RECORD).is_file()

    def hold_out(self, folder: Path, fold: int = 0, show_progress: bool = False) -> list[str]:
        """Split the pairs into train, dev and test in a folder, unless the folder exists.

        A folder that `contaccum split` wrote is copied. Generated questions are added to those of
        train, in a file of their own. The test sets of two folds (0, 1, ...) have no query in
        common.

        Returns:
            Lines for the user: the first record as it was read, and the number of records that were
            bad or left out, if there are any. No lines if nothing was read.

        Raises:
            UserError: for data that cannot be read or split, or options that only apply to data
                which are not split yet.
        """
        lines = []
        if self.is_split and not folder.exists():
            self._copy_split(folder)
        elif not folder.exists():
            report = RecordReport(self.on_bad_record)
            pairs = RecordSource(self.path, columns=self.columns, min_score=self.min_score)
            split_data(
                pairs,
                folder,
                SplitSettings(self.dev, self.test, fold=fold, future=self.future),
                self.corpus,
                report,
                show_progress,
                corpus_columns=self.corpus_columns,
            )
            lines.append(f"{self.path}: {pairs.describe_first_record()}")
            if report.reported or report.repeated.total():
                lines.append(report.summary())
        if self.generated is not None and not (folder / WITH_GENERATED_FILE).exists():
            report = RecordReport(self.on_bad_record)
            lines.append(add_to_training(folder, RecordSource(self.generated), report))
        return lines

    def _copy_split(self, folder: Path) -> None:
        for name, value in vars(self).items():
            if value is not None and name not in ("path", "on_bad_record", "generated"):
                raise ConfigError(
                    f"{name} is set, but {self.path} is a split already: drop it, or give the pairs"
                )
        read_split(self.path)
        with atomic_folder(folder) as new_folder:
            for name in (TRAIN_FILE, CORPUS_FILE, SPLIT_RECORD):
                shutil.copyfile(self.path / name, new_folder / name)
            for name in ("dev", "test"):
                shutil.copytree(self.path / name, new_folder / name)

    def count_folds(self, split: Split) -> int:
        """Return the number of folds that together have enough test queries, at most `MAX_FOLDS`.

        It is 1 if the first split has enough, or if the data allow only one split.
        """
        if self.is_split:
            return 1
        return min(MAX_FOLDS, math.ceil(FEW_TEST_QUERIES / split.test), split.folds)


def score_fold(number: int, ladder: Ladder, chosen: Candidate, pairs: Pairs) -> ScoreColumns:
    """Train the chosen candidate on a further fold, and return the scores of its test queries.

    The split and the trained model are removed afterwards. ``number`` is that of the fold, from 1.
    """
    job, base, given = ladder.job, ladder.base, ladder.given_vectors
    folder = job.folder / "folds" / str(number)
    data = folder / "data"
    train_file = data / chosen.train_file
    store = folder / "base_store"  # not the name of a candidate's own store

    def open_documents() -> StoreDocuments:
        return given.documents if given else StoreDocuments(EmbeddingStore.open(store))

    def hold_out() -> None:
        pairs.hold_out(data, number)
        if given is None:
            encode_corpus(job, base, "base", data / CORPUS_FILE, store)
        if chosen.system == "map":
            write_linear_maps(
                base,
                train_file,
                open_documents(),
                job.batch_size,
                folder,
                ridges=[chosen.ridge] if chosen.ridge is not None else [],
                # The machine may be busier than before.
                seconds=2 * chosen.training_seconds if chosen.ridge is None else 0.0,
                aligned=given and given.aligned,
            )

    def test() -> ScoreColumns:
        test_set, results = search_test_set(data, open_documents(), ladder, chosen, folder)
        first_dev = load_beir_folder(job.data / "dev", "test")
        return collect_scores(test_set, results, number, first_dev)

    def score() -> ScoreColumns:
        work.on_first_rank(hold_out)
        if chosen.system == "trained":
            settings = replace(Settings(), **chosen.settings)
            changes: dict[str, Any] = {
                "train_data": [str(train_file)],
                "blend": 1.0,  # it is made of the trained model when that is loaded
                "trust_remote_code": base.trust_remote_code,  # not by a file of somebody else
            }
            if settings.method == "query_side":
                changes["passage_store"] = str(store)
            if settings.second_stage is not None:
                changes["second_stage"] = str(data / CORPUS_FILE)
            train(replace(settings, **changes), folder, job.status)
        return work.on_first_rank(test)

    scores = work.once(folder, {**job.request, "candidate": chosen.name}, score, all_ranks=True)
    work.on_first_rank(work.remove_files, folder)  # also those of a start that was killed
    return scores
