"""Reproduce the ContAccum paper's Table 1, or cells of it: download, train, encode, search and score by its recipes.

    python scripts/reproduce_table1.py --datasets nq --memory 11gb --methods grad_accum contaccum --dry-run

Every step is a `contaccum` command in a process of its own, printed as it is run, and is done once: a reproduction that
was cut off goes on where it was. Options that --help does not list are those of `contaccum train`. See docs/paper.md.
"""

from __future__ import annotations

import argparse
import itertools
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.request import urlopen

from contaccum.data.public_sets import resolve_beir_data
from contaccum.errors import ConfigError, DataError, UserError
from contaccum.files import atomic_file, cache_folder, read_json, write_text
from contaccum.training.config import parse

TABLE: dict[str, Any] = read_json(Path(__file__).with_name("table1.json"))
RECIPES = Path(__file__).resolve().parents[1] / "configs" / "paper"
METHODS = ("in_batch", "grad_accum", "grad_cache", "contaccum")
PAIRS = {"11gb": 8, "24gb": 32, "80gb": 128}  # that memory holds at once
TOP_K = "100"


class Step(NamedTuple):
    """`contaccum COMMAND`, or `download URL`; ``mark`` is a file that is there once the step is done."""

    name: str
    command: list[str]
    mark: Path

    @property
    def line(self) -> str:
        """The step as a command line."""
        return ("" if self.command[0] == "download" else "contaccum ") + shlex.join(self.command)


def main(argv: Sequence[str] | None = None) -> int:
    """Do every step, or with --dry-run print it; returns the exit code."""
    try:
        args, train_options = _parse(argv)
        cells = itertools.product(args.datasets, args.memory, args.methods)
        plans = {cell: plan(*cell, args, train_options) for cell in cells}
        if args.dry_run:
            for step in {
                step.mark: step for steps in plans.values() for step in steps
            }.values():  # runs share data
                print(step.line)
            return 0
        for cell, steps in plans.items():
            for step in steps:
                do(step)
            shutil.rmtree(
                args.output_dir.joinpath(*cell, "passages"), ignore_errors=True
            )  # 32 GB of Wikipedia
        page = table(list(plans), args.output_dir)
        write_text(args.output_dir / "table1.md", page)
        print(f"{page}\nwritten: {args.output_dir / 'table1.md'}")
        return 0
    except UserError as error:
        print(f"reproduce_table1: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def plan(
    dataset: str, memory: str, method: str, args: argparse.Namespace, train_options: Sequence[str]
) -> list[Step]:
    """The steps of one run; raises `ConfigError` for options that `contaccum train` does not take."""
    about, cell = TABLE["datasets"][dataset], f"{dataset}/{memory}/{method}"
    steps, train_data, passages, queries = _data(about, args)
    folder = args.output_dir / dataset / memory / method
    model, store, found, scores = (
        str(folder / x) for x in ("model", "passages", "run.trec", "scores.json")
    )

    train = [
        "train",
        str(RECIPES / f"{dataset}.yaml"),
        "--train_data",
        train_data,
        "--output_dir",
        model,
    ]
    train += ["--per_device_train_batch_size", str(PAIRS[memory])]
    train += (
        ["--method", method, "--bank_size", "0"] if method != "contaccum" else []
    )  # which the recipes are for
    train += ["--total_train_batch_size", str(PAIRS[memory])] if method == "in_batch" else []
    train += train_options
    parse(train[1:])
    encoding = ["--batch_size", str(args.batch_size), "--precision", args.precision]
    search = [
        "search",
        model,
        "--store",
        store,
        "--queries",
        queries,
        "--output",
        found,
        "--top_k",
        TOP_K,
        *encoding,
    ]
    if "split" in about:
        search += ["--split", about["split"]]
        score = [
            "evaluate",
            "--run",
            found,
            "--data",
            passages,
            "--split",
            about["split"],
            "--k_values",
            "10",
        ]
    else:
        score = [
            "open_qa",
            "--run",
            found,
            "--questions",
            queries,
            "--passages",
            passages,
            "--match",
            about["match"],
        ]
        score += ["--k_values", "1", "5"]
    commands = {
        "train": [*train, "--resume_from_checkpoint", "auto"],
        "encode": [
            "encode",
            model,
            "--corpus",
            passages,
            "--output",
            store,
            "--dtype",
            "float16",
            *encoding,
        ],
        "search": search,
        "score": [*score, "20", TOP_K, "--output", scores],
    }
    return steps + [
        Step(f"{cell}: {name}", command, folder / f"{name}.done")
        for name, command in commands.items()
    ]


def _data(about: Any, args: argparse.Namespace) -> tuple[list[Step], str, str, str]:
    """Steps that get the data; training data, corpus and test queries."""
    if "beir" not in about:
        files = [about["train"], TABLE["wikipedia"], about["test"]]
        paths = [args.data_dir / "dpr" / Path(url).name for url in files]
        fetched = [
            Step(f"download {path.name}", ["download", f"{args.files_from}/{url}"], path)
            for url, path in zip(files, paths, strict=True)
        ]
        return fetched, str(paths[0]), str(paths[1]), str(paths[2])
    name, train = about["beir"], args.data_dir / about["beir"] / "train.jsonl"
    folder = cache_folder("beir", name)
    mine = [
        "mine",
        "--method",
        "bm25",
        "--data",
        str(folder),
        "--output",
        str(train),
        "--num_negatives",
        "30",
    ]
    mine += [
        "--cross_encoder",
        "cross-encoder/ms-marco-MiniLM-L6-v2",
        "--cross_encoder_margin",
        "3",
    ]
    fetched = [Step(f"download {name}", ["download", name], folder / "corpus.jsonl")]
    mined = Step(f"mine {name}", mine, train.with_suffix(".done"))
    return [*fetched, mined], str(train), str(folder), str(folder)


def do(step: Step) -> None:
    """Do a step unless it is done; raises `UserError` where it fails, after which the next start goes on there."""
    if step.mark.exists():
        if step.command[0] != "download" and step.mark.read_text(encoding="utf-8") != step.line:
            mend = "name another --output_dir, or remove the folder"
            raise ConfigError(f"{step.mark}: {step.name} was done with other settings; {mend}")
        print(f"{step.name} is done")
        return
    print(f"{step.name}\n$ {step.line}", flush=True)
    if step.command[0] == "download":
        fetch(step.command[1], step.mark)
        return
    step.mark.parent.mkdir(parents=True, exist_ok=True)
    if code := call(step.command):
        raise UserError(
            f"{step.name} ended with exit code {code}; mend that, and the next start goes on from there"
        )
    write_text(step.mark, step.line)


def call(command: Sequence[str]) -> int:
    """`contaccum COMMAND` in a process of its own, whose memory is free afterwards; returns its exit code."""
    return subprocess.run([sys.executable, "-m", "contaccum.cli", *command]).returncode


def fetch(url: str, path: Path) -> None:
    """Fetch a file, whole or not at all, or the BEIR set that is called ``url``; raises `DataError`."""
    if "://" not in url:
        resolve_beir_data(url, "dev")
        return
    try:
        with atomic_file(path) as part, urlopen(url, timeout=60) as answer, part.open("wb") as file:
            shutil.copyfileobj(answer, file, 1 << 20)
            total = int(answer.headers.get("Content-Length", file.tell()))
            if file.tell() != total:
                raise OSError(f"{file.tell():,} of {total:,} bytes came")
    except OSError as error:
        raise DataError(f"{path}: could not be fetched from {url}: {error}; start again") from error


def table(cells: Sequence[tuple[str, str, str]], folder: Path) -> str:
    """Our figures, a line a run, and below those of each data set the published ones, in Markdown."""
    lines = ["| data | memory | method | figures | source |", "|---|---|---|---|---|"]
    for dataset, of_dataset in itertools.groupby(cells, key=lambda cell: cell[0]):
        about = TABLE["datasets"][dataset]
        rows = []
        for cell in of_dataset:
            scores = read_json(folder.joinpath(*cell, "scores.json"))["metrics"]
            metrics = {name: scores[name] for name in about["metrics"]}
            rows.append({"memory": cell[1], "model": cell[2], "metrics": metrics, "source": "here"})
        for row in rows + about["published"]:
            figures = ", ".join(
                f"{name} {100 * value:.1f}" for name, value in row["metrics"].items()
            )
            lines.append(
                f"| {about['title']} | {row['memory']} | {row['model']} | {figures} | {row['source']} |"
            )
    return "\n".join([*lines, ""])


def _parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0], allow_abbrev=False
    )
    add, datasets = parser.add_argument, list(TABLE["datasets"])
    add("--datasets", nargs="+", choices=datasets, default=datasets)
    add("--memory", nargs="+", choices=tuple(PAIRS), default=["11gb"], help="default: 11gb")
    add("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    add("--dry-run", action="store_true", help="print the steps, and do nothing")
    add("--data_dir", type=Path, default=Path("data"), metavar="DIR")
    add("--output_dir", type=Path, default=Path("runs/paper"), metavar="DIR")
    add(
        "--files_from",
        default="https://dl.fbaipublicfiles.com/dpr",
        metavar="URL",
        help="a mirror of DPR's files",
    )
    add(
        "--precision",
        choices=("float32", "bfloat16", "float16"),
        default="float32",
        help="of encoding",
    )
    add("--batch_size", type=int, default=32, metavar="N", help="of encoding")
    return parser.parse_known_args(argv)


if __name__ == "__main__":
    sys.exit(main())
