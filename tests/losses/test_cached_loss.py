"""CachedContAccumLoss: the gradients of a large batch encoded in mini-batches, with a bank."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from sample_texts import features
from sentence_transformers.sentence_transformer.losses import (
    CachedMultipleNegativesRankingLoss,
    MatryoshkaLoss,
)
from tiny_models import tiny_encoder
from torch import Tensor, nn

from contaccum import CachedContAccumLoss, ContAccumLoss, DualEncoder


@pytest.fixture
def model() -> DualEncoder:
    return tiny_encoder(tied=False, normalize=False).double()


def compute_gradient(model: nn.Module, loss_fn: nn.Module, columns: int) -> Tensor:
    torch.manual_seed(0)
    model.zero_grad()
    loss_fn(features(model, 10, columns), None).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("columns", [2, 4], ids=["pairs", "n-tuples"])
@pytest.mark.parametrize("settings", [{"mini_batch_size": 3}, {"mini_batch_num_tokens": 40}])
def test_without_a_bank_it_is_the_cached_loss_of_sentence_transformers(columns, settings):
    """Dropout is on, so the second forward pass must repeat the random numbers of the first."""
    model = tiny_encoder(tied=False, dropout=0.1, normalize=False).double().train()
    loss_fn = CachedContAccumLoss(model, 0, **settings)
    published = CachedMultipleNegativesRankingLoss(model, **settings)
    gradient = compute_gradient(model, loss_fn, columns)
    expected = compute_gradient(model, published, columns)
    assert gradient.abs().max() > 1e-3
    assert (gradient - expected).abs().max() < 1e-12


def test_the_cached_loss_trains_like_one_large_micro_batch_with_the_bank(model):
    """Six updates with masks, probes, centring and hard negatives, and banks of two sizes."""
    reference_model = copy.deepcopy(model)
    loss_fn = CachedContAccumLoss(model, mini_batch_size=16, bank_size=500)
    reference = ContAccumLoss(reference_model, bank_size=500)
    wrapped = MatryoshkaLoss(model, loss_fn, [16, 4])
    wrapped_reference = MatryoshkaLoss(reference_model, reference, [16, 4])

    def train(encoder: DualEncoder, loss: Any) -> None:
        optimizer = torch.optim.SGD(encoder.parameters(), lr=0.3)
        for step in range(6):
            factor = -3.0 if step == 5 else 1.0
            columns = features(encoder, 130, 3, seed=step % 3)  # texts repeat: duplicates
            (factor * loss(columns, None)).backward()
            optimizer.step()
            optimizer.zero_grad()

    train(model, wrapped)
    train(reference_model, wrapped_reference)
    info_nce = loss_fn.info_nce
    expected = reference.info_nce
    assert info_nce.bank.total_enqueued == 780
    assert info_nce.clock.num_updates == 6
    assert info_nce.compensation.age_limit == expected.compensation.age_limit
    assert len(info_nce.compensation.probe.pairs) == len(expected.compensation.probe.pairs) > 3
    for weight, expected_weight in zip(
        model.parameters(), reference_model.parameters(), strict=True
    ):
        assert torch.allclose(weight, expected_weight, rtol=0, atol=1e-11)


def test_the_model_card_names_the_size_of_mini_batches(model):
    config = CachedContAccumLoss(model, mini_batch_size=4).get_config_dict()
    assert (config["mini_batch_size"], config["mini_batch_num_tokens"]) == (4, None)
    assert "bank_size" in config


def test_cached_gradients_do_not_underflow_in_half_precision():
    """A gradient of 1e-9 is 0 in float16."""
    model = tiny_encoder(normalize=False).to(torch.float16)
    loss_fn = CachedContAccumLoss(model, bank_size=0, mini_batch_size=4)
    embeddings, _ = loss_fn.embed_minibatch(
        sentence_feature=features(model, 4, 2)[0],
        begin=0,
        end=4,
        with_grad=False,
        copy_random_state=False,
    )
    assert embeddings.dtype == torch.float32
