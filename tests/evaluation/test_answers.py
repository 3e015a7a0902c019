"""Answer matches: cases by hand with the outcome that DPR's code gives, its tokenizer's classes, and accuracies."""

from __future__ import annotations

import random
import sys
import unicodedata

import pytest

from contaccum.data import RecordReport, load_questions
from contaccum.errors import ConfigError, DataError
from contaccum.evaluation import open_qa
from contaccum.evaluation.open_qa import answer_finder, load_passages, score_open_qa

STRING = [
    ("It opened in Paris, France.", ["paris"], True),
    ("It opened in Paris, France.", ["Paris , France"], True),  # punctuation is a token, blanks are none
    ("The parish was small.", ["paris"], False),  # whole tokens only
    ("He was 42 years old", ["none", "42"], True),
    ("café", ["cafe"], False),  # NFD keeps the accent, as a mark within the word
    ("caf\u00e9", ["cafe\u0301"], True),  # composed or not is the same
    ("CAF\u00c9", ["caf\u00e9"], True),
    ("東京タワー", ["東京"], False),  # no blank, no new token
    ("هو ١٢ سنة", ["١٢"], True),
    ("snake_case", ["snake"], True),  # an underscore is punctuation
    ("x²+½", ["x² + ½"], True),  # numbers of every kind
    ("a\u00a0b", ["a b"], True),  # any separator is a blank
    ("zero\u200bwidth", ["zero width"], True),  # control characters end a token
    ("10,000 people", ["10000"], False),
    ("straße", ["STRASSE"], False),  # lower case, not case folding
    ("text", ["", "  ", "\u200b"], False),  # nothing to be found; DPR finds it everywhere
]

REGEX = [
    ("born in 1947 in Rome", [r"19\d\d"], True),
    ("Long Island", ["long island|new york"], True),
    ("first\nSecond line", ["^second"], True),  # every line begins
    ("caf\u00e9", ["cafe\u0301"], True),
    ("a (b", ["(b"], False),  # not a pattern: never found
]


@pytest.mark.parametrize(("text", "answers", "expected"), STRING)
def test_string_match_is_of_whole_normalised_tokens(text, answers, expected):
    assert answer_finder(answers)(text) is expected


@pytest.mark.parametrize(("text", "answers", "expected"), REGEX)
def test_regex_match_seeks_patterns_anywhere_without_case(text, answers, expected):
    assert answer_finder(answers, "regex")(text) is expected


def tokens_by_category(text: str) -> list[str]:
    r"""``[\p{L}\p{N}\p{M}]+|[^\p{Z}\p{C}]`` spelled out, character by character."""
    tokens: list[str] = []
    joins = False
    for character in text:
        category = unicodedata.category(character)[0]
        if category in "LNM" and joins:
            tokens[-1] += character
        elif category not in "ZC":
            tokens.append(character)
        joins = category in "LNM"
    return tokens


def test_tokens_are_dprs_for_all_kinds_of_characters():
    characters = [chr(code) for code in (*range(0x10000), *range(0x10000, sys.maxunicode, 17))]
    random.Random(0).shuffle(characters)
    text = "".join(characters)
    assert open_qa._tokens(text).split(" ")[1:-1] == [
        token.lower() for token in tokens_by_category(unicodedata.normalize("NFD", text))
    ]


def test_accuracy_counts_questions_whose_best_k_passages_hold_an_answer(tmp_path):
    (tmp_path / "q.csv").write_text("who sat\t['the cat', 'cats']\nwhere was it\t['the mat']\nwhen\t['1947']\n")
    rows = ['1\t"one dog sat"\tCats', '2\t"the cat said ""hello"""\t', "3\ta bird\tthe mat", "4\ton the mat\t"]
    (tmp_path / "p.tsv").write_text("id\ttext\ttitle\n" + "\n".join(rows) + "\n")
    questions, passages = load_questions(tmp_path / "q.csv"), load_passages(tmp_path / "p.tsv", RecordReport())
    assert tuple(passages["2"]) == ("2", "", 'the cat said "hello"')
    run = {
        "question-1": {"1": 3.0, "3": 2.0, "2": 1.0},  # third: "Cats" is a title, which is not searched
        "question-2": {"4": 0.5, "3": 0.9},  # second: the title of 3 does not count
        "question-3": {},
    }
    result = score_open_qa(questions, run, passages, (1, 2, 3), show_progress=False, model={}, search={})
    assert result.metrics == {f"Accuracy@{k}": pytest.approx((k - 1) / 3) for k in (1, 2, 3)}
    assert result.per_query["question-1"] == {"Accuracy@1": 0.0, "Accuracy@2": 0.0, "Accuracy@3": 1.0}
    for wrong, words in (
        ({"question-1": {"9": 1.0}}, "passage '9' of question-1"),
        ({"q7": {}}, "'q7' is no question"),
    ):
        with pytest.raises(DataError, match=words):
            score_open_qa(questions, wrong, passages, (1,), show_progress=False)
    with pytest.raises(ConfigError, match="match must be one of string, regex, got 'fuzzy'"):
        score_open_qa(questions, run, passages, (1,), "fuzzy", show_progress=False)
    assert list(load_passages(tmp_path / "p.tsv", RecordReport(), {"3", "77"})) == ["3"]
    (tmp_path / "p.tsv").write_text("1\ta\n1\tc\n")
    with pytest.raises(DataError, match="id '1' occurs again"):
        load_passages(tmp_path / "p.tsv", RecordReport())
