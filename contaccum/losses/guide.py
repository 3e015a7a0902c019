"""Guide: a frozen SentenceTransformer whose scores show which documents are false negatives.

A false negative is a document that is relevant to a query, but is not labelled as its positive. The
guide embeds the same texts as the model in training. They begin with the prompts of that model, if
it has any; the guide's own prompts are not used. This module computes the embeddings of the guide;
`contaccum.bank.logits` has the rule that uses their scores.
"""

from __future__ import annotations

from typing import Any

import torch
from sentence_transformers import SentenceTransformer

# A private function, but the only one that splits features of every layout; see
# `contaccum.losses.text_ids` for the layouts.
from sentence_transformers.base.losses.gradcache import _create_minibatch
from sentence_transformers.util import batch_to_device
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from contaccum.errors import ConfigError
from contaccum.losses.text_ids import count_texts

_NO_LIMIT = 2**62
"""Maximum length in tokens of a model that has none."""


class Guide:
    """A frozen model that embeds the columns on which another model is trained.

    If both models have the same vocabulary, and the guide's maximum length is not smaller, the
    guide gets the token ids of the model in training. Otherwise these tokens are decoded, and the
    guide tokenises the texts again. Guide is not an nn.Module, so that a loss with a guide does not
    register its weights, change its mode or copy it.

    Args:
        model: the model in training.
        guide: the guide; it is set to eval mode, and its gradients are turned off.

    Attributes:
        model: the guide.
        name: the name or path of the guide.
        tokenizer: the tokenizer of the model in training, which decodes its tokens; None if the
            guide gets the tokens themselves.

    Raises:
        ConfigError: if the model or the guide has no tokenizer of transformers.
    """

    def __init__(self, model: SentenceTransformer, guide: SentenceTransformer) -> None:
        model_tokenizer = _get_tokenizer(model)
        guide_tokenizer = _get_tokenizer(guide)
        model_limit = model.max_seq_length or _NO_LIMIT
        guide_limit = guide.max_seq_length or _NO_LIMIT
        self.tokenizer: PreTrainedTokenizerBase | None = None
        has_same_vocabulary = model_tokenizer.get_vocab() == guide_tokenizer.get_vocab()
        if guide_limit < model_limit or not has_same_vocabulary:
            self.tokenizer = model_tokenizer
        self.model = guide.eval().requires_grad_(False)
        self.name = guide_tokenizer.name_or_path

    def __deepcopy__(self, memo: dict[int, Any]) -> Guide:
        # The guide never changes, so copies of a loss share it.
        return self

    @torch.no_grad()
    def embed(self, columns: list[dict[str, Any]], batch_size: int | None = None) -> list[Tensor]:
        """Compute the guide embeddings of each column, (n, g), with g the guide's embedding size.

        Args:
            columns: the features of each column, tokenised for the model in training.
            batch_size: the number of texts to encode at once; None encodes all of a column.
        """
        embeddings = []
        for column in columns:
            if self.tokenizer is not None:
                column = self._retokenize(column, self.tokenizer)
            # Modules add entries to the dictionary, and the training model gets the same one.
            features = batch_to_device(dict(column), self.model.device)
            batches = [features]
            if batch_size is not None:
                starts = range(0, count_texts(features), batch_size)
                batches = [_create_minibatch(features, i, i + batch_size) for i in starts]
            outputs = [self.model(batch)["sentence_embedding"] for batch in batches]
            embeddings.append(torch.cat(outputs))
        return embeddings

    def _retokenize(
        self, column: dict[str, Any], tokenizer: PreTrainedTokenizerBase
    ) -> dict[str, Any]:
        """Decode the model's tokens, and tokenise the texts for the guide."""
        tokens = column["input_ids"]
        text_bounds = column.get("cu_seq_lens_q")
        if text_bounds is not None:  # the tokens of all texts are in one row
            text_lengths = text_bounds.diff().tolist()
            tokens = tokens[0].split(text_lengths)
        texts = tokenizer.batch_decode(tokens, skip_special_tokens=True)
        if "task" in column:
            return self.model.preprocess(texts, task=column["task"])
        return self.model.preprocess(texts)


def _get_tokenizer(model: SentenceTransformer) -> PreTrainedTokenizerBase:
    tokenizer = getattr(model, "tokenizer", None)
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise ConfigError(
            "guide: the model and the guide each need a tokenizer of transformers, so that they "
            "read the same texts. Use another guide, or train without guide"
        )
    return tokenizer
