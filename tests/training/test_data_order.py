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
from tiny_runs import assert_resumes, make_pairs, make_trainer, record_texts

from contaccum.data import load_training_data, load_training_sets, parse_training_sets
from contaccum.data.sampling import get_samplings, text_ids

SIZES = {"large": 31, "small": 9, "other": 5}
"""Number of queries of each training set."""

Batches = list[list[tuple[str, ...]]]
"""The texts of each micro-batch, row by row: query, positive, negatives."""


def make_records(n: int, seed: int = 1) -> list[dict[str, Any]]:
    """Make n queries with 1 to 3 positives and 0 to 4 negatives each."""
    queries = sentences(n, seed)
    passages = sentences(3 * n, seed + 1, 9)
    negatives = sentences(4 * n, seed + 2, 9)
    records = []
    for i, query in enumerate(queries):
        num_positives = 1 + i % 3
        num_negatives = i % 5
        record = {
            "query": query,
            "positives": passages[3 * i : 3 * i + num_positives],
            "negatives": negatives[4 * i : 4 * i + num_negatives],
        }
        records.append(record)
    return records


def write_records(folder: Path, name: str = "data", n: int = 43, seed: int = 1) -> str:
    """Write the records of `make_records` to a file; return its path."""
    return str(write_lines(folder / f"{name}.jsonl", make_records(n, seed)))


def assert_resumes_with_texts(
    load: Any, tmp_path: Path, *updates: int, **settings: Any
) -> tuple[Any, Batches]:
    """Assert as `assert_resumes` does, and that resumed runs train on the remaining texts.

    ``load`` returns the training data. The result is the trainer of the uninterrupted run, and the
    texts of its micro-batches.
    """
    texts_of_runs: list[Batches] = []

    def make(folder: Path, **saves: Any) -> Any:
        trainer = make_trainer(folder, load(), dropout=0.1, **settings, **saves)
        texts_of_runs.append(record_texts(trainer))
        return trainer

    straight = assert_resumes(make, tmp_path, *updates)
    straight_texts = texts_of_runs[0]
    for resumed_texts in texts_of_runs[1:]:
        assert len(resumed_texts) > 0
        assert resumed_texts == straight_texts[-len(resumed_texts) :]
    return straight, straight_texts


def test_the_order_depends_on_the_data_seed_and_not_on_method_or_workers(tmp_path):
    path = write_records(tmp_path, n=13)

    def train_and_list_rows(name: str, **settings: Any) -> list[tuple[str, ...]]:
        data = load_training_data(path, num_hard_negatives=2)
        trainer = make_trainer(tmp_path / name, data.dataset, **settings)
        texts = record_texts(trainer)
        trainer.train()
        return [row for batch in texts for row in batch]

    expected = train_and_list_rows("base")  # by default, seed 5 is also the seed of the data
    assert len(expected) == 13
    assert train_and_list_rows("weights", seed=6, data_seed=5) == expected
    assert train_and_list_rows("seed", seed=6) != expected
    assert train_and_list_rows("workers", dataloader_num_workers=1) == expected
    assert train_and_list_rows("method", method="grad_cache") == expected


def test_every_known_positive_reaches_the_loss(tmp_path):
    records = make_records(43)
    data = load_training_data(write_records(tmp_path), num_hard_negatives=2)
    trainer = make_trainer(tmp_path / "run", data.dataset)
    table = trainer.loss._positives
    assert table is not None

    passages = [passage for record in records for passage in record["positives"]]
    query_ids = torch.from_numpy(text_ids(record["query"] for record in records))
    passage_ids = torch.from_numpy(text_ids(passages))
    is_listed = table.passages_by_query.contains(query_ids, passage_ids)
    for record, listed in zip(records, is_listed.tolist(), strict=True):
        several = len(record["positives"]) > 1  # a single positive is in the query's own row
        for passage, passage_is_listed in zip(passages, listed, strict=True):
            assert passage_is_listed == (several and passage in record["positives"])
    # The ids of the table are those beside the texts of a batch.
    labels = next(iter(trainer.get_train_dataloader()))["label"]
    assert labels.dtype == torch.int64
    assert set(labels[:, 0].tolist()) <= set(query_ids.tolist())
    assert set(labels[:, 1].tolist()) <= set(passage_ids.tolist())


def make_repeated_queries() -> Dataset:
    """Return 43 pairs in which every query but the last has two rows."""
    queries = [query for query in sentences(22, 1) for _ in range(2)]
    return Dataset.from_dict({"query": queries[:43], "positive": sentences(43, 2, 9)})


def test_batches_without_duplicates_resume_bit_for_bit(tmp_path):
    settings = {"num_train_epochs": 2, "batch_sampler": "no_duplicates"}
    _, texts = assert_resumes_with_texts(make_repeated_queries, tmp_path, 6, **settings)
    for batch in texts:
        queries = [query for query, _ in batch]
        assert len(set(queries)) == len(queries)


def load_sets(folder: Path, **options: Any) -> Any:
    """Write the training sets of SIZES to files and load them."""
    paths = [write_records(folder, name, n, seed=10 * n) for name, n in SIZES.items()]
    return load_training_sets(parse_training_sets(paths, options)).dataset


@pytest.mark.parametrize(
    ("sampler", "num_batches", "update"), [("proportional", 26, 7), ("round_robin", 12, 3)]
)
def test_a_run_on_several_sets_resumes_bit_for_bit_in_its_second_epoch(
    tmp_path, sampler, num_batches, update
):
    """The sets have 8, 3 and 2 micro-batches; "round_robin" takes 2 of each."""
    settings = {
        "multi_dataset_batch_sampler": sampler,
        "num_train_epochs": 2,
        "data_record": {"sets": {"small": "p"}},
    }
    load = partial(load_sets, tmp_path, num_hard_negatives=2)
    straight, texts = assert_resumes_with_texts(load, tmp_path, update, **settings)
    assert len(texts) == num_batches
    first_epoch = texts[: num_batches // 2]
    second_epoch = texts[num_batches // 2 :]
    assert first_epoch != second_epoch
    assert len(get_samplings(straight.train_dataset)) == 3
    record = json.loads((tmp_path / "straight" / "identity.json").read_text())["data"]
    assert record["rows"] == sum(SIZES.values())
    assert record["sets"] == {"small": "p"}
    assert record["fingerprint"]


def test_a_micro_batch_comes_from_one_set_and_has_its_prompts(tmp_path):
    prompts = {
        "large": {"query": "cat "},
        "small": {"query": "dog "},
        "other": {"query": "fish "},
    }
    model = tiny_encoder(query_prompt="bird ")
    trainer = make_trainer(tmp_path / "run", load_sets(tmp_path), model=model, prompts=prompts)
    texts = record_texts(trainer)
    trainer.train()
    num_queries: Counter[str] = Counter()
    for batch in texts:
        first_words = [query.split(" ")[0] for query, *_ in batch]
        assert len(set(first_words)) == 1
        num_queries.update(first_words)
    assert num_queries == {"cat": 31, "dog": 9, "fish": 5}


def test_columns_with_different_roles_get_them_by_set(tmp_path):
    """The column "positive" has passages in the first set, and queries in the second."""
    first = make_pairs(9)
    second = Dataset.from_dict({"positive": first["query"], "text": first["positive"]})
    data = DatasetDict({"one": first, "two": second})
    model = tiny_encoder(tied=False, query_prompt="q: ", passage_prompt="p: ")
    trainer = make_trainer(tmp_path, data, model=model, max_steps=2)
    assert trainer.args.prompts == {
        "one": {"query": "q: ", "positive": "p: "},
        "two": {"positive": "q: ", "text": "p: "},
    }
    assert trainer.args.router_mapping["two"] == {"positive": "query", "text": "document"}
    trainer.train()
