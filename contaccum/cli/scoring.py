"""Options of `contaccum evaluate`: what is scored, and where the results go."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from contaccum.cli.options import Parser
from contaccum.errors import ConfigError
from contaccum.files import require_writable

_OPTIONS_OF_A_SEARCH = (
    "index",
    "index_parameters",
    "similarity",
    "precision",
    "query_max_length",
    "passage_max_length",
)


def parse_scoring_arguments(
    parser: Parser, argv: Sequence[str], default_output: Path, default_k_values: Sequence[int]
) -> argparse.Namespace:
    """Add the shared options to a parser, parse the command line, and check these options.

    The shared options are MODEL or ``--run``, ``--output`` and ``--k_values``.

    Raises:
        ConfigError: if both or none of MODEL and ``--run`` are given, or an option has a value
            that cannot be used.
    """
    from contaccum.evaluation.metrics import check_k_values

    parser.add_model("the encoder to search with: a folder, or a name on the model hub")
    parser.add_argument(
        "--run",
        type=Path,
        metavar="RUN.trec",
        help="score this run instead of searching with a MODEL",
    )
    parser.add_argument(
        "--output",
        default=default_output,
        type=Path,
        metavar="OUT.json",
        help="file of the results; with several data sets, OUT.NAME.json is written for each; "
        "default: %(default)s",
    )
    parser.add_argument(
        "--k_values",
        nargs="+",
        type=int,
        default=default_k_values,
        metavar="K",
        help=f"cut-offs of the metrics; default: {' '.join(map(str, default_k_values))}",
    )
    args = parser.parse(argv)
    args.k_values = check_k_values(args.k_values)
    has_model = args.model is not None
    has_run = args.run is not None
    if has_model == has_run:
        raise ConfigError(
            "name either a MODEL to search with, or a --run to score; write MODEL before options "
            f"that take several values (see {parser.prog} --help)"
        )
    if has_run:
        reason = "does nothing with --run, which is the result of a search"
        parser.refuse_given(args, _OPTIONS_OF_A_SEARCH, reason)
    if args.output.suffix != ".json":
        raise ConfigError(
            f"--output {args.output}: the output is JSON, with a .trec file beside it; "
            "end its name in .json"
        )
    if has_run and args.run.resolve() == args.output.with_suffix(".trec").resolve():
        raise ConfigError(
            f"--output {args.output}: its .trec file would replace the --run; choose another name"
        )
    require_writable(args.output)
    return args
