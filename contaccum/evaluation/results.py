"""The result of one evaluation, and its files: a JSON record and a TREC run beside it.

Everything needed to reproduce or to doubt a number is in the record; nothing of the environment is. It computes
no metric.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from urllib.parse import quote

from contaccum.errors import DataError, UserError
from contaccum.evaluation.metrics import trec_order
from contaccum.evaluation.provenance import git_commit, package_versions
from contaccum.redaction import redact, redact_record


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


@dataclass
class EvaluationResult:
    """One model on one data set.

    Attributes:
        metrics: {"NDCG@10": ...}, means over the judged queries, unrounded.
        per_query: {query id: {metric: value}}.
        run: {query id: {document id: score}}; goes to the TREC file, not into the record.
        data: name, split, path, documents, queries, judgements, fingerprint.
        model: name, fingerprint, similarity, dimension.
        tokenisation: see `tokenisation_contract`.
        search: index, index_parameters, k, gpus; of an approximate index also its recall against exact search.
        timing: seconds of encoding, indexing, searching and measuring recall, and documents_per_second.
        precision: "float32", or the type that the encoder ran in under autocast.
    """

    metrics: dict[str, float]
    per_query: dict[str, dict[str, float]]
    run: dict[str, dict[str, float]]
    data: dict[str, Any]
    model: dict[str, Any]
    tokenisation: dict[str, Any] | None
    search: dict[str, Any]
    timing: dict[str, float]
    precision: str
    versions: dict[str, str | None] = field(default_factory=package_versions)
    git_commit: str | None = field(default_factory=git_commit)
    created: str = field(default_factory=_now)

    def record(self) -> dict[str, Any]:
        """What the JSON file holds: every attribute but the run."""
        record = asdict(self)
        del record["run"]
        return record


def write_result(result: EvaluationResult, path: str | os.PathLike[str]) -> tuple[Path, Path]:
    """Write the record to `path` and the run to `<stem>.trec` beside it; returns both paths.

    Each file appears whole or not at all, and the record last: where it is, the run is.
    """
    path = Path(path)
    run_path = path.with_suffix(".trec")
    tag = re.sub(r"\s+", "_", Path(redact(str(result.model.get("name") or "contaccum"))).name) or "contaccum"
    write_atomically(run_path, trec_lines(result.run, tag))
    write_atomically(path, [json.dumps(_public(result.record()), indent=1, allow_nan=False, ensure_ascii=False), "\n"])
    return path, run_path


def _public(record: dict[str, Any]) -> dict[str, Any]:
    """The record without credentials; what names queries alone is as large as the data, and is not searched."""
    return {key: value if key == "per_query" else redact_record(value) for key, value in record.items()}


def read_result(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The record that `write_result` wrote; raises `DataError` when the file is missing or something else."""
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: not a results file that can be read ({error})") from error
    if not isinstance(record, dict) or not {"metrics", "per_query", "data"} <= record.keys():
        raise DataError(f"{path}: not a results file: it needs metrics, per_query and data")
    return record


def trec_lines(run: Mapping[str, Mapping[str, float]], tag: str) -> Iterable[str]:
    """Lines `qid Q0 docid rank score tag`, rank from 1, in trec_eval's own order (ties by id, descending).

    Scores have nine digits, which is all of a float32. A blank in an id would split the line and is written %20.
    """
    for qid, hits in run.items():
        for rank, (docid, score) in enumerate(trec_order(hits), start=1):
            yield f"{_no_blanks(qid)} Q0 {_no_blanks(docid)} {rank} {score:.9g} {tag}\n"


def require_writable(path: str | os.PathLike[str]) -> None:
    """Make the folder of an output file and try it; raises `UserError` before hours of work are lost to it."""
    path = Path(path)
    if path.is_dir():
        raise UserError(f"{path}: is a folder; name a file, such as {path / 'results.json'}")
    if path.suffix != ".json":
        raise UserError(f"{path}: the output is JSON (with a .trec beside it); end its name in .json")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise UserError(f"{path}: cannot be written here ({error.strerror or error})") from error


def _no_blanks(identifier: str) -> str:
    return re.sub(r"\s", lambda blank: quote(blank.group()), identifier)


def write_atomically(path: Path, parts: Iterable[str]) -> None:
    """Write text to `path`, whole or not at all: when `parts` raises, what was there before is still there."""
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, suffix=".tmp", delete=False) as file:
        try:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
            # A temporary file is private; a result is as readable as any file that the user makes.
            umask = os.umask(0)
            os.umask(umask)
            os.chmod(file.name, 0o666 & ~umask)
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise
