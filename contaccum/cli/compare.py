"""`contaccum compare`: plan, refuse, train what is not trained yet, report."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from contaccum.cli.options import PRECISIONS, Parser, positive
from contaccum.errors import ConfigError
from contaccum.files import git_commit, package_versions, redact_record, write_json, write_text


def run(argv: Sequence[str]) -> int:
    """``contaccum compare``; returns 0, or 1 when a run failed. Raises `UserError` before anything is trained."""
    files = list(argv)[: next((n for n, token in enumerate(argv) if token.startswith("-")), len(argv))]
    asked, rest = _parser().parse_known_args([_with_underscores(token) for token in argv[len(files) :]])

    from contaccum.comparison.plan import make_plan, read_entries, read_grid, read_options
    from contaccum.comparison.report import build_report, markdown
    from contaccum.comparison.run import about_sets, finished, make_jobs, run_jobs, unfinished
    from contaccum.report.charts import save_png
    from contaccum.report.page import comparison_panels, read_comparison

    options = read_options(files, rest)
    _refuse_credentials(argv, options)
    entries = read_entries([] if asked.only_variants else asked.methods, asked.variant)
    plan = make_plan(options, entries, read_grid(asked.grid), asked.seeds, asked.baseline)
    evaluation = {key.removeprefix("eval_"): value for key, value in vars(asked).items() if key.startswith("eval_")}
    sets = about_sets(evaluation)
    print(f"{len(plan.groups)} settings, {len(plan.seeds)} seeds; baseline {plan.baseline}")

    jobs = make_jobs(plan, evaluation, sets, asked.output_dir / "runs")
    todo = unfinished(jobs, asked.overwrite, asked.keep_models)
    print(f"{len(jobs) - len(todo)} of {len(jobs)} runs are finished already")
    failed = run_jobs(todo, asked.jobs, partial(print, flush=True))

    results = {job["name"]: result for job in jobs if (result := finished(job)) is not None}
    about = {
        "command": shlex.join(["contaccum", "compare", *argv]),
        "settings": {"options": {key: _value(key, x) for key, x in options.items()}, "evaluation": evaluation},
        "data": {"evaluation": sets, "train": sorted({job["identity"]["train_data"] for job in jobs})},
        "versions": package_versions(),
        "git_commit": git_commit(),
    }
    report = redact_record(build_report(plan, results, failed, about))
    output = asked.output_dir
    write_json(output / "report.json", report)
    write_text(output / "report.md", markdown(report))
    fullest = max(plan.cells, key=len).values()  # of the grid's cells, whose curves are drawn
    save_png(comparison_panels(read_comparison(output / "report.json"), fullest), output / "report.png")
    print(f"written: {output / 'report.md'}, report.json and report.png beside it")
    for line in report["warnings"]:
        print(f"take care: {line}")
    for name, why in failed.items():
        print(f"failed: {name}: {why}")
    return 1 if failed else 0


def _parser() -> Parser:
    parser = Parser(
        "compare",
        "Train methods and settings side by side with the same data, budget and initial weights, and report which is "
        "better and whether that can be told from chance. Every other --key is one of `contaccum train`'s.",
        usage="contaccum compare [CONFIG.yaml ...] --eval_data DIR ... [OPTIONS] [--key value ...]",
    )
    add = parser.add_argument
    methods = ["grad_accum", "grad_cache", "contaccum", "pre_batch"]
    add("--methods", nargs="+", default=methods, metavar="METHOD", help=f"default: {' '.join(methods)}")
    named = "a method by another name, with settings of its own: published method=contaccum drift_compensation=none"
    add("--variant", nargs="+", action="append", default=[], metavar="NAME [key=value ...]", help=named)
    add("--only_variants", action="store_true", help="compare the variants alone, without --methods")
    add("--seeds", nargs="+", type=int, default=[0, 1, 2], metavar="SEED")
    add("--grid", nargs="+", default=[], metavar="key=v,v", help="settings to cross with everything else")
    add("--baseline", metavar="NAME", help="what the others are compared with; default: grad_accum, or else the first")
    add("--eval_data", nargs="+", default=[], metavar="DIR", help="BEIR folders, or names of public sets")
    add("--eval_split", default="test")
    add("--eval_updates", type=positive, default=0, metavar="N", help="score the first set every N updates")
    add("--eval_before", action="store_true", help="score the first set before training too")
    add("--eval_queries", type=positive, metavar="N", help="a fixed sample of the queries")
    add("--eval_corpus", type=positive, metavar="N", help="a fixed sample of the corpus; relevant ones are in it")
    add("--eval_precision", choices=PRECISIONS, default="float32", help="of the final scores")
    add("--eval_batch_size", type=positive, default=32, metavar="N")
    add("--jobs", type=positive, metavar="J", help="at once; default: 1 with an accelerator, else cores / 2")
    add("--output_dir", type=Path, default=Path("runs/compare"))
    add("--overwrite", action="store_true", help="do runs again that were done with other settings")
    add("--keep_models", action="store_true", help="keep every run's model")
    return parser


def _with_underscores(token: str) -> str:
    name, equals, value = token.partition("=")
    return f"--{name[2:].replace('-', '_')}{equals}{value}" if token.startswith("--") else token


def _value(key: str, tokens: Sequence[str]) -> str:
    return " ".join(tokens).removeprefix(f"--{key}")[1:] or "true"


def _refuse_credentials(argv: Sequence[str], options: Mapping[str, Sequence[str]]) -> None:
    given = [*argv, dict(options)]
    if redact_record(given) != given or any(key.endswith("_token") for key in options):
        raise ConfigError("a credential among the options, which are written down: put it into the environment")
