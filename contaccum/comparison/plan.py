"""The plan of a comparison: a run for each entry, each cell of the grid and each seed.

An entry is a method or a variant. A cell is one combination of the grid's values. A group has the
runs of one entry in one cell. For example, ``--methods grad_accum contaccum --grid bank_size=8,16
--seeds 0 1`` has two entries, two cells and three groups: grad_accum, contaccum_bank_size-8 and
contaccum_bank_size-16. grad_accum has no bank, so its group serves both cells. Each group has two
runs.

Options that a run would refuse are refused here, before the first run starts. Nothing is trained
and no data are read here.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple
from urllib.parse import quote

from contaccum.comparison.options import (
    Options,
    RunArguments,
    is_used_by,
    parse_run,
    refuse_reserved_keys,
)
from contaccum.errors import ConfigError, check_choice
from contaccum.training.options import METHODS

COMMON_OPTIONS: Options = {"save_strategy": ["no"], "disable_tqdm": ["true"]}
"""Options of every run: its model is scored in the same process, and its output goes to files."""

Labels = Mapping[str, str]
"""{setting of the grid: its value in a cell, in a group, or in a row of the report}"""


class Entry(NamedTuple):
    """A method, or a variant: a method with settings of its own.

    Attributes:
        name: the name of the method or variant.
        method: the training method.
        overrides: the settings of a variant; empty for a plain method.
    """

    name: str
    method: str
    overrides: Mapping[str, str]


class Group(NamedTuple):
    """The runs of one entry in one cell of the grid, which differ only by the seed.

    Attributes:
        name: entry and labels, such as "contaccum_bank_size-8".
        entry: the name of the entry.
        method: the training method.
        labels: the values of the grid that the entry uses.
        options: all options of `contaccum train` except the seed and the output folder.
        arguments: the parsed ``options``.
    """

    name: str
    entry: str
    method: str
    labels: Labels
    options: Options
    arguments: RunArguments

    def run_name(self, seed: int) -> str:
        """Return the name of the run with a seed, which is also the name of its folder."""
        return f"{self.name}_seed-{seed}"


class Plan(NamedTuple):
    """All runs of a comparison: every group with every seed.

    Attributes:
        entries: the methods and variants.
        grid: {setting: its values}.
        seeds: the seeds of each group's runs.
        baseline: the name of the entry that the others are compared with.
        groups: {name: group}, in the order of the report.
        comparisons: {(name of a group, name of the baseline's group in the same cell): labels of
            the row in the report}. A group may be compared with several groups of the baseline, in
            one row each. A label that only the baseline has stands in brackets: the row's group
            does not use the setting, or it has a value of its own that is not in the grid.
    """

    entries: Sequence[Entry]
    grid: Options
    seeds: Sequence[int]
    baseline: str
    groups: Mapping[str, Group]
    comparisons: Mapping[tuple[str, str], Labels]


def make_plan(
    options: Options,
    methods: Sequence[str],
    variants: Sequence[Sequence[str]],
    grid: Sequence[str],
    seeds: Sequence[int],
    baseline: str | None = None,
) -> Plan:
    """Make the plan of all runs, and check the arguments of every run.

    Args:
        options: the options of all runs, as `read_options` returns them.
        methods: names of training methods; each becomes an entry.
        variants: lists ``[NAME, key=value, ...]``; their default ``method`` is contaccum.
        grid: texts ``key=value,value``.
        baseline: the name of an entry; None: grad_accum if it is an entry, else the first entry.

    Raises:
        ConfigError: for an unknown method, arguments that `contaccum train` refuses, or arguments
            that a comparison sets itself.
    """
    entries = _make_entries(methods, variants)
    grid_values = _parse_grid(grid)
    refuse_reserved_keys(options)
    refuse_reserved_keys(grid_values)
    for entry in entries.values():
        refuse_reserved_keys(entry.overrides)
    if not baseline:
        baseline = "grad_accum" if "grad_accum" in entries else next(iter(entries))
    check_choice("--baseline", baseline, entries)

    groups: dict[str, Group] = {}
    comparisons: dict[tuple[str, str], Labels] = {}
    for entry in entries.values():
        for cell in _make_cells(grid_values):
            labels = _select_labels(entry, cell, grid_values)
            name = _make_group_name(entry.name, labels)
            if entry.name != baseline:
                is_overridden = not labels.items() <= cell.items()
                if is_overridden:
                    # The variant has a fixed value for a setting of the grid. Its group belongs
                    # only to the cells with this value.
                    continue
                baseline_labels = _select_labels(entries[baseline], cell, grid_values)
                baseline_name = _make_group_name(baseline, baseline_labels)
                comparisons[name, baseline_name] = _make_row_labels(labels, baseline_labels)
            if name not in groups:
                groups[name] = _make_group(name, entry, labels, options)
    distinct_seeds = list(dict.fromkeys(seeds))
    return Plan(list(entries.values()), grid_values, distinct_seeds, baseline, groups, comparisons)


def _make_entries(methods: Sequence[str], variants: Sequence[Sequence[str]]) -> dict[str, Entry]:
    """Return {name: entry}; raise `ConfigError` for an unknown method, or a wrong variant."""
    entries = {method: Entry(method, method, {}) for method in methods}
    for name, *settings in variants:
        is_well_formed = all("=" in setting for setting in settings)
        if name in entries or not is_well_formed:
            raise ConfigError(
                f"--variant {name} {' '.join(settings)}: write a name that is not taken, then "
                "key=value ..."
            )
        overrides = {}
        for setting in settings:
            key, _, value = setting.partition("=")
            overrides[key] = value
        method = overrides.pop("method", "contaccum")
        entries[name] = Entry(name, method, overrides)
    for entry in entries.values():
        check_choice(f"{entry.name}: method", entry.method, METHODS)
    if not entries:
        raise ConfigError("nothing to compare: give --methods, or a --variant")
    return entries


def _parse_grid(grid: Sequence[str]) -> dict[str, list[str]]:
    """Return {setting: its distinct values}.

    Raises:
        ConfigError: for a setting without values, or given twice.
    """
    values: dict[str, list[str]] = {}
    for text in grid:
        key, _, value_text = text.partition("=")
        if key in values:
            raise ConfigError(f"--grid {key}: is given twice; write {key}=value,value")
        values[key] = list(dict.fromkeys(value_text.split(",")))
        if not all(values[key]):
            raise ConfigError(f"--grid {key}: write key=value,value")
    return values


def _make_cells(grid: Options) -> list[dict[str, str]]:
    """Return all combinations of the grid's values, each as {setting: value}."""
    cells = []
    for values in itertools.product(*grid.values()):
        cells.append(dict(zip(grid, values, strict=True)))
    return cells


def _select_labels(entry: Entry, cell: Labels, grid: Options) -> dict[str, str]:
    """Return the values of the grid that an entry uses in a cell.

    A setting that the entry overrides has the entry's value in every cell. It is a label only if
    that value is in the grid.
    """
    labels = {}
    for key in grid:
        if key not in entry.overrides and not is_used_by(entry.method, key):
            continue
        value = entry.overrides.get(key, cell[key])
        if value in grid[key]:
            labels[key] = value
    return labels


def _make_row_labels(labels: Labels, baseline_labels: Labels) -> dict[str, str]:
    """Return the labels of a row, and in brackets the labels that only the baseline has."""
    row_labels = {}
    for key, value in baseline_labels.items():
        row_labels[key] = f"({value})"
    row_labels.update(labels)
    return row_labels


def _make_group_name(entry: str, labels: Labels) -> str:
    """Return the name of a group; characters that a folder's name cannot have are quoted."""
    words = [entry]
    for key, value in labels.items():
        words.append(f"{key}-{value}")
    return "_".join(quote(word, safe="+") for word in words)


def _make_group(name: str, entry: Entry, labels: Labels, options: Options) -> Group:
    """Return the group of an entry; raise `ConfigError` for options that are not possible."""
    group_options: dict[str, Sequence[str]] = {}
    for key, values in options.items():
        if is_used_by(entry.method, key):
            group_options[key] = list(values)
    for key, value in {**labels, **entry.overrides, "method": entry.method}.items():
        group_options[key] = [value]
    group_options.update(COMMON_OPTIONS)
    if entry.method == "in_batch":
        # One batch has all pairs that the other methods accumulate to in an update.
        accumulated = parse_run(name, {**group_options, "method": ["grad_accum"]})
        batch_size = accumulated.training.total_train_batch_size
        group_options["per_device_train_batch_size"] = [str(batch_size)]
        group_options["gradient_accumulation_steps"] = ["1"]
    arguments = parse_run(name, group_options)
    return Group(name, entry.name, entry.method, labels, group_options, arguments)


def select_tunable_groups(plan: Plan, key: str) -> list[Group]:
    """Return the groups whose method uses a setting and whose entry has no fixed value for it."""
    fixed_values = _get_fixed_values(plan, key)
    groups = []
    for group in plan.groups.values():
        if group.entry not in fixed_values and is_used_by(group.method, key):
            groups.append(group)
    return groups


def add_setting(group: Group, key: str, value: str) -> Group:
    """Return a group with one more setting, which is also added to its name and labels.

    Raises:
        ConfigError: if `contaccum train` refuses the value.
    """
    labels = {**group.labels, key: value}
    options = {**group.options, key: [value]}
    name = _make_group_name(group.entry, labels)
    arguments = parse_run(name, options)
    return group._replace(name=name, labels=labels, options=options, arguments=arguments)


def apply_chosen_values(plan: Plan, key: str, chosen: Mapping[str, str | None]) -> Plan:
    """Return the plan in which each group has the value of a setting that tuning has chosen.

    If a group's entry has a fixed value for the setting, the group gets this value as a label. A
    group whose method does not use the setting is not changed.

    Args:
        chosen: {name of a group: its value}; None removes the group from the plan.
    """
    fixed_values = _get_fixed_values(plan, key)
    new_groups: dict[str, Group] = {}  # {name before the setting is added: new group}
    for name, group in plan.groups.items():
        if name in chosen:
            value = chosen[name]
            if value is None:
                continue
        else:
            value = fixed_values.get(group.entry)
        new_groups[name] = group if value is None else add_setting(group, key, value)

    comparisons = {}
    for (name, baseline_name), labels in plan.comparisons.items():
        if name not in new_groups or baseline_name not in new_groups:
            continue
        group = new_groups[name]
        row_labels = dict(labels)
        if key in group.labels:
            row_labels[key] = group.labels[key]
        comparisons[group.name, new_groups[baseline_name].name] = row_labels

    groups = {}
    values: dict[str, None] = {}  # the keys are distinct values in the order of the groups
    for group in new_groups.values():
        groups[group.name] = group
        if key in group.labels:
            values[group.labels[key]] = None
    return plan._replace(
        grid={**plan.grid, key: list(values)}, groups=groups, comparisons=comparisons
    )


def _get_fixed_values(plan: Plan, key: str) -> dict[str, str]:
    """Return {name of an entry: value} for the variants that have a fixed value for a setting."""
    values = {}
    for entry in plan.entries:
        if key in entry.overrides:
            values[entry.name] = entry.overrides[key]
    return values
