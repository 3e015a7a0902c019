"""BankedInfoNCE: the InfoNCE loss of a micro-batch whose rows and columns are extended by memory banks.

It works on embeddings alone, so that any training loop can use it, and it owns the bank. It does not encode text
and does not step an optimizer. Letters in shapes: n pairs in the micro-batch, h hard negatives per query, m rows
in the bank, d the embedding size, c columns.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from contaccum import bank_block
from contaccum.bank_block import BankBlock
from contaccum.banked_module import BankedModule
from contaccum.distributed import gather_batch, world_size
from contaccum.duplicates import KnownPositives
from contaccum.errors import NotFiniteError
from contaccum.loss_parts import Entry, LossWithGradients, softmax, without_mean
from contaccum.memory_bank import NO_ID, check_embeddings
from contaccum.settings import check_settings, check_sharding
from contaccum.shards import WHOLE


class BankedInfoNCE(BankedModule):
    r"""InfoNCE over local and banked pairs, with gradients for the local ones.

    Rows are the local queries Q and the banked ones M_q; columns are the local passages P and hard negatives H and
    the banked ones M_p and M_h. With s the similarity and tau the temperature, row i costs

        l_i = logsumexp_j s(i, j)/tau - s(i, i+)/tau

    where i+ is the passage that came with query i. Bank rows give no gradient to queries, but they push on the local
    passages, which is what keeps the two encoders' gradient norms balanced. When nothing drifts and the bank holds
    exactly the rest of the batch, the accumulated gradient of ``normalize_by="local"`` equals that of the full batch,
    for queries and passages.

    Args:
        bank_size: rows m of the passage bank; 0 is plain InfoNCE.
        query_bank_size: rows of the query bank, at most ``bank_size``; None: the same; 0: the passage bank alone
            (``pre_batch``, the paper's "w/o M_q"), whose passage gradients miss the repulsion of the bank's queries.
        temperature: tau > 0; 1.0 with dot product in the paper, 0.05 is usual with cosine.
        similarity: ``"dot"`` or ``"cos"``.
        normalize_by: ``"local"``: the sum of all row losses over n. ``"all"``: over n plus the bank rows, the
            paper's equations 8 and 9.
        mask_duplicates: leave out columns that hold a row's own positive again or another known positive of its
            query, by ids. False is the paper's behaviour. Without ids there is nothing to mask.
        bank_hard_negatives: keep hard negatives in the bank as columns.
        drift_compensation: ``"mean"`` moves banked entries along with the mean of their tower: passages in the scores,
            queries in the push that they give to passages. How far the means moved comes from running means, or from
            :meth:`observe_probe` once that is called. ``"auto"`` also retires entries that have drifted too far in
            spite of it, as the probe tells; and while entries from before the last :meth:`end_update` are in use, it
            takes the mean out of the micro-batch's gradients, for each tower (without either call it is ``"mean"``).
            ``"fresh"`` uses no entry that is older than the last :meth:`end_update`. ``"none"`` uses entries as they
            were, as the paper does.
        bank_dtype: storage dtype of the bank. None: that of the embeddings, float32 at least.
        gather_across_devices: build the batch of all ranks of ``torch.distributed`` before the loss: the pairs of rank
            0, then those of rank 1, and so on. Ranks may bring different numbers of pairs, even none. Every rank then
            holds the same bank and returns the same loss. Gradients are scaled for a reduction that averages over
            ranks, as those of DistributedDataParallel and FSDP do: times the number of ranks.
        shard_bank: with ``gather_across_devices``, keep on each of R ranks every R-th row of the bank instead of all:
            its embeddings take 1/R of the memory and of the work, and a micro-step some more communication.
        bank_device: where the bank lives and its scores are computed; None: with the embeddings. "cpu" holds banks that
            an accelerator has no room for: only the micro-batch and its gradients travel, and the host waits for them.

    On an accelerator no value is read on the host. A micro-batch that is not finite is not refused there but marked,
    and its rows are left out; ``last["enqueued"]`` is then 0, a tensor.

    Attributes:
        bank: the :class:`MemoryBank`, None before the first call, which sets the embedding size.
        last: diagnostics of the last call, detached tensors and ints: ``loss`` (what was returned), ``local_loss``
            and ``bank_loss`` (mean over local and over bank rows), ``local_accuracy`` (share of local rows whose
            positive scores highest), ``columns`` (per local row, before masks), ``bank_rows`` (query rows
            used), ``bank_fill`` (passage rows in use after it), ``enqueued`` (pairs the call put into the bank),
            ``embedding_spread`` (squared distance of the local passages from their mean, over their squared length);
            with gradients also what :meth:`drift_record` tells of the softmax.

    Raises:
        ConfigError (a ValueError): for settings out of range.

    Source: arXiv 2406.12356; the "local" normalisation, the masks and the drift compensation are ours.

    Example::

        loss_fn = BankedInfoNCE(bank_size=1024, temperature=0.05, similarity="cos")
        for micro_step, (queries, passages) in enumerate(batches, start=1):
            loss = loss_fn(encode(queries), encode(passages))
            (loss / accumulation_steps).backward()
            if micro_step % accumulation_steps == 0:
                optimizer.step()
                optimizer.zero_grad()
    """

    def __init__(
        self,
        bank_size: int = 1024,
        query_bank_size: int | None = None,
        temperature: float = 1.0,
        similarity: Literal["dot", "cos"] = "dot",
        normalize_by: Literal["local", "all"] = "local",
        mask_duplicates: bool = True,
        bank_hard_negatives: bool = True,
        drift_compensation: Literal["auto", "mean", "fresh", "none"] = "auto",
        bank_dtype: torch.dtype | None = None,
        gather_across_devices: bool = False,
        bank_device: torch.device | str | None = None,
        shard_bank: bool = False,
    ) -> None:
        check_settings(bank_size, query_bank_size, temperature, similarity, normalize_by, drift_compensation)
        check_sharding(shard_bank, gather_across_devices, bank_device)
        super().__init__(
            bank_size,
            query_bank_size,
            similarity,
            bank_hard_negatives,
            drift_compensation,
            bank_dtype,
            gather_across_devices,
            bank_device,
            shard_bank,
        )
        self.temperature = temperature
        self.normalize_by = normalize_by
        self.mask_duplicates = mask_duplicates

    def forward(
        self,
        queries: Tensor,
        passages: Tensor,
        negatives: Tensor | None = None,
        query_ids: Tensor | None = None,
        passage_ids: Tensor | None = None,
        negative_ids: Tensor | None = None,
    ) -> Tensor:
        """The loss of one micro-batch; in training mode and with gradients enabled, also enqueues it.

        Args:
            queries, passages: (n, d); row i of ``passages`` is the positive of row i of ``queries``.
            negatives: (n, h, d), the hard negatives of each query.
            query_ids, passage_ids, negative_ids: int64 (n,), (n,), (n, h). Equal ids mean the same text.

        Returns:
            A scalar, float32 at least. It is differentiable once, with respect to the three embeddings.

        Raises:
            ValueError: for shapes that do not agree, an embedding size other than the bank's.
            NotFiniteError (a ValueError): for NaN embeddings (then on every rank that shares the bank).
        """
        ranks = world_size() if self.gather_across_devices else 1
        check_embeddings(queries, passages, negatives, query_ids, passage_ids, negative_ids, may_be_empty=ranks > 1)
        inputs = [queries, passages] if negatives is None else [queries, passages, negatives]
        learning = torch.is_grad_enabled()
        with torch.no_grad(), torch.autocast(queries.device.type, enabled=False):
            dtype = torch.promote_types(queries.dtype, torch.float32)
            local = [x.detach() for x in inputs]
            ids: tuple[Tensor | None, ...] = (query_ids, passage_ids, negative_ids)
            own = slice(0, queries.shape[0])
            if ranks > 1:  # before any copy: in the dtype of the embeddings, by the backend of their device
                local, ids, own = gather_batch(local, ids, NO_ID)
            local = [x.to(self.bank_device, dtype) for x in local]
            ids = tuple(None if x is None else x.to(local[0].device) for x in ids)
            # After the gathering: a rank that stopped alone would leave the others waiting.
            if self._may_look(queries) and any(bool(torch.isnan(x).any()) for x in local):
                raise NotFiniteError(
                    "the embeddings of this micro-batch hold NaN: look for a learning rate too high, fp16 overflow "
                    "(bf16 has none), or empty texts under mean pooling. The bank is untouched."
                )
            needs_gradient = learning and any(x.requires_grad for x in inputs)
            loss, gradients = self._micro_step(local, ids, needs_gradient, enqueue=self.training and learning)
            loss = loss.to(queries.device)
            if not needs_gradient:
                return loss
            # Every rank computed the loss of the whole batch, and a reduction that averages follows.
            parts = [(g[own] * ranks).to(x.device, x.dtype) for g, x in zip(gradients, inputs, strict=True)]
        return LossWithGradients.apply(loss, parts, *inputs)

    def _micro_step(
        self, local: list[Tensor], ids: tuple[Tensor | None, ...], needs_gradient: bool, enqueue: bool
    ) -> tuple[Tensor, list[Tensor]]:
        """Loss and gradients of a micro-batch of detached embeddings; then, if asked, its entry into the bank."""
        norms: list[Tensor] = []
        if self.similarity == "cos":
            norms = [x.norm(dim=-1, keepdim=True).clamp_min(1e-12) for x in local]
            local = [x / norm for x, norm in zip(local, norms, strict=True)]
        queries, passages = local[0], local[1]
        negatives = local[2] if len(local) > 2 else None
        n, d = queries.shape
        self._prepare_bank(d, negatives, queries)
        means = [mean for mean in (self.passage_mean, self.query_mean) if mean is not None]
        before = [mean.snapshot() for mean in means]
        if enqueue and self.probe is None:
            for mean, embeddings in zip(means, (passages, queries), strict=False):
                mean.observe(embeddings)
        shift = None if self.passage_mean is None else self.passage_mean.mean.to(queries.dtype)

        columns = passages if negatives is None else torch.cat([passages, negatives.reshape(-1, d)])
        query_ids, passage_ids, negative_ids = (
            torch.full(shape, NO_ID, dtype=torch.int64, device=queries.device) if x is None else x.long()
            for x, shape in zip(ids, ((n,), (n,), (columns.shape[0] - n,)), strict=True)
        )
        column_ids = torch.cat([passage_ids, negative_ids.reshape(-1)])
        column_query_ids = torch.cat([query_ids, torch.full_like(negative_ids.reshape(-1), NO_ID)])
        self._ids_seen = self._ids_seen or any(x is not None for x in ids)
        bank = self._bank_block(queries.dtype)
        used = (0, 0) if bank is None else bank.in_use
        known = self._known_positives(query_ids, passage_ids)

        # Local rows: n x c and n x m scores.
        own = torch.arange(n, device=queries.device)
        scores = queries @ columns.T / self.temperature
        if known is not None:
            mask = known.mask(query_ids, passage_ids, column_query_ids, column_ids)
            mask[own, own] = False
            scores.masked_fill_(mask, -torch.inf)
        # Log-sums and softmax weights in float64: scores may be tens of thousands (a dot product at a low temperature),
        # where float32 has two digits after the point, and there are only n (n + m) of them.
        positive = scores[own, own].double()
        log_sum, top = scores.double().logsumexp(1), scores.amax(1)
        shard = WHOLE if bank is None else bank.shard
        blocks = [] if bank is None else bank.columns
        bank_scores = [] if bank is None else bank.local_scores(queries, known, query_ids, passage_ids)
        shifted = None if shift is None else (queries @ shift / self.temperature)[:, None]
        banked = torch.full_like(log_sum, -torch.inf)
        for block_scores in bank_scores:
            if shifted is not None:
                block_scores += shifted
            banked = torch.logaddexp(banked, block_scores.double().logsumexp(1))
            top = torch.maximum(top, block_scores.amax(1)) if block_scores.shape[1] else top
        log_sum, top = torch.logaddexp(log_sum, shard.log_sum(banked)), shard.max(top)
        local_losses = (log_sum - positive).to(scores.dtype)

        # Bank rows: m x c scores; their m x m part has no gradient and comes in as one number per row.
        bank_losses = scores.new_zeros(0)
        row_scores = row_log_sum = None
        entry = self._entry(local, shift) if enqueue and self.bank is not None else None
        if bank is not None and bank.any_rows:
            wanted = [columns] if shift is None else [columns, shift[None]]
            leaving, entering = ([], []) if entry is None else (bank.columns_in(entry.evicted), entry.columns)
            row_scores, *others = bank.row_scores(*wanted, *leaving, *entering)
            if known is not None:
                mask = known.mask(*bank.row_facts[:2], column_query_ids, column_ids)
                row_scores.masked_fill_(mask, -torch.inf)
            log_sums, positives = bank.log_sums(known, query_ids), bank.positive_scores()
            if shift is not None:
                shifts = others.pop(0)[:, 0].double()
                log_sums, positives = log_sums + shifts, positives + shifts
            if entry is not None:
                entry = entry._replace(removed=others[: len(leaving)], added=others[len(leaving) :])
            row_log_sum = torch.logaddexp(log_sums, row_scores.double().logsumexp(1))
            bank_losses = (row_log_sum - positives).to(scores.dtype)
            if bank.usable_rows is not None:
                bank_losses = torch.where(bank.usable_rows, bank_losses, torch.zeros_like(bank_losses))

        rows: Tensor | int = n
        if self.normalize_by == "all":
            usable = torch.ones_like(bank_losses) if bank is None or bank.usable_rows is None else bank.usable_rows
            rows = n + shard.sum(usable.sum())
        bank_loss = shard.sum(bank_losses.sum())
        loss = (local_losses.sum() + bank_loss) / rows
        gradients: list[Tensor] = []
        passage_mass = None
        if needs_gradient:
            query_gradient, column_gradient = torch.zeros_like(queries), torch.zeros_like(columns)
            for block, block_scores in zip(blocks, bank_scores, strict=True):
                weights = softmax(block_scores, log_sum)
                if block is blocks[0]:
                    passage_mass = weights.sum(0)
                query_gradient += block.entries.weighted_sum(weights)
                if shift is not None:
                    query_gradient += weights.sum(1, keepdim=True) * shift
            if bank is not None and row_scores is not None and row_log_sum is not None:
                weights = softmax(row_scores, row_log_sum)
                if bank.usable_rows is not None:
                    weights = torch.where(bank.usable_rows[:, None], weights, torch.zeros_like(weights))
                column_gradient += bank.rows.weighted_sum(weights.T)
                if self.query_frames is not None:
                    column_gradient += self.query_frames.push(weights, shard)
            if not shard.whole:
                query_gradient, column_gradient = shard.sum(torch.cat([query_gradient, column_gradient])).split(
                    [n, len(columns)]
                )
            weights = softmax(scores, log_sum)
            weights[own, own] -= 1
            query_gradient = query_gradient + weights @ columns
            column_gradient = column_gradient + weights.T @ queries
            if self.drift_compensation == "auto" and self.bank is not None and self.bank.aged:
                query_gradient, column_gradient = without_mean(query_gradient), without_mean(column_gradient)
            gradients = [query_gradient, column_gradient[:n]]
            if negatives is not None:
                gradients.append(column_gradient[n:].reshape(negatives.shape))
            gradients = [g / (rows * self.temperature) for g in gradients]
            if self.similarity == "cos":
                gradients = [
                    (g - (g * u).sum(-1, keepdim=True) * u) / norm
                    for g, u, norm in zip(gradients, local, norms, strict=True)
                ]

        masses = {} if passage_mass is None else self._masses(passage_mass, scores, log_sum, n)
        enqueued: Tensor | int = 0
        if entry is not None:
            assert self.bank is not None
            finite = torch.isfinite(loss)
            if not self._may_look(loss):
                for x in local:
                    finite = finite & torch.isfinite(x).all()
                self._enqueue(bank, entry, ids, finite)
                enqueued = finite * n
            elif bool(finite):
                self._enqueue(bank, entry, ids)
                enqueued = n
            for mean, state in zip(means, before, strict=True):
                mean.restore(state, unless=finite)
            if self.query_frames is not None and self.query_mean is not None and self.probe is None:
                self.query_frames.follow(self.query_mean.mean, self.bank.pairs)
        self.last = {
            "loss": loss,
            "local_loss": local_losses.mean(),
            "bank_loss": bank_loss / max(0 if bank is None else bank.bank.query_fill, 1),
            "local_accuracy": (positive >= top.double()).to(loss.dtype).mean(),
            "columns": columns.shape[0] + used[0],
            "bank_rows": used[1],
            "bank_fill": 0 if self.bank is None else self.bank.in_use,
            "enqueued": enqueued,
            "embedding_spread": (passages - passages.mean(0)).square().sum() / passages.square().sum()
            if n > 1
            else passages.new_tensor(math.nan),
            **masses,
        }
        return loss, gradients

    @staticmethod
    def _may_look(tensor: Tensor) -> bool:
        """Whether values may be read on the host: on an accelerator that would wait for the device."""
        return tensor.device.type == "cpu" and bank_block.EAGER_CPU

    def _bank_block(self, dtype: torch.dtype) -> BankBlock | None:
        """The bank for this micro-step, with the known positives among its own pairs; None while it is empty."""
        if self.bank is None or self.log_sums is None or self.bank.fill == 0:
            return None
        known = self._known_positives(None, None)
        block = BankBlock(self.bank, self.log_sums, self.temperature, dtype, known)
        if self._summed_pairs != self.bank.pairs:  # someone wrote to the bank directly
            block.refresh()
            self._summed_pairs = self.bank.pairs
        return block

    def _known_positives(self, query_ids: Tensor | None, passage_ids: Tensor | None) -> KnownPositives | None:
        """Those of the bank, and of the micro-batch whose ids are given; None when nothing is masked."""
        if not (self.mask_duplicates and self._ids_seen):
            return None
        pairs = [] if query_ids is None or passage_ids is None else [(query_ids, passage_ids)]
        if self.bank is not None and self.bank.fill:
            entries = self.bank.entries()
            pairs.append((entries.query_ids, entries.passage_ids))
        queries, passages = (torch.cat(column) for column in zip(*pairs, strict=True))
        table = None if self.positives is None else self.positives.to(queries.device)
        return KnownPositives(queries, passages, table)

    def _entry(self, local: list[Tensor], shift: Tensor | None) -> Entry:
        """What a micro-batch will put into the bank, and where."""
        assert self.bank is not None
        queries, passages = local[0], local[1]
        negatives = local[2] if len(local) > 2 and self.bank_hard_negatives else None
        if shift is not None:
            passages = passages - shift
            negatives = None if negatives is None else negatives - shift
        slots, evicted, new_rows = self.bank.next_slots(queries.shape[0])
        # As they will be read again: rounded to what the bank stores, and with room for as many negatives.
        columns = [passages[-slots.numel() :].to(self.bank.passages.dtype).to(queries.dtype)]
        h = self.bank.hard_negatives
        if h:
            padded = queries.new_zeros(slots.numel(), h, self.bank.dim)
            if negatives is not None:
                padded[:, : negatives.shape[1]] = negatives[-slots.numel() :].to(self.bank.negatives.dtype)
            columns.append(padded.reshape(-1, self.bank.dim))
        return Entry(queries, passages, negatives, slots, evicted, new_rows, columns, [], [])

    def _enqueue(
        self, bank: BankBlock | None, entry: Entry, ids: tuple[Tensor | None, ...], finite: Tensor | None = None
    ) -> None:
        assert self.bank is not None
        query_ids, passage_ids, negative_ids = ids
        changed = None
        if self.mask_duplicates and self._ids_seen:
            # Masks hang on which pairs are known, so pairs that come or go touch the other rows of their queries.
            gone = self.bank.query_ids[entry.slots]
            changed = gone if query_ids is None else torch.cat([gone, query_ids.long()])
        if bank is not None and entry.removed:
            bank.remove(entry.evicted, entry.removed)
        self.bank.enqueue(
            entry.queries,
            entry.passages,
            entry.negatives,
            query_ids,
            passage_ids,
            negative_ids if entry.negatives is not None else None,
            finite,
        )
        self._summed_pairs = self.bank.pairs
        if self.query_frames is not None:
            self.query_frames.enter(entry.new_rows)
        grown = self._bank_block(entry.queries.dtype)
        if grown is not None:
            grown.add(entry.slots, entry.added, entry.new_rows, changed)

    def extra_repr(self) -> str:
        return (
            f"bank_size={self.bank_size}, query_bank_size={self.query_bank_size}, temperature={self.temperature}, "
            f"similarity={self.similarity!r}, normalize_by={self.normalize_by!r}, "
            f"drift_compensation={self.drift_compensation!r}"
        )
