"""Diagnosis of embedding servers: the named cause is right for each fault of a server."""

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from embedding_server import Embed, embed_with, run_server
from sample_texts import sentences
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling
from tiny_models import bert_config, qwen3_config, word_tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import set_seed

from contaccum import DualEncoder
from contaccum.encoders.agreement import LEAST_COSINE
from contaccum.encoders.settings import set_max_lengths
from contaccum.errors import ConfigError
from contaccum.evaluation import endpoint_causes
from contaccum.evaluation.endpoint_check import (
    ServedModel,
    choose_sample,
    compare_sample,
)

QUERY_PROMPT = "where is: "
DOCUMENT_PROMPT = "the river says: "
QUERIES = sentences(6, 1, 5)
DOCUMENTS = [*sentences(4, 2, 9), *sentences(4, 3, 50)]
"""Half of the documents are longer than the model reads."""


def make_model(config: Any = None, **settings: Any) -> DualEncoder:
    """Return an encoder with prompts that reads 40 tokens."""
    set_seed(7)
    settings = {
        "pooling": "mean",
        "normalize": True,
        "query_prompt": QUERY_PROMPT,
        "passage_prompt": DOCUMENT_PROMPT,
        "query_max_length": 40,
        "passage_max_length": 40,
        **settings,
    }
    # Large weights make the embeddings of different texts differ clearly.
    config = config or bert_config(1, 32, 64, initializer_range=0.2)
    return DualEncoder.from_backbone(config, tokenizer=word_tokenizer(), device="cpu", **settings)


@pytest.fixture(scope="module")
def model() -> DualEncoder:
    return make_model()


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def check(model: SentenceTransformer, embed: Embed) -> dict[str, Any]:
    """Compare a model with a server that encodes by ``embed``."""
    with run_server(embed) as server:
        served_model = ServedModel(model, server.url, None, "served", show_progress=False)
        return compare_sample(served_model, QUERIES, DOCUMENTS)


def name_causes(sample: dict[str, Any]) -> dict[str, list[str]]:
    """Return {kind of texts: names of its causes}."""
    names: dict[str, list[str]] = {"query": [], "document": []}
    for cause in sample["causes"]:
        assert cause["advice"]
        for kind in cause["kinds"]:
            names[kind].append(cause["name"])
    return names


def for_both(name: str) -> dict[str, list[str]]:
    return {"query": [name], "document": [name]}


def get_text(prompted_text: str) -> str:
    return prompted_text.removeprefix(QUERY_PROMPT).removeprefix(DOCUMENT_PROMPT)


def get_prompt(prompted_text: str) -> str:
    return prompted_text.removesuffix(get_text(prompted_text))


@pytest.mark.parametrize("normalize", [True, False])
def test_a_right_server_has_no_difference(normalize):
    model = make_model(normalize=normalize)
    sample = check(model, embed_with(model))
    for kind in ("query", "document"):
        assert sample[kind]["agrees"]
        assert sample[kind]["least_cosine"] >= LEAST_COSINE
        np.testing.assert_allclose(sample[kind]["model_norms"], sample[kind]["endpoint_norms"])
    assert sample["query"]["texts"] == 6
    assert sample["document"]["texts"] == 8
    assert sample["causes"] == sample["unexplained"] == sample["hypotheses"] == []


def test_missing_prompts_are_named(model):
    embed = embed_with(model)
    sample = check(model, lambda texts: embed([get_text(text) for text in texts]))
    assert name_causes(sample) == for_both("prompt missing")
    rows = {row["name"]: row for row in sample["hypotheses"]}
    assert rows["prompt missing"]["query"] == pytest.approx(1)
    assert rows["as trained"]["query"] == pytest.approx(sample["query"]["mean_cosine"])
    assert rows["as trained"]["query"] < 0.99


def test_doubled_prompts_are_named(model):
    embed = embed_with(model)
    sample = check(model, lambda texts: embed([get_prompt(text) + text for text in texts]))
    assert name_causes(sample) == for_both("prompt doubled")


def test_a_prompt_that_the_server_adds_to_all_texts_is_named(model):
    embed = embed_with(model)
    sample = check(model, lambda texts: embed([QUERY_PROMPT + text for text in texts]))
    expected = {"query": ["prompt doubled"], "document": ["prompt of the other kind added"]}
    assert name_causes(sample) == expected


def test_a_prompt_that_the_server_pools_is_named():
    """Some models leave the prompt out of the pooling, and servers do not."""
    model = make_model()
    model.set_pooling_include_prompt(False)
    sample = check(model, embed_with(model))
    assert name_causes(sample) == for_both("prompt pooled")


@pytest.mark.parametrize("length", [32, 64])
def test_another_length_is_named_for_the_texts_that_it_cuts(model, length):
    server_model = copy.deepcopy(model)
    set_max_lengths(server_model, length, length)
    sample = check(model, embed_with(server_model))
    name = "cut at 32 tokens" if length == 32 else "not cut"
    assert name_causes(sample) == {"query": [], "document": [name]}
    assert sample["query"]["agrees"]


def test_a_server_that_cuts_queries_as_documents_is_named():
    """A server has one length, and an export has the longer one of the model."""
    model = make_model(query_max_length=6)
    server_model = copy.deepcopy(model)
    set_max_lengths(server_model, 40, 40)
    sample = check(model, embed_with(server_model))
    # Every query fits into the server's 40 tokens.
    assert name_causes(sample) == {"query": ["not cut"], "document": []}
    assert set(sample["hypotheses"][0]) == {"name", "query"}


def test_a_cut_start_is_named(model):
    server_model = copy.deepcopy(model)
    server_model.tokenizer.truncation_side = "left"
    sample = check(model, embed_with(server_model))
    assert name_causes(sample) == {"query": [], "document": ["start of the text cut"]}


@pytest.mark.parametrize("mode, name", [("cls", "first token (cls)"), ("lasttoken", "last token")])
def test_another_pooling_is_named(model, mode, name):
    server_model = copy.deepcopy(model)
    server_model[1] = Pooling(32, pooling_mode=mode)
    sample = check(model, embed_with(server_model))
    assert name_causes(sample) == for_both(f"pooling: {name}")


def make_decoder() -> DualEncoder:
    config = qwen3_config(len(word_tokenizer()))
    config.initializer_range = 0.2
    return make_model(config, pooling="lasttoken")


def test_missing_eos_is_named():
    model = make_decoder()
    server_model = copy.deepcopy(model)
    tokenizer = server_model.tokenizer
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        ["[CLS]", "$A"], special_tokens=[("[CLS]", tokenizer.cls_token_id)]
    )
    assert tokenizer("cat")["input_ids"][-1] != tokenizer.sep_token_id
    sample = check(model, embed_with(server_model))
    assert name_causes(sample) == for_both("EOS (last special token) missing")


def test_mean_pooling_of_a_decoder_is_named():
    model = make_decoder()
    server_model = copy.deepcopy(model)
    server_model[1] = Pooling(32, pooling_mode="mean")
    sample = check(model, embed_with(server_model))
    assert name_causes(sample) == for_both("pooling: mean")


@pytest.mark.parametrize("dtype, initializer_range", [("bfloat16", 0.3), ("float16", 0.7)])
def test_another_dtype_is_named(dtype, initializer_range):
    """Such large weights make the rounding visible in a tiny model."""
    model = make_model(bert_config(4, 32, 64, initializer_range=initializer_range))
    server_model = copy.deepcopy(model).to(getattr(torch, dtype))

    def embed(texts):
        embeddings = server_model.encode_document(list(texts), prompt="", convert_to_tensor=True)
        return embeddings.float().numpy()

    sample = check(model, embed)
    assert [cause["name"] for cause in sample["causes"]] == [dtype]
    assert sample["unexplained"] == []
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def scale(embed: Embed, normalize: bool) -> Embed:
    def embed_scaled(texts):
        embeddings = embed(texts)
        if normalize:
            return embeddings / np.linalg.norm(embeddings, axis=1, keepdims=True)
        return embeddings * np.linspace(2, 3, len(embeddings))[:, None]

    return embed_scaled


def test_embeddings_that_are_not_normalised_are_named(model):
    sample = check(model, scale(embed_with(model), normalize=False))
    assert name_causes(sample) == for_both("not normalised")
    assert not sample["query"]["agrees"]
    assert sample["query"]["least_cosine"] >= LEAST_COSINE
    assert sample["hypotheses"] == []


def test_embeddings_that_must_not_be_normalised_are_named():
    model = make_model(normalize=False)
    sample = check(model, scale(embed_with(model), normalize=True))
    assert name_causes(sample) == for_both("normalised, though the model is not")
    assert sample["query"]["endpoint_norms"] == pytest.approx([1, 1])


def test_another_scale_is_named():
    model = make_model(normalize=False)
    embed = embed_with(model)
    sample = check(model, lambda texts: embed(texts) * 2)
    assert name_causes(sample) == for_both("lengths of the embeddings differ")


def test_normalisation_is_named_beside_another_cause(model):
    embed = embed_with(model)
    sample = check(
        model, scale(lambda texts: embed([get_text(text) for text in texts]), normalize=False)
    )
    expected = ["not normalised", "prompt missing"]
    assert name_causes(sample) == {"query": expected, "document": expected}


def test_two_faults_at_once_are_not_explained(model):
    """Every hypothesis is in the table."""
    server_model = copy.deepcopy(model)
    server_model[1] = Pooling(32, pooling_mode="cls")
    embed = embed_with(server_model)
    sample = check(model, lambda texts: embed([get_text(text) for text in texts]))
    assert sample["causes"] == []
    assert sample["unexplained"] == ["query", "document"]
    assert [row["name"] for row in sample["hypotheses"]] == [
        "as trained",
        "prompt missing",
        "prompt doubled",
        "prompt of the other kind added",
        "cut at 32 tokens",
        "not cut",
        "start of the text cut",
        "EOS (last special token) missing",
        "pooling: first token (cls)",
        "pooling: last token",
        "bfloat16",
        "float16",
    ]


def test_a_hypothesis_without_numbers_is_left_out(model, monkeypatch):
    """The float16 variant of some models overflows."""

    def overflow(*arguments):
        variant = copy.deepcopy(model)
        with torch.no_grad():
            next(variant.parameters()).fill_(float("inf"))
        return variant

    monkeypatch.setattr(endpoint_causes, "_set_dtype", overflow)
    embed = embed_with(model)
    sample = check(model, lambda texts: embed([get_text(text) for text in texts]))
    assert name_causes(sample) == for_both("prompt missing")
    names = [row["name"] for row in sample["hypotheses"]]
    assert "pooling: last token" in names
    assert "float16" not in names


def test_the_weights_of_another_model_are_not_explained(model):
    other_model = make_model()
    with torch.no_grad():
        for parameter in other_model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    sample = check(model, embed_with(other_model))
    assert sample["causes"] == []
    assert sample["unexplained"] == ["query", "document"]


def test_the_diagnosis_leaves_the_model_unchanged(model):
    before = model.encode_document(DOCUMENTS)
    settings_before = (dict(model.prompts), model[0].query_length, model.tokenizer.truncation_side)
    embed = embed_with(copy.deepcopy(model))
    check(model, lambda texts: -embed(texts))
    np.testing.assert_array_equal(model.encode_document(DOCUMENTS), before)
    settings = (dict(model.prompts), model[0].query_length, model.tokenizer.truncation_side)
    assert settings == settings_before


def test_two_towers_need_two_servers():
    model = make_model(tied=False)
    with torch.no_grad():
        for parameter in model.query_encoder.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    with pytest.raises(ConfigError, match=r"two towers.*--query_endpoint"):
        ServedModel(model, "http://127.0.0.1:1", None, "served")


def test_each_tower_is_compared_with_its_own_server():
    """The server of the queries has a fault, and the server of the documents has none."""
    model = make_model(tied=False)
    with torch.no_grad():
        for parameter in model.query_encoder.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)

    def embed_queries(texts):
        return np.asarray(model.encode_query([get_text(text) for text in texts], prompt=""))

    with run_server(embed_queries) as query_server, run_server(embed_with(model)) as server:
        served_model = ServedModel(
            model, server.url, query_server.url, "served", show_progress=False
        )
        sample = compare_sample(served_model, QUERIES, DOCUMENTS)
    assert name_causes(sample) == {"query": ["prompt missing"], "document": []}
    assert sample["document"]["agrees"]


@pytest.fixture
def texts() -> Iterator[list[str]]:
    yield [f"{number} " * number for number in range(1, 101)]


def test_the_sample_has_the_longest_texts_and_others(texts):
    sample = choose_sample(texts * 2)
    assert len(sample) == len(set(sample)) == 32
    assert sample[:8] == texts[:-9:-1]
    assert sample[-1] == min(texts, key=len)
    assert choose_sample(texts[:5]) == texts[4::-1]
