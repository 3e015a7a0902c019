"""Seconds and peak memory of a micro-step of `QuerySideLoss` with ten million documents.

The documents are in the memory of the GPU, or in a file that is mapped into the memory of the host
and read in every micro-step. With few documents, the gradient is compared with that of a dense
float64 softmax over all of them.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import torch
from measuring.encoders import BACKBONES, make_encoder, make_features
from measuring.run import Cases, NotMeasured, Run, quartiles
from torch.nn.functional import cross_entropy, normalize

from contaccum import QuerySideLoss, work
from contaccum.retrieval import store as stores
from contaccum.retrieval.documents import StoreDocuments
from contaccum.retrieval.encode import encoding_identity
from contaccum.retrieval.exact_search import DeviceEmbeddings
from contaccum.retrieval.store import EmbeddingStore

# The largest relative error of the gradient by type of the store. A GPU rounds the sums of float16
# products more coarsely than those in float32.
MAX_ERRORS = {"float16": 1e-3, "float32": 1e-5}
SHARD_SIZE = 50_000
# The first micro-step reads the store. One more warms up, where it is short.
WARM_UP_STEPS = {"device": 2, "host": 1}
NUM_QUERIES_OF_CHECK = 8
# The documents are read from the host in every micro-step, whatever fits into the GPU.
PLACES = {
    "device": nullcontext(),
    "host": patch.object(DeviceEmbeddings, "_fits", lambda embeddings: False),
}


@dataclass(frozen=True)
class Sizes:
    """Sizes of this part."""

    backbone: str = "minilm"
    documents: int = 10_000_000  # in float16
    documents_in_float32: int = 1_000_000
    documents_of_check: int = 20_000
    queries: int = 32  # queries per micro-step
    query_length: int = 32
    device_steps: int = 20  # timed micro-steps with documents in GPU memory
    host_steps: int = 5  # timed micro-steps with documents in host memory


SIZES = Sizes()
TINY = Sizes("tiny", 300, 200, 50, 4, 4, 2, 2)


def list_cases(sizes: Sizes, run: Run) -> Cases:
    """Yield checks of the gradient, and a case for each type of the store and place in memory."""
    torch.manual_seed(0)
    model = make_encoder(sizes.backbone, run.device, pooling="mean", similarity="cos")
    for dtype in MAX_ERRORS:
        yield f"gradient, {dtype}", partial(check_gradient, model, dtype, sizes, run)
    documents = {"float16": sizes.documents, "float32": sizes.documents_in_float32}
    for dtype, num_documents in documents.items():
        with tempfile.TemporaryDirectory() as folder:
            # Written by the first case of the two.
            write = cache(partial(write_random_store, Path(folder), model, dtype, num_documents))
            for place in PLACES:
                measure = partial(measure_place, model, write, place, sizes, run)
                yield f"{dtype}, {place}", measure


def write_random_store(folder: Path, model: Any, dtype: str, num_rows: int) -> EmbeddingStore:
    """Write a finished store of normally distributed embeddings that fits a model, and open it.

    `StoreWriter` hashes every text in Python, which takes minutes for ten million of them. Here the
    files of a shard are written from arrays; `contaccum.retrieval.store` describes the files. The
    id of a row is its number, and so is the hash of its text.
    """
    identity = encoding_identity(model, "float32", dtype, SHARD_SIZE)
    description = {"dimension": model.get_embedding_dimension(), "fingerprint": "random"}
    for number, first_row in enumerate(range(0, num_rows, SHARD_SIZE)):
        rows = np.arange(first_row, min(first_row + SHARD_SIZE, num_rows))
        shard = folder / stores.get_shard_name(number)
        shard.mkdir(parents=True)
        embeddings = torch.randn(len(rows), description["dimension"], device=model.device)
        embeddings = embeddings.to(getattr(torch, dtype)).cpu().numpy()
        np.save(shard / stores.EMBEDDINGS_FILE, embeddings, allow_pickle=False)
        np.save(shard / stores.TEXTS_FILE, rows, allow_pickle=False)
        ids = pa.record_batch([pa.array(rows).cast(pa.string())], names=["id"])
        with pa.ipc.new_file(str(shard / stores.IDS_FILE), ids.schema) as writer:
            writer.write_batch(ids)
        work.finish(shard, {**description, "rows": len(rows)}, has_sizes=True)
    work.write_identity(folder, {"work": stores.STORE, **identity})
    dimension = description["dimension"]
    corpus = {"fingerprint": "random"}
    work.finish(folder, {"rows": num_rows, "dimension": dimension, "corpus": corpus})
    return EmbeddingStore.open(folder)


def check_gradient(model: Any, dtype: str, sizes: Sizes, run: Run) -> dict[str, Any]:
    """Return the largest relative error of the gradient of queries, over both places of documents.

    The reference is the gradient of a dense float64 softmax over the same stored embeddings.
    """
    errors = []
    with tempfile.TemporaryDirectory() as folder:
        store = write_random_store(Path(folder), model, dtype, sizes.documents_of_check)
        rows = torch.randint(len(store), (NUM_QUERIES_OF_CHECK, 1), device=run.device)
        queries = torch.randn(NUM_QUERIES_OF_CHECK, store.shape[1], device=run.device)
        documents = torch.from_numpy(store[:]).to(run.device).double()
        reference = queries.double().requires_grad_()
        cosines = normalize(reference, dim=-1) @ normalize(documents, dim=-1).T
        for place in PLACES.values():
            loss_fn = QuerySideLoss(model, StoreDocuments(store))
            leaf = queries.clone().requires_grad_()
            with place:
                loss_fn.compute_loss_from_embeddings(leaf, rows).backward()
            (expected,) = torch.autograd.grad(
                cross_entropy(cosines * loss_fn.scale, rows[:, 0]), reference, retain_graph=True
            )
            assert leaf.grad is not None
            errors.append(float((leaf.grad.double() - expected).norm() / expected.norm()))
    limit = MAX_ERRORS[dtype]
    # Not max(), which may ignore NaN.
    passed = all(error <= limit for error in errors)
    return {"error": float(np.max(errors)), "limit": limit, "passed": passed}


def measure_place(
    model: Any, write: Callable[[], EmbeddingStore], place: str, sizes: Sizes, run: Run
) -> dict[str, Any]:
    """Time micro-steps, forward and backward, with the documents of a store in a place."""
    if place == "device" and not run.is_cuda:
        raise NotMeasured("there is no GPU")
    store = write()
    files = [path for path in store.folder.rglob("*") if path.is_file()]
    documents = StoreDocuments(store)
    loss_fn = QuerySideLoss(model, documents).train()
    vocabulary = BACKBONES[sizes.backbone].vocabulary
    length = sizes.query_length
    num_steps = sizes.device_steps if place == "device" else sizes.host_steps
    num_warm_up = WARM_UP_STEPS[place]
    seconds: list[float] = []
    run.reset_peak()
    with PLACES[place]:
        for _ in range(num_warm_up + num_steps):
            if not run.has_time():
                break
            features, _ = make_features(vocabulary, sizes.queries, length, length, run.device)
            rows = torch.randint(len(documents), (sizes.queries, 1), device=run.device)
            run.synchronize()
            started = time.perf_counter()
            loss_fn([features], rows).backward()
            run.synchronize()
            seconds.append(time.perf_counter() - started)
            model.zero_grad()
    if len(seconds) <= num_warm_up:
        raise NotMeasured("the time was over before the first micro-step")
    (parts,) = documents._on_device.values()
    return {
        "dtype": store.metadata["dtype"],
        "documents": len(store),
        "store_bytes": sum(path.stat().st_size for path in files),
        "seconds": quartiles(seconds[num_warm_up:]),
        "steps": len(seconds) - num_warm_up,
        "warm_up_seconds": seconds[:num_warm_up],
        "is_in_gpu_memory": parts[0]._kept is not None,
        "peak_mb": run.read_peak_mb(),
    }
