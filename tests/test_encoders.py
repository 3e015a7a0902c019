"""DualEncoder: what it saves, sentence-transformers loads and encodes alike."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sample_texts import sentences
from sentence_transformers import SentenceTransformer

from contaccum import DualEncoder
from contaccum.encoders import freeze_word_embeddings, is_tied, set_attention, set_dropout
from contaccum.errors import ConfigError, UserError


@pytest.mark.parametrize("pooling", ["cls", "mean", "lasttoken"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_saved_model_encodes_identically_in_sentence_transformers(
    tied: bool, pooling: str, tiny_config: Any, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    model = DualEncoder.from_backbone(
        tiny_config,
        tied=tied,
        pooling=pooling,
        normalize=pooling == "mean",
        query_prompt="what is ",
        passage_prompt="the ",
        query_max_length=7,
        passage_max_length=12,
        tokenizer=tiny_tokenizer,
    )
    if not tied:  # towers that differ, so that a mix-up would show
        with torch.no_grad():
            for parameter in model.query_encoder.parameters():
                parameter.add_(0.01 * torch.randn_like(parameter))
    texts = sentences(9, length=15)
    queries, passages = model.encode_query(texts), model.encode_document(texts)
    model.save_pretrained(str(tmp_path))
    for cls in (SentenceTransformer, DualEncoder):
        loaded = cls(str(tmp_path))
        assert np.array_equal(loaded.encode_query(texts), queries)
        assert np.array_equal(loaded.encode_document(texts), passages)
        assert loaded.similarity_fn_name == model.similarity_fn_name == ("cosine" if pooling == "mean" else "dot")
        assert loaded.prompts == {"query": "what is ", "document": "the "}
        assert is_tied(loaded) == tied
    assert not np.allclose(queries, passages)


def test_lengths_are_cut_by_tower(tiny_config: Any, tiny_tokenizer: Any) -> None:
    for tied in (True, False):
        model = DualEncoder.from_backbone(
            tiny_config, tied=tied, query_max_length=5, passage_max_length=9, tokenizer=tiny_tokenizer
        )
        text = ["cat dog bird fish tree river stone cloud rain sun moon star"]
        assert model.preprocess(text, task="query")["input_ids"].shape == (1, 5)
        assert model.preprocess(text, task="document")["input_ids"].shape == (1, 9)


def test_beir_names_agree_with_encode_query_and_encode_document(tiny_config: Any, tiny_tokenizer: Any) -> None:
    model = DualEncoder.from_backbone(tiny_config, tied=False, passage_prompt="the ", tokenizer=tiny_tokenizer)
    titles, texts = sentences(5, 1), sentences(5, 2)
    corpus = [{"title": t, "text": x} for t, x in zip(titles, texts, strict=True)]
    expected = model.encode_document([f"{t} {x}" for t, x in zip(titles, texts, strict=True)])
    assert np.array_equal(model.encode_corpus(corpus, batch_size=2), expected)
    assert np.array_equal(model.encode_corpus({"title": titles, "text": texts}), expected)
    assert np.array_equal(model.encode_corpus([{"text": x} for x in texts]), model.encode_document(texts))
    assert np.array_equal(model.encode_queries(titles), model.encode_query(titles))
    assert isinstance(model.encode_queries(titles, convert_to_tensor=True), torch.Tensor)


def test_towers_work_in_a_loop_of_ones_own(tiny_config: Any, tiny_tokenizer: Any) -> None:
    for tied in (True, False):
        model = DualEncoder.from_backbone(tiny_config, tied=tied, normalize=True, tokenizer=tiny_tokenizer).eval()
        assert model.tied == tied
        for task, tower, encode in (
            ("query", model.query_encoder, model.encode_query),
            ("document", model.passage_encoder, model.encode_document),
        ):
            embeddings = tower(model.preprocess(sentences(3), task=task))["sentence_embedding"]
            assert embeddings.requires_grad
            assert np.allclose(embeddings.detach().numpy(), encode(sentences(3)), atol=1e-6)


def test_weights_in_bfloat16(tiny_config: Any, tiny_tokenizer: Any) -> None:
    model = DualEncoder.from_backbone(tiny_config, dtype="bfloat16", tokenizer=tiny_tokenizer)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.encode_query(sentences(2), convert_to_tensor=True).shape == (2, 32)


def test_backbone_from_a_folder(tiny_config: Any, tiny_tokenizer: Any, tmp_path: Path) -> None:
    from transformers import AutoModel

    backbone = AutoModel.from_config(tiny_config)
    backbone.save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    model = DualEncoder.from_backbone(tmp_path, pooling="mean")
    loaded = model[0].auto_model.state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in backbone.state_dict().items())


def test_arguments_that_cannot_work_are_refused(tiny_config: Any, tiny_tokenizer: Any, tmp_path: Path) -> None:
    for settings in (
        {"pooling": "max"},
        {"dtype": "int8"},
        {"similarity": "euclidean"},
        {"query_max_length": 2},
        {"passage_max_length": 65},
    ):
        with pytest.raises(ConfigError):
            DualEncoder.from_backbone(tiny_config, tokenizer=tiny_tokenizer, **{"passage_max_length": 40, **settings})
    with pytest.raises(ConfigError, match="tokenizer="):
        DualEncoder.from_backbone(tiny_config)
    with pytest.raises(UserError, match="no such model folder"):
        DualEncoder.from_pretrained(tmp_path / "nothing")


def test_import_is_fast_and_pulls_in_neither_faiss_nor_beir() -> None:
    code = (
        "import sys, time; start = time.perf_counter(); import contaccum; seconds = time.perf_counter() - start;"
        "loaded = {'faiss', 'beir', 'torch', 'transformers'} & set(sys.modules);"
        "assert not loaded, loaded; assert seconds < 0.5, seconds;"
        "from contaccum import BankedInfoNCE; assert 'faiss' not in sys.modules and 'beir' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize("tied", [True, False])
def test_frozen_word_embeddings_stay_and_all_else_trains(tiny_config: Any, tiny_tokenizer: Any, tied: bool) -> None:
    model = DualEncoder.from_backbone(tiny_config, tied=tied, tokenizer=tiny_tokenizer)
    freeze_word_embeddings(model)
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert len(frozen) == (1 if tied else 2) and all(name.endswith("word_embeddings.weight") for name in frozen)
    with pytest.raises(ConfigError, match="freeze_word_embeddings needs a transformers backbone"):
        freeze_word_embeddings(torch.nn.Linear(2, 2))


def test_attention_is_chosen_by_name_and_an_unknown_one_refused(tiny_config: Any, tiny_tokenizer: Any) -> None:
    model = DualEncoder.from_backbone(tiny_config, tokenizer=tiny_tokenizer)
    set_dropout(model, 0.0)
    texts = ["a b", "b c d e"]
    before = model.encode(texts)
    set_attention(model, "eager")
    assert {m.config._attn_implementation for m in model.modules() if hasattr(m, "set_attn_implementation")} == {
        "eager"
    }
    assert np.abs(model.encode(texts) - before).max() < 1e-5
    with pytest.raises(ConfigError, match="attn_implementation=flush"):
        set_attention(model, "flush")
