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
    vocabulary = {word: index for index, word in enumerate(["[UNK]", *WORDS])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    torch.manual_seed(0)
    return SentenceTransformer(modules=[StaticEmbedding(tokenizer, embedding_dim=16)], device="cpu").double()


def _make_texts(num_texts: int, seed: int) -> list[str]:
    generator = torch.Generator().manual_seed(seed)
    word_indices = torch.randint(len(WORDS), (num_texts, 5), generator=generator)
    return [" ".join(WORDS[index] for index in row) for row in word_indices.tolist()]


def _preprocess(model: SentenceTransformer, columns: list[list[str]]) -> list[dict[str, torch.Tensor]]:
    return [model.preprocess(column) for column in columns]


def _pop_gradient(model: SentenceTransformer) -> torch.Tensor:
    """Return the gradients of all parameters as one vector, and reset them."""
    gradients = [parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    assert gradients, "no parameter has a gradient"
    gradient = torch.cat(gradients)
    assert gradient.abs().sum() > 0, "all gradients are zero"
    return gradient


@pytest.mark.parametrize("num_columns", [2, 4])
@pytest.mark.parametrize(["similarity_fct", "scale"], [(cos_sim, 20.0), (dot_score, 1.0)])
def test_accumulated_gradient_equals_one_large_batch(
    model: SentenceTransformer, similarity_fct, scale: float, num_columns: int
) -> None:
    """This holds if the model does not change and the bank contains the other batches of the update."""
    columns = [_make_texts(24, seed) for seed in range(num_columns)]
    MultipleNegativesRankingLoss(model, scale, similarity_fct)(_preprocess(model, columns), None).backward()
    expected = _pop_gradient(model)

    loss_fn = BankedMultipleNegativesRankingLoss(model, 18, scale, similarity_fct)
    batches = []
    for start in range(0, 24, 6):
        batches.append(_preprocess(model, [column[start : start + 6] for column in columns]))
    for batch in batches:
        loss_fn(batch, None)
    for batch in batches:
        (loss_fn(batch, None) / len(batches)).backward()
    torch.testing.assert_close(_pop_gradient(model), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("bank_size", [0, 8])
def test_loss_without_gradients_or_bank_equals_mnrl(model: SentenceTransformer, bank_size: int) -> None:
    """The bank is not used with ``bank_size=0``, nor without gradients, as in a trainer's evaluation."""
    loss_fn = BankedMultipleNegativesRankingLoss(model, bank_size)
    loss_fn(_preprocess(model, [_make_texts(6, 1), _make_texts(6, 2)]), None)
    columns = [_make_texts(6, 3), _make_texts(6, 4)]
    if bank_size == 0:
        columns.append(_make_texts(6, 5))
    features = _preprocess(model, columns)
    expected = MultipleNegativesRankingLoss(model)(features, None)
    with torch.set_grad_enabled(bank_size == 0):
        for _ in range(2):
            assert loss_fn(features, None).item() == pytest.approx(expected.item(), abs=1e-12)


@pytest.mark.parametrize("num_negatives", [0, 2])
@pytest.mark.parametrize("chunk_size", [3, 1000])
def test_loss_is_the_cross_entropy_of_one_score_matrix(
    model: SentenceTransformer, monkeypatch: pytest.MonkeyPatch, num_negatives: int, chunk_size: int
) -> None:
    """The loss does not depend on the number of banked queries that are scored at the same time."""
    monkeypatch.setattr(banked, "BANK_CHUNK_SIZE", chunk_size)
    loss_fn = BankedMultipleNegativesRankingLoss(model, bank_size=7, drift_compensation=False)
    columns = [_make_texts(16, seed) for seed in range(2 + num_negatives)]
    for start in range(0, 16, 4):
        loss = loss_fn(_preprocess(model, [column[start : start + 4] for column in columns]), None)

    batch_rows = range(12, 16)
    bank_rows = range(5, 12)
    rows = [*batch_rows, *bank_rows]
    queries, *documents = [
        normalize(model(features)["sentence_embedding"], dim=-1)[rows] for features in _preprocess(model, columns)
    ]
    scores = 20 * queries @ torch.cat(documents).T
    expected = cross_entropy(scores, torch.arange(len(rows)), reduction="sum") / 4
    assert loss.item() == pytest.approx(expected.item(), abs=1e-12)


@pytest.mark.parametrize("mask_duplicates", [True, False])
def test_duplicates_are_masked(model: SentenceTransformer, mask_duplicates: bool) -> None:
    """After (question, answer), the pairs (question, other) and (other, answer) have no negatives left."""
    question, answer, other = _make_texts(3, 1)
    for query, positive in [(question, other), (other, answer)]:
        loss_fn = BankedMultipleNegativesRankingLoss(model, bank_size=4, mask_duplicates=mask_duplicates)
        loss_fn(_preprocess(model, [[question], [answer]]), None)
        loss = loss_fn(_preprocess(model, [[query], [positive]]), None)
        assert (loss.item() < 1e-12) == mask_duplicates


def test_banked_pairs_follow_the_mean_shift(model: SentenceTransformer) -> None:
    """Banked documents are shifted in all scores. Banked queries are shifted in the documents' gradient only."""
    loss_fn = BankedMultipleNegativesRankingLoss(model, 200, 1.0, dot_score, max_drift=None)
    columns = [_make_texts(130, 1), _make_texts(130, 2)]
    loss_fn(_preprocess(model, columns), None)
    stored_queries, stored_documents = [
        model(features)["sentence_embedding"].detach() for features in _preprocess(model, columns)
    ]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for parameter in model.parameters():
        parameter.grad = torch.linspace(-1, 1, 16, dtype=torch.float64).expand_as(parameter).contiguous()
    optimizer.step()
    optimizer.zero_grad()
    shift = torch.linspace(1, -1, 16, dtype=torch.float64)

    embeddings = [torch.randn(5, 16, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    loss_fn._update_bank(_preprocess(model, columns))
    loss = loss_fn.compute_loss_from_embeddings(embeddings)
    gradients = torch.autograd.grad(loss, embeddings)

    queries = torch.cat([embeddings[0], stored_queries])
    documents = torch.cat([embeddings[1], stored_documents + shift])
    scores = queries @ documents.T
    expected = cross_entropy(scores, torch.arange(135), reduction="sum") / 5
    weights = (scores.softmax(1) - torch.eye(135)).detach() / 5
    shifted_queries = torch.cat([embeddings[0], stored_queries + shift]).detach()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-10)
    torch.testing.assert_close(gradients[0], (weights @ documents)[:5].detach())
    torch.testing.assert_close(gradients[1], (weights.T @ shifted_queries)[:5])


@pytest.mark.parametrize(["max_age", "noise", "expected_pairs"], [(None, 0.0, 8), (2, 0.0, 4), (None, 1.0, 2)])
def test_old_and_drifted_pairs_are_removed(
    model: SentenceTransformer, monkeypatch: pytest.MonkeyPatch, max_age, noise: float, expected_pairs: int
) -> None:
    """Pairs leave a bank of 8 after ``max_age`` updates, or when noise on the weights causes too much drift."""
    monkeypatch.setattr(banked, "PAIRS_PER_PROBE", 2)
    loss_fn = BankedMultipleNegativesRankingLoss(model, bank_size=8, max_age=max_age)
    optimizer = torch.optim.SGD(model.train().parameters(), lr=0.0)
    for step in range(6):
        loss_fn(_preprocess(model, [_make_texts(2, step), _make_texts(2, step + 50)]), None).backward()
        assert len(loss_fn._bank.queries) == min(2 * (step + 1), expected_pairs)
        assert model.training  # embedding the probe leaves no module in evaluation mode
        optimizer.step()
        for parameter in model.parameters():
            parameter.data.add_(noise * torch.randn_like(parameter))


def test_nonfinite_loss_does_not_change_the_bank(model: SentenceTransformer) -> None:
    loss_fn = BankedMultipleNegativesRankingLoss(model, bank_size=8)
    queries = torch.randn(2, 16)
    documents = torch.randn(2, 16)
    loss_fn.compute_loss_from_embeddings([queries, documents])
    assert not loss_fn.compute_loss_from_embeddings([queries * torch.nan, documents]).isfinite()
    assert len(loss_fn._bank.queries) == 2
    assert loss_fn.compute_loss_from_embeddings([queries, documents]).isfinite()


def test_token_hashes_ignore_padding() -> None:
    left_padded = {
        "input_ids": torch.tensor([[0, 5, 6], [5, 6, 7]]),
        "attention_mask": torch.tensor([[0, 1, 1], [1, 1, 1]]),
    }
    right_padded = {
        "input_ids": torch.tensor([[5, 6, 0], [6, 5, 0]]),
        "attention_mask": torch.tensor([[1, 1, 0], [1, 1, 0]]),
    }
    flattened = {
        "input_ids": torch.tensor([[5, 6, 6, 5]]),
        "cu_seq_lens_q": torch.tensor([0, 2, 4], dtype=torch.int32),
    }
    static = {"input_ids": torch.tensor([5, 6, 6, 5]), "offsets": torch.tensor([0, 2])}
    left_ids = banked._hash_tokens(left_padded).tolist()
    right_ids = banked._hash_tokens(right_padded).tolist()
    assert left_ids[0] == right_ids[0]
    assert banked._hash_tokens(flattened).tolist() == right_ids
    assert banked._hash_tokens(static).tolist() == right_ids
    assert len({*left_ids, *right_ids}) == 3
    assert banked._hash_tokens({**left_padded, "pixel_values": torch.zeros(2, 3)}) is None


def test_gathered_batches_are_one_batch(model: SentenceTransformer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The patched functions simulate two devices: they prepend the batch of another device."""
    queries = [_make_texts(3, 1), _make_texts(3, 2)]  # one list per device
    documents = [_make_texts(3, 10), _make_texts(3, 11)]
    remote_features = _preprocess(model, [queries[0], documents[0]])
    local_features = _preprocess(model, [queries[1], documents[1]])
    all_features = _preprocess(model, [queries[0] + queries[1], documents[0] + documents[1]])
    remote_embeddings = iter([model(features)["sentence_embedding"] for features in remote_features])
    remote_ids = banked._hash_columns(remote_features)
    monkeypatch.setattr(banked, "all_gather_with_grad", lambda column: torch.cat([next(remote_embeddings), column]))
    monkeypatch.setattr(banked, "all_gather", lambda ids: torch.cat([remote_ids, ids]))
    loss_fn = BankedMultipleNegativesRankingLoss(model, 8, gather_across_devices=True, drift_compensation=False)
    expected = MultipleNegativesRankingLoss(model)(all_features, None).item()
    assert loss_fn(local_features, None).item() == pytest.approx(expected, abs=1e-12)
    assert len(loss_fn._bank.queries) == 6


@pytest.mark.parametrize(
    "settings", [{"bank_size": -1}, {"scale": 0}, {"similarity_fct": euclidean_sim}, {"max_age": 0}]
)
def test_invalid_settings_are_refused(model: SentenceTransformer, settings) -> None:
    (name,) = settings
    with pytest.raises(ValueError, match=name):
        BankedMultipleNegativesRankingLoss(model, **settings)


def test_matryoshka_loss_is_refused(model: SentenceTransformer) -> None:
    loss_fn = MatryoshkaLoss(model, BankedMultipleNegativesRankingLoss(model), [16, 8])
    with pytest.raises(ValueError, match="do not fit a bank"):
        loss_fn(_preprocess(model, [_make_texts(3, 1), _make_texts(3, 2)]), None)


def test_loss_works_in_an_unchanged_trainer(model: SentenceTransformer, tmp_path: Path) -> None:
    columns = {"anchor": _make_texts(24, 1), "positive": _make_texts(24, 2), "negative": _make_texts(24, 3)}
    dataset = Dataset.from_dict(columns)
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
    embeddings_before = model.encode(["word1 word2"])
    trainer = SentenceTransformerTrainer(
        model=model, args=args, train_dataset=dataset, eval_dataset=dataset, loss=loss_fn
    )
    trainer.train()
    assert (model.encode(["word1 word2"]) != embeddings_before).any()
    assert loss_fn._num_pairs == 24
    assert len(loss_fn._bank.queries) == 8
    assert loss_fn._num_updates == 3  # there is no batch after the fourth and last step, so it is not counted
