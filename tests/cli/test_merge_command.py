"""`contaccum merge`: the model that is written, refused arguments."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from sentence_transformers import SentenceTransformer
from small_data import write_judged_places, write_judged_sentences
from tiny_models import tiny_encoder

from contaccum import DualEncoder
from contaccum.cli import main
from contaccum.merging import merge_models
from contaccum.retrieval.encode import model_fingerprint


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model, a model that was trained from it, dev data and guard data."""
    root = tmp_path_factory.mktemp("merge")
    tiny_encoder().save_pretrained(str(root / "base"))
    trained = tiny_encoder()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.3)
    trained.save_pretrained(str(root / "trained"))
    tiny_encoder(tied=False).save_pretrained(str(root / "two_towers"))
    write_judged_places(root / "own")
    write_judged_sentences(root / "other")
    return root


def merge(root: Path, output: Path, *options: str, base: str = "base") -> int:
    argv = ["merge", str(root / base), str(root / "trained"), "--data", str(root / "own")]
    argv += ["--guard", str(root / "other"), "--device", "cpu", "--output", str(output)]
    return main([*argv, *options])


def evaluate(root: Path, model: str, data: str, tmp_path: Path) -> float:
    """Return the nDCG@10 that `contaccum evaluate` computes."""
    output = tmp_path / f"{model}-{data}.json"
    argv = ["evaluate", str(root / model), "--data", str(root / data), "--output", str(output)]
    assert main([*argv, "--device", "cpu", "--no_progress"]) == 0
    score: float = json.loads(output.read_text())["metrics"]["NDCG@10"]
    return score


def test_best_model_that_loses_little_is_written(root, tmp_path, capsys):
    output = tmp_path / "out-0.5"
    assert merge(root, output, "--guard_loss", "0", "--weights", "0.4") == 0
    lines = capsys.readouterr().out.splitlines()
    scores: dict[str, dict[float, float]] = {}
    for line in lines[:6]:
        name, _, score = line.partition(", weight ")
        weight, _, value = score.partition(": nDCG@10 ")
        scores.setdefault(name, {})[float(weight)] = float(value)
    dev, guard = scores["dev"], scores[str(root / "other")]
    assert list(dev) == list(guard) == [0.0, 0.4, 1.0]
    for model, weight in (("base", 0.0), ("trained", 1.0)):
        assert dev[weight] == pytest.approx(evaluate(root, model, "own", tmp_path), abs=5e-5)
        assert guard[weight] == pytest.approx(evaluate(root, model, "other", tmp_path), abs=5e-5)
    allowed = [weight for weight in guard if guard[weight] >= guard[0.0]]
    chosen = max(allowed, key=lambda weight: dev[weight])
    base, trained = (DualEncoder.from_pretrained(root / name) for name in ("base", "trained"))
    written = DualEncoder.from_pretrained(output)
    expected = merge_models(base, trained, chosen)
    assert model_fingerprint(written) == model_fingerprint(expected)
    assert f"{chosen:g} * trained model" in lines[6]
    assert f"{chosen:g} * trained model" in (output / "README.md").read_text()
    assert SentenceTransformer(str(output), device="cpu").encode_query(["a"]).shape == (1, 16)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"--guard": "nowhere"}, "nowhere"),
        ({"--output": "OWN"}, "exists already"),
        ({"base": "two_towers"}, "two towers"),
    ],
)
def test_wrong_arguments_give_one_line(root, tmp_path, capsys, options, message):
    base = options.pop("base", "base")
    words = []
    for name, value in options.items():
        words += [name, str(root / "own") if value == "OWN" else value]
    assert merge(root, tmp_path / "out", *words, base=base) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert message in error
    assert list(tmp_path.iterdir()) == []
