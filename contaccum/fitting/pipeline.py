"""`contaccum fit`: hold out, score what there is, tune, train, and say whether it is better.

Every stage writes what it found below the output folder and is skipped by a later start of the
same call, so that a process that was killed goes on where it stopped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from contaccum.comparison.options import to_command_line
from contaccum.data.split import CORPUS_FILE, Split, read_split
from contaccum.distributed import share
from contaccum.encoders.dual_encoder import DualEncoder
from contaccum.files import AnyPath, provenance, read_json, redact, write_json, write_text
from contaccum.fitting.baselines import (
    dev_folder,
    encode_corpus,
    evaluator_of,
    require_time,
    score_on_dev,
    seconds_per_document,
)
from contaccum.fitting.final import (
    best_on_dev,
    changes_of,
    open_card_with,
    search_test,
    shown_means,
    train_final,
    write_config,
)
from contaccum.fitting.folder import FitFolder
from contaccum.fitting.folds import Fold, FoldScores, pool_scores
from contaccum.fitting.settings import base_options, check_settings
from contaccum.fitting.source import DataSource
from contaccum.fitting.verdict import Verdict, judge, warnings_of
from contaccum.report.fit_page import build_fit_page
from contaccum.report.sources import model_name
from contaccum.training import config
from contaccum.training.run import load_encoder
from contaccum.tuning.budget import Budget, TimeForTrials, parse_duration
from contaccum.tuning.trial import Options
from contaccum.tuning.tune import Baselines, Tuned, options_of_method, read_tuned, tune

DEFAULT_MODEL = "sentence-transformers/all-MiniLM-L6-v2"
_FINAL_RUNS = 1.6  # the final training beside the longest trial: more evaluations, and checkpoints
_SLACK = 1.3  # of the time that the test is expected to take
_SECONDS_TO_END = 10.0  # loading models, the page


@dataclass(frozen=True)
class FitResult:
    """What `fit` has found.

    Attributes:
        verdict: `str` of it is the line on the screen.
        folder: with everything that belongs to the fit.
        warnings: a line each.
    """

    verdict: Verdict
    folder: FitFolder
    warnings: list[str]

    @property
    def report(self) -> Path:
        """The page with the verdict, the trials and the queries that changed."""
        return self.folder.report

    @cached_property
    def model(self) -> DualEncoder:
        """The trained model, loaded when it is first asked for."""
        return DualEncoder.from_pretrained(str(self.folder.model))


def fit(
    data: AnyPath,
    model: str = DEFAULT_MODEL,
    budget: str = "30m",
    output: AnyPath = "runs/fit",
    *,
    corpus: AnyPath | None = None,
    data_format: str | None = None,
    data_columns: Sequence[str] | None = None,
    on_bad_record: Any = "stop",
    dev: float | None = None,
    test: float | None = None,
    say: Callable[[str], None] = print,
    **settings: Any,
) -> FitResult:
    """Train a retriever on question-passage pairs, and compare it with the model as it is.

    The same call goes on where an earlier one was killed.

    Args:
        data: pairs in any format of docs/data.md, or a folder that `contaccum split` wrote.
        model: a folder or hub name: a SentenceTransformer, or a transformers backbone.
        budget: wall time of the whole call, such as "90s", "30m" or "2h".
        output: a folder for everything that is written.
        corpus: documents, all of which dev and test are searched in; None: the held-out passages
            and a sample of the others.
        data_format, data_columns, on_bad_record: of the data, as `contaccum train` has them.
        dev, test: sizes of the held-out sets: queries, or below 1 a share.
        say: called with each line for the user.
        settings: keys of `contaccum train`. Those that are given are not searched.

    Raises:
        UserError: for data, a model, settings or a folder that cannot be used, and for a budget
            that is too short.
    """
    given: dict[str, list[str]] = {}
    for key, value in settings.items():
        values = value if isinstance(value, (list, tuple)) else [value]
        given[key] = [str(item) for item in values]
    source = DataSource(
        path=Path(data),
        corpus=None if corpus is None else Path(corpus),
        data_format=data_format,
        columns=None if data_columns is None else list(data_columns),
        on_bad_record=on_bad_record,
        dev=dev,
        test=test,
    )
    return Fit(source, model, given, parse_duration(budget), FitFolder(Path(output)), say).run()


class Fit:
    """One call of `fit`.

    Args:
        source: of the pairs.
        model: to train.
        given: keys of `contaccum train` that the user gave, and their values as text.
        seconds: of wall time.
        folder: gets everything.
        say: called with each line for the user, by the first process alone.

    Raises:
        ConfigError: for settings that cannot be used.
    """

    def __init__(
        self,
        source: DataSource,
        model: str,
        given: Options,
        seconds: float,
        folder: FitFolder,
        say: Callable[[str], None],
    ) -> None:
        self._source = source
        self._model = model
        self._given = given
        self._seconds = seconds
        self._folder = folder
        self._args = check_settings(source.path, model, given)
        self._is_first = self._args.process_index == 0
        self._say = say if self._is_first else _say_nothing
        self._seconds_of_stages: dict[str, float] = {}

    def run(self) -> FitResult:
        """Do all stages; those that an earlier start has done are skipped."""
        with self._one_first("holding out dev and test"):
            if self._is_first:
                self._begin()
        self._budget = Budget(self._seconds, self._folder.used_time)
        split = read_split(self._folder.data)
        num_folds = self._source.count_folds(split)
        self._say_split(split, num_folds)

        options = base_options(self._folder, self._model, self._given)
        model_args, _, args = config.parse(
            to_command_line(options_of_method(options, "grad_accum", None))
        )
        base = load_encoder(model_args, args)
        with self._one_first("scoring what there is"):
            baselines, test_seconds = self._score_before_training(base, split)
        self._say(baselines.as_line(self._model))

        # The other splits of few data are trained on and tested as well.
        reserve = num_folds * test_seconds
        tuned = self._search(
            options, TimeForTrials(self._budget, reserve, num_folds * _FINAL_RUNS), baselines
        )
        self._train(tuned, (self._budget.left() - reserve) / num_folds)
        others = self._score_other_folds(base, tuned, num_folds, test_seconds)
        with self._one_first("the test"):
            if self._is_first:
                self._test(base, split, baselines, tuned, others)
        return self._result()

    def _begin(self) -> None:
        """Take the folder, and hold out dev and test."""
        self._folder.begin(
            {"model": self._model, "settings": dict(self._given), **self._source.record()}
        )
        left_out = self._source.hold_out(self._folder.data)
        if left_out is not None:
            self._say(left_out)

    def _say_split(self, split: Split, num_folds: int) -> None:
        self._say(split.summary())
        if num_folds > 1:
            self._say(
                f"{split.test} test queries are few: the verdict is over {num_folds} splits, each trained on"
            )
            return
        for warning in split.warnings():
            self._say(f"note: {warning}")

    def _score_before_training(self, base: DualEncoder, split: Split) -> tuple[Baselines, float]:
        """Encode the corpus, score the model as it is and BM25 on dev; return the scores and the seconds of a test."""
        batch_size = self._args.per_device_eval_batch_size
        with self._measured("baselines"):
            seconds_of_one = seconds_per_document(base, self._folder, batch_size)
            if self._is_first and not self._folder.baselines.is_file():
                require_time(self._budget, split, seconds_of_one)
                encode_corpus(
                    base,
                    self._name,
                    self._folder.data / CORPUS_FILE,
                    self._folder.store,
                    batch_size,
                )
            baselines = score_on_dev(base, self._folder, batch_size)
        test_seconds = _SLACK * seconds_of_one * split.documents["test"] + _SECONDS_TO_END
        return baselines, test_seconds

    def _search(
        self, options: Options, time_for_trials: TimeForTrials, baselines: Baselines
    ) -> Tuned:
        """Search settings on dev; what an earlier start has chosen and trained by stays chosen."""
        if self._folder.config.is_file():
            return read_tuned(self._folder.tuning)
        with self._measured("search"):
            options = {
                **options,
                "eval_data": [str(dev_folder(self._folder))],
                "eval_split": ["test"],
                "passage_store": [str(self._folder.store)],
                "corpus": [str(self._folder.data / CORPUS_FILE)],
            }
            given = list(self._given)
            return tune(options, given, time_for_trials, self._folder.tuning, self._say, baselines)

    def _train(self, tuned: Tuned, seconds: float) -> None:
        """Train at the chosen settings, for so many seconds at most."""
        with self._measured("training"):
            with self._one_first("writing the config"):
                if self._is_first:
                    cut_to = write_config(self._folder, tuned, seconds)
                    if cut_to is not None:
                        self._say(f"the final training has {cut_to} updates, for want of time")
            chosen = ", ".join(f"{key} {value}" for key, value in tuned.choice.settings.items())
            self._say(f"training at the best settings: {chosen}")
            train_final(self._folder.config, self._folder.model)

    def _score_other_folds(
        self, base: DualEncoder, tuned: Tuned, num_folds: int, test_seconds: float
    ) -> list[FoldScores]:
        """Train and test on other splits of few data, as many as there is time for."""
        others = []
        with self._measured("other splits"):
            for fold in range(1, num_folds):
                needed = 2 * test_seconds + self._seconds_of_stages["training"]
                has_time = share(self._budget.left() > needed)
                one = Fold(self._source, self._folder, fold, tuned.choice.settings["method"])
                if not (has_time or one.is_done):
                    self._say(f"judged by {fold} of {num_folds} splits, for want of time")
                    break
                self._say(f"split {fold + 1} of {num_folds}: training and testing once more")
                others.append(one.score(base, self._args))
        return others

    def _test(
        self,
        base: DualEncoder,
        split: Split,
        baselines: Baselines,
        tuned: Tuned,
        others: list[FoldScores],
    ) -> None:
        """Read the test set, judge, and write card, record and report."""
        with self._measured("test"):
            batch_size = self._args.per_device_eval_batch_size
            evaluator = evaluator_of(self._folder.data / "test", self._folder.store, batch_size)
            trained = DualEncoder.from_pretrained(
                str(self._folder.model), device=str(self._args.device)
            )
            tested = search_test(
                evaluator, base, trained, tuned.choice.settings["method"] == "query_side"
            )
        scores = pool_scores(tested, others)
        verdict = judge(scores["trained"], scores["base"], scores["bm25"], folds=1 + len(others))
        warnings = warnings_of(verdict, tuned.choice)
        open_card_with(self._folder.model, verdict, self._name)
        dev_scores = {
            "bm25": baselines.bm25,
            "base": baselines.base,
            "trained": best_on_dev(self._folder.model),
        }
        names = {"bm25": "BM25", "base": f"{self._name} (as it is)", "trained": "trained"}
        table = []
        for key, name in names.items():
            table.append({"name": name, "dev": dev_scores[key], **shown_means(tested[key].means)})
        record = {
            "request": read_json(self._folder.record)["request"],
            "verdict": verdict.record(),
            "warnings": warnings,
            "model": self._name,
            "data": {"path": str(self._source.path), "corpus": _text_or_none(self._source.corpus)},
            "split": asdict(split),
            "scores": table,
            "choice": tuned.choice._asdict(),
            "trials": tuned.trials,
            "changes": changes_of(evaluator.dataset, tested["base"], tested["trained"]),
            "settings": yaml.safe_load(self._folder.config.read_text(encoding="utf-8")),
            "seconds": {**self._seconds_of_stages, "total": self._budget.used()},
            "budget_seconds": self._seconds,
            "made_with": {**provenance(), "time": datetime.now(UTC).isoformat(timespec="seconds")},
        }
        write_json(self._folder.record, redact(record))
        write_text(self._folder.report, build_fit_page(self._folder.path))

    def _result(self) -> FitResult:
        """Return what was found, and say it."""
        record = read_json(self._folder.record)
        fields = {name: record["verdict"][name] for name in Verdict.__dataclass_fields__}
        result = FitResult(Verdict(**fields), self._folder, record["warnings"])
        for warning in result.warnings:
            self._say(f"take care: {warning}")
        self._say(str(result.verdict))
        folder = self._folder
        self._say(
            f"model: {folder.model}   report: {folder.report}   again: contaccum train {folder.config}"
        )
        return result

    @property
    def _name(self) -> str:
        return model_name(self._model)

    def _one_first(self, what: str) -> AbstractContextManager[None]:
        """Let the first process of each host go ahead, and the others wait for it."""
        context: AbstractContextManager[None] = self._args.main_process_first(
            local=False, desc=what
        )
        return context

    @contextmanager
    def _measured(self, stage: str) -> Iterator[None]:
        """Measure a stage, and keep the time that the budget has used so far."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._seconds_of_stages[stage] = round(time.perf_counter() - started, 1)
            if self._is_first:
                self._budget.save()


def _say_nothing(line: str) -> None:
    """Say nothing: another process does."""


def _text_or_none(path: Path | None) -> str | None:
    return None if path is None else str(path)
