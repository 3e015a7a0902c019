"""SIGTERM and SIGINT as requests: they are noted, and the training loop acts on them where its state is whole."""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import Any

_NAMES = ("SIGTERM", "SIGINT")


class TrainingStopped(SystemExit):
    """Training was asked to stop, and has saved. Left alone, it ends the process with the code of its own.

    Attributes:
        code: 143 after SIGTERM, 130 after SIGINT: 128 and the signal's number, as shells have it.
        checkpoint: what was saved.
    """

    def __init__(self, number: int, checkpoint: str) -> None:
        super().__init__(128 + number)
        self.checkpoint = checkpoint


class StopSignals:
    """Within ``with``: the first signal is noted in ``received``; a second one does what it did before.

    In another thread than the main one, which alone may set handlers, nothing is noted.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for name in _NAMES:
                number = getattr(signal, name)
                self._before[number] = signal.signal(number, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        self._restore()
        name = signal.Signals(number).name
        print(f"contaccum: {name}: saving a checkpoint after this micro-step; a second ends at once", file=sys.stderr)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()
