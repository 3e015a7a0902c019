"""Run `contaccum fit --demo` as README has it, and write its record, quickstart.json.

    python benchmarks/quickstart.py

The record has the verdict, the candidates, the split and the times of the fit's result.json, and
the largest memory (resident set) of the process. tests/test_readme.py compares README with it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from contaccum.files import read_json, write_json

RECORD = Path(__file__).with_name("quickstart.json")
KEPT = (
    "verdict",
    "lines",
    "model",
    "split",
    "scores",
    "candidates",
    "free",
    "chosen",
    "recommended",
    "bm25_weight",
    "seconds",
    "budget_seconds",
    "made_with",
)
"""Parts of result.json. The others have texts of MedQuAD, or repeat these."""
PATHS = ("model", "train_data", "passage_store")
"""Settings of a candidate that name folders of this machine, which are left out."""
BYTES_PER_UNIT = 1 if sys.platform == "darwin" else 1024  # of the memory that wait4 returns


def count_cores() -> int:
    """Return the number of CPU cores that this process, and so the fit, may use."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def main() -> int:
    """Run the fit in a process of its own, and return its exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("runs/quickstart"),
        help="new folder of the fit; default: %(default)s",
    )
    args = parser.parse_args()
    command = [sys.executable, "-m", "contaccum.cli", "fit", "--demo", "--output", args.output]
    process = subprocess.Popen(command)
    _, status, usage = os.wait4(process.pid, 0)
    exit_code = os.waitstatus_to_exitcode(status)
    if exit_code == 0:
        write_record(args.output, usage.ru_maxrss * BYTES_PER_UNIT)
    return exit_code


def write_record(folder: Path, peak_bytes: int) -> None:
    """Write the record of the finished fit in a folder."""
    result = read_json(folder / "result.json")
    record = {name: result[name] for name in KEPT}
    for candidate in record["candidates"]:
        for name in PATHS:
            candidate["settings"].pop(name, None)
    record["cpu_cores"] = count_cores()
    record["peak_memory_mb"] = round(peak_bytes / 2**20)
    write_json(RECORD, record)


if __name__ == "__main__":
    sys.exit(main())
