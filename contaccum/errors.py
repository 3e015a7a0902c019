"""Errors that the user can correct, and the texts of messages.

A message says what is wrong, where, and what to do. Any other exception that reaches the command
line is a defect of contaccum.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterable
from functools import cache

logger = logging.getLogger(__name__)


class UserError(Exception):
    """An error that the user can correct: one line, no traceback, exit code 2."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


class ConfigError(UserError, ValueError):
    """An error in the settings: a value out of range, or settings that cannot be combined."""


class DataError(UserError, ValueError):
    """An error in a file or a record. The message starts with the file and the line, if known."""


def is_out_of_memory(error: Exception) -> bool:
    """Return whether an error means that an accelerator or the host is out of memory."""
    import torch
    from accelerate.utils.memory import should_reduce_batch_size

    is_memory_error = isinstance(error, (torch.OutOfMemoryError, MemoryError))
    return is_memory_error or should_reduce_batch_size(error)


def closest(word: object, words: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` with the most similar word; "" if none is similar."""
    matches = difflib.get_close_matches(str(word), list(words), n=1)
    return f"; did you mean {matches[0]!r}?" if matches else ""


def check_choice(name: str, value: object, allowed: Iterable[object]) -> None:
    """Raise `ConfigError`, with the most similar allowed value, for a value that is not allowed."""
    allowed_values = tuple(allowed)
    if value in allowed_values:
        return
    # None stands for a setting that is not given, so it is not listed.
    names = [str(allowed_value) for allowed_value in allowed_values if allowed_value is not None]
    raise ConfigError(
        f"{name} must be one of {', '.join(names)}, got {value!r}{closest(value, names)}"
    )


def one_line(text: str) -> str:
    """Return a text in one line: unprintable characters and repeated blanks become one space."""
    printable = "".join(character if character.isprintable() else " " for character in text)
    return " ".join(printable.split())


@cache
def warn_once(message: str) -> None:
    """Log a warning of one line, unless the same one was logged before."""
    logger.warning(one_line(message))


def quoted(value: object, longest: int = 60) -> str:
    """Return the `repr` of a value for a message, cut to `longest` characters."""
    if isinstance(value, str):
        value = value[: longest + 1]  # the repr of a whole document would be slow
    shown = repr(value)
    if len(shown) <= longest:
        return shown
    return shown[: longest - 3] + "..."
