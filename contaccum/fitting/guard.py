"""The guard of `contaccum fit`: a model that also keeps the quality of the base model elsewhere.

After the final training, models between the base model and the trained model are scored on dev and
on the user's guard sets, and the rule of `contaccum.merging.choice` chooses one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from contaccum.data.beir import load_beir_folder
from contaccum.data.records import passage_text
from contaccum.encoders.dual_encoder import DualEncoder
from contaccum.encoders.merge import WeightInterpolation
from contaccum.errors import DataError
from contaccum.evaluation.beir_sets import load_data
from contaccum.files import AnyPath, read_json, write_json
from contaccum.fitting.baselines import (
    NUM_MEASURED_DOCUMENTS,
    get_trial_dev_set,
    measure_seconds_per_text,
)
from contaccum.fitting.folder import FitFolder
from contaccum.merging.choice import (
    DEFAULT_WEIGHTS,
    check_guard_loss,
    check_weights,
    choose_weight,
)
from contaccum.merging.output import save_merged_model
from contaccum.merging.scoring import ScoringSettings, WeightScorer

_TRAINED_NAME = "the trained model"


class _GuardSet(NamedTuple):
    """A data set on which the quality of the base model is to be kept."""

    source: str  # folder or public name
    fingerprint: str
    num_documents: int
    sample: list[str]  # documents, to measure the time of encoding


class Guard:
    """The guard sets of a fit, and the choice of a weight by their scores.

    Args:
        sources: BEIR folders or names of public sets; all of them are read once.
        guard_loss: the nDCG@10 that a weight may lose on each guard set.
        folder: the output folder of the fit.

    Raises:
        UserError: if a guard set cannot be read, or ``guard_loss`` is out of range.
    """

    def __init__(self, sources: Sequence[AnyPath], guard_loss: float, folder: FitFolder) -> None:
        check_guard_loss(guard_loss)
        self._guard_loss = guard_loss
        self._folder = folder
        self._weights = check_weights(DEFAULT_WEIGHTS)
        self._sets = [_read_guard_set(os.fspath(source)) for source in sources]
        fingerprints = {guard_set.fingerprint for guard_set in self._sets}
        if len(fingerprints) < len(self._sets):
            raise DataError("guard: two of the guard sets have the same data; name each set once")

    def make_request(self) -> dict[str, Any]:
        """Return everything that decides the choice, for the request of the fit."""
        sets = {guard_set.source: guard_set.fingerprint for guard_set in self._sets}
        return {"sets": sets, "guard_loss": self._guard_loss}

    def estimate_seconds(
        self,
        base: DualEncoder,
        dev_seconds: float,
        batch_size: int,
        is_query_side: bool,
    ) -> float:
        """Return the time that the scores of all weights take, measured on a part of the documents.

        Queries are not counted, because they are short.

        Args:
            base: the base model.
            dev_seconds: the time that one encoding of the documents of dev takes.
            batch_size: texts per forward pass.
            is_query_side: True if only the query tower will be trained. The documents are then
                encoded once, and otherwise once for each weight.
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

        If an earlier start has written both, nothing is done. Scores that an earlier start has
        computed are not computed again.

        Args:
            base: the base model.
            base_name: the name of the base model in the model card.
            batch_size: texts per forward pass.
            show_progress: show progress bars.
            print_line: is called with each line for the user.
        """
        folder = self._folder
        if folder.guard_file.is_file():
            return
        trained = DualEncoder.from_pretrained(str(folder.trained_model), device=str(base.device))
        interpolation = WeightInterpolation(base, trained)
        settings = ScoringSettings(batch_size, show_progress=show_progress)
        scorer = WeightScorer(interpolation, settings, folder.guard_scores_file, print_line)
        dev = replace(load_beir_folder(get_trial_dev_set(folder), "test"), name="dev")
        scores = [scorer.score(dev, "own", self._weights)]
        for guard_set in self._sets:
            scores.append(scorer.score(load_data(guard_set.source), "guard", self._weights))
        choice = choose_weight(scores, self._guard_loss)
        print_line(choice.rule)
        print_line(choice.table())
        print_line(choice.describe())
        save_merged_model(interpolation, choice, folder.model, base_name, _TRAINED_NAME)
        # The record is written last: where it is, the model is complete.
        write_json(folder.guard_file, {**choice.record(), "line": choice.describe()})


def _read_guard_set(source: str) -> _GuardSet:
    """Read a guard set, and keep only its size and a few documents."""
    dataset = load_data(source)
    sample = []
    for document in islice(dataset.corpus.values(), NUM_MEASURED_DOCUMENTS):
        sample.append(passage_text(document.get("title") or "", document["text"]))
    return _GuardSet(source, dataset.fingerprint, len(dataset.corpus), sample)


def read_guard_record(folder: FitFolder) -> dict[str, Any] | None:
    """Return the record of the choice, or None if the fit has no guard."""
    if not folder.guard_file.is_file():
        return None
    record: dict[str, Any] = read_json(folder.guard_file)
    return record


def find_chosen_row(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the row of the chosen weight on dev, which is the first data set of the record."""
    rows: list[dict[str, float]] = record["data_sets"][0]["rows"]
    [chosen_row] = [row for row in rows if row["weight"] == record["weight"]]
    return chosen_row


def load_at_weight(base: DualEncoder, trained_folder: Path, weight: float | None) -> DualEncoder:
    """Load a trained model, and interpolate it with the base model.

    Args:
        base: the base model.
        trained_folder: the folder of the trained model.
        weight: the weight of the trained model; None: the trained model as it is.
    """
    trained = DualEncoder.from_pretrained(str(trained_folder), device=str(base.device))
    if weight is None:
        return trained
    if weight == 0:
        return base
    return WeightInterpolation(base, trained).set_weight(weight)
