"""`contaccum fit`: train a retriever on question-passage pairs, and test if it became better."""

from contaccum.fitting.call import fit
from contaccum.fitting.result import FitResult
from contaccum.fitting.verdict import Verdict

__all__ = ["FitResult", "Verdict", "fit"]
