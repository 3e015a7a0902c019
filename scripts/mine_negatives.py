"""Mine hard negatives: `python scripts/mine_negatives.py MODEL --data DATA --output OUT`, same as `contaccum mine`."""

import sys

from contaccum.cli import main

if __name__ == "__main__":
    sys.exit(main(["mine", *sys.argv[1:]]))
