"""Teacher scores: read from every field, and kept with their passage by cache and sampling."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from data_files import WRITERS, put, put_lines, put_parquet, read

from contaccum.data import load_training_data
from contaccum.data.dataset import load_training_sets
from contaccum.data.sampling import decode, text_ids
from contaccum.errors import ConfigError, DataError


def make_passages(*texts: str, scores: tuple[float, ...]) -> list[dict[str, Any]]:
    """Return passage objects, each with its score."""
    return [{"text": text, "score": score} for text, score in zip(texts, scores, strict=True)]


# In the format of FlagEmbedding
FLAG_RECORD = {
    "query": "q",
    "pos": ["p", "o"],
    "neg": ["m", "n"],
    "pos_scores": [4, 3.5],
    "neg_scores": [1, -2.0],
}
# The same record in several formats
SAME_RECORDS: list[dict[str, object]] = [
    FLAG_RECORD,
    {"query": "q", "positive": ["p", "o"], "negatives": ["m", "n"], "scores": [4, 3.5, 1, -2]},
    {
        "query": "q",
        "positive_passages": make_passages("p", "o", scores=(4, 3.5)),
        "negative_passages": make_passages("m", "n", scores=(1, -2)),
    },
    {
        "question": "q",
        "positive_ctxs": make_passages("p", "o", scores=(4, 3.5)),
        # The field negative_scores has precedence.
        "hard_negative_ctxs": make_passages("m", "n", scores=(9, 9)),
        "negative_scores": ["1", "-2.0"],
    },
]


@pytest.mark.parametrize("record", SAME_RECORDS)
def test_every_way_to_write_scores_is_read(tmp_path, record):
    expected = ("q", ["p", "o"], ["m", "n"], [4.0, 3.5, 1.0, -2.0])
    assert read(put_lines(tmp_path / "a.jsonl", record))[0] == [expected]
    assert read(put_parquet(tmp_path / "a.parquet", [record]))[0] == [expected]


def test_a_table_has_a_score_in_a_cell_and_a_mapping_names_them(tmp_path):
    table = "query,positive,negative,good,bad\nq,p,n,3,0.5\n"
    columns = {"positive_scores": "good", "negative_scores": "bad"}
    records, _ = read(put(tmp_path / "a.csv", table), columns=columns)
    assert records == [("q", ["p"], ["n"], [3.0, 0.5])]


BROKEN = [
    {"neg_scores": [1]},
    {"pos_scores": [1, None]},
    {"pos_scores": None},
    {"neg_scores": [1, float("nan")]},
    {"neg_scores": [1, 1e300]},  # too large for float32
    # Four scores for four passages, but not two and two
    {"pos_scores": [1, 2, 3], "neg_scores": [4]},
]


@pytest.mark.parametrize("broken", BROKEN)
def test_a_record_without_all_scores_is_bad_if_scores_are_needed(tmp_path, broken):
    good_record = {**FLAG_RECORD, "query": "s"}
    broken_record = {**FLAG_RECORD, "query": "r", **broken}
    path = put_lines(tmp_path / "a.jsonl", FLAG_RECORD, broken_record, good_record)
    records, _ = read(path)
    assert [record.scores is None for record in records] == [False, True, False]
    remedy = r"contaccum mine --cross_encoder writes scores.*--on_bad_record skip\)$"
    with pytest.raises(DataError, match=r"a\.jsonl:2: no teacher scores: .*" + remedy):
        load_training_data(path, num_hard_negatives=2, teacher_scores=True)
    data = load_training_data(path, num_hard_negatives=2, teacher_scores=True, on_bad_record="skip")
    assert [row["query"] for row in data.dataset] == [FLAG_RECORD["query"], "s"]
    assert "1 no teacher scores; first: " in data.report.summary()
    data_without_scores = load_training_data(path, num_hard_negatives=2)
    assert len(data_without_scores.dataset) == 3


def make_scored_records(num_positives: int) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Return nine records with five negatives each, and {passage: score}.

    No two passages have the same score, and float32 represents each score exactly.
    """
    records = []
    score_by_passage = {}
    for i in range(9):
        positives = {f"p{i}_{k}": 10 * i + k + 0.5 for k in range(num_positives)}
        negatives = {f"n{i}_{k}": 10 * i + k - 0.25 for k in range(5)}
        record = {"query": f"q{i}"}
        for side, scores in (("pos", positives), ("neg", negatives)):
            record |= {side: list(scores), f"{side}_scores": list(scores.values())}
        records.append(record)
        score_by_passage |= positives | negatives
    return records, score_by_passage


@pytest.mark.parametrize("has_ids", [False, True])
def test_each_passage_that_an_epoch_draws_has_its_own_score(tmp_path, has_ids):
    # Labels contain text ids if a query has several positives.
    records, score_by_passage = make_scored_records(num_positives=3 if has_ids else 1)
    path = put_lines(tmp_path / "a.jsonl", *records)
    data = load_training_data(path, num_hard_negatives=2, teacher_scores=True)
    drawn: set[str] = set()
    for epoch in range(5):
        data.transform.set_epoch(epoch, 3)
        labels = []
        expected_ids = []
        expected_scores = []
        for row in data.dataset:
            passages = [row["positive"], row["negative_1"], row["negative_2"]]
            labels.append(row["label"])
            expected_ids.append(text_ids([row["query"], *passages]).tolist())
            expected_scores.append([score_by_passage[passage] for passage in passages])
            drawn.update(passages)
        decoded = decode(torch.tensor(labels), 4)
        assert decoded.teacher_scores.tolist() == expected_scores
        if has_ids:
            assert decoded.text_ids.tolist() == expected_ids
        else:
            assert decoded.text_ids is None
    # The passages differ between epochs: one epoch has at most 9 * 3 of them.
    assert len(drawn) > 40
    row_with_one_negative = data.dataset.remove_columns("negative_1")[0]
    # Two scores, after three ids if there are any
    assert len(row_with_one_negative["label"]) == (5 if has_ids else 2)


def test_a_text_in_two_roles_has_the_score_of_each_role(tmp_path):
    record = {"query": "q", "positive": "p", "negatives": ["p", "n"], "scores": [9, 1, 2]}
    path = put_lines(tmp_path / "a.jsonl", record)
    (row,) = load_training_data(path, num_hard_negatives=2, teacher_scores=True).dataset
    assert [row["positive"], row["negative_1"], row["negative_2"]] == ["p", "p", "n"]
    assert row["label"] == [9.0, 1.0, 2.0]


def test_the_first_score_of_a_repeated_text_counts(tmp_path):
    positives = {"pos": ["p", "o", "p"], "pos_scores": [9, 8, 7]}
    negatives = {"neg": ["n", "n", "m"], "neg_scores": [3, 2, 1]}
    path = put_lines(tmp_path / "a.jsonl", {"query": "q", **positives, **negatives})
    data = load_training_data(path, positives="first", num_hard_negatives=2, teacher_scores=True)
    (row,) = data.dataset
    scores = decode(torch.tensor([row["label"]]), 4).teacher_scores
    assert scores[0, 0] == 9
    assert scores[0, 1:].tolist() == ([3, 1] if row["negative_1"] == "n" else [1, 3])


def test_scores_count_for_the_fingerprint_where_they_are_used(tmp_path):
    path = put_lines(tmp_path / "0.jsonl", {**FLAG_RECORD, "neg_scores": [0, 0]})
    path_with_other_score = put_lines(tmp_path / "1.jsonl", {**FLAG_RECORD, "neg_scores": [1, 0]})

    def load_fingerprint(path: Path, teacher_scores: bool) -> str:
        data = load_training_data(path, num_hard_negatives=2, teacher_scores=teacher_scores)
        return data.fingerprint

    assert load_fingerprint(path, True) != load_fingerprint(path_with_other_score, True)
    assert load_fingerprint(path, False) == load_fingerprint(path_with_other_score, False)


def test_the_summary_names_sets_with_unused_scores(tmp_path):
    scored_set = {"path": put_lines(tmp_path / "with.jsonl", FLAG_RECORD)}
    # The score of a pair is not a teacher score.
    scored_pair = {"query": "q", "positive": "p", "negative": "n", "score": 3}
    pairs_set = {"path": put_lines(tmp_path / "without.jsonl", scored_pair)}
    sets = load_training_sets({"with": scored_set, "without": pairs_set})
    line_with, line_without = sets.summary().splitlines()
    assert line_with.endswith("set distill)")
    assert not line_without.endswith("set distill)")
    distilled_sets = load_training_sets({"with": scored_set}, teacher_scores=True)
    assert "set distill" not in distilled_sets.summary()


def test_filling_with_passages_without_scores_is_refused(tmp_path):
    record_with_one_negative = {**FLAG_RECORD, "query": "r", "neg": ["m"], "neg_scores": [1]}
    path = put_lines(tmp_path / "a.jsonl", FLAG_RECORD, record_with_one_negative)
    message = r"a\.jsonl: 1 records have fewer than num_hard_negatives=2 .*=drop"
    with pytest.raises(DataError, match=message):
        load_training_data(path, num_hard_negatives=2, teacher_scores=True)
    data = load_training_data(
        path, num_hard_negatives=2, teacher_scores=True, missing_negatives="drop"
    )
    assert len(data.dataset) == 1


def test_teacher_scores_are_refused_for_beir_folders(tmp_path):
    path = WRITERS["beir"](tmp_path)
    with pytest.raises(ConfigError, match=r"BEIR data have no fields for .*distill"):
        load_training_data(path, teacher_scores=True)


def test_the_bm25_scores_of_published_dpr_files_are_not_called_teacher_scores(tmp_path):
    passage = {"title": "T", "text": "p", "score": 1000}
    record = {"question": "q", "positive_ctxs": [passage], "hard_negative_ctxs": []}
    path = tmp_path / "dpr.json"
    path.write_text(json.dumps([record]), encoding="utf-8")
    assert load_training_data(path).unused == []
