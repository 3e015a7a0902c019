"""`contaccum mine` end to end on tiny models, and every mistake as one line, exit code 2, and no file."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from mining_files import write_lines
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import StaticEmbedding

from contaccum.cli import main
from contaccum.data import load_training_data
from contaccum.evaluation.provenance import package_versions
from contaccum.mining import load_mining_data
from contaccum.mining.rescoring import CrossEncoderScores, load_cross_encoder


def mine(*arguments: object) -> int:
    return main(["mine", *map(str, arguments), "--no_progress"])


def test_mined_triplets_train_and_the_report_names_what_they_came_from(model_path, pairs, tmp_path, capsys):
    output = tmp_path / "new" / "hard.jsonl"
    arguments = ["--num_negatives", 2, "--relative_margin", 0.0, "--range_max", 30, "--device", "cpu"]
    assert mine(model_path, "--data", pairs, "--output", output, *arguments, "--on_too_few", "keep") == 0
    out = capsys.readouterr().out
    assert "known positives and their duplicates" in out and f"written: {output}" in out
    record = json.loads(Path(f"{output}.report.json").read_text())
    assert record["data"]["fingerprint"] == load_training_data(pairs).fingerprint
    assert record["model"]["name"] == model_path and len(record["model"]["fingerprint"]) == 64
    assert record["tokenisation"]["document_max_length"] == 40
    assert record["versions"] == package_versions() and "git_commit" in record
    assert record["rules"]["seed"] == 0 and record["search"]["similarity"] == "cos"
    data = load_training_data(output, num_hard_negatives=2, on_bad_record="skip")
    assert data.data_format in ("pairs", "triplets") and len(data.dataset) > 0
    known = {(row["query"], row["positive"]) for row in load_training_data(pairs).dataset}
    assert not known & {(row["query"], row[f"negative_{i}"]) for row in data.dataset for i in (1, 2)}


def test_a_static_model_that_has_no_maximal_length_mines_too(tiny_tokenizer, pairs, tmp_path):
    static = StaticEmbedding(tiny_tokenizer.backend_tokenizer, embedding_dim=16)
    path = str(tmp_path / "static")
    SentenceTransformer(modules=[static], device="cpu").save_pretrained(path)
    output = tmp_path / "hard.jsonl"
    assert mine(path, "--data", pairs, "--output", output, "--device", "cpu") == 0
    assert json.loads(Path(f"{output}.report.json").read_text())["tokenisation"]["document_max_length"] is None


def test_the_script_is_the_command(model_path, pairs, tmp_path):
    outputs = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    arguments = ["--data", pairs, "--num_negatives", 2, "--sampling", "random", "--seed", 7, "--device", "cpu"]
    assert mine(model_path, "--output", outputs[0], *arguments) == 0
    script = Path(__file__).parents[2] / "scripts" / "mine_negatives.py"
    command = [sys.executable, script, model_path, "--output", outputs[1], *arguments, "--no_progress"]
    subprocess.run(list(map(str, command)), check=True, capture_output=True)
    assert outputs[0].read_text() == outputs[1].read_text()
    other = tmp_path / "c.jsonl"
    assert mine(model_path, "--output", other, *arguments, "--seed", 8) == 0
    assert other.read_text() != outputs[0].read_text()


def test_bm25_mines_without_a_model(beir, tmp_path):
    bm25s = pytest.importorskip("bm25s")
    output = tmp_path / "hard.jsonl"
    arguments = ["--method", "bm25", "--bm25_k1", 1.2, "--num_negatives", 2, "--output_format", "tevatron"]
    assert mine("--data", beir, "--output", output, *arguments) == 0
    record = json.loads(Path(f"{output}.report.json").read_text())
    assert record["search"] == {"method": "bm25", "k1": 1.2, "b": 0.4} and record["model"] is None
    assert record["versions"]["bm25s"] == bm25s.__version__
    assert len(output.read_text().splitlines()) == record["queries_kept"] > 5


def test_the_cross_encoder_keeps_what_is_three_points_below_the_positive(
    model_path, cross_encoder_path, pairs, tmp_path
):
    arguments = [model_path, "--data", pairs, "--device", "cpu", "--range_max", 12, "--num_negatives", 4]
    output = tmp_path / "hard.jsonl"
    assert mine(*arguments, "--output", output, "--cross_encoder", cross_encoder_path, "--on_too_few", "keep") == 0
    record = json.loads(Path(f"{output}.report.json").read_text())
    assert record["rules"]["cross_encoder_margin"] == 3.0 and record["dropped_by_rule"]["cross_encoder"] > 0
    model = load_cross_encoder(cross_encoder_path, "cpu")
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    positives: dict[str, list[str]] = {}
    for line in lines:
        positives.setdefault(line["query"], []).append(line["positive"])

    def logits(query: str, passages: list[str]) -> list[float]:
        rows = [(query, passage) for passage in passages]
        return model.predict(rows, activation_fn=lambda x: x).tolist()

    assert any(line["negatives"] for line in lines)
    for line in lines:
        scores = line.get("negative_cross_encoder_scores", [])
        assert scores == pytest.approx(logits(line["query"], line["negatives"]) if scores else [], abs=1e-4)
        assert all(score <= min(logits(line["query"], positives[line["query"]])) - 3.0 + 1e-4 for score in scores)


def test_cross_encoder_scores_are_logits_whatever_the_models_last_step(cross_encoder_path, model, pairs):
    cross_encoder = load_cross_encoder(cross_encoder_path, "cpu")
    assert type(cross_encoder.activation_fn).__name__ == "Sigmoid"
    scorer = CrossEncoderScores(cross_encoder, load_mining_data(pairs), show_progress=False)
    scores = scorer.scores(np.arange(20), np.arange(20))
    assert scores.min() < 0 or scores.max() > 1
    both = scorer.scores(np.zeros(2, np.int64), np.array(scorer.data.positives[0]))
    assert scorer.positive_scores(np.array([0, 9])).tolist() == pytest.approx(
        [both.min(), scorer.scores(np.array([9]), np.array(scorer.data.positives[9]))[0]], rel=1e-5
    )


MISTAKES = {
    "no data": (["--output", "o.jsonl"], "--data"),
    "a misspelt option": (["--relativ_margin", "0.05"], "did you mean --relative_margin"),
    "rules that leave nothing": (["--range_min", "5", "--range_max", "6"], "raise it to 8"),
    "a margin without its model": (["--cross_encoder_margin", "3"], "needs a --cross_encoder"),
    "bm25 with a model": (["--method", "bm25"], "leave it out"),
    "dense alone": (["--method", "bm25", "--index", "HNSW8", "-"], "--index has no effect with --method bm25"),
    "bm25 alone": (["--bm25_k1", "1.2"], "--bm25_k1 has no effect with --method dense"),
    "bm25 out of range": (["--method", "bm25", "--bm25_b", "2", "-"], "bm25_b"),
    "an output of the wrong kind": (["--output_format", "dpr"], "ends in .json"),
    "no such data": (["--data", "missing.jsonl"], "missing.jsonl: no such file"),
    "no such corpus": (["--corpus", "missing.jsonl"], "missing.jsonl: no such file"),
    "no such cross-encoder": (["--cross_encoder", "./missing"], "missing: no such model folder"),
    "an index too large": (["--index", "IVF64,Flat"], "needs at least 64 vectors"),
    "a threshold nothing meets": (["--max_score", "-1"], "no query has a negative left"),
    "too many negatives": (["--num_negatives", "99"], "no query has 99 negatives"),
    "no such device": (["--device", "cuda:99"], "cuda:99"),
    "no batch": (["--batch_size", "0"], "batch_size"),
    "too short": (["--query_max_length", "1"], "query_max_length"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_exit_code_2_and_no_file(mistake, model_path, pairs, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    more, message = MISTAKES[mistake]
    arguments = [model_path, "--data", pairs, "--output", "o.jsonl", "--device", "cpu", *more]
    if mistake == "no data":
        arguments = [model_path, *more]
    if more[-1] == "-":
        arguments = [*arguments[1:-1]]
    assert mine(*arguments) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("contaccum: error: ") and message in error
    assert [path.name for path in tmp_path.iterdir()] == [pairs.name]


def test_an_encoder_or_a_classifier_is_not_taken_for_a_cross_encoder(
    model_path, cross_encoder_path, pairs, tmp_path, capsys
):
    assert mine(model_path, "--data", pairs, "--output", tmp_path / "o.jsonl", "--cross_encoder", model_path) == 2
    assert "not a cross-encoder that was trained to score pairs" in capsys.readouterr().err
    classifier = tmp_path / "classifier"
    classifier.mkdir()
    for file in Path(cross_encoder_path).iterdir():
        (classifier / file.name).write_bytes(file.read_bytes())
    config = json.loads((classifier / "config.json").read_text())
    config |= {"id2label": {str(i): f"L{i}" for i in range(3)}, "label2id": {f"L{i}": i for i in range(3)}}
    (classifier / "config.json").write_text(json.dumps(config))
    weights = load_file(classifier / "model.safetensors")
    for name in ("classifier.weight", "classifier.bias"):
        weights[name] = weights[name].repeat(3, *[1] * (weights[name].ndim - 1)).contiguous()
    save_file(weights, classifier / "model.safetensors", metadata={"format": "pt"})
    assert mine(model_path, "--data", pairs, "--output", tmp_path / "o.jsonl", "--cross_encoder", classifier) == 2
    assert "has 3 outputs" in capsys.readouterr().err
    assert not list(tmp_path.glob("o.jsonl*"))


def test_an_output_is_replaced_only_when_asked_and_the_input_never(model_path, pairs, tmp_path, capsys):
    output = tmp_path / "hard.jsonl"
    arguments = [model_path, "--data", pairs, "--device", "cpu"]
    assert mine(*arguments, "--output", output) == 0
    before = output.read_text()
    assert mine(*arguments, "--output", output, "--num_negatives", 1) == 2
    assert "--overwrite" in capsys.readouterr().err and output.read_text() == before
    assert mine(*arguments, "--output", output, "--num_negatives", 1, "--overwrite") == 0
    assert output.read_text() != before
    data = pairs.read_text()
    assert mine(*arguments, "--output", pairs, "--overwrite") == 2
    assert "is also the input" in capsys.readouterr().err and pairs.read_text() == data


@pytest.mark.parametrize("name", ["corpus.jsonl", "queries.jsonl"])
def test_a_file_of_the_folder_that_is_mined_is_never_replaced(model_path, beir, name, capsys):
    before = (beir / name).read_text()
    assert mine(model_path, "--data", beir, "--output", beir / name, "--overwrite") == 2
    assert "is also the input" in capsys.readouterr().err and (beir / name).read_text() == before
    for _ in range(2):  # a file of one's own beside them may be
        assert mine(model_path, "--data", beir, "--output", beir / "hard.jsonl", "--overwrite") == 0


def test_a_model_that_is_not_there_is_refused_before_data_are_read(tmp_path, capsys):
    arguments = ["--data", tmp_path / "missing.jsonl", "--output", tmp_path / "o.jsonl"]
    assert mine("./nothing", *arguments) == 2
    assert "./nothing: no such model folder" in capsys.readouterr().err


def test_a_bad_record_names_its_line_and_can_be_left_out(model_path, tmp_path, capsys):
    data = write_lines(tmp_path / "p.jsonl", [{"query": f"q{i}", "positive": f"the cat {i}"} for i in range(6)])
    data.write_text(data.read_text() + '{"query": "q"}\n')
    arguments = [model_path, "--data", data, "--output", tmp_path / "o.jsonl", "--device", "cpu"]
    assert mine(*arguments) == 2
    assert "p.jsonl:7: missing positive" in capsys.readouterr().err
    assert mine(*arguments, "--on_bad_record", "skip") == 0
    record = json.loads((tmp_path / "o.jsonl.report.json").read_text())
    assert "1 left out" in record["data"]["records"]
