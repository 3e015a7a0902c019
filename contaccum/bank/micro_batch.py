"""Preparation of a micro-batch for the loss: checks, ids, the guide, gathering over ranks.

`collect_micro_batch` checks the inputs of a loss, detaches them (`BankedInfoNCE` computes their
gradients itself), gathers them from all ranks that share a bank, and casts them to float32, or
leaves them in float64. `make_pairs` makes the `Pairs` that are scored.

A guide is a second, frozen model. Documents that it scores too high, compared with a row's
positive, are false negatives (GISTEmbed).

Letters in shapes: n pairs, h hard negatives per query, d the embedding size, g the embedding size
of the guide. The documents of a pair are its positive passage, then its hard negatives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from contaccum.bank.logits import IDS_PER_TEXT, NO_ID, GuideEmbeddings, Pairs
from contaccum.bank.settings import Similarity
from contaccum.distributed import gather_rows


class TextIds(NamedTuple):
    """Ids of the texts of a micro-batch, int64 or int32; None where texts have no ids.

    Equal ids mean the same text. A text may have two ids; the shapes below then have one more
    dimension at the end, of size `IDS_PER_TEXT`.
    """

    queries: Tensor | None = None  # (n,)
    passages: Tensor | None = None  # (n,)
    negatives: Tensor | None = None  # (n, h)

    def check(self, num_pairs: int, num_negatives: int) -> None:
        """Raise `ValueError`, with the argument's name, for ids of another shape or dtype."""
        shapes = ((num_pairs,), (num_pairs,), (num_pairs, num_negatives))
        names = ("query_ids", "passage_ids", "negative_ids")
        for name, ids, shape in zip(names, self, shapes, strict=True):
            if ids is None:
                continue
            shape_of_two_ids = (*shape, IDS_PER_TEXT)
            is_shape_valid = ids.shape in (shape, shape_of_two_ids)
            if not is_shape_valid or ids.dtype not in (torch.int64, torch.int32):
                raise ValueError(
                    f"{name} must be int64 or int32 {shape} or {shape_of_two_ids}, "
                    f"got {ids.dtype} {tuple(ids.shape)}"
                )

    def stack(self, num_pairs: int, num_negatives: int, device: torch.device) -> Tensor:
        """Stack the ids of each pair: of its query, its passage and its h hard negatives.

        Returns:
            int64 (n, 2 + h, IDS_PER_TEXT); missing ids are `NO_ID`.
        """
        stacked = torch.full((num_pairs, 2 + num_negatives, IDS_PER_TEXT), NO_ID, device=device)
        views = (stacked[:, 0], stacked[:, 1], stacked[:, 2:])
        for view, ids in zip(views, self, strict=True):
            if ids is None:
                continue
            has_two_ids = ids.ndim == view.ndim
            if has_two_ids:
                view.copy_(ids)
            else:
                view[..., 0] = ids
        return stacked


class MicroBatch(NamedTuple):
    """Detached embeddings and ids of a micro-batch.

    If ranks share a bank, it consists of the micro-batches of all ranks, in rank order.
    """

    embeddings: list[Tensor]  # queries (n, d), passages (n, d) and, if any, negatives (n, h, d)
    query_ids: Tensor  # int64 (IDS_PER_TEXT, n)
    document_ids: Tensor  # int64 (IDS_PER_TEXT, n, 1 + h)
    guide: GuideEmbeddings | None
    rows_of_this_rank: slice  # where this rank's pairs are among those of all ranks

    @property
    def guide_dim(self) -> int:
        """The embedding size g of the guide, 0 without a guide."""
        if self.guide is None:
            return 0
        return self.guide.documents.shape[2]


def collect_micro_batch(
    embeddings: list[Tensor],
    ids: TextIds,
    guide: Sequence[Tensor | None] = (),
    guide_margin: float = 0.0,
    is_guide_margin_relative: bool = False,
    is_shared: bool = False,
) -> MicroBatch:
    """Check the inputs of a loss, detach them, gather them from all ranks, and cast them.

    Args:
        embeddings: queries (n, d), passages (n, d) and, if any, negatives (n, h, d).
        ids: ids of the same texts.
        guide: guide embeddings of the same texts, or an empty sequence.
        guide_margin, is_guide_margin_relative: see `make_guide_embeddings`.
        is_shared: True if all ranks share one bank; a rank may then have no pairs.

    Raises:
        ValueError: for shapes that do not agree; the message names the argument.
    """
    negatives = None
    num_negatives = 0
    if len(embeddings) > 2:
        negatives = embeddings[2]
    check_embeddings(embeddings[0], embeddings[1], negatives, may_be_empty=is_shared)
    if negatives is not None:
        num_negatives = negatives.shape[1]
    n = len(embeddings[0])
    ids.check(n, num_negatives)
    guide_inputs = [x.detach() for x in guide if x is not None]
    _check_guide(guide_inputs, embeddings)

    detached = [x.detach() for x in embeddings]
    stacked_ids = ids.stack(n, num_negatives, detached[0].device)
    rows_of_this_rank = slice(0, n)
    if is_shared:
        gathered, rows_of_this_rank = gather_rows([*detached, stacked_ids])
        detached = gathered[:-1]
        stacked_ids = gathered[-1]
        if guide_inputs:
            guide_inputs, _ = gather_rows(guide_inputs)
    dtype = torch.promote_types(detached[0].dtype, torch.float32)
    guide_embeddings = None
    if guide_inputs:
        guide_inputs = [x.to(dtype) for x in guide_inputs]
        guide_embeddings = make_guide_embeddings(
            guide_inputs, guide_margin, is_guide_margin_relative
        )
    return MicroBatch(
        embeddings=[x.to(dtype) for x in detached],
        query_ids=stacked_ids[:, 0].T.contiguous(),
        document_ids=stacked_ids[:, 1:].movedim(-1, 0).contiguous(),
        guide=guide_embeddings,
        rows_of_this_rank=rows_of_this_rank,
    )


def make_pairs(queries: Tensor, documents: Tensor, batch: MicroBatch, temperature: float) -> Pairs:
    """Make `Pairs` of prepared queries (n, d) and documents (n, 1 + h, d).

    Args:
        queries, documents: the embeddings of ``batch``, normalised or centred as they are scored.
        batch: the micro-batch, whose ids and guide embeddings the pairs get.
        temperature: divisor of the similarities.
    """
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
    """Raise `ValueError` if shapes are not (n, d), (n, d) and (n, h, d)."""
    if queries.ndim != 2 or queries.shape != passages.shape:
        shapes = f"{tuple(queries.shape)} and {tuple(passages.shape)}"
        raise ValueError(f"queries and passages must have the same shape (n, d), got {shapes}")
    n, d = queries.shape
    if n == 0 and not may_be_empty:
        raise ValueError(
            "the micro-batch is empty: skip it (only with several ranks and "
            "gather_across_devices=True may a rank have no pairs)"
        )
    if negatives is None:
        return
    is_shape_valid = negatives.ndim == 3 and len(negatives) == n and negatives.shape[2] == d
    if not is_shape_valid:
        shape = tuple(negatives.shape)
        raise ValueError(f"negatives must be (n, h, d) = ({n}, h, {d}), got {shape}")


def _check_guide(guide: list[Tensor], embeddings: list[Tensor]) -> None:
    """Raise `ValueError` if guide embeddings are not of the same texts as ``embeddings``."""
    if not guide:
        return
    guide_shapes = [tuple(x.shape) for x in guide]
    guide_text_shapes = [x.shape[:-1] for x in guide]
    text_shapes = [x.shape[:-1] for x in embeddings]
    if guide_text_shapes != text_shapes:
        expected = [(*shape, "g") for shape in text_shapes]
        raise ValueError(
            f"the guide must embed the same texts: guide must have the shapes {expected}, "
            f"got {guide_shapes}"
        )


def make_queries_and_documents(
    embeddings: list[Tensor], similarity: Similarity
) -> tuple[Tensor, Tensor]:
    """Make queries (n, d) and documents (n, 1 + h, d), L2-normalised with cosine similarity.

    Args:
        embeddings: queries (n, d), passages (n, d) and, if any, negatives (n, h, d).
    """
    if similarity == "cos":
        embeddings = [normalize(x, dim=-1) for x in embeddings]
    return embeddings[0], join_documents(embeddings)


def join_documents(embeddings: Sequence[Tensor]) -> Tensor:
    """Join passages (n, d) and negatives (n, h, d) to documents (n, 1 + h, d).

    Args:
        embeddings: queries, which are skipped, passages and, if any, negatives.
    """
    passages = embeddings[1][:, None]
    return torch.cat([passages, *embeddings[2:]], dim=1)


def make_guide_embeddings(
    embeddings: list[Tensor], margin: float, is_relative: bool
) -> GuideEmbeddings:
    """L2-normalise guide embeddings, and compute the ceiling of each row.

    The ceiling is the largest cosine of a negative; documents above it are false negatives. With c
    the guide's cosine of a row's query and its own positive, the ceiling is c - margin, or
    c - margin * |c| if the margin is relative (GISTEmbed, arXiv 2402.16829).

    Args:
        embeddings: queries (n, g), passages (n, g) and, if any, negatives (n, h, g).
    """
    queries = normalize(embeddings[0], dim=-1)
    documents = normalize(join_documents(embeddings), dim=-1)
    positive_cosines = (queries * documents[:, 0]).sum(1)
    margins = torch.full_like(positive_cosines, margin)
    if is_relative:
        margins = margin * positive_cosines.abs()
    return GuideEmbeddings(queries, documents, ceilings=positive_cosines - margins)
