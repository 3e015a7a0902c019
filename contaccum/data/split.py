"""Splits of training data into train, dev and test, without a text of dev or test in train.

Records that share a text, or nearly so, form a group (`contaccum.data.grouping`). All records of a
group go to the same side: "train", "dev" or "test". The queries of dev and test are held out: no
model trains on them. The haystack of dev or test consists of the documents in which their queries
are searched.

A split is written as a folder:

    split.json     counts, settings and fingerprint of the split, see `Split`
    train.jsonl    the training records
    corpus.jsonl   documents that training may use as negatives
    dev/, test/    BEIR folders with queries, haystack and judgements; in both folders the
                   judgements are in qrels/test.tsv

The same data, sizes and seed give the same split, whatever the order of the records.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from contaccum.data import split_files
from contaccum.data.beir import BeirDataset
from contaccum.data.fields import Record
from contaccum.data.grouping import Grouping, choose_held_out_by, group_records
from contaccum.data.near_duplicates import normalise
from contaccum.data.readers import SPLIT_RECORD, Passage, Source
from contaccum.data.records import RecordReport
from contaccum.data.split_files import hash_text
from contaccum.errors import ConfigError, DataError
from contaccum.files import AnyPath, Fingerprint, atomic_folder, provenance, read_json, write_json

DEV_SHARE = 0.1
TEST_SHARE = 0.2
LARGEST_DEV = 500
LARGEST_TEST = 1000
"""Upper bounds of the default sizes: the search takes longer with more queries, and the confidence
interval of the score hardly becomes narrower."""

LEAST_QUERIES = 10
"""Least number of distinct queries in data that can be split."""

_SMALL_GROUPS_PER_SET = 4
"""Smallest number of groups in a held-out set: a larger group would decide its score."""

FEW_TEST_QUERIES = 100
"""Number of test queries below which the split warns: most differences would be noise."""

TRAIN_FILE = "train.jsonl"
CORPUS_FILE = "corpus.jsonl"


@dataclass(frozen=True)
class SplitSettings:
    """Sizes of the held-out sets, and the choice of their queries.

    Attributes:
        dev: share (below 1) or number of dev queries; None: a tenth, at most 500.
        test: share (below 1) or number of test queries; None: a fifth, at most 1,000.
        haystack: least number of documents to search in dev and in test, used only if no corpus is
            given.
        seed: seed of the random choice of queries and documents.
        fold: fold of a cross-validation: the test sets of folds 0, 1, ... have no query in common.

    Raises:
        ConfigError: for a value out of range.
    """

    dev: float | None = None
    test: float | None = None
    haystack: int = 2000
    seed: int = 0
    fold: int = 0

    def __post_init__(self) -> None:
        for name in ("dev", "test"):
            size = getattr(self, name)
            if size is not None and not (0 < size < 1 or (size >= 1 and size % 1 == 0)):
                raise ConfigError(
                    f"{name}={size}: give a share between 0 and 1, or a whole number of queries"
                )


@dataclass(frozen=True)
class Split:
    """Counts of a split.

    Attributes:
        train, dev, test: number of distinct queries.
        records: number of records in train.jsonl.
        documents: number of documents by side: in corpus.jsonl ("train"), and in the haystacks of
            "dev" and "test".
        groups: number of groups of linked records.
        largest_group: number of queries of the largest group.
        near_duplicates: number of texts that nearly equal an earlier text.
        held_out_by: "passage" if training has no passage of a held-out query, "query" if it may
            have such passages, but no held-out query.
        left_out: number of records on no side, because they share a text with the test set that
            came with the data.
        negatives_left_out: number of hard negatives that were removed from training because they
            are queries or positives of dev or test, or nearly so.
        settings: the `SplitSettings`.
        fingerprint: sha256, in hex, of all records and of the settings. It does not cover the
            documents of a given corpus or of a test set that came with the data.
        available: number of queries in groups that are small enough to be held out.
        positives_added: number of positives of dev and test that the given corpus lacks and that
            were added to the haystacks.
        has_own_test: whether the data came with a test set.
    """

    train: int
    dev: int
    test: int
    records: int
    documents: dict[str, int]
    groups: int
    largest_group: int
    near_duplicates: int
    held_out_by: str
    left_out: int
    negatives_left_out: int
    settings: dict[str, Any]
    fingerprint: str
    available: int
    positives_added: int
    has_own_test: bool

    def summary(self) -> str:
        """Return one line: the numbers of queries, near-duplicates, and positives added."""
        line = (
            f"held out: {self.dev:,} dev and {self.test:,} test queries, split by "
            f"{self.held_out_by}; {self.train:,} queries to train on"
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
            if not self.has_own_test and self.available >= 2 * self.test:
                warning += " `contaccum split` holds out other queries with --fold 1, 2, ..."
            warnings.append(warning)
        if self.left_out:
            warnings.append(
                f"{self.left_out:,} training records are left out: "
                "they share a text with a test query, or nearly so"
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

    A BEIR folder with a split ``test`` keeps this test set. Only dev is then chosen from the split
    ``train``; records in a group with a text of the test set are left out, and the folder's corpus
    is the haystack, so ``corpus`` is refused. If more than a fifth of the test queries share a
    positive with training queries, dev is held out by query, in the same way as the test set:
    passages of dev may then be positives in training.

    Args:
        data: the source of the training records, which are all in memory during the split.
        output: a folder that does not exist.
        settings: sizes and choice of the held-out sets; None: the defaults.
        corpus: documents, which become the haystack of dev and test. None: the haystack consists of
            the held-out passages, the hard negatives of the held-out queries, and a sample of the
            other passages.
        report: receives the counts of used and bad records; None: a new report.
        show_progress: True for a progress bar.

    Raises:
        ConfigError: for settings that do not fit the data, or an ``output`` that exists.
        DataError: for data that cannot be read, or with too few queries outside of large groups.
    """
    output = Path(output)
    if output.exists():
        raise ConfigError(f"{output}: exists already; name another folder, or remove it")
    settings = settings or SplitSettings()
    report = report or RecordReport()
    records = split_files.read_training_records(data, report)
    published_test = split_files.load_published_test(data, report)
    corpus_documents = _read_corpus(data, corpus, published_test, settings, report)

    held_out_by = choose_held_out_by(records, published_test)
    grouping = group_records(
        records, published_test, held_out_by, corpus_documents or (), show_progress
    )
    sizes = _choose_sizes(data.path, grouping, settings, published_test)
    sides = choose_sides(data.path, grouping, sizes, settings)
    parts: dict[str, list[Record]] = {"train": [], "dev": [], "test": [], "left out": []}
    for record, group in zip(records, grouping.group_of_record, strict=True):
        parts[sides.get(group, "left out")].append(record)

    with atomic_folder(output) as folder:
        documents_given = corpus_documents or ()
        held_out = split_files.find_held_out(parts, documents_given, published_test, show_progress)
        negatives_left_out = split_files.write_train(folder / TRAIN_FILE, parts["train"], held_out)
        num_documents = split_files.write_training_corpus(
            folder / CORPUS_FILE, parts["train"], documents_given, held_out
        )
        documents = {"train": num_documents}
        positives_added = 0
        for side in ("dev", "test"):
            if side == "test" and published_test is not None:
                documents[side] = split_files.copy_test(published_test, folder / side)
                continue
            haystack = corpus_documents
            if haystack is None:
                haystack = split_files.sample_haystack(
                    side, parts, settings.haystack, settings.seed
                )
            documents[side], num_added = split_files.write_beir(
                folder / side, parts[side], haystack
            )
            positives_added += num_added
        split = Split(
            train=_count_queries(parts["train"]),
            dev=_count_queries(parts["dev"]),
            test=len(published_test.qrels) if published_test else _count_queries(parts["test"]),
            records=len(parts["train"]),
            documents=documents,
            groups=len(grouping.queries_of_group),
            largest_group=max(grouping.queries_of_group.values()),
            near_duplicates=grouping.num_near_duplicates,
            held_out_by=held_out_by,
            left_out=len(parts["left out"]),
            negatives_left_out=negatives_left_out,
            settings=asdict(settings),
            fingerprint=_compute_fingerprint(records, settings, corpus),
            available=_count_available(grouping, _list_small_groups(grouping, sizes, settings)),
            positives_added=positives_added,
            has_own_test=published_test is not None,
        )
        write_json(folder / SPLIT_RECORD, {**asdict(split), **provenance()})
    return split


def _read_corpus(
    data: Source,
    corpus: AnyPath | None,
    published_test: BeirDataset | None,
    settings: SplitSettings,
    report: RecordReport,
) -> list[Passage] | None:
    """Return the documents of `corpus`, or else those of a BEIR folder; None without both."""
    if published_test is not None:
        if corpus is not None or settings.test is not None or settings.fold:
            raise ConfigError(
                f"{data.path}: its own test set and corpus stay as they are: drop corpus, test "
                "and fold"
            )
        return split_files.get_haystack(published_test)
    if corpus is None and data.data_format == "beir":
        # The training records have counted its documents already. Published sets have blank ones.
        own_report = RecordReport(report.on_bad_record)
        return split_files.read_haystack(data.path, own_report, may_be_blank=True)
    return None if corpus is None else split_files.read_haystack(corpus, report)


def read_split(folder: AnyPath) -> Split:
    """Read the counts of the split in a folder; raises `DataError` if they are incomplete."""
    file = Path(folder) / SPLIT_RECORD
    content = read_json(file)
    try:
        return Split(**{count.name: content[count.name] for count in fields(Split)})
    except KeyError as error:
        raise DataError(f"{file}: {error} is missing; split the data again") from error


def choose_sides(
    source: AnyPath, grouping: Grouping, sizes: dict[str, int], settings: SplitSettings
) -> dict[int, str]:
    """Assign each group to "train", "dev" or "test".

    Large groups go to train. The small groups are in the order of `_list_small_groups`. In this
    order, the test set of fold k starts after the first k x (number of test queries) queries. Dev
    follows test, and the rest is train. The order is circular: after its end, test and dev continue
    at its start. For example, with 2 test queries, 1 dev query and 6 groups of one query each:

        fold 0   test  test  dev   train train train
        fold 1   train train test  test  dev   train
        fold 2   dev   train train train test  test

    Args:
        source: the data, for messages.
        grouping: the groups.
        sizes: number of queries of "dev" and "test".
        settings: seed and fold.

    Returns:
        {group: side}, without the groups that are linked with the published test set.

    Raises:
        DataError: if too many queries are in large groups, or dev or test gets no group.
        ConfigError: for a fold number that is too large.
    """
    small_groups = _list_small_groups(grouping, sizes, settings)
    num_available = _count_available(grouping, small_groups)
    num_held_out = sizes["dev"] + sizes["test"]
    if num_available < num_held_out:
        raise DataError(
            f"{source}: cannot hold out {num_held_out:,} queries. Records that share a text, or "
            f"nearly so, must stay on one side: the largest group has "
            f"{max(grouping.queries_of_group.values()):,} queries, and small groups, of up to a "
            f"quarter of the larger of dev and test, have {num_available:,} in all "
            f"(raise --{'test' if sizes['test'] else 'dev'}, so that more groups are small, or "
            "give pairs with more different texts)"
        )
    test_start = settings.fold * sizes["test"]
    if settings.fold and test_start + sizes["test"] > num_available:
        num_folds = num_available // sizes["test"] if sizes["test"] else 1
        raise ConfigError(f"fold={settings.fold}: {source} has folds 0 to {num_folds - 1}")

    sides = {}
    for group in grouping.queries_of_group:
        if group not in grouping.groups_of_test:
            sides[group] = "train"
    position = 0  # number of queries in the groups before this one
    for group in small_groups:
        offset = (position - test_start) % num_available
        if offset < sizes["test"]:
            sides[group] = "test"
        elif offset < num_held_out:
            sides[group] = "dev"
        position += grouping.queries_of_group[group]
    for side, size in sizes.items():
        if size > 0 and side not in sides.values():
            raise DataError(
                f"{source}: {side} would be empty, because a group of linked records has more than "
                f"{size:,} queries (raise --{side})"
            )
    if "train" not in sides.values():
        largest_side = max(sizes, key=sizes.__getitem__)
        raise DataError(
            f"{source}: no group of linked records is left to train on (lower --{largest_side})"
        )
    return sides


def _list_small_groups(
    grouping: Grouping, sizes: dict[str, int], settings: SplitSettings
) -> list[int]:
    """Return the groups that may be held out, in a random order that depends on the seed.

    A group with more than a quarter of the queries of dev or test, whichever has more, would decide
    the score.

    Args:
        grouping: the groups. Those that are linked with the published test set are left out.
        sizes: number of queries of "dev" and "test".
        settings: the order is that of a hash of their seed and the group.
    """
    largest_small_group = max(1, max(sizes.values()) // _SMALL_GROUPS_PER_SET)
    small_groups = []
    for group, num_queries in grouping.queries_of_group.items():
        if group not in grouping.groups_of_test and num_queries <= largest_small_group:
            small_groups.append(group)
    seed = settings.seed
    small_groups.sort(key=lambda group: hash_text(f"{seed}:{grouping.key_of_group[group]}"))
    return small_groups


def _count_available(grouping: Grouping, small_groups: Sequence[int]) -> int:
    """Return the number of queries that may be held out."""
    return sum(grouping.queries_of_group[group] for group in small_groups)


def _choose_sizes(
    source: AnyPath, grouping: Grouping, settings: SplitSettings, published_test: BeirDataset | None
) -> dict[str, int]:
    """Return the number of queries to hold out: {"dev": number, "test": number}.

    The number of test queries is 0 if the data came with a test set, which is used as it is.
    """
    num_queries = 0
    for group, num_queries_of_group in grouping.queries_of_group.items():
        if group not in grouping.groups_of_test:
            num_queries += num_queries_of_group
    if num_queries < LEAST_QUERIES:
        raise DataError(
            f"{source}: has {num_queries} distinct queries; it takes at least {LEAST_QUERIES} "
            "to hold some of them out"
        )
    default_dev = min(LARGEST_DEV, DEV_SHARE * num_queries)
    default_test = min(LARGEST_TEST, TEST_SHARE * num_queries)
    sizes = {
        "dev": _compute_size(settings.dev, num_queries, default_dev),
        "test": _compute_size(settings.test, num_queries, default_test),
    }
    if published_test is not None:
        sizes["test"] = 0
    if sum(sizes.values()) >= num_queries:
        raise ConfigError(
            f"{source}: {sizes['dev']:,} dev and {sizes['test']:,} test queries of "
            f"{num_queries:,} leave none to train on"
        )
    return sizes


def _compute_size(share_or_number: float | None, num_queries: int, default: float) -> int:
    """Return the number of queries to hold out.

    Args:
        share_or_number: a share of all queries if below 1, else a number of queries; None: the
            default.
        num_queries: number of all queries.
        default: the default number, which is rounded.
    """
    if share_or_number is None:
        return max(1, round(default))
    if share_or_number < 1:
        return max(1, round(share_or_number * num_queries))
    return int(share_or_number)


def _count_queries(records: Iterable[Record]) -> int:
    return len({normalise(record.query) for record in records})


def _compute_fingerprint(
    records: Iterable[Record], settings: SplitSettings, corpus: AnyPath | None
) -> str:
    content = Fingerprint()
    for line in sorted(split_files.json_line(record) for record in records):
        content.add(line)
    content.add(str(settings), "" if corpus is None else Path(corpus).name)
    return content.hex()
