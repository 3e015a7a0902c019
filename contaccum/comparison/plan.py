"""Which runs a comparison needs: methods and variants, times the grid, times the seeds, each with its options.

A method that lacks a gridded setting (bank_size without a bank) has one run for all the values. Everything is refused
here that a run would refuse, before the first one starts. Nothing is trained or written.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from contaccum.errors import ConfigError
from contaccum.training.arguments import BANK_METHODS, METHODS, ContAccumTrainingArguments
from contaccum.training.config import DataArguments, ModelArguments, _as_options, _unknown, parse

Options = dict[str, list[str]]  # key -> its values as text; none for a bare flag

KEYS = frozenset(f.name for cls in (ModelArguments, DataArguments, ContAccumTrainingArguments) for f in fields(cls))
# Whose effect ends with the bank: new ones are found by their first word.
_BANK_KEYS = frozenset({"query_bank_size", "normalize_by", "mask_duplicates"})
_BANK_WORDS = ("bank_", "drift_")
_NOT_IN_A_COMPARISON = {
    "seed": "give the seeds as --seeds 0 1 2",
    "output_dir": "every run has a folder of its own in compare's --output_dir",
    "resume_from_checkpoint": "finished runs are kept, the others start anew",
}
# Where a run lies and what it prints say nothing about what it computes.
_PLACES = ("output_dir", "logging_dir", "run_name", "disable_tqdm", "save_strategy", "hub_token", "push_to_hub_token")


@dataclass(frozen=True)
class Entry:
    """A row of the report: a method, with the settings that make it a variant."""

    name: str
    method: str
    overrides: Mapping[str, str | None]

    def has(self, key: str) -> bool:
        """Whether the grid's values of this key would change this entry's runs."""
        return key not in self.overrides and applies(key, self.method)


@dataclass(frozen=True)
class Run:
    """One training run: what the parser gets, and the settings that are not at their default."""

    name: str
    entry: str
    method: str
    seed: int
    labels: Mapping[str, str]
    options: Sequence[str]
    arguments: Mapping[str, Any]
    data: DataArguments
    pairs_per_update: int


@dataclass(frozen=True)
class Group:
    """The runs that differ by nothing but the seed; ``labels`` holds the grid's values that count for them."""

    name: str
    entry: str
    method: str
    labels: Mapping[str, str]
    runs: Mapping[int, Run]


@dataclass(frozen=True)
class Plan:
    """All runs.

    Attributes:
        grid: key -> values, as the user wrote them.
        groups: by name, in the order of the report.
        cells: for each cell of the grid its values, and entry -> name of the group that fills it.
    """

    entries: Sequence[Entry]
    grid: Mapping[str, Sequence[str]]
    seeds: Sequence[int]
    baseline: str
    groups: Mapping[str, Group]
    cells: Sequence[tuple[Mapping[str, str], Mapping[str, str]]]

    @property
    def runs(self) -> list[Run]:
        """Every run once; all groups of a seed come before the next seed."""
        return [group.runs[seed] for seed in self.seeds for group in self.groups.values()]

    def fixed(self, entry: str) -> dict[str, str]:
        """The values of the grid that an entry has by its own settings, as the grid writes them."""
        overrides = next(known.overrides for known in self.entries if known.name == entry)
        return {
            key: value
            for key, values in self.grid.items()
            for value in values
            if key in overrides and _same(overrides[key], value)
        }

    def belongs(self, entry: str, cell: Mapping[str, str]) -> bool:
        """Whether an entry is of a cell: not one that fixes another value of the grid."""
        return all(cell[key] == value for key, value in self.fixed(entry).items())

    def compared(self) -> Iterator[tuple[Mapping[str, str], dict[str, str]]]:
        """The cells, each with what is compared in it: the baseline, and the entries that belong to it."""
        for cell, groups in self.cells:
            yield cell, {e: name for e, name in groups.items() if e == self.baseline or self.belongs(e, cell)}


def applies(key: str, method: str) -> bool:
    """Whether a training argument means anything to a method."""
    if key == "grad_cache_mini_batch_size":
        return method == "grad_cache"
    if key == "query_bank_size" and method == "pre_batch":
        return False
    return method in BANK_METHODS or not (key in _BANK_KEYS or key.startswith(_BANK_WORDS))


def read_options(files: Sequence[str], rest: Sequence[str], own: frozenset[str] = frozenset()) -> Options:
    """Config files and ``--key value`` of the command line as one mapping; later ones override.

    Args:
        own: options of compare itself, among which the closest is looked for as well.

    Raises:
        ConfigError: a file that cannot be read, an unknown key, one that a comparison sets itself.
    """
    options: Options = {}
    for name in files:
        options.update(_by_key(_as_options(name, set(KEYS))))
    # What a config says for `contaccum train` is replaced, what is asked of a comparison is answered.
    for key in _NOT_IN_A_COMPARISON:
        options.pop(key, None)
    given = _by_key(list(rest))
    for key in given:
        _check_key(key, "on the command line", own)
    if "method" in given:
        raise ConfigError("--method in a comparison: give the methods as --methods contaccum grad_accum")
    options.update(given)
    return options


def _by_key(tokens: list[str]) -> Options:
    options: Options = {}
    key = ""
    for token in tokens:
        if token.startswith("--"):
            key, equals, value = token[2:].partition("=")
            key = key.replace("-", "_")
            if key not in KEYS and key.startswith("no_") and key[3:] in KEYS:
                key, equals, value = key[3:], "=", "false"
            options[key] = [value] if equals else []
        elif not key:
            raise ConfigError(f"unexpected {token!r} before any --key (config files come first)")
        else:
            options[key].append(token)
    return options


def _check_key(key: str, where: str, own: frozenset[str] = frozenset()) -> None:
    if key in _NOT_IN_A_COMPARISON:
        raise ConfigError(f"{key} {where}: {_NOT_IN_A_COMPARISON[key]}")
    if key not in KEYS:
        raise ConfigError(_unknown(key, set(KEYS | own), where))


def read_grid(given: Sequence[str]) -> dict[str, list[str]]:
    """``key=value,value`` to key -> values as text; each value is a YAML scalar, ``null`` the argument's default."""
    grid: dict[str, list[str]] = {}
    for text in given:
        key, equals, values = text.partition("=")
        if not equals or not values:
            raise ConfigError(f"--grid {text}: write key=value,value")
        if key == "method":
            raise ConfigError("method in --grid: give the methods as --methods contaccum grad_accum")
        _check_key(key, "in --grid")
        if key in grid:
            raise ConfigError(f"--grid has {key} twice: write {key}=value,value")
        grid[key] = list(dict.fromkeys(_scalars(values, f"--grid {text}")))
    return grid


def _scalars(text: str, where: str) -> list[str]:
    try:
        values = yaml.load(f"[{text}]", Loader=yaml.BaseLoader)  # every scalar as it is written
    except yaml.YAMLError as error:
        raise ConfigError(f"{where}: not YAML scalars between commas") from error
    if not values or not all(isinstance(value, str) and value for value in values):
        raise ConfigError(f"{where}: not YAML scalars between commas")
    return values


def _value(text: str) -> str | None:
    """What the parser gets for a scalar: None, to leave the argument at its default, for YAML's null."""
    try:
        value = yaml.safe_load(text) if text else text
    except yaml.YAMLError:  # a text all the same: the parser decides
        return text
    return None if value is None else str(value).lower() if isinstance(value, bool) else text


def _same(override: str | None, value: str) -> bool:
    """Whether a variant's setting is this value of the grid: 5e-5 is 0.00005."""
    other = _value(value)
    if override is None or other is None:
        return override is other
    try:
        return float(override) == float(other)
    except ValueError:
        return override == other


def read_entries(methods: Sequence[str], variants: Sequence[Sequence[str]], default_method: str) -> list[Entry]:
    """The methods, then the variants, each ``[NAME, key=value, ...]``.

    Raises:
        ConfigError: an unknown method or key, or a name that is taken.
    """
    for method in methods:
        if method not in METHODS:
            raise ConfigError(_unknown(method, set(METHODS), "in --methods").replace("unknown key", "unknown method"))
    entries = [Entry(method, method, {}) for method in dict.fromkeys(methods)]
    for name, *pairs in variants:
        overrides: dict[str, str | None] = {}
        if "=" in name:
            raise ConfigError(f"--variant {name}: a name comes first: --variant NAME key=value ...")
        for pair in pairs:
            key, equals, value = pair.partition("=")
            if not equals:
                raise ConfigError(f"--variant {name} {pair}: write key=value")
            _check_key(key, f"in --variant {name}")
            overrides[key] = _value(value)
        method = overrides.pop("method", None) or default_method
        if method not in METHODS:
            raise ConfigError(f"--variant {name}: method must be one of {', '.join(METHODS)}, got {method!r}")
        if name in (entry.name for entry in entries):
            raise ConfigError(f"--variant {name}: there is a method or variant of that name already")
        entries.append(Entry(name, method, overrides))
    if not entries:
        raise ConfigError("nothing to compare: give --methods, or a --variant")
    return entries


def make_plan(
    options: Options,
    entries: Sequence[Entry],
    grid: Mapping[str, Sequence[str]],
    seeds: Sequence[int],
    baseline: str | None = None,
    folder: str | Path = "runs/compare",
) -> Plan:
    """Work out the runs and check each one's arguments.

    Args:
        baseline: the entry that the others are compared with; None: grad_accum, or else the first.
        folder: run NAME writes to ``folder/runs/NAME``.

    Raises:
        ConfigError: arguments that the trainer would refuse, or that cannot be compared.
    """
    names = [entry.name for entry in entries]
    if baseline is None:
        baseline = "grad_accum" if "grad_accum" in names else names[0]
    if baseline not in names:
        raise ConfigError(f"--baseline {baseline}: not among what is compared, {', '.join(names)}")
    defaults = ContAccumTrainingArguments(output_dir="unused").to_dict()
    groups: dict[str, Group] = {}
    cells: list[tuple[dict[str, str], dict[str, str]]] = []
    for values in itertools.product(*grid.values()):
        cell = dict(zip(grid, values, strict=True))
        cells.append((cell, {}))
        for entry in entries:
            settings, labels = _settings(entry, options, cell)
            name = _slug(entry.name, labels)
            cells[-1][1][entry.name] = name
            if name not in groups:
                groups[name] = _group(name, entry, labels, settings, seeds, Path(folder), defaults)
    ordered = sorted(groups.values(), key=lambda group: names.index(group.entry))
    return Plan(entries, grid, list(seeds), baseline, {group.name: group for group in ordered}, cells)


def _settings(entry: Entry, options: Options, cell: Mapping[str, str]) -> tuple[Options, dict[str, str]]:
    """The options of an entry in a cell, and those of the cell's values that count for it."""
    settings = {key: list(values) for key, values in options.items() if applies(key, entry.method)}
    settings["method"] = [entry.method]
    labels = {key: value for key, value in cell.items() if entry.has(key)}
    changes = {**entry.overrides, **{key: _value(value) for key, value in labels.items()}}
    for key, value in changes.items():
        settings.pop(key, None)
        if value is not None:
            settings[key] = [value]
    if entry.method == "in_batch":
        _one_batch(settings, labels)
    return settings, labels


def _one_batch(settings: Options, labels: dict[str, str]) -> None:
    """All pairs of an update in one batch, which is what the other methods accumulate to."""
    local, steps = "per_device_train_batch_size", "gradient_accumulation_steps"
    defaults = {f.name: f.default for f in fields(ContAccumTrainingArguments)}
    try:
        pairs = str(int(settings.get(local, [str(defaults[local])])[0]) * int(settings.pop(steps, ["1"])[0]))
    except (ValueError, IndexError) as error:
        raise ConfigError(f"{local} and {steps} must be whole numbers") from error
    settings[local] = [pairs]
    if labels.keys() & {local, steps}:
        labels.pop(steps, None)
        labels[local] = pairs


def _group(
    name: str,
    entry: Entry,
    labels: Mapping[str, str],
    settings: Options,
    seeds: Sequence[int],
    folder: Path,
    defaults: Mapping[str, Any],
) -> Group:
    runs = {}
    parsed: Any = None
    for seed in seeds:
        run_name = f"{name}_seed-{seed}"
        # One token with "=", so that a value may start with a dash.
        tokens = [f"--{key}={values[0]}" for key, values in settings.items() if len(values) == 1]
        for key, values in settings.items():
            if len(values) != 1:
                tokens += [f"--{key}", *values]
        tokens += [f"--seed={seed}", f"--output_dir={folder / 'runs' / run_name}"]
        tokens += ["--save_strategy=no", "--disable_tqdm=true"]
        if parsed is None:  # the seed apart, the others are the same
            try:
                parsed = parse(tokens)
            except ConfigError as error:
                raise ConfigError(f"{name}: {error}") from error
            _check_comparable(name, parsed[2])
        model, data, args = parsed
        arguments = {key: value for key, value in args.to_dict().items() if defaults.get(key) != value}
        for given in (model, data):
            plain = asdict(type(given)())
            arguments.update({key: value for key, value in asdict(given).items() if plain[key] != value})
        arguments = {key: value for key, value in arguments.items() if key not in _PLACES}
        arguments = json.loads(json.dumps({**arguments, "seed": seed}, default=str))
        runs[seed] = Run(
            run_name, entry.name, entry.method, seed, labels, tokens, arguments, data, args.total_train_batch_size
        )
    return Group(name, entry.name, entry.method, labels, runs)


def _check_comparable(name: str, args: ContAccumTrainingArguments) -> None:
    if str(getattr(args.eval_strategy, "value", args.eval_strategy)) != "no":
        raise ConfigError(f"eval_strategy={args.eval_strategy} in a comparison: use --eval_updates N instead")
    if args.dataloader_drop_last:
        raise ConfigError(
            f"{name}: dataloader_drop_last=true drops other pairs at another batch size, so that the methods would not "
            "see the same data. Drop it"
        )
    if args.world_size > 1:
        raise ConfigError("a comparison starts its own processes: start it without torchrun")


def _slug(entry: str, labels: Mapping[str, str]) -> str:
    """A folder's name that tells what is in it."""
    parts = []
    for text in (entry, *(f"{key}-{value}" for key, value in labels.items())):
        plain = re.sub(r"[^A-Za-z0-9._+-]+", "-", text)
        # Two values must not meet in one folder because of what a folder's name cannot hold.
        parts.append(plain if plain == text else f"{plain[-40:]}-{hashlib.sha256(text.encode()).hexdigest()[:6]}")
    return "_".join(parts)
