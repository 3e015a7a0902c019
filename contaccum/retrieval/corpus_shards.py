"""A corpus in shards of equal size, read ahead while another is encoded, and encoded into a store.

Memory holds two shards of texts, one of embeddings, and 16 bytes for each id. The model is a function from texts to
embeddings; files and folders are the business of `passages` and `store_writer`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from contaccum.data.passages import Passage
from contaccum.data.records import RecordReport, add_to_fingerprint, one_line, quoted
from contaccum.data.seen_ids import SeenIds
from contaccum.errors import DataError
from contaccum.retrieval.store_writer import StoreWriter

_IDS_AT_A_TIME = 4096


class CorpusShard(NamedTuple):
    """Passages number * shard_size and on; `fingerprint` is that of the corpus from its start to the last of them."""

    number: int
    ids: list[str]
    texts: list[str]
    fingerprint: str


@dataclass
class Progress:
    """What became of the shards, for `encode_shards` to fill.

    Attributes:
        encoded, kept: passages of this process's shards: those that it encoded, and those that lay in the store.
        shards: of the corpus, once it is read to its end.
        fingerprint: sha256 of the corpus, likewise; that of `evaluate_open_qa`'s records.
    """

    encoded: int = 0
    kept: int = 0
    shards: int = 0
    fingerprint: str = field(default_factory=lambda: hashlib.sha256().hexdigest())


def distinct_passages(passages: Iterable[Passage], source: str | Path, report: RecordReport) -> Iterator[Passage]:
    """The passages whose id did not come before.

    Raises:
        DataError: under "stop", an id that occurs again; under "skip" the later passage is left out and counted.
    """
    passages, seen = iter(passages), SeenIds()
    while block := list(islice(passages, _IDS_AT_A_TIME)):
        for passage, again in zip(block, seen.add([passage.id for passage in block]).tolist(), strict=True):
            if not again:
                yield passage
            elif report.on_bad_record == "stop":
                mend = "keep one passage for each id, or leave later ones out with --on_bad_record skip"
                raise DataError(one_line(f"{source}: id {quoted(passage.id)} occurs again ({mend})"))
            else:
                report.leave_out(source, "id occurs again")


def corpus_shards(passages: Iterable[Passage], shard_size: int) -> Iterator[CorpusShard]:
    """The corpus in shards of `shard_size` passages, the last one of what is left."""
    passages, digest, number = iter(passages), hashlib.sha256(), 0
    while block := list(islice(passages, shard_size)):
        for passage in block:
            add_to_fingerprint(digest, *passage)
        texts = [passage.passage for passage in block]
        yield CorpusShard(number, [passage.id for passage in block], texts, digest.hexdigest())
        number += 1


def encode_shards(
    shards: Iterable[CorpusShard],
    encode: Callable[[list[str]], np.ndarray],
    writer: StoreWriter,
    rank: int = 0,
    world_size: int = 1,
    after_shard: Callable[[Progress], None] = lambda progress: None,
) -> Progress:
    """Encode the shards that the store lacks; of several processes each takes every `world_size`-th.

    Every shard that the store has must be of this very corpus, and is compared with it before any later one is
    encoded.

    Args:
        encode: texts to float32 (n, d).
        after_shard: called when a shard is written, or was found.

    Raises:
        DataError: the store has shards of another corpus; and what reading the corpus raises.
    """
    progress = Progress()

    def next_of_ours() -> CorpusShard | None:
        for shard in remaining:
            progress.shards, progress.fingerprint = shard.number + 1, shard.fingerprint
            if writer.known_shards is not None and shard.number >= writer.known_shards:
                raise _other_corpus(writer.folder, f"it has passages beyond the store's {writer.known_shards} shards")
            told = writer.read_shard(shard.number)
            if told is not None and told["fingerprint"] != shard.fingerprint:
                raise _other_corpus(writer.folder, f"it differs in shard {shard.number} or before")
            if shard.number % world_size != rank:
                continue
            if told is None:
                return shard
            progress.kept += len(shard.ids)
            after_shard(progress)
        return None

    remaining = iter(shards)
    with ThreadPoolExecutor(1) as reader:
        coming = reader.submit(next_of_ours)
        while (shard := coming.result()) is not None:
            coming = reader.submit(next_of_ours)
            writer.write_shard(shard.number, shard.ids, encode(shard.texts), shard.fingerprint)
            progress.encoded += len(shard.ids)
            after_shard(progress)
    return progress


def _other_corpus(folder: Path, what: str) -> DataError:
    return DataError(
        one_line(
            f"{folder}: holds embeddings of another corpus: {what} (name another --output, or start anew with "
            "--overwrite)"
        )
    )
