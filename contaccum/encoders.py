"""DualEncoder: a query tower and a passage tower as one SentenceTransformer, tied or untied.

What it saves, `SentenceTransformer(path)` loads. Loading, pooling, prompts and routing are sentence-transformers';
this module only puts the pieces together and adds the names that retrieval code expects.
"""

from __future__ import annotations

import copy
import os
import socket
import tempfile
from collections.abc import Sequence
from typing import Any, Literal
from urllib.parse import urlparse

import torch
from huggingface_hub import is_offline_mode, try_to_load_from_cache
from huggingface_hub.constants import ENDPOINT
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Router, Transformer
from torch import nn
from transformers import AutoModel, AutoTokenizer, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from typing_extensions import Self

from contaccum.errors import ConfigError, UserError
from contaccum.untrusted import check_model_folder, refusing_code

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class DualEncoder(SentenceTransformer):
    """A SentenceTransformer for retrieval: ``encode_query`` / ``encode_document``, and one tower for each.

    Make one from a bare backbone with :meth:`from_backbone`, or load a saved model (any SentenceTransformer) with
    ``DualEncoder(path)`` or :meth:`from_pretrained`. Untied towers are the routes "query" and "document" of a Router.

    Example::

        model = DualEncoder.from_backbone("bert-base-uncased", tied=False, pooling="cls", normalize=False)
        queries = model.encode_queries(["what keeps the sky up?"])                    # (1, d)
        passages = model.encode_corpus([{"title": "Sky", "text": "Nothing does."}])  # (1, d)
    """

    @classmethod
    def from_backbone(
        cls,
        name: str | os.PathLike[str] | PretrainedConfig,
        tied: bool = True,
        pooling: Literal["cls", "mean", "lasttoken"] = "cls",
        normalize: bool = False,
        query_prompt: str | None = None,
        passage_prompt: str | None = None,
        query_max_length: int | None = None,
        passage_max_length: int | None = None,
        similarity: Literal["dot", "cos"] | None = None,
        dtype: Literal["float32", "bfloat16", "float16"] = "float32",
        tokenizer: str | os.PathLike[str] | PreTrainedTokenizerBase | None = None,
        device: str | None = None,
        trust_remote_code: bool = False,
    ) -> Self:
        """Put pooling on a transformers encoder.

        Args:
            name: a hub name, a local folder, or a ``PretrainedConfig`` for an encoder with fresh weights.
            tied: one tower for queries and passages; False gives each its own copy of the weights.
            pooling: ``"cls"`` (DPR, the paper), ``"mean"`` or ``"lasttoken"`` (decoder backbones).
            normalize: end with unit length, so that inner product is cosine.
            query_prompt, passage_prompt: put before each query or passage, in training and in encoding.
            query_max_length, passage_max_length: tokens kept, special tokens included. None: 32 and 256, or what
                the backbone can take where that is less.
            similarity: ``"dot"`` or ``"cos"``; None: cosine when normalized, else dot product.
            dtype: of the weights.
            tokenizer: name, folder or object; needed with a config, otherwise that of ``name``.
            trust_remote_code: run code that comes with the model. Off unless you have read it.

        Raises:
            ConfigError: for arguments out of range or a config without a tokenizer.
            UserError: when the backbone cannot be loaded.
        """
        if pooling not in ("cls", "mean", "lasttoken"):
            raise ConfigError(f"pooling must be cls, mean or lasttoken, got {pooling!r}")
        if dtype not in DTYPES:
            raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
        if similarity not in (None, "dot", "cos"):
            raise ConfigError(f"similarity must be dot or cos, got {similarity!r}")
        transformer = _load_transformer(name, tokenizer, DTYPES[dtype], trust_remote_code)
        if transformer.tokenizer is None:
            raise ConfigError(f"{name}: this backbone has no tokenizer, so it does not encode text")
        limit = transformer.tokenizer.model_max_length
        limit = min(limit, getattr(transformer.config, "max_position_embeddings", None) or limit)
        query_max_length = min(32, limit) if query_max_length is None else query_max_length
        passage_max_length = min(256, limit) if passage_max_length is None else passage_max_length
        for key, length in (("query_max_length", query_max_length), ("passage_max_length", passage_max_length)):
            if not isinstance(length, int) or not 3 <= length <= limit:
                raise ConfigError(f"{key}={length!r}: this backbone takes 3 (two are special tokens) to {limit} tokens")
        # One module serves both kinds in a tied model: lengths go by task, and encode() without one gets the longer.
        transformer.max_seq_length = max(query_max_length, passage_max_length)
        transformer.query_length, transformer.document_length = query_max_length, passage_max_length
        tower: list[nn.Module] = [
            transformer,
            Pooling(transformer.get_embedding_dimension(), pooling_mode=pooling),
        ]
        if normalize:
            tower.append(Normalize())
        modules: list[nn.Module] = tower
        if not tied:
            modules = [Router.for_query_document(tower, copy.deepcopy(tower))]  # type: ignore[arg-type]  # list invariance
        prompts = {"query": query_prompt or "", "document": passage_prompt or ""}
        similarity = similarity or ("cos" if normalize else "dot")
        return cls(
            modules=modules,
            prompts=prompts,
            similarity_fn_name="cosine" if similarity == "cos" else "dot",
            device=device,
            trust_remote_code=trust_remote_code,
        )

    @classmethod
    def from_pretrained(cls, path: str | os.PathLike[str], **kwargs: Any) -> Self:
        """Load a saved model; keyword arguments are those of SentenceTransformer.

        Raises:
            UserError: when there is no such folder or model, or it cannot be read.
        """
        path = os.path.expanduser(os.fspath(path))
        require_model(path)
        check_model_folder(path, bool(kwargs.get("trust_remote_code")))
        try:
            with refusing_code(path):
                return cls(path, **kwargs)
        except (OSError, ValueError, KeyError) as error:
            raise UserError(f"{path}: not a model that can be loaded ({_first_line(error)})") from error

    @property
    def tied(self) -> bool:
        """Whether queries and passages share every weight."""
        return self.query_encoder is self.passage_encoder

    @property
    def query_encoder(self) -> nn.Module:
        """The tower of queries: features -> features with ``sentence_embedding`` (n, d). The model itself when tied."""
        return self._tower("query")

    @property
    def passage_encoder(self) -> nn.Module:
        """The tower of passages; see :attr:`query_encoder`."""
        return self._tower("document")

    def _tower(self, task: str) -> nn.Module:
        return tower(self, task)

    def encode_queries(self, queries: Sequence[str], batch_size: int = 32, **kwargs: Any) -> Any:
        """Embed queries, as BEIR calls it: (len(queries), d). Keyword arguments are those of ``encode_query``."""
        return self.encode_query(list(queries), batch_size=batch_size, **kwargs)

    def encode_corpus(
        self, corpus: Sequence[dict[str, str]] | dict[str, list[str]], batch_size: int = 32, **kwargs: Any
    ) -> Any:
        """Embed passages, as BEIR calls it: (len(corpus), d).

        Args:
            corpus: dicts with "text" and optionally "title", or one dict of two lists. A passage is its title, a
                space, and its text.
        """
        if isinstance(corpus, dict):
            titles = corpus.get("title") or [""] * len(corpus["text"])
            corpus = [{"title": t, "text": x} for t, x in zip(titles, corpus["text"], strict=True)]
        texts = [f"{doc.get('title') or ''} {doc.get('text') or ''}".strip() for doc in corpus]
        return self.encode_document(texts, batch_size=batch_size, **kwargs)


def tower(model: SentenceTransformer, task: Literal["query", "document"] | str) -> nn.Module:
    """The part of a SentenceTransformer that encodes ``task``: the route of a leading Router, else the whole model."""
    first = model[0]
    if not isinstance(first, Router):
        return model
    route = first.sub_modules[str(first._resolve_route(task=task, modality="text"))]
    rest = list(model.children())[1:]
    return nn.Sequential(*route.children(), *rest) if rest else route


def is_tied(model: SentenceTransformer) -> bool:
    """Whether the two towers share their weights."""
    queries = {id(p) for p in tower(model, "query").parameters()}
    return queries == {id(p) for p in tower(model, "document").parameters()}


def set_max_lengths(model: SentenceTransformer, query: int | None = None, document: int | None = None) -> None:
    """Truncate queries and documents at these numbers of tokens; None leaves the model's own limit.

    Raises `ConfigError` for a length below 3 (two tokens are special) or beyond the model's positions, or when the
    model has no tokens to count.
    """
    for kind, length in (("query", query), ("document", document)):
        if length is None:
            continue
        option = "query_max_length" if kind == "query" else "passage_max_length"
        if length < 3:
            raise ConfigError(f"{option} must be at least 3 (two tokens are special), not {length}")
        module = next(tower(model, kind).children())
        if not hasattr(module, f"{kind}_length"):
            raise ConfigError(f"{option} needs a transformer that tokenises text; this model starts otherwise")
        limit = getattr(getattr(module, "config", None), "max_position_embeddings", None)
        if limit is not None and length > limit:
            raise ConfigError(f"{option}={length} is more than the {limit} positions of the model; lower it")
        setattr(module, f"{kind}_length", length)


def set_dropout(model: nn.Module, probability: float) -> None:
    """Set the probability of every dropout in ``model``, modules and the attributes that attention reads.

    Raises:
        ConfigError: for a probability outside [0, 1).
    """
    if not 0 <= probability < 1:
        raise ConfigError(f"dropout must be at least 0 and less than 1, got {probability!r}")
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = probability
        for name in ("attention_dropout", "dropout_prob", "dropout_p"):
            # Some architectures keep attention's probability as a plain number and call the functional form.
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, probability)


def freeze_word_embeddings(model: nn.Module) -> None:
    """Exclude the word embeddings of every backbone in ``model`` from training.

    Raises:
        ConfigError: when there is no backbone with word embeddings.
    """
    backbones = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    if not backbones:
        raise ConfigError("freeze_word_embeddings needs a transformers backbone; this model has none")
    for backbone in backbones:
        backbone.get_input_embeddings().weight.requires_grad_(False)


def set_attention(model: nn.Module, implementation: str) -> None:
    """Choose how every backbone in ``model`` computes attention, by transformers' name for it.

    Raises:
        ConfigError: for a name that transformers does not know, or cannot use here.
    """
    for backbone in [module for module in model.modules() if isinstance(module, PreTrainedModel)]:
        try:
            backbone.set_attn_implementation(implementation)
        except (ValueError, ImportError) as error:
            first = str(error).splitlines()[0]
            raise ConfigError(f"attn_implementation={implementation}: {first}") from error


def _load_transformer(
    name: str | os.PathLike[str] | PretrainedConfig,
    tokenizer: str | os.PathLike[str] | PreTrainedTokenizerBase | None,
    dtype: torch.dtype,
    trust_remote_code: bool,
) -> Transformer:
    remote = {"trust_remote_code": trust_remote_code}
    if isinstance(tokenizer, (str, os.PathLike)):
        tokenizer = AutoTokenizer.from_pretrained(os.fspath(tokenizer), **remote)
    if isinstance(name, PretrainedConfig):
        if tokenizer is None:
            raise ConfigError("a config alone has no vocabulary: pass tokenizer= with a name, a folder or a tokenizer")
        # sentence-transformers builds its module from files, so a fresh encoder goes through a folder.
        with tempfile.TemporaryDirectory() as folder:
            AutoModel.from_config(name, **remote).save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            return Transformer(folder, model_kwargs={"dtype": dtype})
    path = os.path.expanduser(os.fspath(name))
    require_model(path)
    try:
        with refusing_code(path):
            transformer = Transformer(
                path, model_kwargs={"dtype": dtype, **remote}, processor_kwargs=remote, config_kwargs=remote
            )
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"{path}: not a backbone that can be loaded ({_first_line(error)}). Pass a local folder, or a hub name "
            "while online."
        ) from error
    if tokenizer is not None:
        transformer.processor = tokenizer
    return transformer


def require_model(name: str) -> None:
    """Refuse a name that is neither a folder nor a hub name that can be had now.

    Asking the hub while offline takes more than a minute of retries before it fails; one connection takes a moment.

    Raises:
        UserError: saying which of the two it is.
    """
    if os.path.isdir(name):
        return
    if os.path.isfile(name):
        raise UserError(f"{name}: is a file; name the folder that the model was saved to")
    if os.path.isabs(name) or name.startswith(".") or name.count("/") > 1 or not name.strip("/"):
        raise UserError(f"{name}: no such model folder")
    full_name = name if "/" in name else f"sentence-transformers/{name}"
    cached = (try_to_load_from_cache(repo, "config.json") for repo in (name, full_name))
    proxies = any(os.environ.get(key) for key in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"))
    if proxies or any(isinstance(path, str) for path in cached):
        return
    host = urlparse(ENDPOINT).hostname or "huggingface.co"
    try:
        if is_offline_mode():
            raise OSError("HF_HUB_OFFLINE is set")
        socket.create_connection((host, urlparse(ENDPOINT).port or 443), timeout=5).close()
    except OSError as error:
        raise UserError(
            f"{name}: no such folder, and the model hub cannot be reached to look it up ({error}). Pass the path of a "
            "saved model, or try again online"
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
