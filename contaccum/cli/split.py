"""`contaccum split DATA DIR`: hold out dev and test sets from training data."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from contaccum.cli.options import Parser
from contaccum.data.dataset import parse_training_sets
from contaccum.data.records import RecordSource
from contaccum.data.rows import RecordReport
from contaccum.data.split import SplitSettings, split_data


def run(argv: Sequence[str]) -> int:
    """Write a split and return exit code 0."""
    args = _parse_arguments(argv)
    settings = SplitSettings(args.dev, args.test, args.documents, args.seed, args.fold, args.future)
    defaults = {"split": args.split, "columns": args.data_columns}
    [source_settings] = parse_training_sets([args.data], defaults).values()
    report = RecordReport(args.on_bad_record)
    source = RecordSource(**source_settings)
    split = split_data(
        source,
        args.output,
        settings,
        args.corpus,
        report,
        not args.no_progress,
        corpus_columns=args.corpus_columns,
    )

    print(f"{args.data}: {source.describe_first_record()}")
    if report.reported or report.repeated.total():
        print(report.summary())
    for warning in split.warnings():
        print(f"warning: {warning}")
    print(split.summary())
    counts = [f"{side} {num_documents:,}" for side, num_documents in split.documents.items()]
    print(
        f"written: train.jsonl, corpus.jsonl and the folders dev and test in {args.output} "
        f"(documents: {', '.join(counts)})"
    )
    return 0


def _parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    defaults = SplitSettings()
    parser = Parser(
        "split",
        "Hold out dev and test sets from training data. Training records that share a text with "
        "them are left out of train.jsonl.",
        "corpus_columns",
        "data_columns",
        "on_bad_record",
        "no_progress",
        usage="contaccum split DATA DIR [OPTIONS]",
    )
    add = parser.add_argument
    add("data", metavar="DATA", help="training data in any format of docs/data.md")
    output = "new folder, in which train.jsonl, corpus.jsonl, dev and test are written"
    add("output", type=Path, metavar="DIR", help=output)
    add("--corpus", metavar="PATH", help="documents; dev and test are searched in all of them")
    parser.add_held_out_options()
    least = "least number of documents of dev and of test, without a corpus; default: %(default)s"
    add("--documents", type=int, default=defaults.documents, metavar="N", help=least)
    seed = "random seed of the split; default: %(default)s"
    add("--seed", type=int, default=defaults.seed, help=seed)
    fold = "fold of cross-validation; the test queries of folds are disjoint; default: %(default)s"
    add("--fold", type=int, default=defaults.fold, metavar="K", help=fold)
    add(
        "--split",
        default="train",
        help="split of a BEIR folder or of a Hugging Face data set. A BEIR folder's "
        "split test is kept as it is; --test and --corpus are then refused; default: %(default)s",
    )
    return parser.parse(argv)
