"""benchmarks/gpu.py: errors, missing packages, ends of the program, and refused settings."""

import json
import os
import runpy
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from gpu_program import PROGRAM, run_parts
from programs import ROOT, run_program

pytestmark = pytest.mark.long

PACKAGES = ("faiss", "datasets", "pyarrow", "pytrec_eval", "peft")
OLD_RECORD = {"part": "loss_exact", "measured": True}


@pytest.fixture
def program(part, monkeypatch) -> SimpleNamespace:
    """Return the functions and values of the program."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return SimpleNamespace(**runpy.run_path(str(ROOT / PROGRAM)))


@pytest.fixture
def parse(program, monkeypatch) -> Callable[..., Any]:
    """Return a function that reads the command line of the program."""

    def parse_arguments(*argv: str) -> Any:
        monkeypatch.setattr(sys, "argv", [PROGRAM, *argv])
        return program.parse_arguments()

    return parse_arguments


def remove_parts() -> dict[str, ModuleType]:
    """Forget all imports of modules of the parts; return the modules."""
    names = [name for name in sys.modules if name.startswith("gpu_parts")]
    return {name: sys.modules.pop(name) for name in names}


@pytest.fixture
def without_packages(monkeypatch) -> Iterator[None]:
    """Let imports of the packages fail, as if they were not installed."""
    for name in PACKAGES:
        monkeypatch.setitem(sys.modules, name, None)
    earlier_modules = remove_parts()
    yield
    remove_parts()
    sys.modules.update(earlier_modules)


@pytest.mark.usefixtures("without_packages")
def test_a_part_without_its_package_is_not_measured_and_the_next_part_runs(tmp_path):
    run = run_parts(tmp_path, "--part", "search", "encoding", "loss_exact")
    assert run.code == 0
    assert run.records["search"]["reason"] == "faiss is not installed"
    assert run.records["encoding"]["reason"] == "pyarrow is not installed"
    assert "search: NOT RUN: faiss is not installed" in run.printed
    assert run.records["loss_exact"]["result"]["passed"]


@pytest.mark.usefixtures("without_packages")
def test_help_and_page_need_no_package_of_a_part(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    page = tmp_path / "page.md"
    page.write_text((ROOT / "docs" / "gpu.md").read_text(encoding="utf-8"), encoding="utf-8")
    for argv in (["--help"], ["--page", page, "--output", tmp_path]):
        with pytest.raises(SystemExit) as stopped:
            run_program(PROGRAM, *argv)
        assert stopped.value.code == 0
    assert "--bank_size" in capsys.readouterr().out


def test_an_error_of_nan_fails_the_checks_of_the_gradients(part, make_run, monkeypatch):
    loss_exact = part("loss_exact")
    dense_gradients = loss_exact.dense_gradients

    def gradients_with_nan(*args: Any) -> list[torch.Tensor]:
        queries, passages, negatives = dense_gradients(*args)
        return [queries, passages, negatives * float("nan")]

    monkeypatch.setattr(loss_exact, "dense_gradients", gradients_with_nan)
    assert not loss_exact.measure(make_run())["passed"]

    query_side = part("query_side")
    errors = {"float16": 1e-9, "float32": float("nan")}
    monkeypatch.setattr(query_side, "check_gradient", lambda dtype, *args: errors[dtype])
    assert not query_side.measure(make_run())["passed"]


def test_a_part_that_fails_keeps_its_finished_cases_and_an_earlier_record(
    part, tmp_path, monkeypatch, capsys
):
    def fail_after_a_case(run: Any) -> None:
        run.save_partial({"cases": {"first": float("nan")}})
        raise RuntimeError("first line\n\nsecond line" + 300 * "x")

    monkeypatch.setattr(part("loss_exact"), "measure", fail_after_a_case)
    (tmp_path / "loss_exact.json").write_text(json.dumps(OLD_RECORD))
    run = run_parts(tmp_path, "--part", "loss_exact")
    assert run.code == 1
    assert run.records["loss_exact"] == OLD_RECORD
    record = run.records["loss_exact.partial"]
    assert record["is_partial"]
    assert record["failed"]
    assert record["result"] == {"cases": {"first": "nan"}}
    # The reason is one line.
    assert record["reason"].startswith("RuntimeError: first line second line")
    assert len(record["reason"]) == 200
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name",
    [
        "decoder",
        pytest.param("compile", marks=pytest.mark.long),
        "encoding",
        "query_side",
        "study_cell",
        "update_time",
    ],
)
def test_a_part_of_several_cases_saves_each_of_them(name, part, make_run, monkeypatch):
    """The part is stopped after its first case."""
    results = []

    class Stopped(BaseException):
        """Not an Exception, so that it does not count as the failure of a case."""

    def save(result: dict[str, Any]) -> None:
        results.append(json.dumps(result))
        raise Stopped

    with pytest.raises(Stopped):
        part(name).measure(replace(make_run(), save_partial=save))
    result = json.loads(results[0])
    record = {"part": name, "measured": True, "is_partial": True, "result": result}
    assert "it was killed" in part("tables").make_part_table(name, record)


@pytest.mark.usefixtures("capsys")
def test_an_error_after_a_part_does_not_end_the_program(part, tmp_path, monkeypatch):
    """After some errors, every call of CUDA raises an error."""

    def fail(run: Any) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(part("settings").Run, "free_memory", fail)
    run = run_parts(tmp_path, "--part", "loss_exact", "compile")
    assert run.code == 1
    for name in ("loss_exact", "compile"):
        assert run.records[name]["measured"]
        assert f"{name}: FAILED: RuntimeError: an illegal memory access" in run.printed


def test_other_settings_are_written_to_another_folder(program, parse, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    results = program.RESULTS
    host_syncs = ("--device", "cuda", "--part", "host_syncs")
    study_cell = ("--device", "cuda", "--part", "study_cell")
    assert parse("--device", "cuda").output == results
    assert parse(*host_syncs, "--bank_size", "2048").output == results
    assert parse(*study_cell, "--seconds", "15").output == results
    for argv in (["--bank_size", "8192"], ["--local", "16"], ["--tiny"]):
        assert parse(*host_syncs, *argv).output == Path("runs/gpu")
    for argv in (["--seconds", "5"], ["--model", "folder"]):
        assert parse(*study_cell, *argv).output == Path("runs/gpu")
    assert parse("--device", "cpu").output == Path("runs/gpu")
    assert parse(*host_syncs, "--local", "16", "--output", "x").output == Path("x")
    assert parse(*study_cell, "--model", "folder", "--output", "x").output == Path("x")


def test_a_gpu_that_the_trainers_would_not_use_is_refused(parse, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for device in ("cuda:1", "cuda"):
        with pytest.raises(SystemExit):
            parse("--device", device)
        assert "CUDA_VISIBLE_DEVICES" in capsys.readouterr().err
    assert parse("--device", "cuda", "--page", "docs/gpu.md").page == Path("docs/gpu.md")


def test_the_time_is_counted_from_the_start_and_tf32_is_turned_off(program, parse):
    torch.backends.cuda.matmul.allow_tf32 = True
    run = program.make_run(parse("--device", "cpu", "--minutes", "2"))
    assert run.deadline == program.STARTED + 120
    assert not torch.backends.cuda.matmul.allow_tf32


def test_each_place_where_the_host_waits_is_listed_once(part, monkeypatch):
    host_syncs = part("host_syncs")

    def set_mode(mode: str) -> None:
        if mode == "warn":
            warnings.warn(
                "Synchronization debug mode is a prototype feature and does not yet detect all "
                "synchronizing operations",
                stacklevel=2,
            )

    def wait() -> None:
        warnings.warn("an unrelated warning", stacklevel=1)
        for _ in range(2):
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)

    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)
    line = wait.__code__.co_firstlineno + 3
    assert host_syncs.find_waits(wait) == [f"tests/benchmarks/test_gpu_errors.py:{line}"]
    assert host_syncs.find_waits(lambda: None) == []
    assert host_syncs.shorten_path(torch.nn.functional.__file__) == "torch/nn/functional.py"


def test_recall_is_missing_if_no_exact_search_was_measured(part, make_run, monkeypatch, capsys):
    search = part("search")
    measure_search = search.measure_search

    def fail_for_the_exact_index(index: Any, *args: Any) -> Any:
        if index.factory == "Flat":
            raise RuntimeError("out of memory")
        return measure_search(index, *args)

    monkeypatch.setattr(search, "measure_search", fail_for_the_exact_index)
    result = search.measure_indexes(make_run(), search.TINY, (), True, has_cuvs=False)
    recalls = {name: case["recall"] for name, case in result["cases"].items()}
    assert recalls == {"IVF4,PQ4np, CPU": None, "IVF4,PQ4np, GPU": None}
    assert result["failures"][0] == "Flat, CPU: RuntimeError: out of memory"
    assert part("tables").make_search_table(result).count(" | - |") == 2
    assert "Traceback" in capsys.readouterr().err


def test_compiling_does_not_use_the_code_of_earlier_runs(part, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/earlier")
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    with part("compile").use_empty_caches():
        folder = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
        assert list(folder.iterdir()) == []
        assert Path(os.environ["TRITON_CACHE_DIR"]).parent == folder
    assert not folder.exists()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/earlier"
    assert "TRITON_CACHE_DIR" not in os.environ
