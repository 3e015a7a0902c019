"""BankedInfoNCE: the InfoNCE loss of a micro-batch whose rows and columns are extended by memory banks.

It works on embeddings alone, so that any training loop can use it, and it owns the bank. It does not encode text
and does not step an optimizer. Letters in shapes: n pairs in the micro-batch, h hard negatives per query, m rows
in the bank, d the embedding size, c columns.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from contaccum.distributed import gather_batch, world_size
from contaccum.drift import DRIFT_COMPENSATIONS, Compensated, RunningMean
from contaccum.duplicates import KnownPositives
from contaccum.errors import ConfigError
from contaccum.memory_bank import NO_ID, MemoryBank, check_embeddings

_BLOCK_SCORES = 4_000_000  # scores of the bank x bank block held at once (16 MB in float32)


class _Columns(NamedTuple):
    """A block of columns or rows from the bank, with what the duplicate mask needs of it."""

    entries: Compensated
    query_ids: Tensor  # (c,) NO_ID for hard negatives
    passage_ids: Tensor  # (c,)
    exists: Tensor | None  # bool (c,), None: all do


class _BankView(NamedTuple):
    """The bank as the loss uses it: rows, and column blocks of which the first holds the rows' positives."""

    rows: Compensated
    row_query_ids: Tensor
    row_passage_ids: Tensor
    positives: Tensor  # (mq',) column of the first block
    columns: list[_Columns]


class BankedInfoNCE(nn.Module):
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
        drift_compensation: ``"mean"`` shifts each bank entry by how far its tower's running mean has moved since it
            was inserted; ``"none"`` uses entries as they were, as the paper does.
        bank_dtype: storage dtype of the bank. None: that of the embeddings, float32 at least.
        gather_across_devices: build the batch of all ranks of ``torch.distributed`` before the loss. Every rank then
            holds the same bank and returns the same loss. Gradients are scaled for an averaging reduction, as
            DistributedDataParallel does.

    Attributes:
        bank: the :class:`MemoryBank`, None before the first call, which sets the embedding size.
        last: diagnostics of the last call, detached tensors and ints: ``loss`` (what was returned), ``local_loss``
            and ``bank_loss`` (mean over local and over bank rows), ``local_accuracy`` (share of local rows whose
            positive scores highest), ``columns`` (per local row, before masks), ``bank_rows`` (query rows
            used), ``bank_fill`` (passage rows after the call) and ``enqueued`` (pairs the call put into the bank).

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
        drift_compensation: Literal["mean", "none"] = "mean",
        bank_dtype: torch.dtype | None = None,
        gather_across_devices: bool = False,
    ) -> None:
        super().__init__()
        check_settings(bank_size, query_bank_size, temperature, similarity, normalize_by, drift_compensation)
        self.bank_size = bank_size
        self.query_bank_size = bank_size if query_bank_size is None else query_bank_size
        self.temperature = temperature
        self.similarity = similarity
        self.normalize_by = normalize_by
        self.mask_duplicates = mask_duplicates
        self.bank_hard_negatives = bank_hard_negatives
        self.drift_compensation = drift_compensation
        self.bank_dtype = bank_dtype
        self.gather_across_devices = gather_across_devices
        self.bank: MemoryBank | None = None
        self.query_mean: RunningMean | None = None
        self.passage_mean: RunningMean | None = None
        self.last: dict[str, Any] = {}
        self._ids_seen = False

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
            ValueError: for shapes that do not agree, an embedding size other than the bank's, NaN embeddings.
        """
        check_embeddings(queries, passages, negatives, query_ids, passage_ids, negative_ids)
        inputs = [queries, passages] if negatives is None else [queries, passages, negatives]
        if any(bool(torch.isnan(x).any()) for x in inputs):
            raise ValueError(
                "the embeddings of this micro-batch hold NaN: look for a learning rate too high, fp16 overflow "
                "(bf16 has none), or empty texts under mean pooling. The bank is untouched."
            )
        learning = torch.is_grad_enabled()
        with torch.no_grad(), torch.autocast(queries.device.type, enabled=False):
            dtype = torch.promote_types(queries.dtype, torch.float32)
            local = [x.detach().to(dtype) for x in inputs]
            ids: tuple[Tensor | None, ...] = (query_ids, passage_ids, negative_ids)
            own, ranks = slice(0, queries.shape[0]), 1
            if self.gather_across_devices and world_size() > 1:
                local, ids, own = gather_batch(local, ids)
                ranks = world_size()
            needs_gradient = learning and any(x.requires_grad for x in inputs)
            loss, gradients = self._micro_step(local, ids, needs_gradient, enqueue=self.training and learning)
            if not needs_gradient:
                return loss
            # Every rank computed the loss of the whole batch, and a reduction that averages follows.
            parts = [(g[own] * ranks).to(x.dtype) for g, x in zip(gradients, inputs, strict=True)]
        return _LossWithGradients.apply(loss, parts, *inputs)

    def _micro_step(
        self, local: list[Tensor], ids: tuple[Tensor | None, ...], needs_gradient: bool, enqueue: bool
    ) -> tuple[Tensor, list[Tensor]]:
        """Loss and gradients of a micro-batch of detached embeddings; then, if asked, its entry into the bank."""
        norms: list[Tensor] = []
        raw = local
        if self.similarity == "cos":
            norms = [x.norm(dim=-1, keepdim=True).clamp_min(1e-12) for x in raw]
            local = [x / norm for x, norm in zip(raw, norms, strict=True)]
        queries, passages = local[0], local[1]
        negatives = local[2] if len(local) > 2 else None
        n, d = queries.shape
        self._prepare_bank(d, negatives, queries)
        means = [m for m in (self.query_mean, self.passage_mean) if m is not None]
        before = [m.snapshot() for m in means]
        if enqueue and self.query_mean is not None and self.passage_mean is not None:
            self.query_mean.observe(queries)
            self.passage_mean.observe(passages)

        columns = passages if negatives is None else torch.cat([passages, negatives.reshape(-1, d)])
        query_ids, passage_ids, negative_ids = (
            torch.full(shape, NO_ID, dtype=torch.int64, device=queries.device) if x is None else x.long()
            for x, shape in zip(ids, ((n,), (n,), (columns.shape[0] - n,)), strict=True)
        )
        column_ids = torch.cat([passage_ids, negative_ids.reshape(-1)])
        column_query_ids = torch.cat([query_ids, torch.full_like(negative_ids.reshape(-1), NO_ID)])
        bank = self._bank_view(queries.dtype)
        known = self._known_positives(query_ids, passage_ids, has_ids=any(x is not None for x in ids))

        # Local rows: n x c and n x m scores.
        own = torch.arange(n, device=queries.device)
        scores = queries @ columns.T / self.temperature
        if known is not None:
            mask = known.mask(query_ids, passage_ids, column_query_ids, column_ids)
            mask[own, own] = False
            scores.masked_fill_(mask, -torch.inf)
        positive = scores[own, own]
        log_sum, top = scores.logsumexp(1), scores.amax(1)
        bank_scores = []
        for block in bank.columns if bank else []:
            block_scores = self._scores(block, queries, known, query_ids, passage_ids)
            log_sum = torch.logaddexp(log_sum, block_scores.logsumexp(1))
            top = torch.maximum(top, block_scores.amax(1))
            bank_scores.append(block_scores)
        local_losses = log_sum - positive

        # Bank rows: m x c scores; their m x m part has no gradient and comes in as one number per row.
        bank_losses = scores.new_zeros(0)
        row_scores = row_log_sum = None
        if bank is not None and len(bank.rows):
            row_scores = bank.rows.scores(columns).T / self.temperature  # (mq', c)
            if known is not None:
                mask = known.mask(bank.row_query_ids, bank.row_passage_ids, column_query_ids, column_ids)
                row_scores.masked_fill_(mask, -torch.inf)
            among_bank, bank_positive = self._bank_log_sums(bank, known)
            row_log_sum = torch.logaddexp(among_bank, row_scores.logsumexp(1))
            bank_losses = row_log_sum - bank_positive

        rows = n if self.normalize_by == "local" else n + bank_losses.numel()
        loss = (local_losses.sum() + bank_losses.sum()) / rows
        gradients: list[Tensor] = []
        if needs_gradient:
            weights = (scores - log_sum[:, None]).exp_()
            weights[own, own] -= 1
            query_gradient = weights @ columns
            column_gradient = weights.T @ queries
            for block, block_scores in zip(bank.columns if bank else [], bank_scores, strict=True):
                query_gradient += block.entries.weighted_sum((block_scores - log_sum[:, None]).exp_())
            if bank is not None and row_scores is not None and row_log_sum is not None:
                column_gradient += bank.rows.weighted_sum((row_scores - row_log_sum[:, None]).exp_().T)
            gradients = [query_gradient, column_gradient[:n]]
            if negatives is not None:
                gradients.append(column_gradient[n:].reshape(negatives.shape))
            gradients = [g / (rows * self.temperature) for g in gradients]
            if self.similarity == "cos":
                gradients = [
                    (g - (g * u).sum(-1, keepdim=True) * u) / norm
                    for g, u, norm in zip(gradients, local, norms, strict=True)
                ]

        enqueued = 0
        if enqueue and self.bank is not None:
            if bool(torch.isfinite(loss)):
                self._enqueue(queries, passages, negatives, ids)
                enqueued = n
            else:
                for mean, state in zip(means, before, strict=True):
                    mean.restore(state)
        self.last = {
            "loss": loss,
            "local_loss": local_losses.mean(),
            "bank_loss": bank_losses.mean() if bank_losses.numel() else bank_losses.sum(),
            "local_accuracy": (positive >= top).to(loss.dtype).mean(),
            "columns": columns.shape[0] + sum(len(block.entries) for block in (bank.columns if bank else [])),
            "bank_rows": bank_losses.numel(),
            "bank_fill": 0 if self.bank is None else self.bank.fill,
            "enqueued": enqueued,
        }
        return loss, gradients

    def _scores(
        self, block: _Columns, rows: Tensor, known: KnownPositives | None, query_ids: Tensor, passage_ids: Tensor
    ) -> Tensor:
        """Masked scores of (k, d) rows against a block of bank columns: (k, c)."""
        scores = block.entries.scores(rows) / self.temperature
        if known is not None:
            mask = known.mask(query_ids, passage_ids, block.query_ids, block.passage_ids)
            scores.masked_fill_(mask, -torch.inf)
        if block.exists is not None:
            scores.masked_fill_(~block.exists, -torch.inf)
        return scores

    def _bank_log_sums(self, bank: _BankView, known: KnownPositives | None) -> tuple[Tensor, Tensor]:
        """logsumexp of each bank row over the bank's columns, and its positive's score: (mq',) each.

        Computed in blocks of rows, so that memory stays linear in the bank.
        """
        count = len(bank.rows)
        size = max(1, _BLOCK_SCORES // max(len(block.entries) for block in bank.columns))
        log_sums, positives = [], []
        for start in range(0, count, size):
            part = slice(start, min(start + size, count))
            rows = bank.rows.rows(part)
            own = torch.arange(rows.shape[0], device=rows.device), bank.positives[part]
            log_sum = None
            for index, block in enumerate(bank.columns):
                scores = self._scores(block, rows, known, bank.row_query_ids[part], bank.row_passage_ids[part])
                if index == 0:
                    positive = (rows * block.entries.rows(own[1])).sum(1) / self.temperature
                    scores[own] = positive  # the mask covers the row's own positive too
                    positives.append(positive)
                block_sum = scores.logsumexp(1)
                log_sum = block_sum if log_sum is None else torch.logaddexp(log_sum, block_sum)
            assert log_sum is not None
            log_sums.append(log_sum)
        return torch.cat(log_sums), torch.cat(positives)

    def _bank_view(self, dtype: torch.dtype) -> _BankView | None:
        if self.bank is None or self.bank.fill == 0:
            return None
        entries = self.bank.entries()
        unit = self.similarity == "cos"
        query_shift = None if self.query_mean is None else self.query_mean.mean.to(dtype)
        passage_shift = None if self.passage_mean is None else self.passage_mean.mean.to(dtype)
        passages = Compensated(entries.passages, passage_shift, unit, dtype)
        columns = [_Columns(passages, entries.query_ids, entries.passage_ids, None)]
        if entries.negatives.shape[1]:
            h = entries.negatives.shape[1]
            negatives = Compensated(entries.negatives.reshape(-1, self.bank.dim), passage_shift, unit, dtype)
            ids = entries.negative_ids.reshape(-1)
            exists = torch.arange(h, device=ids.device) < entries.negative_counts[:, None]
            columns.append(_Columns(negatives, torch.full_like(ids, NO_ID), ids, exists.reshape(-1)))
        return _BankView(
            Compensated(entries.queries, query_shift, unit, dtype),
            entries.query_ids[entries.positives],
            entries.passage_ids[entries.positives],
            entries.positives,
            columns,
        )

    def _known_positives(self, query_ids: Tensor, passage_ids: Tensor, has_ids: bool) -> KnownPositives | None:
        self._ids_seen = self._ids_seen or has_ids
        if not (self.mask_duplicates and self._ids_seen):
            return None
        if self.bank is not None and self.bank.fill:
            entries = self.bank.entries()
            query_ids = torch.cat([query_ids, entries.query_ids])
            passage_ids = torch.cat([passage_ids, entries.passage_ids])
        return KnownPositives(query_ids, passage_ids)

    def _prepare_bank(self, dim: int, negatives: Tensor | None, like: Tensor) -> None:
        if self.bank_size == 0:
            return
        h = negatives.shape[1] if negatives is not None and self.bank_hard_negatives else 0
        if self.bank is None:
            self._make_bank(dim, h, self.bank_dtype or like.dtype, like.dtype, like.device)
        assert self.bank is not None
        if dim != self.bank.dim:
            raise ValueError(
                f"embeddings of size {dim} do not fit the bank of size {self.bank.dim}: a loss belongs to one encoder. "
                "Make a new BankedInfoNCE for another embedding size."
            )
        if h > self.bank.hard_negatives:
            self.bank.grow_hard_negatives(h)

    def _make_bank(
        self, dim: int, h: int, dtype: torch.dtype, mean_dtype: torch.dtype, device: torch.device | None
    ) -> None:
        self.bank = MemoryBank(self.bank_size, dim, h, dtype, self.query_bank_size, device)
        if self.drift_compensation == "mean":
            self.query_mean = RunningMean(dim, dtype=mean_dtype, device=device)
            self.passage_mean = RunningMean(dim, dtype=mean_dtype, device=device)

    def _enqueue(
        self, queries: Tensor, passages: Tensor, negatives: Tensor | None, ids: tuple[Tensor | None, ...]
    ) -> None:
        assert self.bank is not None
        query_ids, passage_ids, negative_ids = ids
        if not self.bank_hard_negatives:
            negatives = negative_ids = None
        if self.query_mean is not None and self.passage_mean is not None:
            queries = queries - self.query_mean.mean
            passages = passages - self.passage_mean.mean
            negatives = None if negatives is None else negatives - self.passage_mean.mean
        self.bank.enqueue(queries, passages, negatives, query_ids, passage_ids, negative_ids)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        # The bank is made by the first call; a state that holds one makes it here instead.
        passages = state_dict.get(prefix + "bank.passages")
        if passages is not None:
            mean = state_dict.get(prefix + "query_mean.mean")
            if (mean is not None) != (self.drift_compensation == "mean"):
                raise ConfigError(
                    f"this state was written with drift_compensation={'mean' if mean is not None else 'none'!r}, but "
                    f"this loss has {self.drift_compensation!r} and would misread its bank. Use the same setting."
                )
            if (
                passages.shape[0] != self.bank_size
                or state_dict[prefix + "bank.queries"].shape[0] != self.query_bank_size
            ):
                raise ConfigError(
                    f"this state holds a bank of {passages.shape[0]} passages and "
                    f"{state_dict[prefix + 'bank.queries'].shape[0]} queries, but this loss has bank_size="
                    f"{self.bank_size} and query_bank_size={self.query_bank_size}. Use the same sizes."
                )
            h = state_dict[prefix + "bank.negatives"].shape[1]
            device = self.bank.passages.device if self.bank is not None else passages.device
            mean_dtype = passages.dtype if mean is None else mean.dtype
            self._make_bank(passages.shape[1], h, passages.dtype, mean_dtype, device)
            self._ids_seen = True
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def extra_repr(self) -> str:
        return (
            f"bank_size={self.bank_size}, query_bank_size={self.query_bank_size}, temperature={self.temperature}, "
            f"similarity={self.similarity!r}, normalize_by={self.normalize_by!r}, "
            f"drift_compensation={self.drift_compensation!r}"
        )


class _LossWithGradients(torch.autograd.Function):
    """A loss whose gradients are known already.

    They are computed before the micro-batch enters the bank, because the bank is written in place: autograd would
    find other numbers in the rows that it saved. It also keeps nothing of the bank alive until backward.
    """

    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: list[Tensor], *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*gradients)
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *((g * grad_output).to(g.dtype) for g in ctx.saved_tensors)


def check_settings(
    bank_size: int,
    query_bank_size: int | None,
    temperature: float,
    similarity: str,
    normalize_by: str,
    drift_compensation: str,
) -> None:
    """Refuse settings that cannot work, before anything is allocated.

    Raises:
        ConfigError: naming the setting, its value and the way out.
    """
    if not isinstance(bank_size, int) or bank_size < 0:
        raise ConfigError(f"bank_size must be a whole number of at least 0, got {bank_size!r}")
    if query_bank_size is not None:
        if not isinstance(query_bank_size, int) or query_bank_size < 0:
            raise ConfigError(f"query_bank_size must be a whole number of at least 0, got {query_bank_size!r}")
        if query_bank_size > bank_size:
            raise ConfigError(
                f"query_bank_size={query_bank_size} is larger than bank_size={bank_size}: a banked query needs the "
                "passage it came with. Raise bank_size or lower query_bank_size."
            )
    if not 0 < temperature < float("inf"):
        raise ConfigError(f"temperature must be a positive number, got {temperature!r}")
    choices = {
        "similarity": (similarity, ("dot", "cos")),
        "normalize_by": (normalize_by, ("local", "all")),
        "drift_compensation": (drift_compensation, DRIFT_COMPENSATIONS),
    }
    for name, (value, allowed) in choices.items():
        if value not in allowed:
            raise ConfigError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
