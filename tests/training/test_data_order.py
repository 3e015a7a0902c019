"""Sampled rows, several sets and planned batches in the trainer: a function of seed and epoch alone."""

import json
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, DatasetDict
from sample_texts import sentences
from small_data import write_lines
from tiny_models import tiny_encoder
from tiny_runs import SAVE_EVERY_UPDATE, assert_resumes, make_pairs, make_trainer, record_texts

from contaccum.data import load_training_data, load_training_sets, parse_training_sets
from contaccum.data.sampling import samplings_of

SIZES = {"large": 31, "small": 9, "other": 5}


def records(n: int, seed: int = 1) -> list[dict[str, Any]]:
    """Queries with 1 to 3 positives, and 0 to 4 negatives."""
    queries, passages, negatives = (
        sentences(n, seed),
        sentences(3 * n, seed + 1, 9),
        sentences(4 * n, seed + 2, 9),
    )
    found = []
    for i in range(n):
        several = [passages[3 * i + k] for k in range(1 + i % 3)]
        listed = [negatives[4 * i + k] for k in range(i % 5)]
        found.append({"query": queries[i], "positives": several, "negatives": listed})
    return found


def write(folder: Path, name: str = "data", n: int = 43, seed: int = 1) -> str:
    return str(write_lines(folder / f"{name}.jsonl", records(n, seed)))


def assert_resumes_with_texts(load: Any, tmp_path: Path, *updates: int, **settings: Any) -> Any:
    """Resumed runs also train on the texts that were left, all of which are returned beside the straight run."""
    seen = []

    def make(folder: Path, **saves: Any) -> Any:
        trainer = make_trainer(folder, load(), dropout=0.1, **settings, **saves)
        seen.append(record_texts(trainer))
        return trainer

    straight = assert_resumes(make, tmp_path, *updates)
    assert all(again and again == seen[0][-len(again) :] for again in seen[1:])
    return straight, seen[0]


def test_the_order_depends_on_the_data_seed_and_not_on_method_or_workers(tmp_path):
    path = write(tmp_path, n=13)

    def order(name: str, **settings: Any) -> list[tuple[str, ...]]:
        data = load_training_data(path, num_hard_negatives=2)
        trainer = make_trainer(tmp_path / name, data.dataset, **settings)
        seen = record_texts(trainer)
        trainer.train()
        return [row for batch in seen for row in batch]

    base = order("base")
    assert len(base) == 13
    assert order("weights", seed=6, data_seed=5) == base != order("seed", seed=6)
    assert order("workers", dataloader_num_workers=1) == base
    assert order("method", method="grad_cache") == base


def test_every_known_positive_reaches_the_loss(tmp_path):
    data = load_training_data(write(tmp_path), num_hard_negatives=2)
    assert data.known_positives is not None
    trainer = make_trainer(tmp_path / "run", data.dataset)
    assert trainer.loss._positives is not None
    batch = next(iter(trainer.get_train_dataloader()))
    assert batch["label"].shape == (4, 4) and batch["label"].dtype == torch.int64
    plain = load_training_data(write(tmp_path / "plain", n=1), num_hard_negatives=0)
    assert (
        plain.known_positives is None
        and make_trainer(tmp_path / "run", plain.dataset).loss._positives is None
    )


def in_two_rows_each() -> Dataset:
    """Every query in two rows, but for the last."""
    queries = [text for text in sentences(22, 1) for _ in range(2)][:43]
    return Dataset.from_dict({"query": queries, "positive": sentences(43, 2, 9)})


def test_batches_without_duplicates_resume_bit_for_bit(tmp_path):
    given = {"num_train_epochs": 2, "batch_sampler": "no_duplicates"}
    _, seen = assert_resumes_with_texts(in_two_rows_each, tmp_path, 6, **given)
    queries = [[query for query, *_ in batch] for batch in seen]
    assert all(len(set(batch)) == len(batch) for batch in queries)


@pytest.mark.parametrize(
    "rows", [24, 19], ids=["whole updates in a pass", "micro-batches left over"]
)
def test_a_stream_resumes_bit_for_bit_in_any_of_its_passes(rows, tmp_path):
    def stream() -> Any:
        return make_pairs(rows).to_iterable_dataset(num_shards=3).shuffle(seed=1, buffer_size=8)

    given = {"max_steps": 7, "gradient_accumulation_steps": 2}
    _, seen = assert_resumes_with_texts(stream, tmp_path, 1, 3, 4, 6, **given)
    num_batches = -(-rows // 4)
    passes = [
        [row for batch in seen[start : start + num_batches] for row in batch]
        for start in (0, num_batches)
    ]
    # A pass has every row, in an order of its own.
    assert (
        sorted(passes[0]) == sorted(passes[1]) and passes[0] != passes[1] and len(passes[0]) == rows
    )


def test_a_longer_run_on_a_stream_goes_on_at_the_same_row(tmp_path):
    given = {"gradient_accumulation_steps": 2, **SAVE_EVERY_UPDATE}
    texts = {}
    for name, steps in (("straight", [7]), ("longer", [5, 7])):
        for max_steps in steps:
            trainer = make_trainer(
                tmp_path / name, make_pairs(24).to_iterable_dataset(), max_steps=max_steps, **given
            )
            texts[name] = record_texts(trainer)
            trainer.train(resume_from_checkpoint="auto")
    assert texts["longer"] == texts["straight"][-4:]


def sets(folder: Path, **given: Any) -> Any:
    paths = {name: write(folder, name, n, 10 * n) for name, n in SIZES.items()}
    return load_training_sets(parse_training_sets([*paths.values()], given)).dataset


@pytest.mark.parametrize(
    ("sampler", "batches", "update"), [("proportional", 26, 7), ("round_robin", 12, 3)]
)
def test_a_run_on_sampled_rows_of_several_sets_resumes_bit_for_bit_in_its_second_epoch(
    tmp_path, sampler, batches, update
):
    settings = {
        "multi_dataset_batch_sampler": sampler,
        "num_train_epochs": 2,
        "data_record": {"sets": {"small": "p"}},
    }
    load = partial(sets, tmp_path, num_hard_negatives=2)
    straight, seen = assert_resumes_with_texts(load, tmp_path, update, **settings)
    assert len(seen) == batches and str(seen[: batches // 2]) != str(seen[batches // 2 :])
    assert len(samplings_of(straight.train_dataset)) == 3
    record = json.loads((tmp_path / "straight" / "run.json").read_text())["data"]
    assert (
        record["rows"] == sum(SIZES.values())
        and record["sets"] == {"small": "p"}
        and record["fingerprint"]
    )


def test_a_micro_batch_is_of_one_set_with_its_own_prompts(tmp_path):
    prompts = {name: {"query": "cat " if name == "large" else "dog "} for name in SIZES}
    model = tiny_encoder(query_prompt="bird ")
    trainer = make_trainer(tmp_path / "run", sets(tmp_path), model=model, prompts=prompts)
    seen = record_texts(trainer)
    trainer.train()
    first = [[query.split(" ")[0] for query, *_ in batch] for batch in seen]
    assert Counter(word for batch in first for word in batch) == {"cat": 31, "dog": 14}
    assert all(len({*batch}) == 1 for batch in first)


def test_columns_that_mean_two_things_get_their_roles_by_set(tmp_path):
    one = make_pairs(9)
    parts = DatasetDict(
        {"one": one, "two": Dataset.from_dict({"positive": one["query"], "text": one["positive"]})}
    )
    model = tiny_encoder(tied=False, query_prompt="q: ", passage_prompt="p: ")
    trainer = make_trainer(tmp_path, parts, model=model, max_steps=2)
    assert trainer.args.prompts == {
        "one": {"query": "q: ", "positive": "p: "},
        "two": {"positive": "q: ", "text": "p: "},
    }
    assert trainer.args.router_mapping["two"] == {"positive": "query", "text": "document"}
    trainer.train()
