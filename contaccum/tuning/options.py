"""Options of `contaccum train` as lists of text; `contaccum tune` and `contaccum fit` vary them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from contaccum.errors import ConfigError
from contaccum.settings import (
    WITH_BANK,
    Settings,
    _read_yaml,
    find,
    get_names_of_transformers,
    read,
    replace,
    require_complete,
)
from contaccum.training.arguments import ContAccumTrainingArguments

Options = Mapping[str, Sequence[str]]
"""{key of `contaccum train`: its values, as text}, such as {"learning_rate": ["1e-4"]}"""

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

The runs of a search have values of their own.
"""


def all_options(config_files: Sequence[str], command_line: Sequence[str]) -> dict[str, list[str]]:
    """Read the options of config files, overridden by ``--key value ...`` of the command line.

    Raises:
        ConfigError: for a file that cannot be read, or a token before the first ``--key``.
    """
    file_tokens: list[str] = []
    keys = {*Settings.__dataclass_fields__, *get_names_of_transformers()}
    for path in config_files:
        file_tokens += _read_yaml(path, keys)
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


def is_used_by(method: str, key: str) -> bool:
    """Return True if a setting has an effect on a method; only bank methods use bank settings.

    Args:
        method: the method.
        key: the key of the setting; ``no_`` before it switches a setting off.
    """
    bank_settings = {"query_bank_size", *find("methods", WITH_BANK)}
    return method in WITH_BANK or key.removeprefix("no_") not in bank_settings


def to_command_line(options: Options) -> list[str]:
    """Return options as tokens for the parser of `contaccum train`: ["--key", value, ...]."""
    tokens = []
    for key, values in options.items():
        tokens.append(f"--{key}")
        tokens += values
    return tokens


def parse(command_line: Sequence[str]) -> tuple[Settings, ContAccumTrainingArguments]:
    """Return the settings of a training, and its arguments; raise `ConfigError` for wrong ones."""
    settings = replace(Settings(), **read(command_line))
    require_complete(settings)
    return settings, ContAccumTrainingArguments.from_settings(settings)
