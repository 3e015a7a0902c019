"""Smaller micro-batches for when memory runs out, and the search for the largest that fits.

The pairs of an update stay the same: a smaller micro-batch means more micro-steps. This module does
not run micro-steps of the training itself; `updates` does.
"""

from __future__ import annotations

import copy
import dataclasses
import heapq
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import torch
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size
from sentence_transformers.base.losses.gradcache import uses_gradient_cache
from torch import Tensor, nn

from contaccum.data.sampling import first_texts
from contaccum.distributed import over_ranks
from contaccum.errors import UserError
from contaccum.losses.contaccum import ContAccumLoss
from contaccum.training.arguments import ContAccumTrainingArguments
from contaccum.training.random_states import RandomStates
from contaccum.training.resources import peak_memory_mb, reset_peak_memory
from contaccum.training.train_data import Batch, Row

logger = logging.getLogger(__name__)

REMEDIES = (
    "set bf16=true or gradient_checkpointing=true, lower passage_max_length or bank_size, or take "
    "a smaller model"
)
_SHARE_OF_FREE_MEMORY = 0.8  # of a host, which a trial may take


def is_out_of_memory(error: Exception) -> bool:
    """Return whether an error says that the memory of an accelerator or of the host ran out."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return should_reduce_batch_size(error)


@contextmanager
def report_out_of_memory() -> Iterator[None]:
    """Turn memory that runs out outside of a micro-step into a `UserError` with the remedies."""
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            raise UserError(f"out of memory outside of a micro-step: {REMEDIES}") from error
        raise


class MicroBatchLimit:
    """The number of rows per micro-step, which is halved when memory runs out.

    Args:
        loss: the training loss; a gradient cache in it encodes at most this number of rows at once.
        smallest: the smallest micro-batch in which a query has negatives.
        rank: this process, for messages.
        can_halve: False where other ranks, or an engine that has reduced a part of the gradient,
            would have to take part.

    Attributes:
        rows: None until memory has run out.
    """

    def __init__(self, loss: Any, smallest: int, rank: int, can_halve: bool) -> None:
        self.rows: int | None = None
        self.smallest = smallest
        self._loss = loss
        self._rank = rank
        self._can_halve = can_halve

    def halve(self, rows: int, update: int, reason: str) -> None:
        """Halve a micro-batch of ``rows`` from now on.

        Args:
            rows: the size at which memory ran out.
            update: number of the update in progress, for messages.
            reason: the error's message.

        Raises:
            UserError: where no smaller micro-batch is possible.
        """
        if not self._can_halve:
            raise UserError(
                f"out of memory on rank {self._rank} ({reason}), which cannot split alone: lower "
                "per_device_train_batch_size, raise gradient_accumulation_steps, and resume from "
                "`last`"
            )
        if rows <= self.smallest:
            raise UserError(f"out of memory at a micro-batch of {rows} ({reason}): {REMEDIES}")
        self.rows = max(rows // 2, self.smallest)
        set_mini_batch_size(self._loss, self.rows)
        logger.warning(
            f"update {update}: out of memory at a micro-batch of {rows} ({reason}); from here on "
            f"it is {self.rows}, in as many more micro-steps: pairs per update stay"
        )


def set_mini_batch_size(loss: Any, rows: int) -> None:
    """Set the number of rows that a gradient cache encodes at once, in a loss that has one."""
    if not uses_gradient_cache(loss):
        return
    for module in loss.modules():
        if hasattr(module, "mini_batch_size"):
            module.mini_batch_size = rows


def split_rows(inputs: Batch, max_rows: int | None) -> list[tuple[Batch, float]]:
    """Split a collated batch into parts of at most ``max_rows`` rows; None: into one part.

    Returns:
        Each part with its share of the batch's n rows.

    Raises:
        UserError: for a batch whose tensors are not of one length.
    """
    tensors: dict[str, Tensor] = {}
    for key, value in inputs.items():
        if isinstance(value, Tensor) and value.ndim:
            tensors[key] = value
    lengths = {len(tensor) for tensor in tensors.values()}
    num_rows = max(lengths)
    if max_rows is None or num_rows <= max_rows:
        return [(inputs, 1.0)]
    if len(lengths) > 1:
        raise UserError(
            "out of memory, and this batch cannot be split by rows: lower "
            "per_device_train_batch_size"
        )
    num_parts = -(-num_rows // max_rows)
    split = {key: tensor.tensor_split(num_parts) for key, tensor in tensors.items()}
    parts = []
    for index in range(num_parts):
        part = {key: tensors_of_key[index] for key, tensors_of_key in split.items()}
        part_rows = len(next(iter(part.values())))
        parts.append(({**inputs, **part}, part_rows / num_rows))
    return parts


def get_longest_rows(dataset: Any, num_rows: int) -> list[Row]:
    """Return rows of each column's longest texts: no batch of the data is longer in any column.

    Of several data sets, the one with the most columns is read.
    """
    name = None
    if isinstance(dataset, dict):
        name = max(dataset, key=lambda key: len(dataset[key].column_names))
        dataset = dataset[name]
    longest: dict[str, list[str]] = {}
    for batch in first_texts(dataset):
        for column, texts in batch.items():
            candidates = [*longest.get(column, []), *(text or "" for text in texts)]
            longest[column] = heapq.nlargest(num_rows, candidates, key=len)
    rows: list[Row] = []
    for index in range(num_rows):
        row = {column: texts[index % len(texts)] for column, texts in longest.items()}
        if name is not None:
            row["dataset_name"] = name
        rows.append(row)
    return rows


def find_micro_batch(
    args: ContAccumTrainingArguments,
    model: nn.Module,
    loss: Any,
    dataset: Any,
    smallest: int,
    compute_loss: Callable[[Any, list[Row]], Tensor],
) -> int:
    """Return the largest micro-batch that every rank has room for.

    Divisors of an update's pairs are tried, with the longest texts of the data. Weights, bank and
    random numbers stay as they are.

    Args:
        args: the arguments of the run.
        model: the model that trains.
        loss: the training loss.
        dataset: the training set, or several by name.
        smallest: the smallest micro-batch in which a query has negatives.
        compute_loss: returns the value of a loss for rows of the data.

    Raises:
        UserError: where the smallest micro-batch does not fit.
    """
    states = RandomStates.capture()
    num_pairs = args.per_device_train_batch_size * args.gradient_accumulation_steps
    rows = get_longest_rows(dataset, num_pairs)
    sizes = [size for size in range(smallest, num_pairs + 1) if num_pairs % size == 0]

    def try_size(size: int) -> None:
        # A gradient cache has all pairs in one batch, and encodes ``size`` of them at once.
        batch = rows if uses_gradient_cache(loss) else rows[:size]
        try_micro_batch(size, model, loss, lambda trial_loss: compute_loss(trial_loss, batch))

    largest = find_largest_micro_batch(sizes, try_size, args.device)
    states.restore()
    return largest


def find_largest_micro_batch(
    sizes: Iterable[int], try_size: Callable[[int], None], device: torch.device
) -> int:
    """Return the largest micro-batch that every rank has memory for.

    Sizes are tried from the smallest on, until memory runs out. The system of a host ends processes
    rather than refuse memory, so a host is not asked for a size that would take more than it has.

    Args:
        sizes: ascending.
        try_size: does a micro-step of a size.
        device: the device whose memory is measured.

    Raises:
        UserError: where the smallest size does not fit.
    """
    largest = 0
    smallest = None
    memory_of_largest = 0.0
    for size in sizes:
        smallest = smallest or size
        if largest and device.type == "cpu":
            free = psutil.virtual_memory().available / 2**20
            if memory_of_largest * size / largest > _SHARE_OF_FREE_MEMORY * free:
                break
        reset_peak_memory(device)
        memory_before = peak_memory_mb(device)
        try:
            try_size(size)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            break
        memory_of_largest = peak_memory_mb(device) - memory_before
        largest = size
    clear_device_cache(garbage_collection=True)
    largest = int(over_ranks("MIN", torch.tensor(largest, device=device)))
    if not largest:
        raise UserError(f"out of memory at a micro-batch of {smallest}: {REMEDIES}")
    return largest


def try_micro_batch(
    size: int, model: nn.Module, loss: Any, compute_loss: Callable[[Any], Tensor]
) -> None:
    """Do two micro-steps with a copy of the loss, beside the memory that an optimizer takes.

    The second micro-step has gradients and a full bank beside it. Weights and bank stay as they
    are; the gradients are dropped.

    Args:
        size: pairs per micro-batch; a gradient cache encodes so many at once.
        model: the model that trains.
        loss: the training loss.
        compute_loss: returns the value of a loss for the rows of the trial.
    """
    trial_loss = _copy_for_trial(loss, model)
    set_mini_batch_size(trial_loss, size)
    optimizer_states = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            optimizer_states += [torch.zeros_like(parameter), torch.zeros_like(parameter)]
    try:
        for _ in range(2):
            compute_loss(trial_loss).backward()
    finally:
        del optimizer_states
        model.zero_grad()


def _copy_for_trial(loss: Any, model: nn.Module) -> Any:
    """Return a copy of a loss with the same model and a bank of its own."""
    trial_loss = copy.deepcopy(loss, {id(model): model})
    for module in trial_loss.modules():
        if isinstance(module, ContAccumLoss):
            # Ranks may run out of memory at different sizes, and must not wait for each other.
            module.settings = dataclasses.replace(module.settings, gather_across_devices=False)
            module.distillation = None  # the rows of a trial have no teacher scores
    return trial_loss
