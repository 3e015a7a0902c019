"""The pooling that fits a backbone, and a tokenizer that fits the pooling.

The first token of a decoder attends to itself alone, so a decoder's last token is pooled. Its
tokenizer then has to end every text in EOS.
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
    """Return the pooling of a backbone, and change its tokenizer to fit.

    The tokenizer gets a pad token if it has none. If the last token of a decoder is pooled, the
    tokenizer pads on the right and appends EOS.

    Args:
        pooling: None: ``"lasttoken"`` for a decoder, ``"cls"`` for an encoder.

    Raises:
        ConfigError: if the backbone or its tokenizer cannot do this.
    """
    if tokenizer.pad_token is None:
        # Any token will do, because padding is masked.
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    if tokenizer.pad_token is None:
        raise ConfigError(
            "the tokenizer has no token to pad with: set pad_token in its tokenizer_config.json"
        )
    if pooling == "mean":
        return pooling
    if not _is_causal(transformer):
        return pooling or "cls"
    if pooling == "cls":
        class_name = type(transformer.model).__name__
        raise ConfigError(
            f"pooling=cls with a decoder ({class_name}): its first token sees no other. "
            "Set lasttoken or mean"
        )
    # Padding on the left would shift learned positions, such as GPT-2's.
    tokenizer.padding_side = "right"
    _append_eos(tokenizer)
    return "lasttoken"


def _is_causal(transformer: Transformer) -> bool:
    """Return whether the first token of a text attends to no token after it.

    In a causal model the first token's state has no gradient with respect to the embeddings of
    later tokens. The gradient is computed, because no attribute gives the answer: a setting makes
    some decoders bidirectional, and some encoders are instances of a decoder's class. The result is
    exact in any dtype, and costs a forward and a backward pass over a few tokens.
    """
    features = batch_to_device(
        transformer.preprocess(["how do birds fly"]), transformer.model.device
    )
    token_ids = features["input_ids"][0]
    weight: Any = transformer.model.get_input_embeddings().weight
    requires_grad = weight.requires_grad
    weight.requires_grad_(True)  # it is frozen under an adapter
    first_state = transformer(features)["token_embeddings"][0, 0, 0]
    (gradient,) = torch.autograd.grad(first_state, weight)
    weight.requires_grad_(requires_grad)
    # The first token's id may occur again in the text, so its row is left out.
    later_ids = token_ids[token_ids != token_ids[0]]
    return not gradient[later_ids].any()


def _append_eos(tokenizer: PreTrainedTokenizerBase) -> None:
    """Change a tokenizer to end every text in EOS, unless it ends texts in a special token already.

    The tokenizer's post-processor does this: truncation leaves room for the tokens that it adds,
    and it is saved with the tokenizer.
    """
    encoding = tokenizer("a", return_special_tokens_mask=True)
    special_tokens_mask = encoding["special_tokens_mask"]
    if special_tokens_mask[-1]:
        return
    eos = tokenizer.eos_token
    if eos is None or not tokenizer.is_fast:
        raise ConfigError(
            "pooling=lasttoken with a tokenizer that is not fast, or has no eos_token: "
            "set pooling=mean"
        )
    prefix_ids = []
    for token_id, is_special in zip(encoding["input_ids"], special_tokens_mask, strict=True):
        if is_special:
            prefix_ids.append(token_id)
    prefix = tokenizer.convert_ids_to_tokens(prefix_ids)
    special_tokens = dict(zip(prefix, prefix_ids, strict=True))
    special_tokens[eos] = tokenizer.eos_token_id
    # This replaces the present post-processor. Chained after one that prepends BOS, the template
    # would not be applied.
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        [*prefix, "$A", eos], special_tokens=list(special_tokens.items())
    )
