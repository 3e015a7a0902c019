"""The scripts for studies: what they write is what training and evaluation read."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from sample_texts import sentences
from transformers import AutoModel

from contaccum.data import load_beir_folder, load_training_data

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted(str(path.relative_to(ROOT)) for folder in ("eval", "scripts") for path in (ROOT / folder).glob("*.py"))


@pytest.fixture
def run_script(monkeypatch: pytest.MonkeyPatch) -> Any:
    def run(script: str, *argv: Any) -> None:
        monkeypatch.setattr(sys, "path", list(sys.path))
        monkeypatch.setattr(sys, "argv", [script, *map(str, argv)])
        runpy.run_path(str(ROOT / script), run_name="__main__")

    return run


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_shows_its_options(run_script: Any, script: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as stopped:
        run_script(script, "--help")
    assert stopped.value.code == 0 and capsys.readouterr().out.startswith("usage: ")


def test_split_pairs_holds_out_passages_and_loses_none(run_script: Any, tmp_path: Path, capsys: Any) -> None:
    source = tmp_path / "pairs.jsonl"
    queries, passages = sentences(60, 1), sentences(30, 2, 9)
    pairs = [{"query": query, "positive": passages[i % 30]} for i, query in enumerate(queries)]
    source.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    run_script("eval/split_pairs.py", source, tmp_path / "out", "--dev", "0.2", "--test", "0.2")
    trained = load_training_data(tmp_path / "out" / "train.jsonl").dataset["positive"]
    held_out = [
        text["text"] for part in ("dev", "test") for text in load_beir_folder(tmp_path / "out" / part).corpus.values()
    ]
    assert len(set(trained)) + len(held_out) == 30 and not set(trained) & set(held_out)
    assert held_out and set(trained) | set(held_out) == set(passages)
    with pytest.raises(SystemExit) as stopped:
        run_script("eval/split_pairs.py", tmp_path / "none.jsonl", tmp_path / "other")
    assert stopped.value.code == 2
    assert capsys.readouterr().err.startswith("split_pairs: error:") and not (tmp_path / "other").exists()


def test_small_backbone_cuts_the_first_layers_or_draws_fresh_weights(run_script, tiny_model_path, tmp_path):
    def made(name: str, *argv: Any) -> Any:
        run_script("eval/small_backbone.py", tiny_model_path, tmp_path / name, *argv)
        return AutoModel.from_pretrained(tmp_path / name)

    whole, cut = AutoModel.from_pretrained(tiny_model_path), made("slice", "--layers", 1)
    assert len(cut.encoder.layer) == 1 < len(whole.encoder.layer)
    mine, theirs = (model.encoder.layer[0].state_dict() for model in (cut, whole))
    assert all(mine[key].equal(theirs[key]) for key in theirs)

    fresh = [made(f"fresh-{n}", "--layers", 1, "--hidden_size", 64, "--seed", seed) for n, seed in enumerate((0, 0, 1))]
    a, b, c = (model.encoder.layer[0].attention.self.query.weight for model in fresh)
    assert a.shape == (64, 64) and a.equal(b) and not a.equal(c)
    with pytest.raises(SystemExit, match="no bert of 99 layers"):
        made("deep", "--layers", 99)
