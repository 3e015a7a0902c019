"""A file that is fetched is whole, and goes on where it broke off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from contaccum.errors import DataError
from contaccum.reproduction.download import fetch_file

NAME = "/wikipedia_split/psgs_w100.tsv.gz"


def test_what_broke_off_goes_on_where_it_was(served: Any, tmp_path: Path) -> None:
    address, files = served
    files.broken.add(NAME)
    path = tmp_path / "deep" / "psgs_w100.tsv.gz"
    with pytest.raises(DataError, match="start again to go on"):
        fetch_file(address + NAME, path, show_progress=False)
    assert not path.exists()
    half = path.with_name(path.name + ".part").stat().st_size
    assert 0 < half < len(files.content[NAME])
    record = fetch_file(address + NAME, path, show_progress=False)
    assert files.asked[-1] == (NAME, f"bytes={half}-")
    assert path.read_bytes() == files.content[NAME] and record["bytes"] == len(files.content[NAME])
    assert sorted(p.name for p in path.parent.iterdir()) == [path.name, f"{path.name}.source.json"]


def test_damaged_archive_is_refused_and_fetched_anew(served: Any, tmp_path: Path) -> None:
    address, files = served
    whole = files.content[NAME]
    files.content[NAME] = whole[:-20] + bytes(20)
    path = tmp_path / "psgs_w100.tsv.gz"
    with pytest.raises(DataError, match="no whole gzip file"):
        fetch_file(address + NAME, path, show_progress=False)
    assert list(tmp_path.iterdir()) == []
    files.content[NAME] = whole
    fetch_file(address + NAME, path, show_progress=False)
    assert path.read_bytes() == whole


def test_part_that_is_longer_than_the_file_is_thrown_away(served: Any, tmp_path: Path) -> None:
    address, files = served
    (tmp_path / "p.gz.part").write_bytes(bytes(len(files.content[NAME])))
    fetch_file(address + NAME, tmp_path / "p.gz", show_progress=False)
    assert (tmp_path / "p.gz").read_bytes() == files.content[NAME]


@pytest.mark.parametrize(("url", "said"), [("/nothing", "404"), (None, "no connection")])
def test_what_cannot_be_had_is_one_line(url: str | None, said: str, served: Any, tmp_path: Path) -> None:
    where = served[0] + url if url else "http://127.0.0.1:9/nothing"
    with pytest.raises(DataError, match=said) as told:
        fetch_file(where, tmp_path / "file.csv", show_progress=False)
    assert "\n" not in str(told.value) and not (tmp_path / "file.csv").exists()
