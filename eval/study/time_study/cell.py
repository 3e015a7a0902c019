"""One training run of the study by time (a cell), or one timing, in a process of its own.

    python -m time_study.cell JOB.json

The job is written by `time_study.schedule`. The result is written in one step at the end.
"""

from __future__ import annotations

import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import torch
from comparison.processes import exit_with_parent

from contaccum.files import provenance, read_json, write_json
from contaccum.training.log import TRAIN_LOG, read_log
from time_study.clock import UpdateClock
from time_study.scoring import Scorer, average, drop_query_ids
from time_study.second_stage import make_second_stage
from time_study.trainers import TRAINERS, get_trained_model

CURVE_SHARES = (0.25, 0.5)
"""Shares of the updates after which a run with a curve is scored, besides its end."""

RECORDED_KEYS = ("data", "entry", "rate", "seed", "updates", "identity", "mined_negatives")
"""Values of a job that are part of the record of its run."""


def run_cell(job: dict[str, Any]) -> dict[str, Any]:
    """Train and score a model, and return the record of the run.

    ``cpu_seconds`` and ``encoder_passes`` are those of this run, for information: the report
    charges each update with the time and the texts that were measured before the runs.
    ``bank_fill`` is the number of bank entries in use in each update of the first stage.
    """
    code_record = provenance()  # read before training, because the checkout may change meanwhile
    trainer = TRAINERS[job["trainer"]](job["settings"])
    scorer = Scorer(job["data_folder"], job["haystack"], bf16=job["settings"]["bf16"])
    scored_updates = []
    if job["has_curve"]:
        scored_updates = [round(share * job["updates"]) for share in CURVE_SHARES]
        if job["second_stage"] is not None:
            scored_updates.append(job["updates"])
    score = partial(_score_average, scorer, trainer)
    clock = UpdateClock(trainer.model, scored_updates, score)
    trainer.add_callback(clock)
    trainer.train()
    seconds = sum(clock.seconds)
    num_texts = sum(clock.texts)
    if job["second_stage"] is not None:
        trainer, scorer = make_second_stage(
            get_trained_model(trainer), job["second_stage"], Path(job["folder"])
        )
        second_clock = UpdateClock(trainer.model)
        trainer.add_callback(second_clock)
        trainer.train()
        seconds += sum(second_clock.seconds)
        num_texts += sum(second_clock.texts)
    query_scores = scorer.score(get_trained_model(trainer))
    return {
        **{key: job[key] for key in RECORDED_KEYS},
        "cpu_seconds": round(seconds, 2),
        "encoder_passes": num_texts,
        "scores": average(query_scores),
        "curve": clock.curve,
        "bank_fill": _read_bank_fill(Path(job["settings"]["output_dir"], TRAIN_LOG)),
        "query_scores": drop_query_ids(query_scores),
        **code_record,
    }


def _score_average(scorer: Scorer, trainer: Any) -> dict[str, float]:
    return average(scorer.score(trainer.model))


def _read_bank_fill(train_log: Path) -> list[int]:
    """Return the number of bank entries in use in each update; none for methods without a bank."""
    if not train_log.exists():  # sentence-transformers' own trainer writes no such log
        return []
    return [update["bank_fill"] for update in read_log(train_log) if update.get("bank_fill")]


def time_updates(job: dict[str, Any]) -> dict[str, Any]:
    """Measure the updates of an entry.

    Returns:
        ``seconds``, the CPU seconds of each update, and ``passes``, the number of texts in its
        forward passes. The first update is left out.
    """
    trainer = TRAINERS[job["trainer"]](job["settings"])
    clock = UpdateClock(trainer.model)
    trainer.add_callback(clock)
    trainer.train()
    return {"seconds": clock.seconds[1:], "passes": clock.texts[1:]}


WORK = {"cell": run_cell, "timing": time_updates}
"""{kind of a job: the function that does it}"""


def main(job_file: str) -> None:
    """Do the work of a job and write its result."""
    threading.Thread(target=exit_with_parent, daemon=True).start()
    torch.set_num_threads(1)  # so that CPU time is the time on a machine without other load
    job = read_json(job_file)
    write_json(Path(job["result"]), WORK[job["kind"]](job))


if __name__ == "__main__":
    main(sys.argv[1])
