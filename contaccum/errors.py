"""Errors that are the user's to mend. The command line turns each into one line and exit code 2.

Every message says what is wrong, where, and what to do about it. Anything else that escapes is a defect of ours.
What other tools call an option is taken where it can mean one of ours alone, else a hint.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Sequence


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
        raise ConfigError(
            f"{name} must be one of {', '.join(shown)}, got {value!r}{closest(value, shown)}"
        )


_BATCH = ("per_device_train_batch_size", "total_train_batch_size")
_LENGTH = ("query_max_length", "passage_max_length")
OTHERS = {
    **dict.fromkeys(("model_name_or_path", "model_name"), ("model",)),
    **dict.fromkeys(("data", "dataset", "dataset_name", "train_file"), ("train_data", "data")),
    **dict.fromkeys(("batch_size", "train_batch_size"), (*_BATCH, "batch_size")),
    **dict.fromkeys(("max_seq_length", "max_length"), _LENGTH),
    **dict.fromkeys(("epochs", "num_epochs"), ("num_train_epochs",)),
    **dict.fromkeys(("output", "output_dir", "output_path"), ("output_dir", "output")),
    **dict.fromkeys(("precision", "dtype"), ("precision", "bf16", "fp16")),
    "query_max_len": _LENGTH[:1],
    "passage_max_len": _LENGTH[1:],
    "lora_rank": ("lora_r",),
    "lr": ("learning_rate",),
}
"""Another tool's name -> the options that it can mean, of which a command has some."""


def our_name(name: str, known: Collection[str]) -> str:
    """The one of the ``known`` options that ``name`` can mean; itself, where it is none or several."""
    plain = name.replace("-", "_")
    meant = (
        [plain]
        if plain in known
        else [option for option in OTHERS.get(plain, ()) if option in known]
    )
    return meant[0] if len(meant) == 1 else name


def in_our_names(argv: Sequence[str], known: Collection[str]) -> list[str]:
    """``argv`` with each ``--name`` and ``--name=value`` in the name that it has here."""
    parts = [(token, *token.partition("=")) for token in argv]
    return [
        f"--{our_name(key[2:], known)}{x}{value}" if key[:2] == "--" else token
        for token, key, x, value in parts
    ]


def hint(name: str, known: Collection[str]) -> str:
    """To end an error line with: which options a ``name`` that is none could mean, or which one is like it."""
    meant = [option for option in OTHERS.get(name.replace("-", "_"), ()) if option in known]
    return (
        f"; did you mean {' or '.join(map(repr, meant))}?"
        if meant
        else closest(name.replace("-", "_"), known)
    )
