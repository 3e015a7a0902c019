"""`contaccum report` writes a page, or nothing."""

import json

from contaccum.cli import main


def test_a_page_is_written_without_credentials_and_a_bad_path_leaves_what_was_there(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "abcdefgh1234")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text(json.dumps({"arguments": {"run_note": "abcdefgh1234"}}))
    output = tmp_path / "out" / "report.html"
    assert main(["report", str(tmp_path / "run"), "--output", str(output)]) == 0
    page = output.read_text()
    assert "<h1>run</h1>" in page and "abcdefgh1234" not in page and "&lt;MY_TOKEN&gt;" in page
    capsys.readouterr()
    assert main(["report", str(tmp_path / "none"), "--output", str(output)]) == 2
    error = capsys.readouterr().err.strip()
    assert "none: nothing that can be reported" in error and len(error.splitlines()) == 1
    assert output.read_text() == page
