"""`contaccum compare`: plan, refuse, train what is not trained yet, report."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from contaccum.cli.options import PRECISIONS, Parser
from contaccum.errors import ConfigError
from contaccum.files import git_commit, package_versions, redact_record, write_json, write_text

METHODS = ("grad_accum", "grad_cache", "contaccum", "pre_batch")


def run(argv: Sequence[str]) -> int:
    """``contaccum compare``; returns 0, or 1 when a run failed. Raises `UserError` before anything is trained."""
    files = list(argv)[: next((n for n, token in enumerate(argv) if token.startswith("-")), len(argv))]
    parser = _parser()
    asked, rest = parser.parse_known_args([_plain(token) for token in argv[len(files) :]])

    import torch

    from contaccum.comparison.plan import make_plan, read_entries, read_grid, read_options
    from contaccum.comparison.report import build_report, markdown
    from contaccum.comparison.run import EvaluationSettings, differences, job_of, read_run, run_jobs
    from contaccum.report.charts import save_png
    from contaccum.report.page import comparison_panels
    from contaccum.report.sources import read_comparison
    from contaccum.training.config import load_data

    own = [option.removeprefix("--") for action in parser._actions for option in action.option_strings]
    options = read_options(files, rest, own)
    if redact_record([*argv, options]) != [*argv, options] or any(key.endswith("_token") for key in options):
        raise ConfigError("a credential among the options, which are written down: put it into the environment")
    entries = read_entries([] if asked.only_variants else asked.methods, asked.variant)
    plan = make_plan(options, entries, read_grid(asked.grid), list(dict.fromkeys(asked.seeds)), asked.baseline)
    evaluation = EvaluationSettings(
        **{name: getattr(asked, f"eval_{name}") for name in EvaluationSettings.__dataclass_fields__}
    )
    sets = evaluation.about()
    runs = asked.output_dir / "runs"
    print(f"{len(plan.groups)} settings, {len(plan.seeds)} seeds; baseline {plan.baseline}")
    fingerprints: dict[str, str] = {}
    todo, finished = [], {}
    for seed in plan.seeds:
        for group in plan.groups.values():
            _, data, args = group.parsed
            key = str((data, args.topic_column, args.refresh_negatives_every))  # all that decides what is read
            if key not in fingerprints:
                fingerprints[key] = load_data(data, args).fingerprint
            job = job_of(group, seed, runs / group.run(seed), evaluation, fingerprints[key], sets)
            result = read_run(runs / group.run(seed))
            changed = [] if result is None else differences(result["identity"], job["identity"])
            if changed and not asked.overwrite:
                raise ConfigError(
                    f"{job['folder']} was run with other settings: {'; '.join(changed)}. Pass --overwrite to do such "
                    "runs again, or another --output_dir"
                )
            if result is None or changed or (asked.keep_models and not (runs / group.run(seed) / "model").is_dir()):
                todo.append({**job, "keep_model": asked.keep_models})
    total = len(plan.groups) * len(plan.seeds)
    print(f"{total - len(todo)} of {total} runs are finished already")
    for job in todo:
        shutil.rmtree(job["folder"], ignore_errors=True)
        Path(job["folder"]).mkdir(parents=True)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    alone = torch.accelerator.is_available() and "use_cpu" not in options
    jobs = min(asked.jobs or (1 if alone else max(1, cores // 2)), max(1, len(todo)))
    failed = run_jobs(todo, jobs, max(1, cores // jobs), lambda line: print(line, flush=True))

    names = [group.run(seed) for seed in plan.seeds for group in plan.groups.values()]
    finished = {name: result for name in names if (result := read_run(runs / name)) is not None}
    about = {
        "command": shlex.join(["contaccum", "compare", *argv]),
        "settings": {
            "options": {
                key: " ".join(tokens).removeprefix(f"--{key}")[1:] or "true" for key, tokens in options.items()
            },
            "evaluation": {key: value for key, value in vars(evaluation).items() if key != "data"},
        },
        "data": {"evaluation": sets, "train": sorted(set(fingerprints.values()))},
        "versions": package_versions(),
        "git_commit": git_commit(),
        "machine": next((result["machine"] for result in finished.values()), None),
    }
    report = redact_record(build_report(plan, finished, failed, about))
    write_json(asked.output_dir / "report.json", report)
    write_text(asked.output_dir / "report.md", markdown(report))
    whole = [(cell, members) for cell, members in plan.cells if len(members) == len(plan.entries)]
    cell, members = (whole or plan.cells)[0]
    panels = comparison_panels(read_comparison(asked.output_dir / "report.json"), list(members.values()))
    save_png(panels, asked.output_dir / "report.png", ", ".join(f"{key}={value}" for key, value in cell.items()))
    print(f"written: {asked.output_dir / 'report.md'}, report.json and report.png beside it")
    for line in [
        *(f"take care: {text}" for text in report["warnings"]),
        *(f"failed: {n}: {w}" for n, w in failed.items()),
    ]:
        print(line)
    return 1 if failed else 0


def _parser() -> Parser:
    parser = Parser(
        "compare",
        "Train methods and settings side by side with the same data, budget and initial weights, and report which is "
        "better and whether that can be told from chance. Every other --key is one of `contaccum train`'s.",
        usage="contaccum compare [CONFIG.yaml ...] --eval_data DIR ... [OPTIONS] [--key value ...]",
    )
    add = parser.add_argument
    add("--methods", nargs="+", default=list(METHODS), metavar="METHOD", help="default: %(default)s")
    add(
        "--variant",
        nargs="+",
        action="append",
        default=[],
        metavar="NAME [key=value ...]",
        help="a method by another "
        "name, with settings of its own: --variant published method=contaccum drift_compensation=none",
    )
    add("--only_variants", action="store_true", help="compare the variants alone, without --methods")
    add("--seeds", nargs="+", type=int, default=[0, 1, 2], metavar="SEED")
    add("--grid", nargs="+", default=[], metavar="key=v,v", help="settings to cross with everything else")
    add("--baseline", metavar="NAME", help="what the others are compared with; default: grad_accum, or else the first")
    add("--eval_data", nargs="+", default=[], metavar="DIR", help="BEIR folders, or names of public sets")
    add("--eval_split", default="test")
    add("--eval_updates", type=_at_least(0), default=0, metavar="N", help="score the first set every N updates")
    add("--eval_before", action="store_true", help="score the first set before training too")
    add("--eval_queries", type=_at_least(1), metavar="N", help="a fixed sample of the queries")
    add("--eval_corpus", type=_at_least(1), metavar="N", help="a fixed sample of the corpus; relevant ones are in it")
    add("--eval_precision", choices=PRECISIONS, default="float32")
    add("--eval_batch_size", type=_at_least(1), default=32, metavar="N")
    add("--jobs", type=_at_least(1), metavar="J", help="at once; default: 1 with an accelerator, else cores / 2")
    add("--output_dir", type=Path, default=Path("runs/compare"))
    add("--overwrite", action="store_true", help="do runs again that were done with other settings")
    add("--keep_models", action="store_true", help="keep every run's model")
    return parser


def _at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {text}")
        return int(text)

    return number


def _plain(token: str) -> str:
    """--eval-data as --eval_data."""
    name, equals, value = token.partition("=")
    return name.replace("-", "_").replace("__", "--", 1) + equals + value if token.startswith("--") else token
