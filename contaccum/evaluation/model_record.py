"""What a result has to say about the model that was scored: its weights, and how it turns text into tokens.

Two results with equal records used the same weights on the same tokens. Nothing is loaded or changed here.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

from contaccum.retrieval.encoding import TITLE_SEPARATOR, prompt_for


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
    from sentence_transformers import SentenceTransformer

    if not isinstance(model, SentenceTransformer):
        return None
    query, document = _route(model, "query"), _route(model, "document")
    tokenizer = getattr(document[0], "tokenizer", None)
    return {
        "query_max_length": _max_length(query[0], "query"),
        "document_max_length": _max_length(document[0], "document"),
        "query_prompt": prompt_for(model, "query") or "",
        "document_prompt": prompt_for(model, "document") or "",
        "title_separator": TITLE_SEPARATOR,
        "tokenizer": type(tokenizer).__name__ if tokenizer is not None else None,
        "pooling": next((m.pooling_mode for m in document if hasattr(m, "pooling_mode")), None),
        "normalize": any(type(m).__name__ == "Normalize" for m in document),
        "truncate_dim": model.truncate_dim,
    }


def _route(model: Any, kind: str) -> list[Any]:
    """The modules that a query or a document passes, in order."""
    from contaccum.encoders import tower

    return list(tower(model, kind).children())


def _max_length(module: Any, kind: str) -> int | None:
    length = getattr(module, f"{kind}_length", None) or getattr(module, "max_seq_length", None)
    # Static embeddings say infinity, which JSON does not have.
    return None if length is None or math.isinf(length) else length
