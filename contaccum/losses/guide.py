"""A guide: a frozen SentenceTransformer whose scores show which documents are false negatives.

It embeds the same texts as the model in training, prompts included. This module computes the
embeddings; the rule that is applied to their scores is in `contaccum.bank.false_negatives`.
"""

from __future__ import annotations

from typing import Any

import torch
from sentence_transformers import SentenceTransformer

# Private, but the only function that can cut all layouts.
from sentence_transformers.base.losses.gradcache import _create_minibatch
from sentence_transformers.util import batch_to_device
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from contaccum.errors import ConfigError
from contaccum.losses.text_ids import rows_in

_NO_LIMIT = 2**62
"""Length in tokens that stands for a model without a maximum length."""


class Guide:
    """A frozen model that embeds the columns on which another model is trained.

    If both models tokenise alike, the guide reads the model's tokens. Otherwise the tokens are
    decoded, and the guide's own tokenizer reads the texts. A guide is not a Module, so a loss that
    holds it neither trains it, sets its mode, wraps nor copies it.

    Attributes:
        model: the guide, in eval mode and without gradients.
        name: its name or path.
        tokenizer: the tokenizer of the model in training; None if the guide reads its tokens.

    Raises:
        ConfigError: if one of the two models has no tokenizer of transformers.
    """

    def __init__(self, model: SentenceTransformer, guide: SentenceTransformer) -> None:
        model_tokenizer = _tokenizer_of(model)
        guide_tokenizer = _tokenizer_of(guide)
        model_limit = model.max_seq_length or _NO_LIMIT
        guide_limit = guide.max_seq_length or _NO_LIMIT
        self.tokenizer: PreTrainedTokenizerBase | None = None
        if guide_limit < model_limit or model_tokenizer.get_vocab() != guide_tokenizer.get_vocab():
            self.tokenizer = model_tokenizer
        self.model = guide.eval().requires_grad_(False)
        self.name = guide_tokenizer.name_or_path

    def __deepcopy__(self, memo: dict[int, Any]) -> Guide:
        return self

    @torch.no_grad()
    def embed(self, columns: list[dict[str, Any]], at_once: int | None = None) -> list[Tensor]:
        """Compute the guide's embeddings of each column, (n, g).

        Args:
            columns: features as the model in training receives them.
            at_once: the number of texts to encode at once; None: all.
        """
        embeddings = []
        for column in columns:
            features = self._read(column)
            parts = [features]
            if at_once is not None:
                parts = _split(features, at_once)
            outputs = [self.model(part)["sentence_embedding"] for part in parts]
            embeddings.append(torch.cat(outputs))
        return embeddings

    def _read(self, column: dict[str, Any]) -> dict[str, Any]:
        """Return a column as features of the guide, on its device."""
        if self.tokenizer is not None:
            column = self._retokenize(column, self.tokenizer)
        # Modules may write into their input: Pooling masks prompts in place.
        copies = {}
        for key, value in column.items():
            copies[key] = value.clone() if isinstance(value, Tensor) else value
        return batch_to_device(copies, self.model.device)

    def _retokenize(
        self, column: dict[str, Any], tokenizer: PreTrainedTokenizerBase
    ) -> dict[str, Any]:
        """Decode the model's tokens, and tokenise the texts for the guide."""
        tokens = column["input_ids"]
        bounds = column.get("cu_seq_lens_q")
        if bounds is not None:
            tokens = tokens[0].split(bounds.diff().tolist())
        texts = tokenizer.batch_decode(tokens, skip_special_tokens=True)
        if "task" in column:
            return self.model.preprocess(texts, task=column["task"])
        return self.model.preprocess(texts)


def _tokenizer_of(model: SentenceTransformer) -> PreTrainedTokenizerBase:
    tokenizer = getattr(model, "tokenizer", None)
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise ConfigError(
            "guide: it and the model each need a tokenizer of transformers, to read the same texts"
        )
    return tokenizer


def _split(features: dict[str, Any], at_once: int) -> list[dict[str, Any]]:
    """Split the features of a column into parts of ``at_once`` texts."""
    parts = []
    for start in range(0, rows_in(features) or 0, at_once):
        parts.append(_create_minibatch(features, start, start + at_once))
    return parts
