"""Runs with ``method=query_side``: the store, missing positives, resuming, evaluation."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sample_texts import sentences
from small_data import write_beir, write_lines
from tiny_models import tiny_encoder

from contaccum import DualEncoder
from contaccum.cli import main
from contaccum.errors import ConfigError, DataError, UserError
from contaccum.retrieval import corpus, encode
from contaccum.retrieval.encode import encode_texts
from contaccum.retrieval.store import EmbeddingStore
from contaccum.training.arguments import ContAccumTrainingArguments
from contaccum.training.query_side import STORE_FOLDER, _open_store

DOCUMENTS = {f"d{row}": ("", text) for row, text in enumerate(sentences(40, 5, 9))}
TEXTS = [text for _, text in DOCUMENTS.values()]
QUERIES = {f"q{row}": text for row, text in enumerate(sentences(24, 6))}
SETTINGS: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "num_train_epochs": 2,
    "learning_rate": 0.02,
    "use_cpu": "true",
    "disable_tqdm": "true",
    "save_strategy": "no",
}


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """A saved model, a BEIR folder to train and evaluate on, and a store of its corpus."""
    root = tmp_path_factory.mktemp("query_side")
    tiny_encoder().save_pretrained(str(root / "model"))
    qrels = [(f"q{row}", f"d{row}", 1) for row in range(24)]
    write_beir(root / "beir", DOCUMENTS, QUERIES, qrels)
    (root / "beir/qrels/dev.tsv").write_text((root / "beir/qrels/train.tsv").read_text())
    options = ["--corpus", root / "beir", "--output", root / "store", "--no_progress"]
    assert main(["encode", str(root / "model"), *map(str, options)]) == 0
    return root


def run_train(root: Path, output: Path, **settings: Any) -> int:
    arguments = {
        "model": root / "model",
        "train_data": root / "beir",
        "output_dir": output,
        "method": "query_side",
        **SETTINGS,
        **settings,
    }
    options = []
    for key, value in arguments.items():
        if value is not None:
            options += [f"--{key}", str(value)]
    return main(["train", *options])


def write_documents(path: Path, first: int, last: int) -> Path:
    """Write the documents from number ``first`` to before ``last`` as a corpus."""
    records = []
    for identifier, (_, text) in list(DOCUMENTS.items())[first:last]:
        records.append({"_id": identifier, "text": text})
    return write_lines(path, records)


def read_log(folder: Path, name: str = "train_log.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


@pytest.mark.parametrize("adapter", [False, True])
def test_a_run_lowers_its_loss_and_leaves_the_documents_bit_for_bit(root, tmp_path, adapter):
    settings = {"passage_store": root / "store", "num_train_epochs": 8}
    if adapter:
        settings |= {"lora_r": 8, "learning_rate": 0.05, "num_train_epochs": 24}
    assert run_train(root, tmp_path / "run", **settings) == 0
    losses = [record["loss"] for record in read_log(tmp_path / "run")]
    assert np.mean(losses[-3:]) < 0.85 * np.mean(losses[:3])
    base = DualEncoder.from_pretrained(root / "model", device="cpu")
    trained = DualEncoder.from_pretrained(tmp_path / "run", device="cpu")
    assert (encode_texts(trained, TEXTS) == encode_texts(base, TEXTS)).all()
    queries = list(QUERIES.values())
    difference = encode_texts(trained, queries, "query") - encode_texts(base, queries, "query")
    assert np.abs(difference).max() > 1e-3
    record = json.loads((tmp_path / "run/run.json").read_text())
    assert record["method"] == "query_side" and record["documents"]["documents"] == 40
    assert "QuerySideLoss" in (tmp_path / "run/README.md").read_text()

    # The trained query tower searches the old store.
    search = [
        "--store",
        root / "store",
        "--queries",
        root / "beir",
        "--output",
        tmp_path / "x.trec",
    ]
    assert main(["search", str(tmp_path / "run"), *map(str, search), "--no_progress"]) == 0


def test_a_corpus_is_encoded_once_into_the_output_folder(root, tmp_path, monkeypatch):
    assert run_train(root, tmp_path / "run", corpus=root / "beir/corpus.jsonl") == 0
    stored = (tmp_path / "run" / STORE_FOLDER / "shard-00000/embeddings.npy").read_bytes()
    assert stored == (root / "store/shard-00000/embeddings.npy").read_bytes()
    monkeypatch.setattr(corpus, "encode_texts", None)  # nothing is encoded again
    again = {"corpus": root / "beir/corpus.jsonl", "overwrite_output_dir": "true"}
    assert run_train(root, tmp_path / "run", **again) == 0


@pytest.mark.parametrize("changed", ["model", "corpus"])
def test_overwriting_replaces_the_store_of_another_corpus_or_model(changed, tmp_path):
    files = [write_documents(tmp_path / "all.jsonl", first=0, last=40)] * 2
    models = [tiny_encoder(), tiny_encoder()]
    if changed == "corpus":
        files[1] = write_documents(tmp_path / "fewer.jsonl", first=0, last=30)
    else:
        with torch.no_grad():
            next(models[1].parameters()).add_(1.0)

    def open_store(number: int, **settings: Any) -> EmbeddingStore:
        settings |= {"method": "query_side", "corpus": str(files[number]), "disable_tqdm": True}
        args = ContAccumTrainingArguments(str(tmp_path / "run"), **settings)
        return _open_store(args, models[number])

    first = open_store(0)
    refusal = f"holds embeddings of another {changed}"
    with pytest.raises(UserError, match=refusal):
        open_store(1)
    # A run that resumes needs the store of its checkpoint.
    with pytest.raises(UserError, match=refusal):
        open_store(1, overwrite_output_dir=True, resume_from_checkpoint="last")
    second = open_store(1, overwrite_output_dir=True)
    assert second.fingerprint != first.fingerprint
    assert open_store(1).fingerprint == second.fingerprint


def test_overwriting_keeps_the_store_if_the_new_corpus_has_a_bad_record(tmp_path):
    file = write_documents(tmp_path / "all.jsonl", first=0, last=40)
    settings = {"method": "query_side", "corpus": str(file), "disable_tqdm": True}
    model = tiny_encoder()
    args = ContAccumTrainingArguments(str(tmp_path / "run"), **settings)
    fingerprint = _open_store(args, model).fingerprint
    with file.open("a") as lines:
        lines.write('{"_id": "last"}\n')
    settings["overwrite_output_dir"] = True
    args = ContAccumTrainingArguments(str(tmp_path / "run"), **settings)
    with pytest.raises(DataError, match=r"all\.jsonl:41"):
        _open_store(args, model)
    assert EmbeddingStore.open(tmp_path / "run" / STORE_FOLDER).fingerprint == fingerprint


def test_queries_are_trained_after_both_towers(root, tmp_path):
    """The store of the second run has the documents of the first one, and is the index."""
    assert run_train(root, tmp_path / "both", method="contaccum", bank_size=16) == 0
    corpus = root / "beir/corpus.jsonl"
    assert run_train(root, tmp_path / "mine", model=tmp_path / "both", corpus=corpus) == 0
    both = DualEncoder.from_pretrained(tmp_path / "both", device="cpu")
    mine = DualEncoder.from_pretrained(tmp_path / "mine", device="cpu")
    base = DualEncoder.from_pretrained(root / "model", device="cpu")
    stored = np.load(tmp_path / "mine" / STORE_FOLDER / "shard-00000/embeddings.npy")
    assert np.abs(stored - encode_texts(both, TEXTS)).max() < 1e-6
    assert np.abs(stored - encode_texts(base, TEXTS)).max() > 1e-3
    assert (encode_texts(mine, TEXTS) == encode_texts(both, TEXTS)).all()
    queries = list(QUERIES.values())
    difference = encode_texts(mine, queries, "query") - encode_texts(both, queries, "query")
    assert np.abs(difference).max() > 1e-3
    search = ["--store", tmp_path / "mine" / STORE_FOLDER, "--queries", root / "beir"]
    search += ["--output", tmp_path / "x.trec"]
    assert main(["search", str(tmp_path / "mine"), *map(str, search), "--no_progress"]) == 0


def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(root, tmp_path):
    settings = {
        "passage_store": root / "store",
        "save_strategy": "steps",
        "save_steps": 2,
        "lora_r": 2,
    }
    assert run_train(root, tmp_path / "whole", **settings) == 0
    stopped = {**settings, "resume_from_checkpoint": tmp_path / "whole/checkpoint-4"}
    assert run_train(root, tmp_path / "whole", **stopped) == 0
    resumed = DualEncoder.from_pretrained(tmp_path / "whole", device="cpu").state_dict()
    assert run_train(root, tmp_path / "again", **settings) == 0
    again = DualEncoder.from_pretrained(tmp_path / "again", device="cpu").state_dict()
    assert all(torch.equal(resumed[name], again[name]) for name in again)


def test_a_run_does_not_resume_with_another_store(root, tmp_path, capsys):
    settings = {"passage_store": root / "store", "save_strategy": "epoch"}
    assert run_train(root, tmp_path / "run", **settings) == 0
    fewer = write_documents(tmp_path / "fewer.jsonl", first=0, last=30)
    encoded = ["--corpus", fewer, "--output", tmp_path / "fewer", "--no_progress"]
    assert main(["encode", str(root / "model"), *map(str, encoded)]) == 0
    capsys.readouterr()
    changed = {"passage_store": tmp_path / "fewer", "resume_from_checkpoint": "last"}
    assert run_train(root, tmp_path / "run", **{**settings, **changed, "num_train_epochs": 3}) == 2
    assert "documents of the store" in capsys.readouterr().err


@pytest.mark.parametrize("missing", ["stop", "add", "drop"])
def test_missing_positives_stop_the_run_or_are_added_or_dropped(root, tmp_path, missing, capsys):
    corpus = write_documents(tmp_path / "corpus.jsonl", first=4, last=40)
    options = {"corpus": corpus, "missing": missing, "num_train_epochs": 1}
    code = run_train(root, tmp_path / "run", **options)
    if missing == "stop":
        error = capsys.readouterr().err
        assert code == 2 and "lacks 4 positives" in error and repr(TEXTS[0])[:20] in error
        assert error.count("\n") <= 2
        return
    assert code == 0
    pairs = sum(record["pairs"] for record in read_log(tmp_path / "run"))
    documents = json.loads((tmp_path / "run/run.json").read_text())["documents"]
    expected = (24, 40) if missing == "add" else (20, 36)
    assert (pairs, documents["documents"]) == expected


def test_evaluation_while_training_reads_documents_from_the_store(root, tmp_path, monkeypatch):
    encoded: list[str] = []
    original = encode.encode_texts

    def spy(model: Any, texts: Any, kind: str = "document", *args: Any, **kwargs: Any) -> Any:
        encoded.extend([kind] * len(texts))
        return original(model, texts, kind, *args, **kwargs)

    monkeypatch.setattr(encode, "encode_texts", spy)
    monkeypatch.setattr("contaccum.retrieval.searcher.encode_texts", spy)
    settings = {"eval_data": root / "beir", "eval_strategy": "epoch"}
    assert run_train(root, tmp_path / "run", passage_store=root / "store", **settings) == 0
    assert "query" in encoded and "document" not in encoded
    final = read_log(tmp_path / "run", "eval_log.jsonl")[-1]
    options = ["--data", root / "beir", "--split", "dev", "--output", tmp_path / "e.json"]
    assert main(["evaluate", str(tmp_path / "run"), *map(str, options), "--no_progress"]) == 0
    scored = json.loads((tmp_path / "e.json").read_text())["metrics"]["NDCG@10"]
    assert final["eval_ndcg@10"] == pytest.approx(scored, abs=1e-6)


def test_a_model_far_below_bm25_gives_a_warning(root, tmp_path, caplog, monkeypatch):
    settings = {"eval_data": root / "beir", "eval_strategy": "epoch", "num_train_epochs": 1}
    # A query per document, of its own words: BM25 finds them all, a fresh encoder few.
    queries = {f"q{row}": f"{x} zz{row}" for row, (_, x) in enumerate(DOCUMENTS.values())}
    texts = {i: ("", f"{x} zz{row}") for row, (i, (_, x)) in enumerate(DOCUMENTS.items())}
    write_beir(
        tmp_path / "words", texts, queries, [(f"q{r}", f"d{r}", 1) for r in range(40)], "dev"
    )
    settings["eval_data"] = tmp_path / "words"
    monkeypatch.setattr("contaccum.training.query_side.USELESS_SHARE_OF_BM25", 5.0)
    assert run_train(root, tmp_path / "run", passage_store=root / "store", **settings) == 0
    [warning] = [x.message for x in caplog.records if "too little" in x.message]
    assert "BM25 1.000" in warning or "BM25 0.9" in warning


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"passage_store": "nowhere"}, "nowhere: not a store of embeddings"),
        ({"corpus": "nowhere.jsonl"}, "nowhere.jsonl"),
        ({"passage_store": "{root}/cut"}, "missing or cut off"),
        ({"passage_store": "{root}/store", "similarity": "dot"}, "are compared by cos: drop"),
    ],
)
def test_a_store_or_corpus_that_cannot_be_used_gives_one_line(
    root, tmp_path, settings, message, capsys
):
    if not (root / "cut").exists():
        shutil.copytree(root / "store", root / "cut")
        (root / "cut/shard-00000/texts.npy").write_bytes(b"")
    settings = {key: value.format(root=root) for key, value in settings.items()}
    assert run_train(root, tmp_path / "run", **settings) == 2
    errors = [x for x in capsys.readouterr().err.splitlines() if x.startswith("contaccum: error")]
    assert len(errors) == 1 and message in errors[0]
    assert not (tmp_path / "run").exists()


def test_another_similarity_is_refused_before_the_corpus_is_encoded(root, tmp_path, capsys):
    assert run_train(root, tmp_path / "run", corpus=root / "beir", similarity="dot") == 2
    assert "are compared by cos: drop similarity" in capsys.readouterr().err
    assert not (tmp_path / "run" / "passage_store").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "set passage_store .* or corpus"),
        ({"passage_store": "a", "corpus": "b"}, "one of them"),
        ({"passage_store": "a", "bank_weight": 2.0}, "query_side with bank_weight=2.0"),
        ({"passage_store": "a", "distill": "kl"}, "query_side with distill=kl"),
        ({"passage_store": "a", "matryoshka_dims": [8]}, "query_side with matryoshka_dims"),
        ({"passage_store": "a", "bank_size": 8}, "query_side with bank_size=8"),
        ({"passage_store": "a", "missing": "ad"}, "did you mean 'add'"),
        ({"passage_store": "a", "method": "contaccum"}, "only method=query_side has it"),
        ({"missing": "add", "method": "grad_accum"}, "only method=query_side has it"),
    ],
)
def test_settings_that_cannot_work_are_refused(tmp_path, settings, message):
    with pytest.raises(ConfigError, match=message):
        ContAccumTrainingArguments(str(tmp_path), **{"method": "query_side", **settings})
