"""Answer matches: hand-made cases with the outcome that DPR's code gives, and pyserini's where it is installed."""

from __future__ import annotations

import random

import pytest

from contaccum.errors import ConfigError, DataError
from contaccum.evaluation.answers import answer_finder

STRING = [
    ("It opened in Paris, France.", ["paris"], True),
    ("It opened in Paris, France.", ["Paris , France"], True),  # punctuation is a token, blanks are none
    ("It opened in Paris, France.", ["Paris France"], False),
    ("The parish was small.", ["paris"], False),  # whole tokens only
    ("He was 42 years old", ["4"], False),
    ("He was 42 years old", ["none", "42"], True),
    ("café", ["cafe"], False),  # NFD keeps the accent, as a mark within the word
    ("caf\u00e9", ["cafe\u0301"], True),  # composed or not is the same
    ("CAF\u00c9", ["caf\u00e9"], True),
    ("don't", ["don ' t"], True),
    ("a\u00a0b", ["a b"], True),  # any separator is a blank
    ("zero\u200bwidth", ["zero width"], True),  # control characters end a token
    ("10,000 people", ["10,000"], True),
    ("10,000 people", ["10000"], False),
    ("straße", ["STRASSE"], False),  # lower case, not case folding
    ("x", ["a much longer answer than the passage"], False),
    ("", ["a"], False),
    ("text", ["", "  ", "\u200b"], False),  # nothing to be found; DPR finds it everywhere
]

REGEX = [
    ("born in 1947 in Rome", [r"19\d\d"], True),
    ("born in 1847", [r"19\d\d"], False),
    ("Long Island", ["long island|new york"], True),
    ("first\nSecond line", ["^second"], True),  # every line begins
    ("caf\u00e9", ["cafe\u0301"], True),
    ("a (b", ["(b"], False),  # not a pattern: never found
    ("a b", ["(b", "a"], True),
]


@pytest.mark.parametrize(("text", "answers", "expected"), STRING)
def test_string_match_is_of_whole_normalised_tokens(text: str, answers: list[str], expected: bool) -> None:
    assert answer_finder(answers)(text) is expected


@pytest.mark.parametrize(("text", "answers", "expected"), REGEX)
def test_regex_match_seeks_patterns_anywhere_without_case(text: str, answers: list[str], expected: bool) -> None:
    assert answer_finder(answers, "regex")(text) is expected


def test_agrees_with_pyserini_where_it_is_installed() -> None:
    theirs = pytest.importorskip("pyserini.eval.evaluate_dpr_retrieval", reason="pyserini is not installed")
    tokenizer = theirs.SimpleTokenizer()
    rng = random.Random(0)
    pieces = [
        "Paris",
        "paris",
        "caf\u00e9",
        "cafe\u0301",
        "10",
        ",",
        ".",
        "don't",
        "\u00a0",
        "\u200b",
        "-",
        "ß",
        "İ",
        "١٢",
        "東京",
        "\n",
        " ",
    ]
    for _ in range(5000):
        text = "".join(rng.choice(pieces) + rng.choice(["", " "]) for _ in range(12))
        answer = "".join(rng.choice(pieces) + rng.choice(["", " "]) for _ in range(rng.randint(1, 3)))
        if tokenizer.tokenize(theirs._normalize(answer)).words():
            assert answer_finder([answer])(text) == theirs.has_answers(text, [answer], tokenizer)
        assert answer_finder([answer], "regex")(text) == theirs.has_answers(text, [answer], tokenizer, regex=True)


def test_a_pattern_without_end_is_named_and_an_unknown_match_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("contaccum.evaluation.answers._SECONDS", 0.05)
    with pytest.raises(DataError, match=r"takes more than 0\.05 s"):
        answer_finder([r"(a|aa)+$"], "regex")("a" * 60 + "b")
    with pytest.raises(ConfigError, match="match must be string or regex, got 'fuzzy'"):
        answer_finder(["a"], "fuzzy")  # type: ignore[arg-type]  # what is refused
