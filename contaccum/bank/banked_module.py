"""The state of `BankedInfoNCE` that lasts from one micro-step to the next.

It consists of the bank, the update clock, the drift compensation and the centring of gradients.
This module makes them, saves and restores them, and tells them when an update ends; it computes no
loss. `contaccum.bank.info_nce` explains the terms.
"""

from __future__ import annotations

import logging
import math
from typing import Any

import torch
from torch import Tensor, nn

from contaccum.bank.centering import GradientCentering
from contaccum.bank.compensation import DriftCompensation
from contaccum.bank.diagnostics import MicroStep, describe_micro_step
from contaccum.bank.memory_bank import MemoryBank
from contaccum.bank.settings import LossSettings
from contaccum.bank.update_clock import UpdateClock
from contaccum.distributed import world_size
from contaccum.errors import ConfigError

logger = logging.getLogger(__name__)

MIN_PAIRS_BEFORE_WARNING = 4096
"""With a small bank, `end_pending_update` waits for an update for at least this many pairs."""


class BankedModule(nn.Module):
    """Base class of `BankedInfoNCE`: memory bank, update clock, drift compensation, centring.

    The bank is made at the first micro-batch, whose embedding size it gets, or when a state with a
    bank is loaded.

    Attributes:
        settings: the `LossSettings`.
        bank: the `MemoryBank`, None before the first micro-batch and with ``bank_size`` 0.
        clock: the `UpdateClock`.
        compensation: the `DriftCompensation`.
        centering: the `GradientCentering`; it is not part of the state.
        last_step: values of the last micro-step in training or evaluation; None before the first.
    """

    def __init__(self, settings: LossSettings) -> None:
        super().__init__()
        self.settings = settings
        self.bank: MemoryBank | None = None
        self.clock = UpdateClock()
        self.compensation = DriftCompensation(settings)
        self.centering = GradientCentering(settings.center_gradients, settings.pairs_per_update)
        self._has_warned_of_no_update = False
        self.last_step: MicroStep | None = None
        self._description: tuple[MicroStep, dict[str, Any]] | None = None

    @property
    def last(self) -> dict[str, Any]:
        """Diagnostics of the last micro-step, empty before it; see `contaccum.bank.diagnostics`."""
        if self.last_step is None:
            return {}
        if self._description is None or self._description[0] is not self.last_step:
            self._description = self.last_step, describe_micro_step(self.last_step)
        return self._description[1]

    @property
    def bank_age(self) -> int:
        """The number of updates that have ended since the oldest entry in use was encoded."""
        return len(self.clock.update_ends)

    @property
    def _num_aged(self) -> int:
        """The number of aged entries in use; an entry is aged if an older encoder encoded it."""
        if self.bank is None:
            return 0
        return max(self.clock.update_start - self.bank.oldest_in_use, 0)

    @property
    def _is_shared(self) -> bool:
        """True if all ranks compute one loss, each with the same copy of the bank."""
        return self.settings.gather_across_devices and world_size() > 1

    def begin_update(self, pairs: int) -> None:
        """Set the number of pairs until the next optimizer step, for centring.

        The call is needed only if updates differ in their number of pairs; otherwise
        ``pairs_per_update`` sets it once.
        """
        self.centering.start_update(pairs)

    def end_update(self) -> None:
        """End an update: all entries so far count as encoded by an older encoder.

        The next micro-step detects the step of a torch optimizer and calls this method by itself.
        If you call it after an optimizer step, that step is not counted twice.
        """
        self.clock.end_update()
        self.centering.restart()
        if self.bank is not None and self.settings.drift_compensation == "fresh":
            self.bank.retire_all()

    def end_pending_update(self) -> None:
        """End the update if an optimizer step has been taken since the last micro-step.

        If no update has ended since the start of training, after 4 x ``bank_size``, 4,096 and
        2 x ``pairs_per_update`` pairs, steps are probably not detected: log a warning once, and
        treat all entries as aged.
        """
        clock = self.clock
        if clock.pop_pending_step():
            self.end_update()
        two_updates = 2 * (self.settings.pairs_per_update or 0)
        max_pairs = max(4 * self.settings.bank_size, MIN_PAIRS_BEFORE_WARNING, two_updates)
        if self.bank is None or clock.num_updates > 0 or clock.num_pairs < max_pairs:
            return
        if not self._has_warned_of_no_update:
            logger.warning(
                f"no optimizer step was detected in {clock.num_pairs:,} pairs: all bank entries "
                "now count as encoded by an older encoder. Call end_update() of the BankedInfoNCE "
                "after each optimizer step"
            )
        self._has_warned_of_no_update = True
        clock.age_entries()

    def _compute_bank_weight(self, bank: MemoryBank | None) -> float:
        """Compute the weight of one banked pair, at most 1; a local pair has the weight 1."""
        weight = self.settings.bank_weight
        if bank is not None and weight > 1:
            # A bank_weight above 1 is the weight of the whole bank; the pairs in use share it.
            weight = weight / max(bank.in_use, 1)
        return min(weight, 1.0)

    def _prepare_bank(self, documents: Tensor, guide_dim: int | None) -> MemoryBank | None:
        """Return the bank with room for such documents, made if needed; None without a bank.

        Args:
            documents: (n, 1 + h, d), passages and hard negatives of the next micro-batch.
            guide_dim: see `MemoryBank.ensure_shape`.
        """
        if self.settings.bank_size == 0:
            return None
        dim = documents.shape[2]
        num_negatives = 0
        if self.settings.bank_hard_negatives:
            num_negatives = documents.shape[1] - 1
        # An evaluation in inference mode may come first. Training could not use tensors of it.
        with torch.inference_mode(False):
            bank = self.bank
            if bank is None:
                bank = self._make_bank(dim, documents.dtype, documents.device)
            if bank.documents.device != documents.device:
                # The model was moved, or a state was loaded on another device.
                self.to(documents.device)
            bank.ensure_shape(dim, num_negatives, guide_dim)
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
        return self.clock.get_state()

    def set_extra_state(self, state: Tensor) -> None:
        """Restore the state of the clock."""
        self.clock.load_state(state)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        # A new module has no bank yet, because its embedding size is unknown. The buffers of the
        # state can only be loaded once a bank of their shapes exists.
        state = {}
        for key, value in state_dict.items():
            if key.startswith(prefix):
                state[key.removeprefix(prefix)] = value
        if "bank.documents" in state:
            self._make_buffers_like(state)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def _make_buffers_like(self, state: dict[str, Tensor]) -> None:
        """Make the bank, the means and the probe with the shapes of a state's tensors.

        Args:
            state: the state of this module, with names relative to it.

        Raises:
            ConfigError: if the settings of this module make buffers of other shapes.
        """
        documents = state["bank.documents"]
        num_documents, dim = documents.shape[1:]
        guide_dim = 0
        if "bank.guide.documents" in state:
            guide_dim = state["bank.guide.documents"].shape[2]
        bank = self._make_bank(dim, documents.dtype, documents.device)
        bank.ensure_shape(dim, num_documents - 1, guide_dim)
        self.compensation.probe = None
        if "compensation.probe.embeddings" in state:
            embeddings = state["compensation.probe.embeddings"]  # (measurements, 2, S, d)
            self.compensation.make_probe(embeddings.shape[2:], embeddings.dtype, embeddings.device)

        state_shapes = {}
        for name, value in state.items():
            if not name.endswith("_extra_state"):
                state_shapes[name] = value.shape
        buffer_shapes = {name: buffer.shape for name, buffer in self.named_buffers()}
        numbers = state["bank._extra_state"].tolist()[:2]
        expected_numbers = bank.get_extra_state().tolist()[:2]
        if state_shapes != buffer_shapes or numbers != expected_numbers:
            raise ConfigError(
                "this state was saved with another bank_size, query_bank_size, temperature or "
                "drift_compensation: load it into a loss with the settings of the saved one"
            )

    def drift_record(self) -> dict[str, float]:
        """Return the age of the bank and its drift, for a log line.

        It reads values from the device.

        Returns:
            ``bank_age`` in updates, the softmax masses of the last micro-step (``in_batch_mass``,
            ``bank_mass`` and ``bank_mass_aged``, see `describe_micro_step`), and the drift
            measured by the probe (see `DriftProbe.measure_drift`). Masses that are not finite are
            left out. The record is empty before the first enqueued pair.
        """
        if self.bank is None or self.bank.total_enqueued == 0:
            return {}
        record: dict[str, float] = {"bank_age": self.bank_age}
        last = self.last
        for name in ("in_batch_mass", "bank_mass", "bank_mass_aged"):
            mass = float(last.get(name, math.nan))
            if math.isfinite(mass):
                record[name] = mass
        if self.compensation.probe is not None:
            record.update(self.compensation.probe.measure_drift(self.bank_age))
        return record
