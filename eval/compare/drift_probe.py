"""Compare the drift probe (`auto`) with a mean shift from the batches alone (`batches`).

    python eval/compare/drift_probe.py FOLDER

FOLDER has the model `minilm-2` and the data sets. The same command again only does the missing
runs, one after the other, each in a process of its own, and writes FOLDER/runs/NAME/result.json.
The order: both methods at three rates with the first seed, then the other seeds at the rate that
is best on dev.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from comparison.plan import make_groups
from comparison.run import describe_sets, make_jobs, run_job

from contaccum.bank import drift
from contaccum.experiments.run import once
from contaccum.files import read_json, write_json
from contaccum.losses.probe import EncoderProbe
from contaccum.training.log import TRAIN_LOG, read_log

RATES = (3e-4, 6e-4, 1.2e-3)
SEEDS = (0, 1, 2)
PAIRS_PER_UPDATE = 64
COMMON = {
    "tied": "false",
    "pooling": "mean",
    "freeze_word_embeddings": "true",
    "attn_implementation": "eager",
    "similarity": "cos",
    "temperature": "0.05",
    "per_device_train_batch_size": "8",
    "gradient_accumulation_steps": "8",
    "lr_scheduler_type": "linear",
    "weight_decay": "0.01",
    "max_grad_norm": "1.0",
    "dropout": "0.0",
    "bf16": "true",
    "bank_size": "512",
    "save_strategy": "no",
}
# Data set: its settings, and the folders and splits it is scored on.
DATA = {
    "nqg": (
        {
            "train_data": "nqg/train.jsonl",
            "query_max_length": "24",
            "passage_max_length": "48",
            "max_steps": "80",
            "warmup_steps": "8",
        },
        [("nqg/dev", "test"), ("nqg/test", "test")],
    ),
    "medquad": (
        {
            "train_data": "medquad-parts/train.jsonl",
            "query_max_length": "24",
            "passage_max_length": "128",
            "max_steps": "60",
            "warmup_steps": "6",
        },
        [("medquad", "both")],
    ),
    "scifact": (
        {
            "train_data": "scifact",
            "query_max_length": "32",
            "passage_max_length": "128",
            "max_steps": "48",
            "warmup_steps": "5",
        },
        [("scifact", "both")],
    ),
}


def make_job(data: str, method: str, rate: float, seed: int, max_updates: int) -> dict:
    """Return the job of a run, in the form of `comparison.run`."""
    settings, sets = DATA[data]
    from contaccum.settings import read

    options = COMMON | settings | {"model": "minilm-2", "learning_rate": f"{rate:g}"}
    words = [word for key, value in options.items() for word in (f"--{key}", value)]
    [group] = make_groups(read(words), [], [[method, f"drift_compensation={method}"]])
    group = group._replace(name=f"{data}_{method}_{rate:g}")
    descriptions = [describe_sets([path], split)[0] for path, split in sets]
    [job] = make_jobs([group], [seed], descriptions, Path("runs"))
    job["data"] = data
    job["rate"] = rate
    if method == "batches":
        job["max_updates"] = max_updates
        job["identity"]["max_updates"] = max_updates
    job["descriptions"] = [
        {k: v for k, v in x.items() if k != "query_groups"} for x in descriptions
    ]
    return job


def read_queries(path: str, split: str) -> set[str]:
    lines = Path(path, "qrels", f"{split}.tsv").read_text(encoding="utf-8").splitlines()[1:]
    return {line.split("\t")[0] for line in lines}


def do_job(job: dict) -> None:
    """Do a run; measure what the probe costs."""
    torch.set_num_threads(1)
    drift.MAX_UPDATES = job.get("max_updates", drift.MAX_UPDATES)
    cost = {"encodings": 0, "seconds": 0.0, "pairs": 0}
    encode = EncoderProbe.encode

    def timed_encode(self, features):
        start = time.process_time()
        result = encode(self, features)
        cost["seconds"] += time.process_time() - start
        cost["encodings"] += 1
        cost["pairs"] += len(result[0])
        return result

    EncoderProbe.encode = timed_encode

    def work():
        start = time.process_time()
        result = run_job(job)
        per_query = {}
        for name, evaluation in result.pop("evaluations").items():
            for query, scores in evaluation["per_query"].items():
                per_query[f"{name}/{query}"] = scores["NDCG@10"]
        data = job["data"]
        if data == "nqg":
            parts = {"dev": [], "test": []}
            for key, score in per_query.items():
                parts[key.split("/")[0]].append(score)
        else:
            parts = {}
            for split in ("dev", "test"):
                queries = read_queries(data, split)
                parts[split] = [
                    s for key, s in per_query.items() if key.split("/", 1)[1] in queries
                ]
        log = read_log(Path(job["folder"], TRAIN_LOG))
        keys = (
            "bank_fill",
            "bank_age",
            "bank_mass_aged",
            "drift_age",
            "drift_shift_passage",
            "drift_shift_query",
            "drift_residual_passage",
            "loss",
        )
        return {
            **result,
            "data": data,
            "rate": job["rate"],
            "max_updates": job.get("max_updates"),
            "sets": job["descriptions"],
            "dev": statistics.fmean(parts["dev"]),
            "test": statistics.fmean(parts["test"]),
            "queries": {name: len(scores) for name, scores in parts.items()},
            "per_query": per_query,
            "probe": cost,
            "cpu_seconds": time.process_time() - start,
            "log": {key: [record.get(key) for record in log] for key in keys},
        }

    once(Path(job["folder"]), job["identity"], work)


def run(data: str, method: str, rate: float, seed: int, max_updates: int) -> dict:
    """Return the result of a run, which is done in a process of its own unless it is done."""
    job = make_job(data, method, rate, seed, max_updates)
    folder = Path(job["folder"])
    result = folder / "result.json"
    if not result.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        path = Path("jobs", f"{job['name']}.json")
        path.parent.mkdir(exist_ok=True)
        write_json(path, job)
        start = time.time()
        with open(f"jobs/{job['name']}.log", "w") as log:
            subprocess.run(
                [sys.executable, __file__, "--job", str(path)], stdout=log, stderr=log, check=True
            )
        content = read_json(result)
        print(
            f"{time.strftime('%H:%M')} {job['name']} dev {content['dev']:.4f} "
            f"test {content['test']:.4f} cpu {content['cpu_seconds']:.0f} "
            f"wall {time.time() - start:.0f}",
            flush=True,
        )
    return read_json(result)


def best_rate(data: str, method: str, max_updates: int) -> float:
    """Return the rate with the best dev score of the first seed."""
    return max(RATES, key=lambda rate: run(data, method, rate, SEEDS[0], max_updates)["dev"])


def choose_max_updates() -> int:
    """Return the age limit in updates: the median that `auto` measured at its best rates.

    With a measured limit of L pairs at the end of an update of N pairs, entries are L / N updates
    old on average over the update's micro-steps; entries of MAX_UPDATES past updates and of the
    current one are MAX_UPDATES + 1/2 updates old on average.
    """
    medians = []
    for data in DATA:
        result = run(data, "auto", best_rate(data, "auto", 0), SEEDS[0], 0)
        medians.append(statistics.median(result["log"]["bank_fill"]) / PAIRS_PER_UPDATE)
    chosen = max(1, round(statistics.median(medians) - 0.5))
    record = {"medians": dict(zip(DATA, medians, strict=True)), "chosen": chosen}
    write_json(Path("max_updates.json"), record)
    return chosen


def main() -> None:
    os.chdir(sys.argv[1])
    for data in DATA:
        for rate in RATES[1:] + RATES[:1]:
            run(data, "auto", rate, SEEDS[0], 0)
    max_updates = choose_max_updates()
    for data in DATA:
        for rate in RATES[1:] + RATES[:1]:
            run(data, "batches", rate, SEEDS[0], max_updates)
    for seed in SEEDS[1:]:
        for data in DATA:
            for method in ("auto", "batches"):
                run(data, method, best_rate(data, method, max_updates), seed, max_updates)
    print("all runs are finished", flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "--job":
        do_job(read_json(Path(sys.argv[2])))
    else:
        main()
