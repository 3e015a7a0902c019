"""One run of a comparison, in a process of its own: `python -m contaccum.comparison.run FOLDER/job.json`.

It trains, scores, and writes FOLDER/result.json when all is done, whole or not at all. The last part is the parent's:
several processes at once, each with its share of the cores, none left behind. Nothing is planned or compared here.
"""

from __future__ import annotations

import os
import platform
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from transformers import set_seed
from transformers.trainer_utils import IntervalStrategy

from contaccum.comparison.plan import Group
from contaccum.comparison.report import METRICS
from contaccum.data import BeirDataset
from contaccum.errors import ConfigError, DataError, UserError
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


@dataclass(frozen=True)
class EvaluationSettings:
    """What is scored, and when.

    Attributes:
        data: BEIR folders or names of public sets; curves are of the first.
        updates: score the first set every so many updates, in the precision that trains; 0: only at the end.
        before: score the first set before training as well.
        queries, corpus: how many of them make a fixed sample; None: all. Relevant documents are always among it.
        precision: of the final scores, whatever the training's.
    """

    data: Sequence[str]
    split: str
    updates: int
    before: bool
    queries: int | None
    corpus: int | None
    precision: str
    batch_size: int

    def load(self, given: str) -> BeirDataset:
        """One of ``data``, sampled; raises `DataError` for one that cannot be used."""
        return sample(load_beir_data(given, self.split), self.queries, self.corpus)

    def about(self) -> list[dict[str, Any]]:
        """What a report says of each of ``data``; reads them all, one at a time.

        Raises:
            DataError: one that cannot be used.
            ConfigError: none, or two of one name, which a report could not tell apart.
        """
        sets = [about_data(self.load(given)) for given in self.data]
        if len({data["name"] for data in sets}) < max(1, len(sets)):
            raise ConfigError("--eval_data: give BEIR folders to score the models on, each of another name")
        return sets


def job_of(
    group: Group, seed: int, folder: Path, evaluation: EvaluationSettings, train_data: str, sets: Sequence[Any]
) -> dict[str, Any]:
    """What a process needs to know of its run. ``identity`` holds all that decides the result.

    Args:
        folder: of the run; the model goes there as well, if it is kept.
        train_data: fingerprint of the training data.
        sets: as :meth:`EvaluationSettings.about` gives them.
    """
    scored = {key: value for key, value in asdict(evaluation).items() if key not in ("data", "batch_size")}
    return {
        "name": group.run(seed),
        "entry": group.entry,
        "method": group.method,
        "seed": seed,
        "labels": dict(group.labels),
        "folder": str(folder),
        "options": [*group.options, f"--seed={seed}", f"--output_dir={folder}"],
        "evaluation": asdict(evaluation),
        "identity": {
            "contaccum": __version__,
            "arguments": {**group.arguments, "seed": seed},
            "train_data": train_data,
            "evaluation": {**scored, "sets": {data["name"]: data["fingerprint"] for data in sets}},
        },
    }


def read_run(folder: Path) -> dict[str, Any] | None:
    """A finished run's result; None where there is none. Raises `DataError` for one that is damaged."""
    if not (folder / RESULT).is_file():
        return None
    result = read_json(folder / RESULT)
    if not {"identity", "evaluations", "curve"} <= result.keys():
        raise DataError(f"{folder / RESULT}: not a result that contaccum wrote; remove it to do the run again")
    return result


def differences(before: Any, now: Any, key: str = "") -> list[str]:
    """What changed between two identities, a phrase each: ``learning_rate was 1e-05, is 5e-05``."""
    if isinstance(before, dict) and isinstance(now, dict):
        names = dict.fromkeys([*before, *now])
        return [line for name in names for line in differences(before.get(name), now.get(name), name)]
    # Of a fingerprint, the beginning is enough.
    shown = ["default" if x is None else str(x)[:8] if len(str(x)) == 64 else str(x) for x in (before, now)]
    return [] if before == now else [f"{key} was {shown[0]}, is {shown[1]}"]


# The process ---------------------------------------------------------------------------------------------------------


def main(argv: Sequence[str]) -> int:
    """Run the job of a job.json; returns 0, or 2 for a mistake of the user's."""
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    job = read_json(argv[0])
    try:
        write_json(Path(job["folder"]) / RESULT, run_job(job))
    except UserError as error:
        print(f"contaccum: error: {redact(' '.join(str(error).split()))}", file=sys.stderr)
        return 2
    return 0


def _end_with_the_parent() -> None:
    # The parent holds the other end of this pipe and never writes. However it ends, the pipe closes.
    os.read(0, 1)
    os._exit(130)


def run_job(job: Mapping[str, Any]) -> dict[str, Any]:
    """Train and score as :func:`job_of` says; ``threads`` (torch's) and ``keep_model`` may stand beside.

    Raises:
        UserError: arguments, data or a model that cannot be used, or data that changed since the job was made.
    """
    if job.get("threads"):
        torch.set_num_threads(job["threads"])
    folder, settings = Path(job["folder"]), EvaluationSettings(**job["evaluation"])
    model_args, data_args, args = parse(job["options"])
    data = load_data(data_args, args)
    if data.fingerprint != job["identity"]["train_data"]:
        raise DataError(f"{' '.join(data_args.train_data)}: has changed since this comparison began; start it again")
    set_seed(args.seed)  # before the model: fresh weights are part of the seed
    model = load_model(model_args, device=str(args.device))
    take_prompts(args, data, model)
    initial_weights = model_fingerprint(model)
    similarity: Any = args.similarity  # checked by the parser
    evaluator = None
    if settings.updates or settings.before:
        args.eval_strategy, args.eval_steps = IntervalStrategy.STEPS, settings.updates or sys.maxsize
        args.eval_on_start = settings.before
        metrics = [name.lower() for name in METRICS]
        evaluator = RetrievalEvaluator(settings.load(settings.data[0]), metrics, settings.batch_size, similarity)
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
    plain = trainer.accelerator.unwrap_model(model, keep_fp32_wrapper=False)  # out of mixed precision
    evaluations = {}
    for given in settings.data:
        result = evaluate_beir(
            plain,
            settings.load(given),
            k_values=(10, 20, 100),
            batch_size=settings.batch_size,
            similarity=similarity,
            autocast_dtype=None if settings.precision == "float32" else settings.precision,
            show_progress=False,
        )
        evaluations[result.data["name"]] = {
            "data": result.data,
            "metrics": {name: result.metrics[name] for name in METRICS},
            "query_ids": list(result.per_query),
            "per_query": {name: [scores[name] for scores in result.per_query.values()] for name in METRICS},
        }
    seconds, ratios = _numbers(log, "seconds"), _numbers(log, "grad_norm_ratio")
    gpu = torch.cuda.get_device_name(args.device) if args.device.type == "cuda" else None
    return {
        **{key: job[key] for key in ("name", "entry", "method", "seed", "labels", "identity")},
        "initial_weights": initial_weights,
        "final_weights": model_fingerprint(model),
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
        "evaluations": evaluations,
        "machine": {"cores": os.cpu_count(), "cpu": platform.machine(), "threads": torch.get_num_threads(), "gpu": gpu},
        "versions": package_versions(),
        "git_commit": git_commit(),
    }


def _data_order(args: Any, data: Any) -> str:
    """Equal for runs whose updates hold the same pairs: epoch and seed decide, unless batches are composed by size."""
    composed = args.groups_by_length or args.avoids_duplicates or args.own_batch_sampler or args.topic_column
    size = args.per_device_train_batch_size if composed or isinstance(data.dataset, dict) else None
    return fingerprint(data.fingerprint, args.order_seed, size)


def _numbers(log: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    return [float(record[key]) for record in log if record.get(key) is not None]


# Its parent ----------------------------------------------------------------------------------------------------------


def run_jobs(
    jobs: Sequence[Mapping[str, Any]],
    at_once: int,
    threads: int,
    progress: Callable[[str], None] = print,
    command: Sequence[str] = (sys.executable, "-m", "contaccum.comparison.run"),
) -> dict[str, str]:
    """Run every job, ``at_once`` at a time with ``threads`` each; returns name -> why, for those that failed.

    Each process writes stdout.log and stderr.log into its folder. Whatever ends this function, an interrupt for
    instance, ends the processes.
    """
    waiting = list(jobs)
    running: dict[str, subprocess.Popen[bytes]] = {}
    failed: dict[str, str] = {}
    started = time.monotonic()
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                job = waiting.pop(0)
                progress(f"[{len(jobs) - len(waiting)}/{len(jobs)}] {job['name']}: started")
                running[job["name"]] = _start({**job, "threads": threads}, command)
            time.sleep(0.1)
            for job in [job for job in jobs if job["name"] in running and running[job["name"]].poll() is not None]:
                why = _fault(running.pop(job["name"]).returncode, Path(job["folder"]))
                failed |= {job["name"]: why} if why else {}
                left = len(waiting) + len(running)
                seconds = (time.monotonic() - started) / (len(jobs) - left) * left
                rest = f"; about {timedelta(seconds=round(seconds))} left" if left else ""
                progress(f"{job['name']}: {f'FAILED: {why}' if why else 'done'}{rest}")
    finally:
        for process in running.values():
            process.communicate()  # closes the pipe, which the process takes for the end of its parent
    return failed


def _start(job: Mapping[str, Any], command: Sequence[str]) -> subprocess.Popen[bytes]:
    folder = Path(job["folder"])
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
    lines = (folder / "stderr.log").read_text(encoding="utf-8", errors="replace").split("\n")
    last = next((line.strip()[:300] for line in reversed(lines) if line.strip()), "nothing on stderr")
    if code < 0:
        return f"killed by {signal.Signals(-code).name}{' (out of memory?)' if code == -9 else ''}: {last}"
    return f"exit code {code}: {last}" if code else f"ended without a result: {last}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
