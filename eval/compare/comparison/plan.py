"""The groups of runs of a comparison: one for each method and each variant.

Options that a run would refuse are refused here, before the first run starts. Nothing is trained
and no data are read here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import quote

from contaccum.errors import ConfigError, check_choice
from contaccum.settings import METHODS, WITH_BANK, Settings, find, read, replace
from contaccum.training.arguments import ContAccumTrainingArguments

SET_BY_COMPARE = ("method", "seed", "output_dir", "resume_from_checkpoint", "eval_strategy")
_KEPT = ("train_data", "split", "passage_store", "missing", "similarity")
"""Settings that only `contaccum fit` decides itself; a comparison takes them from the config."""


class Group(NamedTuple):
    """The runs of one entry, which differ only by the seed.

    Attributes:
        name: the entry, with its tuned setting if there is one: "contaccum_learning_rate-3e-4".
        entry: the name of the method or variant.
        method: the training method.
        overrides: the settings of a variant, as text; empty for a plain method.
        settings: all settings except the seed and the output folder.
    """

    name: str
    entry: str
    method: str
    overrides: dict[str, str]
    settings: Settings

    def run_name(self, seed: int) -> str:
        """Return the name of the run with a seed, which is also the name of its folder."""
        return f"{self.name}_seed-{seed}"

    def change(self, **changes: Any) -> Group:
        """Return the group with other settings.

        Raises:
            ConfigError: for settings that `contaccum train` refuses.
        """
        try:
            settings = replace(self.settings, **changes)
            ContAccumTrainingArguments.from_settings(settings)
        except ConfigError as error:
            raise ConfigError(f"{self.name}: {error}") from error
        return self._replace(settings=settings)


def read_options(config_files: Sequence[str], command_line: Sequence[str]) -> dict[str, Any]:
    """Read the settings that all runs share: config files, overridden by ``--key value ...``.

    The method, seed and output folder of the config files are dropped, because the program sets
    them itself, and so are the settings of evaluation, saving, logging and early stopping.
    """
    dropped = {*find("set_by_fit"), *SET_BY_COMPARE} - {*_KEPT}
    dropped |= {"disable_tqdm", "logging_strategy", "logging_steps"}
    options = {}
    for name, value in read(config_files).items():
        if name not in dropped:
            options[name] = value
    return options | read(command_line)


def make_groups(
    options: Mapping[str, Any], methods: Sequence[str], variants: Sequence[Sequence[str]]
) -> list[Group]:
    """Return the group of each method and variant, and check the arguments of their runs.

    Args:
        options: the settings of all runs, as `read_options` returns them.
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


def _make_group(
    entry: str, method: str, overrides: dict[str, str], options: Mapping[str, Any]
) -> Group:
    """Return the group of an entry. Settings of the bank are dropped if the method has none."""
    of_bank = find("methods", WITH_BANK)
    values = {}
    for name, value in options.items():
        if method in WITH_BANK or name not in of_bank:
            values[name] = value
    values |= read([f"--{name}={value}" for name, value in overrides.items()])
    # The model of a run is scored in the same process, and its output goes to files.
    values |= {"save_strategy": "no", "disable_tqdm": True}
    group = Group(quote(entry), entry, method, overrides, Settings())
    if method == "in_batch":
        # One batch has all pairs that the other methods accumulate to in an update.
        accumulated = group.change(**values, method="grad_accum").settings
        args = ContAccumTrainingArguments.from_settings(accumulated)
        values["per_device_train_batch_size"] = args.total_train_batch_size
        values["gradient_accumulation_steps"] = 1
    return group.change(**values, method=method)


def add_setting(group: Group, key: str, value: float) -> Group:
    """Return a group with one more setting, which is also added to its name.

    Raises:
        ConfigError: if `contaccum train` refuses the value.
    """
    text = f"{value:.15g}"  # a whole number without a point
    return group._replace(name=f"{group.name}_{key}-{text}").change(**read([f"--{key}={text}"]))
