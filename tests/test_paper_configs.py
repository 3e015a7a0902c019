"""The paper's recipes: each is taken, with every method and memory size, and is what the paper says of it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from contaccum.training.config import parse

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
import reproduce_table1  # noqa: E402  # a script, which lies beside the package

BANKS = {"msmarco": 1024, "nq": 2048, "trivia": 512, "webq": 128, "trec": 128}
EPOCHS = {"msmarco": 10, "nq": 40, "trivia": 40, "webq": 100, "trec": 100}


@pytest.mark.parametrize("data", BANKS)
@pytest.mark.parametrize(("memory", "pairs"), [("11gb", 8), ("24gb", 32), ("80gb", 128)])
@pytest.mark.parametrize("method", reproduce_table1.METHODS)
def test_a_recipe_is_taken_and_says_what_the_paper_says(data: str, memory: str, pairs: int, method: str) -> None:
    args, rest = reproduce_table1._parse([])
    train = next(step for step in reproduce_table1.plan(data, memory, method, args, rest) if "train" in step.command)
    model, source, args = parse(train.command[1:])
    assert args.method == method and args.pairs_per_micro_batch == pairs
    assert args.total_train_batch_size == (pairs if method == "in_batch" else 128)
    assert args.bank_size == (BANKS[data] if method == "contaccum" else 0)
    assert (args.num_train_epochs, args.warmup_steps) == (EPOCHS[data], 1237)
    assert (args.learning_rate, args.adam_epsilon, args.weight_decay, args.max_grad_norm) == (2e-5, 1e-8, 0.0, 2.0)
    assert (args.similarity, args.temperature, model.tied, model.pooling) == ("dot", 1.0, False, "cls")
    assert source.num_hard_negatives == 1
    assert (args.drift_compensation, args.normalize_by, args.mask_duplicates) == ("none", "all", False)
