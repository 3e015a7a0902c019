"""The micro-batch that a loss is computed of: checked, gathered over ranks, in float32 at least."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from contaccum.bank.logits import IDS_PER_TEXT, NO_ID, GuideEmbeddings, Pairs
from contaccum.distributed import gather_rows


class TextIds(NamedTuple):
    """Ids of the texts of a micro-batch, int64, or None if there are none.

    A last dimension of ``IDS_PER_TEXT`` may follow the shapes below.
    """

    queries: Tensor | None = None  # (n,)
    passages: Tensor | None = None  # (n,)
    negatives: Tensor | None = None  # (n, h)

    def check(self, num_pairs: int, num_negatives: int) -> None:
        """Raise `ValueError` if ids are not integers of their shape, naming the argument."""
        shapes = ((num_pairs,), (num_pairs,), (num_pairs, num_negatives))
        names = ("query_ids", "passage_ids", "negative_ids")
        for name, ids, shape in zip(names, self, shapes, strict=True):
            if ids is None:
                continue
            fits = ids.shape in (shape, (*shape, IDS_PER_TEXT))
            if not fits or ids.dtype not in (torch.int64, torch.int32):
                expected = f"int64 {shape} or {(*shape, IDS_PER_TEXT)}"
                raise ValueError(f"{name} must be {expected}, got {ids.dtype} {tuple(ids.shape)}")

    def stack(self, num_pairs: int, num_negatives: int, device: torch.device) -> Tensor:
        """Stack the ids of all texts: int64 (n, 2 + h, IDS_PER_TEXT), `NO_ID` without one."""
        stacked = torch.full((num_pairs, 2 + num_negatives, IDS_PER_TEXT), NO_ID, device=device)
        columns = (stacked[:, 0], stacked[:, 1], stacked[:, 2:])
        for column, ids in zip(columns, self, strict=True):
            if ids is None:
                continue
            if ids.ndim == column.ndim:
                column.copy_(ids)
            else:
                column[..., 0] = ids
        return stacked


class MicroBatch(NamedTuple):
    """Embeddings of a micro-batch, of all ranks that share the bank, in rank order."""

    embeddings: list[Tensor]  # queries (n, d), passages (n, d) and, if any, negatives (n, h, d)
    query_ids: Tensor  # int64 (IDS_PER_TEXT, n)
    document_ids: Tensor  # int64 (IDS_PER_TEXT, n, 1 + h)
    guide: GuideEmbeddings | None
    local_rows: slice  # the rows of this rank

    @property
    def guide_dim(self) -> int:
        """The embedding size g of the guide, 0 without one."""
        return 0 if self.guide is None else self.guide.documents.shape[2]


def collect_micro_batch(
    embeddings: list[Tensor],
    ids: TextIds,
    guide: Sequence[Tensor | None] = (),
    guide_margin: float = 0.0,
    guide_margin_is_relative: bool = False,
    is_shared: bool = False,
) -> MicroBatch:
    """Check the inputs of a loss, gather those of all ranks, detach and cast them.

    Args:
        embeddings: queries (n, d), passages (n, d) and, if any, negatives (n, h, d).
        guide: the same texts as a guide embeds them, or nothing.
        is_shared: whether all ranks share one bank.

    Raises:
        ValueError: for shapes that do not agree, naming the argument.
    """
    negatives = embeddings[2] if len(embeddings) > 2 else None
    check_embeddings(embeddings[0], embeddings[1], negatives, may_be_empty=is_shared)
    n = len(embeddings[0])
    num_negatives = 0 if negatives is None else negatives.shape[1]
    ids.check(n, num_negatives)
    guide_inputs = [x.detach() for x in guide if x is not None]
    if guide_inputs and [x.shape[:-1] for x in guide_inputs] != [x.shape[:-1] for x in embeddings]:
        shapes = ", ".join(str(tuple(x.shape)) for x in guide_inputs)
        raise ValueError(f"the guide must embed the same texts, got {shapes} for n={n}")

    detached = [x.detach() for x in embeddings]
    stacked_ids = ids.stack(n, num_negatives, detached[0].device)
    local_rows = slice(0, n)
    if is_shared:
        gathered, local_rows = gather_rows([*detached, stacked_ids])
        detached = gathered[:-1]
        stacked_ids = gathered[-1]
        if guide_inputs:
            guide_inputs, _ = gather_rows(guide_inputs)
    dtype = torch.promote_types(detached[0].dtype, torch.float32)
    guide_inputs = [x.to(dtype) for x in guide_inputs]
    guide_embeddings = None
    if guide_inputs:
        guide_embeddings = embed_guide(guide_inputs, guide_margin, guide_margin_is_relative)
    return MicroBatch(
        embeddings=[x.to(dtype) for x in detached],
        query_ids=stacked_ids[:, 0].T.contiguous(),
        document_ids=stacked_ids[:, 1:].movedim(-1, 0).contiguous(),
        guide=guide_embeddings,
        local_rows=local_rows,
    )


def make_pairs(queries: Tensor, documents: Tensor, batch: MicroBatch, temperature: float) -> Pairs:
    """Make pairs of a micro-batch's queries (n, d) and documents (n, 1 + h, d), with its ids."""
    return Pairs(
        queries=queries,
        documents=documents,
        query_ids=batch.query_ids,
        document_ids=batch.document_ids,
        positive_logits=(queries * documents[:, 0]).sum(1) / temperature,
        valid=torch.ones(documents.shape[:2], dtype=torch.bool, device=documents.device),
        guide=batch.guide,
    )


def check_embeddings(
    queries: Tensor,
    passages: Tensor,
    negatives: Tensor | None = None,
    may_be_empty: bool = False,
) -> None:
    """Raise `ValueError` if shapes are not (n, d), (n, d) and (n, h, d), naming the argument."""
    if queries.ndim != 2 or queries.shape != passages.shape:
        shapes = f"{tuple(queries.shape)} and {tuple(passages.shape)}"
        raise ValueError(f"queries and passages must have the same shape (n, d), got {shapes}")
    n, d = queries.shape
    if n == 0 and not may_be_empty:
        raise ValueError("the micro-batch is empty")
    if negatives is None:
        return
    if negatives.ndim != 3 or negatives.shape[::2] != (n, d):
        shape = tuple(negatives.shape)
        raise ValueError(f"negatives must be (n, h, d) = ({n}, h, {d}), got {shape}")


def join_documents(embeddings: Sequence[Tensor]) -> Tensor:
    """Join passages (n, d) and negatives (n, h, d), which follow the queries, to (n, 1 + h, d)."""
    return torch.cat([embeddings[1][:, None], *embeddings[2:]], dim=1)


def embed_guide(embeddings: list[Tensor], margin: float, is_relative: bool) -> GuideEmbeddings:
    """Normalise a guide's queries (n, g), passages (n, g) and, if any, negatives (n, h, g).

    The ceiling of a row is the cosine of its own positive less the margin, or less that share of
    it: the rule of GISTEmbed, arXiv 2402.16829.
    """
    queries = normalize(embeddings[0], dim=-1)
    documents = normalize(join_documents(embeddings), dim=-1)
    positive_cosines = (queries * documents[:, 0]).sum(1)
    margins = torch.full_like(positive_cosines, margin)
    if is_relative:
        margins = margin * positive_cosines.abs()
    return GuideEmbeddings(queries, documents, positive_cosines - margins)
