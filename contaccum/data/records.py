"""Records of training data and passages of a corpus, and the detection of a file's format.

`RecordSource` makes a `Record` of each row of a file (`contaccum.data.rows`), or reports the
`Fault` of a bad row. `contaccum.data.sampling` decides what an epoch trains on.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import compress
from pathlib import Path
from typing import Any, Literal, NamedTuple

from contaccum.data.beir import find_beir_file, is_beir_folder, list_positives, load_beir_folder
from contaccum.data.rows import (
    PARQUET_MAGIC,
    Fault,
    OnBadRecord,
    RecordReport,
    Rows,
    get_first_value,
    parse_id,
    parse_number,
    parse_rows,
    parse_text,
    passage_text,
    read_arrow,
    read_csv,
    read_head,
    read_json_array,
    read_json_lines,
)
from contaccum.errors import ConfigError, DataError, check_choice, closest, one_line, quoted
from contaccum.files import AnyPath, fingerprint

Columns = Mapping[str, str] | Sequence[str] | None
"""Names of columns by role, as `parse_columns` takes them."""
Option = Literal["data_columns", "corpus_columns"]

SPLIT_RECORD = "split.json"
"""The file that marks a folder of `contaccum split`, and has its counts."""

_HUB_NAME = r"([\w.-]+/)?[\w-]+(\.[0-9][\w.-]*)?(:[\w.-]+)?"

_CACHE_VERSION = 18
"""Version of the readers and the stored records. Increase it when either changes."""

_USUAL_NAMES = {
    "query": "query anchor question query_text sentence1",
    "positive": "positive positives positive_passages positive_ctxs passage answer text document "
    "pos sentence2",
    # DPR's own trainer uses `negative_ctxs`, random negatives, where a record has no hard ones.
    "negatives": "negatives negative negative_passages hard_negatives hard_negative_ctxs neg "
    "negative_ctxs",
    # Title of the positives that are plain texts. A passage object has its own "title".
    "title": "title",
    # Compared without case, blanks and underscores.
    "score": "score label labels relevance relevant is_relevant rel match is_match similarity "
    "is_similar is_positive is_duplicate grade rating",
}
FIELDS = {role: tuple(names.split()) for role, names in _USUAL_NAMES.items()}
"""{role: usual names of the field}, also those of FlagEmbedding, Tevatron and
sentence-transformers. The first one that a record has is used; `negative_1` ... are negatives too.
"""

# Words that files have in place of the labels 1 and 0, after `_fold`.
_WORDS_FOR_NUMBERS = {
    **dict.fromkeys(("true", "yes", "relevant", "positive", "match"), 1),
    **dict.fromkeys(("false", "no", "irrelevant", "notrelevant", "nonrelevant", "negative"), 0),
}
_MIN_SCORE_REMEDY = (
    'set the least score of a match: {"path": ..., "min_score": 1}, or with contaccum fit: '
    "--min_score 1"
)
_LIST = re.compile(r"""\[\]|[\[{]\s*[\[{]?['"].*[\]}]""", re.DOTALL)
"""A list or an object of texts in a cell, as pandas writes it."""

GENERATED_BY = "generated_by"
"""The field with the name of the model that wrote a query."""
_DATA_DESIGNER_FIELDS = ("deduplicated_qa_pairs", "chunks")

CORPUS_FIELDS = {
    "id": ("_id", "id", "docid", "doc_id", "pid", "passage_id"),
    "text": ("text", "passage", "contents"),
    "title": ("title",),
}
"""As `FIELDS`, for the documents of a corpus."""


class Record(NamedTuple):
    """A query and its passages, each a text "title text" and once, in the order of the file."""

    query: str
    positives: list[str]
    negatives: list[str]


class Passage(NamedTuple):
    """A passage of a corpus. Its title is empty if title and text are one text in the data."""

    id: str
    title: str
    text: str

    @property
    def passage(self) -> str:
        """The title, a space and the text in one string, which the model encodes."""
        return passage_text(self.title, self.text)


def sniff_format(source: AnyPath) -> str:
    """Detect the format of a file, a folder, or the name of a dataset on the hub.

    It is "beir", "hub", "parquet", "dpr" (a JSON array), "pairs" (JSON lines), or else "csv".
    """
    path = Path(source)
    if path.is_dir():
        if (path / SPLIT_RECORD).is_file():
            raise DataError(f"{path}: a folder of contaccum split (give {path}/train.jsonl)")
        return "beir" if is_beir_folder(path) else "hub"
    if re.fullmatch(_HUB_NAME, str(path)) and not path.exists():
        return "hub"
    head = read_head(path)
    if not head:
        raise DataError(f"{path}: is empty, or damaged at its start")
    for start, data_format in ((PARQUET_MAGIC, "parquet"), (b"[", "dpr"), (b"{", "pairs")):
        if head.startswith(start):
            return data_format
    return "csv"


def _read_rows(
    path: Path, data_format: str, split: str | None, columns: Mapping[str, str], option: Option
) -> Rows:
    """Yield the unparsed rows of a file or dataset in any format except "beir".

    Raises `DataError` at the end if no row has a column that the option names.
    """
    if data_format in ("hub", "parquet"):
        tables = _load_dataset(path, data_format, split).with_format("arrow").iter(1000)
        rows = read_arrow(path, tables)
    elif data_format == "dpr":
        rows = read_json_array(path)
    elif data_format == "csv":
        rows = read_csv(path)
    else:
        rows = read_json_lines(path)
    fields: dict[str, None] = {}
    for line, row in _expand_data_designer(rows):
        if not isinstance(row, Fault):
            fields.update(dict.fromkeys(row))
        yield line, row
    for role, name in columns.items():
        if name not in fields:
            raise DataError(
                f"{path}: no record has the field {quoted(name)}, only "
                f"{quoted(', '.join(fields), 200)}{closest(name, fields)} (correct {role}={name} "
                f"in {option}, or leave it out; one of several sets can have columns of its own)"
            )


def _expand_data_designer(rows: Rows) -> Rows:
    """Yield a row for each question of the rows of data-designer-retrieval-sdg; others as they are.

    Such a row has chunks, and questions with the numbers of the chunks that answer them.
    """
    for line, row in rows:
        if isinstance(row, Fault) or not all(name in row for name in _DATA_DESIGNER_FIELDS):
            yield line, row
            continue
        questions, chunks = (row[name] for name in _DATA_DESIGNER_FIELDS)
        try:
            texts = {chunk["chunk_id"]: chunk["text"] for chunk in chunks}
            found = []
            for pair in questions:
                positive = [texts[number] for number in pair["segment_ids"]]
                found.append({"query": pair["question"], "positive": positive})
        except (KeyError, TypeError) as error:
            detail = f"{type(error).__name__} {quoted(str(error))}"
            yield line, Fault("questions or chunks of another form", detail)
            continue
        for pair in found:
            yield line, {**pair, GENERATED_BY: "data-designer-retrieval-sdg"}


def _load_dataset(path: Path, data_format: str, split: str | None) -> Any:
    """Load a parquet file, or the only or named split (None: "train") of another dataset."""
    import datasets

    source = str(path)
    try:
        if data_format == "parquet":
            # The default batch is a row group, which has size 0 in a file without rows.
            return datasets.load_dataset(
                "parquet", data_files=source, split="train", streaming=True, batch_size=1000
            )
        if path.is_dir():
            loaded = datasets.load_from_disk(source)
        else:
            name, _, config = source.partition(":")
            loaded = datasets.load_dataset(name, config or None, split=split)
    except Exception as error:  # the hub, the network and Arrow have no common exception class
        message = f"cannot be loaded as a Hugging Face dataset: {str(error)[:300]}"
        if not path.exists():
            message = f"no such file or folder, and it {message}"
        raise DataError(f"{source}: {message} (see docs/data.md)") from error
    if not isinstance(loaded, dict):
        return loaded
    splits = list(loaded)
    if split is None:
        split = splits[0] if len(splits) == 1 else "train"
    if split not in splits:
        raise DataError(
            f"{source}: no split {quoted(split)}; it has {', '.join(splits)} (set split, or save "
            "the split by itself)"
        )
    return loaded[split]


def read_records(
    path: AnyPath,
    split: str = "train",
    columns: Mapping[str, str] | None = None,
    report: RecordReport | None = None,
    min_score: float | None = None,
) -> Iterator[Record]:
    """Yield training records in the file's order: queries with their positives and negatives.

    Args:
        path: a file, plain or gzip (parquet: plain), a folder, or the name of a Hugging Face
            dataset; see docs/data.md.
        split: split of a BEIR folder, or of a Hugging Face dataset; ignored for a file.
        columns: {role: column name} for names that are not among those of `FIELDS`.
        report: receives the counts of used and bad records; None: an error at the first bad record.
        min_score: the least score (or label) of a positive pair; pairs below it are left out and
            counted. None: scores of pairs are not read.

    Raises:
        ConfigError: for settings that the format does not have.
        DataError: for a format that cannot be detected, and during reading for a source or a record
            that cannot be used.
    """
    return RecordSource(path, split, columns, min_score).records(report or RecordReport())


class RecordSource:
    """A file, folder or dataset of training records; arguments and errors as in `read_records`.

    The first record with a query and a positive decides which fields hold them in all records.
    Otherwise a record that lacks "positive" but has a field "text" could get a wrong positive.
    """

    def __init__(
        self,
        path: AnyPath,
        split: str = "train",
        columns: Columns = None,
        min_score: float | None = None,
    ) -> None:
        self.path = Path(os.path.expanduser(path))
        self._columns = parse_columns(columns)
        self.data_format = sniff_format(self.path)
        self._split = split
        self._min_score = min_score
        self._first_record: Record | None = None
        self._unused_fields: list[str] = []
        self.num_generated = 0  # used records that name what has generated them
        self._chosen: tuple[str, str] | None = None  # names of the query's and positive's fields
        self._names = _list_names(FIELDS, self._columns)
        if self.data_format == "beir" and (self._columns or min_score is not None):
            raise ConfigError(
                f"{self.path}: BEIR data have no fields for data_columns or min_score"
            )

    def records(self, report: RecordReport) -> Iterator[Record]:
        """Yield every record that can be used, and count the others in the report."""
        if self.data_format == "beir":
            dataset = load_beir_folder(self.path, self._split, report=report)
            num_missing = len(dataset.list_missing_documents())
            report.leave_out(self.path, "relevant document outside the corpus", num_missing)
            for query, judged in list_positives(dataset):
                report.leave_out(self.path, "empty document", judged.count(""))
                positives = list(dict.fromkeys(filter(None, judged)))
                if positives:
                    record = Record(query, positives, [])
                    self._first_record = self._first_record or record
                    yield record
            return
        rows = _read_rows(self.path, self.data_format, self._split, self._columns, "data_columns")
        num_matches = 0
        roles_of_numbers = {"query", "positives", "negatives"}
        for parsed in parse_rows(self.path, rows, self._parse, report):
            if parsed is None:
                report.leave_out(self.path, "score below min_score")
                continue
            num_matches += 1
            self._first_record = self._first_record or parsed
            texts = {**parsed._asdict(), "query": [parsed.query]}
            roles_of_numbers = {r for r in roles_of_numbers if all(map(_is_number, texts[r]))}
            yield parsed
        for role in sorted(roles_of_numbers):
            if num_matches > 1 and getattr(self._first_record, role):
                raise DataError(
                    f"{self.path}: every text in {role} is a number (name the columns of the "
                    "texts with --data_columns, or leave out a column of ids, labels or scores)"
                )

    def describe_first_record(self) -> str:
        """Return one line for the user: the first texts of the first record, and unused fields."""
        assert self._first_record is not None, "no record has been read"
        query, positives, negatives = self._first_record
        line = f"the first record is query={quoted(query)}"
        for name, texts in (("positive", positives), ("negative", negatives)):
            more = f" and {len(texts) - 1} more" if len(texts) > 1 else ""
            line += f", {name}={quoted(texts[0])}{more}" if texts else f", no {name}"
        if self._unused_fields:
            line += f"; not used: {one_line(', '.join(self._unused_fields))}"
        return line

    def key(self, on_bad_record: OnBadRecord) -> str:
        """Return the key of the records in the cache of `datasets`: a sha256, in hex.

        It changes with every setting, and with the path, size or modification time of a file.
        """
        files = [self.path]
        if self.path.is_dir():
            files = sorted(path for path in self.path.rglob("*") if path.is_file())
        elif self.data_format == "hub":
            # These are the files that `datasets` has downloaded. They change with the dataset.
            dataset = _load_dataset(self.path, self.data_format, self._split)
            files = [Path(file["filename"]) for file in dataset.cache_files]
        file_states = []
        for file in files:
            if file.exists():
                state = file.stat()
                file_states.append((str(file.resolve()), state.st_size, state.st_mtime_ns))
        path_without_files = "" if file_states else str(self.path)
        settings = (path_without_files, self.data_format, self._split, self._columns)
        return fingerprint(_CACHE_VERSION, file_states, settings, on_bad_record, self._min_score)

    def _parse(self, row: Mapping[str, Any]) -> Record | None:
        """Return the texts of a row; None for a pair below `min_score`."""
        chosen = self._chosen or (
            self._choose_field("query", row),
            self._choose_field("positive", row),
        )
        query_field, positive_field = chosen
        query = parse_text(self._get_value(row, query_field), query_field)
        value = self._get_value(row, positive_field)
        if value == []:
            raise Fault(f"empty {positive_field}")
        is_match = self._find_matches(row, chosen, value)
        if not any(is_match):
            return None
        title = parse_text(get_first_value(row, self._names["title"]), "title", may_be_blank=True)
        passages = _parse_passages(value, positive_field, title)

        # Negatives are in `negative_1`, `negative_2` ..., or else in the first usual field that has
        # any passage.
        numbered_fields = []
        if "negatives" not in self._columns:
            numbered_fields = [name for name in row if re.fullmatch("negative_[0-9]+", name)]
            # By length first, so that negative_10 comes after negative_9.
            numbered_fields.sort(key=lambda name: (len(name), name))
        negatives: list[str] = []
        for fields in (numbered_fields, *([name] for name in self._names["negatives"])):
            for name in fields:
                if row.get(name) is not None:
                    negatives += _parse_passages(self._get_value(row, name), name)
            if negatives:
                break

        # A passage that is listed twice counts once.
        positives = dict.fromkeys(compress(passages, is_match))
        others = [text for text, matches in zip(passages, is_match, strict=True) if not matches]
        negatives = list(dict.fromkeys(others + negatives))
        if self._chosen is None:
            self._chosen = chosen  # the first usable record decides for all others
            used = {"", *chosen, *numbered_fields, *self._names["title"], *self._names["negatives"]}
            scores = self._names["score"]
            if self._min_score is not None or isinstance(get_first_value(row, scores), list):
                used.update(scores)
            self._unused_fields = [name for name in row if name not in used]
        self.num_generated += row.get(GENERATED_BY) is not None
        return Record(query, list(positives), negatives)

    def _choose_field(self, role: str, row: Mapping[str, Any]) -> str:
        present_names = [name for name in self._names[role] if name in row]
        if not present_names:
            raise _make_missing_field_fault(role, self._names[role], row, "data_columns")
        names_with_value = [name for name in present_names if row[name] is not None]
        return (names_with_value or present_names)[0]

    def _get_value(self, row: Mapping[str, Any], field_name: str) -> Any:
        """Return the value of a field of passages; raises `Fault` for a list in a table's cell."""
        value = row.get(field_name)
        if self.data_format == "csv" and value is not None and _LIST.fullmatch(value.strip()):
            raise Fault(
                f"a list in the cell of {field_name}",
                f"found {quoted(value)}",
                "write a row for each positive and the columns negative_1, negative_2, ..., or "
                f'JSON lines with lists: {{"{field_name}": ["one", "two"], ...}}',
            )
        return value

    def _find_matches(
        self, row: Mapping[str, Any], chosen: tuple[str, str], passages: Any
    ) -> list[bool]:
        """Return, for each passage of a row, if its score or label is that of a match.

        A list of passages may have a list of scores; another score is that of all passages. Raises
        `Fault` for scores that do not fit the passages or `min_score`; without it, for a row
        without match, and for a score beside `sentence1`.
        """
        num_passages = len(passages) if isinstance(passages, list) else 1
        is_match = [True] * num_passages
        folded_names = {_fold(name): name for name in row if row[name] is not None}
        for usual_name in self._names["score"]:
            name = folded_names.get(_fold(usual_name))
            if name is None:
                continue
            # `sentence1` is a field of sentence-transformers' scored pairs, in which a low score
            # marks a pair without match.
            if self._min_score is None and "sentence1" in chosen:
                raise Fault("a pair with a score", _MIN_SCORE_REMEDY)
            is_list = isinstance(row[name], list)
            if is_list and not isinstance(passages, list):
                is_list = len(row[name]) == 1  # longer ones are no labels, but topics
            values = row[name] if is_list else [row[name]] * num_passages
            values = [_WORDS_FOR_NUMBERS.get(_fold(str(value)), value) for value in values]
            if self._min_score is None and values and not any(map(_is_number, values)):
                continue  # texts, such as topics
            if len(values) != num_passages:
                detail = f"{name} has {len(values)}, and {chosen[1]} {num_passages}"
                raise Fault("not a label for each passage", detail)
            if self._min_score is not None:
                return [parse_number(value) >= self._min_score for value in values]
            if is_list:
                found = [parse_number(value) > 0 for value in values]
            else:
                # Negative numbers that are not whole are scores, such as a cross-encoder's.
                found = [float(value) > 0 or not float(value).is_integer() for value in values]
            is_match = [before and now for before, now in zip(is_match, found, strict=True)]
            if not any(is_match):
                raise Fault(f"a pair with {name} 0", _MIN_SCORE_REMEDY)
        if self._min_score is not None:
            raise _make_missing_field_fault("score", self._names["score"], row, "data_columns")
        return is_match


def _list_names(
    fields: Mapping[str, Sequence[str]], columns: Mapping[str, str]
) -> dict[str, list[str]]:
    """Return {role: names of the field}: the column of the role, or else its usual names."""
    names = {role: [name] for role, name in columns.items()}
    for role in fields.keys() - columns.keys():
        # A column with a role is not used for another one, even if its name is a usual name there.
        names[role] = [name for name in fields[role] if name not in columns.values()]
    return names


def _make_missing_field_fault(
    role: str, names: Sequence[str], row: Mapping[str, Any], option: Option
) -> Fault:
    fields = quoted(", ".join(row), 200)
    missing = quoted(", ".join(names), 200) + closest(names[0], row)
    detail = f"its fields are {fields}, with no column {missing}"
    return Fault(f"missing {role}", detail, f"rename a column, or set --{option} {role}=NAME")


def _parse_passages(value: Any, field_name: str, title: str = "") -> list[str]:
    """Return the passages of a field: a text, an object {"title", "text"}, or a list of these.

    ``title`` is the title of the passages that are texts.
    """
    passages: list[str] = []
    for item in value if isinstance(value, list) else [value]:
        if not isinstance(item, dict):
            passages.append(passage_text(title, parse_text(item, field_name)))
            continue
        if "text" not in item:
            raise Fault(f"missing {field_name} text")
        own_title = parse_text(item.get("title"), "title", may_be_blank=True)
        text = parse_text(item["text"], f"{field_name} text", may_be_blank=True)
        text = passage_text(own_title, text)
        if not text:
            raise Fault(f"empty {field_name} text")
        passages.append(text)
    return passages


def _fold(name: str) -> str:
    """Return a name or label in lower case, without blanks, hyphens and underscores."""
    return re.sub(r"[\s_-]", "", name.lower())


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True


def parse_columns(columns: Columns, option: Option = "data_columns") -> dict[str, str]:
    """Return column names by role; raises `ConfigError` for what cannot be used.

    ``columns`` is a mapping, a list of words ``ROLE=NAME``, or a list of one mapping as JSON text.
    The roles are those of `FIELDS`, or with the option "corpus_columns" those of `CORPUS_FIELDS`.
    """
    if not columns:
        return {}
    fields = FIELDS if option == "data_columns" else CORPUS_FIELDS
    pairs: list[Any]
    try:
        if isinstance(columns, Mapping):
            pairs = list(columns.items())
        elif columns[0].startswith("{"):  # a mapping of the settings, as text
            pairs = list(json.loads(columns[0]).items())
        else:
            pairs = [word.split("=", 1) for word in columns]
        name_by_role = dict(pairs)
    except ValueError as error:
        raise ConfigError(
            f"{option}: not ROLE=NAME, such as title=heading: {quoted(columns)}"
        ) from error
    for role in name_by_role:
        check_choice(f"{option}: a role", role, fields)
    has_names_only = all(isinstance(name, str) for name in name_by_role.values())
    if len(pairs) > len(name_by_role) or not has_names_only:
        raise ConfigError(
            f"{option}: {quoted(columns)}: a role has the name of one column (rename several "
            "columns of negatives to negative_1, negative_2, ...)"
        )
    return name_by_role


def read_passages(
    path: AnyPath, report: RecordReport, may_be_blank: bool = False, columns: Columns = None
) -> Iterator[Passage]:
    """Yield every passage of a corpus, in the order of the file. Repeated ids are not refused.

    Args:
        path: a BEIR folder; a file of JSON lines, or with a JSON array; a table with a header, as
            DPR publishes it; a parquet file; or a Hugging Face dataset. Text files may be gzip.
        report: receives the counts of used and bad records, or raises `DataError` for them.
        may_be_blank: True to yield passages without title and text, which published sets have;
            False: they are bad records.
        columns: {role: column name} for names that are not among those of `CORPUS_FIELDS`.
    """
    columns = parse_columns(columns, "corpus_columns")
    path = Path(os.path.expanduser(path))
    if is_beir_folder(path):
        path = find_beir_file(path, "corpus.jsonl")
    names = _list_names(CORPUS_FIELDS, columns)

    def parse_passage(row: Mapping[str, Any]) -> Passage:
        for role in ("text", "id"):
            if set(names[role]).isdisjoint(row):
                raise _make_missing_field_fault(role, names[role], row, "corpus_columns")
        identifier = parse_id(get_first_value(row, names["id"]), "id")
        title = parse_text(get_first_value(row, names["title"]), "title", may_be_blank=True)
        text = parse_text(get_first_value(row, names["text"]), "text", may_be_blank=True)
        passage = Passage(identifier, title, text)
        if not passage.passage and not may_be_blank:
            raise Fault("empty passage", quoted(passage.id))
        return passage

    rows = _read_rows(path, sniff_format(path), None, columns, "corpus_columns")
    return parse_rows(path, rows, parse_passage, report)
