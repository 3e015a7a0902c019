"""The largest micro-batch that fits into memory.

With ``per_device_train_batch_size=auto``, the largest one is searched for before the first update.
For a loss with a gradient cache, it is ``mini_batch_size``, the rows that are encoded at once.
"""

from __future__ import annotations

import copy
import dataclasses
import heapq
import itertools
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch
from accelerate.utils.memory import clear_device_cache
from sentence_transformers import SentenceTransformerTrainer
from sentence_transformers.base.losses.gradcache import uses_gradient_cache

from contaccum.data.sampling import first_texts
from contaccum.distributed import over_ranks
from contaccum.errors import ConfigError, UserError, is_out_of_memory
from contaccum.training.losses import list_bank_losses, unwrap_matryoshka

Row = dict[str, Any]
"""A row of a training set: texts by column, and a label if the set has labels."""

MEMORY_REMEDIES = (
    "set bf16=true or gradient_checkpointing=true, lower passage_max_length or bank_size, or train "
    "a smaller model"
)
"""The end of error messages about memory."""

_MAX_SHARE_OF_FREE_MEMORY = 0.8  # share of a host's free memory that a trial may use
_BYTES_PER_MB = 2**20


def find_micro_batch(trainer: SentenceTransformerTrainer, smallest: int) -> int:
    """Return the pairs of the largest micro-batch that fits into the memory of every rank.

    The divisors of the pairs per update are tried with the longest texts of the data. On a GPU, the
    largest comes first, because small ones take longest with a gradient cache. On a CPU, the
    operating system would kill the process when memory runs out. So the smallest comes first, and a
    size is not tried if it may need too much, in proportion to the size before. With ``smallest``
    pairs and more, every query has a negative. The search changes random states, but neither
    weights nor bank.

    Raises:
        ConfigError: if an update has fewer pairs than the smallest micro-batch.
        UserError: if the smallest micro-batch does not fit.
    """
    args = trainer.args
    trainer.model.train()  # with dropout and gradient checkpointing, as in training
    num_pairs = args.per_device_train_batch_size * args.gradient_accumulation_steps
    rows = make_longest_rows(trainer.train_dataset, num_pairs)
    sizes = [size for size in range(smallest, num_pairs + 1) if num_pairs % size == 0]
    if not sizes:
        raise ConfigError(
            f"per_device_train_batch_size=auto: an update has {num_pairs} pairs on each device, "
            f"but a micro-batch needs at least {smallest}. Raise total_train_batch_size"
        )
    is_host = is_host_memory(args.device)
    largest = 0  # the largest size that fits so far
    memory_of_largest = 0.0  # MB
    # Both are read once, because memory that a size has freed stays with the process.
    free_memory = psutil.virtual_memory().available / _BYTES_PER_MB
    reset_peak_memory(args.device)
    memory_before = peak_memory_mb(args.device)
    for size in sizes if is_host else reversed(sizes):
        predicted_memory = memory_of_largest * size / max(largest, 1)
        if is_host and predicted_memory > _MAX_SHARE_OF_FREE_MEMORY * free_memory:
            break
        reset_peak_memory(args.device)
        # A gradient cache gets all pairs in one batch, and encodes ``size`` of them at once.
        has_cache = uses_gradient_cache(unwrap_matryoshka(trainer.loss))
        batch = rows if has_cache else rows[:size]
        try:
            try_micro_batch(size, batch, trainer)
            largest = size
            memory_of_largest = peak_memory_mb(args.device) - memory_before
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        # Not in the handler, where the error still refers to the activations.
        clear_device_cache(garbage_collection=True)
        # A GPU takes the first size that fits. On a CPU, larger ones do not fit either.
        if (largest == size) != is_host:
            break
    largest = int(over_ranks("MIN", torch.tensor(largest, device=args.device)))
    if not largest:
        raise UserError(f"out of memory at a micro-batch of {sizes[0]}: {MEMORY_REMEDIES}")
    return largest


def is_host_memory(device: torch.device) -> bool:
    """Return True if the operating system kills a process that uses too much of this memory."""
    return device.type == "cpu"


def try_micro_batch(size: int, rows: list[Row], trainer: SentenceTransformerTrainer) -> None:
    """Run two micro-steps with a copy of the loss, to see whether they fit into memory.

    Tensors of the size of AdamW's two states are in memory meanwhile, and in the second micro-step
    also gradients and a filled bank.
    """
    model = trainer.model
    # The memo makes deepcopy use the same model instead of a copy.
    trial_loss: Any = copy.deepcopy(trainer.loss, memo={id(model): model})
    for module in list_bank_losses(trial_loss):
        # Ranks may run out of memory at different sizes, so a trial must not wait for other ranks
        # to gather their embeddings.
        module.settings = dataclasses.replace(module.settings, gather_across_devices=False)
    set_mini_batch_size(trial_loss, size)
    optimizer_states = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            optimizer_states += [torch.zeros_like(parameter), torch.zeros_like(parameter)]
    try:
        for _ in range(2):
            # Private: it moves the inputs to the device as a training step does.
            inputs = trainer._prepare_inputs(trainer.data_collator(rows))
            with trainer.accelerator.autocast():
                loss = trial_loss(*trainer.collect_features(inputs))
            loss.backward()
    finally:
        model.zero_grad()


def make_longest_rows(dataset: Any, num_rows: int) -> list[Row]:
    """Make rows from the longest texts of each column, by their number of characters.

    Row i combines the i-th longest text of every column. Of several training sets, the rows are
    those with the most characters.
    """
    parts = dataset if isinstance(dataset, dict) else {None: dataset}
    longest_rows: list[Row] = []
    most_characters = 0
    for name, part in parts.items():
        longest: dict[str, list[str]] = defaultdict(list)
        for batch in first_texts(part):
            for column, texts in batch.items():
                candidates = longest[column] + [str(text) for text in texts if text]
                longest[column] = heapq.nlargest(num_rows, candidates, key=len)
        positives = list(longest.values())[1]  # queries are the first column
        # A column of negatives may be empty: they are filled in later.
        columns = {column: itertools.cycle(texts or positives) for column, texts in longest.items()}
        rows = [{column: next(texts) for column, texts in columns.items()} for _ in range(num_rows)]
        num_characters = sum(len(text) for row in rows for text in row.values())
        if num_characters > most_characters:
            most_characters = num_characters
            labels = {} if name is None else {"dataset_name": name}
            longest_rows = [{**row, **labels} for row in rows]
    return longest_rows


def set_mini_batch_size(loss: Any, rows: int) -> None:
    """Set the number of rows that a gradient cache encodes at once; other losses do not change."""
    if uses_gradient_cache(unwrap_matryoshka(loss)):
        for module in loss.modules():
            if hasattr(module, "mini_batch_size"):
                module.mini_batch_size = rows


def find_largest_divisor(number: int, limit: int) -> int:
    """Return the largest divisor of a number that is not above the limit; both are at least 1."""
    divisor = min(number, limit)
    while number % divisor:
        divisor -= 1
    return divisor


def peak_memory_mb(device: torch.device) -> float:
    """Return the peak memory since `reset_peak_memory` in MB (2^20 bytes).

    It is what torch has allocated on a CUDA device; else the resident memory of this process, its
    present one without /proc.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / _BYTES_PER_MB
    with suppress(OSError):
        # In kB. In resource.getrusage, a child process would start with the peak of its parent.
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1]) / 2**10
    return psutil.Process().memory_info().rss / _BYTES_PER_MB


def reset_peak_memory(device: torch.device) -> None:
    """Reset the peak to the current memory; without /proc, the peak stays as it is."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # Linux resets VmHWM
