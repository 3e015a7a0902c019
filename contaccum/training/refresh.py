"""Hard negatives that are mined anew with the encoder in training, every few updates.

As in ANCE (arXiv 2007.00808), but in the training process: updates wait while all queries and
passages are encoded. `contaccum.mining` decides which passages are negatives. This module replaces
the texts of a batch just before it is trained on, because a data loader reads batches ahead and
would otherwise deliver negatives of an earlier mining. It does not depend on the loss.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor

from contaccum.data.labels import decode_row_numbers
from contaccum.data.sampling import add_row_numbers, first_texts, get_samplings, text_ids
from contaccum.distributed import over_ranks
from contaccum.errors import ConfigError, UserError
from contaccum.mining import MiningData, load_mining_data, mine_hard_negatives
from contaccum.training.arguments import ContAccumTrainingArguments

_MAX_SAMPLES = 64  # of random passages, to fill up the negatives of a row

Collate = Callable[[list[dict[str, Any]]], dict[str, Any]]


class NegativeRefresh:
    """The mined negatives of every query, and the replacement of a batch's negatives by them.

    Each row takes h of its query's mined negatives. Where there are fewer, other passages of the
    pool fill up, except positives of the query. The sample depends only on the seed, the epoch, the
    row and the update of the last mining.

    Args:
        args: the arguments of the run.
        dataset: the training set, with the columns query, positive, negative_1 and so on.
        data: queries and the passages to mine in; None: the queries and positives of ``dataset``.

    Raises:
        ConfigError: for a data set with other columns, or with a query that ``data`` does not have.
    """

    def __init__(
        self, args: ContAccumTrainingArguments, dataset: Any, data: MiningData | None
    ) -> None:
        _check_columns(dataset)
        if not get_samplings(dataset):
            dataset = add_row_numbers(dataset)
        self.dataset = dataset
        (self.sampling,) = get_samplings(dataset)
        self.sampling.has_row_numbers = True
        self.args = args
        self.columns = [name for name in dataset.column_names if name.startswith("negative_")]
        self.data = load_mining_data(self.sampling.pairs()) if data is None else data
        self._query_of_row, self._has_negatives = self._read_dataset()
        # The update before which the negatives in use were mined; None: those of the data set.
        self.mined_at: int | None = None
        # int32 (queries, refresh_pool), rows of data.documents, best first, padded with -1.
        self.rows = np.full((len(self.data.queries), args.refresh_pool), -1, dtype=np.int32)

    def _read_dataset(self) -> tuple[np.ndarray, bool]:
        """Return the query number of every row, and whether any row has a negative."""
        query_numbers: dict[str | None, int] = {
            text: number for number, text in enumerate(self.data.queries)
        }
        query_of_row: list[int] = []
        has_negatives = False
        for batch in first_texts(self.dataset):
            query_of_row += [query_numbers.get(query, -1) for query in batch["query"]]
            has_negatives = has_negatives or any(any(batch[name]) for name in self.columns)
        num_missing = query_of_row.count(-1)
        if num_missing:
            raise ConfigError(
                f"row {query_of_row.index(-1)} of the training data, and {num_missing - 1:,} "
                "others, have a query that the data to mine in lack: load both from the same source"
            )
        return np.array(query_of_row, dtype=np.int32), has_negatives

    def is_due(self, update: int) -> bool:
        """Return whether to mine after ``update`` updates.

        Before the first update, mining is due where the data set has no negatives.
        """
        if self.mined_at == update:
            return False
        if update == 0:
            return not self._has_negatives
        interval = self.args.refresh_negatives_every
        return interval is not None and update % interval == 0

    def mine(
        self, model: SentenceTransformer, update: int, is_first_rank: bool
    ) -> dict[str, float]:
        """Mine with the present ``model`` on rank 0, and send the result to every rank.

        Returns the numbers for the log.
        """
        started = time.perf_counter()
        rows = np.full_like(self.rows, -1)  # the maximum over ranks is then rank 0's
        if is_first_rank:
            rows = self._mine_rows(model)
        all_rows = over_ranks("MAX", torch.from_numpy(rows).to(self.args.device))
        self.rows = all_rows.cpu().numpy()
        self.mined_at = update
        return {"mined_at": update, "mining_seconds": time.perf_counter() - started}

    def _mine_rows(self, model: SentenceTransformer) -> np.ndarray:
        args = self.args
        precision = "float32"
        if args.bf16:
            precision = "bfloat16"
        elif args.fp16:
            precision = "float16"
        mined = mine_hard_negatives(
            self.data,
            model,
            num_negatives=args.refresh_pool,
            range_max=args.refresh_range_max,
            relative_margin=args.refresh_relative_margin,
            batch_size=args.pairs_per_micro_batch,
            precision=precision,
            show_progress=False,
        )
        return mined.rows.astype(np.int32)

    def replace_negatives(self, inputs: Mapping[str, Any], collate: Collate) -> dict[str, Any]:
        """Return a collated batch with its rows' mined negatives.

        The returned labels have no row numbers, and the text ids of the new negatives.

        Args:
            inputs: a collated batch whose labels have row numbers.
            collate: the data collator that made it.
        """
        inputs = dict(inputs)
        labels = decode_row_numbers(inputs.pop("label"))
        assert labels.row_numbers is not None
        ids = labels.text_ids
        if self.mined_at is not None:
            negatives = [self._sample_negatives(row) for row in labels.row_numbers.tolist()]
            inputs |= self._collate_negatives(negatives, collate)
            if ids is not None:
                hashes = text_ids(text for texts in negatives for text in texts)
                new_ids = torch.from_numpy(hashes).reshape(len(negatives), -1)
                ids = torch.cat([ids[:, :2], new_ids.to(ids)], dim=1)
        if ids is not None:
            inputs["label"] = ids
        return inputs

    def _collate_negatives(self, negatives: list[list[str]], collate: Collate) -> dict[str, Any]:
        """Return the features of the columns of negatives."""
        rows = []
        for texts in negatives:
            # The collator finds prompt and task of a column by its place, so all columns are there.
            row = {"query": "", "positive": ""}
            row |= dict(zip(self.columns, texts, strict=True))
            rows.append(row)
        prefixes = tuple(f"{name}_" for name in self.columns)
        features = collate(rows)
        return {key: value for key, value in features.items() if key.startswith(prefixes)}

    def state_dict(self) -> dict[str, Tensor]:
        """Return the negatives in use, for a run that resumes between two refreshes."""
        mined_at = -1 if self.mined_at is None else self.mined_at
        return {"rows": torch.from_numpy(self.rows), "mined_at": torch.tensor(mined_at)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load `state_dict`; raise `UserError` where other data were mined in."""
        rows = state["rows"]
        if rows.shape != self.rows.shape or int(rows.max()) >= self.data.pool_size:
            raise UserError(
                "the checkpoint's negatives were mined in other data: resume with those"
            )
        mined_at = int(state["mined_at"])
        self.rows = rows.numpy()
        self.mined_at = None if mined_at < 0 else mined_at

    def _sample_negatives(self, row: int) -> list[str]:
        """Return the texts of a row's negatives, one for each column of negatives."""
        query = int(self._query_of_row[row])
        num_columns = len(self.columns)
        seed = (self.args.order_seed, self.sampling.epoch, row, self.mined_at or 0)
        rng = np.random.default_rng([number & (2**64 - 1) for number in seed])
        mined = self.rows[query][self.rows[query] >= 0]
        chosen = mined[rng.permutation(len(mined))[:num_columns]].tolist()
        if len(chosen) < num_columns:
            forbidden = {*self.data.excluded[query], *chosen}
            for passage in rng.integers(self.data.pool_size, size=_MAX_SAMPLES).tolist():
                if len(chosen) < num_columns and passage not in forbidden:
                    forbidden.add(passage)
                    chosen.append(passage)
        if not chosen:
            text = self.data.queries[query][:60]
            raise ConfigError(f"the query {text!r} has no passage that could be its negative")
        # In a tiny pool there may be too few passages: then one of them is repeated.
        repeated = [chosen[index % len(chosen)] for index in range(num_columns)]
        return [self.data.documents[passage].passage for passage in repeated]


def _check_columns(dataset: Any) -> None:
    """Raise `ConfigError` for a data set whose negatives cannot be replaced."""
    names = list(getattr(dataset, "column_names", None) or [])
    has_columns = names[:2] == ["query", "positive"] and "negative_1" in names
    if not has_columns or not hasattr(dataset, "__len__"):
        raise ConfigError(
            "refresh_negatives_every needs one data set, neither a stream nor several, with the "
            "columns query, positive, negative_1 and on (their texts may be None), and found "
            f"{', '.join(names)}"
        )
