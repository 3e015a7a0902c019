"""Centring of gradients: over an update in one pass, or over each micro-batch by itself."""

from __future__ import annotations

import pytest
import torch
from micro_batches import draw_embeddings, make_leaves
from torch import Tensor
from torch.nn.functional import cross_entropy

from contaccum import BankedInfoNCE

N = 8  # pairs per micro-batch
NUM_STEPS = 16  # micro-batches per update
D = 32
QUERIES = 0
PASSAGES = 1
TowerGradients = tuple[Tensor, Tensor]  # (n, d) of queries, (n + n h, d) of their documents


def get_tower_gradients(inputs: list[Tensor]) -> TowerGradients:
    """Return the gradients of queries, and of passages and hard negatives together."""
    queries, *documents = inputs
    document_gradients = [column.grad.flatten(0, -2) for column in documents]
    return queries.grad, torch.cat(document_gradients)


def sum_over_update(steps: list[TowerGradients], tower: int) -> Tensor:
    """Return the sum of a tower's gradients over all rows of an update, (d,)."""
    return torch.cat([step[tower] for step in steps]).sum(0)


def train(
    loss_fn: BankedInfoNCE,
    sizes: list[int],
    num_updates: int = 2,
    num_negatives: int = 2,
    seed: int = 3,
) -> list[list[TowerGradients]]:
    """Return the gradients of every micro-step, one list per update.

    The embeddings of each update are shifted by the number of the update, as by drift.

    Args:
        loss_fn: the loss.
        sizes: numbers of pairs of the micro-batches of each update.
        num_updates: number of updates.
        num_negatives: hard negatives per query.
        seed: seed of the embeddings.
    """
    generator = torch.Generator().manual_seed(seed)
    gradients = []
    for update in range(num_updates):
        gradients_of_update = []
        for n in sizes:
            embeddings = draw_embeddings(n, num_negatives, D, generator)
            inputs = make_leaves([column + update for column in embeddings])
            loss_fn(*inputs).backward()
            gradients_of_update.append(get_tower_gradients(inputs))
        loss_fn.end_update()
        gradients.append(gradients_of_update)
    return gradients


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


@pytest.mark.parametrize(
    ("setting", "centred_towers"),
    [
        ("both", (QUERIES, PASSAGES)),
        ("passages", (PASSAGES,)),
        ("queries", (QUERIES,)),
        ("none", ()),
    ],
)
def test_the_remainder_is_spread_over_the_remaining_rows(setting, centred_towers):
    centred_loss_fn = BankedInfoNCE(
        bank_size=200,
        drift_compensation="none",
        temperature=5.0,
        center_gradients=setting,
        pairs_per_update=N * NUM_STEPS,
    )
    plain_loss_fn = BankedInfoNCE(
        bank_size=200, drift_compensation="none", temperature=5.0, center_gradients="none"
    )
    sizes = [N] * NUM_STEPS
    centred_updates = train(centred_loss_fn, sizes, 3)
    plain_updates = train(plain_loss_fn, sizes, 3)
    for centred_update, plain_update in zip(centred_updates, plain_updates, strict=True):
        for tower in (QUERIES, PASSAGES):
            gradients = [step[tower] for step in centred_update]
            expected = [step[tower] for step in plain_update]
            if tower in centred_towers:
                expected = spread_remainder(expected)
            for rows, expected_rows in zip(gradients, expected, strict=True):
                assert (rows - expected_rows).abs().max() < 1e-13
            largest_sum = sum_over_update(centred_update, tower).abs().max()
            if tower in centred_towers:
                assert largest_sum < 1e-12
            else:
                assert largest_sum > 1e-3


@pytest.mark.parametrize("sizes", [[5, 8, 1, 3], [1] * 6, [17]])
def test_gradients_of_an_update_of_any_size_sum_to_zero_after_begin_update(sizes):
    """Each micro-batch has the weight of its pairs, because its loss is a mean over them."""
    loss_fn = BankedInfoNCE(0, center_gradients="both")
    generator = torch.Generator().manual_seed(0)
    for update in range(3):
        sizes_of_update = sizes[update:] + sizes[:update]
        loss_fn.begin_update(sum(sizes_of_update))
        query_total = torch.zeros(D, dtype=torch.float64)
        passage_total = torch.zeros(D, dtype=torch.float64)
        for n in sizes_of_update:
            inputs = make_leaves(draw_embeddings(n, 1, D, generator))
            loss_fn(*inputs).backward()
            query_gradients, passage_gradients = get_tower_gradients(inputs)
            query_total += n * query_gradients.sum(0)
            passage_total += n * passage_gradients.sum(0)
        assert query_total.abs().max() < 1e-13
        assert passage_total.abs().max() < 1e-13


def test_gradients_of_each_micro_batch_sum_to_zero_without_a_number_of_pairs():
    loss_fn = BankedInfoNCE(64, center_gradients="both", drift_compensation="none")
    for update in train(loss_fn, [N, N, 3, 1]):
        for query_gradients, passage_gradients in update:
            assert passage_gradients.sum(0).abs().max() < 1e-14
            assert query_gradients.abs().max() > 0
            if len(query_gradients) > 1:  # the gradient of a single row would become zero
                assert query_gradients.sum(0).abs().max() < 1e-14


def test_an_update_that_ends_early_leaves_no_remainder_for_the_next():
    early = BankedInfoNCE(0, center_gradients="both", pairs_per_update=N * NUM_STEPS)
    fresh = BankedInfoNCE(0, center_gradients="both", pairs_per_update=N * NUM_STEPS)
    train(early, [N] * (NUM_STEPS - 3), num_updates=1, seed=8)
    gradients = train(early, [N] * NUM_STEPS, num_updates=1)[0]
    expected = train(fresh, [N] * NUM_STEPS, num_updates=1)[0]
    for step, expected_step in zip(gradients, expected, strict=True):
        assert torch.equal(step[QUERIES], expected_step[QUERIES])
        assert torch.equal(step[PASSAGES], expected_step[PASSAGES])


@pytest.mark.parametrize(
    ("drift_compensation", "is_centred"), [("auto", [False, True]), ("mean", [False, False])]
)
def test_auto_centres_passages_while_aged_entries_are_in_use(drift_compensation, is_centred):
    """In the first update there are no aged entries."""
    loss_fn = BankedInfoNCE(64, drift_compensation=drift_compensation, pairs_per_update=2 * N)
    updates = train(loss_fn, [N, N])
    for update, expected in zip(updates, is_centred, strict=True):
        largest_passage_sum = float(sum_over_update(update, PASSAGES).abs().max())
        assert (largest_passage_sum < 1e-14) == expected
        assert sum_over_update(update, QUERIES).abs().max() > 1e-6


def test_auto_centres_to_the_end_of_an_update_whose_aged_entries_run_out():
    """From the second micro-batch on, the bank of N pairs holds pairs of this update alone."""
    loss_fn = BankedInfoNCE(N, drift_compensation="auto", pairs_per_update=4 * N)
    _, second_update = train(loss_fn, [N, N, N, N])
    assert sum_over_update(second_update, PASSAGES).abs().max() < 1e-14


def test_auto_centres_nothing_without_a_bank():
    plain = BankedInfoNCE(0, center_gradients="none", pairs_per_update=2 * N)
    auto = BankedInfoNCE(0, center_gradients="auto", pairs_per_update=2 * N)
    expected = train(plain, [N, N])
    gradients = train(auto, [N, N])
    for step, expected_step in zip(gradients[1], expected[1], strict=True):
        assert torch.equal(step[QUERIES], expected_step[QUERIES])
        assert torch.equal(step[PASSAGES], expected_step[PASSAGES])


@pytest.mark.parametrize("bad_step", [0, 3, NUM_STEPS - 1])
def test_the_finite_micro_batches_of_an_update_sum_to_zero(bad_step):
    """One micro-batch is not finite, and its backward pass is skipped."""
    loss_fn = BankedInfoNCE(
        64, center_gradients="both", drift_compensation="none", pairs_per_update=N * NUM_STEPS
    )
    generator = torch.Generator().manual_seed(0)
    total = torch.zeros(2, D, dtype=torch.float64)
    for step in range(NUM_STEPS):
        inputs = make_leaves(draw_embeddings(N, 0, D, generator))
        if step == bad_step:
            inputs[0].data[0] = torch.inf
            assert not loss_fn(*inputs).isfinite()
            continue
        loss = loss_fn(*inputs)
        assert loss.isfinite()
        loss.backward()
        total += torch.stack([column.grad.sum(0) for column in inputs])
    assert total.isfinite().all()
    if bad_step == NUM_STEPS - 1:  # the last micro-batch, which would subtract the remainder
        assert total.abs().max() > 1e-6
    else:
        assert total.abs().max() < 1e-14


def test_a_forward_in_eval_mode_changes_no_training_update():
    def compute_gradients(evaluates: bool) -> Tensor:
        """Return the gradients of an update, with or without an evaluation within it."""
        loss_fn = BankedInfoNCE(
            64, center_gradients="both", drift_compensation="none", pairs_per_update=3 * N
        )
        generator = torch.Generator().manual_seed(0)
        gradients = []
        for step in range(3):
            inputs = make_leaves(draw_embeddings(N, 0, D, generator))
            loss_fn(*inputs).backward()
            gradients.extend(column.grad for column in inputs)
            if evaluates and step == 1:
                loss_fn.eval()
                loss_fn(*make_leaves(inputs)).backward()
                loss_fn.train()
        return torch.cat(gradients)

    assert torch.equal(compute_gradients(evaluates=True), compute_gradients(evaluates=False))


def test_gradients_in_eval_mode_are_those_of_plain_info_nce():
    embeddings = draw_embeddings(N, 0, D)
    queries, passages = make_leaves(embeddings)
    loss_fn = BankedInfoNCE(0, center_gradients="both").eval()
    loss_fn(queries, passages).backward()
    expected_queries, expected_passages = make_leaves(embeddings)
    logits = expected_queries @ expected_passages.T
    cross_entropy(logits, torch.arange(N)).backward()
    assert torch.allclose(queries.grad, expected_queries.grad, atol=1e-14)
    assert torch.allclose(passages.grad, expected_passages.grad, atol=1e-14)
