"""Settings of a model in memory: lengths of its texts, dropout, frozen word embeddings, attention."""

from __future__ import annotations

import sys
from typing import Any

from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Transformer
from torch import nn
from transformers import PreTrainedModel

from contaccum.encoders.towers import tower
from contaccum.errors import ConfigError


def set_max_lengths(model: SentenceTransformer, query: int | None = None, document: int | None = None) -> None:
    """Truncate queries and documents at these numbers of tokens, or by ConfigError refuse those that it cannot take."""
    for kind, option, length in (("query", "query_max_length", query), ("document", "passage_max_length", document)):
        if length is None:
            continue
        module = next(tower(model, kind).children())
        if not hasattr(module, f"{kind}_length"):
            raise ConfigError(f"{option} needs a transformer that tokenizes text; this model starts otherwise")
        if not 3 <= length <= positions(module):
            raise ConfigError(f"{option}={length}: this model takes 3 to {positions(module)} tokens")
        setattr(module, f"{kind}_length", length)


def positions(transformer: Any) -> int:
    """Return how many tokens a backbone has positions for."""
    configured = getattr(transformer.config, "max_position_embeddings", None) or sys.maxsize
    if configured < 0:  # XLNet's -1 stands for no limit
        configured = sys.maxsize
    return min(configured, _positions_after_padding(transformer))


def _positions_after_padding(transformer: nn.Module) -> int:
    """Return how many positions follow that of padding, or `sys.maxsize` if padding has none.

    RoBERTa and its relatives give padding a position, ``padding_idx``, and number the tokens of a
    text from ``padding_idx + 1``: of 514 positions they use 512.
    """
    longest = sys.maxsize
    for name, module in transformer.named_modules():
        padding_idx: Any = getattr(module, "padding_idx", None)
        if padding_idx is not None and name.rpartition(".")[2] == "position_embeddings":
            table: Any = module.weight
            longest = min(longest, table.shape[0] - padding_idx - 1)
    return longest


def lower_default_lengths(model: nn.Module) -> None:
    """Lower lengths of a loaded model that exceed the positions of RoBERTa and its relatives.

    sentence-transformers' default is ``max_position_embeddings``, at which long texts raise an
    IndexError in such a backbone.
    """
    for module in model.modules():
        if not isinstance(module, Transformer):
            continue
        longest = _positions_after_padding(module)
        if longest == sys.maxsize:
            continue
        for name in ("max_seq_length", "query_length", "document_length"):
            length = getattr(module, name)
            if length is not None and length > longest:
                setattr(module, name, longest)


def configure(
    model: nn.Module,
    dropout: float | None = None,
    freeze_word_embeddings: bool = False,
    attn_implementation: str | None = None,
) -> None:
    """Set the probability of every dropout, freeze word embeddings, choose attention by transformers' name for it.

    Raises:
        ConfigError: for a dropout outside of [0, 1), or an attention that a backbone has not.
    """
    if dropout is not None:
        if not 0 <= dropout < 1:
            raise ConfigError(f"dropout must be at least 0 and less than 1, got {dropout!r}")
        for module in model.modules():
            if isinstance(module, nn.modules.dropout._DropoutNd):  # private, but the base of all of torch's dropouts
                module.p = dropout
            for name in ("attention_dropout", "dropout_prob", "dropout_p"):  # what attention reads
                if isinstance(getattr(module, name, None), float):
                    setattr(module, name, dropout)
    backbones = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    if freeze_word_embeddings and not backbones:
        raise ConfigError("freeze_word_embeddings needs a transformers backbone; this model has none")
    for backbone in backbones:
        if freeze_word_embeddings:
            backbone.get_input_embeddings().weight.requires_grad_(False)
        if attn_implementation is not None:
            try:
                backbone.set_attn_implementation(attn_implementation)
            except (ValueError, ImportError) as error:
                raise ConfigError(f"attn_implementation={attn_implementation}: {error}") from error
