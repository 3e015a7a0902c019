"""`contaccum bench update` on a tiny encoder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from contaccum import BankedInfoNCE
from contaccum.benchmarks.update import DenseContAccumLoss, UpdateSettings, measure_updates
from contaccum.cli import main
from contaccum.errors import ConfigError

TINY = {"backbone": "tiny", "query_length": 4, "passage_length": 6, "repeats": 2, "memory": False}


def test_every_cell_is_measured_against_grad_accum() -> None:
    methods = ["in_batch", "grad_accum", "grad_cache", "contaccum", "pre_batch", "dense"]
    settings = UpdateSettings(**TINY, local=4, total=[8, 16], bank=[0, 32, 64], methods=methods)
    records = measure_updates(settings, progress=lambda line: None)
    cells = [(r["total"], r["method"], r["bank"]) for r in records]
    assert len(cells) == len(set(cells)) == 2 * (3 + 3 * 2)
    for record in records:
        assert record["seconds_low"] <= record["seconds"] <= record["seconds_high"]
        assert record["pairs_per_second"] == pytest.approx(record["total"] / record["seconds"])
        assert record["ratio"] == 1.0 if record["method"] == "grad_accum" else record["ratio"] > 0


def test_the_dense_reference_is_the_loss_that_ours_equals() -> None:
    class Identity(torch.nn.Module):
        def forward(self, features: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            return {"sentence_embedding": features["x"]}

    dense = DenseContAccumLoss(Identity(), bank_size=10)
    ours = BankedInfoNCE(bank_size=10, temperature=0.05, similarity="cos", drift_compensation="none")
    for seed in range(6):
        rows = [torch.randn(4, 8, generator=torch.Generator().manual_seed(2 * seed + i)).double() for i in (0, 1)]
        assert dense([{"x": x} for x in rows]).item() == pytest.approx(ours(*rows).item(), rel=1e-12)


@pytest.mark.slow
def test_command_writes_figures_their_command_and_a_picture(tmp_path: Path) -> None:
    output = tmp_path / "bench.json"
    arguments = [
        "--backbone=tiny",
        "--total",
        "8",
        "--bank",
        "16",
        "--repeats=1",
        "--methods",
        "grad_accum",
        "contaccum",
    ]
    assert main(["bench", "update", *arguments, f"--output={output}"]) == 0
    result = json.loads(output.read_text())
    assert result["command"].startswith("contaccum bench update --backbone=tiny")
    assert [r["method"] for r in result["records"]] == ["grad_accum", "contaccum"]
    assert all(r["memory_mb"] > 50 for r in result["records"])
    assert result["versions"]["torch"] and result["machine"]["threads"] >= 1
    assert output.with_suffix(".png").stat().st_size > 1000


@pytest.mark.slow
def test_loss_is_linear_in_memory_and_equals_the_dense_one(tmp_path: Path) -> None:
    output = tmp_path / "loss.json"
    assert main(["bench", "loss", "--bank", "1024", "8192", "--repeats=3", "--threads=1", f"--output={output}"]) == 0
    small, large = json.loads(output.read_text())["records"]
    assert small["gradient_error"] < 1e-5 and large["gradient_error"] < 1e-5
    assert large["memory_mb"] < 1.5 * large["stored_mb"] + 64
    assert large["speedup"] > small["speedup"] > 3  # measured at rest: 18 and 120


@pytest.mark.slow
def test_trainers_are_compared_at_the_same_settings(tmp_path: Path) -> None:
    output = tmp_path / "trainer.json"
    arguments = ["--backbone=tiny", "--local=2", "--total", "4", "--repeats=1", "--methods", "grad_accum", "grad_cache"]
    assert main(["bench", "trainer", *arguments, "--query_length=4", "--passage_length=6", f"--output={output}"]) == 0
    records = json.loads(output.read_text())["records"]
    assert [r["method"] for r in records] == ["grad_accum", "grad_cache"]
    for r in records:
        theirs = r["pairs_per_second_sentence_transformers"]
        assert r["speedup"] == pytest.approx(r["pairs_per_second"] / theirs)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"methods": ["contacum"]}, "contacum"), ({"total": [12]}, "not a multiple"), ({"precision": "int8"}, "int8")],
)
def test_what_cannot_be_measured_is_refused(settings: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        UpdateSettings(**settings).check()


def test_mistakes_give_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench"]) == 2
    assert main(["bench", "serach"]) == 2
    assert main(["bench", "update", "--bnak", "3"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 3
