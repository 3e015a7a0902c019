"""The `contaccum` command: finds the subcommand, turns the user's mistakes into one line and exit code 2.

Exit codes: 0 done; 2 a mistake of the user's; 130 and 143 stopped by SIGINT and SIGTERM, training after it has saved;
1 (with a traceback) a defect of ours.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Sequence

from contaccum.errors import UserError
from contaccum.redaction import redacted_output
from contaccum.version import __version__

# name -> (module with run(argv) -> int, one line of help). Modules load on use: --help needs no torch.
COMMANDS = {
    "train": ("contaccum.training.command", "train a retriever from a YAML config and overrides"),
    "mine": ("contaccum.mining.command", "find hard negatives for training data"),
    "encode": ("contaccum.retrieval.encode_command", "encode a corpus of any size into a memory-mapped store"),
    "search": ("contaccum.retrieval.search_command", "search a store for queries, and write a TREC run"),
    "evaluate": ("contaccum.evaluation.command", "score a model on BEIR data with FAISS"),
    "open_qa": ("contaccum.evaluation.open_qa", "score passage retrieval for questions by answer match, as DPR does"),
    "reproduce": ("contaccum.reproduction.command", "the paper's main table, from download to score"),
    "compare": ("contaccum.comparison.command", "train methods side by side and report which is better"),
    "report": ("contaccum.reports.command", "draw runs, comparisons and evaluations as one HTML page"),
    "bench": (
        "contaccum.benchmarks.command",
        "measure updates, the loss, the trainer, samplers, readers, mining, encoding, search, long runs",
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``contaccum ARGV`` and return the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    with redacted_output():
        try:
            return _dispatch(arguments)
        except UserError as error:
            rank = os.environ.get("RANK", "0")  # several processes may fail over the same thing
            where = "" if rank == "0" else f" on rank {rank}"
            print(f"contaccum: error{where}: {' '.join(str(error).split())}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            print("contaccum: interrupted", file=sys.stderr)
            return 130


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_usage())
        return 0 if arguments else 2
    if arguments[0] == "--version":
        print(f"contaccum {__version__}")
        return 0
    name, rest = arguments[0], arguments[1:]
    if name not in COMMANDS:
        close = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else f"; there are {', '.join(COMMANDS)}"
        raise UserError(f"no command {name!r}{hint}")
    return importlib.import_module(COMMANDS[name][0]).run(rest)


def _usage() -> str:
    lines = ["usage: contaccum COMMAND [OPTIONS]", "", "commands:"]
    lines += [f"  {name:<10} {text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join([*lines, "", "contaccum COMMAND --help lists the options of a command."])


if __name__ == "__main__":
    sys.exit(main())
