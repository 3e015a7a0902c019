"""Answers match as in DPR's code, tokens are its tokenizer's, and accuracies are exact."""

import random
import sys
import unicodedata

import pytest
from small_data import write_open_qa

from contaccum.data import RecordReport, load_questions
from contaccum.errors import DataError
from contaccum.evaluation import open_qa
from contaccum.evaluation.open_qa import load_passages, make_answer_matcher, score_open_qa

MATCHES = [
    # Punctuation is a token, spaces are not.
    ("It opened in Paris, France.", "Paris , France", "string", True),
    ("The parish was small.", "paris", "string", False),  # whole tokens only
    ("café", "cafe", "string", False),  # NFD keeps the accent, as a mark within the word
    ("CAF\u00c9", "cafe\u0301", "string", True),  # composed and decomposed characters are equal
    ("東京タワー", "東京", "string", False),  # without a space there is no new token
    ("snake_case", "snake", "string", True),  # an underscore is punctuation
    ("zero\u200bwidth", "zero width", "string", True),  # control characters end a token
    ("straße", "STRASSE", "string", False),  # lower case, not case folding
    ("text", "\u200b", "string", False),  # an answer without tokens is not found
    ("born in 1947 in Rome", r"19\d\d", "regex", True),
    ("first\nSecond line", "^second", "regex", True),  # ^ matches at the start of every line
    ("a (b", "(b", "regex", False),  # an invalid pattern is never found
]


@pytest.mark.parametrize(("text", "answer", "match", "expected"), MATCHES)
def test_answers_match_as_in_dpr(text, answer, match, expected):
    has_answer = make_answer_matcher(["not there", answer], match)
    assert has_answer(text) is expected


def tokenize_by_category(text: str) -> list[str]:
    r"""Split a text as ``[\p{L}\p{N}\p{M}]+|[^\p{Z}\p{C}]`` does, character by character."""
    tokens: list[str] = []
    is_in_word = False
    for character in text:
        category = unicodedata.category(character)[0]
        is_word_character = category in "LNM"
        if is_word_character and is_in_word:
            tokens[-1] += character
        elif category not in "ZC":
            tokens.append(character)
        is_in_word = is_word_character
    return tokens


def test_tokens_are_dprs_for_all_categories_of_characters():
    codes = (*range(0x10000), *range(0x10000, sys.maxunicode, 17))
    characters = [chr(code) for code in codes]
    # Without unassigned characters, because another version of Unicode may assign them.
    characters = [character for character in characters if unicodedata.category(character) != "Cn"]
    random.Random(0).shuffle(characters)
    text = "".join(characters)
    expected = tokenize_by_category(unicodedata.normalize("NFD", text))
    tokens = open_qa._join_tokens(text).split(" ")[1:-1]
    assert tokens == [token.lower() for token in expected]


def test_accuracy_is_the_share_of_questions_with_an_answer_in_the_top_k(tmp_path):
    questions_file, passages_file = write_open_qa(tmp_path)
    questions = load_questions(questions_file)
    passages = load_passages(passages_file, RecordReport())
    run = {
        # The third passage has the answer: "Cats" is only a title, and titles are not searched.
        "question-1": {"1": 3.0, "3": 2.0, "2": 1.0},
        # The second passage has the answer: the first one has it only in its title.
        "question-2": {"4": 0.5, "3": 0.9},
        "question-3": {},
    }
    result = score_open_qa(
        questions, run, passages, (1, 2, 3), show_progress=False, model={}, search={}
    )
    expected = {"Accuracy@1": 0.0, "Accuracy@2": 1 / 3, "Accuracy@3": 2 / 3}
    assert result.metrics == pytest.approx(expected)
    scores = result.per_query["question-1"]
    assert scores == {"Accuracy@1": 0.0, "Accuracy@2": 0.0, "Accuracy@3": 1.0}


def test_a_run_with_a_passage_outside_the_corpus_is_refused(tmp_path):
    questions_file, passages_file = write_open_qa(tmp_path)
    questions = load_questions(questions_file)
    passages = load_passages(passages_file, RecordReport())
    with pytest.raises(DataError, match="passage '9' of question-1"):
        score_open_qa(questions, {"question-1": {"9": 1.0}}, passages, show_progress=False)


def test_a_passage_id_that_occurs_twice_is_refused(tmp_path):
    (tmp_path / "twice.tsv").write_text("1\ta\n1\tc\n")
    with pytest.raises(DataError, match="id '1' occurs again"):
        load_passages(tmp_path / "twice.tsv", RecordReport())
