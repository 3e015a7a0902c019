"""BEIR data: a folder as plain dictionaries, checked record by record, and the public sets by name.

It reads what BEIR's own loader reads and gives the same dictionaries, but names the file and line of whatever it cannot
use. A name is fetched once, checked against the checksum that BEIR publishes, and unpacked into the cache. Nothing is
encoded here.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from contaccum.data import records
from contaccum.data.records import (
    Fault,
    OnBadRecord,
    RecordReport,
    one_line,
    passage_text,
    quoted,
    text_of,
)
from contaccum.errors import DataError, UserError, closest
from contaccum.files import AnyPath, Fingerprint, atomic_folder, cache_folder, read_json, write_text

_HEADERS = ("query-id\t", "query_id\t", "queryid\t", "qid\t")


@dataclass(frozen=True)
class BeirDataset:
    """One split of a BEIR folder, by its folder's name."""

    name: str
    corpus: dict[str, dict[str, str]]  # {document id: {"title", "text"}}, in the order of the file
    queries: dict[
        str, str
    ]  # {query id: text}, only those that the split judges, in the order of the judgements
    qrels: dict[str, dict[str, int]]  # {query id: {document id: score}}
    split: str
    fingerprint: (
        str  # sha256, in hex, of corpus, queries and qrels; packing and line ends do not change it
    )
    path: Path
    report: RecordReport = field(repr=False, compare=False)


def load_beir_folder(
    path: AnyPath,
    split: str = "test",
    on_bad_record: OnBadRecord = "stop",
    report: RecordReport | None = None,
) -> BeirDataset:
    """Read one split of a BEIR folder, `qrels/SPLIT.tsv`, whose header may be missing.

    An integer `_id` becomes its decimal string. Published sets hold documents without title and text, and are scored
    with them; so they are kept. Counts go to `report`, if given, whose own `on_bad_record` then holds.

    Raises:
        DataError: a file or the split is missing, nothing usable is left, or a bad record under "stop".
    """
    folder = Path(path)
    report = RecordReport(on_bad_record) if report is None else report
    files = (
        beir_file(folder, "corpus.jsonl"),
        beir_file(folder, "queries.jsonl"),
        split_file(folder, split),
    )
    corpus, asked = _by_id(files[0], report, may_be_blank=True), _by_id(files[1], report)
    qrels = _read_qrels(files[2], report, asked, corpus)
    queries = {query_id: asked[query_id]["text"] for query_id in qrels}
    content = Fingerprint()
    for document_id, document in corpus.items():
        content.add("d", document_id, document["title"], document["text"])
    for query_id, judged in qrels.items():
        content.add("q", query_id, queries[query_id])
        for document_id, score in judged.items():
            content.add("j", document_id, str(score))
    # resolve(), so that "." has a name too.
    return BeirDataset(
        folder.resolve().name, corpus, queries, qrels, split, content.hex(), folder, report
    )


def read_judged_pairs(
    folder: Path, split: str, report: RecordReport
) -> Iterator[tuple[str, list[str], list[str]]]:
    """(query, positives, no negatives) for each query that a split judges above 0; empty documents are reported."""
    data = load_beir_folder(folder, split, report=report)
    for query_id, judged in data.qrels.items():
        passages = [
            passage_text(**data.corpus[document]) for document, score in judged.items() if score > 0
        ]
        report.leave_out(folder, "empty document", passages.count(""))
        if any(passages):
            yield data.queries[query_id], [passage for passage in passages if passage], []


def is_beir_folder(path: AnyPath) -> bool:
    """Whether `path` is a directory with a corpus in it."""
    return any(
        os.path.isfile(os.path.join(path, name)) for name in ("corpus.jsonl", "corpus.jsonl.gz")
    )


def beir_file(folder: Path, name: str) -> Path:
    """The path of file `name` in the folder, plain or .gz; raises `DataError` where neither is there."""
    for candidate in (folder / name, folder / f"{name}.gz"):
        if candidate.exists():
            return candidate
    what = f"{folder / name}: no such file" if folder.is_dir() else f"{folder}: no such folder"
    raise DataError(one_line(f"{what} (see docs/data.md)"))


def split_file(folder: Path, split: str) -> Path:
    """The path of the qrels of a split; raises `DataError` where there is none, naming the splits there are."""
    found = {
        path.name.split(".tsv")[0]: path
        for path in sorted(folder.glob("qrels/*.tsv*"), reverse=True)
    }
    if split not in found:
        there = ", ".join(sorted(found)) or "none"
        raise DataError(one_line(f"{folder / 'qrels'}: no split {quoted(split)}; it has: {there}"))
    return found[split]


def _by_id(
    path: Path, report: RecordReport, may_be_blank: bool = False
) -> dict[str, dict[str, str]]:
    """{_id: title and text} of a file of JSON lines; an id that occurs again is a bad record."""
    found: dict[str, dict[str, str]] = {}

    def one(record: dict[str, Any]) -> tuple[str, dict[str, str]]:
        identifier = records.identifier_of(record.get("_id"), "_id")
        if identifier in found:
            raise Fault("duplicate _id", quoted(identifier))
        text = text_of(record.get("text"), "text", may_be_blank)
        return identifier, {"title": records.title_of(record), "text": text}

    for identifier, texts in records.take(path, records.read_json_lines(path), one, report):
        found[identifier] = texts
    return found


def _read_qrels(
    path: Path, report: RecordReport, queries: dict[str, Any], corpus: dict[str, Any]
) -> dict[str, dict[str, int]]:
    qrels: dict[str, dict[str, int]] = {}

    def judgement(line: str) -> tuple[str, str, int]:
        query_id, document_id, score = records.cells_of(line, 3)
        if query_id not in queries:
            raise Fault("unknown query", quoted(query_id))
        if document_id not in corpus:
            raise Fault("unknown document", quoted(document_id))
        if document_id in qrels.get(query_id, {}):
            raise Fault(
                "duplicate judgement", f"query {quoted(query_id)}, document {quoted(document_id)}"
            )
        return query_id, document_id, score_of(score)

    # BEIR drops the first line whatever it is, and with it the first judgement of a file without a header.
    rows = (
        row
        for row in records.read_lines(path)
        if row[0] > 1 or not str(row[1]).lower().startswith(_HEADERS)
    )
    for query_id, document_id, score in records.take(path, rows, judgement, report):
        qrels.setdefault(query_id, {})[document_id] = score
    return qrels


def score_of(text: str) -> int:
    """The score of a judgement; raises `Fault`."""
    try:
        return int(text)
    except ValueError:
        raise Fault("score is not an integer", f"found {quoted(text)}") from None


_URL = "https://public.ukp.informatik.tu-darmstadt.de/thakur/BEIR/datasets/{name}.zip"

# BEIR's public sets: of each archive the column "md5" of the table in the README of github.com/beir-cellar/beir, where
# four more have none, as their owners ask for a licence; and the twelve sets that CQADupStack is the mean of.
_PUBLIC = read_json(Path(__file__).parent / "beir.json")
ARCHIVE_MD5, CQADUPSTACK_FORUMS = _PUBLIC["md5"], _PUBLIC["cqadupstack"]
PUBLIC_NAMES = tuple(ARCHIVE_MD5)


_IR = "ir_datasets:"


def set_name(given: str) -> str:
    """What tables call the set that a folder or a name stands for."""
    return (
        given[len(_IR) :].replace("/", "-")
        if given.startswith(_IR)
        else os.path.basename(os.path.abspath(given))
    )


def default_split(name_or_path: AnyPath) -> str:
    """The split that published scores are of: "dev" of MS MARCO, whose test split has 43 queries, "test" elsewhere.

    An id of ir_datasets names its split: its last part.
    """
    if str(name_or_path).startswith(_IR):
        return str(name_or_path).removeprefix(_IR).rpartition("/")[2]
    return "dev" if set_name(os.fspath(name_or_path)) == "msmarco" else "test"


def shipped_scifact() -> Path:
    """The folder of the SciFact copy that comes with this package."""
    return Path(__file__).parent / "scifact"


def resolve_beir_data(name_or_path: AnyPath, split: str = "test") -> Path:
    """The folder that `name_or_path` is, or that holds the public set of that name, which is fetched if need be.

    `cqadupstack/FORUM` names one of the twelve parts of CQADupStack, `ORG/NAME` one on the hub with parts corpus,
    queries and qrels, `ir_datasets:ID` one of that library. A folder is preferred to a set of its name.

    Raises:
        DataError: neither a folder nor a known name, a set that could not be fetched, or a folder without corpus,
            queries or that split.
    """
    folder = Path(name_or_path).expanduser()
    if not os.path.exists(folder):  # which refuses no name
        folder = _set_called(str(name_or_path), split)
    for part in ("corpus.jsonl", "queries.jsonl"):
        beir_file(folder, part)
    split_file(folder, split)
    return folder


def _set_called(given: str, split: str) -> Path:
    """The folder in the cache of the set of a name."""
    names = [name for name in PUBLIC_NAMES if name != "cqadupstack"]
    names += [f"cqadupstack/{forum}" for forum in CQADUPSTACK_FORUMS]
    if given in names:
        return _fetched(*given.split("/"))
    if given.startswith(_IR):
        what = f"{given}: not a set of ir_datasets (pip install 'contaccum[ir_datasets]')"
        return _taken_over(given, default_split(given), _ir_set, what)
    # The last part of a mistyped path is what a name would have been.
    hint = closest(Path(given.lower()).name, names) or f"; names are {', '.join(names)}"
    what = one_line(
        f"{quoted(given, 200)}: neither a folder nor the name of a public data set{hint}"
    )
    if re.fullmatch(r"\w[\w.-]*/[\w.-]+", given):
        return _taken_over(given, split, _hub_set, f"{what}; nor a set on the hub")
    raise DataError(what)


def _taken_over(
    given: str, split: str, read: Callable[[str, str], tuple[Iterator[Any], ...]], what: str
) -> Path:
    """A split of a set that another library has, as a BEIR folder in the cache; or `DataError`, which says ``what``."""
    folder = cache_folder("sets", re.sub("[:/]", "-", given), split, set_name(given))
    if folder.is_dir():
        return folder
    try:
        corpus, queries, qrels = read(given, split)
        with atomic_folder(folder) as part:
            (part / "qrels").mkdir()
            for name, rows in (("corpus", corpus), ("queries", queries)):
                write_text(part / f"{name}.jsonl", (json.dumps(row) + "\n" for row in rows))
            write_text(
                part / "qrels" / f"{split}.tsv", ("\t".join(map(str, row)) + "\n" for row in qrels)
            )
    except UserError:
        raise
    except (
        Exception
    ) as error:  # the hub's, the network's and the libraries' own have no common ancestor
        raise DataError(one_line(f"{what}: {str(error)[:300]}")) from error
    return folder


def _hub_set(name: str, split: str) -> tuple[Iterator[Any], ...]:
    """Documents, queries, judgements: parts corpus, queries and qrels (or default, or of BeIR all of NAME-qrels)."""
    import datasets
    from huggingface_hub import HfApi

    HfApi().dataset_info(
        name, timeout=5
    )  # datasets asks for half a minute where there is no network
    parts = datasets.get_dataset_config_names(name)

    def texts(part: str) -> Iterator[dict[str, Any]]:
        splits = datasets.load_dataset(name, part)
        for row in splits[split if split in splits else min(splits)]:
            yield {
                "_id": row.get("_id", row.get("id")),
                "title": row.get("title"),
                "text": row["text"],
            }

    where = next(
        ((name, part) for part in ("qrels", "default") if part in parts), (f"{name}-qrels",)
    )
    judged = datasets.load_dataset(*where, split=split)
    qrels = ((row["query-id"], row["corpus-id"], int(row.get("score", 1))) for row in judged)
    return texts("corpus"), texts("queries"), qrels


def _ir_set(given: str, split: str) -> tuple[Iterator[Any], ...]:
    import ir_datasets

    found = ir_datasets.load(given.removeprefix(_IR))

    def parted(
        doc: Any,
    ) -> dict[str, str]:  # of the formats that have no title, the library knows what the text is
        titled = hasattr(doc, "title") and hasattr(doc, "text")
        return {"title": doc.title, "text": doc.text} if titled else {"text": doc.default_text()}

    corpus = ({"_id": doc.doc_id, **parted(doc)} for doc in found.docs_iter())
    queries = (
        {"_id": query.query_id, "text": query.default_text()} for query in found.queries_iter()
    )
    return corpus, queries, ((x.query_id, x.doc_id, x.relevance) for x in found.qrels_iter())


def _fetched(name: str, forum: str = "") -> Path:
    """The folder of a public set, downloaded and unpacked at first: then all of it is there, or nothing."""
    folder = cache_folder("beir", name)
    if folder.is_dir():
        return folder / forum
    url, found = _URL.format(name=name), hashlib.md5(usedforsecurity=False)
    with atomic_folder(folder) as part:
        archive = part / "archive.zip"
        try:
            with urllib.request.urlopen(url, timeout=60) as response, archive.open("wb") as file:
                while block := response.read(1 << 20):
                    found.update(block)
                    file.write(block)
        except OSError as error:  # urllib's are OSErrors too
            instead = (
                f"unzip it yourself and name the folder; SciFact comes along: {shipped_scifact()}"
            )
            raise DataError(
                one_line(f"{name}: could not be downloaded from {url}: {error} ({instead})")
            ) from error
        if found.hexdigest() != ARCHIVE_MD5[name]:
            raise DataError(
                f"{name}: what came from {url} has not the MD5 checksum {ARCHIVE_MD5[name]} (try again)"
            )
        with zipfile.ZipFile(archive) as packed:
            packed.extractall(part)  # which never leaves the folder, whatever the names in it
        archive.unlink()
        for path in (part / name).iterdir():
            path.rename(part / path.name)
        (part / name).rmdir()
    return folder / forum
