"""Encoding of texts with sentence-transformers, and fingerprints of the model that encodes them.

A fingerprint is a hash that is equal for models that give the same embeddings. A tower is the part
of a model that encodes one kind of texts, queries or documents. Nothing is normalised here.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Router
from torch import nn
from tqdm.auto import tqdm

from contaccum import work
from contaccum.data import RecordReport
from contaccum.data.corpus import read_texts
from contaccum.data.records import Columns
from contaccum.data.rows import OnBadRecord
from contaccum.encoders.settings import (
    Kind,
    get_prompt,
    get_tower,
    require_max_length,
    without_dropout,
)
from contaccum.errors import UserError, check_choice, quoted
from contaccum.files import AnyPath, Fingerprint
from contaccum.retrieval.store import STORE, TOKENISATION, EmbeddingStore, Similarity, StoreWriter

# BEIR's and sentence-transformers' names of the two similarities that an inner product can compute.
_SIMILARITIES: dict[str, Similarity] = {
    "cos_sim": "cos",
    "cos": "cos",
    "cosine": "cos",
    "dot": "dot",
}
# A larger batch does not fit a CPU's cache: 200 SciFact abstracts by MiniLM on one core take 16.4 s
# with 32 texts per batch, 14.4 s with 8 and 14.2 s with 4.
_MAX_CPU_BATCH_SIZE = 8
_BATCHES_PER_PART = 32  # between two drawings of the progress bar
_LENGTH_SETTINGS = ("max_seq_length", "query_length", "document_length")  # of a module


def encode_texts(
    model: SentenceTransformer,
    texts: Sequence[str],
    kind: Kind = "document",
    batch_size: int = 32,
    precision: str = "float32",
    show_progress: bool = False,
) -> np.ndarray:
    """Encode k texts with a SentenceTransformer, by `encode_query` or `encode_document`.

    Equal texts have equal embeddings to the last bit. NaN or infinity raises `UserError`.

    Args:
        batch_size: texts per forward pass; on a CPU, a value above 8 counts as 8.
        precision: "bfloat16" or "float16" for autocast to that type. With "float32", an autocast
            that a trainer has entered stays in force.

    Returns:
        float32 (k, d), not normalised unless the model normalises.
    """
    if len(texts) == 0:
        return np.empty((0, model.get_embedding_dimension() or 0), dtype=np.float32)
    encode = model.encode_query if kind == "query" else model.encode_document
    if model.device.type == "cpu":
        batch_size = min(batch_size, _MAX_CPU_BATCH_SIZE)
    autocast: AbstractContextManager[object] = nullcontext()
    if precision != "float32":
        autocast = torch.autocast(model.device.type, getattr(torch, precision))
    # The longest texts come first, as in encode(), which does so within each part. So a batch has
    # texts of about the same length, and the time left is not underestimated.
    unique_texts = sorted(dict.fromkeys(texts), key=len, reverse=True)
    num_texts = len(unique_texts)
    part_size = _BATCHES_PER_PART * batch_size
    encoded = []
    progress = tqdm(
        total=num_texts, desc="Encoding", unit=" texts", leave=False, disable=not show_progress
    )
    # encode() would leave a model without dropout, also in a training loop.
    with without_dropout(model), autocast, progress:
        for start in range(0, num_texts, part_size):
            part = unique_texts[start : start + part_size]
            encoded.append(encode(part, batch_size=batch_size, show_progress_bar=False))
            progress.update(len(part))
    embeddings = np.concatenate(encoded, dtype=np.float32)
    is_finite = np.isfinite(embeddings).all(axis=1)
    if not is_finite.all():
        text = unique_texts[int(is_finite.argmin())]
        raise UserError(
            f"the model gives NaN or infinity for the {kind} {quoted(text)} (check the model's "
            "weights, or encode with precision float32)"
        )
    row_of_text = {text: row for row, text in enumerate(unique_texts)}
    return embeddings[[row_of_text[text] for text in texts]]


def get_similarity(model: SentenceTransformer, score_function: str | None = None) -> Similarity:
    """Return "cos" or "dot", for a name such as "cos_sim"; None: that of the model, else "cos".

    Raises `ConfigError` if the similarity is neither cosine nor dot product.
    """
    name = score_function or getattr(model, "similarity_fn_name", None) or "cosine"
    check_choice("the similarity", name, _SIMILARITIES)
    return _SIMILARITIES[name]


def encoding_identity(
    model: SentenceTransformer, precision: str, dtype: str, shard_size: int
) -> dict[str, Any]:
    """Return the ``identity`` of a store: the settings and weights that decide its embeddings.

    Of the model, it has the document tower alone: query-side training leaves a store valid.
    """
    return {
        "kind": "document",
        "model": model_fingerprint(model, "document"),
        "similarity": get_similarity(model),
        TOKENISATION: tokenisation_fingerprint(model, "document"),
        "precision": precision,
        "dtype": dtype,
        "shard_size": shard_size,
    }


def check_store_fits(model: SentenceTransformer, store: EmbeddingStore) -> None:
    """Raise `ConfigError`, with what differs, for a store that another document tower encoded."""
    identity = encoding_identity(model, store.metadata["precision"], store.dtype, store.shard_size)
    work.require_same_work(
        store.folder,
        {"work": STORE, **identity},
        f"encode the documents with this model, or use {store.metadata.get('model_name')}, which "
        "wrote the store, with the same --passage_max_length",
    )


def model_fingerprint(model: Any, kind: Kind | None = None) -> str:
    """Return `hash_tensors` of a model's saved tensors, or of its tower for one kind of texts."""
    return hash_tensors((model if kind is None else get_tower(model, kind)).state_dict())


def hash_tensors(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return the sha256, in hex, of names, types, shapes and bytes of tensors."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        # Viewed as bytes, because numpy has no bfloat16.
        tensor_bytes = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        digest.update(tensor_bytes.numpy().data)
    return digest.hexdigest()


def tokenisation_fingerprint(model: SentenceTransformer, kind: Kind | None = None) -> str:
    """Return the sha256, in hex, of what decides embeddings beside the weights.

    This is tokenisers, prompts, maximum lengths, pooling and truncation, for one or both kinds.
    """
    if kind is None:
        kinds: tuple[Kind, ...] = ("query", "document")
        return Fingerprint(*(tokenisation_fingerprint(model, kind) for kind in kinds)).hex()
    prompt = get_prompt(model, kind)
    fingerprint = Fingerprint(prompt, model.default_prompt_name, model.truncate_dim)
    for module in get_tower(model, kind).modules():
        # The modules of containers are hashed one by one: then a model without a Router has the
        # same fingerprint as one whose towers are tied.
        if isinstance(module, (SentenceTransformer, Router)):
            continue
        if hasattr(module, "get_config_dict"):
            config = module.get_config_dict()  # type: ignore[operator]  # torch types it as a tensor
            lengths = {name: config.pop(name, None) for name in _LENGTH_SETTINGS}
            max_length = lengths[f"{kind}_length"] or getattr(module, "max_seq_length", None)
            fingerprint.add(type(module).__name__, config, str(max_length))
        tokenizer = getattr(module, "tokenizer", None)
        fast_tokenizer = getattr(tokenizer, "backend_tokenizer", tokenizer)
        if fast_tokenizer is not None and hasattr(fast_tokenizer, "to_str"):
            # Padding and truncation are left out, because every call sets them.
            fixed = {"padding": None, "truncation": None}
            fingerprint.add({**json.loads(fast_tokenizer.to_str()), **fixed})
    return fingerprint.hex()


class CorpusEncoder:
    """Encoder of a corpus into a new store, or into one of the same model and settings.

    Args:
        model_name: name of the model for the result of the store.
        corpus: file or BEIR folder that `read_texts` reads.
        dtype: type of the stored embeddings, "float32" or "float16".
        batch_size, precision: see `encode_texts`.
        shard_size: rows per shard. A killed process loses one shard at most.
        overwrite: remove a store that is in the folder. Of several processes only one may do this,
            before the others create their encoders.
        on_bad_record: "stop" raises an error at the first bad record, "skip" counts it.
        columns, has_passages: see `read_passages` and `StoreWriter`.

    Attributes:
        report: counts of the corpus's used and bad records.
        num_encoded: number of texts that this process encoded.
        is_cut: counts of the different texts among these that are longer than the model reads
            (True), and of the others (False).

    Raises:
        UserError: the folder holds another store or something else.
    """

    def __init__(
        self,
        model: SentenceTransformer,
        model_name: str,
        corpus: Path,
        folder: AnyPath,
        dtype: str = "float32",
        batch_size: int = 32,
        precision: str = "float32",
        shard_size: int = 50_000,
        overwrite: bool = False,
        on_bad_record: OnBadRecord = "stop",
        columns: Columns = None,
        has_passages: bool = False,
    ) -> None:
        self.model = model
        self.corpus = corpus
        self.columns = columns
        self.batch_size = batch_size
        self.precision = precision
        self.report = RecordReport(on_bad_record)
        self.num_encoded = 0
        self.is_cut: Counter[bool] = Counter()
        identity = encoding_identity(model, precision, dtype, shard_size)
        notes = {"model_name": model_name, "corpus": {"path": str(corpus)}}
        self.writer = StoreWriter(folder, identity, notes, overwrite, has_passages)

    def encode(self, rank: int = 0, world_size: int = 1, show_progress: bool = True) -> bool:
        """Encode the missing shards of this rank; return True if the store is finished.

        Raises:
            DataError: the corpus cannot be read, or is not the corpus of the store.
            UserError: the model returns NaN or infinity, or the disk is full.
        """

        def encode_shard(texts: Sequence[str]) -> np.ndarray:
            self.num_encoded += len(texts)
            return encode_texts(
                self.model, texts, "document", self.batch_size, self.precision, show_progress
            )

        def count_cut(model: nn.Module, inputs: tuple[Any, ...]) -> None:
            # A fast tokenizer keeps the tokens that it cuts off.
            encodings = getattr(inputs[0], "encodings", None) or ()
            self.is_cut.update(bool(encoding.overflowing) for encoding in encodings)

        passages = read_texts(self.corpus, "document", self.report, self.columns)
        with self.model.register_forward_pre_hook(count_cut):
            return self.writer.fill(passages, encode_shard, rank, world_size)

    def describe_cut(self) -> str:
        """Return a line about the passages that are longer than the model reads, if any are."""
        if not self.is_cut[True]:
            return ""
        share = 100 * self.is_cut[True] / self.is_cut.total()
        length = require_max_length(self.model, "document")
        return f"{share:.3g}% of the passages are longer than {length} tokens; the rest is not read"
