from __future__ import annotations

from pathlib import Path

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch.nn.functional import cross_entropy, normalize

import sentence_transformers.sentence_transformer.losses.banked_multiple_negatives_ranking as banked
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer.losses import (
    BankedMultipleNegativesRankingLoss,
    MatryoshkaLoss,
    MultipleNegativesRankingLoss,
)
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from sentence_transformers.util import cos_sim, dot_score, euclidean_sim

WORDS = [f"word{index}" for index in range(40)]


@pytest.fixture
def model() -> SentenceTransformer:
    tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(["[UNK]", *WORDS])}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    torch.manual_seed(0)
    return SentenceTransformer(modules=[StaticEmbedding(tokenizer, embedding_dim=16)], device="cpu").double()


def _texts(count: int, seed: int) -> list[str]:
    picks = torch.randint(len(WORDS), (count, 5), generator=torch.Generator().manual_seed(seed))
    return [" ".join(WORDS[index] for index in row) for row in picks.tolist()]


def _features(model: SentenceTransformer, columns: list[list[str]]) -> list[dict[str, torch.Tensor]]:
    return [model.preprocess(column) for column in columns]


def _gradient(model: SentenceTransformer) -> torch.Tensor:
    gradients = [parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    assert gradients and torch.cat(gradients).abs().sum() > 0, "no parameter was trained"
    return torch.cat(gradients)


@pytest.mark.parametrize("num_columns", [2, 4])
@pytest.mark.parametrize(["similarity_fct", "scale"], [(cos_sim, 20.0), (dot_score, 1.0)])
def test_accumulated_gradient_is_that_of_one_large_batch(
    model: SentenceTransformer, similarity_fct, scale: float, num_columns: int
) -> None:
    """While the model stands still, a bank with the other batches of an update makes up for the small batch."""
    columns = [_texts(24, seed) for seed in range(num_columns)]
    MultipleNegativesRankingLoss(model, scale, similarity_fct)(_features(model, columns), None).backward()
    expected = _gradient(model)

    loss_fn = BankedMultipleNegativesRankingLoss(model, 18, scale, similarity_fct)
    batches = [_features(model, [column[start : start + 6] for column in columns]) for start in range(0, 24, 6)]
    for batch in batches:
        loss_fn(batch, None)
    for batch in batches:
        (loss_fn(batch, None) / len(batches)).backward()
    torch.testing.assert_close(_gradient(model), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("bank_size", [0, 8])
def test_without_gradients_or_banks_it_is_multiple_negatives_ranking_loss(
    model: SentenceTransformer, bank_size: int
) -> None:
    loss_fn = BankedMultipleNegativesRankingLoss(model, bank_size)
    loss_fn(_features(model, [_texts(6, 1), _texts(6, 2)]), None)
    features = _features(model, [_texts(6, 3), _texts(6, 4), _texts(6, 5)][: 2 + (bank_size == 0)])
    expected = MultipleNegativesRankingLoss(model)(features, None)
    with torch.set_grad_enabled(bank_size == 0):  # a trainer evaluates without, and leaves the loss in training mode
        for _ in range(2):
            assert loss_fn(features, None).item() == pytest.approx(expected.item(), abs=1e-12)


@pytest.mark.parametrize("num_negatives", [0, 2])
@pytest.mark.parametrize("rows_at_once", [3, 1000])
def test_it_is_the_cross_entropy_of_one_score_matrix(
    model: SentenceTransformer, monkeypatch: pytest.MonkeyPatch, num_negatives: int, rows_at_once: int
) -> None:
    """Rows of other queries and columns of other documents count as they are, however many rows are summed at once."""
    monkeypatch.setattr(banked, "ROWS_AT_ONCE", rows_at_once)
    loss_fn = BankedMultipleNegativesRankingLoss(model, bank_size=7, drift_compensation=False)
    columns = [_texts(16, seed) for seed in range(2 + num_negatives)]
    for start in range(0, 16, 4):
        loss = loss_fn(_features(model, [column[start : start + 4] for column in columns]), None)
    used = [*range(12, 16), *range(5, 12)]  # the batch, then the 7 pairs before it
    queries, *documents = [
        normalize(model(features)["sentence_embedding"], dim=-1)[used] for features in _features(model, columns)
    ]
    scores = 20 * queries @ torch.cat(documents).T
    expected = cross_entropy(scores, torch.arange(len(used)), reduction="sum") / 4
    assert loss.item() == pytest.approx(expected.item(), abs=1e-12)


@pytest.mark.parametrize("mask_duplicates", [True, False])
def test_a_pair_that_comes_again_is_no_negative_of_itself(model: SentenceTransformer, mask_duplicates: bool) -> None:
    loss_fn = BankedMultipleNegativesRankingLoss(model, bank_size=4, mask_duplicates=mask_duplicates)
    question, answer, other = _texts(3, 1)
    loss_fn(_features(model, [[question], [answer]]), None)
    loss = loss_fn(_features(model, [[question], [other]]), None)  # another answer to the same question
    again = BankedMultipleNegativesRankingLoss(model, bank_size=4, mask_duplicates=mask_duplicates)
    again(_features(model, [[question], [answer]]), None)
    losses = [loss, again(_features(model, [[other], [answer]]), None)]  # another question with the same answer
    assert all((loss.item() < 1e-12) == mask_duplicates for loss in losses)


def test_banked_pairs_follow_the_mean_shift(model: SentenceTransformer) -> None:
    """Of documents in value, of queries in their push on documents alone."""
    loss_fn = BankedMultipleNegativesRankingLoss(model, 200, 1.0, dot_score, max_drift=None)
    columns = [_texts(130, 1), _texts(130, 2)]
    loss_fn(_features(model, columns), None)
    stored = [model(features)["sentence_embedding"].detach() for features in _features(model, columns)]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for parameter in model.parameters():
        parameter.grad = torch.linspace(-1, 1, 16, dtype=torch.float64).expand_as(parameter).contiguous()
    optimizer.step()
    optimizer.zero_grad()
    shift = torch.linspace(1, -1, 16, dtype=torch.float64)

    embeddings = [torch.randn(5, 16, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    loss_fn._follow_model(_features(model, columns))
    loss = loss_fn.compute_loss_from_embeddings(embeddings)
    gradients = torch.autograd.grad(loss, embeddings)

    queries, documents = torch.cat([embeddings[0], stored[0]]), torch.cat([embeddings[1], stored[1] + shift])
    scores = queries @ documents.T
    expected = cross_entropy(scores, torch.arange(135), reduction="sum") / 5
    weights = (scores.softmax(1) - torch.eye(135)).detach() / 5
    pushing = torch.cat([embeddings[0], stored[0] + shift]).detach()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-10)
    torch.testing.assert_close(gradients[0], (weights @ documents)[:5].detach())
    torch.testing.assert_close(gradients[1], (weights.T @ pushing)[:5])


@pytest.mark.parametrize(["max_age", "drift", "expected"], [(None, 0.0, 8), (2, 0.0, 4), (None, 1.0, 2)])
def test_pairs_leave_when_they_are_too_old_or_have_drifted_too_far(
    model: SentenceTransformer, monkeypatch: pytest.MonkeyPatch, max_age, drift: float, expected: int
) -> None:
    monkeypatch.setattr(banked, "PAIRS_PER_PROBE", 2)
    loss_fn = BankedMultipleNegativesRankingLoss(model, bank_size=8, max_age=max_age)
    optimizer = torch.optim.SGD(model.train().parameters(), lr=0.0)
    for step in range(6):
        loss_fn(_features(model, [_texts(2, step), _texts(2, step + 50)]), None).backward()
        assert len(loss_fn._bank.queries) == min(2 * (step + 1), expected)
        assert model.training  # embedding the probe leaves no module in eval mode
        optimizer.step()
        for parameter in model.parameters():
            parameter.data.add_(drift * torch.randn_like(parameter))


def test_a_loss_that_is_not_finite_leaves_the_bank_alone(model: SentenceTransformer) -> None:
    loss_fn = BankedMultipleNegativesRankingLoss(model, bank_size=8)
    batch = [torch.randn(2, 16) for _ in range(2)]
    loss_fn.compute_loss_from_embeddings(batch)
    assert not loss_fn.compute_loss_from_embeddings([batch[0] * torch.nan, batch[1]]).isfinite()
    assert len(loss_fn._bank.queries) == 2 and loss_fn.compute_loss_from_embeddings(batch).isfinite()


def test_ids_go_by_tokens_and_not_by_padding() -> None:
    left = {"input_ids": torch.tensor([[0, 5, 6], [5, 6, 7]]), "attention_mask": torch.tensor([[0, 1, 1], [1, 1, 1]])}
    right = {"input_ids": torch.tensor([[5, 6, 0], [6, 5, 0]]), "attention_mask": torch.tensor([[1, 1, 0], [1, 1, 0]])}
    flat = {"input_ids": torch.tensor([[5, 6, 6, 5]]), "cu_seq_lens_q": torch.tensor([0, 2, 4], dtype=torch.int32)}
    stream = {"input_ids": torch.tensor([5, 6, 6, 5]), "offsets": torch.tensor([0, 2])}
    ids = [banked._token_hashes(features).tolist() for features in (left, right, flat, stream)]
    assert ids[0][0] == ids[1][0] and ids[1] == ids[2] == ids[3]
    assert len({*ids[0], *ids[1]}) == 3
    assert banked._token_hashes({**left, "pixel_values": torch.zeros(2, 3)}) is None


def test_gathered_batches_are_one_batch(model: SentenceTransformer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-in for two devices: gathering brings another device's batch before one's own."""
    batches = [_features(model, [_texts(3, seed), _texts(3, seed + 9)]) for seed in (1, 2)]
    both = _features(model, [_texts(3, 1) + _texts(3, 2), _texts(3, 10) + _texts(3, 11)])
    others = [model(features)["sentence_embedding"] for features in batches[0]]
    ids = torch.stack([banked._token_hashes(features) for features in batches[0]], dim=1)
    arriving = iter(others)
    monkeypatch.setattr(banked, "all_gather_with_grad", lambda column: torch.cat([next(arriving), column]))
    monkeypatch.setattr(banked, "all_gather", lambda tensor: torch.cat([ids, tensor]))
    loss_fn = BankedMultipleNegativesRankingLoss(model, 8, gather_across_devices=True, drift_compensation=False)
    expected = MultipleNegativesRankingLoss(model)(both, None).item()
    assert loss_fn(batches[1], None).item() == pytest.approx(expected, abs=1e-12)
    assert len(loss_fn._bank.queries) == 6


def test_what_cannot_work_is_refused(model: SentenceTransformer) -> None:
    for settings in ({"bank_size": -1}, {"scale": 0}, {"similarity_fct": euclidean_sim}, {"max_age": 0}):
        with pytest.raises(ValueError, match=next(iter(settings))):
            BankedMultipleNegativesRankingLoss(model, **settings)
    wrapped = MatryoshkaLoss(model, BankedMultipleNegativesRankingLoss(model), [16, 8])
    with pytest.raises(ValueError, match="do not fit a bank"):
        wrapped(_features(model, [_texts(3, 1), _texts(3, 2)]), None)


def test_trains_in_a_trainer_that_knows_nothing_of_it(model: SentenceTransformer, tmp_path: Path) -> None:
    dataset = Dataset.from_dict({"anchor": _texts(24, 1), "positive": _texts(24, 2), "negative": _texts(24, 3)})
    loss_fn = BankedMultipleNegativesRankingLoss(model.float(), bank_size=8)
    args = SentenceTransformerTrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=3,
        num_train_epochs=1,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    before = model.encode(["word1 word2"])
    SentenceTransformerTrainer(
        model=model, args=args, train_dataset=dataset, eval_dataset=dataset, loss=loss_fn
    ).train()
    assert (model.encode(["word1 word2"]) != before).any()
    assert loss_fn._num_pairs == 24 and len(loss_fn._bank.queries) == 8
    assert loss_fn._update == 3  # the fourth step is the last, and no batch has come since
