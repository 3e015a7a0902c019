"""Fields of dataclasses that are options of a command: default, line of `--help`, valid values."""

from __future__ import annotations

from dataclasses import field
from typing import Any


def option(default: Any, help_text: str, choices: tuple[str, ...] | None = None) -> Any:
    """Return a dataclass field with its default, its line of `--help` and its valid values."""
    metadata: dict[str, object] = {"help": help_text}
    if choices:
        metadata["choices"] = choices
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)
