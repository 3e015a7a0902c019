"""Features of columns: equal content has an equal id however it lies, and first texts are cut out of any layout."""

from typing import Any

import pytest
import torch
from sample_texts import sentences
from torch import Tensor
from transformers import DataCollatorWithFlattening

from contaccum.losses.text_ids import content_ids, copy_first_texts, count_texts

TEXTS = [*sentences(7, 1, 3), *sentences(3, 2, 9), "cat", "cat dog", "dog cat"]


def layouts(tokenizer: Any, texts: list[str]) -> dict[str, dict[str, Any]]:
    """The same texts as every preprocessor would give them."""
    rows = tokenizer(texts, truncation=True, max_length=8)["input_ids"]
    found: dict[str, dict[str, Any]] = {}
    for side in ("right", "left"):
        for more in (0, 5):
            width = max(map(len, rows)) + more
            pads = [([0] * (width - len(row)), row) for row in rows]
            ids = [row + pad if side == "right" else pad + row for pad, row in pads]
            ones = [[0] * len(pad) + [1] * len(row) for pad, row in pads]
            mask = torch.tensor([x[::-1] if side == "right" else x for x in ones])
            found[f"{side} {more}"] = {"input_ids": torch.tensor(ids), "attention_mask": mask}
    flatten = DataCollatorWithFlattening(
        return_flash_attn_kwargs=True, return_seq_idx=True, position_ids_start=2
    )
    flat = flatten([{"input_ids": row} for row in rows])
    found["flattened"] = {key: x for key, x in flat.items() if key != "labels"}
    found["flattened by places"] = {key: flat[key] for key in ("input_ids", "position_ids")}
    lengths = torch.tensor([0, *map(len, rows[:-1])])
    stream = torch.tensor([token for row in rows for token in row])
    found["stream"] = {"input_ids": stream, "offsets": lengths.cumsum(0)}
    return found


def test_a_text_has_one_id_however_its_batch_is_laid_out(tiny_tokenizer):
    found = {
        name: content_ids(features) for name, features in layouts(tiny_tokenizer, TEXTS * 2).items()
    }
    first = found.pop("right 0")
    assert len({*first.tolist()}) == len(TEXTS) and torch.equal(
        first[: len(TEXTS)], first[len(TEXTS) :]
    )
    assert all(torch.equal(ids, first) for ids in found.values()) and len(found) == 6
    alone = [
        content_ids(tiny_tokenizer([text], return_tensors="pt")).item()
        for text in ("cat", "dog cat")
    ]
    assert alone == [first[10].item(), first[12].item()]


def test_ids_of_a_hundred_thousand_short_texts_are_distinct_and_cut_texts_are_equal(tiny_tokenizer):
    tokens = torch.randint(5, 90, (100_000, 4), generator=torch.Generator().manual_seed(0))
    assert len(set(content_ids({"input_ids": tokens}).tolist())) == len(tokens.unique(dim=0))
    cut = tiny_tokenizer(
        ["cat dog cat dog", "cat dog cat bird"], truncation=True, max_length=4, return_tensors="pt"
    )
    assert len(set(content_ids(cut).tolist())) == 1


@pytest.mark.parametrize("rows", [4, len(TEXTS), 50])
def test_the_first_texts_of_any_layout_keep_their_ids(tiny_tokenizer, rows):
    for name, features in layouts(tiny_tokenizer, TEXTS).items():
        found = copy_first_texts({**features, "task": "query"}, rows)
        assert count_texts(features) == len(TEXTS)
        if name == "flattened by places" and rows < len(TEXTS):
            assert found is None  # nothing says where else its tensors end
        else:
            assert found is not None and "task" not in found
            assert torch.equal(content_ids(found), content_ids(features)[:rows]), name


def images(kind: str, pictures: list[list[Tensor]]) -> dict[str, Any]:
    """Features of texts with pictures behind equal placeholder tokens, as processors of three kinds give them."""
    n, flat = len(pictures), [picture for of_text in pictures for picture in of_text]
    features: dict[str, Any] = {
        "input_ids": torch.full((n, 6), 7),
        "attention_mask": torch.ones(n, 6),
    }
    if kind != "a picture a text":
        features["num_images_per_sample"] = torch.tensor([len(of_text) for of_text in pictures])
    features["pixel_values"] = torch.stack(flat)
    if kind == "patches":
        features["pixel_values"] = torch.cat([picture.reshape(12, 4) for picture in flat])
        features["image_grid_thw"] = torch.tensor([[1, 3, 4]] * len(flat))
    if kind == "pictures alone":
        del features["input_ids"], features["attention_mask"]
    return features


@pytest.mark.parametrize("kind", ["a picture a text", "several", "patches", "pictures alone"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_pictures_behind_equal_tokens_are_told_apart(kind, dtype):
    a, b, c = torch.randn(3, 3, 4, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
    ids = content_ids(images(kind, [[a], [b], [a], [c], [-a], [a.flip(2)]]))
    assert ids.tolist()[0] == ids.tolist()[2] and len({*ids.tolist()}) == 5
    if kind in ("several", "patches"):
        given = [[a, b], [b, a], [a], [], [a, b], [a, a]]
        found = images(kind, given)
        ids = content_ids(found)
        assert ids[0] == ids[4] and len({*ids.tolist()}) == 5
        assert torch.equal(content_ids(copy_first_texts(found, 4)), ids[:4])
        assert (
            content_ids({key: x for key, x in found.items() if not key.startswith("num_")}) is None
        )
        assert (
            copy_first_texts({key: x for key, x in found.items() if not key.startswith("num_")}, 4)
            is None
        )


def test_what_a_model_added_and_padding_with_zeros_change_no_id():
    audio = torch.randn(4, 5, 20, generator=torch.Generator().manual_seed(0))
    features = {"input_ids": torch.ones(4, 3, dtype=torch.int64), "input_features": audio}
    ids = content_ids(features)
    assert len({*ids.tolist()}) == 4
    longer = features | {"input_features": torch.nn.functional.pad(audio, (0, 7))}
    added = {"token_embeddings": torch.randn(4, 3, 8), "sentence_embedding": torch.randn(4, 8)}
    assert torch.equal(content_ids(longer | added), ids)
    assert (
        content_ids({"task": "query"}) is None
        and content_ids({"input_ids": torch.arange(9)}) is None
    )
