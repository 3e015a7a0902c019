"""Invariants of the readers: every format gives the same records, by one call, told from the content."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import pytest
from data_files import RECORDS, WRITERS, dpr_records, lines, put, put_parquet, put_saved, read, rows

from contaccum.data import Record, load_training_data, read_records, sniff_format
from contaccum.errors import ConfigError, DataError

NO_NEGATIVES = [record._replace(negatives=[]) for record in RECORDS]


@pytest.mark.parametrize("name", WRITERS)
def test_every_format_gives_the_same_records_sniffed_or_named(tmp_path, name):
    source = WRITERS[name](tmp_path)
    expected = NO_NEGATIVES if name == "beir" else RECORDS
    assert sniff_format(source) == name
    assert read(source)[0] == expected
    assert read(str(source), data_format=name)[0] == expected
    titled = read(source, title_separator=" | ")[0][0].positives
    assert titled == (["Title one text"] if name == "msmarco" else ["Title | one text"])


@pytest.mark.parametrize("name", [name for name in WRITERS if name != "beir"])
def test_training_data_has_the_same_fingerprint_from_every_format(tmp_path, name):
    data = load_training_data(WRITERS[name](tmp_path), num_hard_negatives=2)
    assert data.dataset.to_list() == [
        {"query": r.query, "positive": r.positives[0], "negative_1": r.negatives[0], "negative_2": r.negatives[1]}
        for r in RECORDS
    ]
    base = load_training_data(WRITERS["dpr"](tmp_path / "other"), num_hard_negatives=2)
    assert data.fingerprint == base.fingerprint
    assert load_training_data(WRITERS[name](tmp_path)).dataset.column_names == ["query", "positive"]
    with pytest.raises(DataError, match="too few hard negatives: 2 where num_hard_negatives is 3"):
        load_training_data(WRITERS[name](tmp_path), num_hard_negatives=3, missing_negatives="stop")


@pytest.mark.parametrize("name", ["dpr.json", "tevatron.jsonl", "pairs.jsonl", "table.csv"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_gzip_byte_order_mark_and_line_ends_change_nothing(tmp_path, name, mark, end):
    writer = WRITERS[{"dpr": "dpr", "tev": "tevatron", "pai": "pairs", "tab": "csv"}[name[:3]]]
    text = writer(tmp_path).read_bytes().decode().replace("\r\n", "\n").replace("\n", end)
    path = put(tmp_path / f"{name}.gz", mark + text)
    assert read(path)[0] == RECORDS
    assert sniff_format(path) == sniff_format(writer(tmp_path))


def test_all_positives_and_negatives_come_in_order_and_limits_take_the_first(tmp_path):
    record = {"query": "q", "positives": ["p1", "p2", "p3"], "negatives": ["n1", {"title": "T", "text": "n2"}]}
    path = put(tmp_path / "a.jsonl", lines([record]))
    assert read(path)[0] == [Record("q", ["p1", "p2", "p3"], ["n1", "T n2"])]
    assert read(path, max_positives=2, num_negatives=1)[0] == [Record("q", ["p1", "p2"], ["n1"])]
    # What nobody asked for is not checked.
    path = put(tmp_path / "b.jsonl", lines([{"query": "q", "positives": ["p1", ""], "negatives": ["n1", None]}]))
    assert read(path, max_positives=1, num_negatives=1)[0] == [Record("q", ["p1"], ["n1"])]
    with pytest.raises(DataError, match=r"b\.jsonl:1: empty positives"):
        read(path)


def test_a_null_among_numbered_negatives_hides_none_after_it(tmp_path):
    record = {"query": "q", "positive": "p", "negative_1": None, "negative_2": "n2"}
    assert read(put(tmp_path / "a.jsonl", lines([record])))[0] == [Record("q", ["p"], ["n2"])]


def test_a_gap_among_numbered_negatives_hides_none_after_it_and_they_come_by_number(tmp_path):
    negatives = {f"negative_{i}": f"n{i}" for i in (10, 9, 2)}
    path = put(tmp_path / "a.jsonl", lines([{"query": "q", "positive": "p", **negatives}]))
    assert read(path)[0] == [Record("q", ["p"], ["n2", "n9", "n10"])]
    records = [{"query": "q", "positive": "p", "negatives": [], "hard_negatives": ["h"]}]
    assert read(put(tmp_path / "b.jsonl", lines(records)))[0] == [Record("q", ["p"], ["h"])]


@pytest.mark.parametrize("columns", [None, {"negatives": "hard", "title": "heading"}])
def test_records_of_one_file_may_have_different_fields(tmp_path, columns):
    names = columns or {"negatives": "negatives", "title": "title"}
    records = [
        {"query": "a", "positive": "p"},
        {"query": "b", "positive": "p", names["title"]: "T"},
        {"positive": "p", names["negatives"]: ["n"], "query": "c"},
        {"query": "d", "positive": "p"},
    ]
    found = read(put(tmp_path / "a.jsonl", lines(records)), columns=columns)[0]
    assert found == [
        Record("a", ["p"], []),
        Record("b", ["T p"], []),
        Record("c", ["p"], ["n"]),
        Record("d", ["p"], []),
    ]


def test_readers_yield_before_they_have_read_on(tmp_path):
    for name in ("tevatron", "pairs", "csv"):
        path = WRITERS[name](tmp_path)
        # Nothing but the first line is sound, and the first record comes all the same.
        put(path, path.read_bytes() + b"\xff\n")
        records = read_records(path)
        assert next(records) == RECORDS[0]
        with pytest.raises(DataError, match="not UTF-8 text"):
            list(records)


def test_dpr_array_is_read_in_constant_memory(tmp_path):
    record = {**dpr_records()[0], "negative_ctxs": [{"title": "", "text": "word " * 2000}] * 5}
    path = tmp_path / "dpr.json"
    with open(path, "w") as file:
        file.write("[" + ",\n".join([json.dumps(record)] * 400) + "]")
    assert path.stat().st_size > 20_000_000
    tracemalloc.start()
    try:
        count = sum(1 for _ in read_records(path, num_negatives=1))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert count == 400 and peak < 8_000_000


def test_dpr_without_hard_negatives_falls_back_on_the_random_ones_and_says_so(tmp_path):
    records = dpr_records()
    records[1]["hard_negative_ctxs"] = []
    del records[2]["hard_negative_ctxs"], records[2]["negative_ctxs"]
    path = put(tmp_path / "dpr.json", json.dumps(records))
    found, report = read(path)
    assert [r.negatives for r in found] == [["negative a", "negative b"], ["random"], []]
    assert report.notes == {"records without hard_negative_ctxs, their negative_ctxs taken": 1}
    with pytest.raises(DataError, match=r"dpr\.json:1: too few hard negatives: 0"):
        load_training_data(path, num_hard_negatives=1, missing_negatives="stop")


def test_beir_gives_one_record_for_each_query_with_all_its_positives(tmp_path):
    folder = WRITERS["beir"](tmp_path)
    put(folder / "qrels" / "dev.tsv", "q1\td1\t1\nq0\td0\t0\nq1\td0\t2\nq1\td2\t-1\n")
    found, report = read(folder, split="dev")
    assert found == [Record(RECORDS[1].query, ['two; "quoted", text', "Title one text"], [])]
    assert report.notes == {"judgements of 0 or less, not a pair": 2}
    assert len(load_training_data(folder, split="dev").dataset) == 2


def test_jsonl_with_columns_is_no_tevatron_file(tmp_path):
    path = put(tmp_path / "a.jsonl", lines([{"q": "x", "query": "wrong", "positive_passages": [{"text": "p"}]}]))
    assert (sniff_format(path), sniff_format(path, {"query": "q"})) == ("tevatron", "pairs")
    assert read(path, columns={"query": "q"})[0] == [Record("x", ["p"], [])]


# Column mappings


MAPPED = {"query": "question", "title": "heading", "positive": "answer", "negative_1": "hard"}
MAPPING = {"query": "question", "title": "heading", "positive": "answer", "negatives": "hard"}


def put_mapped(kind: str, folder: Path) -> Path:
    renamed = [{MAPPED[name]: value for name, value in row.items() if name in MAPPED} for row in rows()]
    if kind == "csv":
        header = [*MAPPED.values()]
        text = "\n".join("\t".join([r[name] or "" for name in header]).replace('"', "") for r in renamed)
        return put(folder / "a.tsv", "\t".join(header) + "\n" + text + "\n")
    writers = {"pairs": lambda p: put(p / "a.jsonl", lines(renamed)), "hub": lambda p: put_saved(p / "a", renamed)}
    writers["parquet"] = lambda p: put_parquet(p / "a.parquet", renamed)
    return writers[kind](folder)


@pytest.mark.parametrize("kind", ["pairs", "csv", "parquet", "hub"])
def test_a_mapping_names_the_columns_and_a_wrong_name_gets_the_closest(tmp_path, kind):
    source = put_mapped(kind, tmp_path)
    found = read(source, columns=MAPPING)[0]
    assert [r.query for r in found] == [r.query for r in RECORDS]
    assert found[0] == Record("first query", ["Title one text"], ["negative a"])
    assert load_training_data(source, columns=MAPPING, num_hard_negatives=1).report.used == 3
    for role, wrong in (("query", "qestion"), ("positive", "anser"), ("negatives", "hrd"), ("title", "heding")):
        with pytest.raises(DataError) as caught:
            read(source, columns={**MAPPING, role: wrong}, data_format=kind)
        message = str(caught.value)
        assert "\n" not in message and str(source) in message and f"'{wrong}'" in message
        assert f"did you mean '{MAPPING[role]}'?" in message


def test_a_column_that_is_query_is_not_taken_for_the_title_or_the_positive_too(tmp_path):
    path = put(tmp_path / "a.jsonl", lines([{"title": "t", "text": "long text", "answer": "a"}]))
    assert read(path, columns={"query": "title", "positive": "text"})[0] == [Record("t", ["long text"], [])]
    assert read(path, columns={"query": "answer"})[0] == [Record("a", ["t long text"], [])]
    path = put(tmp_path / "b.jsonl", lines([{"query": "q", "answer": "no", "text": "yes"}]))
    assert read(path, columns={"negatives": "answer"})[0] == [Record("q", ["yes"], ["no"])]


def test_mapping_for_a_format_with_names_of_its_own_is_refused(tmp_path):
    for name in ("beir", "dpr", "msmarco"):
        with pytest.raises(ConfigError, match=f"data_columns is set, but data_format={name} has names of its own"):
            read_records(WRITERS[name](tmp_path), columns={"query": "q"})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"qurey": "q"}, r"'qurey' is unknown .*did you mean 'query'"),
        ({"query": 3}, "query must name a column, got 3"),
        ({"positive": "a", "positives": "b"}, "positive is given twice"),
        (["query"], "'query' is not ROLE=NAME"),
        (["{broken"], "is not a JSON object"),
    ],
)
def test_a_mapping_that_cannot_be_one_is_refused(tmp_path, given, message):
    with pytest.raises(ConfigError, match=f"data_columns: .*{message}"):
        read_records(WRITERS["pairs"](tmp_path), columns=given)


def test_unknown_format_is_refused_at_once():
    with pytest.raises(ConfigError, match=r"data_format='xml' is unknown \(use one of beir, dpr"):
        read_records("anything", data_format="xml")  # type: ignore[arg-type]  # the mistake that is tested
