"""A training in a folder: done once, and continued after a stop."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from sample_texts import sentences
from small_data import write_pairs
from tiny_models import tiny_encoder

from contaccum.experiments import run as run_module
from contaccum.experiments.run import train
from contaccum.progress import StatusLine
from contaccum.settings import Settings, replace
from contaccum.training import log

STATUS = StatusLine(print, str)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved model, and 24 training pairs."""
    root = tmp_path_factory.mktemp("run")
    tiny_encoder().save_pretrained(str(root / "model"))
    write_pairs(root / "pairs.jsonl", sentences(24, 6), sentences(24, 5, 9))
    return root


def make_settings(root: Path, **changes: Any) -> Settings:
    values = {
        "model": str(root / "model"),
        "train_data": [str(root / "pairs.jsonl")],
        "bank_size": 16,
        "max_steps": 4,
        "learning_rate": 1e-3,
        "use_cpu": True,
        "disable_tqdm": True,
    }
    return replace(Settings(), **{**values, **changes})


def read_weights(folder: Path) -> bytes:
    return (folder / "training" / "model.safetensors").read_bytes()


def test_training_is_done_once_and_its_log_is_the_result(root, tmp_path, monkeypatch):
    settings = make_settings(root)
    first = train(settings, tmp_path, STATUS)
    assert first.updates == 4
    assert first.rates == pytest.approx([1e-3, 7.5e-4, 5e-4, 2.5e-4])
    assert first.seconds > 0.0
    assert (tmp_path / "training" / "model.safetensors").is_file()
    monkeypatch.setattr(run_module, "train_and_save", lambda *_, **__: pytest.fail("trained again"))
    assert train(settings, tmp_path, STATUS) == first


def test_training_by_the_clock_is_repeated_by_its_rates(root, tmp_path):
    first = train(make_settings(root), tmp_path / "first", STATUS, seconds=1e6)
    assert first.updates == 4
    train(make_settings(root, max_steps=-1, learning_rates=first.rates), tmp_path / "again", STATUS)
    assert read_weights(tmp_path / "first") == read_weights(tmp_path / "again")


def test_training_that_was_stopped_continues_to_the_same_weights(
    root, tmp_path, monkeypatch, capsys
):
    settings = make_settings(root, dropout=0.1)
    train(settings, tmp_path / "whole", STATUS)

    def stop(self: Any, args: Any, state: Any, *_: Any, **__: Any) -> None:
        if state.global_step == 1:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(log.UpdateLogCallback, "on_step_begin", stop)
        with pytest.raises(SystemExit) as end:
            train(settings, tmp_path / "stopped", STATUS)
    assert end.value.code == 130
    output = tmp_path / "stopped" / "training"
    line = f"stopped; saved {output}/checkpoint-2. Start the same command again to continue"
    assert capsys.readouterr().out.endswith(f"{line}\n")
    assert train(settings, tmp_path / "stopped", STATUS).updates == 4
    assert read_weights(tmp_path / "whole") == read_weights(tmp_path / "stopped")
    assert not list(output.glob("checkpoint-*"))
