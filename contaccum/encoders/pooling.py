"""Choice of the pooling for a backbone, and the changes to its tokenizer that pooling needs.

Pooling makes one embedding of the states of a text's tokens: the first ("cls"), the last
("lasttoken") or their mean ("mean"). In a decoder a token attends only to itself and to the tokens
before it, so the first token has no information about the text, and the last one is pooled. The
tokenizer must then append EOS (the end-of-sequence token), so that every text ends in the same
token.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from sentence_transformers.sentence_transformer.modules import Transformer
from sentence_transformers.util import batch_to_device
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerBase

from contaccum.errors import ConfigError

PoolingMode = Literal["cls", "mean", "lasttoken"]


def fit_pooling(
    transformer: Transformer, tokenizer: PreTrainedTokenizerBase, pooling: PoolingMode | None
) -> PoolingMode:
    """Return the pooling of a backbone, and change its tokenizer accordingly.

    The tokenizer gets a pad token if it has none. If the last token of a decoder is pooled, the
    tokenizer pads on the right and appends EOS.

    Args:
        pooling: the pooling that the user chose. None: ``"lasttoken"`` for a decoder, ``"cls"``
            for an encoder.

    Raises:
        ConfigError: if the pooling does not work with the backbone or its tokenizer.
    """
    if tokenizer.pad_token is None:
        # The choice of the token does not matter, because padding is masked.
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    if pooling == "mean":
        return pooling
    if not _is_causal(transformer):
        return pooling or "cls"
    if pooling == "cls":
        class_name = type(transformer.model).__name__
        raise ConfigError(
            f"pooling=cls does not work with a decoder ({class_name}), whose first token attends "
            "only to itself: set pooling=lasttoken or mean"
        )
    # Padding on the left would shift the positions of the text's tokens, which changes the
    # embeddings of models with learned positions, such as GPT-2.
    tokenizer.padding_side = "right"
    _append_eos(tokenizer)
    return "lasttoken"


def _is_causal(transformer: Transformer) -> bool:
    """Return whether the first token of a text attends only to itself.

    In such a model, a decoder, the first token's state has no gradient with respect to the
    embeddings of later tokens. The gradient is computed, because no attribute gives the answer: a
    setting makes some decoders bidirectional, and some encoders are instances of a decoder's class.
    The result is exact in any dtype, and costs a forward and a backward pass over a few tokens.
    """
    features = batch_to_device(
        transformer.preprocess(["how do birds fly"]), transformer.model.device
    )
    token_ids = features["input_ids"][0]
    weight: Any = transformer.model.get_input_embeddings().weight
    requires_grad = weight.requires_grad
    # The weight is frozen if the backbone has an adapter.
    weight.requires_grad_(True)
    # One number of the first token's state is enough, because it depends on all tokens attended to.
    first_state = transformer(features)["token_embeddings"][0, 0, 0]
    (gradient,) = torch.autograd.grad(first_state, weight)
    weight.requires_grad_(requires_grad)
    # The first token's id may occur again in the text, so its row is left out.
    later_ids = token_ids[token_ids != token_ids[0]]
    return not gradient[later_ids].any()


def _append_eos(tokenizer: PreTrainedTokenizerBase) -> None:
    """Change a tokenizer so that it appends EOS to every text.

    A tokenizer that already appends a special token is not changed. EOS is added by the tokenizer's
    post-processor, because truncation then leaves room for it, and the post-processor is saved
    with the tokenizer.
    """
    encoding = tokenizer("a", return_special_tokens_mask=True)
    special_tokens_mask = encoding["special_tokens_mask"]
    if special_tokens_mask[-1]:
        return
    eos = tokenizer.eos_token
    if eos is None or not tokenizer.is_fast:
        raise ConfigError(
            "pooling=lasttoken needs a fast tokenizer with an eos_token, and this tokenizer is not "
            "fast or has none: set pooling=mean"
        )
    prefix_ids = []
    for token_id, is_special in zip(encoding["input_ids"], special_tokens_mask, strict=True):
        if is_special:
            prefix_ids.append(token_id)
    prefix = tokenizer.convert_ids_to_tokens(prefix_ids)
    special_tokens = dict(zip(prefix, prefix_ids, strict=True))
    special_tokens[eos] = tokenizer.eos_token_id
    # In the template, "$A" stands for the tokens of the text. The template replaces the present
    # post-processor. It would have no effect in a chain after a post-processor that prepends BOS.
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        [*prefix, "$A", eos], special_tokens=list(special_tokens.items())
    )
