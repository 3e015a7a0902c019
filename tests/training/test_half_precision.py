"""Runs of models that are saved in half precision."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from sample_texts import sentences
from sentence_transformers.sentence_transformer.modules import Dense
from small_data import write_lines
from tiny_models import tiny_encoder

from contaccum import DualEncoder
from contaccum.cli import main
from contaccum.encoders.dual_encoder import train_query_tower_alone
from contaccum.encoders.settings import get_tower

LEARNING_RATE = 1e-5


def train_saved_in_bfloat16(tmp_path: Path, method: str) -> Path:
    """Save a tiny model in bfloat16 and train it for two updates; return the folder of the run."""
    tiny_encoder().bfloat16().save_pretrained(str(tmp_path / "model"))
    pairs = []
    documents = []
    for query, positive in zip(sentences(8, 1), sentences(8, 2, 9), strict=True):
        pairs.append({"query": query, "positive": positive})
        documents.append({"_id": query, "text": positive})
    settings = {
        "model": tmp_path / "model",
        "train_data": write_lines(tmp_path / "pairs.jsonl", pairs),
        "output_dir": tmp_path / method,
        "method": method,
        "per_device_train_batch_size": 4,
        "learning_rate": LEARNING_RATE,
        "max_steps": 2,
        "save_strategy": "no",
        "use_cpu": "true",
        "disable_tqdm": "true",
    }
    if method == "query_side":
        settings["corpus"] = write_lines(tmp_path / "corpus.jsonl", documents)
    options = [f"--{name}={value}" for name, value in settings.items()]
    assert main(["train", *options]) == 0
    return tmp_path / method


@pytest.mark.parametrize("method", ["contaccum", "query_side"])
def test_weights_in_half_precision_are_trained_in_float32(tmp_path, method):
    """In bfloat16, such small changes of the weights would be lost to rounding."""
    folder = train_saved_in_bfloat16(tmp_path, method)
    base = DualEncoder.from_pretrained(tmp_path / "model", device="cpu")
    trained = DualEncoder.from_pretrained(folder, device="cpu")
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
