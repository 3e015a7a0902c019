"""What a result has to say about the model that was scored: its weights, and how it turns text into tokens.

Two results with equal records used the same weights on the same tokens. Nothing is loaded or changed here but by
`set_max_lengths`.
"""

from __future__ import annotations

import hashlib
from typing import Any, Literal

from contaccum.errors import ConfigError
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


def set_max_lengths(model: Any, query: int | None = None, document: int | None = None) -> None:
    """Truncate queries and documents at these numbers of tokens; None leaves the model's own limit.

    Raises `ConfigError` for a length below 3 (two tokens are special) or beyond the model's positions, or when the
    model has no tokens to count.
    """
    kind: Literal["query", "document"]
    for kind, length in (("query", query), ("document", document)):
        if length is None:
            continue
        option = "query_max_length" if kind == "query" else "passage_max_length"
        if length < 3:
            raise ConfigError(f"{option} must be at least 3 (two tokens are special), not {length}")
        module = _route(model, kind)[0]
        if not hasattr(module, f"{kind}_length"):
            raise ConfigError(f"{option} needs a transformer that tokenises text; this model starts otherwise")
        limit = getattr(getattr(module, "config", None), "max_position_embeddings", None)
        if limit is not None and length > limit:
            raise ConfigError(f"{option}={length} is more than the {limit} positions of the model; lower it")
        setattr(module, f"{kind}_length", length)


def _route(model: Any, kind: str) -> list[Any]:
    """The modules that a query or a document passes, in order."""
    from contaccum.encoders import tower

    return list(tower(model, kind).children())


def _max_length(module: Any, kind: str) -> int | None:
    return getattr(module, f"{kind}_length", None) or getattr(module, "max_seq_length", None)
