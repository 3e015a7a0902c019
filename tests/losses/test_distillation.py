"""The distillation terms are sentence-transformers' own, beside the contrastive loss of every method."""

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
from torch import Tensor

from contaccum import CachedContAccumLoss, ContAccumLoss, DualEncoder
from contaccum.errors import ConfigError
from contaccum.losses.distillation import Distillation, split_labels

KINDS = [("margin_mse", {}), ("kl", {"temperature": 3.0})]


@pytest.fixture
def model() -> DualEncoder:
    return tiny_encoder(tied=False, normalize=False).double().train()


def theirs(kind: str, similarity: str, scale: float, more: dict[str, float]) -> Any:
    """Their loss of the scores that the contrastive loss has too."""
    pairwise = pairwise_cos_sim if similarity == "cos" else pairwise_dot_score

    def score(a: Tensor, b: Tensor) -> Tensor:
        return scale * pairwise(a, b)

    nobody: Any = None
    return (MarginMSELoss if kind == "margin_mse" else DistillKLDivLoss)(nobody, score, **more)


@pytest.mark.parametrize(("kind", "more"), KINDS)
@pytest.mark.parametrize("similarity", ["cos", "dot"])
@pytest.mark.parametrize("h", [1, 3])
def test_a_term_and_its_gradient_equal_the_loss_of_sentence_transformers(kind, more, similarity, h):
    given = torch.randn(2 + h, 6, 8, dtype=torch.float64)
    labels, found = 5 * torch.randn(6, 1 + h, dtype=torch.float64), []
    ours = Distillation(kind, 0.5, more.get("temperature", 1.0), similarity, 4.0)
    for term in (ours, theirs(kind, similarity, 4.0, more).compute_loss_from_embeddings):
        embeddings = given.clone().requires_grad_()
        value = term(list(embeddings), labels) * (1.0 if term is ours else 0.5)
        value.backward()
        found.append((value.item(), embeddings.grad))
    assert found[0][0] == pytest.approx(found[1][0], abs=1e-10) and found[0][0] > 0.01
    assert (found[0][1] - found[1][1]).abs().max() < 1e-10 < 1e-3 < found[0][1].abs().max()
    assert ours.last is not None and ours.last.item() == pytest.approx(2 * found[0][0], abs=1e-10)


def test_half_precision_and_integer_scores_are_compared_in_float32():
    embeddings, labels = torch.randn(3, 4, 8).bfloat16(), torch.tensor([[3, 1]] * 4)
    found = Distillation("margin_mse")(list(embeddings), labels)
    loss = theirs("margin_mse", "dot", 1.0, {})
    expected = loss.compute_loss_from_embeddings(list(embeddings.float()), labels)
    assert found.dtype == torch.float32 and found.item() == pytest.approx(expected.item(), abs=1e-6)


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("bank_size", [0, 64])
@pytest.mark.parametrize(("kind", "more"), KINDS)
def test_every_method_adds_the_term_of_its_local_rows(model, kind, more, bank_size, cached):
    labels = torch.randn(10, 3, dtype=torch.float64)
    settings = {"bank_size": bank_size, **({"mini_batch_size": 3} if cached else {})}
    distill = {
        "distill": kind,
        "distill_weight": 0.7,
        "distill_temperature": more.get("temperature", 1.0),
    }
    make: Any = CachedContAccumLoss if cached else ContAccumLoss
    found, term = [], torch.zeros(())
    for given in ({}, distill):
        encoder = copy.deepcopy(model)
        loss_fn = make(encoder, **settings, **given)
        for _ in range(2):  # the second meets a bank, which the term does not
            value = loss_fn(features(encoder, 10, 4), labels)
        encoder.zero_grad()
        value.backward()
        if not given:
            embeddings = [
                encoder(column)["sentence_embedding"] for column in features(encoder, 10, 4)
            ]
            term = 0.7 * theirs(kind, "cos", 20.0, more).compute_loss_from_embeddings(
                embeddings, labels
            )
            term.backward()
        assert ("distill_loss" in loss_fn.last) == bool(given)
        found.append(
            (
                value.item(),
                torch.cat([p.grad.flatten() for p in encoder.parameters() if p.grad is not None]),
            )
        )
    assert found[1][0] == pytest.approx(found[0][0] + term.item(), abs=1e-10) and term > 0.01
    assert (found[0][1] - found[1][1]).abs().max() < 1e-9
    assert loss_fn.last["distill_loss"].item() == pytest.approx(term.item() / 0.7, abs=1e-10)
    assert loss_fn.eval()(features(encoder, 10, 4), None) > 0  # evaluation asks for no scores


def test_ids_and_scores_come_in_one_tensor_or_either_alone():
    ids, scores = torch.randint(-(2**63), 2**63 - 1, (5, 4)), torch.randn(5, 3)
    both = torch.cat([ids, scores.view(torch.int32).long()], dim=1)
    found = split_labels(both, 4)
    assert all(map(torch.equal, found, (ids, scores)))
    assert split_labels(ids, 4)[0] is not None and split_labels(ids, 4)[1] is None
    assert split_labels(scores, 4) == (None, scores) and split_labels(None, 4) == (None, None)
    assert split_labels(torch.rand(5), 4) == split_labels(torch.rand(5, 4), 4) == (None, None)


def test_scores_beside_ids_leave_masks_as_they_are_and_scores_that_nobody_asked_for_are_said_once(
    model, caplog
):
    """A known positive of another row is no negative, with scores as without."""
    batch = features(model, 6, 3)
    ids = torch.arange(18).reshape(3, 6).T.contiguous()
    scores = torch.randn(6, 2)
    labels = {
        "ids": ids,
        "both": torch.cat([ids, scores.view(torch.int32).long()], dim=1),
        "scores": scores,
    }
    found = {}
    for name, given in labels.items():
        loss_fn = ContAccumLoss(
            model, 0, **({} if name == "ids" else {"distill": "kl", "distill_weight": 1e-9})
        )
        loss_fn.set_known_positives(torch.arange(6), 6 + torch.arange(6).roll(1))
        found[name] = loss_fn([dict(x) for x in batch], given).item()
    assert (
        found["both"] == pytest.approx(found["ids"], abs=1e-6)
        and abs(found["scores"] - found["ids"]) > 0.01
    )
    assert not caplog.records
    loss_fn = ContAccumLoss(model, 0)
    for _ in range(3):  # it is said once
        loss_fn([dict(x) for x in batch], labels["both"])
    assert [record.message for record in caplog.records] == [
        "ContAccumLoss does not use the label or score column of the data: to learn from teacher "
        "scores, set distill; otherwise remove the column"
    ]


@pytest.mark.parametrize("cached", [False, True])
def test_in_a_matryoshka_loss_the_term_counts_at_each_size(model, cached):
    labels, found = torch.randn(6, 2, dtype=torch.float64), []
    make: Any = CachedContAccumLoss if cached else ContAccumLoss
    for given in ({}, {"distill": "margin_mse", "distill_weight": 0.1}):
        loss_fn = make(model, 0, 1.0, dot_score, **given)
        found.append(
            MatryoshkaLoss(model, loss_fn, [16, 8], [1.0, 3.0])(
                features(model, 6, 3), labels
            ).item()
        )
    embeddings = [model(column)["sentence_embedding"] for column in features(model, 6, 3)]
    loss = theirs("margin_mse", "cos", 1.0, {})
    terms = [
        loss.compute_loss_from_embeddings([x[:, :size] for x in embeddings], labels).item()
        for size in (16, 8)
    ]
    assert found[1] - found[0] == pytest.approx(0.1 * (terms[0] + 3 * terms[1]), abs=1e-10)


def test_what_cannot_be_distilled_is_one_line(model):
    loss_fn = ContAccumLoss(model, 8, distill="margin_mse")
    for columns, labels, message in (
        (2, torch.rand(4, 1), "distill=margin_mse needs hard negatives"),
        (3, None, r"needs teacher scores \(4, 2\) as labels, got none"),
        (3, torch.rand(4), r"got labels of shape \(4,\)"),
    ):
        with pytest.raises(ConfigError, match=message):
            loss_fn(features(model, 4, columns), labels)
    with pytest.raises(ConfigError, match="did you mean 'kl'"):
        ContAccumLoss(model, distill="k")
