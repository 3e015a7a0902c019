"""Columns that score too far above a row's own positive are no negatives: by the student, or by a guide; in float64."""

from typing import Any

import pytest
import torch
from dense_reference import History, errors
from test_info_nce import leaves
from torch import Tensor

from contaccum import BankedInfoNCE

MARGIN = {"false_negative_margin": 0.1, "similarity": "cos", "temperature": 0.1}
EVERY = {"directions": ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc"), **MARGIN, "guide_margin": -0.1}
EVERY |= {"hardness_mode": "all_negatives", "hardness_strength": 3.0}
RULES: dict[str, dict[str, Any]] = {
    "margin": {**MARGIN, "drift_compensation": "auto"},
    "margin, dot, as published": {
        "false_negative_margin": 2.0,
        "temperature": 2.0,
        "drift_compensation": "none",
        "normalize_by": "all",
    },
    "guide": {"guide_margin": 0.05, "drift_compensation": "mean", "similarity": "cos", "temperature": 0.1},
    "guide, relative": {"guide_margin": 0.1, "guide_margin_strategy": "relative", "drift_compensation": "none"},
    "both": {**MARGIN, "guide_margin": -0.1, "bank_hard_negatives": False, "bank_weight": 0.5},
    # What is above a margin was decided when they met. Since then two means have moved, which the oracle does not know.
    "both, of all directions": {**EVERY, "drift_compensation": "none"},
    "both, of all directions, local rows": {**EVERY, "query_bank_size": 0},
    "both, passages alone": {**MARGIN, "guide_margin": 0.0, "query_bank_size": 0},
}


def draw(n: int, h: int, generator: torch.Generator) -> list[list[Tensor]]:
    """Embeddings of n pairs with h hard negatives, and a guide's; passages lie near their queries."""
    found = []
    for d in (8, 5):
        queries = torch.randn(n, d, generator=generator, dtype=torch.float64)
        passages, negatives = (torch.randn(n, *x, d, generator=generator, dtype=torch.float64) for x in ((), (h,)))
        found.append([queries, passages + 0.5 * queries, *([negatives + 0.2 * queries[:, None]] if h else [])])
    return found


@pytest.mark.parametrize(("bank_size", "steps"), [(0, 8), (12, 24), (128, 24), (400, 24)])
@pytest.mark.parametrize("rule", RULES)
def test_every_micro_step_equals_the_dense_loss_with_what_was_decided_as_rows_and_columns_met(rule, bank_size, steps):
    """Over wraps, ids, hard negatives, ragged micro-batches, updates and drift; more than a hundredth is left out.

    Where nothing drifts and the bank holds the rest of the batch, that is the full batch's: see test_directions.py.
    """
    generator = torch.Generator().manual_seed(bank_size)
    settings = {k: x for k, x in RULES[rule].items() if bank_size or k != "query_bank_size"}
    loss_fn = BankedInfoNCE(bank_size, **settings)
    history, worst, shares = History(loss_fn), 0.0, []
    for step in range(steps):
        n, h = [4, 4, 3, 4, 1, 7, 30 if bank_size < 400 else 120][step % 7], step % 3
        if step % 3 == 2:
            loss_fn.end_update()
        inputs, seen = draw(n, h, generator)
        guide = seen if "guide" in rule or "both" in rule else []
        inputs = [x + 0.02 * step for x in inputs]
        ids = [torch.randint(60, x.shape[:-1], generator=generator) for x in inputs]
        named = dict(zip(("query_ids", "passage_ids", "negative_ids"), ids, strict=False))
        ours, dense = leaves(inputs), leaves(inputs)
        expected = history.dense(dense, ids, guide)
        loss = loss_fn(*ours, **named, guide=guide)
        loss.backward()
        expected.backward()
        worst = max(worst, *errors(loss, ours, expected, dense))
        assert loss_fn.last["masked"].item() == pytest.approx(history.masked_share, abs=1e-6)
        shares.append(history.masked_share)
        if bank_size:
            history.add(inputs, ids, guide)
    assert worst <= 1e-12
    assert loss_fn.bank is None or loss_fn.bank.pairs > bank_size
    assert 0.01 < sum(shares) / len(shares) < 0.9


def test_a_row_whose_columns_are_all_too_good_costs_nothing_and_moves_nothing():
    queries = torch.eye(4, dtype=torch.float64)
    passages = -queries + 0.5  # every other passage scores above the own
    loss_fn = BankedInfoNCE(bank_size=8, false_negative_margin=0.0, drift_compensation="none")
    for _ in range(4):
        inputs = leaves([queries, passages])
        loss = loss_fn(*inputs, query_ids=torch.arange(4))
        loss.backward()
        assert loss.item() == 0.0 and all((x.grad == 0).all() for x in inputs)
    assert loss_fn.last["masked"] == 1.0


def test_a_guide_that_embeds_other_texts_or_other_numbers_is_refused():
    (queries, passages), guide = draw(3, 0, torch.Generator())
    loss_fn = BankedInfoNCE(4)
    with pytest.raises(ValueError, match="the guide must embed the same texts"):
        loss_fn(queries, passages, guide=[guide[0], guide[1][:2]])
    loss_fn(queries, passages, guide=guide)
    for other in ([], [x[:, :4] for x in guide]):
        with pytest.raises(ValueError, match="size 5"):
            loss_fn(queries, passages, guide=other)
