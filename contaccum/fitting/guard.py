"""The guard of `contaccum fit`, which keeps the quality of the base model on other data.

A guard set is a data set of the user, other than the training data, on which the fitted model may
lose only a little against the base model. After the final training, the interpolated models
(1 - w) * base + w * trained are scored for several weights w, on the fit's dev set and on the guard
sets. The rule of `contaccum.merging.choice` chooses one of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from contaccum.data.beir import load_beir_folder, read_split_queries
from contaccum.data.records import RecordReport, normalise, passage_text
from contaccum.defaults import DEFAULT_WEIGHTS
from contaccum.encoders.dual_encoder import DualEncoder
from contaccum.encoders.interpolation import WeightInterpolation
from contaccum.errors import DataError
from contaccum.evaluation.beir_sets import load_data
from contaccum.files import AnyPath, read_json, write_json
from contaccum.fitting.baselines import (
    get_trial_dev_set,
    measure_seconds_per_text,
    sample_for_timing,
)
from contaccum.fitting.final import load_trained
from contaccum.fitting.folder import FitFolder
from contaccum.merging.choice import (
    check_guard_loss,
    check_weights,
    choose_weight,
)
from contaccum.merging.output import save_merged_model
from contaccum.merging.scoring import ScoringSettings, WeightScorer

_TRAINED_NAME = "the trained model"  # in the model card


class _GuardSet(NamedTuple):
    """A data set on which the quality of the base model must not get lost.

    Attributes:
        source: BEIR folder or name of a public set.
        fingerprint: hash of the data.
        num_documents: number of documents in its corpus.
        sample: a few documents, with which the time of encoding is measured.
        queries: normalised texts of its queries.
    """

    source: str
    fingerprint: str
    num_documents: int
    sample: list[str]
    queries: frozenset[str]


class Guard:
    """The guard sets of a fit, and the choice of a weight by their scores.

    `read_sets` must be called first: the other methods use what it has read.

    Args:
        sources: BEIR folders or names of public sets.
        guard_loss: the nDCG@10 that a weight may lose on each guard set.
        folder: the output folder of the fit.

    Raises:
        ConfigError: if ``guard_loss`` is out of range.
    """

    def __init__(self, sources: Sequence[AnyPath], guard_loss: float, folder: FitFolder) -> None:
        check_guard_loss(guard_loss)
        self._guard_loss = guard_loss
        self._folder = folder
        self._weights = check_weights(DEFAULT_WEIGHTS)
        self._sources = [os.fspath(source) for source in sources]
        self._sets: list[_GuardSet] = []

    def read_sets(self) -> None:
        """Read all guard sets once, so that a faulty set is reported before the training.

        Raises:
            UserError: if a guard set cannot be read, or two sets have the same data.
        """
        self._sets = [_read_guard_set(source) for source in self._sources]
        fingerprints = {guard_set.fingerprint for guard_set in self._sets}
        if len(fingerprints) < len(self._sets):
            raise DataError("guard: two of the guard sets have the same data; name each set once")

    def refuse_test_queries(self, test: Path) -> None:
        """Raise `DataError` if a guard set has queries of the fit's test set, a BEIR folder."""
        queries = read_split_queries(test, "test", RecordReport("stop"))
        test_queries = {normalise(query) for query in queries.values()}
        for guard_set in self._sets:
            num_shared = len(test_queries & guard_set.queries)
            if num_shared:
                raise DataError(
                    f"guard: {guard_set.source} has {num_shared:,} queries of the test set, which "
                    "would be used for a choice before the verdict; give other data"
                )

    def make_request(self) -> dict[str, Any]:
        """Return the guard's data and settings, for the record of the fit's settings."""
        sets = {guard_set.source: guard_set.fingerprint for guard_set in self._sets}
        return {"sets": sets, "guard_loss": self._guard_loss}

    def estimate_seconds(
        self,
        base: DualEncoder,
        dev_seconds: float,
        batch_size: int,
        is_query_side: bool,
    ) -> float:
        """Estimate the time in seconds for scoring all weights on dev and on the guard sets.

        It is the time of encoding the documents, extrapolated from a sample of each guard set.
        Queries are not counted, because they are short.

        Args:
            base: the base model.
            dev_seconds: seconds for encoding the documents of dev once.
            batch_size: texts per forward pass.
            is_query_side: whether only the query tower is trained. If so, all weights have the same
                document embeddings, which are computed once; otherwise once for each weight.
        """
        seconds = dev_seconds
        for guard_set in self._sets:
            seconds_per_document = measure_seconds_per_text(base, guard_set.sample, batch_size)
            seconds += guard_set.num_documents * seconds_per_document
        if is_query_side:
            return seconds
        return seconds * len(self._weights)

    def choose(
        self,
        base: DualEncoder,
        base_name: str,
        batch_size: int,
        show_progress: bool,
        print_line: Callable[[str], None],
    ) -> None:
        """Choose a weight, and write its model and the record of the choice.

        The command may have been started before in the same folder. If the record exists already,
        nothing is done. Scores that exist already are not computed again.

        Args:
            base: the base model.
            base_name: the name of the base model in the model card.
            batch_size: texts per forward pass.
            show_progress: show progress bars.
            print_line: function that is called with each line of text for the user.
        """
        folder = self._folder
        if folder.guard_file.is_file():
            return
        trained = load_trained(folder.trained_model, base)
        interpolation = WeightInterpolation(base, trained)
        settings = ScoringSettings(batch_size, show_progress=show_progress)
        scorer = WeightScorer(interpolation, settings, folder.guard_scores_file, print_line)
        # The folder of the dev set has a single split, which is called "test" as in BEIR.
        dev = load_beir_folder(get_trial_dev_set(folder), "test")
        dev = replace(dev, name="dev")
        scores = [scorer.score(dev, "own", self._weights)]
        for guard_set in self._sets:
            scores.append(scorer.score(load_data(guard_set.source), "guard", self._weights))
        choice = choose_weight(scores, self._guard_loss)
        print_line(choice.rule)
        print_line(choice.table())
        print_line(choice.describe())
        save_merged_model(interpolation, choice, folder.model, base_name, _TRAINED_NAME)
        # The record is written last, so that the model is complete if the record exists.
        write_json(folder.guard_file, {**choice.record(), "line": choice.describe()})


def _read_guard_set(source: str) -> _GuardSet:
    """Read a guard set, and return its fingerprint, its size, its queries and a few documents.

    The corpus itself is not kept in memory.
    """
    dataset = load_data(source)
    sample = []
    for document in sample_for_timing(dataset.corpus.values(), len(dataset.corpus)):
        sample.append(passage_text(document.get("title") or "", document["text"]))
    queries = frozenset(normalise(query) for query in dataset.queries.values())
    return _GuardSet(source, dataset.fingerprint, len(dataset.corpus), sample, queries)


def read_guard_record(folder: FitFolder) -> dict[str, Any] | None:
    """Return the record of the choice, or None if the fit has no guard or has not chosen yet."""
    if not folder.guard_file.is_file():
        return None
    record: dict[str, Any] = read_json(folder.guard_file)
    return record


def find_chosen_row(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the scores of the chosen weight on dev.

    Args:
        record: record of the choice; see `WeightChoice.record`. Its first data set is dev.
    """
    rows: list[dict[str, float]] = record["data_sets"][0]["rows"]
    [chosen_row] = [row for row in rows if row["weight"] == record["weight"]]
    return chosen_row


def load_at_weight(base: DualEncoder, trained_folder: Path, weight: float | None) -> DualEncoder:
    """Return the interpolated model of a weight, between a base model and a trained model.

    Args:
        base: the base model.
        trained_folder: the folder of the trained model. It need not exist for a weight of 0.
        weight: the weight of the trained model: 0 returns the base model itself; None returns the
            trained model itself.
    """
    if weight == 0:
        return base
    trained = load_trained(trained_folder, base)
    if weight is None:
        return trained
    return WeightInterpolation(base, trained).set_weight(weight)
