"""Tables of docs/how_large.md: the cost of encoding, storing and searching 10^6 to 10^9 passages.

They are computed from the rates that corpus_cost.py has measured and from the assumptions at the
top of this module. Nothing is measured here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from measuring.pages import format_bytes, format_duration, format_number, make_table

SIZES = (10**6, 10**7, 10**8, 10**9)
SIZE_NAMES = ("10^6", "10^7", "10^8", "10^9")
NUM_QUERIES = 1000
NUM_LISTS_PROBED = 32
PQ_BYTES = 64
# "np" leaves out polysemous training, which takes minutes and changes nothing unless the search
# parameter `ht` is set.
PQ_FACTORY = f"PQ{PQ_BYTES}np"
BYTES_PER_PQ_ID = 8
# The builder of contaccum's indexes trains on 64 rows per list. FAISS runs 10 iterations of k-means
# for the lists of an inverted file.
TRAINING_ROWS_PER_LIST = 64
TRAINING_ITERATIONS = 10

GPU_UTILISATION = 0.3  # share of the peak that an encoder reaches on a GPU in bfloat16
# Share of the float32 peak in exact search, with the selection of the best: docs/gpu.md has 33%.
GPU_SEARCH_UTILISATION = 0.3
# docs/gpu.md has 2,600 texts of 256 tokens per second, and 23,000 without reading, tokenising and
# writing. So this work takes as long as the tokenising of two cores.
GPU_HOST_CORES = 2
# From the store of the host to a GPU: docs/gpu.md has 0.46 s for 1.5 GB and 0.18 s for 0.8 GB.
COPY_BYTES_PER_SECOND = 4e9
DISK_BYTES_PER_SECOND = 2e9


@dataclass(frozen=True)
class Device:
    """A machine with one or several devices.

    Attributes:
        name: name in the tables.
        dollars_per_hour: price of the whole machine.
        memory_bytes: memory of the host.
        cores: cores that compute; 0 for a machine with GPUs.
        num_gpus: number of GPUs.
        bfloat16_flops: peak of a GPU for encoding, in operations per second.
        float32_flops: peak of a GPU for exact search, in operations per second.
    """

    name: str
    dollars_per_hour: float
    memory_bytes: float
    cores: int = 0
    num_gpus: int = 0
    bfloat16_flops: float = 0.0
    float32_flops: float = 0.0


# Prices of November 2026: that of an H100 is the median of 37 providers in May 2026
# (https://aimultiple.com/gpu-index), and the others are assumed. The peaks are those of NVIDIA's
# data sheets for dense products (L4, H100 SXM).
CPU = Device("CPU, 16 cores", 0.64, 128e9, cores=16)
L4 = Device("L4", 0.70, 64e9, num_gpus=1, bfloat16_flops=121e12, float32_flops=30e12)
H100 = Device("H100", 2.95, 256e9, num_gpus=1, bfloat16_flops=989e12, float32_flops=67e12)
DEVICES = (CPU, L4, H100)

Rates = dict[str, Any]
"""Content of corpus_cost.json."""


def make_tables(rates: Rates) -> dict[str, str]:
    """Return {name of a table: Markdown}."""
    return {
        "encoding": make_encoding_table(rates),
        "exact search": make_search_table(rates),
        "approximate search": make_index_table(rates),
    }


def make_encoding_table(rates: Rates) -> str:
    """Return time and price of encoding."""
    rows = []
    for name, encoder in rates["encode"].items():
        for device in DEVICES:
            seconds = compute_encoding_seconds(rates, encoder, device)
            cells = make_cost_cells(lambda size, seconds=seconds: size * seconds, device)
            device_and_price = f"{device.name}, ${device.dollars_per_hour:.2f}/h"
            rows.append([name, device_and_price, format_number(1 / seconds), *cells])
    return make_table(["encoder", "device", "passages/s", *SIZE_NAMES], rows)


def compute_encoding_seconds(rates: Rates, encoder: Rates, device: Device) -> float:
    """Return seconds per passage on a device; ``encoder`` is an entry of ``rates["encode"]``."""
    if device.num_gpus == 0:
        return 1 / (encoder["passages_per_core_second"] * device.cores)
    num_tokens = encoder["tokens_per_passage"]
    hidden_size = encoder["hidden_size"]
    # Products of a layer per token: 12 h^2 weights (attention 4, feed-forward 8) with two
    # operations each, and the scores and sums of attention over all tokens.
    flops_per_token = 24 * hidden_size**2 + 4 * num_tokens * hidden_size
    flops = encoder["num_layers"] * num_tokens * flops_per_token
    gpu_seconds = flops / (GPU_UTILISATION * device.bfloat16_flops)
    tokenize_rate = rates["tokenize"]["passages_per_core_second"] * GPU_HOST_CORES
    return (gpu_seconds + 1 / tokenize_rate) / device.num_gpus


def make_search_table(rates: Rates) -> str:
    """Return time and price of the exact search of all queries."""
    rows = []
    for device in (CPU, H100):
        for dtype in rates["scan"]:

            def compute_seconds(size: int, device: Device = device, dtype: str = dtype) -> float:
                return compute_search_seconds(rates, device, dtype, size)

            rows.append([device.name, dtype, *make_cost_cells(compute_seconds, device)])
    return make_table(["device", "store", *SIZE_NAMES], rows)


def compute_search_seconds(rates: Rates, device: Device, dtype: str, num_rows: int) -> float:
    """Return seconds of an exact search of `NUM_QUERIES` queries.

    On a CPU, the rows are decoded in one thread, and the products run on all cores. Rows are copied
    to a GPU as they are stored. A store that does not fit the memory is read from the disk.
    """
    scan = rates["scan"][dtype]
    if device.num_gpus == 0:
        scoring = NUM_QUERIES * scan["seconds_per_row_and_query"] / device.cores
        seconds_per_row = scan["seconds_per_row"] + scoring
    else:
        copying = scan["bytes_per_row"] / COPY_BYTES_PER_SECOND
        flops = 2 * rates["dimension"] * NUM_QUERIES
        product = flops / (GPU_SEARCH_UTILISATION * device.float32_flops)
        seconds_per_row = (copying + product) / device.num_gpus
    reading = 0.0
    if num_rows * scan["bytes_per_row"] > device.memory_bytes:
        reading = scan["bytes_per_row"] / DISK_BYTES_PER_SECOND
    return num_rows * (seconds_per_row + reading)


def make_index_table(rates: Rates) -> str:
    """Return lists, memory, time of building and time of searching an IVF,PQ index on the CPU."""
    lists = []
    memory = []
    for size in SIZES:
        lists.append(f"`IVF{count_lists(size)},{PQ_FACTORY}`")
        memory.append(format_bytes(size * (PQ_BYTES + BYTES_PER_PQ_ID)))
    build_cells = make_cost_cells(lambda size: compute_build_seconds(rates, size), CPU)
    search_cells = make_cost_cells(lambda size: compute_probe_seconds(rates, size), CPU)
    rows = [
        ["`--index`", *lists],
        ["memory", *memory],
        ["build", *build_cells],
        [f"search {NUM_QUERIES:,} queries", *search_cells],
    ]
    return make_table(["", *SIZE_NAMES], rows)


def count_lists(num_rows: int) -> int:
    """Return the power of two that is nearest to 4 sqrt(N), FAISS's smallest number of lists."""
    return 2 ** round(math.log2(4 * math.sqrt(num_rows)))


def compute_build_seconds(rates: Rates, num_rows: int) -> float:
    """Return seconds of training the lists and of assigning every row to a list."""
    num_lists = count_lists(num_rows)
    num_training_rows = min(num_rows, TRAINING_ROWS_PER_LIST * num_lists)
    num_comparisons = (TRAINING_ITERATIONS * num_training_rows + num_rows) * num_lists
    return num_comparisons * rates["scan"]["float32"]["seconds_per_row_and_query"] / CPU.cores


def compute_probe_seconds(rates: Rates, num_rows: int) -> float:
    """Return seconds of comparing queries with all centroids and with the codes of some lists."""
    num_lists = count_lists(num_rows)
    seconds_per_centroid = rates["scan"]["float32"]["seconds_per_row_and_query"]
    num_codes = num_rows * NUM_LISTS_PROBED / num_lists
    seconds = num_lists * seconds_per_centroid + num_codes / rates["pq"]["codes_per_core_second"]
    return NUM_QUERIES * seconds / CPU.cores


def make_cost_cells(compute_seconds: Callable[[int], float], device: Device) -> list[str]:
    """Return "time, price" for each of `SIZES`; a price below a cent is left out."""
    cells = []
    for size in SIZES:
        seconds = compute_seconds(size)
        dollars = seconds / 3600 * device.dollars_per_hour
        cell = format_duration(seconds)
        cells.append(cell if dollars < 0.01 else f"{cell}, {format_dollars(dollars)}")
    return cells


def format_dollars(dollars: float) -> str:
    """Return an amount with two significant digits, such as "$0.34"."""
    if dollars < 10:
        return f"${dollars:.2f}"
    return f"${format_number(dollars)}"
