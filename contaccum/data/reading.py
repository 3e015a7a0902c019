"""One call for every format: from a path or a name to `Record`s, one at a time.

It picks the reader. What the readers have in common is in `record`, `fields` and `records`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from contaccum.data.arrow_tables import read_hub, read_parquet
from contaccum.data.beir_folder import load_beir_folder, passage_text
from contaccum.data.delimited import read_delimited
from contaccum.data.fields import Fields, parse_columns
from contaccum.data.formats import DATA_FORMATS, JUDGED, NAMED_COLUMNS, DataFormat, sniff_format
from contaccum.data.json_records import read_dpr, read_json_pairs, read_tevatron
from contaccum.data.msmarco import read_msmarco, read_text_triples
from contaccum.data.record import NOT_A_PAIR, Record, RecordRules
from contaccum.data.records import RecordReport, one_line
from contaccum.errors import ConfigError


def read_records(
    source: str | Path,
    data_format: DataFormat | None = None,
    split: str = "train",
    columns: Mapping[str, str] | None = None,
    report: RecordReport | None = None,
    title_separator: str = " ",
    max_positives: int | None = None,
    num_negatives: int | None = None,
    topic_column: str | None = None,
    least_negatives: int | None = None,
    streaming: bool = False,
) -> Iterator[Record]:
    """Yield the records of `source`, each a query with its positives and negatives in the order of the file.

    - "beir": a folder; a record for each query that the split judges above 0. It has no negatives. The corpus is
      held in memory.
    - "dpr": a JSON array of {"question", "positive_ctxs", "hard_negative_ctxs", "negative_ctxs"} (`read_dpr`).
    - "tevatron": lines of {"query_id", "query", "positive_passages", "negative_passages"}.
    - "msmarco": a folder (`read_msmarco`), or a file of text triples.
    - "pairs", "triplets": lines of one object each, by its field names (`fields`); both are read the same way.
    - "csv": with a header, split at , ; or tab. "parquet": one file.
    - "hub": a Hugging Face dataset `NAME` or `NAME:CONFIG`, or a folder that `save_to_disk` wrote.

    Args:
        source: a file, plain or gzip (parquet: plain), a folder, or the name of a dataset.
        data_format: one of `DATA_FORMATS`; None: told from the content.
        split: of a BEIR or MS MARCO folder, or of a dataset; a file has no splits, and there it does nothing.
        columns: {"query": name, "positive": name, "negatives": name, "title": name}, or some of them, for records
            with named fields; the others are found by their usual names.
        report: counts go here; when the records are read to their end, seen = used + reported. None: a new report,
            which stops at the first bad record.
        title_separator: between a title and its text.
        max_positives, num_negatives, least_negatives: how many of each record; see `RecordRules`.
        topic_column: a field with a text or number in every record of a file: its topic.
        streaming: do not store a dataset of the hub on disk, but fetch it as it is read.

    Raises:
        ConfigError: at once: an unknown format, or `columns` that cannot be used.
        DataError: at once where the format cannot be told; while reading, where the source or, under "stop", a
            record cannot be used.
    """
    if data_format is not None and data_format not in DATA_FORMATS:
        raise ConfigError(f"data_format={data_format!r} is unknown (use one of {', '.join(DATA_FORMATS)})")
    mapping = parse_columns(columns)
    found = data_format or sniff_format(source, mapping)
    if mapping and found not in NAMED_COLUMNS:
        raise ConfigError(
            one_line(
                f"data_columns is set, but data_format={found} has names of its own: {source} (drop data_columns, or "
                f"set data_format to one of {', '.join(NAMED_COLUMNS)})"
            )
        )
    path = Path(source)
    if topic_column is not None and found in JUDGED:
        raise ConfigError(
            one_line(
                f"topic_column={topic_column}, but data_format={found} has no topics: {source} (write it as pairs)"
            )
        )
    fields = Fields(mapping, topic_column)
    rules = RecordRules(title_separator, max_positives, num_negatives, topic_column, least_negatives)
    report = RecordReport() if report is None else report
    if found == "beir":
        return _read_beir(path, split, rules, report)
    if found == "dpr":
        return read_dpr(path, rules, report)
    if found == "tevatron":
        return read_tevatron(path, rules, report)
    if found == "msmarco":
        return read_text_triples(path, rules, report) if path.is_file() else read_msmarco(path, split, rules, report)
    if found == "csv":
        return read_delimited(path, fields, rules, report)
    if found == "parquet":
        return read_parquet(path, fields, rules, report)
    if found == "hub":
        return read_hub(str(source), split, fields, rules, report, streaming)
    return read_json_pairs(path, fields, rules, report)


def _read_beir(path: Path, split: str, rules: RecordRules, report: RecordReport) -> Iterator[Record]:
    data = load_beir_folder(path, split, report=report, allow_empty_documents=False)
    for query_id, judged in data.qrels.items():
        positives = [document_id for document_id, score in judged.items() if score > 0]
        report.note(NOT_A_PAIR, len(judged) - len(positives))
        documents = [data.corpus[document_id] for document_id in positives[: rules.max_positives]]
        if documents:
            passages = [passage_text(d["title"], d["text"], rules.title_separator) for d in documents]
            yield Record(data.queries[query_id], passages, [])
