"""A budget of wall time that is shared by all starts of the same command."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from contaccum.errors import ConfigError
from contaccum.files import read_json, write_json

_MAX_SHARE_OF_FULL_LENGTH = 0.5  # of the time at the start of a search, for a final training
_MARGIN_OF_FULL_LENGTH = 0.75  # relative to the margin of a final training as long as a trial
_UNIT_SECONDS = {"h": 3600, "m": 60, "s": 1}


def parse_duration(text: str | float) -> float:
    """Return the seconds of "90s", "30m", "2h" or "1h30m"; a number is a number of seconds.

    Raises:
        ConfigError: for any other text, and for a duration of 0.
    """
    if not isinstance(text, str):
        text = f"{text}s"
    parts = re.fullmatch(r"(?:([0-9.]+)h)?(?:([0-9.]+)m)?(?:([0-9.]+)s)?", text.strip().lower())
    seconds = 0.0
    if parts is not None:
        try:
            for number, unit_seconds in zip(parts.groups(), _UNIT_SECONDS.values(), strict=True):
                seconds += float(number or 0) * unit_seconds
        except ValueError:  # such as 1.2.3
            seconds = 0.0
    if seconds <= 0:
        raise ConfigError(f"budget={text}: write a time such as 90s, 30m, 2h or 1h30m")
    return seconds


def format_duration(seconds: float) -> str:
    """Return "45 seconds", "14 minutes" or "2.5 hours"."""
    if seconds < 90:
        return f"{seconds:.0f} seconds"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} minutes"
    return f"{seconds / 3600:.1f} hours"


def suggest_budget(seconds: float) -> str:
    """Return a value of ``--budget`` that is enough for the seconds, and for one more start."""
    minutes = math.ceil(1.1 * seconds / 60) + 1
    return f"{minutes}m"


class Budget:
    """The wall time that a command may take in all its starts together.

    Args:
        seconds: the whole budget.
        file: the file of the used time. `save` writes it, and the next start of the command reads
            it.
    """

    def __init__(self, seconds: float, file: Path) -> None:
        self.seconds = seconds
        self._file = file
        self._started = time.monotonic()
        self._used_before = 0.0
        if file.is_file():
            self._used_before = float(read_json(file)["used_seconds"])

    def used(self) -> float:
        """Return the seconds that were used so far."""
        return self._used_before + time.monotonic() - self._started

    def left(self) -> float:
        """Return the seconds that are left; negative if the budget is exceeded."""
        return self.seconds - self.used()

    def save(self) -> None:
        """Write the time that was used so far."""
        write_json(self._file, {"used_seconds": round(self.used(), 1)})


@dataclass
class TimeForTrials:
    """The part of a budget that a search may use.

    Attributes:
        budget: the budget of the whole command.
        reserve: the seconds that are reserved for the steps after the final training.
        final_training_factor: the time that is reserved for the final training, as a multiple of
            the time of a trial with its settings.
        measure_reserve: measures ``reserve`` at the present speed of the machine; None: it stays.
    """

    budget: Budget
    reserve: float = 0.0
    final_training_factor: float = 0.0
    measure_reserve: Callable[[], float] | None = None

    def __post_init__(self) -> None:
        left_at_start = self.budget.left() - self.reserve
        self._most_for_full_length = _MAX_SHARE_OF_FULL_LENGTH * left_at_start

    def measure_again(self) -> None:
        """Measure ``reserve`` again: the machine may have become faster or slower."""
        if self.measure_reserve is not None:
            self.reserve = self.measure_reserve()

    def left(self, trial_seconds: float, full_seconds: float = 0.0) -> float:
        """Return the seconds that are left for trials; negative if there are none.

        Args:
            trial_seconds: the time of the best trial, with whose settings the final training would
                run.
            full_seconds: if trials are cut, the time of a trial at full length, for which up to
                half of the time at the start is reserved.
        """
        # The margin is small: such a training is cut if the time turns out to be too short.
        for_full_length = _MARGIN_OF_FULL_LENGTH * self.final_training_factor * full_seconds
        for_full_length = min(for_full_length, self._most_for_full_length)
        reserved = max(self.final_training_factor * trial_seconds, for_full_length)
        return self.budget.left() - self.reserve - reserved

    def longest_trial(self, num_trials: int = 1) -> float:
        """Return the seconds of a trial of which so many, and the final training, have time."""
        return (self.budget.left() - self.reserve) / (num_trials + self.final_training_factor)
