"""encode_texts gives the embeddings of encode_query and encode_document, and leaves the model as it was."""

import numpy as np
import pytest
import torch
from tiny_models import tiny_encoder

from contaccum import DualEncoder
from contaccum.encoders.settings import set_max_lengths
from contaccum.errors import ConfigError, UserError
from contaccum.retrieval.encode import (
    encode_texts,
    get_metric,
    model_fingerprint,
    tokenisation_fingerprint,
)

TEXTS = [
    "red cat",
    "",
    "the dog sits under the old tree near the river " * 9,
    "cat",
    "moon?",
    "the bird flies",
] + ["stone " * length for length in range(1, 60, 3)]


@pytest.fixture
def model() -> DualEncoder:
    """Towers, prompts and lengths of their own; dropout on."""
    lengths = {"query_max_length": 12, "passage_max_length": 40}
    return tiny_encoder(
        False,
        0.1,
        normalize=False,
        query_prompt="where is: ",
        passage_prompt="the text: ",
        **lengths,
    )


@pytest.mark.parametrize("kind", ["query", "document"])
@pytest.mark.parametrize("batch_size", [1, 64])
def test_embeddings_equal_those_of_sentence_transformers(model, kind, batch_size):
    expected = (model.encode_query if kind == "query" else model.encode_document)(TEXTS)
    found = encode_texts(model, TEXTS, kind, batch_size=batch_size)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_a_model_in_training_stays_in_training_and_equal_texts_get_equal_embeddings(model):
    model.train()
    before = torch.get_rng_state()
    found = encode_texts(model, [*TEXTS, *TEXTS], batch_size=2)
    assert model.training and model[0].training and torch.equal(torch.get_rng_state(), before)
    np.testing.assert_array_equal(found[: len(TEXTS)], found[len(TEXTS) :])


def test_a_broken_model_is_reported_not_searched(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    with pytest.raises(UserError, match="NaN or infinity for the query 'red cat'"):
        encode_texts(model, TEXTS, "query")


def test_settings_out_of_range_are_refused(model):
    with pytest.raises(ConfigError, match="fp16"):
        encode_texts(model, TEXTS, precision="fp16")
    with pytest.raises(ConfigError, match=r"the similarity must be one of .* got 'euclidean'"):
        get_metric(model, "euclidean")
    model.similarity_fn_name = "manhattan"
    assert get_metric(model, "cos_sim") == "cos"
    with pytest.raises(ConfigError, match="got 'manhattan'"):
        get_metric(model)


def test_weights_and_tokenisation_identify_a_model_saved_or_not(model, tmp_path):
    model.save_pretrained(str(tmp_path / "model"))
    model.encode_document(["a text", "another that is longer"])  # which sets padding and truncation
    other = DualEncoder.from_pretrained(str(tmp_path / "model"), device="cpu")
    found = [tokenisation_fingerprint(one) for one in (model, other)]
    assert model_fingerprint(other) == model_fingerprint(model) and found[0] == found[1]
    set_max_lengths(other, 11)
    found.append(tokenisation_fingerprint(other))
    other.prompts["query"] = "who is: "
    found.append(tokenisation_fingerprint(other))
    other[0].sub_modules["document"][0].tokenizer.add_tokens(["zebra"])
    found.append(tokenisation_fingerprint(other))
    assert len(set(found)) == 4
    next(other.parameters()).data[0, 0] += 1
    assert model_fingerprint(other) != model_fingerprint(model)
