"""What an update costs: time and memory of one optimizer step, by method, pairs per update and bank size.

Token ids are made up and the encoder may be fresh: neither changes the cost. Methods take turns within one run, so
that other work on the machine falls on all of them, and what counts is the ratio to gradient accumulation. Quality is
not measured here.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from contaccum.errors import ConfigError
from contaccum.training.memory import peak_memory_mb

PRESETS = {
    # name: layers, hidden size, heads, feed-forward size
    "bert-base": (12, 768, 12, 3072),
    "minilm": (6, 384, 12, 1536),
    "tiny": (2, 32, 2, 64),
}
METHODS = ("in_batch", "grad_accum", "grad_cache", "contaccum", "pre_batch", "dense")
BANK_METHODS = ("contaccum", "pre_batch", "dense")
DENSE_LIMIT = 16384
"""Largest bank for the dense loss: its matrix and what autograd keeps of it take 4 GB there, 70 GB at 65,536."""


@dataclass
class UpdateSettings:
    """One benchmark: everything that decides what is measured."""

    backbone: str = "minilm"
    tied: bool = True
    local: int = 8
    total: list[int] = field(default_factory=lambda: [128])
    bank: list[int] = field(default_factory=lambda: [1024])
    methods: list[str] = field(default_factory=lambda: ["grad_accum", "grad_cache", "contaccum"])
    query_length: int = 32
    passage_length: int = 128
    repeats: int = 5
    dropout: float = 0.0
    precision: str = "float32"
    device: str = "cpu"
    threads: int | None = None
    bank_dtype: str | None = None
    memory: bool = True

    def check(self) -> None:
        """Raise ConfigError for what cannot be measured."""
        for method in self.methods:
            if method not in METHODS:
                raise ConfigError(f"methods: {method!r} is not one of {', '.join(METHODS)}")
        for total in self.total:
            if total % self.local:
                raise ConfigError(f"total={total} is not a multiple of local={self.local}")
        if min([*self.bank, self.local - 1, self.repeats - 1]) < 0:
            raise ConfigError("bank must be at least 0, local and repeats at least 1")
        if self.precision not in ("float32", "bfloat16"):
            raise ConfigError(f"precision must be float32 or bfloat16, got {self.precision!r}")

    def cells(self) -> list[tuple[int, str, int]]:
        """(pairs per update, method, bank size); methods without a bank once per total, dense where it fits."""
        cells = []
        for total, method in itertools.product(self.total, self.methods):
            for bank in self.bank if method in BANK_METHODS else [0]:
                if method == "dense" and bank > DENSE_LIMIT:
                    continue
                if bank or method not in BANK_METHODS:
                    cells.append((total, method, bank))
        return cells


class DenseContAccumLoss(nn.Module):
    """The paper's loss as published code computes it, an (n + m) x (n + m) matrix per micro-step: the reference."""

    def __init__(self, model: nn.Module, bank_size: int, scale: float = 20.0) -> None:
        super().__init__()
        self.model, self.bank_size, self.scale = model, bank_size, scale
        self.queries: Tensor | None = None
        self.passages: Tensor | None = None

    def forward(self, sentence_features: list[dict[str, Tensor]], labels: Tensor | None = None) -> Tensor:
        local = [nn.functional.normalize(self.model(x)["sentence_embedding"], dim=-1) for x in sentence_features]
        rows, columns = local
        if self.queries is not None and self.passages is not None:
            rows, columns = torch.cat([rows, self.queries]), torch.cat([columns, self.passages])
        scores = rows @ columns.T * self.scale
        losses = nn.functional.cross_entropy(scores, torch.arange(len(rows), device=rows.device), reduction="sum")
        self.fill(*(x.detach() for x in local))
        return losses / len(local[0])

    def fill(self, queries: Tensor, passages: Tensor) -> None:
        """Put rows into the banks."""
        if self.queries is not None and self.passages is not None:
            queries, passages = torch.cat([self.queries, queries]), torch.cat([self.passages, passages])
        self.queries, self.passages = queries[-self.bank_size :], passages[-self.bank_size :]


def make_encoder(settings: UpdateSettings) -> Any:
    """A fresh encoder of a preset's size, or a model by name."""
    from transformers import BertConfig, BertTokenizer

    from contaccum.encoders import DualEncoder, set_dropout

    if settings.backbone in PRESETS:
        layers, hidden, heads, inner = PRESETS[settings.backbone]
        tokenizer = BertTokenizer(
            vocab={token: i for i, token in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"])}
        )
        config = BertConfig(
            hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=inner
        )
        model = DualEncoder.from_backbone(
            config, tied=settings.tied, pooling="cls", tokenizer=tokenizer, device=settings.device
        )
    else:
        model = DualEncoder.from_backbone(settings.backbone, tied=settings.tied, device=settings.device)
    set_dropout(model, settings.dropout)
    return model.train()


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW at its full cost, whose steps leave the weights where they are."""
    return torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)


class Update:
    """One method, ready to do updates. Methods share the model and the optimizer, of whose state one copy is enough."""

    def __init__(
        self,
        settings: UpdateSettings,
        model: Any,
        optimizer: torch.optim.Optimizer,
        total: int,
        method: str,
        bank: int,
    ) -> None:
        from sentence_transformers.losses import CachedMultipleNegativesRankingLoss, MultipleNegativesRankingLoss

        from contaccum.losses import ContAccumLoss
        from contaccum.training.arguments import BANK_DTYPES

        self.settings, self.model, self.optimizer = settings, model, optimizer
        whole = method in ("in_batch", "grad_cache")
        self.size, self.micro_steps = (total, 1) if whole else (settings.local, total // settings.local)
        self.loss: Any
        if method in ("in_batch", "grad_accum"):
            self.loss = MultipleNegativesRankingLoss(model)
        elif method == "grad_cache":
            self.loss = CachedMultipleNegativesRankingLoss(model, mini_batch_size=settings.local)
        elif method == "dense":
            self.loss = DenseContAccumLoss(model, bank)
        else:
            dtype = None if settings.bank_dtype is None else BANK_DTYPES[settings.bank_dtype]
            self.loss = ContAccumLoss(
                model, bank_size=bank, query_bank_size=0 if method == "pre_batch" else None, bank_dtype=dtype
            )
        self.loss.train()
        self._fill(bank, model.get_embedding_dimension())

    def _fill(self, bank: int, dimension: int) -> None:
        """A full bank: the cost that lasts."""

        def rows(n: int) -> list[Tensor]:
            return [torch.randn(n, dimension, device=self.settings.device) for _ in range(2)]

        if isinstance(self.loss, DenseContAccumLoss):
            self.loss.fill(*(nn.functional.normalize(x, dim=-1) for x in rows(bank)))
        elif bank:
            self.loss.compute_loss_from_embeddings(rows(self.size))
            # Straight into the bank: the next micro-step, which warms up, sums all rows at once.
            for start in range(0, bank, 1024):
                units = [nn.functional.normalize(x, dim=-1) for x in rows(min(1024, bank - start))]
                self.loss.info_nce.bank.enqueue(*units)

    def _features(self, length: int, task: str) -> dict[str, Any]:
        vocabulary = self.model.transformers_model.config.vocab_size
        ids = torch.randint(5, vocabulary, (self.size, length), device=self.settings.device)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "task": task}

    def run(self) -> None:
        """One update."""
        kind, dtype = torch.device(self.settings.device).type, getattr(torch, self.settings.precision)
        for _ in range(self.micro_steps):
            features = [
                self._features(self.settings.query_length, "query"),
                self._features(self.settings.passage_length, "document"),
            ]
            with torch.autocast(kind, dtype=dtype, enabled=dtype != torch.float32):
                loss = self.loss(features, None)
            (loss / self.micro_steps).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def timed(action: Callable[[], None], device: str) -> float:
    """Seconds that ``action`` takes, the device's work included."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    action()
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


def measure_updates(settings: UpdateSettings, progress: Callable[[str], None] = print) -> list[dict[str, Any]]:
    """Time every cell, in turns, and its memory; returns one record per cell.

    A record: ``total``, ``method``, ``bank``, ``seconds`` (median), ``seconds_low`` and ``seconds_high`` (quartiles),
    ``ratio`` (median over repeats of the time over grad_accum's in the same turn), ``pairs_per_second``,
    ``memory_mb`` (peak; on a CPU the lesser of two processes, ``memory_runs_mb``) and ``extra_memory_mb`` (over
    grad_accum's).
    """
    settings.check()
    if settings.threads:
        torch.set_num_threads(settings.threads)
    torch.manual_seed(0)
    model = make_encoder(settings)
    optimizer = make_optimizer(model)
    records = []
    for total in settings.total:
        cells = [cell for cell in settings.cells() if cell[0] == total]
        seconds: dict[tuple[int, str, int], list[float]] = {cell: [] for cell in cells}
        updates = {cell: Update(settings, model, optimizer, *cell) for cell in cells}
        order = random.Random(0)
        for turn in range(settings.repeats + 1):  # the first warms up
            # What ran just before leaves its mark (caches, freed memory), so neighbours change from turn to turn.
            for cell in order.sample(cells, len(cells)):
                taken = timed(updates[cell].run, settings.device)
                if turn:
                    seconds[cell].append(taken)
            progress(f"total {total}: turn {turn} of {settings.repeats}")
        base = seconds.get((total, "grad_accum", 0))
        del updates
        for cell in cells:
            times = torch.tensor(seconds[cell], dtype=torch.float64)
            low, median, high = times.quantile(torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)).tolist()
            ratio = None if base is None else (times / torch.tensor(base, dtype=torch.float64)).median().item()
            records.append(
                {
                    "total": total,
                    "method": cell[1],
                    "bank": cell[2],
                    "seconds": median,
                    "seconds_low": low,
                    "seconds_high": high,
                    "ratio": ratio,
                    "pairs_per_second": total / median,
                }
            )
    if settings.memory:
        add_memory(settings, records, progress)
    return records


def add_memory(settings: UpdateSettings, records: list[dict[str, Any]], progress: Callable[[str], None]) -> None:
    """Peak memory of each cell, measured in a process of its own: a peak never comes down again."""
    # Resident memory holds what the allocator keeps for later, a matter of chance. With these, glibc gives every
    # tensor above a megabyte back when it is freed, so that the peak is what was in use; the lesser of two runs counts.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**20), "MALLOC_TRIM_THRESHOLD_": str(2**20)}
    jobs = 2 if torch.device(settings.device).type == "cpu" else 1
    for record in records:
        cell = (record["total"], record["method"], record["bank"])
        job = json.dumps({"settings": asdict(settings), "cell": cell})
        code = "import sys; from contaccum.benchmarks.update import _memory_job; _memory_job(sys.argv[1])"
        peaks = []
        for _ in range(jobs):
            answer = subprocess.run(
                [sys.executable, "-c", code, job], capture_output=True, text=True, check=False, env=environment
            )
            if answer.returncode:
                progress(f"memory of {cell}: failed ({(answer.stderr.strip().splitlines() or ['killed'])[-1]})")
                break
            peaks.append(float(answer.stdout.strip().splitlines()[-1]))
        record["memory_mb"] = min(peaks) if len(peaks) == jobs else None
        record["memory_runs_mb"] = peaks
        if peaks:
            progress(f"memory of {cell}: {', '.join(f'{peak:.0f}' for peak in peaks)} MB")
    for record in records:
        base = [r["memory_mb"] for r in records if r["total"] == record["total"] and r["method"] == "grad_accum"]
        if base and base[0] is not None and record["memory_mb"] is not None:
            record["extra_memory_mb"] = record["memory_mb"] - base[0]


def _memory_job(job: str) -> None:
    content = json.loads(job)
    settings = UpdateSettings(**content["settings"])
    if settings.threads:
        torch.set_num_threads(settings.threads)
    torch.manual_seed(0)
    model = make_encoder(settings)
    update = Update(settings, model, make_optimizer(model), *content["cell"])
    if torch.device(settings.device).type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        update.run()
    print(peak_memory_mb(settings.device))
