"""Candidates and scores of both searches against a plain computation."""

from __future__ import annotations

import math
import re
import sys
from collections import Counter

import numpy as np
import pytest
from mining_files import write_lines

from contaccum import DualEncoder
from contaccum.errors import ConfigError, DataError
from contaccum.mining import SelectionRules, load_mining_data, mine_hard_negatives
from contaccum.mining import candidates as candidates_module
from contaccum.mining import miner as miner_module
from contaccum.mining.candidates import BM25Search, DenseSearch


@pytest.mark.parametrize("similarity", ["cos", "dot"])
def test_dense_scores_are_those_of_the_models_embeddings(tiny_config, tiny_tokenizer, beir, similarity, monkeypatch):
    monkeypatch.setattr(candidates_module, "_PAIRS_AT_A_TIME", 4)
    model = DualEncoder.from_backbone(tiny_config, tokenizer=tiny_tokenizer, pooling="mean", tied=False, device="cpu")
    data = load_mining_data(beir)
    search = DenseSearch(model, data, similarity=similarity, show_progress=False)
    queries = model.encode_queries(data.queries, normalize_embeddings=similarity == "cos")
    passages = model.encode_corpus(
        [{"title": d.title, "text": d.text} for d in data.documents], normalize_embeddings=similarity == "cos"
    )
    expected = queries @ passages.T
    numbers = np.array([7, 0, 3])
    scores, rows, positives = search.find(numbers, 5)
    assert rows.tolist() == np.argsort(-expected[numbers], axis=1)[:, :5].tolist()
    assert scores == pytest.approx(np.take_along_axis(expected[numbers], rows, axis=1), abs=1e-5)
    for number, values in zip(numbers, positives, strict=True):
        assert values == pytest.approx(expected[number, data.positives[number]], abs=1e-5)


@pytest.mark.parametrize("method", ["dense", "bm25"])
def test_positives_outside_the_pool_are_scored_and_never_found(model, pairs, tmp_path, method):
    corpus = write_lines(tmp_path / "c.jsonl", [{"_id": str(i), "text": f"the cat {i}"} for i in range(7)])
    data = load_mining_data(pairs, corpus)
    if method == "bm25":
        pytest.importorskip("bm25s")
        search = BM25Search(data, show_progress=False)
    else:
        search = DenseSearch(model, data, show_progress=False)
    _, rows, positives = search.find(np.arange(36), 40)
    assert rows.shape == (36, 7) and rows.max() <= 6
    assert [len(values) for values in positives] == [2] * 4 + [1] * 32


def test_results_do_not_depend_on_how_queries_are_batched(model, pairs, monkeypatch):
    rules = SelectionRules(num_negatives=2, range_max=6, sampling="random", relative_margin=0.0)
    whole = mine_hard_negatives(model, pairs, rules=rules, show_progress=False)
    monkeypatch.setattr(miner_module, "_BLOCK_SCORES", 30)
    parts = mine_hard_negatives(model, pairs, rules=rules, show_progress=False)
    assert parts.rows.tolist() == whole.rows.tolist()
    assert (parts.candidates, parts.dropped) == (whole.candidates, whole.dropped)
    assert parts.scores == pytest.approx(whole.scores, abs=1e-6)


def test_a_range_beyond_the_pool_is_the_whole_pool_in_blocks_of_usual_size(pairs):
    data = load_mining_data(pairs)
    (block,) = miner_module._blocks(data, SelectionRules(range_max=10**9))
    assert sorted(block[0].tolist()) == list(range(36)) and block[1] == 40


def test_margins_are_counted_from_the_lowest_of_several_positives(model, pairs):
    everything = mine_hard_negatives(model, pairs, rules=SelectionRules(num_negatives=38), show_progress=False)
    rules = SelectionRules(num_negatives=3, range_max=38, absolute_margin=0.0)
    mined = mine_hard_negatives(model, pairs, rules=rules, show_progress=False)
    told_apart = 0
    for number in range(4):  # those with two positives
        low, high = sorted(mined.positive_scores[number].tolist())
        scores = everything.scores[number]
        expected = scores[scores <= low][:3]
        told_apart += expected.tolist() != scores[scores <= high][:3].tolist()
        assert mined.scores[number][: len(expected)] == pytest.approx(expected, abs=1e-6)
    assert told_apart


def bm25_by_hand(query, documents, k1, b):
    def words(text):
        return re.findall(r"\w\w+", text.lower())

    counts = [Counter(words(document)) for document in documents]
    mean = sum(map(Counter.total, counts)) / len(counts)
    scores = []
    for count in counts:
        score = 0.0
        for word in words(query):
            df = sum(word in other for other in counts)
            idf = math.log(1 + (len(counts) - df + 0.5) / (df + 0.5))
            score += idf * count[word] / (count[word] + k1 * (1 - b + b * count.total() / mean))
        scores.append(score)
    return scores


def test_bm25_scores_are_those_of_lucenes_formula(pairs):
    pytest.importorskip("bm25s")
    data = load_mining_data(pairs)
    search = BM25Search(data, k1=1.2, b=0.6, show_progress=False)
    scores, rows, positives = search.find(np.arange(5), 8)
    documents = [document.passage for document in data.documents]
    for number in range(5):
        expected = np.array(bm25_by_hand(data.queries[number], documents, 1.2, 0.6))
        assert positives[number] == pytest.approx(expected[data.positives[number]], rel=1e-5)
        assert scores[number] == pytest.approx(np.sort(expected)[::-1][:8], rel=1e-5)
        assert expected[rows[number]] == pytest.approx(scores[number], rel=1e-5)


def test_bm25_finds_only_passages_with_a_word_of_the_query_and_orders_ties_by_row(tmp_path):
    pytest.importorskip("bm25s")
    texts = ["blue sky", "green grass", "grey sky", "sky high", "a b"]
    rows = [{"query": q, "positive": p} for q, p in zip(["sky", "x", "lost", "Blue sky!", "z"], texts, strict=True)]
    data = load_mining_data(write_lines(tmp_path / "p.jsonl", rows))
    search = BM25Search(data, show_progress=False)
    scores, found, positives = search.find(np.arange(5), 2)
    assert found.tolist() == [[0, 2], [-1, -1], [-1, -1], [0, 2], [-1, -1]]
    assert search.find(np.arange(1), 9)[1].tolist() == [[0, 2, 3, -1, -1]]
    assert np.isneginf(scores[1]).all() and positives[1].tolist() == [0.0]


def test_bm25_without_a_word_to_index_is_refused(tmp_path):
    pytest.importorskip("bm25s")
    data = load_mining_data(write_lines(tmp_path / "p.jsonl", [{"query": "q", "positive": "a b c"}]))
    with pytest.raises(DataError, match="no passage has a word"):
        BM25Search(data, show_progress=False)


def test_a_missing_bm25s_is_one_line_that_says_what_to_install(pairs, monkeypatch):
    monkeypatch.setitem(sys.modules, "bm25s", None)
    with pytest.raises(ConfigError, match=r"pip install 'contaccum\[mining\]'"):
        mine_hard_negatives(None, pairs, method="bm25")


def test_an_index_that_cannot_be_built_is_refused_before_anything_is_encoded(model, pairs, monkeypatch):
    def never(*args, **kwargs):
        raise AssertionError("encoded")

    monkeypatch.setattr("contaccum.retrieval.encoding.encode_corpus", never)
    with pytest.raises(ConfigError, match="needs at least 64 vectors"):
        mine_hard_negatives(model, pairs, index="IVF64,Flat")


def test_an_approximate_index_mines_too(model, pairs):
    mined = mine_hard_negatives(model, pairs, index="HNSW8", show_progress=False)
    exact = mine_hard_negatives(model, pairs, show_progress=False)
    assert mined.search["index"] == "HNSW8" and (mined.rows == exact.rows).mean() > 0.9
