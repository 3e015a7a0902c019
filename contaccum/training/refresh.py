"""Hard negatives that follow the model: mined anew with the encoder in training, every so many updates.

As in ANCE (arXiv 2007.00808), but in the training process: updates wait while all queries and passages are encoded.
What makes a negative is decided in `contaccum.mining`; which texts reach a batch, here, just before it is trained on:
what a loader has read ahead is older than the last refresh. Nothing here knows the loss.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from contaccum.data.sampling import first_texts, samplings_of, text_ids, with_row_numbers
from contaccum.distributed import over_ranks
from contaccum.errors import ConfigError, UserError
from contaccum.mining import MiningData, load_mining_data, mine_hard_negatives
from contaccum.training.arguments import ContAccumTrainingArguments

_TRIES = 64  # that another passage is sampled in place of one that may not be used


class NegativeRefresh:
    """The mined negatives of every query, and the texts that a batch takes of them.

    A row takes h of its query's mined negatives, sampled by (seed, epoch, row, update of the refresh) alone, and other
    passages of the pool, no positives of the query, where there are fewer. Rows know their number. Without ``data``,
    negatives are other rows' positives; with it, `ConfigError` for rows whose query is not there.
    """

    def __init__(self, args: ContAccumTrainingArguments, dataset: Any, data: MiningData | None) -> None:
        names = list(getattr(dataset, "column_names", None) or [])
        if names[:2] != ["query", "positive"] or "negative_1" not in names or not hasattr(dataset, "__len__"):
            raise ConfigError(
                "refresh_negatives_every needs one data set, neither a stream nor several, with the columns query, "
                f"positive, negative_1 and on (their texts may be None), and found {', '.join(names)}"
            )
        self.dataset = dataset = dataset if samplings_of(dataset) else with_row_numbers(dataset)
        (self.sampling,) = samplings_of(dataset)
        self.sampling.gives_numbers = True
        self.args, self.columns = args, [name for name in dataset.column_names if name.startswith("negative_")]
        self.data = load_mining_data(self.sampling.pairs()) if data is None else data
        batches = list(first_texts(dataset))
        place: dict[Any, int] = {text: number for number, text in enumerate(self.data.queries)}
        found = [place.get(query, -1) for batch in batches for query in batch["query"]]
        if -1 in found:
            lost = f"row {found.index(-1)} of the training data, and {found.count(-1) - 1:,} others, have a query"
            raise ConfigError(f"{lost} that the data to mine in lack: load both from the same source")
        self._query_of = np.array(found, dtype=np.int32)
        self._none_given = not any(text for batch in batches for name in self.columns for text in batch[name])
        self.at: int | None = None  # the update before which those in use were mined; None: the data's are in use
        # Of data.documents, best first, -1 where there are fewer.
        self.rows = np.full((len(self.data.queries), args.refresh_pool), -1, dtype=np.int32)

    def due(self, update: int) -> bool:
        """Whether to mine before the update after ``update``; before the first where the data have no negatives."""
        every: Any = self.args.refresh_negatives_every
        return self.at != update and (self._none_given if update == 0 else update % every == 0)

    def mine(self, model: Any, update: int, first_rank: bool) -> dict[str, float]:
        """Mine with ``model`` as it is: rank 0 does, and every rank gets the same. Returns what is logged."""
        started, args = time.perf_counter(), self.args
        found = np.full_like(self.rows, -1)  # than which all rows are greater
        if first_rank:
            mined = mine_hard_negatives(
                self.data,
                model,
                num_negatives=args.refresh_pool,
                range_max=args.refresh_range_max,
                relative_margin=args.refresh_relative_margin,
                batch_size=args.pairs_per_micro_batch,
                precision="bfloat16" if args.bf16 else "float16" if args.fp16 else "float32",
                show_progress=False,
            )
            found = mined.rows.astype(np.int32)
        self.rows = over_ranks("MAX", torch.from_numpy(found).to(args.device)).cpu().numpy()
        self.at = update
        return {"mined_at": update, "mining_seconds": time.perf_counter() - started}

    def renew(
        self, inputs: Mapping[str, Any], collate: Callable[[list[dict[str, Any]]], dict[str, Any]]
    ) -> dict[str, Any]:
        """A collated batch with its rows' mined negatives in the place of those that it was read with.

        Its "label" holds row numbers, int64 (n,), or (n, 3+h) before ids of queries, positives and negatives; what
        comes back holds no numbers, and the ids of the new negatives.
        """
        inputs = dict(inputs)
        labels = inputs.pop("label")
        numbers, ids = (labels, None) if labels.ndim == 1 else (labels[:, 0], labels[:, 1:])
        if self.at is not None:
            texts = [self._texts(number) for number in numbers.tolist()]
            # With a query and a positive, so that each column keeps its place and so its prompt and its task.
            rows = [{"query": "", "positive": "", **dict(zip(self.columns, row, strict=True))} for row in texts]
            starts = tuple(f"{name}_" for name in self.columns)
            inputs |= {key: value for key, value in collate(rows).items() if key.startswith(starts)}
            if ids is not None:
                hashes = torch.from_numpy(text_ids(text for row in texts for text in row)).reshape(len(rows), -1)
                ids = torch.cat([ids[:, :2], hashes.to(ids)], dim=1)
        return inputs if ids is None else inputs | {"label": ids}

    def state_dict(self) -> dict[str, Tensor]:
        """The negatives in use, for a run that resumes between two refreshes."""
        return {"rows": torch.from_numpy(self.rows), "at": torch.tensor(-1 if self.at is None else self.at)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from `state_dict`; raises `UserError` where other data were mined in."""
        if state["rows"].shape != self.rows.shape or int(state["rows"].max()) >= self.data.pool_size:
            raise UserError("the checkpoint's negatives were mined in other data: resume with those")
        self.rows, at = state["rows"].numpy(), int(state["at"])
        self.at = None if at < 0 else at

    def _texts(self, number: int) -> list[str]:
        """Negatives of a row, as many as there are columns for them."""
        query, h = int(self._query_of[number]), len(self.columns)
        seed = [part & (2**64 - 1) for part in (self.args.order_seed, self.sampling.epoch, number, self.at or 0)]
        rng = np.random.default_rng(seed)
        mined = self.rows[query][self.rows[query] >= 0]
        chosen = mined[rng.permutation(len(mined))[:h]].tolist()
        forbidden = {*self.data.excluded[query], *chosen}
        for row in rng.integers(self.data.pool_size, size=_TRIES).tolist() if len(chosen) < h else ():
            if len(chosen) < h and row not in forbidden:
                forbidden.add(row)
                chosen.append(row)
        if not chosen:
            raise ConfigError(f"the query {self.data.queries[query][:60]!r} has no passage that could be its negative")
        # In a tiny pool there may be too few: then one is there twice.
        return [self.data.documents[chosen[i % len(chosen)]].passage for i in range(h)]
