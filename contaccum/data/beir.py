"""BEIR folders as the dictionaries of BEIR's own loader, checked record by record.

    corpus.jsonl       {"_id": document id, "title": title, "text": text}
    queries.jsonl      {"_id": query id, "text": text}
    qrels/SPLIT.tsv    query id <TAB> document id <TAB> grade; relevant if the grade is above 0

Some sets, such as ArguAna, judge documents that their corpus lacks. As in BEIR, these judgements
stay in the qrels, so that a relevant document that cannot be found lowers the scores. A public BEIR
set, by its name, is downloaded once into the cache.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import urllib.request
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from contaccum.data.rows import (
    Fault,
    RecordReport,
    parse_id,
    parse_rows,
    parse_text,
    passage_text,
    read_json_lines,
    read_lines,
    split_cells,
)
from contaccum.errors import DataError, closest, quoted, warn_once
from contaccum.files import AnyPath, Fingerprint, atomic_folder, cache_folder, read_json, write_text

_QRELS_HEADERS = ("query-id\t", "query_id\t", "queryid\t", "qid\t")

_URL = "https://public.ukp.informatik.tu-darmstadt.de/thakur/BEIR/datasets/{name}.zip"

# The checksums are the column "md5" of the table in the README of github.com/beir-cellar/beir. Four
# more sets of that table have none, because their owners require a licence.
_PUBLIC_SETS = read_json(Path(__file__).parent / "beir.json")
ARCHIVE_MD5: dict[str, str] = _PUBLIC_SETS["md5"]
PUBLIC_NAMES = tuple(ARCHIVE_MD5)
CQADUPSTACK_PARTS = tuple(f"cqadupstack/{forum}" for forum in _PUBLIC_SETS["cqadupstack"])
"""The twelve sets whose mean score is the score of CQADupStack."""


@dataclass(frozen=True)
class BeirDataset:
    """One split of a BEIR folder.

    Attributes:
        name: name of the folder.
        corpus: {document id: {"title", "text"}}, in the order of the file.
        queries: {query id: text} of the queries with judgements in the split, in their order.
        qrels: {query id: {document id: grade}}. Some of the documents may be missing in the corpus.
        fingerprint: sha256, in hex, of corpus, queries and qrels.
        path: the folder.
        report: counts of used and bad records.
    """

    name: str
    corpus: dict[str, dict[str, str]]
    queries: dict[str, str]
    qrels: dict[str, dict[str, int]]
    split: str
    fingerprint: str
    path: Path
    report: RecordReport = field(repr=False, compare=False)

    def list_missing_documents(self) -> list[str]:
        """Return the ids of relevant documents that the corpus lacks, one for each judgement."""
        return [
            document_id
            for judgements in self.qrels.values()
            for document_id, grade in judgements.items()
            if grade > 0 and document_id not in self.corpus
        ]


def load_beir_folder(
    path: AnyPath, split: str = "test", report: RecordReport | None = None
) -> BeirDataset:
    """Load one split of a BEIR folder.

    The header of `qrels/SPLIT.tsv` may be missing. Documents without title and text are kept, as
    published sets have some. ``report`` receives the counts of records; None: an error at the first
    bad record.

    Raises:
        DataError: for a missing file or split, a bad record under "stop", a file without any usable
            record, or judgements of none of the documents.
    """
    folder = Path(path)
    report = report or RecordReport()
    corpus_file = find_beir_file(folder, "corpus.jsonl")
    qrels_file = find_qrels_file(folder, split)
    corpus = _read_texts_by_id(corpus_file, report, may_be_blank=True)
    queries, qrels = _read_judged_queries(folder, qrels_file, report)
    content = Fingerprint()
    for document_id, document in corpus.items():
        content.add("d", document_id, document["title"], document["text"])
    for query_id, grades in qrels.items():
        content.add("q", query_id, queries[query_id])
        for document_id, grade in grades.items():
            content.add("j", document_id, str(grade))
    dataset = BeirDataset(
        name=folder.resolve().name,  # resolve() gives "." a name too
        corpus=corpus,
        queries=queries,
        qrels=qrels,
        split=split,
        fingerprint=content.hex(),
        path=folder,
        report=report,
    )
    missing_ids = dataset.list_missing_documents()
    if missing_ids:
        example = quoted(missing_ids[0])
        if not any(positives for _, positives in list_positives(dataset)):
            raise DataError(
                f"{qrels_file}: no relevant document is in the corpus, which lacks {example}, for "
                "example (check that the judgements and the corpus have the same ids)"
            )
        warn_once(
            f"{qrels_file}: {len(missing_ids)} judgements above 0 name documents that are not in "
            f"the corpus, such as {example}. As in BEIR, they count as not found and lower the "
            "scores. Training leaves these pairs out"
        )
    return dataset


def read_split_queries(folder: Path, split: str, report: RecordReport) -> dict[str, str]:
    """Return {query id: text} of the queries with judgements in a split; no corpus is read."""
    queries, _ = _read_judged_queries(folder, find_qrels_file(folder, split), report)
    return queries


def list_positives(dataset: BeirDataset) -> Iterator[tuple[str, list[str]]]:
    """Yield each query, and the texts of the documents of the corpus that are relevant to it."""
    for query_id, query in dataset.queries.items():
        positives = []
        for document_id, grade in dataset.qrels[query_id].items():
            if grade > 0 and document_id in dataset.corpus:
                positives.append(passage_text(**dataset.corpus[document_id]))
        yield query, positives


def is_beir_folder(path: AnyPath) -> bool:
    """Return True for a folder with a file corpus.jsonl, plain or gzip."""
    names = ("corpus.jsonl", "corpus.jsonl.gz")
    return any(os.path.isfile(os.path.join(path, name)) for name in names)


def find_beir_file(folder: Path, name: str) -> Path:
    """Return the path of a file of a folder, plain or gzip; raises `DataError` if there is none."""
    for path in (folder / name, folder / f"{name}.gz"):
        if path.exists():
            return path
    raise DataError(f"{folder / name}: no such file (see docs/data.md)")


def find_qrels_file(folder: Path, split: str) -> Path:
    """Return the path of a split's judgements; raises `DataError`, which lists the splits."""
    # A plain file comes after its gzip copy, and replaces it.
    paths = sorted(folder.glob("qrels/*.tsv*"), reverse=True)
    path_by_split = {path.name.split(".tsv")[0]: path for path in paths}
    if split not in path_by_split:
        splits = ", ".join(sorted(path_by_split)) or "none"
        raise DataError(f"{folder / 'qrels'}: no split {quoted(split)}; it has: {splits}")
    return path_by_split[split]


def _read_texts_by_id(
    path: Path, report: RecordReport, may_be_blank: bool = False
) -> dict[str, dict[str, str]]:
    """Return {_id: {"title", "text"}} of the rows of a file; a repeated id is a bad record."""
    text_by_id: dict[str, dict[str, str]] = {}

    def parse_record(record: dict[str, Any]) -> tuple[str, dict[str, str]]:
        identifier = parse_id(record.get("_id"), "_id")
        if identifier in text_by_id:
            raise Fault("duplicate _id", quoted(identifier))
        if "text" not in record:
            raise Fault("missing text")
        text = parse_text(record["text"], "text", may_be_blank)
        title = parse_text(record.get("title"), "title", may_be_blank=True)
        return identifier, {"title": title, "text": text}

    for identifier, texts in parse_rows(path, read_json_lines(path), parse_record, report):
        text_by_id[identifier] = texts
    return text_by_id


def _read_judged_queries(
    folder: Path, qrels_file: Path, report: RecordReport
) -> tuple[dict[str, str], dict[str, dict[str, int]]]:
    """Return the texts and the judgements of the queries of a split."""
    queries = _read_texts_by_id(find_beir_file(folder, "queries.jsonl"), report)
    qrels: dict[str, dict[str, int]] = {}

    def parse_judgement(line: str) -> tuple[str, str, int]:
        query_id, document_id, grade_text = split_cells(line, 3)
        if query_id not in queries:
            raise Fault("unknown query", quoted(query_id))
        if document_id in qrels.get(query_id, {}):
            detail = f"query {quoted(query_id)}, document {quoted(document_id)}"
            raise Fault("duplicate judgement", detail)
        try:
            grade = int(grade_text)
        except ValueError:
            raise Fault("score is not an integer", f"found {quoted(grade_text)}") from None
        return query_id, document_id, grade

    # BEIR's own loader always drops the first line, and with it the first judgement of a file
    # without a header.
    lines = (
        (number, line)
        for number, line in read_lines(qrels_file)
        if number > 1 or not str(line).lower().startswith(_QRELS_HEADERS)
    )
    for query_id, document_id, grade in parse_rows(qrels_file, lines, parse_judgement, report):
        qrels.setdefault(query_id, {})[document_id] = grade
    return {query_id: queries[query_id]["text"] for query_id in qrels}, qrels


def format_document(document_id: str, title: str | None, text: str) -> str:
    """Return a line of corpus.jsonl."""
    content = {"_id": document_id, "title": title, "text": text}
    return json.dumps(content, ensure_ascii=False) + "\n"


def write_qrels(folder: Path, split: str, qrels: Mapping[str, Mapping[str, int]]) -> None:
    """Write the judgements of a split to a BEIR folder."""
    lines = ["query-id\tcorpus-id\tscore\n"]  # BEIR's own loader drops the first line
    for query_id, grades in qrels.items():
        lines += [f"{query_id}\t{name}\t{grade}\n" for name, grade in grades.items()]
    write_text(folder / "qrels" / f"{split}.tsv", lines)


def write_beir_folder(
    folder: Path,
    documents: Iterable[tuple[str, str | None, str]],
    queries: Mapping[str, str],
    qrels: Mapping[str, Mapping[str, int]],
) -> None:
    """Write documents (id, title, text), {query id: text} and qrels as a split ``test``."""
    write_text(folder / "corpus.jsonl", (format_document(*document) for document in documents))
    lines = (json.dumps({"_id": name, "text": text}) + "\n" for name, text in queries.items())
    write_text(folder / "queries.jsonl", lines)
    write_qrels(folder, "test", qrels)


def get_set_name(name_or_path: str) -> str:
    """Return the name of a set in tables, from its public name or its folder."""
    return os.path.basename(os.path.abspath(name_or_path))


def get_default_split(name_or_path: AnyPath) -> str:
    """Return the split of published scores: "dev" for MS MARCO, otherwise "test"."""
    return "dev" if get_set_name(os.fspath(name_or_path)) == "msmarco" else "test"


def resolve_beir_data(name_or_path: AnyPath) -> Path:
    """Return a folder as it is; download a public BEIR set, by its name, if it is not in the cache.

    The twelve parts of CQADupStack have the names `cqadupstack/FORUM`.
    """
    folder = Path(name_or_path).expanduser()
    # Path.exists() raises an error for very long names, os.path.exists() does not.
    if os.path.exists(folder):
        return folder
    name = str(name_or_path)
    public_names = [public_name for public_name in PUBLIC_NAMES if public_name != "cqadupstack"]
    public_names += CQADUPSTACK_PARTS
    if name in public_names:
        archive_name, _, forum = name.partition("/")
        return _download_archive(archive_name) / forum
    # The user may have mistyped a path: compare its last part with the names.
    hint = closest(Path(name.lower()).name, public_names)
    hint = hint or f"; names are {', '.join(public_names)}"
    raise DataError(
        f"{quoted(name, 200)}: neither a folder nor the name of a public data set{hint}"
    )


def _download_archive(name: str) -> Path:
    """Return the folder of a public set; download and unpack it completely if it is not there."""
    folder = cache_folder("beir", name)
    if folder.is_dir():
        return folder
    url = _URL.format(name=name)
    with atomic_folder(folder) as part:
        archive = part / "archive.zip"
        try:
            with urllib.request.urlopen(url, timeout=60) as response, archive.open("wb") as file:
                shutil.copyfileobj(response, file)
        except OSError as error:  # the errors of urllib are OSErrors too
            raise DataError(
                f"{name}: could not be downloaded from {url}: {error} (try again, or download and "
                "unzip it yourself, and give the folder instead of the name; SciFact comes with "
                f"contaccum: {shipped_scifact()})"
            ) from error
        with archive.open("rb") as file:
            checksum = hashlib.file_digest(file, "md5").hexdigest()
        if checksum != ARCHIVE_MD5[name]:
            raise DataError(
                f"{name}: the file from {url} does not have the MD5 checksum {ARCHIVE_MD5[name]} "
                "(try again)"
            )
        with zipfile.ZipFile(archive) as packed:
            packed.extractall(part)  # never writes outside of `part`, whatever the names in it
        archive.unlink()
        for path in (part / name).iterdir():
            path.rename(part / path.name)
        (part / name).rmdir()
    return folder


def shipped_scifact() -> Path:
    """Return the folder of the SciFact copy that comes with this package."""
    return Path(__file__).parent / "scifact"
