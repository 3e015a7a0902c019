"""Repeated splits: where one test set has too few queries, the settings are tried on others as well.

The settings were chosen on the dev queries of the first split, so these are no test queries of
another one. The model that the user gets is that of the first split.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from contaccum.data.beir import load_beir_folder
from contaccum.data.near_duplicates import normalise
from contaccum.data.split import CORPUS_FILE, TRAIN_FILE
from contaccum.encoders.dual_encoder import DualEncoder
from contaccum.files import read_json, write_json
from contaccum.fitting.baselines import encode_corpus, evaluator_of
from contaccum.fitting.final import Tested, search_test, train_final
from contaccum.fitting.folder import FitFolder
from contaccum.fitting.source import DataSource
from contaccum.training.arguments import ContAccumTrainingArguments
from contaccum.tuning.negatives import MINED_FILE, mine_once

SYSTEMS = ("bm25", "base", "trained")

FoldScores = dict[str, dict[str, float]]
"""{system: {query: nDCG@10}}"""


class Fold:
    """Another split of the same data.

    Args:
        source: of the pairs.
        folder: of the fit.
        number: of the fold, from 1; 0 is the first split.
        method: that the config trains by.
    """

    def __init__(self, source: DataSource, folder: FitFolder, number: int, method: str) -> None:
        self._source = source
        self._fit_folder = folder
        self._number = number
        self._is_query_side = method == "query_side"
        self._folder = folder.folds / str(number)
        self._scores_file = folder.folds / f"{number}.json"

    @property
    def is_done(self) -> bool:
        """Whether an earlier start has scored it."""
        return self._scores_file.is_file()

    def score(self, base: DualEncoder, args: ContAccumTrainingArguments) -> FoldScores:
        """Train on the split and test; the model is not kept.

        Args:
            base: the model as it is.
            args: know of processes and batches.
        """
        if not self.is_done:
            self._train(base, args)
            with args.main_process_first(local=False, desc="testing a split"):
                if args.process_index == 0:
                    write_json(self._scores_file, self._test(base, args))
                    shutil.rmtree(self._folder)
        scores: FoldScores = read_json(self._scores_file)
        return scores

    def _train(self, base: DualEncoder, args: ContAccumTrainingArguments) -> None:
        data = self._folder / "data"
        store = self._folder / "store"
        with args.main_process_first(local=False, desc="holding out another split"):
            if args.process_index == 0:
                self._source.hold_out(data, self._number)
                encode_corpus(
                    base, "base", data / CORPUS_FILE, store, args.per_device_eval_batch_size
                )
        overrides = {"train_data": str(data / TRAIN_FILE), "eval_data": str(data / "dev")}
        if self._is_query_side:
            overrides["passage_store"] = str(store)
        if self._has_mined_negatives():
            with args.main_process_first(local=False, desc="mining hard negatives"):
                mined = mine_once(
                    [overrides["train_data"]], str(data / CORPUS_FILE), self._folder / MINED_FILE
                )
            if mined is None:
                overrides["num_hard_negatives"] = "0"
            else:
                overrides["train_data"] = str(mined)
        train_final(self._fit_folder.config, self._folder / "model", overrides)

    def _has_mined_negatives(self) -> bool:
        """Return whether the chosen settings are with hard negatives that BM25 has found."""
        settings = yaml.safe_load(self._fit_folder.config.read_text(encoding="utf-8"))
        return Path(settings["train_data"]).name == MINED_FILE

    def _test(self, base: DualEncoder, args: ContAccumTrainingArguments) -> FoldScores:
        """Return the scores of the queries that the settings were not chosen by."""
        batch_size = args.per_device_eval_batch_size
        evaluator = evaluator_of(self._folder / "data" / "test", self._folder / "store", batch_size)
        trained = DualEncoder.from_pretrained(str(self._folder / "model"), device=str(args.device))
        tested = search_test(evaluator, base, trained, self._is_query_side)
        dev = load_beir_folder(self._fit_folder.data / "dev", "test")
        chosen_by = {normalise(query) for query in dev.queries.values()}
        scores: FoldScores = {}
        for system in SYSTEMS:
            scores[system] = {}
            for query, score in tested[system].query_scores.items():
                if normalise(evaluator.dataset.queries[query]) not in chosen_by:
                    scores[system][f"{self._number}/{query}"] = score
        return scores


def pool_scores(tested: Mapping[str, Tested], others: Sequence[FoldScores]) -> FoldScores:
    """Return the scores of all queries: those of the first split's test set, and of other splits."""
    pooled: FoldScores = {}
    for system in SYSTEMS:
        pooled[system] = dict(tested[system].query_scores)
        for scores in others:
            pooled[system].update(scores[system])
    return pooled
