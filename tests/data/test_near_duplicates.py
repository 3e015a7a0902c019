"""Near-duplicates: groups of similar texts, in a time that is linear in the number of copies."""

import random

import pytest
from datasketch import MinHashLSH
from scipy.cluster.hierarchy import DisjointSet

from contaccum.data.near_duplicates import join_near_duplicates


def group_near_duplicates(texts: list[str]) -> list[set[str]]:
    """Return the groups of near-duplicates, sorted by their first text."""
    groups = DisjointSet(range(len(texts)))
    join_near_duplicates(texts, groups)
    text_groups = []
    for indices in groups.subsets():
        text_groups.append({texts[index] for index in indices})
    return sorted(text_groups, key=min)


def make_words(generator: random.Random, num_words: int) -> list[str]:
    """Return random words, "w0" to "w999999"."""
    return [f"w{generator.randrange(10**6)}" for _ in range(num_words)]


def make_changed_texts(num_texts: int) -> list[str]:
    """Return texts of twenty words: the first one, and copies in each of which a word differs."""
    generator = random.Random(0)
    words = make_words(generator, 20)
    texts = [" ".join(words)]
    for number in range(num_texts - 1):
        changed = list(words)
        changed[number % 20] = make_words(generator, 1)[0]
        texts.append(" ".join(changed))
    return texts


def test_texts_of_one_template_are_one_group_and_few_of_them_are_stored(monkeypatch):
    """If all of them were stored, the time would be quadratic in their number."""
    stored_indices: list[int] = []
    insert = MinHashLSH.insert

    def insert_and_record(self: MinHashLSH, index: int, *args: object, **kwargs: object) -> None:
        stored_indices.append(index)
        insert(self, index, *args, **kwargs)

    monkeypatch.setattr(MinHashLSH, "insert", insert_and_record)
    template = (
        "please tell me what the current account balance and the status of the order of the "
        "customer with the following number is: "
    )
    texts = [f"{template}{number:04d}" for number in range(300)]
    assert group_near_duplicates([*texts, "another text"]) == [{"another text"}, set(texts)]
    assert len(stored_indices) < 60


@pytest.mark.parametrize("seed", range(3))
def test_groups_do_not_depend_on_the_order_of_the_texts(seed):
    texts = make_changed_texts(60)
    # Texts with no near-duplicate. A seed above 0, because make_changed_texts uses seed 0.
    generator = random.Random(seed + 1)
    for _ in range(20):
        texts.append(" ".join(make_words(generator, 20)))
    shuffled_texts = random.Random(seed).sample(texts, len(texts))
    groups = group_near_duplicates(shuffled_texts)
    assert groups == group_near_duplicates(texts)
    assert sorted(map(len, groups)) == [1] * 20 + [60]


def test_vowel_signs_of_hindi_count():
    """Python's pattern for letters does not match these signs."""
    texts = ["\u0915\u093e " * 4, "\u0915\u0940 " * 4]
    assert group_near_duplicates(texts) == [{texts[0]}, {texts[1]}]


def test_texts_of_symbols_are_compared_as_they_are():
    assert group_near_duplicates(["+++", "???"]) == [{"+++"}, {"???"}]
