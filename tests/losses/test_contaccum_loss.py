"""ContAccumLoss inside sentence-transformers: drop-in, update detection, drift probe, resuming."""

from __future__ import annotations

import copy
from functools import cache, partial
from typing import Any

import pytest
import torch
from datasets import Dataset
from sample_texts import features, sentences
from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.losses import (
    AdaptiveLayerLoss,
    Matryoshka2dLoss,
    MatryoshkaLoss,
    MultipleNegativesRankingLoss,
)
from sentence_transformers.sentence_transformer.losses.matryoshka import ForwardDecorator, shrink
from sentence_transformers.util import cos_sim, dot_score, euclidean_sim
from tiny_models import tiny_encoder
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from contaccum import CachedContAccumLoss, ContAccumLoss, DualEncoder
from contaccum.bank.ids import NO_ID
from contaccum.errors import ConfigError, warn_once
from contaccum.losses.probe import MIN_PAIRS_BETWEEN_PROBES, PROBE_PAIRS, EncoderProbe
from contaccum.losses.text_ids import content_ids, copy_first_texts

HASH = 2**50
"""A factor that makes small numbers as large as the hashes of texts."""

make_encoder = cache(tiny_encoder)  # which writes and reads the files of a model


@pytest.fixture
def model(request: pytest.FixtureRequest) -> DualEncoder:
    """Return a tiny model without dropout; the parameter says whether it is tied (default: yes)."""
    is_tied = getattr(request, "param", True)
    return copy.deepcopy(make_encoder(is_tied, normalize=False, similarity="cos"))


def make_probe(model: nn.Module, parts: Any = None) -> EncoderProbe:
    """Make a probe with the parts."""
    encoder_probe = EncoderProbe(model, is_used=True, gathers=False)
    encoder_probe.parts = parts
    return encoder_probe


def collect_gradients(model: nn.Module) -> list[Tensor]:
    return [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]


def assert_equal_states(state: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Assert that two states have the same keys, and values that are equal bit for bit."""
    assert state.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(state[key], value), key


def draw_columns(n: int, seed: int) -> list[dict[str, Any]]:
    """Draw the features of n queries and n documents, with random tokens."""
    tokens = torch.randint(5, 60, (2, n, 7), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(tokens[0])
    return [
        {"input_ids": tokens[0], "attention_mask": mask, "task": "query"},
        {"input_ids": tokens[1], "attention_mask": mask, "task": "document"},
    ]


def copy_rows(columns: list[dict[str, Any]], start: int, end: int) -> list[dict[str, Any]]:
    """Copy the rows from ``start`` to ``end`` of each column."""
    copied_columns = []
    for column in columns:
        copied = {}
        for key, value in column.items():
            if torch.is_tensor(value):
                value = value[start:end].clone()
            copied[key] = value
        copied_columns.append(copied)
    return copied_columns


@pytest.mark.parametrize("columns", [2, 3, 5], ids=["pairs", "triplets", "n-tuples"])
@pytest.mark.parametrize(("similarity", "scale"), [(cos_sim, 20.0), (dot_score, 1.0)])
@pytest.mark.parametrize("model", [True, False], indirect=True, ids=["tied", "router"])
def test_without_a_bank_it_is_multiple_negatives_ranking_loss(model, similarity, scale, columns):
    # In float32, gradients differ in the last digits by the order of sums.
    model.double()
    loss_fn = ContAccumLoss(model, bank_size=0, scale=scale, similarity_fct=similarity)
    loss = loss_fn.train()(features(model, 6, columns), None)
    loss.backward()
    gradients = collect_gradients(model)
    model.zero_grad()
    published = MultipleNegativesRankingLoss(model, scale=scale, similarity_fct=similarity)
    expected_loss = published.train()(features(model, 6, columns), None)
    expected_loss.backward()
    expected_gradients = collect_gradients(model)
    assert loss.item() == pytest.approx(expected_loss.item(), abs=1e-12)
    assert len(gradients) > 0
    for gradient, expected in zip(gradients, expected_gradients, strict=True):
        assert (gradient - expected).abs().max() < 1e-12


def test_matryoshka_has_a_bank_and_a_probe_for_each_dimension(model):
    """They equal those of one separate loss per dimension, on embeddings cut to the dimension."""
    dims = (16, 8, 4)
    reference_model = copy.deepcopy(model.double())
    loss_fn = ContAccumLoss(model, bank_size=40)
    matryoshka = MatryoshkaLoss(model, loss_fn, list(dims))
    reference_losses = {dim: ContAccumLoss(reference_model, bank_size=40) for dim in dims}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    reference_optimizer = torch.optim.SGD(reference_model.parameters(), lr=0.3)
    forward_in_full_size = reference_model.forward
    for step in range(14):
        columns = features(model, 10, 2, seed=step % 5)
        matryoshka(columns, None).backward()
        for dim, reference_loss in reference_losses.items():

            def forward(inputs: dict[str, Any], dim: int = dim) -> dict[str, Tensor]:
                embeddings = forward_in_full_size(inputs)["sentence_embedding"]
                return {"sentence_embedding": shrink(embeddings, dim)}

            reference_model.forward = forward
            reference_loss(columns, None).backward()
        optimizer.step()
        optimizer.zero_grad()
        reference_optimizer.step()
        reference_optimizer.zero_grad()
    assert set(loss_fn.info_nces) == {"16", "8", "4"}
    assert loss_fn.info_nce is loss_fn.info_nces["16"]
    for dim, reference_loss in reference_losses.items():
        info_nce = loss_fn.info_nces[str(dim)]
        expected = reference_loss.info_nce
        assert info_nce.bank.total_enqueued >= 40
        assert info_nce.clock.num_updates == 14
        assert info_nce.compensation.age_limit == expected.compensation.age_limit
        drift_probe = info_nce.compensation.probe
        expected_probe = expected.compensation.probe
        assert len(drift_probe.pairs) == 2
        assert drift_probe.pairs == expected_probe.pairs
        assert torch.allclose(drift_probe.embeddings, expected_probe.embeddings, atol=1e-9)
    for weight, expected in zip(model.parameters(), reference_model.parameters(), strict=True):
        assert torch.allclose(weight, expected, atol=1e-9)


def test_matryoshka_cuts_the_probe_of_a_wrapped_model(model):
    """The trainer replaces the model in the losses by a wrapper such as DDP."""

    class Wrapper(nn.Module):
        def __init__(self, wrapped_model: DualEncoder) -> None:
            super().__init__()
            self.wrapped_model = wrapped_model

        def forward(self, inputs: dict[str, Any]) -> dict[str, Tensor]:
            return self.wrapped_model(inputs)

    states = []
    for is_wrapped in (False, True):
        encoder = copy.deepcopy(model).double()
        loss_fn = ContAccumLoss(encoder, bank_size=20)
        matryoshka = MatryoshkaLoss(encoder, loss_fn, [16, 8])
        if is_wrapped:
            loss_fn.model = Wrapper(encoder)
            matryoshka.model = loss_fn.model
        for seed in range(3):
            matryoshka(features(encoder, 10, 2, seed=seed), None).backward()
        assert loss_fn.info_nces["8"].compensation.probe.embeddings.shape[-1] == 8
        states.append(loss_fn.bank_state_dict())
    assert_equal_states(states[1], states[0])


LOSSES = {
    "plain": ContAccumLoss,
    "cached Matryoshka": lambda model: MatryoshkaLoss(model, CachedContAccumLoss(model), [16, 8]),
}


@pytest.mark.parametrize("make_loss", LOSSES.values(), ids=LOSSES)
def test_a_new_model_starts_with_an_empty_bank(make_loss, tmp_path):
    """sentence-transformers puts a new model into the loss for each trial of a search."""
    texts = sentences(80, seed=0)
    trainer = SentenceTransformerTrainer(
        model_init=lambda: tiny_encoder(),
        args=SentenceTransformerTrainingArguments(
            str(tmp_path), max_steps=5, save_strategy="no", report_to="none", use_cpu=True
        ),
        train_dataset=Dataset.from_dict({"anchor": texts[:40], "positive": texts[40:]}),
        loss=make_loss,
    )
    weights = []
    for _ in range(2):
        trainer.train()
        weights.append(trainer.model.state_dict())
    assert_equal_states(weights[1], weights[0])


@pytest.mark.parametrize("num_pairs", [16, 128, 4])
def test_another_number_of_pairs_per_update_than_the_trainer_has_is_one_warning(
    num_pairs, model, tmp_path, caplog
):
    """The trainer has updates of 16 pairs; the last one of an epoch has 4."""
    warn_once.cache_clear()
    texts = sentences(104, seed=0)
    SentenceTransformerTrainer(
        model=model,
        args=SentenceTransformerTrainingArguments(
            str(tmp_path),
            per_device_train_batch_size=4,
            gradient_accumulation_steps=4,
            num_train_epochs=3,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
        ),
        train_dataset=Dataset.from_dict({"anchor": texts[:52], "positive": texts[52:]}),
        loss=ContAccumLoss(model, bank_size=32, pairs_per_update=num_pairs),
    ).train()
    messages = [text for text in caplog.messages if "pairs_per_update" in text]
    assert len(messages) == (0 if num_pairs == 16 else 1)
    assert all(f"={num_pairs}, but an update has 16 pairs" in text for text in messages)


def test_a_wrapper_of_the_model_keeps_the_bank_and_the_probe(model):
    loss_fn = ContAccumLoss(model, bank_size=32)
    loss_fn(features(model, 10, 2), None)
    state = loss_fn.bank_state_dict()
    loss_fn.model = nn.DataParallel(model)
    assert_equal_states(loss_fn.bank_state_dict(), state)
    loss_fn.model = model
    assert_equal_states(loss_fn.bank_state_dict(), state)
    loss_fn.model = copy.deepcopy(model)
    assert loss_fn.bank_state_dict() == {}


@pytest.mark.parametrize("mode", [False, True])
@pytest.mark.parametrize("loss_class", [ContAccumLoss, CachedContAccumLoss])
def test_evaluation_is_the_loss_of_the_batch_alone(model, loss_class, mode):
    model.double()  # in float32, the two differ by rounding, more on some CPUs
    loss_fn = loss_class(model, bank_size=6)
    loss_fn(features(model, 4, 2, seed=1), None)
    loss_fn.train(mode)  # trainers leave a loss in training mode
    model.eval()
    with torch.no_grad():
        loss = loss_fn(features(model, 4, 2), None)
        expected = MultipleNegativesRankingLoss(model)(features(model, 4, 2), None)
    assert loss.item() == pytest.approx(expected.item(), abs=1e-12)
    assert loss_fn.info_nce.bank.total_enqueued == 4


@pytest.mark.parametrize("mode", [True, False])
def test_small_integers_beside_triplets_are_no_text_ids(model, mode):
    loss_fn = ContAccumLoss(model, bank_size=8).train(mode)
    texts = [*features(model, 4, 2), features(model, 4, 2, seed=1)[1]]
    classes = torch.randint(-9, 1_000_000, (4, 3))
    with pytest.raises(ConfigError, match="remove or rename the column"):
        loss_fn(texts, classes)


def test_ids_in_labels_and_known_positives_decide_what_is_masked(model):
    """The passage of pair 1 is another positive of query 0, which only the table shows."""
    texts = features(model, 4, 2)
    ids = HASH * torch.tensor([[1, 101], [2, 102], [3, 103], [4, 104]])

    def compute_losses(labels: Tensor | None, has_table: bool) -> list[float]:
        """Return the losses of the same micro-batch without and with itself in the bank."""
        loss_fn = ContAccumLoss(model, bank_size=8, drift_compensation="none").train()
        if has_table:
            pairs = HASH * torch.tensor([[9, 9], [1, 102]])
            loss_fn.set_known_positives(*pairs.T)
        losses = [loss_fn(texts, labels).item() for _ in range(2)]
        with torch.no_grad():  # the loss of an evaluation has no bank
            assert loss_fn.eval()(texts, labels).item() == pytest.approx(losses[0])
        return losses

    losses = compute_losses(ids, has_table=False)
    assert compute_losses(None, has_table=False) == losses
    for foreign_label in (torch.rand(4), torch.rand(4, 2), torch.ones(4, 9, dtype=torch.int64)):
        assert compute_losses(foreign_label, has_table=False) == losses
    assert compute_losses(ids + 1000, has_table=True) == losses  # ids that the table does not list

    masked_losses = compute_losses(ids, has_table=True)
    queries = model(texts[0])["sentence_embedding"]
    passages = model(texts[1])["sentence_embedding"]
    scores = 20 * cos_sim(queries, passages)
    scores[0, 1] = -torch.inf  # the other positive of query 0 is masked
    targets = torch.arange(4)
    expected = cross_entropy(scores, targets).item()
    assert masked_losses[0] == pytest.approx(expected, rel=1e-5)
    assert masked_losses[0] < losses[0]
    # The second time, the bank holds a copy of every pair. Every negative counts twice, which adds
    # log 2 to its score; the copy of the positive is masked. The queries in the bank add the same
    # loss once more.
    doubled = scores + torch.log(2 - torch.eye(4))
    expected = 2 * cross_entropy(doubled, targets).item()
    assert masked_losses[1] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("has_ids", [True, False])
def test_inside_another_loss_updates_count_and_ids_are_stored(model, has_ids):
    """The other loss computes the embeddings once, as the docs of sentence-transformers show."""
    loss_fn = ContAccumLoss(model.train(), bank_size=64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(10):
        columns = draw_columns(16, step % 3)
        ids = [content_ids(column) for column in columns] if has_ids else None
        embeddings = [model(column)["sentence_embedding"] for column in columns]
        distance = (embeddings[0] - embeddings[1]).square().sum(1).mean()
        loss = loss_fn.compute_loss_from_embeddings(embeddings, ids)
        (distance + loss).backward()
        optimizer.step()
        optimizer.zero_grad()
    info_nce = loss_fn.info_nce
    assert info_nce.clock.num_updates == 10
    assert loss_fn.last["bank_age"] >= 3
    bank_has_ids = bool((info_nce.bank.document_ids != NO_ID).any())
    assert bank_has_ids == has_ids


def test_positives_and_hard_negatives_are_encoded_in_one_pass(model):
    """MultipleNegativesRankingLoss of sentence-transformers does the same."""
    texts_per_pass: list[int] = []

    def record_pass(module: nn.Module, inputs: Any, output: dict[str, Tensor]) -> None:
        texts_per_pass.append(len(output["sentence_embedding"]))

    model.register_forward_hook(record_pass)
    loss_fn = ContAccumLoss(model, bank_size=8, drift_compensation="none")
    loss_fn.train()(features(model, 4, 5), None)
    MultipleNegativesRankingLoss(model).train()(features(model, 4, 5), None)
    assert texts_per_pass == [4, 16, 4, 16]


def test_another_similarity_function_is_refused(model):
    with pytest.raises(ConfigError, match="similarity_fct"):
        ContAccumLoss(model, similarity_fct=euclidean_sim)


@pytest.mark.parametrize("loss_class", [ContAccumLoss, CachedContAccumLoss])
@pytest.mark.parametrize("similarity", ["euclidean", "manhattan"])
def test_a_model_with_another_similarity_is_refused(model, similarity, loss_class):
    loss_fn = loss_class(model)
    model.similarity_fn_name = similarity
    with pytest.raises(ConfigError, match=f"similarity_fn_name.*got '{similarity}'"):
        loss_class(model)
    with pytest.raises(ConfigError, match=f"similarity_fn_name.*got '{similarity}'"):
        loss_fn.model = copy.deepcopy(model)


@pytest.mark.parametrize(
    ("similarity", "own_function", "other_function"),
    [("dot", dot_score, cos_sim), ("cosine", cos_sim, dot_score)],
)
def test_another_similarity_than_that_of_the_model_is_warned_of(
    model, similarity, own_function, other_function, caplog
):
    model.similarity_fn_name = similarity
    ContAccumLoss(model, similarity_fct=own_function)
    normalized = tiny_encoder(normalize=True)
    normalized.similarity_fn_name = similarity
    ContAccumLoss(normalized, similarity_fct=other_function)
    assert not caplog.messages
    ContAccumLoss(model, similarity_fct=other_function)
    assert "set similarity_fct" in caplog.text


@pytest.mark.parametrize("loss_class", [ContAccumLoss, CachedContAccumLoss])
@pytest.mark.parametrize(
    "wrapper", [AdaptiveLayerLoss, partial(Matryoshka2dLoss, matryoshka_dims=[16, 8])]
)
@pytest.mark.filterwarnings("ignore:AdaptiveLayerLoss is not compatible")
def test_losses_that_call_a_loss_once_per_layer_are_refused(model, loss_class, wrapper):
    loss_fn = loss_class(model)
    with pytest.raises(ConfigError, match="use MatryoshkaLoss"):
        wrapper(model, loss_fn)(features(model, 4, 2), None)
    assert loss_fn.info_nce is None


def train(
    loss_fn: ContAccumLoss, optimizer: torch.optim.Optimizer, steps: range
) -> list[tuple[float, int, int]]:
    """Train with an update every two micro-steps.

    Returns:
        Loss, number of updates and number of columns of each micro-step.
    """
    results = []
    for step in steps:
        loss = loss_fn(draw_columns(16, step))
        loss.backward()
        num_updates = loss_fn.info_nce.clock.num_updates
        results.append((loss.item(), num_updates, loss_fn.last["columns"]))
        if step % 2 == 1:
            optimizer.step()
            optimizer.zero_grad()
    return results


@pytest.mark.parametrize("model", [False], indirect=True)
def test_the_encoder_is_probed_after_updates_at_most_every_128_pairs(model, monkeypatch):
    loss_fn = ContAccumLoss(model, bank_size=256)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    probed_steps: list[int] = []
    encode = EncoderProbe.encode

    def record_step_and_encode(self: EncoderProbe, *args: Any) -> Any:
        probed_steps.append(step)
        return encode(self, *args)

    monkeypatch.setattr(EncoderProbe, "encode", record_step_and_encode)
    model.train()
    for step in range(40):  # 16 pairs each
        loss_fn(draw_columns(16, step)).backward()
        if step % 2 == 1 and step != 23:
            optimizer.step()
        optimizer.zero_grad()
    steps_per_probe = MIN_PAIRS_BETWEEN_PROBES // 16
    assert steps_per_probe == 8
    # At step 24 no probe is due, because no optimizer step has been taken at step 23.
    assert probed_steps == [0, 8, 16, 26, 34]
    for module in model.modules():
        assert module.training


def test_probing_uses_no_random_number_and_restores_the_modes_of_modules():
    model = tiny_encoder(tied=False, dropout=0.3, normalize=False).train()
    dropout_modules = [module for module in model.modules() if isinstance(module, nn.Dropout)]
    dropout_modules[0].eval()  # as a user may have chosen
    modes = [module.training for module in model.modules()]
    columns = [
        model.preprocess(sentences(16), task="query"),
        model.preprocess(sentences(16, 1), task="document"),
    ]
    encoder_probe = make_probe(model)
    assert encoder_probe.encode_if_due(columns, None, False)
    random_state = torch.get_rng_state()
    first = encoder_probe.encode(columns)
    second = encoder_probe.encode(columns)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(second[0], first[0])
    assert torch.equal(second[1], first[1])
    model.eval()
    expected = model.encode_query(sentences(16)[:PROBE_PAIRS], convert_to_tensor=True)
    assert first[0].shape == (PROBE_PAIRS, 16)
    assert torch.allclose(first[0], expected, atol=1e-6)
    restored = make_probe(model)
    assert restored.load_state_dict({**encoder_probe.state_dict(), "other": first[0]}).keys() == {
        "other"
    }
    queries, passages = restored.encode(columns)
    assert torch.equal(queries, first[0])
    assert torch.equal(passages, first[1])


def test_the_probe_of_a_matryoshka_model_runs_the_hooks_of_the_model(model):
    """FSDP gathers the weights in a hook before the forward method."""
    columns = [model.preprocess(sentences(16, seed), task="query") for seed in (0, 1)]
    parts = [[copy_first_texts(column, PROBE_PAIRS) for column in columns]]
    decorated = ForwardDecorator(model.forward)
    decorated.set_dim(8)
    model.forward = decorated
    calls = []
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    queries, _ = make_probe(model, parts).encode(columns)
    assert queries.shape == (PROBE_PAIRS, 16)
    assert len(calls) == 2
    assert model.forward is decorated


def test_a_probe_is_not_collected_from_images(model):
    columns = [{"input_ids": torch.ones(9, 1), "pixel_values": torch.ones(9, 2)}] * 2
    encoder_probe = make_probe(model)
    assert not encoder_probe.encode_if_due(columns, None, False)
    assert encoder_probe.parts is None


def test_a_loss_restored_between_two_updates_continues_like_the_original(model):
    loss_fn = ContAccumLoss(model, bank_size=200)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    train(loss_fn, optimizer, range(12))
    state = {key: value.clone() for key, value in loss_fn.bank_state_dict().items()}
    assert loss_fn.bank_state_dict(keep=False) == {}

    copied_model = copy.deepcopy(model)
    restored = ContAccumLoss(copied_model, bank_size=200)
    restored.load_bank_state_dict(state)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    expected = train(loss_fn, optimizer, range(12, 18))
    optimizer = torch.optim.SGD(copied_model.parameters(), lr=0.5)
    assert train(restored, optimizer, range(12, 18)) == expected

    smaller = ContAccumLoss(model, bank_size=100)
    with pytest.raises(ConfigError):
        smaller.load_bank_state_dict(state)


def test_a_restored_state_replaces_banks_that_it_does_not_have(model):
    loss_fn = ContAccumLoss(model, bank_size=64)
    empty_state = loss_fn.bank_state_dict()
    loss_fn(features(model, 4, 2)).backward()
    assert len(loss_fn.bank_state_dict()) > 0
    loss_fn.load_bank_state_dict(empty_state)
    assert loss_fn.info_nce is None
    assert loss_fn.bank_state_dict() == {}


def test_a_probe_of_eight_pairs_is_collected_from_micro_batches_of_one(model):
    """At a learning rate that moves the encoder fast, entries retire as in micro-batches of eight.

    Then only the eight pairs of the current update remain in use.
    """
    in_use = []
    for n in (1, 8):
        encoder = copy.deepcopy(model).double()
        loss_fn = ContAccumLoss(encoder, bank_size=256)
        optimizer = torch.optim.SGD(encoder.parameters(), lr=0.3)
        for update in range(18):
            columns = features(encoder, 8, 2, seed=update)
            for start in range(0, 8, n):
                loss = loss_fn(copy_rows(columns, start, start + n))
                (loss * n / 8).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert loss_fn.info_nce.compensation.probe.embeddings.shape[2] == PROBE_PAIRS
        in_use.append(loss_fn.info_nce.bank.in_use)
    assert in_use == [8, 8]


def test_a_probe_completed_within_the_first_update_moves_and_centres_nothing(model):
    """The encoder has not moved yet; the means of a few pairs would move by sampling noise."""
    num_pairs = PROBE_PAIRS + 4
    columns = features(model.double(), num_pairs, 2)

    def compute_gradient(loss_fn: ContAccumLoss) -> Tensor:
        model.zero_grad()
        for row in range(num_pairs):
            loss_fn(copy_rows(columns, row, row + 1)).backward()
        return torch.cat([gradient.flatten() for gradient in collect_gradients(model)])

    compensated = ContAccumLoss(model, bank_size=64)
    plain = ContAccumLoss(model, bank_size=64, drift_compensation="none")
    gradient = compute_gradient(compensated)
    expected = compute_gradient(plain)
    assert compensated.info_nce.compensation.probe is not None
    assert plain.info_nce.compensation.probe is None
    assert expected.abs().max() > 1e-3
    assert (gradient - expected).abs().max() < 1e-12


def test_a_loss_restored_while_its_probe_is_collected_continues_collecting(model):
    columns = features(model, PROBE_PAIRS, 2)
    uninterrupted = ContAccumLoss(model, bank_size=64)
    interrupted = ContAccumLoss(model, bank_size=64)
    restored = ContAccumLoss(model, bank_size=64)
    for row in range(PROBE_PAIRS):
        uninterrupted(copy_rows(columns, row, row + 1)).backward()
    for row in range(5):
        interrupted(copy_rows(columns, row, row + 1)).backward()
    restored.load_bank_state_dict(interrupted.bank_state_dict())
    for row in range(5, PROBE_PAIRS):
        restored(copy_rows(columns, row, row + 1)).backward()
    assert restored.info_nce.compensation.probe is not None
    assert_equal_states(restored.bank_state_dict(), uninterrupted.bank_state_dict())


def test_texts_that_differ_only_in_case_are_duplicates_although_their_label_ids_differ(model):
    """Ids in labels are hashes of the raw text; tokens of an uncased model are equal."""
    passages = sentences(4, 2)
    upper_case_passages = [passage.upper() for passage in passages]
    first_columns = [
        model.preprocess(sentences(4, 0), task="query"),
        model.preprocess(passages, task="document"),
    ]
    second_columns = [
        model.preprocess(sentences(4, 1), task="query"),
        model.preprocess(upper_case_passages, task="document"),
    ]
    loss_fn = ContAccumLoss(model, bank_size=64)
    label_ids = HASH + torch.arange(8).view(4, 2)
    loss_fn(first_columns, label_ids)
    loss_fn(second_columns, label_ids + 100)
    # Of the 7 negatives of a query, the bank's copy of its positive is masked.
    assert loss_fn.last["masked"].item() == pytest.approx(1 / 7)
