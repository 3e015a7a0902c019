"""Invariants of MS MARCO: texts are found by id without being held, triples go to their queries, lines are counted."""

from __future__ import annotations

import gzip
import random
import tracemalloc

import pytest
from data_files import RECORDS, put, put_msmarco, read, text_triples

from contaccum.data import Record, RecordReport, load_training_data, read_records, sniff_format
from contaccum.data.line_index import LineIndex
from contaccum.errors import DataError

NO_NEGATIVES = [record._replace(negatives=[]) for record in RECORDS]


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_msmarco_attaches_the_triples_of_the_split_and_counts_every_line(tmp_path, ending):
    folder = put_msmarco(tmp_path / "m", ending)
    found, report = read(folder)
    assert found == RECORDS
    # 9 passages, 4 queries, 3 judgements, 6 triples
    assert report.seen == report.used == 22
    assert read(folder, num_negatives=1)[0] == [r._replace(negatives=r.negatives[:1]) for r in RECORDS]
    found, report = read(folder, num_negatives=0)
    assert found == NO_NEGATIVES and report.seen == 16


def test_msmarco_runs_of_one_query_that_are_apart_come_in_the_order_of_the_file(tmp_path):
    folder = put_msmarco(tmp_path / "m")
    order = [(100, 15), (101, 14), (100, 10), (100, 11), (102, 12), (103, 13), (101, 10)]
    put(folder / "qidpidtriples.train.full.2.tsv", "".join(f"{q}\t0\t{n}\n" for q, n in order))
    found, report = read(folder)
    assert [r.negatives for r in found] == [
        ["negative f", "negative a", "negative b"],
        ["negative e", "negative a"],
        ["negative c"],
    ]
    assert report.notes == {"triples of queries that the qrels do not judge, not used": 1}


def test_msmarco_split_chooses_queries_and_qrels_and_leaves_other_triples_alone(tmp_path):
    folder = put_msmarco(tmp_path / "m")
    put(folder / "queries.dev.small.tsv", "7\tdev query\n")
    put(folder / "qrels.dev.small.tsv", "7 0 1 1\n7 0 10 0\n7 0 2 3\n")
    found, report = read(folder, split="dev.small")
    assert found == [Record("dev query", [RECORDS[1].positives[0], "three"], [])]
    assert report.notes == {"judgements of 0 or less, not a pair": 1}
    data = load_training_data(folder, split="dev.small")
    assert data.dataset["positive"][:] == [RECORDS[1].positives[0], "three"]
    with pytest.raises(DataError, match=r"queries\.dev\.tsv: no such file; qrels are there of: dev\.small, train"):
        read(folder, split="dev")


def test_msmarco_files_without_a_split_in_their_names_are_of_every_split(tmp_path):
    folder = put_msmarco(tmp_path / "m")
    for old, new in (("queries.train", "queries"), ("qrels.train", "qrels"), ("qidpidtriples.train.full.2", "triples")):
        (folder / f"{old}.tsv").rename(folder / f"{new}.tsv")
    assert read(folder)[0] == read(folder, split="dev")[0] == RECORDS
    put(folder / "qrels.dev.tsv", "101\t0\t1\t1\n")
    assert read(folder, split="dev")[0] == RECORDS[1:2]
    # Published beside the rest, and of texts.
    put(folder / "triples.train.small.tsv", text_triples())
    assert read(folder)[0] == RECORDS


def test_msmarco_ids_need_not_be_numbers_and_a_header_is_no_passage(tmp_path):
    folder = put_msmarco(tmp_path / "m")
    put(folder / "collection.tsv", "pid\ttext\nmsmarco_passage_00_7\tseven\n007\tother\n")
    put(folder / "queries.train.tsv", "\ufeffq-1\tquery\r\n")
    put(folder / "qrels.train.tsv", "q-1\t0\tmsmarco_passage_00_7\t1\n")
    (folder / "qidpidtriples.train.full.2.tsv").unlink()
    found, report = read(folder)
    assert found == [Record("query", ["seven"], [])] and report.seen == 4


def test_two_ids_with_the_same_hash_keep_their_texts(tmp_path, monkeypatch):
    monkeypatch.setattr("contaccum.data.line_index.hash", lambda text: len(text) % 2, raising=False)
    assert read(put_msmarco(tmp_path / "m"))[0] == RECORDS


def test_negatives_are_drawn_from_the_first_thirty_triples_of_a_query(tmp_path):
    folder = put_msmarco(tmp_path / "m")
    put(folder / "collection.tsv", "".join(f"{i}\tpassage {i}\n" for i in range(100)))
    put(folder / "queries.train.tsv", "7\tquery\n8\tother\n")
    put(folder / "qrels.train.tsv", "7 0 0 1\n8 0 1 1\n")
    put(folder / "qidpidtriples.train.full.2.tsv", "".join(f"7\t0\t{i}\n" for i in range(10, 90)))
    for settings, most in (({}, 30), ({"negatives_from": 50}, 50), ({"draw_negatives": False}, 2)):
        data = load_training_data(folder, num_hard_negatives=2, **settings)
        seen = set()
        for epoch in range(400):
            data.transform.set_epoch(epoch)
            seen |= {data.dataset[0][name] for name in ("negative_1", "negative_2")}
        assert seen == {f"passage {i}" for i in range(10, 10 + most)}


def test_text_triples_are_told_from_a_table_by_their_first_line(tmp_path):
    for name in ("triples.train.small.tsv", "triples.train.small.tsv.gz", "triples.txt"):
        path = put(tmp_path / name, text_triples())
        assert sniff_format(path) == "msmarco"
        assert read(path)[0] == [r._replace(negatives=r.negatives[:1]) for r in RECORDS]
    assert load_training_data(path, num_hard_negatives=1).dataset["negative_1"][0] == "negative a"


def test_a_line_that_is_left_out_ends_a_run_of_triples_and_loses_none_of_it(tmp_path):
    folder = put_msmarco(tmp_path / "m")
    put(folder / "qidpidtriples.train.full.2.tsv", "100\t0\t10\n\n100\t0\t11\n100\t0\tnone\n100 0 12\r\n101 1 13\n")
    report = RecordReport("skip")
    found = list(read_records(folder, report=report))
    assert [r.negatives for r in found] == [["negative a", "negative b", "negative c"], ["negative d"], []]
    assert report.by_reason == {"unknown passage": 1}


def test_a_cut_collection_gives_its_whole_lines_alone(tmp_path):
    noise = random.Random(0)
    content = b"".join(b"%d\t%s\n" % (i, noise.randbytes(20).hex().encode()) for i in range(200))
    packed = gzip.compress(content)
    (tmp_path / "c.tsv.gz").write_bytes(packed[: len(packed) // 2])
    report = RecordReport("skip")
    with LineIndex(tmp_path / "c.tsv.gz", report, "passages") as passages:
        last = len(passages) - 1
        assert 0 < last < 199 and report.used == len(passages) and report.reported == 1
        assert passages.text(str(last)) == content.split(b"\n")[last].split(b"\t")[1].decode()
        assert report.entries[0].line == len(passages) + 1 and str(last + 1) not in passages


def test_the_collection_is_not_held_in_memory(tmp_path):
    folder = put_msmarco(tmp_path / "m")
    put(folder / "collection.tsv", "".join(f"{i}\t{'word ' * 100}\n" for i in range(20_000)))
    tracemalloc.start()
    try:
        count = len(list(read_records(folder)))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert count == 3 and peak < 3_000_000 < (folder / "collection.tsv").stat().st_size / 3


def test_a_collection_that_changes_while_it_is_read_is_an_error_that_says_so(tmp_path):
    folder = put_msmarco(tmp_path / "m")
    records = read_records(folder)
    next(records)
    put(folder / "collection.tsv", "something else\n" * 9)
    # Which text is missed first depends on what the file's buffer still holds.
    with pytest.raises(DataError, match=r"collection\.tsv: '\d+' is gone \(it changed while it was read\)"):
        list(records)
