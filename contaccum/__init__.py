"""contaccum: dense-retriever training with dual memory banks over gradient accumulation.

Names are imported on first use, so that `import contaccum` stays fast and pulls in neither faiss nor beir.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from contaccum.encoders import DualEncoder as DualEncoder
    from contaccum.info_nce import BankedInfoNCE as BankedInfoNCE
    from contaccum.losses import CachedContAccumLoss as CachedContAccumLoss
    from contaccum.losses import ContAccumLoss as ContAccumLoss
    from contaccum.memory_bank import MemoryBank as MemoryBank
    from contaccum.training.arguments import ContAccumTrainingArguments as ContAccumTrainingArguments
    from contaccum.training.trainer import ContAccumTrainer as ContAccumTrainer

__version__ = "0.1.0"

_HOMES = {
    "MemoryBank": "contaccum.memory_bank",
    "BankedInfoNCE": "contaccum.info_nce",
    "ContAccumLoss": "contaccum.losses",
    "CachedContAccumLoss": "contaccum.losses",
    "DualEncoder": "contaccum.encoders",
    "ContAccumTrainer": "contaccum.training.trainer",
    "ContAccumTrainingArguments": "contaccum.training.arguments",
}
__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
