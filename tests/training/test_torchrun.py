"""`contaccum train` as docs/scaling.md starts it, with two gloo processes, also as if on two hosts."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file
from sample_texts import sentences

from contaccum import DualEncoder

DOCS = Path(__file__).parents[2] / "docs" / "scaling.md"
MODULES = {"torchrun": ["torch.distributed.run"], "accelerate": ["accelerate.commands.launch"]}


def lines_of_the_page() -> dict[str, str]:
    """Every line that starts a run, by its program and how many hosts it is for; SLURM's is torchrun's."""
    text = DOCS.read_text(encoding="utf-8").replace("\\\n", " ")
    found = re.findall(r"^    (torchrun|accelerate launch) (.*)$", text, re.MULTILINE)
    assert len(found) == 4
    return {
        f"{program.split()[0]}-{'several' if re.search('--nnodes|--num_machines', rest) else 'one'}": rest
        for program, rest in found
    }


LINES = lines_of_the_page()


def start(name: str, folder: Path) -> list[subprocess.CompletedProcess[str]]:
    """The line with two processes: on one host, or one each on two, which are both this one."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program, hosts = name.split("-")
    several = hosts == "several"
    changes = {
        "--nproc_per_node 8": f"--nproc_per_node {1 if several else 2}",
        "--num_processes 8": "--num_processes 2",
        "--nnodes 4": "--nnodes 2",
        "--num_machines 4 --num_processes 32": "--num_machines 2 --num_processes 2",
        "HOST:29500": f"127.0.0.1:{port}",
        "--main_process_ip HOST": "--main_process_ip 127.0.0.1",
        "--main_process_port 29500": f"--main_process_port {port}",
        "CONFIG.yaml": f"../config.yaml --output_dir {folder}",
    }
    line = LINES[name]
    for old, new in changes.items():
        line = line.replace(old, new)
    if program == "accelerate":
        line = f"--multi_gpu {line}"  # as it chooses by itself where it sees GPUs
    folder.mkdir()
    environment = {**os.environ, "CONTACCUM_CACHE": str(folder.parent / "cache"), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", *MODULES[program], *line.replace("RANK", str(host)).split()],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for host in range(2 if several else 1)
    ]
    ends = [process.communicate(timeout=300) for process in processes]
    return [
        subprocess.CompletedProcess(process.args, process.returncode, *end)
        for process, end in zip(processes, ends, strict=True)
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_config: Any, tiny_tokenizer: Any) -> Path:
    folder = tmp_path_factory.mktemp("started")
    DualEncoder.from_backbone(tiny_config, pooling="mean", tokenizer=tiny_tokenizer).save_pretrained(
        str(folder / "model")
    )
    pairs = zip(sentences(50, 1), sentences(50, 2), strict=True)
    (folder / "pairs.jsonl").write_text("\n".join(json.dumps({"query": q, "positive": p}) for q, p in pairs))
    keys = {
        "model": str(folder / "model"),
        "train_data": str(folder / "pairs.jsonl"),
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "bank_size": 16,
        "num_train_epochs": 1,
        "save_strategy": "epoch",
        "use_cpu": True,
        "disable_tqdm": True,
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(keys))
    return folder


@pytest.fixture(scope="module")
def torchrun(folder: Path) -> subprocess.CompletedProcess[str]:
    (done,) = start("torchrun-one", folder / "torchrun-one")
    return done


@pytest.mark.slow
def test_train_under_torchrun_reads_data_once_and_only_rank_0_speaks(
    folder: Path, torchrun: subprocess.CompletedProcess[str]
) -> None:
    assert torchrun.returncode == 0, torchrun.stderr[-3000:]
    assert len(list((folder / "cache" / "rows").iterdir())) == 1
    for said in ("devices               2", "pairs per update      16", "saved ", "50 "):
        assert sum(said in printed for printed in torchrun.stdout.splitlines()) == 1, said
    log = [json.loads(text) for text in (folder / "torchrun-one" / "train_log.jsonl").read_text().splitlines()]
    assert [line["update"] for line in log] == [1, 2, 3]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in LINES if name != "torchrun-one"])
def test_every_line_of_the_page_ends_with_the_same_weights(
    name: str, folder: Path, torchrun: subprocess.CompletedProcess[str]
) -> None:
    for done in start(name, folder / name):
        assert done.returncode == 0, done.stderr[-3000:]
    expected, found = (load_file(folder / run / "model.safetensors") for run in ("torchrun-one", name))
    assert expected.keys() == found.keys()
    # Sums over two hosts may be taken in another order.
    assert all((found[key] - value).abs().max() < 1e-6 for key, value in expected.items())
