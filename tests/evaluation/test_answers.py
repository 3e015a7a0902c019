"""Answer matches: cases by hand with the outcome that DPR's code gives, its tokenizer's classes, and accuracies."""

import random
import sys
import unicodedata

import pytest
from small_data import write_open_qa

from contaccum.data import RecordReport, load_questions
from contaccum.errors import DataError
from contaccum.evaluation import open_qa
from contaccum.evaluation.open_qa import make_answer_matcher, load_passages, score_open_qa

MATCHES = [
    (
        "It opened in Paris, France.",
        "Paris , France",
        "string",
        True,
    ),  # punctuation is a token, blanks are none
    ("The parish was small.", "paris", "string", False),  # whole tokens only
    ("café", "cafe", "string", False),  # NFD keeps the accent, as a mark within the word
    ("CAF\u00c9", "cafe\u0301", "string", True),  # composed or not is the same
    ("東京タワー", "東京", "string", False),  # no blank, no new token
    ("snake_case", "snake", "string", True),  # an underscore is punctuation
    ("zero\u200bwidth", "zero width", "string", True),  # control characters end a token
    ("straße", "STRASSE", "string", False),  # lower case, not case folding
    ("text", "\u200b", "string", False),  # nothing to be found; DPR finds it everywhere
    ("born in 1947 in Rome", r"19\d\d", "regex", True),
    ("first\nSecond line", "^second", "regex", True),  # every line begins
    ("a (b", "(b", "regex", False),  # not a pattern: never found
]


@pytest.mark.parametrize(("text", "answer", "match", "expected"), MATCHES)
def test_answers_match_as_in_dpr(text, answer, match, expected):
    assert make_answer_matcher(["not there", answer], match)(text) is expected


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
    characters = [
        c for c in characters if unicodedata.category(c) != "Cn"
    ]  # another version of Unicode has more
    random.Random(0).shuffle(characters)
    text = "".join(characters)
    assert open_qa._join_tokens(text).split(" ")[1:-1] == [
        token.lower() for token in tokens_by_category(unicodedata.normalize("NFD", text))
    ]


def test_accuracy_counts_questions_whose_best_k_passages_hold_an_answer(tmp_path):
    questions_file, passages_file = write_open_qa(tmp_path)
    questions, passages = (
        load_questions(questions_file),
        load_passages(passages_file, RecordReport()),
    )
    run = {
        "question-1": {
            "1": 3.0,
            "3": 2.0,
            "2": 1.0,
        },  # third: "Cats" is a title, which is not searched
        "question-2": {"4": 0.5, "3": 0.9},  # second: the title of 3 does not count
        "question-3": {},
    }
    result = score_open_qa(
        questions, run, passages, (1, 2, 3), show_progress=False, model={}, search={}
    )
    assert result.metrics == {f"Accuracy@{k}": pytest.approx((k - 1) / 3) for k in (1, 2, 3)}
    assert result.per_query["question-1"] == {
        "Accuracy@1": 0.0,
        "Accuracy@2": 0.0,
        "Accuracy@3": 1.0,
    }
    with pytest.raises(DataError, match="passage '9' of question-1"):
        score_open_qa(questions, {"question-1": {"9": 1.0}}, passages, show_progress=False)
    (tmp_path / "twice.tsv").write_text("1\ta\n1\tc\n")
    with pytest.raises(DataError, match="id '1' occurs again"):
        load_passages(tmp_path / "twice.tsv", RecordReport())
