"""Lookup of texts by id on disk, for collections that do not fit in memory."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable
from contextlib import suppress

from contaccum.data.records import Fault, one_line, quoted
from contaccum.errors import DataError
from contaccum.files import AnyPath


class TextLookup:
    """Texts by id, in a temporary SQLite database instead of in memory.

    The database is in TMPDIR and is deleted when the object is.

    Args:
        path: the file that the texts come from, for messages.
        texts: pairs of an id and a text.

    Raises:
        DataError: for an id that occurs twice, or a full disk.
    """

    def __init__(self, path: AnyPath, texts: Iterable[tuple[str, str]]) -> None:
        self._file_name = os.path.basename(path)
        self._connection = sqlite3.connect("")
        self._connection.execute(
            "CREATE TABLE texts (number INTEGER PRIMARY KEY, id TEXT UNIQUE, text TEXT)"
        )
        for text_id, text in texts:
            try:
                self._connection.execute(
                    "INSERT INTO texts (id, text) VALUES (?, ?)", (text_id, text)
                )
            except sqlite3.IntegrityError as error:
                message = f"{path}: id {quoted(text_id)}: occurs twice (keep one text for each id)"
                raise DataError(one_line(message)) from error
            except sqlite3.Error as error:
                message = f"{path}: its texts cannot be stored: {error} (free disk space in TMPDIR)"
                raise DataError(one_line(message)) from error

    def find_number(self, text_id: object) -> int:
        """Return the number of the text with an id; raises `Fault` for an unknown id.

        A number takes less memory than an id. `get_text` returns its text.
        """
        row = None
        with suppress(UnicodeEncodeError):  # no text has an id that is not valid Unicode
            row = self._connection.execute(
                "SELECT number FROM texts WHERE id = ?", (str(text_id),)
            ).fetchone()
        if row is None:
            raise Fault(f"unknown id in {self._file_name}", quoted(text_id))
        return int(row[0])

    def get_text(self, number: int) -> str:
        """Return the text with a number that `find_number` has returned."""
        cursor = self._connection.execute("SELECT text FROM texts WHERE number = ?", (number,))
        return str(cursor.fetchone()[0])
