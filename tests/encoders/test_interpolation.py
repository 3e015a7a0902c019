"""Interpolation of weights: exact ends, the formula, towers, adapters, refused models."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from sample_texts import sentences
from sentence_transformers import SentenceTransformer
from tiny_models import bert_config, tiny_encoder, word_tokenizer
from transformers import BertTokenizerFast

from contaccum import DualEncoder
from contaccum.encoders.adapters import add_adapter, merge_adapter
from contaccum.encoders.interpolation import WeightInterpolation, interpolate
from contaccum.encoders.query_tower import add_query_adapter, train_query_tower_alone
from contaccum.errors import ConfigError
from contaccum.retrieval.encode import encoding_identity, model_fingerprint

TEXTS = sentences(5)


def move_weights(model: torch.nn.Module) -> None:
    """Change all weights that can be trained, as training does."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)


def make_tied() -> DualEncoder:
    return tiny_encoder()


def make_two_towers() -> DualEncoder:
    return tiny_encoder(tied=False)


def make_query_side() -> DualEncoder:
    model = tiny_encoder()
    train_query_tower_alone(model)
    return model


def make_adapted() -> DualEncoder:
    model = tiny_encoder()
    add_adapter(model, 2)
    return model


def make_query_adapter() -> DualEncoder:
    model = tiny_encoder()
    add_query_adapter(model, 2)
    return model


@pytest.mark.parametrize(
    "make_trained", [make_tied, make_two_towers, make_query_side, make_adapted, make_query_adapter]
)
def test_weights_0_and_1_are_the_two_models_bit_for_bit(make_trained: Callable[[], DualEncoder]):
    base = tiny_encoder()
    trained = make_trained()
    move_weights(trained)
    expected = copy.deepcopy(trained)
    if make_trained in (make_adapted, make_query_adapter):
        merge_adapter(expected)
    interpolation = WeightInterpolation(base, trained)
    for weight in (0.5, 1.0, 0.3, 0.0, 1.0):  # the order must not matter
        model = interpolation.set_weight(weight)
        if weight == 1.0:
            assert model_fingerprint(model) == model_fingerprint(expected)
        if weight == 0.0:
            for task in ("query", "document"):
                assert model_fingerprint(model, task) == model_fingerprint(base, task)


@pytest.mark.parametrize("weight", [0.1, 0.3, 0.5, 0.9])
def test_each_weight_is_the_weighted_mean_of_both_models(weight):
    base = tiny_encoder(tied=False)
    trained = tiny_encoder(tied=False)
    move_weights(base)
    move_weights(trained)
    trained_state = {name: tensor.clone() for name, tensor in trained.state_dict().items()}
    model = WeightInterpolation(base, trained).set_weight(weight)
    for name, base_tensor in base.state_dict().items():
        expected = (1 - weight) * base_tensor.double() + weight * trained_state[name].double()
        error = (model.state_dict()[name].double() - expected).abs().max()
        assert error <= 1e-7 * expected.abs().max()


def test_bfloat16_weights_are_interpolated_in_float32():
    base = torch.tensor([1.0], dtype=torch.bfloat16)
    trained = torch.tensor([1.0078125], dtype=torch.bfloat16)  # the next number after 1
    assert interpolate(base, trained, 0.7).item() == 1.0078125
    # In bfloat16, 0.7 and 0.3 are rounded, and so are both products.
    rounded = base * torch.tensor(0.3, dtype=torch.bfloat16)
    rounded = rounded + trained * torch.tensor(0.7, dtype=torch.bfloat16)
    assert rounded.item() != 1.0078125


def test_equal_numbers_stay_equal_at_every_weight():
    numbers = torch.randn(10_000)
    other = numbers.clone()
    other[0] += 1
    for weight in (0.1, 0.3, 0.7):
        merged = interpolate(numbers, other, weight)
        assert torch.equal(merged[1:], numbers[1:])


def test_integers_are_those_of_the_trained_model():
    base = torch.tensor([0, 10])
    trained = torch.tensor([1, 20])
    assert interpolate(base, trained, 0.5).tolist() == [1, 20]


@pytest.mark.parametrize("make_trained", [make_query_side, make_query_adapter])
def test_index_of_the_base_stays_valid_if_only_the_query_tower_was_trained(make_trained):
    base = tiny_encoder()
    settings = {"kind": "document", "precision": "float32", "dtype": "float32", "shard_size": 8}
    identity = encoding_identity(base, **settings)
    trained = make_trained()
    move_weights(trained)
    interpolation = WeightInterpolation(base, trained)
    assert interpolation.is_unchanged("document")
    assert not interpolation.is_unchanged("query")
    model = interpolation.set_weight(0.3)
    assert encoding_identity(model, **settings) == identity
    assert model_fingerprint(model, "query") != model_fingerprint(base, "query")


def test_merged_model_is_loaded_by_sentence_transformers(tmp_path):
    trained = make_query_adapter()
    move_weights(trained)
    model = WeightInterpolation(tiny_encoder(), trained).set_weight(0.5)
    model.save_pretrained(str(tmp_path))
    loaded = SentenceTransformer(str(tmp_path), device="cpu")
    assert (loaded.encode_query(TEXTS) == model.encode_query(TEXTS)).all()
    assert (loaded.encode_document(TEXTS) == model.encode_document(TEXTS)).all()


def make_other_vocabulary() -> DualEncoder:
    vocabulary = dict(word_tokenizer().get_vocab())
    vocabulary["cat"], vocabulary["dog"] = vocabulary["dog"], vocabulary["cat"]
    return tiny_encoder(tokenizer=BertTokenizerFast(vocab=vocabulary, model_max_length=64))


def make_bert(num_layers: int, width: int) -> DualEncoder:
    return DualEncoder.from_backbone(
        bert_config(num_layers, width, 16),
        tokenizer=word_tokenizer(),
        pooling="mean",
        normalize=True,
        device="cpu",
    )


@pytest.mark.parametrize(
    ("make_base", "message"),
    [
        (make_two_towers, "the base model has two towers, and the trained model has one"),
        (
            partial(make_bert, 1, 32),
            r"word_embeddings\.weight has the shape \(\d+, 32\) in the base model and",
        ),
        (partial(make_bert, 2, 16), r"the trained model has no weight \S*layer\.1\."),
        (lambda: tiny_encoder(pooling="cls"), "Pooling has pooling_mode=cls in the base model"),
        (lambda: tiny_encoder(normalize=False), "the base model has the modules Transformer, Pool"),
        (make_other_vocabulary, "the tokenizers differ: the token 'cat' has the number"),
    ],
)
def test_base_of_another_architecture_is_refused(make_base, message):
    with pytest.raises(ConfigError, match=message):
        WeightInterpolation(make_base(), tiny_encoder())


@pytest.mark.parametrize("weight", [-0.1, 1.5, float("nan")])
def test_weight_outside_0_and_1_is_refused(weight):
    with pytest.raises(ConfigError, match="must be between 0 and 1"):
        WeightInterpolation(tiny_encoder(), tiny_encoder()).set_weight(weight)
