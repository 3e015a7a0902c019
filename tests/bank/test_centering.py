"""Centring of the passages' gradients: over an update, or over each micro-batch by itself.

Gradients are centred from the second update on, when pairs of an older encoder are in use.
"""

from __future__ import annotations

import pytest
import torch
from micro_batches import draw_embeddings, make_leaves, make_loss_without_centring
from torch import Tensor

from contaccum import BankedInfoNCE

N = 8  # pairs per micro-batch
NUM_STEPS = 16  # micro-batches per update
D = 32
Gradients = tuple[Tensor, Tensor]  # (n, d) of queries, (n + n h, d) of their documents


def train(
    loss_fn: BankedInfoNCE, sizes: list[int], num_updates: int = 2, num_negatives: int = 2
) -> list[list[Gradients]]:
    """Return the gradients of every micro-step, one list per update.

    The micro-batches of each update have these sizes, in pairs. The embeddings of an update are
    shifted by its number, as by drift.
    """
    generator = torch.Generator().manual_seed(3)
    gradients = []
    for update in range(num_updates):
        gradients_of_update = []
        for n in sizes:
            embeddings = draw_embeddings(n, num_negatives, D, generator)
            inputs = make_leaves([column + update for column in embeddings])
            loss_fn(*inputs).backward()
            document_gradients = [column.grad.flatten(0, -2) for column in inputs[1:]]
            gradients_of_update.append((inputs[0].grad, torch.cat(document_gradients)))
        loss_fn.end_update()
        gradients.append(gradients_of_update)
    return gradients


def sum_over_documents(gradients: list[Gradients]) -> Tensor:
    """Sum the gradients of all documents of an update, with the weight of their micro-batch."""
    return sum(len(queries) * documents.sum(0) for queries, documents in gradients)


def spread_remainder(gradients: list[Tensor]) -> list[Tensor]:
    """Subtract the sum of the gradients so far, spread over the remaining rows of the update."""
    num_remaining_rows = sum(len(rows) for rows in gradients)
    remainder = torch.zeros(D, dtype=torch.float64)
    centred = []
    for rows in gradients:
        centred_rows = rows - (remainder + rows.sum(0)) / num_remaining_rows
        remainder = remainder + centred_rows.sum(0)
        num_remaining_rows -= len(rows)
        centred.append(centred_rows)
    return centred


def test_the_remainder_of_passages_is_spread_over_the_remaining_rows_if_aged_entries_are_in_use():
    """In the first update there are no aged entries."""
    auto = BankedInfoNCE(200, temperature=5.0, pairs_per_update=N * NUM_STEPS)
    plain = make_loss_without_centring(200, temperature=5.0)
    updates = train(auto, [N] * NUM_STEPS, num_updates=3)
    plain_updates = train(plain, [N] * NUM_STEPS, num_updates=3)
    for number, (update, plain_update) in enumerate(zip(updates, plain_updates, strict=True)):
        expected = [documents for _, documents in plain_update]
        if number > 0:
            assert sum_over_documents(plain_update).abs().max() > 1e-3
            assert sum_over_documents(update).abs().max() < 1e-12
            expected = spread_remainder(expected)
        for step, plain_step, expected_rows in zip(update, plain_update, expected, strict=True):
            assert torch.equal(step[0], plain_step[0])  # gradients of queries are not centred
            assert (step[1] - expected_rows).abs().max() < 1e-13


@pytest.mark.parametrize("sizes", [[5, 8, 1, 3], [1] * 6, [17]])
def test_gradients_of_an_update_of_any_size_sum_to_zero_after_begin_update(sizes):
    """Each micro-batch has the weight of its pairs, because its loss is a mean over them."""
    loss_fn = BankedInfoNCE(64)
    train(loss_fn, [64], num_updates=1)
    for update in range(3):
        sizes_of_update = sizes[update:] + sizes[:update]
        loss_fn.begin_update(sum(sizes_of_update))
        [gradients] = train(loss_fn, sizes_of_update, num_updates=1, num_negatives=1)
        assert sum_over_documents(gradients).abs().max() < 1e-12


def test_gradients_of_each_micro_batch_sum_to_zero_without_a_number_of_pairs():
    loss_fn = BankedInfoNCE(64)
    _, update = train(loss_fn, [N, N, 3, 1])
    for _, documents in update:
        assert documents.sum(0).abs().max() < 1e-14
    [[(_, only_document)]] = train(loss_fn, [1], num_updates=1, num_negatives=0)
    assert only_document.abs().max() > 0  # centred, it would become zero


def test_an_update_that_ends_early_leaves_no_remainder_for_the_next():
    loss_fn = BankedInfoNCE(200, pairs_per_update=N * NUM_STEPS)
    train(loss_fn, [N] * (NUM_STEPS - 3))
    [update] = train(loss_fn, [N] * NUM_STEPS, num_updates=1)
    assert sum_over_documents(update).abs().max() < 1e-12


def test_centring_goes_on_to_the_end_of_an_update_whose_aged_entries_run_out():
    """From the second micro-batch on, the bank of N pairs holds pairs of this update alone."""
    loss_fn = BankedInfoNCE(N, pairs_per_update=4 * N)
    _, second_update = train(loss_fn, [N, N, N, N])
    assert sum_over_documents(second_update).abs().max() < 1e-12


@pytest.mark.parametrize("bad_step", [0, 3, NUM_STEPS - 1])
def test_the_finite_micro_batches_of_an_update_sum_to_zero(bad_step):
    """One micro-batch is not finite, and its backward pass is skipped."""
    loss_fn = BankedInfoNCE(64, pairs_per_update=N * NUM_STEPS)
    train(loss_fn, [N] * NUM_STEPS, num_updates=1)
    generator = torch.Generator().manual_seed(0)
    total = torch.zeros(D, dtype=torch.float64)
    for step in range(NUM_STEPS):
        inputs = make_leaves(draw_embeddings(N, 0, D, generator))
        if step == bad_step:
            inputs[0].data[0] = torch.inf
            assert not loss_fn(*inputs).isfinite()
            continue
        loss_fn(*inputs).backward()
        total += inputs[1].grad.sum(0)
    assert total.isfinite().all()
    if bad_step == NUM_STEPS - 1:  # the last micro-batch, which would subtract the remainder
        assert total.abs().max() > 1e-6
    else:
        assert total.abs().max() < 1e-13
