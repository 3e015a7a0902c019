"""Train several methods side by side, and report which one is better, with significance tests.

    python eval/compare/compare.py config.yaml --methods grad_accum grad_cache contaccum \\
        --eval_data runs/data/test --output_dir runs/compare \\
        --tune learning_rate=1e-4,3e-4,9e-4 --tune_data runs/data/dev --tune_split test

Config files and every other --key are those of `contaccum train`. All runs have the same data,
order of data and initial weights for a seed, and as many pairs; with --seconds, as much time. With
--tune, each method first gets its own best value of a setting, by scores on dev. The same command
again only does the missing runs. README.md in this folder explains the report.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path

from comparison.plan import Group, make_groups, read_options
from comparison.report import build_report, render_markdown
from comparison.run import describe_sets, fit_into_seconds, run_groups
from comparison.tuning import apply_chosen_values, read_ladder, tune_groups

from contaccum.errors import UserError, check_choice
from contaccum.files import provenance, write_json, write_text

ROOT = Path(__file__).resolve().parents[2]


def parse_arguments() -> tuple[argparse.Namespace, list[str], list[str]]:
    """Return the program's options, the config files, and the options of `contaccum train`."""
    argv = sys.argv[1:]
    num_configs = 0
    while num_configs < len(argv) and not argv[num_configs].startswith("-"):
        num_configs += 1
    parser = argparse.ArgumentParser(
        usage="compare.py [CONFIG.yaml ...] --eval_data DIR ... [options] [--key value ...]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--methods", nargs="*", default=["grad_accum", "grad_cache", "contaccum"])
    add(
        "--variant",
        nargs="+",
        action="append",
        default=[],
        metavar="NAME [key=value ...]",
        help="a method with other settings, such as: published drift_compensation=none; "
        "its method is contaccum unless method=... is given",
    )
    add("--seeds", nargs="+", type=int, default=[0, 1, 2])
    add("--baseline", metavar="NAME", help="default: grad_accum if it is trained, else the first")
    add("--eval_data", nargs="+", required=True, metavar="DIR", help="BEIR folders or names")
    add("--eval_split", default="test", help="split of the judgements; default: test")
    add("--seconds", type=float, help="equal time: as many updates as fit into it, for each method")
    add("--tune", metavar="key=v,v", help="choose this setting for each method on --tune_data")
    add("--tune_data", nargs="+", metavar="DIR", help="BEIR folders or names")
    add("--tune_split", default="dev", help="split of the judgements; default: dev")
    add("--jobs", type=int, help="runs at the same time; default: 1 on a GPU, else half the cores")
    add("--output_dir", type=Path, default=Path("runs/compare"))
    args, train_options = parser.parse_known_args(argv[num_configs:])
    if (args.tune is None) != (args.tune_data is None):
        parser.error("--tune and --tune_data belong together")
    return args, argv[:num_configs], train_options


def main() -> int:
    """Do the missing runs and write the report; return 1 if a run failed."""
    args, config_files, train_options = parse_arguments()
    # The processes of the runs import `comparison` from the folder of this program.
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(Path(__file__).parent), str(ROOT), os.environ.get("PYTHONPATH", "")]
    )
    options = read_options(config_files, train_options)
    groups = make_groups(options, args.methods, args.variant)
    entries = [group.entry for group in groups]
    baseline = args.baseline or ("grad_accum" if "grad_accum" in entries else entries[0])
    check_choice("--baseline", baseline, entries)
    sets = describe_sets(args.eval_data, args.eval_split)
    failures: dict[str, str] = {}
    if args.seconds is not None:
        folder = args.output_dir / "time"
        groups, failures = fit_into_seconds(groups, args.seconds, args.seeds[0], folder)
    tuning = None
    if args.tune is not None:
        ladder = read_ladder(args.tune, args.seeds[0])
        dev_sets = describe_sets(args.tune_data, args.tune_split)

        def train_on_dev(candidates: list[Group]):
            folder = args.output_dir / "tune"
            return run_groups(candidates, [ladder.seed], dev_sets, folder, args.jobs)

        tunings, failed = tune_groups(groups, ladder, train_on_dev)
        failures.update(failed)
        groups = apply_chosen_values(groups, ladder.key, tunings)
        tuning = {**ladder._asdict(), "data": dev_sets, "groups": tunings}
    folder = args.output_dir / "runs"
    results, failed = run_groups(groups, args.seeds, sets, folder, args.jobs)
    failures.update(failed)
    train_data = sorted({result["identity"]["train_data"] for result in results.values()})
    context = {
        "command": shlex.join(["python", *sys.argv]),
        "settings": {
            "options": {key: str(value) for key, value in options.items()},
            "seconds": args.seconds,
        },
        "data": {"evaluation": sets, "train": train_data},
        "tuning": tuning,
        **provenance(),
    }
    report = build_report(groups, args.seeds, baseline, results, failures, context)
    write_json(args.output_dir / "report.json", report)
    write_text(args.output_dir / "report.md", render_markdown(report))
    for line in report["warnings"]:
        print(f"warning: {line}")
    for name, reason in failures.items():
        print(f"failed: {name}: {reason}")
    print(f"written: {args.output_dir / 'report.md'}, with report.json beside it")
    return 1 if failures else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        print(f"compare: error: {error}", file=sys.stderr)
        sys.exit(2)
