"""BEIR data: a folder as plain dictionaries, checked record by record, and the public sets by name.

It reads what BEIR's own loader reads and gives the same dictionaries, but names the file and line of whatever it cannot
use. A name is fetched once, checked against the checksum that BEIR publishes, and unpacked into the cache. Nothing is
encoded here.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from contaccum.data.records import (
    Fault,
    OnBadRecord,
    RecordReport,
    filled_text_of,
    identifier_of,
    one_line,
    passage_text,
    quoted,
    read_json_lines,
    read_lines,
    take,
    text_of,
)
from contaccum.errors import DataError, closest
from contaccum.files import AnyPath, Fingerprint, atomic_folder, cache_folder

SCORE = re.compile(r"[+-]?[0-9]{1,9}")  # nine digits fit every integer type that a metric may use
_HEADER_STARTS = {"query-id", "query_id", "queryid", "qid", "query"}
_LAYOUT = "a BEIR folder holds corpus.jsonl, queries.jsonl and qrels/SPLIT.tsv, each plain or .gz"

T = TypeVar("T")


@dataclass(frozen=True)
class BeirDataset:
    """One split of a BEIR folder.

    Attributes:
        name: the folder's name.
        corpus: {document id: {"title", "text"}}, in the order of the file.
        queries: {query id: text}, only those that the split judges, in the order of the judgements.
        qrels: {query id: {document id: score}}.
        split: the name of the split.
        fingerprint: sha256, in hex, of all of the above but the names; compression, line ends and a byte-order mark do
            not change it.
        path: the folder.
        report: what became of every record of the three files.
    """

    name: str
    corpus: dict[str, dict[str, str]]
    queries: dict[str, str]
    qrels: dict[str, dict[str, int]]
    split: str
    fingerprint: str
    path: Path
    report: RecordReport = field(repr=False, compare=False)


def load_beir_folder(
    path: AnyPath,
    split: str = "test",
    on_bad_record: OnBadRecord = "stop",
    report: RecordReport | None = None,
    allow_empty_documents: bool = True,
) -> BeirDataset:
    """Read one split of a BEIR folder.

    Where a file is there both plain and as .gz, the plain one is read. An integer `_id` becomes its decimal string,
    which is how the qrels name it. The header of the qrels may be missing.

    Args:
        path: the folder.
        split: the qrels file to read, `qrels/SPLIT.tsv`.
        on_bad_record: "stop" or "skip". Leaving judgements out changes nDCG and recall.
        report: counts go here instead of into a new report; its own `on_bad_record` then holds.
        allow_empty_documents: published sets hold documents without title and text, and are scored with them; so
            evaluation keeps them. False, for training: they are bad records.

    Raises:
        DataError: a file or the split is missing, nothing usable is left, or a bad record under "stop".
    """
    folder = Path(path)
    report = RecordReport(on_bad_record) if report is None else report
    corpus_file, queries_file = beir_file(folder, "corpus.jsonl"), beir_file(folder, "queries.jsonl")
    qrels_file = split_file(folder, split)
    corpus = read_corpus(corpus_file, report, allow_empty_documents)
    asked = _by_id(queries_file, lambda record: filled_text_of(record.get("text"), "text"), report, "queries")
    qrels = _read_qrels(qrels_file, report, asked, corpus)
    queries = {query_id: asked[query_id] for query_id in qrels}
    content = Fingerprint()
    for document_id, document in corpus.items():
        content.add("d", document_id, document["title"], document["text"])
    for query_id, judged in qrels.items():
        content.add("q", query_id, queries[query_id])
        for document_id, score in judged.items():
            content.add("j", document_id, str(score))
    # resolve(), so that "." has a name too.
    return BeirDataset(folder.resolve().name, corpus, queries, qrels, split, content.hex(), folder, report)


def read_judged_pairs(folder: Path, split: str, report: RecordReport) -> Iterator[tuple[str, list[str]]]:
    """(query, positives) for each query that a split judges above 0. The corpus is held in memory."""
    data = load_beir_folder(folder, split, report=report, allow_empty_documents=False)
    for query_id, judged in data.qrels.items():
        positives = [passage_text(**data.corpus[document]) for document, score in judged.items() if score > 0]
        if positives:
            yield data.queries[query_id], positives


def read_corpus(path: Path, report: RecordReport, allow_empty: bool) -> dict[str, dict[str, str]]:
    """{document id: {"title", "text"}} of a corpus.jsonl, plain or gzip; see `load_beir_folder`.

    Raises:
        DataError: the file cannot be used, a bad record under "stop", or no document is left.
    """

    def document(record: dict[str, Any]) -> dict[str, str]:
        text = text_of(record.get("text"), "text")
        title = "" if record.get("title") is None else text_of(record["title"], "title")
        if not (allow_empty or passage_text(title, text)):
            raise Fault("empty document", quoted(record["_id"]))
        return {"title": title, "text": text}

    return _by_id(path, document, report, "documents")


def is_beir_folder(path: AnyPath) -> bool:
    """Whether `path` is a directory with a corpus in it."""
    return any(os.path.isfile(os.path.join(path, name)) for name in ("corpus.jsonl", "corpus.jsonl.gz"))


def beir_file(folder: Path, name: str) -> Path:
    """The path of file `name` in the folder, plain or .gz.

    Raises:
        DataError: the folder or the file is missing; the message tells which.
    """
    for candidate in (folder / name, folder / f"{name}.gz"):
        if candidate.exists():
            return candidate
    what = "no such file" if folder.is_dir() else "no such folder"
    what = "is a file, a folder is expected" if folder.is_file() else what
    raise DataError(one_line(f"{folder / name if folder.is_dir() else folder}: {what} ({_LAYOUT})"))


def split_file(folder: Path, split: str) -> Path:
    """The path of the qrels of a split; raises `DataError` where there is none, naming the splits there are."""
    try:
        return beir_file(folder, f"qrels/{split}.tsv")
    except DataError:
        names = sorted({path.name.split(".tsv")[0] for path in folder.glob("qrels/*.tsv*")})
        there = f"it has: {', '.join(names)}" if names else "it has none"
        raise DataError(one_line(f"{folder / 'qrels'}: no split {quoted(split)}; {there} ({_LAYOUT})")) from None


def judged_queries(folder: Path, split: str) -> set[str]:
    """Ids of the queries that a split judges; whether the judgements can be used is for `load_beir_folder` to say.

    Raises:
        DataError: no such folder or split, or nothing in it.
    """
    path = split_file(folder, split)
    found = {line.split("\t")[0] for _, line in _without_header(read_lines(path)) if isinstance(line, str)}
    if not found:
        raise DataError(one_line(f"{path}: judges no query (get it again)"))
    return found


def _by_id(path: Path, parse: Callable[[dict[str, Any]], T], report: RecordReport, what: str) -> dict[str, T]:
    """{_id: parsed record} of a file of JSON lines; an id that occurs again is a bad record."""
    found: dict[str, T] = {}

    def one(record: dict[str, Any]) -> tuple[str, T]:
        identifier = identifier_of(record.get("_id"), "_id")
        if identifier in found:
            raise Fault("duplicate _id", quoted(identifier), "keep one record for each _id")
        return identifier, parse(record)

    for _, (identifier, value) in take(path, read_json_lines(path), one, report):
        found[identifier] = value
    report.refuse_if_nothing_left(path, len(found), what)
    return found


def _without_header(lines: Iterator[tuple[int, Any]]) -> Iterator[tuple[int, Any]]:
    # Only a line that starts like one: BEIR drops the first line whatever it is, and with it the first judgement of a
    # file without a header.
    first = next(lines, None)
    if first is not None:
        cells = str(first[1]).split("\t")
        if cells[0].lower() not in _HEADER_STARTS or SCORE.fullmatch(cells[-1]):
            yield first
    yield from lines


def _read_qrels(
    path: Path, report: RecordReport, queries: dict[str, str], corpus: dict[str, dict[str, str]]
) -> dict[str, dict[str, int]]:
    qrels: dict[str, dict[str, int]] = {}

    def judgement(line: str) -> tuple[str, str, int]:
        cells = line.split("\t")
        if len(cells) != 3:
            mend = "write query-id, corpus-id and score, separated by tabs"
            raise Fault("not three columns", f"found {len(cells)}", mend)
        query_id, document_id, score = cells
        if not SCORE.fullmatch(score.strip()):
            raise Fault("score is not an integer", f"found {quoted(score)}")
        if query_id not in queries:
            raise Fault("unknown query", quoted(query_id), "add it to queries.jsonl")
        if document_id not in corpus:
            raise Fault("unknown document", quoted(document_id), "add it to corpus.jsonl")
        if document_id in qrels.get(query_id, {}):
            pair = f"query {quoted(query_id)}, document {quoted(document_id)}"
            raise Fault("duplicate judgement", pair, "keep one line for each query and document")
        return query_id, document_id, int(score)

    for _, (query_id, document_id, score) in take(path, _without_header(read_lines(path)), judgement, report):
        qrels.setdefault(query_id, {})[document_id] = score
    report.refuse_if_nothing_left(path, len(qrels), "judgements")
    return qrels


# Public sets by name --------------------------------------------------------------------------------------------------

_URL = "https://public.ukp.informatik.tu-darmstadt.de/thakur/BEIR/datasets/{name}.zip"

# The column "md5" of the table of data sets in the README of github.com/beir-cellar/beir. None: their owners ask for a
# registration or a licence, so BEIR publishes no archive.
ARCHIVE_MD5 = {
    "msmarco": "444067daf65d982533ea17ebd59501e4",
    "trec-covid": "ce62140cb23feb9becf6270d0d1fe6d1",
    "nfcorpus": "a89dba18a62ef92f7d323ec890a0d38d",
    "bioasq": None,
    "nq": "d4d3d2e48787a744b6f6e691ff534307",
    "hotpotqa": "f412724f78b0d91183a0e86805e16114",
    "fiqa": "17918ed23cd04fb15047f73e6c3bd9d9",
    "signal1m": None,
    "trec-news": None,
    "robust04": None,
    "arguana": "8ad3e3c2a5867cdced806d6503f29b99",
    "webis-touche2020": "46f650ba5a527fc69e0a6521c5a23563",
    "cqadupstack": "4e41456d7df8ee7760a7f866133bda78",
    "quora": "18fb154900ba42a600f84b839c173167",
    "dbpedia-entity": "c2a39eb420a3164af735795df012ac2c",
    "scidocs": "38121350fc3a4d2f48850f6aff52e4a9",
    "fever": "5a818580227bfb4b35bb6fa46d9b6c03",
    "climate-fever": "8b66f0a9126c521bae2bde127b4dc99d",
    "scifact": "5f7d1de60b170fc8027bb7898e2efca1",
}
BEIR_NAMES = tuple(ARCHIVE_MD5)
NOT_PUBLIC = tuple(name for name, md5 in ARCHIVE_MD5.items() if md5 is None)
PUBLIC_NAMES = tuple(name for name, md5 in ARCHIVE_MD5.items() if md5 is not None)

# CQADupStack is the mean over twelve sets, each a BEIR folder of its own in one archive.
CQADUPSTACK_FORUMS = (
    *("android", "english", "gaming", "gis", "mathematica", "physics"),
    *("programmers", "stats", "tex", "unix", "webmasters", "wordpress"),
)


def default_split(name_or_path: AnyPath) -> str:
    """The split that published scores are of: "dev" of MS MARCO, whose test split has 43 queries, "test" elsewhere."""
    return "dev" if os.path.basename(os.path.abspath(name_or_path)) == "msmarco" else "test"


def shipped_scifact() -> Path:
    """The folder of the SciFact copy that comes with this package."""
    return Path(__file__).parent / "scifact"


def resolve_beir_data(name_or_path: AnyPath, split: str = "test") -> Path:
    """The BEIR folder that `name_or_path` stands for.

    A folder that exists is used as it is, even when it is called like a public set. Otherwise the name of a public set
    is looked up in the cache, and fetched if it is not there; `cqadupstack/FORUM` names one of the twelve parts of
    CQADupStack. That the folder has the split is checked before anything is loaded.

    Raises:
        DataError: neither a folder nor a known name, a set that is not public or could not be fetched, or a folder
            without corpus, queries or that split.
    """
    folder = Path(name_or_path).expanduser()
    if not os.path.exists(folder):  # which refuses no name
        name, _, forum = str(name_or_path).partition("/")
        _refuse_unknown(str(name_or_path), name, forum)
        folder = cache_folder("beir", name)
        if not folder.is_dir():
            _fetch(name, folder)
        folder = folder / forum
    beir_file(folder, "corpus.jsonl")
    beir_file(folder, "queries.jsonl")
    split_file(folder, split)
    return folder


def _refuse_unknown(given: str, name: str, forum: str) -> None:
    if name == "cqadupstack":
        if forum not in CQADUPSTACK_FORUMS:
            choices = ", ".join(f"cqadupstack/{name}" for name in CQADUPSTACK_FORUMS)
            raise DataError(one_line(f"{given}: CQADupStack is twelve data sets (name one: {choices})"))
    elif name in NOT_PUBLIC and not forum:
        mend = "get it from its owner as BEIR's documentation tells, bring it into BEIR's layout, and pass --data PATH"
        raise DataError(f"{name}: not public, so it cannot be downloaded ({mend})")
    elif name not in PUBLIC_NAMES or forum:
        # The last part of a mistyped path is what a name would have been.
        hint = closest(Path(given.lower()).name, BEIR_NAMES) or f"; names are {', '.join(BEIR_NAMES)}"
        raise DataError(one_line(f"{quoted(given, 200)}: neither a folder nor the name of a BEIR data set{hint}"))


def _fetch(name: str, folder: Path) -> None:
    """Download and unpack a public set to `folder`: afterwards all of it is there, or nothing."""
    url, instead = _URL.format(name=name), "unzip it somewhere yourself and pass --data PATH"
    if name == "scifact":
        instead += f", or use the copy that comes with this package: --data {shipped_scifact()}"
    with atomic_folder(folder) as part:
        archive, content = part / f"{name}.zip", hashlib.md5(usedforsecurity=False)
        try:
            with urllib.request.urlopen(url, timeout=60) as response, archive.open("wb") as file:
                while block := response.read(1 << 20):
                    content.update(block)
                    file.write(block)
        except OSError as error:  # urllib's are OSErrors too
            reason = f"{type(error).__name__}: {error}"[:200]
            raise DataError(one_line(f"{name}: could not be downloaded from {url}: {reason} ({instead})")) from error
        if content.hexdigest() != ARCHIVE_MD5[name]:
            what = f"MD5 checksum {content.hexdigest()} is not that of BEIR's archive, {ARCHIVE_MD5[name]}"
            raise DataError(one_line(f"{name}: of what came from {url} the {what} (try again later, or {instead})"))
        with zipfile.ZipFile(archive) as packed:
            packed.extractall(part)  # which never leaves the folder, whatever names the archive holds
        archive.unlink()
        for path in (part / name).iterdir():
            path.rename(part / path.name)
        shutil.rmtree(part / name)
