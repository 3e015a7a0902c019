"""Durations and settings that the user gives to `contaccum fit`, checked without torch."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from contaccum.errors import ConfigError
from contaccum.redaction import refuse_credentials
from contaccum.settings import find


def parse_duration(text: str | float) -> float:
    """Return the seconds of "90s", "30m", "2h" or "1h30m"; a number is a number of seconds.

    Raises:
        ConfigError: for any other text, and for a duration of 0.
    """
    words = text.strip().lower() if isinstance(text, str) else f"{text}s"
    number = r"(\d+\.?\d*|\.\d+)"
    parts = re.fullmatch(f"(?:{number}h)?(?:{number}m)?(?:{number}s)?", words)
    hours, minutes, seconds = [float(part or 0) for part in parts.groups()] if parts else (0, 0, 0)
    seconds += 60 * minutes + 3600 * hours
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


def read_given(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that the user gave, without those that are None.

    Raises:
        ConfigError: for a setting that `contaccum fit` decides itself, or a credential.
    """
    given = {}
    for name, value in settings.items():
        if isinstance(value, tuple):
            value = list(value)
        if isinstance(value, os.PathLike):
            value = os.fspath(value)
        if value is not None:
            given[name] = value
    refused = sorted(find("set_by_fit").keys() & given.keys())
    if refused:
        raise ConfigError(f"{refused[0]} is not an option of contaccum fit: drop it")
    refuse_credentials(given)
    if "total_train_batch_size" in given:
        given.pop("gradient_accumulation_steps", None)  # it follows from the pairs per update
    return given
