"""Splits of training data into train, dev and test, without a query of dev or test in train.

Records that share a text, or nearly so, form a group (`contaccum.data.near_duplicates`). The
queries of dev and test are held out: no model trains on them. The documents of dev or test are
those in which its queries are searched.

A document is known if it is a positive of a training query, else new. A held-out query is known if
all its relevant documents are, else new. New queries are held out with all records of their group.
Known queries are held out with their near-duplicates, and their passages stay in training.

A split is written as a folder:

    split.json     counts, settings and fingerprint of the split, see `Split`
    train.jsonl    the training records
    corpus.jsonl   documents that training may use as negatives
    dev/, test/    BEIR folders with queries, documents and judgements; in both folders the
                   judgements are in qrels/test.tsv; if some queries are known, their judgements
                   are also in qrels/known.tsv, and those of the others in qrels/new.tsv

The same data, sizes and seed hold out the same queries, whatever the order of the records. A
document is a copy of a passage of the records if its title and text together, or its text alone,
have the words of the passage.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, fields
from itertools import chain, count
from pathlib import Path
from typing import Any, Literal, get_args

from contaccum.data.beir import (
    BeirDataset,
    format_document,
    list_positives,
    load_beir_folder,
    write_beir_folder,
    write_qrels,
)
from contaccum.data.corpus import read_texts
from contaccum.data.near_duplicates import (
    Grouping,
    find_near_duplicates,
    fold_case,
    get_words,
    group_records,
    normalise,
)
from contaccum.data.records import (
    SPLIT_RECORD,
    Columns,
    Passage,
    Record,
    RecordSource,
    read_passages,
)
from contaccum.data.rows import RecordReport
from contaccum.errors import ConfigError, DataError, check_choice
from contaccum.files import (
    AnyPath,
    Fingerprint,
    atomic_folder,
    provenance,
    read_json,
    require_new_folder,
    write_json,
    write_text,
)

DEFAULT_SIZES = {"dev": (0.1, 500), "test": (0.2, 1000)}
"""{side: (share of the queries, upper bound)}. With more queries, a search takes longer, and the
confidence interval of the score hardly becomes narrower."""
LEAST_QUERIES = 10
"""Least number of distinct queries in data that can be split."""
FEW_TEST_QUERIES = 100
"""Number of test queries below which the split warns: most differences would be noise."""
LEAST_KNOWN_PASSAGES = 20
"""Least number of passages with known queries for which some are held out by default."""

# A small group has at most a quarter of the queries of dev or test, whichever has more. A larger
# one would decide the score.
_SMALL_GROUPS_PER_SET = 4
# If more of the test queries that the data came with have a positive of a training record, dev has
# known queries too.
_MAX_SHARED_QUERIES = 0.2

TRAIN_FILE = "train.jsonl"
CORPUS_FILE = "corpus.jsonl"
WITH_GENERATED_FILE = "train_with_generated.jsonl"

Future = Literal["known", "new", "both"]
"""Documents of the queries that a model is made for: known to training, new, or both."""


@dataclass(frozen=True)
class SplitSettings:
    """Sizes of the held-out sets, and the choice of their queries.

    Attributes:
        dev: share (below 1) or number of dev queries; None: a tenth, at most 500.
        test: share (below 1) or number of test queries; None: a fifth, at most 1,000.
        documents: least number of documents to search in dev and in test, if no corpus is given.
        seed: seed of the random choice of queries and documents.
        fold: fold of a cross-validation: the test sets of folds 0, 1, ... have no query in common.
        future: "new" to hold out queries with their passages, "known" to hold out queries whose
            passages are positives of other queries in training, "both" for half of each, and more
            new ones if fewer can be known. None: "both" if at least `LEAST_KNOWN_PASSAGES` passages
            can have known queries, else "new".

    Raises:
        ConfigError: for a value out of range.
    """

    dev: float | None = None
    test: float | None = None
    documents: int = 2000
    seed: int = 0
    fold: int = 0
    future: Future | None = None

    def __post_init__(self) -> None:
        check_choice("future", self.future, (None, *get_args(Future)))
        for name in ("dev", "test"):
            size = getattr(self, name)
            if size is not None and not (0 < size < 1 or (size >= 1 and size % 1 == 0)):
                raise ConfigError(
                    f"{name}={size}: give a share between 0 and 1, or a whole number of queries"
                )
        if self.fold < 0:
            raise ConfigError(f"fold={self.fold}: give 0, 1, 2, ...")


@dataclass(frozen=True)
class Split:
    """Counts of a split; those without a comment are numbers of distinct queries."""

    train: int
    dev: int
    test: int
    records: int  # in train.jsonl
    documents: dict[str, int]  # in corpus.jsonl ("train"), and those to search in "dev" and "test"
    near_duplicates: int  # texts that nearly equal an earlier text
    known: dict[str, int]  # known queries in "dev" and "test"; the others are new
    left_out: int  # records on no side, which share a text with the data's own test set
    settings: dict[str, Any]  # the `SplitSettings`
    fingerprint: str  # sha256, in hex, of all records and of the settings
    folds: int  # of these sizes; the last one can have fewer known test queries
    positives_added: int  # positives of dev and test that the given corpus lacks
    has_own_test: bool  # the data came with a test set
    generated: int  # records that name what has generated them

    @property
    def questions(self) -> str:
        """The kind of the test queries: "generated", "partly generated", or "" if they are not."""
        if self.generated == 0 or self.has_own_test:
            return ""
        is_mixed = self.generated < self.records + self.dev + self.test
        return "partly generated" if is_mixed else "generated"

    def summary(self) -> str:
        """Return one line for the user."""
        if self.known == {"dev": self.dev, "test": self.test}:
            kinds = "on known documents"
        elif any(self.known.values()):
            counts = f"{self.known['dev']:,} and {self.known['test']:,}"
            kinds = f"({counts} on known documents, the others on new ones)"
        else:
            kinds = "on new documents"
            if self.settings["future"] is None and not self.has_own_test:
                kinds += " (too few passages have several queries for known ones)"
        line = (
            f"held out: {self.dev:,} dev and {self.test:,} test queries {kinds}; "
            f"{self.train:,} queries to train on"
        )
        if self.near_duplicates:
            line += f" ({self.near_duplicates:,} near-duplicates kept together)"
        if self.positives_added:
            line += (
                f"; {self.positives_added:,} held-out positives are not in the corpus, and were "
                "added to the documents of dev and test"
            )
        return line

    def warnings(self) -> list[str]:
        """Return warnings about the split, one line each."""
        warnings = []
        if self.test < FEW_TEST_QUERIES:
            warning = f"{self.test} test queries are few: only large differences exceed the noise."
            if self.folds > 1:
                warning += " `contaccum split` holds out other queries with --fold 1, 2, ..."
            warnings.append(warning)
        if self.questions == "partly generated":
            warnings.append(
                f"{self.generated:,} records are generated, and some of them are in dev and test; "
                "to train on them only, give them to contaccum fit as --generated"
            )
        if self.left_out:
            warnings.append(
                f"{self.left_out:,} training records are left out: "
                "they share a text with a test query, or nearly so"
            )
        return warnings


def split_data(
    data: RecordSource,
    output: AnyPath,
    settings: SplitSettings | None = None,
    corpus: AnyPath | None = None,
    report: RecordReport | None = None,
    show_progress: bool = False,
    corpus_columns: Columns = None,
) -> Split:
    """Write a split of training data to a new folder.

    A BEIR folder with a split ``test`` keeps this test set. Only dev is then chosen from the split
    ``train``, and searched in the folder's corpus; records in a group with a text of the test set
    are left out. If more than a fifth of the test queries share a positive with training queries,
    only queries are kept apart, so that dev has known queries too.

    Args:
        data: the source of the training records, which are all in memory during the split.
        output: a folder that does not exist.
        settings: sizes and choice of the held-out sets; None: the defaults.
        corpus: the documents of dev and test. None: they are the held-out passages, the hard
            negatives of the held-out queries, and a sample of the other passages.
        report: receives the counts of used and bad records; None: a new report.
        corpus_columns: names of the columns of ``corpus``; see `read_passages`.

    Raises:
        ConfigError: for settings that do not fit the data, or an ``output`` that exists.
        DataError: for data that cannot be read, or with too few queries outside of large groups.
    """
    output = Path(output)
    require_new_folder(output)
    settings = settings or SplitSettings()
    report = report or RecordReport()
    if corpus_columns and corpus is None:
        raise ConfigError("corpus_columns: there is no corpus (drop it, or give a corpus)")
    records = list(data.records(report))
    own_test = None
    given_documents = None
    test_records: list[Record] = []
    if data.data_format == "beir" and any(data.path.glob("qrels/test.tsv*")):
        if corpus is not None or settings.test is not None or settings.fold or settings.future:
            raise ConfigError(
                f"{data.path}: its own test set and corpus stay as they are: drop corpus, test, "
                "fold and future"
            )
        own_test = load_beir_folder(data.path, "test", report=report)
        given_documents = [Passage(name, **texts) for name, texts in own_test.corpus.items()]
        test_records = [Record(*pair, negatives=[]) for pair in list_positives(own_test)]
    elif corpus is not None or data.data_format == "beir":
        path = data.path if corpus is None else Path(corpus)
        given_documents = list(read_texts(path, "document", report, corpus_columns))
    documents = given_documents or []

    by_query = _shares_passages(records, test_records)
    test_texts = []
    for record in test_records:
        test_texts += [record.query] if by_query else [record.query, *record.positives]
    grouping = group_records(records, test_texts, by_query, documents, show_progress)
    sizes = _choose_sizes(data.path, grouping, settings, own_test is not None)
    sides, num_folds = assign_sides(data.path, records, grouping, sizes, settings)
    parts: dict[str, list[Record]] = {side: [] for side in ("train", "dev", "test", "left out")}
    parts["test"] = test_records
    for record, side in zip(records, sides, strict=True):
        parts[side].append(record)
    held_out = find_held_out(parts, documents, show_progress)
    training_records = []
    for record in parts["train"]:
        negatives = [text for text in record.negatives if normalise(text) not in held_out]
        training_records.append(record._replace(negatives=negatives))
    training_corpus = collect_training_corpus(parts["train"], documents, held_out)
    content = Fingerprint(*sorted(map(_format_record, records)))
    content.add(str(settings), "" if corpus is None else Path(corpus).name)

    with atomic_folder(output) as folder:
        write_text(folder / TRAIN_FILE, map(_format_record, training_records))
        write_text(folder / CORPUS_FILE, (format_document(*each) for each in training_corpus))
        training_positives = _collect_positives(training_records)
        num_documents = {"train": len(training_corpus)}
        num_queries = {"train": len({normalise(record.query) for record in training_records})}
        known = {}
        positives_added = 0
        for side in ("dev", "test"):
            if side == "test" and own_test is not None:
                searched, queries, qrels = documents, own_test.queries, own_test.qrels
            else:
                searched = documents
                if given_documents is None:
                    searched = sample_documents(side, parts, settings.documents, settings.seed)
                num_searched = len(searched)
                searched, queries, qrels = judge_documents(parts[side], searched)
                positives_added += len(searched) - num_searched
            num_queries[side] = len(qrels)
            num_documents[side] = len(searched)
            known[side] = write_beir(folder / side, searched, queries, qrels, training_positives)
        split = Split(
            **num_queries,
            records=len(training_records),
            documents=num_documents,
            near_duplicates=grouping.num_near_duplicates,
            known=known,
            left_out=len(parts["left out"]),
            settings=asdict(settings),
            fingerprint=content.hex(),
            folds=num_folds,
            positives_added=positives_added,
            has_own_test=own_test is not None,
            generated=data.num_generated,
        )
        write_json(folder / SPLIT_RECORD, {**asdict(split), **provenance()})
    return split


def read_split(folder: AnyPath) -> Split:
    """Read the counts of the split in a folder; raises `DataError` if they are incomplete."""
    file = Path(folder) / SPLIT_RECORD
    content = read_json(file)
    try:
        return Split(**{field.name: content[field.name] for field in fields(Split)})
    except KeyError as error:
        raise DataError(f"{file}: {error} is missing; split the data again") from error


# Sides --------------------------------------------------------------------------------------------


def _shares_passages(records: Iterable[Record], test_records: Sequence[Record]) -> bool:
    training_positives = _collect_positives(records)
    num_shared = 0
    for record in test_records:
        num_shared += not training_positives.isdisjoint(map(normalise, record.positives))
    return num_shared > _MAX_SHARED_QUERIES * len(test_records)


def _choose_sizes(
    source: AnyPath, grouping: Grouping, settings: SplitSettings, has_own_test: bool
) -> dict[str, int]:
    """Return the number of queries to hold out for dev and test."""
    num_queries = grouping.count_queries(grouping.queries_of_group.keys() - grouping.groups_of_test)
    if num_queries < LEAST_QUERIES:
        raise DataError(
            f"{source}: has {num_queries} distinct queries; it takes at least {LEAST_QUERIES} "
            "to hold some of them out"
        )
    sizes = {}
    for side, (share, largest) in DEFAULT_SIZES.items():
        size = getattr(settings, side) or min(largest, share * num_queries)
        sizes[side] = max(1, round(size * num_queries if size < 1 else size))
    if has_own_test:
        sizes["test"] = 0
    if sum(sizes.values()) >= num_queries:
        raise ConfigError(
            f"{source}: {sizes['dev']:,} dev and {sizes['test']:,} test queries of "
            f"{num_queries:,} leave none to train on"
        )
    return sizes


def assign_sides(
    source: AnyPath,
    records: Sequence[Record],
    grouping: Grouping,
    sizes: dict[str, int],
    settings: SplitSettings,
) -> tuple[list[str], int]:
    """Return the side of each record ("train", "dev", "test" or "left out"), and number of folds.

    If known and new queries are held out, new ones come from the first small groups in a random
    order, which have half of all queries, and known ones from all other groups. So no query is
    known in one fold and new in another. ``sizes`` are the numbers of queries to hold out; that of
    test is 0 if the data came with a test set.

    Raises `DataError` if too few queries can be held out, `ConfigError` for too large a fold.
    """
    future = settings.future
    num_linked = sum(number for number in grouping.queries_of_group.values() if number > 1)
    if sizes["test"] == 0 or (future is None and num_linked < LEAST_KNOWN_PASSAGES):
        future = "new"
    groups = _list_small_groups(grouping, sizes, str(settings.seed))
    known: dict[int, dict[str, str]] = {}
    if future != "new":
        most_known = sizes
        groups_of_new = []
        if future != "known":
            most_known = {side: size // 2 for side, size in sizes.items()}
            num_left = sum(grouping.queries_of_group.values()) / 2
            for group in _list_small_groups(grouping, most_known, str(settings.seed)):
                if num_left > 0:
                    groups_of_new.append(group)
                    num_left -= grouping.queries_of_group[group]
        others = grouping.queries_of_group.keys() - set(groups_of_new)
        pairs = zip(records, grouping.group_of_record, strict=True)
        other_records = [record for record, group in pairs if group in others]
        candidates, num_known_folds = choose_known_queries(
            source, other_records, most_known, settings
        )
        num_known = Counter(candidates[0].values())
        new_sizes = {side: max(0, size - num_known[side]) for side, size in sizes.items()}
        has_enough_new = grouping.count_queries(groups_of_new) >= sum(new_sizes.values())
        if future is not None or (candidates[0] and has_enough_new):
            known, groups, sizes = candidates, groups_of_new, new_sizes

    folds = []  # of new and of known queries
    if sizes["test"] > 0:
        folds.append(grouping.count_queries(groups) // sizes["test"])
    if known and "test" in known[0].values():
        folds.append(num_known_folds)
    num_folds = max(1, min(folds, default=1))
    if settings.fold >= num_folds:
        raise ConfigError(f"fold={settings.fold}: {source} has folds 0 to {num_folds - 1}")
    side_of_group = choose_sides(source, grouping, groups, sizes, settings.fold)
    side_of_known = known.get(settings.fold, {})
    sides = []
    for record, group in zip(records, grouping.group_of_record, strict=True):
        side = side_of_group.get(group, "left out")
        sides.append(side_of_known.get(normalise(record.query), side))
    return sides, num_folds


def choose_sides(
    source: AnyPath, grouping: Grouping, groups: Sequence[int], sizes: dict[str, int], fold: int
) -> dict[int, str]:
    """Return {group: "train", "dev" or "test"}, without groups that are linked with a given test.

    ``groups`` may be held out, and all others go to train. In the order of ``groups``, the test set
    of fold k starts after the first k x (number of test queries) queries. Dev follows test, and the
    rest is train. The order is circular: after its end, test and dev continue at its start. For
    example, with 2 test queries, 1 dev query and 6 groups of one query each:

        fold 0   test  test  dev   train train train
        fold 1   train train test  test  dev   train
        fold 2   dev   train train train test  test

    Raises `DataError` if too many queries are in large groups, or a side gets no group.
    """
    num_available = grouping.count_queries(groups)
    num_held_out = sum(sizes.values())
    if num_available < num_held_out:
        raise DataError(
            f"{source}: cannot hold out {num_held_out:,} queries. Records that share a text, or "
            "nearly so, must stay on one side: the largest group has "
            f"{max(grouping.queries_of_group.values()):,} queries, and small groups, of up to a "
            f"quarter of the larger of dev and test, have {num_available:,} in all "
            f"(raise --{'test' if sizes['test'] else 'dev'}, so that more groups are small, give "
            "another --future, or give pairs with more different texts)"
        )
    sides = dict.fromkeys(grouping.queries_of_group.keys() - grouping.groups_of_test, "train")
    position = -fold * sizes["test"]  # number of queries between the start of test and this group
    for group in groups:
        offset = position % num_available
        if offset < num_held_out:
            sides[group] = "test" if offset < sizes["test"] else "dev"
        position += grouping.queries_of_group[group]
    for side in ("dev", "test", "train"):
        if sizes.get(side, 1) > 0 and side not in sides.values():
            raise DataError(
                f"{source}: {side} would be empty, because a group of linked records stays on one "
                "side (give other sizes with --dev and --test)"
            )
    return sides


def _list_small_groups(grouping: Grouping, sizes: Mapping[str, int], seed: str) -> list[int]:
    """Return the groups that may be held out, in a random order that depends on the seed."""
    largest = max(1, max(sizes.values()) // _SMALL_GROUPS_PER_SET)
    candidates = grouping.queries_of_group.keys() - grouping.groups_of_test
    small = [group for group in candidates if grouping.queries_of_group[group] <= largest]
    return sorted(small, key=lambda group: _hash_text(f"{seed}:{grouping.key_of_group[group]}"))


def choose_known_queries(
    source: AnyPath, records: Sequence[Record], sizes: Mapping[str, int], settings: SplitSettings
) -> tuple[dict[int, dict[str, str]], int]:
    """Choose queries whose positives are all positives of queries that stay in training.

    Near-duplicates of a query are held out with it. Of their groups in a random order, the test set
    of fold k takes the first that folds 0 to k - 1 have not taken, and dev the last ones. A group
    is skipped if one of its passages would have no other query left.

    Args:
        records: if a passage is among them, all records with this passage.
        sizes: largest number of queries in "dev" and "test". If fewer can be held out at once, both
            get their share of them.

    Returns:
        {fold: {normalised query: side}} of fold 0 and the fold of the settings, empty if too few
            passages have known queries; and the number of folds with at least half of the wanted
            test queries.
    """
    grouping = group_records(records, by_query=True)
    passages: dict[int, set[str]] = {}
    for record, group in zip(records, grouping.group_of_record, strict=True):
        passages.setdefault(group, set()).update(map(normalise, record.positives))
    num_groups = Counter(passage for group in passages.values() for passage in group)
    order = _list_small_groups(grouping, sizes, f"{settings.seed}:known")

    def take(groups: Iterable[int], size: float, num_held_out: Counter[str]) -> list[int]:
        """Return the first groups that may be held out besides ``num_held_out``, and add them."""
        taken: list[int] = []
        num_taken = 0
        for group in groups:
            if num_taken >= size:
                break
            if all(num_groups[passage] - num_held_out[passage] > 1 for passage in passages[group]):
                num_held_out.update(passages[group])
                num_taken += grouping.queries_of_group[group]
                taken.append(group)
        return taken

    possible = take(order, math.inf, Counter())
    available = grouping.count_queries(possible)
    num_wanted = sum(sizes.values())
    if settings.future == "known" and available < num_wanted:
        raise DataError(
            f"{source}: cannot hold out {num_wanted:,} queries on known documents: {available:,} "
            "have only passages that stay positives of other queries (lower --dev and --test, or "
            "give another --future)"
        )
    passages_of_known = set().union(*(passages[group] for group in possible))
    if settings.future is None and len(passages_of_known) < LEAST_KNOWN_PASSAGES:
        return {0: {}}, 0
    goals = {
        side: min(size, available * size // max(1, num_wanted)) for side, size in sizes.items()
    }
    sides_of_fold: dict[int, dict[str, str]] = {}
    untested = order
    fold = 0
    while True:
        num_held_out: Counter[str] = Counter()
        test = set(take(untested, goals["test"], num_held_out))
        untested = [group for group in untested if group not in test]
        if fold in (0, settings.fold):
            others = [group for group in reversed(order) if group not in test]
            dev = set(take(others, goals["dev"], num_held_out))
            sides_of_fold[fold] = {
                normalise(record.query): "dev" if group in dev else "test"
                for record, group in zip(records, grouping.group_of_record, strict=True)
                if group in dev or group in test
            }
        if grouping.count_queries(test) < max(1, goals["test"] / 2):
            return sides_of_fold, fold  # this fold and later ones do not count
        fold += 1


# Texts --------------------------------------------------------------------------------------------


def find_held_out(
    parts: Mapping[str, Sequence[Record]], documents: Sequence[Passage], show_progress: bool = False
) -> set[str]:
    """Return the normalised texts that must not be negatives in training.

    These are the queries and positives of dev and test, and their copies and near-duplicates among
    hard negatives and documents, without the positives of training records.
    """
    held_out_records = [*parts["dev"], *parts["test"]]
    held_out = _collect_positives(held_out_records)
    held_out.update(normalise(record.query) for record in held_out_records)
    training_positives = _collect_positives(parts["train"])
    held_out -= training_positives | {""}  # published sets judge empty documents
    negatives = {normalise(text) for record in parts["train"] for text in record.negatives}
    for document in documents:
        negatives |= _get_texts(document)
    negatives -= held_out | training_positives
    held_out |= find_near_duplicates(negatives, held_out, show_progress)
    return _add_copies(held_out, documents) - training_positives


def collect_training_corpus(
    records: Iterable[Record], documents: Sequence[Passage], held_out: Set[str]
) -> list[Passage]:
    """Return the distinct documents that training may use as negatives.

    These are the passages of the training records, and all ``documents`` but held-out texts and
    copies of these passages.
    """
    passages = _collect_passages(records)
    collected = {}  # {normalised text: document}
    for text in passages:
        if text not in held_out:
            collected[text] = _make_document(text, passages[text])
    copies_of_passages = _add_copies(collected.keys(), documents)
    for document in documents:
        text = normalise(document.passage)
        if text not in held_out and document.passage == passages.get(text):
            collected[text] = document  # replaces the training passage, to keep the corpus's id
        elif text and text not in held_out and text not in copies_of_passages:
            collected.setdefault(text, document)
    return list(collected.values())


def sample_documents(
    side: str, parts: Mapping[str, Sequence[Record]], size: int, seed: int
) -> list[Passage]:
    """Return the passages of a side's records, and a sample of others up to `size` in all."""
    passages = _collect_passages(parts[side])
    others: dict[str, str] = {}
    for records in parts.values():
        others.update(_collect_passages(records))
    texts = others.keys() - passages.keys()
    order = sorted(texts, key=lambda text: _hash_text(f"{seed}:{fold_case(others[text])}"))
    for text in order[: max(0, size - len(passages))]:
        passages[text] = others[text]
    return [_make_document(text, passage) for text, passage in passages.items()]


def _get_texts(document: Passage) -> set[str]:
    """Return the normalised texts of a document, with its title and without it, if not blank."""
    texts = {normalise(document.passage)}
    if document.title:
        texts.add(normalise(document.text))
    return texts - {""}


def _add_copies(texts: Set[str], documents: Iterable[Passage]) -> set[str]:
    """Return normalised texts together with those of the documents that are copies of them.

    Records may have a full stop, a colon or a line break between title and text.
    """
    all_texts = set(texts)
    words = set(map(get_words, texts))
    for document in documents:
        texts_of_document = _get_texts(document)
        if not words.isdisjoint(map(get_words, texts_of_document)):
            all_texts |= texts_of_document
    return all_texts


def _collect_positives(records: Iterable[Record]) -> set[str]:
    return {normalise(positive) for record in records for positive in record.positives}


def _collect_passages(records: Iterable[Record]) -> dict[str, str]:
    """Return {normalised text: the alphabetically first text} of the passages of records."""
    passages: dict[str, str] = {}
    for record in records:
        for passage in (*record.positives, *record.negatives):
            text = normalise(passage)
            passages[text] = min(passage, passages.get(text, passage))
    return passages


def _hash_text(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


# Files --------------------------------------------------------------------------------------------


def _make_document(normalised_text: str, passage: str) -> Passage:
    return Passage(_hash_text(normalised_text)[:16], "", passage)


def _format_record(record: Record) -> str:
    positives = record.positives
    content: dict[str, object] = {"query": record.query}
    content["positive"] = positives[0] if len(positives) == 1 else positives
    if record.negatives:
        content["negatives"] = record.negatives
    return json.dumps(content, ensure_ascii=False) + "\n"


def add_to_training(folder: Path, source: RecordSource, report: RecordReport) -> str:
    """Write the training records of a split, and further ones, to `WITH_GENERATED_FILE`.

    Their documents are added to `CORPUS_FILE`. A further record is left out if its query is one of
    dev or test, or nearly so, or if a document of it is new there: the verdict on new documents is
    about those without any training query. Returns a line for the user; raises `DataError` if no
    further record is left.
    """
    training = list(RecordSource(folder / TRAIN_FILE).records(RecordReport()))
    training_positives = _collect_positives(training)
    held_out: list[str] = []
    new_documents: list[str] = []
    for side in ("dev", "test"):
        for query, positives in list_positives(load_beir_folder(folder / side, "test")):
            held_out.append(query)
            new_documents += [
                text for text in positives if normalise(text) not in training_positives
            ]
    further = list(source.records(report))
    texts = {text for record in further for text in record.positives}
    texts = {text for text in texts if normalise(text) not in training_positives}
    refused = find_near_duplicates(texts, new_documents)
    refused |= find_near_duplicates((record.query for record in further), held_out + new_documents)
    added = [each for each in further if refused.isdisjoint([each.query, *each.positives])]
    if not added:
        raise DataError(
            f"{source.path}: all {len(further):,} records have queries of dev or test, or new "
            "documents of these (generate questions for other documents)"
        )
    documents = list(read_passages(folder / CORPUS_FILE, RecordReport(), may_be_blank=True))
    known = {get_words(text) for document in documents for text in _get_texts(document)}
    for record in added:
        for positive in record.positives:
            if get_words(positive) not in known:
                known.add(get_words(positive))
                documents.append(_make_document(normalise(positive), positive))
    write_text(folder / CORPUS_FILE, (format_document(*document) for document in documents))
    write_text(folder / WITH_GENERATED_FILE, map(_format_record, [*training, *added]))
    return (
        f"{source.path}: {len(added):,} questions are added to training; left out, because like "
        f"a query of dev or test, or about a new document: {len(further) - len(added):,}"
    )


def judge_documents(
    records: Sequence[Record], searched: Iterable[Passage]
) -> tuple[list[Passage], dict[str, str], dict[str, dict[str, int]]]:
    """Return documents, queries ({id: text}) and qrels of the records of dev or test.

    Every document with the text of a positive is relevant to its query; without one, every document
    with the words of the positive; without these, the positive is added to the documents.

    A query whose own text is a document gets the id of this document, unless the document is
    relevant to it: as in BEIR, an evaluation ignores the document with the id of the query.
    """
    queries: dict[str, str] = {}  # texts by the normalised text
    positives: dict[str, str] = {}
    for record in records:
        queries.setdefault(normalise(record.query), record.query)
        for positive in record.positives:
            positives.setdefault(normalise(positive), positive)
    ids_of_text: dict[str, list[str]] = {text: [] for text in (*queries, *positives)}
    documents = list(searched)
    for document in documents:
        for text in _get_texts(document) & ids_of_text.keys():
            ids_of_text[text].append(document.id)
    ids_by_words: dict[str, list[str]] = {
        get_words(text): [] for text in positives if not ids_of_text[text]
    }
    for document in documents if ids_by_words else []:
        for words in set(map(get_words, _get_texts(document))) & ids_by_words.keys():
            ids_by_words[words].append(document.id)
    for text, positive in positives.items():
        ids = ids_of_text[text]
        if not ids:
            ids.extend(ids_by_words[get_words(text)])
        if not ids:
            documents.append(_make_document(text, positive))
            ids.append(documents[-1].id)

    grades: dict[str, dict[str, int]] = {query: {} for query in queries}
    for record in records:
        for positive in record.positives:
            relevant_ids = ids_of_text[normalise(positive)]
            grades[normalise(record.query)].update(dict.fromkeys(relevant_ids, 1))
    document_ids = {document.id for document in documents}
    free_ids = (f"q{number}" for number in count() if f"q{number}" not in document_ids)
    qrels: dict[str, dict[str, int]] = {}
    for query, judgements in grades.items():
        own_ids = [name for name in ids_of_text[query] if name not in judgements]
        query_id = next(name for name in chain(own_ids, free_ids) if name not in qrels)
        qrels[query_id] = judgements
    return documents, dict(zip(qrels, queries.values(), strict=True)), qrels


def write_beir(
    folder: Path,
    documents: Iterable[Passage],
    queries: Mapping[str, str],
    qrels: Mapping[str, Mapping[str, int]],
    training_positives: Set[str],
) -> int:
    """Write a BEIR folder with the split ``test``; return the number of known queries.

    If there are some, their judgements are also written as a split ``known``, and those of the
    others as ``new``. ``training_positives`` are normalised.
    """
    relevant_ids: dict[str, set[str]] = {}
    for query_id, judgements in qrels.items():
        relevant_ids[query_id] = {name for name, grade in judgements.items() if grade > 0}
    all_ids = set().union(*relevant_ids.values())
    relevant = [document for document in documents if document.id in all_ids]
    known_texts = _add_copies(training_positives, relevant)
    is_known = {each.id: normalise(each.passage) in known_texts for each in relevant}
    kinds: dict[str, dict[str, Mapping[str, int]]] = {"known": {}, "new": {}}
    for query_id, judgements in qrels.items():
        ids = relevant_ids[query_id] & is_known.keys()
        kind = "known" if ids and all(is_known[name] for name in ids) else "new"
        kinds[kind][query_id] = judgements
    write_beir_folder(folder, documents, queries, qrels)
    for kind, judged in kinds.items():
        if kinds["known"] and judged:
            write_qrels(folder, kind, judged)
    return len(kinds["known"])


def write_part(dataset: BeirDataset, document_ids: Container[str], folder: Path) -> None:
    """Write a BEIR folder with the split ``test``: all queries and some documents of a data set.

    Judgements of the corpus's other documents are left out.
    """
    corpus = dataset.corpus
    documents = (Passage(name, **corpus[name]) for name in corpus if name in document_ids)
    qrels: dict[str, dict[str, int]] = {}
    for query_id, judgements in dataset.qrels.items():
        ids = [name for name in judgements if name in document_ids or name not in corpus]
        qrels[query_id] = {name: judgements[name] for name in ids}
    write_beir_folder(folder, documents, dataset.queries, qrels)
