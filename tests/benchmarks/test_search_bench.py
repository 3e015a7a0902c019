"""`contaccum bench search` at a small size: recall is of what was found, and beir finds the same documents."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from contaccum.benchmarks.search import SearchBenchSettings, made_up, measure_indexes
from contaccum.benchmarks.search_beir import differences, measure_beir
from contaccum.cli import main
from contaccum.errors import ConfigError

SMALL = {"rows": 2000, "dimension": 16, "queries": 50, "k": 10, "clusters": 20, "repeats": 1}


def quiet(line: str) -> None:
    pass


def test_recall_grows_with_the_lists_that_are_probed_and_ends_at_one() -> None:
    settings = SearchBenchSettings(**SMALL, indexes=["Flat", "IVF16,Flat@nprobe=1@nprobe=4@nprobe=16"])
    flat, *inverted = measure_indexes(settings, quiet)
    assert flat["recall"] == 1 and flat["bytes_per_vector"] == 64
    recalls = [record["recall"] for record in inverted]
    assert [record["parameters"] for record in inverted] == ["nprobe=1", "nprobe=4", "nprobe=16"]
    assert recalls == sorted(recalls) and recalls[0] < 0.99 and recalls[-1] == 1
    # 64 of the vector, 8 of its number, and the lists' own.
    assert 72 <= inverted[0]["bytes_per_vector"] < 80
    assert all(record["queries_per_second"] > 0 and record["build_seconds"] > 0 for record in inverted)


def test_embeddings_are_clustered_and_queries_lie_near_documents() -> None:
    documents, queries = made_up(SearchBenchSettings(**SMALL))
    np.testing.assert_allclose(np.linalg.norm(documents, axis=1), 1, rtol=1e-5)
    best = np.sort(queries @ documents.T, axis=1)
    assert (best[:, -1] > 0.6).all() and np.median(best) < 0.3


def test_beir_finds_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    (record,) = measure_beir(SearchBenchSettings(**SMALL), quiet)
    assert record["other_documents"] == 0 and record["same_documents"] > 0.9
    assert 0 < record["score_difference"] < 2e-6
    assert record["speedup"] == pytest.approx(record["seconds_beir"] / record["seconds"])


def test_another_document_is_told_from_rounding() -> None:
    ours = {"q": {"a": 0.9, "b": 0.5}}
    assert differences(ours, {"q": {"a": 0.9, "c": 0.5 - 1e-7}}) == {
        "same_documents": 0.0,
        "other_documents": 0,
        "score_difference": 0.0,
    }
    assert differences(ours, {"q": {"a": 0.8, "c": 0.4}})["other_documents"] == 1


def test_command_writes_figures_and_a_picture(tmp_path: Path) -> None:
    options = [f"--{name}={value}" for name, value in SMALL.items()]
    output = tmp_path / "search.json"
    assert main(["bench", "search", *options, "--indexes", "Flat", "SQ8", "--output", str(output)]) == 0
    result = json.loads(output.read_text())
    assert [record["index"] for record in result["records"]] == ["Flat", "SQ8"]
    assert result["settings"]["rows"] == 2000 and result["versions"]["faiss"]
    assert output.with_suffix(".png").stat().st_size > 5000
    assert main(["bench", "search", "--beir", *options, "--output", str(output)]) == 0
    assert json.loads(output.read_text())["records"][0]["other_documents"] == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--rows", "0"], "rows must be at least 1"),
        (["--indexes", "IVF4,Flat@nprobe=0", "--rows", "100"], "does not take parameters"),
        (["--store", "somewhere"], "go together"),
        (["--beir", "--indexes", "Flat"], "no effect with --beir"),
    ],
)
def test_what_cannot_be_measured_is_refused(options: list[str], words: str, tmp_path: Path) -> None:
    from contaccum.benchmarks.search import run

    with pytest.raises(ConfigError, match=words):
        run([*options, "--output", str(tmp_path / "x.json")])
