"""Documents of a store for losses: blocks of tensors, and lookup of documents by their texts.

A document is named by its row: first the rows of the store, then the documents that were appended
in memory because the store lacks them. A text is looked up by its text id, a 64-bit hash
(`contaccum.data.sampling.text_ids`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from contaccum.bank.full_softmax import NO_ROW, DocumentBlock
from contaccum.data.sampling import text_ids
from contaccum.errors import DataError, quoted
from contaccum.files import fingerprint
from contaccum.retrieval.exact_search import DeviceEmbeddings
from contaccum.retrieval.store import EmbeddingStore


class _Lookup:
    """Lookup of hashes in an array, int64 (m,), that may have a hash several times."""

    def __init__(self, hashes: np.ndarray) -> None:
        self._order = np.argsort(hashes, kind="stable")
        self._sorted = hashes[self._order]

    def find(self, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return every match, int64 (f,) each: the index in ``wanted``, and in the array."""
        first_positions = np.searchsorted(self._sorted, wanted, side="left")
        counts = np.searchsorted(self._sorted, wanted, side="right") - first_positions
        indices = np.repeat(np.arange(len(wanted)), counts)
        # The matches of a hash are its first position in the sorted order plus 0, 1, 2, ...
        num_matches_before = np.cumsum(counts) - counts
        match_numbers = np.arange(len(indices)) - np.repeat(num_matches_before, counts)
        return indices, self._order[np.repeat(first_positions, counts) + match_numbers]

    def find_each(self, wanted: np.ndarray) -> list[np.ndarray]:
        """Return for each wanted hash the indices in the array, ascending."""
        indices, found = self.find(wanted)
        return np.split(found, np.searchsorted(indices, np.arange(1, len(wanted))))


class StoreDocuments:
    """Documents of a store, followed by documents that were appended in memory.

    With cosine similarity, `get_embeddings` returns L2-normalised embeddings, and `blocks` yields
    the stored ones with 1 / their L2 norms.

    Attributes:
        dimension: d, dimension of the embeddings.
        has_texts: False if ids stand for the texts, so that BM25 cannot search them.
    """

    def __init__(self, store: EmbeddingStore) -> None:
        self.store = store
        self.has_texts = True
        self.similarity = store.similarity
        self.dimension: int = store.shape[1]
        self._appended = np.empty((0, self.dimension), dtype=np.float32)
        self._text_ids = store.text_ids()
        self._lookup = _Lookup(self._text_ids)
        # The key is (device, part, num_parts), the arguments of `blocks`.
        self._on_device: dict[tuple[torch.device, int, int], list[DeviceEmbeddings]] = {}

    def __len__(self) -> int:
        return len(self._text_ids)

    def __deepcopy__(self, memo: dict[int, Any]) -> StoreDocuments:
        # The search for a micro-batch size copies the loss, whose documents may be gigabytes.
        return self

    @property
    def fingerprint(self) -> str:
        """Hash, in hex, of the store and of the appended documents."""
        return fingerprint(self.store.fingerprint, self._text_ids[len(self.store) :].tolist())

    def describe(self) -> dict[str, Any]:
        """Return store, fingerprint, counts and types of these documents, for records."""
        return {
            "store": str(self.store.folder),
            "fingerprint": self.fingerprint,
            "documents": len(self),
            "added": len(self._appended),
            "dtype": self.store.dtype,
            "similarity": self.similarity,
        }

    def add(self, texts: Sequence[str], embeddings: np.ndarray) -> None:
        """Append documents: k texts and their embeddings, float32 (k, d)."""
        self._appended = np.concatenate([self._appended, embeddings])
        self._text_ids = np.concatenate([self._text_ids, text_ids(texts)])
        self._lookup = _Lookup(self._text_ids)
        self._on_device = {}

    def find_rows(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return for each text the rows of all documents that have it, ascending."""
        return self._lookup.find_each(text_ids(texts))

    def match_text_ids(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Find all documents whose texts have one of these hashes, int64 (k,).

        Two int64 arrays (f,) have an entry per match: the index in ``ids``, and the document's row.
        """
        return self._lookup.find(ids)

    def contains(self, ids: np.ndarray) -> np.ndarray:
        """Return for each of these hashes, int64 (k,), if a document has the text, bool (k,)."""
        indices, _ = self.match_text_ids(ids)
        return np.isin(np.arange(len(ids)), indices)

    def get_embeddings(self, rows: Tensor) -> Tensor:
        """Return the embeddings of rows, int64 (k,), as float32 (k, d) on the same device."""
        embeddings = torch.from_numpy(self._read_rows(rows.cpu().numpy()))
        if self.similarity == "cos":
            embeddings = torch.nn.functional.normalize(embeddings, dim=-1)
        return embeddings.to(rows.device)

    def find_embeddings(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return the indices (f,) of those texts that are documents, and their embeddings (f, d).

        Of several documents with the same text, the first one is read.
        """
        indices, rows = self.match_text_ids(text_ids(texts))
        indices, first_matches = np.unique(indices, return_index=True)
        return indices, self._read_rows(rows[first_matches])

    def blocks(
        self, device: torch.device, part: int = 0, num_parts: int = 1
    ) -> Iterator[DocumentBlock]:
        """Yield blocks of documents on a device, of one of several consecutive parts.

        See `DeviceEmbeddings`. A block is valid until the next one is asked for.
        """
        key = (device, part, num_parts)
        if key not in self._on_device:
            arrays = (self.store, self._appended)
            self._on_device[key] = [DeviceEmbeddings(array, *key) for array in arrays]
        stored, appended = self._on_device[key]
        has_scales = self.similarity == "cos"
        yield from stored.blocks(has_scales)
        for block in appended.blocks(has_scales):
            yield block._replace(first=len(self.store) + block.first)

    def _read_rows(self, rows: np.ndarray) -> np.ndarray:
        """Return the stored embeddings of rows, int64 (k,), as float32 (k, d)."""
        embeddings = np.empty((len(rows), self.dimension), dtype=np.float32)
        is_appended = rows >= len(self.store)
        embeddings[~is_appended] = self.store[rows[~is_appended]]
        embeddings[is_appended] = self._appended[rows[is_appended] - len(self.store)]
        return embeddings


class PositiveRows:
    """Table of the rows of each query's known positives.

    ``query_ids`` and ``positive_ids``, int64 (p,), are hashes of the texts of known pairs. A pair
    whose positive is not among the documents is left out.
    """

    def __init__(
        self, documents: StoreDocuments, query_ids: np.ndarray, positive_ids: np.ndarray
    ) -> None:
        self.documents = documents
        pair_indices, self._rows = documents.match_text_ids(positive_ids)
        self._lookup = _Lookup(query_ids[pair_indices])

    def label_batch(self, queries: Sequence[str], positives: Sequence[str]) -> Tensor:
        """Return the rows of the known positives of n queries, int64 (n, w), padded with `NO_ROW`.

        The first is that of the positive in this batch; then come those of other known positives
        and of copies. A positive that is not among the documents raises `DataError`.
        """
        labels = []
        known_pairs = self._lookup.find_each(text_ids(queries))
        rows_of_positives = self.documents.find_rows(positives)
        for pairs, copies, positive in zip(known_pairs, rows_of_positives, positives, strict=True):
            if len(copies) == 0:
                raise DataError(
                    f"{self.documents.store.folder}: lacks the positive {quoted(positive)} (add it "
                    "to the corpus and encode the corpus again)"
                )
            row = copies[:1]
            others = np.setdiff1d(np.concatenate([self._rows[pairs], copies]), row)
            labels.append(torch.from_numpy(np.concatenate([row, others])))
        return pad_sequence(labels, batch_first=True, padding_value=NO_ROW)
