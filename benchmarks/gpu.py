r"""Measure contaccum on a GPU, in independent parts.

    python benchmarks/gpu.py --part update_time search
    python benchmarks/gpu.py --part host_syncs --bank_size 8192     # other sizes: in runs/gpu
    python benchmarks/gpu.py --part study_cell --seconds 60         # also in runs/gpu
    python benchmarks/gpu.py --part fit --model FOLDER              # also in runs/gpu
    python benchmarks/gpu.py --device cpu --tiny --output /tmp/gpu  # a dry run
    python benchmarks/gpu.py --page docs/gpu.md                     # fill the tables of docs/gpu.md

If contaccum is not installed, set PYTHONPATH to the folder of the clone.

All parts, in two calls of seven minutes; parts that do not fit into the time are listed at the end:

    python benchmarks/gpu.py --minutes 7 --part update_time query_side search fit
    python benchmarks/gpu.py --minutes 7 --part encoding decoder loss_exact host_syncs \
        out_of_memory compile study_cell

update_time    measures pairs per second and peak memory of an update, by encoder, micro-batch and
               method, with the losses of sentence-transformers beside those of contaccum
query_side     measures a micro-step of QuerySideLoss with ten million documents, in the memory of
               the GPU and of the host, and checks its gradient
search         measures exact and approximate search on the GPU and on the CPU
fit            fits a model to SciFact with the time of a budget: trials, scores, verdict
encoding       measures texts per second of encoding a corpus, and of forward passes alone
decoder        measures an update of a 0.6B decoder with adapters, on weights in bfloat16 (LoRA) and
               in 4 bits (QLoRA, needs bitsandbytes), with micro-batches of one pair and of two
loss_exact     compares gradients of BankedInfoNCE with a dense float64 loss of the whole batch, if
               the bank contains exactly the rest of the batch; also with autocast and a gradient
               scaler
host_syncs     lists the places where a micro-step of the loss makes the host wait for the device
out_of_memory  checks that training goes on with smaller micro-batches after a real out-of-memory
               error
compile        measures an update with a compiled encoder, and how often it is compiled
study_cell     trains on SciFact with the same number of seconds for each method, and scores

Each part writes OUTPUT/PART.json with its command, versions, device and commit. Until a part is
complete, the cases that it has finished are in OUTPUT/PART.partial.json. The program prints which
parts were run and which were not, and has exit code 1 if a check or a part failed. A part whose
packages are missing is not measured. Nothing is downloaded: texts are random or from the package,
and weights are random, except that fit and study_cell train all-MiniLM-L6-v2 if the `demo` extra is
installed, or the model in --model.
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
import sys
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from gpu_parts.records import Record, describe_run, read_records, write_record
from gpu_parts.settings import (
    METHOD_SECONDS,
    PARTS,
    PARTS_WITH_SIZES,
    TINY,
    NotMeasured,
    Run,
    Sizes,
    format_error,
    format_reason,
)
from gpu_parts.tables import make_tables

from contaccum.evaluation.results import fill_page
from contaccum.files import write_text

# The parts that use an option. All others ignore it.
PARTS_OF_OPTION = {
    "pairs": PARTS_WITH_SIZES,
    "local": PARTS_WITH_SIZES,
    "bank_size": ("host_syncs",),
    "seconds": ("study_cell",),
    "model": ("fit", "study_cell"),
}
RESULTS = Path(__file__).parent / "gpu"  # the results that docs/gpu.md shows
OTHER_RESULTS = Path("runs/gpu")


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = make_parser()
    args = parser.parse_args()
    if args.page is None:
        check_device(args.device, parser)
    args.sizes = TINY if args.tiny else Sizes()
    for name in ("pairs", "local", "bank_size"):
        value = getattr(args, name)
        if value is not None:
            args.sizes = replace(args.sizes, **{name: value})
    if args.sizes.pairs % args.sizes.local or args.sizes.pairs == args.sizes.local:
        parser.error("--pairs must be a multiple of --local, at least twice as large")
    if args.output is None:
        is_for_page = args.page is not None or has_settings_of_page(args)
        args.output = RESULTS if is_for_page else OTHER_RESULTS
    return args


def make_parser() -> argparse.ArgumentParser:
    """Create the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--part",
        nargs="+",
        choices=PARTS,
        default=PARTS,
        help="parts to run; default: all",
    )
    add("--minutes", type=float, default=10, help="start no new part or turn after this time")
    add(
        "--output",
        type=Path,
        help="folder of the PART.json files; default: benchmarks/gpu; runs/gpu for a dry run, and "
        "with other sizes, another --seconds or a --model",
    )
    add("--device", default="cuda", help="default: %(default)s")
    add("--tiny", action="store_true", help="tiny sizes of all parts, for a dry run")
    add("--commit", help="git commit of the code, if the folder has no .git")
    add(
        "--page",
        type=Path,
        metavar="PAGE.md",
        help="run no part, and fill the tables of this page with the results in --output",
    )
    add_part_options(parser)
    return parser


def add_part_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that only some parts use."""
    group = parser.add_argument_group("options of some parts, ignored by the others")

    def add(name: str, help_text: str, **settings: Any) -> None:
        parts = ", ".join(PARTS_OF_OPTION[name])
        group.add_argument(f"--{name}", help=f"{parts}: {help_text}", **settings)

    add("pairs", f"pairs per update; default: {Sizes.pairs}", type=int)
    add("local", f"pairs per micro-batch; default: {Sizes.local}", type=int)
    add("bank_size", f"pairs in the bank; default: {Sizes.bank_size}", type=int)
    add(
        "seconds",
        f"seconds of training of each method; default: {METHOD_SECONDS:g}",
        type=float,
    )
    add(
        "model",
        "folder of a SentenceTransformer to train; default: all-MiniLM-L6-v2 of the demo extra",
        type=Path,
    )


def has_settings_of_page(args: argparse.Namespace) -> bool:
    """Return True for a run on a GPU with the settings that docs/gpu.md names."""
    return (
        args.device.startswith("cuda")
        and args.sizes == Sizes()
        and args.seconds in (None, METHOD_SECONDS)
        and args.model is None
    )


def check_device(device_name: str, parser: argparse.ArgumentParser) -> None:
    """End the program if the parts would not all use the same GPU."""
    device = torch.device(device_name)
    if device.type != "cuda":
        return
    if not torch.cuda.is_available():
        parser.error("torch finds no GPU; for a dry run on a CPU, use --device cpu --tiny")
    if device.index:
        parser.error(
            f"--device {device_name}: the trainers use the first visible GPU; set "
            f"CUDA_VISIBLE_DEVICES={device.index} and leave --device out"
        )
    if torch.cuda.device_count() > 1:
        parser.error("several GPUs are visible; set CUDA_VISIBLE_DEVICES to one of their numbers")


def make_run(args: argparse.Namespace) -> Run:
    """Return the settings that all parts share."""
    device = torch.device(args.device)
    if device.type == "cuda" and device.index is None:
        # Some functions of torch.cuda refuse a device without a number.
        device = torch.device("cuda", torch.cuda.current_device())
    # float32 is compared with float64 and with bfloat16, and some machines turn TF32 on.
    torch.backends.cuda.matmul.allow_tf32 = False
    deadline = STARTED + 60 * args.minutes
    return Run(args.sizes, device, deadline, args.tiny, args.model, args.seconds)


def run_part(name: str, run: Run, run_entries: Record, output: Path) -> Record:
    """Run a part and write its record; return the record.

    No error of a part ends the program, because the other parts must run nevertheless.

    Args:
        name: name of the part.
        run: settings.
        run_entries: the result of `describe_run`.
        output: folder of the records.
    """
    started = time.monotonic()
    record: Record = {"part": name, "measured": False, "is_partial": False, **run_entries}

    def save(result: dict[str, Any], is_partial: bool = True) -> None:
        seconds = time.monotonic() - started
        record.update(measured=True, is_partial=is_partial, result=result, seconds=seconds)
        write_record(record, output)

    try:
        module = importlib.import_module(f"gpu_parts.{name}")
        save(module.measure(replace(run, save_partial=save)), is_partial=False)
    except NotMeasured as error:
        record["reason"] = format_reason(error)
    except ModuleNotFoundError as error:
        record["reason"] = f"{error.name} is not installed" if error.name else format_reason(error)
    except Exception as error:
        add_error(record, error)
    try:
        if "reason" in record:
            record["seconds"] = time.monotonic() - started
            write_record(record, output)
        run.free_memory()
    except Exception as error:  # such as a full disk, or an earlier error of the GPU
        add_error(record, error)
    return record


def add_error(record: Record, error: Exception) -> None:
    """Print an error and add it to a record, unless the record contains a reason already."""
    traceback.print_exception(error)
    record["failed"] = True
    record.setdefault("reason", format_error(error))


def run_parts(names: Sequence[str], run: Run, args: argparse.Namespace) -> bool:
    """Run parts and print which were run and which were not; return whether one has failed."""
    run_entries = describe_run(run)  # at the start, because a GPU may no longer answer later
    if args.commit is not None:
        run_entries["git_commit"] = args.commit
    notes = {name: "NOT RUN: not in --part" for name in PARTS if name not in names}
    has_failed = False
    for name in names:
        if not run.has_time():
            notes[name] = f"NOT RUN: the {args.minutes:g} minutes were over"
            continue
        record = run_part(name, run, run_entries, args.output)
        if record.get("failed"):
            has_failed = True
            notes[name] = f"FAILED: {record['reason']}"
        elif "reason" in record:
            notes[name] = f"NOT RUN: {record['reason']}"
        elif record["result"].get("not_run"):
            notes[name] = f"NOT RUN: {record['result']['not_run']}"
        if record["measured"] and not record["is_partial"]:
            passed = record["result"].get("passed")
            has_failed = has_failed or passed is False
            outcome = {None: "measured", True: "passed", False: "FAILED"}[passed]
            seconds = f"{record['seconds']:.1f} s"
            print(f"{name}: {outcome} in {seconds}, {args.output / name}.json", flush=True)
    for name, note in notes.items():
        print(f"{name}: {note}")
    return has_failed


def main() -> int:
    """Run parts, or fill a page with results; return the exit code."""
    args = parse_arguments()
    if args.page is not None:
        tables = make_tables(read_records(args.output, PARTS))
        page = args.page.read_text(encoding="utf-8")
        write_text(args.page, fill_page(page, tables))
        return 0
    has_failed = run_parts(args.part, make_run(args), args)
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
