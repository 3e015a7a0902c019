"""benchmarks/bench_update.py with a tiny model and sizes."""

import json

from programs import run_program

METHODS = ["in_batch", "grad_accum", "grad_cache", "contaccum", "contaccum_cached"]


def test_bench_update_times_every_method(tmp_path):
    output = tmp_path / "update.json"
    sizes = ["--backbone", "tiny", "--local", 2, "--total", 4, "--bank", 16, "--repeats", 1]
    lengths = ["--query_length", 4, "--passage_length", 8, "--precision", "bfloat16"]
    argv = [*sizes, *lengths, "--methods", *METHODS, "--no_memory", "--output", output]
    run_program("benchmarks/bench_update.py", *argv, "--device", "cpu")
    result = json.loads(output.read_text())
    records = {record["method"]: record for record in result["records"]}
    assert set(records) == set(METHODS)
    assert records["grad_accum"]["ratio"] == 1
    for record in records.values():
        assert record["seconds"] > 0
    for method in ("contaccum", "contaccum_cached"):
        assert records[method]["bank"] == 16, method
    for method in ("in_batch", "grad_accum", "grad_cache"):
        assert records[method]["bank"] == 0, method
