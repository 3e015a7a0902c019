"""Training of adapters: unchanged base weights, resuming, further training."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sample_texts import sentences
from sentence_transformers import SentenceTransformer
from tiny_models import tiny_encoder
from tiny_runs import RUN_SETTINGS, assert_resumes, make_trainer, read_log
from transformers import AutoModel, set_seed

from contaccum import ContAccumTrainer, DualEncoder
from contaccum.encoders.adapters import add_adapter, has_adapter
from contaccum.encoders.settings import get_tower, is_tied
from contaccum.errors import UserError

TEXTS = sentences(4)


def make_model(places: Path, tied: bool, dtype: str = "float32") -> DualEncoder:
    """Return a model with adapters of rank 2 and dropout, always with the same weights."""
    set_seed(8)
    model = DualEncoder.from_backbone(
        places / "backbone",
        tied=tied,
        pooling="mean",
        normalize=True,
        dtype=dtype,
        device="cpu",
    )
    add_adapter(model, 2, dropout=0.1)
    return model


@pytest.mark.parametrize(
    ("tied", "dtype", "settings"),
    [(True, "float32", {}), (False, "bfloat16", {"gradient_checkpointing": True})],
    ids=["tied", "untied, bfloat16, checkpointing"],
)
def test_the_base_does_not_change_and_a_run_resumes_bit_for_bit(
    places, tmp_path, tied, dtype, settings
):
    def make_run(folder: Path, **saves: Any) -> ContAccumTrainer:
        return make_trainer(
            folder,
            model=make_model(places, tied, dtype),
            max_steps=3,
            **RUN_SETTINGS,
            **settings,
            **saves,
        )

    before = make_model(places, tied, dtype).state_dict()
    after = assert_resumes(make_run, tmp_path, 2).model.state_dict()
    for name, weight in after.items():
        # No embedding depends on the pooler.
        is_trained = "lora_" in name and ".pooler." not in name
        assert torch.equal(weight, before[name]) != is_trained, name
    log = read_log(tmp_path / "straight")
    assert len(log) == 3
    for line in log:
        assert 0.1 < line["grad_norm_ratio"] < 10
        assert line["grad_norm_ratio"] != 1
    assert not list(tmp_path.rglob("model.safetensors"))  # checkpoints contain only the adapter
    record = json.loads((tmp_path / "straight" / "identity.json").read_text())
    adapters = record["resume"]["adapters"]
    assert len(adapters) == (1 if tied else 2)
    for adapter in adapters:
        assert adapter["r"] == 2
        assert adapter["lora_alpha"] == 4
    if tied:
        other = make_model(places, tied, dtype)
        other[0].model.peft_config["default"].lora_alpha = 8
        trainer = make_trainer(tmp_path / "other", model=other, **RUN_SETTINGS)
        with pytest.raises(UserError, match="adapters"):
            trainer.train(str(tmp_path / "straight" / "checkpoint-2"))
        # The files of the base have changed, which a checkpoint does not contain.
        other_base = make_model(places, tied, dtype)
        with torch.no_grad():
            next(other_base.parameters()).add_(1.0)
        trainer = make_trainer(tmp_path / "other", model=other_base, **RUN_SETTINGS)
        with pytest.raises(UserError, match="base of the adapters"):
            trainer.train(str(tmp_path / "straight" / "checkpoint-2"))


def compute_gradient_norm(tower: torch.nn.Module) -> float:
    """Return the norm of the gradients of all weights of a tower together."""
    gradients = [weight.grad for weight in tower.parameters() if weight.grad is not None]
    return torch.nn.utils.get_total_norm(gradients).item()


@pytest.mark.parametrize("has_adapters", [False, True], ids=["full", "adapter"])
def test_logged_gradient_norms_are_those_of_each_towers_weights(places, tmp_path, has_adapters):
    if has_adapters:
        model = make_model(places, tied=False)
    else:
        model = tiny_encoder(tied=False)
    trainer = make_trainer(tmp_path, 12, model=model, max_grad_norm=0.0)
    norms = {}

    def record_norms(*_: Any) -> None:
        norms["query"] = compute_gradient_norm(get_tower(model, "query"))
        norms["passage"] = compute_gradient_norm(get_tower(model, "document"))

    trainer.create_optimizer().register_step_pre_hook(record_norms)
    trainer.train()
    (line,) = read_log(tmp_path)  # 12 pairs are one update
    assert line["grad_norm_query"] == pytest.approx(norms["query"], rel=1e-5)
    assert line["grad_norm_passage"] == pytest.approx(norms["passage"], rel=1e-5)
    assert line["grad_norm_ratio"] == pytest.approx(norms["passage"] / norms["query"], rel=1e-5)


def encode_texts(folder: Path) -> np.ndarray:
    """Encode TEXTS with a saved model, as queries and as documents."""
    model = SentenceTransformer(str(folder), device="cpu")
    return np.stack([model.encode_query(TEXTS), model.encode_document(TEXTS)])


def test_the_command_line_trains_and_continues_adapters_of_two_towers(
    places, train, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(places)
    first = tmp_path / "first"
    second = tmp_path / "second"
    adapter = {
        "lora_r": 2,
        "lora_alpha": 8,
        "lora_target_modules": ["query", "value"],
        "pooling": "mean",
    }
    assert train(first, model="backbone", tied="false", **adapter) == 0, capsys.readouterr().err
    monkeypatch.chdir(tmp_path)
    config_file = next(first.rglob("adapter_config.json"))
    config = json.loads(config_file.read_text())
    assert config["r"] == 2
    assert config["lora_alpha"] == 8
    assert sorted(config["target_modules"]) == ["query", "value"]
    # A tiny learning rate shows that the second run starts from the weights of the first one.
    assert train(second, model=first, learning_rate=1e-30) == 0, capsys.readouterr().err
    assert np.array_equal(encode_texts(second), encode_texts(first))
    overwrite = {"overwrite_output_dir": "true"}
    assert train(second, model=first, **overwrite) == 0
    trained = encode_texts(second)
    assert not np.allclose(trained, encode_texts(first), atol=1e-3)


def test_adapters_of_tied_and_untied_models_and_beside_their_base(places, train, tmp_path):
    full = tmp_path / "full"
    tied = tmp_path / "tied"
    untied = tmp_path / "untied"
    model = DualEncoder.from_backbone(places / "backbone", pooling="mean", device="cpu")
    model.save_pretrained(str(full))
    embeddings = encode_texts(full)
    # Untying the model copies the adapter. Both adapters use one base.
    assert train(tied, model=full, lora_r=2) == 0
    assert train(untied, model=tied, tied="false") == 0
    model = DualEncoder.from_pretrained(untied, device="cpu")
    assert not is_tied(model)
    base_parameters = [name for name, _ in model.named_parameters() if "lora_" not in name]
    assert len(base_parameters) == len(list(AutoModel.from_pretrained(full).parameters()))
    assert np.array_equal(encode_texts(full), embeddings)
    # An adapter that is saved in the folder of its base leaves the base unchanged.
    weights = (full / "model.safetensors").read_bytes()
    assert train(full, model=full, lora_r=2) == 0
    assert not np.allclose(encode_texts(full), embeddings, atol=1e-3)
    assert (full / "model.safetensors").read_bytes() == weights
    # Other libraries save an adapter without the pooling.
    for name in ("modules.json", "config_sentence_transformers.json", "sentence_bert_config.json"):
        (tied / name).unlink()
    assert train(tmp_path / "bare", model=tied, learning_rate=1e-30) == 0
    assert has_adapter(SentenceTransformer(str(tmp_path / "bare"), device="cpu"))
