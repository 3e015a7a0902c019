"""Scoring: BEIR, metrics, and the records of results. `run(argv)` is the `contaccum evaluate` command."""

from __future__ import annotations

from collections.abc import Sequence


def run(argv: Sequence[str] | None = None) -> int:
    """`contaccum evaluate`, see `contaccum.evaluation.command.run`; raises `UserError` for the user's mistakes."""
    from contaccum.evaluation.command import run as run_beir

    return run_beir(argv)
