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
from typing import Any

import numpy as np
import torch
from sentence_transformers.sentence_transformer.modules import Router
from torch.nn.functional import normalize

from contaccum.data.beir import find_beir_file, is_beir_folder
from contaccum.data.records import Passage, RecordSource, read_passages
from contaccum.data.rows import RecordReport
from contaccum.data.sampling import text_ids
from contaccum.data.split import CORPUS_FILE, TRAIN_FILE
from contaccum.data.vectors import SIDES, read_vectors
from contaccum.encoders.dual_encoder import DualEncoder
from contaccum.encoders.names import model_name
from contaccum.encoders.settings import get_prompt, get_tower
from contaccum.errors import DataError, quoted
from contaccum.experiments.candidates import (
    ANEW_FOLDER,
    CANDIDATES_FOLDER,
    STORE_FOLDER,
    GivenVectors,
    encode_corpus,
)
from contaccum.experiments.folds import Pairs
from contaccum.experiments.request import format_duration
from contaccum.experiments.run import TRAINING_FOLDER, Job
from contaccum.files import atomic_folder, write_text
from contaccum.retrieval.documents import StoreDocuments
from contaccum.retrieval.encode import encoding_identity
from contaccum.retrieval.store import EmbeddingStore, StoreWriter
from contaccum.training.proposal import make_base_settings, propose_settings
from contaccum.training.setup import load_encoder

_MAX_ALIGNED = 2000  # documents by which the vectors of a new model are mapped to given ones
_ROWS_PER_SHARD = 8192  # memory holds a shard; with 1,536 dimensions it has 50 MB


class VectorTable(torch.nn.Module):
    """Module of a SentenceTransformer that returns given vectors of texts, in place of an encoder.

    ``vectors`` are those of a side by text; None until they are read.
    """

    modalities = ("text",)

    def __init__(self, vectors: StoreDocuments | None = None) -> None:
        super().__init__()
        self.vectors = vectors

    def preprocess(self, inputs: Sequence[str], **kwargs: Any) -> dict[str, Any]:
        """Return the vectors of n texts, float32 (n, d); a text without one raises `DataError`."""
        assert self.vectors is not None
        found, embeddings = self.vectors.find_embeddings([text.strip() for text in inputs])
        if len(found) < len(inputs):
            missing = np.setdiff1d(np.arange(len(inputs)), found)[0]
            store = self.vectors.store
            raise DataError(
                f"{store.metadata['model_name']}: the {store.folder.name} have no vector of "
                f"{quoted(inputs[missing])} (add its row, or leave out its pairs)"
            )
        return {"sentence_embedding": torch.from_numpy(embeddings)}

    def forward(self, features: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return features


def load_vectors(
    job: Job, vectors: Path, pairs: Pairs, sides: Sequence[str] = SIDES
) -> tuple[DualEncoder, StoreDocuments, Pairs]:
    """Read the user's vectors and match the pairs with them, unless an earlier start has done so.

    Each query and passage of the pairs is an id of the vectors, or a text; others, and vectors that
    cannot be used, raise `DataError`. Everything is written to a folder of the job, at once when it
    is complete. ``sides`` are ("documents",) if a new model encodes the queries.

    Returns:
        The model that looks the vectors up; the vectors of the documents; and the pairs with the
        texts of the rows, whose corpus is the documents.
    """
    tables = {side: VectorTable() for side in SIDES}
    routes: list[list[Any]] = [[tables[side]] for side in SIDES]
    router = Router.for_query_document(routes[0], routes[1])
    base = DualEncoder(modules=[router], similarity_fn_name="cosine", device="cpu")
    folder = job.folder / "vectors"
    # A BEIR folder and a split have test sets of their own, and texts that stay.
    keeps_texts = pairs.is_split or is_beir_folder(pairs.path)
    if not folder.exists():
        report = RecordReport(pairs.on_bad_record)
        with atomic_folder(folder) as new_folder:
            texts = _read_texts(pairs, report)
            identity = encoding_identity(base, "float32", "float32", _ROWS_PER_SHARD)
            text_of = {}
            for side in sides:
                writer = StoreWriter(new_folder / side, identity, {"model_name": str(vectors)})
                text_of[side], corpus = _write_side(
                    writer, vectors, texts.get(side, {}), report, keeps_texts
                )
            stores = [EmbeddingStore.open(new_folder / side) for side in sides]
            dimensions = [store.shape[1] for store in stores]
            if len(set(dimensions)) > 1:
                raise DataError(
                    f"{vectors}: queries have {dimensions[0]:,} dimensions, and documents "
                    f"{dimensions[1]:,} (give vectors of one model)"
                )
            if len(sides) == 1 and not stores[0].metadata["has_texts"]:
                raise DataError(
                    f"{vectors}: the documents have only ids, and a new model needs their texts "
                    "(give --corpus with the same ids)"
                )
            if not keeps_texts:
                write_text(new_folder / TRAIN_FILE, _match_pairs(pairs, vectors, text_of, report))
                write_text(new_folder / CORPUS_FILE, corpus)  # of the documents, the last side
        if report.reported:
            job.print_line(report.summary())
    read = {side: StoreDocuments(EmbeddingStore.open(folder / side)) for side in sides}
    for side, side_vectors in read.items():
        tables[side].vectors = side_vectors
    documents = read["documents"]
    documents.has_texts = all(each.store.metadata["has_texts"] for each in read.values())
    shown = f"{vectors}: {len(documents):,} documents of {documents.dimension:,} dimensions"
    if not documents.has_texts:
        shown += "; without texts, BM25 and near-duplicates are not searched"
    job.print_line(shown)
    if not keeps_texts:
        sizes: Any = {"dev": pairs.dev, "test": pairs.test, "future": pairs.future}
        pairs = Pairs(folder / TRAIN_FILE, folder / CORPUS_FILE, **sizes)
    return base, documents, pairs


def _read_texts(pairs: Pairs, report: RecordReport) -> dict[str, dict[str, Passage]]:
    """Return {side: {id: passage}} of the corpus, or of a BEIR folder."""
    files = {} if pairs.corpus is None else {"documents": pairs.corpus}
    if is_beir_folder(pairs.path) and not pairs.is_split:
        names = {"queries": "queries.jsonl", "documents": CORPUS_FILE}
        files = {side: find_beir_file(pairs.path, name) for side, name in names.items()}
    texts = {}
    for side, file in files.items():
        passages = read_passages(file, report, may_be_blank=True, columns=pairs.corpus_columns)
        texts[side] = {passage.id: passage for passage in passages}
    return texts


def _write_side(
    writer: StoreWriter,
    vectors: Path,
    texts: Mapping[str, Passage],
    report: RecordReport,
    keeps_texts: bool,
) -> tuple[dict[str, str], list[str]]:
    """Write the store of a side, which has the name of its folder, and notes if it has texts.

    ``texts``, by id, are for rows that have none in their file; a row without any gets one, unless
    ``keeps_texts``. Returned are {id or text of a row: its text in the store}, and the rows as
    lines of a corpus.
    """
    arrays: list[np.ndarray] = []  # vectors that are read, but not yet written
    by_id: dict[str, str] = {}
    by_text: dict[str, str] = {}
    lines: list[str] = []
    writer.notes["has_texts"] = False

    def list_passages() -> Iterator[Passage]:
        for row in read_vectors(vectors, writer.folder.name, report, arrays):
            row = row if row.passage else texts.get(row.id, row)
            if row.passage:
                writer.notes["has_texts"] = True
            elif not keeps_texts:
                # The hash keeps ids apart that are nearly equal, such as chunk-17 and chunk-18.
                digest = hashlib.sha256(row.id.encode()).hexdigest()[:32]
                row = row._replace(text=f"{row.id} [{digest}]")
            by_id[row.id] = row.passage
            by_text.setdefault(row.passage, row.passage)
            by_text.setdefault(row.text.strip(), row.passage)
            lines.append(json.dumps({"_id": row.id, "title": row.title, "text": row.text}) + "\n")
            yield row

    def take(shard: Sequence[str]) -> np.ndarray:
        embeddings = np.stack(arrays[: len(shard)])
        del arrays[: len(shard)]
        return embeddings

    writer.fill(list_passages(), take)
    return {**by_text, **by_id}, lines


def _match_pairs(
    pairs: Pairs, vectors: Path, text_of: Mapping[str, Mapping[str, str]], report: RecordReport
) -> Iterator[str]:
    """Yield the pairs with the texts of the stores, as lines; raise `DataError` if one has none."""
    source = RecordSource(pairs.path, columns=pairs.columns, min_score=pairs.min_score)
    missing: dict[str, list[str]] = {side: [] for side in SIDES}
    for record in source.records(report):
        names = {"queries": [record.query.strip()], "documents": record.positives}
        for side, texts in text_of.items():
            missing[side] += [name for name in names[side] if name not in texts]
            names[side] = [texts.get(name, name) for name in names[side]]
        yield json.dumps({"query": names["queries"][0], "positive": names["documents"]}) + "\n"
    for side, unknown in missing.items():
        if unknown:
            raise DataError(
                f"{pairs.path}: {len(unknown):,} pairs name {side} that {vectors} does not have, "
                f"such as {quoted(unknown[0])} (add their vectors, or leave the pairs out)"
            )


def load_new_model(
    job: Job, model: str, documents: StoreDocuments
) -> tuple[DualEncoder, GivenVectors]:
    """Load a new model for queries, whose documents keep the given vectors.

    For comparison it encodes all documents anew, into a folder of the ladder. A map needs only some
    of them.
    """
    settings = propose_settings(job.data / TRAIN_FILE, model, job.given)
    new_model = load_encoder(make_base_settings(settings), job.args)
    name = model_name(model)
    folder = job.folder / CANDIDATES_FOLDER / ANEW_FOLDER
    started = time.monotonic()
    test_corpus = job.data / "test" / CORPUS_FILE
    encoder = encode_corpus(job, new_model, name, test_corpus, folder / STORE_FOLDER)
    if encoder.num_encoded:
        seconds = format_duration(time.monotonic() - started)
        job.print_line(f"{name}: {encoder.num_encoded:,} documents encoded anew in {seconds}")
    if not (folder / TRAINING_FOLDER).exists():
        with atomic_folder(folder / TRAINING_FOLDER) as new_folder:
            new_model.save_pretrained(str(new_folder))
    # Documents of held-out queries alone do not take part.
    passages = read_passages(job.data / CORPUS_FILE, RecordReport(), may_be_blank=True)
    texts = [passage.passage for passage in passages]
    texts = texts[:: -(-len(texts) // _MAX_ALIGNED)]
    encoded = StoreDocuments(EmbeddingStore.open(folder / STORE_FOLDER))
    has_both = encoded.contains(text_ids(texts)) & documents.contains(text_ids(texts))
    texts = [text for text, is_found in zip(texts, has_both, strict=True) if is_found]
    old, new = (
        normalize(torch.from_numpy(source.find_embeddings(texts)[1]).double())
        for source in (documents, encoded)
    )
    query_tower: list[Any] = list(get_tower(new_model, "query").children())
    table: Any = VectorTable(documents)
    base = DualEncoder(
        modules=[Router.for_query_document(query_tower, [table])],
        prompts={"query": get_prompt(new_model, "query")},
        similarity_fn_name="cosine",
        device=str(new_model.device),
        trust_remote_code=new_model.trust_remote_code,
    )
    return base, GivenVectors(documents, name, (new, old))
