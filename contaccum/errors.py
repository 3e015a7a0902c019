"""Errors that are the user's to mend. The command line turns each into one line and exit code 2.

Every message says what is wrong, where, and what to do about it. Anything else that escapes is a defect of
ours and keeps its traceback (exit code 1).
"""

from __future__ import annotations


class UserError(Exception):
    """A mistake that the user can mend: one line, no traceback, exit code 2."""


class ConfigError(UserError, ValueError):
    """Settings that cannot work together, or a setting out of range. Raised before a model is loaded."""


class DataError(UserError, ValueError):
    """A file or record that cannot be used; the message starts with the file and, where known, the line."""


class NotFiniteError(ValueError):
    """Embeddings, a loss or a gradient that are NaN or infinite; nothing was stored of them."""
