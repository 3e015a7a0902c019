"""Adapters: over weights that stay, one base for two towers, folders that any SentenceTransformer loads."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig
from sample_texts import sentences
from sentence_transformers import SentenceTransformer
from tiny_models import qwen3_config
from transformers import AutoModel

from contaccum import DualEncoder
from contaccum.encoders.adapters import (
    add_adapter,
    get_backbones,
    has_adapter,
    make_4bit_kwargs,
    merge_adapter,
)
from contaccum.errors import ConfigError, UserError
from contaccum.retrieval.encode import model_fingerprint

TEXTS = sentences(5)


@pytest.fixture(scope="module")
def bases(tiny_config, tiny_tokenizer, tmp_path_factory) -> Path:
    """Folders with the backbones bert and qwen3."""
    root = tmp_path_factory.mktemp("bases")
    torch.manual_seed(1)
    for name, config in (("bert", tiny_config), ("qwen3", qwen3_config(len(tiny_tokenizer)))):
        AutoModel.from_config(config).save_pretrained(root / name)
        tiny_tokenizer.save_pretrained(root / name)
    return root


def adapted(base: Path, tied: bool = True, **settings: Any) -> DualEncoder:
    """With an adapter of rank 4 that is not zero, and another for the other tower."""
    given = {name: settings.pop(name) for name in ("dropout", "target_modules") if name in settings}
    model = DualEncoder.from_backbone(base, tied, pooling="mean", device="cpu", **settings).eval()
    before = model.encode_query(TEXTS)
    add_adapter(model, 4, **given)
    assert np.array_equal(model.encode_query(TEXTS), before)  # as B is zero
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    assert not np.allclose(model.encode_query(TEXTS), before, atol=0.1)
    return model


def embeddings(model: Any) -> np.ndarray:
    return np.stack([model.encode_query(TEXTS), model.encode_document(TEXTS)])


def frozen(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [parameter for parameter in model.parameters() if not parameter.requires_grad]


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("base", ["bert", "qwen3"])
def test_a_saved_adapter_encodes_identically_wherever_it_is_loaded_and_towers_share_one_base(
    base, tied, bases, tmp_path, monkeypatch
):
    monkeypatch.chdir(bases)
    model = adapted(
        Path(base), tied, query_prompt="what is ", query_max_length=7, passage_max_length=12
    )
    weights = list(AutoModel.from_pretrained(bases / base).parameters())
    assert len(frozen(model)) == len(weights)
    assert all(torch.equal(a, b) for a, b in zip(frozen(model), weights, strict=True))
    model.save_pretrained(str(tmp_path / "out"))
    assert not list((tmp_path / "out").rglob("model.safetensors"))
    monkeypatch.chdir(tmp_path)  # the base was named by a relative path
    for cls in (SentenceTransformer, DualEncoder.from_pretrained):
        loaded: Any = cls("out", device="cpu")
        assert np.array_equal(embeddings(loaded), embeddings(model))
    assert model_fingerprint(loaded) == model_fingerprint(model) and loaded.tied == tied
    trains = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trains == {
        name for name, parameter in loaded.named_parameters() if parameter.requires_grad
    }
    assert len(frozen(loaded)) == len(weights) and (tied or not np.allclose(*embeddings(loaded)))


def test_an_adapter_over_bfloat16_is_float32_and_the_type_of_the_base_is_kept(bases, tmp_path):
    for dtype in ("bfloat16", "float32"):
        model = adapted(bases / "qwen3", tied=False, dtype=dtype)
        model.save_pretrained(str(tmp_path))  # over the one before
        loaded = DualEncoder.from_pretrained(tmp_path, device="cpu")
        assert {p.dtype for p in frozen(loaded)} == {getattr(torch, dtype)}
        assert {p.dtype for p in loaded.parameters() if p.requires_grad} == {torch.float32}
        assert model_fingerprint(loaded) == model_fingerprint(model)
        assert np.array_equal(embeddings(loaded), embeddings(model))


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_merged_model_is_a_plain_one_that_encodes_alike(tied, bases, tmp_path):
    model = adapted(bases / "bert", tied)
    model.save_pretrained(str(tmp_path))
    expected = embeddings(model)
    merge_adapter(model)
    assert not has_adapter(model) and frozen(model) == []
    assert len(list(model.parameters())) == (1 if tied else 2) * len(
        list(get_backbones(model)[0].parameters())
    )
    model.save_pretrained(str(tmp_path))
    assert not list(tmp_path.rglob("adapter*"))
    merged = SentenceTransformer(str(tmp_path), device="cpu")
    assert not has_adapter(merged) and np.abs(embeddings(merged) - expected).max() < 1e-5


def test_towers_that_differ_keep_a_base_each(bases, tmp_path):
    model = DualEncoder.from_backbone(bases / "bert", tied=False, device="cpu")
    with torch.no_grad():
        get_backbones(model)[1].encoder.layer[0].output.dense.weight.mul_(2)
    model.save_pretrained(str(tmp_path / "full"))
    model = DualEncoder.from_pretrained(tmp_path / "full", device="cpu")
    before = embeddings(model)
    add_adapter(model, 4, target_modules=["query"])
    assert np.array_equal(embeddings(model), before) and not np.allclose(*before)
    one = len(list(AutoModel.from_pretrained(bases / "bert").parameters()))
    assert len(frozen(model)) == one + 1  # all others are equal, and so one
    for place in ("out", "full"):  # the latter beside its own base
        model.save_pretrained(str(tmp_path / place))
        loaded = DualEncoder.from_pretrained(tmp_path / place, device="cpu")
        assert has_adapter(loaded) and np.array_equal(embeddings(loaded), before)
        assert len(frozen(loaded)) == one + 1


def test_sentence_transformers_own_add_adapter_adapts_both_towers_over_one_base(bases, tmp_path):
    model = DualEncoder.from_backbone(
        bases / "bert", tied=False, pooling="mean", device="cpu"
    ).eval()
    model.add_adapter(LoraConfig(r=2, target_modules=["query", "value"], init_lora_weights=False))
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert len(trained) == 2 * 2 * 2 * 2 and all(
        "lora_" in name for name in trained
    )  # towers, layers, places, A and B
    assert len(frozen(model)) == len(list(AutoModel.from_pretrained(bases / "bert").parameters()))
    model.save_pretrained(str(tmp_path))
    assert np.array_equal(
        embeddings(SentenceTransformer(str(tmp_path), device="cpu")), embeddings(model)
    )


def test_a_folder_holds_what_was_saved_last(bases, tmp_path):
    models = [adapted(bases / "bert"), adapted(bases / "bert", tied=False)]
    models += [
        DualEncoder.from_backbone(bases / "qwen3", tied, pooling="mean", device="cpu")
        for tied in (True, False)
    ]
    for place in (0, 2, 0, 3, 1, 2, 1, 3, 0, 1, 0):
        models[place].save_pretrained(str(tmp_path))
        for cls in (SentenceTransformer, DualEncoder.from_pretrained):
            assert np.array_equal(
                embeddings(cls(str(tmp_path), device="cpu")), embeddings(models[place])
            )


def test_what_cannot_have_an_adapter_is_refused_and_one_over_weights_in_no_folder_is_merged(
    bases, tiny_config, tiny_tokenizer, tmp_path
):
    def make() -> DualEncoder:
        return DualEncoder.from_backbone(bases / "bert", device="cpu")

    for layers, message in (
        (["query", "quary"], "the model has no layer 'quary'; did you mean 'query'"),
        (["LayerNorm"], "LayerNorm"),
        (["uery"], "no layer 'uery'"),
    ):
        with pytest.raises(ConfigError, match=message):
            add_adapter(make(), 4, target_modules=layers)
    with pytest.raises(ConfigError, match="has an adapter already"):
        add_adapter(adapted(bases / "bert"), 4)
    model = DualEncoder.from_backbone(tiny_config, tokenizer=tiny_tokenizer)
    add_adapter(model, 4)
    with pytest.raises(ConfigError, match="saved without its base, which is not in"):
        model.save_pretrained(str(tmp_path))
    merge_adapter(model)
    model.save_pretrained(str(tmp_path))


def test_an_adapter_without_its_base_is_refused_in_one_line(bases, tmp_path):
    shutil.copytree(bases / "bert", tmp_path / "base")
    for tied in (True, False):
        adapted(tmp_path / "base", tied).save_pretrained(str(tmp_path / "out"))
        (tmp_path / "base").rename(tmp_path / "gone")
        with pytest.raises(
            UserError, match=r"out: this is an adapter, and its base cannot be loaded: .*base: no such model"
        ):
            DualEncoder.from_pretrained(tmp_path / "out")
        (tmp_path / "gone").rename(tmp_path / "base")
        file = next((tmp_path / "out").rglob("adapter_config.json"))
        config = AutoModel.from_pretrained(tmp_path / "base").config
        config.hidden_size, config.intermediate_size = 16, 32
        AutoModel.from_config(config).save_pretrained(tmp_path / "small")
        for other, message in (
            (tmp_path / "small", "another base"),
            (bases / "qwen3", "Target modules"),
        ):
            file.write_text(
                json.dumps({**json.loads(file.read_text()), "base_model_name_or_path": str(other)})
            )
            with pytest.raises(UserError, match=message):
                DualEncoder.from_pretrained(tmp_path / "out")


def test_what_is_not_installed_is_named(bases, tmp_path, monkeypatch):
    adapted(bases / "bert").save_pretrained(str(tmp_path))
    for name in ("peft", "bitsandbytes"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"pip install 'contaccum\[peft\]'"):
        add_adapter(DualEncoder.from_backbone(bases / "bert"), 4)
    with pytest.raises(ConfigError, match=r"needs peft, which is not installed"):
        DualEncoder.from_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="pip install bitsandbytes"):
        make_4bit_kwargs()
