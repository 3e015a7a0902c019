"""The journal of a search: all trials in a file, so that a search can continue after a kill."""

from __future__ import annotations

import statistics
import warnings
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

from contaccum.tuning.choice import FinishedTrial

JOURNAL = "trials.jsonl"

_STUDY_NAME = "contaccum"
# A trial is stopped halfway if Wilcoxon's signed-rank test over groups of queries shows, with a
# smaller p-value, that it is worse than the best trial was halfway.
_PRUNING_P_VALUE = 0.01


def open_study(folder: Path) -> tuple[optuna.Study, list[dict[str, Any]]]:
    """Open the journal in a folder, or create it.

    Trials that a killed search has not finished are marked as failed. The search proposes an
    unfinished rung of a ladder again by itself.

    Returns:
        The study, and Optuna's parameters of each other unfinished trial, to be tried again.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / JOURNAL
    if file.is_file():
        _drop_incomplete_line(file)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with warnings.catch_warnings():
        # Experimental in Optuna, but its only pruner that compares two trials step by step.
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        pruner = optuna.pruners.WilcoxonPruner(p_threshold=_PRUNING_P_VALUE)
    study = optuna.create_study(
        storage=JournalStorage(JournalFileBackend(str(file))),
        study_name=_STUDY_NAME,
        direction="maximize",
        pruner=pruner,
        load_if_exists=True,
    )
    interrupted = []
    for trial in study.get_trials(states=(TrialState.RUNNING,)):
        query_scores = trial.user_attrs.get("query_scores")
        if query_scores is not None:  # the search was killed after the trial had ended
            study.tell(trial.number, statistics.fmean(query_scores.values()))
            continue
        study.tell(trial.number, state=TrialState.FAIL)
        if "rung" not in trial.user_attrs:
            interrupted.append(trial.params)
    return study, interrupted


def read_finished_trials(study: optuna.Study) -> list[FinishedTrial]:
    """Return the trials that were scored, stopped or failed, in the order in which they ran.

    A trial that was interrupted when the search was killed has no recorded time. It is left out.
    """
    states = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)
    finished = []
    for trial in study.get_trials(states=states):
        if "seconds" in trial.user_attrs:
            finished.append(_to_finished_trial(trial))
    return finished


def _to_finished_trial(trial: FrozenTrial) -> FinishedTrial:
    """Return a trial of the study as a `FinishedTrial`."""
    attributes = trial.user_attrs
    return FinishedTrial(
        number=trial.number,
        settings=attributes["settings"],
        score=trial.value if trial.state == TrialState.COMPLETE else None,
        query_scores=attributes.get("query_scores", {}),
        seconds=attributes["seconds"],
        updates=attributes.get("updates", 0),
        note=attributes.get("note", ""),
        rung=attributes.get("rung"),
        seconds_per_update=attributes.get("seconds_per_update", 0.0),
    )


def _drop_incomplete_line(file: Path) -> None:
    """Remove the last line of a journal if it is incomplete, because the search was killed."""
    content = file.read_bytes()
    if content and not content.endswith(b"\n"):
        file.write_bytes(content[: content.rfind(b"\n") + 1])
