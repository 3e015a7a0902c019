"""Texts to embeddings by sentence-transformers, and what identifies the model that made them.

Equal texts are encoded once, NaN is refused, and the model keeps the mode that it was in. Nothing is normalised and
nothing is written here: that is the business of `index` and `store`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Router

from contaccum.data import Passage, RecordReport, load_questions, read_passages
from contaccum.data.beir import beir_file
from contaccum.data.sampling import text_ids
from contaccum.encoders.towers import get_tower
from contaccum.errors import DataError, UserError, check_choice
from contaccum.files import Fingerprint

Kind = Literal["query", "document"]
Metric = Literal["cos", "dot"]

# BEIR's names, and those of sentence-transformers, for the two similarities that an inner product can rank by.
_METRICS: dict[str, Metric] = {"cos_sim": "cos", "cos": "cos", "cosine": "cos", "dot": "dot"}
# A larger batch falls out of a CPU's cache: 200 SciFact abstracts by MiniLM on one core take 16.4 s at 32 texts, 14.4 s
# at 8 and 14.2 s at 4.
_CPU_BATCH = 8
_IDS_AT_A_TIME = 2**16
_LENGTHS = ("max_seq_length", "query_length", "document_length")


def read_texts(path: Path, kind: Kind, report: RecordReport) -> Iterator[Passage]:
    """Documents, or queries, of what `read_passages` reads; queries of DPR's .csv too. Each record is counted.

    Memory holds 8 bytes for each id: of ten million, two have the same hash with a probability of 3e-6.

    Raises:
        DataError: the source cannot be used, or an id occurs again.
    """
    if kind == "query" and path.is_dir():
        path = beir_file(path, "queries.jsonl")
    if kind == "query" and path.name.removesuffix(".gz").endswith(".csv"):
        questions = load_questions(path, report.on_bad_record)
        report.restore(vars(questions.report))
        yield from (Passage(name, "", text) for name, text in questions.texts.items())
        return
    known: np.ndarray = np.empty(0, dtype=np.int64)
    passages = read_passages(path, report)
    while block := list(islice(passages, _IDS_AT_A_TIME)):
        hashes = text_ids(passage.id for passage in block)
        known = np.sort(
            np.concatenate([known, hashes]), kind="stable"
        )  # merges runs, in linear time
        again = known[1:][known[1:] == known[:-1]]
        if len(again):
            last = np.flatnonzero(np.isin(hashes, again))[-1]
            raise DataError(
                f"{path}: id {block[last].id[:60]!r} occurs again (keep one record for each id)"
            )
        yield from block


def encode_texts(
    model: Any,
    texts: Sequence[str],
    kind: Kind = "document",
    batch_size: int = 32,
    precision: str = "float32",
    show_progress: bool = False,
) -> np.ndarray:
    """Embed k texts with a SentenceTransformer by `encode_query` or `encode_document`: float32 (k, d).

    Equal texts have equal embeddings to the last bit. On a CPU a batch holds at most 8 texts, which is faster.

    Args:
        precision: "bfloat16" or "float16" for autocast; "float32" leaves what is in force.

    Raises:
        ConfigError: an unknown dtype.
        UserError: the model gives NaN or infinity; the text is named.
    """
    check_choice("precision", precision, ("float32", "bfloat16", "float16"))
    if not len(texts):
        return np.empty((0, model.get_embedding_dimension() or 0), dtype=np.float32)
    unique = list(dict.fromkeys(texts))
    encode = model.encode_query if kind == "query" else model.encode_document
    size = min(batch_size, _CPU_BATCH) if model.device.type == "cpu" else batch_size
    # "float32" is what is in force already: a trainer's own autocast stays.
    autocast = (
        nullcontext()
        if precision == "float32"
        else torch.autocast(model.device.type, getattr(torch, precision))
    )
    was_training = model.training
    try:
        with autocast:
            embeddings = np.asarray(
                encode(unique, batch_size=size, show_progress_bar=show_progress), dtype=np.float32
            )
    finally:
        # encode() leaves a model in eval mode; a training loop that asks for embeddings should keep its dropout.
        model.train(was_training)
    finite = np.isfinite(embeddings).all(axis=1)
    if not finite.all():
        mend = " (try it without autocast)" if precision != "float32" else ""
        raise UserError(
            f"the model gives NaN or infinity for the {kind} {unique[int(finite.argmin())][:60]!r}{mend}"
        )
    if len(unique) == len(texts):
        return embeddings
    place = {text: row for row, text in enumerate(unique)}
    return embeddings[[place[text] for text in texts]]


def metric_of(model: Any, score_function: str | None = None) -> Metric:
    """What embeddings are compared by; None is the model's own similarity, cosine where it has none.

    Raises:
        ConfigError: another similarity than cosine and dot product.
    """
    name = score_function or getattr(model, "similarity_fn_name", None) or "cosine"
    check_choice("the similarity", name, _METRICS)
    return _METRICS[name]


def encoding_identity(
    model: Any, kind: Kind, precision: str, dtype: str, shard_size: int
) -> dict[str, Any]:
    """Return the `identity` of `StoreWriter`: what decides embeddings besides the texts. Takes a pass over the weights.

    Its ``model`` is the document tower, for queries too: by it, queries and documents fit each other. A query tower
    that was trained against a store of documents leaves that store valid.
    """
    identity = {
        "kind": kind,
        "model": model_fingerprint(model, "document"),
        "similarity": metric_of(model),
    }
    if kind == "query":
        identity["query_model"] = model_fingerprint(model, "query")
    identity["tokenisation"] = tokenisation_fingerprint(model, kind)
    return identity | {"precision": precision, "dtype": dtype, "shard_size": shard_size}


def model_fingerprint(model: Any, kind: Kind | None = None) -> str | None:
    """Return a sha256, in hex, over names, types, shapes and bytes of all weights and buffers that the model saves.

    It is the same whether the model was just trained, or saved and loaded again, in whatever file format. None for an
    object without a `state_dict`.

    Args:
        kind: of a SentenceTransformer only the tower that encodes these texts.
    """
    if not isinstance(model, torch.nn.Module):
        return None
    module = model
    if kind is not None and isinstance(model, SentenceTransformer):
        module = get_tower(model, kind)
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        # numpy has no bfloat16: the bytes are taken as they are.
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def tokenisation_fingerprint(model: Any, kind: Kind | None = None) -> str | None:
    """Return a sha256, in hex, of how texts become vectors beside the weights: tokenisers, prompts, lengths, pooling.

    None for a model that is no SentenceTransformer.

    Args:
        kind: only for these texts; None: for queries and documents.
    """
    if not isinstance(model, SentenceTransformer):
        return None
    if kind is None:
        of_queries = tokenisation_fingerprint(model, "query")
        of_documents = tokenisation_fingerprint(model, "document")
        return Fingerprint(of_queries, of_documents).hex()
    fingerprint = Fingerprint(
        model.prompts.get(kind), model.default_prompt_name, model.truncate_dim
    )
    for module in get_tower(model, kind).modules():
        if isinstance(module, (SentenceTransformer, Router)):
            continue  # their modules count, and a tied model's are those of each tower
        if hasattr(module, "get_config_dict"):
            config: dict[str, Any] = module.get_config_dict()  # type: ignore[operator]  # a method
            lengths = {name: config.pop(name, None) for name in _LENGTHS}
            max_length = lengths[f"{kind}_length"] or getattr(module, "max_seq_length", None)
            fingerprint.add(type(module).__name__, config, str(max_length))
        tokenizer = getattr(module, "tokenizer", None)
        fast: Any = getattr(tokenizer, "backend_tokenizer", tokenizer)
        if hasattr(fast, "to_str"):  # padding and truncation are set anew for each call
            fingerprint.add({**json.loads(fast.to_str()), "padding": None, "truncation": None})
    return fingerprint.hex()
