"""What a run writes for people to read: a line per update, a record of the run, a warning of a collapse.

Files are read and written here, and nothing is computed; no torch is needed to read them. When something is written is
decided in ``callbacks``.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from contaccum.errors import DataError
from contaccum.files import provenance, read_json, write_json, write_text

TRAIN_LOG = "train_log.jsonl"
EVAL_LOG = "eval_log.jsonl"
RUN_RECORD = "run.json"
_PATIENCE = 3  # updates in a row before a collapse is warned of


def read_log(path: str | os.PathLike[str], lines: int | None = None) -> list[dict[str, Any]]:
    """The records of a log, one per update, or its first ``lines``; raises `DataError` naming what is no record."""
    records = []
    try:
        texts = Path(path).read_text(encoding="utf-8").splitlines()[:lines]
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    for number, line in enumerate(texts, start=1):
        try:
            records.append({"update": None, "loss": None, **json.loads(line)})
        except (ValueError, TypeError) as error:
            raise DataError(f"{path}:{number}: not a log record") from error
    return records


def append_line(path: Path, record: Mapping[str, Any]) -> None:
    """Add a line to a log; what is no number becomes null."""
    path.parent.mkdir(parents=True, exist_ok=True)
    finite = {key: None if isinstance(x, float) and not math.isfinite(x) else x for key, x in record.items()}
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(finite) + "\n")


def keep_log_until(path: Path, update: int) -> None:
    """Drop lines of updates that are about to be done again: those after the checkpoint, or an earlier run's."""
    if not path.is_file():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        try:
            if line.endswith("\n") and json.loads(line)["update"] <= update:
                kept.append(line)
        except (ValueError, KeyError):  # cut short by a kill or a full disk
            continue
    write_text(path, kept)


def run_record(trainer: Any) -> dict[str, Any]:
    """The content of ``run.json``: what the run is, so that it can be repeated."""
    from contaccum.encoders.adapters import describe

    args, evaluator = trainer.args, trainer.evaluator
    data = {"fingerprint": trainer.fingerprint(), "rows": rows_of(trainer.train_dataset), **trainer.data_record}
    return {
        "run_id": trainer.run_id,
        "finished": False,
        "method": args.method,
        "seed": args.seed,
        "pairs_per_update": args.total_train_batch_size,
        "updates": trainer.state.max_steps,
        "data": data,
        "model": {
            "base": getattr(trainer.model.model_card_data, "base_model", None),
            "parameters": trainer.parameters,
            "adapters": describe(trainer.model),
            "guide": trainer.guide and trainer.guide.name,
        },
        **({"evaluation": evaluator.describe()} if hasattr(evaluator, "describe") else {}),
        "arguments": trainer.given_arguments,
        **provenance(),
    }


def read_run_record(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the content of ``run.json`` in a folder, {} without one; raise `DataError` for a broken one."""
    path = Path(folder) / RUN_RECORD
    return read_json(path) if path.is_file() else {}


def mark_finished(folder: str | os.PathLike[str], run_id: str | None) -> None:
    """Record in ``run.json`` that the model beside it is that of the run ``run_id``, if the file describes this run."""
    record = read_run_record(folder)
    if record and record.get("run_id") == run_id:
        write_json(Path(folder) / RUN_RECORD, record | {"finished": True})


def describe_in_card(card: Any, model: Any, args: Any, data: Mapping[str, Any], own_loss: bool) -> None:
    """Title, base model and data sets by name, where the user's model card does not say them; and the method, unless
    the loss is the user's own."""
    base = getattr(getattr(model.transformers_model, "config", None), "_name_or_path", "")
    if base and not card.base_model and not os.path.exists(base):  # a name on the hub, which may be out of reach
        card.base_model = base
    names = list(data.get("sets", ()))
    card.train_datasets = card.train_datasets or [{"name": name} for name in names]
    on = f" trained on {', '.join(names)}" if names else " trained by contaccum"
    card.model_name = card.model_name or Path(card.base_model or type(model).__name__).name + on
    if not own_loss:
        what = [f"method `{args.method}`", f"{args.total_train_batch_size} pairs per update"]
        bank = {name: getattr(args, name) for name in ("bank_size", "drift_compensation")} if args.keeps_bank else {}
        what += [f"`{name}={value}`" for name, value in bank.items()]
        card.task_name = f"retrieval. It was trained by contaccum: {', '.join(what)}"
    card.ir_model = True


def rows_of(dataset: Any) -> int | None:
    """The rows of a data set, or of several together; None for a stream."""
    parts = list(dataset.values()) if isinstance(dataset, dict) else [dataset]
    return sum(map(len, parts)) if all(hasattr(part, "__len__") for part in parts) else None


class CollapseWatch:
    """Warns once of each way to collapse: the loss of local rows is back at the logarithm of the number of columns (a
    guess) after it was well below; embeddings no longer differ; or the bank's columns from earlier updates get almost
    none of the softmax that columns of the present encoder get, so that "new or old" is all the loss still asks.
    """

    def __init__(self) -> None:
        self._lowest = math.inf  # loss, as a share of the logarithm of the columns
        self._streak = {"loss": 0, "spread": 0, "bank": 0}

    def observe(self, record: Mapping[str, Any]) -> list[str]:
        """Warnings that the update's ``record`` (a line of the log) gives rise to: one line each, usually none.

        Keys looked at, where present: ``update``, ``loss``, ``columns``, ``embedding_spread``, ``bank_mass_aged``.
        """
        found, due = {}, []
        columns, loss = record.get("columns", 0), record.get("loss")
        if loss is not None and columns > 2:
            guess = math.log(columns)
            if loss > 0.97 * guess and self._lowest < 0.8:
                found["loss"] = f"the loss is back at {loss:.2f}, a guess among {columns} columns ({guess:.2f})"
            self._lowest = min(self._lowest, loss / guess)
        spread, aged = record.get("embedding_spread"), record.get("bank_mass_aged")
        if spread is not None and spread < 1e-3:
            found["spread"] = f"all passages of a micro-batch have nearly the same embedding (spread {spread:.1e})"
        if aged is not None and aged < 0.02:
            found["bank"] = f"the bank's entries of earlier updates get {aged:.1%} of what a fresh negative gets"
        for kind, streak in self._streak.items():
            if streak < _PATIENCE:  # what was warned of stays
                self._streak[kind] = streak + 1 if kind in found else 0
                due += [kind] if self._streak[kind] == _PATIENCE else []
        mend = "Lower learning_rate, or set a smaller bank_size; keep drift_compensation=auto."
        return [f"update {record.get('update')}: collapse: {found[kind]}. {mend}" for kind in due]
