"""States of the random number generators that training uses on CPUs and CUDA devices.

Evaluation, model cards and the search for a micro-batch size also use random numbers. The code
that runs them captures the states before and restores them afterwards, so that the training stays
the same with and without them.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class RandomStates:
    """The states of the generators of Python, numpy and torch (CPU and every CUDA device).

    `capture` creates an object of this class, and `restore` uses it.
    """

    python: tuple[object, ...]
    numpy: object
    torch_cpu: Tensor
    torch_cuda: list[Tensor]

    @classmethod
    def capture(cls) -> RandomStates:
        """Return the current states of all generators."""
        cuda = []
        if torch.cuda.is_available():
            cuda = torch.cuda.get_rng_state_all()
        return cls(random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda)

    def restore(self) -> None:
        """Set every generator to these states."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)  # type: ignore[arg-type]  # numpy's type of it is private
        torch.set_rng_state(self.torch_cpu)
        torch.cuda.set_rng_state_all(self.torch_cuda)
