"""DualEncoder: what it saves, sentence-transformers loads and encodes alike."""

import json
from typing import Any

import numpy as np
import pytest
import torch
from sample_texts import sentences
from sentence_transformers import SentenceTransformer
from transformers import (
    CamembertConfig,
    LongformerConfig,
    MPNetConfig,
    PretrainedConfig,
    RobertaConfig,
    XLMRobertaConfig,
)

from contaccum import DualEncoder
from contaccum.encoders.loading import require_model
from contaccum.encoders.settings import configure, set_max_lengths
from contaccum.encoders.towers import is_tied
from contaccum.errors import ConfigError, UserError

# The types in modules.json as the version before wrote them: its folders are loaded.
TIED = ("base.modules.transformer.Transformer", "sentence_transformer.modules.pooling.Pooling")
UNTIED = ("base.modules.router.Router",)


@pytest.mark.parametrize("pooling", ["cls", "mean", "lasttoken"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_saved_model_encodes_identically_in_sentence_transformers(
    tied, pooling, tiny_config, tiny_tokenizer, tmp_path
):
    texts_of = {
        "query_prompt": "what is ",
        "passage_prompt": "the ",
        "query_max_length": 7,
        "passage_max_length": 12,
    }
    how = {"pooling": pooling, "normalize": pooling == "mean", **texts_of}
    model = DualEncoder.from_backbone(tiny_config, tied=tied, tokenizer=tiny_tokenizer, **how)
    if not tied:  # towers that differ, so that a mix-up would show
        with torch.no_grad():
            for parameter in model.query_encoder.parameters():
                parameter.add_(0.01 * torch.randn_like(parameter))
    texts = sentences(9, length=15)
    queries, passages = model.encode_query(texts), model.encode_document(texts)
    model.save_pretrained(str(tmp_path))
    modules = json.loads((tmp_path / "modules.json").read_text())
    for module, kind in zip(modules, TIED if tied else UNTIED, strict=False):
        assert module["type"] == f"sentence_transformers.{kind}"
    for cls in (SentenceTransformer, DualEncoder):
        loaded = cls(str(tmp_path))
        assert np.array_equal(loaded.encode_query(texts), queries)
        assert np.array_equal(loaded.encode_document(texts), passages)
        assert (
            loaded.similarity_fn_name
            == model.similarity_fn_name
            == ("cosine" if pooling == "mean" else "dot")
        )
        assert loaded.prompts == {"query": "what is ", "document": "the "}
        assert is_tied(loaded) == tied
    assert not np.allclose(queries, passages)


def test_beir_names_agree_with_encode_query_and_encode_document(tiny_config, tiny_tokenizer):
    model = DualEncoder.from_backbone(
        tiny_config, tied=False, passage_prompt="the ", tokenizer=tiny_tokenizer
    )
    titles, texts = sentences(5, 1), sentences(5, 2)
    corpus = [{"title": t, "text": x} for t, x in zip(titles, texts, strict=True)]
    expected = model.encode_document([f"{t} {x}" for t, x in zip(titles, texts, strict=True)])
    assert np.array_equal(model.encode_corpus(corpus, batch_size=2), expected)
    assert np.array_equal(
        model.encode_corpus([{"text": x} for x in texts]), model.encode_document(texts)
    )
    assert np.array_equal(model.encode_queries(titles), model.encode_query(titles))
    assert isinstance(model.encode_queries(titles, convert_to_tensor=True), torch.Tensor)


def test_towers_work_in_a_loop_of_ones_own_and_cut_by_their_lengths(tiny_config, tiny_tokenizer):
    for tied in (True, False):
        lengths = {"query_max_length": 5, "passage_max_length": 9}
        model = DualEncoder.from_backbone(
            tiny_config, tied=tied, tokenizer=tiny_tokenizer, **lengths
        ).eval()
        assert model.tied == tied
        for task, tower, encode in (
            ("query", model.query_encoder, model.encode_query),
            ("document", model.passage_encoder, model.encode_document),
        ):
            features = model.preprocess(
                ["cat dog bird fish tree river stone cloud rain"], task=task
            )
            assert features["input_ids"].shape == (1, 5 if task == "query" else 9)
            embeddings = tower(model.preprocess(sentences(3), task=task))["sentence_embedding"]
            assert embeddings.requires_grad
            assert np.allclose(embeddings.detach().numpy(), encode(sentences(3)), atol=1e-6)


def test_arguments_that_cannot_work_are_refused(tiny_config, tiny_tokenizer):
    for settings, message in (
        (
            {"pooling": "men"},
            "pooling must be one of cls, mean, lasttoken, got 'men'; did you mean 'mean'",
        ),
        ({"dtype": "int8"}, "dtype must be one of"),
        ({"similarity": "euclidean"}, "similarity must be one of"),
        ({"query_max_length": 2}, "query_max_length=2: this model takes 3 to 64 tokens"),
        ({"tokenizer": None}, "tokenizer="),
    ):
        with pytest.raises(ConfigError, match=message):
            DualEncoder.from_backbone(tiny_config, **{"tokenizer": tiny_tokenizer, **settings})
    model = DualEncoder.from_backbone(tiny_config, dtype="bfloat16", tokenizer=tiny_tokenizer)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    with pytest.raises(ConfigError, match="passage_max_length=65: this model takes 3 to 64 tokens"):
        set_max_lengths(model, document=65)
    with pytest.raises(ConfigError, match="dropout"):
        configure(model, dropout=1.0)


def config_with_padded_positions(kind: type[PretrainedConfig], vocab_size: int) -> PretrainedConfig:
    """Return a config of a tiny backbone with 40 positions, of which padding_idx + 1 are unused."""
    sizes: dict[str, Any] = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16}
    sizes |= {"intermediate_size": 16, "vocab_size": vocab_size, "max_position_embeddings": 40}
    if kind is LongformerConfig:
        sizes["attention_window"] = [8]
    if kind is not MPNetConfig:  # MPNet's padding_idx is 1 whatever the config says
        sizes["pad_token_id"] = 0  # that of the tokenizer
    return kind(**sizes)


PADDED_POSITIONS = [
    (RobertaConfig, 39),
    (XLMRobertaConfig, 39),
    (CamembertConfig, 39),
    (LongformerConfig, 39),
    (MPNetConfig, 38),
]


@pytest.mark.parametrize(("kind", "longest"), PADDED_POSITIONS)
def test_the_largest_length_is_the_number_of_positions_after_padding(kind, longest, tiny_tokenizer):
    config = config_with_padded_positions(kind, len(tiny_tokenizer))
    model = DualEncoder.from_backbone(config, tokenizer=tiny_tokenizer, device="cpu")
    (long_text,) = sentences(1, length=100)
    assert model.max_seq_length == longest
    assert np.isfinite(model.encode_document([long_text])).all()
    set_max_lengths(model, query=longest, document=longest)
    assert np.isfinite(model.encode_query([long_text])).all()
    message = f"passage_max_length={longest + 1}: this model takes 3 to {longest} tokens"
    with pytest.raises(ConfigError, match=message):
        set_max_lengths(model, document=longest + 1)


@pytest.mark.parametrize("tied", [True, False])
def test_a_default_length_beyond_the_positions_of_texts_is_lowered_when_a_model_is_loaded(
    tied, tiny_tokenizer, tmp_path
):
    config = config_with_padded_positions(RobertaConfig, len(tiny_tokenizer))
    model = DualEncoder.from_backbone(config, tied=tied, tokenizer=tiny_tokenizer, device="cpu")
    for module in model.modules():
        if hasattr(module, "query_length"):
            module.query_length = None
            module.document_length = None
            module.max_seq_length = 40  # sentence-transformers' default: max_position_embeddings
    model.save_pretrained(str(tmp_path / "model"))
    loaded = DualEncoder.from_pretrained(tmp_path / "model", device="cpu")
    (long_text,) = sentences(1, length=100)
    assert np.isfinite(loaded.encode_query([long_text])).all()
    assert np.isfinite(loaded.encode_document([long_text])).all()
    assert loaded.max_seq_length == 39


def test_a_model_that_cannot_be_had_is_refused_in_one_line(tmp_path, monkeypatch):
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
        with pytest.raises(
            UserError, match=r"some/model: there is no such folder, and the model hub .*no network"
        ):
            make("some/model")


@pytest.mark.parametrize("tied", [True, False])
def test_frozen_word_embeddings_stay_and_all_else_trains(tiny_config, tiny_tokenizer, tied):
    model = DualEncoder.from_backbone(tiny_config, tied=tied, tokenizer=tiny_tokenizer)
    configure(model, freeze_word_embeddings=True)
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert len(frozen) == (1 if tied else 2) and all(
        name.endswith("word_embeddings.weight") for name in frozen
    )


def test_attention_is_chosen_by_name_and_an_unknown_one_refused(tiny_config, tiny_tokenizer):
    model = DualEncoder.from_backbone(tiny_config, tokenizer=tiny_tokenizer)
    configure(model, dropout=0.0)
    texts = ["a b", "b c d e"]
    before = model.encode(texts)
    configure(model, attn_implementation="eager")
    assert model[0].auto_model.config._attn_implementation == "eager"
    assert np.abs(model.encode(texts) - before).max() < 1e-5
    with pytest.raises(ConfigError, match="attn_implementation=flush"):
        configure(model, attn_implementation="flush")
