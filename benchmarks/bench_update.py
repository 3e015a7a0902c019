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
import os
import random
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measuring.encoders import BACKBONES, make_features, use_autocast
from measuring.encoders import make_encoder as make_random_encoder
from measuring.memory import peak_memory_mb, reset_peak_memory
from measuring.updates import (
    BANK_METHODS,
    CACHED_METHODS,
    METHODS,
    fill_bank,
    make_loss,
    make_optimizer,
)

from contaccum import DualEncoder
from contaccum.encoders.adapters import add_adapter
from contaccum.files import provenance, write_json

Cell = tuple[int, str, int]  # pairs per update, method, rows of the bank


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


def make_encoder(options: argparse.Namespace) -> DualEncoder:
    """Create an encoder with random weights in train mode, under autocast if needed."""
    shape = BACKBONES[options.backbone]
    model = make_random_encoder(shape, options.device, tied=not options.untied)
    if options.lora_r:
        add_adapter(model, options.lora_r)
    if options.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    use_autocast(model, options.precision)
    return model.train()


class Update:
    """Updates of one method. All methods share the model and the optimizer."""

    def __init__(
        self,
        options: argparse.Namespace,
        model: DualEncoder,
        optimizer: torch.optim.Optimizer,
        cell: Cell,
    ) -> None:
        total, method, bank_size = cell
        self.options = options
        self.optimizer = optimizer
        uses_one_batch = method == "in_batch" or method in CACHED_METHODS
        self.batch_size = total if uses_one_batch else options.local
        self.num_micro_steps = total // self.batch_size
        self.loss = make_loss(method, model, options.local, bank_size).train()
        fill_bank(self.loss, self.make_features(), model.get_embedding_dimension())

    def make_features(self) -> list[dict[str, Any]]:
        """Return random token ids of queries and passages."""
        options = self.options
        return make_features(
            BACKBONES[options.backbone].vocabulary,
            self.batch_size,
            options.query_length,
            options.passage_length,
            options.device,
        )

    def run(self) -> None:
        """Do one update."""
        for _ in range(self.num_micro_steps):
            loss = self.loss(self.make_features(), None)
            (loss / self.num_micro_steps).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def measure_seconds(update: Update) -> float:
    """Run an update and return its seconds, including the work of the device."""
    is_cuda = torch.device(update.options.device).type == "cuda"
    if is_cuda:
        torch.cuda.synchronize()
    started = time.perf_counter()
    update.run()
    if is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - started


def make_cells(options: argparse.Namespace, total: int) -> list[Cell]:
    """Return all combinations of method and bank size for one number of pairs per update."""
    cells = []
    for method in options.methods:
        bank_sizes = options.bank if method in BANK_METHODS else [0]
        cells += [(total, method, bank_size) for bank_size in bank_sizes]
    return cells


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure all cells; return quartiles of seconds, ratios to grad_accum and peak memory."""
    torch.manual_seed(0)
    model = make_encoder(options)
    optimizer = make_optimizer(model)
    order = random.Random(0)
    records = []
    for total in options.total:
        cells = make_cells(options, total)
        updates = {cell: Update(options, model, optimizer, cell) for cell in cells}
        seconds: dict[Cell, list[float]] = {cell: [] for cell in cells}
        for turn in range(options.repeats + 1):
            for cell in order.sample(cells, len(cells)):
                measured = measure_seconds(updates[cell])
                if turn > 0:  # the first turn is the warm-up
                    seconds[cell].append(measured)
            print(f"total {total}: turn {turn} of {options.repeats}", file=sys.stderr)
        del updates
        baseline = seconds.get((total, "grad_accum", 0))
        records += [summarise(cell, seconds[cell], baseline) for cell in cells]
    if not options.no_memory:
        for record in records:
            record["memory_mb"] = measure_peak((record["total"], record["method"], record["bank"]))
    return records


def summarise(
    cell: Cell,
    seconds: Sequence[float],
    baseline: Sequence[float] | None,
) -> dict[str, Any]:
    """Return the record of a cell.

    Args:
        cell: pairs per update, method and bank size.
        seconds: seconds of each turn.
        baseline: seconds of grad_accum in the same turns; None: grad_accum is not measured.
    """
    total, method, bank_size = cell
    low, median, high = np.quantile(seconds, [0.25, 0.5, 0.75]).tolist()
    ratio = None
    if baseline is not None:
        ratio = float(np.median(np.array(seconds) / np.array(baseline)))
    return {
        "total": total,
        "method": method,
        "bank": bank_size,
        "seconds": median,
        "seconds_low": low,
        "seconds_high": high,
        "ratio": ratio,
    }


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
    """Measure and print the peak memory of one cell."""
    total, method, bank_size = json.loads(options.peak_of)
    model = make_encoder(options)
    update = Update(options, model, make_optimizer(model), (total, method, bank_size))
    reset_peak_memory(options.device)
    update.run()
    update.run()
    print(peak_memory_mb(options.device))


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
        settings = dict(vars(options))
        del settings["output"]
        del settings["peak_of"]
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
