"""The towers' gradient norms are those that the optimizer gets."""

import math

import pytest
import torch
from sample_texts import sentences

from contaccum import DualEncoder
from contaccum.grad_norms import TowerGradNorms


def test_norms_of_untied_towers_are_those_of_their_weights(tiny_config, tiny_tokenizer):
    model = DualEncoder.from_backbone(tiny_config, tied=False, pooling="mean", tokenizer=tiny_tokenizer)
    scale = 8.0  # a gradient scaler's
    for task, size in (("query", 5.0), ("document", 1.0)):
        embeddings = model(model.preprocess(sentences(6), task=task))["sentence_embedding"]
        ((embeddings * torch.randn(32)).sum() * size * scale).backward()
    values = TowerGradNorms(model).read(scale)
    for name, tower in (("query", model.query_encoder), ("passage", model.passage_encoder)):
        norm = torch.cat([p.grad.flatten() for p in tower.parameters() if p.grad is not None]).norm().item()
        assert norm / scale == pytest.approx(values[f"grad_norm_{name}"], rel=1e-4)
    assert values["grad_norm_ratio"] == pytest.approx(values["grad_norm_passage"] / values["grad_norm_query"])


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied but sharded"])
def test_norms_where_no_tower_has_a_gradient_of_its_own_are_those_of_embeddings(tied, tiny_config, tiny_tokenizer):
    model = DualEncoder.from_backbone(tiny_config, tied=tied, pooling="mean", tokenizer=tiny_tokenizer).eval()
    norms = TowerGradNorms(model, whole=tied)
    for repeat in ("watched", "closed"):
        for task, size in (("query", 4.0), ("document", 1.0)):
            embeddings = model({**model.preprocess(["a b c"]), "task": task})["sentence_embedding"]
            (embeddings.sum() * size).backward()
        if repeat == "watched":
            values = norms.read()
            assert values["grad_norm_query"] == pytest.approx(4 * math.sqrt(32))
            assert values["grad_norm_ratio"] == pytest.approx(0.25)
            norms.close()
        assert norms.read() == {}
