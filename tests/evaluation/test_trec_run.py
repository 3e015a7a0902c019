"""TREC runs read back: what is written comes back, and what is no run is refused by line."""

from __future__ import annotations

from pathlib import Path

import pytest

from contaccum.errors import DataError
from contaccum.evaluation.results import trec_lines
from contaccum.evaluation.trec_run import read_trec_run


def test_what_was_written_comes_back_blanks_in_ids_included(tmp_path: Path) -> None:
    run = {"q 1": {"a%41": 0.5, "b\u00a0c": 0.25}, "q2": {"100%": -1.5}}
    (tmp_path / "run.trec").write_text("".join(trec_lines(run, "tag")))
    assert read_trec_run(tmp_path / "run.trec") == run


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("q Q0 d 1 0.5", "not six columns: found 5"),
        ("q Q0 d 1 high t", "score is not a number: found 'high'"),
        ("q Q0 d 1 nan t", "score is not a number"),
        ("q Q0 a 1 0.1 t", "duplicate document: 'a' of query 'q'"),
    ],
)
def test_a_bad_line_is_named_or_skipped(tmp_path: Path, line: str, reason: str) -> None:
    path = tmp_path / "run.trec"
    path.write_text(f"q Q0 a 1 0.9 t\n{line}\n")
    with pytest.raises(DataError, match=rf"run\.trec:2: {reason}"):
        read_trec_run(path)
    assert read_trec_run(path, "skip") == {"q": {"a": 0.9}}
    path.write_text(f"{line}\n" if "duplicate" not in reason else "x\n")
    with pytest.raises(DataError, match="no results left to use"):
        read_trec_run(path, "skip")
