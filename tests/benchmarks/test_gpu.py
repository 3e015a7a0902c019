"""benchmarks/gpu.py: dry runs of its parts on the CPU, errors, and the tables of docs/gpu.md."""

import contextlib
import importlib
import io
import json
import math
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from programs import ROOT, run_program

PROGRAM = "benchmarks/gpu.py"
PAGE = ROOT / "docs" / "gpu.md"
PARTS = (
    *("update_time", "query_side", "search", "fit", "encoding", "decoder"),
    *("loss_exact", "host_syncs", "out_of_memory", "compile"),
)
GPU_ONLY = ("host_syncs", "out_of_memory", "search", "fit")


class DryRun(NamedTuple):
    """A run of the program: its exit code, its records by part, and what it printed."""

    code: int
    records: dict[str, Any]
    printed: str

    def cases(self, part: str) -> dict[str, Any]:
        return self.records[part]["result"]["cases"]


def run_parts(output: Path, *argv: Any) -> DryRun:
    """Run the program on the CPU with tiny sizes."""
    printed = io.StringIO()
    argv = ("--device", "cpu", "--tiny", "--output", output, *argv)
    with contextlib.redirect_stdout(printed), pytest.raises(SystemExit) as stopped:
        run_program(PROGRAM, *argv)
    records = {path.stem: json.loads(path.read_text()) for path in output.glob("*.json")}
    return DryRun(stopped.value.code, records, printed.getvalue())


@pytest.fixture(scope="module", autouse=True)
def _environment() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")  # the program sets it, too, but does not remove it
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        yield


@pytest.fixture(scope="module")
def program() -> SimpleNamespace:
    """Return the functions and values of the program."""
    return SimpleNamespace(**runpy.run_path(str(ROOT / PROGRAM)))


@pytest.fixture
def run(program) -> Any:
    """Return the settings of a dry run."""
    return program.Run(torch.device("cpu"), math.inf, is_tiny=True)


def test_exactness_and_query_side_run_and_record_a_given_commit(tmp_path):
    parts = ("loss_exact", "query_side")
    dry_run = run_parts(tmp_path, "--commit", "abc", "--part", *parts)
    assert dry_run.code == 0
    assert set(dry_run.records) == set(parts)
    for record in dry_run.records.values():
        assert record["result"]["passed"]
        assert record["git_commit"] == "abc"
    cases = dry_run.cases("loss_exact")
    for drift_compensation in ("none", "auto"):
        errors = cases[f"float64, {drift_compensation}"]["relative_errors"]
        assert set(errors) == {"queries", "passages", "negatives"}
        assert max(errors.values()) <= 1e-12
    for name in ("bfloat16 autocast", "float16 autocast", "float16 autocast, scaler"):
        assert 1e-5 < cases[f"{name}, none"]["relative_errors"]["queries"] < 1e-2
    for dtype in ("float16", "float32"):
        assert 0 < dry_run.cases("query_side")[f"gradient, {dtype}"]["error"] < 1e-5


@pytest.mark.long
def test_every_part_writes_a_record_and_prints_what_was_not_run(program, tmp_path):
    dry_run = run_parts(tmp_path)
    assert dry_run.code == 0
    assert set(dry_run.records) == set(PARTS)
    tables = importlib.import_module("gpu_parts.tables")
    for name, record in dry_run.records.items():
        assert f"{PROGRAM} --device cpu --tiny" in record["command"]
        assert "peft" in record["versions"]
        assert record["device"]["type"] == "cpu"
        assert bool(record["result"]["cases"]) == (name not in GPU_ONLY)
        assert "failures" not in record["result"]
        table = tables.make_part_table(name, record)
        assert table.startswith("Not run: " if name in GPU_ONLY else "| ")
    assert "  NOT RUN: qlora, n=1: load_in_4bit needs" in dry_run.printed
    for case in dry_run.cases("update_time").values():
        for figures in case["methods"].values():
            seconds = figures["seconds"]
            assert 0 < seconds["low"] <= seconds["median"] <= seconds["high"]
            rate = figures["pairs_per_second"] * seconds["median"]
            assert rate == pytest.approx(case["pairs"])
        assert case["methods"]["mnrl"]["ratio"]["median"] == 1
    case = dry_run.cases("compile")["4, 8"]
    assert case["new_graphs"]["eager"] == 0
    for encoder in ("compiled", "compiled, CUDA graphs"):
        assert case["new_graphs"][encoder] > 0
        assert case["embedding_difference"][encoder] < 1e-5
    for case in dry_run.cases("encoding").values():
        tokens_per_second = case["encode_texts_per_second"] * case["tokens_per_text"]
        assert case["encode_tokens_per_second"] == pytest.approx(tokens_per_second)


def test_the_bank_is_full_when_an_update_is_timed(run):
    updates = importlib.import_module("measuring.updates")
    model = importlib.import_module("measuring.encoders").make_encoder("tiny", "cpu")
    update = updates.Update("contaccum", 8, 4, 32, 4, 8, vocabulary=100)
    assert updates.make_filled_loss(update, model, run).info_nce.bank.in_use == 32


def test_search_compares_all_indexes_with_the_exact_result():
    search = importlib.import_module("gpu_parts.search")
    cases = search.list_indexes(search.TINY, (), has_faiss_gpu=True)
    recalls = {name: measure()["recall"] for name, measure in cases}
    assert list(recalls) == [
        *("Flat, CPU", "Flat, GPU", "Flat, float16, GPU"),
        *("IVF4,PQ4np, CPU", "IVF4,PQ4np, GPU"),
    ]
    assert recalls["Flat, CPU"] == recalls["Flat, GPU"] == 1
    assert 0 < recalls["IVF4,PQ4np, CPU"] == recalls["IVF4,PQ4np, GPU"] < 1


@contextlib.contextmanager
def simulate_little_memory(trainer: Any) -> Any:
    """Raise an out-of-memory error in training on more than four queries at once."""

    def check(module: Any, arguments: Any) -> None:
        is_training = torch.is_grad_enabled() and module.training
        if is_training and len(arguments[0]["input_ids"]) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    handle = trainer.model.register_forward_pre_hook(check)
    yield
    handle.remove()


@pytest.mark.long
def test_recovery_from_a_simulated_memory_error_passes_the_checks(run):
    part = importlib.import_module("gpu_parts.out_of_memory")
    cases = part.list_recoveries(part.TINY, run, simulate_little_memory)
    results = {name: check() for name, check in cases}
    assert list(results) == ["halving, grad_accum", "halving, contaccum", "auto, contaccum"]
    for case in results.values():
        assert case["passed"]
        assert case["micro_batch"] == 4
        assert case["pairs_per_update"] == [16, 16]


# Errors


@pytest.fixture
def run_cases(program, run, monkeypatch, tmp_path):
    """Return a function that runs a part with these cases, and returns its record in the file."""

    def run_part(**cases: Any) -> Any:
        part = SimpleNamespace(TINY=None, list_cases=lambda sizes, run: iter(cases.items()))
        monkeypatch.setitem(sys.modules, "gpu_parts.own", part)
        with contextlib.suppress(KeyboardInterrupt):
            program.run_part("own", run, {}, tmp_path)
        return json.loads((tmp_path / "own.json").read_text())

    return run_part


def raise_error(error: BaseException) -> Any:
    def measure() -> None:
        raise error

    return measure


def test_a_failed_check_or_case_fails_the_part_and_the_other_cases_run(program, run_cases, capsys):
    out_of_memory = torch.OutOfMemoryError("CUDA out\n of memory" + 300 * "x")
    missing = program.NotMeasured("no GPU")
    result = run_cases(
        wrong=lambda: {"passed": False, "error": math.nan},
        full=raise_error(out_of_memory),
        missing=raise_error(missing),
        right=lambda: {"passed": True},
    )["result"]
    assert not result["passed"]
    assert result["cases"] == {
        "wrong": {"passed": False, "error": "NaN"},
        "right": {"passed": True},
    }
    [reason] = result["failures"]
    assert reason.startswith("full: OutOfMemoryError: CUDA out of memoryxxx")
    assert reason.endswith("...")
    assert result["not_run"] == "missing: no GPU"
    assert "Traceback" in capsys.readouterr().err


def test_a_killed_part_leaves_the_cases_that_it_has_measured(run_cases):
    record = run_cases(first=lambda: {"seconds": 1}, second=raise_error(KeyboardInterrupt()))
    assert list(record["result"]["cases"]) == ["first"]


def test_no_part_starts_after_the_deadline(tmp_path):
    run = run_parts(tmp_path, "--minutes", 0)
    assert (run.code, run.records) == (0, {})
    assert run.printed.count("NOT RUN: the 0 minutes were over") == len(PARTS)


# The page


def make_record(cases: dict[str, Any], **result: Any) -> dict[str, Any]:
    """Return a record of a part as if it had run on a GPU."""
    return {
        "result": {"sizes": {}, "cases": cases, **result},
        "seconds": 61.0,
        "date": "2026-11-24",
        "git_commit": "0123456789abcdef",
        "device": {"type": "cuda", "name": "NVIDIA H100"},
    }


@pytest.fixture
def fill_page(tmp_path):
    """Return a function that fills the page with the records of a folder, by the program."""
    page = tmp_path / "page.md"
    page.write_text(PAGE.read_text(encoding="utf-8"), encoding="utf-8")

    def fill(folder: Any) -> str:
        with pytest.raises(SystemExit) as stopped:
            run_program(PROGRAM, "--page", page, "--output", folder)
        assert stopped.value.code == 0
        return page.read_text(encoding="utf-8")

    return fill


def test_the_tables_of_the_page_are_those_of_the_committed_records(fill_page):
    page = fill_page(ROOT / "benchmarks" / "gpu")
    assert page == PAGE.read_text(encoding="utf-8")
    assert page.count("<!-- table: ") == 1 + 10


def test_the_page_names_parts_that_have_failed_or_not_run(fill_page, tmp_path):
    record = make_record({"none": {"micro_steps": 64, "waits": ["a.py:7"], "passed": False}})
    record["result"] |= {"passed": False, "not_run": "other: no time", "failures": ["third: no"]}
    (tmp_path / "host_syncs.json").write_text(json.dumps(record))
    page = fill_page(tmp_path)
    row = "| [`host_syncs`](#host_syncs) | failed | NVIDIA H100 | 2026-11-24 | `01234567` | 61 s |"
    assert row in page
    assert "Not yet run: `update_time`, `query_side`, `search`," in page
    assert "waits at `a.py:7`" in page
    assert "Not run: other: no time." in page
    assert "Failed: third: no." in page
