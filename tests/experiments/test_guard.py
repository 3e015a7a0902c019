"""`contaccum fit --guard`: the chosen model, its records, continuing after a kill, refused sets."""

from __future__ import annotations

import gzip
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from sample_texts import WORDS
from small_data import read_lines, write_beir, write_lines
from tiny_models import tiny_encoder

import contaccum
from contaccum.cli import main
from contaccum.data.beir import read_split_queries
from contaccum.data.records import RecordSource
from contaccum.data.rows import RecordReport
from contaccum.data.split import SplitSettings, split_data
from contaccum.errors import ConfigError, DataError
from contaccum.evaluation.beir import load_data
from contaccum.evaluation.evaluator import RetrievalEvaluator
from contaccum.experiments import fit as fit_module
from contaccum.experiments.fit import FitResult
from contaccum.merging import merge_models
from contaccum.retrieval.encode import model_fingerprint

HALF = len(WORDS) // 2
SETTINGS: dict[str, object] = {
    "method": "contaccum",
    "temperature": 0.05,
    "total_train_batch_size": 32,
    "num_train_epochs": 3,
    "bank_size": 64,
    "learning_rate": 0.01,
    "use_cpu": True,
    "bf16": False,
    "disable_tqdm": True,
}


def make_text(words: list[int], offset: int = 0) -> str:
    return " ".join(WORDS[offset + word] for word in words)


def draw_words(generator: random.Random) -> list[int]:
    return [generator.randrange(HALF) for _ in range(5)]


def write_guard(folder: Path) -> Path:
    """Write a BEIR folder on which training loses.

    A relevant document shares two of five words with its query, as the model before training
    likes it. The other documents are the passages that training teaches instead.
    """
    generator = random.Random(2)
    documents: dict[str, tuple[str, str]] = {}
    queries = {}
    for number in range(30):
        words = draw_words(generator)
        queries[f"q{number}"] = make_text(words)
        documents[f"same{number}"] = ("", make_text([*words[:2], *draw_words(generator)[2:]]))
        documents[f"other{number}"] = ("", make_text(words, HALF))
    qrels = [(f"q{number}", f"same{number}", 1) for number in range(30)]
    return write_beir(folder, documents, queries, qrels, "test")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained model, pairs to train on, and guard data."""
    root = tmp_path_factory.mktemp("guard")
    tiny_encoder().save_pretrained(str(root / "fresh"))
    generator = random.Random(0)
    pairs = []
    for _ in range(200):
        words = draw_words(generator)
        pairs.append({"query": make_text(words), "positive": make_text(words, HALF)})
    write_lines(root / "pairs.jsonl", pairs)
    write_guard(root / "other")
    return root


def fit(root: Path, output: Path, **options: Any) -> FitResult:
    settings: dict[str, Any] = {**SETTINGS, "guard": [root / "other"], "test": 100, **options}
    return contaccum.fit(
        root / "pairs.jsonl",
        model=str(root / "fresh"),
        budget="10m",
        output=output,
        **settings,
    )


@pytest.fixture(scope="module")
def guarded(root: Path) -> FitResult:
    return fit(root, root / "out", guard_loss=0.07)


@pytest.mark.slow
def test_model_of_the_chosen_weight_is_kept_and_judged(root, guarded):
    folder = guarded.folder
    record = json.loads((folder / "fit.json").read_text())
    merge_record = record["guard"]
    weight = merge_record["weight"]
    assert merge_record["data_sets"] == ["dev", str(root / "other")]
    dev = {row[0]: row[1] for row in merge_record["scores"]}
    other = {row[0]: row[2] for row in merge_record["scores"]}
    assert list(dev) == [0.0, 0.25, 0.5, 0.75, 1.0]
    # Training is good for dev and bad for the guard set, so the chosen weight lies between.
    assert 0 < weight < 1
    assert other[weight] >= other[0.0] - 0.07 > other[1.0]
    base = contaccum.DualEncoder.from_pretrained(root / "fresh", device="cpu")
    trained = contaccum.DualEncoder.from_pretrained(folder / "trained", device="cpu")
    expected = merge_models(base, trained, weight)
    assert model_fingerprint(guarded.model) == model_fingerprint(expected)
    # The verdict is about this model.
    output = root / "evaluated.json"
    arguments = ["--data", str(folder / "data" / "test"), "--output", str(output)]
    assert main(["evaluate", str(folder / "model"), *arguments]) == 0
    score = json.loads(output.read_text())["metrics"]["NDCG@10"]
    assert score == pytest.approx(guarded.verdict.trained, abs=1e-9)
    assert record["scores"][3]["dev"] == dev[weight]
    assert merge_record["line"] in (folder / "model" / "README.md").read_text()
    page = guarded.report.read_text()
    assert "What it keeps" in page
    assert f"{weight:g} (chosen)" in page
    assert "<h2>Training</h2>" in page  # the curves are read from the folder of the training


class Killed(BaseException):
    """An exception in place of SIGKILL: nothing catches it."""


def copy_as_trained(folder: Path, copy: Path) -> None:
    """Copy a finished fit as it was after the final training."""
    shutil.copytree(folder, copy)
    for name in ("model", "guard"):
        shutil.rmtree(copy / name)
    for name in ("fit.json", "report.html"):
        (copy / name).unlink()


@pytest.mark.slow
def test_fit_that_was_killed_while_it_chose_a_weight_continues(
    root, guarded, tmp_path, monkeypatch
):
    copy_as_trained(guarded.folder, tmp_path / "out")
    score = RetrievalEvaluator.score
    num_scored = 0

    def kill_at_third(*args: Any) -> Any:
        nonlocal num_scored
        num_scored += 1
        if num_scored == 3:
            raise Killed
        return score(*args)

    monkeypatch.setattr(RetrievalEvaluator, "score", kill_at_third)
    with pytest.raises(Killed):
        fit(root, tmp_path / "out", guard_loss=0.07)
    assert not (tmp_path / "out" / "model").exists()
    with pytest.raises(ConfigError, match="this folder has work with another guard;"):
        fit(root, tmp_path / "out", guard_loss=0.3)
    continued = fit(root, tmp_path / "out", guard_loss=0.07)
    assert continued.verdict == guarded.verdict
    assert model_fingerprint(continued.model) == model_fingerprint(guarded.model)


def test_guard_that_cannot_be_read_is_refused_first(root, tmp_path, capsys):
    arguments = ["fit", str(root / "pairs.jsonl"), "--model", "no/such/model/anywhere"]
    arguments += ["--output", str(tmp_path / "out"), "--guard", str(tmp_path / "nowhere")]
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "nowhere" in error
    assert not (tmp_path / "out").exists()


def test_time_of_the_guard_is_part_of_the_budget(root, tmp_path, monkeypatch):
    measure = fit_module.measure_seconds_per_document

    def measure_slow_guard(encoder: Any, documents: Any, number: int, batch_size: int) -> float:
        is_guard = number == 60
        return 10_000 / 5 / 60 if is_guard else measure(encoder, documents, number, batch_size)

    monkeypatch.setattr(fit_module, "measure_seconds_per_document", measure_slow_guard)
    with pytest.raises(ConfigError, match=r"documents and the guard sets takes 3\.6 hours"):
        fit(root, tmp_path / "out")


@pytest.mark.parametrize("is_compressed", [False, True])
@pytest.mark.parametrize(
    "query",
    ["what is rain made of", "What is rain made of?", "what is\u00ad  &quot;rain&quot; made of"],
)
def test_guard_with_queries_of_the_test_set_is_refused(root, tmp_path, query, is_compressed):
    """The test set is read as BEIR folders are; it may be compressed, and have other queries."""
    fitted = tmp_path / "fitted"
    queries = {"q": "What is  Rain made of", "not judged": "word"}
    write_beir(fitted, {"d": ("", "a text")}, queries, [("q", "d", 1)], "test")
    if is_compressed:
        file = fitted / "queries.jsonl"
        Path(f"{file}.gz").write_bytes(gzip.compress(file.read_bytes()))
        file.unlink()
    other = tmp_path / "other"
    write_beir(other, {"d": ("", "a text")}, {"x": query}, [("x", "d", 1)], "test")
    test_queries = read_split_queries(fitted, "test", RecordReport()).values()
    with pytest.raises(DataError, match=r"1 queries of the test set.*such as"):
        fit_module.refuse_test_queries({"other": load_data(other)}, test_queries)
    fit_module.refuse_test_queries({"other": load_data(root / "other")}, test_queries)


def test_guard_with_test_queries_of_other_splits_is_refused(root, tmp_path):
    """With few test queries, the verdict is over several splits of the pairs."""
    pairs = root / "pairs.jsonl"
    split_data(RecordSource(pairs), tmp_path / "split", SplitSettings(test=40))
    query = read_lines(tmp_path / "split" / "train.jsonl")[0]["query"]
    guard = write_beir(tmp_path / "b", {"d": ("", "a")}, {"x": query}, [("x", "d", 1)], "test")
    with pytest.raises(DataError, match="queries of the test set"):
        fit(root, tmp_path / "out", guard=guard, test=40)
