"""Batches in the trainer: they resume bit for bit, and columns about rows are not encoded."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, DatasetDict, IterableDataset
from sample_texts import sentences
from sentence_transformers.base.sampler import GroupByLabelBatchSampler
from sentence_transformers.losses import MatryoshkaLoss
from transformers import set_seed

from contaccum import ContAccumLoss, ContAccumTrainer, ContAccumTrainingArguments, DualEncoder
from contaccum.data import load_training_data
from contaccum.data.samplers import EpochBatchSampler, PlannedBatchSampler
from contaccum.errors import ConfigError, DataError

SETTINGS: dict[str, dict[str, Any]] = {
    "no_duplicates": {"batch_sampler": "no_duplicates"},
    "lengths": {"train_sampling_strategy": "group_by_length"},
    "topics": {"topic_column": "topic"},
    "all": {
        "batch_sampler": "no_duplicates",
        "train_sampling_strategy": "group_by_length",
        "topic_column": "topic",
    },
}


def rows(n: int = 43) -> Dataset:
    """Every query in two rows, positives of different lengths, three topics."""
    queries = [text for text in sentences(-(-n // 2), 1) for _ in range(2)][:n]
    positives = [" ".join(text.split()[: 2 + i % 7]) + f" {i}" for i, text in enumerate(sentences(n, 2, 9))]
    return Dataset.from_dict({"query": queries, "positive": positives, "topic": [f"t{i % 3}" for i in range(n)]})


@pytest.fixture
def build(tiny_config: Any, tiny_tokenizer: Any) -> Any:
    def make() -> DualEncoder:
        set_seed(7)
        return DualEncoder.from_backbone(tiny_config, pooling="mean", normalize=True, tokenizer=tiny_tokenizer)

    return make


def arguments(folder: Path, **overrides: Any) -> ContAccumTrainingArguments:
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 3,
        "bank_size": 20,
        "num_train_epochs": 2,
        "learning_rate": 1e-3,
        "save_strategy": "no",
        "seed": 5,
        "disable_tqdm": True,
    }
    return ContAccumTrainingArguments(output_dir=str(folder), **{**settings, **overrides})


def trained(model: Any, args: ContAccumTrainingArguments, dataset: Any, resume: str | None = None) -> Any:
    """Weights, and the queries' first tokens of every micro-batch, in order."""
    seen: list[Any] = []
    trainer = ContAccumTrainer(model=model, args=args, train_dataset=dataset, quiet=True)
    step = trainer.training_step

    def spy(model: Any, inputs: dict[str, Any], *others: Any) -> Any:
        assert not [name for name in inputs if "topic" in name or "length" in name]
        seen.append(inputs["query_input_ids"].tolist())
        return step(model, inputs, *others)

    trainer.training_step = spy  # type: ignore[method-assign]
    trainer.train(resume_from_checkpoint=resume)
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}, seen


@pytest.mark.parametrize("kind", SETTINGS)
def test_resumed_run_equals_the_uninterrupted_one(build: Any, kind: str, tmp_path: Path) -> None:
    data = rows() if "topic_column" in SETTINGS[kind] else rows().remove_columns("topic")
    args = arguments(tmp_path / "a", save_strategy="steps", save_steps=1, **SETTINGS[kind])
    weights, seen = trained(build(), args, data)
    assert len(seen) == 22 and seen[:11] != seen[11:]
    for update in (2, 6):  # inside the first epoch and inside the second, of four updates each
        again, rest = trained(
            build(),
            arguments(tmp_path / str(update), **SETTINGS[kind]),
            data,
            str(tmp_path / "a" / f"checkpoint-{update}"),
        )
        assert rest == seen[22 - len(rest) :] and len(rest) == 22 - {2: 6, 6: 17}[update]
        assert [name for name, value in weights.items() if not torch.equal(value, again[name])] == []
    if "batch_sampler" in SETTINGS[kind]:
        assert all(len({tuple(query) for query in batch}) == len(batch) for batch in seen)


def batches_of(trainer: ContAccumTrainer) -> Any:
    sampler = trainer.get_train_dataloader().batch_sampler
    assert sampler in trainer._batch_samplers  # told the epoch
    return sampler


def test_arguments_choose_the_sampler(build: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def sampler(dataset: Any, **settings: Any) -> Any:
        trainer = ContAccumTrainer(model=build(), args=arguments(tmp_path, **settings), train_dataset=dataset)
        return batches_of(trainer)

    plain = sampler(rows().remove_columns("topic"))
    assert type(plain) is EpochBatchSampler
    hashed = sampler(rows().remove_columns("topic"), batch_sampler="no_duplicates_hashed")
    assert type(hashed) is PlannedBatchSampler and hashed.no_duplicates and hashed.lengths is None
    every = sampler(rows(), **SETTINGS["all"])
    assert every.no_duplicates and every.topics.tolist() == [i % 3 for i in range(43)]
    assert every.lengths.tolist() == [len(row["query"]) + len(row["positive"]) for row in rows()]
    assert every.length_window == 18  # six updates of three micro-batches
    assert not sampler(rows(), **SETTINGS["topics"]).no_duplicates
    labelled = rows().remove_columns("topic").add_column("label", [i % 3 for i in range(43)])
    assert type(sampler(labelled, batch_sampler="group_by_label")) is GroupByLabelBatchSampler
    counted = rows().remove_columns("topic").add_column("length", list(range(43)))
    assert sampler(counted, **SETTINGS["lengths"]).lengths.tolist() == list(range(43))


def test_start_says_how_batches_are_made(build: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = arguments(tmp_path, max_steps=1, **SETTINGS["all"])
    ContAccumTrainer(model=build(), args=args, train_dataset=rows()).train()
    out = capsys.readouterr().out
    assert "batches               no duplicates; similar lengths, sorted 18 at a time; one topic each\n" in out
    assert out.index("oldest bank entry") > out.index("bank rows")


def test_evaluation_data_may_have_the_columns_too(build: Any, tmp_path: Path) -> None:
    args = arguments(tmp_path, **SETTINGS["all"])
    trainer = ContAccumTrainer(model=build(), args=args, train_dataset=rows(), eval_dataset=rows(10))
    assert trainer.evaluate()["eval_loss"] == trainer.evaluate()["eval_loss"] > 0
    assert batches_of(trainer).topics is not None


def test_several_data_sets_keep_their_own_topics_and_are_told_epochs(build: Any, tmp_path: Path) -> None:
    parts = DatasetDict({"a": rows(20), "b": rows(31).select(range(30, -1, -1))})
    trainer = ContAccumTrainer(model=build(), args=arguments(tmp_path, **SETTINGS["topics"]), train_dataset=parts)
    whole = batches_of(trainer)
    assert [sampler.topics[:5].tolist() for sampler in whole.batch_samplers] == [[0, 1, 2, 0, 1]] * 2
    assert [len(sampler.topics) for sampler in whole.batch_samplers] == [20, 31]
    orders = []
    for epoch in (0, 1):
        for sampler in trainer._batch_samplers:
            sampler.set_epoch(epoch)
        orders.append(list(whole))
    assert orders[0] != orders[1] and all(sampler.epoch == 1 for sampler in whole.batch_samplers)


def test_data_that_cannot_be_grouped_is_refused(build: Any, tmp_path: Path) -> None:
    plain = rows().remove_columns("topic")
    with pytest.raises(ConfigError, match="topic_column=topic: the training data has only the columns query, positive"):
        ContAccumTrainer(model=build(), args=arguments(tmp_path, **SETTINGS["topics"]), train_dataset=plain)
    stream = IterableDataset.from_generator(lambda: iter(plain))
    args = arguments(tmp_path, max_steps=1, **SETTINGS["lengths"])
    with pytest.raises(ConfigError, match="group_by_length with streamed"):
        ContAccumTrainer(model=build(), args=args, train_dataset=stream)


def test_running_means_and_batches_of_one_topic_get_a_warning(
    build: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for compensation, warned in (("none", False), ("auto", True)):
        model = build()
        loss = MatryoshkaLoss(model, ContAccumLoss(model, bank_size=20, drift_compensation=compensation), [32, 16])
        with caplog.at_level(logging.WARNING, logger="contaccum.training.batches"):
            ContAccumTrainer(
                model=model, args=arguments(tmp_path, **SETTINGS["topics"]), train_dataset=rows(), loss=loss
            )
        assert ("no probe for drift" in caplog.text) == warned


def test_topics_are_read_with_the_pairs(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    records = [{"query": f"q{i}", "positive": f"p{i}", "topic": i % 2 if i else "zero"} for i in range(4)]
    path.write_text("\n".join(json.dumps(record) for record in records))
    data = load_training_data(path, topic_column="topic")
    assert data.dataset.column_names == ["query", "positive", "topic"]
    assert data.dataset["topic"][:] == ["zero", "1", "0", "1"]
    assert data.fingerprint != load_training_data(path).fingerprint
    with pytest.raises(DataError, match=r"pairs.jsonl:1: missing theme"):
        load_training_data(path, topic_column="theme")
    with pytest.raises(ConfigError, match="topic_column=query is the name of a text column"):
        load_training_data(path, topic_column="query")
