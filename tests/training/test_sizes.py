"""Pairs per update are kept whatever micro-batch is given or found, and the search leaves no trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_memory_errors import RunsOut
from test_trainer import arguments, log_of, state_of

from contaccum.errors import ConfigError, UserError
from contaccum.training import memory_fit
from contaccum.training.config import parse
from contaccum.training.memory_fit import available_memory, growth

AUTO = {"per_device_train_batch_size": "auto", "gradient_accumulation_steps": 1, "total_train_batch_size": 12}


def test_accumulation_steps_follow_from_pairs_per_update(tmp_path: Path) -> None:
    args = arguments(tmp_path, per_device_train_batch_size=4, gradient_accumulation_steps=1, total_train_batch_size=128)
    assert (args.gradient_accumulation_steps, args.total_train_batch_size) == (32, 128)
    args = arguments(tmp_path)
    assert args.total_train_batch_size == 12 and args.to_dict()["total_train_batch_size"] == 12
    args.gradient_accumulation_steps = 5
    assert args.total_train_batch_size == 20  # always what the sizes come to


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"total_train_batch_size": 16}, "is not per_device_train_batch_size=4 x gradient_accumulation_steps=3"),
        ({"total_train_batch_size": 10, "gradient_accumulation_steps": 1}, "no multiple of"),
        ({"total_train_batch_size": 0, "gradient_accumulation_steps": 1}, "not a whole number of pairs"),
        ({"per_device_train_batch_size": "auto", "gradient_accumulation_steps": 1}, "without total_train_batch_size"),
        ({**AUTO, "gradient_accumulation_steps": 3}, "auto with gradient_accumulation_steps"),
        ({**AUTO, "method": "in_batch", "bank_size": None}, "an in-batch update is one batch"),
        ({"method": "in_batch", "bank_size": None, "gradient_accumulation_steps": 1, "total_train_batch_size": 8}, "="),
        ({"auto_find_batch_size": True}, "would change the pairs per update"),
        ({"memory_limit_gb": 11.0}, "only CUDA can keep"),
    ],
)
def test_sizes_that_do_not_agree_are_refused(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        arguments(tmp_path, **settings)


def test_auto_can_be_said_on_the_command_line() -> None:
    given = ["--model=m", "--train_data=d", "--output_dir=o", "--total_train_batch_size=64"]
    assert parse([*given, "--per_device_train_batch_size=auto"])[2].finds_micro_batch
    args = parse([*given, "--per_device_train_batch_size", "16"])[2]
    assert not args.finds_micro_batch and args.gradient_accumulation_steps == 4
    with pytest.raises(ConfigError, match="per_device_train_batch_size"):
        parse([*given, "--per_device_train_batch_size=some"])


@pytest.mark.parametrize("place", ["passages", "backward"])
def test_largest_micro_batch_that_fits_is_found_without_a_trace(trainer_in: Any, place: str, tmp_path: Path) -> None:
    given = trainer_in(tmp_path / "given", dropout=0.1)
    given.train()
    found = trainer_in(tmp_path / "found", dropout=0.1, **AUTO)
    RunsOut(found, place, list(range(1, 99)), fits=5)  # of 12, 6, 4, 3, 2 and 1
    found.train()
    assert (found.args.per_device_train_batch_size, found.args.gradient_accumulation_steps) == (4, 3)
    expected, state = state_of(given), state_of(found)
    assert state.keys() == expected.keys()
    assert [key for key in expected if not torch.equal(state[key], expected[key])] == []
    assert [line["loss"] for line in log_of(tmp_path / "found")] == [
        line["loss"] for line in log_of(tmp_path / "given")
    ]


def test_longest_texts_and_a_full_bank_are_tried(
    trainer_in: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainer_in(tmp_path, **AUTO)
    tried: list[tuple[int, int, int]] = []
    attempt = trainer.try_micro_step

    def watched(inputs: Any) -> None:
        info = trainer.loss.info_nce
        attempt(inputs)
        tried.append((*inputs["positive_input_ids"].shape, 0 if info is None else info.last["columns"]))

    monkeypatch.setattr(trainer, "try_micro_step", watched)
    trainer.train()
    longest = trainer.model.tokenizer(list(trainer.train_dataset["positive"]), padding=True, return_tensors="pt")
    assert tried[-1] == (12, longest["input_ids"].shape[1], 12 + 20)
    assert trainer.args.per_device_train_batch_size == 12 and trainer.loss.info_nce.bank.pairs == 36


def test_grad_cache_finds_what_it_encodes_at_once(trainer_in: Any, tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path, method="grad_cache", **AUTO)
    RunsOut(trainer, "passages", list(range(1, 99)), fits=5)
    trainer.train()
    assert trainer.args.grad_cache_mini_batch_size == trainer.loss.mini_batch_size == 4
    assert trainer.args.per_device_train_batch_size == trainer.args.total_train_batch_size == 12


def test_nothing_that_fits_says_what_else_to_turn(trainer_in: Any, tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path, **AUTO)
    RunsOut(trainer, "queries", list(range(1, 99)), fits=0)
    with pytest.raises(UserError, match=r"out of memory at a micro-batch of 1: .*gradient_checkpointing"):
        trainer.train()


def test_host_is_never_asked_for_more_than_it_has(
    trainer_in: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainer_in(tmp_path, **AUTO)
    sizes: list[int] = []
    monkeypatch.setattr(memory_fit, "_try", lambda trainer, texts, n: sizes.append(n))
    monkeypatch.setattr(memory_fit, "growth", lambda work: (work(), 1000.0 * sizes[-1])[1])
    monkeypatch.setattr(memory_fit, "available_memory", lambda: 6000 / 0.8)
    assert memory_fit.find_micro_batch(trainer) == 6
    assert max(sizes) == 6  # though 12 would not have failed


def test_growth_of_this_process_is_seen() -> None:
    assert 90e6 < growth(lambda: torch.ones(25_000_000).sum()) < 400e6
    assert available_memory() > 1e8


def test_resumed_run_keeps_the_micro_batch_that_was_found(
    trainer_in: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saves = {"save_strategy": "steps", "save_steps": 1}
    trainer = trainer_in(tmp_path, **AUTO, **saves)
    RunsOut(trainer, "passages", list(range(1, 99)), fits=5)
    trainer.train()
    resumed = trainer_in(tmp_path, **AUTO, **saves)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))  # where 12 would fit now
    assert resumed.args.per_device_train_batch_size == 4
    assert torch.equal(state_of(resumed)["rng"], state_of(trainer)["rng"])


def test_limit_is_told_to_cuda_as_a_share_of_the_card(trainer_in: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Card:
        total_memory = 80 * 2**30

    told: list[tuple[float, str]] = []
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Card)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *given: told.append(given))
    from contaccum.training.sizes import check_memory_limit, keep_memory_limit

    class Arguments:
        memory_limit_gb: float | None = 11.0
        device = torch.device("cuda:0")

    check_memory_limit(Arguments)  # type: ignore[arg-type]  # all of them that it reads
    keep_memory_limit(Arguments)  # type: ignore[arg-type]
    assert told == [(11 / 80, torch.device("cuda:0"))]
    Arguments.memory_limit_gb = 81.0
    with pytest.raises(ConfigError, match="not between 0 and the 80"):
        check_memory_limit(Arguments)  # type: ignore[arg-type]
