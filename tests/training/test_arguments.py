"""Combinations that cannot work are refused before a model is loaded, naming both settings."""

import dataclasses

import pytest
from tiny_models import tiny_encoder

from contaccum import ContAccumLoss, ContAccumTrainingArguments
from contaccum.errors import ConfigError
from contaccum.settings import Settings
from contaccum.training.losses import make_loss

AUTO = {"per_device_train_batch_size": "auto"}


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        # tests/test_settings.py has the other settings that are refused.
        ({"total_train_batch_size": 10, "per_device_train_batch_size": 4}, "=4"),
        (
            {
                "total_train_batch_size": 16,
                "per_device_train_batch_size": 4,
                "gradient_accumulation_steps": 3,
            },
            "gradient_accumulation_steps=3",
        ),
        ({"fp16": True}, "bf16"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, named, tmp_path):
    with pytest.raises(ConfigError, match=named):
        ContAccumTrainingArguments(output_dir=str(tmp_path), **settings)


def test_several_gpus_in_one_process_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(ContAccumTrainingArguments, "n_gpu", 2)
    with pytest.raises(ConfigError, match="torchrun"):
        ContAccumTrainingArguments(output_dir=str(tmp_path))


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "method=grad_cache with deepspeed"),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1"}, "FSDP version 1"),
    ],
)
def test_engines_that_the_environment_sets_are_refused(environment, named, tmp_path, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=named):
        ContAccumTrainingArguments(output_dir=str(tmp_path), method="grad_cache")


@pytest.mark.parametrize(
    ("method", "bank_size", "query_bank_size"),
    [
        ("contaccum", 1024, None),
        ("contaccum_cached", 1024, None),
        ("grad_accum", None, None),
        ("grad_cache", None, None),
    ],
)
def test_the_method_determines_the_banks_but_not_the_pairs_per_update(
    method, bank_size, query_bank_size, tmp_path
):
    args = ContAccumTrainingArguments(
        output_dir=str(tmp_path),
        method=method,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=16,
    )
    copied_args = ContAccumTrainingArguments(**args.to_dict())
    for arguments in (args, copied_args):
        assert arguments.bank_size == bank_size
        assert arguments.query_bank_size == query_bank_size
        assert arguments.total_train_batch_size == 128
        assert arguments.pairs_per_micro_batch == 8


def test_auto_ignores_the_steps_of_a_config_for_another_micro_batch(tmp_path):
    settings = {**AUTO, "total_train_batch_size": 128, "gradient_accumulation_steps": 16}
    args = ContAccumTrainingArguments(str(tmp_path), use_cpu=True, **settings)
    args.set_micro_batch_size(32)
    assert (args.per_device_train_batch_size, args.gradient_accumulation_steps) == (32, 4)


def test_arguments_as_a_dictionary_keep_auto(tmp_path):
    args = ContAccumTrainingArguments(
        str(tmp_path), method="grad_cache", **AUTO, total_train_batch_size=12
    )
    copied_args = ContAccumTrainingArguments(**args.to_dict())
    for arguments in (args, copied_args):
        assert arguments.to_dict()["per_device_train_batch_size"] == "auto"
        assert arguments.to_dict()["gradient_accumulation_steps"] == 1
        assert arguments.total_train_batch_size == 12
    args.set_micro_batch_size(4)
    assert args.to_dict()["per_device_train_batch_size"] == "auto"


def test_the_device_of_the_settings_is_that_of_the_training(tmp_path):
    settings = Settings(output_dir=str(tmp_path), device="cpu")
    args = ContAccumTrainingArguments.from_settings(settings)
    assert args.device.type == "cpu" and args.use_cpu


def test_every_setting_of_the_loss_is_an_argument_and_is_passed_on_by_name(tmp_path):
    settings = {
        "similarity": "dot",
        "temperature": 0.5,
        "bank_size": 7,
        "query_bank_size": 0,
        "normalize_by": "all",
        "mask_duplicates": False,
        "bank_hard_negatives": False,
        "drift_compensation": "none",
    }
    args = ContAccumTrainingArguments(output_dir=str(tmp_path), **settings)
    loss = make_loss(tiny_encoder(), args)
    assert isinstance(loss, ContAccumLoss)
    passed = dataclasses.asdict(loss.settings)
    del passed["pairs_per_update"]
    expected = {**settings, "gather_across_devices": False}
    assert passed.keys() == expected.keys()
    for name, value in expected.items():
        assert passed[name] == value, name
