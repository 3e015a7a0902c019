"""What a path given to `contaccum report` is: a training run, a comparison, or results of evaluations; and its files.

A path is known by what lies there, not by its name. Nothing is drawn, and no number is worked out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contaccum.data.beir_folder import beir_file
from contaccum.data.questions import load_questions
from contaccum.data.records import RecordReport, one_line, read_json_lines
from contaccum.errors import DataError, UserError
from contaccum.evaluation.earlier import record_files
from contaccum.evaluation.results import read_result
from contaccum.training.callbacks import EVAL_LOG, RUN_RECORD, TRAIN_LOG
from contaccum.training.curves import read_log

COMPARISON, RESULT = "report.json", "result.json"
_KINDS = (
    f"a folder of `contaccum train` ({RUN_RECORD} and {TRAIN_LOG}), a folder of `contaccum compare` ({COMPARISON}), or "
    "a file of `contaccum evaluate` or `contaccum open_qa` (.json)"
)

Records = list[dict[str, Any]]


@dataclass
class TrainingRun:
    """What `contaccum train` left: `run.json`, a record per update, and one per evaluation while training."""

    path: Path
    name: str
    run: dict[str, Any]
    log: Records
    evaluations: Records


@dataclass
class Evaluation:
    """A record of `contaccum evaluate` or `contaccum open_qa` on one set."""

    path: Path
    name: str
    record: dict[str, Any]

    @property
    def data_identity(self) -> tuple[Any, ...]:
        """Equal for results that can be compared."""
        data = self.record["data"]
        names = ("fingerprint", "split", "questions_fingerprint", "passages_fingerprint", "match")
        return tuple(data.get(name) for name in names)


@dataclass
class ComparedRuns:
    """What `contaccum compare` left: its report, and of each run that lies beside it its result and log."""

    path: Path
    name: str
    report: dict[str, Any]
    results: dict[str, dict[str, Any]]
    logs: dict[str, Records]


Source = TrainingRun | Evaluation | ComparedRuns


def read_sources(paths: list[Path]) -> list[Source]:
    """All that the paths hold, in their order, under names that differ.

    Raises:
        UserError: a path that is none of these.
        DataError: one that is damaged.
    """
    found = [source for path in paths for source in _read(path)]
    taken: dict[str, int] = {}
    for source in found:
        taken[source.name] = taken.get(source.name, 0) + 1
        if taken[source.name] > 1:
            source.name = f"{source.name} ({taken[source.name]})"
    return found


def _read(path: Path) -> Iterator[Source]:
    if not path.exists():
        raise UserError(one_line(f"{path}: no such file or folder (a report is of {_KINDS})"))
    if path.is_dir():
        if (path / COMPARISON).is_file():
            yield _comparison(path / COMPARISON)
        elif (path / RUN_RECORD).is_file() or (path / TRAIN_LOG).is_file():
            yield _training_run(path)
        else:
            raise UserError(one_line(f"{path}: nothing to report in this folder (a report is of {_KINDS})"))
        return
    content = _json(path) if path.suffix == ".json" else None
    if content is not None and {"groups", "comparisons", "entries"} <= content.keys():
        yield _comparison(path)
    elif path.name in (RUN_RECORD, TRAIN_LOG, EVAL_LOG):
        yield _training_run(path.parent)
    elif content is not None and ("sets" in content or {"metrics", "per_query", "data"} <= content.keys()):
        for file in record_files(path):
            yield _evaluation(file)
    else:
        raise UserError(one_line(f"{path}: nothing that can be reported (a report is of {_KINDS})"))


def _training_run(folder: Path) -> TrainingRun:
    run = _json(folder / RUN_RECORD) if (folder / RUN_RECORD).is_file() else {}
    log = _log(folder / TRAIN_LOG)
    return TrainingRun(folder, folder.resolve().name, run, log, _log(folder / EVAL_LOG))


def _evaluation(path: Path) -> Evaluation:
    record = read_result(path)
    for key in ("metrics", "per_query", "data"):
        if not isinstance(record[key], dict):
            raise DataError(one_line(f"{path}: damaged: its {key} is not a mapping; evaluate again"))
    model = record.get("model") or {}
    name = Path(str(model.get("name") or path.stem)).name
    return Evaluation(path, name if name not in (".", "") else path.stem, record)


def _comparison(path: Path) -> ComparedRuns:
    report = _json(path)
    if not {"groups", "comparisons", "entries", "baseline"} <= report.keys():
        raise DataError(one_line(f"{path}: not a report of `contaccum compare`, or damaged"))
    results, logs = {}, {}
    for name in report.get("runs", {}):
        folder = path.parent / "runs" / Path(str(name)).name
        if (folder / RESULT).is_file():
            results[name] = _json(folder / RESULT)
            logs[name] = _log(folder / TRAIN_LOG)
    return ComparedRuns(path, path.resolve().parent.name, report, results, logs)


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(one_line(f"{path}: damaged, or no JSON ({error})")) from error
    if not isinstance(content, dict):
        raise DataError(one_line(f"{path}: holds a {type(content).__name__}, and a report is of {_KINDS}"))
    return content


def _log(path: Path) -> Records:
    """Records of a log; a last line that a kill cut short is left out, as a resumed run does."""
    if not path.is_file():
        return []
    try:
        lines = path.read_bytes().splitlines(keepends=True)
        whole = len(lines) - (1 if lines and not lines[-1].endswith(b"\n") else 0)
        records = read_log(path, whole)
    except UnicodeDecodeError as error:
        raise DataError(one_line(f"{path}: not UTF-8 text")) from error
    for number, record in enumerate(records, start=1):
        if not isinstance(record["update"], int):
            raise DataError(one_line(f"{path}:{number}: not a log record (it has no update)"))
    return records


def query_texts(data: Mapping[str, Any]) -> dict[str, str]:
    """{query id: text} of what was scored, if it still lies where it did; else nothing."""
    path = Path(str(data.get("path") or ""))
    try:
        if "questions_fingerprint" in data:
            return load_questions(path, "skip").texts
        file = beir_file(path, "queries.jsonl")
        records = read_json_lines(file, RecordReport("skip"))
        return {str(record["_id"]): str(record["text"]) for _, record in records if {"_id", "text"} <= record.keys()}
    except (UserError, OSError):
        return {}
