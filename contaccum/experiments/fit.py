"""`contaccum fit`: hold out, baselines, search, training, verdict and report, as in docs/fit.md.

Every stage writes its result below the output folder. A later start of the same call skips the
stages that are finished, so a process that was killed continues where it stopped.

Terms: the base model is the model before training. A trial is a training of the search. A fold
is one of several splits of a small data set into train, dev and test; fold 0 is the split on
which the search runs. A guard is other data on which the model must not become much worse.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml

from contaccum import __version__
from contaccum.data.beir import BeirDataset, load_beir_folder, read_split_queries
from contaccum.data.near_duplicates import find_near_duplicates
from contaccum.data.readers import parse_columns, read_records
from contaccum.data.records import RecordReport, passage_text, quoted
from contaccum.data.split import CORPUS_FILE, TRAIN_FILE, read_split, write_part
from contaccum.defaults import DEFAULT_GUARD_LOSS, DEFAULT_MODEL, DEFAULT_WEIGHTS
from contaccum.distributed import rank, world_size
from contaccum.encoders.dual_encoder import DualEncoder
from contaccum.encoders.loading import is_sentence_transformer, model_name, require_model
from contaccum.errors import ConfigError, DataError
from contaccum.evaluation.beir import load_data as load_beir
from contaccum.evaluation.evaluator import RetrievalEvaluator
from contaccum.evaluation.results import Run
from contaccum.experiments.budget import (
    Budget,
    TimeForTrials,
    measure_seconds_per_document,
    parse_duration,
    require_encoding_time,
)
from contaccum.experiments.folds import (
    FoldScores,
    Pairs,
    encode_corpus,
    load_evaluator,
    pool_groups,
    pool_scores,
    score_fold,
)
from contaccum.experiments.run import (
    IDENTITY_FILE,
    RESULT_FILE,
    begin,
    count_updates,
    describe_models,
    describe_settings,
    on_first_rank,
    once,
    only_first_rank,
    require_same_work,
    run_and_keep,
    start_ranks,
)
from contaccum.experiments.tune import (
    Baselines,
    Choice,
    Source,
    Tuned,
    list_methods,
    make_base_settings,
    round_up,
    search_settings,
    write_tuned,
)
from contaccum.experiments.verdict import (
    SystemResult,
    Verdict,
    collect_warnings,
    compare_queries,
    compute_verdict,
    load_trained,
    search_test_set,
    select_shown_metrics,
    warn_of_test,
    write_verdict_to_card,
)
from contaccum.files import (
    AnyPath,
    atomic_folder,
    provenance,
    read_json,
    redact,
    refuse_credentials,
    write_json,
    write_text,
)
from contaccum.merging import write_best_merge
from contaccum.report.fit_page import build_fit_page
from contaccum.retrieval.encode import read_texts
from contaccum.retrieval.store import SHARD_FILE
from contaccum.settings import Settings, find, read, replace, to_yaml
from contaccum.training.arguments import ContAccumTrainingArguments
from contaccum.training.proposal import propose
from contaccum.training.setup import load_data, load_encoder

RECORD_FILE = "fit.json"
CONFIG_FILE = "config.yaml"
REPORT_FILE = "report.html"
MAX_TRIAL_DOCUMENTS = 2000
"""A dev corpus with more documents is reduced to a pool, because each trial encodes it again."""

_POOL_DEPTH = 10  # top documents of each query in a run; nDCG@10 depends on no others
# Time that is reserved for the final training with its checkpoints, relative to a trial. It is more
# than the expected time.
_FINAL_TRAINING_FACTOR = 1.6
_MAX_SHARE_OF_FOLDS = 0.5  # of the time left before the search, for encoding and testing folds
_SAFETY_FACTOR = 1.3  # reserved time relative to the estimated time
_LOADING_SECONDS = 10.0  # reserved for loading the models and writing the report
_NUM_EVALUATIONS = 4  # evaluations on dev during the final training, each with a checkpoint
# Expected times relative to those of a trial: of loading and scoring, which the final training does
# more often, and of an update.
_OVERHEAD_FACTOR = 1.3
_UPDATE_FACTOR = 1.1
# A training that was cut is repeated if there is time for so many times its updates.
_MUCH_LONGER = 1.5


@dataclass(frozen=True)
class FitResult:
    """The result of `fit`.

    Attributes:
        verdict: the comparison with the base model; `str` returns the line that was printed.
        folder: the output folder.
        warnings: warnings about the verdict, one line each.
        trust_remote_code: True if code that comes with the base model was trusted.
    """

    verdict: Verdict
    folder: Path
    warnings: list[str]
    trust_remote_code: bool = False

    @property
    def report(self) -> Path:
        """The path of the HTML report."""
        return self.folder / REPORT_FILE

    @cached_property
    def model(self) -> DualEncoder:
        """The trained model, which is loaded at the first access."""
        return DualEncoder.from_pretrained(
            str(self.folder / "model"), trust_remote_code=self.trust_remote_code
        )


def fit(
    data: AnyPath,
    model: AnyPath = DEFAULT_MODEL,
    budget: str | float = "30m",
    output: AnyPath = "runs/fit",
    *,
    corpus: AnyPath | None = None,
    data_format: str | None = None,
    data_columns: Mapping[str, str] | Sequence[str] | None = None,
    on_bad_record: Literal["stop", "skip"] = "stop",
    min_score: float | None = None,
    dev: float | None = None,
    test: float | None = None,
    guard: AnyPath | Sequence[AnyPath] | None = None,
    guard_loss: float = DEFAULT_GUARD_LOSS,
    print_line: Callable[[str], None] = print,
    **settings: Any,
) -> FitResult:
    """Train a retriever on question-passage pairs, and compare it with the base model.

    The base model is the model before training. A call with the same arguments continues a call
    that was killed.

    Args:
        data: pairs in any format of docs/data.md, or a folder that `contaccum split` wrote.
        model: the folder or hub name of a SentenceTransformer or a transformers backbone.
        budget: the wall time of the whole call, such as "90s", "30m" or "2h"; or in seconds.
        output: the folder for everything that is written.
        corpus: the documents in which dev and test queries are searched; None: the held-out
            passages and a sample of the others.
        data_format, on_bad_record: how ``data`` are read, as in `contaccum train`.
        data_columns: {role: column name}, such as {"query": "question", "positive": "answer"}, or
            a list of words "role=name".
        min_score: the least score or label of a pair that is a match, for scored pairs.
        dev, test: the sizes of the held-out sets: a number of queries, or a share below 1.
        guard: BEIR folders or public names of other data. The trained model is then merged with the
            base model so that it loses at most ``guard_loss`` nDCG@10 on each of them.
        guard_loss: see ``guard``.
        print_line: is called with each line for the user.
        settings: options of `contaccum train`, such as ``learning_rate=1e-5``. The search does not
            vary them. None stands for an option that is not given.

    Raises:
        UserError: for data, a model, settings or a folder that cannot be used, and for a budget
            that is too short.
    """
    given = read_given(settings)
    name = os.path.expanduser(os.fspath(model))
    pairs = Pairs(
        path=Path(data).expanduser(),
        corpus=None if corpus is None else Path(corpus).expanduser(),
        data_format=data_format,
        columns=parse_columns(data_columns) or None,
        on_bad_record=on_bad_record,
        dev=dev,
        test=test,
        min_score=min_score,
    )
    folder = Path(output).expanduser().absolute()
    seconds = parse_duration(budget)
    guards = [guard] if isinstance(guard, (str, os.PathLike)) else guard or ()
    args = check_given(name, given, folder / "store")
    print_line = only_first_rank(print_line)
    # They are read before anything else, so that a faulty set is refused at once.
    guard_sets = {os.fspath(source): load_beir(os.fspath(source)) for source in guards}
    require_model(name)
    guard_request = None
    if guard_sets:
        fingerprints = {source: dataset.fingerprint for source, dataset in guard_sets.items()}
        guard_request = {"sets": fingerprints, "guard_loss": guard_loss}
    request = {
        "version": __version__,
        "model": os.path.abspath(name) if os.path.isdir(name) else name,
        **given,
        "guard": guard_request,
        **pairs.describe(folder),
    }
    may_restart = on_first_rank(lambda: require_free_folder(folder))
    with begin(folder, request, "contaccum fit", may_restart):
        stages = _Stages(
            folder, name, pairs, given, guard_sets, guard_loss, args, seconds, print_line
        )
        stages.hold_out()
        stages.score_baselines()
        tuned = stages.search()
        stages.train(tuned)
        stages.merge_with_base()
        fold_scores = stages.score_other_folds()
        record = on_first_rank(lambda: stages.test_and_report(tuned, fold_scores, request))
    verdict = Verdict(**{field.name: record["verdict"][field.name] for field in fields(Verdict)})
    for warning in record["warnings"]:
        print_line(f"warning: {warning}")
    print_line(str(verdict))
    shown = Path(output).expanduser()
    print_line(
        f"model: {shown / 'model'}   report: {shown / REPORT_FILE}   "
        f"again: contaccum train {shown / CONFIG_FILE}"
    )
    return FitResult(verdict, shown, record["warnings"], stages.base.trust_remote_code)


# Before the first stage ---------------------------------------------------------------------------


def read_given(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that the user gave, without those that are None.

    Raises:
        ConfigError: for a setting that `contaccum fit` decides itself, or a credential.
    """
    given = {}
    for name, value in settings.items():
        if isinstance(value, tuple):
            value = list(value)
        if isinstance(value, os.PathLike):
            value = os.fspath(value)
        if value is not None:
            given[name] = value
    for name in sorted(find("set_by_fit").keys() & given.keys()):
        raise ConfigError(f"{name} is not an option of contaccum fit: drop it")
    refuse_credentials(given)
    if "total_train_batch_size" in given:
        given.pop("gradient_accumulation_steps", None)  # it follows from the pairs per update
    return given


def check_given(model: str, given: Mapping[str, Any], store: Path) -> ContAccumTrainingArguments:
    """Check the user's settings with each method that may be tried, before anything is read.

    Returns:
        The arguments of a training. `fit` reads the device and the batch sizes from them.

    Raises:
        ConfigError: for an unknown setting, or values that cannot work.
    """
    settings = make_common_settings({"model": model, **given})
    args = start_ranks(make_base_settings(settings))
    source = Source(settings, given.keys(), str(store))
    list_methods(source, given.get("method"), lambda line: None)  # the search prints the reasons
    return args


def make_common_settings(values: Mapping[str, Any]) -> Settings:
    """Return settings for the methods of a search: method contaccum has all but the documents."""
    return replace(Settings(), **{**values, "method": "contaccum"})


def require_free_folder(folder: Path) -> bool:
    """Return True if a call may replace the work that an earlier call has begun in the folder.

    It may as long as nothing is encoded: if the data, the model or the settings were refused, the
    call can be repeated with corrected ones.

    Raises:
        ConfigError: if the folder has a finished fit, or other files.
    """
    if (folder / RECORD_FILE).is_file() and (folder / REPORT_FILE).is_file():
        line = read_json(folder / RECORD_FILE)["verdict"]["line"]
        raise ConfigError(
            f"{folder}: this folder has a finished fit ({line}); name another output folder, or "
            "remove this one"
        )
    if folder.is_dir() and any(folder.iterdir()) and not (folder / IDENTITY_FILE).is_file():
        raise ConfigError(f"{folder}: holds other files; name another output folder")
    # The store alone does not show it, because the user may have removed it to free space.
    return not (folder / "store").exists() and not (folder / "baselines").exists()


def propose_settings(
    train_file: Path, model: str, given: Mapping[str, Any], num_ranks: int
) -> Settings:
    """Return the settings from which the search starts.

    They are those that `contaccum new` proposes for the data, overridden by the user's settings. A
    SentenceTransformer keeps its maximum lengths; a transformers backbone gets lengths for the
    data.
    """
    # With positives="all", an epoch has a row for each positive, so updates may be larger.
    proposal = propose(str(train_file), model, positives=given.get("positives"))
    micro_batch = given.get("per_device_train_batch_size", proposal.micro_batch)
    unit = 1 if micro_batch == "auto" else micro_batch
    pairs_per_update = proposal.micro_batch * proposal.accumulation_steps
    proposed = {
        "model": os.path.abspath(model) if os.path.isdir(model) else model,
        "train_data": [str(train_file)],
        "bank_size": proposal.bank_size,
        "temperature": proposal.temperature,
        "per_device_train_batch_size": micro_batch,
        "total_train_batch_size": round_up(pairs_per_update, unit * num_ranks),
        "num_hard_negatives": int(proposal.has_negatives),
        "query_prompt": proposal.query_prompt or None,
        "passage_prompt": proposal.passage_prompt or None,
        "warmup_steps": 0.1,
    }
    if not is_sentence_transformer(model):
        proposed["query_max_length"] = proposal.query_max_length
        proposed["passage_max_length"] = proposal.passage_max_length
    if "gradient_accumulation_steps" in given:
        # The proposed batch size could contradict the number of steps that the user gave.
        del proposed["total_train_batch_size"]
    return make_common_settings({**proposed, **given})


# Stages -------------------------------------------------------------------------------------------


class _Times(NamedTuple):
    """Seconds to reserve for the stages after the search.

    Attributes:
        corpus: for encoding the corpus of another fold.
        test: for the test of one fold.
        guard: for the scores on the guard sets.
    """

    corpus: float
    test: float
    guard: float

    def sum_reserve(self, num_folds: int) -> float:
        """Return the seconds to reserve for everything but training, if so many folds are used."""
        return self.test + (num_folds - 1) * (self.corpus + self.test) + self.guard


@dataclass
class _Stages:
    """The stages of a fit, in the order in which they run."""

    folder: Path
    model: str
    pairs: Pairs
    given: Mapping[str, Any]
    guard_sets: Mapping[str, BeirDataset]
    guard_loss: float
    args: ContAccumTrainingArguments
    seconds: float
    print_line: Callable[[str], None]

    def __post_init__(self) -> None:
        self._batch_size = self.args.per_device_eval_batch_size
        self._budget = Budget(self.seconds, self.folder / "used_time.json")
        self._data = self.folder / "data"
        self._train_file = self._data / TRAIN_FILE
        self._store = self.folder / "store"
        # With a guard, ``model`` is the merge of the trained model and the base model.
        self._trained_folder = self.folder / ("trained" if self.guard_sets else "model")

    def hold_out(self) -> None:
        """Hold out dev and test, and propose settings for the training data."""
        lines = on_first_rank(
            lambda: self.pairs.hold_out(self._data, show_progress=not self.args.disable_tqdm)
        )
        for line in lines:
            self.print_line(line)
        self._split = read_split(self._data)
        self._num_folds = self.pairs.count_folds(self._split)
        if self.guard_sets:
            test_queries = set(
                read_split_queries(self._data / "test", "test", RecordReport()).values()
            )
            if self._num_folds > 1:
                # Test queries of other folds are training queries of this one.
                test_queries.update(record.query for record in read_records(self._train_file))
            refuse_test_queries(self.guard_sets, test_queries)
        self.print_line(self._split.summary())
        if self._num_folds > 1:
            self.print_line(
                f"{self._split.test} test queries are few: the verdict is over {self._num_folds} "
                "splits, and a model is trained on each"
            )
            return
        for warning in self._split.warnings():
            self.print_line(f"note: {warning}")

    def score_baselines(self) -> None:
        """Load the base model, encode the corpus, and score the base model and BM25 on dev."""
        settings = propose_settings(self._train_file, self.model, self.given, world_size())
        self._source = Source(settings, self.given.keys(), str(self._store))
        base_settings = make_base_settings(settings)
        self.base = load_encoder(base_settings, self.args)
        self._models = describe_models(self.base, settings, self.args)
        require_same_work(self.folder, self._models, "models.json")
        with self._budget.measure("baselines"):
            self._times = self._measure_times()
            self._encode_corpus()
            scores = once(self.folder / "baselines", self._models, self._score_on_dev)
        self._baselines = Baselines(**scores)
        self.print_line(self._baselines.format_line(self.model))

    def _measure_times(self) -> _Times:
        """Return the times of the later stages at the present speed of the machine."""

        def measure() -> list[float]:
            documents = self._split.documents
            corpus = read_texts(self._data / CORPUS_FILE, "document", RecordReport())
            document_seconds = measure_seconds_per_document(
                self.base, (text.passage for text in corpus), documents["train"], self._batch_size
            )
            guard_seconds = 0.0
            if self.guard_sets:
                # Trials are scored on a pool: for each query its judged documents (about one) and
                # the top documents of BM25 and of the base model.
                num_documents = documents["dev"]
                if num_documents > MAX_TRIAL_DOCUMENTS:
                    pool_size = self._split.dev * (2 * _POOL_DEPTH + 1)
                    num_documents = min(num_documents, pool_size)
                guard_seconds = num_documents * document_seconds
            for dataset in self.guard_sets.values():
                rows = dataset.corpus.values()
                texts = (passage_text(row["title"], row["text"]) for row in rows)
                guard_seconds += len(rows) * measure_seconds_per_document(
                    self.base, texts, len(rows), self._batch_size
                )
            return [document_seconds, len(DEFAULT_WEIGHTS) * guard_seconds]

        self._document_seconds, self._guard_seconds = on_first_rank(measure)
        return _Times(
            corpus=_SAFETY_FACTOR * self._document_seconds * self._split.documents["train"],
            test=_SAFETY_FACTOR * self._document_seconds * self._count_test_documents()
            + _LOADING_SECONDS,
            guard=_SAFETY_FACTOR * self._guard_seconds,
        )

    def _count_test_documents(self) -> int:
        """Return the number of test documents for whose encoding time is reserved.

        After query-side training, which encodes no documents, those of the base model are searched.
        """
        return 0 if self.given.get("method") == "query_side" else self._split.documents["test"]

    def _encode_corpus(self) -> None:
        """Encode the corpus into the store, unless an earlier start has done it."""

        def count_encoded() -> list[Any]:
            shards = self._store.glob(f"*/{SHARD_FILE}")
            num_encoded = sum(read_json(file)["rows"] for file in shards)
            return [num_encoded, (self.folder / "baselines" / RESULT_FILE).is_file()]

        num_encoded, has_baselines = on_first_rank(count_encoded)
        num_missing = self._split.documents["train"] - num_encoded
        if not has_baselines:
            num_documents = num_missing + self._count_test_documents()
            require_encoding_time(
                self._budget, num_documents, self._document_seconds, self._guard_seconds
            )
        # The user may remove the store of an unfinished fit to free space.
        if not has_baselines or num_missing > 0:
            on_first_rank(
                lambda: encode_corpus(
                    self.base,
                    model_name(self.model),
                    self._data / CORPUS_FILE,
                    self._store,
                    self._batch_size,
                )
            )

    def _score_on_dev(self) -> dict[str, Any]:
        """Score the base model and BM25 on dev, and write the smaller dev set for trials."""
        evaluator = load_evaluator(self._data / "dev", self._store, self._batch_size)
        metric = evaluator.primary_metric
        base_run = evaluator.search(self.base)
        base = evaluator.score_run(base_run)[metric]
        query_scores = evaluator.query_scores
        bm25_run = evaluator.search_bm25()
        bm25 = evaluator.score_run(bm25_run)[metric]
        if len(evaluator.dataset.corpus) > MAX_TRIAL_DOCUMENTS:
            with atomic_folder(self.folder / "dev_pool") as new_folder:
                pool = pool_documents(evaluator.dataset, [base_run, bm25_run])
                write_part(evaluator.dataset, pool, new_folder)
        return Baselines(base, query_scores, bm25)._asdict()

    @property
    def _trial_dev(self) -> Path:
        """The dev set on which trials are scored: the pool if there is one."""
        pool = self.folder / "dev_pool"
        return pool if pool.is_dir() else self._data / "dev"

    def search(self) -> Tuned:
        """Search settings on dev. Each fold needs time for its own training and test."""
        # With a large corpus, encoding it for each fold could leave no time for the search. The
        # other folds are used only if there is time left at the end.
        self._num_reserved_folds = self._count_folds_with_time(self._times)
        self._time = TimeForTrials(
            self._budget,
            reserve=self._times.sum_reserve(self._num_reserved_folds),
            final_training_factor=self._num_reserved_folds * _FINAL_TRAINING_FACTOR,
            measure_reserve=lambda: self._measure_times().sum_reserve(self._num_reserved_folds),
        )
        folder = self.folder / "tuning"
        dataset = load_beir_folder(self._trial_dev, "test")
        evaluator = RetrievalEvaluator(dataset, batch_size=self._batch_size)
        settings = self._source.settings

        def work() -> dict[str, Any]:
            method = self.given.get("method")
            tuned = search_settings(
                self._source,
                list_methods(self._source, method, self.print_line),
                method,
                self.given.keys(),
                str(self._data / CORPUS_FILE),
                self.base,
                evaluator,
                self._baselines,
                self._time,
                folder,
                self.print_line,
            )
            on_first_rank(lambda: write_tuned(tuned, folder, len(self._baselines.query_scores)))
            return {**tuned._asdict(), "choice": tuned.choice._asdict()}

        with self._budget.measure("search"):
            record = once(folder, describe_settings(settings), work, all_ranks=True)
        return Tuned(**{**record, "choice": Choice(**record["choice"])})

    def _count_folds_with_time(self, times: _Times) -> int:
        """Return the number of folds for which time is reserved, at least 1."""
        seconds = _MAX_SHARE_OF_FOLDS * self._budget.left() - times.test - times.guard
        num_further_folds = max(0, int(seconds / (times.corpus + times.test)))
        return min(self._num_folds, 1 + num_further_folds)

    def train(self, tuned: Tuned) -> None:
        """Train with the best settings, as long as the budget allows it."""
        settings = ", ".join(f"{key} {value}" for key, value in tuned.choice.settings.items())
        self.print_line(f"training at the best settings: {settings}")
        trial = tuned.chosen_trial
        full_epochs = self._source.settings.num_train_epochs

        def measure_seconds_left() -> float:
            self._time.measure_again()
            return (self._budget.left() - self._time.reserve) / self._num_reserved_folds

        with self._budget.measure("training"):
            options = on_first_rank(self._read_config)  # of an earlier start
            was_trained = on_first_rank((self._trained_folder / RESULT_FILE).is_file)
            if options is None:
                options, _, line = plan_final_training(
                    self.folder, self._trial_dev, tuned, full_epochs, measure_seconds_left()
                )
                self._write_config(options, line)
            self._final = replace(Settings(), **options)
            result = run_and_keep(self._final, self._trained_folder)
            # Later stages of an earlier start may have used a model that was there already.
            if not was_trained and self._final.max_steps > 0:
                measured = {**trial, "latest_seconds_per_update": result.seconds_per_update}
                longer, num_updates, _ = plan_final_training(
                    self.folder,
                    self._trial_dev,
                    tuned._replace(trials=[measured]),
                    full_epochs,
                    measure_seconds_left(),
                )
                if num_updates >= _MUCH_LONGER * result.updates:
                    line = "it took less time than expected and is repeated with"
                    self._write_config(longer, f"{line} {num_updates} updates")
                    self._final = replace(Settings(), **longer)
                    result = run_and_keep(self._final, self._trained_folder)
        self._final_result = result

    def _read_config(self) -> dict[str, Any] | None:
        file = self.folder / CONFIG_FILE
        return read([str(file)]) if file.is_file() else None

    def _write_config(self, options: Mapping[str, Any], line: str) -> None:
        """Write the config of the final training, and print a line about its length."""
        if line:
            self.print_line(line)
        comment = f"# Chosen by contaccum fit on dev data; see {REPORT_FILE}.\n"
        if rank() == 0:
            write_text(self.folder / CONFIG_FILE, comment + to_yaml(options))

    def merge_with_base(self) -> None:
        """With a guard, merge the trained model with the base model at the best weight."""
        self._guard_record: dict[str, Any] | None = None
        if not self.guard_sets:
            return

        def merge() -> dict[str, Any]:
            dev = load_beir_folder(self._trial_dev, "test")
            return write_best_merge(
                self.base,
                load_trained(self._trained_folder, self.base),
                [("dev", dev), *self.guard_sets.items()],
                DEFAULT_WEIGHTS,
                self.guard_loss,
                self._batch_size,
                self.folder / "model",
                self.print_line,
            )

        with self._budget.measure("guard"):
            identity = describe_settings(self._final)
            self._guard_record = once(self.folder / "guard", identity, merge)

    def score_other_folds(self) -> list[FoldScores]:
        """Train and test on the folds after fold 0, as many as there is time for."""
        weight = None if self._guard_record is None else self._guard_record["weight"]
        training_seconds = self._budget.stage_seconds["training"]
        task = "training and testing again"
        if weight == 0:  # the verdict is about the base model
            training_seconds = 0.0
            task = "testing again"
        fold_scores: list[FoldScores] = []
        with self._budget.measure("other splits"):
            dev = load_beir_folder(self._data / "dev", "test")
            for number in range(1, self._num_folds):
                fold_folder = self.folder / "folds" / str(number)
                if not on_first_rank((fold_folder / RESULT_FILE).is_file):
                    times = self._measure_times()
                    # One test is that of this fold, the other that of fold 0, at the end.
                    if self._budget.left() <= times.corpus + training_seconds + 2 * times.test:
                        self.print_line(
                            f"the verdict is over {number} of {self._num_folds} splits, because "
                            "the budget is not enough for more"
                        )
                        break
                    self.print_line(f"split {number + 1} of {self._num_folds}: {task}")
                fold_scores.append(
                    score_fold(
                        number,
                        fold_folder,
                        self.pairs,
                        self._final,
                        weight,
                        self.base,
                        dev,
                        self._batch_size,
                    )
                )
        return fold_scores

    def test_and_report(
        self, tuned: Tuned, fold_scores: Sequence[FoldScores], request: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Compute the verdict from the test queries of all splits, and write the report.

        Returns:
            The verdict and the warnings.
        """
        with self._budget.measure("test"):
            evaluator = load_evaluator(self._data / "test", self._store, self._batch_size)
            trained = load_trained(self.folder / "model", self.base)
            results = search_test_set(evaluator, self.base, trained)
        scores = pool_scores(results, fold_scores)
        verdict = compute_verdict(
            scores["trained"],
            scores["base"],
            scores["bm25"],
            pool_groups(evaluator.dataset, fold_scores),
            folds=1 + len(fold_scores),
        )
        write_verdict_to_card(self.folder / "model", verdict, model_name(self.model))
        # The dev scores of the choice are those of a trial. They say nothing about the test of a
        # merged model, or of a model that was trained for a shorter or longer time.
        warnings = [*tuned.choice.warnings, *warn_of_test(verdict)]
        is_like_trial = self._final_result.updates == tuned.chosen_trial["updates"]
        if is_like_trial and self._guard_record is None:
            warnings = collect_warnings(verdict, tuned.choice)
        record = {
            "request": {
                "version": __version__,
                "model": request["model"],
                "settings": dict(self.given),
                "guard": request["guard"],
                **asdict(self.pairs),
                "path": str(self.pairs.path),
                "corpus": None if self.pairs.corpus is None else str(self.pairs.corpus),
                "content": request["data"],
                "corpus_content": request["corpus"],
                "fingerprints": self._models,
            },
            "verdict": verdict.record(),
            "warnings": warnings,
            "model": model_name(self.model),
            "data": {
                "path": str(self.pairs.path),
                "corpus": None if self.pairs.corpus is None else str(self.pairs.corpus),
            },
            "split": asdict(self._split),
            "scores": self._make_score_table(results),
            "guard": self._guard_record,
            "choice": tuned.choice._asdict(),
            "trials": tuned.trials,
            "changes": compare_queries(evaluator.dataset, results["base"], results["trained"]),
            "settings": yaml.safe_load((self.folder / CONFIG_FILE).read_text(encoding="utf-8")),
            "seconds": {**self._budget.stage_seconds, "total": self._budget.used_here()},
            "budget_seconds": self._budget.seconds,
            "made_with": {**provenance(), "time": datetime.now(UTC).isoformat(timespec="seconds")},
        }
        write_json(self.folder / RECORD_FILE, redact(record))
        write_text(self.folder / REPORT_FILE, build_fit_page(self.folder))
        return {"verdict": verdict.record(), "warnings": warnings}

    def _make_score_table(self, results: Mapping[str, SystemResult]) -> list[dict[str, Any]]:
        """Return a row of scores on dev and test for BM25, the base model and the trained model."""
        trained_score = self._final_result.score
        if self._guard_record is not None:
            scores_of_weights = {row[0]: row[1] for row in self._guard_record["scores"]}
            trained_score = scores_of_weights[self._guard_record["weight"]]
        names = {
            "bm25": ("BM25", self._baselines.bm25),
            "base": (f"{model_name(self.model)} (as it is)", self._baselines.base),
            "trained": ("trained", trained_score),
        }
        table = []
        for system, (name, dev_score) in names.items():
            shown = select_shown_metrics(results[system].means)
            table.append({"name": name, "dev": dev_score, **shown})
        return table


def refuse_test_queries(
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


def pool_documents(dataset: BeirDataset, runs: list[Run]) -> set[str]:
    """Return the ids of the judged documents and of the top documents of each run and query.

    The system that made a run has the same nDCG@10 on this pool as on the whole corpus.

    Args:
        runs: {query id: {document id: score}} for each system.
    """
    pool: set[str] = set()
    for judgements in dataset.qrels.values():
        pool.update(judgements)
    for run in runs:
        for scores in run.values():
            ranking = sorted(scores, key=lambda document_id: -scores[document_id])
            pool.update(ranking[:_POOL_DEPTH])
    return pool


def plan_final_training(
    folder: Path,
    trial_dev: Path,
    tuned: Tuned,
    full_epochs: float,
    seconds_left: float,
) -> tuple[dict[str, Any], int, str]:
    """Return the settings of the final training, its updates, and a line for the user about them.

    The settings of the chosen trial are completed with checkpoints. If the trials were cut, the
    training has its full length again. If the time is short, it is limited to fewer updates. The
    line is empty if the length is that of the trial.

    Args:
        folder: the folder of the fit.
        trial_dev: the dev set by which the best checkpoint is chosen.
        full_epochs: ``num_train_epochs`` at full length.
        seconds_left: the time that the training may take.
    """
    trial = tuned.chosen_trial
    # Absolute paths, so that a later start may have another working directory.
    options = {
        **tuned.options,
        "output_dir": str(folder / "again"),  # if the user trains with the config again
        "eval_data": str(trial_dev),
        "eval_split": "test",
        "eval_strategy": "steps",
        "save_strategy": "steps",
        "load_best_model_at_end": True,
        "save_total_limit": 1,
    }
    if "max_steps" in options and options["max_steps"] == trial["settings"].get("max_steps"):
        del options["max_steps"]
        options["num_train_epochs"] = full_epochs
    settings = replace(Settings(), **{**options, "load_best_model_at_end": False})
    args = ContAccumTrainingArguments.from_settings(settings)
    full_updates = count_updates(load_data(settings).dataset, args)
    # Estimated from the trial: its time of loading and scoring, and the latest time of an update.
    seconds_per_update = trial["latest_seconds_per_update"]
    overhead_in_updates = trial["seconds"] / trial["seconds_per_update"] - trial["updates"]
    overhead = _OVERHEAD_FACTOR * overhead_in_updates * seconds_per_update
    possible_updates = int((seconds_left - overhead) / (_UPDATE_FACTOR * seconds_per_update))
    possible_updates = max(_NUM_EVALUATIONS, possible_updates)  # an update before each evaluation
    num_updates = min(full_updates, possible_updates)
    line = ""
    if full_updates != trial["updates"]:
        line = f"the final training has its full length, {full_updates} updates"
    if num_updates < full_updates:
        options["max_steps"] = num_updates
        line = (
            f"the final training is cut to {num_updates} of {full_updates} updates, because the "
            "budget is not enough for more"
        )
    # ContAccumTrainer also evaluates after the last update.
    options["eval_steps"] = options["save_steps"] = math.ceil(num_updates / _NUM_EVALUATIONS)
    return options, num_updates, line
