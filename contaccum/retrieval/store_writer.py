"""Writing a store of embeddings shard by shard, so that a process killed at any instant loses the shard in work alone.

A shard is written aside and renamed; store.json says that the store is finished when all of them are there. The folder,
and how it is read, are in `store`.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from contaccum.data.records import one_line
from contaccum.errors import DataError, UserError
from contaccum.retrieval.store import ABOUT, EMBEDDINGS, FORMAT, IDS, SHARD, VERSION, read_about, shard_folder


class StoreWriter:
    """Writes a store shard by shard; make one with `start`. Processes may share a folder, each with shards of its own.

    Attributes:
        folder: where the store lies.
        about: the content of store.json at the start.
    """

    def __init__(self, folder: Path, about: dict[str, Any]) -> None:
        self.folder, self.about = folder, about
        # Only a store that was finished knows where it ends.
        self.known_shards: int | None = len(about["shards"]) if about.get("finished") else None

    @classmethod
    def start(
        cls,
        folder: str | os.PathLike[str],
        identity: Mapping[str, Any],
        notes: Mapping[str, Any],
        software: Mapping[str, Any],
        overwrite: bool = False,
    ) -> StoreWriter:
        """Begin a store, or go on with the one that lies there. One process calls this before the others do.

        Args:
            identity: what decides the embeddings: kind, model, similarity, tokenisation, precision, dtype, shard_size.
                JSON values. A store with another one is not gone on with.
            notes: what else store.json says.
            software: what runs; every one that wrote to the store is listed.
            overwrite: remove the store that lies there.

        Raises:
            UserError: the folder holds another store, or something else; or it cannot be written.
        """
        folder = Path(folder)
        about = check_folder(folder)
        with _writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            if about is not None and not overwrite:
                _refuse_other(folder, about, identity)
            # What a killed process left; nobody else writes yet.
            for partial in folder.glob("*.partial"):
                shutil.rmtree(partial) if partial.is_dir() else partial.unlink()
            if about is not None and not overwrite:
                told = _as_json(software)
                if not about.get("finished") and told not in about["software"]:
                    about["software"].append(told)
                    _write_json(folder / ABOUT, about)
                return cls(folder, about)
            if about is not None:
                _remove(folder)
            head = {"format": FORMAT, "version": VERSION, "finished": False}
            about = _as_json({**head, **identity, **notes, "software": [software]})
            _write_json(folder / ABOUT, about)
        return cls(folder, about)

    @classmethod
    def join(cls, folder: str | os.PathLike[str], identity: Mapping[str, Any]) -> StoreWriter:
        """Write to a store that another process has just started; raises `UserError` where it started another."""
        folder = Path(folder)
        about = check_folder(folder)
        if about is None:
            raise UserError(one_line(f"{folder}: no store that rank 0 has started (name a folder that all ranks see)"))
        _refuse_other(folder, about, identity)
        return cls(folder, about)

    def read_shard(self, number: int) -> dict[str, Any] | None:
        """What shard.json of a shard says; None where the shard is missing, or its files are not as that says."""
        folder = shard_folder(self.folder, number)
        try:
            told = json.loads((folder / SHARD).read_text(encoding="utf-8"))
            whole = all((folder / name).stat().st_size == told["bytes"][name] for name in (EMBEDDINGS, IDS))
            return told if whole else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def write_shard(self, number: int, ids: Sequence[str], embeddings: np.ndarray, fingerprint: str) -> None:
        """Write a shard, in the dtype of the store.

        Args:
            ids, embeddings: n strings, float32 (n, d); n is the store's shard_size, less in the last shard alone.
            fingerprint: of the corpus up to the last of them.

        Raises:
            UserError: no room, or a number that float16 cannot hold.
        """
        if len(ids) != len(embeddings):
            raise ValueError(f"{len(ids)} ids for embeddings of shape {embeddings.shape}")
        with np.errstate(over="ignore"):
            stored = np.ascontiguousarray(embeddings, dtype=self.about["dtype"])
        if not np.isfinite(stored).all():
            raise UserError(f"{self.folder}: an embedding is too large for {self.about['dtype']} (use --dtype float32)")
        folder = shard_folder(self.folder, number)
        partial = folder.with_name(f"{folder.name}.partial")
        with _writing(self.folder):
            shutil.rmtree(partial, ignore_errors=True)
            shutil.rmtree(folder, ignore_errors=True)  # one that was not whole
            partial.mkdir()
            with open(partial / EMBEDDINGS, "wb") as file:
                np.save(file, stored, allow_pickle=False)
                _flush(file)
            _write_ids(partial / IDS, ids)
            sizes = {name: (partial / name).stat().st_size for name in (EMBEDDINGS, IDS)}
            told = {"rows": len(ids), "dimension": stored.shape[1], "bytes": sizes, "fingerprint": fingerprint}
            _write_json(partial / SHARD, told)
            partial.rename(folder)
            _flush_folder(self.folder)

    def finish(self, shards: int, notes: Mapping[str, Any]) -> bool:
        """Say in store.json that the store is finished, if it is: whether `shards` shards are there.

        Of several processes, those that find shards of others missing leave this to whoever writes the last one.

        Args:
            notes: what is known at the end.

        Raises:
            DataError: shards that do not belong together.
        """
        told = [self.read_shard(number) for number in range(shards)]
        if any(shard is None for shard in told):
            return False
        found = [shard for shard in told if shard is not None]
        dimensions = {shard["dimension"] for shard in found}
        names = (path.name for path in self.folder.glob("shard-*"))
        beyond = [name for name in names if name[6:].isdigit() and int(name[6:]) >= shards]
        if len(dimensions) > 1 or beyond:
            what = min(beyond) if beyond else f"embeddings of {sorted(dimensions)} numbers"
            raise DataError(one_line(f"{self.folder}: {what} does not belong to it (start anew with --overwrite)"))
        about = {
            **{name: value for name, value in self.about.items() if name != "software"},
            "finished": True,
            "rows": sum(shard["rows"] for shard in found),
            "dimension": dimensions.pop(),
            **notes,
            "shards": [{"rows": shard["rows"], "bytes": shard["bytes"]} for shard in found],
            # as the file says now: another process may have started later
            "software": (read_about(self.folder) or self.about)["software"],
        }
        with _writing(self.folder):
            _write_json(self.folder / ABOUT, about)
        return True


def check_folder(folder: Path) -> dict[str, Any] | None:
    """The content of store.json of the store that lies there, None where nothing does; nothing is written.

    Raises:
        UserError: something else lies there.
    """
    about = read_about(folder)
    if about is None and folder.exists():
        if not folder.is_dir():
            raise UserError(one_line(f"{folder}: is a file (name a folder)"))
        strange = sorted(path.name for path in folder.iterdir() if not path.name.startswith(ABOUT))
        if strange:
            raise UserError(one_line(f"{folder}: holds no store, but {strange[0]!r} (name an empty folder)"))
    return about


def _refuse_other(folder: Path, about: dict[str, Any], identity: Mapping[str, Any]) -> None:
    other = list(differences({name: about.get(name) for name in identity}, _as_json(identity)))
    if other:
        mend = "name another --output, or start anew with --overwrite"
        raise UserError(one_line(f"{folder}: holds embeddings made otherwise: {'; '.join(other)} ({mend})"))


def differences(there: Any, here: Any, name: str = "") -> Iterator[str]:
    """What differs between two structures of JSON, in words: "tokenisation document_max_length 64, here 128"."""
    if isinstance(there, dict) and isinstance(here, dict):
        for key in {**there, **here}:
            yield from differences(there.get(key), here.get(key), f"{name} {key}".strip())
    elif there != here:
        shown = [
            value[:12] if isinstance(value, str) and len(value) == 64 else json.dumps(value) for value in (there, here)
        ]
        yield f"{name} {shown[0]}, here {shown[1]}"


def _write_ids(path: Path, ids: Sequence[str]) -> None:
    import pyarrow as pa

    batch = pa.record_batch([pa.array(ids, pa.string())], names=["id"])
    with open(path, "wb") as file:
        with pa.ipc.new_file(file, batch.schema) as writer:
            writer.write_batch(batch)
        _flush(file)


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """What goes wrong while writing, in one line."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(
            one_line(f"{folder}: cannot be written: {reason} (free some space, or name another)")
        ) from error


def _as_json(value: Any) -> Any:
    return json.loads(json.dumps(value))


def _write_json(path: Path, content: Any) -> None:
    # Two processes may both find the store finished, and say so at once.
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.partial")
    with open(partial, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=1, ensure_ascii=False, allow_nan=False)
        file.write("\n")
        _flush(file)
    os.replace(partial, path)


def _flush(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def _flush_folder(folder: Path) -> None:
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(folder: Path) -> None:
    """Remove a store: what it is known to hold, and store.json last, so that it can be told for one until then."""
    for path in folder.glob("shard-*"):
        shutil.rmtree(path)
    (folder / ABOUT).unlink()
