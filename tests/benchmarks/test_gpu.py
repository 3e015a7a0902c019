"""benchmarks/gpu.py: dry runs of every part on the CPU, with tiny sizes, and its errors."""

import contextlib
import importlib
import json
import os
import runpy
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gpu_program import PROGRAM, DryRun, run_parts
from programs import ROOT

pytestmark = pytest.mark.long

PARTS = (
    *("update_time", "query_side", "search", "fit", "encoding", "decoder"),
    *("loss_exact", "host_syncs", "out_of_memory", "compile"),
)
GPU_ONLY = ("host_syncs", "out_of_memory", "search", "fit")


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory) -> DryRun:
    """A run of all parts."""
    return run_parts(tmp_path_factory.mktemp("gpu"))


def get_cases(dry_run: DryRun, part: str) -> dict[str, Any]:
    return dry_run.records[part]["result"]["cases"]


# What the parts measure


def test_every_part_writes_a_record_and_prints_what_was_not_run(dry_run, part):
    assert dry_run.code == 0
    assert set(dry_run.records) == set(PARTS)
    tables = part("tables")
    for name, record in dry_run.records.items():
        assert f"{PROGRAM} --device cpu --tiny" in record["command"]
        assert record["versions"]["torch"] == torch.__version__
        assert "peft" in record["versions"]
        assert record["device"]["type"] == "cpu"
        assert "git_commit" in record
        assert bool(record["result"]["cases"]) == (name not in GPU_ONLY)
        assert "failures" not in record["result"]
        table = tables.make_part_table(name, record)
        assert table.startswith("Not run: " if name in GPU_ONLY else "| ")
    for reason in (
        "torch reports host syncs for CUDA only",
        "torch can limit the memory of a GPU only",
        "the device is cpu, not a GPU",
        "qlora, n=1: load_in_4bit needs",
    ):
        assert f"  NOT RUN: {reason}" in dry_run.printed


def test_gradients_in_float64_equal_the_dense_loss(dry_run):
    cases = get_cases(dry_run, "loss_exact")
    assert len(cases) == 10
    for drift_compensation in ("none", "auto"):
        errors = cases[f"float64, {drift_compensation}"]["relative_errors"]
        assert set(errors) == {"queries", "passages", "negatives"}
        assert max(errors.values()) <= 1e-12
    for name in ("bfloat16 autocast", "float16 autocast", "float16 autocast, scaler"):
        assert 1e-5 < cases[f"{name}, none"]["relative_errors"]["queries"] < 1e-2


def test_updates_are_timed_in_turns(dry_run):
    cases = get_cases(dry_run, "update_time")
    assert [(case["local"], case["pairs"]) for case in cases.values()] == [(4, 8), (1, 4)]
    for case in cases.values():
        for figures in case["methods"].values():
            seconds = figures["seconds"]
            assert len(figures["all_seconds"]) == 2
            assert 0 < seconds["low"] <= seconds["median"] <= seconds["high"]
            rate = figures["pairs_per_second"] * seconds["median"]
            assert rate == pytest.approx(case["pairs"])
        assert case["methods"]["mnrl"]["ratio"]["median"] == 1


def test_the_bank_is_full_when_an_update_is_timed(part, make_run):
    updates = importlib.import_module("measuring.updates")
    model = part("update_time").make_encoder("tiny", "cpu")
    update = updates.Update("contaccum", 8, 4, 32, 4, 8, vocabulary=100)
    assert updates.make_filled_loss(update, model, make_run()).info_nce.bank.in_use == 32


def test_a_decoder_is_measured_with_adapters_at_both_micro_batches(dry_run):
    cases = get_cases(dry_run, "decoder")
    assert list(cases) == ["lora, n=1", "lora, n=2"]
    for case in cases.values():
        assert case["trained_weights"] > 0
        assert set(case["methods"]) == {
            *("grad_accum", "grad_cache", "contaccum", "contaccum_cached"),
        }


def test_compiled_updates_are_compared_with_eager_ones_at_each_length(dry_run):
    cases = get_cases(dry_run, "compile")
    assert list(cases) == ["4, 8", "5, 9"]
    case = cases["4, 8"]
    assert case["new_graphs"]["eager"] == 0
    for encoder in ("compiled", "compiled, CUDA graphs"):
        assert case["new_graphs"][encoder] > 0
        assert case["embedding_difference"][encoder] < 1e-5
        assert case["first_seconds"][encoder] > case["seconds"][encoder]["high"]


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


def test_encoding_is_measured_for_each_backbone_precision_and_length(dry_run):
    cases = get_cases(dry_run, "encoding")
    assert len(cases) == 2 * 2 * 2
    for case in cases.values():
        tokens_per_second = case["encode_texts_per_second"] * case["tokens_per_text"]
        assert case["encode_tokens_per_second"] == pytest.approx(tokens_per_second)
        assert case["forward_texts_per_second"] > 0
        # A dry run has the smallest number of batches, unless the texts have too many tokens.
        assert case["forward_batches"] == 2
        assert case["texts"] == {4: 8, 8: 4}[case["tokens_per_text"]]


def test_the_number_of_forward_passes_depends_on_their_time(part, make_run):
    encoding = part("encoding")
    model = encoding.make_encoder("tiny", "cpu")
    nums_batches = []
    for seconds in (0.0, 1e9):
        sizes = replace(encoding.TINY, forward_seconds=seconds)
        num_batches, _ = encoding.measure_forward("tiny", model, 4, "float32", sizes, make_run())
        nums_batches.append(num_batches)
    assert nums_batches == [2, encoding.TINY.max_batches]


def test_texts_for_encoding_have_the_number_of_tokens_that_is_recorded(part):
    encoding = part("encoding")
    tokenizer = encoding.make_encoder("tiny", "cpu", num_words=50).tokenizer
    token_ids = tokenizer(encoding.make_texts(6, num_tokens=9, num_words=50))["input_ids"]
    assert {len(ids) for ids in token_ids} == {9}
    assert all(tokenizer.unk_token_id not in ids for ids in token_ids)


def test_query_side_reads_both_types_of_store_and_checks_the_gradient(dry_run):
    cases = get_cases(dry_run, "query_side")
    for dtype in ("float16", "float32"):
        assert 0 < cases[f"gradient, {dtype}"]["error"] < 1e-5
        host = cases[f"{dtype}, host"]
        assert host["seconds"]["median"] > 0
        assert not host["is_in_gpu_memory"]
        assert f"{dtype}, device: there is no GPU" in dry_run.printed


def test_a_wrong_gradient_of_the_query_side_fails_the_check(part, make_run, monkeypatch):
    query_side = part("query_side")
    get_embeddings = query_side.StoreDocuments.get_embeddings

    def wrong_embeddings(documents: Any, rows: torch.Tensor) -> torch.Tensor:
        return 1.1 * get_embeddings(documents, rows)

    monkeypatch.setattr(query_side.StoreDocuments, "get_embeddings", wrong_embeddings)
    _, check = next(query_side.list_cases(query_side.TINY, make_run()))
    assert not check()["passed"]


def test_random_stores_are_read_like_those_of_the_writer(part, tmp_path, monkeypatch):
    query_side = part("query_side")
    monkeypatch.setattr(query_side, "SHARD_SIZE", 40)
    model = query_side.make_encoder("tiny", "cpu", similarity="cos")
    for dtype in ("float32", "float16"):
        store = query_side.write_random_store(tmp_path / dtype, model, dtype, 100)
        assert store.shape == (100, 32)
        assert store.num_shards == 3
        assert store.ids([0, 99]) == ["0", "99"]
        assert store.text_ids().tolist() == list(range(100))
        embeddings = store[:]
        assert abs(embeddings.mean()) < 0.1
        assert embeddings.std() == pytest.approx(1, abs=0.1)


def test_search_compares_all_indexes_with_the_exact_result(part):
    search = part("search")
    cases = search.list_indexes(search.TINY, (), has_faiss_gpu=True, has_cuvs=True)
    recalls = {name: measure()["recall"] for name, measure in cases}
    exact = ["Flat, CPU", "Flat, GPU", "Flat, float16, GPU"]
    approximate = ["IVF4,PQ4np, CPU", "IVF4,PQ4np, GPU", "HNSW4, CPU", "HNSW4, GPU"]
    assert list(recalls) == [*exact, *approximate]
    assert recalls["Flat, CPU"] == recalls["Flat, GPU"] == 1
    assert 0 < recalls["IVF4,PQ4np, CPU"] == recalls["IVF4,PQ4np, GPU"] < 1


def test_recall_is_missing_if_no_exact_search_was_measured(part):
    search = part("search")
    cases = dict(search.list_indexes(search.TINY, (), has_faiss_gpu=True, has_cuvs=False))
    assert cases["IVF4,PQ4np, CPU"]()["recall"] is None
    with pytest.raises(search.NotMeasured, match="FAISS without cuVS"):
        cases["HNSW4, GPU"]()


@contextlib.contextmanager
def simulate_little_memory(trainer: Any, max_rows: int) -> Any:
    """Raise an out-of-memory error in training on more than ``max_rows`` queries at once."""

    def check(module: Any, arguments: Any) -> None:
        features = arguments[0]
        is_training = torch.is_grad_enabled() and module.training
        if is_training and len(features["input_ids"]) > max_rows:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    handle = trainer.model.register_forward_pre_hook(check)
    yield
    handle.remove()


def test_recovery_from_a_simulated_memory_error_passes_the_checks(part, make_run):
    out_of_memory = part("out_of_memory")
    cases = out_of_memory.list_recoveries(
        out_of_memory.TINY, make_run(), lambda trainer: simulate_little_memory(trainer, 4)
    )
    results = {name: check() for name, check in cases}
    assert list(results) == ["halving, grad_accum", "halving, contaccum", "auto, contaccum"]
    for case in results.values():
        assert case["passed"]
        assert case["micro_batch"] == 4
        assert case["pairs_per_update"] == [16, 16]
    assert results["halving, grad_accum"]["relative_difference"] < 1e-4
    assert results["auto, contaccum"]["too_large"] == 16


@pytest.fixture
def cuda_calls(part, make_run, monkeypatch) -> list[tuple[str, Any]]:
    """Let a dry run on the CPU take the code path of a GPU; return a list of its calls of CUDA."""
    calls: list[tuple[str, Any]] = []
    values = {
        "synchronize": None,
        "empty_cache": None,
        "reset_peak_memory_stats": None,
        "max_memory_allocated": 3 * 2**30,
        "set_per_process_memory_fraction": None,
        "get_device_properties": SimpleNamespace(total_memory=12 * 2**30),
    }

    def record_calls(name: str, value: Any) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            calls.append((name, args[0] if args else None))
            return value

        return call

    for name, value in values.items():
        monkeypatch.setattr(torch.cuda, name, record_calls(name, value))
    run = importlib.import_module("measuring.run")
    monkeypatch.setattr(run.Run, "is_cuda", True)
    monkeypatch.setattr(run.gc, "collect", lambda: 0)  # slow, and of no use on a CPU
    return calls


def test_a_clock_is_read_after_the_gpu_has_finished(part, measure, cuda_calls, monkeypatch):
    perf_counter = time.perf_counter

    def read_clock() -> float:
        cuda_calls.append(("clock", None))
        return perf_counter()

    updates = importlib.import_module("measuring.updates")
    monkeypatch.setattr(updates.time, "perf_counter", read_clock)
    monkeypatch.setattr(part("update_time"), "PROFILED_METHODS", ())
    cases = measure("update_time")
    update = ["synchronize", "reset_peak_memory_stats", "clock", "synchronize", "clock"]
    update.append("max_memory_allocated")
    num_updates = 4 * 3  # methods, and turns with the warm-up
    assert [name for name, _ in cuda_calls] == len(cases) * num_updates * update
    assert cases["tiny, n=4"]["methods"]["contaccum"]["peak_mb"] == 3 * 2**10


def test_runs_that_never_run_out_of_memory_fail_the_checks(measure, cuda_calls):
    cases = measure("out_of_memory")
    assert [case["passed"] for case in cases.values()] == [False] * 3
    assert cases["halving, grad_accum"]["relative_difference"] == 0
    # Each of the three runs with a limit restores the whole memory.
    fractions = [value for name, value in cuda_calls if name == "set_per_process_memory_fraction"]
    assert fractions == [0.25, 1.0] * 3


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
    assert host_syncs.find_waits(wait) == [f"tests/benchmarks/test_gpu.py:{line}"]
    assert host_syncs.find_waits(lambda: None) == []


# The program


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


@pytest.mark.parametrize("factor", [1.1, float("nan")])
def test_a_wrong_gradient_fails_the_check_and_the_program(part, tmp_path, monkeypatch, factor):
    loss_exact = part("loss_exact")
    dense_gradients = loss_exact.dense_gradients

    def wrong_gradients(*args):
        queries, passages, negatives = dense_gradients(*args)
        return [queries, passages, factor * negatives]

    monkeypatch.setattr(loss_exact, "dense_gradients", wrong_gradients)
    run = run_parts(tmp_path, "--part", "loss_exact")
    assert run.code == 1
    assert not run.records["loss_exact"]["result"]["passed"]
    error = get_cases(run, "loss_exact")["float64, none"]["relative_errors"]["negatives"]
    assert error == ("NaN" if factor != factor else pytest.approx(1 - 1 / 1.1))
    assert "loss_exact: failed" in run.printed


def test_an_error_in_one_case_is_recorded_and_the_other_cases_and_parts_run(
    part, tmp_path, monkeypatch, capsys
):
    encoding = part("encoding")
    measure_forward = encoding.measure_forward

    def fail_for_long_texts(backbone: str, model: Any, length: int, *args: Any) -> Any:
        if length == 8:
            raise torch.OutOfMemoryError("CUDA out\n of memory" + 300 * "x")
        return measure_forward(backbone, model, length, *args)

    monkeypatch.setattr(encoding, "measure_forward", fail_for_long_texts)
    run = run_parts(tmp_path, "--part", "encoding", "loss_exact")
    assert run.code == 1
    result = run.records["encoding"]["result"]
    assert not result["passed"]
    assert len(result["cases"]) == len(result["failures"]) == 4
    reason = result["failures"][0]
    assert reason.startswith("tiny, float32, 8 tokens: OutOfMemoryError: CUDA out of memoryxxx")
    assert reason.endswith("...")
    assert f"  FAILED: {reason}" in run.printed
    assert reason in part("tables").make_part_table("encoding", run.records["encoding"])
    assert "Traceback" in capsys.readouterr().err
    assert run.records["loss_exact"]["result"]["passed"]


@pytest.mark.usefixtures("capsys")
def test_an_error_after_a_case_does_not_end_the_program(part, make_run, tmp_path, monkeypatch):
    """After some errors, every call of CUDA raises an error."""

    def fail(run: Any) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(importlib.import_module("measuring.run").Run, "free_memory", fail)
    run = run_parts(tmp_path, "--part", "loss_exact", "compile")
    assert run.code == 1
    for name in ("loss_exact", "compile"):
        assert len(get_cases(run, name)) == 1
        assert f"  FAILED: {name}: RuntimeError: an illegal memory access" in run.printed


def test_a_killed_part_leaves_the_cases_that_it_has_measured(part, tmp_path, monkeypatch):
    loss_exact = part("loss_exact")
    measure_errors = loss_exact.measure_errors

    def stop_at_float32(embeddings: Any, ids: Any, local: int, precision: str, *args: Any) -> Any:
        if precision == "float32":
            raise KeyboardInterrupt
        return measure_errors(embeddings, ids, local, precision, *args)

    monkeypatch.setattr(loss_exact, "measure_errors", stop_at_float32)
    with pytest.raises(KeyboardInterrupt):
        run_parts(tmp_path, "--part", "loss_exact")
    record = json.loads((tmp_path / "loss_exact.json").read_text())
    assert list(record["result"]["cases"]) == ["float64, none", "float64, auto"]


def test_a_part_without_its_package_is_not_measured_and_the_next_part_runs(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    monkeypatch.delitem(sys.modules, "gpu_parts.search", raising=False)
    run = run_parts(tmp_path, "--part", "search", "loss_exact")
    assert run.code == 0
    assert run.records["search"]["result"]["not_run"] == "faiss is not installed"
    assert run.records["loss_exact"]["result"]["passed"]


def test_no_part_starts_after_the_deadline(tmp_path):
    run = run_parts(tmp_path, "--minutes", 0)
    assert run.code == 0
    assert run.records == {}
    assert run.printed.count("NOT RUN: the 0 minutes were over") == len(PARTS)


def test_turns_end_at_the_deadline(part, make_run, monkeypatch):
    updates = importlib.import_module("measuring.updates")
    methods_run = []
    run_update = updates.run_update

    def slow_update(update: Any, *args: Any) -> Any:
        methods_run.append(update.method)
        return run_update(update, *args)

    # The clock passes the deadline after the warm-up and one turn of four methods.
    monkeypatch.setattr(updates, "run_update", slow_update)
    monkeypatch.setattr(time, "monotonic", lambda: len(methods_run))
    update_time = part("update_time")
    (_, first), (_, second) = update_time.list_cases(update_time.TINY, make_run(deadline=7))
    assert len(first()["methods"]["contaccum"]["all_seconds"]) == 1
    with pytest.raises(updates.NotMeasured, match="the time was over before the first turn"):
        second()


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
