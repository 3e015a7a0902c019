"""`python eval/split_pairs.py PAIRS OUT`: hold out dev and test sets, by passage, from a file of training pairs."""

import argparse
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

    from contaccum.data.splits import split_pairs
    from contaccum.errors import UserError

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pairs", help="pairs in any format that `contaccum train` reads")
    parser.add_argument("output", help="a new folder: train.jsonl, and dev and test as BEIR folders")
    parser.add_argument("--dev", type=float, default=0.1, help="share of the passages")
    parser.add_argument("--test", type=float, default=0.1, help="share of the passages")
    parser.add_argument("--limit", type=int, help="passages of each part to keep")
    options = parser.parse_args()
    try:
        pairs = split_pairs(options.pairs, options.output, dev=options.dev, test=options.test, limit=options.limit)
        print(f"{options.output}: " + ", ".join(f"{part} {count:,}" for part, count in pairs.items()))
    except UserError as error:
        print(f"split_pairs: error: {error}", file=sys.stderr)
        sys.exit(2)
