"""The output folder of `contaccum fit`: what lies where, and whether it belongs to the same call."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contaccum.errors import ConfigError
from contaccum.files import read_json, redact, write_json


@dataclass(frozen=True)
class FitFolder:
    """The paths below ``--output``."""

    path: Path

    @property
    def record(self) -> Path:
        """What was asked for, and at the end everything that was found."""
        return self.path / "fit.json"

    @property
    def used_time(self) -> Path:
        """The part of the budget that is used."""
        return self.path / "used_time.json"

    @property
    def data(self) -> Path:
        """The split: train.jsonl, corpus.jsonl, dev and test."""
        return self.path / "data"

    @property
    def store(self) -> Path:
        """The embeddings of corpus.jsonl by the model as it is."""
        return self.path / "store"

    @property
    def baselines(self) -> Path:
        """The scores on dev before training."""
        return self.path / "baselines.json"

    @property
    def dev_pool(self) -> Path:
        """The dev set with fewer documents, which trials are scored on."""
        return self.path / "dev_pool"

    @property
    def tuning(self) -> Path:
        """The trials and the choice."""
        return self.path / "tuning"

    @property
    def config(self) -> Path:
        """The config of the final training."""
        return self.path / "config.yaml"

    @property
    def model(self) -> Path:
        """The trained model."""
        return self.path / "model"

    @property
    def again(self) -> Path:
        """Where the config trains to when the user runs it again."""
        return self.path / "again"

    @property
    def folds(self) -> Path:
        """The other splits of few data, and their models."""
        return self.path / "folds"

    @property
    def report(self) -> Path:
        """The page."""
        return self.path / "report.html"

    def begin(self, request: dict[str, Any]) -> None:
        """Write down what is asked for, or go on with what was asked for before.

        Args:
            request: what decides the result.

        Raises:
            ConfigError: for a folder that holds a finished fit, one of another request, or other
                files.
        """
        request = redact(request)
        was_asked = self.record.is_file()
        if was_asked and self.data.is_dir():
            self._check_before(read_json(self.record), request)
            return
        # Before the data are split nothing is lost: data that were refused may be mended and given again.
        if not was_asked and self.path.is_dir() and any(self.path.iterdir()):
            raise ConfigError(f"{self.path}: holds other files; name another output folder")
        write_json(self.record, {"request": request})

    def _check_before(self, before: dict[str, Any], request: dict[str, Any]) -> None:
        """Raise `ConfigError` unless an unfinished fit of the same request lies here."""
        if "verdict" in before and self.report.is_file():
            raise ConfigError(
                f"{self.path}: a finished fit lies there ({before['verdict']['line']}); "
                "name another output folder, or remove this one"
            )
        for key, value in request.items():
            earlier = before.get("request", {}).get(key)
            if earlier != value:
                raise ConfigError(
                    f"{self.path}: a fit was begun there with {key}={earlier}, and this one has {key}={value}; "
                    "name another output folder"
                )


def content_of(path: Path) -> str:
    """Return a hash, in hex, of a file; of a folder, of the names and sizes of its files.

    Raises:
        ConfigError: if there is nothing at the path, or it cannot be read.
    """
    content = hashlib.sha256()
    try:
        if path.is_dir():
            for file in sorted(path.rglob("*")):
                if file.is_file():
                    content.update(f"{file.relative_to(path)} {file.stat().st_size}\n".encode())
            return content.hexdigest()
        with path.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
