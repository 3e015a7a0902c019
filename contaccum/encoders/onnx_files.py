"""ONNX files of a backbone, for servers that run ONNX and pool by themselves.

The backbone is the transformers model in the first module of a SentenceTransformer.
``onnx/model.onnx`` maps n texts, as token ids and attention mask (n, length), to
``last_hidden_state`` (n, length, d). Servers read the pooling and the normalisation from the files
of sentence-transformers in the same folder.
"""

from __future__ import annotations

import inspect
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from torch import nn
from transformers.modeling_outputs import BaseModelOutput

from contaccum.errors import ConfigError

ONNX_FILE = "onnx/model.onnx"

_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
_INPUT_NAMES = ("input_ids", "attention_mask", "token_type_ids")
_OPSET = 18  # version of ONNX's set of operators
# Inputs with which the exporter runs the model once. They are two texts, because torch.export makes
# a size of 1 a constant of the program.
_EXAMPLE_TEXTS = ("a text", "another text, which is longer")


def require_onnx(dtype: str) -> None:
    """Raise `ConfigError` if ONNX files of this dtype cannot be written here."""
    missing = [name for name in _PACKAGES if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"--onnx needs {', '.join(missing)}, which is not installed: "
            "pip install 'contaccum[onnx]'"
        )
    if dtype != "float32":
        raise ConfigError(f"--onnx with --dtype {dtype}: ONNX files are written in float32 only")


class _Backbone(nn.Module):
    """Wrapper of a transformers model that takes its inputs by position and returns one tensor.

    The ONNX exporter needs this form, because a transformers model returns an object.
    """

    def __init__(self, model: nn.Module, input_names: list[str]) -> None:
        super().__init__()
        self.model = model
        self.input_names = input_names

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Map token ids and masks (n, length) to hidden states (n, length, d)."""
        named_inputs = dict(zip(self.input_names, inputs, strict=True))
        return self.model(**named_inputs).last_hidden_state


def write_onnx(plain_model: SentenceTransformer, folder: Path) -> None:
    """Write the backbone of a model without a Router to `ONNX_FILE` in a folder.

    The ONNX file accepts any number of texts of any length.

    Raises:
        ConfigError: for a backbone that torch cannot export.
    """
    transformer: Any = plain_model[0]
    features = transformer.preprocess(list(_EXAMPLE_TEXTS))
    parameters = inspect.signature(transformer.model.forward).parameters
    names = [name for name in _INPUT_NAMES if name in features and name in parameters]
    # Both axes of an input, the number of texts and their length, have no fixed size.
    dynamic_axes = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    device = next(transformer.model.parameters()).device
    backbone = _Backbone(transformer.model, names).eval().cpu()  # moved back below
    file = folder / ONNX_FILE
    file.parent.mkdir()
    try:
        program = torch.onnx.export(
            backbone,
            tuple(features[name].cpu() for name in names),
            input_names=names,
            output_names=["last_hidden_state"],
            # `_Backbone.forward` has one parameter, *inputs, which is a tuple.
            dynamic_shapes=(tuple(dynamic_axes for _ in names),),
            opset_version=_OPSET,
            dynamo=True,
            verbose=False,
        )
    except Exception as error:  # the exporter raises many types, from several packages
        class_name = type(transformer.model).__name__
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"--onnx: torch cannot export the backbone {class_name} ({reason}); export without it"
        ) from error
    finally:
        backbone.to(device)
    # torch.onnx.export returns None only if it is called with the name of a file.
    assert program is not None
    program.save(str(file))


class _OnnxModel(nn.Module):
    """Replacement of a transformers model that computes the hidden states with an ONNX file."""

    def __init__(self, model: Any, file: Path) -> None:
        super().__init__()
        import onnxruntime

        self.config = model.config
        self._session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
        self._input_names = [model_input.name for model_input in self._session.get_inputs()]

    def forward(self, **features: Any) -> BaseModelOutput:
        """Map token ids and masks (n, length) to hidden states (n, length, d)."""
        inputs = {name: features[name].cpu().numpy() for name in self._input_names}
        [hidden_states] = self._session.run(["last_hidden_state"], inputs)
        return BaseModelOutput(last_hidden_state=torch.from_numpy(hidden_states))


def load_onnx(folder: Path, trust_remote_code: bool = False) -> SentenceTransformer:
    """Load an exported folder as a model whose backbone is run from the ONNX file."""
    model = SentenceTransformer(str(folder), device="cpu", trust_remote_code=trust_remote_code)
    transformer: Any = model[0]
    transformer.model = _OnnxModel(transformer.model, folder / ONNX_FILE)
    return model
