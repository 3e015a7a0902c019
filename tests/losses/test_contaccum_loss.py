"""ContAccumLoss inside sentence-transformers: a drop-in that notices updates, probes and resumes by itself."""

import copy
import dataclasses
import inspect
from typing import Any

import pytest
import torch
from sample_texts import features, sentences
from sentence_transformers.sentence_transformer.losses import (
    MatryoshkaLoss,
    MultipleNegativesRankingLoss,
)
from sentence_transformers.sentence_transformer.losses.matryoshka import shrink
from sentence_transformers.util import cos_sim, dot_score, euclidean_sim
from tiny_models import tiny_encoder
from torch import nn

from contaccum import BankedInfoNCE, CachedContAccumLoss, ContAccumLoss, DualEncoder
from contaccum.bank.logits import NO_ID
from contaccum.errors import ConfigError
from contaccum.losses import bank_states, banked_text_loss, probe
from contaccum.losses.probe import PAIRS_PER_PROBE, PROBE_TEXTS, TextProbe
from contaccum.losses.text_ids import content_ids, copy_first_texts


@pytest.fixture
def model(request: pytest.FixtureRequest) -> DualEncoder:
    return tiny_encoder(tied=getattr(request, "param", True), normalize=False)


@pytest.mark.parametrize("columns", [2, 3, 5], ids=["pairs", "triplets", "n-tuples"])
@pytest.mark.parametrize(("similarity", "scale"), [(cos_sim, 20.0), (dot_score, 1.0)])
@pytest.mark.parametrize("model", [True, False], indirect=True, ids=["tied", "router"])
def test_without_a_bank_it_is_multiple_negatives_ranking_loss(model, similarity, scale, columns):
    results = []
    model.double()  # gradients of float32 differ in the last digits by the order of sums alone
    for make in (ContAccumLoss, MultipleNegativesRankingLoss):
        kwargs = {"bank_size": 0} if make is ContAccumLoss else {}
        loss_fn = make(model, scale=scale, similarity_fct=similarity, **kwargs).train()
        model.zero_grad()
        loss = loss_fn(features(model, 6, columns), None)
        loss.backward()
        results.append(
            (loss.item(), [p.grad.clone() for p in model.parameters() if p.grad is not None])
        )
    (ours, our_grads), (theirs, their_grads) = results
    assert ours == pytest.approx(theirs, abs=1e-12)
    assert len(our_grads) == len(their_grads) > 0
    assert (
        max((a - b).abs().max().item() for a, b in zip(our_grads, their_grads, strict=True)) < 1e-12
    )


def test_matryoshka_has_a_bank_and_a_probe_for_each_dimension_as_losses_of_their_own_would(model):
    other = copy.deepcopy(model.double())
    loss_fn, dims = ContAccumLoss(model, bank_size=40), (16, 8, 4)
    wrapped = MatryoshkaLoss(model, loss_fn, [*dims])
    singles = [ContAccumLoss(other, bank_size=40, similarity_fct=cos_sim) for _ in dims]
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.3) for each in (model, other)]
    forward = other.forward
    for step in range(24):
        columns = features(model, 10, 2, seed=step % 5)
        wrapped(columns, None).backward()
        for dim, single in zip(dims, singles, strict=True):
            other.forward = lambda x, dim=dim: {
                "sentence_embedding": shrink(forward(x)["sentence_embedding"], dim)
            }
            single(columns, None).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert loss_fn.info_nce is loss_fn.info_nces["16"] and {*loss_fn.info_nces} == {"16", "8", "4"}
    for dim, single in zip(dims, singles, strict=True):
        ours, theirs = loss_fn.info_nces[str(dim)], single.info_nce
        assert (ours.bank.fill, ours.clock.num_updates) == (40, 23)
        assert ours.compensation.age_limit == theirs.compensation.age_limit
        our_probe, their_probe = ours.compensation.probe, theirs.compensation.probe
        assert our_probe.pairs == their_probe.pairs and len(our_probe.pairs) == 2
        assert torch.allclose(our_probe.embeddings, their_probe.embeddings, atol=1e-9)
    assert all(
        torch.allclose(a, b, atol=1e-9)
        for a, b in zip(model.parameters(), other.parameters(), strict=True)
    )


@pytest.mark.parametrize("mode", [False, True])
@pytest.mark.parametrize("make", [ContAccumLoss, CachedContAccumLoss])
def test_evaluation_is_the_loss_of_the_batch_alone(model, make, mode):
    loss_fn = make(model, bank_size=6)
    loss_fn(features(model, 4, 2, seed=1), None)
    loss_fn.train(mode)  # trainers leave a loss in training mode
    model.eval()
    with torch.no_grad():
        ours = loss_fn(features(model, 4, 2), None)
        theirs = MultipleNegativesRankingLoss(model)(features(model, 4, 2), None)
    assert ours.item() == pytest.approx(theirs.item(), abs=1e-6)
    assert loss_fn.info_nce.bank.fill == 4


def test_ids_in_labels_and_positives_known_beforehand_decide_what_is_masked(model):
    """A query's other positive, which no pair of batch or bank shows, is no negative of it: in both."""
    texts = features(model, 4, 2)
    ids = torch.tensor([[1, 101], [2, 102], [3, 103], [4, 104]])
    losses = {}
    for name, labels, known in (
        ("tokens", None, False),
        ("scores", torch.rand(4), False),
        ("ids", ids, False),
        ("other ids", ids + 1000, True),
        ("known", ids, True),
    ):
        loss_fn = ContAccumLoss(model, bank_size=8, drift_compensation="none").train()
        if known:
            loss_fn.set_known_positives(torch.tensor([9, 1]), torch.tensor([9, 102]))
        losses[name] = [loss_fn(texts, labels).item() for _ in range(2)]
    assert losses["ids"] == losses["tokens"] == losses["scores"] == losses["other ids"]
    queries, passages = (model(column)["sentence_embedding"] for column in texts)
    scores = 20 * cos_sim(queries, passages)
    scores[0, 1] = -torch.inf
    alone = torch.nn.functional.cross_entropy(scores, torch.arange(4)).item()
    assert (
        losses["known"][0] == pytest.approx(alone, rel=1e-5)
        and losses["known"][0] < losses["ids"][0]
    )
    # Again: each row has a twin in the bank, and each negative too; one's own positive there is masked.
    doubled = scores + torch.log(2 - torch.eye(4))
    twice = 2 * torch.nn.functional.cross_entropy(doubled, torch.arange(4)).item()
    assert losses["known"][1] == pytest.approx(twice, rel=1e-5)


@pytest.mark.parametrize("with_ids", [True, False])
def test_inside_another_loss_updates_are_counted_and_what_is_off_is_said_once(
    model, with_ids, caplog
):
    """As sentence-transformers' documentation shows: two losses over embeddings that are made once."""
    loss_fn = ContAccumLoss(model.train(), bank_size=64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(10):
        columns = ids_of(16, step % 3)
        ids = {"ids": [content_ids(column) for column in columns]} if with_ids else {}
        embeddings = [model(column)["sentence_embedding"] for column in columns]
        distance = (embeddings[0] - embeddings[1]).square().sum(1).mean()
        (distance + loss_fn.compute_loss_from_embeddings(embeddings, None, **ids)).backward()
        optimizer.step()
        optimizer.zero_grad()
    loss_fn.info_nce.end_pending_update()
    assert loss_fn.info_nce.clock.num_updates == 10 and loss_fn.info_nce.bank_age >= 4
    assert bool((loss_fn.info_nce.bank.document_ids != NO_ID).any()) == with_ids
    said = [record.message.split(",")[0] for record in caplog.records]
    assert said == ([] if with_ids else ["duplicates are not masked"]) + [
        "old bank entries are not retired"
    ]


def test_positives_and_hard_negatives_are_encoded_in_one_pass_as_by_sentence_transformers(model):
    passes: list[int] = []
    model.register_forward_hook(
        lambda module, inputs, output: passes.append(len(output["sentence_embedding"]))
    )
    for loss_fn in (
        ContAccumLoss(model, bank_size=8, drift_compensation="none"),
        MultipleNegativesRankingLoss(model),
    ):
        loss_fn.train()(features(model, 4, 5), None)
    assert passes == [4, 16] * 2


def test_every_setting_of_the_loss_passes_through_under_its_own_name(model):
    """Most of them are given by the trainer's own test: tests/training/test_arguments.py."""
    given = {"normalize_by": "all", "pairs_per_update": 12}
    loss_fn = ContAccumLoss(model, 4, 5.0, dot_score, True, **given)
    expected = {
        "bank_size": 4,
        "temperature": 0.2,
        "similarity": "dot",
        "gather_across_devices": True,
        **given,
    }
    assert expected.items() <= dataclasses.asdict(loss_fn.settings).items()
    config = loss_fn.get_config_dict()
    assert [config[key] for key in ("scale", "similarity_fct", "normalize_by")] == [
        5.0,
        "dot_score",
        "all",
    ]
    assert "2406.12356" in loss_fn.citation


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"similarity_fct": euclidean_sim}, ConfigError),
        ({"scale": 0}, ConfigError),
        ({"bank_size": -1}, ConfigError),
        ({"bank_sise": 4}, TypeError),
    ],
)
def test_settings_that_cannot_work_are_refused_at_once(settings, error, model):
    with pytest.raises(error, match=next(iter(settings))):
        ContAccumLoss(model, **settings)


def ids_of(n: int, seed: int) -> list[dict[str, Any]]:
    ids = torch.randint(5, 60, (2, n, 7), generator=torch.Generator().manual_seed(seed))
    return [
        {"input_ids": ids[i], "attention_mask": torch.ones_like(ids[i]), "task": task}
        for i, task in enumerate(("query", "document"))
    ]


def train(
    loss_fn: ContAccumLoss, optimizer: torch.optim.Optimizer, steps: range
) -> list[tuple[float, int, int]]:
    """An update every two micro-steps; loss, updates seen and columns of each micro-step."""
    found = []
    for step in steps:
        loss = loss_fn(ids_of(16, step))
        loss.backward()
        found.append((loss.item(), loss_fn.info_nce.clock.num_updates, loss_fn.last["columns"]))
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    return found


@pytest.mark.parametrize("model", [False], indirect=True)
def test_the_encoder_is_probed_after_updates_at_most_every_128_pairs(model, monkeypatch):
    loss_fn = ContAccumLoss(model, bank_size=256)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    probed: list[int] = []
    encode = TextProbe.encode

    def counting(self: TextProbe, *args: Any) -> Any:
        probed.append(step)
        return encode(self, *args)

    monkeypatch.setattr(TextProbe, "encode", counting)
    model.train()
    for step in range(40):  # 16 pairs each
        loss_fn(ids_of(16, step)).backward()
        if step % 2 == 1 and step != 23:
            optimizer.step()
        optimizer.zero_grad()
    gap = PAIRS_PER_PROBE // 16
    assert probed == [
        0,
        gap,
        2 * gap,
        3 * gap + 2,
        4 * gap + 2,
    ]  # none was due at 24: nothing had stepped
    assert all(module.training for module in model.modules())


def test_probing_uses_no_random_number_and_leaves_modes_as_they_were():
    model = tiny_encoder(tied=False, dropout=0.3, normalize=False).train()
    next(m for m in model.modules() if isinstance(m, nn.Dropout)).eval()  # someone's choice
    modes = [module.training for module in model.modules()]
    features = (
        model.preprocess(sentences(16), task="query"),
        model.preprocess(sentences(16, 1), task="document"),
    )
    probe = TextProbe(shared=False)
    assert probe.collect(list(features)) and probe.is_complete
    state = torch.get_rng_state()
    first, second = (probe.encode(model, features) for _ in range(2))
    assert torch.equal(state, torch.get_rng_state())
    assert modes == [module.training for module in model.modules()]
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    model.eval()
    expected = model.encode_query(sentences(16)[:PROBE_TEXTS], convert_to_tensor=True)
    assert first[0].shape == (PROBE_TEXTS, 16) and torch.allclose(first[0], expected, atol=1e-6)
    again = TextProbe.from_state_dict(probe.state_dict(), shared=False)
    assert all(torch.equal(a, b) for a, b in zip(first, again.encode(model, features), strict=True))
    flat = [{"input_ids": torch.arange(9)}, {"input_ids": torch.arange(9)}]
    assert not TextProbe(shared=False).collect(flat)


def test_ranks_that_share_a_bank_encode_the_same_probe_in_shares(model, monkeypatch):
    given = [
        [model.preprocess(sentences(n, 10 * n + i, 4 + n)) for i in range(2)] for n in (5, 3, 1)
    ]
    monkeypatch.setattr(probe, "world_size", lambda: 3)
    gathered = iter([[copy_first_texts(features[i], 3) for features in given] for i in range(2)])
    monkeypatch.setattr(probe, "gather_states", lambda own, device: next(gathered))
    texts = TextProbe(shared=True)
    assert texts.collect(given[1]) and not texts.is_complete
    whole = TextProbe(shared=False, parts=texts.parts).encode(model, given[1])
    alone = [model.eval()(dict(given[1][i]))["sentence_embedding"] for i in range(2)]
    assert [len(x) for x in whole] == [7, 7]  # 3 of 5, 3 of 3, 1 of 1
    assert all(torch.allclose(w[3:6], a, atol=1e-6) for w, a in zip(whole, alone, strict=True))
    for ranks in (2, 3, 8):
        monkeypatch.setattr(probe, "world_size", lambda ranks=ranks: ranks)
        shares = []
        for own in range(ranks):
            monkeypatch.setattr(probe, "rank", lambda own=own: own)
            shares.append(texts.encode(model, given[0]))
        joined = [torch.cat(column) for column in zip(*shares, strict=True)]
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(joined, whole, strict=True))


@pytest.mark.parametrize("drift", ["auto", "fresh"])
def test_a_loss_restored_between_two_updates_goes_on_as_if_nothing_had_happened(model, drift):
    """Restored after the optimizer's step, which the next micro-step has yet to notice."""
    settings = {"bank_size": 200, "drift_compensation": drift}
    loss_fn = ContAccumLoss(model, **settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    train(loss_fn, optimizer, range(12))
    state = {key: value.clone() for key, value in loss_fn.bank_state_dict().items()}
    assert all(isinstance(value, torch.Tensor) for value in state.values())
    assert loss_fn.bank_state_dict(keep=False) == {}
    other = copy.deepcopy(model)
    copied = ContAccumLoss(other, **settings)
    copied.load_bank_state_dict(state)
    found = []
    for each, encoder in ((loss_fn, model), (copied, other)):
        optimizer = torch.optim.SGD(encoder.parameters(), lr=0.5)
        found.append(train(each, optimizer, range(12, 18)))
    assert found[0] == found[1]
    with pytest.raises(ConfigError):
        ContAccumLoss(model, bank_size=100, drift_compensation=drift).load_bank_state_dict(state)


def test_banks_of_each_rank_s_own_go_into_one_state_and_back(model, monkeypatch):
    ranks = [ContAccumLoss(model, bank_size=8) for _ in range(2)]
    for seed, loss_fn in enumerate(ranks):
        loss_fn(ids_of(4, seed))
    own = [loss_fn.bank_state_dict() for loss_fn in ranks]
    for module in (banked_text_loss, bank_states):
        monkeypatch.setattr(module, "world_size", lambda: 2)
    monkeypatch.setattr(bank_states, "gather_states", lambda state, device: own)
    state = ranks[0].bank_state_dict()
    assert ranks[1].bank_state_dict(keep=False) == {}
    for index in range(2):
        monkeypatch.setattr(bank_states, "rank", lambda index=index: index)
        restored = ContAccumLoss(model, bank_size=8)
        restored.load_bank_state_dict(state)
        monkeypatch.setattr(bank_states, "gather_states", lambda state, device: [state])
        again = {
            key.removeprefix("of_rank_0."): value
            for key, value in restored.bank_state_dict().items()
        }
        assert again.keys() == own[index].keys()
        assert all(torch.equal(value, own[index][key]) for key, value in again.items())
    for world, shared in ((3, False), (2, True)):
        for module in (banked_text_loss, bank_states):
            monkeypatch.setattr(module, "world_size", lambda world=world: world)
        with pytest.raises(ConfigError, match="banks of 2 ranks"):
            ContAccumLoss(model, bank_size=8, gather_across_devices=shared).load_bank_state_dict(
                state
            )


def rows_of(columns: list[dict[str, Any]], start: int, end: int) -> list[dict[str, Any]]:
    """Copies of some rows of a micro-batch."""
    parts = []
    for column in columns:
        parts.append(
            {key: x[start:end].clone() if torch.is_tensor(x) else x for key, x in column.items()}
        )
    return parts


@pytest.mark.parametrize("make", [ContAccumLoss, CachedContAccumLoss])
def test_a_probe_of_eight_pairs_is_collected_from_micro_batches_of_one(model, make):
    """At a rate that moves the encoder fast, entries retire as with micro-batches of eight."""
    in_use = []
    for n in (1, 8):
        encoder = copy.deepcopy(model).double()
        loss_fn = make(encoder, bank_size=256)
        optimizer = torch.optim.SGD(encoder.parameters(), lr=0.3)
        for update in range(20):
            columns = features(encoder, 8, 2, seed=update)
            for start in range(0, 8, n):
                (loss_fn(rows_of(columns, start, start + n)) * n / 8).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert loss_fn.info_nce.compensation.probe.embeddings.shape[2] == PROBE_TEXTS
        in_use.append(loss_fn.info_nce.bank.in_use)
    assert in_use == [8, 8]


def test_within_the_first_update_nothing_is_moved_or_centred_though_the_probe_is_completed_in_it(
    model,
):
    """Neither the means, which the sampling noise of a few pairs would move, nor centring may begin within it."""
    columns = features(model.double(), PROBE_TEXTS + 4, 2)
    gradients = []
    for settings in ({}, {"drift_compensation": "none", "center_gradients": "none"}):
        loss_fn = ContAccumLoss(model, bank_size=64, **settings)
        model.zero_grad()
        for start in range(PROBE_TEXTS + 4):
            loss_fn(rows_of(columns, start, start + 1)).backward()
        assert (loss_fn.info_nce.compensation.probe is not None) == (not settings)
        gradients.append(
            torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        )
    assert gradients[1].abs().max() > 1e-3
    assert (gradients[0] - gradients[1]).abs().max() < 1e-12


def test_a_loss_restored_while_its_probe_is_collected_goes_on_collecting(model):
    columns = features(model, PROBE_TEXTS, 2)
    straight, first, restored = (ContAccumLoss(model, bank_size=64) for _ in range(3))
    for start in range(PROBE_TEXTS):
        straight(rows_of(columns, start, start + 1)).backward()
        later = first if start < 5 else restored
        if start == 5:
            restored.load_bank_state_dict(first.bank_state_dict())
        later(rows_of(columns, start, start + 1)).backward()
    expected, state = straight.bank_state_dict(), restored.bank_state_dict()
    assert restored.info_nce.compensation.probe is not None
    assert expected.keys() == state.keys()
    assert all(torch.equal(expected[key], state[key]) for key in expected)


def test_a_probe_of_one_pair_is_refused():
    with pytest.raises(ValueError, match="a probe of one pair has no spread"):
        BankedInfoNCE(16).observe_probe(torch.randn(1, 8), torch.randn(1, 8))


def test_texts_that_differ_in_case_alone_stay_duplicates_beside_ids_of_the_data_set(model):
    """Ids in labels are hashes of the raw text; tokens of an uncased model are equal."""
    queries, others, passages = (sentences(4, seed) for seed in range(3))
    upper_case = [passage.upper() for passage in passages]
    columns = [model.preprocess(queries, task="query"), model.preprocess(passages, task="document")]
    again = [model.preprocess(others, task="query"), model.preprocess(upper_case, task="document")]
    loss_fn = ContAccumLoss(model, bank_size=64)
    label = torch.arange(8).view(4, 2)
    loss_fn(columns, label)
    loss_fn(again, label + 100)
    assert loss_fn.last["masked"].item() == pytest.approx(1 / 7)


@pytest.mark.parametrize("loss_class", [ContAccumLoss, CachedContAccumLoss])
def test_the_signature_names_every_setting_with_the_default_of_the_bank(loss_class):
    signature = inspect.signature(loss_class).parameters
    settings = inspect.signature(BankedInfoNCE).parameters
    renamed = {"temperature", "similarity"}  # scale and similarity_fct here
    assert settings.keys() - renamed <= signature.keys()
    for name in settings.keys() - renamed:
        assert signature[name].default == settings[name].default
    assert all(x.kind is not inspect.Parameter.VAR_KEYWORD for x in signature.values())
