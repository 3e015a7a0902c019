"""`contaccum tune`: the search keeps to its budget, survives a kill and finds the best settings."""

from __future__ import annotations

import json
import re
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from datasets import Dataset, DatasetDict
from optuna.trial import TrialState
from sample_texts import sentences
from small_data import write_beir, write_lines
from tiny_models import tiny_encoder

from contaccum.cli import main
from contaccum.data import load_beir_folder
from contaccum.errors import ConfigError
from contaccum.evaluation.evaluator import RetrievalEvaluator
from contaccum.settings import METHODS, WITH_BANK
from contaccum.tuning import search as search_module
from contaccum.tuning.budget import (
    Budget,
    TimeForTrials,
    format_duration,
    parse_duration,
    suggest_budget,
)
from contaccum.tuning.choice import FinishedTrial, choose_trial
from contaccum.tuning.journal import JOURNAL, open_study, read_finished_trials
from contaccum.tuning.methods import adapt_options
from contaccum.tuning.options import Options, parse
from contaccum.tuning.space import compute_start_rate, make_space
from contaccum.tuning.trial import Outcome, QueryScores, TooSlow, count_updates, run_trial
from contaccum.tuning.tune import tune as run_tune

NUM_QUERIES = 24

RunTrial = Callable[..., Outcome]


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """A saved model, training pairs, and a BEIR folder of dev data with the same queries."""
    root = tmp_path_factory.mktemp("tune")
    tiny_encoder().save_pretrained(str(root / "model"))
    documents = {f"d{row}": ("", text) for row, text in enumerate(sentences(40, 5, 9))}
    queries = {f"q{row}": text for row, text in enumerate(sentences(NUM_QUERIES, 6))}
    judgements = [(f"q{row}", f"d{row}", 1) for row in range(NUM_QUERIES)]
    write_beir(root / "beir", documents, queries, judgements, "dev")
    pairs = []
    for row in range(NUM_QUERIES):
        pairs.append({"query": queries[f"q{row}"], "positive": documents[f"d{row}"][1]})
    write_lines(root / "pairs.jsonl", pairs)
    config = {
        "model": str(root / "model"),
        "train_data": str(root / "pairs.jsonl"),
        "eval_data": str(root / "beir"),
        "per_device_train_batch_size": 4,
        "total_train_batch_size": 8,
        "num_train_epochs": 3,
        "bank_size": 16,
        "use_cpu": True,
    }
    (root / "config.yaml").write_text(yaml.safe_dump(config))
    return root


def tune(root: Path, output: Path, *options: str) -> int:
    """Run `contaccum tune` with the config of ``root``, and return its exit code."""
    return main(["tune", str(root / "config.yaml"), "--output", str(output), *options])


def read_trials(output: Path) -> list[dict[str, Any]]:
    return json.loads((output / "tuned.json").read_text())["trials"]


def read_config(output: Path) -> dict[str, Any]:
    return yaml.safe_load((output / "tuned.yaml").read_text())


def make_outcome(score: float, updates: int = 9, seconds_per_update: float = 0.01) -> Outcome:
    """Return the outcome of a trial in which all queries have the same score."""
    query_scores = {f"q{row}": score for row in range(NUM_QUERIES)}
    return Outcome(query_scores, score, 0.1, updates, seconds_per_update)


def test_written_config_has_the_best_settings_and_can_be_trained(
    root, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(search_module, "MAX_TRIALS", 5)
    output = tmp_path / "out"
    options = ["--corpus", str(root / "beir"), "--total_train_batch_size", "8", "--seed", "3"]
    assert tune(root, output, *options) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("BM25 ")
    assert "trial 1 of about" in printed
    trials = read_trials(output)
    assert len(trials) == 5
    # First the start rate of each method, then rates of the method with the best score.
    assert [trial["settings"]["method"] for trial in trials[:3]] != 3 * ["contaccum"]
    assert all("total_train_batch_size" not in trial["settings"] for trial in trials)
    assert len({trial["settings"]["learning_rate"] for trial in trials}) >= 3
    config = yaml.safe_load((output / "tuned.yaml").read_text())
    chosen = json.loads((output / "tuned.json").read_text())["choice"]["settings"]
    assert config["method"] == chosen["method"]
    assert float(config["learning_rate"]) == chosen["learning_rate"]
    assert main(["train", str(output / "tuned.yaml"), "--disable_tqdm", "true"]) == 0
    assert (output / "model" / "modules.json").is_file()


def test_trial_scores_the_documents_of_its_own_model(root, tmp_path):
    """A trial of both encoders does not reuse the store of an earlier query-side trial."""
    store = tmp_path / "store"
    arguments = ["--corpus", str(root / "beir"), "--output", str(store)]
    assert main(["encode", str(root / "model"), *arguments]) == 0
    options: dict[str, list[str]] = {}
    for key, value in yaml.safe_load((root / "config.yaml").read_text()).items():
        options[key] = [str(value)]
    options["eval_strategy"] = ["epoch"]
    options["learning_rate"] = ["0.02"]
    options["use_cpu"] = ["true"]
    both_encoders = adapt_options(options, "contaccum", None)
    query_side = adapt_options(options, "query_side", store)

    def score_run(evaluator: RetrievalEvaluator, run_options: Options) -> QueryScores | None:
        outcome = run_trial(run_options, evaluator, tmp_path / "run", 600.0, lambda scores: False)
        return outcome.query_scores

    shared_evaluator = RetrievalEvaluator(load_beir_folder(root / "beir", "dev"))
    query_side_scores = score_run(shared_evaluator, query_side)
    assert shared_evaluator.documents is not None
    new_evaluator = RetrievalEvaluator(load_beir_folder(root / "beir", "dev"))
    expected = score_run(new_evaluator, both_encoders)
    assert score_run(shared_evaluator, both_encoders) == expected
    assert expected != query_side_scores
    assert not (tmp_path / "run").exists()


def test_settings_on_the_command_line_are_not_searched(root, tmp_path):
    options = ["--method", "contaccum", "--learning_rate", "0.02", "--temperature", "0.05"]
    options += ["--total_train_batch_size", "8", "--num_train_epochs", "1"]
    options += ["--num_hard_negatives", "0"]
    assert tune(root, tmp_path / "out", *options) == 0
    [trial] = read_trials(tmp_path / "out")
    assert trial["settings"] == {"method": "contaccum"}
    config = yaml.safe_load((tmp_path / "out" / "tuned.yaml").read_text())
    assert float(config["learning_rate"]) == 0.02
    assert config["method"] == "contaccum"


def test_rate_that_is_rounded_is_tried_once(root, tmp_path, monkeypatch):
    """A third of 5e-5 is tried as 1.7e-5, which is 0.34 of the start rate.

    The made-up scores prefer small rates.
    """

    def prefer_small_rates(options: Options, *_: Any) -> Outcome:
        return make_outcome(1.0 - float(options["learning_rate"][0]))

    monkeypatch.setattr(search_module, "run_trial", prefer_small_rates)
    (tmp_path / "rate.yaml").write_text("learning_rate: 5.0e-5\n")
    arguments = ["tune", str(root / "config.yaml"), str(tmp_path / "rate.yaml")]
    arguments += ["--method", "contaccum", "--temperature", "0.05"]
    arguments += ["--total_train_batch_size", "8", "--num_train_epochs", "1"]
    arguments += ["--num_hard_negatives", "0", "--output", str(tmp_path / "out")]
    assert main(arguments) == 0
    rates = [trial["settings"]["learning_rate"] for trial in read_trials(tmp_path / "out")]
    assert rates[:3] == [5e-5, 1.5e-4, 1.7e-5]
    assert len(set(rates)) == len(rates) == 5


def test_failed_trial_ends_its_ladder_but_not_the_search(root, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(search_module, "MAX_TRIALS", 5)

    def fail_at_large_rates(options: Options, *_: Any) -> Outcome:
        rate = float(options["learning_rate"][0])
        if rate > 0.03:
            raise ConfigError("its loss is not finite")
        return make_outcome(rate)

    monkeypatch.setattr(search_module, "run_trial", fail_at_large_rates)
    options = ["--method", "contaccum", "--temperature", "0.05", "--num_train_epochs", "1"]
    options += ["--num_hard_negatives", "0"]
    assert tune(root, tmp_path / "out", *options) == 0
    assert "its loss is not finite" in capsys.readouterr().out
    trials = read_trials(tmp_path / "out")
    notes = [trial["note"] for trial in trials if trial["score"] is None]
    assert notes == ["its loss is not finite"]
    assert max(trial["settings"]["learning_rate"] for trial in trials) < 0.1


def test_slow_trial_is_cut_and_stays_cut_after_a_kill(root, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(search_module, "MAX_TRIALS", 4)
    max_steps: list[str | None] = []

    def make_run_trial(kill_at: int) -> RunTrial:
        def run_slow_trial(options: Options, *_: Any) -> Outcome:
            max_steps.append(options.get("max_steps", [None])[0])
            if len(max_steps) == kill_at:
                raise Killed
            if max_steps[-1] is None:
                raise TooSlow(30, 500.0, 1.0)
            return make_outcome(0.5, int(max_steps[-1]), seconds_per_update=1.0)

        return run_slow_trial

    monkeypatch.setattr(search_module, "run_trial", make_run_trial(kill_at=2))
    with pytest.raises(Killed):
        tune(root, tmp_path / "out", "--method", "contaccum")
    monkeypatch.setattr(search_module, "run_trial", make_run_trial(kill_at=0))
    assert tune(root, tmp_path / "out", "--method", "contaccum") == 0
    assert "trials are cut to 30 updates" in capsys.readouterr().out
    assert max_steps == [None, *5 * ["30"]]
    assert [trial["updates"] for trial in read_trials(tmp_path / "out")] == 4 * [30]


@pytest.mark.parametrize("is_cut_in_joint_search", [False, True])
def test_training_by_the_tuned_config_is_as_long_as_the_cut_trials(
    root, tmp_path, monkeypatch, is_cut_in_joint_search
):
    monkeypatch.setattr(search_module, "MAX_TRIALS", 8)
    num_calls = 0

    def run_slow_trial(options: Options, *_: Any) -> Outcome:
        nonlocal num_calls
        num_calls += 1
        if is_cut_in_joint_search and num_calls == 1:
            # No trial of the ladder has a score then, so a trial of the joint search is cut.
            return Outcome(None, None, 0.1, 9, 0.01)
        if "max_steps" not in options:
            raise TooSlow(30, 500.0, 1.0)
        return make_outcome(float(options["learning_rate"][0]), 30, seconds_per_update=1.0)

    monkeypatch.setattr(search_module, "run_trial", run_slow_trial)
    options = ["--method", "contaccum"]
    if is_cut_in_joint_search:
        options += ["--learning_rate", "0.001"]
    assert tune(root, tmp_path / "out", *options) == 0
    settings = [trial["settings"] for trial in read_trials(tmp_path / "out")]
    if is_cut_in_joint_search:
        assert "max_steps" not in settings.pop(0)
    assert {trial["max_steps"] for trial in settings} == {30}
    assert "temperature" in settings[-1]
    assert not any("num_train_epochs" in trial for trial in settings)
    config = read_config(tmp_path / "out")
    assert config["max_steps"] == 30
    assert "num_train_epochs" not in config
    comment = "max_steps is the length of the trials, which were cut to fit the budget"
    assert comment in (tmp_path / "out" / "tuned.yaml").read_text()


def test_length_is_not_searched_if_the_config_has_a_number_of_updates(root, tmp_path, monkeypatch):
    monkeypatch.setattr(search_module, "MAX_TRIALS", 8)
    monkeypatch.setattr(search_module, "run_trial", lambda *_, **__: make_outcome(0.5))
    (tmp_path / "steps.yaml").write_text("max_steps: 20\n")
    arguments = ["tune", str(root / "config.yaml"), str(tmp_path / "steps.yaml")]
    arguments += ["--method", "contaccum", "--output", str(tmp_path / "out")]
    assert main(arguments) == 0
    settings = [trial["settings"] for trial in read_trials(tmp_path / "out")]
    assert any("temperature" in trial for trial in settings)
    assert not any("num_train_epochs" in trial for trial in settings)
    assert read_config(tmp_path / "out")["max_steps"] == 20


def test_trials_are_scored_by_ndcg_whatever_metric_chooses_checkpoints(
    root, tmp_path, monkeypatch, capsys
):
    scored_by = []

    def record_metric(options: Options, evaluator: RetrievalEvaluator, *_: Any) -> Outcome:
        scored_by.append(evaluator.primary_metric)
        return make_outcome(0.5)

    monkeypatch.setattr(search_module, "MAX_TRIALS", 1)
    monkeypatch.setattr(search_module, "run_trial", record_metric)
    assert tune(root, tmp_path / "default") == 0
    baselines = capsys.readouterr().out.splitlines()[0]
    assert tune(root, tmp_path / "recall", "--metric_for_best_model", "recall@5") == 0
    assert capsys.readouterr().out.splitlines()[0] == baselines
    assert set(scored_by) == {"ndcg@10"}
    assert read_config(tmp_path / "recall")["metric_for_best_model"] == "recall@5"


def test_no_trial_of_a_method_starts_that_has_no_time_left(root, tmp_path, monkeypatch, capsys):
    """Trials of contaccum take 100 seconds of 330; those of grad_cache would always fit."""
    monkeypatch.setattr(search_module, "MAX_TRIALS", 8)
    tried_methods = []

    def run_timed_trial(options: Options, *_: Any) -> Outcome:
        method = options["method"][0]
        tried_methods.append(method)
        seconds = {"contaccum": 100.0, "grad_cache": 1.0}[method]
        clock.used_seconds += seconds
        score = 0.9 if method == "contaccum" else 0.1
        return make_outcome(score)._replace(seconds=seconds)

    clock = SimpleNamespace(used_seconds=0.0)
    monkeypatch.setattr(Budget, "used", lambda budget: clock.used_seconds)
    monkeypatch.setattr(search_module, "run_trial", run_timed_trial)
    assert tune(root, tmp_path / "out", "--budget", "330s") == 0
    assert tried_methods.count("contaccum") == 3
    assert len(tried_methods) == len(read_trials(tmp_path / "out")) == 8
    assert "no time is left" not in capsys.readouterr().out


def test_a_rung_does_not_take_the_place_of_an_interrupted_trial(tmp_path):
    """A kill in the joint search leaves parameters, which are used after the next ladder."""
    study, interrupted = open_study(tmp_path)
    assert interrupted == []
    trial = study.ask()
    trial.suggest_categorical("method of a", ["a"])
    del trial
    study, interrupted = open_study(tmp_path)
    assert interrupted == [{"method of a": "a"}]
    assert study.get_trials(states=(TrialState.WAITING,)) == []


def test_a_trial_leaves_time_for_a_final_training_as_long_as_itself(tmp_path, monkeypatch):
    monkeypatch.setattr(Budget, "used", lambda budget: 100.0)
    budget = Budget(600.0, tmp_path / "used.json")
    time_for_trials = TimeForTrials(budget, reserve=100.0, final_training_factor=1.5)
    assert time_for_trials.longest_trial() == pytest.approx(160.0)
    assert time_for_trials.left(160.0) == pytest.approx(160.0)
    six_trials_and_training = (6 + 1.5) * time_for_trials.longest_trial(6)
    assert six_trials_and_training == pytest.approx(400.0)


def test_training_keeps_a_given_length_if_trials_are_cut(root, tmp_path, monkeypatch):
    def run_slow_trial(options: Options, *_: Any) -> Outcome:
        if "max_steps" not in options:
            raise TooSlow(30, 500.0, 1.0)
        return make_outcome(0.5, updates=30)

    monkeypatch.setattr(search_module, "MAX_TRIALS", 1)
    monkeypatch.setattr(search_module, "run_trial", run_slow_trial)
    options = ["--method", "contaccum", "--num_train_epochs", "3"]
    assert tune(root, tmp_path / "out", *options) == 0
    config = read_config(tmp_path / "out")
    assert config["num_train_epochs"] == 3
    assert "max_steps" not in config


@pytest.mark.parametrize(
    ("later_slowness", "updates_of_later_trials"),
    [(1.0, 11), (0.2, 60)],
    ids=["trials stay cut", "trials are longer"],
)
def test_search_goes_on_if_the_machine_gets_faster(
    root, tmp_path, monkeypatch, later_slowness, updates_of_later_trials
):
    """The first trial is cut to 11 of 60 updates, and a second one would take as long.

    The machine is faster after the first trial, which is measured before the search would end.
    """
    clock = SimpleNamespace(used_seconds=100.0, slowness=10.0)
    monkeypatch.setattr(Budget, "used", lambda budget: clock.used_seconds)
    budget = Budget(600.0, tmp_path / "used.json")

    def measure_test() -> float:
        return 20.0 * clock.slowness

    def run_timed_trial(options: Options, *arguments: Any) -> Outcome:
        slowness = clock.slowness
        max_seconds = arguments[2]
        if max_seconds == 0.0:
            clock.used_seconds += 2 * slowness
        if max_seconds == 0.0 or (slowness == 10.0 and "max_steps" not in options):
            raise TooSlow(11, 60 * slowness, slowness)
        updates = int(options.get("max_steps", ["60"])[0])
        seconds = (5 + updates) * slowness
        clock.used_seconds += seconds
        clock.slowness = later_slowness
        outcome = make_outcome(0.5, updates, seconds_per_update=slowness)
        return outcome._replace(seconds=seconds)

    monkeypatch.setattr(search_module, "run_trial", run_timed_trial)
    options = {"method": ["contaccum"], "eval_strategy": ["epoch"]}
    for key, value in yaml.safe_load((root / "config.yaml").read_text()).items():
        options[key] = [str(value)]
    lines: list[str] = []
    tuned = run_tune(
        options,
        ["method", "total_train_batch_size"],
        TimeForTrials(budget, measure_test(), 1.6, measure_test),
        tmp_path / "out",
        lines.append,
    )
    later_updates = {trial["updates"] for trial in tuned.trials[1:]}
    assert later_updates == {updates_of_later_trials}
    # The final training, of 60 updates, and the test have time, and one more trial has not.
    needed = 0.75 * 1.6 * (5 + 60) * later_slowness + measure_test()
    one_trial = (5 + updates_of_later_trials) * later_slowness
    measurement = 2 * later_slowness
    assert needed - measurement < budget.left() <= needed + one_trial
    assert {trial["latest_seconds_per_update"] for trial in tuned.trials} == {later_slowness}
    assert re.match("the search ends: .* are not enough for another trial beside", lines[-1])


def test_a_final_training_at_full_length_gets_half_of_the_time_at_most(tmp_path, monkeypatch):
    monkeypatch.setattr(Budget, "used", lambda budget: 100.0)
    budget = Budget(600.0, tmp_path / "used.json")
    time_for_trials = TimeForTrials(budget, reserve=100.0, final_training_factor=1.5)
    assert time_for_trials.left(10.0, full_seconds=40.0) == pytest.approx(400.0 - 45.0)
    assert time_for_trials.left(10.0, full_seconds=1000.0) == pytest.approx(200.0)
    assert time_for_trials.left(160.0, full_seconds=1000.0) == pytest.approx(160.0)


def test_method_that_is_too_slow_is_left_out(root, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(search_module, "MAX_TRIALS", 9)
    tried_methods = []

    def run_slow_method(options: Options, *_: Any) -> Outcome:
        tried_methods.append(options["method"][0])
        if options["method"] == ["grad_cache"]:
            raise TooSlow(2, 5000.0, 50.0)
        return make_outcome(float(options["learning_rate"][0]))

    monkeypatch.setattr(search_module, "run_trial", run_slow_method)
    assert tune(root, tmp_path / "out") == 0
    assert tried_methods.count("grad_cache") == 1
    message = "too slow for the budget: a trial of grad_cache takes 83 minutes"
    assert message in capsys.readouterr().out
    assert len(read_trials(tmp_path / "out")) == 9


def test_mined_negatives_are_tried_and_written_to_the_config(root, tmp_path, monkeypatch):
    """The made-up scores prefer them; the negatives are documents of the corpus, not positives."""
    monkeypatch.setattr(search_module, "MAX_TRIALS", 12)
    tried = []

    def prefer_negatives(options: Options, *_: Any) -> Outcome:
        num_negatives = options.get("num_hard_negatives", ["0"])[0]
        data_file = Path(options["train_data"][0]).name
        tried.append((options["method"][0], num_negatives, data_file))
        return make_outcome(0.9 if num_negatives == "1" else 0.1)

    monkeypatch.setattr(search_module, "run_trial", prefer_negatives)
    options = ["--corpus", str(root / "beir"), "--learning_rate", "0.01"]
    options += ["--temperature", "0.05", "--seed", "1", "--num_train_epochs", "1"]
    assert tune(root, tmp_path / "out", *options) == 0
    assert {("contaccum", "1", "mined.jsonl"), ("contaccum", "0", "pairs.jsonl")} <= set(tried)
    assert {row[1:] for row in tried if row[0] == "query_side"} <= {("0", "pairs.jsonl")}
    config = yaml.safe_load((tmp_path / "out" / "tuned.yaml").read_text())
    assert config["num_hard_negatives"] == 1
    records = [json.loads(line) for line in Path(config["train_data"]).read_text().splitlines()]
    corpus = load_beir_folder(root / "beir", "dev").corpus
    documents = {document["text"] for document in corpus.values()}
    positives = {record["query"]: record["positive"] for record in records}
    assert len(records) == NUM_QUERIES
    for record in records:
        for negative in record["negatives"]:
            assert negative in documents
            assert negative != positives[record["query"]]


class Killed(BaseException):
    """An exception in place of SIGKILL: nothing catches it."""


@pytest.mark.parametrize(
    "killed_at",
    [
        pytest.param(0, marks=pytest.mark.long),
        1,
        pytest.param(4, marks=pytest.mark.long),
        6,
    ],
)
def test_search_continues_after_a_kill_with_the_same_trials(root, tmp_path, monkeypatch, killed_at):
    monkeypatch.setattr(search_module, "MAX_TRIALS", 7)
    options = ["--method", "contaccum", "--seed", "5"]
    scores: dict[float, float] = {}  # made up

    def make_run_trial(kill_at: int | None) -> RunTrial:
        calls = iter(range(100))

        def run_made_up_trial(options: Options, *_: Any) -> Outcome:
            if next(calls) == kill_at:
                raise Killed
            rate = float(options["learning_rate"][0])
            score = scores.setdefault(rate, 1.0 / (1.0 + abs(rate - 0.004)))
            return make_outcome(score)

        return run_made_up_trial

    monkeypatch.setattr(search_module, "run_trial", make_run_trial(None))
    assert tune(root, tmp_path / "uninterrupted", *options) == 0
    monkeypatch.setattr(search_module, "run_trial", make_run_trial(killed_at))
    with pytest.raises(Killed):
        tune(root, tmp_path / "killed", *options)
    journal = tmp_path / "killed" / "search" / JOURNAL
    with journal.open("a") as file:
        file.write('{"op_code": 5, "worker')  # a line that a kill has cut short
    monkeypatch.setattr(search_module, "run_trial", make_run_trial(None))
    assert tune(root, tmp_path / "killed", *options) == 0
    expected = read_trials(tmp_path / "uninterrupted")
    trials = read_trials(tmp_path / "killed")
    for key in ("settings", "score"):
        assert [trial[key] for trial in trials] == [trial[key] for trial in expected]


def test_a_trial_that_had_ended_before_a_kill_keeps_its_score(tmp_path):
    study, _ = open_study(tmp_path)
    trial = study.ask()
    trial.set_user_attr("settings", {"method": "contaccum"})
    trial.set_user_attr("seconds", 9.0)
    trial.set_user_attr("query_scores", {"q1": 0.5, "q2": 1.0})
    study, _ = open_study(tmp_path)
    [finished] = read_finished_trials(study)
    assert finished.score == 0.75


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--budget", "0.001s"], "no time for a trial"),
        (["--eval_data", "nanobeir"], "eval_data=nanobeir"),
        (["--learnin_rate", "1"], "learning_rate"),
        (["--bank_size", "1k"], "'1k'"),
    ],
)
def test_wrong_options_give_one_line(root, tmp_path, options, message, capsys, monkeypatch):
    monkeypatch.setattr("contaccum.training.run.NanoBEIR", lambda *_, **__: object())
    assert tune(root, tmp_path / "out", *options) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert message in error


def test_budget_counts_the_time_of_earlier_starts(tmp_path):
    budget = Budget(60.0, tmp_path / "time.json")
    time.sleep(0.2)
    budget.save()
    second_budget = Budget(60.0, tmp_path / "time.json")
    assert 0.2 <= second_budget.used() < 20
    assert 40 < second_budget.left() <= 59.8


def test_durations_are_parsed_and_formatted():
    durations = [parse_duration(text) for text in ("90s", "30m", "1h30m", "2H", "1.5h")]
    assert durations == [90, 1800, 5400, 7200, 5400]
    texts = [format_duration(seconds) for seconds in (45, 840, 9000)]
    assert texts == ["45 seconds", "14 minutes", "2.5 hours"]
    for text in ("", "30", "-3m", "1.2.3m"):
        with pytest.raises(ConfigError, match="write a time"):
            parse_duration(text)


def test_every_method_has_a_start_rate_and_methods_with_a_bank_keep_its_settings():
    options = {"bank_size": ["64"], "temperature": ["0.05"]}
    for method in METHODS:
        assert compute_start_rate(method, 384, has_adapter=False, is_base_weak=False) > 0
        adapted = adapt_options(options, method, "store")
        assert ("bank_size" in adapted) == (method in WITH_BANK)
        assert adapted["temperature"] == ["0.05"]


def test_folder_of_another_search_is_refused(root, tmp_path, monkeypatch, capsys):
    scores = iter(range(100))
    monkeypatch.setattr(search_module, "MAX_TRIALS", 2)
    monkeypatch.setattr(search_module, "run_trial", lambda *_, **__: make_outcome(next(scores)))
    options = ["--budget", "60s", "--learning_rate", "1e-3", "--method", "contaccum"]
    assert tune(root, tmp_path, *options) == 0
    assert tune(root, tmp_path, *options) == 0  # the same search continues
    assert tune(root, tmp_path, *options, "--seed", "7") == 2
    assert "has a search with another seed; name another --output" in capsys.readouterr().err
    pairs = (root / "pairs.jsonl").read_text()
    write_lines(tmp_path / "other.jsonl", [*map(json.loads, pairs.splitlines()[:20])])
    assert tune(root, tmp_path, *options, "--train_data", str(tmp_path / "other.jsonl")) == 2
    assert "with another train_data, training data;" in capsys.readouterr().err


@pytest.mark.parametrize("changed", ["model", "tokenisation", "corpus"])
def test_search_does_not_continue_with_files_that_have_changed(
    root, tmp_path, monkeypatch, capsys, changed
):
    """The paths are the same. The store of the documents is that of the earlier content."""
    monkeypatch.setattr(search_module, "MAX_TRIALS", 1)
    monkeypatch.setattr(search_module, "run_trial", lambda *_, **__: make_outcome(0.5))
    shutil.copytree(root / "model", tmp_path / "model")
    shutil.copy(root / "beir" / "corpus.jsonl", tmp_path / "corpus.jsonl")
    corpus = str(tmp_path / "corpus.jsonl")
    arguments = ["--corpus", corpus, "--output", str(tmp_path / "store")]
    assert main(["encode", str(tmp_path / "model"), *arguments]) == 0
    options = ["--model", str(tmp_path / "model"), "--method", "contaccum", "--corpus", corpus]
    options += ["--passage_store", str(tmp_path / "store")]
    assert tune(root, tmp_path / "out", *options) == 0
    model = tiny_encoder(query_prompt="query: " if changed == "tokenisation" else None)
    if changed == "model":
        with torch.no_grad():
            next(model.parameters()).add_(1.0)
    model.save_pretrained(str(tmp_path / "model"))
    if changed == "corpus":
        with open(corpus, "a") as lines:
            lines.write('{"_id": "new", "text": "a new document"}\n')
    assert tune(root, tmp_path / "out", *options) == 2
    assert re.search(f"has a search with another .*{changed}", capsys.readouterr().err)


def test_search_with_another_passage_store_is_refused(root, tmp_path, monkeypatch, capsys):
    scores = iter(range(100))
    monkeypatch.setattr(search_module, "MAX_TRIALS", 2)
    monkeypatch.setattr(search_module, "run_trial", lambda *_, **__: make_outcome(next(scores)))
    documents = [{"_id": f"n{row}", "text": text} for row, text in enumerate(sentences(3, 8))]
    write_lines(tmp_path / "new.jsonl", documents)
    for name, corpus in (("store", root / "beir"), ("new_store", tmp_path / "new.jsonl")):
        arguments = ["--corpus", str(corpus), "--output", str(tmp_path / name)]
        assert main(["encode", str(root / "model"), *arguments]) == 0
    options = ["--learning_rate", "1e-3", "--method", "query_side", "--passage_store"]
    output = tmp_path / "out"
    assert tune(root, output, *options, str(tmp_path / "store")) == 0
    (tmp_path / "store").rename(tmp_path / "moved")  # the same embeddings at another place
    assert tune(root, output, *options, str(tmp_path / "moved")) == 0
    assert tune(root, output, *options, str(tmp_path / "new_store")) == 2
    assert "this folder has a search with another passage store; name" in capsys.readouterr().err


def test_settings_that_decide_others_are_not_searched(root, tmp_path, capsys):
    assert "num_train_epochs" in make_space(1000, 8, [])
    space = make_space(1000, 8, ["max_steps", "gradient_accumulation_steps"])
    assert {"num_train_epochs", "total_train_batch_size"}.isdisjoint(space)
    assert tune(root, tmp_path, "--method", "query_side") == 2
    assert "method=query_side needs documents: set corpus" in capsys.readouterr().err


def test_updates_of_several_sets_are_those_of_all_their_rows(root, tmp_path):
    options = ["--model", str(root / "model"), "--total_train_batch_size", "8"]
    options += ["--per_device_train_batch_size", "4", "--num_train_epochs", "2"]
    options += ["--train_data", str(root / "pairs.jsonl"), "--output_dir", str(tmp_path)]
    _, args = parse([*options, "--use_cpu", "true"])
    rows = Dataset.from_dict({"query": ["q"] * 24})
    assert count_updates(rows, args) == 6
    assert count_updates(DatasetDict(a=rows, b=rows), args) == 12


@pytest.mark.parametrize("seconds", [1.0, 31.4 * 60, 2.54 * 3600])
def test_a_suggested_budget_is_enough(seconds):
    assert parse_duration(suggest_budget(seconds)) > seconds
    assert parse_duration(suggest_budget(seconds)) < 1.2 * seconds + 120


def make_trial(number: int, scores: Sequence[float] | None, **settings: Any) -> FinishedTrial:
    """Return a trial with a score for each query, or a trial that was stopped halfway.

    A trial with a learning rate alone belongs to the ladder.
    """
    rung = "1" if settings.keys() == {"method", "learning_rate"} else None
    if scores is None:
        return FinishedTrial(number, settings, None, {}, 1.0, 9, "stopped halfway", rung)
    query_scores = {f"q{row}": score for row, score in enumerate(scores)}
    mean = sum(scores) / len(scores)
    return FinishedTrial(number, settings, mean, query_scores, 1.0, 9, "", rung)


GROUPS = {f"q{row}": row for row in range(20)}
"""{query id: its group}, if no two queries are about the same passage."""


def test_other_settings_are_chosen_only_if_dev_data_decide():
    base_scores = {f"q{row}": 0.2 for row in range(20)}
    ladder = []
    for i in range(3):
        scores = 20 * [0.5 - 0.01 * abs(i - 1)]
        ladder.append(make_trial(i, scores, method="a", learning_rate=3.0**i))
    # Its mean is high because of a single query.
    lucky = make_trial(3, 19 * [0.45] + [1.6], method="a", learning_rate=3.0, temperature=0.1)
    assert lucky.score is not None
    assert lucky.score > 0.5
    assert choose_trial([*ladder, lucky], base_scores, GROUPS).trial == 1
    better = make_trial(4, 20 * [0.6], method="a", learning_rate=3.0, temperature=0.02)
    stopped = make_trial(5, None, method="b")
    trials = [*ladder, lucky, better, stopped]
    choice = choose_trial(trials, base_scores, GROUPS)
    assert choice.trial == 4
    assert choice.settings["temperature"] == 0.02
    assert choice.against_base["difference"] == pytest.approx(0.4)
    assert choice.warnings == []
    # Five passages cannot decide, whatever the number of queries.
    five_groups = {query: group % 5 for query, group in GROUPS.items()}
    choice = choose_trial(trials, base_scores, five_groups)
    assert choice.trial == 1
    assert len(choice.warnings) == 2


def test_a_method_whose_bad_rates_were_stopped_keeps_its_lead():
    """Its ladder has fewer scores than that of the other method."""
    base_scores = {f"q{row}": 0.2 for row in range(20)}
    noise = [0.01 * (row % 5) for row in range(20)]
    other_ladder = []
    for number in range(3):
        scores = [0.74 + value for value in noise]
        trial = make_trial(number, scores, method="other", learning_rate=3.0**number)
        other_ladder.append(trial)
    best = make_trial(3, [0.75 + value for value in noise[::-1]], method="a", learning_rate=1.0)
    stopped = make_trial(4, None, method="a", learning_rate=3.0)
    assert choose_trial([*other_ladder, best, stopped], base_scores, GROUPS).trial == 3


@pytest.mark.parametrize("num_documents", [2, NUM_QUERIES])
def test_search_counts_dev_queries_about_one_document_as_one_group(
    root, tmp_path, monkeypatch, num_documents
):
    documents = {f"d{row}": ("", text) for row, text in enumerate(sentences(num_documents, 5, 9))}
    queries = {f"q{row}": text for row, text in enumerate(sentences(NUM_QUERIES, 6))}
    judgements = [(f"q{row}", f"d{row % num_documents}", 1) for row in range(NUM_QUERIES)]
    write_beir(tmp_path / "dev", documents, queries, judgements, "dev")
    is_stopped = []

    def run_trial(options, evaluator, folder, max_seconds, is_hopeless):
        scores = {
            query: 0.9 if not is_stopped else 0.1 + 0.01 * int(query[1:]) for query in queries
        }
        is_stopped.append(is_hopeless(scores))
        return Outcome(scores, sum(scores.values()) / NUM_QUERIES, 0.1, 9, 0.01)

    monkeypatch.setattr(search_module, "run_trial", run_trial)
    monkeypatch.setattr(search_module, "MAX_TRIALS", 2)
    assert tune(root, tmp_path / "out", "--eval_data", str(tmp_path / "dev")) == 0
    assert is_stopped == [False, num_documents > 2]
    choice = json.loads((tmp_path / "out" / "tuned.json").read_text())["choice"]
    assert choice["against_base"]["groups"] == num_documents


def test_choice_without_significance_has_warnings():
    base_scores = {f"q{row}": float(row % 2) for row in range(20)}
    noise = [float(row % 3 == 0) for row in range(20)]
    trials = [
        make_trial(0, noise, method="a", learning_rate=1.0),
        make_trial(1, noise[::-1], method="a", learning_rate=9.0),
    ]
    choice = choose_trial(trials, base_scores, GROUPS)
    assert len(choice.warnings) == 2


def test_choice_without_any_score_is_refused():
    with pytest.raises(ConfigError, match="no trial has a score"):
        choose_trial([make_trial(0, None, method="a")], {}, {})


def write_config(path: Path, **settings: Any) -> str:
    path.write_text(yaml.safe_dump(settings))
    return str(path)


def test_tuned_config_is_saved_and_logged_as_the_config(root, tmp_path, monkeypatch):
    monkeypatch.setattr(search_module, "MAX_TRIALS", 1)
    trials: list[Options] = []

    def record_options(options: Options, *_: Any) -> Outcome:
        trials.append(options)
        return make_outcome(0.5)

    monkeypatch.setattr(search_module, "run_trial", record_options)
    settings: dict[str, Any] = {
        "eval_strategy": "steps",
        "eval_steps": 20,
        "save_strategy": "steps",
        "save_steps": 20,
        "save_total_limit": 1,
        "load_best_model_at_end": True,
        "logging_steps": 5,
    }
    config = write_config(tmp_path / "output.yaml", output_dir="elsewhere", **settings)
    arguments = ["tune", str(root / "config.yaml"), config, "--output", str(tmp_path / "out")]
    assert main(arguments) == 0
    tuned = read_config(tmp_path / "out")
    assert {key: tuned[key] for key in settings} == settings
    assert tuned["output_dir"] == str(tmp_path / "out" / "model")
    assert settings.keys().isdisjoint(trials[0].keys() - {"eval_strategy"})
    assert tune(root, tmp_path / "other") == 0
    assert read_config(tmp_path / "other")["eval_strategy"] == "epoch"


def test_error_of_one_of_several_processes_ends_the_search(root, tmp_path, monkeypatch, capsys):
    """The other processes would wait for it in the next trial."""
    outcomes = [make_outcome(0.5)]

    def run_out_of_memory(*_: Any) -> Outcome:
        if outcomes:
            return outcomes.pop()
        raise ConfigError("not enough memory")

    monkeypatch.setattr(search_module, "run_trial", run_out_of_memory)
    monkeypatch.setattr(search_module, "world_size", lambda: 2)
    assert tune(root, tmp_path / "out", "--method", "contaccum") == 2
    assert "error: not enough memory" in capsys.readouterr().err


def test_trial_that_is_stopped_by_a_signal_saves_nothing(root, tmp_path, monkeypatch, capsys):
    def stop_halfway(scores: QueryScores) -> bool:
        signal.raise_signal(signal.SIGTERM)
        return False

    monkeypatch.setattr(
        search_module.Search, "_is_hopeless", lambda _, scores: stop_halfway(scores)
    )
    with pytest.raises(SystemExit) as stop:
        tune(root, tmp_path / "out", "--method", "contaccum")
    assert stop.value.code == 128 + signal.SIGTERM
    output = capsys.readouterr()
    assert "SIGTERM: stopping after this update" in output.err
    assert output.out.endswith("stopped. Start the same command again to continue\n")
    assert not (tmp_path / "out" / "search" / "running").exists()
