"""Arguments of `contaccum fit` that are checked without torch: the budget and the settings."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from contaccum.errors import ConfigError
from contaccum.redaction import refuse_credentials
from contaccum.settings import find

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
