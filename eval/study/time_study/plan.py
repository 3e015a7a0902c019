"""The plan of the study by time, from a YAML file.

An entry is a training method with its settings. A cell is one run: an entry on a data set with a
learning rate and a seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import yaml

from contaccum.errors import ConfigError, check_choice

Setting = str | int | float | bool
Settings = dict[str, Setting]
"""{key of `contaccum train`: value}."""


@dataclass(frozen=True)
class DataPlan:
    """A data set of the study.

    Attributes:
        max_length: maximum number of tokens of a text.
        bank_size: number of pairs in each of the two banks.
        updates: number of updates of contaccum. Their time is the budget of every entry with
            ``budget: time``.
        bf16: train and score in bfloat16, which only some processors compute fast.
        folder: name of the BEIR folder; None: the name of the data set. A data set with a folder
            has variants of methods on another data set's texts. It has no panel in the pictures, so
            no run is scored during training.
    """

    max_length: int
    bank_size: int
    updates: int
    bf16: bool
    folder: str | None = None


@dataclass(frozen=True)
class Entry:
    """A training method with its settings.

    Attributes:
        settings: training settings in addition to those of the plan.
        timed_settings: settings with which the time of an update is measured: those of a method
            that computes the same update with less memory. None: ``settings``.
        timed_as: name of the entry whose updates take the same time; None: they are measured.
        has_bank: the entry has banks, of the data set's size unless ``settings`` has another one.
        has_mined_negatives: each pair has a hard negative, which the base model mined.
        has_guide: false negatives are masked by the scores of the base model.
        store: name of the store that query-side training uses; None for other methods.
        second_stage: name of an entry of query-side training. Its updates, with its chosen learning
            rate, follow after the corpus has been encoded by the trained model. None: no second
            stage.
        budget: "time": as many updates as fit into the time; "updates": as many as contaccum has.
        rate_of: name of the entry whose learning rate is used; None: the entry has its own.
        compared_with: names of the entries that this entry is compared with by a test.
        data: data sets of the entry; None: all.
        trainer: "contaccum", or the name of another trainer in `time_study.trainers`.
    """

    settings: Settings
    timed_settings: Settings | None = None
    timed_as: str | None = None
    has_bank: bool = False
    has_mined_negatives: bool = False
    has_guide: bool = False
    store: str | None = None
    second_stage: str | None = None
    budget: Literal["time", "updates"] = "time"
    rate_of: str | None = None
    compared_with: list[str] = field(default_factory=list)
    data: list[str] | None = None
    trainer: str = "contaccum"


@dataclass(frozen=True)
class Plan:
    """The whole plan; see eval/study/by_time.yaml.

    Attributes:
        seeds: seeds of the final runs. Learning rates are chosen with the first one.
        learning_rates: learning rates that each entry tries first.
        rate_factor: factor between neighbouring learning rates.
        max_rates: largest number of rates of an entry.
        settings: training settings of all entries.
        data: {name: data set}.
        entries: {name: entry}.
    """

    seeds: list[int]
    learning_rates: list[str]
    rate_factor: float
    max_rates: int
    settings: Settings
    data: dict[str, DataPlan]
    entries: dict[str, Entry] = field(default_factory=dict)

    def get_entries(self, data: str, names: Sequence[str] | None = None) -> dict[str, Entry]:
        """Return the entries of a data set, or those of them that are named.

        Raises:
            ConfigError: for an unknown data set, or a name that is no entry of the data set.
        """
        check_choice("data", data, self.data)
        entries = {}
        for name, entry in self.entries.items():
            if entry.data is None or data in entry.data:
                entries[name] = entry
        if names is None:
            return entries
        for name in names:
            check_choice(f"--entries for {data}", name, entries)
        return {name: entries[name] for name in names}

    def make_settings(self, data: str, entry: Entry, *, is_timed: bool = False) -> Settings:
        """Return the settings of an entry on a data set, without rate, seed and updates."""
        entry_settings = entry.settings
        if is_timed and entry.timed_settings is not None:
            entry_settings = entry.timed_settings
        settings = {**self.settings, **entry_settings, "bf16": self.data[data].bf16}
        if entry.has_bank:
            settings.setdefault("bank_size", self.data[data].bank_size)
        return settings


def read_plan(path: str | Path) -> Plan:
    """Read a plan.

    Raises:
        ConfigError: for unknown keys, or an entry that refers to a missing entry or data set.
    """
    content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    try:
        content["data"] = {name: DataPlan(**keys) for name, keys in content["data"].items()}
        content["entries"] = {name: Entry(**keys) for name, keys in content["entries"].items()}
        plan = Plan(**content)
    except TypeError as error:
        raise ConfigError(f"{path}: {error}") from error
    for name, entry in plan.entries.items():
        for other in (entry.rate_of, entry.timed_as, entry.second_stage, *entry.compared_with):
            if other is not None and other not in plan.entries:
                raise ConfigError(f"{path}: {name}: there is no entry {other}")
        for data in entry.data or []:
            if data not in plan.data:
                raise ConfigError(f"{path}: {name}: data: there is no data set {data}")
    return plan
