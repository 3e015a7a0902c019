"""Seconds and peak memory of a micro-step of `QuerySideLoss` with ten million documents.

The documents are in the memory of the GPU, or in a file that is mapped into the memory of the host
and read in every micro-step. With few documents, the gradient is compared with that of a dense
float64 softmax over all of them.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from measuring.encoders import BACKBONES, make_encoder, make_features
from measuring.random_store import write_random_store
from torch.nn.functional import cross_entropy, normalize

from contaccum import QuerySideLoss
from contaccum.retrieval.documents import StoreDocuments
from contaccum.retrieval.encode import encoding_identity
from contaccum.retrieval.exact_search import DeviceEmbeddings
from contaccum.retrieval.store import EmbeddingStore
from gpu_parts.settings import Run, add_failures, collect_error
from gpu_parts.turns import quartiles

# The largest relative error of the gradient by type of the store. A GPU rounds the sums of float16
# products more coarsely than those in float32.
MAX_ERRORS = {"float16": 1e-3, "float32": 1e-5}
SHARD_SIZE = 50_000
# The first micro-step reads the store. In the second, the loss waits for the GPU to log its cost,
# which matters only if a micro-step is short.
DEVICE_WARM_UP_STEPS = 2
HOST_WARM_UP_STEPS = 1
NUM_QUERIES_OF_CHECK = 8


@dataclass(frozen=True)
class QuerySideSizes:
    """Sizes of this part."""

    backbone: str = "minilm"
    documents: int = 10_000_000
    documents_in_float32: int = 1_000_000
    documents_of_check: int = 20_000
    queries: int = 32  # queries per micro-step
    query_length: int = 32
    device_steps: int = 20  # timed micro-steps with documents in GPU memory
    host_steps: int = 5  # timed micro-steps with documents in host memory


TINY = QuerySideSizes("tiny", 300, 200, 50, 4, 4, 2, 2)
# The documents are read from the host in every micro-step, whatever fits into the GPU.
on_host = patch.object(DeviceEmbeddings, "_fits", lambda embeddings: False)


def measure(run: Run) -> dict[str, Any]:
    """Check the gradient, and time micro-steps for each type of the store and place in memory."""
    sizes = TINY if run.is_tiny else QuerySideSizes()
    errors = {}
    stores: dict[str, Any] = {}
    failures: list[str] = []
    for dtype in MAX_ERRORS:
        with collect_error(failures, f"the gradient with a {dtype} store"):
            errors[dtype] = check_gradient(dtype, sizes, run)
    result: dict[str, Any] = {
        # Not max(), which may ignore NaN.
        "passed": all(error <= MAX_ERRORS[dtype] for dtype, error in errors.items()),
        "sizes": asdict(sizes),
        "gradient_errors": errors,
        "limits": MAX_ERRORS,
        "stores": stores,
    }
    for dtype in MAX_ERRORS:
        if not run.has_time():  # writing a store takes long
            break
        with collect_error(failures, dtype):
            for store in measure_store(dtype, sizes, run):
                stores[dtype] = store
                add_failures(result, failures)
                run.save_partial(result)
        run.free_memory()
    reasons = [f"{dtype} store" for dtype in MAX_ERRORS if dtype not in stores]
    for dtype, store in stores.items():
        for place, figures in store["places"].items():
            if "not_measured" in figures:
                reasons.append(f"{dtype}, {place}: {figures['not_measured']}")
    if reasons:
        result["not_run"] = "; ".join(reasons)
    add_failures(result, failures)
    return result


def make_model(sizes: QuerySideSizes, run: Run) -> Any:
    """Create an encoder with random weights, compared by cosine."""
    torch.manual_seed(0)
    return make_encoder(BACKBONES[sizes.backbone], run.device, pooling="mean", similarity="cos")


def write_store(
    model: Any, folder: str, dtype: str, num_documents: int, run: Run
) -> EmbeddingStore:
    """Write a store of random embeddings that fits the model."""
    identity = encoding_identity(model, "float32", dtype, SHARD_SIZE)
    dimension = model.get_embedding_dimension()
    return write_random_store(Path(folder, "store"), identity, num_documents, dimension, run.device)


def check_gradient(dtype: str, sizes: QuerySideSizes, run: Run) -> float:
    """Return the largest relative error of the gradient of queries, over both places of documents.

    It is NaN if one of the errors is NaN. The reference is the gradient of a dense float64 softmax
    over the same stored embeddings.
    """
    errors = []
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(sizes, run)
        store = write_store(model, folder, dtype, sizes.documents_of_check, run)
        rows = torch.randint(len(store), (NUM_QUERIES_OF_CHECK, 1), device=run.device)
        queries = torch.randn(NUM_QUERIES_OF_CHECK, store.shape[1], device=run.device)
        documents = torch.from_numpy(store[:]).to(run.device).double()
        reference = queries.double().requires_grad_()
        cosines = normalize(reference, dim=-1) @ normalize(documents, dim=-1).T
        for place in (nullcontext(), on_host):
            loss_fn = QuerySideLoss(model, StoreDocuments(store))
            leaf = queries.clone().requires_grad_()
            with place:
                loss_fn.compute_loss_from_embeddings(leaf, rows).backward()
            (expected,) = torch.autograd.grad(
                cross_entropy(cosines * loss_fn.scale, rows[:, 0]), reference, retain_graph=True
            )
            assert leaf.grad is not None
            errors.append(float((leaf.grad.double() - expected).norm() / expected.norm()))
    return float(np.max(errors))


def measure_store(dtype: str, sizes: QuerySideSizes, run: Run) -> Iterator[dict[str, Any]]:
    """Write a large store, and time micro-steps with its documents in both places.

    Yields:
        The figures of the store so far, after each place.
    """
    model = make_model(sizes, run)
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        num_documents = sizes.documents if dtype == "float16" else sizes.documents_in_float32
        store = write_store(model, folder, dtype, num_documents, run)
        write_seconds = time.perf_counter() - started
        num_bytes = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
        places: dict[str, Any] = {}
        figures = {
            "documents": num_documents,
            "write_seconds": write_seconds,
            "store_bytes": num_bytes,
            "places": places,
        }
        if run.is_cuda:
            places["device"] = measure_steps(
                model,
                StoreDocuments(store),
                DEVICE_WARM_UP_STEPS,
                sizes.device_steps,
                sizes,
                run,
            )
        else:
            places["device"] = {"not_measured": "there is no GPU"}
        yield figures
        run.free_memory()
        with on_host:
            places["host"] = measure_steps(
                model, StoreDocuments(store), HOST_WARM_UP_STEPS, sizes.host_steps, sizes, run
            )
        yield figures


def measure_steps(
    model: Any,
    documents: StoreDocuments,
    num_warm_up_steps: int,
    num_steps: int,
    sizes: QuerySideSizes,
    run: Run,
) -> dict[str, Any]:
    """Time micro-steps, forward and backward, after those of the warm-up."""
    loss_fn = QuerySideLoss(model, documents).train()
    seconds: list[float] = []
    warm_up_seconds: list[float] = []
    run.reset_peak()
    for step in range(num_warm_up_steps + num_steps):
        if not run.has_time():
            break
        features = make_query_features(sizes, run)
        rows = torch.randint(len(documents), (sizes.queries, 1), device=run.device)
        run.synchronize()
        started = time.perf_counter()
        loss_fn([features], rows).backward()
        run.synchronize()
        elapsed = time.perf_counter() - started
        if step < num_warm_up_steps:
            warm_up_seconds.append(elapsed)
        else:
            seconds.append(elapsed)
        model.zero_grad()
    if not seconds:
        return {"not_measured": "the time was over before the first micro-step"}
    (parts,) = documents._on_device.values()
    is_resident = parts[0]._kept is not None
    return {
        "seconds": quartiles(seconds),
        "steps": len(seconds),
        "warm_up_seconds": warm_up_seconds,
        "is_in_gpu_memory": is_resident,
        "peak_mb": run.read_peak_mb(),
    }


def make_query_features(sizes: QuerySideSizes, run: Run) -> dict[str, Any]:
    """Return random token ids of the queries of a micro-step."""
    vocabulary = BACKBONES[sizes.backbone].vocabulary
    length = sizes.query_length
    return make_features(vocabulary, sizes.queries, length, length, run.device)[0]
