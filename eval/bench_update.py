"""What an update costs: time and peak memory of one optimizer step, by method, pairs per update and bank size.

    python eval/bench_update.py --backbone minilm --local 8 --total 32 --bank 1024 8192 65536 --output update.json
    python eval/bench_update.py --backbone decoder-100m --lora_r 8 --local 1 --total 32 --bank 4096 --output lora.json

Weights are fresh and token ids made up: neither changes the cost. Methods take turns in a shuffled order within one
run, so that other work on the machine falls on all of them, and what counts is the ratio to gradient accumulation in
the same turn. Peaks are measured in a process of their own. Quality is not measured here.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from contaccum.encoders.adapters import add_adapter
from contaccum.encoders.dual_encoder import DualEncoder, configure
from contaccum.files import provenance, write_json
from contaccum.training.arguments import BANK_METHODS, CACHED_METHODS, ContAccumTrainingArguments
from contaccum.training.loss_factory import make_loss
from contaccum.training.options import METHODS
from contaccum.training.resources import peak_memory_mb, reset_peak_memory

BACKBONES = {  # layers, hidden size, heads, feed-forward size
    "bert-base": (12, 768, 12, 3072),
    "minilm": (6, 384, 12, 1536),
    "tiny": (2, 32, 2, 64),
    "decoder-100m": (12, 768, 12, 2048),  # Qwen3's architecture
    "decoder-tiny": (2, 32, 2, 64),
}
Cell = tuple[int, str, int]  # pairs per update, method, rows of the bank


OPTIONS: dict[str, dict[str, Any]] = {
    "--backbone": {"choices": BACKBONES, "default": "minilm"},
    "--untied": {"action": "store_true", "help": "two towers instead of one"},
    "--lora_r": {"type": int, "help": "train adapters of this rank instead of the weights"},
    "--gradient_checkpointing": {"action": "store_true"},
    "--local": {"type": int, "default": 8, "help": "pairs per micro-batch"},
    "--total": {"type": int, "nargs": "+", "default": [128], "help": "pairs per update"},
    "--bank": {"type": int, "nargs": "+", "default": [1024], "help": "rows of each bank"},
    "--methods": {"nargs": "+", "choices": METHODS, "default": ["grad_accum", "grad_cache", "contaccum"]},
    "--query_length": {"type": int, "default": 32, "help": "tokens"},
    "--passage_length": {"type": int, "default": 128, "help": "tokens"},
    "--repeats": {"type": int, "default": 5, "help": "turns that are timed"},
    "--precision": {"choices": ("float32", "bfloat16"), "default": "float32"},
    "--device": {"default": "cuda" if torch.cuda.is_available() else "cpu"},
    "--bank_dtype": {"help": "storage of the bank"},
    "--no_memory": {"action": "store_true", "help": "time alone"},
    "--output": {"type": Path, "help": "JSON to write"},
    "--peak_of": {"help": argparse.SUPPRESS},  # a cell, in the process that measures its peak
}


def make_encoder(options: argparse.Namespace) -> DualEncoder:
    """A fresh encoder of a backbone's size, without dropout."""
    from transformers import BertConfig, BertTokenizer, Qwen3Config

    names = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size")
    sizes: dict[str, Any] = dict(zip(names, BACKBONES[options.backbone], strict=True))
    if options.backbone.startswith("decoder"):
        heads = sizes["num_attention_heads"]
        sizes |= {"num_key_value_heads": -(-heads // 3), "head_dim": sizes["hidden_size"] // heads}
        config: Any = Qwen3Config(vocab_size=30522, **sizes)
    else:
        config = BertConfig(**sizes)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer = BertTokenizer(vocab={word: i for i, word in enumerate(words)})
    model = DualEncoder.from_backbone(config, tied=not options.untied, tokenizer=tokenizer, device=options.device)
    configure(model, dropout=0.0)
    if options.lora_r:
        add_adapter(model, options.lora_r)
    if options.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    return model.train()


class Update:
    """One method, ready to do updates; methods share the model, and the optimizer, whose state is of one size."""

    def __init__(self, options: argparse.Namespace, model: Any, optimizer: Any, cell: Cell) -> None:
        total, method, bank = cell
        self.options, self.model, self.optimizer = options, model, optimizer
        whole = method == "in_batch" or method in CACHED_METHODS
        self.rows, self.micro_steps = (total, 1) if whole else (options.local, total // options.local)
        sizes = {"per_device_train_batch_size": options.local, "gradient_accumulation_steps": total // options.local}
        if method == "in_batch":
            sizes = {"per_device_train_batch_size": total}
        banked = {"bank_size": bank, "bank_dtype": options.bank_dtype} if bank else {}
        args = ContAccumTrainingArguments(
            output_dir="unused", method=method, similarity="cos", report_to="none", **sizes, **banked
        )
        self.loss: Any = make_loss(model, args).train()
        if bank:
            self.fill()

    def fill(self) -> None:
        """A full bank, the cost that lasts; by hand, as the log-sums of that many rows would take minutes."""
        self.loss(self.columns(), None)  # makes the bank and the probe
        bank = self.loss.info_nce.bank
        for rows in (bank.queries, bank.passages):
            rows.copy_(torch.nn.functional.normalize(torch.randn_like(rows), dim=-1))
        for values in (bank.absent, bank.log_sums, bank.log_sum):
            values.zero_()
        bank.set_extra_state(torch.tensor([bank.bank_size, bank.slots, 0, bank.slots, 0, 0]))

    def columns(self) -> list[dict[str, Any]]:
        """Made-up queries and passages, each of one length."""
        lengths = {"query": self.options.query_length, "document": self.options.passage_length}
        shapes = {task: (self.rows, length) for task, length in lengths.items()}
        ids = {task: torch.randint(5, 30522, shape, device=self.options.device) for task, shape in shapes.items()}
        return [{"input_ids": x, "attention_mask": torch.ones_like(x), "task": task} for task, x in ids.items()]

    def run(self) -> None:
        """One update."""
        kind, dtype = torch.device(self.options.device).type, getattr(torch, self.options.precision)
        for _ in range(self.micro_steps):
            with torch.autocast(kind, dtype=dtype, enabled=dtype != torch.float32):
                loss = self.loss(self.columns(), None)
            (loss / self.micro_steps).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    """AdamW at its full cost, whose steps leave the weights where they are."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.0, weight_decay=0.0)


def seconds_of(update: Update) -> float:
    """How long an update takes, the device's work included."""
    wait = torch.cuda.synchronize if torch.device(update.options.device).type == "cuda" else lambda: None
    wait()
    started = time.perf_counter()
    update.run()
    wait()
    return time.perf_counter() - started


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """A record per cell: medians and quartiles of seconds, the median ratio to grad_accum's in the same turn, peaks."""
    torch.manual_seed(0)
    model = make_encoder(options)
    optimizer, shuffled, records = optimizer_of(model), random.Random(0), []
    for total in options.total:
        banks = {method: options.bank if method in BANK_METHODS else [0] for method in options.methods}
        some = [(total, method, bank) for method, sizes in banks.items() for bank in sizes]
        updates = {cell: Update(options, model, optimizer, cell) for cell in some}
        seconds: dict[Cell, list[float]] = {cell: [] for cell in some}
        for turn in range(options.repeats + 1):  # the first warms up
            for cell in shuffled.sample(some, len(some)):
                taken = seconds_of(updates[cell])
                seconds[cell] += [taken] if turn else []
            print(f"total {total}: turn {turn} of {options.repeats}", file=sys.stderr)
        del updates
        base = np.array(seconds.get((total, "grad_accum", 0), []))
        for cell in some:
            low, median, high = np.quantile(seconds[cell], [0.25, 0.5, 0.75]).tolist()
            record = {"total": total, "method": cell[1], "bank": cell[2], "seconds": median, "seconds_low": low}
            record |= {"seconds_high": high, "ratio": float(np.median(seconds[cell] / base)) if len(base) else None}
            records.append(record)
    if not options.no_memory:
        for record in records:
            record["memory_mb"] = peak_of((record["total"], record["method"], record["bank"]))
    return records


def peak_of(cell: Cell) -> float:
    """MB at the peak of two updates, in a process of its own: the lesser of two, as allocators keep some."""
    # With these, glibc gives every tensor above a megabyte back when it is freed: the peak is then what was in use.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**20), "MALLOC_TRIM_THRESHOLD_": str(2**20)}
    command = [sys.executable, *sys.argv, "--peak_of", json.dumps(cell)]
    answers = [subprocess.run(command, capture_output=True, text=True, check=True, env=environment) for _ in range(2)]
    return min(float(answer.stdout.splitlines()[-1]) for answer in answers)


def main() -> None:
    """Measure, print a table, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, given in OPTIONS.items():
        parser.add_argument(name, **given)
    options = parser.parse_args()
    if options.peak_of:
        model = make_encoder(options)
        update = Update(options, model, optimizer_of(model), tuple(json.loads(options.peak_of)))
        reset_peak_memory(options.device)
        update.run()
        update.run()
        print(peak_memory_mb(options.device))
        return
    records = measure(options)
    for record in records:
        print(*(f"{key} {x:.3f}" if isinstance(x, float) else f"{key} {x}" for key, x in record.items()), sep=", ")
    if options.output:
        settings = {key: value for key, value in vars(options).items() if key not in ("output", "peak_of")}
        about = {"threads": torch.get_num_threads(), **provenance()}
        write_json(options.output, {"command": shlex.join(sys.argv), "settings": settings, "records": records, **about})


if __name__ == "__main__":
    main()
