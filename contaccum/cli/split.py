"""`contaccum split DATA DIR`: hold out dev and test sets from training data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from contaccum.cli.options import Parser


def run(argv: Sequence[str]) -> int:
    """Write a split; returns 0. Raises `UserError` for every mistake, and writes nothing then."""
    from contaccum.data.dataset import parse_training_sets
    from contaccum.data.readers import Source
    from contaccum.data.records import RecordReport
    from contaccum.data.split import SplitSettings, split_data

    what = "Hold out dev and test sets from training data, so that nothing of them is trained on."
    parser = Parser("split", what, "on_bad_record", "no_progress")
    add = parser.add_argument
    add("data", metavar="DATA", help="training data, as contaccum train takes them (docs/data.md)")
    add("output", type=Path, metavar="DIR", help="a new folder: train.jsonl, and dev and test")
    add("--corpus", metavar="PATH", help="documents, all of which dev and test are searched in")
    defaults = SplitSettings()
    add("--dev", type=float, metavar="SIZE", help="queries, or below 1 a share; default: 0.1")
    add("--test", type=float, metavar="SIZE", help="queries, or below 1 a share; default: 0.2")
    text = "documents of dev and of test without --corpus, at least"
    add("--haystack", type=int, default=defaults.haystack, metavar="N", help=text)
    add("--seed", type=int, default=defaults.seed, help="another seed gives another split")
    text = "of cross-validation: no test query of one fold is in another"
    add("--fold", type=int, default=defaults.fold, metavar="K", help=text)
    add("--data_format", help="default: sniffed")
    add("--data_columns", nargs="+", metavar="ROLE=NAME", help="names of columns: query=question")
    add("--split", default="train", help="of a BEIR folder: the split to cut dev from")
    args = parser.parse(argv)

    settings = SplitSettings(args.dev, args.test, args.haystack, args.seed, args.fold)
    common = {"data_format": args.data_format, "split": args.split, "columns": args.data_columns}
    [source] = parse_training_sets([args.data], common).values()
    report = RecordReport(source.pop("on_bad_record", args.on_bad_record))
    data = Source(**source)
    split = split_data(data, args.output, settings, args.corpus, report, not args.no_progress)

    if report.reported:
        print(f"{args.data}: {report.summary()}")
    for warning in split.warnings():
        print(f"note: {warning}")
    print(split.summary())
    documents = ", ".join(f"{side} {count:,}" for side, count in split.documents.items())
    print(
        f"{args.output}: train.jsonl, corpus.jsonl, and the folders dev and test (documents: {documents})"
    )
    return 0
