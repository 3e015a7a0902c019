"""Comparison of texts: what is the same text, and which texts are near-duplicates."""

import itertools
import random

import pytest
from scipy.cluster.hierarchy import DisjointSet

from contaccum.data.near_duplicates import find_near_duplicates, join_near_duplicates, normalise


def group_near_duplicates(texts: list[str]) -> list[set[str]]:
    """Return the groups of near-duplicates, sorted by their first text."""
    groups = DisjointSet(range(len(texts)))
    join_near_duplicates(texts, groups)
    text_groups = [{texts[index] for index in indices} for indices in groups.subsets()]
    return sorted(text_groups, key=min)


def make_words(generator: random.Random, num_words: int) -> list[str]:
    """Return random words, "w0" to "w999999"."""
    return [f"w{generator.randrange(10**6)}" for _ in range(num_words)]


@pytest.mark.parametrize("num_changed_words", [1, 3, 6, 9])
def test_texts_of_one_template_are_near_duplicates_if_they_differ_in_one_word(num_changed_words):
    generator = random.Random(0)
    template = "please tell me the status of the order of this customer: "
    texts = [template + " ".join(make_words(generator, num_changed_words)) for _ in range(1000)]
    num_groups = len(group_near_duplicates([*texts, "another text"]))
    assert num_groups == (2 if num_changed_words == 1 else 1001)


def collect_grams(text: str) -> set[str]:
    return {text[start : start + 5] for start in range(len(text) - 4)}


@pytest.mark.parametrize("seed", range(3))
def test_exactly_the_near_duplicates_are_found_among_texts_of_up_to_128_grams(seed):
    """Texts of one template with 0 to 8 other words have similarities around the bound."""
    generator = random.Random(seed)
    template = make_words(generator, 10)
    texts = []
    for _ in range(120):
        words = template[generator.randrange(3) :] + make_words(generator, generator.randrange(9))
        texts.append(" ".join(words))
    near: dict[str, set[str]] = {text: set() for text in texts}
    groups = DisjointSet(texts)
    for text, other in itertools.combinations(near, 2):
        grams, other_grams = collect_grams(text), collect_grams(other)
        if len(grams & other_grams) >= 0.7 * len(grams | other_grams):
            groups.merge(text, other)
            near[text].add(other)
            near[other].add(text)
    assert 1 < groups.n_subsets < len(near)
    assert group_near_duplicates(texts) == sorted(groups.subsets(), key=min)
    references = texts[:20]
    for text in texts[20:]:
        is_near = not near[text].isdisjoint(references) or text in references
        assert find_near_duplicates([text], references) == ({text} if is_near else set())


def test_near_duplicates_are_found_in_each_of_several_blocks_of_texts():
    generator = random.Random(0)
    texts = [" ".join(make_words(generator, 6)) for _ in range(5000)]
    assert find_near_duplicates(texts, [f"{text}!" for text in texts[::50]]) == set(texts[::50])


def test_similarities_of_long_texts_are_estimated():
    """Two thirds of the 5-grams are in both, then nine tenths."""
    generator = random.Random(0)
    words = make_words(generator, 1000)
    text = " ".join(words)
    assert find_near_duplicates([text], [" ".join(words[:600])]) == set()
    assert find_near_duplicates([text], [" ".join(words[:900])]) == {text}


@pytest.mark.parametrize(
    "text",
    [
        "wa\u00adter",  # soft hyphen
        "wa\u00ad\n ter",  # soft hyphen at the end of a line
        "w\u200ba\u200ct\u200de\u2060r\ufeff",  # zero-width space, joiners, byte-order mark
        "\u200ewater\u200f \u202a\u2066",  # direction marks
        "wat\ufe0fe\u3164r\x00",  # variation selector, filler, control character
        "\u00a0water\u202f\u2007",  # non-breaking blanks
        "&nbsp;w&#97;t&amp;#101;r&shy;",
        "ＷＡtER",
        "wátęr",
        "wa\u0301te\u0328r",  # decomposed accents
    ],
)
def test_forms_of_a_text_are_the_same_text(text):
    assert normalise(text) == "water"


@pytest.mark.parametrize(
    ("text", "other"),
    [
        ("İSTANBUL DIŞ", "istanbul dis"),
        ("Straße Łódź smørrebrød", "strasse lodz smorrebrod"),
        ("“don’t” – ‘it’ «is» „so“ ′a´ ``b''", '"don\'t" - \'it\' "is" "so" \'a\' "b"'),
        ("\u05e9\u05c1\u05b8\u05dc\u05d5\u05b9\u05dd", "\u05e9\u05dc\u05d5\u05dd"),  # Hebrew points
        ("ﬁve ½ №", "five 1⁄2 no"),
    ],
)
def test_letters_quotes_and_dashes_have_one_form(text, other):
    assert normalise(text) == normalise(other)


@pytest.mark.parametrize("text", ["がか", "\u0915\u093e \u0915\u0940", "c++ c#", "1.5", "한국어"])
def test_letters_and_signs_with_a_meaning_stay(text):
    assert normalise(text) == text


@pytest.mark.parametrize("texts", [["+++", "???"], ["\u0915\u093e " * 4, "\u0915\u0940 " * 4]])
def test_symbols_and_vowel_signs_of_hindi_count(texts):
    """Python's pattern for letters does not match these signs."""
    assert group_near_duplicates(texts) == [{texts[0]}, {texts[1]}]
