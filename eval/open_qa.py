"""`python eval/open_qa.py MODEL --questions Q --passages P` is `contaccum open_qa MODEL ...`; nothing lives here."""

import sys
from pathlib import Path

if __name__ == "__main__":
    # Python puts this folder first on the path, where beir.py would be taken for the `beir` package.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

    from contaccum.cli import main

    sys.exit(main(["open_qa", *sys.argv[1:]]))
