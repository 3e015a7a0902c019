"""The status line of `contaccum fit`, and the log of what libraries print meanwhile.

The command prints a few lines that stay. At the bottom of a terminal, one line says what it does
now. What libraries print goes to a log file, or with ``--verbose`` to the terminal.
"""

from __future__ import annotations

import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

_SECONDS_PER_DRAWING = 1.0
_CLEAR = "\r\x1b[K"  # to the start of the line, and remove it

verbose = False
"""True with ``--verbose``: what libraries print is shown."""


class StatusLine:
    """What a command does now, and the time that it has used, at the bottom of a terminal.

    ``print_line`` prints a line that stays.
    """

    def __init__(self, print_line: Callable[[str], None], describe_time: Callable[[], str]) -> None:
        self.stage = ""  # what the command does now
        self.step = ""  # how far it is with that; empty if it is not known
        self.best = ""  # the best result so far
        self._describe_time = describe_time
        self._print_line = print_line
        self._stdout = sys.stdout
        self._stderr = sys.stderr
        self._lock = threading.Lock()  # the line is drawn by a thread of its own
        self._is_drawn = False

    def start(self, stage: str) -> None:
        """Begin a stage, of which no step is done."""
        self.stage = stage
        self.step = ""

    def print_line(self, line: str) -> None:
        """Print a line that stays, above the status line."""
        with self._lock, redirect_stdout(self._stdout):
            self._clear()
            self._print_line(line)

    def describe(self) -> str:
        """Return the line."""
        parts = (self.stage, self.step, self._describe_time(), self.best)
        return " | ".join(part for part in parts if part)

    @contextmanager
    def quiet(self, log: Path) -> Iterator[None]:
        """Append what libraries print to a log in a ``with`` block, and draw the line meanwhile."""
        if verbose:
            yield
            return
        import transformers

        self._stdout, self._stderr = sys.stdout, sys.stderr
        # Its handler holds the terminal; the messages reach the handler of the root logger instead.
        transformers.utils.logging.disable_default_handler()
        transformers.utils.logging.enable_propagation()
        ended = threading.Event()
        drawing = threading.Thread(target=self._draw_until, args=[ended], daemon=True)
        drawing.start()
        try:
            with (
                log.open("a", encoding="utf-8", buffering=1) as file,
                redirect_stdout(file),
                redirect_stderr(file),
            ):
                yield
        finally:
            ended.set()
            drawing.join()
            self._clear()
            transformers.utils.logging.disable_propagation()
            transformers.utils.logging.enable_default_handler()

    def _draw_until(self, ended: threading.Event) -> None:
        if not self._stderr.isatty():
            return
        while not ended.is_set():
            with self._lock:
                width = shutil.get_terminal_size().columns - 1
                self._stderr.write(_CLEAR + self.describe()[:width])
                self._stderr.flush()
                self._is_drawn = True
            ended.wait(_SECONDS_PER_DRAWING)

    def _clear(self) -> None:
        if self._is_drawn:
            self._stderr.write(_CLEAR)
            self._stderr.flush()
            self._is_drawn = False
