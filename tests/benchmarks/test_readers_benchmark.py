"""`contaccum bench readers`: what is compared does the same work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from contaccum.benchmarks.readers import COMPETITIONS, ReaderSettings, made_up
from contaccum.cli import main
from contaccum.data import DATA_FORMATS, read_records, sniff_format
from contaccum.errors import ConfigError


@pytest.mark.parametrize("name", COMPETITIONS)
def test_both_sides_read_the_same_records(tmp_path: Path, name: str) -> None:
    competition = COMPETITIONS[name]
    source = competition.write(tmp_path, made_up(60))
    ours = list(read_records(source))
    assert ours == list(competition.read(source)) and len(ours) == 60


def test_every_format_is_measured(tmp_path: Path) -> None:
    found = set()
    for name, competition in COMPETITIONS.items():
        (tmp_path / name).mkdir()
        found.add(sniff_format(competition.write(tmp_path / name, made_up(2))))
    assert found | {"triplets"} == set(DATA_FORMATS)


def test_command_writes_ratios_and_memory_of_both_sides(tmp_path: Path) -> None:
    output = tmp_path / "readers.json"
    arguments = ["--rows", "2000", "--repeats", "3", "--formats", "dpr", f"--output={output}"]
    assert main(["bench", "readers", *arguments]) == 0
    result = json.loads(output.read_text())
    (record,) = result["records"]
    assert result["settings"] == {"rows": 2000, "repeats": 3, "formats": ["dpr"], "memory": True}
    assert record["ratio_low"] <= record["ratio"] <= record["ratio_high"]
    assert record["records_per_second"] == pytest.approx(2000 / record["seconds"])
    assert 0.2 < record["ratio"] < 5  # measured at rest: about 1
    assert record["file_mb"] > 12 and record["rival_memory_mb"] > record["file_mb"] / 2
    assert record["memory_mb"] < record["rival_memory_mb"] / 2


def test_what_cannot_be_read_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="'xlsx' is not one of dpr, tevatron"):
        ReaderSettings(formats=["xlsx"]).check()
    with pytest.raises(ConfigError, match="rows and repeats must be at least 1"):
        ReaderSettings(rows=0).check()
    assert main(["bench", "readers", "--row", "3"]) == 2
    assert "see contaccum bench readers --help" in capsys.readouterr().err
