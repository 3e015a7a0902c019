"""Halving of micro-batches when memory runs out, and the search for the largest that fits.

The search is for ``per_device_train_batch_size=auto``, before training starts. Halving is for a run
in which memory runs out later. In both cases the pairs of an update stay the same: a smaller
micro-batch means more micro-steps. `contaccum.training.updates` runs the micro-steps.

A batch of a loss with a gradient cache is never split into smaller micro-batches. What is limited
or searched for instead is its ``mini_batch_size``, the rows that the cache encodes at once.
"""

from __future__ import annotations

import copy
import dataclasses
import heapq
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psutil
import torch
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size
from sentence_transformers.base.losses.gradcache import uses_gradient_cache
from torch import Tensor, nn

from contaccum.data.sampling import LABELS, first_texts
from contaccum.distributed import over_ranks
from contaccum.errors import ConfigError, UserError
from contaccum.losses.contaccum import ContAccumLoss
from contaccum.training.arguments import ContAccumTrainingArguments
from contaccum.training.loss_factory import list_losses
from contaccum.training.random_states import RandomStates
from contaccum.training.resources import peak_memory_mb, reset_peak_memory
from contaccum.training.train_data import Batch, Row

logger = logging.getLogger(__name__)

REMEDIES = (
    "set bf16=true or gradient_checkpointing=true, lower passage_max_length or bank_size, or train "
    "a smaller model"
)
"""The end of error messages about memory."""

_MAX_SHARE_OF_FREE_MEMORY = 0.8  # share of a host's free memory that a trial may use
_BYTES_PER_MB = 2**20


def is_out_of_memory(error: Exception) -> bool:
    """Return whether an error means that an accelerator or the host is out of memory."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return should_reduce_batch_size(error)


@contextmanager
def report_out_of_memory() -> Iterator[None]:
    """Raise a `UserError` with remedies, if memory runs out in a ``with`` block."""
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            raise UserError(f"out of memory outside of a micro-step: {REMEDIES}") from error
        raise


class MicroBatchLimit:
    """The maximum number of rows per micro-step, which is halved when memory runs out.

    Args:
        loss: the training loss, or a dictionary with one loss for each data set. The mini-batches
            of a gradient cache in it are limited too.
        smallest: the smallest number of rows with which every query has a negative; the limit is
            never set below it. The last part of an uneven batch may nevertheless have fewer rows.
        rank: rank of this process, for messages.
        can_halve: whether this process can repeat an update in smaller micro-steps. It cannot if
            there are other ranks, or if an engine has already reduced a part of the gradient.

    Attributes:
        rows: the maximum number of rows; None until memory has run out.
        smallest: as above.
    """

    def __init__(self, loss: Any, smallest: int, rank: int, can_halve: bool) -> None:
        self.rows: int | None = None
        self.smallest = smallest
        self._loss = loss
        self._rank = rank
        self._can_halve = can_halve

    def restore(self, rows: int | None) -> None:
        """Set the limit of a checkpoint, from which the run resumes; None for no limit."""
        self.rows = rows
        if rows is not None:
            set_mini_batch_size(self._loss, rows)

    def halve(self, rows: int, update: int, reason: str) -> None:
        """Set the limit to half of ``rows``, for the rest of the run.

        Args:
            rows: the number of rows with which memory ran out.
            update: number of the update in progress, for messages.
            reason: message of the out-of-memory error.

        Raises:
            UserError: if no smaller micro-batch is possible.
        """
        if not self._can_halve:
            raise UserError(
                f"out of memory on rank {self._rank} ({reason}), and with several ranks or "
                "DeepSpeed the micro-batch cannot be halved during training. Lower "
                "per_device_train_batch_size, raise gradient_accumulation_steps, and continue with "
                "resume_from_checkpoint=last"
            )
        if rows <= self.smallest:
            raise UserError(f"out of memory at a micro-batch of {rows} ({reason}): {REMEDIES}")
        self.rows = max(rows // 2, self.smallest)
        set_mini_batch_size(self._loss, self.rows)
        logger.warning(
            f"update {update}: out of memory at a micro-batch of {rows} ({reason}). From now on a "
            f"micro-batch has {self.rows} rows, and an update more micro-steps. The pairs per "
            "update stay the same"
        )


def set_mini_batch_size(loss: Any, rows: int) -> None:
    """Set the number of rows that a gradient cache encodes at once; other losses do not change."""
    for loss_of_set in list_losses(loss):
        if not uses_gradient_cache(loss_of_set):
            continue
        for module in loss_of_set.modules():
            if hasattr(module, "mini_batch_size"):
                module.mini_batch_size = rows


def split_rows(inputs: Batch, max_rows: int | None) -> list[tuple[Batch, float]]:
    """Split a collated batch into parts of at most ``max_rows`` rows.

    Args:
        inputs: the batch.
        max_rows: maximum number of rows in a part; None for a single part.

    Returns:
        Each part with its share of the batch's rows, a fraction.

    Raises:
        UserError: for a batch whose tensors have different lengths, which cannot be split by rows.
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
            "out of memory, and this batch cannot be split by rows, because its tensors have "
            "different lengths. Lower per_device_train_batch_size"
        )
    num_parts = math.ceil(num_rows / max_rows)
    pieces = {key: tensor.tensor_split(num_parts) for key, tensor in tensors.items()}
    parts = []
    for index in range(num_parts):
        part = dict(inputs)
        for key, tensor_pieces in pieces.items():
            part[key] = tensor_pieces[index]
        any_tensor = next(iter(pieces.values()))[index]
        parts.append((part, len(any_tensor) / num_rows))
    return parts


def make_longest_rows(dataset: Any, num_rows: int) -> list[Row]:
    """Make rows from the longest texts of each column, by their number of characters.

    Few batches of the data can have more tokens.

    Row i combines the i-th longest text of every column, so most rows are not rows of the data. Of
    several training sets, the rows are those of the set with the most columns, with the longest
    texts of all sets: the first column has the longest of all queries, and so on.

    Args:
        dataset: the training set, or a dictionary of training sets.
        num_rows: number of rows to make.
    """
    name = None
    parts = [dataset]
    if isinstance(dataset, dict):
        num_columns = {
            key: len(set(part.column_names) - set(LABELS)) for key, part in dataset.items()
        }
        names = sorted(num_columns, key=lambda key: num_columns[key], reverse=True)
        parts = [dataset[key] for key in names]
        name = names[0]
    longest: dict[str, list[str]] = {}
    for part in parts:
        for batch in first_texts(part):
            if not longest:
                longest = {column: [] for column in batch}
            # Later sets have at most as many columns.
            for column, texts in zip(longest, batch.values(), strict=False):
                candidates = longest[column] + [str(text) for text in texts if text]
                longest[column] = heapq.nlargest(num_rows, candidates, key=len)
    positives = list(longest.values())[1]
    for column, longest_texts in longest.items():
        if not longest_texts:  # negatives that are filled in later, from positives
            longest[column] = positives
    rows: list[Row] = []
    for index in range(num_rows):
        row = {column: texts[index % len(texts)] for column, texts in longest.items()}
        if name is not None:
            row["dataset_name"] = name
        rows.append(row)
    return rows


def find_largest_divisor(number: int, limit: int) -> int:
    """Return the largest divisor of a number that is not above the limit; both are at least 1."""
    divisor = min(number, limit)
    while number % divisor:
        divisor -= 1
    return divisor


def find_micro_batch(
    args: ContAccumTrainingArguments,
    model: nn.Module,
    loss: Any,
    dataset: Any,
    smallest: int,
    compute_loss: Callable[[Any, list[Row]], Tensor],
) -> int:
    """Find the largest micro-batch that fits into the memory of every rank.

    The divisors of the pairs per update are tried with the longest texts of the data. The search
    does not change weights, bank or random states.

    Args:
        args: the arguments of the run.
        model: the model in training.
        loss: the training loss.
        dataset: the training set, or a dictionary of training sets.
        smallest: the smallest number of pairs with which every query has a negative.
        compute_loss: function that returns the value of a loss for rows of the data.

    Returns:
        The number of pairs per micro-batch.

    Raises:
        ConfigError: if an update has fewer pairs than the smallest micro-batch.
        UserError: if the smallest micro-batch does not fit.
    """
    random_states = RandomStates.capture()
    model.train()  # with dropout and gradient checkpointing, as in training
    num_pairs = args.per_device_train_batch_size * args.gradient_accumulation_steps
    rows = make_longest_rows(dataset, num_pairs)
    sizes = [size for size in range(smallest, num_pairs + 1) if num_pairs % size == 0]
    if not sizes:
        raise ConfigError(
            f"per_device_train_batch_size=auto: an update has {num_pairs} pairs on each device, "
            f"but a micro-batch needs at least {smallest}. Raise total_train_batch_size"
        )

    def try_size(size: int) -> None:
        batch = rows[:size]
        if uses_gradient_cache(loss):
            # The cache gets all pairs in one batch, and encodes ``size`` of them at once.
            batch = rows
        try_micro_batch(size, model, loss, lambda trial_loss: compute_loss(trial_loss, batch))

    largest = find_largest_micro_batch(sizes, try_size, args.device)
    random_states.restore()
    return largest


def find_largest_micro_batch(
    sizes: Sequence[int], try_size: Callable[[int], None], device: torch.device
) -> int:
    """Find the largest size that fits into the memory of every rank.

    Sizes are tried in ascending order until memory runs out. On a CPU, the operating system would
    kill the process when memory runs out. So the memory for a size is predicted from the memory of
    the size before, in proportion, and a size that may need too much is not tried.

    Args:
        sizes: the sizes, ascending.
        try_size: function that runs micro-steps of a size.
        device: the device whose memory is measured.

    Raises:
        UserError: if the smallest size does not fit.
    """
    largest = 0  # the largest size that fits so far
    memory_of_largest = 0.0  # MB
    for size in sizes:
        if largest and device.type == "cpu":
            free_memory = psutil.virtual_memory().available / _BYTES_PER_MB
            predicted_memory = memory_of_largest * size / largest
            if predicted_memory > _MAX_SHARE_OF_FREE_MEMORY * free_memory:
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
        raise UserError(f"out of memory at a micro-batch of {sizes[0]}: {REMEDIES}")
    return largest


def try_micro_batch(
    size: int, model: nn.Module, loss: Any, compute_loss: Callable[[Any], Tensor]
) -> None:
    """Run two micro-steps with a copy of the loss, to see whether they fit into memory.

    Tensors of the size of AdamW's two states are in memory meanwhile. During the second micro-step,
    gradients and a filled bank are in memory as well. Weights and the bank of the original loss do
    not change, and the gradients are dropped.

    Args:
        size: pairs per micro-batch, or pairs that a gradient cache encodes at once.
        model: the model in training.
        loss: the training loss.
        compute_loss: function that returns the value of a loss for the rows of the trial.
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
        del optimizer_states  # otherwise the traceback of an error keeps them in memory
        model.zero_grad()


def _copy_for_trial(loss: Any, model: nn.Module) -> Any:
    """Return a copy of a loss that shares its model, but has a separate bank."""
    # The memo makes deepcopy use the same model instead of a copy.
    trial_loss = copy.deepcopy(loss, memo={id(model): model})
    for module in trial_loss.modules():
        if isinstance(module, ContAccumLoss):
            # Ranks may run out of memory at different sizes, so a trial must not wait for other
            # ranks to gather their embeddings.
            module.settings = dataclasses.replace(module.settings, gather_across_devices=False)
            module.distillation = None  # the rows of a trial have no teacher scores
    return trial_loss
