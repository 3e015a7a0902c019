"""benchmarks/corpus_cost.py: its rates give the tables of docs/how_large.md."""

import importlib
import json
from types import ModuleType

import pytest
from programs import ROOT, run_program

from contaccum.evaluation.results import fill_page

PROGRAM = "benchmarks/corpus_cost.py"
PAGE = ROOT / "docs" / "how_large.md"
RATES = {
    "dimension": 100,
    "encode": {
        "small": {
            "passages_per_core_second": 10.0,
            "tokens_per_passage": 100.0,
            "num_layers": 2,
            "hidden_size": 50,
        }
    },
    "tokenize": {"passages_per_core_second": 1000.0},
    "scan": {
        "float32": {
            "seconds_per_row": 16e-6,
            "seconds_per_row_and_query": 1e-8,
            "bytes_per_row": 400.0,
        }
    },
    "pq": {"codes_per_core_second": 1e8},
}


@pytest.fixture
def cost_tables(monkeypatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("measuring.cost_tables")


@pytest.fixture
def pages(monkeypatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("measuring.pages")


def test_the_tables_of_the_page_are_those_of_the_measured_rates(cost_tables):
    rates = json.loads((ROOT / "benchmarks" / "corpus_cost.json").read_text())
    tables = cost_tables.make_tables(rates)
    page = PAGE.read_text(encoding="utf-8")
    assert fill_page(page, tables) == page
    for table in tables.values():
        assert table in page


def test_a_page_without_a_place_for_a_table_is_refused():
    with pytest.raises(ValueError, match="no place for the table 'storing'"):
        fill_page("# Page\n", {"storing": "| |"})


def test_the_program_measures_rates_and_fills_a_page(tiny_model_path, tmp_path):
    sizes = ["--rows", 300, "--dimension", 64, "--queries", 9, "--lists", 2, "--words", 8]
    encoder = ["--backbones", "tiny", "--passages", 4, "--tokenizer", tiny_model_path]
    page = tmp_path / "page.md"
    page.write_text(PAGE.read_text(encoding="utf-8"), encoding="utf-8")
    output = tmp_path / "rates.json"
    run_program(PROGRAM, *encoder, *sizes, "--output", output, "--page", page)
    rates = json.loads(output.read_text())
    assert rates["encode"]["tiny"]["passages_per_core_second"] > 0
    assert rates["tokenize"]["passages_per_core_second"] > 0
    assert rates["pq"]["codes_per_core_second"] > 0
    bytes_per_row = {dtype: scan["bytes_per_row"] for dtype, scan in rates["scan"].items()}
    assert list(bytes_per_row) == ["float32", "float16"]
    assert bytes_per_row["float32"] - bytes_per_row["float16"] == pytest.approx(2 * 64, abs=1)
    assert "| tiny | CPU, 16 cores" in page.read_text(encoding="utf-8")


def test_encoding_time_on_a_cpu_is_divided_by_its_cores(cost_tables):
    seconds = cost_tables.compute_encoding_seconds(RATES, RATES["encode"]["small"], cost_tables.CPU)
    assert seconds == pytest.approx(1 / 10 / 16)


def test_encoding_time_on_a_gpu_is_products_and_tokenising(cost_tables):
    seconds = cost_tables.compute_encoding_seconds(
        RATES, RATES["encode"]["small"], cost_tables.H100
    )
    weights = 2 * 12 * 50**2
    attention = 4 * 100 * 50
    flops = 2 * 100 * (weights + attention)
    assert seconds == pytest.approx(flops / (0.3 * 989e12) + 1 / 2000)


def test_search_time_is_decoding_and_scoring_divided_by_cores(cost_tables):
    scoring = 1000 * 1e-8 / 16
    seconds = cost_tables.compute_search_seconds(RATES, cost_tables.CPU, "float32", 10**6)
    assert seconds == pytest.approx(10**6 * (16e-6 + scoring))


def test_search_time_on_a_gpu_is_copying_the_stored_rows_and_products(cost_tables):
    scan = RATES["scan"]["float32"]
    products = 2 * RATES["dimension"] * 1000 / (0.3 * 67e12)
    seconds = cost_tables.compute_search_seconds(RATES, cost_tables.H100, "float32", 10**6)
    assert seconds == pytest.approx(10**6 * (scan["bytes_per_row"] / 4e9 + products))


def test_a_store_larger_than_memory_is_read_from_disk(cost_tables):
    in_memory, from_disk = (
        cost_tables.compute_search_seconds(RATES, cost_tables.CPU, "float32", num_rows)
        for num_rows in (10**8, 10**9)
    )
    assert from_disk - 10 * in_memory == pytest.approx(10**9 * 400 / 2e9)


def test_index_times_follow_from_lists_and_codes(cost_tables):
    assert [cost_tables.count_lists(10**power) for power in (6, 7, 8, 9)] == [
        4096,
        16384,
        32768,
        131072,
    ]
    num_comparisons = (10 * 64 * 4096 + 10**6) * 4096
    assert cost_tables.compute_build_seconds(RATES, 10**6) == pytest.approx(
        num_comparisons * 1e-8 / 16
    )
    num_codes = 10**6 * 32 / 4096
    assert cost_tables.compute_probe_seconds(RATES, 10**6) == pytest.approx(
        1000 * (4096 * 1e-8 + num_codes / 1e8) / 16
    )


def test_numbers_have_two_significant_digits_and_units(cost_tables, pages):
    assert [pages.format_number(value) for value in (0, 0.2149, 9.96, 34.4, 12_960)] == [
        "0",
        "0.21",
        "10",
        "34",
        "13,000",
    ]
    assert [pages.format_duration(value) for value in (0.5, 150, 7200, 864_000)] == [
        "0.50 s",
        "2.5 min",
        "2.0 h",
        "10 days",
    ]
    assert pages.format_bytes(1.55e12) == "1.6 TB"
    assert pages.format_bytes(72e6) == "72 MB"
    assert [cost_tables.format_dollars(value) for value in (0.34, 1234)] == [
        "$0.34",
        "$1,200",
    ]
