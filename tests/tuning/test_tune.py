"""`contaccum tune`: a search that keeps to its budget, survives a kill and finds what is there to find."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from sample_texts import sentences
from small_data import write_beir, write_lines
from tiny_models import tiny_encoder

from contaccum.cli import main
from contaccum.data import load_beir_folder
from contaccum.errors import ConfigError
from contaccum.evaluation.evaluator import RetrievalEvaluator
from contaccum.tuning import search as search_module
from contaccum.tuning.budget import Budget, parse_duration, show_duration
from contaccum.tuning.choice import Finished, choose_trial
from contaccum.tuning.search import JOURNAL
from contaccum.tuning.trial import Outcome, TooSlow, run_trial
from contaccum.tuning.tune import options_of_method


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """A saved model, pairs to train on, and a BEIR folder with the same queries to choose by."""
    root = tmp_path_factory.mktemp("tune")
    tiny_encoder().save_pretrained(str(root / "model"))
    documents = {f"d{row}": ("", text) for row, text in enumerate(sentences(40, 5, 9))}
    queries = {f"q{row}": text for row, text in enumerate(sentences(24, 6))}
    write_beir(
        root / "beir", documents, queries, [(f"q{row}", f"d{row}", 1) for row in range(24)], "dev"
    )
    pairs = [
        {"query": queries[f"q{row}"], "positive": documents[f"d{row}"][1]} for row in range(24)
    ]
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


def tune(root: Path, output: Path, *given: str) -> int:
    return main(["tune", str(root / "config.yaml"), "--output", str(output), *given])


def trials_of(output: Path) -> list[dict[str, Any]]:
    return json.loads((output / "tuned.json").read_text())["trials"]


def test_the_config_that_it_writes_is_trained_and_has_the_best_settings(
    root, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(search_module, "MOST_TRIALS", 8)
    corpus = str(root / "beir")
    assert (
        tune(
            root,
            tmp_path / "out",
            "--corpus",
            corpus,
            "--total_train_batch_size",
            "8",
            "--seed",
            "3",
        )
        == 0
    )
    said = capsys.readouterr().out
    assert said.startswith("BM25 ")
    assert "trial 1 of about" in said
    trials = trials_of(tmp_path / "out")
    assert len(trials) == 8
    # The start of each method first, then rates of the one that is ahead.
    assert [trial["settings"]["method"] for trial in trials[:3]] != 3 * ["contaccum"]
    assert all("total_train_batch_size" not in trial["settings"] for trial in trials)
    assert len({trial["settings"]["learning_rate"] for trial in trials}) > 3
    config = yaml.safe_load((tmp_path / "out" / "tuned.yaml").read_text())
    chosen = json.loads((tmp_path / "out" / "tuned.json").read_text())["choice"]["settings"]
    assert config["method"] == chosen["method"]
    assert float(config["learning_rate"]) == chosen["learning_rate"]
    assert main(["train", str(tmp_path / "out" / "tuned.yaml"), "--disable_tqdm", "true"]) == 0
    assert (tmp_path / "out" / "model" / "modules.json").is_file()


def test_a_trial_scores_the_documents_of_its_own_model(root, tmp_path):
    """Documents that stood still in a trial of the query tower are encoded anew where both towers are trained."""
    assert (
        main(
            [
                "encode",
                str(root / "model"),
                "--corpus",
                str(root / "beir"),
                "--output",
                str(tmp_path / "store"),
            ]
        )
        == 0
    )
    options: dict[str, list[str]] = {
        key: [str(value)]
        for key, value in yaml.safe_load((root / "config.yaml").read_text()).items()
    }
    options |= {"eval_strategy": ["epoch"], "learning_rate": ["0.02"]}
    options["use_cpu"] = ["true"]
    both = options_of_method(options, "contaccum", None)
    query_side = options_of_method(options, "query_side", tmp_path / "store")

    def score_of(evaluator: RetrievalEvaluator, of_run: Any) -> Any:
        return run_trial(
            of_run, evaluator, tmp_path / "run", 600.0, lambda scores: False
        ).query_scores

    shared = RetrievalEvaluator(load_beir_folder(root / "beir", "dev"))
    first = score_of(shared, query_side)
    assert shared.documents is not None
    alone = RetrievalEvaluator(load_beir_folder(root / "beir", "dev"))
    expected = score_of(alone, both)
    assert score_of(shared, both) == expected != first
    assert not (tmp_path / "run").exists()


def test_what_is_given_is_not_searched(root, tmp_path):
    given = ["--method", "contaccum", "--learning_rate", "0.02", "--temperature", "0.05"]
    given += [
        "--total_train_batch_size",
        "8",
        "--num_train_epochs",
        "1",
        "--num_hard_negatives",
        "0",
    ]
    assert tune(root, tmp_path / "out", *given) == 0
    [trial] = trials_of(tmp_path / "out")
    assert trial["settings"] == {"method": "contaccum"}
    config = yaml.safe_load((tmp_path / "out" / "tuned.yaml").read_text())
    assert (float(config["learning_rate"]), config["method"]) == (0.02, "contaccum")


def test_a_rung_whose_rate_was_rounded_is_tried_once(root, tmp_path):
    """A third of 5e-5 is tried as 1.7e-5, which is 0.34 of it."""
    (tmp_path / "rate.yaml").write_text("learning_rate: 5.0e-5\n")
    given = ["--method", "contaccum", "--temperature", "0.05", "--total_train_batch_size", "8"]
    given += [
        "--num_train_epochs",
        "1",
        "--num_hard_negatives",
        "0",
        "--output",
        str(tmp_path / "out"),
    ]
    assert main(["tune", str(root / "config.yaml"), str(tmp_path / "rate.yaml"), *given]) == 0
    rates = [trial["settings"]["learning_rate"] for trial in trials_of(tmp_path / "out")]
    assert rates[:3] == [5e-5, 1.5e-4, 1.7e-5]
    assert len(set(rates)) == len(rates)


def test_a_trial_that_fails_ends_its_ladder_and_not_the_search(root, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(search_module, "MOST_TRIALS", 5)

    def run_trial(options: Any, *_: Any) -> Outcome:
        rate = float(options["learning_rate"][0])
        if rate > 0.03:
            raise ConfigError("its loss is not finite")
        return Outcome({f"q{row}": rate for row in range(24)}, rate, 0.1, 9)

    monkeypatch.setattr(search_module, "run_trial", run_trial)
    given = [
        "--method",
        "contaccum",
        "--temperature",
        "0.05",
        "--num_train_epochs",
        "1",
        "--num_hard_negatives",
        "0",
    ]
    assert tune(root, tmp_path / "out", *given) == 0
    assert "its loss is not finite" in capsys.readouterr().out
    trials = trials_of(tmp_path / "out")
    assert [trial["note"] for trial in trials if trial["score"] is None] == [
        "its loss is not finite"
    ]
    assert max(trial["settings"]["learning_rate"] for trial in trials) < 0.1


def test_a_trial_that_takes_long_is_cut_and_stays_cut_after_a_kill(
    root, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(search_module, "MOST_TRIALS", 4)
    steps: list[str | None] = []

    def trial_of(kill_at: int) -> Any:
        def run_trial(options: Any, *_: Any) -> Outcome:
            steps.append(options.get("max_steps", [None])[0])
            if len(steps) == kill_at:
                raise Killed
            if steps[-1] is None:
                raise TooSlow(30, 500.0, 1.0)
            return Outcome({f"q{row}": 0.5 for row in range(24)}, 0.5, 0.1, int(steps[-1]))

        return run_trial

    monkeypatch.setattr(search_module, "run_trial", trial_of(2))
    with pytest.raises(Killed):
        tune(root, tmp_path / "out", "--method", "contaccum")
    monkeypatch.setattr(search_module, "run_trial", trial_of(0))
    assert tune(root, tmp_path / "out", "--method", "contaccum") == 0
    assert "a trial is cut to 30 updates" in capsys.readouterr().out
    assert steps == [None, *5 * ["30"]]
    assert [trial["updates"] for trial in trials_of(tmp_path / "out")] == 4 * [30]


def test_a_method_that_is_too_slow_is_left_out(root, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(search_module, "MOST_TRIALS", 9)
    tried = []

    def run_trial(options: Any, *_: Any) -> Outcome:
        tried.append(options["method"][0])
        if options["method"] == ["grad_cache"]:
            raise TooSlow(2, 5000.0, 50.0)
        rate = float(options["learning_rate"][0])
        return Outcome({f"q{row}": rate for row in range(24)}, rate, 0.1, 9)

    monkeypatch.setattr(search_module, "run_trial", run_trial)
    assert tune(root, tmp_path / "out") == 0
    assert tried.count("grad_cache") == 1
    assert (
        "too slow for the budget: a trial of grad_cache takes 83 minutes" in capsys.readouterr().out
    )
    assert len(trials_of(tmp_path / "out")) == 9


def test_mined_negatives_are_tried_and_the_config_has_those_that_were_chosen(
    root, tmp_path, monkeypatch
):
    """With made-up scores that prefer them; the negatives are documents of the corpus, and no positives."""
    monkeypatch.setattr(search_module, "MOST_TRIALS", 12)
    tried = []

    def run_trial(options: Any, *_: Any) -> Outcome:
        number = options.get("num_hard_negatives", ["0"])[0]
        tried.append((options["method"][0], number, Path(options["train_data"][0]).name))
        score = 0.9 if number == "1" else 0.1
        return Outcome({f"q{row}": score for row in range(24)}, score, 0.1, 9)

    monkeypatch.setattr(search_module, "run_trial", run_trial)
    given = [
        "--corpus",
        str(root / "beir"),
        "--learning_rate",
        "0.01",
        "--temperature",
        "0.05",
        "--seed",
        "1",
    ]
    assert tune(root, tmp_path / "out", *given, "--num_train_epochs", "1") == 0
    assert {("contaccum", "1", "mined.jsonl"), ("contaccum", "0", "pairs.jsonl")} <= set(tried)
    assert {row[1:] for row in tried if row[0] == "query_side"} <= {("0", "pairs.jsonl")}
    config = yaml.safe_load((tmp_path / "out" / "tuned.yaml").read_text())
    assert config["num_hard_negatives"] == 1
    records = [json.loads(line) for line in Path(config["train_data"]).read_text().splitlines()]
    documents = {
        document["text"] for document in load_beir_folder(root / "beir", "dev").corpus.values()
    }
    positives = {record["query"]: record["positive"] for record in records}
    assert len(records) == 24
    for record in records:
        for negative in record["negatives"]:
            assert negative in documents
            assert negative != positives[record["query"]]


class Killed(BaseException):
    """Stands for SIGKILL: nothing catches it."""


@pytest.mark.parametrize("killed_at", [0, 1, 4, 6])
def test_a_search_that_was_killed_goes_on_as_it_would_have(root, tmp_path, monkeypatch, killed_at):
    monkeypatch.setattr(search_module, "MOST_TRIALS", 7)
    given = ["--method", "contaccum", "--seed", "5"]
    made_up: dict[float, float] = {}

    def trial_of(kill_at: int | None) -> Any:
        calls = iter(range(100))

        def run_trial(options: Any, evaluator: Any, *_: Any) -> Outcome:
            if next(calls) == kill_at:
                raise Killed
            rate = float(options["learning_rate"][0])
            score = made_up.setdefault(rate, 1.0 / (1.0 + abs(rate - 0.004)))
            return Outcome({f"q{row}": score for row in range(24)}, score, 0.1, 9)

        return run_trial

    monkeypatch.setattr(search_module, "run_trial", trial_of(None))
    assert tune(root, tmp_path / "whole", *given) == 0
    monkeypatch.setattr(search_module, "run_trial", trial_of(killed_at))
    with pytest.raises(Killed):
        tune(root, tmp_path / "killed", *given)
    journal = tmp_path / "killed" / "search" / JOURNAL
    with journal.open("a") as file:
        file.write('{"op_code": 5, "worker')  # a line that a kill has cut short
    monkeypatch.setattr(search_module, "run_trial", trial_of(None))
    assert tune(root, tmp_path / "killed", *given) == 0
    whole = [(trial["settings"], trial["score"]) for trial in trials_of(tmp_path / "whole")]
    killed = [(trial["settings"], trial["score"]) for trial in trials_of(tmp_path / "killed")]
    assert killed == whole


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--budget", "soon"], "budget=soon: write a time such as 90s, 30m"),
        (["--budget", "0.001s"], "which leaves none for a trial"),
        (["--eval_data", "nanobeir"], "eval_data=nanobeir: tune on a BEIR folder"),
        (["--learnin_rate", "1"], "learning_rate"),
    ],
)
def test_what_cannot_be_tuned_is_said_in_one_line(
    root, tmp_path, given, message, capsys, monkeypatch
):
    monkeypatch.setattr("contaccum.training.config.NanoBEIR", lambda *_, **__: object())
    assert tune(root, tmp_path / "out", *given) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert message in error


def test_a_budget_goes_on_counting_after_a_kill(tmp_path):
    budget = Budget(60.0, tmp_path / "time.json")
    time.sleep(0.2)
    budget.save()
    again = Budget(60.0, tmp_path / "time.json")
    assert 0.2 <= again.used() < 20
    assert 40 < again.left() <= 59.8
    durations = [parse_duration(text) for text in ("90s", "30m", "1h30m", "2H", "1.5h")]
    assert durations == [90, 1800, 5400, 7200, 5400]
    assert [show_duration(seconds) for seconds in (45, 840, 9000)] == [
        "45 seconds",
        "14 minutes",
        "2.5 hours",
    ]
    for text in ("", "30", "-3m", "1.2.3m"):
        with pytest.raises(ConfigError, match="write a time"):
            parse_duration(text)


def made_trial(number: int, scores: list[float] | None, **settings: Any) -> Finished:
    if scores is None:
        return Finished(number, settings, None, {}, 1.0, 9, "stopped halfway")
    by_query = {f"q{row}": score for row, score in enumerate(scores)}
    return Finished(number, settings, sum(scores) / len(scores), by_query, 1.0, 9, "")


def test_another_setting_is_chosen_only_where_dev_data_decide():
    base = {f"q{row}": 0.2 for row in range(20)}
    ladder = [
        made_trial(i, 20 * [0.5 - 0.01 * abs(i - 1)], method="a", learning_rate=3.0**i)
        for i in range(3)
    ]
    lucky = made_trial(
        3, 19 * [0.45] + [1.6], method="a", learning_rate=3.0, temperature=0.1
    )  # by one query
    assert lucky.score > 0.5
    assert choose_trial([*ladder, lucky], base).trial == 1
    better = made_trial(4, 20 * [0.6], method="a", learning_rate=3.0, temperature=0.02)
    choice = choose_trial([*ladder, lucky, better, made_trial(5, None, method="b")], base)
    assert (choice.trial, choice.settings["temperature"]) == (4, 0.02)
    assert choice.against_base["difference"] == pytest.approx(0.4)
    assert choice.warnings == []


def test_a_choice_that_says_nothing_is_called_so():
    base = {f"q{row}": float(row % 2) for row in range(20)}
    noise = [float(row % 3 == 0) for row in range(20)]
    trials = [
        made_trial(0, noise, method="a", learning_rate=1.0),
        made_trial(1, noise[::-1], method="a", learning_rate=9.0),
    ]
    choice = choose_trial(trials, base)
    assert len(choice.warnings) == 2
    with pytest.raises(ConfigError, match="no trial was scored"):
        choose_trial([made_trial(0, None, method="a")], base)
