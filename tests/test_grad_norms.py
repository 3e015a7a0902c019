"""The towers' gradient norms are those that the optimizer gets, and balanced they meet at their geometric mean."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from sample_texts import sentences

from contaccum import DualEncoder
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
    resumed = GradNormBalancer()
    resumed.load_state_dict(balancer.state_dict())
    for each in (balancer, resumed):
        each.observe(3.0, 2.0)
    assert resumed.factors() == balancer.factors()
    assert {value.dtype for value in balancer.state_dict().values()} == {torch.float32}  # Apple's GPUs have no float64


def norm(module: torch.nn.Module) -> float:
    return torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None]).norm().item()


def test_untied_towers_reach_the_optimizer_with_the_norms_that_are_read(tiny_config: Any, tiny_tokenizer: Any) -> None:
    ratios: dict[bool, list[float]] = {}
    for balanced in (False, True):
        torch.manual_seed(0)
        model = DualEncoder.from_backbone(tiny_config, tied=False, pooling="mean", tokenizer=tiny_tokenizer)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        norms = TowerGradNorms(model, GradNormBalancer() if balanced else None)
        ratios[balanced] = []
        for step in range(8):
            scale = 2.0**step  # a gradient scaler's
            for task, size in (("query", 5.0), ("document", 1.0)):
                embeddings = model(model.preprocess(sentences(6, step), task=task))["sentence_embedding"]
                ((embeddings * torch.randn(32)).sum() * size * scale).backward()
            values = norms.read(scale)
            assert norm(model.query_encoder) / scale == pytest.approx(values["grad_norm_query"], rel=1e-4)
            assert norm(model.passage_encoder) / scale == pytest.approx(values["grad_norm_passage"], rel=1e-4)
            ratio = values["grad_norm_passage"] / values["grad_norm_query"]
            assert values["grad_norm_ratio"] == pytest.approx(ratio)
            assert ("grad_norm_ratio_unbalanced" in values) == balanced
            ratios[balanced].append(abs(math.log(ratio)))
            optimizer.step()
            optimizer.zero_grad()
    assert ratios[True][0] == pytest.approx(0.0, abs=1e-5)  # nothing is smoothed yet
    assert min(ratios[False]) > 1.0 and max(ratios[True]) < 0.6


def test_tied_towers_scale_their_embeddings_gradients_by_past_updates(tiny_config: Any, tiny_tokenizer: Any) -> None:
    model = DualEncoder.from_backbone(tiny_config, pooling="mean", tokenizer=tiny_tokenizer).eval()
    norms = TowerGradNorms(model, GradNormBalancer())
    features = {task: {**model.preprocess(["a b c"]), "task": task} for task in ("query", "document")}
    weights = next(model.parameters())

    def backward(task: str, size: float) -> float:
        model.zero_grad()
        (model(dict(features[task]))["sentence_embedding"].sum() * size).backward()
        return float(weights.grad.norm())

    plain = {task: backward(task, size) for task, size in (("query", 4.0), ("document", 1.0))}
    first = norms.read()
    assert first["grad_norm_query"] == pytest.approx(4 * math.sqrt(32))
    assert first["grad_norm_ratio"] == first["grad_norm_ratio_unbalanced"] == pytest.approx(0.25)
    balanced = {task: backward(task, size) for task, size in (("query", 4.0), ("document", 1.0))}
    assert balanced["query"] == pytest.approx(plain["query"] * 0.5)
    assert balanced["document"] == pytest.approx(plain["document"] * 2.0)
    second = norms.read()
    assert second["grad_norm_ratio"] == pytest.approx(1.0)
    assert second["grad_norm_ratio_unbalanced"] == pytest.approx(0.25)
    assert norms.read() == {}
    norms.close()
    assert backward("query", 4.0) == pytest.approx(plain["query"]) and norms.read() == {}
