"""The largest micro-batch that memory has room for, by trying: forward and backward of the longest texts there are.

What training will hold beside is there too: a full bank, gradients, and room for the optimizer's states. Afterwards
weights, gradients, bank and random numbers are as before. On a CPU, where the system would rather end the process than
refuse memory, growth is measured on small micro-batches first.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
from accelerate.utils.memory import find_executable_batch_size, should_reduce_batch_size

from contaccum.bank_undo import BankUndo
from contaccum.data.text_columns import column_lengths
from contaccum.distributed import world_size
from contaccum.errors import ConfigError, UserError
from contaccum.losses import ContAccumLoss
from contaccum.training.arguments import BANK_METHODS
from contaccum.training.memory_errors import free_memory, is_out_of_memory, what_else_to_turn
from contaccum.training.safe_state import random_states, set_random_states

if TYPE_CHECKING:
    from contaccum.training.window import WindowedTrainer

logger = logging.getLogger(__name__)

_STATES = 2  # of AdamW, each as large as the weights
_SHARE = 0.8  # of the host's memory that growth may take
_CHUNK = 4096


def find_micro_batch(trainer: WindowedTrainer) -> int:
    """Pairs per micro-batch: the largest divisor of an update's pairs on this device that fits, on every rank.

    Raises:
        ConfigError: for data whose longest texts are not known (a stream).
        UserError: when one pair is too much.
    """
    args = trainer.args
    local = args.per_device_train_batch_size * args.gradient_accumulation_steps
    if world_size() > 1 and args.gathers and args.method not in BANK_METHODS:
        raise ConfigError(
            f"per_device_train_batch_size=auto with method={args.method} and gather_across_devices on "
            f"{world_size()} ranks, which would wait for each other while they try: give a number"
        )
    sizes = [n for n in range(local, 0, -1) if local % n == 0]
    if not trainer.alone_has_negatives:
        sizes = [n for n in sizes if n > 1]
    texts = _longest_texts(trainer, sizes[0])
    tried: list[int] = []

    def fits(batch_size: int) -> int:
        tried.append(batch_size)
        try:
            _try(trainer, texts, batch_size)
        except Exception as error:
            if is_out_of_memory(error) and not should_reduce_batch_size(error):
                raise torch.OutOfMemoryError("the host is out of memory.") from None
            raise
        return batch_size

    def next_smaller() -> int:
        return next((n for n in sizes if n < tried[-1]), 0)

    start = sizes[0]
    if args.device.type == "cpu":
        start = _start_on_host(lambda n: _try(trainer, texts, n), sizes)
    try:
        found: int = find_executable_batch_size(fits, start, next_smaller)()
    except RuntimeError as error:
        if "reached zero" not in str(error):
            raise
        raise UserError(f"out of memory at a micro-batch of {sizes[-1]}: {what_else_to_turn(args)}") from None
    finally:
        free_memory()
    if world_size() > 1:
        smallest = torch.tensor(found, device=args.device)
        dist.all_reduce(smallest, op=dist.ReduceOp.MIN)
        found = int(smallest)
    logger.info(f"micro-batch of {found} fits; tried {tried}")
    return found


def _longest_texts(trainer: WindowedTrainer, n: int) -> list[dict[str, Any]]:
    """Rows made of each column's longest texts: no batch of the data is longer in any."""
    data: Any = trainer.train_dataset
    parts: list[Any] = list(data.values()) if isinstance(data, dict) else [data]
    if not all(hasattr(part, "__len__") for part in parts):
        raise ConfigError(
            "per_device_train_batch_size=auto with streamed training data, whose longest texts are not known: give a "
            "number"
        )
    part = max(parts, key=lambda rows: len(rows))
    names = [name for name in part.column_names if name not in ("label", "labels", "score", "scores", "dataset_name")]
    lengths, stored = column_lengths(part, names), part.with_format(None)
    columns = {}
    for place, name in enumerate(names):
        rows = np.argsort(-lengths[:, place], kind="stable")[:n].tolist()
        columns[name] = [text or "" for text in stored[rows][name]]
    return [{name: texts[i % len(texts)] for name, texts in columns.items()} for i in range(n)]


def _try(trainer: WindowedTrainer, texts: list[dict[str, Any]], n: int) -> None:
    """Forward and backward of ``n`` rows with a full bank; leaves nothing behind, whether it fits or not."""
    model, args = trainer.model, trainer.args
    randomness, modes = random_states(), [(module, module.training) for module in model.modules()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    undo = [BankUndo(loss, loss.settings["bank_size"]) for loss in trainer.bank_losses()]
    states = [torch.empty_like(p) for p in model.parameters() if p.requires_grad for _ in range(_STATES)]
    for state in states:
        state.zero_()  # on a host, memory counts once it is written
    for loss in trainer.bank_losses():
        # Ranks may run out at different sizes, and must not wait for each other here.
        loss.settings = {**loss.settings, "gather_across_devices": False}
    cached: Any = trainer.loss if hasattr(trainer.loss, "mini_batch_size") else None
    given = None if cached is None else cached.mini_batch_size
    try:
        if cached is not None:
            cached.mini_batch_size = n
            inputs = trainer.data_collator([texts[i % len(texts)] for i in range(args.per_device_train_batch_size)])
        else:
            inputs = trainer.data_collator(texts[:n])
        banks = list(trainer.bank_losses())
        for _ in range(2 if banks else 1):
            with trainer.accelerator.autocast():
                trainer.try_micro_step(inputs)
            for loss in banks:
                _fill(loss)
    finally:
        del states
        if cached is not None:
            cached.mini_batch_size = given
        model.zero_grad()
        for back in undo:
            back.restore()
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        for module, training in modes:
            module.training = training
        set_random_states(randomness)


def _fill(loss: ContAccumLoss) -> None:
    """Fill its banks with anything, to see what they take."""
    for info in loss.info_nces.values():
        bank: Any = info.bank
        while bank is not None and bank.fill < bank.bank_size:
            n = min(_CHUNK, bank.bank_size - bank.fill)
            rows = torch.randn(n, bank.dim, device=bank.passages.device)
            bank.enqueue(rows, rows)
            info._summed_pairs = bank.pairs  # to sum it all up would take the square of its size


def _start_on_host(attempt: Callable[[int], None], sizes: list[int]) -> int:
    """The largest size whose growth, extended from two small ones, leaves the host some memory."""
    if len(sizes) < 3:
        return sizes[0]
    small, large = sizes[-1], next(n for n in reversed(sizes) if n >= min(4 * sizes[-1], sizes[0]))
    available = available_memory() * _SHARE
    try:
        attempt(small)  # what is made once is there afterwards
        low, high = growth(lambda: attempt(small)), growth(lambda: attempt(large))
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return small
    per_pair = max(high - low, 0) / (large - small)
    return next((n for n in sizes if low + per_pair * (n - small) <= available), sizes[-1])


def growth(work: Callable[[], None]) -> float:
    """Bytes by which this process was larger at its peak in ``work`` than before it."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = psutil.Process().memory_info().rss
    work()
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        peak = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        peak = psutil.Process().memory_info().rss
    return float(max(peak - before, 0))


def available_memory() -> float:
    """Bytes that this process may still take: of the host, or of its control group."""
    free = float(psutil.virtual_memory().available)
    with suppress(OSError, ValueError):
        group = Path("/sys/fs/cgroup")
        limit, used = ((group / f"memory.{name}").read_text().strip() for name in ("max", "current"))
        free = min(free, float(limit) - float(used)) if limit != "max" else free
    return free
