"""Whether engines train alike: the same run under DDP, FSDP2 and ZeRO 2 and 3, started by torchrun as a user would.

    python benchmarks/engines.py --gpus 2 --backbone bert-base

Weights are fresh and texts made up, in float32 and with SGD: Adam takes a step of full size where a gradient is nothing
but rounding. For each engine: the largest difference of a weight from DDP's, beside how far DDP's training moved one;
the same for the bank; time per update and peak memory. FSDP is left out without GPUs, where accelerate has only DDP.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import BertConfig, BertModel, BertTokenizer, set_seed

SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size")
BACKBONES = {"tiny": (2, 32, 2, 64), "minilm": (6, 384, 12, 1536), "bert-base": (12, 768, 12, 3072)}
ENGINES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp2": {"fsdp": True, "fsdp_config": {"transformer_layer_cls_to_wrap": ["BertLayer"]}},
    "zero2": {"deepspeed": {"zero_optimization": {"stage": 2}}},
    "zero3": {"deepspeed": {"zero_optimization": {"stage": 3}}},
}
RUN = {
    "pooling": "mean",
    "normalize": False,
    "similarity": "cos",
    "dropout": 0,
    "optim": "sgd",
    "learning_rate": 0.1,
}
RUN |= {
    "lr_scheduler_type": "constant",
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 4,
}
RUN |= {
    "bank_size": 256,
    "save_strategy": "steps",
    "disable_tqdm": True,
    "report_to": "none",
    "seed": 1,
}


def write_inputs(folder: Path, backbone: str) -> dict[str, torch.Tensor]:
    """A fresh backbone and pairs that share words; returns the weights."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(5000))]
    set_seed(0)
    config = BertConfig(vocab_size=len(words), **dict(zip(SIZES, BACKBONES[backbone], strict=True)))
    BertModel(config).save_pretrained(folder / "backbone")
    tokenizer = BertTokenizer(vocab={word: i for i, word in enumerate(words)}, model_max_length=512)
    tokenizer.save_pretrained(folder / "backbone")
    with (folder / "pairs.jsonl").open("w") as file:
        for _ in range(4096):
            passage = random.choices(words[5:], k=100)
            file.write(
                json.dumps({"query": " ".join(passage[:10]), "positive": " ".join(passage)}) + "\n"
            )
    return load_file(folder / "backbone" / "model.safetensors")


def train(engine: str, folder: Path, gpus: int, updates: int) -> dict[str, Any]:
    """Weights, bank and log of a run under an engine."""
    given = {
        **RUN,
        **ENGINES[engine],
        "max_steps": updates,
        "save_steps": updates,
        "output_dir": folder / engine,
    }
    given |= {"model": folder / "backbone", "train_data": folder / "pairs.jsonl"}
    options = [
        f"--{key}={json.dumps(x) if isinstance(x, (dict, bool)) else x}" for key, x in given.items()
    ]
    start = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc_per_node={gpus}",
        "-m",
    ]
    subprocess.run(
        [*start, "contaccum.cli", "train", *options], check=True, stdout=subprocess.DEVNULL
    )
    lines = [
        json.loads(line) for line in (folder / engine / "train_log.jsonl").read_text().splitlines()
    ]
    bank = load_file(folder / engine / f"checkpoint-{updates}" / "contaccum_bank.safetensors")
    return {"weights": load_file(folder / engine / "model.safetensors"), "bank": bank, "log": lines}


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The largest, of what both hold."""
    common = [name for name in one.keys() & other.keys() if one[name].numel()]
    return max((one[name].double() - other[name].double()).abs().max().item() for name in common)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--gpus", type=int, default=max(torch.cuda.device_count(), 2), help="processes, one on each"
    )
    parser.add_argument("--backbone", choices=BACKBONES, default="tiny")
    parser.add_argument("--updates", type=int, default=10)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        start, runs = write_inputs(Path(name), given.backbone), {}
        for engine in [x for x in ENGINES if torch.cuda.is_available() or x != "fsdp2"]:
            runs[engine] = train(engine, Path(name), given.gpus, given.updates)
            found, moved = runs[engine], difference(start, runs["ddp"]["weights"])
            off, off_bank = (
                difference(found[part], runs["ddp"][part]) for part in ("weights", "bank")
            )
            seconds = statistics.median(line["seconds"] for line in found["log"])
            print(
                f"{engine}: weights off by {off:.1e} of {moved:.1e}, bank by {off_bank:.1e}; ",
                end="",
            )
            print(f"{seconds:.3f} s per update, {found['log'][-1]['peak_memory_mb']:,.0f} MB")
