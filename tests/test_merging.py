"""Linear merge of two models: exact ends, the mean, towers, adapters, refusals."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from tiny_models import bert_config, tiny_encoder, word_tokenizer
from transformers import BertTokenizerFast

from contaccum import DualEncoder
from contaccum.encoders.adapters import add_adapter, merge_adapter
from contaccum.encoders.dual_encoder import add_query_adapter, train_query_tower_alone
from contaccum.errors import ConfigError
from contaccum.merging import merge_models
from contaccum.retrieval.encode import encoding_identity, model_fingerprint


def move_weights(model: torch.nn.Module) -> None:
    """Change all weights that can be trained, as training does."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)


def make_changed(change: Callable[..., object], *arguments: int) -> DualEncoder:
    model = tiny_encoder()
    change(model, *arguments)
    return model


make_two_towers = partial(tiny_encoder, tied=False)
make_query_side = partial(make_changed, train_query_tower_alone)
make_adapted = partial(make_changed, add_adapter, 2)
make_query_adapter = partial(make_changed, add_query_adapter, 2)


@pytest.mark.parametrize(
    "make_trained",
    [tiny_encoder, make_two_towers, make_query_side, make_adapted, make_query_adapter],
)
def test_weights_0_and_1_are_the_two_models_bit_for_bit(make_trained: Callable[[], DualEncoder]):
    base = tiny_encoder()
    trained = make_trained()
    move_weights(trained)
    trained_before = model_fingerprint(trained)
    expected = copy.deepcopy(trained)
    if make_trained in (make_adapted, make_query_adapter):
        merge_adapter(expected)
    for weight in (0.5, 1.0, 0.3, 0.0, 1.0):  # the order must not matter
        model = merge_models(base, trained, weight)
        if weight == 1.0:
            assert model_fingerprint(model) == model_fingerprint(expected)
        if weight == 0.0:
            for task in ("query", "document"):
                assert model_fingerprint(model, task) == model_fingerprint(tiny_encoder(), task)
    assert model_fingerprint(trained) == trained_before


@pytest.mark.parametrize("weight", [0.1, 0.3, 0.5, 0.9])
def test_each_weight_is_the_weighted_mean_of_both_models(weight):
    base = tiny_encoder(tied=False)
    trained = tiny_encoder(tied=False)
    move_weights(base)
    move_weights(trained)
    model = merge_models(base, trained, weight)
    for name, base_tensor in base.state_dict().items():
        trained_tensor = trained.state_dict()[name]
        expected = (1 - weight) * base_tensor.double() + weight * trained_tensor.double()
        error = (model.state_dict()[name].double() - expected).abs().max()
        assert error <= 1e-7 * expected.abs().max()


def test_bfloat16_weights_are_merged_in_float32():
    base = tiny_encoder().bfloat16()
    trained = copy.deepcopy(base)
    move_weights(trained)
    model = merge_models(base, trained, 0.7)
    for name, tensor in model.named_parameters():
        base_tensor = base.get_parameter(name).float()
        trained_tensor = trained.get_parameter(name).float()
        expected = torch.lerp(base_tensor, trained_tensor, 0.7).bfloat16()
        assert torch.equal(tensor, expected)


@pytest.mark.parametrize("make_trained", [make_query_side, make_query_adapter])
def test_index_of_the_base_stays_valid_if_only_the_query_tower_was_trained(make_trained):
    base = tiny_encoder()
    settings = {"precision": "float32", "dtype": "float32", "shard_size": 8}
    identity = encoding_identity(base, **settings)
    trained = make_trained()
    move_weights(trained)
    model = merge_models(base, trained, 0.3)
    assert encoding_identity(model, **settings) == identity
    assert model_fingerprint(model, "query") != model_fingerprint(base, "query")


def make_other_vocabulary() -> DualEncoder:
    vocabulary = dict(word_tokenizer().get_vocab())
    vocabulary["cat"], vocabulary["dog"] = vocabulary["dog"], vocabulary["cat"]
    return tiny_encoder(tokenizer=BertTokenizerFast(vocab=vocabulary, model_max_length=64))


@pytest.mark.parametrize(
    ("make_base", "message"),
    [
        (make_two_towers, "only the base model has two towers"),
        (lambda: tiny_encoder(config=bert_config(1, 32, 16)), "shape of "),
        (lambda: tiny_encoder(config=bert_config(2, 16, 16)), r"shape of .*layer\.1\."),
        (lambda: tiny_encoder(normalize=False), "modules"),
        (make_other_vocabulary, "vocabulary"),
    ],
)
def test_base_of_another_architecture_is_refused(make_base, message):
    with pytest.raises(ConfigError, match=message):
        merge_models(make_base(), tiny_encoder(), 0.5)
