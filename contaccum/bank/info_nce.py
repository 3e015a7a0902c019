"""BankedInfoNCE: the InfoNCE loss of a micro-batch against itself and a memory bank.

A micro-step is one call of the loss; an update is all micro-steps before one optimizer step. The
pairs of the micro-batch are local; those of earlier micro-batches are banked. (If ranks share a
bank, the micro-batches of all ranks together are local.)

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
import logging
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import normalize, softplus, threshold

from contaccum.bank.centering import GradientCentering
from contaccum.bank.drift import DriftCompensation
from contaccum.bank.logits import (
    MASKED,
    Pairs,
    PositivesTable,
    make_guide_embeddings,
    make_pairs,
    stack_ids,
    stack_texts,
)
from contaccum.bank.memory_bank import LogitBlocks, MemoryBank, is_not_finite, score_blocks
from contaccum.bank.update_clock import UpdateClock
from contaccum.distributed import gather_rows, world_size
from contaccum.errors import ConfigError, warn_once
from contaccum.settings import InfoNCESettings, takes_settings

logger = logging.getLogger(__name__)

MIN_LENGTH = 1e-12
"""Length by which shorter embeddings are divided, as in `torch.nn.functional.normalize`."""

SOFTPLUS_THRESHOLD = 40.0
"""Argument above which softplus(x) = log(1 + exp(x)) is x, which is exact in float64 too."""

MASKED_THRESHOLD = MASKED / 2
"""Logits up to this value are masked: no score of two texts is as low."""

MIN_PAIRS_BEFORE_WARNING = 4096
"""With a small bank, `end_pending_update` waits for an update for at least this many pairs."""


class BankedInfoNCE(nn.Module):
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
        self.centering = GradientCentering(settings.center_gradients, settings.pairs_per_update)
        self._has_warned_of_no_update = False
        self._num_unexpected = 0  # latest updates in a row without `pairs_per_update` pairs
        self._local_losses: Tensor | None = None  # (n,), of the last micro-step
        self._describe_last: Callable[[], dict[str, Any]] = dict
        self._last: dict[str, Any] = {}

    @classmethod
    def from_settings(cls, settings: InfoNCESettings) -> BankedInfoNCE:
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
        is_training = self.training and torch.is_grad_enabled()
        if is_training:
            self.end_pending_update()
        columns = [x for x in (queries, passages, negatives) if x is not None]
        guide_columns = [x for x in guide if x is not None]
        # The loss stays in float32 or float64 under autocast as well.
        with torch.autocast(queries.device.type, enabled=False):
            texts = stack_texts(columns, may_be_empty=self._is_shared)  # (n, 2 + h, d)
            ids = stack_ids(query_ids, passage_ids, negative_ids, texts)  # (n, 2 + h, 2)
            guide_texts = None
            if guide_columns:
                guide_texts = stack_texts(guide_columns, may_be_empty=True)  # (n, 2 + h, g)
            loss, gradient = self._run_micro_step(texts, ids, guide_texts, is_training)
        if gradient is None:
            return loss
        if is_training:
            self.clock.record_forward()
        return PrecomputedGradient.apply(loss, [gradient], texts)

    @torch.no_grad()
    def _run_micro_step(
        self, texts: Tensor, ids: Tensor, guide_texts: Tensor | None, is_training: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the loss and the gradient of ``texts``, and enqueue the micro-batch in training.

        The arguments have the shapes that `forward` gives them; the gradient is None if the texts
        need none.
        """
        settings = self.settings
        needs_gradient = texts.requires_grad

        # The embeddings as they are scored. If ranks share the bank, every rank gets the texts of
        # all ranks, and n is the number of all their pairs from here on.
        texts = texts.detach()
        rows_of_this_rank = slice(None)
        if self._is_shared:
            (texts, ids), rows_of_this_rank = gather_rows([texts, ids])
            if guide_texts is not None:
                [guide_texts], _ = gather_rows([guide_texts.detach()])
        guide = None
        if guide_texts is not None:
            guide = make_guide_embeddings(to_float32_at_least(guide_texts), settings)
        texts = to_float32_at_least(texts)
        lengths = None
        if settings.similarity == "cos":
            lengths = torch.linalg.vector_norm(texts, dim=-1, keepdim=True)  # (n, 2 + h, 1)
            lengths = lengths.clamp_min(MIN_LENGTH)
            texts = texts / lengths
        n = len(texts)

        # The logits. The bank stores each document minus the mean passage embedding at that time,
        # so that banked documents move along when the mean moves. The current mean is subtracted
        # from local documents too, to make both comparable. If the same vector is subtracted from
        # all documents of a row, the loss of the row does not change.
        guide_dim = 0 if guide is None else guide.queries.shape[1]
        bank = self._prepare_bank(texts, guide_dim)
        query_mean, passage_mean = self.compensation.compute_means(
            texts[:, 0], texts[:, 1], is_training
        )
        local = make_pairs(texts, ids, settings.temperature, passage_mean, guide)
        blocks = score_blocks(local, bank, settings, self.positives)
        banked = blocks.banked
        pairs_in_use = range(0)
        num_aged = 0
        if bank is not None:
            pairs_in_use = bank.pairs_in_use
            num_aged = max(self.clock.update_start - bank.oldest_in_use, 0)

        # The loss. The logit of a banked negative is increased by log w.
        weight = settings.bank_weight
        if weight > 1:  # of the whole bank; the pairs in use share it
            weight = min(weight / max(len(pairs_in_use), 1), 1.0)
        log_weight = math.log(weight)
        local_logits = [blocks.in_batch.flatten(1), blocks.against_bank_sums + log_weight]
        negative_log_sums = torch.cat(local_logits, dim=1).logsumexp(1)  # (n,)
        local_losses, local_differences, local_log_sums = compute_row_losses(
            negative_log_sums, local.positive_logits
        )
        loss = local_losses.sum()
        divisor: Tensor | int = n
        banked_losses = None
        banked_log_sums = None
        if bank is not None and bank.has_queries:
            assert banked is not None and banked.invalid is not None
            is_invalid = banked.invalid[:, 0]  # (m,), column 0 is the passage
            # As if the positive had the whole softmax: such a row has no loss and no gradient.
            positive_logits = banked.positive_logits.masked_fill(is_invalid, -MASKED)
            local_sums = blocks.from_bank.flatten(1).logsumexp(1)  # (m,), over local documents
            negative_log_sums = torch.logaddexp(bank.log_sums + log_weight, local_sums)
            banked_losses, _, banked_log_sums = compute_row_losses(
                negative_log_sums, positive_logits
            )
            loss = loss.add(banked_losses.sum(), alpha=weight)
            if settings.normalize_by == "all":
                divisor = divisor + weight * (~is_invalid).sum(dtype=loss.dtype)
        loss = loss / divisor
        # A sum is finite only if all its terms are.
        not_finite = is_not_finite(loss + texts.sum())

        # The gradient. Enqueueing changes the bank in place, so the gradient is computed before it.
        gradient = None
        if needs_gradient:
            query_drift = self.compensation.compute_query_drift(bank, query_mean)
            gradient = compute_row_gradients(
                local,
                blocks,
                local_differences,
                local_log_sums,
                banked_log_sums,
                weight,
                query_drift,
            )
            gradient = gradient / (settings.temperature * divisor)  # (n, 2 + h, d)
            if is_training:
                # center_gradients="auto" starts to centre only if drift is expected.
                is_drift_expected = (
                    settings.drift_compensation in ("auto", "batches") and num_aged > 0
                )
                self.centering(gradient, is_drift_expected, not_finite)
            if lengths is not None:
                # For x = y / |y| the gradient of y is that of x without its part along x, divided
                # by |y|.
                along = (gradient * texts).sum(-1, keepdim=True)
                gradient = torch.addcmul(gradient, along, texts, value=-1) / lengths
            if self._is_shared:
                # Every rank has the gradients of all pairs and returns its own. DDP will average
                # them over the ranks, although their sum is the gradient of the loss.
                gradient = gradient[rows_of_this_rank] * world_size()

        # Enqueueing. A micro-batch that is not finite leaves the means as they are, and is stored
        # as invalid.
        bank_fill = None
        if is_training:
            bank_fill = 0
            # The clock needs the ends of updates only back to the oldest pair in use.
            oldest_in_use = self.clock.num_pairs + n
            if bank is not None:
                query_mean = self.compensation.store_means(bank, n, not_finite)
                retire_before = self.compensation.compute_oldest_allowed(bank, n, self.clock)
                bank.append(local, blocks, not_finite, retire_before, query_mean)
                bank_fill = bank.in_use
                oldest_in_use = bank.oldest_in_use
            self.clock.num_pairs += n
            self.clock.drop_ends_before(oldest_in_use)
        self._last = {}
        self._local_losses = local_losses
        self._describe_last = partial(
            describe_micro_step,
            passages=texts[:, 1],
            in_batch=blocks.in_batch,
            against_bank=blocks.against_bank,
            invalid=None if banked is None else banked.invalid,
            pairs_in_use=pairs_in_use,
            num_aged=num_aged,
            local_losses=local_losses,
            local_log_sums=local_log_sums,
            banked_losses=banked_losses,
            bank_weight=weight,
            not_finite=not_finite,
            bank_fill=bank_fill,
        )
        return loss, gradient

    @property
    def _is_shared(self) -> bool:
        """True if all ranks compute one loss, each with the same copy of the bank."""
        return self.settings.gather_across_devices and world_size() > 1

    def _prepare_bank(self, texts: Tensor, guide_dim: int | None) -> MemoryBank | None:
        """Return the bank with room for texts (n, 2 + h, d); None without a bank."""
        if self.settings.bank_size == 0:
            return None
        _, num_texts, dim = texts.shape
        num_negatives = 0
        if self.settings.bank_hard_negatives:
            num_negatives = num_texts - 2
        # An evaluation in inference mode may come first. Training could not use tensors of it.
        with torch.inference_mode(False):
            bank = self.bank
            if bank is None:
                bank = self._make_bank(dim, texts.dtype, texts.device)
            if bank.documents.device != texts.device:
                # The model was moved, or a state was loaded on another device.
                self.to(texts.device)
            bank.ensure_shape(dim, num_negatives, guide_dim)
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

    def begin_update(self, pairs: int) -> None:
        """Set the number of pairs until the next optimizer step, for centring.

        The call is needed only if updates differ in their number of pairs; otherwise
        ``pairs_per_update`` sets it once.
        """
        self.centering.start_update(pairs)

    def end_update(self) -> None:
        """End an update: all entries so far count as encoded by an older encoder.

        The next micro-step detects the step of a torch optimizer and calls this method by itself.
        If you call it after an optimizer step, that step is not counted twice.
        """
        num_pairs = self.clock.num_pairs - self.clock.update_start
        expected = self.settings.pairs_per_update
        # If `begin_update` was called, its number counts.
        if num_pairs in (0, expected) or self.centering.num_pairs != expected:
            self._num_unexpected = 0
        elif expected is not None:
            # Not at once, because the last update of an epoch is shorter, and a gradient scaler
            # that skips a step joins two updates. The first update cannot be shorter.
            is_certain = self.clock.num_updates == 0 and num_pairs < expected
            self._num_unexpected += 2 if is_certain else 1
            if self._num_unexpected == 2:
                warn_once(
                    f"pairs_per_update={expected}, but an update has {num_pairs} pairs: gradients "
                    f"are not centred over whole updates. Set pairs_per_update={num_pairs}, or "
                    "change the batch size or the accumulation steps of the trainer"
                )
        self.clock.end_update()
        self.compensation.end_update()
        self.centering.restart()
        if self.bank is not None and self.settings.drift_compensation == "fresh":
            self.bank.retire_all()

    def end_pending_update(self) -> None:
        """End the update if an optimizer step has been taken since the last micro-step.

        If no update has ended since the start of training, after 4 x ``bank_size``, 4,096 and
        2 x ``pairs_per_update`` pairs, steps are probably not detected: log a warning once, and
        treat all entries as aged.
        """
        clock = self.clock
        if clock.pop_pending_step():
            self.end_update()
        two_updates = 2 * (self.settings.pairs_per_update or 0)
        max_pairs = max(4 * self.settings.bank_size, MIN_PAIRS_BEFORE_WARNING, two_updates)
        if self.bank is None or clock.num_updates > 0 or clock.num_pairs < max_pairs:
            return
        if not self._has_warned_of_no_update:
            logger.warning(
                f"no optimizer step was detected in {clock.num_pairs:,} pairs: all bank entries "
                "now count as encoded by an older encoder. Call end_update() of the BankedInfoNCE "
                "after each optimizer step"
            )
        self._has_warned_of_no_update = True
        clock.age_entries()

    @torch.no_grad()
    def observe_probe(self, queries: Tensor, passages: Tensor) -> None:
        """Measure the drift of both towers on embeddings of the same few pairs of texts.

        Call the method before the first micro-batch, and again after updates; once every 64 to 128
        pairs is enough. A later call within an update counts its entries as encoded by an older
        encoder. The stored mean of each tower is moved as far as the probe's mean has moved since
        the last call. With ``drift_compensation="auto"`` the call also sets the age limit: entries
        beyond it retire at the end of the next call in training. The host waits for the device.
        Ranks that share a bank call it together, each with its own texts; their number S may differ
        between ranks and be 0.

        Args:
            queries, passages: (S, d), encoded without dropout by the current encoder.

        Raises:
            ValueError: for fewer than two pairs.
        """
        texts = stack_texts([queries, passages], may_be_empty=self._is_shared)  # (S, 2, d)
        if self._is_shared:
            [texts], _ = gather_rows([texts])
        if len(texts) < 2:
            raise ValueError(
                "a probe of one pair has no spread, so drift cannot be measured: "
                "pass eight pairs, or at least two"
            )
        texts = to_float32_at_least(texts)
        if self.bank is not None:
            texts = texts.to(self.bank.documents.device)
        if self.settings.similarity == "cos":
            texts = normalize(texts, dim=-1)
        self.end_pending_update()
        if self._prepare_bank(texts, guide_dim=None) is not None:
            self.compensation.observe(texts[:, 0], texts[:, 1], self.clock, self._is_shared)

    @property
    def last(self) -> dict[str, Any]:
        """Diagnostics of the last micro-step, empty before it; see `describe_micro_step`."""
        if not self._last:
            self._last = self._describe_last()
        return self._last

    @property
    def local_loss(self) -> Tensor | None:
        """The entry ``local_loss`` of `last`, which costs less than all; None before it exists."""
        if self._local_losses is None:
            return None
        return self._local_losses.mean()

    @property
    def bank_age(self) -> int:
        """The number of updates that have ended since the oldest entry in use was encoded."""
        return len(self.clock.update_ends)

    def drift_record(self) -> dict[str, float]:
        """Return the age of the bank and its drift, for a log line; it reads from the device.

        Returns:
            ``bank_age`` in updates, the softmax masses of `describe_micro_step` that are finite,
            and the drift (see `DriftProbe.measure_drift`). Empty before the first enqueued pair.
        """
        if self.bank is None or self.bank.total_enqueued == 0:
            return {}
        record: dict[str, float] = {"bank_age": self.bank_age}
        last = self.last
        for name in ("in_batch_mass", "bank_mass", "bank_mass_aged"):
            mass = float(last.get(name, math.nan))
            if math.isfinite(mass):
                record[name] = mass
        if self.compensation.probe is not None:
            record.update(self.compensation.probe.measure_drift(self.bank_age))
        return record

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
        state = {}
        for key, value in state_dict.items():
            if key.startswith(prefix):
                state[key.removeprefix(prefix)] = value
        if "bank.documents" in state:
            self._make_buffers_like(state)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def _make_buffers_like(self, state: dict[str, Tensor]) -> None:
        """Make the bank, the means and the probe with the shapes of a state's tensors.

        Raises:
            ConfigError: if the settings of this module make buffers of other shapes.
        """
        documents = state["bank.documents"]
        num_documents, dim = documents.shape[1:]
        guide_dim = 0
        if "bank.guide.documents" in state:
            guide_dim = state["bank.guide.documents"].shape[2]
        bank = self._make_bank(dim, documents.dtype, documents.device)
        bank.ensure_shape(dim, num_documents - 1, guide_dim)
        self.compensation.probe = None
        if "compensation.probe.embeddings" in state:
            embeddings = state["compensation.probe.embeddings"]  # (measurements, 2, S, d)
            self.compensation.make_probe(embeddings.shape[2:], embeddings.dtype, embeddings.device)

        state_shapes = {}
        for name, value in state.items():
            if not name.endswith("_extra_state"):
                state_shapes[name] = value.shape
        buffer_shapes = {name: buffer.shape for name, buffer in self.named_buffers()}
        numbers = state["bank._extra_state"].tolist()[:2]
        expected_numbers = bank.get_extra_state().tolist()[:2]
        if state_shapes != buffer_shapes or numbers != expected_numbers:
            raise ConfigError(
                "this state was saved with another bank_size, query_bank_size, temperature or "
                "drift_compensation: load it into a loss with the settings of the saved one"
            )


def compute_row_losses(
    negative_log_sums: Tensor, positive_logits: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the losses of r rows.

    With D_i the logsumexp of the logits of row i's negatives, minus the logit of its positive, the
    loss of the row is log(1 + exp(D_i)).

    Args:
        negative_log_sums: (r,), logsumexp of the logits of each row's negatives.
        positive_logits: (r,), logit of each row's positive.

    Returns:
        (r,) each: the losses; the differences D; logsumexp of the logits of negatives and positive.
    """
    # The difference is taken before the exponential: the softmax probability of a positive, minus
    # 1, would be nothing but rounding error once its row is almost solved.
    differences = negative_log_sums - positive_logits
    # An infinite logit of a positive is NaN, or it would pass for a solved row.
    differences = threshold(differences, torch.finfo(differences.dtype).min, math.nan)
    losses = softplus(differences, threshold=SOFTPLUS_THRESHOLD)
    return losses, differences, torch.logaddexp(negative_log_sums, positive_logits)


def compute_row_gradients(
    local: Pairs,
    blocks: LogitBlocks,
    local_differences: Tensor,
    local_log_sums: Tensor,
    banked_log_sums: Tensor | None,
    weight: float,
    query_drift: Tensor | None,
) -> Tensor:
    """Compute the gradient of the sum of row losses, times the temperature, (n, 2 + h, d).

    The derivative of a row's loss with respect to the logit of a negative is the softmax
    probability of the negative. With respect to the logit of the positive it is minus the sum of
    these probabilities, which is sigmoid(D) and stays exact in a row that is almost solved.

    Args:
        local, blocks: the micro-batch, and its logits.
        local_differences, local_log_sums: (n,), of local rows, from `compute_row_losses`.
        banked_log_sums: (m,), of banked rows; None without banked queries.
        weight: w, the weight of a banked pair.
        query_drift: (runs, d), movement of the query tower's mean since the queries of each run
            of banked rows were stored; None for no movement. The gradient of local documents is
            computed with stored query + drift. The logits are those of the stored queries, so that
            they agree with the log-sums of the bank.
    """
    n = len(local.queries)
    in_batch = (blocks.in_batch - local_log_sums[:, None, None]).exp()  # (n, n, 1 + h)
    # A row's own positive is masked, so its place in the matrix is free.
    in_batch[:, :, 0].diagonal().sub_(local_differences.sigmoid())
    in_batch = in_batch.flatten(1)  # (n, n * (1 + h))
    query_gradient = in_batch @ local.documents.flatten(0, 1)  # (n, d)
    document_gradient = in_batch.T @ local.queries  # (n * (1 + h), d)
    if blocks.banked is not None:
        against_bank = (blocks.against_bank - local_log_sums[:, None, None]).exp()
        documents = blocks.banked.documents.flatten(0, 1)  # (m * (1 + h), d)
        query_gradient.addmm_(against_bank.flatten(1), documents, alpha=weight)
    if blocks.banked is not None and banked_log_sums is not None:
        from_bank = (blocks.from_bank - banked_log_sums[:, None, None]).exp()
        from_bank = from_bank.flatten(1)  # (m, n * (1 + h))
        document_gradient.addmm_(from_bank.T, blocks.banked.queries, alpha=weight)
        if query_drift is not None:
            sums_of_runs = from_bank.unflatten(0, (len(query_drift), -1)).sum(1)
            document_gradient.addmm_(sums_of_runs.T, query_drift, alpha=weight)
    gradients = [query_gradient[:, None], document_gradient.unflatten(0, (n, -1))]
    return torch.cat(gradients, dim=1)


def to_float32_at_least(embeddings: Tensor) -> Tensor:
    """Cast float16 and bfloat16 to float32; float32 and float64 stay as they are."""
    return embeddings.to(torch.promote_types(embeddings.dtype, torch.float32))


class PrecomputedGradient(torch.autograd.Function):
    """A loss with gradients that are already known when it is returned.

    `BankedInfoNCE` changes its bank in forward, so autograd could not use the bank in backward.
    `compute_full_softmax_loss` gets the gradient from sums that it needs for the loss anyway.

    The gradients keep the dtype in which they were computed (float32 at least) until they are
    multiplied by the incoming gradient, which contains the factor of a gradient scaler. If they
    were cast to float16 earlier, small values would underflow.

    Use: ``PrecomputedGradient.apply(loss, gradients, *inputs)``, with a scalar loss and a gradient
    of the shape of each input.
    """

    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: list[Tensor], *inputs: Tensor) -> Tensor:
        """Store the gradients of the inputs, and return the loss."""
        ctx.save_for_backward(*gradients)
        ctx.input_dtypes = [x.dtype for x in inputs]
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """Return the stored gradients times the incoming gradient."""
        input_gradients = []
        for gradient, dtype in zip(ctx.saved_tensors, ctx.input_dtypes, strict=True):
            input_gradients.append((gradient * grad_output).to(dtype))
        return None, None, *input_gradients  # loss and gradients get no gradient


@torch.no_grad()
def describe_micro_step(
    *,
    passages: Tensor,
    in_batch: Tensor,
    against_bank: Tensor,
    invalid: Tensor | None,
    pairs_in_use: range,
    num_aged: int,
    local_losses: Tensor,
    local_log_sums: Tensor,
    banked_losses: Tensor | None,
    bank_weight: float,
    not_finite: Tensor,
    bank_fill: int | None,
) -> dict[str, Tensor | int]:
    """Describe the rows, columns and losses of a micro-step, the values of `BankedInfoNCE.last`.

    They stay tensors on the device, so a reader waits for the device only if it needs their
    numbers. The arguments are those before the micro-batch was enqueued. The softmax mass of a
    passage is its softmax probability, summed over the local rows of which it is a negative; hard
    negatives are not counted. A fresh passage is one of the micro-batch or of the current update;
    the others are aged.

    Args:
        passages: (n, d).
        in_batch, against_bank: logits (n, n, 1 + h), own positives masked, and (n, m, 1 + h).
        invalid: bool (m, 1 + h), see `Pairs`; None without a bank.
        pairs_in_use: numbers of the banked pairs, see `MemoryBank`.
        num_aged: number of aged pairs in use, the oldest ones.
        local_losses, local_log_sums: (n,), from `compute_row_losses`.
        banked_losses: (m,); None without banked queries.
        bank_weight: weight of a banked pair.
        not_finite: bool scalar, True for a micro-batch that is not finite.
        bank_fill: number of pairs in use afterwards; None if no pair was to be stored.

    Returns:
        A dict with

        - ``local_loss``: mean loss of the local rows,
        - ``bank_loss``: mean loss of the bank rows in use,
        - ``columns``: number of columns per local row, before masks,
        - ``masked``: fraction of these columns, without the row's positive, that are masked,
        - ``bank_rows``: number of bank rows in use,
        - ``embedding_spread``: mean squared distance of the local passages from their mean, divided
          by their mean squared length; near 0, the embeddings have collapsed to a point,

        with a bank

        - ``in_batch_mass``: mass of all passages of the micro-batch for the rows of other pairs,
          divided by n,
        - ``bank_mass``: mass of all banked passages, divided by n,
        - ``bank_mass_aged``: mean mass of an aged passage, divided by that of a fresh passage.
          1: age makes no difference. Near 0: the encoder has moved away from the bank,

        and in training

        - ``enqueued``: number of pairs that were stored in the bank as valid,
        - ``bank_fill``: number of pairs in use afterwards.
    """
    n, _, num_documents = in_batch.shape
    columns = n * num_documents
    num_bank_rows = 0
    bank_loss = local_losses.new_zeros(())
    num_masked = (in_batch <= MASKED_THRESHOLD).sum() - n  # without the n own positives
    num_negatives = torch.full_like(num_masked, columns - 1)
    others: dict[str, Tensor | int] = {}
    if invalid is not None:
        is_valid = ~invalid  # (m, 1 + h)
        columns += len(pairs_in_use) * is_valid.shape[1]
        is_masked = (against_bank <= MASKED_THRESHOLD) & is_valid
        num_masked = num_masked + is_masked.sum()
        num_negatives = num_negatives + is_valid.sum()
        if banked_losses is not None:
            num_bank_rows = len(pairs_in_use)
            # The loss of a row that is not valid is zero.
            bank_loss = banked_losses.sum() / is_valid[:, 0].sum().clamp_min(1)
        log_sums = local_log_sums[:, None]  # (n, 1)
        in_batch_mass = (in_batch[:, :, 0] - log_sums).exp().sum()
        mass_by_slot = (against_bank[:, :, 0] - log_sums).exp().sum(0) * bank_weight
        numbers = torch.arange(pairs_in_use.start, pairs_in_use.stop, device=log_sums.device)
        # While the bank is filled, numbers are below the number of slots.
        mass_by_pair = mass_by_slot[numbers % len(mass_by_slot)]  # oldest first
        aged_mass = mass_by_pair[:num_aged].sum()
        fresh_bank_mass = mass_by_pair[num_aged:].sum()
        num_fresh = n - 1 + len(pairs_in_use) - num_aged
        mean_fresh_mass = (in_batch_mass + fresh_bank_mass) / num_fresh
        others = {
            "in_batch_mass": in_batch_mass / n,
            "bank_mass": (aged_mass + fresh_bank_mass) / n,
            "bank_mass_aged": aged_mass / num_aged / mean_fresh_mass,
        }
    if bank_fill is not None:
        others["enqueued"] = 0 if invalid is None else n * ~not_finite
        others["bank_fill"] = bank_fill
    variance = passages.var(0, correction=0).sum()
    embedding_spread = variance / passages.square().sum() * n
    if n == 1:  # one passage has no spread
        embedding_spread = embedding_spread * math.nan
    return {
        "local_loss": local_losses.mean(),
        "bank_loss": bank_loss,
        "columns": columns,
        "masked": num_masked / (n * num_negatives).clamp_min(1),
        "bank_rows": num_bank_rows,
        "embedding_spread": embedding_spread,
        **others,
    }
