"""Reproduce Table 1 of the ContAccum paper, or parts of it, with the paper's settings.

    python scripts/reproduce_table1.py --datasets nq --memory 11gb --methods grad_accum contaccum \\
        --dry-run

The steps of a run are: download, train, encode, search and score. Every step is a `contaccum`
command. The program prints each command and executes it in a separate process. Finished steps are
skipped, so after an interruption start the program again. Options that --help does not list are
passed on to `contaccum train`. See docs/paper.md.
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
PAIRS_PER_MICRO_BATCH = {"11gb": 8, "24gb": 32, "80gb": 128}  # as many as fit in this memory
TOP_K = "100"
DOWNLOAD_CHUNK_BYTES = 1 << 20

Cell = tuple[str, str, str]  # data set, memory and method of a run


class Step(NamedTuple):
    """A step of a run: a `contaccum` command, or `download URL`."""

    name: str
    command: list[str]
    done_file: Path  # exists once the step is done

    @property
    def is_download(self) -> bool:
        return self.command[0] == "download"

    @property
    def command_line(self) -> str:
        """The command as it is typed in a shell."""
        program = "" if self.is_download else "contaccum "
        return program + shlex.join(self.command)


class Inputs(NamedTuple):
    """The data of a run, and the steps that create it."""

    steps: list[Step]
    train_data: str
    passages: str
    queries: str


def main(argv: Sequence[str] | None = None) -> int:
    """Run every step, or print it with --dry-run; return the exit code."""
    try:
        args, train_options = parse_arguments(argv)
        plans = {}
        for cell in itertools.product(args.datasets, args.memory, args.methods):
            plans[cell] = make_plan(*cell, args, train_options)
        if args.dry_run:
            print_plans(list(plans.values()))
            return 0
        for cell, steps in plans.items():
            for step in steps:
                run_step(step)
            # The embeddings of Wikipedia take 32 GB.
            shutil.rmtree(args.output_dir.joinpath(*cell, "passages"), ignore_errors=True)
        table = format_table(list(plans), args.output_dir)
        table_file = args.output_dir / "table1.md"
        write_text(table_file, table)
        print(f"{table}\nwritten: {table_file}")
        return 0
    except UserError as error:
        message = " ".join(str(error).split())
        print(f"reproduce_table1: error: {message}", file=sys.stderr)
        return 2


def print_plans(plans: Sequence[Sequence[Step]]) -> None:
    """Print the command of every step once. Runs on the same data share the steps for this data."""
    steps = {}
    for plan in plans:
        for step in plan:
            steps[step.done_file] = step
    for step in steps.values():
        print(step.command_line)


def make_plan(
    dataset: str, memory: str, method: str, args: argparse.Namespace, train_options: Sequence[str]
) -> list[Step]:
    """Return the steps of one run.

    Raises:
        ConfigError: `contaccum train` refuses one of the ``train_options``.
    """
    entry = TABLE["datasets"][dataset]
    inputs = plan_inputs(entry, args)
    folder = args.output_dir / dataset / memory / method
    model = str(folder / "model")
    store = str(folder / "passages")
    run_file = str(folder / "run.trec")
    score_file = str(folder / "scores.json")

    train = make_train_command(dataset, memory, method, inputs.train_data, model)
    train += train_options
    parse(train[1:])  # checks the options before the first step starts
    train += ["--resume_from_checkpoint", "auto"]
    encoding = ["--batch_size", str(args.batch_size), "--precision", args.precision]
    encode = ["encode", model, "--corpus", inputs.passages, "--output", store]
    encode += ["--dtype", "float16", *encoding]
    search = ["search", model, "--store", store, "--queries", inputs.queries]
    search += ["--output", run_file, "--top_k", TOP_K, *encoding]
    if "split" in entry:
        search += ["--split", entry["split"]]
        score = ["evaluate", "--run", run_file, "--data", inputs.passages]
        score += ["--split", entry["split"], "--k_values", "10"]
    else:
        score = ["open_qa", "--run", run_file, "--questions", inputs.queries]
        score += ["--passages", inputs.passages, "--match", entry["match"]]
        score += ["--k_values", "1", "5"]
    score += ["20", TOP_K, "--output", score_file]

    commands = {"train": train, "encode": encode, "search": search, "score": score}
    steps = list(inputs.steps)
    for name, command in commands.items():
        step_name = f"{dataset}/{memory}/{method}: {name}"
        steps.append(Step(step_name, command, folder / f"{name}.done"))
    return steps


def make_train_command(
    dataset: str, memory: str, method: str, train_data: str, output_dir: str
) -> list[str]:
    """Return the `contaccum train` command of a run. The recipes are written for `contaccum`."""
    num_pairs = str(PAIRS_PER_MICRO_BATCH[memory])
    command = ["train", str(RECIPES / f"{dataset}.yaml"), "--train_data", train_data]
    command += ["--output_dir", output_dir, "--per_device_train_batch_size", num_pairs]
    if method != "contaccum":
        command += ["--method", method, "--bank_size", "0"]
    if method == "in_batch":
        command += ["--total_train_batch_size", num_pairs]
    return command


def plan_inputs(entry: dict[str, Any], args: argparse.Namespace) -> Inputs:
    """Return the data of a table entry, and the steps that download or mine it."""
    if "beir" in entry:
        return plan_beir_inputs(entry["beir"], args)
    steps = []
    paths = []
    for url in (entry["train"], TABLE["wikipedia"], entry["test"]):
        path = args.data_dir / "dpr" / Path(url).name
        paths.append(str(path))
        command = ["download", f"{args.files_from}/{url}"]
        steps.append(Step(f"download {path.name}", command, path))
    train_data, passages, queries = paths
    return Inputs(steps, train_data, passages, queries)


def plan_beir_inputs(name: str, args: argparse.Namespace) -> Inputs:
    """Return the data of a BEIR set. Its training pairs get hard negatives mined with BM25."""
    train_file = args.data_dir / name / "train.jsonl"
    folder = cache_folder("beir", name)
    mine = ["mine", "--method", "bm25", "--data", str(folder), "--output", str(train_file)]
    mine += ["--num_negatives", "30", "--cross_encoder", "cross-encoder/ms-marco-MiniLM-L6-v2"]
    mine += ["--cross_encoder_margin", "3"]
    steps = [
        Step(f"download {name}", ["download", name], folder / "corpus.jsonl"),
        Step(f"mine {name}", mine, train_file.with_suffix(".done")),
    ]
    return Inputs(steps, str(train_file), str(folder), str(folder))


def run_step(step: Step) -> None:
    """Run a step, unless it is done already.

    Raises:
        UserError: the step failed, or it was done with other settings.
    """
    if step.done_file.exists():
        if not step.is_download:
            finished_command = step.done_file.read_text(encoding="utf-8")
            if finished_command != step.command_line:
                raise ConfigError(
                    f"{step.done_file}: {step.name} was done with other settings; "
                    "choose another --output_dir, or remove this folder"
                )
        print(f"{step.name} is done")
        return
    print(f"{step.name}\n$ {step.command_line}", flush=True)
    if step.is_download:
        download(step.command[1], step.done_file)
        return
    step.done_file.parent.mkdir(parents=True, exist_ok=True)
    exit_code = run_command(step.command)
    if exit_code != 0:
        raise UserError(
            f"{step.name} ended with exit code {exit_code}; correct the error above and start the "
            "program again: it continues with this step"
        )
    write_text(step.done_file, step.command_line)


def run_command(command: Sequence[str]) -> int:
    """Run a `contaccum` command in a separate process, so that its memory is freed at the end."""
    return subprocess.run([sys.executable, "-m", "contaccum.cli", *command]).returncode


def download(url: str, path: Path) -> None:
    """Download a file to ``path``, or a BEIR set if ``url`` is the name of one.

    Raises:
        DataError: the download failed. In this case there is no file at ``path``.
    """
    if "://" not in url:
        resolve_beir_data(url, "dev")
        return
    try:
        with (
            atomic_file(path) as partial,
            urlopen(url, timeout=60) as response,
            partial.open("wb") as file,
        ):
            shutil.copyfileobj(response, file, DOWNLOAD_CHUNK_BYTES)
            num_bytes = file.tell()
            expected_bytes = int(response.headers.get("Content-Length", num_bytes))
            if num_bytes != expected_bytes:
                raise OSError(f"received {num_bytes:,} of {expected_bytes:,} bytes")
    except OSError as error:
        raise DataError(
            f"{path}: the download from {url} failed: {error}; start the program again"
        ) from error


def format_table(cells: Sequence[Cell], folder: Path) -> str:
    """Format a Markdown table of all runs, with the published scores of each data set."""
    lines = ["| data | memory | method | figures | source |", "|---|---|---|---|---|"]
    for dataset, dataset_cells in itertools.groupby(cells, key=lambda cell: cell[0]):
        entry = TABLE["datasets"][dataset]
        rows = []
        for cell in dataset_cells:
            scores = read_json(folder.joinpath(*cell, "scores.json"))["metrics"]
            metrics = {name: scores[name] for name in entry["metrics"]}
            _, memory, method = cell
            rows.append({"memory": memory, "model": method, "metrics": metrics, "source": "here"})
        rows.extend(entry["published"])
        for row in rows:
            figures = [f"{name} {100 * value:.1f}" for name, value in row["metrics"].items()]
            columns = [entry["title"], row["memory"], row["model"], ", ".join(figures)]
            lines.append(f"| {' | '.join(columns)} | {row['source']} |")
    return "\n".join([*lines, ""])


def parse_arguments(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Read the command line; return this program's options and the options of `contaccum train`."""
    description = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False)
    add = parser.add_argument
    datasets = list(TABLE["datasets"])
    memory_sizes = tuple(PAIRS_PER_MICRO_BATCH)
    add("--datasets", nargs="+", choices=datasets, default=datasets)
    add("--memory", nargs="+", choices=memory_sizes, default=["11gb"], help="default: 11gb")
    add("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    add("--dry-run", action="store_true", help="print the commands and run nothing")
    add("--data_dir", type=Path, default=Path("data"), metavar="DIR")
    add("--output_dir", type=Path, default=Path("runs/paper"), metavar="DIR")
    add(
        "--files_from",
        default="https://dl.fbaipublicfiles.com/dpr",
        metavar="URL",
        help="address of DPR's files, or of a mirror",
    )
    add(
        "--precision",
        choices=("float32", "bfloat16", "float16"),
        default="float32",
        help="precision of the encoder in encode and search",
    )
    add("--batch_size", type=int, default=32, metavar="N", help="texts per batch in encode, search")
    return parser.parse_known_args(argv)


if __name__ == "__main__":
    sys.exit(main())
