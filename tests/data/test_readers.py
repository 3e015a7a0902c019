"""Readers: every format gives the same records by one call, with the format detected or named."""

import csv
import io
import json
from itertools import product
from typing import Any

import pytest
from data_files import (
    RECORDS,
    WRITERS,
    dpr_records,
    lines,
    peak_of_reading,
    put,
    put_parquet,
    read,
    rows,
)
from small_data import write_lines

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
from contaccum.data.rows import read_csv
from contaccum.errors import ConfigError, DataError


@pytest.mark.parametrize("name", WRITERS)
def test_every_format_gives_the_same_records_sniffed_or_named(tmp_path, name):
    source = WRITERS[name](tmp_path)
    expected = [record._replace(negatives=[]) for record in RECORDS] if name == "beir" else RECORDS
    assert sniff_format(source) == name
    assert read(source)[0] == expected
    assert read(str(source), data_format=name)[0] == expected


@pytest.mark.parametrize("name", ["dpr.json", "tevatron.jsonl", "pairs.jsonl", "csv"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_gzip_byte_order_mark_and_line_ends_change_nothing(tmp_path, name, mark, end):
    writer = WRITERS[name.split(".")[0]]
    text = writer(tmp_path).read_bytes().decode().replace("\r\n", "\n").replace("\n", end)
    path = put(tmp_path / f"{name}.gz", mark + text)
    assert read(path)[0] == RECORDS
    assert sniff_format(path) == sniff_format(writer(tmp_path))


def test_every_usual_field_name_is_read(tmp_path):
    for query, positive in product(FIELDS["query"], FIELDS["positive"]):
        record = {"id": 7, query: "q", "title": "T", positive: "p", "score": 0.5}
        assert read(put(tmp_path / "a.jsonl", lines([record])), min_score=0.5)[0] == [
            Record("q", ["T p"], [])
        ]


NEGATIVES: list[tuple[dict[str, Any], list[str]]] = [
    ({"negatives": ["n1", {"title": "T", "text": "n2"}]}, ["n1", "T n2"]),
    ({"negative": "n"}, ["n"]),
    ({"neg": ["a", "b"]}, ["a", "b"]),
    ({"negative_1": None, "negative_2": "n2"}, ["n2"]),
    ({"negative_10": "n10", "negative_9": "n9", "negative_2": "n2"}, ["n2", "n9", "n10"]),
    ({"negatives": [], "hard_negatives": ["h"]}, ["h"]),
    ({"negatives": None}, []),
]


@pytest.mark.parametrize(("fields", "expected"), NEGATIVES)
def test_negatives_are_found_under_every_name_and_none_is_hidden(tmp_path, fields, expected):
    record = {"query": "q", "positives": ["p1", "p2"], **fields}
    assert read(put(tmp_path / "a.jsonl", lines([record])))[0] == [
        Record("q", ["p1", "p2"], expected)
    ]


def test_records_of_a_file_may_have_different_fields(tmp_path):
    records = [
        {"q": "a", "p": "x"},
        {"q": "b", "p": "x", "heading": "T"},
        {"p": "x", "hard": ["n"], "q": "c"},
    ]
    path = put(tmp_path / "a.jsonl", lines(records))
    columns = parse_columns(["query=q", "positive=p", "negatives=hard", "title=heading"])
    parsed_records = read(path, columns=columns)[0]
    assert parsed_records == [
        Record("a", ["x"], []),
        Record("b", ["T x"], []),
        Record("c", ["x"], ["n"]),
    ]
    with pytest.raises(
        DataError, match=r"a\.jsonl:1: missing positive: its fields are 'q, p', with no column 'pp'"
    ):
        read(path, columns={"query": "q", "positive": "pp"})


@pytest.mark.parametrize(
    ("columns", "word"),
    [
        (["quer=a"], "role"),
        (["query"], "ROLE=NAME"),
        (["{query"], "ROLE=NAME"),
        # One of several columns of a role would be used silently.
        (["query=q", "negatives=a", "negatives=b"], "negative_1"),
        ({"query": "q", "negatives": ["a", "b"]}, "negative_1"),
    ],
)
def test_a_mapping_that_cannot_be_used_is_refused(columns, word):
    with pytest.raises(ConfigError, match=f"data_columns.*{word}"):
        parse_columns(columns)


@pytest.mark.parametrize("columns", [{"query": "a"}, ["query=a"], ['{"query": "a"}']])
def test_columns_are_a_mapping_words_or_an_object(columns):
    assert parse_columns(columns) == {"query": "a"}


def test_a_negative_that_a_record_lists_twice_counts_once(tmp_path):
    record = {"query": "q", "positive": "p", "negatives": ["n", "m", "n"], "scores": [9, 3, 2, 1]}
    path = put(tmp_path / "a.jsonl", lines([record]))
    assert read(path)[0] == [Record("q", ["p"], ["n", "m"], [9, 3, 2])]
    data = load_training_data(path, num_hard_negatives=2, missing_negatives="drop")
    assert len(data.dataset) == 1
    with pytest.raises(DataError, match="no training pairs left"):
        load_training_data(path, num_hard_negatives=3, missing_negatives="drop")


def test_a_dpr_array_is_read_in_constant_memory(tmp_path):
    record = {**dpr_records()[0], "negative_ctxs": [{"title": "", "text": "word " * 2000}] * 5}
    path = put(tmp_path / "dpr.json", "[" + ",\n".join([json.dumps(record)] * 400) + "]")
    count, peak = peak_of_reading(path)
    assert count == 400 and peak < 8_000_000 < path.stat().st_size / 2


def test_dpr_without_hard_negatives_falls_back_on_the_random_ones(tmp_path):
    records = dpr_records()
    records[1]["hard_negative_ctxs"] = []
    del records[2]["hard_negative_ctxs"], records[2]["negative_ctxs"]
    parsed_records = read(put(tmp_path / "dpr.json", json.dumps(records)))[0]
    assert [r.negatives for r in parsed_records] == [["negative a", "negative b"], ["random"], []]


# Tables


def test_a_row_with_line_breaks_is_named_by_its_first_line(tmp_path):
    """Quoted cells may hold delimiters, quotes and line breaks."""
    path = put(tmp_path / "a.csv", 'query,positive\nq1,"a, ""b""\n\nc"\n\nq2,\nq3,"d"\n')
    report = RecordReport("skip")
    assert list(read_records(path, report=report)) == [
        Record("q1", ['a, "b"\n\nc'], []),
        Record("q3", ["d"], []),
    ]
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
def test_a_delimiter_in_quotes_is_part_of_a_column_name(tmp_path, header, delimiter, names, end):
    path = put(tmp_path / "a.csv", f"{header}{end}first{delimiter}second{end}")
    cells = dict(zip(names, ["first", "second"], strict=True))
    assert [row for _, row in read_csv(path)] == [cells]
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
@pytest.mark.parametrize("column", range(3))
def test_a_list_in_a_cell_is_refused(tmp_path, cell, column):
    cells = ["q", "p", "n"]
    cells[column] = cell
    file = io.StringIO()
    csv.writer(file).writerows([["query", "positive", "negative"], cells])
    path = put(tmp_path / "a.csv", file.getvalue())
    with pytest.raises(DataError, match=r"a\.csv:2: a list in the cell of .*negative_1"):
        read(path)


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
    tmp_path, fields, min_score, end
):
    record = {"query": "q", "positive": "p", **fields}
    source = RecordSource(write_lines(tmp_path / "a.jsonl", [record]), min_score=min_score)
    list(source.records(RecordReport()))
    assert source.describe_first_record().endswith(end)


def test_brackets_in_a_cell_are_text(tmp_path):
    texts = ["[1] first", "['s Gravenhage] is a city", "see ['a']", "[sic]", "{x}", "[1, 2]"]
    path = put(tmp_path / "a.tsv", "query\tpositive\n" + "".join(f"q\t{text}\n" for text in texts))
    assert [record.positives for record in read(path)[0]] == [[text] for text in texts]


@pytest.mark.parametrize(
    ("fields", "role"),
    [
        ({"query": ["1", "2"], "positive": ["p", "r"]}, "query"),
        ({"query": ["q", "r"], "passage": ["p", "s"], "positive": ["1", "0"]}, "positives"),
        ({"query": ["q", "r"], "positive": ["p", "s"], "negative": ["0.8", "1e-05"]}, "negatives"),
    ],
)
def test_a_column_of_numbers_is_no_column_of_texts(tmp_path, fields, role):
    records = [
        dict(zip(fields, values, strict=True)) for values in zip(*fields.values(), strict=True)
    ]
    path = put(tmp_path / "a.jsonl", lines(records))
    for report in (RecordReport(), RecordReport("skip")):
        with pytest.raises(DataError, match=f"every text in {role} is a number"):
            list(read_records(path, report=report))


def test_some_numbers_among_the_texts_are_texts(tmp_path):
    records = [("when", "1945"), ("who", "Ada Lovelace"), ("how many", "3")]
    path = put(tmp_path / "a.jsonl", lines([{"query": q, "answer": a} for q, a in records]))
    assert [record.positives for record in read(path)[0]] == [[a] for _, a in records]


def test_a_column_name_that_occurs_twice_is_refused_with_its_line(tmp_path):
    path = put(tmp_path / "a.csv", 'query,positive,"positive"\nq,p,r\n')
    message = r"a\.csv:1: two columns have the same name: 'positive'"
    for on_bad_record in ("stop", "skip"):
        with pytest.raises(DataError, match=message):
            list(read_records(path, report=RecordReport(on_bad_record)))
    unnamed = put(tmp_path / "unnamed.csv", "query,positive,,\nq,p,,\n")
    assert read(unnamed)[0] == [Record("q", ["p"], [])]


def test_parquet_rows_are_numbered_across_row_groups(tmp_path):
    records = [
        {"query": f"q{i}", "pos": ["p", "p2"], "neg": [{"title": "T", "text": "n"}]}
        for i in range(7)
    ]
    records[5]["pos"] = ["p", None]
    report = RecordReport("skip")
    parsed_records = list(
        read_records(put_parquet(tmp_path / "a.parquet", records, row_group_size=2), report=report)
    )
    assert parsed_records[0] == Record("q0", ["p", "p2"], ["T n"]) and len(parsed_records) == 6
    assert report.first == f"{tmp_path / 'a.parquet'}:6" and report.by_reason == {"missing pos": 1}


def test_saved_datasets_are_read_by_split(tmp_path):
    from datasets import Dataset, DatasetDict

    both = DatasetDict({"train": Dataset.from_list(rows()), "dev": Dataset.from_list(rows()[:1])})
    both.save_to_disk(str(tmp_path / "both"))
    assert sniff_format(tmp_path / "both") == "hub" and read(tmp_path / "both")[0] == RECORDS
    assert read(tmp_path / "both", split="dev")[0] == RECORDS[:1]
    with pytest.raises(DataError, match=r"both: no split 'test'; it has train, dev"):
        read(tmp_path / "both", split="test")


@pytest.mark.parametrize("text", ["", " ", None])
def test_a_passage_may_consist_of_its_title(tmp_path, text):
    """`contaccum mine` writes such passages in the formats dpr and tevatron."""
    negatives = [{"title": "S", "text": text}]
    record = {"query": "q", "positive": {"docid": "1", "title": "T", "text": text}}
    path = put(tmp_path / "a.jsonl", lines([{**record, "negatives": negatives}]))
    assert read(path)[0] == [Record("q", ["T"], ["S"])]
    blank = {"query": "q", "positive": {"title": " ", "text": text}}
    with pytest.raises(DataError, match=":1: empty positive text"):
        read(put(tmp_path / "blank.jsonl", lines([blank])))
    absent = {"query": "q", "positive": {"title": "T"}}
    with pytest.raises(DataError, match=":1: missing positive text"):
        read(put(tmp_path / "absent.jsonl", lines([absent])))


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


def test_a_mapped_name_that_no_record_has_is_refused(tmp_path):
    """Under "skip" too: it is no fault of a record."""
    message = "no record has the field 'wrong'"
    sources = (
        put(tmp_path / "a.csv", "query,positive,Title\nq,p,T\nq2,p2,T\n"),
        put_parquet(tmp_path / "a.parquet"),
        put(tmp_path / "a.jsonl", lines(rows())),
    )
    for source in sources:
        report = RecordReport("skip")
        records = read_records(source, columns={"title": "wrong"}, report=report)
        with pytest.raises(DataError, match=message):
            list(records)


@pytest.mark.parametrize(
    ("source", "name", "config"), [("owner/set", "owner/set", None), ("set:part", "set", "part")]
)
def test_a_name_that_is_no_path_is_a_dataset_of_the_hub(monkeypatch, source, name, config):
    calls: list[Any] = []

    def load(*arguments: Any, **options: Any) -> Any:
        from datasets import Dataset

        calls.append((*arguments, options))
        return Dataset.from_list(rows())

    monkeypatch.setattr("datasets.load_dataset", load)
    assert read(source)[0] == RECORDS and calls == [(name, config, {"split": "train"})]
    assert load_training_data(source, num_hard_negatives=1).data_format == "hub"

    def refuse(*arguments: Any, **options: Any) -> Any:
        raise ValueError("Config name is missing.\nPlease pick one among: ['a', 'b']")

    monkeypatch.setattr("datasets.load_dataset", refuse)
    with pytest.raises(
        DataError,
        match=rf"^{source}: no such file or folder, and it cannot be loaded .*\['a', 'b'\]",
    ):
        read(source)


@pytest.mark.parametrize(
    ("name", "label"),
    [
        *[("label", label) for label in (0, "0", " 0.00", -1, False, "False")],
        *[("label", word) for word in ("no", "Not relevant", "non-relevant", "NEGATIVE")],
        *[(name, 0) for name in ("relevance", "score", "is_duplicate", "Is Relevant", "isMatch")],
    ],
)
def test_a_pair_with_label_0_is_no_match(tmp_path, name, label):
    pairs = [{"query": "q1", "positive": "p1", name: 1}]
    pairs.append({"query": "q2", "positive": "p2", name: label})
    path = put(tmp_path / "a.jsonl", lines(pairs))
    with pytest.raises(DataError, match=rf':2: a pair with {name} 0: .*"min_score": 1'):
        read(path)
    parsed_records, _ = read(path, min_score=1)
    assert [record.query for record in parsed_records] == ["q1"]


@pytest.mark.parametrize(
    ("fields", "min_score", "expected"),
    [
        ({"labels": [1, 0, 0]}, None, Record("q", ["a"], ["b", "c"])),
        ({"label": [False, True, True]}, None, Record("q", ["b", "c"], ["a"])),
        ({"Is Relevant": ["no", "no", "yes"]}, None, Record("q", ["c"], ["a", "b"])),
        ({"rating": [3, 1, 2]}, 2, Record("q", ["a", "c"], ["b"])),
        ({"label": [0, 1, 0], "neg": ["n", "c"]}, None, Record("q", ["b"], ["a", "c", "n"])),
        # Teacher scores are in the order of the passages.
        (
            {"label": [0, 1, 0], "scores": [5, 9, 7]},
            None,
            Record("q", ["b"], ["a", "c"], [9, 5, 7]),
        ),
        ({"labels": ["sports", "news"]}, None, Record("q", ["a", "b", "c"], [])),
        ({"label": 1}, None, Record("q", ["a", "b", "c"], [])),
    ],
)
@pytest.mark.parametrize("data_format", ["pairs", "dpr", "parquet"])
def test_a_list_of_labels_splits_the_passages(tmp_path, data_format, fields, min_score, expected):
    path = tmp_path / "data"
    records = [{"query": "q", "answer": ["a", "b", "c"], **fields}]
    if data_format == "parquet":
        put_parquet(path, records)
    else:
        put(path, lines(records) if data_format == "pairs" else json.dumps(records))
    assert sniff_format(path) == data_format
    assert read(path, min_score=min_score)[0] == [expected]


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
    tmp_path, labels, min_score, message
):
    record = {"query": "q", "answer": ["a", "b", "c"], "labels": [1, 0, 1]}
    path = put(tmp_path / "a.jsonl", lines([record, {**record, "labels": labels}]))
    with pytest.raises(DataError, match=rf"a\.jsonl:2: {message}"):
        read(path, min_score=min_score)
    report = RecordReport("skip")
    used = list(read_records(path, report=report, min_score=min_score))
    assert used == [Record("q", ["a", "c"], ["b"])]
    assert report.first == f"{path}:2"


@pytest.mark.parametrize("answer", ["a", {"text": "a"}])
def test_a_single_passage_may_have_a_list_of_one_label(tmp_path, answer):
    labels: list[list[int]] = [[1], [0], [0, 7], []]  # the last two are topics
    pairs = [{"query": f"q{i}", "answer": answer, "labels": row} for i, row in enumerate(labels)]
    path = put(tmp_path / "a.jsonl", lines(pairs))
    report = RecordReport("skip")
    queries = [record.query for record in read_records(path, report=report)]
    assert queries == ["q0", "q2", "q3"]
    assert report.by_reason == {"a pair with labels 0": 1}


def test_a_list_of_labels_without_a_match_is_left_out_by_min_score(tmp_path):
    pairs = [{"query": f"q{i}", "answer": ["a", "b"], "labels": [i, 0]} for i in (0, 1)]
    path = put(tmp_path / "a.jsonl", lines(pairs))
    parsed_records, report = read(path, min_score=1)
    assert parsed_records == [Record("q1", ["a"], ["b"])]
    assert report.by_reason == {"score below min_score": 1}


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
    from datasets import Dataset
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import BoW
    from sentence_transformers.util import mine_hard_negatives

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
    for query, positives, negatives, _ in records:
        assert positives == [f"{query} {query}"]
        assert len(negatives) == num_negatives
        assert set(negatives) <= set(pairs["answer"]) - set(positives)


def test_a_label_that_holds_teacher_scores_is_not_a_match_label(tmp_path):
    path = put(tmp_path / "a.jsonl", lines([{"query": "q", "positive": "p", "label": 0}]))
    parsed_records, _ = read(path, columns={"positive_scores": "label"})
    assert [record.query for record in parsed_records] == ["q"]


def test_negatives_may_be_numbered_from_0(tmp_path):
    record = {
        "query": "q",
        "positive": "p",
        "negative_0": "a",
        "negative_10": "c",
        "negative_2": "b",
    }
    parsed_records, _ = read(put(tmp_path / "a.jsonl", lines([record])))
    assert parsed_records == [Record("q", ["p"], ["a", "b", "c"])]


@pytest.mark.parametrize("split", ["corpus", "train"])
def test_a_saved_corpus_may_call_its_only_split_by_any_name(tmp_path, split):
    from datasets import Dataset, DatasetDict

    corpus = [{"_id": "d1", "text": "one"}]
    DatasetDict({split: Dataset.from_list(corpus)}).save_to_disk(str(tmp_path / "corpus"))
    passages = list(read_passages(tmp_path / "corpus", RecordReport()))
    assert passages == [Passage("d1", "", "one")]


@pytest.mark.parametrize("label", ["score", "label"])
def test_pairs_with_a_low_score_are_left_out_and_counted(tmp_path, label):
    pairs = [{"sentence1": f"q{score}", "sentence2": "p", label: score} for score in (0, 0.5, 1)]
    path = put(tmp_path / "a.jsonl", lines(pairs))
    with pytest.raises(DataError, match=r":1: a pair with a score: .*min_score"):
        read(path)
    parsed_records, report = read(path, min_score=0.5)
    assert [record.query for record in parsed_records] == ["q0.5", "q1"]
    assert report.by_reason == {"score below min_score": 1} and report.seen == 3
    with pytest.raises(DataError, match=r"missing score: its fields are .* --data_columns score=N"):
        read(put(tmp_path / "b.jsonl", lines([{"query": "q", "positive": "p"}])), min_score=1)
    with pytest.raises(ConfigError, match=r"BEIR data have no fields for .*min_score"):
        read(WRITERS["beir"](tmp_path), min_score=1)


def test_rows_of_empty_cells_are_blank_lines(tmp_path):
    """Excel writes such rows at the end of a sheet."""
    parsed_records, report = read(put(tmp_path / "a.csv", "query,positive\nq,p\n,\n"))
    assert parsed_records == [Record("q", ["p"], [])] and report.seen == 1


def test_blanks_before_quoted_cells_are_no_text(tmp_path):
    path = put(tmp_path / "a.csv", '"query", "positive"\n"q", "a, b"\n')
    assert read(path)[0] == [Record("q", ["a, b"], [])]


def test_a_name_that_begins_with_a_tilde_may_be_no_home_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    put(tmp_path / "~pairs.jsonl", lines([{"query": "q", "positive": "p"}]))
    assert read("~pairs.jsonl")[0] == [Record("q", ["p"], [])]


@pytest.mark.parametrize(
    "first_record",
    [
        {"question": "a b", "positive": None, "passage": "x"},
        {"query": "", "question": "", "positive": "x"},
    ],
    ids=["null", "empty"],
)
def test_a_bad_field_of_the_first_record_does_not_decide_the_names(tmp_path, first_record):
    good_records = [{"question": f"q {number}", "passage": "a text"} for number in range(5)]
    path = write_lines(tmp_path / "data.jsonl", [first_record, *good_records])
    records = list(read_records(path, report=RecordReport("skip")))
    queries = [record.query for record in records]
    assert queries[-5:] == [record["question"] for record in good_records]


def test_a_min_score_that_no_pair_reaches_is_named(tmp_path):
    record = {"query": "a b", "positive": "a text", "score": 0.5}
    path = write_lines(tmp_path / "data.jsonl", [record] * 3)
    with pytest.raises(DataError, match=r"no records left to use; .*3 score below min_score"):
        list(read_records(path, min_score=1))


def test_a_file_of_data_designer_is_read_with_a_record_for_each_question(tmp_path):
    row = {
        "file_name": ["a.txt"],
        "chunks": [{"chunk_id": n, "text": f"text {n}"} for n in (1, 2, 3)],
        "deduplicated_qa_pairs": [
            {"question": "first", "answer": "x", "segment_ids": [2], "hop_count": 1},
            {"question": "second", "answer": "y", "segment_ids": [1, 3], "hop_count": 2},
        ],
        "qa_evaluations": {"evaluations": []},
    }
    source = RecordSource(put(tmp_path / "a.jsonl", lines([row, row])))
    records = list(source.records(RecordReport()))
    assert [(each.query, each.positives) for each in records[:2]] == [
        ("first", ["text 2"]),
        ("second", ["text 1", "text 3"]),
    ]
    assert source.num_generated == len(records) == 4
    row["deduplicated_qa_pairs"][0]["segment_ids"] = [9]
    with pytest.raises(DataError, match=r"a\.jsonl:1: questions or chunks of another form"):
        read(put(tmp_path / "a.jsonl", lines([row])))
