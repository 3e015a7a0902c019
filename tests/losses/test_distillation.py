"""Distillation: the terms equal the losses of sentence-transformers, for every method."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from sample_texts import features
from sentence_transformers.sentence_transformer.losses import (
    DistillKLDivLoss,
    MarginMSELoss,
    MatryoshkaLoss,
)
from sentence_transformers.util import dot_score, pairwise_cos_sim, pairwise_dot_score
from tiny_models import tiny_encoder
from torch import Tensor, nn

from contaccum import CachedContAccumLoss, ContAccumLoss, DualEncoder
from contaccum.data.sampling import Labels, decode
from contaccum.errors import ConfigError, warn_once
from contaccum.losses.distillation import Distillation

KINDS = [("margin_mse", 1.0), ("kl", 3.0)]


@pytest.fixture
def model() -> DualEncoder:
    return tiny_encoder(tied=False, normalize=False, similarity="cos").double().train()


def make_published_loss(
    kind: str, similarity: str = "dot", scale: float = 1.0, temperature: float = 1.0
) -> MarginMSELoss | DistillKLDivLoss:
    """Make the loss of sentence-transformers over scores of similarity times scale."""
    pairwise = pairwise_dot_score
    if similarity == "cos":
        pairwise = pairwise_cos_sim

    def score(queries: Tensor, documents: Tensor) -> Tensor:
        return scale * pairwise(queries, documents)

    if kind == "margin_mse":
        return MarginMSELoss(None, score)
    return DistillKLDivLoss(None, score, temperature=temperature)


def collect_gradient(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize(("kind", "temperature"), KINDS)
@pytest.mark.parametrize("similarity", ["cos", "dot"])
@pytest.mark.parametrize("h", [1, 3])
def test_a_term_and_its_gradient_equal_the_loss_of_sentence_transformers(
    kind, temperature, similarity, h
):
    batch = torch.randn(2 + h, 6, 8, dtype=torch.float64)
    scores = 5 * torch.randn(6, 1 + h, dtype=torch.float64)
    embeddings = batch.clone().requires_grad_()
    distillation = Distillation(kind, 0.5, temperature, similarity, 4.0)
    term = distillation(list(embeddings), scores)
    term.backward()
    expected_embeddings = batch.clone().requires_grad_()
    published = make_published_loss(kind, similarity, 4.0, temperature)
    expected = 0.5 * published.compute_loss_from_embeddings(list(expected_embeddings), scores)
    expected.backward()
    assert term.item() > 0.01
    assert term.item() == pytest.approx(expected.item(), abs=1e-10)
    assert embeddings.grad.abs().max() > 1e-3
    assert (embeddings.grad - expected_embeddings.grad).abs().max() < 1e-10
    assert distillation.last is not None
    assert distillation.last.item() == pytest.approx(2 * term.item(), abs=1e-10)


def test_half_precision_embeddings_and_integer_scores_are_compared_in_float32():
    embeddings = torch.randn(3, 4, 8).bfloat16()
    scores = torch.tensor([[3, 1]] * 4)
    term = Distillation("margin_mse")(list(embeddings), scores)
    published = make_published_loss("margin_mse")
    expected = published.compute_loss_from_embeddings(list(embeddings.float()), scores)
    assert term.dtype == torch.float32
    assert term.item() == pytest.approx(expected.item(), abs=1e-6)


@pytest.mark.parametrize("is_cached", [False, True])
@pytest.mark.parametrize(("kind", "temperature"), KINDS)
def test_every_method_adds_the_term_of_its_local_rows(model, kind, temperature, is_cached):
    scores = torch.randn(10, 3, dtype=torch.float64)
    loss_class: Any = ContAccumLoss
    settings = {"bank_size": 64}
    if is_cached:
        loss_class = CachedContAccumLoss
        settings["mini_batch_size"] = 3

    def compute_second_loss(encoder: DualEncoder, loss_fn: Any) -> Tensor:
        """Compute the loss of a micro-batch twice; the second time the bank is not empty."""
        loss_fn(features(encoder, 10, 4), scores)
        encoder.zero_grad()
        loss = loss_fn(features(encoder, 10, 4), scores)
        loss.backward()
        return loss

    plain_model = copy.deepcopy(model)
    plain_loss_fn = loss_class(plain_model, **settings)
    plain_loss = compute_second_loss(plain_model, plain_loss_fn)
    assert "distill_loss" not in plain_loss_fn.last
    columns = features(plain_model, 10, 4)
    embeddings = [plain_model(column)["sentence_embedding"] for column in columns]
    published = make_published_loss(kind, "cos", 20.0, temperature)
    term = 0.7 * published.compute_loss_from_embeddings(embeddings, scores)
    term.backward()  # adds to the gradient of the plain loss

    loss_fn = loss_class(
        model,
        **settings,
        distill=kind,
        distill_weight=0.7,
        distill_temperature=temperature,
    )
    loss = compute_second_loss(model, loss_fn)
    assert term > 0.01
    assert loss.item() == pytest.approx(plain_loss.item() + term.item(), abs=1e-10)
    assert (collect_gradient(model) - collect_gradient(plain_model)).abs().max() < 1e-9
    assert loss_fn.last["distill_loss"].item() == pytest.approx(term.item() / 0.7, abs=1e-10)
    assert loss_fn.eval()(features(model, 10, 4), None) > 0  # evaluation needs no scores


def test_labels_are_ids_or_scores_or_both_in_one_tensor():
    ids = torch.randint(-(2**63), 2**63 - 1, (5, 4))
    scores = torch.randn(5, 3)
    both = decode(torch.cat([ids, scores.view(torch.int32).long()], dim=1), 4)
    assert torch.equal(both.text_ids, ids)
    assert torch.equal(both.teacher_scores, scores)
    assert decode(ids, 4) == Labels(text_ids=ids)
    assert decode(scores, 4) == Labels(teacher_scores=scores)
    for labels in (None, torch.rand(5), torch.rand(5, 4)):
        assert decode(labels, 4) == Labels()


def test_scores_beside_ids_change_no_mask(model, caplog):
    """A known positive of another row is masked, with scores as without."""
    batch = features(model, 6, 3)
    first_id = 2**50  # smaller ones are no hashes of texts
    ids = first_id + torch.arange(18).reshape(3, 6).T.contiguous()
    scores = torch.randn(6, 2)
    ids_and_scores = torch.cat([ids, scores.view(torch.int32).long()], dim=1)

    def compute_loss(labels: Tensor, **settings: Any) -> float:
        loss_fn = ContAccumLoss(model, 0, **settings)
        passages = first_id + 6 + torch.arange(6).roll(1)
        loss_fn.set_known_positives(first_id + torch.arange(6), passages)
        return loss_fn([dict(column) for column in batch], labels).item()

    masked = compute_loss(ids)
    masked_with_scores = compute_loss(ids_and_scores, distill="kl", distill_weight=1e-9)
    not_masked = compute_loss(scores, distill="kl", distill_weight=1e-9)
    assert masked_with_scores == pytest.approx(masked, abs=1e-6)
    assert abs(not_masked - masked) > 0.01
    assert not caplog.records


def test_one_warning_says_that_scores_are_not_used(model, caplog):
    ids = 2**50 + torch.arange(18).reshape(3, 6).T.contiguous()
    scores = torch.randn(6, 2)
    ids_and_scores = torch.cat([ids, scores.view(torch.int32).long()], dim=1)
    loss_fn = ContAccumLoss(model, 0)
    warn_once.cache_clear()  # an earlier test may have had the same warning
    for _ in range(3):
        loss_fn(features(model, 6, 3), ids_and_scores)
    assert [record.message for record in caplog.records] == [
        "ContAccumLoss does not use the label or score column of the data: to learn from teacher "
        "scores, set distill; otherwise remove the column"
    ]


@pytest.mark.parametrize("is_cached", [False, True])
def test_matryoshka_loss_adds_the_term_at_each_size(model, is_cached):
    scores = torch.randn(6, 2, dtype=torch.float64)
    loss_class: Any = ContAccumLoss
    if is_cached:
        loss_class = CachedContAccumLoss

    def compute_loss(loss_fn: nn.Module) -> float:
        matryoshka = MatryoshkaLoss(model, loss_fn, [16, 8], [1.0, 3.0])
        return matryoshka(features(model, 6, 3), scores).item()

    plain_loss = compute_loss(loss_class(model, 0, 1.0, dot_score))
    distill_loss = compute_loss(
        loss_class(model, 0, 1.0, dot_score, distill="margin_mse", distill_weight=0.1)
    )
    embeddings = [model(column)["sentence_embedding"] for column in features(model, 6, 3)]
    published = make_published_loss("margin_mse", "cos")
    terms = []
    for size in (16, 8):
        cut_embeddings = [x[:, :size] for x in embeddings]
        terms.append(published.compute_loss_from_embeddings(cut_embeddings, scores).item())
    expected = 0.1 * (terms[0] + 3 * terms[1])
    assert distill_loss - plain_loss == pytest.approx(expected, abs=1e-10)


def test_data_without_hard_negatives_or_scores_is_refused(model):
    loss_fn = ContAccumLoss(model, 8, distill="margin_mse")
    with pytest.raises(ConfigError, match="hard negatives"):
        loss_fn(features(model, 4, 2), torch.rand(4, 1))
    with pytest.raises(ConfigError, match="teacher scores"):
        loss_fn(features(model, 4, 3), None)
