"""Measure contaccum on a GPU, in short independent parts.

    python benchmarks/gpu.py --minutes 9                        # all parts, as far as the time goes
    python benchmarks/gpu.py --part loss_exact host_syncs
    python benchmarks/gpu.py --part update_time --minutes 8 --local 8 --bank_size 8192
    python benchmarks/gpu.py --part study_cell --seconds 60 --model models/all-MiniLM-L6-v2
    python benchmarks/gpu.py --device cpu --tiny --output /tmp/gpu    # a dry run
    python benchmarks/gpu.py --page docs/gpu.md                 # fill the tables of docs/gpu.md

loss_exact     compares gradients of BankedInfoNCE with a dense float64 loss of the whole batch, if
               the bank contains exactly the rest of the batch; also with autocast and a gradient
               scaler
host_syncs     checks that a micro-step of the loss does not make the host wait for the device
update_time    measures seconds and peak memory of an update, with the sizes of BERT-base
decoder        measures the same for a 0.6B decoder with adapters, on weights in bfloat16 (LoRA) and
               in 4 bits (QLoRA, needs bitsandbytes), with micro-batches of one pair and of two
out_of_memory  checks that training goes on with smaller micro-batches after a real out-of-memory
               error
compile        measures an update with a compiled encoder, and how often it is compiled
encoding       measures texts per second of encoding a corpus, and of forward passes alone
query_side     measures a micro-step of QuerySideLoss with ten million documents, in the memory of
               the GPU and of the host, and checks its gradient
study_cell     trains on SciFact with the same number of seconds for each method, and scores
search         measures exact and approximate search with FAISS on the GPU and on the CPU

Each part takes one to four minutes on a fast GPU, and writes OUTPUT/PART.json with its command,
versions, device and commit. The program prints which parts were run and which were not, and has
exit code 1 if a check failed. Nothing is downloaded: texts are random or from the package, and
weights are random. study_cell trains all-MiniLM-L6-v2 if the `demo` extra is installed.
"""

from __future__ import annotations

import os

# Nothing is downloaded, and a machine without a network must not wait for the hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse
import platform
import shlex
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from gpu_parts import compile as compile_part
from gpu_parts import (
    decoder,
    encoding,
    host_syncs,
    loss_exact,
    out_of_memory,
    query_side,
    search,
    study_cell,
    update_time,
)
from gpu_parts.settings import TINY, NotMeasured, Run, Sizes
from gpu_parts.tables import make_tables, read_records

from contaccum.evaluation.tables import fill_page
from contaccum.files import provenance, write_json, write_text

PARTS: dict[str, Callable[[Run], dict[str, Any]]] = {
    "loss_exact": loss_exact.measure,
    "host_syncs": host_syncs.measure,
    "update_time": update_time.measure,
    "decoder": decoder.measure,
    "out_of_memory": out_of_memory.measure,
    "compile": compile_part.measure,
    "encoding": encoding.measure,
    "query_side": query_side.measure,
    "study_cell": study_cell.measure,
    "search": search.measure,
}
RESULTS = Path(__file__).parent / "gpu"  # the results that docs/gpu.md shows
DRY_RUN_RESULTS = Path("runs/gpu")


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
        "cpus": os.cpu_count(),
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
    add(
        "--output",
        type=Path,
        help="folder of the PART.json files; default: benchmarks/gpu, and runs/gpu for a dry run",
    )
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
    add("--seconds", type=float, help="study_cell: seconds of training of each method; default: 40")
    add("--model", type=Path, help="study_cell: folder of a SentenceTransformer to train")
    add(
        "--page",
        type=Path,
        metavar="PAGE.md",
        help="run no part, and fill the tables of this page with the results in --output",
    )
    args = parser.parse_args()
    if args.device is None:
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.output is None:
        is_dry_run = args.tiny or not args.device.startswith("cuda")
        args.output = DRY_RUN_RESULTS if is_dry_run and args.page is None else RESULTS
    args.sizes = TINY if args.tiny else Sizes()
    for name in ("pairs", "local", "bank_size", "turns", "precision"):
        value = getattr(args, name)
        if value is not None:
            args.sizes = replace(args.sizes, **{name: value})
    if args.sizes.pairs % args.sizes.local or args.sizes.pairs == args.sizes.local:
        parser.error("--pairs must be a multiple of --local, at least twice as large")
    return args


def make_run(args: argparse.Namespace) -> Run:
    """Return the settings that all parts share."""
    device = torch.device(args.device)
    if device.type == "cuda" and device.index is None:
        # Some functions of torch.cuda refuse a device without a number.
        device = torch.device("cuda", torch.cuda.current_device())
    deadline = time.monotonic() + 60 * args.minutes
    return Run(args.sizes, device, deadline, args.tiny, args.model, args.seconds)


def run_part(name: str, run: Run, output: Path) -> dict[str, Any]:
    """Run a part and write its record; return the record.

    A part that cannot be measured leaves an earlier record of the part as it is.
    """
    started = time.monotonic()
    record: dict[str, Any] = {"part": name, "measured": True}
    try:
        record["result"] = PARTS[name](run)
    except NotMeasured as error:
        record["measured"] = False
        record["reason"] = str(error)
    except Exception as error:  # such as out of memory: the other parts must run nevertheless
        traceback.print_exc()
        record["measured"] = False
        record["reason"] = f"{type(error).__name__}: {error}"
        record["failed"] = True
    record["seconds"] = time.monotonic() - started
    record["date"] = datetime.now(UTC).date().isoformat()
    record["command"] = shlex.join(["python", *sys.argv])
    record["device"] = describe_device(run.device)
    record["sizes"] = asdict(run.sizes)
    record["is_tiny"] = run.is_tiny
    record.update(provenance())
    file = output / f"{name}.json"
    if record["measured"] or not file.exists():
        write_json(file, record)
    run.free_memory()
    return record


def run_parts(names: list[str], run: Run, output: Path, minutes: float) -> bool:
    """Run parts and print which were run and which were not; return whether one has failed."""
    not_run = {name: "not in --part" for name in PARTS if name not in names}
    has_failed = False
    for name in names:
        if not run.has_time():
            not_run[name] = f"the {minutes:g} minutes were over"
            continue
        record = run_part(name, run, output)
        if not record["measured"]:
            not_run[name] = record["reason"]
            has_failed = has_failed or record.get("failed", False)
            continue
        passed = record["result"].get("passed")
        has_failed = has_failed or passed is False
        outcome = {None: "measured", True: "passed", False: "FAILED"}[passed]
        print(f"{name}: {outcome} in {record['seconds']:.1f} s, {output / name}.json", flush=True)
        if record["result"].get("not_run"):
            not_run[name] = record["result"]["not_run"]
    for name, reason in not_run.items():
        print(f"{name}: NOT RUN: {reason}")
    return has_failed


def main() -> int:
    """Run parts, or fill a page with results; return the exit code."""
    args = parse_arguments()
    if args.page is not None:
        tables = make_tables(read_records(args.output, list(PARTS)))
        page = args.page.read_text(encoding="utf-8")
        write_text(args.page, fill_page(page, tables))
        return 0
    has_failed = run_parts(args.part, make_run(args), args.output, args.minutes)
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
