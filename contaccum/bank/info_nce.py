"""BankedInfoNCE: the InfoNCE loss of a micro-batch whose rows and columns are extended by memory banks.

It works on embeddings alone, so that any training loop can use it, and owns the bank. It encodes no text and steps no
optimizer. Letters in shapes: n pairs in the micro-batch, h hard negatives per query, m bank rows, d the embedding size.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from contaccum.bank.autograd import HandOver
from contaccum.bank.banks import Banks
from contaccum.bank.centering import GradientCentering
from contaccum.bank.directions import DIRECTIONS, Direction, facts, in_order, masses, meet, together
from contaccum.bank.drift import RESIDUAL_BOUND, WEIGHED_BOUND, DriftProbe, RunningMean
from contaccum.bank.logits import Guided, Hardness, Ids, Pairs, PositivesTable, check_embeddings
from contaccum.bank.memory_bank import PAIRS_PER_ORIGIN, MemoryBank, check_bank_sizes
from contaccum.bank.update_clock import StepWatch
from contaccum.distributed import gather_batch, over_ranks, world_size
from contaccum.errors import ConfigError, check_choice

logger = logging.getLogger(__name__)

MOST_SCALE = 100.0
"""1 / temperature at most, where it is learned, as in CLIP."""
_UNSEEN_PAIRS = 4096
_UNSEEN = "call end_update() of the BankedInfoNCE after each; until then all entries count as those of an older encoder"


class BankedInfoNCE(Banks):
    r"""InfoNCE over local and banked pairs, with gradients for the local ones.

    Rows are local and banked queries; columns are local and banked passages and hard negatives. Row i costs

        l_i = logsumexp_j s(i, j)/tau - s(i, i+)/tau

    with the similarity s, the temperature tau and i+, the passage that came with query i. Bank rows push on the local
    passages, which keeps the two encoders' gradient norms balanced. When nothing drifts and the bank holds exactly the
    rest of the batch, the accumulated gradient of ``normalize_by="local"`` equals that of the full batch.

    Args:
        bank_size: rows m of the bank, at most; see `MemoryBank`. 0 is plain InfoNCE.
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
        hardness_mode, hardness_strength: ``"in_batch_negatives"``, ``"hard_negatives"`` (a row's own) or
            ``"all_negatives"`` of ``query_to_doc`` have their similarity times the strength added to their logits, with
            no gradient: arXiv 2503.04812 (9), 2509.20354 (5). None: none.
        directions, partition_mode: of MultipleNegativesRankingLoss, each with a bank of its own; ``"joint"``: a pair's
            row has one softmax over all of them; ``"per_direction"``: the mean of one loss for each.
        learn_temperature: ``log_scale``, the logarithm of 1 / tau, is a parameter, as in CLIP, and 1 / tau at most 100.
            Its gradient is that of local rows. Banked log-sums are of the tau that they were computed with.
        bank_hard_negatives: keep hard negatives in the bank as columns.
        drift_compensation: ``"mean"`` moves banked entries along with the mean of their tower; ``"auto"`` also retires
            those that `observe_probe` shows to have drifted too far; ``"fresh"`` uses none older than the last
            `end_update`; ``"none"`` is the paper. See docs/drift.md.
        center_gradients: ``"both"``, ``"passages"`` or ``"queries"`` take the mean out of the gradients of that tower's
            embeddings, so that no update moves it as a whole; ``"none"``; ``"auto"``: passages, while
            ``drift_compensation`` is ``"auto"`` and entries of an older encoder are in use. See docs/drift.md.
        pairs_per_update: pairs between two optimizer steps, of all ranks that share the bank: that mean is then taken
            over the update. None: over each micro-batch by itself. See `begin_update`.
        bank_weight: how often a banked pair counts beside a local one, as a negative and as a row; above 1: how many
            pairs the bank counts as together; ``"auto"``: less, the further `observe_probe` shows its age to
            have drifted, until it retires later than otherwise. A banked row's own positive counts once.
        bank_dtype: storage dtype of the bank. None: that of the embeddings, float32 at least.
        gather_across_devices: build the batch of all ranks of ``torch.distributed`` before the loss, in their order;
            they may bring different numbers of pairs, even none. Every rank then holds the same bank and returns the
            same loss, and gradients are times the number of ranks, for a reduction that averages, as DDP's and FSDP's.

    No value is read on the host: a micro-batch that is not finite is not refused. Its loss is returned as it is, its
    rows are marked and never used, and ``last["enqueued"]`` is 0.

    Attributes:
        positives: a `PositivesTable` of pairs that are never negatives of each other, or None. Not in the state.
        expects_probe: whether `observe_probe` will be called soon; until then the means of the towers stay as they are,
            rather than follow those of micro-batches. Not in the state.
        bank: the `MemoryBank`, None before the first call, which sets the embedding size.
        last: diagnostics of the last call, detached tensors and ints: ``local_loss`` and ``bank_loss`` (mean over local
            rows and over bank rows in use), ``columns`` (per local row, before masks), ``masked`` (share of them that
            are left out, positives aside), ``bank_rows``, ``bank_fill`` (entries in use after it), ``enqueued`` (pairs
            that the bank took), ``embedding_spread`` (squared distance of local passages from their mean, over their
            squared length), ``temperature`` where it is learned; and what `drift_record` reads.

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
        bank_weight: float | Literal["auto"] = 1.0,
        false_negative_margin: float | None = None,
        guide_margin: float = 0.0,
        guide_margin_strategy: Literal["absolute", "relative"] = "absolute",
        hardness_mode: Literal["in_batch_negatives", "hard_negatives", "all_negatives"] | None = None,
        hardness_strength: float = 0.0,
        directions: Sequence[str] = ("query_to_doc",),
        partition_mode: Literal["joint", "per_direction"] = "joint",
        learn_temperature: bool = False,
    ) -> None:
        check_bank_sizes(bank_size, query_bank_size)
        if bank_weight != "auto" and not (isinstance(bank_weight, (int, float)) and 0 < bank_weight < math.inf):
            raise ConfigError(f"bank_weight must be a positive number or auto, got {bank_weight!r}")
        if bank_weight == "auto" and drift_compensation != "auto":
            raise ConfigError(f"bank_weight=auto with drift_compensation={drift_compensation}: nothing is known of age")
        if not 0 < temperature < math.inf:
            raise ConfigError(f"temperature must be a positive number, got {temperature!r}")
        if false_negative_margin is not None and not false_negative_margin >= 0:
            raise ConfigError(f"false_negative_margin must be at least 0, got {false_negative_margin!r}")
        check_choice("guide_margin_strategy", guide_margin_strategy, ("absolute", "relative"))
        hard = (None, "in_batch_negatives", "hard_negatives", "all_negatives")
        check_choice("hardness_mode", hardness_mode, hard)
        if not 0 <= hardness_strength < math.inf or (hardness_mode is not None and hardness_strength == 0):
            raise ConfigError(f"hardness_strength must be above 0 with a hardness_mode, got {hardness_strength!r}")
        check_choice("similarity", similarity, ("dot", "cos"))
        check_choice("normalize_by", normalize_by, ("local", "all"))
        check_choice("drift_compensation", drift_compensation, ("auto", "mean", "fresh", "none"))
        kept = bank_size, query_bank_size, bank_dtype, bank_hard_negatives, drift_compensation, temperature
        super().__init__(*kept, in_order(directions, partition_mode), penalties=hardness_mode is not None)
        self.similarity, self.normalize_by, self.mask_duplicates = similarity, normalize_by, mask_duplicates
        self.gather_across_devices, self.center_gradients = gather_across_devices, center_gradients
        self.centering, self.bank_weight = GradientCentering(center_gradients, pairs_per_update), bank_weight
        self.false_negative_margin = false_negative_margin
        self.guide_margin, self.guide_margin_strategy = guide_margin, guide_margin_strategy
        self.hardness_mode, self.hardness_strength = hardness_mode, hardness_strength
        self.partition_mode = partition_mode
        if learn_temperature and temperature * MOST_SCALE < 1:
            raise ConfigError(f"learn_temperature with temperature={temperature}: it must be {1 / MOST_SCALE} or more")
        self.log_scale = nn.Parameter(torch.tensor(-math.log(temperature))) if learn_temperature else None
        self.positives: PositivesTable | None = None
        self.expects_probe = False
        self.steps = StepWatch()
        self._ended_at, self._warned = 0, False  # pairs seen when an update last ended
        self.last: dict[str, Any] = {}

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
        """The loss of one micro-batch, a scalar; in training mode and with gradients enabled, also enqueues it.

        Args:
            queries, passages: (n, d); row i of ``passages`` is the positive of row i of ``queries``.
            negatives: (n, h, d), the hard negatives of each query.
            query_ids, passage_ids, negative_ids: int64 (n,), (n,), (n, h). Equal ids mean the same text. With a last
                dimension of two, a text has two ids, and either may be equal.
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
            self.steps.record_forward()
        everyone, own = [x.detach() for x in inputs], slice(0, len(queries))
        if ranks > 1:
            everyone, ids, own = gather_batch(everyone, ids)
            guided = gather_batch(guided, Ids())[0] if guided else []
        dtype = torch.promote_types(queries.dtype, torch.float32)
        with torch.autocast(queries.device.type, enabled=False):
            relative = self.guide_margin_strategy == "relative"
            seen = Guided.of([x.to(dtype) for x in guided], self.guide_margin, relative) if guided else None
            step = self._losses([x.to(dtype).requires_grad_(learns) for x in everyone], ids, seen, enqueues)
            gradients = self._gradients(step, centers=enqueues) if learns else []
            self.last["enqueued"] = self._enqueue(step, self.bank) if enqueues and self.bank is not None else 0
            self.last["bank_fill"] = 0 if self.bank is None else self.bank.in_use
        if not learns:
            return step.loss
        gradients, of_scale = gradients[: len(inputs)], gradients[len(inputs) :]
        if ranks > 1:  # each computed the loss of the whole batch, and a reduction that averages follows
            gradients = [g[own] * ranks for g in gradients]
        if self.log_scale is not None:  # which no reduction knows
            inputs.append(self.log_scale)
            gradients += [over_ranks("SUM", g) / world_size() for g in of_scale]
        return HandOver.apply(step.loss.detach(), gradients, *inputs)

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
        bank = self.prepare(columns.shape[2], columns.shape[1] - 1, columns, size)
        means: list[tuple[RunningMean, tuple[Tensor, ...]]] = []
        if observe and self._follows_micro_batches:
            towers = ((self.query_mean, queries), (self.passage_mean, units[1]))
            means = [(mean, mean.after(x.detach())) for mean, x in towers if mean is not None]
        # A row loss stays the same when all columns move by one vector. An entry is what it was beside the mean of its
        # tower then, so a new one is what it is beside that of now.
        now = [state[0] for _, state in means] or self.origins
        temperature: float | Tensor = self.temperature
        log_scale = None
        if self.log_scale is not None:
            if self.training:
                self.log_scale.data.clamp_(max=math.log(MOST_SCALE))  # else it may run away
            log_scale = self.log_scale.detach().requires_grad_(leaves[0].requires_grad)
            temperature = (-log_scale).exp()
        still = temperature.detach() if isinstance(temperature, Tensor) else temperature
        whole = Pairs.of(queries, columns, ids if self.mask_duplicates else Ids())._replace(
            temperature=temperature,
            margin=None if self.false_negative_margin is None else self.false_negative_margin / still,
            guide=guide,
            hardness=Hardness.of(self.hardness_mode, self.hardness_strength, still),
        )
        weight = 1.0
        if bank is not None and self.bank_weight != "auto":
            weight = self.bank_weight if self.bank_weight <= 1 else min(self.bank_weight / max(bank.in_use, 1), 1.0)
        given = now, self.origins, self.positives, math.log(weight)
        found = meet(self.directions, self.partition_mode, whole, self.banks, *given)
        log_sums, positives = together(found, self.partition_mode), found[0].positives
        local_losses, bank_losses = (x - y for x, y in zip(log_sums, positives, strict=True))
        counts = queries.new_zeros(0) if bank is None else weight * bank.row_weights()
        share = len(queries) + (counts.sum() if self.normalize_by == "all" else 0)
        loss = (local_losses.sum() + (bank_losses * counts).sum()) / share
        self.last = {
            "local_loss": local_losses.detach().mean(),
            "bank_loss": (bank_losses.detach() * counts).sum() / counts.sum().clamp_min(torch.finfo(counts.dtype).tiny),
            **facts(found if self.partition_mode == "joint" else found[:1], bank, units[1].detach()),
            **({} if log_scale is None else {"temperature": still}),
        }
        return _MicroStep(leaves, log_scale, [queries, columns], found, log_sums[0], share, loss, means)

    def _gradients(self, step: _MicroStep, centers: bool) -> list[Tensor]:
        """Compute the gradients of the loss, and record where the local rows' softmax lies.

        ``centers``: whether this micro-step belongs to a training update, whose gradients are centred.
        """
        bank, base = self.bank, step.found[0]
        wanted = [*step.middle, *([] if step.log_scale is None else [step.log_scale])]
        wanted += [] if bank is None else [base.scores.of_columns]
        queries, columns, *others = torch.autograd.grad(step.loss, wanted)
        if bank is not None:
            self.last |= masses(base, step.log_sum, bank, others.pop().sum(0) * step.share)
        gradients = [queries, columns]
        if centers:
            aged = bank is not None and self.drift_compensation == "auto" and bank.aged > 0
            gradients = self.centering(gradients, aged)
        return [*torch.autograd.grad(step.middle, step.leaves, gradients), *others]

    @torch.no_grad()
    def _enqueue(self, step: _MicroStep, bank: MemoryBank) -> Tensor:
        """Let the micro-batch into the banks; returns how many pairs of it they took."""
        finite = (step.loss + bank.greatest(step.found[0].pairs)).isfinite()
        for mean, state in step.means:
            mean.set(state, finite)
        for (name, one), direction in zip(self.banks.items(), step.found, strict=True):
            origin = self.origins[DIRECTIONS[name][0]]
            one.append(direction.pairs, direction.scores, finite, origin)
            if origin is not None and self._follows_micro_batches and one.pairs <= PAIRS_PER_ORIGIN:
                one.origins.copy_(origin.expand_as(one.origins))  # of few pairs a mean moves by chance
        return finite * len(step.middle[0])

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
        for bank in self.banks.values():
            bank.end_update()
            if self.drift_compensation == "fresh":
                bank.retire_all()

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
            for one in self.banks.values():
                one.encoder_moved()  # as far as anybody knows

    @torch.no_grad()
    def observe_probe(self, queries: Tensor, passages: Tensor) -> None:
        """Embeddings of the same S pairs of texts as at the last call, encoded again now: (S, d) each.

        Call it before the first micro-batch, and again after updates, every 64 pairs at the most: the towers are taken
        to have moved as the probe's means have. With ``"auto"`` it sets how many entries are in use, and reads a small
        tensor from the device for it; with ``"fresh"`` and ``"none"`` it only measures. Ranks that share a bank call it
        together, each with texts of its own (S may differ, and be 0): the probe is all of them.

        Raises:
            ValueError: for fewer than two pairs.
        """
        check_embeddings(queries, passages, None, Ids(), may_be_empty=self._shared)
        fresh = [queries.detach(), passages.detach()]
        if self._shared:
            fresh, *_ = gather_batch(fresh, Ids())
        if len(fresh[0]) < 2:
            raise ValueError("a probe of one pair has no spread to measure drift by: pass eight pairs, or two at least")
        fresh = [x.to(torch.promote_types(x.dtype, torch.float32)) for x in fresh]
        if self.similarity == "cos":
            fresh = [normalize(x, dim=-1) for x in fresh]
        self._notice_update()
        bank = self.prepare(queries.shape[1], 0, fresh[0])
        if bank is None:
            return
        is_first = self.probe is None
        if self.probe is None:
            self.probe = DriftProbe(fresh[0].shape, self.bank_size, fresh[0].dtype, fresh[0].device)
        shift = self.probe.observe(fresh[0], fresh[1], bank.updates, bank.pairs)
        for mean, moved in zip((self.query_mean, self.passage_mean), shift, strict=True):
            if mean is not None:
                mean.mean += moved
        if self.drift_compensation == "auto":
            weighs, towers = self.bank_weight == "auto", {DIRECTIONS[name][1] for name in self.directions}
            residuals = self.probe.residuals()[:, sorted(towers)].amax(1)
            bound = WEIGHED_BOUND if weighs else RESIDUAL_BOUND
            limit = int(min(self.probe.age_limit(residuals, bound), self.bank_size))
            # The same on all ranks already, unless their devices round differently.
            limit = int(over_ranks("MIN", torch.tensor(limit, device=fresh[0].device))) if self._shared else limit
            for one in self.banks.values():
                one.limit = limit
                if not is_first:  # which may come within an update, before anything has moved
                    one.encoder_moved()
                if weighs:
                    one.weigh(partial(self.probe.log_weight, residuals.tolist()))

    def drift_record(self) -> dict[str, float]:
        """What is known about the age of the bank, for a log line: reads the device.

        Returns:
            ``bank_age`` in updates, the shares of the last micro-step's softmax ``bank_mass``, ``in_batch_mass`` and
            ``bank_mass_aged``, and `DriftProbe.record`; docs/drift.md says what they tell.
        """
        if self.bank is None or self.bank.pairs == 0:
            return {}
        masses = {key: float(self.last.get(key, math.nan)) for key in ("in_batch_mass", "bank_mass", "bank_mass_aged")}
        record = {"bank_age": self.bank.age} | {key: x for key, x in masses.items() if math.isfinite(x)}
        return record | (self.probe.record(self.bank.age) if self.probe is not None else {})

    @property
    def _follows_micro_batches(self) -> bool:
        """Whether the means of the towers are estimated from micro-batches, because no probe measures them."""
        return self.probe is None and not self.expects_probe

    @property
    def _shared(self) -> bool:
        """Whether all ranks hold one and the same bank."""
        return self.gather_across_devices and world_size() > 1


class _MicroStep(NamedTuple):
    """What the loss of a micro-batch is made of."""

    leaves: list[Tensor]  # what gradients are taken of
    log_scale: Tensor | None  # and this, where it is learned
    middle: list[Tensor]  # queries (n, d); passages and hard negatives (n, 1 + h, d), as they are compared
    found: list[Direction]
    log_sum: Tensor  # (n,) of local rows, over all columns
    share: Tensor | int  # what the sum of row losses is divided by
    loss: Tensor
    means: list[tuple[RunningMean, tuple[Tensor, ...]]]  # and what they will be, where they follow micro-batches
