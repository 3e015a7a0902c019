"""Hold out dev and test sets from a file of training pairs, by a hash of the passage.

    python eval/study/split_pairs.py PAIRS OUT

Where passages occur more than once, splitting by question would put the same passage into training and test. Here a
hash of the passage's text decides, so that every run and machine agrees. Of a BEIR folder, which has its test set, the
split `train` is parted by document into `train` and `dev`; corpus and queries stay whole.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
from pathlib import Path

from contaccum.data import load_beir_folder, load_training_data
from contaccum.data.beir import is_beir_folder
from contaccum.errors import DataError, UserError
from contaccum.files import atomic_folder

Pair = tuple[str, str, str]  # hash of the passage, query, passage


def split_pairs(source: str, output: str, dev: float, test: float) -> dict[str, int]:
    """Write ``output/train.jsonl`` and the BEIR folders ``output/dev`` and ``output/test``; returns counts.

    Passages are ordered by a hash of their text: the last share (``dev``) is the dev set, the one before it (``test``)
    the test set. A corpus is its set's own passages; equal passages are one document. A training pair whose query is
    also asked in a held-out set is left out, and so is a test query that dev asks.

    Raises:
        DataError: for unreadable input, or a part that comes out empty.
    """
    dataset = load_training_data(source, on_bad_record="skip", positives="first").dataset
    parts: dict[str, list[Pair]] = {"train": [], "dev": [], "test": []}
    for row in dataset:
        digest = hashlib.sha256(row["positive"].encode()).hexdigest()
        place = _place(row["positive"])
        part = "dev" if place >= 1 - dev else "test" if place >= 1 - dev - test else "train"
        parts[part].append((digest, row["query"], row["positive"]))
    pairs_before = len(parts["train"]) + len(parts["test"])
    asked = {query for _, query, _ in parts["dev"]}
    parts["test"] = [pair for pair in parts["test"] if pair[1] not in asked]
    asked |= {query for _, query, _ in parts["test"]}
    parts["train"] = [pair for pair in parts["train"] if pair[1] not in asked]
    for name, pairs in parts.items():
        if not pairs:
            raise DataError(f"{source}: its {name} part is empty; give it a larger share")

    with atomic_folder(output) as folder:
        lines = (
            json.dumps({"query": query, "positive": passage}) + "\n"
            for _, query, passage in parts["train"]
        )
        (folder / "train.jsonl").write_text("".join(lines), encoding="utf-8")
        held_out = {name: _write_beir(parts[name], folder / name) for name in ("dev", "test")}
    left_out = pairs_before - len(parts["train"]) - len(parts["test"])
    return {"train": len(parts["train"]), **held_out, "left_out": left_out}


def write_whole_corpus(split: str, output: str) -> None:
    """Write the parts of a split as one BEIR folder, in which all passages are one corpus.

    Args:
        split: the folder that `split_pairs` wrote.
        output: a new folder, with the splits train, dev and test.
    """
    source = Path(split)
    documents: dict[str, str] = {}
    queries: dict[str, str] = {}
    with atomic_folder(output) as folder:
        (folder / "qrels").mkdir()
        for part in ("train", "dev", "test"):
            lines = ["query-id\tcorpus-id\tscore"]
            for query, passage in _pairs_of_part(source, part):
                document = hashlib.sha256(passage.encode()).hexdigest()[:16]
                documents[document] = passage
                name = queries.setdefault(query, f"q{len(queries)}")
                lines.append(f"{name}\t{document}\t1")
            (folder / "qrels" / f"{part}.tsv").write_text("\n".join([*lines, ""]), encoding="utf-8")
        corpus = [{"_id": name, "title": "", "text": text} for name, text in documents.items()]
        asked = [{"_id": name, "text": text} for text, name in queries.items()]
        for name, records in (("corpus.jsonl", corpus), ("queries.jsonl", asked)):
            text = "".join(json.dumps(record) + "\n" for record in records)
            (folder / name).write_text(text, encoding="utf-8")


def _pairs_of_part(source: Path, part: str) -> list[tuple[str, str]]:
    """Return the queries and passages of a part that `split_pairs` wrote."""
    if part == "train":
        lines = (source / "train.jsonl").read_text(encoding="utf-8").splitlines()
        records = [json.loads(line) for line in lines]
        return [(record["query"], record["positive"]) for record in records]
    dataset = load_beir_folder(source / part, "test")
    pairs = []
    for query, judged in dataset.qrels.items():
        for document in judged:
            pairs.append((dataset.queries[query], dataset.corpus[document]["text"]))
    return pairs


def split_judgements(
    source: str, output: str, dev: float, by_query: bool = False
) -> dict[str, int]:
    """Copy a BEIR folder to ``output``, its split `train` parted by document; returns counts of queries.

    A query with documents in both parts is asked in `dev` alone, whose documents `train` judges no more.

    Args:
        by_query: part it by query: documents may be relevant in both parts, as they may be in
            `train` and `test` of the published set.
    """
    with atomic_folder(output) as folder:
        shutil.copytree(source, folder, dirs_exist_ok=True)
        header, *lines = (folder / "qrels" / "train.tsv").read_text(encoding="utf-8").splitlines()
        judged = [line.split("\t") for line in lines]
        asked = {
            query
            for query, document, _ in judged
            if _place(query if by_query else document) >= 1 - dev
        }
        held_out = set()
        if not by_query:
            held_out = {document for query, document, _ in judged if query in asked}
        parts = {
            "train": [row for row in judged if row[0] not in asked and row[1] not in held_out],
            "dev": [row for row in judged if row[0] in asked],
        }
        for name, rows in parts.items():
            text = "\n".join([header, *("\t".join(row) for row in rows), ""])
            (folder / "qrels" / f"{name}.tsv").write_text(text, encoding="utf-8")
    return {name: len({query for query, *_ in rows}) for name, rows in parts.items()}


def _place(text: str) -> float:
    """Where a hash puts ``text`` between 0 and 1."""
    return int(hashlib.sha256(text.encode()).hexdigest()[:15], 16) / 16**15


def _write_beir(pairs: list[Pair], folder: Path) -> int:
    """A BEIR folder with the split ``test``; returns how many queries it has."""
    (folder / "qrels").mkdir(parents=True)
    documents = {digest[:16]: passage for digest, _, passage in pairs}
    queries = {
        query: f"q{number}"
        for number, query in enumerate(dict.fromkeys(query for _, query, _ in pairs))
    }
    judged = [f"{queries[query]}\t{digest[:16]}\t1" for digest, query, _ in dict.fromkeys(pairs)]
    corpus = [
        json.dumps({"_id": name, "title": "", "text": text}) for name, text in documents.items()
    ]
    asked = [json.dumps({"_id": name, "text": text}) for text, name in queries.items()]
    files = {
        "qrels/test.tsv": ["query-id\tcorpus-id\tscore", *judged],
        "corpus.jsonl": corpus,
        "queries.jsonl": asked,
    }
    for name, lines in files.items():
        (folder / name).write_text("\n".join([*lines, ""]), encoding="utf-8")
    return len(queries)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pairs", help="pairs in any format that `contaccum train` reads")
    parser.add_argument(
        "output",
        help="a new folder: train.jsonl, and dev and test as BEIR folders; or a BEIR folder",
    )
    parser.add_argument("--dev", type=float, default=0.1, help="share of the passages")
    parser.add_argument(
        "--by_query", action="store_true", help="of a BEIR folder: hold out queries, not documents"
    )
    parser.add_argument(
        "--whole_corpus", metavar="FOLDER", help="the same as one BEIR folder, over all passages"
    )
    parser.add_argument("--test", type=float, default=0.1, help="share of the passages")
    options = parser.parse_args()
    try:
        if Path(options.output).exists():
            raise DataError(f"{options.output}: exists already; choose another folder or remove it")
        if is_beir_folder(options.pairs):
            split = split_judgements(options.pairs, options.output, options.dev, options.by_query)
        else:
            split = split_pairs(options.pairs, options.output, options.dev, options.test)
            if options.whole_corpus:
                write_whole_corpus(options.output, options.whole_corpus)
        print(
            f"{options.output}: " + ", ".join(f"{part} {count:,}" for part, count in split.items())
        )
    except UserError as error:
        print(f"split_pairs: error: {error}", file=sys.stderr)
        sys.exit(2)
