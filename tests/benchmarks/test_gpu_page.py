"""docs/gpu.md: its tables are those of the results in benchmarks/gpu."""

import importlib
from collections.abc import Callable
from dataclasses import asdict
from types import ModuleType
from typing import Any

import pytest
from programs import ROOT, run_program

from contaccum.evaluation.results import fill_page

PAGE = ROOT / "docs" / "gpu.md"
RESULTS = ROOT / "benchmarks" / "gpu"
SECONDS = {"low": 0.9, "median": 1.0, "high": 1.1}
RESULTS_BY_PART: dict[str, dict[str, Any]] = {
    "loss_exact": {
        "passed": True,
        "cases": {
            "float32, auto": {
                "relative_errors": {"queries": 1e-7, "passages": 2e-7, "negatives": 3e-7},
                "limit": 1e-5,
                "passed": True,
            }
        },
    },
    "host_syncs": {
        "passed": False,
        "cases": {
            "none": {"micro_steps": 64, "waits": [], "passed": True},
            "auto": {"micro_steps": 64, "waits": ["a.py:7", "b.py:9"], "passed": False},
        },
    },
    "update_time": {
        "cases": [
            {
                "backbone": "minilm",
                "local": 8,
                "methods": {
                    "grad_cache": {
                        "pairs_per_second": 120.0,
                        "ratio": {"median": 1.5},
                        "peak_mb": "not measured on a CPU",
                    },
                    "contaccum": {
                        "pairs_per_second": 170.0,
                        "ratio": {"median": 1.06},
                        "peak_mb": 2345.6,
                        "launches_per_micro_step": 1480.25,
                        "busy_share": 0.123,
                    },
                },
            }
        ]
    },
    "fit": {
        "budget": "60s",
        "model": "all-MiniLM-L6-v2",
        "seconds": 58.1,
        "trials": [{"updates": 40}, {"updates": 55}],
        "scores": [{"name": "BM25", "dev": 0.65, "NDCG@10": 0.66}],
        "verdict": {"line": "BETTER: nDCG@10 0.645 -> 0.733"},
        "peak_mb": 2000.0,
    },
    "decoder": {
        "adapters": {
            "lora": {
                "micro_batches": {
                    "1": {
                        "methods": {
                            "grad_cache": {
                                "seconds": SECONDS,
                                "ratio": {"median": 1.5},
                                "peak_mb": 1500.0,
                            }
                        }
                    },
                    "2": {"not_run": "n=2: the time was over"},
                }
            },
        },
        "not_run": "qlora: load_in_4bit needs bitsandbytes",
    },
    "out_of_memory": {
        "passed": True,
        "cases": {
            "halving, grad_accum": {
                "too_large": 64,
                "micro_batch": 32,
                "pairs_per_update": [256, 256],
                "relative_difference": 2e-6,
                "passed": True,
            },
            "auto, contaccum": {
                "too_large": 256,
                "micro_batch": 32,
                "pairs_per_update": [256, 256],
                "relative_difference": None,
                "passed": True,
            },
        },
    },
    "compile": {
        "lengths": [
            {
                "query_length": 32,
                "passage_length": 128,
                "seconds": {"eager": SECONDS, "compiled": SECONDS},
                "ratio": {"compiled": {"median": 0.7}},
                "first_seconds": {"eager": 1.1, "compiled": 34.0},
                "new_graphs": {"compiled": 3},
            }
        ]
    },
    "encoding": {
        "cases": [
            {
                "backbone": "minilm",
                "precision": "bfloat16",
                "tokens_per_text": 128,
                "encode_texts_per_second": 5000.0,
                "encode_tokens_per_second": 640_000.0,
                "forward_texts_per_second": 20_000.0,
                "share_of_forward": 0.25,
            }
        ]
    },
    "query_side": {
        "passed": True,
        "sizes": {"documents": 10_000_000},
        "gradient_errors": {"float16": 2e-7},
        "limits": {"float16": 1e-3, "float32": 1e-5},
        "stores": {
            "float16": {
                "store_bytes": 7.9e9,
                "places": {
                    "device": {
                        "seconds": SECONDS,
                        "warm_up_seconds": [30.0],
                        "is_in_gpu_memory": True,
                        "peak_mb": 16_000.0,
                    },
                    "host": {"not_measured": "the time was over"},
                },
            },
            "float32": {
                "documents": 1_000_000,
                "store_bytes": 1.6e9,
                "places": {
                    "device": {
                        "seconds": SECONDS,
                        "warm_up_seconds": [30.0],
                        "is_in_gpu_memory": False,
                        "peak_mb": 900.0,
                    },
                },
            },
        },
    },
    "study_cell": {
        "budget_seconds": 15.0,
        "model": "random weights",
        "has_trained_weights": False,
        "base_score": 0.0123,
        "methods": {
            "contaccum": {
                "updates": 1200,
                "seconds_per_update": 0.0333,
                "ndcg@10": 0.7654,
                "peak_mb": 900.0,
            }
        },
    },
    "search": {
        "sizes": {"documents": 1_000_000, "queries": 1000, "k": 100},
        "build_seconds": {"IVF4096": 0.25},
        "cases": {
            "Flat, GPU": {
                "first_seconds": 2.5,
                "seconds": SECONDS,
                "queries_per_second": 1000.0,
                "recall": 1.0,
            }
        },
    },
}
EXPECTED_ROWS = {
    "loss_exact": ["| float32, auto | 1e-07 | 2e-07 | 3e-07 | 1e-05 | passed |"],
    "host_syncs": [
        "| `none` | 64 | the host never waits |",
        "| `auto` | 64 | waits at `a.py:7`, `b.py:9` |",
    ],
    "update_time": [
        "| minilm | 8 | `grad_cache` | 120 | 1.50 | - |  |  |",
        "| minilm | 8 | `contaccum` | 170 | 1.06 | 2,346 MB | 1,480 | 12% |",
    ],
    "fit": [
        "| all-MiniLM-L6-v2, 60s | dev | NDCG@10 |",
        "| BM25 | 65.0 | 66.0 |",
        "BETTER: nDCG@10 0.645 -> 0.733. It took 58 s, with trials of 40 updates, 55 updates; peak "
        "memory 2,000 MB.",
    ],
    "decoder": [
        "| lora | 1 | `grad_cache` | 1.0 | 1.50 | 1,500 MB |",
        "Not run: qlora: load_in_4bit needs bitsandbytes.",
    ],
    "out_of_memory": [
        "| halving, grad_accum | 64 | 32 | 256, 256 | 2e-06 | passed |",
        "| auto, contaccum | 256 | 32 | 256, 256 | - | passed |",
    ],
    "compile": [
        "| 32, 128 | eager | 1.0 |  | 1.1 |  |",
        "| 32, 128 | compiled | 1.0 | 0.70 | 34 | 3 |",
    ],
    "encoding": ["| minilm | bfloat16 | 128 | 5,000 | 640,000 | 20,000 | 25% |"],
    "query_side": [
        "| 10,000,000 | float16, 7.9 GB | GPU | 1.0 | 30 | 16,000 MB |",
        "| 1,000,000 | float32, 1.6 GB | host, because they did not fit into the GPU's | 1.0 |",
        "Error of the gradient: 2e-07 (float16; the limit is 1e-03).",
    ],
    "study_cell": [
        "| before training |  |  | 1.2 |  |",
        "| `contaccum` | 1,200 | 0.033 | 76.5 | 900 MB |",
        "so the scores mean nothing",
    ],
    "search": [
        "| Flat, GPU | 2.5 | 1.0 | 1,000 | 1.000 |",
        "Building `IVF4096` took 0.25 s.",
    ],
}


@pytest.fixture
def tables(part) -> ModuleType:
    return part("tables")


@pytest.fixture
def records(part) -> ModuleType:
    return part("records")


@pytest.fixture
def make_record(part) -> Callable[..., dict[str, Any]]:
    """Return a function that makes a record of a part as if it had run on a GPU."""
    sizes = asdict(part("settings").Sizes())

    def make(part_name: str, **values: Any) -> dict[str, Any]:
        record = {
            "part": part_name,
            "measured": True,
            "is_partial": False,
            "result": RESULTS_BY_PART[part_name],
            "seconds": 61.0,
            "date": "2026-11-24",
            "git_commit": "0123456789abcdef",
            "device": {"type": "cuda", "name": "NVIDIA H100"},
            "sizes": sizes,
            "is_tiny": False,
        }
        return {**record, **values}

    return make


def test_the_tables_of_the_page_are_those_of_the_committed_results(tables, records, part):
    page = PAGE.read_text(encoding="utf-8")
    contents = tables.make_tables(records.read_records(RESULTS, part("settings").PARTS))
    assert fill_page(page, contents) == page
    assert page.count("<!-- table: ") == len(contents) == len(RESULTS_BY_PART) + 1


def test_the_program_fills_the_page_with_the_results_of_a_folder(
    records, make_record, tmp_path, monkeypatch
):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # the program sets it, too, but does not remove it
    page = tmp_path / "page.md"
    page.write_text(PAGE.read_text(encoding="utf-8"), encoding="utf-8")
    records.write_record(make_record("search"), tmp_path / "results")
    with pytest.raises(SystemExit) as stopped:
        run_program("benchmarks/gpu.py", "--page", page, "--output", tmp_path / "results")
    assert stopped.value.code == 0
    content = page.read_text(encoding="utf-8")
    row = "| [`search`](#search) | measured | Flat, GPU: 1.0 s | NVIDIA H100 | 2026-11-24 |"
    assert row in content
    assert content.count("ot yet run: `update_time`, `query_side`, `fit`,") == 1
    assert EXPECTED_ROWS["search"][0] in content


@pytest.mark.parametrize("part_name", RESULTS_BY_PART)
def test_the_table_of_a_part_shows_its_figures(tables, make_record, part_name):
    table = tables.make_part_table(part_name, make_record(part_name))
    for row in EXPECTED_ROWS[part_name]:
        assert row in table


def test_dry_runs_are_not_shown(tables, records, make_record, tmp_path):
    cpu = {"type": "cpu", "name": "x86_64"}
    records.write_record(make_record("search", device=cpu), tmp_path)
    records.write_record(make_record("encoding", is_tiny=True), tmp_path)
    shown = records.read_records(tmp_path, ["search", "encoding", "compile"])
    assert shown == {"search": None, "encoding": None, "compile": None}
    contents = tables.make_tables(shown)
    assert contents["search"] == contents["compile"] == ""
    assert "Not yet run: `search`, `encoding`, `compile`." in contents["runs"]


def test_runs_with_other_sizes_are_shown_only_for_parts_with_sizes_of_their_own(
    records, make_record, tmp_path
):
    sizes = {**make_record("host_syncs")["sizes"], "bank_size": 8192}
    for name in ("loss_exact", "host_syncs", "decoder"):
        records.write_record(make_record(name, sizes=sizes), tmp_path)
    shown = records.read_records(tmp_path, ["loss_exact", "host_syncs", "decoder"])
    assert [name for name, record in shown.items() if record is not None] == ["decoder"]


def test_a_study_cell_with_another_time_is_not_shown(records, make_record, tmp_path):
    result = {**RESULTS_BY_PART["study_cell"], "budget_seconds": 5.0}
    records.write_record(make_record("study_cell", result=result), tmp_path)
    assert records.read_records(tmp_path, ["study_cell"]) == {"study_cell": None}
    result = {**RESULTS_BY_PART["study_cell"], "model": "a folder"}
    records.write_record(make_record("study_cell", result=result), tmp_path)
    assert records.read_records(tmp_path, ["study_cell"])["study_cell"]["measured"]
    not_measured = make_record("study_cell", measured=False, reason="faiss is not installed")
    assert records.is_for_page(not_measured)


def test_a_part_that_a_gpu_could_not_measure_shows_the_reason(tables, make_record):
    record = make_record("search", measured=False, reason="this FAISS has no GPU")
    assert tables.make_part_table("search", record) == "*Not measured: this FAISS has no GPU*"
    shown = tables.make_runs_table({"search": record})
    assert "| [`search`](#search) | not measured |  | NVIDIA H100 |" in shown


def test_a_failed_check_is_shown_as_failed(tables, make_record):
    assert tables.get_outcome(make_record("host_syncs")) == "failed"
    assert tables.get_outcome(make_record("loss_exact")) == "passed"
    assert tables.get_outcome(make_record("compile")) == "measured"


def test_a_part_that_ended_with_an_error_is_shown_as_failed(tables, make_record):
    record = make_record("search", measured=False, failed=True, reason="TypeError: no index")
    assert tables.make_part_table("search", record) == "*Failed: TypeError: no index*"
    assert tables.get_outcome(record) == "failed"


def test_partial_results_are_shown_if_there_is_no_complete_one(
    tables, records, make_record, tmp_path
):
    failed = make_record("encoding", measured=False, failed=True, reason="RuntimeError: no memory")
    records.write_record(failed, tmp_path)
    records.write_record(make_record("encoding", is_partial=True), tmp_path)
    partial = records.read_records(tmp_path, ["encoding"])["encoding"]
    assert tables.get_outcome(partial) == "partial"
    table = tables.make_part_table("encoding", partial)
    assert EXPECTED_ROWS["encoding"][0] in table
    assert "The part ended before it was complete: it was killed." in table
    # A complete result removes the partial one.
    records.write_record(make_record("encoding"), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["encoding.json"]
    records.write_record(make_record("encoding", is_partial=True), tmp_path)
    assert not records.read_records(tmp_path, ["encoding"])["encoding"]["is_partial"]


def test_numbers_that_are_not_finite_are_written_and_shown_as_text(
    tables, records, make_record, tmp_path
):
    nan = float("nan")
    errors = {"queries": nan, "passages": float("inf"), "negatives": 3e-7}
    case = {"relative_errors": errors, "limit": 1e-5, "passed": False}
    exact = {"passed": False, "cases": {"float32, auto": case}}
    study = {**RESULTS_BY_PART["study_cell"], "base_score": nan}
    query_side = {**RESULTS_BY_PART["query_side"], "gradient_errors": {"float32": nan}}
    results = {"loss_exact": exact, "study_cell": study, "query_side": query_side}
    for name, result in results.items():
        records.write_record(make_record(name, result=result), tmp_path)
    contents = tables.make_tables(records.read_records(tmp_path, list(results)))
    assert "| float32, auto | nan | inf | 3e-07 | 1e-05 | failed |" in contents["loss_exact"]
    assert "| before training |  |  | nan |  |" in contents["study_cell"]
    assert "Error of the gradient: nan (float32; " in contents["query_side"]


def test_numbers_have_two_significant_digits_and_units(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    pages = importlib.import_module("measuring.pages")
    numbers = [pages.format_number(value) for value in (0, 0.2149, 9.96, 34.4, 12_960)]
    assert numbers == ["0", "0.21", "10", "34", "13,000"]
    durations = [pages.format_duration(value) for value in (0.5, 150, 7200, 864_000)]
    assert durations == ["0.50 s", "2.5 min", "2.0 h", "10 days"]
    assert pages.format_bytes(1.55e12) == "1.6 TB"
    assert pages.format_bytes(72e6) == "72 MB"
