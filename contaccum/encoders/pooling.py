"""The pooling that fits a backbone, and the tokenizer that fits the pooling."""

from __future__ import annotations

from typing import Any

import torch
from sentence_transformers.sentence_transformer.modules import Transformer
from sentence_transformers.util import batch_to_device
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerBase

from contaccum.errors import ConfigError


def fit_pooling(transformer: Transformer, tokenizer: PreTrainedTokenizerBase, pooling: str | None) -> Any:
    """The pooling that a backbone gets, with its tokenizer made to pad and, for a decoder's last token, to append EOS.

    Raises ConfigError where the backbone or its tokenizer cannot do what is asked.
    """
    if tokenizer.pad_token is None:  # any will do: what pads is masked
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    if tokenizer.pad_token is None:
        raise ConfigError("the tokenizer has no token to pad with: set pad_token in its tokenizer_config.json")
    if pooling == "mean" or not _is_causal(transformer):
        return pooling or "cls"
    if pooling == "cls":
        kind = type(transformer.model).__name__
        raise ConfigError(f"pooling=cls with a decoder ({kind}): its first token sees no other. Set lasttoken or mean")
    tokenizer.padding_side = "right"  # on the left it would move positions that are learned, as GPT-2's are
    _append_eos(tokenizer)
    return "lasttoken"


def _is_causal(transformer: Transformer) -> bool:
    """Whether the first token sees none of those after it: its state then has no gradient in their embeddings.

    Measured, as no attribute tells: some decoders are made bidirectional by a setting, some encoders are decoders'
    classes. Exact in any dtype, and costs a forward and a backward of a few tokens.
    """
    features = batch_to_device(transformer.preprocess(["how do birds fly"]), transformer.model.device)
    ids = features["input_ids"][0]
    weight: Any = transformer.model.get_input_embeddings().weight
    trains = weight.requires_grad
    weight.requires_grad_(True)  # under an adapter it is frozen
    (gradient,) = torch.autograd.grad(transformer(features)["token_embeddings"][0, 0, 0], weight)
    weight.requires_grad_(trains)
    return not gradient[ids[ids != ids[0]]].any()


def _append_eos(tokenizer: PreTrainedTokenizerBase) -> None:
    """Have every text end in EOS, unless the tokenizer ends it in a token of its own already.

    By the tokenizer's post-processor: truncation leaves room for what that adds, and it is saved with the tokenizer.
    """
    tokens = tokenizer("a", return_special_tokens_mask=True)
    special = [i for i, added in zip(tokens["input_ids"], tokens["special_tokens_mask"], strict=True) if added]
    if tokens["special_tokens_mask"][-1]:
        return
    if tokenizer.eos_token is None or not tokenizer.is_fast:
        raise ConfigError("pooling=lasttoken with a tokenizer that is not fast, or has no eos_token: set pooling=mean")
    first, eos = tokenizer.convert_ids_to_tokens(special), tokenizer.eos_token
    added = list(dict.fromkeys([*zip(first, special, strict=True), (eos, tokenizer.eos_token_id)]))
    # In the place of the present one: chained after one that prepends BOS, it would not be applied.
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing([*first, "$A", eos], special_tokens=added)
