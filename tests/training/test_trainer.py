"""ContAccumTrainer: resuming, windows, methods, the log."""

from __future__ import annotations

import json
import logging
import math
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from sample_texts import sentences
from sentence_transformers import SentenceTransformer
from transformers import set_seed

from contaccum import ContAccumTrainer, ContAccumTrainingArguments, DualEncoder
from contaccum.errors import ConfigError
from contaccum.training.callbacks import RUN_RECORD, TRAIN_LOG

METHODS = ["in_batch", "grad_accum", "grad_cache", "contaccum", "pre_batch"]


def pairs(n: int, negatives: int = 0) -> Dataset:
    columns = {"query": sentences(n, 1), "positive": sentences(n, 2, 9)}
    return Dataset.from_dict({**columns, **{f"negative_{i + 1}": sentences(n, 3 + i) for i in range(negatives)}})


@pytest.fixture
def build(tiny_config: Any, tiny_tokenizer: Any) -> Any:
    def make(tied: bool = True, **kwargs: Any) -> DualEncoder:
        set_seed(7)
        return DualEncoder.from_backbone(
            tiny_config, tied=tied, pooling="mean", normalize=True, tokenizer=tiny_tokenizer, **kwargs
        )

    return make


def arguments(folder: Path, method: str = "contaccum", **overrides: Any) -> ContAccumTrainingArguments:
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 1 if method == "in_batch" else 3,
        "learning_rate": 1e-3,
        "weight_decay": 0.01,
        "warmup_steps": 2,
        "num_train_epochs": 2,
        "save_strategy": "no",
        "seed": 5,
        "disable_tqdm": True,
    }
    if method in ("contaccum", "pre_batch"):
        settings["bank_size"] = 20
    return ContAccumTrainingArguments(output_dir=str(folder), method=method, **{**settings, **overrides})


def log_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / TRAIN_LOG).read_text().splitlines()]


def state_of(trainer: ContAccumTrainer) -> dict[str, torch.Tensor]:
    """Everything that decides how training goes on."""
    state = {f"model.{k}": v for k, v in trainer.model.state_dict().items()}
    for index, group in trainer.optimizer.state_dict()["state"].items():
        state.update({f"optimizer.{index}.{k}": torch.as_tensor(v) for k, v in group.items()})
    for loss in trainer.bank_losses():
        state.update({f"bank.{k}": v for k, v in loss.bank_state_dict().items()})
    state["learning_rate"] = torch.tensor(trainer.lr_scheduler.get_last_lr())
    state["rng"] = torch.get_rng_state()
    return state


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_resumed_run_equals_the_uninterrupted_one_bit_for_bit(build: Any, tied: bool, tmp_path: Path) -> None:
    # 43 pairs: 11 micro-batches (the last of 3) in windows of 3, 3, 3 and 2; two epochs; dropout on.
    settings = {"save_strategy": "steps", "save_steps": 1}
    straight = ContAccumTrainer(
        model=build(tied), args=arguments(tmp_path / "straight", **settings), train_dataset=pairs(43, negatives=1)
    )
    straight.train()
    expected, expected_log = state_of(straight), log_of(tmp_path / "straight")
    assert len(expected_log) == 8
    for update in (1, 4, 6):  # inside the first epoch, at its end, inside the second
        checkpoint = tmp_path / "straight" / f"checkpoint-{update}"
        folder = tmp_path / f"resumed-{update}"
        resumed = ContAccumTrainer(model=build(tied), args=arguments(folder), train_dataset=pairs(43, negatives=1))
        resumed.train(resume_from_checkpoint=str(checkpoint))
        state = state_of(resumed)
        assert state.keys() == expected.keys()
        assert [key for key in expected if not torch.equal(state[key], expected[key])] == []
        # The log continues where it stopped, with the same losses.
        assert [line["loss"] for line in log_of(folder)] == [line["loss"] for line in expected_log[update:]]


@pytest.mark.parametrize("drift_compensation", ["mean", "auto"])
def test_drift_is_logged_and_a_run_that_probes_resumes_bit_for_bit(
    build: Any, drift_compensation: str, tmp_path: Path
) -> None:
    # 72 pairs an update: the encoder is probed at the start, and after updates 2, 4 and 6. At this learning rate
    # entries would retire after one update, so what compensates keeps them all.
    settings = {"per_device_train_batch_size": 24, "bank_size": 150, "num_train_epochs": 3, "learning_rate": 3e-3}
    settings |= {"drift_compensation": drift_compensation}
    straight = ContAccumTrainer(
        model=build(False),
        args=arguments(tmp_path / "a", save_strategy="steps", save_steps=1, **settings),
        train_dataset=pairs(144),
    )
    straight.train()
    log = log_of(tmp_path / "a")
    ages = {"mean": [0, 1, 2, 2, 2, 2], "auto": [0, 1, 1, 1, 0, 0]}
    assert [line["bank_age"] for line in log] == ages[drift_compensation]
    assert ["drift_age" in line for line in log] == [False, False, True, True, True, True]
    for line in log[2:]:
        assert 0 < line["drift_shift_passage"] < 100 and -1 <= line["drift_cosine_query"] < 1
        assert line["drift_residual_passage"] > 0 and 0 < line["bank_mass"] < 1
        assert (line.get("bank_mass_aged", 0) > 0) == (line["bank_age"] > 0)
    for update in (1, 3):
        resumed = ContAccumTrainer(
            model=build(False), args=arguments(tmp_path / str(update), **settings), train_dataset=pairs(144)
        )
        resumed.train(resume_from_checkpoint=str(tmp_path / "a" / f"checkpoint-{update}"))
        expected, state = state_of(straight), state_of(resumed)
        assert state.keys() == expected.keys()
        assert [key for key in expected if not torch.equal(state[key], expected[key])] == []


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_every_method_trains_and_logs_each_update(build: Any, method: str, tied: bool, tmp_path: Path) -> None:
    trainer = ContAccumTrainer(
        model=build(tied, query_prompt="what "), args=arguments(tmp_path, method), train_dataset=pairs(24, negatives=1)
    )
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    trainer.train()
    log = log_of(tmp_path)
    per_update = 4 if method == "in_batch" else 12
    assert [line["update"] for line in log] == list(range(1, 2 * 24 // per_update + 1))
    for line in log:
        assert line["pairs"] == per_update
        assert math.isfinite(line["loss"]) and line["loss"] > 0
        assert line["grad_norm_ratio"] == pytest.approx(line["grad_norm_passage"] / line["grad_norm_query"])
        assert 0.01 < line["grad_norm_ratio"] < 100
        assert line["pairs_per_second"] > 0 and line["peak_memory_mb"] > 10
    assert log[-1]["bank_fill"] == (20 if method in ("contaccum", "pre_batch") else 0)
    # Warm-up and decay count updates.
    peak = max(line["learning_rate"] for line in log)
    assert log[0]["learning_rate"] == 0.0 and log[1]["learning_rate"] == pytest.approx(5e-4)
    assert peak <= 1e-3 and log[-1]["learning_rate"] < peak
    assert any(not torch.equal(value, before[name]) for name, value in trainer.model.state_dict().items())
    record = json.loads((tmp_path / RUN_RECORD).read_text())
    assert record["method"] == method and record["seed"] == 5 and record["pairs_per_update"] == per_update
    assert len(record["data"]["fingerprint"]) == 64 and record["versions"]["torch"]


def test_grad_cache_equals_one_large_batch(build: Any, tmp_path: Path) -> None:
    """n=4 x K=3 by grad_cache gives the update of a batch of 12 by in_batch (no dropout)."""
    weights = []
    for method, n, k in (("grad_cache", 4, 3), ("in_batch", 12, 1)):
        model = build()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        args = arguments(
            tmp_path / method, method, per_device_train_batch_size=n, gradient_accumulation_steps=k, warmup_steps=0
        )
        assert args.total_train_batch_size == 12
        ContAccumTrainer(model=model.double(), args=args, train_dataset=pairs(24)).train()
        weights.append(torch.cat([p.flatten() for p in model.parameters()]))
    assert (weights[0] - weights[1]).abs().max() < 1e-9


def catch_gradients(into: list[torch.Tensor], optimizer: torch.optim.Optimizer, *_: Any) -> None:
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    into.append(torch.cat([p.grad.flatten().clone() for p in parameters]))


def test_last_window_is_averaged_over_the_micro_batches_it_has(build: Any, tmp_path: Path) -> None:
    """10 pairs, n=2, K=4: windows of 4 and 1 micro-batches. The second update is that of a window of one."""
    steps = {}
    for k, dataset in ((4, pairs(10)), (1, None)):
        model = build()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        gradients: list[torch.Tensor] = []
        args = arguments(
            tmp_path / str(k),
            "grad_accum",
            per_device_train_batch_size=2,
            gradient_accumulation_steps=k,
            num_train_epochs=1,
            learning_rate=0.0,  # the weights stay, so that gradients compare
            max_grad_norm=0.0,
        )
        trainer = ContAccumTrainer(model=model.double(), args=args, train_dataset=dataset or pairs(10))

        trainer.optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        trainer.optimizer.register_step_pre_hook(partial(catch_gradients, gradients))
        trainer.train()
        steps[k] = gradients
    assert len(steps[4]) == 2 and len(steps[1]) == 5
    assert (steps[4][0] - torch.stack(steps[1][:4]).mean(0)).abs().max() < 1e-12
    assert (steps[4][1] - steps[1][4]).abs().max() < 1e-12


def test_tower_norms_of_untied_towers_are_those_of_their_weights(build: Any, tmp_path: Path) -> None:
    trainer = ContAccumTrainer(
        model=build(tied=False), args=arguments(tmp_path, max_steps=1, max_grad_norm=1e-3), train_dataset=pairs(12)
    )
    seen: dict[str, float] = {}
    clip = trainer._clip_grad_norm

    def spy(model: Any) -> Any:
        for name, tower in (("query", trainer.model.query_encoder), ("passage", trainer.model.passage_encoder)):
            gradients = [p.grad.flatten() for p in tower.parameters() if p.grad is not None]
            seen[name] = torch.cat(gradients).norm().item()
        return clip(model)

    trainer._clip_grad_norm = spy  # type: ignore[method-assign]
    trainer.train()
    (line,) = log_of(tmp_path)
    assert line["grad_norm_query"] == pytest.approx(seen["query"], rel=1e-5)  # before clipping to 0.001
    assert line["grad_norm_passage"] == pytest.approx(seen["passage"], rel=1e-5)


def test_logged_loss_is_that_of_local_rows(build: Any, tmp_path: Path) -> None:
    trainer = ContAccumTrainer(model=build(), args=arguments(tmp_path), train_dataset=pairs(24))
    local: list[float] = []
    step = trainer.training_step

    def spy(*args: Any, **kwargs: Any) -> Any:
        result = step(*args, **kwargs)
        local.append(trainer.loss.last["local_loss"].item())
        return result

    trainer.training_step = spy  # type: ignore[method-assign]
    trainer.train()
    expected = [sum(local[i : i + 3]) / 3 for i in range(0, len(local), 3)]
    assert [line["loss"] for line in log_of(tmp_path)] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("scaling", [("none", 1.0), ("linear", 4.0), ("sqrt", 2.0)])
def test_learning_rate_scales_with_the_total_batch(build: Any, scaling: tuple[str, float], tmp_path: Path) -> None:
    name, factor = scaling
    args = arguments(
        tmp_path, learning_rate=1e-4, learning_rate_scaling=name, learning_rate_base_batch_size=3, warmup_steps=0
    )
    trainer = ContAccumTrainer(model=build(), args=args, train_dataset=pairs(12))
    trainer.train()
    assert log_of(tmp_path)[0]["learning_rate"] == pytest.approx(1e-4 * factor)
    assert args.learning_rate == 1e-4


@pytest.mark.parametrize("precision", ["bf16", "gradient_checkpointing"])
def test_trains_in_bf16_and_with_gradient_checkpointing(build: Any, precision: str, tmp_path: Path) -> None:
    trainer = ContAccumTrainer(
        model=build(tied=False), args=arguments(tmp_path, **{precision: True}), train_dataset=pairs(24)
    )
    trainer.train()
    assert all(math.isfinite(line["loss"]) and line["grad_norm_query"] > 0 for line in log_of(tmp_path))
    assert next(iter(trainer.bank_losses())).info_nce.bank.passages.dtype == torch.float32


def test_prompts_and_lengths_of_the_model_are_used_in_training(build: Any, tmp_path: Path) -> None:
    model = build(query_prompt="what is ", passage_prompt="the ", query_max_length=6, passage_max_length=20)
    trainer = ContAccumTrainer(model=model, args=arguments(tmp_path), train_dataset=pairs(8))
    batch = next(iter(trainer.get_train_dataloader()))
    tokenizer = model.tokenizer
    assert tokenizer.decode(batch["query_input_ids"][0]).startswith("[CLS] what is ")
    assert tokenizer.decode(batch["positive_input_ids"][0]).startswith("[CLS] the ")
    assert batch["query_input_ids"].shape[1] == 6 < batch["positive_input_ids"].shape[1] <= 20


def test_batch_norm_gets_a_warning_that_says_why(build: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = build()
    model[0].auto_model.extra = torch.nn.BatchNorm1d(4)
    with caplog.at_level(logging.WARNING, logger="contaccum.training.trainer"):
        ContAccumTrainer(model=model, args=arguments(tmp_path), train_dataset=pairs(8))
    assert "statistics of each micro-batch" in caplog.text


def test_the_start_says_what_will_happen(build: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ContAccumTrainer(model=build(), args=arguments(tmp_path, bank_size=30), train_dataset=pairs(24, 1)).train()
    facts = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines() if "  " in line)
    facts = {key.strip(): value.strip() for key, value in facts.items()}
    out = {**facts}
    assert out["method"] == "contaccum"
    assert out["pairs per update"] == "12"
    assert out["bank rows"] == "30 passages, 30 queries"
    assert out["oldest bank entry"] == "2.5 updates old"
    assert out["updates"] == "4"


def test_negatives_per_query_are_counted(build: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = ContAccumTrainer(model=build(), args=arguments(tmp_path, bank_size=20), train_dataset=pairs(48, 1))
    trainer.train()
    # Seen in the last micro-step: 4 positives and 4 hard negatives, 20 and 20 from the bank, less its own positive.
    assert "negatives per query   47 once" in capsys.readouterr().out
    assert trainer.loss.last["columns"] - 1 == 47


def test_data_that_cannot_train_is_refused(build: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs a query and a positive"):
        ContAccumTrainer(
            model=build(), args=arguments(tmp_path), train_dataset=Dataset.from_dict({"query": sentences(4)})
        )
    args = arguments(tmp_path, "grad_accum", per_device_train_batch_size=1)
    with pytest.raises(ConfigError, match="loss is always 0"):
        ContAccumTrainer(model=build(), args=args, train_dataset=pairs(8))


def test_trained_folder_loads_in_sentence_transformers(build: Any, tmp_path: Path) -> None:
    trainer = ContAccumTrainer(model=build(tied=False), args=arguments(tmp_path), train_dataset=pairs(12))
    trainer.train()
    trainer.save_model(str(tmp_path / "model"))
    loaded = SentenceTransformer(str(tmp_path / "model"))
    expected = trainer.model.encode_query(sentences(3))
    assert (loaded.encode_query(sentences(3)) == expected).all()
    assert not [
        name for _, _, files in os.walk(tmp_path / "model") for name in files if name.endswith((".bin", ".pkl"))
    ]
