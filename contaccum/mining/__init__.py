"""Hard negatives for training data: passages that score high for a query and are not relevant.

`data` reads the queries, their known positives and the passages to search. `search` ranks these
passages for each query, with a SentenceTransformer and FAISS or with BM25. `rules` holds the rules
of sentence-transformers' `mine_hard_negatives`, which decide which candidates become negatives.
`cross_encoder` scores candidates again, and `output` writes the result.
"""
# ruff: noqa: F401  # the package's public names

from contaccum.mining.cross_encoder import load_cross_encoder
from contaccum.mining.data import MiningData, load_mining_data
from contaccum.mining.output import OUTPUT_FORMATS, check_output, write_mined
from contaccum.mining.rules import SelectionRules
from contaccum.mining.search import MinedNegatives, mine_hard_negatives
