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
    """Ids of the texts of a micro-batch, integers; None where texts have no ids.

    Equal ids mean the same text. A text may have two ids; the shapes below then have one more
    dimension at the end, of size `IDS_PER_TEXT`.
    """

    queries: Tensor | None = None  # (n,)
    passages: Tensor | None = None  # (n,)
    negatives: Tensor | None = None  # (n, h)

    def stack(self, num_pairs: int, num_negatives: int, device: torch.device) -> Tensor:
        """Stack the ids of each pair: of its query, its passage and its h hard negatives.

        Returns:
            int64 (n, 2 + h, IDS_PER_TEXT); missing ids are `NO_ID`.

        Raises:
            ValueError: for ids of another shape, or that are not integers.
        """
        stacked = torch.full((num_pairs, 2 + num_negatives, IDS_PER_TEXT), NO_ID, device=device)
        views = (stacked[:, 0], stacked[:, 1], stacked[:, 2:])
        for kind, view, ids in zip(self._fields, views, self, strict=True):
            if ids is None:
                continue
            # torch would broadcast ids of a wrong shape, and round floating-point numbers.
            if ids.shape not in (view.shape, view.shape[:-1]) or ids.is_floating_point():
                raise ValueError(
                    f"ids of {kind} must be integers {tuple(view.shape[:-1])} or "
                    f"{tuple(view.shape)}, got {ids.dtype} {tuple(ids.shape)}"
                )
            if ids.ndim == view.ndim:  # two ids per text
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
    check_embeddings(*embeddings, may_be_empty=is_shared)
    num_negatives = 0
    if len(embeddings) > 2:
        num_negatives = embeddings[2].shape[1]
    n = len(embeddings[0])
    guide_inputs = [x.detach() for x in guide if x is not None]
    guide_text_shapes = [x.shape[:-1] for x in guide_inputs]
    if guide_inputs and guide_text_shapes != [x.shape[:-1] for x in embeddings]:
        raise ValueError(
            "the guide must embed the same texts as the model, got guide embeddings "
            f"{[tuple(x.shape) for x in guide_inputs]}"
        )

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
    *,
    may_be_empty: bool,
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
    if negatives.ndim != 3 or len(negatives) != n or negatives.shape[2] != d:
        shape = tuple(negatives.shape)
        raise ValueError(f"negatives must be (n, h, d) = ({n}, h, {d}), got {shape}")


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
