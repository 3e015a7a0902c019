"""The part of a loss that lasts from one micro-step to the next.

It holds the bank, the clock and the drift compensation, and saves and restores their state.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from contaccum.bank.compensation import DriftCompensation
from contaccum.bank.memory_bank import MemoryBank
from contaccum.bank.settings import LossSettings
from contaccum.bank.update_clock import UpdateClock
from contaccum.distributed import world_size
from contaccum.errors import ConfigError


class BankedModule(nn.Module):
    """A module with a memory bank, its update clock and its drift compensation.

    The first micro-batch makes the bank, or a state that holds one.

    Attributes:
        settings: the `LossSettings`.
        bank: the `MemoryBank`, None before the first micro-batch.
        clock: the `UpdateClock`.
        compensation: the `DriftCompensation`.
        last: diagnostics of the last micro-step.
    """

    def __init__(self, settings: LossSettings) -> None:
        super().__init__()
        self.settings = settings
        self.bank: MemoryBank | None = None
        self.clock = UpdateClock()
        self.compensation = DriftCompensation(settings)
        self.last: dict[str, Any] = {}

    @property
    def bank_age(self) -> int:
        """The number of updates since the oldest entry in use was encoded."""
        return len(self.clock.update_ends)

    @property
    def _num_aged(self) -> int:
        """The number of entries in use that an older encoder than the present one made."""
        if self.bank is None:
            return 0
        return max(self.clock.update_start - self.bank.oldest_in_use, 0)

    @property
    def _is_shared(self) -> bool:
        """True if all ranks hold one and the same bank."""
        return self.settings.gather_across_devices and world_size() > 1

    def _bank_weight(self, bank: MemoryBank | None) -> float:
        """Return how often a banked pair counts beside a local one."""
        weight = self.settings.bank_weight
        if bank is not None and weight > 1:  # so many pairs, shared by all in use
            weight = weight / max(bank.in_use, 1)
        return min(weight, 1.0)

    def _prepare_bank(self, documents: Tensor, guide_dim: int | None) -> MemoryBank | None:
        """Make the bank, or make it fit documents (n, 1 + h, d); None for plain InfoNCE.

        ``guide_dim`` is as in `MemoryBank.fit`.
        """
        if not self.settings.bank_size:
            return None
        bank = self.bank
        if bank is None:
            bank = self._make_bank(documents.shape[2], documents.dtype, documents.device)
        if bank.documents.device != documents.device:
            self.to(documents.device)  # the model was moved, or a state was loaded elsewhere
        num_negatives = documents.shape[1] - 1
        if not self.settings.bank_hard_negatives:
            num_negatives = 0
        bank.fit(documents.shape[2], num_negatives, guide_dim)
        return bank

    def _make_bank(self, dim: int, dtype: torch.dtype, device: torch.device) -> MemoryBank:
        bank = MemoryBank(
            bank_size=self.settings.bank_size,
            dim=dim,
            dtype=dtype,
            query_bank_size=self.settings.query_bank_size,
            device=device,
            temperature=self.settings.temperature,
        )
        self.bank = bank
        self.compensation.make_means(dim, dtype, device)
        return bank

    def get_extra_state(self) -> Tensor:
        """Return the state of the clock, int64, on the CPU."""
        return self.clock.state()

    def set_extra_state(self, state: Tensor) -> None:
        """Restore what `get_extra_state` returned."""
        self.clock.load_state(state)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        # The first call makes the bank, with the embedding size. A state that holds one makes it
        # here.
        state = {}
        for key, value in state_dict.items():
            if key.startswith(prefix):
                state[key.removeprefix(prefix)] = value
        if "bank.documents" in state:
            self._make_bank_like(state)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def _make_bank_like(self, state: dict[str, Tensor]) -> None:
        """Make the bank that a state was saved of; `ConfigError` if the settings make another."""
        documents = state["bank.documents"]
        num_documents, dim = documents.shape[1:]
        bank = self._make_bank(dim, documents.dtype, documents.device)
        guide_documents = state.get("bank.guide.documents")
        guide_dim = 0 if guide_documents is None else guide_documents.shape[2]
        bank.fit(dim, num_documents - 1, guide_dim)
        self.compensation.probe = None
        probe = state.get("compensation.probe.embeddings")
        if probe is not None:
            self.compensation.make_probe_like(probe)
        shapes = {}
        for name, value in state.items():
            if not name.endswith("_extra_state"):
                shapes[name] = value.shape
        own_shapes = {name: buffer.shape for name, buffer in self.named_buffers()}
        bank_size = int(state["bank._extra_state"][0])
        if shapes != own_shapes or bank_size != self.settings.bank_size:
            raise ConfigError(
                "this state is of another bank_size, query_bank_size or drift_compensation"
            )

    def drift_record(self) -> dict[str, float]:
        """Return the age of the bank and its drift, for a log line; reads the device.

        Returns:
            ``bank_age`` in updates, the shares of the last micro-step's softmax ``bank_mass``,
            ``in_batch_mass`` and ``bank_mass_aged``, and `DriftProbe.record`; see docs/drift.md.
        """
        if self.bank is None or self.bank.total_enqueued == 0:
            return {}
        record: dict[str, float] = {"bank_age": self.bank_age}
        for name in ("in_batch_mass", "bank_mass", "bank_mass_aged"):
            mass = float(self.last.get(name, math.nan))
            if math.isfinite(mass):
                record[name] = mass
        if self.compensation.probe is not None:
            record |= self.compensation.probe.record(self.bank_age)
        return record
