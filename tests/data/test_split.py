"""Splits: held-out sets share no text with training, by a comparison of words."""

import math
import random
import re
from pathlib import Path

import pytest
from sample_texts import sentences
from small_data import read_lines, write_beir, write_lines

from contaccum.cli import main
from contaccum.data import load_beir_folder
from contaccum.data.grouping import Grouping
from contaccum.data.readers import Source
from contaccum.data.records import RecordReport
from contaccum.data.split import SplitSettings, choose_sides, read_split, split_data
from contaccum.errors import ConfigError, DataError

SHIPPED = Path(__file__).parents[2] / "contaccum" / "data" / "scifact"
SIDES = ("train", "dev", "test")
NOUNS = (
    "cell",
    "gene",
    "mouse",
    "virus",
    "protein",
    "tissue",
    "artery",
    "neuron",
    "tumour",
    "enzyme",
)
VERBS = ("inhibits", "promotes", "regulates", "requires", "destroys", "expresses", "transports")


def claim(generator: random.Random, words: int = 9) -> str:
    return " ".join(
        generator.choice(NOUNS if i % 2 else VERBS) + str(generator.randrange(40))
        for i in range(words)
    )


def claims_with_repeats() -> list[dict[str, str]]:
    """Return claims of SciFact with abstracts, and near-copies of a sixth of the claims."""
    dataset = load_beir_folder(SHIPPED, "train")
    records = []
    for query, judged in dataset.qrels.items():
        for name in judged:
            document = dataset.corpus[name]
            records.append(
                {
                    "query": dataset.queries[query],
                    "positive": f"{document['title']} {document['text']}",
                }
            )
    generator = random.Random(1)
    for number, record in enumerate(generator.sample(records, len(records) // 6)):
        query = record["query"]
        repeats = (query.upper(), "  " + query.replace(" ", "\t"), f"{query} indeed")
        # The passage differs, so that only the query links the two records.
        records.append({"query": repeats[number % 3], "positive": claim(generator, 60)})
    generator.shuffle(records)
    return records


def folded(text: str) -> str:
    return " ".join(text.lower().split())


def words_of(text: str) -> frozenset[str]:
    return frozenset(re.findall("[a-z0-9]+", text.lower()))


def texts_by_side(folder: Path) -> dict[str, tuple[list[str], list[str]]]:
    """Return the queries and the relevant passages of each side of a split."""
    rows = read_lines(folder / "train.jsonl")
    passages = []
    for row in rows:
        passages += [row["positive"]] if isinstance(row["positive"], str) else row["positive"]
    sides = {"train": ([row["query"] for row in rows], passages)}
    for side in ("dev", "test"):
        dataset = load_beir_folder(folder / side, "test")
        documents = {name for judged in dataset.qrels.values() for name in judged}
        relevant = [" ".join(dataset.corpus[name].values()) for name in documents]
        sides[side] = (list(dataset.queries.values()), relevant)
    return sides


def nearly_equal_across(
    sides: dict[str, tuple[list[str], list[str]]], part: int
) -> list[tuple[str, str]]:
    """Return pairs of texts on two sides that share nine tenths of their words."""
    pairs = []
    for side, other_side in (("train", "dev"), ("train", "test"), ("dev", "test")):
        other_texts = [(text, words_of(text)) for text in sides[other_side][part]]
        for text in sides[side][part]:
            words = words_of(text)
            for other_text, other_words in other_texts:
                if len(words & other_words) >= 0.9 * len(words | other_words):
                    pairs.append((text, other_text))
    return pairs


@pytest.fixture(scope="module")
def planted(tmp_path_factory) -> tuple[Path, list[dict[str, str]]]:
    folder = tmp_path_factory.mktemp("planted")
    records = claims_with_repeats()
    split_data(Source(write_lines(folder / "pairs.jsonl", records)), folder / "split")
    return folder, records


def test_no_text_is_on_two_sides(planted):
    """A sixth of the claims are repeated in the data."""
    folder, records = planted
    sides = texts_by_side(folder / "split")
    assert nearly_equal_across(sides, 0) == []
    assert nearly_equal_across(sides, 1) == []
    split = read_split(folder / "split")
    distinct = {" ".join(record["query"].lower().split()) for record in records}
    assert split.train + split.dev + split.test == len(distinct)  # nothing is lost
    assert split.near_duplicates > 30  # "indeed" is one more word
    assert split.dev == pytest.approx(0.1 * len(distinct), abs=3)
    assert split.test == pytest.approx(0.2 * len(distinct), abs=3)


def test_the_same_records_in_another_order_give_the_same_split(planted, tmp_path):
    folder, records = planted
    pairs = write_lines(tmp_path / "pairs.jsonl", list(reversed(records)))
    split = split_data(Source(pairs), tmp_path / "split")
    assert split.fingerprint == read_split(folder / "split").fingerprint
    here = texts_by_side(tmp_path / "split")
    there = texts_by_side(folder / "split")
    for side in SIDES:
        for part in (0, 1):
            assert set(map(folded, here[side][part])) == set(map(folded, there[side][part]))
    other = split_data(Source(pairs), tmp_path / "other", SplitSettings(seed=1))
    assert other.fingerprint != split.fingerprint
    assert set(texts_by_side(tmp_path / "other")["test"][0]) != set(here["test"][0])


def test_a_held_out_set_is_searched_among_other_passages_too(planted):
    folder, _ = planted
    for side in ("dev", "test"):
        dataset = load_beir_folder(folder / "split" / side, "test")
        relevant = {name for judged in dataset.qrels.values() for name in judged}
        assert len(dataset.corpus) > 3 * len(relevant)
        assert len({document["text"].lower() for document in dataset.corpus.values()}) == len(
            dataset.corpus
        )


def make_pairs(count: int, seed: int = 0, **fields: object) -> list[dict[str, object]]:
    generator = random.Random(seed)
    return [
        {"query": claim(generator), "positive": claim(generator, 30), **fields}
        for _ in range(count)
    ]


def test_each_query_is_in_the_test_set_of_one_fold(tmp_path):
    pairs = write_lines(tmp_path / "pairs.jsonl", make_pairs(60))
    tested: list[str] = []
    for fold in range(5):
        folder = tmp_path / str(fold)
        split = split_data(Source(pairs), folder, SplitSettings(fold=fold))
        assert (split.test, split.dev) == (12, 6)
        assert any("few" in warning for warning in split.warnings())
        tested += texts_by_side(folder)["test"][0]
    assert len(set(tested)) == len(tested) == 60
    with pytest.raises(ConfigError, match="folds 0 to 4"):
        split_data(Source(pairs), tmp_path / "5", SplitSettings(fold=5))


def test_sizes_are_shares_or_numbers_and_large_sets_are_cut_off(tmp_path):
    pairs = write_lines(tmp_path / "pairs.jsonl", make_pairs(200))
    split = split_data(Source(pairs), tmp_path / "split", SplitSettings(dev=0.25, test=30))
    assert (split.dev, split.test, split.train) == (50, 30, 120)
    for settings, message in (
        ({"dev": math.inf}, "dev=inf"),
        ({"dev": 1.5}, "dev=1.5"),
        ({"test": 0}, "test=0"),
        ({"haystack": -1}, "haystack must be at least 0"),
    ):
        with pytest.raises(ConfigError, match=message):
            SplitSettings(**settings)
    with pytest.raises(ConfigError, match="leave none to train on"):
        split_data(Source(pairs), tmp_path / "none", SplitSettings(dev=100, test=100))
    assert not (tmp_path / "none").exists()


def test_a_large_group_stays_on_one_side(tmp_path):
    """Each passage answers two questions, and each question has two passages: one long chain."""
    generator = random.Random(0)
    passages = [claim(generator, 30) for _ in range(51)]
    chain = [{"query": claim(generator), "positive": passages[i : i + 2]} for i in range(50)]
    pairs = write_lines(tmp_path / "chain.jsonl", chain)
    with pytest.raises(DataError, match="the largest group has 50 queries"):
        split_data(Source(pairs), tmp_path / "split")
    pairs = write_lines(tmp_path / "mixed.jsonl", chain + make_pairs(100, 1))
    split = split_data(Source(pairs), tmp_path / "split")
    assert split.largest_group == 50
    assert set(passages).isdisjoint(texts_by_side(tmp_path / "split")["test"][1])


def test_held_out_positives_are_no_hard_negatives_in_training(tmp_path):
    """Their teacher scores are removed with them."""
    records = make_pairs(40)
    for number, record in enumerate(records):
        following = records[(number + 1) % len(records)]["positive"]
        record |= {"negatives": [following.upper(), f"never {number}"], "scores": [3.0, 2.0, 1.0]}
    split = split_data(Source(write_lines(tmp_path / "pairs.jsonl", records)), tmp_path / "split")
    rows = read_lines(tmp_path / "split" / "train.jsonl")
    held_out = {
        text for side in ("dev", "test") for text in texts_by_side(tmp_path / "split")[side][1]
    }
    held_out = {text.strip() for text in held_out}
    num_left_out = 0
    for row in rows:
        assert held_out.isdisjoint(text.lower() for text in row["negatives"])
        assert row["negatives"][-1].startswith("never")
        assert row["scores"] == ([3.0, 2.0, 1.0] if len(row["negatives"]) == 2 else [3.0, 1.0])
        num_left_out += 2 - len(row["negatives"])
    assert split.negatives_left_out == num_left_out > 0


def test_a_corpus_is_the_haystack(tmp_path):
    """Its copies of a positive are relevant too."""
    records = make_pairs(40)
    corpus = [
        {"_id": f"d{i}", "title": "", "text": record["positive"]}
        for i, record in enumerate(records[:30])
    ]
    corpus += [
        {"_id": f"copy{i}", "title": "", "text": record["positive"].title()}
        for i, record in enumerate(records)
    ]
    corpus += [{"_id": "other", "title": "An", "text": "other one"}]
    pairs = write_lines(tmp_path / "pairs.jsonl", records)
    split = split_data(
        Source(pairs), tmp_path / "split", corpus=write_lines(tmp_path / "corpus.jsonl", corpus)
    )
    assert split.documents == {"train": split.train + 1, "dev": 71, "test": 71}
    dataset = load_beir_folder(tmp_path / "split" / "test", "test")
    assert dataset.corpus["other"] == {"title": "An", "text": "other one"}
    assert {len(judged) for judged in dataset.qrels.values()} <= {1, 2}
    assert 2 in {len(judged) for judged in dataset.qrels.values()}
    alone = write_lines(
        tmp_path / "alone.jsonl", [{"_id": "1", "text": "nothing that is asked for"}]
    )
    split = split_data(Source(pairs), tmp_path / "alone", corpus=alone)
    assert split.documents == {
        "train": 1 + split.train,
        "dev": 1 + split.dev,
        "test": 1 + split.test,
    }


def test_documents_are_held_out_if_the_pairs_have_their_texts_without_titles(tmp_path):
    """Two documents have each text, under different titles. Negatives have the titles."""
    records = make_pairs(40)
    texts = [record["positive"] for record in records]
    corpus = []
    for number, text in enumerate(texts):
        corpus.append({"_id": f"d{number}", "title": f"Page {number}", "text": text})
        corpus.append({"_id": f"copy{number}", "title": "Another page", "text": text.title()})
    for number, record in enumerate(records):
        document = corpus[2 * ((number + 1) % len(records))]
        record["negatives"] = [f"{document['title']} {document['text']}", f"never {number}"]
    pairs = write_lines(tmp_path / "pairs.jsonl", records)
    corpus_file = write_lines(tmp_path / "corpus.jsonl", corpus)
    split = split_data(Source(pairs), tmp_path / "split", corpus=corpus_file)

    held_out_texts = set()
    for side in ("dev", "test"):
        dataset = load_beir_folder(tmp_path / "split" / side, "test")
        for query_id, judgements in dataset.qrels.items():
            number = [record["query"] for record in records].index(dataset.queries[query_id])
            assert judgements == {f"d{number}": 1, f"copy{number}": 1}
            held_out_texts.add(texts[number])
    assert (split.documents["dev"], split.documents["test"]) == (80, 80)
    assert split.positives_added == 0
    assert "not in the corpus" not in split.summary()

    training_texts = [row["text"] for row in read_lines(tmp_path / "split" / "corpus.jsonl")]
    rows = read_lines(tmp_path / "split" / "train.jsonl")
    training_texts += [text for row in rows for text in row["negatives"]]
    for text in training_texts:
        assert not any(folded(text).endswith(held_out) for held_out in held_out_texts)
    # The positives of 28 queries without titles, and negatives that are no document.
    assert split.train == 28 and split.documents["train"] >= 28 + 28


def test_positives_that_the_corpus_lacks_are_counted_in_the_summary(tmp_path, capsys):
    pairs = write_lines(tmp_path / "pairs.jsonl", make_pairs(40))
    corpus = write_lines(tmp_path / "corpus.jsonl", [{"_id": "1", "text": "another text"}])
    argv = ["split", str(pairs), str(tmp_path / "split"), "--corpus", str(corpus), "--no_progress"]
    assert main(argv) == 0
    assert "; 12 held-out positives are not in the corpus" in capsys.readouterr().out


def test_a_title_without_text_stays_in_the_training_corpus(tmp_path):
    """The test set of the data judges an empty document, which has no copies."""
    generator = random.Random(0)
    documents = {f"d{i}": ("", claim(generator, 30)) for i in range(20)}
    documents |= {"empty": ("", ""), "title": ("a title without text", "")}
    queries = {f"q{i}": claim(generator) for i in range(20)}
    qrels = [(f"q{i}", f"d{i}", 1) for i in range(20)]
    folder = write_beir(tmp_path / "beir", documents, queries, qrels[:15])
    lines = "".join(f"q{i}\td{i}\t1\n" for i in range(15, 20)) + "q19\tempty\t1\n"
    (folder / "qrels" / "test.tsv").write_text(lines)
    split_data(Source(folder), tmp_path / "split")
    ids = [row["_id"] for row in read_lines(tmp_path / "split" / "corpus.jsonl")]
    assert "title" in ids and "empty" not in ids


def test_thirty_negatives_of_each_msmarco_query_are_kept(tmp_path):
    folder = tmp_path / "msmarco"
    folder.mkdir()
    generator = random.Random(0)
    passages = [f"{i}\t{claim(generator, 12)}\n" for i in range(60)]
    (folder / "collection.tsv").write_text("".join(passages))
    queries = [f"{i}\t{claim(generator)}\n" for i in range(12)]
    (folder / "queries.train.tsv").write_text("".join(queries))
    (folder / "qrels.train.tsv").write_text("".join(f"{i}\t0\t{i}\t1\n" for i in range(12)))
    triples = [f"{i}\t{i}\t{passage}\n" for i in range(12) for passage in range(12, 60)]
    (folder / "qidpidtriples.train.full.2.tsv").write_text("".join(triples))
    assert main(["split", str(folder), str(tmp_path / "split"), "--no_progress"]) == 0
    rows = read_lines(tmp_path / "split" / "train.jsonl")
    assert {len(row["negatives"]) for row in rows} == {30}


def test_a_beir_folder_keeps_its_test_set(tmp_path):
    """Training records that are linked with a test query are left out."""
    generator = random.Random(0)
    documents = {f"d{i}": ("", claim(generator, 30)) for i in range(60)}
    queries = {f"q{i}": claim(generator) for i in range(60)}
    queries["q50"] = queries["q3"].upper()
    qrels = [(f"q{i}", f"d{i}", 1) for i in range(60)]
    folder = write_beir(tmp_path / "beir", documents, queries, qrels[:50])
    write_beir(tmp_path / "test", documents, queries, qrels[50:], "test")
    (tmp_path / "test" / "qrels" / "test.tsv").rename(folder / "qrels" / "test.tsv")
    split = split_data(Source(folder), tmp_path / "split")
    assert (split.test, split.left_out, split.held_out_by) == (10, 1, "passage")
    assert (
        load_beir_folder(tmp_path / "split" / "test").qrels
        == load_beir_folder(folder, "test").qrels
    )
    sides = texts_by_side(tmp_path / "split")
    assert queries["q3"] not in sides["train"][0] + sides["dev"][0]
    assert split.train + split.dev == 49
    with pytest.raises(ConfigError, match="its own test set and corpus stay as they are"):
        split_data(Source(folder), tmp_path / "again", SplitSettings(test=0.1))
    other = write_lines(tmp_path / "other.jsonl", [{"_id": "1", "text": "another document"}])
    with pytest.raises(ConfigError, match="its own test set and corpus stay as they are"):
        split_data(Source(folder), tmp_path / "again", corpus=other)


def test_the_corpus_of_a_beir_folder_without_a_test_set_is_the_haystack(tmp_path):
    documents = {f"d{number}": ("", text) for number, text in enumerate(sentences(60, 0, 9))}
    queries = {f"q{number}": text for number, text in enumerate(sentences(30, 1, 9))}
    qrels = [(f"q{number}", f"d{number}", 1) for number in range(30)]
    folder = tmp_path / "beir"
    write_beir(folder, documents, queries, qrels, "train")
    split = split_data(Source(folder), tmp_path / "split", SplitSettings(haystack=1))
    assert split.documents["dev"] == split.documents["test"] == 60
    assert len(load_beir_folder(tmp_path / "split" / "test").corpus) == 60


def test_few_answers_of_many_questions_need_a_larger_test_set(tmp_path):
    """The advice works: groups of 60 queries are small in a test set of 240."""
    pairs = []
    answers = sentences(10, 0, 9)
    for number, query in enumerate(sentences(600, 1, 9)):
        pairs.append({"query": query, "positive": answers[number % 10]})
    source = Source(write_lines(tmp_path / "faq.jsonl", pairs))
    with pytest.raises(DataError, match=r"\(raise --test to 240\)"):
        split_data(source, tmp_path / "split")
    split = split_data(source, tmp_path / "split", SplitSettings(test=240))
    assert split.test == 240


def test_unusable_documents_are_counted_once(
    tmp_path,
):
    """Empty documents of a BEIR folder are kept."""
    pairs = write_lines(tmp_path / "pairs.jsonl", make_pairs(20))
    corpus = write_lines(
        tmp_path / "corpus.jsonl", [{"_id": "1", "text": "one"}, {"_id": "2", "text": ""}]
    )
    report = RecordReport("skip")
    split_data(Source(pairs), tmp_path / "split", corpus=corpus, report=report)
    assert (report.seen, report.reported) == (22, 1)

    generator = random.Random(0)
    documents = {f"d{i}": ("", claim(generator, 30)) for i in range(20)} | {"empty": ("", "")}
    queries = {f"q{i}": claim(generator) for i in range(20)}
    qrels = [(f"q{i}", f"d{i}", 1) for i in range(20)]
    folder = write_beir(tmp_path / "beir", documents, queries, qrels[:15])
    write_beir(tmp_path / "test", documents, queries, qrels[15:], "test")
    (tmp_path / "test" / "qrels" / "test.tsv").rename(folder / "qrels" / "test.tsv")
    split = split_data(Source(folder), tmp_path / "beir_split")
    assert split.documents == {"train": 20 - split.dev - split.test, "dev": 21, "test": 21}


def test_training_corpus_lacks_what_only_held_out_queries_need(tmp_path):
    """It has all documents except positives of dev and test that no training claim has."""
    split = split_data(Source(SHIPPED), tmp_path / "split")
    corpus = {
        folded(f"{row['title']} {row['text']}")
        for row in read_lines(tmp_path / "split" / "corpus.jsonl")
    }
    sides = texts_by_side(tmp_path / "split")
    training = {folded(text) for text in sides["train"][1]}
    held_out = {folded(text) for side in ("dev", "test") for text in sides[side][1]} - training
    assert training <= corpus
    assert len(held_out) > 100
    assert not held_out & corpus
    corpus_of_scifact = load_beir_folder(SHIPPED, "test").corpus
    texts = {
        folded(f"{document['title']} {document['text']}") for document in corpus_of_scifact.values()
    }
    assert corpus == texts - held_out
    assert split.documents["train"] == len(corpus)


@pytest.mark.long
def test_dev_is_held_out_as_the_test_set_of_scifact_is(tmp_path):
    """Its test claims share abstracts with training claims, so dev claims must do so too."""
    split = split_data(Source(SHIPPED), tmp_path / "split")
    assert (split.held_out_by, split.test) == ("query", 300)
    sides = texts_by_side(tmp_path / "split")
    assert nearly_equal_across(sides, 0) == []
    shared = set(sides["train"][1]) & set(sides["dev"][1])
    assert len(shared) > 0.2 * len(set(sides["dev"][1]))


def test_the_command_prints_the_sizes_and_train_reads_the_split(tmp_path, capsys):
    pairs = write_lines(tmp_path / "pairs.jsonl", make_pairs(200))
    assert main(["split", str(pairs), str(tmp_path / "split"), "--no_progress"]) == 0
    output = capsys.readouterr().out
    assert (
        "held out: 20 dev and 40 test queries, split by passage; 140 queries to train on" in output
    )
    assert len(list(Source(tmp_path / "split" / "train.jsonl").records(RecordReport()))) == 140


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ('{"query": "a", "positive": "b"}\n', "has 1 distinct queries; it takes at least 10"),
        ('{"query": "a"}\n', "missing positive"),
    ],
)
def test_unusable_data_give_one_line_and_no_files(tmp_path, capsys, content, message):
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text(content)
    assert main(["split", str(pairs), str(tmp_path / "split"), "--no_progress"]) == 2
    output = capsys.readouterr().err
    assert output.count("\n") == 1
    assert message in output
    assert [path.name for path in tmp_path.iterdir()] == ["pairs.jsonl"]


def test_a_folder_that_exists_is_not_written_over(tmp_path, capsys):
    pairs = write_lines(tmp_path / "pairs.jsonl", make_pairs(20))
    (tmp_path / "split").mkdir()
    assert main(["split", str(pairs), str(tmp_path / "split")]) == 2
    assert "exists already" in capsys.readouterr().err
    twice = [{"_id": "1", "text": "a b"}, {"_id": "1", "text": "c d"}]
    corpus = write_lines(tmp_path / "corpus.jsonl", twice)
    assert main(["split", str(pairs), str(tmp_path / "new"), "--corpus", str(corpus)]) == 2
    assert "has the id '1' twice" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_bad_judgements_of_a_published_test_set_are_counted_and_not_copied(tmp_path):
    """Documents and queries are counted once, although train and test share them."""
    generator = random.Random(0)
    documents = {f"d{i}": ("", claim(generator, 30)) for i in range(20)}
    queries = {f"q{i}": claim(generator) for i in range(20)}
    qrels = [(f"q{i}", f"d{i}", 1) for i in range(20)]
    folder = write_beir(tmp_path / "beir", documents, queries, qrels[:15])
    with open(folder / "corpus.jsonl", "a") as file:
        file.write("{broken\n")
    lines = "".join(f"q{i}\td{i}\t1\n" for i in range(15, 20)) + "q19\tmissing\t1\n"
    (folder / "qrels" / "test.tsv").write_text(lines)
    with pytest.raises(DataError, match="broken JSON"):
        split_data(Source(folder), tmp_path / "split")
    report = RecordReport("skip")
    split = split_data(Source(folder), tmp_path / "split", report=report)
    # 21 documents, 20 queries, 15 and 6 judgements
    assert (split.test, report.seen) == (5, 62)
    assert report.by_reason == {"broken JSON": 1, "unknown document": 1}
    test = load_beir_folder(tmp_path / "split" / "test")
    assert (test.qrels, len(test.corpus)) == ({f"q{i}": {f"d{i}": 1} for i in range(15, 20)}, 20)


@pytest.mark.parametrize(
    ("sizes", "fold", "empty_side"),
    [({"dev": 5, "test": 100}, 0, "dev"), ({"dev": 100, "test": 5}, 1, "test")],
)
def test_an_empty_side_is_refused(sizes, fold, empty_side):
    """All groups are smaller than a quarter of the larger side, but larger than the other side."""
    groups = range(12)
    grouping = Grouping(
        group_of_record=[],
        queries_of_group=dict.fromkeys(groups, 24),
        key_of_group={group: str(group) for group in groups},
        groups_of_test=set(),
        num_near_duplicates=0,
    )
    with pytest.raises(DataError, match=f"{empty_side} would be empty.*raise --{empty_side}"):
        choose_sides("pairs.jsonl", grouping, sizes, SplitSettings(fold=fold))
    sizes = {**sizes, empty_side: 24}
    sides = choose_sides("pairs.jsonl", grouping, sizes, SplitSettings(fold=fold))
    assert set(sides.values()) == {"train", "dev", "test"}
