"""`contaccum merge`: table, chosen model, repeated commands, refused arguments."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_transformers import SentenceTransformer
from small_data import write_judged_places, write_judged_sentences
from tiny_models import bert_config, tiny_encoder, word_tokenizer

from contaccum import DualEncoder
from contaccum.cli import main
from contaccum.encoders.interpolation import WeightInterpolation
from contaccum.encoders.query_tower import train_query_tower_alone
from contaccum.encoders.settings import get_max_length
from contaccum.evaluation.metrics import paired_bootstrap
from contaccum.merging import choice, scoring
from contaccum.retrieval.encode import model_fingerprint


@pytest.fixture(autouse=True)
def _few_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute intervals from few resamples, which is faster."""
    monkeypatch.setattr(choice, "paired_bootstrap", partial(paired_bootstrap, resamples=200))


def move_weights(model: torch.nn.Module, size: float) -> None:
    """Change all weights that can be trained, always by the same numbers."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=size)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model, two models that were trained from it, own data and guard data."""
    root = tmp_path_factory.mktemp("merge")
    tiny_encoder().save_pretrained(str(root / "base"))
    trained = tiny_encoder()
    move_weights(trained, 0.3)
    trained.save_pretrained(str(root / "trained"))
    query_side = tiny_encoder()
    train_query_tower_alone(query_side)
    move_weights(query_side, 0.3)
    query_side.save_pretrained(str(root / "query_side"))
    write_judged_places(root / "own")
    write_judged_sentences(root / "other")
    return root


def merge(root: Path, *options: object, base: str = "base", model: str = "trained") -> int:
    argv = ["merge", str(root / base), str(root / model)]
    argv += ["--data", str(root / "own"), "--guard", str(root / "other")]
    argv += ["--device", "cpu", "--no_progress"]
    return main([*argv, *map(str, options)])


def load(folder: Path) -> DualEncoder:
    return DualEncoder.from_pretrained(folder, device="cpu")


def evaluate(root: Path, model: str, data: str, tmp_path: Path) -> float:
    """Return the nDCG@10 that `contaccum evaluate` computes."""
    output = tmp_path / f"{model}-{data}.json"
    argv = ["evaluate", str(root / model), "--data", str(root / data), "--output", str(output)]
    assert main([*argv, "--device", "cpu", "--no_progress"]) == 0
    score: float = json.loads(output.read_text())["metrics"]["NDCG@10"]
    return score


def get_scores(record: dict[str, Any], data_set: int) -> dict[float, float]:
    rows = record["data_sets"][data_set]["rows"]
    return {row["weight"]: row["NDCG@10"] for row in rows}


def test_table_and_chosen_model_are_written(root, tmp_path, capsys):
    output = tmp_path / "out-0.5"
    assert merge(root, "--guard_loss", 1, "--output", output) == 0
    printed = capsys.readouterr().out
    record = json.loads((tmp_path / "out-0.5.json").read_text())
    own_scores = get_scores(record, 0)
    assert list(own_scores) == [0.0, 0.3, 0.5, 0.7, 1.0]
    assert own_scores[record["weight"]] == max(own_scores.values())
    assert record["table"] in printed
    assert record["rule"] in printed and printed.index("Rule:") < printed.index("| weight")
    assert "so it is optimistic" in printed
    page = (tmp_path / "out-0.5.md").read_text()
    card = (output / "README.md").read_text()
    assert record["table"] in page and record["table"] in card
    assert card.startswith("---\n")
    expected = WeightInterpolation(load(root / "base"), load(root / "trained"))
    expected_model = expected.set_weight(record["weight"])
    if record["weight"] == 0:
        expected_model = load(root / "base")
    assert model_fingerprint(load(output)) == model_fingerprint(expected_model)
    assert SentenceTransformer(str(output), device="cpu").encode_query(["a"]).shape == (1, 16)


def test_ends_have_the_scores_of_both_models(root, tmp_path):
    assert merge(root, "--weights", 0.5, "--output", tmp_path / "out") == 0
    record = json.loads((tmp_path / "out.json").read_text())
    for number, data in enumerate(("own", "other")):
        scores = get_scores(record, number)
        assert scores[0.0] == evaluate(root, "base", data, tmp_path)
        assert scores[1.0] == evaluate(root, "trained", data, tmp_path)


def test_lengths_and_similarity_hold_for_the_scores_only(root, tmp_path):
    options = ["--query_max_length", 5, "--passage_max_length", 7, "--similarity", "dot"]
    assert merge(root, "--guard_loss", 1, *options, "--output", tmp_path / "out") == 0
    record = json.loads((tmp_path / "out.json").read_text())
    assert record["query_max_length"] == 5
    assert record["passage_max_length"] == 7
    assert record["similarity"] == "dot"
    expected = load(root / "trained" if record["weight"] else root / "base")
    merged = load(tmp_path / "out")
    assert get_max_length(merged, "query") == get_max_length(expected, "query") != 5
    assert get_max_length(merged, "document") == get_max_length(expected, "document") != 7


def test_folders_of_the_same_name_are_different_sets(root, tmp_path, capsys):
    """`contaccum split` calls its folders dev and test, whatever the data."""
    write_judged_sentences(tmp_path / "a/dev")
    write_judged_places(tmp_path / "b/dev")
    corpus = tmp_path / "b/dev/corpus.jsonl"
    corpus.write_text(corpus.read_text().replace("sits", "lies"))  # --data has these places too
    guards = [tmp_path / "a/dev", tmp_path / "b/dev"]
    assert merge(root, "--weights", 0.5, "--guard", *guards) == 0
    assert merge(root, "--guard", guards[0], guards[0]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.endswith("--guard: two sets are called a/dev; name each set once")


def test_without_output_nothing_is_written(root, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert merge(root, "--weights", 0.5) == 0
    assert "nothing was written" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_base_is_written_if_every_weight_loses_too_much(root, tmp_path, capsys):
    """Own data and guard data are exchanged, so that training has lost on the guard data."""
    output = tmp_path / "out"
    argv = ["merge", str(root / "trained"), str(root / "base"), "--data", str(root / "other")]
    argv += ["--guard", str(root / "own"), "--weights", "0.9", "--guard_loss", "0"]
    argv += ["--device", "cpu", "--no_progress", "--output", str(output)]
    assert main(argv) == 0
    record = json.loads((tmp_path / "out.json").read_text())
    assert record["weight"] == 0
    assert "keep the base model" in capsys.readouterr().out
    assert model_fingerprint(load(output)) == model_fingerprint(load(root / "trained"))
    assert (
        "Not merged: these are the weights of the base model" in (output / "README.md").read_text()
    )


class Killed(BaseException):
    """An exception in place of SIGKILL: nothing catches it."""


def test_repeated_command_scores_only_what_is_missing(root, tmp_path, monkeypatch):
    """The first command is killed while it scores the second weight of three."""
    score_run = scoring.score_run
    num_scored = 0

    def count(*args: Any) -> Any:
        nonlocal num_scored
        num_scored += 1
        if num_scored == 2:
            raise Killed
        return score_run(*args)

    monkeypatch.setattr(scoring, "score_run", count)
    options = ["--weights", 0.5, "--output"]
    with pytest.raises(Killed):
        merge(root, *options, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out.scores.json"]
    assert merge(root, *options, tmp_path / "out") == 0
    # One of six scores was saved. The call that was killed is counted as well.
    assert num_scored == 2 + 5
    assert merge(root, *options, tmp_path / "other") == 0
    first = json.loads((tmp_path / "out.json").read_text())
    assert first == json.loads((tmp_path / "other.json").read_text())


def test_documents_are_encoded_once_if_their_tower_is_unchanged(root, tmp_path, monkeypatch):
    encode_texts = scoring.encode_texts
    texts: list[list[str]] = []

    def record_texts(model: Any, documents: list[str], *args: Any) -> Any:
        texts.append(documents)
        return encode_texts(model, documents, *args)

    monkeypatch.setattr(scoring, "encode_texts", record_texts)
    assert merge(root, "--output", tmp_path / "out", model="query_side") == 0
    assert len(texts) == 2  # once for each data set
    record = json.loads((tmp_path / "out.json").read_text())
    assert record["documents_unchanged"]
    scores = get_scores(record, 0)
    assert scores[1.0] == evaluate(root, "query_side", "own", tmp_path)
    texts.clear()
    assert merge(root, "--weights", 0.5) == 0
    assert len(texts) == 6  # for each of three weights and two data sets


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--weights", "1.5"], "weight 1.5: the weight of the trained model must be between"),
        (["--guard_loss", "-1"], "guard_loss=-1: the allowed loss"),
        (["--guard", "nowhere"], "nowhere"),
        (["--guard", "OWN"], "has the same data as"),
        (["--split", "dev"], "dev"),
        (["--output", "OWN"], "exists already"),
        (["--output", "."], "--output .: name a new folder"),
    ],
)
def test_wrong_options_give_one_line(root, tmp_path, monkeypatch, capsys, options, message):
    monkeypatch.chdir(tmp_path)
    options = [str(root / "own") if option == "OWN" else option for option in options]
    assert merge(root, *options) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert message in error
    assert list(tmp_path.iterdir()) == []


def test_base_of_another_architecture_gives_one_line(root, tmp_path, capsys):
    wide = DualEncoder.from_backbone(
        bert_config(1, 32, 16),
        tokenizer=word_tokenizer(),
        pooling="mean",
        normalize=True,
        device="cpu",
    )
    wide.save_pretrained(str(tmp_path / "wide"))
    capsys.readouterr()
    output = tmp_path / "out"
    assert merge(root, "--output", output, base=str(tmp_path / "wide")) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert re.search(r"cannot be merged: the weight \S+ has the shape \(\d+, 32\)", error)
    assert [path.name for path in tmp_path.iterdir()] == ["wide"]


def test_same_model_twice_gives_one_line(root, capsys):
    assert merge(root, model="base") == 2
    assert "there is nothing to merge" in capsys.readouterr().err
