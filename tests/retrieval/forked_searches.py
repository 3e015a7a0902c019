"""`contaccum search` on several ranks, which are forks of this process; prints JSON.

The first argument names a file with a list of [number of ranks, arguments of the command]. The
exit codes of all ranks are printed for each command, and the folder in the second argument gets
what rank R of command N writes to stderr, as stderr-N-R.txt.
"""

import contextlib
import json
import sys
from pathlib import Path

from forks import run_on_ranks

import contaccum.cli.search
import contaccum.encoders.dual_encoder
import contaccum.retrieval.rank_search  # noqa: F401
from contaccum.cli import main

ROOT = Path(sys.argv[2])


def search(command_number: int, argv: list[str], rank: int) -> None:
    """Run `contaccum search` on this rank."""
    path = ROOT / f"stderr-{command_number}-{rank}.txt"
    with path.open("w") as stderr, contextlib.redirect_stderr(stderr):
        sys.exit(main(["search", *argv]))


exit_codes = []
for number, (num_ranks, argv) in enumerate(json.loads(Path(sys.argv[1]).read_text())):

    def search_on_rank(rank: int, number: int = number, argv: list[str] = argv) -> None:
        search(number, argv, rank)

    exit_codes.append(run_on_ranks(ROOT, num_ranks, search_on_rank))
print(json.dumps({"exit_codes": exit_codes}))
