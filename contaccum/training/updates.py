"""The update in progress: its micro-batches, its measurements, and the order of its micro-steps.

An update is one optimizer step. Its micro-batches come from the data loader. A micro-batch is
trained in one micro-step (one forward and one backward pass). Once memory has run out, it is
trained in several micro-steps on parts of it. An update always trains on all of its pairs: when
memory runs out, it starts again from its first micro-batch. `ContAccumTrainer.micro_step` runs a
micro-step.
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
from contaccum.errors import UserError
from contaccum.training.arguments import ContAccumTrainingArguments
from contaccum.training.log import REMEDY_WITHOUT_NEGATIVES, TRAIN_LOG, Record
from contaccum.training.loss_factory import get_batch_loss, iter_bank_losses
from contaccum.training.out_of_memory import (
    MicroBatchLimit,
    find_largest_divisor,
    find_micro_batch,
    is_out_of_memory,
    set_mini_batch_size,
    split_rows,
)
from contaccum.training.train_data import Batch, Row

NO_BATCH = (
    "the training data give no batch, so nothing can be trained: lower "
    "per_device_train_batch_size, set dataloader_drop_last=false, or give more data "
    "(batch_sampler=no_duplicates needs as many different texts as a batch has)"
)
"""The error for a data loader without a batch."""

_MAX_REASON_LENGTH = 160  # characters of an out-of-memory error that are shown

ParameterGroup = dict[str, Any]
"""A parameter group of an optimizer: ``params``, ``lr`` and other settings."""


class HasParameterGroups(Protocol):
    """An optimizer, or accelerate's wrapper of one."""

    param_groups: list[ParameterGroup]


class MicroStep(Protocol):
    """A function that runs forward and backward for a micro-batch or a part of it.

    ``weight`` is the fraction of the update's pairs that ``inputs`` holds. ``is_last_part`` is True
    for the last part of the newest micro-batch. Ranks must not reduce their gradients in any other
    part; in this one they do so if transformers lets them, in the last micro-batch of an update.
    The function returns the loss multiplied by ``weight``, so that the sum over an update is the
    update's loss.
    """

    def __call__(
        self, model: nn.Module, inputs: Batch, weight: float, is_last_part: bool
    ) -> Tensor: ...


def iter_parameters(optimizer: HasParameterGroups) -> Iterator[nn.Parameter]:
    """Yield every parameter that an optimizer trains."""
    for group in optimizer.param_groups:
        yield from group["params"]


def drop_gradients(model: nn.Module, optimizer: HasParameterGroups) -> None:
    """Drop the gradients of the model, and of the parameters that belong to the loss."""
    model.zero_grad()
    # accelerate's optimizer.zero_grad() does nothing between the micro-steps of an update.
    for parameter in iter_parameters(optimizer):
        parameter.grad = None


def get_gradient_scale(accelerator: Accelerator) -> float:
    """Return the factor by which a gradient scaler (fp16) scales gradients; 1 without a scaler."""
    scaler = getattr(accelerator, "scaler", None)
    return 1.0 if scaler is None else scaler.get_scale()


@dataclass
class Update:
    """The micro-batches of an update on this rank, and the measurements of its micro-steps.

    Attributes:
        number: number of the update in the run, from 1.
        started: value of ``time.perf_counter`` when the update started.
        micro_batches: the collated micro-batches so far. The last one may still be in training.
        losses: the loss of each micro-step, of shape (), multiplied by its share of the pairs, so
            that the sum is the loss of the update.
        micro_batch_of_loss: for each entry of ``losses``, its index in ``micro_batches``.
        grad_norms: gradient norms of the towers for the log, by name.
        grad_norm: gradient norm of the whole model, over all ranks; None if it is unknown.
        learning_rate: learning rate of the first parameter group in this update.
        has_learning_rate: whether the learning rate of any parameter group is not 0.
        log_entries: further entries for the update's line in the log.
        num_pairs: number of pairs in ``micro_batches``.
        expected_batches: number of micro-batches of the whole update.
        has_unknown_batches: whether the number of pairs of some of them is unknown.
        expected_pairs: number of pairs in all micro-batches of the update, by data set.
    """

    number: int
    started: float
    micro_batches: list[Batch] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    micro_batch_of_loss: list[int] = field(default_factory=list)
    grad_norms: dict[str, float] = field(default_factory=dict)
    grad_norm: float | None = None
    learning_rate: float | None = None
    has_learning_rate: bool = True
    log_entries: Record = field(default_factory=dict)
    num_pairs: int = 0
    expected_batches: int = 0
    has_unknown_batches: bool = False
    expected_pairs: Counter[str | None] = field(default_factory=Counter)

    @property
    def has_trained(self) -> bool:
        """False if the gradient or the learning rate is 0, or the update is skipped.

        Weights are not compared, because weight decay changes them without a gradient too.
        """
        is_skipped = "skipped" in self.log_entries
        return self.grad_norm != 0 and self.has_learning_rate and not is_skipped


class Updates:
    """Runner of the updates of a training run, one micro-batch at a time.

    Args:
        args: the arguments of the run.
        loss: the training loss, or a dictionary with one loss for each data set.
        accelerator: the trainer's Accelerator.
        limit: the number of rows that fit into a micro-step.
        count_pairs: returns the number of pairs in a collated batch.
        has_full_gradients: whether every rank has the full gradient of every parameter, which is
            not so with FSDP or DeepSpeed.

    Attributes:
        limit: as above.
        current: the update in progress.
        num_trained: number of updates of the run that have trained; see `Update.has_trained`.
    """

    def __init__(
        self,
        args: ContAccumTrainingArguments,
        loss: Any,
        accelerator: Accelerator,
        limit: MicroBatchLimit,
        count_pairs: Callable[[Batch], int],
        has_full_gradients: bool,
    ) -> None:
        self.limit = limit
        self.current = Update(number=1, started=time.perf_counter())
        self.num_trained = 0
        self._args = args
        self._loss = loss
        self._accelerator = accelerator
        self._count_pairs = count_pairs
        self._has_full_gradients = has_full_gradients
        self._tower_norms: TowerGradNorms | None = None

    def end_update(self) -> None:
        """Count the current update, and start the next one."""
        self.num_trained += self.current.has_trained
        self.start_update(self.current.number + 1)

    def start_update(self, number: int) -> None:
        """Start an update; ``number`` counts the updates of the run from 1."""
        self.current = Update(number, time.perf_counter())

    def restart_clock(self) -> None:
        """Start the time of the current update now, after work that is not training."""
        self.current.started = time.perf_counter()

    def set_micro_batch_size(self, num_pairs: int) -> None:
        """Use micro-batches of at most ``num_pairs`` pairs from now on.

        The size is the largest one that divides the pairs per update of this rank. A run that is
        resumed on more ranks has fewer of them.
        """
        args = self._args
        pairs_per_update = args.per_device_train_batch_size * args.gradient_accumulation_steps
        num_pairs = find_largest_divisor(pairs_per_update, num_pairs)
        args.set_micro_batch_size(num_pairs)
        set_mini_batch_size(self._loss, num_pairs)

    def find_micro_batch_size(
        self, model: nn.Module, dataset: Any, compute_loss: Callable[[Any, list[Row]], Tensor]
    ) -> None:
        """Find the largest micro-batch that fits into memory, and use its size from now on.

        Args:
            model: the model in training.
            dataset: the training set, or a dictionary of training sets.
            compute_loss: function that returns the value of a loss for rows of the data.

        Raises:
            ConfigError: if an update has fewer pairs than the smallest micro-batch.
            UserError: if the smallest micro-batch does not fit.
        """
        num_pairs = find_micro_batch(
            self._args, model, self._loss, dataset, self.limit.smallest, compute_loss
        )
        self.set_micro_batch_size(num_pairs)

    def require_trained(self, num_updates: int) -> None:
        """Raise `UserError` if no update of a run has trained, of ``num_updates`` in all."""
        if self.num_trained:
            return
        if num_updates == 0:
            raise UserError(NO_BATCH)
        raise UserError(
            f"{self._args.output_dir}: the run has trained nothing: in each of its {num_updates} "
            "updates the gradient or the learning rate was 0, or the update was skipped "
            f"({TRAIN_LOG} has a line for each). Set warmup_steps below the number of updates. "
            f"{REMEDY_WITHOUT_NEGATIVES}"
        )

    def count_expected_pairs(self, batches: list[Batch]) -> None:
        """Count the pairs in all micro-batches of the current update, before it is trained."""
        self.current.expected_batches = len(batches)
        for inputs in batches:
            name = inputs.get("dataset_name")
            num_pairs = self._count_pairs(inputs)  # 0 if the features do not show the number
            self.current.expected_pairs[name] += num_pairs
            if num_pairs == 0:
                self.current.has_unknown_batches = True

    def run_micro_batch(
        self,
        model: nn.Module,
        inputs: Batch,
        micro_step: MicroStep,
        optimizer: HasParameterGroups,
    ) -> Tensor:
        """Run forward and backward for the next micro-batch of the current update.

        When memory runs out, the rows of a micro-step (with a gradient cache: of a mini-batch) are
        halved for the rest of the run. The gradient is dropped, and the update starts again from
        its first micro-batch. Pairs that this update had already added to the bank are then in the
        bank twice.

        Returns:
            The loss of the micro-batch, multiplied by its share of the update's pairs, of shape ().

        Raises:
            UserError: if memory runs out and no smaller micro-batch is possible.
        """
        update = self.current
        # Read before the micro-step, because DeepSpeed's scheduler steps within the last one.
        update.learning_rate = optimizer.param_groups[0]["lr"]
        update.has_learning_rate = any(group["lr"] for group in optimizer.param_groups)
        first = len(update.micro_batches)  # index of the first micro-batch to train on
        update.micro_batches.append(inputs)
        update.num_pairs += self._count_pairs(inputs)
        while True:  # until the micro-batch fits into memory
            tower_norms = self._get_tower_norms(model)
            try:
                loss = self._run_micro_steps(model, micro_step, first)
                break
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                reason = " ".join(str(error).split())[:_MAX_REASON_LENGTH]
            # Memory is freed outside of the handler: inside it, the error still refers to the
            # activations.
            clear_device_cache(garbage_collection=True)
            self.limit.halve(self._count_rows_of_micro_step(), update.number, reason)
            # Start the update again: drop all that its micro-steps so far have accumulated.
            drop_gradients(model, optimizer)
            tower_norms.close()
            self._tower_norms = None
            update.losses.clear()
            update.micro_batch_of_loss.clear()
            first = 0
        is_update_complete = self._accelerator.sync_gradients
        if is_update_complete:
            # The norms are read before the gradient is clipped. DeepSpeed has already made its
            # optimizer step, but then the norms are accumulated from gradients of embeddings.
            update.grad_norms = tower_norms.read(get_gradient_scale(self._accelerator))
        return loss

    def _get_tower_norms(self, model: nn.Module) -> TowerGradNorms:
        """Return the object that measures the towers' gradient norms; create it if necessary."""
        if self._tower_norms is None:
            encoder = self._accelerator.unwrap_model(model, keep_torch_compile=False)
            self._tower_norms = TowerGradNorms(encoder, model, self._has_full_gradients)
        return self._tower_norms

    def _count_rows_of_micro_step(self) -> int:
        """Return the number of rows in the largest micro-step of the current update."""
        limit = self.limit.rows or self._args.pairs_per_micro_batch
        largest = 0
        for inputs in self.current.micro_batches:
            num_rows = min(limit, self._count_pairs(inputs))
            loss = get_batch_loss(self._loss, inputs)
            if uses_gradient_cache(loss):  # the user's own loss may have smaller mini-batches
                num_rows = min(num_rows, getattr(loss, "mini_batch_size", num_rows))
            largest = max(largest, num_rows)
        return largest

    def _run_micro_steps(self, model: nn.Module, micro_step: MicroStep, first: int) -> Tensor:
        """Run the micro-steps of all micro-batches from index ``first`` on.

        Returns:
            The loss of the newest micro-batch, as in `run_micro_batch`.
        """
        update = self.current
        if first == 0:
            self._set_pairs_of_losses()
        batch_loss = torch.zeros((), device=self._args.device)
        for index in range(first, len(update.micro_batches)):
            inputs = update.micro_batches[index]
            max_rows = self.limit.rows
            if uses_gradient_cache(get_batch_loss(self._loss, inputs)):
                # The whole batch is one micro-step; `MicroBatchLimit` has reduced its mini-batches.
                max_rows = None
            parts = split_rows(inputs, max_rows)
            batch_weight = self._compute_weight(inputs)
            is_newest_batch = index == len(update.micro_batches) - 1
            batch_loss = torch.zeros((), device=self._args.device)
            for part_number, (part, share) in enumerate(parts, start=1):
                is_last_part = is_newest_batch and part_number == len(parts)
                part_loss = micro_step(model, part, share * batch_weight, is_last_part)
                update.losses.append(part_loss)
                update.micro_batch_of_loss.append(index)
                batch_loss = batch_loss + part_loss
        return batch_loss

    def _compute_weight(self, inputs: Batch) -> float:
        """Return the share of the current update's pairs that a micro-batch has.

        The losses are means over pairs. With these weights, each pair of the update has the same
        weight, also if the last micro-batch of an epoch is short. If the size of a micro-batch is
        unknown, all micro-batches have the same weight.
        """
        if self.current.has_unknown_batches:
            return 1 / self.current.expected_batches
        return self._count_pairs(inputs) / self.current.expected_pairs.total()

    def _set_pairs_of_losses(self) -> None:
        """Set in each ContAccumLoss the number of pairs that it receives in this update.

        The loss needs the number to centre its gradients over the update. If ranks share a bank,
        the number counts the pairs of all ranks.
        """
        pairs_by_set = self.current.expected_pairs
        for bank_loss in iter_bank_losses(self._loss):
            num_pairs = pairs_by_set.total()
            if isinstance(self._loss, dict):
                # Each loss receives only the pairs of its own data sets.
                num_pairs = 0
                for name, loss in self._loss.items():
                    if bank_loss in loss.modules():
                        num_pairs += pairs_by_set[name]
            if bank_loss.settings.gather_across_devices:
                total = over_ranks("SUM", torch.tensor(num_pairs, device=self._args.device))
                num_pairs = int(total)
            bank_loss.begin_update(num_pairs)
