"""Proposal of training settings for a data set."""

import pytest

from contaccum.training.proposal import _compute_max_length


@pytest.mark.parametrize(("tokens", "max_length"), [(1, 8), (64, 64), (65, 72), (509, 510)])
def test_a_maximum_length_is_the_next_multiple_of_8_or_the_models_maximum(tokens, max_length):
    assert _compute_max_length([tokens, tokens], max_tokens=510) == max_length
