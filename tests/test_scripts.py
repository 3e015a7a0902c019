"""--help of all programs outside the package, and eval/compare/holm.py."""

import json
from pathlib import Path

import pytest
from programs import ROOT, run_program

from contaccum.evaluation.metrics import sign_flip_test


def list_scripts() -> list[str]:
    """Return the paths, in the repository, of all programs outside the package."""
    scripts = []
    eval_folders = ("eval", "eval/compare", "eval/open_qa")
    for folder in ("benchmarks", *eval_folders, "examples", "scripts"):
        scripts += [f"{folder}/{path.name}" for path in (ROOT / folder).glob("*.py")]
    return sorted(scripts)


@pytest.mark.parametrize("script", list_scripts())
def test_every_script_prints_its_help(script, capsys):
    with pytest.raises(SystemExit) as stopped:
        run_program(script, "--help")
    assert stopped.value.code == 0
    assert capsys.readouterr().out.startswith("usage: ")


QUERY_GROUPS = {f"q{query}": query // 2 for query in range(20)}
"""{query id: its group} of the made-up studies."""


def make_score(entry: str, data: str, seed: int, query: int) -> float:
    """Return the score of a query in a made-up study, with a different gain for each entry."""
    gain = {"grad_accum": 0.0, "grad_cache": 0.02, "contaccum": 0.1}[entry]
    offset = 1.9 if data == "nqg" else 1
    gain_of_query = gain * (query * 7 % 5 - offset)
    noise_of_seed = seed * (query % 3) / 50
    return 0.4 + gain_of_query + noise_of_seed


def write_study(folder: Path, data: str) -> Path:
    """Write results of two seeds and 20 queries for each entry, and the report; return its path."""
    groups = {
        "grad_accum_learning_rate-0e-4": {"entry": "grad_accum", "seeds": [0, 1]},
        "grad_cache_learning_rate-1e-4": {"entry": "grad_cache", "seeds": [0, 1]},
        "contaccum_learning_rate-2e-4": {"entry": "contaccum", "seeds": [0, 1]},
    }
    for name, group in groups.items():
        for seed in group["seeds"]:
            per_query = {}
            for query in range(20):
                per_query[f"q{query}"] = {"NDCG@10": make_score(group["entry"], data, seed, query)}
            result = {"evaluations": {"test": {"per_query": per_query}}}
            result_file = folder / "runs" / f"{name}_seed-{seed}" / "result.json"
            result_file.parent.mkdir(parents=True)
            result_file.write_text(json.dumps(result))
    sets = [{"name": "test", "query_groups": QUERY_GROUPS}, {"name": "dev"}]
    report = {"groups": groups, "data": {"evaluation": sets}}
    report_file = folder / "report.json"
    report_file.write_text(json.dumps(report))
    return report_file


def compute_mean_scores(entry: str, data: str) -> dict[str, float]:
    """Return the score of each query, as the mean over the two seeds."""
    scores = {}
    for query in range(20):
        score_sum = make_score(entry, data, 0, query) + make_score(entry, data, 1, query)
        scores[f"q{query}"] = score_sum / 2
    return scores


def test_holm_corrects_over_all_pairs_of_all_reports(tmp_path, capsys):
    reports = [write_study(tmp_path / data, data) for data in ("nqg", "arxiv")]
    pairs = ["contaccum:grad_accum", "contaccum:grad_cache_learning_rate-1e-4"]
    run_program("eval/compare/holm.py", *reports, "--pairs", *pairs, "--output", tmp_path / "all")
    rows = json.loads((tmp_path / "all.json").read_text())["rows"]
    assert [row["training"] for row in rows] == ["nqg", "nqg", "arxiv", "arxiv"]
    assert [row["pair"] for row in rows] == [*pairs, *pairs]
    for row in rows:
        first_group, second_group = row["compared"]
        first_entry, _, _ = first_group.rpartition("_learning")
        second_entry, _, _ = second_group.rpartition("_learning")
        expected = sign_flip_test(
            compute_mean_scores(first_entry, row["training"]),
            compute_mean_scores(second_entry, row["training"]),
            QUERY_GROUPS,
        )
        for key in ("difference", "low", "p_value", "groups"):
            assert row[key] == pytest.approx(expected[key])
    # Holm multiplies the smallest p by the number of all comparisons.
    smallest_p_value = min(row["p_value"] for row in rows)
    smallest_p_holm = min(row["p_holm"] for row in rows)
    assert smallest_p_value * 4 == pytest.approx(smallest_p_holm)
    assert f"{rows[0]['difference']:+.4f}" in (tmp_path / "all.md").read_text()


def test_holm_refuses_an_unknown_entry(tmp_path, capsys):
    report = write_study(tmp_path / "nqg", "nqg")
    argv = ["--pairs", "contaccum:other", "--output", tmp_path / "none"]
    with pytest.raises(SystemExit) as stopped:
        run_program("eval/compare/holm.py", report, *argv)
    assert stopped.value.code == 2
    assert "other is no group; name one of" in capsys.readouterr().err
