"""DualEncoder: saving and loading, towers, maximum lengths, and refused arguments."""

import json
import shutil
import sys
from typing import Any

import numpy as np
import pytest
import torch
from sample_texts import sentences
from sentence_transformers import SentenceTransformer
from tiny_models import tiny_encoder
from transformers import MPNetConfig, PretrainedConfig, RobertaConfig, XLMRobertaConfig

from contaccum import DualEncoder
from contaccum.encoders.dual_encoder import untie
from contaccum.encoders.names import require_model
from contaccum.encoders.settings import configure, get_tower, is_tied, set_max_lengths
from contaccum.errors import ConfigError, UserError, warn_once

# Module types that modules.json must hold, so that older and newer versions can load the folders.
TIED = ("base.modules.transformer.Transformer", "sentence_transformer.modules.pooling.Pooling")
UNTIED = ("base.modules.router.Router",)


@pytest.mark.parametrize("pooling", ["cls", "mean", "lasttoken"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_saved_model_encodes_identically_in_sentence_transformers(
    tied, pooling, tiny_config, tiny_tokenizer, tmp_path
):
    normalize = pooling == "mean"
    model = DualEncoder.from_backbone(
        tiny_config,
        tied=tied,
        tokenizer=tiny_tokenizer,
        pooling=pooling,
        normalize=normalize,
        query_prompt="what is ",
        passage_prompt="the ",
        query_max_length=7,
        passage_max_length=12,
    )
    if not tied:
        # The towers must differ, so that the test fails if they are swapped.
        with torch.no_grad():
            for parameter in get_tower(model, "query").parameters():
                parameter.add_(0.01 * torch.randn_like(parameter))
    texts = sentences(9, length=15)
    queries = model.encode_query(texts)
    passages = model.encode_document(texts)
    model.save_pretrained(str(tmp_path))
    modules = json.loads((tmp_path / "modules.json").read_text())
    expected_types = TIED if tied else UNTIED
    for module, type_name in zip(modules, expected_types, strict=False):
        assert module["type"] == f"sentence_transformers.{type_name}"
    for cls in (SentenceTransformer, DualEncoder):
        loaded = cls(str(tmp_path))
        assert np.array_equal(loaded.encode_query(texts), queries)
        assert np.array_equal(loaded.encode_document(texts), passages)
        assert model.similarity_fn_name == ("cosine" if normalize else "dot")
        assert loaded.similarity_fn_name == model.similarity_fn_name
        assert loaded.prompts == {"query": "what is ", "document": "the "}
        assert is_tied(loaded) == tied
    assert not np.allclose(queries, passages)


def test_towers_can_be_called_directly_and_truncate_texts(tiny_config, tiny_tokenizer):
    for tied in (True, False):
        model = DualEncoder.from_backbone(
            tiny_config,
            tied=tied,
            tokenizer=tiny_tokenizer,
            query_max_length=5,
            passage_max_length=9,
        ).eval()
        assert is_tied(model) == tied
        for task, max_length, tower, encode in (
            ("query", 5, get_tower(model, "query"), model.encode_query),
            ("document", 9, get_tower(model, "document"), model.encode_document),
        ):
            long_text = "cat dog bird fish tree river stone cloud rain"
            features = model.preprocess([long_text], task=task)
            assert features["input_ids"].shape == (1, max_length)
            embeddings = tower(model.preprocess(sentences(3), task=task))["sentence_embedding"]
            assert embeddings.requires_grad
            assert np.allclose(embeddings.detach().numpy(), encode(sentences(3)), atol=1e-6)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_loss_sees_the_truncated_embeddings_that_encode_returns(tied, tmp_path):
    model = tiny_encoder(tied)
    model.truncate_dim = 6
    model.save_pretrained(str(tmp_path))
    model = DualEncoder.from_pretrained(tmp_path, device="cpu").eval()
    texts = sentences(3)
    embeddings = model(model.preprocess(texts, task="query"))["sentence_embedding"]
    assert embeddings.shape == (3, model.get_embedding_dimension()) == (3, 6)
    assert np.allclose(embeddings.detach(), model.encode_query(texts), atol=1e-6)
    assert model.encode_query(texts, truncate_dim=9).shape == (3, 9)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_module_with_its_own_code_is_saved_with_the_code(
    tied, own_code_path, tmp_path, monkeypatch
):
    model = DualEncoder.from_pretrained(own_code_path, device="cpu", trust_remote_code=True)
    expected = model.encode_query(sentences(3))
    if not tied:
        untie(model)
    model.save_pretrained(str(tmp_path / "saved"))
    # The saved folder is loaded as on another machine, where transformers has not cached the code.
    for folder in (own_code_path, tmp_path / "hf"):
        shutil.rmtree(folder)
    for name in list(sys.modules):
        if name.startswith("transformers_modules"):
            monkeypatch.delitem(sys.modules, name)
    with pytest.raises(UserError, match="trust_remote_code"):
        DualEncoder.from_pretrained(tmp_path / "saved", device="cpu")
    loaded = DualEncoder.from_pretrained(tmp_path / "saved", device="cpu", trust_remote_code=True)
    assert np.array_equal(loaded.encode_query(sentences(3)), expected)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_model_with_two_towers_warns_once_that_encode_takes_the_document_tower(tied, caplog):
    warn_once.cache_clear()
    model = tiny_encoder(tied)
    documents = model.encode_document(sentences(2))
    model.encode_query(sentences(2))
    assert not caplog.messages
    for options in ({}, {"prompt_name": "query"}):
        assert np.array_equal(model.encode(sentences(2), **options), documents)
    assert ["encode_query" in message for message in caplog.messages] == ([] if tied else [True])


@pytest.mark.parametrize("task", ["query", "document"])
@pytest.mark.parametrize("length", [31, 32])
def test_a_prompt_that_leaves_no_room_for_text_is_refused(task, length):
    model = tiny_encoder(passage_max_length=32)
    model.prompts[task] = " ".join(["cat"] * (length - 2))  # and two special tokens
    encode = model.encode_query if task == "query" else model.encode_document
    if length < 32:
        assert not np.array_equal(*encode(["dog", "bird"]))
        assert encode(["", " "]).shape == (2, 16)  # blank texts are no error
        return
    with pytest.raises(ConfigError, match="32 tokens leaves no room for text beside the prompt"):
        encode(["dog"])


def test_invalid_arguments_are_refused(tiny_config, tiny_tokenizer):
    for settings, message in (
        ({"pooling": "men"}, "did you mean 'mean'"),
        ({"query_max_length": 2}, "query_max_length=2: this model takes 3 to 64 tokens"),
        ({"passage_max_length": 65}, "passage_max_length=65"),
    ):
        with pytest.raises(ConfigError, match=message):
            DualEncoder.from_backbone(tiny_config, **{"tokenizer": tiny_tokenizer, **settings})
    model = DualEncoder.from_backbone(tiny_config, dtype="bfloat16", tokenizer=tiny_tokenizer)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def config_with_padded_positions(kind: type[PretrainedConfig], vocab_size: int) -> PretrainedConfig:
    """Return a config of a tiny backbone with 40 positions, of which padding_idx + 1 are unused."""
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": vocab_size}
    sizes |= {"hidden_size": 16, "intermediate_size": 16, "max_position_embeddings": 40}
    # MPNet ignores the pad_token_id of its config: its padding_idx is always 1.
    if kind is not MPNetConfig:
        sizes["pad_token_id"] = 0
    return kind(**sizes)


PADDED_POSITIONS = [(RobertaConfig, 39), (XLMRobertaConfig, 39), (MPNetConfig, 38)]


@pytest.mark.parametrize(("kind", "max_length"), PADDED_POSITIONS)
def test_maximum_length_is_the_positions_after_padding(kind, max_length, tiny_tokenizer):
    config = config_with_padded_positions(kind, len(tiny_tokenizer))
    model = DualEncoder.from_backbone(config, tokenizer=tiny_tokenizer, device="cpu")
    (long_text,) = sentences(1, length=100)
    assert model.max_seq_length == max_length
    assert np.isfinite(model.encode_document([long_text])).all()
    set_max_lengths(model, query=max_length, document=max_length)
    assert np.isfinite(model.encode_query([long_text])).all()
    with pytest.raises(ConfigError, match=f"takes 3 to {max_length} tokens"):
        set_max_lengths(model, document=max_length + 1)


@pytest.mark.parametrize("tied", [True, False])
def test_loading_lowers_lengths_beyond_the_positions(tied, tiny_tokenizer, tmp_path):
    """The default of sentence-transformers, max_position_embeddings, is one too many here."""
    config = config_with_padded_positions(RobertaConfig, len(tiny_tokenizer))
    model = DualEncoder.from_backbone(config, tied=tied, tokenizer=tiny_tokenizer, device="cpu")
    for module in model.modules():
        if hasattr(module, "query_length"):
            module.query_length = None
            module.document_length = None
            module.max_seq_length = 40
    model.save_pretrained(str(tmp_path / "model"))
    loaded = DualEncoder.from_pretrained(tmp_path / "model", device="cpu")
    (long_text,) = sentences(1, length=100)
    assert np.isfinite(loaded.encode_query([long_text])).all()
    assert np.isfinite(loaded.encode_document([long_text])).all()
    assert loaded.max_seq_length == 39


def test_models_that_cannot_be_loaded_are_refused(tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "modules.json").write_text('[{"idx": 0,')
    for name, message in (
        (tmp_path / "nothing", "no such model folder"),
        (tmp_path / "empty", "not a model that can be loaded"),
        (tmp_path / "torn", "modules.json: not a JSON file"),
    ):
        with pytest.raises(UserError, match=message):
            DualEncoder.from_pretrained(name)

    def model_info(self: Any, name: str, timeout: float) -> None:
        raise ConnectionError("no network")

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", model_info)
    for make in (DualEncoder.from_pretrained, DualEncoder.from_backbone, require_model):
        with pytest.raises(UserError, match=r"the model hub .*no network"):
            make("some/model")


def test_attention_implementation_is_set_by_name(tiny_config, tiny_tokenizer):
    model = DualEncoder.from_backbone(tiny_config, tokenizer=tiny_tokenizer)
    configure(model, dropout=0.0)
    texts = ["a b", "b c d e"]
    before = model.encode(texts)
    configure(model, attn_implementation="eager")
    assert model[0].auto_model.config._attn_implementation == "eager"
    assert np.abs(model.encode(texts) - before).max() < 1e-5
    with pytest.raises(ConfigError, match="attn_implementation=flush"):
        configure(model, attn_implementation="flush")
