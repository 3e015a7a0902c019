"""One run of a comparison, in a process of its own: `python -m contaccum.comparison.run FOLDER/job.json`.

It trains, scores, and writes FOLDER/result.json when all is done, whole or not at all. The last part is the parent's:
several processes at once, each with its share of the cores, none left behind. Nothing is planned or compared here.
"""

from __future__ import annotations

import os
import platform
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from transformers.trainer_utils import IntervalStrategy

from contaccum import __version__
from contaccum.comparison.plan import Plan, as_tokens
from contaccum.comparison.summary import METRICS
from contaccum.data import BeirDataset
from contaccum.errors import ConfigError
from contaccum.evaluation.beir_sets import about_data, evaluate_beir
from contaccum.evaluation.beir_sets import load_data as load_beir_data
from contaccum.evaluation.evaluator import RetrievalEvaluator, sample
from contaccum.files import fingerprint, provenance, read_json, redact, write_json
from contaccum.retrieval.encode import model_fingerprint
from contaccum.training.arguments import get_name
from contaccum.training.config import load_data, parse
from contaccum.training.log import EVAL_LOG, TRAIN_LOG, read_log
from contaccum.training.run import load_encoder, load_run_data, make_trainer

Job = dict[str, Any]


def about_sets(evaluation: Mapping[str, Any], option: str = "--eval_data") -> list[dict[str, Any]]:
    """What a report says of each set that is scored; raises `UserError` for none, two of one name, or one to mend.

    ``evaluation`` has the options of `contaccum compare` that begin with eval_, by the rest of their names; ``option``
    is where its data were given.
    """
    sets = [about_data(_load_set(evaluation, given)) for given in evaluation["data"]]
    if len({data["name"] for data in sets}) < max(1, len(sets)):
        raise ConfigError(
            f"{option}: give BEIR folders to score the models on, each of another name"
        )
    return sets


def _load_set(evaluation: Mapping[str, Any], given: str) -> BeirDataset:
    return sample(
        load_beir_data(given, evaluation["split"]), evaluation["queries"], evaluation["corpus"]
    )


def make_jobs(
    plan: Plan, evaluation: Mapping[str, Any], sets: Sequence[Mapping[str, Any]], folder: Path
) -> list[Job]:
    """A job for every run of the plan, seed by seed, each with a folder of its own below ``folder``.

    ``evaluation`` and ``sets`` are what `about_sets` takes and gives; a job's ``identity`` is all that decides
    its result. Raises `DataError` for training data that cannot be used.
    """
    scored = {
        f"eval_{key}": value
        for key, value in evaluation.items()
        if key not in ("data", "batch_size")
    }
    scored |= {f"eval_data {data['name']}": data["fingerprint"] for data in sets}
    train_data: dict[str, str] = {}
    jobs: list[Job] = []
    for seed in plan.seeds:
        for group in plan.groups.values():
            _, data, args = group.parsed
            read = str((data, args.refresh_negatives_every))  # all that decides what is read
            if read not in train_data:
                train_data[read] = load_data(data, args).fingerprint
            own = folder / group.run(seed)
            job = {"name": own.name, "entry": group.entry, "method": group.method, "seed": seed}
            job |= {
                "labels": dict(group.labels),
                "folder": str(own),
                "evaluation": dict(evaluation),
            }
            job["options"] = [*as_tokens(group.options), f"--seed={seed}", f"--output_dir={own}"]
            options = {key: " ".join(values) for key, values in group.options.items()}
            job["identity"] = {
                "contaccum": __version__,
                "train_data": train_data[read],
                **options,
                **scored,
            }
            jobs.append(job)
    return jobs


def read_results(jobs: Sequence[Job]) -> dict[str, dict[str, Any]]:
    """{name of the run: its result}, of those that are finished; raises `ConfigError` for one with other settings."""
    paths = {job["name"]: Path(job["folder"], "result.json") for job in jobs}
    results = {name: read_json(path) for name, path in paths.items() if path.is_file()}
    for job in jobs:
        now, before = job["identity"], results.get(job["name"], job)["identity"]
        changed = [key for key in {**before, **now} if before.get(key) != now.get(key)]
        if changed:
            said = "; ".join(f"{key} was {before.get(key)}, is {now.get(key)}" for key in changed)
            mend = "Remove it, or name another --output_dir"
            raise ConfigError(f"{job['folder']} was run with other settings: {said}. {mend}")
    return results


def run_plan(
    plan: Plan,
    evaluation: Mapping[str, Any],
    sets: Sequence[Mapping[str, Any]],
    folder: Path,
    at_once: int | None,
    progress: Callable[[str], None],
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Do what is missing of a plan; returns the results and the failures by name. Raises as what it calls does."""
    jobs = make_jobs(plan, evaluation, sets, folder)
    done = read_results(jobs)
    progress(f"{len(done)} of {len(jobs)} runs are finished already; baseline {plan.baseline}")
    failed = run_jobs([job for job in jobs if job["name"] not in done], at_once, progress)
    return read_results(jobs), failed


def run_job(job: Mapping[str, Any]) -> dict[str, Any]:
    """Train and score as a job says."""
    code = provenance()  # of what runs, whatever is changed meanwhile
    folder, evaluation = Path(job["folder"]), job["evaluation"]
    model_args, data_args, args = parse(job["options"])
    data = load_run_data(data_args, args)
    if evaluation["updates"]:
        args.eval_strategy, args.eval_steps, args.eval_on_start = (
            IntervalStrategy.STEPS,
            evaluation["updates"],
            True,
        )
        first, similarity = _load_set(evaluation, evaluation["data"][0]), cast(Any, args.similarity)
        metrics = [name.lower() for name in METRICS]
        evaluator = RetrievalEvaluator(first, metrics, evaluation["batch_size"], similarity)
        data = data._replace(evaluator=evaluator)
    encoder = load_encoder(model_args, args)
    initial_weights = model_fingerprint(encoder)
    trainer = make_trainer(encoder, model_args, args, data)
    trainer.train()
    log = read_log(folder / TRAIN_LOG)
    seconds = [record["seconds"] for record in log]
    ratios = [
        record["grad_norm_ratio"] for record in log if record.get("grad_norm_ratio") is not None
    ]
    curve = []
    for point in read_log(folder / EVAL_LOG) if evaluation["updates"] else []:
        scores = {name: point[f"eval_{name.lower()}"] for name in METRICS}
        curve.append(
            {"update": point["update"], "train_seconds": sum(seconds[: point["update"]]), **scores}
        )
    # In the precision that was asked for, whatever the training's: the model is taken out of mixed precision.
    model = trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False)
    how: Any = {
        "similarity": args.similarity,
        **{key: evaluation[key] for key in ("batch_size", "precision")},
    }
    sets = (_load_set(evaluation, given) for given in evaluation["data"])
    results = [evaluate_beir(model, one, (10, 20, 100), show_progress=False, **how) for one in sets]
    gpu = torch.cuda.get_device_name(args.device) if args.device.type == "cuda" else None
    return {
        **{key: job[key] for key in ("name", "entry", "method", "seed", "labels", "identity")},
        "initial_weights": initial_weights,
        "data_order": _data_order(args, data.training),
        "pairs_per_update": args.total_train_batch_size,
        "updates": trainer.state.global_step,
        "pairs_trained": sum(record["pairs"] for record in log),
        "train_seconds": sum(seconds),
        "seconds_per_update": statistics.median(seconds),
        "peak_memory_mb": max(record["peak_memory_mb"] for record in log),
        "grad_norm_ratio": statistics.fmean(ratios) if ratios else None,
        "final_loss": log[-1]["loss"],
        "curve": curve,
        "evaluations": {
            x.data["name"]: {"metrics": x.metrics, "per_query": x.per_query} for x in results
        },
        "machine": {
            "cores": os.cpu_count(),
            "cpu": platform.machine(),
            "threads": torch.get_num_threads(),
            "gpu": gpu,
        },
        **code,
    }


def _data_order(args: Any, data: Any) -> str:
    """Equal for runs whose updates hold the same pairs: epoch and seed decide, unless batches are composed by size."""
    by_size = get_name(args.batch_sampler) != "batch_sampler" or args.dataloader_drop_last
    size = args.per_device_train_batch_size if by_size or isinstance(data.dataset, dict) else None
    return fingerprint(data.fingerprint, args.order_seed, size)


def run_jobs(
    jobs: Sequence[Job],
    at_once: int | None,
    progress: Callable[[str], None] = print,
    command: Sequence[str] = (sys.executable, "-m", "contaccum.comparison.run"),
) -> dict[str, str]:
    """Run every job in an empty folder and a process of its own; returns name -> why, for those that failed.

    Whatever ends this function, an interrupt for instance, ends the processes.

    Args:
        at_once: at most; None: one with an accelerator, else one for every two cores.
    """
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    at_once = min(
        at_once or (1 if torch.accelerator.is_available() else max(1, cores // 2)),
        max(1, len(jobs)),
    )
    threads = dict.fromkeys(
        ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS"), str(max(1, cores // at_once))
    )
    waiting = list(jobs)
    running: list[tuple[Job, subprocess.Popen[bytes]]] = []
    failed: dict[str, str] = {}
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                job = waiting.pop(0)
                progress(f"[{len(jobs) - len(waiting)}/{len(jobs)}] {job['name']}: started")
                folder = Path(job["folder"])
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(parents=True)
                write_json(folder / "job.json", job)
                with (
                    open(folder / "stdout.log", "wb") as out,
                    open(folder / "stderr.log", "wb") as err,
                ):
                    pipes: Any = {"stdin": subprocess.PIPE, "stdout": out, "stderr": err}
                    given = [*command, str(folder / "job.json")]
                    running.append(
                        (job, subprocess.Popen(given, env={**os.environ, **threads}, **pipes))
                    )
            time.sleep(0.1)
            for job, process in [pair for pair in running if pair[1].poll() is not None]:
                running.remove((job, process))
                if process.returncode:
                    said = Path(job["folder"], "stderr.log").read_text(
                        encoding="utf-8", errors="replace"
                    )
                    last = redact(said.strip().rpartition("\n")[2])[:300]
                    failed[job["name"]] = (
                        f"exit code {process.returncode}: {last or 'nothing on stderr'}"
                    )
                progress(f"{job['name']}: {failed.get(job['name'], 'done')}")
    finally:
        for _, process in running:
            process.communicate()  # closes the pipe, which the process takes for the end of its parent
    return failed


if __name__ == "__main__":

    def end_with_the_parent() -> None:
        # The parent holds the other end of this pipe and never writes. However it ends, the pipe closes.
        os.read(0, 1)
        os._exit(130)

    threading.Thread(target=end_with_the_parent, daemon=True).start()
    job = read_json(sys.argv[1])
    write_json(Path(job["folder"], "result.json"), run_job(job))
