"""Hard negatives: which passages are mined, which never are, their scores and their files."""

import copy
import gzip
import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from sample_texts import sentences
from sentence_transformers import util
from small_data import read_lines, write_beir, write_beir_to_mine, write_lines, write_pairs_to_mine
from transformers import BertForMaskedLM, BertForSequenceClassification

from contaccum import DualEncoder
from contaccum.data import load_training_data
from contaccum.errors import ConfigError, DataError, UserError
from contaccum.losses.distillation import split_labels
from contaccum.mining import (
    OUTPUT_FORMATS,
    SelectionRules,
    check_output,
    load_cross_encoder,
    load_mining_data,
    mine_hard_negatives,
    write_mined,
)
from contaccum.mining.rules import select_candidates
from contaccum.mining.search import _group_queries
from contaccum.tuning.negatives import mine_once


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
def cross_encoder(tiny_config, tiny_tokenizer, tmp_path_factory) -> Any:
    """Return a random cross-encoder whose logits spread over about 10 points."""
    path = tmp_path_factory.mktemp("mining") / "cross-encoder"
    options = {"initializer_range": 0.5, "id2label": {0: "relevant"}, "label2id": {"relevant": 0}}
    torch.manual_seed(0)
    BertForSequenceClassification(
        type(tiny_config)(**{**tiny_config.to_dict(), **options})
    ).save_pretrained(path)
    tiny_tokenizer.save_pretrained(path)
    return load_cross_encoder(str(path), "cpu")


def test_an_encoder_without_a_trained_head_is_no_cross_encoder(
    tiny_config, tiny_tokenizer, tmp_path
):
    BertForMaskedLM(tiny_config).save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="is not a cross-encoder that was trained"):
        load_cross_encoder(str(tmp_path), "cpu")


def mine(model: Any, data: Any, **settings: Any) -> Any:
    return mine_hard_negatives(data, model, show_progress=False, **settings)


@pytest.mark.parametrize(
    "rules",
    [
        {},
        {"relative_margin": 0.0, "range_max": 20},
        {"relative_margin": 0.001, "range_max": 30},
        {"absolute_margin": 0.0, "range_min": 1},
        {"max_score": 0.95, "min_score": 0.5, "range_max": 12},
    ],
)
def test_rules_are_those_of_sentence_transformers(model, pairs, rules):
    records = read_lines(pairs)[4:36]  # queries with one positive
    settings = {"num_negatives": 2, "range_min": 0, **rules}
    mined = mine(model, records, **settings)
    settings |= {"output_format": "labeled-list", "verbose": False}
    theirs = util.mine_hard_negatives(Dataset.from_list(records), model, **settings)
    expected = dict(
        zip(theirs["query"], (passages[1:] for passages in theirs["positive"]), strict=True)
    )
    data = mined.data
    for number, query in enumerate(data.queries):
        negatives = [data.documents[row].passage for row in mined.rows[number] if row >= 0]
        # sentence-transformers leaves out queries with too few negatives.
        assert query not in expected or negatives == expected[query]
    assert len(expected) > 5


def test_random_sampling_is_uniform_and_depends_on_the_seed_alone(model, pairs):
    rules = SelectionRules(
        num_negatives=1, range_min=2, max_score=-1, min_score=-7, sampling="random"
    )
    scores = -np.arange(10, dtype=np.float32)
    rng = np.random.default_rng(0)
    counts = Counter(
        int(select_candidates(scores, np.float32(1), rules, rng)[0]) for _ in range(2000)
    )
    assert set(counts) == {3, 4, 5, 6, 7}
    assert all(
        330 < count < 470 for count in counts.values()
    )  # 400, plus or minus four standard deviations of 18
    first, repeated, other = (
        mine(model, pairs, sampling="random", seed=seed).rows.tolist() for seed in (0, 0, 1)
    )
    assert first == repeated != other


@pytest.mark.parametrize("similarity", ["cos", "dot"])
def test_negatives_are_the_best_passages_that_are_not_excluded(
    tiny_config, tiny_tokenizer, beir, similarity
):
    """Their scores are the model's."""
    model = DualEncoder.from_backbone(
        tiny_config, tokenizer=tiny_tokenizer, pooling="mean", tied=False, device="cpu"
    )
    data = load_mining_data(beir)
    mined = mine(model, data, similarity=similarity, num_negatives=4)
    settings = {"normalize_embeddings": similarity == "cos"}
    passages = [{"title": d.title, "text": d.text} for d in data.documents]
    expected = (
        model.encode_queries(data.queries, **settings) @ model.encode_corpus(passages, **settings).T
    )
    for number in range(10):
        order = [row for row in np.argsort(-expected[number]) if row not in data.excluded[number]]
        assert mined.rows[number].tolist() == order[:4]
        assert mined.scores[number] == pytest.approx(expected[number, order[:4]], abs=1e-5)
        assert mined.positive_scores[number] == pytest.approx(
            expected[number, data.positives[number]], abs=1e-5
        )


def test_margins_start_at_the_lowest_of_several_positives(model, pairs):
    everything = mine(model, pairs, num_negatives=38)
    mined = mine(model, pairs, num_negatives=3, range_max=38, absolute_margin=0.0)
    apart = 0
    for number in range(4):  # those with two positives
        low, high = sorted(mined.positive_scores[number].tolist())
        scores = everything.scores[number]
        expected = scores[scores <= low][:3]
        apart += expected.tolist() != scores[scores <= high][:3].tolist()
        assert mined.scores[number][: len(expected)] == pytest.approx(expected, abs=1e-6)
    assert apart


@pytest.mark.parametrize("method", ["dense", "bm25"])
def test_positives_outside_the_pool_are_scored_but_not_mined(model, pairs, tmp_path, method):
    texts = [f"the cat {' '.join(sentences(1, n))}" for n in range(7)]
    corpus = write_lines(
        tmp_path / "c.jsonl", [{"_id": str(n), "text": text} for n, text in enumerate(texts)]
    )
    mined = mine(model if method == "dense" else None, load_mining_data(pairs, corpus))
    assert 0 <= mined.rows.max() <= 6
    assert [len(values) for values in mined.positive_scores] == [2] * 4 + [1] * 32


def test_bm25_mines_only_passages_with_a_word_of_the_query():
    """Equal scores are in the order of rows."""
    texts = {
        "colour": "blue sky",
        "x": "green grass",
        "lost": "grey sky",
        "Blue sky!": "sky high",
        "z": "a b",
    }
    mined = mine(None, [{"query": query, "positive": text} for query, text in texts.items()])
    assert mined.rows.tolist() == [[-1] * 3, [-1] * 3, [-1] * 3, [0, 2, -1], [-1] * 3]
    assert mined.scores[3, 0] > mined.scores[3, 1] and np.isneginf(mined.scores[3, 2])
    assert mined.positive_scores[0] == 0


def test_bm25_without_a_word_is_refused():
    with pytest.raises(DataError, match="no passage has a word"):
        mine(None, [{"query": "a cat", "positive": "a b"}])


@pytest.mark.parametrize("sampling", ["top", "random"])
def test_a_cross_encoder_drops_candidates_close_to_the_positives(
    model, cross_encoder, pairs, sampling
):
    """It keeps candidates at least the margin below the lowest positive."""
    settings = {"range_max": 12, "num_negatives": 2, "sampling": sampling, "relative_margin": 0.0}
    mined = mine(model, pairs, cross_encoder=cross_encoder, cross_encoder_margin=1.0, **settings)
    without = mine(model, pairs, range_max=12, num_negatives=12, relative_margin=0.0)
    data = mined.data
    for number, query in enumerate(data.queries):

        def logits(rows: list[int], query: str = query) -> list[float]:
            texts = [(query, data.documents[row].passage) for row in rows]
            return (
                cross_encoder.predict(texts, activation_fn=torch.nn.Identity()).tolist()
                if texts
                else []
            )

        candidates = [row for row in without.rows[number].tolist() if row >= 0]
        bound = min(logits(data.positives[number])) - 1.0
        passing = [
            row for row, score in zip(candidates, logits(candidates), strict=True) if score <= bound
        ]
        has_negative = mined.rows[number] >= 0
        negatives = mined.rows[number][has_negative].tolist()
        assert len(negatives) == min(2, len(passing)) and set(negatives) <= set(passing)
        assert sampling == "random" or negatives == passing[:2]
        assert (
            sampling == "random"
            or (np.diff([candidates.index(row) for row in negatives]) > 0).all()
        )
        assert mined.scores[number][has_negative] == pytest.approx(logits(negatives), abs=1e-4)
        assert mined.positive_scores[number] == pytest.approx(
            logits(data.positives[number]), abs=1e-4
        )


def test_mining_does_not_change_a_model_in_training(
    tiny_config, tiny_tokenizer, pairs, tmp_path, monkeypatch
):
    """Gradients and random states do not change either, and no file is written."""
    live = DualEncoder.from_backbone(
        tiny_config, tokenizer=tiny_tokenizer, pooling="mean", device="cpu"
    ).train()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    live(live.preprocess(["the cat"]))["sentence_embedding"].sum().backward()
    before = copy.deepcopy(
        [*live.state_dict().values(), *(p.grad for p in live.parameters() if p.grad is not None)]
    )
    states = torch.get_rng_state(), np.random.get_state()[1].tolist()
    first, again = (mine(live, read_lines(pairs), sampling="random") for _ in range(2))
    # Scores would differ if dropout were on.
    assert (
        first.rows.tolist() == again.rows.tolist()
        and first.scores.tolist() == again.scores.tolist()
    )
    assert all(module.training for module in live.modules()) and not list(tmp_path.iterdir())
    assert (
        torch.equal(torch.get_rng_state(), states[0])
        and np.random.get_state()[1].tolist() == states[1]
    )
    after = [
        *live.state_dict().values(),
        *(p.grad for p in live.parameters() if p.grad is not None),
    ]
    assert all(map(torch.equal, before, after)) and len(before) == len(after)


@pytest.fixture(scope="module")
def mined(model, cross_encoder, pairs, beir) -> dict[str, Any]:
    """Mine two negatives per query of each source; a cross-encoder scores those of the third."""
    scored = {"cross_encoder": cross_encoder, "cross_encoder_margin": -100.0, "range_max": 8}
    sources = (("pairs", pairs, {}), ("beir", beir, {}), ("scored pairs", pairs, scored))
    return {
        name: mine(model, path, num_negatives=2, **settings) for name, path, settings in sources
    }


@pytest.mark.parametrize("output_format", OUTPUT_FORMATS)
@pytest.mark.parametrize("source", ["pairs", "beir", "scored pairs"])
def test_written_negatives_are_read_back_as_training_data(
    mined, cross_encoder, tmp_path, output_format, source
):
    negatives = mined[source]
    data = negatives.data
    has_scores = source == "scored pairs"
    path = tmp_path / "new" / f"out.json{'' if output_format == 'dpr' else 'l'}"
    path, report = write_mined(negatives, path, output_format)
    training = load_training_data(
        path, num_hard_negatives=2, positives="first", teacher_scores=has_scores
    ).dataset
    expected = [
        (
            data.queries[q],
            data.documents[positives[0]].passage,
            {data.documents[row].passage for row in negatives.rows[q]},
        )
        for q, records in enumerate(data.record_positives)
        for positives in records[: 1 if output_format in ("dpr", "tevatron") else None]
    ]
    read = [
        (row["query"], row["positive"], {row["negative_1"], row["negative_2"]}) for row in training
    ]
    assert read == expected
    assert sorted(p.name for p in (tmp_path / "new").iterdir()) == [path.name, report.name]
    for row in training if has_scores else ():
        texts = [(row["query"], row[name]) for name in ("positive", "negative_1", "negative_2")]
        logits = cross_encoder.predict(texts, activation_fn=torch.nn.Identity())
        scores = split_labels(torch.tensor([row["label"]]), 4)[1]
        assert scores[0].tolist() == pytest.approx(logits.tolist(), abs=1e-4)


def test_tevatron_and_dpr_records_have_all_fields_and_positives(mined, tmp_path):
    tevatron = read_lines(write_mined(mined["beir"], tmp_path / "t.jsonl", "tevatron")[0])
    dpr = json.loads(write_mined(mined["beir"], tmp_path / "d.json", "dpr")[0].read_text())
    for line, record in zip(tevatron, dpr, strict=True):
        assert list(line) == ["query_id", "query", "positive_passages", "negative_passages"]
        number = int(line["query_id"].removeprefix("q"))
        judged = [f"d{(3 * number + j) % 30}" for j in (0, 2)[: 2 - number % 2]]
        assert [passage["docid"] for passage in line["positive_passages"]] == judged
        assert set(record) == {
            "question",
            "answers",
            "positive_ctxs",
            "negative_ctxs",
            "hard_negative_ctxs",
        }
        for ours, theirs in (
            ("positive_passages", "positive_ctxs"),
            ("negative_passages", "hard_negative_ctxs"),
        ):
            assert all(
                list(passage) == ["docid", "title", "text", "score"] for passage in line[ours]
            )
            assert [{"passage_id": x.pop("docid"), **x} for x in line[ours]] == record[theirs]


def test_queries_with_too_few_negatives_are_counted(model, tmp_path):
    """The format ntuples leaves them out."""
    rows = [("q1", "the cat"), ("q1", "the dog"), ("q1", "the bird"), ("q2", "the fish")]
    data = load_mining_data([{"query": query, "positive": positive} for query, positive in rows])
    mined = mine(model, data, num_negatives=2)
    pairs, report = write_mined(mined, tmp_path / "pairs.jsonl")
    assert [len(line["negatives"]) for line in read_lines(pairs)] == [1, 1, 1, 2]
    record = json.loads(report.read_text())
    assert (record["data"]["queries"], record["queries_with_too_few"]) == (2, 1)
    assert [
        line["query"] for line in read_lines(write_mined(mined, tmp_path / "n.jsonl", "ntuples")[0])
    ] == ["q2"]
    with pytest.raises(DataError, match="no query has 4 negatives"):
        write_mined(mine(model, data, num_negatives=4), tmp_path / "none.jsonl", "ntuples")
    assert not list(tmp_path.glob("none*"))


RECORDS = [
    {"query": "the cat", "positive": ["the cat sat", "one cat", "a cat"]},
    {"query": "the dog", "positive": ["the dog sat", "one dog"]},
    {"query": "the dog", "positive": "two dogs"},
    {"query": "the bird", "positive": "the bird sat"},
]


def test_training_on_mined_pairs_has_the_rows_and_known_positives_of_the_source(tmp_path):
    """The scores of all positives are written too."""
    source = write_lines(tmp_path / "source.jsonl", RECORDS)
    mined = mine(None, source, num_negatives=1)
    path, _ = write_mined(mined, tmp_path / "mined.jsonl")
    # A record with one positive has a list too, so that the column has one type.
    assert {type(line["positive"]) for line in read_lines(path)} == {list}
    mined_once = mine_once([str(source)], None, tmp_path / "once.jsonl")
    before = load_training_data(source)
    for file in (path, mined_once):
        after = load_training_data(file, num_hard_negatives=1)
        assert list(after.transform.pairs()) == list(before.transform.pairs())
        assert after.known_positives.tolist() == before.known_positives.tolist()
    scores = [line["positive_score"] for line in read_lines(path)]
    dog_scores = scores[1] + scores[2]
    assert [len(values) for values in scores] == [3, 2, 1, 1]
    assert dog_scores == mined.positive_scores[1].tolist()


def test_ntuples_have_a_line_for_each_positive(tmp_path):
    mined = mine(None, RECORDS, num_negatives=1)
    lines = read_lines(write_mined(mined, tmp_path / "n.jsonl", "ntuples")[0])
    positives = [text for record in RECORDS for text in np.atleast_1d(record["positive"])]
    assert [line["positive"] for line in lines] == positives
    assert all(set(line) == {"query", "positive", "negative_1", "scores"} for line in lines)
    assert [line["scores"][0] for line in lines] == np.concatenate(mined.positive_scores).tolist()


def test_an_unusable_output_is_refused(tmp_path):
    (tmp_path / "there.jsonl").write_text("mine")
    for name, output_format, words in [
        ("there.jsonl", "pairs", "exists already"),
        ("", "pairs", "is a folder"),
        ("x.jsonl", "csv", "output_format"),
    ]:
        with pytest.raises(UserError, match=words):
            check_output(tmp_path / name, output_format)
    (tmp_path / "other.jsonl.report.json").write_text("mine")
    with pytest.raises(UserError, match=r"other\.jsonl\.report\.json: exists already"):
        check_output(tmp_path / "other.jsonl", "pairs")


# Exclusion of known positives, under every id, title, spacing and case.


def passages(data, rows):
    return [data.documents[row].passage for row in rows]


def test_the_pool_of_pairs_is_their_distinct_positives(tmp_path):
    """Queries of equal text share their positives."""
    rows = [("q1", "a"), ("q2", "b"), ("q1", "c"), ("q1", "a"), ("Q1 ", "d")]
    data = load_mining_data(
        write_lines(tmp_path / "p.jsonl", [{"query": q, "positive": p} for q, p in rows])
    )
    assert data.queries == ["q1", "q2", "Q1 "] and data.pool_size == 4
    assert [passages(data, rows) for rows in data.positives] == [
        ["a", "c", "d"],
        ["b"],
        ["d", "a", "c"],
    ]
    assert [[passages(data, rows) for rows in records] for records in data.record_positives] == [
        [["a"], ["c"]],
        [["b"]],
        [["d"]],
    ]
    assert [passages(data, rows) for rows in data.excluded] == [
        ["a", "c", "d"],
        ["b"],
        ["a", "c", "d"],
    ]
    assert (data.record["queries"], data.record["pairs"], data.record["passages"]) == (3, 4, 4)


def test_further_positives_of_a_record_are_excluded(tmp_path):
    record = {"question": "q", "positive_ctxs": [{"title": "T", "text": x} for x in "ab"]}
    (tmp_path / "d.json").write_text(json.dumps([record]))
    for source, expected in (
        (tmp_path / "d.json", ["T a", "T b"]),
        ([{"query": "q", "positive": ["a", "b"]}], "ab"),
    ):
        data = load_mining_data(source)
        assert passages(data, data.positives[0]) == list(expected)
        assert data.record_positives == [[[0, 1]]] and data.excluded == [[0, 1]]


DOCUMENTS = {
    "d0": ("The Sky", "It is  blue."),
    "d1": ("the sky", "it is blue."),  # d0 under another id, in other case and spacing
    "d2": ("", "It is blue."),  # the text of d0 without its title
    "d3": ("Heaven", "It is blue."),  # the text of d0 under another title
    "d4": ("", ""),
    "d5": ("Grass", "It is green."),
    "d6": ("", "What colour is the sky?"),
    "d7": ("", "\uff29\uff54 is blue."),  # d2 with two full-width letters
}
QUERIES = {"q0": "What  colour is the SKY?", "q1": "Is grass green?"}


def test_copies_of_a_positive_are_excluded(tmp_path):
    folder = write_beir(
        tmp_path / "b", DOCUMENTS, QUERIES, [("q0", "d0", 1), ("q1", "d5", 2), ("q1", "d6", 0)]
    )
    data = load_mining_data(folder)
    assert [document.id for document in data.documents] == ["d0", "d2", "d3", "d5", "d6"]
    assert [[data.documents[row].id for row in rows] for rows in data.excluded] == [
        ["d0", "d2", "d3", "d6"],
        ["d5"],
    ]


def test_a_separate_corpus_is_the_whole_pool(tmp_path):
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


def test_a_separate_corpus_excludes_positives_by_id_too(tmp_path):
    folder = write_beir(tmp_path / "b", DOCUMENTS, QUERIES, [("q0", "d0", 1), ("q1", "d5", 1)])
    cleaned = write_lines(
        tmp_path / "c.jsonl", [{"_id": "d0", "text": "Sky: blue"}, {"_id": "d9", "text": "Other"}]
    )
    data = load_mining_data(folder, cleaned)
    assert data.excluded == [[0], []]
    assert data.record["fingerprint"] != load_mining_data(folder).record["fingerprint"]


@pytest.mark.parametrize(
    ("judged", "documents", "message"),
    [
        ("d0 0", DOCUMENTS, "no query"),
        ("d4 1", DOCUMENTS, "no query"),
        ("d4 1", {"d4": ("", " ")}, "no passage"),
    ],
)
def test_data_without_positives_or_passages_are_refused(tmp_path, judged, documents, message):
    with pytest.raises(DataError, match=message):
        load_mining_data(write_beir(tmp_path / "b", documents, QUERIES, [("q0", *judged.split())]))


@pytest.mark.parametrize(
    "settings", [{"min_score": 2}, {"columns": {"query": "q"}}, {"texts": "corpus.jsonl"}]
)
def test_settings_that_a_beir_folder_does_not_have_are_refused(beir, settings):
    with pytest.raises(ConfigError, match="data_format=beir has no fields"):
        load_mining_data(beir, **settings)


def test_a_bad_record_is_named_or_left_out(tmp_path):
    path = write_lines(tmp_path / "p.jsonl", [{"query": "q", "positive": "p"}, {"query": "r"}])
    with pytest.raises(DataError, match=r"p\.jsonl:2: missing positive"):
        load_mining_data(path)
    assert "1 left out" in load_mining_data(path, on_bad_record="skip").record["records"]


def test_a_search_in_groups_mines_the_same_negatives(model, pairs, monkeypatch):
    expected = mine(model, pairs, num_negatives=3)
    monkeypatch.setattr("contaccum.mining.search._RESULTS_PER_SEARCH", 80)
    grouped = mine(model, pairs, num_negatives=3)
    assert len(grouped.rows) > 2
    np.testing.assert_array_equal(grouped.rows, expected.rows)
    np.testing.assert_allclose(grouped.scores, expected.scores, rtol=1e-6)


def test_blank_passages_of_a_separate_corpus_are_not_mined(tmp_path):
    corpus = [{"_id": "d1", "text": "one"}, {"_id": "d2", "title": "", "text": ""}]
    path = write_lines(tmp_path / "corpus.jsonl", corpus)
    data = load_mining_data([{"query": "q", "positive": "p"}], corpus=path)
    assert data.pool_size == 1


def test_a_query_with_many_positives_does_not_lengthen_the_rankings_of_all(monkeypatch):
    data = SimpleNamespace(excluded=[[1], [1], list(range(60)), [1], [1]], queries=range(5))
    data.pool_size = 1000
    monkeypatch.setattr("contaccum.mining.search._RESULTS_PER_SEARCH", 80)
    groups = list(_group_queries(data, 10))
    assert groups == [(range(2), 11), (range(2, 3), 70), (range(3, 5), 11)]
