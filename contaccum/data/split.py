"""Hold out dev and test sets from training data, so that nothing of them is trained on.

Groups of records that hang together (`contaccum.data.grouping`) go whole to train, dev or test. A
split is a folder: ``train.jsonl``, ``corpus.jsonl`` (documents to contrast training queries with),
and the BEIR folders ``dev`` and ``test``, each with the split ``test``. The same data, sizes and
seed give the same split, whatever the order of the records.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from contaccum.data import split_files
from contaccum.data.beir import BeirDataset, load_beir_folder
from contaccum.data.fields import Record
from contaccum.data.grouping import Grouping, group_records, held_out_like
from contaccum.data.near_duplicates import normalise
from contaccum.data.readers import Passage, Source
from contaccum.data.records import RecordReport
from contaccum.data.split_files import text_hash
from contaccum.errors import ConfigError, DataError
from contaccum.files import AnyPath, Fingerprint, atomic_folder, provenance, read_json, write_json

DEV_SHARE = 0.1
TEST_SHARE = 0.2
LARGEST_DEV = 500
LARGEST_TEST = 1000
"""Larger sets hardly narrow an interval, and cost time to score."""

LEAST_QUERIES = 10
"""With fewer queries nothing is held out."""

FEW_TEST_QUERIES = 100
"""With fewer test queries, most differences lie within the interval: the split warns."""

RECORD_FILE = "split.json"
TRAIN_FILE = "train.jsonl"
CORPUS_FILE = "corpus.jsonl"


@dataclass(frozen=True)
class SplitSettings:
    """How much is held out, and what is chosen.

    Attributes:
        dev, test: below 1 a share of the queries, else their number; None: a tenth and a fifth, at
            most 500 and 1,000.
        haystack: documents of a held-out set, at least, where there is no corpus.
        seed: another seed gives another split.
        fold: of cross-validation: the test sets of folds 0, 1, ... have no query in common.

    Raises:
        ConfigError: for a value that cannot be used.
    """

    dev: float | None = None
    test: float | None = None
    haystack: int = 2000
    seed: int = 0
    fold: int = 0

    def __post_init__(self) -> None:
        for name in ("dev", "test"):
            size = getattr(self, name)
            if size is not None and (not size > 0 or (size > 1 and size != int(size))):
                raise ConfigError(
                    f"{name}={size}: give a share below 1, or a whole number of queries"
                )
        for name in ("haystack", "fold"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must be at least 0, got {getattr(self, name)}")


@dataclass(frozen=True)
class Split:
    """What a split holds; sizes are numbers of distinct queries."""

    train: int
    dev: int
    test: int
    records: int  # in train.jsonl
    documents: dict[
        str, int
    ]  # to contrast training queries with, and in the haystack of dev and of test
    groups: int
    largest_group: int
    near_duplicates: int  # texts that hang together with one that is nearly the same
    held_out_by: str  # "passage" or "query"
    left_out: int  # records that hang together with the test set that the data came with
    negatives_left_out: int  # hard negatives in training that are positives of dev or test
    settings: dict[str, Any]
    fingerprint: str  # sha256, in hex, of all records and of the settings

    def summary(self) -> str:
        """Return one line."""
        line = (
            f"held out: {self.dev:,} dev and {self.test:,} test queries, split by "
            f"{self.held_out_by}; {self.train:,} queries to train on"
        )
        if self.near_duplicates:
            line += f" ({self.near_duplicates:,} near-duplicates kept together)"
        return line

    def warnings(self) -> list[str]:
        """Return what is to be known of this split, a line each."""
        warnings = []
        if self.test < FEW_TEST_QUERIES:
            warnings.append(
                f"{self.test} test queries are few: only large differences are told from noise. "
                "Judge by several folds (--fold 1, 2, ...)"
            )
        if self.left_out:
            warnings.append(
                f"{self.left_out:,} training records are left out: they share a text with a test query, or nearly so"
            )
        if self.held_out_by == "query":
            warnings.append(
                "the test set of these data shares passages with its training queries, so dev is "
                "held out by query as well"
            )
        return warnings


def split_data(
    data: Source,
    output: AnyPath,
    settings: SplitSettings | None = None,
    corpus: AnyPath | None = None,
    report: RecordReport | None = None,
    show_progress: bool = False,
) -> Split:
    """Write a split of training data to a new folder.

    A BEIR folder with a split ``test`` keeps it: dev alone is cut from ``train``, and records that
    hang together with a test query are left out. If more than a fifth of the test queries need a
    passage that training queries need too, dev is held out by query, as that test set is: its
    passages may be positives in training. The folder's corpus is the haystack.

    Args:
        data: the training records, all of which are in memory for a while.
        output: a folder that does not exist.
        corpus: documents, all of which become the haystack of dev and test. None: the held-out
            passages, hard negatives of the held-out queries, and a sample of the other passages.
        report: counts of records go here.

    Raises:
        ConfigError: for settings that cannot be used with these data, or an ``output`` that exists.
        DataError: for data that cannot be read, have too few queries, or hang together too much.
    """
    output = Path(output)
    if output.exists():
        raise ConfigError(f"{output}: exists already; name another folder, or remove it")
    settings = settings or SplitSettings()
    report = report or RecordReport()
    records = list(data.records(report))
    published_test = _published_test(data, report)
    corpus_documents = _read_corpus(corpus, published_test, report)

    held_out_by = held_out_like(records, published_test)
    grouping = group_records(records, published_test, held_out_by, show_progress)
    sizes = _choose_sizes(data.path, grouping, settings, published_test)
    sides = choose_sides(data.path, grouping, sizes, settings)
    parts: dict[str, list[Record]] = {"train": [], "dev": [], "test": [], "left out": []}
    for record, group in zip(records, grouping.group_of_record, strict=True):
        parts[sides.get(group, "left out")].append(record)

    with atomic_folder(output) as folder:
        negatives_left_out = split_files.write_train(folder / TRAIN_FILE, parts)
        corpus_size = split_files.write_training_corpus(
            folder / CORPUS_FILE, parts, corpus_documents or (), published_test
        )
        documents = _write_held_out(folder, parts, published_test, corpus_documents, settings)
        split = Split(
            train=_count_queries(parts["train"]),
            dev=_count_queries(parts["dev"]),
            test=len(published_test.qrels) if published_test else _count_queries(parts["test"]),
            records=len(parts["train"]),
            documents={"train": corpus_size, **documents},
            groups=len(grouping.queries_of_group),
            largest_group=max(grouping.queries_of_group.values()),
            near_duplicates=grouping.num_near_duplicates,
            held_out_by=held_out_by,
            left_out=len(parts["left out"]),
            negatives_left_out=negatives_left_out,
            settings=asdict(settings),
            fingerprint=_fingerprint(records, settings, corpus),
        )
        write_json(folder / RECORD_FILE, {**asdict(split), **provenance()})
    return split


def _read_corpus(
    corpus: AnyPath | None, published_test: BeirDataset | None, report: RecordReport
) -> list[Passage] | None:
    """Return all documents of the test set's folder, or else of the corpus, if there is one."""
    if published_test is not None:
        return split_files.haystack_of(published_test)
    return None if corpus is None else split_files.read_haystack(corpus, report)


def _write_held_out(
    folder: Path,
    parts: dict[str, list[Record]],
    published_test: BeirDataset | None,
    corpus_documents: Sequence[Passage] | None,
    settings: SplitSettings,
) -> dict[str, int]:
    """Write the folders ``dev`` and ``test``; return how many documents each is searched in."""
    documents: dict[str, int] = {}
    for side in ("dev", "test"):
        if side == "test" and published_test is not None:
            documents[side] = split_files.copy_test(published_test, folder / side)
            continue
        haystack = corpus_documents
        if haystack is None:
            haystack = split_files.sample_haystack(side, parts, settings.haystack, settings.seed)
        documents[side] = split_files.write_beir(folder / side, parts[side], haystack)
    return documents


def read_split(folder: AnyPath) -> Split:
    """Read what `split_data` says of the split in a folder; raises `DataError`."""
    file = Path(folder) / RECORD_FILE
    content = read_json(file)
    try:
        return Split(**{name: content[name] for name in Split.__dataclass_fields__})
    except KeyError as error:
        raise DataError(f"{file}: lacks {error}; split the data again") from error


def choose_sides(
    source: AnyPath, grouping: Grouping, sizes: dict[str, int], settings: SplitSettings
) -> dict[int, str]:
    """Give each group to "train", "dev" or "test"; those of a test set of the data's own get none.

    Groups are taken in the order of a hash of their key. The queries of fold k's test set are those
    from k x test on, and dev those after them, from the beginning again where they end. A group
    larger than a quarter of the test set (or of dev) goes to train: no group decides a score.

    Args:
        source: of the data, for messages.
        sizes: queries of dev and test.

    Raises:
        DataError: if too many queries are in large groups.
        ConfigError: for a fold that there is not.
    """
    largest = max(1, max(sizes.values()) // 4)
    sides = {}
    small_groups = []
    for group, num_queries in grouping.queries_of_group.items():
        if group in grouping.groups_of_test:
            continue
        sides[group] = "train"
        if num_queries <= largest:
            small_groups.append(group)
    small_groups.sort(
        key=lambda group: text_hash(f"{settings.seed}:{grouping.key_of_group[group]}")
    )

    num_available = sum(grouping.queries_of_group[group] for group in small_groups)
    num_held_out = sizes["dev"] + sizes["test"]
    if num_available < num_held_out:
        raise DataError(
            f"{source}: cannot hold out {num_held_out:,} queries. Records that share a text, or "
            f"nearly so, hang together: the largest group has "
            f"{max(grouping.queries_of_group.values()):,} queries, and small groups have "
            f"{num_available:,} in all (ask for less with --dev and --test)"
        )
    first_of_test = settings.fold * sizes["test"]
    if settings.fold and first_of_test + sizes["test"] > num_available:
        num_folds = num_available // sizes["test"] if sizes["test"] else 1
        raise ConfigError(f"fold={settings.fold}: of {source} there are folds 0 to {num_folds - 1}")

    position = 0
    for group in small_groups:
        offset = (position - first_of_test) % num_available
        if offset < sizes["test"]:
            sides[group] = "test"
        elif offset < num_held_out:
            sides[group] = "dev"
        position += grouping.queries_of_group[group]
    return sides


def _choose_sizes(
    source: AnyPath, grouping: Grouping, settings: SplitSettings, published_test: BeirDataset | None
) -> dict[str, int]:
    """Return the number of dev and test queries to hold out."""
    num_queries = 0
    for group, count in grouping.queries_of_group.items():
        if group not in grouping.groups_of_test:
            num_queries += count
    if num_queries < LEAST_QUERIES:
        raise DataError(
            f"{source}: has {num_queries} distinct queries; it takes at least {LEAST_QUERIES} to hold some of them out"
        )
    sizes = {
        "dev": _size(settings.dev, num_queries, min(LARGEST_DEV, DEV_SHARE * num_queries)),
        "test": _size(settings.test, num_queries, min(LARGEST_TEST, TEST_SHARE * num_queries)),
    }
    if published_test is not None:
        if settings.test is not None or settings.fold:
            raise ConfigError(f"{source}: its own test set stays as it is: drop test and fold")
        sizes["test"] = 0
    if sum(sizes.values()) >= num_queries:
        raise ConfigError(
            f"{source}: {sizes['dev']:,} dev and {sizes['test']:,} test queries of "
            f"{num_queries:,} leave none to train on"
        )
    return sizes


def _size(asked: float | None, num_queries: int, default: float) -> int:
    """Return a number of queries; ``asked`` is one or a share, ``default`` is for None."""
    if asked is None:
        return max(1, round(default))
    if asked < 1:
        return max(1, round(asked * num_queries))
    return int(asked)


def _published_test(data: Source, report: RecordReport) -> BeirDataset | None:
    """Return the split ``test`` of a BEIR folder that has one."""
    if data.data_format != "beir" or not any(data.path.glob("qrels/test.tsv*")):
        return None
    # Reading the training records has counted the documents already: not once more.
    return load_beir_folder(data.path, "test", report=RecordReport(report.on_bad_record))


def _count_queries(records: Iterable[Record]) -> int:
    return len({normalise(record.query) for record in records})


def _fingerprint(records: Iterable[Record], settings: SplitSettings, corpus: AnyPath | None) -> str:
    content = Fingerprint()
    for line in sorted(split_files.json_line(record) for record in records):
        content.add(line)
    content.add(str(settings), "" if corpus is None else Path(corpus).name)
    return content.hex()
