"""A run in a folder: it is not repeated, goes on after a kill, and starts anew with changes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from sample_texts import sentences
from small_data import write_beir, write_lines
from tiny_models import tiny_encoder

from contaccum.data import load_beir_folder
from contaccum.errors import ConfigError, UserError
from contaccum.evaluation.evaluator import RetrievalEvaluator
from contaccum.experiments import run as run_module
from contaccum.experiments.run import begin, hash_path, measure_speed, once, run, run_and_keep
from contaccum.files import lock_folder
from contaccum.settings import Settings, replace, to_yaml

NUM_QUERIES = 24


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved model, training pairs, and a BEIR folder of dev data with the same queries."""
    root = tmp_path_factory.mktemp("run")
    tiny_encoder().save_pretrained(str(root / "model"))
    texts = sentences(NUM_QUERIES, 5, 9)
    questions = sentences(NUM_QUERIES, 6)
    documents = {f"d{row}": ("", text) for row, text in enumerate(texts)}
    queries = {f"q{row}": text for row, text in enumerate(questions)}
    judgements = [(f"q{row}", f"d{row}", 1) for row in range(NUM_QUERIES)]
    write_beir(root / "dev", documents, queries, judgements, "test")
    pairs = [
        {"query": query, "positive": text} for query, text in zip(questions, texts, strict=True)
    ]
    write_lines(root / "pairs.jsonl", pairs)
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


def make_evaluator(root: Path) -> RetrievalEvaluator:
    return RetrievalEvaluator(load_beir_folder(root / "dev", "test"))


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
        lock_folder(tmp_path, "contaccum tune"),
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


def test_run_is_repeated_only_if_something_that_decides_its_result_has_changed(
    root, tmp_path, monkeypatch
):
    trained = []
    train = run_module._train_and_score

    def record_training(settings: Settings, *arguments: Any) -> run_module.Result:
        trained.append(settings)
        return train(settings, *arguments)

    monkeypatch.setattr(run_module, "_train_and_score", record_training)
    settings = make_settings(root)
    evaluator = make_evaluator(root)
    first = run(settings, evaluator, tmp_path / "run")
    assert first.score is not None
    assert first.updates == 4
    assert len(first.query_scores) == NUM_QUERIES
    assert first.seconds_per_update > 0.0
    assert run(settings, evaluator, tmp_path / "run") == first
    other_log = replace(settings, logging_steps=1, disable_tqdm=None)  # no part of the result
    assert run(other_log, evaluator, tmp_path / "run") == first
    assert len(trained) == 1
    other_rate = run(replace(settings, learning_rate=1e-2), evaluator, tmp_path / "run")
    assert other_rate.query_scores != first.query_scores
    assert run(settings, evaluator, tmp_path / "run").query_scores == first.query_scores
    assert len(trained) == 3
    assert not list((tmp_path / "run").glob("**/*.safetensors"))


def test_measured_speed_is_that_of_a_whole_update(root, tmp_path, monkeypatch):
    """One of the sixteen micro-batches of an update is measured."""
    settings = make_settings(
        root, per_device_train_batch_size=1, total_train_batch_size=16, learning_rate=1e-3
    )
    measured = []
    train = run_module._train

    def record_training(settings: Settings, *arguments: Any) -> Any:
        measured.append((settings.gradient_accumulation_steps, settings.max_steps))
        clock = train(settings, *arguments)
        clock.seconds = [100.0, 1.0, 3.0]
        return clock

    monkeypatch.setattr(run_module, "_train", record_training)
    assert measure_speed(settings, tmp_path / "speed") == 32.0
    assert measured == [(1, 3)]
    assert not (tmp_path / "speed").exists()


def test_error_is_the_result_only_if_it_may_be(root, tmp_path):
    settings = make_settings(root, train_data=[str(root / "nowhere.jsonl")])
    with pytest.raises(UserError, match="nowhere"):
        run(settings, make_evaluator(root), tmp_path / "run")
    result = run(settings, make_evaluator(root), tmp_path / "run", keeps_error=True)
    assert "nowhere" in result.note


def make_long_settings(root: Path) -> Settings:
    """Return settings of a training with checkpoints."""
    return make_settings(
        root,
        max_steps=40,
        dropout=0.1,
        eval_data=str(root / "dev"),
        eval_split="test",
        eval_strategy="steps",
        eval_steps=10,
        save_strategy="steps",
        save_steps=10,
    )


@pytest.mark.long
def test_training_that_was_killed_continues_to_the_same_weights(root, tmp_path):
    settings = make_long_settings(root)
    whole = run_and_keep(settings, tmp_path / "whole")
    (tmp_path / "config.yaml").write_text(to_yaml(settings))
    program = (
        "import sys; from pathlib import Path\n"
        "from contaccum.experiments.run import run_and_keep\n"
        "from contaccum.settings import Settings, read, replace\n"
        "run_and_keep(replace(Settings(), **read([sys.argv[1]])), Path(sys.argv[2]))\n"
    )
    killed = tmp_path / "killed"
    command = [sys.executable, "-c", program, str(tmp_path / "config.yaml"), str(killed)]
    process = subprocess.Popen(command, env=dict(os.environ), stderr=subprocess.DEVNULL)
    while process.poll() is None and not (killed / "checkpoint-20" / "contaccum.json").is_file():
        time.sleep(0.01)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert (killed / "identity.json").is_file()
    assert not (killed / "result.json").is_file()
    continued = run_and_keep(settings, killed)
    assert (continued.score, continued.updates) == (whole.score, whole.updates)
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "killed")]
    assert weights[0] == weights[1]
    assert not list(killed.glob("checkpoint-*"))
