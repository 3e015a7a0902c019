"""The output folder of `contaccum fit`: its paths, and the check that a call may continue in it."""

from __future__ import annotations

import hashlib
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contaccum.errors import ConfigError
from contaccum.files import hash_file, read_json, redact, write_json

# Keys of a request that hold hashes, and what is hashed.
_HASHED = {"content": "the data", "corpus_content": "the corpus"}
_HASH_OF_PATH = {"path": "content", "corpus": "corpus_content"}


@dataclass(frozen=True)
class FitFolder:
    """The output folder of a fit, and the paths in it."""

    path: Path

    @property
    def record_file(self) -> Path:
        """The JSON record: the request at the start of the fit, all results at its end."""
        return self.path / "fit.json"

    @property
    def used_time_file(self) -> Path:
        """The seconds of the budget that all starts of the command have used so far."""
        return self.path / "used_time.json"

    @property
    def stage_seconds_file(self) -> Path:
        """The seconds of each stage, over all starts of the command."""
        return self.path / "stage_seconds.json"

    @property
    def data(self) -> Path:
        """The split: train.jsonl, corpus.jsonl, and the folders dev and test."""
        return self.path / "data"

    @property
    def store(self) -> Path:
        """The store of the document embeddings of corpus.jsonl by the base model."""
        return self.path / "store"

    @property
    def baselines_file(self) -> Path:
        """The scores of BM25 and of the base model on dev."""
        return self.path / "baselines.json"

    @property
    def dev_pool(self) -> Path:
        """The dev set with fewer documents, on which trials are scored."""
        return self.path / "dev_pool"

    @property
    def tuning(self) -> Path:
        """The folder of the search: its trials and the chosen settings."""
        return self.path / "tuning"

    @property
    def config_file(self) -> Path:
        """The config of the final training."""
        return self.path / "config.yaml"

    @property
    def model(self) -> Path:
        """The model for the user: the trained model or, with a guard, its merge with the base."""
        return self.path / "model"

    @property
    def trained_model(self) -> Path:
        """The trained model before the merge; only a fit with a guard has it."""
        return self.path / "trained"

    @property
    def guard_file(self) -> Path:
        """The scores of the merged models on dev and on the guard sets, and the chosen weight."""
        return self.path / "guard.json"

    @property
    def retrained_model(self) -> Path:
        """The output folder in `config_file`, used if the user trains with the config again."""
        return self.path / "again"

    @property
    def folds(self) -> Path:
        """The scores of the further splits (folds) of a small data set."""
        return self.path / "folds"

    @property
    def report(self) -> Path:
        """The HTML report."""
        return self.path / "report.html"

    def open(self, request: dict[str, Any]) -> None:
        """Write the request to the folder, or check that the folder has the same request.

        Args:
            request: everything that decides the result: data, model and settings.

        Raises:
            ConfigError: if the folder has a finished fit, a fit of another request, or other files.
        """
        request = redact(request)
        if not self.record_file.is_file():
            if self.path.is_dir() and any(self.path.iterdir()):
                raise ConfigError(f"{self.path}: holds other files; name another output folder")
            write_json(self.record_file, {"request": request})
            return
        record = read_json(self.record_file)
        # The store alone does not show that the fit has results, because the user may have removed
        # it to free space.
        has_results = self.baselines_file.is_file() or "verdict" in record
        if self.store.exists() or has_results:
            self._check_record(record, request)
            return
        # The earlier call ended before it encoded anything. If its data, model or settings were
        # refused, it can be repeated with corrected ones.
        is_other_request = _find_changed_key(request, record["request"]) is not None
        if is_other_request and self.data.is_dir():
            shutil.rmtree(self.data)
        write_json(self.record_file, {"request": request})

    def open_model(self, fingerprints: dict[str, str | None]) -> None:
        """Write the fingerprints of the models to the folder, or check that they are the same.

        Args:
            fingerprints: {name: fingerprint} of the base model and its settings, and of the guide.

        Raises:
            ConfigError: if an earlier start had another model.
        """
        record = read_json(self.record_file)
        earlier = record["request"].setdefault("fingerprints", fingerprints)
        for name, fingerprint in fingerprints.items():
            if earlier[name] != fingerprint:
                raise ConfigError(
                    f"{self.path}: this folder has an unfinished fit, and the {name} has changed "
                    "since it started; name another output folder"
                )
        write_json(self.record_file, record)

    def remove_request(self) -> None:
        """Remove the request of a call whose data were refused, and the folder if it is empty.

        An earlier call that was refused for its budget may have left its used time.
        """
        self.record_file.unlink()
        self.used_time_file.unlink(missing_ok=True)
        self.stage_seconds_file.unlink(missing_ok=True)
        with suppress(OSError):  # the folder is not empty
            self.path.rmdir()

    def _check_record(self, record: dict[str, Any], request: dict[str, Any]) -> None:
        """Raise `ConfigError` unless the record is of an unfinished fit of the same request."""
        if "verdict" in record and self.report.is_file():
            raise ConfigError(
                f"{self.path}: this folder has a finished fit ({record['verdict']['line']}); "
                "name another output folder, or remove this one"
            )
        earlier_request = record["request"]
        changed_key = _find_changed_key(request, earlier_request)
        if changed_key is None:
            return
        if changed_key in _HASHED:
            raise ConfigError(
                f"{self.path}: this folder has an unfinished fit, and {_HASHED[changed_key]} has "
                "changed since it started; name another output folder"
            )
        raise ConfigError(
            f"{self.path}: this folder has an unfinished fit with "
            f"{changed_key}={earlier_request.get(changed_key)}, and this call has "
            f"{changed_key}={request[changed_key]}; name another output folder"
        )


def _find_changed_key(request: dict[str, Any], earlier_request: dict[str, Any]) -> str | None:
    """Return the first key of a request whose value is not that of the earlier one, or None.

    A path may differ if its content is the same: the same file may have been named by another path,
    such as an absolute one.
    """
    for key, value in request.items():
        if value == earlier_request.get(key):
            continue
        if key in _HASH_OF_PATH:
            hash_key = _HASH_OF_PATH[key]
            content = request.get(hash_key)
            if content is not None and content == earlier_request.get(hash_key):
                continue
        return key
    return None


def hash_content(path: Path, output: Path) -> str:
    """Return a SHA-256 hash of a file, or of the names and contents of the files in a folder.

    Args:
        output: the output folder of the fit. If it is in the folder, its files are left out.

    Raises:
        ConfigError: if the path does not exist or cannot be read.
    """
    content = hashlib.sha256()
    try:
        if path.is_dir():
            for file in sorted(path.rglob("*")):
                if file.is_file() and not file.resolve().is_relative_to(output.resolve()):
                    content.update(f"{file.relative_to(path)} {hash_file(file)}\n".encode())
            return content.hexdigest()
        return hash_file(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
