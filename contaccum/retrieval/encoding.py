"""Texts to embeddings: a whole corpus, or a set of queries, as one float32 matrix.

The embeddings are those of `SentenceTransformer.encode_query` and `encode_document` (same prompts, task, route,
truncation); only the batching differs. Texts are tokenised in big windows, sorted by their length in tokens, and
packed to a budget of tokens, so that little time goes into padding; a CPU works on one batch per core, since
cores that share a batch wait for each other at every operation. Nothing is normalised here (that is the
index's business), nothing is written to disk, and one process uses one device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from contaccum.data.beir_folder import passage_text
from contaccum.errors import ConfigError, UserError

if TYPE_CHECKING:
    import torch
    from sentence_transformers import SentenceTransformer

Kind = Literal["query", "document"]

TITLE_SEPARATOR = " "
AUTOCAST_DTYPES = ("bfloat16", "float16")

# Padded positions tokenised at a time: some 100 MB of int64 features, and enough texts to sort by length.
_WINDOW_TOKENS = 2**22
_WINDOW_TEXTS = 8192
# On a CPU a batch gains nothing past this and loses its cache: MiniLM on one core takes 5.8 s for 80 SciFact
# abstracts at 1024 or 2048 tokens a batch, 6.0 s at 4096 and 6.8 s at 8192.
_CPU_BATCH_TOKENS = 1024
# What a plain text Transformer puts beside its scalars. Anything else (pixels, expansion positions, flattened
# batches) means more than rows of tokens, and goes to sentence-transformers' own loop.
_TOKEN_FEATURES = {"input_ids", "attention_mask", "token_type_ids"}
_PROMPT_NAMES: dict[str, tuple[str, ...]] = {"query": ("query",), "document": ("document", "passage", "corpus")}


def document_text(document: Mapping[str, str] | str) -> str:
    """The text of a BEIR document: `(title + " " + text).strip()`, or the string itself.

    Raises `KeyError` when the document has no `text`.
    """
    if isinstance(document, str):
        return document
    return passage_text(document.get("title") or "", document["text"], TITLE_SEPARATOR)


def encode_texts(
    model: SentenceTransformer,
    texts: Sequence[str],
    kind: Kind = "document",
    batch_size: int = 32,
    autocast_dtype: str | None = None,
    device: str | torch.device | None = None,
    show_progress: bool = True,
    on_encoded: Callable[[int], object] | None = None,
) -> np.ndarray:
    """Embed texts as queries or as documents; returns float32 of shape (len(texts), d), rows in the given order.

    Equal to `model.encode_query(texts)` or `model.encode_document(texts)` to rounding. A batch holds as many texts
    as fit in `batch_size` times the longest text's tokens (fewer on a CPU, which is faster there), so memory peaks
    where theirs does. Equal texts are encoded once, and so have equal embeddings to the last bit.
    `autocast_dtype` is None, "bfloat16" or "float16". `on_encoded` is told how many texts were just encoded, again and
    again until they are all.

    Raises `ConfigError` for a setting out of range, `UserError` when the model produces NaN or infinity.
    """

    if kind not in _PROMPT_NAMES:
        raise ConfigError(f"kind must be 'query' or 'document', not {kind!r}")
    if batch_size < 1:
        raise ConfigError(f"batch_size must be at least 1, not {batch_size}")
    check_autocast_dtype(autocast_dtype)
    if isinstance(texts, str):
        raise ConfigError("texts must be a list of strings, not one string")
    if device is not None:
        model.to(device)
    if not len(texts):
        return np.empty((0, model.get_embedding_dimension() or 0), dtype=np.float32)

    unique = list(dict.fromkeys(texts))
    was_training = model.training
    try:
        embeddings = None
        if _has_own_loop(model):
            embeddings = _encode_by_tokens(model, unique, kind, batch_size, autocast_dtype, show_progress, on_encoded)
        if embeddings is None:
            encode = model.encode_query if kind == "query" else model.encode_document
            with _autocast(model.device.type, autocast_dtype):
                embeddings = as_float32(encode(unique, batch_size=batch_size, show_progress_bar=show_progress))
            if on_encoded is not None:
                on_encoded(len(unique))
    finally:
        # encode() leaves a model in eval mode; a training loop that asks for embeddings should keep its dropout.
        model.train(was_training)

    if not np.isfinite(embeddings).all():
        bad = int(np.flatnonzero(~np.isfinite(embeddings).all(axis=1))[0])
        mend = " (try it without autocast)" if autocast_dtype else ""
        raise UserError(f"the model gives NaN or infinity for the {kind} {unique[bad][:60]!r}{mend}")
    if len(unique) == len(texts):
        return embeddings
    if on_encoded is not None:
        on_encoded(len(texts) - len(unique))
    position = {text: row for row, text in enumerate(unique)}
    return embeddings[[position[text] for text in texts]]


def encode_queries(
    model: Any,
    queries: Sequence[str],
    batch_size: int = 32,
    autocast_dtype: str | None = None,
    show_progress: bool = True,
) -> np.ndarray:
    """Queries to float32 (n, d), with a SentenceTransformer or with any model that BEIR accepts (`encode_queries`)."""
    if _is_sentence_transformer(model):
        return encode_texts(model, queries, "query", batch_size, autocast_dtype, show_progress=show_progress)
    return _encode_as_beir(model.encode_queries, queries, batch_size, autocast_dtype, show_progress)


def encode_corpus(
    model: Any,
    documents: Sequence[Mapping[str, str]],
    batch_size: int = 32,
    autocast_dtype: str | None = None,
    show_progress: bool = True,
) -> np.ndarray:
    """Documents to float32 (n, d), with a SentenceTransformer or with any model that BEIR accepts (`encode_corpus`)."""
    if _is_sentence_transformer(model):
        texts = [document_text(document) for document in documents]
        return encode_texts(model, texts, "document", batch_size, autocast_dtype, show_progress=show_progress)
    return _encode_as_beir(model.encode_corpus, documents, batch_size, autocast_dtype, show_progress)


def check_autocast_dtype(name: str | None) -> torch.dtype | None:
    """The torch dtype of an autocast name, None for None; raises `ConfigError` for any other name."""
    if name is None:
        return None
    if name not in AUTOCAST_DTYPES:
        raise ConfigError(f"autocast_dtype must be None, 'bfloat16' or 'float16', not {name!r}")
    import torch

    return getattr(torch, name)


def _autocast(device_type: str, autocast_dtype: str | None) -> AbstractContextManager[Any]:
    dtype = check_autocast_dtype(autocast_dtype)
    if dtype is None:
        return nullcontext()
    import torch

    return torch.autocast(device_type, dtype=dtype)


def as_float32(embeddings: Any) -> np.ndarray:
    """Embeddings as a C-contiguous float32 array (n, d), from an array, a tensor, or a list of either."""
    import torch

    if isinstance(embeddings, (list, tuple)) and embeddings and isinstance(embeddings[0], torch.Tensor):
        embeddings = torch.stack(list(embeddings))
    if isinstance(embeddings, torch.Tensor):
        embeddings = embeddings.detach().float().cpu().numpy()
    return np.ascontiguousarray(embeddings, dtype=np.float32)


def _is_sentence_transformer(model: Any) -> bool:
    from sentence_transformers import SentenceTransformer

    return isinstance(model, SentenceTransformer)


def _encode_as_beir(
    encode: Any, items: Sequence[Any], batch_size: int, autocast_dtype: str | None, show_progress: bool
) -> np.ndarray:
    import torch

    with _autocast("cuda" if torch.cuda.is_available() else "cpu", autocast_dtype):
        return as_float32(encode(items, batch_size=batch_size, show_progress_bar=show_progress, convert_to_tensor=True))


def _has_own_loop(model: SentenceTransformer) -> bool:
    """Whether the loop below gives what `model.encode_*` would: a plain text Transformer, encoded the plain way."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Router, Transformer

    plain_encode = all(
        getattr(type(model), name) is getattr(SentenceTransformer, name)
        for name in ("encode", "encode_query", "encode_document", "_inference")
    )
    # Sharded, device-mapped and HPU models are placed and fed by sentence-transformers itself.
    elsewhere = (
        getattr(model, "_distributed_inference", None) is not None
        or getattr(model, "_placement_is_delegated", False)
        or model.device.type == "hpu"
    )
    first: Any = model[0]
    routes = list(first.sub_modules.values()) if isinstance(first, Router) else [model]
    return plain_encode and not elsewhere and all(isinstance(next(route.children()), Transformer) for route in routes)


def prompt_for(model: SentenceTransformer, kind: Kind) -> str | None:
    """The prompt that `encode_query` or `encode_document` would choose, None for none."""
    for name in _PROMPT_NAMES[kind]:
        if name in model.prompts:
            return model.prompts[name]
    return model.prompts.get(model.default_prompt_name) if model.default_prompt_name is not None else None


def _encode_by_tokens(
    model: SentenceTransformer,
    texts: list[str],
    kind: Kind,
    batch_size: int,
    autocast_dtype: str | None,
    show_progress: bool,
    on_encoded: Callable[[int], object] | None = None,
) -> np.ndarray | None:
    """Embeddings (n, d) of distinct texts; None when the features turn out to be more than rows of tokens."""
    import torch
    from sentence_transformers.util import batch_to_device
    from tqdm.auto import tqdm

    prompt = prompt_for(model, kind)
    model.eval()
    embeddings: np.ndarray | None = None
    on_cpu = model.device.type == "cpu"

    def embed(batch: dict[str, Any]) -> np.ndarray:
        # Both contexts belong to a thread, and batches may run in several.
        with torch.inference_mode(), _autocast(model.device.type, autocast_dtype):
            out = model(batch_to_device(batch, model.device), task=kind)["sentence_embedding"]
            return out[:, : model.truncate_dim].float().cpu().numpy()

    # No more batches at a time than texts that the caller wants in memory.
    plural = "queries" if kind == "query" else "documents"
    threads = min(torch.get_num_threads(), batch_size) if on_cpu and _may_run_in_threads(model) else 1
    with (
        _batch_map(threads) as batch_map,
        tqdm(total=len(texts), unit=f" {plural}", desc=f"Encoding {plural}", disable=not show_progress) as progress,
    ):
        for start, window in _windows(texts, model.max_seq_length):
            features = model.preprocess(window, prompt=prompt, task=kind)
            if not _is_rows_of_tokens(features, len(window)):
                return None
            lengths = features["attention_mask"].sum(dim=1).numpy()
            left_padded = bool((features["attention_mask"][:, -1] == 1).all())
            budget = batch_size * int(lengths.max())
            if on_cpu:
                budget = min(budget, _CPU_BATCH_TOKENS)
            packed = list(_pack(lengths, budget))
            batches = (_rows(features, rows, int(lengths[rows].max()), left_padded) for rows in packed)
            for rows, out in zip(packed, batch_map(embed, batches), strict=True):
                if embeddings is None:
                    embeddings = np.empty((len(texts), out.shape[1]), dtype=np.float32)
                embeddings[start + rows] = out
                progress.update(len(rows))
                if on_encoded is not None:
                    on_encoded(len(rows))
    return embeddings


def _may_run_in_threads(model: SentenceTransformer) -> bool:
    """Whether forward passes of the model may overlap: transformers' own code, and no state that a pass rewrites."""
    from transformers import PreTrainedModel

    backbones = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    # Code that comes with a model, and rotary embeddings that grow with the input, cache in the forward pass.
    return all(
        type(backbone).__module__.startswith("transformers.")
        and not any(
            rope_type in str(getattr(backbone.config, "rope_parameters", "")) for rope_type in ("dynamic", "longrope")
        )
        for backbone in backbones
    ) and bool(backbones)


@contextmanager
def _batch_map(threads: int) -> Iterator[Callable[..., Iterable[np.ndarray]]]:
    """`map`, over one-core threads where there are to be several. Two threads on one batch each, against two that
    share a batch: 1.6 times the speed with MiniLM when other work competes for the cores.
    """
    if threads < 2:
        yield map
        return
    import torch

    before = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            yield pool.map
    finally:
        # The setting of a thread is also the default of threads that start later, such as autograd's.
        torch.set_num_threads(before)


def _windows(texts: list[str], max_length: int | None) -> Iterator[tuple[int, list[str]]]:
    # A tokenizer without a limit reports some 1e30.
    width = min(max_length or 512, 8192)
    size = max(1, min(_WINDOW_TEXTS, _WINDOW_TOKENS // width))
    for start in range(0, len(texts), size):
        yield start, texts[start : start + size]


def _is_rows_of_tokens(features: Mapping[str, Any], n: int) -> bool:
    import torch

    tensors = {name: value for name, value in features.items() if isinstance(value, torch.Tensor)}
    shape = (n, features["input_ids"].shape[-1]) if "input_ids" in tensors else None
    return (
        "attention_mask" in tensors
        and set(tensors) <= _TOKEN_FEATURES
        and all(tuple(value.shape) == shape for value in tensors.values())
    )


def _pack(lengths: np.ndarray, budget: int) -> Iterable[np.ndarray]:
    """Rows (indices) in batches of at most `budget` padded tokens, longest first: a lack of memory shows at once."""
    order = np.argsort(-lengths, kind="stable")
    start = 0
    while start < len(order):
        size = max(1, budget // max(1, int(lengths[order[start]])))
        yield order[start : start + size]
        start += size


def _rows(features: Mapping[str, Any], rows: np.ndarray, width: int, left_padded: bool) -> dict[str, Any]:
    """The given rows of tokenised features, without the columns that are padding for all of them."""
    import torch

    width = max(1, width)
    columns = slice(-width, None) if left_padded else slice(0, width)
    return {
        name: value[rows][:, columns].contiguous() if isinstance(value, torch.Tensor) else value
        for name, value in features.items()
    }
