"""examples/: each script, and the notebook, on tiny models and to its end."""

import re
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
import torch
from nbclient import NotebookClient
from sentence_transformers import SentenceTransformer
from small_data import write_judged_places, write_judged_sentences
from tiny_models import word_tokenizer
from transformers import AutoModel, Qwen3Config

from contaccum.data import read_records
from contaccum.retrieval.store import EmbeddingStore

FOLDER = Path(__file__).parents[1] / "examples"


@pytest.fixture
def run_example(places: Path, tiny_model_path: str, tmp_path: Path, monkeypatch: Any) -> Any:
    """Runs a script for two updates; returns the model that it leaves in tmp_path/out."""

    def run(name: str, **given: Any) -> SentenceTransformer:
        given = {
            "model": tiny_model_path,
            "data": places / "pairs.jsonl",
            "max_steps": 2,
            "output_dir": "out",
        } | given
        with monkeypatch.context() as patch:
            patch.chdir(tmp_path)
            patch.setattr(
                sys, "argv", [name, *(f"--{key}={value}" for key, value in given.items())]
            )
            runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
        return SentenceTransformer(str(tmp_path / "out"), device="cpu")

    return run


def differs(model: SentenceTransformer, path: Any) -> bool:
    before = SentenceTransformer(str(path), device="cpu").state_dict()
    return any(not torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_finetune_on_pairs_scores_before_and_after(run_example, tiny_model_path, capsys):
    assert differs(run_example("finetune_on_pairs", held_out=8), tiny_model_path)
    scores = re.findall(r"^(?:before|after): (.*)$", capsys.readouterr().out, re.MULTILINE)
    assert len(scores) == 2 and all(0 < float(score) <= 1 for score in scores)


def test_hard_negatives_are_mined_once_and_trained_on(
    run_example, tiny_model_path, places, tmp_path, capsys
):
    assert differs(run_example("hard_negatives"), tiny_model_path)
    mined = list(read_records(tmp_path / "out" / "mined.jsonl"))
    positives = {record.query: record.positives for record in read_records(places / "pairs.jsonl")}
    assert len(mined) == len(positives) and any(record.negatives for record in mined)
    assert not any(set(record.negatives) & set(positives[record.query]) for record in mined)
    assert "'negative_1'" in capsys.readouterr().out
    run_example("hard_negatives")  # a second time, from what was mined


def test_query_side_leaves_the_documents_and_saves_their_index(
    run_example, tiny_model_path, tmp_path
):
    folder = write_judged_places(tmp_path / "judged", train=True)
    model = run_example("query_side", data=folder)
    base = SentenceTransformer(tiny_model_path, device="cpu")
    text = ["one cat sits on the tree"]
    assert (model.encode_document(text) == base.encode_document(text)).all()
    assert (model.encode_query(text) != base.encode_query(text)).any()
    assert EmbeddingStore.open(tmp_path / "out" / "passage_store").shape == (24, 32)


def test_decoder_lora_leaves_a_plain_model_with_last_token_pooling(run_example, tmp_path):
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    }
    sizes |= {"num_key_value_heads": 1, "head_dim": 16}
    AutoModel.from_config(Qwen3Config(vocab_size=len(word_tokenizer()), **sizes)).save_pretrained(
        tmp_path / "qwen3"
    )
    word_tokenizer().save_pretrained(tmp_path / "qwen3")
    model = run_example("decoder_lora", model=tmp_path / "qwen3")
    assert model[1].pooling_mode == "lasttoken" and model.prompts["query"].startswith("Instruct: ")
    assert not list((tmp_path / "out").glob("adapter*"))
    base = AutoModel.from_pretrained(tmp_path / "qwen3").state_dict()
    moved = {
        name
        for name, value in model[0].model.state_dict().items()
        if not torch.equal(value, base[name])
    }
    assert moved and all("proj" in name for name in moved)


def test_two_towers_come_to_differ_and_search(run_example, places, capsys):
    towers = run_example("two_towers", model=places / "backbone")[0].sub_modules
    passage = towers["document"].state_dict()
    assert any(
        not torch.equal(value, passage[name])
        for name, value in towers["query"].state_dict().items()
    )
    out = capsys.readouterr().out
    assert "passage over query gradient norm:" in out and out.count("  ->  ") == 3


@pytest.fixture
def beir(tmp_path: Path) -> Path:
    return write_judged_places(tmp_path / "beir", train=True)


def test_continue_and_compare_goes_on_from_a_checkpoint_to_the_same_end(
    run_example, beir, tmp_path, capsys
):
    def run() -> tuple[SentenceTransformer, str, list[str]]:
        model = run_example("continue_and_compare", data=beir, max_steps=4, save_steps=2)
        return (
            model,
            capsys.readouterr().out,
            (tmp_path / "out" / "train_log.jsonl").read_text().splitlines(),
        )

    model, out, log = run()
    assert "nDCG@10" in out and "p = " in out
    shutil.rmtree(tmp_path / "out" / "checkpoint-4")
    again, _, log_again = run()
    assert (
        log[:2] == log_again[:2] and log[2:] != log_again[2:]
    )  # seconds are in it: the first two were not run again
    state = model.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in again.state_dict().items())


@pytest.mark.long
def test_the_notebook_ends_with_a_search(tiny_model_path, tmp_path):
    notebook = nbformat.read(FOLDER / "pairs_to_index.ipynb", as_version=4)
    (parameters,) = (
        cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ())
    )
    data = write_judged_sentences(tmp_path / "beir")
    settings = {"method": "query_side", "learning_rate": 1e-3, "max_steps": 2, "use_cpu": True}
    parameters.source = f"MODEL, DATA, SETTINGS = {tiny_model_path!r}, {str(data)!r}, {settings!r}\nBUDGET, OUTPUT = '5m', 'out'"
    client = NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    )
    client.execute()
    (found,) = (output for output in notebook.cells[-1].outputs if output.get("name") == "stdout")
    assert len(re.findall(r"^-?\d\.\d{3}  d\d+  \w", found.text, re.MULTILINE)) == 3
