"""The loss alone, against another commit: CPU time and peak memory of a micro-step, on one thread and in one run.

Each figure comes from processes of their own that take turns, this tree and the other one, so that other work on the
machine falls on both. It trains nothing: embeddings are random, and so are the ids of their texts.

    python benchmarks/bench_loss.py --against f6f29ca --output benchmarks/loss.json
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


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--against", metavar="GIT_REF", help="a commit to compare with")
    parser.add_argument(
        "--sizes", nargs="+", default=SIZES, metavar="MxD", help="bank rows and embedding size"
    )
    parser.add_argument("--local", type=int, default=8, help="pairs in a micro-batch")
    parser.add_argument("--drift_compensation", nargs="+", default=["none", "auto"])
    parser.add_argument(
        "--no_ids", action="store_true", help="texts without ids: nothing is masked"
    )
    parser.add_argument("--turns", type=int, default=3, help="processes of each tree for each size")
    parser.add_argument(
        "--repeats", type=int, default=40, help="micro-steps that a process measures"
    )
    parser.add_argument("--output", type=Path, help="JSON of all figures")
    parser.add_argument("--measure", help=argparse.SUPPRESS)  # one size, in a process of its own
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args)))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        trees = {"here": ROOT}
        if args.against:
            trees["against"] = Path(folder) / "tree"
            _git("worktree", "add", "--quiet", "--detach", str(trees["against"]), args.against)
        try:
            records = [
                compare(size, drift, trees, args)
                for drift in args.drift_compensation
                for size in args.sizes
            ]
        finally:
            if args.against:
                _git("worktree", "remove", "--force", str(trees["against"]))
    if args.output:
        about = {"command": " ".join(["python", *sys.argv]), "commit": _git("rev-parse", "HEAD")}
        about |= {
            "against": args.against,
            "machine": platform.machine(),
            "processor": _processor(),
            "threads": 1,
        }
        args.output.write_text(
            json.dumps({**about, "results": records}, indent=2) + "\n", encoding="utf-8"
        )
    return 0


def compare(
    size: str, drift: str, trees: dict[str, Path], args: argparse.Namespace
) -> dict[str, Any]:
    """Medians over turns of a tree's figures, and of the ratio to the other tree in the same turn."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in trees}
    for _ in range(args.turns):
        for name, tree in trees.items():
            environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
            settings = ["--drift_compensation", drift, *(["--no_ids"] if args.no_ids else [])]
            settings += [
                "--local",
                str(args.local),
                "--repeats",
                str(args.repeats),
                "--measure",
                size,
            ]
            answer = subprocess.check_output(
                [sys.executable, __file__, *settings], env=environment, text=True
            )
            found[name].append(json.loads(answer.strip().splitlines()[-1]))
    record: dict[str, Any] = {
        "size": size,
        "local": args.local,
        "ids": not args.no_ids,
        "drift_compensation": drift,
    }
    for name, runs in found.items():
        record[name] = {key: statistics.median(one[key] for one in runs) for key in runs[0]}
    if "against" in found:
        for key in ("milliseconds", "peak_mb"):
            ratios = [a[key] / b[key] for a, b in zip(found["here"], found["against"], strict=True)]
            record[f"{key}_ratio"] = {"median": statistics.median(ratios), "all": ratios}
    print(json.dumps(record), flush=True)
    return record


def measure(args: argparse.Namespace) -> dict[str, float]:
    """``milliseconds``: median CPU time of forward, backward and enqueue; ``peak_mb``: what bank and steps take."""
    import torch

    from contaccum import BankedInfoNCE

    torch.set_num_threads(1)
    m, d = (int(x) for x in args.measure.split("x"))
    generator = torch.Generator().manual_seed(0)

    def step(n: int) -> float:
        inputs = [torch.randn(n, d, generator=generator).requires_grad_() for _ in range(2)]
        ids = (
            [None, None]
            if args.no_ids
            else [torch.randint(10**9, (n,), generator=generator) for _ in range(2)]
        )
        started = time.process_time()
        loss_fn(*inputs, query_ids=ids[0], passage_ids=ids[1]).backward()
        return 1e3 * (time.process_time() - started)

    loss_fn = BankedInfoNCE(
        16, temperature=0.05, similarity="cos", drift_compensation=args.drift_compensation[0]
    )
    for _ in range(5):
        step(args.local)  # what is loaded on first use is nobody's memory
    before = _memory_mb(reset=True)
    loss_fn = BankedInfoNCE(
        m, temperature=0.05, similarity="cos", drift_compensation=args.drift_compensation[0]
    )
    for _ in range(-(-m // 64)):
        step(64)
    loss_fn.end_update()
    _memory_mb(reset=True)
    times = [step(args.local) for _ in range(args.repeats + 3)][3:]
    return {"milliseconds": statistics.median(times), "peak_mb": _memory_mb() - before}


def _memory_mb(reset: bool = False) -> float:
    """Resident memory at its highest since the last reset, and after a reset what is in use now (Linux)."""
    if reset:
        ctypes.CDLL(None).malloc_trim(0)  # what is free goes back to the system
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    status = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    (line,) = (line for line in status if line.startswith("VmHWM:"))
    return int(line.split()[1]) / 1024


def _processor() -> str:
    names = [
        line
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        if "model name" in line
    ]
    return names[0].split(":", 1)[1].strip() if names else platform.processor()


def _git(*arguments: str) -> str:
    return subprocess.check_output(["git", *arguments], cwd=ROOT, text=True).strip()


if __name__ == "__main__":
    sys.exit(main())
