"""The parser of every command, and the options that several share: each is declared once, under one name."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from contaccum.errors import ConfigError, hint, in_our_names

PRECISIONS = ("float32", "bfloat16", "float16")


class Parser(argparse.ArgumentParser):
    """Has options of `SHARED`, by name; refuses in one line, which is raised, and names the closest option."""

    def __init__(
        self, command: str, description: str, *shared: str, usage: str | None = None
    ) -> None:
        form = partial(argparse.HelpFormatter, max_help_position=34)
        super().__init__(
            f"contaccum {command}", usage, description, allow_abbrev=False, formatter_class=form
        )
        for name in shared:
            self.add_argument(f"--{name}", **SHARED[name])

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see {self.prog} --help)")

    def add_model(self, text: str) -> None:
        """MODEL in its place, or as ``--model``, as `contaccum train` has it."""
        self.add_argument("model", nargs="?", metavar="MODEL", default=argparse.SUPPRESS, help=text)
        self.add_argument("--model", help=argparse.SUPPRESS)

    def parse(self, argv: Sequence[str], rest: bool = False) -> Any:
        """`parse_args`, in other tools' names too; an unknown option is told which one it is like.

        With ``rest``, those unknown are returned as well.
        """
        if "_ARGCOMPLETE" in os.environ:
            import argcomplete

            argcomplete.autocomplete(self)  # which ends here
        known = [action.dest for action in self._actions]  # argparse shows them nowhere else
        parsed, unknown = self.parse_known_args(in_our_names(argv, known))
        if unknown and not rest:
            like = hint(unknown[0].split("=")[0].lstrip("-"), known)
            raise ConfigError(f"unknown argument {unknown[0]!r}{like} (see {self.prog} --help)")
        return (parsed, unknown) if rest else parsed


def completed(commands: Iterable[str]) -> str:
    """The command of the line that the shell has; without one, tells it which ``commands`` there are, and ends."""
    words = os.environ["COMP_LINE"][: int(os.environ["COMP_POINT"])].split(" ")
    if len(words) > 2 and words[1] in commands:
        os.environ["_ARGCOMPLETE"] = "2"  # the words from here on are the parser's
        return words[1]
    parser = Parser("", "")
    parser.add_argument("command", choices=list(commands))
    parser.parse([])
    return ""


def positive(text: str) -> int:
    """A type for options: a whole number of at least 1."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return int(text)


SHARED: dict[str, dict[str, Any]] = {
    "batch_size": {
        "type": positive,
        "default": 32,
        "metavar": "N",
        "help": "texts encoded at once",
    },
    "precision": {"choices": PRECISIONS, "default": "float32", "help": "that the encoder runs in"},
    "device": {"help": "of the model, such as cpu or cuda:1"},
    "trust_remote_code": {"action": "store_true", "help": "run code that comes with the model"},
    "query_max_length": {
        "type": int,
        "metavar": "TOKENS",
        "help": "tokens of a query; default: the model's own",
    },
    "passage_max_length": {
        "type": int,
        "metavar": "TOKENS",
        "help": "tokens of a passage; default: the model's own",
    },
    "similarity": {"choices": ("cos", "dot"), "help": "default: the model's own"},
    "index": {
        "default": "Flat",
        "metavar": "FACTORY",
        "help": "FAISS factory string; Flat is exact",
    },
    "index_parameters": {
        "metavar": "NAME=VALUE",
        "help": "FAISS search parameters, such as nprobe=32",
    },
    "on_bad_record": {
        "choices": ("stop", "skip"),
        "default": "stop",
        "help": "at a record that cannot be used",
    },
    "no_progress": {"action": "store_true", "help": "show no progress bars"},
    "output": {"type": Path, "required": True, "metavar": "PATH", "help": "what to write"},
}

MODEL = (
    "batch_size",
    "precision",
    "query_max_length",
    "on_bad_record",
    "device",
    "no_progress",
    "trust_remote_code",
)
"""The options of every command that encodes."""
SEARCH = ("index", "index_parameters", "similarity", "passage_max_length", *MODEL)
"""The options of the commands that encode and search in memory."""


def load_model(name: str, args: argparse.Namespace) -> Any:
    """The model ``name`` as the command line says; raises `UserError` for a model or device that cannot be used."""
    import torch

    from contaccum.encoders.dual_encoder import DualEncoder
    from contaccum.encoders.settings import set_max_lengths

    try:
        torch.empty(0, device=args.device)  # before a model is read for it
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"--device {args.device!r} cannot be used here: {str(error).splitlines()[0]}"
        ) from error
    model = DualEncoder.from_pretrained(
        name, device=args.device, trust_remote_code=args.trust_remote_code
    )
    set_max_lengths(model, args.query_max_length, args.passage_max_length)
    return model


def search_settings(args: argparse.Namespace) -> dict[str, Any]:
    """How the commands that search in memory do it, as `contaccum.evaluation.beir_sets.search` takes it."""
    names = ("index", "index_parameters", "batch_size", "similarity", "precision")
    return {name: getattr(args, name) for name in names}
