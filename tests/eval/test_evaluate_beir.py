"""eval/evaluate_beir.py on tiny BEIR folders: scores, tables, skipped sets, devices."""

import json
import os
import runpy

import numpy as np
import pytest
import torch
from programs import ROOT, run_program
from small_data import write_judged_places

from contaccum import DualEncoder
from contaccum.evaluation.beir import evaluate_beir, load_data
from contaccum.retrieval.encode import encode_texts

PROGRAM = "eval/evaluate_beir.py"


def test_scores_equal_evaluate_beir_and_finished_sets_are_skipped(
    places, tiny_model_path, tmp_path, capsys
):
    sets = [write_judged_places(tmp_path / "judged"), places / "beir"]
    output = tmp_path / "out"
    argv = [tiny_model_path, "--data", *sets, "--output", output, "--gpus", 0]
    run_program(PROGRAM, *argv)
    model = DualEncoder.from_pretrained(tiny_model_path, device="cpu")
    expected = [evaluate_beir(model, load_data(path), show_progress=False).metrics for path in sets]

    table = json.loads((output / "table.json").read_text())
    assert [row["name"] for row in table["sets"]] == ["judged", "beir"]
    assert [row["metrics"] for row in table["sets"]] == expected
    mean = (expected[0]["NDCG@10"] + expected[1]["NDCG@10"]) / 2
    assert table["mean"]["NDCG@10"] == pytest.approx(mean)
    assert f"{PROGRAM} {tiny_model_path} --data " in table["command"]
    assert table["devices"] == ["cpu"]
    page = (output / "table.md").read_text()
    assert f"{expected[0]['NDCG@10']:.4f}" in page
    assert page.split("\n\n")[2] in capsys.readouterr().out

    (output / "beir.json").unlink()
    run_program(PROGRAM, *argv)
    assert capsys.readouterr().out.count("kept: ") == 1
    run_program(PROGRAM, *argv, "--similarity", "dot")
    assert "kept: " not in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_too_many_gpus_are_refused_before_anything_is_written(places, tmp_path, capsys):
    output = tmp_path / "out"
    argv = ["no_model", "--data", places / "beir", "--gpus", 2, "--output", output]
    with pytest.raises(SystemExit) as stopped:
        run_program(PROGRAM, *argv)
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("evaluate_beir.py: error: --gpus 2: 0 GPUs are visible")
    assert not output.exists()


def test_select_gpus_uses_the_first_visible_gpus(monkeypatch):
    select_gpus = runpy.run_path(str(ROOT / PROGRAM))["select_gpus"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,7")
    assert select_gpus(2) == 2
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "4,5"


@pytest.mark.long  # starting processes takes most of a minute
def test_several_devices_give_the_same_embeddings_as_one(tiny_model_path):
    """Two processes on the CPU take the place of two GPUs."""
    encode_on_devices = runpy.run_path(str(ROOT / PROGRAM))["encode_on_devices"]
    model = DualEncoder.from_pretrained(tiny_model_path, device="cpu")
    texts = ["the cat sits on the mat", "a dog", "one tree", "where is the house"]
    expected = encode_texts(model, texts, "document")
    with encode_on_devices(model, ["cpu", "cpu"], batch_size=32):
        embeddings = encode_texts(model, texts, "document")
    np.testing.assert_allclose(embeddings, expected, atol=1e-6)
    assert "encode_document" not in vars(model)
