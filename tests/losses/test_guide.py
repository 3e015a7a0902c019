"""A guide inside sentence-transformers: the rule of GISTEmbed for the batch and for the bank."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from sample_texts import WORDS, sentences
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import GISTEmbedLoss, MatryoshkaLoss
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from tiny_models import tiny_encoder
from torch import Tensor, nn
from transformers import BertTokenizerFast

from contaccum import CachedContAccumLoss, ContAccumLoss, DualEncoder
from contaccum.encoders.settings import get_tower
from contaccum.errors import ConfigError


@pytest.fixture
def model() -> DualEncoder:
    return tiny_encoder(tied=False, normalize=False).double().train()


def make_other_tokenizer() -> BertTokenizerFast:
    """Make a tokenizer with another vocabulary than the tiny models have."""
    special_tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    characters = list("abcdefghijklmnopqrstuvwxyz0123456789")
    tokens = dict.fromkeys([*special_tokens, *sorted(WORDS), *characters])
    vocabulary = {token: index for index, token in enumerate(tokens)}
    return BertTokenizerFast(vocab=vocabulary, model_max_length=64)


@pytest.fixture(params=["same tokens", "other tokens", "shorter"])
def guide(tiny_config, tiny_tokenizer, request) -> DualEncoder:
    tokenizer = tiny_tokenizer
    if request.param == "other tokens":
        tokenizer = make_other_tokenizer()
    max_length = None
    if request.param == "shorter":
        max_length = 5
    config = copy.deepcopy(tiny_config)
    config.hidden_size = 16
    config.vocab_size = max(len(tokenizer), config.vocab_size)
    torch.manual_seed(5)
    encoder = DualEncoder.from_backbone(
        config,
        tokenizer=tokenizer,
        query_max_length=max_length,
        passage_max_length=max_length,
        pooling="mean",
    )
    return encoder.double().train()


def make_batch(model: DualEncoder, seeds: range, columns: int) -> list[dict[str, Any]]:
    """Make the features of four pairs for each seed."""
    batch = []
    for column in range(columns):
        texts = []
        for seed in seeds:
            texts.extend(sentences(4, 10 * seed + column, 9))
        task = "query" if column == 0 else "document"
        batch.append(model.preprocess(texts, task=task))
    return batch


def collect_gradient(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize(
    ("strategy", "margin"), [("absolute", 0.0), ("absolute", 0.02), ("relative", 0.03)]
)
def test_accumulated_gradient_equals_gist_embed_of_the_full_batch(model, guide, strategy, margin):
    """Nothing drifts, and the bank holds the rest of the batch."""
    num_steps = 4
    columns = 3
    gist_embed = GISTEmbedLoss(
        model,
        copy.deepcopy(guide).eval(),  # GISTEmbedLoss does not set the mode of its guide
        temperature=0.05,
        contrast_anchors=False,
        contrast_positives=False,
        margin_strategy=strategy,
        margin=margin,
    )
    expected_loss = gist_embed(make_batch(model, range(num_steps), columns), None)
    expected_loss.backward()
    expected_gradient = collect_gradient(model)
    model.zero_grad()
    loss_fn = ContAccumLoss(
        model,
        bank_size=4 * (num_steps - 1),
        guide=guide,
        guide_margin=margin,
        guide_margin_strategy=strategy,
        drift_compensation="none",
        mask_duplicates=False,
    ).train()
    loss_sum = 0.0
    for step in range(2 * num_steps):
        seed = step % num_steps
        loss = loss_fn(make_batch(model, range(seed, seed + 1), columns))
        if step >= num_steps:  # the first pass fills the bank
            (loss / num_steps).backward()
            loss_sum += loss_fn.last["local_loss"].item() / num_steps
            assert 0 < loss_fn.last["masked"] < 1
    assert loss_sum == pytest.approx(expected_loss.item(), abs=1e-10)
    assert expected_gradient.abs().max() > 1e-3
    assert (collect_gradient(model) - expected_gradient).abs().max() < 1e-10
    assert not any(parameter.requires_grad for parameter in guide.parameters())
    assert not guide.training


@pytest.mark.parametrize("guide", ["other tokens"], indirect=True)
def test_matryoshka_runs_the_guide_once_for_all_sizes_cached_or_not(model, guide):
    texts_per_pass: list[int] = []

    def record_pass(module: nn.Module, inputs: Any, output: dict[str, Tensor]) -> None:
        texts_per_pass.append(len(output["sentence_embedding"]))

    guide.register_forward_hook(record_pass)
    gradients = []
    for loss_fn in (
        ContAccumLoss(model, 64, guide=guide, guide_margin=0.02),
        CachedContAccumLoss(model, 64, guide=guide, guide_margin=0.02, mini_batch_size=4),
    ):
        model.zero_grad()
        matryoshka = MatryoshkaLoss(model, loss_fn, [16, 8])
        for seed in range(3):
            matryoshka(make_batch(model, range(seed, seed + 2), 3), None).backward()
        gradients.append(collect_gradient(model))
        assert len(loss_fn.info_nces) == 2
        for info_nce in loss_fn.info_nces.values():
            assert info_nce.bank.guide.documents.shape == (64, 2, 16)
        assert loss_fn.last["masked"] > 0
    # Three micro-batches of three columns: 8 texts each, or 4 and 4.
    assert texts_per_pass == [8] * 9 + [4] * 18
    assert gradients[0].abs().max() > 1e-3
    assert (gradients[0] - gradients[1]).abs().max() < 1e-10


def test_a_guide_with_two_towers_and_other_tokens_encodes_each_column_with_its_tower(
    model, tiny_config
):
    guide = DualEncoder.from_backbone(
        tiny_config, tokenizer=make_other_tokenizer(), tied=False, pooling="mean"
    )
    with torch.no_grad():
        for parameter in get_tower(guide, "document").parameters():
            parameter.add_(0.1)
    loss_fn = ContAccumLoss(model, 64, guide=guide, guide_margin=0.02)
    embeddings = loss_fn.guide.embed(make_batch(model, range(1), 2))
    expected_queries = guide.encode_query(sentences(4, 0, 9), convert_to_tensor=True)
    expected_passages = guide.encode_document(sentences(4, 1, 9), convert_to_tensor=True)
    assert torch.allclose(embeddings[0], expected_queries, atol=1e-5)
    assert torch.allclose(embeddings[1], expected_passages, atol=1e-5)
    assert not torch.allclose(
        embeddings[0], guide.encode_document(sentences(4, 0, 9), convert_to_tensor=True)
    )


@pytest.mark.parametrize("guide", ["same tokens"], indirect=True)
def test_a_model_without_a_tokenizer_of_transformers_is_refused(guide, tiny_tokenizer):
    embedding = StaticEmbedding(tiny_tokenizer.backend_tokenizer, embedding_dim=8)
    with pytest.raises(ConfigError, match="tokenizer"):
        ContAccumLoss(SentenceTransformer(modules=[embedding], device="cpu"), guide=guide)


@pytest.mark.parametrize("guide", ["same tokens"], indirect=True)
def test_embeddings_without_guide_embeddings_are_refused(model, guide):
    loss_fn = ContAccumLoss(model, 8, guide=guide)
    columns = make_batch(model, range(2), 2)
    embeddings = [model(dict(column))["sentence_embedding"] for column in columns]
    with pytest.raises(ConfigError, match="gets no texts for the guide"):
        loss_fn.compute_loss_from_embeddings(embeddings)
    loss_fn.compute_loss_from_embeddings(embeddings, guide=loss_fn.guide.embed(columns))
    assert loss_fn.info_nce.bank.guide.documents.shape == (8, 1, 16)


@pytest.mark.parametrize("guide", ["same tokens"], indirect=True)
def test_a_copy_of_the_loss_shares_the_guide(model, guide):
    loss_fn = ContAccumLoss(model, 8, guide=guide)
    assert copy.deepcopy(loss_fn).guide is loss_fn.guide
    assert "guide" in loss_fn.get_config_dict()
