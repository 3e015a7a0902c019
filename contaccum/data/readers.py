"""Training records and corpus passages of every format, read one at a time by one call.

The formats and their detection are in `formats`, field names and values in `fields`, the counting
of bad records in `records`. Which positives and negatives an epoch trains on is decided in
`sampling`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

from contaccum.data.beir import find_beir_file, is_beir_folder, read_judged_pairs
from contaccum.data.fields import TEACHER_SCORES_REMEDY, Record, RecordParser, parse_columns
from contaccum.data.formats import (
    DATA_FORMATS,
    JUDGED_FORMATS,
    DataFormat,
    is_hub_name,
    is_saved_dataset,
    sniff_format,
)
from contaccum.data.msmarco import read_msmarco
from contaccum.data.records import (
    Fault,
    RecordReport,
    Rows,
    get_first_value,
    one_line,
    parse_id,
    parse_rows,
    parse_text,
    parse_title,
    passage_text,
    quoted,
    read_head,
    read_json_array,
    read_json_lines,
    read_lines,
    split_cells,
)
from contaccum.data.tables import parse_header, read_arrow, read_csv
from contaccum.data.text_lookup import TextLookup
from contaccum.errors import ConfigError, DataError, check_choice
from contaccum.files import AnyPath, fingerprint

_CACHE_VERSION = 6
"""Version of the readers and the cache. Increase it when either changes, so that cached records of
an older version are not used."""

_PASSAGE_ID_FIELDS = ("_id", "id", "docid", "doc_id", "pid", "passage_id")
_PASSAGE_TEXT_FIELDS = ("text", "passage", "contents")


class Passage(NamedTuple):
    """A passage of a corpus.

    Attributes:
        id: its id.
        title: its title; empty if it has none, or if title and text are one text in the data.
        text: its text.
    """

    id: str
    title: str
    text: str

    @property
    def passage(self) -> str:
        """Title, space, text: the text that is encoded and trained on."""
        return passage_text(self.title, self.text)


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
    """Yield training records: queries with their positives and negatives, in the file's order.

    Args:
        path: a file, plain or gzip (parquet: plain), a folder, or the name of a Hugging Face
            dataset; see docs/data.md.
        data_format: one of `DATA_FORMATS`; None: detected from the content.
        split: split of a BEIR or MS MARCO folder, or of a Hugging Face dataset; ignored for a file.
        columns: {role: column name} for roles of `FIELDS`; other roles have their usual names.
        report: receives the counts; None: a new report, which stops at the first bad record.
        num_negatives: number of triples per query to read from an MS MARCO folder; None: all.
        corpus: a corpus for `read_passages`, whose passages the records name by id.
        min_score: least score (or label) of a pair; pairs below it are left out and counted.
            None: scores of pairs are not read.

    Raises:
        ConfigError: at once, for an unknown format, or settings that the format does not have.
        DataError: at once, if the format cannot be detected; during reading, for a source or a
            record that cannot be used.
    """
    source = Source(
        path, data_format, split, columns, num_negatives, corpus=corpus, min_score=min_score
    )
    return source.records(report or RecordReport())


class Source:
    """A file, folder or dataset of training records, whose format is known.

    Args:
        path, data_format, split, columns, num_negatives, corpus, min_score: see `read_records`.
        needs_scores: True if a record without a teacher score for each passage cannot be used.

    Raises:
        ConfigError: for an unknown format, or settings that the format does not have.
        DataError: if the format cannot be detected.
    """

    def __init__(
        self,
        path: AnyPath,
        data_format: str | None = None,
        split: str = "train",
        columns: Mapping[str, str] | Sequence[str] | None = None,
        num_negatives: int | None = None,
        needs_scores: bool = False,
        corpus: AnyPath | None = None,
        min_score: float | None = None,
    ) -> None:
        check_choice("data_format", data_format, (None, *DATA_FORMATS))
        self.path = Path(path)
        self.columns = parse_columns(columns)
        if data_format:
            self.data_format = cast(DataFormat, data_format)
        else:
            self.data_format = sniff_format(self.path, self.columns)
        self.split = split
        self.num_negatives = num_negatives
        self.needs_scores = needs_scores
        self.corpus = corpus
        self.min_score = min_score
        if self.data_format in JUDGED_FORMATS:
            self._refuse_field_settings()

    def _refuse_field_settings(self) -> None:
        """Raise `ConfigError` for settings of fields, which judged formats do not have."""
        is_set = {
            "data_columns": bool(self.columns),
            "corpus": bool(self.corpus),
            "min_score": self.min_score is not None,
        }
        for name in is_set:
            if is_set[name]:
                raise ConfigError(
                    f"{name} is set, but data_format={self.data_format} has no fields: {self.path}"
                )
        if self.needs_scores:
            raise ConfigError(
                f"{self.path}: {self.data_format} data have no teacher scores for distill "
                f"({TEACHER_SCORES_REMEDY})"
            )

    def records(self, report: RecordReport) -> Iterator[Record]:
        """Yield every record that can be used, and count the others in the report."""
        if self.data_format == "beir":
            for query, positives in read_judged_pairs(self.path, self.split, report):
                yield Record(query, positives, [])
        elif self.data_format == "msmarco" and self.path.is_dir():
            for query_texts in read_msmarco(self.path, self.split, self.num_negatives, report):
                yield Record(*query_texts)
        elif self.data_format == "msmarco":
            yield from parse_rows(self.path, self.rows(), _parse_text_triple, report)
        else:
            corpus = None
            if self.corpus is not None:
                passages = read_passages(self.corpus, report)
                texts = ((passage.id, passage.passage) for passage in passages)
                corpus = TextLookup(self.corpus, texts)
            parser = RecordParser(self.columns, corpus, self.min_score, self.needs_scores)
            for record in parse_rows(self.path, self.rows(), parser.parse, report):
                if record is None:
                    report.leave_out(self.path, "score below min_score")
                else:
                    yield record

    def rows(self) -> Rows:
        """Return the unparsed rows of a file or dataset: mappings, or lines of a table of ids."""
        if self.data_format in ("hub", "parquet"):
            tables = self._load_dataset().with_format("arrow").iter(1000)
            return read_arrow(self.path, tables)
        if self.data_format == "dpr":
            return read_json_array(self.path)
        if self.data_format == "nemo":
            return read_json_array(self.path, "data.item")
        if self.data_format == "csv":
            return read_csv(self.path)
        if self.data_format == "msmarco":
            return read_lines(self.path)
        return read_json_lines(self.path)

    def _load_dataset(self) -> Any:
        """Load with `datasets`: a parquet file, a folder of `save_to_disk`, or a hub's dataset.

        The name of a hub's dataset is `NAME` or `NAME:CONFIG`.
        """
        import datasets

        source = str(self.path)
        try:
            if self.data_format == "parquet":
                return datasets.load_dataset(
                    "parquet", data_files=source, split="train", streaming=True
                )
            if not is_saved_dataset(self.path):
                name, _, config = source.partition(":")
                return datasets.load_dataset(name, config or None, split=self.split)
            saved = datasets.load_from_disk(source)
            return saved[self.split] if isinstance(saved, dict) else saved
        except Exception as error:  # the hub, the network and Arrow have no common exception class
            message = (
                f"as a Hugging Face dataset with split {quoted(self.split)} it cannot be loaded: "
                f"{str(error)[:300]}"
            )
            if not self.path.exists():
                message = f"no such file or folder, and {message}"
            raise DataError(one_line(f"{source}: {message}")) from error

    def key(self, *settings: Any) -> str:
        """Return a sha256, in hex, of all that decides about the records.

        It changes with the path, size or modification time of a file, and with every setting.

        Args:
            settings: further values that decide about the records.
        """
        files = [self.path]
        if self.path.is_dir():
            files = sorted(path for path in self.path.rglob("*") if path.is_file())
        elif self.data_format == "hub":
            # These are the files that `datasets` has downloaded. They change with the dataset.
            files = [Path(file["filename"]) for file in self._load_dataset().cache_files]
        file_states = []
        for file in files:
            if file.exists():
                state = file.stat()
                file_states.append((str(file.resolve()), state.st_size, state.st_mtime_ns))
        return fingerprint(
            _CACHE_VERSION,
            file_states,
            (
                "" if file_states else str(self.path),
                self.data_format,
                self.split,
                self.columns,
                self.num_negatives,
            ),
            *settings,
            self.needs_scores,
            self.min_score,
            None if self.corpus is None else _make_corpus_source(self.corpus).key(),
        )


def _parse_text_triple(line: str) -> Record:
    """Parse a line of texts: query, positive, negative."""
    cells = split_cells(line, 3)
    if all(cell.strip().isdecimal() for cell in cells):
        raise Fault(
            "ids where texts are expected", "name the folder that holds it beside collection.tsv"
        )
    query = parse_text(cells[0], "query")
    positive = parse_text(cells[1], "positive")
    negative = parse_text(cells[2], "negatives")
    return Record(query, [positive.strip()], [negative.strip()])


def read_passages(path: AnyPath, report: RecordReport) -> Iterator[Passage]:
    """Yield every passage of a corpus, in its order. An id may occur twice.

    Args:
        path: a BEIR folder; a file, plain or gzip: jsonl (`_id`, `id` or `docid`, `title`, `text`),
            a table with a header of these names (DPR's), or lines of `id<TAB>text` (MS MARCO's,
            without quoting); a parquet file or a Hugging Face dataset with these columns.
        report: receives the counts of records.

    Raises:
        DataError: for a corpus that cannot be read, or a bad record under "stop".
    """
    source = _make_corpus_source(path)
    return parse_rows(source.path, source.rows(), _parse_passage, report)


def _make_corpus_source(path: AnyPath) -> Source:
    """Return the source of a corpus; lines of `id<TAB>text` have the format "msmarco"."""
    path = Path(path)
    if is_beir_folder(path):
        path = find_beir_file(path, "corpus.jsonl")
    if path.is_dir() or is_hub_name(path):
        return Source(path, "hub")
    head = read_head(path)
    if head.startswith(b"PAR1"):
        return Source(path, "parquet")
    if head.startswith(b"{"):
        return Source(path, "pairs")
    return Source(path, "csv" if _has_header(path, head) else "msmarco")


def _has_header(path: Path, head: bytes) -> bool:
    """Return whether the first line of a table of passages names its columns.

    MS MARCO's layout, `id<TAB>text`, has no header, and its first text may be "text": a line that
    begins with a number is a passage, and the first line of `collection.tsv` is a header only where
    it names ids and texts. Elsewhere the name of a text column is enough, so that a table without
    ids is refused and its header is not taken for a passage.
    """
    if re.match(rb"[0-9]+\t", head):
        return False
    names = set(parse_header(head).names)
    if path.name.startswith("collection.tsv") and names.isdisjoint(_PASSAGE_ID_FIELDS):
        return False
    return not names.isdisjoint(_PASSAGE_TEXT_FIELDS)


def _parse_passage(row: str | Mapping[str, Any]) -> Passage:
    if isinstance(row, str):
        passage_id, text = split_cells(row, 2)
        row = {"id": passage_id, "text": text}
    text = parse_text(get_first_value(row, _PASSAGE_TEXT_FIELDS), "text", may_be_blank=True)
    identifier = get_first_value(row, _PASSAGE_ID_FIELDS)
    if identifier is None:
        fields = quoted(", ".join(row), 200)
        expected = ", ".join(_PASSAGE_ID_FIELDS)
        raise Fault("missing id", f"its fields are {fields}; ids are in one of {expected}")
    passage = Passage(parse_id(identifier, "id"), parse_title(row), text)
    if not passage.passage:
        raise Fault("empty passage", quoted(passage.id))
    return passage
