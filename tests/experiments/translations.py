"""Question-passage pairs that a tiny model learns in seconds."""

from __future__ import annotations

import random

from sample_texts import WORDS

HALF = len(WORDS) // 2


def make_translations(count: int, seed: int) -> list[dict[str, str]]:
    """Return pairs whose passage has another word for each word of the query.

    Query and passage have no word in common, so BM25 finds nothing.
    """
    generator = random.Random(seed)
    pairs = []
    for _ in range(count):
        words = [generator.randrange(HALF) for _ in range(5)]
        query = " ".join(WORDS[word] for word in words)
        passage = " ".join(WORDS[HALF + word] for word in words)
        pairs.append({"query": query, "positive": passage})
    return pairs


def make_questions(count: int, seed: int) -> list[dict[str, str]]:
    """Return pairs with four queries for each passage, which have its words in any order.

    Every second passage is a translation with one word of the query, so BM25 finds some of them.
    """
    generator = random.Random(seed)
    pairs = []
    for number, pair in enumerate(make_translations(count // 4, seed)):
        words = pair["query"].split()
        passage = pair["positive"]
        if number % 2:
            passage += f" {words[0]}"
        for _ in range(4):
            query = " ".join(generator.sample(words, len(words)))
            pairs.append({"query": query, "positive": passage})
    return pairs
