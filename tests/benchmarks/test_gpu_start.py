"""benchmarks/gpu.py: a short dry run for every change; the long tests run all parts."""

from gpu_program import run_parts


def test_program_runs_parts_and_records_a_given_commit(tmp_path):
    parts = ("loss_exact", "query_side")
    dry_run = run_parts(tmp_path, "--commit", "abc", "--part", *parts)
    assert dry_run.code == 0
    assert set(dry_run.records) == set(parts)
    for record in dry_run.records.values():
        assert record["result"]["passed"]
        assert record["git_commit"] == "abc"
