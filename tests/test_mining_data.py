"""What may not become a negative: every known positive, under whatever id, title, spacing or case."""

import gzip
import json

import pytest
from small_data import write_beir, write_lines

from contaccum.errors import DataError
from contaccum.mining import load_mining_data


def passages(data, rows):
    return [data.documents[row].passage for row in rows]


def test_pool_of_pairs_is_their_distinct_positives_and_positives_of_a_query_come_together(tmp_path):
    rows = [("q1", "a"), ("q2", "b"), ("q1", "c"), ("q1", "a"), ("Q1 ", "d")]
    data = load_mining_data(write_lines(tmp_path / "p.jsonl", [{"query": q, "positive": p} for q, p in rows]))
    assert data.queries == ["q1", "q2", "Q1 "] and data.pool_size == 4
    assert [passages(data, rows) for rows in data.positives] == [["a", "c", "d"], ["b"], ["d", "a", "c"]]
    assert data.pair_counts == [2, 1, 1]
    assert [passages(data, rows) for rows in data.excluded] == [["a", "c", "d"], ["b"], ["a", "c", "d"]]
    assert (data.record["queries"], data.record["pairs"], data.record["passages"]) == (3, 4, 4)


def test_further_positives_of_dpr_and_of_lists_are_known_though_they_make_no_pair(tmp_path):
    record = {"question": "q", "positive_ctxs": [{"title": "T", "text": x} for x in "ab"]}
    (tmp_path / "d.json").write_text(json.dumps([record]))
    for source, expected in ((tmp_path / "d.json", ["T a", "T b"]), ([{"query": "q", "positive": ["a", "b"]}], "ab")):
        data = load_mining_data(source)
        assert passages(data, data.positives[0]) == list(expected)
        assert data.pair_counts == [1] and data.excluded == [[0, 1]]


DOCUMENTS = {
    "d0": ("The Sky", "It is  blue."),
    "d1": ("the sky", "it is blue."),  # the same passage under another id
    "d2": ("", "It is blue."),  # the same text without its title
    "d3": ("Heaven", "It is blue."),  # and under another title
    "d4": ("", ""),
    "d5": ("Grass", "It is green."),
    "d6": ("", "What colour is the sky?"),
}
QUERIES = {"q0": "What  colour is the SKY?", "q1": "Is grass green?"}


def test_copies_of_a_positive_are_excluded_whatever_their_id_title_spacing_or_case(tmp_path):
    folder = write_beir(tmp_path / "b", DOCUMENTS, QUERIES, [("q0", "d0", 1), ("q1", "d5", 2), ("q1", "d6", 0)])
    data = load_mining_data(folder)
    assert [document.id for document in data.documents] == ["d0", "d2", "d3", "d5", "d6"]
    assert [[data.documents[row].id for row in rows] for rows in data.excluded] == [["d0", "d2", "d3", "d6"], ["d5"]]


def test_queries_of_the_same_text_share_their_positives(tmp_path):
    queries = {"q0": "is it blue", "q1": "Is it  blue"}
    data = load_mining_data(write_beir(tmp_path / "b", DOCUMENTS, queries, [("q0", "d5", 1), ("q1", "d6", 1)]))
    assert data.query_ids == ["q0", "q1"] and data.excluded[0] == data.excluded[1]
    assert data.positives[0] == data.positives[1][::-1]


def test_a_separate_corpus_is_the_whole_pool_and_positives_outside_it_are_no_candidates(tmp_path):
    data_file = write_lines(tmp_path / "p.jsonl", [{"query": "q", "positive": "It is blue."}])
    records = [{"_id": i, "title": t, "text": x} for i, (t, x) in DOCUMENTS.items() if t or x]
    packed = tmp_path / "c.jsonl.gz"
    packed.write_bytes(gzip.compress("\n".join(map(json.dumps, records)).encode()))
    data = load_mining_data(data_file, packed)
    assert data.pool_size == 5 and data.positives == [[1]]
    assert [data.documents[row].id for row in data.excluded[0]] == ["d0", "d2", "d3"]
    other = write_lines(tmp_path / "other.jsonl", [{"_id": "x", "text": "Nothing of the kind"}])
    data = load_mining_data(data_file, other)
    assert data.pool_size == 1 and data.positives == [[1]] and data.excluded == [[]]


def test_a_separate_corpus_excludes_by_id_where_the_data_have_ids(tmp_path):
    folder = write_beir(tmp_path / "b", DOCUMENTS, QUERIES, [("q0", "d0", 1), ("q1", "d5", 1)])
    cleaned = write_lines(tmp_path / "c.jsonl", [{"_id": "d0", "text": "Sky: blue"}, {"_id": "d9", "text": "Other"}])
    data = load_mining_data(folder, cleaned)
    assert data.excluded == [[0], []]
    assert data.record["fingerprint"] != load_mining_data(folder).record["fingerprint"]


@pytest.mark.parametrize(
    ("judged", "documents", "message"),
    [("d0 0", DOCUMENTS, "no query"), ("d4 1", DOCUMENTS, "no query"), ("d4 1", {"d4": ("", " ")}, "no passage")],
)
def test_data_without_anything_to_mine_are_refused(tmp_path, judged, documents, message):
    with pytest.raises(DataError, match=message):
        load_mining_data(write_beir(tmp_path / "b", documents, QUERIES, [("q0", *judged.split())]))


def test_a_bad_record_is_named_or_left_out(tmp_path):
    path = write_lines(tmp_path / "p.jsonl", [{"query": "q", "positive": "p"}, {"query": "r"}])
    with pytest.raises(DataError, match=r"p\.jsonl:2: missing positive"):
        load_mining_data(path)
    data = load_mining_data(path, on_bad_record="skip")
    assert data.queries == ["q"] and "1 left out" in data.record["records"]
    with pytest.raises(DataError, match=r"c\.jsonl:1: missing text"):
        load_mining_data([{"query": "q", "positive": "p"}], write_lines(tmp_path / "c.jsonl", [{"_id": "x"}]))
