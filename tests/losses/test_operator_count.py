"""The number of torch operators of a micro-step.

With small micro-batches a GPU waits for Python and for the start of each operator, whatever its
size, so their number is the cost of the loss.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from sample_texts import WORDS
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import (
    CachedMultipleNegativesRankingLoss,
    MultipleNegativesRankingLoss,
)
from tiny_models import tiny_encoder
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from contaccum import CachedContAccumLoss, ContAccumLoss

BANK_SIZE = 256
NUM_PAIRS = 8
STEPS_PER_UPDATE = 16


class OperatorCounter(TorchDispatchMode):
    """Counter of operators, without those that return a view, which start nothing on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.num_operators = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        aliases = [value.alias_info for value in function._schema.returns]
        is_view = any(alias is not None and not alias.is_write for alias in aliases)
        self.num_operators += not is_view
        return function(*args, **(kwargs or {}))


def count_operators(
    make_loss: Callable[[SentenceTransformer], nn.Module], is_tied: bool, num_columns: int
) -> float:
    """Count the operators per micro-step of an update, with a full bank.

    Forward, backward and enqueue are counted, and the drift probe at the start of the update.
    """
    model = tiny_encoder(is_tied).train()
    loss_fn = make_loss(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(0)

    def run_micro_step(num_pairs: int) -> None:
        columns = []
        for index in range(num_columns):
            words = torch.randint(len(WORDS), (num_pairs, 3 + index), generator=generator)
            texts = [" ".join(WORDS[word] for word in row) for row in words.tolist()]
            task = "query" if index == 0 else "document"
            columns.append({**model.preprocess(texts, task=task), "task": task})
        loss_fn(columns, None).backward()

    run_micro_step(BANK_SIZE)
    optimizer.step()
    with OperatorCounter() as counter:
        for _ in range(STEPS_PER_UPDATE):
            run_micro_step(NUM_PAIRS)
    return counter.num_operators / STEPS_PER_UPDATE


@pytest.mark.parametrize(
    ("ours", "published", "is_tied", "num_columns"),
    [
        (ContAccumLoss, MultipleNegativesRankingLoss, True, 2),
        (ContAccumLoss, MultipleNegativesRankingLoss, False, 3),
        (
            CachedContAccumLoss,
            partial(CachedMultipleNegativesRankingLoss, mini_batch_size=NUM_PAIRS),
            True,
            2,
        ),
    ],
    ids=["pairs, one tower", "hard negatives, two towers", "gradient cache"],
)
def test_a_micro_step_has_at_most_100_operators_more_than_without_a_bank(
    ours, published, is_tied, num_columns
):
    num_published = count_operators(published, is_tied, num_columns)
    with_bank = partial(ours, bank_size=BANK_SIZE)
    assert count_operators(with_bank, is_tied, num_columns) - num_published <= 100
