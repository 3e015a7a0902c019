"""benchmarks/bench_*.py with tiny models and sizes."""

import json
import sys

import pytest
from programs import run_program

METHODS = ["in_batch", "grad_accum", "grad_cache", "contaccum", "pre_batch", "contaccum_cached"]


def test_bench_update_times_every_method(tmp_path):
    output = tmp_path / "update.json"
    sizes = ["--backbone", "tiny", "--local", 2, "--total", 4, "--bank", 16, "--repeats", 1]
    lengths = ["--query_length", 4, "--passage_length", 8, "--precision", "bfloat16"]
    argv = [*sizes, *lengths, "--methods", *METHODS, "--no_memory", "--output", output]
    run_program("benchmarks/bench_update.py", *argv, "--device", "cpu")
    records = {record["method"]: record for record in json.loads(output.read_text())["records"]}
    assert list(records) == METHODS
    assert records["grad_accum"]["ratio"] == 1
    assert all(record["seconds"] > 0 for record in records.values())
    banks = {method: record["bank"] for method, record in records.items()}
    assert banks["contaccum"] == banks["pre_batch"] == banks["contaccum_cached"] == 16
    assert banks["in_batch"] == banks["grad_accum"] == banks["grad_cache"] == 0


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
def test_bench_encode_reports_peak_memory_of_a_generated_corpus(tmp_path):
    output = tmp_path / "encode.json"
    run_program("benchmarks/bench_encode.py", "--stub", "--rows", 100, "--output", output)
    result = json.loads(output.read_text())["result"]
    assert result["rows"] == 100
    assert result["peak_mb"] >= result["before_mb"] > 0
