"""Training of adapters: unchanged base weights, resuming, further training, merging."""

import json
import shutil
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

from contaccum import DualEncoder
from contaccum.encoders.adapters import add_adapter, has_adapter
from contaccum.errors import UserError

TEXTS = sentences(4)
CHECKPOINTING = {"gradient_checkpointing": True}


def make_model(places: Path, tied: bool, dtype: str = "float32") -> DualEncoder:
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
    [
        (True, "float32", {}),
        (False, "float32", {}),
        (False, "float32", CHECKPOINTING),
        (False, "bfloat16", {}),
    ],
    ids=["tied", "untied", "checkpointing", "bfloat16"],
)
def test_the_base_does_not_change_and_a_run_resumes_bit_for_bit(
    places, tmp_path, tied, dtype, settings
):
    def make(folder, **saves):
        return make_trainer(
            folder,
            model=make_model(places, tied, dtype),
            max_steps=5,
            **RUN_SETTINGS,
            **settings,
            **saves,
        )

    before = make_model(places, tied, dtype).state_dict()
    after = assert_resumes(make, tmp_path, 3).model.state_dict()
    moved = {name for name in after if not torch.equal(after[name], before[name])}
    assert moved == {name for name in after if "lora_" in name and ".pooler." not in name}
    ratios = [line["grad_norm_ratio"] for line in read_log(tmp_path / "straight")]
    assert len(ratios) == 5
    assert all(0.1 < ratio < 10 and ratio != 1 for ratio in ratios)
    assert not list(tmp_path.rglob("model.safetensors"))  # checkpoints contain only the adapter
    record = json.loads((tmp_path / "straight" / "run.json").read_text())["model"]["adapters"]
    num_adapters = 1 if tied else 2
    settings_of_adapters = [(adapter["r"], adapter["lora_alpha"]) for adapter in record]
    assert settings_of_adapters == [(2, 4)] * num_adapters
    if tied:
        other = make_model(places, tied, dtype)
        other[0].model.peft_config["default"].lora_alpha = 8
        with pytest.raises(UserError, match="adapters"):
            make_trainer(tmp_path / "other", model=other, **RUN_SETTINGS).train(
                str(tmp_path / "straight" / "checkpoint-3")
            )


@pytest.mark.parametrize("has_adapters", [False, True], ids=["full", "adapter"])
def test_logged_gradient_norms_are_those_of_each_towers_weights(places, tmp_path, has_adapters):
    model = make_model(places, tied=False) if has_adapters else tiny_encoder(tied=False)
    trainer = make_trainer(tmp_path, 12, model=model, max_grad_norm=0.0)
    norms = {}

    def watch(*_: Any) -> None:
        for name, tower in (("query", model.query_encoder), ("passage", model.passage_encoder)):
            gradients = [p.grad.flatten() for p in tower.parameters() if p.grad is not None]
            norms[name] = torch.cat(gradients).norm().item()

    trainer.create_optimizer().register_step_pre_hook(watch)
    trainer.train()
    (line,) = read_log(tmp_path)
    assert line["grad_norm_query"] == pytest.approx(norms["query"], rel=1e-5)
    assert line["grad_norm_passage"] == pytest.approx(norms["passage"], rel=1e-5)
    assert line["grad_norm_ratio"] == pytest.approx(norms["passage"] / norms["query"], rel=1e-5)


def encode_texts(folder: Path) -> np.ndarray:
    model = SentenceTransformer(str(folder), device="cpu")
    return np.stack([model.encode_query(TEXTS), model.encode_document(TEXTS)])


@pytest.mark.parametrize("tied", ["true", "false"], ids=["tied", "untied"])
def test_the_command_line_trains_continues_and_merges_an_adapter(
    places, train, tied, tmp_path, monkeypatch, capsys
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
    assert train(first, model="backbone", tied=tied, **adapter) == 0, capsys.readouterr().err
    monkeypatch.chdir(tmp_path)
    config_file = next(first.rglob("adapter_config.json"))
    config = json.loads(config_file.read_text())
    assert config["r"] == 2
    assert config["lora_alpha"] == 8
    assert sorted(config["target_modules"]) == ["query", "value"]
    # Training with learning rate 0 shows that the second run starts from the first one's weights.
    assert train(second, model=first, learning_rate=0.0) == 0, capsys.readouterr().err
    assert np.array_equal(encode_texts(second), encode_texts(first))
    again = {"overwrite_output_dir": "true"}
    assert train(second, model=first, **again) == 0
    trained = encode_texts(second)
    assert not np.allclose(trained, encode_texts(first), atol=1e-3)
    for output in (tmp_path / "merged", first):  # the second folder contains an adapter
        assert train(output, model=second, learning_rate=0.0, merge_adapter="true", **again) == 0
        assert np.abs(encode_texts(output) - trained).max() < 1e-5 and not list(
            output.rglob("adapter*")
        )
    assert train(second, model=second, merge_adapter="true") == 2
    assert "merge_adapter with model as output_dir" in capsys.readouterr().err
    assert train(second, merge_adapter="true", **again) == 2
    assert "merge_adapter=True without lora_r" in capsys.readouterr().err


def test_a_finished_run_with_a_merged_adapter_is_resumed_with_the_same_result(train, tmp_path):
    """The merged model in output_dir has no adapter that the run could load."""
    output = tmp_path / "merged"
    settings = {"lora_r": 2, "merge_adapter": "true", "pooling": "mean", "max_steps": 3}
    settings |= {"save_strategy": "steps", "save_steps": 1, "resume_from_checkpoint": "auto"}
    assert train(output, **settings) == 0
    weights = (output / "model.safetensors").read_bytes()
    # The checkpoint of the last update is loaded, and merged again.
    assert train(output, **settings) == 0
    assert (output / "model.safetensors").read_bytes() == weights
    assert len(read_log(output)) == 3
    # Without that checkpoint, as with save_strategy=best, the last update is trained again.
    shutil.rmtree(output / "checkpoint-3")
    assert train(output, **settings) == 0
    assert (output / "model.safetensors").read_bytes() == weights
    assert len(read_log(output)) == 3


def test_adapters_of_tied_and_untied_models_and_beside_their_base(places, train, tmp_path):
    full, tied, untied = (tmp_path / name for name in ("full", "tied", "untied"))
    DualEncoder.from_backbone(places / "backbone", pooling="mean", device="cpu").save_pretrained(
        str(full)
    )
    before = encode_texts(full)
    assert train(tied, model=full, lora_r=2) == 0
    assert train(untied, model=tied, tied="false") == 0
    model = DualEncoder.from_pretrained(untied, device="cpu")
    base = len(list(AutoModel.from_pretrained(full).parameters()))
    assert (
        not model.tied and sum("lora_" not in name for name, _ in model.named_parameters()) == base
    )
    assert np.array_equal(encode_texts(full), before)
    weights = (full / "model.safetensors").read_bytes()
    assert train(full, model=full, lora_r=2) == 0
    assert not np.allclose(encode_texts(full), before, atol=1e-3)
    assert (full / "model.safetensors").read_bytes() == weights
    for name in ("modules.json", "config_sentence_transformers.json", "sentence_bert_config.json"):
        (tied / name).unlink()  # other libraries save an adapter without the pooling
    assert train(tmp_path / "bare", model=tied, learning_rate=0.0) == 0
    assert has_adapter(SentenceTransformer(str(tmp_path / "bare"), device="cpu"))
