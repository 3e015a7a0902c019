"""Proposal of training settings for a data set."""

import pytest
from small_data import write_lines

from contaccum.training.proposal import propose_settings


@pytest.mark.parametrize(("tokens", "max_length"), [(8, 8), (9, 16), (80, 64)])
def test_a_maximum_length_is_the_next_multiple_of_8_or_the_models_maximum(
    places, tmp_path, tokens, max_length
):
    text = "cat " * (tokens - 2)  # beside [CLS] and [SEP]
    pairs = write_lines(tmp_path / "pairs.jsonl", [{"query": text, "positive": text}] * 9)
    settings = propose_settings(pairs, str(places / "backbone"), {})
    assert settings.query_max_length == settings.passage_max_length == max_length
