"""encode_texts equals encode_query and encode_document; read_texts reads what is encoded."""

import numpy as np
import pytest
import torch
from tiny_models import tiny_encoder

from contaccum import DualEncoder
from contaccum.data import RecordReport
from contaccum.data.corpus import read_texts
from contaccum.encoders.settings import set_max_lengths
from contaccum.errors import ConfigError, DataError, UserError
from contaccum.retrieval.encode import (
    encode_texts,
    get_similarity,
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
    """Model with two towers that differ in prompt and maximum length; dropout is on."""
    return tiny_encoder(
        False,
        0.1,
        normalize=False,
        query_prompt="where is: ",
        passage_prompt="the text: ",
        query_max_length=12,
        passage_max_length=40,
    )


@pytest.mark.parametrize("kind", ["query", "document"])
@pytest.mark.parametrize("batch_size", [1, 64])
def test_embeddings_equal_those_of_sentence_transformers(model, kind, batch_size):
    encode = model.encode_query if kind == "query" else model.encode_document
    embeddings = encode_texts(model, TEXTS, kind, batch_size=batch_size)
    assert embeddings.dtype == np.float32
    np.testing.assert_allclose(embeddings, encode(TEXTS), atol=1e-5)


def test_training_mode_and_random_state_are_kept(model):
    """Equal texts get equal embeddings too, although the model's dropout is on."""
    model.train()
    frozen = list(model.modules())[-1]
    frozen.eval()
    rng_state = torch.get_rng_state()
    embeddings = encode_texts(model, [*TEXTS, *TEXTS], batch_size=2)
    assert model.training
    assert model[0].training
    assert not frozen.training
    assert torch.equal(torch.get_rng_state(), rng_state)
    np.testing.assert_array_equal(embeddings[: len(TEXTS)], embeddings[len(TEXTS) :])


def test_nan_embeddings_are_refused_with_the_text(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    with pytest.raises(UserError, match="NaN or infinity for the query 'the dog"):
        encode_texts(model, TEXTS, "query")


def test_an_unknown_similarity_is_refused(model):
    with pytest.raises(ConfigError, match=r"the similarity must be one of .* got 'euclidean'"):
        get_similarity(model, "euclidean")
    model.similarity_fn_name = "manhattan"
    assert get_similarity(model, "cos_sim") == "cos"
    with pytest.raises(ConfigError, match="got 'manhattan'"):
        get_similarity(model)


def test_fingerprints_survive_saving_and_change_with_settings_and_weights(model, tmp_path):
    model.save_pretrained(str(tmp_path / "model"))
    model.encode_document(["a text", "another that is longer"])  # sets padding and truncation
    loaded = DualEncoder.from_pretrained(str(tmp_path / "model"), device="cpu")
    assert model_fingerprint(loaded) == model_fingerprint(model)
    original = tokenisation_fingerprint(model)
    assert tokenisation_fingerprint(loaded) == original

    set_max_lengths(loaded, 11)
    with_other_length = tokenisation_fingerprint(loaded)
    loaded.prompts["query"] = "who is: "
    with_other_prompt = tokenisation_fingerprint(loaded)
    loaded[0].sub_modules["document"][0].tokenizer.add_tokens(["zebra"])
    with_other_tokens = tokenisation_fingerprint(loaded)
    assert len({original, with_other_length, with_other_prompt, with_other_tokens}) == 4

    next(loaded.parameters()).data[0, 0] += 1
    assert model_fingerprint(loaded) != model_fingerprint(model)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("no answers here", "not 2 columns: found 1"),
        ("a\rb\t['x']", "broken quoting"),
        (" \t['x']", "empty question"),
    ],
)
def test_a_question_that_cannot_be_used_is_named_or_skipped(line, reason, tmp_path):
    path = tmp_path / "q.csv"
    path.write_text(f'when\t[\'1947\']\n{line}\n\n"who, ""B""?"\t[\'Ann\']\n', newline="")
    with pytest.raises(DataError, match=rf"q\.csv:2: {reason}"):
        list(read_texts(path, "query", RecordReport()))
    report = RecordReport("skip")
    questions = list(read_texts(path, "query", report))
    assert questions == [("question-1", "", "when"), ("question-2", "", 'who, "B"?')]
    assert report.by_reason == {reason.partition(":")[0]: 1}
