"""Mining hard negatives: `mine_hard_negatives` and `write_mined` in Python, `contaccum mine` on the command line."""

from __future__ import annotations

from contaccum.mining.filters import Selection, SelectionRules, select_negatives
from contaccum.mining.miner import MinedNegatives, mine_hard_negatives
from contaccum.mining.pool import MiningData
from contaccum.mining.sources import load_mining_data
from contaccum.mining.writer import write_mined

__all__ = [
    "MinedNegatives",
    "MiningData",
    "Selection",
    "SelectionRules",
    "load_mining_data",
    "mine_hard_negatives",
    "select_negatives",
    "write_mined",
]
