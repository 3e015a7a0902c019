"""`contaccum fit --vectors`: a map of given vectors, without a model."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.numpy import load_file
from small_data import contents, read_lines, write_lines
from tiny_models import tiny_encoder
from torch.nn.functional import cross_entropy, normalize
from translations import make_questions

import contaccum
from contaccum.cli import main
from contaccum.data.beir import load_beir_folder
from contaccum.evaluation.evaluator import RetrievalEvaluator

NUM_PAIRS = 240
DIMENSION = 16
IDS = [f"chunk-{number:06}" for number in range(NUM_PAIRS)]  # near-duplicates, as texts


def write_vectors(file: Path, vectors: Any, **columns: list[str]) -> None:
    """Write a parquet file with a row for each vector."""
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({**columns, "embedding": [list(row) for row in vectors]}), file)


@pytest.fixture(scope="module")
def rotated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Vectors with ids alone, whose queries are a rotation of their documents, nearly."""
    root = tmp_path_factory.mktemp("vectors")
    generator = np.random.default_rng(0)
    documents = generator.normal(size=(NUM_PAIRS, DIMENSION))
    rotation = np.linalg.qr(generator.normal(size=(DIMENSION, DIMENSION)))[0]
    queries = documents @ rotation + 0.1 * generator.normal(size=documents.shape)
    write_vectors(root / "vectors" / "queries.parquet", queries, id=IDS)
    np.save(root / "vectors" / "documents.npy", documents.astype(np.float32))
    write_lines(root / "vectors" / "documents.jsonl", [{"id": name} for name in IDS])
    with open(root / "pairs.csv", "w", newline="") as file:
        csv.writer(file).writerows([("query", "positive"), *zip(IDS, IDS, strict=True)])
    return root


def test_maps_of_ids_alone_equal_dense_references_and_find_the_documents(rotated, tmp_path):
    """The verdict is over several splits, because there are few test queries."""
    output = tmp_path / "out"
    argv = ["fit", str(rotated / "pairs.csv"), "--vectors", str(rotated / "vectors")]
    assert main([*argv, "--output", str(output), "--require", "better"]) == 0
    record = json.loads((output / "result.json").read_text())
    assert record["verdict"]["free"] < 0.2
    assert record["verdict"]["chosen"] > 0.9
    assert record["verdict"]["folds"] == 3
    assert not [row for row in record["scores"] if "BM25" in row["name"]]

    queries = pq.read_table(rotated / "vectors" / "queries.parquet")["embedding"].to_pylist()
    vectors = {
        "query": np.array(queries, dtype=np.float32),
        "positive": np.load(rotated / "vectors" / "documents.npy"),
    }
    rows = read_lines(output / "data" / "train.jsonl")
    assert len(rows) == NUM_PAIRS - record["split"]["dev"] - record["split"]["test"]
    x, p = (
        [vectors[role][IDS.index(row[role].split()[0])].astype(np.float64) for row in rows]
        for role in vectors
    )
    x, p = (np.array(part) / np.linalg.norm(part, axis=1, keepdims=True) for part in (x, p))
    maps = load_file(output / "candidates" / "linear_map" / "map.safetensors")
    trained = maps.pop("gradient")
    assert list(maps) == ["1", "10", "100"]
    for ridge, matrix in maps.items():
        system = x.T @ x + float(ridge) * np.eye(DIMENSION)
        expected = np.eye(DIMENSION) + np.linalg.inv(system) @ x.T @ (p - x)
        np.testing.assert_allclose(matrix, expected, rtol=0, atol=1e-10)

    # The map by gradients, in a dense reference: only training documents are negatives.
    corpus = [row["_id"] for row in read_lines(output / "data" / "corpus.jsonl")]
    assert len(corpus) == len(rows)
    documents = vectors["positive"][[IDS.index(name) for name in corpus]].astype(np.float64)
    documents = torch.from_numpy(documents / np.linalg.norm(documents, axis=1, keepdims=True))
    labels = torch.tensor([corpus.index(row["positive"].split()[0]) for row in rows])

    def compute_loss(matrix: torch.Tensor) -> torch.Tensor:
        logits = normalize(torch.from_numpy(x) @ matrix) @ documents.T / 0.05
        return cross_entropy(logits, labels) + 0.01 * (matrix - torch.eye(DIMENSION)).square().sum()

    def compute_gradient(matrix: torch.Tensor) -> torch.Tensor:
        matrix.requires_grad_()
        return torch.autograd.grad(compute_loss(matrix), matrix)[0]

    loss = compute_loss(torch.from_numpy(trained))
    assert loss < min(compute_loss(torch.from_numpy(matrix)) for matrix in maps.values())
    at_start = compute_gradient(torch.eye(DIMENSION, dtype=torch.float64))
    assert compute_gradient(torch.from_numpy(trained)).norm() < 0.05 * at_start.norm()

    # The three lines of docs/vectors.md.
    matrix = load_file(output / "map.safetensors")["matrix"]
    mapped = np.array(queries) @ matrix
    mapped /= np.linalg.norm(mapped, axis=1, keepdims=True)
    assert "map.safetensors" in (output / "report.html").read_text()
    similarities = mapped @ vectors["positive"].T / np.linalg.norm(vectors["positive"], axis=1)
    assert (similarities.argmax(axis=1) == np.arange(NUM_PAIRS)).mean() > 0.9


def test_candidates_equal_those_of_the_model_that_made_the_vectors(tmp_path):
    """Also from a folder of `contaccum split`, which is matched by texts."""
    pairs = write_lines(tmp_path / "pairs.jsonl", make_questions(200, 0))
    model = tiny_encoder()
    model.save_pretrained(str(tmp_path / "model"))
    rows = make_questions(200, 0)
    queries = list(dict.fromkeys(row["query"] for row in rows))
    texts = list(dict.fromkeys(row["positive"] for row in rows))
    ids = [f"d{number}" for number in range(len(texts))]
    documents = [{"_id": name, "text": text} for name, text in zip(ids, texts, strict=True)]
    corpus = write_lines(tmp_path / "docs.jsonl", documents)
    vectors = tmp_path / "vectors"
    write_vectors(vectors / "queries.parquet", model.encode_query(queries), text=queries)
    for part, half in (("a", slice(0, 20)), ("b", slice(20, None))):
        file = vectors / "documents" / f"{part}.parquet"
        write_vectors(file, model.encode_document(texts[half]), id=ids[half], text=texts[half])

    def list_candidates(data: Path, name: str, **options: Any) -> list[dict[str, Any]]:
        output = tmp_path / name
        contaccum.fit(data, output=output, use_cpu=True, disable_tqdm=True, **options)
        rows = json.loads((output / "result.json").read_text())["candidates"][:8]
        assert rows[5]["name"] == "linear map by gradients"  # follows the last digits of vectors
        rows = [row for row in rows if "by gradients" not in row["name"]]
        return [{key: row[key] for key in ("scores", "vectors", "bm25_weight")} for row in rows]

    training = {"method": "query_side", "max_steps": 1, "learning_rate": 1e-7}
    of_model = list_candidates(
        pairs, "of_model", model=str(tmp_path / "model"), corpus=corpus, test=100, **training
    )
    of_vectors = list_candidates(pairs, "of_vectors", vectors=vectors, test=100)
    assert [row["bm25_weight"] for row in of_vectors] == [row["bm25_weight"] for row in of_model]
    for kind in ("scores", "vectors"):
        for mine, other in zip(of_vectors, of_model, strict=True):
            assert mine[kind] == pytest.approx(other[kind], abs=1e-6)
    split = tmp_path / "of_model" / "data"
    assert list_candidates(split, "of_split", vectors=vectors) == of_vectors


def test_map_of_a_new_model_is_compared_with_encoding_all_documents_anew(tmp_path, capsys):
    """The old vectors have half of the dimensions."""
    rows = make_questions(200, 0)
    pairs = write_lines(tmp_path / "pairs.jsonl", rows)
    model = tiny_encoder()
    model.save_pretrained(str(tmp_path / "model"))
    texts = list(dict.fromkeys(row["positive"] for row in rows))
    old = model.encode_document(texts)[:, : DIMENSION // 2]
    write_vectors(tmp_path / "vectors" / "documents.parquet", old, text=texts)
    argv = ["fit", str(pairs), "--vectors", str(tmp_path / "vectors"), "--new_queries"]
    argv += [str(tmp_path / "model"), "--test", "100", "--output", str(tmp_path / "out")]
    assert main([*argv, "--use_cpu", "true", "--disable_tqdm", "true"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"{tmp_path.name}/model: 50 documents encoded anew in" in "\n".join(lines)
    record = json.loads((tmp_path / "out" / "result.json").read_text())
    new = record["candidates"][1]
    assert new["name"] == f"{tmp_path.name}/model, all encoded anew"
    assert record["verdict"]["free_name"].startswith(new["name"])
    assert record["candidates"][record["chosen"]]["system"] == "map"
    assert record["verdict"]["keeps_index"]
    assert load_file(tmp_path / "out" / "map.safetensors")["matrix"].shape == (16, 8)

    # Encoding anew has the scores of a search with the new model alone.
    test = load_beir_folder(tmp_path / "out" / "data" / "test", "test")
    expected = RetrievalEvaluator(test, ["ndcg@10"]).score(model)["ndcg@10"]
    assert record["scores"][1]["NDCG@10"] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("nan", "queries.parquet:8: a vector of NaN, infinity or"),
        ("zero", "queries.parquet:8: a vector of zeros: 'chunk-000007'"),
        ("ragged", "'chunk-000007' has 15, those before it 16"),
        ("two dimensions", "queries have 15 dimensions, and documents 16"),
        ("twice", "an id that occurs twice: 'chunk-000000'"),
        ("other ids", "240 pairs name queries that"),
        ("no embedding", "needs a column id or text, and embedding"),
        ("no documents", "has no documents.parquet"),
        ("learning_rate", "learning_rate is set"),
        ("model", "model is set"),
        ("new_queries", "the documents have only ids"),
    ],
)
def test_vectors_that_cannot_be_used_are_refused_in_one_line(
    rotated, tmp_path, capsys, fault, words
):
    folder = tmp_path / "vectors"
    table = pq.read_table(rotated / "vectors" / "queries.parquet")
    rows: list[Any] = list(np.array(table["embedding"].to_pylist()))
    ids = IDS
    if fault in ("nan", "zero"):
        rows[7] = rows[7] * (0.0 if fault == "zero" else np.nan)
    elif fault == "ragged":
        rows[7] = rows[7][:15]
    elif fault == "two dimensions":
        rows = [row[:15] for row in rows]
    elif fault == "twice":
        ids = [*ids[:9], ids[0], *ids[10:]]
    elif fault == "other ids":
        ids = [f"q{name}" for name in ids]
    write_vectors(folder / "queries.parquet", rows, id=ids)
    if fault == "no embedding":
        pq.write_table(pa.table({"id": ids}), folder / "queries.parquet")
    if fault != "no documents":
        for name in ("documents.npy", "documents.jsonl"):
            (folder / name).write_bytes((rotated / "vectors" / name).read_bytes())
    options = {"learning_rate": ["--learning_rate", "1"], "model": ["--model", "other"]}
    tiny_encoder().save_pretrained(str(tmp_path / "tiny"))
    options["new_queries"] = ["--new_queries", str(tmp_path / "tiny")]
    capsys.readouterr()
    argv = ["fit", str(rotated / "pairs.csv"), "--vectors", str(folder), *options.get(fault, [])]
    assert main([*argv, "--output", str(tmp_path / "out")]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert words in line
    assert not contents(tmp_path / "out") if (tmp_path / "out").exists() else True


def test_map_of_other_vectors_is_refused(rotated, tmp_path, capsys):
    """The output folder of a fit belongs to its vectors."""
    output = str(tmp_path / "out")
    contaccum.fit(rotated / "pairs.csv", vectors=rotated / "vectors", output=output, budget="90s")
    (tmp_path / "out" / "result.json").unlink()  # as if it were not finished
    folder = tmp_path / "vectors"
    documents = np.load(rotated / "vectors" / "documents.npy")
    for side in ("queries", "documents"):
        write_vectors(folder / f"{side}.parquet", documents, id=IDS)
    argv = ["fit", str(rotated / "pairs.csv"), "--vectors", str(folder), "--output", output]
    assert main(argv) == 2
    assert "work with another vectors" in capsys.readouterr().err
