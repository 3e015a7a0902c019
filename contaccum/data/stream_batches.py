"""Micro-batches of streamed training sets: which set's turn it is, which rank's, and where a resumed run goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, repeat
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset

from contaccum.data.draws import text_ids
from contaccum.data.records import OnBadRecord
from contaccum.data.set_schedule import shuffled_turns
from contaccum.data.streams import SHUFFLE_BUFFER, RowStream, StreamedRow
from contaccum.data.training_sets import TrainingSet, joint_fingerprint, prompts_by_set
from contaccum.errors import DataError

STREAM_FILE = "contaccum_stream.json"


class StreamedSets(IterableDataset):
    """One training set or several, streamed: micro-batches of rows, without end. ::

        data = StreamedSets(parse_training_sets(["large.jsonl.gz"], {"num_hard_negatives": 1}))
        trainer = ContAccumTrainer(model=model, args=args, train_dataset=data)  # args with max_steps

    Every row brings the ids of its texts for the loss. Each micro-batch is of one set, whole, and may hold the last
    rows of a pass and the first of the next. Every rank reads all, and takes the micro-batches whose turn is its own.

    Args:
        sets: as `parse_training_sets` gives them.
        on_bad_record: "stop" or "skip".
        buffer_size: rows in each set's shuffle buffer.

    Raises:
        ConfigError, DataError: as `RowStream`.
    """

    def __init__(
        self,
        sets: Sequence[TrainingSet],
        on_bad_record: OnBadRecord = "stop",
        buffer_size: int = SHUFFLE_BUFFER,
    ) -> None:
        self.sets = list(sets)
        self.streams = [RowStream(one, on_bad_record, buffer_size) for one in sets]
        self.fingerprint = joint_fingerprint([stream.fingerprint() for stream in self.streams])
        self.begin(batch_size=1, counts=[1] * len(self.sets))

    @property
    def dataset(self) -> StreamedSets:
        """Itself, as other training data have their rows here."""
        return self

    @property
    def columns_by_set(self) -> dict[str | None, list[str]]:
        """Text columns by the name of the set; None for a single one."""
        if len(self.sets) == 1:
            return {None: self.streams[0].text_columns}
        return {one.name: stream.text_columns for one, stream in zip(self.sets, self.streams, strict=True)}

    @property
    def column_names(self) -> list[str]:
        """Those of the widest set."""
        return max(self.columns_by_set.values(), key=len)

    def begin(
        self,
        batch_size: int,
        counts: Sequence[int],
        block: int = 16,
        seed: int = 0,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        """Say what the next iteration gives.

        Args:
            batch_size: rows of a micro-batch.
            counts, block: of the sets' turns, see `shuffled_turns`.
            seed: of order and draws.
            rank, ranks: whose micro-batches: those numbered rank, rank + ranks, ...
        """
        self._batch_size, self._counts, self._block, self._seed = batch_size, list(counts), block, seed
        self._rank, self._ranks, self._first = rank, ranks, 0

    def skip(self, first: int) -> None:
        """Each rank has trained on so many micro-batches already: an iteration gives None for each of them first."""
        self._first = first

    def __iter__(self) -> Iterator[list[dict[str, Any]] | None]:
        """Micro-batches: rows with the columns of their set, "label" (ids) and, of several sets, "dataset_name"."""
        order = shuffled_turns(self._counts, self._block, np.random.default_rng(self._seed & (2**64 - 1)), endless=True)
        taken = [0] * len(self.streams)
        for number in islice(order, self._first * self._ranks):
            taken[number] += self._batch_size
        yield from repeat(None, self._first)
        rows = [stream.rows(self._seed, start) for stream, start in zip(self.streams, taken, strict=True)]
        for turn, number in enumerate(order):
            batch = list(islice(rows[number], self._batch_size))
            if turn % self._ranks == self._rank:
                yield self._as_rows(batch, number)

    def _as_rows(self, batch: list[StreamedRow], number: int) -> list[dict[str, Any]]:
        names = self.streams[number].text_columns
        ids = np.array(text_ids([text for row in batch for text in (row.query, row.positive, *row.negatives)]))
        ids = ids.reshape(len(batch), len(names))
        for place, row in enumerate(batch):
            # To the loss, a listed negative that is another positive of its record is the one that was drawn, again.
            for column, text in enumerate(row.negatives, start=2):
                if hash(text) in row.own:
                    ids[place, column] = ids[place, 1]
        more = {} if len(self.sets) == 1 else {"dataset_name": self.sets[number].name}
        return [
            {**dict(zip(names, (row.query, row.positive, *row.negatives), strict=True)), "label": row_ids, **more}
            for row, row_ids in zip(batch, ids.tolist(), strict=True)
        ]

    def prompts(self, model_prompts: Mapping[str, str | None]) -> dict[str, Any] | None:
        """Prompts by set and column, of a single set by column; None where no set has any of its own."""
        found = prompts_by_set(self.sets, [stream.text_columns for stream in self.streams], model_prompts)
        return found if found is None or len(self.sets) > 1 else found[self.sets[0].name]

    def records(self) -> dict[str, dict[str, Any]]:
        """What a result says of each set, by name."""
        return {
            one.name: {
                "path": one.path,
                "format": stream.data_format,
                "fingerprint": stream.fingerprint(),
                "query_prompt": one.query_prompt,
                "passage_prompt": one.passage_prompt,
            }
            for one, stream in zip(self.sets, self.streams, strict=True)
        }

    def summary(self) -> str:
        """A line for each set: what became of the records of the pass that is being read."""
        lines = []
        for one, stream in zip(self.sets, self.streams, strict=True):
            read = (
                f"pass {stream.turn + 1}, so far: {stream.report.summary()}" if stream.report.seen else "not read yet"
            )
            lines.append(f"{one.name}: streamed as {stream.data_format}, {stream.buffer_size:,} rows shuffled; {read}")
        return "\n".join(lines)

    def save(self, folder: str | Path) -> None:
        """Write what saves a resumed run from reading passes that are over."""
        known = {one.name: stream.rows_per_pass for one, stream in zip(self.sets, self.streams, strict=True)}
        content = {"fingerprint": self.fingerprint, "rows_per_pass": known}
        (Path(folder) / STREAM_FILE).write_text(json.dumps(content), encoding="utf-8")

    def load(self, folder: str | Path) -> bool:
        """Take up what `save` wrote, if it is there; returns whether the data is what it was then.

        Raises:
            DataError: the file is damaged.
        """
        path = Path(folder) / STREAM_FILE
        if not path.is_file():
            return True
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content["fingerprint"] != self.fingerprint:
                return False
            for one, stream in zip(self.sets, self.streams, strict=True):
                known = content["rows_per_pass"][one.name]
                stream.rows_per_pass = known if known is None else int(known)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path}: damaged ({error}); remove it, and the passes before are read again") from error
        return True
