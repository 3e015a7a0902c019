"""Evaluation during training, early stopping, and the choice of the best model."""

import logging
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sample_texts import sentences
from sentence_transformers.sentence_transformer.evaluation import SentenceEvaluator
from tiny_runs import (
    SAVE_EVERY_UPDATE,
    get_state,
    list_differences,
    make_pairs,
    make_trainer,
    read_log,
)

from contaccum.data import BeirDataset, RecordReport
from contaccum.errors import ConfigError
from contaccum.evaluation.evaluator import RetrievalEvaluator

EVALUATE = {"eval_strategy": "steps", "eval_steps": 1}
LOAD_BEST = {
    **EVALUATE,
    **SAVE_EVERY_UPDATE,
    "load_best_model_at_end": True,
    "metric_for_best_model": "ndcg@10",
}
STOP_EARLY = {**LOAD_BEST, "early_stopping_patience": 2, "max_steps": 5}
SCORES = {1: 0.5, 2: 0.6, 3: 0.4, 4: 0.55, 5: 0.9}
"""ndcg@10 after each update; it does not rise between updates 2 and 5."""


def make_dev_set() -> BeirDataset:
    """Return a set of 20 documents and 6 queries with two relevant documents each."""
    corpus = {f"d{n}": {"title": "", "text": text} for n, text in enumerate(sentences(20, 8))}
    queries = {f"q{n}": text for n, text in enumerate(sentences(6, 9))}
    qrels = {f"q{n}": {f"d{n}": 1, f"d{n + 10}": 1} for n in range(6)}
    report = RecordReport("stop")
    return BeirDataset("made", corpus, queries, qrels, "dev", "d" * 64, Path("made"), report)


class FixedScores(RetrievalEvaluator):
    """An evaluator that returns fixed scores by update, and draws random numbers."""

    def __init__(self, scores: dict[int, float]) -> None:
        super().__init__(make_dev_set())
        self.scores = scores
        self.evaluated_updates: list[int] = []

    def __call__(
        self, model: Any, output_path: Any = None, epoch: float = -1, steps: int = -1
    ) -> dict[str, float]:
        torch.rand(3)
        np.random.rand(3)
        random.random()
        self.evaluated_updates.append(steps)
        return {"ndcg@10": self.scores[steps], "mrr@10": 0.1}


def test_an_evaluated_run_equals_an_unevaluated_one_bit_for_bit(tmp_path):
    states = []
    logs = []
    evaluation = {"evaluator": RetrievalEvaluator(make_dev_set()), **EVALUATE}
    for name, settings in (("plain", {}), ("evaluated", evaluation)):
        trainer = make_trainer(tmp_path / name, dropout=0.3, **settings)
        trainer.train()
        state = get_state(trainer)
        state["numpy"] = torch.tensor(np.random.get_state()[1].astype(np.int64))
        states.append(state)
        log = read_log(tmp_path / name)
        logs.append([(line["loss"], line["bank_fill"]) for line in log])
    assert list_differences(*states) == []
    assert logs[0] == logs[1]
    assert len(logs[0]) == 3
    eval_log = read_log(tmp_path / "evaluated", "eval_log.jsonl")
    assert [line["update"] for line in eval_log] == [1, 2, 3]


def test_the_last_update_is_evaluated_with_any_interval(tmp_path):
    evaluator = FixedScores({0: 0.0, 1: 0.1, 2: 0.2, 3: 0.3})
    settings = {**EVALUATE, "eval_steps": 2, "eval_on_start": True}
    make_trainer(tmp_path, evaluator=evaluator, **settings).train()
    log = read_log(tmp_path, "eval_log.jsonl")
    scores = [(line["update"], line["eval_ndcg@10"]) for line in log]
    assert scores == [(0, 0.0), (2, 0.2), (3, 0.3)]
    for line in log:
        assert line["eval_runtime"] > 0
        assert "eval_samples_per_second" not in line


def test_the_best_checkpoint_and_folders_of_the_user_remain_and_the_best_is_loaded(tmp_path):
    evaluator = FixedScores({1: 0.2, 2: 0.7, 3: 0.1})
    trainer = make_trainer(tmp_path, evaluator=evaluator, save_total_limit=1, **LOAD_BEST)
    (tmp_path / "checkpoint-1-copy").mkdir()
    trainer.train()
    assert trainer.args.save_total_limit == 1
    names = sorted(path.name for path in tmp_path.glob("checkpoint-*"))
    assert names == ["checkpoint-1-copy", "checkpoint-2", "checkpoint-3"]
    best = load_file(tmp_path / "checkpoint-2" / "model.safetensors")
    last = load_file(tmp_path / "checkpoint-3" / "model.safetensors")
    state = trainer.model[0].state_dict()
    loaded = {key.partition(".")[2]: value for key, value in state.items()}
    shared = best.keys() & loaded.keys()
    assert shared
    assert all(torch.equal(best[key], loaded[key]) for key in shared)
    assert any(not torch.equal(best[key], last[key]) for key in shared)


def test_early_stopping_counts_evaluations_across_restarts(tmp_path, caplog):
    def make(**changes: Any) -> Any:
        evaluator = FixedScores(SCORES)
        return make_trainer(tmp_path, 72, evaluator=evaluator, **{**STOP_EARLY, **changes})

    straight = make()
    with caplog.at_level(logging.WARNING):
        straight.train()
    assert straight.state.global_step == 4
    assert straight.state.best_global_step == 2
    assert "stopped early after update 4: no better ndcg@10 than 0.6" in caplog.text

    # At checkpoint 3, one of the two evaluations without improvement is counted.
    resumed = make()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert resumed.state.global_step == 4
    assert resumed.evaluator.evaluated_updates == [4]
    eval_log = read_log(tmp_path, "eval_log.jsonl")
    assert [line["update"] for line in eval_log] == [1, 2, 3, 4]
    assert resumed.state.best_metric == 0.6
    assert resumed.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")

    # A job that is started again after it has stopped early trains nothing.
    again = make()
    again.train(resume_from_checkpoint="last")
    assert again.state.global_step == 4
    assert again.evaluator.evaluated_updates == []
    assert all(map(torch.equal, straight.model.parameters(), again.model.parameters()))

    patient = make(early_stopping_patience=9)
    patient.train(resume_from_checkpoint="last")
    assert patient.state.global_step == patient.state.best_global_step == 5


@pytest.mark.parametrize("loads_best", [True, False])
def test_a_finished_run_whose_newest_checkpoint_is_its_best_ends_again_with_the_same_model(
    tmp_path, loads_best
):
    """With save_strategy=best there is no checkpoint of the end."""
    settings = {**EVALUATE, "save_strategy": "best", "load_best_model_at_end": loads_best}

    def make(max_steps: int) -> Any:
        evaluator = FixedScores(SCORES)
        return make_trainer(tmp_path, 72, evaluator=evaluator, max_steps=max_steps, **settings)

    straight = make(4)
    straight.train()
    straight.save_model(str(tmp_path))
    assert max(path.name for path in tmp_path.glob("checkpoint-*")) == "checkpoint-2"
    again = make(4)
    again.train(resume_from_checkpoint="last")
    assert all(map(torch.equal, straight.model.parameters(), again.model.parameters()))
    longer = make(5)
    longer.train(resume_from_checkpoint="last")
    assert longer.state.global_step == 5


@pytest.mark.parametrize(
    ("owner", "name"),
    [(FixedScores, "__call__"), (torch, "save")],
    ids=["evaluation", "checkpoint"],
)
def test_time_that_is_not_training_is_not_counted(owner, name, tmp_path, monkeypatch):
    clock = time.perf_counter
    delay = 0.0
    function = getattr(owner, name)

    def slow_function(*args: Any, **kwargs: Any) -> Any:
        nonlocal delay
        delay += 1000.0
        return function(*args, **kwargs)

    monkeypatch.setattr(time, "perf_counter", lambda: clock() + delay)
    monkeypatch.setattr(owner, name, slow_function)
    evaluator = FixedScores(dict.fromkeys(range(9), 0.5))
    make_trainer(tmp_path, evaluator=evaluator, **EVALUATE, **SAVE_EVERY_UPDATE).train()
    assert delay > 0
    assert max(line["seconds"] for line in read_log(tmp_path)) < 500


@pytest.mark.parametrize(
    "saves", [{**SAVE_EVERY_UPDATE, "load_best_model_at_end": True}, {"save_strategy": "best"}]
)
def test_the_default_metric_is_the_evaluators_main_metric(tmp_path, saves):
    trainer = make_trainer(tmp_path, evaluator=FixedScores(SCORES), **EVALUATE, **saves)
    assert trainer.args.metric_for_best_model == "eval_ndcg@10"
    assert trainer.args.greater_is_better


def test_early_stopping_without_an_evaluator_watches_the_loss(tmp_path):
    settings = {**EVALUATE, "early_stopping_patience": 1, "eval_dataset": make_pairs(8)}
    trainer = make_trainer(tmp_path, learning_rate=1e-30, **settings)
    trainer.train()
    assert trainer.args.metric_for_best_model == "loss"
    assert not trainer.args.greater_is_better
    assert trainer.state.global_step == 2  # the loss does not change


class OtherEvaluator(SentenceEvaluator):
    """An evaluator that chooses its main metric only in its first evaluation."""


def test_another_evaluator_needs_a_named_metric(tmp_path):
    settings: dict[str, Any] = {**EVALUATE, "evaluator": OtherEvaluator()}
    with pytest.raises(ConfigError, match="metric of OtherEvaluator"):
        make_trainer(tmp_path, **settings, save_strategy="best")
    settings["metric_for_best_model"] = "accuracy"
    make_trainer(tmp_path, **settings, save_strategy="best")
