"""`contaccum reproduce TABLE1`: download, train, encode, search and score by the paper's recipes, and compare.

Every step is a `contaccum` command in a process of its own, printed as it is run, and is done once: a reproduction that
was cut off goes on where it was.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from contaccum.errors import ConfigError, DataError, UserError
from contaccum.evaluation.arguments import Parser
from contaccum.evaluation.results import read_result, write_atomically
from contaccum.reproduction.plan import (
    CROSS_ENCODER,
    DPR_FILES,
    MEMORIES,
    METHODS,
    RunPlan,
    Settings,
    Step,
    hours,
    peak_gigabytes,
    plan_run,
    shown_hours,
    steps_once,
    table,
)

TABLES = ("TABLE1",)
_STATE = "steps.json"


def run(argv: Sequence[str] | None = None) -> int:
    """`contaccum reproduce TABLE1 --datasets nq --memory 11gb`; returns 0.

    Raises `UserError` for a mistake in the arguments before anything is fetched, and where a step ended with one.
    """
    args, train_options = _parse(argv)
    import torch

    on_gpu = torch.cuda.is_available() and args.device != "cpu"
    precision = args.precision or ("float16" if on_gpu else "float32")
    settings = Settings(
        configs=args.configs,
        data=args.data_dir,
        output=args.output_dir,
        files=args.files_from,
        precision=precision,
        dtype=args.dtype,
        batch_size=args.batch_size,
        index=args.index,
        cross_encoder=args.cross_encoder,
        limit_memory=on_gpu and not args.no_memory_limit,
        keep_embeddings=args.keep_embeddings,
        device=args.device,
        train_options=train_options,
    )
    runs = [plan_run(d, m, method, settings) for d in args.datasets for m in args.memory for method in args.methods]
    for one in runs:
        _refuse_other_settings(one)
    print(_shown_plan(runs, args.device, precision))
    if args.dry_run:
        return 0
    for one in runs:
        for step in one.steps:
            _do(one, step)
        _forget_embeddings(one)
        print(_shown_results([one]))
    shown = _shown_results(runs)
    path = args.output_dir / "table1.md"
    write_atomically(path, [shown, "\n"])
    write_atomically(path.with_suffix(".json"), [json.dumps(_results(runs), indent=1), "\n"])
    print(f"{shown}\nwritten: {path} {path.with_suffix('.json')}")
    return 0


def _shown_plan(runs: Sequence[RunPlan], device: str | None, precision: str) -> str:
    from contaccum.reproduction.speed import UTILISATION, matmul_speed

    speed = {dtype: matmul_speed(device, dtype) for dtype in {"float32", precision}}
    lines, total, shown = [], 0.0, ""
    for one, step in steps_once(runs):
        if one.name != shown:
            shown = one.name
            lines.append(one.name)
        done = _is_done(one, step)
        cost = 0.0 if done else hours(step, speed, UTILISATION)
        total += cost
        size = "?" if step.gigabytes is None else f"{step.gigabytes:,.1f} GB"
        after = ", gone once it is scored" if step.temporary else ""
        what = f"contaccum {shlex.join(step.argv)}" if step.argv else f"{step.download.url} -> {step.download.path}"  # type: ignore[union-attr]
        lines.append(f"  {'done' if done else shown_hours(cost):>9}  {size:>9}  {step.name}{after}\n{'':>25}{what}")
    most, unknown = peak_gigabytes(runs)
    free = shutil.disk_usage(_existing(runs[0].folder)).free / 1e9
    at_least = f" and {unknown} files whose size is not known" if unknown else ""
    rates = " and ".join(f"{rate / 1e12:.2f} TFLOP/s in {dtype}" for dtype, rate in sorted(speed.items()))
    lines += [
        f"hours: {shown_hours(total)} in all, guessed from matrix products here ({rates}; {UTILISATION:.0%} of that is "
        "reached), and fetching and reading",
        f"disk: {most:,.0f} GB at most{at_least}; {free:,.0f} GB are free",
    ]
    if most > free:
        lines.append("the disk is too small for that: choose --data_dir and --output_dir elsewhere, or fewer at a time")
    return "\n".join(lines)


def _existing(path: Path) -> Path:
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def _state(one: RunPlan) -> dict[str, Any]:
    try:
        state = json.loads((one.folder / _STATE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise DataError(f"{one.folder / _STATE}: cannot be read ({error}); remove it to do the steps again") from error
    return state if isinstance(state, dict) else {}


def _is_done(one: RunPlan, step: Step) -> bool:
    if step.name == "mine" or step.download:  # shared by runs, and known by what is there
        return all(path.exists() for path in step.outputs)
    state = _state(one)
    if step.temporary and "score" in state:
        return step.name in state
    return step.name in state and all(path.exists() for path in step.outputs)


def _refuse_other_settings(one: RunPlan) -> None:
    state = _state(one)
    for step in one.steps:
        if step.name in state and state[step.name] != one.identity(step):
            raise ConfigError(
                f"{one.folder}: {step.name} was done with other settings (see {_STATE} there); name another "
                "--output_dir, or remove the folder"
            )


def _do(one: RunPlan, step: Step) -> None:
    if _is_done(one, step):
        print(f"{one.name}: {step.name} is done", flush=True)
        return
    print(f"{one.name}: {step.name}", flush=True)
    if step.download is not None:
        _fetch(step)
        return
    if step.name == "mine":
        step.outputs[0].parent.mkdir(parents=True, exist_ok=True)
    one.folder.mkdir(parents=True, exist_ok=True)
    print(f"$ contaccum {shlex.join(step.argv)}", flush=True)
    code = _call(step.argv)
    if code in (130, 143, -2, -15):
        raise SystemExit(130 if code in (130, -2) else 143)
    if code:
        raise UserError(
            f"{one.name}: {step.name} ended with exit code {code}, as it says above; mend that and start again, and "
            "the reproduction goes on from there"
        )
    missing = [str(path) for path in step.outputs if not path.exists()]
    if missing:
        raise RuntimeError(f"{step.name} left no {', '.join(missing)}")
    if step.name != "mine":
        state = {**_state(one), step.name: one.identity(step)}
        write_atomically(one.folder / _STATE, [json.dumps(state, indent=1), "\n"])


def _call(argv: Sequence[str]) -> int:
    """Run `contaccum ARGV` in a process of its own, whose memory is free afterwards; returns its exit code."""
    command = [sys.executable, "-m", "contaccum.cli", *argv]
    return subprocess.run(command, env={**os.environ, "PYTHONUNBUFFERED": "1"}).returncode


def _fetch(step: Step) -> None:
    download = step.download
    assert download is not None
    if download.beir:
        from contaccum.data.beir_download import fetch

        fetch(download.url, download.path.parent, f"unzip it to {download.path} yourself")
    else:
        from contaccum.reproduction.download import fetch_file

        fetch_file(download.url, download.path)


def _forget_embeddings(one: RunPlan) -> None:
    for step in one.steps:
        if step.temporary and step.outputs[0].exists():
            shutil.rmtree(step.outputs[0].parent)


def _results(runs: Sequence[RunPlan]) -> list[dict[str, Any]]:
    """Ours and the published figures, an entry a data set, a memory and a method."""
    found = []
    for one in runs:
        record = read_result(one.scores)
        about = table()["datasets"][one.dataset]
        found.append(
            {
                "dataset": one.dataset,
                "memory": one.memory,
                "method": one.method,
                "metrics": {name: record["metrics"][name] for name in about["metrics"]},
                "queries": record["data"].get("questions", record["data"].get("queries")),
                "scores": str(one.scores),
                "model": str(one.folder / "model"),
                "published": [
                    {**figure, "source": table()["sources"][figure["source"]]} for figure in about["published"]
                ],
            }
        )
    return found


def _shown_results(runs: Sequence[RunPlan]) -> str:
    """A Markdown table for each data set: our figures, and the published ones with their difference from ours."""
    parts = []
    for dataset in dict.fromkeys(one.dataset for one in runs):
        about = table()["datasets"][dataset]
        ours = _results([one for one in runs if one.dataset == dataset])
        lines = [
            f"## {about['title']}",
            "",
            f"| memory | method | {' | '.join(about['metrics'])} |",
            f"|---|---|{'---|' * len(about['metrics'])}",
        ]
        for result in ours:
            cells = [f"{100 * result['metrics'][name]:.1f}" for name in about["metrics"]]
            lines.append(f"| {result['memory']} | {result['method']} (here) | {' | '.join(cells)} |")
        for figure in about["published"]:
            twin = next((r for r in ours if (r["memory"], r["method"]) == (figure["memory"], "in_batch")), None)
            cells = []
            for name in about["metrics"]:
                score = figure["metrics"][name]
                less = f" ({100 * (twin['metrics'][name] - score):+.1f} here)" if twin else ""
                cells.append(f"{100 * score:.1f}{less}")
            lines.append(f"| {figure['memory']} | {figure['model']} (published) | {' | '.join(cells)} |")
        parts.append("\n".join(lines))
    parts.append(
        f"Published: {table()['sources']['DPR']}. The other figures of {table()['title']} are not held here "
        "(docs/paper.md)."
    )
    return "\n\n".join(parts)


def _parse(argv: Sequence[str] | None) -> tuple[Any, tuple[str, ...]]:
    datasets = list(table()["datasets"])
    parser = Parser(
        prog="contaccum reproduce",
        description="Reproduce the ContAccum paper's Table 1, or cells of it: docs/paper.md. Every other --key is one "
        "of `contaccum train`'s.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("table", choices=TABLES, metavar="TABLE1")
    add("--datasets", nargs="+", choices=datasets, default=datasets, metavar="NAME", help="default: %(default)s")
    add("--memory", nargs="+", choices=MEMORIES, default=["11gb"], metavar="SIZE", help="11gb (default), 24gb, 80gb")
    add("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="METHOD", help="default: %(default)s")
    add("--dry_run", "--dry-run", action="store_true", help="print the steps, hours and disk, and do nothing")
    add("--configs", type=Path, default=Path("configs/paper"), metavar="DIR", help="default: %(default)s")
    add("--data_dir", type=Path, default=Path("data"), metavar="DIR", help="default: %(default)s")
    add("--output_dir", type=Path, default=Path("runs/paper"), metavar="DIR", help="default: %(default)s")
    add("--files_from", default=DPR_FILES, metavar="URL", help="a mirror of %(default)s")
    add("--precision", choices=("float32", "bfloat16", "float16"), help="of encoding; default: float16 on a GPU")
    add("--dtype", choices=("float16", "float32"), default="float16", help="of the encoded corpus on disk")
    add("--batch_size", type=int, default=32, metavar="N", help="of encoding")
    add("--index", default="Flat", help="FAISS factory string; Flat is exact")
    add("--cross_encoder", default=CROSS_ENCODER, metavar="MODEL", help="of MS MARCO's negatives; default: %(default)s")
    add("--device", help="of encoding and search, such as cuda:1")
    add("--keep_embeddings", action="store_true", help="do not remove a run's encoded corpus once it is scored")
    add("--no_memory_limit", action="store_true", help="on a larger GPU, do not hold training to the size of --memory")
    args, rest = parser.parse_known_args(argv)
    for key in ("--train_data", "--output_dir", "--method", "--resume_from_checkpoint"):
        if any(word.split("=")[0] == key for word in rest):
            raise ConfigError(f"{key}: is set by the plan (--data_dir, --output_dir and --methods change it)")
    return args, tuple(rest)
