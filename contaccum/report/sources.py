"""Reading of training runs, results of evaluations and comparisons, with their logs.

Nothing is computed or plotted here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from contaccum.errors import UserError
from contaccum.evaluation.results import read_result, result_files
from contaccum.files import read_json
from contaccum.training.log import EVAL_LOG, RUN_RECORD, TRAIN_LOG, read_log

_COMPARISON_FILE = "report.json"
Log = Sequence[Mapping[str, Any]]
"""The records of a log, one per update or evaluation."""


@dataclass
class Source:
    """Output of one command.

    Attributes:
        source_type: "run", "evaluation" or "comparison".
        name: the folder of a run or a comparison, or the model of an evaluation.
        record: the content of a run's `run.json`, of an evaluation's result file, or of a
            comparison's `report.json`.
        logs: a run's logs by file name; a comparison's training logs by name of the run, which are
            empty if the run's folder is not beside `report.json`.
    """

    source_type: str
    name: str
    record: Mapping[str, Any]
    logs: Mapping[str, Log] = field(default_factory=dict)


def read_source(path: Path) -> Iterator[Source]:
    """Read the output at a path, and yield a source for each data set of an evaluation.

    Raises:
        UserError: the path holds no output that can be reported.
    """
    content = {}
    if path.is_file():
        content = read_json(path)
    if (path / _COMPARISON_FILE).is_file():
        yield read_comparison(path / _COMPARISON_FILE)
    elif {"groups", "comparisons", "entries"} <= content.keys():
        yield read_comparison(path)
    elif (path / RUN_RECORD).is_file():
        logs = {name: read_whole_lines(path / name) for name in (TRAIN_LOG, EVAL_LOG)}
        yield Source("run", path.resolve().name, read_json(path / RUN_RECORD), logs)
    elif "sets" in content or {"metrics", "per_query", "data"} <= content.keys():
        for file in result_files(path):
            record = read_result(file)
            model = (record.get("model") or {}).get("name")
            yield Source("evaluation", model_name(model or file.stem), record)
    else:
        outputs = "a folder of `contaccum train` or `compare`, or a file of `evaluate` or `open_qa`"
        raise UserError(f"{path}: nothing that can be reported (give {outputs})")


def model_name(model: str) -> str:
    """Return the last part of a model's path, with its parent if the last part is a common name.

    Example: "runs/mine/checkpoint-40" becomes "mine/checkpoint-40".
    """
    path = Path(model)
    is_common_name = path.name == "model" or re.fullmatch(r"checkpoint-\d+", path.name)
    if is_common_name and path.parent.name:
        return f"{path.parent.name}/{path.name}"
    return path.name


def read_comparison(path: Path) -> Source:
    """Read a comparison's `report.json`, and the training logs of the runs beside it."""
    report = read_json(path)
    logs = {}
    for name in report["runs"]:
        folder = path.parent / "runs" / Path(name).name
        logs[name] = read_whole_lines(folder / TRAIN_LOG)
    return Source("comparison", path.resolve().parent.name, report, logs)


def read_whole_lines(path: Path) -> Log:
    """Return the records of a log, without a last line that a killed process left unfinished.

    The result is empty if there is no file.
    """
    if not path.is_file():
        return []
    num_whole_lines = path.read_bytes().count(b"\n")
    return read_log(path, num_whole_lines)
