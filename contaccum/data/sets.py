"""Several training sets at once: what is said of each, and what they know of each other.

A set is read like a single one (`dataset`), with settings and prompts of its own. Which is trained on when, `samplers`
decide.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from contaccum.data.columns import parse_columns
from contaccum.data.dataset import SHUFFLE_BUFFER, TrainingData, load_training_data
from contaccum.data.readers import DATA_FORMATS
from contaccum.data.records import OnBadRecord, name_of, one_line, quoted
from contaccum.data.sampling import Selection, several_positives
from contaccum.errors import ConfigError, check_choice, closest
from contaccum.files import fingerprint

if TYPE_CHECKING:
    from datasets import DatasetDict, IterableDataset

_SELECTED = ("num_hard_negatives", "positives", "negatives_from", "draw_negatives", "missing_negatives")
SET_KEYS = ("path", "name", "weight", "query_prompt", "passage_prompt", "format", "columns", "split", *_SELECTED)
_TAKEN = re.compile("query|positive|negative_[0-9]+|label|labels|dataset_name")


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
            one.name: {
                "path": one.path,
                "format": part.data_format,
                "fingerprint": part.fingerprint,
                "query_prompt": one.query_prompt,
                "passage_prompt": one.passage_prompt,
            }
            for one, part in zip(self.sets, self.parts, strict=True)
        }

    def summary(self) -> str:
        """A line for each set: what became of its records."""
        return "\n".join(f"{one.name}: {part.summary()}" for one, part in zip(self.sets, self.parts, strict=True))


def load_training_sets(
    sets: Sequence[TrainingSet],
    on_bad_record: OnBadRecord = "stop",
    topic_column: str | None = None,
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
    common: dict[str, Any] = {"on_bad_record": on_bad_record, "topic_column": topic_column, "streaming": streaming}
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
    sets = [_parse(item, common or {}) for item in given]
    names = [one.name for one in sets]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        mend = "tell them apart: {path: ..., name: ...} for one"
        raise ConfigError(f"train_data: two sets are called {quoted(twice)}; {mend}")
    return sets


def _parse(item: str | Mapping[str, Any], common: Mapping[str, Any]) -> TrainingSet:
    if isinstance(item, str) and item.lstrip().startswith("{"):
        try:
            item = json.loads(item)
        except ValueError as error:
            raise ConfigError(one_line(f"train_data: {quoted(item)} is not a JSON object ({error})")) from error
    settings = {"path": item} if isinstance(item, str) else dict(item) if isinstance(item, Mapping) else {}
    for key in settings:
        if key not in SET_KEYS:
            hint = closest(key, SET_KEYS) or f" (use {', '.join(SET_KEYS)})"
            raise ConfigError(one_line(f"train_data: unknown key {quoted(key)}{hint}"))
    path = settings.get("path")
    if not isinstance(path, str) or not path:
        raise ConfigError(one_line(f"train_data: {quoted(item)} has no path; write {{path: FILE, weight: 2}}, or FILE"))
    where = f"train_data: {path}"
    name, weight = settings.get("name", name_of(path)), settings.get("weight")
    prompts = {key: settings.get(key) for key in ("query_prompt", "passage_prompt")}
    for text in (name, *prompts.values()):
        if not isinstance(text, (str, type(None))):
            raise ConfigError(one_line(f"{where}: name and prompts must be texts, got {quoted(text)}"))
    if not name or _TAKEN.fullmatch(name):
        raise ConfigError(one_line(f"{where}: {quoted(name)} is no name for a set (choose another with name)"))
    own = {key: settings[key] for key in (*_SELECTED, "split") if key in settings}
    own |= {"columns": parse_columns(settings["columns"])} if "columns" in settings else {}
    own |= {"data_format": settings["format"]} if "format" in settings else {}
    reading = {**common, **own}
    try:
        check_choice("format", reading.get("data_format"), (None, *DATA_FORMATS))
        Selection(**{key: reading[key] for key in _SELECTED if key in reading})
    except ConfigError as error:
        raise ConfigError(one_line(f"{where}: {error}")) from error
    share = None if weight is None else checked_weight(weight, where)
    return TrainingSet(path, name, share, **prompts, reading=reading)


def checked_weight(weight: object, where: str) -> float:
    """A weight that sets can be sampled by; raises `ConfigError` for others."""
    if not isinstance(weight, (int, float)) or isinstance(weight, bool) or not 0 < weight < math.inf:
        raise ConfigError(one_line(f"{where}: weight must be a number above 0, got {quoted(weight)}"))
    return weight
