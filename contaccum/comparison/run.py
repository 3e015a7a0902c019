"""One run of a comparison, in a process of its own: `python -m contaccum.comparison.run FOLDER/job.json`.

It trains, scores, and writes FOLDER/result.json when all is done, whole or not at all. The last part is the parent's:
several processes at once, each with its share of the cores, none left behind. Nothing is planned or compared here.
"""

from __future__ import annotations

import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import set_seed
from transformers.trainer_utils import IntervalStrategy

from contaccum.comparison.plan import Plan
from contaccum.comparison.report import METRICS
from contaccum.data import BeirDataset
from contaccum.errors import ConfigError, DataError
from contaccum.evaluation.beir import about_data, evaluate_beir
from contaccum.evaluation.beir import load_data as load_beir_data
from contaccum.evaluation.evaluator import RetrievalEvaluator, sample
from contaccum.files import fingerprint, git_commit, package_versions, read_json, redact, write_json
from contaccum.retrieval.encode import model_fingerprint
from contaccum.training.config import load_data, load_mining_data_of, load_model, parse, take_prompts
from contaccum.training.log import EVAL_LOG, TRAIN_LOG, read_log
from contaccum.training.trainer import ContAccumTrainer
from contaccum.version import __version__

JOB, RESULT, MODEL = "job.json", "result.json", "model"

Job = dict[str, Any]
"""What a process needs to know of its run; ``identity`` holds all that decides the result."""

Evaluation = Mapping[str, Any]
"""The options of `contaccum compare` that begin with eval, by the rest of their names."""


# Jobs ----------------------------------------------------------------------------------------------------------------


def about_sets(evaluation: Evaluation) -> list[dict[str, Any]]:
    """What a report says of each set that is scored; reads them all, one at a time.

    Raises:
        DataError: one that cannot be used.
        ConfigError: none, or two of one name, which a report could not tell apart.
    """
    sets = [about_data(_load_set(evaluation, given)) for given in evaluation["data"]]
    if len({data["name"] for data in sets}) < max(1, len(sets)):
        raise ConfigError("--eval_data: give BEIR folders to score the models on, each of another name")
    return sets


def _load_set(evaluation: Evaluation, given: str) -> BeirDataset:
    return sample(load_beir_data(given, evaluation["split"]), evaluation["queries"], evaluation["corpus"])


def make_jobs(plan: Plan, evaluation: Evaluation, sets: Sequence[Mapping[str, Any]], folder: Path) -> list[Job]:
    """A job for every run of the plan, seed by seed, each with a folder of its own below ``folder``.

    Args:
        sets: as :func:`about_sets` gives them.

    Raises:
        DataError: training data that cannot be used.
    """
    train_data: dict[str, str] = {}
    jobs: list[Job] = []
    scored = {key: value for key, value in evaluation.items() if key not in ("data", "batch_size")}
    scored["sets"] = {data["name"]: data["fingerprint"] for data in sets}
    for seed in plan.seeds:
        for group in plan.groups.values():
            _, data, args = group.parsed
            read = str((data, args.refresh_negatives_every))  # all that decides what is read
            if read not in train_data:
                train_data[read] = load_data(data, args).fingerprint
            own = folder / group.run(seed)
            job = {"name": own.name, "entry": group.entry, "method": group.method, "seed": seed}
            job |= {"labels": dict(group.labels), "folder": str(own), "evaluation": dict(evaluation)}
            job["options"] = [*group.options, f"--seed={seed}", f"--output_dir={own}"]
            decides = {"contaccum": __version__, "arguments": {**group.arguments(), "seed": seed}}
            job["identity"] = {**decides, "train_data": train_data[read], "evaluation": scored}
            jobs.append(job)
    return jobs


def unfinished(jobs: Sequence[Job], overwrite: bool, keep_models: bool) -> list[Job]:
    """The jobs whose runs are still to be done.

    Args:
        overwrite: do those again that were done with other settings or data.
        keep_models: and those whose model was not kept; it will be.

    Raises:
        ConfigError: without ``overwrite``, for one that was done with other settings or data.
    """
    todo = []
    for job in jobs:
        result = finished(job)
        changed = [] if result is None else differences(result["identity"], job["identity"])
        if changed and not overwrite:
            mend = "Pass --overwrite to do such runs again, or another --output_dir"
            raise ConfigError(f"{job['folder']} was run with other settings: {'; '.join(changed)}. {mend}")
        if result is None or changed or (keep_models and not (Path(job["folder"]) / MODEL).is_dir()):
            todo.append({**job, "keep_model": keep_models})
    return todo


def finished(job: Job) -> dict[str, Any] | None:
    """The result of a job's run; None where there is none."""
    path = Path(job["folder"]) / RESULT
    return read_json(path) if path.is_file() else None


def differences(before: Any, now: Any, key: str = "") -> list[str]:
    """What changed between two identities, a phrase each: ``learning_rate was 1e-05, is 5e-05``."""
    if isinstance(before, dict) and isinstance(now, dict):
        names = dict.fromkeys([*before, *now])
        return [line for name in names for line in differences(before.get(name), now.get(name), name)]
    # Of a fingerprint, the beginning is enough.
    shown = ["default" if x is None else str(x)[:8] if len(str(x)) == 64 else str(x) for x in (before, now)]
    return [] if before == now else [f"{key} was {shown[0]}, is {shown[1]}"]


# The process ---------------------------------------------------------------------------------------------------------


def main(argv: Sequence[str]) -> None:
    """Run the job of a job.json."""
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    job = read_json(argv[0])
    write_json(Path(job["folder"]) / RESULT, run_job(job))


def _end_with_the_parent() -> None:
    # The parent holds the other end of this pipe and never writes. However it ends, the pipe closes.
    os.read(0, 1)
    os._exit(130)


def run_job(job: Mapping[str, Any]) -> dict[str, Any]:
    """Train and score as :func:`make_jobs` says; ``threads`` (torch's) and ``keep_model`` may stand beside.

    Raises:
        UserError: arguments, data or a model that cannot be used, or data that changed since the job was made.
    """
    if job.get("threads"):
        torch.set_num_threads(job["threads"])
    folder, evaluation = Path(job["folder"]), job["evaluation"]
    model_args, data_args, args = parse(job["options"])
    data = load_data(data_args, args)
    if data.fingerprint != job["identity"]["train_data"]:
        raise DataError(f"{' '.join(data_args.train_data)}: has changed since this comparison began; start it again")
    set_seed(args.seed)  # before the model: fresh weights are part of the seed
    model = load_model(model_args, device=str(args.device))
    take_prompts(args, data, model)
    initial_weights = model_fingerprint(model)
    evaluator = None
    if evaluation["updates"] or evaluation["before"]:
        args.eval_strategy, args.eval_steps = IntervalStrategy.STEPS, evaluation["updates"] or sys.maxsize
        args.eval_on_start = evaluation["before"]
        first, metrics = _load_set(evaluation, evaluation["data"][0]), [name.lower() for name in METRICS]
        evaluator = RetrievalEvaluator(first, metrics, evaluation["batch_size"], args.similarity)  # type: ignore[arg-type]  # checked by the parser
    trainer = ContAccumTrainer(
        model=model,
        args=args,
        train_dataset=data.dataset,
        evaluator=evaluator,
        data_fingerprint=data.fingerprint,
        mining_data=load_mining_data_of(data_args, args),
        quiet=True,
    )
    trainer.train()
    if job.get("keep_model"):
        trainer.save_model(str(folder / MODEL))
    log = read_log(folder / TRAIN_LOG)
    curve = read_log(folder / EVAL_LOG) if evaluator else []
    seconds, ratios = _numbers(log, "seconds"), _numbers(log, "grad_norm_ratio")
    gpu = torch.cuda.get_device_name(args.device) if args.device.type == "cuda" else None
    return {
        **{key: job[key] for key in ("name", "entry", "method", "seed", "labels", "identity")},
        "initial_weights": initial_weights,
        "data_order": _data_order(args, data),
        "pairs_per_update": args.total_train_batch_size,
        "updates": trainer.state.global_step,
        "train_seconds": sum(seconds),
        "seconds_per_update": statistics.median(seconds) if seconds else None,
        "peak_memory_mb": max(_numbers(log, "peak_memory_mb"), default=None),
        "grad_norm_ratio": statistics.fmean(ratios) if ratios else None,
        "final_loss": log[-1]["loss"] if log else None,
        "curve": [
            {
                "update": point["update"],
                "train_seconds": sum(seconds[: point["update"]]),
                **{name: point[f"eval_{name.lower()}"] for name in METRICS},
            }
            for point in curve
        ],
        "evaluations": _score(trainer, evaluation, args.similarity),
        "machine": {"cores": os.cpu_count(), "cpu": platform.machine(), "threads": torch.get_num_threads(), "gpu": gpu},
        "versions": package_versions(),
        "git_commit": git_commit(),
    }


def _score(trainer: ContAccumTrainer, evaluation: Evaluation, similarity: Any) -> dict[str, Any]:
    """{set: its metrics, and those of every query}, in the precision that was asked for, whatever the training's."""
    model = trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False)  # out of mixed precision
    precision = None if evaluation["precision"] == "float32" else evaluation["precision"]
    settings = {"batch_size": evaluation["batch_size"], "autocast_dtype": precision, "similarity": similarity}
    found = {}
    for given in evaluation["data"]:
        result = evaluate_beir(model, _load_set(evaluation, given), (10, 20, 100), show_progress=False, **settings)
        found[result.data["name"]] = {
            "data": result.data,
            "metrics": {name: result.metrics[name] for name in METRICS},
            "query_ids": list(result.per_query),
            "per_query": {name: [scores[name] for scores in result.per_query.values()] for name in METRICS},
        }
    return found


def _data_order(args: Any, data: Any) -> str:
    """Equal for runs whose updates hold the same pairs: epoch and seed decide, unless batches are composed by size."""
    composed = args.avoids_duplicates or args.own_batch_sampler
    size = args.per_device_train_batch_size if composed or isinstance(data.dataset, dict) else None
    return fingerprint(data.fingerprint, args.order_seed, size)


def _numbers(log: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    return [float(record[key]) for record in log if record.get(key) is not None]


# Its parent ----------------------------------------------------------------------------------------------------------


def run_jobs(
    jobs: Sequence[Job],
    at_once: int | None,
    progress: Callable[[str], None] = print,
    command: Sequence[str] = (sys.executable, "-m", "contaccum.comparison.run"),
) -> dict[str, str]:
    """Run every job in an empty folder and a process of its own; returns name -> why, for those that failed.

    Each process writes stdout.log and stderr.log into its folder. Whatever ends this function, an interrupt for
    instance, ends the processes.

    Args:
        at_once: at most; None: one with an accelerator, else one for every two cores.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    at_once = min(at_once or (1 if torch.accelerator.is_available() else max(1, cores // 2)), max(1, len(jobs)))
    waiting = list(jobs)
    running: dict[str, subprocess.Popen[bytes]] = {}
    failed: dict[str, str] = {}
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                job = waiting.pop(0)
                progress(f"[{len(jobs) - len(waiting)}/{len(jobs)}] {job['name']}: started")
                running[job["name"]] = _start({**job, "threads": max(1, cores // at_once)}, command)
            time.sleep(0.1)
            for job in [job for job in jobs if job["name"] in running and running[job["name"]].poll() is not None]:
                why = _fault(running.pop(job["name"]).returncode, Path(job["folder"]))
                failed |= {job["name"]: why} if why else {}
                progress(f"{job['name']}: {f'FAILED: {why}' if why else 'done'}")
    finally:
        for process in running.values():
            process.communicate()  # closes the pipe, which the process takes for the end of its parent
    return failed


def _start(job: Job, command: Sequence[str]) -> subprocess.Popen[bytes]:
    folder = Path(job["folder"])
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_json(folder / JOB, job)
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS"), str(job["threads"]))
    paths = [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH")]
    environment = {**os.environ, **threads, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    with open(folder / "stdout.log", "wb") as out, open(folder / "stderr.log", "wb") as err:
        return subprocess.Popen(
            [*command, str(folder / JOB)], stdin=subprocess.PIPE, stdout=out, stderr=err, env=environment
        )


def _fault(code: int, folder: Path) -> str:
    """Why a process that ended is no finished run; "" if it is."""
    if code == 0 and (folder / RESULT).is_file():
        return ""
    lines = (folder / "stderr.log").read_text(encoding="utf-8", errors="replace").strip().splitlines()
    last = redact(lines[-1])[:300] if lines else "nothing on stderr"
    if code < 0:
        return f"killed by {signal.Signals(-code).name}{' (out of memory?)' if code == -9 else ''}: {last}"
    return f"exit code {code}: {last}" if code else f"ended without a result: {last}"


if __name__ == "__main__":
    main(sys.argv[1:])
