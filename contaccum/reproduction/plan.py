"""What reproducing a cell of the paper's table takes: steps as command lines, their files, and a guess at their cost.

Knows where the data are published and how much there is of them (table1.json); downloads, trains and scores nothing.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from contaccum.errors import ConfigError

MEMORIES = ("11gb", "24gb", "80gb")
METHODS = ("in_batch", "grad_accum", "grad_cache", "contaccum")
TOP_K = 100
DPR_FILES = "https://dl.fbaipublicfiles.com/dpr"
CROSS_ENCODER = "cross-encoder/ms-marco-MiniLM-L6-v2"

# Guesses, for estimates alone: tokens of a question, candidates a query that are scored by the cross-encoder, and
# floating-point operations a token of that cross-encoder (10.6 million weights beside its embeddings).
_QUERY_TOKENS, _CANDIDATES, _CROSS_ENCODER_WEIGHTS = 14, 100, 10.6e6
# Forward passes that a training step costs: backward is twice a forward, and grad_cache encodes twice.
_PASSES = {"grad_cache": 4.0}
# A checkpoint has weights and two moments of float32; the next is whole before the last one goes.
_CHECKPOINTS = 2


@dataclass(frozen=True)
class Download:
    """A file to fetch, or, with ``beir``, BEIR's archive of that name to unpack into a folder; size of what is sent."""

    url: str
    path: Path
    gigabytes: float | None
    beir: bool = False


@dataclass(frozen=True)
class Step:
    """One step.

    Attributes:
        name: unique in a run.
        outputs: files or folders that are there when it is done.
        argv: of `contaccum`; empty for a download.
        compute: floating-point operations, roughly.
        dtype: "float32", or that of ``--precision``: what most of them are in.
        gigabytes: what it leaves on the disk; None: unknown before it is fetched.
        temporary: whether that goes again once the run is scored.
    """

    name: str
    outputs: tuple[Path, ...]
    argv: tuple[str, ...] = ()
    download: Download | None = None
    compute: float = 0.0
    dtype: str = "float32"
    gigabytes: float | None = 0.0
    temporary: bool = False


@dataclass(frozen=True)
class Settings:
    """What a reproduction is asked to do; see `contaccum reproduce --help`."""

    configs: Path
    data: Path
    output: Path
    files: str = DPR_FILES
    precision: str = "float32"
    dtype: str = "float16"
    batch_size: int = 32
    index: str = "Flat"
    cross_encoder: str = CROSS_ENCODER
    limit_memory: bool = False
    keep_embeddings: bool = False
    device: str | None = None
    train_options: tuple[str, ...] = ()


@dataclass(frozen=True)
class RunPlan:
    """A data set, a size of memory and a method: one figure of the table for each metric."""

    dataset: str
    memory: str
    method: str
    recipe: Path
    folder: Path
    steps: tuple[Step, ...]

    @property
    def name(self) -> str:
        return f"{self.dataset}/{self.memory}/{self.method}"

    @property
    def scores(self) -> Path:
        return self.folder / "scores.json"

    def identity(self, step: Step) -> dict[str, Any]:
        """What a finished step is known by."""
        recipe = hashlib.sha256(self.recipe.read_bytes()).hexdigest() if step.name == "train" else None
        return {"argv": list(step.argv), "recipe": recipe}


@lru_cache(maxsize=1)
def table() -> Mapping[str, Any]:
    """The data sets of the paper's table: files, sizes, metrics, and published figures with their sources."""
    return json.loads(Path(__file__).with_name("table1.json").read_text(encoding="utf-8"))


def plan_run(dataset: str, memory: str, method: str, settings: Settings) -> RunPlan:
    """The steps of one run, in their order.

    Raises:
        ConfigError: there is no recipe for it, or it does not take the training options.
    """
    recipe = settings.configs / dataset / memory / f"{method}.yaml"
    if not recipe.is_file():
        raise ConfigError(f"{recipe}: no such recipe (--configs names the folder with the paper's recipes)")
    from contaccum.training.config import parse

    about, encoder = table()["datasets"][dataset], table()["encoder"]
    corpus = table()["corpora"][about["corpus"]]
    folder = settings.output / dataset / memory / method
    model, store, run = folder / "model", folder / "passages", folder / "run.trec"
    downloads, train_data, passages, queries = _data(about, corpus, settings)

    options = ["--train_data", str(train_data), "--output_dir", str(model), *settings.train_options]
    _, _, arguments = parse([str(recipe), *options])
    limit = ["--memory_limit_gb", memory.removesuffix("gb")] if settings.limit_memory and memory != "80gb" else []
    device = ["--device", settings.device] if settings.device else []
    encoding = ["--batch_size", str(settings.batch_size), "--precision", settings.precision, *device]
    asked = ["--queries", str(queries), *(["--split", about["split"]] if "split" in about else [])]
    depth = ["--top_k", str(TOP_K), "--index", settings.index]
    forward = 2.0 * encoder["parameters_per_token"]
    pairs = about["train_queries"] * float(arguments.num_train_epochs)
    if arguments.max_steps > 0:
        pairs = float(arguments.max_steps * (arguments.total_train_batch_size or 1))
    tokens = _QUERY_TOKENS + 2 * corpus["tokens_per_passage"]
    towers = 2 * encoder["parameters"] * 4 / 1e9
    metrics = ["--k_values", "1", "5", "20", str(TOP_K)] if "test" in about else ["--k_values", "10", "20", str(TOP_K)]
    score: list[str] = ["open_qa", "--run", str(run), "--questions", str(queries), "--passages", str(passages)]
    if "test" in about:
        score += ["--match", about["match"]]
    else:
        score = ["evaluate", "--run", str(run), "--data", str(passages), "--split", about["split"]]
    steps = [
        *downloads,
        Step(
            "train",
            (model / "run.json",),
            ("train", str(recipe), *options, *limit, "--resume_from_checkpoint", "auto"),
            compute=pairs * tokens * forward * _PASSES.get(method, 3.0),
            gigabytes=towers * (1 + 3 * _CHECKPOINTS),
        ),
        Step(
            "encode",
            (store / "store.json",),
            (
                "encode",
                str(model),
                "--corpus",
                str(passages),
                "--output",
                str(store),
                "--dtype",
                settings.dtype,
                *encoding,
            ),
            compute=forward * corpus["passages"] * corpus["tokens_per_passage"],
            dtype=settings.precision,
            gigabytes=corpus["passages"] * encoder["dimension"] * (2 if settings.dtype == "float16" else 4) / 1e9,
            temporary=not settings.keep_embeddings,
        ),
        Step(
            "search",
            (run,),
            ("search", str(model), "--store", str(store), *asked, "--output", str(run), *depth, *encoding),
            compute=2.0 * about["test_queries"] * corpus["passages"] * encoder["dimension"],
            gigabytes=about["test_queries"] * TOP_K * 50 / 1e9,
        ),
        Step("score", (folder / "scores.json",), (*score, *metrics, "--output", str(folder / "scores.json"))),
    ]
    return RunPlan(dataset, memory, method, recipe, folder, tuple(steps))


def _data(
    about: Mapping[str, Any], corpus: Mapping[str, Any], settings: Settings
) -> tuple[list[Step], Path, Path, Path]:
    """Steps that get the data; training data, corpus and test queries."""
    if "beir" in corpus:
        folder = settings.data / "beir" / corpus["beir"]
        fetched = Download(corpus["beir"], folder, corpus["gigabytes"], beir=True)
        train_data = settings.data / "msmarco" / about["train"]["file"]
        pairs = float(about["train_queries"] * _CANDIDATES)
        tokens = _QUERY_TOKENS + corpus["tokens_per_passage"]
        mine = Step(
            "mine",
            (train_data,),
            tuple(
                [
                    "mine",
                    "--method",
                    "bm25",
                    "--data",
                    str(folder),
                    "--output",
                    str(train_data),
                    "--num_negatives",
                    "30",
                ]
                + ["--cross_encoder", settings.cross_encoder, "--cross_encoder_margin", "3", "--on_too_few", "keep"]
                + (["--device", settings.device] if settings.device else [])
            ),
            compute=2 * _CROSS_ENCODER_WEIGHTS * pairs * tokens,
            gigabytes=about["train_queries"] * 32 * 350 / 1e9,
        )
        download = Step(
            f"download {corpus['beir']}",
            (folder / "corpus.jsonl",),
            download=fetched,
            gigabytes=corpus["unpacked_gigabytes"],
        )
        return [download, mine], train_data, folder, folder
    files = [about["train"], about["test"], corpus]
    paths = [_as_there_is(settings.data / "dpr" / file["file"]) for file in files]
    steps = [
        Step(
            f"download {path.name}",
            (path,),
            download=Download(f"{settings.files.rstrip('/')}/{file['url']}", path, file.get("gigabytes")),
            gigabytes=file.get("gigabytes"),
        )
        for file, path in zip(files, paths, strict=True)
    ]
    return steps, paths[0], paths[2], paths[1]


def _as_there_is(path: Path) -> Path:
    """The same file unpacked, where it lies there so; DPR's own downloader unpacks."""
    unpacked = path.with_suffix("") if path.suffix == ".gz" else path
    return unpacked if unpacked.exists() and not path.exists() else path


def steps_once(runs: Sequence[RunPlan]) -> list[tuple[RunPlan, Step]]:
    """All steps of all runs in their order; what several share (data, above all) stands where it is first needed."""
    seen: set[tuple[Path, ...]] = set()
    found = []
    for run in runs:
        for step in run.steps:
            if step.outputs not in seen:
                seen.add(step.outputs)
                found.append((run, step))
    return found


def peak_gigabytes(runs: Sequence[RunPlan]) -> tuple[float, int]:
    """The most that lies on the disk at any time, and how many files are of unknown size."""
    kept, peak, unknown = 0.0, 0.0, 0
    passing: dict[str, float] = {}
    for run, step in steps_once(runs):
        if step.gigabytes is None:
            unknown += 1
        elif step.temporary:
            passing[run.name] = step.gigabytes
        else:
            kept += step.gigabytes
        peak = max(peak, kept + sum(passing.values()))
        if step.name == "score":
            passing.pop(run.name, None)
    return peak, unknown


def hours(step: Step, speed: Mapping[str, float], utilisation: float) -> float:
    """Hours of a step on a device with that many operations a second, by type; downloads are not guessed."""
    return step.compute / (speed[step.dtype] * utilisation) / 3600 if step.compute else 0.0


def shown_hours(value: float) -> str:
    if value < 1 / 60:
        return "-"
    return f"{60 * value:.0f} min" if value < 1 else f"{value:,.1f} h" if value < 100 else f"{math.ceil(value):,} h"
