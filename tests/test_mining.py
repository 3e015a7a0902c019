"""Which passages become negatives, and their scores, against plain computations; what a model in training keeps."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from mining_files import write_beir_data, write_lines, write_pairs
from sample_texts import sentences
from sentence_transformers import util
from transformers import BertForSequenceClassification

from contaccum import DualEncoder
from contaccum.mining import SelectionRules, _selected, load_cross_encoder, load_mining_data, mine_hard_negatives


@pytest.fixture(scope="module")
def model(tiny_model_path: str) -> DualEncoder:
    return DualEncoder.from_pretrained(tiny_model_path, device="cpu")


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    return write_pairs(tmp_path / "pairs.jsonl")


@pytest.fixture(scope="module")
def cross_encoder(tiny_config: Any, tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A random cross-encoder whose logits spread over some 10 points."""
    path = tmp_path_factory.mktemp("mining") / "cross-encoder"
    options = {"initializer_range": 0.5, "id2label": {0: "relevant"}, "label2id": {"relevant": 0}}
    torch.manual_seed(0)
    BertForSequenceClassification(type(tiny_config)(**{**tiny_config.to_dict(), **options})).save_pretrained(path)
    tiny_tokenizer.save_pretrained(path)
    return load_cross_encoder(str(path), "cpu")


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
    records = [json.loads(line) for line in pairs.read_text().splitlines()][4:36]  # queries with one positive
    settings = {"num_negatives": 2, "range_min": 0, **rules}
    mined = mine(model, records, **settings)
    theirs = util.mine_hard_negatives(
        Dataset.from_list(records), model, output_format="labeled-list", verbose=False, **settings
    )
    expected = dict(zip(theirs["query"], (passages[1:] for passages in theirs["positive"]), strict=True))
    data = mined.data
    for number, query in enumerate(data.queries):
        found = [data.documents[row].passage for row in mined.rows[number] if row >= 0]
        # Theirs leaves out queries with too few; its cut by rank counts the positive.
        assert query not in expected or found == expected[query], (found, expected[query])
    assert len(expected) > 5


def test_random_sampling_is_uniform_and_depends_on_the_seed_alone(model, pairs):
    scores = -np.arange(10, dtype=np.float32)
    rules = SelectionRules(num_negatives=1, range_min=2, max_score=-1, min_score=-7, sampling="random")
    rng = np.random.default_rng(0)
    counts = Counter(int(_selected(scores, np.float32(1), rules, rng)[0]) for _ in range(2000))
    assert set(counts) == {3, 4, 5, 6, 7}
    assert all(330 < count < 470 for count in counts.values())  # 400, and four deviations of 18
    one, again, other = (mine(model, pairs, sampling="random", seed=seed).rows.tolist() for seed in (0, 0, 1))
    assert one == again != other


# Search --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("similarity", ["cos", "dot"])
def test_negatives_are_the_best_passages_that_are_not_known_and_scores_are_the_models(
    tiny_config, tiny_tokenizer, tmp_path, similarity
):
    model = DualEncoder.from_backbone(tiny_config, tokenizer=tiny_tokenizer, pooling="mean", tied=False, device="cpu")
    data = load_mining_data(write_beir_data(tmp_path / "beir"))
    mined = mine(model, data, similarity=similarity, num_negatives=4)
    settings = {"normalize_embeddings": similarity == "cos"}
    passages = [{"title": d.title, "text": d.text} for d in data.documents]
    expected = model.encode_queries(data.queries, **settings) @ model.encode_corpus(passages, **settings).T
    for number in range(10):
        order = [row for row in np.argsort(-expected[number]) if row not in data.excluded[number]]
        assert mined.rows[number].tolist() == order[:4]
        assert mined.scores[number] == pytest.approx(expected[number, order[:4]], abs=1e-5)
        assert mined.positive_scores[number] == pytest.approx(expected[number, data.positives[number]], abs=1e-5)


def test_margins_are_counted_from_the_lowest_of_several_positives(model, pairs):
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
def test_positives_outside_the_pool_are_scored_and_never_found(model, pairs, tmp_path, method):
    if method == "bm25":
        pytest.importorskip("bm25s")
    texts = [f"the cat {' '.join(sentences(1, n))}" for n in range(7)]
    corpus = write_lines(tmp_path / "c.jsonl", [{"_id": str(n), "text": text} for n, text in enumerate(texts)])
    mined = mine(model if method == "dense" else None, load_mining_data(pairs, corpus))
    assert mined.rows.max() <= 6
    assert [len(values) for values in mined.positive_scores] == [2] * 4 + [1] * 32


def test_bm25_finds_only_passages_with_a_word_of_the_query_and_orders_ties_by_row():
    pytest.importorskip("bm25s")
    texts = ["blue sky", "green grass", "grey sky", "sky high", "a b"]
    records = [
        {"query": query, "positive": text}
        for query, text in zip(["colour", "x", "lost", "Blue sky!", "z"], texts, strict=True)
    ]
    mined = mine(None, records)
    assert mined.rows.tolist() == [[-1] * 3, [-1] * 3, [-1] * 3, [0, 2, -1], [-1] * 3]
    assert mined.scores[3, 0] > mined.scores[3, 1] and np.isneginf(mined.scores[3, 2])
    assert [len(scores) for scores in mined.positive_scores] == [1] * 5 and mined.positive_scores[0] == 0


# A cross-encoder -----------------------------------------------------------------------------------------------------


def logits(cross_encoder: Any, query: str, passages: list[str]) -> list[float]:
    return cross_encoder.predict([(query, passage) for passage in passages], activation_fn=lambda x: x).tolist()


@pytest.mark.parametrize("sampling", ["top", "random"])
def test_a_cross_encoder_keeps_what_is_far_enough_below_the_lowest_positive(model, cross_encoder, pairs, sampling):
    settings = {"range_max": 12, "num_negatives": 2, "sampling": sampling, "relative_margin": 0.0}
    mined = mine(model, pairs, cross_encoder=cross_encoder, cross_encoder_margin=1.0, **settings)
    without = mine(model, pairs, range_max=12, num_negatives=12, relative_margin=0.0)
    data, passages = mined.data, [document.passage for document in mined.data.documents]
    for number, query in enumerate(data.queries):
        bound = min(logits(cross_encoder, query, [passages[row] for row in data.positives[number]])) - 1.0
        before = [row for row in without.rows[number].tolist() if row >= 0]
        read = logits(cross_encoder, query, [passages[row] for row in before]) if before else []
        passing = {row: score for row, score in zip(before, read, strict=True) if score <= bound}
        there = mined.rows[number] >= 0
        found = mined.rows[number][there].tolist()
        assert len(found) == min(2, len(passing)) and set(found) <= set(passing)
        assert sampling == "random" or found == list(passing)[:2]
        assert (np.diff(mined.scores[number][there]) <= 0).all()
    assert mined.settings["cross_encoder_margin"] == 1.0


def test_a_cross_encoder_reads_no_more_than_it_takes_to_fill_up(model, pairs):
    class Lenient:
        read = 0

        def predict(self, rows: list[Any], **settings: Any) -> np.ndarray:
            self.read += len(rows)
            return np.zeros(len(rows))

    reader = Lenient()
    mined = mine(model, pairs, cross_encoder=reader, cross_encoder_margin=0.0, range_max=30)
    assert reader.read == 36 * 3 + 40 and (mined.rows >= 0).all()


# A model in training -------------------------------------------------------------------------------------------------


def test_a_model_in_training_is_left_as_it_was_and_nothing_is_written(
    tiny_config, tiny_tokenizer, pairs, tmp_path, monkeypatch
):
    live = DualEncoder.from_backbone(tiny_config, tokenizer=tiny_tokenizer, pooling="mean", device="cpu").train()
    records = [json.loads(line) for line in pairs.read_text().splitlines()]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    files = sorted(tmp_path.iterdir())
    weights = {name: value.clone() for name, value in live.state_dict().items()}
    live(live.preprocess(["the cat"]))["sentence_embedding"].sum().backward()
    gradients = [None if p.grad is None else p.grad.clone() for p in live.parameters()]
    states = torch.get_rng_state(), np.random.get_state()[1].tolist(), torch.get_num_threads()
    first, again = (mine(live, records, sampling="random") for _ in range(2))
    # In training mode dropout would give other scores each time.
    assert first.rows.tolist() == again.rows.tolist() and first.scores.tolist() == again.scores.tolist()
    assert all(module.training for module in live.modules())
    assert torch.equal(torch.get_rng_state(), states[0]) and np.random.get_state()[1].tolist() == states[1]
    assert torch.get_num_threads() == states[2] and sorted(tmp_path.iterdir()) == files
    assert all(torch.equal(value, weights[name]) for name, value in live.state_dict().items())
    for parameter, gradient in zip(live.parameters(), gradients, strict=True):
        assert gradient is None if parameter.grad is None else torch.equal(parameter.grad, gradient)
