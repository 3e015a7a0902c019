"""The status line of `contaccum fit`: the user's lines stay; a log has what libraries print."""

import io
import sys
import threading
from pathlib import Path

from tqdm import tqdm

from contaccum import progress
from contaccum.cli.options import print_at_once
from contaccum.progress import StatusLine


class Terminal(io.StringIO):
    """A text stream that is a terminal; ``written`` is set once something is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = threading.Event()

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        length = super().write(text)
        self.written.set()
        return length


def print_as_libraries_do() -> None:
    print({"train_loss": 1.5})
    for _ in tqdm(range(2), desc="Loading weights"):
        pass
    print("deprecated", file=sys.stderr)


def test_only_the_users_lines_reach_the_terminal(tmp_path: Path, capsys):
    status = StatusLine(print, lambda: "1 of 5 minutes")
    with status.quiet(tmp_path / "log.txt"):
        status.print_line("1. a candidate")
        print_as_libraries_do()
    print("after")
    output = capsys.readouterr()
    assert output.out == "1. a candidate\nafter\n"
    assert output.err == ""
    log = (tmp_path / "log.txt").read_text()
    assert all(text in log for text in ("train_loss", "Loading weights", "deprecated"))


def test_verbose_shows_what_libraries_print(tmp_path: Path, capsys, monkeypatch):
    monkeypatch.setattr(progress, "verbose", True)
    status = StatusLine(print, lambda: "")
    with status.quiet(tmp_path / "log.txt"):
        print_as_libraries_do()
    assert "train_loss" in capsys.readouterr().out
    assert not (tmp_path / "log.txt").exists()


def test_a_terminal_shows_one_line_which_is_removed_at_the_end(tmp_path: Path, monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    status = StatusLine(print, lambda: "1 of 5 minutes")
    status.start("candidate 2: linear map")
    status.step, status.best = "update 3 of 9", "best 1: 0.859"
    line = "candidate 2: linear map | update 3 of 9 | 1 of 5 minutes | best 1: 0.859"
    with status.quiet(tmp_path / "log.txt"):
        assert terminal.written.wait(60)
    assert line in terminal.getvalue()
    assert "\n" not in terminal.getvalue()
    assert terminal.getvalue().endswith("\r\x1b[K")
    status.start("test")
    assert status.describe() == "test | 1 of 5 minutes | best 1: 0.859"


def test_a_terminal_breaks_lines_between_words_and_a_file_has_them_whole(monkeypatch, capsys):
    line = "BETTER: nDCG@10 0.733 -> 0.796"
    print_at_once(line)
    assert capsys.readouterr().out == f"{line}\n"
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", "20")
    print_at_once(line)
    assert terminal.getvalue() == "BETTER: nDCG@10\n   0.733 -> 0.796\n"
