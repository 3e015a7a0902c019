"""`python eval/bench_search.py [OPTIONS]` is `contaccum bench search [OPTIONS]`; nothing lives here."""

import sys
from pathlib import Path

if __name__ == "__main__":
    # Python puts this folder first on the path, where beir.py would be taken for the `beir` package.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

    from contaccum.cli import main

    sys.exit(main(["bench", "search", *sys.argv[1:]]))
