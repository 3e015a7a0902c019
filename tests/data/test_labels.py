"""The label column: rows that are encoded are decoded as a batch, foreign labels are not read."""

import pytest
import torch

from contaccum.data.sampling import Labels, decode, encode

IDS = [[2**63 - 1, -(2**63), 0], [1, -2, 3]]
SCORES = [[0.1, -7.25], [3e8, -0.0]]
NUM_COLUMNS = 3


def test_ids_and_scores_survive_encoding_bit_for_bit():
    rows = [
        encode(text_ids=IDS[0], teacher_scores=SCORES[0]),
        encode(text_ids=IDS[1], teacher_scores=SCORES[1]),
    ]
    labels = decode(torch.tensor(rows), NUM_COLUMNS)
    assert labels.text_ids is not None
    assert labels.text_ids.tolist() == IDS
    assert labels.teacher_scores is not None
    # Bits, because -0.0 == 0.0
    bits = labels.teacher_scores.view(torch.int32)
    assert torch.equal(bits, torch.tensor(SCORES).view(torch.int32))


def test_ids_or_scores_alone_are_decoded_as_what_they_are():
    ids = decode(torch.tensor([encode(text_ids=row) for row in IDS]), NUM_COLUMNS)
    assert ids.text_ids is not None
    assert ids.text_ids.tolist() == IDS
    assert ids.teacher_scores is None
    scores = decode(torch.tensor([encode(teacher_scores=row) for row in SCORES]), NUM_COLUMNS)
    assert scores.teacher_scores is not None
    assert torch.equal(scores.teacher_scores, torch.tensor(SCORES))
    assert scores.text_ids is None


@pytest.mark.parametrize(
    "labels",
    [None, torch.rand(5), torch.rand(5, NUM_COLUMNS), torch.ones(5, 9, dtype=torch.int64)],
    ids=["no labels", "one number a row", "floats in place of ids", "another width"],
)
def test_labels_of_a_users_own_data_set_are_not_read(labels):
    assert decode(labels, NUM_COLUMNS) == Labels()
