"""Training on drawn rows: resuming, workers, seeds, and masks that know every positive."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import DatasetDict
from dense_reference import brute_force_mask, dense_loss
from sample_texts import sentences
from test_trainer import arguments, build, log_of, pairs, state_of  # noqa: F401  # build is a fixture

from contaccum import ContAccumTrainer
from contaccum.comparison.trainer import ComparedTrainer
from contaccum.data import TrainingData, load_training_data
from contaccum.data.draws import draws_of
from contaccum.errors import ConfigError
from contaccum.training.command import load_data
from contaccum.training.config import parse

N = 43


def records() -> list[dict[str, Any]]:
    """Queries with 1 to 3 positives, one of which another record tells of; 0 to 4 negatives, some a positive."""
    queries, passages, negatives = sentences(N, 1), sentences(3 * N, 2, 9), sentences(4 * N, 3, 9)
    found = []
    for i in range(N):
        several = [passages[3 * i + k] for k in range(1 + i % 3)]
        listed = [negatives[4 * i + k] for k in range(i % 5)]
        # Every seventh query is asked again, with another positive; every fifth has a positive of the one before it.
        query = queries[i - 1] if i % 7 == 1 else queries[i]
        found.append({"query": query, "positives": several, "negatives": [*listed, passages[3 * i - 3]][: 1 + i % 5]})
    found[3]["negatives"] = found[4]["negatives"] = []
    return found


def load(folder: Path, **settings: Any) -> TrainingData:
    path = folder / "drawn.jsonl"
    if not path.exists():
        path.write_text("".join(json.dumps(record) + "\n" for record in records()))
    return load_training_data(path, **{"num_hard_negatives": 2, **settings})


@pytest.mark.slow
def test_a_run_on_drawn_rows_resumes_bit_for_bit(build: Any, tmp_path: Path) -> None:  # noqa: F811
    args = arguments(tmp_path / "straight", save_strategy="steps", save_steps=1)
    straight = ContAccumTrainer(model=build(), args=args, train_dataset=load(tmp_path).dataset)
    straight.train()
    expected = state_of(straight)
    for update in (2, 4, 6):  # inside the first epoch, at its end, inside the second
        resumed = ContAccumTrainer(
            model=build(), args=arguments(tmp_path / str(update)), train_dataset=load(tmp_path).dataset
        )
        resumed.train(resume_from_checkpoint=str(tmp_path / "straight" / f"checkpoint-{update}"))
        state = state_of(resumed)
        assert [key for key in expected if not torch.equal(state[key], expected[key])] == []
        losses = [line["loss"] for line in log_of(tmp_path / "straight")]
        assert [line["loss"] for line in log_of(tmp_path / str(update))] == losses[update:]


def test_what_is_drawn_depends_on_the_seed_and_not_on_workers(build: Any, tmp_path: Path) -> None:  # noqa: F811
    def order(name: str, **settings: Any) -> str:
        data = load(tmp_path)
        args = arguments(tmp_path / name, **settings)
        trainer = ComparedTrainer(model=build(), args=args, train_dataset=data.dataset, quiet=True)
        trainer.train()
        assert (data.transform.seed, data.transform.epoch) == (args.data_seed or args.seed, 1)
        found = trainer.data_order()
        assert found is not None
        return found

    base = order("base")
    assert order("workers", dataloader_num_workers=2) == base
    assert order("other weights", seed=6, data_seed=5) == base != order("seed", seed=6)
    assert order("method", method="grad_accum", bank_size=None) == base


def test_every_known_positive_is_masked_in_batch_and_bank(build: Any, tmp_path: Path) -> None:  # noqa: F811
    """The loss of the trainer's own batches against one large matrix, masked by all that the file tells."""
    bank_size = 16
    data = load(tmp_path)
    args = arguments(tmp_path / "run", bank_size=bank_size, drift_compensation="none")
    trainer = ContAccumTrainer(model=build(), args=args, train_dataset=data.dataset)
    known = [(record["query"], positive) for record in records() for positive in record["positives"]]
    loss, model = trainer.loss.train(), trainer.model.eval()  # in this order: the loss holds the model
    bank: list[list[str]] = []
    masked = more = 0
    for epoch in range(2):
        data.transform.set_epoch(epoch, 5)
        for inputs in trainer.get_train_dataloader():
            features, labels = trainer.collect_features(inputs)
            rows = [trainer.processing_class.batch_decode(x["input_ids"], skip_special_tokens=True) for x in features]
            rows = [list(row) for row in zip(*rows, strict=True)]
            every = rows + bank
            with torch.no_grad():
                texts = [[row[column] for row in every] for column in range(4)]
                embedded = [model(model.preprocess(column))["sentence_embedding"] for column in texts]
            places = list(range(len(every)))
            mask = brute_force_mask(texts[0], places, texts[1] + texts[2] + texts[3], known)
            reference = dense_loss([embedded[0]], embedded[1:], places, len(rows), 0.05, "cos", masked=mask)
            own = [(row[0], row[1]) for row in every]
            masked += int(mask.sum())
            more += int((mask & ~brute_force_mask(texts[0], places, texts[1] + texts[2] + texts[3], own)).sum())
            assert loss(features, labels).item() == pytest.approx(reference.item(), rel=2e-5)
            bank = (bank + rows)[-bank_size:]
    # Most of what is masked, neither batch nor bank could have told.
    assert masked > more > 50


def test_data_sets_without_several_positives_bring_no_labels(build: Any, tmp_path: Path) -> None:  # noqa: F811
    rows = records()
    for i, record in enumerate(rows):
        record |= {"query": f"{record['query']} {i}", "positives": record["positives"][:1]}
    (tmp_path / "drawn.jsonl").write_text("".join(json.dumps(record) + "\n" for record in rows))
    data = load(tmp_path)
    assert data.transform is not None and data.known_positives is None
    trainer = ContAccumTrainer(model=build(), args=arguments(tmp_path / "run"), train_dataset=data.dataset)
    assert "label" not in next(iter(trainer.get_train_dataloader()))
    assert trainer.loss._positives is None
    trainer.train()


@pytest.mark.parametrize("method", ["in_batch", "grad_accum", "grad_cache", "contaccum", "pre_batch"])
def test_every_method_trains_on_drawn_rows_and_saves(build: Any, method: str, tmp_path: Path) -> None:  # noqa: F811
    data = load(tmp_path)
    args = arguments(tmp_path / "run", method, num_train_epochs=1)
    trainer = ContAccumTrainer(model=build(), args=args, train_dataset=data.dataset, data_fingerprint=data.fingerprint)
    trainer.train()
    trainer.save_model(str(tmp_path / "run"))
    assert json.loads((tmp_path / "run" / "run.json").read_text())["data"]["fingerprint"] == data.fingerprint


def test_a_fingerprint_that_is_not_given_is_of_what_is_stored(build: Any, tmp_path: Path) -> None:  # noqa: F811
    found = set()
    for epoch in range(2):
        data = load(tmp_path)
        data.transform.set_epoch(epoch)
        trainer = ContAccumTrainer(
            model=build(), args=arguments(tmp_path / "r", max_steps=1), train_dataset=data.dataset
        )
        trainer.train()
        found.add(json.loads((tmp_path / "r" / "run.json").read_text())["data"]["fingerprint"])
    assert len(found) == 1 and len(found.pop()) == 64


def test_several_data_sets_share_what_they_know(build: Any, tmp_path: Path) -> None:  # noqa: F811
    one, two = load(tmp_path), load(tmp_path, positives="first")
    parts = DatasetDict({"one": one.dataset, "two": two.dataset, "plain": pairs(9, negatives=2)})
    trainer = ContAccumTrainer(model=build(), args=arguments(tmp_path / "run", max_steps=2), train_dataset=parts)
    assert draws_of(trainer.train_dataset) == [one.transform, two.transform]
    trainer.train()
    assert one.transform.seed == two.transform.seed == 5


def test_evaluation_rows_may_be_drawn_too(build: Any, tmp_path: Path) -> None:  # noqa: F811
    split = load(tmp_path).dataset.train_test_split(11, seed=0)
    args = arguments(tmp_path / "run", eval_strategy="epoch")
    trainer = ContAccumTrainer(model=build(), args=args, train_dataset=split["train"], eval_dataset=split["test"])
    trainer.train()
    assert trainer.evaluate()["eval_loss"] > 0


def test_topics_lengths_and_duplicates_go_by_what_is_stored(build: Any, tmp_path: Path) -> None:  # noqa: F811
    settings = {"batch_sampler": "no_duplicates", "train_sampling_strategy": "group_by_length"}
    rows = [{**record, "topic": f"topic {i % 3}"} for i, record in enumerate(records())]
    (tmp_path / "drawn.jsonl").write_text("".join(json.dumps(record) + "\n" for record in rows))
    data = load(tmp_path, topic_column="topic")
    args = arguments(tmp_path / "run", topic_column="topic", **settings)
    trainer = ContAccumTrainer(model=build(), args=args, train_dataset=data.dataset)
    assert draws_of(trainer.train_dataset) == [data.transform]
    sampler: Any = trainer.get_train_dataloader().batch_sampler
    stored = data.dataset.with_format(None)
    texts = [[row[name] for name in stored.column_names[:4]] for row in stored]
    assert sampler.lengths.tolist() == [sum(len(text or "") for text in row) for row in texts]
    trainer.train()


def test_batches_by_label_are_refused_where_the_label_is_a_number(build: Any, tmp_path: Path) -> None:  # noqa: F811
    args = arguments(tmp_path / "run", batch_sampler="group_by_label")
    with pytest.raises(ConfigError, match="batch_sampler=group_by_label with training data whose label"):
        ContAccumTrainer(model=build(), args=args, train_dataset=load(tmp_path).dataset)


def test_settings_of_data_reach_the_reader_from_the_command_line(tmp_path: Path) -> None:
    load(tmp_path)
    options = ["--model=m", f"--train_data={tmp_path / 'drawn.jsonl'}", f"--output_dir={tmp_path}"]
    options += ["--num_hard_negatives=2", "--positives=all", "--negatives_from=3", "--missing_negatives=drop"]
    arguments_ = parse(options)[1]
    data = load_data(arguments_)
    direct = load(tmp_path, positives="all", negatives_from=3, missing_negatives="drop")
    assert data.fingerprint == direct.fingerprint != load(tmp_path).fingerprint
    (tmp_path / "c.yaml").write_text("draw_negatives: false\nnum_hard_negatives: 1\n")
    assert not parse([str(tmp_path / "c.yaml"), *options[:3]])[1].draw_negatives


def test_model_cards_show_texts(build: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:  # noqa: F811
    data = load(tmp_path)
    trainer = ContAccumTrainer(model=build(), args=arguments(tmp_path / "r", max_steps=1), train_dataset=data.dataset)
    trainer.train()
    with caplog.at_level(logging.WARNING):
        trainer.create_model_card()
        trainer.save_model(str(tmp_path / "r"))
    card = (tmp_path / "r" / "README.md").read_text()
    assert "Error while generating model card" not in card + caplog.text and "negative_1" in card
