"""Training adapters: the base stays as it is, resuming is exact, folders train on, from the command line too."""

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

from contaccum import DualEncoder
from contaccum.encoders.adapters import add_adapter, has_adapter
from contaccum.errors import UserError

TEXTS = sentences(4)
CHECKPOINTING = {"gradient_checkpointing": True}


def model_of(places: Path, tied: bool, dtype: str = "float32") -> DualEncoder:
    set_seed(8)
    settings = {"tied": tied, "pooling": "mean", "normalize": True, "dtype": dtype, "device": "cpu"}
    model = DualEncoder.from_backbone(places / "backbone", **settings)
    add_adapter(model, 2, dropout=0.1)
    return model


@pytest.mark.parametrize(
    ("tied", "dtype", "more"),
    [
        (True, "float32", {}),
        (False, "float32", {}),
        (False, "float32", CHECKPOINTING),
        (False, "bfloat16", {}),
    ],
    ids=["tied", "untied", "checkpointing", "bfloat16"],
)
def test_the_base_stays_and_a_resumed_run_equals_the_whole_one_bit_for_bit(
    places, tmp_path, tied, dtype, more
):
    def make(folder, **saves):
        return make_trainer(
            folder,
            model=model_of(places, tied, dtype),
            max_steps=5,
            **RUN_SETTINGS,
            **more,
            **saves,
        )

    before = model_of(places, tied, dtype).state_dict()
    after = assert_resumes(make, tmp_path, 3).model.state_dict()
    moved = {name for name in after if not torch.equal(after[name], before[name])}
    assert moved == {name for name in after if "lora_" in name and ".pooler." not in name}
    ratios = [line["grad_norm_ratio"] for line in read_log(tmp_path / "straight")]
    assert len(ratios) == 5 and all(0.1 < ratio < 10 and ratio != 1 for ratio in ratios)
    assert not list(tmp_path.rglob("model.safetensors"))  # checkpoints are of the adapter
    record = json.loads((tmp_path / "straight" / "run.json").read_text())["model"]["adapters"]
    assert [(one["r"], one["lora_alpha"]) for one in record] == [(2, 4)] * (1 if tied else 2)
    if tied:
        other = model_of(places, tied, dtype)
        other[0].model.peft_config["default"].lora_alpha = 8
        with pytest.raises(UserError, match="adapters"):
            make_trainer(tmp_path / "other", model=other, **RUN_SETTINGS).train(
                str(tmp_path / "straight" / "checkpoint-3")
            )


@pytest.mark.parametrize("adapted", [False, True], ids=["full", "adapter"])
def test_logged_gradient_norms_are_those_of_each_tower_s_own_weights(places, tmp_path, adapted):
    model = model_of(places, tied=False) if adapted else tiny_encoder(tied=False)
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


def embeddings(folder: Path) -> np.ndarray:
    model = SentenceTransformer(str(folder), device="cpu")
    return np.stack([model.encode_query(TEXTS), model.encode_document(TEXTS)])


@pytest.mark.parametrize("tied", ["true", "false"], ids=["tied", "untied"])
def test_the_command_line_trains_trains_on_and_merges(
    places, train, tied, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(places)
    first, second = tmp_path / "first", tmp_path / "second"
    adapter = {
        "lora_r": 2,
        "lora_alpha": 8,
        "lora_target_modules": ["query", "value"],
        "pooling": "mean",
    }
    assert train(first, model="backbone", tied=tied, **adapter) == 0, capsys.readouterr().err
    monkeypatch.chdir(tmp_path)
    (one, *_) = [json.loads(file.read_text()) for file in first.rglob("adapter_config.json")]
    assert (one["r"], one["lora_alpha"], sorted(one["target_modules"])) == (
        2,
        8,
        ["query", "value"],
    )
    # Without a learning rate it trains on from where it is: what changes nothing shows where that was.
    assert train(second, model=first, learning_rate=0.0) == 0, capsys.readouterr().err
    assert np.array_equal(embeddings(second), embeddings(first))
    again = {"overwrite_output_dir": "true"}
    assert train(second, model=first, **again) == 0
    trained = embeddings(second)
    assert not np.allclose(trained, embeddings(first), atol=1e-3)
    for output in (tmp_path / "merged", first):  # where an adapter was
        assert train(output, model=second, learning_rate=0.0, merge_adapter="true", **again) == 0
        assert np.abs(embeddings(output) - trained).max() < 1e-5 and not list(
            output.rglob("adapter*")
        )
    assert train(second, model=second, merge_adapter="true") == 2
    assert "merge_adapter with model as output_dir" in capsys.readouterr().err
    assert train(second, merge_adapter="true", **again) == 2
    assert "merge_adapter=True without lora_r" in capsys.readouterr().err


def test_an_untied_adapter_comes_of_a_tied_model_and_one_may_lie_beside_its_base(
    places, train, tmp_path
):
    full, tied, untied = (tmp_path / name for name in ("full", "tied", "untied"))
    DualEncoder.from_backbone(places / "backbone", pooling="mean", device="cpu").save_pretrained(
        str(full)
    )
    before = embeddings(full)
    assert train(tied, model=full, lora_r=2) == 0
    assert train(untied, model=tied, tied="false") == 0
    model = DualEncoder.from_pretrained(untied, device="cpu")
    base = len(list(AutoModel.from_pretrained(full).parameters()))
    assert (
        not model.tied and sum("lora_" not in name for name, _ in model.named_parameters()) == base
    )
    assert np.array_equal(embeddings(full), before)
    weights = (full / "model.safetensors").read_bytes()
    assert train(full, model=full, lora_r=2) == 0
    assert not np.allclose(embeddings(full), before, atol=1e-3)
    assert (full / "model.safetensors").read_bytes() == weights
    for name in ("modules.json", "config_sentence_transformers.json", "sentence_bert_config.json"):
        (tied / name).unlink()  # as others save an adapter: without a word on pooling
    assert train(tmp_path / "bare", model=tied, learning_rate=0.0) == 0
    assert has_adapter(SentenceTransformer(str(tmp_path / "bare"), device="cpu"))
