"""The smallest micro-batch has negatives; "auto" finds the largest that fits into memory."""

from types import SimpleNamespace

import pytest
from datasets import Dataset
from tiny_models import tiny_encoder
from tiny_runs import (
    AUTO,
    EVERY_CALL,
    SAVE_EVERY_UPDATE,
    get_state,
    list_differences,
    make_arguments,
    make_trainer,
    simulate_out_of_memory,
)

from contaccum import ContAccumLoss
from contaccum.errors import ConfigError, UserError
from contaccum.files import read_json
from contaccum.training import micro_batch
from contaccum.training.columns import check_columns


def test_one_set_without_hard_negatives_needs_two_pairs_in_a_micro_batch(tmp_path):
    args = make_arguments(tmp_path)
    loss = ContAccumLoss(tiny_encoder(), bank_size=0)
    triplets = ["query", "positive", "negative"]
    pairs = ["query", "positive"]
    assert check_columns(args, loss, {"a": triplets, "b": triplets}) == 1
    assert check_columns(args, loss, {"a": triplets, "b": pairs}) == 2
    assert check_columns(args, loss, {}) == 2
    with_bank = ContAccumLoss(tiny_encoder(), bank_size=8)
    assert check_columns(args, with_bank, {"a": pairs}) == 1


@pytest.mark.parametrize(
    ("stage", "is_host"), [("passages", True), ("backward", False)], ids=["on a CPU", "on a GPU"]
)
def test_auto_finds_the_largest_micro_batch_without_changing_the_training(
    stage, is_host, tmp_path, monkeypatch
):
    """The sizes are 12, 6, 4, 3, 2 and 1; the largest of them with at most 5 rows is 4."""
    monkeypatch.setattr(micro_batch, "is_host_memory", lambda device: is_host)
    fixed = make_trainer(tmp_path / "fixed", dropout=0.1)
    fixed.train()
    auto = make_trainer(tmp_path / "auto", dropout=0.1, **AUTO, **SAVE_EVERY_UPDATE)
    simulate_out_of_memory(auto, stage, EVERY_CALL, max_rows=5)
    auto.train()
    assert auto.args.per_device_train_batch_size == 4
    assert auto.args.gradient_accumulation_steps == 3
    assert auto.args.total_train_batch_size == 12
    assert list_differences(get_state(fixed), get_state(auto)) == []
    # A resumed run keeps the size, although 12 would fit now.
    resumed = make_trainer(tmp_path / "auto", dropout=0.1, **AUTO, **SAVE_EVERY_UPDATE)
    resumed.train(resume_from_checkpoint=str(tmp_path / "auto" / "checkpoint-2"))
    assert resumed.args.per_device_train_batch_size == 4
    assert list_differences(get_state(fixed), get_state(resumed)) == []


def test_a_run_with_auto_and_a_composing_sampler_resumes(tmp_path, monkeypatch):
    """Its batches depend on the micro-batch size, which a resumed run reads from its checkpoint."""
    settings = {"batch_sampler": "no_duplicates", **SAVE_EVERY_UPDATE}
    monkeypatch.setattr("contaccum.training.micro_batch.find_micro_batch", lambda *_: 4)
    straight = make_trainer(tmp_path, **AUTO, **settings)
    straight.train()
    record = read_json(tmp_path / "identity.json")
    assert record["micro_batch"] == 4
    assert record["arguments"]["per_device_train_batch_size"] == "auto"
    checkpoint = tmp_path / "checkpoint-2"
    smaller = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 6}
    with pytest.raises(UserError, match=r"pairs per batch of the sampler \(4, now 2\)"):
        make_trainer(tmp_path / "smaller", **smaller, **settings).train(str(checkpoint))
    resumed = make_trainer(tmp_path / "resumed", **AUTO, **settings)
    resumed.train(str(checkpoint))
    assert list_differences(get_state(straight), get_state(resumed)) == []


def test_a_size_that_auto_found_is_lowered_if_a_rank_has_fewer_pairs_per_update(tmp_path):
    """A run of one rank found 8 of 24 pairs; resumed on two ranks, each rank has 12 pairs."""
    trainer = make_trainer(tmp_path, **AUTO)
    trainer.updates.set_micro_batch_size(8)
    assert trainer.args.per_device_train_batch_size == 6
    assert trainer.args.gradient_accumulation_steps == 2


def test_the_longest_rows_have_texts_for_missing_negatives():
    columns = {"query": ["a", "b c"], "positive": ["d e f", "g"], "negative_1": [None, None]}
    rows = micro_batch.make_longest_rows(Dataset.from_dict(columns), 1)
    assert rows == [{"query": "b c", "positive": "d e f", "negative_1": "d e f"}]


def test_the_longest_rows_are_those_of_the_training_set_with_the_longest_texts():
    sets = {
        "short": Dataset.from_dict({"question": ["a b"], "answer": ["c"]}),
        "long": Dataset.from_dict({"query": ["i", "j k"], "positive": ["l m n", "o"]}),
    }
    [row] = micro_batch.make_longest_rows(sets, 1)
    assert row == {"query": "j k", "positive": "l m n", "dataset_name": "long"}


def test_auto_refuses_an_update_that_is_smaller_than_a_micro_batch(tmp_path):
    settings = {**AUTO, "method": "grad_accum", "total_train_batch_size": 1}
    with pytest.raises(ConfigError, match="but a micro-batch needs at least 2"):
        make_trainer(tmp_path, **settings).get_train_dataloader()


def test_auto_finds_how_many_pairs_a_gradient_cache_encodes_at_once(tmp_path):
    trainer = make_trainer(tmp_path, method="grad_cache", **AUTO)
    simulate_out_of_memory(trainer, "passages", EVERY_CALL, max_rows=5)
    trainer.train()
    assert trainer.args.pairs_per_micro_batch == trainer.loss.mini_batch_size == 4
    assert trainer.args.per_device_train_batch_size == trainer.args.total_train_batch_size == 12


def test_auto_tries_no_size_for_which_a_host_has_too_little_memory(tmp_path, monkeypatch):
    """Memory grows by 100 MB per pair, and 600 MB (80%) of the free 750 MB may be used."""
    trainer = make_trainer(tmp_path, **AUTO)
    trainer.args.gradient_accumulation_steps = 12
    sizes: list[int] = []
    memory = SimpleNamespace(available=750 * 2**20)
    monkeypatch.setattr(micro_batch, "try_micro_batch", lambda size, *_: sizes.append(size))
    monkeypatch.setattr(micro_batch, "peak_memory_mb", lambda device: 100.0 * max(sizes, default=0))
    monkeypatch.setattr(micro_batch.psutil, "virtual_memory", lambda: memory)
    trainer.get_train_dataloader()
    assert sizes == [1, 2, 3, 4, 6]
    assert trainer.args.per_device_train_batch_size == 6  # 12 was not tried
