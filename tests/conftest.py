"""Tiny models and a cache that all tests may use, and a seed for each."""

import functools
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jinja2
import pytest
import torch
from small_data import write_training_and_beir_data
from tiny_models import bert_config, word_tokenizer
from transformers import AutoModel, BertConfig, BertTokenizerFast, set_seed


def pytest_collection_finish() -> None:
    """Spare the garbage collector what was imported: accelerate has it look at everything when a run starts."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _templates_are_compiled_once() -> Iterator[None]:
    """huggingface_hub compiles the template of the model card again for each model that is saved."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jinja2.Environment, "compile", functools.cache(jinja2.Environment.compile))
        yield


@pytest.fixture(autouse=True)
def _one_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory) -> Iterator[None]:
    """No test reads or fills the cache of whoever runs it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CONTACCUM_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def tiny_tokenizer() -> BertTokenizerFast:
    return word_tokenizer()


@pytest.fixture(scope="session")
def tiny_config() -> BertConfig:
    """A BERT of two layers and 32 dimensions, dropout on."""
    return bert_config(2, 32, 64)


@pytest.fixture(scope="session")
def places(tmp_path_factory) -> Path:
    """A backbone with dropout, pairs to train on, a BEIR folder."""
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
    """Calls `contaccum train` for one epoch of three updates, with more files and keys; returns its exit code."""
    from contaccum.cli import main

    def run(output: Path, *files: str, **keys: Any) -> int:
        given = {
            "model": places / "backbone",
            "train_data": places / "pairs.jsonl",
            "output_dir": output,
        }
        given |= {
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 2,
            "bank_size": 8,
        }
        given |= {"num_train_epochs": 1, "learning_rate": 0.01, "save_strategy": "no"}
        given |= {"use_cpu": "true", "disable_tqdm": "true", **keys}
        words = {key: value if isinstance(value, list) else [value] for key, value in given.items()}
        options = [
            (f"--{key}", *map(str, value)) for key, value in words.items() if value != [None]
        ]
        return main(["train", *files, *(word for option in options for word in option)])

    return run


@pytest.fixture(scope="session")
def tiny_model_path(tiny_config, tiny_tokenizer, tmp_path_factory) -> str:
    """A saved random encoder: mean pooling, cosine, passages of 40 tokens."""
    from contaccum import DualEncoder

    path = str(tmp_path_factory.mktemp("model") / "tiny")
    options = {
        "tokenizer": tiny_tokenizer,
        "pooling": "mean",
        "normalize": True,
        "passage_max_length": 40,
    }
    torch.manual_seed(0)
    DualEncoder.from_backbone(tiny_config, device="cpu", **options).save_pretrained(path)
    return path
