"""`contaccum fit DATA`: train a retriever on pairs, and test whether it is better than before."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from contaccum.cli.options import Parser, print_at_once
from contaccum.defaults import DEFAULT_MODEL
from contaccum.settings import parse_bool, read

EXIT_CODE_NOT_BETTER = 1
"""Exit code if a verdict is not the one that ``--require`` demands."""


def run(argv: Sequence[str]) -> int:
    """Train a retriever, and print and write the verdict.

    Returns:
        Exit code 0, or 1 if a verdict is not the one that ``--require`` demands.

    Raises:
        UserError: if the arguments, the data or the model cannot be used.
    """
    parser = _make_parser()
    args, training_arguments = parser.parse_known_args(argv)

    from contaccum.experiments.fit import fit
    from contaccum.experiments.verdict import BETTER

    result = fit(
        args.data,
        args.model,
        args.budget,
        args.output,
        corpus=args.corpus,
        corpus_columns=args.corpus_columns,
        data_format=args.data_format,
        data_columns=args.data_columns,
        on_bad_record=args.on_bad_record,
        min_score=args.min_score,
        dev=args.dev,
        test=args.test,
        future=args.future,
        bm25=args.bm25,
        guard=args.guard,
        print_line=print_at_once,
        **read(training_arguments, parser.option_names),
    )
    words = {verdict.word for verdict in result.verdicts.values()}
    if args.require is not None and words != {BETTER}:
        return EXIT_CODE_NOT_BETTER
    return 0


def _make_parser() -> Parser:
    """Return the parser of all options except those of `contaccum train`."""
    parser = Parser(
        "fit",
        "Hold out dev and test sets, score BM25 and the model before training, train in several "
        "ways within a time budget, choose on dev, and test whether training has paid. A --key of "
        "`contaccum train` that is given here is fixed and not chosen.",
        "corpus_columns",
        "on_bad_record",
        usage="contaccum fit DATA [OPTIONS] [--key value ...]",
    )
    parser.add_argument(
        "data",
        metavar="DATA",
        help="pairs in any format of docs/data.md, or a folder that contaccum split wrote",
    )
    parser.add_argument(
        "--model",
        nargs="+",
        default=[DEFAULT_MODEL],
        metavar="MODEL",
        help="model to train, or several, of which the best one on dev is trained; default: "
        f"{DEFAULT_MODEL}",
    )
    parser.add_argument(
        "--corpus",
        type=Path,
        metavar="PATH",
        help="documents; dev and test are searched in all of them",
    )
    parser.add_budget_options(
        "the whole command, with the final training and the test", Path("runs/fit")
    )
    parser.add_data_options()
    parser.add_argument(
        "--min_score",
        type=float,
        metavar="SCORE",
        help="least score or label of a pair that is a match, for scored pairs",
    )
    parser.add_held_out_options()
    parser.add_argument(
        "--bm25",
        type=parse_bool,
        default=True,
        metavar="BOOL",
        help="false: search with vectors alone, for engines that have no BM25; default: true",
    )
    parser.add_argument(
        "--guard",
        nargs="+",
        metavar="SET",
        help="other data, BEIR folders or public names, on which the model must not lose more than "
        "0.01 nDCG@10",
    )
    parser.add_argument(
        "--require",
        choices=["better"],
        help="end with exit code 1 unless the verdict, or each of two, is BETTER",
    )
    return parser
