"""Features of columns in every layout: text ids, the number of texts, and the first texts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sample_texts import sentences
from transformers import DataCollatorWithFlattening

from contaccum.data.sampling import text_ids
from contaccum.losses.text_ids import content_ids, copy_first_texts, count_texts

TEXTS = [*sentences(7, 1, 3), *sentences(3, 2, 9), "cat", "cat dog", "dog cat"]


def make_layouts(tokenizer: Any, texts: list[str]) -> dict[str, dict[str, Any]]:
    """Make the features of the same texts in the layout of every preprocessor."""
    token_lists = tokenizer(texts, truncation=True, max_length=8)["input_ids"]
    flatten = DataCollatorWithFlattening(
        return_flash_attn_kwargs=True, return_seq_idx=True, position_ids_start=2
    )
    flattened = flatten([{"input_ids": tokens} for tokens in token_lists])
    del flattened["labels"]
    lengths = [len(tokens) for tokens in token_lists]
    offsets = torch.tensor([0, *lengths[:-1]]).cumsum(0)
    stream = torch.cat([torch.tensor(tokens) for tokens in token_lists])
    layouts = {"flattened": flattened, "stream": {"input_ids": stream, "offsets": offsets}}
    for side in ("right", "left"):
        for extra in (0, 5):
            layouts[f"padded by {extra} more on the {side}"] = tokenizer.pad(
                {"input_ids": token_lists},
                padding="max_length",
                max_length=max(lengths) + extra,
                padding_side=side,
                return_tensors="pt",
            )
    return layouts


def test_a_text_has_the_same_id_in_every_layout(tiny_tokenizer):
    layouts = make_layouts(tiny_tokenizer, TEXTS * 2)
    ids_by_layout = {name: content_ids(features) for name, features in layouts.items()}
    assert len(ids_by_layout) == 6
    expected = ids_by_layout["padded by 0 more on the right"]
    assert len(set(expected.tolist())) == len(TEXTS)
    assert torch.equal(expected[: len(TEXTS)], expected[len(TEXTS) :])
    for ids in ids_by_layout.values():
        assert torch.equal(ids, expected)
    for index, text in ((10, "cat"), (12, "dog cat")):
        ids = content_ids(tiny_tokenizer([text], return_tensors="pt"))
        assert ids.item() == expected[index].item()


def test_ids_of_a_hundred_thousand_short_texts_are_distinct():
    tokens = torch.randint(5, 90, (100_000, 4), generator=torch.Generator().manual_seed(0))
    ids = content_ids({"input_ids": tokens})
    assert len(set(ids.tolist())) == len(tokens.unique(dim=0))


@pytest.mark.parametrize("max_texts", [4, len(TEXTS), 50])
def test_the_first_texts_of_any_layout_keep_their_ids(tiny_tokenizer, max_texts):
    for name, features in make_layouts(tiny_tokenizer, TEXTS).items():
        first_texts = copy_first_texts({**features, "task": "query"}, max_texts)
        assert count_texts(features) == len(TEXTS)
        assert first_texts is not None
        assert "task" not in first_texts
        expected = content_ids(features)[:max_texts]
        assert torch.equal(content_ids(first_texts), expected), name


def test_embeddings_that_a_model_has_added_change_no_id_and_images_have_none():
    features = {"input_ids": torch.ones(4, 3, dtype=torch.int64)}
    ids = content_ids(features)
    features["token_embeddings"] = torch.randn(4, 3, 8)
    features["sentence_embedding"] = torch.randn(4, 8)
    assert torch.equal(content_ids(features), ids)
    features["pixel_values"] = torch.randn(4, 3, 4, 4)
    assert content_ids(features) is None
    assert copy_first_texts(features, 1) is None


def test_ids_stay_the_same_from_version_to_version():
    """Checkpoints and stores contain these numbers."""
    tokens = {"input_ids": torch.tensor([[5, 6, 7]])}
    assert content_ids(tokens).tolist() == [-3279467796677714443]
    assert text_ids(["a text"]).tolist() == [5830437876521264211]
