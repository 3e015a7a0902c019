"""Gradient norms of the towers, computed from the gradients of the embeddings."""

import math

import pytest

from contaccum import DualEncoder
from contaccum.encoders.grad_norms import TowerGradNorms


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied but sharded"])
def test_norms_of_tied_or_sharded_towers_are_those_of_the_embeddings(
    tied, tiny_config, tiny_tokenizer
):
    """After `close`, the hook is removed and no norms are collected."""
    model = DualEncoder.from_backbone(
        tiny_config, tied=tied, pooling="mean", tokenizer=tiny_tokenizer
    ).eval()
    norms = TowerGradNorms(model, model, has_whole_gradients=tied)
    for repeat in ("hooked", "closed"):
        for task, size in (("query", 4.0), ("document", 1.0)):
            embeddings = model({**model.preprocess(["a b c"]), "task": task})["sentence_embedding"]
            (embeddings.sum() * size).backward()
        if repeat == "hooked":
            values = norms.read()
            assert values["grad_norm_query"] == pytest.approx(4 * math.sqrt(32))
            assert values["grad_norm_ratio"] == pytest.approx(0.25)
            norms.close()
        assert norms.read() == {}
