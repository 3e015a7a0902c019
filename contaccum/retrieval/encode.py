"""Texts to embeddings, and what identifies the model that made them.

sentence-transformers does the encoding (prompts, task, route, truncation, sorting by length); equal texts are encoded
once, NaN is refused, and the model keeps the mode that it was in. Nothing is normalised and nothing is written here:
that is the business of `index` and `store`.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import numpy as np

from contaccum.data import passage_text
from contaccum.errors import ConfigError, UserError, check_choice

Kind = Literal["query", "document"]

KINDS = ("document", "query")
TITLE_SEPARATOR = " "
AUTOCAST_DTYPES = ("bfloat16", "float16")

# A larger batch gains nothing on a CPU and falls out of its cache: 200 SciFact abstracts by MiniLM on one core take
# 16.4 s at 32 texts a batch, 14.4 s at 8 and 14.2 s at 4 (packing by tokens took 13.6 s); short texts do not mind.
_CPU_BATCH = 8
_PROMPT_NAMES: dict[str, tuple[str, ...]] = {"query": ("query",), "document": ("document", "passage", "corpus")}


def document_text(document: Mapping[str, str] | str) -> str:
    """The text of a BEIR document: `(title + " " + text).strip()`, or the string itself.

    Raises `KeyError` when the document has no `text`.
    """
    if isinstance(document, str):
        return document
    return passage_text(document.get("title") or "", document["text"])


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
        ConfigError: a setting out of range.
        UserError: the model gives NaN or infinity; the text is named.
    """
    check_choice("kind", kind, KINDS)
    if batch_size < 1:
        raise ConfigError(f"batch_size must be at least 1, not {batch_size}")
    if not len(texts):
        return np.empty((0, model.get_embedding_dimension() or 0), dtype=np.float32)

    unique = list(dict.fromkeys(texts))
    encode = model.encode_query if kind == "query" else model.encode_document
    size = min(batch_size, _CPU_BATCH) if model.device.type == "cpu" else batch_size
    was_training = model.training
    try:
        with _autocast(model.device.type, autocast_dtype):
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
    if _is_sentence_transformer(model):
        return encode_texts(model, queries, "query", batch_size, autocast_dtype, show_progress)
    return _encode_as_beir(model.encode_queries, queries, batch_size, autocast_dtype, show_progress)


def encode_corpus(
    model: Any,
    documents: Sequence[Mapping[str, str]],
    batch_size: int = 32,
    autocast_dtype: str | None = None,
    show_progress: bool = False,
) -> np.ndarray:
    """Documents to float32 (k, d), with a SentenceTransformer or with any model that BEIR takes (`encode_corpus`)."""
    if _is_sentence_transformer(model):
        texts = [document_text(document) for document in documents]
        return encode_texts(model, texts, "document", batch_size, autocast_dtype, show_progress)
    return _encode_as_beir(model.encode_corpus, documents, batch_size, autocast_dtype, show_progress)


def check_autocast_dtype(name: str | None) -> None:
    """Raise `ConfigError` for what is neither None nor the name of a dtype to autocast to."""
    check_choice("autocast_dtype", name, (None, *AUTOCAST_DTYPES))


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

    if not _is_sentence_transformer(model):
        return None
    query, document = (list(tower(model, kind).children()) for kind in ("query", "document"))
    tokenizer = getattr(document[0], "tokenizer", None)
    return {
        "query_max_length": _max_length(query[0], "query"),
        "document_max_length": _max_length(document[0], "document"),
        "query_prompt": _prompt_for(model, "query") or "",
        "document_prompt": _prompt_for(model, "document") or "",
        "title_separator": TITLE_SEPARATOR,
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


def _max_length(module: Any, kind: str) -> int | None:
    length = getattr(module, f"{kind}_length", None) or getattr(module, "max_seq_length", None)
    # Static embeddings say infinity, which JSON does not have.
    return None if length is None or math.isinf(length) else length


def _prompt_for(model: Any, kind: Kind) -> str | None:
    """The prompt that `encode_query` or `encode_document` would choose, None for none."""
    for name in _PROMPT_NAMES[kind]:
        if name in model.prompts:
            return model.prompts[name]
    return model.prompts.get(model.default_prompt_name) if model.default_prompt_name is not None else None


def _autocast(device_type: str, autocast_dtype: str | None) -> AbstractContextManager[Any]:
    check_autocast_dtype(autocast_dtype)
    if autocast_dtype is None:
        return nullcontext()
    import torch

    return torch.autocast(device_type, dtype=getattr(torch, autocast_dtype))


def _is_sentence_transformer(model: Any) -> bool:
    from sentence_transformers import SentenceTransformer

    return isinstance(model, SentenceTransformer)


def _encode_as_beir(
    encode: Any, items: Sequence[Any], batch_size: int, autocast_dtype: str | None, show_progress: bool
) -> np.ndarray:
    import torch

    with _autocast("cuda" if torch.cuda.is_available() else "cpu", autocast_dtype):
        return _as_float32(
            encode(items, batch_size=batch_size, show_progress_bar=show_progress, convert_to_tensor=True)
        )


def _as_float32(embeddings: Any) -> np.ndarray:
    """A C-contiguous float32 array (k, d), from an array, a tensor on any device, or a list of either."""
    import torch

    if isinstance(embeddings, (list, tuple)) and embeddings and isinstance(embeddings[0], torch.Tensor):
        embeddings = torch.stack(list(embeddings))
    if isinstance(embeddings, torch.Tensor):
        embeddings = embeddings.detach().float().cpu().numpy()
    return np.ascontiguousarray(embeddings, dtype=np.float32)
