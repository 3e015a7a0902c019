"""Folders of `contaccum export`: plain sentence-transformers loads them, equal to the model."""

from __future__ import annotations

import copy
import json
import re
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from tiny_models import qwen3_config, tiny_encoder, word_tokenizer
from transformers import set_seed

from contaccum import DualEncoder
from contaccum.cli import main
from contaccum.cli.export import _parse_arguments
from contaccum.encoders.adapters import add_adapter
from contaccum.encoders.export import export_model, make_plain_models
from contaccum.encoders.settings import get_tower, is_tied, require_max_length
from contaccum.errors import ConfigError, UserError
from contaccum.files import require_new_folder

TEXTS = ["red apple tree", "a house by the water " * 20, "x"]


def encode_exported(folder: Path, task: str) -> np.ndarray:
    """Encode `TEXTS` with an exported folder, loaded by plain sentence-transformers."""
    model = SentenceTransformer(str(folder), device="cpu")
    encode = model.encode_query if task == "query" else model.encode_document
    return encode(TEXTS)


def tiny_decoder() -> DualEncoder:
    """Return a fresh decoder, which pools the EOS that ends each text."""
    set_seed(3)
    tokenizer = copy.deepcopy(word_tokenizer())
    tokenizer.eos_token = "[SEP]"
    return DualEncoder.from_backbone(
        qwen3_config(len(tokenizer)),
        pooling="lasttoken",
        similarity="cos",
        query_prompt="query: ",
        tokenizer=tokenizer,
        device="cpu",
    )


def make_two_towers() -> DualEncoder:
    """Return an encoder whose towers differ in weights and in length."""
    model = tiny_encoder(tied=False, query_max_length=8, passage_max_length=32)
    with torch.no_grad():
        for weight in get_tower(model, "query").parameters():
            weight.add_(0.05)
    return model


@pytest.mark.parametrize(
    ("make_model", "is_normalised"),
    [
        (partial(tiny_encoder, query_prompt="query: ", query_max_length=12), True),
        (make_two_towers, True),
        (partial(tiny_encoder, normalize=False, similarity="cos"), True),
        (partial(tiny_encoder, normalize=False, similarity="dot"), False),
        (tiny_decoder, True),
    ],
    ids=["tied", "two towers", "cos", "dot", "decoder"],
)
def test_exported_folders_equal_the_model(make_model, is_normalised, tmp_path):
    """Embeddings are normalised for cosine alone. Two towers become two folders."""
    model = make_model()
    expected = {"query": model.encode_query(TEXTS), "document": model.encode_document(TEXTS)}
    record = export_model(model, tmp_path / "out")
    assert min(check["least"] for check in record["checks"]) > 0.99999
    assert (tmp_path / "out" / "modules.json").exists() == is_tied(model)
    for task, embeddings in expected.items():
        folder = tmp_path / "out" if is_tied(model) else tmp_path / "out" / task
        if is_normalised:
            embeddings = embeddings / np.linalg.norm(embeddings, axis=1, keepdims=True)
        np.testing.assert_allclose(encode_exported(folder, task), embeddings, atol=1e-5)
        if not is_tied(model):
            config = json.loads((folder / "sentence_bert_config.json").read_text())
            assert config["max_seq_length"] == {"query": 8, "document": 32}[task]


def test_an_adapter_on_a_bfloat16_base_is_merged_without_rounding(tmp_path):
    """In bfloat16, most of this small update would be rounded away."""
    tiny_encoder(dtype="bfloat16").save_pretrained(str(tmp_path / "base"))
    model = DualEncoder.from_pretrained(tmp_path / "base", device="cpu")
    add_adapter(model, r=2)
    before = copy.deepcopy(model).float().encode_document(TEXTS)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_(0, 1e-4)
    expected = copy.deepcopy(model).float().encode_document(TEXTS)
    export_model(model, tmp_path / "out")
    exported = encode_exported(tmp_path / "out", "document")
    assert not list((tmp_path / "out").glob("adapter*"))
    size_of_update = np.abs(expected - before).max()
    assert size_of_update > 0
    assert np.abs(exported - expected).max() < 0.1 * size_of_update


def test_a_model_with_its_own_code_is_exported_if_the_code_is_trusted(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "hf"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    folder = tmp_path / "model"
    tiny_encoder().save_pretrained(str(folder))
    (folder / "own_code.py").write_text(
        "from transformers import BertConfig, BertModel\n"
        "class OwnConfig(BertConfig):\n    model_type = 'own'\n"
        "class OwnModel(BertModel):\n    config_class = OwnConfig\n"
    )
    config = json.loads((folder / "config.json").read_text())
    config["model_type"] = "own"
    config["auto_map"] = {"AutoConfig": "own_code.OwnConfig", "AutoModel": "own_code.OwnModel"}
    (folder / "config.json").write_text(json.dumps(config))
    assert main(["export", str(folder), str(tmp_path / "out"), "--trust_remote_code"]) == 0
    assert (tmp_path / "out" / "own_code.py").is_file()
    model = DualEncoder.from_pretrained(folder, device="cpu", trust_remote_code=True)
    with pytest.raises(ValueError, match="trust_remote_code"):
        export_model(model, tmp_path / "untrusted")
    assert not (tmp_path / "untrusted").exists()


def test_settings_lie_under_the_names_and_keys_that_servers_read(tmp_path):
    """sentence-transformers 6 itself writes other names, which servers do not look for."""
    export_model(tiny_encoder(pooling="cls", passage_max_length=32), tmp_path / "out")
    modules = json.loads((tmp_path / "out" / "modules.json").read_text())
    assert [module["type"] for module in modules] == [
        "sentence_transformers.models.Transformer",
        "sentence_transformers.models.Pooling",
        "sentence_transformers.models.Normalize",
    ]
    pooling = json.loads((tmp_path / "out" / "1_Pooling" / "config.json").read_text())
    assert pooling["pooling_mode_cls_token"] is True
    assert pooling["pooling_mode_mean_tokens"] is False
    first_true_key = next(key for key, value in pooling.items() if value is True)
    assert first_true_key == "pooling_mode_cls_token"
    config = json.loads((tmp_path / "out" / "sentence_bert_config.json").read_text())
    assert config["max_seq_length"] == 32
    tokenizer = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert tokenizer["model_max_length"] == 32


def test_a_bfloat16_model_is_compared_in_float32(tmp_path):
    """Deep models would fail the check if they encoded the texts in bfloat16."""
    record = export_model(tiny_encoder(dtype="bfloat16"), tmp_path / "out")
    assert min(check["least"] for check in record["checks"]) > 1 - 1e-10


def test_weights_are_saved_in_the_dtype_and_the_cosine_is_recorded(tmp_path):
    record = export_model(tiny_encoder(), tmp_path / "out", dtype="bfloat16")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert 0.99 < record["checks"][0]["least"] < 1.0
    written = json.loads((tmp_path / "out" / "export.json").read_text())
    assert written["checks"] == record["checks"]


def test_a_float32_export_with_other_embeddings_is_refused_and_leaves_nothing(tmp_path):
    model = tiny_encoder()

    def reverse(module: Any, arguments: Any, output: dict[str, torch.Tensor]) -> None:
        output["sentence_embedding"] = output["sentence_embedding"].flip(1)

    model[1].register_forward_hook(reverse)  # which is not saved
    with pytest.raises(UserError, match="other embeddings than the model"):
        export_model(model, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_modules_and_truncation_that_servers_do_not_have_are_refused():
    with_layer_norm = tiny_encoder()
    with_layer_norm.append(torch.nn.LayerNorm(16))
    truncated = tiny_encoder()
    truncated.truncate_dim = 8
    for model, message in ((with_layer_norm, "LayerNorm"), (truncated, "truncate_dim=8")):
        with pytest.raises(ConfigError, match=message):
            make_plain_models(model)


def test_a_model_without_a_maximum_length_is_refused(tmp_path):
    model = tiny_encoder()
    model[0].query_length = None
    model[0].document_length = None
    model.max_seq_length = 10**30  # the number of a tokenizer without a limit
    assert require_max_length(model, "query") == 64  # the positions of the backbone
    model[0].config.max_position_embeddings = 0
    with pytest.raises(ConfigError, match="no maximum length"):
        export_model(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_export_commands_in_the_documentation_are_accepted():
    text = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
    commands = re.findall("^    contaccum export (.*)", text, re.MULTILINE)
    assert len(commands) == 2
    for command in commands:
        args = _parse_arguments(shlex.split(command, comments=True))
        require_new_folder(args.folder)
