"""One call for every format: training records and passages of a corpus, one at a time.

The format is told from the content, and the fields of a record by their usual names or by a mapping. How files are
opened and bad records counted, is for `records`; which positives and negatives an epoch trains on, for `sampling`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import starmap
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from contaccum.data import records
from contaccum.data.beir import beir_file, is_beir_folder, read_judged_pairs
from contaccum.data.msmarco import read_msmarco
from contaccum.data.records import (
    Fault,
    RecordReport,
    Rows,
    TextsById,
    first_of,
    passage_text,
    quoted,
    take,
    text_of,
)
from contaccum.errors import ConfigError, DataError, check_choice
from contaccum.files import AnyPath, fingerprint

DataFormat = Literal[
    "beir", "dpr", "nemo", "tevatron", "msmarco", "pairs", "triplets", "csv", "parquet", "hub"
]
DATA_FORMATS: tuple[DataFormat, ...] = get_args(DataFormat)
# A record of these is a query with all its judgements, each of which is a pair; nor have they names of fields.
JUDGED: tuple[DataFormat, ...] = ("beir", "msmarco")

FIELDS = {
    "query": ("query", "anchor", "question", "query_text", "messages", "sentence1"),
    "positive": (
        *("positive", "positives", "positive_passages", "positive_ctxs"),
        *("passage", "answer", "text", "document", "pos"),
        *("pos_doc", "positive_document_ids", "positive_messages", "response", "sentence2"),
    ),
    "negatives": (
        *(
            "negatives",
            "negative",
            "negative_passages",
            "hard_negatives",
            "hard_negative_ctxs",
            "neg",
        ),
        *("neg_doc", "negative_document_ids", "negative_messages", "rejected_response"),
        "negative_ctxs",  # DPR's, of other questions: what its own trainer falls back on
    ),
    "title": ("title",),
    # A teacher's, of all positives and then all negatives; or of each apart, or as the `score` of a passage object.
    "scores": ("scores",),
    "positive_scores": ("positive_scores", "positive_score", "pos_scores"),
    "negative_scores": ("negative_scores", "neg_scores"),
    "score": ("score", "label"),  # of a pair, from `min_score` on a match
}
"""The usual names of fields by role, the first that is there; `negative_1`, `negative_2` ... are known too.

Among them those of FlagEmbedding, of NeMo Automodel (docs/guides/llm/retrieval-dataset.mdx), of Tevatron
(src/tevatron/retriever/dataset.py), of ms-swift (docs/source_en/BestPractices/Embedding.md, `response` before that) and
of sentence-transformers' scored pairs.
"""

_MEND = "contaccum mine --cross_encoder writes some"
_FOLDERS: dict[str, DataFormat] = {"corpus.jsonl": "beir", "collection.tsv": "msmarco"}
_FOLDERS |= {"state.json": "hub", "dataset_dict.json": "hub"}  # of `save_to_disk`
_HUB_NAME = r"([\w.-]+/)?[\w-]+(\.[0-9][\w.-]*)?(:[\w.-]+)?"
_CACHED = 6  # to be raised when the readers or the cache change, so that older files are not taken for new


class Record(NamedTuple):
    """A query and its passages, each title, space, text, in the order of the file."""

    query: str
    positives: list[str]
    negatives: list[str]
    scores: list[float] | None = (
        None  # a teacher's, of positives and then negatives; None unless each has one
    )


def read_records(
    path: AnyPath,
    data_format: DataFormat | None = None,
    split: str = "train",
    columns: Mapping[str, str] | None = None,
    report: RecordReport | None = None,
    num_negatives: int | None = None,
    corpus: AnyPath | None = None,
    min_score: float | None = None,
) -> Iterator[Record]:
    """Yield the records of `path`, each a query with its positives and negatives in the order of the file.

    Args:
        path: a file, plain or gzip (parquet: plain), a folder, or the name of a Hugging Face dataset; see docs/data.md.
        data_format: one of `DATA_FORMATS`; None: told from the content.
        split: of a BEIR or MS MARCO folder, or of a dataset; a file has no splits, and there it does nothing.
        columns: {role: name}, for roles of `FIELDS`; those left out are found by their usual names.
        report: counts go here; None: a new report, which stops at the first bad record.
        num_negatives: the first so many of each query's triples in an MS MARCO folder; None: all.
        corpus: what `read_passages` reads, where records name passages by id.
        min_score: of pairs with a score (or label), those below are left out and counted; None: scores are not read.

    Raises:
        ConfigError: at once: an unknown format, or `columns` that cannot be used.
        DataError: at once where the format cannot be told; while reading, where source or record cannot be used.
    """
    source = Source(
        path, data_format, split, columns, num_negatives, corpus=corpus, min_score=min_score
    )
    return source.records(report or RecordReport())


@dataclass
class Source:
    """A file, folder or data set of a known format; arguments, and what is raised at once, as of `read_records`."""

    path: Any
    data_format: Any = None
    split: str = "train"
    columns: Any = None
    num_negatives: int | None = None
    needs_scores: bool = False  # a record without a teacher's score of each passage cannot be used
    corpus: Any = None
    min_score: float | None = None

    def __post_init__(self) -> None:
        check_choice("data_format", self.data_format, (None, *DATA_FORMATS))
        self.path, self.columns = Path(self.path), parse_columns(self.columns)
        self.data_format = self.data_format or sniff_format(self.path, self.columns)
        given = {
            "data_columns": self.columns,
            "corpus": self.corpus,
            "min_score": self.min_score is not None,
        }
        for name in (name for name, value in given.items() if value and self.data_format in JUDGED):
            raise ConfigError(
                f"{name} is set, but data_format={self.data_format} has no fields: {self.path}"
            )
        if self.needs_scores and self.data_format in JUDGED:
            raise ConfigError(
                f"{self.path}: {self.data_format} data have no teacher scores for distill ({_MEND})"
            )

    def records(self, report: RecordReport) -> Iterator[Record]:
        """Every record that can be used."""
        if self.data_format == "beir":
            yield from starmap(Record, read_judged_pairs(self.path, self.split, report))
        elif self.data_format == "msmarco" and self.path.is_dir():
            yield from starmap(
                Record, read_msmarco(self.path, self.split, self.num_negatives, report)
            )
        elif self.data_format == "msmarco":
            yield from take(self.path, self.rows(), _text_triple, report)
        else:
            corpus = None
            if self.corpus is not None:
                passages = ((one.id, one.passage) for one in read_passages(self.corpus, report))
                corpus = TextsById(self.corpus, passages)
            for record in take(self.path, self.rows(), Fields(self, corpus).read, report):
                if record is None:
                    report.leave_out(self.path, "score below min_score")
                else:
                    yield record

    def rows(self) -> Rows:
        """The rows of a file or data set as they are, whatever they are of."""
        if self.data_format in ("hub", "parquet"):
            return records.arrow_rows(self.path, self._dataset().with_format("arrow").iter(1000))
        readers: dict[str, Any] = {"dpr": records.read_json_array, "csv": records.csv_rows}
        readers |= {
            "nemo": partial(records.read_json_array, where="data.item"),
            "msmarco": records.read_lines,
        }
        return readers.get(self.data_format, records.read_json_lines)(self.path)

    def _dataset(self) -> Any:
        """What `datasets` reads: `NAME` or `NAME:CONFIG` on the hub, a folder of `save_to_disk`, a parquet file."""
        import datasets

        source = str(self.path)
        try:
            if self.data_format == "parquet":
                return datasets.load_dataset(
                    "parquet", data_files=source, split="train", streaming=True
                )
            if not any(
                (self.path / name).exists() for name, found in _FOLDERS.items() if found == "hub"
            ):
                name, _, config = source.partition(":")
                return datasets.load_dataset(name, config or None, split=self.split)
            found = datasets.load_from_disk(source)
            return found[self.split] if isinstance(found, dict) else found
        except Exception as error:  # the hub's, the network's, the builders' and Arrow's own have no common ancestor
            what = "" if self.path.exists() else "no such file or folder, and "
            what += f"as a Hugging Face dataset with split {quoted(self.split)} it cannot be loaded: {str(error)[:300]}"
            raise DataError(records.one_line(f"{source}: {what}")) from error

    def key(self, *about: Any) -> str:
        """Another one when a file's path, size or time changes, or a setting. sha256, in hex."""
        files = [self.path]
        if self.path.is_dir():
            files = sorted(path for path in self.path.rglob("*") if path.is_file())
        elif self.data_format == "hub":
            # What datasets has fetched: other files when it changes on the hub.
            files = [Path(file["filename"]) for file in self._dataset().cache_files]
        facts = [
            (str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns)
            for path in files
            if path.exists()
        ]
        settings = (
            "" if facts else str(self.path),
            self.data_format,
            self.split,
            self.columns,
            self.num_negatives,
        )
        about = (
            *about,
            self.needs_scores,
            self.min_score,
            self.corpus and corpus_source(self.corpus).key(),
        )
        return fingerprint(_CACHED, facts, settings, *about)


def sniff_format(source: AnyPath, columns: Mapping[str, str] | None = None) -> DataFormat:
    """The format of a file, a folder or a dataset of the hub, by its content. "pairs" stands for "triplets" too.

    A table is known by the usual names of its columns, or by those of `columns`. Raises `DataError` for no format.
    """
    path = Path(source)
    if path.is_dir():
        for name, found in _FOLDERS.items():
            if any(path.glob(f"{name}*")):
                return found
        raise DataError(
            records.one_line(
                f"{path}: a folder without any of {', '.join(_FOLDERS)} (see docs/data.md)"
            )
        )
    if not path.exists() and re.fullmatch(_HUB_NAME, str(source)):
        return "hub"
    head = records.first_bytes(path)
    if head.startswith(b"PAR1"):
        return "parquet"
    if head.startswith(b"["):
        return "dpr"
    if re.match(rb'\{\s*"(corpus|data)"\s*:\s*[\[{]', head):
        return "nemo"
    if head.startswith(b"{"):
        return "tevatron" if re.search(b'"positive_(passages|document_ids)"', head) else "pairs"
    _, names = records.read_header(head)
    if {*(columns or {}).values()}.union(*FIELDS.values()).intersection(names):
        return "csv"
    if head.split(b"\n")[0].count(b"\t") == 2:
        return "msmarco"
    if not head:
        raise DataError(records.one_line(f"{path}: is empty"))
    what = (
        f"neither JSON nor a table with a header that is known; it starts with {quoted(head[:20])}"
    )
    raise DataError(records.one_line(f"{path}: {what} (set --data_columns or --data_format)"))


def parse_columns(given: Mapping[str, str] | Sequence[str] | None) -> dict[str, str]:
    """{role: name of the column}, from a mapping, from ``ROLE=NAME`` words or from one word that is a JSON object;
    raises `ConfigError` for a role that `FIELDS` does not have, or words that are neither."""
    words: Any = given or ()
    try:
        if not isinstance(words, Mapping) and len(words) == 1 and words[0].startswith("{"):
            words = json.loads(words[0])
        columns = dict(
            words if isinstance(words, Mapping) else (word.split("=", 1) for word in words)
        )
    except ValueError as error:
        raise ConfigError(
            f"data_columns: neither ROLE=NAME nor a JSON object: {quoted(given)}"
        ) from error
    for role in columns:
        check_choice("data_columns: a role", role, FIELDS)
    return columns


class Fields:
    """Finds the parts of the records of one file by the names of their fields; the first record decides for all.

    Were each record read by itself, one without "positive" would silently pass for one with "text".
    """

    def __init__(self, source: Source, corpus: TextsById | None) -> None:
        self._source, self._corpus = source, corpus
        taken = set(source.columns.values())
        self._names = {
            role: [name for name in names if name not in taken] for role, names in FIELDS.items()
        }
        self._names |= {role: [name] for role, name in source.columns.items()}
        self._chosen: tuple[str, str] | None = None

    def read(self, record: Mapping[str, Any]) -> Record | None:
        """The record of these fields, None where its score is too low; raises `Fault` for what is missing, empty or no
        text."""
        if self._chosen is None:
            self._chosen = self._choose("query", record), self._choose("positive", record)
        query_field, positive_field = self._chosen
        query = _text(record.get(query_field), query_field)
        score, least = first_of(record, self._names["score"]), self._source.min_score
        if (
            least is None and score is not None and query_field in ("sentence1", "messages")
        ):  # where low is no match
            raise Fault(
                "a pair with a score", "say from which on it is a match: {path: ..., min_score: 1}"
            )
        if least is not None and records.number_of(score) < least:
            return None
        title = "".join(records.title_of(record, name) for name in self._names["title"])
        positives = _passages(record.get(positive_field), positive_field, self._corpus, title)
        if not positives:
            raise Fault(f"empty {positive_field}")
        negatives = self._negatives(record)
        scores = self._scores(record, positives, negatives)
        if self._source.needs_scores and scores is None:
            raise Fault(
                "no teacher scores", f"distill needs a number for each of its passages; {_MEND}"
            )
        return Record(
            query, [text for text, _ in positives], [text for text, _ in negatives], scores
        )

    def _choose(self, role: str, record: Mapping[str, Any]) -> str:
        for name in self._names[role]:
            if name in record:
                return name
        fields = quoted(", ".join(record), 200)
        raise Fault(f"missing {role}", f"its fields are {fields}; set --data_columns {role}=NAME")

    def _scores(
        self, record: Mapping[str, Any], *passages: list[tuple[str, Any]]
    ) -> list[float] | None:
        """The teacher's scores of positives and then negatives; None unless each is a finite number."""
        found: list[Any] = []
        for role, listed in zip(("positive_scores", "negative_scores"), passages, strict=True):
            given = first_of(record, self._names[role])
            scores = (
                [score for _, score in listed]
                if given is None
                else given
                if isinstance(given, list)
                else [given]
            )
            found += scores if len(scores) == len(listed) else [None]
        whole = first_of(record, self._names["scores"])
        found = (
            whole if isinstance(whole, list) and len(whole) == sum(map(len, passages)) else found
        )
        try:
            return [records.number_of(score) for score in found]
        except Fault:
            return None

    def _negatives(self, record: Mapping[str, Any]) -> list[tuple[str, Any]]:
        """All numbered ones or, where there are none, those of the first field that has any; null is none."""
        numbered: list[str] = []
        if "negatives" not in self._source.columns:
            numbered = [name for name in record if re.fullmatch("negative_[1-9][0-9]*", name)]
        numbered.sort(key=lambda name: (len(name), name))  # by number, not by place
        for names in (numbered, *([name] for name in self._names["negatives"])):
            there = [name for name in names if record.get(name) is not None]
            if found := [
                one for name in there for one in _passages(record[name], name, self._corpus)
            ]:
                return found
        return []


def _passages(
    value: Any, what: str, corpus: TextsById | None, title: str = ""
) -> list[tuple[str, Any]]:
    """The passages of one field: a text (whose title is `title`), an object {"title", "text"}, messages, with a corpus
    an id or an object {"id"}, or a list of these; each with its "score", None where it has none."""
    if isinstance(value, dict) and isinstance(
        value.get("text"), list
    ):  # how Arrow keeps some lists
        value = value["text"]
    found = []
    for one in value if isinstance(value, list) else [value]:
        about = one if isinstance(one, dict) else {}
        named = about.get("id") if about.get("text") is None else None
        if named is None and (corpus or what.endswith("_ids")) and isinstance(one, (str, int)):
            named = one
        if named is not None and corpus is None:
            raise Fault(
                "ids where texts are expected", "name what has the texts: {path: ..., corpus: ...}"
            )
        if named is not None and corpus is not None:
            text = corpus[corpus.place(named)]
        elif about:
            text = passage_text(records.title_of(about), text_of(about.get("text"), f"{what} text"))
        else:
            text = passage_text(title, _text(one, what))
        found.append((text, about.get("score")))
    return found


def _text(value: Any, what: str) -> str:
    """A text, or that of messages: their contents, with a space between, as ms-swift puts a system's and a user's."""
    if isinstance(value, list) and value and all(isinstance(one, dict) for one in value):
        return " ".join(text_of(message.get("content"), f"{what} content") for message in value)
    return text_of(value, what)


def _text_triple(line: str) -> Record:
    cells = records.cells_of(line, 3)
    if all(cell.strip().isdecimal() for cell in cells):
        raise Fault(
            "ids where texts are expected", "name the folder that holds it beside collection.tsv"
        )
    query, positive, negative = (text_of(*pair) for pair in zip(cells, FIELDS, strict=False))
    return Record(query, [positive.strip()], [negative.strip()])


_IDS, _TEXTS = (
    ("_id", "id", "docid", "doc_id", "pid", "passage_id"),
    ("text", "passage", "contents"),
)


class Passage(NamedTuple):
    """A passage and what it is called."""

    id: str
    title: str  # empty where there is none, or where the data came as one text
    text: str

    @property
    def passage(self) -> str:
        """Title, space, text: what is encoded, and what training reads."""
        return passage_text(self.title, self.text)


def read_passages(path: AnyPath, report: RecordReport) -> Iterator[Passage]:
    """Every passage of a corpus, in its order; each record is counted in ``report``. An id may occur twice.

    `path` is a BEIR folder, or a file, plain or gzip: jsonl (`_id`, `id` or `docid`, `title`, `text`), a table with a
    header of these (DPR's), or lines of `id<TAB>text` (MS MARCO's, no quoting); or parquet or a Hugging Face dataset
    with these columns. Raises `DataError`.
    """
    source = corpus_source(path)
    return take(source.path, source.rows(), _passage, report)


def corpus_source(path: AnyPath) -> Source:
    """What the rows of a corpus are read from; lines of `id<TAB>text` are of the format `msmarco`."""
    path = Path(path)
    if is_beir_folder(path):
        path = beir_file(path, "corpus.jsonl")
    if path.is_dir() or (not path.exists() and re.fullmatch(_HUB_NAME, str(path))):
        return Source(path, "hub")
    start = records.first_bytes(path)
    if start.startswith((b"PAR1", b"{")):
        return Source(path, "parquet" if start.startswith(b"PAR1") else "pairs")
    return Source(path, "csv" if _has_header(path, start) else "msmarco")


def _has_header(path: Path, start: bytes) -> bool:
    """Return whether the first line of a table of passages names its columns.

    MS MARCO's layout, `id<TAB>text`, has no header, and its first text may be "text": a line that
    begins with a number is a passage, and the first line of `collection.tsv` is a header only where
    it names ids and texts. Elsewhere the name of a text column is enough, so that a table without
    ids is refused and its header is not taken for a passage.
    """
    if re.match(rb"[0-9]+\t", start):
        return False
    names = {*records.read_header(start)[1]}
    if path.name.startswith("collection.tsv") and names.isdisjoint(_IDS):
        return False
    return not names.isdisjoint(_TEXTS)


def _passage(record: str | Mapping[str, Any]) -> Passage:
    if isinstance(record, str):
        record = dict(zip(("id", "text"), records.cells_of(record, 2), strict=True))
    text = text_of(first_of(record, _TEXTS), "text", may_be_blank=True)
    identifier = first_of(record, _IDS)
    if identifier is None:
        fields = quoted(", ".join(record), 200)
        raise Fault("missing id", f"its fields are {fields}; ids are in one of {', '.join(_IDS)}")
    passage = Passage(records.identifier_of(identifier, "id"), records.title_of(record), text)
    if not passage.passage:
        raise Fault("empty passage", quoted(passage.id))
    return passage
