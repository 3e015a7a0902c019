"""A trainer of a tiny model, ready to run, for tests of what may happen to runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from sample_texts import sentences
from transformers import BertConfig, set_seed

from contaccum import ContAccumTrainer, ContAccumTrainingArguments, DualEncoder


@pytest.fixture(scope="session")
def trainer_in(tiny_tokenizer: Any) -> Any:
    """Makes a trainer: micro-batches of 4, 3 an update, 12 pairs to each of 3 updates; dropout off unless asked for."""

    def make(
        folder: Path,
        rows: int = 36,
        tied: bool = True,
        dropout: float = 0.0,
        negatives: int = 0,
        evaluator: Any = None,
        **settings: Any,
    ) -> ContAccumTrainer:
        set_seed(7)
        config = BertConfig(
            vocab_size=len(tiny_tokenizer),
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=16,
            max_position_embeddings=64,
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
        )
        model = DualEncoder.from_backbone(config, tied=tied, pooling="mean", normalize=True, tokenizer=tiny_tokenizer)
        columns = {"query": sentences(rows, 1), "positive": sentences(rows, 2, 9)}
        columns |= {f"negative_{i + 1}": sentences(rows, 3 + i) for i in range(negatives)}
        given = {
            "method": "contaccum",
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 3,
            "learning_rate": 1e-3,
            "warmup_steps": 2,
            "num_train_epochs": 1,
            "save_strategy": "no",
            "seed": 5,
            "disable_tqdm": True,
        } | settings
        if given["method"] in ("contaccum", "pre_batch"):
            given.setdefault("bank_size", 20)
        args = ContAccumTrainingArguments(output_dir=str(folder), **given)
        data = Dataset.from_dict(columns)
        evaluated = data if "eval_strategy" in given and evaluator is None else None
        return ContAccumTrainer(
            model=model, args=args, train_dataset=data, eval_dataset=evaluated, evaluator=evaluator, quiet=True
        )

    return make
