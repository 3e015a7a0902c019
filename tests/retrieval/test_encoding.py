"""encode_texts gives the embeddings of encode_query and encode_document, whatever the batching."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer

from contaccum import DualEncoder
from contaccum.errors import ConfigError, UserError
from contaccum.retrieval import encoding
from contaccum.retrieval.encoding import document_text, encode_corpus, encode_queries, encode_texts

TEXTS = ["red cat", "", "the dog sits under the old tree near the river " * 9, "cat", "moon?", "the bird flies"] + [
    "stone " * length for length in range(1, 60, 3)
]


def build(tiny_config, tiny_tokenizer, **kwargs) -> DualEncoder:
    settings = {"pooling": "mean", "query_max_length": 12, "passage_max_length": 40, "device": "cpu", **kwargs}
    return DualEncoder.from_backbone(tiny_config, tokenizer=tiny_tokenizer, **settings)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"tied": False, "pooling": "cls"},
        {"query_prompt": "where is: ", "passage_prompt": "the text: ", "normalize": True},
        {"pooling": "lasttoken"},
    ],
)
@pytest.mark.parametrize("kind", ["query", "document"])
@pytest.mark.parametrize("batch_size", [1, 3, 64])
def test_embeddings_equal_those_of_sentence_transformers(tiny_config, tiny_tokenizer, settings, kind, batch_size):
    model = build(tiny_config, tiny_tokenizer, **settings)
    expected = (model.encode_query if kind == "query" else model.encode_document)(TEXTS)
    found = encode_texts(model, TEXTS, kind, batch_size=batch_size, show_progress=False)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_the_two_kinds_differ_where_prompt_length_or_tower_do(tiny_config, tiny_tokenizer):
    for settings in ({"query_prompt": "who: "}, {"query_max_length": 5}):
        model = build(tiny_config, tiny_tokenizer, **settings)
        text = ["the dog sits under the old tree near the river"]
        query, document = (encode_texts(model, text, kind, show_progress=False) for kind in ("query", "document"))
        assert np.abs(query - document).max() > 1e-3


def test_default_prompt_and_excluded_prompt_are_respected(tiny_config, tiny_tokenizer):
    model = build(tiny_config, tiny_tokenizer)
    model.prompts, model.default_prompt_name = {"all": "one two: "}, "all"
    model.set_pooling_include_prompt(False)
    np.testing.assert_allclose(
        encode_texts(model, TEXTS, "document", show_progress=False), model.encode_document(TEXTS), atol=1e-5
    )


def test_windows_do_not_mix_up_rows(tiny_config, tiny_tokenizer, monkeypatch):
    model = build(tiny_config, tiny_tokenizer)
    whole = encode_texts(model, TEXTS, show_progress=False)
    monkeypatch.setattr(encoding, "_WINDOW_TEXTS", 4)
    np.testing.assert_allclose(encode_texts(model, TEXTS, show_progress=False), whole, atol=1e-5)


def test_threads_change_no_embedding_and_no_setting(tiny_config, tiny_tokenizer, monkeypatch):
    model = build(tiny_config, tiny_tokenizer)
    used = []
    model[0].register_forward_pre_hook(lambda *_: used.append(threading.get_ident()))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        found = encode_texts(model, TEXTS, batch_size=4, show_progress=False)
        assert torch.get_num_threads() == 3 and threading.get_ident() not in used
        monkeypatch.setattr(encoding, "_may_run_in_threads", lambda model: False)
        used.clear()
        alone = encode_texts(model, TEXTS, batch_size=4, show_progress=False)
        assert set(used) == {threading.get_ident()}
    finally:
        torch.set_num_threads(before)
    np.testing.assert_allclose(found, alone, atol=1e-6)


def test_left_padding_is_cut_on_the_left(tiny_config, tiny_tokenizer):
    import copy

    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.padding_side = "left"
    model = build(tiny_config, tokenizer, pooling="lasttoken")
    # The position of a left-padded token depends on its batch, for sentence-transformers as for us: alone is exact.
    expected = np.concatenate([model.encode_document([text]) for text in TEXTS])
    np.testing.assert_allclose(encode_texts(model, TEXTS, batch_size=1, show_progress=False)[2], expected[2], atol=1e-5)
    lengths = []
    model[0].register_forward_pre_hook(lambda _, args: lengths.append(args[0]["attention_mask"]))
    encode_texts(model, ["cat", "moon", "stone " * 30], batch_size=1, show_progress=False)
    assert all(mask[:, -1].all() and mask[:, 0].any() for mask in lengths)


def test_batches_hold_little_padding(tiny_config, tiny_tokenizer):
    model = build(tiny_config, tiny_tokenizer)
    masks = []
    model[0].register_forward_pre_hook(lambda _, args: masks.append(args[0]["attention_mask"]))
    texts = [f"{'stone ' * (1 + number % 36)}{number}" for number in range(720)]
    encode_texts(model, texts, batch_size=16, show_progress=False)
    padded = sum(mask.numel() for mask in masks)
    assert sum(int(mask.sum()) for mask in masks) / padded > 0.9
    assert max(mask.numel() for mask in masks) <= 16 * 40


def test_equal_texts_get_equal_embeddings_to_the_last_bit(tiny_config, tiny_tokenizer):
    model = build(tiny_config, tiny_tokenizer)
    found = encode_texts(model, [*TEXTS, *TEXTS], batch_size=2, show_progress=False)
    np.testing.assert_array_equal(found[: len(TEXTS)], found[len(TEXTS) :])


def test_a_model_in_training_stays_in_training(tiny_config, tiny_tokenizer):
    model = build(tiny_config, tiny_tokenizer)
    model.train()
    first, second = (encode_texts(model, TEXTS, show_progress=False) for _ in range(2))
    assert model.training and model[0].training
    np.testing.assert_array_equal(first, second)


def test_truncated_dimensions_are_those_of_the_model(tiny_config, tiny_tokenizer):
    model = build(tiny_config, tiny_tokenizer)
    model.truncate_dim = 8
    assert encode_texts(model, TEXTS, show_progress=False).shape == (len(TEXTS), 8)
    np.testing.assert_allclose(encode_texts(model, TEXTS, show_progress=False), model.encode_document(TEXTS), atol=1e-5)


def test_autocast_is_close_but_not_equal(tiny_config, tiny_tokenizer):
    model = build(tiny_config, tiny_tokenizer, normalize=True)
    exact = encode_texts(model, TEXTS, show_progress=False)
    rounded = encode_texts(model, TEXTS, autocast_dtype="bfloat16", show_progress=False)
    assert 0 < np.abs(exact - rounded).max() < 0.05


def test_a_model_with_its_own_encode_is_encoded_by_it(tiny_config, tiny_tokenizer):
    class Constant(DualEncoder):
        def encode(self, inputs, **kwargs):
            return np.full((len(inputs), 3), 7.0)

    model = build(tiny_config, tiny_tokenizer)
    model.__class__ = Constant
    assert encode_texts(model, TEXTS, show_progress=False).tolist() == [[7.0] * 3] * len(TEXTS)


def test_a_model_without_a_transformer_is_encoded_by_sentence_transformers():
    from sentence_transformers.sentence_transformer.modules import BoW

    model = SentenceTransformer(modules=[BoW(vocab=["cat", "dog"])], device="cpu")
    found = encode_texts(model, ["cat dog cat", "dog"], show_progress=False)
    np.testing.assert_allclose(found, model.encode_document(["cat dog cat", "dog"]))


def test_nothing_to_encode_is_an_empty_matrix(tiny_config, tiny_tokenizer):
    assert encode_texts(build(tiny_config, tiny_tokenizer), [], show_progress=False).shape == (0, 32)


def test_a_broken_model_is_reported_not_searched(tiny_config, tiny_tokenizer):
    model = build(tiny_config, tiny_tokenizer)
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))
    with pytest.raises(UserError, match="NaN or infinity for the query 'red cat'"):
        encode_texts(model, TEXTS, "query", show_progress=False)


@pytest.mark.parametrize("wrong", [{"kind": "passage"}, {"batch_size": 0}, {"autocast_dtype": "fp16"}])
def test_settings_out_of_range_are_refused(tiny_config, tiny_tokenizer, wrong):
    with pytest.raises(ConfigError):
        encode_texts(build(tiny_config, tiny_tokenizer), TEXTS, **wrong)


def test_document_text_is_title_space_text_stripped():
    assert document_text({"title": "Sky", "text": "Nothing does. "}) == "Sky Nothing does."
    assert document_text({"title": "", "text": "Nothing does."}) == "Nothing does."
    assert document_text({"text": "Nothing does."}) == "Nothing does."


def test_models_that_only_know_beir_are_encoded_as_beir_does():
    class Lengths:
        def encode_queries(self, queries, batch_size, **kwargs):
            return torch.tensor([[float(len(text))] for text in queries])

        def encode_corpus(self, corpus, batch_size, **kwargs):
            return [torch.tensor([float(len(document["text"]))]) for document in corpus]

    assert encode_queries(Lengths(), ["ab", "c"]).tolist() == [[2.0], [1.0]]
    assert encode_corpus(Lengths(), [{"title": "x", "text": "abc"}]).tolist() == [[3.0]]
