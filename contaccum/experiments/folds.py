"""Folds: further splits of a small data set, whose single test set would have too few queries.

As in cross-validation, each fold has other test queries, and the test queries of all folds together
decide the verdict. Fold 0 is the first split. The settings are chosen on its dev set, and the user
gets its model. On each further fold a model is trained with the same settings, tested and removed.
Dev queries of fold 0 may be test queries of another fold. They are left out there, because the
settings were chosen by them.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from contaccum.data.beir import BeirDataset, load_beir_folder
from contaccum.data.near_duplicates import group_queries, normalise
from contaccum.data.split import CORPUS_FILE, TRAIN_FILE
from contaccum.encoders.dual_encoder import DualEncoder
from contaccum.files import read_json, write_json
from contaccum.fitting.baselines import encode_corpus, get_trial_dev_set, load_evaluator
from contaccum.fitting.final import SystemResult, load_trained, search_test_set, train_final
from contaccum.fitting.folder import FitFolder
from contaccum.fitting.source import DataSource
from contaccum.merging import merge_models
from contaccum.training.arguments import ContAccumTrainingArguments
from contaccum.tuning.negatives import MINED_FILE, mine_once

SYSTEMS = ("bm25", "base", "trained")

FoldScores = dict[str, dict[str, float]]
"""{system: {query: nDCG@10}} of each of `SYSTEMS`, and {"group": {query: number of its group}}"""


class Fold:
    """A further split of the same data, its training and its test.

    Args:
        source: the user's pairs.
        folder: the output folder of the fit.
        number: the number of the fold, from 1.
        method: the chosen training method.
        weight: the weight at which the trained model is merged with the base model, which the
            guard of the fit has chosen. None: there is no guard, so nothing is merged. With 0, the
            base model itself is tested, and no model is trained.
    """

    def __init__(
        self,
        source: DataSource,
        folder: FitFolder,
        number: int,
        method: str,
        weight: float | None = None,
    ) -> None:
        self._source = source
        self._fit_folder = folder
        self._number = number
        self._weight = weight
        self._is_query_side = method == "query_side"
        self._folder = folder.folds / str(number)
        self._scores_file = folder.folds / f"{number}.json"

    @property
    def is_done(self) -> bool:
        """True if an earlier start of the command has scored this fold."""
        return self._scores_file.is_file()

    def score(self, base: DualEncoder, args: ContAccumTrainingArguments) -> FoldScores:
        """Train and test on the fold, and return the scores of its test queries.

        The split and the trained model are removed afterwards.

        Args:
            base: the base model.
            args: the arguments of a run, for the device, the process index and the batch sizes.
        """
        if not self.is_done:
            self._hold_out(base, args)
            if self._weight != 0:
                self._train(args)
            with args.main_process_first(local=False, desc="testing a split"):
                if args.process_index == 0:
                    write_json(self._scores_file, self._test(base, args))
        if args.process_index == 0:  # also if an earlier start was killed before it removed them
            shutil.rmtree(self._folder, ignore_errors=True)
        scores: FoldScores = read_json(self._scores_file)
        return scores

    def _hold_out(self, base: DualEncoder, args: ContAccumTrainingArguments) -> None:
        """Split the data, and encode the corpus."""
        data = self._folder / "data"
        store = self._folder / "store"
        with args.main_process_first(local=False, desc="holding out another split"):
            if args.process_index == 0:
                self._source.hold_out(data, self._number)
                corpus = data / CORPUS_FILE
                encode_corpus(base, "base", corpus, store, args.per_device_eval_batch_size)

    def _train(self, args: ContAccumTrainingArguments) -> None:
        """Train at the chosen settings."""
        data = self._folder / "data"
        # The config of the final training names data of fold 0, which this fold replaces. The dev
        # set of fold 0 may be reduced, so a sample of the same size is used here.
        dev_set = load_beir_folder(get_trial_dev_set(self._fit_folder), "test")
        overrides = {
            "train_data": str(data / TRAIN_FILE),
            "eval_data": str(data / "dev"),
            "eval_corpus_size": str(len(dev_set.corpus)),
        }
        if self._is_query_side:
            overrides["passage_store"] = str(self._folder / "store")
        if self._uses_mined_negatives():
            corpus = str(data / CORPUS_FILE)
            with args.main_process_first(local=False, desc="mining hard negatives"):
                mined = mine_once([overrides["train_data"]], corpus, self._folder / MINED_FILE)
            if mined is None:
                overrides["num_hard_negatives"] = "0"
            else:
                overrides["train_data"] = str(mined)
        train_final(self._fit_folder.config_file, self._folder / "model", overrides)

    def _uses_mined_negatives(self) -> bool:
        """Return True if the chosen settings use hard negatives that BM25 has mined."""
        settings = yaml.safe_load(self._fit_folder.config_file.read_text(encoding="utf-8"))
        return Path(settings["train_data"]).name == MINED_FILE

    def _test(self, base: DualEncoder, args: ContAccumTrainingArguments) -> FoldScores:
        """Return the scores of the test queries that are not dev queries of fold 0."""
        test_set = self._folder / "data" / "test"
        store = self._folder / "store"
        evaluator = load_evaluator(test_set, store, args.per_device_eval_batch_size)
        trained = base
        if self._weight != 0:
            trained = load_trained(self._folder / "model", base)
            if self._weight is not None:
                trained = merge_models(base, trained, self._weight)
        results = search_test_set(evaluator, base, trained)
        # The folder dev has a single BEIR split, which is called "test".
        dev = load_beir_folder(self._fit_folder.data / "dev", "test")
        dev_queries = {normalise(query) for query in dev.queries.values()}
        columns: FoldScores = {"group": dict(group_queries(evaluator.dataset))}
        columns |= {system: results[system].query_scores for system in SYSTEMS}
        scores: FoldScores = {}
        for name, values in columns.items():
            scores[name] = {}
            for query_id, value in values.items():
                if normalise(evaluator.dataset.queries[query_id]) not in dev_queries:
                    # Folds may use the same query ids, so the fold's number is added.
                    scores[name][f"{self._number}/{query_id}"] = value
        return scores


def pool_scores(
    first_results: Mapping[str, SystemResult], fold_scores: Sequence[FoldScores]
) -> FoldScores:
    """Return {system: {query: nDCG@10}} of the test queries of all folds.

    Args:
        first_results: {system: its result on the test set of fold 0}.
        fold_scores: the scores on each further fold.
    """
    pooled: FoldScores = {}
    for system in SYSTEMS:
        pooled[system] = dict(first_results[system].query_scores)
        for scores in fold_scores:
            pooled[system].update(scores[system])
    return pooled


def pool_groups(
    first_test_set: BeirDataset, fold_scores: Sequence[FoldScores]
) -> dict[str, tuple[int, float]]:
    """Return {query: fold and number of its group} of the test queries of all folds."""
    pooled: dict[str, tuple[int, float]] = {}
    for query, group in group_queries(first_test_set).items():
        pooled[query] = (0, group)
    for fold, scores in enumerate(fold_scores, start=1):
        for query, group_number in scores["group"].items():
            pooled[query] = (fold, group_number)
    return pooled
