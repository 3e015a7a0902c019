"""Files of mined negatives: read back as they were mined, free of known positives, whole or not there."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mining_files import write_beir, write_lines

from contaccum.data import load_training_data
from contaccum.data.pairs import DATA_FORMATS
from contaccum.errors import DataError
from contaccum.mining import SelectionRules, load_mining_data, mine_hard_negatives, write_mined
from contaccum.mining.writer import OUTPUT_FORMATS


def mine(model, data, **rules):
    return mine_hard_negatives(model, data, rules=SelectionRules(**rules), show_progress=False)


def lines_of(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def folded(text):
    return " ".join(text.split()).casefold()


# Few words, odd spacing and case: copies of positives abound.
texts = st.lists(st.sampled_from(["cat", "Cat", "dog", "bird"]), min_size=1, max_size=2).flatmap(
    lambda words: st.sampled_from([" ", "  ", "\n"]).map(lambda space: space.join(words))
)


@settings(max_examples=40, deadline=None)
@given(
    documents=st.lists(st.tuples(st.just("") | texts, texts), min_size=3, max_size=12),
    queries=st.lists(texts, min_size=1, max_size=4),
    data=st.data(),
)
def test_no_known_positive_and_no_copy_of_one_is_ever_written(model, tmp_path_factory, documents, queries, data):
    judged = data.draw(
        st.lists(
            st.tuples(st.integers(0, len(queries) - 1), st.integers(0, len(documents) - 1), st.integers(0, 2)),
            min_size=1,
            max_size=8,
            unique_by=lambda row: row[:2],
        )
    )
    root = tmp_path_factory.mktemp("property")
    folder = write_beir(
        root / "b",
        {f"d{i}": document for i, document in enumerate(documents)},
        {f"q{i}": query for i, query in enumerate(queries)},
        [(f"q{q}", f"d{d}", grade) for q, d, grade in judged],
    )
    try:
        mined = mine(model, folder, num_negatives=4, sampling="random")
    except DataError:  # nothing is relevant, or nothing is left
        return
    path, _ = write_mined(mined, root / "out.jsonl", "tevatron", on_too_few="keep")
    for line in lines_of(path):
        same_text = [i for i, query in enumerate(queries) if folded(query) == folded(line["query"])]
        known = {d for q, d, grade in judged if q in same_text and grade > 0}
        forbidden = {folded(f"{documents[d][0]} {documents[d][1]}") for d in known}
        forbidden |= {folded(documents[d][1]) for d in known} | {folded(line["query"])}
        for negative in line["negative_passages"]:
            assert int(negative["docid"][1:]) not in known
            assert folded(f"{negative['title']} {negative['text']}") not in forbidden
            assert folded(negative["text"]) not in forbidden
        negatives = [folded(f"{n['title']} {n['text']}") for n in line["negative_passages"]]
        assert len(negatives) == len(set(negatives))


@pytest.mark.parametrize(
    "output_format",
    [
        "pairs",
        "ntuples",
        "dpr",
        pytest.param(
            "tevatron", marks=pytest.mark.skipif("tevatron" not in DATA_FORMATS, reason="no reader of Tevatron jsonl")
        ),
    ],
)
@pytest.mark.parametrize("source", ["pairs", "beir"])
def test_what_is_written_is_read_back_as_training_data(model, request, tmp_path, output_format, source):
    data = load_mining_data(request.getfixturevalue(source))
    mined = mine(model, data, num_negatives=3)
    name = "new/out.json" if output_format == "dpr" else "new/out.jsonl"
    path, _ = write_mined(mined, tmp_path / name, output_format)
    dataset = load_training_data(path, num_hard_negatives=3).dataset.with_format(None)
    expected = [
        [data.queries[q], data.documents[row].passage, *(data.documents[r].passage for r in mined.rows[q])]
        for q, rows in enumerate(data.positives)
        for row in rows[: 1 if output_format in ("dpr", "tevatron") else data.pair_counts[q]]
    ]
    assert [list(row.values())[:5] for row in dataset] == expected
    assert sorted(p.name for p in (tmp_path / "new").iterdir()) == [path.name, f"{path.name}.report.json"]


def test_scores_are_written_beside_their_passages(model, beir, tmp_path):
    mined = mine(model, beir, num_negatives=2)
    passages = {document.passage: row for row, document in enumerate(mined.data.documents)}
    queries = {query: number for number, query in enumerate(mined.data.queries)}
    ntuples = lines_of(write_mined(mined, tmp_path / "n.jsonl", "ntuples")[0])
    for line, ntuple in zip(lines_of(write_mined(mined, tmp_path / "p.jsonl")[0]), ntuples, strict=True):
        number = queries[line["query"]]
        place = mined.data.positives[number].index(passages[line["positive"]])
        assert line["positive_score"] == pytest.approx(mined.positive_scores[number][place], rel=1e-6)
        assert line["negative_scores"] == pytest.approx(mined.scores[number].tolist(), rel=1e-6)
        assert ntuple["scores"] == [line["positive_score"], *line["negative_scores"]]


def test_tevatron_and_dpr_records_have_their_formats_fields_and_all_positives(model, beir, tmp_path):
    mined = mine(model, beir, num_negatives=2)
    tevatron = lines_of(write_mined(mined, tmp_path / "t.jsonl", "tevatron")[0])
    dpr = json.loads(write_mined(mined, tmp_path / "d.json", "dpr")[0].read_text())
    assert len(tevatron) == len(dpr) == 10
    for line, record in zip(tevatron, dpr, strict=True):
        assert list(line) == ["query_id", "query", "positive_passages", "negative_passages"]
        number = int(line["query_id"].removeprefix("q"))
        judged = [f"d{(3 * number + j) % 30}" for j in (0, 2)[: 2 - number % 2]]
        assert [passage["docid"] for passage in line["positive_passages"]] == judged
        assert len(line["negative_passages"]) == 2
        for passage in (*line["positive_passages"], *line["negative_passages"]):
            assert list(passage) == ["docid", "title", "text", "score"] and passage["title"]
        assert set(record) == {"question", "answers", "positive_ctxs", "negative_ctxs", "hard_negative_ctxs"}
        for ours, theirs in (("positive_passages", "positive_ctxs"), ("negative_passages", "hard_negative_ctxs")):
            assert [list(passage.values()) for passage in line[ours]] == [list(c.values()) for c in record[theirs]]
            assert all(list(context) == ["passage_id", "title", "text", "score"] for context in record[theirs])


def test_queries_with_too_few_negatives_are_dropped_or_kept_and_counted(model, tmp_path):
    rows = [("q1", "the cat"), ("q1", "the dog"), ("q1", "the bird"), ("q2", "the fish")]
    data = write_lines(tmp_path / "p.jsonl", [{"query": q, "positive": p} for q, p in rows])
    mined = mine(model, data, num_negatives=2)
    dropped, report = write_mined(mined, tmp_path / "drop.jsonl")
    assert [line["query"] for line in lines_of(dropped)] == ["q2"]
    record = json.loads(report.read_text())
    assert (record["queries_with_fewer"], record["queries_kept"], record["pairs_kept"]) == (1, 1, 1)
    kept, report = write_mined(mined, tmp_path / "keep.jsonl", on_too_few="keep")
    assert [len(line["negatives"]) for line in lines_of(kept)] == [1, 1, 1, 2]
    assert json.loads(report.read_text())["pairs_kept"] == 4
    with pytest.raises(DataError, match="no query has 4 negatives"):
        write_mined(mine(model, data, num_negatives=4), tmp_path / "none.jsonl")
    assert not list(tmp_path.glob("none*"))


@pytest.mark.parametrize("output_format", OUTPUT_FORMATS)
def test_a_failure_while_writing_leaves_what_was_there(model, pairs, tmp_path, output_format, monkeypatch):
    mined = mine(model, pairs, num_negatives=2)
    path = tmp_path / f"out.json{'' if output_format == 'dpr' else 'l'}"
    report = Path(f"{path}.report.json")
    path.write_text("old")
    report.write_text("old report")
    whole = type(mined).queries

    def breaks_off(self, on_too_few):
        yield from list(whole(self, on_too_few))[:3]
        raise KeyboardInterrupt

    monkeypatch.setattr(type(mined), "queries", breaks_off)
    with pytest.raises(KeyboardInterrupt):
        write_mined(mined, path, output_format, overwrite=True)
    assert (path.read_text(), report.read_text()) == ("old", "old report")
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([path.name, report.name, Path(pairs).name])


def test_the_report_adds_up_and_names_data_and_rules(model, pairs, tmp_path):
    mined = mine(model, pairs, num_negatives=2, range_max=10, absolute_margin=0.01)
    path, report = write_mined(mined, tmp_path / "out.jsonl", report={"model": {"name": "tiny"}})
    record = json.loads(report.read_text())
    assert record["candidates"] == sum(record["dropped_by_rule"].values()) + int((mined.rows >= 0).sum())
    assert record["dropped_by_rule"]["known_positive"] > 0
    assert record["data"]["fingerprint"] == load_training_data(pairs).fingerprint
    assert record["rules"]["range_max"] == 10 and record["rules"]["absolute_margin"] == 0.01
    assert record["model"] == {"name": "tiny"} and record["pairs_kept"] == len(lines_of(path))
    assert record["mean_positive_score"] == pytest.approx(np.concatenate(mined.positive_scores).mean())
