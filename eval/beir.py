"""`python eval/beir.py MODEL --data DIR --output out.json` is `contaccum evaluate MODEL ...`; nothing lives here."""

import sys
from pathlib import Path

if __name__ == "__main__":
    # Python puts this folder first on the path, where this file would be taken for the `beir` package; the
    # checkout takes its place.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

    from contaccum.cli import main

    sys.exit(main(["evaluate", *sys.argv[1:]]))
