"""`contaccum tune CONFIG --budget 2h`: settings that score best on dev data, as a config for `contaccum train`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from contaccum.cli.options import Parser
from contaccum.errors import ConfigError
from contaccum.files import redact


def run(argv: Sequence[str]) -> int:
    """Search, and write the config; returns 0. Raises `UserError` for the user's mistakes."""
    files = list(itertools.takewhile(lambda token: not token.startswith("-"), argv))
    parser = Parser(
        "tune",
        "Choose the settings of a run by scores on dev data, within a budget of time. The search starts from the "
        "config; a --key of `contaccum train` that is given here stays as it is.",
        usage="contaccum tune CONFIG.yaml ... [OPTIONS] [--key value ...]",
    )
    add = parser.add_argument
    add(
        "--budget",
        default="30m",
        metavar="TIME",
        help="wall time, such as 90s, 30m or 2h; default: %(default)s",
    )
    add(
        "--output", type=Path, default=Path("runs/tune"), metavar="DIR", help="default: %(default)s"
    )
    args, rest = parser.parse(argv[len(files) :], rest=True)

    from contaccum.comparison.options import all_options
    from contaccum.tuning.budget import Budget, TimeForTrials, parse_duration
    from contaccum.tuning.result import TUNED_CONFIG
    from contaccum.tuning.tune import BUDGET_FILE, tune

    of_files = all_options(files, [])
    given = all_options([], rest)
    options = {**of_files, **given}
    if redact(options) != options:
        raise ConfigError(
            "a credential among the options, which are written down: put it into the environment"
        )
    budget = Budget(parse_duration(args.budget), args.output / BUDGET_FILE)
    tuned = tune(options, list(given), TimeForTrials(budget), args.output, _say)
    for warning in tuned.choice.warnings:
        _say(f"warning: {warning}")
    settings = ", ".join(f"{key}={value}" for key, value in tuned.choice.settings.items())
    difference = tuned.choice.against_base
    _say(
        f"chosen: {settings}: {tuned.choice.score:.3f} on dev, {difference['difference']:+.3f} over the model as it is "
        f"(95% {difference['low']:+.3f} to {difference['high']:+.3f})"
    )
    _say(f"train with it: contaccum train {args.output / TUNED_CONFIG}")
    return 0


def _say(line: str) -> None:
    from contaccum.distributed import rank

    if rank() == 0:
        print(line, flush=True)
