"""Tiny models and a cache that all tests may use, and a seed for each."""

import functools
import gc
import json
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import jinja2
import pytest
import torch
from small_data import write_training_and_beir_data
from tiny_models import bert_config, tiny_encoder, word_tokenizer
from transformers import AutoModel, BertConfig, BertTokenizerFast, set_seed


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the files with slow tests first, so that no process waits for another at the end."""
    slow_files = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow_files)


def pytest_collection_finish() -> None:
    """Exclude imported objects from garbage collection.

    accelerate runs the collector at the start of each run, which is slow with many objects.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _cache_compiled_templates() -> Iterator[None]:
    """Compile the model card template once; huggingface_hub compiles it for each saved model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jinja2.Environment, "compile", functools.cache(jinja2.Environment.compile))
        yield


@pytest.fixture(autouse=True)
def _set_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory) -> Iterator[None]:
    """Use a temporary cache folder instead of the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CONTACCUM_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def limit_file_size() -> Callable[[int], AbstractContextManager[None]]:
    """Return a context manager in which the system refuses larger files, as on a full disk."""

    @contextmanager
    def limit(num_bytes: int) -> Iterator[None]:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        with pytest.MonkeyPatch.context() as patch:
            # Python would leave compiled modules that are cut off: later imports would fail.
            patch.setattr(sys, "dont_write_bytecode", True)
            patch.setenv("PYTHONDONTWRITEBYTECODE", "1")
            resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
            try:
                yield
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    return limit


@pytest.fixture(scope="session")
def tiny_tokenizer() -> BertTokenizerFast:
    return word_tokenizer()


@pytest.fixture(scope="session")
def tiny_config() -> BertConfig:
    """Return a BERT config with two layers, 32 dimensions and dropout."""
    return bert_config(2, 32, 64)


@pytest.fixture(scope="session")
def places(tmp_path_factory) -> Path:
    """Return a folder with a backbone with dropout, pairs.jsonl and a BEIR folder."""
    root = tmp_path_factory.mktemp("places")
    write_training_and_beir_data(root, 24)
    set_seed(7)
    AutoModel.from_config(bert_config(1, 16, 16, max_position_embeddings=512)).save_pretrained(
        root / "backbone"
    )
    word_tokenizer().save_pretrained(root / "backbone")
    return root


@pytest.fixture(scope="session")
def train(places) -> Callable[..., int]:
    """Return a function that runs `contaccum train` for one epoch of three updates.

    It takes config files and options, and returns the exit code. None removes an option.
    """
    from contaccum.cli import main

    def run(output: Path, *files: str, **keys: Any) -> int:
        settings = {
            "model": places / "backbone",
            "train_data": places / "pairs.jsonl",
            "output_dir": output,
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 2,
            "bank_size": 8,
            "num_train_epochs": 1,
            "learning_rate": 0.01,
            "save_strategy": "no",
            "use_cpu": "true",
            "disable_tqdm": "true",
            **keys,
        }
        argv = ["train", *files]
        for key, value in settings.items():
            if isinstance(value, list):
                argv += [f"--{key}", *map(str, value)]
            elif value is not None:
                argv += [f"--{key}", str(value)]
        return main(argv)

    return run


@pytest.fixture(scope="session")
def tiny_model_path(tiny_config, tiny_tokenizer, tmp_path_factory) -> str:
    """Return the folder of a random encoder with mean pooling and cosine similarity."""
    from contaccum import DualEncoder

    path = str(tmp_path_factory.mktemp("model") / "tiny")
    torch.manual_seed(0)
    model = DualEncoder.from_backbone(
        tiny_config,
        tokenizer=tiny_tokenizer,
        pooling="mean",
        normalize=True,
        passage_max_length=40,
        device="cpu",
    )
    model.save_pretrained(path)
    return path


OWN_MODULE = """
from sentence_transformers.sentence_transformer.modules import Normalize
from .own_sign import SIGN

class OwnNormalize(Normalize):
    def forward(self, features):
        features["sentence_embedding"] = SIGN * features["sentence_embedding"]
        return super().forward(features)
"""


@pytest.fixture
def own_code_path(tmp_path, monkeypatch) -> Path:
    """Return the folder of a model whose last module is a class in the folder's own code."""
    # transformers copies the code into a package of its cache, and imports it from there.
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "hf"))
    # In front of the caches of other tests, which transformers has added to the path.
    (tmp_path / "hf").mkdir()
    monkeypatch.syspath_prepend(tmp_path / "hf")
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in list(sys.modules):
        if name.startswith("transformers_modules"):  # of another test's cache
            monkeypatch.delitem(sys.modules, name)
    folder = tmp_path / "own_code"
    tiny_encoder().save_pretrained(str(folder))
    (folder / "own_module.py").write_text(OWN_MODULE)
    (folder / "own_sign.py").write_text("SIGN = -1")
    modules = json.loads((folder / "modules.json").read_text())
    modules[2]["type"] = "own_module.OwnNormalize"
    (folder / "modules.json").write_text(json.dumps(modules))
    return folder
