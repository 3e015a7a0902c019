"""`contaccum fit DATA`: train a retriever on pairs, and test whether it is better than before."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from contaccum.cli.options import Parser, is_first_process, print_at_once
from contaccum.data.beir import resolve_beir_data
from contaccum.data.records import SPLIT_RECORD, RecordSource, parse_columns
from contaccum.data.split import SplitSettings
from contaccum.encoders.names import DEFAULT_MODEL, find_demo_model, model_name, require_model
from contaccum.errors import UserError
from contaccum.experiments.request import parse_duration, read_given
from contaccum.files import require_exists
from contaccum.settings import parse_bool, read

DEFAULT_BUDGET = "30m"
DEMO_DATA = Path(__file__).resolve().parents[1] / "data" / "medquad" / "medquad.csv"
DEMO_BUDGET = "5m"
DEMO_LENGTH = 128  # tokens of a passage; the answers are longer, but the time is short
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
    settings = read(training_arguments, parser.option_names)
    if args.demo:
        _set_up_demo(args, settings)
    elif args.data is None:
        parser.error("name the DATA, or try --demo, which needs none of your own")
    args.model = args.model or [DEFAULT_MODEL]
    args.budget = args.budget or DEFAULT_BUDGET
    read_given(settings)
    parse_duration(args.budget)
    fitted = f"a map of {args.vectors}"
    if args.vectors is None:
        fitted = ", ".join(map(model_name, args.model))
    data = "the demo's pairs" if args.data == str(DEMO_DATA) else args.data
    print_at_once(f"fitting {fitted} to {data} in {args.budget}")
    if is_first_process():
        _require_files(args)
    from contaccum.experiments.fit import fit
    from contaccum.experiments.verdict import BETTER

    options = vars(args)
    del options["demo"]
    required_word = options.pop("require")
    result = fit(**options, print_line=print_at_once, **settings)
    words = {verdict.word for verdict in result.verdicts.values()}
    return EXIT_CODE_NOT_BETTER if required_word and words != {BETTER} else 0


def _set_up_demo(args: argparse.Namespace, settings: dict[str, Any]) -> None:
    """Set data, model, budget and length for a first fit, unless the user has set them.

    Raises:
        UserError: if the model is neither installed nor to be had from the hub.
    """
    if args.data is None:
        args.data = str(DEMO_DATA)
    if args.budget is None:
        args.budget = DEMO_BUDGET
    settings.setdefault("passage_max_length", DEMO_LENGTH)
    if args.model is None:
        args.model = [find_demo_model()]
        try:
            require_model(args.model[0])
        except UserError as error:
            raise UserError(
                f"{error}. Install the model with pip install 'contaccum[demo]', or name a folder "
                "with --model FOLDER"
            ) from error


def _require_files(args: argparse.Namespace) -> None:
    """Refuse data and a model that `fit` would refuse, before torch is imported."""
    SplitSettings(args.dev, args.test, future=args.future)
    parse_columns(args.corpus_columns, "corpus_columns")
    data = Path(args.data).expanduser()
    for path in (data, args.corpus, args.vectors, args.generated):
        if path is not None:
            require_exists(path.expanduser())
    if not (data / SPLIT_RECORD).is_file():
        RecordSource(data, columns=args.data_columns, min_score=args.min_score)
    for name in args.guard or []:
        resolve_beir_data(name)
    # Of several models, one that cannot be loaded is left out; vectors take the place of a model.
    if args.vectors is None and len(args.model) == 1:
        require_model(args.model[0])


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
        nargs="?",
        metavar="DATA",
        help="pairs in any format of docs/data.md, or a folder that contaccum split wrote",
    )
    parser.add_argument(
        "--model",
        nargs="+",
        metavar="MODEL",
        help="model to train, or several, of which the best one on dev is trained; default: "
        f"{DEFAULT_MODEL}",
    )
    parser.add_argument(
        "--demo",
        action="store_true",
        help="fit the 2,000 questions and answers of MedQuAD that come with contaccum, in "
        f"{DEMO_BUDGET}",
    )
    parser.add_argument(
        "--corpus",
        type=Path,
        metavar="PATH",
        help="documents; dev and test are searched in all of them",
    )
    parser.add_argument(
        "--budget",
        metavar="TIME",
        help="wall-clock time of the whole command, with the final training and the test, such as "
        f"90s, 30m or 2h; default: {DEFAULT_BUDGET}",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("runs/fit"),
        metavar="DIR",
        help="folder of all results; default: %(default)s",
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
        "--vectors",
        type=Path,
        metavar="DIR",
        help="folder with the vectors of queries and documents, in place of a model: find the best "
        "linear map of the query vectors (docs/vectors.md)",
    )
    parser.add_argument(
        "--new_queries",
        "--new-queries",
        metavar="MODEL",
        help="with --vectors: a new model for queries, whose vectors are mapped to the old ones of "
        "the documents; the verdict says what it costs against encoding all documents anew",
    )
    parser.add_argument(
        "--generated",
        type=Path,
        metavar="PATH",
        help="questions of contaccum questions, or other pairs, that are never in dev or test",
    )
    parser.add_argument(
        "--require",
        choices=["better"],
        help="end with exit code 1 unless the verdict, or each of two, is BETTER",
    )
    return parser
