"""Measure contaccum on a GPU, in short independent parts.

    python benchmarks/gpu.py                                    # all parts, in ten minutes
    python benchmarks/gpu.py --part loss_exact host_syncs
    python benchmarks/gpu.py --part update_time --minutes 8 --local 8 --bank_size 8192
    python benchmarks/gpu.py --device cpu --tiny --output /tmp/gpu    # a dry run

loss_exact   compares gradients of BankedInfoNCE with a dense float64 loss of the whole batch, if
the
             bank contains exactly the rest of the batch; also with autocast and a gradient scaler
host_syncs   checks that a micro-step of the loss does not make the host wait for the device
update_time  measures seconds and peak memory of an update, with the sizes of BERT-base

Each part writes OUTPUT/PART.json with its command, versions, device and commit. The program prints
which parts were run and which were not, and has exit code 1 if a check failed. Weights and texts
are random, so nothing is downloaded.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from gpu_parts import compile as compile_part
from gpu_parts import decoder, encoding, host_syncs, loss_exact, out_of_memory, query_side, update_time
from gpu_parts.settings import TINY, NotMeasured, Run, Sizes

from contaccum.files import provenance, write_json

PARTS: dict[str, Callable[[Run], dict[str, Any]]] = {
    "loss_exact": loss_exact.measure,
    "host_syncs": host_syncs.measure,
    "update_time": update_time.measure,
    "decoder": decoder.measure,
    "out_of_memory": out_of_memory.measure,
    "compile": compile_part.measure,
    "encoding": encoding.measure,
    "query_side": query_side.measure,
}


def describe_device(device: torch.device) -> dict[str, Any]:
    """Describe the device for a record."""
    if device.type != "cuda":
        return {"type": device.type, "name": platform.processor(), "cpus": os.cpu_count()}
    properties = torch.cuda.get_device_properties(device)
    return {
        "type": device.type,
        "name": properties.name,
        "memory_mb": properties.total_memory // 2**20,
        "capability": f"{properties.major}.{properties.minor}",
        "cuda": torch.version.cuda,
    }


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--part",
        nargs="+",
        choices=list(PARTS),
        default=list(PARTS),
        help="parts to run; default: all",
    )
    add("--minutes", type=float, default=10, help="start no new part or turn after this time")
    add("--output", type=Path, default=Path("runs/gpu"), help="folder of the PART.json files")
    add("--device", help="default: cuda if there is a GPU, else cpu")
    add("--tiny", action="store_true", help="tiny sizes, for a dry run")
    add("--pairs", type=int, help=f"pairs per update; default: {Sizes.pairs}")
    add("--local", type=int, help=f"pairs per micro-batch; default: {Sizes.local}")
    add("--bank_size", type=int, help=f"default: {Sizes.bank_size}")
    add("--turns", type=int, help=f"updates of each method; default: {Sizes.turns}")
    add(
        "--precision",
        choices=("float32", "bfloat16"),
        help="precision of the encoder in update_time",
    )
    args = parser.parse_args()
    if args.device is None:
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    args.sizes = TINY if args.tiny else Sizes()
    for name in ("pairs", "local", "bank_size", "turns", "precision"):
        value = getattr(args, name)
        if value is not None:
            args.sizes = replace(args.sizes, **{name: value})
    if args.sizes.pairs % args.sizes.local or args.sizes.pairs == args.sizes.local:
        parser.error("--pairs must be a multiple of --local, at least twice as large")
    return args


def run_part(name: str, run: Run, output: Path) -> dict[str, Any]:
    """Run a part and write its record; return the record."""
    started = time.monotonic()
    record: dict[str, Any] = {"part": name, "measured": True}
    try:
        record["result"] = PARTS[name](run)
    except NotMeasured as error:
        record["measured"] = False
        record["reason"] = str(error)
    except RuntimeError as error:  # out of memory, or an operation that the device does not support
        record["measured"] = False
        record["reason"] = f"{type(error).__name__}: {error}"
        record["failed"] = True
    record["seconds"] = time.monotonic() - started
    record["command"] = shlex.join(["python", *sys.argv])
    record["device"] = describe_device(run.device)
    record["sizes"] = asdict(run.sizes)
    record.update(provenance())
    write_json(output / f"{name}.json", record)
    return record


def main() -> int:
    """Run the parts and print which were run and which were not; return the exit code."""
    args = parse_arguments()
    deadline = time.monotonic() + 60 * args.minutes
    run = Run(args.sizes, torch.device(args.device), deadline, args.tiny)
    not_run = {name: "not in --part" for name in PARTS if name not in args.part}
    has_failed = False
    for name in args.part:
        if time.monotonic() > deadline:
            not_run[name] = f"the {args.minutes:g} minutes were over"
            continue
        record = run_part(name, run, args.output)
        if not record["measured"]:
            not_run[name] = record["reason"]
            has_failed = has_failed or record.get("failed", False)
            continue
        passed = record["result"].get("passed")
        has_failed = has_failed or passed is False
        outcome = {None: "measured", True: "passed", False: "FAILED"}[passed]
        file = args.output / f"{name}.json"
        print(f"{name}: {outcome} in {record['seconds']:.1f} s, {file}", flush=True)
        if record["result"].get("not_run"):
            not_run[name] = record["result"]["not_run"]
    for name, reason in not_run.items():
        print(f"{name}: NOT RUN: {reason}")
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
