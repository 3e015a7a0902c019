"""The update in progress: its micro-batches, its measurements, and the order of its micro-steps.

The pairs of an update never change, and none is left out: when memory runs out, the update begins
again in smaller micro-steps. The trainer defines what a micro-step does.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from accelerate.utils.memory import clear_device_cache
from sentence_transformers.base.losses.gradcache import uses_gradient_cache
from torch import Tensor, nn

from contaccum.distributed import over_ranks
from contaccum.encoders.grad_norms import TowerGradNorms
from contaccum.training.arguments import ContAccumTrainingArguments
from contaccum.training.log import Record
from contaccum.training.loss_factory import bank_losses
from contaccum.training.out_of_memory import (
    MicroBatchLimit,
    is_out_of_memory,
    set_mini_batch_size,
    split_rows,
)
from contaccum.training.train_data import Batch

_MAX_REASON_LENGTH = 160  # characters of an error's message


ParameterGroup = dict[str, Any]


class HasParameterGroups(Protocol):
    """An optimizer, or a wrapper of one."""

    param_groups: list[ParameterGroup]


class MicroStep(Protocol):
    """Forward and backward of a part of a micro-batch; returns its share of the update's loss."""

    def __call__(self, model: nn.Module, inputs: Batch, share: float, is_last: bool) -> Tensor: ...


def parameters_of(optimizer: HasParameterGroups) -> Iterator[nn.Parameter]:
    """Yield every parameter that an optimizer moves."""
    for group in optimizer.param_groups:
        yield from group["params"]


def drop_gradients(model: nn.Module, optimizer: HasParameterGroups) -> None:
    """Drop the gradients of the model and of the loss's own parameters."""
    model.zero_grad()
    # The optimizer's own zero_grad does nothing between the micro-steps of an update.
    for parameter in parameters_of(optimizer):
        parameter.grad = None


def gradient_scale(accelerator: Accelerator) -> float:
    """Return the factor of a gradient scaler, 1 without one."""
    scaler = getattr(accelerator, "scaler", None)
    return 1.0 if scaler is None else scaler.get_scale()


@dataclass
class Update:
    """The micro-batches of an update on this rank, and the measurements of its micro-steps."""

    number: int  # from 1
    started: float = field(default_factory=time.perf_counter)
    micro_batches: list[Batch] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)  # () of each micro-step
    micro_batch_of_loss: list[int] = field(default_factory=list)  # index into micro_batches
    grad_norms: dict[str, float] = field(default_factory=dict)
    learning_rate: float | None = None
    log_entries: Record = field(default_factory=dict)  # beside the measurements
    num_pairs: int = 0  # in micro_batches
    expected_pairs: Counter[str | None] = field(default_factory=Counter)  # by data set

    def restart(self) -> None:
        """Drop the measurements of the micro-steps, which will be done again."""
        self.losses.clear()
        self.micro_batch_of_loss.clear()


class Updates:
    """The updates of a run.

    Args:
        args: the arguments of the run.
        loss: the training loss, or one for each data set.
        accelerator: accelerate's, of the trainer.
        limit: the rows of a micro-step.
        count_pairs: returns the number of pairs in a collated batch.
        has_whole_gradients: whether every rank has the whole gradient of every weight.

    Attributes:
        current: the update in progress.
    """

    def __init__(
        self,
        args: ContAccumTrainingArguments,
        loss: Any,
        accelerator: Accelerator,
        limit: MicroBatchLimit,
        count_pairs: Callable[[Batch], int],
        has_whole_gradients: bool,
    ) -> None:
        self.limit = limit
        self.current = Update(number=1)
        self._args = args
        self._loss = loss
        self._accelerator = accelerator
        self._count_pairs = count_pairs
        self._has_whole_gradients = has_whole_gradients
        self._tower_norms: TowerGradNorms | None = None

    def begin(self, number: int) -> None:
        """Begin the update of this number, counted from 1."""
        self.current = Update(number)

    def take_micro_batch(self, num_pairs: int) -> None:
        """Use micro-batches of ``num_pairs`` from now on."""
        self._args.take_micro_batch(num_pairs)
        set_mini_batch_size(self._loss, num_pairs)

    def expect(self, batches: list[Batch]) -> None:
        """Count the pairs of the current update, from all of its collated micro-batches."""
        for inputs in batches:
            name = inputs.get("dataset_name")
            self.current.expected_pairs[name] += self._count_pairs(inputs)

    def step(
        self,
        model: nn.Module,
        inputs: Batch,
        micro_step: MicroStep,
        optimizer: HasParameterGroups,
    ) -> Tensor:
        """Do the forward and backward passes of a micro-batch.

        When memory runs out, micro-batches are halved from then on, and the gradient of the update
        begins again with all of its pairs. No pair is left out; pairs that were in the bank by then
        are there twice.

        Returns:
            The micro-batch's share of the update's loss.

        Raises:
            UserError: where a smaller micro-batch is not possible.
        """
        update = self.current
        # Read before the step: DeepSpeed's scheduler may move on with it.
        update.learning_rate = optimizer.param_groups[0]["lr"]
        first = len(update.micro_batches)
        update.micro_batches.append(inputs)
        update.num_pairs += self._count_pairs(inputs)
        while True:
            tower_norms = self._watch_towers(model)
            try:
                loss = self._run_micro_steps(model, micro_step, first)
                break
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                reason = " ".join(str(error).split())[:_MAX_REASON_LENGTH]
            # Outside of the handler, because the error holds the activations in memory.
            clear_device_cache(garbage_collection=True)
            self.limit.halve(self._rows_per_micro_step(), update.number, reason)
            drop_gradients(model, optimizer)
            tower_norms.close()
            self._tower_norms = None
            update.restart()
            first = 0
        if self._accelerator.sync_gradients:
            # The gradient is complete. Only DeepSpeed has made its optimizer step already.
            update.grad_norms = tower_norms.read(gradient_scale(self._accelerator))
        return loss

    def _watch_towers(self, model: nn.Module) -> TowerGradNorms:
        """Return the meter of the towers' gradient norms, which is made at the first micro-step."""
        if self._tower_norms is None:
            encoder = self._accelerator.unwrap_model(model, keep_torch_compile=False)
            self._tower_norms = TowerGradNorms(encoder, model, self._has_whole_gradients)
        return self._tower_norms

    def _rows_per_micro_step(self) -> int:
        """Return the largest number of rows that a micro-step of the current update may have."""
        limit = self.limit.rows or self._args.pairs_per_micro_batch
        return min(limit, max(self._count_pairs(inputs) for inputs in self.current.micro_batches))

    def _run_micro_steps(self, model: nn.Module, micro_step: MicroStep, first: int) -> Tensor:
        """Do the micro-steps of the micro-batches from ``first`` on; return the last one's loss."""
        update = self.current
        if first == 0:
            self._announce_pairs()
        max_rows = self.limit.rows
        if uses_gradient_cache(self._loss):
            max_rows = None  # its mini-batches are smaller instead
        loss = torch.zeros((), device=self._args.device)
        for index in range(first, len(update.micro_batches)):
            parts = split_rows(update.micro_batches[index], max_rows)
            is_last_batch = index == len(update.micro_batches) - 1
            loss = torch.zeros((), device=self._args.device)
            for number, (part, share) in enumerate(parts, start=1):
                is_last = is_last_batch and number == len(parts)
                part_loss = micro_step(model, part, share, is_last)
                update.losses.append(part_loss)
                update.micro_batch_of_loss.append(index)
                loss = loss + part_loss
        return loss

    def _announce_pairs(self) -> None:
        """Pass the number of pairs that each bank gets in this update to its loss.

        It counts the pairs of all ranks where they share a bank.
        """
        expected = self.current.expected_pairs
        for bank_loss in bank_losses(self._loss):
            num_pairs = expected.total()
            if isinstance(self._loss, dict):
                num_pairs = 0
                for name, loss in self._loss.items():
                    if bank_loss in loss.modules():
                        num_pairs += expected[name]
            if bank_loss.settings.gather_across_devices:
                total = over_ranks("SUM", torch.tensor(num_pairs, device=self._args.device))
                num_pairs = int(total)
            bank_loss.begin_update(num_pairs)
