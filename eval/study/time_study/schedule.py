"""The runs of the study by time on one data set: timing, learning rates, and final runs.

Every finished cell is a JSON file, and a cell with a file is not run again.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sentence_transformers import SentenceTransformer
from stores import make_stores

from contaccum import DualEncoder
from contaccum.comparison.processes import run_jobs
from contaccum.data import load_beir_folder
from contaccum.errors import ConfigError
from contaccum.files import provenance, read_json, write_json
from contaccum.retrieval.store import EmbeddingStore
from contaccum.tuning.ladder import next_values
from time_study.plan import Entry, Plan, Settings
from time_study.results import Results
from time_study.scoring import SPLITS, Scorer, average

TIMED_UPDATES = 4  # of which the first is a warm-up and does not count
TIMING_ROUNDS = 2
CURVE_SEED_INDEX = 1  # the first seed's runs are trained before the rate is chosen

MINING_RULES = ("--num_negatives", "1", "--relative_margin", "0.05")


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
        self.entries = plan.get_entries(data)
        if names is not None:
            self.entries = {name: self.entries[name] for name in names if name in self.entries}
        self.beir_folder = folder / data
        self.work = folder / "by_time" / data
        self.output = output / data
        self.results = Results(plan, self.output)
        self.jobs = jobs
        train = load_beir_folder(self.beir_folder, "train")
        eval_sets = {split: load_beir_folder(self.beir_folder, split) for split in SPLITS}
        self.fingerprints = {"train": train.fingerprint}
        for split, eval_set in eval_sets.items():
            self.fingerprints[split] = eval_set.fingerprint
        self.model = self._save_base_model(model)
        self.stores = make_stores(
            self.model, self.beir_folder, self.work / "stores", train, eval_sets
        )

    def _save_base_model(self, model: str) -> Path:
        """Save the model with the length of the data set, so that all programs use this length."""
        path = self.work / "base"
        if not path.exists():
            base = SentenceTransformer(model, device="cpu")
            base.max_seq_length = self.plan.data[self.data].max_length
            base.save_pretrained(str(path))
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
        scorer = Scorer(self.beir_folder)
        base = scorer.score(DualEncoder.from_pretrained(str(self.model), device="cpu"))
        bm25 = scorer.score_bm25()
        record = {
            "scores": average(base),
            "bm25": average(bm25),
            "query_scores": {split: list(scores.values()) for split, scores in base.items()},
            "data_fingerprints": self.fingerprints,
            **provenance(),
        }
        write_json(file, record)
        print(f"{self.data}: base {average(base)}, BM25 {average(bm25)}", flush=True)

    def measure_seconds(self) -> None:
        """Measure the CPU seconds and encoder passes of an update of each entry.

        The entries take turns in a shuffled order, one at a time.
        """
        file = self.output / "seconds.json"
        record = read_json(file) if file.exists() else {"entries": {}}
        missing = [name for name in self.entries if name not in record["entries"]]
        if not missing:
            return
        order = random.Random(0)
        jobs = []
        for turn in range(TIMING_ROUNDS):
            for name in order.sample(missing, len(missing)):
                jobs.append(self._make_timing_job(name, turn))
        self._run_jobs(jobs, processes=1)
        for name in missing:
            turns = [read_json(job["result"]) for job in jobs if job["entry"] == name]
            seconds = [value for turn in turns for value in turn["seconds"]]
            passes = [value for turn in turns for value in turn["passes"]]
            record["entries"][name] = {
                "seconds_per_update": round(statistics.median(seconds), 3),
                "passes_per_update": round(statistics.fmean(passes), 1),
                "all_seconds": [round(value, 3) for value in seconds],
                **provenance(),
            }
        write_json(file, record)

    def run_learning_rates(self) -> None:
        """Train each entry with the first seed at every learning rate of its ladder."""
        while True:
            cells = []
            for name, entry in self.entries.items():
                if entry.rate_of is None:
                    for rate in self._next_rates(name):
                        cells.append(Cell(name, rate, self.plan.seeds[0]))
            if not cells:
                return
            self._run_cells(cells)

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
        return next_values(plan.learning_rates, plan.rate_factor, plan.max_rates, scores)

    def count_updates(self, name: str) -> int:
        """Return the number of updates of an entry's runs."""
        updates = self.plan.data[self.data].updates
        if self.entries[name].budget == "updates":
            return updates
        seconds = self.results.get_seconds()
        budget = updates * seconds["contaccum"]["seconds_per_update"]
        return round(budget / seconds[name]["seconds_per_update"])

    def _run_cells(self, cells: Iterable[Cell]) -> None:
        """Do the runs that have no result yet."""
        jobs = []
        for cell in cells:
            job = self._make_job(cell)
            file = Path(job["result"])
            if not file.exists():
                jobs.append(job)
            elif read_json(file)["identity"] != job["identity"]:
                raise ConfigError(
                    f"{file}: this run had other settings or data than the plan has now; remove "
                    "the file to run it again"
                )
        self._run_jobs(jobs, self.jobs)

    def _run_jobs(self, jobs: list[dict[str, Any]], processes: int) -> None:
        command = (sys.executable, "-m", "time_study.cell")
        failed = run_jobs(jobs, processes, _print_line, command)
        if failed:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in failed.items())
            raise ConfigError(f"{self.data}: {reasons}")

    def _make_job(self, cell: Cell) -> dict[str, Any]:
        """Return the job of a cell, as `time_study.cell` reads it."""
        entry = self.entries[cell.entry]
        updates = self.count_updates(cell.entry)
        settings = self.plan.make_settings(self.data, entry)
        settings["learning_rate"] = cell.rate
        settings["seed"] = cell.seed
        settings["max_steps"] = updates
        return {
            "kind": "cell",
            "name": f"{self.data} {cell.name}",
            "folder": str(self.work / cell.name),
            "result": str(self.output / f"{cell.name}.json"),
            "data": self.data,
            "entry": cell.entry,
            "rate": cell.rate,
            "seed": cell.seed,
            "updates": updates,
            "has_curve": cell.seed == self.plan.seeds[CURVE_SEED_INDEX],
            "trainer": entry.trainer,
            "data_folder": str(self.beir_folder),
            "haystack": self._get_haystack(entry),
            "settings": self._add_paths(settings, entry, self.work / cell.name),
            "identity": {
                **settings,
                "trainer": entry.trainer,
                "max_length": self.plan.data[self.data].max_length,
                "data_fingerprints": self.fingerprints,
            },
        }

    def _make_timing_job(self, name: str, turn: int) -> dict[str, Any]:
        entry = self.entries[name]
        folder = self.work / f"timing-{name}-{turn}"
        settings = self.plan.make_settings(self.data, entry, is_timed=True)
        settings["learning_rate"] = self.plan.learning_rates[0]
        settings["max_steps"] = TIMED_UPDATES
        return {
            "kind": "timing",
            "name": f"{self.data} timing of {name}, turn {turn + 1} of {TIMING_ROUNDS}",
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
        if entry.has_mined_negatives:
            paths["train_data"] = str(self._mine_negatives())
        if entry.has_guide:
            paths["guide"] = str(self.model)
        if entry.store is not None:
            paths["passage_store"] = str(self.stores[entry.store])
        return {**settings, **paths}

    def _mine_negatives(self) -> Path:
        """Mine a hard negative for each training pair with the base model; return the file.

        Documents that are relevant to held-out queries only are not mined.
        """
        file = self.work / "mined.jsonl"
        if file.exists():
            return file
        dataset = load_beir_folder(self.beir_folder, "train")
        corpus = self.work / "mining_corpus.jsonl"
        store = EmbeddingStore.open(self.stores["corpus"])
        with open(corpus, "w", encoding="utf-8") as lines:
            for document_id in store.ids(range(len(store))):
                record = {"_id": document_id, **dataset.corpus[document_id]}
                lines.write(json.dumps(record) + "\n")
        command = [sys.executable, "-m", "contaccum.cli", "mine", str(self.model)]
        command += ["--data", str(self.beir_folder), "--split", "train", "--corpus", str(corpus)]
        command += ["--output", str(file), "--precision", "bfloat16", "--no_progress"]
        subprocess.run([*command, *MINING_RULES], check=True)
        return file


def _print_line(line: str) -> None:
    print(line, flush=True)
