"""MS MARCO: texts are looked up on disk, triples go to their queries, all lines are counted."""

from pathlib import Path

from data_files import RECORDS, peak_of_reading, put, put_msmarco, read

from contaccum.data import Record, load_training_data

TRIPLES_FILE = "qidpidtriples.train.full.2.tsv"


def put_numbered_passages(folder: Path, num_passages: int) -> None:
    """Write a collection in which "passage 7" has the id 7."""
    passages = [f"{i}\tpassage {i}\n" for i in range(num_passages)]
    put(folder / "collection.tsv", "".join(passages))


def test_triples_go_to_their_queries_and_all_lines_are_counted(tmp_path):
    folder = put_msmarco(tmp_path / "m")
    records, report = read(folder)
    assert records == RECORDS
    # 9 passages, 4 queries, 3 judgements, 6 triples
    assert report.seen == 22
    assert report.used == 22
    records_with_one_negative, _ = read(folder, num_negatives=1)
    expected = [record._replace(negatives=record.negatives[:1]) for record in RECORDS]
    assert records_with_one_negative == expected
    _, report_without_triples = read(folder, num_negatives=0)
    assert report_without_triples.seen == 16


def test_a_split_chooses_its_files(tmp_path):
    folder = put_msmarco(tmp_path / "m")
    put(folder / "queries.dev.small.tsv", "7\tdev query\n")
    # Passage 10 is judged as not relevant.
    put(folder / "qrels.dev.small.tsv", "7 0 1 1\n7 0 10 0\n7 0 2 3\n")
    records, _ = read(folder, split="dev.small")
    assert records == [Record("dev query", [RECORDS[1].positives[0], "three"], [])]


def test_ids_need_not_be_numbers(tmp_path):
    folder = put_msmarco(tmp_path / "m")
    put(folder / "collection.tsv", "msmarco_passage_00_7\tseven\n007\tother\n")
    put(folder / "queries.train.tsv", "\ufeffq-1\tquery\r\n")
    put(folder / "qrels.train.tsv", "q-1\t0\tmsmarco_passage_00_7\t1\n")
    (folder / TRIPLES_FILE).unlink()
    records, report = read(folder)
    assert records == [Record("query", ["seven"], [])]
    # 2 passages, 1 query, 1 judgement
    assert report.seen == 4


def test_negatives_are_sampled_from_thirty_triples_by_default(tmp_path):
    folder = put_msmarco(tmp_path / "m")
    put_numbered_passages(folder, 100)
    put(folder / "queries.train.tsv", "7\tquery\n8\tother\n")
    put(folder / "qrels.train.tsv", "7 0 0 1\n8 0 1 1\n")
    # The first query has 80 triples, with the negatives 10 to 89.
    triples = [f"7\t0\t{negative}\n" for negative in range(10, 90)]
    put(folder / TRIPLES_FILE, "".join(triples))
    cases = [({}, 30), ({"negatives_from": 50}, 50), ({"negatives_from": 2}, 2)]
    for settings, num_triples in cases:
        data = load_training_data(folder, num_hard_negatives=2, **settings)
        negatives = set()
        for epoch in range(400):
            data.transform.set_epoch(epoch)
            row = data.dataset[0]
            negatives.update([row["negative_1"], row["negative_2"]])
        assert negatives == {f"passage {i}" for i in range(10, 10 + num_triples)}


def test_a_negative_that_two_positives_share_counts_once(tmp_path):
    folder = put_msmarco(tmp_path / "m")
    put_numbered_passages(folder, 20)
    put(folder / "queries.train.tsv", "7\tquery\n")
    put(folder / "qrels.train.tsv", "7 0 0 1\n7 0 1 1\n")
    triples = []
    for negative in range(10, 16):
        triples += [f"7\t0\t{negative}\n", f"7\t1\t{negative}\n"]
    put(folder / TRIPLES_FILE, "".join(triples))
    records, _ = read(folder, num_negatives=4)
    (record,) = records
    assert record.negatives == ["passage 10", "passage 11", "passage 12", "passage 13"]


def test_the_collection_is_not_held_in_memory(tmp_path):
    folder = put_msmarco(tmp_path / "m")
    text = "word " * 100
    collection = put(folder / "collection.tsv", "".join(f"{i}\t{text}\n" for i in range(20_000)))
    num_records, peak = peak_of_reading(folder)
    assert num_records == 3
    max_peak = 3_000_000
    assert peak < max_peak
    # The collection is so large that the limit excludes holding even a third of it.
    assert max_peak < collection.stat().st_size / 3
