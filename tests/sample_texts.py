"""Random sentences over a small vocabulary, and their features for a model."""

from typing import Any

import torch

WORDS = (  # noqa: SIM905  # sixty quoted words are harder to read
    "the a of in is was cat dog bird fish tree river stone cloud rain sun moon star city road "
    "house door window red blue green small large old new fast slow warm cold what where who when "
    "why how does do sits runs flies swims grows falls shines on under over near far with without "
    "and or not one two three four five six seven eight nine"
).split()


def sentences(count: int, seed: int = 0, length: int = 6) -> list[str]:
    """Return ``count`` distinct sentences of ``length`` random WORDS and the sentence's number."""
    generator = torch.Generator().manual_seed(seed)
    word_indices = torch.randint(len(WORDS), (count, length), generator=generator)
    texts = []
    for number, indices in enumerate(word_indices.tolist()):
        words = " ".join([WORDS[index] for index in indices])
        # The number makes the sentences distinct.
        texts.append(f"{words} {number}")
    return texts


def features(model: Any, n: int, columns: int = 2, seed: int = 0) -> list[dict[str, Any]]:
    """Return features of n queries and of n texts per further column, as losses receive them."""
    tasks = ["query"] + ["document"] * (columns - 1)
    features_by_column = []
    for column, task in enumerate(tasks):
        texts = sentences(n, seed=seed * 10 + column)
        features_by_column.append(model.preprocess(texts, task=task))
    return features_by_column
