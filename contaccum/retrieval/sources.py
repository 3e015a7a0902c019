"""What goes into a store: texts from every form of a corpus or of queries, each id once, and how they are encoded."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from contaccum.data import Passage, RecordReport, load_questions, read_passages
from contaccum.data.beir import beir_file
from contaccum.data.records import quoted
from contaccum.errors import DataError
from contaccum.retrieval.encode import Kind, model_fingerprint, tokenisation_contract, tokenizer_fingerprint
from contaccum.retrieval.searcher import FaissSearcher

_IDS_AT_A_TIME = 2**16


def source_file(path: Path, kind: Kind) -> Path:
    """The file of a BEIR folder that texts of a kind are in; the path itself where it is no folder."""
    return beir_file(path, "queries.jsonl" if kind == "query" else "corpus.jsonl") if path.is_dir() else path


def read_texts(path: Path, kind: Kind, report: RecordReport) -> Iterator[Passage]:
    """Documents, or queries, of what `read_passages` reads; queries of DPR's .csv too. Each record is counted.

    Memory holds 8 bytes for each id: of ten million, two have the same hash with a probability of 3e-6.

    Raises:
        DataError: the source cannot be used; under "stop", an id that occurs again. Under "skip" the later passage is
            left out and counted.
    """
    path = source_file(path, kind)
    known: np.ndarray = np.empty(0, dtype=np.uint64)
    passages = _read(path, kind, report)
    while block := list(islice(passages, _IDS_AT_A_TIME)):
        raw = b"".join(hashlib.blake2b(passage.id.encode(), digest_size=8).digest() for passage in block)
        hashes = np.frombuffer(raw, dtype=np.uint64)
        new = np.zeros(len(block), dtype=bool)
        new[np.unique(hashes, return_index=True)[1]] = True
        new &= known[np.searchsorted(known, hashes).clip(max=max(0, len(known) - 1))] != hashes if len(known) else True
        for passage, is_new in zip(block, new.tolist(), strict=True):
            if is_new:
                yield passage
            elif report.on_bad_record == "stop":
                mend = "keep one passage for each id, or leave later ones out with --on_bad_record skip"
                raise DataError(f"{path}: id {quoted(passage.id)} occurs again ({mend})")
            else:
                report.used -= 1
                report.leave_out(path, "id occurs again")
        known = np.sort(np.concatenate([known, hashes[new]]), kind="stable")  # merges runs, in linear time


def encoding_identity(model: Any, kind: Kind, precision: str, dtype: str, shard_size: int) -> dict[str, Any]:
    """The `identity` of `StoreWriter`: what decides embeddings besides the texts; takes a pass over the weights.

    Raises `ConfigError` for a model that compares by neither cosine nor dot product.
    """
    return {
        "kind": kind,
        "model": model_fingerprint(model),
        "similarity": FaissSearcher(model).metric(),
        "tokenisation": {**(tokenisation_contract(model) or {}), "fingerprint": tokenizer_fingerprint(model, kind)},
        "precision": precision,
        "dtype": dtype,
        "shard_size": shard_size,
    }


def _read(path: Path, kind: Kind, report: RecordReport) -> Iterator[Passage]:
    if kind == "query" and path.name.removesuffix(".gz").endswith(".csv"):
        questions = load_questions(path, report.on_bad_record)
        report.restore(questions.report.to_dict())
        return (Passage(name, "", text) for name, text in questions.texts.items())
    return read_passages(path, report)
