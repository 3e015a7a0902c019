"""The paper's recipes: each is taken, and each is what the paper says of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from contaccum.training.config import parse

FOLDER = Path(__file__).parents[1] / "configs" / "paper"
PAIRS = {"11gb": 8, "24gb": 32, "80gb": 128}
BANKS = {"msmarco": 1024, "nq": 2048, "trivia": 512, "webq": 128, "trec": 128}
EPOCHS = {"msmarco": 10, "nq": 40, "trivia": 40, "webq": 100, "trec": 100}
METHODS = ("in_batch", "grad_accum", "grad_cache", "contaccum")
RECIPES = [(data, memory, method) for data in BANKS for memory in PAIRS for method in METHODS]


def test_there_is_a_recipe_for_each_and_no_other() -> None:
    found = {str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*") if path.is_file()}
    assert found == {f"{data}/{memory}/{method}.yaml" for data, memory, method in RECIPES}


@pytest.mark.parametrize(("data", "memory", "method"), RECIPES)
def test_a_recipe_is_taken_and_says_what_the_paper_says(data: str, memory: str, method: str) -> None:
    path = FOLDER / data / memory / f"{method}.yaml"
    model, source, args = parse([str(path)])
    assert args.method == method and args.pairs_per_micro_batch == PAIRS[memory]
    assert args.total_train_batch_size == (PAIRS[memory] if method == "in_batch" else 128)
    assert args.bank_size == (BANKS[data] if method == "contaccum" else None)
    assert (args.num_train_epochs, args.warmup_steps) == (EPOCHS[data], 1237)
    assert (args.learning_rate, args.adam_epsilon, args.weight_decay, args.max_grad_norm) == (2e-5, 1e-8, 0.0, 2.0)
    assert (args.similarity, args.temperature, model.tied, model.pooling) == ("dot", 1.0, False, "cls")
    assert source.num_hard_negatives == 1 and args.output_dir == f"runs/paper/{data}/{memory}/{method}"
    if method == "contaccum":
        assert (args.drift_compensation, args.normalize_by, args.mask_duplicates) == ("none", "all", False)
    # A key that stands twice would silently count once.
    keys = [line.split(":")[0] for line in path.read_text().splitlines() if line and not line.startswith("#")]
    assert len(keys) == len(set(keys)) == len(yaml.safe_load(path.read_text()))
