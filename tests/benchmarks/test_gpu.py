"""benchmarks/gpu.py: dry runs of every part on the CPU, with tiny sizes."""

import contextlib
import importlib
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gpu_program import PROGRAM, DryRun, run_parts

pytestmark = pytest.mark.long

PARTS = (
    "update_time",
    "query_side",
    "search",
    "fit",
    "encoding",
    "decoder",
    "loss_exact",
    "host_syncs",
    "out_of_memory",
    "compile",
    "study_cell",
)
GPU_ONLY = ("host_syncs", "out_of_memory", "search", "fit")


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory) -> DryRun:
    """A run of all parts."""
    return run_parts(tmp_path_factory.mktemp("gpu"))


def test_every_part_writes_a_record_or_prints_why_it_was_not_run(dry_run):
    assert dry_run.code == 0
    assert set(dry_run.records) == set(PARTS)
    for name, record in dry_run.records.items():
        assert f"{PROGRAM} --device cpu --tiny" in record["command"]
        assert record["versions"]["torch"] == torch.__version__
        assert "peft" in record["versions"]
        assert record["device"]["type"] == "cpu"
        assert record["is_tiny"]
        assert "git_commit" in record
        assert record["measured"] == (name not in GPU_ONLY)
        assert not record.get("failed")
    printed = dry_run.printed
    assert "host_syncs: NOT RUN: torch reports host syncs for CUDA only" in printed
    assert "out_of_memory: NOT RUN: torch can limit the memory of a GPU only" in printed
    assert "search: NOT RUN: the device is cpu" in printed
    assert "decoder: NOT RUN: qlora: load_in_4bit needs" in printed


def test_gradients_in_float64_equal_the_dense_loss(dry_run):
    cases = dry_run.records["loss_exact"]["result"]["cases"]
    assert len(cases) == 10
    for drift_compensation in ("none", "auto"):
        errors = cases[f"float64, {drift_compensation}"]["relative_errors"]
        assert set(errors) == {"queries", "passages", "negatives"}
        assert max(errors.values()) <= 1e-12


def test_updates_are_timed_with_a_full_bank(dry_run):
    cases = dry_run.records["update_time"]["result"]["cases"]
    assert [(case["local"], case["pairs"]) for case in cases] == [(4, 8), (1, 4)]
    for case in cases:
        assert case["turns"] == 2
        assert case["bank_rows_in_use"] == 32
        for figures in case["methods"].values():
            seconds = figures["seconds"]
            assert 0 < seconds["low"] <= seconds["median"] <= seconds["high"]
            rate = figures["pairs_per_second"] * seconds["median"]
            assert rate == pytest.approx(case["pairs"])
        assert case["methods"]["mnrl"]["ratio"]["median"] == 1


def test_a_decoder_is_measured_with_adapters_at_both_micro_batches(dry_run):
    adapters = dry_run.records["decoder"]["result"]["adapters"]
    lora = adapters["lora"]
    assert lora["trained_weights"] > 0
    for local in ("1", "2"):
        case = lora["micro_batches"][local]
        assert case["bank_rows_in_use"] == 16
        assert set(case["methods"]) == {
            "grad_accum",
            "grad_cache",
            "contaccum",
            "contaccum_cached",
        }
    assert "qlora" not in adapters


def test_compiled_updates_are_compared_with_eager_ones_at_each_length(dry_run):
    result = dry_run.records["compile"]["result"]
    assert [case["passage_length"] for case in result["lengths"]] == [8, 9]
    case = result["lengths"][0]
    assert case["new_graphs"]["eager"] == 0
    for encoder in ("compiled", "compiled, CUDA graphs"):
        assert case["new_graphs"][encoder] > 0
        assert result["embedding_difference"][encoder] < 1e-5
        assert case["first_seconds"][encoder] > case["seconds"][encoder]["high"]


def test_encoding_is_measured_for_each_backbone_precision_and_length(dry_run):
    cases = dry_run.records["encoding"]["result"]["cases"]
    assert len(cases) == 2 * 2 * 2
    for case in cases:
        tokens_per_second = case["encode_texts_per_second"] * case["tokens_per_text"]
        assert case["encode_tokens_per_second"] == pytest.approx(tokens_per_second)
        assert case["forward_texts_per_second"] > 0
        # A dry run has the smallest number of batches, unless the texts have too many tokens.
        assert case["forward_batches"] == 2
        assert case["texts"] == {4: 8, 8: 4}[case["tokens_per_text"]]


def test_the_number_of_forward_passes_depends_on_their_time(part, make_run):
    encoding = part("encoding")
    model = encoding.make_encoder(encoding.BACKBONES["tiny"], "cpu")
    nums_batches = []
    for seconds in (0.0, 1e9):
        sizes = replace(encoding.TINY, forward_seconds=seconds)
        forward = encoding.measure_forward("tiny", model, 4, "float32", sizes, make_run())
        nums_batches.append(forward["batches"])
    assert nums_batches == [2, encoding.TINY.max_batches]


def test_results_of_a_dry_run_fill_the_tables_of_their_parts(dry_run, part):
    tables = part("tables")
    for name, record in dry_run.records.items():
        table = tables.make_part_table(name, record)
        assert table.startswith("| " if record["measured"] else "*Not measured: ")


def test_an_error_in_one_case_is_recorded_and_the_other_cases_are_measured(
    part, make_run, monkeypatch, capsys
):
    encoding = part("encoding")
    make_encoder = encoding.make_encoder

    def fail_for_decoders(shape: Any, *args: Any, **options: Any) -> Any:
        if shape.is_decoder:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return make_encoder(shape, *args, **options)

    monkeypatch.setattr(encoding, "make_encoder", fail_for_decoders)
    result = encoding.measure(make_run())
    assert not result["passed"]
    assert result["failures"] == ["decoder-tiny: OutOfMemoryError: CUDA out of memory"]
    assert {case["backbone"] for case in result["cases"]} == {"tiny"}
    assert result["not_run"] == "4 of 8 cases"
    assert "Traceback" in capsys.readouterr().err
    assert "Failed: decoder-tiny" in part("tables").make_part_table(
        "encoding", {"measured": True, "is_partial": False, "result": result}
    )


def test_texts_for_encoding_have_the_number_of_tokens_that_is_recorded(part):
    encoders = importlib.import_module("measuring.encoders")
    tokenizer = encoders.make_tokenizer(encoders.make_words(50))
    texts = encoders.make_texts(6, num_tokens=9, num_words=50)
    assert {len(token_ids) for token_ids in tokenizer(texts)["input_ids"]} == {9}
    unknown = tokenizer.unk_token_id
    assert all(unknown not in token_ids for token_ids in tokenizer(texts)["input_ids"])


def test_query_side_reads_both_types_of_store_and_checks_the_gradient(dry_run):
    result = dry_run.records["query_side"]["result"]
    assert result["passed"]
    assert 0 < max(result["gradient_errors"].values()) < 1e-5
    for dtype in ("float16", "float32"):
        places = result["stores"][dtype]["places"]
        assert places["host"]["seconds"]["median"] > 0
        assert not places["host"]["is_in_gpu_memory"]
        assert places["device"] == {"not_measured": "there is no GPU"}


def test_a_wrong_gradient_of_the_query_side_fails_the_check(part, make_run, monkeypatch):
    query_side = part("query_side")
    get_embeddings = query_side.StoreDocuments.get_embeddings

    def wrong_embeddings(documents: Any, rows: torch.Tensor) -> torch.Tensor:
        return 1.1 * get_embeddings(documents, rows)

    monkeypatch.setattr(query_side.StoreDocuments, "get_embeddings", wrong_embeddings)
    assert not query_side.measure(make_run())["passed"]


def test_random_stores_are_read_like_those_of_the_writer(part, tmp_path):
    random_store = importlib.import_module("measuring.random_store")
    for dtype in ("float32", "float16"):
        identity = {"kind": "document", "dtype": dtype, "shard_size": 40, "similarity": "cos"}
        device = torch.device("cpu")
        store = random_store.write_random_store(tmp_path / dtype, identity, 100, 16, device)
        assert store.shape == (100, 16)
        assert store.num_shards == 3
        assert store.ids([0, 99]) == ["0", "99"]
        assert store.text_ids().tolist() == list(range(100))
        embeddings = store[:]
        assert abs(embeddings.mean()) < 0.1
        assert embeddings.std() == pytest.approx(1, abs=0.1)


def test_study_cell_trains_and_scores_every_method(dry_run):
    result = dry_run.records["study_cell"]["result"]
    assert not result["has_trained_weights"]
    assert set(result["methods"]) == {"grad_accum", "grad_cache", "contaccum", "contaccum_cached"}
    for figures in result["methods"].values():
        # The time of a dry run is over after the first update, whose learning rate is 0.
        assert figures["updates"] == 2
        assert figures["seconds_per_update"] == figures["seconds"] / 2 > 0
        assert 0 <= figures["ndcg@10"] <= 1


def test_trained_models_are_scored_without_the_autocast_of_training(part, make_run, monkeypatch):
    study_cell = part("study_cell")
    make_settings = study_cell.make_settings

    def make_bfloat16_options(*args: Any) -> list[str]:
        return replace(make_settings(*args), bf16=True)

    monkeypatch.setattr(study_cell, "make_settings", make_bfloat16_options)
    run = make_run()
    dataset = study_cell.load_beir_folder(study_cell.SCIFACT, "test")
    precisions = []
    with study_cell.prepare_model(run, study_cell.TINY, dataset) as model:
        base = study_cell.load_base_model(model.folder, run, study_cell.TINY)
        trained, _ = study_cell.train("contaccum", model.folder, run, study_cell.TINY, 0.0)
    for encoder in (base, trained):
        encoder[0].register_forward_hook(
            lambda *args: precisions.append(torch.is_autocast_enabled("cpu"))
        )
        encoder.encode_document(["a text"])
    assert precisions == [False, False]


def test_a_time_budget_ends_training_at_the_first_update_after_it(part, make_run, monkeypatch):
    study_cell = part("study_cell")
    clock = iter([100.0, 104.0, 108.0, 112.0])
    monkeypatch.setattr(study_cell.time, "perf_counter", lambda: next(clock))
    budget = study_cell.TimeBudget(make_run(), 10.0)
    stops = []
    for _ in range(3):
        control = study_cell.TrainerControl()
        budget.on_step_begin(None, None, control)
        budget.on_step_end(None, None, control)
        stops.append(control.should_training_stop)
    assert stops == [False, False, True]
    assert budget.seconds == 12.0
    assert budget.num_updates == 3


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
    cases = out_of_memory.check_recovery(
        make_run(), out_of_memory.TINY, lambda trainer: simulate_little_memory(trainer, 4)
    )
    assert len(cases) == 3
    for case in cases.values():
        assert case["passed"]
        assert case["micro_batch"] == 4
        assert case["pairs_per_update"] == [16, 16]
    halving = cases["halving, grad_accum"]
    assert halving["relative_difference"] < 1e-4
    assert "out of memory at a micro-batch of 8" in halving["warnings"][0]
    assert "| auto, contaccum | 16 | 4 |" in part("tables").make_out_of_memory_table(
        {"cases": cases}
    )


def test_no_check_of_memory_errors_starts_after_the_deadline(part, make_run):
    out_of_memory = part("out_of_memory")
    assert out_of_memory.check_recovery(make_run(deadline=0), out_of_memory.TINY, None) == {}


@pytest.fixture
def cuda_calls(part, monkeypatch) -> list[tuple[str, Any]]:
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
    settings = part("settings")
    monkeypatch.setattr(settings.Run, "is_cuda", True)
    monkeypatch.setattr(settings.gc, "collect", lambda: 0)  # slow, and of no use on a CPU
    return calls


def test_a_clock_is_read_after_the_gpu_has_finished(part, make_run, cuda_calls, monkeypatch):
    perf_counter = time.perf_counter

    def read_clock() -> float:
        cuda_calls.append(("clock", None))
        return perf_counter()

    monkeypatch.setattr(part("turns").time, "perf_counter", read_clock)
    update_time = part("update_time")
    monkeypatch.setattr(update_time, "PROFILED_METHODS", ())
    result = update_time.measure(make_run())
    names = [name for name, _ in cuda_calls]
    update = [
        "synchronize",
        "reset_peak_memory_stats",
        "clock",
        "synchronize",
        "clock",
        "max_memory_allocated",
    ]
    num_updates = 4 * 3  # methods, and turns with the warm-up
    case = num_updates * update + ["empty_cache"]
    assert names == len(result["cases"]) * case
    assert result["cases"][0]["methods"]["contaccum"]["peak_mb"] == 3 * 2**10


def test_runs_that_never_run_out_of_memory_fail_the_checks(part, make_run, cuda_calls):
    result = part("out_of_memory").measure(make_run())
    assert not result["passed"]
    assert [case["passed"] for case in result["cases"].values()] == [False] * 3
    assert result["cases"]["halving, grad_accum"]["relative_difference"] == 0
    # Each of the three runs with a limit restores the whole memory.
    fractions = [value for name, value in cuda_calls if name == "set_per_process_memory_fraction"]
    assert fractions == [0.25, 1.0] * 3


def test_search_compares_all_indexes_with_the_exact_result(part, make_run):
    search = part("search")
    nums_saved = []
    run = replace(make_run(), save_partial=lambda result: nums_saved.append(len(result["cases"])))
    result = search.measure_indexes(run, search.TINY, (), has_faiss_gpu=True, has_cuvs=True)
    assert nums_saved == [1, 2, 3, 4, 5, 6, 7]
    recalls = {name: case["recall"] for name, case in result["cases"].items()}
    approximate = ["IVF4,PQ4np, CPU", "IVF4,PQ4np, GPU", "HNSW4, CPU", "HNSW4, GPU"]
    assert list(recalls) == [*search.EXACT_CASES, *approximate]
    assert recalls["Flat, CPU"] == recalls["Flat, GPU"] == 1
    assert list(result["build_seconds"]) == ["IVF4,PQ4np", "HNSW4"]
    table = part("tables").make_search_table(result)
    assert table.count("| 1.000 |") == 3 + 2 * (recalls["HNSW4, CPU"] == 1)
    assert 0 < recalls["IVF4,PQ4np, CPU"] == recalls["IVF4,PQ4np, GPU"] < 1


def test_a_wrong_gradient_fails_the_check_and_the_program(part, tmp_path, monkeypatch):
    loss_exact = part("loss_exact")
    dense_gradients = loss_exact.dense_gradients

    def wrong_gradients(*args):
        queries, passages, negatives = dense_gradients(*args)
        return [queries, passages, 1.1 * negatives]

    monkeypatch.setattr(loss_exact, "dense_gradients", wrong_gradients)
    run = run_parts(tmp_path, "--part", "loss_exact")
    assert run.code == 1
    result = run.records["loss_exact"]["result"]
    assert not result["passed"]
    errors = result["cases"]["float64, none"]["relative_errors"]
    assert errors["negatives"] == pytest.approx(1 - 1 / 1.1)
    assert "loss_exact: FAILED" in run.printed
    assert "update_time: NOT RUN: not in --part" in run.printed


def test_an_error_of_a_part_is_recorded_and_the_next_part_runs(part, tmp_path, monkeypatch, capsys):
    def fail(run: Any) -> None:
        raise TypeError("no such function on this device")

    monkeypatch.setattr(part("loss_exact"), "measure", fail)
    run = run_parts(tmp_path, "--part", "loss_exact", "update_time")
    assert run.code == 1
    assert run.records["loss_exact"]["reason"] == "TypeError: no such function on this device"
    assert "loss_exact: FAILED: TypeError: no such function on this device" in run.printed
    assert run.records["update_time"]["measured"]
    assert "Traceback" in capsys.readouterr().err


def test_errors_of_half_precision_are_measured(part, make_run):
    cases = part("loss_exact").measure(make_run())["cases"]
    for name in ("bfloat16 autocast", "float16 autocast", "float16 autocast, scaler"):
        errors = cases[f"{name}, none"]["relative_errors"]
        assert 1e-5 < errors["queries"] < 1e-2


def test_no_part_starts_after_the_deadline(tmp_path):
    run = run_parts(tmp_path, "--minutes", 0)
    assert run.code == 0
    assert run.records == {}
    assert run.printed.count("NOT RUN: the 0 minutes were over") == len(PARTS)


@pytest.mark.parametrize("name", ["update_time", "encoding", "study_cell"])
def test_a_part_without_any_time_is_not_measured(name, part, make_run):
    settings = part("settings")
    with pytest.raises(settings.NotMeasured, match="the time was over before the first"):
        part(name).measure(make_run(deadline=0))


def test_record_counts_the_turns_that_were_not_run(part, make_run, monkeypatch):
    turns = part("turns")
    methods_run = []
    run_update = turns.run_update

    def slow_update(method, *args):
        methods_run.append(method)
        return run_update(method, *args)

    # The clock passes the deadline after the warm-up and one turn of four methods.
    monkeypatch.setattr(turns, "run_update", slow_update)
    monkeypatch.setattr(time, "monotonic", lambda: len(methods_run))
    result = part("update_time").measure(make_run(deadline=7))
    (case,) = result["cases"]
    assert case["turns"] == 1
    assert result["not_run"] == (
        "tiny, n=4: 1 of 2 turns: the time was over; "
        "tiny, n=1: the time was over before the first turn; increase --minutes"
    )
