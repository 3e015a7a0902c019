"""Which runs a comparison needs: methods and variants, times the grid, times the seeds, each with its options.

A method that lacks a gridded setting (bank_size without a bank) has one run for all of its values. Whatever a run would
refuse is refused here, before the first one starts. Nothing is trained, and no data is read.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from contaccum.errors import ConfigError, check_choice
from contaccum.training.arguments import BANK_METHODS, LOSS_SETTINGS, METHODS, ContAccumTrainingArguments
from contaccum.training.config import DataArguments, ModelArguments, as_options, parse

KEYS = frozenset(f.name for cls in (ModelArguments, DataArguments, ContAccumTrainingArguments) for f in fields(cls))
# Settings of the loss that every method has; the others are the bank's.
_OF_EVERY_LOSS = ("similarity", "temperature", "gather_across_devices")
_NOT_IN_A_COMPARISON = {
    "method": "give the methods as --methods contaccum grad_accum",
    "seed": "give the seeds as --seeds 0 1 2",
    "output_dir": "every run has a folder of its own in compare's --output_dir",
    "resume_from_checkpoint": "finished runs stay, the others start anew",
}
# The seed is each run's own; where a run lies and what it prints say nothing about what it computes.
_PLACES = ("seed", "output_dir", "logging_dir", "run_name", "disable_tqdm", "save_strategy")


@dataclass(frozen=True)
class Entry:
    """A row of the report: a method, with the settings that make it a variant."""

    name: str
    method: str
    overrides: Mapping[str, str]


@dataclass(frozen=True)
class Group:
    """The runs that differ by nothing but the seed.

    Attributes:
        entry: name of the entry.
        labels: the grid's values that count for it.
        options: what the parser of `contaccum train` gets, but for the seed and a folder.
        parsed: model, data and training arguments, as the parser understood the options.
    """

    name: str
    entry: str
    method: str
    labels: Mapping[str, str]
    options: Sequence[str]
    parsed: tuple[ModelArguments, DataArguments, ContAccumTrainingArguments]

    def run(self, seed: int) -> str:
        """The name of a run, and of its folder."""
        return f"{self.name}_seed-{seed}"

    def arguments(self) -> dict[str, Any]:
        """The settings that are not at their default, the seed apart; they decide what the runs compute."""
        default = _values(ModelArguments(), DataArguments(), ContAccumTrainingArguments(output_dir="unused"))
        return {key: value for key, value in _values(*self.parsed).items() if default.get(key) != value}


@dataclass(frozen=True)
class Plan:
    """All runs: every group with every seed.

    Attributes:
        grid: key -> values, as the user wrote them.
        groups: by name, in the order of the report.
        cells: for each cell of the grid, entry -> name of its group there: of the baseline, and of all but the variants
            that set another of the grid's values themselves.
    """

    entries: Sequence[Entry]
    grid: Mapping[str, Sequence[str]]
    seeds: Sequence[int]
    baseline: str
    groups: Mapping[str, Group]
    cells: Sequence[Mapping[str, str]]


def read_options(files: Sequence[str], given: Sequence[str]) -> dict[str, list[str]]:
    """Config files, then ``--key value`` of the command line, as key -> tokens for the parser of `contaccum train`.

    Raises:
        ConfigError: a file that cannot be read, or a key that a comparison sets itself.
    """
    read = _by_key([token for name in files for token in as_options(name, KEYS)])
    # What a config says for `contaccum train` is replaced; what is asked of a comparison is answered.
    options = {key: tokens for key, tokens in read.items() if key not in _NOT_IN_A_COMPARISON}
    asked = _by_key(given)
    _refuse(asked, "on the command line")
    return options | asked


def read_grid(given: Sequence[str]) -> dict[str, list[str]]:
    """``key=value,value`` to key -> values as text."""
    grid: dict[str, list[str]] = {}
    for text in given:
        key, _, values = text.partition("=")
        if not all(found := values.split(",")):
            raise ConfigError(f"--grid {text}: write key=value,value")
        grid[key] = list(dict.fromkeys(found))
    _refuse(grid, "in --grid")
    return grid


def read_entries(methods: Sequence[str], variants: Sequence[Sequence[str]]) -> list[Entry]:
    """The methods, then the variants, each ``[NAME, key=value, ...]``; a variant that names no method is contaccum.

    Raises:
        ConfigError: an unknown method, or a name that is taken.
    """
    entries = [Entry(method, method, {}) for method in dict.fromkeys(methods)]
    for name, *pairs in variants:
        if "=" in name or name in [entry.name for entry in entries] or not all("=" in pair for pair in pairs):
            raise ConfigError(f"--variant {name} {' '.join(pairs)}: write a name that is not taken, then key=value ...")
        overrides = {key: value for key, _, value in (pair.partition("=") for pair in pairs)}
        method = overrides.pop("method", "contaccum")
        _refuse(overrides, f"in --variant {name}")
        entries.append(Entry(name, method, overrides))
    for entry in entries:
        check_choice(f"{entry.name}: method", entry.method, METHODS)
    if not entries:
        raise ConfigError("nothing to compare: give --methods, or a --variant")
    return entries


def make_plan(
    options: Mapping[str, Sequence[str]],
    entries: Sequence[Entry],
    grid: Mapping[str, Sequence[str]],
    seeds: Sequence[int],
    baseline: str | None = None,
) -> Plan:
    """Work out the runs and check each one's arguments.

    Args:
        options, entries, grid: as :func:`read_options`, :func:`read_entries` and :func:`read_grid` give them.
        baseline: the entry that the others are compared with; None: grad_accum, or else the first.

    Raises:
        ConfigError: arguments that the trainer would refuse, or that cannot be compared.
    """
    names = [entry.name for entry in entries]
    baseline = baseline or ("grad_accum" if "grad_accum" in names else names[0])
    check_choice("--baseline", baseline, names)
    groups: dict[str, Group] = {}
    cells: list[dict[str, str]] = []
    for values in itertools.product(*grid.values()):
        cell = dict(zip(grid, values, strict=True))
        cells.append({})
        for entry in entries:
            labels = _labels(entry, cell, grid)
            if entry.name == baseline or labels.items() <= cell.items():
                group = _group(entry, labels, options)
                known = groups.setdefault(group.name, group)
                if (known.entry, known.labels) != (group.entry, group.labels):
                    raise ConfigError(f"two settings would share the folder {group.name}: compare them apart")
                cells[-1][entry.name] = group.name
    ordered = sorted(groups.values(), key=lambda group: names.index(group.entry))
    return Plan(entries, grid, list(dict.fromkeys(seeds)), baseline, {group.name: group for group in ordered}, cells)


def applies(key: str, method: str) -> bool:
    """Whether a training argument means anything to a method."""
    if key == "grad_cache_mini_batch_size":
        return method == "grad_cache"
    if key == "query_bank_size" and method == "pre_batch":
        return False
    return method in BANK_METHODS or key not in LOSS_SETTINGS or key in _OF_EVERY_LOSS


def _by_key(tokens: Sequence[str]) -> dict[str, list[str]]:
    options: dict[str, list[str]] = {}
    key = ""
    for token in tokens:
        if token.startswith("--"):
            name = token[2:].partition("=")[0].replace("-", "_")
            key = name if name in KEYS else name.removeprefix("no_")
            options[key] = []
        elif not key:
            raise ConfigError(f"unexpected {token!r} before any --key (config files come first)")
        options[key].append(token)
    return options


def _refuse(keys: Iterable[str], where: str) -> None:
    for key in keys:
        if key in _NOT_IN_A_COMPARISON:
            raise ConfigError(f"{key} {where}: {_NOT_IN_A_COMPARISON[key]}")


def _labels(entry: Entry, cell: Mapping[str, str], grid: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """The grid's values that count for an entry in a cell; one that it sets itself is the same in every cell."""
    labels: dict[str, str] = {}
    for key, value in cell.items():
        if key in entry.overrides:
            labels.update((key, other) for other in grid[key] if _same(other, entry.overrides[key]))
        elif applies(key, entry.method):
            labels[key] = value
    return labels


def _same(a: str, b: str) -> bool:
    try:
        return float(a) == float(b)  # 5e-5 is 0.00005
    except ValueError:
        return a == b


def _group(entry: Entry, labels: dict[str, str], options: Mapping[str, Sequence[str]]) -> Group:
    changes = {**labels, **entry.overrides}
    kept = [tokens for key, tokens in options.items() if key not in changes and applies(key, entry.method)]
    # Changes are one token with "=" each, so that a value may start with a dash.
    tokens = [f"--method={entry.method}", *itertools.chain(*kept), *(f"--{key}={x}" for key, x in changes.items())]
    tokens += ["--save_strategy=no", "--disable_tqdm=true"]
    if entry.method == "in_batch":
        tokens, labels = _one_batch(tokens, labels)
    # A folder's name that says what is in it, in characters that a folder's name may have.
    words = [entry.name, *(f"{key}-{value}" for key, value in labels.items())]
    name = "_".join(re.sub(r"[^A-Za-z0-9._+-]+", "-", word)[-60:] for word in words)
    parsed = _parse(name, tokens)
    args = parsed[2]
    if args.eval_strategy != "no":
        raise ConfigError(f"{name}: eval_strategy in a comparison: drop it, and use --eval_updates N instead")
    if args.dataloader_drop_last:
        why = "drops other pairs at another batch size, so that the methods would not see the same data"
        raise ConfigError(f"{name}: dataloader_drop_last=true {why}. Drop it")
    if args.world_size > 1:
        raise ConfigError("a comparison starts its own processes: start it without torchrun")
    return Group(name, entry.name, entry.method, labels, tokens, parsed)


def _one_batch(tokens: list[str], labels: dict[str, str]) -> tuple[list[str], dict[str, str]]:
    """All pairs of an update in one batch, which is what the other methods accumulate to; and so the labels."""
    local, steps = "per_device_train_batch_size", "gradient_accumulation_steps"
    pairs = str(_parse("in_batch", [*tokens, "--method=grad_accum"])[2].total_train_batch_size)
    if labels.keys() & {local, steps}:
        labels = {**{key: value for key, value in labels.items() if key != steps}, local: pairs}
    return [*tokens, f"--{local}={pairs}", f"--{steps}=1"], labels


def _parse(name: str, tokens: Sequence[str]) -> tuple[ModelArguments, DataArguments, ContAccumTrainingArguments]:
    try:
        return parse([*tokens, "--output_dir=unused"])
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error


def _values(model: ModelArguments, data: DataArguments, args: ContAccumTrainingArguments) -> dict[str, Any]:
    found = {**asdict(model), **asdict(data), **args.to_dict()}
    return json.loads(json.dumps({key: value for key, value in found.items() if key not in _PLACES}, default=str))
