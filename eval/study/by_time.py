"""Study by time: all layers of a pretrained model, trained by each method in the same time.

    python eval/study/split_pairs.py contaccum/data/scifact runs/time_study/scifact --dev 0.19 \\
        --by_query
    python eval/study/by_time.py scifact --model MODEL --folder runs/time_study

The plan is eval/study/by_time.yaml; docs/time_study.md explains it. An entry of the plan is a
training method with its settings. FOLDER/DATA (or the `folder` that the plan names) is a BEIR
folder with the splits train, dev and test over one corpus. The time of an update of each entry is
measured first. Each entry is trained with the first seed at several learning rates, and with all
seeds at the rate that `comparison.ladder` chooses by dev scores. Every finished run is a
file OUTPUT/DATA/ENTRY-RATE-SEED.json, and the same command skips the runs that have one.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from time_study.plan import read_plan
from time_study.schedule import Study

from contaccum.errors import UserError

ROOT = Path(__file__).resolve().parents[2]


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", nargs="+", help="names of data sets of the plan")
    parser.add_argument("--model", required=True, help="the model to fine-tune")
    parser.add_argument(
        "--folder",
        type=Path,
        required=True,
        help="parent of the data folders; models, stores and logs go to FOLDER/by_time",
    )
    parser.add_argument("--plan", type=Path, default=ROOT / "eval" / "study" / "by_time.yaml")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "by_time")
    parser.add_argument("--entries", nargs="+", help="entries to run; default: all of the plan")
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time")
    return parser.parse_args()


def main() -> None:
    """Do all runs of the data sets that have no result yet."""
    args = parse_arguments()
    plan = read_plan(args.plan)
    for data in args.data:
        plan.get_entries(data, args.entries)  # refuses wrong names before hours of training
    # The processes of the runs import `time_study` from the folder of this program.
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(Path(__file__).parent), str(ROOT), os.environ.get("PYTHONPATH", "")]
    )
    for data in args.data:
        Study(
            plan, data, args.folder.resolve(), args.model, args.output, args.jobs, args.entries
        ).run()


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        print(f"by_time: error: {error}", file=sys.stderr)
        sys.exit(2)
