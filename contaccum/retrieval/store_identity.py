"""What decides the embeddings of a store besides the texts: two runs that agree in it may write one store."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from contaccum.evaluation.model_record import model_fingerprint, tokenisation_contract
from contaccum.retrieval.encoding import Kind


def store_identity(model: Any, kind: Kind, autocast_dtype: str | None, dtype: str, shard_size: int) -> dict[str, Any]:
    """The `identity` of `StoreWriter.start` for a SentenceTransformer; takes a pass over its weights.

    Raises `ConfigError` for a model that compares by neither cosine nor dot product.
    """
    from contaccum.retrieval.searcher import FaissSearcher

    return {
        "kind": kind,
        "model": model_fingerprint(model),
        "similarity": FaissSearcher(model).metric(),
        "tokenisation": {**(tokenisation_contract(model) or {}), "fingerprint": tokenizer_fingerprint(model, kind)},
        "precision": autocast_dtype or "float32",
        "dtype": dtype,
        "shard_size": shard_size,
    }


def tokenizer_fingerprint(model: Any, kind: Kind) -> str | None:
    """sha256, in hex, of the tokenizer that texts of a kind go through; None for one that cannot be saved.

    Padding and truncation are left out: they are set anew for each call, and lie in `tokenisation_contract`.
    """
    from contaccum.encoders import tower

    tokenizer = getattr(next(tower(model, kind).children()), "tokenizer", None)
    fast: Any = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if hasattr(fast, "to_str"):
        content = {**json.loads(fast.to_str()), "padding": None, "truncation": None}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    save = getattr(tokenizer, "save_pretrained", None) or getattr(tokenizer, "save", None)
    if save is None:
        return None
    digest = hashlib.sha256()
    with tempfile.TemporaryDirectory() as folder:
        save(folder)
        for path in sorted(Path(folder).rglob("*")):
            if path.is_file():
                digest.update(os.fsencode(path.relative_to(folder)) + b"\0" + path.read_bytes())
    return digest.hexdigest()
