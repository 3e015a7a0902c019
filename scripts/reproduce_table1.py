"""Reproduce the ContAccum paper's Table 1, or cells of it: download, train, encode, search and score by its recipes.

    python scripts/reproduce_table1.py --datasets nq --memory 11gb --methods grad_accum contaccum --dry-run

Every step is a `contaccum` command in a process of its own, printed as it is run, and is done once: a reproduction that
was cut off goes on where it was. Options that --help does not list are those of `contaccum train`. See docs/paper.md.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import itertools
import shlex
import shutil
import subprocess
import sys
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from contaccum.errors import ConfigError, DataError, UserError
from contaccum.files import cache_folder, read_json, write_json, write_text

TABLE: dict[str, Any] = read_json(Path(__file__).with_name("table1.json"))
METHODS = ("in_batch", "grad_accum", "grad_cache", "contaccum")
TOP_K = "100"

# For estimates alone: tokens of a question, and the share of bare matrix products' speed that BERT-base comes to.
QUESTION_TOKENS, UTILISATION = 14, 0.4


@dataclass(frozen=True)
class Step:
    """`contaccum COMMAND`, or a download where ``url`` is given.

    What runs share is done when ``output`` is there; a step of one run when ``mark`` is, which holds its settings.
    """

    name: str
    output: Path
    command: tuple[str, ...] = ()
    url: str = ""
    flop: float = 0.0  # a guess, as are gigabytes
    gigabytes: float = 0.0
    temporary: bool = False  # goes once its run is scored
    mark: Path | None = None
    settings: dict[str, Any] = field(default_factory=dict)

    def is_done(self) -> bool:
        if self.mark is None or not self.mark.exists():
            return self.mark is None and self.output.exists()
        if read_json(self.mark) != self.settings:
            mend = "name another --output_dir, or remove the folder"
            raise ConfigError(f"{self.mark}: {self.name} was done with other settings; {mend}")
        return True


Steps = tuple[Step, ...]
"""Of one run, a data set, a size of memory and a method: one figure of the table for each metric."""


def main(argv: Sequence[str] | None = None) -> int:
    """Plan, print, and unless --dry-run is given do every step; returns the exit code."""
    try:
        args, train_options = _parse(argv)
        cells = itertools.product(args.datasets, args.memory, args.methods)
        runs = {cell: plan(*cell, args, train_options) for cell in cells}
        print(shown_plan(runs, args))
        if args.dry_run:
            return 0
        for steps in runs.values():
            for step in steps:
                do(step)
            for step in steps:
                if step.temporary:
                    shutil.rmtree(step.output, ignore_errors=True)
        found = results(runs)
        page = shown_results(found)
        write_text(args.output_dir / "table1.md", page)
        write_json(args.output_dir / "table1.json", found)
        print(f"{page}\nwritten: {args.output_dir / 'table1.md'} {args.output_dir / 'table1.json'}")
        return 0
    except UserError as error:
        print(f"reproduce_table1: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def plan(dataset: str, memory: str, method: str, args: argparse.Namespace, train_options: Sequence[str]) -> Steps:
    """The steps of one run; raises `ConfigError` where there is no recipe, or it does not take the training options."""
    from contaccum.training.config import parse

    recipe = args.configs / dataset / memory / f"{method}.yaml"
    if not recipe.is_file():
        raise ConfigError(f"{recipe}: no such recipe (--configs names the folder with the paper's recipes)")
    about, encoder = TABLE["datasets"][dataset], TABLE["encoder"]
    corpus = TABLE["corpora"][about["corpus"]]
    data, train_data, passages, queries = _data(about, corpus, args)
    folder = args.output_dir / dataset / memory / method
    model, store, found, scores = (folder / x for x in ("model", "passages", "run.trec", "scores.json"))

    train = ["train", str(recipe), "--train_data", str(train_data), "--output_dir", str(model), *train_options]
    _, _, arguments = parse(train[1:])
    train += ["--resume_from_checkpoint", "auto"]
    encoding = ["--batch_size", str(args.batch_size), "--precision", args.precision, *args.on_device]
    encode = ["encode", str(model), "--corpus", str(passages), "--output", str(store), "--dtype", "float16", *encoding]
    search = ["search", str(model), "--store", str(store), "--queries", str(queries), "--output", str(found)]
    search += ["--top_k", TOP_K, "--index", args.index, *encoding]
    if "split" in about:
        search += ["--split", about["split"]]
        score = ["evaluate", "--run", str(found), "--data", str(passages), "--split", about["split"]]
        score += ["--k_values", "10", "20", TOP_K, "--output", str(scores)]
    else:
        score = ["open_qa", "--run", str(found), "--questions", str(queries), "--passages", str(passages)]
        score += ["--match", about["match"], "--k_values", "1", "5", "20", TOP_K, "--output", str(scores)]

    # Guesses: backward is twice a forward, and grad_cache encodes twice; a checkpoint has weights and two moments.
    updates = arguments.max_steps * (arguments.total_train_batch_size or 1)
    pairs = updates if updates > 0 else about["train_queries"] * arguments.num_train_epochs
    forward, tokens, rows = 2.0 * encoder["parameters_per_token"], corpus["tokens_per_passage"], corpus["passages"]
    trained = pairs * (QUESTION_TOKENS + 2 * tokens) * forward * (4 if method == "grad_cache" else 3)
    checkpoints, encoded = 7 * 2 * encoder["parameters"] * 4 / 1e9, rows * encoder["dimension"] * 2 / 1e9
    digest = hashlib.sha256(recipe.read_bytes()).hexdigest()

    def step(name: str, command: list[str], output: Path, *costs: float) -> Step:
        settings = {"command": command, "recipe": digest}
        about = {"temporary": name == "encode" and not args.keep_embeddings, "settings": settings}
        title, mark = f"{dataset}/{memory}/{method}: {name}", folder / f"{name}.done.json"
        return Step(title, output, tuple(command), "", *costs, mark=mark, **about)

    steps = (
        step("train", train, model, trained, checkpoints),
        step("encode", encode, store, forward * rows * tokens, encoded),
        step("search", search, found),
        step("score", score, scores),
    )
    return (*data, *steps)


def _data(about: Any, corpus: Any, args: argparse.Namespace) -> tuple[list[Step], Path, Path, Path]:
    """Steps that get the data; training data, corpus and test queries."""
    if "beir" not in corpus:
        paths, downloads = [], []
        for file in (about["train"], about["test"], corpus):
            paths.append(args.data_dir / "dpr" / file["file"])
            url = f"{args.files_from}/{file['url']}"
            downloads.append(Step(f"download {file['file']}", paths[-1], url=url, gigabytes=file.get("gigabytes", 0.0)))
        return downloads, paths[0], paths[2], paths[1]
    name, train = corpus["beir"], args.data_dir / "msmarco" / about["train"]["file"]
    folder = cache_folder("beir", name)
    fetched = Step(f"download {name}", folder / "corpus.jsonl", url=name, gigabytes=corpus["unpacked_gigabytes"])
    mine = ["mine", "--method", "bm25", "--data", str(folder), "--output", str(train), "--num_negatives", "30"]
    mine += ["--cross_encoder", args.cross_encoder, "--cross_encoder_margin", "3"]
    return [fetched, Step("mine", train, (*mine, *args.on_device))], train, folder, folder


def shown_plan(runs: dict[Any, Steps], args: argparse.Namespace) -> str:
    """Every step as the command line that it is, with hours and disk."""
    speed = matmul_speed(args.device)
    lines, total, stays, passing = [], 0.0, 0.0, 0.0
    for step in {step.output: step for steps in runs.values() for step in steps}.values():  # runs share their data
        hours = 0.0 if step.is_done() else step.flop / (speed * UTILISATION) / 3600
        total += hours
        stays += 0.0 if step.temporary else step.gigabytes
        passing = max(passing, step.gigabytes if step.temporary else 0.0)  # one run's at a time
        state = "done" if step.is_done() else f"{hours:,.1f} h"
        lines.append(f"{state:>10}  {step.gigabytes:>7,.1f} GB  {step.name}")
        lines.append(f"{'':>24}{step.url or 'contaccum ' + shlex.join(step.command)}")
    folder = args.output_dir.absolute()
    free = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free / 1e9
    rate = f"{speed / 1e12:.2f} TFLOP/s in float32, of which {UTILISATION:.0%} is reached"
    lines.append(f"hours: {total:,.1f} in all, guessed from matrix products here ({rate}), and fetching and mining")
    return "\n".join([*lines, f"disk: {stays + passing:,.0f} GB at most; {free:,.0f} GB are free"])


def matmul_speed(device: str | None) -> float:
    """Floating-point operations a second of square float32 matrix products on a device."""
    import torch

    left = torch.eye(1024, device=device or ("cuda" if torch.cuda.is_available() else "cpu"))
    for _ in range(2):  # the first time is for starting up
        started = time.perf_counter()
        for _ in range(8):
            left = left @ left
        left.sum().item()  # waits for the device
    return 8 * 2 * 1024**3 / (time.perf_counter() - started)


def do(step: Step) -> None:
    """Do a step unless it is done; raises `UserError` where it fails, after which the next start goes on there."""
    print(step.name + (" is done" if step.is_done() else ""), flush=True)
    if step.is_done():
        return
    if step.url:
        fetch(step.url, step.output)
        return
    step.output.parent.mkdir(parents=True, exist_ok=True)
    print(f"$ contaccum {shlex.join(step.command)}", flush=True)
    code = call(step.command)
    if code:
        raise UserError(f"{step.name} ended with exit code {code}; mend that, and the next start goes on from there")
    if step.mark is not None:
        write_json(step.mark, step.settings)


def call(command: Sequence[str]) -> int:
    """`contaccum COMMAND` in a process of its own, whose memory is free afterwards; returns its exit code."""
    return subprocess.run([sys.executable, "-m", "contaccum.cli", *command]).returncode


def fetch(url: str, path: Path) -> None:
    """Fetch a file, going on where it broke off, or the BEIR set that is called ``url``.

    DPR's files have no published checksums: their length is checked, and a .gz is read to its end. Raises `DataError`.
    """
    if "://" not in url:
        from contaccum.data import resolve_beir_data

        resolve_beir_data(url, "dev")
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    there = part.stat().st_size if part.exists() else 0
    try:
        request = Request(url, headers={"Range": f"bytes={there}-"})
        with urlopen(request, timeout=60) as answer, part.open("ab" if answer.status == 206 else "wb") as file:
            total = file.tell() + int(answer.headers.get("Content-Length", -1))
            shutil.copyfileobj(answer, file, 1 << 20)
        if part.stat().st_size != total:
            raise OSError(f"{part.stat().st_size:,} of {total:,} bytes came")
    except OSError as error:
        if getattr(error, "code", None) == 416:  # the part is as long as the file, or longer
            part.unlink()
        raise DataError(f"{path}: could not be fetched from {url}: {error} (start again to go on)") from error
    try:
        with gzip.open(part) if path.suffix == ".gz" else part.open("rb") as content:
            while content.read(1 << 20):
                pass
    except (OSError, EOFError, zlib.error) as error:
        part.unlink()
        raise DataError(f"{path}: what came is no whole gzip file ({error}); start again") from error
    part.replace(path)


def results(runs: dict[Any, Steps]) -> list[dict[str, Any]]:
    """Our figures, one record a run, and the published ones of the same data sets."""
    found = []
    for (dataset, memory, method), steps in runs.items():
        metrics, scores = TABLE["datasets"][dataset]["metrics"], read_json(steps[-1].output)["metrics"]
        ours = {"dataset": dataset, "memory": memory, "model": method, "source": "here"}
        found.append({**ours, "metrics": {name: scores[name] for name in metrics}})
    for dataset in dict.fromkeys(dataset for dataset, _, _ in runs):
        published = TABLE["datasets"][dataset]["published"]
        found += [{"dataset": dataset, **one, "source": TABLE["sources"][one["source"]]} for one in published]
    return found


def shown_results(found: Sequence[dict[str, Any]]) -> str:
    """A Markdown table."""
    lines = ["| data | memory | method | figures | source |", "|---|---|---|---|---|"]
    for one in sorted(found, key=lambda one: list(TABLE["datasets"]).index(one["dataset"])):
        figures = ", ".join(f"{name} {100 * value:.1f}" for name, value in one["metrics"].items())
        cells = [TABLE["datasets"][one["dataset"]]["title"], one["memory"], one["model"], figures, one["source"]]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def _parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    add, datasets = parser.add_argument, list(TABLE["datasets"])
    add("--datasets", nargs="+", choices=datasets, default=datasets)
    add("--memory", nargs="+", choices=("11gb", "24gb", "80gb"), default=["11gb"], help="default: 11gb")
    add("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    add("--dry-run", action="store_true", help="print the steps, hours and disk, and do nothing")
    add("--configs", type=Path, default=Path("configs/paper"), metavar="DIR")
    add("--data_dir", type=Path, default=Path("data"), metavar="DIR")
    add("--output_dir", type=Path, default=Path("runs/paper"), metavar="DIR")
    add("--files_from", default="https://dl.fbaipublicfiles.com/dpr", metavar="URL", help="a mirror of DPR's files")
    add("--precision", choices=("float32", "bfloat16", "float16"), default="float32", help="of encoding")
    add("--batch_size", type=int, default=32, metavar="N", help="of encoding")
    add("--index", default="Flat", help="FAISS factory string; Flat is exact")
    add("--cross_encoder", default="cross-encoder/ms-marco-MiniLM-L6-v2", help="of MS MARCO's negatives")
    add("--device", help="of encoding and search, such as cuda:1")
    add("--keep_embeddings", action="store_true", help="do not remove a run's encoded corpus once it is scored")
    args, rest = parser.parse_known_args(argv)
    args.on_device = ["--device", args.device] if args.device else []
    for key in ("--train_data", "--method", "--resume_from_checkpoint"):
        if any(word.split("=")[0] == key for word in rest):
            raise ConfigError(f"{key}: is set by the plan (--data_dir, --output_dir and --methods change it)")
    return args, rest


if __name__ == "__main__":
    sys.exit(main())
