"""The update under way: in smaller parts once memory has run out, and left out whole when it is not finite.

Pairs per update never change, and no pair is left out. Nothing here knows what the loss is; what a micro-step does is
the trainer's affair. Also how much memory is used, and the largest micro-batch that there is room for.
"""

from __future__ import annotations

import copy
import heapq
import logging
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size
from sentence_transformers.base.losses.gradcache import uses_gradient_cache
from torch import Tensor, nn

from contaccum.data.samplers import RESUMING
from contaccum.data.sampling import first_texts
from contaccum.distributed import over_ranks, world_size
from contaccum.encoders.grad_norms import TowerGradNorms
from contaccum.errors import UserError
from contaccum.losses.contaccum import ContAccumLoss
from contaccum.losses.text_ids import rows_in
from contaccum.training.arguments import name_of

logger = logging.getLogger(__name__)

WHAT_ELSE = (
    "set bf16=true or gradient_checkpointing=true, lower passage_max_length or bank_size, or take a smaller model"
)


@dataclass
class Update:
    """What is known of the update under way: its micro-batches, and for the log what its micro-steps came to."""

    started: float = field(default_factory=lambda: time.perf_counter())
    inputs: list[dict[str, Any]] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)  # () of each micro-step, its share of the update's mean
    places: list[int] = field(default_factory=list)  # the micro-batch of each micro-step
    norms: dict[str, float] = field(default_factory=dict)
    learning_rate: float | None = None
    about: dict[str, Any] = field(default_factory=dict)  # what else its line in the log says
    pairs: int = 0  # of its micro-batches so far, on this rank
    expected_pairs: Counter[str | None] = field(default_factory=Counter)  # of all of them, by data set, on this rank


class Updates:
    """The updates of a run; ``present`` is the one under way."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.caches = uses_gradient_cache(trainer.loss)
        self.rows_fit: int | None = None  # of a micro-step, once memory has run out at more
        self.skipped = 0  # as they were not finite
        self._tower_norms: TowerGradNorms | None = None
        self.begin()
        for loss in trainer.loss.values() if isinstance(trainer.loss, dict) else [trainer.loss]:
            loss.register_forward_hook(_spoil_if_not_finite)

    def begin(self) -> None:
        """Another one, of which nothing is known yet."""
        self.present = Update()

    def step(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        """Forward and backward of a micro-batch; returns its share of the update's loss.

        When memory runs out, micro-batches are halved from there on, and the gradient of the update begins again with
        all of its pairs: none is left out, and what was in the bank by then is there twice. Raises `UserError` when no
        smaller micro-batch helps, or several ranks would have to agree on one.
        """
        update, trainer, first = self.present, self.trainer, len(self.present.inputs)
        update.learning_rate = trainer.optimizer.param_groups[0]["lr"]  # DeepSpeed's may move on with its step
        update.inputs.append(inputs)
        update.pairs += self._pairs_of(inputs)
        while True:
            if self._tower_norms is None:
                plain = trainer.accelerator.unwrap_model(model, keep_torch_compile=False)
                self._tower_norms = TowerGradNorms(plain, model, whole=trainer.engine is None)
            try:
                loss = self._micro_steps(model, first)
                break
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                what = " ".join(str(error).split())[:160]
            # Outside of the handler: what it caught holds on to the activations.
            clear_device_cache(garbage_collection=True)
            self._halve(what)
            self._forget_gradients(model)
            self._tower_norms.close()
            self._tower_norms, update.losses, update.places, first = None, [], [], 0
        if trainer.accelerator.sync_gradients:  # the gradient is complete; only DeepSpeed has stepped with it by now
            update.norms = self._tower_norms.read(self.scale)
        return loss

    @property
    def scale(self) -> float:
        """Of a gradient scaler; 1 without."""
        scaler = getattr(self.trainer.accelerator, "scaler", None)
        return 1.0 if scaler is None else scaler.get_scale()

    def count_pairs(self, batches: list[dict[str, Any]]) -> None:
        """Count the pairs of the update that begins, from its collated micro-batches."""
        for inputs in batches:
            self.present.expected_pairs[inputs.get("dataset_name")] += self._pairs_of(inputs)

    def _announce_pairs(self) -> None:
        """Tell every ContAccumLoss how many pairs of this update it will get: of all ranks, if they share its bank."""
        expected, losses = self.present.expected_pairs, self.trainer.loss
        for bank_loss in self.trainer.bank_losses():
            pairs = expected.total()
            if isinstance(losses, dict):
                pairs = sum(expected[name] for name, loss in losses.items() if bank_loss in loss.modules())
            if bank_loss.settings["gather_across_devices"]:
                pairs = int(over_ranks("SUM", torch.tensor(pairs, device=self.trainer.args.device)))
            bank_loss.begin_update(pairs)

    def _pairs_of(self, inputs: dict[str, Any]) -> int:
        return rows_in(self.trainer.collect_features(inputs)[0][0]) or 0

    def _micro_steps(self, model: nn.Module, first: int) -> Tensor:
        """Micro-steps of the micro-batches from ``first`` on; the loss of the last one."""
        update = self.present
        if first == 0:
            self._announce_pairs()
        loss = torch.zeros((), device=self.trainer.args.device)
        for index in range(first, len(update.inputs)):
            inputs, is_last = update.inputs[index], index == len(update.inputs) - 1
            parts = split_rows(inputs, None if self.caches else self.rows_fit)
            for number, (part, share) in enumerate(parts, start=1):
                step = self.trainer.micro_step(model, part, share, last=is_last and number == len(parts))
                update.losses.append(step)
                update.places.append(index)
                loss = loss + step if is_last else loss
        return loss

    # Memory ----------------------------------------------------------------------------------------------------------

    def _halve(self, what: str) -> None:
        args = self.trainer.args
        rows = min(self.rows_fit or args.pairs_per_micro_batch, max(map(self._pairs_of, self.present.inputs)))
        if world_size() > 1 or self.trainer.is_deepspeed_enabled:  # which has reduced a part of the gradient by then
            mend = "lower per_device_train_batch_size, raise gradient_accumulation_steps, and resume from `last`"
            raise UserError(f"out of memory on rank {args.process_index} ({what}), which cannot split alone: {mend}")
        if rows <= self._least_rows:
            raise UserError(f"out of memory at a micro-batch of {rows} ({what}): {WHAT_ELSE}")
        self.rows_fit = max(rows // 2, self._least_rows)
        _encode_at_once(self.trainer.loss, self.rows_fit)
        logger.warning(
            f"update {self.trainer.state.global_step + 1}: out of memory at a micro-batch of {rows} ({what}); from "
            f"here on it is {self.rows_fit}, in as many more micro-steps: pairs per update stay"
        )

    @property
    def _least_rows(self) -> int:
        """The smallest micro-batch: 1 where a query alone has negatives, of a bank, of a cache, or hard ones."""
        trainer = self.trainer
        alone = trainer.hard_negatives or self.caches or any(x.settings["bank_size"] for x in trainer.bank_losses())
        return 1 if alone else 2

    def find_micro_batch(self) -> None:
        """Take the largest micro-batch that every rank has room for; weights, bank and random numbers stay.

        Divisors of an update's pairs are tried from the smallest on, with the longest texts. A host, whose system ends
        processes rather than refuse memory, is not asked for a size that would take more than it has free.
        """
        args, states, found, grown = self.trainer.args, random_states(), 0, 0.0
        local = args.per_device_train_batch_size * args.gradient_accumulation_steps
        rows = longest_rows(self.trainer.train_dataset, local)
        for n in [n for n in range(self._least_rows, local + 1) if local % n == 0]:
            room = 0.8 * psutil.virtual_memory().available / 2**20
            if found and args.device.type == "cpu" and grown * n / found > room:
                break
            forget_peak_memory(args.device)
            before = peak_memory_mb(args.device)
            try:
                self._try(rows, n)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                break
            grown, found = peak_memory_mb(args.device) - before, n
        clear_device_cache(garbage_collection=True)
        set_random_states(states)
        found = int(over_ranks("MIN", torch.tensor(found, device=args.device)))
        if not found:
            raise UserError(f"out of memory at a micro-batch of {self._least_rows}: {WHAT_ELSE}")
        self.take_micro_batch(found)

    def _try(self, rows: list[dict[str, Any]], n: int) -> None:
        """Forward and backward of ``n`` rows, with a bank of its own and room for the optimizer."""
        trainer = self.trainer
        loss: Any = copy.deepcopy(trainer.loss, {id(trainer.model): trainer.model})
        for one in loss.modules():
            if isinstance(one, ContAccumLoss):  # ranks may run out at different sizes, and must not wait here
                one.settings = {**one.settings, "gather_across_devices": False}
                one.distillation = None  # these rows have no scores
        _encode_at_once(loss, n)
        states = [torch.zeros_like(p) for p in trainer.model.parameters() if p.requires_grad for _ in range(2)]
        try:
            for _ in range(2):  # the second has gradients and a bank beside it
                inputs = trainer._prepare_inputs(trainer.data_collator(rows if self.caches else rows[:n]))
                with trainer.accelerator.autocast():
                    value = loss(*trainer.collect_features(inputs))
                value.backward()
        finally:
            del states
            trainer.model.zero_grad()

    def take_micro_batch(self, n: int) -> None:
        """From now on micro-batches of ``n`` pairs."""
        self.trainer.args.take_micro_batch(n)
        _encode_at_once(self.trainer.loss, n)

    # Numbers that are not finite -------------------------------------------------------------------------------------

    def judge(self, model: nn.Module, norm: Any) -> None:
        """Leave out an update whose gradient has a ``norm``, over all ranks, that is not finite; name rows to blame.

        So is one where a gradient of the loss's own parameters is not finite, which the norm does not cover. Raises
        `UserError` when ``max_skipped_updates`` are skipped already.
        """
        if norm is None or (math.isfinite(float(norm)) and self._loss_gradients_are_finite(model)):
            return
        update, trainer, scale = self.present, self.trainer, self.scale
        most = trainer.args.max_skipped_updates
        blamed = sorted({i for i, loss in zip(update.places, update.losses, strict=True) if not torch.isfinite(loss)})
        if not blamed and scale > 1:  # what a scaler is there for: it skips the step and halves its scale
            update.about |= {"skipped": "overflow", "scale": scale}
            return
        kind, blamed = ("loss", blamed) if blamed else ("gradient", list(range(len(update.inputs))))
        rows = self._rows_of(blamed)
        update.about |= {"skipped": kind, "scale": scale, "micro_steps": blamed, "rows": rows}
        self.skipped += 1
        shown = "unknown" if rows is None else ", ".join(map(str, rows[:16])) + (", ..." if len(rows) > 16 else "")
        text = f"update {trainer.state.global_step + 1}: the {kind} is not finite (rows {shown} of the training data)"
        if self.skipped > most:
            mend = "look at these rows, or lower learning_rate; the weights are those before this update"
            raise UserError(f"{text}, and max_skipped_updates={most} are skipped already: {mend}")
        logger.warning(f"{text}: skipped, {self.skipped} of max_skipped_updates={most}")
        if getattr(self.trainer.accelerator, "scaler", None) is None:  # which skips the step by itself
            self._forget_gradients(model)

    def _forget_gradients(self, model: nn.Module) -> None:
        model.zero_grad()
        # Parameters of the loss are no part of the model. The optimizer's own zero_grad does nothing within an update.
        for parameter in self._optimized_parameters():
            parameter.grad = None

    def _optimized_parameters(self) -> Iterator[nn.Parameter]:
        for group in self.trainer.optimizer.param_groups:
            yield from group["params"]

    def _loss_gradients_are_finite(self, model: nn.Module) -> bool:
        """Return whether the gradients of trained parameters outside of the model are finite, on every rank."""
        if self.trainer.engine is not None:  # it trains the model's parameters alone, in forms of its own
            return True
        of_model = {id(parameter) for parameter in model.parameters()}
        of_loss = [parameter for parameter in self._optimized_parameters() if id(parameter) not in of_model]
        if not of_loss:
            return True
        finite = all(bool(torch.isfinite(p.grad).all()) for p in of_loss if p.grad is not None)
        return bool(over_ranks("MIN", torch.tensor(int(finite), device=self.trainer.args.device)))

    def _rows_of(self, micro_steps: list[int]) -> list[int] | None:
        """Rows of the training data in some micro-steps of the update under way; None: the sampler cannot tell."""
        trainer, args = self.trainer, self.trainer.args
        others = name_of(args.batch_sampler) not in RESUMING or callable(args.multi_dataset_batch_sampler)
        if trainer.batch_sampler is None or others:
            return None
        k = args.gradient_accumulation_steps
        first = trainer.state.global_step % max(-(-len(trainer._train_dataloader) // k), 1) * k
        wanted = {(first + index) * args.world_size + args.process_index for index in micro_steps}
        # It makes an epoch's batches from the seed and the epoch alone, so that they can be made again.
        batches = zip(range(max(wanted) + 1), trainer.batch_sampler, strict=False)
        return [row for number, batch in batches if number in wanted for row in batch]


def _spoil_if_not_finite(module: nn.Module, arguments: Any, loss: Any) -> Any:
    """A loss that is not finite gets a gradient that is not finite either, on whichever rank it is."""
    return loss * torch.where(torch.isfinite(loss.detach()), 1.0, math.nan) if isinstance(loss, Tensor) else loss


def _encode_at_once(loss: Any, rows: int) -> None:
    """Set the mini-batches of a gradient cache, if the loss or what it wraps has one."""
    for module in loss.modules() if uses_gradient_cache(loss) else ():
        if hasattr(module, "mini_batch_size"):
            module.mini_batch_size = rows


def split_rows(inputs: dict[str, Any], rows: int | None) -> list[tuple[dict[str, Any], float]]:
    """A collated batch, tensors (n, ...) and others, in parts of at most ``rows`` rows, each with its share of n."""
    tensors = {key: value for key, value in inputs.items() if isinstance(value, Tensor) and value.ndim}
    lengths = {len(value) for value in tensors.values()}
    n = max(lengths)
    if rows is None or n <= rows:
        return [(inputs, 1.0)]
    if len(lengths) > 1:
        raise UserError("out of memory, and this batch cannot be split by rows: lower per_device_train_batch_size")
    parts = zip(*(value.tensor_split(-(-n // rows)) for value in tensors.values()), strict=True)
    return [({**inputs, **dict(zip(tensors, part, strict=True))}, len(part[0]) / n) for part in parts]


def longest_rows(dataset: Any, n: int) -> list[dict[str, Any]]:
    """Rows made of each column's longest texts: no batch of the data is longer in any."""
    parts = dict(dataset) if isinstance(dataset, dict) else {None: dataset}
    name, part = max(parts.items(), key=lambda item: len(item[1].column_names))
    longest: dict[str, list[str]] = {}
    for batch in first_texts(part):
        for column, texts in batch.items():
            longest[column] = heapq.nlargest(n, [*longest.get(column, []), *(x or "" for x in texts)], key=len)
    of_set = {} if name is None else {"dataset_name": name}
    return [{column: texts[i % len(texts)] for column, texts in longest.items()} | of_set for i in range(n)]


def random_states() -> tuple[Any, ...]:
    """The states of every random number generator that training draws from: Python's, numpy's, torch's."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda


def set_random_states(states: tuple[Any, ...]) -> None:
    """Go on from `random_states`."""
    setters: tuple[Callable[[Any], Any], ...] = (random.setstate, np.random.set_state, torch.set_rng_state)
    for setter, state in zip((*setters, torch.cuda.set_rng_state_all), states, strict=True):
        setter(state)


def is_out_of_memory(error: Exception) -> bool:
    """Whether memory ran out, an accelerator's or the host's (PyTorch's allocator, or Python's)."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or should_reduce_batch_size(error)


def peak_memory_mb(device: torch.device | str | None = None) -> float:
    """Peak memory in MB of 2^20 bytes: the GPU's, else the process's resident memory, since `forget_peak_memory`."""
    if device is not None and torch.device(device).type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    with suppress(OSError):
        # Not getrusage, whose peak a child process takes over from its parent.
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 2**10
    return psutil.Process().memory_info().rss / 2**20  # no peak is known elsewhere


def forget_peak_memory(device: torch.device | str) -> None:
    """Start measuring the peak anew, where the system can."""
    if torch.device(device).type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
