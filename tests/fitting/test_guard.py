"""`contaccum fit --guard`: the chosen model, its records, continuing after a kill, refused sets."""

from __future__ import annotations

import gzip
import json
import random
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from sample_texts import WORDS
from small_data import write_beir, write_lines
from tiny_models import tiny_encoder

import contaccum
from contaccum.cli import main
from contaccum.encoders.adapters import add_adapter, has_adapter
from contaccum.encoders.interpolation import WeightInterpolation
from contaccum.errors import ConfigError, DataError, UserError
from contaccum.evaluation.metrics import paired_bootstrap
from contaccum.fitting import guard, pipeline, result
from contaccum.fitting.folder import FitFolder
from contaccum.fitting.verdict import collect_warnings, compute_verdict
from contaccum.merging import choice, scoring
from contaccum.retrieval.encode import model_fingerprint
from contaccum.tuning.choice import Choice

HALF = len(WORDS) // 2
SETTINGS: dict[str, object] = {
    "method": "contaccum",
    "temperature": 0.05,
    "total_train_batch_size": 32,
    "num_train_epochs": 3,
    "bank_size": 64,
    "learning_rate": 0.01,
    "use_cpu": True,
    "disable_tqdm": True,
}


@pytest.fixture(autouse=True, scope="module")
def _few_resamples() -> Any:
    """Compute intervals from few resamples, which is faster."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choice, "paired_bootstrap", partial(paired_bootstrap, resamples=200))
        yield


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


def fit(root: Path, output: Path, **options: Any) -> pipeline.FitResult:
    settings: dict[str, Any] = {**SETTINGS, "guard": [root / "other"], **options}
    return contaccum.fit(
        root / "pairs.jsonl",
        model=str(root / "fresh"),
        budget="10m",
        output=output,
        test=100,
        **settings,
    )


@pytest.fixture(scope="module")
def guarded(root: Path) -> pipeline.FitResult:
    return fit(root, root / "out", guard_loss=0.07)


@pytest.mark.slow
def test_model_of_the_chosen_weight_is_kept_and_judged(root, guarded):
    folder = guarded.folder
    record = json.loads(folder.record_file.read_text())
    choice_record = record["guard"]
    [own, other] = choice_record["data_sets"]
    assert [row["weight"] for row in own["rows"]] == [0.0, 0.3, 0.5, 0.7, 1.0]
    assert (own["data"]["name"], other["data"]["name"]) == ("dev", "other")
    # Training is good for dev and bad for the guard set, so the chosen weight lies between.
    assert 0 < choice_record["weight"] < 1
    losses = {row["weight"]: row["difference"] for row in other["rows"] if row["weight"] > 0}
    assert losses[choice_record["weight"]] >= -0.07 > losses[1.0]
    base = contaccum.DualEncoder.from_pretrained(root / "fresh", device="cpu")
    trained = contaccum.DualEncoder.from_pretrained(folder.trained_model, device="cpu")
    expected = WeightInterpolation(base, trained).set_weight(choice_record["weight"])
    assert model_fingerprint(guarded.model) == model_fingerprint(expected)
    # The verdict is about this model.
    output = root / "evaluated.json"
    arguments = ["--data", str(folder.data / "test"), "--output", str(output)]
    assert main(["evaluate", str(folder.model), *arguments]) == 0
    score = json.loads(output.read_text())["metrics"]["NDCG@10"]
    assert score == pytest.approx(guarded.verdict.trained, abs=1e-9)
    dev_scores = {row["weight"]: row["NDCG@10"] for row in own["rows"]}
    assert record["scores"][2]["dev"] == dev_scores[choice_record["weight"]]


@pytest.mark.slow
def test_card_and_report_show_the_choice(guarded):
    record = json.loads(guarded.folder.record_file.read_text())
    card = (guarded.folder.model / "README.md").read_text()
    assert record["guard"]["table"] in card
    assert card.index(str(guarded.verdict)) < card.index("Merged: each parameter is")
    page = guarded.report.read_text()
    assert "What it keeps" in page
    assert f"{record['guard']['weight']:g} (chosen)" in page
    assert "<h2>Training</h2>" in page  # the curves are read from the folder of the training


class Killed(BaseException):
    """An exception in place of SIGKILL: nothing catches it."""


def copy_as_trained(folder: FitFolder, copy: Path) -> None:
    """Copy a finished fit as it was after the final training."""
    ignored = shutil.ignore_patterns("model", "guard*.json", "report.html")
    shutil.copytree(folder.path, copy, ignore=ignored)
    request = json.loads(folder.record_file.read_text())["request"]
    FitFolder(copy).record_file.write_text(json.dumps({"request": request}))


@pytest.mark.slow
def test_fit_that_was_killed_while_it_chose_a_weight_continues(
    root, guarded, tmp_path, monkeypatch
):
    copy_as_trained(guarded.folder, tmp_path / "out")
    score_run = scoring.score_run
    num_scored = 0

    def kill_at_third(*args: Any) -> Any:
        nonlocal num_scored
        num_scored += 1
        if num_scored == 3:
            raise Killed
        return score_run(*args)

    monkeypatch.setattr(scoring, "score_run", kill_at_third)
    with pytest.raises(Killed):
        fit(root, tmp_path / "out", guard_loss=0.07)
    assert not (tmp_path / "out" / "model").exists()
    with pytest.raises(ConfigError, match="this folder has an unfinished fit with guard="):
        fit(root, tmp_path / "out", guard_loss=0.3)
    continued = fit(root, tmp_path / "out", guard_loss=0.07)
    # Two of ten scores were saved. The call that was killed is counted as well.
    assert num_scored == 3 + 8
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
    with pytest.raises(UserError, match="two of the guard sets have the same data"):
        fit(root, tmp_path / "out", guard=[root / "other", root / "other"])


def test_time_of_the_guard_is_part_of_the_budget(root, tmp_path, monkeypatch):
    monkeypatch.setattr(pipeline.Guard, "estimate_seconds", lambda *args: 10_000.0)
    with pytest.raises(ConfigError, match=r"documents and the guard sets takes 2\.8 hours"):
        fit(root, tmp_path / "out")


def save_adapted(root: Path, folder: Path) -> None:
    """Save a model with an adapter over the untrained model."""
    model = contaccum.DualEncoder.from_pretrained(root / "fresh", device="cpu")
    add_adapter(model, 2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    model.save_pretrained(str(folder))


def test_adapter_is_merged_into_the_weights_of_the_chosen_model(root, tmp_path):
    """The base model of a training with an adapter has an adapter too, which changes nothing."""
    folder = FitFolder(tmp_path / "out")
    save_adapted(root, folder.trained_model)
    shutil.copytree(root / "other", folder.data / "dev")
    base = contaccum.DualEncoder.from_pretrained(root / "fresh", device="cpu")
    add_adapter(base, 2)
    lines: list[str] = []
    guard_sets = guard.Guard([root / "other"], 1.0, folder)
    guard_sets.read_sets()
    guard_sets.choose(base, "fresh", 32, False, lines.append)
    record = json.loads(folder.guard_file.read_text())
    assert record["line"] == lines[-1]
    chosen = contaccum.DualEncoder.from_pretrained(folder.model, device="cpu")
    expected = guard.load_at_weight(base, folder.trained_model, record["weight"])
    assert not has_adapter(chosen)
    assert model_fingerprint(chosen) == model_fingerprint(expected)


def test_model_of_another_split_is_merged_with_the_chosen_weight(root, tmp_path):
    save_adapted(root, tmp_path)
    base = contaccum.DualEncoder.from_pretrained(root / "fresh", device="cpu")
    texts = ["one", "two three"]
    at_one = guard.load_at_weight(base, tmp_path, 1.0).encode_query(texts)
    unmerged = guard.load_at_weight(base, tmp_path, None).encode_query(texts)
    assert at_one == pytest.approx(unmerged, abs=1e-5)
    at_zero = guard.load_at_weight(base, tmp_path, 0.0).encode_query(texts)
    assert (at_zero == base.encode_query(texts)).all()
    between = guard.load_at_weight(base, tmp_path, 0.5).encode_query(texts)
    assert not (abs(between - at_zero) < 1e-4).all()
    assert not (abs(between - at_one) < 1e-4).all()


@pytest.mark.parametrize("is_compressed", [False, True])
def test_guard_with_queries_of_the_test_set_is_refused(root, tmp_path, is_compressed):
    """The test set is read as BEIR folders are; it may be compressed, and have other queries."""
    fitted = tmp_path / "fitted"
    queries = {"q": "What is  Rain", "not judged": "word"}
    write_beir(fitted, {"d": ("", "a text")}, queries, [("q", "d", 1)], "test")
    if is_compressed:
        file = fitted / "queries.jsonl"
        Path(f"{file}.gz").write_bytes(gzip.compress(file.read_bytes()))
        file.unlink()
    other = tmp_path / "other"
    write_beir(other, {"d": ("", "a text")}, {"x": "what is rain"}, [("x", "d", 1)], "test")
    sets = guard.Guard([other], 0.01, FitFolder(tmp_path))
    sets.read_sets()
    with pytest.raises(DataError, match="has 1 queries of the test set"):
        sets.refuse_test_queries(fitted)
    sets = guard.Guard([root / "other"], 0.01, FitFolder(tmp_path))
    sets.read_sets()
    sets.refuse_test_queries(fitted)


def test_bm25_is_named_even_if_the_base_model_is_kept():
    queries = [f"q{number}" for number in range(20)]
    scores = dict.fromkeys(queries, 0.5)
    verdict = compute_verdict(scores, scores, dict.fromkeys(queries, 0.9))
    choice = Choice(trial=0, settings={}, score=0.9, against_base={}, warnings=[])
    warnings = result._collect_guarded_warnings(verdict, choice, {"weight": 0, "warnings": []})
    assert warnings[0] == result._BASE_IS_KEPT
    assert "BM25 scores 0.900" in warnings[1]


@pytest.mark.parametrize("weight", [0.0, 0.5])
def test_warnings_are_about_the_chosen_weight(weight):
    """Dev and test agree about weight 0.5, although the unmerged model is better on dev."""
    queries = [f"q{number}" for number in range(20)]
    scores = dict.fromkeys(queries, 0.5)
    verdict = compute_verdict(scores, scores, dict.fromkeys(queries, 0.1))
    trial_choice = Choice(
        trial=0,
        settings={},
        score=0.9,
        against_base={"difference": 0.4, "low": 0.3, "high": 0.5},
        warnings=[],
    )
    row = {"weight": 0.5, "NDCG@10": 0.5, "difference": 0.0, "low": -0.1, "high": 0.1}
    rows = [{"weight": 0.0, "NDCG@10": 0.5}, row]
    record = {"weight": weight, "data_sets": [{"rows": rows}], "warnings": []}
    warnings = result._collect_guarded_warnings(verdict, trial_choice, record)
    assert warnings == ([result._BASE_IS_KEPT] if weight == 0 else [])
    assert any("dev and test disagree" in line for line in collect_warnings(verdict, trial_choice))


def test_estimate_counts_an_encoding_of_each_weight(root, tmp_path, monkeypatch):
    """The guard set has 60 documents. Query-side training leaves their embeddings unchanged."""
    monkeypatch.setattr(guard, "measure_seconds_per_text", lambda *args: 0.5)
    base = tiny_encoder()
    sets = guard.Guard([root / "other"], 0.01, FitFolder(tmp_path))
    sets.read_sets()
    assert sets.estimate_seconds(base, 10.0, 32, is_query_side=True) == 10 + 60 * 0.5
    assert sets.estimate_seconds(base, 10.0, 32, is_query_side=False) == 5 * (10 + 60 * 0.5)
