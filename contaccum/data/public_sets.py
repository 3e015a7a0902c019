"""Public BEIR sets by name: downloaded, or converted from the hub or ir_datasets, into the cache.

A public BEIR set is downloaded once, and its checksum is compared with the one that BEIR publishes.
The result is a BEIR folder, which `contaccum.data.beir` reads.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import urllib.request
import zipfile
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from contaccum.data.beir import QRELS_HEADER, find_beir_file, find_qrels_file, shipped_scifact
from contaccum.data.records import one_line, quoted
from contaccum.errors import DataError, UserError, closest
from contaccum.files import AnyPath, atomic_folder, cache_folder, read_json, write_text

_URL = "https://public.ukp.informatik.tu-darmstadt.de/thakur/BEIR/datasets/{name}.zip"

# The checksums are the column "md5" of the table in the README of github.com/beir-cellar/beir. Four
# more sets of that table have none, because their owners require a licence.
_PUBLIC_SETS = read_json(Path(__file__).parent / "beir.json")
ARCHIVE_MD5: dict[str, str] = _PUBLIC_SETS["md5"]
PUBLIC_NAMES = tuple(ARCHIVE_MD5)
CQADUPSTACK_FORUMS: list[str] = _PUBLIC_SETS["cqadupstack"]
"""The twelve sets whose mean score is the score of CQADupStack."""

_IR_DATASETS_PREFIX = "ir_datasets:"
_HUB_TIMEOUT = 5  # seconds; `datasets` itself waits half a minute without a network


def get_set_name(name_or_path: str) -> str:
    """Return the name of a set in tables, from its public name or its folder."""
    if name_or_path.startswith(_IR_DATASETS_PREFIX):
        return name_or_path.removeprefix(_IR_DATASETS_PREFIX).replace("/", "-")
    return os.path.basename(os.path.abspath(name_or_path))


def get_default_split(name_or_path: AnyPath) -> str:
    """Return the split of a set that published scores are measured on.

    It is "test", except for MS MARCO: its test split has only 43 queries, so scores are published
    on "dev". The id of a set of ir_datasets ends with its split.
    """
    if str(name_or_path).startswith(_IR_DATASETS_PREFIX):
        dataset_id = str(name_or_path).removeprefix(_IR_DATASETS_PREFIX)
        return dataset_id.rpartition("/")[2]
    return "dev" if get_set_name(os.fspath(name_or_path)) == "msmarco" else "test"


def resolve_beir_data(name_or_path: AnyPath, split: str = "test") -> Path:
    """Return the folder of a BEIR set; a public set is downloaded if it is not in the cache.

    Args:
        name_or_path: a folder; the name of a public BEIR set; `cqadupstack/FORUM` for one of the
            twelve parts of CQADupStack; `ORG/NAME` for a set on the hub with parts corpus, queries
            and qrels; or `ir_datasets:ID`. If a folder and a set have the same name, the folder is
            used.
        split: the split that the set must have.

    Raises:
        DataError: if it is neither a folder nor a known name, the download fails, or the folder
            lacks the corpus, the queries or the split.
    """
    folder = Path(name_or_path).expanduser()
    # Path.exists() raises an error for very long names, os.path.exists() does not.
    if not os.path.exists(folder):
        folder = _resolve_public_set(str(name_or_path), split)
    for file_name in ("corpus.jsonl", "queries.jsonl"):
        find_beir_file(folder, file_name)
    find_qrels_file(folder, split)
    return folder


def _resolve_public_set(name: str, split: str) -> Path:
    """Return the folder in the cache that holds a public set."""
    public_names = [public_name for public_name in PUBLIC_NAMES if public_name != "cqadupstack"]
    public_names += [f"cqadupstack/{forum}" for forum in CQADUPSTACK_FORUMS]
    if name in public_names:
        archive_name, _, forum = name.partition("/")
        return _download_archive(archive_name) / forum
    if name.startswith(_IR_DATASETS_PREFIX):
        only_split = get_default_split(name)
        if split != only_split:  # before the conversion, which can take long
            raise DataError(f"{name}: its id names the split {only_split!r}, and not {split!r}")
        error = f"{name}: not a set of ir_datasets (pip install 'contaccum[ir_datasets]')"
        return _convert_set(name, only_split, error)
    # The user may have mistyped a path: compare its last part with the names.
    hint = closest(Path(name.lower()).name, public_names)
    if not hint:
        hint = f"; names are {', '.join(public_names)}"
    error = one_line(
        f"{quoted(name, 200)}: neither a folder nor the name of a public data set{hint}"
    )
    if re.fullmatch(r"\w[\w.-]*/[\w.-]+", name):
        return _convert_set(name, split, f"{error}; on the hub, it cannot be loaded either")
    raise DataError(error)


class _SetContent(NamedTuple):
    """The content of a set in another library's form."""

    corpus: Iterable[dict[str, Any]]  # with "_id", "title" (optional), "text"
    queries: Iterable[dict[str, Any]]  # with "_id", "text"
    qrels: Iterable[tuple[Any, ...]]  # query id, document id, grade


def _convert_set(name: str, split: str, error_message: str) -> Path:
    """Write a split of a set of the hub or of ir_datasets to a BEIR folder in the cache.

    Raises:
        DataError: with `error_message` and the cause, if the set cannot be read.
    """
    folder = cache_folder("sets", re.sub("[:/]", "-", name), split, get_set_name(name))
    if folder.is_dir():
        return folder
    try:
        if name.startswith(_IR_DATASETS_PREFIX):
            content = _open_ir_datasets_set(name)
        else:
            content = _open_hub_set(name, split)
        with atomic_folder(folder) as part:
            (part / "qrels").mkdir()
            _write_json_lines(part / "corpus.jsonl", content.corpus)
            _write_json_lines(part / "queries.jsonl", content.queries)
            qrels_lines = ("\t".join(map(str, row)) + "\n" for row in content.qrels)
            # BEIR's own loader drops the first line.
            write_text(part / "qrels" / f"{split}.tsv", chain([QRELS_HEADER], qrels_lines))
    except UserError:
        raise
    except Exception as error:  # the libraries and the network have no common exception class
        raise DataError(one_line(f"{error_message}: {str(error)[:300]}")) from error
    return folder


def _write_json_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    write_text(path, (json.dumps(row) + "\n" for row in rows))


def _open_hub_set(name: str, split: str) -> _SetContent:
    """Open a set with the configurations "corpus", "queries" and "qrels" on the hub.

    The judgements may instead be in the configuration "default", or, as in BEIR's own sets, in a
    set NAME-qrels.
    """
    import datasets
    from huggingface_hub import HfApi

    HfApi().dataset_info(name, timeout=_HUB_TIMEOUT)
    configurations = datasets.get_dataset_config_names(name)

    def read_texts(configuration: str) -> Iterator[dict[str, Any]]:
        splits = datasets.load_dataset(name, configuration)
        text_split = split if split in splits else min(splits)
        for row in splits[text_split]:
            text_id = row.get("_id", row.get("id"))
            yield {"_id": text_id, "title": row.get("title"), "text": row["text"]}

    if "qrels" in configurations:
        judgements = datasets.load_dataset(name, "qrels", split=split)
    elif "default" in configurations:
        judgements = datasets.load_dataset(name, "default", split=split)
    else:
        judgements = datasets.load_dataset(f"{name}-qrels", split=split)
    qrels = (
        (judgement["query-id"], judgement["corpus-id"], int(judgement.get("score", 1)))
        for judgement in judgements
    )
    return _SetContent(read_texts("corpus"), read_texts("queries"), qrels)


def _open_ir_datasets_set(name: str) -> _SetContent:
    import ir_datasets

    dataset = ir_datasets.load(name.removeprefix(_IR_DATASETS_PREFIX))

    def read_corpus() -> Iterator[dict[str, str]]:
        for document in dataset.docs_iter():
            if hasattr(document, "title") and hasattr(document, "text"):
                yield {"_id": document.doc_id, "title": document.title, "text": document.text}
            else:
                # A format without a title: default_text() joins the fields that make up the text.
                yield {"_id": document.doc_id, "text": document.default_text()}

    queries = (
        {"_id": query.query_id, "text": query.default_text()} for query in dataset.queries_iter()
    )
    qrels = (
        (judgement.query_id, judgement.doc_id, judgement.relevance)
        for judgement in dataset.qrels_iter()
    )
    return _SetContent(read_corpus(), queries, qrels)


def _download_archive(name: str) -> Path:
    """Return the folder of a public set; download and unpack it completely if it is not there."""
    folder = cache_folder("beir", name)
    if folder.is_dir():
        return folder
    url = _URL.format(name=name)
    checksum = hashlib.md5(usedforsecurity=False)
    with atomic_folder(folder) as part:
        archive = part / "archive.zip"
        try:
            with urllib.request.urlopen(url, timeout=60) as response, archive.open("wb") as file:
                while block := response.read(1 << 20):
                    checksum.update(block)
                    file.write(block)
        except OSError as error:  # the errors of urllib are OSErrors too
            remedy = (
                "try again, or download and unzip it yourself, and give the folder instead of the "
                "name; "
                f"SciFact comes with contaccum: {shipped_scifact()}"
            )
            raise DataError(
                one_line(f"{name}: could not be downloaded from {url}: {error} ({remedy})")
            ) from error
        if checksum.hexdigest() != ARCHIVE_MD5[name]:
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
