"""The argument parser of all commands, and the options that several commands share."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from contaccum.errors import ConfigError, closest
from contaccum.settings import Settings, add_option

if TYPE_CHECKING:
    from contaccum.encoders.dual_encoder import DualEncoder


class Parser(argparse.ArgumentParser):
    """An argument parser that raises `ConfigError` instead of ending the process.

    ``shared_options`` are names in `SHARED_OPTIONS`, or of settings of a training.
    """

    def __init__(
        self, command: str, description: str, *shared_options: str, usage: str | None = None
    ) -> None:
        super().__init__(
            prog=f"contaccum {command}", usage=usage, description=description, allow_abbrev=False
        )
        for name in shared_options:
            if name in SHARED_OPTIONS:
                self.add_argument(f"--{name}", **SHARED_OPTIONS[name])
            else:
                add_option(self, name)
                self.set_defaults(**{name: getattr(Settings(), name)})

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see {self.prog} --help)")

    def add_held_out_options(self) -> None:
        """Add the sizes of the dev and test sets, and the documents of their queries."""
        for name, default in (("dev", "0.1, at most 500"), ("test", "0.2, at most 1,000")):
            size = f"number of {name} queries, or their share if below 1; default: {default}"
            self.add_argument(f"--{name}", type=float, metavar="SIZE", help=size)
        self.add_argument(
            "--future",
            choices=["known", "new", "both"],
            help="documents of the held-out queries: known to training by other queries, new, or "
            "half of each; default: both if the data have enough queries on known documents, else "
            "new",
        )

    @property
    def option_names(self) -> set[str]:
        """The names of all options, without dashes."""
        # argparse has no public list of its options. Positional arguments have no strings.
        return {action.dest for action in self._actions if action.option_strings}

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        names = self.option_names
        # Before argparse, which would report a misspelt required option as a missing one.
        options = [word for word in argv if word.startswith("--")]
        unknown = [word for word in options if word[2:].split("=")[0] not in names]
        if not unknown:
            args, unknown = self.parse_known_intermixed_args(argv)
        if unknown:
            suggestion = closest(unknown[0].split("=")[0].lstrip("-"), names)
            raise ConfigError(
                f"unknown argument {unknown[0]!r}{suggestion} (see {self.prog} --help)"
            )
        return args


def is_first_process() -> bool:
    """Return True in the first process of a distributed run, before torch is imported."""
    return os.environ.get("RANK", "0") == "0"


def print_at_once(line: str) -> None:
    """Print a line at once, in the first process; on a terminal, wrap it between words.

    Each command prints what it does before it imports torch, which takes up to fifteen seconds.
    """
    if not is_first_process():
        return
    if sys.stdout.isatty():
        width = shutil.get_terminal_size().columns
        line = textwrap.fill(
            line, width, subsequent_indent="   ", break_long_words=False, break_on_hyphens=False
        )
    print(line, flush=True)


def positive_int(text: str) -> int:
    """Return a number of at least 1; argparse names this function in its error."""
    if int(text) < 1:
        raise ValueError
    return int(text)


MODEL_HELP = "the encoder: a folder, or a name on the model hub"

SHARED_OPTIONS: dict[str, dict[str, Any]] = {
    "corpus_columns": {
        "nargs": "+",
        "metavar": "ROLE=NAME",
        "help": "column names in the corpus, such as id=chunk_id text=content title=heading",
    },
    "batch_size": {
        "type": positive_int,
        "default": 32,
        "metavar": "N",
        "help": "texts per batch; on a CPU at most 8, which is faster; default: %(default)s",
    },
    "precision": {
        "choices": ["float32", "bfloat16", "float16"],
        "default": "float32",
        "help": "type of autocast; float32: none, so that of the weights; default: %(default)s",
    },
    "device": {"help": "device of the model, such as cpu or cuda:1"},
    "trust_remote_code": {
        "action": "store_true",
        "help": "allow Python code that comes with the model to run",
    },
    "index": {
        "default": "Flat",
        "metavar": "FACTORY",
        "help": "FAISS index factory string; default: Flat, which is exact search",
    },
    "index_parameters": {
        "metavar": "NAME=VALUE",
        "help": "FAISS search parameters, such as nprobe=32",
    },
    "no_progress": {"action": "store_true", "help": "do not show progress bars"},
}

ENCODING_OPTIONS = (
    "batch_size",
    "precision",
    "passage_max_length",
    "on_bad_record",
    "device",
    "no_progress",
    "trust_remote_code",
)
"""Shared options of every command that encodes passages, or searches encoded ones."""


def load_model(name: str, args: argparse.Namespace) -> DualEncoder:
    """Load a model with the device, maximum lengths and code trust that the command line sets."""
    import torch

    from contaccum.encoders.dual_encoder import DualEncoder
    from contaccum.encoders.settings import set_max_lengths

    # The device is checked before a large model is read from disk.
    try:
        torch.empty(0, device=args.device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"--device {args.device!r} cannot be used on this machine: {reason}"
        ) from error
    model = DualEncoder.from_pretrained(
        name, device=args.device, trust_remote_code=args.trust_remote_code
    )
    query_max_length = getattr(args, "query_max_length", None)
    set_max_lengths(model, query_max_length, getattr(args, "passage_max_length", None))
    return model
