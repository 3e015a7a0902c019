"""Combinations that cannot work are refused before a model is loaded, naming both settings."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

from contaccum import BankedInfoNCE, ContAccumLoss, ContAccumTrainingArguments
from contaccum.errors import ConfigError
from contaccum.training.arguments import LOSS_SETTINGS
from contaccum.training.methods import make_loss
from contaccum.training.rules import DATA_RULES, MACHINE_RULES, RULES

AUTO = {"per_device_train_batch_size": "auto"}


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"method": "gradcache"}, ["method", "did you mean 'grad_cache'"]),
        ({"method": "in_batch", "gradient_accumulation_steps": 4}, ["in_batch", "gradient_accumulation_steps=4"]),
        ({"method": "grad_accum", "bank_size": 128}, ["grad_accum", "bank_size=128"]),
        ({"method": "pre_batch", "query_bank_size": 128}, ["pre_batch", "query_bank_size=128"]),
        ({"bank_size": 128, "query_bank_size": 256}, ["query_bank_size", "256", "bank_size"]),
        ({"method": "contaccum", "grad_cache_mini_batch_size": 8}, ["contaccum", "grad_cache_mini_batch_size=8"]),
        ({"temperature": 0.0}, ["temperature"]),
        ({"similarity": "euclidean"}, ["similarity", "cos, dot"]),
        ({"drift_compensation": "median"}, ["drift_compensation", "auto, mean, fresh, none"]),
        ({"normalize_by": "rows"}, ["normalize_by"]),
        ({"bank_dtype": "int8"}, ["bank_dtype"]),
        ({"bank_size": -1}, ["bank_size"]),
        ({"learning_rate_scaling": "cubic"}, ["learning_rate_scaling"]),
        ({"balance_grad_norms": "mean"}, ["balance_grad_norms", "none, geometric"]),
        ({"gradient_accumulation_steps": 0}, ["gradient_accumulation_steps"]),
        ({"fp16": True}, ["fp16", "bf16"]),
        ({"fp16": True, "bf16": True}, ["fp16", "bf16"]),
        ({"memory_limit_gb": 11.0}, ["memory_limit_gb=11.0", "only CUDA"]),
        ({"deepspeed": {"zero_optimization": {}}}, ["deepspeed", "fsdp=true"]),
        ({"auto_find_batch_size": True}, ["auto_find_batch_size", "total_train_batch_size"]),
        (AUTO, ["per_device_train_batch_size=auto", "total_train_batch_size"]),
        ({**AUTO, "total_train_batch_size": 12, "gradient_accumulation_steps": 3}, ["auto", "gradient_accumulation"]),
        ({**AUTO, "total_train_batch_size": 12, "method": "in_batch"}, ["in_batch", "grad_cache"]),
        ({"total_train_batch_size": 10, "per_device_train_batch_size": 4}, ["total_train_batch_size=10", "=4"]),
        ({"total_train_batch_size": 0}, ["total_train_batch_size=0"]),
        (
            {"total_train_batch_size": 16, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 3},
            ["total_train_batch_size=16", "gradient_accumulation_steps=3"],
        ),
        ({"train_sampling_strategy": "group_by_length"}, ["train_sampling_strategy=group_by_length", "Drop it"]),
        ({"multi_dataset_batch_sampler": "randomly"}, ["multi_dataset_batch_sampler", "round_robin"]),
        ({"sampling_weights": "3"}, ["sampling_weights", "mapping"]),
        ({"sampling_weights": {"a": 0}}, ["sampling_weights", "above 0"]),
        ({"sampling_weights": {"a": 1}, "multi_dataset_batch_sampler": "round_robin"}, ["round_robin", "weights"]),
        ({"sampling_temperature": 3.0}, ["sampling_temperature=3.0", "multi_dataset_batch_sampler=temperature"]),
        ({"refresh_pool": 3}, ["refresh_pool=3", "refresh_negatives_every"]),
        ({"refresh_negatives_every": 0}, ["refresh_negatives_every", "at least 1"]),
        ({"early_stopping_patience": 0}, ["early_stopping_patience", "at least 1"]),
        ({"early_stopping_patience": 2}, ["early_stopping_patience=2", "eval_strategy=no"]),
        ({"early_stopping_threshold": 0.1}, ["early_stopping_threshold=0.1", "early_stopping_patience"]),
        ({"report_to": "tensorbord"}, ["report_to=['tensorbord']", "not installed"]),
    ],
)
def test_refused_with_both_names(settings: dict[str, Any], named: list[str], tmp_path: Path) -> None:
    with pytest.raises(ValueError) as caught:  # transformers refuses some by itself
        ContAccumTrainingArguments(output_dir=str(tmp_path), **settings)
    assert "\n" not in str(caught.value)
    for part in named:
        assert part in str(caught.value)


def test_engines_that_the_environment_asks_for_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for environment, message in (
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "deepspeed is not supported"),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1"}, "FSDP version 1 is not supported"),
    ):
        with monkeypatch.context() as patch, pytest.raises(ConfigError, match=message):
            for name, value in environment.items():
                patch.setenv(name, value)
            ContAccumTrainingArguments(output_dir=str(tmp_path))


def test_every_rule_says_what_and_the_way_out() -> None:
    rules = [*RULES, *MACHINE_RULES, *DATA_RULES]
    assert len(set(rules)) == len(rules) > 40
    mends = (
        *("Set ", "set ", "Drop ", "drop ", "Give ", "give ", "Add ", "add ", "Raise ", "say ", "Say ", "start one "),
        *("must be", "numbers above 0", "Install it", "more than this GPU has", "neither"),
    )
    assert [message for message in rules if not any(mend in message for mend in mends)] == []


@pytest.mark.parametrize(
    ("method", "bank_size", "query_bank_size"),
    [("contaccum", 1024, None), ("pre_batch", 1024, 0), ("grad_accum", None, None), ("grad_cache", None, None)],
)
def test_the_bank_follows_from_the_method(
    method: str, bank_size: int | None, query_bank_size: int | None, tmp_path: Path
) -> None:
    args = ContAccumTrainingArguments(output_dir=str(tmp_path), method=method)
    assert (args.bank_size, args.query_bank_size) == (bank_size, query_bank_size)


@pytest.mark.parametrize("method", ["grad_accum", "grad_cache", "contaccum", "pre_batch"])
def test_pairs_per_update_are_the_same_for_every_method_and_survive_a_round_trip(method: str, tmp_path: Path) -> None:
    sizes = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 16}
    args = ContAccumTrainingArguments(output_dir=str(tmp_path), method=method, **sizes)
    for one in (args, ContAccumTrainingArguments(**args.to_dict())):
        assert (one.total_train_batch_size, one.pairs_per_micro_batch) == (128, 8)


def test_accumulation_steps_follow_from_pairs_per_update(tmp_path: Path) -> None:
    sizes = {"per_device_train_batch_size": 4, "total_train_batch_size": 128}
    assert ContAccumTrainingArguments(output_dir=str(tmp_path), **sizes).gradient_accumulation_steps == 32


def test_every_setting_of_the_loss_is_an_argument_and_is_passed_on_by_name(tiny_model: Any, tmp_path: Path) -> None:
    assert set(LOSS_SETTINGS) == set(inspect.signature(BankedInfoNCE).parameters)
    given = {"bank_size": 7, "query_bank_size": 0, "normalize_by": "all", "mask_duplicates": False}
    given |= {"bank_hard_negatives": False, "drift_compensation": "none", "bank_dtype": "bfloat16"}
    args = ContAccumTrainingArguments(output_dir=str(tmp_path), similarity="dot", temperature=0.5, **given)
    loss = make_loss(tiny_model(), args)
    assert isinstance(loss, ContAccumLoss)
    expected = {**given, "similarity": "dot", "temperature": 0.5, "gather_across_devices": False}
    assert {name: str(value) for name, value in loss.settings.items()} == {
        name: str(value).replace("bfloat16", "torch.bfloat16") for name, value in expected.items()
    }
