"""The order of training data: it depends only on seed and epoch, so that runs can resume."""

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
from contaccum.data.sampling import get_samplings
from contaccum.errors import DataError

SIZES = {"large": 31, "small": 9, "other": 5}


def make_records(n: int, seed: int = 1) -> list[dict[str, Any]]:
    """Queries with 1 to 3 positives, and 0 to 4 negatives."""
    queries = sentences(n, seed)
    passages = sentences(3 * n, seed + 1, 9)
    negatives = sentences(4 * n, seed + 2, 9)
    records = []
    for i in range(n):
        positives = [passages[3 * i + k] for k in range(1 + i % 3)]
        own_negatives = [negatives[4 * i + k] for k in range(i % 5)]
        records.append({"query": queries[i], "positives": positives, "negatives": own_negatives})
    return records


def write_records(folder: Path, name: str = "data", n: int = 43, seed: int = 1) -> str:
    return str(write_lines(folder / f"{name}.jsonl", make_records(n, seed)))


def assert_resumes_with_texts(load: Any, tmp_path: Path, *updates: int, **settings: Any) -> Any:
    """Assert that resumed runs end bit for bit equally, and train on the remaining texts.

    Returns:
        The trainer of the uninterrupted run, and the texts of its micro-batches.
    """
    texts = []

    def make(folder: Path, **saves: Any) -> Any:
        trainer = make_trainer(folder, load(), dropout=0.1, **settings, **saves)
        texts.append(record_texts(trainer))
        return trainer

    straight = assert_resumes(make, tmp_path, *updates)
    assert all(again and again == texts[0][-len(again) :] for again in texts[1:])
    return straight, texts[0]


def test_the_order_depends_on_the_data_seed_and_not_on_method_or_workers(tmp_path):
    path = write_records(tmp_path, n=13)

    def order(name: str, **settings: Any) -> list[tuple[str, ...]]:
        data = load_training_data(path, num_hard_negatives=2)
        trainer = make_trainer(tmp_path / name, data.dataset, **settings)
        texts = record_texts(trainer)
        trainer.train()
        return [row for batch in texts for row in batch]

    base = order("base")
    assert len(base) == 13
    assert order("weights", seed=6, data_seed=5) == base != order("seed", seed=6)
    assert order("workers", dataloader_num_workers=1) == base
    assert order("method", method="grad_cache") == base


def test_every_known_positive_reaches_the_loss(tmp_path):
    data = load_training_data(write_records(tmp_path), num_hard_negatives=2)
    assert data.known_positives is not None
    trainer = make_trainer(tmp_path / "run", data.dataset)
    assert trainer.loss._positives is not None
    batch = next(iter(trainer.get_train_dataloader()))
    assert batch["label"].shape == (4, 4) and batch["label"].dtype == torch.int64
    plain = load_training_data(write_records(tmp_path / "plain", n=1), num_hard_negatives=0)
    assert (
        plain.known_positives is None
        and make_trainer(tmp_path / "run", plain.dataset).loss._positives is None
    )


def make_repeated_queries() -> Dataset:
    """Return 43 pairs in which every query but the last has two rows."""
    queries = [text for text in sentences(22, 1) for _ in range(2)][:43]
    return Dataset.from_dict({"query": queries, "positive": sentences(43, 2, 9)})


def test_batches_without_duplicates_resume_bit_for_bit(tmp_path):
    settings = {"num_train_epochs": 2, "batch_sampler": "no_duplicates"}
    _, texts = assert_resumes_with_texts(make_repeated_queries, tmp_path, 6, **settings)
    queries = [[query for query, *_ in batch] for batch in texts]
    assert all(len(set(batch)) == len(batch) for batch in queries)


@pytest.mark.parametrize(
    "rows", [24, 19], ids=["whole updates in a pass", "micro-batches left over"]
)
def test_a_stream_resumes_bit_for_bit_in_any_of_its_passes(rows, tmp_path):
    def stream() -> Any:
        return make_pairs(rows).to_iterable_dataset(num_shards=3).shuffle(seed=1, buffer_size=8)

    settings = {"max_steps": 7, "gradient_accumulation_steps": 2}
    _, texts = assert_resumes_with_texts(stream, tmp_path, 1, 3, 4, 6, **settings)
    num_batches = 2 * (rows // 8)  # only whole updates of two micro-batches of four pairs
    passes = [
        [row for batch in texts[start : start + num_batches] for row in batch]
        for start in (0, num_batches)
    ]
    for pass_texts in passes:
        assert len(set(pass_texts)) == len(pass_texts) == 8 * (rows // 8)
    assert passes[0] != passes[1]  # another order
    assert len(texts) == 14  # two micro-batches in each of the 7 updates


def test_a_stream_without_a_whole_update_is_refused(tmp_path):
    stream = make_pairs(7).to_iterable_dataset()
    trainer = make_trainer(tmp_path, stream, max_steps=2, gradient_accumulation_steps=2)
    trainer.train()
    with pytest.raises(DataError, match="less than one update"):
        make_trainer(tmp_path, stream, max_steps=2, gradient_accumulation_steps=3).train()


@pytest.mark.parametrize("first_steps", [2, 3, 5])
def test_a_longer_run_on_a_stream_continues_at_the_next_row(tmp_path, first_steps):
    """A pass has three updates: the first run ends within the first or second pass, or between."""
    settings = {"gradient_accumulation_steps": 2, **SAVE_EVERY_UPDATE}
    texts = {}
    for name, steps in (("straight", [7]), ("longer", [first_steps, 7])):
        for max_steps in steps:
            trainer = make_trainer(
                tmp_path / name,
                make_pairs(24).to_iterable_dataset(),
                max_steps=max_steps,
                **settings,
            )
            texts[name] = record_texts(trainer)
            trainer.train(resume_from_checkpoint="auto")
    assert texts["longer"] == texts["straight"][2 * first_steps :]


def load_sets(folder: Path, **options: Any) -> Any:
    paths = {name: write_records(folder, name, n, 10 * n) for name, n in SIZES.items()}
    return load_training_sets(parse_training_sets([*paths.values()], options)).dataset


@pytest.mark.parametrize(
    ("sampler", "batches", "update"), [("proportional", 26, 7), ("round_robin", 12, 3)]
)
def test_a_run_on_several_sets_resumes_bit_for_bit_in_its_second_epoch(
    tmp_path, sampler, batches, update
):
    settings = {
        "multi_dataset_batch_sampler": sampler,
        "num_train_epochs": 2,
        "data_record": {"sets": {"small": "p"}},
    }
    load = partial(load_sets, tmp_path, num_hard_negatives=2)
    straight, texts = assert_resumes_with_texts(load, tmp_path, update, **settings)
    assert len(texts) == batches and str(texts[: batches // 2]) != str(texts[batches // 2 :])
    assert len(get_samplings(straight.train_dataset)) == 3
    record = json.loads((tmp_path / "straight" / "run.json").read_text())["data"]
    assert (
        record["rows"] == sum(SIZES.values())
        and record["sets"] == {"small": "p"}
        and record["fingerprint"]
    )


def test_a_micro_batch_comes_from_one_set_and_has_its_prompts(tmp_path):
    prompts = {name: {"query": "cat " if name == "large" else "dog "} for name in SIZES}
    model = tiny_encoder(query_prompt="bird ")
    trainer = make_trainer(tmp_path / "run", load_sets(tmp_path), model=model, prompts=prompts)
    texts = record_texts(trainer)
    trainer.train()
    first = [[query.split(" ")[0] for query, *_ in batch] for batch in texts]
    assert Counter(word for batch in first for word in batch) == {"cat": 31, "dog": 14}
    assert all(len({*batch}) == 1 for batch in first)


def test_columns_with_different_roles_get_them_by_set(tmp_path):
    data = make_pairs(9)
    parts = DatasetDict(
        {
            "one": data,
            "two": Dataset.from_dict({"positive": data["query"], "text": data["positive"]}),
        }
    )
    model = tiny_encoder(tied=False, query_prompt="q: ", passage_prompt="p: ")
    trainer = make_trainer(tmp_path, parts, model=model, max_steps=2)
    assert trainer.args.prompts == {
        "one": {"query": "q: ", "positive": "p: "},
        "two": {"positive": "q: ", "text": "p: "},
    }
    assert trainer.args.router_mapping["two"] == {"positive": "query", "text": "document"}
    trainer.train()
