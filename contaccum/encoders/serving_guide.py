"""The text of SERVING.md: how embedding servers run the folders of an export.

The template is SERVING.md.j2. The servers are text-embeddings-inference (TEI), vLLM, Infinity and
llama.cpp. An export has one folder for a tied model, and the folders "query" and "document" for a
model with two towers; see `contaccum.encoders.export`.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling

from contaccum.encoders.settings import get_prompt, require_max_length

_TEMPLATE = "SERVING.md.j2"
_FIRST_PORT = 8080
# {pooling of sentence-transformers: value of the server's option --pooling}
_TEI_POOLINGS = {"cls": "cls", "mean": "mean", "lasttoken": "last-token"}
_LLAMA_POOLINGS = {"cls": "cls", "mean": "mean", "lasttoken": "last"}
# {dtype: value of --outtype of llama.cpp's converter}
_LLAMA_DTYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}


@dataclass(frozen=True)
class ServedFolder:
    """Settings of one exported folder, with which its server has to agree.

    Attributes:
        name: the subfolder, "query" or "document"; "." for a tied model.
        path: path of the folder in the commands of the guide.
        port: port of the folder's server in these commands.
        backbone: class name of the backbone.
        has_remote_code: whether the backbone is code that comes with the model.
        pooling: name of the pooling in sentence-transformers.
        tei_pooling, llama_pooling: name of the pooling in text-embeddings-inference and in
            llama.cpp; None if the server does not have this pooling.
        is_normalized: whether embeddings have length 1.
        has_dense: whether the model has a Dense module.
        pools_prompt: whether the tokens of the prompt are pooled as well.
        query_length, document_length: number of tokens at which the model truncates queries and
            passages.
        max_length: number of tokens at which the server truncates texts.
    """

    name: str
    path: str
    port: int
    backbone: str
    has_remote_code: bool
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
        """The number of tokens at which the server truncates texts.

        A server has only one length. For a tied model, it is the longer one of both tasks.
        """
        if self.name == "query":
            return self.query_length
        if self.name == "document":
            return self.document_length
        return max(self.query_length, self.document_length)


def describe_folder(
    plain_model: SentenceTransformer, name: str, path: Path, port: int
) -> ServedFolder:
    """Return the settings of an exported folder.

    Args:
        plain_model: the model in the folder, which has no Router.
        name: the subfolder, or "." for a tied model.
        path: the folder of the export.
        port: port of the folder's server in the commands.
    """
    transformer: Any = plain_model[0]
    modules = list(plain_model.children())
    [pooling] = [module for module in modules if isinstance(module, Pooling)]
    # Several modes, whose outputs are concatenated, give a text that no server has as a pooling.
    mode = str(pooling.pooling_mode)
    return ServedFolder(
        name=name,
        path=str(path / name) if name != "." else str(path),
        port=port,
        backbone=type(transformer.model).__name__,
        has_remote_code=transformer.model.is_remote_code(),
        pooling=mode,
        tei_pooling=_TEI_POOLINGS.get(mode),
        llama_pooling=_LLAMA_POOLINGS.get(mode),
        is_normalized=isinstance(modules[-1], Normalize),
        has_dense=any(isinstance(module, Dense) for module in modules),
        pools_prompt=pooling.include_prompt,
        query_length=require_max_length(plain_model, "query"),
        document_length=require_max_length(plain_model, "document"),
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
        folder: the folder of the export, for the commands.
        dtype: dtype of the weights.
        has_onnx: whether the folders contain ONNX files.
        model_name: name of the model that was exported; may be empty.
    """
    served = []
    for number, (name, plain_model) in enumerate(plain_models.items()):
        served.append(describe_folder(plain_model, name, folder, _FIRST_PORT + number))
    # The prompts and the similarity are the same in all plain models.
    model = next(iter(plain_models.values()))
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # Readers may copy a prompt from the guide. Jinja's filter `tojson` would also escape characters
    # for HTML, such as apostrophes.
    environment.filters["quote"] = partial(json.dumps, ensure_ascii=False)
    environment.filters["shell"] = shlex.quote  # a folder may have a space in its name
    return environment.get_template(_TEMPLATE).render(
        served=served,
        served_name=folder.absolute().name,
        is_tied=len(served) == 1,
        query_prompt=get_prompt(model, "query"),
        document_prompt=get_prompt(model, "document"),
        similarity=model.similarity_fn_name,
        dtype=dtype,
        llama_dtype=_LLAMA_DTYPES[dtype],
        has_onnx=has_onnx,
        model_name=model_name,
    )
