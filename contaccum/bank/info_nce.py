"""BankedInfoNCE: the InfoNCE loss of a micro-batch with rows and columns of memory banks.

It works on embeddings alone, so any training loop can use it. It encodes no text and steps no
optimizer.

The score matrix of a micro-step has four blocks:

                     local documents    banked documents
    local queries    in_batch           against_bank
    banked queries   from_bank          no gradient: MemoryBank.log_sums, one number per row

Letters in shapes: n pairs in the micro-batch, h hard negatives per query, m bank rows, d the
embedding size. The documents of a pair are its positive passage, then its hard negatives.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import normalize

from contaccum.bank.banked_module import BankedModule
from contaccum.bank.centering import GradientCentering
from contaccum.bank.compensation import TowerMeans
from contaccum.bank.diagnostics import describe_micro_step, softmax_masses
from contaccum.bank.false_negatives import PositivesTable, make_rules
from contaccum.bank.logits import Pairs
from contaccum.bank.memory_bank import LogitBlocks, MemoryBank, score_blocks
from contaccum.bank.micro_batch import (
    MicroBatch,
    TextIds,
    check_embeddings,
    collect_micro_batch,
    join_documents,
    make_pairs,
)
from contaccum.bank.precomputed_gradient import PrecomputedGradient
from contaccum.bank.row_losses import banked_row_losses, local_row_losses
from contaccum.bank.settings import (
    CenterGradients,
    DriftCompensationMode,
    GuideMarginStrategy,
    HardnessMode,
    LossSettings,
    NormalizeBy,
    PartitionMode,
    Similarity,
)
from contaccum.distributed import gather_rows, world_size

logger = logging.getLogger(__name__)

PAIRS_WITHOUT_UPDATE = 4096
"""After this many pairs without an update, and at least four banks of them, a warning says so."""


class BankedInfoNCE(BankedModule):
    r"""InfoNCE over local and banked pairs, with gradients for the local ones.

    Rows are local and banked queries; columns are local and banked passages and hard negatives.
    With the similarity s, the temperature tau and the passage i+ that came with query i, row i has
    the loss

        l_i = logsumexp_j s(i, j)/tau - s(i, i+)/tau

    Banked rows push on the local passages, which keeps the gradient norms of the two encoders
    balanced. If nothing drifts and the bank holds exactly the rest of the batch, the accumulated
    gradient of ``normalize_by="local"`` equals that of the full batch.

    Args:
        bank_size: rows m of the bank, at most; see `MemoryBank`. 0 is plain InfoNCE.
        query_bank_size: None for ``bank_size``; 0 for the passage bank alone (``pre_batch``, the
            paper's "w/o M_q").
        temperature: tau > 0; 1.0 with dot product in the paper, 0.05 is usual with cosine.
        similarity: ``"dot"`` or ``"cos"``.
        normalize_by: ``"local"`` divides the sum of all row losses by n; ``"all"`` by n plus the
            number of bank rows, as the paper's equations 8 and 9.
        mask_duplicates: leave out columns that hold a row's own positive again, or another known
            positive of its query, by ids. False is the paper's behaviour. Without ids nothing is
            masked.
        bank_hard_negatives: store hard negatives in the bank as columns.
        drift_compensation: ``"mean"`` moves banked entries along with the mean of their tower;
            ``"auto"`` also retires those that `observe_probe` shows to have drifted too far;
            ``"fresh"`` uses none older than the last update; ``"none"`` is the paper. See
            docs/drift.md.
        gather_across_devices: compute the loss of the micro-batches of all ranks of
            ``torch.distributed``, in rank order; ranks may bring different numbers of pairs, even
            none. Every rank then holds the same bank and returns the same loss. Gradients are
            multiplied by the number of ranks, for a reduction that averages, as DDP's and FSDP's.
        center_gradients: ``"both"``, ``"passages"`` or ``"queries"`` take the mean out of the
            gradients of that tower's embeddings, so that no update moves it as a whole; ``"none"``;
            ``"auto"`` centres passages while ``drift_compensation`` is ``"auto"`` and entries of an
            older encoder are in use.
        pairs_per_update: pairs between two optimizer steps, of all ranks that share the bank:
            gradients are centred over the update. None centres each micro-batch by itself. See
            `begin_update`.
        bank_weight: weight of a banked pair beside a local one, as a column and as a row, up to 1.
            Above 1: the weight of the whole bank, which its pairs share equally. A banked row's own
            positive always has weight 1.
        false_negative_margin: leave out columns whose similarity to a row exceeds that of its own
            positive by more than this, when the two first meet (Qwen3-Embedding: 0.1, with cosine).
            None: off.
        guide_margin, guide_margin_strategy: if a guide's embeddings come with the micro-batch,
            leave out columns whose cosine with a row, by the guide, exceeds that of its own
            positive less ``guide_margin`` (``"absolute"``) or less that share of it
            (``"relative"``); GISTEmbed's rule, arXiv 2402.16829.
        hardness_mode, hardness_strength: add ``hardness_strength`` times their similarity to the
            logits of the micro-batch's own ``"in_batch_negatives"``, ``"hard_negatives"`` (those of
            the row) or ``"all_negatives"``; see `add_hardness`. None: off.
        directions, partition_mode: directions of MultipleNegativesRankingLoss, ``"query_to_doc"``
            and others of `DIRECTIONS`, which contrast the micro-batch alone. ``"joint"``: one
            softmax over all of them; ``"per_direction"``: the mean of one loss for each.

    No value is read on the host, so a micro-batch that is not finite is not refused. Its loss and
    gradients come out as they are, its pairs are stored as invalid, and ``last["enqueued"]`` is 0.

    Attributes:
        settings: all of the above, as `LossSettings`.
        positives: a `PositivesTable` of pairs that are never negatives of each other, or None. It
            is not part of the state.
        compensation: the `DriftCompensation`.
        bank: the `MemoryBank`, None before the first call, which sets the embedding size.
        clock: the `UpdateClock`.
        last: diagnostics of the last call; see `contaccum.bank.diagnostics`.

    Raises:
        ConfigError (a ValueError): for settings out of range.

    Source: arXiv 2406.12356; the "local" normalisation, the masks and the drift compensation are
    ours.
    """

    def __init__(
        self,
        bank_size: int = 1024,
        query_bank_size: int | None = None,
        temperature: float = 1.0,
        similarity: Similarity = "dot",
        normalize_by: NormalizeBy = "local",
        mask_duplicates: bool = True,
        bank_hard_negatives: bool = True,
        drift_compensation: DriftCompensationMode = "auto",
        gather_across_devices: bool = False,
        center_gradients: CenterGradients = "auto",
        pairs_per_update: int | None = None,
        bank_weight: float = 1.0,
        false_negative_margin: float | None = None,
        guide_margin: float = 0.0,
        guide_margin_strategy: GuideMarginStrategy = "absolute",
        hardness_mode: HardnessMode | None = None,
        hardness_strength: float = 0.0,
        directions: Sequence[str] = ("query_to_doc",),
        partition_mode: PartitionMode = "joint",
    ) -> None:
        settings = LossSettings(
            bank_size=bank_size,
            query_bank_size=query_bank_size,
            temperature=temperature,
            similarity=similarity,
            normalize_by=normalize_by,
            mask_duplicates=mask_duplicates,
            bank_hard_negatives=bank_hard_negatives,
            drift_compensation=drift_compensation,
            gather_across_devices=gather_across_devices,
            center_gradients=center_gradients,
            pairs_per_update=pairs_per_update,
            bank_weight=bank_weight,
            false_negative_margin=false_negative_margin,
            guide_margin=guide_margin,
            guide_margin_strategy=guide_margin_strategy,
            hardness_mode=hardness_mode,
            hardness_strength=hardness_strength,
            directions=directions,  # type: ignore[arg-type]  # becomes a tuple there
            partition_mode=partition_mode,
        )
        self._init_from(settings)

    @classmethod
    def from_settings(cls, settings: LossSettings) -> BankedInfoNCE:
        """Make the loss of some settings."""
        loss_fn = cls.__new__(cls)
        loss_fn._init_from(settings)
        return loss_fn

    def _init_from(self, settings: LossSettings) -> None:
        BankedModule.__init__(self, settings)
        self.positives: PositivesTable | None = None
        self.centering = GradientCentering(settings.center_gradients, settings.pairs_per_update)
        self._has_warned = False

    @torch.compiler.disable  # a micro-step changes the bank in place, which dynamo cannot trace
    def forward(
        self,
        queries: Tensor,
        passages: Tensor,
        negatives: Tensor | None = None,
        query_ids: Tensor | None = None,
        passage_ids: Tensor | None = None,
        negative_ids: Tensor | None = None,
        guide: Sequence[Tensor | None] = (),
    ) -> Tensor:
        """Compute the loss of one micro-batch, a scalar; in training, also enqueue it.

        A micro-batch is enqueued in training mode and with gradients enabled. Otherwise the loss
        is still one over the bank as it is.

        Args:
            queries, passages: (n, d); row i of ``passages`` is the positive of row i of
                ``queries``.
            negatives: (n, h, d), the hard negatives of each query.
            query_ids, passage_ids, negative_ids: int64 (n,), (n,), (n, h). Equal ids mean the same
                text; the two smallest integers are reserved. With a last dimension of two, a text
                has two ids, and either may be equal.
            guide: embeddings of the same texts by a guide, (n, g), (n, g), (n, h, g); with every
                micro-batch or with none.

        Raises:
            ValueError: for shapes that do not agree, or an embedding size other than the bank's or
                its guide's.
        """
        settings = self.settings
        is_training = self.training and torch.is_grad_enabled()
        inputs = [queries, passages]
        if negatives is not None:
            inputs.append(negatives)
        takes_gradients = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
        if is_training:
            self.end_pending_update()
        ids = TextIds(query_ids, passage_ids, negative_ids)
        is_relative = settings.guide_margin_strategy == "relative"
        batch = collect_micro_batch(
            inputs, ids, guide, settings.guide_margin, is_relative, self._is_shared
        )
        with torch.autocast(queries.device.type, enabled=False):
            for embeddings in batch.embeddings:
                embeddings.requires_grad_(takes_gradients)
            queries, documents = self._normalize(batch.embeddings)
            bank = self._prepare_bank(documents, batch.guide_dim)
            means = self.compensation.present_means(queries, documents[:, 0], is_training)
            local = self._make_pairs(queries, documents, batch, means.passages)
            blocks = self._score_blocks(local, bank)
            loss = self._loss(local, blocks, bank, means.passages)
            gradients: list[Tensor] = []
            if takes_gradients:
                gradients = self._gradients(loss, [queries, documents], batch, is_training)
            if is_training:
                self._enqueue(local, blocks, bank, means, loss)
        if not takes_gradients:
            return loss
        if is_training:
            self.clock.record_forward()
        return PrecomputedGradient.apply(loss.detach(), gradients, *inputs)

    # The stages of a micro-step, in their order

    def _normalize(self, embeddings: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Return queries (n, d) and documents (n, 1 + h, d), of length 1 with cosine similarity."""
        if self.settings.similarity == "cos":
            embeddings = [normalize(x, dim=-1) for x in embeddings]
        return embeddings[0], join_documents(embeddings)

    def _make_pairs(
        self, queries: Tensor, documents: Tensor, batch: MicroBatch, passage_mean: Tensor | None
    ) -> Pairs:
        """Make pairs with documents relative to the mean of their tower.

        A row loss does not change when all documents move by one vector. So documents of different
        updates can be compared as if the mean of their tower had not moved.
        """
        if passage_mean is not None:
            documents = documents - passage_mean
        return make_pairs(queries, documents, batch, self.settings.temperature)

    def _score_blocks(self, local: Pairs, bank: MemoryBank | None) -> LogitBlocks:
        """Score the three blocks of the matrix that have a gradient."""
        rules = make_rules(self.settings, self.positives)
        query_drift = None
        if bank is not None:
            query_drift = self.compensation.query_drift(bank)
        return score_blocks(local, bank, self.settings.temperature, rules, query_drift)

    def _loss(
        self,
        local: Pairs,
        blocks: LogitBlocks,
        bank: MemoryBank | None,
        passage_mean: Tensor | None,
    ) -> Tensor:
        """Compute the loss of local and banked rows, and record diagnostics in ``last``."""
        settings = self.settings
        bank_weight = self._bank_weight(bank)
        local_losses = local_row_losses(
            local, blocks, bank_weight, passage_mean, settings, self.positives
        )
        banked_losses = local_losses.new_zeros(0)
        row_weights = local_losses.new_zeros(0)
        if bank is not None and bank.has_queries:
            in_use = bank.valid[: bank.num_used_slots, 0]
            row_weights = bank_weight * in_use.to(local_losses.dtype)
            banked_losses = banked_row_losses(bank, blocks, bank_weight)
            banked_losses = torch.where(in_use, banked_losses, 0.0)
        banked_sum = (banked_losses * row_weights).sum()
        if settings.partition_mode == "per_direction":  # banked rows have query_to_doc alone
            banked_sum = banked_sum / len(settings.directions)
        total_weight: Tensor | int = len(local.queries)
        if settings.normalize_by == "all":
            total_weight = total_weight + row_weights.sum()

        passages = local.documents[:, 0]
        if passage_mean is not None:
            passages = passages + passage_mean
        self.last = describe_micro_step(
            local, blocks, bank, local_losses, banked_losses, row_weights, passages
        )
        if bank is not None:
            self.last |= softmax_masses(
                local, blocks, bank, local_losses, bank_weight, self._num_aged
            )
        return (local_losses.sum() + banked_sum) / total_weight

    def _gradients(
        self, loss: Tensor, normalized: list[Tensor], batch: MicroBatch, is_training: bool
    ) -> list[Tensor]:
        """Compute the gradients of this rank's embeddings; in training they are centred.

        Args:
            normalized: queries (n, d) and documents (n, 1 + h, d), whose gradients are centred.
        """
        gradients = list(torch.autograd.grad(loss, normalized, retain_graph=True))
        if is_training:
            has_aged = self.settings.drift_compensation == "auto" and self._num_aged > 0
            gradients = self.centering(gradients, has_aged)
        gradients = list(torch.autograd.grad(normalized, batch.embeddings, gradients))
        if self._is_shared:
            # Every rank computed the loss of the whole batch, and a reduction that averages
            # follows.
            gradients = [gradient[batch.local_rows] * world_size() for gradient in gradients]
        return gradients

    @torch.no_grad()
    def _enqueue(
        self,
        local: Pairs,
        blocks: LogitBlocks,
        bank: MemoryBank | None,
        means: TowerMeans,
        loss: Tensor,
    ) -> None:
        """Store the micro-batch and the means of the towers, unless something is not finite."""
        n = len(local.queries)
        self.last["enqueued"] = 0
        self.last["bank_fill"] = 0
        if bank is not None:
            largest = local.queries.abs().amax() + local.documents.abs().amax()
            is_finite = (loss.detach() + largest).isfinite()
            query_mean = self.compensation.store(means, is_finite)
            first_kept = self.compensation.first_kept(bank, n, self.clock)
            bank.append(local, blocks, is_finite, first_kept, query_mean)
            self.compensation.settle_first_means(bank)
            self.last["enqueued"] = is_finite * n
            self.last["bank_fill"] = bank.in_use
        self.clock.add_pairs(n)
        oldest_in_use = self.clock.num_pairs if bank is None else bank.oldest_in_use
        self.clock.drop_ends_before(oldest_in_use)

    # What a training loop reports

    def begin_update(self, pairs: int) -> None:
        """Set how many pairs the coming micro-batches have until the optimizer steps.

        Needed only if updates differ in that; otherwise ``pairs_per_update`` sets it once.
        """
        self.centering.begin_update(pairs)

    def end_update(self) -> None:
        """End an update: entries from before it are of an older encoder.

        A step of a torch optimizer is noticed by itself at the next micro-step; a call of this
        method after the step does not count it again.
        """
        self.clock.end_update()
        self.centering.restart()
        if self.bank is not None and self.settings.drift_compensation == "fresh":
            self.bank.retire_all()

    def end_pending_update(self) -> None:
        """End the update that an optimizer step has ended since the last micro-step."""
        clock = self.clock
        if clock.take_pending_step():
            self.end_update()
        patience = max(4 * self.settings.bank_size, PAIRS_WITHOUT_UPDATE)
        is_measured = self.compensation.probe is not None
        if self.bank is None or is_measured or clock.num_updates or clock.num_pairs < patience:
            return
        if not self._has_warned:
            logger.warning(
                f"no update was seen in {clock.num_pairs:,} pairs: call end_update() of the "
                "BankedInfoNCE after each optimizer step; until then all entries count as those of "
                "an older encoder"
            )
        self._has_warned = True
        clock.age_entries()

    @torch.no_grad()
    def observe_probe(self, queries: Tensor, passages: Tensor) -> None:
        """Observe how far the towers have moved, by embeddings (S, d) of the same pairs of texts.

        Call it before the first micro-batch, and again after updates, but not more often than
        every 64 pairs: the towers are taken to have moved as the means of the probe have. With
        ``"auto"`` it sets how many entries are in use, and reads a small tensor from the device for
        it; with ``"fresh"`` and ``"none"`` it only measures. Ranks that share a bank call it
        together, each with texts of its own (S may differ, and be 0): the probe is all of them.

        Raises:
            ValueError: for fewer than two pairs.
        """
        check_embeddings(queries, passages, may_be_empty=self._is_shared)
        probe = [queries.detach(), passages.detach()]
        if self._is_shared:
            probe, _ = gather_rows(probe)
        if len(probe[0]) < 2:
            raise ValueError(
                "a probe of one pair has no spread to measure drift by: "
                "pass eight pairs, or two at least"
            )
        dtype = torch.promote_types(queries.dtype, torch.float32)
        queries, documents = self._normalize([x.to(dtype) for x in probe])
        self.end_pending_update()
        if self._prepare_bank(documents, guide_dim=None) is not None:
            self.compensation.observe(queries, documents[:, 0], self.clock, self._is_shared)
