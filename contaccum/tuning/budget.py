"""A budget of wall time that goes on counting after a kill."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import Path

from contaccum.errors import ConfigError
from contaccum.files import read_json, write_json

_SECONDS = {"h": 3600, "m": 60, "s": 1}


def parse_duration(text: str) -> float:
    """Return the seconds of "90s", "30m", "2h" or "1h30m"; raises `ConfigError`."""
    parts = re.fullmatch(r"(?:([0-9.]+)h)?(?:([0-9.]+)m)?(?:([0-9.]+)s)?", text.strip().lower())
    seconds = 0.0
    if parts is not None:
        try:
            for number, unit in zip(parts.groups(), _SECONDS, strict=True):
                seconds += float(number or 0) * _SECONDS[unit]
        except ValueError:  # such as 1.2.3
            seconds = 0.0
    if seconds <= 0:
        raise ConfigError(f"budget={text}: write a time such as 90s, 30m, 2h or 1h30m")
    return seconds


def show_duration(seconds: float) -> str:
    """Return "45 seconds", "14 minutes" or "2.5 hours"."""
    if seconds < 90:
        return f"{seconds:.0f} seconds"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} minutes"
    return f"{seconds / 3600:.1f} hours"


@dataclass(frozen=True)
class TimeForTrials:
    """The part of a budget that a search may use.

    Attributes:
        budget: of the whole command.
        reserve: seconds that are kept for what comes after the search.
        final_runs: the time of so many trials is kept as well.
    """

    budget: Budget
    reserve: float = 0.0
    final_runs: float = 0.0

    def left(self, seconds_of_a_trial: float) -> float:
        """Return the seconds that are left for trials; negative when there are none."""
        return self.budget.left() - self.reserve - self.final_runs * seconds_of_a_trial


class Budget:
    """Wall time that a command may take, over all its starts.

    Args:
        seconds: of the whole command.
        file: where the time is written that earlier starts and this one have used; `save` does so.
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
        """Return the seconds that are left; negative when there are none."""
        return self.seconds - self.used()

    def save(self) -> None:
        """Write the time that was used so far."""
        write_json(self._file, {"used_seconds": round(self.used(), 1)})
