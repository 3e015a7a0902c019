"""The runs of a comparison: the jobs of a plan, the training of a job's run, and its result.

A job is the JSON description of a run that one process does.

`python -m contaccum.comparison.run FOLDER/job.json` trains and scores one run in a process of its
own. It writes FOLDER/result.json in one step at the end, so that a file that exists is complete.
Results are neither averaged nor compared here.
"""

from __future__ import annotations

import os
import platform
import statistics
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from transformers.trainer_utils import IntervalStrategy

from contaccum import __version__
from contaccum.comparison.options import Options, to_command_line
from contaccum.comparison.plan import Group, Plan
from contaccum.comparison.processes import RESULT_FILE, Job, exit_with_parent, run_jobs
from contaccum.comparison.summary import METRICS
from contaccum.data import BeirDataset
from contaccum.errors import ConfigError
from contaccum.evaluation.beir_sets import describe_data, evaluate_beir
from contaccum.evaluation.beir_sets import load_data as load_beir_data
from contaccum.evaluation.evaluator import RetrievalEvaluator, sample
from contaccum.files import fingerprint, provenance, read_json, write_json
from contaccum.retrieval.encode import model_fingerprint
from contaccum.training.arguments import ContAccumTrainingArguments, get_name
from contaccum.training.config import load_data, parse
from contaccum.training.log import EVAL_LOG, TRAIN_LOG, read_log
from contaccum.training.run import load_encoder, load_run_data, make_trainer

Evaluation = Mapping[str, Any]
"""The options of `contaccum compare` that begin with ``eval_``, without the prefix.

They are ``data`` (a list of BEIR folders or names), ``split``, ``updates`` (between two scores
during training), ``queries`` and ``corpus`` (sizes of a sample), ``precision`` and ``batch_size``.
"""

_K_VALUES = (10, 20, 100)  # the cut-offs of METRICS
_PATH_OPTIONS = ("model", "guide", "passage_store", "corpus")
"""Options that may name local files, besides those of data sets, which have fingerprints."""


def describe_evaluation_sets(
    evaluation: Evaluation, option: str = "--eval_data"
) -> list[dict[str, Any]]:
    """Return name, sizes and fingerprint of each data set that models are scored on.

    Args:
        option: the command-line option that the data sets were given with, for error messages.

    Raises:
        UserError: for a data set that cannot be read.
        ConfigError: if there is no data set, or two have the same name.
    """
    sets = [describe_data(_load_set(evaluation, path)) for path in evaluation["data"]]
    names = {data["name"] for data in sets}
    if not sets or len(names) < len(sets):
        raise ConfigError(
            f"{option}: give BEIR folders to score the models on, each with a different name"
        )
    return sets


def _load_set(evaluation: Evaluation, path: str) -> BeirDataset:
    """Load a data set, or a fixed sample of it if ``evaluation`` has sample sizes."""
    dataset = load_beir_data(path, evaluation["split"])
    return sample(dataset, evaluation["queries"], evaluation["corpus"])


def make_jobs(
    plan: Plan, evaluation: Evaluation, sets: Sequence[Mapping[str, Any]], folder: Path
) -> list[Job]:
    """Return a job for every run of the plan, seed by seed.

    A job's ``identity`` holds everything that decides the result of the run. A finished run is used
    again only if its identity is the same.

    Args:
        sets: the descriptions of the data sets, as `describe_evaluation_sets` returns them.
        folder: the parent folder of the folders of the runs.

    Raises:
        DataError: for training data that cannot be used.
    """
    evaluation_identity: dict[str, object] = {}
    for key, value in evaluation.items():
        if key not in ("data", "batch_size"):
            evaluation_identity[f"eval_{key}"] = value
    for data in sets:
        evaluation_identity[f"eval_data {data['name']}"] = data["fingerprint"]

    # {settings that decide which data are read: fingerprint}: each data set is read once.
    train_fingerprints: dict[str, str] = {}
    jobs: list[Job] = []
    for seed in plan.seeds:
        for group in plan.groups.values():
            _, data_args, training_args = group.arguments
            data_key = str(data_args)
            if data_key not in train_fingerprints:
                train_fingerprints[data_key] = load_data(data_args, training_args).fingerprint
            job = _make_job(group, seed, folder)
            job["evaluation"] = dict(evaluation)
            job["identity"] = {
                "contaccum": __version__,
                "train_data": train_fingerprints[data_key],
                **{key: " ".join(values) for key, values in group.options.items()},
                **_describe_local_paths(group.options),
                **evaluation_identity,
            }
            jobs.append(job)
    return jobs


def _describe_local_paths(options: Options) -> dict[str, str]:
    """Return a fingerprint of the files of each model, store and corpus that is a local path.

    The fingerprint covers names, sizes and times of the files, and not their content, because large
    models take long to read.
    """
    descriptions = {}
    for key in _PATH_OPTIONS:
        for value in options.get(key, ()):
            path = Path(value)
            files = sorted(path.rglob("*")) if path.is_dir() else [path]
            content = []
            for file in files:
                if file.is_file():
                    state = file.stat()
                    content.append((str(file), state.st_size, state.st_mtime_ns))
            if content:
                descriptions[f"files of {key}"] = fingerprint(str(content))
    return descriptions


def _make_job(group: Group, seed: int, folder: Path) -> Job:
    """Return the job of a run, without its evaluation and identity."""
    run_folder = folder / group.run_name(seed)
    return {
        "name": run_folder.name,
        "entry": group.entry,
        "method": group.method,
        "seed": seed,
        "labels": dict(group.labels),
        "folder": str(run_folder),
        "options": [
            *to_command_line(group.options),
            f"--seed={seed}",
            f"--output_dir={run_folder}",
        ],
    }


def read_results(jobs: Sequence[Job]) -> dict[str, dict[str, Any]]:
    """Read the results of the finished runs.

    Returns:
        {name of the run: content of its result.json}.

    Raises:
        ConfigError: for a finished run whose identity differs from that of its job.
    """
    results = {}
    for job in jobs:
        path = Path(job["folder"], RESULT_FILE)
        if not path.is_file():
            continue
        result = read_json(path)
        old_identity = result["identity"]
        new_identity = job["identity"]
        changes = []
        for key in {**old_identity, **new_identity}:
            old_value = old_identity.get(key)
            new_value = new_identity.get(key)
            if old_value != new_value:
                changes.append(f"{key} was {old_value}, is {new_value}")
        if changes:
            raise ConfigError(
                f"{job['folder']} was run with other settings: {'; '.join(changes)}. "
                "Remove this folder, or name another --output_dir"
            )
        results[job["name"]] = result
    return results


def run_plan(
    plan: Plan,
    evaluation: Evaluation,
    sets: Sequence[Mapping[str, Any]],
    folder: Path,
    max_processes: int | None,
    progress: Callable[[str], None],
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Do the runs of a plan that are not finished yet.

    Args:
        plan, evaluation, sets, folder: see `make_jobs`.
        max_processes, progress: see `run_jobs`.

    Returns:
        {name of the run: its result}, and {name of the run: why it failed}.

    Raises:
        UserError: as `make_jobs` and `read_results` do.
    """
    jobs = make_jobs(plan, evaluation, sets, folder)
    finished = read_results(jobs)
    progress(f"{len(finished)} of {len(jobs)} runs are finished already; baseline {plan.baseline}")
    missing = [job for job in jobs if job["name"] not in finished]
    failed = run_jobs(missing, max_processes, progress)
    return read_results(jobs), failed


def run_job(job: Job) -> dict[str, Any]:
    """Train and score the run of a job, and return the content of its result.json."""
    # The git commit is read before training, because the checkout may change during it.
    code_record = provenance()
    folder = Path(job["folder"])
    evaluation = job["evaluation"]
    model_args, data_args, args = parse(job["options"])
    data = load_run_data(data_args, args)
    if evaluation["updates"]:
        args.eval_strategy = IntervalStrategy.STEPS
        args.eval_steps = evaluation["updates"]
        args.eval_on_start = True
        data = data._replace(evaluator=_make_evaluator(evaluation, args))
    encoder = load_encoder(model_args, args)
    initial_weights = model_fingerprint(encoder)
    trainer = make_trainer(encoder, model_args, args, data)
    trainer.train()

    log = read_log(folder / TRAIN_LOG)
    seconds = [record["seconds"] for record in log]
    norm_ratios = []
    for record in log:
        if record.get("grad_norm_ratio") is not None:
            norm_ratios.append(record["grad_norm_ratio"])
    # Without the mixed precision of training, so that the option ``eval_precision`` decides.
    model = trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False)
    is_cuda = args.device.type == "cuda"
    return {
        "name": job["name"],
        "entry": job["entry"],
        "method": job["method"],
        "seed": job["seed"],
        "labels": job["labels"],
        "identity": job["identity"],
        "initial_weights": initial_weights,
        "data_order": _fingerprint_data_order(args, data.training),
        "pairs_per_update": args.total_train_batch_size,
        "updates": trainer.state.global_step,
        "pairs_trained": sum(record["pairs"] for record in log),
        "train_seconds": sum(seconds),
        "seconds_per_update": statistics.median(seconds),
        "peak_memory_mb": max(record["peak_memory_mb"] for record in log),
        "grad_norm_ratio": statistics.fmean(norm_ratios) if norm_ratios else None,
        "final_loss": log[-1]["loss"],
        "curve": _read_curve(folder, seconds) if evaluation["updates"] else [],
        "evaluations": _score_model(model, evaluation, args),
        "machine": {
            "cores": os.cpu_count(),
            "cpu": platform.machine(),
            "threads": torch.get_num_threads(),
            "gpu": torch.cuda.get_device_name(args.device) if is_cuda else None,
        },
        **code_record,
    }


def _make_evaluator(evaluation: Evaluation, args: ContAccumTrainingArguments) -> RetrievalEvaluator:
    """Return the evaluator that scores the model on the first data set during training."""
    return RetrievalEvaluator(
        _load_set(evaluation, evaluation["data"][0]),
        [name.lower() for name in METRICS],
        evaluation["batch_size"],
        # Its type is str | None; the arguments check that the evaluator allows the value.
        cast(Any, args.similarity),
    )


def _read_curve(folder: Path, seconds: Sequence[float]) -> list[dict[str, Any]]:
    """Return the scores during training, each with the updates and the training time before it.

    Args:
        seconds: the seconds of each update.
    """
    curve = []
    for record in read_log(folder / EVAL_LOG):
        num_updates = record["update"]
        point = {"update": num_updates, "train_seconds": sum(seconds[:num_updates])}
        for name in METRICS:
            point[name] = record[f"eval_{name.lower()}"]
        curve.append(point)
    return curve


def _score_model(
    model: Any, evaluation: Evaluation, args: ContAccumTrainingArguments
) -> dict[str, dict[str, Any]]:
    """Return {name of the data set: its metrics, and the metrics of each query}."""
    scores = {}
    for path in evaluation["data"]:
        result = evaluate_beir(
            model,
            _load_set(evaluation, path),
            _K_VALUES,
            show_progress=False,
            similarity=args.similarity,
            batch_size=evaluation["batch_size"],
            precision=evaluation["precision"],
        )
        scores[result.data["name"]] = {"metrics": result.metrics, "per_query": result.per_query}
    return scores


def _fingerprint_data_order(args: ContAccumTrainingArguments, training_data: Any) -> str:
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


def _main(job_file: str) -> None:
    """Do the run of a job file, and write its result."""
    threading.Thread(target=exit_with_parent, daemon=True).start()
    job = read_json(job_file)
    write_json(Path(job["folder"], RESULT_FILE), run_job(job))


if __name__ == "__main__":
    _main(sys.argv[1])
