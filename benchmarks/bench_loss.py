"""Measure the CPU time and peak memory of the loss alone, and compare them with another commit.

Each measurement runs in its own process on one thread. The working tree and the other commit take
turns within one run, so that other load on the machine affects both. Nothing is trained: embeddings
and text ids are random.

    python benchmarks/bench_loss.py --against 023f112 --sizes 1024x384 8192x768 --turns 7 \\
        --output benchmarks/loss.json
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SIZES = ("1024x384", "4096x384", "8192x768")
NUM_WARM_UP_STEPS = 3
PAIRS_PER_FILL_STEP = 64  # pairs per micro-step while the bank is filled


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--against", metavar="GIT_REF", help="a commit to compare with")
    add("--sizes", nargs="+", default=SIZES, metavar="MxD", help="bank size x embedding dimension")
    add("--local", type=int, default=8, help="pairs per micro-batch")
    add("--drift_compensation", nargs="+", default=["none", "auto"])
    add("--no_ids", action="store_true", help="texts without ids, so that nothing is masked")
    add("--turns", type=int, default=3, help="processes per tree and size")
    add("--repeats", type=int, default=40, help="measured micro-steps per process")
    add("--output", type=Path, help="JSON file of the results")
    # Measure a single size; used in the processes that this program starts.
    add("--measure", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    args = parse_arguments()
    if args.measure:
        print(json.dumps(measure(args)))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        trees = {"here": ROOT}
        if args.against:
            trees["against"] = Path(folder) / "tree"
            run_git("worktree", "add", "--quiet", "--detach", str(trees["against"]), args.against)
        records = []
        try:
            for drift_compensation in args.drift_compensation:
                for size in args.sizes:
                    records.append(compare_trees(size, drift_compensation, trees, args))
        finally:
            if args.against:
                run_git("worktree", "remove", "--force", str(trees["against"]))
    if args.output:
        content = {
            "command": " ".join(["python", *sys.argv]),
            "commit": run_git("rev-parse", "HEAD"),
            "against": args.against,
            "machine": platform.machine(),
            "processor": get_processor_name(),
            "threads": 1,
            "results": records,
        }
        args.output.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return 0


def compare_trees(
    size: str, drift_compensation: str, trees: dict[str, Path], args: argparse.Namespace
) -> dict[str, Any]:
    """Measure one size with every tree.

    Returns:
        Medians of each tree's measurements over turns, and ratios of this tree to the other one in
        the same turn.
    """
    options = ["--drift_compensation", drift_compensation]
    if args.no_ids:
        options.append("--no_ids")
    options += ["--local", str(args.local), "--repeats", str(args.repeats), "--measure", size]
    measurements: dict[str, list[dict[str, float]]] = {name: [] for name in trees}
    for _ in range(args.turns):
        for name, tree in trees.items():
            environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
            command = [sys.executable, __file__, *options]
            output = subprocess.check_output(command, env=environment, text=True)
            measurements[name].append(json.loads(output.strip().splitlines()[-1]))
    record: dict[str, Any] = {
        "size": size,
        "local": args.local,
        "ids": not args.no_ids,
        "drift_compensation": drift_compensation,
    }
    for name, turns in measurements.items():
        record[name] = {key: statistics.median(turn[key] for turn in turns) for key in turns[0]}
    if "against" in measurements:
        for key in ("milliseconds", "peak_mb"):
            ratios = []
            for here, against in zip(measurements["here"], measurements["against"], strict=True):
                ratios.append(here[key] / against[key])
            record[f"{key}_ratio"] = {"median": statistics.median(ratios), "all": ratios}
    print(json.dumps(record), flush=True)
    return record


def measure(args: argparse.Namespace) -> dict[str, float]:
    """Measure micro-steps of the loss with a full bank.

    Returns:
        ``milliseconds``: median CPU time of forward, backward and enqueue; ``peak_mb``: peak memory
        of the bank and the micro-steps.
    """
    import torch

    from contaccum import BankedInfoNCE

    torch.set_num_threads(1)
    bank_size, dimension = (int(number) for number in args.measure.split("x"))
    generator = torch.Generator().manual_seed(0)

    def make_loss(bank_size: int) -> BankedInfoNCE:
        return BankedInfoNCE(
            bank_size,
            temperature=0.05,
            similarity="cos",
            drift_compensation=args.drift_compensation[0],
        )

    def run_micro_step(loss_fn: BankedInfoNCE, num_pairs: int) -> float:
        """Return the CPU time in milliseconds."""
        queries = torch.randn(num_pairs, dimension, generator=generator).requires_grad_()
        passages = torch.randn(num_pairs, dimension, generator=generator).requires_grad_()
        query_ids = None
        passage_ids = None
        if not args.no_ids:
            query_ids = torch.randint(10**9, (num_pairs,), generator=generator)
            passage_ids = torch.randint(10**9, (num_pairs,), generator=generator)
        started = time.process_time()
        loss = loss_fn(queries, passages, query_ids=query_ids, passage_ids=passage_ids)
        loss.backward()
        return 1e3 * (time.process_time() - started)

    # The first micro-steps load code. Its memory must not count as memory of the measured bank.
    small_loss = make_loss(bank_size=16)
    for _ in range(5):
        run_micro_step(small_loss, args.local)
    memory_before = read_peak_memory_mb(reset=True)

    loss_fn = make_loss(bank_size)
    num_fill_steps = -(-bank_size // PAIRS_PER_FILL_STEP)  # rounded up
    for _ in range(num_fill_steps):
        run_micro_step(loss_fn, PAIRS_PER_FILL_STEP)
    loss_fn.end_update()
    read_peak_memory_mb(reset=True)
    milliseconds = []
    for _ in range(args.repeats + NUM_WARM_UP_STEPS):
        milliseconds.append(run_micro_step(loss_fn, args.local))
    return {
        "milliseconds": statistics.median(milliseconds[NUM_WARM_UP_STEPS:]),
        "peak_mb": read_peak_memory_mb() - memory_before,
    }


def read_peak_memory_mb(reset: bool = False) -> float:
    """Return the peak of the resident memory since the last reset (Linux).

    Args:
        reset: reset the peak first, so that the result is the memory in use now.
    """
    if reset:
        ctypes.CDLL(None).malloc_trim(0)  # return freed memory to the system
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    raise OSError("/proc/self/status has no VmHWM; peak memory can be measured on Linux only")


def get_processor_name() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if "model name" in line:
            return line.split(":", 1)[1].strip()
    return platform.processor()


def run_git(*arguments: str) -> str:
    return subprocess.check_output(["git", *arguments], cwd=ROOT, text=True).strip()


if __name__ == "__main__":
    sys.exit(main())
