"""Stores of embeddings for query-side training in the studies.

A study encodes the corpus once with the model before training. The stores that training uses are
parts of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from contaccum import DualEncoder
from contaccum.data.beir import BeirDataset
from contaccum.retrieval.documents import StoreDocuments
from contaccum.retrieval.encode import CorpusEncoder, encoding_identity
from contaccum.retrieval.store import EmbeddingStore, StoreWriter


def make_stores(
    model_folder: str | Path,
    data: Path,
    folder: Path,
    train: BeirDataset,
    eval_sets: Mapping[str, BeirDataset],
) -> dict[str, Path]:
    """Encode the corpus once, and copy parts of it into the stores for training.

    Args:
        model_folder: the model before training.
        data: BEIR folder with the corpus.
        folder: parent folder of the stores. A finished store is used again.
        train: the split of the training pairs.
        eval_sets: {split: data} of the held-out queries.

    Returns:
        Folders of the stores: `haystack` is the whole corpus, `without_held_out` leaves out the
        documents that are relevant to held-out queries only, and `train` has the documents of
        training pairs.
    """
    model = DualEncoder.from_pretrained(str(model_folder), device="cpu")
    haystack = folder / "haystack"
    CorpusEncoder(model, str(model_folder), data, haystack).encode()

    train_documents = collect_positives(train)
    held_out = set()
    for eval_set in eval_sets.values():
        held_out |= collect_positives(eval_set)
    excluded = held_out - train_documents
    kept_documents = [name for name in train.corpus if name not in excluded]
    copy_embeddings(haystack, folder / "without_held_out", model, train, kept_documents)
    copy_embeddings(haystack, folder / "train", model, train, sorted(train_documents))
    return {name: folder / name for name in ("haystack", "without_held_out", "train")}


def collect_positives(dataset: BeirDataset) -> set[str]:
    """Return the ids of all relevant documents of the corpus."""
    positives = set()
    for grades in dataset.qrels.values():
        positives |= _get_relevant_documents(grades)
    return positives & dataset.corpus.keys()


def find_known_queries(eval_set: BeirDataset, train: BeirDataset) -> list[bool]:
    """Return for each query whether one of its relevant documents belongs to a training pair."""
    known_documents = collect_positives(train)
    is_known = []
    for grades in eval_set.qrels.values():
        is_known.append(bool(_get_relevant_documents(grades) & known_documents))
    return is_known


def _get_relevant_documents(grades: Mapping[str, int]) -> set[str]:
    """Return the ids of the relevant documents of a query, from {document id: grade}."""
    return {document_id for document_id, grade in grades.items() if grade > 0}


def copy_embeddings(
    source: Path,
    folder: Path,
    model: DualEncoder,
    dataset: BeirDataset,
    document_ids: Sequence[str],
) -> None:
    """Write a store of some documents, with embeddings from another store.

    Args:
        source: a store that has the documents.
        folder: the new store; a finished one is used again.
        model: the model of the embeddings.
        document_ids: distinct ids of documents of ``dataset``.
    """
    source_store = EmbeddingStore.open(source)
    documents = StoreDocuments(source_store)

    def look_up(texts: list[str]) -> np.ndarray:
        _, embeddings = documents.find_embeddings(texts)
        return embeddings

    passages = []
    for document_id in document_ids:
        document = dataset.corpus[document_id]
        passages.append((document_id, document["title"], document["text"]))
    identity = encoding_identity(model, "float32", "float32", 50_000)
    notes = {"model_name": source_store.metadata["model_name"], "part_of": str(source)}
    StoreWriter(folder, identity, notes).fill(passages, look_up)
