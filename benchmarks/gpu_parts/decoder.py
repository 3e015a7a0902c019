"""Seconds and peak memory of an update of a 0.6B decoder with adapters, by method.

The decoder has the sizes of Qwen3-Embedding-0.6B. Its weights are frozen, in bfloat16 (LoRA) or in
4 bits (QLoRA), and adapters of rank 16 are trained, with gradient checkpointing and under autocast
to bfloat16. Micro-batches have one pair or two, as on a small GPU.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from measuring.encoders import BACKBONES, make_encoder, use_autocast

from contaccum import DualEncoder
from contaccum.errors import ConfigError
from contaccum.settings import Settings
from contaccum.training.setup import load_model
from gpu_parts.settings import NotMeasured, Run, add_failures, collect_error, format_reason
from gpu_parts.turns import UpdateSizes, measure_methods

METHODS = ("grad_accum", "grad_cache", "contaccum", "contaccum_cached")


@dataclass(frozen=True)
class DecoderSizes:
    """Sizes of this part."""

    backbone: str = "decoder-0.6b"
    rank: int = 16  # of the adapters
    pairs: int = 8  # pairs per update
    micro_batches: tuple[int, ...] = (1, 2)  # pairs per micro-batch
    bank_size: int = 1024
    query_length: int = 32
    passage_length: int = 128
    turns: int = 2


TINY = DecoderSizes(
    "decoder-tiny", rank=2, pairs=4, bank_size=16, query_length=4, passage_length=6, turns=1
)


def measure(run: Run) -> dict[str, Any]:
    """Time updates of all methods, for each adapter and each size of a micro-batch."""
    sizes = TINY if run.is_tiny else DecoderSizes()
    adapters: dict[str, Any] = {}
    failures: list[str] = []
    missing: list[str] = []
    result: dict[str, Any] = {"sizes": asdict(sizes), "adapters": adapters}
    with tempfile.TemporaryDirectory() as folder:
        write_decoder(sizes, Path(folder))
        for adapter in ("lora", "qlora"):
            with collect_error(failures, adapter):
                try:
                    for figures in measure_adapter(adapter, Path(folder), sizes, run):
                        adapters[adapter] = figures
                        add_failures(result, failures)
                        run.save_partial(result)
                    missing += list_missing_cases(adapter, adapters[adapter])
                except (ConfigError, NotMeasured) as error:
                    # ConfigError: bitsandbytes is not installed, or there is no GPU.
                    missing.append(f"{adapter}: {format_reason(error)}")
            run.free_memory()
    if not adapters and not failures:
        raise NotMeasured("; ".join(missing))
    if missing:
        result["not_run"] = "; ".join(missing)
    add_failures(result, failures)
    return result


def list_missing_cases(adapter: str, figures: dict[str, Any]) -> list[str]:
    """Return a text for each case of an adapter that was not measured, or not in all turns."""
    texts = []
    for local, case in figures["micro_batches"].items():
        if "not_run" in case:
            texts.append(f"{adapter}, n={local}: {case['not_run']}")
    return texts


def write_decoder(sizes: DecoderSizes, folder: Path) -> None:
    """Write the decoder with random weights in bfloat16, as Qwen3-Embedding-0.6B is published."""
    torch.manual_seed(0)
    model = make_encoder(BACKBONES[sizes.backbone], "cpu", dtype="bfloat16")
    model.save_pretrained(str(folder), create_model_card=False)


def load_decoder(adapter: str, folder: Path, sizes: DecoderSizes, run: Run) -> DualEncoder:
    """Load the decoder as `contaccum train` does with ``lora_r`` and ``load_in_4bit``.

    Raises:
        ConfigError: 4 bits are not possible on this machine.
    """
    is_quantized = adapter == "qlora"
    settings = Settings(model=str(folder), lora_r=sizes.rank, load_in_4bit=is_quantized)
    model = load_model(settings, str(run.device))
    model.gradient_checkpointing_enable()
    use_autocast(model, "bfloat16")
    return model.train()


def measure_adapter(
    adapter: str, folder: Path, sizes: DecoderSizes, run: Run
) -> Iterator[dict[str, Any]]:
    """Time updates of all methods with an adapter, for each size of a micro-batch.

    Yields:
        The figures of the adapter so far, after each size of a micro-batch.

    Raises:
        NotMeasured: the time was over before the first turn.
    """
    run.reset_peak()
    model = load_decoder(adapter, folder, sizes, run)
    micro_batches: dict[str, Any] = {}
    trained = [p.numel() for p in model.parameters() if p.requires_grad]
    figures = {
        "weights_mb": count_weight_bytes(model) / 2**20,
        "trained_weights": sum(trained),
        "load_peak_mb": run.read_peak_mb(),
        "micro_batches": micro_batches,
    }
    for local in sizes.micro_batches:
        update_sizes = UpdateSizes(
            sizes.pairs,
            local,
            sizes.bank_size,
            sizes.query_length,
            sizes.passage_length,
            sizes.turns,
        )
        vocabulary = BACKBONES[sizes.backbone].vocabulary
        try:
            micro_batches[str(local)] = measure_methods(
                model, vocabulary, METHODS, update_sizes, run
            )
        except NotMeasured as error:
            micro_batches[str(local)] = {"not_run": str(error)}
        else:
            yield figures
        run.free_memory()
    if not any("methods" in case for case in micro_batches.values()):
        raise NotMeasured("the time was over before the first turn; increase --minutes")


def count_weight_bytes(model: DualEncoder) -> int:
    """Return the bytes of all weights; weights in 4 bits are stored as two in a byte."""
    return sum(weight.numel() * weight.element_size() for weight in model.parameters())
