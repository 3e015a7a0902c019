"""What would fail only after hours of encoding, refused before: the search that was asked for, and the device."""

from __future__ import annotations

from typing import Any, Literal

from contaccum.errors import ConfigError
from contaccum.retrieval.encoding import check_autocast_dtype


def check_search(
    model: Any,
    documents: int,
    index: str,
    index_parameters: str | None,
    batch_size: int,
    autocast_dtype: str | None,
    similarity: str | None,
) -> Literal["cos", "dot"]:
    """The metric to search so many documents with; raises `ConfigError` for settings that cannot work."""
    from contaccum.retrieval.index import check_factory
    from contaccum.retrieval.searcher import FaissSearcher

    if batch_size < 1:
        raise ConfigError(f"batch_size must be at least 1, not {batch_size}")
    check_autocast_dtype(autocast_dtype)
    metric = FaissSearcher(model).metric(similarity)
    dimension = getattr(model, "truncate_dim", None)
    if dimension is None and hasattr(model, "get_embedding_dimension"):
        dimension = model.get_embedding_dimension()
    if dimension is not None:
        check_factory(index, dimension, documents, metric, index_parameters)
    return metric


def check_device(device: str) -> None:
    """Raise `ConfigError` for a device that torch cannot use here."""
    import torch

    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device {device!r} cannot be used here: {str(error).splitlines()[0]}") from error
