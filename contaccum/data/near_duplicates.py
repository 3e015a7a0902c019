"""Texts that are nearly the same, by the MinHash of their character 5-grams.

Two texts are near-duplicates if at least `LEAST_OVERLAP` of the 5-grams that occur in one of them
occur in both (Jaccard similarity, estimated from `_NUM_HASHES` hashes, so to about 0.04). Case,
white space and punctuation do not count. One word of twelve may differ, or of a long passage every
tenth.

Source of MinHash: Broder, "On the resemblance and containment of documents", 1997. Its buckets
(locality-sensitive hashing) are those of the library datasketch.
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
"""Jaccard similarity from which on two texts are near-duplicates."""

_GRAM_LENGTH = 5
_NUM_HASHES = 128
_BUCKET_OVERLAP = 0.6  # of candidates: lower than what is looked for, so that few are missed


def normalise(text: str) -> str:
    """Return a text without differences of case, width of characters and white space."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def join_near_duplicates(
    texts: Sequence[str], groups: DisjointSet, show_progress: bool = False
) -> int:
    """Merge the groups of texts that are near-duplicates.

    Memory is some 7 KB a text.

    Args:
        groups: has the indices of the texts as elements. Two texts that are in one group already
            are not compared.

    Returns:
        The number of texts that were merged with an earlier one.
    """
    num_merged = 0
    buckets = MinHashLSH(threshold=_BUCKET_OVERLAP, num_perm=_NUM_HASHES)
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
