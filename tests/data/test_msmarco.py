"""MS MARCO: texts are looked up on disk, triples go to their queries, all lines are counted."""

from data_files import RECORDS, peak_of_reading, put, put_msmarco, read

from contaccum.data import Record, load_training_data


def test_triples_go_to_their_queries_and_all_lines_are_counted(tmp_path):
    folder = put_msmarco(tmp_path / "m")
    records, report = read(folder)
    assert records == RECORDS
    # 9 passages, 4 queries, 3 judgements, 6 triples
    assert report.seen == report.used == 22
    assert read(folder, num_negatives=1)[0] == [
        r._replace(negatives=r.negatives[:1]) for r in RECORDS
    ]
    assert read(folder, num_negatives=0)[1].seen == 16


def test_a_split_chooses_its_files(tmp_path):
    folder = put_msmarco(tmp_path / "m")
    put(folder / "queries.dev.small.tsv", "7\tdev query\n")
    put(folder / "qrels.dev.small.tsv", "7 0 1 1\n7 0 10 0\n7 0 2 3\n")
    records, _ = read(folder, split="dev.small")
    assert records == [Record("dev query", [RECORDS[1].positives[0], "three"], [])]


def test_ids_need_not_be_numbers(tmp_path):
    folder = put_msmarco(tmp_path / "m")
    put(folder / "collection.tsv", "msmarco_passage_00_7\tseven\n007\tother\n")
    put(folder / "queries.train.tsv", "\ufeffq-1\tquery\r\n")
    put(folder / "qrels.train.tsv", "q-1\t0\tmsmarco_passage_00_7\t1\n")
    (folder / "qidpidtriples.train.full.2.tsv").unlink()
    records, report = read(folder)
    assert records == [Record("query", ["seven"], [])] and report.seen == 4


def test_negatives_are_sampled_from_thirty_triples_by_default(tmp_path):
    folder = put_msmarco(tmp_path / "m")
    put(folder / "collection.tsv", "".join(f"{i}\tpassage {i}\n" for i in range(100)))
    put(folder / "queries.train.tsv", "7\tquery\n8\tother\n")
    put(folder / "qrels.train.tsv", "7 0 0 1\n8 0 1 1\n")
    put(folder / "qidpidtriples.train.full.2.tsv", "".join(f"7\t0\t{i}\n" for i in range(10, 90)))
    for settings, most in (({}, 30), ({"negatives_from": 50}, 50), ({"negatives_from": 2}, 2)):
        data = load_training_data(folder, num_hard_negatives=2, **settings)
        negatives = set()
        for epoch in range(400):
            data.transform.set_epoch(epoch)
            negatives |= {data.dataset[0][name] for name in ("negative_1", "negative_2")}
        assert negatives == {f"passage {i}" for i in range(10, 10 + most)}


def test_a_negative_that_two_positives_share_counts_once(tmp_path):
    folder = put_msmarco(tmp_path / "m")
    put(folder / "collection.tsv", "".join(f"{i}\tpassage {i}\n" for i in range(20)))
    put(folder / "queries.train.tsv", "7\tquery\n")
    put(folder / "qrels.train.tsv", "7 0 0 1\n7 0 1 1\n")
    triples = [f"7\t{positive}\t{i}\n" for i in range(10, 16) for positive in (0, 1)]
    put(folder / "qidpidtriples.train.full.2.tsv", "".join(triples))
    [record] = read(folder, num_negatives=4)[0]
    assert record.negatives == [f"passage {i}" for i in range(10, 14)]


def test_the_collection_is_not_held_in_memory(tmp_path):
    folder = put_msmarco(tmp_path / "m")
    put(folder / "collection.tsv", "".join(f"{i}\t{'word ' * 100}\n" for i in range(20_000)))
    count, peak = peak_of_reading(folder)
    assert count == 3 and peak < 3_000_000 < (folder / "collection.tsv").stat().st_size / 3
