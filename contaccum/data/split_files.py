"""The files of a split: ``train.jsonl``, ``corpus.jsonl``, and a BEIR folder with a haystack for dev and test each."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path

from contaccum.data.beir import BeirDataset
from contaccum.data.fields import Record
from contaccum.data.near_duplicates import normalise
from contaccum.data.readers import Passage, read_passages
from contaccum.data.records import RecordReport, passage_text, quoted
from contaccum.errors import DataError
from contaccum.files import AnyPath, write_text


def write_train(path: Path, parts: Mapping[str, Sequence[Record]]) -> int:
    """Write the training records, without hard negatives that are positives of held-out queries.

    Args:
        parts: the records of "train", "dev" and "test".

    Returns:
        The number of hard negatives that are left out.
    """
    held_out = _positives_of(parts["dev"]) | _positives_of(parts["test"])
    num_left_out = 0
    lines = []
    for record in parts["train"]:
        allowed_record = _without_negatives(record, held_out)
        num_left_out += len(record.negatives) - len(allowed_record.negatives)
        lines.append(json_line(allowed_record))
    write_text(path, lines)
    return num_left_out


def write_training_corpus(
    path: Path,
    parts: Mapping[str, Sequence[Record]],
    documents: Iterable[Passage],
    test: BeirDataset | None,
) -> int:
    """Write the documents that training may use as negatives; return their number.

    These are the positives and hard negatives of the training records, and the ``documents``
    without positives that only dev or test queries have. Of documents that are equal after case and
    white space one is written: that of the training records, if there is one.

    Args:
        parts: the records of "train", "dev" and "test".
        documents: the corpus; empty where there is none.
        test: the test set that the data came with.
    """
    held_out = _positives_of(parts["dev"]) | _positives_of(parts["test"])
    if test is not None:
        for judged in test.qrels.values():
            for name, grade in judged.items():
                if grade > 0:
                    held_out.add(normalise(passage_text(**test.corpus[name])))
    held_out -= _positives_of(parts["train"])
    texts = {
        text: passage
        for text, passage in _passages_of(parts["train"]).items()
        if text not in held_out
    }
    kept = {text: Passage(_document_id(text), "", passage) for text, passage in texts.items()}
    for document in documents:
        text = normalise(document.passage)
        if text in texts and document.passage == texts[text]:
            kept[text] = document  # the same text, under the id that the corpus has for it
        elif text and text not in held_out:
            kept.setdefault(text, document)
    write_text(path, map(_document_line, kept.values()))
    return len(kept)


def _positives_of(records: Iterable[Record]) -> set[str]:
    """Return the normalised positives of some records."""
    positives: set[str] = set()
    for record in records:
        positives.update(normalise(positive) for positive in record.positives)
    return positives


def _without_negatives(record: Record, passages: set[str]) -> Record:
    """Return a record without the hard negatives that are among some normalised passages."""
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
    """Return a training record as a line that `contaccum.data.read_records` reads."""
    positives = record.positives
    content: dict[str, object] = {"query": record.query}
    content["positive"] = positives[0] if len(positives) == 1 else positives
    if record.negatives:
        content["negatives"] = record.negatives
    if record.scores is not None:
        content["scores"] = record.scores
    return json.dumps(content, ensure_ascii=False) + "\n"


def read_haystack(corpus: AnyPath, report: RecordReport) -> list[Passage]:
    """Read the documents of a corpus; raises `DataError` for an id that occurs twice."""
    documents: dict[str, Passage] = {}
    for document in read_passages(corpus, report):
        if document.id in documents:
            raise DataError(
                f"{corpus}: has the id {quoted(document.id)} twice; keep one of the two"
            )
        documents[document.id] = document
    return list(documents.values())


def haystack_of(test: BeirDataset) -> list[Passage]:
    """Return all documents of a BEIR folder."""
    return [Passage(name, **document) for name, document in test.corpus.items()]


def sample_haystack(
    side: str, parts: Mapping[str, Sequence[Record]], size: int, seed: int
) -> list[Passage]:
    """Return the passages of a side's records, and a sample of the others if they are too few.

    Args:
        parts: the records of every side.
        size: passages that there are at least, if the data have so many.
    """
    haystack = _passages_of(parts[side])
    others: dict[str, str] = {}
    for records in parts.values():
        others |= _passages_of(records)
    names = others.keys() - haystack.keys()
    for text in sorted(names, key=lambda text: text_hash(f"{seed}:{text}")):
        if len(haystack) >= size:
            break
        haystack[text] = others[text]
    return [Passage(_document_id(text), "", passage) for text, passage in haystack.items()]


def _passages_of(records: Iterable[Record]) -> dict[str, str]:
    """Return the positives and negatives of some records by their normalised texts."""
    passages: dict[str, str] = {}
    for record in records:
        for passage in (*record.positives, *record.negatives):
            passages.setdefault(normalise(passage), passage)
    return passages


def write_beir(folder: Path, records: Sequence[Record], haystack: Iterable[Passage]) -> int:
    """Write a BEIR folder with the split ``test``; return its number of documents.

    All documents that equal a positive of a query, after case and white space, are relevant to it.
    Positives that the haystack lacks are added to it.
    """
    positives: dict[str, str] = {}
    for record in records:
        for positive in record.positives:
            positives.setdefault(normalise(positive), positive)
    ids_of_positive: dict[str, list[str]] = {text: [] for text in positives}
    documents = []
    for document in haystack:
        text = normalise(document.passage)
        if text in positives:
            ids_of_positive[text].append(document.id)
        documents.append(document)
    for text, ids in ids_of_positive.items():
        if not ids:
            document = Passage(_document_id(text), "", positives[text])
            documents.append(document)
            ids.append(document.id)

    queries: dict[str, tuple[str, str]] = {}  # id and text, by the normalised text
    judgements: dict[tuple[str, str], None] = {}  # in order, each once
    for record in records:
        text = normalise(record.query)
        if text not in queries:
            queries[text] = (f"q{len(queries)}", record.query)
        query_id = queries[text][0]
        for positive in record.positives:
            for document_id in ids_of_positive[normalise(positive)]:
                judgements[query_id, document_id] = None

    (folder / "qrels").mkdir(parents=True)
    write_text(folder / "corpus.jsonl", map(_document_line, documents))
    query_lines = [
        json.dumps({"_id": name, "text": text}) + "\n" for name, text in queries.values()
    ]
    write_text(folder / "queries.jsonl", query_lines)
    rows = [f"{query}\t{document}\t1\n" for query, document in judgements]
    write_text(folder / "qrels" / "test.tsv", ["query-id\tcorpus-id\tscore\n", *rows])
    return len(documents)


def copy_test(test: BeirDataset, folder: Path) -> int:
    """Copy the corpus, the queries and the test split of a BEIR folder; return its documents."""
    (folder / "qrels").mkdir(parents=True)
    for pattern in ("corpus.jsonl*", "queries.jsonl*", "qrels/test.tsv*"):
        for file in test.path.glob(pattern):
            shutil.copyfile(file, folder / file.relative_to(test.path))
    return len(test.corpus)


def _document_line(document: Passage) -> str:
    content = {"_id": document.id, "title": document.title, "text": document.text}
    return json.dumps(content, ensure_ascii=False) + "\n"


def _document_id(normalised_text: str) -> str:
    return text_hash(normalised_text)[:16]


def text_hash(text: str) -> str:
    """Return the sha256 of a text, in hex: an order that does not depend on that of the records."""
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def write_part(dataset: BeirDataset, kept: Container[str], folder: Path) -> None:
    """Write a BEIR folder with all queries of a data set, and of its documents those that are kept.

    Args:
        dataset: its judgements become the split ``test``.
        kept: ids of documents; judgements of others are left out.
        folder: a new one.
    """
    (folder / "qrels").mkdir(parents=True)
    documents = [document for document in haystack_of(dataset) if document.id in kept]
    write_text(folder / "corpus.jsonl", map(_document_line, documents))
    query_lines = [
        json.dumps({"_id": name, "text": text}) + "\n" for name, text in dataset.queries.items()
    ]
    write_text(folder / "queries.jsonl", query_lines)
    rows = []
    for query, judged in dataset.qrels.items():
        for name, grade in judged.items():
            if name in kept:
                rows.append(f"{query}\t{name}\t{grade}\n")
    write_text(folder / "qrels" / "test.tsv", ["query-id\tcorpus-id\tscore\n", *rows])
