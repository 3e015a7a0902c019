"""DualEncoder: a query tower and a passage tower as one SentenceTransformer, tied or untied.

What it saves, `SentenceTransformer(path)` loads. Loading, pooling, prompts and routing are sentence-transformers';
this module puts the pieces together and adds BEIR's names.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Router
from sentence_transformers.util import get_device_name
from torch import nn
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from contaccum.data.records import passage_text
from contaccum.encoders import adapters
from contaccum.encoders.loading import load_transformer, loading
from contaccum.encoders.pooling import fit_pooling
from contaccum.encoders.settings import lower_default_lengths, positions, set_max_lengths
from contaccum.encoders.towers import is_tied, tower
from contaccum.errors import ConfigError, check_choice
from contaccum.files import AnyPath


class DualEncoder(SentenceTransformer):
    """A SentenceTransformer for retrieval: ``encode_query`` / ``encode_document``, and one tower for each.

    `from_backbone` makes one from a bare backbone, `from_pretrained` loads a saved SentenceTransformer.
    Untied towers are the routes "query" and "document" of a Router.

    Example:
        ```python
        model = DualEncoder.from_backbone("bert-base-uncased", tied=False, pooling="cls", normalize=False)
        queries = model.encode_queries(["what keeps the sky up?"])                    # (1, d)
        passages = model.encode_corpus([{"title": "Sky", "text": "Nothing does."}])  # (1, d)
        ```
    """

    # Private, but the only way to load a tower's adapter with the library's own settings.
    _module_classes = adapters.LOADERS

    @classmethod
    def from_backbone(
        cls,
        name: AnyPath | PretrainedConfig,
        tied: bool = True,
        pooling: Literal["cls", "mean", "lasttoken"] | None = None,
        normalize: bool = False,
        query_prompt: str | None = None,
        passage_prompt: str | None = None,
        query_max_length: int | None = None,
        passage_max_length: int | None = None,
        similarity: Literal["dot", "cos"] | None = None,
        dtype: Literal["float32", "bfloat16", "float16"] = "float32",
        tokenizer: AnyPath | PreTrainedTokenizerBase | None = None,
        device: str | None = None,
        trust_remote_code: bool = False,
        model_kwargs: dict[str, Any] | None = None,
    ) -> DualEncoder:
        """Put pooling on a transformers backbone of the hub, of a folder, or fresh from a ``PretrainedConfig``.

        Where its tokenizer has no pad token, EOS pads. For ``"lasttoken"`` on a decoder it ends every text in EOS.

        Args:
            tied: one tower for queries and passages; False gives each its own copy of the weights.
            pooling: ``"cls"`` (DPR, the paper), ``"mean"`` or ``"lasttoken"``. None: ``"lasttoken"`` for a decoder,
                ``"cls"`` for an encoder.
            normalize: end with unit length, so that inner product is cosine.
            query_prompt, passage_prompt: put before each query or passage, in training and in encoding.
            query_max_length, passage_max_length: tokens of a text, special tokens included. None: 32 and 256, or what
                the backbone can take where that is less.
            similarity: ``"dot"`` or ``"cos"``; None: cosine when normalized, else dot product.
            tokenizer: name, folder or object; needed with a config, otherwise that of ``name``.
            trust_remote_code: run code that comes with the model. Off unless you have read it.
            model_kwargs: more of transformers' ``from_pretrained``, for a name or folder.

        Raises:
            UserError: when the backbone cannot be loaded; ConfigError for arguments that are out of range, or that the
                backbone cannot take.
        """
        check_choice("pooling", pooling, (None, "cls", "mean", "lasttoken"))
        check_choice("dtype", dtype, ("float32", "bfloat16", "float16"))
        check_choice("similarity", similarity, (None, "dot", "cos"))
        settings = {"dtype": getattr(torch, dtype), **(model_kwargs or {})}
        transformer = load_transformer(name, tokenizer, settings, trust_remote_code)
        if transformer.tokenizer is None:
            raise ConfigError(f"{name}: this backbone has no tokenizer, so it does not encode text")
        pooling = fit_pooling(transformer, transformer.tokenizer, pooling)
        limit = min(transformer.tokenizer.model_max_length, positions(transformer))
        query_max_length = min(32, limit) if query_max_length is None else query_max_length
        passage_max_length = min(256, limit) if passage_max_length is None else passage_max_length
        # One module serves both kinds in a tied model: lengths go by task, and encode() without one gets the longer.
        transformer.max_seq_length = max(query_max_length, passage_max_length)
        modules: list[nn.Module] = [transformer, Pooling(transformer.get_embedding_dimension(), pooling_mode=pooling)]
        if normalize:
            modules.append(Normalize())
        if not tied:
            modules = [Router.for_query_document(modules, copy.deepcopy(modules))]  # type: ignore[arg-type]  # list invariance
        model = cls(
            modules=modules,
            prompts={"query": query_prompt or "", "document": passage_prompt or ""},
            similarity_fn_name="cosine" if similarity == "cos" or (similarity is None and normalize) else "dot",
            device=device,
            trust_remote_code=trust_remote_code,
        )
        set_max_lengths(model, query_max_length, passage_max_length)
        return model

    @classmethod
    def from_pretrained(cls, path: AnyPath, **kwargs: Any) -> DualEncoder:
        """Load a saved model, with SentenceTransformer's keyword arguments; UserError as `loading` says.

        Lengths beyond the positions that a backbone has for the tokens of a text are lowered.
        An adapter is ready to train on. Towers whose adapters have one base share its weights.
        """
        with loading(path, bool(kwargs.get("trust_remote_code"))) as name:
            # Each tower comes with the base, of which the device gets one.
            late = len(adapters.bases(Path(name))) > 1 and not kwargs.get("model_kwargs")
            model = cls(name, **{**kwargs, **({"device": "cpu"} if late else {})})
            adapters.take_up_adapter(model)
            lower_default_lengths(model)
            return model.to(kwargs.get("device") or get_device_name()) if late else model

    def add_adapter(self, adapter_config: Any, adapter_name: str | None = None) -> None:
        """As in SentenceTransformer, of peft's configs; with two towers each gets one, over one base."""
        adapters.put_adapter(self, adapter_config, adapter_name)

    def save_pretrained(self, path: str, *args: Any, **kwargs: Any) -> None:
        """As in SentenceTransformer. Of a model with an adapter the adapter is saved, and where its base came from."""
        with adapters.saving(self, path):
            super().save_pretrained(path, *args, **kwargs)

    @property
    def tied(self) -> bool:
        """Whether queries and passages share every weight."""
        return is_tied(self)

    @property
    def query_encoder(self) -> nn.Module:
        """The tower of queries: features -> features with ``sentence_embedding`` (n, d). The model itself when tied."""
        return tower(self, "query")

    @property
    def passage_encoder(self) -> nn.Module:
        """The tower of passages; see `query_encoder`."""
        return tower(self, "document")

    def encode_queries(self, queries: Sequence[str], batch_size: int = 32, **kwargs: Any) -> Any:
        """Embed queries, as BEIR calls it: (len(queries), d). Keyword arguments are those of ``encode_query``."""
        return self.encode_query(list(queries), batch_size=batch_size, **kwargs)

    def encode_corpus(self, corpus: Sequence[dict[str, str]], batch_size: int = 32, **kwargs: Any) -> Any:
        """Embed passages, as BEIR calls it: (len(corpus), d). A passage is its "title" if any, a space, its "text"."""
        texts = [passage_text(doc.get("title") or "", doc.get("text") or "") for doc in corpus]
        return self.encode_document(texts, batch_size=batch_size, **kwargs)
