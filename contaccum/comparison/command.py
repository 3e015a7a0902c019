"""`contaccum compare`: plan, refuse, train what is not trained yet, report."""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from contaccum.errors import ConfigError, DataError, UserError
from contaccum.redaction import SECRET_NAMES, redact, redact_record

DEFAULT_METHODS = ("grad_accum", "grad_cache", "contaccum", "pre_batch")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see {self.prog} --help)")


def _parser() -> _Parser:
    parser = _Parser(
        prog="contaccum compare",
        usage="contaccum compare [CONFIG.yaml ...] --eval_data DIR ... [OPTIONS] [--key value ...]",
        description="Train methods and settings side by side with the same data, budget and initial weights, and "
        "report which is better and whether that can be told. Every other --key is one of `contaccum train`'s.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--methods", nargs="+", default=list(DEFAULT_METHODS), metavar="METHOD", help="default: %(default)s")
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
    add("--eval_updates", type=int, default=0, metavar="N", help="score the first set every N updates, for curves")
    add("--eval_before", action="store_true", help="score the first set before training too")
    add("--eval_queries", type=int, metavar="N", help="a fixed sample of the queries")
    add("--eval_corpus", type=int, metavar="N", help="a fixed sample of the corpus; relevant documents are kept")
    add("--eval_precision", choices=("float32", "bfloat16", "float16"), default="float32")
    add("--eval_batch_size", type=int, default=32, metavar="N")
    add("--jobs", type=int, metavar="J", help="runs at once; default: 1 with an accelerator, else one per two cores")
    add("--output_dir", type=Path, default=Path("runs/compare"))
    add("--overwrite", action="store_true", help="do runs again that were done with other settings")
    add("--keep_models", action="store_true", help="keep every run's model")
    return parser


def run(argv: Sequence[str]) -> int:
    """``contaccum compare``; returns 0, or 1 when a run failed. Raises `UserError` before anything is trained."""
    files, ours, theirs = _split(argv)
    asked = _parser().parse_args(ours)  # before torch is loaded: --help takes no time

    from contaccum.comparison.evaluating import EvaluationSettings
    from contaccum.comparison.plan import make_plan, read_entries, read_grid, read_options
    from contaccum.comparison.run import job_of
    from contaccum.evaluation.beir import about_data
    from contaccum.training.command import check_output_dir

    evaluation = EvaluationSettings(
        asked.eval_data,
        asked.eval_split,
        asked.eval_updates,
        asked.eval_before,
        asked.eval_queries,
        asked.eval_corpus,
        asked.eval_precision,
        asked.eval_batch_size,
    )
    if len(set(asked.seeds)) < len(asked.seeds):
        raise ConfigError(f"--seeds {' '.join(map(str, asked.seeds))}: each seed once")
    if asked.jobs is not None and asked.jobs < 1:
        raise ConfigError(f"--jobs must be at least 1, got {asked.jobs}")
    options = read_options(files, theirs, _own_options())
    _refuse_credentials({**options, "the command line": list(argv)})
    default_method = options.get("method", ["contaccum"])[0]
    entries = read_entries([] if asked.only_variants else asked.methods, asked.variant, default_method)
    check_output_dir(str(asked.output_dir))
    plan = make_plan(options, entries, read_grid(asked.grid), asked.seeds, asked.baseline, asked.output_dir)
    print(f"{len(plan.runs)} runs: {len(plan.groups)} settings, {len(plan.seeds)} seeds; baseline {plan.baseline}")

    sets = [about_data(dataset) for dataset in evaluation.load()]
    names = [data["name"] for data in sets]
    if len(set(names)) < len(names):
        raise ConfigError(f"--eval_data has two sets called {max(names, key=names.count)}: rename a folder")
    fingerprints = _train_fingerprints(plan)
    jobs = {run.name: job_of(run, evaluation, fingerprints[run.name], sets) for run in plan.runs}
    folders = {name: asked.output_dir / "runs" / name for name in jobs}
    todo = _unfinished(jobs, folders, asked.overwrite, asked.keep_models)
    failed = _train(todo, folders, asked, options)
    return _report(plan, folders, failed, argv, asked, options, sets, fingerprints)


def _refuse_credentials(options: Mapping[str, Sequence[str]]) -> None:
    # Runs are told their options in a file, and a finished run is known again by them.
    for key, values in options.items():
        if SECRET_NAMES.search(key) or any(redact(value) != value for value in values):
            raise ConfigError(
                f"{key}: holds a credential, and a comparison writes its options down; put it into the environment "
                "(HF_TOKEN for the hub)"
            )


def _split(argv: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """Config files, options of compare, and options for the trainer."""
    own = _own_options()
    files: list[str] = []
    ours: list[str] = []
    theirs: list[str] = []
    rest = list(argv)
    while rest and not rest[0].startswith("-"):
        files.append(rest.pop(0))
    target = theirs
    for token in rest:
        if token.startswith("--"):
            target = ours if token[2:].partition("=")[0].replace("-", "_") in own else theirs
            if target is ours:
                name, equals, value = token.partition("=")
                token = f"--{name[2:].replace('-', '_')}{equals}{value}"
        elif token == "-h":
            target = ours
        target.append(token)
    return files, ours, theirs


def _own_options() -> frozenset[str]:
    return frozenset(
        option[2:] for action in _parser()._actions for option in action.option_strings if option.startswith("--")
    )


def _train_fingerprints(plan: Any) -> dict[str, str]:
    """Name of the run -> fingerprint of its training data; each data set is read once, and refused here if need be."""
    from contaccum.training.command import load_data

    known: dict[tuple[Any, ...], str] = {}
    found = {}
    for run in plan.runs:
        data, topic = run.data, run.arguments.get("topic_column")
        mines = run.arguments.get("refresh_negatives_every") is not None
        key = (topic, mines, str(data))  # all of its settings
        if key not in known:
            loaded = load_data(data, topic, mines)
            print(loaded.summary())
            known[key] = loaded.fingerprint
        found[run.name] = known[key]
    return found


def _unfinished(
    jobs: Mapping[str, Mapping[str, Any]], folders: Mapping[str, Path], overwrite: bool, keep_models: bool
) -> list[Mapping[str, Any]]:
    """Jobs without a result; raises `ConfigError` where there is one of other settings, unless it may be redone."""
    from contaccum.comparison.run import MODEL, differences

    todo = []
    stale: list[str] = []
    for name, job in jobs.items():
        result = read_run(folders[name])
        if result is None:
            todo.append(job)
            continue
        changed = differences(result["identity"], job["identity"])
        if keep_models and not (folders[name] / MODEL).is_dir():
            changed.append("its model was not kept")
        if changed:
            stale.append(f"{folders[name]} was run with other settings: {'; '.join(changed)}")
            todo.append(job)
    if stale and not overwrite:
        more = f" (and {len(stale) - 1} other runs)" if len(stale) > 1 else ""
        raise ConfigError(f"{stale[0]}{more}. Pass --overwrite to do them again, or another --output_dir")
    return todo


def read_run(folder: Path) -> dict[str, Any] | None:
    """A finished run's result; None where there is none."""
    from contaccum.comparison.run import RESULT

    path = folder / RESULT
    if not path.is_file():
        return None
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        return result if {"identity", "evaluations", "curve"} <= result.keys() else _damaged(path)
    except (OSError, ValueError, AttributeError):
        return _damaged(path)


def _damaged(path: Path) -> NoReturn:
    raise DataError(f"{path}: not a result that contaccum wrote; remove it to do the run again")


def _train(
    todo: list[Mapping[str, Any]], folders: Mapping[str, Path], asked: Any, options: Mapping[str, Any]
) -> dict[str, str]:
    import torch

    from contaccum.comparison.evaluating import METRICS
    from contaccum.comparison.run import JOB
    from contaccum.comparison.schedule import available_cores, default_jobs, run_jobs

    if len(todo) < len(folders):
        print(f"{len(folders) - len(todo)} runs are finished already")
    for job in todo:
        folder = folders[job["name"]]
        if (folder / JOB).is_file():  # only what a comparison left here
            shutil.rmtree(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{folder}: cannot be made ({error.strerror or error})") from error
    if not todo:
        return {}
    accelerator = torch.accelerator.is_available() and options.get("use_cpu", ["false"]) != ["true"]
    jobs = min(asked.jobs or default_jobs(accelerator), len(todo))
    threads = max(1, available_cores() // jobs)
    print(f"{jobs} at once, {threads} threads each")
    metric = next(iter(METRICS))

    def done(name: str) -> str:
        result = read_run(folders[name])
        if result is None:
            return ""
        data, evaluation = next(iter(result["evaluations"].items()))
        return f", {data} {METRICS[metric]} {evaluation['metrics'][metric]:.4f}"

    todo = [{**job, "keep_model": asked.keep_models} for job in todo]
    return run_jobs(todo, folders, jobs, threads, lambda line: print(line, flush=True), done)


def _report(
    plan: Any,
    folders: Mapping[str, Path],
    failed: Mapping[str, str],
    argv: Sequence[str],
    asked: Any,
    options: Mapping[str, Any],
    sets: list[dict[str, Any]],
    fingerprints: Mapping[str, str],
) -> int:
    from contaccum.benchmarks.command import machine
    from contaccum.comparison.pictures import draw_report
    from contaccum.comparison.report import build_report, markdown
    from contaccum.evaluation.provenance import git_commit, package_versions
    from contaccum.training.callbacks import TRAIN_LOG
    from contaccum.training.curves import read_log

    found = {name: read_run(folder) for name, folder in folders.items()}
    results = {name: result for name, result in found.items() if result is not None}
    evaluation = {"updates": asked.eval_updates, "queries": asked.eval_queries, "corpus": asked.eval_corpus}
    about = {
        "command": shlex.join(["contaccum", "compare", *argv]),
        "settings": {
            "options": {key: " ".join(values) if values else "true" for key, values in options.items()},
            "evaluation": {**evaluation, "precision": asked.eval_precision, "before": asked.eval_before},
        },
        "data": {"evaluation": sets, "train": sorted(set(fingerprints.values()))},
        "versions": package_versions(),
        "git_commit": git_commit(),
        "machine": machine("cuda" if _cuda() else "cpu"),
    }
    report = redact_record(build_report(plan, results, failed, about))
    output = asked.output_dir
    (output / "report.json").write_text(json.dumps(report, indent=1), encoding="utf-8")
    (output / "report.md").write_text(markdown(report), encoding="utf-8")
    draw_report(plan, results, {name: read_log(folders[name] / TRAIN_LOG) for name in results}, output / "report.png")
    print(f"written: {output / 'report.md'}, report.json and report.png beside it")
    for text in report["warnings"]:
        print(f"take care: {text}")
    for name, reason in failed.items():
        print(f"failed: {name}: {reason}")
    return 1 if failed else 0


def _cuda() -> bool:
    import torch

    return torch.cuda.is_available()
