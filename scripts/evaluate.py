"""Evaluate a retriever on a BEIR data set: encode, search with FAISS, score.

    python scripts/evaluate.py runs/mine --data scifact --output runs/mine/scifact.json

`contaccum evaluate --baseline` compares a result with an earlier one.
To evaluate on several data sets, or with FAISS on GPUs, use eval/evaluate_beir.py.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from contaccum import DualEncoder
from contaccum.errors import UserError
from contaccum.evaluation.beir import evaluate_beir, load_data
from contaccum.evaluation.results import write_result

PRINTED_METRICS = ("NDCG@10", "MRR@10", "Recall@100")


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", help="a SentenceTransformer: a folder, or a name on the hub")
    parser.add_argument("--data", required=True, help="a BEIR folder, or the name of a public set")
    parser.add_argument("--split", help="default: test, and dev for msmarco")
    parser.add_argument("--output", type=Path, default=Path("results.json"), help="a JSON file")
    parser.add_argument("--index", default="Flat", help="FAISS factory string; Flat is exact")
    parser.add_argument("--batch_size", type=int, default=32, help="texts per batch")
    parser.add_argument("--device", help="such as cpu or cuda:1; default: a GPU if there is one")
    return parser.parse_args()


def main() -> None:
    """Evaluate a model and write the result."""
    args = parse_arguments()
    data = load_data(args.data, args.split)
    model = DualEncoder.from_pretrained(args.model, device=args.device)

    result = evaluate_beir(
        model,
        data,
        index=args.index,
        batch_size=args.batch_size,
        model_name=args.model,
    )
    write_result(result, args.output)
    print(f"written: {args.output}, and its run beside it")
    for metric in PRINTED_METRICS:
        print(f"{metric}: {result.metrics[metric]:.4f}")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        print(f"evaluate.py: error: {error}", file=sys.stderr)
        sys.exit(2)
