r"""Measure contaccum on a GPU, in independent parts.

    python benchmarks/gpu.py --part update_time search
    python benchmarks/gpu.py --part fit --model FOLDER
    python benchmarks/gpu.py --device cpu --tiny                    # a dry run
    python benchmarks/gpu.py --page docs/gpu.md --output benchmarks/gpu

If contaccum is not installed, set PYTHONPATH to the folder of the clone.

All parts, in two calls of seven minutes:

    python benchmarks/gpu.py --minutes 7 --part update_time query_side search fit
    python benchmarks/gpu.py --minutes 7 --part encoding decoder loss_exact host_syncs \
        out_of_memory compile

docs/gpu.md says what each part measures, and shows the records in benchmarks/gpu. Each part writes
OUTPUT/PART.json with its command, versions, device and commit after each case, so that a killed
program leaves what it has measured. Cases for which there is no time or no package are named. An
error ends its case only, and the exit code is then 1, as after a failed check. Nothing is
downloaded: texts are random or from the package, and weights are random, except that fit trains
all-MiniLM-L6-v2 of the `demo` extra, or the model in --model.
"""

# ruff: noqa: E402  # The time and the environment must be read and set before the other imports.

from __future__ import annotations

import os
import time

# The imports take many of the seconds of --minutes.
STARTED = time.monotonic()
# Nothing is downloaded, and a machine without a network must not wait for the hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse
import importlib
import json
import platform
import shlex
import sys
import traceback
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from gpu_parts.tables import get_outcome, make_tables
from measuring.run import NotMeasured, Run

from contaccum.evaluation.results import fill_page
from contaccum.files import provenance, read_json, write_json, write_text

# Each part is the module of this name in gpu_parts. It is imported when it runs, because an error
# in one of them must not end the others.
PARTS = (
    *("update_time", "query_side", "search", "fit", "encoding", "decoder"),
    *("loss_exact", "host_syncs", "out_of_memory", "compile"),
)
# Libraries of some parts, besides those of `contaccum.files.provenance`.
LIBRARIES = ("peft", "bitsandbytes", "triton")
MAX_REASON_LENGTH = 200  # characters of an error that a record and a page show


def parse_arguments() -> argparse.Namespace:
    """Read the command line, and end the program if the parts would not all use the same GPU."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--part", nargs="+", choices=PARTS, default=PARTS, help="parts to run; default: all")
    add("--minutes", type=float, default=10, help="start no new case or turn after this time")
    add("--output", type=Path, default=Path("runs/gpu"), help="folder of the PART.json files")
    add("--device", default="cuda", help="default: %(default)s")
    add("--tiny", action="store_true", help="tiny sizes of all parts, for a dry run")
    add("--commit", help="git commit of the code, if the folder has no .git")
    add("--model", type=Path, help="fit: folder of a SentenceTransformer; default: the demo extra")
    add(
        "--page",
        type=Path,
        metavar="PAGE.md",
        help="run no part, and fill the tables of this page with the records in --output",
    )
    args = parser.parse_args()
    device = torch.device(args.device)
    if args.page is not None or device.type != "cuda":
        return args
    if not torch.cuda.is_available():
        parser.error("torch finds no GPU; for a dry run on a CPU, use --device cpu --tiny")
    if device.index or torch.cuda.device_count() > 1:
        parser.error(
            "the trainers use the first visible GPU; set CUDA_VISIBLE_DEVICES to the number of one "
            "GPU, and leave --device out"
        )
    return args


def make_run(args: argparse.Namespace) -> Run:
    """Return the settings that all parts share."""
    device = torch.device(args.device)
    if device.type == "cuda" and device.index is None:
        # Some functions of torch.cuda refuse a device without a number.
        device = torch.device("cuda", torch.cuda.current_device())
    # float32 is compared with float64 and with bfloat16, and some machines turn TF32 on.
    torch.backends.cuda.matmul.allow_tf32 = False
    return Run(device, STARTED + 60 * args.minutes, args.tiny, args.model)


def describe_run(run: Run, commit: str | None) -> dict[str, Any]:
    """Return the entries that are the same in the records of all parts."""
    device: dict[str, Any] = {"type": run.device.type, "cpus": os.cpu_count()}
    if run.is_cuda:
        properties = torch.cuda.get_device_properties(run.device)
        device |= {"name": properties.name, "memory_mb": properties.total_memory // 2**20}
        device["capability"] = f"{properties.major}.{properties.minor}"
        device["cuda"] = torch.version.cuda
    else:
        device["name"] = platform.processor()
    entries = {
        "date": datetime.now(UTC).date().isoformat(),
        "command": shlex.join(["python", *sys.argv]),
        "device": device,
        "is_tiny": run.is_tiny,
        **provenance(),
    }
    for name in LIBRARIES:
        with suppress(metadata.PackageNotFoundError):
            entries["versions"][name] = metadata.version(name)
    if commit is not None:
        entries["git_commit"] = commit
    return entries


def run_part(name: str, run: Run, entries: dict[str, Any], output: Path) -> dict[str, Any]:
    """Measure the cases of a part, write its record after each of them, and return the record.

    No error of a case ends the program, because the other cases and parts must run nevertheless.
    """
    started = time.monotonic()
    cases: dict[str, Any] = {}
    failures: list[str] = []
    not_run: list[str] = []
    record = {"part": name, **entries}

    def save() -> None:
        result: dict[str, Any] = {"sizes": asdict(sizes) if sizes else None, "cases": cases}
        checks = [case["passed"] for case in cases.values() if "passed" in case]
        if checks or failures:
            result["passed"] = all(checks) and not failures
        if failures:
            result["failures"] = failures
        if not_run:
            result["not_run"] = "; ".join(not_run)
        record.update(result=result, seconds=time.monotonic() - started)
        # NaN and infinite numbers become texts, because JSON cannot represent them.
        write_json(output / f"{name}.json", json.loads(json.dumps(record), parse_constant=str))

    def add_failure(place: str, error: Exception) -> None:
        traceback.print_exception(error)
        failures.append(f"{place}: {shorten(f'{type(error).__name__}: {error}')}")

    sizes = None
    try:
        module = importlib.import_module(f"gpu_parts.{name}")
        sizes = module.TINY if run.is_tiny else module.SIZES
        for case, measure in module.list_cases(sizes, run):
            if not run.has_time():
                not_run.append(f"{case}, and what follows: the time was over")
                break
            try:
                cases[case] = measure()
            except NotMeasured as error:
                not_run.append(f"{case}: {shorten(str(error))}")
            except Exception as error:
                add_failure(case, error)
            save()
            run.free_memory()
    except NotMeasured as error:
        not_run.append(shorten(str(error)))
    except ModuleNotFoundError as error:
        not_run.append(f"{error.name} is not installed")
    except Exception as error:
        add_failure(name, error)
    save()
    return record


def shorten(text: str) -> str:
    """Return a text as one line, shortened if it is long, because tables and lists show it."""
    line = " ".join(text.split())
    return line if len(line) <= MAX_REASON_LENGTH else line[: MAX_REASON_LENGTH - 3] + "..."


def main() -> int:
    """Run parts, or fill a page with records; return the exit code."""
    args = parse_arguments()
    if args.page is not None:
        files = {part: args.output / f"{part}.json" for part in PARTS}
        records = {part: read_json(f) if f.exists() else None for part, f in files.items()}
        page = args.page.read_text(encoding="utf-8")
        write_text(args.page, fill_page(page, make_tables(records)))
        return 0
    run = make_run(args)
    entries = describe_run(run, args.commit)  # now, because a GPU may no longer answer later
    has_failed = False
    for name in args.part:
        if not run.has_time():
            print(f"{name}: NOT RUN: the {args.minutes:g} minutes were over")
            continue
        record = run_part(name, run, entries, args.output)
        outcome, result = get_outcome(record), record["result"]
        has_failed = has_failed or outcome == "failed"
        print(f"{name}: {outcome} in {record['seconds']:.1f} s, {args.output / name}.json")
        for line in result.get("failures", ()):
            print(f"  FAILED: {line}")
        if "not_run" in result:
            print(f"  NOT RUN: {result['not_run']}")
        sys.stdout.flush()
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
