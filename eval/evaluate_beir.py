"""Evaluate a retriever on BEIR with FAISS, on GPUs if there are any.

    python eval/evaluate_beir.py runs/mine --data scifact nfcorpus --output runs/mine/beir
    python eval/evaluate_beir.py runs/mine --data beir --gpus 4 --output runs/mine/beir
    python eval/evaluate_beir.py runs/mine --data scifact --index HNSW32 --gpus 0 --output cpu

The program writes NAME.json and NAME.trec for each data set into the output folder, and tables of
all sets as table.md and table.json. A set that has a result in this folder is skipped if model,
data and settings are the same. So after an interruption, start the same command again.

Each GPU encodes a part of the texts, and exact search (index "Flat") runs on all GPUs. With
faiss-gpu, so do inverted files; all other indexes are built and searched on the CPU. The record of
a set contains the number of GPUs of its search and, for an approximate index, its recall.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from contaccum import DualEncoder
from contaccum.errors import ConfigError, UserError
from contaccum.evaluation.beir import evaluate_once, evaluation_sets, load_data
from contaccum.evaluation.metrics import check_metrics, get_k_values
from contaccum.evaluation.results import make_table, sets_table


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("model", help="a SentenceTransformer: a folder, or a name on the hub")
    add("--data", nargs="+", required=True, help="BEIR folders, names of public sets, or beir")
    add("--split", help="default: test, and dev for msmarco")
    add("--output", type=Path, required=True, help="a folder")
    add("--index", default="Flat", help="FAISS factory string; Flat is exact")
    add("--index_parameters", help="FAISS search parameters, such as nprobe=32")
    add("--gpus", type=int, help="number of GPUs; 0: use the CPU; default: all visible GPUs")
    add("--batch_size", type=int, default=32, help="texts per batch, on each GPU")
    add("--precision", choices=("float32", "bfloat16", "float16"), default="float32")
    add("--similarity", choices=("cos", "dot"), help="default: the model's own")
    add("--metrics", nargs="+", help="metrics in table.md; the json files contain more metrics")
    return parser.parse_args()


def select_gpus(num_gpus: int | None) -> int:
    """Make only the first ``num_gpus`` GPUs visible to torch and FAISS; return their number.

    This function sets CUDA_VISIBLE_DEVICES. CUDA reads this variable only once, so call the
    function before CUDA is used.

    Args:
        num_gpus: number of GPUs to use; None: all visible GPUs.
    """
    num_available = torch.cuda.device_count()
    if num_gpus is None:
        return num_available
    if not 0 <= num_gpus <= num_available:
        raise ConfigError(
            f"--gpus {num_gpus}: {num_available} GPUs are visible; "
            f"set a number from 0 to {num_available}, or remove --gpus to use all visible GPUs"
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible:
        gpu_ids = visible.split(",")
    else:
        gpu_ids = [str(number) for number in range(num_available)]
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpu_ids[:num_gpus])
    return num_gpus


@contextmanager
def encode_on_devices(
    model: DualEncoder, devices: Sequence[str], batch_size: int
) -> Iterator[None]:
    """Make the model encode in one process per device while the context is open.

    With a single device, nothing changes.

    Args:
        batch_size: number of texts per batch, on each device.
    """
    if len(devices) < 2:
        yield
        return
    pool = model.start_multi_process_pool(list(devices))
    model.encode_query = _use_pool(model.encode_query, pool, batch_size)
    model.encode_document = _use_pool(model.encode_document, pool, batch_size)
    try:
        yield
    finally:
        del model.encode_query, model.encode_document  # so that the class's methods are used again
        model.stop_multi_process_pool(pool)


def _use_pool(encode: Callable[..., Any], pool: Any, batch_size: int) -> Callable[..., Any]:
    """Return a method of the model that encodes in a pool.

    The pool has moved the model to the CPU, for which `encode_texts` asks for smaller batches.
    """

    def encode_in_pool(texts: Sequence[str], **settings: Any) -> Any:
        return encode(texts, **{**settings, "pool": pool, "batch_size": batch_size})

    return encode_in_pool


def main() -> None:
    """Evaluate a model on all sets, and write table.md and table.json into the output folder."""
    args = parse_arguments()
    num_gpus = select_gpus(args.gpus)
    devices = [f"cuda:{number}" for number in range(num_gpus)] or ["cpu"]
    metrics = check_metrics(args.metrics)
    if len(devices) > 1 and args.precision != "float32":
        # Several GPUs are used by several processes, and autocast does not reach other processes.
        raise ConfigError(
            f"--precision {args.precision} works with one GPU only; "
            "set --gpus 1 or remove --precision"
        )
    args.output.mkdir(parents=True, exist_ok=True)
    model = DualEncoder.from_pretrained(args.model, device=devices[0])
    files = {}
    records = {}
    with encode_on_devices(model, devices, args.batch_size):
        for label, source in evaluation_sets(args.data).items():
            files[label] = args.output / f"{label.replace('/', '-')}.json"
            records[label] = evaluate_once(
                model,
                load_data(source, args.split),
                files[label],
                get_k_values(metrics),
                args.model,
                index=args.index,
                index_parameters=args.index_parameters,
                batch_size=args.batch_size,
                similarity=args.similarity,
                precision=args.precision,
            )
    command = shlex.join(["python", *sys.argv])
    table = make_table(files, records, metrics)
    content = {"command": command, "devices": devices, **table}
    (args.output / "table.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    text = f"{sets_table(table)}\n"
    page = f"# {args.model} on BEIR\n\n`{command}`\n\n{text}"
    (args.output / "table.md").write_text(page, encoding="utf-8")
    print(text)
    print(f"written: {args.output / 'table.md'} and {args.output / 'table.json'}")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        print(f"evaluate_beir.py: error: {error}", file=sys.stderr)
        sys.exit(2)
