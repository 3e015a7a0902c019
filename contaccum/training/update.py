"""Updates (optimizer steps): each is on all of its pairs, even if memory runs out, or is skipped.

An update trains on micro-batches from the data loader, each in one micro-step (one forward and one
backward pass, which `contaccum.training.trainer` runs). Once memory has run out, a micro-batch is
trained in several micro-steps, and the update starts again. An update whose loss or gradient is not
finite changes no weight.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from accelerate.utils.memory import clear_device_cache
from sentence_transformers import SentenceTransformerTrainer
from sentence_transformers.base.losses.gradcache import uses_gradient_cache
from torch import Tensor, nn

from contaccum.data.samplers import RESUMABLE_SAMPLERS, get_batch_sampler
from contaccum.distributed import over_ranks, rank, world_size
from contaccum.encoders.grad_norms import TowerGradNorms
from contaccum.errors import UserError, is_out_of_memory
from contaccum.losses.text_ids import count_texts
from contaccum.training.arguments import ContAccumTrainingArguments, get_name
from contaccum.training.losses import Batch, list_bank_losses, unwrap_matryoshka
from contaccum.training.micro_batch import (
    MEMORY_REMEDIES,
    find_largest_divisor,
    set_mini_batch_size,
)

logger = logging.getLogger(__name__)

NO_BATCH = (
    "the training data give no batch, so nothing can be trained: lower "
    "per_device_train_batch_size, set dataloader_drop_last=false, or give more data "
    "(batch_sampler=no_duplicates needs as many different texts as a batch has)"
)
"""The error for a data loader without a batch."""
REMEDY_WITHOUT_NEGATIVES = (
    "Check that texts differ after they are cut to the maximum length, and that prompts or "
    "query ids do not mask every negative"
)
"""What to do if queries have no negatives to learn from."""

_MAX_REASON_LENGTH = 160  # characters of an out-of-memory error that are shown
_MAX_ROWS_SHOWN = 16  # row numbers in a message

MicroStep = Callable[[nn.Module, Batch, float, bool], Tensor]  # `ContAccumTrainer.micro_step`


@dataclass
class Update:
    """The micro-batches of an update on this rank, and the measurements of its micro-steps."""

    number: int  # in the run, from 1
    started: float  # value of time.perf_counter
    micro_batches: list[Batch] = field(default_factory=list)
    pairs: list[int] = field(default_factory=list)  # in each micro-batch; 0: unknown
    num_begun: int = 0  # micro-batches; the newest may still be in training
    # The index of the micro-batch of each micro-step, and the loss, of shape (), times its share of
    # the pairs. The sum of these losses is the loss of the update.
    losses: list[tuple[int, Tensor]] = field(default_factory=list)
    grad_norms: dict[str, float] = field(default_factory=dict)  # of the towers, for the log
    grad_norm: float | None = None  # of the whole model, over all ranks
    learning_rate: float = 0.0  # of the first parameter group
    log_entries: dict[str, Any] = field(default_factory=dict)  # further entries of its line


class Updates:
    """Runner of the updates of a training run, one micro-batch at a time.

    Args:
        smallest: the smallest number of rows with which every query has a negative; ``max_rows``
            never becomes smaller. The parts of an uneven batch may have fewer rows.

    Attributes:
        current: the update in progress.
        max_rows: the maximum number of rows per micro-step; None until memory has run out.
        num_trained: number of updates of the run that have trained: their gradient and learning
            rate were not 0, and they were finite.
        num_skipped: number of updates that were skipped, because they were not finite.
    """

    def __init__(
        self,
        trainer: SentenceTransformerTrainer,
        args: ContAccumTrainingArguments,
        loss: nn.Module,
        smallest: int,
    ) -> None:
        self.smallest = smallest
        self.current = Update(1, time.perf_counter())
        self.max_rows: int | None = None
        self.num_trained = 0
        self.num_skipped = 0
        self._trainer = trainer
        self._args = args
        self._loss = loss
        self._has_cache = uses_gradient_cache(unwrap_matryoshka(loss))
        self._accelerator = trainer.accelerator
        self._tower_norms: TowerGradNorms | None = None
        loss.register_forward_hook(_multiply_by_nan_if_nonfinite)

    def set_micro_batches(self, micro_batches: list[Batch]) -> None:
        """Set all micro-batches of the current update, before it is trained."""
        self.current.micro_batches = micro_batches
        for inputs in micro_batches:
            columns, _ = self._trainer.collect_features(inputs)
            self.current.pairs.append(count_texts(columns[0]) or 0)

    def run_micro_batch(self, model: nn.Module, micro_step: MicroStep) -> Tensor:
        """Run forward and backward for the next micro-batch of the current update.

        When memory runs out, the rows of a micro-step (with a gradient cache: of a mini-batch) are
        halved for the rest of the run. The gradient is dropped, and the update starts again from
        its first micro-batch. Pairs that this update had already added to the bank are then in the
        bank twice. The result is the loss, multiplied by its share of the update's pairs.

        Raises:
            UserError: if memory runs out and no smaller micro-batch is possible.
        """
        update = self.current
        # Read before the micro-step, because DeepSpeed's scheduler steps within the last one.
        update.learning_rate = self._optimizer.param_groups[0]["lr"]
        first = update.num_begun  # index of the first micro-batch to train on
        update.num_begun += 1
        while True:  # until the micro-batch fits into memory
            if self._tower_norms is None:
                encoder = self._accelerator.unwrap_model(model, keep_torch_compile=False)
                # FSDP and DeepSpeed leave only a part of each gradient on a rank.
                is_sharded = self._trainer.is_fsdp_enabled or self._trainer.is_deepspeed_enabled
                self._tower_norms = TowerGradNorms(encoder, model, not is_sharded)
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
            self._halve_rows(reason)
            # Start the update again: drop all that its micro-steps so far have accumulated.
            self._drop_gradients(model)
            self._tower_norms.close()
            self._tower_norms = None
            update.losses.clear()
            first = 0
        if self._accelerator.sync_gradients:  # the last micro-batch of the update
            # The norms are read before the gradient is clipped. DeepSpeed has already made its
            # optimizer step, but then the norms are accumulated from gradients of embeddings.
            update.grad_norms = self._tower_norms.read(self._gradient_scale)
        return loss

    def _run_micro_steps(self, model: nn.Module, micro_step: MicroStep, first: int) -> Tensor:
        """Train all micro-batches from index ``first`` on; return the loss of the newest one."""
        update = self.current
        if first == 0:
            # Gradients are centred over the pairs of the update, on all ranks that share a bank.
            for bank_loss in list_bank_losses(self._loss):
                num_pairs = sum(update.pairs)
                if bank_loss.settings.gather_across_devices:
                    pairs_of_rank = torch.tensor(num_pairs, device=self._args.device)
                    num_pairs = int(over_ranks("SUM", pairs_of_rank))
                bank_loss.begin_update(num_pairs)
        for index in range(first, update.num_begun):
            inputs = update.micro_batches[index]
            # With a gradient cache, the batch is one micro-step, with smaller mini-batches.
            parts = split_rows(inputs, None if self._has_cache else self.max_rows)
            # The losses are means over pairs. With these weights, each pair of the update has the
            # same weight, also if the last micro-batch of an epoch is short. If the size of a
            # micro-batch is unknown, all micro-batches have the same weight.
            batch_weight = 1 / len(update.pairs)
            if all(update.pairs):
                batch_weight = update.pairs[index] / sum(update.pairs)
            is_newest_batch = index == update.num_begun - 1
            batch_loss = torch.zeros((), device=self._args.device)
            for part_number, (part, share) in enumerate(parts, start=1):
                is_last_part = is_newest_batch and part_number == len(parts)
                weight = share * batch_weight
                part_loss = micro_step(model, part, weight, is_last_part)
                update.losses.append((index, part_loss))
                batch_loss = batch_loss + part_loss
        return batch_loss

    def _halve_rows(self, reason: str) -> None:
        """Halve the rows of a micro-step for the rest of the run, after memory has run out."""
        # Other ranks would have to repeat the update too, and DeepSpeed has already reduced a part
        # of the gradient.
        if world_size() > 1 or self._trainer.is_deepspeed_enabled:
            raise UserError(
                f"out of memory on rank {self._args.process_index} ({reason}), and with several "
                "ranks or DeepSpeed the micro-batch cannot be halved during training. Lower "
                "per_device_train_batch_size, raise gradient_accumulation_steps, and continue with "
                "resume_from_checkpoint=last"
            )
        sizes = [self.max_rows or self._args.pairs_per_micro_batch, max(self.current.pairs)]
        loss = unwrap_matryoshka(self._loss)
        if self._has_cache and hasattr(loss, "mini_batch_size"):
            sizes.append(loss.mini_batch_size)  # the user's may have smaller ones
        rows = min(sizes)  # in the largest micro-step of the update
        if rows <= self.smallest:
            raise UserError(
                f"out of memory at a micro-batch of {rows} ({reason}): {MEMORY_REMEDIES}"
            )
        self.set_max_rows(max(rows // 2, self.smallest))
        logger.warning(
            f"update {self.current.number}: out of memory at a micro-batch of {rows} ({reason}). "
            f"From now on at most {self.max_rows} rows are encoded at once. The pairs per update "
            "stay the same"
        )

    def set_max_rows(self, rows: int | None) -> None:
        """Limit the rows of a micro-step, or of a gradient cache's mini-batch (None: no limit)."""
        self.max_rows = rows
        if rows is not None:
            set_mini_batch_size(self._loss, rows)

    def set_micro_batch_size(self, num_pairs: int) -> None:
        """Use micro-batches of at most ``num_pairs`` pairs from now on."""
        args = self._args
        # A run that is resumed on more ranks has fewer pairs per update on each of them.
        pairs_per_update = args.per_device_train_batch_size * args.gradient_accumulation_steps
        num_pairs = find_largest_divisor(pairs_per_update, num_pairs)
        args.set_micro_batch_size(num_pairs)
        set_mini_batch_size(self._loss, num_pairs)

    @property
    def _optimizer(self) -> torch.optim.Optimizer:
        assert self._trainer.optimizer is not None  # transformers has created it by now
        return self._trainer.optimizer

    @property
    def _gradient_scale(self) -> float:
        """The factor by which a gradient scaler (fp16) scales gradients; 1 without a scaler."""
        scaler = getattr(self._accelerator, "scaler", None)
        return 1.0 if scaler is None else scaler.get_scale()

    def _drop_gradients(self, model: nn.Module) -> None:
        model.zero_grad()
        # Also those of parameters of the loss. accelerate's optimizer.zero_grad() does nothing
        # between the micro-steps of an update.
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def skip_if_nonfinite(self, norm: float, model: nn.Module) -> None:
        """Skip the current update if its loss or gradient is infinite or NaN.

        Its line in the log names the cause and the rows of the training data. A gradient scaler
        (fp16) multiplies the gradient, so an overflow is normal and not counted: the scaler itself
        skips the step and lowers its scale. ``norm`` is that of the model's gradient over all ranks
        after the last micro-step.

        Raises:
            UserError: if ``max_skipped_updates`` updates were skipped before this one.
        """
        update = self.current
        update.grad_norm = norm
        if math.isfinite(norm):
            return
        scale = self._gradient_scale
        micro_batches = sorted({index for index, x in update.losses if not torch.isfinite(x)})
        # Ranks may have different losses, but all ranks skip the update, for the same cause.
        cause = "gradient"
        if over_ranks("MAX", torch.tensor(len(micro_batches), device=self._args.device)) > 0:
            cause = "loss"
        update.log_entries["skipped"] = cause
        update.log_entries["scale"] = scale
        if cause == "gradient" and scale > 1:
            # All losses are finite, so the scale was too large for the gradient.
            update.log_entries["skipped"] = "overflow"
            return
        if cause == "gradient":
            # All losses are finite, so it is unknown which micro-batch caused the gradient.
            micro_batches = list(range(update.num_begun))
        rows = self._find_rows(micro_batches) if micro_batches else []
        update.log_entries["micro_steps"] = micro_batches
        update.log_entries["rows"] = rows
        self.num_skipped += 1
        place = "on another rank"
        if rows is None:
            place = "in unknown rows"
        elif rows:
            shown = ", ".join(map(str, rows[:_MAX_ROWS_SHOWN]))
            shown += ", ..." if len(rows) > _MAX_ROWS_SHOWN else ""
            place = f"rows {shown} of the training data"
        place_of_rank = f"rank {rank()}: " if world_size() > 1 else ""
        message = f"{place_of_rank}update {update.number}: the {cause} is not finite ({place})"
        max_skipped = self._args.max_skipped_updates
        if self.num_skipped > max_skipped:
            raise UserError(
                f"{message}, and max_skipped_updates={max_skipped} updates were skipped before it. "
                "The weights are those before this update. Check these rows, or lower learning_rate"
            )
        logger.warning(
            f"{message}: skipped, {self.num_skipped} of max_skipped_updates={max_skipped}. The "
            "weights do not change. If more updates are skipped, check these rows or lower "
            "learning_rate"
        )
        # An optimizer step without gradients changes nothing. A gradient scaler skips the step
        # itself, and needs the gradients to detect the overflow.
        if getattr(self._accelerator, "scaler", None) is None:
            self._drop_gradients(model)

    def _find_rows(self, micro_batches: list[int]) -> list[int] | None:
        """Return the rows of the training data in some micro-batches of the update on this rank.

        The sampler computes the batches of the current epoch again. This is possible only if they
        depend on nothing but seed and epoch; otherwise the result is None.
        """
        args = self._args
        has_resumable_sampler = get_name(args.batch_sampler) in RESUMABLE_SAMPLERS
        if not has_resumable_sampler or callable(args.multi_dataset_batch_sampler):
            return None
        num_steps = args.gradient_accumulation_steps
        updates_per_epoch = max(math.ceil(len(self._trainer._train_dataloader) / num_steps), 1)
        first_of_update = (self.current.number - 1) % updates_per_epoch * num_steps
        # The ranks take the batches of the sampler in turn.
        positions = {
            (first_of_update + index) * args.world_size + args.process_index
            for index in micro_batches
        }
        sampler = get_batch_sampler(self._trainer._train_dataloader)
        # islice stops the sampler after the last batch that is needed.
        batches = islice(sampler, max(positions) + 1)
        return [row for index, batch in enumerate(batches) if index in positions for row in batch]

    def end_update(self) -> None:
        """Count the current update, and start the next one."""
        update = self.current
        if update.grad_norm != 0 and update.learning_rate and "skipped" not in update.log_entries:
            self.num_trained += 1
        self.current = Update(update.number + 1, time.perf_counter())

    def require_trained(self, num_updates: int) -> None:
        """Raise `UserError` if no update of a run has trained, of ``num_updates`` in all."""
        if self.num_trained:
            return
        if num_updates == 0:
            raise UserError(NO_BATCH)
        raise UserError(
            f"{self._args.output_dir}: the run has trained nothing: in each of its {num_updates} "
            "updates the gradient or the learning rate was 0, or the update was skipped. Set "
            f"warmup_steps below the number of updates. {REMEDY_WITHOUT_NEGATIVES}"
        )


def _multiply_by_nan_if_nonfinite(module: nn.Module, arguments: Any, loss: Any) -> Any:
    """Make the gradient of a loss NaN if its value is not finite; a forward hook of the loss.

    A loss can be infinite while its gradient is finite. With the hook, the norm of the gradient
    over all ranks shows both, also on another rank.
    """
    if not isinstance(loss, Tensor):
        return loss
    factor = torch.where(torch.isfinite(loss.detach()), 1.0, math.nan)
    return loss * factor


def split_rows(inputs: Batch, max_rows: int | None) -> list[tuple[Batch, float]]:
    """Split a collated batch into parts of at most ``max_rows`` rows; None for a single part.

    Each part comes with its share of the batch's rows, a fraction.
    """
    tensors = {key: x for key, x in inputs.items() if isinstance(x, Tensor) and x.ndim}
    lengths = {len(tensor) for tensor in tensors.values()}
    num_rows = max(lengths)
    if max_rows is None or num_rows <= max_rows:
        return [(inputs, 1.0)]
    if len(lengths) > 1:
        raise UserError(
            "out of memory, and this batch cannot be split by rows, because its tensors have "
            "different lengths. Lower per_device_train_batch_size"
        )
    parts = []
    for rows in torch.arange(num_rows).tensor_split(math.ceil(num_rows / max_rows)):
        part = {key: tensor[rows[0] : rows[-1] + 1] for key, tensor in tensors.items()}
        parts.append(({**inputs, **part}, len(rows) / num_rows))
    return parts
