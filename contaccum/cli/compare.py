"""`contaccum compare`: plan, refuse, tune, train what is not trained yet, report."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from contaccum.cli.options import PRECISIONS, Parser, positive
from contaccum.errors import ConfigError
from contaccum.files import provenance, redact, write_json, write_text


def run(argv: Sequence[str]) -> int:
    """``contaccum compare``; returns 0, or 1 when a run failed. Raises `UserError` before anything is trained."""
    parser = Parser(
        "compare",
        "Train methods and settings side by side with the same data, budget and initial weights, and report which is "
        "better and whether that can be told from chance. Every other --key is one of `contaccum train`'s.",
        usage="contaccum compare [CONFIG.yaml ...] --eval_data DIR ... [OPTIONS] [--key value ...]",
    )
    add = parser.add_argument
    methods = ["grad_accum", "grad_cache", "contaccum", "pre_batch"]
    add("--methods", nargs="*", default=methods, metavar="METHOD", help=f"default: {' '.join(methods)}")
    named = "a method by another name, with settings of its own: published method=contaccum drift_compensation=none"
    add("--variant", nargs="+", action="append", default=[], metavar="NAME [key=value ...]", help=named)
    add("--seeds", nargs="+", type=int, default=[0, 1, 2], metavar="SEED")
    add("--grid", nargs="+", default=[], metavar="key=v,v", help="settings to cross with everything else")
    add("--baseline", metavar="NAME", help="what the others are compared with; default: grad_accum, or else the first")
    add("--eval_data", nargs="+", default=[], metavar="DIR", help="BEIR folders, or names of public sets")
    add("--eval_split", default="test")
    add("--eval_updates", type=positive, metavar="N", help="score the first set before training and every N updates")
    add("--eval_queries", type=positive, metavar="N", help="a fixed sample of the queries")
    add("--eval_corpus", type=positive, metavar="N", help="a fixed sample of the corpus; relevant ones are in it")
    add("--eval_precision", choices=PRECISIONS, default="float32", help="of the final scores")
    add("--eval_batch_size", type=positive, default=32, metavar="N")
    add("--tune", metavar="key=v,v", help="choose a setting for each method by itself, on --tune_data")
    add("--tune_data", nargs="+", default=[], metavar="DIR", help="as --eval_data; scored by nDCG@10")
    add("--tune_split", default="dev")
    add("--tune_factor", type=float, default=1.8, metavar="F", help="between values beyond those given")
    add("--tune_seeds", nargs="+", type=int, metavar="SEED", help="default: the first of --seeds")
    add("--tune_most", type=positive, default=12, metavar="N", help="values tried for each method and cell, at most")
    add("--jobs", type=positive, metavar="J", help="at once; default: 1 with an accelerator, else cores / 2")
    add("--output_dir", type=Path, default=Path("runs/compare"))
    files = list(itertools.takewhile(lambda token: not token.startswith("-"), argv))
    asked, rest = parser.parse(argv[len(files) :], rest=True)

    from contaccum.comparison.plan import make_plan, read_options, with_chosen
    from contaccum.comparison.run import about_sets, run_plan
    from contaccum.comparison.summary import build_report, markdown
    from contaccum.comparison.tuning import about_tuning, climb, read_ladder
    from contaccum.report import comparison_panels, read_comparison, save_png

    options = read_options(files, rest)
    if redact([*argv, options]) != [*argv, options] or any(key.endswith("_token") for key in options):
        raise ConfigError("a credential among the options, which are written down: put it into the environment")
    plan = make_plan(options, asked.methods, asked.variant, asked.grid, asked.seeds, asked.baseline)
    evaluation = {key.removeprefix("eval_"): value for key, value in vars(asked).items() if key.startswith("eval_")}
    sets = about_sets(evaluation)
    output = asked.output_dir
    how: Any = {"at_once": asked.jobs, "progress": partial(print, flush=True)}
    failed: dict[str, str] = {}
    tuning = None
    if asked.tune or asked.tune_data:
        ladder = read_ladder(plan, asked.tune, asked.tune_factor, asked.tune_most, asked.tune_seeds)
        on_dev = {**evaluation, "data": asked.tune_data, "split": asked.tune_split, "updates": None}
        dev_sets = about_sets(on_dev, "--tune_data")
        tried, failed = climb(plan, ladder, lambda rungs: run_plan(rungs, on_dev, dev_sets, output / "tune", **how))
        tuning = about_tuning(plan, ladder, tried, dev_sets)
        plan = with_chosen(plan, ladder.key, {name: of["chosen"] for name, of in tuning["groups"].items()})
    results, lost = run_plan(plan, evaluation, sets, output / "runs", **how)
    failed |= lost

    about = {
        "command": shlex.join(["contaccum", "compare", *argv]),
        "settings": {"options": {key: " ".join(x) for key, x in options.items()}, "evaluation": evaluation},
        "data": {"evaluation": sets, "train": sorted({x["identity"]["train_data"] for x in results.values()})},
        "tuning": tuning,
        **provenance(),
    }
    report = redact(build_report(plan, results, failed, about))
    write_json(output / "report.json", report)
    write_text(output / "report.md", markdown(report))
    save_png(comparison_panels(read_comparison(output / "report.json")), output / "report.png")
    print(f"written: {output / 'report.md'}, report.json and report.png beside it")
    for line in report["warnings"]:
        print(f"take care: {line}")
    for name, why in failed.items():
        print(f"failed: {name}: {why}")
    return 1 if failed else 0
