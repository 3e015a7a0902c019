"""Training data: records of any format in a cache of Arrow files, as rows that are sampled when they are read.

The cache holds each record once, with all its positives and negatives; what rows take of them is `sampling`'s affair.
`datasets` writes the files, locks them, and maps them into memory. Data too large for the disk are streamed.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from contaccum.data.readers import DATA_FORMATS, DataFormat, Source, parse_columns, source_of
from contaccum.data.records import OnBadRecord, RecordReport, name_of, one_line, quoted
from contaccum.data.sampling import (
    NONE_LISTED,
    EpochSampling,
    MissingNegatives,
    PositivesUsed,
    Selection,
    as_rows,
    several_positives,
    stream_rows,
    text_hash,
)
from contaccum.errors import ConfigError, DataError, UserError, check_choice
from contaccum.files import AnyPath, cache_folder, fingerprint, read_json, write_json
from contaccum.files import Fingerprint as Content

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict, IterableDataset

SHUFFLE_BUFFER = 10_000


@dataclass(frozen=True)
class TrainingData:
    """Training pairs, and where they came from.

    Attributes:
        dataset: rows {"query", "positive", "negative_1" .. "negative_h"} of texts, in this order, and "label", ids for
            the loss, where queries have several positives.
        report: what became of every record that was read; of a stream, in the pass that is being read.
        fingerprint: sha256, in hex, of the texts in order, whatever format they were in, with all that is sampled from;
            of a stream, of its files' names, sizes and times.
        data_format: one of `DATA_FORMATS`.
        path: the file or folder, or the name of a dataset on the hub.
        transform: what makes the rows; None of a stream.
        pairs: int64 (n, 2), hashes of query and positive for every pair, mapped.
    """

    dataset: Dataset | IterableDataset
    report: RecordReport = field(repr=False, compare=False)
    fingerprint: str
    data_format: DataFormat
    path: Path
    transform: EpochSampling | None = field(default=None, repr=False, compare=False)
    pairs: np.ndarray | None = field(default=None, repr=False, compare=False)

    @property
    def name(self) -> str:
        """The file's name without its extension."""
        return name_of(self.path)

    @property
    def known_positives(self) -> np.ndarray | None:
        """int64 (r, 2), hashes of query and positive for every pair of the queries that have several positives, in one
        record or in many; None: there are none, or nobody knows, of a stream."""
        return None if self.transform is None else self.transform.known_positives

    def summary(self) -> str:
        """One line: what became of the records."""
        return self.report.summary()

    def prompts(self, model_prompts: Mapping[str, str | None]) -> None:
        """A set alone has no prompts of its own; see `TrainingSets`."""

    def records(self) -> dict[str, dict[str, Any]]:
        """Nor is there anything to say of each of several."""
        return {}


def load_training_data(
    path: AnyPath,
    data_format: DataFormat | None = None,
    split: str = "train",
    num_hard_negatives: int = 0,
    on_bad_record: OnBadRecord = "stop",
    columns: Mapping[str, str] | None = None,
    positives: PositivesUsed | None = None,
    negatives_from: int | None = None,
    draw_negatives: bool = True,
    missing_negatives: MissingNegatives = "fill",
    negatives_to_come: bool = False,
    streaming: bool = False,
    shuffle_buffer_size: int = SHUFFLE_BUFFER,
    seed: int = 0,
) -> TrainingData:
    """Read training pairs with `num_hard_negatives` (h) hard negatives each; a second time, open what was read.

    The formats are those of `read_records`. Rows hold the texts of the epoch that `ContAccumTrainer` has set with
    ``transform.set_epoch``, with its seed, or epoch 0.

    Args:
        path: a file, plain or gzip, a folder, or the name of a Hugging Face dataset.
        data_format: one of `DATA_FORMATS`; None: told from the content.
        split: of a BEIR or MS MARCO folder or of a dataset; a file has no splits, and there it does nothing.
        num_hard_negatives, positives, negatives_from, draw_negatives, missing_negatives: see `Selection`.
        on_bad_record: "stop" or "skip".
        columns: {role: name} for formats with named fields; see `read_records`.
        negatives_to_come: a source without hard negatives is no mistake, as they will be mined while training.
        streaming: store nothing, and read the files anew in each pass; an endless `datasets.IterableDataset`.
        shuffle_buffer_size, seed: of a stream: rows that are held, and what order and samples depend on.

    Raises:
        ConfigError: an unknown format, or settings that cannot be used.
        DataError: the source cannot be used, a bad record under "stop", no row is left, no record has a negative and
            some were asked for, or the cache cannot be written.
    """
    selection = Selection(num_hard_negatives, positives, negatives_from, draw_negatives, missing_negatives)
    source, report = source_of(path, data_format, split, columns), RecordReport(on_bad_record)
    selection = selection.resolved(source.data_format)
    if source.data_format == "msmarco":
        # Published triples list hundreds of negatives: no more are read than are sampled from.
        most = (selection.negatives_from or num_hard_negatives) if num_hard_negatives else 0
        source = replace(source, num_negatives=most)
    if streaming:
        rows = stream_rows(source, selection, report, shuffle_buffer_size, seed)
        content = source.key("stream", on_bad_record, *astuple(selection), shuffle_buffer_size)
        return TrainingData(rows, report, content, source.data_format, source.path)
    folder, records, about = _cached(source, report)
    report.restore(about["report"])
    counts = _lengths(records, "negatives"), _lengths(records, "positives")
    rows_of = _rows(source, selection, records, counts, report)
    if num_hard_negatives and not counts[0].any() and not negatives_to_come:
        raise DataError(one_line(f"{source.path}: num_hard_negatives={num_hard_negatives}, {NONE_LISTED}"))
    report.refuse_if_nothing_left(source.path, len(records if rows_of is None else rows_of), "training pairs")
    pairs = np.memmap(folder / _PAIRS, dtype=np.int64, mode="r").reshape(-1, 2)
    known = np.memmap(folder / _KNOWN, dtype=np.int64, mode="r").reshape(-1, 2) if about["known"] else None
    names = ["query", "positive", *(f"negative_{i + 1}" for i in range(num_hard_negatives))]
    sampling = EpochSampling(records, names, selection, rows_of, known)
    content = _fingerprint(about, selection, *counts)
    return TrainingData(as_rows(sampling), report, content, source.data_format, source.path, sampling, pairs)


# Several sets --------------------------------------------------------------------------------------------------------

_SELECTED = ("num_hard_negatives", "positives", "negatives_from", "draw_negatives", "missing_negatives")
SET_KEYS = ("path", "name", "weight", "query_prompt", "passage_prompt", "format", "columns", "split", *_SELECTED)
_TAKEN = re.compile("|query|positive|negative_[0-9]+|label|labels|dataset_name")


@dataclass(frozen=True)
class TrainingSet:
    """What is said of one training set.

    Attributes:
        path: a file, a folder, or the name of a Hugging Face dataset.
        name: by which it goes in logs and results; by default that of the file.
        weight: its share of the micro-batches, relative to others; None: nothing is said.
        query_prompt, passage_prompt: put before its texts; None: the model's.
        reading: other arguments of `load_training_data`.
    """

    path: str
    name: str
    weight: float | None = None
    query_prompt: str | None = None
    passage_prompt: str | None = None
    reading: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TrainingSets:
    """Several sets that were read.

    Attributes:
        sets: what is said of each.
        parts: their rows, each of which brings the ids of its texts, and knows the positives of all sets.
        fingerprint: sha256, in hex, of the fingerprints of all in order.
    """

    sets: Sequence[TrainingSet]
    parts: Sequence[TrainingData]
    fingerprint: str

    @property
    def dataset(self) -> DatasetDict | IterableDataset:
        """The rows by the names of the sets; of a stream, which is one set, its rows."""
        from datasets import DatasetDict, IterableDataset

        if isinstance(self.parts[0].dataset, IterableDataset):
            return self.parts[0].dataset
        return DatasetDict({one.name: part.dataset for one, part in zip(self.sets, self.parts, strict=True)})

    @property
    def known_positives(self) -> np.ndarray | None:
        """As of `TrainingData`, for all sets together."""
        return self.parts[0].known_positives

    def prompts(self, model_prompts: Mapping[str, str | None]) -> dict[str, Any] | None:
        """Prompts by set and column (of a stream, by column), the model's where a set has none of its own; None where
        no set has any."""
        if all(one.query_prompt is None and one.passage_prompt is None for one in self.sets):
            return None
        found = {}
        for one, part in zip(self.sets, self.parts, strict=True):
            query = model_prompts.get("query") if one.query_prompt is None else one.query_prompt
            passage = model_prompts.get("document") if one.passage_prompt is None else one.passage_prompt
            names = [name for name in part.dataset.column_names if re.fullmatch("query|positive|negative_[0-9]+", name)]
            by_column = {name: query if name == "query" else passage for name in names}
            found[one.name] = {name: prompt for name, prompt in by_column.items() if prompt}
        return found if self.parts[0].transform is not None else found[self.sets[0].name]

    def records(self) -> dict[str, dict[str, Any]]:
        """What a result says of each set, by name."""
        return {
            one.name: {"path": one.path, "format": part.data_format, "fingerprint": part.fingerprint}
            | {"query_prompt": one.query_prompt, "passage_prompt": one.passage_prompt}
            for one, part in zip(self.sets, self.parts, strict=True)
        }

    def summary(self) -> str:
        """A line for each set: what became of its records."""
        return "\n".join(f"{one.name}: {part.summary()}" for one, part in zip(self.sets, self.parts, strict=True))


def load_training_sets(
    sets: Sequence[TrainingSet],
    on_bad_record: OnBadRecord = "stop",
    streaming: bool = False,
    shuffle_buffer_size: int = SHUFFLE_BUFFER,
    seed: int = 0,
) -> TrainingSets:
    """Read several sets, each as `load_training_data` does, and let each know the positives of all.

    The same text in two sets is the same passage, or the same query: a passage that any set gives a query as its
    positive is no negative of it in another. ::

        sets = load_training_sets(parse_training_sets(["a.jsonl", {"path": "b.csv", "query_prompt": "faq: "}]))
        trainer = ContAccumTrainer(model=model, args=args, train_dataset=sets.dataset)

    Raises:
        ConfigError, DataError: as `load_training_data`; several sets as a stream.
    """
    if streaming and len(sets) > 1:
        raise ConfigError(
            f"streaming=true with {len(sets)} sets in train_data: one set is streamed. Drop streaming, or put "
            "the files together"
        )
    common: dict[str, Any] = {"on_bad_record": on_bad_record, "streaming": streaming}
    common |= {"shuffle_buffer_size": shuffle_buffer_size, "seed": seed}
    parts = [load_training_data(one.path, **common, **one.reading) for one in sets]
    content = [part.fingerprint for part in parts]
    pairs = [part.pairs for part in parts if part.pairs is not None]
    known = several_positives(np.concatenate(pairs)) if pairs else None
    for part in parts:
        if part.transform is not None:
            part.transform.gives_ids = True  # rows of several sets meet, and equal texts must be known for that
            part.transform.known_positives = known if known is not None and len(known) else None
    return TrainingSets(sets, parts, content[0] if len(content) == 1 else fingerprint(*content))


def parse_training_sets(
    given: Sequence[str | Mapping[str, Any]], common: Mapping[str, Any] | None = None
) -> list[TrainingSet]:
    """Training sets from paths and mappings; a text that begins with `{` is a mapping in JSON.

    Args:
        given: each a path, or a mapping with keys of `SET_KEYS`.
        common: settings of all sets, under the names of `load_training_data`, which a mapping overrides.

    Raises:
        ConfigError: an unknown key or a value that cannot be used, or two sets of one name.
    """
    sets = []
    for item in given:
        try:
            sets.append(_parse(item, common or {}))
        except (ConfigError, ValueError) as error:
            raise ConfigError(one_line(f"train_data: {quoted(item)}: {error}")) from error
    names = [one.name for one in sets]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        mend = "tell them apart: {path: ..., name: ...} for one"
        raise ConfigError(f"train_data: two sets are called {quoted(twice)}; {mend}")
    return sets


def _parse(item: str | Mapping[str, Any], common: Mapping[str, Any]) -> TrainingSet:
    if isinstance(item, str):
        item = json.loads(item) if item.lstrip().startswith("{") else {"path": item}
    settings = {"name": name_of(str(item.get("path"))), **item}
    for key in settings:
        check_choice("a key of a set", key, SET_KEYS)
    for key in ("path", "name", "query_prompt", "passage_prompt"):
        value = settings.get(key)
        if not isinstance(value, str) and not (value is None and key.endswith("prompt")):
            raise ConfigError(f"{key} must be a text, got {quoted(value)}; write {{path: FILE, weight: 2}}, or FILE")
    if _TAKEN.fullmatch(settings["name"]):
        raise ConfigError(f"{quoted(settings['name'])} is no name for a set (choose another with name)")
    weight = settings.get("weight")
    if weight is not None and not (type(weight) in (int, float) and 0 < weight < math.inf):
        raise ConfigError(f"weight must be a number above 0, got {quoted(weight)}")
    reading = {**common, **{key: settings[key] for key in (*_SELECTED, "split") if key in settings}}
    reading |= {"columns": parse_columns(settings["columns"])} if "columns" in settings else {}
    reading |= {"data_format": settings["format"]} if "format" in settings else {}
    check_choice("format", reading.get("data_format"), (None, *DATA_FORMATS))
    Selection(**{key: reading[key] for key in _SELECTED if key in reading})
    prompts = {key: settings.get(key) for key in ("query_prompt", "passage_prompt")}
    return TrainingSet(settings["path"], settings["name"], weight, **prompts, reading=reading)


# The cache -----------------------------------------------------------------------------------------------------------

_ABOUT, _PAIRS, _KNOWN = "about.json", "pairs.int64", "known.int64"


def _cached(source: Source, report: RecordReport) -> tuple[Path, Dataset, dict[str, Any]]:
    """The folder of the cache, its records, and what is known about them; written first where there are none.

    `datasets` lets one process write and others wait. What else is in the folder is there before they go on.
    """
    from datasets import Dataset, Features, List, Value, disable_progress_bars
    from datasets.exceptions import DatasetGenerationError

    key = source.key(report.on_bad_record)
    folder = cache_folder("datasets", key[:32])
    text = Value("string")
    features = Features(query=text, positives=List(text), negatives=List(text), line=Value("int64"))

    def generate() -> Iterator[dict[str, Any]]:
        yield from _written(source, report, folder)
        _remove_unused(folder.parent)

    if not sys.stderr.isatty():  # no bars in a log
        disable_progress_bars()
    for _ in range(2):
        try:
            records = Dataset.from_generator(generate, features, str(folder), fingerprint=key[:32])
            about = read_json(folder / _ABOUT)
            if len(records) == about["records"]:
                os.utime(folder / _ABOUT)
                return folder, records, about
        except DatasetGenerationError as error:
            cause = error.__cause__ or error
            raise (_cannot_store(cause) if isinstance(cause, OSError) else cause) from None
        except OSError as error:
            raise _cannot_store(error) from error
        except (UserError, ValueError):  # somebody has removed or damaged a part of it
            pass
        shutil.rmtree(folder, ignore_errors=True)
    raise DataError(f"{folder}: what was stored is gone again (is somebody clearing the cache?)")


def _written(source: Source, report: RecordReport, folder: Path) -> Iterator[dict[str, Any]]:
    """The records for Arrow; what is known about them lies beside them at the end."""
    texts, with_negatives, count = Content(), Content(), 0
    with open(folder / _PAIRS, "wb") as pairs_file:
        for line, record in source.records(report):
            count += 1
            query = text_hash(record.query)
            pairs_file.write(b"".join(query + text_hash(positive) for positive in record.positives))
            texts.add(record.query, *record.positives, "")
            with_negatives.add(*record.negatives, "")
            yield {**record._asdict(), "line": line}
    report.refuse_if_nothing_left(source.path, count, "training pairs")
    known = several_positives(np.memmap(folder / _PAIRS, dtype=np.int64, mode="r").reshape(-1, 2))
    known.tofile(folder / _KNOWN)
    about = {"records": count, "known": len(known), "report": report.to_dict()}
    write_json(folder / _ABOUT, about | {"texts": texts.hex(), "negatives": with_negatives.hex()})


def _remove_unused(folder: Path) -> None:
    """Remove what has not been opened for `$CONTACCUM_CACHE_DAYS` days, 30 by default."""
    oldest = time.time() - float(os.environ.get("CONTACCUM_CACHE_DAYS") or 30) * 86_400
    for entry in folder.iterdir():
        with suppress(OSError):
            opened = max(path.stat().st_mtime for path in (entry, entry / _ABOUT) if path.exists())
            if opened < oldest:
                shutil.rmtree(entry, ignore_errors=True)


def _cannot_store(error: BaseException) -> DataError:
    reason = getattr(error, "strerror", None) or str(error)
    mend = "free some space, or name another folder in the environment variable CONTACCUM_CACHE"
    return DataError(one_line(f"{cache_folder()}: the data cannot be stored: {reason} ({mend})"))


# Rows of records -----------------------------------------------------------------------------------------------------


def _lengths(records: Dataset, name: str) -> np.ndarray:
    import pyarrow.compute as pc

    return pc.list_value_length(records.data.column(name)).to_numpy()  # of its offsets: no text is read


def _rows(
    source: Source,
    selection: Selection,
    records: Dataset,
    counts: tuple[np.ndarray, np.ndarray],
    report: RecordReport,
) -> np.ndarray | None:
    """int64 (N, 2), the record of each row and which of its positives; None where row i is record i."""
    negatives, positives = counts
    kept = np.arange(len(records))
    if selection.missing_negatives != "fill":
        short = negatives < selection.num_hard_negatives
        lines = records.data.column("line")
        for place in np.flatnonzero(short).tolist():
            selection.refuse(source.path, lines[place].as_py(), int(negatives[place]), report)
        kept = kept[~short]
    if selection.positives != "all" or positives.max() == 1:
        return None if len(kept) == len(records) else np.column_stack([kept, np.zeros_like(kept)])
    each = positives[kept].astype(np.int64)
    which = np.arange(each.sum()) - np.repeat(np.cumsum(each) - each, each)
    return np.column_stack([np.repeat(kept, each), which])


def _fingerprint(about: Mapping[str, Any], selection: Selection, negatives: np.ndarray, positives: np.ndarray) -> str:
    """Of the content, and of those settings alone that make a difference to it."""
    h, most = selection.num_hard_negatives, int(negatives.max())
    used: list[Any] = [about["texts"], selection.positives if positives.max() > 1 else "one"]
    if h:
        drawn = min(selection.negatives_from or most, most) if selection.draw_negatives and most > h else 0
        used += [about["negatives"], h, drawn, selection.missing_negatives if negatives.min() < h else None]
    return fingerprint(*used)
