"""Encoding of a whole corpus into a store, shard by shard, for a corpus of any size."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from sentence_transformers import SentenceTransformer
from tqdm.auto import tqdm

from contaccum.data import RecordReport
from contaccum.encoders.towers import Kind
from contaccum.files import AnyPath
from contaccum.retrieval.encode import encode_texts, encoding_identity, read_texts
from contaccum.retrieval.store import StoreWriter

ROWS_PER_SHARD = 50_000


class EncodedCorpus(NamedTuple):
    """Result of `CorpusEncoder.encode` in one process.

    Attributes:
        report: counts of the corpus's used and bad records.
        num_encoded: number of texts that this process encoded. It is smaller than the corpus if
            other processes, or an earlier run, wrote shards.
        is_finished: True if all shards of the store are written.
    """

    report: RecordReport
    num_encoded: int
    is_finished: bool


def require_texts(
    corpus: Path, kind: Kind, on_bad_record: Literal["stop", "skip"] = "stop"
) -> None:
    """Read the start of a corpus, up to 65,536 texts; raise `DataError` if it cannot be used.

    This takes seconds, so it is done before a model is loaded or a folder is created.
    """
    report = RecordReport(on_bad_record)
    next(read_texts(corpus, kind, report), None)


class CorpusEncoder:
    """Encoder of a corpus into the store in a folder.

    Creating the object creates the store, or opens a store that has been written with the same
    model and settings, in order to continue it.

    Args:
        model: a SentenceTransformer.
        model_name: name of the model for store.json.
        corpus: file or BEIR folder that `read_texts` reads.
        folder: folder of the store.
        kind: "query" or "document", the prompt and tower that encode the texts.
        dtype: type of the stored embeddings, "float32" or "float16".
        batch_size: texts per forward pass; see `encode_texts`.
        precision: type of autocast; see `encode_texts`.
        shard_size: rows per shard. A killed process loses one shard at most.
        overwrite: remove a store that is in the folder. Of several processes only one may do this,
            before the others create their encoders.
        on_bad_record: "stop" raises an error at the first bad record, "skip" counts it.

    Raises:
        DataError: the corpus cannot be read.
        UserError: the folder holds another store or something else.
    """

    def __init__(
        self,
        model: SentenceTransformer,
        model_name: str,
        corpus: Path,
        folder: AnyPath,
        kind: Kind = "document",
        dtype: str = "float32",
        batch_size: int = 32,
        precision: str = "float32",
        shard_size: int = ROWS_PER_SHARD,
        overwrite: bool = False,
        on_bad_record: Literal["stop", "skip"] = "stop",
    ) -> None:
        self.model = model
        self.corpus = corpus
        self.kind: Kind = kind
        self.on_bad_record = on_bad_record
        self.batch_size = batch_size
        self.precision = precision
        require_texts(corpus, kind, on_bad_record)  # before anything is written
        identity = encoding_identity(model, kind, precision, dtype, shard_size)
        notes = {"model_name": model_name, "corpus": {"path": str(corpus)}}
        self.writer = StoreWriter(folder, identity, notes, overwrite)

    def encode(
        self, rank: int = 0, world_size: int = 1, show_progress: bool = True
    ) -> EncodedCorpus:
        """Encode the shards that are missing; with several ranks, every ``world_size``-th shard.

        Raises:
            DataError: the corpus cannot be read, or is not the corpus of the store.
            UserError: the model returns NaN or infinity, or the disk is full.
        """
        report = RecordReport(self.on_bad_record)
        num_encoded = 0

        def encode_shard(texts: Sequence[str]) -> np.ndarray:
            nonlocal num_encoded
            num_encoded += len(texts)
            return encode_texts(
                self.model, texts, self.kind, self.batch_size, self.precision, show_progress
            )

        passages = read_texts(self.corpus, self.kind, report)
        progress = tqdm(passages, "Encoding", unit=" texts", disable=not show_progress)
        is_finished = self.writer.fill(progress, encode_shard, rank, world_size)
        return EncodedCorpus(report, num_encoded, is_finished)
