"""Dataclass fields that are options of a command, with default, help text and allowed values."""

from __future__ import annotations

from dataclasses import field
from typing import Any


def option(default: Any, help_text: str, choices: tuple[str, ...] | None = None) -> Any:
    """Return a dataclass field with its default, its `--help` text and its allowed values.

    Args:
        default: the default value. A list is copied for each object of the dataclass.
        help_text: the text that `--help` shows for the option.
        choices: the allowed values. None: every value of the field's type is allowed.
    """
    metadata: dict[str, object] = {"help": help_text}
    if choices:
        metadata["choices"] = choices
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)
