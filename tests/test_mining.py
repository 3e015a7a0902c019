"""Hard negatives: which passages are mined, which never are, their scores and their files."""

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from sample_texts import sentences
from sentence_transformers import SentenceTransformer, util
from sentence_transformers.sentence_transformer.modules import BoW
from small_data import (
    read_lines,
    write_beir,
    write_beir_to_mine,
    write_lines,
    write_pairs,
    write_pairs_to_mine,
)
from tiny_models import bert_config, tiny_encoder
from transformers import BertForMaskedLM, BertForSequenceClassification

from contaccum import DualEncoder
from contaccum.data import load_training_data, passage_text
from contaccum.errors import ConfigError, DataError, UserError
from contaccum.mining import (
    MinedNegatives,
    MiningData,
    SelectionRules,
    check_output,
    load_cross_encoder,
    load_mining_data,
    mine_hard_negatives,
    write_mined,
)


@pytest.fixture(scope="module")
def model(tiny_model_path) -> DualEncoder:
    return DualEncoder.from_pretrained(tiny_model_path, device="cpu")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> Path:
    return write_pairs_to_mine(tmp_path_factory.mktemp("pairs") / "pairs.jsonl")


@pytest.fixture(scope="module")
def beir(tmp_path_factory) -> Path:
    return write_beir_to_mine(tmp_path_factory.mktemp("beir") / "beir")


@pytest.fixture(scope="module")
def cross_encoder(tiny_tokenizer, tmp_path_factory) -> Any:
    """Return a random cross-encoder whose logits spread over about 10 points."""
    path = tmp_path_factory.mktemp("mining") / "cross-encoder"
    config = bert_config(2, 32, 64, num_labels=1, initializer_range=0.5)
    torch.manual_seed(0)
    BertForSequenceClassification(config).save_pretrained(path)
    tiny_tokenizer.save_pretrained(path)
    return load_cross_encoder(str(path), "cpu")


def test_an_encoder_without_a_trained_head_is_no_cross_encoder(
    tiny_config, tiny_tokenizer, tmp_path
):
    BertForMaskedLM(tiny_config).save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="is not a cross-encoder that was trained"):
        load_cross_encoder(str(tmp_path), "cpu")


def mine(model: Any, data: Any, **settings: Any) -> MinedNegatives:
    """Mine with a model, or with BM25 if the model is None."""
    return mine_hard_negatives(data, model, show_progress=False, **settings)


def get_passages(data: MiningData, rows: Iterable[int]) -> list[str]:
    return [data.documents[row].passage for row in rows]


def get_ids(data: MiningData, rows: Iterable[int]) -> list[str]:
    return [data.documents[row].id for row in rows]


def list_rows(mined: MinedNegatives) -> list[list[int]]:
    return [rows.tolist() for rows in mined.rows]


@pytest.mark.parametrize(
    "rules",
    [
        {},
        {"relative_margin": 0.0, "range_max": 20},
        {"relative_margin": 0.001, "range_max": 30},
        {"absolute_margin": 0.0, "range_min": 1},
    ],
)
def test_rules_are_those_of_sentence_transformers(model, pairs, tmp_path, rules):
    records = read_lines(pairs)[4:36]  # queries with one positive
    settings = {"num_negatives": 2, "range_min": 0, **rules}
    mined = mine(model, write_lines(tmp_path / "pairs.jsonl", records), **settings)
    their_rows = util.mine_hard_negatives(
        Dataset.from_list(records), model, output_format="labeled-list", verbose=False, **settings
    )
    # The column "positive" has the positive and then the negatives.
    expected = {row["query"]: row["positive"][1:] for row in their_rows}
    found = {}
    for query, rows in zip(mined.data.queries, mined.rows, strict=True):
        found[query.text] = get_passages(mined.data, rows)
    # sentence-transformers leaves out queries with too few negatives.
    assert {query: found[query] for query in expected} == expected
    assert len(expected) > 5


def test_random_sampling_chooses_every_candidate_equally_often():
    """The margin leaves rows 1 to 9, and range_min skips the first two of them."""
    rules = SelectionRules(num_negatives=1, range_min=2, absolute_margin=1, sampling="random")
    rng = np.random.default_rng(0)
    counts: Counter[int] = Counter()
    for _ in range(2800):
        [selected] = rules.select(-np.arange(10, dtype=np.float32), np.float32(0), rng)
        counts[int(selected)] += 1
    assert set(counts) == {3, 4, 5, 6, 7, 8, 9}
    # 400 on average, plus or minus four standard deviations of 18
    assert all(328 < count < 472 for count in counts.values())


def test_random_sampling_depends_on_the_seed_alone(model, pairs):
    first, again, other = (
        mine(model, pairs, sampling="random", seed=seed, num_negatives=2) for seed in (0, 0, 1)
    )
    assert list_rows(first) == list_rows(again) != list_rows(other)


@pytest.mark.parametrize("similarity", ["cos", "dot"])
def test_negatives_are_the_best_passages_that_are_not_excluded(beir, similarity):
    """Their scores are the model's."""
    model = tiny_encoder(tied=False, normalize=False)
    data = load_mining_data(beir)
    mined = mine(model, data, similarity=similarity, num_negatives=4)
    is_cosine = similarity == "cos"
    passages = [passage_text(passage.title, passage.text) for passage in data.documents]
    texts = [query.text for query in data.queries]
    query_embeddings = model.encode_query(texts, normalize_embeddings=is_cosine)
    passage_embeddings = model.encode_document(passages, normalize_embeddings=is_cosine)
    all_scores = query_embeddings @ passage_embeddings.T
    for number, (query, scores) in enumerate(zip(data.queries, all_scores, strict=True)):
        order = [row for row in np.argsort(-scores) if row not in query.excluded]
        assert mined.rows[number].tolist() == order[:4]
        assert mined.scores[number] == pytest.approx(scores[order[:4]], abs=1e-5)
        positive_scores = scores[query.positives]
        assert mined.positive_scores[number] == pytest.approx(positive_scores, abs=1e-5)


def test_each_of_many_queries_gets_its_own_best_passages(tmp_path):
    """Queries are searched 4,096 at a time. A query is a number of words, and so is a passage."""
    words = [f"w{number}" for number in range(13)]
    model = SentenceTransformer(modules=[BoW(words)], device="cpu")
    texts = [
        " ".join(words[bit] for bit in range(13) if number >> bit & 1) for number in range(1, 5000)
    ]
    records = [{"query": text, "positive": f"{text} x"} for text in texts]
    source = write_lines(tmp_path / "pairs.jsonl", records)
    mined = mine(model, source, num_negatives=1, similarity="cos")
    vectors = np.array([[float(word in text.split()) for word in words] for text in texts])
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    for number in (0, 4095, 4096, len(texts) - 1):
        scores = vectors @ vectors[number]
        scores[number] = 0  # its positive
        assert mined.scores[number] == pytest.approx(scores.max(), abs=1e-6)
        assert scores[mined.rows[number]] == pytest.approx(scores.max(), abs=1e-6)


@pytest.mark.parametrize("method", ["dense", "bm25"])
def test_positives_outside_the_pool_are_scored_but_not_mined(model, pairs, tmp_path, method):
    # These words are in some queries, so BM25 has candidates.
    texts = [f"the cat {text}" for number in range(7) for text in sentences(1, number)]
    corpus = [{"_id": str(number), "text": text} for number, text in enumerate(texts)]
    corpus_file = write_lines(tmp_path / "c.jsonl", corpus)
    mined = mine(model if method == "dense" else None, load_mining_data(pairs, corpus_file))
    assert 0 <= np.concatenate(mined.rows).max() <= 6
    assert [len(scores) for scores in mined.positive_scores] == [2] * 4 + [1] * 32


def test_bm25_mines_only_passages_with_a_word_of_the_query(tmp_path):
    """Equal scores are in the order of rows."""
    queries = ["colour", "x", "lost", "Blue sky!", "z"]
    positives = ["blue sky", "green grass", "grey sky", "sky high", "a b"]
    mined = mine(None, write_pairs(tmp_path / "pairs.jsonl", queries, positives))
    assert list_rows(mined) == [[], [], [], [0, 2], []]
    assert mined.scores[3][0] > mined.scores[3][1]
    # No word of "colour" is in its positive.
    assert mined.positive_scores[0] == 0
    with pytest.raises(DataError, match="no passage has a word"):
        mine(None, write_pairs(tmp_path / "other.jsonl", ["a cat"], ["a b"]))


@pytest.mark.parametrize("sampling", ["top", "random"])
def test_a_cross_encoder_drops_candidates_close_to_the_positives(
    model, cross_encoder, pairs, sampling
):
    """It keeps candidates at least the margin below the lowest positive, by its own logits."""
    margin = 1.0
    mined = mine(
        model,
        pairs,
        cross_encoder=cross_encoder,
        absolute_margin=margin,
        num_negatives=2,
        sampling=sampling,
        range_max=12,
    )
    without_cross_encoder = mine(model, pairs, num_negatives=12)
    for number, query in enumerate(mined.data.queries):

        def compute(rows: Iterable[int], text: str = query.text) -> list[float]:
            texts = [(text, passage) for passage in get_passages(mined.data, rows)]
            if not texts:
                return []
            return cross_encoder.predict(texts, activation_fn=torch.nn.Identity()).tolist()

        positive_logits = compute(query.positives)
        candidates = without_cross_encoder.rows[number].tolist()
        logits = compute(candidates)
        limit = min(positive_logits) - margin
        passing = [row for logit, row in zip(logits, candidates, strict=True) if logit <= limit]
        negatives = mined.rows[number].tolist()
        assert len(negatives) == min(2, len(passing))
        assert set(negatives) <= set(passing)
        if sampling == "top":
            assert negatives == passing[:2]
        assert mined.scores[number] == pytest.approx(compute(negatives), abs=1e-4)
        assert mined.positive_scores[number] == pytest.approx(positive_logits, abs=1e-4)


def test_the_default_margin_with_a_cross_encoder_is_3(model, cross_encoder, pairs):
    default = mine(model, pairs, cross_encoder=cross_encoder)
    assert default.settings["absolute_margin"] == 3
    limited = mine(model, pairs, cross_encoder=cross_encoder, relative_margin=0.1)
    assert limited.settings["absolute_margin"] is None


def test_queries_with_too_few_negatives_are_counted(model, tmp_path):
    positives = ["the cat", "the dog", "the bird", "the fish"]
    source = write_pairs(tmp_path / "source.jsonl", ["q1", "q1", "q1", "q2"], positives)
    mined = mine(model, source, num_negatives=2)
    pairs, report = write_mined(mined, tmp_path / "pairs.jsonl")
    assert [len(line["negatives"]) for line in read_lines(pairs)] == [1, 1, 1, 2]
    record = json.loads(report.read_text())
    assert record["data"]["queries"] == 2
    assert record["queries_with_too_few"] == 1


RECORDS = [
    {"query": "the cat", "positive": ["the cat sat", "one cat", "a cat"]},
    {"query": "the dog", "positive": ["the dog sat", "one dog"]},
    {"query": "the dog", "positive": "two dogs"},
    {"query": "the bird", "positive": "the bird sat"},
]


def test_training_on_mined_pairs_has_the_rows_and_known_positives_of_the_source(tmp_path):
    source = write_lines(tmp_path / "source.jsonl", RECORDS)
    path, _ = write_mined(mine(None, source, num_negatives=1), tmp_path / "mined.jsonl")
    # A record with one positive has a list too, so that the column has one type.
    assert {type(line["positive"]) for line in read_lines(path)} == {list}
    before = load_training_data(source)
    after = load_training_data(path, num_hard_negatives=1)
    numbers = list(range(len(before.transform)))
    assert list(after.transform.pairs(numbers)) == list(before.transform.pairs(numbers))
    assert after.known_positives.tolist() == before.known_positives.tolist()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("there.jsonl", "exists already"),
        ("", "is a folder"),
        # The report would be written over.
        ("other.jsonl", r"other\.jsonl\.report\.json: exists already"),
    ],
)
def test_an_unusable_output_is_refused(tmp_path, name, message):
    (tmp_path / "there.jsonl").write_text("mine")
    (tmp_path / "other.jsonl.report.json").write_text("mine")
    with pytest.raises(UserError, match=message):
        check_output(tmp_path / name)


# Exclusion of known positives, under every id, title, spacing and case.


def test_the_pool_of_pairs_is_their_distinct_positives(tmp_path):
    """Queries of equal text share their positives, and all of them are excluded."""
    pairs = [("q1", "a"), ("q2", ["b", "e"]), ("q1", "c"), ("q1", "a"), ("Q1 ", "d")]
    lines = [{"query": query, "positive": positive} for query, positive in pairs]
    data = load_mining_data(write_lines(tmp_path / "p.jsonl", lines))
    assert [query.text for query in data.queries] == ["q1", "q2", "Q1 "]
    assert get_passages(data, range(data.pool_size)) == ["a", "b", "e", "c", "d"]
    positives = [get_passages(data, query.positives) for query in data.queries]
    assert positives == [["a", "c", "d"], ["b", "e"], ["a", "c", "d"]]
    excluded = [get_passages(data, query.excluded) for query in data.queries]
    assert list(map(sorted, excluded)) == list(map(sorted, positives))
    records = [[get_passages(data, rows) for rows, _ in query.records] for query in data.queries]
    assert records == [[["a"], ["c"]], [["b", "e"]], [["d"]]]
    assert (data.record["queries"], data.record["passages"]) == (3, 5)


DOCUMENTS = {
    "d0": ("The Sky", "It is  blue."),
    "d1": ("the sky", "it is blue."),  # d0 under another id, in other case and spacing
    "d2": ("", "It is blue."),  # the text of d0 without its title
    "d3": ("Heaven", "It is blue."),  # the text of d0 under another title
    "d4": ("", ""),
    "d5": ("Grass", "It is green."),
    "d6": ("", "What colour is the sky?"),
    # d2 with two full-width letters, an HTML entity, and a soft hyphen at the end of a line
    "d7": ("", "\uff29\uff54&nbsp;is bl\u00ad\nue."),
}
QUERIES = {"q0": "What  colour is the SKY?", "q1": "Is grass green?"}


def test_copies_of_a_positive_are_excluded(tmp_path):
    """A document with the text of the query is excluded too."""
    qrels = [("q0", "d0", 1), ("q1", "d5", 2), ("q1", "d6", 0)]
    data = load_mining_data(write_beir(tmp_path / "b", DOCUMENTS, QUERIES, qrels))
    assert [document.id for document in data.documents] == ["d0", "d2", "d3", "d5", "d6"]
    assert [get_ids(data, query.excluded) for query in data.queries] == [
        ["d0", "d2", "d3", "d6"],
        ["d5"],
    ]


@pytest.mark.parametrize("positive", ["It is blue.", "Another answer"])
def test_a_separate_corpus_is_the_whole_pool(tmp_path, positive):
    """Its empty document is not in the pool, nor is a positive that it lacks."""
    rows = [
        {"_id": name, "title": title, "text": text} for name, (title, text) in DOCUMENTS.items()
    ]
    corpus = write_lines(tmp_path / "corpus.jsonl", rows)
    data = load_mining_data(write_pairs(tmp_path / "p.jsonl", ["q"], [positive]), corpus)
    assert get_ids(data, range(data.pool_size)) == ["d0", "d2", "d3", "d5", "d6"]
    [query] = data.queries
    is_there = positive == "It is blue."
    assert query.positives == ([1] if is_there else [5])
    assert get_ids(data, query.excluded) == (["d0", "d2", "d3"] if is_there else [])


def test_the_columns_of_a_separate_corpus_may_have_other_names(tmp_path):
    corpus = write_lines(tmp_path / "chunks.jsonl", [{"chunk": 7, "content": "Nothing like it"}])
    columns = {"id": "chunk", "text": "content"}
    pairs = write_pairs(tmp_path / "p.jsonl", ["q"], ["It is blue."])
    data = load_mining_data(pairs, corpus, corpus_columns=columns)
    assert get_ids(data, range(data.pool_size)) == ["7"]
    with pytest.raises(ConfigError, match="corpus_columns: there is no corpus"):
        load_mining_data(pairs, corpus_columns=columns)


@pytest.mark.parametrize(
    ("judgement", "documents", "message"),
    [
        (("q0", "d0", 0), DOCUMENTS, "no query"),
        (("q0", "d4", 1), DOCUMENTS, "no query"),  # d4 is empty
        (("q0", "d4", 1), {"d4": ("", " ")}, "no passage"),
    ],
)
def test_data_without_positives_or_passages_are_refused(tmp_path, judgement, documents, message):
    folder = write_beir(tmp_path / "b", documents, QUERIES, [judgement])
    with pytest.raises(DataError, match=message):
        load_mining_data(folder)


def test_a_bad_record_is_named_or_left_out(tmp_path):
    path = write_lines(tmp_path / "p.jsonl", [{"query": "q", "positive": "p"}, {"query": "r"}])
    with pytest.raises(DataError, match=r"p\.jsonl:2: missing positive"):
        load_mining_data(path)
    assert "1 left out" in load_mining_data(path, on_bad_record="skip").record["records"]


# Negatives that the data have.

OWN = [
    ("the cat", "the cat sat", ["a cat barks", "the cat swims", "A  Cat barks"]),  # one twice
    ("the dog", "the dog sat", ["the dog flies"]),
    ("the dog", "one dog", ["the dog sat"]),  # a known positive
    ("the bird", "the bird sat", []),
]
KEPT = [["a cat barks", "the cat swims"], ["the dog flies"], [], []]
CORPUS = ["the cat swims", "a cat barks", "the dog flies", "two dogs", "the dog runs", "one cat"]


@pytest.mark.parametrize("method", ["dense", "bm25"])
def test_negatives_of_the_data_come_first_and_are_not_mined_again(model, tmp_path, method):
    records = [dict(zip(("query", "positive", "negatives"), row, strict=True)) for row in OWN]
    source = write_lines(tmp_path / "pairs.jsonl", records)
    documents = [{"_id": str(number), "text": text} for number, text in enumerate(CORPUS)]
    corpus = write_lines(tmp_path / "corpus.jsonl", documents)
    data = load_mining_data(source, corpus)
    mined = mine(model if method == "dense" else None, data, num_negatives=6)
    lines = read_lines(write_mined(mined, tmp_path / "mined.jsonl")[0])
    assert [(line["query"], line["positive"]) for line in lines] == [row[:2] for row in OWN]
    num_mined = 0
    for line, kept, query in zip(lines, KEPT, (0, 1, 1, 2), strict=True):
        others = get_passages(data, mined.rows[query])
        assert line["negatives"] == kept + others
        own = {text for row in OWN if row[0] == line["query"] for text in row[2]}
        assert own.isdisjoint(others)
        num_mined += len(others)
    assert num_mined > 0
