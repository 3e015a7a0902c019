"""Encode a corpus of any size into a store of embeddings on disk.

    python scripts/encode.py runs/mine --corpus psgs_w100.tsv --output stores/wikipedia
    contaccum search runs/mine --store stores/wikipedia --queries nq-test.qa.csv --output nq.trec

The store is written shard by shard. If the program is started again after an interruption, it
encodes the missing shards only. The program uses one process; to encode on several GPUs, use
`torchrun -m contaccum.cli encode`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from contaccum import DualEncoder
from contaccum.errors import UserError
from contaccum.retrieval.encode import CorpusEncoder
from contaccum.retrieval.store import STORED, EmbeddingStore


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", help="a SentenceTransformer: a folder, or a name on the hub")
    parser.add_argument("--corpus", type=Path, required=True, help="jsonl, tsv or a BEIR folder")
    parser.add_argument("--output", type=Path, required=True, help="folder of the store")
    parser.add_argument("--dtype", choices=STORED, default="float32", help="data type of the store")
    parser.add_argument(
        "--precision", default="float32", help="precision of the encoder, such as bfloat16"
    )
    parser.add_argument("--shard_size", type=int, default=50_000, help="rows per shard")
    parser.add_argument("--batch_size", type=int, default=32, help="texts per batch")
    parser.add_argument("--device", help="such as cpu or cuda:1; default: a GPU if there is one")
    return parser.parse_args()


def main() -> None:
    """Encode all texts of a corpus that are not in the store yet."""
    args = parse_arguments()
    model = DualEncoder.from_pretrained(args.model, device=args.device)
    # An unfinished store is continued only with the same model, tokenisation and settings.
    encoder = CorpusEncoder(
        model,
        args.model,
        args.corpus,
        args.output,
        dtype=args.dtype,
        batch_size=args.batch_size,
        precision=args.precision,
        shard_size=args.shard_size,
    )
    encoder.encode()
    num_rows, dimension = EmbeddingStore.open(args.output).shape
    print(encoder.report.summary())
    print(f"written: {args.output}, {num_rows:,} embeddings of {dimension} dimensions")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        print(f"encode.py: error: {error}", file=sys.stderr)
        sys.exit(2)
