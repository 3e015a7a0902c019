"""Hashes and lengths of columns equal those of the texts themselves, whatever Arrow stores them in."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from datasets import Dataset, Features, Value
from hypothesis import given, settings
from hypothesis import strategies as st

from contaccum.data import text_columns
from contaccum.data.text_columns import (
    NO_TEXT,
    column_codes,
    column_hashes,
    column_lengths,
    column_numbers,
    hash_texts,
)
from contaccum.errors import ConfigError

TEXTS = st.lists(
    st.one_of(st.none(), st.text(max_size=40), st.sampled_from(["", "\0", "\0\0", "a", "a\0", "é", "日本"]))
)


@settings(max_examples=200, deadline=None)
@given(texts=TEXTS)
def test_hashes_are_equal_where_texts_are(texts: list[str | None]) -> None:
    hashes = hash_texts(pa.array(texts, pa.string())).tolist()
    for text, value in zip(texts, hashes, strict=True):
        assert (value == NO_TEXT) == (text is None)
        assert [h == value for h in hashes] == [other == text for other in texts]


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())]
)
def test_storage_does_not_matter(kind: pa.DataType, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [f"text {i} " * (i % 9) for i in range(200)] + [None, "x" * 5000]
    expected = hash_texts(pa.array(texts, pa.string()))
    whole = pa.array(texts, pa.string()).cast(kind)
    assert (hash_texts(whole) == expected).all()
    assert (hash_texts(whole[3:150]) == expected[3:150]).all()
    assert (hash_texts(pa.chunked_array([whole[:7], whole[7:7], whole[7:]])) == expected).all()
    monkeypatch.setattr(text_columns, "_BYTES_HASHED", 64)  # smaller than some texts
    assert (hash_texts(whole) == expected).all()


def test_a_million_similar_texts_have_as_many_hashes() -> None:
    numbers = pa.array(np.arange(300_000)).cast(pa.string())
    texts = pa.concat_arrays([numbers, pa.compute.binary_join_element_wise("passage", numbers, numbers, " ")])
    assert len(np.unique(hash_texts(texts))) == 600_000


def test_a_selection_is_read_in_its_own_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_columns, "_ROWS_READ", 7)
    dataset = Dataset.from_dict({"a": [f"été {i}" for i in range(50)], "b": ["x" * i for i in range(50)]})
    some = dataset.select([9, 3, 3, 40, *range(20)])
    assert (
        column_hashes(some, ["a", "b"]) == column_hashes(dataset, ["a", "b"])[some._indices["indices"].to_numpy()]
    ).all()
    assert column_lengths(some, ["b", "a"])[:4].tolist() == [[9, 5], [3, 5], [3, 5], [40, 6]]


def test_values_that_are_no_text_are_compared_by_their_text() -> None:
    dataset = Dataset.from_dict(
        {"number": [1, 2, 1], "list": [["a", "b"], ["a"], ["a", "b"]], "text": ["1", "['a']", "3"], "none": [None] * 3}
    )
    hashes = column_hashes(dataset, ["number", "list", "text", "none"])
    assert hashes[0, 0] == hashes[2, 0] == hashes[0, 2] != hashes[1, 0]
    assert hashes[0, 1] == hashes[2, 1] != hashes[1, 1] == hashes[1, 2]
    assert (hashes[:, 3] == NO_TEXT).all()


def test_codes_number_labels_of_any_kind() -> None:
    dataset = Dataset.from_dict({"name": ["b", "a", None, "b"], "number": [7, 7, 3, 1]})
    assert column_codes(dataset, "name").tolist() == [0, 1, 2, 0]
    assert column_codes(dataset, "number").tolist() == [0, 0, 1, 2]
    assert column_numbers(dataset, "number").tolist() == [7, 7, 3, 1]
    with pytest.raises(ConfigError, match="column name: not a number in every row"):
        column_numbers(dataset, "name")


def test_no_rows_give_empty_arrays() -> None:
    dataset = Dataset.from_dict({"a": []}, features=Features({"a": Value("string")}))
    assert column_hashes(dataset, ["a"]).shape == (0, 1)
