"""The `contaccum` command. Each subcommand is a module of this package with ``run(argv) -> int``.

Importing torch takes up to fifteen seconds, so it is imported inside of functions: after the
options and files are checked, and after a line that says what the command does.

Exit codes:
    0: success.
    1: a defect of contaccum, with a traceback. For `fit` and `evaluate` it also means that the
        result does not meet ``--require``.
    2: a `UserError`, or a disk that is full or cannot be written, which is printed as one line.
    130, 143: stopped by SIGINT or SIGTERM. Training saves a checkpoint first.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from contaccum import __version__, progress
from contaccum.errors import UserError, closest
from contaccum.files import describe_failed_write
from contaccum.redaction import redact

COMMANDS = {
    "split": "hold out dev and test sets from training data",
    "fit": "train and test within a time budget, from a file of pairs",
    "train": "train a retriever from YAML configs and command-line options",
    "evaluate": "score a model on BEIR data with FAISS",
    "mine": "mine hard negatives for training data",
    "questions": "write questions for documents with a language model, to train on",
    "encode": "encode a corpus of any size into a memory-mapped embedding store",
    "search": "search an embedding store for queries and write a TREC run",
    "export": "write a model as folders that embedding servers can load",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``contaccum ARGV``, by default that of ``sys.argv``, and return the exit code."""
    if argv is None:
        argv = sys.argv[1:]
    if not argv or argv[0] in ("-h", "--help"):
        _print_help()
        return 0 if argv else 2
    command = argv[0]
    if command == "--version":
        print(f"contaccum {__version__}")
        return 0
    try:
        if command not in COMMANDS:
            suggestion = closest(command, COMMANDS) or f"; the commands are {', '.join(COMMANDS)}"
            raise UserError(f"unknown command {command!r}{suggestion}")
        module = importlib.import_module(f"contaccum.cli.{command}")
        words = [word for word in argv[1:] if word != "--verbose"]
        progress.verbose = len(words) < len(argv) - 1
        if not progress.verbose:
            # Those of downloads, of loading weights and of data sets, unless the user has set it.
            for library in ("HF_HUB", "HF_DATASETS"):
                os.environ.setdefault(f"{library}_DISABLE_PROGRESS_BARS", "1")
        return module.run(words)
    except UserError as error:
        return _print_error(str(error))
    except Exception as error:
        reason = describe_failed_write(error)
        if reason is None:
            raise
        file = getattr(error, "filename", None) or f"a file of contaccum {command}"
        return _print_error(
            f"{file}: cannot be read or written ({reason}); free space, or correct the path or its "
            "permissions, and start the command again"
        )
    except KeyboardInterrupt:
        print("contaccum: interrupted", file=sys.stderr)
        return 130


def _print_error(message: str) -> int:
    """Print the line of an error, and return its exit code."""
    # Every process of a distributed run may fail with the same error.
    rank = os.environ.get("RANK", "0")
    place = "" if rank == "0" else f" on rank {rank}"
    line = redact(" ".join(message.split()))
    print(f"contaccum: error{place}: {line}", file=sys.stderr)
    return 2


def _print_help() -> None:
    print("usage: contaccum COMMAND [OPTIONS]\n")
    for command, description in COMMANDS.items():
        print(f"  {command:<11} {description}")
    print("\ncontaccum COMMAND --help lists the options of a command.")
    print("--verbose shows the progress bars and messages of the libraries.")
