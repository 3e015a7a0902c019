"""The groups of runs of a comparison: one for each method and each variant.

Options that a run would refuse are refused here, before the first run starts. Nothing is trained
and no data are read here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple
from urllib.parse import quote

from contaccum.errors import ConfigError, check_choice
from contaccum.settings import METHODS
from contaccum.tuning.options import (
    OUTPUT_SETTINGS,
    Options,
    all_options,
    is_used_by,
    parse,
    to_command_line,
)

COMMON_OPTIONS: Options = {"save_strategy": ["no"], "disable_tqdm": ["true"]}
"""Options of every run: its model is scored in the same process, and its output goes to files."""

SET_BY_COMPARE = ("method", "seed", "output_dir", "resume_from_checkpoint", "eval_strategy")
_CHECKPOINT_CHOICE = ("metric_for_best_model", "greater_is_better")


class Group(NamedTuple):
    """The runs of one entry, which differ only by the seed.

    Attributes:
        name: the entry, with its tuned setting if there is one: "contaccum_learning_rate-3e-4".
        entry: the name of the method or variant.
        method: the training method.
        overrides: the settings of a variant; empty for a plain method.
        options: all options of `contaccum train` except the seed and the output folder.
    """

    name: str
    entry: str
    method: str
    overrides: dict[str, str]
    options: Options

    def run_name(self, seed: int) -> str:
        """Return the name of the run with a seed, which is also the name of its folder."""
        return f"{self.name}_seed-{seed}"

    def parse(self) -> Any:
        """Return the settings and the training arguments, as `contaccum train` parses them.

        Raises:
            ConfigError: for options that `contaccum train` refuses.
        """
        try:
            return parse([*to_command_line(self.options), "--output_dir=unused"])
        except ConfigError as error:
            raise ConfigError(f"{self.name}: {error}") from error


def read_options(config_files: Sequence[str], command_line: Sequence[str]) -> dict[str, list[str]]:
    """Read the options that all runs share: config files, overridden by ``--key value ...``.

    The method, seed and output folder of the config files are dropped, because the program sets
    them itself, and so are the settings of evaluation, saving and early stopping.
    """
    dropped = {*SET_BY_COMPARE, *OUTPUT_SETTINGS, *_CHECKPOINT_CHOICE}
    options = {}
    for key, values in all_options(config_files, []).items():
        if key not in dropped and not key.startswith("eval_"):
            options[key] = values
    return options | all_options([], command_line)


def make_groups(
    options: Options, methods: Sequence[str], variants: Sequence[Sequence[str]]
) -> list[Group]:
    """Return the group of each method and variant, and check the arguments of their runs.

    Args:
        options: the options of all runs, as `read_options` returns them.
        methods: names of training methods.
        variants: lists ``[NAME, key=value, ...]``; their default ``method`` is contaccum.

    Raises:
        ConfigError: for an unknown method, arguments that `contaccum train` refuses, or arguments
            that the program sets itself.
    """
    refuse_reserved_keys(options)
    entries: dict[str, dict[str, str]] = {method: {"method": method} for method in methods}
    for name, *settings in variants:
        if name in entries:
            raise ConfigError(f"--variant {name}: another entry has this name")
        entries[name] = {"method": "contaccum", **dict(text.split("=", 1) for text in settings)}
    groups = []
    for name, overrides in entries.items():
        method = overrides.pop("method")
        check_choice(f"{name}: method", method, METHODS)
        refuse_reserved_keys(overrides)
        groups.append(_make_group(name, method, overrides, options))
    return groups


def refuse_reserved_keys(keys: Iterable[str]) -> None:
    """Raise `ConfigError` for a setting that the program itself gives each run."""
    for key in keys:
        if key in SET_BY_COMPARE:
            raise ConfigError(f"{key}: use --methods, --seeds and --output_dir")


def _make_group(entry: str, method: str, overrides: dict[str, str], options: Options) -> Group:
    """Return the group of an entry. Settings of the bank are dropped if the method has none."""
    group_options = {key: values for key, values in options.items() if is_used_by(method, key)}
    for key, value in overrides.items():
        group_options[key] = [value]
    group_options.update(COMMON_OPTIONS)
    group = Group(quote(entry), entry, method, overrides, {**group_options, "method": [method]})
    if method == "in_batch":
        # One batch has all pairs that the other methods accumulate to in an update.
        accumulated = group._replace(options={**group_options, "method": ["grad_accum"]})
        _, args = accumulated.parse()
        group = group._replace(
            options={
                **group.options,
                "per_device_train_batch_size": [str(args.total_train_batch_size)],
                "gradient_accumulation_steps": ["1"],
            }
        )
    group.parse()
    return group


def is_tunable(group: Group, key: str) -> bool:
    """Return True if the method of a group uses a setting and its entry has no value for it."""
    return key not in group.overrides and is_used_by(group.method, key)


def add_setting(group: Group, key: str, value: str) -> Group:
    """Return a group with one more setting, which is also added to its name.

    Raises:
        ConfigError: if `contaccum train` refuses the value.
    """
    name = f"{group.name}_{key}-{quote(value, safe='+')}"
    group = group._replace(name=name, options={**group.options, key: [value]})
    group.parse()
    return group
