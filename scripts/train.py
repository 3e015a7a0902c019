"""Train a retriever: `python scripts/train.py CONFIG.yaml [--key value ...]`, the same as `contaccum train`."""

import sys

from contaccum.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
