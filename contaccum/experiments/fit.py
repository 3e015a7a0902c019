"""`contaccum fit`: hold out, baselines, search, training, verdict and report, as in docs/fit.md.

Every stage writes its result below the output folder. A later start of the same call skips the
stages that are finished, so a process that was killed continues where it stopped.

Terms: the base model is the model before training. A trial is a training of the search. A fold
is one of several splits of a small data set into train, dev and test; fold 0 is the split on
which the search runs. A guard is other data on which the model must not become much worse.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from contaccum import __version__
from contaccum.data.beir import BeirDataset, load_beir_folder, read_split_queries
from contaccum.data.near_duplicates import find_near_duplicates
from contaccum.data.readers import read_records
from contaccum.data.records import RecordReport, passage_text, quoted
from contaccum.data.split import CORPUS_FILE, TRAIN_FILE, Split, read_split
from contaccum.defaults import DEFAULT_GUARD_LOSS, DEFAULT_WEIGHTS
from contaccum.distributed import share
from contaccum.encoders.dual_encoder import DualEncoder
from contaccum.encoders.loading import model_name, require_model
from contaccum.errors import DataError, UserError
from contaccum.evaluation.beir import load_data
from contaccum.files import lock_folder, read_json, redact, write_json, write_text
from contaccum.fitting.baselines import (
    TimeEstimates,
    count_encoded_documents,
    encode_corpus,
    estimate_trial_documents,
    get_trial_dev_set,
    load_evaluator,
    measure_seconds_per_document,
    require_encoding_time,
    score_on_dev,
)
from contaccum.fitting.final import (
    SystemResult,
    is_trained,
    load_trained,
    search_test_set,
    train_final,
    write_final_config,
    write_verdict_to_card,
)
from contaccum.fitting.folder import FitFolder
from contaccum.fitting.folds import Fold, FoldScores, pool_groups, pool_scores
from contaccum.fitting.result import FitResult, make_record, read_result
from contaccum.fitting.settings import check_settings, make_start_options
from contaccum.fitting.source import DataSource
from contaccum.fitting.verdict import Verdict, compute_verdict
from contaccum.merging import write_best_merge
from contaccum.report.fit_page import build_fit_page
from contaccum.retrieval.encode import read_texts
from contaccum.training.run import load_encoder
from contaccum.tuning.baselines import Baselines
from contaccum.tuning.budget import Budget, TimeForTrials
from contaccum.tuning.methods import make_base_options
from contaccum.tuning.options import Options, parse, to_command_line
from contaccum.tuning.result import TunedSettings, read_tuned
from contaccum.tuning.tune import fingerprint_models, tune

# Time that is reserved for the final training with its checkpoints, relative to a trial. It is more
# than the expected time.
_FINAL_TRAINING_FACTOR = 1.6
_MAX_SHARE_OF_FOLDS = 0.5  # of the time left before the search, for encoding and testing folds
_SAFETY_FACTOR = 1.3  # reserved time relative to the estimated time
_LOADING_SECONDS = 10.0  # reserved for loading the models and writing the report


class Fit:
    """One call of `contaccum.fit`.

    Args:
        source: the pairs.
        model: the folder or hub name of the base model.
        settings: options of `contaccum train` that the user gave.
        seconds: the wall time of the whole call.
        folder: the output folder.
        print_line: is called with each line for the user, by the first process only.
        guard: names of the guard sets, on which the model is to keep its quality; may be empty.
        guard_loss: the nDCG@10 that the model may lose on each guard set.

    Raises:
        UserError: for settings or a guard set that cannot be used, or if there is no such model.
    """

    def __init__(
        self,
        source: DataSource,
        model: str,
        settings: Options,
        seconds: float,
        folder: FitFolder,
        print_line: Callable[[str], None],
        guard: Sequence[str] = (),
        guard_loss: float = DEFAULT_GUARD_LOSS,
    ) -> None:
        self._source = source
        self._model = model
        self._settings = settings
        self._seconds = seconds
        self._folder = folder
        self._args = check_settings(source.path, model, settings)
        # They are read before anything else, so that a faulty set is refused at once.
        self._guard_sets = {source: load_data(source) for source in guard}
        self._guard_loss = guard_loss
        require_model(model)
        self._is_first_process = self._args.process_index == 0
        self._print_line = print_line if self._is_first_process else _print_nothing
        self._stage_seconds: dict[str, float] = {}  # over all starts of the command

    def run(self) -> FitResult:
        """Run all stages; stages that an earlier start has finished are skipped.

        Raises:
            UserError: for data, settings or a budget that cannot be used, or if another process
                works in the folder.
        """
        if not self._is_first_process:
            return self._run_stages()
        with lock_folder(self._folder.path, "contaccum fit"):
            return self._run_stages()

    def _run_stages(self) -> FitResult:
        self._budget = Budget(self._seconds, self._folder.used_time_file)
        if self._folder.stage_seconds_file.is_file():
            self._stage_seconds = read_json(self._folder.stage_seconds_file)

        # Hold out.
        with self._first_process_first("holding out dev and test"):
            if self._is_first_process:
                self._hold_out()
        split = read_split(self._folder.data)
        num_folds = self._source.count_folds(split)
        self._print_split(split, num_folds)

        # Baselines.
        options = make_start_options(
            self._folder, self._model, self._settings, self._args.world_size
        )
        base = self._load_base_model(options)
        with self._first_process_first("scoring the baselines"):
            baselines, estimates = self._score_baselines(base, split)
        self._print_line(baselines.format_line(self._model))

        # Search. Each fold needs time for its own encoding, final training and test.
        num_reserved_folds = self._count_folds_with_time(num_folds, estimates)
        time_for_trials = TimeForTrials(
            self._budget,
            reserve=estimates.sum_reserve(num_reserved_folds),
            final_training_factor=num_reserved_folds * _FINAL_TRAINING_FACTOR,
            measure_reserve=lambda: self._measure_times(base, split).sum_reserve(
                num_reserved_folds
            ),
        )
        tuned = self._search(options, time_for_trials, baselines)

        # Train, and with a guard merge the trained model with the base model.
        self._train(tuned, options["num_train_epochs"], time_for_trials, num_reserved_folds)
        if self._guard_sets:
            self._merge_with_base(base)
        fold_scores = self._score_other_folds(base, split, tuned, num_folds)

        # Verdict and report.
        with self._first_process_first("testing and writing the report"):
            if self._is_first_process:
                test_set, results = self._search_test_set(base)
                verdict = self._compute_verdict(test_set, results, fold_scores)
                self._write_report(split, baselines, tuned, test_set, results, verdict)
        result = read_result(self._folder, base.trust_remote_code)
        self._print_result(result)
        return result

    def _hold_out(self) -> None:
        """Open the output folder, and hold out dev and test."""
        guard = {source: dataset.fingerprint for source, dataset in self._guard_sets.items()}
        request = {
            "version": __version__,
            "model": os.path.abspath(self._model) if os.path.isdir(self._model) else self._model,
            "settings": dict(self._settings),
            "guard": {"sets": guard, "guard_loss": self._guard_loss} if guard else None,
            **self._source.make_record(self._folder.path),
        }
        self._folder.open(request)
        try:
            lines = self._source.hold_out(
                self._folder.data, show_progress=not self._args.disable_tqdm
            )
        except UserError:
            self._folder.remove_request()
            raise
        for line in lines:
            self._print_line(line)
        if self._guard_sets:
            data = self._folder.data
            test_queries = set(read_split_queries(data / "test", "test", RecordReport()).values())
            if self._source.count_folds(read_split(data)) > 1:
                # Test queries of other folds are training queries of this one.
                test_queries.update(record.query for record in read_records(data / TRAIN_FILE))
            _refuse_test_queries(self._guard_sets, test_queries)

    def _print_split(self, split: Split, num_folds: int) -> None:
        """Print the sizes of the split, and the number of folds or the warnings about the split."""
        self._print_line(split.summary())
        if num_folds > 1:
            self._print_line(
                f"{split.test} test queries are few: the verdict is over {num_folds} splits, and a "
                "model is trained on each"
            )
            return
        for warning in split.warnings():
            self._print_line(f"note: {warning}")

    def _load_base_model(self, options: Options) -> DualEncoder:
        """Load the model as it is before training.

        Raises:
            ConfigError: if an earlier start of the command had another model, also if the files in
                the model's folder have changed.
        """
        settings, args = parse(to_command_line(make_base_options(options)))
        base = load_encoder(settings, args)
        if self._is_first_process:
            self._folder.open_model(fingerprint_models(base, settings, args))
        return base

    def _score_baselines(self, base: DualEncoder, split: Split) -> tuple[Baselines, TimeEstimates]:
        """Encode the corpus, and score the base model and BM25 on dev."""
        with self._measure("baselines"):
            document_seconds, guard_seconds = self._measure_encoding(base, split)
            if self._is_first_process:
                self._encode_corpus(base, split, document_seconds, guard_seconds)
            batch_size = self._args.per_device_eval_batch_size
            baselines = score_on_dev(base, self._folder, batch_size)
        return baselines, self._estimate_times(split, document_seconds, guard_seconds)

    def _measure_encoding(self, base: DualEncoder, split: Split) -> tuple[float, float]:
        """Return the seconds to encode a document, and those of the scores on the guard sets."""
        corpus = read_texts(self._folder.data / CORPUS_FILE, "document", RecordReport())
        document_seconds = measure_seconds_per_document(
            base,
            (text.passage for text in corpus),
            split.documents["train"],
            self._args.per_device_eval_batch_size,
        )
        guard_seconds = 0.0
        if self._guard_sets:
            guard_seconds = self._estimate_guard_seconds(
                base, estimate_trial_documents(split) * document_seconds
            )
        return document_seconds, guard_seconds

    def _measure_times(self, base: DualEncoder, split: Split) -> TimeEstimates:
        """Return the times of the later stages at the present speed of the machine."""
        return self._estimate_times(split, *self._measure_encoding(base, split))

    def _estimate_times(
        self, split: Split, document_seconds: float, guard_seconds: float
    ) -> TimeEstimates:
        """Return the times of the later stages; see `_measure_encoding` for the arguments."""
        test_seconds = document_seconds * self._count_test_documents(split)
        corpus_seconds = document_seconds * split.documents["train"]
        return TimeEstimates(
            corpus=_SAFETY_FACTOR * corpus_seconds,
            test=_SAFETY_FACTOR * test_seconds + _LOADING_SECONDS,
            guard=_SAFETY_FACTOR * guard_seconds,
        )

    def _count_test_documents(self, split: Split) -> int:
        """Return the number of test documents for whose encoding time is reserved.

        After query-side training, which encodes no documents, those of the base model are searched.
        """
        is_query_side = self._settings.get("method") == ["query_side"]
        return 0 if is_query_side else split.documents["test"]

    def _estimate_guard_seconds(self, base: DualEncoder, dev_seconds: float) -> float:
        """Return the time of encoding dev, which takes dev_seconds, and the guard sets."""
        seconds = dev_seconds
        for dataset in self._guard_sets.values():
            texts = (passage_text(row["title"], row["text"]) for row in dataset.corpus.values())
            seconds += len(dataset.corpus) * measure_seconds_per_document(
                base, texts, len(dataset.corpus), self._args.per_device_eval_batch_size
            )
        return len(DEFAULT_WEIGHTS) * seconds

    def _encode_corpus(
        self, base: DualEncoder, split: Split, document_seconds: float, guard_seconds: float
    ) -> None:
        """Encode the corpus into the store, unless an earlier start has done it.

        Args:
            document_seconds: the seconds to encode one document.
            guard_seconds: the seconds that the scores on the guard sets take.
        """
        store = self._folder.store
        num_encoded = count_encoded_documents(store)
        has_baselines = self._folder.baselines_file.is_file()
        if not has_baselines:
            num_documents = split.documents["train"] - num_encoded
            num_documents += self._count_test_documents(split)
            require_encoding_time(self._budget, num_documents, document_seconds, guard_seconds)
        # The user may remove the store of an unfinished fit to free space.
        if not has_baselines or num_encoded < split.documents["train"]:
            corpus = self._folder.data / CORPUS_FILE
            batch_size = self._args.per_device_eval_batch_size
            encode_corpus(base, self._model_name, corpus, store, batch_size)

    def _count_folds_with_time(self, num_folds: int, estimates: TimeEstimates) -> int:
        """Return the number of folds for which time is reserved, at least 1.

        With a large corpus, encoding it for each fold could leave no time for the search. The other
        folds are used only if there is time left at the end.
        """
        seconds = _MAX_SHARE_OF_FOLDS * self._budget.left() - estimates.test - estimates.guard
        num_further_folds = max(0, int(seconds / (estimates.corpus + estimates.test)))
        # All processes must reserve the same time, so the first process decides.
        return share(min(num_folds, 1 + num_further_folds))

    def _search(
        self, options: Options, time_for_trials: TimeForTrials, baselines: Baselines
    ) -> TunedSettings:
        """Search settings on dev, which is a BEIR folder with a single split called ``test``.

        If an earlier start has written the config of the final training, its settings are kept.
        """
        if self._folder.config_file.is_file():
            return read_tuned(self._folder.tuning)
        search_options = {
            **options,
            "eval_data": [os.path.abspath(get_trial_dev_set(self._folder))],
            "eval_split": ["test"],
            "passage_store": [os.path.abspath(self._folder.store)],
            "corpus": [os.path.abspath(self._folder.data / CORPUS_FILE)],
        }
        with self._measure("search"):
            return tune(
                search_options,
                fixed_keys=list(self._settings),
                time=time_for_trials,
                output=self._folder.tuning,
                print_line=self._print_line,
                baselines=baselines,
            )

    def _train(
        self,
        tuned: TunedSettings,
        full_epochs: Sequence[str],
        time_for_trials: TimeForTrials,
        num_folds: int,
    ) -> None:
        """Train at the chosen settings, as long as the budget allows it.

        Args:
            full_epochs: the value of ``num_train_epochs`` at full length, if trials were cut.
            time_for_trials: the time that is left and reserved.
            num_folds: the number of trainings that share the time.
        """
        model_folder = self._folder.model
        if self._guard_sets:
            model_folder = self._folder.trained_model
        settings = ", ".join(f"{key} {value}" for key, value in tuned.choice.settings.items())
        self._print_line(f"training at the best settings: {settings}")

        def measure_seconds_left() -> float:
            time_for_trials.measure_again()
            return (self._budget.left() - time_for_trials.reserve) / num_folds

        # Later stages of an earlier start may have used a model that is there already.
        is_final = is_trained(model_folder)
        with self._measure("training"):
            while True:  # twice if there is time for a much longer training after the first one
                line = None
                if self._is_first_process and not is_final:
                    line = write_final_config(
                        self._folder, tuned, full_epochs, measure_seconds_left, model_folder
                    )
                if share(line):
                    self._print_line(str(line))
                is_final = is_trained(model_folder)
                train_final(self._folder.config_file, model_folder)
                if is_final:
                    break

    def _merge_with_base(self, base: DualEncoder) -> None:
        """Merge the trained model with the base model, unless an earlier start has done it."""
        with self._measure("guard"), self._first_process_first("choosing a weight"):
            if self._is_first_process and not self._folder.guard_file.is_file():
                dev = load_beir_folder(get_trial_dev_set(self._folder), "test")
                record = write_best_merge(
                    base,
                    load_trained(self._folder.trained_model, base),
                    [("dev", dev), *self._guard_sets.items()],
                    DEFAULT_WEIGHTS,
                    self._guard_loss,
                    self._args.per_device_eval_batch_size,
                    self._folder.model,
                    self._print_line,
                )
                write_json(self._folder.guard_file, record)

    def _read_guard_record(self) -> dict[str, Any] | None:
        """Return the record of the merge, or None if the fit has no guard."""
        return read_json(self._folder.guard_file) if self._guard_sets else None

    def _score_other_folds(
        self, base: DualEncoder, split: Split, tuned: TunedSettings, num_folds: int
    ) -> list[FoldScores]:
        """Train and test on the folds after fold 0, as many as there is time for."""
        fold_scores = []
        guard_record = self._read_guard_record()
        merge_weight = None if guard_record is None else guard_record["weight"]
        method = tuned.choice.settings["method"]
        training_seconds = self._stage_seconds["training"]
        task = "training and testing again"
        if merge_weight == 0:  # the verdict is about the base model
            training_seconds = 0.0
            task = "testing again"
        with self._measure("other splits"):
            for number in range(1, num_folds):
                fold = Fold(self._source, self._folder, number, method, merge_weight)
                has_time = False
                if self._is_first_process and not fold.is_done:
                    estimates = self._measure_times(base, split)
                    # One test is that of this fold, the other that of fold 0, at the end.
                    needed = estimates.corpus + training_seconds + 2 * estimates.test
                    has_time = self._budget.left() > needed
                # All processes must take the same branch, so the first process decides.
                has_time = share(has_time)
                if not has_time and not fold.is_done:
                    self._print_line(
                        f"the verdict is over {number} of {num_folds} splits, because the budget "
                        "is not enough for more"
                    )
                    break
                if not fold.is_done:
                    self._print_line(f"split {number + 1} of {num_folds}: {task}")
                fold_scores.append(fold.score(base, self._args))
        return fold_scores

    def _search_test_set(self, base: DualEncoder) -> tuple[BeirDataset, dict[str, SystemResult]]:
        """Return the test set, and the results of BM25, the base model and the trained model."""
        with self._measure("test"):
            batch_size = self._args.per_device_eval_batch_size
            evaluator = load_evaluator(self._folder.data / "test", self._folder.store, batch_size)
            trained = load_trained(self._folder.model, base)
            results = search_test_set(evaluator, base, trained)
        return evaluator.dataset, results

    def _compute_verdict(
        self,
        test_set: BeirDataset,
        results: Mapping[str, SystemResult],
        fold_scores: Sequence[FoldScores],
    ) -> Verdict:
        """Compute the verdict from the test queries of all splits."""
        scores = pool_scores(results, fold_scores)
        groups = pool_groups(test_set, fold_scores)
        return compute_verdict(
            scores["trained"], scores["base"], scores["bm25"], groups, folds=1 + len(fold_scores)
        )

    def _write_report(
        self,
        split: Split,
        baselines: Baselines,
        tuned: TunedSettings,
        test_set: BeirDataset,
        results: Mapping[str, SystemResult],
        verdict: Verdict,
    ) -> None:
        """Write the verdict to the model card, the JSON record and the HTML report."""
        write_verdict_to_card(self._folder.model, verdict, self._model_name)
        record = make_record(
            self._source,
            self._model_name,
            self._folder,
            split,
            baselines,
            tuned,
            test_set,
            results,
            verdict,
            self._read_guard_record(),
        )
        record["seconds"] = {**self._stage_seconds, "total": self._budget.used()}
        record["budget_seconds"] = self._seconds
        write_json(self._folder.record_file, redact(record))
        write_text(self._folder.report, build_fit_page(self._folder.path))

    def _print_result(self, result: FitResult) -> None:
        """Print the warnings, the verdict, and the paths of the results."""
        for warning in result.warnings:
            self._print_line(f"warning: {warning}")
        self._print_line(str(result.verdict))
        folder = self._folder
        self._print_line(
            f"model: {folder.model}   report: {folder.report}   "
            f"again: contaccum train {folder.config_file}"
        )

    @property
    def _model_name(self) -> str:
        """The name of the base model in reports."""
        return model_name(self._model)

    def _first_process_first(self, description: str) -> AbstractContextManager[None]:
        """Return a context in which the other processes wait until the first one has left it."""
        context: AbstractContextManager[None] = self._args.main_process_first(
            local=False, desc=description
        )
        return context

    @contextmanager
    def _measure(self, stage: str) -> Iterator[None]:
        """Measure the time of a stage, and save it and the time that the budget has used."""
        started = time.perf_counter()
        try:
            yield
        finally:
            earlier_seconds = self._stage_seconds.get(stage, 0.0)
            seconds = earlier_seconds + time.perf_counter() - started
            self._stage_seconds[stage] = round(seconds, 1)
            if self._is_first_process:
                self._budget.save()
                write_json(self._folder.stage_seconds_file, self._stage_seconds)


def _refuse_test_queries(
    guard_sets: Mapping[str, BeirDataset], test_queries: Collection[str]
) -> None:
    """Raise `DataError` if a guard set has test queries, or near-duplicates of them."""
    for source, dataset in guard_sets.items():
        near_queries = find_near_duplicates(dataset.queries.values(), test_queries)
        if near_queries:
            raise DataError(
                f"guard: {source} has {len(near_queries)} queries of the test set, or nearly so, "
                "by which a weight would be chosen before the verdict, such as "
                f"{quoted(min(near_queries))}; remove them, or give other data"
            )


def _print_nothing(line: str) -> None:
    """Print nothing: only the first process prints lines."""
