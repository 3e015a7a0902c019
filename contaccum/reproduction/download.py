"""Fetching one published file: whole or not at all, going on where it broke off, with a progress bar."""

from __future__ import annotations

import gzip
import hashlib
import json
from pathlib import Path
from typing import Any

from contaccum.data.records import one_line
from contaccum.errors import DataError

_CHUNK = 1 << 20


def fetch_file(url: str, path: Path, show_progress: bool = True) -> dict[str, Any]:
    """Fetch ``url`` to ``path``; returns its url, bytes and sha256, which are written beside it as PATH.source.json.

    What broke off is kept as PATH.part and goes on from there. A file whose publisher states no checksum is known by
    its length, and a .gz is unpacked to its end once.

    Raises:
        DataError: it could not be fetched, or is shorter or other than it should be.
    """
    import requests
    import urllib3
    from tqdm.auto import tqdm

    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    there = part.stat().st_size if part.exists() else 0
    try:
        headers = {"Range": f"bytes={there}-"} if there else {}
        with requests.get(url, stream=True, timeout=60, headers=headers) as answer:
            if answer.status_code == 416:  # the part is as long as the file, or longer: begin anew
                part.unlink()
                return fetch_file(url, path, show_progress)
            answer.raise_for_status()
            goes_on = answer.status_code == 206
            start = there if goes_on else 0
            length = answer.headers.get("Content-Length")
            total = start + int(length) if length and "Content-Encoding" not in answer.headers else None
            with (
                part.open("ab" if goes_on else "wb") as file,
                tqdm(
                    total=total, initial=start, unit="B", unit_scale=True, desc=path.name, disable=not show_progress
                ) as bar,
            ):
                for chunk in answer.raw.stream(_CHUNK, decode_content=False):
                    file.write(chunk)
                    bar.update(len(chunk))
    except (requests.RequestException, urllib3.exceptions.HTTPError, OSError) as error:
        offline = isinstance(error, requests.ConnectionError)
        reason = "no connection" if offline else one_line(str(error))[:200]
        raise DataError(
            one_line(
                f"{path}: could not be fetched from {url}: {reason} (start again to go on, or put it there yourself)"
            )
        ) from error
    size = part.stat().st_size
    if total is not None and size != total:
        raise DataError(f"{path}: {size:,} of {total:,} bytes came from {url} (start again to go on)")
    record = {"url": url, "bytes": size, "sha256": _checked(part, path)}
    path.with_name(path.name + ".source.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    part.replace(path)
    return record


def _checked(part: Path, path: Path) -> str:
    """SHA-256 of the file; refuses, and removes, a .gz that is damaged or no gzip at all."""
    digest = hashlib.sha256()
    with part.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    if path.suffix == ".gz":
        try:
            with gzip.open(part) as unpacked:
                while unpacked.read(_CHUNK):
                    pass
        except (OSError, EOFError, ValueError) as error:
            part.unlink()
            raise DataError(f"{path}: what came is no whole gzip file ({error}); start again") from error
    return digest.hexdigest()
