"""Small data to train, mine and evaluate on, written to files."""

import json
import shutil
from pathlib import Path
from typing import Any

from sample_texts import sentences

ANIMALS = ("cat", "dog", "bird", "fish")
PLACES = ("tree", "river", "stone", "house", "road", "city")


def write_lines(path: Path, records: list[dict[str, Any]]) -> Path:
    """Write a file of JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
    path.write_text("".join(lines), encoding="utf-8")
    return path


def read_lines(path: Path) -> list[Any]:
    """Read a file of JSON lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def contents(folder: Path) -> dict[str, bytes]:
    """Return {path relative to the folder: bytes} for all files in a folder and its subfolders."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def write_beir(
    folder: Path, documents: dict, queries: dict, qrels: list[tuple], split: str = "train"
) -> Path:
    """Write a BEIR folder.

    Args:
        documents: {document id: (title, text)}.
        queries: {query id: text}.
        qrels: judgements (query id, document id, grade).
        split: name of the file of judgements.
    """
    rows = [
        {"_id": name, "title": title, "text": text} for name, (title, text) in documents.items()
    ]
    write_lines(folder / "corpus.jsonl", rows)
    rows = [{"_id": name, "text": text} for name, text in queries.items()]
    write_lines(folder / "queries.jsonl", rows)
    (folder / "qrels").mkdir()
    write_qrels(folder / "qrels" / f"{split}.tsv", qrels)
    return folder


def write_qrels(path: Path, qrels: list[tuple]) -> None:
    """Write judgements (query id, document id, grade) as a table with a header."""
    lines = [f"{query}\t{document}\t{grade}\n" for query, document, grade in qrels]
    path.write_text("".join(["query-id\tcorpus-id\tscore\n", *lines]))


def write_judged_places(folder: Path, train: bool = False) -> Path:
    """Write a BEIR folder with 24 documents, 6 judged queries and one query without judgements.

    Each judged query has three relevant documents. With ``train``, the split train equals test.
    """
    documents = {}
    qrels = []
    for animal, grade in zip(ANIMALS, (2, 1, 0, 1), strict=True):
        for number, place in enumerate(PLACES):
            document_id = f"{animal}-{place}"
            documents[document_id] = (f"the {animal}", f"one {animal} sits on the {place}")
            qrels.append((f"q{number}", document_id, grade))
    queries = {f"q{number}": f"where is the {place}" for number, place in enumerate(PLACES)}
    queries["unjudged"] = "who"
    write_beir(folder, documents, queries, qrels, "test")
    if train:
        shutil.copy(folder / "qrels" / "test.tsv", folder / "qrels" / "train.tsv")
    return folder


def make_documents(prefix: str, texts: list[str]) -> dict[str, tuple[str, str]]:
    """Return documents without titles, {document id: ("", text)}."""
    return {f"{prefix}{number}": ("", text) for number, text in enumerate(texts)}


def make_queries(prefix: str, texts: list[str]) -> dict[str, str]:
    """Return queries, {query id: text}."""
    return {f"{prefix}{number}": text for number, text in enumerate(texts)}


def write_pairs(path: Path, queries: list[str], positives: list[str]) -> Path:
    """Write training pairs, a query and its positive in each line."""
    pairs = zip(queries, positives, strict=True)
    return write_lines(path, [{"query": query, "positive": positive} for query, positive in pairs])


def write_training_and_beir_data(root: Path, pairs: int) -> None:
    """Write training pairs, pairs.jsonl, and a BEIR folder, beir.

    The BEIR folder has 8 documents and 4 queries with one positive each.
    """
    write_pairs(root / "pairs.jsonl", sentences(pairs, 1), sentences(pairs, 2, 9))
    documents = make_documents("corpus", sentences(8, 3))
    queries = make_queries("queries", sentences(4, 4))
    qrels = [(f"queries{number}", f"corpus{number}", 1) for number in range(len(queries))]
    write_beir(root / "beir", documents, queries, qrels, "test")


def write_pairs_to_mine(path: Path) -> Path:
    """Write 40 pairs of 36 queries. The last 4 pairs have the first 4 queries again."""
    queries = sentences(36, 1)
    return write_pairs(path, [*queries, *queries[:4]], sentences(40, 2, 9))


def write_beir_to_mine(folder: Path) -> Path:
    """Write a BEIR folder with 30 documents and 10 queries with 1 or 2 positives each.

    Queries with an even number have three judgements, with the grades 1, 0 and 2. The others have
    two, with the grades 1 and 0.
    """
    titles_and_texts = zip(sentences(30, 3, 2), sentences(30, 4, 9), strict=True)
    documents = {f"d{number}": document for number, document in enumerate(titles_and_texts)}
    queries = make_queries("q", sentences(10, 5))
    qrels = []
    for number in range(len(queries)):
        grades = (1, 0, 2) if number % 2 == 0 else (1, 0)
        for position, grade in enumerate(grades):
            qrels.append((f"q{number}", f"d{3 * number + position}", grade))
    return write_beir(folder, documents, queries, qrels)
