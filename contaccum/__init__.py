"""contaccum: training of dense retrievers with memory banks and gradient accumulation.

Names are imported on first use, so that `import contaccum` is fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from contaccum.bank.info_nce import BankedInfoNCE as BankedInfoNCE
    from contaccum.bank.memory_bank import MemoryBank as MemoryBank
    from contaccum.encoders.dual_encoder import DualEncoder as DualEncoder
    from contaccum.experiments.fit import fit as fit
    from contaccum.losses.contaccum import CachedContAccumLoss as CachedContAccumLoss
    from contaccum.losses.contaccum import ContAccumLoss as ContAccumLoss
    from contaccum.losses.query_side import QuerySideCollator as QuerySideCollator
    from contaccum.losses.query_side import QuerySideLoss as QuerySideLoss
    from contaccum.training.arguments import (
        ContAccumTrainingArguments as ContAccumTrainingArguments,
    )
    from contaccum.training.trainer import ContAccumTrainer as ContAccumTrainer

__version__ = "0.1.0"

_MODULES = {
    "MemoryBank": "contaccum.bank.memory_bank",
    "BankedInfoNCE": "contaccum.bank.info_nce",
    "ContAccumLoss": "contaccum.losses.contaccum",
    "CachedContAccumLoss": "contaccum.losses.contaccum",
    "QuerySideLoss": "contaccum.losses.query_side",
    "QuerySideCollator": "contaccum.losses.query_side",
    "DualEncoder": "contaccum.encoders.dual_encoder",
    "ContAccumTrainer": "contaccum.training.trainer",
    "fit": "contaccum.experiments.fit",
    "ContAccumTrainingArguments": "contaccum.training.arguments",
}
__all__ = ["__version__", *_MODULES]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value
    return value
