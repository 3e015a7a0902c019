"""Embeddings as blocks of tensors on a device, for products with all of them.

On a GPU, the embeddings stay in its memory if it has room. Otherwise their blocks are copied to it
each time they are read, and the next block is copied while the GPU works on this one. There and on
the way to it, they have the number type of the array or the store.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from contaccum.bank.full_softmax import DocumentBlock
from contaccum.retrieval.store import EmbeddingStore

Embeddings = np.ndarray | EmbeddingStore
"""Types of embeddings (N, d) that can be searched; slices of them are float32."""

_ROWS_PER_BLOCK_ON_CPU = 8192
# Bytes that are copied to a GPU at once.
_BYTES_PER_COPY = 2**26
# Embeddings stay on a GPU if they need less than this share of its free memory.
_MAX_SHARE_OF_FREE_MEMORY = 0.5


class DeviceEmbeddings:
    """Some of N embeddings, read in blocks on a device.

    Args:
        embeddings: array or store, (N, d). An array must not change.
        device: the device.
        first_row, end_row: range of the n rows to read; default: all.

    Attributes:
        device, first_row: as above.
    """

    def __init__(
        self,
        embeddings: Embeddings,
        device: torch.device,
        first_row: int = 0,
        end_row: int | None = None,
    ) -> None:
        self._embeddings = embeddings
        self.device = device
        self.first_row = first_row
        self._num_rows = (len(embeddings) if end_row is None else end_row) - first_row
        self._dtype = np.dtype(embeddings.dtype)
        if self._dtype != np.float16:
            self._dtype = np.dtype(np.float32)
        self._rows_per_block = _ROWS_PER_BLOCK_ON_CPU
        if device.type == "cuda":
            bytes_per_row = self._dtype.itemsize * embeddings.shape[1]
            self._rows_per_block = min(self._num_rows, max(1, _BYTES_PER_COPY // bytes_per_row))
        self._kept: Tensor | None = None  # all rows, in the memory of a GPU
        self._norms: Tensor | None = None

    def norms(self) -> Tensor:
        """Return the L2 norms of the rows, float32 (n,), on the device.

        The first call reads all embeddings.
        """
        if self._norms is None:
            norms = [torch.empty(0, device=self.device)]
            for _, block in self._read():
                for part in block.split(self._rows_per_block):
                    norms.append(part.float().norm(dim=1))
            self._norms = torch.cat(norms)
        return self._norms

    def blocks(self, has_scales: bool) -> Iterator[DocumentBlock]:
        """Yield the rows in blocks. On a GPU, a block is valid until the next one is asked for.

        Args:
            has_scales: add 1 / L2 norm of each row; 0 for a row of zeros.
        """
        norms = self.norms() if has_scales else None
        for first_row, documents in self._read():
            scales = None
            if norms is not None:
                start = first_row - self.first_row
                scales = norms[start : start + len(documents)].reciprocal()
                scales.nan_to_num_(nan=torch.nan, posinf=0.0)
            yield DocumentBlock(first_row, documents, scales)

    def _read(self) -> Iterator[tuple[int, Tensor]]:
        """Yield the first row and the embeddings, (b, d), of each block on the device."""
        if self._num_rows == 0:
            return
        if self._kept is None and self._fits():
            kept = torch.empty(
                (self._num_rows, self._embeddings.shape[1]),
                dtype=getattr(torch, self._dtype.name),
                device=self.device,
            )
            for first_row, block in self._copy():
                start = first_row - self.first_row
                kept[start : start + len(block)] = block
            self._kept = kept
        if self._kept is None:
            yield from self._copy()
        else:
            yield self.first_row, self._kept

    def _fits(self) -> bool:
        """Return True if the embeddings fit into the free memory of a GPU."""
        if self.device.type != "cuda":
            return False
        free_bytes, _ = torch.cuda.mem_get_info(self.device)
        needed_bytes = self._dtype.itemsize * self._num_rows * self._embeddings.shape[1]
        return needed_bytes < _MAX_SHARE_OF_FREE_MEMORY * free_bytes

    def _copy(self) -> Iterator[tuple[int, Tensor]]:
        """Yield the first row and the embeddings of each block, copied to the device."""
        if self.device.type != "cuda":
            for first_row, block in self._read_host():
                yield first_row, block.to(self.device)
            return
        # Blocks alternate between two places in page-locked memory of the host and two in the
        # memory of the GPU. A stream of its own copies a block while the GPU works on the last one,
        # and a thread reads it from the file while this thread gives the GPU its work.
        shape = (2, self._rows_per_block, self._embeddings.shape[1])
        dtype = getattr(torch, self._dtype.name)
        on_host = torch.empty(shape, dtype=dtype, pin_memory=True)
        on_device = torch.empty(shape, dtype=dtype, device=self.device)
        copied = [torch.cuda.Event(), torch.cuda.Event()]
        used = [torch.cuda.Event(), torch.cuda.Event()]
        copy_stream = torch.cuda.Stream(self.device)
        # Earlier work may still use the memory that `on_device` got.
        copy_stream.wait_stream(torch.cuda.current_stream(self.device))

        def copy(place: int, block: Tensor) -> None:
            # In another mode than that of the thread that made the tensors, writing can fail.
            with torch.inference_mode(), torch.cuda.stream(copy_stream):
                copied[place].synchronize()  # the block before the last one has left the host
                source = on_host[place, : len(block)].copy_(block)
                copy_stream.wait_event(used[place])
                on_device[place, : len(block)].copy_(source, non_blocking=True)
                copied[place].record()

        def use(
            copying: Future[None], place: int, first_row: int, size: int
        ) -> Iterator[tuple[int, Tensor]]:
            copying.result()
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(copied[place])
            yield first_row, on_device[place, :size]
            used[place].record(stream)

        last = None
        with ThreadPoolExecutor(1) as reader:
            for number, (first_row, block) in enumerate(self._read_host()):
                place = number % 2
                copying = reader.submit(copy, place, block)
                if last is not None:
                    yield from use(*last)
                last = (copying, place, first_row, len(block))
            if last is not None:
                yield from use(*last)

    def _read_host(self) -> Iterator[tuple[int, Tensor]]:
        """Yield the first row and the embeddings of each block, on the host."""
        end_row = self.first_row + self._num_rows
        for first_row, block in _list_blocks(self._embeddings, self._rows_per_block):
            start = max(first_row, self.first_row)
            block = block[start - first_row : max(start, end_row) - first_row]
            if len(block) > 0:
                # torch accepts neither a reversed array nor, without a warning, a read-only one.
                yield start, torch.from_numpy(np.require(block, self._dtype, ("C", "W")))


def _list_blocks(embeddings: Embeddings, size: int) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the first row and the embeddings, of at most ``size`` rows, of each block."""
    if isinstance(embeddings, EmbeddingStore):
        yield from embeddings.blocks(size)
        return
    for first_row in range(0, len(embeddings), size):
        yield first_row, embeddings[first_row : first_row + size]
