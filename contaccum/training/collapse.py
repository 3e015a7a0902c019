"""Says when training with a bank has gone wrong, within a few updates, and what to change."""

from __future__ import annotations

import math
from typing import Any

PATIENCE = 3  # updates in a row

_MEND = (
    "Lower learning_rate, or set a smaller bank_size (the oldest entry is {age} updates old); "
    "keep drift_compensation=auto."
)


class CollapseWatch:
    """Looks at the record of each update, and warns once of each way to collapse.

    - the loss of local rows is back at the logarithm of the number of columns (a guess) after it was well below;
    - embeddings no longer differ: their spread is near zero;
    - the bank is out of reach: its columns from earlier updates get almost none of the softmax that columns of the
      present encoder get, so that "new or old" is all the loss still asks.
    """

    def __init__(self) -> None:
        self._lowest = math.inf  # loss, as a share of the logarithm of the columns
        self._streak: dict[str, int] = {}
        self._warned: set[str] = set()

    def observe(self, record: dict[str, Any]) -> list[str]:
        """Warnings that the update's ``record`` (a line of the log) gives rise to: one line each, usually none.

        Keys looked at, where present: ``update``, ``loss``, ``columns``, ``embedding_spread``, ``bank_mass_aged``,
        ``bank_age``.
        """
        found = {}
        columns, loss = record.get("columns", 0), record.get("loss")
        if loss is not None and columns > 2:
            share = loss / math.log(columns)
            if share > 0.97 and self._lowest < 0.8:
                found["loss"] = (
                    f"the loss is back at {loss:.2f}, a guess among {columns} columns ({math.log(columns):.2f})"
                )
            self._lowest = min(self._lowest, share)
        spread = record.get("embedding_spread")
        if spread is not None and spread < 1e-3:
            found["spread"] = f"all passages of a micro-batch have nearly the same embedding (spread {spread:.1e})"
        aged = record.get("bank_mass_aged")
        if aged is not None and aged < 0.02:
            found["bank"] = (
                f"bank entries of earlier updates get {aged:.1%} of the softmax that a fresh negative gets: new and "
                "old embeddings have drifted apart"
            )
        self._streak = {kind: self._streak.get(kind, 0) + 1 for kind in found}
        due = [kind for kind, streak in self._streak.items() if streak >= PATIENCE and kind not in self._warned]
        self._warned.update(due)
        mend = _MEND.format(age=record.get("bank_age", "unknown"))
        return [f"update {record.get('update')}: collapse: {found[kind]}. {mend}" for kind in due]
