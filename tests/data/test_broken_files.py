"""Deliberately broken data: one clear line that says where, or counted under skip; never a traceback, never silence."""

from __future__ import annotations

from pathlib import Path

import pytest
from broken_files import CASES

from contaccum.data import load_training_data
from contaccum.errors import DataError


def test_there_are_as_many_broken_files_as_promised() -> None:
    assert sum(case.stop is not None for case in CASES.values()) >= 45


@pytest.mark.parametrize("name", CASES)
def test_one_line_names_file_line_and_reason_or_the_rest_is_used_and_every_loss_counted(
    tmp_path: Path, name: str
) -> None:
    make, stop, skip, options = CASES[name]
    source = make(tmp_path)
    if stop is not None:
        with pytest.raises(DataError, match=stop) as caught:
            load_training_data(source, **options)
        message = str(caught.value)
        assert message.isprintable() and len(message) < 800 + 2 * len(str(source))
        assert message.startswith(str(source)) and message.endswith(")")
    if skip is None:
        with pytest.raises(DataError) as caught:
            load_training_data(source, on_bad_record="skip", **options)
        assert str(caught.value).isprintable()
        return
    data = load_training_data(source, on_bad_record="stop" if stop is None else "skip", **options)
    report = data.report
    assert report.seen == report.used + report.reported and report.reported == sum(report.by_reason.values())
    rows, reported = skip
    assert rows < 0 < len(data.dataset) or len(data.dataset) == rows
    assert reported < 0 < report.reported or report.reported == reported
