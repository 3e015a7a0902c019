"""Runs of models that are saved in half precision."""

from __future__ import annotations

import pytest
import torch
from sentence_transformers.sentence_transformer.modules import Dense
from tiny_models import tiny_encoder

from contaccum import DualEncoder
from contaccum.encoders.dual_encoder import train_query_tower_alone
from contaccum.encoders.settings import get_tower

LEARNING_RATE = 1e-5


@pytest.mark.parametrize("method", ["contaccum", "query_side"])
def test_weights_in_half_precision_are_trained_in_float32(places, train, tmp_path, method):
    """In bfloat16, such small changes of the weights would be lost to rounding."""
    tiny_encoder().bfloat16().save_pretrained(str(tmp_path / "model"))
    settings = {"model": tmp_path / "model", "learning_rate": LEARNING_RATE, "max_steps": 2}
    if method == "query_side":
        settings |= {"method": method, "bank_size": None}
        settings |= {"corpus": places / "beir/corpus.jsonl", "missing": "add"}
    assert train(tmp_path / "run", **settings) == 0
    base = DualEncoder.from_pretrained(tmp_path / "model", device="cpu")
    trained = DualEncoder.from_pretrained(tmp_path / "run", device="cpu")
    trained_weights = dict(get_tower(trained, "query").named_parameters())
    assert {weight.dtype for weight in trained_weights.values()} == {torch.float32}
    changes = []
    for name, base_weight in get_tower(base, "query").named_parameters():
        assert base_weight.dtype == torch.bfloat16
        change = trained_weights[name].detach() - base_weight.float()
        changes.append(float(change.abs().max()))
    # Two updates move a weight by at most about two learning rates.
    assert 0 < max(changes) < 10 * LEARNING_RATE


def test_weights_that_both_towers_share_keep_their_dtype():
    """The document tower must stay as it is, because a store may depend on it."""
    model = tiny_encoder(tied=False).bfloat16()
    model.append(Dense(32, 16).bfloat16())  # after the Router: used by both towers
    train_query_tower_alone(model)
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
