"""Mining hard negatives: `mine_hard_negatives` and `write_mined` in Python, `contaccum mine` on the command line."""

from __future__ import annotations

from contaccum.mining.data import MiningData, load_mining_data
from contaccum.mining.files import write_mined
from contaccum.mining.miner import MinedNegatives, SelectionRules, mine_hard_negatives

__all__ = [
    "MinedNegatives",
    "MiningData",
    "SelectionRules",
    "load_mining_data",
    "mine_hard_negatives",
    "write_mined",
]
