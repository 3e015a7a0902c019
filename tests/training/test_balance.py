"""balance_grad_norms: the towers' gradients meet at the geometric mean of their norms, and resume."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from test_trainer import arguments, build, log_of, pairs, state_of  # noqa: F401  # build is a fixture

from contaccum import ContAccumTrainer
from contaccum.errors import ConfigError, UserError
from contaccum.grad_norms import GradNormBalancer, TowerGradNorms


def test_factors_meet_at_the_geometric_mean_and_pass_over_what_is_not_finite() -> None:
    balancer = GradNormBalancer()
    assert balancer.factors() == {"query": 1.0, "passage": 1.0}
    for _ in range(30):
        balancer.observe(4.0, 1.0)
    for query, passage in ((math.inf, 1.0), (1.0, math.nan), (0.0, 1.0)):
        balancer.observe(query, passage)
    assert balancer.factors() == {"query": pytest.approx(0.5), "passage": pytest.approx(2.0)}
    balancer.observe(1.0, 4.0)  # one update of ten moves them, and not all the way
    assert 0.5 < balancer.factors()["query"] < 1.0


def norms_at_the_step(trainer: ContAccumTrainer) -> list[dict[str, float]]:
    """What the optimizer gets, by tower."""
    seen: list[dict[str, float]] = []

    def look(*_: Any) -> None:
        towers = {"query": trainer.model.query_encoder, "passage": trainer.model.passage_encoder}
        seen.append(
            {
                name: torch.cat([p.grad.flatten() for p in tower.parameters() if p.grad is not None]).norm().item()
                for name, tower in towers.items()
            }
        )

    create = trainer.create_optimizer

    def create_and_watch(*args: Any, **kwargs: Any) -> Any:
        optimizer = create(*args, **kwargs)
        optimizer.register_step_pre_hook(look)
        return optimizer

    trainer.create_optimizer = create_and_watch  # type: ignore[method-assign]
    trainer.train()
    return seen


@pytest.mark.parametrize("max_grad_norm", [0.0, 1e-3], ids=["unclipped", "clipped"])
def test_untied_towers_reach_the_optimizer_with_the_norms_that_the_log_gives(
    build: Any,  # noqa: F811
    tmp_path: Path,
    max_grad_norm: float,
) -> None:
    ratios = {}
    for balance in ("none", "geometric"):
        folder = tmp_path / balance
        settings = {"balance_grad_norms": balance, "max_grad_norm": max_grad_norm, "bank_size": 40}
        # The default takes the common push out of the passages' gradients, and with it much of the imbalance.
        args = arguments(folder, "pre_batch", drift_compensation="mean", **settings)
        trainer = ContAccumTrainer(model=build(tied=False), args=args, train_dataset=pairs(48))
        seen, log = norms_at_the_step(trainer), log_of(folder)
        assert len(seen) == len(log) == 8
        for at_step, line in zip(seen, log, strict=True):
            assert at_step["passage"] / at_step["query"] == pytest.approx(line["grad_norm_ratio"], rel=1e-4)
            if max_grad_norm == 0:
                assert at_step["query"] == pytest.approx(line["grad_norm_query"], rel=1e-4)
        ratios[balance] = [abs(math.log(line["grad_norm_ratio"])) for line in log]
        if balance == "geometric":
            assert log[0]["grad_norm_ratio"] == pytest.approx(1.0)  # nothing is smoothed yet
            product = log[3]["grad_norm_query"] * log[3]["grad_norm_passage"]
            assert product > 0 and log[3]["grad_norm_ratio_unbalanced"] != pytest.approx(1.0, abs=1e-3)
        else:
            assert all("grad_norm_ratio_unbalanced" not in line for line in log)
    assert sum(ratios["geometric"]) < 0.5 * sum(ratios["none"])


def test_tied_towers_scale_their_embeddings_gradients_by_earlier_updates(build: Any) -> None:  # noqa: F811
    model = build(tied=True)
    balancer = GradNormBalancer()
    norms = TowerGradNorms(model, balancer)
    features = {task: {**model.tokenize(["a b c"]), "task": task} for task in ("query", "document")}
    weights = next(model.parameters())

    def backward(task: str, size: float) -> float:
        model.zero_grad()
        (model(features[task])["sentence_embedding"].sum() * size).backward()
        return float(weights.grad.norm())

    model.eval()
    plain = {task: backward(task, size) for task, size in (("query", 4.0), ("document", 1.0))}
    first = norms.read()
    assert first["grad_norm_ratio"] == first["grad_norm_ratio_unbalanced"] == pytest.approx(0.25)
    balanced = {task: backward(task, size) for task, size in (("query", 4.0), ("document", 1.0))}
    assert balanced["query"] == pytest.approx(plain["query"] * 0.5)
    assert balanced["document"] == pytest.approx(plain["document"] * 2.0)
    second = norms.read()
    assert second["grad_norm_ratio"] == pytest.approx(1.0)
    assert second["grad_norm_ratio_unbalanced"] == pytest.approx(0.25)


@pytest.mark.parametrize("method", ["pre_batch", "grad_accum"])
def test_balanced_run_resumes_bit_for_bit(build: Any, tmp_path: Path, method: str) -> None:  # noqa: F811
    settings = {"balance_grad_norms": "geometric", "save_strategy": "steps", "save_steps": 1}
    straight = ContAccumTrainer(
        model=build(tied=False), args=arguments(tmp_path / "a", method, **settings), train_dataset=pairs(36)
    )
    straight.train()
    args = arguments(tmp_path / "b", method, balance_grad_norms="geometric")
    resumed = ContAccumTrainer(model=build(tied=False), args=args, train_dataset=pairs(36))
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
    expected, state = state_of(straight), state_of(resumed)
    assert [key for key in expected if not torch.equal(state[key], expected[key])] == []
    args = arguments(tmp_path / "c", method)
    ContAccumTrainer(model=build(tied=False), args=args, train_dataset=pairs(36)).train(
        resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2")
    )  # without balance: its state is left alone
    unbalanced = arguments(tmp_path / "d", method, save_strategy="steps", save_steps=1, max_steps=1)
    ContAccumTrainer(model=build(tied=False), args=unbalanced, train_dataset=pairs(36)).train()
    with pytest.raises(UserError):
        args = arguments(tmp_path / "e", method, balance_grad_norms="geometric")
        ContAccumTrainer(model=build(tied=False), args=args, train_dataset=pairs(36)).train(
            resume_from_checkpoint=str(tmp_path / "d" / "checkpoint-1")
        )


def test_unknown_balance_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="balance_grad_norms must be one of none, geometric"):
        arguments(tmp_path, balance_grad_norms="mean")
