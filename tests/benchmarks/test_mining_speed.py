"""`contaccum bench mine` on a tiny encoder: the same negatives as sentence-transformers under equal rules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sample_texts import sentences

from contaccum import DualEncoder
from contaccum.benchmarks.mining import MiningBenchSettings, measure_mining
from contaccum.cli import main
from contaccum.errors import ConfigError


@pytest.fixture(scope="module")
def places(tiny_config: Any, tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Paths of a saved encoder, and of 60 pairs of 50 queries."""
    root = tmp_path_factory.mktemp("mining-speed")
    model = DualEncoder.from_backbone(
        tiny_config, tokenizer=tiny_tokenizer, pooling="mean", normalize=True, device="cpu"
    )
    model.save_pretrained(str(root / "encoder"))
    queries = sentences(50, 1)
    rows = zip([*queries, *queries[:10]], sentences(60, 2, 9), strict=True)
    (root / "pairs.jsonl").write_text("".join(json.dumps({"query": q, "positive": p}) + "\n" for q, p in rows))
    return {"model": str(root / "encoder"), "data": str(root / "pairs.jsonl")}


@pytest.mark.parametrize(
    "rules",
    [{}, {"range_min": 3}, {"absolute_margin": 0.02, "max_score": 0.95}, {"relative_margin": 0.01, "min_score": 0.5}],
)
def test_both_miners_find_the_same_negatives_under_equal_rules(places: dict[str, str], rules: dict[str, Any]) -> None:
    settings = MiningBenchSettings(**places, **rules, repeats=1, range_max=60)
    for record in measure_mining(settings, progress=lambda line: None):
        assert record["same_negatives"] == 1.0
        assert (record["queries"], record["pairs"], record["passages"]) == (50, 60, 60)
        assert record["speedup"] == pytest.approx(record["seconds_sentence_transformers"] / record["seconds"])


def test_command_writes_figures_and_their_settings(places: dict[str, str], tmp_path: Path) -> None:
    output = tmp_path / "mine.json"
    arguments = [places["model"], "--data", places["data"], "--limit", "20", "--repeats", "1", "--range_max", "8"]
    assert main(["bench", "mine", *arguments, "--output", str(output)]) == 0
    result = json.loads(output.read_text())
    assert [record["search"] for record in result["records"]] == ["faiss", "torch"]
    assert result["settings"]["limit"] == 20 and result["records"][0]["queries"] == 20
    assert result["records"][0]["stages"]["encode_passages_seconds"] > 0
    assert result["versions"]["sentence-transformers"] and result["machine"]["threads"] >= 1


def test_what_cannot_be_measured_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="repeats"):
        MiningBenchSettings("m", "d", repeats=0).check()
    assert main(["bench", "mine", "MODEL"]) == 2
    assert "--data" in capsys.readouterr().err
