"""The clock of a run: CPU time and encoded texts of each update, and scores during training."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from transformers import TrainerCallback

from contaccum import DualEncoder


class UpdateClock(TrainerCallback):
    """Callback that measures each update.

    CPU time is used rather than wall time, because other programs may run on the machine. The runs
    have one thread, so both are equal on a machine without other load.

    Args:
        model: the encoder. The texts of its forward passes are counted.
        scored_updates: numbers of updates after which the model is scored.
        score: function that scores the model; its time does not count.

    Attributes:
        seconds: CPU seconds of each finished update.
        texts: number of encoded texts of each finished update. A text that is encoded twice counts
            twice.
        curve: {number of updates: scores}.
    """

    def __init__(
        self,
        model: DualEncoder,
        scored_updates: Sequence[int] = (),
        score: Callable[[], dict[str, float]] | None = None,
    ) -> None:
        self.seconds: list[float] = []
        self.texts: list[int] = []
        self.curve: dict[int, dict[str, float]] = {}
        self._scored_updates = scored_updates
        self._score = score
        self._num_texts = 0
        self._last_time = 0.0
        model.register_forward_pre_hook(self._count_texts)

    def _count_texts(self, _: nn.Module, arguments: tuple[Any, ...]) -> None:
        features = arguments[0]
        self._num_texts += len(features["input_ids"])

    def _restart(self) -> None:
        self._num_texts = 0
        self._last_time = time.process_time()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the clock before the first update.

        Every later update starts at the end of the one before, so fetching its batch counts.
        """
        if not self.seconds:
            self._restart()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record an update, and score the model if this is planned."""
        self.seconds.append(time.process_time() - self._last_time)
        self.texts.append(self._num_texts)
        if self._score is not None and state.global_step in self._scored_updates:
            self.curve[state.global_step] = self._score()
        self._restart()
