"""Logits with false negatives masked, by ids and by a table of positives; the loss with them."""

from __future__ import annotations

import pytest
import torch
from micro_batches import make_leaves
from torch import Tensor

from contaccum import BankedInfoNCE
from contaccum.bank.ids import NO_ID, PositivesTable
from contaccum.bank.logits import NO_ID_OF_ROW, Pairs, find_duplicates


def test_a_row_whose_columns_are_all_masked_has_no_loss_and_no_gradient():
    queries = torch.eye(4, dtype=torch.float64)
    loss_fn = BankedInfoNCE(bank_size=8, drift_compensation="none")
    for _ in range(4):
        inputs = make_leaves([queries, 0.5 - queries])
        loss = loss_fn(*inputs, query_ids=torch.zeros(4, dtype=torch.int64))
        loss.backward()
        assert loss.item() == 0
        assert inputs[0].grad.abs().max() == inputs[1].grad.abs().max() == 0
        assert loss_fn.last["masked"].item() == 1


def make_pairs_of_ids(query_ids: Tensor, document_ids: Tensor) -> Pairs:
    """Make pairs with ids (2, n) and (2, n, 1 + h), and no embeddings."""
    n, width = document_ids.shape[1:]
    return Pairs(
        queries=torch.zeros(n, 1),
        documents=torch.zeros(n, width, 1),
        query_ids=query_ids,
        document_ids=document_ids,
        positive_logits=torch.zeros(n),
    )


@pytest.mark.parametrize(("num_rows", "num_columns"), [(6, 9), (18, 3)])
def test_rules_by_ids_equal_a_loop_over_all_pairs(num_rows, num_columns):
    """The lookup in the table is by queries or by passages, whichever are fewer."""
    generator = torch.Generator().manual_seed(1)
    values = torch.tensor([NO_ID, NO_ID_OF_ROW + 1, -1, 0, 1, 2**62, 2**63 - 1])

    def draw(*shape: int) -> Tensor:
        return values[torch.randint(len(values), shape, generator=generator)]

    num_duplicates = 0
    num_listed = 0
    for _ in range(15):
        rows = make_pairs_of_ids(draw(2, num_rows), draw(2, num_rows, 2))
        columns = make_pairs_of_ids(draw(2, num_columns), draw(2, num_columns, 2))
        listed_queries = draw(5)
        listed_documents = draw(5)
        table = PositivesTable(listed_queries, listed_documents)
        listed_pairs = set(zip(listed_queries.tolist(), listed_documents.tolist(), strict=True))
        is_duplicate = find_duplicates(rows, columns)
        is_listed = table.contains(rows.query_ids[0], columns.document_ids[0])
        for row in range(num_rows):
            for column in range(num_columns):
                for k in range(2):
                    expected = False
                    for id_index in range(2):
                        positive_id = int(rows.document_ids[id_index, row, 0])
                        query_id = int(rows.query_ids[id_index, row])
                        if positive_id == columns.document_ids[id_index, column, k] != NO_ID:
                            expected = True
                        if k == 0 and query_id == columns.query_ids[id_index, column] != NO_ID:
                            expected = True
                    pair = (int(rows.query_ids[0, row]), int(columns.document_ids[0, column, k]))
                    expected_listed = pair in listed_pairs and NO_ID not in pair
                    assert bool(is_duplicate[row, column, k]) == expected
                    assert bool(is_listed[row, column, k]) == expected_listed
                    num_duplicates += expected
                    num_listed += expected_listed
    assert num_duplicates > 200
    assert num_listed > 50
