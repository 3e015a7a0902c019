"""`contaccum compare` as a user runs it: real processes once, then what a second call does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from comparison_data import METRICS, write_tiny_training

from contaccum.cli import main
from contaccum.comparison import run as comparison_run

MORE = ["--methods", "grad_accum", "contaccum", "--seeds", "3", "--jobs", "2", "--eval_updates", "4", "--eval_before"]


@pytest.fixture(scope="module")
def tokens(tiny_config: Any, tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    root = tmp_path_factory.mktemp("comparison")
    return [*write_tiny_training(root, tiny_config, tiny_tokenizer), "--eval_data", str(root / "beir")]


class Compared(NamedTuple):
    """A comparison of two tiny models: the command's arguments, its folder and its output."""

    arguments: list[str]
    folder: Path
    printed: str


@pytest.fixture(scope="module")
def compared(tokens: list[str], tmp_path_factory: pytest.TempPathFactory) -> Compared:
    folder = tmp_path_factory.mktemp("compared")
    arguments = ["compare", *tokens, f"--output_dir={folder}", *MORE]
    lines: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("builtins.print", lambda *parts, **_: lines.append(" ".join(map(str, parts))))
        assert main(arguments) == 0
    return Compared(arguments, folder, "\n".join(lines))


@pytest.mark.slow
def test_two_methods_are_trained_scored_and_reported(compared: Compared) -> None:
    assert compared.printed.count(": started") == 2 and "[2/2]" in compared.printed
    report = json.loads((compared.folder / "report.json").read_text())
    assert report["warnings"] == [] and report["failed"] == {} and len(report["comparisons"]) == 4
    assert report["data"]["evaluation"][0]["queries"] == 12
    assert {run["machine"]["threads"] for run in report["runs"].values()} == {1}
    for name, run in report["runs"].items():
        result = json.loads((compared.folder / "runs" / name / "result.json").read_text())
        final = result["evaluations"]["beir"]["metrics"]
        assert [point["update"] for point in run["curve"]] == [0, 4, 8]
        assert {key: run["curve"][-1][key] for key in METRICS} == pytest.approx({key: final[key] for key in METRICS})
        assert run["curve"][-1]["train_seconds"] == pytest.approx(run["train_seconds"])
        values = [scores["NDCG@10"] for scores in result["evaluations"]["beir"]["per_query"].values()]
        assert sum(values) / 12 == pytest.approx(final["NDCG@10"])
    rows = [line for line in (compared.folder / "report.md").read_text().splitlines() if line.startswith("| contaccum")]
    assert len(rows) == 5  # four metrics, and the cost
    assert (compared.folder / "report.png").read_bytes().startswith(b"\x89PNG")
    files = {path.name for path in (compared.folder / "runs" / "contaccum_seed-3").iterdir()}
    assert {"job.json", "result.json", "train_log.jsonl", "eval_log.jsonl", "run.json", "stderr.log"} <= files
    assert not any(name.endswith(".safetensors") for name in files)


@pytest.mark.slow
def test_finished_runs_are_not_trained_again_unless_their_settings_differ(
    compared: Compared, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def failing(jobs: Any, *args: Any) -> dict[str, str]:
        asked.append([job["name"] for job in jobs])
        return {job["name"]: "exit code 1: too bad" for job in jobs}

    monkeypatch.setattr(comparison_run, "run_jobs", failing)
    assert main(compared.arguments) == 0
    assert "2 of 2 runs are finished" in capsys.readouterr().out and asked == [[]]

    assert main([*compared.arguments, "--bank_size=16"]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert "contaccum_seed-3 was run with other settings: bank_size was 20, is 16" in error and "--output_dir" in error

    more = ["--seeds", "3", "4", "--methods", "grad_accum"]
    assert main([*compared.arguments, *more]) == 1
    assert "failed: grad_accum_seed-4: exit code 1: too bad" in capsys.readouterr().out
    assert asked[1:] == [["grad_accum_seed-4"]]
    assert "too bad" in (compared.folder / "report.md").read_text()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--bank_sise", "3"], "did you mean 'bank_size'"),
        (["--eval_queries", "0"], "must be at least 1"),
        (["--eval_split", "train"], "train"),
        (["--eval_data"], "--eval_data"),
        (["--jobs", "0"], "must be at least 1"),
        (["--train_data", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--model", "https://me:secret@example.org/m"], "credential"),
    ],
)
def test_mistakes_give_one_line_before_anything_is_trained(
    tokens: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], message: str
) -> None:
    arguments = ["compare", *tokens, f"--output_dir={tmp_path / 'out'}"]
    assert main([*arguments, *more]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("contaccum: error")]
    assert message in line and "secret" not in line
    assert not (tmp_path / "out").exists()
