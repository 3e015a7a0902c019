"""docs/databases.md: each script is short and complete, and finds what `contaccum search` finds."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from small_data import write_lines

from contaccum.cli import main

PAGE = Path(__file__).parents[1] / "docs" / "databases.md"
MAX_LINES = 40
QUESTION = "title of text 17 and text 23"
RunScripts = Callable[[str, float], tuple[list[str], list[float]]]


@pytest.fixture
def run_scripts(
    tiny_model_path: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> RunScripts:
    """Return a function that runs the scripts of a section with a weight of BM25.

    It returns the ids and scores that they print. The current folder has the model and the store
    that the page names.
    """
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_model_path, "runs/mine/model")
    write_lines(
        tmp_path / "docs.jsonl",
        [{"_id": f"id-{n}", "title": f"title {n}", "text": f"text {n} é"} for n in range(25)],
    )
    argv = ["encode", "runs/mine/model", "--corpus", "docs.jsonl", "--output", "stores/docs"]
    argv += ["--bm25", "--format", "parquet", "--shard_size", "10", "--device", "cpu"]
    assert main([*argv, "--no_progress"]) == 0

    def run(section: str, bm25_weight: float) -> tuple[list[str], list[float]]:
        Path("runs/mine/model/bm25_weight.json").write_text(
            json.dumps({"bm25_weight": bm25_weight})
        )
        text = PAGE.read_text(encoding="utf-8").split(f"## {section}\n")[1].split("\n## ")[0]
        for script in re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            assert len(script.splitlines()) <= MAX_LINES
            capsys.readouterr()
            script = script.replace("what is rain", QUESTION)
            exec(compile(script, f"{PAGE.name}, {section}", "exec"), {})
        lines = re.findall(r"^(-?\d\.\d{3}) (id-\d+) text ", capsys.readouterr().out, re.MULTILINE)
        return [passage_id for _, passage_id in lines], [float(score) for score, _ in lines]

    return run


def search_store(num_results: int, bm25_weight: float) -> tuple[list[str], list[float]]:
    """Return ids and scores of the best documents by `contaccum search`."""
    write_lines(Path("questions.jsonl"), [{"_id": "q", "text": QUESTION}])
    argv = ["search", "runs/mine/model", "--store", "stores/docs", "--queries", "questions.jsonl"]
    argv += ["--output", "run.trec", "--bm25_weight", str(bm25_weight), "--device", "cpu"]
    assert main([*argv, "--top_k", str(num_results), "--no_progress"]) == 0
    lines = [line.split() for line in Path("run.trec").read_text(encoding="utf-8").splitlines()]
    return [line[2] for line in lines], [float(line[4]) for line in lines]


@pytest.mark.long  # each of the packages takes seconds to import
@pytest.mark.parametrize(
    ("section", "package", "num_results"),
    [
        ("Qdrant", "qdrant_client", 10),
        ("LangChain", "langchain_core", 4),
        ("LlamaIndex", "llama_index.core", 4),
    ],
)
def test_scripts_add_bm25_as_contaccum_search_does(run_scripts, section, package, num_results):
    pytest.importorskip(package)
    ids, scores = run_scripts(section, 0.3)
    expected_ids, expected_scores = search_store(num_results, 0.3)
    assert ids == expected_ids
    np.testing.assert_allclose(scores, expected_scores, atol=1e-3)


@pytest.mark.long
@pytest.mark.parametrize("bm25_weight", [0.0, 1.0])
def test_lancedb_searches_by_vectors_and_by_its_own_bm25(run_scripts, bm25_weight):
    pytest.importorskip("lancedb")
    ids, _ = run_scripts("LanceDB", bm25_weight)
    assert len(ids) == 10
    if bm25_weight == 0.0:
        assert ids == search_store(10, 0.0)[0]
    else:
        assert set(ids[:2]) == {"id-17", "id-23"}
