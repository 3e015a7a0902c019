"""Export of a trained model as plain SentenceTransformer folders that embedding servers can load.

A tied model becomes one folder; two towers become the folders ``query`` and ``document``. Adapters
are merged into the weights. Each folder is loaded again after it was written, and its embeddings
are compared with those of the model. This module does not start servers; `SERVING.md`, which it
writes into the folder, holds the commands that do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import (
    Dense,
    Normalize,
    Pooling,
    Transformer,
)
from torch import nn

from contaccum.data.beir import load_beir_folder, shipped_scifact
from contaccum.data.records import passage_text
from contaccum.encoders import adapters
from contaccum.encoders.onnx_files import load_onnx, require_onnx, write_onnx
from contaccum.encoders.serving_guide import render_serving_guide
from contaccum.encoders.settings import get_max_length
from contaccum.encoders.towers import get_tower, is_tied
from contaccum.errors import ConfigError, UserError, check_choice
from contaccum.files import AnyPath, atomic_folder, provenance, read_json, write_json, write_text

Task = Literal["query", "document"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SERVING_GUIDE = "SERVING.md"
RECORD = "export.json"
LEAST_COSINE = 0.9999
"""Cosine between an exported embedding and the model's, below which a float32 export is refused."""

_CHECK_TEXTS = 50  # queries, and as many passages
_CHECK_BATCH = 8
_EXPORTED_MODULES = (Transformer, Pooling, Dense, Normalize)
_CLASSIC_TYPE = "sentence_transformers.models."
_POOLING_FLAGS = {
    "cls": "pooling_mode_cls_token",
    "mean": "pooling_mode_mean_tokens",
    "max": "pooling_mode_max_tokens",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}
"""sentence-transformers' name of a pooling -> its key in the files that servers read."""


@dataclass(frozen=True)
class CosineCheck:
    """The agreement of an exported folder with the model on the check texts.

    Attributes:
        folder: relative to the export; "." for a tied model.
        task: "query" or "document": how the texts were encoded.
        weights: "safetensors" or "onnx".
        num_texts: number of texts that were compared.
        least, mean: cosine between the exported embedding of a text and the model's.
    """

    folder: str
    task: Task
    weights: str
    num_texts: int
    least: float
    mean: float


@dataclass(frozen=True)
class Export:
    """The result of `export_model`.

    Attributes:
        folder: the folder that was written.
        checks: one for each folder, task and file format.
    """

    folder: Path
    checks: list[CosineCheck]

    @property
    def least_cosine(self) -> float:
        """The smallest cosine of all checks."""
        return min(check.least for check in self.checks)


def export_model(
    model: SentenceTransformer,
    folder: AnyPath,
    dtype: str = "float32",
    onnx: bool = False,
    model_name: str = "",
) -> Export:
    """Write a model as plain SentenceTransformer folders, and compare them with the model.

    The model itself is changed: its adapters are merged, and its weights get the dtype.

    Args:
        model: a SentenceTransformer, tied or with two towers.
        folder: the new folder. It gets `SERVING_GUIDE` and `RECORD` as well.
        dtype: dtype of the weights: "float32", "bfloat16" or "float16".
        onnx: also write ``onnx/model.onnx``, the backbone for servers that run ONNX.
        model_name: name of the model in the record and in the guide.

    Raises:
        ConfigError: for a folder that exists, an unknown dtype, a module that servers do not have,
            or ONNX packages that are not installed.
        UserError: if the exported embeddings differ from the model's; nothing is written then.
    """
    folder = Path(folder)
    check_new_folder(folder, dtype, onnx)
    if adapters.has_adapter(model):
        adapters.merge_adapter(model)
    plain_models = make_plain_models(model)
    texts = load_check_texts()
    expected = {}
    for task in texts:
        expected[task] = encode_check_texts(model, task, texts[task])

    with atomic_folder(folder) as new_folder:
        checks: list[CosineCheck] = []
        for name, plain_model in plain_models.items():
            tower_folder = new_folder / name
            write_plain_model(plain_model, name, tower_folder, DTYPES[dtype])
            if onnx:
                write_onnx(plain_model, tower_folder)
            checks += check_folder(tower_folder, name, texts, expected, has_onnx=onnx)
        if dtype == "float32":
            _require_equal_embeddings(checks)
        guide = render_serving_guide(plain_models, folder, dtype, onnx, model_name)
        write_text(new_folder / SERVING_GUIDE, guide)
        record = {
            "model": model_name,
            "dtype": dtype,
            "onnx": onnx,
            "checks": [asdict(check) for check in checks],
            "made_with": provenance(),
        }
        write_json(new_folder / RECORD, record)
    return Export(folder, checks)


def check_new_folder(folder: Path, dtype: str, onnx: bool) -> None:
    """Raise `ConfigError` for a folder or settings that `export_model` refuses."""
    check_choice("dtype", dtype, DTYPES)
    if folder.exists():
        raise ConfigError(f"{folder}: exists already; name a new folder")
    if onnx:
        require_onnx(dtype)


def make_plain_models(model: SentenceTransformer) -> dict[str, SentenceTransformer]:
    """Return {subfolder: SentenceTransformer without a Router}; a tied model has the subfolder ".".

    The plain models share their modules with the model. A model that compares by cosine gets a
    Normalize module at its end, so that an index which ranks by inner product ranks as the model
    does.

    Raises:
        ConfigError: for a module that embedding servers do not have.
    """
    if is_tied(model):
        return {".": _make_plain_model(model, get_tower(model, "document"))}
    return {
        "query": _make_plain_model(model, get_tower(model, "query")),
        "document": _make_plain_model(model, get_tower(model, "document")),
    }


def _make_plain_model(model: SentenceTransformer, module: nn.Module) -> SentenceTransformer:
    """Return a SentenceTransformer of one tower's modules, with the model's prompts."""
    modules: list[Any] = list(module.children())
    for child in modules:
        if not isinstance(child, _EXPORTED_MODULES):
            names = ", ".join(kind.__name__ for kind in _EXPORTED_MODULES)
            raise ConfigError(
                f"export: the model has the module {type(child).__name__}, and embedding servers "
                f"run only {names}"
            )
    if model.similarity_fn_name == "cosine" and not isinstance(modules[-1], Normalize):
        modules.append(Normalize())
    prompts = {task: prompt or "" for task, prompt in model.prompts.items()}
    return SentenceTransformer(
        modules=modules,
        prompts=prompts,
        default_prompt_name=model.default_prompt_name,
        similarity_fn_name=model.similarity_fn_name,
        truncate_dim=model.truncate_dim,
        device=str(model.device),
    )


def tasks_of_folder(name: str) -> tuple[Task, ...]:
    """Return the tasks that the model in a subfolder encodes."""
    if name == "query":
        return ("query",)
    if name == "document":
        return ("document",)
    return ("query", "document")


def write_plain_model(
    plain_model: SentenceTransformer, name: str, folder: Path, dtype: torch.dtype
) -> None:
    """Save a plain model in a dtype, with its settings in the files and keys that servers read.

    sentence-transformers 6 writes new names of modules, one key for the pooling, and no
    ``max_seq_length``. text-embeddings-inference, vLLM, Infinity and llama.cpp's converter read the
    names and keys of earlier versions, which sentence-transformers 6 still loads. A folder without
    them is served with a pooling or a length that the server guesses.
    """
    plain_model.to(dtype)
    plain_model.save_pretrained(str(folder))
    modules = read_json(folder / "modules.json", list)
    for module in modules:
        class_name = module["type"].rpartition(".")[2]
        module["type"] = f"{_CLASSIC_TYPE}{class_name}"
        if class_name == "Pooling":
            config_file = folder / module["path"] / "config.json"
            write_json(config_file, _classic_pooling_config(read_json(config_file)))
    write_json(folder / "modules.json", modules)

    max_length = max(get_max_length(plain_model, task) or 0 for task in tasks_of_folder(name))
    transformer: Any = plain_model[0]
    classic_keys = {"max_seq_length": max_length, "do_lower_case": transformer.do_lower_case}
    transformer_config = folder / "sentence_bert_config.json"
    write_json(transformer_config, {**read_json(transformer_config), **classic_keys})
    tokenizer_config = folder / "tokenizer_config.json"
    write_json(tokenizer_config, {**read_json(tokenizer_config), "model_max_length": max_length})


def _classic_pooling_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config of a Pooling module with a key for each mode.

    vLLM takes the first key whose value is true for the mode, so ``include_prompt`` comes last.
    """
    modes = config["pooling_mode"]
    if isinstance(modes, str):
        modes = [modes]
    flags = {key: mode in modes for mode, key in _POOLING_FLAGS.items()}
    return {
        "word_embedding_dimension": config["embedding_dimension"],
        **flags,
        "include_prompt": config["include_prompt"],
    }


def load_check_texts() -> dict[Task, list[str]]:
    """Return the texts of the comparison: claims and abstracts of the SciFact that is shipped."""
    dataset = load_beir_folder(shipped_scifact(), "test")
    passages = []
    for document in islice(dataset.corpus.values(), _CHECK_TEXTS):
        passages.append(passage_text(document["title"], document["text"]))
    return {"query": list(dataset.queries.values())[:_CHECK_TEXTS], "document": passages}


def encode_check_texts(model: SentenceTransformer, task: Task, texts: Sequence[str]) -> np.ndarray:
    """Encode texts with the model's prompt for a task; float32 (n, d)."""
    encode = model.encode_query if task == "query" else model.encode_document
    embeddings = encode(list(texts), batch_size=_CHECK_BATCH, convert_to_tensor=True)
    return embeddings.float().cpu().numpy()


def check_folder(
    folder: Path,
    name: str,
    texts: Mapping[Task, Sequence[str]],
    expected: Mapping[Task, np.ndarray],
    has_onnx: bool,
) -> list[CosineCheck]:
    """Load an exported folder, and compare its embeddings with the model's.

    Args:
        folder: the exported folder.
        name: its name in the export.
        texts: {task: n texts}.
        expected: {task: the model's embeddings of these texts, (n, d)}.
        has_onnx: whether the ONNX file is compared as well.
    """
    loaded = SentenceTransformer(str(folder), device="cpu")
    models = {"safetensors": loaded}
    if has_onnx:
        models["onnx"] = load_onnx(folder)
    checks = []
    for weights, exported_model in models.items():
        for task in tasks_of_folder(name):
            embeddings = encode_check_texts(exported_model, task, texts[task])
            cosines = _compute_cosines(embeddings, expected[task])
            least = float(cosines.min())
            mean = float(cosines.mean())
            checks.append(CosineCheck(name, task, weights, len(cosines), least, mean))
    return checks


def _compute_cosines(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Return the cosine of each row of (n, d) with the same row of the other array, (n,)."""
    norms = np.linalg.norm(left, axis=1) * np.linalg.norm(right, axis=1)
    return (left * right).sum(axis=1) / np.maximum(norms, 1e-12)


def _require_equal_embeddings(checks: Sequence[CosineCheck]) -> None:
    """Raise `UserError` for an exported folder whose embeddings differ from the model's."""
    for check in checks:
        if check.least < LEAST_COSINE:
            raise UserError(
                f"export: the {check.weights} of folder {check.folder!r} give other embeddings "
                f"than the model (least cosine {check.least:.5f} over {check.num_texts} texts of "
                f"the task {check.task!r}); nothing was written"
            )
