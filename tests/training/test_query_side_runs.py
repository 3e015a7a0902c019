"""Runs with ``method=query_side``: the store, missing positives, resuming, evaluation."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sample_texts import sentences
from small_data import write_beir, write_lines
from tiny_models import tiny_encoder
from tiny_runs import read_log

from contaccum import DualEncoder
from contaccum.cli import main
from contaccum.errors import UserError
from contaccum.retrieval import encode
from contaccum.retrieval.encode import encode_texts
from contaccum.retrieval.store import EmbeddingStore
from contaccum.training.arguments import ContAccumTrainingArguments
from contaccum.training.passage_store import STORE_FOLDER, _open_store

TEXTS = sentences(40, 5, 9)
DOCUMENTS = {f"d{row}": ("", text) for row, text in enumerate(TEXTS)}
QUERIES = {f"q{row}": text for row, text in enumerate(sentences(24, 6))}


def run_command(command: str, *arguments: Any) -> int:
    """Run a command of the command line without progress bars; return its exit code."""
    return main([command, *map(str, arguments), "--no_progress"])


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """Return a folder with a model, a BEIR folder to train and evaluate on, and two stores.

    The folder "store" is a store of the corpus. The store in the folder "cut" is incomplete.
    """
    root = tmp_path_factory.mktemp("query_side")
    tiny_encoder().save_pretrained(str(root / "model"))
    qrels = [(f"q{row}", f"d{row}", 1) for row in range(24)]
    write_beir(root / "beir", DOCUMENTS, QUERIES, qrels)
    (root / "beir/qrels/dev.tsv").write_text((root / "beir/qrels/train.tsv").read_text())
    options = ["--corpus", root / "beir", "--output", root / "store"]
    assert run_command("encode", root / "model", *options) == 0
    shutil.copytree(root / "store", root / "cut")
    (root / "cut/shard-00000/texts.npy").write_bytes(b"")
    return root


@pytest.fixture
def run_train(train, root) -> Callable[..., int]:
    """Return the fixture `train` with other defaults: six updates of the query tower."""
    return partial(
        train,
        model=root / "model",
        train_data=root / "beir",
        method="query_side",
        bank_size=None,
        num_train_epochs=2,
        learning_rate=0.02,
    )


def write_documents(path: Path, first: int, last: int) -> Path:
    """Write the documents from number ``first`` to before ``last`` as a corpus."""
    records = [{"_id": f"d{row}", "text": TEXTS[row]} for row in range(first, last)]
    return write_lines(path, records)


def assert_search_works(model: Path, store: Path, root: Path, output: Path) -> None:
    """Assert that a store can be searched with the query tower of a model."""
    options = ["--store", store, "--queries", root / "beir", "--output", output]
    assert run_command("search", model, *options) == 0


def compute_largest_difference(model: DualEncoder, other: DualEncoder) -> float:
    """Return the largest difference between the query embeddings of two models."""
    queries = list(QUERIES.values())
    difference = encode_texts(model, queries, "query") - encode_texts(other, queries, "query")
    return float(np.abs(difference).max())


@pytest.mark.parametrize("adapter", [False, True])
def test_a_run_lowers_its_loss_and_leaves_the_documents_bit_for_bit(
    root, run_train, tmp_path, adapter
):
    settings = {"passage_store": root / "store", "num_train_epochs": 8}
    if adapter:  # an adapter lowers the loss more slowly
        settings |= {"lora_r": 8, "learning_rate": 0.05, "num_train_epochs": 24}
    assert run_train(tmp_path / "run", **settings) == 0
    losses = [record["loss"] for record in read_log(tmp_path / "run")]
    assert np.mean(losses[-3:]) < 0.85 * np.mean(losses[:3])
    base = DualEncoder.from_pretrained(root / "model", device="cpu")
    trained = DualEncoder.from_pretrained(tmp_path / "run", device="cpu")
    assert (encode_texts(trained, TEXTS) == encode_texts(base, TEXTS)).all()
    assert compute_largest_difference(trained, base) > 1e-3
    record = json.loads((tmp_path / "run/identity.json").read_text())
    assert record["arguments"]["method"] == "query_side"
    assert record["documents"]["documents"] == 40
    assert "QuerySideLoss" in (tmp_path / "run/README.md").read_text()
    # The trained query tower searches the old store.
    assert_search_works(tmp_path / "run", root / "store", root, tmp_path / "results.trec")


def test_a_corpus_is_encoded_once_unless_a_new_run_overwrites_its_folder(tmp_path, monkeypatch):
    corpus = write_documents(tmp_path / "all.jsonl", first=0, last=40)
    fewer = write_documents(tmp_path / "fewer.jsonl", first=0, last=30)

    def open_store(file: Path, **settings: Any) -> EmbeddingStore:
        settings |= {"method": "query_side", "corpus": str(file), "disable_tqdm": True}
        args = ContAccumTrainingArguments(str(tmp_path / "run"), **settings)
        return _open_store(args, tiny_encoder())

    first_store = open_store(corpus)
    with monkeypatch.context() as patch:
        patch.setattr(encode, "encode_texts", None)  # nothing is encoded again
        assert open_store(corpus).fingerprint == first_store.fingerprint
    refusal = "holds embeddings of another corpus"
    with pytest.raises(UserError, match=refusal):
        open_store(fewer)
    # A run that resumes needs the store of its checkpoint.
    with pytest.raises(UserError, match=refusal):
        open_store(fewer, overwrite_output_dir=True, resume_from_checkpoint="last")
    second_store = open_store(fewer, overwrite_output_dir=True)
    assert second_store.fingerprint != first_store.fingerprint


def test_queries_are_trained_after_both_towers(root, run_train, tmp_path):
    """The store of the second run has the documents of the first one, and is the index."""
    assert run_train(tmp_path / "both", method="contaccum", bank_size=16) == 0
    settings = {"model": tmp_path / "both", "corpus": root / "beir/corpus.jsonl"}
    assert run_train(tmp_path / "queries", **settings) == 0
    base = DualEncoder.from_pretrained(root / "model", device="cpu")
    first = DualEncoder.from_pretrained(tmp_path / "both", device="cpu")
    second = DualEncoder.from_pretrained(tmp_path / "queries", device="cpu")
    store = tmp_path / "queries" / STORE_FOLDER
    stored = np.load(store / "shard-00000/embeddings.npy")
    assert np.abs(stored - encode_texts(first, TEXTS)).max() < 1e-6
    assert np.abs(stored - encode_texts(base, TEXTS)).max() > 1e-3
    assert (encode_texts(second, TEXTS) == encode_texts(first, TEXTS)).all()
    assert compute_largest_difference(second, first) > 1e-3
    assert_search_works(tmp_path / "queries", store, root, tmp_path / "results.trec")


def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(root, run_train, tmp_path):
    settings = {
        "passage_store": root / "store",
        "save_strategy": "steps",
        "save_steps": 2,
        "lora_r": 2,
    }
    assert run_train(tmp_path / "straight", **settings) == 0
    # The checkpoint alone, as if the run had been killed after it
    checkpoint = tmp_path / "resumed/checkpoint-4"
    shutil.copytree(tmp_path / "straight/checkpoint-4", checkpoint)
    assert run_train(tmp_path / "resumed", resume_from_checkpoint=checkpoint, **settings) == 0
    resumed = DualEncoder.from_pretrained(tmp_path / "resumed", device="cpu").state_dict()
    straight = DualEncoder.from_pretrained(tmp_path / "straight", device="cpu").state_dict()
    for name, weight in straight.items():
        assert torch.equal(resumed[name], weight), name


def test_a_run_does_not_resume_with_another_store(root, run_train, tmp_path, capsys):
    settings = {"passage_store": root / "store", "save_strategy": "epoch"}
    assert run_train(tmp_path / "run", **settings) == 0
    fewer = write_documents(tmp_path / "fewer.jsonl", first=0, last=30)
    options = ["--corpus", fewer, "--output", tmp_path / "fewer"]
    assert run_command("encode", root / "model", *options) == 0
    capsys.readouterr()
    settings["passage_store"] = tmp_path / "fewer"
    settings["resume_from_checkpoint"] = "last"
    settings["num_train_epochs"] = 3
    assert run_train(tmp_path / "run", **settings) == 2
    assert "documents of the store" in capsys.readouterr().err


@pytest.mark.parametrize("missing", ["stop", "add"])
def test_missing_positives_stop_the_run_or_are_added(run_train, tmp_path, capsys, missing):
    corpus = write_documents(tmp_path / "corpus.jsonl", first=4, last=40)
    settings = {"corpus": corpus, "missing": missing, "num_train_epochs": 1}
    code = run_train(tmp_path / "run", **settings)
    if missing == "stop":
        assert code == 2
        assert "lacks 4 positives" in capsys.readouterr().err
        return
    assert code == 0
    assert sum(line["pairs"] for line in read_log(tmp_path / "run")) == 24
    record = json.loads((tmp_path / "run/identity.json").read_text())
    assert record["documents"]["documents"] == 40


def test_evaluation_while_training_reads_documents_from_the_store(
    root, run_train, tmp_path, monkeypatch
):
    encoded_kinds: set[str] = set()  # of texts: "query" or "document"
    original = encode.encode_texts

    def record_kind(
        model: Any, texts: Any, kind: str = "document", *args: Any, **kwargs: Any
    ) -> Any:
        if len(texts) > 0:
            encoded_kinds.add(kind)
        return original(model, texts, kind, *args, **kwargs)

    monkeypatch.setattr(encode, "encode_texts", record_kind)
    monkeypatch.setattr("contaccum.retrieval.search.encode_texts", record_kind)
    settings = {
        "passage_store": root / "store",
        "eval_data": root / "beir",
        "eval_strategy": "epoch",
    }
    assert run_train(tmp_path / "run", **settings) == 0
    assert encoded_kinds == {"query"}
    last_evaluation = read_log(tmp_path / "run", "eval_log.jsonl")[-1]
    # The command encodes the documents with the trained model.
    options = ["--data", root / "beir", "--split", "dev", "--output", tmp_path / "scores.json"]
    assert run_command("evaluate", tmp_path / "run", *options) == 0
    scores = json.loads((tmp_path / "scores.json").read_text())["metrics"]
    assert last_evaluation["eval_ndcg@10"] == pytest.approx(scores["NDCG@10"], abs=1e-6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"passage_store": "nowhere"}, "nowhere: not a store of embeddings"),
        ({"corpus": "nowhere.jsonl"}, "nowhere.jsonl"),
        ({"passage_store": "{root}/cut"}, "missing, cut off"),
        ({"passage_store": "{root}/store", "similarity": "dot"}, "another similarity"),
    ],
)
def test_a_store_or_corpus_that_cannot_be_used_gives_one_line(
    root, run_train, tmp_path, settings, message, capsys
):
    settings = {key: value.format(root=root) for key, value in settings.items()}
    assert run_train(tmp_path / "run", **settings) == 2
    lines = capsys.readouterr().err.splitlines()
    errors = [line for line in lines if line.startswith("contaccum: error")]
    assert len(errors) == 1
    assert message in errors[0]
    assert not (tmp_path / "run" / STORE_FOLDER).exists()
