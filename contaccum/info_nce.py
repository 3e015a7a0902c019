"""BankedInfoNCE: the InfoNCE loss of a micro-batch whose rows and columns are extended by memory banks.

It works on embeddings alone, so that any training loop can use it, and owns the bank. It encodes no text and steps no
optimizer. Letters in shapes: n pairs in the micro-batch, h hard negatives per query, m bank rows, d the embedding size.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import normalize

from contaccum.centering import CENTERINGS, GradientCentering, towers_to_center
from contaccum.distributed import from_first_rank, gather_batch, world_size
from contaccum.drift import DRIFT_COMPENSATIONS, MOVES_ENTRIES, DriftProbe, RunningMean
from contaccum.errors import ConfigError, check_choice
from contaccum.memory_bank import PAIRS_PER_ORIGIN, MemoryBank, check_bank_sizes
from contaccum.optimizer_steps import StepWatch
from contaccum.pairs import Guided, Ids, Pairs, PositivesTable, Scores, check_embeddings

logger = logging.getLogger(__name__)

_UNSEEN_PAIRS = 4096
_UNSEEN = "call end_update() of the BankedInfoNCE after each; until then all entries count as those of an older encoder"


class BankedInfoNCE(nn.Module):
    r"""InfoNCE over local and banked pairs, with gradients for the local ones.

    Rows are local and banked queries; columns are local and banked passages and hard negatives. Row i costs

        l_i = logsumexp_j s(i, j)/tau - s(i, i+)/tau

    with the similarity s, the temperature tau and i+, the passage that came with query i. Bank rows push on the local
    passages, which keeps the two encoders' gradient norms balanced. When nothing drifts and the bank holds exactly the
    rest of the batch, the accumulated gradient of ``normalize_by="local"`` equals that of the full batch.

    Args:
        bank_size: rows m of the bank, at most; see :class:`MemoryBank`. 0 is plain InfoNCE.
        query_bank_size: None or ``bank_size``; 0: the passage bank alone (``pre_batch``, the paper's "w/o M_q").
        temperature: tau > 0; 1.0 with dot product in the paper, 0.05 is usual with cosine.
        similarity: ``"dot"`` or ``"cos"``.
        normalize_by: ``"local"``: the sum of all row losses over n. ``"all"``: over n plus the bank rows, the
            paper's equations 8 and 9.
        mask_duplicates: leave out columns that hold a row's own positive again or another known positive of its
            query, by ids. False is the paper's behaviour. Without ids there is nothing to mask.
        false_negative_margin: leave out columns whose similarity to a row is above that of its own positive by more
            than this (Qwen3-Embedding: 0.1, with cosine), as it was when they met. None: none.
        guide_margin, guide_margin_strategy: where a guide's embeddings come with a micro-batch, leave out columns whose
            cosine with a row, by the guide, is above that of its own positive less ``guide_margin`` (``"absolute"``),
            or less that share of it (``"relative"``): GISTEmbed's rule, arXiv 2402.16829.
        bank_hard_negatives: keep hard negatives in the bank as columns.
        drift_compensation: ``"mean"`` moves banked entries along with the mean of their tower; ``"auto"`` also retires
            those that :meth:`observe_probe` shows to have drifted too far; ``"fresh"`` uses none older than the last
            :meth:`end_update`; ``"none"`` is the paper. See docs/drift.md.
        center_gradients: ``"both"``, ``"passages"`` or ``"queries"`` take the mean out of the gradients of that tower's
            embeddings, so that no update moves it as a whole; ``"none"``; ``"auto"``: passages while ``drift_compensation``
            is ``"auto"`` and entries of an older encoder are in use. See docs/drift.md.
        pairs_per_update: pairs between two optimizer steps, of all ranks that share the bank: that mean is then taken
            over the update. None: over each micro-batch by itself. See :meth:`begin_update`.
        bank_weight: how often a banked pair counts beside a local one, as a negative and as a row; above 1: how many
            pairs the bank counts as together. A banked row's own positive counts once.
        bank_dtype: storage dtype of the bank. None: that of the embeddings, float32 at least.
        gather_across_devices: build the batch of all ranks of ``torch.distributed`` before the loss, in their order;
            they may bring different numbers of pairs, even none. Every rank then holds the same bank and returns the
            same loss, and gradients are times the number of ranks, for a reduction that averages, as DDP's and FSDP's.

    No value is read on the host: a micro-batch that is not finite is not refused. Its loss is returned as it is, its
    rows are marked and never used, and ``last["enqueued"]`` is 0.

    Attributes:
        positives: a :class:`PositivesTable` of pairs that are never negatives of each other, or None. Not in the state.
        bank: the :class:`MemoryBank`, None before the first call, which sets the embedding size.
        last: diagnostics of the last call, detached tensors and ints: ``local_loss`` and ``bank_loss`` (mean over local
            rows and over bank rows in use), ``columns`` (per local row, before masks), ``masked`` (share of them that
            are left out, positives aside), ``bank_rows``, ``bank_fill`` (entries in use after it), ``enqueued`` (pairs
            that the bank took), ``embedding_spread`` (squared distance of local passages from their mean, over their
            squared length); and what :meth:`drift_record` reads.

    Raises:
        ConfigError (a ValueError): for settings out of range.

    Source: arXiv 2406.12356; the "local" normalisation, the masks and the drift compensation are ours.
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
        center_gradients: Literal["auto", "both", "passages", "queries", "none"] = "auto",
        pairs_per_update: int | None = None,
        bank_weight: float = 1.0,
        false_negative_margin: float | None = None,
        guide_margin: float = 0.0,
        guide_margin_strategy: Literal["absolute", "relative"] = "absolute",
    ) -> None:
        super().__init__()
        check_bank_sizes(bank_size, query_bank_size)
        if not 0 < bank_weight < math.inf:
            raise ConfigError(f"bank_weight must be a positive number, got {bank_weight!r}")
        if not 0 < temperature < math.inf:
            raise ConfigError(f"temperature must be a positive number, got {temperature!r}")
        if false_negative_margin is not None and not false_negative_margin >= 0:
            raise ConfigError(f"false_negative_margin must be at least 0, got {false_negative_margin!r}")
        check_choice("guide_margin_strategy", guide_margin_strategy, ("absolute", "relative"))
        check_choice("similarity", similarity, ("dot", "cos"))
        check_choice("normalize_by", normalize_by, ("local", "all"))
        check_choice("drift_compensation", drift_compensation, DRIFT_COMPENSATIONS)
        check_choice("center_gradients", center_gradients, CENTERINGS)
        self.bank_size, self.query_bank_size = bank_size, query_bank_size
        self.temperature, self.similarity, self.normalize_by = temperature, similarity, normalize_by
        self.mask_duplicates, self.bank_hard_negatives = mask_duplicates, bank_hard_negatives
        self.drift_compensation, self.bank_dtype = drift_compensation, bank_dtype
        self.gather_across_devices, self.center_gradients = gather_across_devices, center_gradients
        self.centering, self.bank_weight = GradientCentering(pairs_per_update), bank_weight
        self.false_negative_margin = false_negative_margin
        self.guide_margin, self.guide_margin_strategy = guide_margin, guide_margin_strategy
        self.bank: MemoryBank | None = None
        self.passage_mean: RunningMean | None = None
        self.query_mean: RunningMean | None = None
        self.probe: DriftProbe | None = None
        self.positives: PositivesTable | None = None
        self.steps = StepWatch()
        self._ended_at, self._warned = 0, False  # pairs seen when an update last ended
        self.last: dict[str, Any] = {}

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
        """The loss of one micro-batch, a scalar; in training mode and with gradients enabled, also enqueues it.

        Args:
            queries, passages: (n, d); row i of ``passages`` is the positive of row i of ``queries``.
            negatives: (n, h, d), the hard negatives of each query.
            query_ids, passage_ids, negative_ids: int64 (n,), (n,), (n, h). Equal ids mean the same text.
            guide: the same as a guide embeds them, (n, g), (n, g), (n, h, g); with every micro-batch or with none.

        Raises:
            ValueError: for shapes that do not agree, an embedding size other than the bank's or its guide's.
        """
        ranks, ids = world_size() if self._shared else 1, Ids(query_ids, passage_ids, negative_ids)
        check_embeddings(queries, passages, negatives, ids, may_be_empty=ranks > 1)
        inputs = [queries, passages] if negatives is None else [queries, passages, negatives]
        guided = [x.detach() for x in guide if x is not None]
        if guided and [x.shape[:-1] for x in guided] != [x.shape[:-1] for x in inputs]:
            shapes = ", ".join(str(tuple(x.shape)) for x in guided)
            raise ValueError(f"the guide must embed the same texts, got {shapes} for n={len(queries)}")
        enqueues = self.training and torch.is_grad_enabled()
        learns = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
        if enqueues:
            self._notice_update()
        if enqueues and learns:
            self.steps.follow(*inputs)
        everyone, own = [x.detach() for x in inputs], slice(0, len(queries))
        if ranks > 1:
            everyone, ids, own = gather_batch(everyone, ids)
            guided = gather_batch(guided, Ids())[0] if guided else []
        dtype = torch.promote_types(queries.dtype, torch.float32)
        with torch.autocast(queries.device.type, enabled=False):
            relative = self.guide_margin_strategy == "relative"
            seen = Guided.of([x.to(dtype) for x in guided], self.guide_margin, relative) if guided else None
            step = self._losses([x.to(dtype).requires_grad_(learns) for x in everyone], ids, seen, enqueues)
            gradients = self._gradients(step) if learns else []
            self.last["enqueued"] = self._enqueue(step, self.bank) if enqueues and self.bank is not None else 0
            self.last["bank_fill"] = 0 if self.bank is None else self.bank.in_use
        if not learns:
            return step.loss
        if ranks > 1:  # each computed the loss of the whole batch, and a reduction that averages follows
            gradients = [g[own] * ranks for g in gradients]
        parts = [g.to(x.dtype) for g, x in zip(gradients, inputs, strict=True)]
        return _HandOver.apply(step.loss.detach(), parts, *inputs)

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        if self.steps.stepped:  # which no state holds
            self._notice_update()
        super()._save_to_state_dict(*args, **kwargs)

    # The stages of a micro-step --------------------------------------------------------------------------------------

    def _losses(self, leaves: list[Tensor], ids: Ids, guide: Guided | None, observe: bool) -> _MicroStep:
        """Scores and row losses of queries (n, d), passages (n, d) and, if any, negatives (n, h, d)."""
        units = [normalize(x, dim=-1) for x in leaves] if self.similarity == "cos" else leaves
        queries, columns = units[0], torch.cat([units[1][:, None], *units[2:]], dim=1)
        size = 0 if guide is None else guide.columns.shape[2]
        bank = self._prepare_bank(columns.shape[2], columns.shape[1] - 1, columns, size)
        means: list[tuple[RunningMean, tuple[Tensor, ...]]] = []
        if self.passage_mean is not None and self.query_mean is not None:
            if observe and self.probe is None:
                towers = ((self.passage_mean, units[1]), (self.query_mean, queries))
                means = [(mean, mean.after(x.detach())) for mean, x in towers]
            # A row loss stays the same when all columns move by one vector. An entry is what it was beside the mean of
            # its tower then, so a new one is what it is beside that of now.
            columns = columns - (means[0][1][0] if means else self.passage_mean.mean)
        margin = None if self.false_negative_margin is None else self.false_negative_margin / self.temperature
        pairs = Pairs.of(queries, columns, ids if self.mask_duplicates else Ids())._replace(margin=margin, guide=guide)
        weight = 1.0
        if bank is None:
            scores = pairs.scores(queries / self.temperature, self.positives)
            bank_losses, bank_rows = queries.new_zeros(0), torch.zeros((), dtype=torch.int64, device=queries.device)
        else:
            weight = self.bank_weight if self.bank_weight <= 1 else min(self.bank_weight / max(bank.in_use, 1), 1.0)
            scores = bank.scores(pairs, self.positives, None if self.query_mean is None else self.query_mean.mean)
            bank_losses, bank_rows = bank.row_losses(scores, math.log(weight))
        log_sum = torch.cat([scores.own.flatten(1), scores.by_block + math.log(weight)], dim=1).logsumexp(1)
        local_losses = log_sum - scores.positive
        n, passages = len(queries), units[1].detach()
        share = n + (weight * bank_rows.to(log_sum) if self.normalize_by == "all" else 0)
        loss = (local_losses.sum() + weight * bank_losses.sum()) / share
        spread = passages.var(0, correction=0).sum() / passages.square().sum() * n
        in_use = queries.new_zeros(0, dtype=torch.bool) if bank is None else bank.absent[: bank.span].flatten() == 0
        self.last = {
            "local_loss": local_losses.detach().mean(),
            "bank_loss": bank_losses.detach().sum() / bank_rows.clamp_min(1),
            "columns": n * columns.shape[1] + (0 if bank is None else bank.in_use * bank.columns.shape[1]),
            "masked": scores.masked(in_use),
            "bank_rows": bank.in_use if bank is not None and len(bank.queries) else 0,
            "embedding_spread": spread if n > 1 else spread * math.nan,
        }
        return _MicroStep(leaves, pairs, scores, log_sum, share, loss, means)

    def _gradients(self, step: _MicroStep) -> list[Tensor]:
        """Gradients of the loss; also notes where the local rows' softmax lies, which comes with them."""
        bank, middle = self.bank, [step.pairs.queries, step.pairs.columns]
        wanted = middle if bank is None else [*middle, step.scores.of_columns]
        queries, columns, *weights = torch.autograd.grad(step.loss, wanted)
        if bank is not None:
            self.last |= self._masses(step, bank, weights[0].sum(0) * step.share)
        aged = bank is not None and self.drift_compensation == "auto" and bank.aged > 0
        found = self.centering([queries, columns], towers_to_center(self.center_gradients, aged))
        return list(torch.autograd.grad(middle, step.leaves, found))

    @torch.no_grad()
    def _masses(self, step: _MicroStep, bank: MemoryBank, weights: Tensor) -> dict[str, Tensor]:
        """Where the local rows' softmax lies, of which ``weights`` (m (1 + h),) are on the bank's columns.

        Fresh columns are the in-batch negatives and entries of the same update; the positives do not count.
        """
        n, oldest_first = len(step.log_sum), torch.arange(bank.first, bank.pairs, device=weights.device)
        on_passages = weights.view(bank.span, -1)[oldest_first % bank.slots, 0]
        aged, fresh = on_passages[: bank.aged].sum(), on_passages[bank.aged :].sum()
        local = (step.scores.own[:, :, 0] - step.log_sum[:, None]).exp()
        in_batch = local.sum() - local.diagonal().sum()
        of_fresh = (in_batch + fresh) / (n - 1 + bank.in_use - bank.aged)
        return {
            "bank_mass": (aged + fresh) / n,
            "bank_mass_aged": aged / bank.aged / of_fresh,
            "in_batch_mass": in_batch / n,
        }

    @torch.no_grad()
    def _enqueue(self, step: _MicroStep, bank: MemoryBank) -> Tensor:
        """Let the micro-batch into the bank; returns how many pairs of it the bank took."""
        finite = (step.loss + bank.greatest(step.pairs)).isfinite()
        for mean, state in step.means:
            mean.set(state, finite)
        origin = None if self.query_mean is None else self.query_mean.mean
        bank.append(step.pairs, step.scores, finite, origin)
        if origin is not None and self.probe is None and bank.pairs <= PAIRS_PER_ORIGIN:
            bank.origins.copy_(origin.expand_as(bank.origins))  # of few pairs a mean moves by chance
        return finite * len(step.pairs.queries)

    # What a training loop says ---------------------------------------------------------------------------------------

    def begin_update(self, pairs: int) -> None:
        """Say how many pairs the coming micro-batches will have until the optimizer steps, where updates differ."""
        self.centering.begin_update(pairs)

    def end_update(self) -> None:
        """Say that the encoder has been moved: ages of entries are counted in updates.

        Steps of torch's optimizers are noticed at the next micro-step, or here, and count once.
        """
        self.steps.stepped = False
        self.centering.begin_update(self.centering.pairs)
        if self.bank is not None:
            self._ended_at = self.bank.pairs
            self.bank.end_update()
            if self.drift_compensation == "fresh":
                self.bank.retire_all()

    def _notice_update(self) -> None:
        """End the update that an optimizer has ended by now, unless that was said."""
        bank, stepped, self.steps.stepped = self.bank, self.steps.stepped, False
        if stepped and (bank is None or bank.pairs > self._ended_at):
            self.end_update()
        if bank is None:
            return
        if bank.updates == 0 and self.probe is None and bank.pairs >= max(4 * self.bank_size, _UNSEEN_PAIRS):
            if not self._warned:
                logger.warning(f"no update was seen in {bank.pairs:,} pairs: {_UNSEEN}")
            self._warned = True
            bank.encoder_moved()  # as far as anybody knows

    @torch.no_grad()
    def observe_probe(self, queries: Tensor, passages: Tensor) -> None:
        """Embeddings of the same S pairs of texts as at the last call, encoded again now: (S, d) each.

        Call it before the first micro-batch, and again after updates, every 64 pairs at the most: the towers are taken
        to have moved as the probe's means have. With ``"auto"`` it sets how many entries are in use, and reads a small
        tensor from the device for it; with ``"fresh"`` and ``"none"`` it only measures. Ranks that share a bank call it
        together, each with texts of its own (S may differ, and be 0): the probe is all of them.
        """
        check_embeddings(queries, passages, None, Ids(), may_be_empty=self._shared)
        fresh = [queries.detach(), passages.detach()]
        if self._shared:
            fresh, *_ = gather_batch(fresh, Ids())
        fresh = [x.to(torch.promote_types(x.dtype, torch.float32)) for x in fresh]
        if self.similarity == "cos":
            fresh = [normalize(x, dim=-1) for x in fresh]
        self._notice_update()
        bank = self._prepare_bank(queries.shape[1], 0, fresh[0])
        if bank is None:
            return
        if self.probe is None:
            self.probe = DriftProbe(fresh[0].shape, self.bank_size, fresh[0].dtype, fresh[0].device)
        shift = self.probe.observe(fresh[0], fresh[1], bank.updates, bank.pairs)
        if self.passage_mean is not None and self.query_mean is not None:
            self.query_mean.mean += shift[0]
            self.passage_mean.mean += shift[1]
        if self.drift_compensation == "auto":
            limit = int(min(self.probe.age_limit(self.probe.residuals()[:, 1]), self.bank_size))
            # The same on all ranks already, unless their devices round differently.
            bank.limit = int(from_first_rank(torch.tensor(limit))) if self._shared else limit
            bank.encoder_moved()

    def drift_record(self) -> dict[str, float]:
        """What is known about the age of the bank, for a log line: reads the device.

        Returns:
            ``bank_age`` in updates, the shares of the last micro-step's softmax ``bank_mass``, ``in_batch_mass`` and
            ``bank_mass_aged``, and :meth:`DriftProbe.record`; docs/drift.md says what they tell.
        """
        if self.bank is None or self.bank.pairs == 0:
            return {}
        masses = {key: float(self.last.get(key, math.nan)) for key in ("in_batch_mass", "bank_mass", "bank_mass_aged")}
        record = {"bank_age": self.bank.age} | {key: x for key, x in masses.items() if math.isfinite(x)}
        return record | (self.probe.record(self.bank.age) if self.probe is not None else {})

    # The bank's making -----------------------------------------------------------------------------------------------

    @property
    def _shared(self) -> bool:
        """Whether all ranks hold one and the same bank."""
        return self.gather_across_devices and world_size() > 1

    def _prepare_bank(self, dim: int, negatives: int, like: Tensor, guide: int | None = None) -> MemoryBank | None:
        """Make the bank, or fit it to what comes; None for plain InfoNCE."""
        if not self.bank_size:
            return None
        negatives = negatives if self.bank_hard_negatives else 0
        bank = self.bank or self._make_bank(dim, negatives, self.bank_dtype or like.dtype, like.dtype, like.device)
        if bank.absent.device != like.device:
            self.to(like.device)  # the model moved, or a state was loaded elsewhere
        bank.fit(dim, negatives, guide)
        return bank

    def _make_bank(
        self, dim: int, negatives: int, dtype: torch.dtype, score_dtype: torch.dtype, device: torch.device
    ) -> MemoryBank:
        self.bank = MemoryBank(
            self.bank_size, dim, negatives, dtype, self.query_bank_size, device, self.temperature, score_dtype
        )
        if self.drift_compensation in MOVES_ENTRIES:
            self.passage_mean = RunningMean(dim, score_dtype, device)
            self.query_mean = RunningMean(dim, score_dtype, device)
        return self.bank

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        # The bank is made by the first call; a state that holds one makes it here instead.
        state = {key.removeprefix(prefix): value for key, value in state_dict.items() if key.startswith(prefix)}
        if "bank.passages" in state:
            raise ConfigError("this state is of contaccum 0.1, whose bank had no blocks: go on from the weights alone")
        if "bank.columns" in state:
            columns = state["bank.columns"]
            there = int(state["bank._extra_state"][0]), len(state["bank.queries"]) > 0, "passage_mean.mean" in state
            if there != (self.bank_size, self.query_bank_size != 0, self.drift_compensation in MOVES_ENTRIES):
                raise ConfigError("this state is of another bank_size, query_bank_size or drift_compensation")
            device = columns.device if self.bank is None else self.bank.absent.device
            score_dtype, guide = state["bank.positive"].dtype, state.get("bank.guide.columns")
            bank = self._make_bank(columns.shape[2], columns.shape[1] - 1, columns.dtype, score_dtype, device)
            bank.fit(columns.shape[2], columns.shape[1] - 1, None if guide is None else guide.shape[2])
            probe = state.get("probe.embeddings")
            self.probe = None if probe is None else DriftProbe(probe.shape[2:], self.bank_size, probe.dtype, device)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


class _MicroStep(NamedTuple):
    """What the loss of a micro-batch is made of."""

    leaves: list[Tensor]  # what gradients are taken of
    pairs: Pairs
    scores: Scores
    log_sum: Tensor  # (n,) of local rows, over all columns
    share: Tensor | int  # what the sum of row losses is divided by
    loss: Tensor
    means: list[tuple[RunningMean, tuple[Tensor, ...]]]  # and what they will be, where they follow micro-batches


class _HandOver(torch.autograd.Function):
    """Gradients known in forward: the bank is written in place before backward, which would find other numbers."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: list[Tensor], *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*gradients)
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *((g * grad_output).to(g.dtype) for g in ctx.saved_tensors)
