"""A long run of ContAccumTrainer on a tiny encoder: does it leak, or slow down, as the bank goes round and round?

Every part of a real run takes part: sampler, collator, encoder, bank, probe, optimizer, log. Windows at both ends of
the run are compared: resident memory, open files, threads, time per micro-step. Speed as such is not the matter here.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import psutil
import torch
from transformers import PrinterCallback, TrainerCallback

from contaccum.errors import ConfigError

SLICES = 1000
"""The run is measured in so many slices at the most."""

WINDOW = 0.1
"""The share of the run at its start, and at its end, that is compared."""

_SHOWN = 20  # slices are put together into so many for the record


@dataclass
class LoadSettings:
    """One benchmark: what is run, and what may change from its first tenth to its last."""

    micro_steps: int = 100_000
    local: int = 4
    accumulation: int = 16
    bank: int = 1024
    rows: int = 8192
    max_memory_growth: float = 0.01
    max_slowdown: float = 0.05
    threads: int = 1

    def check(self) -> None:
        """Raise ConfigError for what cannot be measured."""
        if min(asdict(self).values()) <= 0:
            raise ConfigError("all numbers of this benchmark must be positive")
        if self.micro_steps % self.accumulation:
            raise ConfigError(f"micro_steps={self.micro_steps} is not a multiple of accumulation={self.accumulation}")
        needed = int(self.bank / self.local / (WINDOW / 2))
        if self.micro_steps < needed:
            raise ConfigError(
                f"micro_steps={self.micro_steps} with bank={self.bank}: the bank must be full within the first "
                f"{WINDOW / 2:.0%} of the run. Set micro_steps to {needed} or more, or a smaller bank"
            )
        if self.rows < 2 * self.local:
            raise ConfigError(f"rows={self.rows} is too few for micro-batches of {self.local}; set at least twice that")


@dataclass
class Slice:
    """Some micro-steps: when they ended, what the process held then, and seconds per micro-step."""

    micro_step: int
    resident_mb: float
    open_files: int
    threads: int
    cpu: float
    wall: float
    machine: float  # of a fixed piece of work beside them, which no leak of ours slows down


class LoadMeter(TrainerCallback):
    """Takes a :class:`Slice` every ``every`` micro-steps; its own time is not counted."""

    def __init__(self, every: int, total: int, progress: Callable[[str], None]) -> None:
        self.every, self.total, self.progress = every, total, progress
        self.slices: list[Slice] = []
        self._process = psutil.Process()
        self._micro_steps = 0
        self._a, self._b, self._c = (torch.zeros(64, 64) for _ in range(3))

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._clocks = time.process_time(), time.perf_counter()

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._micro_steps += 1
        if self._micro_steps % self.every == 0:
            self._measure()

    # transformers calls this one instead after the last micro-step of an update.
    on_step_end = on_substep_end

    def _measure(self) -> None:
        cpu, wall = (
            now - then for now, then in zip((time.process_time(), time.perf_counter()), self._clocks, strict=True)
        )
        with self._process.oneshot():
            resident = self._process.memory_info().rss / 2**20
            threads = self._process.num_threads()
        files = self._process.num_fds() if hasattr(self._process, "num_fds") else 0
        machine = self._fixed_work()
        self.slices.append(
            Slice(self._micro_steps, resident, files, threads, cpu / self.every, wall / self.every, machine)
        )
        shown = [(self._micro_steps - ago) * _SHOWN // self.total for ago in (0, self.every)]
        if shown[0] > shown[1]:
            self.progress(
                f"{self._micro_steps:>9,} micro-steps: {resident:.1f} MB, {files} files, {threads} threads, "
                f"{1e3 * cpu / self.every:.2f} ms of CPU each"
            )
        self._clocks = time.process_time(), time.perf_counter()

    def _fixed_work(self) -> float:
        """CPU seconds of work that leaves nothing behind and keeps no object: other programs alone slow it down."""
        started = time.process_time()
        number = 0
        for i in range(30_000):
            number = (number * 31 + i) & 0xFFFF
        for _ in range(100):
            torch.mm(self._a, self._b, out=self._c)
        return time.process_time() - started


def measure_load(settings: LoadSettings, progress: Callable[[str], None] = print) -> list[dict[str, Any]]:
    """One record: that of :func:`summarise`; ``turns``, how often the bank was filled over; ``bank_fill``, in use."""
    settings.check()
    torch.set_num_threads(settings.threads)
    meter = LoadMeter(max(1, settings.micro_steps // SLICES), settings.micro_steps, progress)
    with tempfile.TemporaryDirectory() as folder:
        trainer = _trainer(settings, folder, meter)
        trainer.train()
    (loss,) = trainer.bank_losses()
    bank = loss.info_nce.bank
    return [{"turns": bank.pairs / settings.bank, "bank_fill": bank.in_use, **summarise(settings, meter.slices)}]


def summarise(settings: LoadSettings, slices: list[Slice]) -> dict[str, Any]:
    """The first tenth of the run, from when the bank is full, against the last.

    Returns:
        ``resident_mb``, ``open_files`` and ``threads`` (first, last: medians, and the most where they are counts),
        ``memory_growth`` (relative), ``slowdown_cpu`` and ``slowdown_wall`` (time per micro-step, last over first, less
        1; medians of slices), ``slowdown_machine`` (of the fixed work), ``slowdown`` (CPU over the fixed work: what is
        held against the bound), ``broken`` (the bounds that do not hold, in words) and ``samples`` over the run.
    """
    full = [s for s in slices if s.micro_step * settings.local >= settings.bank]
    end = settings.micro_steps
    first = [s for s in full if s.micro_step <= WINDOW * end]
    last = [s for s in full if s.micro_step > (1 - WINDOW) * end]

    def medians(name: str) -> tuple[float, float]:
        before, after = (statistics.median(getattr(s, name) for s in part) for part in (first, last))
        return before, after

    def most(name: str) -> tuple[int, int]:
        before, after = (max(getattr(s, name) for s in part) for part in (first, last))
        return before, after

    def change(pair: tuple[float, float]) -> float:
        return pair[1] / pair[0] - 1

    resident, files, threads = medians("resident_mb"), most("open_files"), most("threads")
    slower = {f"slowdown_{name}": change(medians(name)) for name in ("cpu", "wall", "machine")}
    record: dict[str, Any] = {
        "resident_mb": resident,
        "memory_growth": change(resident),
        "open_files": files,
        "threads": threads,
        "cpu_milliseconds": tuple(1e3 * seconds for seconds in medians("cpu")),
        "wall_milliseconds": tuple(1e3 * seconds for seconds in medians("wall")),
        **slower,
        "slowdown": (1 + slower["slowdown_cpu"]) / (1 + slower["slowdown_machine"]) - 1,
    }
    broken = []
    if record["memory_growth"] >= settings.max_memory_growth:
        broken.append(f"resident memory grew by {record['memory_growth']:.2%}, from {resident[0]:.1f} MB")
    broken += [
        f"{name} grew from {before} to {after}"
        for name, (before, after) in (("open files", files), ("threads", threads))
        if after > before
    ]
    if record["slowdown"] > settings.max_slowdown:
        broken.append(f"a micro-step takes {record['slowdown']:.1%} longer at the end")
    per_sample = -(-len(slices) // _SHOWN)
    samples = [
        {
            "micro_step": part[-1].micro_step,
            "resident_mb": round(part[-1].resident_mb, 2),
            "cpu_milliseconds": round(1e3 * statistics.median(s.cpu for s in part), 4),
            "machine_milliseconds": round(1e3 * statistics.median(s.machine for s in part), 4),
        }
        for part in (slices[i : i + per_sample] for i in range(0, len(slices), per_sample))
    ]
    return {**record, "broken": broken, "samples": samples}


def _trainer(settings: LoadSettings, folder: str, meter: LoadMeter) -> Any:
    from datasets import Dataset
    from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling, WordEmbeddings
    from sentence_transformers.sentence_transformer.modules.tokenizer import WhitespaceTokenizer

    from contaccum import ContAccumTrainer, ContAccumTrainingArguments, DualEncoder

    torch.manual_seed(0)
    words = [f"w{i}" for i in range(500)]
    # A bag of words: it makes the gradients and the drift of any encoder, and leaves the time to the rest.
    embeddings = WordEmbeddings(WhitespaceTokenizer(words), torch.randn(len(words), 32), update_embeddings=True)
    model = DualEncoder(modules=[embeddings, Pooling(32), Dense(32, 32), Normalize()], device="cpu")

    def column(length: int) -> list[str]:
        return [" ".join(words[i] for i in row) for row in torch.randint(len(words), (settings.rows, length)).tolist()]

    args = ContAccumTrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=settings.local,
        gradient_accumulation_steps=settings.accumulation,
        max_steps=settings.micro_steps // settings.accumulation,
        bank_size=settings.bank,
        learning_rate=1e-4,
        dataloader_drop_last=True,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    dataset = Dataset.from_dict({"query": column(6), "positive": column(12)})
    trainer = ContAccumTrainer(model=model, args=args, train_dataset=dataset, callbacks=[meter], quiet=True)
    trainer.remove_callback(PrinterCallback)
    return trainer
