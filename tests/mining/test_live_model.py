"""Mining from memory with a model in training, as for a refresh of negatives every N updates: no files, no traces."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from mining_files import write_lines

from contaccum import BankedInfoNCE, DualEncoder
from contaccum.errors import DataError
from contaccum.mining import SelectionRules, load_mining_data, mine_hard_negatives, write_mined
from contaccum.mining import pool as pool_module


@pytest.fixture
def live(tiny_config, tiny_tokenizer):
    """An encoder in training mode, dropout on."""
    model = DualEncoder.from_backbone(tiny_config, tokenizer=tiny_tokenizer, pooling="mean", device="cpu")
    return model.train()


@pytest.fixture
def records(pairs):
    return [json.loads(line) for line in pairs.read_text().splitlines()]


def mine(model, data, **rules):
    return mine_hard_negatives(model, data, rules=SelectionRules(**rules), show_progress=False)


def test_records_in_memory_give_what_their_file_gives(model, pairs, records):
    from_file = mine(model, pairs)
    shapes = (
        records,
        iter(records),
        Dataset.from_list(records),
        [(record["query"], record["positive"]) for record in records],
        [{"question": record["query"], "passage": record["positive"]} for record in records],
        [{"positive": record["positive"], "query": record["query"]} for record in records],
    )
    for shape in shapes:
        mined = mine(model, shape)
        assert mined.rows.tolist() == from_file.rows.tolist() and mined.dropped == from_file.dropped
        assert mined.data.record["fingerprint"] == from_file.data.record["fingerprint"]
        assert mined.dataset().to_list() == from_file.dataset().to_list()


def test_a_corpus_in_memory_gives_what_its_file_gives(model, records, tmp_path):
    corpus = [{"_id": f"d{i}", "title": "the sky", "text": f"the cat {i}"} for i in range(9)]
    corpus.append({"_id": "copy", "title": "", "text": records[0]["positive"].upper()})
    file = write_lines(tmp_path / "c.jsonl", corpus)
    from_file = load_mining_data(records, file)
    assert from_file.pool_size == 10 and from_file.excluded[0] == [9]
    assert load_mining_data(records, corpus) == from_file
    texts = load_mining_data(records, [f"{c['title']} {c['text']}".strip() for c in corpus])
    assert (texts.pool_size, texts.excluded) == (10, from_file.excluded)
    assert mine(model, records, num_negatives=2).data.pool_size == 40


def test_further_positives_of_a_record_are_no_negatives_and_make_no_pair(model):
    texts = ["the cat", "The  CAT", "the dog", "a bird", "the fish"]
    records = [{"query": "q", "positive": [texts[0], texts[2]]}, *({"query": "x", "positive": t} for t in texts[3:])]
    mined = mine(model, load_mining_data(records, texts), num_negatives=2)
    assert set(mined.dataset()[0].values()) == {"q", "the cat", "a bird", "the fish"}
    assert len(mined.dataset()) == 3


def test_a_model_in_training_is_left_as_it_was_and_nothing_is_written(live, records, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = sorted(tmp_path.iterdir())
    weights = {name: value.clone() for name, value in live.state_dict().items()}
    live(live.preprocess(["the cat"]))["sentence_embedding"].sum().backward()
    gradients = [None if p.grad is None else p.grad.clone() for p in live.parameters()]
    states = torch.get_rng_state(), np.random.get_state()[1].tolist(), torch.get_num_threads()

    first, again = (mine(live, records, sampling="random") for _ in range(2))

    # In training mode dropout would give other scores each time.
    assert first.rows.tolist() == again.rows.tolist() and first.scores.tolist() == again.scores.tolist()
    assert all(module.training for module in live.modules())
    assert torch.equal(torch.get_rng_state(), states[0]) and np.random.get_state()[1].tolist() == states[1]
    assert torch.get_num_threads() == states[2]
    assert all(torch.equal(value, weights[name]) for name, value in live.state_dict().items())
    for parameter, gradient in zip(live.parameters(), gradients, strict=True):
        assert (parameter.grad is None) == (gradient is None)
        assert gradient is None or torch.equal(parameter.grad, gradient)
    assert sorted(tmp_path.iterdir()) == before


def test_a_refresh_mines_with_the_weights_of_the_moment_and_reads_no_text_again(live, records, monkeypatch):
    data = load_mining_data(records)

    def never(text):
        raise AssertionError("compared texts again")

    monkeypatch.setattr(pool_module, "_key", never)
    rules = SelectionRules(num_negatives=2, range_max=8, sampling="random")
    loss_fn = BankedInfoNCE(bank_size=16, temperature=0.05, similarity="cos")
    optimizer = torch.optim.SGD(live.parameters(), lr=0.5)
    mined = []
    for update in range(4):
        if update % 2 == 0:
            found = mine_hard_negatives(live, data, rules=replace(rules, seed=update), show_progress=False)
            mined.append(found)
        batch = found.dataset()[:6]
        columns = [live(live.preprocess(texts))["sentence_embedding"] for texts in batch.values()]
        loss = loss_fn(columns[0], columns[1], torch.stack(columns[2:], dim=1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    now = mine_hard_negatives(live, data, rules=replace(rules, seed=2), show_progress=False)
    queries = live.encode_queries(data.queries)
    passages = live.encode_corpus([{"text": document.text} for document in data.documents])
    expected = np.take_along_axis(queries @ passages.T, now.rows, axis=1)
    assert now.scores == pytest.approx(expected, rel=1e-5)
    for found in mined:
        assert np.abs(found.scores / now.scores - 1).max() > 1e-3


def test_the_dataset_is_what_the_file_of_pairs_holds(model, pairs, tmp_path):
    mined = mine(model, pairs, num_negatives=2, range_max=20, absolute_margin=0.0)
    path, _ = write_mined(mined, tmp_path / "n.jsonl", "ntuples")
    lines = [json.loads(line) for line in Path(path).read_text().splitlines()]
    rows = mined.dataset().to_list()
    assert 0 < len(rows) < 40
    assert list(rows[0]) == ["query", "positive", "negative_1", "negative_2"]
    assert rows == [{name: line[name] for name in rows[0]} for line in lines]


def test_a_dataset_without_any_row_is_refused(model, records):
    mined = mine(model, records, num_negatives=99)
    with pytest.raises(DataError, match="no query has 99 negatives"):
        mined.dataset()


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"query": "q", "positive": None}, r"records:2: missing positive"),
        ({"query": "q", "positive": []}, "records:2: empty positive"),
        ({"query": "q"}, "records:2: not a query and its positive"),
        ({"query": " ", "positive": "p"}, "records:2: empty query"),
        ("q and p", "records:2: not a query and its positive"),
        (("q", ["p", 7]), "records:2: positive is not text"),
    ],
)
def test_a_bad_record_in_memory_is_named_or_left_out(bad, message):
    source = [("q", "p"), bad, ("r", "s")]
    with pytest.raises(DataError, match=message):
        load_mining_data(source)
    data = load_mining_data(source, on_bad_record="skip")
    assert data.queries == ["q", "r"] and "1 left out" in data.record["records"]


def test_a_bad_passage_of_a_corpus_in_memory_is_named():
    with pytest.raises(DataError, match="corpus:2: missing text"):
        load_mining_data([("q", "p")], ["a", {"_id": "x"}])
    with pytest.raises(DataError, match="corpus:1: not a passage"):
        load_mining_data([("q", "p")], [7])
    with pytest.raises(DataError, match="records: no pairs left"):
        load_mining_data([])
