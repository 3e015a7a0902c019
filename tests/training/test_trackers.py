"""Trackers get every number of an update through transformers' own integrations, and no credential."""

from __future__ import annotations

import importlib.machinery
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import pytest
from dev_sets import dev_set

from contaccum import ContAccumTrainingArguments
from contaccum.errors import ConfigError
from contaccum.evaluation.retrieval_evaluator import RetrievalEvaluator
from contaccum.training.callbacks import TRAIN_LOG
from contaccum.training.eval_arguments import check_trackers

TRACKED = {"logging_steps": 1, "eval_strategy": "steps", "eval_steps": 3, "bank_size": 60, "num_train_epochs": 2}
WANTED = {
    *(f"train/{name}" for name in ("loss", "learning_rate", "grad_norm_ratio", "grad_norm_query", "bank_fill")),
    *(f"train/{name}" for name in ("bank_age", "bank_mass", "bank_mass_aged", "bank_mass_age_1", "in_batch_mass")),
    *(f"train/drift_{kind}_{tower}" for kind in ("cosine", "shift", "residual") for tower in ("query", "passage")),
    *(f"eval/{name}" for name in ("ndcg@10", "mrr@10", "recall@100", "runtime")),
}
SECRET = "s3cr3t-value-of-a-token"


@pytest.fixture
def trained_with(trainer_in: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def train(tracker: str) -> Path:
        monkeypatch.setattr("contaccum.losses.PAIRS_PER_PROBE", 20)
        monkeypatch.setenv("MY_API_TOKEN", SECRET)
        trainer = trainer_in(
            tmp_path, evaluator=RetrievalEvaluator(dev_set()), report_to=tracker, run_name=f"with-{SECRET}", **TRACKED
        )
        trainer.train()
        return tmp_path

    return train


def test_tensorboard_gets_drift_bank_and_figures_as_scalars(trained_with: Any) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = trained_with("tensorboard")
    (file,) = folder.glob("runs/*/events.out.tfevents.*")
    events = EventAccumulator(str(file))
    events.Reload()
    assert set(events.Tags()["scalars"]) >= WANTED
    log = [json.loads(line) for line in (folder / TRAIN_LOG).read_text().splitlines()]
    drift = {event.step: event.value for event in events.Scalars("train/drift_shift_passage")}
    expected = {line["update"]: line["drift_shift_passage"] for line in log if "drift_shift_passage" in line}
    assert drift == pytest.approx(expected, rel=1e-5) and len(drift) >= 3
    assert [event.step for event in events.Scalars("eval/ndcg@10")] == [3, 6]
    assert SECRET.encode() not in file.read_bytes()


def fake_package(monkeypatch: pytest.MonkeyPatch, name: str) -> MagicMock:
    """A package that records how it is called."""
    package = MagicMock()
    package.__spec__ = importlib.machinery.ModuleSpec(name, None)
    package.run = None
    monkeypatch.setitem(sys.modules, name, package)
    for inner in ("sdk", "sdk.lib", "sdk.lib.config_util"):
        module = ModuleType(f"{name}.{inner}")
        module.ConfigError = type("ConfigError", (Exception,), {})  # type: ignore[attr-defined]  # made here
        monkeypatch.setitem(sys.modules, f"{name}.{inner}", module)
    package.init.side_effect = lambda **given: setattr(package, "run", MagicMock())
    package.context_vars.current_space_id.get.return_value = None
    return package


@pytest.mark.parametrize("tracker", ["wandb", "trackio"])
def test_other_trackers_get_the_same_scalars(trained_with: Any, monkeypatch: pytest.MonkeyPatch, tracker: str) -> None:
    if tracker == "trackio":
        integrations = pytest.importorskip("transformers.integrations.integration_utils")
        if not hasattr(integrations, "TrackioCallback"):
            pytest.skip("this transformers has no integration of trackio")
    package = fake_package(monkeypatch, tracker)
    trained_with(tracker)
    logged: dict[str, Any] = {}
    for call in package.log.call_args_list:
        logged |= call.args[0]
    assert logged.keys() >= WANTED
    assert all(isinstance(value, (int, float)) for value in logged.values())
    told = str(package.config.update.call_args_list)
    assert "bank_size" in told and SECRET not in told and "<MY_API_TOKEN>" in told


def test_without_a_tracker_the_terminal_gets_a_few_numbers(
    trainer_in: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer_in(tmp_path, logging_steps=1).train()
    lines = [line for line in capsys.readouterr().out.splitlines() if "'loss'" in line]
    assert len(lines) == 3 and "bank_fill" in lines[-1] and "bank_mass_age_" not in lines[-1]


def test_a_tracker_that_is_not_installed_is_said_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.integrations import integration_utils

    monkeypatch.setattr(integration_utils, "is_wandb_available", lambda: False)
    with pytest.raises(ConfigError, match="report_to=wandb needs the package: pip install wandb"):
        ContAccumTrainingArguments(output_dir=str(tmp_path), report_to="wandb")
    check_trackers([])
