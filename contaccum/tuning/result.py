"""The result of `contaccum tune`, and its files: a config to train with, and a JSON record."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from contaccum.files import provenance, read_json, write_json, write_text
from contaccum.tuning.choice import Choice
from contaccum.tuning.options import Options

TUNED_CONFIG = "tuned.yaml"
TUNED_RECORD = "tuned.json"

ConfigValue = str | int | float | bool
"""The value of an option in a YAML file, where numbers and booleans are not texts."""


@dataclass(frozen=True)
class TunedSettings:
    """The settings that tuning has chosen.

    Attributes:
        choice: the chosen settings and their scores.
        options: all options of a run with these settings, for `contaccum train`.
        base: nDCG@10 of the base model on dev.
        bm25: nDCG@10 of BM25 on dev.
        trials: the JSON record of each trial; see `Search.make_records`.
    """

    choice: Choice
    options: Options
    base: float
    bm25: float
    trials: list[dict[str, Any]]


def write_tuned(tuned: TunedSettings, output: Path, num_queries: int) -> None:
    """Write `TUNED_CONFIG` and `TUNED_RECORD` into a folder.

    Args:
        num_queries: the number of dev queries, for a comment in the config.
    """
    difference = tuned.choice.against_base
    comment = (
        f"# Chosen by contaccum tune: nDCG@10 {tuned.choice.score:.4f} on {num_queries} dev "
        f"queries; the base model has {tuned.base:.4f}\n"
        f"# (difference {difference['difference']:+.4f}, 95% {difference['low']:+.4f} to "
        f"{difference['high']:+.4f}). It is the best of {len(tuned.trials)} trials, so the score "
        "is too optimistic.\n"
    )
    length_of_trials = tuned.choice.settings.get("max_steps")
    if length_of_trials is not None and tuned.options.get("max_steps") == [str(length_of_trials)]:
        comment += (
            "# max_steps is the length of the trials, which were cut to fit the budget; the length "
            "was not searched.\n# With a larger --budget and another --output, trials are longer.\n"
        )
    content = {
        **to_yaml_values(tuned.options),
        "output_dir": str(output / "model"),
    }
    text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
    write_text(output / TUNED_CONFIG, comment + text)
    record = {field.name: getattr(tuned, field.name) for field in fields(tuned)}
    record["choice"] = tuned.choice._asdict()
    write_json(output / TUNED_RECORD, {**record, **provenance()})


def read_tuned(output: Path) -> TunedSettings:
    """Read the record that `write_tuned` has written into a folder.

    Raises:
        DataError: for a file that cannot be read.
    """
    record = read_json(output / TUNED_RECORD)
    content = {field.name: record[field.name] for field in fields(TunedSettings)}
    content["choice"] = Choice(**record["choice"])
    return TunedSettings(**content)


def to_yaml_values(options: Options) -> dict[str, ConfigValue | list[ConfigValue]]:
    """Return options whose texts are converted to numbers and booleans where possible.

    An option with one value becomes this value, and an option with several values becomes a list.
    A switch without a value becomes true: ``bf16`` is written as ``bf16: true``. A switch that
    starts with ``no_`` becomes false: ``no_tied`` is written as ``tied: false``.
    """
    content: dict[str, ConfigValue | list[ConfigValue]] = {}
    for key, texts in options.items():
        values = [_parse_value(text) for text in texts]
        if len(values) > 1:
            content[key] = values
        elif values:
            content[key] = values[0]
        else:
            content[key.removeprefix("no_")] = not key.startswith("no_")
    return content


def _parse_value(text: str) -> ConfigValue:
    """Return the boolean or number that a text stands for; any other text is returned as it is."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    # Python also reads 2024_05 and 007 as numbers, but they are names of files or data sets.
    if "_" in text or re.match(r"-?0[0-9]", text):
        return text
    with suppress(ValueError):
        return int(text)
    with suppress(ValueError):
        return float(text)
    return text
