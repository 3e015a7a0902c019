"""docs/gpu.md: its tables are those of the records in benchmarks/gpu."""

import json
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from programs import ROOT, run_program

PAGE = ROOT / "docs" / "gpu.md"
RECORDS = ROOT / "benchmarks" / "gpu"
SECONDS = {"low": 0.9, "median": 1.0, "high": 1.1}


@pytest.fixture
def tables(part) -> ModuleType:
    return part("tables")


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
def fill_page(tmp_path, monkeypatch) -> Callable[[Any], str]:
    """Return a function that fills the page with the records of a folder, by the program."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # the program sets it, too, but does not remove it
    page = tmp_path / "page.md"
    page.write_text(PAGE.read_text(encoding="utf-8"), encoding="utf-8")

    def fill(folder: Any) -> str:
        with pytest.raises(SystemExit) as stopped:
            run_program("benchmarks/gpu.py", "--page", page, "--output", folder)
        assert stopped.value.code == 0
        return page.read_text(encoding="utf-8")

    return fill


def test_the_tables_of_the_page_are_those_of_the_committed_records(fill_page):
    page = fill_page(RECORDS)
    assert page == PAGE.read_text(encoding="utf-8")
    assert page.count("<!-- table: ") == 1 + 10


def test_the_page_names_parts_that_have_not_run(fill_page, tmp_path):
    record = make_record({"none": {"micro_steps": 64, "waits": ["a.py:7"], "passed": False}})
    record["result"]["passed"] = False
    (tmp_path / "host_syncs.json").write_text(json.dumps(record))
    page = fill_page(tmp_path)
    row = "| [`host_syncs`](#host_syncs) | failed | NVIDIA H100 | 2026-11-24 | `01234567` | 61 s |"
    assert row in page
    assert "Not yet run: `update_time`, `query_side`, `search`," in page
    assert "waits at `a.py:7`" in page


ADAPTER = {"seconds": SECONDS, "ratio": SECONDS, "pairs_per_second": 8.0, "peak_mb": 1500.0}
INDEX = {"build_seconds": 89.0, "first_seconds": 2.5, "seconds": SECONDS}


@pytest.mark.parametrize(
    ("part_name", "case", "row"),
    [
        (
            "decoder",
            {"backbone": "lora", "local": 1, "methods": {"grad_cache": ADAPTER}},
            "| lora | 1 | `grad_cache` | 8.0 | 1.00 | 1,500 MB | | |",
        ),
        (
            "search",
            {**INDEX, "queries_per_second": 1000.0, "recall": None},
            "| case | 89 | 2.5 | 1.0 | 1,000 | |",
        ),
        (
            "loss_exact",
            {"relative_errors": {"q": "NaN", "p": 0.0, "n": 0.0}, "limit": 1e-5, "passed": False},
            "| case | NaN | 0e+00 | 0e+00 | 1e-05 | failed |",
        ),
    ],
)
def test_the_table_of_a_part_shows_what_the_committed_records_lack(tables, part_name, case, row):
    record = make_record({"case": case}, not_run="other: no time", failures=["third: Error: no"])
    record["result"]["sizes"] = {"documents": 1_000_000, "queries": 1000, "k": 100}
    table = tables.make_part_table(part_name, record)
    assert row in " ".join(table.split())
    assert "Not run: other: no time." in table
    assert "Failed: third: Error: no." in table


def test_numbers_have_two_significant_digits(tables):
    numbers = [tables.format_number(value) for value in (0, 0.2149, 9.96, 34.4, 12_960)]
    assert numbers == ["0", "0.21", "10", "34", "13,000"]
