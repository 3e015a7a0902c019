"""Seconds, trials and verdict of `contaccum fit` on SciFact."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import contaccum
from contaccum.data.beir import load_beir_folder
from contaccum.experiments.fit import RECORD_FILE
from contaccum.files import read_json
from gpu_parts import study_cell
from gpu_parts.settings import NotMeasured, Run
from gpu_parts.study_cell import SCIFACT, prepare_model

BUDGET = "60s"


def measure(run: Run) -> dict[str, Any]:
    """Fit a model to SciFact."""
    if not run.is_cuda:
        raise NotMeasured("make quickstart fits a model on a CPU")
    dataset = load_beir_folder(SCIFACT, "test")
    with (
        prepare_model(run, study_cell.StudySizes(), dataset) as model,
        tempfile.TemporaryDirectory() as folder,
    ):
        run.reset_peak()
        started = time.perf_counter()
        result = contaccum.fit(SCIFACT, model.folder, BUDGET, Path(folder, "fit"))
        seconds = time.perf_counter() - started
        record = read_json(result.folder / RECORD_FILE)
        lines = [verdict["line"] for verdict in record["verdicts"].values()]
        # The averages of a trained model with the base model are no trials of their own.
        trials = [row for row in record["candidates"] if row["updates"] and row["blend"] == 1.0]
    return {
        "budget": BUDGET,
        "model": model.name,
        "has_trained_weights": model.has_trained_weights,
        "seconds": seconds,
        "seconds_of_stages": record["seconds"],
        "trials": trials,
        "scores": record["scores"],
        "chosen": record["candidates"][record["chosen"]],
        "verdict": {**record["verdict"], "line": "; ".join(lines)},
        "peak_mb": run.read_peak_mb(),
    }
