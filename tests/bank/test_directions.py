"""Directions and hardness weights against MultipleNegativesRankingLoss."""

from __future__ import annotations

import pytest
from dense_reference import compute_relative_errors
from micro_batches import draw_embeddings, make_leaves
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from sentence_transformers.util import cos_sim, dot_score
from torch import Tensor

from contaccum import BankedInfoNCE

BOTH_DIRECTIONS = ("query_to_doc", "doc_to_query")
ALL_DIRECTIONS = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")
SETTINGS = [
    pytest.param({}, id="query to document"),
    pytest.param(
        {"hardness_mode": "in_batch_negatives", "hardness_strength": 9.0}, id="in-batch negatives"
    ),
    pytest.param(
        {"hardness_mode": "hard_negatives", "hardness_strength": 5.0}, id="hard negatives"
    ),
    pytest.param({"hardness_mode": "all_negatives", "hardness_strength": 3.0}, id="all negatives"),
    pytest.param(
        {"directions": BOTH_DIRECTIONS, "partition_mode": "per_direction"}, id="symmetric"
    ),
    pytest.param(
        {
            "directions": BOTH_DIRECTIONS,
            "hardness_mode": "in_batch_negatives",
            "hardness_strength": 9.0,
        },
        id="two directions in one softmax, hardness",
    ),
    pytest.param({"directions": ALL_DIRECTIONS}, id="all directions"),
    pytest.param(
        {
            "directions": ALL_DIRECTIONS,
            "hardness_mode": "hard_negatives",
            "hardness_strength": 5.0,
        },
        id="all directions, hardness",
    ),
]


def compute_published_loss(settings, batch: list[Tensor], scale: float, similarity) -> Tensor:
    """Compute MultipleNegativesRankingLoss of queries, passages and, if any, hard negatives."""
    loss_fn = MultipleNegativesRankingLoss(None, scale, similarity, **settings)
    columns = [batch[0], batch[1]]
    if len(batch) > 2:
        columns.extend(batch[2].unbind(1))
    return loss_fn.compute_loss_from_embeddings(columns, None)


@pytest.mark.parametrize("drift_compensation", ["none", "auto"])
@pytest.mark.parametrize(("similarity", "function"), [("cos", cos_sim), ("dot", dot_score)])
@pytest.mark.parametrize(("n", "h", "scale"), [(4, 2, 1.0), (12, 0, 20.0)])
@pytest.mark.parametrize("settings", SETTINGS)
def test_a_micro_batch_against_an_empty_bank_has_the_published_loss(
    settings, n, h, scale, similarity, function, drift_compensation
):
    """With ``auto``, documents are scored relative to a mean that is far from zero."""
    batch = draw_embeddings(n, h, seed=n)
    batch[1] = batch[1] + batch[0]
    loss_fn = BankedInfoNCE(
        bank_size=64,
        temperature=1 / scale,
        similarity=similarity,
        drift_compensation=drift_compensation,
        **settings,
    )
    probe = draw_embeddings(4)
    loss_fn.observe_probe(probe[0], probe[1])
    loss_fn.observe_probe(probe[0] + 0.7, probe[1] - 0.4)
    ours = make_leaves(batch)
    theirs = make_leaves(batch)
    loss = loss_fn(*ours)
    expected = compute_published_loss(settings, theirs, scale, function)
    loss.backward()
    expected.backward()
    assert max(compute_relative_errors(loss, ours, expected, theirs)) <= 1e-12


@pytest.mark.parametrize("h", [0, 2])
@pytest.mark.parametrize("settings", SETTINGS)
def test_other_directions_use_the_micro_batch_alone(settings, h):
    """A bank whose documents have no weight in ``query_to_doc`` changes no local loss.

    One coordinate of the embeddings lowers the scores of local queries against banked documents by
    a million, and raises the scores of banked queries against banked documents by a million. Other
    directions have scores without that coordinate. If one of them used the bank, its scores would
    change the loss.
    """
    separating = 7
    loss_fn = BankedInfoNCE(bank_size=64, drift_compensation="none", **settings)
    for step in range(3):
        banked = draw_embeddings(5, h=2, seed=100 + step)
        banked[0][:, separating] = -1.0
        for documents in banked[1:]:
            documents[..., separating] = -1e6
        loss_fn(*banked)
    assert loss_fn.bank.in_use == 15

    batch = draw_embeddings(4, h, seed=7)
    batch[0][:, separating] = 1.0
    for documents in batch[1:]:
        documents[..., separating] = 0.0
    ours = make_leaves(batch)
    theirs = make_leaves(batch)
    loss = loss_fn(*ours)
    expected = compute_published_loss(settings, theirs, 1.0, dot_score)
    loss.backward()
    expected.backward()
    assert loss_fn.last["local_loss"].item() == pytest.approx(expected.item(), rel=1e-12)
    _, gradient_error = compute_relative_errors(loss, ours, expected, theirs)
    assert gradient_error <= 1e-12
