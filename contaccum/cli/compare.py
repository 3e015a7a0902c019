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


def run(argv: Sequence[str]) -> int:
    """``contaccum compare``; returns 0, or 1 when a run failed. Raises `UserError` before anything is trained."""
    files = list(argv)[: next((n for n, token in enumerate(argv) if token.startswith("-")), len(argv))]
    parser = _parser()
    asked, rest = parser.parse_known_args([_with_underscores(token) for token in argv[len(files) :]])

    import torch

    from contaccum.comparison.plan import make_plan, read_entries, read_grid, read_options
    from contaccum.comparison.report import build_report, markdown
    from contaccum.comparison.run import MODEL, EvaluationSettings, differences, job_of, read_run, run_jobs
    from contaccum.report.charts import save_png
    from contaccum.report.page import comparison_panels
    from contaccum.report.sources import read_comparison
    from contaccum.training.config import load_data

    options = read_options(files, rest, [action.dest for action in parser._actions])
    if redact_record([*argv, options]) != [*argv, options] or any(key.endswith("_token") for key in options):
        raise ConfigError("a credential among the options, which are written down: put it into the environment")
    entries = read_entries([] if asked.only_variants else asked.methods, asked.variant)
    plan = make_plan(options, entries, read_grid(asked.grid), list(dict.fromkeys(asked.seeds)), asked.baseline)
    evaluation = EvaluationSettings(**{n: getattr(asked, f"eval_{n}") for n in EvaluationSettings.__dataclass_fields__})
    sets = evaluation.about()
    print(f"{len(plan.groups)} settings, {len(plan.seeds)} seeds; baseline {plan.baseline}")

    train_data: dict[str, str] = {}
    folders, todo = {}, []
    for seed in plan.seeds:
        for group in plan.groups.values():
            _, data, args = group.parsed
            key = str((data, args.topic_column, args.refresh_negatives_every))  # all that decides what is read
            if key not in train_data:
                train_data[key] = load_data(data, args).fingerprint
            folder = folders[group.run(seed)] = asked.output_dir / "runs" / group.run(seed)
            job, result = job_of(group, seed, folder, evaluation, train_data[key], sets), read_run(folder)
            changed = [] if result is None else differences(result["identity"], job["identity"])
            if changed and not asked.overwrite:
                mend = "Pass --overwrite to do such runs again, or another --output_dir"
                raise ConfigError(f"{folder} was run with other settings: {'; '.join(changed)}. {mend}")
            if result is None or changed or (asked.keep_models and not (folder / MODEL).is_dir()):
                todo.append({**job, "keep_model": asked.keep_models})
    print(f"{len(folders) - len(todo)} of {len(folders)} runs are finished already")
    for job in todo:
        shutil.rmtree(job["folder"], ignore_errors=True)
        Path(job["folder"]).mkdir(parents=True)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    alone = torch.accelerator.is_available() and "use_cpu" not in options
    jobs = min(asked.jobs or (1 if alone else max(1, cores // 2)), max(1, len(todo)))
    failed = run_jobs(todo, jobs, max(1, cores // jobs), lambda line: print(line, flush=True))

    finished = {name: result for name, folder in folders.items() if (result := read_run(folder)) is not None}
    given = {key: " ".join(tokens).removeprefix(f"--{key}")[1:] or "true" for key, tokens in options.items()}
    about = {
        "command": shlex.join(["contaccum", "compare", *argv]),
        "settings": {"options": given, "evaluation": vars(evaluation)},
        "data": {"evaluation": sets, "train": sorted(set(train_data.values()))},
        "versions": package_versions(),
        "git_commit": git_commit(),
        "machine": next((result["machine"] for result in finished.values()), None),
    }
    report = redact_record(build_report(plan, finished, failed, about))
    output = asked.output_dir
    write_json(output / "report.json", report)
    write_text(output / "report.md", markdown(report))
    cell, members = next((one for one in plan.cells if len(one[1]) == len(plan.entries)), plan.cells[0])
    panels = comparison_panels(read_comparison(output / "report.json"), list(members.values()))
    save_png(panels, output / "report.png", ", ".join(f"{key}={value}" for key, value in cell.items()))
    print(f"written: {output / 'report.md'}, report.json and report.png beside it")
    notes = [f"take care: {line}" for line in report["warnings"]]
    for line in [*notes, *(f"failed: {name}: {why}" for name, why in failed.items())]:
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
    add("--eval_updates", type=_at_least(0), default=0, metavar="N", help="score the first set every N updates")
    add("--eval_before", action="store_true", help="score the first set before training too")
    add("--eval_queries", type=_at_least(1), metavar="N", help="a fixed sample of the queries")
    add("--eval_corpus", type=_at_least(1), metavar="N", help="a fixed sample of the corpus; relevant ones are in it")
    add("--eval_precision", choices=PRECISIONS, default="float32", help="of the final scores")
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


def _with_underscores(token: str) -> str:
    name, equals, value = token.partition("=")
    return f"--{name[2:].replace('-', '_')}{equals}{value}" if token.startswith("--") else token
