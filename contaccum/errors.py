"""Errors that the user can correct, and suggestions for misspelled names.

The command line turns a `UserError` into one line and exit code 2. The message says what is wrong,
where, and what to do. Any other exception that reaches the command line is a defect of contaccum.

Users may give option names of other tools. A name such as ``lr``, which can mean only one option of
a command, is translated to this option (``learning_rate``). For a name such as ``batch_size``,
which can mean several options, the error message suggests these options.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Sequence


class UserError(Exception):
    """An error that the user can correct: one line, no traceback, exit code 2."""


class ConfigError(UserError, ValueError):
    """An error in the settings: a value out of range, or settings that cannot be combined."""


class DataError(UserError, ValueError):
    """An error in a file or a record.

    The message starts with the file and, where it is known, the line.
    """


def closest(word: object, words: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` with the most similar word, for the end of an error message.

    The result is empty if no word is similar.
    """
    matches = difflib.get_close_matches(str(word), list(words), n=1)
    if not matches:
        return ""
    return f"; did you mean {matches[0]!r}?"


def check_choice(name: str, value: object, allowed: Iterable[object]) -> None:
    """Check that a setting has one of the allowed values.

    Raises:
        ConfigError: if the setting has another value. The message lists the allowed values and
            suggests the most similar one.
    """
    allowed_values = tuple(allowed)
    if value in allowed_values:
        return
    # None stands for a setting that is not given, so it is not listed.
    names = [str(allowed_value) for allowed_value in allowed_values if allowed_value is not None]
    raise ConfigError(
        f"{name} must be one of {', '.join(names)}, got {value!r}{closest(value, names)}"
    )


# The options of contaccum's commands for one thing. A command usually has only one of them.
_TRAIN_DATA = ("train_data", "data")
_BATCH_SIZES = ("per_device_train_batch_size", "total_train_batch_size", "batch_size")
_MAX_LENGTHS = ("query_max_length", "passage_max_length")
_OUTPUTS = ("output_dir", "output")
_PRECISIONS = ("precision", "bf16", "fp16")

FOREIGN_OPTION_NAMES: dict[str, tuple[str, ...]] = {
    "model_name_or_path": ("model",),
    "model_name": ("model",),
    "data": _TRAIN_DATA,
    "dataset": _TRAIN_DATA,
    "dataset_name": _TRAIN_DATA,
    "train_file": _TRAIN_DATA,
    "batch_size": _BATCH_SIZES,
    "train_batch_size": _BATCH_SIZES,
    "max_seq_length": _MAX_LENGTHS,
    "max_length": _MAX_LENGTHS,
    "query_max_len": ("query_max_length",),
    "passage_max_len": ("passage_max_length",),
    "epochs": ("num_train_epochs",),
    "num_epochs": ("num_train_epochs",),
    "lr": ("learning_rate",),
    "lora_rank": ("lora_r",),
    "output": _OUTPUTS,
    "output_dir": _OUTPUTS,
    "output_path": _OUTPUTS,
    "precision": _PRECISIONS,
    "dtype": _PRECISIONS,
}
"""{option name of another tool: options of contaccum that it can mean}

A command has only some of these options, so a name often means a single option of the command.
"""


def translate_option_name(name: str, options: Collection[str]) -> str:
    """Return the option that ``name`` means.

    Args:
        name: an option name of contaccum or of another tool, with ``_`` or ``-`` between its words.
        options: names of the options that the command has.

    Returns:
        The option, or ``name`` unchanged if it can mean none of the options, or several.
    """
    underscored_name = name.replace("-", "_")
    if underscored_name in options:
        return underscored_name
    candidates = _find_candidates(underscored_name, options)
    if len(candidates) == 1:
        return candidates[0]
    return name


def translate_arguments(argv: Sequence[str], options: Collection[str]) -> list[str]:
    """Return ``argv`` with the name in each ``--name`` and ``--name=value`` translated."""
    translated = []
    for token in argv:
        if token.startswith("--"):
            name, equals_sign, value = token.removeprefix("--").partition("=")
            token = f"--{translate_option_name(name, options)}{equals_sign}{value}"
        translated.append(token)
    return translated


def suggest_options(name: str, options: Collection[str]) -> str:
    """Return a suggestion for an unknown option, for the end of an error message.

    It lists the options that the name of another tool can mean, or else the most similar option.
    """
    underscored_name = name.replace("-", "_")
    candidates = _find_candidates(underscored_name, options)
    if not candidates:
        return closest(underscored_name, options)
    return f"; did you mean {' or '.join(map(repr, candidates))}?"


def _find_candidates(foreign_name: str, options: Collection[str]) -> list[str]:
    """Return the options of the command that the option name of another tool can mean."""
    candidates = FOREIGN_OPTION_NAMES.get(foreign_name, ())
    return [option for option in candidates if option in options]
