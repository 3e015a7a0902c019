"""`contaccum reproduce`: every step by every format in miniature, done once, and beside published figures."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from contaccum.cli import main
from contaccum.reproduction import command
from contaccum.reproduction.plan import METHODS, Settings, peak_gigabytes, plan_run, steps_once, table

CONFIGS = Path(__file__).parents[2] / "configs" / "paper"
FEW = [
    "--max_steps",
    "2",
    "--query_max_length",
    "20",
    "--passage_max_length",
    "60",
    "--gradient_accumulation_steps",
    "1",
]


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Runs steps in this process, which spares the start of another, and tells which were run."""
    done: list[str] = []

    def here(argv: Sequence[str]) -> int:
        done.append(argv[0])
        return main(argv)

    monkeypatch.setattr(command, "_call", here)
    return done


@pytest.fixture
def reproduce(tmp_path: Path, served: Any, backbone: str, cross_encoder: str) -> Callable[..., int]:
    def run(*argv: str, few: list[str] = FEW) -> int:
        folders = [
            "--configs",
            str(CONFIGS),
            "--data_dir",
            str(tmp_path / "data"),
            "--output_dir",
            str(tmp_path / "out"),
        ]
        where = [
            "--files_from",
            served[0],
            "--cross_encoder",
            cross_encoder,
            "--device",
            "cpu",
            "--precision",
            "float32",
        ]
        return main(["reproduce", "TABLE1", *folders, *where, *argv, "--model", backbone, "--use_cpu", "true", *few])

    return run


@pytest.mark.slow
@pytest.mark.parametrize("dataset", ["nq", "trivia", "webq", "trec"])
def test_open_qa_runs_from_download_to_score_and_is_done_once(
    dataset: str, reproduce: Callable[..., int], steps: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ("--datasets", dataset, "--memory", "11gb", "--methods", "contaccum", "--dtype", "float32")
    assert reproduce(*line) == 0
    assert steps == ["train", "encode", "search", "open_qa"]
    (result,) = json.loads((tmp_path / "out" / "table1.json").read_text())
    folder = tmp_path / "out" / dataset / "11gb" / "contaccum"
    # The same figures as encoding and searching in one go.
    about = table()["datasets"][dataset]
    files = [tmp_path / "data" / "dpr" / about["test"]["file"], tmp_path / "data" / "dpr" / "psgs_w100.tsv.gz"]
    again = ["open_qa", str(folder / "model"), "--questions", str(files[0]), "--passages", str(files[1])]
    again += ["--match", about["match"], "--output", str(tmp_path / "again.json"), "--no_progress"]
    assert main(again) == 0
    metrics = json.loads((tmp_path / "again.json").read_text())["metrics"]
    assert result["metrics"] == {name: metrics[name] for name in ("Accuracy@20", "Accuracy@100")}
    assert 0 < result["metrics"]["Accuracy@20"] <= 1
    assert not (folder / "passages").exists()
    assert json.loads((folder / "model" / "train_log.jsonl").read_text().splitlines()[-1])["update"] == 2
    source = json.loads((tmp_path / "data" / "dpr" / "psgs_w100.tsv.gz.source.json").read_text())
    assert source["bytes"] == files[1].stat().st_size and len(source["sha256"]) == 64

    steps.clear()
    capsys.readouterr()
    assert reproduce(*line) == 0
    assert steps == [] and capsys.readouterr().out.count(" is done\n") == 7


@pytest.mark.slow
def test_ms_marco_is_mined_and_its_dev_queries_alone_are_searched(
    reproduce: Callable[..., int], steps: list[str], msmarco: Path, tmp_path: Path
) -> None:
    assert reproduce("--datasets", "msmarco", "--memory", "11gb", "--methods", "grad_accum", "in_batch") == 0
    assert steps == ["mine", *["train", "encode", "search", "evaluate"] * 2]
    first, second = json.loads((tmp_path / "out" / "table1.json").read_text())
    assert (first["method"], second["method"], first["queries"]) == ("grad_accum", "in_batch", 10)
    assert set(first["metrics"]) == {"NDCG@20", "NDCG@100", "Recall@20", "Recall@100", "MRR@10"}
    run = tmp_path / "out" / "msmarco" / "11gb" / "in_batch" / "run.trec"
    assert {line.split()[0] for line in run.read_text().splitlines()} == {f"q{i}" for i in range(20, 30)}
    mined = [json.loads(line) for line in (tmp_path / "data" / "msmarco" / "train.jsonl").read_text().splitlines()]
    assert len(mined) == 20
    page = (tmp_path / "out" / "table1.md").read_text()
    assert "| 11gb | in_batch (here) |" in page and "## MS MARCO" in page


def test_a_failed_step_is_told_and_the_next_start_goes_on_there(
    reproduce: Callable[..., int],
    steps: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = ("--datasets", "nq", "--methods", "in_batch")
    healthy = command._call
    monkeypatch.setattr(command, "_call", lambda argv: 2 if argv[0] == "encode" else healthy(argv))
    assert reproduce(*line) == 2
    assert "nq/11gb/in_batch: encode ended with exit code 2" in capsys.readouterr().err
    assert steps == ["train"]
    # What was done is not done again, and not taken for something else either.
    assert reproduce(*line, few=[*FEW, "--learning_rate", "1e-3"]) == 2
    assert "train was done with other settings" in capsys.readouterr().err
    monkeypatch.setattr(command, "_call", healthy)
    assert reproduce(*line) == 0
    assert steps == ["train", "encode", "search", "open_qa"]


@pytest.mark.slow
def test_a_step_is_a_command_of_its_own(
    reproduce: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert reproduce("--datasets", "nq", "--methods", "in_batch", few=[*FEW, "--gradient_checkpointing", "maybe"]) == 2
    assert "maybe" in capfd.readouterr().err  # by the parser, before anything was fetched
    assert reproduce("--datasets", "nq", "--methods", "in_batch", few=[*FEW, "--model", "nowhere/to-be-found"]) == 2
    shown = capfd.readouterr()
    assert "$ contaccum train" in shown.out and shown.err.count("contaccum: error:") == 2


def test_dry_run_does_nothing_and_says_all(
    reproduce: Callable[..., int], served: Any, steps: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert reproduce("--memory", "11gb", "24gb", "80gb", "--dry-run", few=[]) == 0
    shown = capsys.readouterr().out
    assert (
        steps == [] and served[1].asked == [] and not (tmp_path / "data").exists() and not (tmp_path / "out").exists()
    )
    assert shown.count("  train\n") == 60 and shown.count("  download psgs_w100.tsv.gz\n") == 1
    assert "hours: " in shown and "disk: " in shown and "TFLOP/s" in shown


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--datasets", "squad"], "squad"),
        (["--methods", "pre_batch"], "pre_batch"),
        (["--train_data", "mine.json"], "is set by the plan"),
        (["--output_dir=elsewhere", "--configs", "nowhere"], "no such recipe"),
        (["--learning_rat", "1"], "learning_rate"),
    ],
)
def test_mistakes_are_told_before_anything_is_fetched(
    argv: list[str], said: str, reproduce: Callable[..., int], served: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert reproduce(*argv) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1 and served[1].asked == []


def test_costs_of_a_plan_are_those_of_the_paper_s_sizes() -> None:
    settings = Settings(CONFIGS, Path("data"), Path("out"))
    runs = {method: plan_run("nq", "11gb", method, settings) for method in METHODS}
    train = {method: next(step for step in run.steps if step.name == "train") for method, run in runs.items()}
    # 40 epochs of 58,880 questions, each with two passages, three passes of 85 million weights.
    assert train["contaccum"].compute == pytest.approx(58880 * 40 * (14 + 2 * 150) * 2 * 85e6 * 3)
    assert train["grad_cache"].compute == pytest.approx(4 / 3 * train["contaccum"].compute)
    encode = next(step for step in runs["contaccum"].steps if step.name == "encode")
    assert encode.gigabytes == pytest.approx(21015324 * 768 * 2 / 1e9) and encode.temporary
    # One encoded corpus at a time, all models, the data once.
    alone, unknown = peak_gigabytes([runs["contaccum"]])
    both, _ = peak_gigabytes([runs["contaccum"], runs["grad_cache"]])
    assert unknown == 2 and both - alone == pytest.approx(train["grad_cache"].gigabytes, abs=0.1)
    assert len(steps_once([runs["contaccum"], runs["grad_cache"]])) == 3 + 2 * 4


def test_every_published_figure_has_its_source() -> None:
    for about in table()["datasets"].values():
        for figure in about["published"]:
            assert figure["source"] in table()["sources"] and set(figure["metrics"]) == set(about["metrics"])
