"""The runs of the study by time on one data set: timing, learning rates, and final runs.

Every finished cell is a JSON file, and a cell with a file is not run again.
"""

from __future__ import annotations

import random
import shutil
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from comparison.processes import JOB_FILE, run_jobs
from comparison.tuning import next_texts
from sentence_transformers import SentenceTransformer

from contaccum import DualEncoder
from contaccum.data import load_beir_folder
from contaccum.data.near_duplicates import group_queries
from contaccum.errors import ConfigError
from contaccum.files import atomic_folder, fingerprint, provenance, read_json, write_json
from contaccum.retrieval.encode import model_fingerprint
from contaccum.retrieval.store import EmbeddingStore
from time_study.mining import MINING_RULES, mine_negatives
from time_study.plan import Entry, Plan, Settings
from time_study.results import Results
from time_study.scoring import SPLITS, Scorer, average, drop_query_ids
from time_study.stores import find_known_queries, make_stores

REFERENCE = "contaccum"
"""The entry whose training time is the budget of every entry with ``budget: time``."""

# The first update is slower and is not counted. After three updates of 128 pairs, a bank of 1,024
# pairs is three eighths full; with a full one, an update takes less than 1 % longer
# (benchmarks/loss.json).
TIMED_UPDATES = 3
TIMING_TURNS = 3  # timings of each entry, in turns

CURVE_SEED_INDEX = 1
"""Index of the seed whose runs are also scored during training.

It is the second seed, because its runs all have the chosen learning rate. The first seed has runs
at all learning rates.
"""


class Cell(NamedTuple):
    """A run: an entry with a learning rate and a seed."""

    entry: str
    rate: str
    seed: int

    @property
    def name(self) -> str:
        """Name of the result file, without its suffix."""
        return f"{self.entry}-{self.rate}-{self.seed}"


class Study:
    """The study on one data set.

    Args:
        plan: the plan.
        data: name of the data set.
        folder: parent folder of the BEIR folder, which has the splits train, dev and test.
        model: the model to fine-tune, a folder or hub name.
        output: parent folder of the results; the data set has a folder of its own in it.
        jobs: number of runs at the same time.
        names: names of the entries to run; None: all entries of the data set.
    """

    def __init__(
        self,
        plan: Plan,
        data: str,
        folder: Path,
        model: str,
        output: Path,
        jobs: int,
        names: Sequence[str] | None = None,
    ) -> None:
        self.plan = plan
        self.data = data
        self.entries = plan.get_entries(data, names)
        data_plan = plan.data[data]
        self.beir_folder = folder / (data_plan.folder or data)
        self.bf16 = data_plan.bf16
        self.work = folder / "by_time" / data
        self.output = output / data
        self.results = Results(plan, self.output)
        self.jobs = jobs
        train = load_beir_folder(self.beir_folder, "train")
        eval_sets = {split: load_beir_folder(self.beir_folder, split) for split in SPLITS}
        self.fingerprints = {"train": train.fingerprint}
        for split, eval_set in eval_sets.items():
            self.fingerprints[split] = eval_set.fingerprint
        self.has_known_document = {}
        self.query_groups = {}
        for split, eval_set in eval_sets.items():
            self.has_known_document[split] = find_known_queries(eval_set, train)
            groups = group_queries(eval_set)
            self.query_groups[split] = [groups[query] for query in eval_set.qrels]
        self.model = self._save_base_model(model)
        self.stores = make_stores(
            self.model, self.beir_folder, self.work / "stores", train, eval_sets
        )

    def _save_base_model(self, model: str) -> Path:
        """Save the model with the length of the data set, so that all programs use this length.

        Raises:
            ConfigError: the finished runs started from another model.
        """
        base = SentenceTransformer(model, device="cpu")
        self.model_fingerprint = model_fingerprint(base)
        finished = self.results.get_base()
        if finished is not None and finished["model_fingerprint"] != self.model_fingerprint:
            raise ConfigError(
                f"--model {model}: the runs in {self.output} started from another model; give "
                "another --output"
            )
        base.max_seq_length = self.plan.data[self.data].max_length
        path = self.work / f"base-{base.max_seq_length}-{self.model_fingerprint[:12]}"
        if not path.exists():
            with atomic_folder(path) as folder:
                base.save_pretrained(str(folder))
        return path

    def run(self) -> None:
        """Do all runs that have no result yet."""
        self.score_base()
        self.measure_seconds()
        self.run_learning_rates()
        self.run_seeds()

    def score_base(self) -> None:
        """Score the model before training, and BM25."""
        file = self.output / "base.json"
        if file.exists():
            return
        scorer = Scorer(self.beir_folder, bf16=self.bf16)
        base = scorer.score(DualEncoder.from_pretrained(str(self.model), device="cpu"))
        bm25 = scorer.score_bm25()
        record = {
            "scores": average(base),
            "bm25": average(bm25),
            "query_scores": drop_query_ids(base),
            "query_groups": self.query_groups,
            "has_known_document": self.has_known_document,
            "data_fingerprints": self.fingerprints,
            "model_fingerprint": self.model_fingerprint,
            **provenance(),
        }
        write_json(file, record)
        print(f"{self.data}: base {average(base)}, BM25 {average(bm25)}", flush=True)

    def measure_seconds(self) -> None:
        """Measure the CPU seconds and encoded texts of an update of each entry.

        The entries take turns in a shuffled order, one at a time. Entries that are measured later
        take turns with contaccum. Their seconds are scaled by the ratio of contaccum's earlier
        seconds to its present ones, so that a change of the machine's speed between the two
        measurements cancels out.
        """
        measured = self.results.get_timings()
        missing = [name for name in self._list_timed_entries() if name not in measured]
        if not missing:
            return
        turns = self._run_timing(list(dict.fromkeys([REFERENCE, *missing])))
        scale = 1.0
        if REFERENCE in measured:
            scale = measured[REFERENCE]["seconds_per_update"] / _median_seconds(turns[REFERENCE])
        for name in missing:
            measured[name] = {
                "seconds_per_update": round(scale * _median_seconds(turns[name]), 3),
                "passes_per_update": round(_mean_texts(turns[name]), 1),
                "seconds_of_updates": [turn["seconds"] for turn in turns[name]],
                "scale": scale,
                **provenance(),
            }
        write_json(self.output / "seconds.json", {"entries": measured})
        # Only an interrupted timing uses its finished turns again. The next one measures anew,
        # because the speed of the machine may have changed.
        for folder in self.work.glob("timing-*"):
            shutil.rmtree(folder)

    def _list_timed_entries(self) -> list[str]:
        """Return the names of the entries whose seconds are needed, each once."""
        names = [REFERENCE]
        for name, entry in self.entries.items():
            names.append(entry.timed_as or name)
            if entry.second_stage is not None:
                names.append(entry.second_stage)
        return list(dict.fromkeys(names))

    def _run_timing(self, names: Sequence[str]) -> dict[str, list[dict[str, list[float]]]]:
        """Return {entry: the result of `time_study.cell.time_updates` in each turn}.

        Turns that were finished before an interruption are not repeated.
        """
        order = random.Random(0)
        jobs = []
        for turn in range(TIMING_TURNS):
            for name in order.sample(names, len(names)):
                jobs.append(self._make_timing_job(name, turn))
        self._run_jobs([job for job in jobs if not _is_finished(job)], processes=1)
        turns: dict[str, list[dict[str, list[float]]]] = {name: [] for name in names}
        for job in jobs:
            turns[job["entry"]].append(read_json(job["result"]))
        return turns

    def run_learning_rates(self) -> None:
        """Train each entry with the first seed at every learning rate that has to be tried."""
        seed = self.plan.seeds[0]
        names = [name for name, entry in self.entries.items() if entry.rate_of is None]
        for name, entry in self.entries.items():
            self._check_ladder(name, entry.rate_of or name)
            if entry.second_stage is not None:
                self._check_ladder(name, entry.second_stage)
        while True:
            cells = []
            for name in names:
                for rate in self._next_rates(name):
                    cells.append(Cell(name, rate, seed))
            if not cells:
                return
            self._run_cells(cells)

    def _check_ladder(self, name: str, ladder: str) -> None:
        """Check the finished runs of an entry whose learning rate is needed.

        Args:
            name: the entry that needs the rate.
            ladder: the entry whose runs choose the rate.

        Raises:
            ConfigError: a finished run is not of this plan, or the rate is not chosen yet and its
                runs are not among those of this start.
        """
        seed = self.plan.seeds[0]
        self._check_finished([Cell(ladder, rate, seed) for rate in self.results.get_ladder(ladder)])
        if ladder not in self.entries and self._next_rates(ladder):
            raise ConfigError(
                f"{self.data}: {name} has the learning rate of {ladder}, which is not chosen "
                "yet; add it to --entries"
            )

    def run_seeds(self) -> None:
        """Train each entry with every seed at its chosen rate."""
        cells = []
        for seed in self.plan.seeds:
            for name in self.entries:
                cells.append(Cell(name, self._choose_rate(name), seed))
        self._run_cells(cells)

    def _choose_rate(self, name: str) -> str:
        rate = self.results.choose_rate(name)
        if rate is None:
            raise ConfigError(f"{self.data}: {name} has no score at any learning rate")
        return rate

    def _next_rates(self, name: str) -> list[str]:
        scores = self.results.get_dev_scores(name)
        plan = self.plan
        return next_texts(plan.learning_rates, plan.rate_factor, plan.max_rates, scores)

    def count_updates(self, name: str) -> int:
        """Return the number of updates of an entry's runs, in their first stage."""
        planned_updates = self.plan.data[self.data].updates
        entry = self.plan.entries[name]
        if entry.budget == "updates":
            return planned_updates
        seconds = planned_updates * self.results.get_timing(REFERENCE)["seconds_per_update"]
        if entry.second_stage is not None:
            second_updates = self.count_updates(entry.second_stage)
            timing = self.results.get_timing(entry.second_stage)
            seconds -= second_updates * timing["seconds_per_update"]
        updates = seconds / self.results.get_timing(name)["seconds_per_update"]
        count = int(round(updates, 6))  # a rounding error must not cost an update
        if count < 1:
            raise ConfigError(f"{self.data}: {name}: the time is too short for one update")
        return count

    def _run_cells(self, cells: Sequence[Cell]) -> None:
        """Do the runs that have no result yet."""
        self._check_finished(cells)
        jobs = []
        for cell in cells:
            if not self._get_result_file(cell).exists():
                jobs.append(self._make_job(cell))
        self._run_jobs(jobs, self.jobs)

    def _check_finished(self, cells: Iterable[Cell]) -> None:
        """Check that the finished runs among some runs had the settings and data of this plan.

        Raises:
            ConfigError: for a run that had others.
        """
        for cell in cells:
            file = self._get_result_file(cell)
            if file.exists() and read_json(file)["identity"] != self._make_identity(cell):
                raise ConfigError(
                    f"{file}: this run had other settings or data than the plan has now; remove "
                    "the file to run it again"
                )

    def _get_result_file(self, cell: Cell) -> Path:
        return self.output / f"{cell.name}.json"

    def _run_jobs(self, jobs: list[dict[str, Any]], processes: int) -> None:
        command = (sys.executable, "-m", "time_study.cell")
        failed = run_jobs(jobs, processes, _print_line, command)
        if failed:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in failed.items())
            raise ConfigError(f"{self.data}: {reasons}")

    def _make_job(self, cell: Cell) -> dict[str, Any]:
        """Return the job of a cell, as `time_study.cell` reads it."""
        entry = self.plan.entries[cell.entry]
        settings = self._make_settings(cell.entry, cell.rate, cell.seed)
        second_stage = self._make_second_settings(cell)
        if second_stage:
            second_stage["train_data"] = str(self.beir_folder)
        return {
            "kind": "cell",
            "name": f"{self.data} {cell.name}",
            "folder": str(self.work / cell.name),
            "result": str(self._get_result_file(cell)),
            "data": self.data,
            "entry": cell.entry,
            "rate": cell.rate,
            "seed": cell.seed,
            "updates": settings["max_steps"],
            "second_stage": second_stage or None,
            "has_curve": self._has_curve(cell),
            "trainer": entry.trainer,
            "data_folder": str(self.beir_folder),
            "haystack": self._get_haystack(entry),
            "settings": self._add_paths(settings, entry, self.work / cell.name),
            "identity": self._make_identity(cell),
            "mined_negatives": self._fingerprint_negatives(entry),
        }

    def _make_identity(self, cell: Cell) -> dict[str, Any]:
        """Return what a finished run must have in common with a cell; nothing is mined for it."""
        entry = self.plan.entries[cell.entry]
        identity = {
            **self._make_settings(cell.entry, cell.rate, cell.seed),
            "trainer": entry.trainer,
            "max_length": self.plan.data[self.data].max_length,
            "data_fingerprints": self.fingerprints,
            **self._describe_extras(entry),
        }
        for key, value in self._make_second_settings(cell).items():
            identity[f"second_stage_{key}"] = value
        return identity

    def _has_curve(self, cell: Cell) -> bool:
        """Whether the run is scored during training: one seed of each entry of a picture."""
        is_in_picture = self.plan.data[self.data].folder is None
        return is_in_picture and cell.seed == self.plan.seeds[CURVE_SEED_INDEX]

    def _make_settings(self, name: str, rate: str, seed: int) -> Settings:
        """Return the settings of an entry's run, without paths."""
        settings = self.plan.make_settings(self.data, self.plan.entries[name])
        settings["learning_rate"] = rate
        settings["seed"] = seed
        settings["max_steps"] = self.count_updates(name)
        return settings

    def _make_second_settings(self, cell: Cell) -> Settings:
        """Return the settings of the second stage, without paths; empty if there is none."""
        second_stage = self.plan.entries[cell.entry].second_stage
        if second_stage is None:
            return {}
        return self._make_settings(second_stage, self._choose_rate(second_stage), cell.seed)

    def _describe_extras(self, entry: Entry) -> dict[str, str]:
        """Return what identifies store, mining and guide of an entry, if it has them."""
        extras = {}
        if entry.store is not None:
            extras["store"] = EmbeddingStore.open(self.stores[entry.store]).fingerprint
        if entry.has_mined_negatives:
            extras["mining"] = " ".join(MINING_RULES)
        if entry.has_guide:
            extras["guide"] = self.model_fingerprint
        return extras

    def _fingerprint_negatives(self, entry: Entry) -> str | None:
        """Return the fingerprint of an entry's mined file, for the record; None if it has none.

        It does not identify a run: the file has scores, whose last digits differ between machines.
        """
        if not entry.has_mined_negatives:
            return None
        return fingerprint(self._mine_negatives().read_text(encoding="utf-8"))

    def _make_timing_job(self, name: str, turn: int) -> dict[str, Any]:
        entry = self.plan.entries[name]
        folder = self.work / f"timing-{name}-{turn}"
        settings = self.plan.make_settings(self.data, entry, is_timed=True)
        settings["learning_rate"] = self.plan.learning_rates[0]
        settings["max_steps"] = TIMED_UPDATES
        return {
            "kind": "timing",
            "name": f"{self.data} timing of {name}, turn {turn + 1} of {TIMING_TURNS}",
            "folder": str(folder),
            "result": str(folder / "result.json"),
            "entry": name,
            "trainer": entry.trainer,
            "settings": self._add_paths(settings, entry, folder),
        }

    def _get_haystack(self, entry: Entry) -> str | None:
        """Return the store of all documents if the entry does not train the document encoder."""
        return None if entry.store is None else str(self.stores["haystack"])

    def _add_paths(self, settings: Settings, entry: Entry, folder: Path) -> Settings:
        """Return settings with model, data, store and output folder."""
        paths: Settings = {
            "model": str(self.model),
            "train_data": str(self.beir_folder),
            "output_dir": str(folder / "model"),
        }
        if entry.has_mined_negatives:
            paths["train_data"] = str(self._mine_negatives())
        if entry.has_guide:
            paths["guide"] = str(self.model)
        if entry.store is not None:
            paths["passage_store"] = str(self.stores[entry.store])
        return {**settings, **paths}

    def _mine_negatives(self) -> Path:
        """Return the file of mined negatives, which is made if it is missing."""
        return mine_negatives(
            self.model, self.beir_folder, self.stores["without_held_out"], self.work, self.bf16
        )


def _is_finished(job: dict[str, Any]) -> bool:
    """Whether a turn of the timing has a result, with the same settings."""
    if not Path(job["result"]).exists():
        return False
    finished_job = read_json(Path(job["folder"], JOB_FILE))
    return bool(finished_job["settings"] == job["settings"])


def _median_seconds(turns: Sequence[dict[str, list[float]]]) -> float:
    """Return the median over turns of the mean seconds of an update."""
    return statistics.median(statistics.fmean(turn["seconds"]) for turn in turns)


def _mean_texts(turns: Sequence[dict[str, list[float]]]) -> float:
    """Return the mean number of encoded texts of an update."""
    return statistics.fmean(value for turn in turns for value in turn["passes"])


def _print_line(line: str) -> None:
    print(line, flush=True)
