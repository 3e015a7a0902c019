"""Compare training engines: run the same training with DDP, FSDP2, ZeRO 2 and ZeRO 3.

    python benchmarks/engines.py --gpus 2 --backbone bert-base

The program starts each run with torchrun. Weights and texts are random. Training uses float32 and
SGD, because Adam takes a full step even if a gradient contains only rounding errors. For each
engine, the program prints the largest difference of a weight from DDP's weight, next to the largest
change of a weight by DDP's training; the same difference for the bank; the time per update; and the
peak memory. FSDP2 is skipped without GPUs, because accelerate supports only DDP on CPUs.
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
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import BertConfig, BertModel, BertTokenizer, set_seed

SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size")
BACKBONES = {"tiny": (2, 32, 2, 64), "minilm": (6, 384, 12, 1536), "bert-base": (12, 768, 12, 3072)}
ENGINES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp2": {"fsdp": True, "fsdp_config": {"transformer_layer_cls_to_wrap": ["BertLayer"]}},
    "zero2": {"deepspeed": {"zero_optimization": {"stage": 2}}},
    "zero3": {"deepspeed": {"zero_optimization": {"stage": 3}}},
}
COMMON_SETTINGS = {
    "pooling": "mean",
    "normalize": False,
    "similarity": "cos",
    "dropout": 0,
    "optim": "sgd",
    "learning_rate": 0.1,
    "lr_scheduler_type": "constant",
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 4,
    "bank_size": 256,
    "save_strategy": "steps",
    "disable_tqdm": True,
    "report_to": "none",
    "seed": 1,
}


class TrainedRun(NamedTuple):
    """Result of a training run."""

    weights: dict[str, Tensor]
    bank: dict[str, Tensor]
    log: list[dict[str, Any]]  # lines of train_log.jsonl


def write_inputs(folder: Path, backbone: str) -> dict[str, Tensor]:
    """Write a backbone with random weights and 4,096 random pairs; return the weights."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words += [f"w{number}" for number in range(5000)]
    set_seed(0)
    sizes = dict(zip(SIZES, BACKBONES[backbone], strict=True))
    BertModel(BertConfig(vocab_size=len(words), **sizes)).save_pretrained(folder / "backbone")
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = BertTokenizer(vocab=vocabulary, model_max_length=512)
    tokenizer.save_pretrained(folder / "backbone")
    with (folder / "pairs.jsonl").open("w") as file:
        for _ in range(4096):
            passage = random.choices(words[5:], k=100)
            pair = {"query": " ".join(passage[:10]), "positive": " ".join(passage)}
            file.write(json.dumps(pair) + "\n")
    return load_file(folder / "backbone" / "model.safetensors")


def train(engine: str, folder: Path, num_gpus: int, num_updates: int) -> TrainedRun:
    """Train with an engine, started by torchrun."""
    settings = {
        **COMMON_SETTINGS,
        **ENGINES[engine],
        "max_steps": num_updates,
        "save_steps": num_updates,
        "output_dir": folder / engine,
        "model": folder / "backbone",
        "train_data": folder / "pairs.jsonl",
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc_per_node={num_gpus}", "-m", "contaccum.cli", "train"]
    for key, value in settings.items():
        text = json.dumps(value) if isinstance(value, (dict, bool)) else str(value)
        command.append(f"--{key}={text}")
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    checkpoint = folder / engine / f"checkpoint-{num_updates}"
    log_lines = (folder / engine / "train_log.jsonl").read_text().splitlines()
    return TrainedRun(
        weights=load_file(folder / engine / "model.safetensors"),
        bank=load_file(checkpoint / "contaccum_bank.safetensors"),
        log=[json.loads(line) for line in log_lines],
    )


def largest_difference(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    """Return the largest absolute difference between tensors of the same name.

    Raises:
        ValueError: if the names or the shapes differ.
    """
    if first.keys() != second.keys():
        raise ValueError(f"only one has the tensors {sorted(first.keys() ^ second.keys())}")
    differences = [torch.zeros(1, dtype=torch.float64)]
    for name, values in first.items():
        if values.shape != second[name].shape:
            raise ValueError(f"{name} has the shapes {values.shape} and {second[name].shape}")
        differences.append((values.double() - second[name].double()).abs().flatten())
    return torch.cat(differences).max().item()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--gpus",
        type=int,
        default=torch.cuda.device_count() or 2,
        help="number of processes, one per GPU",
    )
    parser.add_argument("--backbone", choices=BACKBONES, default="tiny")
    parser.add_argument("--updates", type=int, default=10, help="number of updates")
    args = parser.parse_args()
    engines = list(ENGINES)
    if not torch.cuda.is_available():
        engines.remove("fsdp2")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        initial_weights = write_inputs(folder, args.backbone)
        ddp = train("ddp", folder, args.gpus, args.updates)
        shared_names = initial_weights.keys() & ddp.weights.keys()
        weight_change = largest_difference(
            {name: initial_weights[name] for name in shared_names},
            {name: ddp.weights[name] for name in shared_names},
        )
        for engine in engines:
            run = ddp
            if engine != "ddp":
                run = train(engine, folder, args.gpus, args.updates)
            weight_difference = largest_difference(run.weights, ddp.weights)
            bank_difference = largest_difference(run.bank, ddp.bank)
            seconds = statistics.median(line["seconds"] for line in run.log)
            peak_memory = run.log[-1]["peak_memory_mb"]
            print(
                f"{engine}: largest difference from DDP: weights {weight_difference:.1e} "
                f"(training changed them by {weight_change:.1e}), bank {bank_difference:.1e}; "
                f"{seconds:.3f} s per update, {peak_memory:,.0f} MB"
            )


if __name__ == "__main__":
    main()
