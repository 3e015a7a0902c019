"""Readers: every format gives the same records by one call, with the format detected or named."""

import csv
import io
import json
import tracemalloc
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from data_files import RECORDS, WRITERS, dpr_records, put, put_lines, put_parquet, read, rows
from datasets import Dataset, DatasetDict
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import BoW
from sentence_transformers.util import mine_hard_negatives

from contaccum.data import (
    Record,
    RecordReport,
    load_training_data,
    parse_columns,
    read_passages,
    read_records,
    sniff_format,
)
from contaccum.data.records import FIELDS, Passage, RecordSource
from contaccum.errors import ConfigError, DataError

PAIR = {"query": "q", "positive": "p"}


@pytest.fixture
def file(tmp_path) -> Callable[..., Path]:
    """Return a function that writes mappings as JSON lines to a.jsonl, or a table to a.csv."""

    def write(*records: Any) -> Path:
        if isinstance(records[0], str):
            return put(tmp_path / "a.csv", records[0])
        return put_lines(tmp_path / "a.jsonl", *records)

    return write


@pytest.mark.parametrize("name", WRITERS)
def test_every_format_gives_the_same_records(tmp_path, name):
    source = WRITERS[name](tmp_path)
    expected = [record._replace(negatives=[]) for record in RECORDS] if name == "beir" else RECORDS
    assert sniff_format(source) == ("pairs" if name == "tevatron" else name)
    assert read(source)[0] == read(str(source))[0] == expected


@pytest.mark.parametrize("name", ["dpr.json", "tevatron.jsonl", "pairs.jsonl", "csv"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_gzip_byte_order_mark_and_line_ends_change_nothing(tmp_path, name, mark, end):
    writer = WRITERS[name.split(".")[0]]
    text = writer(tmp_path).read_bytes().decode().replace("\r\n", "\n").replace("\n", end)
    path = put(tmp_path / f"{name}.gz", mark + text)
    assert read(path)[0] == RECORDS
    assert sniff_format(path) == sniff_format(writer(tmp_path))


def test_every_usual_field_name_is_read(file):
    for query, positive in product(FIELDS["query"], FIELDS["positive"]):
        path = file({"id": 7, query: "q", "title": "T", positive: "p", "score": 0.5})
        assert read(path, min_score=0.5)[0] == [Record("q", ["T p"], [])]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"negatives": ["n1", {"title": "T", "text": "n2"}]}, ["n1", "T n2"]),
        ({"negative": "n"}, ["n"]),
        ({"neg": ["a", "b"]}, ["a", "b"]),
        ({"negative_1": None, "negative_2": "n2"}, ["n2"]),
        ({"negative_10": "n10", "negative_9": "n9", "negative_0": "n0"}, ["n0", "n9", "n10"]),
        ({"negatives": [], "hard_negatives": ["h"]}, ["h"]),
        ({"negatives": None}, []),
        ({"negative_ctxs": ["random"], "hard_negative_ctxs": ["h"]}, ["h"]),
        ({"negative_ctxs": ["random"], "hard_negative_ctxs": []}, ["random"]),
        ({"negatives": ["n", "m", "n"]}, ["n", "m"]),
    ],
)
def test_negatives_are_found_under_every_name_and_none_is_hidden(file, fields, expected):
    path = file({"query": "q", "positives": ["p1", "p2"], **fields})
    assert read(path)[0] == [Record("q", ["p1", "p2"], expected)]


def test_records_of_a_file_may_have_different_fields(file):
    path = file(
        {"q": "a", "p": "x"},
        {"q": "b", "p": "x", "heading": "T"},
        {"p": "x", "hard": "n", "q": "c"},
    )
    columns = parse_columns(["query=q", "positive=p", "negatives=hard", "title=heading"])
    expected = [Record("a", ["x"], []), Record("b", ["T x"], []), Record("c", ["x"], ["n"])]
    assert read(path, columns=columns)[0] == expected
    message = r"a\.jsonl:1: missing positive: its fields are 'q, p', with no column 'pp'"
    with pytest.raises(DataError, match=message):
        read(path, columns={"query": "q", "positive": "pp"})


@pytest.mark.parametrize(
    ("columns", "word"),
    [
        (["quer=a"], "role"),
        (["query"], "ROLE=NAME"),
        # One of several columns of a role would be used silently.
        (["query=q", "negatives=a", "negatives=b"], "negative_1"),
        ({"query": "q", "negatives": ["a", "b"]}, "negative_1"),
    ],
)
def test_a_mapping_that_cannot_be_used_is_refused(columns, word):
    with pytest.raises(ConfigError, match=f"data_columns.*{word}"):
        parse_columns(columns)


def test_a_dpr_array_is_read_in_constant_memory(tmp_path):
    record = {**dpr_records()[0], "negative_ctxs": [{"title": "", "text": "word " * 2000}] * 5}
    path = put(tmp_path / "dpr.json", "[" + ",\n".join([json.dumps(record)] * 400) + "]")
    tracemalloc.start()
    count = sum(1 for _ in read_records(path))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert count == 400 and peak < 8_000_000 < path.stat().st_size / 2


# Tables


def test_a_row_with_line_breaks_is_named_by_its_first_line(file):
    """Quoted cells may hold delimiters, quotes and line breaks."""
    path = file('query,positive\nq1,"a, ""b""\n\nc"\n\nq2,\nq3,"d"\n')
    report = RecordReport("skip")
    records = list(read_records(path, report=report))
    assert records == [Record("q1", ['a, "b"\n\nc'], []), Record("q3", ["d"], [])]
    assert report.first == f"{path}:6" and report.by_reason == {"missing positive": 1}


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize(
    ("header", "delimiter", "names"),
    [
        ('"query, in German";positive', ";", ["query, in German", "positive"]),
        ('positive;"a;b,c\td,e,f"', ";", ["positive", "a;b,c\td,e,f"]),
        ('"a ""quoted, short"" name"\tpositive', "\t", ['a "quoted, short" name', "positive"]),
        ('\n"query", "positive"', ",", ["query", "positive"]),
        ('"positive"; "a,b,c"', ";", ["positive", "a,b,c"]),
    ],
)
def test_a_delimiter_in_quotes_is_part_of_a_column_name(file, header, delimiter, names, end):
    path = file(f"{header}{end}first{delimiter}second{end}")
    cells = dict(zip(names, ["first", "second"], strict=True))
    query, *_ = (name for name in names if name != "positive")
    expected = Record(cells[query], [cells["positive"]], [])
    assert read(path, columns={"query": query})[0] == [expected]


@pytest.mark.parametrize(
    "cell",
    [
        "['one', 'two']",
        '["one", "two"]',
        "['one' 'two'\n ... 'nine']",
        "['one', None]",
        "[{'title': 'T', 'text': 'one'}]",
        '{"title": "T", "text": "one", "score": 1}',
        "[]",
        " [['one'], ['two']] ",
    ],
)
def test_a_list_in_a_cell_is_refused(file, cell):
    for column in range(3):
        cells = ["q", "p", "n"]
        cells[column] = cell
        text = io.StringIO()
        csv.writer(text).writerows([["query", "positive", "negative"], cells])
        with pytest.raises(DataError, match=r"a\.csv:2: a list in the cell of .*negative_1"):
            read(file(text.getvalue()))


def test_brackets_in_a_cell_are_text(file):
    texts = ["[1] first", "['s Gravenhage] is a city", "see ['a']", "[sic]", "{x}", "[1, 2]"]
    path = file("query\tpositive\n" + "".join(f"q\t{text}\n" for text in texts))
    assert [record.positives for record in read(path)[0]] == [[text] for text in texts]


@pytest.mark.parametrize(
    "table",
    [
        "query,positive\nq,p\n,\n",  # Excel writes such rows at the end of a sheet
        "query,positive,,\nq,p,,\n",
        '"query", "positive"\n"q", "p"\n',
    ],
)
def test_empty_rows_unnamed_columns_and_blanks_before_quotes_are_no_texts(file, table):
    records, report = read(file(table))
    assert records == [Record("q", ["p"], [])] and report.seen == 1


def test_a_column_name_that_occurs_twice_is_refused_with_its_line(file):
    path = file('query,positive,"positive"\nq,p,r\n')
    message = r"a\.csv:1: two columns have the same name: 'positive'"
    for on_bad_record in ("stop", "skip"):
        with pytest.raises(DataError, match=message):
            list(read_records(path, report=RecordReport(on_bad_record)))


@pytest.mark.parametrize(
    ("fields", "min_score", "end"),
    [
        ({"relevance": 2, "source": "web"}, None, "no negative; not used: relevance, source"),
        ({"label": "sports", "answer": "a"}, None, "; not used: label, answer"),
        ({"score": -2.5}, None, "; not used: score"),
        ({"score": 2, "title": "T", "negative_1": "n"}, 1, "negative='n'"),
        (
            {"query": "q\n1", "positive": ["p", "r", "s"]},
            None,
            "'q\\n1', positive='p' and 2 more, no negative",
        ),
    ],
)
def test_the_first_record_is_described_with_the_fields_that_are_not_used(
    file, fields, min_score, end
):
    source = RecordSource(file({**PAIR, **fields}), min_score=min_score)
    list(source.records(RecordReport()))
    assert source.describe_first_record().endswith(end)


@pytest.mark.parametrize(
    ("records", "role"),
    [
        ([{"query": "1", "positive": "p"}, {"query": "2", "positive": "r"}], "query"),
        ([{**PAIR, "passage": "p", "positive": number} for number in "10"], "positives"),
        ([{**PAIR, "negative": number} for number in ("0.8", "1e-05")], "negatives"),
    ],
)
def test_a_column_of_numbers_is_no_column_of_texts(file, records, role):
    for report in (RecordReport(), RecordReport("skip")):
        with pytest.raises(DataError, match=f"every text in {role} is a number"):
            list(read_records(file(*records), report=report))


def test_some_numbers_among_the_texts_are_texts(file):
    records = [("when", "1945"), ("who", "Ada Lovelace"), ("how many", "3")]
    path = file(*({"query": query, "answer": answer} for query, answer in records))
    assert [record.positives for record in read(path)[0]] == [[a] for _, a in records]


def test_parquet_rows_are_numbered_across_row_groups(tmp_path):
    records = [
        {"query": f"q{i}", "pos": ["p", "p2"], "neg": [{"title": "T", "text": "n"}]}
        for i in range(7)
    ]
    records[5]["pos"] = ["p", None]
    path = put_parquet(tmp_path / "a.parquet", records, row_group_size=2)
    report = RecordReport("skip")
    parsed_records = list(read_records(path, report=report))
    assert parsed_records[0] == Record("q0", ["p", "p2"], ["T n"]) and len(parsed_records) == 6
    assert report.first == f"{path}:6" and report.by_reason == {"missing pos": 1}


def test_saved_datasets_are_read_by_split(tmp_path):
    both = DatasetDict({"train": Dataset.from_list(rows()), "dev": Dataset.from_list(rows()[:1])})
    both.save_to_disk(str(tmp_path / "both"))
    assert sniff_format(tmp_path / "both") == "hub" and read(tmp_path / "both")[0] == RECORDS
    assert read(tmp_path / "both", split="dev")[0] == RECORDS[:1]
    with pytest.raises(DataError, match=r"both: no split 'test'; it has train, dev"):
        read(tmp_path / "both", split="test")


@pytest.mark.parametrize("split", ["corpus", "train"])
def test_a_saved_corpus_may_call_its_only_split_by_any_name(tmp_path, split):
    corpus = [{"_id": "d1", "text": "one"}]
    DatasetDict({split: Dataset.from_list(corpus)}).save_to_disk(str(tmp_path / "corpus"))
    passages = list(read_passages(tmp_path / "corpus", RecordReport()))
    assert passages == [Passage("d1", "", "one")]


@pytest.mark.parametrize("text", ["", " ", None])
def test_a_passage_may_consist_of_its_title(file, text):
    """`contaccum mine` writes such passages in the formats dpr and tevatron."""
    positive = {"docid": "1", "title": "T", "text": text}
    path = file({"query": "q", "positive": positive, "negatives": [{"title": "S", "text": text}]})
    assert read(path)[0] == [Record("q", ["T"], ["S"])]
    with pytest.raises(DataError, match=":1: empty positive text"):
        read(file({"query": "q", "positive": {"title": " ", "text": text}}))
    with pytest.raises(DataError, match=":1: missing positive text"):
        read(file({"query": "q", "positive": {"title": "T"}}))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.tsv", "id\ttext\ttitle\n1\t\tT\n2\t \t\n"),
        ("a.jsonl", '{"_id": 1, "title": "T", "text": null}\n{"id": "2", "contents": " "}\n'),
    ],
)
def test_a_null_or_blank_text_is_an_empty_text(tmp_path, name, content):
    path = put(tmp_path / name, content)
    passages = list(read_passages(path, RecordReport(), may_be_blank=True))
    assert [(p.id, p.title, p.passage) for p in passages] == [("1", "T", "T"), ("2", "", "")]
    with pytest.raises(DataError, match=r":[23]: empty passage: '2'"):
        list(read_passages(path, RecordReport()))


@pytest.mark.parametrize("name", ["csv", "parquet", "pairs"])
def test_a_mapped_name_that_no_record_has_is_refused(tmp_path, name):
    """Under "skip" too: it is no fault of a record."""
    source = WRITERS[name](tmp_path)
    with pytest.raises(DataError, match="no record has the field 'wrong'"):
        list(read_records(source, columns={"title": "wrong"}, report=RecordReport("skip")))


@pytest.mark.parametrize(
    ("source", "name", "config"), [("owner/set", "owner/set", None), ("set:part", "set", "part")]
)
def test_a_name_that_is_no_path_is_a_dataset_of_the_hub(monkeypatch, source, name, config):
    calls: list[Any] = []

    def load(*arguments: Any, **options: Any) -> Any:
        calls.append((*arguments, options))
        return Dataset.from_list(rows())

    monkeypatch.setattr("datasets.load_dataset", load)
    assert read(source)[0] == RECORDS and calls == [(name, config, {"split": "train"})]
    assert load_training_data(source, num_hard_negatives=1).data_format == "hub"

    def refuse(*arguments: Any, **options: Any) -> Any:
        raise ValueError("Config name is missing.\nPlease pick one among: ['a', 'b']")

    monkeypatch.setattr("datasets.load_dataset", refuse)
    message = rf"^{source}: no such file or folder, and it cannot be loaded .*\['a', 'b'\]"
    with pytest.raises(DataError, match=message):
        read(source)


# Scores and labels


@pytest.mark.parametrize(
    ("name", "label"),
    [
        *[("label", label) for label in (0, "0", " 0.00", -1, False, "False")],
        *[("label", word) for word in ("no", "Not relevant", "non-relevant", "NEGATIVE")],
        *[(name, 0) for name in ("relevance", "score", "is_duplicate", "Is Relevant", "isMatch")],
    ],
)
def test_a_pair_with_label_0_is_no_match(file, name, label):
    path = file({**PAIR, name: 1}, {"query": "q2", "positive": "p2", name: label})
    with pytest.raises(DataError, match=rf':2: a pair with {name} 0: .*"min_score": 1'):
        read(path)
    assert read(path, min_score=1)[0] == [Record("q", ["p"], [])]


@pytest.mark.parametrize(
    ("fields", "min_score", "expected"),
    [
        ({"labels": [1, 0, 0]}, None, Record("q", ["a"], ["b", "c"])),
        ({"label": [False, True, True]}, None, Record("q", ["b", "c"], ["a"])),
        ({"Is Relevant": ["no", "no", "yes"]}, None, Record("q", ["c"], ["a", "b"])),
        ({"rating": [3, 1, 2]}, 2, Record("q", ["a", "c"], ["b"])),
        ({"label": [0, 1, 0], "neg": ["n", "c"]}, None, Record("q", ["b"], ["a", "c", "n"])),
        ({"labels": ["sports", "news"]}, None, Record("q", ["a", "b", "c"], [])),
        ({"label": 1}, None, Record("q", ["a", "b", "c"], [])),
    ],
)
def test_a_list_of_labels_splits_the_passages(file, fields, min_score, expected):
    record = {"query": "q", "answer": ["a", "b", "c"], **fields}
    assert read(file(record), min_score=min_score)[0] == [expected]


@pytest.mark.parametrize(
    ("labels", "min_score", "message"),
    [
        ([1, 0], None, r"not a label for each passage: labels has 2, and answer 3"),
        ([1, 0, 0, 0], 1, r"not a label for each passage"),
        ([], None, r"not a label for each passage"),
        ([1, None, 0], None, r"score is not a number"),
        ([0, 0, 0], None, r'a pair with labels 0: .*"min_score": 1'),
    ],
)
def test_labels_that_do_not_fit_the_passages_are_a_fault_of_their_line(
    file, labels, min_score, message
):
    record = {"query": "q", "answer": ["a", "b", "c"], "labels": [1, 0, 1]}
    path = file(record, {**record, "labels": labels})
    with pytest.raises(DataError, match=rf"a\.jsonl:2: {message}"):
        read(path, min_score=min_score)
    report = RecordReport("skip")
    used = list(read_records(path, report=report, min_score=min_score))
    assert used == [Record("q", ["a", "c"], ["b"])] and report.first == f"{path}:2"


@pytest.mark.parametrize("answer", ["a", {"text": "a"}])
def test_a_single_passage_may_have_a_list_of_one_label(file, answer):
    labels: list[list[int]] = [[1], [0], [0, 7], []]  # the last two are topics
    pairs = [{"query": f"q{i}", "answer": answer, "labels": row} for i, row in enumerate(labels)]
    report = RecordReport("skip")
    records = read_records(file(*pairs), report=report)
    assert [record.query for record in records] == ["q0", "q2", "q3"]
    assert report.by_reason == {"a pair with labels 0": 1}


@pytest.mark.parametrize(
    ("output_format", "output_scores", "columns", "min_score", "num_negatives"),
    [
        ("triplet", False, None, None, 1),
        ("triplet", True, None, None, 1),
        ("n-tuple", False, None, None, 2),
        ("n-tuple", True, None, None, 2),
        ("labeled-pair", False, None, 1, 0),
        ("labeled-pair", True, None, 0.9, 0),
        ("labeled-list", False, None, None, 2),
        ("labeled-list", True, {"score": "scores"}, 0.9, 2),
    ],
)
def test_data_with_negatives_of_sentence_transformers_are_read(
    tmp_path, output_format, output_scores, columns, min_score, num_negatives
):
    words = ["red", "green", "blue", "grey"]
    pairs = {"query": words, "answer": [f"{word} {word}" for word in words]}
    mined = mine_hard_negatives(
        Dataset.from_dict(pairs),
        SentenceTransformer(modules=[BoW(words)], device="cpu"),
        num_negatives=2,
        output_format=output_format,
        output_scores=output_scores,
        verbose=False,
    )
    mined.to_parquet(tmp_path / "mined.parquet")
    records, _ = read(tmp_path / "mined.parquet", columns=columns, min_score=min_score)
    assert {record.query for record in records} == set(words)
    for query, positives, negatives in records:
        assert positives == [f"{query} {query}"]
        assert len(negatives) == num_negatives
        assert set(negatives) <= set(pairs["answer"]) - set(positives)


@pytest.mark.parametrize("label", ["score", "label"])
def test_pairs_with_a_low_score_are_left_out_and_counted(tmp_path, file, label):
    path = file(*({"sentence1": f"q{n}", "sentence2": "p", label: n} for n in (0, 0.5, 1)))
    with pytest.raises(DataError, match=r":1: a pair with a score: .*min_score"):
        read(path)
    records, report = read(path, min_score=0.5)
    assert [record.query for record in records] == ["q0.5", "q1"]
    assert report.by_reason == {"score below min_score": 1} and report.seen == 3
    with pytest.raises(DataError, match=r"no records left to use; .*3 score below min_score"):
        read(path, min_score=2)
    with pytest.raises(DataError, match=r"missing score: its fields are .* --data_columns score=N"):
        read(file(PAIR), min_score=1)
    with pytest.raises(ConfigError, match=r"BEIR data have no fields for .*min_score"):
        read(WRITERS["beir"](tmp_path), min_score=1)


@pytest.mark.parametrize(
    "first_record",
    [
        {"question": "a b", "positive": None, "passage": "x"},
        {"query": "", "question": "", "positive": "x"},
    ],
    ids=["null", "empty"],
)
def test_a_bad_field_of_the_first_record_does_not_decide_the_names(file, first_record):
    good_records = [{"question": f"q {number}", "passage": "a text"} for number in range(5)]
    records = read_records(file(first_record, *good_records), report=RecordReport("skip"))
    queries = [record.query for record in records]
    assert queries[-5:] == [record["question"] for record in good_records]


def test_a_file_of_data_designer_is_read_with_a_record_for_each_question(file):
    row = {
        "file_name": ["a.txt"],
        "chunks": [{"chunk_id": n, "text": f"text {n}"} for n in (1, 2, 3)],
        "deduplicated_qa_pairs": [
            {"question": "first", "answer": "x", "segment_ids": [2], "hop_count": 1},
            {"question": "second", "answer": "y", "segment_ids": [1, 3], "hop_count": 2},
        ],
        "qa_evaluations": {"evaluations": []},
    }
    source = RecordSource(file(row, row))
    records = list(source.records(RecordReport()))
    expected = [Record("first", ["text 2"], []), Record("second", ["text 1", "text 3"], [])]
    assert records == expected * 2
    assert source.num_generated == 4
    row["deduplicated_qa_pairs"][0]["segment_ids"] = [9]
    with pytest.raises(DataError, match=r"a\.jsonl:1: questions or chunks of another form"):
        read(file(row))
