"""The guide's embeddings of banked pairs, in a ring buffer beside that of the `MemoryBank`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from contaccum.bank.logits import GuideEmbeddings


class GuideRing(nn.Module):
    """Guide embeddings of the pairs in a bank, in the same slots; see `GuideEmbeddings`.

    Args:
        num_queries: number of slots for queries; 0 without a query bank.
        num_slots: number of slots m for documents.
        num_documents: documents 1 + h per pair.
        guide_dim: embedding size g of the guide.
    """

    queries: Tensor  # (m, g), or (0, g) without a query bank
    documents: Tensor  # (m, 1 + h, g)
    ceilings: Tensor  # (m,), or (0,)

    def __init__(
        self,
        num_queries: int,
        num_slots: int,
        num_documents: int,
        guide_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        shapes = {
            "queries": (num_queries, guide_dim),
            "documents": (num_slots, num_documents, guide_dim),
            "ceilings": (num_queries,),
        }
        for name, shape in shapes.items():
            self.register_buffer(name, torch.zeros(shape, dtype=dtype, device=device))

    def get_embeddings(self, num_slots: int) -> GuideEmbeddings:
        """Return the embeddings of the first ``num_slots`` slots, as views."""
        return GuideEmbeddings(
            queries=self.queries[:num_slots],
            documents=self.documents[:num_slots],
            ceilings=self.ceilings[:num_slots],
        )

    def write(self, local: GuideEmbeddings, rows: slice, slots: Tensor, num_documents: int) -> None:
        """Write ``rows`` of a micro-batch to ``slots``, with ``num_documents`` documents each."""
        documents = local.documents[rows, :num_documents]
        self.documents[slots, :num_documents] = documents.to(self.documents)
        if len(self.queries) > 0:
            self.queries[slots] = local.queries[rows].to(self.queries)
            self.ceilings[slots] = local.ceilings[rows].to(self.ceilings)
