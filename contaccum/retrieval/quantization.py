"""Embeddings in the number types that a store holds: float32, float16, int8 and binary.

Embeddings are converted to these types and decoded to float32 here. `store` writes and reads the
files, `index` searches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from contaccum.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

_Array = TypeVar("_Array", np.ndarray, "Tensor")

_INT8_STEPS = 255
_INT8_MIDDLE = 128.5  # moves int8 codes, -128 to 127, to the middles of the steps: 0.5 to 255.5


@dataclass
class QuantizedEmbeddings:
    """n embeddings of d dimensions in one of the types of a store.

    Indexing with rows decodes them: ``embeddings[10:20]`` is a float32 array (10, d).

    For int8, the range of each dimension, from its minimum to its maximum, is divided into 255
    steps, and a code c from -128 to 127 is the number of a step; 127 is for the maximum alone. A
    code is decoded to the middle of its step: minimum + (c + 128.5) (maximum - minimum) / 255. For
    binary, a bit holds the sign of a value, and is decoded to +1 or -1.

    Attributes:
        values: (n, d) in float32, float16 or int8; uint8 (n, d / 8) of packed bits for "binary".
        dtype: "float32", "float16", "int8" or "binary".
        shape: (n, d).
        ranges: float32 (2, d), the minimum and the maximum of each dimension; only for "int8".
    """

    values: np.ndarray
    dtype: str
    shape: tuple[int, int]
    ranges: np.ndarray | None = None

    @classmethod
    def quantize(cls, embeddings: np.ndarray, dtype: str) -> QuantizedEmbeddings:
        """Convert embeddings, float32 (n, d), to a type.

        sentence-transformers computes int8 and binary.

        Raises:
            ConfigError: the dimension does not fit the type; see `check_binary_dimension`.
        """
        num_rows, dimension = embeddings.shape
        shape = (num_rows, dimension)
        if dtype in ("float32", "float16"):
            return cls(np.ascontiguousarray(embeddings, dtype=dtype), dtype, shape)

        # Imported late, because reading a float32 store needs no sentence-transformers.
        from sentence_transformers.util import quantize_embeddings

        check_binary_dimension(dtype, dimension)
        if dtype == "int8":
            ranges = np.stack([embeddings.min(axis=0), embeddings.max(axis=0)])
            codes = np.asarray(quantize_embeddings(embeddings, "int8", ranges))
            return cls(codes, dtype, shape, ranges)
        bits = np.asarray(quantize_embeddings(embeddings, "ubinary"))
        return cls(bits, dtype, shape)

    def __len__(self) -> int:
        return self.shape[0]

    def select(self, rows: slice) -> QuantizedEmbeddings:
        """Return the embeddings of these rows, not decoded."""
        values = self.values[rows]
        return QuantizedEmbeddings(values, self.dtype, (len(values), self.shape[1]), self.ranges)

    def __getitem__(self, rows: int | slice | Sequence[int] | np.ndarray) -> np.ndarray:
        """Return the embeddings of these rows as float32, decoded."""
        values = self.values[rows]
        if self.dtype == "binary":
            bits = np.unpackbits(values, axis=-1)
            return 2 * bits.astype(np.float32) - 1
        if self.ranges is None:
            return values.astype(np.float32, copy=False)
        return decode_int8(values.astype(np.float32), self.ranges)


def decode_int8(codes: _Array, ranges: _Array) -> _Array:
    """Return the middles of the steps of int8 codes; see `QuantizedEmbeddings`.

    Args:
        codes: (n, d), the codes as float32.
        ranges: (2, d), the minimum and the maximum of each dimension.
    """
    minimum, maximum = ranges
    step_size = (maximum - minimum) / _INT8_STEPS
    return minimum + (codes + _INT8_MIDDLE) * step_size


def check_binary_dimension(dtype: str, dimension: int) -> None:
    """Raise `ConfigError` for "binary" with a dimension that is not a multiple of 8."""
    if dtype == "binary" and dimension % 8 != 0:
        raise ConfigError(
            f"binary embeddings of {dimension} dimensions: 8 dimensions are packed into a byte, so "
            "the dimension must be a multiple of 8 (store another type, such as int8, or truncate "
            "to a multiple of 8)"
        )
