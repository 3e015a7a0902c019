"""The readers against what one would write in their place: `json.loads` in a loop, `csv.DictReader`, dictionaries.

Both read the same made-up files to the same records, in turns. What differs is what a reader adds: it checks every
text, knows the line of every record, and holds one record where the obvious code holds the file. The obvious code
checks nothing. Files lie in the page cache; a disk is not measured.
"""

from __future__ import annotations

import csv
import gzip
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from contaccum.data import Record, read_records
from contaccum.errors import ConfigError

QUERY_WORDS, TITLE_WORDS, PASSAGE_WORDS = 9, 3, 100
CONTEXTS = 7
"""Negatives of a DPR or Tevatron record; every other format has one, BEIR none."""


class Competition(NamedTuple):
    """One format: how its source is written, and the obvious way to read it (`rival` says in words which)."""

    write: Callable[[Path, list[_Texts]], Path]
    read: Callable[[Path], Iterable[Record]]
    rival: str


class _Texts(NamedTuple):
    query: str
    positive: tuple[str, str]
    negatives: list[tuple[str, str]]


@dataclass
class ReaderSettings:
    """What is read, and how often."""

    rows: int = 20_000
    formats: list[str] = field(default_factory=lambda: list(COMPETITIONS))
    repeats: int = 7
    memory: bool = True

    def check(self) -> None:
        """Raise ConfigError for what cannot be measured."""
        for name in self.formats:
            if name not in COMPETITIONS:
                raise ConfigError(f"formats: {name!r} is not one of {', '.join(COMPETITIONS)}")
        if min(self.rows, self.repeats) < 1:
            raise ConfigError("rows and repeats must be at least 1")


def measure_readers(settings: ReaderSettings, progress: Callable[[str], None] = print) -> list[dict[str, Any]]:
    """One record per format.

    A record: ``format``, ``rival``, ``records``, ``file_mb``, ``seconds`` and ``rival_seconds`` (median CPU time of
    this process, so that other work on the machine is not in it), ``ratio`` (median over turns of ours over theirs;
    below 1 the reader is faster), ``ratio_low`` and ``ratio_high``, ``records_per_second``, ``mb_per_second``, and
    ``memory_mb`` and ``rival_memory_mb`` (growth of the peak while reading, each in a process of its own).
    """
    settings.check()
    records = []
    for name in settings.formats:
        with tempfile.TemporaryDirectory(prefix="contaccum-bench-") as folder:
            records.append(_measure(name, Path(folder), settings, progress))
    return records


def _measure(name: str, folder: Path, settings: ReaderSettings, progress: Callable[[str], None]) -> dict[str, Any]:
    competition = COMPETITIONS[name]
    source = competition.write(folder, made_up(settings.rows))
    readers: dict[str, Callable[[Path], Iterable[Record]]] = {"ours": read_records, "theirs": competition.read}
    seconds: dict[str, list[float]] = {who: [] for who in readers}
    for turn in range(settings.repeats + 1):  # the first warms up
        # Who goes first changes, so that neither always finds the other's memory freed.
        for who in ("ours", "theirs") if turn % 2 else ("theirs", "ours"):
            started = time.process_time()
            count = sum(1 for _ in readers[who](source))
            if turn:
                seconds[who].append(time.process_time() - started)
            assert count == settings.rows, f"{name}: {who} read {count} of {settings.rows}"
    ratios = [ours / theirs for ours, theirs in zip(seconds["ours"], seconds["theirs"], strict=True)]
    ours, theirs = statistics.median(seconds["ours"]), statistics.median(seconds["theirs"])
    files = [source] if source.is_file() else [path for path in source.rglob("*") if path.is_file()]
    megabytes = sum(path.stat().st_size for path in files) / 2**20
    memory = {who: _memory(name, source, who) if settings.memory else None for who in readers}
    progress(f"{name}: {ours:.2f} s against {theirs:.2f} s")
    return {
        "format": name,
        "rival": competition.rival,
        "records": settings.rows,
        "file_mb": megabytes,
        "seconds": ours,
        "rival_seconds": theirs,
        "ratio": statistics.median(ratios),
        "ratio_low": min(ratios),
        "ratio_high": max(ratios),
        "records_per_second": settings.rows / ours,
        "mb_per_second": megabytes / ours,
        "memory_mb": memory["ours"],
        "rival_memory_mb": memory["theirs"],
    }


def _memory(name: str, source: Path, who: str) -> float:
    code = "import sys; from contaccum.benchmarks.readers import _memory_job; _memory_job(*sys.argv[1:])"
    answer = subprocess.run(
        [sys.executable, "-c", code, name, str(source), who], capture_output=True, text=True, check=True
    )
    return float(answer.stdout.strip().splitlines()[-1])


def _memory_job(name: str, source: str, who: str) -> None:
    from contaccum.training.memory import peak_memory_mb

    read = read_records if who == "ours" else COMPETITIONS[name].read
    with tempfile.TemporaryDirectory() as folder:
        # What the first call loads (Arrow, datasets) is not the file's.
        for _ in read(COMPETITIONS[name].write(Path(folder), made_up(10))):
            pass
    before = peak_memory_mb()
    for _ in read(Path(source)):
        pass
    print(peak_memory_mb() - before)


def made_up(rows: int) -> list[_Texts]:
    """Texts of made-up words, some of them not ASCII; the same for the same `rows`."""
    draw = random.Random(0)
    words = [f"word{i}" for i in range(3000)] + ["Käse", "naïve", "日本"]

    def text(count: int) -> str:
        return " ".join(draw.choices(words, k=count))

    def passage() -> tuple[str, str]:
        return text(TITLE_WORDS), text(PASSAGE_WORDS)

    # The negatives of one record serve for its neighbours too: drawing words takes longer than reading them.
    pool = [passage() for _ in range(CONTEXTS + 500)]
    return [
        _Texts(f"{text(QUERY_WORDS)} {i}", passage(), [pool[(i + j) % len(pool)] for j in range(CONTEXTS)])
        for i in range(rows)
    ]


def _joined(passage: dict[str, Any]) -> str:
    return str((passage["title"] + " " + passage["text"]).strip())


def _contexts(passages: Iterable[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"docid": str(i), "title": title, "text": text} for i, (title, text) in enumerate(passages)]


def _write_dpr(folder: Path, rows: list[_Texts]) -> Path:
    path = folder / "dpr.json"
    with open(path, "w", encoding="utf-8") as file:
        for i, row in enumerate(rows):
            record = {
                "question": row.query,
                "answers": ["an answer"],
                "positive_ctxs": _contexts([row.positive]),
                "negative_ctxs": [],
                "hard_negative_ctxs": _contexts(row.negatives),
            }
            file.write(("," if i else "[") + "\n" + json.dumps(record, indent=4))
        file.write("\n]\n")
    return path


def _read_dpr(path: Path) -> Iterator[Record]:
    with open(path, encoding="utf-8") as file:
        for record in json.load(file):
            positives = [_joined(passage) for passage in record["positive_ctxs"]]
            yield Record(record["question"], positives, [_joined(p) for p in record["hard_negative_ctxs"]])


def _write_tevatron(folder: Path, rows: list[_Texts]) -> Path:
    path = folder / "tevatron.jsonl"
    with open(path, "w", encoding="utf-8") as file:
        for i, row in enumerate(rows):
            passages = {"positive_passages": _contexts([row.positive]), "negative_passages": _contexts(row.negatives)}
            file.write(json.dumps({"query_id": str(i), "query": row.query, **passages}) + "\n")
    return path


def _read_tevatron(path: Path) -> Iterator[Record]:
    with open(path, encoding="utf-8") as file:
        for record in map(json.loads, file):
            positives = [_joined(passage) for passage in record["positive_passages"]]
            yield Record(record["query"], positives, [_joined(p) for p in record["negative_passages"]])


def _triplet(row: _Texts) -> dict[str, str]:
    return {"query": row.query, "positive": row.positive[1], "negative": row.negatives[0][1]}


def _of_triplet(record: dict[str, str]) -> Record:
    return Record(record["query"], [record["positive"]], [record["negative"]])


def _write_triplets(folder: Path, rows: list[_Texts]) -> Path:
    path = folder / "triplets.jsonl"
    path.write_text("".join(json.dumps(_triplet(row)) + "\n" for row in rows), encoding="utf-8")
    return path


def _read_triplets(path: Path) -> Iterator[Record]:
    with open(path, encoding="utf-8") as file:
        for line in file:
            yield _of_triplet(json.loads(line))


def _write_packed(folder: Path, rows: list[_Texts]) -> Path:
    path = folder / "triplets.jsonl.gz"
    path.write_bytes(gzip.compress(_write_triplets(folder, rows).read_bytes(), compresslevel=6, mtime=0))
    return path


def _read_packed(path: Path) -> Iterator[Record]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for line in file:
            yield _of_triplet(json.loads(line))


def _write_csv(folder: Path, rows: list[_Texts]) -> Path:
    path = folder / "triplets.csv"
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, ["query", "positive", "negative"])
        writer.writeheader()
        writer.writerows(map(_triplet, rows))
    return path


def _read_csv(path: Path) -> Iterator[Record]:
    with open(path, encoding="utf-8", newline="") as file:
        yield from map(_of_triplet, csv.DictReader(file))


def _write_parquet(folder: Path, rows: list[_Texts]) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = folder / "triplets.parquet"
    pq.write_table(pa.Table.from_pylist([_triplet(row) for row in rows]), path, row_group_size=10_000)
    return path


def _read_parquet(path: Path) -> Iterator[Record]:
    import pyarrow.parquet as pq

    return map(_of_triplet, pq.read_table(path).to_pylist())


def _write_saved(folder: Path, rows: list[_Texts]) -> Path:
    from datasets import Dataset, disable_progress_bars

    disable_progress_bars()
    Dataset.from_list([_triplet(row) for row in rows]).save_to_disk(str(folder / "saved"))
    return folder / "saved"


def _read_saved(path: Path) -> Iterator[Record]:
    from datasets import load_from_disk

    dataset: Any = load_from_disk(str(path))
    return map(_of_triplet, dataset)


def _write_beir(folder: Path, rows: list[_Texts]) -> Path:
    (folder / "beir" / "qrels").mkdir(parents=True)
    with (
        open(folder / "beir" / "corpus.jsonl", "w", encoding="utf-8") as corpus,
        open(folder / "beir" / "queries.jsonl", "w", encoding="utf-8") as queries,
        open(folder / "beir" / "qrels" / "train.tsv", "w", encoding="utf-8") as qrels,
    ):
        qrels.write("query-id\tcorpus-id\tscore\n")
        for i, row in enumerate(rows):
            corpus.write(json.dumps({"_id": f"d{i}", "title": row.positive[0], "text": row.positive[1]}) + "\n")
            queries.write(json.dumps({"_id": f"q{i}", "text": row.query}) + "\n")
            qrels.write(f"q{i}\td{i}\t1\n")
    return folder / "beir"


def _read_beir(folder: Path) -> Iterator[Record]:
    with open(folder / "corpus.jsonl", encoding="utf-8") as file:
        corpus = {record["_id"]: _joined(record) for record in map(json.loads, file)}
    with open(folder / "queries.jsonl", encoding="utf-8") as file:
        queries = {record["_id"]: record["text"] for record in map(json.loads, file)}
    positives = defaultdict(list)
    with open(folder / "qrels" / "train.tsv", encoding="utf-8") as file:
        next(file)
        for line in file:
            query_id, document_id, score = line.split("\t")
            if int(score) > 0:
                positives[query_id].append(corpus[document_id])
    for query_id, passages in positives.items():
        yield Record(queries[query_id], passages, [])


def _write_msmarco(folder: Path, rows: list[_Texts]) -> Path:
    """Negatives have passages of their own, so that the collection has two for each query, in random order."""
    target = folder / "msmarco"
    target.mkdir()
    passages = [f"{i}\t{row.positive[1]}\n" for i, row in enumerate(rows)]
    passages += [f"{len(rows) + i}\t{row.negatives[0][1]}\n" for i, row in enumerate(rows)]
    random.Random(1).shuffle(passages)
    (target / "collection.tsv").write_text("".join(passages), encoding="utf-8")
    (target / "queries.train.tsv").write_text(
        "".join(f"{i}\t{row.query}\n" for i, row in enumerate(rows)), encoding="utf-8"
    )
    (target / "qrels.train.tsv").write_text("".join(f"{i}\t0\t{i}\t1\n" for i in range(len(rows))))
    (target / "qidpidtriples.train.full.2.tsv").write_text(
        "".join(f"{i}\t{i}\t{len(rows) + i}\n" for i in range(len(rows)))
    )
    return target


def _read_msmarco(folder: Path) -> Iterator[Record]:
    texts = []
    for name in ("collection.tsv", "queries.train.tsv"):
        with open(folder / name, encoding="utf-8") as file:
            texts.append(dict(line.rstrip("\n").split("\t") for line in file))
    passages, queries = texts
    negatives = defaultdict(list)
    with open(folder / "qidpidtriples.train.full.2.tsv", encoding="utf-8") as file:
        for line in file:
            query_id, _, passage_id = line.split()
            negatives[query_id].append(passages[passage_id])
    with open(folder / "qrels.train.tsv", encoding="utf-8") as file:
        for line in file:
            query_id, _, passage_id, _ = line.split()
            yield Record(queries[query_id], [passages[passage_id]], negatives[query_id])


COMPETITIONS: dict[str, Competition] = {
    "dpr": Competition(_write_dpr, _read_dpr, "json.load"),
    "tevatron": Competition(_write_tevatron, _read_tevatron, "json.loads in a loop"),
    "triplets": Competition(_write_triplets, _read_triplets, "json.loads in a loop"),
    "triplets.gz": Competition(_write_packed, _read_packed, "gzip.open, json.loads in a loop"),
    "csv": Competition(_write_csv, _read_csv, "csv.DictReader"),
    "parquet": Competition(_write_parquet, _read_parquet, "read_table().to_pylist()"),
    "hub": Competition(_write_saved, _read_saved, "a loop over load_from_disk()"),
    "beir": Competition(_write_beir, _read_beir, "json.loads into dictionaries"),
    "msmarco": Competition(_write_msmarco, _read_msmarco, "dictionaries of all texts"),
}
