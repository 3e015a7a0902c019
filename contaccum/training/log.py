"""The files that a run writes for people: a line per update, a record of the run, a model card.

This module reads and writes them, and warns of a collapse. It needs no torch to read them.
`callbacks` decides when something is written.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contaccum.errors import DataError
from contaccum.files import read_json, write_json, write_text

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

    from contaccum.training.arguments import ContAccumTrainingArguments

TRAIN_LOG = "train_log.jsonl"
EVAL_LOG = "eval_log.jsonl"
RUN_RECORD = "run.json"
Record = dict[str, Any]
"""A line of a log: numbers and texts by name."""
_PATIENCE = 3  # updates in a row before the warning of a collapse


def read_log(path: str | os.PathLike[str], lines: int | None = None) -> list[dict[str, Any]]:
    """Return the records of a log, one per update, or its first ``lines``.

    Raises:
        DataError: for a file that cannot be read, or a line that is no record.
    """
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
    """Add a line to a log; a number that is not finite becomes null."""
    path.parent.mkdir(parents=True, exist_ok=True)
    finite = dict(record)
    for key, value in record.items():
        if isinstance(value, float) and not math.isfinite(value):
            finite[key] = None
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(finite) + "\n")


def keep_log_until(path: Path, update: int) -> None:
    """Drop the lines after ``update``, because their updates will be done again."""
    if not path.is_file():
        return
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        try:
            if line.endswith("\n") and json.loads(line)["update"] <= update:
                lines.append(line)
        except (ValueError, KeyError):  # cut short by a kill or a full disk
            continue
    write_text(path, lines)


def read_run_record(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the content of ``run.json`` in a folder, {} without one.

    Raises:
        DataError: for a broken file.
    """
    path = Path(folder) / RUN_RECORD
    return read_json(path) if path.is_file() else {}


def mark_finished(folder: str | os.PathLike[str], run_id: str | None) -> None:
    """Record in ``run.json`` that the model beside it is the one that the run ``run_id`` trained.

    A file that describes another run stays as it is.
    """
    record = read_run_record(folder)
    if record and record.get("run_id") == run_id:
        write_json(Path(folder) / RUN_RECORD, record | {"finished": True})


def describe_in_card(
    model: SentenceTransformer,
    args: ContAccumTrainingArguments,
    data: Mapping[str, Any],
    has_own_loss: bool,
) -> None:
    """Fill the gaps of a model card: title, base model, data sets, and the method.

    The method is left out where the loss is the user's own.
    """
    card = model.model_card_data
    base = getattr(getattr(model.transformers_model, "config", None), "_name_or_path", "")
    # A folder is not named, because it says nothing to other people.
    if base and not card.base_model and not os.path.exists(base):
        card.base_model = base
    names = list(data.get("sets", ()))
    if not card.train_datasets:
        card.train_datasets = [{"name": name} for name in names]
    if not card.model_name:
        base_name = Path(card.base_model or type(model).__name__).name
        suffix = f"on {', '.join(names)}" if names else "by contaccum"
        card.model_name = f"{base_name} trained {suffix}"
    if not has_own_loss:
        settings = [f"method `{args.method}`", f"{args.total_train_batch_size} pairs per update"]
        if args.keeps_bank:
            settings.append(f"`bank_size={args.bank_size}`")
            settings.append(f"`drift_compensation={args.drift_compensation}`")
        card.task_name = f"retrieval. It was trained by contaccum: {', '.join(settings)}"
    card.ir_model = True


class CollapseWatch:
    """Warnings of three ways in which training collapses, each given once.

    - The loss of local rows is back at the logarithm of the number of columns (a guess), after it
      was well below.
    - All embeddings are nearly the same.
    - The bank's columns of earlier updates get almost none of the softmax that fresh columns get:
      the loss then only separates new from old.
    """

    def __init__(self) -> None:
        self._lowest_loss = math.inf  # as a share of the logarithm of the number of columns
        self._streaks = {"loss": 0, "spread": 0, "bank": 0}

    def observe(self, record: Mapping[str, Any]) -> list[str]:
        """Return the warnings after an update, a line each; usually none.

        Args:
            record: a line of the log. Read are ``update``, ``loss``, ``columns``,
                ``embedding_spread`` and ``bank_mass_aged``, where present.
        """
        symptoms = self._find_symptoms(record)
        warnings = []
        for name, streak in self._streaks.items():
            if streak >= _PATIENCE:  # this warning was given
                continue
            self._streaks[name] = streak + 1 if name in symptoms else 0
            if self._streaks[name] == _PATIENCE:
                warnings.append(
                    f"update {record.get('update')}: collapse: {symptoms[name]}. Lower "
                    "learning_rate, or set a smaller bank_size; keep drift_compensation=auto."
                )
        return warnings

    def _find_symptoms(self, record: Mapping[str, Any]) -> dict[str, str]:
        """Return the signs of a collapse in an update, described in a sentence each."""
        symptoms = {}
        columns = record.get("columns", 0)
        loss = record.get("loss")
        if loss is not None and columns > 2:
            guess = math.log(columns)
            if loss > 0.97 * guess and self._lowest_loss < 0.8:
                symptoms["loss"] = (
                    f"the loss is back at {loss:.2f}, a guess among {columns} columns ({guess:.2f})"
                )
            self._lowest_loss = min(self._lowest_loss, loss / guess)
        spread = record.get("embedding_spread")
        if spread is not None and spread < 1e-3:
            symptoms["spread"] = (
                "all passages of a micro-batch have nearly the same embedding "
                f"(spread {spread:.1e})"
            )
        aged = record.get("bank_mass_aged")
        if aged is not None and aged < 0.02:
            symptoms["bank"] = (
                f"the bank's entries of earlier updates get {aged:.1%} of what a fresh negative "
                "gets"
            )
        return symptoms
