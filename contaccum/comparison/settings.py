"""The settings of a comparison's entries as its report shows them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, fields

from contaccum.comparison.options import ARGUMENT_CLASSES, is_used_by
from contaccum.comparison.plan import COMMON_OPTIONS, Entry, Plan
from contaccum.training.arguments import LOSS_SETTINGS, get_name

NOT_USED = "-"
"""The value of a setting that an entry's method does not use."""


def loss_settings(plan: Plan) -> dict[str, dict[str, str]]:
    """Return {entry: {setting of the loss: its value}}.

    Values that differ between the entry's groups are joined by "or". A value is `NOT_USED` if the
    entry's method does not use the setting. Settings that no entry uses are left out.
    """
    keys = []
    for key in LOSS_SETTINGS:
        if any(is_used_by(entry.method, key) for entry in plan.entries):
            keys.append(key)
    settings: dict[str, dict[str, str]] = {}
    for entry in plan.entries:
        values = _get_values(plan, entry)
        settings[entry.name] = {key: values[key] for key in keys}
    return settings


def changed_settings(plan: Plan) -> dict[str, dict[str, str]]:
    """Return {setting: {entry: its value}} for the settings that the report shows.

    A setting of the loss is shown if its values differ between the entries. A setting that the user
    gave is also shown if its value differs from the default. Values are shown as in
    `loss_settings`.
    """
    values_by_entry = {entry.name: _get_values(plan, entry) for entry in plan.entries}
    given_keys: set[str] = set()
    for group in plan.groups.values():
        given_keys.update(key.removeprefix("no_") for key in group.options)
    given_keys -= {"method", *COMMON_OPTIONS}
    changed = {}
    for key, default in _DEFAULTS.items():
        if key not in given_keys and key not in LOSS_SETTINGS:
            continue
        values = {name: entry_values[key] for name, entry_values in values_by_entry.items()}
        used_values = set(values.values()) - {NOT_USED}
        differs_from_default = key in given_keys and used_values != {default}
        if used_values and (len(used_values) > 1 or differs_from_default):
            changed[key] = values
    return changed


def _get_values(plan: Plan, entry: Entry) -> dict[str, str]:
    """Return {setting: its value, or the values of the entry's groups joined by "or"}."""
    settings_of_groups = []
    for group in plan.groups.values():
        if group.entry != entry.name:
            continue
        model, data, training = group.arguments
        # A gradient cache changes the batch sizes of the arguments; to_dict has the user's values.
        settings_of_groups.append({**vars(model), **vars(data), **training.to_dict()})
    values = {}
    for key in _DEFAULTS:
        values[key] = NOT_USED
        if settings_of_groups and is_used_by(entry.method, key):
            values[key] = _join_distinct([settings.get(key) for settings in settings_of_groups])
    return values


def _join_distinct(values: Sequence[object]) -> str:
    """Return the distinct values as text, joined by "or"."""
    texts = dict.fromkeys(map(_format_value, values))
    return " or ".join(texts)


def _format_value(value: object) -> str:
    """Return the value of a setting as a report shows it."""
    if value is None:
        return "default"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if isinstance(value, bool):
        return str(value).lower()
    return get_name(value)


def _format_defaults() -> dict[str, str]:
    """Return {option of `contaccum train`: its default, as a report shows it}."""
    defaults = {}
    for cls in ARGUMENT_CLASSES:
        for setting in fields(cls):
            default = setting.default
            if setting.default_factory is not MISSING:
                default = setting.default_factory()
            defaults[setting.name] = _format_value(default)
    return defaults


_DEFAULTS = _format_defaults()
