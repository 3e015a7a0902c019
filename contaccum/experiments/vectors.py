"""Vectors in place of a model, for `contaccum fit --vectors`: a closed API, or an index that stays.

The user's vectors are written to two stores, and a model that looks them up by the text stands for
the encoder. So the split, the ladder up to the linear map, the verdict and the report are those of
a model. A row without a text has a text that is made of its id, which no other text resembles.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file
from sentence_transformers.base.modules import InputModule
from sentence_transformers.sentence_transformer.modules import Router
from torch.nn.functional import normalize

from contaccum.data.beir import find_beir_file, is_beir_folder
from contaccum.data.records import RecordSource, read_passages
from contaccum.data.rows import RecordReport, passage_text
from contaccum.data.split import CORPUS_FILE, TRAIN_FILE
from contaccum.data.vectors import SIDES, read_vectors
from contaccum.encoders.dual_encoder import DualEncoder
from contaccum.encoders.linear_map import solve_linear_map
from contaccum.encoders.names import model_name
from contaccum.encoders.settings import get_prompt, get_tower
from contaccum.errors import DataError, quoted
from contaccum.experiments.budget import format_duration
from contaccum.experiments.candidates import (
    ANEW_FOLDER,
    CANDIDATES_FOLDER,
    STORE_FOLDER,
    Candidate,
    GivenVectors,
    encode_corpus,
    load_matrix,
)
from contaccum.experiments.folds import Pairs
from contaccum.experiments.proposed import make_base_settings, propose_settings
from contaccum.experiments.run import TRAINING_FOLDER, Job
from contaccum.files import atomic_file, atomic_folder, read_json, write_json, write_text
from contaccum.retrieval.documents import StoreDocuments
from contaccum.retrieval.encode import encoding_identity
from contaccum.retrieval.store import EmbeddingStore, StoreWriter
from contaccum.training.setup import load_encoder

MAX_ALIGNED = 2000
"""The number of documents by which the vectors of a new model are aligned with given ones."""

_ALIGNMENT_RIDGE = 1.0
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
        self, inputs: Sequence[Any], prompt: str | None = None, **kwargs: Any
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
    job: Job, vectors: Path, pairs: Pairs, sides: Sequence[str] = SIDES
) -> tuple[DualEncoder, StoreDocuments, Pairs]:
    """Read the user's vectors and match the pairs with them, unless an earlier start has done so.

    Everything is written to a folder of the job, at once when it is complete.

    Args:
        vectors: see `contaccum.data.vectors`.
        pairs: the user's pairs. Each query and passage is an id of ``vectors``, or a text.
        sides: ("documents",) if a new model encodes the queries, which then are texts.

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
            for line in _write_vectors(vectors, pairs, new_folder, base, sides):
                job.print_line(line)
    for side in sides:
        tables[side].vectors = StoreDocuments(EmbeddingStore.open(folder / side))
    documents = tables["documents"].vectors
    assert documents is not None
    documents.has_texts = read_json(folder / _PREPARED_FILE)["has_texts"]
    if not _keeps_texts(pairs):
        pairs = Pairs(
            folder / TRAIN_FILE,
            folder / CORPUS_FILE,
            dev=pairs.dev,
            test=pairs.test,
            future=pairs.future,
        )
    return base, documents, pairs


def _keeps_texts(pairs: Pairs) -> bool:
    """Return True for a BEIR folder or a split, which have test sets, and texts that stay."""
    return pairs.is_split or is_beir_folder(pairs.path)


def _write_vectors(
    vectors: Path, pairs: Pairs, folder: Path, base: DualEncoder, side_names: Sequence[str]
) -> list[str]:
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
    for side in side_names:
        source = sources[side]
        texts = {}
        if source is not None:
            columns = pairs.corpus_columns if source == pairs.corpus else None
            for passage in read_passages(source, report, may_be_blank=True, columns=columns):
                texts[passage.id] = (passage.title, passage.text)
        sides[side] = _write_side(vectors, side, texts, folder / side, base, _keeps_texts(pairs))
    queries, documents = sides.get("queries"), sides["documents"]
    has_texts = documents.has_texts
    num_queries = ""
    if queries is None and not has_texts:
        raise DataError(
            f"{vectors}: the documents have only ids, and a new model needs their texts (add a "
            "column text, or give --corpus with the same ids)"
        )
    if queries is not None:
        has_texts &= queries.has_texts
        num_queries = f"{len(queries.lines):,} queries and "
        if queries.dimension != documents.dimension:
            raise DataError(
                f"{vectors}: the queries have {queries.dimension:,} dimensions, and the documents "
                f"{documents.dimension:,} (give both by one model)"
            )
    if not _keeps_texts(pairs):
        matched = _match_pairs(pairs, vectors, queries, documents, report)
        write_text(folder / TRAIN_FILE, matched)
        write_text(folder / CORPUS_FILE, documents.lines)
    write_json(folder / _PREPARED_FILE, {"has_texts": has_texts})
    line = (
        f"{vectors}: {num_queries}{len(documents.lines):,} documents of {documents.dimension:,} "
        "dimensions"
    )
    if not has_texts:
        line += "; without texts, BM25 and near-duplicates are not searched"
    lines = [line]
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
    pairs: Pairs, vectors: Path, queries: _Side | None, documents: _Side, report: RecordReport
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
        query: str | None = record.query.strip()
        if queries is not None:
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


def load_new_model(
    job: Job, model: str, documents: StoreDocuments
) -> tuple[DualEncoder, GivenVectors]:
    """Load a new model for queries, and align its vectors with the given ones of documents.

    For comparison it encodes all documents anew, into a folder of the ladder. The alignment needs
    only `MAX_ALIGNED` of them: W of ridge regression from their new vectors to the given ones.

    Returns:
        The model with the query tower of the new one, whose documents are the given vectors; and
        these vectors with the alignment.
    """
    settings = propose_settings(job.data / TRAIN_FILE, model, job.given)
    new_model = load_encoder(make_base_settings(settings), job.args)
    name = model_name(model)
    folder = job.folder / CANDIDATES_FOLDER / ANEW_FOLDER
    started = time.monotonic()
    test_corpus = job.data / "test" / CORPUS_FILE
    encoder = encode_corpus(job, new_model, name, test_corpus, folder / STORE_FOLDER)
    if not (folder / TRAINING_FOLDER).exists():
        with atomic_folder(folder / TRAINING_FOLDER) as new_folder:
            new_model.save_pretrained(str(new_folder))
    if encoder.num_encoded:
        job.print_line(
            f"{name}: all {encoder.num_encoded:,} documents encoded anew in "
            f"{format_duration(time.monotonic() - started)}"
        )
    # Documents of held-out queries alone do not take part.
    passages = read_passages(job.data / CORPUS_FILE, RecordReport(), may_be_blank=True)
    texts = [passage.passage for passage in passages]
    texts = texts[:: max(1, len(texts) // MAX_ALIGNED)]
    stored = StoreDocuments(EmbeddingStore.open(folder / STORE_FOLDER))
    found, new_vectors = stored.find_embeddings(texts)
    also_found, vectors = documents.find_embeddings([texts[index] for index in found.tolist()])
    x = normalize(torch.from_numpy(new_vectors[also_found]).double())
    p = normalize(torch.from_numpy(vectors).double())
    zeros = torch.zeros(x.shape[1], p.shape[1], dtype=torch.float64)
    start = solve_linear_map(x, p, _ALIGNMENT_RIDGE, zeros)

    table = VectorTable("documents")
    table.vectors = documents
    query_tower: list[Any] = list(get_tower(new_model, "query").children())
    base = DualEncoder(
        modules=[Router.for_query_document(query_tower, [table])],
        prompts={"query": get_prompt(new_model, "query"), "document": ""},
        similarity_fn_name="cosine",
        device=str(new_model.device),
        trust_remote_code=new_model.trust_remote_code,
    )
    return base, GivenVectors(documents, start, name)


def write_map(candidate: Candidate, folder: Path, dimension: int, file: Path) -> None:
    """Write the matrix (d, e) by which query vectors are multiplied; without a map, the identity.

    Args:
        folder: the folder with the candidate's map.
    """
    matrix = torch.eye(dimension, dtype=torch.float64)
    if candidate.system == "map":
        matrix = load_matrix(candidate, folder)
    with atomic_file(file) as temporary_file:
        save_file({"matrix": matrix}, temporary_file)
