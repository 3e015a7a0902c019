"""Near-duplicates: texts that are nearly the same, by the MinHash of their character 5-grams.

Two texts are near-duplicates if the Jaccard similarity of their sets of 5-grams is at least
`LEAST_OVERLAP`: of all 5-grams that occur in either text, that share occurs in both. It is
estimated from `_NUM_HASHES` hashes, with an error of about 0.04. Case, white space and punctuation
do not count. For example, two sentences of twelve words may differ in one word.

Source of MinHash: Broder, "On the resemblance and containment of documents", 1997. The library
datasketch finds candidates by locality-sensitive hashing.
"""

from __future__ import annotations

import re
import unicodedata
import zlib
from collections.abc import Sequence

from datasketch import MinHash, MinHashLSH
from scipy.cluster.hierarchy import DisjointSet
from tqdm import tqdm

LEAST_OVERLAP = 0.7
"""Least Jaccard similarity of near-duplicates."""

_GRAM_LENGTH = 5
_NUM_HASHES = 128
_CANDIDATE_OVERLAP = 0.6  # lower than LEAST_OVERLAP, so that few near-duplicates are missed


def normalise(text: str) -> str:
    """Return a text in lower case, with normal character widths and single spaces."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def join_near_duplicates(
    texts: Sequence[str], groups: DisjointSet, show_progress: bool = False
) -> int:
    """Merge the groups of texts that are near-duplicates.

    Memory holds about 7 KB for each text.

    Args:
        texts: the texts.
        groups: disjoint sets of the texts' indices. Texts of the same group are not compared.
        show_progress: True for a progress bar.

    Returns:
        The number of texts that were merged with an earlier text.
    """
    num_merged = 0
    buckets = MinHashLSH(threshold=_CANDIDATE_OVERLAP, num_perm=_NUM_HASHES)
    signatures: list[MinHash] = []
    progress = tqdm(texts, desc="near-duplicates", unit=" texts", disable=not show_progress)
    for index, text in enumerate(progress):
        signature = _signature(text)
        is_merged = False
        for candidate in buckets.query(signature):
            if groups.connected(index, candidate):
                continue
            if signature.jaccard(signatures[candidate]) >= LEAST_OVERLAP:
                groups.merge(index, candidate)
                is_merged = True
        num_merged += is_merged
        signatures.append(signature)
        buckets.insert(index, signature, check_duplication=False)
    return num_merged


def _signature(text: str) -> MinHash:
    """Return the MinHash of the character 5-grams of a text, its words joined by single spaces."""
    words = " ".join(re.findall(r"\w+", normalise(text)))
    num_grams = max(1, len(words) - _GRAM_LENGTH + 1)
    grams = {words[start : start + _GRAM_LENGTH] for start in range(num_grams)}
    signature = MinHash(num_perm=_NUM_HASHES, hashfunc=zlib.crc32)
    signature.update_batch([gram.encode("utf-8") for gram in grams])
    return signature
