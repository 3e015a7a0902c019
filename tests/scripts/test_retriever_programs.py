"""scripts/train.py, mine.py, encode.py and evaluate.py with tiny models."""

import json
import re

import numpy as np
import pytest
import torch
from programs import ROOT, run_program
from sentence_transformers import SentenceTransformer
from small_data import read_lines, write_judged_places

from contaccum import DualEncoder
from contaccum.evaluation.beir import evaluate_beir, load_data
from contaccum.mining import load_mining_data
from contaccum.retrieval.encode import encode_texts
from contaccum.retrieval.store import EmbeddingStore

PROGRAMS = sorted([*ROOT.glob("scripts/*.py"), *ROOT.glob("eval/*.py")])


@pytest.fixture
def beir(tmp_path):
    """Return a BEIR folder with the splits train and test."""
    return write_judged_places(tmp_path / "beir", train=True)


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.name)
def test_every_imported_name_is_in_the_reference(path):
    pattern = r"^from contaccum[\w.]* import (\([^)]*\)|.*)$"
    imports = re.findall(pattern, path.read_text(), re.MULTILINE)
    imported = {name for names in imports for name in re.findall(r"\w+", names)}
    page = (ROOT / "docs" / "reference.md").read_text()
    listed = set(re.findall(r"^::: contaccum\..*?(\w+)$", page, re.MULTILINE))
    assert imported
    assert imported - listed == set()


def test_train_fine_tunes_a_sentence_transformer_on_mined_negatives(
    places,
    tiny_model_path,
    tmp_path,
    capsys,
):
    mined = tmp_path / "mined.jsonl"
    data = places / "pairs.jsonl"
    argv = [tiny_model_path, "--data", data, "--output", mined, "--num_negatives", 2]
    run_program("scripts/mine.py", *argv)
    assert "0 queries have fewer than 2 negatives" in capsys.readouterr().out
    positives = {row["query"]: row["positive"] for row in read_lines(data)}
    rows = read_lines(mined)
    assert len(rows) == len(load_mining_data(data).queries)
    for row in rows:
        assert len(row["negatives"]) == 2
        assert positives[row["query"]] not in row["negatives"]

    options = {
        "model": tiny_model_path,
        "train_data": mined,
        "num_hard_negatives": 1,
        "output_dir": tmp_path / "trained",
        "max_steps": 2,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "bank_size": 8,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": "true",
    }
    run_program("scripts/train.py", *(f"--{name}={value}" for name, value in options.items()))
    before = SentenceTransformer(tiny_model_path, device="cpu").state_dict()
    after = SentenceTransformer(str(tmp_path / "trained"), device="cpu").state_dict()
    assert any(not torch.equal(after[name], before[name]) for name in before)


def test_encode_writes_a_store_of_embeddings(beir, tiny_model_path, tmp_path):
    folder = tmp_path / "store"
    argv = [tiny_model_path, "--corpus", beir, "--output", folder]
    argv += ["--shard_size", 10, "--device", "cpu"]
    run_program("scripts/encode.py", *argv)
    run_program("scripts/encode.py", *argv)  # the second run does not change the finished store
    store = EmbeddingStore.open(folder)
    corpus = load_data(beir).corpus
    texts = [f"{document['title']} {document['text']}" for document in corpus.values()]
    expected = encode_texts(DualEncoder.from_pretrained(tiny_model_path, device="cpu"), texts)
    assert store.ids(range(len(store))) == list(corpus)
    np.testing.assert_allclose(store[:], expected, atol=1e-6)


def test_evaluate_writes_scores(beir, tiny_model_path, tmp_path, capsys):
    base = tmp_path / "base.json"
    argv = [tiny_model_path, "--data", beir, "--device", "cpu"]
    run_program("scripts/evaluate.py", *argv, "--output", base)
    result = json.loads(base.read_text())
    model = DualEncoder.from_pretrained(tiny_model_path, device="cpu")
    expected = evaluate_beir(model, load_data(beir), show_progress=False).metrics
    assert result["metrics"] == expected
    assert base.with_suffix(".trec").is_file()
    assert f"NDCG@10: {expected['NDCG@10']:.4f}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "argv",
    [
        ["train.py", "--model", "no_such_model", "--train_data", "missing.jsonl"],
        ["mine.py", "no_such_model", "--data", "missing.jsonl", "--output", "out.jsonl"],
        ["encode.py", "no_such_model", "--corpus", "missing.jsonl", "--output", "store"],
        ["evaluate.py", "no_such_model", "--data", "./missing"],
    ],
    ids=lambda argv: argv[0],
)
def test_user_error_is_one_line_and_nothing_is_written(argv, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    program, *rest = argv
    with pytest.raises(SystemExit) as stopped:
        run_program(f"scripts/{program}", *rest)
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"{program}: error: ")
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
