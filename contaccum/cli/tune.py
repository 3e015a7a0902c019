"""`contaccum tune CONFIG --budget 2h`: choose training settings by scores on dev data.

The chosen settings are written as a config for `contaccum train`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from contaccum.cli.options import Parser, print_at_once


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
    args, training_arguments = parser.parse_known_args(argv[num_configs:])

    from contaccum.evaluation.metrics import describe_interval
    from contaccum.experiments.budget import USED_TIME_FILE, Budget, parse_duration
    from contaccum.experiments.run import only_first_rank
    from contaccum.experiments.tune import TUNED_CONFIG, tune
    from contaccum.settings import read

    fixed = read(training_arguments, parser.option_names)
    given = read([*argv[:num_configs], *training_arguments])
    budget = Budget(parse_duration(args.budget), args.output / USED_TIME_FILE)
    tuned = tune(given, list(fixed), budget, args.output, print_at_once)

    print_line = only_first_rank(print_at_once)
    choice = tuned.choice
    for warning in choice.warnings:
        print_line(f"warning: {warning}")
    settings = ", ".join(f"{key}={value}" for key, value in choice.settings.items())
    gain = choice.against_base
    print_line(
        f"chosen: {settings}: {choice.score:.3f} on dev, {gain['difference']:+.3f} compared with "
        f"the model before training ({describe_interval(gain)})"
    )
    print_line(f"train with it: contaccum train {args.output / TUNED_CONFIG}")
    return 0
