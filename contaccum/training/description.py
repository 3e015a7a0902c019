"""What a run is told to be before it starts: its sizes, a fact a line, and what its model will not do as hoped."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from torch import nn

from contaccum.training.arguments import BANK_METHODS
from contaccum.training.batches import describe_batches
from contaccum.training.columns import text_columns_of
from contaccum.training.in_training import evaluation_line
from contaccum.training.set_sampling import set_lines

if TYPE_CHECKING:
    from contaccum.training.trainer import ContAccumTrainer

logger = logging.getLogger(__name__)


def describe_run(trainer: ContAccumTrainer) -> str:
    """What is about to happen, one fact a line, for the start of a run."""
    args, h = trainer.args, max(0, len(text_columns_of(trainer.train_dataset)) - 2)
    columns = args.per_device_train_batch_size * (1 + h)
    if args.gathers:
        columns *= args.world_size
    bank = (args.bank_size or 0) if args.method in BANK_METHODS else 0
    bank_columns = bank * (1 + (h if args.bank_hard_negatives else 0))
    queries = bank if args.query_bank_size is None else args.query_bank_size
    micro_batches = args.total_train_batch_size // args.world_size // args.pairs_per_micro_batch
    lines = [
        f"method                {args.method}",
        f"pairs per micro-batch {args.pairs_per_micro_batch}",
        f"micro-batches (K)     {micro_batches}",
        f"devices               {args.world_size}",
        f"pairs per update      {args.total_train_batch_size}",
        f"bank rows             {f'{bank:,} passages, {queries:,} queries' if bank else 'none'}",
        f"negatives per query   {columns - 1 + bank_columns:,}" + (" once the bank is full" if bank else ""),
        f"updates               {trainer.state.max_steps:,}",
        f"learning rate         {args.scaled_learning_rate:g}",
    ]
    batches = describe_batches(args)
    if batches:
        lines.insert(3, f"batches               {batches}")
    if bank:
        shared = args.world_size if args.gathers else 1
        age = bank / (args.total_train_batch_size / args.world_size * shared)
        lines.insert(len(lines) - 3, f"oldest bank entry     {age:.1f} updates old")
    evaluation = evaluation_line(trainer)
    if evaluation:
        lines.append(f"evaluation            {evaluation}")
    if trainer.set_shares:
        lines += set_lines(args, trainer.set_shares)
    return "\n".join(lines)


def warn_about_batch_norm(model: nn.Module) -> None:
    """Accumulated micro-batches are not one batch to a BatchNorm layer: say so."""
    names = [name for name, module in model.named_modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    if names:
        logger.warning(
            f"the model has BatchNorm ({names[0]}{' and others' if len(names) > 1 else ''}): it normalises with the "
            "statistics of each micro-batch, so accumulated gradients differ from those of one large batch, and bank "
            "entries carry the statistics of their time. Prefer LayerNorm, or put BatchNorm in eval mode."
        )
