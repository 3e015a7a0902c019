"""Training curves as a picture: loss and the ratio of the towers' gradient norms, from `train_log.jsonl` files."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from contaccum.errors import DataError


def read_log(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The records of a ``train_log.jsonl``, one per update.

    Raises:
        DataError: naming the line that is not a record.
    """
    records = []
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    for number, line in enumerate(lines, start=1):
        try:
            records.append({"update": None, "loss": None, **json.loads(line)})
        except (ValueError, TypeError) as error:
            raise DataError(f"{path}:{number}: not a log record") from error
    return records


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
