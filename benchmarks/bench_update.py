"""Measure time and peak memory of an update (one optimizer step), by method and bank size.

    python benchmarks/bench_update.py --backbone minilm --local 8 --total 32 --bank 1024 8192 65536
    python benchmarks/bench_update.py --backbone decoder-100m --lora_r 8 --local 1 --total 32

Weights and token ids are random, because they do not change the cost. The methods take turns in a
shuffled order within one run, so that other load on the machine affects all of them. The main
result is the ratio to gradient accumulation in the same turn. Peak memory is measured in separate
processes. Quality is not measured here.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from measuring.encoders import BACKBONES, make_encoder, use_autocast
from measuring.run import Run
from measuring.updates import (
    BANK_METHODS,
    METHODS,
    Update,
    make_filled_loss,
    make_optimizer,
    measure_turns,
    run_update,
)

from contaccum import DualEncoder
from contaccum.encoders.adapters import add_adapter
from contaccum.files import provenance, write_json

Cell = tuple[int, str, int]
"""Pairs per update, method, rows of the bank."""


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--backbone", choices=BACKBONES, default="minilm")
    add("--untied", action="store_true", help="use two separate encoders")
    add("--lora_r", type=int, help="train LoRA adapters of this rank instead of all weights")
    add("--gradient_checkpointing", action="store_true")
    add("--local", type=int, default=8, help="pairs per micro-batch")
    add("--total", type=int, nargs="+", default=[128], help="pairs per update")
    add("--bank", type=int, nargs="+", default=[1024], help="bank sizes")
    methods = ["grad_accum", "grad_cache", "contaccum"]
    add("--methods", nargs="+", choices=METHODS, default=methods)
    add("--query_length", type=int, default=32, help="tokens")
    add("--passage_length", type=int, default=128, help="tokens")
    add("--repeats", type=int, default=5, help="number of timed turns")
    add("--precision", choices=("float32", "bfloat16"), default="float32")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--no_memory", action="store_true", help="do not measure memory")
    add("--output", type=Path, help="JSON file of the results")
    # Measure the peak memory of one cell; used in the processes that this program starts.
    add("--peak_of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    for total in options.total:
        if total < options.local or total % options.local:
            parser.error(f"--total {total} is not a multiple of --local {options.local}")
    return options


def load_model(options: argparse.Namespace) -> DualEncoder:
    """Return an encoder with random weights in train mode, under autocast if needed."""
    torch.manual_seed(0)
    model = make_encoder(options.backbone, options.device, tied=not options.untied)
    if options.lora_r:
        add_adapter(model, options.lora_r)
    if options.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    use_autocast(model, options.precision)
    return model.train()


def make_update(options: argparse.Namespace, cell: Cell) -> Update:
    """Return the update of a cell."""
    total, method, bank_size = cell
    lengths = (options.query_length, options.passage_length)
    vocabulary = BACKBONES[options.backbone].vocabulary
    return Update(method, total, options.local, bank_size, *lengths, vocabulary)


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure all cells; return quartiles of seconds, ratios to grad_accum and peak memory."""
    model = load_model(options)
    run = Run(torch.device(options.device), deadline=math.inf)
    records = []
    for total in options.total:
        cells: list[Cell] = []
        # The baseline is the first one.
        for method in sorted(options.methods, key=lambda name: name != "grad_accum"):
            bank_sizes = options.bank if method in BANK_METHODS else [0]
            cells += [(total, method, bank_size) for bank_size in bank_sizes]
        updates = {str(cell): make_update(options, cell) for cell in cells}
        figures = measure_turns(model, updates, options.repeats, run)
        for cell in cells:
            low, median, high = figures[str(cell)]["seconds"].values()
            record = dict(zip(("total", "method", "bank"), cell, strict=True))
            record |= {"seconds": median, "seconds_low": low, "seconds_high": high}
            if "grad_accum" in options.methods:
                record["ratio"] = figures[str(cell)]["ratio"]["median"]
            if not options.no_memory:
                record["memory_mb"] = measure_peak(cell)
            records.append(record)
    return records


def measure_peak(cell: Cell) -> float:
    """Return the peak memory of two updates in MB, the lower one of two processes."""
    environment = dict(os.environ)
    # With these variables, glibc returns every tensor above 1 MB to the system when it is freed.
    # Otherwise freed memory would count as memory in use.
    environment["MALLOC_MMAP_THRESHOLD_"] = str(2**20)
    environment["MALLOC_TRIM_THRESHOLD_"] = str(2**20)
    command = [sys.executable, *sys.argv, "--peak_of", json.dumps(cell)]
    peaks = []
    for _ in range(2):
        output = subprocess.check_output(command, text=True, env=environment)
        peaks.append(float(output.splitlines()[-1]))
    return min(peaks)


def print_peak(options: argparse.Namespace) -> None:
    """Measure and print the peak memory of one cell.

    For a GPU this is the peak of the allocated memory, for a CPU the peak of the process's resident
    memory, which Linux reports.
    """
    model = load_model(options)
    run = Run(torch.device(options.device), deadline=math.inf)
    total, method, bank_size = json.loads(options.peak_of)
    update = make_update(options, (total, method, bank_size))
    loss_fn = make_filled_loss(update, model, run)
    optimizer = make_optimizer(model)
    if not run.is_cuda:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # reset the peak
    peaks = [run_update(update, loss_fn, optimizer, run)["peak_mb"] for _ in range(2)]
    if run.is_cuda:
        print(max(peaks))
        return
    # getrusage cannot be used: its peak includes the peak of the parent process.
    status = Path("/proc/self/status").read_text(encoding="ascii")
    [line] = [line for line in status.splitlines() if line.startswith("VmHWM")]
    print(int(line.split()[1]) / 2**10)


def main() -> None:
    """Measure all cells, print one line per cell, and write the records."""
    options = parse_arguments()
    if options.peak_of:
        print_peak(options)
        return
    records = measure(options)
    for record in records:
        values = []
        for name, value in record.items():
            text = f"{value:.3f}" if isinstance(value, float) else str(value)
            values.append(f"{name} {text}")
        print(", ".join(values))
    if options.output:
        settings = {
            name: x for name, x in vars(options).items() if name not in ("output", "peak_of")
        }
        content = {
            "command": shlex.join(["python", *sys.argv]),
            "settings": settings,
            "records": records,
            "threads": torch.get_num_threads(),
            **provenance(),
        }
        write_json(options.output, content)


if __name__ == "__main__":
    main()
