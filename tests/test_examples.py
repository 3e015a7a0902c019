"""examples/: every script and the notebook run to their end with tiny models."""

import re
import shutil
from collections.abc import Callable, Mapping

import nbformat
import numpy as np
import pytest
import torch
from nbclient import NotebookClient
from programs import ROOT, run_program
from sample_texts import sentences
from sentence_transformers import SentenceTransformer
from small_data import write_judged_places
from tiny_models import qwen3_config, word_tokenizer
from transformers import AutoModel

from contaccum.data import read_records
from contaccum.retrieval.store import EmbeddingStore

NOTEBOOK = ROOT / "examples" / "pairs_to_index.ipynb"


@pytest.fixture
def run_example(places, tiny_model_path, tmp_path) -> Callable[..., SentenceTransformer]:
    """Return a function that runs a script for two updates and loads the saved model."""

    def run(name: str, **options: object) -> SentenceTransformer:
        output = tmp_path / "out"
        settings = {"model": tiny_model_path, "data": places / "pairs.jsonl", "max_steps": 2}
        settings |= {"output_dir": output, **options}
        run_program(f"examples/{name}.py", *(f"--{key}={value}" for key, value in settings.items()))
        return SentenceTransformer(str(output), device="cpu")

    return run


def find_changed_weights(
    weights: Mapping[str, torch.Tensor], original_weights: Mapping[str, torch.Tensor]
) -> list[str]:
    """Return the names of the weights that differ from those of another model."""
    return [
        name for name, weight in weights.items() if not torch.equal(weight, original_weights[name])
    ]


def have_weights_changed(model: SentenceTransformer, original_path: str) -> bool:
    """Return whether a weight of ``model`` differs from the model in ``original_path``."""
    original_weights = SentenceTransformer(original_path, device="cpu").state_dict()
    return bool(find_changed_weights(model.state_dict(), original_weights))


def test_finetune_on_pairs_prints_scores_before_and_after(run_example, tiny_model_path, capsys):
    model = run_example("finetune_on_pairs", held_out=8)
    assert have_weights_changed(model, tiny_model_path)
    scores = re.findall(r"^(?:before|after): (.*)$", capsys.readouterr().out, re.MULTILINE)
    assert len(scores) == 2
    for score in scores:
        assert 0 < float(score) <= 1


def test_sentence_transformers_trains_with_the_loss(run_example, tiny_model_path, capsys):
    model = run_example("sentence_transformers_loss")
    assert have_weights_changed(model, tiny_model_path)
    assert re.search(r"^similarities: \[-?\d\S+, -?\d\S+\]$", capsys.readouterr().out, re.M)


def test_hard_negatives_mines_once_and_trains_on_the_negatives(
    run_example, tiny_model_path, places, tmp_path, capsys
):
    model = run_example("hard_negatives")
    assert have_weights_changed(model, tiny_model_path)
    mined = list(read_records(tmp_path / "out" / "mined.jsonl"))
    pairs = read_records(places / "pairs.jsonl")
    positives_of_query = {record.query: record.positives for record in pairs}
    assert len(mined) == len(positives_of_query)
    num_negatives = 0
    for record in mined:
        num_negatives += len(record.negatives)
        assert not set(record.negatives) & set(positives_of_query[record.query])
    assert num_negatives > 0
    assert "'negative_1'" in capsys.readouterr().out
    run_example("hard_negatives")  # the second run reads mined.jsonl


def test_query_side_leaves_documents_and_saves_their_embeddings(
    run_example, tiny_model_path, tmp_path
):
    data = write_judged_places(tmp_path / "judged", train=True)
    model = run_example("query_side", data=data)
    original = SentenceTransformer(tiny_model_path, device="cpu")
    text = "one cat sits on the tree"
    assert np.array_equal(model.encode_document(text), original.encode_document(text))
    assert not np.array_equal(model.encode_query(text), original.encode_query(text))
    assert EmbeddingStore.open(tmp_path / "out" / "passage_store").shape == (24, 32)


def test_decoder_lora_saves_a_plain_model_with_last_token_pooling(run_example, tmp_path):
    backbone_path = tmp_path / "qwen3"
    config = qwen3_config(len(word_tokenizer()))
    config.max_position_embeddings = 512  # the example reads passages of 256 tokens
    AutoModel.from_config(config).save_pretrained(backbone_path)
    word_tokenizer().save_pretrained(backbone_path)

    model = run_example("decoder_lora", model=backbone_path)
    assert model[1].pooling_mode == "lasttoken"
    assert model.prompts["query"].startswith("Instruct: ")
    assert not list((tmp_path / "out").glob("adapter*"))
    original_weights = AutoModel.from_pretrained(backbone_path).state_dict()
    changed_names = find_changed_weights(model[0].model.state_dict(), original_weights)
    assert changed_names
    # LoRA changes only the linear layers of attention and of the MLPs, such as q_proj.
    for name in changed_names:
        assert "proj" in name


def test_two_towers_trains_different_towers_and_searches(run_example, places, capsys):
    towers = run_example("two_towers", model=places / "backbone")[0].sub_modules
    query_weights = towers["query"].state_dict()
    document_weights = towers["document"].state_dict()
    assert find_changed_weights(query_weights, document_weights)
    out = capsys.readouterr().out
    assert "passage / query gradient norm:" in out
    assert out.count("  ->  ") == 3


def test_continue_and_compare_resumes_and_ends_with_the_same_model(run_example, tmp_path, capsys):
    data = write_judged_places(tmp_path / "beir", train=True)
    options = {"data": data, "max_steps": 4, "save_steps": 2}
    log_file = tmp_path / "out" / "train_log.jsonl"

    model = run_example("continue_and_compare", **options)
    out = capsys.readouterr().out
    log_lines = log_file.read_text().splitlines()
    assert "nDCG@10" in out
    assert "p = " in out

    # Now the folder looks as after a kill between the second and the fourth update.
    shutil.rmtree(tmp_path / "out" / "checkpoint-4")
    (tmp_path / "out" / "result.json").unlink()
    resumed_model = run_example("continue_and_compare", **options)
    resumed_log_lines = log_file.read_text().splitlines()
    # Log lines contain the duration of their update. So equal lines mean that the first two updates
    # were not repeated, and different lines that the last two were.
    assert log_lines[:2] == resumed_log_lines[:2]
    assert log_lines[2:] != resumed_log_lines[2:]
    assert find_changed_weights(resumed_model.state_dict(), model.state_dict()) == []


def find_answers(notebook: nbformat.NotebookNode) -> list[str]:
    """Return the answers that the last cell has printed."""
    (printed,) = [output for output in notebook.cells[-1].outputs if output.name == "stdout"]
    return re.findall(r"^-?\d\.\d{3}  (\w.*)$", printed.text, re.MULTILINE)


def test_the_notebook_is_saved_with_its_outputs_and_without_paths_of_a_machine():
    assert "kidney stones" in find_answers(nbformat.read(NOTEBOOK, as_version=4))[0]
    text = NOTEBOOK.read_text(encoding="utf-8")
    assert re.findall(r"/(?:home|root|tmp|Users|usr)/|site-packages|from contaccum\.", text) == []


@pytest.mark.long
def test_the_notebook_ends_with_a_search(tiny_model_path, tmp_path):
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    (parameters,) = [
        cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ())
    ]
    rows = zip(sentences(40, 4), sentences(40, 9), strict=True)
    lines = ["question,answer", *(f"{question},{answer}" for question, answer in rows)]
    (tmp_path / "pairs.csv").write_text("\n".join(lines))
    settings = {"method": "query_side", "learning_rate": 1e-3, "max_steps": 2, "use_cpu": True}
    parameters.source = (
        f"MODEL, DATA, SETTINGS = {tiny_model_path!r}, 'pairs.csv', {settings!r}\n"
        "BUDGET, OUTPUT = '5m', 'out'"
    )
    client = NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    )
    client.execute()
    assert len(find_answers(notebook)) == 3
