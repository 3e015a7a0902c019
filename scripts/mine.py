"""Mine hard negatives: passages that score high for a query but are not labelled as relevant.

    python scripts/mine.py runs/mine --data pairs.jsonl --output hard.jsonl --relative_margin 0.05
    python scripts/train.py ... --train_data hard.jsonl --num_hard_negatives 4

The program writes a report with settings and counts beside the output file. docs/mining.md explains
the selection rules.
"""

from __future__ import annotations

import argparse
import sys

from contaccum import DualEncoder
from contaccum.errors import UserError
from contaccum.mining import (
    SelectionRules,
    check_output,
    load_cross_encoder,
    load_mining_data,
    mine_hard_negatives,
    write_mined,
)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", help="a SentenceTransformer: a folder, or a name on the hub")
    parser.add_argument("--data", required=True, help="training pairs in a format of docs/data.md")
    parser.add_argument("--corpus", help="passages to search; default: the passages of --data")
    parser.add_argument("--output", required=True, help="a new file")
    parser.add_argument("--num_negatives", type=int, default=3, help="negatives per query")
    parser.add_argument("--range_max", type=int, help="last rank of a candidate")
    parser.add_argument(
        "--relative_margin",
        type=float,
        help="minimum distance below the positive's score, as a share of it",
    )
    parser.add_argument("--cross_encoder", help="a model that rescores the candidates")
    parser.add_argument("--batch_size", type=int, default=32, help="texts per batch")
    parser.add_argument("--device", help="such as cpu or cuda:1; default: a GPU if there is one")
    return parser.parse_args()


def main() -> None:
    """Mine and write hard negatives."""
    args = parse_arguments()
    rules = {
        "num_negatives": args.num_negatives,
        "range_max": args.range_max,
        "relative_margin": args.relative_margin,
    }
    # Invalid settings and data are refused before the model is loaded.
    SelectionRules(**rules)
    check_output(args.output)
    data = load_mining_data(args.data, args.corpus)
    print(data.record["records"])

    model = DualEncoder.from_pretrained(args.model, device=args.device)
    cross_encoder = None
    if args.cross_encoder is not None:
        cross_encoder = load_cross_encoder(args.cross_encoder, args.device)
    mined = mine_hard_negatives(
        data,
        model,
        cross_encoder=cross_encoder,
        batch_size=args.batch_size,
        **rules,
    )
    report = {"model": args.model, "cross_encoder": args.cross_encoder}
    written = write_mined(mined, args.output, report)
    num_short = mined.record()["queries_with_too_few"]
    print(f"{num_short} queries have fewer than {args.num_negatives} negatives")
    print("written:", *written)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        print(f"mine.py: error: {error}", file=sys.stderr)
        sys.exit(2)
