"""Options of `contaccum train` as lists of text: their reading, checks and parsing.

`contaccum compare`, `contaccum tune` and `contaccum fit` use them. No data and no model are loaded
here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import NamedTuple

from contaccum.errors import ConfigError
from contaccum.training.arguments import BANK_METHODS, BANK_SETTINGS, ContAccumTrainingArguments
from contaccum.training.config import parse, read_config_options
from contaccum.training.options import DataArguments, ModelArguments

Options = Mapping[str, Sequence[str]]
"""{key of `contaccum train`: its values, as text}, such as {"learning_rate": ["1e-4"]}"""

ARGUMENT_CLASSES = (ModelArguments, DataArguments, ContAccumTrainingArguments)
"""The dataclasses whose fields are the options of `contaccum train`."""

_KEYS = frozenset(setting.name for cls in ARGUMENT_CLASSES for setting in fields(cls))
OUTPUT_SETTINGS = (
    "eval_strategy",
    "eval_steps",
    "eval_on_start",
    "save_strategy",
    "save_steps",
    "save_total_limit",
    "load_best_model_at_end",
    "early_stopping_patience",
    "disable_tqdm",
    "logging_strategy",
    "logging_steps",
    "push_to_hub",
)
"""Settings of a config that decide when a run is evaluated, saved and logged.

The runs of a comparison and of a search have values of their own.
"""
_CHECKPOINT_CHOICE = ("metric_for_best_model", "greater_is_better")

_SET_BY_COMPARE = ("method", "seed", "output_dir", "resume_from_checkpoint", "eval_strategy")


class RunArguments(NamedTuple):
    """The parsed arguments of a run."""

    model: ModelArguments
    data: DataArguments
    training: ContAccumTrainingArguments


def read_options(config_files: Sequence[str], command_line: Sequence[str]) -> dict[str, list[str]]:
    """Read the options that all runs of a comparison share.

    The method, seed and output folder of the config files are dropped, because a comparison sets
    them itself, and so are the settings of evaluation, saving and early stopping.

    Args:
        config_files: paths of YAML files; a later file overrides an earlier file.
        command_line: tokens ``--key value ...``, which override the files.

    Raises:
        ConfigError: for a file that cannot be read, or a token before the first ``--key``.
    """
    dropped = {*_SET_BY_COMPARE, *OUTPUT_SETTINGS, *_CHECKPOINT_CHOICE}
    options = {}
    for key, values in all_options(config_files, []).items():
        if key not in dropped and not key.startswith("eval_"):
            options[key] = values
    return options | _parse_tokens(command_line)


def all_options(config_files: Sequence[str], command_line: Sequence[str]) -> dict[str, list[str]]:
    """Read the options of config files, overridden by ``--key value ...`` of the command line.

    Raises:
        ConfigError: for a file that cannot be read, or a token before the first ``--key``.
    """
    file_tokens: list[str] = []
    for path in config_files:
        file_tokens += read_config_options(path, _KEYS)
    return _parse_tokens(file_tokens) | _parse_tokens(command_line)


def _parse_tokens(tokens: Sequence[str]) -> dict[str, list[str]]:
    """Parse ``--key value ...`` and ``--key=value``; a switch such as ``--bf16`` has no value."""
    options: dict[str, list[str]] = {}
    values: list[str] | None = None
    for token in tokens:
        if token.startswith("--"):
            name, equals, value = token[2:].partition("=")
            values = [value] if equals else []
            options[name.replace("-", "_")] = values
        elif values is not None:
            values.append(token)
        else:
            raise ConfigError(f"unexpected {token!r} before any --key (config files come first)")
    return options


def refuse_reserved_keys(keys: Iterable[str]) -> None:
    """Raise `ConfigError` for a setting that a comparison itself gives each of its runs."""
    for key in keys:
        if key in _SET_BY_COMPARE:
            raise ConfigError(
                f"{key}: a comparison sets it for each of its runs; "
                "use --methods, --seeds, --eval_updates and --output_dir"
            )


def is_used_by(method: str, key: str) -> bool:
    """Return True if a setting has an effect on a method; only bank methods use bank settings.

    Args:
        method: the method.
        key: the key of the setting; ``no_`` before it switches a setting off.
    """
    return method in BANK_METHODS or key.removeprefix("no_") not in BANK_SETTINGS


def to_command_line(options: Options) -> list[str]:
    """Return options as tokens for the parser of `contaccum train`: ["--key", value, ...]."""
    tokens = []
    for key, values in options.items():
        tokens.append(f"--{key}")
        tokens += values
    return tokens


def parse_run(name: str, options: Options) -> RunArguments:
    """Parse the options of a run, as `contaccum train` does.

    Args:
        name: the name of the run or group, for the start of the error message.

    Raises:
        ConfigError: for options that `contaccum train` refuses.
    """
    try:
        return RunArguments(*parse([*to_command_line(options), "--output_dir=unused"]))
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error
