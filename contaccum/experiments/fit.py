"""`contaccum fit`: hold out, baselines, search, training, verdict and report, as in docs/fit.md.

Every stage writes its result below the output folder. A later start of the same call skips the
stages that are finished, so a process that was killed continues where it stopped.

Terms: the base model is the model before training. A trial is a training of the search. A fold
is one of several splits of a small data set into train, dev and test; fold 0 is the split on
which the search runs. A guard is other data on which the model must not become much worse.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import shutil
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from contaccum import __version__
from contaccum.data.beir import BeirDataset, load_beir_folder, read_split_queries
from contaccum.data.near_duplicates import find_near_duplicates, group_queries
from contaccum.data.records import Columns, parse_columns, read_records
from contaccum.data.rows import OnBadRecord, RecordReport, passage_text
from contaccum.data.split import (
    CORPUS_FILE,
    TRAIN_FILE,
    Future,
    Split,
    read_split,
    write_part,
)
from contaccum.defaults import DEFAULT_GUARD_LOSS, DEFAULT_MODEL, DEFAULT_WEIGHTS
from contaccum.distributed import world_size
from contaccum.encoders.dual_encoder import DualEncoder
from contaccum.encoders.loading import is_sentence_transformer, model_name, require_model
from contaccum.errors import ConfigError, DataError, UserError, quoted
from contaccum.evaluation.beir import load_data as load_beir
from contaccum.evaluation.evaluator import RetrievalEvaluator, sample
from contaccum.evaluation.metrics import sign_flip_test
from contaccum.evaluation.results import Run
from contaccum.experiments.budget import (
    USED_TIME_FILE,
    Budget,
    format_duration,
    measure_seconds_per_document,
    parse_duration,
    require_encoding_time,
)
from contaccum.experiments.folds import (
    Pairs,
    collect_scores,
    encode_corpus,
    load_evaluator,
    pool_scores,
    score_fold,
)
from contaccum.experiments.run import (
    IDENTITY_FILE,
    MODEL_FOLDER,
    RESULT_FILE,
    begin,
    count_updates,
    describe_models,
    describe_settings,
    measure_speed,
    on_first_rank,
    once,
    only_first_rank,
    require_same_work,
    run_and_keep,
    start_ranks,
)
from contaccum.experiments.tune import (
    MAX_EPOCHS,
    TRIAL_METRIC,
    Baselines,
    Choice,
    SearchSpace,
    Tuned,
    choose_bm25_weight,
    list_methods,
    make_base_settings,
    round_up,
    score_baselines,
    search_settings,
    write_tuned,
)
from contaccum.experiments.verdict import (
    ScoreColumns,
    Verdict,
    compare_queries,
    compute_verdict,
    compute_verdicts,
    describe_production,
    load_trained,
    search_test_set,
    search_trained,
    select_shown_metrics,
    warn_of_disagreement,
    warn_of_test,
    write_verdicts_to_card,
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
from contaccum.settings import Settings, find, replace, to_yaml
from contaccum.training.arguments import ContAccumTrainingArguments
from contaccum.training.passage_store import STORE_FOLDER
from contaccum.training.proposal import MAX_PAIRS_PER_UPDATE, MICRO_BATCH, propose
from contaccum.training.setup import load_data, load_encoder, make_second_stage

RECORD_FILE = "fit.json"
CONFIG_FILE = "config.yaml"
REPORT_FILE = "report.html"
CURVE_SHARES = (0.25, 0.5)
"""The shares of the training queries on which `fit` trains again with ``curve``."""
MAX_TRIAL_DOCUMENTS = 2000
"""A dev corpus with more documents is reduced to a pool, because each trial encodes it again."""

_POOL_DEPTH = 10  # top documents of each query in a run; nDCG@10 depends on no others
_MAX_SHARE_OF_FOLDS = 0.5  # of the time left before the search, for encoding and testing folds
_SAFETY_FACTOR = 1.3  # reserved time relative to the estimated time
_LOADING_SECONDS = 10.0  # reserved for loading the models and writing the report
_MAX_EVALUATIONS = 4  # evaluations on dev during the final training, each with a checkpoint
_MAX_SHARE_OF_SCORING = 0.25  # of the time of the final training, for these evaluations
_MAX_SHARE_OF_BASE_MODEL = 0.1  # of the time left, for scoring one of several base models
_MAX_SHARE_OF_SECOND_STAGE = 0.25  # of the time that is left after the search
_LARGE_GAIN = 1.0  # points of nDCG@10 from a part of the queries to all of them
_MIN_SPEED_UP = 1.1  # a smaller one may be noise
_UPDATE_FACTOR = 1.1  # expected time of an update relative to the measured one


@dataclass(frozen=True)
class FitResult:
    """The result of `fit`.

    Attributes:
        verdicts: the comparisons with the base model, {"new": on new documents, "known": on known
            ones}; `str` returns the line that was printed. If one of the two kinds has fewer than
            ten test queries, there is one verdict, "all".
        folder: the output folder.
        warnings: warnings about the verdicts, one line each.
        trust_remote_code: True if code that comes with the base model was trusted.
    """

    verdicts: dict[str, Verdict]
    folder: Path
    warnings: list[str]
    trust_remote_code: bool = False

    @property
    def verdict(self) -> Verdict:
        """The verdict on new documents, or the only one."""
        return next(iter(self.verdicts.values()))

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
    model: AnyPath | Sequence[AnyPath] = DEFAULT_MODEL,
    budget: str | float = "30m",
    output: AnyPath = "runs/fit",
    *,
    corpus: AnyPath | None = None,
    corpus_columns: Columns = None,
    data_format: str | None = None,
    data_columns: Columns = None,
    on_bad_record: OnBadRecord = "stop",
    min_score: float | None = None,
    dev: float | None = None,
    test: float | None = None,
    future: Future | None = None,
    guard: AnyPath | Sequence[AnyPath] | None = None,
    guard_loss: float = DEFAULT_GUARD_LOSS,
    curve: bool = False,
    print_line: Callable[[str], None] = print,
    **settings: Any,
) -> FitResult:
    """Train a retriever on question-passage pairs, and compare it with the base model.

    The base model is the model before training. A call with the same arguments continues a call
    that was killed.

    Args:
        data: pairs in any format of docs/data.md, or a folder that `contaccum split` wrote.
        model: the folder or hub name of a SentenceTransformer or a transformers backbone; or
            several, of which the one with the best score on dev is trained.
        budget: the wall time of the whole call, such as "90s", "30m" or "2h"; or in seconds.
        output: the folder for everything that is written.
        corpus: the documents in which dev and test queries are searched; None: the held-out
            passages and a sample of the others.
        corpus_columns: as ``data_columns``, for ``corpus``: {"id": "chunk_id", "text": "content"}.
        data_format, on_bad_record: how ``data`` are read, as in `contaccum train`.
        data_columns: {role: column name}, such as {"query": "question", "positive": "answer"}, or
            a list of words "role=name".
        min_score: the least score or label of a pair that is a match, for scored pairs.
        dev, test: the sizes of the held-out sets: a number of queries, or a share below 1.
        future: "known" to hold out queries about passages that training has seen, "new" for
            passages that it has not seen, "both" for half of each; None: "both" if the data have
            enough passages with several queries, else "new".
        guard: BEIR folders or public names of other data. The trained model is then merged with the
            base model so that it loses at most ``guard_loss`` nDCG@10 on each of them.
        guard_loss: see ``guard``.
        curve: True: also train with the chosen settings on 25 and 50 % of the training queries, to
            see whether more pairs would help.
        print_line: is called with each line for the user.
        settings: options of `contaccum train`, such as ``learning_rate=1e-5``. The search does not
            vary them. None stands for an option that is not given.

    Raises:
        UserError: for data, a model, settings or a folder that cannot be used, and for a budget
            that is too short.
    """
    given = read_given(settings)
    listed = [model] if isinstance(model, (str, os.PathLike)) else model
    candidates = [os.path.expanduser(os.fspath(listed_model)) for listed_model in listed]
    pairs = Pairs(
        path=Path(data).expanduser(),
        corpus=None if corpus is None else Path(corpus).expanduser(),
        corpus_columns=parse_columns(corpus_columns, "corpus_columns") or None,
        data_format=data_format,
        columns=parse_columns(data_columns) or None,
        on_bad_record=on_bad_record,
        dev=dev,
        test=test,
        future=future,
        min_score=min_score,
    )
    folder = Path(output).expanduser().absolute()
    seconds = parse_duration(budget)
    guards = [guard] if isinstance(guard, (str, os.PathLike)) else guard or ()
    args = check_given(candidates[0], given, folder / "store")
    print_line = only_first_rank(print_line)
    # Guard sets are read before anything else, so that a faulty one is refused at once.
    guard_sets = {os.fspath(source): load_beir(os.fspath(source)) for source in guards}
    if len(candidates) == 1:  # of several, one that cannot be loaded is left out
        require_model(candidates[0])
    guard_request = None
    if guard_sets:
        fingerprints = {source: dataset.fingerprint for source, dataset in guard_sets.items()}
        guard_request = {"sets": fingerprints, "guard_loss": guard_loss}
    request = {
        "version": __version__,
        "model": [make_absolute(candidate) for candidate in candidates],
        **given,
        "guard": guard_request,
        **pairs.describe(folder),
    }
    may_restart = on_first_rank(lambda: require_free_folder(folder))
    with begin(folder, request, "contaccum fit", may_restart):
        batch_size = args.per_device_eval_batch_size
        time_budget = Budget(seconds, folder / USED_TIME_FILE)
        held_out = folder / "data"
        train_file = held_out / TRAIN_FILE
        corpus_file = held_out / CORPUS_FILE
        store = folder / "store"

        # 1. Hold out
        show_progress = not args.disable_tqdm
        for line in on_first_rank(lambda: pairs.hold_out(held_out, show_progress=show_progress)):
            print_line(line)
        split = read_split(held_out)
        num_folds = pairs.count_folds(split)
        if guard_sets:
            test_queries = set(
                read_split_queries(held_out / "test", "test", RecordReport()).values()
            )
            if num_folds > 1:
                # Test queries of other folds are training queries of this one.
                test_queries.update(record.query for record in read_records(train_file))
            refuse_test_queries(guard_sets, test_queries)
        print_line(split.summary())
        if num_folds > 1:
            print_line(
                f"{split.test} test queries are few: the verdict is over {num_folds} splits, and a "
                "model is trained on each"
            )
        else:
            for warning in split.warnings():
                print_line(f"note: {warning}")

        # 2. Baselines
        base_name = candidates[0]
        if len(candidates) > 1:
            with time_budget.measure("base models"):
                most_seconds = _MAX_SHARE_OF_BASE_MODEL * time_budget.left()
                chosen_model = once(
                    folder / "base_models",
                    request,
                    lambda: choose_base_model(
                        candidates,
                        train_file,
                        held_out / "dev",
                        given,
                        args,
                        most_seconds,
                        print_line,
                    ),
                )
            base_name = chosen_model["model"]
        proposed = propose_settings(train_file, base_name, given, world_size())
        space = SearchSpace(
            proposed,
            fixed=given.keys(),
            store=str(store),
            given=given.keys(),
            method=given.get("method"),
            corpus=str(corpus_file),
        )
        base = load_encoder(make_base_settings(proposed), args)
        models = describe_models(base, proposed, args)
        # The search would start anew where other settings are proposed, as with a GPU.
        machine = {"device": args.device.type, "number of processes": world_size()}
        work = {**describe_settings(proposed), **machine, **models}
        require_same_work(folder, work, "models.json")
        with time_budget.measure("baselines"):

            def measure_times() -> _Times:
                """Measure the time of encoding at the present speed of the machine."""
                document_seconds, guard_seconds = on_first_rank(
                    lambda: _measure_encoding(base, corpus_file, split, guard_sets, batch_size)
                )
                return _Times(
                    document=document_seconds,
                    corpus=_SAFETY_FACTOR * document_seconds * split.documents["train"],
                    guard=_SAFETY_FACTOR * guard_seconds,
                    split=split,
                )

            times = measure_times()
            given_method = given.get("method")

            def count_encoded() -> list[Any]:
                num_encoded = sum(
                    read_json(shard)["rows"] for shard in store.glob(f"*/{SHARD_FILE}")
                )
                return [num_encoded, (folder / "baselines" / RESULT_FILE).is_file()]

            num_encoded, has_baselines = on_first_rank(count_encoded)
            num_missing = split.documents["train"] - num_encoded
            if not has_baselines:
                num_documents = num_missing + times.count_test_documents(given_method)
                require_encoding_time(time_budget, num_documents, times.document, times.guard)
            # The user may remove the store of an unfinished fit to free space.
            if num_missing > 0 or not has_baselines:
                line = on_first_rank(
                    lambda: encode_corpus(
                        base, model_name(base_name), corpus_file, store, batch_size
                    )
                )
                if line:
                    print_line(line)

            def score_on_dev() -> dict[str, Any]:
                evaluator = load_evaluator(held_out / "dev", store, batch_size)
                base_run, bm25_run = evaluator.search(base), evaluator.search_bm25()
                baselines = score_baselines(evaluator, base_run, bm25_run)
                if len(evaluator.dataset.corpus) > MAX_TRIAL_DOCUMENTS:
                    with atomic_folder(folder / "dev_pool") as new_folder:
                        pool = pool_documents(evaluator.dataset, [base_run, bm25_run])
                        write_part(evaluator.dataset, pool, new_folder)
                return baselines._asdict()

            baselines = Baselines(**once(folder / "baselines", models, score_on_dev))
        print_line(baselines.format_line(base_name))
        trial_dev = folder / "dev_pool"
        if not trial_dev.is_dir():
            trial_dev = held_out / "dev"

        # 3. Search
        if not {"bf16", "fp16"} & given.keys():
            # The first method that trains both towers, if there is one.
            methods = list_methods(space, lambda line: None)
            method = min(methods, key=lambda name: name == "query_side")

            def compare_precisions() -> dict[str, Any]:
                seconds = []
                for bf16 in (False, True):
                    settings = space.make_settings(method, bf16=bf16)
                    seconds.append(measure_speed(settings, folder / "speed"))
                return {"float32": seconds[0], "bf16": seconds[1]}

            with time_budget.measure("search"):
                seconds_per_update = once(
                    folder / "precision",
                    describe_settings(proposed),
                    compare_precisions,
                    all_ranks=True,
                )
            speed_up = seconds_per_update["float32"] / seconds_per_update["bf16"]
            if speed_up > _MIN_SPEED_UP:
                print_line(f"training in bf16, which is {speed_up:.1f} times as fast as float32")
                proposed = replace(proposed, bf16=True)
                space = dataclasses.replace(space, settings=proposed)
        # With a large corpus, encoding it for each fold could leave no time for the search. The
        # other folds are used only if there is time left at the end.
        test_seconds = times.get_test(given_method)
        seconds_of_folds = _MAX_SHARE_OF_FOLDS * time_budget.left() - test_seconds - times.guard
        num_further_folds = max(0, int(seconds_of_folds / (times.corpus + test_seconds)))
        num_folds_with_time = min(num_folds, 1 + num_further_folds)
        num_parts = len(CURVE_SHARES) if curve else 0
        # The trainings on parts of the pairs together take nearly as long as one on all of them.
        num_trainings = num_folds_with_time + (1 if curve else 0)

        def search() -> dict[str, Any]:
            evaluator = RetrievalEvaluator(
                load_beir_folder(trial_dev, "test"), batch_size=batch_size
            )
            tuned = search_settings(
                space,
                list_methods(space, print_line),
                base,
                evaluator,
                baselines,
                time_budget,
                lambda method: times.sum_reserve(method, num_folds_with_time, num_parts),
                num_trainings,
                folder / "tuning",
                print_line,
            )
            on_first_rank(
                lambda: write_tuned(tuned, folder / "tuning", len(baselines.query_scores))
            )
            return {**tuned._asdict(), "choice": tuned.choice._asdict()}

        with time_budget.measure("search"):
            found = once(folder / "tuning", describe_settings(proposed), search, all_ranks=True)
        tuned = Tuned(**{**found, "choice": Choice(**found["choice"])})
        # A folder of somebody else must not give trust.
        trust = {"trust_remote_code": proposed.trust_remote_code}
        tuned.options.update(trust)

        # 4. Final training
        chosen = ", ".join(f"{key} {value}" for key, value in tuned.choice.settings.items())
        print_line(f"training at the best settings: {chosen}")
        config_file = folder / CONFIG_FILE

        def plan_stage() -> dict[str, Any]:
            now = measure_times()
            method = tuned.choice.settings["method"]
            reserve = now.sum_reserve(method, num_folds_with_time, num_parts)
            seconds_left = (time_budget.left() - reserve) / num_trainings
            second_seconds = math.inf
            if "method" not in given:
                second_seconds = _estimate_second_stage(tuned, split, now)
            has_second_stage = second_seconds <= _MAX_SHARE_OF_SECOND_STAGE * seconds_left
            if has_second_stage:
                seconds_left -= second_seconds
            options, line = plan_final_training(folder, trial_dev, tuned, seconds_left)
            if line:
                print_line(line)
            return {"options": options, "has_second_stage": has_second_stage}

        with time_budget.measure("training"):
            plan = once(folder / "plan", describe_settings(proposed), plan_stage, all_ranks=True)
            options = {**plan["options"], **trust}
            comment = f"# Chosen by contaccum fit on dev data; see {REPORT_FILE}.\n"
            on_first_rank(lambda: write_text(config_file, comment + to_yaml(options)))
            final = replace(Settings(), **options)
            trained_folder = folder / "trained"
            training = run_and_keep(final, trained_folder)
            trial = tuned.chosen_trial
            is_like_trial = training.updates == trial["updates"]
            trial_model = folder / "tuning" / "trials" / str(trial["trial"]) / MODEL_FOLDER
            assert training.score is not None
            if training.score < trial["score"] and on_first_rank(trial_model.is_dir):
                print_line(
                    f"the model of trial {trial['trial'] + 1} is kept, because it is better on dev "
                    f"({trial['score']:.3f}) than after the final training ({training.score:.3f})"
                )
                # A training by config.yaml ends, and is evaluated, where the trial was.
                for setting in ("max_steps", "eval_steps", "save_steps"):
                    options[setting] = trial["updates"]
                on_first_rank(lambda: write_text(config_file, comment + to_yaml(options)))
                final = replace(Settings(), **options)
                training = dataclasses.replace(training, score=trial["score"])
                trained_folder, is_like_trial = trial_model, True
            if plan["has_second_stage"]:
                print_line("second stage: the query tower against the documents encoded anew")
                two_stages = replace(final, second_stage=str(corpus_file))
                second = run_and_keep(
                    make_second_stage(two_stages, str(trained_folder)), folder / "second_stage"
                )
                assert training.score is not None and second.score is not None
                is_better = second.score > training.score
                print_line(
                    f"second stage: {second.score:.3f} on dev after it, {training.score:.3f} "
                    f"before it: {'kept' if is_better else 'dropped'}"
                )
                if is_better:
                    final, training, is_like_trial = two_stages, second, False
                    trained_folder = folder / "second_stage"
                    options["second_stage"] = str(corpus_file)
                    on_first_rank(lambda: write_text(config_file, comment + to_yaml(options)))

        # 5. Merge with the base model, if there is a guard
        guard_record = None
        if not guard_sets:
            on_first_rank(lambda: copy_model(trained_folder, folder / "model"))
        else:

            def merge() -> dict[str, Any]:
                return write_best_merge(
                    base,
                    load_trained(trained_folder, base),
                    [("dev", load_beir_folder(trial_dev, "test")), *guard_sets.items()],
                    DEFAULT_WEIGHTS,
                    guard_loss,
                    batch_size,
                    folder / "model",
                    print_line,
                )

            with time_budget.measure("guard"):
                guard_record = once(folder / "guard", describe_settings(final), merge)

        # 6. Choose the weight of BM25 beside the model
        def choose_weight() -> dict[str, Any]:
            evaluator = load_evaluator(trial_dev, store, batch_size)
            run = search_trained(evaluator, base, load_trained(folder / "model", base))
            bm25_weight, score = choose_bm25_weight(evaluator, run, evaluator.search_bm25())
            return {"weight": bm25_weight, "score": score}

        with time_budget.measure("test"):
            with_bm25 = once(folder / "bm25", describe_settings(final), choose_weight)
        bm25_weights = {"base": baselines.bm25_weight, "trained": with_bm25["weight"]}

        # 7. Train and test on the other splits of few pairs, as many as there is time for
        merge_weight = None if guard_record is None else guard_record["weight"]
        training_seconds = time_budget.seconds_of("training")
        training_seconds_of_fold, task = training_seconds, "training and testing again"
        if merge_weight == 0:  # the verdict is about the base model
            training_seconds_of_fold, task = 0.0, "testing again"
        fold_scores: list[ScoreColumns] = []
        with time_budget.measure("other splits"):
            first_dev = load_beir_folder(held_out / "dev", "test")
            for number in range(1, num_folds):
                fold_folder = folder / "folds" / str(number)
                if not on_first_rank((fold_folder / RESULT_FILE).is_file):
                    # One test is that of this fold, the other that of fold 0, at the end.
                    now = measure_times()
                    needed = now.corpus + training_seconds_of_fold + 2 * now.get_test(final.method)
                    if time_budget.left() <= needed:
                        print_line(
                            f"the verdict is over {number} of {num_folds} splits, because the "
                            "budget is not enough for more"
                        )
                        break
                    print_line(f"split {number + 1} of {num_folds}: {task}")
                fold_scores.append(
                    score_fold(
                        number,
                        fold_folder,
                        pairs,
                        final,
                        merge_weight,
                        base,
                        first_dev,
                        bm25_weights,
                        batch_size,
                    )
                )

        # 8. Train on parts of the pairs, to see whether more would help
        part_models: dict[float, Path] = {}
        if curve:
            for share in CURVE_SHARES:
                part = folder / "curve" / f"{share:.0%}"
                if not on_first_rank((part / "model" / RESULT_FILE).is_file):
                    now = measure_times()
                    # The tests of this part, of the earlier parts, and of the model itself.
                    needed = share * training_seconds + (2 + len(part_models)) * now.get_test(
                        final.method
                    )
                    if needed > time_budget.left():
                        print_line(f"no training on {share:.0%} of the pairs: no time is left")
                        break
                    print_line(f"training on {share:.0%} of the queries")
                with time_budget.measure("curve"):
                    run_and_keep(make_part_settings(final, share, part), part / "model")
                part_models[share] = part / "model"

        # 9. Verdict and report
        def test_and_report() -> dict[str, Any]:
            with time_budget.measure("test"):
                evaluator = load_evaluator(held_out / "test", store, batch_size)
                trained = load_trained(folder / "model", base)
                results = search_test_set(evaluator, base, trained, bm25_weights)
                models_by_share = dict(part_models)
                if part_models and guard_record is not None:
                    # The models of parts of the pairs are not merged with the base model either.
                    models_by_share[1.0] = trained_folder
                points = []
                for share, part_model in models_by_share.items():
                    run = search_trained(evaluator, base, load_trained(part_model, base))
                    points.append([share, evaluator.score_run(run)[TRIAL_METRIC]])
                if part_models and guard_record is None:
                    points.append([1.0, results["trained"].means[TRIAL_METRIC]])
            first_scores = collect_scores(evaluator.dataset, results)
            scores = pool_scores([first_scores, *fold_scores])
            verdicts = compute_verdicts(scores, 1 + len(fold_scores))
            production = describe_production(scores, bm25_weights)
            write_verdicts_to_card(folder / "model", verdicts.values(), model_name(base_name))
            warnings = list(tuned.choice.warnings)
            # The dev scores of the choice are those of a trial. They say nothing about the test of
            # a merged model, or of a model that was trained for a longer time.
            if guard_record is None and is_like_trial:
                overall = compute_verdict(
                    scores["trained"], scores["base"], scores["bm25"], scores["group"]
                )
                warnings += warn_of_disagreement(overall, tuned.choice)
            for verdict in verdicts.values():
                warnings += warn_of_test(verdict)
            dev_scores = {
                "bm25": baselines.bm25,
                "base": baselines.base,
                "base_with_bm25": baselines.with_bm25,
                "trained": training.score,
                "trained_with_bm25": with_bm25["score"],
            }
            if guard_record is not None:
                scores_by_weight = {row[0]: row[1] for row in guard_record["scores"]}
                dev_scores["trained"] = scores_by_weight[merge_weight]
            names = {
                "bm25": "BM25",
                "base": f"{model_name(base_name)} (as it is)",
                "base_with_bm25": "the same with BM25",
                "trained": "trained",
                "trained_with_bm25": "trained, with BM25",
            }
            table = []
            for system, shown_name in names.items():
                shown = select_shown_metrics(results[system].means)
                row = {"name": shown_name, "dev": dev_scores[system], **shown}
                if len(verdicts) > 1:
                    for kind in verdicts:
                        row[kind] = statistics.fmean(
                            score
                            for query, score in first_scores[system].items()
                            if first_scores["known"][query] == (kind == "known")
                        )
                table.append(row)
            records = [verdict.record() for verdict in verdicts.values()]
            paths = {"path": str(pairs.path), "corpus": pairs.corpus and str(pairs.corpus)}
            record = {
                "request": {
                    "version": __version__,
                    "model": make_absolute(base_name),
                    "models": request["model"],
                    "settings": dict(given),
                    "guard": request["guard"],
                    **asdict(pairs),
                    **paths,
                    "content": request["data"],
                    "corpus_content": request["corpus"],
                    "fingerprints": models,
                },
                "verdict": records[0],
                "verdicts": dict(zip(verdicts, records, strict=True)),
                "production": {"line": production, "bm25_weights": bm25_weights},
                "warnings": warnings,
                "model": model_name(base_name),
                "data": paths,
                "split": asdict(split),
                "scores": table,
                "curve": points,
                "guard": guard_record,
                "choice": tuned.choice._asdict(),
                "trials": tuned.trials,
                "changes": compare_queries(evaluator.dataset, results["base"], results["trained"]),
                "settings": yaml.safe_load(config_file.read_text(encoding="utf-8")),
                "seconds": {**time_budget.stage_seconds, "total": time_budget.used_here()},
                "budget_seconds": time_budget.seconds,
                "made_with": {
                    **provenance(),
                    "time": datetime.now(UTC).isoformat(timespec="seconds"),
                },
            }
            write_json(folder / RECORD_FILE, redact(record))
            write_text(folder / REPORT_FILE, build_fit_page(folder))
            lines = [production, *describe_curve(points)]
            return {"verdicts": record["verdicts"], "lines": lines, "warnings": warnings}

        outcome = on_first_rank(test_and_report)
    for warning in outcome["warnings"]:
        print_line(f"warning: {warning}")
    verdicts = {}
    for kind, values in outcome["verdicts"].items():
        verdicts[kind] = Verdict(**{field.name: values[field.name] for field in fields(Verdict)})
        print_line(str(verdicts[kind]))
    for line in outcome["lines"]:
        print_line(line)
    shown = Path(output).expanduser()
    print_line(
        f"model: {shown / 'model'}   report: {shown / REPORT_FILE}   "
        f"again: contaccum train {shown / CONFIG_FILE}"
    )
    return FitResult(verdicts, shown, outcome["warnings"], base.trust_remote_code)


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
    refused = sorted(find("set_by_fit").keys() & given.keys())
    if refused:
        raise ConfigError(f"{refused[0]} is not an option of contaccum fit: drop it")
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
    space = SearchSpace(settings, given.keys(), str(store), method=given.get("method"))
    list_methods(space, lambda line: None)  # the search prints the reasons
    return args


def make_common_settings(values: Mapping[str, Any]) -> Settings:
    """Return settings for the methods of a search: method contaccum has all but the documents."""
    values = {**values, "method": "contaccum"}
    is_auto = values.get("per_device_train_batch_size") == "auto"
    if is_auto and not {"total_train_batch_size", "gradient_accumulation_steps"} & values.keys():
        values["total_train_batch_size"] = (
            MAX_PAIRS_PER_UPDATE  # until one is proposed for the data
        )
    return replace(Settings(), **values)


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


def make_absolute(model: str) -> str:
    """Return the absolute path of a model's folder; a hub name as it is."""
    return os.path.abspath(model) if os.path.isdir(model) else model


def choose_base_model(
    models: Sequence[str],
    train_file: Path,
    dev: Path,
    given: Mapping[str, Any],
    args: ContAccumTrainingArguments,
    most_seconds: float,
    print_line: Callable[[str], None],
) -> dict[str, Any]:
    """Score several base models on dev, and choose the best one.

    A large dev corpus is reduced to a sample. Each model has its own prompts, lengths and
    similarity. A model that cannot be loaded, or whose encoding takes more than ``most_seconds``,
    is left out.

    Returns:
        The ``model``, and its ``score``.

    Raises:
        ConfigError: if no model is left.
    """
    batch_size = args.per_device_eval_batch_size
    dataset = sample(load_beir_folder(dev, "test"), corpus=MAX_TRIAL_DOCUMENTS)
    rows = dataset.corpus.values()
    texts = [passage_text(row["title"], row["text"]) for row in rows]
    evaluator = RetrievalEvaluator(dataset, batch_size=batch_size)
    bm25_run = evaluator.search_bm25()
    scored = {}
    for model in models:
        try:
            require_model(model)
            settings = propose_settings(train_file, model, given, world_size())
            encoder = load_encoder(make_base_settings(settings), args)
            seconds = measure_seconds_per_document(encoder, texts, len(texts), batch_size)
            if seconds * len(texts) > most_seconds:
                needed = format_duration(seconds * len(texts))
                raise ConfigError(f"encoding {len(texts):,} documents would take {needed}")
            baselines = score_baselines(evaluator, evaluator.search(encoder), bm25_run)
        except UserError as error:
            print_line(f"{model_name(model)} is left out: {error}")
            continue
        scored[model] = baselines
        print_line(
            f"{baselines.format_line(model)}, {1000 * seconds:.0f} ms per document on this machine"
        )
    if not scored:
        raise ConfigError("no base model is left: give another --model, or a larger --budget")
    best, *others = sorted(scored, key=lambda model: -scored[model].base)
    best_scores = scored[best].query_scores
    groups = group_queries(dataset)
    line = f"base model: {model_name(best)}"
    for model in others:
        test = sign_flip_test(best_scores, scored[model].query_scores, groups)
        if test["low"] <= 0.0:
            line += f"; {model_name(model)} is not significantly worse on dev"
    print_line(line)
    return {"model": best, "score": scored[best].base}


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
    if "gradient_accumulation_steps" in given or make_common_settings(given).engine:
        # "auto" needs a fixed number of pairs per update, and cannot be used with an engine.
        micro_batch = given.get("per_device_train_batch_size", MICRO_BATCH)
    unit = 1 if micro_batch == "auto" else micro_batch
    proposed = {
        "model": make_absolute(model),
        "train_data": [str(train_file)],
        "bank_size": proposal.bank_size,
        "temperature": proposal.temperature,
        "per_device_train_batch_size": micro_batch,
        "total_train_batch_size": round_up(proposal.pairs_per_update, unit * num_ranks),
        "dataloader_num_workers": proposal.num_workers,
        "num_hard_negatives": int(proposal.has_negatives),
        "query_prompt": proposal.query_prompt or None,
        "passage_prompt": proposal.passage_prompt or None,
        "warmup_steps": 0.1,  # a share of the updates
    }
    if not is_sentence_transformer(model):
        proposed["query_max_length"] = proposal.query_max_length
        proposed["passage_max_length"] = proposal.passage_max_length
    if "gradient_accumulation_steps" in given:
        # The proposed batch size could contradict the number of steps that the user gave.
        del proposed["total_train_batch_size"]
    return make_common_settings({**proposed, **given})


# Times --------------------------------------------------------------------------------------------


class _Times(NamedTuple):
    """Seconds of the steps other than training, with a margin unless noted.

    Attributes:
        document: for encoding a document, without a margin.
        corpus: for encoding the corpus of another fold.
        guard: for the scores on the guard sets.
        split: the split of the data.
    """

    document: float
    corpus: float
    guard: float
    split: Split

    def count_test_documents(self, method: str | None) -> int:
        """Return the number of documents to encode for the scores after a training by a method."""
        if method == "query_side":
            # It leaves the documents as they are, and the store lacks only held-out passages.
            return self.split.dev + self.split.test
        # The trained model also searches dev, for the weight of BM25 beside it.
        return self.split.documents["test"] + _count_trial_documents(self.split)

    def get_test(self, method: str | None) -> float:
        """Return the seconds for the test of one fold after a training by a method."""
        num_documents = self.count_test_documents(method)
        return _SAFETY_FACTOR * self.document * num_documents + _LOADING_SECONDS

    def sum_reserve(self, method: str, num_folds: int, num_parts: int) -> float:
        """Return the seconds to reserve for everything but training by a method.

        Args:
            num_folds: the number of folds that are used.
            num_parts: the number of models that are trained on a part of the pairs and tested.
        """
        test_seconds = self.get_test(method)
        further_folds = (num_folds - 1) * (self.corpus + test_seconds)
        return (1 + num_parts) * test_seconds + further_folds + self.guard


def _measure_encoding(
    encoder: DualEncoder,
    corpus_file: Path,
    split: Split,
    guard_sets: Mapping[str, BeirDataset],
    batch_size: int,
) -> list[float]:
    """Return the seconds to encode a document, and to score all merged models on the guard sets."""
    corpus = read_texts(corpus_file, "document", RecordReport())
    document_seconds = measure_seconds_per_document(
        encoder, (text.passage for text in corpus), split.documents["train"], batch_size
    )
    if not guard_sets:
        return [document_seconds, 0.0]
    # Merged models are scored on the trials' dev set too.
    guard_seconds = _count_trial_documents(split) * document_seconds
    for dataset in guard_sets.values():
        rows = dataset.corpus.values()
        texts = (passage_text(row["title"], row["text"]) for row in rows)
        guard_seconds += len(rows) * measure_seconds_per_document(
            encoder, texts, len(rows), batch_size
        )
    return [document_seconds, len(DEFAULT_WEIGHTS) * guard_seconds]


def _count_trial_documents(split: Split) -> int:
    """Return about the number of documents in the dev set of trials.

    It is a pool if there are many documents: for each query its judged documents (about one) and
    the top documents of BM25 and of the base model.
    """
    num_documents = split.documents["dev"]
    if num_documents > MAX_TRIAL_DOCUMENTS:
        num_documents = min(num_documents, split.dev * (2 * _POOL_DEPTH + 1))
    return num_documents


def _estimate_second_stage(tuned: Tuned, split: Split, times: _Times) -> float:
    """Return the seconds of a second stage, with its encoding of the corpus; infinite without one.

    It needs a chosen method that trains both towers. Its training, with as many evaluations as a
    final training, is taken to be that many times as long as a trial of query_side.
    """
    query_side = [
        trial
        for trial in tuned.trials
        if trial["settings"]["method"] == "query_side" and trial["score"] is not None
    ]
    if tuned.choice.settings["method"] == "query_side" or not query_side:
        return math.inf
    num_documents = split.documents["train"] + split.documents["dev"]
    encoding_seconds = _SAFETY_FACTOR * times.document * num_documents
    return encoding_seconds + _MAX_EVALUATIONS * float(query_side[-1]["seconds"])


def plan_final_training(
    folder: Path, trial_dev: Path, tuned: Tuned, seconds_left: float
) -> tuple[dict[str, Any], str]:
    """Return the settings of the final training, and a line for the user about its length.

    The settings of the chosen trial are completed with checkpoints. If the trials were cut, the
    training is as long as the time allows, up to `MAX_EPOCHS` or the length that the user gave. The
    line is empty if the length is that of the trial.

    Args:
        folder: the folder of the fit.
        trial_dev: the dev set by which the best checkpoint is chosen.
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
    # The search has cut the trial; the user has not.
    if "max_steps" in options and options["max_steps"] == trial["settings"].get("max_steps"):
        del options["max_steps"]
        options["num_train_epochs"] = MAX_EPOCHS
    final = replace(Settings(), **{**options, "load_best_model_at_end": False})
    args = ContAccumTrainingArguments.from_settings(final)
    full_updates = count_updates(load_data(final).dataset, args)
    # The present speed: the machine may have become faster or slower since the trial.
    started = time.monotonic()
    update_seconds = measure_speed(final, folder / "speed")
    seconds_left -= time.monotonic() - started
    slowdown = update_seconds / trial["seconds_per_update"]
    scoring_seconds = slowdown * trial["scoring_seconds"]
    loading_seconds = slowdown * (
        trial["seconds"] - trial["updates"] * trial["seconds_per_update"] - trial["scoring_seconds"]
    )
    affordable_evaluations = int(_MAX_SHARE_OF_SCORING * seconds_left / max(scoring_seconds, 0.1))
    num_evaluations = max(1, min(_MAX_EVALUATIONS, affordable_evaluations))
    seconds_left -= loading_seconds + num_evaluations * scoring_seconds
    possible_updates = int(seconds_left / (_UPDATE_FACTOR * update_seconds))
    # In the first update, the learning rate is 0.
    possible_updates = max(2, num_evaluations, possible_updates)
    num_updates = min(full_updates, possible_updates)
    line = ""
    if full_updates != trial["updates"]:
        line = f"the final training has {full_updates} updates, {final.num_train_epochs:g} epochs"
    if num_updates < full_updates:
        options["max_steps"] = num_updates
        line = (
            f"the final training is cut to {num_updates} of {full_updates} updates, because the "
            "budget is not enough for more"
        )
    # ContAccumTrainer also evaluates after the last update.
    options["eval_steps"] = options["save_steps"] = math.ceil(num_updates / num_evaluations)
    return options, line


# A part of the pairs ------------------------------------------------------------------------------


def make_part_settings(final: Settings, share: float, folder: Path) -> Settings:
    """Return the settings of the final training on a share of the training queries.

    The queries with the smallest hashes are taken, so a smaller share is a part of a larger one. A
    training whose number of updates is fixed has the same share of them.
    """
    part_file = folder / TRAIN_FILE

    def write_part_of_queries() -> None:
        lines = []
        for line in Path(final.train_data[0]).read_text(encoding="utf-8").splitlines():
            query = json.loads(line)["query"]
            digest = hashlib.sha256(query.encode()).digest()
            if int.from_bytes(digest[:8]) < share * 2**64:
                lines.append(line + "\n")
        folder.mkdir(parents=True, exist_ok=True)
        write_text(part_file, "".join(lines))

    on_first_rank(write_part_of_queries)
    changes: dict[str, Any] = {"train_data": [str(part_file)]}
    if final.max_steps > 0:
        changes["max_steps"] = max(2, round(share * final.max_steps))  # the rate of the first is 0
    return replace(final, **changes)


def describe_curve(points: Sequence[Sequence[float]]) -> list[str]:
    """Return a line that says whether more pairs would help; none without trainings on parts.

    Args:
        points: (share of the training queries, nDCG@10 on test), the last of them with all queries.
    """
    if len(points) < 2:
        return []
    shown = ", ".join(f"{share:.0%} {score:.3f}" for share, score in points)
    gain = 100 * (points[-1][1] - points[-2][1])
    advice = "more pairs should help" if gain >= _LARGE_GAIN else "more pairs may bring little"
    return [
        f"share of the training queries: {shown}; from {points[-2][0]:.0%} to 100%: {gain:+.1f} "
        f"points; {advice}"
    ]


# Data and models ----------------------------------------------------------------------------------


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


def copy_model(trained: Path, model: Path) -> None:
    """Copy a trained model with its logs, but without its store; an earlier copy is replaced."""
    left_out = shutil.ignore_patterns(STORE_FOLDER, IDENTITY_FILE, RESULT_FILE)
    with atomic_folder(model) as new_folder:
        shutil.copytree(trained, new_folder, dirs_exist_ok=True, ignore=left_out)


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
