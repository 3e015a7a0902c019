"""Random micro-batches for the tests of the bank, and a call of the loss with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from contaccum import BankedInfoNCE
from contaccum.bank.centering import GradientCentering
from contaccum.bank.ids import stack_ids
from contaccum.bank.logits import make_pairs, stack_embeddings
from contaccum.bank.memory_bank import MemoryBank, score_quadrants
from contaccum.settings import InfoNCESettings


def draw_embeddings(
    n: int,
    h: int = 0,
    d: int = 8,
    seed: int | torch.Generator = 0,
    dtype: torch.dtype = torch.float64,
) -> list[Tensor]:
    """Draw queries (n, d), passages (n, d) and, if h > 0, hard negatives (n, h, d).

    A generator as seed continues its sequence.
    """
    generator = torch.Generator().manual_seed(seed) if isinstance(seed, int) else seed
    shapes = [(n, d), (n, d)]
    if h > 0:
        shapes.append((n, h, d))
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]


def draw_ids(
    embeddings: Sequence[Tensor], num_texts: int, generator: torch.Generator
) -> list[Tensor]:
    """Draw an id below ``num_texts`` for each query, passage and hard negative."""
    return [torch.randint(num_texts, x.shape[:-1], generator=generator) for x in embeddings]


def make_leaves(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy tensors to leaf tensors that require gradients."""
    return [tensor.detach().clone().requires_grad_() for tensor in tensors]


def call_loss(
    loss_fn: BankedInfoNCE, embeddings: Sequence[Tensor], ids: Sequence[Tensor] = ()
) -> Tensor:
    """Call the loss with ids of queries, passages and hard negatives, or fewer columns."""
    names = ("query_ids", "passage_ids", "negative_ids")
    ids_by_name = dict(zip(names, ids, strict=False))  # stops at the last column with ids
    return loss_fn(*embeddings, **ids_by_name)


def enqueue(bank: MemoryBank, embeddings: Sequence[Tensor], ids: Sequence[Tensor] = ()) -> None:
    """Score and append pairs to a bank that belongs to no loss, as `BankedInfoNCE` does."""
    texts = stack_embeddings(embeddings).to(bank.documents)
    text_ids = stack_ids(*ids, *[None] * (3 - len(ids)), texts)
    bank.ensure_shape(texts.shape[2], texts.shape[1] - 2)
    settings = InfoNCESettings(temperature=bank.temperature)
    local = make_pairs(texts, text_ids, bank.temperature)
    bank.append(local, score_quadrants(local, bank, settings), torch.tensor(False))


class NoCentering(GradientCentering):
    """Centring that leaves every gradient as it is."""

    def centre(self, *args: Any) -> None:
        """Change nothing."""


def make_loss_without_centring(bank_size: int, **settings: Any) -> BankedInfoNCE:
    """Make a loss that moves and retires its entries as usual."""
    loss_fn = BankedInfoNCE(bank_size, **settings)
    loss_fn.centering = NoCentering(None)
    return loss_fn
