"""What the commands that score a model share: their parser, the options of model and search, and what these mean."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from typing import Any, NoReturn

from contaccum.errors import ConfigError
from contaccum.retrieval.encoding import AUTOCAST_DTYPES


class Parser(argparse.ArgumentParser):
    """Refuses as the rest of contaccum does: one line, raised, not printed with the usage; names the closest option."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see {self.prog} --help)")

    def parse(self, argv: Sequence[str] | None = None) -> argparse.Namespace:
        """`parse_args`, where an unknown option is told which one it is like."""
        parsed, unknown = self.parse_known_args(argv)
        if unknown:
            options = [option for action in self._actions for option in action.option_strings]
            name = unknown[0].split("=")[0]
            close = difflib.get_close_matches(name.replace("-", "_"), [o.replace("-", "_") for o in options], n=1)
            hint = f"; did you mean --{close[0].lstrip('_')}?" if close else ""
            raise ConfigError(f"unknown argument {unknown[0]!r}{hint} (see {self.prog} --help)")
        return parsed


def add_search_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of encoding and searching, which `load_model` and `search_settings` read."""
    parser.add_argument("--index", default="Flat", help="FAISS factory string; Flat is exact")
    parser.add_argument("--index_parameters", help="FAISS search parameters, such as nprobe=32")
    parser.add_argument("--similarity", choices=("cos", "dot"), help="default: the model's own")
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--precision", choices=("float32", *AUTOCAST_DTYPES), default="float32")
    parser.add_argument("--query_max_length", type=int, metavar="TOKENS")
    parser.add_argument("--passage_max_length", type=int, metavar="TOKENS")
    parser.add_argument("--on_bad_record", choices=("stop", "skip"), default="stop")
    parser.add_argument("--device", help="of the model, such as cpu or cuda:1")
    parser.add_argument("--no_progress", action="store_true")
    parser.add_argument("--trust_remote_code", action="store_true", help="run code that comes with the model")


def load_model(args: argparse.Namespace) -> Any:
    """The model of the command line, with the lengths that it asks for; raises `UserError` when there is none."""
    from contaccum.encoders import DualEncoder, set_max_lengths

    model = DualEncoder.from_pretrained(args.model, device=args.device, trust_remote_code=args.trust_remote_code)
    set_max_lengths(model, args.query_max_length, args.passage_max_length)
    return model


def search_settings(args: argparse.Namespace) -> dict[str, Any]:
    """What `check_search` takes beside the model and the number of documents."""
    return {
        "index": args.index,
        "index_parameters": args.index_parameters,
        "batch_size": args.batch_size,
        "autocast_dtype": None if args.precision == "float32" else args.precision,
        "similarity": args.similarity,
    }
