"""Texts and tokens per second of encoding a corpus, and of forward passes alone.

`CorpusEncoder` does the work of `contaccum encode`: it reads and tokenises texts, encodes them and
writes a store. A bare forward pass has its token ids on the device already and keeps its result
there. The difference of both is what reading, tokenising, copying and writing cost.
"""

from __future__ import annotations

import json
import math
import tempfile
import time
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measuring.encoders import BACKBONES, make_encoder, make_features, make_texts
from measuring.run import Cases, Run

from contaccum import DualEncoder
from contaccum.retrieval.encode import CorpusEncoder, encode_texts

PRECISIONS = ("float32", "bfloat16")
_NUM_TRIAL_BATCHES = 2  # forward passes that tell how many take long enough


@dataclass(frozen=True)
class Sizes:
    """Sizes of this part."""

    backbones: tuple[str, ...] = ("minilm", "bert-base")
    lengths: tuple[int, ...] = (32, 256)  # tokens of a text
    batch_size: int = 128  # texts per forward pass
    num_words: int = 20_000  # vocabulary
    forward_seconds: float = 1.0  # of the timed forward passes of a case, at least
    max_batches: int = 2000  # forward passes of a case, at most
    # Of the corpus of a case, at most, because a tokeniser is slower than a small encoder on a GPU.
    max_tokens: int = 1_000_000


SIZES = Sizes()
TINY = Sizes(("tiny", "decoder-tiny"), (4, 8), 4, 50, 0.0, 3, 40)


def list_cases(sizes: Sizes, run: Run) -> Cases:
    """Yield a case for each backbone, precision and length of the texts."""
    for backbone in sizes.backbones:
        torch.manual_seed(0)
        model = make_encoder(
            backbone,
            run.device,
            num_words=sizes.num_words,
            passage_max_length=max(sizes.lengths),
        )
        for precision in PRECISIONS:
            for length in sizes.lengths:
                measure = partial(measure_case, backbone, model, precision, length, sizes, run)
                yield f"{backbone}, {precision}, {length} tokens", measure


def measure_case(
    backbone: str, model: DualEncoder, precision: str, length: int, sizes: Sizes, run: Run
) -> dict[str, Any]:
    """Return the rates of a backbone in a precision, for texts of a length."""
    run.reset_peak()
    num_batches, batch_seconds = measure_forward(backbone, model, length, precision, sizes, run)
    forward_rate = sizes.batch_size / batch_seconds
    # Full batches only, as in the forward passes alone.
    max_batches = max(1, sizes.max_tokens // (length * sizes.batch_size))
    num_texts = min(num_batches, max_batches) * sizes.batch_size
    texts = make_texts(num_texts, length, sizes.num_words)
    encode_rate = num_texts / measure_corpus_encoder(model, texts, precision, sizes, run)
    return {
        "backbone": backbone,
        "precision": precision,
        "tokens_per_text": length,
        "texts": num_texts,
        "encode_texts_per_second": encode_rate,
        "encode_tokens_per_second": encode_rate * length,
        "forward_batches": num_batches,
        "forward_texts_per_second": forward_rate,
        "share_of_forward": encode_rate / forward_rate,
        "peak_mb": run.read_peak_mb(),
    }


def measure_corpus_encoder(
    model: DualEncoder, texts: list[str], precision: str, sizes: Sizes, run: Run
) -> float:
    """Encode a corpus into a store, as `contaccum encode` does; return the seconds."""
    encode_texts(model, texts[: sizes.batch_size], "document", sizes.batch_size, precision)
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder, "corpus.jsonl")
        with corpus.open("w", encoding="utf-8") as file:
            for number, text in enumerate(texts):
                file.write(json.dumps({"_id": str(number), "text": text}) + "\n")
        encoder = CorpusEncoder(
            model,
            "random weights",
            corpus,
            Path(folder, "store"),
            batch_size=sizes.batch_size,
            precision=precision,
        )
        run.synchronize()
        started = time.perf_counter()
        encoder.encode(show_progress=False)
        run.synchronize()
        return time.perf_counter() - started


def measure_forward(
    backbone: str, model: DualEncoder, length: int, precision: str, sizes: Sizes, run: Run
) -> tuple[int, float]:
    """Run forward passes alone; return their number and the seconds of one.

    The number is chosen so that they take long enough for a stable time.
    """
    vocabulary = BACKBONES[backbone].vocabulary
    _, features = make_features(vocabulary, sizes.batch_size, length, length, run.device)
    autocast: Any = nullcontext()
    if precision != "float32":
        autocast = torch.autocast(run.device.type, getattr(torch, precision))
    model.eval()

    def run_batches(num_batches: int) -> float:
        run.synchronize()
        started = time.perf_counter()
        for _ in range(num_batches):
            model(dict(features))  # a copy, because the model adds its outputs
        run.synchronize()
        return time.perf_counter() - started

    with torch.inference_mode(), autocast:
        run_batches(1)  # the first forward pass is slower
        expected_seconds = run_batches(_NUM_TRIAL_BATCHES) / _NUM_TRIAL_BATCHES
        num_batches = math.ceil(sizes.forward_seconds / expected_seconds)
        num_batches = min(max(num_batches, _NUM_TRIAL_BATCHES), sizes.max_batches)
        seconds = run_batches(num_batches)
    return num_batches, seconds / num_batches
