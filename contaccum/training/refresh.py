"""Refresh of hard negatives: mining with the encoder in training, every few updates.

The method is ANCE (arXiv 2007.00808), but inside the training process: training pauses while all
queries and passages are encoded. `contaccum.mining` selects the negatives. This module puts their
texts into each batch just before the batch is trained on, because a data loader reads batches ahead
and would otherwise deliver negatives of an earlier mining. To find the query of each row of a
batch, the data set passes row numbers in its label column; see `contaccum.data.labels`. This module
does not depend on the loss.
"""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Mapping
from dataclasses import asdict
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
from contaccum.training.train_data import Batch, Collate

_MAX_SAMPLES = 64  # random passages that are tried to fill up the negatives of a row


class NegativeRefresh:
    """The mined negatives of every query, which replace the negatives in each batch.

    A row has h columns of negatives, and gets a random sample of h mined negatives of its query. If
    fewer were mined, random other passages are added, but no positive of the query. The sample
    depends only on the seed, the epoch, the row and the update of the last mining, so that a
    resumed run draws it again.

    Args:
        args: the arguments of the run.
        dataset: the training set, with the columns query, positive, negative_1 and so on.
        data: queries and passages for mining. Default: the queries and positives of ``dataset``.

    Attributes:
        dataset: the training set, whose labels include row numbers.
        sampling: the `EpochSampling` of the data set, which samples its texts in each epoch.
        mined_at: number of updates before the last mining; None while the negatives of the data set
            are used.
        rows: int32 (queries, refresh_pool), the mined negatives of each query as rows of
            ``data.documents``, best first, padded with -1. These are not rows of the data set.

    Raises:
        ConfigError: for a data set with other columns, or with a query that ``data`` lacks.
    """

    def __init__(
        self, args: ContAccumTrainingArguments, dataset: Any, data: MiningData | None
    ) -> None:
        _check_columns(dataset)
        if get_samplings(dataset):
            # The caller may also train without refresh on this data set, so its own sampling must
            # not put row numbers into the labels.
            [sampling] = get_samplings(dataset)
            dataset = dataset.with_transform(copy.copy(sampling))
        else:
            dataset = add_row_numbers(dataset)
        self.dataset = dataset
        [self.sampling] = get_samplings(dataset)
        self.sampling.has_row_numbers = True  # from now on, the labels include row numbers
        self.args = args
        self.columns = [name for name in dataset.column_names if name.startswith("negative_")]
        self.data = load_mining_data(self.sampling.pairs()) if data is None else data
        self._query_numbers, self._has_negatives = self._read_dataset()
        self.mined_at: int | None = None
        self.rows = np.full((len(self.data.queries), args.refresh_pool), -1, dtype=np.int32)

    def _read_dataset(self) -> tuple[np.ndarray, bool]:
        """Return the query number of every row, int32 (rows,), and whether any row has negatives.

        A query number is an index into ``data.queries``.
        """
        number_by_query: dict[str | None, int] = {}
        for number, text in enumerate(self.data.queries):
            number_by_query[text] = number
        query_numbers: list[int] = []  # -1 for a query that is missing
        has_negatives = False
        for batch in first_texts(self.dataset):
            query_numbers += [number_by_query.get(query, -1) for query in batch["query"]]
            for column in self.columns:
                if any(batch[column]):
                    has_negatives = True
        num_missing = query_numbers.count(-1)
        if num_missing:
            raise ConfigError(
                f"row {query_numbers.index(-1)} of the training data, and {num_missing - 1:,} "
                "other rows, have a query that the data for mining lack: load both from the same "
                "source"
            )
        return np.array(query_numbers, dtype=np.int32), has_negatives

    def is_due(self, num_updates: int) -> bool:
        """Return whether to mine after ``num_updates`` updates.

        Before the first update, mining is due only if the data set has no negatives.
        """
        if self.mined_at == num_updates:  # a resumed run has already mined here
            return False
        if num_updates == 0:
            return not self._has_negatives
        interval = self.args.refresh_negatives_every
        return interval is not None and num_updates % interval == 0

    def mine(
        self, model: SentenceTransformer, num_updates: int, is_first_rank: bool
    ) -> dict[str, float]:
        """Mine with the current ``model`` on rank 0, and send ``rows`` to every rank.

        Args:
            model: the encoder.
            num_updates: number of updates of the run so far.
            is_first_rank: whether this process is rank 0.

        Returns:
            Entries for the log.
        """
        started = time.perf_counter()
        # The other ranks have -1 everywhere, so the maximum over all ranks is the result of rank 0.
        rows = np.full_like(self.rows, -1)
        if is_first_rank:
            rows = self._mine_rows(model)
        all_rows = over_ranks("MAX", torch.from_numpy(rows).to(self.args.device))
        self.rows = all_rows.cpu().numpy()
        self.mined_at = num_updates
        return {"mined_at": num_updates, "mining_seconds": time.perf_counter() - started}

    def _mine_rows(self, model: SentenceTransformer) -> np.ndarray:
        """Mine with a model; return the negatives in the form of ``self.rows``."""
        args = self.args
        precision = "float32"
        if args.bf16:
            precision = "bfloat16"
        elif args.fp16:
            precision = "float16"
        mined = mine_hard_negatives(
            self.data,
            model,
            batch_size=args.pairs_per_micro_batch,
            precision=precision,
            show_progress=False,
            **asdict(args.make_refresh_rules()),
        )
        return mined.rows.astype(np.int32)

    def replace_negatives(self, inputs: Mapping[str, Any], collate: Collate) -> dict[str, Any]:
        """Replace the negatives in a collated batch by mined ones.

        Args:
            inputs: a collated batch whose labels include row numbers.
            collate: the trainer's data collator.

        Returns:
            The batch with new negatives. Its labels have the text ids of the new negatives, and no
            row numbers.
        """
        inputs = dict(inputs)
        labels = decode_row_numbers(inputs.pop("label"))
        assert labels.row_numbers is not None
        ids = labels.text_ids
        if self.mined_at is not None:
            # n rows with h texts each
            negatives = [self._sample_negatives(row) for row in labels.row_numbers.tolist()]
            inputs.update(self._collate_negatives(negatives, collate))
            if ids is not None:
                flat_ids = text_ids(itertools.chain.from_iterable(negatives))
                negative_ids = torch.from_numpy(flat_ids).reshape(len(negatives), -1)  # (n, h)
                # The first two columns are the ids of query and positive.
                ids = torch.cat([ids[:, :2], negative_ids.to(ids)], dim=1)
        if ids is not None:
            inputs["label"] = ids
        return inputs

    def _collate_negatives(self, negatives: list[list[str]], collate: Collate) -> Batch:
        """Return the features of the columns of negatives, for the texts of each row."""
        rows = []
        for texts in negatives:
            # The collator chooses a column's prompt and tower by the position of the column, so a
            # row needs the columns before the negatives too. Their features are dropped below.
            row = {"query": "", "positive": ""}
            row |= dict(zip(self.columns, texts, strict=True))
            rows.append(row)
        prefixes = tuple(f"{name}_" for name in self.columns)
        features = collate(rows)
        return {key: value for key, value in features.items() if key.startswith(prefixes)}

    def state_dict(self) -> dict[str, Tensor]:
        """Return the current negatives, so that a run can resume between two refreshes."""
        mined_at = -1 if self.mined_at is None else self.mined_at
        return {"rows": torch.from_numpy(self.rows), "mined_at": torch.tensor(mined_at)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load the result of `state_dict`; raise `UserError` if it was mined in other data."""
        rows = state["rows"]
        if rows.shape != self.rows.shape or int(rows.max()) >= self.data.pool_size:
            raise UserError(
                "the negatives in the checkpoint were mined in other data: resume with the data of "
                "the first start"
            )
        mined_at = int(state["mined_at"])
        self.rows = rows.numpy()
        self.mined_at = None if mined_at < 0 else mined_at

    def _sample_negatives(self, row: int) -> list[str]:
        """Sample the negatives of a row; return one text for each column of negatives."""
        query = int(self._query_numbers[row])
        num_columns = len(self.columns)
        seed = (self.args.order_seed, self.sampling.epoch, row, self.mined_at or 0)
        # numpy accepts no negative seeds; the mask maps them to unsigned 64-bit integers.
        rng = np.random.default_rng([number & (2**64 - 1) for number in seed])
        padded_rows = self.rows[query]
        mined = padded_rows[padded_rows >= 0]
        sample = mined[rng.permutation(len(mined))[:num_columns]].tolist()
        if len(sample) < num_columns:
            # Fill up with random passages, without positives of the query and without repetition.
            excluded = {*self.data.excluded[query], *sample}
            for passage in rng.integers(self.data.pool_size, size=_MAX_SAMPLES).tolist():
                if len(sample) < num_columns and passage not in excluded:
                    excluded.add(passage)
                    sample.append(passage)
        if not sample:  # no draw was another one, because nearly all passages are positives
            others = np.setdiff1d(np.arange(self.data.pool_size), list(excluded))
            sample = others[:num_columns].tolist()
        if not sample:
            text = self.data.queries[query][:60]
            raise ConfigError(
                f"the query {text!r} has no negative: every passage is one of its positives. Add "
                "passages with refresh_corpus"
            )
        texts = []
        for index in range(num_columns):
            # A tiny pool may have fewer passages than there are columns, so some are repeated.
            passage = sample[index % len(sample)]
            texts.append(self.data.documents[passage].passage)
        return texts


def _check_columns(dataset: Any) -> None:
    """Raise `ConfigError` for a data set whose negatives cannot be replaced."""
    names = list(getattr(dataset, "column_names", None) or [])
    has_columns = names[:2] == ["query", "positive"] and "negative_1" in names
    if not has_columns or not hasattr(dataset, "__len__"):
        raise ConfigError(
            "refresh_negatives_every needs one data set, neither a stream nor several, with the "
            "columns query, positive, negative_1 and on (their texts may be None), but the columns "
            f"are {', '.join(names)}"
        )
