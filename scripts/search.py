"""Search a store: `python scripts/search.py MODEL --store FOLDER --queries FILE`, same as `contaccum search`."""

import sys

from contaccum.cli import main

if __name__ == "__main__":
    sys.exit(main(["search", *sys.argv[1:]]))
