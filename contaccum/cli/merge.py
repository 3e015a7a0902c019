"""`contaccum merge BASE TRAINED`: average a base model and a trained model, at a chosen weight."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from contaccum.cli.options import Parser, load_model
from contaccum.defaults import DEFAULT_WEIGHTS
from contaccum.errors import ConfigError
from contaccum.files import require_writable


def run(argv: Sequence[str]) -> int:
    """Score the weights, write the model of the best one, and return exit code 0."""
    parser = Parser(
        "merge",
        "Average the parameters of BASE and TRAINED at several weights, and write the model with "
        "the best nDCG@10 on dev data among those that lose little on guard data.",
        "batch_size",
        "device",
        "trust_remote_code",
    )
    parser.add_argument("base", metavar="BASE", help="the model before training")
    parser.add_argument("trained", metavar="TRAINED", help="the model after training")
    parser.add_argument("--data", required=True, metavar="DEV", help="BEIR folder of dev data")
    parser.add_argument("--split", help="split of DEV; default: test")
    parser.add_guard_options(required=True)
    parser.add_argument(
        "--weights",
        nargs="+",
        type=float,
        default=DEFAULT_WEIGHTS,
        metavar="W",
        help=f"weights of TRAINED, beside 0 and 1; default: {' '.join(map(str, DEFAULT_WEIGHTS))}",
    )
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER", help="new folder")
    args = parser.parse(argv)
    if args.output.exists():
        raise ConfigError(f"--output {args.output}: exists already; name a new folder")
    require_writable(args.output)
    from contaccum.evaluation.beir import load_data
    from contaccum.merging import write_best_merge

    base = load_model(args.base, args)
    trained = load_model(args.trained, args)
    # All sets are read before the first one is scored, so that a bad one is refused at once.
    data_sets = [("dev", load_data(args.data, args.split))]
    data_sets += [(source, load_data(source)) for source in args.guard]
    write_best_merge(
        base, trained, data_sets, args.weights, args.guard_loss, args.batch_size, args.output
    )
    return 0
