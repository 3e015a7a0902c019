"""`contaccum fit`: from question-passage pairs to a trained retriever, and whether it is better."""

from contaccum.fitting.pipeline import fit
from contaccum.fitting.result import FitResult
from contaccum.fitting.verdict import Verdict

__all__ = ["FitResult", "Verdict", "fit"]
