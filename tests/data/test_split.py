"""Splits: held-out sets share no text with training, by a comparison of words."""

import json
import random
import re
from collections.abc import Sequence
from itertools import combinations, product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from sample_texts import WORDS, sentences
from small_data import read_lines, write_beir, write_lines, write_qrels

from contaccum.cli import main
from contaccum.data import load_beir_folder, load_training_sets, read_records
from contaccum.data.beir import shipped_scifact
from contaccum.data.near_duplicates import group_queries
from contaccum.data.records import RecordSource, parse_columns
from contaccum.data.rows import RecordReport
from contaccum.data.split import Split, SplitSettings, add_to_training, read_split, split_data
from contaccum.errors import ConfigError, DataError
from contaccum.evaluation.evaluator import RetrievalEvaluator
from contaccum.experiments.folds import Pairs
from contaccum.retrieval.bm25 import fuse_runs


class SideTexts(NamedTuple):
    """The queries of one side of a split, and their relevant passages."""

    queries: list[str]
    passages: list[str]


def make_claim(generator: random.Random, num_words: int = 9) -> str:
    """Return a text of random words, each with a random number."""
    words = (f"{generator.choice(WORDS)}{generator.randrange(40)}" for _ in range(num_words))
    return " ".join(words)


def make_pairs(count: int, seed: int = 0) -> list[dict[str, Any]]:
    generator = random.Random(seed)
    pairs = []
    for _ in range(count):
        pairs.append({"query": make_claim(generator), "positive": make_claim(generator, 30)})
    return pairs


def split_records(
    folder: Path,
    records: Sequence[dict[str, Any]],
    corpus: Sequence[dict[str, Any]] | None = None,
    name: str = "split",
    **settings: Any,
) -> Split:
    """Write records, and a corpus if there is one, and their split into a subfolder."""
    pairs = RecordSource(write_lines(folder / "pairs.jsonl", list(records)))
    corpus_file = corpus and write_lines(folder / "corpus.jsonl", list(corpus))
    return split_data(pairs, folder / name, SplitSettings(**settings), corpus_file)


def make_judged_claims(count: int) -> tuple[dict, dict, list[tuple[str, str, int]]]:
    """Return the arguments of `write_beir`; document i is relevant to query i."""
    pairs = make_pairs(count)
    documents = {f"d{i}": ("", pair["positive"]) for i, pair in enumerate(pairs)}
    queries = {f"q{i}": pair["query"] for i, pair in enumerate(pairs)}
    return documents, queries, [(f"q{i}", f"d{i}", 1) for i in range(count)]


def break_corpus(folder: Path) -> None:
    with open(folder / "corpus.jsonl", "a") as file:
        file.write("{broken\n")


def normalise_text(text: str) -> str:
    return " ".join(text.lower().split())


def read_sides(folder: Path) -> dict[str, SideTexts]:
    """Return the queries and the relevant passages of each side of a split."""
    records = list(read_records(folder / "train.jsonl"))
    passages = [positive for record in records for positive in record.positives]
    sides = {"train": SideTexts([record.query for record in records], passages)}
    for side in ("dev", "test"):
        dataset = load_beir_folder(folder / side, "test")
        relevant = set().union(*dataset.qrels.values())
        passages = [" ".join(dataset.corpus[name].values()).strip() for name in relevant]
        sides[side] = SideTexts(list(dataset.queries.values()), passages)
    return sides


def collect_training_negatives(folder: Path) -> list[str]:
    """Return the hard negatives in train.jsonl and the texts of corpus.jsonl."""
    texts = [row["text"] for row in read_lines(folder / "corpus.jsonl")]
    for row in read_lines(folder / "train.jsonl"):
        texts.extend(row.get("negatives", ()))
    return texts


def assert_no_near_copies_between_sides(sides: dict[str, SideTexts], field: str) -> None:
    """Check that no texts of two sides, queries or passages, share nine tenths of their words."""
    words_of_side = [
        [frozenset(re.findall("[a-z0-9]+", text.lower())) for text in getattr(side, field)]
        for side in sides.values()
    ]
    for side, other_side in combinations(words_of_side, 2):
        for words, other_words in product(side, other_side):
            assert len(words & other_words) < 0.9 * len(words | other_words)


def make_questions_about_passages() -> list[dict[str, Any]]:
    """Return three questions about each of 100 passages, and near-copies of every fifteenth one.

    Each of these has a near-copy, about another passage, which has a near-copy itself. The negative
    of a record is a near-copy of the question of another one.
    """
    generator = random.Random(0)
    passages = [make_claim(generator, 30) for _ in range(100)]
    records: list[dict[str, Any]] = []
    for number in range(300):
        query = make_claim(generator)
        forms = [query, f"{query} indeed", f"so {query} indeed"]
        for form in forms if number % 15 == 0 else forms[:1]:
            is_copy = form == forms[1]
            passage = passages[number // 3 ^ is_copy]  # passages are linked in twos
            records.append({"query": form, "positive": passage, "negatives": [f"{query}, now"]})
    negatives = [record["negatives"] for record in records]
    for record, others in zip(records, negatives[7:] + negatives[:7], strict=True):
        record["negatives"] = others
    return records


@pytest.mark.parametrize(
    ("future", "known_share", "has_corpus"),
    [("known", 1.0, True), ("both", 0.5, True), (None, 0.5, False), ("new", 0.0, False)],
)
def test_no_query_is_on_two_sides_whatever_documents_are_known(
    tmp_path, future, known_share, has_corpus
):
    records = make_questions_about_passages()
    corpus = []
    for number, record in enumerate(records if has_corpus else []):
        corpus.append({"_id": f"q{number}", "title": "Asked", "text": record["negatives"][0]})
        corpus.append({"_id": f"p{number}", "title": f"{number}", "text": record["positive"]})
    split = split_records(tmp_path, records, corpus or None, future=future)
    sides = read_sides(tmp_path / "split")
    assert_no_near_copies_between_sides(sides, "queries")
    if future == "new":
        assert_no_near_copies_between_sides(sides, "passages")
    negatives = set(collect_training_negatives(tmp_path / "split"))
    for query in sides["dev"].queries + sides["test"].queries:
        assert f"{query.removeprefix('so ').removesuffix(' indeed')}, now" not in negatives
    assert len(negatives) > 100
    assert split.train + split.dev + split.test == len(records)

    passage_of_query = {record["query"]: record["positive"] for record in records}
    training_passages = set(sides["train"].passages)
    for side, size, total in (("dev", split.dev, 0.1), ("test", split.test, 0.2)):
        assert size == pytest.approx(total * len(records), abs=8)
        is_known = [passage_of_query[query] in training_passages for query in sides[side].queries]
        assert sum(is_known) == split.known[side] == pytest.approx(known_share * size, abs=5)
        assert len(is_known) == size
        if future in (None, "both"):
            folder = tmp_path / "split" / side
            known, new = load_beir_folder(folder, "known"), load_beir_folder(folder, "new")
            assert len(known.qrels) == split.known[side]
            assert known.qrels | new.qrels == load_beir_folder(folder).qrels
            for query in known.queries.values():
                assert passage_of_query[query] in training_passages

    again = split_records(tmp_path, records[::-1], corpus or None, "again", future=future)
    assert again.fingerprint == split.fingerprint
    for side, texts in read_sides(tmp_path / "again").items():
        assert sorted(texts.queries) == sorted(sides[side].queries)
    other = split_records(tmp_path, records, corpus or None, "other", future=future, seed=1)
    assert other.fingerprint != split.fingerprint
    assert set(read_sides(tmp_path / "other")["test"].queries) != set(sides["test"].queries)


@pytest.mark.parametrize("future", ["known", "both"])
def test_known_test_queries_of_folds_are_disjoint(tmp_path, future):
    """Their passages are in training in each fold."""
    records = make_questions_about_passages()
    settings = {"dev": 20, "test": 60, "future": future}
    tested: list[str] = []
    for fold in range(3):
        split = split_records(tmp_path, records, name=str(fold), fold=fold, **settings)
        assert split.known["test"] >= (60 if future == "known" else 30)
        assert split.folds >= 3
        sides = read_sides(tmp_path / str(fold))
        assert not set(sides["dev"].queries) & set(sides["test"].queries)
        tested += sides["test"].queries
    assert len(set(tested)) == len(tested) >= 180
    with pytest.raises(ConfigError, match=f"folds 0 to {split.folds - 1}"):
        split_records(tmp_path, records, name="last", fold=split.folds, **settings)


def test_all_folds_have_known_queries(tmp_path):
    """New queries alone would give more folds, and the last fold has at least half as many."""
    pairs = make_pairs(460)
    for first, second in zip(pairs[:60], pairs[60:120], strict=True):
        second["positive"] = first["positive"]
    split = split_records(tmp_path, pairs, dev=24, test=24)
    assert split.folds > 1
    for fold in range(1, split.folds):
        other = split_records(tmp_path, pairs, name=str(fold), dev=24, test=24, fold=fold)
        assert split.known["test"] / 2 <= other.known["test"] <= split.known["test"]
        assert other.test - other.known["test"] == split.test - split.known["test"]


def test_a_query_is_new_if_no_other_query_has_its_passage(tmp_path):
    pairs = make_pairs(60)
    for pair in pairs[:8]:
        pair["positive"] = pairs[0]["positive"]  # one passage with eight queries, one of them known
    assert split_records(tmp_path, pairs).known == {"dev": 0, "test": 0}
    split = split_records(tmp_path, pairs, name="both", future="both")
    assert split.known == {"dev": 2, "test": 4}
    assert split.dev + split.test == 18
    with pytest.raises(DataError, match=r"cannot hold out 18 .* on known documents: 7 have only"):
        split_records(tmp_path, pairs, name="known", future="known")
    known = split_records(tmp_path, pairs, name="small", dev=2, test=4, future="known")
    assert known.known == {"dev": 2, "test": 4}
    assert "2 dev and 4 test queries on known documents" in known.summary()


def test_each_query_is_in_the_test_set_of_one_fold(tmp_path):
    pairs = make_pairs(60)
    tested: list[str] = []
    for fold in range(5):
        split = split_records(tmp_path, pairs, name=str(fold), fold=fold)
        assert (split.dev, split.test) == (6, 12)
        [warning] = split.warnings()
        assert "12 test queries are few" in warning
        assert "--fold 1, 2" in warning
        tested += read_sides(tmp_path / str(fold))["test"].queries
    assert len(tested) == len(set(tested)) == 60
    with pytest.raises(ConfigError, match="folds 0 to 4"):
        split_records(tmp_path, pairs, name="5", fold=5)


@pytest.mark.long
def test_the_default_sizes_of_a_large_file_have_a_limit(tmp_path):
    """A tenth of 6,000 queries would be 600 for dev, and a fifth 1,200 for test."""
    split = split_records(tmp_path, make_pairs(6000))
    assert (split.train, split.dev, split.test) == (4500, 500, 1000)


def test_sizes_are_shares_or_numbers(tmp_path):
    split = split_records(tmp_path, make_pairs(200), dev=0.25, test=30)
    assert (split.train, split.dev, split.test) == (120, 50, 30)


def test_a_large_group_stays_on_one_side(tmp_path):
    """Each passage answers two questions, and each question has two passages: one long chain."""
    generator = random.Random(0)
    passages = [make_claim(generator, 30) for _ in range(51)]
    chain = []
    for i in range(50):
        chain.append({"query": make_claim(generator), "positive": [passages[i], passages[i + 1]]})
    with pytest.raises(DataError, match="the largest group has 50 queries"):
        split_records(tmp_path, chain)
    split_records(tmp_path, chain + make_pairs(100, 1), future="new")
    assert set(passages).isdisjoint(read_sides(tmp_path / "split")["test"].passages)


def test_dev_and_test_are_searched_in_the_whole_corpus(tmp_path):
    """Its copies of a positive are relevant too."""
    records = make_pairs(40)
    corpus = [{"_id": "other", "title": "An", "text": "other one"}]
    for number, record in enumerate(records):
        text = record["positive"]
        if number < 30:
            corpus.append({"_id": f"d{number}", "title": "", "text": text})
        corpus.append({"_id": f"copy{number}", "title": "", "text": text.title()})
    split = split_records(tmp_path, records, corpus)
    # Both have the 30 positives, 40 copies and the other document.
    assert split.documents == {"train": split.train + 1, "dev": 71, "test": 71}
    dataset = load_beir_folder(tmp_path / "split" / "test", "test")
    assert dataset.corpus["other"] == {"title": "An", "text": "other one"}
    numbers_of_positives = {len(judgements) for judgements in dataset.qrels.values()}
    assert 2 in numbers_of_positives <= {1, 2}


def test_held_out_positives_are_added_to_a_corpus_that_lacks_them(tmp_path):
    split = split_records(tmp_path, make_pairs(40), [{"_id": "1", "text": "nothing like that"}])
    numbers = {"train": split.train, "dev": split.dev, "test": split.test}
    assert split.documents == {side: 1 + number for side, number in numbers.items()}
    assert "; 12 held-out positives are not in the corpus" in split.summary()


@pytest.mark.parametrize("pairs_have_titles", [False, True])
def test_documents_are_held_out_if_pairs_have_their_texts_with_or_without_titles(
    tmp_path, pairs_have_titles
):
    """Negatives have the other form: the text of the next document, and one that is no document.

    The documents d0 and copy0 have the text of the positive of record 0, under different titles.
    """
    records = make_pairs(40)
    corpus = []
    for number, record in enumerate(records):
        text = record["positive"]
        corpus.append({"_id": f"d{number}", "title": f"Page {number}", "text": text})
        corpus.append({"_id": f"copy{number}", "title": "Another page", "text": text.title()})
    for number, record in enumerate(records):
        after = (number + 1) % len(records)
        forms = [record["positive"], f"Page {number} {record['positive']}"]
        next_text = corpus[2 * after]["text"]
        next_forms = [f"Page {after} {next_text}", next_text]
        record["positive"] = forms[pairs_have_titles]
        record["negatives"] = [next_forms[pairs_have_titles], f"never {number}"]
    split = split_records(tmp_path, records, corpus)

    number_of_query = {record["query"]: number for number, record in enumerate(records)}
    held_out = set()
    for side in ("dev", "test"):
        dataset = load_beir_folder(tmp_path / "split" / side, "test")
        for query_id, judgements in dataset.qrels.items():
            number = number_of_query[dataset.queries[query_id]]
            copies = set() if pairs_have_titles else {f"copy{number}"}
            assert judgements.keys() == {f"d{number}"} | copies
            held_out.add(corpus[2 * number]["text"])
    assert (split.train, split.documents["dev"], split.documents["test"]) == (28, 80, 80)
    assert split.positives_added == 0
    assert "not in the corpus" not in split.summary()
    for text in collect_training_negatives(tmp_path / "split"):
        assert not normalise_text(text).endswith(tuple(held_out))
    # The positives of 28 queries, and negatives that are no document
    assert split.documents["train"] >= 28 + 28


@pytest.mark.parametrize("form", ["<p class='x'><b>{}</b></p>", "&quot;{}&quot;", "{}, "])
def test_forms_of_one_query_are_on_one_side(tmp_path, form):
    """The passages of the two records differ, so that only the query links them."""
    pairs, others = make_pairs(60), make_pairs(60, 1)
    for pair, other in zip(pairs, others, strict=True):
        other["query"] = " ".join(map(form.format, pair["query"].split()))
    split_records(tmp_path, pairs + others)
    for texts in read_sides(tmp_path / "split").values():
        for pair, other in zip(pairs, others, strict=True):
            assert (pair["positive"] in texts.passages) == (other["positive"] in texts.passages)


@pytest.mark.parametrize("separator", [" ", ": ", "\n\n"])
def test_a_document_with_its_title_and_without_it_is_on_one_side(tmp_path, separator):
    """The titles are longer than the texts, so that the passages are no near-duplicates."""
    generator = random.Random(0)
    records = []
    corpus = []
    for number in range(40):
        title, text = make_claim(generator, 12), make_claim(generator, 8)
        corpus.append({"_id": f"d{number}", "title": title, "text": text})
        records.append({"query": make_claim(generator), "positive": text})
        records.append({"query": make_claim(generator), "positive": f"{title}{separator}{text}"})
    split = split_records(tmp_path, records, corpus)
    assert split.positives_added == 0
    for texts in read_sides(tmp_path / "split").values():
        for first, second in zip(records[::2], records[1::2], strict=True):
            assert (first["query"] in texts.queries) == (second["query"] in texts.queries)


@pytest.mark.parametrize("field", ["query", "positive"])
@pytest.mark.parametrize("change", ["{}", "{}.", "so {}", "{} indeed"])
@pytest.mark.parametrize("is_in_corpus", [False, True])
def test_near_copies_of_held_out_texts_are_no_negatives(tmp_path, field, change, is_in_corpus):
    """Duplicate questions have other questions as negatives."""
    records = make_pairs(60)
    near_copies = [change.format(record[field]) for record in records]
    corpus = [{"_id": "other", "title": "", "text": "another text"}]
    for number, record in enumerate(records):
        record["negatives"] = [f"never {number}"]
        corpus.append({"_id": str(number), "title": "", "text": near_copies[number]})
        if not is_in_corpus:
            record["negatives"].append(near_copies[(number + 1) % len(records)])
    split_records(tmp_path, records, corpus if is_in_corpus else None)
    training_queries = read_sides(tmp_path / "split")["train"].queries
    negatives = collect_training_negatives(tmp_path / "split")
    num_allowed = 0
    for record, near_copy in zip(records, near_copies, strict=True):
        if record["query"] in training_queries:
            num_allowed += near_copy in negatives
        else:
            assert near_copy not in negatives
    # A document with the words of a training positive is the positive itself.
    is_copy = is_in_corpus and field == "positive" and change == "{}."
    assert (num_allowed > 0) != is_copy


def test_a_held_out_query_is_no_passage_of_training_if_only_queries_are_held_out(tmp_path):
    """The test queries share their documents with training, so dev is held out by query too."""
    documents, queries, qrels = make_judged_claims(60)
    for number in range(40):
        queries[f"t{number}"] = make_claim(random.Random(100 + number))
    # The documents of q0 and q1 are a test query, and nearly a training query.
    documents["d0"] = ("", queries["t20"] + "!")
    documents["d1"] = ("", "So: " + queries["q59"])
    folder = write_beir(tmp_path / "beir", documents, queries, qrels)
    write_qrels(folder / "qrels" / "test.tsv", [(f"t{n}", f"d{n}", 1) for n in range(40)])
    split = split_data(RecordSource(folder), tmp_path / "split", SplitSettings(dev=20))
    assert split.left_out == 1
    sides = read_sides(tmp_path / "split")
    is_known = [queries[f"q{number}"] in sides["train"].queries for number in range(40)]
    assert split.known["test"] == sum(is_known) > 0
    assert queries["q0"] not in sides["train"].queries
    for side in ("train", "dev"):
        assert (queries["q1"] in sides[side].queries) == (queries["q59"] in sides[side].queries)


@pytest.mark.parametrize("title", [None, "", "A question"])
def test_a_perfect_model_has_a_perfect_score_on_similar_questions(tmp_path, title):
    """Each question is a query and, in other words, the answer to the others of its group."""
    generator = random.Random(0)
    groups = [[make_claim(generator) for _ in range(4)] for _ in range(60)]
    number_of_group = {text: number for number, group in enumerate(groups) for text in group}
    records: list[dict[str, Any]] = []
    for first, *others in groups:
        for query in others:
            answers = [text for text in (first, *others) if text != query]
            records.append({"query": query.upper(), "positive": answers})
    # Of a query to which its own text is relevant, that document counts.
    records += [{"query": text, "positive": [text]} for [text, *_] in groups]
    corpus = None
    if title is not None:
        corpus = [
            {"_id": f"q{i}", "title": title, "text": t} for i, t in enumerate(number_of_group)
        ]
    split = split_records(tmp_path, records, corpus)
    for side, num_queries in (("dev", split.dev), ("test", split.test)):
        dataset = load_beir_folder(tmp_path / "split" / side, "test")
        assert len(dataset.queries) == num_queries
        evaluator = RetrievalEvaluator(dataset, metrics=["ndcg@10"])
        run: dict[str, dict[str, float]] = {}
        for query_id, query in dataset.queries.items():
            run[query_id] = {}
            for document_id, document in dataset.corpus.items():
                text = document["text"]
                is_same = number_of_group[text] == number_of_group[query.lower()]
                run[query_id][document_id] = is_same + (text == query.lower())
        assert evaluator.score_run(run) == {"ndcg@10": 1.0}
        bm25_run = evaluator.search_bm25()
        assert evaluator.score_run(fuse_runs(run, bm25_run, 0.01)) == {"ndcg@10": 1.0}
        own_queries = [name for name in dataset.queries if name in dataset.corpus]
        assert len(own_queries) > num_queries / 2
        for name in own_queries:
            assert name not in bm25_run[name]
            assert dataset.corpus[name]["text"] == dataset.queries[name].lower()
            assert name not in dataset.qrels[name]


def test_a_beir_folder_keeps_its_test_set(tmp_path):
    """Training records that are linked with a test query are left out."""
    documents, queries, qrels = make_judged_claims(60)
    queries["q50"] = queries["q3"].upper()
    folder = write_beir(tmp_path / "beir", documents, queries, qrels[:50])
    write_qrels(folder / "qrels" / "test.tsv", qrels[50:])
    split = split_data(RecordSource(folder), tmp_path / "split")
    assert (split.test, split.left_out, split.train + split.dev) == (10, 1, 49)
    assert split.known == {"dev": 0, "test": 0}
    few, left_out = split.warnings()
    assert "10 test queries are few" in few
    assert "--fold" not in few
    assert left_out.startswith("1 training records are left out")
    published_test = load_beir_folder(folder, "test")
    assert load_beir_folder(tmp_path / "split" / "test").qrels == published_test.qrels
    sides = read_sides(tmp_path / "split")
    assert queries["q3"] not in sides["train"].queries + sides["dev"].queries
    other = write_lines(tmp_path / "other.jsonl", [{"_id": "1", "text": "another document"}])
    for settings, corpus in (({"test": 0.1}, None), ({"future": "both"}, None), ({}, other)):
        with pytest.raises(ConfigError, match="its own test set and corpus stay as they are"):
            split_data(RecordSource(folder), tmp_path / "x", SplitSettings(**settings), corpus)


def test_bad_lines_and_empty_documents_of_a_test_set_are_counted_and_not_trained_on(tmp_path):
    """Documents and queries are counted once, although train and test share them."""
    documents, queries, qrels = make_judged_claims(20)
    documents["empty"] = ("", "")
    documents["title"] = ("a title without text", "")
    folder = write_beir(tmp_path / "beir", documents, queries, qrels[:15])
    break_corpus(folder)
    judgements = [*qrels[15:], ("q19", "empty", 1), ("missing", "d19", 1)]
    write_qrels(folder / "qrels" / "test.tsv", judgements)
    with pytest.raises(DataError, match="broken JSON"):
        split_data(RecordSource(folder), tmp_path / "split")
    report = RecordReport("skip")
    split = split_data(RecordSource(folder), tmp_path / "split", report=report)
    # 23 documents, 20 queries, 15 training judgements and 7 test judgements
    assert report.seen == 65
    assert report.by_reason == {"broken JSON": 1, "unknown query": 1}
    assert split.test == 5
    test = load_beir_folder(tmp_path / "split" / "test")
    expected = {f"q{i}": {f"d{i}": 1} for i in range(15, 20)}
    assert test.qrels == expected | {"q19": {"d19": 1, "empty": 1}}
    assert split.documents == {"train": 21 - split.dev - split.test, "dev": 22, "test": 22}
    ids = [row["_id"] for row in read_lines(tmp_path / "split" / "corpus.jsonl")]
    assert "title" in ids and "empty" not in ids


def test_a_beir_folder_without_a_test_set_is_searched_in_its_corpus(tmp_path):
    """The corpus is counted once, and may have blank documents."""
    documents, queries, qrels = make_judged_claims(20)
    documents["blank"] = ("", "")
    folder = write_beir(tmp_path / "beir", documents, queries, qrels)
    break_corpus(folder)
    report = RecordReport("skip")
    settings = SplitSettings(documents=1)
    split = split_data(RecordSource(folder), tmp_path / "split", settings, report=report)
    assert report.by_reason == {"broken JSON": 1}
    assert split.documents["dev"] == split.documents["test"] == 21
    assert len(load_beir_folder(tmp_path / "split" / "test").corpus) == 21


def test_groups_are_small_in_a_larger_test_set(tmp_path):
    """Groups of 60 queries are small in a test set of 240."""
    answers = sentences(10, 0, 9)
    queries = sentences(600, 1, 9)
    pairs = [{"query": text, "positive": answers[n % 10]} for n, text in enumerate(queries)]
    with pytest.raises(DataError, match=r"the largest group has 60 queries.*raise --test"):
        split_records(tmp_path, pairs)
    assert split_records(tmp_path, pairs, test=240).test == 240
    with pytest.raises(DataError, match="train would be empty"):
        split_records(tmp_path, pairs, name="other", dev=60, test=520)


def test_a_folder_of_a_split_is_no_training_data_and_is_not_written_over(tmp_path):
    split_records(tmp_path, make_pairs(40))
    with pytest.raises(DataError, match=r"contaccum split \(give .*split/train\.jsonl\)"):
        RecordSource(tmp_path / "split")
    with pytest.raises(ConfigError, match="exists already"):
        split_records(tmp_path, make_pairs(40))


def test_the_columns_of_a_corpus_are_named_in_split_and_fit(tmp_path, capsys):
    pairs = write_lines(tmp_path / "pairs.jsonl", make_pairs(40))
    rows = [{"chunk": f"c{i}", "content": text} for i, text in enumerate(sentences(30))]
    corpus = tmp_path / "chunks.json"
    corpus.write_text(json.dumps(rows))
    words = ["id=chunk", "text=content"]
    argv = ["split", str(pairs), str(tmp_path / "split"), "--no_progress", "--corpus_columns"]
    assert main([*argv, *words, "--corpus", str(corpus)]) == 0
    columns = parse_columns(words, "corpus_columns")
    Pairs(pairs, corpus, columns).hold_out(tmp_path / "fit")
    for folder in (tmp_path / "split", tmp_path / "fit"):
        ids = load_beir_folder(folder / "test").corpus.keys()
        assert {row["chunk"] for row in rows} <= ids
    # The columns of a corpus that is not given.
    assert main(["split", str(pairs), str(tmp_path / "other"), "--corpus_columns", *words]) == 2
    assert "corpus_columns" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="corpus_columns is set"):
        Pairs(tmp_path / "split", corpus_columns=columns).hold_out(tmp_path / "copy")


def test_the_command_prints_the_sizes_and_the_counts_of_records_and_repeated_ones(tmp_path, capsys):
    records = make_pairs(40)
    pairs = write_lines(tmp_path / "pairs.jsonl", [*records, {"query": "a"}, *records[:3]])
    corpus = write_lines(tmp_path / "corpus.jsonl", [{"_id": "1", "text": "one"}])
    argv = ["split", str(pairs), str(tmp_path / "split"), "--on_bad_record", "skip"]
    assert main([*argv, "--corpus", str(corpus), "--no_progress"]) == 0
    output = capsys.readouterr().out
    line = f"44 records in {pairs} (3 repeated), 1 records in {corpus}: 44 used, 1 left out (1 "
    assert line in output
    assert f"{pairs}: the first record is query='{records[0]['query'][:30]}" in output
    sizes = "held out: 4 dev and 8 test queries on new documents (too few passages have several"
    assert sizes in output
    # Repeated records are said without bad ones too, and by a training that reads no file again.
    write_lines(pairs, [*records, *records])
    [_, counts] = Pairs(pairs).hold_out(tmp_path / "fit")
    assert counts == f"80 records in {pairs} (40 repeated): 80 used, 0 left out"
    for train_file in (tmp_path / "fit" / "train.jsonl", tmp_path / "copy.jsonl"):
        if not train_file.exists():
            train_file.write_bytes((tmp_path / "fit" / "train.jsonl").read_bytes())
        summary = load_training_sets({"a": {"path": train_file}}).summary()
        assert summary == f"a: 56 records in {train_file} (28 repeated): 56 used, 0 left out"


@pytest.mark.long  # near-duplicates of all of SciFact
def test_dev_of_scifact_is_like_its_test_set_and_its_documents_are_no_negatives(tmp_path):
    """Test claims share abstracts with training claims, so dev claims must do so too.

    The training corpus lacks the positives of dev and test that no training claim has.
    """
    split = split_data(RecordSource(shipped_scifact()), tmp_path / "split")
    assert (split.dev, split.test, split.known) == (72, 300, {"dev": 35, "test": 129})
    training_corpus = set()
    for row in read_lines(tmp_path / "split" / "corpus.jsonl"):
        training_corpus.add(normalise_text(f"{row['title']} {row['text']}"))
    sides = read_sides(tmp_path / "split")
    assert_no_near_copies_between_sides(sides, "queries")
    training = set(map(normalise_text, sides["train"].passages))
    held_out = set(map(normalise_text, sides["dev"].passages + sides["test"].passages))
    assert len(held_out - training) > 100
    whole_corpus = load_beir_folder(shipped_scifact(), "test").corpus.values()
    whole = {normalise_text(f"{row['title']} {row['text']}") for row in whole_corpus}
    assert training <= training_corpus == whole - (held_out - training)
    assert split.documents["train"] == len(training_corpus)


def test_queries_that_share_a_passage_or_nearly_a_text_are_one_group(tmp_path):
    first, second, third, fourth = sentences(4)
    documents = {"d1": ("", "rain falls"), "d2": ("", "salt in rocks"), "d3": ("", "bees fly")}
    queries = {"a": first, "b": second, "c": third, "d": third + "?", "e": fourth}
    qrels = [("a", "d1", 1), ("b", "d1", 1), ("c", "d2", 1), ("d", "d3", 1), ("e", "d3", 1)]
    write_beir(tmp_path, documents, queries, qrels, split="test")
    groups = group_queries(load_beir_folder(tmp_path))
    assert groups["a"] == groups["b"] != groups["c"]
    assert groups["c"] == groups["d"] == groups["e"]


@pytest.mark.parametrize(
    ("pairs", "corpus", "options", "word"),
    [
        ([], [], [], "is empty"),
        ([{"query": "a", "positive": "b"}], [], [], "at least 10"),
        ([{"query": "a"}], [], [], "missing positive"),
        (make_pairs(40), [], ["--dev=1.5"], "dev=1.5"),
        (make_pairs(40), [], ["--test=0"], "test=0"),
        (make_pairs(40), [], ["--fold=-1"], "fold=-1"),
        (make_pairs(40), [], ["--future=past"], "--future"),
        (make_pairs(40), [], ["--future=known"], "on known documents: 0 have only"),
        (make_pairs(40), [], ["--dev=20", "--test=20"], "leave none to train on"),
        (make_pairs(40), [{"_id": "1", "text": text} for text in "ab"], [], "occurs again"),
    ],
)
def test_what_cannot_be_split_gives_one_line_and_no_files(
    tmp_path, capsys, pairs, corpus, options, word
):
    argv = ["split", str(write_lines(tmp_path / "pairs.jsonl", pairs)), str(tmp_path / "split")]
    if corpus:
        options = [*options, f"--corpus={write_lines(tmp_path / 'corpus.jsonl', corpus)}"]
    files_before = sorted(tmp_path.iterdir())
    assert main([*argv, "--no_progress", *options]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert word in error
    assert sorted(tmp_path.iterdir()) == files_before


def test_generated_questions_are_added_to_training_alone(tmp_path):
    split_records(tmp_path, make_pairs(60))
    test = read_sides(tmp_path / "split")["test"]
    before = read_lines(tmp_path / "split" / "train.jsonl")
    further = make_pairs(4, seed=1)
    known_passage = before[0]["positive"]
    generated = [
        *further,
        {"query": make_pairs(1, seed=2)[0]["query"], "positive": known_passage},
        {"query": test.queries[0] + "?", "positive": known_passage},
        {"query": make_pairs(1, seed=3)[0]["query"], "positive": test.passages[0] + "."},
        {"query": test.passages[1], "positive": known_passage},
    ]
    path = write_lines(tmp_path / "generated.jsonl", generated)
    line = add_to_training(tmp_path / "split", RecordSource(path), RecordReport())
    assert "5 questions are added" in line
    assert line.endswith(": 3")
    after = read_lines(tmp_path / "split" / "train_with_generated.jsonl")
    assert after == [*before, *generated[:5]]
    assert read_sides(tmp_path / "split")["test"] == test
    documents = [row["text"] for row in read_lines(tmp_path / "split" / "corpus.jsonl")]
    assert len(documents) == len(set(documents))
    assert {row["positive"] for row in further} <= set(documents)
    write_lines(path, generated[6:7])
    with pytest.raises(DataError, match="all 1 records"):
        add_to_training(tmp_path / "split", RecordSource(path), RecordReport())


@pytest.mark.parametrize(
    ("num_generated", "questions"), [(0, ""), (30, "partly generated"), (60, "generated")]
)
def test_a_split_counts_generated_questions(tmp_path, num_generated, questions):
    records = make_pairs(60)
    for record in records[:num_generated]:
        record["generated_by"] = "a model"
    split = split_records(tmp_path, records)
    assert read_split(tmp_path / "split") == split
    assert split.generated == num_generated
    assert split.questions == questions
    is_advised = any("give them to contaccum fit as --generated" in x for x in split.warnings())
    assert is_advised == (questions == "partly generated")
