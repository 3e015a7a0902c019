"""Evaluation while training: it changes nothing that is trained, and the best model is the one that is kept."""

from __future__ import annotations

import json
import logging
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dev_sets import dev_set
from safetensors.torch import load_file
from sample_texts import write_training_and_beir_data

from contaccum import ContAccumTrainer
from contaccum.cli import main
from contaccum.errors import ConfigError
from contaccum.evaluation.beir import evaluate_beir
from contaccum.evaluation.retrieval_evaluator import RetrievalEvaluator
from contaccum.training.callbacks import EVAL_LOG, TRAIN_LOG
from contaccum.training.in_training import EvaluationCallback

EVERY = {"eval_strategy": "steps", "eval_steps": 1}
BEST = {**EVERY, "load_best_model_at_end": True, "metric_for_best_model": "ndcg@10", "save_strategy": "steps"}
BEST |= {"save_steps": 1}


class Told(RetrievalEvaluator):
    """Says that ndcg@10 after update N is ``figures[N]``; and draws random numbers, as an evaluator may."""

    def __init__(self, figures: dict[int, float], fingerprint: str = "d" * 64) -> None:
        super().__init__(dev_set(fingerprint))
        self.figures = figures
        self.asked: list[int] = []

    def __call__(self, model: Any, output_path: Any = None, epoch: float = -1, steps: int = -1) -> dict[str, float]:
        torch.rand(3), np.random.rand(3), random.random()
        self.asked.append(steps)
        return {**super().__call__(model, output_path, epoch, steps), "ndcg@10": self.figures[steps]}


def log_of(folder: Path, name: str = EVAL_LOG) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def state_of(trainer: ContAccumTrainer) -> dict[str, torch.Tensor]:
    state = {f"model.{key}": value for key, value in trainer.model.state_dict().items()}
    for loss in trainer.bank_losses():
        state |= {f"bank.{key}": value for key, value in loss.bank_state_dict().items()}
    return {**state, "rng": torch.get_rng_state(), "numpy": torch.tensor(np.random.get_state()[1].astype(np.int64))}


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_evaluated_run_equals_the_other_bit_for_bit(trainer_in: Any, tmp_path: Path, tied: bool) -> None:
    states, logs = [], []
    for folder, given in (("plain", {}), ("scored", {"evaluator": Told(dict.fromkeys(range(9), 0.5)), **EVERY})):
        trainer = trainer_in(tmp_path / folder, tied=tied, dropout=0.3, **given)
        trainer.train()
        states.append(state_of(trainer))
        logs.append([(line["loss"], line["bank_fill"]) for line in log_of(tmp_path / folder, TRAIN_LOG)])
    assert [key for key in states[0] if not torch.equal(states[0][key], states[1][key])] == []
    assert logs[0] == logs[1] and len(logs[0]) == 3
    assert [line["update"] for line in log_of(tmp_path / "scored")] == [1, 2, 3]


def test_figures_are_those_of_an_evaluation_of_the_same_model(trainer_in: Any, tmp_path: Path) -> None:
    evaluator = RetrievalEvaluator(dev_set(), ["ndcg@10", "MRR@5", "recall@3", "p@2", "map@20", "accuracy@1"])
    trainer = trainer_in(tmp_path, evaluator=evaluator, **EVERY)
    trainer.train()
    result = evaluate_beir(trainer.model, dev_set(), k_values=(1, 2, 3, 5, 10, 20), show_progress=False)
    last = log_of(tmp_path)[-1]
    names = {"ndcg@10": "NDCG@10", "mrr@5": "MRR@5", "recall@3": "Recall@3", "p@2": "P@2", "map@20": "MAP@20"}
    for ours, theirs in {**names, "accuracy@1": "Accuracy@1"}.items():
        assert last[f"eval_{ours}"] == pytest.approx(result.metrics[theirs], abs=1e-12)
    assert last["eval_runtime"] > 0 and "eval_samples_per_second" not in last
    assert not (tmp_path / "eval").exists()  # nothing is in it


def test_last_update_is_evaluated_whatever_the_interval(trainer_in: Any, tmp_path: Path) -> None:
    settings = {**EVERY, "eval_steps": 2, "eval_on_start": True}
    trainer_in(tmp_path, evaluator=Told(dict.fromkeys(range(9), 0.5)), **settings).train()
    assert [line["update"] for line in log_of(tmp_path)] == [0, 2, 3]


def test_best_checkpoint_outlives_the_limit_and_is_the_model_in_the_end(trainer_in: Any, tmp_path: Path) -> None:
    told = Told({1: 0.2, 2: 0.7, 3: 0.1})
    trainer = trainer_in(tmp_path, evaluator=told, save_total_limit=2, **BEST)
    trainer.train()
    assert [line.get("best") for line in log_of(tmp_path)] == [True, True, False]
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-3"]
    best = load_file(tmp_path / "checkpoint-2" / "model.safetensors")
    last = load_file(tmp_path / "checkpoint-3" / "model.safetensors")
    ours = {key.split(".", 1)[1]: value for key, value in trainer.model[0].state_dict().items() if "." in key}
    shared = best.keys() & ours.keys()
    assert shared and all(torch.equal(best[key], ours[key]) for key in shared)
    assert any(not torch.equal(best[key], last[key]) for key in shared)


def test_saving_only_the_best_keeps_one_checkpoint(trainer_in: Any, tmp_path: Path) -> None:
    told = Told({1: 0.2, 2: 0.4, 3: 0.1})
    settings = {**BEST, "save_strategy": "best", "save_total_limit": 1}
    trainer_in(tmp_path, evaluator=told, **settings).train()
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]


def test_best_that_was_not_saved_or_is_damaged_is_said_and_not_loaded(
    trainer_in: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = Told({1: 0.9, 2: 0.1, 3: 0.4})
    with caplog.at_level(logging.WARNING):
        trainer_in(tmp_path / "unsaved", evaluator=told, **{**BEST, "save_steps": 2}).train()
    assert "the best update, 1, was not saved" in caplog.text and "save_strategy=best" in caplog.text
    caplog.clear()
    trainer = trainer_in(tmp_path / "damaged", evaluator=told, **BEST)
    monkeypatch.setattr("contaccum.training.in_training.fault_of", lambda path: "model.safetensors is missing")
    with caplog.at_level(logging.WARNING):
        trainer.train()
    assert "checkpoint-1: the best model cannot be loaded (model.safetensors is missing)" in caplog.text


STOPS = {**BEST, "early_stopping_patience": 2, "max_steps": 5}
FALLING = {1: 0.5, 2: 0.6, 3: 0.4, 4: 0.55, 5: 0.9}


def test_patience_is_lost_evaluation_by_evaluation_across_restarts(
    trainer_in: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    straight = trainer_in(tmp_path, evaluator=Told(FALLING), **STOPS)
    with caplog.at_level(logging.WARNING):
        straight.train()
    assert straight.state.global_step == 4 and straight.state.best_global_step == 2
    assert "stopped early after update 4: 2 evaluations in a row without a better ndcg@10 than 0.6" in caplog.text

    resumed = trainer_in(tmp_path, evaluator=Told(FALLING), **STOPS)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))  # one of two was lost by then
    assert resumed.state.global_step == 4 and resumed.evaluator.asked == [4]
    assert [line["update"] for line in log_of(tmp_path)] == [1, 2, 3, 4]
    assert resumed.state.best_metric == 0.6
    assert resumed.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")

    again = trainer_in(tmp_path, evaluator=Told(FALLING), **STOPS)
    with caplog.at_level(logging.WARNING):
        again.train(resume_from_checkpoint="last")  # as a job that is started again and again does
    assert again.state.global_step == 4 and again.evaluator.asked == []
    assert "raise early_stopping_patience to go on" in caplog.text
    patient = trainer_in(tmp_path, evaluator=Told(FALLING), **{**STOPS, "early_stopping_patience": 9})
    patient.train(resume_from_checkpoint="last")
    assert patient.state.global_step == patient.state.best_global_step == 5


def test_better_by_less_than_the_threshold_is_not_better(trainer_in: Any, tmp_path: Path) -> None:
    rising = {n: 0.5 + n / 100 for n in range(1, 7)}
    trainer = trainer_in(tmp_path, evaluator=Told(rising), **STOPS, early_stopping_threshold=0.02)
    trainer.train()
    assert trainer.state.global_step == 3


@pytest.mark.parametrize("changed", ["data", "metric"])
def test_best_so_far_is_forgotten_when_it_was_measured_otherwise(
    trainer_in: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, changed: str
) -> None:
    trainer_in(tmp_path, evaluator=Told(FALLING), **{**STOPS, "max_steps": 2}).train()
    other = Told(FALLING, "e" * 64 if changed == "data" else "d" * 64)
    settings = {**STOPS, "max_steps": 3, "metric_for_best_model": "mrr@10" if changed == "metric" else "ndcg@10"}
    trainer = trainer_in(tmp_path, evaluator=other, **settings)
    with caplog.at_level(logging.WARNING):
        trainer.train(resume_from_checkpoint="last")
    assert "the best so far (0.6000 after update 2) was measured by another metric or on other data" in caplog.text
    assert trainer.state.best_global_step == trainer.state.global_step == 3


def test_evaluation_is_not_time_of_training(trainer_in: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, late = time.perf_counter, [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + late[0])

    class Slow(Told):
        def __call__(self, *args: Any, **kwargs: Any) -> dict[str, float]:
            late[0] += 1000.0
            return super().__call__(*args, **kwargs)

    trainer_in(tmp_path, evaluator=Slow(dict.fromkeys(range(9), 0.5)), **EVERY).train()
    assert max(line["seconds"] for line in log_of(tmp_path, TRAIN_LOG)) < 500


def test_without_a_metric_the_evaluators_own_decides(trainer_in: Any, tmp_path: Path) -> None:
    settings = {key: value for key, value in BEST.items() if key != "metric_for_best_model"}
    trainer = trainer_in(tmp_path, evaluator=Told(FALLING), **settings)
    assert trainer.args.metric_for_best_model == "eval_ndcg@10" and trainer.args.greater_is_better
    with pytest.raises(ConfigError, match=r"metric_for_best_model=ndcg@7: the evaluator measures ndcg@10, "):
        trainer_in(tmp_path, evaluator=Told(FALLING), **{**BEST, "metric_for_best_model": "ndcg@7"})


def test_callback_is_made_again_from_its_state() -> None:
    callback = EvaluationCallback(3, 0.1, {"metric": "eval_ndcg@10", "data": "d"})
    callback.early_stopping_patience_counter = 2
    again = EvaluationCallback.from_state(json.loads(json.dumps(callback.state())))
    assert again.state() == callback.state()


# The command -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def places(tiny_tokenizer: Any, tiny_config: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import AutoModel

    root = tmp_path_factory.mktemp("evaluated")
    write_training_and_beir_data(root, 24)
    AutoModel.from_config(tiny_config).save_pretrained(root / "backbone")
    tiny_tokenizer.save_pretrained(root / "backbone")
    return root


def command(places: Path, output: Path, **settings: Any) -> list[str]:
    given = {
        "model": places / "backbone",
        "train_data": places / "pairs.jsonl",
        "output_dir": output,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "bank_size": 8,
        "num_train_epochs": 1,
        "use_cpu": "true",
        "disable_tqdm": "true",
        "save_strategy": "no",
        "eval_data": places / "beir",
        "eval_split": "test",
        "eval_strategy": "steps",
        "eval_steps": 2,
        **settings,
    }
    return ["train", *(f"--{key}={value}" for key, value in given.items() if value is not None)]


def test_command_evaluates_stops_and_says_on_what(
    places: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"eval_corpus_size": 6, "save_strategy": "best", "early_stopping_patience": 5}
    assert main(command(places, tmp_path / "run", **settings, metric_for_best_model="Recall@1")) == 0
    said = capsys.readouterr().out
    assert "every 2 updates on beir (test): 4 queries, a sample of 6 of 8 documents, best by recall@1" in said
    lines = log_of(tmp_path / "run")
    assert [line["update"] for line in lines] == [2, 3] and 0 <= lines[0]["eval_recall@1"] <= 1
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["evaluation"]["sampled"] == "random" and record["evaluation"]["of_documents"] == 8
    assert record["evaluation"]["documents"] == 6 and len(record["evaluation"]["fingerprint"]) == 64


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"eval_data": None}, "eval_split=test without eval_data: nothing is evaluated"),
        ({"eval_data": None, "eval_split": None}, "eval_strategy=steps without eval_data"),
        ({"eval_strategy": "no"}, "with eval_strategy=no: it would never be looked at"),
        ({"eval_split": "dev"}, "no split 'dev'"),
        ({"eval_corpus_size": 0}, "eval_corpus_size must be at least 1, got 0"),
        ({"eval_corpus_sample": "bm25"}, "eval_corpus_sample=bm25 without eval_corpus_size"),
        ({"metric_for_best_model": "ndgc@10"}, "there is no metric 'ndgc@10'"),
        ({"metric_for_best_model": "ndcg@10", "greater_is_better": "false"}, "would keep the worst model"),
        ({"early_stopping_patience": 0}, "early_stopping_patience must be at least 1 evaluation"),
        ({"early_stopping_threshold": 0.1}, "early_stopping_threshold=0.1 without early_stopping_patience"),
        ({"early_stopping_patience": 1, "eval_strategy": "no"}, "early_stopping_patience=1 with eval_strategy=no"),
        ({"report_to": "tensorbord"}, "report_to=tensorbord: transformers knows no such tracker"),
    ],
)
def test_evaluation_that_cannot_be_is_refused_in_one_line(
    places: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], settings: dict[str, Any], said: str
) -> None:
    assert main(command(places, tmp_path / "run", **settings)) == 2
    error = capsys.readouterr().err.strip()
    assert said in error and len(error.splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_best_is_not_chosen_by_the_pairs_that_are_trained_on(
    places: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"train_data": places / "beir", "split": "test", "early_stopping_patience": 1}
    assert main(command(places, tmp_path / "run", **settings)) == 2
    assert "chosen by the very pairs it trains on" in capsys.readouterr().err
