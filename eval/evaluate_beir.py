"""Evaluate a retriever on BEIR with FAISS, on GPUs where there are any.

    python eval/evaluate_beir.py runs/mine --data scifact nfcorpus --output runs/mine/beir
    python eval/evaluate_beir.py runs/mine --data beir --gpus 4 --output runs/mine/beir
    python eval/evaluate_beir.py runs/mine --data scifact --index HNSW32 --gpus 0 --output cpu

The output folder gets NAME.json and NAME.trec of each set, and the tables of all sets as table.md
and table.json. A set whose record is there already is not evaluated again if model, data and
settings are the same: start the command again after a kill.

Each GPU encodes a part of the texts. FAISS searches exactly ("Flat") on all GPUs if faiss-gpu is
installed; every other index string is built and searched on the CPU. The tables say where FAISS
has searched, and how long every stage took.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from contaccum import DualEncoder
from contaccum.errors import ConfigError, UserError
from contaccum.evaluation.beir_sets import (
    EvaluationSet,
    describe_data,
    evaluate_beir,
    evaluation_sets,
    load_data,
    plan_search,
)
from contaccum.evaluation.metrics import check_k_values, check_metrics, metric_names
from contaccum.evaluation.results import agrees, read_result, write_result
from contaccum.evaluation.tables import markdown_table, mean_metrics, sets_table, table_rows

STAGES = ("encode_queries", "encode_corpus", "index", "search")


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
    add("--gpus", type=int, help="use so many GPUs, 0: the CPU; default: all that are visible")
    add("--batch_size", type=int, default=32, help="texts encoded at once, on each GPU")
    add("--precision", choices=("float32", "bfloat16", "float16"), default="float32")
    add("--similarity", choices=("cos", "dot"), help="default: the model's own")
    add("--metrics", nargs="+", help="shown in the tables; all are recorded")
    add("--k_values", nargs="+", type=int, default=[1, 3, 5, 10, 20, 100, 1000])
    return parser.parse_args()


def select_gpus(num_gpus: int | None) -> int:
    """Show torch and FAISS the first ``num_gpus`` GPUs, None: all; return their number.

    Call it before CUDA is used: CUDA reads the variable once.
    """
    num_available = torch.cuda.device_count()
    if num_gpus is None:
        return num_available
    if not 0 <= num_gpus <= num_available:
        mend = "lower it, or leave it out to use what is there"
        raise ConfigError(f"--gpus {num_gpus}: {num_available} GPUs are visible; {mend}")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(number) for number in range(num_available)]
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names[:num_gpus])
    return num_gpus


@contextmanager
def encode_on_devices(model: DualEncoder, devices: Sequence[str]) -> Iterator[None]:
    """Let a model encode in one process per device, if there are several devices."""
    if len(devices) < 2:
        yield
        return
    pool = model.start_multi_process_pool(list(devices))
    model.encode_query = partial(model.encode_query, pool=pool)
    model.encode_document = partial(model.encode_document, pool=pool)
    try:
        yield
    finally:
        del model.encode_query, model.encode_document  # the methods of the class come back
        model.stop_multi_process_pool(pool)


def read_finished(path: Path, plan: Mapping[str, Any], k_values: Sequence[int]) -> Any:
    """Return the record of a set that was evaluated in the same way, None if there is none."""
    if not path.exists():
        return None
    record = read_result(path)
    if set(record["metrics"]) != set(metric_names(k_values)):
        return None
    return record if agrees(record, plan) else None


def evaluate_sets(
    model: DualEncoder,
    sets: Sequence[EvaluationSet],
    args: argparse.Namespace,
) -> list[dict[str, Any]]:
    """Evaluate on each set; return the records, in the order of the sets."""
    search_settings = {
        "index": args.index,
        "index_parameters": args.index_parameters,
        "batch_size": args.batch_size,
        "similarity": args.similarity,
        "precision": args.precision,
    }
    # All sets are read before the first is encoded, so that a broken one shows at once. They are
    # read again one by one: the larger ones do not fit in memory together.
    described = [describe_data(load_data(one.source, args.split)) for one in sets]
    deepest = max(args.k_values)
    plans = []
    for data in described:
        plans.append(plan_search(model, data["documents"], deepest, **search_settings))
    records = []
    for one, data, plan in zip(sets, described, plans, strict=True):
        record = read_finished(one.output, {**plan, "data": data}, args.k_values)
        if record is None:
            result = evaluate_beir(
                model,
                load_data(one.source, args.split),
                k_values=args.k_values,
                model_name=args.model,
                **search_settings,
            )
            write_result(result, one.output)
            record = result.record()
        else:
            print(f"kept: {one.output} (same model, data and settings)")
        records.append(record)
    return records


def timing_rows(
    sets: Sequence[EvaluationSet],
    records: Sequence[Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """Return for each set the seconds of every stage and where FAISS has searched."""
    rows = []
    for one, record in zip(sets, records, strict=True):
        row = {"data": one.label, "documents": record["data"]["documents"]}
        for stage in STAGES:
            row[f"{stage}_seconds"] = record["timing"][f"{stage}_seconds"]
        row["search_gpus"] = record["search"]["gpus"]
        row["recall"] = record["search"].get("recall")  # None of an exact index
        rows.append(row)
    return rows


def timing_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Lay out `timing_rows` as markdown."""
    header = ["data", "documents", *(f"{stage}, s" for stage in STAGES), "FAISS on", "recall"]
    cells = []
    for row in rows:
        seconds = [f"{row[f'{stage}_seconds']:.1f}" for stage in STAGES]
        where = f"{row['search_gpus']} GPUs" if row["search_gpus"] else "CPU"
        recall = "exact"
        if row["recall"] is not None:
            shares = {name: share for name, share in row["recall"].items() if name != "queries"}
            recall = ", ".join(f"{name} {share:.3f}" for name, share in shares.items())
        cells.append([row["data"], row["documents"], *seconds, where, recall])
    return markdown_table(header, cells)


def write_tables(
    args: argparse.Namespace,
    devices: Sequence[str],
    sets: Sequence[EvaluationSet],
    records: Sequence[Mapping[str, Any]],
) -> str:
    """Write table.md and table.json into the output folder; return the text of the first."""
    rows = table_rows(sets, records)
    timing = timing_rows(sets, records)
    command = shlex.join(["python", *sys.argv])
    content = {
        "command": command,
        "model": records[0]["model"],
        "index": args.index,
        "index_parameters": args.index_parameters,
        "precision": args.precision,
        "devices": list(devices),
        "sets": rows,
        "mean": mean_metrics(rows),
        "timing": timing,
        "versions": records[0]["versions"],
        "git_commit": records[0]["git_commit"],
    }
    (args.output / "table.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    text = f"{sets_table(rows, args.metrics)}\n\n{timing_table(timing)}\n"
    page = f"# {args.model} on BEIR\n\n`{command}`\n\n{text}"
    (args.output / "table.md").write_text(page, encoding="utf-8")
    return text


def main() -> None:
    """Evaluate a model on all sets and write the tables."""
    args = parse_arguments()
    num_gpus = select_gpus(args.gpus)
    devices = [f"cuda:{number}" for number in range(num_gpus)] or ["cpu"]
    args.k_values = check_k_values(args.k_values)
    args.metrics = check_metrics(args.metrics, args.k_values)
    if len(devices) > 1 and args.precision != "float32":
        # Autocast holds in one process, and each GPU has a process of its own.
        raise ConfigError(f"--precision {args.precision} needs one GPU: set --gpus 1, or drop it")
    args.output.mkdir(parents=True, exist_ok=True)
    sets = []
    for one in evaluation_sets(args.data, args.output / "set.json"):
        file = args.output / f"{one.label.replace('/', '-')}.json"
        sets.append(one._replace(output=file))

    model = DualEncoder.from_pretrained(args.model, device=devices[0])
    with encode_on_devices(model, devices):
        records = evaluate_sets(model, sets, args)
    print(write_tables(args, devices, sets, records))
    print(f"written: {args.output / 'table.md'} and {args.output / 'table.json'}")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        print(f"evaluate_beir.py: error: {error}", file=sys.stderr)
        sys.exit(2)
