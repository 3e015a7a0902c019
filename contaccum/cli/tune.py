"""`contaccum tune CONFIG --budget 2h`: choose training settings by scores on dev data.

The chosen settings are written as a config for `contaccum train`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from contaccum.cli.options import Parser
from contaccum.files import lock_folder, refuse_credentials


def run(argv: Sequence[str]) -> int:
    """Search settings, write the config, and return exit code 0.

    Raises:
        UserError: if the arguments, the config or the data cannot be used.
    """
    num_configs = 0
    while num_configs < len(argv) and not argv[num_configs].startswith("-"):
        num_configs += 1
    parser = Parser(
        "tune",
        "Choose training settings by scores on dev data within a time budget. The search starts "
        "from the config. A --key of `contaccum train` that is given here is fixed and not "
        "searched.",
        usage="contaccum tune CONFIG.yaml ... [OPTIONS] [--key value ...]",
    )
    parser.add_budget_options("the search", Path("runs/tune"))
    args, training_arguments = parser.parse_known(argv[num_configs:])

    from contaccum.tuning.budget import Budget, TimeForTrials, parse_duration
    from contaccum.tuning.options import all_options
    from contaccum.tuning.result import TUNED_CONFIG
    from contaccum.tuning.tune import BUDGET_FILE, tune

    config_options = all_options(argv[:num_configs], [])
    fixed_options = all_options([], training_arguments)
    options = {**config_options, **fixed_options}
    refuse_credentials(options)
    seconds = parse_duration(args.budget)
    is_first_process = os.environ.get("RANK", "0") == "0"
    with lock_folder(args.output, "contaccum tune") if is_first_process else nullcontext():
        budget = Budget(seconds, args.output / BUDGET_FILE)
        tuned = tune(options, list(fixed_options), TimeForTrials(budget), args.output, _print_once)

    choice = tuned.choice
    for warning in choice.warnings:
        _print_once(f"warning: {warning}")
    settings = ", ".join(f"{key}={value}" for key, value in choice.settings.items())
    gain = choice.against_base
    _print_once(
        f"chosen: {settings}: {choice.score:.3f} on dev, {gain['difference']:+.3f} compared with "
        f"the model before training (95% interval {gain['low']:+.3f} to {gain['high']:+.3f})"
    )
    _print_once(f"train with it: contaccum train {args.output / TUNED_CONFIG}")
    return 0


def _print_once(line: str) -> None:
    """Print a line on rank 0 only, so that it appears once in a distributed run."""
    from contaccum.distributed import rank

    if rank() == 0:
        print(line, flush=True)
