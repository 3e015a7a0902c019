"""Vectors in place of a model, for `contaccum fit --vectors`: a closed API, or an index that stays.

The user's vectors are written to two stores, and a model that looks them up by the text stands for
the encoder. So the split, the ladder up to the linear map, the verdict and the report are those of
a model. A row without a text has a text that is made of its id, which no other text resembles.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from sentence_transformers.base.modules import InputModule
from sentence_transformers.sentence_transformer.modules import Router

from contaccum.data.beir import find_beir_file, is_beir_folder
from contaccum.data.records import RecordSource, read_passages
from contaccum.data.rows import RecordReport, passage_text
from contaccum.data.split import CORPUS_FILE, TRAIN_FILE
from contaccum.data.vectors import SIDES, read_vectors
from contaccum.encoders.dual_encoder import DualEncoder
from contaccum.errors import DataError, quoted
from contaccum.experiments.candidates import MAP_FILE, Candidate
from contaccum.experiments.folds import Pairs
from contaccum.experiments.run import Job
from contaccum.files import atomic_file, atomic_folder, read_json, write_json, write_text
from contaccum.retrieval.documents import StoreDocuments
from contaccum.retrieval.encode import encoding_identity
from contaccum.retrieval.store import EmbeddingStore, StoreWriter

_PREPARED_FILE = "prepared.json"
_ROWS_PER_SHARD = 8192  # memory holds a shard; with 1,536 dimensions it has 50 MB


class VectorTable(InputModule):
    """Module that returns the given vectors of texts, in place of an encoder.

    Attributes:
        side: "queries" or "documents".
        vectors: the vectors by text; None until they are read.
    """

    def __init__(self, side: str) -> None:
        super().__init__()
        self.side = side
        self.vectors: StoreDocuments | None = None

    def preprocess(
        self, inputs: Sequence[str], prompt: str | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Return the vectors of n texts, float32 (n, d).

        Raises:
            DataError: for a text that has none.
        """
        assert self.vectors is not None
        found, embeddings = self.vectors.find_embeddings([text.strip() for text in inputs])
        if len(found) < len(inputs):
            missing = np.setdiff1d(np.arange(len(inputs)), found)[0]
            raise DataError(
                f"{self.vectors.store.metadata['model_name']}: the {self.side} have no vector of "
                f"{quoted(inputs[missing])} (add its row, or leave out its pairs)"
            )
        return {"sentence_embedding": torch.from_numpy(embeddings)}

    def forward(self, features: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Return the features, which have the vectors already."""
        return features

    def get_embedding_dimension(self) -> int:
        """Return d."""
        assert self.vectors is not None
        return self.vectors.dimension

    def save(self, *args: Any, **kwargs: Any) -> None:
        """Refuse: the vectors are the user's files."""
        raise NotImplementedError


def load_vectors(
    job: Job, vectors: Path, pairs: Pairs
) -> tuple[DualEncoder, StoreDocuments, Pairs]:
    """Read the user's vectors and match the pairs with them, unless an earlier start has done so.

    Everything is written to a folder of the job, at once when it is complete.

    Args:
        vectors: see `contaccum.data.vectors`.
        pairs: the user's pairs. Each query and passage is an id of ``vectors``, or a text.

    Returns:
        The model that looks the vectors up; the vectors of the documents; and the pairs with the
        texts of the rows, whose corpus is the documents.

    Raises:
        DataError: for vectors that cannot be used, and pairs without vectors.
    """
    tables = {side: VectorTable(side) for side in SIDES}
    router = Router.for_query_document([tables["queries"]], [tables["documents"]])
    base = DualEncoder(modules=[router], similarity_fn_name="cosine", device="cpu")
    folder = job.folder / "vectors"
    if not folder.exists():
        with atomic_folder(folder) as new_folder:
            for line in _write_vectors(vectors, pairs, new_folder, base):
                job.print_line(line)
    for side, table in tables.items():
        table.vectors = StoreDocuments(EmbeddingStore.open(folder / side))
    documents = tables["documents"].vectors
    assert documents is not None
    documents.has_texts = read_json(folder / _PREPARED_FILE)["has_texts"]
    if not _keeps_texts(pairs):
        sizes = {"dev": pairs.dev, "test": pairs.test, "future": pairs.future}
        pairs = Pairs(folder / TRAIN_FILE, folder / CORPUS_FILE, **sizes)
    return base, documents, pairs


def _keeps_texts(pairs: Pairs) -> bool:
    """Return True for a BEIR folder or a split, which have test sets, and texts that stay."""
    return pairs.is_split or is_beir_folder(pairs.path)


def _write_vectors(vectors: Path, pairs: Pairs, folder: Path, base: DualEncoder) -> list[str]:
    """Write a store for each side, and the pairs and the corpus with the texts of the stores.

    Returns:
        Lines for the user: the vectors, and the records that are left out.
    """
    report = RecordReport(pairs.on_bad_record)
    sources = {"queries": None, "documents": pairs.corpus}
    if is_beir_folder(pairs.path) and not pairs.is_split:
        sources["queries"] = find_beir_file(pairs.path, "queries.jsonl")
        sources["documents"] = find_beir_file(pairs.path, "corpus.jsonl")
    sides = {}
    for side, source in sources.items():
        texts = {}
        if source is not None:
            columns = pairs.corpus_columns if source == pairs.corpus else None
            for passage in read_passages(source, report, may_be_blank=True, columns=columns):
                texts[passage.id] = (passage.title, passage.text)
        sides[side] = _write_side(vectors, side, texts, folder / side, base, _keeps_texts(pairs))
    queries, documents = sides["queries"], sides["documents"]
    if queries.dimension != documents.dimension:
        raise DataError(
            f"{vectors}: the queries have {queries.dimension:,} dimensions, and the documents "
            f"{documents.dimension:,} (give both by one model)"
        )
    if not _keeps_texts(pairs):
        matched = _match_pairs(pairs, vectors, queries, documents, report)
        write_text(folder / TRAIN_FILE, matched)
        write_text(folder / CORPUS_FILE, documents.lines)
    has_texts = queries.has_texts and documents.has_texts
    write_json(folder / _PREPARED_FILE, {"has_texts": has_texts})
    lines = [
        f"{vectors}: {len(queries.lines):,} queries and {len(documents.lines):,} documents of "
        f"{documents.dimension:,} dimensions"
        + ("" if has_texts else "; without texts, BM25 and near-duplicates are not searched")
    ]
    return lines + [report.summary()] * bool(report.reported)


class _Side(NamedTuple):
    """The rows of a side after they were written.

    Attributes:
        dimension: d.
        text_of: {id or text of a row: its text in the store}.
        lines: the rows as lines of a corpus.
        has_texts: False if the rows have only ids.
    """

    dimension: int
    text_of: dict[str, str]
    lines: list[str]
    has_texts: bool


def _write_side(
    vectors: Path,
    side: str,
    texts: Mapping[str, tuple[str, str]],
    folder: Path,
    base: DualEncoder,
    keeps_texts: bool,
) -> _Side:
    """Write the store of a side.

    Args:
        texts: {id: (title, text)} of rows that have no text in their file.
        base: its identity is that of the store.
        keeps_texts: True: a row with a blank text keeps it.
    """
    arrays: list[np.ndarray] = []  # that are read, but not yet written
    by_id: dict[str, str] = {}
    by_text: dict[str, str] = {}
    lines: list[str] = []
    has_texts = False

    def list_passages() -> Iterator[tuple[str, str, str]]:
        nonlocal has_texts
        for block in read_vectors(vectors, side):
            arrays.append(block.embeddings)
            for name, title, text in block.names:
                if not passage_text(title, text):
                    title, text = texts.get(name, ("", ""))
                if passage_text(title, text):
                    has_texts = True
                elif not keeps_texts:
                    # The hash keeps ids apart that are nearly equal, such as chunk-17 and chunk-18.
                    text = f"{name} [{hashlib.sha256(name.encode()).hexdigest()[:32]}]"
                passage = passage_text(title, text)
                by_id[name] = passage
                by_text.setdefault(passage, passage)
                by_text.setdefault(text.strip(), passage)
                lines.append(json.dumps({"_id": name, "title": title, "text": text}) + "\n")
                yield name, title, text

    def take(shard: Sequence[str]) -> np.ndarray:
        embeddings = np.concatenate(arrays)
        arrays[:] = [embeddings[len(shard) :]]
        return embeddings[: len(shard)]

    identity = encoding_identity(base, "float32", "float32", _ROWS_PER_SHARD)
    StoreWriter(folder, identity, {"model_name": str(vectors)}).fill(list_passages(), take)
    dimension = EmbeddingStore.open(folder).shape[1]
    return _Side(dimension, {**by_text, **by_id}, lines, has_texts)


def _match_pairs(
    pairs: Pairs, vectors: Path, queries: _Side, documents: _Side, report: RecordReport
) -> Iterator[str]:
    """Yield the pairs with the texts of the stores, as lines of training data.

    Raises:
        DataError: if queries or passages have no vector.
    """
    source = RecordSource(
        pairs.path, pairs.data_format, columns=pairs.columns, min_score=pairs.min_score
    )
    missing: dict[str, list[str]] = {"queries": [], "documents": []}
    for record in source.records(report):
        query = queries.text_of.get(record.query.strip())
        positives = []
        if query is None:
            missing["queries"].append(record.query)
        for name in record.positives:
            if name in documents.text_of:
                positives.append(documents.text_of[name])
            else:
                missing["documents"].append(name)
        yield json.dumps({"query": query, "positive": positives}) + "\n"
    for side, names in missing.items():
        if names:
            raise DataError(
                f"{pairs.path}: {len(names):,} pairs name {side} that {vectors} does not have, "
                f"such as {quoted(names[0])} (add their vectors, or leave the pairs out)"
            )


def write_map(candidate: Candidate, folder: Path, dimension: int, file: Path) -> None:
    """Write the matrix (d, d) by which query vectors are multiplied; without a map, the identity.

    Args:
        folder: the folder with the candidate's map.
    """
    matrix = torch.eye(dimension, dtype=torch.float64)
    if candidate.system == "map":
        matrix += candidate.blend * load_file(folder / MAP_FILE)[candidate.map_key]
    with atomic_file(file) as temporary_file:
        save_file({"matrix": matrix}, temporary_file)
