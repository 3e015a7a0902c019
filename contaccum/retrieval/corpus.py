"""A corpus into a store: read, encoded and written shard by shard, so that it may be of any size."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm.auto import tqdm

from contaccum.data import RecordReport
from contaccum.files import redact
from contaccum.retrieval.encode import Kind, encode_texts, encoding_identity, read_texts
from contaccum.retrieval.store import StoreWriter, check_bits

ROWS_PER_SHARD = 50_000


class EncodedCorpus(NamedTuple):
    """What became of a corpus."""

    report: RecordReport
    num_encoded: int
    is_finished: bool


def require_texts(corpus: Path, kind: Kind, on_bad_record: Any = "stop") -> None:
    """Raise `DataError` for a corpus whose first text cannot be read."""
    next(read_texts(corpus, kind, RecordReport(on_bad_record)), None)


class CorpusEncoder:
    """Encodes texts of a corpus with a model, into the store that lies in a folder.

    The store is begun, or found to be of this model, when the object is made.

    Args:
        model: a SentenceTransformer.
        model_name: for the store's record.
        corpus: a file or BEIR folder that `read_texts` reads.
        folder: of the store.
        kind: what the texts are encoded as.
        dtype: of the store; see `STORED`.
        batch_size, precision: see `encode_texts`.
        shard_size: rows of a shard, which a killed process loses at most.
        overwrite: remove a store that lies there.
        on_bad_record: ``"stop"`` or ``"skip"``, at a record that cannot be used.

    Raises:
        DataError: for a corpus that cannot be read.
        UserError: for a folder with another store or something else in it.
    """

    def __init__(
        self,
        model: Any,
        model_name: str,
        corpus: Path,
        folder: Path,
        kind: Kind = "document",
        dtype: str = "float32",
        batch_size: int = 32,
        precision: str = "float32",
        shard_size: int = ROWS_PER_SHARD,
        overwrite: bool = False,
        on_bad_record: Any = "stop",
    ) -> None:
        check_bits(dtype, model.get_embedding_dimension())
        self.model = model
        self.corpus = corpus
        self.kind: Kind = kind
        self.on_bad_record = on_bad_record
        self.batch_size = batch_size
        self.precision = precision
        require_texts(corpus, kind, on_bad_record)  # before anything is written
        identity = encoding_identity(model, kind, precision, dtype, shard_size)
        notes = {"model_name": redact(model_name), "corpus": {"path": redact(str(corpus))}}
        self.writer = StoreWriter(folder, identity, notes, overwrite)

    def encode(self, rank: int = 0, ranks: int = 1, show_progress: bool = True) -> EncodedCorpus:
        """Encode the shards that are missing, of several ranks every ``ranks``-th.

        Raises:
            DataError: for a corpus that cannot be read, or another than the store's.
        """
        report = RecordReport(self.on_bad_record)
        num_encoded = 0

        def encode(texts: Sequence[str]) -> np.ndarray:
            nonlocal num_encoded
            num_encoded += len(texts)
            return encode_texts(
                self.model, texts, self.kind, self.batch_size, self.precision, show_progress
            )

        texts = read_texts(self.corpus, self.kind, report)
        progress = tqdm(texts, "Shards", unit=f" {self.kind}s", disable=not show_progress)
        is_finished = self.writer.fill(progress, encode, rank, ranks)
        return EncodedCorpus(report, num_encoded, is_finished)
