"""The update under way: its micro-steps, which may run out of memory, be asked to stop, or come out not finite.

What an update needs to be begun again (the bank, random numbers, its texts) is kept until it is applied. With that a
micro-step that runs out of memory is done over with smaller ones, and a checkpoint may lie between two micro-steps.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from sentence_transformers.losses import CachedMultipleNegativesRankingLoss
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import has_length

from contaccum.bank_undo import BankUndo
from contaccum.distributed import sum_over_ranks, world_size
from contaccum.errors import NotFiniteError, UserError
from contaccum.grad_norms import TowerGradNorms
from contaccum.losses import ContAccumLoss
from contaccum.training.checkpoints import CheckpointedTrainer
from contaccum.training.memory_errors import free_memory, is_out_of_memory, split_rows, what_else_to_turn
from contaccum.training.memory_fit import find_micro_batch
from contaccum.training.numerics import SkippedUpdates, nothing_but_nan, poisoned, rows_of_batches
from contaccum.training.safe_state import random_states, set_random_states
from contaccum.training.signals import StopSignals, TrainingStopped

logger = logging.getLogger(__name__)

PATIENCE = 3
"""Updates in a row that run out of memory before the smaller micro-batch stays."""


@dataclass
class Window:
    """An update under way.

    Attributes:
        rows: most rows of a micro-step: fewer than a micro-batch after running out of memory.
        losses: of its micro-steps so far.
        replay: losses of micro-steps that were done before the checkpoint that the run resumed from.
        inputs: micro-batches since it began, or was resumed.
        undo, randomness, towers, gradients: what was when it began, or was resumed.
    """

    rows: int
    losses: list[Tensor] = field(default_factory=list)
    replay: list[Tensor] = field(default_factory=list)
    inputs: list[dict[str, Any]] = field(default_factory=list)
    undo: list[BankUndo] = field(default_factory=list)
    randomness: dict[str, Any] = field(default_factory=dict)
    towers: dict[str, Any] | None = None
    gradients: dict[str, Tensor] = field(default_factory=dict)


class WindowedTrainer(CheckpointedTrainer):
    """Adds to checkpoints what an update under way may meet. One rank alone can begin an update again."""

    tower_grad_norms: TowerGradNorms | None = None
    skips: SkippedUpdates
    _window: Window | None = None
    _resumed: tuple[dict[str, Any], str] | None = None
    _share: float | None = None  # of its micro-batch, in a micro-step; None outside of one
    _signals: StopSignals | None = None
    _stepping = False
    _rows_fit: int | None = None
    _ran_out = 0  # updates in a row

    def bank_losses(self) -> Iterator[ContAccumLoss]:
        yield from ()

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As in :class:`CheckpointedTrainer`; after SIGTERM or SIGINT it saves and raises `TrainingStopped`.

        Raises:
            TrainingStopped: a SystemExit.
            UserError: also when memory runs out where a smaller micro-batch does not help.
        """
        self._window = None
        with StopSignals() as self._signals:
            try:
                result = super().train(*args, **kwargs)
                self.stop_if_asked(inside=False)  # a signal after the last update
                return result
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                where = "in the optimizer's step" if self._stepping else "outside of a micro-step"
                raise UserError(
                    f"out of memory {where}: {what_else_to_turn(self.args, stepping=self._stepping)}"
                ) from (error)

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        # Here, where transformers has switched gradient checkpointing on, and before it asks for sizes.
        if self.args.finds_micro_batch:
            self.take_micro_batch(find_micro_batch(self))
        return super()._inner_training_loop(*args, **kwargs)

    def take_micro_batch(self, n: int) -> None:
        super().take_micro_batch(n)
        self._train_batch_size = self.args.train_batch_size
        if isinstance(self.loss, CachedMultipleNegativesRankingLoss):
            self.loss.mini_batch_size = n

    def try_micro_step(self, inputs: dict[str, Any]) -> None:
        """Forward and backward as in training, beside it."""
        self.current_gradient_accumulation_steps = 1
        self._share = 1.0
        try:
            super().training_step(self.model, inputs)
        finally:
            self._share = None

    # Micro-steps ---------------------------------------------------------------------------------------------------

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        window = self._window or self._begin(model)
        if len(window.losses) < len(window.replay):
            loss = window.replay[len(window.losses)]
            window.losses.append(loss)
            if len(window.losses) == len(window.replay):
                self._go_on_inside(model, window)
            return loss
        window.inputs.append(inputs)
        loss = self._fitting(model, window)
        window.losses.append(loss)
        return loss

    def micro_step(self, model: nn.Module, inputs: dict[str, Any], share: float) -> Tensor:
        """Forward and backward of some rows of a micro-batch; ``share`` of them. Returns the loss to log."""
        self._share = share
        try:
            return super().training_step(model, inputs)
        finally:
            self._share = None

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if self._share is None:
            return super().compute_loss(model, inputs, *args, **kwargs)
        try:
            loss: Any = super().compute_loss(model, inputs, *args, **kwargs)
        except NotFiniteError:
            loss = nothing_but_nan(model)
        return poisoned(loss if self._share == 1 else loss * self._share)

    def _begin(self, model: nn.Module) -> Window:
        full = self.args.pairs_per_micro_batch
        self._window = window = Window(min(full, self._rows_fit or full))
        self.skips.begin()
        if self._resumed is not None:
            state, _ = self._resumed
            window.replay, window.rows = list(state["losses"]), state["rows"]
        else:
            self._remember(window)
        return window

    def _remember(self, window: Window) -> None:
        if world_size() > 1:
            return
        pairs = self.args.per_device_train_batch_size * self.args.gradient_accumulation_steps
        window.undo = [BankUndo(loss, pairs) for loss in self.bank_losses()]
        window.randomness = random_states()
        window.towers = None if self.tower_grad_norms is None else self.tower_grad_norms.state()

    def _go_on_inside(self, model: nn.Module, window: Window) -> None:
        """After the micro-steps that a checkpoint had: its gradient and random numbers."""
        assert self._resumed is not None
        state, checkpoint = self._resumed
        self._resumed = None
        window.gradients = state["gradients"]
        self._set_gradients(model, window)
        if self.tower_grad_norms is not None and state["towers"] is not None:
            self.tower_grad_norms.restore(state["towers"])
        self._load_rng_state(checkpoint)
        self._remember(window)

    def _set_gradients(self, model: nn.Module, window: Window) -> None:
        model.zero_grad()
        if window.gradients:
            for name, parameter in self.accelerator.unwrap_model(model).named_parameters():
                if name in window.gradients:
                    parameter.grad = window.gradients[name].clone()

    # Memory --------------------------------------------------------------------------------------------------------

    def _fitting(self, model: nn.Module, window: Window) -> Tensor:
        """The loss of the latest micro-batch, done over with those before it as often as memory runs out."""
        again = False
        while True:
            try:
                if not again:
                    return self._in_parts(model, window.inputs[-1], window.rows)
                return self._again(model, window)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                what = " ".join(str(error).split())[:160]
            # Outside of the handler: what it caught holds on to the activations.
            free_memory()
            self._shrink(window, what)
            again = True

    def _shrink(self, window: Window, what: str) -> None:
        least = 1 if self.alone_has_negatives else 2
        if world_size() > 1:
            raise UserError(
                f"out of memory on rank {self.args.process_index} ({what}): ranks meet in every update, so that one "
                "alone cannot do it over. Lower per_device_train_batch_size and raise gradient_accumulation_steps by "
                "as much, and resume from `last`"
            )
        if window.rows <= least:
            raise UserError(f"out of memory at a micro-batch of {window.rows} ({what}): {what_else_to_turn(self.args)}")
        rows, window.rows = window.rows, max(window.rows // 2, least)
        self._ran_out += 1
        if self._ran_out >= PATIENCE:
            self._rows_fit = window.rows
        logger.warning(
            f"update {self.state.global_step + 1}: out of memory at a micro-batch of {rows} ({what}); it is done over "
            f"at {window.rows}, {'as is all that follows' if self._rows_fit == window.rows else 'this one alone'}"
        )

    def _again(self, model: nn.Module, window: Window) -> Tensor:
        """Go back to where the window began, and do all its micro-batches so far in smaller steps."""
        self._set_gradients(model, window)
        for undo in window.undo:
            undo.restore()
        set_random_states(window.randomness)
        if self.tower_grad_norms is not None and window.towers is not None:
            self.tower_grad_norms.restore(window.towers)
        losses = [self._in_parts(model, inputs, window.rows) for inputs in window.inputs]
        before = window.losses[len(window.replay) :]
        window.losses = [*window.losses[: len(window.replay)], *losses[:-1]]
        self.losses_replaced(window.losses)
        for old, new in zip(before, losses, strict=False):
            self._tr_loss += finite_or_zero(new) - finite_or_zero(old)
        return losses[-1]

    def losses_replaced(self, losses: list[Tensor]) -> None:
        """The micro-steps of the update so far were done over, and these are their losses now."""

    def _in_parts(self, model: nn.Module, inputs: dict[str, Any], rows: int) -> Tensor:
        if isinstance(self.loss, CachedMultipleNegativesRankingLoss):
            return self._encoding_fewer(model, inputs, rows)
        parts = split_rows(inputs, rows)
        if parts is None:
            raise UserError(f"out of memory, and this batch cannot be split by rows: {what_else_to_turn(self.args)}")
        if len(parts) == 1:
            return self.micro_step(model, inputs, 1.0)
        losses = [self.micro_step(model, part, share) for part, share in parts]
        return torch.stack(losses).sum()

    def _encoding_fewer(self, model: nn.Module, inputs: dict[str, Any], rows: int) -> Tensor:
        """GradCache's loss is the same whatever it encodes at once."""
        loss: Any = self.loss
        given, loss.mini_batch_size = loss.mini_batch_size, min(rows, loss.mini_batch_size)
        try:
            return self.micro_step(model, inputs, 1.0)
        finally:
            loss.mini_batch_size = given

    @property
    def alone_has_negatives(self) -> bool:
        """Whether a query alone has negatives: those of a bank, or hard ones."""
        in_batch = self.args.method in ("in_batch", "grad_accum") and not any(True for _ in self.bank_losses())
        return not in_batch or len(self.args.router_mapping or ()) > 2

    # Numerics ------------------------------------------------------------------------------------------------------

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        scaler = getattr(self.accelerator, "scaler", None)
        losses = [] if self._window is None else self._window.losses
        update = self.state.global_step + 1
        blamed = self.skips.judge(update, norm, losses, 1.0 if scaler is None else scaler.get_scale())
        if blamed is not None:
            self.skips.report(update, blamed, self._rows_of(blamed))
            if scaler is None:  # which has seen it too, and skips the step by itself
                model.zero_grad()
        return norm

    def _rows_of(self, micro_steps: list[int]) -> list[int] | None:
        """Rows of the training data in some micro-steps of the update under way; None: unknown."""
        loader = getattr(self, "_train_dataloader", None)
        if not has_length(loader):
            return None
        k = self.args.gradient_accumulation_steps
        first = self.state.global_step % max(-(-len(loader) // k), 1) * k
        batches = [first + index for index in micro_steps]
        return rows_of_batches(loader, batches, self.args.process_index, world_size())

    # Stopping ------------------------------------------------------------------------------------------------------

    def stop_if_asked(self, inside: bool) -> None:
        """Save and raise, if a signal came. Ranks must agree on where, so that several stop between updates only."""
        received = 0 if self._signals is None else self._signals.received or 0
        if world_size() > 1:
            if inside:
                return
            flags = torch.zeros(128, dtype=torch.int32, device=self.args.device)
            flags[received] = 1
            flags = sum_over_ranks(flags)
            flags[0] = 0
            received = int(flags.argmax()) if int(flags.sum()) else 0
        if not received:
            return
        given, self.args.save_only_model = self.args.save_only_model, False
        try:
            self._save_checkpoint(self.model_wrapped, None)
        finally:
            self.args.save_only_model = given
        self.control = self.callback_handler.on_save(self.args, self.state, self.control)
        checkpoint = f"{self.args.output_dir}/checkpoint-{self.state.global_step}"
        if self.args.process_index == 0:
            print(f"stopped by signal {received}; saved {checkpoint}: go on with --resume_from_checkpoint last")
        raise TrainingStopped(received, checkpoint)

    def window_state(self) -> dict[str, Any] | None:
        window = self._window
        if window is None or not window.losses:
            return None
        parameters = self.accelerator.unwrap_model(self.model_wrapped).named_parameters()
        return {
            "micro_steps": len(window.losses),
            "rows": window.rows,
            "losses": list(window.losses),
            "gradients": {name: p.grad for name, p in parameters if p.grad is not None},
            "towers": None if self.tower_grad_norms is None else self.tower_grad_norms.state(),
        }

    def load_window_state(self, state: dict[str, Any], checkpoint: str) -> None:
        self._resumed = (state, checkpoint)


class WindowCallback(TrainerCallback):
    """Tells a :class:`WindowedTrainer` where in an update the loop is."""

    def __init__(self, trainer: WindowedTrainer) -> None:
        self.trainer = trainer

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.trainer.stop_if_asked(inside=True)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.trainer._stepping = True

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.trainer._stepping = False

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        window, self.trainer._window = self.trainer._window, None
        if window is not None and window.rows >= self.trainer.args.pairs_per_micro_batch:
            self.trainer._ran_out = 0
        self.trainer.stop_if_asked(inside=False)

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.trainer.is_in_train and world_size() == 1:
            self.trainer.stop_if_asked(inside=False)


def finite_or_zero(loss: Tensor) -> Tensor:
    """For sums that transformers keeps; means without such losses are :class:`SkippedUpdates`' affair."""
    return torch.nan_to_num(loss, nan=0.0, posinf=0.0, neginf=0.0)
