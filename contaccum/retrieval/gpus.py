"""What search does where FAISS sees GPUs: how an index is spread over them, and how much of a corpus fits at a time.

Every decision is a function of its own, so that it can be checked with a FAISS that only claims to have GPUs.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from contaccum.errors import ConfigError
from contaccum.retrieval.cpu_slices import CpuSlices

logger = logging.getLogger(__name__)

GpuMode = Literal["replicate", "shard"]
GPU_MODES: tuple[GpuMode, ...] = ("replicate", "shard")

# FAISS keeps its top k on the GPU in shared memory, which bounds k.
GPU_MAX_K = 2048
# Of float32 rows sent to one GPU at a time: what the host holds as well, and far more than a transfer needs.
_SLICE_BYTES = 2**31
# Where nobody tells how much of a GPU is free.
_UNKNOWN_FREE_BYTES = 2**31


@dataclass(frozen=True)
class Gpus:
    """GPUs and how to use them.

    Attributes:
        count: how many FAISS sees; at least one.
        mode: "replicate" (each holds all, and they share the queries) or "shard" (each holds a part).
        float16: vectors are stored in half the memory. A Flat search is exact all the same.
    """

    count: int
    mode: GpuMode = "replicate"
    float16: bool = False


def find_gpus(use_gpu: bool | Literal["auto"], mode: GpuMode = "replicate", float16: bool = False) -> Gpus | None:
    """The GPUs to use, None for none.

    Raises:
        ConfigError: an unknown mode, or True where FAISS sees no GPU.
    """
    import faiss

    if mode not in GPU_MODES:
        raise ConfigError(f"gpu_mode must be {' or '.join(GPU_MODES)}, not {mode!r}")
    if not use_gpu:
        return None
    count = faiss.get_num_gpus()
    if count:
        return Gpus(count, mode, float16)
    if use_gpu is True:
        raise ConfigError("use_gpu=True, but FAISS sees no GPU; install faiss-gpu in place of faiss-cpu")
    return None


def to_gpus(index: Any, gpus: Gpus) -> Any:
    """A copy of a FAISS index on the GPUs; raises FAISS's RuntimeError where they cannot hold it."""
    import faiss

    options = faiss.GpuMultipleClonerOptions()
    options.shard = gpus.mode == "shard"
    options.useFloat16 = gpus.float16
    return faiss.index_cpu_to_all_gpus(index, co=options, ngpu=gpus.count)


def free_bytes(gpus: Gpus) -> list[int]:
    """Free memory of each GPU; a cautious guess where torch cannot see them."""
    import torch

    if torch.cuda.is_available() and torch.cuda.device_count() >= gpus.count:
        return [torch.cuda.mem_get_info(device)[0] for device in range(gpus.count)]
    return [_UNKNOWN_FREE_BYTES] * gpus.count


def rows_that_fit(dimension: int, gpus: Gpus, free: Sequence[int]) -> int:
    """How many float32 rows to search at a time: half of what is free on the fullest GPU, on each when sharded.

    The other half is for FAISS's own buffers and the results.
    """
    each = max(1, min(min(free) // 2, _SLICE_BYTES) // (4 * dimension))
    return each * gpus.count if gpus.mode == "shard" else each


class GpuSlices:
    """Slices by Flat indexes on GPUs, one after the other, so that a corpus may be larger than their memory.

    Implements `exact.SliceSearch`. When a GPU gives up, the CPU goes on, and says so; with `insist` it is an error.
    """

    def __init__(self, gpus: Gpus, dimension: int, insist: bool = False) -> None:
        self.gpus, self.insist = gpus, insist
        self.max_fetch: int | None = GPU_MAX_K
        self.slice_rows: int | None = rows_that_fit(dimension, gpus, free_bytes(gpus))
        self._cpu = CpuSlices()
        self.given_up = False

    def margin(self, k: int) -> int:
        return k + 64 if self.gpus.float16 else self._cpu.margin(k)

    def error(self, dimension: int) -> tuple[float, float]:
        relative, absolute = self._cpu.error(dimension)
        if self.gpus.float16:
            # Documents and queries rounded to eleven bits; numbers below 2^-14 to multiples of 2^-24.
            relative += 2.0**-10 + 2.0**-20
            absolute += 2.0**-25 * dimension**0.5
        return relative, absolute

    def search(self, documents: np.ndarray, first: int, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        import faiss

        if not self.given_up:
            try:
                index = faiss.IndexFlatIP(documents.shape[1])
                index.add(documents)
                scores, rows = to_gpus(index, self.gpus).search(queries, k)
                if self.gpus.float16 and not np.isfinite(scores).all():
                    raise RuntimeError("numbers are too large for float16")
                return scores, rows
            except (RuntimeError, AttributeError) as error:
                if self.insist:
                    raise ConfigError(f"rows from {first} cannot be searched on a GPU: {reason(error)}") from error
                logger.warning("The search goes on on the CPU from row %d: %s", first, reason(error))
                self.given_up = True
        return self._cpu.search(documents, first, queries, k)


def reason(error: Exception) -> str:
    """The last clause of a FAISS error: the part that is about the user's settings, not FAISS's source lines."""
    return re.sub(r"^Error in .*?:\d+: (Error: )?", "", " ".join(str(error).split()))
