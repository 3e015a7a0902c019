"""`contaccum bench encode`: all sides give the same embeddings, and memory is measured where it is used."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from sample_texts import sentences

from contaccum import DualEncoder
from contaccum.benchmarks.encode import EncodeBenchSettings, MemoryBenchSettings, measure_speed
from contaccum.cli import main
from contaccum.data.passages import read_passages
from contaccum.data.records import RecordReport
from contaccum.errors import ConfigError


@pytest.fixture(scope="module")
def places(tiny_config: Any, tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Paths of a saved encoder, and of 40 passages of different lengths."""
    root = tmp_path_factory.mktemp("encode-speed")
    DualEncoder.from_backbone(
        tiny_config, tokenizer=tiny_tokenizer, pooling="mean", passage_prompt="text: ", device="cpu"
    ).save_pretrained(str(root / "encoder"))
    texts = [text * (1 + n % 7) for n, text in enumerate(sentences(40, 1))]
    lines = (json.dumps({"_id": str(n), "title": f"t{n}", "text": text}) + "\n" for n, text in enumerate(texts))
    (root / "corpus.jsonl").write_text("".join(lines))
    return {"model": str(root / "encoder"), "corpus": str(root / "corpus.jsonl")}


@pytest.mark.parametrize(("precision", "bound"), [("float32", 1e-5), ("bfloat16", 0.1)])
def test_all_sides_give_the_same_embeddings(places: dict[str, str], precision: str, bound: float) -> None:
    settings = EncodeBenchSettings(**places, limit=30, repeats=1, batch_size=4, precision=precision)
    records = measure_speed(settings, progress=lambda line: None)
    assert [record["rival"] for record in records] == ["sentence-transformers", "beir"]
    for record in records:
        assert record["documents"] == 30 and 0 < record["max_difference"] < bound
        speed, theirs = record["documents_per_second"], record["documents_per_second_rival"]
        assert record["speedup"] == pytest.approx(speed / theirs)


def test_command_writes_figures_and_their_settings(places: dict[str, str], tmp_path: Path) -> None:
    output = tmp_path / "encode.json"
    words = [places["model"], "--corpus", places["corpus"], "--repeats", "1", "--output", str(output)]
    assert main(["bench", "encode", *words]) == 0
    result = json.loads(output.read_text())
    assert result["settings"]["limit"] is None and result["records"][0]["documents"] == 40
    assert result["versions"]["sentence-transformers"] and result["machine"]["threads"] >= 1


@pytest.mark.slow
def test_stub_measures_the_memory_of_a_process_and_removes_its_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "memory.json"
    words = ["--stub", "--rows", "20000", "--shard_size", "1000", "--words", "50", "--folder", str(tmp_path)]
    assert main(["bench", "encode", *words, "--output", str(output), "--max_memory_mb", "10"]) == 1
    (record,) = json.loads(output.read_text())["records"]
    assert f"reached {record['peak_mb']:.0f} MB, more than 10" in capsys.readouterr().err
    # 20,000 rows of 384 numbers of two bytes, and their texts
    assert 14.6 < record["store_mb"] < 16 and 6 < record["corpus_mb"] < 9
    assert record["before_mb"] < record["at_the_end_mb"] <= record["peak_mb"]
    assert record["at_the_end_mb"] - record["after_a_tenth_mb"] < 8, "two thirds of what leaked embeddings would take"
    assert os.listdir(tmp_path) == ["memory.json"]


def test_made_up_passages_are_all_read(tmp_path: Path) -> None:
    from contaccum.benchmarks.encode import write_made_up_corpus

    write_made_up_corpus(tmp_path / "c.tsv", 10_003, 20)
    passages = list(read_passages(tmp_path / "c.tsv", RecordReport()))
    assert len({p.id for p in passages}) == len({p.text for p in passages}) == 10_003
    assert len(passages[-1].text.split()) == 20


def test_what_cannot_be_measured_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="repeats"):
        EncodeBenchSettings("m", "c", repeats=0).check()
    with pytest.raises(ConfigError, match="rows"):
        MemoryBenchSettings(rows=0).check()
    assert main(["bench", "encode", "MODEL"]) == 2
    assert "--corpus" in capsys.readouterr().err
    assert main(["bench", "encode", "--stub", "--batch_size", "3"]) == 2
    assert "--batch_size" in capsys.readouterr().err
