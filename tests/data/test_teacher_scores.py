"""Teacher scores: read from every field, and kept with their passage by cache and sampling."""

import json
from itertools import product
from typing import Any

import pytest
import torch
from data_files import WRITERS, put, put_lines, put_parquet, read

from contaccum.data import load_training_data
from contaccum.data.dataset import load_training_sets
from contaccum.data.sampling import text_ids
from contaccum.errors import ConfigError, DataError
from contaccum.losses.distillation import split_labels


def passages(*texts: str, scores: tuple[float, ...]) -> list[dict[str, Any]]:
    return [{"text": text, "score": score} for text, score in zip(texts, scores, strict=True)]


FLAG = {
    "query": "q",
    "pos": ["p", "o"],
    "neg": ["m", "n"],
    "pos_scores": [4, 3.5],
    "neg_scores": [1, -2.0],
}
SAME: list[dict[str, object]] = [
    FLAG,
    {"query": "q", "positive": ["p", "o"], "negatives": ["m", "n"], "scores": [4, 3.5, 1, -2]},
    {
        "query": "q",
        "positive_passages": passages("p", "o", scores=(4, 3.5)),
        "negative_passages": passages("m", "n", scores=(1, -2)),
    },
    {
        "question": "q",
        "positive_ctxs": passages("p", "o", scores=(4, 3.5)),
        "hard_negative_ctxs": passages("m", "n", scores=(9, 9)),
        "negative_scores": ["1", "-2.0"],
    },
]


@pytest.mark.parametrize("record", SAME)
def test_every_way_to_write_scores_is_read(tmp_path, record):
    for path in (
        put_lines(tmp_path / "a.jsonl", record),
        put_parquet(tmp_path / "a.parquet", [record]),
    ):
        (record_read,) = read(path)[0]
        assert record_read == ("q", ["p", "o"], ["m", "n"], [4.0, 3.5, 1.0, -2.0])


def test_a_table_has_a_score_in_a_cell_and_a_mapping_names_them(tmp_path):
    table = "query,positive,negative,good,bad\nq,p,n,3,0.5\n"
    columns = {"positive_scores": "good", "negative_scores": "bad"}
    assert read(put(tmp_path / "a.csv", table), columns=columns)[0] == [
        ("q", ["p"], ["n"], [3.0, 0.5])
    ]


BROKEN = [
    {"neg_scores": [1]},
    {"neg_scores": [1, "much"]},
    {"pos_scores": [1, None]},
    {"pos_scores": None},
    {"neg_scores": [1, float("nan")]},
    {"neg_scores": [1, 10**400]},
    {"neg_scores": [1, 1e300]},
    {"pos_scores": [1, 2, 3], "neg_scores": [4]},
]


@pytest.mark.parametrize("broken", BROKEN)
def test_a_record_without_all_scores_is_bad_if_scores_are_needed(tmp_path, broken):
    path = put_lines(
        tmp_path / "a.jsonl", FLAG, {**FLAG, "query": "r", **broken}, {**FLAG, "query": "s"}
    )
    assert [record.scores is None for record in read(path)[0]] == [False, True, False]
    mend = r"contaccum mine --cross_encoder writes scores.*--on_bad_record skip\)$"
    with pytest.raises(DataError, match=r"a\.jsonl:2: no teacher scores: .*" + mend):
        load_training_data(path, num_hard_negatives=2, teacher_scores=True)
    data = load_training_data(path, num_hard_negatives=2, teacher_scores=True, on_bad_record="skip")
    assert len(data.dataset) == 2 and "1 no teacher scores; first: " in data.report.summary()
    assert len(load_training_data(path, num_hard_negatives=2).dataset) == 3


@pytest.mark.parametrize("ids", [False, True])
def test_each_passage_that_an_epoch_draws_has_its_own_score(tmp_path, ids):
    places = product(range(9), range(5), (("p", 0.5), ("n", -0.25)))
    score_of = {f"{prefix}{i}_{k}": 10 * i + k + shift for i, k, (prefix, shift) in places}
    records = []
    for i in range(9):
        positives, negatives = (
            [f"{prefix}{i}_{k}" for k in range(n)]
            for prefix, n in (("p", 3 if ids else 1), ("n", 5))
        )
        scores = {
            "pos_scores": [score_of[x] for x in positives],
            "neg_scores": [score_of[x] for x in negatives],
        }
        records.append({"query": f"q{i}", "pos": positives, "neg": negatives, **scores})
    path = put_lines(tmp_path / "a.jsonl", *records)
    data = load_training_data(path, num_hard_negatives=2, teacher_scores=True)
    drawn = set()
    for epoch in range(5):
        data.transform.set_epoch(epoch, 3)
        rows = list(data.dataset)
        texts = [
            [row[name] for name in ("query", "positive", "negative_1", "negative_2")]
            for row in rows
        ]
        label_ids, scores = split_labels(torch.tensor([row["label"] for row in rows]), 4)
        assert scores is not None and scores.tolist() == [
            [score_of[text] for text in row[1:]] for row in texts
        ]
        assert (None if label_ids is None else label_ids.tolist()) == (
            [text_ids(x).tolist() for x in texts] if ids else None
        )
        drawn |= {text for row in texts for text in row[1:]}
    assert len(drawn) > 40
    narrow = data.dataset.remove_columns("negative_1")[0]
    assert len(narrow["label"]) == (5 if ids else 2)


def test_a_negative_that_a_record_lists_twice_is_one_negative_with_a_score(tmp_path):
    record = {"query": "q", "positive": "p", "negatives": ["n", "n"], "scores": [3, 2, 1]}
    path = put_lines(tmp_path / "a.jsonl", record)
    data = load_training_data(path, num_hard_negatives=1, teacher_scores=True)
    expected = {"query": "q", "positive": "p", "negative_1": "n", "label": [3.0, 2.0]}
    assert list(data.dataset) == [expected]
    with pytest.raises(DataError, match="1 records have fewer than num_hard_negatives=2"):
        load_training_data(path, num_hard_negatives=2, teacher_scores=True)


def test_a_text_in_two_roles_has_the_score_of_each_role(tmp_path):
    record = {"query": "q", "positive": "p", "negatives": ["p", "n"], "scores": [9, 1, 2]}
    path = put_lines(tmp_path / "a.jsonl", record)
    (row,) = load_training_data(path, num_hard_negatives=2, teacher_scores=True).dataset
    assert [row[name] for name in ("positive", "negative_1", "negative_2")] == ["p", "p", "n"]
    assert row["label"] == [9.0, 1.0, 2.0]


def test_the_first_score_of_a_repeated_text_counts(tmp_path):
    positives = {"pos": ["p", "o", "p"], "pos_scores": [9, 8, 7]}
    negatives = {"neg": ["n", "n", "m"], "neg_scores": [3, 2, 1]}
    path = put_lines(tmp_path / "a.jsonl", {"query": "q", **positives, **negatives})
    data = load_training_data(
        path, positives="first", num_hard_negatives=1, negatives_from=1, teacher_scores=True
    )
    _, scores = split_labels(torch.tensor([row["label"] for row in data.dataset]), 3)
    assert scores is not None
    assert scores.tolist() == [[9.0, 3.0]]


def test_scores_count_for_the_fingerprint_where_they_are_used(tmp_path):
    paths = [put_lines(tmp_path / f"{i}.jsonl", {**FLAG, "neg_scores": [i, 0]}) for i in range(2)]
    for used, count in ((True, 2), (False, 1)):
        data = [
            load_training_data(path, num_hard_negatives=2, teacher_scores=used) for path in paths
        ]
        assert len({part.fingerprint for part in data}) == count


def test_the_summary_names_sets_with_unused_scores(tmp_path):
    names = {"with": FLAG, "without": {"query": "q", "positive": "p", "negative": "n", "score": 3}}
    sets = {
        name: {"path": put_lines(tmp_path / f"{name}.jsonl", record)}
        for name, record in names.items()
    }
    lines = load_training_sets(sets).summary().splitlines()
    assert [line.endswith("set distill)") for line in lines] == [
        True,
        False,
    ]
    assert (
        load_training_sets({"with": sets["with"]}, teacher_scores=True)
        .summary()
        .endswith("1 used, 0 left out")
    )


def test_filling_with_passages_without_scores_is_refused(tmp_path):
    path = put_lines(
        tmp_path / "a.jsonl", FLAG, {**FLAG, "query": "r", "neg": ["m"], "neg_scores": [1]}
    )
    with pytest.raises(
        DataError, match=r"a\.jsonl: 1 records have fewer than num_hard_negatives=2 .*=drop"
    ):
        load_training_data(path, num_hard_negatives=2, teacher_scores=True)
    data = load_training_data(
        path, num_hard_negatives=2, teacher_scores=True, missing_negatives="drop"
    )
    assert len(data.dataset) == 1
    for name in ("beir", "msmarco"):
        with pytest.raises(ConfigError, match=f"{name} data have no teacher scores"):
            load_training_data(WRITERS[name](tmp_path), teacher_scores=True)


def test_the_bm25_scores_of_published_dpr_files_are_not_called_teacher_scores(tmp_path):
    passage = {"title": "T", "text": "p", "score": 1000}
    record = {"question": "q", "positive_ctxs": [passage], "hard_negative_ctxs": []}
    path = tmp_path / "dpr.json"
    path.write_text(json.dumps([record]), encoding="utf-8")
    assert load_training_data(path).unused_scores is False
