"""The search: trials by Optuna within a budget of time, and the choice of the best settings.

Each method first climbs a ladder of learning rates; then Optuna's TPE chooses all settings
together. Finished trials are kept in a journal, so that a search that was killed goes on.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

from contaccum.errors import ConfigError, UserError
from contaccum.evaluation.evaluator import RetrievalEvaluator
from contaccum.files import redact
from contaccum.tuning.budget import Budget, show_duration
from contaccum.tuning.choice import best_value, compare_scores, smooth
from contaccum.tuning.ladder import as_text, next_values
from contaccum.tuning.space import (
    FIRST_RATES,
    MOST_RATES,
    RATE_FACTOR,
    Setting,
    suggest,
)
from contaccum.tuning.trial import Options, QueryScores, TooSlow, run_trial

JOURNAL = "trials.jsonl"
MOST_TRIALS = 40
LEAST_UPDATES = 8
"""A trial of fewer updates says nothing."""

_OF_A_LADDER = {"method", "learning_rate"}
_TOO_SLOW = "too slow for the budget"
_HOPELESS = 0.01  # p of Wilcoxon's signed-rank test against the best trial, halfway through both
_SHARE_OF_A_TRIAL = 1 / 6  # of the time that is left: longer trials are made shorter


class Finished(NamedTuple):
    """A trial that was scored, stopped or failed."""

    number: int
    settings: dict[str, Any]
    score: float | None  # None: stopped halfway, or failed
    query_scores: QueryScores
    seconds: float
    updates: int
    note: str

    @property
    def others(self) -> tuple[Any, ...]:
        """All settings but the rate: trials that have them in common lie on one curve."""
        return tuple(sorted((key, str(value)) for key, value in self.settings.items() if key != "learning_rate"))


class Choice(NamedTuple):
    """The settings that were chosen.

    Attributes:
        settings: by key.
        trial: its number.
        score: on dev.
        against_base: the difference to the model as it is, with its interval.
        warnings: where dev data decide nothing, a line each.
    """

    settings: dict[str, Any]
    trial: int
    score: float
    against_base: dict[str, float]
    warnings: list[str]


class Search:
    """Trials of settings on dev data.

    Args:
        options: settings of every trial, which say what the search starts from.
        starts: {method: {key of a `Span`: where the search of it starts}}, of the methods to try.
        space: settings that are searched, of `SPACE`.
        options_of: returns what a method needs beside ``options``, and drops what it cannot use.
        evaluator: of dev data.
        base_scores: of the model as it is, by query.
        budget: of the whole command.
        reserve: seconds of the budget that are kept for what comes after the search.
        folder: gets the journal.
        seed: of the sampler.
        say: called with each line for the user.
    """

    def __init__(
        self,
        options: Options,
        starts: Mapping[str, Mapping[str, float]],
        space: Mapping[str, Setting],
        options_of: Callable[[Options, str], Options],
        evaluator: RetrievalEvaluator,
        base_scores: QueryScores,
        budget: Budget,
        reserve: float,
        folder: Path,
        seed: int,
        say: Callable[[str], None],
    ) -> None:
        self._options = options
        self._starts = starts
        self._space = space
        self._options_of = options_of
        self._evaluator = evaluator
        self._base_scores = base_scores
        self._budget = budget
        self._reserve = reserve
        self._folder = folder
        self._seed = seed
        self._say = say
        self._most_updates: dict[str, int] = {}  # by method, of trials that had to be made shorter
        self._study = self._open_study()
        for trial_before in self._study.trials:
            if "cut_to" in trial_before.user_attrs:
                method = trial_before.user_attrs["settings"]["method"]
                self._most_updates[method] = trial_before.user_attrs["cut_to"]

    def run(self) -> Choice:
        """Do trials until the time is used, and choose.

        Raises:
            ConfigError: if the budget is too short for one trial.
        """
        while len(self.finished()) < MOST_TRIALS:
            needed = self._estimate()
            left = self._budget.left() - self._reserve
            if needed is not None and needed > left:
                break
            trial = self._next_trial()
            if trial is None:
                break
            self._do(trial, left)
            self._budget.save()
        return self.choose()

    def finished(self) -> list[Finished]:
        """Return the trials that have ended, in their order."""
        ended = self._study.get_trials(states=(TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL))
        return [_finished(trial) for trial in ended if "seconds" in trial.user_attrs]

    def choose(self) -> Choice:
        """Choose among the finished trials; see `choose_trial`."""
        return choose_trial(self.finished(), self._base_scores)

    def _open_study(self) -> optuna.Study:
        """Open the journal; trials that a killed search has left half done are done again."""
        self._folder.mkdir(parents=True, exist_ok=True)
        file = self._folder / JOURNAL
        if file.is_file():
            _drop_torn_line(file)
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        with warnings.catch_warnings():
            # The pruner is the only one that compares two trials query by query.
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            pruner = optuna.pruners.WilcoxonPruner(p_threshold=_HOPELESS)
        study = optuna.create_study(
            storage=JournalStorage(JournalFileBackend(str(file))),
            study_name="contaccum",
            direction="maximize",
            pruner=pruner,
            load_if_exists=True,
        )
        for trial in study.get_trials(states=(TrialState.RUNNING,)):
            study.tell(trial.number, state=TrialState.FAIL)
            study.enqueue_trial(trial.params)
        return study

    def _next_trial(self) -> optuna.Trial | None:
        """Return the next trial; None where the ladders are all that there is to search."""
        finished = self.finished()
        rung = self._next_rung(finished)
        # A seed of its own for each trial: a search that was killed goes on as it would have.
        self._study.sampler = optuna.samplers.TPESampler(seed=self._seed + len(finished), n_startup_trials=0)
        space = self._space
        if rung is not None:
            method, multiple = rung
            self._study.enqueue_trial({"method": method, f"learning_rate of {method}": multiple})
            space = {key: setting for key, setting in self._space.items() if key in _OF_A_LADDER}
        elif set(self._space) <= _OF_A_LADDER:
            return None
        trial = self._study.ask()
        trial.set_user_attr("settings", suggest(trial, self._starts, space))
        return trial

    def _next_rung(self, finished: Sequence[Finished]) -> tuple[str, float] | None:
        """Return the method and the rate, as a multiple of its start, that a ladder needs next.

        Every method's start comes first, then the ladder of the method that is ahead.
        """
        if "learning_rate" not in self._space:
            untried = set(self._starts) - {trial.settings["method"] for trial in finished}
            return next(((method, 1.0) for method in self._starts if method in untried), None)
        methods = [method for method in self._starts if not self._is_too_slow(method)]
        ladders = {method: self._rungs_of(method, finished) for method in methods}
        for method, scores in ladders.items():
            if not scores:
                return method, FIRST_RATES[0]
        best = {
            method: max((s for s in scores.values() if s is not None), default=0.0)
            for method, scores in ladders.items()
        }
        first_values = [as_text(rate) for rate in FIRST_RATES]
        for method in sorted(ladders, key=lambda method: -best[method]):
            values = next_values(first_values, RATE_FACTOR, MOST_RATES, ladders[method])
            if values:
                return method, float(values[0])
        return None

    def _rungs_of(self, method: str, finished: Sequence[Finished]) -> dict[str, float | None]:
        """Return {rate as a multiple of the method's start, as text: score} of its ladder."""
        scores = {}
        for trial in finished:
            is_rung = set(trial.settings) <= {"method", "learning_rate"}
            if is_rung and trial.settings["method"] == method:
                multiple = trial.settings["learning_rate"] / self._starts[method]["learning_rate"]
                scores[as_text(multiple)] = trial.score
        return scores

    def _do(self, trial: optuna.Trial, left: float) -> None:
        """Run a trial and tell the study what became of it."""
        settings = trial.user_attrs["settings"]
        method = settings["method"]
        options: Options = {**self._options, **{key: [str(value)] for key, value in settings.items()}}
        options = self._options_of(options, method)
        if method in self._most_updates:
            options = {**options, "max_steps": [str(self._most_updates[method])]}
        if self._is_too_slow(method):
            return self._fail(trial, f"{_TOO_SLOW}: see above")
        queries = sorted(self._base_scores)

        def is_hopeless(scores: QueryScores) -> bool:
            for step, query in enumerate(queries):
                trial.report(scores[query], step)
            return trial.should_prune()

        most_seconds = left * _SHARE_OF_A_TRIAL if method not in self._most_updates else left
        try:
            outcome = run_trial(options, self._evaluator, self._folder / "running", most_seconds, is_hopeless)
        except TooSlow as error:
            if error.updates < LEAST_UPDATES and self._any_score():
                return self._fail(trial, f"{_TOO_SLOW}: a trial of {method} takes {show_duration(error.seconds)}")
            if error.updates < LEAST_UPDATES:
                needed = self._budget.used() + self._reserve + 2 * error.seconds
                raise ConfigError(
                    f"the budget of {show_duration(self._budget.seconds)} is too short: a trial of {method} takes "
                    f"{show_duration(error.seconds)} (give {show_duration(needed)} or more)"
                ) from error
            self._say(f"{method}: a trial is cut to {error.updates} updates, to have time for several")
            self._most_updates[method] = error.updates
            trial.set_user_attr("cut_to", error.updates)  # also for the next start, if this one is killed
            return self._do(trial, left)
        except UserError as error:
            if not self._any_score():
                raise  # a mistake that every trial would meet
            return self._fail(trial, str(error))
        trial.set_user_attr("seconds", round(outcome.seconds, 1))
        trial.set_user_attr("updates", outcome.updates)
        if outcome.score is None:
            trial.set_user_attr("note", "stopped halfway")
            self._study.tell(trial, state=TrialState.PRUNED)
        else:
            trial.set_user_attr("query_scores", outcome.query_scores)
            self._study.tell(trial, outcome.score)
        self._say_progress(settings, outcome.score)
        return None

    def _any_score(self) -> bool:
        """Return whether any trial was scored."""
        return any(trial.score is not None for trial in self.finished())

    def _fail(self, trial: optuna.Trial, note: str) -> None:
        """Record that a trial has failed, and say why."""
        trial.set_user_attr("seconds", 0.0)
        trial.set_user_attr("note", redact(note))
        self._study.tell(trial, state=TrialState.FAIL)
        self._say(f"failed, {_shown(trial.user_attrs['settings'])}: {note}")

    def _is_too_slow(self, method: str) -> bool:
        """Return whether the budget has no time for trials of a method."""
        return any(trial.settings["method"] == method and trial.note.startswith(_TOO_SLOW) for trial in self.finished())

    def _say_progress(self, settings: Mapping[str, Any], score: float | None) -> None:
        """Say what the last trial has found, and how much time is left."""
        finished = self.finished()
        left = max(0.0, self._budget.left() - self._reserve)
        about = len(finished) + int(left / (self._estimate() or 1.0))
        about = min(max(about, len(finished)), MOST_TRIALS)
        found = "stopped halfway, hopeless" if score is None else f"{score:.3f}"
        scored = [trial for trial in finished if trial.score is not None]
        best = max(scored, key=lambda trial: trial.score or 0.0, default=None)
        best_shown = ""
        if best is not None:
            rate = best.settings.get("learning_rate", "the given rate")
            best_shown = f" (best {best.score:.3f} by {best.settings['method']} at {rate})"
        self._say(
            f"trial {len(finished)} of about {about}: {_shown(settings)}: {found}{best_shown}, "
            f"{show_duration(left)} left to search"
        )

    def _estimate(self) -> float | None:
        """Return the seconds that a trial takes; None if nobody knows yet."""
        seconds = [trial.seconds for trial in self.finished() if trial.score is not None]
        return max(seconds[-3:]) if seconds else None


def _shown(settings: Mapping[str, Any]) -> str:
    """Return "method contaccum, learning_rate 0.0001"."""
    return ", ".join(f"{key} {value}" for key, value in settings.items())


def _finished(trial: FrozenTrial) -> Finished:
    attributes = trial.user_attrs
    score = trial.value if trial.state == TrialState.COMPLETE else None
    return Finished(
        trial.number,
        attributes["settings"],
        score,
        attributes.get("query_scores", {}),
        attributes.get("seconds", 0.0),
        attributes.get("updates", 0),
        attributes.get("note", ""),
    )


def _drop_torn_line(file: Path) -> None:
    """Remove the last line of a journal if a kill has cut it short."""
    content = file.read_bytes()
    if content and not content.endswith(b"\n"):
        file.write_bytes(content[: content.rfind(b"\n") + 1])


def choose_trial(trials: Sequence[Finished], base_scores: QueryScores) -> Choice:
    """Choose the settings of a trial.

    Of trials that differ by the rate alone, the rate is chosen by a curve through their scores
    (`best_value`). Of curves the one with the most trials decides where dev data cannot: another
    one is chosen only if its interval against it lies above 0.

    Raises:
        ConfigError: if no trial was scored.
    """
    scored = [trial for trial in trials if trial.score is not None]
    if not scored:
        raise ConfigError("no trial was scored: give a larger budget, or look at what the trials say")
    curves: dict[tuple[Any, ...], list[Finished]] = {}
    for trial in scored:
        curves.setdefault(trial.others, []).append(trial)
    tops = [_top_of(curve) for curve in curves.values()]
    tops.sort(key=lambda top: (-top.num_trials, -top.height))
    chosen = tops[0]
    for top in tops[1:]:
        difference = compare_scores(top.trial.query_scores, chosen.trial.query_scores)
        same_weight = top.num_trials == chosen.num_trials and top.height > chosen.height
        if difference["low"] > 0.0 or same_weight:
            chosen = top

    trial = chosen.trial
    against_base = compare_scores(trial.query_scores, base_scores)
    notes = []
    if against_base["low"] <= 0.0:
        notes.append(
            f"dev data do not tell the chosen settings from the model as it is ({against_base['difference']:+.3f}, "
            f"95% {against_base['low']:+.3f} to {against_base['high']:+.3f})"
        )
    others = [other for other in scored if other is not trial]
    if others:
        worst = min(others, key=lambda other: other.score or 0.0)
        difference = compare_scores(trial.query_scores, worst.query_scores)
        if difference["low"] <= 0.0:
            notes.append("dev data do not tell the best of the settings tried from the worst: the choice says little")
    return Choice(dict(trial.settings), trial.number, float(trial.score or 0.0), against_base, notes)


class _Top(NamedTuple):
    """The highest place of a curve through trials that differ by the rate."""

    trial: Finished
    height: float
    num_trials: int


def _top_of(curve: Sequence[Finished]) -> _Top:
    if "learning_rate" not in curve[0].settings:
        mean = statistics.fmean(trial.score or 0.0 for trial in curve)
        return _Top(curve[0], mean, len(curve))
    by_rate = {float(trial.settings["learning_rate"]): trial for trial in curve}
    scores = {rate: trial.score or 0.0 for rate, trial in by_rate.items()}
    rate = best_value(scores)
    return _Top(by_rate[rate], smooth(scores)[rate], len(curve))
