"""The file SERVING.md of an export: how embedding servers run the exported folders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling

from contaccum.encoders.settings import get_max_length, get_prompt

_TEMPLATE = "SERVING.md.j2"
_FIRST_PORT = 8080
_TEI_POOLINGS = {"cls": "cls", "mean": "mean", "lasttoken": "last-token"}
_LLAMA_POOLINGS = {"cls": "cls", "mean": "mean", "lasttoken": "last"}
_LLAMA_DTYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}


@dataclass(frozen=True)
class ServedFolder:
    """Facts about one exported folder that its server has to agree with.

    Attributes:
        name: subfolder, or "." for a tied model.
        path: the folder, as commands name it.
        port: port of its server in the examples.
        backbone: class name of the backbone.
        pooling: sentence-transformers' name of the pooling.
        tei_pooling, llama_pooling: name of the pooling in text-embeddings-inference and in
            llama.cpp; None if that server lacks it.
        is_normalized: whether embeddings have length 1.
        has_dense: whether a Dense module follows the pooling.
        pools_prompt: whether the tokens of the prompt are pooled as well.
        query_length, document_length: tokens at which the model cuts queries and passages.
        max_length: tokens at which the server cuts texts.
    """

    name: str
    path: str
    port: int
    backbone: str
    pooling: str
    tei_pooling: str | None
    llama_pooling: str | None
    is_normalized: bool
    has_dense: bool
    pools_prompt: bool
    query_length: int
    document_length: int

    @property
    def max_length(self) -> int:
        """Return the tokens at which the server cuts texts; a tied model serves both lengths."""
        if self.name == "query":
            return self.query_length
        if self.name == "document":
            return self.document_length
        return max(self.query_length, self.document_length)


def describe_folder(
    plain_model: SentenceTransformer, name: str, path: Path, port: int
) -> ServedFolder:
    """Return the facts about an exported folder."""
    transformer: Any = plain_model[0]
    modules = list(plain_model.children())
    [pooling] = [module for module in modules if isinstance(module, Pooling)]
    mode = str(pooling.pooling_mode)
    return ServedFolder(
        name=name,
        path=str(path / name) if name != "." else str(path),
        port=port,
        backbone=type(transformer.model).__name__,
        pooling=mode,
        tei_pooling=_TEI_POOLINGS.get(mode),
        llama_pooling=_LLAMA_POOLINGS.get(mode),
        is_normalized=isinstance(modules[-1], Normalize),
        has_dense=any(isinstance(module, Dense) for module in modules),
        pools_prompt=pooling.include_prompt,
        query_length=get_max_length(plain_model, "query") or 0,
        document_length=get_max_length(plain_model, "document") or 0,
    )


def render_serving_guide(
    plain_models: Mapping[str, SentenceTransformer],
    folder: Path,
    dtype: str,
    has_onnx: bool,
    model_name: str,
) -> str:
    """Return the text of SERVING.md.

    Args:
        plain_models: {subfolder: model without a Router}.
        folder: the folder of the export, as the commands name it.
        dtype: dtype of the weights.
        has_onnx: whether ONNX files lie in the folders.
        model_name: name of the model that was exported.
    """
    served = []
    for number, (name, plain_model) in enumerate(plain_models.items()):
        served.append(describe_folder(plain_model, name, folder, _FIRST_PORT + number))
    model = next(iter(plain_models.values()))
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(_TEMPLATE).render(
        served=served,
        is_tied=len(served) == 1,
        query_prompt=get_prompt(model, "query"),
        document_prompt=get_prompt(model, "document"),
        similarity=model.similarity_fn_name,
        dtype=dtype,
        llama_dtype=_LLAMA_DTYPES[dtype],
        has_onnx=has_onnx,
        model_name=model_name,
    )
