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
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# The store needs pyarrow. Without it, each case would fail only after its forward passes.
import pyarrow  # noqa: F401
import torch
from measuring.encoders import BACKBONES, make_encoder, make_features, make_texts, make_words

from contaccum import DualEncoder
from contaccum.retrieval.encode import CorpusEncoder, encode_texts
from gpu_parts.settings import NotMeasured, Run, add_failures, collect_error

PRECISIONS = ("float32", "bfloat16")
_NUM_TRIAL_BATCHES = 2  # forward passes that tell how many take long enough


@dataclass(frozen=True)
class EncodingSizes:
    """Sizes of this part."""

    backbones: tuple[str, ...] = ("minilm", "bert-base")
    lengths: tuple[int, ...] = (32, 256)  # tokens of a text
    batch_size: int = 128  # texts per forward pass
    num_words: int = 20_000  # vocabulary
    forward_seconds: float = 1.0  # of the timed forward passes of a case, at least
    max_batches: int = 2000  # forward passes of a case, at most
    # Of the corpus of a case, at most, because a tokeniser is slower than a small encoder on a GPU.
    max_tokens: int = 1_000_000


TINY = EncodingSizes(("tiny", "decoder-tiny"), (4, 8), 4, 50, 0.0, 3, 40)


def measure(run: Run) -> dict[str, Any]:
    """Measure all backbones, precisions and lengths."""
    sizes = TINY if run.is_tiny else EncodingSizes()
    cases: list[dict[str, Any]] = []
    failures: list[str] = []
    result: dict[str, Any] = {"sizes": asdict(sizes), "cases": cases}
    num_cases = len(sizes.backbones) * len(PRECISIONS) * len(sizes.lengths)
    for backbone in sizes.backbones:
        if not run.has_time():
            break
        with collect_error(failures, backbone):
            for case in measure_backbone(backbone, sizes, run):
                cases.append(case)
                add_failures(result, failures)
                run.save_partial(result)
        run.free_memory()
    if not cases and not failures:
        raise NotMeasured("the time was over before the first case; increase --minutes")
    if len(cases) < num_cases:
        result["not_run"] = f"{num_cases - len(cases)} of {num_cases} cases"
    add_failures(result, failures)
    return result


def measure_backbone(backbone: str, sizes: EncodingSizes, run: Run) -> Iterator[dict[str, Any]]:
    """Yield the rates of a backbone in each precision, for each length of the texts."""
    torch.manual_seed(0)
    model = make_encoder(
        BACKBONES[backbone],
        run.device,
        words=make_words(sizes.num_words),
        passage_max_length=max(sizes.lengths),
    )
    for precision in PRECISIONS:
        for length in sizes.lengths:
            if not run.has_time():
                return
            run.reset_peak()
            forward = measure_forward(backbone, model, length, precision, sizes, run)
            forward_rate = sizes.batch_size / forward["seconds_per_batch"]
            # Full batches only, as in the forward passes alone.
            max_batches = max(1, sizes.max_tokens // (length * sizes.batch_size))
            num_texts = min(forward["batches"], max_batches) * sizes.batch_size
            texts = make_texts(num_texts, length, sizes.num_words)
            product = measure_corpus_encoder(model, texts, precision, sizes, run)
            product_rate = num_texts / product["seconds"]
            yield {
                "backbone": backbone,
                "precision": precision,
                "tokens_per_text": length,
                "texts": num_texts,
                "encode_texts_per_second": product_rate,
                "encode_tokens_per_second": product_rate * length,
                "forward_batches": forward["batches"],
                "forward_texts_per_second": forward_rate,
                "forward_tokens_per_second": forward_rate * length,
                "share_of_forward": product_rate / forward_rate,
                "tokenize_texts_per_second": measure_tokenizing(model, texts, sizes),
                "fingerprint_seconds": product["fingerprint_seconds"],
                "peak_mb": run.read_peak_mb(),
            }


def measure_corpus_encoder(
    model: DualEncoder, texts: list[str], precision: str, sizes: EncodingSizes, run: Run
) -> dict[str, float]:
    """Encode a corpus into a store, as `contaccum encode` does.

    Returns:
        Seconds of encoding, and seconds of hashing all weights before it.
    """
    encode_texts(model, texts[: sizes.batch_size], "document", sizes.batch_size, precision)
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder, "corpus.jsonl")
        with corpus.open("w", encoding="utf-8") as file:
            for number, text in enumerate(texts):
                file.write(json.dumps({"_id": str(number), "text": text}) + "\n")
        run.synchronize()
        started = time.perf_counter()
        encoder = CorpusEncoder(
            model,
            "random weights",
            corpus,
            Path(folder, "store"),
            batch_size=sizes.batch_size,
            precision=precision,
        )
        fingerprint_seconds = time.perf_counter() - started
        started = time.perf_counter()
        encoder.encode(show_progress=False)
        run.synchronize()
        seconds = time.perf_counter() - started
    return {"seconds": seconds, "fingerprint_seconds": fingerprint_seconds}


def measure_forward(
    backbone: str,
    model: DualEncoder,
    length: int,
    precision: str,
    sizes: EncodingSizes,
    run: Run,
) -> dict[str, Any]:
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
    return {"batches": num_batches, "seconds_per_batch": seconds / num_batches}


def measure_tokenizing(model: DualEncoder, texts: list[str], sizes: EncodingSizes) -> float:
    """Return the texts per second of the tokeniser alone."""
    started = time.perf_counter()
    for start in range(0, len(texts), sizes.batch_size):
        model.preprocess(texts[start : start + sizes.batch_size])
    return len(texts) / (time.perf_counter() - started)
