"""Which runs a comparison needs: methods and variants, times the grid, times the seeds, each with its options.

A method that lacks a gridded setting (bank_size without a bank) has one run for all of its values. Whatever a run would
refuse is refused here, before the first one starts. Nothing is trained, and no data is read.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from typing import Any, NamedTuple
from urllib.parse import quote

from contaccum.errors import ConfigError, check_choice, our_name
from contaccum.training.arguments import (
    BANK_METHODS,
    BANK_SETTINGS,
    LOSS_SETTINGS,
    ContAccumTrainingArguments,
    get_name,
)
from contaccum.training.config import parse, read_config_options
from contaccum.training.options import METHODS, DataArguments, ModelArguments

Options = Mapping[str, Sequence[str]]
"""Key of `contaccum train` -> its values, as text."""

_KEYS = frozenset(
    f.name
    for cls in (ModelArguments, DataArguments, ContAccumTrainingArguments)
    for f in fields(cls)
)
_SET_BY_COMPARE = ("method", "seed", "output_dir", "resume_from_checkpoint", "eval_strategy")
# Options of every run: its model is scored in the same process, and its output goes to files.
_SAME_IN_EVERY_RUN = {"save_strategy": ["no"], "disable_tqdm": ["true"]}


class Entry(NamedTuple):
    """A row of the report: a method, with the settings that make it a variant."""

    name: str
    method: str
    overrides: Mapping[str, str]


class Group(NamedTuple):
    """The runs that differ by nothing but the seed.

    Attributes:
        labels: the grid's values that count for its entry.
        options: all that is given to `contaccum train`, but for the seed and a folder.
        parsed: model, data and training arguments, as its parser understands them.
    """

    name: str
    entry: str
    method: str
    labels: Mapping[str, str]
    options: Options
    parsed: tuple[ModelArguments, DataArguments, ContAccumTrainingArguments]

    def run(self, seed: int) -> str:
        """The name of a run, and of its folder."""
        return f"{self.name}_seed-{seed}"


class Plan(NamedTuple):
    """All runs: every group with every seed.

    Attributes:
        groups: by name, in the order of the report.
        pairs: (group, the baseline's group in its cell of the grid) -> the labels of its row. What only the baseline
            has is in brackets: it tells rows apart, but is no setting of theirs.
    """

    entries: Sequence[Entry]
    grid: Options
    seeds: Sequence[int]
    baseline: str
    groups: Mapping[str, Group]
    pairs: Mapping[tuple[str, str], Mapping[str, str]]


def read_options(files: Sequence[str], given: Sequence[str]) -> dict[str, list[str]]:
    """Config files, but for their method, seed, folder and evaluation; then ``--key value`` of the command line."""
    read = _by_key([token for name in files for token in read_config_options(name, _KEYS)])
    kept = {
        key: x
        for key, x in read.items()
        if key not in _SET_BY_COMPARE and not key.startswith("eval_")
    }
    return kept | _by_key(given)


def all_options(files: Sequence[str], given: Sequence[str]) -> dict[str, list[str]]:
    """Return the options of config files, overridden by ``--key value`` of the command line."""
    of_files = [token for name in files for token in read_config_options(name, _KEYS)]
    return _by_key(of_files) | _by_key(given)


def make_plan(
    options: Options,
    methods: Sequence[str],
    variants: Sequence[Sequence[str]],
    grid: Sequence[str],
    seeds: Sequence[int],
    baseline: str | None = None,
) -> Plan:
    """Work out the runs and check each one's arguments.

    Args:
        options: as `read_options` gives them.
        variants: each ``[NAME, key=value, ...]``; one that names no method is contaccum.
        grid: ``key=value,value``.
        baseline: the entry that the others are compared with; None: grad_accum, or else the first.

    Raises:
        ConfigError: arguments that the trainer would refuse, or that a comparison sets itself; an unknown method.
    """
    entries = {method: Entry(method, method, {}) for method in methods}
    for name, *given in variants:
        if name in entries or not all("=" in setting for setting in given):
            raise ConfigError(
                f"--variant {name} {' '.join(given)}: write a name that is not taken, then key=value ..."
            )
        overrides = {key: value for key, _, value in (setting.partition("=") for setting in given)}
        entries[name] = Entry(name, overrides.pop("method", "contaccum"), overrides)
    for entry in entries.values():
        check_choice(f"{entry.name}: method", entry.method, METHODS)
    if not entries:
        raise ConfigError("nothing to compare: give --methods, or a --variant")
    values = {
        key: list(dict.fromkeys(text.split(",")))
        for key, _, text in (one.partition("=") for one in grid)
    }
    for key, texts in values.items():
        if not all(texts):
            raise ConfigError(f"--grid {key}: write key=value,value")
    refuse_own(itertools.chain(options, values, *(entry.overrides for entry in entries.values())))
    baseline = baseline or ("grad_accum" if "grad_accum" in entries else next(iter(entries)))
    check_choice("--baseline", baseline, entries)
    groups: dict[str, Group] = {}
    pairs: dict[tuple[str, str], dict[str, str]] = {}
    cells = [dict(zip(values, cell, strict=True)) for cell in itertools.product(*values.values())]
    for entry, cell in itertools.product(entries.values(), cells):
        labels, theirs = (_labels(one, cell, values) for one in (entry, entries[baseline]))
        if entry.name != baseline:
            if not labels.items() <= cell.items():
                continue  # a variant that sets another of the grid's values itself
            pair = _name(entry.name, labels), _name(baseline, theirs)
            pairs[pair] = {**{key: f"({value})" for key, value in theirs.items()}, **labels}
        name = _name(entry.name, labels)
        groups[name] = groups.get(name) or _group(name, entry, labels, options)
    return Plan(list(entries.values()), values, list(dict.fromkeys(seeds)), baseline, groups, pairs)


def refuse_own(keys: Iterable[str]) -> None:
    """Raise `ConfigError` for a setting that a comparison itself gives each run."""
    for key in keys:
        if key in _SET_BY_COMPARE:
            mend = "use --methods, --seeds, --eval_updates and --output_dir"
            raise ConfigError(f"{key}: a comparison sets it for each of its runs; {mend}")


def tunable(plan: Plan, key: str) -> list[Group]:
    """The groups of which a setting is chosen by dev scores: it means something to them, and no variant sets it."""
    fixed = {entry.name for entry in plan.entries if key in entry.overrides}
    return [
        group
        for group in plan.groups.values()
        if group.entry not in fixed and _applies(key, group.method)
    ]


def with_value(group: Group, key: str, value: str) -> Group:
    """A group with one more setting, which its name and labels have too; raises `ConfigError` as `make_plan` does."""
    labels, options = {**group.labels, key: value}, {**group.options, key: [value]}
    name = _name(group.entry, labels)
    return group._replace(name=name, labels=labels, options=options, parsed=_parse(name, options))


def with_chosen(plan: Plan, key: str, chosen: Mapping[str, str | None]) -> Plan:
    """The plan with the value that was chosen for each group, by name; one for which there is none (None) is left out.

    A variant that sets the key itself has its own value as a label.
    """
    fixed = {entry.name: entry.overrides[key] for entry in plan.entries if key in entry.overrides}
    final: dict[str, Group] = {}
    for name, group in plan.groups.items():
        value = chosen[name] if name in chosen else fixed.get(group.entry)
        if value is not None:
            final[name] = with_value(group, key, value)
        elif name not in chosen:
            final[name] = group  # the setting means nothing to its method
    pairs = {}
    for names, labels in plan.pairs.items():
        if final.keys() >= set(names):
            mine, theirs = (final[name] for name in names)
            pairs[mine.name, theirs.name] = {
                **labels,
                **{k: x for k, x in mine.labels.items() if k == key},
            }
    found = dict.fromkeys(group.labels[key] for group in final.values() if key in group.labels)
    grid = {**plan.grid, key: list(found)}
    return plan._replace(
        grid=grid, groups={group.name: group for group in final.values()}, pairs=pairs
    )


def loss_settings(plan: Plan) -> dict[str, dict[str, str]]:
    """{entry: {setting of the loss: its value, or those of its groups}}; "-" where it means nothing to the method.

    A setting that means nothing to any of the entries is left out.
    """
    found: dict[str, dict[str, str]] = {}
    kept = [
        key for key in LOSS_SETTINGS if any(_applies(key, entry.method) for entry in plan.entries)
    ]
    for name, method, _ in plan.entries:
        parsed = [group.parsed[2] for group in plan.groups.values() if group.entry == name]
        values = {key: dict.fromkeys(_shown(getattr(args, key)) for args in parsed) for key in kept}
        found[name] = {
            key: " or ".join(values[key]) if _applies(key, method) else "-" for key in kept
        }
    return found


def changed_settings(plan: Plan) -> dict[str, dict[str, str]]:
    """Return {setting: {entry: its value}} for the settings that are worth reading.

    These are the settings of the loss, and those that some run was given, whose values differ
    between the entries or from the default. A value is "-" if the setting means nothing to the
    method; values of several cells of the grid are joined by "or".
    """
    values_by_entry = {entry.name: _entry_values(plan, entry) for entry in plan.entries}
    given = {key for group in plan.groups.values() for key in group.options}
    given -= {"method", *_SAME_IN_EVERY_RUN}
    changed = {}
    for key, default in _DEFAULTS.items():
        if key not in given and key not in LOSS_SETTINGS:
            continue
        values = {name: values_by_entry[name][key] for name in values_by_entry}
        used = set(values.values()) - {"-"}
        differs_from_default = key in given and used != {default}
        if used and (len(used) > 1 or differs_from_default):
            changed[key] = values
    return changed


def _entry_values(plan: Plan, entry: Entry) -> dict[str, str]:
    """Return {setting: its value, or the values of the entry's groups joined by "or"}."""
    values: dict[str, dict[str, None]] = {}
    for group in plan.groups.values():
        if group.entry != entry.name:
            continue
        model, data, training = group.parsed
        # to_dict has batch sizes as they were given, also if an update is one cached batch.
        settings = {**vars(model), **vars(data), **training.to_dict()}
        for key in _DEFAULTS:
            shown = _shown(settings.get(key)) if _applies(key, entry.method) else "-"
            values.setdefault(key, {})[shown] = None
    return {key: " or ".join(values.get(key, ["-"])) for key in _DEFAULTS}


def _shown(value: Any) -> str:
    """Return a setting's value as a report shows it."""
    if value is None:
        return "default"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if isinstance(value, bool):
        return str(value).lower()
    return get_name(value)


def _default(setting: Field[Any]) -> str:
    """Return the default of a dataclass's field as a report shows it."""
    if setting.default_factory is not MISSING:
        return _shown(setting.default_factory())
    return _shown(setting.default)


_DEFAULTS = {
    setting.name: _default(setting)
    for cls in (ModelArguments, DataArguments, ContAccumTrainingArguments)
    for setting in fields(cls)
}


def as_tokens(options: Options) -> list[str]:
    """For the parser of `contaccum train`."""
    return [token for key, values in options.items() for token in (f"--{key}", *values)]


def _by_key(tokens: Sequence[str]) -> dict[str, list[str]]:
    """``--key value ...`` and ``--key=value``; a switch has no value."""
    options: dict[str, list[str]] = {}
    for token in tokens:
        if token.startswith("--"):
            key, equals, value = token[2:].partition("=")
            current = options[our_name(key, _KEYS)] = [value] if equals else []
        elif options:
            current.append(token)
        else:
            raise ConfigError(f"unexpected {token!r} before any --key (config files come first)")
    return options


def _applies(key: str, method: str) -> bool:
    """Whether a training argument means anything to a method."""
    return method in BANK_METHODS or key not in BANK_SETTINGS


def _labels(entry: Entry, cell: Mapping[str, str], grid: Options) -> dict[str, str]:
    """The grid's values that count for an entry in a cell; one that it sets itself is the same in every cell."""
    given = {**cell, **entry.overrides}
    counted = [key for key in grid if key in entry.overrides or _applies(key, entry.method)]
    return {key: given[key] for key in counted if given[key] in grid[key]}


def _name(entry: str, labels: Mapping[str, str]) -> str:
    """Of a group; what a folder may not be called is quoted."""
    return "_".join(
        quote(word, safe="+")
        for word in (entry, *(f"{key}-{value}" for key, value in labels.items()))
    )


def _group(name: str, entry: Entry, labels: dict[str, str], options: Options) -> Group:
    chosen = {key: list(values) for key, values in options.items() if _applies(key, entry.method)}
    chosen |= {
        key: [value] for key, value in {**labels, **entry.overrides, "method": entry.method}.items()
    }
    chosen |= _SAME_IN_EVERY_RUN
    if (
        entry.method == "in_batch"
    ):  # all pairs of an update at once, which the other methods accumulate to
        pairs = _parse(name, {**chosen, "method": ["grad_accum"]})[2].total_train_batch_size
        chosen |= {
            "per_device_train_batch_size": [str(pairs)],
            "gradient_accumulation_steps": ["1"],
        }
    return Group(name, entry.name, entry.method, labels, chosen, _parse(name, chosen))


def _parse(
    name: str, options: Options
) -> tuple[ModelArguments, DataArguments, ContAccumTrainingArguments]:
    try:
        return parse([*as_tokens(options), "--output_dir=unused"])
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error
