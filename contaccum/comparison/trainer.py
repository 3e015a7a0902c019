"""The trainer of a comparison: ContAccumTrainer that also proves which pairs each of its updates saw."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from contaccum.training.trainer import ContAccumTrainer

# Odd constants of splitmix64, as signed 64-bit numbers.
_MIX = (-4658895280553007687, -7723592293110705685)


class ComparedTrainer(ContAccumTrainer):
    """Trains as :class:`ContAccumTrainer` does, bit for bit, and adds up a hash of the tokens of every update."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._open_update: Tensor | None = None
        self._updates_seen: list[Tensor] = []
        self.add_callback(_CloseUpdate(self))

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        # Negatives that each run mines for itself are no part of what all runs have in common.
        own = () if self.refresh is None else tuple(f"{name}_" for name in self.refresh.columns)
        seen = pairs_hash({key: value for key, value in inputs.items() if not key.startswith(own)})
        if seen is not None:
            self._open_update = seen if self._open_update is None else self._open_update + seen
        return super().training_step(model, inputs, num_items_in_batch)

    def data_order(self) -> str | None:
        """A hash of which pairs were in which update, however they were batched; None for inputs without tokens."""
        if not self._updates_seen:
            return None
        # One copy at the end: reading a hash per update would make a GPU wait.
        return hashlib.sha256(torch.stack(self._updates_seen).cpu().numpy().tobytes()).hexdigest()


class _CloseUpdate(TrainerCallback):
    def __init__(self, trainer: ComparedTrainer) -> None:
        self.trainer = trainer

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        trainer = self.trainer
        if trainer._open_update is not None:
            trainer._updates_seen.append(trainer._open_update)
            trainer._open_update = None


def pairs_hash(inputs: dict[str, Any]) -> Tensor | None:
    """A 64-bit hash of the rows of a batch, () int64: the sum over rows, so that their order and batches do not matter.

    Texts of a row belong together: exchanged passages change the hash, padding does not.
    """
    rows: Tensor | int = 0
    for name in sorted(name for name in inputs if name.endswith("input_ids")):
        ids, mask = inputs[name].long(), inputs[name.removesuffix("input_ids") + "attention_mask"].long()
        places = mask.cumsum(dim=1)  # counted from the first real token, on whichever side the padding is
        rows = _mixed(rows * 3 + (_mixed(ids * 1_000_003 + places) * mask).sum(dim=1))
    return rows.sum() if isinstance(rows, Tensor) else None


def _mixed(x: Tensor) -> Tensor:
    for factor in _MIX:
        x = x * factor  # int64 wraps around
        x = x ^ (x >> 29)
    return x
