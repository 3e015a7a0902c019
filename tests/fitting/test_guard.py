"""`contaccum fit --guard`: the chosen model, its records, continuing after a kill, refused sets."""

from __future__ import annotations

import json
import random
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sample_texts import WORDS
from small_data import write_beir, write_lines
from tiny_models import tiny_encoder

import contaccum
from contaccum.cli import main
from contaccum.encoders.merge import WeightInterpolation
from contaccum.errors import ConfigError, UserError
from contaccum.evaluation.metrics import paired_bootstrap
from contaccum.fitting import pipeline
from contaccum.fitting.folder import FitFolder
from contaccum.merging import choice, scoring
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
    guard = record["guard"]
    [own, other] = guard["data_sets"]
    assert [row["weight"] for row in own["rows"]] == [0.0, 0.3, 0.5, 0.7, 1.0]
    assert (own["data"]["name"], other["data"]["name"]) == ("dev", "other")
    # Training is good for dev and bad for the guard set, so the chosen weight lies between.
    assert 0 < guard["weight"] < 1
    losses = {row["weight"]: row["difference"] for row in other["rows"] if row["weight"] > 0}
    assert losses[guard["weight"]] >= -0.07 > losses[1.0]
    base = contaccum.DualEncoder.from_pretrained(root / "fresh", device="cpu")
    trained = contaccum.DualEncoder.from_pretrained(folder.trained_model, device="cpu")
    expected = WeightInterpolation(base, trained).set_weight(guard["weight"])
    assert model_fingerprint(guarded.model) == model_fingerprint(expected)
    # The verdict is about this model.
    output = root / "evaluated.json"
    arguments = ["--data", str(folder.data / "test"), "--output", str(output)]
    assert main(["evaluate", str(folder.model), *arguments]) == 0
    score = json.loads(output.read_text())["metrics"]["NDCG@10"]
    assert score == pytest.approx(guarded.verdict.trained, abs=1e-9)
    dev_scores = {row["weight"]: row["NDCG@10"] for row in own["rows"]}
    assert record["scores"][2]["dev"] == dev_scores[guard["weight"]]


@pytest.mark.slow
def test_card_and_report_show_the_choice(guarded):
    record = json.loads(guarded.folder.record_file.read_text())
    card = (guarded.folder.model / "README.md").read_text()
    assert record["guard"]["table"] in card
    assert card.index(str(guarded.verdict)) < card.index("Merged: each weight is")
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
    result = fit(root, tmp_path / "out", guard_loss=0.07)
    # Two of ten scores were saved. The call that was killed is counted as well.
    assert num_scored == 3 + 8
    assert result.verdict == guarded.verdict
    assert model_fingerprint(result.model) == model_fingerprint(guarded.model)


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
