"""`contaccum mine` end to end on tiny models, and refused arguments."""

import json
from pathlib import Path

import pytest
from small_data import read_lines, write_pairs_to_mine

from contaccum.cli import main
from contaccum.files import provenance


@pytest.fixture
def pairs(tmp_path) -> Path:
    return write_pairs_to_mine(tmp_path / "pairs.jsonl")


def mine(*arguments: object) -> int:
    return main(["mine", *map(str, arguments), "--no_progress"])


def test_report_describes_models_data_and_settings(tiny_model_path, pairs, tmp_path, capsys):
    output = tmp_path / "new" / "hard.jsonl"
    arguments = ["--num_negatives", 2, "--relative_margin", 0.0, "--range_max", 30]
    arguments += ["--device", "cpu"]
    assert mine(tiny_model_path, "--data", pairs, "--output", output, *arguments) == 0
    record = json.loads(Path(f"{output}.report.json").read_text())
    out = capsys.readouterr().out
    assert (
        f"{record['queries_with_too_few']} of 36 queries have fewer than 2 mined negatives" in out
    )
    assert record["model"]["name"] == tiny_model_path
    assert len(record["model"]["fingerprint"]) == 64
    assert record["versions"] == provenance()["versions"]
    assert record["settings"]["range_max"] == 30
    assert record["settings"]["similarity"] == "cos"
    assert len(read_lines(output)) == 40


def test_a_device_that_is_not_there_is_refused_in_one_line(
    tiny_model_path, pairs, tmp_path, capsys
):
    arguments = ["--output", tmp_path / "o.jsonl", "--device", "cuda:99"]
    assert mine(tiny_model_path, "--data", pairs, *arguments) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("contaccum: error: --device 'cuda:99'")
    assert [path.name for path in tmp_path.iterdir()] == [pairs.name]
