"""DualEncoder: a query tower and a passage tower as one SentenceTransformer, tied or untied.

What it saves, `SentenceTransformer(path)` loads. Loading, pooling, prompts and routing are sentence-transformers';
this module puts the pieces together, adds BEIR's names, and turns what cannot or must not be loaded into one line.
"""

from __future__ import annotations

import copy
import os
import pickle
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub import HfApi, try_to_load_from_cache
from huggingface_hub.errors import RepositoryNotFoundError
from safetensors import SafetensorError
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Router, Transformer
from sentence_transformers.util import batch_to_device, get_device_name, import_from_string
from tokenizers.processors import TemplateProcessing
from torch import nn
from transformers import AutoModel, AutoTokenizer, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from contaccum.data.records import passage_text
from contaccum.encoders import adapters
from contaccum.errors import ConfigError, UserError, check_choice
from contaccum.files import AnyPath, read_json


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
        transformer = _load_transformer(name, tokenizer, settings, trust_remote_code)
        if transformer.tokenizer is None:
            raise ConfigError(f"{name}: this backbone has no tokenizer, so it does not encode text")
        pooling = _fit_pooling(transformer, transformer.tokenizer, pooling)
        limit = min(transformer.tokenizer.model_max_length, _positions(transformer))
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
            _lower_default_lengths(model)
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


def tower(model: SentenceTransformer, task: str) -> nn.Module:
    """What encodes ``task``, "query" or "document": the route of a leading Router, else the whole model."""
    first = model[0]
    if not isinstance(first, Router):
        return model
    # Private, but the only way to ask for the route that forward takes: mappings, modalities and the default decide.
    route = first.sub_modules[str(first._resolve_route(task=task, modality="text"))]
    rest = list(model.children())[1:]
    return nn.Sequential(*route.children(), *rest) if rest else route


def is_tied(model: SentenceTransformer) -> bool:
    """Whether the two towers share their weights."""
    queries = {id(p) for p in tower(model, "query").parameters()}
    return queries == {id(p) for p in tower(model, "document").parameters()}


def set_max_lengths(model: SentenceTransformer, query: int | None = None, document: int | None = None) -> None:
    """Truncate queries and documents at these numbers of tokens, or by ConfigError refuse those that it cannot take."""
    for kind, option, length in (("query", "query_max_length", query), ("document", "passage_max_length", document)):
        if length is None:
            continue
        module = next(tower(model, kind).children())
        if not hasattr(module, f"{kind}_length"):
            raise ConfigError(f"{option} needs a transformer that tokenizes text; this model starts otherwise")
        if not 3 <= length <= _positions(module):
            raise ConfigError(f"{option}={length}: this model takes 3 to {_positions(module)} tokens")
        setattr(module, f"{kind}_length", length)


def _positions(transformer: Any) -> int:
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


def _lower_default_lengths(model: nn.Module) -> None:
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


@contextmanager
def loading(name: AnyPath, trust_remote_code: bool = False) -> Iterator[str]:
    """Around whatever loads a model (an encoder, a cross-encoder, a checkpoint): gives the name with ``~`` expanded.

    Raises UserError when there is no such model, it cannot be read, or it brings code that is not trusted, which never
    runs then: a class of its own, or a pickle with more than tensors.
    """
    path = os.path.expanduser(os.fspath(name))
    require_model(path)
    for base in adapters.bases(Path(path)):
        try:
            require_model(base)
        except UserError as error:
            mend = "put it back, or say where it is in adapter_config.json"
            raise UserError(f"{path}: an adapter, and its base cannot be had: {error}; {mend}") from error
    try:
        if not trust_remote_code:
            _refuse_own_classes(Path(path))
        yield path
    except pickle.UnpicklingError as error:
        raise UserError(f"{path}: holds a pickle with more than tensors, which could run code; not read") from error
    except (OSError, ValueError, KeyError, ImportError, SafetensorError) as error:
        if "`trust_remote_code=True`" in str(error):  # all that tells it from other errors
            raise UserError(f"{path}: needs code that comes with it. Read that, then set trust_remote_code") from error
        raise UserError(f"{path}: not a model that can be loaded ({error})") from error


def require_model(name: str) -> None:
    """Refuse, by a UserError, a name that is neither a folder nor a hub name that can be had now.

    sentence-transformers asks the hub many times, for more than a minute where it cannot be reached; this asks once.
    """
    if os.path.isdir(name):
        return
    if os.path.exists(name) or name.startswith((".", "/")) or name.count("/") > 1:
        raise UserError(f"{name}: no such model folder")
    names = [name] if "/" in name else [name, f"sentence-transformers/{name}"]
    try:
        if not any(try_to_load_from_cache(repo, "config.json") for repo in names):
            HfApi().model_info(name, timeout=5)
    except RepositoryNotFoundError:
        return  # the library knows other names for a model, and says what it looked for
    except Exception as error:  # what is raised without a network is the affair of the hub's HTTP client
        raise UserError(f"{name}: no such folder, and the model hub cannot be asked for it ({error})") from error


def _refuse_own_classes(folder: Path) -> None:
    """Refuse what a folder names as modules but sentence-transformers' own: a dotted name reaches all it imports."""
    file, own = folder / "modules.json", "sentence_transformers."
    modules = read_json(file, list) if file.is_file() else []
    named = [(file, str(module["type"])) for module in modules]
    routers = ("router_config.json", "config.json")  # the latter is what older versions wrote
    for file in [folder / module["path"] / name for module in modules for name in routers]:
        types = read_json(file).get("types") if file.is_file() else None
        named += [(file, str(kind)) for kind in types.values()] if isinstance(types, dict) else []
    for file, kind in named:
        try:
            found: Any = import_from_string(kind) if kind.startswith(own) else None
        except ImportError:
            found = None
        if not (isinstance(found, type) and issubclass(found, nn.Module) and found.__module__.startswith(own)):
            raise UserError(f"{file}: names {kind!r}, code of the folder's choice: --trust_remote_code would run it")


def _fit_pooling(transformer: Transformer, tokenizer: PreTrainedTokenizerBase, pooling: str | None) -> Any:
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


def _load_transformer(
    name: AnyPath | PretrainedConfig,
    tokenizer: AnyPath | PreTrainedTokenizerBase | None,
    model_kwargs: dict[str, Any],
    trust_remote_code: bool,
) -> Transformer:
    remote = {"trust_remote_code": trust_remote_code}
    if isinstance(tokenizer, (str, os.PathLike)):
        with loading(tokenizer, trust_remote_code) as path:
            tokenizer = AutoTokenizer.from_pretrained(path, **remote)
    if isinstance(name, PretrainedConfig):
        if tokenizer is None:
            raise ConfigError("a config alone has no vocabulary: pass tokenizer= with a name, a folder or a tokenizer")
        # sentence-transformers builds its module from files, so a fresh encoder goes through a folder.
        with tempfile.TemporaryDirectory() as folder:
            AutoModel.from_config(name, **remote).save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            return Transformer(folder, model_kwargs=model_kwargs)
    settings = {"model_kwargs": {**model_kwargs, **remote}, "processor_kwargs": remote, "config_kwargs": remote}
    with loading(name, trust_remote_code) as path:
        transformer = Transformer(path, **settings)
    if tokenizer is not None:
        transformer.processor = copy.deepcopy(tokenizer)  # it may get a pad token and EOS
    return transformer
