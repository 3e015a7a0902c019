"""`contaccum train` under torchrun, as docs/scaling.md has it, with two gloo processes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from sample_texts import sentences

from contaccum import DualEncoder

DOCS = Path(__file__).parents[2] / "docs" / "scaling.md"


@pytest.mark.slow
def test_train_under_torchrun_reads_data_once_and_only_rank_0_speaks(
    tiny_config: Any, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    DualEncoder.from_backbone(tiny_config, pooling="mean", tokenizer=tiny_tokenizer).save_pretrained(
        str(tmp_path / "model")
    )
    pairs = zip(sentences(50, 1), sentences(50, 2), strict=True)
    (tmp_path / "pairs.jsonl").write_text("\n".join(json.dumps({"query": q, "positive": p}) for q, p in pairs))
    keys = {
        "model": str(tmp_path / "model"),
        "train_data": str(tmp_path / "pairs.jsonl"),
        "output_dir": str(tmp_path / "run"),
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "bank_size": 16,
        "num_train_epochs": 1,
        "save_strategy": "epoch",
        "use_cpu": True,
        "disable_tqdm": True,
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(keys))
    line = re.search(r"^    torchrun (--standalone .*)$", DOCS.read_text(encoding="utf-8"), re.MULTILINE)
    assert line is not None
    words = line[1].replace("--nproc_per_node 8", "--nproc_per_node 2").replace("CONFIG.yaml", "config.yaml").split()
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *words],
        cwd=tmp_path,
        env={**os.environ, "CONTACCUM_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(list((tmp_path / "cache" / "rows").iterdir())) == 1
    for said in ("devices               2", "pairs per update      16", "saved ", "50 "):
        assert sum(said in printed for printed in done.stdout.splitlines()) == 1, said
    log = [json.loads(text) for text in (tmp_path / "run" / "train_log.jsonl").read_text().splitlines()]
    assert [line["update"] for line in log] == [1, 2, 3]
    assert [line["pairs"] for line in log] == [16] * 3
    assert log[-1]["bank_fill"] > 8
    assert (tmp_path / "run" / "checkpoint-3" / "contaccum_bank.safetensors").is_file()
    assert DualEncoder.from_pretrained(str(tmp_path / "run"), device="cpu") is not None
