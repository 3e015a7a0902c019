"""Public BEIR sets by name: downloaded, or converted from the hub, into the cache.

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
from collections.abc import Iterator
from pathlib import Path

from contaccum.data.beir import (
    QRELS_HEADER,
    find_beir_file,
    find_qrels_file,
    is_llama_index_file,
    shipped_scifact,
)
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

_HUB_TIMEOUT = 5  # seconds; `datasets` itself waits half a minute without a network


def get_set_name(name_or_path: str) -> str:
    """Return the name of a set in tables, from its public name or its folder."""
    return os.path.basename(os.path.abspath(name_or_path))


def get_default_split(name_or_path: AnyPath) -> str:
    """Return the split of a set that published scores are measured on.

    It is "test", except for MS MARCO: its test split has only 43 queries, so scores are published
    on "dev".
    """
    return "dev" if get_set_name(os.fspath(name_or_path)) == "msmarco" else "test"


def resolve_beir_data(name_or_path: AnyPath, split: str = "test") -> Path:
    """Return the folder of a BEIR set; a public set is downloaded if it is not in the cache.

    Args:
        name_or_path: a folder, or a file of LlamaIndex, which is returned as it is; the name of a
            public BEIR set; `cqadupstack/FORUM` for one of the twelve parts of CQADupStack; or
            `ORG/NAME` for a set on the hub with parts corpus, queries and qrels. If a folder and a
            set have the same name, the folder is used.
        split: the split that the set must have.

    Raises:
        DataError: if it is neither a folder nor a known name, the download fails, or the folder
            lacks the corpus, the queries or the split.
    """
    folder = Path(name_or_path).expanduser()
    # Path.exists() raises an error for very long names, os.path.exists() does not.
    if not os.path.exists(folder):
        folder = _resolve_public_set(str(name_or_path), split)
    if is_llama_index_file(folder):
        return folder
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
    # The user may have mistyped a path: compare its last part with the names.
    hint = closest(Path(name.lower()).name, public_names)
    if not hint:
        hint = f"; names are {', '.join(public_names)}"
    error = one_line(
        f"{quoted(name, 200)}: neither a folder nor the name of a public data set{hint}"
    )
    if re.fullmatch(r"\w[\w.-]*/[\w.-]+", name):
        return _convert_hub_set(name, split, f"{error}; on the hub, it cannot be loaded either")
    raise DataError(error)


def _convert_hub_set(name: str, split: str, error_message: str) -> Path:
    """Write a split of a set of the hub to a BEIR folder in the cache.

    The set has the configurations "corpus", "queries" and "qrels". The judgements may instead be in
    the configuration "default", or, as in BEIR's own sets, in a set NAME-qrels.

    Raises:
        DataError: with `error_message` and the cause, if the set cannot be read.
    """
    folder = cache_folder("sets", name.replace("/", "-"), split, get_set_name(name))
    if folder.is_dir():
        return folder
    try:
        import datasets
        from huggingface_hub import HfApi

        HfApi().dataset_info(name, timeout=_HUB_TIMEOUT)
        configurations = datasets.get_dataset_config_names(name)

        def make_text_lines(configuration: str) -> Iterator[str]:
            splits = datasets.load_dataset(name, configuration)
            text_split = split if split in splits else min(splits)
            for row in splits[text_split]:
                text_id = row.get("_id", row.get("id"))
                text = {"_id": text_id, "title": row.get("title"), "text": row["text"]}
                yield json.dumps(text) + "\n"

        def make_qrels_lines() -> Iterator[str]:
            yield QRELS_HEADER  # BEIR's own loader drops the first line
            for judgement in judgements:
                grade = int(judgement.get("score", 1))
                yield f"{judgement['query-id']}\t{judgement['corpus-id']}\t{grade}\n"

        if "qrels" in configurations:
            judgements = datasets.load_dataset(name, "qrels", split=split)
        elif "default" in configurations:
            judgements = datasets.load_dataset(name, "default", split=split)
        else:
            judgements = datasets.load_dataset(f"{name}-qrels", split=split)
        with atomic_folder(folder) as part:
            (part / "qrels").mkdir()
            write_text(part / "corpus.jsonl", make_text_lines("corpus"))
            write_text(part / "queries.jsonl", make_text_lines("queries"))
            write_text(part / "qrels" / f"{split}.tsv", make_qrels_lines())
    except UserError:
        raise
    except Exception as error:  # the libraries and the network have no common exception class
        raise DataError(one_line(f"{error_message}: {str(error)[:300]}")) from error
    return folder


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
