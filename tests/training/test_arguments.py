"""Combinations that cannot work are refused before a model is loaded, naming both settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sentence_transformers.base.sampler import DefaultBatchSampler

from contaccum import ContAccumTrainingArguments
from contaccum.errors import ConfigError


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"method": "gradcache"}, ["method", "grad_cache"]),
        ({"method": "in_batch", "gradient_accumulation_steps": 4}, ["in_batch", "gradient_accumulation_steps=4"]),
        ({"method": "grad_accum", "bank_size": 128}, ["grad_accum", "bank_size=128"]),
        ({"method": "pre_batch", "query_bank_size": 128}, ["pre_batch", "query_bank_size=128"]),
        ({"bank_size": 128, "query_bank_size": 256}, ["query_bank_size=256", "bank_size=128"]),
        ({"method": "contaccum", "grad_cache_mini_batch_size": 8}, ["contaccum", "grad_cache_mini_batch_size=8"]),
        ({"fp16": True, "bf16": True}, ["fp16", "bf16"]),
        ({"temperature": 0.0}, ["temperature"]),
        ({"similarity": "euclidean"}, ["similarity", "cos, dot"]),
        ({"drift_compensation": "median"}, ["drift_compensation", "auto, mean, fresh, none"]),
        ({"normalize_by": "rows"}, ["normalize_by"]),
        ({"bank_dtype": "int8"}, ["bank_dtype"]),
        ({"learning_rate_scaling": "cubic"}, ["learning_rate_scaling"]),
        ({"gradient_accumulation_steps": 0}, ["gradient_accumulation_steps"]),
        ({"bank_size": -1}, ["bank_size"]),
        ({"train_sampling_strategy": "sequential"}, ["train_sampling_strategy=sequential", "group_by_length"]),
        ({"length_window": 1}, ["length_window", "2"]),
        ({"topic_column": "topic", "batch_sampler": "group_by_label"}, ["topic_column=topic", "group_by_label"]),
        (
            {"train_sampling_strategy": "group_by_length", "batch_sampler": DefaultBatchSampler},
            ["group_by_length", "DefaultBatchSampler"],
        ),
        (
            {"topic_column": "topic", "per_device_train_batch_size": 1},
            ["topic_column", "per_device_train_batch_size=1"],
        ),
    ],
)
def test_refused_with_both_names(settings: dict[str, Any], named: list[str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        ContAccumTrainingArguments(output_dir=str(tmp_path), **settings)
    assert "\n" not in str(caught.value)
    for part in named:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("method", "bank_size", "query_bank_size"),
    [("contaccum", 1024, None), ("pre_batch", 1024, 0), ("grad_accum", 0, None), ("grad_cache", 0, None)],
)
def test_bank_follows_from_the_method(method: str, bank_size: int, query_bank_size: int | None, tmp_path: Path) -> None:
    args = ContAccumTrainingArguments(output_dir=str(tmp_path), method=method)
    assert (args.bank_size, args.query_bank_size) == (bank_size, query_bank_size)


@pytest.mark.parametrize("method", ["grad_accum", "grad_cache", "contaccum", "pre_batch"])
def test_pairs_per_update_are_the_same_for_every_method(method: str, tmp_path: Path) -> None:
    args = ContAccumTrainingArguments(
        output_dir=str(tmp_path), method=method, per_device_train_batch_size=8, gradient_accumulation_steps=16
    )
    assert args.total_train_batch_size == 128
    assert args.pairs_per_micro_batch == 8


def test_arguments_survive_a_round_trip(tmp_path: Path) -> None:
    args = ContAccumTrainingArguments(
        output_dir=str(tmp_path), method="grad_cache", per_device_train_batch_size=8, gradient_accumulation_steps=16
    )
    again = ContAccumTrainingArguments(**args.to_dict())
    assert (again.total_train_batch_size, again.pairs_per_micro_batch) == (128, 8)


@pytest.mark.parametrize(("steps", "window"), [(1, 16), (3, 18), (8, 8), (12, 12), (64, 64)])
def test_windows_of_lengths_are_whole_updates(steps: int, window: int, tmp_path: Path) -> None:
    args = ContAccumTrainingArguments(output_dir=str(tmp_path), gradient_accumulation_steps=steps)
    assert args.lengths_sorted == window
    assert ContAccumTrainingArguments(output_dir=str(tmp_path), length_window=5).lengths_sorted == 5
