"""The finished runs of the study by time on one data set, read from their files."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from comparison.tuning import choose_value

from contaccum.files import read_json
from time_study.plan import Plan

Record = dict[str, Any]
"""The JSON record of a run; see `time_study.cell`."""


class Mean(NamedTuple):
    """The mean of a score over seeds, and its standard deviation (0 for one seed)."""

    mean: float
    deviation: float


class Cost(NamedTuple):
    """The cost of training one model, without encoding the corpus and without mining.

    Attributes:
        minutes: CPU minutes of one core.
        texts: number of encoded texts; a text that is encoded twice counts twice.
    """

    minutes: float
    texts: float


class Results:
    """The runs of a data set.

    Args:
        plan: the plan of the study.
        folder: the folder with the files ENTRY-RATE-SEED.json.
    """

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan = plan
        self.folder = folder

    def get_base(self) -> Record | None:
        """Return the scores before training; None if they are missing."""
        return self._read("base.json")

    def get_timing(self, entry: str) -> Record:
        """Return the timing of an entry, or of the entry that it is timed as; see `get_timings`."""
        timed_as = self.plan.entries[entry].timed_as or entry
        return self.get_timings()[timed_as]

    def get_timings(self) -> dict[str, Record]:
        """Return {entry: record of its timing}.

        A record has ``seconds_per_update`` (CPU) and ``passes_per_update``, the encoded texts.
        """
        record = self._read("seconds.json")
        return {} if record is None else record["entries"]

    def get_cost(self, entry: str, updates: int) -> Cost:
        """Return the cost of a run with this number of updates, and of its second stage, if any."""
        cost = self.get_cost_of_updates(entry, updates)
        second_stage = self.plan.entries[entry].second_stage
        if second_stage is None:
            return cost
        second = self.get_cost_of_updates(second_stage, self.count_second_updates(entry))
        return Cost(cost.minutes + second.minutes, cost.texts + second.texts)

    def count_second_updates(self, entry: str) -> int:
        """Return the number of updates of an entry's second stage; 0 if it has none."""
        second_stage = self.plan.entries[entry].second_stage
        return 0 if second_stage is None else self.get_final_runs(second_stage)[0]["updates"]

    def get_cost_of_updates(self, entry: str, updates: int) -> Cost:
        """Return the cost of a number of updates of an entry."""
        timing = self.get_timing(entry)
        minutes = updates * timing["seconds_per_update"] / 60
        return Cost(minutes, updates * timing["passes_per_update"])

    def count_texts(self, entry: str) -> float:
        """Return the number of texts that a run of an entry encodes, as a mean over its runs.

        It is the number that the runs recorded, unless they were trained as another method than the
        one that is charged. Texts that a guide encodes do not count.
        """
        runs = self.get_final_runs(entry)
        timed_as = self.plan.entries[entry].timed_as or entry
        if self.plan.entries[timed_as].timed_settings is not None:
            return self.get_cost(entry, runs[0]["updates"]).texts
        return fmean(run["encoder_passes"] for run in runs)

    def _read(self, name: str) -> Record | None:
        file = self.folder / name
        return read_json(file) if file.exists() else None

    def get_ladder(self, entry: str) -> dict[str, Record]:
        """Return {learning rate: run of the first seed} of all rates that were tried, ascending."""
        records = {}
        for file in self.folder.glob(f"{entry}-*-{self.plan.seeds[0]}.json"):
            record = read_json(file)
            if record["entry"] == entry:
                records[record["rate"]] = record
        return dict(sorted(records.items(), key=lambda item: float(item[0])))

    def get_dev_scores(self, entry: str) -> dict[str, float | None]:
        """Return {learning rate: dev score of the first seed}."""
        ladder = self.get_ladder(entry)
        return {rate: record["scores"]["dev"] for rate, record in ladder.items()}

    def choose_rate(self, entry: str) -> str | None:
        """Return the learning rate that dev chooses; None if no run is finished.

        If the plan gives the entry the rate of another one, that entry's rate is returned.
        """
        rate_of = self.plan.entries[entry].rate_of or entry
        return choose_value(self.get_dev_scores(rate_of))

    def get_final_runs(self, entry: str) -> list[Record]:
        """Return the runs of all seeds at the chosen rate that are finished."""
        rate = self.choose_rate(entry)
        runs = []
        for seed in self.plan.seeds:
            record = self._read(f"{entry}-{rate}-{seed}.json")
            if record is not None:
                runs.append(record)
        return runs

    def is_complete(self, entry: str) -> bool:
        """Return True if the runs of all seeds are finished, and those of the second stage."""
        second_stage = self.plan.entries[entry].second_stage
        if second_stage is not None and not self.is_complete(second_stage):
            return False
        return len(self.get_final_runs(entry)) == len(self.plan.seeds)


def average_runs(runs: list[Record], split: str) -> Mean:
    """Return the mean score of runs over seeds."""
    scores = [run["scores"][split] for run in runs]
    return Mean(fmean(scores), stdev(scores) if len(scores) > 1 else 0.0)


def average_queries(runs: list[Record], split: str) -> list[float]:
    """Return the score of each query, averaged over seeds."""
    by_query = zip(*(run["query_scores"][split] for run in runs), strict=True)
    return [fmean(scores) for scores in by_query]
