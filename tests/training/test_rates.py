"""Learning rates by the clock: they end with the time, repeat exactly, and outlive a kill."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_models import tiny_encoder
from tiny_runs import make_pairs, read_log

from contaccum import DualEncoder
from contaccum.merging import merge_models
from contaccum.retrieval.encode import model_fingerprint
from contaccum.settings import Settings, replace
from contaccum.training import rates
from contaccum.training.setup import make_second_stage
from contaccum.training.trainer import train_and_save

NUM_UPDATES = 8
RATE = 1e-2


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved model with dropout, and training pairs."""
    root = tmp_path_factory.mktemp("rates")
    tiny_encoder(dropout=0.1).save_pretrained(str(root / "model"))
    make_pairs(24).to_json(root / "pairs.jsonl")
    return root


def train(root: Path, output: Path, seconds: float | None = None, **changes: Any) -> DualEncoder:
    """Train for eight updates, or until the time ends; return the saved model."""
    values = {
        "model": str(root / "model"),
        "train_data": [str(root / "pairs.jsonl")],
        "output_dir": str(output),
        "per_device_train_batch_size": 4,
        "total_train_batch_size": 8,
        "bank_size": 16,
        "max_steps": NUM_UPDATES,
        "learning_rate": RATE,
        "save_strategy": "no",
        "logging_strategy": "no",
        "dropout": 0.1,
        "use_cpu": True,
        "disable_tqdm": True,
    }
    settings = replace(Settings(), **{**values, **changes})
    train_and_save(settings, seconds, print_line=lambda line: None)
    return DualEncoder.from_pretrained(str(output), device="cpu")


def read_rates(folder: Path) -> list[float]:
    return [line["learning_rate"] for line in read_log(folder)]


def set_clock(monkeypatch: pytest.MonkeyPatch, seconds_per_call: float) -> None:
    """Give the rates a clock that advances each time that it is read."""
    clock = SimpleNamespace(seconds=0.0)

    def read_clock() -> float:
        clock.seconds += seconds_per_call
        return clock.seconds

    monkeypatch.setattr(rates, "time", SimpleNamespace(monotonic=read_clock))


def test_rate_falls_with_the_updates_if_the_time_is_long_enough(root, tmp_path):
    train(root, tmp_path / "run", seconds=1e6)
    expected = [RATE * (1 - update / NUM_UPDATES) for update in range(NUM_UPDATES)]
    assert read_rates(tmp_path / "run") == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("seconds_per_update", [1.0, 2.5])
def test_training_ends_with_the_time_and_its_listed_rates_repeat_it(
    root, tmp_path, monkeypatch, seconds_per_update
):
    # The clock is read for each rate, and after each update for the checkpoints.
    set_clock(monkeypatch, seconds_per_update / 2)
    first = train(root, tmp_path / "first", seconds=5.0)
    used = read_rates(tmp_path / "first")
    assert len(used) == pytest.approx(5.0 / seconds_per_update, abs=1)
    assert used == sorted(used, reverse=True)
    assert used[-1] > 0.0

    again = train(root, tmp_path / "again", learning_rates=used, max_steps=-1)
    assert read_rates(tmp_path / "again") == used
    assert model_fingerprint(again) == model_fingerprint(first)


def test_time_of_loading_counts_and_an_update_that_would_end_too_late_is_not_begun(monkeypatch):
    clock = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(rates, "time", SimpleNamespace(monotonic=lambda: clock.seconds))
    callback = rates.RatesByClock(10.0)
    clock.seconds = 4.0  # the model is loaded
    args = SimpleNamespace(learning_rate=1.0)
    state = SimpleNamespace(max_steps=100, global_step=20)  # resumed after 20 updates
    control = SimpleNamespace(should_training_stop=False, should_save=False)
    optimizer = SimpleNamespace(param_groups=[{}])
    callback.on_train_begin(args, state, control)
    used = []
    while not control.should_training_stop:
        callback.on_step_begin(args, state, control, optimizer=optimizer)
        used.append(optimizer.param_groups[0]["lr"])
        clock.seconds += 1.25
        state.global_step += 1
        callback.on_step_end(args, state, control)
    assert clock.seconds == 9.0
    assert used == pytest.approx([0.8, 0.79, 0.58333, 0.375], abs=1e-4)


def test_training_that_was_killed_continues_from_the_checkpoint_of_the_clock(
    root, tmp_path, monkeypatch
):
    """It then has the rates that follow, and the same weights."""

    class Killed(BaseException):
        pass

    whole = train(root, tmp_path / "whole", seconds=1e9)
    on_step_end = rates.RatesByClock.on_step_end

    def kill(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 6:
            raise Killed
        on_step_end(self, args, state, control, **kwargs)

    with monkeypatch.context() as patch:
        set_clock(patch, 100.0)  # ten minutes are over after three updates
        patch.setattr(rates.RatesByClock, "on_step_end", kill)
        with pytest.raises(Killed):
            train(root, tmp_path / "run", seconds=1e9)
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-3"]
    continued = train(root, tmp_path / "run", seconds=1e9, resume_from_checkpoint="auto")
    assert read_rates(tmp_path / "run") == pytest.approx(read_rates(tmp_path / "whole"), rel=1e-4)
    for name, weight in whole.state_dict().items():
        assert weight.numpy() == pytest.approx(continued.state_dict()[name].numpy(), abs=1e-5)


@pytest.mark.parametrize("options", [{"max_steps": 2}, {"max_steps": 2, "lora_r": 2}])
def test_blended_model_is_the_average_with_the_base_model(root, tmp_path, options):
    base = DualEncoder.from_pretrained(str(root / "model"), device="cpu")
    trained = train(root, tmp_path / "trained", **options)
    blended = train(root, tmp_path / "blended", blend=0.25, **options)
    assert model_fingerprint(blended) == model_fingerprint(merge_models(base, trained, 0.25))
    assert model_fingerprint(blended) != model_fingerprint(base)


def test_second_stage_has_as_many_updates_but_no_rates_of_the_first(root):
    settings = replace(
        Settings(),
        model=str(root / "model"),
        train_data=[str(root / "pairs.jsonl")],
        second_stage=str(root / "pairs.jsonl"),
        learning_rates=[RATE, RATE / 2, RATE / 4],
        use_cpu=True,
    )
    second = make_second_stage(settings, settings.model)
    assert second.learning_rates is None
    assert second.max_steps == 3
