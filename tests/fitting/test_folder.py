"""The output folder of `contaccum fit`: which calls may continue in it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from contaccum.errors import ConfigError
from contaccum.fitting.folder import FitFolder, hash_content


def open_folder(path: Path, **request: object) -> FitFolder:
    folder = FitFolder(path)
    folder.open(request)
    return folder


def test_finished_fit_is_kept_after_its_store_was_removed(tmp_path):
    folder = open_folder(tmp_path / "out", model="a")
    record = {"request": {"model": "a"}, "verdict": {"line": "BETTER"}}
    folder.record_file.write_text(json.dumps(record))
    folder.report.write_text("a report")
    for model in ("a", "b"):
        with pytest.raises(ConfigError, match=r"has a finished fit \(BETTER\)"):
            open_folder(tmp_path / "out", model=model)
    assert json.loads(folder.record_file.read_text()) == record


def test_other_call_is_refused_if_only_the_store_was_removed(tmp_path):
    folder = open_folder(tmp_path / "out", model="a")
    folder.baselines_file.write_text("{}")
    open_folder(tmp_path / "out", model="a")
    with pytest.raises(ConfigError, match="has an unfinished fit with model=a"):
        open_folder(tmp_path / "out", model="b")


def test_folder_can_be_used_after_a_short_budget_and_then_refused_data(tmp_path):
    folder = open_folder(tmp_path / "out", data="a")
    # They are written if the budget is refused.
    folder.used_time_file.write_text("{}")
    folder.stage_seconds_file.write_text("{}")
    folder.data.mkdir()
    open_folder(tmp_path / "out", data="b").remove_request()
    assert not (tmp_path / "out").exists()
    open_folder(tmp_path / "out", data="c")


def test_changed_data_are_named_without_their_hashes(tmp_path):
    folder = open_folder(tmp_path / "out", content="3f9a")
    folder.baselines_file.write_text("{}")
    with pytest.raises(ConfigError, match="and the data has changed since it started"):
        open_folder(tmp_path / "out", content="81c2")


def test_the_hash_of_a_folder_depends_on_the_contents_of_its_files(tmp_path):
    data = tmp_path / "beir"
    data.mkdir()
    (data / "test.tsv").write_text("q\td\t1\n")
    first = hash_content(data, tmp_path / "out")
    assert hash_content(data, tmp_path / "out") == first
    (data / "test.tsv").write_text("q\td\t0\n")
    assert hash_content(data, tmp_path / "out") != first
