"""`contaccum compare`: train several methods side by side, and report which one is better.

The command plans and checks all runs, tunes a setting if ``--tune`` is given, trains the runs that
an earlier start of the command has not finished, and writes the report.
"""

from __future__ import annotations

import shlex
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contaccum.cli.options import (
    Parser,
    parse_positive_int,
    split_config_files,
)
from contaccum.defaults import PRECISIONS
from contaccum.files import provenance, redact, refuse_credentials, write_json, write_text

if TYPE_CHECKING:
    from contaccum.comparison.plan import Plan

_METHODS = ("grad_accum", "grad_cache", "contaccum", "pre_batch")


def run(argv: Sequence[str]) -> int:
    """Train methods and settings side by side, and write a report.

    Returns:
        Exit code 0, or 1 if a run failed.

    Raises:
        UserError: if the arguments or the data cannot be used. Nothing is trained then.
    """
    config_files, remaining_argv = split_config_files(argv)
    args, training_arguments = _make_parser().parse_known(remaining_argv)

    from contaccum.comparison.options import read_options
    from contaccum.comparison.plan import make_plan
    from contaccum.comparison.run import describe_evaluation_sets, run_plan
    from contaccum.comparison.summary import build_report

    options = read_options(config_files, training_arguments)
    refuse_credentials(options)
    plan = make_plan(options, args.methods, args.variant, args.grid, args.seeds, args.baseline)
    evaluation = _get_evaluation_options(args)
    evaluation_sets = describe_evaluation_sets(evaluation)
    train_missing = partial(run_plan, max_processes=args.jobs, progress=partial(print, flush=True))
    failures: dict[str, str] = {}
    tuning = None
    if args.tune or args.tune_data:
        plan, tuning, failures = _tune(plan, args, evaluation, train_missing)
    results, failed_runs = train_missing(
        plan, evaluation, evaluation_sets, args.output_dir / "runs"
    )
    failures.update(failed_runs)

    train_fingerprints = {result["identity"]["train_data"] for result in results.values()}
    option_texts = {key: " ".join(values) for key, values in options.items()}
    context = {
        "command": shlex.join(["contaccum", "compare", *argv]),
        "settings": {"options": option_texts, "evaluation": evaluation},
        "data": {"evaluation": evaluation_sets, "train": sorted(train_fingerprints)},
        "tuning": tuning,
        **provenance(),
    }
    report = redact(build_report(plan, results, failures, context))
    _write_report(report, args.output_dir)
    for warning in report["warnings"]:
        print(f"warning: {warning}")
    for name, reason in failures.items():
        print(f"failed: {name}: {reason}")
    if failures:
        return 1
    return 0


def _make_parser() -> Parser:
    """Return the parser of all options except those of `contaccum train`."""
    parser = Parser(
        "compare",
        "Train methods and settings side by side with the same data, budget and initial weights. "
        "Report which one is better, and whether the difference is statistically significant. "
        "Every other --key is an option of `contaccum train`.",
        usage="contaccum compare [CONFIG.yaml ...] --eval_data DIR ... [OPTIONS] [--key value ...]",
    )
    _add_run_options(parser)
    _add_evaluation_options(parser)
    _add_tuning_options(parser)
    parser.add_argument(
        "--jobs",
        type=parse_positive_int,
        metavar="J",
        help="number of runs at the same time; "
        "default: 1 with an accelerator, else half of the CPU cores",
    )
    parser.add_argument(
        "--output_dir",
        type=Path,
        default=Path("runs/compare"),
        help="folder of all runs and of the report; default: %(default)s",
    )
    return parser


def _add_run_options(parser: Parser) -> None:
    """Add the options that determine which runs are compared."""
    parser.add_argument(
        "--methods",
        nargs="*",
        default=_METHODS,
        metavar="METHOD",
        help=f"methods to compare; default: {' '.join(_METHODS)}",
    )
    parser.add_argument(
        "--variant",
        nargs="+",
        action="append",
        default=[],
        metavar="NAME [key=value ...]",
        help="a method with other settings, under a new name, such as: "
        "published method=contaccum drift_compensation=none",
    )
    parser.add_argument(
        "--seeds",
        nargs="+",
        type=int,
        default=[0, 1, 2],
        metavar="SEED",
        help="random seeds; every method is trained with each of them; default: 0 1 2",
    )
    parser.add_argument(
        "--grid",
        nargs="+",
        action="extend",
        default=[],
        metavar="key=v,v",
        help="train every method with each combination of these values",
    )
    parser.add_argument(
        "--baseline",
        metavar="NAME",
        help="method or variant that the others are compared with; "
        "default: grad_accum if it is trained, else the first one",
    )


def _add_evaluation_options(parser: Parser) -> None:
    """Add the options of the evaluation of each run."""
    parser.add_argument(
        "--eval_data",
        nargs="+",
        default=[],
        metavar="DIR",
        help="BEIR folders or names of public BEIR sets to score the models on",
    )
    parser.add_argument(
        "--eval_split",
        default="test",
        help="split of the judgements; default: %(default)s",
    )
    parser.add_argument(
        "--eval_updates",
        type=parse_positive_int,
        metavar="N",
        help="also score the first set before training and after every N updates",
    )
    parser.add_argument(
        "--eval_queries",
        type=parse_positive_int,
        metavar="N",
        help="score on a fixed sample of N queries; default: all queries",
    )
    parser.add_argument(
        "--eval_corpus",
        type=parse_positive_int,
        metavar="N",
        help="search a fixed sample of N documents, which includes all relevant ones; "
        "default: all documents",
    )
    parser.add_argument(
        "--eval_precision",
        choices=PRECISIONS,
        default="float32",
        help="floating-point type of the encoder's computation in the final evaluation; "
        "default: %(default)s",
    )
    parser.add_argument(
        "--eval_batch_size",
        type=parse_positive_int,
        default=32,
        metavar="N",
        help="number of texts per encoder batch in the evaluation; default: %(default)s",
    )


def _add_tuning_options(parser: Parser) -> None:
    """Add the options of the tuning before the comparison."""
    parser.add_argument(
        "--tune",
        metavar="key=v,v",
        help="choose this setting for each method separately, by scores on --tune_data",
    )
    parser.add_argument(
        "--tune_data",
        nargs="+",
        default=[],
        metavar="DIR",
        help="BEIR folders or names of public BEIR sets to tune on, by nDCG@10",
    )
    parser.add_argument(
        "--tune_split",
        default="dev",
        help="split of the judgements in --tune_data; default: %(default)s",
    )
    parser.add_argument(
        "--tune_factor",
        type=float,
        default=1.8,
        metavar="F",
        help="if the first or last value is the best, try one beyond it, a factor of F away; "
        "default: %(default)s",
    )
    parser.add_argument(
        "--tune_seeds",
        nargs="+",
        type=int,
        metavar="SEED",
        help="random seeds of the tuning runs; default: the first of --seeds",
    )
    parser.add_argument(
        "--tune_most",
        type=parse_positive_int,
        default=12,
        metavar="N",
        help="maximum number of values that are tried for each method and grid cell; "
        "default: %(default)s",
    )


def _get_evaluation_options(args: Namespace) -> dict[str, Any]:
    """Return {name without ``eval_``: value} of the ``--eval_...`` options."""
    evaluation = {}
    for name, value in vars(args).items():
        if name.startswith("eval_"):
            evaluation[name.removeprefix("eval_")] = value
    return evaluation


def _tune(
    plan: Plan,
    args: Namespace,
    evaluation: Mapping[str, Any],
    train_missing: Callable[..., Any],
) -> tuple[Plan, dict[str, Any], dict[str, str]]:
    """Choose the value of a setting for each group of the plan, by scores on the dev sets.

    Args:
        evaluation: the ``--eval_...`` options, as `_get_evaluation_options` returns them.
        train_missing: a function that does the runs of a plan that are not finished yet, as
            `contaccum.comparison.run.run_plan` does.

    Returns:
        The plan with the chosen values, the description of the tuning for the report, and the
        reasons of failed runs, {name of the run: reason}.

    Raises:
        UserError: if the setting cannot be tuned, or the dev sets cannot be used.
    """
    from contaccum.comparison.plan import apply_chosen_values
    from contaccum.comparison.run import describe_evaluation_sets
    from contaccum.comparison.tuning import read_ladder, summarize_tuning, tune_groups

    ladder = read_ladder(plan, args.tune, args.tune_factor, args.tune_most, args.tune_seeds)
    dev_evaluation = {
        **evaluation,
        "data": args.tune_data,
        "split": args.tune_split,
        "updates": None,
    }
    dev_sets = describe_evaluation_sets(dev_evaluation, "--tune_data")
    folder = args.output_dir / "tune"

    def train_on_dev(dev_plan: Plan) -> Any:
        return train_missing(dev_plan, dev_evaluation, dev_sets, folder)

    dev_results = tune_groups(plan, ladder, train_on_dev)
    tuning = summarize_tuning(plan, ladder, dev_results, dev_sets)
    chosen_values = {name: group["chosen"] for name, group in tuning["groups"].items()}
    return apply_chosen_values(plan, ladder.key, chosen_values), tuning, dev_results.failed


def _write_report(report: dict[str, Any], folder: Path) -> None:
    """Write report.json and report.md."""
    from contaccum.comparison.summary import render_markdown

    write_json(folder / "report.json", report)
    write_text(folder / "report.md", render_markdown(report))
    print(f"written: {folder / 'report.md'}, with report.json beside it")
