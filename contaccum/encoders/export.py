"""Export of a trained model as plain SentenceTransformer folders that embedding servers can load.

A plain model is a SentenceTransformer without a Router, which servers cannot load: a model with two
towers becomes the folders ``query`` and ``document``. Adapters are merged in float32. Each folder
is loaded again, and compared with the model on 50 queries and 50 passages of SciFact.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import (
    Dense,
    Normalize,
    Pooling,
    Transformer,
)

from contaccum.data.beir import load_beir_folder, shipped_scifact
from contaccum.data.corpus import get_passage_texts
from contaccum.encoders import adapters
from contaccum.encoders.settings import Kind, get_tower, is_tied, require_max_length
from contaccum.errors import ConfigError, UserError, check_choice
from contaccum.files import (
    AnyPath,
    atomic_folder,
    provenance,
    read_json,
    require_new_folder,
    write_json,
    write_text,
)
from contaccum.redaction import redact

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_LEAST_COSINE = 0.9999  # two embeddings of the same text agree if theirs is at least this
_TASKS: dict[str, tuple[Kind, ...]] = {
    "query": ("query",),
    "document": ("document",),
    ".": ("query", "document"),
}
"""{subfolder of the export: tasks that its model serves}"""
_NUM_CHECK_TEXTS = 50  # of each task
_EXPORTED_MODULES = (Transformer, Pooling, Dense, Normalize)
_POOLING_FLAGS = {
    "cls": "pooling_mode_cls_token",
    "mean": "pooling_mode_mean_tokens",
    "max": "pooling_mode_max_tokens",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}
"""{pooling mode of sentence-transformers 6: its key in the config of earlier versions}"""


def export_model(
    model: SentenceTransformer,
    folder: AnyPath,
    dtype: str = "float32",
    model_name: str = "",
    trust_remote_code: bool = False,
) -> dict[str, Any]:
    """Write a model as plain SentenceTransformer folders, and compare them with the model.

    The model itself is changed: its adapters are merged, and its weights get the dtype.

    Args:
        folder: the new folder.
        dtype: dtype of the weights: "float32", "bfloat16" or "float16".
        model_name: name of the model in the record.
        trust_remote_code: allow code that comes with the model, also for the comparison.

    Returns:
        The record, which is also in ``export.json``. Its ``checks`` are one for each subfolder and
        task, with the ``least`` and the ``mean`` cosine of the two embeddings of a text.

    Raises:
        ConfigError: the folder exists, the dtype is unknown, a module is none of servers, or the
            model has no maximum length, or a ``truncate_dim``.
        UserError: embeddings of a float32 export differ from the model's; nothing is written.
    """
    folder = Path(folder)
    check_choice("dtype", dtype, _DTYPES)
    require_new_folder(folder)
    plain_models = make_plain_models(model)
    for subfolder, plain_model in plain_models.items():
        for task in _TASKS[subfolder]:
            require_max_length(plain_model, task)

    dataset = load_beir_folder(shipped_scifact(), "test")
    texts: dict[Kind, list[str]] = {
        "query": list(dataset.queries.values())[:_NUM_CHECK_TEXTS],
        "document": get_passage_texts(dataset.corpus)[:_NUM_CHECK_TEXTS],
    }
    has_adapter = adapters.has_adapter(model)
    if dtype == "float32" or has_adapter:
        # A backbone in bfloat16 would round the hidden states of every layer, and merged weights.
        model.float()
    # The plain models share their modules with the model. So the model encodes the texts before its
    # adapters are merged and `write_plain_model` changes the dtype.
    expected = {task: _encode(model, task, texts[task]) for task in texts}
    if has_adapter:
        adapters.merge_adapter(model)

    checks: list[dict[str, Any]] = []
    with atomic_folder(folder) as new_folder:
        for subfolder, plain_model in plain_models.items():
            tower_folder = new_folder / subfolder
            write_plain_model(plain_model, subfolder, tower_folder, _DTYPES[dtype])
            loaded = SentenceTransformer(
                str(tower_folder), device="cpu", trust_remote_code=trust_remote_code
            )
            for task in _TASKS[subfolder]:
                cosines = compute_cosines(_encode(loaded, task, texts[task]), expected[task])
                least = float(cosines.min())
                check = {"folder": subfolder, "task": task, "num_texts": len(cosines)}
                checks.append({**check, "least": least, "mean": float(cosines.mean())})
                # Rounding the weights to another dtype changes embeddings.
                if dtype == "float32" and least < _LEAST_COSINE:
                    raise UserError(
                        f"export: the folder {subfolder!r} gives other embeddings than the model "
                        f"(least cosine {least:.5f} over {len(cosines)} texts of the task "
                        f"{task!r}); nothing was written"
                    )
        record = {"model": model_name, "dtype": dtype, "checks": checks, "made_with": provenance()}
        write_json(new_folder / "export.json", record)
    return record


def make_plain_models(model: SentenceTransformer) -> dict[str, SentenceTransformer]:
    """Return the plain models of a model by subfolder; they share its modules.

    For cosine, they end with a Normalize module, so that an index by inner product ranks as the
    model does. Raises `ConfigError` for a module that servers do not have, or for ``truncate_dim``.
    """
    num_dimensions = model.truncate_dim
    if num_dimensions is not None:
        raise ConfigError(
            f"export: the model has truncate_dim={num_dimensions}, and embedding servers return "
            "all dimensions: set truncate_dim to null in config_sentence_transformers.json and "
            f"export again; then keep the first {num_dimensions} dimensions of each served "
            "embedding, and normalise them if the model compares by cosine"
        )
    prompts = {task: prompt or "" for task, prompt in model.prompts.items()}
    plain_models = {}
    for subfolder in ["."] if is_tied(model) else ["query", "document"]:
        tower = get_tower(model, _TASKS[subfolder][0])
        modules: list[Any] = list(tower.children())
        for child in modules:
            if not isinstance(child, _EXPORTED_MODULES):
                names = ", ".join(kind.__name__ for kind in _EXPORTED_MODULES)
                raise ConfigError(
                    f"export: the model has the module {type(child).__name__}, and embedding "
                    f"servers run only {names}"
                )
        if model.similarity_fn_name == "cosine" and not isinstance(modules[-1], Normalize):
            modules.append(Normalize())
        plain_models[subfolder] = SentenceTransformer(
            modules=modules,
            prompts=prompts,
            default_prompt_name=model.default_prompt_name,
            similarity_fn_name=model.similarity_fn_name,
            device=str(model.device),
        )
    return plain_models


def write_plain_model(
    plain_model: SentenceTransformer, subfolder: str, folder: Path, dtype: torch.dtype
) -> None:
    """Save a plain model in a dtype, with its settings in the files and keys that servers read.

    These are those of versions before sentence-transformers 6. Without them,
    text-embeddings-inference, vLLM, Infinity and llama.cpp's converter guess pooling or length.
    """
    plain_model.to(dtype)
    plain_model.save_pretrained(str(folder))
    modules = read_json(folder / "modules.json", list)
    for module in modules:
        class_name = module["type"].rpartition(".")[2]
        module["type"] = f"sentence_transformers.models.{class_name}"
        if class_name == "Pooling":
            config_file = folder / module["path"] / "config.json"
            config = read_json(config_file)
            modes = config["pooling_mode"]  # a name, or a list of names
            modes = [modes] if isinstance(modes, str) else modes
            classic_config = {"word_embedding_dimension": config["embedding_dimension"]}
            classic_config |= {key: mode in modes for mode, key in _POOLING_FLAGS.items()}
            # vLLM reads the first key whose value is true as the mode, so this key comes last.
            classic_config["include_prompt"] = config["include_prompt"]
            write_json(config_file, classic_config)
    write_json(folder / "modules.json", modules)

    # A server has one maximum length for all texts.
    max_length = max(require_max_length(plain_model, task) for task in _TASKS[subfolder])
    transformer: Any = plain_model[0]
    classic_keys = {"max_seq_length": max_length, "do_lower_case": transformer.do_lower_case}
    transformer_config = folder / "sentence_bert_config.json"
    write_json(transformer_config, {**read_json(transformer_config), **classic_keys})
    tokenizer_config = folder / "tokenizer_config.json"
    write_json(tokenizer_config, {**read_json(tokenizer_config), "model_max_length": max_length})


def _encode(model: SentenceTransformer, task: Kind, texts: Sequence[str]) -> np.ndarray:
    encode = model.encode_query if task == "query" else model.encode_document
    embeddings = encode(list(texts), batch_size=8, convert_to_tensor=True)
    return embeddings.float().cpu().numpy()


def compute_cosines(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return the cosines (n,) of the rows of two arrays (n, d), in float64; 0 for rows of zeros."""
    rows, other_rows = (torch.from_numpy(array).double() for array in (first, second))
    return torch.cosine_similarity(rows, other_rows).numpy()


def insert_card_section(model_folder: Path, name: str, text: str) -> None:
    """Write a section, in Markdown, at the top of a model's README.md, below its YAML metadata.

    Comments with its name enclose it; an earlier section of this name is replaced.
    """
    card = model_folder / "README.md"
    content = card.read_text(encoding="utf-8") if card.is_file() else ""
    start_mark = f"<!-- {name} -->\n"
    end_mark = f"<!-- end of {name} -->\n"
    content = re.sub(f"{start_mark}.*?{end_mark}\n", "", content, flags=re.DOTALL)
    metadata = re.match(r"---\n.*?\n---\n", content, flags=re.DOTALL)
    position = metadata.end() if metadata else 0
    section = redact(f"{start_mark}{text}\n{end_mark}\n")
    write_text(card, content[:position] + section + content[position:])
