"""Logits with false negatives masked, by ids and by a table of positives; the loss with them."""

from __future__ import annotations

import pytest
import torch
from micro_batches import make_leaves
from torch import Tensor

from contaccum import BankedInfoNCE
from contaccum.bank.ids import NO_ID, PositivesTable
from contaccum.bank.logits import (
    MASKED,
    NO_ID_OF_ROW,
    Pairs,
    find_duplicates,
    make_pairs,
    masked_logits,
)
from contaccum.settings import InfoNCESettings


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


def draw_pairs(n: int, num_ids: int, seed: int) -> Pairs:
    """Draw pairs with two hard negatives, whose ids are below ``num_ids``."""
    generator = torch.Generator().manual_seed(seed)
    texts = torch.randn(n, 4, 5, generator=generator, dtype=torch.float64)
    ids = torch.randint(num_ids, (n, 4, 2), generator=generator)
    pairs = make_pairs(texts, ids, temperature=0.5)
    return pairs._replace(invalid=torch.zeros(n, 3, dtype=torch.bool))


def test_a_document_is_masked_if_it_is_not_valid_or_if_any_rule_excludes_it():
    rows = draw_pairs(4, num_ids=30, seed=0)
    columns = draw_pairs(6, num_ids=30, seed=1)
    columns.invalid[2] = True
    logits = masked_logits(rows, columns, InfoNCESettings(temperature=0.5))
    is_duplicate = find_duplicates(rows, columns)
    num_by_rule = {"invalid": 0, "duplicate": 0, "none": 0}
    for row in range(4):
        for column in range(6):
            for k in range(3):
                logit = rows.queries[row] @ columns.documents[column, k] / 0.5
                rule = "none"
                if column == 2:
                    rule = "invalid"
                elif is_duplicate[row, column, k]:
                    rule = "duplicate"
                num_by_rule[rule] += 1
                expected = logit.item() if rule == "none" else MASKED
                assert logits[row, column, k].item() == pytest.approx(expected)
    assert min(num_by_rule.values()) > 0


def test_a_row_s_own_positive_is_masked_in_its_own_block_alone():
    pairs = draw_pairs(4, num_ids=30, seed=0)
    settings = InfoNCESettings(mask_duplicates=False)
    is_own_positive = torch.zeros(4, 4, 3, dtype=torch.bool)
    is_own_positive[:, :, 0] = torch.eye(4, dtype=torch.bool)
    assert torch.equal(masked_logits(pairs, pairs, settings) == MASKED, is_own_positive)
    other_pairs = pairs._replace(queries=pairs.queries.clone())
    assert (masked_logits(other_pairs, pairs, settings) != MASKED).all()


def test_rules_by_ids_equal_a_loop_over_all_pairs():
    generator = torch.Generator().manual_seed(1)
    values = torch.tensor([NO_ID, NO_ID_OF_ROW + 1, -1, 0, 1, 2**62, 2**63 - 1])

    def draw(*shape: int) -> Tensor:
        return values[torch.randint(len(values), shape, generator=generator)]

    num_duplicates = 0
    num_listed = 0
    for _ in range(15):
        rows = make_pairs_of_ids(draw(2, 6), draw(2, 6, 2))
        columns = make_pairs_of_ids(draw(2, 9), draw(2, 9, 2))
        listed_queries = draw(5)
        listed_documents = draw(5)
        table = PositivesTable(listed_queries, listed_documents)
        listed_pairs = set(zip(listed_queries.tolist(), listed_documents.tolist(), strict=True))
        is_duplicate = find_duplicates(rows, columns)
        is_listed = table.contains(rows.query_ids[0], columns.document_ids[0])
        for row in range(6):
            for column in range(9):
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


@pytest.mark.parametrize(("num_rows", "num_columns"), [(40, 15), (15, 40)])
def test_a_table_lists_exactly_its_pairs(num_rows, num_columns):
    """The lookup is by queries or by passages, whichever are fewer."""
    generator = torch.Generator().manual_seed(2)
    listed = torch.randint(-500, 500, (2, 3000), generator=generator)
    table = PositivesTable(listed[0], listed[1])
    listed_pairs = set(zip(listed[0].tolist(), listed[1].tolist(), strict=True))
    ids = torch.randint(-600, 600, (2, num_rows), generator=generator)
    ids[0, :5] = listed[0, :5]
    column_ids = torch.randint(-600, 600, (2, num_columns, 1), generator=generator)
    column_ids[0, :5, 0] = listed[1, :5]
    rows = make_pairs_of_ids(ids, torch.full((2, num_rows, 1), NO_ID))
    columns = make_pairs_of_ids(torch.full((2, num_columns), NO_ID), column_ids)
    is_listed = table.contains(rows.query_ids[0], columns.document_ids[0])
    for row in range(num_rows):
        for column in range(num_columns):
            pair = (int(ids[0, row]), int(column_ids[0, column, 0]))
            assert bool(is_listed[row, column, 0]) == (pair in listed_pairs)
    assert is_listed.sum() >= 5
