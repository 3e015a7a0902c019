# PYTHON_ARGCOMPLETE_OK
"""The `contaccum` command: finds the subcommand, turns the user's mistakes into one line and exit code 2.

Exit codes: 0 done; 2 a mistake of the user's; 130 and 143 stopped by SIGINT and SIGTERM, training after it has saved;
1 (with a traceback) a defect of ours. Each command is a module with ``run(argv) -> int``, loaded on use.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from contaccum import __version__
from contaccum.cli.options import completed
from contaccum.errors import UserError, closest
from contaccum.files import redact

COMMANDS = {
    "quickstart": "train a small encoder on SciFact and score it before and after",
    "new": "look at your training data and write a config for it",
    "split": "hold out dev and test sets from your training data",
    "fit": "train on your pairs within a budget of time, and say whether it is better",
    "tune": "choose the settings of a run by scores on dev data, within a budget of time",
    "train": "train a retriever from a YAML config and overrides",
    "evaluate": "score a model on BEIR data with FAISS",
    "mine": "find hard negatives for training data",
    "encode": "encode a corpus of any size into a memory-mapped store",
    "search": "search a store for queries, and write a TREC run",
    "export": "write a model as folders that embedding servers load",
    "open_qa": "score passage retrieval for questions by answer match, as DPR does",
    "compare": "train methods side by side and report which is better",
    "report": "draw runs, comparisons and evaluations as one HTML page",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``contaccum ARGV`` and return the exit code."""
    name, *rest = list(sys.argv[1:] if argv is None else argv) or [""]
    if (
        "_ARGCOMPLETE" in os.environ
    ):  # the shell asks what can come next: which commands, or what its parser knows
        name, rest = completed(COMMANDS), []
    try:
        if name in COMMANDS:
            return importlib.import_module(f"contaccum.cli.{name}").run(rest)
        if name and name not in ("-h", "--help", "--version"):
            raise UserError(
                f"no command {name!r}{closest(name, COMMANDS) or '; there are ' + ', '.join(COMMANDS)}"
            )
    except UserError as error:
        rank = os.environ.get("RANK", "0")  # several processes may fail over the same thing
        where = f" on rank {rank}" if rank != "0" else ""
        print(f"contaccum: error{where}: {redact(' '.join(str(error).split()))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("contaccum: interrupted", file=sys.stderr)
        return 130
    if name == "--version":
        print(f"contaccum {__version__}")
        return 0
    lines = [f"  {command:<11} {text}" for command, text in COMMANDS.items()]
    lines += ["", "contaccum COMMAND --help lists the options of a command."]
    print("\n".join(["usage: contaccum COMMAND [OPTIONS]", "", *lines]))
    return 0 if name else 2
