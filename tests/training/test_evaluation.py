"""Evaluation while training: it changes nothing that is trained, and the best model is the one that is kept."""

import logging
import random
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sample_texts import sentences
from tiny_runs import get_state, list_differences, make_trainer, read_log

from contaccum.data import BeirDataset, RecordReport
from contaccum.errors import ConfigError
from contaccum.evaluation.evaluator import RetrievalEvaluator

EVERY = {"eval_strategy": "steps", "eval_steps": 1}
BEST = {
    **EVERY,
    "load_best_model_at_end": True,
    "metric_for_best_model": "ndcg@10",
    "save_strategy": "steps",
}
BEST |= {"save_steps": 1}
STOPS = {**BEST, "early_stopping_patience": 2, "max_steps": 5}
FALLING = {1: 0.5, 2: 0.6, 3: 0.4, 4: 0.55, 5: 0.9}


def dev_set() -> BeirDataset:
    """20 documents, 6 queries with two relevant documents each."""
    corpus = {f"d{n}": {"title": "", "text": text} for n, text in enumerate(sentences(20, 8))}
    queries = {f"q{n}": text for n, text in enumerate(sentences(6, 9))}
    qrels = {f"q{n}": {f"d{n}": 1, f"d{n + 10}": 1} for n in range(6)}
    return BeirDataset(
        "made", corpus, queries, qrels, "dev", "d" * 64, Path("made"), RecordReport("stop")
    )


class Figures(RetrievalEvaluator):
    """Says that ndcg@10 after update N is ``figures[N]``; and draws random numbers, as an evaluator may."""

    def __init__(self, figures: dict[int, float]) -> None:
        super().__init__(dev_set())
        self.figures = figures
        self.asked: list[int] = []

    def __call__(
        self, model: Any, output_path: Any = None, epoch: float = -1, steps: int = -1
    ) -> dict[str, float]:
        torch.rand(3), np.random.rand(3), random.random()
        self.asked.append(steps)
        return {"ndcg@10": self.figures[steps], "mrr@10": 0.1}


def test_an_evaluated_run_equals_the_other_bit_for_bit(tmp_path):
    states, logs = [], []
    for folder, given in (
        ("plain", {}),
        ("scored", {"evaluator": RetrievalEvaluator(dev_set()), **EVERY}),
    ):
        trainer = make_trainer(tmp_path / folder, dropout=0.3, **given)
        trainer.train()
        states.append(
            get_state(trainer) | {"numpy": torch.tensor(np.random.get_state()[1].astype(np.int64))}
        )
        logs.append([(line["loss"], line["bank_fill"]) for line in read_log(tmp_path / folder)])
    assert list_differences(*states) == [] and logs[0] == logs[1] and len(logs[0]) == 3
    assert [line["update"] for line in read_log(tmp_path / "scored", "eval_log.jsonl")] == [1, 2, 3]


def test_a_best_checkpoint_that_another_run_wrote_is_not_loaded(tmp_path, caplog):
    first = tmp_path / "first"
    make_trainer(first, evaluator=Figures(FALLING), **BEST, max_steps=3).train()
    make_trainer(tmp_path / "other", learning_rate=1.0, save_strategy="steps", save_steps=1).train()
    shutil.rmtree(first / "checkpoint-2")  # the best one
    shutil.copytree(tmp_path / "other" / "checkpoint-2", first / "checkpoint-2")
    resumed = make_trainer(tmp_path / "resumed", evaluator=Figures(FALLING), **BEST, max_steps=4)
    with caplog.at_level(logging.WARNING):
        resumed.train(resume_from_checkpoint=str(first / "checkpoint-3"))
    assert f"{first / 'checkpoint-2'}, cannot be used: it belongs to another run" in caplog.text
    last = load_file(tmp_path / "resumed" / "checkpoint-4" / "model.safetensors")
    assert all(
        torch.equal(value, last[name])
        for name, value in resumed.model[0].model.state_dict().items()
    )


def test_the_last_update_is_evaluated_whatever_the_interval(tmp_path):
    settings = {**EVERY, "eval_steps": 2, "eval_on_start": True}
    make_trainer(tmp_path, evaluator=Figures({n: n / 10 for n in range(4)}), **settings).train()
    log = read_log(tmp_path, "eval_log.jsonl")
    assert [(line["update"], line["eval_ndcg@10"]) for line in log] == [
        (0, 0.0),
        (2, 0.2),
        (3, 0.3),
    ]
    assert all(line["eval_runtime"] > 0 and "eval_samples_per_second" not in line for line in log)


def test_the_best_checkpoint_outlives_the_limit_and_is_the_model_in_the_end(tmp_path):
    trainer = make_trainer(
        tmp_path, evaluator=Figures({1: 0.2, 2: 0.7, 3: 0.1}), save_total_limit=2, **BEST
    )
    trainer.train()
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == [
        "checkpoint-2",
        "checkpoint-3",
    ]
    best, last = (load_file(tmp_path / f"checkpoint-{n}" / "model.safetensors") for n in (2, 3))
    ours = {
        key.split(".", 1)[1]: value
        for key, value in trainer.model[0].state_dict().items()
        if "." in key
    }
    shared = best.keys() & ours.keys()
    assert shared and all(torch.equal(best[key], ours[key]) for key in shared)
    assert any(not torch.equal(best[key], last[key]) for key in shared)


def test_patience_is_lost_evaluation_by_evaluation_across_restarts(tmp_path, caplog):
    straight = make_trainer(tmp_path, 72, evaluator=Figures(FALLING), **STOPS)
    with caplog.at_level(logging.WARNING):
        straight.train()
    assert straight.state.global_step == 4 and straight.state.best_global_step == 2
    assert "stopped early after update 4: no better ndcg@10 than 0.6" in caplog.text

    resumed = make_trainer(tmp_path, 72, evaluator=Figures(FALLING), **STOPS)
    resumed.train(
        resume_from_checkpoint=str(tmp_path / "checkpoint-3")
    )  # one of two was lost by then
    assert resumed.state.global_step == 4 and resumed.evaluator.asked == [4]
    assert [line["update"] for line in read_log(tmp_path, "eval_log.jsonl")] == [1, 2, 3, 4]
    assert resumed.state.best_metric == 0.6
    assert resumed.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")

    again = make_trainer(tmp_path, 72, evaluator=Figures(FALLING), **STOPS)
    again.train(resume_from_checkpoint="last")  # as a job that is started again and again does
    assert again.state.global_step == 4 and again.evaluator.asked == []
    assert (
        list_differences(
            *(
                {"w": torch.cat([p.flatten() for p in x.model.parameters()])}
                for x in (straight, again)
            )
        )
        == []
    )
    patient = make_trainer(
        tmp_path, 72, evaluator=Figures(FALLING), **{**STOPS, "early_stopping_patience": 9}
    )
    patient.train(resume_from_checkpoint="last")
    assert patient.state.global_step == patient.state.best_global_step == 5


def test_an_evaluation_is_not_time_of_training(tmp_path, monkeypatch):
    clock, late = time.perf_counter, [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + late[0])

    class Slow(Figures):
        def __call__(self, *args: Any, **kwargs: Any) -> dict[str, float]:
            late[0] += 1000.0
            return super().__call__(*args, **kwargs)

    make_trainer(tmp_path, evaluator=Slow(dict.fromkeys(range(9), 0.5)), **EVERY).train()
    assert max(line["seconds"] for line in read_log(tmp_path)) < 500


def test_without_a_metric_the_evaluators_own_decides(tmp_path):
    settings = {key: value for key, value in BEST.items() if key != "metric_for_best_model"}
    for given in (settings, {**EVERY, "save_strategy": "best"}):
        trainer = make_trainer(tmp_path, evaluator=Figures(FALLING), **given)
        assert (
            trainer.args.metric_for_best_model == "eval_ndcg@10" and trainer.args.greater_is_better
        )
    with pytest.raises(
        ConfigError, match=r"metric_for_best_model=ndcg@7: the evaluator computes ndcg@10, "
    ):
        make_trainer(
            tmp_path, evaluator=Figures(FALLING), **{**BEST, "metric_for_best_model": "ndcg@7"}
        )
