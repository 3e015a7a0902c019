"""The guide's embeddings of banked pairs, in a ring buffer beside that of the `MemoryBank`.

A guide is a second, frozen model that finds false negatives (GISTEmbed); its embedding of a text
has its own size g. See `contaccum.bank.false_negatives.find_above_guide_ceiling`.

Letters in shapes: m slots in the bank, h hard negatives per query.
"""

from __future__ import annotations

from torch import Tensor, nn

from contaccum.bank.logits import GuideEmbeddings


class GuideRing(nn.Module):
    """Guide embeddings of the pairs in a bank, in the same slots; see `GuideEmbeddings`.

    Args:
        num_queries: number of slots for queries: m, or 0 without a query bank.
        bank_documents: (m, 1 + h, d), the bank's documents; this ring buffer gets their number of
            slots and documents, dtype and device.
        guide_dim: embedding size g of the guide.
    """

    queries: Tensor  # (m, g), or (0, g) without a query bank
    documents: Tensor  # (m, 1 + h, g), a passage, then its hard negatives
    ceilings: Tensor  # (m,), or (0,) without a query bank

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

    def write(
        self, local: GuideEmbeddings, positions: slice, slots: Tensor, num_documents: int
    ) -> None:
        """Write pairs of a micro-batch to the ring buffer.

        Args:
            local: guide embeddings of the micro-batch.
            positions: the pairs of the micro-batch to write.
            slots: int64, the slots to write to, one for each of these pairs.
            num_documents: number of documents per pair to write.
        """
        documents = local.documents[positions, :num_documents]
        self.documents[slots, :num_documents] = documents.to(self.documents)
        if len(self.queries) > 0:
            self.queries[slots] = local.queries[positions].to(self.queries)
            self.ceilings[slots] = local.ceilings[positions].to(self.ceilings)
