"""DualEncoder: a query tower and a passage tower as one SentenceTransformer.

Tied towers share every weight; untied towers have separate weights, or separate adapters on the
same frozen weights.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Router
from sentence_transformers.util import get_device_name, truncate_embeddings
from torch import nn
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from contaccum.encoders import adapters
from contaccum.encoders.loading import copy_module_code, fit_pooling, load_transformer, loading
from contaccum.encoders.settings import (
    get_max_positions,
    get_tower,
    is_tied,
    lower_default_lengths,
    set_max_lengths,
)
from contaccum.errors import ConfigError, check_choice, quoted, warn_once
from contaccum.files import AnyPath

_QUERY_MAX_LENGTH = 32
_PASSAGE_MAX_LENGTH = 256
SIMILARITY_NAMES: dict[str, Literal["dot", "cosine"]] = {"dot": "dot", "cos": "cosine"}
"""Name of a similarity in contaccum -> name in sentence-transformers."""


class DualEncoder(SentenceTransformer):
    """A SentenceTransformer for retrieval, with a tower for queries and a tower for passages.

    `from_backbone` makes an encoder from a transformers backbone, `from_pretrained` loads a saved
    SentenceTransformer. Untied towers are the routes "query" and "document" of a Router, so
    `SentenceTransformer(path)` loads a folder that a DualEncoder saved.

    Example:
        ```python
        model = DualEncoder.from_backbone("bert-base-uncased", tied=False, pooling="cls")
        queries = model.encode_query(["what keeps the sky up?"])  # (1, d)
        passages = model.encode_document(["Sky Nothing does."])  # (1, d)
        ```
    """

    # Private, but the only way to load a tower's adapter together with its settings.
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
        """Make an encoder from a transformers backbone: pretrained, or with fresh weights.

        Other arguments are the settings of `contaccum train` with these names.

        Args:
            name: a name on the hub, a folder, or a ``PretrainedConfig`` for fresh weights.
            pooling: None: ``"lasttoken"`` for a decoder, whose tokenizer then appends EOS to every
                text; ``"cls"`` for an encoder.
            query_max_length, passage_max_length: tokens of a text, special ones included. None: 32
                and 256, or fewer if the backbone takes fewer.
            similarity: None: ``"cos"`` if ``normalize`` is set, else ``"dot"``.
            dtype: type of the weights.
            tokenizer: a name, a folder or an object; None: that of ``name``, which is no config.
            device: None: an accelerator if there is one, else the CPU.
            model_kwargs: further arguments of transformers' ``from_pretrained``.

        Raises:
            UserError: the backbone cannot be loaded.
            ConfigError: arguments are out of range, or the backbone cannot take them.
        """
        check_choice("pooling", pooling, (None, "cls", "mean", "lasttoken"))
        settings = {"dtype": getattr(torch, dtype), **(model_kwargs or {})}
        transformer = load_transformer(name, tokenizer, settings, trust_remote_code)
        if transformer.tokenizer is None:
            raise ConfigError(
                f"{name}: this backbone has no tokenizer and cannot encode text: pass tokenizer="
            )
        pooling = fit_pooling(transformer, transformer.tokenizer, pooling)
        if similarity is None:
            similarity = "cos" if normalize else "dot"
        max_tokens = min(transformer.tokenizer.model_max_length, get_max_positions(transformer))
        if query_max_length is None:
            query_max_length = min(_QUERY_MAX_LENGTH, max_tokens)
        if passage_max_length is None:
            passage_max_length = min(_PASSAGE_MAX_LENGTH, max_tokens)
        # For encode() without a task
        transformer.max_seq_length = max(query_max_length, passage_max_length)
        dimension = transformer.get_embedding_dimension()
        modules: list[Any] = [transformer, Pooling(dimension, pooling_mode=pooling)]
        if normalize:
            modules.append(Normalize())
        if not tied:
            modules = [Router.for_query_document(modules, copy.deepcopy(modules))]
        model = cls(
            modules=modules,
            prompts={"query": query_prompt or "", "document": passage_prompt or ""},
            similarity_fn_name=SIMILARITY_NAMES[similarity],
            device=device,
            trust_remote_code=trust_remote_code,
        )
        set_max_lengths(model, query_max_length, passage_max_length)
        return model

    @classmethod
    def from_pretrained(cls, path: AnyPath, **kwargs: Any) -> DualEncoder:
        """Load a saved model, with or without LoRA adapters (`contaccum.encoders.adapters`).

        Maximum lengths are lowered to the number of positions that the backbone has. The weights of
        an adapter are trainable. Towers whose adapters have the same base share its weights.

        Args:
            path: a folder, or a name on the hub.
            kwargs: SentenceTransformer's keyword arguments.

        Raises:
            UserError: the model cannot be loaded; see `loading`.
        """
        with loading(path, bool(kwargs.get("trust_remote_code"))) as name:
            # Two adapters are loaded with two copies of the base: on the CPU, and moved once they
            # share one. `model_kwargs` may need the device at once, as weights in 4 bits do.
            has_two_adapters = len(adapters.find_adapter_bases(Path(name))) > 1
            is_loaded_on_cpu = has_two_adapters and not kwargs.get("model_kwargs")
            device = kwargs.get("device")
            if is_loaded_on_cpu:
                kwargs["device"] = "cpu"
            model = cls(name, **kwargs)
            adapters.make_adapter_trainable(model)  # shares the base between the towers
            lower_default_lengths(model)
            if is_loaded_on_cpu:
                model.to(device or get_device_name())
            return model

    def add_adapter(self, adapter_config: Any, adapter_name: str | None = None) -> None:
        """Add a LoRA adapter of peft to the tower, or to each of two towers."""
        adapters.put_adapter(self, adapter_config, adapter_name)

    def save(self, path: str, *args: Any, **kwargs: Any) -> None:
        """Save the model, or its adapter with the name of the base; `save_pretrained` calls it."""
        with adapters.saving(self, path):
            super().save(path, *args, **kwargs)
        copy_module_code(self, Path(path))

    def encode(self, *args: Any, **kwargs: Any) -> Any:
        """Encode texts as in SentenceTransformer; warn if two towers get no task to choose by."""
        if kwargs.get("task") is None and not is_tied(self):
            warn_once(
                "this model has two encoders: `encode` alone takes the encoder of the documents. "
                "Call `encode_query` for queries and `encode_document` for documents."
            )
        return super().encode(*args, **kwargs)

    def forward(self, input: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Return the features, with embeddings (n, d) as `encode` truncates them."""
        output = super().forward(input, **kwargs)
        # `encode` runs in inference mode, and cuts by itself, perhaps to another size.
        is_cut = self.truncate_dim is not None and not torch.is_inference_mode_enabled()
        if is_cut and "sentence_embedding" in output:
            embeddings = output["sentence_embedding"]
            output["sentence_embedding"] = truncate_embeddings(embeddings, self.truncate_dim)
        return output

    def preprocess(
        self, inputs: Sequence[Any], prompt: str | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Tokenise texts; raise `ConfigError` if the prompt fills the maximum length."""
        features = super().preprocess(inputs, prompt=prompt, **kwargs)
        token_ids = features.get("input_ids")
        # Texts that are cut away have equal tokens.
        if isinstance(token_ids, torch.Tensor) and bool((token_ids == token_ids[:1]).all()):
            without_text = super().preprocess([""], prompt=prompt, **kwargs)["input_ids"]
            with_text = super().preprocess([" 0 a"], prompt=prompt, **kwargs)["input_ids"]
            if torch.equal(without_text, with_text):
                raise ConfigError(
                    f"the maximum length of {with_text.shape[-1]} tokens leaves no room for text "
                    f"beside the prompt {quoted(prompt or '')}: shorten the prompt, or raise "
                    "query_max_length or passage_max_length"
                )
        return features


def train_query_tower_alone(model: SentenceTransformer) -> None:
    """Freeze the document tower of a model, in place: an index of its embeddings stays valid.

    A tied model first gets a separate query tower, a copy of its only tower. Without an adapter and
    shared weights, the query tower becomes float32, because in bfloat16 or float16 most of an
    update would be lost to rounding. The document tower keeps its dtype.
    """
    if is_tied(model):
        untie(model)
    query_tower = get_tower(model, "query")
    document_tower = get_tower(model, "document")
    document_tower.requires_grad_(False)
    shares_weights = not set(query_tower.parameters()).isdisjoint(document_tower.parameters())
    if not shares_weights and not adapters.has_adapter(query_tower):
        query_tower.float()


def add_query_adapter(
    model: SentenceTransformer,
    r: int,
    alpha: float | None = None,
    dropout: float = 0.0,
    target_modules: Sequence[str] | None = None,
) -> None:
    """Add an adapter to the query tower of a model, over the weights of the document tower.

    For arguments and errors see `contaccum.encoders.adapters.add_adapter`.
    """
    if is_tied(model):
        untie(model)
    get_tower(model, "document").requires_grad_(False)
    adapters.add_adapter(get_tower(model, "query"), r, alpha, dropout, target_modules)
    adapters.share_equal_frozen_weights(adapters.get_backbones(model))


def untie(model: SentenceTransformer) -> None:
    """Replace the modules of a tied model by a Router of two copies, or raise `ConfigError`."""
    if isinstance(model[0], Router):
        raise ConfigError(
            "both routes of this model's Router are the same tower: "
            "use a model without a Router, or with two separate towers"
        )
    document_modules: list[nn.Module] = list(model.children())
    query_modules = copy.deepcopy(document_modules)
    for _ in document_modules:
        del model[0]
    # The type is ignored because children() declares nn.Module, and Router a subclass of it.
    router = Router.for_query_document(query_modules, document_modules)  # type: ignore[arg-type]
    model.append(router)
