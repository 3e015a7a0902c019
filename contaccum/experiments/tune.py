"""Tuning: the settings to try next follow from the results so far, until the time is used.

A trial is one training with some settings, scored on dev data. First each method is tried at a few
learning rates, which form its ladder, because a wrong learning rate costs most. Then the other
settings that a field of `contaccum.settings` names values for (``tries``) are varied around the
best ones so far. No state is kept besides the folders of the trials, so a search goes on after a
kill.

Before the first trial, a micro-batch of each method is timed. If its trials would take too
long, they have fewer updates, so that several have time; ``max_steps`` is the number. The final
training of `contaccum fit` is longer than they are if there is time.
"""

from __future__ import annotations

import dataclasses
import math
import shutil
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from contaccum.data.beir import find_beir_file
from contaccum.data.near_duplicates import group_queries
from contaccum.data.rows import passage_text
from contaccum.distributed import broadcast, rank, world_size
from contaccum.encoders.dual_encoder import DualEncoder
from contaccum.encoders.loading import model_name
from contaccum.errors import ConfigError, DataError, UserError
from contaccum.evaluation.evaluator import RetrievalEvaluator
from contaccum.evaluation.metrics import describe_interval, sign_flip_test
from contaccum.evaluation.results import Run
from contaccum.experiments.budget import (
    Budget,
    format_duration,
    measure_seconds_per_document,
    suggest_budget,
)
from contaccum.experiments.ladder import find_best_value, next_values, round_value, smooth
from contaccum.experiments.run import (
    MODEL_FOLDER,
    QueryScores,
    Result,
    begin,
    count_updates,
    describe_models,
    describe_settings,
    hash_path,
    measure_speed,
    on_first_rank,
    once,
    only_first_rank,
    read_results,
    run,
    start_ranks,
)
from contaccum.files import provenance, redact, refuse_credentials, write_json, write_text
from contaccum.mining import load_mining_data, mine_hard_negatives, write_mined
from contaccum.retrieval.bm25 import fuse_runs
from contaccum.retrieval.documents import StoreDocuments
from contaccum.retrieval.encode import CorpusEncoder, get_similarity
from contaccum.retrieval.store import EmbeddingStore
from contaccum.settings import (
    DEFAULT_TEMPERATURE,
    WITH_BANK,
    WITH_QUERY_BANK,
    Settings,
    find,
    for_method,
    get_default,
    replace,
    to_dict,
    to_yaml,
    uses,
)
from contaccum.training.arguments import ContAccumTrainingArguments
from contaccum.training.checkpoint import count_rows
from contaccum.training.passage_store import USELESS_SHARE_OF_BM25
from contaccum.training.proposal import compute_start_rate
from contaccum.training.setup import (
    MAX_QUERY_SIDE_MICRO_BATCH,
    list_training_sets,
    load_data,
    load_encoder,
    make_evaluator,
)
from contaccum.training.update import find_largest_divisor

TRIAL_METRIC = "ndcg@10"
"""The metric by which a search scores its trials, the base model and BM25."""
MAX_TRIALS = 40
"""More trials would mainly choose the noise of the dev set."""
MIN_UPDATES = 8
"""The smallest number of updates of a trial that is cut; a shorter one says nothing."""
RATE_FACTOR = 3.0
"""The factor between two learning rates of a ladder."""
MAX_RATES = 5
"""The largest number of learning rates that are tried with a method."""
BM25_WEIGHTS = tuple(round(0.1 * step, 1) for step in range(10))
"""The weights of BM25 beside a model that are tried on dev; the smallest of the best is chosen."""
TUNED_CONFIG = "tuned.yaml"
TUNED_RECORD = "tuned.json"
MAX_EPOCHS = max(Settings.__dataclass_fields__["num_train_epochs"].metadata["tries"])
"""The largest number of epochs that a search tries, and the length of a final training at most."""
FINAL_TRAINING_FACTOR = 0.6
"""The time of a training with the chosen settings, at most, relative to that of the search."""
MINED_FILE = "mined.jsonl"
MAX_MINING_SCORES = 2e9
"""The largest number of query-document scores that BM25 computes; some minutes on a CPU."""

Point = dict[str, Any]
"""{setting: value} of what the search has chosen: method, learning rate, and what is varied."""

_DEFAULT_QUERY_SIDE_BATCH_SIZE = 128
_QUERY_SIDE_BATCH_UNIT = 8  # the batch of a process is a multiple, so micro-batches are not tiny
# A document that scores more than 95% of the positive is no negative: it may be relevant as well.
_RELATIVE_MARGIN = 0.05
_LOADING_MARGIN = 1.2  # time of a trial with loading, relative to its updates
# Trials are so short that six have time. But they have 16 updates if each method has time for its
# first trial with them.
_NUM_PLANNED_TRIALS = 6
_FIRST_UPDATES = 16
_LENGTHS = {"max_steps", "num_train_epochs"}  # the user gives one of them to fix the length
_MORE_EVALUATIONS = 3  # of the final training, which has four; a trial has one
_MORE_DEV_QUERIES = (
    "take more dev queries, about other passages (--dev of contaccum fit or contaccum split)"
)


# Settings of a method -----------------------------------------------------------------------------


@dataclass(frozen=True)
class SearchSpace:
    """The settings that all trials share, and what a method needs in addition.

    Attributes:
        settings: the settings from which the search starts, of method contaccum, which has all
            settings but those of the documents.
        fixed: names of the settings that the search does not vary.
        store: the folder of document embeddings for query-side training; None: there is none.
        given: names of the settings that the user has given, fixed or not.
        method: the method that the user has given; its ladder starts at the learning rate that the
            user has given.
        corpus: the documents in which BM25 mines hard negatives; None: the positives.
        mined: the training data with hard negatives that BM25 mined; None: the data have negatives,
            or need none.
    """

    settings: Settings
    fixed: Collection[str]
    store: str | None = None
    given: Collection[str] = ()
    method: str | None = None
    corpus: str | None = None
    mined: str | None = None

    def make_settings(self, method: str, **changes: Any) -> Settings:
        """Return the settings of a run by a method.

        Settings of the bank are dropped without a bank. Other settings that the method does not
        have are refused, because they would be lost if the method was chosen.

        Raises:
            ConfigError: if the method cannot have the settings.
        """
        values: dict[str, Any] = {}
        if method not in WITH_BANK:
            values = {**find("methods", WITH_BANK), **find("methods", WITH_QUERY_BANK)}
        settings = replace(self.settings, **changes)
        if self.mined is not None and settings.num_hard_negatives and method != "query_side":
            values["train_data"] = [self.mined]
            for name in ("data_columns", "data_format", "split"):  # those of the user's file
                values[name] = get_default(Settings.__dataclass_fields__[name])
        if method == "in_batch":
            values |= self._make_in_batch_sizes(settings)
        if method == "query_side":
            if settings.load_in_4bit:
                raise ConfigError(
                    "method=query_side with load_in_4bit: the store would not fit, because the "
                    "base model encodes it without rounding to 4 bits. Drop load_in_4bit"
                )
            # All documents of the store are negatives; passages that it lacks are added.
            values |= {"passage_store": self.store, "missing": "add", "num_hard_negatives": 0}
            values |= self._make_query_side_sizes(settings)
        return replace(settings, **{**values, "method": method})

    def _make_in_batch_sizes(self, settings: Settings) -> dict[str, Any]:
        """Make the micro-batch of each process its share of the update.

        If the user has fixed the size of the micro-batch alone, it decides the size of the update.
        """
        if "per_device_train_batch_size" not in self.fixed:
            total = settings.total_train_batch_size
            return {} if total is None else {"per_device_train_batch_size": total // world_size()}
        return {} if "total_train_batch_size" in self.fixed else {"total_train_batch_size": None}

    def _make_query_side_sizes(self, settings: Settings) -> dict[str, Any]:
        """Return sizes of micro-batch and update, which are larger if the user has not fixed them.

        Raises:
            ConfigError: if the pairs of an update cannot be divided among the processes.
        """
        if "gradient_accumulation_steps" in self.fixed:
            return {}
        num_ranks = world_size()
        micro_batch = None
        if "per_device_train_batch_size" in self.fixed:
            micro_batch = settings.per_device_train_batch_size
        total = settings.total_train_batch_size
        if total is None:
            unit = micro_batch if isinstance(micro_batch, int) else _QUERY_SIDE_BATCH_UNIT
            total = round_up(_DEFAULT_QUERY_SIDE_BATCH_SIZE, unit * num_ranks)
        if total % num_ranks:
            raise ConfigError(
                f"total_train_batch_size={total}: give a multiple of {num_ranks}, the number of "
                "processes"
            )
        if micro_batch is None:
            micro_batch = find_largest_divisor(total // num_ranks, MAX_QUERY_SIDE_MICRO_BATCH)
        return {
            "total_train_batch_size": total,
            "per_device_train_batch_size": micro_batch,
            "gradient_accumulation_steps": 1,
        }


def round_up(number: int, divisor: int) -> int:
    """Return the smallest multiple of the divisor that is not below the number."""
    return math.ceil(number / divisor) * divisor


def make_base_settings(settings: Settings) -> Settings:
    """Return the settings that load the base model: the simplest method, and no adapter.

    The base model encodes the store for query-side training. A query-side training has no adapter
    in its document tower, and it refuses a store that another document tower has encoded.
    """
    without_adapter = {"lora_r": None, "load_in_4bit": False, "merge_adapter": False}
    return for_method(settings, "grad_accum", **find("needs", "lora_r"), **without_adapter)


def list_methods(space: SearchSpace, print_line: Callable[[str], None] = print) -> list[str]:
    """Return the methods that are possible with the settings; that of the user comes first.

    The settings of each method are checked, so that a wrong value is refused before anything is
    trained. query_side is left out if it lacks one of the settings, or there are no documents.

    Args:
        print_line: is called with the reason if query_side or the user's method is left out.

    Raises:
        ConfigError: for settings that `contaccum train` refuses, or if only query_side is to be
            tried, and there are no documents.
    """
    methods = list(Settings.__dataclass_fields__["method"].metadata["tries"])
    is_fixed = "method" in space.fixed
    if is_fixed:
        methods = [str(space.method)]
        if methods == ["query_side"] and space.store is None:
            raise ConfigError("method=query_side needs documents: set corpus or passage_store")
    elif space.store is None:
        methods.remove("query_side")
    for method in list(methods):
        try:
            ContAccumTrainingArguments.from_settings(space.make_settings(method))
        except ConfigError as error:
            if method != "query_side" or is_fixed:
                raise
            methods.remove(method)
            print_line(f"query_side is not tried: {error}")
    if space.method in methods:
        methods.remove(space.method)
        methods.insert(0, space.method)
    elif space.method is not None:
        print_line(
            f"method={space.method} of the config is not tried, only {', '.join(methods)}; "
            f"--method {space.method} searches its settings"
        )
    return methods


def mine_once(settings: Settings, corpus: str | None, file: Path) -> str | None:
    """Mine one hard negative per query with BM25, and write the training data with them to a file.

    The file has the records of the training data with all their positives, so training on it masks
    the same known positives. If an earlier start has written the file, it is not written again.

    Args:
        corpus: the documents to search for negatives; None: the positives of the training data.

    Returns:
        The file. None if there are several training sets, if BM25 would have to compute more than
        `MAX_MINING_SCORES` scores, or if it finds no negatives.

    Raises:
        DataError: for data that cannot be read.
    """
    if file.is_file():
        return str(file)
    sets = list(list_training_sets(settings).values())
    if len(sets) != 1:
        return None
    options = {}
    for name in ("data_format", "split", "columns", "min_score"):
        if name in sets[0]:
            options[name] = sets[0][name]
    data = load_mining_data(
        sets[0]["path"], corpus, on_bad_record=settings.on_bad_record, **options
    )
    if len(data.queries) * data.pool_size > MAX_MINING_SCORES:
        return None
    try:
        mined = mine_hard_negatives(
            data, relative_margin=_RELATIVE_MARGIN, num_negatives=1, show_progress=False
        )
    except DataError:  # queries and passages have no words in common
        return None
    file.parent.mkdir(parents=True, exist_ok=True)
    write_mined(mined, file)
    return str(file)


# What to try next, and what to choose -------------------------------------------------------------


class Trial(NamedTuple):
    """A trial that was scored, or failed.

    Attributes:
        number: its number in the search, which is also the name of its folder.
        result: the result; its ``score`` is None if the trial failed.
    """

    number: int
    result: Result

    @property
    def point(self) -> Point:
        """What was searched."""
        return self.result.point

    @property
    def method(self) -> str:
        """The method of the trial."""
        return str(self.point["method"])

    @property
    def rate(self) -> float:
        """The learning rate; 1 if the user has fixed it."""
        return float(self.point.get("learning_rate", 1.0))


def choose_next(
    starts: Mapping[str, Point],
    tries: Mapping[str, Sequence[tuple[str, Any]]],
    trials: Sequence[Trial],
    groups: Mapping[str, int],
) -> Point | None:
    """Return what to try next; None if everything was tried. It depends on the arguments only.

    First every method is tried at its start rate. Then the ladder of the method with the best score
    is completed, then the ladder of the second best method, and so on. Then one other setting at a
    time is changed in the best settings, and after that in the settings of the other trials.

    Args:
        starts: {method: the point at which its ladder starts}, of the methods that have time.
        tries: {method: (setting, value) to try, in their order}.
        trials: the trials so far, also of other methods.
        groups: {dev query id: its group}.
    """
    ladders: dict[str, dict[float, float | None]] = {}
    for method, start in starts.items():
        ladders[method] = {}
        for trial in trials:
            if {**trial.point, "learning_rate": None} == {**start, "learning_rate": None}:
                ladders[method][trial.rate] = trial.result.score
        if not ladders[method]:
            return start

    def get_best_score(method: str) -> float:
        return max((score for score in ladders[method].values() if score is not None), default=0.0)

    for method in sorted(starts, key=lambda name: -get_best_score(name)):
        start = starts[method]
        if "learning_rate" in start:
            rate = start["learning_rate"]
            rates = [rate, round_value(rate * RATE_FACTOR), round_value(rate / RATE_FACTOR)]
            further = next_values(rates, RATE_FACTOR, MAX_RATES, ladders[method])
            if further:
                return {**start, "learning_rate": further[0]}

    affordable = [
        trial for trial in trials if trial.result.score is not None and trial.method in starts
    ]
    if not affordable:
        return None
    best = choose_best(affordable, groups)
    by_score = sorted(affordable, key=lambda trial: -(trial.result.score or 0.0))
    tried = [trial.point for trial in trials]
    for trial in [best, *by_score]:
        for name, value in tries[trial.method]:
            candidate = {**trial.point, name: value}
            # Trials that are cut are compared after the same number of updates of the same size.
            changes_length = name in ("num_train_epochs", "total_train_batch_size")
            if candidate not in tried and not (changes_length and "max_steps" in candidate):
                return candidate
    return None


def choose_best(trials: Sequence[Trial], groups: Mapping[str, int]) -> Trial:
    """Return the best of the trials, all of which have a score.

    Trials that differ only by the learning rate form a curve, score against learning rate, and
    `find_best_value` chooses the best trial of each curve. But the first trial of a curve, at a
    rate that is good on other data, is chosen if it is worse by at most one standard error, because
    dev is noisy. Of these candidates, the highest one from the ladders of learning rates is
    preferred. Each other candidate, of which there are many, replaces the choice so far only if the
    95% interval of the difference between the two lies above 0 (`sign_flip_test`). With fewer than
    six groups of queries, no interval does.
    """
    curves: dict[str, list[Trial]] = {}
    ladder_names: dict[str, str] = {}  # {method: its first curve}
    for trial in trials:
        others = {name: value for name, value in trial.point.items() if name != "learning_rate"}
        name = str(sorted(others.items()))
        curves.setdefault(name, []).append(trial)
        ladder_names.setdefault(trial.method, name)
    candidates = []
    for name, curve in curves.items():
        trials_by_rate = {trial.rate: trial for trial in curve}
        scores = {rate: trial.result.score or 0.0 for rate, trial in trials_by_rate.items()}
        best = trials_by_rate[find_best_value(scores)]
        first = curve[0]
        gains = [
            score - first.result.query_scores[query]
            for query, score in best.result.query_scores.items()
        ]
        if statistics.fmean(gains) <= statistics.pstdev(gains) / math.sqrt(len(gains)):
            best = first
        is_on_ladder = ladder_names[best.method] == name
        candidates.append((not is_on_ladder, -smooth(scores)[best.rate], best.number, best))
    candidates.sort()  # by the number of the trial at last, which differs
    chosen = candidates[0][-1]
    for *_, candidate in candidates[1:]:
        test = sign_flip_test(candidate.result.query_scores, chosen.result.query_scores, groups)
        if test["low"] > 0.0:
            chosen = candidate
    return chosen


class Choice(NamedTuple):
    """The settings that were chosen.

    Attributes:
        settings: {name: value} of what was searched.
        trial: the number of the trial with these settings.
        score: its mean score on dev.
        against_base: the comparison with the base model, as `sign_flip_test` returns it.
        warnings: lines for the user about weak evidence for the choice.
    """

    settings: Point
    trial: int
    score: float
    against_base: dict[str, float]
    warnings: list[str]


def choose_trial(
    trials: Sequence[Trial], base_scores: QueryScores, groups: Mapping[str, int]
) -> Choice:
    """Choose the settings of the best trial (`choose_best`), and collect warnings about them.

    Args:
        base_scores: {query id: score of the base model}.
        groups: {query id: its group}; queries about the same passage are in one group.

    Raises:
        ConfigError: if no trial has a score.
    """
    scored = [trial for trial in trials if trial.result.score is not None]
    if not scored:
        raise ConfigError(
            "no trial has a score: give a larger --budget, or see above why the trials failed"
        )
    best = choose_best(scored, groups)
    against_base = sign_flip_test(best.result.query_scores, base_scores, groups)
    interval = f"({against_base['difference']:+.3f}, {describe_interval(against_base)})"
    warnings = []
    if against_base["high"] < 0.0:
        warnings.append(
            "on the dev data the chosen settings are significantly worse than the base model "
            f"{interval}; try smaller learning rates, or keep the base model"
        )
    elif against_base["low"] <= 0.0:
        warnings.append(
            "on the dev data the chosen settings are not significantly better than the base model "
            f"{interval}; {_MORE_DEV_QUERIES}"
        )
    others = [trial for trial in scored if trial is not best]
    if others:
        worst = min(others, key=lambda trial: trial.result.score or 0.0)
        test = sign_flip_test(best.result.query_scores, worst.result.query_scores, groups)
        if test["low"] <= 0.0:
            warnings.append(
                "on the dev data the chosen settings are not significantly better than the worst "
                "ones that were trained to the end, so the choice says little; "
                f"{_MORE_DEV_QUERIES}"
            )
    score = float(best.result.score or 0.0)
    return Choice(dict(best.point), best.number, score, against_base, warnings)


# The search ---------------------------------------------------------------------------------------


@dataclass
class Search:
    """Trials of settings on dev data within a budget of time.

    With several processes, all of them train, and take the same decisions.

    Attributes:
        space: the settings that all trials have.
        starts: {method: the point at which its ladder starts}.
        tries: {method: (setting, value) to try after the ladders}.
        evaluator: the evaluator of the dev data.
        base: the base model, by which the time of encoding the dev documents is measured.
        budget: the time of the whole command.
        reserve: returns the seconds of the budget to reserve for the steps after a training by a
            method.
        num_trainings: the number of trainings with the chosen settings that follow the search;
            time is left for them.
        folder: the folder of the trials.
        print_line: is called with each line for the user.
    """

    space: SearchSpace
    starts: Mapping[str, Point]
    tries: Mapping[str, Sequence[tuple[str, Any]]]
    evaluator: RetrievalEvaluator
    base: DualEncoder
    budget: Budget
    reserve: Callable[[str], float]
    num_trainings: int
    folder: Path
    print_line: Callable[[str], None]

    def __post_init__(self) -> None:
        self._groups = group_queries(self.evaluator.dataset)

    def run(self) -> list[Trial]:
        """Run trials until the time is used, and return them.

        Raises:
            ConfigError: if the budget is too short for one trial.
            UserError: for a mistake that every trial would fail with.
        """
        plan = once(self.folder / "plan", {"starts": self.starts}, self._plan, all_ranks=True)
        trials = [Trial(number, result) for number, result in enumerate(read_results(self.folder))]
        while True:
            scored = [trial for trial in trials if trial.result.score is not None]
            best = max(scored, key=lambda trial: trial.result.score or 0.0, default=None)
            used_seconds = self.budget.used()
            seconds_left = 0.0
            affordable = {}
            for method, start in plan["starts"].items():
                seconds_of_method = self._find_end(plan, best, method) - used_seconds
                seconds_left = max(seconds_left, seconds_of_method)
                # A method may go on if its longest trial of the last three would have time. Until
                # there is a score, each may start: the first trials were planned to have time.
                seconds = [trial.result.seconds for trial in scored if trial.method == method]
                if max(seconds[-3:], default=0.0) <= seconds_of_method or not scored:
                    affordable[method] = start
            if trials:
                self._print_progress(trials, best, seconds_left)
            if len(trials) == MAX_TRIALS:
                reason = f"more than {MAX_TRIALS} trials would mainly choose the noise of dev"
                break
            point = choose_next(affordable, self.tries, trials, self._groups)
            if point is None:
                reason = "all settings have been tried"
                if len(affordable) < len(plan["starts"]):
                    left = format_duration(seconds_left)
                    reason = f"the {left} that it has left are not enough for another trial"
                break
            result = run(
                self.space.make_settings(**point),
                self.evaluator,
                self.folder / str(len(trials)),
                point=point,
                # Before the first score, an error is probably the user's. With several processes,
                # only one of them may have the error, such as too little memory, and the others
                # would wait for it.
                keeps_error=bool(scored) and world_size() == 1,
                # The training that follows may turn out worse than the best trial.
                keeps_model=self.num_trainings > 0 and not self.space.settings.merge_adapter,
            )
            trials.append(Trial(len(trials), result))
            on_first_rank(lambda: self._remove_models(trials))
            self.budget.save()
        self.print_line(f"the search ends: {reason}")
        return trials

    def _remove_models(self, trials: Sequence[Trial]) -> None:
        """Remove the saved models of all trials but the best one."""
        scored = [trial for trial in trials if trial.result.score is not None]
        best = choose_best(scored, self._groups) if scored else None
        for trial in trials:
            if trial is not best:
                shutil.rmtree(self.folder / str(trial.number) / MODEL_FOLDER, ignore_errors=True)

    def _find_end(self, plan: Mapping[str, Any], best: Trial | None, method: str) -> float:
        """Return the used seconds of the budget at which the search ends for trials of a method.

        It ends after its share of the time, or later if the trainings with the chosen settings do
        not need all of theirs for the full length of the method that leads. The method of the trial
        may become the leading one, so the larger reserve of both counts.
        """
        leading = method if best is None else best.method
        reserved_seconds = max(self.reserve(method), self.reserve(leading))
        # A later start may have a larger budget.
        seconds = self.budget.seconds - plan["used_seconds"] - reserved_seconds
        end = plan["used_seconds"] + seconds * self._share
        if best is not None and self.num_trainings > 0:
            result = best.result
            more_updates = plan["full_lengths"][best.method] - result.updates
            seconds_of_training = (
                result.seconds
                + max(0, more_updates) * result.seconds_per_update
                + _MORE_EVALUATIONS * result.scoring_seconds
            )
            needed = _LOADING_MARGIN * self.num_trainings * seconds_of_training
            end = max(end, plan["used_seconds"] + seconds - needed)
        return end

    @property
    def _share(self) -> float:
        """The share of the time for the search, if the trainings that follow it need the rest."""
        return 1 / (1 + FINAL_TRAINING_FACTOR * self.num_trainings)

    def _plan(self) -> dict[str, Any]:
        """Measure the methods, and return where the ladder of each starts and the final lengths.

        If trials are cut, the points have their number of updates, and updates are smaller if a
        first trial of some length would take too much time otherwise. Methods that are too slow
        even then are left out.

        Raises:
            ConfigError: if the budget is too short for every method.
        """
        used_seconds = self.budget.used()
        measured: dict[str, float] = {}
        for method, start in self.starts.items():
            try:
                settings = self.space.make_settings(**start)
                measured[method] = measure_speed(settings, self.folder / "speed")
            except UserError as error:
                # With several processes, only one of them may have the error.
                if not measured or world_size() > 1:
                    raise
                self.print_line(f"{method} is left out: {error}")
        rows = self.evaluator.dataset.corpus.values()
        texts = [passage_text(row["title"], row["text"]) for row in rows]
        batch_size = self.evaluator.batch_size
        # A trial encodes the documents in the precision of its training.
        precision = "bfloat16" if self.space.settings.bf16 else "float32"
        encoding_seconds = len(texts) * on_first_rank(
            lambda: measure_seconds_per_document(
                self.base, texts, len(texts), batch_size, precision
            )
        )
        reserved_seconds = max(map(self.reserve, self.starts))
        seconds = self._share * (self.budget.seconds - used_seconds - reserved_seconds)
        seconds -= self.budget.used() - used_seconds
        # Query-side training leaves the documents as they are.
        scoring_seconds = {
            method: 0.0 if method == "query_side" else encoding_seconds for method in measured
        }
        # Leave out the methods that are too slow.
        sizes: dict[str, list[int]] = {}  # of an update, smaller than at the start
        kept: dict[str, float] = {}  # {method: seconds of its shortest trial}
        least_seconds = math.inf
        for method, update_seconds in measured.items():
            settings = self.space.make_settings(**self.starts[method])
            args = ContAccumTrainingArguments.from_settings(settings)
            num_pairs = args.total_train_batch_size
            assert num_pairs is not None  # computed when the arguments are created
            tried = [
                value for name, value in self.tries[method] if name == "total_train_batch_size"
            ]
            sizes[method] = sorted((size for size in tried if size < num_pairs), reverse=True)
            smallest = min([num_pairs, *sizes[method]])
            min_length = min(MIN_UPDATES, count_updates(load_data(settings).dataset, args))
            shortest_seconds = scoring_seconds[method]
            shortest_seconds += _LOADING_MARGIN * min_length * update_seconds * smallest / num_pairs
            if sum(kept.values()) + shortest_seconds <= seconds:
                kept[method] = shortest_seconds
                continue
            least_seconds = min(least_seconds, shortest_seconds)
            self.print_line(
                f"{method} is left out, because it is too slow for the budget: {min_length} "
                f"updates take {format_duration(shortest_seconds)}"
            )
        # Cut the trials of the others.
        starts: dict[str, Point] = {}
        full_lengths: dict[str, int] = {}  # of the training with the chosen settings
        seconds_left = seconds
        for number, method in enumerate(kept):
            start = self.starts[method]
            settings = self.space.make_settings(**start)
            update_seconds = _LOADING_MARGIN * measured[method]
            dataset = load_data(settings).dataset
            args = ContAccumTrainingArguments.from_settings(settings)
            # The methods after this one have at least their shortest trials.
            most_seconds = seconds_left - sum(list(kept.values())[number + 1 :])
            seconds_of_method = max(seconds_left / (len(kept) - number), kept[method])
            seconds_of_method = min(seconds_of_method, most_seconds) - scoring_seconds[method]
            for size in sizes[method]:
                first_updates = min(_FIRST_UPDATES, count_updates(dataset, args))
                if first_updates * update_seconds <= seconds_of_method:
                    break
                assert args.total_train_batch_size is not None
                update_seconds *= size / args.total_train_batch_size
                start = {**start, "total_train_batch_size": size}
                settings = self.space.make_settings(**start)
                args = ContAccumTrainingArguments.from_settings(settings)
            full_length = count_updates(dataset, args)
            longest = int(seconds_of_method / update_seconds)
            length = int((seconds / _NUM_PLANNED_TRIALS - scoring_seconds[method]) / update_seconds)
            length = max(length, min(longest, _FIRST_UPDATES), MIN_UPDATES)
            length = min(length, full_length)
            seconds_left -= length * update_seconds + scoring_seconds[method]
            if length < full_length:
                start = {**start, "max_steps": length}
                line = f"{method}: trials have {length} of {full_length} updates"
                if "total_train_batch_size" in start:
                    line += f" of {start['total_train_batch_size']} pairs"
                if self.num_trainings > 0:
                    line += "; the final training is longer, if time allows it"
                    if not _LENGTHS & set(self.space.fixed):
                        longer = replace(settings, num_train_epochs=MAX_EPOCHS)
                        args = ContAccumTrainingArguments.from_settings(longer)
                        full_length = count_updates(dataset, args)
                self.print_line(line)
            starts[method] = start
            full_lengths[method] = full_length
        if not starts:
            self.budget.save()
            needed = used_seconds + reserved_seconds
            needed += least_seconds * len(self.starts) / self._share
            raise ConfigError(
                f"the budget of {format_duration(self.budget.seconds)} is too short: the shortest "
                f"trial takes {format_duration(least_seconds)}, and the steps before and after the "
                f"search {format_duration(used_seconds + reserved_seconds)} (give --budget "
                f"{suggest_budget(needed)} or more)"
            )
        return {"used_seconds": used_seconds, "starts": starts, "full_lengths": full_lengths}

    def _print_progress(
        self, trials: Sequence[Trial], best: Trial | None, seconds_left: float
    ) -> None:
        """Print the result of the last trial, the best score, and the time that is left."""
        trial = trials[-1]
        settings = ", ".join(f"{name} {value}" for name, value in trial.point.items())
        if best is None or trial.result.score is None:
            self.print_line(f"{settings}: {redact(trial.result.note)}")
            return
        expected_trials = len(trials) + int(seconds_left / max(trial.result.seconds, 0.1))
        rate = best.point.get("learning_rate", "the given rate")
        self.print_line(
            f"trial {len(trials)} of about {min(expected_trials, MAX_TRIALS)}: {settings}: "
            f"{trial.result.score:.3f} (best {best.result.score:.3f} by {best.method} at {rate}), "
            f"{format_duration(seconds_left)} left to search"
        )


# Tuning -------------------------------------------------------------------------------------------


class Baselines(NamedTuple):
    """The scores on dev before training, nDCG@10.

    Attributes:
        base: the mean score of the base model, which is the model before training.
        query_scores: {query id: score of the base model}.
        bm25: the mean score of BM25.
        with_bm25: the mean score of the base model with BM25 beside it.
        bm25_weight: the best weight of BM25 beside it.
    """

    base: float
    query_scores: QueryScores
    bm25: float
    with_bm25: float
    bm25_weight: float

    def format_line(self, model: str) -> str:
        """Return the scores as a line for the user; ``model`` is a folder or hub name."""
        return (
            f"BM25 {self.bm25:.3f}   {model_name(model)} {self.base:.3f}   "
            f"both {self.with_bm25:.3f}   (nDCG@10 on dev)"
        )

    @property
    def is_base_too_weak(self) -> bool:
        """True if the base model's document embeddings are too bad to train a query encoder."""
        return self.base < USELESS_SHARE_OF_BM25 * self.bm25


def score_baselines(evaluator: RetrievalEvaluator, base_run: Run, bm25_run: Run) -> Baselines:
    """Score the runs of the base model and of BM25 on dev."""
    base = evaluator.score_run(base_run)[TRIAL_METRIC]
    query_scores = evaluator.query_scores
    bm25 = evaluator.score_run(bm25_run)[TRIAL_METRIC]
    weight, with_bm25 = choose_bm25_weight(evaluator, base_run, bm25_run)
    return Baselines(base, query_scores, bm25, with_bm25, weight)


def choose_bm25_weight(
    evaluator: RetrievalEvaluator, run: Run, bm25_run: Run
) -> tuple[float, float]:
    """Return the weight of BM25 beside a model with the highest score, and the score.

    Args:
        evaluator: the evaluator of the dev data.
        run, bm25_run: {query id: {document id: score}} of the model and of BM25.
    """
    scores = {}
    for weight in BM25_WEIGHTS:
        fused = fuse_runs(run, bm25_run, weight)
        scores[weight] = evaluator.score_run(fused)[TRIAL_METRIC]
    best = max(BM25_WEIGHTS, key=lambda weight: scores[weight])
    return best, scores[best]


class Tuned(NamedTuple):
    """The result of a search, as in its JSON record.

    Attributes:
        choice: the chosen settings and their scores.
        options: all settings of a run with them; ``replace(Settings(), **options)``.
        base: nDCG@10 of the base model on dev.
        bm25: nDCG@10 of BM25 on dev.
        trials: the JSON record of each trial.
    """

    choice: Choice
    options: dict[str, Any]
    base: float
    bm25: float
    trials: list[dict[str, Any]]

    @property
    def chosen_trial(self) -> dict[str, Any]:
        """The record of the trial whose settings were chosen."""
        [record] = [record for record in self.trials if record["trial"] == self.choice.trial]
        return record


def search_settings(
    space: SearchSpace,
    methods: Sequence[str],
    encoder: DualEncoder,
    evaluator: RetrievalEvaluator,
    baselines: Baselines,
    budget: Budget,
    reserve: Callable[[str], float],
    num_trainings: int,
    folder: Path,
    print_line: Callable[[str], None],
) -> Tuned:
    """Search settings by their scores on dev.

    Args:
        space: the settings from which the search starts.
        methods: the methods to try.
        encoder: the base model.
        evaluator: the evaluator of the dev data.
        baselines: the scores on dev before training.
        budget, reserve, num_trainings: the time that the search may take; see `Search`.
        folder: the folder of the trials and the mined negatives.
        print_line: is called with each line for the user.
    """
    settings = space.settings
    fixed = set(space.fixed)
    if settings.max_steps > 0:
        fixed.add("num_train_epochs")  # it has no effect
    if "gradient_accumulation_steps" in fixed:
        fixed.add("total_train_batch_size")  # both decide the same
    if methods == ["in_batch"] and "per_device_train_batch_size" in fixed:
        fixed.add("total_train_batch_size")  # the whole update is one micro-batch
    needs_mining = "num_hard_negatives" not in fixed and settings.num_hard_negatives == 0
    if needs_mining:
        mined = None
        if list(methods) != ["query_side"]:
            mined = on_first_rank(lambda: mine_once(settings, space.corpus, folder / MINED_FILE))
        if mined is None:
            fixed.add("num_hard_negatives")
        space = dataclasses.replace(space, mined=mined)

    transformer = getattr(encoder.transformers_model, "config", None)
    width = getattr(transformer, "hidden_size", None) or encoder.get_embedding_dimension() or 384
    temperature = settings.temperature
    if temperature is None:
        temperature = DEFAULT_TEMPERATURE[get_similarity(encoder, settings.similarity)]
    max_batch_size = (count_rows(load_data(settings).dataset) or 0) / 2
    starts: dict[str, Point] = {}
    tries: dict[str, list[tuple[str, Any]]] = {}
    for method in methods:
        if method == "query_side" and baselines.is_base_too_weak and len(methods) > 1:
            continue
        starts[method] = {"method": method}
        if "learning_rate" not in fixed:
            rate = settings.learning_rate
            if "learning_rate" not in space.given or method != space.method:
                has_adapter = settings.lora_r is not None
                rate = compute_start_rate(method, width, has_adapter, baselines.is_base_too_weak)
            starts[method]["learning_rate"] = rate
        start = space.make_settings(**starts[method])
        tries[method] = []
        for name, setting in Settings.__dataclass_fields__.items():
            if name in {*fixed, "method"} or not uses(method, name):
                continue
            for value in setting.metadata["tries"]:
                start_value = getattr(start, name)
                if name == "temperature":  # the field has those for cosine
                    value = round_value(value * temperature / DEFAULT_TEMPERATURE["cos"])
                    start_value = temperature
                is_too_large = name == "total_train_batch_size" and value > max_batch_size
                with suppress(ConfigError):  # a value that cannot work with the others
                    candidate = space.make_settings(**{**starts[method], name: value})
                    ContAccumTrainingArguments.from_settings(candidate)
                    if value != start_value and not is_too_large:
                        tries[method].append((name, value))

    search = Search(
        space,
        starts,
        tries,
        evaluator,
        encoder,
        budget,
        reserve,
        num_trainings,
        folder / "trials",
        print_line,
    )
    trials = search.run()
    choice = choose_trial(trials, baselines.query_scores, group_queries(evaluator.dataset))
    chosen = {**choice.settings}
    if _LENGTHS & set(space.fixed):
        chosen.pop("max_steps", None)  # the user has fixed the length
    final = space.make_settings(**chosen)
    # The settings that were given or chosen are shown in the config even if they are the defaults.
    options = {}
    for name in ("method", *space.given, *chosen):
        if name in Settings.__dataclass_fields__ and uses(final.method, name):
            options[name] = getattr(final, name)
    options |= to_dict(final)
    if "max_steps" in chosen:
        options.pop("num_train_epochs", None)
    records = []
    for trial in trials:
        result = trial.result
        records.append(
            {
                "trial": trial.number,
                "settings": trial.point,
                "score": result.score,
                "seconds": result.seconds,
                "updates": result.updates,
                "seconds_per_update": result.seconds_per_update,
                "scoring_seconds": result.scoring_seconds,
                "note": redact(result.note),
            }
        )
    return Tuned(choice, options, baselines.base, baselines.bm25, records)


def tune(
    given: Mapping[str, Any],
    fixed: Collection[str],
    budget: Budget,
    output: Path,
    print_line: Callable[[str], None] = print,
) -> Tuned:
    """Search settings by their scores on ``eval_data``, and write the best ones to a config.

    A call with the same arguments continues a search that was killed.

    Args:
        given: settings of `contaccum train`, with ``model``, ``train_data`` and ``eval_data``. The
            search starts from them.
        fixed: the names of those that the search does not vary.
        budget: the time that all calls may take.
        output: the folder for the config `TUNED_CONFIG`, the record `TUNED_RECORD` and the trials.
        print_line: is called with each line for the user.

    Raises:
        UserError: for settings, data or a model that cannot be used, or a budget that is too short.
    """
    refuse_credentials(given)
    given = dict(given)
    config_method = given.pop("method", None)
    store = given.pop("passage_store", None)
    corpus = given.pop("corpus", None)
    for name in ("output_dir", "overwrite_output_dir", "resume_from_checkpoint", "missing"):
        given.pop(name, None)  # they name the files of the config's own run
    if given.get("total_train_batch_size") is not None:
        given.pop("gradient_accumulation_steps", None)  # it follows from the pairs per update
    settings = replace(Settings(), **given)
    for name in ("model", "train_data"):
        if not getattr(settings, name):
            raise ConfigError(f"{name} is not set: add it to the config, or --{name}")
    # The documents are encoded below if the user gives a corpus.
    space = SearchSpace(
        settings,
        fixed,
        store or (corpus and str(output / "passage_store")),
        given.keys(),
        config_method,
        corpus,
    )
    args = start_ranks(make_base_settings(settings))
    print_line = only_first_rank(print_line)
    methods = list_methods(space, print_line)
    evaluator = make_evaluator(settings)
    if evaluator is None:
        raise ConfigError(
            "eval_data is not set: settings are chosen by scores on dev data (make some with "
            "contaccum split)"
        )
    # ``metric_for_best_model`` is for the checkpoints of one training; trials have none.
    evaluator.primary_metric = TRIAL_METRIC
    encoder = load_encoder(make_base_settings(settings), args)
    corpus_file = None
    if corpus is not None:
        corpus_file = Path(corpus).expanduser()
        if corpus_file.is_dir():
            corpus_file = find_beir_file(corpus_file, "corpus.jsonl")
    identity = {
        **describe_settings(replace(settings, eval_data=None)),
        "method": config_method,
        "fixed settings": sorted(fixed),
        "training data": load_data(settings).fingerprint,
        "dev data": evaluator.dataset.fingerprint,
        "passage store": store and EmbeddingStore.open(store).fingerprint,
        "corpus": corpus_file and hash_path(str(corpus_file)),
        **describe_models(encoder, settings, args),
    }
    with begin(output, identity, "contaccum tune", may_restart=False):
        if space.store is not None:
            if store is None:
                batch_size = args.per_device_eval_batch_size
                corpus_encoder = CorpusEncoder(
                    encoder, "base", Path(corpus), space.store, batch_size=batch_size
                )
                if rank() == 0:
                    corpus_encoder.encode()
                broadcast(None)  # the other processes wait for the first one
            evaluator.documents = StoreDocuments(EmbeddingStore.open(space.store))
        base_run = evaluator.search(encoder)
        baselines = score_baselines(evaluator, base_run, evaluator.search_bm25())
        print_line(baselines.format_line(settings.model))
        tuned = search_settings(
            space,
            methods,
            encoder,
            evaluator,
            baselines,
            budget,
            lambda method: 0.0,
            0,
            output,
            print_line,
        )
        options = {"eval_strategy": "epoch", **tuned.options}  # eval_data need a strategy
        options["output_dir"] = str(output / "model")
        tuned = tuned._replace(options=options)
        on_first_rank(lambda: write_tuned(tuned, output, len(baselines.query_scores)))
    return tuned


def write_tuned(tuned: Tuned, output: Path, num_queries: int) -> None:
    """Write `TUNED_CONFIG` and `TUNED_RECORD` into a folder.

    Args:
        num_queries: the number of dev queries, for a comment in the config.
    """
    difference = tuned.choice.against_base
    comment = (
        f"# Chosen by contaccum tune: nDCG@10 {tuned.choice.score:.4f} on {num_queries} dev "
        f"queries; the base model has {tuned.base:.4f}\n"
        f"# (difference {difference['difference']:+.4f}, {describe_interval(difference, 4)}). It "
        f"is the best of {len(tuned.trials)} trials, so the score is too optimistic.\n"
    )
    length_of_trials = tuned.choice.settings.get("max_steps")
    if length_of_trials is not None and tuned.options.get("max_steps") == length_of_trials:
        comment += (
            "# max_steps is the length of the trials, which were cut to fit the budget; the length "
            "was not searched.\n# With a larger --budget and another --output, trials are longer.\n"
        )
    write_text(output / TUNED_CONFIG, comment + to_yaml(tuned.options))
    record = {**tuned._asdict(), "choice": tuned.choice._asdict(), **provenance()}
    write_json(output / TUNED_RECORD, record)
