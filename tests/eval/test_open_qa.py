"""eval/open_qa: answers match as in DPR's code, tokens are its tokenizer's, scores are exact."""

import importlib
import json
import random
import sys
import unicodedata

import pytest
from programs import ROOT, run_program

from contaccum.data import RecordReport
from contaccum.errors import DataError
from contaccum.files import read_json
from contaccum.retrieval.encode import read_texts

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


@pytest.fixture
def open_qa(monkeypatch):
    """Return the program as a module."""
    monkeypatch.syspath_prepend(str(ROOT / "eval" / "open_qa"))
    return importlib.import_module("open_qa")


@pytest.mark.parametrize(("text", "answer", "match", "expected"), MATCHES)
def test_answers_match_as_in_dpr(open_qa, text, answer, match, expected):
    has_answer = open_qa.make_answer_matcher(["not there", answer], match)
    assert has_answer(text) is expected


def test_tokens_are_dprs_for_all_categories_of_characters(open_qa):
    r"""DPR's pattern is ``[\p{L}\p{N}\p{M}]+|[^\p{Z}\p{C}]``."""
    codes = (*range(0x10000), *range(0x10000, sys.maxunicode, 17))
    characters = [chr(code) for code in codes]
    # Without unassigned characters, because another version of Unicode may assign them.
    characters = [character for character in characters if unicodedata.category(character) != "Cn"]
    random.Random(0).shuffle(characters)
    text = "".join(characters)
    expected: list[str] = []
    is_in_word = False
    for character in unicodedata.normalize("NFD", text):
        category = unicodedata.category(character)[0]
        is_word_character = category in "LNM"
        if is_word_character and is_in_word:
            expected[-1] += character
        elif category not in "ZC":
            expected.append(character)
        is_in_word = is_word_character
    tokens = open_qa._join_tokens(text).split(" ")[1:-1]
    assert tokens == [token.lower() for token in expected]


TABLE = "who?\t['Ann', 'the \"b\"']\n\nwhen\t[\"1947\"]\n"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.qa.csv", TABLE),
        (
            "a.jsonl",
            r"""{"question": "who?", "answer": ["Ann", "the \"b\""]}
{"query": "when", "answers": "1947"}
""",
        ),
    ],
)
def test_every_form_gives_the_same_questions_and_the_ids_of_encoding(
    open_qa, tmp_path, name, content
):
    path = tmp_path / name
    path.write_text(content)
    questions = open_qa.load_questions(path)
    expected = {"question-1": ("who?", ["Ann", 'the "b"']), "question-2": ("when", ["1947"])}
    assert questions == expected
    (tmp_path / "b.qa.csv").write_text(TABLE)
    encoded = read_texts(tmp_path / "b.qa.csv", "query", RecordReport())
    assert [(question.id, question.text) for question in encoded] == [
        (question_id, question.text) for question_id, question in questions.items()
    ]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("a\t__import__('os').system('true')", "answers are not a list"),
        ("a\t" + "[" * 4000, "answers are not a list"),
        ("a\t['']", "empty answer"),
        ("a\t[]", "no answers"),
    ],
)
def test_a_question_without_usable_answers_is_named(open_qa, tmp_path, line, reason):
    path = tmp_path / "q.csv"
    path.write_text(f"when\t['1947']\n{line}\n")
    with pytest.raises(DataError, match=rf"q\.csv:2: {reason}"):
        open_qa.load_questions(path)


QUESTIONS = """who sat\t['the cat', 'cats']
where was it\t['the mat']
when\t['1947']
"""
PASSAGES = '''id\ttext\ttitle
1\t"one dog sat"\tCats
2\t"the cat said ""hello"""\t
3\ta bird\tthe mat
4\ton the mat\t
5\t\t
'''
RUN = """question-1 Q0 1 1 3 x
question-1 Q0 3 2 2 x
question-1 Q0 2 3 1 x
question-2 Q0 3 1 0.9 x
question-2 Q0 4 2 0.5 x
question-3 Q0 5 1 0.5 x
"""


@pytest.fixture
def score(tmp_path):
    """Return a function that scores a run by the program, and returns the record."""

    def run(run_text, *options, questions=QUESTIONS, passages=PASSAGES):
        (tmp_path / "test.qa.csv").write_text(questions)
        (tmp_path / "psgs.tsv").write_text(passages)
        (tmp_path / "run.trec").write_text(run_text)
        argv = ["--run", tmp_path / "run.trec", "--questions", tmp_path / "test.qa.csv"]
        argv += ["--passages", tmp_path / "psgs.tsv", "--output", tmp_path / "out.json"]
        run_program("eval/open_qa/open_qa.py", *argv, *options)
        return read_json(tmp_path / "out.json")

    return run


def test_accuracy_is_the_share_of_questions_with_an_answer_in_the_top_k(score):
    """Titles are not searched: "Cats" and "the mat" are titles of the first passages."""
    record = score(RUN, "--k_values", 1, 2, 3)
    expected = {"Accuracy@1": 0.0, "Accuracy@2": 1 / 3, "Accuracy@3": 2 / 3}
    assert record["metrics"] == pytest.approx(expected)
    scores = record["per_query"]["question-1"]
    assert scores == {"Accuracy@1": 0.0, "Accuracy@2": 0.0, "Accuracy@3": 1.0}
    assert record["data"]["questions"] == 3
    assert record["data"]["match"] == "string"


def test_answers_can_be_regular_expressions(score):
    """The first answer is not a valid regular expression."""
    question = {"question": "who", "answer": ["(b", "c[au]t"]}
    options = ["--match", "regex", "--k_values", 1]
    record = score("question-1 Q0 2 1 0.5 x\n", *options, questions=json.dumps(question) + "\n")
    assert record["metrics"]["Accuracy@1"] == 1.0


@pytest.mark.parametrize(
    ("run_text", "passages", "word"),
    [
        ("q7 Q0 1 1 0.5 x\n", PASSAGES, "q7"),
        ("question-1 Q0 9 1 0.5 x\n", PASSAGES, "'9'"),
        (RUN, PASSAGES + "1\tagain\t\n", "occurs again"),
    ],
)
def test_runs_that_do_not_fit_the_data_are_refused(score, capsys, run_text, passages, word):
    with pytest.raises(SystemExit) as stopped:
        score(run_text, passages=passages)
    assert stopped.value.code == 2
    assert word in capsys.readouterr().err
