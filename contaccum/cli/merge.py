"""`contaccum merge BASE MODEL --data OWN --guard OTHER`: interpolate a base and a trained model.

For several weights w, the models (1 - w) * BASE + w * MODEL are scored on own data, which are like
the training data, and on guard data, on which the quality of BASE must not get lost. A rule chooses
one of the models; see `contaccum.merging.choice`.

With ``--output OUT``, the chosen model is written to the folder OUT, and the table of all scores to
OUT.json and OUT.md. OUT.scores.json contains the score of each query, so that the same command does
not compute it again after an interruption.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from contaccum.cli.options import ENCODING_OPTIONS, Parser, load_saved_model, require_models
from contaccum.defaults import DEFAULT_GUARD_LOSS, DEFAULT_WEIGHTS
from contaccum.errors import ConfigError
from contaccum.files import provenance, require_writable, write_json, write_text

if TYPE_CHECKING:
    from contaccum.encoders.interpolation import WeightInterpolation
    from contaccum.merging.choice import SetScores, WeightChoice


class _DataSet(NamedTuple):
    """A data set of the command line.

    Attributes:
        source: BEIR folder or name of a public set.
        split: split of the data set; None: its default split.
        role: "own" for a set of --data, "guard" for a set of --guard.
    """

    source: str
    split: str | None
    role: Literal["own", "guard"]


def run(argv: Sequence[str]) -> int:
    """Score the weights, choose one, write the results, and return exit code 0.

    Raises:
        UserError: if the arguments, the data or the models cannot be used.
    """
    args = _parse_arguments(argv)
    from contaccum.merging.choice import BEST_OF_SEVERAL, choose_weight

    require_models(args.base, args.model)
    data_sets = _list_data_sets(args)
    # All sets are read before the first one is encoded, so that a bad record in the last set is
    # reported at once and not after hours. Only one set is in memory at a time.
    _check_data(data_sets, args.on_bad_record)
    interpolation = _load_models(args)
    print(
        f"note: {BEST_OF_SEVERAL}: use a dev set as --data, and score the model on test afterwards"
    )
    choice = choose_weight(_score(args, interpolation, data_sets), args.guard_loss)

    print(f"\n{choice.rule}\n\n{choice.table()}\n")
    for warning in choice.warnings:
        print(f"warning: {warning}")
    print(choice.describe())
    if args.output is None:
        print("nothing was written: give --output to write the chosen model and this table")
    else:
        _write_results(args, interpolation, choice)
    return 0


def _parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parse and check the command line.

    Raises:
        ConfigError: if a value cannot be used, or the output exists.
    """
    args = _make_parser().parse(argv)
    from contaccum.merging.choice import check_guard_loss, check_weights

    args.weights = check_weights(args.weights)
    check_guard_loss(args.guard_loss)
    if args.output is not None:
        if not args.output.name:
            raise ConfigError(f"--output {args.output}: name a new folder")
        if args.output.is_file() or (args.output.is_dir() and any(args.output.iterdir())):
            raise ConfigError(
                f"--output {args.output}: exists already; name a new folder, or remove this one"
            )
        require_writable(_add_suffix(args.output, ".json"))
    return args


def _make_parser() -> Parser:
    """Return the parser of the command."""
    parser = Parser(
        "merge",
        "Score averages of the parameters of BASE and MODEL on own data and on other data, and "
        "choose the one that is best on the own data and loses little on the other data.",
        "passage_max_length",
        "similarity",
        *ENCODING_OPTIONS,
        usage="contaccum merge BASE MODEL --data OWN ... --guard OTHER ... [OPTIONS]",
    )
    parser.add_argument("base", metavar="BASE", help="the model before training")
    parser.add_argument("model", metavar="MODEL", help="the model after training")
    parser.add_argument(
        "--data",
        nargs="+",
        required=True,
        metavar="OWN",
        help="data like those that MODEL was trained on: BEIR folders or public names",
    )
    parser.add_argument(
        "--guard",
        nargs="+",
        required=True,
        metavar="OTHER",
        help="other data, on which the quality of BASE is to be kept",
    )
    parser.add_argument(
        "--weights",
        nargs="+",
        type=float,
        default=DEFAULT_WEIGHTS,
        metavar="W",
        help="weights w of MODEL in (1 - w) * BASE + w * MODEL; 0 and 1 are always scored too; "
        f"default: {' '.join(map(str, DEFAULT_WEIGHTS))}",
    )
    parser.add_argument(
        "--guard_loss",
        type=float,
        default=DEFAULT_GUARD_LOSS,
        metavar="LOSS",
        help="nDCG@10 that the model may lose against BASE on each guard set; default: %(default)s",
    )
    parser.add_argument(
        "--split",
        help="split of OWN, by which the model is chosen. Give dev if OWN has it, because scores "
        "on this split are too optimistic afterwards; default: test, for msmarco dev",
    )
    parser.add_argument("--guard_split", help="split of OTHER; default: test, for msmarco dev")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="OUT",
        help="folder of the chosen model, with OUT.json and OUT.md beside it; "
        "default: nothing is written",
    )
    return parser


def _add_suffix(output: Path, suffix: str) -> Path:
    """Return the path of a file beside the output folder, such as OUT.json for the folder OUT."""
    # Path.with_suffix would replace the end ".5" of a name such as merged-0.5.
    return output.with_name(output.name + suffix)


def _list_data_sets(args: argparse.Namespace) -> list[_DataSet]:
    """Return the own sets and the guard sets of the command line."""
    from contaccum.evaluation.beir_sets import list_sources

    data_sets = []
    for source in list_sources(args.data, "--data").values():
        data_sets.append(_DataSet(source, args.split, "own"))
    for source in list_sources(args.guard, "--guard").values():
        data_sets.append(_DataSet(source, args.guard_split, "guard"))
    return data_sets


def _check_data(data_sets: Sequence[_DataSet], on_bad_record: Literal["stop", "skip"]) -> None:
    """Read all data sets once, and raise an error for a set that cannot be used.

    Raises:
        DataError: if a data set cannot be read.
        ConfigError: if the same data are own and guard data.
    """
    from contaccum.evaluation.beir_sets import load_data

    sources: dict[str, str] = {}  # {fingerprint: source}
    for source, split, _ in data_sets:
        fingerprint = load_data(source, split, on_bad_record).fingerprint
        if fingerprint in sources:
            raise ConfigError(
                f"{source}: has the same data as {sources[fingerprint]}; name each data set once, "
                "in --data or in --guard"
            )
        sources[fingerprint] = source


def _load_models(args: argparse.Namespace) -> WeightInterpolation:
    """Load both models for the interpolation.

    Raises:
        UserError: if a model cannot be loaded, if MODEL has another architecture than BASE, or if
            both have the same weights.
    """
    from contaccum.encoders.interpolation import WeightInterpolation

    base = load_saved_model(args.base, args)
    trained = load_saved_model(args.model, args)
    try:
        interpolation = WeightInterpolation(base, trained)
    except ConfigError as error:
        raise ConfigError(
            f"{args.base} and {args.model} cannot be merged: {error}; name the model that MODEL "
            "was trained from as BASE"
        ) from error
    if interpolation.is_unchanged("query") and interpolation.is_unchanged("document"):
        raise ConfigError(
            f"{args.base} and {args.model} have the same weights: there is nothing to merge"
        )
    return interpolation


def _score(
    args: argparse.Namespace, interpolation: WeightInterpolation, data_sets: Sequence[_DataSet]
) -> list[SetScores]:
    """Score all weights on all data sets.

    ``--query_max_length`` and ``--passage_max_length`` hold for the scores only: the written model
    has the lengths that were saved with it.
    """
    from contaccum.encoders.settings import use_max_lengths
    from contaccum.evaluation.beir_sets import load_data
    from contaccum.merging.scoring import ScoringSettings, WeightScorer

    settings = ScoringSettings(
        args.batch_size, args.precision, args.similarity, not args.no_progress
    )
    scores_file = None
    if args.output is not None:
        scores_file = _add_suffix(args.output, ".scores.json")
    scores = []
    lengths = (args.query_max_length, args.passage_max_length)
    with (
        use_max_lengths(interpolation.base, *lengths),
        use_max_lengths(interpolation.model, *lengths),
    ):
        scorer = WeightScorer(interpolation, settings, scores_file)
        for source, split, role in data_sets:
            dataset = load_data(source, split, args.on_bad_record)
            scores.append(scorer.score(dataset, role, args.weights))
    return scores


def _write_results(
    args: argparse.Namespace, interpolation: WeightInterpolation, choice: WeightChoice
) -> None:
    """Write the table as JSON and Markdown, and the chosen model."""
    from contaccum.merging.output import describe_merge, save_merged_model
    from contaccum.report.sources import model_name

    base_name = model_name(args.base)
    trained_name = model_name(args.model)
    record = {
        "base": args.base,
        "model": args.model,
        **choice.record(),
        "guard_loss": args.guard_loss,
        "precision": args.precision,
        "similarity": args.similarity,
        "query_max_length": args.query_max_length,
        "passage_max_length": args.passage_max_length,
        "documents_unchanged": interpolation.is_unchanged("document"),
        **provenance(),
    }
    write_json(_add_suffix(args.output, ".json"), record)
    section = describe_merge(choice, base_name, trained_name)
    page = f"# Merge of {base_name} and {trained_name}\n\n{section}\n"
    write_text(_add_suffix(args.output, ".md"), page)
    save_merged_model(interpolation, choice, args.output, base_name, trained_name)
    print(f"written: {args.output}, with the table in {args.output}.json and {args.output}.md")
