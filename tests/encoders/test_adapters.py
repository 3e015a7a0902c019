"""LoRA adapters: frozen base weights, a shared base for two towers, saving and loading."""

import copy
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig
from peft.tuners.tuners_utils import BaseTunerLayer
from sample_texts import sentences
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from small_data import contents
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
from contaccum.encoders.settings import is_tied
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


def make_adapted_encoder(base: Path, tied: bool = True, **settings: Any) -> DualEncoder:
    """Return an encoder with nonzero adapters of rank 4 in each tower."""
    model = DualEncoder.from_backbone(base, tied, pooling="mean", device="cpu", **settings).eval()
    before = model.encode_query(TEXTS)
    add_adapter(model, 4)
    # B is zero at first, so the embeddings are unchanged.
    assert np.array_equal(model.encode_query(TEXTS), before)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    assert not np.allclose(model.encode_query(TEXTS), before, atol=0.1)
    return model


def encode_texts(model: Any) -> np.ndarray:
    """Return TEXTS as queries and as documents, (2, n, d)."""
    return np.stack([model.encode_query(TEXTS), model.encode_document(TEXTS)])


def get_frozen_weights(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [parameter for parameter in model.parameters() if not parameter.requires_grad]


def get_trainable_names(model: torch.nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def load_base_weights(base: Path) -> list[torch.nn.Parameter]:
    return list(AutoModel.from_pretrained(base).parameters())


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("base", ["bert", "qwen3"])
def test_saved_adapters_encode_identically_and_share_one_base(
    base, tied, bases, tmp_path, monkeypatch
):
    """The base was named by a relative path, and the saved adapter is loaded in another folder."""
    monkeypatch.chdir(bases)
    model = make_adapted_encoder(
        Path(base), tied, query_prompt="what is ", query_max_length=7, passage_max_length=12
    )
    base_weights = load_base_weights(bases / base)
    frozen_weights = get_frozen_weights(model)
    assert len(frozen_weights) == len(base_weights)
    assert all(torch.equal(a, b) for a, b in zip(frozen_weights, base_weights, strict=True))
    model.save_pretrained(str(tmp_path / "out"))
    assert not list((tmp_path / "out").rglob("model.safetensors"))
    model.save(str(tmp_path / "saved"))  # the other name of the same method
    assert contents(tmp_path / "out").keys() == contents(tmp_path / "saved").keys()
    monkeypatch.chdir(tmp_path)
    for cls in (SentenceTransformer, DualEncoder.from_pretrained):
        loaded: Any = cls("out", device="cpu")
        assert np.array_equal(encode_texts(loaded), encode_texts(model))
    assert model_fingerprint(loaded) == model_fingerprint(model)
    assert is_tied(loaded) == tied
    assert get_trainable_names(loaded) == get_trainable_names(model)
    assert len(get_frozen_weights(loaded)) == len(base_weights)
    if not tied:
        queries, documents = encode_texts(loaded)
        assert not np.allclose(queries, documents)


def test_adapter_over_bfloat16_base_is_float32_after_loading(bases, tmp_path):
    """The second model is saved into the folder of the first one."""
    for dtype in ("bfloat16", "float32"):
        model = make_adapted_encoder(bases / "qwen3", tied=False, dtype=dtype)
        model.save_pretrained(str(tmp_path))
        loaded = DualEncoder.from_pretrained(tmp_path, device="cpu")
        assert {p.dtype for p in get_frozen_weights(loaded)} == {getattr(torch, dtype)}
        assert {p.dtype for p in loaded.parameters() if p.requires_grad} == {torch.float32}
        assert model_fingerprint(loaded) == model_fingerprint(model)
        assert np.array_equal(encode_texts(loaded), encode_texts(model))


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_merged_model_has_the_embeddings_of_its_adapter_and_no_adapter(tied, bases, tmp_path):
    model = make_adapted_encoder(bases / "bert", tied)
    model.save_pretrained(str(tmp_path))
    expected = encode_texts(model)
    merge_adapter(model)
    assert not has_adapter(model)
    assert get_frozen_weights(model) == []
    num_towers = 1 if tied else 2
    num_backbone_weights = len(list(get_backbones(model)[0].parameters()))
    assert len(list(model.parameters())) == num_towers * num_backbone_weights
    model.save_pretrained(str(tmp_path))
    assert not list(tmp_path.rglob("adapter*"))
    merged = SentenceTransformer(str(tmp_path), device="cpu")
    assert not has_adapter(merged)
    assert np.abs(encode_texts(merged) - expected).max() < 1e-5


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_merged_weights_on_a_half_precision_base_are_rounded_once(bases, dtype, caplog):
    """In the dtype of the base, peft would round the adapter's part and then the sum."""
    model = make_adapted_encoder(bases / "bert", dtype=dtype)
    expected = {}
    for name, layer in get_backbones(model)[0].named_modules():
        if isinstance(layer, BaseTunerLayer):
            weight = layer.get_base_layer().weight.detach().float()
            expected[name] = weight + layer.get_delta_weight("default").detach()
    in_float32 = copy.deepcopy(model).float()
    merge_adapter(in_float32)
    assert "rounded" not in caplog.text
    merge_adapter(model)
    assert "the merged weights are rounded to bfloat16 or float16" in caplog.text
    for name, weight in expected.items():
        rounded = weight.to(getattr(torch, dtype))
        assert torch.equal(get_backbones(model)[0].get_submodule(name).weight, rounded)
        assert torch.equal(get_backbones(in_float32)[0].get_submodule(name).weight, weight)


def test_towers_share_only_the_base_weights_that_are_equal(bases, tmp_path):
    """One weight differs between the towers. The last folder already holds the adapters' base."""
    model = DualEncoder.from_backbone(bases / "bert", tied=False, device="cpu")
    with torch.no_grad():
        get_backbones(model)[1].encoder.layer[0].output.dense.weight.mul_(2)
    model.save_pretrained(str(tmp_path / "full"))
    model = DualEncoder.from_pretrained(tmp_path / "full", device="cpu")
    before = encode_texts(model)
    add_adapter(model, 4, target_modules=["query"])
    assert np.array_equal(encode_texts(model), before)
    assert not np.allclose(before[0], before[1])
    num_base_weights = len(load_base_weights(bases / "bert"))
    assert len(get_frozen_weights(model)) == num_base_weights + 1
    for folder_name in ("out", "full"):
        model.save_pretrained(str(tmp_path / folder_name))
        loaded = DualEncoder.from_pretrained(tmp_path / folder_name, device="cpu")
        assert has_adapter(loaded)
        assert np.array_equal(encode_texts(loaded), before)
        assert len(get_frozen_weights(loaded)) == num_base_weights + 1


def test_add_adapter_of_sentence_transformers_adapts_both_towers(bases, tmp_path):
    model = DualEncoder.from_backbone(
        bases / "bert", tied=False, pooling="mean", device="cpu"
    ).eval()
    model.add_adapter(LoraConfig(r=2, target_modules=["query", "value"], init_lora_weights=False))
    trainable_names = get_trainable_names(model)
    assert len(trainable_names) == 2 * 2 * 2 * 2  # towers, layers, targets, and A and B
    assert all("lora_" in name for name in trainable_names)
    assert len(get_frozen_weights(model)) == len(load_base_weights(bases / "bert"))
    model.save_pretrained(str(tmp_path))
    loaded = SentenceTransformer(str(tmp_path), device="cpu")
    assert np.array_equal(encode_texts(loaded), encode_texts(model))


def test_saving_replaces_another_model_in_the_folder(bases, tmp_path):
    """Tied and untied models with and without adapters are saved into one folder in turn."""
    models = [
        make_adapted_encoder(bases / "bert"),
        make_adapted_encoder(bases / "bert", tied=False),
    ]
    for tied in (True, False):
        plain = DualEncoder.from_backbone(bases / "qwen3", tied, pooling="mean", device="cpu")
        models.append(plain)
    for index in (0, 2, 1, 3, 0):
        models[index].save_pretrained(str(tmp_path))
        for cls in (SentenceTransformer, DualEncoder.from_pretrained):
            loaded = cls(str(tmp_path), device="cpu")
            assert np.array_equal(encode_texts(loaded), encode_texts(models[index]))


def test_models_that_cannot_have_an_adapter_are_refused(bases, tiny_tokenizer):
    plain = DualEncoder.from_backbone(bases / "bert", device="cpu")
    adapted = make_adapted_encoder(bases / "bert")
    static = DualEncoder(modules=[StaticEmbedding(tiny_tokenizer, embedding_dim=8)])
    for model, layers, message in (
        (plain, ["query", "quary"], "did you mean 'query'"),
        (plain, ["LayerNorm"], "LayerNorm"),
        (adapted, None, "adapter already"),
        (static, None, "no transformers backbone"),
    ):
        with pytest.raises(ConfigError, match=message):
            add_adapter(model, 4, target_modules=layers)


def test_adapter_with_a_missing_or_wrong_base_is_refused(bases, tmp_path):
    shutil.copytree(bases / "bert", tmp_path / "base")
    for tied in (True, False):
        make_adapted_encoder(tmp_path / "base", tied).save_pretrained(str(tmp_path / "out"))
        (tmp_path / "base").rename(tmp_path / "gone")
        with pytest.raises(UserError, match="base: no such model"):
            DualEncoder.from_pretrained(tmp_path / "out")
        (tmp_path / "gone").rename(tmp_path / "base")
        config_file = next((tmp_path / "out").rglob("adapter_config.json"))
        small_config = AutoModel.from_pretrained(tmp_path / "base").config
        small_config.hidden_size = 16
        small_config.intermediate_size = 32
        AutoModel.from_config(small_config).save_pretrained(tmp_path / "small")
        for wrong_base, message in (
            (tmp_path / "small", "do not have the shapes"),
            (bases / "qwen3", "Target modules"),
        ):
            adapter_config = json.loads(config_file.read_text())
            adapter_config["base_model_name_or_path"] = str(wrong_base)
            config_file.write_text(json.dumps(adapter_config))
            with pytest.raises(UserError, match=message):
                DualEncoder.from_pretrained(tmp_path / "out")


def test_missing_packages_are_named_in_the_error(bases, tmp_path, monkeypatch):
    make_adapted_encoder(bases / "bert").save_pretrained(str(tmp_path))
    for name in ("peft", "bitsandbytes"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"pip install 'contaccum\[peft\]'"):
        add_adapter(DualEncoder.from_backbone(bases / "bert"), 4)
    with pytest.raises(ConfigError, match=r"needs peft, which is not installed"):
        DualEncoder.from_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="pip install bitsandbytes"):
        make_4bit_kwargs()
