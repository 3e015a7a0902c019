"""Split training pairs into train, dev and test sets, by a hash of the passage.

    python eval/study/split_pairs.py PAIRS OUT

If a passage occurs in several pairs, a split by query would put the same passage into the training
and the test set. This program splits by a hash of the passage's text, so that the split is also the
same on every machine. A BEIR folder already has a test set; in this case the program splits its
`train` judgements by document into `train` and `dev`, and copies corpus and queries unchanged.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

from contaccum.data import load_beir_folder, load_training_data
from contaccum.data.beir import is_beir_folder
from contaccum.errors import DataError, UserError
from contaccum.files import atomic_folder


class Pair(NamedTuple):
    """A training pair."""

    digest: str  # SHA-256 of the passage, in hexadecimal
    query: str
    passage: str


def split_pairs(source: str, output: str, dev: float, test: float) -> dict[str, int]:
    """Write ``output/train.jsonl`` and the BEIR folders ``output/dev`` and ``output/test``.

    Passages are ordered by a hash of their text. The last share (``dev``) is the dev set, the share
    (``test``) before it is the test set. The corpus of a set has the passages of this set; equal
    passages are one document. A training pair is left out if its query occurs in dev or test, and a
    test pair is left out if its query occurs in dev.

    Returns:
        Number of training pairs, of dev and test queries, and of pairs that were left out.

    Raises:
        DataError: the input cannot be read, or one of the parts is empty.
    """
    dataset = load_training_data(source, on_bad_record="skip", positives="first").dataset
    parts: dict[str, list[Pair]] = {"train": [], "dev": [], "test": []}
    for row in dataset:
        passage = row["positive"]
        digest = hashlib.sha256(passage.encode()).hexdigest()
        position = hash_to_unit_interval(passage)
        if position >= 1 - dev:
            part = "dev"
        elif position >= 1 - dev - test:
            part = "test"
        else:
            part = "train"
        parts[part].append(Pair(digest, row["query"], passage))
    num_pairs_before = len(parts["train"]) + len(parts["test"])
    held_out_queries = {pair.query for pair in parts["dev"]}
    parts["test"] = [pair for pair in parts["test"] if pair.query not in held_out_queries]
    held_out_queries.update(pair.query for pair in parts["test"])
    parts["train"] = [pair for pair in parts["train"] if pair.query not in held_out_queries]
    for name, pairs in parts.items():
        if not pairs:
            raise DataError(f"{source}: its {name} part is empty; give it a larger share")

    with atomic_folder(output) as folder:
        train_rows = [{"query": pair.query, "positive": pair.passage} for pair in parts["train"]]
        write_jsonl(folder / "train.jsonl", train_rows)
        num_dev_queries = write_beir_folder(parts["dev"], folder / "dev")
        num_test_queries = write_beir_folder(parts["test"], folder / "test")
    num_train_pairs = len(parts["train"])
    return {
        "train": num_train_pairs,
        "dev": num_dev_queries,
        "test": num_test_queries,
        "left_out": num_pairs_before - num_train_pairs - len(parts["test"]),
    }


def write_beir_folder(pairs: list[Pair], folder: Path) -> int:
    """Write pairs as a BEIR folder with the split ``test``; return the number of queries."""
    (folder / "qrels").mkdir(parents=True)
    documents: dict[str, str] = {}
    query_ids: dict[str, str] = {}
    qrels_lines = []
    for pair in dict.fromkeys(pairs):  # without duplicates, in the same order
        document_id = pair.digest[:16]
        documents[document_id] = pair.passage
        query_id = query_ids.setdefault(pair.query, f"q{len(query_ids)}")
        qrels_lines.append(f"{query_id}\t{document_id}\t1")
    write_qrels(folder / "qrels" / "test.tsv", qrels_lines)
    write_corpus_and_queries(folder, documents, query_ids)
    return len(query_ids)


def write_whole_corpus(split: str, output: str) -> None:
    """Write all parts of a split as one BEIR folder with one corpus of all passages.

    Args:
        split: the folder that `split_pairs` wrote.
        output: a new folder, with the splits train, dev and test.
    """
    documents: dict[str, str] = {}
    query_ids: dict[str, str] = {}
    with atomic_folder(output) as folder:
        (folder / "qrels").mkdir()
        for part in ("train", "dev", "test"):
            qrels_lines = []
            for query, passage in read_part(Path(split), part):
                document_id = hashlib.sha256(passage.encode()).hexdigest()[:16]
                documents[document_id] = passage
                query_id = query_ids.setdefault(query, f"q{len(query_ids)}")
                qrels_lines.append(f"{query_id}\t{document_id}\t1")
            write_qrels(folder / "qrels" / f"{part}.tsv", qrels_lines)
        write_corpus_and_queries(folder, documents, query_ids)


def read_part(split: Path, part: str) -> list[tuple[str, str]]:
    """Return the queries and passages of a part that `split_pairs` wrote."""
    if part == "train":
        lines = (split / "train.jsonl").read_text(encoding="utf-8").splitlines()
        records = [json.loads(line) for line in lines]
        return [(record["query"], record["positive"]) for record in records]
    dataset = load_beir_folder(split / part, "test")
    pairs = []
    for query_id, grades in dataset.qrels.items():
        for document_id in grades:
            pairs.append((dataset.queries[query_id], dataset.corpus[document_id]["text"]))
    return pairs


def write_qrels(path: Path, lines: list[str]) -> None:
    header = "query-id\tcorpus-id\tscore"
    path.write_text("\n".join([header, *lines, ""]), encoding="utf-8")


def write_corpus_and_queries(
    folder: Path, documents: dict[str, str], query_ids: dict[str, str]
) -> None:
    """Write corpus.jsonl from {document id: text} and queries.jsonl from {text: query id}."""
    corpus_rows = []
    for document_id, text in documents.items():
        corpus_rows.append({"_id": document_id, "title": "", "text": text})
    query_rows = [{"_id": query_id, "text": text} for text, query_id in query_ids.items()]
    write_jsonl(folder / "corpus.jsonl", corpus_rows)
    write_jsonl(folder / "queries.jsonl", query_rows)


def write_jsonl(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def split_judgements(
    source: str, output: str, dev: float, by_query: bool = False
) -> dict[str, int]:
    """Copy a BEIR folder to ``output``, and split its train judgements into train and dev.

    If one document of a query is in the dev part, all judgements of this query go to dev.
    Judgements of dev documents are removed from train.

    Args:
        source: a BEIR folder with the split train.
        output: a new folder.
        dev: share of the documents, or of the queries, that goes to dev.
        by_query: split by query instead of by document. Documents may then be relevant in both
            parts, as in the train and test splits of the published set.

    Returns:
        Number of queries in train and dev.
    """
    with atomic_folder(output) as folder:
        shutil.copytree(source, folder, dirs_exist_ok=True)
        header, *lines = (folder / "qrels" / "train.tsv").read_text(encoding="utf-8").splitlines()
        judgements = [line.split("\t") for line in lines]
        dev_queries = set()
        for query_id, document_id, _ in judgements:
            key = query_id if by_query else document_id
            if hash_to_unit_interval(key) >= 1 - dev:
                dev_queries.add(query_id)
        dev_documents = set()
        if not by_query:
            for query_id, document_id, _ in judgements:
                if query_id in dev_queries:
                    dev_documents.add(document_id)
        parts: dict[str, list[list[str]]] = {"train": [], "dev": []}
        for judgement in judgements:
            query_id, document_id, _ = judgement
            if query_id in dev_queries:
                parts["dev"].append(judgement)
            elif document_id not in dev_documents:
                parts["train"].append(judgement)
        for name, part in parts.items():
            part_lines = ["\t".join(judgement) for judgement in part]
            text = "\n".join([header, *part_lines, ""])
            (folder / "qrels" / f"{name}.tsv").write_text(text, encoding="utf-8")
    num_queries = {}
    for name, part in parts.items():
        num_queries[name] = len({judgement[0] for judgement in part})
    return num_queries


def hash_to_unit_interval(text: str) -> float:
    """Map ``text`` to a number between 0 and 1 by a hash, the same on every machine."""
    return int(hashlib.sha256(text.encode()).hexdigest()[:15], 16) / 16**15


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pairs", help="pairs in any format of `contaccum train`, or a BEIR folder")
    parser.add_argument(
        "output",
        help="a new folder: train.jsonl and the BEIR folders dev and test; for a BEIR folder, a "
        "copy of it with a split dev",
    )
    parser.add_argument(
        "--dev",
        type=float,
        default=0.1,
        help="share of passages (with --by_query: of queries) in dev",
    )
    parser.add_argument(
        "--by_query",
        action="store_true",
        help="for a BEIR folder: hold out queries instead of documents",
    )
    parser.add_argument(
        "--whole_corpus",
        metavar="FOLDER",
        help="also write the split as one BEIR folder whose corpus has all passages",
    )
    parser.add_argument("--test", type=float, default=0.1, help="share of passages in the test set")
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    if Path(options.output).exists():
        raise DataError(f"{options.output}: exists already; choose another folder or remove it")
    if is_beir_folder(options.pairs):
        if options.whole_corpus:
            raise DataError("--whole_corpus: a BEIR folder has its whole corpus; leave it out")
        counts = split_judgements(options.pairs, options.output, options.dev, options.by_query)
    else:
        counts = split_pairs(options.pairs, options.output, options.dev, options.test)
        if options.whole_corpus:
            write_whole_corpus(options.output, options.whole_corpus)
    formatted_counts = ", ".join(f"{part} {count:,}" for part, count in counts.items())
    print(f"{options.output}: {formatted_counts}")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        print(f"split_pairs: error: {error}", file=sys.stderr)
        sys.exit(2)
