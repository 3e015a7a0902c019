"""One run of a comparison, in a process of its own: `python -m contaccum.comparison.run FOLDER/job.json`.

Trains, scores, and writes FOLDER/result.json when all is done, whole or not at all. Deciding what to run, and
comparing, is done elsewhere.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import statistics
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from contaccum.errors import DataError, UserError
from contaccum.redaction import redacted_output

JOB, RESULT, MODEL = "job.json", "result.json", "model"
WITH_PARENT = "--with_parent"


def main(argv: Sequence[str]) -> int:
    """Run the job of a job.json; returns 0, or 2 for a mistake of the user's."""
    if WITH_PARENT in argv:
        threading.Thread(target=_end_with_the_parent, daemon=True).start()
    path = Path(argv[0])
    job = json.loads(path.read_text(encoding="utf-8"))
    with redacted_output():
        try:
            result = run_job(job, path.parent)
        except UserError as error:
            print(f"contaccum: error: {' '.join(str(error).split())}", file=sys.stderr)
            return 2
    write_json(path.parent / RESULT, result)
    return 0


def _end_with_the_parent() -> None:
    # The parent holds the other end of this pipe and never writes. However it ends, the pipe closes.
    os.read(0, 1)
    os._exit(130)


def write_json(path: Path, content: Any) -> None:
    """Write a file whole or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(content, allow_nan=False), encoding="utf-8")
    os.replace(temporary, path)


def run_job(job: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Train and score.

    Args:
        job: ``name``, ``entry``, ``method``, ``seed``, ``labels``; ``options`` for the parser; ``evaluation``, the
            fields of EvaluationSettings; ``threads`` (None: torch's choice); ``keep_model``; ``identity``, which is
            copied into the result.
        folder: where the model goes if it is kept; the run's own files go to the output_dir of ``options``.

    Raises:
        UserError: for arguments, data or a model that cannot be used, or data that changed since the job was made.
    """
    import torch
    from transformers import set_seed

    from contaccum.benchmarks.command import machine
    from contaccum.comparison.evaluating import CurveCallback, EvaluationSettings, Evaluator
    from contaccum.comparison.trainer import ComparedTrainer
    from contaccum.evaluation.model_record import model_fingerprint
    from contaccum.evaluation.provenance import git_commit, package_versions
    from contaccum.training.command import load_data, load_mining_data_of, load_model, take_prompts
    from contaccum.training.config import parse
    from contaccum.training.curves import read_log
    from contaccum.training.run_record import rows_of

    started = time.perf_counter()
    if job.get("threads"):
        torch.set_num_threads(int(job["threads"]))
    model_args, data_args, args = parse(job["options"])
    data = load_data(data_args, args.topic_column, args.refresh_negatives_every is not None)
    if data.fingerprint != job["identity"]["train_data"]:
        raise DataError(f"{' '.join(data_args.train_data)}: has changed since this comparison began; start it again")
    set_seed(args.seed)  # before the model: fresh weights are part of the seed
    model = load_model(model_args, device=str(args.device))
    take_prompts(args, data, model)
    initial_weights = model_fingerprint(model)
    evaluator = Evaluator(EvaluationSettings(**job["evaluation"]), args.similarity)
    trainer = ComparedTrainer(
        model=model,
        args=args,
        train_dataset=data.dataset,
        data_fingerprint=data.fingerprint,
        mining_data=load_mining_data_of(data_args, args),
        quiet=True,
    )
    curve = CurveCallback(trainer, evaluator)
    trainer.add_callback(curve)
    trainer.train()
    log = read_log(Path(str(args.output_dir)) / "train_log.jsonl")
    seconds = [float(record["seconds"]) for record in log]
    # Before the final evaluation, which would count into it.
    peak = max((float(record["peak_memory_mb"]) for record in log), default=None)
    if job.get("keep_model"):
        trainer.save_model(str(folder / MODEL))

    evaluating = time.perf_counter()
    evaluations = evaluator.all(model)
    points = [dict(point) for point in curve.points]
    if evaluator.settings.updates or evaluator.settings.before:
        points.append({"update": trainer.state.global_step, **next(iter(evaluations.values()))["metrics"]})
    for point in points:
        point["train_seconds"] = sum(seconds[: int(point["update"])])
    evaluation_seconds = curve.seconds + time.perf_counter() - evaluating

    ratios = [record["grad_norm_ratio"] for record in log if _is_number(record.get("grad_norm_ratio"))]
    loss = log[-1]["loss"] if log else None
    return {
        "name": job["name"],
        "entry": job["entry"],
        "method": job["method"],
        "seed": args.seed,
        "labels": job["labels"],
        "identity": job["identity"],
        "initial_weights": initial_weights,
        "final_weights": model_fingerprint(model),
        "data_order": trainer.data_order(),
        "pairs_per_update": args.total_train_batch_size,
        "updates": trainer.state.global_step,
        "learning_rate": args.scaled_learning_rate,
        "parameters": sum(p.numel() for p in model.parameters()),
        "train_pairs": rows_of(data.dataset),
        "train_seconds": sum(seconds),
        "seconds_per_update": statistics.median(seconds) if seconds else None,
        "evaluation_seconds": evaluation_seconds,
        "wall_seconds": time.perf_counter() - started,
        "peak_memory_mb": peak,
        "grad_norm_ratio": statistics.fmean(ratios) if ratios else None,
        "final_loss": loss if _is_number(loss) else None,
        "curve": points,
        "evaluations": evaluations,
        "machine": machine(str(args.device)),
        "versions": package_versions(),
        "git_commit": git_commit(),
    }


def job_of(run: Any, evaluation: Any, train_fingerprint: str, sets: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The job of a planned run; whoever starts it adds ``threads`` and ``keep_model``.

    ``identity`` holds what decides the result: a finished run is taken for this one where it is equal.
    """
    from dataclasses import asdict

    from contaccum.version import __version__

    return {
        "name": run.name,
        "entry": run.entry,
        "method": run.method,
        "seed": run.seed,
        "labels": dict(run.labels),
        "options": list(run.options),
        "evaluation": asdict(evaluation),
        "identity": {
            "contaccum": __version__,
            "arguments": dict(run.arguments),
            "train_data": train_fingerprint,
            "evaluation": evaluation.identity(sets),
        },
    }


def differences(before: Any, now: Any, key: str = "") -> list[str]:
    """What changed between two identities, a phrase each: ``learning_rate was 1e-05, is 5e-05``."""
    if isinstance(before, dict) and isinstance(now, dict):
        found = []
        for name in dict.fromkeys([*before, *now]):
            inner = name if key in ("", "arguments") else f"{key} {name}"
            found += differences(before.get(name), now.get(name), inner)
        return found
    if before == now:
        return []
    shown = ["default" if value is None else _short(value) for value in (before, now)]
    return [f"{key} was {shown[0]}, is {shown[1]}"]


def _short(value: Any) -> str:
    text = str(value)
    is_hash = len(text) == hashlib.sha256().digest_size * 2 and set(text) <= set("0123456789abcdef")
    return text[:8] if is_hash else text


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
