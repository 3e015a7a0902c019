"""The documents of a store as a loss reads them: in blocks of tensors, and by their texts.

A rank may get every R-th block only. Documents that the store lacks can be appended to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from contaccum.bank.full_softmax import NO_ROW, DocumentBlock
from contaccum.data.records import quoted
from contaccum.data.sampling import text_ids
from contaccum.errors import DataError
from contaccum.files import fingerprint, redact
from contaccum.retrieval.store import EmbeddingStore

ROWS_PER_BLOCK = 8192
_SHARE_OF_FREE_MEMORY = 0.5  # of a GPU, when blocks are first asked for


class StoreDocuments:
    """The documents of a store, and documents that were appended to them.

    With cosine, `take` returns embeddings of length 1, and `blocks` the stored embeddings beside
    1 / their length.

    Args:
        store: holds documents.
    """

    def __init__(self, store: EmbeddingStore) -> None:
        self.store = store
        self.similarity: str = store.similarity
        self.dimension: int = store.shape[1]
        self._added = np.empty((0, self.dimension), dtype=np.float32)
        self._set_texts(store.text_ids())
        self._scales: Tensor | None = None
        # By device, part and number of parts.
        self._blocks_on_device: dict[tuple[torch.device, int, int], list[DocumentBlock]] = {}

    def _set_texts(self, ids: np.ndarray) -> None:
        self._text_ids = ids
        self._order = np.argsort(ids, kind="stable")
        self._sorted_ids = ids[self._order]

    def __len__(self) -> int:
        return len(self._text_ids)

    def __deepcopy__(self, memo: dict[int, Any]) -> StoreDocuments:
        # A trial of a micro-batch copies the loss; documents do not change, and may be gigabytes.
        return self

    @property
    def fingerprint(self) -> str:
        """Hash, in hex, of the store and of the documents that were added."""
        return fingerprint(self.store.fingerprint, self._text_ids[len(self.store) :].tolist())

    def describe(self) -> dict[str, Any]:
        """Return which documents these are, for records."""
        return {
            "store": redact(str(self.store.folder)),
            "fingerprint": self.fingerprint,
            "documents": len(self),
            "added": len(self._added),
            "dtype": self.store.dtype,
            "similarity": self.similarity,
        }

    def add(self, texts: Sequence[str], embeddings: np.ndarray) -> None:
        """Append documents: k texts and their embeddings, float32 (k, d)."""
        if embeddings.shape != (len(texts), self.dimension):
            shape = (len(texts), self.dimension)
            raise ValueError(f"embeddings of shape {embeddings.shape} for documents of {shape}")
        self._added = np.concatenate([self._added, embeddings.astype(np.float32, copy=False)])
        self._set_texts(np.concatenate([self._text_ids, text_ids(texts)]))
        self._scales = None
        self._blocks_on_device = {}

    def rows_of(self, text_id: int) -> list[int]:
        """Return the rows of the documents with this hash of their text, none or several."""
        return self.rows_of_all(np.array([text_id]))[1].tolist()

    def rows_of_all(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Find the documents with some hashes of texts, int64 (k,).

        Returns:
            int64 (f,) each, with an entry per document that was found: the index of its hash in
            ``ids``, and its row. Copies give several entries.
        """
        first = np.searchsorted(self._sorted_ids, ids, side="left")
        counts = np.searchsorted(self._sorted_ids, ids, side="right") - first
        indices = np.repeat(np.arange(len(ids)), counts)
        first_of_each = np.repeat(np.cumsum(counts) - counts, counts)
        positions = np.repeat(first, counts) + np.arange(len(indices)) - first_of_each
        return indices, self._order[positions]

    def has(self, ids: np.ndarray) -> np.ndarray:
        """Return bool (k,): for each hash of a text whether there is a document with that text."""
        first = np.searchsorted(self._sorted_ids, ids, side="left")
        return np.searchsorted(self._sorted_ids, ids, side="right") > first

    def take(self, rows: Tensor) -> Tensor:
        """Return the embeddings of some rows, int64 (k,), as float32 (k, d) on their device."""
        taken = torch.from_numpy(self._read_rows(rows.cpu().numpy()))
        if self.similarity == "cos":
            taken = torch.nn.functional.normalize(taken, dim=-1)
        return taken.to(rows.device)

    def embeddings_of(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return stored embeddings of texts, as they are.

        Returns:
            Indices, int64 (f,), of the texts that are documents, and their embeddings, (f, d).
        """
        indices, rows = self.rows_of_all(text_ids(texts))
        indices, first = np.unique(indices, return_index=True)  # the first of copies
        return indices, self._read_rows(rows[first])

    def blocks(
        self, device: torch.device, part: int = 0, num_parts: int = 1
    ) -> Iterator[DocumentBlock]:
        """Yield blocks of documents on a device: every ``num_parts``-th, from the ``part``-th on.

        A GPU with enough free memory holds on to its blocks.
        """
        key = (device, part, num_parts)
        if key not in self._blocks_on_device and self._fits(device, num_parts):
            self._blocks_on_device[key] = list(self._read_blocks(device, part, num_parts))
        if key in self._blocks_on_device:
            yield from self._blocks_on_device[key]
        else:
            yield from self._read_blocks(device, part, num_parts)

    def _read_blocks(
        self, device: torch.device, part: int, num_parts: int
    ) -> Iterator[DocumentBlock]:
        scales = self._inverse_lengths()
        for number, (first, embeddings) in enumerate(self._arrays()):
            if number % num_parts != part:
                continue
            block_scales = None
            if scales is not None:
                block_scales = scales[first : first + len(embeddings)].to(device)
            documents = torch.from_numpy(embeddings).to(device, non_blocking=True)
            yield DocumentBlock(first, documents, block_scales)

    def _read_rows(self, rows: np.ndarray) -> np.ndarray:
        embeddings = np.empty((len(rows), self.dimension), dtype=np.float32)
        is_added = rows >= len(self.store)
        embeddings[~is_added] = self.store[rows[~is_added]]
        embeddings[is_added] = self._added[rows[is_added] - len(self.store)]
        return embeddings

    def _arrays(self) -> Iterator[tuple[int, np.ndarray]]:
        yield from self.store.blocks(ROWS_PER_BLOCK)
        for first in range(0, len(self._added), ROWS_PER_BLOCK):
            yield len(self.store) + first, self._added[first : first + ROWS_PER_BLOCK]

    def _inverse_lengths(self) -> Tensor | None:
        """Return 1 / length of every document, (N,); None with dot product. Read once."""
        if self.similarity != "cos":
            return None
        if self._scales is None:
            scales = []
            for _, embeddings in self._arrays():
                lengths = torch.from_numpy(embeddings).norm(dim=1)
                scales.append(1 / lengths.clamp_min(1e-12))
            self._scales = torch.cat(scales)
        return self._scales

    def _fits(self, device: torch.device, num_parts: int) -> bool:
        if device.type != "cuda":
            return False
        free, _ = torch.cuda.mem_get_info(device)
        needed = 4 * len(self) * self.dimension / num_parts
        return needed < _SHARE_OF_FREE_MEMORY * free


class PositiveRows:
    """The rows of the documents that are known positives of each query.

    Args:
        documents: those in which positives are looked up.
        query_ids, positive_ids: int64 (p,) each, hashes of the texts of every known pair; pairs
            whose positive is no document are left out.
    """

    def __init__(
        self, documents: StoreDocuments, query_ids: np.ndarray, positive_ids: np.ndarray
    ) -> None:
        self.documents = documents
        pair_indices, rows = documents.rows_of_all(positive_ids)
        queries = query_ids[pair_indices]
        order = np.lexsort((rows, queries))
        self._query_ids = queries[order]
        self._rows = rows[order]

    def rows_of_query(self, query_id: int) -> set[int]:
        """Return the rows of the known positives of a query, by the hash of its text."""
        first = np.searchsorted(self._query_ids, query_id, side="left")
        end = np.searchsorted(self._query_ids, query_id, side="right")
        return set(self._rows[first:end].tolist())

    def label_batch(self, queries: Sequence[str], positives: Sequence[str]) -> Tensor:
        """Return the rows of each query's known positives, int64 (n, p), that of this row first.

        They are filled up with `NO_ROW`.

        Raises:
            DataError: for a positive that is not among the documents.
        """
        lists = []
        query_ids = text_ids(queries).tolist()
        positive_ids = text_ids(positives).tolist()
        for query_id, positive_id, positive in zip(query_ids, positive_ids, positives, strict=True):
            rows = self.documents.rows_of(positive_id)
            if not rows:
                folder = self.documents.store.folder
                raise DataError(f"{folder}: lacks the positive {quoted(positive)} (encode it too)")
            others = self.rows_of_query(query_id).union(rows) - {rows[0]}
            lists.append([rows[0], *sorted(others)])
        labels = torch.full((len(lists), max(map(len, lists))), NO_ROW)
        for index, rows in enumerate(lists):
            labels[index, : len(rows)] = torch.tensor(rows)
        return labels
