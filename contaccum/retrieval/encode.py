"""Texts to embeddings, and what identifies the model that made them.

sentence-transformers does the encoding (prompts, task, route, truncation, sorting by length); equal texts are encoded
once, NaN is refused, and the model keeps the mode that it was in. Nothing is normalised and nothing is written here:
that is the business of `index` and `store`.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np

from contaccum.data import Passage, RecordReport, load_questions, passage_text, read_passages
from contaccum.data.beir import beir_file
from contaccum.errors import ConfigError, DataError, UserError, check_choice

Kind = Literal["query", "document"]
Metric = Literal["cos", "dot"]

AUTOCAST_DTYPES = (None, "bfloat16", "float16")

# BEIR's names, and those of sentence-transformers, for the two similarities that an inner product can rank by.
_METRICS: dict[str, Metric] = {"cos_sim": "cos", "cos": "cos", "cosine": "cos", "dot": "dot"}

# A larger batch gains nothing on a CPU and falls out of its cache: 200 SciFact abstracts by MiniLM on one core take
# 16.4 s at 32 texts a batch, 14.4 s at 8 and 14.2 s at 4 (packing by tokens took 13.6 s); short texts do not mind.
_CPU_BATCH = 8
_PROMPT_NAMES: dict[str, tuple[str, ...]] = {"query": ("query",), "document": ("document", "passage", "corpus")}
_IDS_AT_A_TIME = 2**16


# Texts ---------------------------------------------------------------------------------------------------------------


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
    known: np.ndarray = np.empty(0, dtype=np.uint64)
    passages = read_passages(path, report)
    while block := list(islice(passages, _IDS_AT_A_TIME)):
        digests = [hashlib.blake2b(passage.id.encode(), digest_size=8).digest() for passage in block]
        hashes = np.frombuffer(b"".join(digests), dtype=np.uint64)
        known = np.sort(np.concatenate([known, hashes]), kind="stable")  # merges runs, in linear time
        again = known[1:][known[1:] == known[:-1]]
        if len(again):
            name = [passage.id for passage, found in zip(block, np.isin(hashes, again), strict=True) if found][-1]
            raise DataError(f"{path}: id {name[:60]!r} occurs again (keep one record for each id)")
        yield from block


# Embeddings ----------------------------------------------------------------------------------------------------------


def encode_texts(
    model: Any,
    texts: Sequence[str],
    kind: Kind = "document",
    batch_size: int = 32,
    autocast_dtype: str | None = None,
    show_progress: bool = False,
) -> np.ndarray:
    """Embed k texts with a SentenceTransformer, as queries or as documents: float32 (k, d), rows in the given order.

    What `model.encode_query(texts)` or `model.encode_document(texts)` gives. Equal texts have equal embeddings to the
    last bit. On a CPU a batch holds at most 8 texts, which is faster.

    Args:
        autocast_dtype: None, "bfloat16" or "float16".

    Raises:
        ConfigError: an unknown dtype.
        UserError: the model gives NaN or infinity; the text is named.
    """
    if not len(texts):
        return np.empty((0, model.get_embedding_dimension() or 0), dtype=np.float32)

    unique = list(dict.fromkeys(texts))
    encode = model.encode_query if kind == "query" else model.encode_document
    size = min(batch_size, _CPU_BATCH) if model.device.type == "cpu" else batch_size
    was_training = model.training
    try:
        with _autocast(model, autocast_dtype):
            embeddings = _as_float32(encode(unique, batch_size=size, show_progress_bar=show_progress))
    finally:
        # encode() leaves a model in eval mode; a training loop that asks for embeddings should keep its dropout.
        model.train(was_training)

    finite = np.isfinite(embeddings).all(axis=1)
    if not finite.all():
        mend = " (try it without autocast)" if autocast_dtype else ""
        raise UserError(f"the model gives NaN or infinity for the {kind} {unique[int(finite.argmin())][:60]!r}{mend}")
    if len(unique) == len(texts):
        return embeddings
    place = {text: row for row, text in enumerate(unique)}
    return embeddings[[place[text] for text in texts]]


def encode_queries(
    model: Any,
    queries: Sequence[str],
    batch_size: int = 32,
    autocast_dtype: str | None = None,
    show_progress: bool = False,
) -> np.ndarray:
    """Queries to float32 (k, d), with a SentenceTransformer or with any model that BEIR takes (`encode_queries`)."""
    if hasattr(model, "encode_query"):
        return encode_texts(model, queries, "query", batch_size, autocast_dtype, show_progress)
    return _encode_as_beir(model, model.encode_queries, queries, batch_size, autocast_dtype, show_progress)


def encode_corpus(
    model: Any,
    documents: Sequence[Mapping[str, str]],
    batch_size: int = 32,
    autocast_dtype: str | None = None,
    show_progress: bool = False,
) -> np.ndarray:
    """Documents to float32 (k, d), with a SentenceTransformer or with any model that BEIR takes (`encode_corpus`)."""
    if hasattr(model, "encode_document"):
        texts = [passage_text(document.get("title") or "", document["text"]) for document in documents]
        return encode_texts(model, texts, "document", batch_size, autocast_dtype, show_progress)
    return _encode_as_beir(model, model.encode_corpus, documents, batch_size, autocast_dtype, show_progress)


# What identifies them ------------------------------------------------------------------------------------------------


def metric_of(model: Any, score_function: str | None = None) -> Metric:
    """What embeddings are compared by; None is the model's own similarity, cosine where it has none.

    Raises:
        ConfigError: another similarity than cosine and dot product.
    """
    name = score_function or getattr(model, "similarity_fn_name", None) or "cosine"
    if name not in _METRICS:
        whose = "the model compares by" if score_function is None else "score function"
        raise ConfigError(f"{whose} {name!r}, and an index ranks by 'cos_sim' or 'dot': choose one of the two")
    return _METRICS[name]


def encoding_identity(model: Any, kind: Kind, precision: str, dtype: str, shard_size: int) -> dict[str, Any]:
    """The `identity` of `StoreWriter`: what decides embeddings besides the texts; takes a pass over the weights."""
    return {
        "kind": kind,
        "model": model_fingerprint(model),
        "similarity": metric_of(model),
        "tokenisation": {**(tokenisation_contract(model) or {}), "fingerprint": tokenizer_fingerprint(model, kind)},
        "precision": precision,
        "dtype": dtype,
        "shard_size": shard_size,
    }


def model_fingerprint(model: Any) -> str | None:
    """sha256, in hex, over names, types, shapes and bytes of all weights and buffers that the model saves.

    The same whether the model was just trained, or saved and loaded again, in whatever file format. None for an
    object without a `state_dict`.
    """
    import torch

    if not isinstance(model, torch.nn.Module):
        return None
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        # numpy has no bfloat16: the bytes are taken as they are.
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def tokenisation_contract(model: Any) -> dict[str, Any] | None:
    """How queries and documents become vectors, beside the weights; None for a model that is no SentenceTransformer.

    Lengths are in tokens, special tokens included; None is no limit.
    """
    from contaccum.encoders import tower

    if not hasattr(model, "encode_document"):
        return None
    query, document = (list(tower(model, kind).children()) for kind in ("query", "document"))
    tokenizer = getattr(document[0], "tokenizer", None)
    return {
        "query_max_length": _max_length(query[0], "query"),
        "document_max_length": _max_length(document[0], "document"),
        "query_prompt": _prompt_for(model, "query") or "",
        "document_prompt": _prompt_for(model, "document") or "",
        "title_separator": " ",
        "tokenizer": type(tokenizer).__name__ if tokenizer is not None else None,
        "pooling": next((m.pooling_mode for m in document if hasattr(m, "pooling_mode")), None),
        "normalize": any(type(m).__name__ == "Normalize" for m in document),
        "truncate_dim": model.truncate_dim,
    }


def tokenizer_fingerprint(model: Any, kind: Kind) -> str | None:
    """sha256, in hex, of the tokenizer that texts of a kind go through; None for one that is not of `tokenizers`.

    Padding and truncation are left out: they are set anew for each call, and are in `tokenisation_contract`.
    """
    from contaccum.encoders import tower

    tokenizer = getattr(next(tower(model, kind).children()), "tokenizer", None)
    fast: Any = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if hasattr(fast, "to_str"):
        content = {**json.loads(fast.to_str()), "padding": None, "truncation": None}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return None


# Details -------------------------------------------------------------------------------------------------------------


def _max_length(module: Any, kind: Kind) -> int | None:
    length = getattr(module, f"{kind}_length", None) or getattr(module, "max_seq_length", None)
    # Static embeddings say infinity, which JSON does not have.
    return None if length is None or math.isinf(length) else length


def _prompt_for(model: Any, kind: Kind) -> str | None:
    """The prompt that `encode_query` or `encode_document` would choose, None for none."""
    for name in _PROMPT_NAMES[kind]:
        if name in model.prompts:
            return model.prompts[name]
    return model.prompts.get(model.default_prompt_name) if model.default_prompt_name is not None else None


def _autocast(model: Any, autocast_dtype: str | None) -> AbstractContextManager[Any]:
    check_choice("autocast_dtype", autocast_dtype, AUTOCAST_DTYPES)
    if autocast_dtype is None:
        return nullcontext()
    import torch

    device = getattr(model, "device", None) or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.autocast(device.type, dtype=getattr(torch, autocast_dtype))


def _encode_as_beir(
    model: Any, encode: Any, items: Sequence[Any], batch_size: int, autocast_dtype: str | None, show_progress: bool
) -> np.ndarray:
    import torch

    with _autocast(model, autocast_dtype):
        found = encode(items, batch_size=batch_size, show_progress_bar=show_progress, convert_to_tensor=True)
    # Some answer with a list of tensors all the same.
    return _as_float32(torch.stack(list(found)) if isinstance(found, (list, tuple)) else found)


def _as_float32(embeddings: Any) -> np.ndarray:
    """A C-contiguous float32 array (k, d), from an array or a tensor on any device."""
    if hasattr(embeddings, "detach"):
        embeddings = embeddings.detach().float().cpu().numpy()
    return np.ascontiguousarray(embeddings, dtype=np.float32)
