"""The runs of a comparison: their jobs, the training of a job's run, and its result.

A job is the JSON description of a run that one process does.

`python -m comparison.run FOLDER/job.json` trains and scores one run in a process of its own. It
writes FOLDER/result.json in one step at the end, so that a file that exists is complete. Results
are neither averaged nor compared here.
"""

from __future__ import annotations

import os
import platform
import statistics
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from comparison.plan import Group
from comparison.processes import Job, exit_with_parent, run_jobs
from contaccum import __version__, work
from contaccum.data.near_duplicates import group_queries
from contaccum.errors import ConfigError
from contaccum.evaluation.beir import describe_data, evaluate_beir
from contaccum.evaluation.beir import load_data as load_beir_data
from contaccum.experiments.run import TRAINING_FOLDER
from contaccum.files import fingerprint, hash_path, provenance, read_json
from contaccum.retrieval.encode import model_fingerprint
from contaccum.retrieval.store import EmbeddingStore
from contaccum.settings import DataSettings, Settings, find, replace, select, to_dict
from contaccum.training.arguments import ContAccumTrainingArguments, get_name
from contaccum.training.log import TRAIN_LOG, read_log
from contaccum.training.setup import load_data, load_encoder, load_run_data
from contaccum.training.trainer import make_trainer

Sets = Sequence[Mapping[str, Any]]
"""The data sets that models are scored on, as `describe_sets` returns them."""

Results = Mapping[str, Mapping[str, Any]]
"""{name of the run: content of its result.json}"""

TIMED_UPDATES = 5
"""The updates from which the time of an update is taken."""

_K_VALUES = (10, 20, 100)


def describe_sets(sources: Sequence[str], split: str) -> list[dict[str, Any]]:
    """Return name, path, split, sizes and fingerprint of each data set that models are scored on.

    ``query_groups`` is {query id: its group}: queries about the same passage are in one group.

    Args:
        sources: BEIR folders or names.
    """
    sets = []
    for source in sources:
        data = load_beir_data(source, split)
        sets.append({**describe_data(data), "query_groups": group_queries(data)})
    if len({data["name"] for data in sets}) < len(sets):
        raise ConfigError("give data sets with different names")
    return sets


def run_groups(
    groups: Sequence[Group],
    seeds: Sequence[int],
    sets: Sets,
    folder: Path,
    max_processes: int | None,
) -> tuple[Results, dict[str, str]]:
    """Do the runs that are not finished yet.

    Args:
        folder: the parent folder of the folders of the runs.
        max_processes: see `run_jobs`.

    Returns:
        {name of the run: its result}, and {name of the run: why it failed}.

    Raises:
        ConfigError: for a finished run that had other settings or data.
    """
    jobs = make_jobs(groups, seeds, sets, folder)
    finished = read_results(jobs)
    print(f"{len(finished)} of {len(jobs)} runs are finished already", flush=True)
    missing = [job for job in jobs if job["name"] not in finished]
    failed = run_jobs(missing, max_processes, lambda line: print(line, flush=True))
    return read_results(jobs), failed


def fit_into_seconds(
    groups: Sequence[Group], seconds: float, seed: int, folder: Path
) -> tuple[list[Group], dict[str, str]]:
    """Give each group as many updates as fit into a time, by the median of its first updates.

    These are timed one group after the other, in short runs that are not scored.

    Returns:
        The groups, and {name of the run: why it failed}; a group whose run failed is left out.
    """
    short = [group.change(max_steps=TIMED_UPDATES) for group in groups]
    results, failed = run_groups(short, [seed], [], folder, 1)
    fitted = []
    for group in groups:
        if group.run_name(seed) in results:
            update_seconds = results[group.run_name(seed)]["seconds_per_update"]
            fitted.append(group.change(max_steps=max(1, int(seconds / update_seconds))))
    return fitted, {f"time/{name}": reason for name, reason in failed.items()}


def make_jobs(groups: Sequence[Group], seeds: Sequence[int], sets: Sets, folder: Path) -> list[Job]:
    """Return a job for every run, seed by seed.

    A job's ``identity`` holds everything that decides the result of the run. A finished run is used
    again only if its identity is the same.
    """
    scored_on = {f"eval_data {data['name']}": data["fingerprint"] for data in sets}
    # {settings that decide which data are read: fingerprint}: each data set is read once.
    train_fingerprints: dict[str, str] = {}
    jobs = []
    for seed in seeds:
        for group in groups:
            run_folder = folder / group.run_name(seed)
            output_dir = str(run_folder / TRAINING_FOLDER)
            settings = replace(group.settings, seed=seed, output_dir=output_dir)
            data_key = str(select(settings, DataSettings))
            if data_key not in train_fingerprints:
                train_fingerprints[data_key] = load_data(settings).fingerprint
            jobs.append(
                {
                    "name": group.run_name(seed),
                    "entry": group.entry,
                    "seed": seed,
                    "folder": str(run_folder),
                    "settings": to_dict(settings),
                    "sets": [(data["path"], data["split"]) for data in sets],
                    "identity": {
                        "work": "a run of a comparison",
                        **describe_settings(settings),
                        "train_data": train_fingerprints[data_key],
                        **scored_on,
                    },
                }
            )
    return jobs


def describe_settings(settings: Settings) -> dict[str, Any]:
    """Return {name: value} of the settings that decide the result of a run, and the version.

    A file or folder is described by its content, so that it may be moved.
    """
    ignored = find("on_change", "ignore")
    paths = find("is_path")
    identity: dict[str, Any] = {"version": __version__}
    for name, value in to_dict(settings).items():
        if name in ignored:
            continue
        if name == "passage_store":  # its embeddings are large, and have a hash already
            value = EmbeddingStore.open(value).fingerprint
        elif name in paths:
            items = value if isinstance(value, list) else [value]
            value = [hash_path(item) for item in items]
        identity[name] = value
    return identity


def read_results(jobs: Sequence[Job]) -> dict[str, dict[str, Any]]:
    """Return {name of the run: content of its result.json} of the finished runs.

    Raises:
        ConfigError: for a finished run whose identity differs from that of its job.
    """
    results = {}
    for job in jobs:
        folder = Path(job["folder"])
        result = work.read_result(folder)
        if result is not None:
            work.require_same_work(folder, job["identity"])
            results[job["name"]] = result
    return results


def run_job(job: Job) -> dict[str, Any]:
    """Train and score the run of a job, and return the content of its result.json."""
    code_record = provenance()  # read before training, because the checkout may change meanwhile
    settings = replace(Settings(), **job["settings"])
    args = ContAccumTrainingArguments.from_settings(settings)
    data, evaluator = load_run_data(settings, args)
    encoder = load_encoder(settings, args)
    initial_weights = model_fingerprint(encoder)
    trainer = make_trainer(encoder, args, data, evaluator=evaluator)
    trainer.train()

    log = read_log(Path(str(args.output_dir), TRAIN_LOG))
    seconds = [record["seconds"] for record in log]
    norm_ratios = [
        record["grad_norm_ratio"] for record in log if record.get("grad_norm_ratio") is not None
    ]
    # Scored in float32, without the mixed precision of training.
    model = trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False)
    evaluations = {}
    for path, split in job["sets"]:
        result = evaluate_beir(
            model,
            load_beir_data(path, split),
            _K_VALUES,
            show_progress=False,
            similarity=args.similarity,
        )
        name = result.data["name"]
        evaluations[name] = {"metrics": result.metrics, "per_query": result.per_query}
    is_cuda = args.device.type == "cuda"
    return {
        "name": job["name"],
        "entry": job["entry"],
        "seed": job["seed"],
        "identity": job["identity"],
        "initial_weights": initial_weights,
        "data_order": fingerprint_data_order(args, data),
        "pairs_per_update": args.total_train_batch_size,
        "updates": trainer.state.global_step,
        "pairs_trained": sum(record["pairs"] for record in log),
        "train_seconds": sum(seconds),
        "seconds_per_update": statistics.median(seconds),
        "peak_memory_mb": max(record["peak_memory_mb"] for record in log),
        "grad_norm_ratio": statistics.fmean(norm_ratios) if norm_ratios else None,
        "final_loss": log[-1]["loss"],
        "evaluations": evaluations,
        "machine": {
            "cores": os.cpu_count(),
            "cpu": platform.machine(),
            "threads": torch.get_num_threads(),
            "gpu": torch.cuda.get_device_name(args.device) if is_cuda else None,
        },
        **code_record,
    }


def fingerprint_data_order(args: ContAccumTrainingArguments, training_data: Any) -> str:
    """Return a fingerprint that is equal for runs whose updates have the same pairs.

    The seed decides the order of the pairs. The micro-batch size also decides which pairs an update
    has if a sampler composes batches, an incomplete batch is dropped, or there are several data
    sets.
    """
    # "batch_sampler" is the default sampler, which takes the pairs in shuffled order.
    is_composed = get_name(args.batch_sampler) != "batch_sampler"
    has_several_sets = isinstance(training_data.dataset, dict)
    batch_size = None
    if is_composed or args.dataloader_drop_last or has_several_sets:
        batch_size = args.per_device_train_batch_size
    return fingerprint(training_data.fingerprint, args.order_seed, batch_size)


def do_job(job_file: str) -> None:
    """Do the run of a job file, and write its result."""
    job = read_json(job_file)
    work.once(Path(job["folder"]), job["identity"], lambda: run_job(job))


if __name__ == "__main__":
    threading.Thread(target=exit_with_parent, daemon=True).start()
    do_job(sys.argv[1])
