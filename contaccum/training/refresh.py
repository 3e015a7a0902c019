"""Hard negatives that follow the model: mined anew with the encoder in training, every so many updates.

As in ANCE (arXiv 2007.00808), but in the training process: updates wait while all queries and passages are encoded.
What makes a negative is decided in `contaccum.mining`; which texts reach a batch, here, when its window begins: what a
loader has read ahead is older than the last refresh. Nothing here knows the loss.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from safetensors.torch import save_file
from torch import Tensor

from contaccum.data.draws import Draws, draws_of
from contaccum.data.known_positives import several_positives
from contaccum.data.text_columns import NO_TEXT, column_hashes, hash_texts
from contaccum.distributed import from_first_rank
from contaccum.errors import ConfigError, UserError
from contaccum.mining.filters import SelectionRules
from contaccum.mining.miner import mine_hard_negatives
from contaccum.mining.pool import MiningData
from contaccum.mining.sources import load_mining_data
from contaccum.training.arguments import ContAccumTrainingArguments
from contaccum.untrusted import load_tensors

NEGATIVES_FILE = "contaccum_negatives.safetensors"
ROW_NUMBER = "label"

_TRIES = 64
"""Times that another passage is drawn in place of one that may not be used."""


class NegativeRefresh:
    """The mined negatives of every query, and the texts that a batch takes of them.

    A row takes h of its query's mined negatives, drawn by (seed, epoch, row, update of the refresh) alone, and other
    passages of the pool, no positives of the query, where there are fewer.

    Args:
        dataset: of `with_row_numbers`: N rows.
        data: what is mined in; None: the rows, in which case negatives are other rows' positives.
        every: updates from one refresh to the next.
        rules: `num_negatives` of them are kept per query.
        seed: of the draws.
        batch_size, autocast_dtype: of encoding, see `mine_hard_negatives`.

    Attributes:
        at: the update before which the negatives in use were mined; None: those of the data are in use.
        rows: (Q, rules.num_negatives) int32, rows of `data.documents`, best first, -1 where there are fewer.

    Raises:
        ConfigError: no columns to put negatives into, or rows whose query is not in ``data``.
    """

    def __init__(
        self,
        dataset: Any,
        data: MiningData | None,
        every: int,
        rules: SelectionRules,
        seed: int,
        batch_size: int = 32,
        autocast_dtype: str | None = None,
    ) -> None:
        rules.check()
        (self.draws,) = draws_of(dataset)
        self.draws.gives_numbers = True
        self.columns = [name for name in dataset.column_names if re.fullmatch("negative_[0-9]+", name)]
        self.data = load_mining_data(_records(dataset, self.draws)) if data is None else data
        self.every, self.rules, self.seed = every, rules, seed
        self._batch_size, self._autocast_dtype = batch_size, autocast_dtype
        self._query_of = _find_queries(column_hashes(dataset, ["query"])[:, 0], self.data)
        self._none_given = bool((column_hashes(dataset, self.columns) == NO_TEXT).all())
        self.at: int | None = None
        self.rows = np.full((len(self.data.queries), rules.num_negatives), -1, dtype=np.int32)

    def due(self, update: int) -> bool:
        """Whether to mine before the update after ``update``; before the first where the data have no negatives."""
        return self.at != update and (self._none_given if update == 0 else update % self.every == 0)

    def mine(self, model: Any, update: int, main_process: bool = True) -> dict[str, float]:
        """Mine with ``model`` as it is. Rank 0 does, and every rank gets the same.

        Returns:
            for the log: seconds, mean scores of positives and of negatives, and the share of negatives that were among
            the query's before.
        """
        started = time.perf_counter()
        rows, record = torch.from_numpy(self.rows.copy()), torch.zeros(3, dtype=torch.float64)
        if main_process:
            mined = mine_hard_negatives(
                model,
                self.data,
                rules=self.rules,
                batch_size=self._batch_size,
                autocast_dtype=self._autocast_dtype,
                show_progress=False,
            )
            found = mined.rows.astype(np.int32)
            kept = (found[:, :, None] == self.rows[:, None, :]).any(-1) & (found >= 0)
            about = mined.record("keep")
            scores = [about["mean_positive_score"], about["mean_negative_score"], kept.sum() / (found >= 0).sum()]
            rows, record = torch.from_numpy(found), torch.tensor(scores, dtype=torch.float64)
        rows, record = (from_first_rank(x) for x in (rows, record))
        self.rows, self.at = rows.numpy(), update
        names = ("mined_positive_score", "mined_negative_score", "mined_as_before")
        values = dict(zip(names, record.tolist(), strict=True))
        return {"mined_at": update, "mining_seconds": time.perf_counter() - started, **values}

    def renew(
        self, inputs: dict[str, Any], collate: Callable[[list[dict[str, Any]]], dict[str, Any]]
    ) -> dict[str, Any]:
        """A collated batch with its rows' mined negatives in the place of those that it was read with.

        Args:
            inputs: with row numbers, int64 (n,), or (n, 3+h) before ids of queries, positives and negatives.
            collate: the trainer's collator.

        Returns:
            the batch without row numbers; the ids, where there were any, are those of the new negatives.
        """
        inputs = dict(inputs)
        labels = inputs.pop("label")
        numbers, ids = (labels, None) if labels.ndim == 1 else (labels[:, 0], labels[:, 1:])
        if self.at is not None:
            texts = [self._texts(number) for number in numbers.tolist()]
            # With a query and a positive, so that each column keeps its place and so its prompt and its task.
            rows = [{"query": "", "positive": "", **dict(zip(self.columns, row, strict=True))} for row in texts]
            new = collate(rows)
            starts = tuple(f"{name}_" for name in self.columns)
            inputs |= {key: _like(value, inputs.get(key)) for key, value in new.items() if key.startswith(starts)}
            if ids is not None:
                hashes = hash_texts(pa.array([text for row in texts for text in row], pa.large_string()))
                ids = torch.cat([ids[:, :2], torch.from_numpy(hashes).reshape(len(rows), -1).to(ids)], dim=1)
        if ids is not None:
            inputs["label"] = ids
        return inputs

    def _texts(self, number: int) -> list[str]:
        query, h = int(self._query_of[number]), len(self.columns)
        seed = [part & (2**64 - 1) for part in (self.seed, self.draws.epoch, number, self.at or 0)]
        rng = np.random.default_rng(seed)
        mined = self.rows[query][self.rows[query] >= 0]
        chosen = mined[rng.permutation(len(mined))[:h]].tolist()
        forbidden = {*self.data.excluded[query], *self.data.same_as_query[query], *chosen}
        for _ in range(_TRIES):
            if len(chosen) == h:
                break
            row = int(rng.integers(self.data.pool_size))
            if row not in forbidden:
                forbidden.add(row)
                chosen.append(row)
        if not chosen:
            raise ConfigError(
                f"refresh_negatives_every={self.every}: the query {self.data.queries[query][:60]!r} has no passage "
                "that could be its negative. Give a larger refresh_corpus, or train without negatives"
            )
        # In a tiny pool there may be too few: then one is there twice.
        return [self.data.documents[chosen[i % len(chosen)]].passage for i in range(h)]

    def save(self, folder: str | os.PathLike[str]) -> None:
        """The negatives in use, for a run that resumes between two refreshes."""
        at = -1 if self.at is None else self.at
        save_file({"rows": torch.from_numpy(self.rows), "at": torch.tensor(at)}, os.path.join(folder, NEGATIVES_FILE))

    def load(self, folder: str) -> None:
        """What `save` wrote; raises `UserError` where there is nothing, or other data were mined in."""
        path = os.path.join(folder, NEGATIVES_FILE)
        if not os.path.isfile(path):
            raise UserError(
                f"{folder}: no {NEGATIVES_FILE}: written without refresh_negatives_every; resume it without"
            )
        state = load_tensors(path)
        if state["rows"].shape != self.rows.shape or int(state["rows"].max()) >= self.data.pool_size:
            raise UserError(f"{path}: mined in other data, or with another refresh_pool; resume with those")
        at = int(state["at"])
        self.rows, self.at = state["rows"].numpy(), None if at < 0 else at


def make_refresh(args: ContAccumTrainingArguments, dataset: Any, data: MiningData | None) -> NegativeRefresh | None:
    """The refresh that the arguments ask for; None without ``refresh_negatives_every``."""
    if args.refresh_negatives_every is None:
        if data is not None:
            raise ConfigError("mining_data without refresh_negatives_every: nothing is mined. Set it, or drop the data")
        return None
    rules = SelectionRules(
        num_negatives=args.refresh_pool,
        range_max=args.refresh_range_max,
        relative_margin=args.refresh_relative_margin,
    )
    seed = args.seed if args.data_seed is None else args.data_seed
    autocast = "bfloat16" if args.bf16 else "float16" if args.fp16 else None
    size = args.pairs_per_micro_batch
    return NegativeRefresh(dataset, data, args.refresh_negatives_every, rules, seed, size, autocast)


def with_row_numbers(dataset: Any) -> Any:
    """Training data whose rows say their number, which they lose when they are read unless negatives are refreshed.

    Data of `load_training_data` that draws something is like that already. Others get a column, and ids of known
    positives where a query has several.

    Raises:
        ConfigError: several data sets, a stream, or data without columns of negatives.
    """
    names = getattr(dataset, "column_names", None)
    if isinstance(dataset, dict) or not hasattr(dataset, "__len__") or not isinstance(names, list):
        raise ConfigError(
            "refresh_negatives_every needs one data set whose rows can be looked up: drop it, or train on one that is "
            "neither a stream nor several by name"
        )
    if names[:2] != ["query", "positive"] or "negative_1" not in names:
        raise ConfigError(
            f"refresh_negatives_every with the columns {', '.join(names)}: needs query, positive, negative_1 and on "
            "(their texts may be None). Set num_hard_negatives, or rename and add columns"
        )
    if draws_of(dataset):
        return dataset
    taken = [name for name in names if name in ("label", "labels", "score", "scores")]
    if taken:
        raise ConfigError(
            f"refresh_negatives_every with a column {taken[0]!r}: it would hide the rows' numbers. Drop it"
        )
    known = several_positives(*column_hashes(dataset, ["query", "positive"]).T)
    rows = dataset.add_column(ROW_NUMBER, np.arange(len(dataset)))
    return rows.with_transform(Draws(rows, None, known if len(known) else None, ROW_NUMBER))


def _records(dataset: Any, draws: Draws) -> Iterator[dict[str, Any]]:
    """Rows with all the positives that they know, the row's own first."""
    for number, row in enumerate(dataset.with_format(None).select_columns(["query", "positive"])):
        yield {"query": row["query"], "positive": [row["positive"], *draws.further_positives(number)]}


def _find_queries(ours: np.ndarray, data: MiningData) -> np.ndarray:
    """For each row, by the hash of its query, the number of the query in ``data``: int32 (N,)."""
    theirs = hash_texts(pa.array(data.queries, pa.large_string()))
    order = np.argsort(theirs, kind="stable")
    found = order[np.searchsorted(theirs, ours, sorter=order).clip(max=len(order) - 1)]
    lost = np.flatnonzero(theirs[found] != ours)
    if len(lost):
        raise ConfigError(
            f"row {lost[0]} of the training data has a query that the data to mine in lack (and so have "
            f"{len(lost) - 1:,} others): load both from the same source"
        )
    return found.astype(np.int32)


def _like(value: Any, old: Any) -> Any:
    return value.to(old.device) if isinstance(value, Tensor) and isinstance(old, Tensor) else value
