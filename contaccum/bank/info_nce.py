"""BankedInfoNCE: the InfoNCE loss of a micro-batch against itself and a memory bank.

A micro-step is one call of the loss; an update is all micro-steps before one optimizer step. The
pairs of the micro-batch are local, or new; those of earlier micro-batches are banked, or old. (If
ranks share a bank, the micro-batches of all ranks together are one micro-batch.)

The score matrix of a micro-step has four quadrants:

                     local documents    banked documents
    local queries    in_batch           against_bank
    banked queries   from_bank          MemoryBank.log_sums

The fourth quadrant has no gradient, so the bank stores only its logsumexp for each query.

A pair in the bank is called an entry. An entry is aged if it is from before the current update, and
was therefore encoded by an older encoder. A tower is the encoder in one of its roles, for queries
or for passages. Drift is the movement of a tower's embeddings since the entries were encoded.

Letters in shapes: n local pairs, h hard negatives per query, b of them in the bank, m slots of the
bank that are filled (`MemoryBank.num_filled_slots`), d the embedding size. The documents of a pair
are its positive passage, then its hard negatives.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from contaccum.bank.centering import GradientCentering
from contaccum.bank.diagnostics import Diagnostics
from contaccum.bank.drift import DriftCompensation
from contaccum.bank.ids import PositivesTable, stack_ids
from contaccum.bank.logits import MASKED, make_pairs, stack_embeddings
from contaccum.bank.memory_bank import MemoryBank, score_quadrants
from contaccum.bank.row_losses import PrecomputedGradient, compute_row_gradients, compute_row_losses
from contaccum.bank.update_clock import UpdateClock
from contaccum.distributed import gather_rows, world_size
from contaccum.errors import ConfigError, warn_once
from contaccum.settings import InfoNCESettings, takes_settings

MIN_LENGTH = 1e-12
"""Length by which shorter embeddings are divided, as in `torch.nn.functional.normalize`."""

MIN_PAIRS_BEFORE_WARNING = 4096
"""Smallest number of pairs without an update that is taken for a loop whose updates are missed."""


class BankedInfoNCE(nn.Module):
    r"""InfoNCE over local and banked pairs, with gradients for the local pairs.

    Rows are local and banked queries; columns are local and banked passages and hard negatives.
    Row i has the positive p(i), which is the passage that came with its query, and the negatives
    N(i). With the similarity s and the temperature tau,

        l_i = log( exp(s(i, p(i))/tau) + sum_{j in N(i)} exp(s(i, j)/tau) ) - s(i, p(i))/tau
            = softplus(D_i),  D_i = log sum_{j in N(i)} exp(s(i, j)/tau) - s(i, p(i))/tau
        loss = ( sum_{i local} l_i + sum_{i banked} l_i ) / n

    Banked columns add negatives to the gradients of queries. Banked rows add queries to the
    gradients of passages, so that the gradient norms of the two towers stay balanced.

    Let the full batch be all pairs of an update. If the encoder does not change, and the bank holds
    exactly the other pairs of the full batch in each micro-step, then the mean gradient of the
    micro-steps, weighted by n, is the InfoNCE gradient of the full batch. (In training, the bank
    lacks the pairs of later micro-steps. This is how the formula is checked.)

    In `forward` the host never waits for the device. So NaN or infinite embeddings raise no error:
    the loss and its gradients are not finite, the pairs are stored as invalid zeros, and
    ``last["enqueued"]`` is 0.

    The arguments are the settings of the loss (`contaccum.settings.LossSettings`), and

    Args:
        temperature: tau > 0; 1.0 with dot product in the paper, 0.05 is usual with cosine.
        similarity: ``"dot"`` or ``"cos"``.
        gather_across_devices: compute the loss of the micro-batches of all ranks of
            ``torch.distributed``, in rank order; ranks may have different numbers of pairs, even 0.
            Every rank holds the same bank and returns the same loss. Gradients are multiplied by
            the number of ranks, because DDP and FSDP average them.
        pairs_per_update: number of pairs between two optimizer steps, over all ranks that share the
            bank, for centring over the update. None centres each micro-batch by itself.

    Attributes:
        settings: the `InfoNCESettings`.
        positives: `PositivesTable` of pairs that are never negatives of each other, or None. It is
            not part of the state.
        compensation: the `DriftCompensation`.
        bank: the `MemoryBank`; None with ``bank_size=0``, and before the first call, which sets the
            embedding size.
        clock: the `UpdateClock`.
        diagnostics: the `Diagnostics` of the last micro-step; None before it.

    Raises:
        ConfigError (a ValueError): for settings out of range.

    Source: ContAccum, arXiv 2406.12356 ("the paper"); ``normalize_by="local"``, masks and drift
    compensation are ours. ``normalize_by="all"`` is equations 8 and 9 of the paper.
    """

    @takes_settings(InfoNCESettings)
    def __init__(self, settings: InfoNCESettings) -> None:
        super().__init__()
        self.settings = settings
        self.positives: PositivesTable | None = None
        self.bank: MemoryBank | None = None
        self.clock = UpdateClock()
        self.compensation = DriftCompensation(settings)
        self.centering = GradientCentering(settings.pairs_per_update)
        self.diagnostics: Diagnostics | None = None

    @classmethod
    def from_settings(cls, settings: InfoNCESettings) -> BankedInfoNCE:
        """Make a loss from its settings."""
        return cls(**dataclasses.asdict(settings))

    # A micro-step ---------------------------------------------------------------------------------

    @torch.compiler.disable  # a micro-step changes the bank in place, which dynamo cannot trace
    def forward(
        self,
        queries: Tensor,
        passages: Tensor,
        negatives: Tensor | None = None,
        query_ids: Tensor | None = None,
        passage_ids: Tensor | None = None,
        negative_ids: Tensor | None = None,
    ) -> Tensor:
        """Compute the loss of one micro-batch, a scalar, and enqueue the micro-batch in training.

        In eval mode, or without gradients, the loss uses the bank but stores no pairs, and ``last``
        has no ``enqueued``, ``bank_fill`` and ``bank_age``. (`ContAccumLoss` evaluates with a loss
        without a bank.) The gradients are computed here; ``backward`` only passes them on.

        Args:
            queries, passages: (n, d), the pairs of this rank; row i of ``passages`` is the
                positive of row i of ``queries``. All calls have the same dtype.
            negatives: (n, h, d), the hard negatives of each query.
            query_ids, passage_ids, negative_ids: integers (n,), (n,), (n, h). Equal ids mean the
                same text; ids of queries are never compared with those of passages and negatives.
                The two smallest int64 numbers are reserved. With a last dimension of two, a text
                has two ids, and two texts are the same if either of their ids is equal.

        Raises:
            ValueError: for shapes that do not agree, or if the embedding size changes.
        """
        columns = [x for x in (queries, passages, negatives) if x is not None]
        # The loss stays in float32 or float64 under autocast as well.
        with torch.autocast(queries.device.type, enabled=False):
            embeddings = stack_embeddings(columns, may_be_empty=self._is_shared)  # (n, 2 + h, d)
            # int64 (n, 2 + h, IDS_PER_TEXT)
            ids = stack_ids(query_ids, passage_ids, negative_ids, embeddings)
            # Read here, because the micro-step itself runs without gradients.
            is_training = self.training and torch.is_grad_enabled()
            loss, gradient = self._run_micro_step(embeddings, ids, is_training)
        if gradient is None:
            return loss
        return PrecomputedGradient.apply(loss, gradient, embeddings)

    @torch.no_grad()
    def _run_micro_step(
        self, embeddings: Tensor, ids: Tensor, is_training: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the loss and its gradient, and enqueue the micro-batch in training.

        Embeddings are (n, 2 + h, d): of the query, the positive and the negatives of each pair; ids
        are int64 (n, 2 + h, IDS_PER_TEXT). The gradient, of the shape of the embeddings, is None if
        they need none.
        """
        settings = self.settings
        needs_gradient = embeddings.requires_grad
        embeddings = embeddings.detach()

        # The embeddings. If ranks share the bank, every rank gets those of all ranks, and n is the
        # number of all their pairs from here on.
        rows_of_this_rank = slice(None)
        if self._is_shared:
            (embeddings, ids), rows_of_this_rank = gather_rows([embeddings, ids])
        n = len(embeddings)
        lengths = None
        if settings.similarity == "cos":
            lengths = torch.linalg.vector_norm(embeddings, dim=-1, keepdim=True)  # (n, 2 + h, 1)
            lengths = lengths.clamp_min(MIN_LENGTH)
            embeddings = embeddings / lengths  # of length 1 from here on

        # The logits. Documents are relative to the passage mean at the time of their micro-step.
        # So banked documents move along when the mean moves (see `contaccum.bank.drift`): beside
        # local ones, a stored d - mean then counts as d - mean then + mean now. A vector that is
        # subtracted from all documents of a row does not change its loss.
        bank = self._prepare_bank(embeddings)  # None with bank_size=0
        query_mean, passage_mean = self.compensation.compute_means(
            embeddings[:, 0], embeddings[:, 1], is_training
        )
        local = make_pairs(embeddings, ids, settings.temperature, passage_mean)
        quadrants = score_quadrants(local, bank, settings, self.positives)
        pairs_in_use = range(0)
        num_aged = 0
        if bank is not None:
            pairs_in_use = bank.pairs_in_use
            num_aged = max(self.clock.update_start - bank.oldest_in_use, 0)

        # The losses of the local rows. Their logits of banked documents are summed for each block
        # of the ring already, because the bank stores these sums.
        parts = [quadrants.in_batch.flatten(1), quadrants.against_bank_sums]
        negative_log_sums = torch.cat(parts, dim=1).logsumexp(1)  # (n,)
        local_rows = compute_row_losses(negative_log_sums, local.positive_logits)
        loss = local_rows.losses.sum()
        divisor: Tensor | int = n
        # The losses of the banked rows.
        banked_rows = None
        if bank is not None and bank.has_queries:
            assert quadrants.banked is not None and quadrants.banked.invalid is not None
            is_invalid = quadrants.banked.invalid[:, 0]  # (m,), column 0 is the passage
            # As if the positive had the whole softmax: such a row has no loss and no gradient.
            positive_logits = quadrants.banked.positive_logits.masked_fill(is_invalid, -MASKED)
            sums_over_local = quadrants.from_bank.flatten(1).logsumexp(1)  # (m,)
            negative_log_sums = torch.logaddexp(bank.log_sums, sums_over_local)  # (m,)
            banked_rows = compute_row_losses(negative_log_sums, positive_logits)
            loss = loss + banked_rows.losses.sum()
            if settings.normalize_by == "all":
                divisor = n + (~is_invalid).sum(dtype=loss.dtype)
        loss = loss / divisor
        # A sum is finite only if all its terms are, and x * 0 is NaN if x is NaN or infinite. This
        # takes fewer operators than `isfinite`.
        not_finite = ((loss + embeddings.sum()) * 0).isnan()

        # The gradient. Enqueueing changes the bank in place, so the gradient is computed before it.
        gradient = None
        if needs_gradient:
            query_drift = self.compensation.compute_query_drift(bank, query_mean)
            gradient = compute_row_gradients(local, quadrants, local_rows, banked_rows, query_drift)
            gradient = gradient / (settings.temperature * divisor)  # (n, 2 + h, d)
            if is_training and settings.drift_compensation == "auto":
                # In place: the gradients of documents then sum to zero over the update, so that new
                # documents are not driven away from aged ones (see `contaccum.bank.centering`).
                self.centering.centre(gradient, self.clock.num_updates, num_aged > 0, not_finite)
            if lengths is not None:
                # For x = y / |y| the gradient of y is that of x without its part along x, divided
                # by |y|.
                along = (gradient * embeddings).sum(-1, keepdim=True)
                gradient = torch.addcmul(gradient, along, embeddings, value=-1) / lengths
            if self._is_shared:
                # Every rank has the gradients of all pairs and returns its own. DDP will average
                # them over the ranks, although their sum is the gradient of the loss.
                gradient = gradient[rows_of_this_rank] * world_size()

        # Enqueueing. A micro-batch that is not finite leaves the means as they are, and is stored
        # as invalid.
        afterwards = {}
        if is_training and bank is not None:
            # Without this micro-batch if it is not finite.
            stored_query_mean = self.compensation.store_means(bank, n, not_finite)
            oldest_allowed = self.compensation.compute_oldest_allowed(bank, n, self.clock)
            bank.append(local, quadrants, not_finite, oldest_allowed, stored_query_mean)
            self.clock.add_pairs(n, bank.oldest_in_use)
            self._warn_without_updates()
            afterwards = {"bank_fill": bank.in_use, "bank_age": len(self.clock.update_ends)}

        self.diagnostics = Diagnostics(
            passages=embeddings[:, 1],
            in_batch=quadrants.in_batch,
            against_bank=quadrants.against_bank,
            invalid=None if quadrants.banked is None else quadrants.banked.invalid,
            pairs_in_use=pairs_in_use,
            num_aged=num_aged,
            local_rows=local_rows,
            not_finite=not_finite,
            afterwards=afterwards,
        )
        return loss, gradient

    @property
    def _is_shared(self) -> bool:
        """True if all ranks compute one loss, each with the same copy of the bank."""
        return self.settings.gather_across_devices and world_size() > 1

    def _prepare_bank(self, embeddings: Tensor) -> MemoryBank | None:
        """Return the bank with room for embeddings (n, 2 + h, d); None without a bank."""
        if self.settings.bank_size == 0:
            return None
        _, num_texts, dim = embeddings.shape
        num_negatives = num_texts - 2 if self.settings.bank_hard_negatives else 0
        # An evaluation in inference mode may come first. Training could not use tensors of it.
        with torch.inference_mode(False):
            bank = self.bank
            if bank is None:
                bank = self._make_bank(dim, embeddings.dtype, embeddings.device)
            if bank.documents.device != embeddings.device:
                # The model was moved, or a state was loaded on another device.
                self.to(embeddings.device)
            bank.ensure_shape(dim, num_negatives)
        return bank

    def _make_bank(self, dim: int, dtype: torch.dtype, device: torch.device) -> MemoryBank:
        bank = MemoryBank(
            bank_size=self.settings.bank_size,
            dim=dim,
            dtype=dtype,
            query_bank_size=self.settings.query_bank_size,
            device=device,
            temperature=self.settings.temperature,
        )
        self.bank = bank
        self.compensation.make_means(dim, dtype, device)
        return bank

    @property
    def last(self) -> dict[str, Any]:
        """Diagnostics of the last micro-step, empty before it; see `Diagnostics.numbers`."""
        return {} if self.diagnostics is None else self.diagnostics.numbers

    # Updates and drift ----------------------------------------------------------------------------

    def begin_update(self, pairs: int) -> None:
        """Set the number of pairs until the next optimizer step, for centring.

        The call is needed only if updates differ in their number of pairs; otherwise
        ``pairs_per_update`` sets it once.
        """
        self.centering.begin_update(pairs)

    def end_update(self) -> None:
        """End an update: all entries so far count as encoded by an older encoder.

        The step of a torch optimizer does the same, and a call beside it changes nothing.
        """
        self.clock.end_update()

    def _warn_without_updates(self) -> None:
        """If no update has ended in many pairs, warn, and treat all entries as aged.

        Steps are then probably not detected, because the loop has no optimizer of torch.
        """
        two_updates = 2 * (self.centering.num_pairs or 0)
        max_pairs = max(4 * self.settings.bank_size, MIN_PAIRS_BEFORE_WARNING, two_updates)
        if self.clock.num_updates > 0 or self.clock.num_pairs < max_pairs:
            return
        warn_once(
            f"no optimizer step was detected in {max_pairs:,} pairs: all bank entries now count as "
            "encoded by an older encoder. Call end_update() of the BankedInfoNCE after each "
            "optimizer step"
        )
        self.clock.age_entries()

    @torch.no_grad()
    def observe_probe(self, queries: Tensor, passages: Tensor) -> None:
        """Measure the drift of both towers on embeddings of the same few pairs of embeddings.

        Call the method before the first micro-batch, and again after updates; once every 64 to 128
        pairs is enough. A later call within an update counts its entries as encoded by an older
        encoder. The stored mean of each tower is moved as far as the probe's mean has moved since
        the last call, and the age limit is set: entries beyond it retire at the end of the next
        call in training. The host waits for the device. Ranks that share a bank call it together,
        each with its own texts; their number S may differ between ranks and be 0.

        Args:
            queries, passages: (S, d), encoded without dropout by the current encoder.

        Raises:
            ValueError: for fewer than two pairs.
        """
        embeddings = stack_embeddings(
            [queries, passages], may_be_empty=self._is_shared
        )  # (S, 2, d)
        if self._is_shared:
            [embeddings], _ = gather_rows([embeddings])
        if len(embeddings) < 2:
            raise ValueError(
                "a probe of one pair has no spread, so drift cannot be measured: "
                "pass eight pairs, or at least two"
            )
        if self.bank is not None:
            embeddings = embeddings.to(self.bank.documents.device)
        if self.settings.similarity == "cos":
            embeddings = normalize(embeddings, dim=-1)
        if self._prepare_bank(embeddings) is not None:
            self.compensation.observe(
                embeddings[:, 0], embeddings[:, 1], self.clock, self._is_shared
            )

    # The state ------------------------------------------------------------------------------------

    def get_extra_state(self) -> Tensor:
        """Return the state of the clock; see `UpdateClock.get_state`."""
        return self.clock.get_state()

    def set_extra_state(self, state: Tensor) -> None:
        """Restore the state of the clock."""
        self.clock.load_state(state)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        # A new module has no bank yet, because its embedding size is unknown. The buffers of the
        # state can only be loaded once a bank, means and a probe of their shapes exist.
        names = [name for name in state_dict if name.startswith(prefix)]
        state = {name.removeprefix(prefix): state_dict[name] for name in names}
        if "bank.documents" in state:
            self._make_buffers_like(state)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def _make_buffers_like(self, state: dict[str, Tensor]) -> None:
        """Make the bank, the means and the probe with the shapes of a state's tensors."""
        documents = state["bank.documents"]
        num_documents, dim = documents.shape[1:]
        bank = self._make_bank(dim, documents.dtype, documents.device)
        bank.ensure_shape(dim, num_documents - 1)
        self.compensation.probe = None
        if "compensation.probe.embeddings" in state:
            embeddings = state["compensation.probe.embeddings"]  # (measurements, 2, S, d)
            self.compensation.make_probe(embeddings.shape[2:], embeddings.dtype, embeddings.device)

        tensor_names = [name for name in state if not name.endswith("_extra_state")]
        state_shapes = {name: state[name].shape for name in tensor_names}
        buffer_shapes = {name: buffer.shape for name, buffer in self.named_buffers()}
        numbers = state["bank._extra_state"].tolist()[:2]
        if state_shapes != buffer_shapes or numbers != bank.get_extra_state().tolist()[:2]:
            raise ConfigError(
                "this state was saved with another bank_size, query_bank_size, temperature or "
                "drift_compensation: load it into a loss with the settings of the saved one"
            )
