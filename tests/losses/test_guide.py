"""A guide inside sentence-transformers: GISTEmbed's rule for the batch and for the bank."""

import copy
from typing import Any

import pytest
import torch
from sample_texts import WORDS, sentences
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import GISTEmbedLoss, MatryoshkaLoss
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from tiny_models import tiny_encoder
from torch import nn
from transformers import BertTokenizerFast

from contaccum import CachedContAccumLoss, ContAccumLoss, DualEncoder
from contaccum.errors import ConfigError

GIST = {"temperature": 0.05, "contrast_anchors": False, "contrast_positives": False}
OURS: dict[str, Any] = {"drift_compensation": "none", "mask_duplicates": False}


@pytest.fixture
def model() -> DualEncoder:
    return tiny_encoder(tied=False, normalize=False).double().train()


@pytest.fixture(params=["same tokens", "other tokens", "shorter"])
def guide(tiny_config, tiny_tokenizer, request) -> DualEncoder:
    tokens = tiny_tokenizer
    if request.param == "other tokens":
        names = [
            "[PAD]",
            "[UNK]",
            "[CLS]",
            "[SEP]",
            "[MASK]",
            *sorted(WORDS),
            *"abcdefghijklmnopqrstuvwxyz0123456789",
        ]
        tokens = BertTokenizerFast(
            vocab={t: i for i, t in enumerate(dict.fromkeys(names))}, model_max_length=64
        )
    config = copy.deepcopy(tiny_config)
    config.hidden_size, config.vocab_size = 16, max(len(tokens), config.vocab_size)
    limit = 5 if request.param == "shorter" else None
    torch.manual_seed(5)
    given: dict[str, Any] = {
        "query_max_length": limit,
        "passage_max_length": limit,
        "pooling": "mean",
    }
    return DualEncoder.from_backbone(config, tokenizer=tokens, **given).double().train()


def batch(model: DualEncoder, seeds: range, columns: int) -> list[dict[str, Any]]:
    """Four pairs for each seed."""
    tasks = ["query"] + ["document"] * (columns - 1)
    texts = [[x for s in seeds for x in sentences(4, 10 * s + i, 9)] for i in range(columns)]
    return [model.preprocess(column, task=task) for column, task in zip(texts, tasks, strict=True)]


def gradient(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("columns", [2, 3], ids=["pairs", "triplets"])
@pytest.mark.parametrize("margin", [("absolute", 0.0), ("absolute", 0.02), ("relative", 0.03)])
def test_accumulated_gradient_equals_gist_embed_of_the_full_batch_when_nothing_drifts(
    model, guide, margin, columns
):
    parts, (strategy, value) = 4, margin
    gist: Any = {**GIST, "margin_strategy": strategy, "margin": value}
    given: Any = {**OURS, "guide": guide, "guide_margin": value, "guide_margin_strategy": strategy}
    plain = copy.deepcopy(guide).eval()  # sentence-transformers leaves modes to others
    whole = GISTEmbedLoss(model, plain, **gist)(batch(model, range(parts), columns), None)
    whole.backward()
    expected = gradient(model)
    model.zero_grad()
    loss_fn = ContAccumLoss(model, bank_size=4 * (parts - 1), **given).train()
    total = 0.0
    for step in range(2 * parts):
        part = batch(model, range(step % parts, step % parts + 1), columns)
        loss = loss_fn(part)
        if step >= parts:
            (loss / parts).backward()
            total += loss_fn.last["local_loss"].item() / parts
            assert 0 < loss_fn.last["masked"] < 1
    assert total == pytest.approx(whole.item(), abs=1e-10)
    assert (gradient(model) - expected).abs().max() < 1e-10 < 1e-3 < expected.abs().max()
    assert not any(p.requires_grad for p in guide.parameters()) and not guide.training


@pytest.mark.parametrize("guide", ["other tokens"], indirect=True)
def test_matryoshka_asks_the_guide_once_for_all_sizes_cached_or_not(model, guide, monkeypatch):
    asked: list[int] = []
    guide.register_forward_hook(
        lambda module, inputs, output: asked.append(len(output["sentence_embedding"]))
    )
    found = []
    for loss_fn in (
        ContAccumLoss(model, 64, guide=guide, guide_margin=0.02),
        CachedContAccumLoss(model, 64, guide=guide, guide_margin=0.02, mini_batch_size=4),
    ):
        model.zero_grad()
        wrapped = MatryoshkaLoss(model, loss_fn, [16, 8])
        for seed in range(3):
            wrapped(batch(model, range(seed, seed + 2), 3), None).backward()
        found.append(gradient(model))
        assert [x.bank.guide.documents.shape for x in loss_fn.info_nces.values()] == [
            (64, 2, 16)
        ] * 2
        assert loss_fn.last["masked"] > 0
    assert asked == [8] * 9 + [4] * 18
    assert (found[0] - found[1]).abs().max() < 1e-10 < 1e-3 < found[0].abs().max()


@pytest.mark.parametrize("guide", ["same tokens"], indirect=True)
def test_what_a_guide_cannot_read_is_refused(model, guide, tiny_tokenizer):
    static = SentenceTransformer(
        modules=[StaticEmbedding(tiny_tokenizer.backend_tokenizer, embedding_dim=8)]
    )
    with pytest.raises(ConfigError, match="each need a tokenizer"):
        ContAccumLoss(static, guide=guide)
    loss_fn = ContAccumLoss(model, 8, guide=guide)
    columns = batch(model, range(2), 2)
    embeddings = [model(dict(column))["sentence_embedding"] for column in columns]
    with pytest.raises(ConfigError, match="gets no texts for the guide"):
        loss_fn.compute_loss_from_embeddings(embeddings)
    loss_fn.compute_loss_from_embeddings(embeddings, guide=loss_fn.guide.embed(columns))
    assert loss_fn.info_nce.bank.guide.documents.shape == (8, 1, 16)
    assert copy.deepcopy(loss_fn).guide is loss_fn.guide and "guide" in loss_fn.get_config_dict()
