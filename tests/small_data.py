"""Small data to train, mine and evaluate on, written to files."""

import json
import shutil
from pathlib import Path
from typing import Any

from sample_texts import sentences

ANIMALS, PLACES = (
    ("cat", "dog", "bird", "fish"),
    ("tree", "river", "stone", "house", "road", "city"),
)


def write_lines(path: Path, records: list[dict[str, Any]]) -> Path:
    """A file of JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records),
        encoding="utf-8",
    )
    return path


def read_lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder, by its name in it."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def write_beir(
    folder: Path, documents: dict, queries: dict, qrels: list[tuple], split: str = "train"
) -> Path:
    """Write a BEIR folder.

    Args:
        documents: {document id: (title, text)}.
        queries: {query id: text}.
        qrels: judgements (query id, document id, grade).
    """
    write_lines(
        folder / "corpus.jsonl",
        [{"_id": i, "title": t, "text": x} for i, (t, x) in documents.items()],
    )
    write_lines(folder / "queries.jsonl", [{"_id": i, "text": text} for i, text in queries.items()])
    (folder / "qrels").mkdir()
    rows = ["query-id\tcorpus-id\tscore", *("\t".join(map(str, row)) for row in qrels)]
    (folder / "qrels" / f"{split}.tsv").write_text("\n".join(rows) + "\n")
    return folder


def write_judged_places(folder: Path, train: bool = False) -> Path:
    """Write a BEIR folder with 24 documents, 6 judged queries and one query without judgements.

    Each judged query has three relevant documents. With ``train``, the split train equals test.
    """
    documents = {
        f"{a}-{p}": (f"the {a}", f"one {a} sits on the {p}") for a in ANIMALS for p in PLACES
    }
    queries = {f"q{number}": f"where is the {place}" for number, place in enumerate(PLACES)} | {
        "unjudged": "who"
    }
    grades = zip(ANIMALS, (2, 1, 0, 1), strict=True)
    qrels = [(f"q{n}", f"{a}-{p}", grade) for a, grade in grades for n, p in enumerate(PLACES)]
    write_beir(folder, documents, queries, qrels, "test")
    if train:
        shutil.copy(folder / "qrels" / "test.tsv", folder / "qrels" / "train.tsv")
    return folder


def write_judged_sentences(folder: Path) -> Path:
    """Write a BEIR folder with 40 documents, 24 training and 8 test queries.

    Each query has one relevant document.
    """
    documents = {f"d{row}": ("", text) for row, text in enumerate(sentences(40, 3, 9))}
    queries = {f"q{row}": text for row, text in enumerate(sentences(32, 4))}
    write_beir(
        folder, documents, queries, [(f"q{row}", f"d{row}", 1) for row in range(24)], "train"
    )
    judged = "".join(f"q{row}\td{row}\t1\n" for row in range(24, 32))
    (folder / "qrels" / "test.tsv").write_text(f"query-id\tcorpus-id\tscore\n{judged}")
    return folder


def write_training_and_beir_data(root: Path, pairs: int) -> None:
    """Write training pairs, pairs.jsonl, and a BEIR folder, beir.

    The BEIR folder has 8 documents and 4 queries with one positive each.
    """
    rows = zip(sentences(pairs, 1), sentences(pairs, 2, 9), strict=True)
    write_lines(root / "pairs.jsonl", [{"query": q, "positive": p} for q, p in rows])
    documents = {f"corpus{i}": ("", text) for i, text in enumerate(sentences(8, 3))}
    queries = {f"queries{i}": text for i, text in enumerate(sentences(4, 4))}
    write_beir(
        root / "beir",
        documents,
        queries,
        [(f"queries{i}", f"corpus{i}", 1) for i in range(4)],
        "test",
    )


def write_pairs_to_mine(path: Path) -> Path:
    """Write 40 pairs of 36 queries. The last 4 pairs have the first 4 queries again."""
    queries = sentences(36, 1)
    rows = zip([*queries, *queries[:4]], sentences(40, 2, 9), strict=True)
    return write_lines(path, [{"query": q, "positive": p} for q, p in rows])


def write_beir_to_mine(folder: Path) -> Path:
    """Write a BEIR folder with 30 documents and 10 queries with 1 or 2 positives each."""
    texts = zip(sentences(30, 3, 2), sentences(30, 4, 9), strict=True)
    queries = {f"q{i}": text for i, text in enumerate(sentences(10, 5))}
    qrels = [
        (f"q{i}", f"d{(3 * i + j) % 30}", (1, 0, 2)[j]) for i in range(10) for j in range(3 - i % 2)
    ]
    return write_beir(folder, {f"d{i}": text for i, text in enumerate(texts)}, queries, qrels)


def write_open_qa(folder: Path) -> list[str]:
    """Write three questions with answers and four passages, and return the paths of both files.

    Two of the passages have a title.
    """
    questions = folder / "test.qa.csv"
    passages = folder / "psgs.tsv"
    questions.write_text(
        "who sat\t['the cat', 'cats']\nwhere was it\t['the mat']\nwhen\t['1947']\n"
    )
    rows = [
        '1\t"one dog sat"\tCats',
        '2\t"the cat said ""hello"""\t',
        "3\ta bird\tthe mat",
        "4\ton the mat\t",
    ]
    passages.write_text("\n".join(["id\ttext\ttitle", *rows]) + "\n")
    return [str(questions), str(passages)]
