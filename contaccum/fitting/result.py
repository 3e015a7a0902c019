"""The result of `contaccum fit` as a Python object."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from contaccum.encoders.dual_encoder import DualEncoder
from contaccum.fitting.folder import FitFolder
from contaccum.fitting.verdict import Verdict


@dataclass(frozen=True)
class FitResult:
    """The result of `fit`.

    Attributes:
        verdict: the comparison with the base model; `str` returns the line that was printed.
        folder: the output folder, with the paths of all its files.
        warnings: warnings about the verdict, one line each.
    """

    verdict: Verdict
    folder: FitFolder
    warnings: list[str]

    @property
    def report(self) -> Path:
        """The path of the HTML report."""
        return self.folder.report

    @cached_property
    def model(self) -> DualEncoder:
        """The trained model, which is loaded at the first access."""
        return DualEncoder.from_pretrained(str(self.folder.model))
