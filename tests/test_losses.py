"""ContAccumLoss inside sentence-transformers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from datasets import Dataset
from sample_texts import sentences
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.losses import MatryoshkaLoss, MultipleNegativesRankingLoss
from sentence_transformers.util import cos_sim, dot_score, euclidean_sim

from contaccum import ContAccumLoss, DualEncoder
from contaccum.errors import ConfigError
from contaccum.losses import token_hashes


@pytest.fixture
def model(tiny_config: Any, tiny_tokenizer: Any, request: pytest.FixtureRequest) -> DualEncoder:
    tied = getattr(request, "param", True)
    return DualEncoder.from_backbone(tiny_config, tied=tied, pooling="mean", tokenizer=tiny_tokenizer)


def features(model: SentenceTransformer, n: int, columns: int, seed: int = 0) -> list[dict[str, Any]]:
    tasks = ["query"] + ["document"] * (columns - 1)
    return [model.preprocess(sentences(n, seed * 10 + i), task=task) for i, task in enumerate(tasks)]


@pytest.mark.parametrize("columns", [2, 3, 5], ids=["pairs", "triplets", "n-tuples"])
@pytest.mark.parametrize(("similarity", "scale"), [(cos_sim, 20.0), (dot_score, 1.0)])
@pytest.mark.parametrize("model", [True, False], indirect=True, ids=["tied", "router"])
def test_without_a_bank_it_is_multiple_negatives_ranking_loss(
    model: DualEncoder, similarity: Any, scale: float, columns: int
) -> None:
    results = []
    model.double()  # gradients of float32 differ in the last digits by the order of sums alone
    for make in (ContAccumLoss, MultipleNegativesRankingLoss):
        kwargs = {"bank_size": 0} if make is ContAccumLoss else {}
        loss_fn = make(model, scale=scale, similarity_fct=similarity, **kwargs).train()
        model.eval()  # no dropout
        model.zero_grad()
        loss = loss_fn(features(model, 6, columns), None)
        loss.backward()
        results.append((loss.item(), [p.grad.clone() for p in model.parameters() if p.grad is not None]))
    (ours, our_grads), (theirs, their_grads) = results
    assert ours == pytest.approx(theirs, abs=1e-12)
    assert len(our_grads) == len(their_grads) > 0
    assert max((a - b).abs().max().item() for a, b in zip(our_grads, their_grads, strict=True)) < 1e-12


@pytest.mark.parametrize("columns", [2, 3, 4], ids=["pairs", "triplets", "n-tuples"])
@pytest.mark.parametrize("model", [True, False], indirect=True, ids=["tied", "router"])
def test_trains_in_a_plain_sentence_transformer_trainer(model: DualEncoder, columns: int, tmp_path: Any) -> None:
    names = ["anchor", "positive", "negative_1", "negative_2"][:columns]
    dataset = Dataset.from_dict({name: sentences(24, i) for i, name in enumerate(names)})
    loss = ContAccumLoss(model, bank_size=8)
    before = copy.deepcopy(model.state_dict())
    SentenceTransformerTrainer(
        model=model,
        args=SentenceTransformerTrainingArguments(
            output_dir=str(tmp_path),
            per_device_train_batch_size=4,
            gradient_accumulation_steps=3,
            num_train_epochs=1,
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
            router_mapping={name: "query" if i == 0 else "document" for i, name in enumerate(names)},
        ),
        train_dataset=dataset,
        loss=loss,
    ).train()
    assert loss.info_nce is not None and loss.info_nce.bank is not None
    assert loss.info_nce.bank.fill == 8
    assert int(loss.info_nce.bank.enqueued) == 24
    assert loss.last["columns"] == (4 + 8) * (columns - 1)
    for tower in (model.query_encoder, model.passage_encoder):
        names = {id(p): name for name, p in model.named_parameters()}
        assert any(not torch.equal(p, before[names[id(p)]]) for p in tower.parameters())


def test_matryoshka_keeps_a_bank_for_each_dimension(model: DualEncoder) -> None:
    loss_fn = ContAccumLoss(model, bank_size=6)
    wrapped = MatryoshkaLoss(model, loss_fn, [32, 16])
    for step in range(3):
        wrapped(features(model, 4, 2, seed=step), None).backward()
    assert {size: nce.bank.fill for size, nce in loss_fn.info_nces.items()} == {"32": 6, "16": 6}
    assert loss_fn.info_nce is loss_fn.info_nces["32"]
    # The shorter bank holds what the loss was given: prefixes at unit length, less the running mean.
    short = loss_fn.info_nces["16"]
    stored = short.bank.entries().passages[-1] + short.passage_mean.mean
    assert stored.shape == (16,)


def test_evaluation_is_the_loss_of_the_batch_alone(model: DualEncoder) -> None:
    loss_fn = ContAccumLoss(model, bank_size=6)
    loss_fn(features(model, 4, 2, seed=1), None)
    model.eval()
    loss_fn.eval()
    with torch.no_grad():
        ours = loss_fn(features(model, 4, 2), None)
        theirs = MultipleNegativesRankingLoss(model)(features(model, 4, 2), None)
    assert ours.item() == pytest.approx(theirs.item(), abs=1e-6)
    assert loss_fn.info_nce.bank.fill == 4


def test_a_repeated_text_is_masked_by_its_tokens(model: DualEncoder) -> None:
    queries, passages = sentences(4, 1), sentences(4, 2)
    losses = {}
    for mask_duplicates in (True, False):
        loss_fn = ContAccumLoss(model, bank_size=4, mask_duplicates=mask_duplicates, drift_compensation="none").train()
        model.eval()
        for _ in range(2):  # the second time, every passage is in the bank already
            loss_fn([model.preprocess(queries), model.preprocess(passages)], None)
        losses[mask_duplicates] = loss_fn.last["local_loss"].item()
    # Each column counts twice without the mask, the positive's twin included.
    assert losses[False] > losses[True] + 0.05


def test_ids_in_labels_and_positives_told_beforehand_decide_what_is_masked(model: DualEncoder) -> None:
    """A query's other positive, which no pair of batch or bank tells of, is no negative of it: in both."""
    texts = features(model, 4, 2)
    ids = torch.tensor([[1, 101], [2, 102], [3, 103], [4, 104]])
    losses = {}
    for name, labels, told in (
        ("tokens", None, False),
        ("scores", torch.rand(4), False),
        ("ids", ids, False),
        ("other ids", ids + 1000, True),
        ("told", ids, True),
    ):
        loss_fn = ContAccumLoss(model, bank_size=8, drift_compensation="none").train()
        if told:
            loss_fn.know_positives(torch.tensor([9, 1]), torch.tensor([9, 102]))
        model.eval()
        losses[name] = [loss_fn(texts, labels).item() for _ in range(2)]
    assert losses["ids"] == losses["tokens"] == losses["scores"] == losses["other ids"]
    queries, passages = (model(column)["sentence_embedding"] for column in texts)
    scores = 20 * cos_sim(queries, passages)
    scores[0, 1] = -torch.inf
    alone = torch.nn.functional.cross_entropy(scores, torch.arange(4)).item()
    assert losses["told"][0] == pytest.approx(alone, rel=1e-5) and losses["told"][0] < losses["ids"][0]
    # Again: each row has a twin in the bank, and each negative too; one's own positive there is masked.
    doubled = scores + torch.log(2 - torch.eye(4))
    twice = 2 * torch.nn.functional.cross_entropy(doubled, torch.arange(4)).item()
    assert losses["told"][1] == pytest.approx(twice, rel=1e-5)


def test_token_hash_is_blind_to_padding_and_sees_order(tiny_tokenizer: Any) -> None:
    short = ["cat dog bird", "dog cat bird", "cat dog", "cat dog bird"]
    alone = [token_hashes(tiny_tokenizer([text], return_tensors="pt")).item() for text in short]
    right = token_hashes(tiny_tokenizer([*short, "cat " * 20], padding=True, return_tensors="pt"))[:4].tolist()
    left = copy.deepcopy(tiny_tokenizer)
    left.padding_side = "left"
    padded_left = token_hashes(left([*short, "cat " * 20], padding=True, return_tensors="pt"))[:4].tolist()
    assert alone == right == padded_left
    assert len({*alone}) == 3 and alone[0] == alone[3]


def test_token_hashes_do_not_collide_on_a_hundred_thousand_rows() -> None:
    tokens = torch.randint(1000, (100_000, 3), generator=torch.Generator().manual_seed(0))
    distinct = len({tuple(row) for row in tokens.tolist()})
    assert len(set(token_hashes({"input_ids": tokens}).tolist())) == distinct


def test_settings_that_cannot_work_are_refused_at_once(model: DualEncoder) -> None:
    with pytest.raises(ConfigError, match="euclidean_sim"):
        ContAccumLoss(model, similarity_fct=euclidean_sim)
    with pytest.raises(ConfigError, match="scale"):
        ContAccumLoss(model, scale=0)
    with pytest.raises(ConfigError, match="query_bank_size"):
        ContAccumLoss(model, bank_size=4, query_bank_size=8)


def test_bank_state_round_trip(model: DualEncoder) -> None:
    loss_fn, copied = ContAccumLoss(model, bank_size=6), ContAccumLoss(model, bank_size=6)
    for step in range(3):
        loss_fn(features(model, 4, 3, seed=step), None)
    copied.load_bank_state_dict(loss_fn.bank_state_dict())
    model.eval()
    ours, theirs = (each.train()(features(model.eval(), 4, 3), None).item() for each in (loss_fn, copied))
    assert ours == theirs
