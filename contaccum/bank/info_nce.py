"""BankedInfoNCE: the InfoNCE loss of a micro-batch against itself and a memory bank.

The loss works on embeddings alone, so any training loop can use it. It encodes no text and steps no
optimizer. A micro-step is one call of the loss; an update is all micro-steps before one optimizer
step. The pairs of the micro-batch are local; those of earlier micro-batches are banked. (If ranks
share a bank, the micro-batches of all ranks together are local.)

The score matrix of a micro-step has four blocks:

                     local documents    banked documents
    local queries    in_batch           against_bank
    banked queries   from_bank          MemoryBank.log_sums

The fourth block has no gradient, so the bank stores only its logsumexp for each query.

A pair in the bank is called an entry. An entry is aged if it is from before the current update, and
was therefore encoded by an older encoder. A tower is the encoder in one of its roles, for queries
or for passages. Drift is the movement of a tower's embeddings since the entries were encoded.

Letters in shapes: n local pairs, h hard negatives per query, m slots of the bank that are filled
(`MemoryBank.num_filled_slots`), d the embedding size. The documents of a pair are its positive
passage, then its hard negatives.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import softplus, threshold

from contaccum.bank.banked_module import BankedModule
from contaccum.bank.compensation import TowerMeans
from contaccum.bank.diagnostics import describe_micro_step, measure_softmax_masses
from contaccum.bank.false_negatives import PositivesTable, make_rules
from contaccum.bank.logits import SOFTPLUS_THRESHOLD, LogitBlocks, Pairs
from contaccum.bank.memory_bank import MemoryBank, score_blocks
from contaccum.bank.micro_batch import (
    MicroBatch,
    TextIds,
    check_embeddings,
    collect_micro_batch,
    make_pairs,
    make_queries_and_documents,
)
from contaccum.bank.precomputed_gradient import PrecomputedGradient
from contaccum.bank.settings import (
    CenterGradients,
    DriftCompensationMode,
    GuideMarginStrategy,
    LossSettings,
    NormalizeBy,
    Similarity,
)
from contaccum.distributed import gather_rows, world_size


class BankedInfoNCE(BankedModule):
    r"""InfoNCE over local and banked pairs, with gradients for the local pairs.

    Rows are local and banked queries; columns are local and banked passages and hard negatives.
    Row i has the positive p(i), which is the passage that came with its query, and the negatives
    N(i). With the similarity s, the temperature tau and the weight w of a banked pair,

        l_i = log( exp(s(i, p(i))/tau) + sum_{j in N(i)} w_j exp(s(i, j)/tau) ) - s(i, p(i))/tau
        loss = ( sum_{i local} l_i + w sum_{i banked} l_i ) / n

    where w_j is w for banked columns and 1 for local ones. Banked columns add negatives to the
    gradients of queries. Banked rows add queries to the gradients of passages, so that the gradient
    norms of the two towers stay balanced.

    Let the full batch be all pairs of an update. If the encoder does not change, w is 1, and the
    bank holds exactly the other pairs of the full batch in each micro-step, then the mean gradient
    of the micro-steps, weighted by n, is the InfoNCE gradient of the full batch. (In training, the
    bank lacks the pairs of later micro-steps. This is how the formula is checked.)

    In `forward` the host never waits for the device. So NaN or infinite embeddings raise no error:
    the loss and its gradients are not finite, the pairs are stored as invalid, and
    ``last["enqueued"]`` is 0.

    Args:
        bank_size: maximum number of banked pairs in use; see `MemoryBank`. 0 is plain InfoNCE.
        query_bank_size: None for ``bank_size``; 0 for a passage bank alone ("w/o M_q" in the
            paper; ``method="pre_batch"`` of `ContAccumTrainer`).
        temperature: tau > 0; 1.0 with dot product in the paper, 0.05 is usual with cosine.
        similarity: ``"dot"`` or ``"cos"``.
        normalize_by: ``"local"`` divides by n; ``"all"`` divides by n plus w times the number of
            banked rows (equations 8 and 9 of the paper).
        mask_duplicates: exclude columns that hold a row's own positive again, or another known
            positive of its query, by ids. False is the paper's behaviour. Texts without ids are
            never excluded.
        bank_hard_negatives: store hard negatives in the bank as columns.
        drift_compensation: correction of old bank entries. ``"mean"`` moves their documents with
            the mean document embedding, and computes the gradients that their queries give as if
            the queries had moved likewise; ``"auto"`` also retires entries that have drifted too
            far, measured by `observe_probe`; ``"fresh"`` empties the bank after every update;
            ``"none"`` is the paper. See docs/drift.md.
        gather_across_devices: compute the loss of the micro-batches of all ranks of
            ``torch.distributed``, in rank order; ranks may have different numbers of pairs, even 0.
            Every rank holds the same bank and returns the same loss. Gradients are multiplied by
            the number of ranks, because DDP and FSDP average them.
        center_gradients: towers whose mean gradient is subtracted, so that the loss does not push
            their mean: ``"both"``, ``"passages"``, ``"queries"`` or ``"none"``. ``"auto"`` centres
            passages with ``drift_compensation="auto"``, in updates that start while aged entries
            are in use. See `contaccum.bank.centering`.
        pairs_per_update: number of pairs between two optimizer steps, over all ranks that share the
            bank, for centring over the update. None centres each micro-batch by itself. See
            `begin_update`.
        bank_weight: w, if it is at most 1. A larger value is the weight of the whole bank, as a
            number of pairs: w is then min(1, bank_weight / number of banked pairs in use).
        false_negative_margin: exclude columns whose similarity to a row exceeds that of its own
            positive by more than this (Qwen3-Embedding: 0.1, with cosine). Row and column are
            judged each time they are scored; two banked pairs were scored when the later one was
            stored. None turns it off.
        guide_margin, guide_margin_strategy: with guide embeddings, exclude columns whose cosine c_j
            by the guide exceeds c - margin (``"absolute"``) or c - margin * |c| (``"relative"``),
            with c the guide's cosine of the row's own positive (GISTEmbed, arXiv 2402.16829).

    Attributes:
        settings: all of the above, as `LossSettings`.
        positives: `PositivesTable` of pairs that are never negatives of each other, or None. It is
            not part of the state.
        compensation: the `DriftCompensation`.
        bank: the `MemoryBank`; None with ``bank_size=0``, and before the first call, which sets the
            embedding size.
        clock: the `UpdateClock`.
        last: diagnostics of the last call; see `contaccum.bank.diagnostics`.

    Raises:
        ConfigError (a ValueError): for settings out of range.

    Source: ContAccum, arXiv 2406.12356 ("the paper"); ``normalize_by="local"``, masks and drift
    compensation are ours.
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
        )
        super().__init__(settings)
        self.positives: PositivesTable | None = None

    @classmethod
    def from_settings(cls, settings: LossSettings) -> BankedInfoNCE:
        """Make a loss from its settings."""
        return cls(**dataclasses.asdict(settings))

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
        """Compute the loss of one micro-batch, a scalar, and enqueue the micro-batch in training.

        In eval mode, or without gradients, the loss uses the bank but stores no pairs, and ``last``
        has no ``enqueued`` and ``bank_fill``. The gradients are computed here; ``backward`` only
        passes them on.

        Args:
            queries, passages: (n, d), the pairs of this rank; row i of ``passages`` is the
                positive of row i of ``queries``. All calls have the same dtype.
            negatives: (n, h, d), the hard negatives of each query.
            query_ids, passage_ids, negative_ids: integers (n,), (n,), (n, h). Equal ids mean the
                same text; ids of queries are never compared with those of passages and negatives.
                The two smallest int64 numbers are reserved. With a last dimension of two, a text
                has two ids, and two texts are the same if either of their ids is equal.
            guide: embeddings of the same texts by a second, frozen model: (n, g), (n, g),
                (n, h, g). Pass them with every micro-batch or with none.

        Raises:
            ValueError: for shapes that do not agree, or if the embedding size of the model or of
                the guide changes.
        """
        settings = self.settings
        inputs = [queries, passages]
        if negatives is not None:
            inputs.append(negatives)
        is_training = self.training and torch.is_grad_enabled()
        needs_gradients = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
        if is_training:
            self.end_pending_update()
        ids = TextIds(query_ids, passage_ids, negative_ids)
        is_relative = settings.guide_margin_strategy == "relative"
        batch = collect_micro_batch(
            inputs, ids, guide, settings.guide_margin, is_relative, self._is_shared
        )
        # The loss stays in float32 or float64 under autocast as well.
        with torch.autocast(queries.device.type, enabled=False):
            # The batch holds detached embeddings; `PrecomputedGradient` passes on their gradients.
            for embeddings in batch.embeddings:
                embeddings.requires_grad_(needs_gradients)
            # (n, d) and (n, 1 + h, d)
            queries, documents = make_queries_and_documents(batch.embeddings, settings.similarity)
            bank = self._prepare_bank(documents, batch.guide_dim)
            means = self.compensation.compute_means(queries, documents[:, 0], is_training)
            local = self._make_pairs(queries, documents, batch, means.passages)
            blocks = self._score_blocks(local, bank, means)
            loss = self._compute_loss(local, blocks, bank, means.passages)
            # Enqueueing changes the bank in place, so the gradients are computed before it.
            gradients: list[Tensor] = []
            if needs_gradients:
                gradients = self._compute_gradients(loss, [queries, documents], batch, is_training)
            if is_training:
                self._enqueue(local, blocks, bank, means, loss)
        if not needs_gradients:
            return loss
        if is_training:
            self.clock.record_forward()
        return PrecomputedGradient.apply(loss.detach(), gradients, *inputs)

    # The stages of a micro-step, in the order of `forward`

    def _make_pairs(
        self, queries: Tensor, documents: Tensor, batch: MicroBatch, passage_mean: Tensor | None
    ) -> Pairs:
        """Make pairs, with the mean passage embedding (d,) subtracted from their documents.

        The bank stores each document minus the mean passage embedding at that time, so that banked
        documents move along when the mean moves. The current mean is subtracted from local
        documents too, to make both comparable. If the same vector is subtracted from all documents
        of a row, the loss of the row does not change.
        """
        if passage_mean is not None:
            documents = documents - passage_mean
        return make_pairs(queries, documents, batch, self.settings.temperature)

    def _score_blocks(
        self, local: Pairs, bank: MemoryBank | None, means: TowerMeans
    ) -> LogitBlocks:
        """Score all blocks but the fourth, which has no gradient; false negatives are masked."""
        rules = make_rules(self.settings, self.positives)
        query_drift = self.compensation.compute_query_drift(bank, means)
        return score_blocks(local, bank, self.settings.temperature, rules, query_drift)

    def _compute_loss(
        self,
        local: Pairs,
        blocks: LogitBlocks,
        bank: MemoryBank | None,
        passage_mean: Tensor | None,
    ) -> Tensor:
        """Compute the loss over local and banked rows, and store diagnostics in ``last``.

        With D_i the logsumexp of the logits of row i's negatives, minus the logit of its positive,
        the loss of the row is log(1 + exp(D_i)). The logit of a banked negative is increased by
        log w.
        """
        bank_weight = self._compute_bank_weight(bank)
        log_weight = math.log(bank_weight)
        local_logits = [blocks.in_batch.flatten(1), blocks.against_bank_sums + log_weight]
        local_log_sums = torch.cat(local_logits, dim=1).logsumexp(1)  # (n,), of the negatives
        # The difference is taken before the exponential: the softmax probability of a positive,
        # minus 1, would be nothing but rounding error once its row is almost solved.
        differences = local_log_sums - local.positive_logits
        # An infinite logit of a positive is NaN, or it would pass for a solved row.
        differences = threshold(differences, torch.finfo(differences.dtype).min, math.nan)
        local_losses = softplus(differences, threshold=SOFTPLUS_THRESHOLD)
        loss_sum = local_losses.sum()
        banked_losses = local_losses.new_zeros(0)
        banked_row_weights = local_losses.new_zeros(0)
        if bank is not None and bank.has_queries:
            is_valid = bank.valid[: bank.num_filled_slots, 0]  # (m,), column 0 is the passage
            banked_row_weights = bank_weight * is_valid.to(local_losses.dtype)
            positive_logits = bank.positive_logits[: bank.num_filled_slots]
            local_sums = blocks.from_bank.flatten(1).logsumexp(1)  # (m,), over local documents
            banked_log_sums = torch.logaddexp(bank.log_sums + log_weight, local_sums)
            differences = banked_log_sums - positive_logits
            banked_losses = softplus(differences, threshold=SOFTPLUS_THRESHOLD)  # (m,)
            banked_losses = torch.where(is_valid, banked_losses, 0.0)
            loss_sum = loss_sum + (banked_losses * banked_row_weights).sum()
        divisor: Tensor | int = len(local.queries)
        if self.settings.normalize_by == "all":
            divisor = divisor + banked_row_weights.sum()

        self.last = describe_micro_step(
            local, blocks, bank, local_losses, banked_losses, banked_row_weights, passage_mean
        )
        if bank is not None:
            masses = measure_softmax_masses(
                local, blocks, bank, local_losses, bank_weight, self._num_aged
            )
            self.last.update(masses)
        return loss_sum / divisor

    def _compute_gradients(
        self, loss: Tensor, scored: list[Tensor], batch: MicroBatch, is_training: bool
    ) -> list[Tensor]:
        """Compute the gradients of this rank's embeddings; in training they are centred.

        Centring works on the embeddings that are scored, so backward has two steps: from the loss
        to these, and from these (through the normalisation) to the inputs of the loss.

        Args:
            scored: queries (n, d) and documents (n, 1 + h, d), normalised with cosine similarity.
        """
        scored_gradients = list(torch.autograd.grad(loss, scored, retain_graph=True))
        if is_training:
            # center_gradients="auto" starts to centre only if drift is expected.
            is_drift_expected = self.settings.drift_compensation == "auto" and self._num_aged > 0
            scored_gradients = self.centering(scored_gradients, is_drift_expected)
        gradients = list(torch.autograd.grad(scored, batch.embeddings, scored_gradients))
        if self._is_shared:
            # Every rank has the gradients of all pairs and returns its own. DDP will average them
            # over the ranks, although their sum is the gradient of the loss.
            gradients = [gradient[batch.rows_of_this_rank] * world_size() for gradient in gradients]
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
        """Store the micro-batch and the means of the towers.

        If the loss or an embedding is not finite, the means stay as they are, and the pairs are
        stored as invalid.
        """
        n = len(local.queries)
        self.last["enqueued"] = 0
        self.last["bank_fill"] = 0
        if bank is not None:
            # A sum is finite only if all terms are, and amax keeps NaN.
            sum_of_maxima = local.queries.abs().amax() + local.documents.abs().amax()
            is_finite = (loss.detach() + sum_of_maxima).isfinite()
            query_mean = self.compensation.store_means(means, is_finite)
            retire_before = self.compensation.compute_oldest_allowed(bank, n, self.clock)
            bank.append(local, blocks, is_finite, retire_before, query_mean)
            self.compensation.replace_first_query_means(bank)
            self.last["enqueued"] = is_finite * n
            self.last["bank_fill"] = bank.in_use
        self.clock.num_pairs += n
        # The clock needs the ends of updates only back to the oldest pair in use.
        oldest_in_use = self.clock.num_pairs
        if bank is not None:
            oldest_in_use = bank.oldest_in_use
        self.clock.drop_ends_before(oldest_in_use)

    @torch.no_grad()
    def observe_probe(self, queries: Tensor, passages: Tensor) -> None:
        """Measure the drift of both towers on embeddings of the same few pairs of texts.

        These pairs are called the probe. Call the method before the first micro-batch, and again
        after updates; once every 64 to 128 pairs is enough. A later call within an update counts
        its entries as encoded by an older encoder. The stored mean of each tower is moved as far as
        the probe's mean has moved since the last call. With ``drift_compensation="auto"`` the call
        also sets the age limit: entries beyond it retire at the end of the next call in training.
        With ``"fresh"`` and ``"none"`` it only measures. The host waits for the device. Ranks that
        share a bank call it together, each with its own texts; their number S may differ between
        ranks and be 0. The probe consists of the texts of all ranks.

        Args:
            queries, passages: (S, d), encoded without dropout by the current encoder.

        Raises:
            ValueError: for fewer than two pairs.
        """
        check_embeddings(queries, passages, may_be_empty=self._is_shared)
        probe = [queries.detach(), passages.detach()]
        if self._is_shared:
            probe, _ = gather_rows(probe)
        if len(probe[0]) < 2:
            raise ValueError(
                "a probe of one pair has no spread, so drift cannot be measured: "
                "pass eight pairs, or at least two"
            )
        dtype = torch.promote_types(queries.dtype, torch.float32)
        device = queries.device if self.bank is None else self.bank.documents.device
        probe = [x.to(device, dtype) for x in probe]
        queries, documents = make_queries_and_documents(probe, self.settings.similarity)
        self.end_pending_update()
        if self._prepare_bank(documents, guide_dim=None) is not None:
            self.compensation.observe(queries, documents[:, 0], self.clock, self._is_shared)
