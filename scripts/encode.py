"""Encode a corpus: `python scripts/encode.py MODEL --corpus PATH --output FOLDER`, same as `contaccum encode`."""

import sys

from contaccum.cli import main

if __name__ == "__main__":
    sys.exit(main(["encode", *sys.argv[1:]]))
