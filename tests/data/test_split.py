"""Splits: held-out sets share no text with training, by a comparison of words."""

import json
import random
import re
from pathlib import Path
from typing import NamedTuple

import pytest
from sample_texts import sentences
from small_data import read_lines, write_beir, write_lines, write_qrels

from contaccum.cli import main
from contaccum.data import load_beir_folder, load_training_sets
from contaccum.data.near_duplicates import Grouping, group_queries, normalise
from contaccum.data.records import RecordSource, parse_columns
from contaccum.data.rows import RecordReport
from contaccum.data.split import (
    SplitSettings,
    add_to_training,
    choose_sides,
    read_split,
    split_data,
)
from contaccum.errors import ConfigError, DataError
from contaccum.evaluation.evaluator import RetrievalEvaluator
from contaccum.experiments.folds import Pairs
from contaccum.retrieval.bm25 import fuse_runs

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


class SideTexts(NamedTuple):
    """The queries of one side of a split, and their relevant passages."""

    queries: list[str]
    passages: list[str]


class JudgedClaims(NamedTuple):
    """Documents, queries and judgements, as `write_beir` takes them."""

    documents: dict[str, tuple[str, str]]
    queries: dict[str, str]
    qrels: list[tuple[str, str, int]]


def make_claim(generator: random.Random, num_words: int = 9) -> str:
    """Return a random text of verbs and nouns in turn, each with a random number."""
    words = []
    for position in range(num_words):
        vocabulary = NOUNS if position % 2 else VERBS
        words.append(generator.choice(vocabulary) + str(generator.randrange(40)))
    return " ".join(words)


def make_pairs(count: int, seed: int = 0) -> list[dict[str, object]]:
    generator = random.Random(seed)
    pairs = []
    for _ in range(count):
        pairs.append({"query": make_claim(generator), "positive": make_claim(generator, 30)})
    return pairs


def make_judged_claims(count: int) -> JudgedClaims:
    """Return documents and queries of equal number; document i is relevant to query i."""
    generator = random.Random(0)
    documents = {f"d{i}": ("", make_claim(generator, 30)) for i in range(count)}
    queries = {f"q{i}": make_claim(generator) for i in range(count)}
    qrels = [(f"q{i}", f"d{i}", 1) for i in range(count)]
    return JudgedClaims(documents, queries, qrels)


def write_test_qrels_without_header(folder: Path, qrels: list[tuple[str, str, int]]) -> None:
    """Write the judgements of the split "test" of a BEIR folder. The header is optional in BEIR."""
    lines = ["\t".join(map(str, judgement)) + "\n" for judgement in qrels]
    (folder / "qrels" / "test.tsv").write_text("".join(lines))


def read_scifact_pairs() -> list[dict[str, str]]:
    """Return a record for each training claim of SciFact and each of its abstracts."""
    dataset = load_beir_folder(SHIPPED, "train")
    records = []
    for query_id, judgements in dataset.qrels.items():
        for document_id in judgements:
            document = dataset.corpus[document_id]
            positive = f"{document['title']} {document['text']}"
            records.append({"query": dataset.queries[query_id], "positive": positive})
    return records


def make_claims_with_repeats() -> list[dict[str, str]]:
    """Return claims of SciFact with abstracts, and near-copies of a sixth of the claims."""
    records = read_scifact_pairs()
    generator = random.Random(1)
    for number, record in enumerate(generator.sample(records, len(records) // 6)):
        query = record["query"]
        repeats = (query.upper(), "  " + query.replace(" ", "\t"), f"{query} indeed")
        # The passage differs, so that only the query links the two records.
        records.append({"query": repeats[number % 3], "positive": make_claim(generator, 60)})
    generator.shuffle(records)
    return records


def normalise_text(text: str) -> str:
    return " ".join(text.lower().split())


def collect_words(text: str) -> frozenset[str]:
    return frozenset(re.findall("[a-z0-9]+", text.lower()))


def collect_relevant_ids(qrels: dict[str, dict[str, int]]) -> set[str]:
    """Return the ids of all judged documents; the tests judge only relevant ones."""
    return set().union(*qrels.values())


def read_training_texts(file: Path) -> SideTexts:
    texts = SideTexts([], [])
    for row in read_lines(file):
        texts.queries.append(row["query"])
        positives = row["positive"]
        texts.passages.extend([positives] if isinstance(positives, str) else positives)
    return texts


def read_texts_by_side(folder: Path) -> dict[str, SideTexts]:
    """Return the queries and the relevant passages of each side of a split."""
    sides = {"train": read_training_texts(folder / "train.jsonl")}
    for side in ("dev", "test"):
        dataset = load_beir_folder(folder / side, "test")
        relevant = collect_relevant_ids(dataset.qrels)
        passages = [" ".join(dataset.corpus[document_id].values()) for document_id in relevant]
        sides[side] = SideTexts(list(dataset.queries.values()), passages)
    return sides


def find_near_copies(texts: list[str], other_texts: list[str]) -> list[tuple[str, str]]:
    """Return pairs of a text and another text that share nine tenths of their words."""
    pairs = []
    words_of_others = [(other_text, collect_words(other_text)) for other_text in other_texts]
    for text in texts:
        words = collect_words(text)
        for other_text, other_words in words_of_others:
            if len(words & other_words) >= 0.9 * len(words | other_words):
                pairs.append((text, other_text))
    return pairs


def assert_no_near_copies_between_sides(sides: dict[str, SideTexts], field: str) -> None:
    """Compare the queries, or the passages, of each side with those of the other two."""
    for side, other_side in (("train", "dev"), ("train", "test"), ("dev", "test")):
        texts = getattr(sides[side], field)
        other_texts = getattr(sides[other_side], field)
        assert find_near_copies(texts, other_texts) == []


@pytest.fixture(scope="module")
def planted(tmp_path_factory) -> tuple[Path, list[dict[str, str]]]:
    """Return a folder with a split of claims with repeats, and the records of the claims."""
    folder = tmp_path_factory.mktemp("planted")
    records = make_claims_with_repeats()
    pairs = RecordSource(write_lines(folder / "pairs.jsonl", records))
    split_data(pairs, folder / "split", SplitSettings(future="new"))
    return folder, records


def test_no_text_is_on_two_sides(planted):
    """A sixth of the claims are repeated in the data."""
    folder, records = planted
    sides = read_texts_by_side(folder / "split")
    assert_no_near_copies_between_sides(sides, "queries")
    assert_no_near_copies_between_sides(sides, "passages")
    split = read_split(folder / "split")
    distinct_queries = {normalise_text(record["query"]) for record in records}
    num_queries = len(distinct_queries)
    assert split.train + split.dev + split.test == num_queries  # nothing is lost
    # The word "indeed" makes a near-duplicate of a third of the repeated claims.
    assert split.near_duplicates > 30
    assert split.dev == pytest.approx(0.1 * num_queries, abs=3)
    assert split.test == pytest.approx(0.2 * num_queries, abs=3)


def test_the_same_records_in_another_order_give_the_same_split(planted, tmp_path):
    folder, records = planted
    pairs = write_lines(tmp_path / "pairs.jsonl", list(reversed(records)))
    split = split_data(RecordSource(pairs), tmp_path / "split", SplitSettings(future="new"))
    assert split.fingerprint == read_split(folder / "split").fingerprint
    sides_of_reversed = read_texts_by_side(tmp_path / "split")
    sides_of_original = read_texts_by_side(folder / "split")
    for side in SIDES:
        for texts, texts_of_original in zip(
            sides_of_reversed[side], sides_of_original[side], strict=True
        ):
            assert set(map(normalise_text, texts)) == set(map(normalise_text, texts_of_original))

    settings = SplitSettings(seed=1, future="new")
    other = split_data(RecordSource(pairs), tmp_path / "other", settings)
    assert other.fingerprint != split.fingerprint
    sides_of_other_seed = read_texts_by_side(tmp_path / "other")
    test_queries = set(sides_of_reversed["test"].queries)
    assert set(sides_of_other_seed["test"].queries) != test_queries


def make_questions_about_passages() -> list[dict[str, object]]:
    """Return three questions about each of 100 passages, and near-copies of every fifteenth one.

    Each of these has a near-copy, about another passage, which has a near-copy itself. The negative
    of a record is a near-copy of the question of another one.
    """
    generator = random.Random(0)
    passages = [make_claim(generator, 30) for _ in range(100)]
    records: list[dict[str, object]] = []
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
    [("known", 1.0, True), ("both", 0.5, True), (None, 0.5, False)],
)
def test_no_query_is_on_two_sides_whatever_documents_are_known(
    tmp_path, future, known_share, has_corpus
):
    records = make_questions_about_passages()
    corpus = None
    if has_corpus:
        rows = []
        for number, record in enumerate(records):
            rows.append({"_id": f"q{number}", "title": "Asked", "text": record["negatives"][0]})
            rows.append({"_id": f"p{number}", "title": f"{number}", "text": record["positive"]})
        corpus = write_lines(tmp_path / "corpus.jsonl", rows)
    pairs = RecordSource(write_lines(tmp_path / "pairs.jsonl", records))
    split = split_data(pairs, tmp_path / "split", SplitSettings(future=future), corpus)
    sides = read_texts_by_side(tmp_path / "split")
    assert_no_near_copies_between_sides(sides, "queries")
    held_out = sides["dev"].queries + sides["test"].queries
    negatives = set(collect_training_negatives(tmp_path / "split"))
    for query in held_out:
        assert f"{query.removeprefix('so ').removesuffix(' indeed')}, now" not in negatives
    assert len(negatives) > 100
    assert split.train + split.dev + split.test == len(records)

    passages_of_query: dict[str, set[str]] = {}
    for record in records:
        passages_of_query.setdefault(record["query"], set()).add(record["positive"])
    training_passages = set(sides["train"].passages)
    for side, size, total in (("dev", split.dev, 0.1), ("test", split.test, 0.2)):
        assert size == pytest.approx(total * len(records), abs=8)
        queries = sides[side].queries
        is_known = [passages_of_query[query] <= training_passages for query in queries]
        is_new = [passages_of_query[query].isdisjoint(training_passages) for query in queries]
        assert sum(is_known) == split.known[side] == pytest.approx(known_share * size, abs=5)
        assert sum(is_new) == size - split.known[side]
        kinds = {}
        if future != "known":
            for kind in ("known", "new"):
                kinds[kind] = load_beir_folder(tmp_path / "split" / side, kind)
            assert len(kinds["known"].qrels) == split.known[side]
            whole = load_beir_folder(tmp_path / "split" / side)
            assert kinds["known"].qrels | kinds["new"].qrels == whole.qrels
            for query in kinds["known"].queries.values():
                assert passages_of_query[query] <= training_passages

    shuffled = write_lines(tmp_path / "shuffled.jsonl", list(reversed(records)))
    settings = SplitSettings(future=future)
    again = split_data(RecordSource(shuffled), tmp_path / "again", settings, corpus)
    assert again.fingerprint == split.fingerprint
    for side, texts in read_texts_by_side(tmp_path / "again").items():
        assert sorted(texts.queries) == sorted(sides[side].queries)


@pytest.mark.parametrize("future", ["known", "both"])
def test_known_test_queries_of_folds_are_disjoint(tmp_path, future):
    """Their passages are in training in each fold."""
    pairs = RecordSource(write_lines(tmp_path / "p.jsonl", make_questions_about_passages()))
    tested: list[str] = []
    for fold in range(3):
        settings = SplitSettings(dev=20, test=60, fold=fold, future=future)
        split = split_data(pairs, tmp_path / str(fold), settings)
        assert split.known["test"] >= (60 if future == "known" else 30)
        assert split.folds >= 3
        sides = read_texts_by_side(tmp_path / str(fold))
        assert not set(sides["dev"].queries) & set(sides["test"].queries)
        tested += sides["test"].queries
    assert len(tested) >= 180
    assert len(set(tested)) == len(tested)
    with pytest.raises(ConfigError, match=f"folds 0 to {split.folds - 1}"):
        settings = SplitSettings(dev=20, test=60, fold=split.folds, future=future)
        split_data(pairs, tmp_path / "last", settings)


def test_all_folds_have_known_queries(tmp_path):
    """New queries alone would give more folds, and the last fold has at least half as many."""
    pairs = make_pairs(460)
    for first, second in zip(pairs[:60], pairs[60:120], strict=True):
        second["positive"] = first["positive"]
    source = RecordSource(write_lines(tmp_path / "pairs.jsonl", pairs))
    sizes = {"dev": 24, "test": 24}
    split = split_data(source, tmp_path / "0", SplitSettings(**sizes))
    assert split.folds > 1
    for fold in range(1, split.folds):
        other = split_data(source, tmp_path / str(fold), SplitSettings(**sizes, fold=fold))
        assert split.known["test"] / 2 <= other.known["test"] <= split.known["test"]
        assert other.test - other.known["test"] == split.test - split.known["test"]


def test_a_query_is_new_if_no_other_query_has_its_passage(tmp_path):
    pairs = make_pairs(60)
    for pair in pairs[:8]:
        pair["positive"] = pairs[0]["positive"]  # one passage with eight queries, one of them known
    source = RecordSource(write_lines(tmp_path / "pairs.jsonl", pairs))
    assert split_data(source, tmp_path / "default").known == {"dev": 0, "test": 0}
    split = split_data(source, tmp_path / "both", SplitSettings(future="both"))
    assert split.known == {"dev": 2, "test": 4}
    assert split.dev + split.test == 18
    with pytest.raises(DataError, match=r"cannot hold out 18 .* on known documents: 7 have only"):
        split_data(source, tmp_path / "known", SplitSettings(future="known"))
    known = split_data(source, tmp_path / "small", SplitSettings(dev=2, test=4, future="known"))
    assert known.known == {"dev": 2, "test": 4}
    assert "2 dev and 4 test queries on known documents" in known.summary()


def test_a_held_out_set_is_searched_among_other_passages_too(planted):
    folder, _ = planted
    for side in ("dev", "test"):
        dataset = load_beir_folder(folder / "split" / side, "test")
        num_documents = len(dataset.corpus)
        assert num_documents > 3 * len(collect_relevant_ids(dataset.qrels))
        distinct_texts = {document["text"].lower() for document in dataset.corpus.values()}
        assert len(distinct_texts) == num_documents


def test_each_query_is_in_the_test_set_of_one_fold(tmp_path):
    pairs = write_lines(tmp_path / "pairs.jsonl", make_pairs(60))
    tested: list[str] = []
    for fold in range(5):
        folder = tmp_path / str(fold)
        split = split_data(RecordSource(pairs), folder, SplitSettings(fold=fold))
        assert split.test == 12
        assert split.dev == 6
        assert any("few" in warning for warning in split.warnings())
        tested += read_texts_by_side(folder)["test"].queries
    assert len(tested) == 60
    assert len(set(tested)) == 60
    with pytest.raises(ConfigError, match="folds 0 to 4"):
        split_data(RecordSource(pairs), tmp_path / "5", SplitSettings(fold=5))


@pytest.mark.long
def test_the_default_sizes_of_a_large_file_have_a_limit(tmp_path):
    # A tenth of 6,000 queries would be 600 for dev, and a fifth 1,200 for test.
    pairs = write_lines(tmp_path / "pairs.jsonl", make_pairs(6000))
    split = split_data(RecordSource(pairs), tmp_path / "split")
    assert split.dev == 500
    assert split.test == 1000
    assert split.train == 4500


def test_sizes_are_shares_or_numbers(tmp_path):
    pairs = write_lines(tmp_path / "pairs.jsonl", make_pairs(200))
    split = split_data(RecordSource(pairs), tmp_path / "split", SplitSettings(dev=0.25, test=30))
    assert split.dev == 50
    assert split.test == 30
    assert split.train == 120


def test_a_large_group_stays_on_one_side(tmp_path):
    """Each passage answers two questions, and each question has two passages: one long chain."""
    generator = random.Random(0)
    passages = [make_claim(generator, 30) for _ in range(51)]
    chain = []
    for i in range(50):
        chain.append({"query": make_claim(generator), "positive": [passages[i], passages[i + 1]]})
    pairs = write_lines(tmp_path / "chain.jsonl", chain)
    with pytest.raises(DataError, match="the largest group has 50 queries"):
        split_data(RecordSource(pairs), tmp_path / "split")
    pairs = write_lines(tmp_path / "mixed.jsonl", chain + make_pairs(100, 1))
    split = split_data(RecordSource(pairs), tmp_path / "split")
    assert split.largest_group == 50
    sides = read_texts_by_side(tmp_path / "split")
    assert set(passages).isdisjoint(sides["test"].passages)


def test_held_out_positives_are_no_hard_negatives_in_training(tmp_path):
    """Their teacher scores are removed with them."""
    records = make_pairs(40)
    for number, record in enumerate(records):
        next_record = records[(number + 1) % len(records)]
        record["negatives"] = [next_record["positive"].upper(), f"never {number}"]
        record["scores"] = [3.0, 2.0, 1.0]  # of the positive and of both negatives
    split = split_data(
        RecordSource(write_lines(tmp_path / "pairs.jsonl", records)), tmp_path / "split"
    )
    sides = read_texts_by_side(tmp_path / "split")
    held_out = {text.strip() for text in sides["dev"].passages + sides["test"].passages}
    num_left_out = 0
    for row in read_lines(tmp_path / "split" / "train.jsonl"):
        negatives = row["negatives"]
        assert held_out.isdisjoint(map(str.lower, negatives))
        assert negatives[-1].startswith("never")
        if len(negatives) == 2:
            assert row["scores"] == [3.0, 2.0, 1.0]
        else:
            assert row["scores"] == [3.0, 1.0]
        num_left_out += 2 - len(negatives)
    assert num_left_out > 0
    assert split.negatives_left_out == num_left_out


def test_dev_and_test_are_searched_in_the_whole_corpus(tmp_path):
    """Its copies of a positive are relevant too."""
    records = make_pairs(40)
    corpus = [{"_id": "other", "title": "An", "text": "other one"}]
    for number, record in enumerate(records):
        text = record["positive"]
        if number < 30:
            corpus.append({"_id": f"d{number}", "title": "", "text": text})
        corpus.append({"_id": f"copy{number}", "title": "", "text": text.title()})
    pairs = write_lines(tmp_path / "pairs.jsonl", records)
    corpus_file = write_lines(tmp_path / "corpus.jsonl", corpus)
    split = split_data(RecordSource(pairs), tmp_path / "split", corpus=corpus_file)
    # Both have the 30 positives, 40 copies and the other document.
    assert split.documents == {"train": split.train + 1, "dev": 71, "test": 71}
    dataset = load_beir_folder(tmp_path / "split" / "test", "test")
    assert dataset.corpus["other"] == {"title": "An", "text": "other one"}
    numbers_of_positives = {len(judgements) for judgements in dataset.qrels.values()}
    assert numbers_of_positives <= {1, 2}
    assert 2 in numbers_of_positives


def test_held_out_positives_are_added_to_a_corpus_that_lacks_them(tmp_path):
    pairs = write_lines(tmp_path / "pairs.jsonl", make_pairs(40))
    document = {"_id": "1", "text": "nothing that is asked for"}
    corpus_file = write_lines(tmp_path / "corpus.jsonl", [document])
    split = split_data(RecordSource(pairs), tmp_path / "split", corpus=corpus_file)
    assert split.documents == {
        "train": 1 + split.train,
        "dev": 1 + split.dev,
        "test": 1 + split.test,
    }


def make_titled_corpus_with_pairs() -> tuple[list[dict[str, object]], list[dict[str, str]]]:
    """Return 40 training records without titles, and a corpus of documents with titles.

    The documents d0 and copy0 have the text of the positive of record 0, under different titles. A
    record's negatives are the text of the next document with its title, and a text that is no
    document.
    """
    records = make_pairs(40)
    corpus = []
    for number, record in enumerate(records):
        text = record["positive"]
        corpus.append({"_id": f"d{number}", "title": f"Page {number}", "text": text})
        corpus.append({"_id": f"copy{number}", "title": "Another page", "text": text.title()})
    for number, record in enumerate(records):
        next_document = corpus[2 * ((number + 1) % len(records))]
        next_text = f"{next_document['title']} {next_document['text']}"
        record["negatives"] = [next_text, f"never {number}"]
    return records, corpus


def test_documents_are_held_out_if_the_pairs_have_their_texts_without_titles(tmp_path):
    records, corpus = make_titled_corpus_with_pairs()
    pairs = write_lines(tmp_path / "pairs.jsonl", records)
    corpus_file = write_lines(tmp_path / "corpus.jsonl", corpus)
    split = split_data(RecordSource(pairs), tmp_path / "split", corpus=corpus_file)

    number_of_query = {record["query"]: number for number, record in enumerate(records)}
    held_out_texts = set()
    for side in ("dev", "test"):
        dataset = load_beir_folder(tmp_path / "split" / side, "test")
        for query_id, judgements in dataset.qrels.items():
            number = number_of_query[dataset.queries[query_id]]
            assert judgements == {f"d{number}": 1, f"copy{number}": 1}
            held_out_texts.add(records[number]["positive"])
    assert split.documents["dev"] == 80
    assert split.documents["test"] == 80
    assert split.positives_added == 0
    assert "not in the corpus" not in split.summary()

    training_texts = [row["text"] for row in read_lines(tmp_path / "split" / "corpus.jsonl")]
    for row in read_lines(tmp_path / "split" / "train.jsonl"):
        training_texts.extend(row["negatives"])
    for text in training_texts:
        assert not normalise_text(text).endswith(tuple(held_out_texts))
    assert split.train == 28

    # Hard negatives may have the form with the title as positives, and the other one themselves.
    for number, record in enumerate(records):
        record["positive"] = f"{corpus[2 * number]['title']} {corpus[2 * number]['text']}"
        record["negatives"] = [corpus[2 * ((number + 1) % len(records))]["text"], f"never {number}"]
    pairs = write_lines(tmp_path / "titled.jsonl", records)
    split_data(RecordSource(pairs), tmp_path / "titled", corpus=corpus_file)
    held_out_ids = set()
    for side in ("dev", "test"):
        for judgements in load_beir_folder(tmp_path / "titled" / side, "test").qrels.values():
            held_out_ids |= judgements.keys()
    held_out = {row["text"] for row in corpus if row["_id"] in held_out_ids}
    assert len(held_out) > 0
    for row in read_lines(tmp_path / "titled" / "train.jsonl"):
        assert held_out.isdisjoint(row["negatives"])
    # The positives of 28 queries without titles, and negatives that are no document.
    assert split.documents["train"] >= 28 + 28


def write_form(form: str, text: str) -> str:
    """Return a text in another form, with a change in each of its words."""
    words = text.split()
    if form == "soft hyphens":
        return " ".join(f"{word[:2]}\u00ad{word[2:]}" for word in words)
    if form == "zero-width spaces":
        return " ".join(f"{word[:2]}\u200b{word[2:]}" for word in words)
    if form == "entities":
        return "&nbsp;".join(f"&quot;{word}&quot;" for word in words)
    if form == "accents":
        return text.replace("e", "é").replace("o", "ø")
    if form == "tags":
        return f"<p class='x'>{'<br/>'.join(f'<b>{word}</b>' for word in words)}</p>"
    return " ".join(f"{word}, " for word in words)  # punctuation


FORMS = ("soft hyphens", "zero-width spaces", "entities", "accents", "tags", "punctuation")


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_one_query_are_on_one_side(tmp_path, form):
    """The passages of the two records differ, so that only the query links them."""
    pairs = make_pairs(60)
    others = make_pairs(60, 1)
    for pair, other in zip(pairs, others, strict=True):
        other["query"] = write_form(form, pair["query"])
    split = split_data(
        RecordSource(write_lines(tmp_path / "pairs.jsonl", pairs + others)), tmp_path / "split"
    )
    assert split.groups == 60
    sides = read_texts_by_side(tmp_path / "split")
    for side in SIDES:
        queries = {normalise(query) for query in sides[side].queries}
        passages = {text.strip() for text in sides[side].passages}
        for pair, other in zip(pairs, others, strict=True):
            is_here = normalise(pair["query"]) in queries
            assert is_here == (pair["positive"] in passages) == (other["positive"] in passages)


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
    pairs = write_lines(tmp_path / "pairs.jsonl", records)
    corpus_file = write_lines(tmp_path / "corpus.jsonl", corpus)
    split = split_data(RecordSource(pairs), tmp_path / "split", corpus=corpus_file)
    assert split.groups == 40
    assert split.positives_added == 0
    sides = read_texts_by_side(tmp_path / "split")
    for first, second in zip(records[::2], records[1::2], strict=True):
        for side in SIDES:
            assert (first["query"] in sides[side].queries) == (
                second["query"] in sides[side].queries
            )


@pytest.mark.parametrize("separator", [". ", ": ", " ", "\n", " - "])
def test_a_positive_is_not_a_negative_of_itself_under_another_separator(tmp_path, separator):
    records = make_pairs(40)
    corpus = []
    for number, record in enumerate(records):
        corpus.append({"_id": f"d{number}", "title": f"Page {number}", "text": record["positive"]})
        record["positive"] = f"Page {number}{separator}{record['positive']}"
    pairs = write_lines(tmp_path / "pairs.jsonl", records)
    corpus_file = write_lines(tmp_path / "corpus.jsonl", corpus)
    split = split_data(RecordSource(pairs), tmp_path / "split", corpus=corpus_file)
    assert split.documents["train"] == split.train


def collect_training_negatives(folder: Path) -> list[str]:
    """Return the hard negatives in train.jsonl and the texts of corpus.jsonl."""
    texts = [row["text"] for row in read_lines(folder / "corpus.jsonl")]
    for row in read_lines(folder / "train.jsonl"):
        texts.extend(row.get("negatives", ()))
    return texts


@pytest.mark.parametrize("field", ["query", "positive"])
@pytest.mark.parametrize("change", ["{}", "{}.", "so {}", "{} indeed"])
@pytest.mark.parametrize("is_in_corpus", [False, True])
def test_near_copies_of_held_out_texts_are_no_negatives(tmp_path, field, change, is_in_corpus):
    """Duplicate questions have other questions as negatives."""
    records = make_pairs(60)
    near_copies = [change.format(record[field]) for record in records]
    for number, record in enumerate(records):
        record["negatives"] = [f"never {number}", near_copies[(number + 1) % len(records)]]
    corpus = []
    if is_in_corpus:
        for number, text in enumerate(near_copies):
            corpus.append({"_id": str(number), "title": "", "text": text})
            records[number]["negatives"].pop()
        corpus.append({"_id": "other", "title": "", "text": "another text"})
    split_data(
        RecordSource(write_lines(tmp_path / "pairs.jsonl", records)),
        tmp_path / "split",
        corpus=write_lines(tmp_path / "corpus.jsonl", corpus) if corpus else None,
    )
    sides = read_texts_by_side(tmp_path / "split")
    negatives = collect_training_negatives(tmp_path / "split")
    num_allowed = 0
    for record, near_copy in zip(records, near_copies, strict=True):
        if record["query"] in sides["train"].queries:
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
    test_qrels = [(f"t{number}", f"d{number}", 1) for number in range(40)]
    # The documents of q0 and q1 are a test query, and nearly a training query.
    documents["d0"] = ("", queries["t20"] + "!")
    documents["d1"] = ("", "So: " + queries["q59"])
    folder = write_beir(tmp_path / "beir", documents, queries, qrels)
    write_qrels(folder / "qrels" / "test.tsv", test_qrels)
    split = split_data(RecordSource(folder), tmp_path / "split", SplitSettings(dev=20))
    assert split.left_out == 1
    sides = read_texts_by_side(tmp_path / "split")
    is_known = [queries[f"q{number}"] in sides["train"].queries for number in range(40)]
    assert split.known["test"] == sum(is_known) > 0
    assert queries["q0"] not in sides["train"].queries
    for side in ("train", "dev"):
        assert (queries["q1"] in sides[side].queries) == (queries["q59"] in sides[side].queries)


def test_positives_that_the_corpus_lacks_are_counted_in_the_summary(tmp_path, capsys):
    pairs = write_lines(tmp_path / "pairs.jsonl", make_pairs(40))
    corpus = write_lines(tmp_path / "corpus.jsonl", [{"_id": "1", "text": "another text"}])
    argv = ["split", str(pairs), str(tmp_path / "split"), "--corpus", str(corpus), "--no_progress"]
    assert main(argv) == 0
    assert "; 12 held-out positives are not in the corpus" in capsys.readouterr().out


@pytest.mark.parametrize("title", [None, "", "A question"])
def test_a_perfect_model_has_a_perfect_score_on_similar_questions(tmp_path, title):
    """Each question is a query and, in other words, the answer to the others of its group."""
    generator = random.Random(0)
    groups = [[make_claim(generator) for _ in range(4)] for _ in range(60)]
    records: list[dict[str, object]] = []
    for first, *others in groups:
        for query in others:
            answers = [text for text in (first, *others) if text != query]
            records.append({"query": query.upper(), "positive": answers})
    # Of a query to which its own text is relevant, that document counts.
    records += [{"query": text, "positive": [text]} for [text, *_] in groups]
    corpus = None
    if title is not None:
        texts = [text for group in groups for text in group]
        rows = [{"_id": f"q{i}", "title": title, "text": text} for i, text in enumerate(texts)]
        corpus = write_lines(tmp_path / "corpus.jsonl", rows)
    pairs = RecordSource(write_lines(tmp_path / "pairs.jsonl", records))
    split = split_data(pairs, tmp_path / "split", corpus=corpus)
    for side, num_queries in (("dev", split.dev), ("test", split.test)):
        dataset = load_beir_folder(tmp_path / "split" / side, "test")
        assert len(dataset.queries) == num_queries
        evaluator = RetrievalEvaluator(dataset, metrics=["ndcg@10"])
        number_of_group = {text: n for n, group in enumerate(groups) for text in group}
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


@pytest.mark.parametrize("fold", [0, 1])
def test_known_and_new_queries_have_the_ids_of_documents_with_their_text(tmp_path, fold):
    generator = random.Random(0)
    passages = [make_claim(generator, 30) for _ in range(100)]
    pairs = [{"query": make_claim(generator), "positive": passages[i % 100]} for i in range(300)]
    rows = [{"_id": f"q{i}", "title": "Asked", "text": row["query"]} for i, row in enumerate(pairs)]
    rows += [{"_id": f"p{i}", "title": "", "text": text} for i, text in enumerate(passages)]
    corpus = write_lines(tmp_path / "corpus.jsonl", rows)
    source = RecordSource(write_lines(tmp_path / "pairs.jsonl", [*pairs, pairs[-1]]))
    split = split_data(source, tmp_path / "split", SplitSettings(fold=fold, test=60), corpus)
    assert 0 < split.known["test"] < split.test
    id_of_query = {row["text"]: row["_id"] for row in rows}
    whole = load_beir_folder(tmp_path / "split" / "test")
    kinds = [load_beir_folder(tmp_path / "split" / "test", kind) for kind in ("known", "new")]
    assert kinds[0].queries | kinds[1].queries == whole.queries
    assert len(whole.queries) == split.test
    for dataset in (whole, *kinds):
        for query_id, text in dataset.queries.items():
            assert query_id == id_of_query[text]


def test_a_title_without_text_stays_in_the_training_corpus(tmp_path):
    """The test set of the data judges an empty document, which has no copies."""
    documents, queries, qrels = make_judged_claims(20)
    documents["empty"] = ("", "")
    documents["title"] = ("a title without text", "")
    folder = write_beir(tmp_path / "beir", documents, queries, qrels[:15])
    write_test_qrels_without_header(folder, [*qrels[15:], ("q19", "empty", 1)])
    split_data(RecordSource(folder), tmp_path / "split")
    ids = [row["_id"] for row in read_lines(tmp_path / "split" / "corpus.jsonl")]
    assert "title" in ids
    assert "empty" not in ids


def test_a_beir_folder_keeps_its_test_set(tmp_path):
    """Training records that are linked with a test query are left out."""
    documents, queries, qrels = make_judged_claims(60)
    queries["q50"] = queries["q3"].upper()
    folder = write_beir(tmp_path / "beir", documents, queries, qrels[:50])
    write_qrels(folder / "qrels" / "test.tsv", qrels[50:])
    split = split_data(RecordSource(folder), tmp_path / "split")
    assert split.test == 10
    assert split.left_out == 1
    assert split.known == {"dev": 0, "test": 0}
    published_test = load_beir_folder(folder, "test")
    assert load_beir_folder(tmp_path / "split" / "test").qrels == published_test.qrels
    sides = read_texts_by_side(tmp_path / "split")
    assert queries["q3"] not in sides["train"].queries
    assert queries["q3"] not in sides["dev"].queries
    assert split.train + split.dev == 49


def test_sizes_and_corpus_do_not_replace_the_test_set_of_a_beir_folder(tmp_path):
    documents, queries, qrels = make_judged_claims(60)
    folder = write_beir(tmp_path / "beir", documents, queries, qrels[:50])
    write_qrels(folder / "qrels" / "test.tsv", qrels[50:])
    for settings in (SplitSettings(test=0.1), SplitSettings(future="both")):
        with pytest.raises(ConfigError, match="its own test set and corpus stay as they are"):
            split_data(RecordSource(folder), tmp_path / "again", settings)
    other = write_lines(tmp_path / "other.jsonl", [{"_id": "1", "text": "another document"}])
    with pytest.raises(ConfigError, match="its own test set and corpus stay as they are"):
        split_data(RecordSource(folder), tmp_path / "again", corpus=other)


def test_dev_and_test_of_a_beir_folder_without_a_test_set_are_searched_in_its_corpus(tmp_path):
    documents = {f"d{number}": ("", text) for number, text in enumerate(sentences(60, 0, 9))}
    queries = {f"q{number}": text for number, text in enumerate(sentences(30, 1, 9))}
    qrels = [(f"q{number}", f"d{number}", 1) for number in range(30)]
    folder = tmp_path / "beir"
    write_beir(folder, documents, queries, qrels, "train")
    split = split_data(RecordSource(folder), tmp_path / "split", SplitSettings(documents=1))
    assert split.documents["dev"] == 60
    assert split.documents["test"] == 60
    assert len(load_beir_folder(tmp_path / "split" / "test").corpus) == 60


def test_groups_are_small_in_a_larger_test_set(tmp_path):
    """Groups of 60 queries are small in a test set of 240."""
    pairs = []
    answers = sentences(10, 0, 9)
    for number, query in enumerate(sentences(600, 1, 9)):
        pairs.append({"query": query, "positive": answers[number % 10]})
    source = RecordSource(write_lines(tmp_path / "faq.jsonl", pairs))
    with pytest.raises(DataError, match=r"the largest group has 60 queries.*raise --test"):
        split_data(source, tmp_path / "split")
    assert split_data(source, tmp_path / "split", SplitSettings(test=240)).test == 240
    with pytest.raises(DataError, match="no group of linked records is left to train on"):
        split_data(source, tmp_path / "other", SplitSettings(dev=60, test=520))


def test_a_warning_of_few_test_queries_names_folds_unless_the_data_have_a_test_set(tmp_path):
    pairs = RecordSource(write_lines(tmp_path / "pairs.jsonl", make_pairs(40)))
    [warning] = split_data(pairs, tmp_path / "pairs").warnings()
    assert "--fold 1, 2" in warning
    documents, queries, qrels = make_judged_claims(60)
    folder = write_beir(tmp_path / "beir", documents, queries, qrels[:50])
    write_qrels(folder / "qrels" / "test.tsv", qrels[50:])
    [warning] = split_data(RecordSource(folder), tmp_path / "split").warnings()
    assert "test queries are few" in warning
    assert "--fold" not in warning


def test_the_corpus_of_a_beir_folder_is_counted_once_and_may_have_blank_documents(tmp_path):
    documents, queries, qrels = make_judged_claims(20)
    documents["blank"] = ("", "")
    folder = write_beir(tmp_path / "beir", documents, queries, qrels)
    with open(folder / "corpus.jsonl", "a") as file:
        file.write("{broken\n")
    report = RecordReport("skip")
    split = split_data(RecordSource(folder), tmp_path / "split", report=report)
    assert report.by_reason == {"broken JSON": 1}
    assert split.documents["test"] == 21


def test_scores_of_a_dpr_file_do_not_become_teacher_scores(tmp_path):
    """They are those of BM25."""
    records = []
    for number, pair in enumerate(make_pairs(40)):
        passage = {"title": "", "text": pair["positive"], "score": "1000", "passage_id": "1"}
        negative = {**passage, "text": f"never {number}", "score": "12.3"}
        record = {"question": pair["query"], "answers": []}
        records.append({**record, "positive_ctxs": [passage], "hard_negative_ctxs": [negative]})
    file = tmp_path / "nq.json"
    file.write_text(json.dumps(records))
    split_data(RecordSource(file), tmp_path / "split")
    lines = read_lines(tmp_path / "split" / "train.jsonl")
    assert len(lines) > 0
    for line in lines:
        assert len(line["negatives"]) == 1
        assert "scores" not in line


def test_a_folder_of_a_split_is_not_taken_for_training_data(tmp_path):
    split_data(RecordSource(write_lines(tmp_path / "p.jsonl", make_pairs(40))), tmp_path / "split")
    with pytest.raises(DataError, match=r"contaccum split \(give .*split/train\.jsonl\)"):
        RecordSource(tmp_path / "split")


def test_unusable_documents_are_counted_once(tmp_path):
    pairs = write_lines(tmp_path / "pairs.jsonl", make_pairs(20))
    documents = [{"_id": "1", "text": "one"}, {"_id": "2", "text": ""}]
    corpus = write_lines(tmp_path / "corpus.jsonl", documents)
    report = RecordReport("skip")
    split_data(RecordSource(pairs), tmp_path / "split", corpus=corpus, report=report)
    assert report.seen == 22
    assert report.reported == 1


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


def test_counts_name_the_file_of_the_records_and_repeated_records(tmp_path, capsys):
    records = make_pairs(40)
    pairs = write_lines(tmp_path / "pairs.jsonl", [*records, {"query": "a"}, *records[:3]])
    documents = [{"_id": "1", "text": "one"}, {"_id": "2", "text": ""}]
    corpus = write_lines(tmp_path / "corpus.jsonl", documents)
    argv = ["split", str(pairs), str(tmp_path / "split"), "--on_bad_record", "skip"]
    assert main([*argv, "--corpus", str(corpus), "--no_progress"]) == 0
    line = f"44 records in {pairs} (3 repeated), 2 records in {corpus}: 44 used, 2 left out (1 "
    assert line in capsys.readouterr().out
    # Repeated records are said without bad ones too, and by a training that reads no file again.
    write_lines(pairs, [*records, *records])
    [_, counts] = Pairs(pairs).hold_out(tmp_path / "fit")
    assert counts == f"80 records in {pairs} (40 repeated): 80 used, 0 left out"
    for train_file in (tmp_path / "fit" / "train.jsonl", tmp_path / "copy.jsonl"):
        if not train_file.exists():
            train_file.write_bytes((tmp_path / "fit" / "train.jsonl").read_bytes())
        summary = load_training_sets({"a": {"path": train_file}}).summary()
        assert summary == f"a: 56 records in {train_file} (28 repeated): 56 used, 0 left out"


def test_empty_documents_of_a_beir_folder_stay_in_dev_and_test(tmp_path):
    documents, queries, qrels = make_judged_claims(20)
    documents["empty"] = ("", "")
    folder = write_beir(tmp_path / "beir", documents, queries, qrels[:15])
    write_qrels(folder / "qrels" / "test.tsv", qrels[15:])
    split = split_data(RecordSource(folder), tmp_path / "split")
    assert split.documents == {"train": 20 - split.dev - split.test, "dev": 21, "test": 21}


def test_training_corpus_lacks_what_only_held_out_queries_need(tmp_path):
    """It has all documents except positives of dev and test that no training claim has."""
    split = split_data(RecordSource(SHIPPED), tmp_path / "split")
    training_corpus = set()
    for row in read_lines(tmp_path / "split" / "corpus.jsonl"):
        training_corpus.add(normalise_text(f"{row['title']} {row['text']}"))
    sides = read_texts_by_side(tmp_path / "split")
    training = set(map(normalise_text, sides["train"].passages))
    held_out = set(map(normalise_text, sides["dev"].passages + sides["test"].passages))
    only_held_out = held_out - training
    assert training <= training_corpus
    assert len(only_held_out) > 100
    assert not only_held_out & training_corpus
    whole_corpus = set()
    for document in load_beir_folder(SHIPPED, "test").corpus.values():
        whole_corpus.add(normalise_text(f"{document['title']} {document['text']}"))
    assert training_corpus == whole_corpus - only_held_out
    assert split.documents["train"] == len(training_corpus)


@pytest.mark.long
def test_dev_is_held_out_as_the_test_set_of_scifact_is(tmp_path):
    """Its test claims share abstracts with training claims, so dev claims must do so too."""
    split = split_data(RecordSource(SHIPPED), tmp_path / "split")
    assert split.known["test"] == 129
    assert split.test == 300
    sides = read_texts_by_side(tmp_path / "split")
    assert_no_near_copies_between_sides(sides, "queries")
    dev_passages = set(sides["dev"].passages)
    shared_passages = dev_passages.intersection(sides["train"].passages)
    assert len(shared_passages) > 0.2 * len(dev_passages)


def test_the_command_prints_the_sizes_and_train_reads_the_split(tmp_path, capsys):
    pairs = write_lines(tmp_path / "pairs.jsonl", make_pairs(200))
    assert main(["split", str(pairs), str(tmp_path / "split"), "--no_progress"]) == 0
    sizes = "held out: 20 dev and 40 test queries on new documents (too few passages have several"
    output = capsys.readouterr().out
    assert sizes in output
    record = make_pairs(200)[0]
    texts = f"query={record['query'][:30]!r}"[:-1]
    assert f"{pairs}: the first record is {texts}" in output
    assert f"positive={record['positive'][:30]!r}"[:-1] in output
    training_source = RecordSource(tmp_path / "split" / "train.jsonl")
    assert len(list(training_source.records(RecordReport()))) == 140


def test_bad_judgements_of_a_published_test_set_are_counted_and_not_copied(tmp_path):
    """Documents and queries are counted once, although train and test share them."""
    documents, queries, qrels = make_judged_claims(20)
    folder = write_beir(tmp_path / "beir", documents, queries, qrels[:15])
    with open(folder / "corpus.jsonl", "a") as file:
        file.write("{broken\n")
    write_test_qrels_without_header(folder, [*qrels[15:], ("missing", "d19", 1)])
    with pytest.raises(DataError, match="broken JSON"):
        split_data(RecordSource(folder), tmp_path / "split")
    report = RecordReport("skip")
    split = split_data(RecordSource(folder), tmp_path / "split", report=report)
    assert split.test == 5
    # 21 documents, 20 queries, 15 training judgements and 6 test judgements
    assert report.seen == 62
    assert report.by_reason == {"broken JSON": 1, "unknown query": 1}
    test = load_beir_folder(tmp_path / "split" / "test")
    assert test.qrels == {f"q{i}": {f"d{i}": 1} for i in range(15, 20)}
    assert len(test.corpus) == 20


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
        choose_sides("pairs.jsonl", grouping, groups, sizes, fold)
    larger_sizes = {**sizes, empty_side: 24}
    sides = choose_sides("pairs.jsonl", grouping, groups, larger_sizes, fold)
    assert set(sides.values()) == {"train", "dev", "test"}


def test_queries_that_share_a_passage_or_nearly_a_text_are_one_group(tmp_path):
    first, second, third, fourth = sentences(4)
    documents = {"d1": ("", "rain falls"), "d2": ("", "salt in rocks"), "d3": ("", "bees fly")}
    queries = {"a": first, "b": second, "c": third, "d": third + "?", "e": fourth}
    qrels = [("a", "d1", 1), ("b", "d1", 1), ("c", "d2", 1), ("d", "d3", 1), ("e", "d3", 1)]
    write_beir(tmp_path, documents, queries, qrels, split="test")
    groups = group_queries(load_beir_folder(tmp_path))
    assert groups["a"] == groups["b"]
    assert groups["c"] == groups["d"] == groups["e"]
    assert groups["a"] != groups["c"]


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
        (make_pairs(40), [{"_id": "a\tb", "text": "a text"}], [], "a tab"),
        (make_pairs(40), [{"_id": "1", "text": text} for text in "ab"], [], "twice"),
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


def test_a_folder_that_exists_is_not_written_over(tmp_path):
    pairs = write_lines(tmp_path / "pairs.jsonl", make_pairs(40))
    with pytest.raises(ConfigError, match="exists already"):
        split_data(RecordSource(pairs), tmp_path)


def test_generated_questions_are_added_to_training_alone(tmp_path):
    records = make_pairs(60)
    split_data(RecordSource(write_lines(tmp_path / "pairs.jsonl", records)), tmp_path / "split")
    test = read_texts_by_side(tmp_path / "split")["test"]
    [training_pair, *_] = read_lines(tmp_path / "split" / "train.jsonl")
    further = make_pairs(4, seed=1)
    generated = [
        *further,
        {"query": make_pairs(1, seed=2)[0]["query"], "positive": training_pair["positive"]},
        {"query": test.queries[0] + "?", "positive": training_pair["positive"]},
        {"query": make_pairs(1, seed=3)[0]["query"], "positive": test.passages[0] + "."},
        {"query": test.passages[1], "positive": training_pair["positive"]},
    ]
    path = write_lines(tmp_path / "generated.jsonl", generated)
    line = add_to_training(tmp_path / "split", RecordSource(path), RecordReport())
    assert "5 questions are added" in line
    assert line.endswith(": 3")
    before = read_lines(tmp_path / "split" / "train.jsonl")
    after = read_lines(tmp_path / "split" / "train_with_generated.jsonl")
    assert after == [*before, *generated[:5]]
    assert read_texts_by_side(tmp_path / "split")["test"] == test
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
    source = RecordSource(write_lines(tmp_path / "pairs.jsonl", records))
    split = split_data(source, tmp_path / "split")
    assert read_split(tmp_path / "split") == split
    assert split.generated == num_generated
    assert split.questions == questions
    assert any("give them to contaccum fit as --generated" in x for x in split.warnings()) == (
        questions == "partly generated"
    )
