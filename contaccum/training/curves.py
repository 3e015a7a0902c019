"""Training curves as a picture: loss and the ratio of the towers' gradient norms, from `train_log.jsonl` files."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from contaccum.errors import DataError

_AGE = "bank_mass_age_"


def read_log(path: str | os.PathLike[str], lines: int | None = None) -> list[dict[str, Any]]:
    """The records of a ``train_log.jsonl``, one per update; the first ``lines`` of them, or all.

    Raises:
        DataError: naming the line that is not a record.
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


def mass_by_age(records: Sequence[Mapping[str, Any]]) -> tuple[list[int], list[tuple[str, list[float]]]]:
    """Where the softmax of the local rows lies: updates, and shares by what they are of, in-batch negatives first.

    Nothing where the log tells of no column from an earlier update.
    """
    known = [record for record in records if "in_batch_mass" in record]
    keys = sorted({key for record in known for key in record if key.startswith(_AGE)}, key=_start)
    if len(keys) < 2:
        return [], []
    ends = [*map(_start, keys[1:]), None]
    layers = [("in the batch", "in_batch_mass")]
    for key, end in zip(keys, ends, strict=True):
        start = _start(key)
        span = f"{start}+" if end is None else f"{start}" if end - start == 1 else f"{start}-{end - 1}"
        layers.append((f"banked, {span} updates old" if start else "banked in this update", key))
    shares = [(name, [float(record.get(key) or 0.0) for record in known]) for name, key in layers]
    return [record["update"] for record in known], shares


def _start(key: str) -> int:
    return int(key.removeprefix(_AGE))


def draw_curves(logs: Mapping[str, str | os.PathLike[str]], output: str | os.PathLike[str]) -> Path:
    """Draw loss and ``grad_norm_ratio`` against updates, a line for each run, into a PNG.

    Args:
        logs: name of the run -> its ``train_log.jsonl``.
    """
    import matplotlib

    matplotlib.use("Agg")  # no screen needed
    import matplotlib.pyplot as plt

    figure, (loss, ratio) = plt.subplots(1, 2, figsize=(10, 4))
    for name, path in logs.items():
        records = read_log(path)
        updates = [record["update"] for record in records]
        loss.plot(updates, [record["loss"] for record in records], marker=".", label=name)
        ratio.plot(updates, [record.get("grad_norm_ratio") for record in records], marker=".", label=name)
    loss.set(xlabel="update", ylabel="loss of local rows")
    ratio.set(xlabel="update", ylabel="grad norm, passages / queries")
    ratio.axhline(1.0, color="grey", linewidth=0.8, linestyle=":")
    for axes in (loss, ratio):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.tight_layout()
    path = Path(output)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path
