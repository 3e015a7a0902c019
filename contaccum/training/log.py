"""Files that a run writes for its user: a line per update, a record of the run, a model card.

This module reads and writes them, and detects a collapse of training. It does not import torch, so
that reading a log is quick. `callbacks` decides when something is written.
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
from contaccum.training.arguments import ContAccumTrainingArguments

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

    from contaccum.training.arguments import ContAccumTrainingArguments


TRAIN_LOG = "train_log.jsonl"
"""File with one record per update."""
EVAL_LOG = "eval_log.jsonl"
"""File with one record per evaluation during training."""
RUN_RECORD = "run.json"
"""File with the description of the run: its id, settings, data and versions."""
Record = dict[str, Any]
"""A line of a log: numbers and texts by name."""
REMEDY_WITHOUT_NEGATIVES = (
    "Check that texts differ after they are cut to the maximum length, and that prompts, query ids "
    "or a guide do not mask every negative"
)
"""What to do if queries have no negatives to learn from."""

# Thresholds of `CollapseWatch`. Losses are fractions of the loss of a random guess.
_SYMPTOM_UPDATES = {"loss": 3, "spread": 3, "bank": 3, "masked": 1, "gradient": 1}
"""Number of updates in a row with a symptom before the warning."""
_MIN_COLLAPSED_LOSS = 0.97
_MAX_LEARNED_LOSS = 0.8  # a run whose loss was below this had learned something
_MIN_SPREAD = 1e-3
_MIN_AGED_MASS = 0.02  # softmax mass of an old banked negative / mass of a fresh negative


def read_log(path: str | os.PathLike[str], lines: int | None = None) -> list[Record]:
    """Return the records of a log, one per line.

    Args:
        path: the log.
        lines: number of lines to read from the start; None reads all.

    Raises:
        DataError: for a file that cannot be read, or a line that is not a record.
    """
    records = []
    try:
        texts = Path(path).read_text(encoding="utf-8").splitlines()[:lines]
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    for number, line in enumerate(texts, start=1):
        try:
            # Readers rely on these two keys. A line about an evaluation has no loss.
            records.append({"update": None, "loss": None, **json.loads(line)})
        except (ValueError, TypeError) as error:
            raise DataError(f"{path}:{number}: not a log record") from error
    return records


def append_line(path: Path, record: Mapping[str, Any]) -> None:
    """Append a record to a log as a line of JSON; a number that is not finite becomes null."""
    path.parent.mkdir(parents=True, exist_ok=True)
    finite_record = dict(record)
    for key, value in record.items():
        if isinstance(value, float) and not math.isfinite(value):
            finite_record[key] = None
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(finite_record) + "\n")


def truncate_log(path: Path, update: int) -> None:
    """Drop the lines after update number ``update``, because the run will repeat these updates."""
    if not path.is_file():
        return
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        try:
            if line.endswith("\n") and json.loads(line)["update"] <= update:
                lines.append(line)
        except (ValueError, KeyError):  # a kill or a full disk has cut the line short
            continue
    write_text(path, lines)


def read_run_record(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the content of ``run.json`` in a folder; {} if there is no such file.

    Raises:
        DataError: for a file that is not valid JSON.
    """
    path = Path(folder) / RUN_RECORD
    return read_json(path) if path.is_file() else {}


def mark_finished(folder: str | os.PathLike[str], run_id: str | None) -> None:
    """Record in ``run.json`` that the run ``run_id`` has finished and saved its model there.

    A ``run.json`` that describes another run is not changed.
    """
    record = read_run_record(folder)
    if record and record["run_id"] == run_id:
        write_json(Path(folder) / RUN_RECORD, record | {"finished": True})


def fill_model_card(
    model: SentenceTransformer,
    args: ContAccumTrainingArguments,
    data: Mapping[str, Any],
    has_custom_loss: bool,
) -> None:
    """Fill in missing fields of a model card: title, base model, data sets, and the method.

    Args:
        model: the model with the card.
        args: the arguments of the run.
        data: the record of the data, with the names of the data sets in ``sets``.
        has_custom_loss: whether the user passed a loss; the card then does not name the method.
    """
    card = model.model_card_data
    config = getattr(model.transformers_model, "config", None)
    base = getattr(config, "_name_or_path", "")
    # A local folder is not named, because the name means nothing to other people.
    is_folder = os.path.exists(base)
    if base and not card.base_model and not is_folder:
        card.base_model = base
    names = list(data.get("sets", ()))
    if not card.train_datasets:
        card.train_datasets = [{"name": name} for name in names]
    if not card.model_name:
        base_name = Path(card.base_model or type(model).__name__).name
        suffix = f"on {', '.join(names)}" if names else "by contaccum"
        card.model_name = f"{base_name} trained {suffix}"
    if not has_custom_loss:
        settings = [f"method `{args.method}`", f"{args.total_train_batch_size} pairs per update"]
        if args.has_bank:
            settings.append(f"`bank_size={args.bank_size}`")
            settings.append(f"`drift_compensation={args.drift_compensation}`")
        card.task_name = f"retrieval. It was trained by contaccum: {', '.join(settings)}"
    card.ir_model = True  # the card shows how to encode queries and documents


class CollapseWatch:
    """Detector of three kinds of collapse, and of updates that cannot train.

    It returns one warning for each kind.

    The loss of a query is a cross-entropy over columns: its positive and all of its negatives.

    - Loss: the loss returns to log(number of columns), the loss of a random guess, after it was
      well below.
    - Spread: all embeddings are nearly the same.
    - Bank: banked columns from earlier updates get almost none of the softmax mass that columns of
      the current update get. The loss then only separates new embeddings from old ones.
    - Masked: every negative of a micro-batch is masked as a false negative.
    - Gradient: the gradient is exactly 0.

    The first three symptoms must be present in three updates in a row.
    """

    def __init__(self) -> None:
        self._lowest_loss = math.inf  # as a fraction of the loss of a random guess
        self._streaks = dict.fromkeys(_SYMPTOM_UPDATES, 0)  # updates in a row with the symptom

    def observe(self, record: Mapping[str, Any]) -> list[str]:
        """Return the warnings after an update, one line each; usually there are none.

        Args:
            record: a line of the log. The entries ``update``, ``loss``, ``loss_has_other_terms``,
                ``columns``, ``embedding_spread``, ``bank_mass_aged``, ``masked`` and the gradient
                norms of the towers are read, if present.
        """
        symptoms = self._find_symptoms(record)
        warnings = []
        for name, streak in self._streaks.items():
            if streak >= _SYMPTOM_UPDATES[name]:  # this warning was returned before
                continue
            self._streaks[name] = streak + 1 if name in symptoms else 0
            if self._streaks[name] < _SYMPTOM_UPDATES[name]:
                continue
            if name in ("masked", "gradient"):
                text = f"{symptoms[name]}. {REMEDY_WITHOUT_NEGATIVES}"
            else:
                text = f"collapse: {symptoms[name]}. Lower learning_rate"
                if "bank_age" in record:  # the run has a bank
                    text += ", or set a smaller bank_size; keep drift_compensation=auto"
            warnings.append(f"update {record.get('update')}: {text}.")
        return warnings

    def _find_symptoms(self, record: Mapping[str, Any]) -> dict[str, str]:
        """Return a description of each symptom of a collapse in an update, by name."""
        symptoms = {}
        columns = record.get("columns", 0)
        loss = record.get("loss")
        has_other_terms = record.get("loss_has_other_terms", False)
        if loss is not None and not has_other_terms and columns > 2:
            guess = math.log(columns)
            had_learned = self._lowest_loss < _MAX_LEARNED_LOSS
            if had_learned and loss > _MIN_COLLAPSED_LOSS * guess:
                symptoms["loss"] = (
                    f"the loss is back at {loss:.2f}, a random guess among {columns} columns "
                    f"({guess:.2f})"
                )
            self._lowest_loss = min(self._lowest_loss, loss / guess)
        spread = record.get("embedding_spread")
        if spread is not None and spread < _MIN_SPREAD:
            symptoms["spread"] = (
                "all passages of a micro-batch have nearly the same embedding "
                f"(spread {spread:.1e})"
            )
        aged_mass = record.get("bank_mass_aged")
        if aged_mass is not None and aged_mass < _MIN_AGED_MASS:
            symptoms["bank"] = (
                f"banked negatives from earlier updates get {aged_mass:.1%} of the softmax mass of "
                "a fresh negative"
            )
        if record.get("masked") == 1:
            symptoms["masked"] = (
                "every negative of a micro-step is masked as a false negative, so its queries have "
                "no negatives"
            )
            return symptoms
        norms = [record[key] for key in ("grad_norm_query", "grad_norm_passage") if key in record]
        # Without a negative, as in the first update of a run with one pair per update and a bank,
        # there is no gradient.
        if norms and not any(norms) and record.get("columns") != 1:
            symptoms["gradient"] = "the gradient is exactly 0, so nothing is trained"
        return symptoms
