"""Files of a split: ``train.jsonl``, ``corpus.jsonl``, and the BEIR folders of dev and test.

A haystack is the set of documents in which the queries of dev or test are searched. Texts are
compared after `normalise`, so a text that differs only in case or in invisible characters is the
same text. A document is a copy of a passage of the records if its title and text together, or its
text alone, are the same text as the passage: records may hold the texts of documents without their
titles.
`contaccum.data.split` decides which records are on which side.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Container, Iterable, Mapping, Sequence, Set
from pathlib import Path

from contaccum.data.beir import QRELS_HEADER, BeirDataset, get_positives, load_beir_folder
from contaccum.data.fields import Record
from contaccum.data.near_duplicates import find_near_duplicates, get_words, normalise
from contaccum.data.readers import Passage, Source, read_passages
from contaccum.data.records import RecordReport, fold_case, quoted
from contaccum.errors import DataError
from contaccum.files import AnyPath, write_text


def read_training_records(data: Source, report: RecordReport) -> list[Record]:
    """Read all training records; those of a DPR file without their scores, which are BM25's."""
    records = list(data.records(report))
    if data.data_format == "dpr":
        records = [record._replace(scores=None) for record in records]
    return records


def find_held_out(
    parts: Mapping[str, Sequence[Record]],
    documents: Sequence[Passage],
    test: BeirDataset | None,
    show_progress: bool = False,
) -> set[str]:
    """Return the normalised texts that must not be negatives in training.

    These are the queries and positives of dev and test, and the hard negatives of training records
    and the documents that are copies or near-duplicates of them. Positives of training records are
    never among them: dev and test may have some of these too (`Split.held_out_by`).

    Args:
        parts: the records of "train", "dev" and "test".
        documents: the corpus; empty if there is none.
        test: the test set that the data came with; None: there is none.
        show_progress: True for a progress bar.
    """
    held_out_records = [*parts["dev"], *parts["test"]]
    if test is not None:
        for query_id, query in test.queries.items():
            held_out_records.append(Record(query, get_positives(test, query_id), negatives=[]))
    held_out = _collect_positives(held_out_records)
    held_out.update(normalise(record.query) for record in held_out_records)
    training_positives = _collect_positives(parts["train"])
    held_out -= training_positives | {""}  # published sets judge empty documents
    negatives = {normalise(text) for record in parts["train"] for text in record.negatives}
    for document in documents:
        negatives |= _get_copied_texts(document)
    held_out |= find_near_duplicates(
        negatives - held_out - training_positives, held_out, show_progress
    )
    return _add_copies(held_out, documents) - training_positives


def write_train(path: Path, records: Iterable[Record], held_out: Set[str]) -> int:
    """Write the training records, without hard negatives that are held out.

    Args:
        path: the file to write.
        records: the training records.
        held_out: normalised texts; see `find_held_out`.

    Returns:
        The number of hard negatives that were left out.
    """
    num_left_out = 0
    lines = []
    for record in records:
        allowed_record = _remove_negatives(record, held_out)
        num_left_out += len(record.negatives) - len(allowed_record.negatives)
        lines.append(json_line(allowed_record))
    write_text(path, lines)
    return num_left_out


def write_training_corpus(
    path: Path, records: Iterable[Record], documents: Sequence[Passage], held_out: Set[str]
) -> int:
    """Write the documents that training may use as negatives; return their number.

    These documents are the positives and hard negatives of the training records, and all
    ``documents``, except for held-out texts. Of documents that are equal after `normalise`, only
    one is written. Copies of a passage of the training records are not written beside it.

    Args:
        path: the file to write.
        records: the training records.
        documents: the corpus; empty if there is none.
        held_out: normalised texts; see `find_held_out`.
    """
    training_passages = {}
    written = {}  # {normalised text: document}
    for text, passage in _collect_passages(records).items():
        if text not in held_out:
            training_passages[text] = passage
            written[text] = Passage(_make_document_id(text), "", passage)
    copies_of_written = _add_copies(training_passages.keys(), documents)
    for document in documents:
        text = normalise(document.passage)
        if text in training_passages and document.passage == training_passages[text]:
            written[text] = document  # replaces the training passage, to keep the corpus's id
        elif text and text not in held_out and text not in copies_of_written:
            written.setdefault(text, document)
    write_text(path, map(_format_document, written.values()))
    return len(written)


def _get_copied_texts(document: Passage) -> set[str]:
    """Return the normalised texts of which a document is a copy: with its title, and without it.

    A blank text has no copies.
    """
    texts = {normalise(document.passage)}
    if document.title:
        texts.add(normalise(document.text))
    return texts - {""}


def _add_copies(texts: Set[str], documents: Iterable[Passage]) -> set[str]:
    """Return normalised texts together with those of the documents that are copies of them.

    The texts of a document are those with its title and without it, because hard negatives may
    have either.
    """
    all_texts = set(texts)
    for document in documents:
        copied_texts = _get_copied_texts(document)
        if not texts.isdisjoint(copied_texts):
            all_texts |= copied_texts
    return all_texts


def _collect_positives(records: Iterable[Record]) -> set[str]:
    """Return the normalised positives of records."""
    positives: set[str] = set()
    for record in records:
        positives.update(normalise(positive) for positive in record.positives)
    return positives


def _remove_negatives(record: Record, passages: Set[str]) -> Record:
    """Return a record without the hard negatives whose normalised text is in `passages`."""
    negatives = []
    negative_scores = []
    for position, negative in enumerate(record.negatives, start=len(record.positives)):
        if normalise(negative) not in passages:
            negatives.append(negative)
            if record.scores is not None:
                negative_scores.append(record.scores[position])
    scores = record.scores
    if scores is not None:
        scores = scores[: len(record.positives)] + negative_scores
    return record._replace(negatives=negatives, scores=scores)


def json_line(record: Record) -> str:
    """Return a training record as a line of JSON that `contaccum.data.read_records` reads."""
    positives = record.positives
    content: dict[str, object] = {"query": record.query}
    if len(positives) == 1:
        content["positive"] = positives[0]
    else:
        content["positive"] = positives
    if record.negatives:
        content["negatives"] = record.negatives
    if record.scores is not None:
        content["scores"] = record.scores
    return json.dumps(content, ensure_ascii=False) + "\n"


def load_published_test(data: Source, report: RecordReport) -> BeirDataset | None:
    """Load the test set that came with the data: the split ``test`` of a BEIR folder, or None.

    Args:
        data: the source of the training records.
        report: counts of the training records, to which the judgements of the test set are added.
    """
    if data.data_format != "beir" or not any(data.path.glob("qrels/test.tsv*")):
        return None
    # `report` has counted documents and queries with the training records already.
    texts_report = RecordReport(report.on_bad_record)
    return load_beir_folder(data.path, "test", report=report, texts_report=texts_report)


def read_haystack(
    corpus: AnyPath, report: RecordReport, may_be_blank: bool = False
) -> list[Passage]:
    """Read the documents of a corpus, as `read_passages` does.

    Raises:
        DataError: for an id that occurs twice, or that a file of judgements cannot contain.
    """
    documents: dict[str, Passage] = {}
    for document in read_passages(corpus, report, may_be_blank):
        if re.search(r"[\t\r\n]", document.id):
            raise DataError(
                f"{corpus}: the id {quoted(document.id)} has a tab or a line break; remove it"
            )
        if document.id in documents:
            raise DataError(
                f"{corpus}: has the id {quoted(document.id)} twice; keep one of the two"
            )
        documents[document.id] = document
    return list(documents.values())


def get_haystack(test: BeirDataset) -> list[Passage]:
    """Return all documents of a BEIR folder."""
    return [Passage(name, **document) for name, document in test.corpus.items()]


def sample_haystack(
    side: str, parts: Mapping[str, Sequence[Record]], size: int, seed: int
) -> list[Passage]:
    """Return the passages of a side's records, and a sample of other passages.

    Args:
        side: "dev" or "test".
        parts: the records of every side.
        size: least number of passages; other passages are added up to it, if there are enough.
        seed: seed of the sample.
    """
    haystack = _collect_passages(parts[side])
    all_passages: dict[str, str] = {}
    for records in parts.values():
        all_passages.update(_collect_passages(records))
    other_texts = all_passages.keys() - haystack.keys()
    sort_keys = {text: hash_text(f"{seed}:{fold_case(all_passages[text])}") for text in other_texts}
    for text in sorted(other_texts, key=sort_keys.__getitem__):
        if len(haystack) >= size:
            break
        haystack[text] = all_passages[text]
    return [Passage(_make_document_id(text), "", passage) for text, passage in haystack.items()]


def _collect_passages(records: Iterable[Record]) -> dict[str, str]:
    """Return {normalised text: text} of the positives and negatives of records.

    Of several texts, it is the first in alphabetical order, whatever the order of the records.
    """
    passages: dict[str, str] = {}
    for record in records:
        for passage in (*record.positives, *record.negatives):
            text = normalise(passage)
            passages[text] = min(passage, passages.get(text, passage))
    return passages


def write_beir(
    folder: Path, records: Sequence[Record], haystack: Iterable[Passage]
) -> tuple[int, int]:
    """Write the records of dev or test to a BEIR folder.

    The split in the folder is called ``test`` for both.

    Every document that is a copy of a positive of a query is relevant to the query. For a positive
    without such a document, documents with the same words are its copies: those that differ only in
    punctuation, such as that between title and text, or in tags of HTML. Positives without any copy
    in the haystack are added to it.

    Args:
        folder: a folder that does not exist.
        records: queries with their positives.
        haystack: the documents to search.

    Returns:
        The number of documents, and how many of them are positives that the haystack lacked.
    """
    positives: dict[str, str] = {}
    for record in records:
        for positive in record.positives:
            positives.setdefault(normalise(positive), positive)
    ids_of_positive: dict[str, list[str]] = {text: [] for text in positives}
    documents = []
    for document in haystack:
        for text in _get_copied_texts(document) & positives.keys():
            ids_of_positive[text].append(document.id)
        documents.append(document)
    ids_by_words: dict[str, list[str]] = {}
    for text, ids in ids_of_positive.items():
        if not ids:
            ids_by_words[get_words(text)] = []
    for document in documents if ids_by_words else []:
        for words in set(map(get_words, _get_copied_texts(document))) & ids_by_words.keys():
            ids_by_words[words].append(document.id)
    num_added = 0
    for text, ids in ids_of_positive.items():
        if not ids:
            ids.extend(ids_by_words[get_words(text)])
        if not ids:
            document = Passage(_make_document_id(text), "", positives[text])
            documents.append(document)
            ids.append(document.id)
            num_added += 1

    queries: dict[str, tuple[str, str]] = {}  # id and text, by the normalised text
    judgements: dict[tuple[str, str], None] = {}  # an ordered set of query id and document id
    for record in records:
        text = normalise(record.query)
        if text not in queries:
            queries[text] = (f"q{len(queries)}", record.query)
        query_id = queries[text][0]
        for positive in record.positives:
            for document_id in ids_of_positive[normalise(positive)]:
                judgements[query_id, document_id] = None

    qrels_lines = [f"{query_id}\t{document_id}\t1\n" for query_id, document_id in judgements]
    _write_beir_files(folder, documents, dict(queries.values()), qrels_lines)
    return len(documents), num_added


def _write_beir_files(
    folder: Path,
    documents: Iterable[Passage],
    queries: Mapping[str, str],
    qrels_lines: Iterable[str],
) -> None:
    """Write corpus, queries ({id: text}) and the split ``test`` to a new BEIR folder."""
    (folder / "qrels").mkdir(parents=True)
    write_text(folder / "corpus.jsonl", map(_format_document, documents))
    query_lines = []
    for query_id, text in queries.items():
        query_lines.append(json.dumps({"_id": query_id, "text": text}) + "\n")
    write_text(folder / "queries.jsonl", query_lines)
    write_text(folder / "qrels" / "test.tsv", [QRELS_HEADER, *qrels_lines])


def copy_test(test: BeirDataset, folder: Path) -> int:
    """Copy corpus, queries and test split of a BEIR folder; return the number of documents.

    If records were left out, only the others are written, so that the copy has no bad record.
    """
    if test.report.reported:
        write_part(test, test.corpus, folder)
        return len(test.corpus)
    (folder / "qrels").mkdir(parents=True)
    for pattern in ("corpus.jsonl*", "queries.jsonl*", "qrels/test.tsv*"):
        for file in test.path.glob(pattern):
            shutil.copyfile(file, folder / file.relative_to(test.path))
    return len(test.corpus)


def _format_document(document: Passage) -> str:
    content = {"_id": document.id, "title": document.title, "text": document.text}
    return json.dumps(content, ensure_ascii=False) + "\n"


def _make_document_id(normalised_text: str) -> str:
    return hash_text(normalised_text)[:16]


def hash_text(text: str) -> str:
    """Return the sha256 of a text, in hex."""
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def write_part(dataset: BeirDataset, document_ids: Container[str], folder: Path) -> None:
    """Write a BEIR folder with all queries and some documents of a data set.

    Args:
        dataset: the data set, whose judgements become the split ``test``.
        document_ids: ids of the documents to write; judgements of the other documents of the corpus
            are left out.
        folder: a folder that does not exist.
    """
    documents = [document for document in get_haystack(dataset) if document.id in document_ids]
    qrels_lines = []
    for query_id, judgements in dataset.qrels.items():
        for document_id, grade in judgements.items():
            if document_id in document_ids or document_id not in dataset.corpus:
                qrels_lines.append(f"{query_id}\t{document_id}\t{grade}\n")
    _write_beir_files(folder, documents, dataset.queries, qrels_lines)
