"""docs/databases.md: each script is short and complete, and finds what `contaccum search` finds."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_data import write_lines

from contaccum.cli import main

PAGE = Path(__file__).parents[1] / "docs" / "databases.md"
MAX_LINES = 40
BM25_WEIGHT = 0.3
QUESTION = "title of text 17 and text 23"


def read_scripts(section: str) -> list[str]:
    """Return the Python scripts of a section of the page."""
    text = PAGE.read_text(encoding="utf-8").split(f"## {section}\n")[1].split("\n## ")[0]
    return re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def search_store(bm25_weight: float) -> tuple[list[str], list[float]]:
    """Return ids and scores of the 10 best documents by `contaccum search`."""
    run = Path(f"{bm25_weight}.trec")
    argv = ["search", "runs/mine/model", "--store", "stores/docs", "--queries", "questions.jsonl"]
    argv += ["--output", str(run), "--bm25_weight", str(bm25_weight), "--top_k", "10"]
    assert main([*argv, "--device", "cpu", "--no_progress"]) == 0
    lines = [line.split() for line in run.read_text(encoding="utf-8").splitlines()]
    return [line[2] for line in lines], [float(line[4]) for line in lines]


@pytest.fixture
def run_scripts(
    tiny_model_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], dict[str, Any]]:
    """Return a function that runs the scripts of a section and returns the last one's variables.

    The current folder has the model, the record of `fit` and the store that the page names.
    """
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_model_path, "runs/mine/model")
    Path("runs/mine/fit.json").write_text(json.dumps({"bm25_weight": BM25_WEIGHT}))
    documents = []
    for row in range(25):
        documents.append({"_id": f"id-{row}", "title": f"title {row}", "text": f"text {row} é"})
    write_lines(tmp_path / "docs.jsonl", documents)
    write_lines(tmp_path / "questions.jsonl", [{"_id": "q", "text": QUESTION}])
    argv = ["encode", "runs/mine/model", "--corpus", "docs.jsonl", "--output", "stores/docs"]
    argv += ["--bm25", "--format", "parquet", "--shard_size", "10", "--device", "cpu"]
    assert main([*argv, "--no_progress"]) == 0

    def run(section: str) -> dict[str, Any]:
        for script in read_scripts(section):
            assert len(script.splitlines()) <= MAX_LINES
            variables: dict[str, Any] = {}
            exec(compile(script, f"{PAGE.name}, {section}", "exec"), variables)
        return variables

    return run


@pytest.mark.long  # the packages take seconds to import
def test_qdrant_adds_the_bm25_of_contaccum_search(run_scripts):
    pytest.importorskip("qdrant_client")
    variables = run_scripts("Qdrant")
    hits = variables["search"](QUESTION)
    variables["client"].close()
    ids, scores = search_store(BM25_WEIGHT)
    assert [hit["id"] for hit in hits] == ids
    np.testing.assert_allclose([hit["score"] for hit in hits], scores, atol=1e-5)
    assert hits[0]["text"].startswith("text ")


@pytest.mark.long
def test_lancedb_searches_by_vectors_and_by_its_own_words(run_scripts):
    pytest.importorskip("lancedb")
    variables = run_scripts("LanceDB")
    variables["bm25_weight"] = 0.0
    hits = variables["search"](QUESTION)
    ids, _ = search_store(0.0)
    assert [hit["id"] for hit in hits] == ids
    variables["bm25_weight"] = 1.0
    assert {hit["id"] for hit in variables["search"](QUESTION)[:2]} == {"id-17", "id-23"}


@pytest.mark.long
def test_langchain_retriever_finds_what_contaccum_search_finds(run_scripts):
    pytest.importorskip("langchain_core")
    retriever = run_scripts("LangChain")["StoreRetriever"]()
    retriever.num_results = 10
    documents = retriever.invoke(QUESTION)
    ids, scores = search_store(BM25_WEIGHT)
    assert [document.id for document in documents] == ids
    found_scores = [document.metadata["score"] for document in documents]
    np.testing.assert_allclose(found_scores, scores, atol=1e-5)
    assert documents[0].page_content.startswith("text ")


@pytest.mark.long
def test_llamaindex_retriever_finds_what_contaccum_search_finds(run_scripts):
    pytest.importorskip("llama_index.core")
    retriever = run_scripts("LlamaIndex")["StoreRetriever"]()
    retriever.num_results = 10
    nodes = retriever.retrieve(QUESTION)
    ids, scores = search_store(BM25_WEIGHT)
    assert [node.node_id for node in nodes] == ids
    np.testing.assert_allclose([node.score for node in nodes], scores, atol=1e-5)
    assert nodes[0].text.startswith("text ")
