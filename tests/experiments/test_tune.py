"""`contaccum tune`: the search keeps to its budget, survives a kill and finds the best settings."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import signal
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from datasets import Dataset, DatasetDict
from sample_texts import sentences
from small_data import write_beir, write_lines
from tiny_models import tiny_encoder

from contaccum.cli import main
from contaccum.data import load_beir_folder
from contaccum.errors import ConfigError
from contaccum.evaluation.evaluator import RetrievalEvaluator
from contaccum.experiments import run as run_module
from contaccum.experiments import tune as tune_module
from contaccum.experiments.budget import (
    Budget,
    format_duration,
    parse_duration,
    suggest_budget,
)
from contaccum.experiments.run import QueryScores, Result, count_updates, run
from contaccum.experiments.tune import (
    SearchSpace,
    Trial,
    choose_best,
    choose_trial,
    list_methods,
    make_base_settings,
    round_up,
)
from contaccum.settings import METHODS, WITH_BANK, Settings, read, replace
from contaccum.training import log
from contaccum.training.arguments import ContAccumTrainingArguments
from contaccum.training.proposal import compute_start_rate

NUM_QUERIES = 24

TrainAndScore = Callable[..., Result]


def fake_trials(
    monkeypatch: pytest.MonkeyPatch, train_and_score: TrainAndScore, speed: float = 0.001
) -> None:
    """Replace trainings by made-up results, and the measured seconds per update by ``speed``."""
    monkeypatch.setattr(run_module, "_train_and_score", train_and_score)
    monkeypatch.setattr(tune_module, "measure_speed", lambda *_: speed)


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


def make_result(score: float, updates: int = 9, seconds_per_update: float = 0.01) -> Result:
    """Return the result of a trial in which all queries have the same score."""
    query_scores = {f"q{row}": score for row in range(NUM_QUERIES)}
    return Result(
        score=score,
        query_scores=query_scores,
        updates=updates,
        seconds=0.1,
        seconds_per_update=seconds_per_update,
    )


def test_written_config_has_the_best_settings_and_can_be_trained(
    root, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(tune_module, "MAX_TRIALS", 5)
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
    given = {**read([str(root / "config.yaml")]), "learning_rate": 0.02, "eval_data": None}
    space = SearchSpace(replace(Settings(), **given), (), str(store))
    both_encoders = space.make_settings("contaccum")
    query_side = space.make_settings("query_side")

    def score_run(evaluator: RetrievalEvaluator, settings: Settings) -> QueryScores:
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        return run(settings, evaluator, tmp_path / "run").query_scores

    shared_evaluator = RetrievalEvaluator(load_beir_folder(root / "beir", "dev"))
    query_side_scores = score_run(shared_evaluator, query_side)
    assert shared_evaluator.documents is not None
    new_evaluator = RetrievalEvaluator(load_beir_folder(root / "beir", "dev"))
    expected = score_run(new_evaluator, both_encoders)
    assert score_run(shared_evaluator, both_encoders) == expected
    assert expected != query_side_scores
    assert not list((tmp_path / "run").glob("**/*.safetensors"))


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

    def prefer_small_rates(settings: Settings, *_: Any) -> Result:
        return make_result(1.0 - settings.learning_rate)

    fake_trials(monkeypatch, prefer_small_rates)
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
    monkeypatch.setattr(tune_module, "MAX_TRIALS", 5)

    def fail_at_large_rates(settings: Settings, *_: Any) -> Result:
        rate = settings.learning_rate
        if rate > 0.03:
            raise ConfigError("its loss is not finite")
        return make_result(rate)

    fake_trials(monkeypatch, fail_at_large_rates)
    options = ["--method", "contaccum", "--temperature", "0.05", "--num_train_epochs", "1"]
    options += ["--num_hard_negatives", "0"]
    assert tune(root, tmp_path / "out", *options) == 0
    assert "its loss is not finite" in capsys.readouterr().out
    trials = read_trials(tmp_path / "out")
    notes = [trial["note"] for trial in trials if trial["score"] is None]
    assert notes == ["its loss is not finite"]
    assert max(trial["settings"]["learning_rate"] for trial in trials) < 0.1


def tune_slowly(root: Path, output: Path, *options: str) -> int:
    """Run `contaccum tune` for 3 minutes, in which a trial of all 180 updates has no time."""
    (output.parent / "long.yaml").write_text("num_train_epochs: 60\n")
    configs = [str(root / "config.yaml"), str(output.parent / "long.yaml")]
    arguments = ["--output", str(output), "--method", "contaccum", "--budget", "3m"]
    return main(["tune", *configs, *arguments, *options])


def test_slow_trial_is_cut_and_stays_cut_after_a_kill(root, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tune_module, "MAX_TRIALS", 4)
    max_steps: list[int] = []

    def make_run_trial(kill_at: int) -> TrainAndScore:
        def run_slow_trial(settings: Settings, *_: Any) -> Result:
            max_steps.append(settings.max_steps)
            if len(max_steps) == kill_at:
                raise Killed
            return make_result(0.5, max_steps[-1], seconds_per_update=1.0)

        return run_slow_trial

    fake_trials(monkeypatch, make_run_trial(kill_at=2), speed=1.0)
    with pytest.raises(Killed):
        tune_slowly(root, tmp_path / "out")
    assert "contaccum: trials have 24 of 180 updates" in capsys.readouterr().out
    # The speed is not measured again.
    fake_trials(monkeypatch, make_run_trial(kill_at=0), speed=2.0)
    assert tune_slowly(root, tmp_path / "out") == 0
    assert max_steps == 5 * [24]
    assert [trial["updates"] for trial in read_trials(tmp_path / "out")] == 4 * [24]


def test_training_by_the_tuned_config_is_as_long_as_the_cut_trials(root, tmp_path, monkeypatch):
    def run_slow_trial(settings: Settings, *_: Any) -> Result:
        return make_result(settings.learning_rate, settings.max_steps, seconds_per_update=1.0)

    monkeypatch.setattr(tune_module, "MAX_TRIALS", 8)
    fake_trials(monkeypatch, run_slow_trial, speed=1.0)
    assert tune_slowly(root, tmp_path / "out") == 0
    settings = [trial["settings"] for trial in read_trials(tmp_path / "out")]
    assert {trial["max_steps"] for trial in settings} == {24}
    assert "temperature" in settings[-1]
    assert not any("num_train_epochs" in trial for trial in settings)
    config = read_config(tmp_path / "out")
    assert config["max_steps"] == 24
    assert "num_train_epochs" not in config
    comment = "max_steps is the length of the trials, which were cut to fit the budget"
    assert comment in (tmp_path / "out" / "tuned.yaml").read_text()


def test_length_is_not_searched_if_the_config_has_a_number_of_updates(root, tmp_path, monkeypatch):
    monkeypatch.setattr(tune_module, "MAX_TRIALS", 8)
    fake_trials(monkeypatch, lambda *_: make_result(0.5))
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

    def record_metric(settings: Settings, evaluator: RetrievalEvaluator, *_: Any) -> Result:
        scored_by.append(evaluator.primary_metric)
        return make_result(0.5)

    monkeypatch.setattr(tune_module, "MAX_TRIALS", 1)
    fake_trials(monkeypatch, record_metric)
    assert tune(root, tmp_path / "default") == 0
    baselines = capsys.readouterr().out.splitlines()[0]
    assert tune(root, tmp_path / "recall", "--metric_for_best_model", "recall@5") == 0
    assert capsys.readouterr().out.splitlines()[0] == baselines
    assert set(scored_by) == {"ndcg@10"}
    assert read_config(tmp_path / "recall")["metric_for_best_model"] == "recall@5"


def test_no_trial_of_a_method_starts_that_has_no_time_left(root, tmp_path, monkeypatch, capsys):
    """Trials of contaccum take 100 seconds of 330; those of grad_cache would always fit."""
    monkeypatch.setattr(tune_module, "MAX_TRIALS", 8)
    tried_methods = []

    def run_timed_trial(settings: Settings, *_: Any) -> Result:
        method = settings.method
        tried_methods.append(method)
        seconds = {"contaccum": 100.0, "grad_cache": 1.0}[method]
        clock.used_seconds += seconds
        score = 0.9 if method == "contaccum" else 0.1
        return dataclasses.replace(make_result(score), seconds=seconds)

    clock = SimpleNamespace(used_seconds=0.0)
    monkeypatch.setattr(Budget, "used", lambda budget: clock.used_seconds)
    fake_trials(monkeypatch, run_timed_trial)
    assert tune(root, tmp_path / "out", "--budget", "330s") == 0
    assert tried_methods.count("contaccum") == 3
    assert len(tried_methods) == len(read_trials(tmp_path / "out")) == 8
    assert "no time is left" not in capsys.readouterr().out


def test_training_keeps_a_given_length_if_trials_are_cut(root, tmp_path, monkeypatch):
    monkeypatch.setattr(tune_module, "MAX_TRIALS", 1)
    fake_trials(monkeypatch, lambda *_: make_result(0.5, updates=24), speed=1.0)
    assert tune_slowly(root, tmp_path / "out", "--num_train_epochs", "60") == 0
    config = read_config(tmp_path / "out")
    assert config["num_train_epochs"] == 60
    assert "max_steps" not in config


def test_method_that_is_too_slow_is_left_out(root, tmp_path, monkeypatch, capsys):
    """The other method has all of the time: 16 updates, where half of the time allows 15."""
    monkeypatch.setattr(tune_module, "MAX_TRIALS", 1)
    (tmp_path / "long.yaml").write_text("num_train_epochs: 60\n")
    fake_trials(monkeypatch, lambda settings, *_: make_result(0.5, settings.max_steps))

    def measure_speed(settings: Settings, *_: Any) -> float:
        return 500.0 if settings.method == "grad_cache" else 5.0

    monkeypatch.setattr(tune_module, "measure_speed", measure_speed)
    arguments = ["tune", str(root / "config.yaml"), str(tmp_path / "long.yaml"), "--budget", "3m"]
    assert main([*arguments, "--output", str(tmp_path / "out")]) == 0
    message = "grad_cache is left out, because it is too slow for the budget: 8 updates take 80 min"
    assert message in capsys.readouterr().out
    [trial] = read_trials(tmp_path / "out")
    assert (trial["settings"]["method"], trial["updates"]) == ("contaccum", 16)


@pytest.mark.parametrize(("seconds_per_document", "updates"), [(0.0, [14, 15]), (1.0, [8, 8])])
def test_every_method_gets_a_short_first_trial_in_a_short_budget(
    root, tmp_path, monkeypatch, seconds_per_document, updates
):
    """A sixth of the budget would be five updates; each method may use half of it.

    The trained model encodes 40 dev documents for its score.
    """
    monkeypatch.setattr(
        tune_module, "measure_seconds_per_document", lambda *_: seconds_per_document
    )
    monkeypatch.setattr(tune_module, "MAX_TRIALS", 2)
    (tmp_path / "long.yaml").write_text("num_train_epochs: 60\n")
    fake_trials(monkeypatch, lambda settings, *_: make_result(0.5, settings.max_steps), speed=5.0)
    arguments = ["tune", str(root / "config.yaml"), str(tmp_path / "long.yaml"), "--budget", "3m"]
    assert main([*arguments, "--output", str(tmp_path / "out")]) == 0
    trials = read_trials(tmp_path / "out")
    assert [trial["settings"]["method"] for trial in trials] == ["contaccum", "grad_cache"]
    assert [trial["updates"] for trial in trials] == updates


def test_updates_are_smaller_where_a_first_trial_would_take_too_long(root, tmp_path, monkeypatch):
    """Of contaccum, 16 updates of 64 pairs take 96 seconds, and half of the budget is 90."""
    monkeypatch.setattr(tune_module, "MAX_TRIALS", 2)
    pairs = [{"query": text, "positive": text} for text in sentences(128, 7)]
    config = {"num_train_epochs": 60, "total_train_batch_size": 64}
    config["train_data"] = str(write_lines(tmp_path / "pairs.jsonl", pairs))
    (tmp_path / "long.yaml").write_text(yaml.safe_dump(config))
    fake_trials(monkeypatch, lambda settings, *_: make_result(0.5, settings.max_steps), speed=5.0)
    arguments = ["tune", str(root / "config.yaml"), str(tmp_path / "long.yaml"), "--budget", "3m"]
    assert main([*arguments, "--output", str(tmp_path / "out")]) == 0
    contaccum, grad_cache = (trial["settings"] for trial in read_trials(tmp_path / "out"))
    assert contaccum["total_train_batch_size"] == 32
    assert contaccum["max_steps"] == 16
    assert "total_train_batch_size" not in grad_cache
    assert read_config(tmp_path / "out")["total_train_batch_size"] == 32


def test_mined_negatives_are_tried_and_written_to_the_config(root, tmp_path, monkeypatch):
    """The made-up scores prefer them; the negatives are documents of the corpus, not positives."""
    monkeypatch.setattr(tune_module, "MAX_TRIALS", 12)
    tried = []

    def prefer_negatives(settings: Settings, *_: Any) -> Result:
        num_negatives = settings.num_hard_negatives
        data_file = Path(settings.train_data[0]).name
        tried.append((settings.method, num_negatives, data_file))
        return make_result(0.9 if num_negatives == 1 else 0.1)

    fake_trials(monkeypatch, prefer_negatives)
    options = ["--corpus", str(root / "beir"), "--learning_rate", "0.01"]
    options += ["--temperature", "0.05", "--seed", "1", "--num_train_epochs", "1"]
    assert tune(root, tmp_path / "out", *options) == 0
    assert {("contaccum", 1, "mined.jsonl"), ("contaccum", 0, "pairs.jsonl")} <= set(tried)
    assert {row[1:] for row in tried if row[0] == "query_side"} <= {(0, "pairs.jsonl")}
    config = yaml.safe_load((tmp_path / "out" / "tuned.yaml").read_text())
    assert config["num_hard_negatives"] == 1
    records = [json.loads(line) for line in Path(config["train_data"][0]).read_text().splitlines()]
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
    monkeypatch.setattr(tune_module, "MAX_TRIALS", 7)
    options = ["--method", "contaccum", "--seed", "5"]
    scores: dict[float, float] = {}  # made up

    def make_run_trial(kill_at: int | None) -> TrainAndScore:
        calls = iter(range(100))

        def run_made_up_trial(settings: Settings, *_: Any) -> Result:
            if next(calls) == kill_at:
                raise Killed
            rate = settings.learning_rate
            score = scores.setdefault(rate, 1.0 / (1.0 + abs(rate - 0.004)))
            return make_result(score)

        return run_made_up_trial

    fake_trials(monkeypatch, make_run_trial(None))
    assert tune(root, tmp_path / "uninterrupted", *options) == 0
    fake_trials(monkeypatch, make_run_trial(killed_at))
    with pytest.raises(Killed):
        tune(root, tmp_path / "killed", *options)
    fake_trials(monkeypatch, make_run_trial(None))
    assert tune(root, tmp_path / "killed", *options) == 0
    expected = read_trials(tmp_path / "uninterrupted")
    trials = read_trials(tmp_path / "killed")
    for key in ("settings", "score"):
        assert [trial[key] for trial in trials] == [trial[key] for trial in expected]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--budget", "0.001s"], "the shortest trial takes"),
        (["--learnin_rate", "1"], "learning_rate"),
        (["--bank_size", "1k"], "'1k'"),
    ],
)
def test_wrong_options_give_one_line(root, tmp_path, options, message, capsys):
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
    space = SearchSpace(Settings(bank_size=64, temperature=0.05), (), "store")
    for method in METHODS:
        assert compute_start_rate(method, 384, has_adapter=False, is_base_weak=False) > 0
        settings = space.make_settings(method)
        assert settings.bank_size == (64 if method in WITH_BANK else None)
        assert settings.temperature == 0.05


def test_folder_of_another_search_is_refused(root, tmp_path, monkeypatch, capsys):
    scores = iter(range(100))
    monkeypatch.setattr(tune_module, "MAX_TRIALS", 2)
    fake_trials(monkeypatch, lambda *_, **__: make_result(next(scores)))
    options = ["--budget", "60s", "--learning_rate", "1e-3", "--method", "contaccum"]
    assert tune(root, tmp_path, *options) == 0
    assert tune(root, tmp_path, *options) == 0  # the same search continues
    assert tune(root, tmp_path, *options, "--seed", "7") == 2
    assert "seed (default, now 7); name another output folder" in capsys.readouterr().err
    pairs = (root / "pairs.jsonl").read_text()
    write_lines(tmp_path / "other.jsonl", [*map(json.loads, pairs.splitlines()[:20])])
    assert tune(root, tmp_path, *options, "--train_data", str(tmp_path / "other.jsonl")) == 2
    assert re.search("another .*train_data, .*training data;", capsys.readouterr().err)


@pytest.mark.parametrize("changed", ["model", "tokenisation", "corpus"])
def test_search_does_not_continue_with_files_that_have_changed(
    root, tmp_path, monkeypatch, capsys, changed
):
    """The paths are the same. The store of the documents is that of the earlier content."""
    monkeypatch.setattr(tune_module, "MAX_TRIALS", 1)
    fake_trials(monkeypatch, lambda *_: make_result(0.5))
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
    assert re.search(f"this folder has work with another .*{changed}", capsys.readouterr().err)


def test_search_with_another_passage_store_is_refused(root, tmp_path, monkeypatch, capsys):
    scores = iter(range(100))
    monkeypatch.setattr(tune_module, "MAX_TRIALS", 2)
    fake_trials(monkeypatch, lambda *_, **__: make_result(next(scores)))
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
    assert "this folder has work with another passage store; name" in capsys.readouterr().err


def test_query_side_without_documents_is_refused(root, tmp_path, capsys):
    assert tune(root, tmp_path, "--method", "query_side") == 2
    assert "method=query_side needs documents: set corpus" in capsys.readouterr().err


def test_updates_of_several_sets_are_those_of_all_their_rows(root, tmp_path):
    options = ["--model", str(root / "model"), "--total_train_batch_size", "8"]
    options += ["--per_device_train_batch_size", "4", "--num_train_epochs", "2"]
    options += ["--train_data", str(root / "pairs.jsonl"), "--output_dir", str(tmp_path)]
    settings = replace(Settings(), **read([*options, "--use_cpu", "true"]))
    args = ContAccumTrainingArguments.from_settings(settings)
    rows = Dataset.from_dict({"query": ["q"] * 24})
    assert count_updates(rows, args) == 6
    assert count_updates(DatasetDict(a=rows, b=rows), args) == 12


@pytest.mark.parametrize("seconds", [1.0, 31.4 * 60, 2.54 * 3600])
def test_a_suggested_budget_is_enough(seconds):
    assert parse_duration(suggest_budget(seconds)) > seconds
    assert parse_duration(suggest_budget(seconds)) < 1.2 * seconds + 120


def make_trial(number: int, scores: Sequence[float] | None, **point: Any) -> Trial:
    """Return a trial with a score for each query, or a trial that failed."""
    if scores is None:
        return Trial(number, Result(note="failed", point=point))
    query_scores = {f"q{row}": score for row, score in enumerate(scores)}
    mean = sum(scores) / len(scores)
    return Trial(number, Result(mean, query_scores, point=point))


GROUPS = {f"q{row}": row for row in range(20)}
"""{query id: its group}, if no two queries are about the same passage."""


def test_the_first_rate_is_kept_unless_another_is_better_by_a_standard_error():
    def choose_rate(gains):
        first = make_trial(0, 20 * [0.5], method="a", learning_rate=1.0)
        second = make_trial(1, [0.5 + gain for gain in gains], method="a", learning_rate=3.0)
        return choose_best([first, second], GROUPS).rate

    # The mean gain of both is 0.01; the standard errors are 0.022 and 0.002.
    assert choose_rate(10 * [0.11, -0.09]) == 1.0
    assert choose_rate(10 * [0.02, 0.0]) == 3.0


def test_other_settings_are_chosen_only_if_dev_data_decide():
    base_scores = {f"q{row}": 0.2 for row in range(20)}
    ladder = []
    for i in range(3):
        scores = 20 * [0.5 - 0.01 * abs(i - 1)]
        ladder.append(make_trial(i, scores, method="a", learning_rate=3.0**i))
    # Its mean is high because of a single query.
    lucky = make_trial(3, 19 * [0.45] + [1.6], method="a", learning_rate=3.0, temperature=0.1)
    assert lucky.result.score is not None
    assert lucky.result.score > 0.5
    assert choose_trial([*ladder, lucky], base_scores, GROUPS).trial == 1
    better = make_trial(4, 20 * [0.6], method="a", learning_rate=3.0, temperature=0.02)
    failed = make_trial(5, None, method="b")
    trials = [*ladder, lucky, better, failed]
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


def test_a_method_whose_bad_rates_failed_keeps_its_lead():
    """Its ladder has fewer scores than that of the other method."""
    base_scores = {f"q{row}": 0.2 for row in range(20)}
    noise = [0.01 * (row % 5) for row in range(20)]
    other_ladder = []
    for number in range(3):
        scores = [0.74 + value for value in noise]
        trial = make_trial(number, scores, method="other", learning_rate=3.0**number)
        other_ladder.append(trial)
    best = make_trial(3, [0.75 + value for value in noise[::-1]], method="a", learning_rate=1.0)
    failed = make_trial(4, None, method="a", learning_rate=3.0)
    assert choose_trial([*other_ladder, best, failed], base_scores, GROUPS).trial == 3


@pytest.mark.parametrize("num_documents", [2, NUM_QUERIES])
def test_search_counts_dev_queries_about_one_document_as_one_group(
    root, tmp_path, monkeypatch, num_documents
):
    documents = {f"d{row}": ("", text) for row, text in enumerate(sentences(num_documents, 5, 9))}
    queries = {f"q{row}": text for row, text in enumerate(sentences(NUM_QUERIES, 6))}
    judgements = [(f"q{row}", f"d{row % num_documents}", 1) for row in range(NUM_QUERIES)]
    write_beir(tmp_path / "dev", documents, queries, judgements, "dev")
    fake_trials(monkeypatch, lambda *_: make_result(0.9))
    monkeypatch.setattr(tune_module, "MAX_TRIALS", 1)
    assert tune(root, tmp_path / "out", "--eval_data", str(tmp_path / "dev")) == 0
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
    monkeypatch.setattr(tune_module, "MAX_TRIALS", 1)
    trials: list[Settings] = []

    def record_options(settings: Settings, *_: Any) -> Result:
        trials.append(settings)
        return make_result(0.5)

    fake_trials(monkeypatch, record_options)
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
    assert tune(root, tmp_path / "other") == 0
    assert read_config(tmp_path / "other")["eval_strategy"] == "epoch"


def test_error_of_one_of_several_processes_ends_the_search(root, tmp_path, monkeypatch, capsys):
    """The other processes would wait for it in the next trial."""
    outcomes = [make_result(0.5)]

    def run_out_of_memory(*_: Any) -> Result:
        if outcomes:
            return outcomes.pop()
        raise ConfigError("not enough memory")

    fake_trials(monkeypatch, run_out_of_memory)
    monkeypatch.setattr(tune_module, "world_size", lambda: 2)
    assert tune(root, tmp_path / "out", "--method", "contaccum") == 2
    assert "error: not enough memory" in capsys.readouterr().err


def test_trial_that_is_stopped_by_a_signal_saves_nothing(root, tmp_path, monkeypatch, capsys):
    def stop(*_: object, **__: object) -> None:
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(tune_module, "measure_speed", lambda *_: 0.001)
    monkeypatch.setattr(log.UpdateLogCallback, "on_step_begin", stop)
    with pytest.raises(SystemExit) as stop:
        tune(root, tmp_path / "out", "--method", "contaccum")
    assert stop.value.code == 128 + signal.SIGTERM
    output = capsys.readouterr()
    assert "SIGTERM: stopping after this update" in output.err
    assert output.out.endswith("stopped. Start the same command again to continue\n")
    assert not list((tmp_path / "out" / "trials").glob("*/checkpoint-*"))


@pytest.mark.parametrize(
    ("change", "warning"),
    [
        (-0.4, "significantly worse than the base model"),
        (0.0, "not significantly better than the base model"),
        (0.4, None),
    ],
)
def test_warning_compares_the_chosen_settings_with_the_base_model(change, warning):
    base_scores = {f"q{number}": 0.5 for number in range(40)}
    scores = {query: score + change for query, score in base_scores.items()}
    point = {"method": "a", "learning_rate": 1e-4}
    trial = Trial(0, Result(0.5 + change, scores, point=point))
    choice = choose_trial([trial], base_scores, {query: query for query in scores})
    if warning is None:
        assert choice.warnings == []
    else:
        assert len(choice.warnings) == 1
        assert warning in choice.warnings[0]


# The settings of each method ----------------------------------------------------------------------

RUN: dict[str, Any] = {"model": "model", "train_data": ["pairs.jsonl"], "use_cpu": True}


def make_space(
    fixed: Collection[str] = (), store: str | None = "store", **given: Any
) -> SearchSpace:
    return SearchSpace(replace(Settings(), **{**RUN, **given}), fixed, store)


def make_arguments(
    method: str, fixed: Collection[str] = (), **given: Any
) -> ContAccumTrainingArguments:
    """Return the arguments of a training by a method."""
    settings = make_space(fixed, **given).make_settings(method)
    return ContAccumTrainingArguments.from_settings(settings)


def use_processes(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr(ContAccumTrainingArguments, "world_size", number)
    monkeypatch.setattr(tune_module, "world_size", lambda: number)


@pytest.mark.parametrize("num_processes", [1, 2, 4, 8])
def test_query_side_batches_are_divided_among_the_processes(num_processes, monkeypatch):
    """The totals are those that `propose_settings` rounds up for micro-batches of 8 pairs."""
    use_processes(monkeypatch, num_processes)
    totals = {round_up(pairs, 8 * num_processes) for pairs in range(8, 129, 8)}
    for total in sorted(totals):
        args = make_arguments("query_side", total_train_batch_size=total)
        assert args.total_train_batch_size == total
        assert 8 <= args.per_device_train_batch_size <= 32
    assert make_arguments("query_side").total_train_batch_size == 128


def test_query_side_batch_that_cannot_be_divided_is_refused(monkeypatch):
    use_processes(monkeypatch, 4)
    for total in (2, 6):
        space = make_space(per_device_train_batch_size=1, total_train_batch_size=total)
        with pytest.raises(ConfigError, match="give a multiple of 4, the number of processes"):
            space.make_settings("query_side")


def test_sizes_that_the_user_has_fixed_are_those_of_query_side_training():
    name = "per_device_train_batch_size"
    given: dict[str, Any] = {name: 4, "total_train_batch_size": 64}
    args = make_arguments("query_side", [name], **given)
    assert args.per_device_train_batch_size == 4
    assert make_arguments("query_side", **given).per_device_train_batch_size == 32
    args = make_arguments("query_side", [name], per_device_train_batch_size=24)
    assert (args.per_device_train_batch_size, args.total_train_batch_size) == (24, 144)
    given = {name: 8, "gradient_accumulation_steps": 4}
    args = make_arguments("query_side", ["gradient_accumulation_steps"], **given)
    assert args.total_train_batch_size == 32


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"matryoshka_dims": [384, 96]}, r"matryoshka_dims=\[384, 96\]: "),
        ({"mask_duplicates": False}, "mask_duplicates=False: "),
        ({"guide": "other/model"}, "guide=other/model: "),
        ({"lora_r": 4, "load_in_4bit": True}, "load_in_4bit: the store would not fit"),
    ],
)
def test_query_side_is_left_out_if_it_lacks_a_setting(given, reason, monkeypatch):
    """Otherwise the setting would be lost if query_side was chosen."""
    lines: list[str] = []
    methods = list_methods(make_space(given, **given), lines.append)
    assert methods == ["contaccum", "grad_cache"]
    [line] = lines
    assert line.startswith("query_side is not tried: method=query_side with ")
    space = make_space(["method"], **given)
    with pytest.raises(ConfigError, match=reason):
        list_methods(dataclasses.replace(space, method="query_side"), lines.append)


def test_one_tower_leaves_out_query_side():
    lines: list[str] = []
    methods = list_methods(make_space(["towers"], towers="one"), lines.append)
    assert methods == ["contaccum", "grad_cache"]
    assert [line.partition(" with")[0] for line in lines] == ["query_side is not tried: towers=one"]


def test_settings_of_the_bank_leave_out_no_method():
    lines: list[str] = []
    given = {"bank_size": 64, "bank_weight": 0.5}
    methods = list_methods(make_space(given, **given), lines.append)
    assert methods == ["query_side", "contaccum", "grad_cache"]
    assert lines == []


def test_base_model_has_no_adapter():
    """Its embeddings of documents fit the document tower of a query-side training."""
    given = {"lora_r": 4, "lora_dropout": 0.1, "tied": False, "bf16": True}
    base = make_base_settings(make_space(**given).settings)
    assert (base.method, base.lora_r, base.lora_dropout) == ("grad_accum", None, 0.0)
    assert (base.tied, base.bf16, base.passage_store) == (False, True, None)


@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_plain_batch_is_the_whole_update(num_processes, monkeypatch):
    use_processes(monkeypatch, num_processes)
    given = {"per_device_train_batch_size": 8, "total_train_batch_size": 128}
    args = make_arguments("in_batch", **given)
    assert args.per_device_train_batch_size == 128 // num_processes
    args = make_arguments("in_batch", ["per_device_train_batch_size"], **given)
    assert args.total_train_batch_size == 8 * num_processes


def test_a_method_of_the_config_that_is_not_tried_is_named():
    lines: list[str] = []
    space = dataclasses.replace(make_space(), method="contaccum_cached")
    assert "contaccum_cached" not in list_methods(space, lines.append)
    assert [line.partition(" of")[0] for line in lines] == ["method=contaccum_cached"]


def test_a_plain_batch_whose_sizes_contradict_each_other_is_refused():
    given = {"per_device_train_batch_size": 8, "total_train_batch_size": 128}
    with pytest.raises(ConfigError, match="total_train_batch_size=128"):
        make_arguments("in_batch", given, **given)
