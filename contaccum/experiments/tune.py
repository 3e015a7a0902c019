"""The search: trials of settings within a budget of time, and the choice of the best settings.

A trial is one training with some settings, scored on dev data. First each method is tried at a few
learning rates, which are called the rungs of its ladder. Then Optuna's TPE sampler searches all
settings together. Trials are stored in a journal, so that a search can continue after a kill.

A trial may be too slow for the budget. The trials of its method are then cut to fewer updates, or
the method is left out. The number of updates becomes the setting ``max_steps`` of these trials.
The final training of `contaccum fit` is longer than they are if there is time. A trial that is
significantly worse than the best one is stopped halfway.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import optuna
from optuna.trial import TrialState

from contaccum.data.near_duplicates import group_queries
from contaccum.distributed import rank, share, world_size
from contaccum.errors import ConfigError, UserError
from contaccum.evaluation.evaluator import RetrievalEvaluator
from contaccum.files import redact
from contaccum.tuning.budget import TimeForTrials, format_duration, suggest_budget
from contaccum.tuning.choice import Choice, FinishedTrial, Settings, choose_trial
from contaccum.tuning.journal import open_study, read_finished_trials
from contaccum.tuning.ladder import format_value
from contaccum.tuning.options import Options
from contaccum.tuning.rates import Rung, find_next_rung, find_untried_method
from contaccum.tuning.space import Setting, name_method_parameter, name_span_parameter, suggest
from contaccum.tuning.trial import Outcome, QueryScores, TooSlow, run_trial

MAX_TRIALS = 40
"""More trials would mainly choose the noise of the dev set."""
MIN_UPDATES = 8
"""The smallest number of updates of a trial; the score of a shorter trial says nothing."""

# The settings that decide the time of an update.
_COST_KEYS = ("method", "total_train_batch_size", "num_hard_negatives")
_LADDER_KEYS = {"method", "learning_rate"}  # the settings that the ladders vary
_NO_TIME = "no time is left for this trial"
_TOO_SLOW = "too slow for the budget"  # start of the journal's note on a method that is left out
_LOADING_MARGIN = 1.2  # time of a trial with loading and scoring, relative to its updates
# Once another method has a score, a method whose trials would be cut to less than this is left out.
_MIN_SHARE_OF_UPDATES = 0.25
_NUM_PLANNED_TRIALS = 6  # the first trial of a method may be so long that six have time


class TrialPlan(NamedTuple):
    """A trial that all processes run next.

    Attributes:
        options: the options of the run.
        max_seconds: the time that its updates may take.
    """

    options: Options
    max_seconds: float


class Search:
    """Trials of settings on dev data.

    In distributed training the first process decides what is tried, and all processes train.

    Args:
        options: the options that all trials have; each trial adds its settings to them.
        starts: {method: {key: value}}. The methods are those to try. The values are those at which
            the search of a learning rate or temperature starts; see `Span`.
        space: {key: setting} of the settings to search.
        adapt_options: is called with options and a method, and returns the options of a run by the
            method: it adds what the method needs and drops what the method does not use.
        evaluator: the evaluator of the dev data.
        base_scores: {query id: score of the base model}.
        time: the time that trials may take.
        folder: the folder of the journal.
        seed: the seed of the sampler.
        print_line: is called with each line for the user.
    """

    def __init__(
        self,
        options: Options,
        starts: Mapping[str, Mapping[str, float]],
        space: Mapping[str, Setting],
        adapt_options: Callable[[Options, str], Options],
        evaluator: RetrievalEvaluator,
        base_scores: QueryScores,
        time: TimeForTrials,
        folder: Path,
        seed: int,
        print_line: Callable[[str], None],
    ) -> None:
        self._options = options
        self._starts = starts
        self._space = space
        self._adapt_options = adapt_options
        self._evaluator = evaluator
        self._base_scores = base_scores
        self._time = time
        self._folder = folder
        self._seed = seed
        self._print_line = print_line
        # {method: updates} of methods whose trials had to be cut: of the cut trials, and of a trial
        # at full length
        self._max_updates: dict[str, int] = {}
        self._full_updates: dict[str, int] = {}
        self._running_trial: optuna.Trial | None = None
        # The speed that was measured again, as settings and seconds per update, and the number of
        # trials that had ended then
        self._measured_speed: tuple[Settings, float] | None = None
        self._measured_after = 0
        self._is_first_process = rank() == 0
        if not self._is_first_process:
            return  # the other processes have no journal
        self._groups = group_queries(evaluator.dataset)
        self._study, self._interrupted = open_study(folder)
        for earlier_trial in self._study.trials:
            settings = earlier_trial.user_attrs.get("settings", {})
            if "max_steps" in settings:
                self._max_updates[settings["method"]] = settings["max_steps"]
            else:
                self._max_updates.pop(settings.get("method"), None)
            if "full_updates" in earlier_trial.user_attrs:
                full_updates = earlier_trial.user_attrs["full_updates"]
                self._full_updates[settings["method"]] = full_updates

    def run(self) -> Choice:
        """Run trials until the time is used, and choose the best settings.

        Raises:
            ConfigError: if the budget is too short for one trial.
            UserError: for a mistake that every trial would fail with.
        """
        while True:
            trial_plan = None
            if self._is_first_process:
                trial_plan = self._plan_next_trial()
            trial_plan = share(trial_plan)
            if trial_plan is None:
                break
            result = self._run_trial(trial_plan)
            if self._is_first_process:
                self._record(result)
        choice = None
        if self._is_first_process:
            choice = choose_trial(self._finished_trials(), self._base_scores, self._groups)
        return Choice(*share(choice))

    def make_records(self) -> list[dict[str, Any]]:
        """Return a JSON record of each finished trial, on every process."""
        records = []
        if self._is_first_process:
            for trial in self._finished_trials():
                records.append(
                    {
                        "trial": trial.number,
                        "settings": trial.settings,
                        "score": trial.score,
                        "seconds": trial.seconds,
                        "updates": trial.updates,
                        "seconds_per_update": trial.seconds_per_update,
                        "latest_seconds_per_update": self._find_latest_speed(trial.settings),
                        "note": trial.note,
                    }
                )
        shared: list[dict[str, Any]] = share(records)
        return shared

    def _finished_trials(self) -> list[FinishedTrial]:
        """Return the trials that have ended, in their order."""
        return read_finished_trials(self._study)

    def _plan_next_trial(self) -> TrialPlan | None:
        """Return the trial to run next; None if the search has ended."""
        # After a trial was cut, it is still the running trial and is planned again, with fewer
        # updates. Otherwise a new trial is created.
        if self._running_trial is None:
            reason = "all settings have been tried"
            if len(self._finished_trials()) >= MAX_TRIALS:
                reason = f"more than {MAX_TRIALS} trials would mainly choose the noise of dev"
            elif not self._has_time():
                measurement = self._plan_measurement()
                if measurement is not None:
                    return measurement
                left = format_duration(max(0.0, self._time.budget.left()))
                reason = f"the {left} that are left are not enough for another trial"
                if self._time.final_training_factor:
                    reason += " beside the final training and the test"
            else:
                self._running_trial = self._create_trial()
            if self._running_trial is None:
                self._print_line(f"the search ends: {reason}")
                return None

        settings = self._running_trial.user_attrs["settings"]
        max_seconds = self._time_for_trial()
        if "max_steps" not in settings and self._estimate_seconds(settings["method"]) is None:
            # Until a trial of the method has a score, its trials may be cut.
            max_seconds = min(max_seconds, self._time.longest_trial(_NUM_PLANNED_TRIALS))
        return TrialPlan(self._make_run_options(settings), max_seconds)

    def _make_run_options(self, settings: Settings) -> Options:
        """Return the options of a run with the settings of a trial."""
        options = dict(self._options)
        for key, value in settings.items():
            options[key] = [str(value)]
        return dict(self._adapt_options(options, settings["method"]))

    def _plan_measurement(self) -> TrialPlan | None:
        """Return a trial that ends after two updates and measures the speed of the machine.

        The machine may be faster than in the last trial, which leaves time for further trials and a
        longer final training. Return None if the speed was measured since the last trial.
        """
        finished = self._finished_trials()
        best = _find_best(finished)
        is_needed = self._time.final_training_factor > 0 and self._measured_after < len(finished)
        if best is None or not is_needed:
            return None
        self._time.measure_again()
        self._measured_speed = (best.settings, best.seconds_per_update)
        self._measured_after = len(finished)
        return TrialPlan(self._make_run_options(best.settings), max_seconds=0.0)

    def _create_trial(self) -> optuna.Trial | None:
        """Create the next trial in the study; None if nothing is left to search."""
        finished = self._finished_trials()
        # Each trial has a seed of its own, so that a search after a kill makes the same proposals.
        # The sampler needs no random trials at the start, because the ladders come first.
        self._study.sampler = optuna.samplers.TPESampler(
            seed=self._seed + len(finished), n_startup_trials=0
        )
        self._lengthen_trials()
        starts = {}
        for method, start in self._starts.items():
            expected_seconds = self._estimate_seconds(method) or 0.0
            has_time = expected_seconds <= self._time_for_trial()
            if has_time and not _is_too_slow(method, finished):
                starts[method] = start
        if not starts:
            return None
        space = self._space
        rung = self._find_next_rung(list(starts), finished)
        if rung is not None:
            # The study's next trial gets these values of Optuna's parameters.
            parameters = {
                name_method_parameter(starts): rung.method,
                name_span_parameter("learning_rate", rung.method): rung.multiple,
            }
            self._study.enqueue_trial(parameters)
            space = {key: setting for key, setting in self._space.items() if key in _LADDER_KEYS}
        elif set(self._space) <= _LADDER_KEYS:
            return None  # the ladders have tried everything
        elif self._interrupted:
            self._study.enqueue_trial(self._interrupted.pop(0))
        trial = self._study.ask()
        if rung is not None:
            trial.set_user_attr("rung", format_value(rung.multiple))
        trial.set_user_attr("settings", suggest(trial, starts, space, self._max_updates))
        return trial

    def _find_next_rung(
        self, methods: Sequence[str], finished: Sequence[FinishedTrial]
    ) -> Rung | None:
        """Return the method and the learning rate to try next; None if all ladders are complete."""
        comparable = [trial for trial in finished if self._has_present_length(trial)]
        if "learning_rate" in self._space:
            return find_next_rung(methods, comparable)
        return find_untried_method(methods, comparable)

    def _lengthen_trials(self) -> None:
        """Cut the trials of a method no longer if several trials at full length have time now."""
        for method in list(self._max_updates):
            latest_speed = 0.0
            for settings, seconds_per_update in self._list_speeds():
                if settings["method"] == method:
                    latest_speed = seconds_per_update
            full_seconds = _LOADING_MARGIN * self._full_updates[method] * latest_speed
            if 0.0 < full_seconds <= self._time.longest_trial(_NUM_PLANNED_TRIALS):
                self._print_line(
                    f"{method}: the machine is faster now, and trials are not cut any longer"
                )
                del self._max_updates[method]

    def _has_present_length(self, trial: FinishedTrial) -> bool:
        """Return False for a trial that is shorter or longer than its method's trials are now."""
        return trial.settings.get("max_steps") == self._max_updates.get(trial.settings["method"])

    def _run_trial(self, trial_plan: TrialPlan) -> Outcome | TooSlow | UserError:
        """Train and score on every process; return an error that may concern only this trial.

        Raises:
            UserError: with several processes. Only one of them may have the error, such as too
                little memory, and the others would wait for it.
        """
        try:
            return run_trial(
                trial_plan.options,
                self._evaluator,
                self._folder / "running",
                trial_plan.max_seconds,
                self._is_hopeless,
            )
        except TooSlow as error:
            return error  # all processes have it
        except UserError as error:
            if world_size() > 1:
                raise
            return error

    def _is_hopeless(self, scores: QueryScores) -> bool:
        """Return True if the running trial is significantly worse than the best one was halfway.

        Args:
            scores: the scores of the running trial halfway.
        """
        is_hopeless = False
        if self._is_first_process:
            assert self._running_trial is not None
            # The pruner compares two trials step by step, and takes the steps for independent. So
            # each group of queries has a step of its own.
            scores_by_group: dict[int, list[float]] = {}
            for query in sorted(self._base_scores):
                scores_by_group.setdefault(self._groups[query], []).append(scores[query])
            for step, group_scores in enumerate(scores_by_group.values()):
                self._running_trial.report(statistics.fmean(group_scores), step)
            is_hopeless = self._running_trial.should_prune()
        return bool(share(is_hopeless))

    def _record(self, result: Outcome | TooSlow | UserError) -> None:
        """Write the result of the running trial to the journal, and print it.

        Raises:
            UserError: if the trial failed and no trial was scored before.
        """
        trial = self._running_trial
        if trial is None:  # the trial of `_plan_measurement`
            assert self._measured_speed is not None
            if not isinstance(result, UserError):
                self._measured_speed = (self._measured_speed[0], result.seconds_per_update)
            return
        if isinstance(result, TooSlow):
            self._record_too_slow(result)
            return
        if isinstance(result, UserError):
            if not self._has_score():
                raise result
            self._fail_trial(str(result))
            return
        trial.set_user_attr("seconds", round(result.seconds, 1))
        trial.set_user_attr("updates", result.updates)
        trial.set_user_attr("seconds_per_update", result.seconds_per_update)
        if result.score is None:
            trial.set_user_attr("note", "stopped halfway")
            self._study.tell(trial, state=TrialState.PRUNED)
        else:
            trial.set_user_attr("query_scores", result.query_scores)
            self._study.tell(trial, result.score)
        self._running_trial = None
        self._print_progress(trial.user_attrs["settings"], result.score)
        self._time.budget.save()

    def _record_too_slow(self, slow: TooSlow) -> None:
        """Cut the running trial to fewer updates, or leave out its method.

        Raises:
            ConfigError: if the time is not enough for any trial.
        """
        assert self._running_trial is not None
        method = self._running_trial.user_attrs["settings"]["method"]
        if self._estimate_seconds(method) is not None:
            # The score of a shorter trial could not be compared with the scores of earlier trials.
            self._fail_trial(_NO_TIME)
            return
        min_updates = MIN_UPDATES
        num_updates = round(slow.seconds / slow.seconds_per_update)
        if self._has_score() and method not in self._full_updates:
            # The score after a small part of the training does not show how good a method is. But a
            # method whose trials were cut before is not left out.
            min_updates = max(MIN_UPDATES, math.ceil(_MIN_SHARE_OF_UPDATES * num_updates))
        if slow.updates >= min_updates:
            final_length = ""
            if self._time.final_training_factor:
                final_length = "; the final training is longer, if time allows it"
            self._print_line(
                f"{method}: trials are cut to {slow.updates} updates, so that there is time for "
                f"several{final_length}"
            )
            self._max_updates[method] = slow.updates
            full_updates = self._full_updates.setdefault(method, num_updates)
            self._running_trial.set_user_attr("full_updates", full_updates)
            settings = dict(self._running_trial.user_attrs["settings"])
            settings.pop("num_train_epochs", None)  # max_steps replaces it
            settings["max_steps"] = slow.updates
            # In the journal, so that a search after a kill cuts its trials as well.
            self._running_trial.set_user_attr("settings", settings)
            return
        if self._has_score():
            self._fail_trial(
                f"{_TOO_SLOW}: a trial of {method} takes {format_duration(slow.seconds)}"
            )
            return
        min_seconds = slow.seconds_per_update * MIN_UPDATES
        num_trials = _NUM_PLANNED_TRIALS + self._time.final_training_factor
        seconds_of_search = _LOADING_MARGIN * min_seconds * num_trials
        budget = self._time.budget
        needed = budget.used() + self._time.reserve + seconds_of_search
        budget.save()
        raise ConfigError(
            f"the budget of {format_duration(budget.seconds)} is too short: {MIN_UPDATES} updates "
            f"of {method} take {format_duration(min_seconds)}, and a choice needs several trials "
            f"(give --budget {suggest_budget(needed)} or more)"
        )

    def _fail_trial(self, note: str) -> None:
        """Write to the journal that the running trial has failed, and print the reason."""
        trial = self._running_trial
        assert trial is not None
        trial.set_user_attr("seconds", 0.0)
        note = redact(note)
        trial.set_user_attr("note", note)
        self._study.tell(trial, state=TrialState.FAIL)
        self._running_trial = None
        self._print_line(f"{_format_settings(trial.user_attrs['settings'])}: {note}")

    def _print_progress(self, settings: Settings, score: float | None) -> None:
        """Print the score of the last trial, the best score, and the time that is left."""
        finished = self._finished_trials()
        seconds_left = max(0.0, self._time_left())
        trial_seconds = self._estimate_seconds(settings["method"])
        expected_trials = len(finished)
        if trial_seconds:
            expected_trials += int(seconds_left / trial_seconds)
        expected_trials = min(expected_trials, MAX_TRIALS)
        result = "stopped halfway, clearly worse than the best" if score is None else f"{score:.3f}"
        best = _find_best(finished)
        best_result = ""
        if best is not None:
            rate = best.settings.get("learning_rate", "the given rate")
            best_result = f" (best {best.score:.3f} by {best.settings['method']} at {rate})"
        self._print_line(
            f"trial {len(finished)} of about {expected_trials}: {_format_settings(settings)}: "
            f"{result}{best_result}, {format_duration(seconds_left)} left to search"
        )

    def _time_left(self) -> float:
        """Return the seconds left for trials, without the time of the final training.

        The final training is expected to take as long as the best trial so far. If trials are cut,
        it may be longer.
        """
        best = _find_best(self._finished_trials())
        if best is None:
            return self._time.left(0.0)
        full_updates = self._full_updates.get(best.settings["method"], best.updates)
        return self._time.left(
            self._estimate_seconds_now(best, best.updates),
            self._estimate_seconds_now(best, full_updates),
        )

    def _estimate_seconds_now(self, trial: FinishedTrial, num_updates: int) -> float:
        """Return the seconds that a scored trial would take at the latest speed of the machine.

        Args:
            num_updates: the number of updates that it would have.
        """
        latest_speed = self._find_latest_speed(trial.settings)
        seconds = trial.seconds * latest_speed / trial.seconds_per_update
        return seconds + (num_updates - trial.updates) * latest_speed

    def _find_latest_speed(self, settings: Settings) -> float:
        """Return the last seconds per update that were measured in trials with updates as large.

        Args:
            settings: the settings of a trial that was scored or stopped.
        """
        latest_speed = 0.0
        for other, seconds_per_update in self._list_speeds():
            if all(other.get(key) == settings.get(key) for key in _COST_KEYS):
                latest_speed = seconds_per_update
        return latest_speed

    def _list_speeds(self) -> list[tuple[Settings, float]]:
        """Return settings and seconds per update of all measurements in their order."""
        finished = self._finished_trials()
        speeds = [(trial.settings, trial.seconds_per_update) for trial in finished]
        if self._measured_speed is not None:
            speeds.insert(self._measured_after, self._measured_speed)
        return [(settings, speed) for settings, speed in speeds if speed]

    def _time_for_trial(self) -> float:
        """Return the seconds that a trial may take, so that its final training has time as well."""
        return min(self._time_left(), self._time.longest_trial())

    def _has_time(self) -> bool:
        """Return True if there is time for one more trial.

        Raises:
            ConfigError: if there is no time for the first trial.
        """
        estimates = []
        for method in self._starts:
            seconds = self._estimate_seconds(method)
            if seconds is not None:
                estimates.append(seconds)
        if estimates:
            return self._time_for_trial() > min(estimates)
        has_time = self._time_left() > 0.0
        if not has_time and not self._has_score():
            budget = self._time.budget
            needed = budget.used() + self._time.reserve
            budget.save()
            raise ConfigError(
                f"the budget of {format_duration(budget.seconds)} is too short: the steps before "
                f"and after the search take {format_duration(needed)}, which leaves no time for a "
                f"trial (give more than --budget {suggest_budget(needed)})"
            )
        return has_time

    def _estimate_seconds(self, method: str) -> float | None:
        """Return the largest time of a method's last three scored trials; None without any.

        Their times are those that they would take at the latest speed of the machine. Trials of
        another length than the method's trials have now do not count.
        """
        seconds = []
        for trial in self._finished_trials():
            is_of_method = trial.settings["method"] == method and self._has_present_length(trial)
            if trial.score is not None and is_of_method:
                seconds.append(self._estimate_seconds_now(trial, trial.updates))
        return max(seconds[-3:], default=None)

    def _has_score(self) -> bool:
        """Return True if a trial was scored."""
        return _find_best(self._finished_trials()) is not None


def _find_best(finished: Sequence[FinishedTrial]) -> FinishedTrial | None:
    """Return the trial with the highest score; None if no trial was scored."""
    scored = [trial for trial in finished if trial.score is not None]
    return max(scored, key=lambda trial: trial.score or 0.0, default=None)


def _is_too_slow(method: str, finished: Sequence[FinishedTrial]) -> bool:
    """Return True if a trial of a method was too slow for the budget."""
    for trial in finished:
        if trial.settings["method"] == method and trial.note.startswith(_TOO_SLOW):
            return True
    return False


def _format_settings(settings: Settings) -> str:
    """Return settings as text, such as "method contaccum, learning_rate 0.0001"."""
    return ", ".join(f"{key} {value}" for key, value in settings.items())
