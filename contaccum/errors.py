"""Errors that are the user's to mend. The command line turns each into one line and exit code 2.

Every message says what is wrong, where, and what to do about it. Anything else that escapes is a defect of ours.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """A mistake that the user can mend: one line, no traceback, exit code 2."""


class ConfigError(UserError, ValueError):
    """Settings that cannot work together, or a setting out of range. Raised before a model is loaded."""


class DataError(UserError, ValueError):
    """A file or record that cannot be used; the message starts with the file and, where known, the line."""


def closest(word: object, words: Iterable[str]) -> str:
    """``"; did you mean 'x'?"``, to end an error line with, or nothing when no word is like it."""
    close = difflib.get_close_matches(str(word), list(words), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def check_choice(name: str, value: object, allowed: Iterable[object]) -> None:
    """Refuse a setting that is none of those allowed, by a ConfigError that names them and the closest."""
    allowed = tuple(allowed)
    if value not in allowed:
        shown = [str(x) for x in allowed if x is not None]
        raise ConfigError(f"{name} must be one of {', '.join(shown)}, got {value!r}{closest(value, shown)}")
