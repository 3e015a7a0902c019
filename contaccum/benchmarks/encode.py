"""`contaccum bench encode`: documents a second against sentence-transformers and beir, or memory with ten million rows.

With a MODEL, all three encode the same documents with the same model, precision and batch size, in turns within one
run, and the embeddings are compared. Ours is all that `contaccum encode` does: reading the corpus from disk, checking,
and writing a store. Theirs have the texts in memory; beir's writes its files. With `--stub` a made-up corpus goes
through a function in place of a model, in a process of its own, and what that holds at most is measured.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from contaccum.errors import ConfigError
from contaccum.evaluation.arguments import Parser
from contaccum.redaction import redact
from contaccum.retrieval.encode_command import DEFAULT_SHARD_SIZE

RIVALS = ("sentence-transformers", "beir")


@dataclass
class EncodeBenchSettings:
    """Speed. `limit`: so many documents, evenly spaced; None: all. `precision`: float32, bfloat16 or float16."""

    model: str
    corpus: str
    limit: int | None = None
    batch_size: int = 32
    precision: str = "float32"
    repeats: int = 3
    device: str = "cpu"
    threads: int | None = None

    def check(self) -> None:
        """Raise ConfigError for what cannot be measured."""
        _check_counts(self, "limit", "batch_size", "repeats", "threads")


@dataclass
class MemoryBenchSettings:
    """Memory. `words` of a passage; `folder`: where corpus and store lie meanwhile, None: where temporary files do."""

    rows: int = 10_000_000
    words: int = 100
    dimension: int = 384
    dtype: str = "float16"
    shard_size: int = DEFAULT_SHARD_SIZE
    max_memory_mb: float = 2048
    folder: str | None = None

    def check(self) -> None:
        """Raise ConfigError for what cannot be measured."""
        _check_counts(self, "rows", "words", "dimension", "shard_size", "max_memory_mb")


def _check_counts(settings: Any, *names: str) -> None:
    for name in names:
        value = getattr(settings, name)
        if value is not None and value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}")


def measure_speed(settings: EncodeBenchSettings, progress: Callable[[str], None] = print) -> list[dict[str, Any]]:
    """One record for each of theirs: ``rival``, ``documents``, ``documents_per_second`` and
    ``documents_per_second_rival`` (medians over turns), ``speedup`` (theirs over our seconds in the same turn: median,
    ``speedup_low``, ``speedup_high``), ``max_difference`` (of the embeddings).
    """
    import torch

    from contaccum.data.passages import Passage, read_passages
    from contaccum.data.records import RecordReport
    from contaccum.encoders import DualEncoder

    settings.check()
    if settings.threads:
        torch.set_num_threads(settings.threads)
    passages = list(read_passages(settings.corpus, RecordReport("skip")))
    if settings.limit is not None:
        chosen = np.linspace(0, len(passages) - 1, min(settings.limit, len(passages))).astype(int)
        passages = [passages[row] for row in chosen]
    model = DualEncoder.from_pretrained(settings.model, device=settings.device)
    runs: dict[str, Callable[[list[Passage]], tuple[np.ndarray, float]]] = {
        "ours": lambda some: _ours(settings, model, some),
        "sentence-transformers": lambda some: _sentence_transformers(settings, model, some),
        "beir": lambda some: _beir(settings, model, some),
    }
    seconds: dict[str, list[float]] = {who: [] for who in runs}
    found: dict[str, np.ndarray] = {}
    for run in runs.values():
        run(passages[: settings.batch_size])  # what is made on first use
    for turn in range(settings.repeats):
        # Who goes first changes, so that nobody always has the warmer machine.
        for who in [*runs, *runs][turn % 3 : turn % 3 + 3]:
            found[who], took = runs[who](passages)
            seconds[who].append(took)
        progress(
            f"turn {turn + 1} of {settings.repeats}: " + ", ".join(f"{w} {s[-1]:.1f} s" for w, s in seconds.items())
        )
    records = []
    for rival in RIVALS:
        ratios = [theirs / ours for ours, theirs in zip(seconds["ours"], seconds[rival], strict=True)]
        records.append(
            {
                "rival": rival,
                "documents": len(passages),
                "documents_per_second": len(passages) / statistics.median(seconds["ours"]),
                "documents_per_second_rival": len(passages) / statistics.median(seconds[rival]),
                "speedup": statistics.median(ratios),
                "speedup_low": min(ratios),
                "speedup_high": max(ratios),
                "max_difference": float(np.abs(found["ours"] - found[rival]).max()),
            }
        )
    return records


def _ours(settings: EncodeBenchSettings, model: Any, passages: list[Any]) -> tuple[np.ndarray, float]:
    from contaccum.data.records import RecordReport
    from contaccum.retrieval.encode_command import fill_store
    from contaccum.retrieval.encoding import encode_texts
    from contaccum.retrieval.store import EmbeddingStore
    from contaccum.retrieval.store_identity import store_identity
    from contaccum.retrieval.store_writer import StoreWriter

    autocast_dtype = None if settings.precision == "float32" else settings.precision
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder, "corpus.jsonl")
        with open(corpus, "w", encoding="utf-8") as file:
            file.writelines(json.dumps({"_id": p.id, "title": p.title, "text": p.text}) + "\n" for p in passages)
        started = time.perf_counter()
        identity = store_identity(model, "document", autocast_dtype, "float32", DEFAULT_SHARD_SIZE)
        writer = StoreWriter.start(Path(folder, "store"), identity, {}, {})

        def encode(texts: list[str]) -> np.ndarray:
            return encode_texts(model, texts, "document", settings.batch_size, autocast_dtype, show_progress=False)

        fill_store(writer, corpus, "document", RecordReport(), encode)
        seconds = time.perf_counter() - started
        store = EmbeddingStore.open(Path(folder, "store"))
        return store.slice(0, len(store)), seconds


def _autocast(settings: EncodeBenchSettings) -> Any:
    import torch

    if settings.precision == "float32":
        return nullcontext()
    return torch.autocast(torch.device(settings.device).type, dtype=getattr(torch, settings.precision))


def _sentence_transformers(settings: EncodeBenchSettings, model: Any, passages: list[Any]) -> tuple[np.ndarray, float]:
    texts = [p.passage for p in passages]
    started = time.perf_counter()
    with _autocast(settings):
        embeddings = model.encode_document(texts, batch_size=settings.batch_size, show_progress_bar=False)
    return np.asarray(embeddings, dtype=np.float32), time.perf_counter() - started


class _Remembering:
    """A model for beir that keeps what it returned, by document id: beir's own files are pickles."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.found: dict[str, Any] = {}

    def encode_queries(self, queries: list[str], **kwargs: Any) -> Any:
        return self.model.encode_queries(queries, **kwargs)

    def encode_corpus(self, corpus: list[dict[str, str]], **kwargs: Any) -> Any:
        embeddings = self.model.encode_corpus(corpus, **kwargs)
        self.found.update(zip((document["_id"] for document in corpus), embeddings, strict=True))
        return embeddings


def _beir(settings: EncodeBenchSettings, model: Any, passages: list[Any]) -> tuple[np.ndarray, float]:
    from beir.retrieval.search.dense import DenseRetrievalExactSearch

    remembering = _Remembering(model)
    corpus = {p.id: {"_id": p.id, "title": p.title, "text": p.text} for p in passages}
    search = DenseRetrievalExactSearch(remembering, batch_size=settings.batch_size, show_progress_bar=False)
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        with _autocast(settings):
            search.encode(corpus, {"q": "a query, which beir must have"}, encode_output_path=folder)
        seconds = time.perf_counter() - started
    return np.stack([remembering.found[p.id].float().cpu().numpy() for p in passages]), seconds


def measure_memory(settings: MemoryBenchSettings, progress: Callable[[str], None] = print) -> list[dict[str, Any]]:
    """One record: ``rows``, ``corpus_mb``, ``store_mb``, ``seconds``, ``rows_per_second``; of the process that encoded,
    ``peak_mb`` (resident), ``before_mb`` (before the first row, torch loaded), ``after_a_tenth_mb``, ``at_the_end_mb``;
    ``broken``, what is beyond ``max_memory_mb``.
    """
    settings.check()
    with tempfile.TemporaryDirectory(dir=settings.folder) as folder:
        corpus = Path(folder, "corpus.tsv")
        write_made_up_corpus(corpus, settings.rows, settings.words)
        progress(f"{corpus.stat().st_size / 2**20:,.0f} MB of made-up passages written")
        code = "import sys; from contaccum.benchmarks.encode import _memory_job; _memory_job(*sys.argv[1:])"
        answer = subprocess.run(
            [sys.executable, "-c", code, folder, json.dumps(asdict(settings))],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        told = json.loads(answer.stdout.strip().splitlines()[-1])
        told["corpus_mb"] = corpus.stat().st_size / 2**20
        told["store_mb"] = sum(path.stat().st_size for path in Path(folder, "store").rglob("*")) / 2**20
    broken = []
    if told["peak_mb"] > settings.max_memory_mb:
        broken = [f"resident memory reached {told['peak_mb']:.0f} MB, more than {settings.max_memory_mb:.0f}"]
    return [{"rows": settings.rows, **told, "broken": broken}]


def write_made_up_corpus(path: Path, rows: int, words: int) -> None:
    """`id text title` as DPR's psgs_w100.tsv has it; the texts differ, and are quick to make."""
    body = " ".join(f"word{n % 977}" for n in range(words - 2))
    with open(path, "w", encoding="utf-8") as file:
        file.write("id\ttext\ttitle\n")
        for start in range(1, rows + 1, 10_000):
            end = min(start + 10_000, rows + 1)
            file.writelines(f"{n}\tpassage {n} {body}\ttitle {n % 1000}\n" for n in range(start, end))


def stub_encoder(dimension: int) -> Callable[[list[str]], np.ndarray]:
    """Texts to numbers that depend on them, at next to no cost."""

    def encode(texts: list[str]) -> np.ndarray:
        lengths = np.fromiter(map(len, texts), dtype=np.float32, count=len(texts))
        return lengths[:, None] / np.arange(1, dimension + 1, dtype=np.float32)

    return encode


def _memory_job(folder: str, settings_json: str) -> None:
    import psutil
    import sentence_transformers  # noqa: F401  # part of what a real run holds
    import torch  # noqa: F401

    from contaccum.data.records import RecordReport
    from contaccum.retrieval.encode_command import fill_store
    from contaccum.retrieval.store_writer import StoreWriter
    from contaccum.training.memory import peak_memory_mb

    settings = MemoryBenchSettings(**json.loads(settings_json))
    process = psutil.Process()

    def resident() -> float:
        return process.memory_info().rss / 2**20

    before = resident()
    samples: list[float] = []
    identity = {"kind": "document", "dtype": settings.dtype, "shard_size": settings.shard_size}
    writer = StoreWriter.start(Path(folder, "store"), {**identity, "model": "stub", "similarity": "dot"}, {}, {})
    started = time.perf_counter()
    progress, whole = fill_store(
        writer,
        Path(folder, "corpus.tsv"),
        "document",
        RecordReport(),
        stub_encoder(settings.dimension),
        after_shard=lambda progress: samples.append(resident()),
    )
    seconds = time.perf_counter() - started
    if not whole or progress.encoded != settings.rows:
        raise RuntimeError(f"{progress.encoded} of {settings.rows} rows were encoded")
    told = {
        "seconds": seconds,
        "rows_per_second": settings.rows / seconds,
        "before_mb": before,
        "after_a_tenth_mb": samples[len(samples) // 10],
        "at_the_end_mb": samples[-1],
        "peak_mb": peak_memory_mb(),
    }
    print(json.dumps(told))


def run(argv: Sequence[str]) -> int:
    """``contaccum bench encode MODEL --corpus PATH`` or ``contaccum bench encode --stub --rows N``.

    Returns:
        the exit code: 1 when ``--max_memory_mb`` is exceeded.
    """
    from contaccum.benchmarks.command import machine
    from contaccum.evaluation.provenance import git_commit, package_versions
    from contaccum.evaluation.results import require_writable, write_atomically

    options = vars(_parser("--stub" in argv).parse_args(list(argv)))
    output: Path = options.pop("output")
    stub = options.pop("stub")
    settings: Any = MemoryBenchSettings(**options) if stub else EncodeBenchSettings(**options)
    settings.check()
    require_writable(output)
    measure: Any = measure_memory if stub else measure_speed
    records = measure(settings, progress=lambda line: print(line, flush=True))
    print((format_memory if stub else format_speed)(records))
    result = {
        "command": redact(" ".join(["contaccum", "bench", "encode", *argv])),
        "settings": asdict(settings),
        "records": records,
        "machine": machine(getattr(settings, "device", "cpu")),
        "versions": package_versions(),
        "git_commit": git_commit(),
    }
    write_atomically(output, [json.dumps(result, indent=1), "\n"])
    print(f"written: {output}")
    broken = records[0].get("broken", [])
    for bound in broken:
        print(f"contaccum bench encode: {bound}", file=sys.stderr)
    return 1 if broken else 0


def format_speed(records: list[dict[str, Any]]) -> str:
    """One line for each of theirs. Above 1 we are faster."""
    lines = [f"{'theirs':<22} {'ours/s':>8} {'theirs/s':>9}  speedup"]
    for r in records:
        lines.append(
            f"{r['rival']:<22} {r['documents_per_second']:>8.1f} {r['documents_per_second_rival']:>9.1f}  "
            f"{r['speedup']:.2f} ({r['speedup_low']:.2f} to {r['speedup_high']:.2f}), embeddings differ by "
            f"{r['max_difference']:.1e} at most"
        )
    return "\n".join(lines)


def format_memory(records: list[dict[str, Any]]) -> str:
    """Resident memory, one line a moment."""
    (r,) = records
    moments = ("before_mb", "before"), ("after_a_tenth_mb", "after a tenth"), ("at_the_end_mb", "at the end")
    return "\n".join(
        [
            f"{r['rows']:,} rows, corpus {r['corpus_mb']:,.0f} MB, store {r['store_mb']:,.0f} MB, "
            f"{r['rows_per_second']:,.0f} rows a second",
            *(f"resident {name:<14} {r[key]:>7.0f} MB" for key, name in (*moments, ("peak_mb", "at most"))),
        ]
    )


def _parser(stub: bool) -> Parser:
    parser = Parser(prog="contaccum bench encode", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--output", type=Path, default=Path("bench_encode.json"))
    add("--stub", action="store_true", help="measure memory, with a function in place of a model")
    if stub:
        defaults = MemoryBenchSettings()
        for name in ("rows", "words", "dimension", "shard_size"):
            add(f"--{name}", type=int, default=getattr(defaults, name))
        add("--dtype", choices=("float16", "float32"), default=defaults.dtype)
        add("--max_memory_mb", type=float, default=defaults.max_memory_mb, help="a bound: beyond it the exit code is 1")
        add("--folder", help="for corpus and store, which are removed again; default: where temporary files lie")
        return parser
    add("model", metavar="MODEL")
    add("--corpus", required=True)
    add("--limit", type=int, metavar="N", help="N documents, evenly spaced")
    add("--batch_size", type=int, default=32)
    add("--precision", choices=("float32", "bfloat16", "float16"), default="float32")
    add("--repeats", type=int, default=3)
    add("--device", default="cpu")
    add("--threads", type=int)
    return parser
