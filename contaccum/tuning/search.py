"""The search: trials by Optuna within a budget of time, and the choice of the best settings.

Each method first climbs a ladder of learning rates; then Optuna's TPE chooses all settings
together. Finished trials are kept in a journal, so that a search that was killed goes on.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

from contaccum.distributed import rank, share
from contaccum.errors import ConfigError, UserError
from contaccum.evaluation.evaluator import RetrievalEvaluator
from contaccum.files import redact
from contaccum.tuning.budget import TimeForTrials, show_duration
from contaccum.tuning.choice import Choice, Finished, choose_trial
from contaccum.tuning.ladder import as_text, next_values
from contaccum.tuning.space import (
    FIRST_RATES,
    MOST_RATES,
    RATE_FACTOR,
    Setting,
    name_of_method,
    suggest,
)
from contaccum.tuning.trial import Options, Outcome, QueryScores, TooSlow, run_trial

JOURNAL = "trials.jsonl"
MOST_TRIALS = 40
LEAST_UPDATES = 8
"""A trial of fewer updates says nothing."""

_OF_A_LADDER = {"method", "learning_rate"}
_NO_TIME = "no time is left for it"
_TOO_SLOW = "too slow for the budget"
_HOPELESS = 0.01  # p of Wilcoxon's signed-rank test against the best trial, halfway through both
_LEAST_PART = 0.25  # of the updates of a trial; a method that has no time for them is left out
_SHARE_OF_A_TRIAL = 1 / 6  # of the time that is left: longer trials are made shorter


class Order(NamedTuple):
    """A trial that every process is to do.

    Attributes:
        options: of its run.
        most_seconds: that it may take.
    """

    options: Options
    most_seconds: float


class Search:
    """Trials of settings on dev data.

    Args:
        options: settings of every trial, which say what the search starts from.
        starts: {method: {key of a `Span`: where the search of it starts}}, of the methods to try.
        space: settings that are searched, of `SPACE`.
        options_of: returns what a method needs beside ``options``, and drops what it cannot use.
        evaluator: of dev data.
        base_scores: of the model as it is, by query.
        time: that trials may take.
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
        time: TimeForTrials,
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
        self._time = time
        self._folder = folder
        self._seed = seed
        self._say = say
        self._most_updates: dict[str, int] = {}  # by method, of trials that had to be made shorter
        self._trial: optuna.Trial | None = None  # that is running
        self._decides = rank() == 0
        if not self._decides:
            return
        self._study = self._open_study()
        for trial_before in self._study.trials:
            if "cut_to" in trial_before.user_attrs:
                method = trial_before.user_attrs["settings"]["method"]
                self._most_updates[method] = trial_before.user_attrs["cut_to"]

    def run(self) -> Choice:
        """Do trials until the time is used, and choose.

        Of several processes the first decides what is tried, and all of them train.

        Raises:
            ConfigError: if the budget is too short for one trial.
            UserError: for a mistake that every trial would meet.
        """
        while True:
            order = None
            if self._decides:
                order = self._next_order()
            order = share(order)
            if order is None:
                break
            result = self._try(Order(*order))
            if self._decides:
                self._record(result)
        choice = None
        if self._decides:
            choice = self.choose()
        return Choice(*share(choice))

    def finished(self) -> list[Finished]:
        """Return the trials that have ended, in their order."""
        ended = self._study.get_trials(
            states=(TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)
        )
        return [_finished(trial) for trial in ended if "seconds" in trial.user_attrs]

    def records(self) -> list[dict[str, Any]]:
        """Return what a record says of each finished trial, on every process."""
        records = []
        if self._decides:
            for trial in self.finished():
                records.append(
                    {
                        "trial": trial.number,
                        "settings": trial.settings,
                        "score": trial.score,
                        "seconds": trial.seconds,
                        "updates": trial.updates,
                        "note": trial.note,
                    }
                )
        shared: list[dict[str, Any]] = share(records)
        return shared

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
            if "rung" not in trial.user_attrs:  # the next rung follows from the finished trials
                study.enqueue_trial(trial.params)
        return study

    def _next_trial(self) -> optuna.Trial | None:
        """Return the next trial; None where the ladders are all that there is to search."""
        finished = self.finished()
        rung = self._next_rung(finished)
        # A seed of its own for each trial: a search that was killed goes on as it would have.
        self._study.sampler = optuna.samplers.TPESampler(
            seed=self._seed + len(finished), n_startup_trials=0
        )
        space = self._space
        starts = {
            method: self._starts[method] for method in self._starts if not self._is_too_slow(method)
        }
        if rung is not None:
            method, multiple = rung
            self._study.enqueue_trial(
                {name_of_method(starts): method, f"learning_rate of {method}": multiple}
            )
            space = {key: setting for key, setting in self._space.items() if key in _OF_A_LADDER}
        elif set(self._space) <= _OF_A_LADDER:
            return None
        trial = self._study.ask()
        if rung is not None:
            trial.set_user_attr("rung", as_text(rung[1]))
        trial.set_user_attr("settings", suggest(trial, starts, space))
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
            if trial.rung is not None and trial.settings["method"] == method:
                scores[trial.rung] = trial.score
        return scores

    def _time_left(self) -> float:
        """Return the seconds that are left for trials, if the best so far is trained in the end."""
        scored = [trial for trial in self.finished() if trial.score is not None]
        best = max(scored, key=lambda trial: trial.score or 0.0, default=None)
        return self._time.left(best.seconds if best is not None else 0.0)

    def _next_order(self) -> Order | None:
        """Return what is to be trained next; None if the search has ended."""
        while self._trial is None:
            if len(self.finished()) >= MOST_TRIALS or not self._has_time():
                return None
            self._trial = self._next_trial()
            if self._trial is None:
                return None
            method = self._trial.user_attrs["settings"]["method"]
            if (self._seconds_of(method) or 0.0) > self._time_left():
                self._fail(_NO_TIME)
        settings = self._trial.user_attrs["settings"]
        method = settings["method"]
        options: Options = {
            **self._options,
            **{key: [str(value)] for key, value in settings.items()},
        }
        options = self._options_of(options, method)
        most_seconds = self._time_left()
        if method in self._most_updates:
            options = {**options, "max_steps": [str(self._most_updates[method])]}
        elif self._seconds_of(method) is None:
            most_seconds *= _SHARE_OF_A_TRIAL
        return Order(options, most_seconds)

    def _has_time(self) -> bool:
        """Return whether there is time for one more trial.

        Raises:
            ConfigError: if there was none for the first one.
        """
        estimates = [self._seconds_of(method) for method in self._starts]
        known = [seconds for seconds in estimates if seconds is not None]
        if known:
            return self._time_left() > min(known)
        budget = self._time.budget
        if self._time_left() <= 0.0:
            needed = budget.used() + self._time.reserve
            budget.save()
            raise ConfigError(
                f"the budget of {show_duration(budget.seconds)} is too short: {show_duration(needed)} go to what is "
                "before and after the search, which leaves none for a trial"
            )
        return True

    def _try(self, order: Order) -> Outcome | TooSlow | UserError:
        """Train and score; every process does so."""
        folder = self._folder / "running"
        try:
            return run_trial(
                order.options, self._evaluator, folder, order.most_seconds, self._is_hopeless
            )
        except (TooSlow, UserError) as error:
            return error

    def _is_hopeless(self, scores: QueryScores) -> bool:
        """Return whether the running trial is worse, by its scores halfway, than the best one was there."""
        is_hopeless = False
        if self._decides:
            assert self._trial is not None
            for step, query in enumerate(sorted(self._base_scores)):
                self._trial.report(scores[query], step)
            is_hopeless = self._trial.should_prune()
        return bool(share(is_hopeless))

    def _record(self, result: Outcome | TooSlow | UserError) -> None:
        """Tell the study what became of the running trial, and the user as well."""
        trial = self._trial
        assert trial is not None
        if isinstance(result, TooSlow):
            self._record_too_slow(result)
            return
        if isinstance(result, UserError):
            if not self._any_score():
                raise result
            self._fail(str(result))
            return
        trial.set_user_attr("seconds", round(result.seconds, 1))
        trial.set_user_attr("updates", result.updates)
        if result.score is None:
            trial.set_user_attr("note", "stopped halfway")
            self._study.tell(trial, state=TrialState.PRUNED)
        else:
            trial.set_user_attr("query_scores", result.query_scores)
            self._study.tell(trial, result.score)
        self._trial = None
        self._say_progress(trial.user_attrs["settings"], result.score)
        self._time.budget.save()

    def _record_too_slow(self, slow: TooSlow) -> None:
        """Make the running trial shorter, or leave its method out.

        Raises:
            ConfigError: if there is no time for any trial.
        """
        assert self._trial is not None
        method = self._trial.user_attrs["settings"]["method"]
        if self._seconds_of(method) is not None:
            self._fail(_NO_TIME)  # a shorter trial could not be compared with those before
            return
        # A method that has time for a small part of its training would be judged by its beginning.
        least_updates = LEAST_UPDATES
        if self._any_score():
            least_updates = max(
                LEAST_UPDATES, math.ceil(_LEAST_PART * slow.seconds / slow.seconds_per_update)
            )
        if slow.updates >= least_updates:
            self._say(
                f"{method}: a trial is cut to {slow.updates} updates, to have time for several"
            )
            self._most_updates[method] = slow.updates
            self._trial.set_user_attr(
                "cut_to", slow.updates
            )  # also for the next start, if this one is killed
            return
        if self._any_score():
            self._fail(f"{_TOO_SLOW}: a trial of {method} takes {show_duration(slow.seconds)}")
            return
        least = slow.seconds_per_update * LEAST_UPDATES
        budget = self._time.budget
        needed = budget.used() + self._time.reserve + 1.2 * least / _SHARE_OF_A_TRIAL
        budget.save()
        raise ConfigError(
            f"the budget of {show_duration(budget.seconds)} is too short: {LEAST_UPDATES} updates of {method} "
            f"take {show_duration(least)}, and a choice needs several trials (give {show_duration(needed)} or more)"
        )

    def _any_score(self) -> bool:
        """Return whether any trial was scored."""
        return any(trial.score is not None for trial in self.finished())

    def _fail(self, note: str) -> None:
        """Record that the running trial has failed, and say why."""
        trial = self._trial
        assert trial is not None
        trial.set_user_attr("seconds", 0.0)
        trial.set_user_attr("note", redact(note))
        self._study.tell(trial, state=TrialState.FAIL)
        self._trial = None
        self._say(f"{_shown(trial.user_attrs['settings'])}: {note}")

    def _is_too_slow(self, method: str) -> bool:
        """Return whether the budget has no time for trials of a method."""
        return any(
            trial.settings["method"] == method and trial.note.startswith(_TOO_SLOW)
            for trial in self.finished()
        )

    def _say_progress(self, settings: Mapping[str, Any], score: float | None) -> None:
        """Say what the last trial has found, and how much time is left."""
        finished = self.finished()
        left = max(0.0, self._time_left())
        seconds = self._seconds_of(settings["method"])
        about = len(finished) + int(left / seconds) if seconds else len(finished)
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

    def _seconds_of(self, method: str) -> float | None:
        """Return the seconds that a trial of a method takes; None if nobody knows yet."""
        seconds = []
        for trial in self.finished():
            if trial.score is not None and trial.settings["method"] == method:
                seconds.append(trial.seconds)
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
        attributes.get("rung"),
    )


def _drop_torn_line(file: Path) -> None:
    """Remove the last line of a journal if a kill has cut it short."""
    content = file.read_bytes()
    if content and not content.endswith(b"\n"):
        file.write_bytes(content[: content.rfind(b"\n") + 1])
