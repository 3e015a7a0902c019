"""The guide's embeddings of banked pairs, in a ring buffer beside that of the `MemoryBank`."""

from __future__ import annotations

from torch import Tensor, nn

from contaccum.bank.logits import GuideEmbeddings


class GuideRing(nn.Module):
    """Guide embeddings of the pairs in a bank, in the same slots; see `GuideEmbeddings`.

    Args:
        num_queries: number of slots for queries; 0 without a query bank.
        bank_documents: (m, 1 + h, d), the bank's documents; the ring has the same slots, dtype and
            device.
        guide_dim: embedding size g of the guide.
    """

    queries: Tensor  # (m, g), or (0, g) without a query bank
    documents: Tensor  # (m, 1 + h, g)
    ceilings: Tensor  # (m,), or (0,)

    def __init__(self, num_queries: int, bank_documents: Tensor, guide_dim: int) -> None:
        super().__init__()
        num_slots, num_documents, _ = bank_documents.shape
        queries = bank_documents.new_zeros(num_queries, guide_dim)
        documents = bank_documents.new_zeros(num_slots, num_documents, guide_dim)
        ceilings = bank_documents.new_zeros(num_queries)
        self.register_buffer("queries", queries)
        self.register_buffer("documents", documents)
        self.register_buffer("ceilings", ceilings)

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
