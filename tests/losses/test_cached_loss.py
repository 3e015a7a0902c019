"""CachedContAccumLoss: the gradients of one large micro-batch, encoded a few texts at a time; and the bank."""

import copy
from typing import Any

import pytest
import torch
from sample_texts import features
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import (
    CachedMultipleNegativesRankingLoss,
    MatryoshkaLoss,
)
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from tiny_models import tiny_encoder

from contaccum import CachedContAccumLoss, ContAccumLoss, DualEncoder
from contaccum.errors import ConfigError


@pytest.fixture
def model() -> DualEncoder:
    return tiny_encoder(tied=False, normalize=False).double()


TOGETHER = {"directions": ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")}
APART = {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"}


@pytest.mark.parametrize("columns", [2, 4], ids=["pairs", "n-tuples"])
@pytest.mark.parametrize(
    "how",
    [
        {"mini_batch_size": 3},
        {"mini_batch_num_tokens": 40},
        {
            "mini_batch_size": 3,
            "hardness_mode": "all_negatives",
            "hardness_strength": 5.0,
            **TOGETHER,
        },
        {
            "mini_batch_size": 3,
            "hardness_mode": "hard_negatives",
            "hardness_strength": 5.0,
            **APART,
        },
    ],
)
def test_without_a_bank_it_is_the_cached_loss_of_sentence_transformers(columns, how):
    model = (
        tiny_encoder(tied=False, dropout=0.1, normalize=False).double().train()
    )  # the second pass repeats it
    found = []
    for loss_fn in (
        CachedContAccumLoss(model, 0, **how),
        CachedMultipleNegativesRankingLoss(model, **how),
    ):
        torch.manual_seed(0)
        model.zero_grad()
        loss_fn(features(model, 10, columns), None).backward()
        found.append(
            torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        )
    assert found[0].abs().max() > 1e-3 and (found[0] - found[1]).abs().max() < 1e-12


@pytest.mark.parametrize("matryoshka", [False, True])
def test_it_learns_what_one_large_micro_batch_against_the_bank_learns(model, matryoshka):
    """Six updates with masks, probes, centring and hard negatives; each bank holds five hundred rows at most.

    So it is the large batch's gradient wherever that loss's is: see test_directions.py.
    """
    encoders = [model, copy.deepcopy(model)]
    given: dict[str, Any] = {"bank_size": 500, "center_gradients": "both"}
    losses: list[Any] = [
        CachedContAccumLoss(encoders[0], mini_batch_size=16, **given),
        ContAccumLoss(encoders[1], **given),
    ]
    wrapped = [MatryoshkaLoss(x.model, x, [16, 4]) for x in losses] if matryoshka else losses
    optimizers = [torch.optim.SGD(x.parameters(), lr=0.3) for x in encoders]
    for step in range(6):
        for loss_fn, encoder, optimizer in zip(wrapped, encoders, optimizers, strict=True):
            loss = loss_fn(
                features(encoder, 130, 3, seed=step % 3), None
            )  # texts come again: duplicates
            (loss * (-3.0 if step == 5 else 1.0)).backward()
            optimizer.step()
            optimizer.zero_grad()
    ours, theirs = (x.info_nce for x in losses)
    assert (ours.bank.total_enqueued, ours.clock.num_updates) == (780, 5)
    assert ours.compensation.age_limit == theirs.compensation.age_limit
    assert len(ours.compensation.probe.pairs) == len(theirs.compensation.probe.pairs) > 3
    for a, b in zip(*(x.parameters() for x in encoders), strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-11)


def test_what_cannot_work_is_refused(model, tiny_tokenizer):
    static = SentenceTransformer(
        modules=[StaticEmbedding(tiny_tokenizer.backend_tokenizer, embedding_dim=8)]
    )
    with pytest.raises(ConfigError, match="use ContAccumLoss"):
        CachedContAccumLoss(static)
    with pytest.raises(ConfigError, match="mini_batch_num_tokens must be at least 1"):
        CachedContAccumLoss(model, mini_batch_num_tokens=0)


def test_updates_of_few_trained_parameters_are_seen():
    """The cached embeddings, which the loss sees, are many more numbers than the sixteen that train."""
    model = tiny_encoder(normalize=False)
    model.requires_grad_(False)
    bias = model[0].auto_model.encoder.layer[0].output.LayerNorm.bias.requires_grad_()
    loss_fn = CachedContAccumLoss(model, bank_size=64, mini_batch_size=4)
    optimizer = torch.optim.SGD([bias], lr=0.1)
    for update in range(6):
        loss_fn(features(model, 16, 2, seed=update)).backward()
        optimizer.step()
        optimizer.zero_grad()
    loss_fn.info_nce.end_pending_update()
    assert loss_fn.info_nce.clock.num_updates == 6
