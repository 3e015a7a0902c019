"""A training or other work in a folder: done once, goes on after a kill, anew with changes."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from sample_texts import sentences
from small_data import write_pairs
from tiny_models import tiny_encoder

from contaccum.errors import ConfigError, UserError
from contaccum.experiments import run as run_module
from contaccum.experiments.run import begin, count_updates, hash_path, once, train
from contaccum.files import lock_folder
from contaccum.settings import Settings, replace
from contaccum.training import log
from contaccum.training.arguments import ContAccumTrainingArguments
from contaccum.training.setup import load_data


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


def test_work_is_done_once_unless_its_identity_changes(tmp_path):
    calls = []

    def work() -> dict[str, Any]:
        calls.append(sorted(path.name for path in tmp_path.iterdir()))
        (tmp_path / "part").write_text("")
        return {"value": (len(calls), 0.5)}

    assert once(tmp_path, {"seed": 1}, work) == {"value": [1, 0.5]}
    assert once(tmp_path, {"seed": 1}, work) == {"value": [1, 0.5]}
    assert once(tmp_path, {"seed": 2}, work) == {"value": [2, 0.5]}
    assert calls == [["identity.json"], ["identity.json"]]  # the folder was emptied


def test_unfinished_work_goes_on_with_its_files(tmp_path):
    class Killed(BaseException):
        pass

    def begin_work() -> dict[str, Any]:
        (tmp_path / "part").write_text("half")
        raise Killed

    with pytest.raises(Killed):
        once(tmp_path, {"seed": 1}, begin_work)
    result = once(tmp_path, {"seed": 1}, lambda: {"read": (tmp_path / "part").read_text()})
    assert result == {"read": "half"}


def test_work_that_may_not_restart_is_refused_with_what_has_changed(tmp_path):
    with begin(tmp_path / "out", {"seed": 1, "data": "a" * 64}, "contaccum fit", False):
        (tmp_path / "out" / "part").write_text("")
    expected = r"another seed \(1, now 2\), data; name another output folder"
    changed = {"seed": 2, "data": "b" * 64}
    with (
        pytest.raises(ConfigError, match=expected),
        begin(tmp_path / "out", changed, "contaccum fit", False),
    ):
        pytest.fail("refused before the work begins")
    assert (tmp_path / "out" / "part").is_file()


def test_folder_of_work_that_the_user_must_correct_is_free_again(tmp_path):
    with (
        pytest.raises(UserError, match="no such column"),
        begin(tmp_path / "out", {"seed": 1}, "contaccum fit", False),
    ):
        raise UserError("no such column")
    assert not (tmp_path / "out").exists()


def test_second_process_in_a_folder_is_refused(tmp_path):
    with (
        lock_folder(tmp_path, "contaccum fit"),
        pytest.raises(ConfigError, match="another run works in this folder"),
    ):
        once(tmp_path, {"seed": 1}, dict)


def test_credentials_are_neither_written_nor_a_change(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_0123456789")
    identity = {"data": "https://host/hf_0123456789/pairs"}
    assert once(tmp_path, identity, lambda: {"value": 1}) == {"value": 1}
    assert once(tmp_path, identity, lambda: {"value": 2}) == {"value": 1}
    assert "hf_0123456789" not in (tmp_path / "identity.json").read_text()


def test_hash_depends_on_names_and_contents_and_not_on_the_place(tmp_path):
    (tmp_path / "data").mkdir()
    file = tmp_path / "data" / "test.tsv"
    file.write_text("q\td\t1\n")
    first = hash_path(str(tmp_path / "data"))
    file_hash = hash_path(str(file))
    (tmp_path / "data").rename(tmp_path / "moved")
    assert hash_path(str(tmp_path / "moved")) == first
    assert hash_path(str(tmp_path / "moved" / "test.tsv")) == file_hash
    (tmp_path / "moved" / "out").mkdir()
    (tmp_path / "moved" / "out" / "result").write_text("")
    assert hash_path(str(tmp_path / "moved"), left_out=tmp_path / "moved" / "out") == first
    (tmp_path / "moved" / "test.tsv").write_text("q\td\t0\n")
    assert hash_path(str(tmp_path / "moved")) != first
    assert hash_path("owner/name-on-the-hub") == "owner/name-on-the-hub"
    item = json.dumps({"path": str(tmp_path / "moved" / "test.tsv"), "min_score": 1})
    assert str(tmp_path) not in hash_path(item)


def test_training_is_done_once_and_its_log_is_the_result(root, tmp_path, monkeypatch):
    settings = make_settings(root)
    first = train(settings, tmp_path)
    assert first.updates == 4
    assert first.rates == pytest.approx([1e-3, 7.5e-4, 5e-4, 2.5e-4])
    assert first.seconds > 0.0
    assert (tmp_path / "training" / "model.safetensors").is_file()
    monkeypatch.setattr(run_module, "train_and_save", lambda *_, **__: pytest.fail("trained again"))
    assert train(settings, tmp_path) == first


def test_training_by_the_clock_is_repeated_by_its_rates(root, tmp_path):
    first = train(make_settings(root), tmp_path / "first", seconds=1e6)
    assert first.updates == 4
    train(make_settings(root, max_steps=-1, learning_rates=first.rates), tmp_path / "again")
    weights = []
    for name in ("first", "again"):
        weights.append((tmp_path / name / "training" / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]


def test_training_that_was_stopped_continues_to_the_same_weights(
    root, tmp_path, monkeypatch, capsys
):
    settings = make_settings(root, dropout=0.1)
    train(settings, tmp_path / "whole")

    def stop(self: Any, args: Any, state: Any, *_: Any, **__: Any) -> None:
        if state.global_step == 1:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(log.UpdateLogCallback, "on_step_begin", stop)
        with pytest.raises(SystemExit) as end:
            train(settings, tmp_path / "stopped")
    assert end.value.code == 130
    output = tmp_path / "stopped" / "training"
    line = f"stopped; saved {output}/checkpoint-2. Start the same command again to continue"
    assert capsys.readouterr().out.endswith(f"{line}\n")
    assert train(settings, tmp_path / "stopped").updates == 4
    weights = []
    for name in ("whole", "stopped"):
        weights.append((tmp_path / name / "training" / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]
    assert not list(output.glob("checkpoint-*"))


@pytest.mark.parametrize(
    ("changes", "num_updates"),
    [({"max_steps": 5}, 5), ({"max_steps": -1, "num_train_epochs": 2.5}, 8)],
)
def test_updates_are_counted(root, changes, num_updates):
    """24 rows in updates of 8 pairs are three updates per epoch."""
    settings = make_settings(root, total_train_batch_size=8, **changes)
    args = ContAccumTrainingArguments.from_settings(settings)
    assert count_updates(load_data(settings).dataset, args) == num_updates
