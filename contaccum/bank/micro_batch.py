"""Preparation of a micro-batch for the loss: checks, ids, the guide, gathering over ranks.

`stack_texts` stacks the embeddings of all texts of a pair, and everything that follows is computed
for the whole stack: with a small micro-batch, a GPU waits for the number of operators, not for
their size. `collect_micro_batch` gathers stack and ids from all ranks that share a bank, and
normalises the embeddings. `make_pairs` makes the `Pairs` that are scored. `BankedInfoNCE` computes
its gradients itself, so all tensors but the stack itself are detached.

A guide is a second, frozen model. Documents that it scores too high, compared with a row's
positive, are false negatives (GISTEmbed).

Letters in shapes: n pairs, h hard negatives per query, d the embedding size, g the embedding size
of the guide. The texts of a pair are its query, its positive passage, then its hard negatives; its
documents are all but the query.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize, pad

from contaccum.bank.logits import IDS_PER_TEXT, NO_ID, GuideEmbeddings, Pairs
from contaccum.bank.settings import Similarity
from contaccum.distributed import gather_rows

MIN_LENGTH = 1e-12
"""Length by which shorter embeddings are divided, as in `torch.nn.functional.normalize`."""


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
        shapes: list[tuple[int, ...]] = [(num_pairs,), (num_pairs,)]
        if num_negatives > 0 or self.negatives is not None:
            shapes.append((num_pairs, num_negatives))
        stacked = []
        for kind, shape, ids in zip(self._fields, shapes, self, strict=False):
            if ids is None:
                ids = torch.full((*shape, IDS_PER_TEXT), NO_ID, device=device)
            if ids.shape not in (shape, (*shape, IDS_PER_TEXT)) or ids.is_floating_point():
                raise ValueError(
                    f"ids of {kind} must be integers {shape} or {(*shape, IDS_PER_TEXT)}, "
                    f"got {ids.dtype} {tuple(ids.shape)}"
                )
            ids = ids.to(device, torch.int64)
            if ids.shape == shape:  # one id per text
                ids = pad(ids[..., None], (0, 1), value=NO_ID)
            if kind != "negatives":
                ids = ids[:, None]
            stacked.append(ids)
        return torch.cat(stacked, dim=1)


class MicroBatch(NamedTuple):
    """Detached embeddings and ids of a micro-batch.

    If ranks share a bank, it consists of the micro-batches of all ranks, in rank order.
    """

    texts: Tensor  # (n, 2 + h, d), L2-normalised with cosine similarity
    lengths: Tensor | None  # (n, 2 + h, 1), by which the embeddings were divided; None with "dot"
    ids: Tensor  # int64 (n, 2 + h, IDS_PER_TEXT)
    guide: GuideEmbeddings | None
    rows_of_this_rank: slice  # where this rank's pairs are among those of all ranks

    @property
    def queries(self) -> Tensor:
        """The queries (n, d), a view."""
        return self.texts[:, 0]

    @property
    def passages(self) -> Tensor:
        """The passages (n, d), a view."""
        return self.texts[:, 1]

    @property
    def documents(self) -> Tensor:
        """The documents (n, 1 + h, d), a view."""
        return self.texts[:, 1:]

    @property
    def guide_dim(self) -> int:
        """The embedding size g of the guide, 0 without a guide."""
        if self.guide is None:
            return 0
        return self.guide.documents.shape[2]

    def compute_input_gradient(self, gradient: Tensor) -> Tensor:
        """Compute the gradient of the embeddings before they were normalised, (n, 2 + h, d).

        For x = y / |y| the gradient of y is that of x without its part along x, divided by |y|.

        Args:
            gradient: (n, 2 + h, d), the gradient of ``texts``.
        """
        if self.lengths is None:
            return gradient
        along = (gradient * self.texts).sum(-1, keepdim=True)
        return torch.addcmul(gradient, along, self.texts, value=-1) / self.lengths


def collect_micro_batch(
    texts: Tensor,
    ids: TextIds,
    similarity: Similarity,
    guide: Sequence[Tensor | None] = (),
    guide_margin: float = 0.0,
    is_guide_margin_relative: bool = False,
    is_shared: bool = False,
) -> MicroBatch:
    """Gather a micro-batch from all ranks, cast it to float32 at least, and normalise it.

    Args:
        texts: (n, 2 + h, d), from `stack_texts`.
        ids: ids of the same texts.
        similarity: ``"cos"`` normalises the embeddings.
        guide: guide embeddings of the same texts, or an empty sequence.
        guide_margin, is_guide_margin_relative: see `make_guide_embeddings`.
        is_shared: True if all ranks share one bank; a rank may then have no pairs.

    Raises:
        ValueError: for shapes that do not agree; the message names the argument.
    """
    n, num_texts = texts.shape[:2]
    guide_inputs = [x.detach() for x in guide if x is not None]
    guide_text_shapes = [x.shape[:-1] for x in guide_inputs]
    text_shapes: list[tuple[int, ...]] = [(n,), (n,)]
    if num_texts > 2:
        text_shapes.append((n, num_texts - 2))
    if guide_inputs and guide_text_shapes != text_shapes:
        raise ValueError(
            "the guide must embed the same texts as the model, got guide embeddings "
            f"{[tuple(x.shape) for x in guide_inputs]}"
        )

    texts = texts.detach()
    stacked_ids = ids.stack(n, num_texts - 2, texts.device)
    rows_of_this_rank = slice(0, n)
    if is_shared:
        (texts, stacked_ids), rows_of_this_rank = gather_rows([texts, stacked_ids])
        if guide_inputs:
            guide_inputs, _ = gather_rows(guide_inputs)
    guide_embeddings = None
    if guide_inputs:
        guide_inputs = [to_float32_at_least(x) for x in guide_inputs]
        guide_embeddings = make_guide_embeddings(
            guide_inputs, guide_margin, is_guide_margin_relative
        )
    texts = to_float32_at_least(texts)
    lengths = None
    if similarity == "cos":
        lengths = torch.linalg.vector_norm(texts, dim=-1, keepdim=True).clamp_min(MIN_LENGTH)
        texts = texts / lengths
    return MicroBatch(texts, lengths, stacked_ids, guide_embeddings, rows_of_this_rank)


def make_pairs(batch: MicroBatch, temperature: float, passage_mean: Tensor | None = None) -> Pairs:
    """Make `Pairs` of a micro-batch.

    Args:
        batch: the micro-batch.
        temperature: divisor of the similarities.
        passage_mean: (d,), vector that is subtracted from the documents, or None.
    """
    queries = batch.queries
    documents = batch.documents
    if passage_mean is not None:
        documents = documents - passage_mean
    return Pairs(
        queries=queries,
        documents=documents,
        query_ids=batch.ids[:, 0].T,
        document_ids=batch.ids[:, 1:].movedim(-1, 0),
        positive_logits=(queries * documents[:, 0]).sum(1) / temperature,
        guide=batch.guide,
    )


def stack_texts(embeddings: Sequence[Tensor], *, may_be_empty: bool = False) -> Tensor:
    """Stack the embeddings of each pair's texts, (n, 2 + h, d).

    Args:
        embeddings: queries (n, d), passages (n, d) and, if any, negatives (n, h, d).
        may_be_empty: True if n may be 0.

    Raises:
        ValueError: for other shapes.
    """
    queries, passages = embeddings[:2]
    if queries.ndim != 2 or queries.shape != passages.shape:
        shapes = f"{tuple(queries.shape)} and {tuple(passages.shape)}"
        raise ValueError(f"queries and passages must have the same shape (n, d), got {shapes}")
    n, d = queries.shape
    if n == 0 and not may_be_empty:
        raise ValueError(
            "the micro-batch is empty: skip it (only with several ranks and "
            "gather_across_devices=True may a rank have no pairs)"
        )
    for negatives in embeddings[2:]:
        if negatives.ndim != 3 or len(negatives) != n or negatives.shape[2] != d:
            shape = tuple(negatives.shape)
            raise ValueError(f"negatives must be (n, h, d) = ({n}, h, {d}), got {shape}")
    return torch.cat([queries[:, None], passages[:, None], *embeddings[2:]], dim=1)


def to_float32_at_least(embeddings: Tensor) -> Tensor:
    """Cast float16 and bfloat16 to float32; float32 and float64 stay as they are."""
    return embeddings.to(torch.promote_types(embeddings.dtype, torch.float32))


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
    texts = normalize(stack_texts(embeddings, may_be_empty=True), dim=-1)
    queries = texts[:, 0]
    documents = texts[:, 1:]
    positive_cosines = (queries * documents[:, 0]).sum(1)
    margins = torch.full_like(positive_cosines, margin)
    if is_relative:
        margins = margin * positive_cosines.abs()
    return GuideEmbeddings(queries, documents, ceilings=positive_cosines - margins)
