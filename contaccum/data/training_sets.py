"""Several training sets at once: what is said of each, and what they know of each other.

A set is read like a single one (`pairs`, `streams`), with settings and prompts of its own. Which is trained on when is
decided by samplers.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from contaccum.data.fields import parse_columns
from contaccum.data.formats import DATA_FORMATS
from contaccum.data.known_positives import among, several_positives, shared_queries
from contaccum.data.pairs import TrainingData, load_training_data, name_of
from contaccum.data.records import OnBadRecord, one_line, quoted
from contaccum.data.selection import Selection
from contaccum.data.text_columns import column_hashes
from contaccum.errors import ConfigError

if TYPE_CHECKING:
    from datasets import DatasetDict

_SELECTED = ("num_hard_negatives", "positives", "negatives_from", "draw_negatives", "missing_negatives")
_KEYS = ("path", "name", "weight", "query_prompt", "passage_prompt", "format", "columns", "split", *_SELECTED)
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

    @property
    def selection(self) -> Selection:
        """How its rows are made of records."""
        return Selection(**{key: self.reading[key] for key in _SELECTED if key in self.reading})

    def prompts(self, model_prompts: Mapping[str, str | None], columns: Sequence[str]) -> dict[str, str]:
        """Prompts by column, those of the model ("query", "document") where it has none of its own."""
        own = {"query": self.query_prompt, "document": self.passage_prompt}
        found = {role: model_prompts.get(role) if prompt is None else prompt for role, prompt in own.items()}
        by_column = {name: found["document" if place else "query"] for place, name in enumerate(columns)}
        return {name: prompt for name, prompt in by_column.items() if prompt}


def parse_training_sets(
    given: Sequence[str | Mapping[str, Any]], common: Mapping[str, Any] | None = None
) -> list[TrainingSet]:
    """Training sets from paths and mappings; a text that begins with `{` is a mapping in JSON.

    Args:
        given: each a path, or {"path", "name", "weight", "query_prompt", "passage_prompt", "format", "columns",
            "split", ...} with the settings of `Selection`.
        common: settings of all sets, under the names of `load_training_data`, which a mapping overrides.

    Raises:
        ConfigError: an unknown key or a value that cannot be used, or two sets of one name.
    """
    sets = [_parse(item, common or {}) for item in given]
    names = [one.name for one in sets]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(
            f"train_data: two sets are called {quoted(twice)}; tell them apart: {{path: ..., name: ...}} for one"
        )
    return sets


def _parse(item: str | Mapping[str, Any], common: Mapping[str, Any]) -> TrainingSet:
    if isinstance(item, str) and item.lstrip().startswith("{"):
        try:
            item = json.loads(item)
        except ValueError as error:
            raise ConfigError(one_line(f"train_data: {quoted(item)} is not a JSON object ({error})")) from error
    settings = {"path": item} if isinstance(item, str) else dict(item) if isinstance(item, Mapping) else {}
    for key in settings:
        if key not in _KEYS:
            close = difflib.get_close_matches(str(key), _KEYS, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else f" (use {', '.join(_KEYS)})"
            raise ConfigError(one_line(f"train_data: unknown key {quoted(key)}{hint}"))
    path = settings.get("path")
    if not isinstance(path, str) or not path:
        raise ConfigError(one_line(f"train_data: {quoted(item)} has no path; write {{path: FILE, weight: 2}}, or FILE"))
    where = f"train_data: {path}"
    name = settings.get("name", name_of(path))
    for key, text in {**{key: settings.get(key) for key in ("query_prompt", "passage_prompt")}, "name": name}.items():
        if not isinstance(text, (str, type(None))):
            raise ConfigError(one_line(f"{where}: {key} must be a text, got {quoted(text)}"))
    if not name or _TAKEN.fullmatch(name):
        raise ConfigError(one_line(f"{where}: {quoted(name)} is no name for a set (choose another with name)"))
    reading: dict[str, Any] = {**common, **{key: settings[key] for key in (*_SELECTED, "split") if key in settings}}
    if "columns" in settings:
        reading["columns"] = parse_columns(settings["columns"])
    if "format" in settings:
        reading["data_format"] = settings["format"]
    if reading.get("data_format") not in (None, *DATA_FORMATS):
        raise ConfigError(
            one_line(f"{where}: format {quoted(reading['data_format'])} is unknown (use {', '.join(DATA_FORMATS)})")
        )
    one = TrainingSet(
        path=path,
        name=name,
        weight=None if settings.get("weight") is None else checked_weight(settings["weight"], where),
        query_prompt=settings.get("query_prompt"),
        passage_prompt=settings.get("passage_prompt"),
        reading=reading,
    )
    try:
        one.selection  # noqa: B018  # checks itself
    except ConfigError as error:
        raise ConfigError(one_line(f"{where}: {error}")) from error
    return one


def checked_weight(weight: object, where: str) -> float:
    """A weight that sets can be sampled by; raises `ConfigError` for others."""
    number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
    if not number or not 0 < weight < math.inf:  # type: ignore[operator]  # a number
        raise ConfigError(one_line(f"{where}: weight must be a number above 0, got {quoted(weight)}"))
    return weight  # type: ignore[return-value]  # as above


def prompts_by_set(
    sets: Sequence[TrainingSet], columns: Sequence[Sequence[str]], model_prompts: Mapping[str, str | None]
) -> dict[str, dict[str, str]] | None:
    """Prompts by set and text column; None where no set has any of its own."""
    if all(one.query_prompt is None and one.passage_prompt is None for one in sets):
        return None
    return {one.name: one.prompts(model_prompts, names) for one, names in zip(sets, columns, strict=True)}


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
    def dataset(self) -> DatasetDict:
        """The rows by the names of the sets."""
        from datasets import DatasetDict

        return DatasetDict({one.name: part.dataset for one, part in zip(self.sets, self.parts, strict=True)})

    @property
    def known_positives(self) -> np.ndarray | None:
        """As of `TrainingData`, for all sets together."""
        return self.parts[0].known_positives

    def prompts(self, model_prompts: Mapping[str, str | None]) -> dict[str, dict[str, str]] | None:
        """Prompts by set and column; None where no set has any of its own."""
        columns = [list(part.dataset.column_names) for part in self.parts]
        texts = [[name for name in names if re.fullmatch("query|positive|negative_[0-9]+", name)] for names in columns]
        return prompts_by_set(self.sets, texts, model_prompts)

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
        parts = zip(self.sets, self.parts, strict=True)
        return "\n".join(f"{one.name}: {part.report.summary()}" for one, part in parts)


def load_training_sets(
    sets: Sequence[TrainingSet], on_bad_record: OnBadRecord = "stop", topic_column: str | None = None
) -> TrainingSets:
    """Read several sets, each as `load_training_data` does, and let each know the positives of all.

    The same text in two sets is the same passage, or the same query: a passage that any set gives a query as its
    positive is no negative of it in another. ::

        sets = load_training_sets(parse_training_sets(["a.jsonl", {"path": "b.csv", "query_prompt": "faq: "}]))
        trainer = ContAccumTrainer(model=model, args=args, train_dataset=sets.dataset)

    Raises:
        ConfigError, DataError: as `load_training_data`.
    """
    parts = [
        load_training_data(one.path, on_bad_record=on_bad_record, topic_column=topic_column, **one.reading)
        for one in sets
    ]
    known = join_known_positives(parts)
    fingerprint = parts[0].fingerprint if len(parts) == 1 else joint_fingerprint([part.fingerprint for part in parts])
    return TrainingSets(sets, [part.among_others(known) for part in parts], fingerprint)


def joint_fingerprint(fingerprints: Sequence[str]) -> str:
    """One fingerprint of several, in their order."""
    return hashlib.sha256(json.dumps(list(fingerprints)).encode()).hexdigest()


def join_known_positives(parts: Sequence[TrainingData]) -> np.ndarray | None:
    """Int64 (r, 2), hashes of query and positive for every pair of the queries that have several, in one set or in
    many; None: there are none. 8 bytes are held for each row meanwhile."""
    found = [part.known_positives for part in parts if part.known_positives is not None]
    queries = [column_hashes(part.dataset.with_format(None), ["query"])[:, 0] for part in parts]
    shared = shared_queries(queries)
    if len(shared):
        for part, hashes in zip(parts, queries, strict=True):
            # A query of several positives is among the known ones already; of others the column holds the only one.
            rows = np.flatnonzero(among(hashes, shared))
            asked = part.dataset.with_format(None).select(rows)
            found.append(np.stack([hashes[rows], column_hashes(asked, ["positive"])[:, 0]], axis=1))
    if not found:
        return None
    pairs = np.concatenate(found)
    known = several_positives(np.ascontiguousarray(pairs[:, 0]), np.ascontiguousarray(pairs[:, 1]))
    return known if len(known) else None
