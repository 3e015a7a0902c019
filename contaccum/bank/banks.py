"""The banks of a loss, one for each direction, with the means and the probe of its two towers: their making and state.

They are made by the first micro-batch, or by a state that holds some. What comes into them is not decided here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from contaccum.bank.directions import DIRECTIONS
from contaccum.bank.drift import MOVES_ENTRIES, DriftProbe, RunningMean
from contaccum.bank.memory_bank import MemoryBank
from contaccum.errors import ConfigError


class Banks(nn.Module):
    """What `BankedInfoNCE` remembers; settings are as there, ``penalties`` that the hardness has any."""

    def __init__(
        self,
        bank_size: int,
        query_bank_size: int | None,
        bank_dtype: torch.dtype | None,
        bank_hard_negatives: bool,
        drift_compensation: str,
        temperature: float,
        directions: tuple[str, ...],
        penalties: bool,
    ) -> None:
        super().__init__()
        self.bank_size, self.query_bank_size, self.bank_dtype = bank_size, query_bank_size, bank_dtype
        self.bank_hard_negatives, self.drift_compensation = bank_hard_negatives, drift_compensation
        self.temperature, self.directions, self.penalties = temperature, directions, penalties
        self.log_scale: nn.Parameter | None = None
        self.bank: MemoryBank | None = None
        self.other_banks: Any = nn.ModuleDict()
        self.passage_mean: RunningMean | None = None
        self.query_mean: RunningMean | None = None
        self.probe: DriftProbe | None = None

    @property
    def banks(self) -> dict[str, MemoryBank]:
        """The bank of each direction, by its name; that of ``query_to_doc`` is ``bank``."""
        return {} if self.bank is None else {"query_to_doc": self.bank, **self.other_banks}

    @property
    def origins(self) -> list[Tensor | None]:
        """Where the means of both towers are by now, (d,)."""
        return [None if mean is None else mean.mean for mean in (self.query_mean, self.passage_mean)]

    def prepare(self, dim: int, negatives: int, like: Tensor, guide: int | None = None) -> MemoryBank | None:
        """Make the banks, or fit them to what comes; None for plain InfoNCE."""
        if not self.bank_size:
            return None
        negatives = negatives if self.bank_hard_negatives else 0
        if self.bank is None:
            self._make(dim, self.bank_dtype or like.dtype, like.dtype, like.device)
        elif self.bank.absent.device != like.device:
            self.to(like.device)  # the model moved, or a state was loaded elsewhere
        self._fit(dim, negatives, guide)
        return self.bank

    def _make(self, dim: int, dtype: torch.dtype, score_dtype: torch.dtype, device: torch.device) -> None:
        for name in self.directions:
            sizes, first = (self.bank_size, dim, 0, dtype, self.query_bank_size), name == "query_to_doc"
            bank = MemoryBank(*sizes, device, self.temperature, score_dtype, penalties=first and self.penalties)
            if first:
                self.bank = bank
            else:
                self.other_banks[name] = bank
        if self.drift_compensation in MOVES_ENTRIES:
            self.passage_mean = RunningMean(dim, score_dtype, device)
            self.query_mean = RunningMean(dim, score_dtype, device)

    def _fit(self, dim: int, negatives: int, guide: int | None) -> None:
        for name, bank in self.banks.items():
            bank.fit(dim, negatives if DIRECTIONS[name][1] else 0, guide)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        # The bank is made by the first call; a state that holds one makes it here instead.
        state = {key.removeprefix(prefix): value for key, value in state_dict.items() if key.startswith(prefix)}
        if "bank.columns" in state:
            columns, guide = state["bank.columns"], state.get("bank.guide.columns")
            device, probe = columns.device, state.get("probe.embeddings")  # the first call moves them to the model's
            self._make(columns.shape[2], columns.dtype, state["bank.positive"].dtype, device)
            self._fit(columns.shape[2], columns.shape[1] - 1, None if guide is None else guide.shape[2])
            self.probe = None if probe is None else DriftProbe(probe.shape[2:], self.bank_size, probe.dtype, device)
            own = {name: x.shape for name, x in (*self.named_parameters(), *self.named_buffers())}
            same = own == {name: x.shape for name, x in state.items() if not name.endswith("_extra_state")}
            if not same or int(state["bank._extra_state"][0]) != self.bank_size:
                settings = "bank_size, query_bank_size, drift_compensation, directions, hardness_mode"
                raise ConfigError(f"this state is of another {settings} or learn_temperature")
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
