"""Plant rewordings of training pairs, for studies of false negatives.

    python eval/study/plant_twins.py PAIRS.jsonl OUT.jsonl

Keeps some pairs and writes each several times, reworded without a model: clauses change places and some function words
go. No two texts are equal, so that no mask by ids knows that one twin's passage answers the other's question.
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


def reword(text: str, chance: random.Random) -> str:
    """The text with two of its clauses swapped, if it has as many, and about half of its function words left out."""
    clauses = re.split(r"\s*[,;]\s*", text)
    if len(clauses) > 1:
        first, second = sorted(chance.sample(range(len(clauses)), 2))
        clauses[first], clauses[second] = clauses[second], clauses[first]
    words = " , ".join(clauses).split()
    return " ".join(
        word for word in words if not FUNCTION_WORD.fullmatch(word.lower()) or chance.random() < 0.5
    )


def plant(pairs: list[dict[str, str]], kept: int, twins: int, seed: int) -> list[dict[str, str]]:
    """``twins`` of each of the first ``kept`` pairs, the pair itself one of them; fewer where none comes out new."""
    chance, planted = random.Random(seed), []
    for pair in pairs[:kept]:
        forms = {(pair["query"], pair["positive"])}
        for _ in range(20 * twins):
            form = (reword(pair["query"], chance), reword(pair["positive"], chance))
            if len(forms) < twins and all(
                form[0] != query and form[1] != passage for query, passage in forms
            ):
                forms.add(form)
        planted += [{"query": query, "positive": passage} for query, passage in sorted(forms)]
    return planted


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "pairs",
        type=Path,
        help="lines of {query, positive}, as eval/study/split_pairs.py writes them",
    )
    parser.add_argument("output", type=Path)
    parser.add_argument("--kept", type=int, default=4000)
    parser.add_argument("--twins", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    pairs = [json.loads(line) for line in args.pairs.read_text(encoding="utf-8").splitlines()]
    planted = plant(pairs, args.kept, args.twins, args.seed)
    args.output.write_text("".join(json.dumps(pair) + "\n" for pair in planted), encoding="utf-8")
    print(f"{args.output}: {len(planted):,} pairs, of {min(args.kept, len(pairs)):,}")
