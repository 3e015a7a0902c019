"""Add reworded copies of training pairs to a data set, for studies of false negatives.

    python eval/study/plant_twins.py PAIRS.jsonl OUT.jsonl

The program selects the first pairs and writes each pair together with reworded copies, its twins.
It rewords without a model: two clauses swap places and some function words are removed. The texts
of all twins are different, so that a mask by text ids cannot detect that the passage of one twin
answers the question of another twin.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from pathlib import Path

FUNCTION_WORD = re.compile(
    "a|an|and|as|at|by|did|do|does|for|from|in|is|its|of|on|or|that|the|this|to|was|were|with"
)


def reword(text: str, rng: random.Random) -> str:
    """Swap two random clauses of a text and remove about half of its function words."""
    clauses = re.split(r"\s*[,;]\s*", text)
    if len(clauses) > 1:
        first, second = sorted(rng.sample(range(len(clauses)), 2))
        clauses[first], clauses[second] = clauses[second], clauses[first]
    words = []
    for word in " , ".join(clauses).split():
        is_function_word = FUNCTION_WORD.fullmatch(word.lower()) is not None
        if is_function_word and rng.random() >= 0.5:
            continue
        words.append(word)
    return " ".join(words)


def add_twins(
    pairs: list[dict[str, str]], num_pairs: int, num_twins: int, seed: int
) -> list[dict[str, str]]:
    """Return the first ``num_pairs`` pairs, each in up to ``num_twins`` versions.

    The original pair is one of the versions. There are fewer versions if a pair is too short to be
    reworded differently often enough.
    """
    rng = random.Random(seed)
    all_pairs = []
    for pair in pairs[:num_pairs]:
        versions = {(pair["query"], pair["positive"])}
        for _ in range(20 * num_twins):
            query = reword(pair["query"], rng)
            passage = reword(pair["positive"], rng)
            is_new_query = query not in {version[0] for version in versions}
            is_new_passage = passage not in {version[1] for version in versions}
            if len(versions) < num_twins and is_new_query and is_new_passage:
                versions.add((query, passage))
        for query, passage in sorted(versions):
            all_pairs.append({"query": query, "positive": passage})
    return all_pairs


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "pairs",
        type=Path,
        help="jsonl file with query and positive, as written by eval/study/split_pairs.py",
    )
    parser.add_argument("output", type=Path)
    parser.add_argument("--kept", type=int, default=4000, help="number of pairs to select")
    parser.add_argument(
        "--twins", type=int, default=4, help="versions of each pair, including the original"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    pairs = [json.loads(line) for line in args.pairs.read_text(encoding="utf-8").splitlines()]
    all_pairs = add_twins(pairs, args.kept, args.twins, args.seed)
    args.output.write_text("".join(json.dumps(pair) + "\n" for pair in all_pairs), encoding="utf-8")
    num_selected = min(args.kept, len(pairs))
    print(f"{args.output}: {len(all_pairs):,} pairs, from {num_selected:,} original pairs")


if __name__ == "__main__":
    main()
