"""Invariants of training data: the same columns from every format, exact line numbers, no record lost."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from contaccum.data import load_training_data, shipped_scifact
from contaccum.data.records import BadRecord
from contaccum.errors import ConfigError, DataError

PAIRS = [{"query": "q1", "positive": "p1"}, {"query": "q2", "positive": "p2"}]


def write_lines(path: Path, records: list, end: str = "\n", mark: str = "") -> Path:
    lines = [r if isinstance(r, str) else json.dumps(r, ensure_ascii=False) for r in records]
    content = (mark + end.join(lines) + end).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def write_array(path: Path, records: list) -> Path:
    lines = [r if isinstance(r, str) else json.dumps(r) for r in records]
    content = ("[\n" + ",\n".join(lines) + "\n]").encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def dpr(question="q", positives=(("T", "p"),), hard=(("H", "n1"), ("", "n2"))) -> dict:
    def contexts(items):
        return [{"title": title, "text": text, "score": 0} for title, text in items]

    return {
        "question": question,
        "answers": ["a"],
        "positive_ctxs": contexts(positives),
        "negative_ctxs": contexts([("N", "easy")]),
        "hard_negative_ctxs": contexts(hard),
    }


def test_pairs_come_out_in_order_as_text_columns(tmp_path):
    data = load_training_data(write_lines(tmp_path / "some.pairs.jsonl", PAIRS))
    assert data.dataset.column_names == ["query", "positive"]
    assert data.dataset.to_list() == PAIRS
    assert {f.dtype for f in data.dataset.features.values()} == {"string"}
    assert (data.data_format, data.name) == ("pairs", "some.pairs")
    assert (data.report.seen, data.report.used, data.report.reported) == (2, 2, 0)


@pytest.mark.parametrize("query", ["query", "anchor", "question"])
@pytest.mark.parametrize("positive", ["positive", "passage", "answer", "text", "document", "pos"])
def test_every_usual_field_name_is_understood_and_others_are_ignored(tmp_path, query, positive):
    records = [{"id": 7, query: "q", "title": "T", positive: "p", "score": 0.5}]
    data = load_training_data(write_lines(tmp_path / "a.jsonl", records))
    assert data.dataset.to_list() == [{"query": "q", "positive": "T p"}]


NEGATIVES = [
    {"negative": "n1"},
    {"neg": ["n1", "n2"]},
    {"negatives": ["n1", {"title": "", "text": "n2"}]},
    {"negative_1": "n1", "negative_2": "n2", "negative_3": None},
]


@pytest.mark.parametrize("negatives", NEGATIVES)
def test_hard_negatives_are_the_first_h_in_their_own_columns(tmp_path, negatives):
    path = write_lines(tmp_path / "a.jsonl", [{"query": "q", "positive": "p", **negatives}])
    one = load_training_data(path, num_hard_negatives=1, draw_negatives=False)
    assert one.data_format == "triplets" and one.transform is None
    assert one.dataset.column_names == ["query", "positive", "negative_1"]
    assert one.dataset[0]["negative_1"] == "n1"
    none = load_training_data(path)
    assert none.dataset.column_names == ["query", "positive"]
    assert none.report.notes == {"negatives not used, num_hard_negatives is 0": 1}
    if "negative" not in negatives:
        two = load_training_data(path, num_hard_negatives=2).dataset
        assert two.to_list() == [{"query": "q", "positive": "p", "negative_1": "n1", "negative_2": "n2"}]
    with pytest.raises(DataError, match=r"a\.jsonl:1: too few hard negatives.*\(lower num_hard_negatives"):
        load_training_data(path, num_hard_negatives=3, missing_negatives="stop")


def test_the_stored_positive_is_the_first(tmp_path):
    records = [{"query": "q", "pos": [{"title": "T", "text": "p1"}, "p2"], "neg": ["n"]}]
    for positives in ("draw", "first"):
        path = write_lines(tmp_path / "a.jsonl", records)
        data = load_training_data(path, title_separator=" | ", positives=positives)
        assert data.dataset.to_list() == [{"query": "q", "positive": "T | p1", "label": 0}]


BAD_PAIRS = [
    ('{"query": "q"', "broken JSON"),
    ('{"query": "q", "positive": NaN}', "broken JSON"),
    ("[]", "not a JSON object"),
    ('{"positive": "p"}', "missing query"),
    ('{"query": "q"}', "missing positive"),
    ('{"query": "q", "text": "another field than in the records before"}', "missing positive"),
    ('{"query": null, "positive": "p"}', "missing query"),
    ('{"query": " ", "positive": "p"}', "empty query"),
    ('{"query": 1, "positive": "p"}', "query is not text"),
    ('{"query": "q", "positive": ""}', "empty positive"),
    ('{"query": "q", "positive": []}', "empty positive"),
    ('{"query": "q", "positive": {"title": "t"}}', "missing positive text"),
    ('{"query": "q", "positive": "\\udc00"}', "positive is not valid Unicode"),
    ('{"query": "q", "positive": "p", "title": 3}', "title is not text"),
]


@pytest.mark.parametrize(("bad", "reason"), BAD_PAIRS)
def test_every_bad_pair_names_its_line_and_reason(tmp_path, bad, reason):
    path = write_lines(tmp_path / "a.jsonl", [PAIRS[0], "", bad, PAIRS[1]])
    with pytest.raises(DataError) as caught:
        load_training_data(path)
    assert str(caught.value).startswith(f"{path}:3: {reason}")
    assert "\n" not in str(caught.value) and "--on_bad_record skip" in str(caught.value)
    data = load_training_data(path, on_bad_record="skip")
    assert data.dataset.to_list() == PAIRS
    assert data.report.entries == [BadRecord(str(path), 3, reason)]
    assert (data.report.seen, data.report.used, data.report.reported) == (3, 2, 1)


BAD_NEGATIVES = [
    ({}, "too few hard negatives"),
    ({"negative": None}, "too few hard negatives"),
    ({"negatives": []}, "too few hard negatives"),
    ({"negative": ""}, "empty negatives"),
    ({"negative": 4}, "negatives is not text"),
    ({"negatives": [{"title": "t"}]}, "missing negatives text"),
]


@pytest.mark.parametrize(("negatives", "reason"), BAD_NEGATIVES)
def test_every_bad_negative_names_its_line_and_reason(tmp_path, negatives, reason):
    good = {**PAIRS[0], "negative": "n"}
    path = write_lines(tmp_path / "a.jsonl", [good, {**PAIRS[1], **negatives}])
    settings = {"num_hard_negatives": 1, "missing_negatives": "stop"}
    with pytest.raises(DataError) as caught:
        load_training_data(path, **settings)
    assert str(caught.value).startswith(f"{path}:2: {reason}")
    data = load_training_data(path, on_bad_record="skip", **settings)
    assert data.dataset.to_list() == [{"query": "q1", "positive": "p1", "negative_1": "n"}]
    assert data.report.entries == [BadRecord(str(path), 2, reason)]
    # Nobody asked for negatives: none is looked at.
    assert len(load_training_data(path).dataset) == 2


def test_first_record_without_known_fields_is_told_which_names_are_known(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"q": "x", "p": "y"}, PAIRS[0]])
    with pytest.raises(DataError, match=r":1: missing query: its fields are 'q, p' \(name it one of query, a"):
        load_training_data(path)
    assert load_training_data(path, on_bad_record="skip").dataset.to_list() == PAIRS[:1]


def test_repeated_pairs_are_kept_and_noted(tmp_path):
    data = load_training_data(write_lines(tmp_path / "a.jsonl", [*PAIRS, PAIRS[0], PAIRS[0]]))
    assert len(data.dataset) == 4
    assert data.report.notes == {"pairs that occur again, kept": 2} and data.report.reported == 0


def test_fingerprint_is_of_the_texts_whatever_holds_them(tmp_path):
    plain = load_training_data(write_lines(tmp_path / "a.jsonl", PAIRS))
    packed = load_training_data(write_lines(tmp_path / "b.jsonl.gz", PAIRS, end="\r\n", mark="\ufeff"))
    records = [dpr(r["query"], [("", r["positive"])]) for r in PAIRS]
    array = load_training_data(write_array(tmp_path / "c.json.gz", records))
    assert plain.fingerprint == packed.fingerprint == array.fingerprint and len(plain.fingerprint) == 64
    assert plain.dataset.to_list() == packed.dataset.to_list() == array.dataset.to_list()
    assert packed.name == "b" and array.name == "c"
    other = load_training_data(write_lines(tmp_path / "d.jsonl", PAIRS[::-1]))
    assert other.fingerprint != plain.fingerprint


@pytest.mark.parametrize("name", ["a.json", "a.json.gz", "a.data"])
def test_dpr_gives_first_positive_and_first_hard_negatives_with_titles(tmp_path, name):
    path = write_array(tmp_path / name, [dpr("q1", [("T", "p"), ("U", "other")]), dpr("q2")])
    data = load_training_data(path, num_hard_negatives=2, positives="first", draw_negatives=False)
    assert data.data_format == "dpr"
    assert data.dataset.to_list() == [
        {"query": "q1", "positive": "T p", "negative_1": "H n1", "negative_2": "n2", "label": 0},
        {"query": "q2", "positive": "T p", "negative_1": "H n1", "negative_2": "n2", "label": 1},
    ]
    assert load_training_data(path).dataset.column_names == ["query", "positive", "label"]


BAD_DPR = [
    ('{"question": "q", "positive_ctxs": NaN}', "broken JSON"),
    ('"q"', "not a JSON object"),
    ({k: v for k, v in dpr().items() if k != "question"}, "missing question"),
    (dpr(" "), "empty question"),
    (dpr(positives=()), "empty positive_ctxs"),
    ({k: v for k, v in dpr().items() if k != "positive_ctxs"}, "missing positive_ctxs"),
    ({**dpr(), "positive_ctxs": "p"}, "positive_ctxs is not a list"),
    ({**dpr(), "positive_ctxs": [5]}, "positive_ctxs is not text"),
    ({**dpr(), "positive_ctxs": [{"title": "T"}]}, "missing positive_ctxs text"),
    (dpr(positives=[("T", "")]), "empty positive_ctxs text"),
    ({**dpr(hard=()), "negative_ctxs": []}, "too few hard negatives"),
    ({k: v for k, v in dpr().items() if not k.endswith("negative_ctxs")}, "too few hard negatives"),
    ({**dpr(), "hard_negative_ctxs": {}}, "hard_negative_ctxs is not a list"),
    (dpr(hard=[("T", "")]), "empty hard_negative_ctxs text"),
]


@pytest.mark.parametrize(("bad", "reason"), BAD_DPR)
def test_every_bad_dpr_record_names_its_line_and_reason(tmp_path, bad, reason):
    path = write_array(tmp_path / "a.json", [dpr("q1"), bad, dpr("q2")])
    settings = {"num_hard_negatives": 1, "missing_negatives": "stop"}
    with pytest.raises(DataError) as caught:
        load_training_data(path, **settings)
    assert str(caught.value).startswith(f"{path}:3: {reason}")
    data = load_training_data(path, on_bad_record="skip", **settings)
    assert data.dataset["query"][:] == ["q1", "q2"]
    assert data.report.entries == [BadRecord(str(path), 3, reason)]
    assert (data.report.seen, data.report.used, data.report.reported) == (3, 2, 1)


def test_broken_dpr_json_names_the_line_of_the_break(tmp_path):
    path = tmp_path / "a.json"
    path.write_text(json.dumps([dpr("q1"), dpr("q2")], indent=1)[:-30])
    lines = path.read_text().count("\n") + 1
    with pytest.raises(DataError, match=rf"a\.json:{lines}: broken JSON: .*in record 2"):
        load_training_data(path)
    assert load_training_data(path, on_bad_record="skip").dataset["query"][:] == ["q1"]


def test_shipped_scifact_gives_one_row_for_each_positive_judgement():
    data = load_training_data(shipped_scifact())
    assert data.data_format == "beir" and data.name == "scifact"
    assert len(data.dataset) == 919
    # 809 judged claims, two of which occur under two ids each.
    assert len(set(data.dataset["query"])) == 807
    assert data.report.reported == 0
    first = data.dataset[0]
    assert first["query"] == "0-dimensional biomaterials lack inductive properties."
    assert first["positive"].startswith("New opportunities: the use of nanotechnologies")
    assert len(load_training_data(shipped_scifact(), split="test").dataset) == 339


def make_beir(folder: Path, corpus: list[dict]) -> Path:
    (folder / "qrels").mkdir(parents=True)
    write_lines(folder / "corpus.jsonl", corpus)
    write_lines(folder / "queries.jsonl", [{"_id": "q1", "text": "query"}])
    (folder / "qrels" / "dev.tsv").write_text("q1\td1\t2\nq1\td2\t0\n")
    return folder


def test_beir_judgements_of_zero_are_no_pairs_and_are_noted(tmp_path):
    corpus = [{"_id": "d1", "title": "T", "text": "one"}, {"_id": "d2", "text": "two"}]
    data = load_training_data(make_beir(tmp_path / "b", corpus), split="dev", title_separator=": ")
    assert data.dataset.to_list() == [{"query": "query", "positive": "T: one"}]
    assert data.report.notes == {"judgements of 0 or less, not a pair": 1}


def test_empty_beir_document_is_bad_for_training(tmp_path):
    folder = make_beir(tmp_path / "b", [{"_id": "d1", "text": "one"}, {"_id": "d2", "text": ""}])
    with pytest.raises(DataError, match=r"corpus\.jsonl:2: empty document"):
        load_training_data(folder, split="dev")
    data = load_training_data(folder, split="dev", on_bad_record="skip")
    assert len(data.dataset) == 1
    assert data.report.by_reason == {"empty document": 1, "unknown document": 1}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_hard_negatives": 1}, "data_format=beir has no hard negatives"),
        ({"data_format": "pairs", "num_hard_negatives": 2}, "data_format=pairs has no hard negatives"),
        ({"data_format": "xlsx"}, "'xlsx' is unknown"),
        ({"num_hard_negatives": -1}, "num_hard_negatives=-1"),
        ({"num_hard_negatives": True}, "num_hard_negatives=True"),
        ({"on_bad_record": "drop"}, "'drop' is unknown"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        load_training_data(shipped_scifact(), **settings)


def test_format_can_be_given_where_the_content_does_not_tell(tmp_path):
    path = write_lines(tmp_path / "a.txt", ["# not JSON", *PAIRS])
    with pytest.raises(DataError, match=r"a\.txt:1: neither JSON lines nor a JSON array; it starts with '# not"):
        load_training_data(path, on_bad_record="skip")
    data = load_training_data(path, data_format="pairs", on_bad_record="skip")
    assert data.dataset.to_list() == PAIRS and data.report.reported == 1


def test_first_line_in_brackets_does_not_turn_jsonl_into_dpr(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", ["[1, 2]", *PAIRS])
    with pytest.raises(DataError, match=r"a\.jsonl:1: not a JSON object"):
        load_training_data(path)


def test_wrong_kind_of_path_is_one_clear_error(tmp_path):
    (tmp_path / "folder").mkdir()
    file = write_lines(tmp_path / "a.jsonl", PAIRS)
    for path, data_format, message in [
        (tmp_path / "nothing.jsonl", None, "no such file"),
        (tmp_path / "nothing", "beir", "no such folder"),
        (tmp_path / "folder", None, "a folder without corpus.jsonl"),
        (tmp_path / "folder", "dpr", "is a directory"),
        (tmp_path / "folder", "triplets", "is a directory"),
        (file, "beir", "is a file, a folder is expected"),
        (file, "dpr", ":1: not a JSON array"),
    ]:
        with pytest.raises(DataError, match=message):
            load_training_data(path, data_format=data_format)


@pytest.mark.parametrize("content", ["", "[]", "[1]", '{"query": "q"}\n{"query": "r"}\n'])
def test_nothing_left_is_an_error_under_skip_too(tmp_path, content):
    path = tmp_path / "a.json"
    path.write_text(content)
    with pytest.raises(DataError, match=r"the file is empty|no training pairs left to use"):
        load_training_data(path, on_bad_record="skip")
