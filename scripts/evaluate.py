"""Evaluate a retriever on a BEIR data set: encode, search with FAISS, score.

    python scripts/evaluate.py runs/mine --data scifact --output runs/mine/scifact.json
    python scripts/evaluate.py runs/mine --data my_beir_folder --baseline base/scifact.json

With --baseline, the result is compared with an earlier result by a sign-flip test over groups of
queries with the same relevant documents.
To evaluate on several data sets, or with FAISS on GPUs, use eval/evaluate_beir.py.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from contaccum import DualEncoder
from contaccum.data import BeirDataset
from contaccum.data.near_duplicates import group_queries
from contaccum.errors import ConfigError, DataError, UserError
from contaccum.evaluation.beir import evaluate_beir, load_data
from contaccum.evaluation.metrics import sign_flip_test
from contaccum.evaluation.results import EvaluationResult, read_result, write_result

COMPARED_METRIC = "NDCG@10"
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
    parser.add_argument("--baseline", type=Path, help="output file of an earlier evaluation")
    parser.add_argument("--index", default="Flat", help="FAISS factory string; Flat is exact")
    parser.add_argument("--batch_size", type=int, default=32, help="texts per batch")
    parser.add_argument("--device", help="such as cpu or cuda:1; default: a GPU if there is one")
    return parser.parse_args()


def read_baseline(path: Path, data: BeirDataset) -> dict[str, Any]:
    """Read an earlier result; raise `DataError` if it cannot be compared with one on these data."""
    baseline = read_result(path)
    if baseline["data"].get("fingerprint") != data.fingerprint:
        raise DataError(
            f"--baseline {path}: its data are not {data.name}; "
            f"evaluate the baseline on {data.name} first"
        )
    if COMPARED_METRIC not in baseline["metrics"]:
        raise DataError(f"--baseline {path}: has no {COMPARED_METRIC}; evaluate it with k = 10")
    return baseline


def compare(result: EvaluationResult, baseline: dict[str, Any], data: BeirDataset) -> str:
    """Format the difference from the baseline, with interval and p-value."""
    metric = COMPARED_METRIC
    new_scores = {query: scores[metric] for query, scores in result.per_query.items()}
    old_scores = {query: scores[metric] for query, scores in baseline["per_query"].items()}
    test = sign_flip_test(new_scores, old_scores, group_queries(data))
    queries = f"{len(new_scores)} queries in {test['groups']} groups"
    interval = f"95% interval {test['low']:+.4f} to {test['high']:+.4f}"
    return (
        f"{metric}: {test['difference']:+.4f} on {queries}, {interval}, p = {test['p_value']:.4f}"
    )


def main() -> None:
    """Evaluate a model and write the result."""
    args = parse_arguments()
    data = load_data(args.data, args.split)
    baseline = None
    if args.baseline is not None:
        if args.baseline.resolve() == args.output.resolve():
            raise ConfigError(f"--output {args.output}: would replace the --baseline")
        baseline = read_baseline(args.baseline, data)
    model = DualEncoder.from_pretrained(args.model, device=args.device)

    result = evaluate_beir(
        model,
        data,
        index=args.index,
        batch_size=args.batch_size,
        model_name=args.model,
    )
    print("written:", *write_result(result, args.output))
    for metric in PRINTED_METRICS:
        print(f"{metric}: {result.metrics[metric]:.4f}")
    if baseline is not None:
        print("difference from the baseline in", compare(result, baseline, data))


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        print(f"evaluate.py: error: {error}", file=sys.stderr)
        sys.exit(2)
