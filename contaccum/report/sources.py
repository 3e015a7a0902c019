"""What a path given to `contaccum report` is: a training run, a comparison, or results of evaluations; and its files.

A path is known by what lies there, not by its name. Nothing is drawn, and no number is worked out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from contaccum.errors import UserError
from contaccum.evaluation.results import read_result, result_files
from contaccum.files import read_json
from contaccum.training.log import EVAL_LOG, RUN_RECORD, TRAIN_LOG, read_log

RUN, COMPARISON, EVALUATION = "run", "comparison", "evaluation"
_REPORT, _RESULT = "report.json", "result.json"
_KINDS = (
    f"a folder of `contaccum train` ({RUN_RECORD} and {TRAIN_LOG}) or `contaccum compare` ({_REPORT}), or a file of "
    "`contaccum evaluate` or `contaccum open_qa` (.json)"
)

Records = Sequence[Mapping[str, Any]]


@dataclass
class Source:
    """What one command left.

    Attributes:
        kind: RUN, EVALUATION (on one data set) or COMPARISON.
        record: `run.json`, the result of the evaluation, or the comparison's `report.json`.
        log, evaluations: of a run, a record per update and one per evaluation while training.
        results, logs: of a comparison, by name of the run, where the runs lie beside it.
    """

    kind: str
    path: Path
    name: str
    record: Mapping[str, Any]
    log: Records = ()
    evaluations: Records = ()
    results: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    logs: Mapping[str, Records] = field(default_factory=dict)


def read_sources(paths: Sequence[Path]) -> list[Source]:
    """All that the paths hold, in their order, under names that differ.

    Raises:
        UserError: a path that is none of these, or is damaged.
    """
    found = [source for path in paths for source in _read(path)]
    names = [source.name for source in found]
    for number, source in enumerate(found):
        before = names[:number].count(source.name)
        source.name += f" ({before + 1})" if before else ""
    return found


def _read(path: Path) -> Iterator[Source]:
    if not path.exists():
        raise UserError(f"{path}: no such file or folder (a report is of {_KINDS})")
    folder = path.parent if path.name in (RUN_RECORD, TRAIN_LOG, EVAL_LOG) else path
    content = read_json(path) if folder.is_file() else {}
    if (folder / _REPORT).is_file() or {"groups", "comparisons", "entries"} <= content.keys():
        yield read_comparison(path if content else folder / _REPORT)
    elif (folder / RUN_RECORD).is_file() or (folder / TRAIN_LOG).is_file():
        run = read_json(folder / RUN_RECORD) if (folder / RUN_RECORD).is_file() else {}
        yield Source(RUN, folder, folder.resolve().name, run, _log(folder / TRAIN_LOG), _log(folder / EVAL_LOG))
    elif "sets" in content or {"metrics", "per_query", "data"} <= content.keys():
        for file in result_files(path):
            record = read_result(file)
            yield Source(EVALUATION, file, Path((record.get("model") or {}).get("name") or file.stem).name, record)
    else:
        raise UserError(f"{path}: nothing that can be reported (a report is of {_KINDS})")


def read_comparison(path: Path) -> Source:
    """A comparison's `report.json`, and the results and logs of its runs where they lie beside it."""
    report = read_json(path)
    folders = {name: path.parent / "runs" / Path(name).name for name in report.get("runs", {})}
    results = {name: read_json(one / _RESULT) for name, one in folders.items() if (one / _RESULT).is_file()}
    logs = {name: _log(folders[name] / TRAIN_LOG) for name in results}
    return Source(COMPARISON, path, path.resolve().parent.name, report, results=results, logs=logs)


def _log(path: Path) -> Records:
    """The records of a log, none where there is no file; a last line that a kill cut short is left out."""
    return read_log(path, path.read_bytes().count(b"\n")) if path.is_file() else []


def query_texts(data: Mapping[str, Any]) -> dict[str, str]:
    """{query id: text} of what was scored, if it still lies where it did; else nothing."""
    from contaccum.data import load_questions

    path = Path(str(data.get("path") or ""))
    try:
        if "questions_fingerprint" in data:
            return load_questions(path, "skip").texts
        lines = (path / "queries.jsonl").read_text(encoding="utf-8").splitlines()
        return {str(record["_id"]): str(record["text"]) for record in map(json.loads, lines)}
    except (UserError, OSError, ValueError, KeyError, TypeError):
        return {}
