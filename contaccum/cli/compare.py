"""`contaccum compare`: plan the runs, check them, tune, train what is missing, write the report."""

from __future__ import annotations

import itertools
import shlex
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contaccum.cli.options import PRECISIONS, Parser, positive
from contaccum.errors import ConfigError
from contaccum.files import provenance, redact, write_json, write_text

if TYPE_CHECKING:
    from contaccum.comparison.plan import Plan

_METHODS = ("grad_accum", "grad_cache", "contaccum", "pre_batch")


def run(argv: Sequence[str]) -> int:
    """Train methods and settings side by side, and write a report.

    Returns:
        0, or 1 if a run failed.

    Raises:
        UserError: for a mistake of the user's, before anything is trained.
    """
    files = list(itertools.takewhile(lambda token: not token.startswith("-"), argv))
    args, rest = _make_parser().parse(argv[len(files) :], rest=True)

    from contaccum.comparison.options import read_options
    from contaccum.comparison.plan import make_plan
    from contaccum.comparison.run import describe_evaluation_sets, run_plan
    from contaccum.comparison.summary import build_report

    options = read_options(files, rest)
    has_token = any(key.endswith("_token") for key in options)
    if has_token or redact([*argv, options]) != [*argv, options]:
        raise ConfigError(
            "a credential among the options, which are written down: put it into the environment"
        )
    plan = make_plan(options, args.methods, args.variant, args.grid, args.seeds, args.baseline)
    evaluation = _evaluation_options(args)
    sets = describe_evaluation_sets(evaluation)
    train_missing = partial(run_plan, max_processes=args.jobs, progress=partial(print, flush=True))
    failed: dict[str, str] = {}
    tuning = None
    if args.tune or args.tune_data:
        plan, tuning, failed = _tune(plan, args, evaluation, train_missing)
    results, failed_runs = train_missing(plan, evaluation, sets, args.output_dir / "runs")
    failed |= failed_runs

    train_fingerprints = {result["identity"]["train_data"] for result in results.values()}
    settings = {key: " ".join(values) for key, values in options.items()}
    context = {
        "command": shlex.join(["contaccum", "compare", *argv]),
        "settings": {"options": settings, "evaluation": evaluation},
        "data": {"evaluation": sets, "train": sorted(train_fingerprints)},
        "tuning": tuning,
        **provenance(),
    }
    report = redact(build_report(plan, results, failed, context))
    _write_report(report, args.output_dir)
    for line in report["warnings"]:
        print(f"warning: {line}")
    for name, reason in failed.items():
        print(f"failed: {name}: {reason}")
    return 1 if failed else 0


def _make_parser() -> Parser:
    """Return the parser of all options but those of `contaccum train`."""
    parser = Parser(
        "compare",
        "Train methods and settings side by side with the same data, budget and initial weights, and report which is "
        "better and whether that can be told from chance. Every other --key is one of `contaccum train`'s.",
        usage="contaccum compare [CONFIG.yaml ...] --eval_data DIR ... [OPTIONS] [--key value ...]",
    )
    add = parser.add_argument
    add(
        "--methods",
        nargs="*",
        default=_METHODS,
        metavar="METHOD",
        help=f"default: {' '.join(_METHODS)}",
    )
    named = "a method by another name, with settings of its own: published method=contaccum drift_compensation=none"
    add(
        "--variant",
        nargs="+",
        action="append",
        default=[],
        metavar="NAME [key=value ...]",
        help=named,
    )
    add("--seeds", nargs="+", type=int, default=[0, 1, 2], metavar="SEED")
    add(
        "--grid",
        nargs="+",
        default=[],
        metavar="key=v,v",
        help="settings to cross with everything else",
    )
    add(
        "--baseline",
        metavar="NAME",
        help="what the others are compared with; default: grad_accum, or else the first",
    )
    add(
        "--eval_data",
        nargs="+",
        default=[],
        metavar="DIR",
        help="BEIR folders, or names of public sets",
    )
    add("--eval_split", default="test")
    add(
        "--eval_updates",
        type=positive,
        metavar="N",
        help="score the first set before training and every N updates",
    )
    add("--eval_queries", type=positive, metavar="N", help="a fixed sample of the queries")
    add(
        "--eval_corpus",
        type=positive,
        metavar="N",
        help="a fixed sample of the corpus; relevant ones are in it",
    )
    add("--eval_precision", choices=PRECISIONS, default="float32", help="of the final scores")
    add("--eval_batch_size", type=positive, default=32, metavar="N")
    add(
        "--tune",
        metavar="key=v,v",
        help="choose a setting for each method by itself, on --tune_data",
    )
    add(
        "--tune_data",
        nargs="+",
        default=[],
        metavar="DIR",
        help="as --eval_data; scored by nDCG@10",
    )
    add("--tune_split", default="dev")
    add(
        "--tune_factor",
        type=float,
        default=1.8,
        metavar="F",
        help="between values beyond those given",
    )
    add("--tune_seeds", nargs="+", type=int, metavar="SEED", help="default: the first of --seeds")
    add(
        "--tune_most",
        type=positive,
        default=12,
        metavar="N",
        help="values tried for each method and cell, at most",
    )
    add(
        "--jobs",
        type=positive,
        metavar="J",
        help="at once; default: 1 with an accelerator, else cores / 2",
    )
    add("--output_dir", type=Path, default=Path("runs/compare"))
    return parser


def _evaluation_options(args: Namespace) -> dict[str, Any]:
    """Return the options that begin with ``eval_``, by the rest of their names."""
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
    """Choose a setting for each group of the plan by its scores on the dev sets.

    Returns:
        The plan with the chosen values, what a report says of the tuning, and {run: why it failed}.

    Raises:
        UserError: for a setting that cannot be tuned, or dev sets that cannot be used.
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
    train_on_dev = partial(
        train_missing,
        evaluation=dev_evaluation,
        sets=dev_sets,
        folder=args.output_dir / "tune",
    )
    result = tune_groups(plan, ladder, train_on_dev)
    tuning = summarize_tuning(plan, ladder, result, dev_sets)
    chosen = {name: group["chosen"] for name, group in tuning["groups"].items()}
    return apply_chosen_values(plan, ladder.key, chosen), tuning, result.failed


def _write_report(report: dict[str, Any], folder: Path) -> None:
    """Write report.json, report.md and report.png."""
    from contaccum.comparison.summary import render_markdown
    from contaccum.report import comparison_panels, read_comparison, save_png

    write_json(folder / "report.json", report)
    write_text(folder / "report.md", render_markdown(report))
    save_png(comparison_panels(read_comparison(folder / "report.json")), folder / "report.png")
    print(f"written: {folder / 'report.md'}, report.json and report.png beside it")
