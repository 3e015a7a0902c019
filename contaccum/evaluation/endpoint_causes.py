"""Possible causes of a difference between the embeddings of a server and those of its model.

Each possible cause is a `Hypothesis`. It makes a variant of the model, which is a copy with one
typical fault of a server, such as a missing prompt or another pooling. `endpoint_check` encodes a
sample of texts with each variant. If a variant's embeddings are close to the server's, the server
probably has that fault.

Wrong norms of embeddings are no hypothesis, because they do not change a cosine. `endpoint_check`
compares the norms itself.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from torch import Tensor, nn

from contaccum.encoders.settings import get_max_length, get_max_positions, get_prompt
from contaccum.encoders.towers import Kind, get_tower

KINDS: tuple[Kind, ...] = ("query", "document")
_LENGTHS = (32, 64, 128, 256, 384, 512, 1024, 2048, 4096, 8192)
"""Usual numbers of tokens at which servers truncate."""
# {pooling of sentence-transformers: description}, for the poolings that servers have.
_POOLINGS = {"cls": "first token (cls)", "mean": "mean", "lasttoken": "last token"}
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_PROMPT_ADVICE = (
    "send the prompt exactly once: the client that calls the server puts it before each text, and "
    "the server must neither remove it nor add one (TEI: --default-prompt, --default-prompt-name)"
)
_EOS_ADVICE = (
    "serve the tokenizer of the model folder, whose post-processor appends the last special token "
    "(llama.cpp: tokenizer.ggml.add_eos_token in the GGUF file)"
)
_POOLING_ADVICE = (
    "let the server read the pooling of the model folder, or set it (TEI and llama.cpp: --pooling)"
)
_DTYPE_ADVICE = (
    "serve the weights in the type of the model folder (TEI, vLLM and Infinity: --dtype), or keep "
    "this type if the scores above are as good"
)


class Hypothesis(NamedTuple):
    """A possible cause of a difference.

    Attributes:
        name: short description of the server's fault, such as "prompt missing".
        advice: one sentence on how to mend the fault.
        make_model: function that returns a copy of the model with the same fault.
    """

    name: str
    advice: str
    make_model: Callable[[], SentenceTransformer]


def list_hypotheses(
    model: SentenceTransformer, texts: Mapping[Kind, Sequence[str]]
) -> Iterator[Hypothesis]:
    """Yield the hypotheses that can change the embeddings of these texts.

    Args:
        model: the model that should be served.
        texts: {kind: texts without prompts}, for queries, documents or both.
    """
    yield from _list_prompts(model)
    yield from _list_lengths(model, texts)
    if _get_modules(model, Transformer):
        yield Hypothesis("EOS (last special token) missing", _EOS_ADVICE, partial(_drop_eos, model))
    yield from _list_poolings(model)
    yield from _list_dtypes(model)


def _list_prompts(model: SentenceTransformer) -> Iterator[Hypothesis]:
    """Yield the hypotheses on prompts, if the model has prompts."""
    prompts: dict[Kind, str] = {kind: get_prompt(model, kind) for kind in KINDS}
    if not any(prompts.values()):
        return
    no_prompts: dict[Kind, str] = {"query": "", "document": ""}
    doubled_prompts: dict[Kind, str] = {kind: prompt + prompt for kind, prompt in prompts.items()}
    extra_prompts: dict[Kind, str] = {
        "query": prompts["document"] + prompts["query"],
        "document": prompts["query"] + prompts["document"],
    }
    for name, changed_prompts in (
        ("prompt missing", no_prompts),
        ("prompt doubled", doubled_prompts),
        ("prompt of the other kind added", extra_prompts),
    ):
        yield Hypothesis(name, _PROMPT_ADVICE, partial(_set_prompts, model, changed_prompts))
    if any(not pooling.include_prompt for pooling in _get_modules(model, Pooling)):
        advice = "use a server that can leave the prompt out of the pooling, or train without it"
        yield Hypothesis("prompt pooled", advice, partial(_pool_prompts, model))


def _list_lengths(
    model: SentenceTransformer, texts: Mapping[Kind, Sequence[str]]
) -> Iterator[Hypothesis]:
    """Yield the hypotheses on truncation that can change at least one of the texts.

    They are truncation at another length than the model's, no truncation, and truncation of the
    start of a text instead of its end.
    """
    transformers = _get_modules(model, Transformer)
    if not transformers or any(module.tokenizer is None for module in transformers):
        return
    num_tokens = max(_count_tokens(model, kind, texts[kind]) for kind in texts)
    max_positions = min(map(get_max_positions, transformers))
    own_lengths = {}
    for kind in KINDS:
        own_lengths[kind] = min(get_max_length(model, kind) or max_positions, max_positions)
    shown_lengths = f"{own_lengths['query']} (queries) and {own_lengths['document']} (documents)"
    advice = (
        f"truncate at the model's lengths, {shown_lengths} tokens, on the server (vLLM: "
        "--max-model-len; llama.cpp: --ctx-size), or in the client before a text is sent"
    )
    # The most tokens that the backbone can encode of the longest text.
    limit = min(num_tokens, max_positions)
    lengths = {length for length in (*_LENGTHS, *own_lengths.values()) if length < limit}
    for length in sorted(lengths):
        # If the model truncates texts of all kinds at this length, it is no fault.
        if any(own_lengths[kind] != length for kind in texts):
            make_model = partial(_set_lengths, model, length)
            yield Hypothesis(f"cut at {length} tokens", advice, make_model)
    shortest = min(own_lengths[kind] for kind in texts)
    if shortest < limit:
        name = "not cut"
        if num_tokens > max_positions:
            # The backbone has no positions for more tokens, so every server truncates here.
            name = f"cut at {max_positions} tokens"
        yield Hypothesis(name, advice, partial(_set_lengths, model, limit))
    if shortest < num_tokens:
        cut_start_advice = (
            "truncate the end of a text, not its start (older versions of vLLM keep the last "
            "truncate_prompt_tokens tokens)"
        )
        yield Hypothesis("start of the text cut", cut_start_advice, partial(_cut_start, model))


def _count_tokens(model: SentenceTransformer, kind: Kind, texts: Sequence[str]) -> int:
    """Return the number of tokens of the longest text with its prompt and special tokens."""
    transformer: Any = next(get_tower(model, kind).children())
    prompt = get_prompt(model, kind)
    prompted_texts = [prompt + text for text in texts]
    # Without verbose=False, the tokenizer warns about texts that exceed the model's length.
    encoding = transformer.tokenizer(prompted_texts, truncation=False, verbose=False)
    return max(map(len, encoding["input_ids"]))


def _list_poolings(model: SentenceTransformer) -> Iterator[Hypothesis]:
    """Yield a hypothesis for each pooling of servers that the model does not have."""
    poolings = _get_modules(model, Pooling)
    own_modes = {pooling.pooling_mode for pooling in poolings}
    # Towers with different poolings are not diagnosed. If the model concatenates the outputs of
    # several poolings, a server with only one gives another dimension, which is refused earlier.
    if len(own_modes) != 1 or not own_modes <= _POOLINGS.keys():
        return
    for mode, description in _POOLINGS.items():
        if mode not in own_modes:
            make_model = partial(_set_pooling, model, mode)
            yield Hypothesis(f"pooling: {description}", _POOLING_ADVICE, make_model)


def _list_dtypes(model: SentenceTransformer) -> Iterator[Hypothesis]:
    """Yield a hypothesis for each dtype of weights that the model does not have."""
    own_dtypes = {parameter.dtype for parameter in model.parameters()}
    # Quantised weights, which are integers, cannot be converted.
    if not all(dtype.is_floating_point for dtype in own_dtypes):
        return
    for name, dtype in _DTYPES.items():
        if own_dtypes != {dtype}:
            yield Hypothesis(name, _DTYPE_ADVICE, partial(_set_dtype, model, dtype))


def _copy(model: SentenceTransformer) -> SentenceTransformer:
    """Return a copy of a model that shares its weights, but not its settings and tokenizer."""
    # deepcopy does not copy objects whose ids are keys of the memo: it uses the memo's values.
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        memo[id(tensor)] = tensor
    return copy.deepcopy(model, memo)


def _set_prompts(model: SentenceTransformer, prompts: Mapping[Kind, str]) -> SentenceTransformer:
    """Return a copy of the model with other prompts."""
    variant = _copy(model)
    variant.prompts = dict(model.prompts)
    for kind, prompt in prompts.items():
        variant.prompts[kind] = prompt
    return variant


def _pool_prompts(model: SentenceTransformer) -> SentenceTransformer:
    """Return a copy of the model that pools the tokens of the prompt as well."""
    variant = _copy(model)
    variant.set_pooling_include_prompt(True)
    return variant


def _set_lengths(model: SentenceTransformer, length: int) -> SentenceTransformer:
    """Return a copy of the model that truncates queries and documents at this many tokens."""
    variant = _copy(model)
    for transformer in _get_modules(variant, Transformer):
        transformer.max_seq_length = length
        transformer.query_length = length
        transformer.document_length = length
    return variant


def _cut_start(model: SentenceTransformer) -> SentenceTransformer:
    """Return a copy of the model that truncates the start of a text instead of its end."""
    variant = _copy(model)
    for transformer in _get_modules(variant, Transformer):
        transformer.tokenizer.truncation_side = "left"
    return variant


def _set_pooling(model: SentenceTransformer, mode: str) -> SentenceTransformer:
    """Return a copy of the model with another pooling."""
    variant = _copy(model)
    for pooling in _get_modules(variant, Pooling):
        pooling.pooling_mode = mode
    return variant


def _set_dtype(model: SentenceTransformer, dtype: torch.dtype) -> SentenceTransformer:
    """Return a copy of the model whose weights have another dtype."""
    # `to` changes the model's weights in place, so they must not be shared as in `_copy`.
    return copy.deepcopy(model).to(dtype)


def _drop_eos(model: SentenceTransformer) -> SentenceTransformer:
    """Return a copy of the model that ignores the special token at the end of each text."""
    variant = _copy(model)
    for transformer in _get_modules(variant, Transformer):
        special_ids = torch.tensor(transformer.tokenizer.all_special_ids)
        # The hook changes the attention mask, which does not exist if texts are concatenated
        # without padding.
        transformer.unpad_inputs = False
        transformer.register_forward_pre_hook(partial(_mask_last_special_token, special_ids))
        max_positions = get_max_positions(transformer)
        # A truncated text fills its last position with a special token. A server without this
        # token has room for one more token of the text instead.
        for name in ("max_seq_length", "query_length", "document_length"):
            length = getattr(transformer, name)
            if length is not None and length < max_positions:
                setattr(transformer, name, length + 1)
    return variant


def _mask_last_special_token(
    special_ids: Tensor, module: nn.Module, inputs: tuple[dict[str, Any]]
) -> None:
    """Set the attention mask of each text's last token to 0 if the token is a special token.

    A text with a single token keeps the token, because attention needs at least one.

    Args:
        special_ids: ids of the tokenizer's special tokens, (s,).
        module: the module before whose forward pass this hook runs.
        inputs: a tuple of one dict: "input_ids" and "attention_mask", (n, length) for n texts.
    """
    features = inputs[0]
    mask = features["attention_mask"]
    positions = torch.arange(mask.shape[1], device=mask.device)
    # The last token is where the mask is 1 and the position is highest, on either padding side.
    last_positions = (mask * positions).argmax(dim=1, keepdim=True)
    last_ids = features["input_ids"].gather(1, last_positions)
    is_special = torch.isin(last_ids, special_ids.to(last_ids.device))
    is_masked = is_special & (mask.sum(dim=1, keepdim=True) > 1)
    features["attention_mask"] = mask.scatter(1, last_positions, (~is_masked).to(mask.dtype))


def _get_modules(model: SentenceTransformer, module_type: type[nn.Module]) -> list[Any]:
    """Return all modules of a type, in both towers."""
    return [module for module in model.modules() if isinstance(module, module_type)]
