"""Keeps credentials out of what is printed and written: those of the environment, and those inside URLs.

It recognises values, not places: wherever the value of a variable like ``HF_TOKEN`` or the ``user:password@`` of a URL
turns up, a mark stands instead. Files are redacted by whoever writes them, the terminal by :func:`redacted_output`.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import traceback
from collections.abc import Iterator
from types import TracebackType
from typing import Any, TextIO

SECRET_NAMES = re.compile(r"(?:^|_)(?:TOKEN|KEY|SECRET|PASSWORD|PASSWD|PASSPHRASE)(?:_|$)|PASSWORD$|APIKEY$", re.I)
"""Names of environment variables whose values are credentials."""

SHORTEST = 8
"""Characters of a value that is taken for a credential: a shorter one would blank half of what is said."""

# One slash is what a path makes of two.
_IN_URL = re.compile(r"\b([a-z][a-z0-9+.-]+:/{1,2})[^\s/@'\"]+@", re.I)


def secrets() -> dict[str, str]:
    """{value: name} of the credentials in the environment, the longest first."""
    found = {
        value: name
        for name, value in os.environ.items()
        if SECRET_NAMES.search(name) and len(value) >= SHORTEST and not os.path.exists(value)
    }
    return dict(sorted(found.items(), key=lambda item: -len(item[0])))


def redact(text: str) -> str:
    """``text`` with ``<NAME>`` for the value of each credential, and ``***@`` for those of URLs."""
    for value, name in secrets().items():
        text = text.replace(value, f"<{name}>")
    return _IN_URL.sub(r"\1***@", text)


def redact_record(content: Any) -> Any:
    """The same for every text in a structure of dicts, lists and tuples, keys included."""
    if isinstance(content, str):
        return redact(content)
    if isinstance(content, dict):
        return {redact_record(key): redact_record(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return type(content)(redact_record(value) for value in content)
    return content


def redact_file(path: str | os.PathLike[str]) -> None:
    """The same for a text file that a library has written; nothing where there is none."""
    if not os.path.isfile(path):
        return
    with open(path, encoding="utf-8", newline="") as file:
        text = file.read()
    if redact(text) != text:
        with open(path, "w", encoding="utf-8", newline="") as file:
            file.write(redact(text))


class _Redacted:
    """A text stream whose writes are redacted; all else is the stream's own."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(redact(text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def redacted_output() -> Iterator[None]:
    """While it lasts, nothing that Python prints or logs to the terminal holds a credential.

    Nor does the traceback of an exception that ends it, and the program.
    """
    out, err = sys.stdout, sys.stderr
    with (
        contextlib.redirect_stdout(_Redacted(out)),
        contextlib.redirect_stderr(_Redacted(err)),
    ):
        try:
            yield
        except Exception:
            sys.excepthook = _redacted_traceback  # printed when the streams are themselves again
            raise


def _redacted_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    sys.stderr.write(redact("".join(traceback.format_exception(kind, error, trace))))
