"""The two towers of a SentenceTransformer, its maximum lengths in tokens, dropout and attention.

A tower is the encoder of queries or that of passages. A backbone is the transformers model in it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Router, Transformer
from torch import nn
from transformers import PreTrainedModel

from contaccum.errors import ConfigError

Kind = Literal["query", "document"]
"""Kind of texts, and name of the tower that encodes them: a task in sentence-transformers."""

_MIN_TOKENS = 3  # the special tokens at both ends of a text, and one token between them
_NO_MAX_LENGTH = 10**9  # a tokenizer without a maximum length has a larger number
_DROPOUT_ATTRIBUTES = ("attention_dropout", "dropout_prob", "dropout_p")  # without a Dropout module


def get_tower(model: SentenceTransformer, task: str) -> nn.Module:
    """Return the module that encodes the texts of a task, "query" or "document".

    It is the whole model, or its modules with those of the task's route in place of a Router.
    """
    if not any(isinstance(module, Router) for module in model.children()):
        return model
    modules: list[nn.Module] = []
    for module in model.children():
        if isinstance(module, Router):
            # Private, but the only way to the route that `Router.forward` uses for any task.
            route_name = module._resolve_route(task=task, modality="text")
            modules += module.sub_modules[str(route_name)].children()
        else:
            modules.append(module)
    return nn.Sequential(*modules)


def is_tied(model: SentenceTransformer) -> bool:
    """Return True if the two towers share every weight."""
    query_weights = set(get_tower(model, "query").parameters())  # a set compares identities
    return query_weights == set(get_tower(model, "document").parameters())


def set_max_lengths(
    model: SentenceTransformer, query: int | None = None, document: int | None = None
) -> None:
    """Set the numbers of tokens, special ones included, at which texts are truncated.

    Raises `ConfigError` if the model cannot take a text of this length.
    """
    options = (("query", "query_max_length", query), ("document", "passage_max_length", document))
    for task, option, length in options:
        if length is None:
            continue
        transformer = next(get_tower(model, task).children())
        # A Transformer module of sentence-transformers has these two attributes.
        if not hasattr(transformer, f"{task}_length"):
            raise ConfigError(
                f"{option} needs a model whose first module is a transformer that tokenizes text"
            )
        max_positions = get_max_positions(transformer)
        if not _MIN_TOKENS <= length <= max_positions:
            raise ConfigError(
                f"{option}={length}: this model takes {_MIN_TOKENS} to {max_positions} tokens"
            )
        setattr(transformer, f"{task}_length", length)


def get_prompt(model: SentenceTransformer, task: str) -> str:
    """Return the prompt that `encode_query` or `encode_document` puts before each text."""
    return model.prompts.get(task) or ""


def require_max_length(model: SentenceTransformer, task: str) -> int:
    """Return the number of tokens at which texts are truncated, at most the backbone's positions.

    Raises `ConfigError` if the model has no maximum length.
    """
    transformer = next(get_tower(model, task).children())
    length = getattr(transformer, f"{task}_length", None)
    length = length or getattr(transformer, "max_seq_length", None)
    max_length = min(length or sys.maxsize, get_max_positions(transformer))
    if max_length >= _NO_MAX_LENGTH:
        raise ConfigError(
            f"this model has no maximum length for a {task}, and servers need one: set "
            "max_seq_length of the model, and save it again"
        )
    return max_length


def get_max_positions(transformer: Any) -> int:
    """Return the maximum number of tokens that a backbone has positions for.

    RoBERTa and its relatives number tokens from ``padding_idx + 1``: of 514 positions they use 512.
    """
    max_length = getattr(transformer.config, "max_position_embeddings", None) or sys.maxsize
    for name, module in transformer.named_modules():
        padding_idx = getattr(module, "padding_idx", None)
        if padding_idx is not None and name.rpartition(".")[2] == "position_embeddings":
            max_length = min(max_length, module.weight.shape[0] - padding_idx - 1)
    return max_length


def lower_default_lengths(model: nn.Module) -> None:
    """Lower maximum lengths of a loaded model that exceed its number of positions.

    The default of sentence-transformers is all positions, also those that RoBERTa does not use.
    """
    for module in model.modules():
        if isinstance(module, Transformer):
            max_length = get_max_positions(module)
            for name in ("max_seq_length", "query_length", "document_length"):
                if (getattr(module, name) or 0) > max_length:
                    setattr(module, name, max_length)


def configure(
    model: nn.Module, dropout: float | None = None, attn_implementation: str | None = None
) -> None:
    """Apply settings; raise `ConfigError` if a backbone does not support this attention."""
    if dropout is not None:
        for module in model.modules():
            # Private, but the base of all dropout modules of torch
            if isinstance(module, nn.modules.dropout._DropoutNd):
                module.p = dropout
            for name in _DROPOUT_ATTRIBUTES:
                if isinstance(getattr(module, name, None), float):
                    setattr(module, name, dropout)
    if attn_implementation is not None:
        try:
            for module in model.modules():
                if isinstance(module, PreTrainedModel):
                    module.set_attn_implementation(attn_implementation)
        except (ValueError, ImportError) as error:
            raise ConfigError(f"attn_implementation={attn_implementation}: {error}") from error


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Set a model to eval mode inside the block, and restore the mode of each module afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
