"""The update under way: its micro-steps, in parts once memory has run out, and left out whole when it is not finite.

Pairs per update never change, and no pair is left out. Nothing here knows what the loss is; what a micro-step does is
the trainer's affair.
"""

from __future__ import annotations

import copy
import logging
import math
import time
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils.memory import clear_device_cache
from sentence_transformers.losses import CachedMultipleNegativesRankingLoss
from torch import Tensor, nn

from contaccum.distributed import world_size
from contaccum.errors import UserError
from contaccum.grad_norms import TowerGradNorms
from contaccum.losses import ContAccumLoss
from contaccum.training.memory import (
    WHAT_ELSE,
    is_out_of_memory,
    kept_random_states,
    largest_that_fits,
    longest_rows,
    split_rows,
)

logger = logging.getLogger(__name__)


@dataclass
class Update:
    """What is known of the update under way.

    Attributes:
        started: on the clock of ``time.perf_counter``.
        inputs: its micro-batches so far.
        losses: () of each micro-step, its share of the update's mean.
        bad: the micro-batch of each micro-step, and whether its loss was not finite, () bool.
        computed: the loss of the present micro-step is known, and in the bank; a gradient may have begun.
        norms, learning_rate, about: what its line in the log says beside.
    """

    started: float = field(default_factory=lambda: time.perf_counter())
    inputs: list[dict[str, Any]] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    bad: list[tuple[int, Tensor]] = field(default_factory=list)
    pairs: int = 0
    computed: bool = False
    norms: dict[str, float] = field(default_factory=dict)
    learning_rate: float | None = None
    about: dict[str, Any] = field(default_factory=dict)


class Updates:
    """The updates of a run, one at a time.

    Attributes:
        present: the one under way.
        rows_fit: rows of a micro-step, once memory has run out at more; None: it has not.
        skipped: updates left out so far because they were not finite.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.rows_fit: int | None = None
        self.skipped = 0
        self._tower_norms: TowerGradNorms | None = None
        self.begin()
        losses = trainer.loss.values() if isinstance(trainer.loss, dict) else [trainer.loss]
        for loss in losses:
            loss.register_forward_hook(self._after_loss)

    def begin(self) -> None:
        """Another one, of which nothing is known yet."""
        self.present = Update()

    def step(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        """Forward and backward of a micro-batch; returns its share of the update's loss."""
        update, trainer = self.present, self.trainer
        self._tower_norms = self._tower_norms or self._watch(model)
        update.inputs.append(inputs)
        update.pairs += next(len(x) for x in inputs.values() if isinstance(x, Tensor) and x.ndim)
        loss = self._in_parts(model, [len(update.inputs) - 1])
        if trainer.accelerator.sync_gradients:  # the gradient is complete, and neither clipped nor unscaled yet
            update.norms = self._tower_norms.read(self.scale)
            update.learning_rate = trainer.optimizer.param_groups[0]["lr"]
        return loss

    @property
    def scale(self) -> float:
        """Of a gradient scaler; 1 without."""
        scaler = getattr(self.trainer.accelerator, "scaler", None)
        return 1.0 if scaler is None else scaler.get_scale()

    @property
    def least_rows(self) -> int:
        """The smallest micro-batch: 1 where a query alone has negatives, of a bank, of a cache, or hard ones."""
        trainer = self.trainer
        alone = (
            trainer.hard_negatives or trainer.args.method == "grad_cache" or any(True for _ in trainer.bank_losses())
        )
        return 1 if alone else 2

    def _watch(self, model: nn.Module) -> TowerGradNorms:
        return TowerGradNorms(self.trainer.accelerator.unwrap_model(model), self.trainer.balancer)

    # Memory ----------------------------------------------------------------------------------------------------------

    def find_micro_batch(self) -> None:
        """Take the largest micro-batch that every rank has room for; weights, bank and random numbers stay."""
        trainer, args = self.trainer, self.trainer.args
        cached = isinstance(trainer.loss, CachedMultipleNegativesRankingLoss)
        rows = longest_rows(trainer.train_dataset, args.per_device_train_batch_size * args.gradient_accumulation_steps)

        def attempt(n: int) -> None:
            """Forward and backward of ``n`` of the longest rows, with a bank of its own and room for the optimizer."""
            loss: Any = copy.deepcopy(trainer.loss, {id(trainer.model): trainer.model})
            for one in loss.modules():
                if isinstance(one, ContAccumLoss):  # ranks may run out at different sizes, and must not wait here
                    one.settings = {**one.settings, "gather_across_devices": False}
            if cached:
                loss.mini_batch_size = n
            states = [torch.zeros_like(p) for p in trainer.model.parameters() if p.requires_grad for _ in range(2)]
            try:
                for _ in range(2):  # the second has gradients and a bank beside it
                    inputs = trainer._prepare_inputs(trainer.data_collator(rows if cached else rows[:n]))
                    with trainer.accelerator.autocast():
                        value = loss(*trainer.collect_features(inputs))
                    value.backward()
            finally:
                del states
                trainer.model.zero_grad()

        with kept_random_states():
            found = torch.tensor(largest_that_fits(args, self.least_rows, attempt), device=args.device)
        if world_size() > 1:
            dist.all_reduce(found, op=dist.ReduceOp.MIN)
        self.take_micro_batch(int(found))

    def take_micro_batch(self, n: int) -> None:
        """From now on micro-batches of ``n`` pairs."""
        self.trainer.args.take_micro_batch(n)
        if isinstance(self.trainer.loss, CachedMultipleNegativesRankingLoss):
            self.trainer.loss.mini_batch_size = n

    def _in_parts(self, model: nn.Module, batches: list[int]) -> Tensor:
        """Micro-steps of some of the update's micro-batches; the loss of the last one.

        Where memory runs out, parts are halved, and so are all that follow. If a gradient may have begun, that of the
        update begins again: nothing is left out of it, and what was in the bank by then is there twice.
        """
        update = self.present
        todo = [(index, *part) for index in batches for part in self._split(update.inputs[index])]
        loss = torch.zeros((), device=self.trainer.args.device)
        while todo:
            index, part, share = todo[0]
            update.computed = False
            try:
                step = self.trainer.micro_step(model, dict(part), share, last=len(todo) == 1)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                what = " ".join(str(error).split())[:160]
            else:
                update.losses.append(step)
                update.bad.append((index, ~torch.isfinite(step)))
                loss = loss + step if index == len(update.inputs) - 1 else loss
                todo.pop(0)
                continue
            # Outside of the handler: what it caught holds on to the activations.
            clear_device_cache(garbage_collection=True)
            self._halve(part, what)
            if update.computed:
                model.zero_grad()
                if self._tower_norms is not None:
                    self._tower_norms.close()
                self._tower_norms = self._watch(model)
                update.losses, update.bad = [], []
                return self._in_parts(model, list(range(len(update.inputs))))
            todo = [(i, smaller, outer * inner) for i, one, outer in todo for smaller, inner in self._split(one)]
        return loss

    def _split(self, inputs: dict[str, Any]) -> list[tuple[dict[str, Any], float]]:
        if self.rows_fit is None or isinstance(self.trainer.loss, CachedMultipleNegativesRankingLoss):
            return [(inputs, 1.0)]
        return split_rows(inputs, self.rows_fit)

    def _halve(self, part: dict[str, Any], what: str) -> None:
        loss, args = self.trainer.loss, self.trainer.args
        cached = isinstance(loss, CachedMultipleNegativesRankingLoss)
        rows = loss.mini_batch_size if cached else next(len(x) for x in part.values() if isinstance(x, Tensor))
        if world_size() > 1:
            raise UserError(
                f"out of memory on rank {args.process_index} ({what}): ranks meet in every update, so that one alone "
                "cannot take smaller micro-steps. Lower per_device_train_batch_size and raise "
                "gradient_accumulation_steps by as much, and resume from `last`"
            )
        if rows <= self.least_rows:
            raise UserError(f"out of memory at a micro-batch of {rows} ({what}): {WHAT_ELSE}")
        self.rows_fit = max(rows // 2, self.least_rows)
        if cached:
            loss.mini_batch_size = self.rows_fit
        logger.warning(
            f"update {self.trainer.state.global_step + 1}: out of memory at a micro-batch of {rows} ({what}); from "
            f"here on it is {self.rows_fit}, in as many more micro-steps: pairs per update stay"
        )

    # Numbers that are not finite -------------------------------------------------------------------------------------

    def _after_loss(self, module: nn.Module, arguments: Any, loss: Any) -> Any:
        """A loss that is not finite gets a gradient that is not finite either, on whichever rank it is."""
        self.present.computed = True
        if not isinstance(loss, Tensor):
            return loss
        return loss * torch.where(torch.isfinite(loss.detach()), 1.0, math.nan)

    def judge(self, model: nn.Module, norm: Any) -> None:
        """Leave out a complete update whose gradient is not finite, and say which rows are to blame.

        Args:
            norm: of its gradient, over all ranks.

        Raises:
            UserError: when ``max_skipped_updates`` are skipped already.
        """
        if norm is None or math.isfinite(float(norm)):
            return
        update, args, scale = self.present, self.trainer.args, self.scale
        blamed = sorted({index for index, bad in update.bad if bool(bad)})
        if not blamed and scale > 1:  # what a scaler is there for: it skips the step and halves its scale
            update.about |= {"skipped": "overflow", "scale": scale}
            return
        kind, blamed = ("loss", blamed) if blamed else ("gradient", list(range(len(update.inputs))))
        rows = self._rows_of(blamed)
        update.about |= {"skipped": kind, "scale": scale, "micro_steps": blamed, "rows": rows}
        self.skipped += 1
        shown = "unknown" if rows is None else ", ".join(map(str, rows[:16])) + (", ..." if len(rows) > 16 else "")
        text = (
            f"update {self.trainer.state.global_step + 1}: the {kind} is not finite (rows {shown} of the training "
            f"data, scale {scale:g})"
        )
        if self.skipped > args.max_skipped_updates:
            raise UserError(
                f"{text}, and max_skipped_updates={args.max_skipped_updates} are skipped already. Look at these rows, "
                "lower learning_rate, or train in bf16 or float32; the weights are those before this update"
            )
        logger.warning(f"{text}: skipped, {self.skipped} of max_skipped_updates={args.max_skipped_updates}")
        if getattr(self.trainer.accelerator, "scaler", None) is None:  # which skips the step by itself
            model.zero_grad()

    def _rows_of(self, micro_steps: list[int]) -> list[int] | None:
        """Rows of the training data in some micro-steps of the update under way; None: the sampler cannot tell."""
        trainer, args = self.trainer, self.trainer.args
        if trainer.batch_sampler is None or args.own_batch_sampler or args.set_sampler is None:
            return None
        k = args.gradient_accumulation_steps
        first = trainer.state.global_step % max(-(-len(trainer._train_dataloader) // k), 1) * k
        wanted = {(first + index) * args.world_size + args.process_index for index in micro_steps}
        # It makes an epoch's batches from the seed and the epoch alone, so that they can be made again.
        batches = zip(range(max(wanted) + 1), trainer.batch_sampler, strict=False)
        return [row for number, batch in batches if number in wanted for row in batch]
