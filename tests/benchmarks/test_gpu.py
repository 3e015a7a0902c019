"""benchmarks/gpu.py: dry runs of every part on the CPU, with tiny sizes."""

import importlib
import json
import time

import pytest
import torch
from programs import ROOT, run_program

PROGRAM = "benchmarks/gpu.py"
TINY = ("--device", "cpu", "--tiny")


@pytest.fixture
def part(monkeypatch):
    """Return a function that imports a part by its name."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return lambda name: importlib.import_module(f"gpu_parts.{name}")


def run_parts(output, *argv):
    """Run the program; return its exit code and {part: record}."""
    with pytest.raises(SystemExit) as stopped:
        run_program(PROGRAM, *TINY, "--output", output, *argv)
    records = {path.stem: json.loads(path.read_text()) for path in output.glob("*.json")}
    return stopped.value.code, records


def test_every_part_writes_a_record_or_prints_why_it_was_not_run(tmp_path, capsys):
    code, records = run_parts(tmp_path)
    assert code == 0
    assert set(records) == {"loss_exact", "host_syncs", "update_time"}
    for record in records.values():
        assert f"{PROGRAM} --device cpu --tiny" in record["command"]
        assert record["versions"]["torch"] == torch.__version__
        assert record["device"]["type"] == "cpu"
        assert "git_commit" in record
    assert not records["host_syncs"]["measured"]
    assert "host_syncs: NOT RUN: torch reports host syncs for CUDA only" in capsys.readouterr().out

    cases = records["loss_exact"]["result"]["cases"]
    assert len(cases) == 10
    for drift_compensation in ("none", "auto"):
        errors = cases[f"float64, {drift_compensation}"]["relative_errors"]
        assert set(errors) == {"queries", "passages", "negatives"}
        assert max(errors.values()) <= 1e-12

    result = records["update_time"]["result"]
    assert result["turns"] == 2
    assert result["bank_rows_in_use"] == 32
    for figures in result["methods"].values():
        seconds = figures["seconds"]
        assert 0 < seconds["low"] <= seconds["median"] <= seconds["high"]
    assert result["methods"]["grad_accum"]["ratio_to_grad_accum"]["median"] == 1


def test_a_wrong_gradient_fails_the_check_and_the_program(part, tmp_path, monkeypatch, capsys):
    loss_exact = part("loss_exact")
    dense_gradients = loss_exact.dense_gradients

    def wrong_gradients(*args):
        queries, passages, negatives = dense_gradients(*args)
        return [queries, passages, 1.1 * negatives]

    monkeypatch.setattr(loss_exact, "dense_gradients", wrong_gradients)
    code, records = run_parts(tmp_path, "--part", "loss_exact")
    assert code == 1
    result = records["loss_exact"]["result"]
    assert not result["passed"]
    errors = result["cases"]["float64, none"]["relative_errors"]
    assert errors["negatives"] == pytest.approx(1 - 1 / 1.1)
    out = capsys.readouterr().out
    assert "loss_exact: FAILED" in out
    assert "update_time: NOT RUN: not in --part" in out


def test_errors_of_half_precision_are_measured(part):
    settings = part("settings")
    run = settings.Run(settings.TINY, torch.device("cpu"), time.monotonic() + 60)
    cases = part("loss_exact").measure(run)["cases"]
    for name in ("bfloat16 autocast", "float16 autocast", "float16 autocast, scaler"):
        errors = cases[f"{name}, none"]["relative_errors"]
        assert 1e-5 < errors["queries"] < 1e-2


def test_no_part_starts_after_the_deadline(tmp_path, capsys):
    code, records = run_parts(tmp_path, "--minutes", 0)
    assert code == 0
    assert records == {}
    assert capsys.readouterr().out.count("NOT RUN: the 0 minutes were over") == 3


def test_record_counts_the_turns_that_were_not_run(part, monkeypatch):
    settings = part("settings")
    update_time = part("update_time")
    methods_run = []
    run_update = update_time.run_update

    def slow_update(method, loss_fn, optimizer, run):
        methods_run.append(method)
        return run_update(method, loss_fn, optimizer, run)

    # The clock passes the deadline after the warm-up and one turn of three methods.
    monkeypatch.setattr(update_time, "run_update", slow_update)
    monkeypatch.setattr(time, "monotonic", lambda: len(methods_run))
    run = settings.Run(settings.TINY, torch.device("cpu"), deadline=11)
    result = update_time.measure(run)
    assert result["turns"] == 1
    assert result["not_run"] == "1 of 2 turns: the time was over"
