"""`contaccum fit DATA`: from a file of pairs to a trained retriever, and a verdict whether it is better."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from contaccum.cli.options import Parser

NOT_AS_REQUIRED = 1
"""Exit code where --require is not met."""


def run(argv: Sequence[str]) -> int:
    """Fit; returns 0, or 1 where ``--require`` is not met. Raises `UserError` for the user's mistakes."""
    parser = Parser(
        "fit",
        "Hold out dev and test sets, score BM25 and the model as it is, search settings on dev within a budget of "
        "time, train, and say on test whether the result is better. A --key of `contaccum train` that is given here "
        "is not searched.",
        "on_bad_record",
        usage="contaccum fit DATA [OPTIONS] [--key value ...]",
    )
    add = parser.add_argument
    add(
        "data",
        metavar="DATA",
        help="pairs, as contaccum train takes them, or a folder of contaccum split",
    )
    add("--model", default="sentence-transformers/all-MiniLM-L6-v2", help="default: %(default)s")
    add(
        "--corpus",
        type=Path,
        metavar="PATH",
        help="documents, all of which dev and test are searched in",
    )
    add(
        "--budget",
        default="30m",
        metavar="TIME",
        help="wall time, such as 90s, 30m or 2h; default: %(default)s",
    )
    add("--output", type=Path, default=Path("runs/fit"), metavar="DIR", help="default: %(default)s")
    add("--data_format", help="default: detected from the content")
    add(
        "--data_columns",
        nargs="+",
        metavar="ROLE=NAME",
        help="names of columns: query=question ...",
    )
    add("--dev", type=float, metavar="SIZE", help="queries, or below 1 a share; default: 0.1")
    add("--test", type=float, metavar="SIZE", help="queries, or below 1 a share; default: 0.2")
    add("--require", choices=["better"], help="exit code 1 unless the verdict is BETTER")
    args, rest = parser.parse(argv, rest=True)

    from contaccum.comparison.options import all_options
    from contaccum.fitting.folder import FitFolder
    from contaccum.fitting.pipeline import Fit
    from contaccum.fitting.source import DataSource
    from contaccum.fitting.verdict import BETTER
    from contaccum.tuning.budget import parse_duration

    given = all_options([], rest)
    source = DataSource(
        path=Path(args.data),
        corpus=args.corpus,
        data_format=args.data_format,
        columns=args.data_columns,
        on_bad_record=args.on_bad_record,
        dev=args.dev,
        test=args.test,
    )
    result = Fit(
        source, args.model, given, parse_duration(args.budget), FitFolder(args.output), _say
    ).run()
    if args.require is not None and result.verdict.word != BETTER:
        return NOT_AS_REQUIRED
    return 0


def _say(line: str) -> None:
    print(line, flush=True)
