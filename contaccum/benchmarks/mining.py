"""`contaccum bench mine MODEL --data DATA`: our miner against sentence-transformers' `mine_hard_negatives`.

All mine the same data with the same model, rules and batch size, in turns within one run: ours, theirs with FAISS, and
theirs with its torch search. The negatives are compared too: a miner that finds others is not faster, it does another
thing. Reading data and writing files are not timed.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from contaccum.errors import ConfigError, DataError
from contaccum.mining import MinedNegatives, MiningData, SelectionRules, load_mining_data, mine_hard_negatives
from contaccum.redaction import redact

SEARCHES = ("faiss", "torch")

# {(query, positive): negatives}
Negatives = dict[tuple[str, str], set[str]]


@dataclass
class MiningBenchSettings:
    """One benchmark: everything that decides what is measured. `limit`: use the first queries alone; None: all."""

    model: str
    data: str
    corpus: str | None = None
    split: str = "train"
    limit: int | None = None
    num_negatives: int = 3
    range_min: int = 0
    range_max: int = 50
    absolute_margin: float | None = None
    relative_margin: float | None = None
    max_score: float | None = None
    min_score: float | None = None
    batch_size: int = 32
    repeats: int = 3
    device: str = "cpu"
    threads: int | None = None

    def rules(self) -> SelectionRules:
        """The rules for ours; theirs are these by the same names."""
        return SelectionRules(num_negatives=self.num_negatives, range_max=self.range_max, **self.shared_rules())

    def shared_rules(self) -> dict[str, Any]:
        names = ("range_min", "absolute_margin", "relative_margin", "max_score", "min_score")
        return {name: getattr(self, name) for name in names}

    def check(self) -> None:
        """Raise ConfigError for what cannot be measured."""
        self.rules().check()
        for name in ("batch_size", "repeats", "limit", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")


def measure_mining(settings: MiningBenchSettings, progress: Callable[[str], None] = print) -> list[dict[str, Any]]:
    """One record per search on their side ("faiss", "torch").

    A record: ``search``, ``queries``, ``pairs``, ``passages``; ``seconds`` and ``seconds_sentence_transformers``
    (medians over turns), ``speedup`` (theirs over ours in the same turn: median, ``speedup_low``, ``speedup_high``);
    the same ``_after_encoding``, where theirs finds its embeddings in its cache, and ``_encoding``, the rest;
    ``same_negatives``, the share of pairs for which both find the same set; ``stages``, seconds of our last turn.
    """
    import torch

    import contaccum.retrieval.searcher  # noqa: F401  # what it imports takes seconds, and belongs to neither side
    from contaccum.encoders import DualEncoder

    settings.check()
    if settings.threads:
        import faiss

        torch.set_num_threads(settings.threads)
        faiss.omp_set_num_threads(settings.threads)
    data = first_queries(load_mining_data(settings.data, settings.corpus, split=settings.split), settings.limit)
    model = DualEncoder.from_pretrained(settings.model, device=settings.device)
    everyone = ("ours", *SEARCHES)
    times: dict[str, dict[str, list[float]]] = {
        who: {"": [], "_encoding": [], "_after_encoding": []} for who in everyone
    }
    found: dict[str, Negatives] = {}
    with tempfile.TemporaryDirectory() as cache:
        # Fills their cache, and warms up what is made on first use.
        _theirs(settings, model, data, "torch", cache)
        progress("embeddings cached")
        for turn in range(settings.repeats):
            # Who goes first changes, so that nobody always has the warmer machine.
            for who in everyone[turn % 3 :] + everyone[: turn % 3]:
                if who == "ours":
                    mined, whole = _ours(settings, model, data)
                    encoding = sum(seconds for name, seconds in mined.timing.items() if name.startswith("encode"))
                    after = whole - encoding
                else:
                    found[who], whole = _theirs(settings, model, data, who)
                    _, after = _theirs(settings, model, data, who, cache)
                    encoding = whole - after
                for part, seconds in (("", whole), ("_encoding", encoding), ("_after_encoding", after)):
                    times[who][part].append(seconds)
            progress(f"turn {turn + 1} of {settings.repeats}")
    return [
        {
            "search": search,
            "queries": len(data.queries),
            "pairs": sum(data.pair_counts),
            "passages": data.pool_size,
            **{
                name: value
                for part in times["ours"]
                for name, value in _speedup(times["ours"][part], times[search][part], part).items()
            },
            "same_negatives": same_negatives(mined, found[search]),
            "stages": {**mined.timing, "seconds": times["ours"][""][-1]},
        }
        for search in SEARCHES
    ]


def first_queries(data: MiningData, limit: int | None) -> MiningData:
    """The first `limit` queries; the passages stay."""
    lists = (
        "query_ids",
        "queries",
        "positives",
        "positive_documents",
        "pair_counts",
        "excluded",
        "same_as_query",
    )
    return data if limit is None else replace(data, **{name: getattr(data, name)[:limit] for name in lists})


def same_negatives(mined: MinedNegatives, found: Negatives) -> float:
    """The share of pairs for which `found` has the same negatives as `mined`."""
    same = [
        found.get((query.query, positive.document.passage), set()) == {n.document.passage for n in query.negatives}
        for query in mined.queries("keep")
        for positive in query.positives[: query.pair_count]
    ]
    return sum(same) / len(same)


def _speedup(ours: list[float], theirs: list[float], suffix: str) -> dict[str, float]:
    ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
    return {
        f"seconds{suffix}": statistics.median(ours),
        f"seconds{suffix}_sentence_transformers": statistics.median(theirs),
        f"speedup{suffix}": statistics.median(ratios),
        f"speedup{suffix}_low": min(ratios),
        f"speedup{suffix}_high": max(ratios),
    }


def _ours(settings: MiningBenchSettings, model: Any, data: MiningData) -> tuple[MinedNegatives, float]:
    started = time.perf_counter()
    mined = mine_hard_negatives(
        model,
        data,
        rules=settings.rules(),
        similarity="cos",
        batch_size=settings.batch_size,
        show_progress=False,
    )
    # Theirs hands over texts.
    for _ in mined.queries("keep"):
        pass
    return mined, time.perf_counter() - started


def _theirs(
    settings: MiningBenchSettings, model: Any, data: MiningData, search: str, cache: str | None = None
) -> tuple[Negatives, float]:
    """What sentence-transformers finds, and its seconds; in `cache`, a folder, it keeps embeddings and finds them."""
    from datasets import Dataset
    from sentence_transformers.util import mine_hard_negatives as mine_theirs

    rows = [
        (query, document.passage)
        for query, positives, count in zip(data.queries, data.positive_documents, data.pair_counts, strict=True)
        for document in positives[:count]
    ]
    dataset = Dataset.from_dict({"query": [row[0] for row in rows], "positive": [row[1] for row in rows]})
    corpus = [document.passage for document in data.documents[: data.pool_size]]
    with contextlib.redirect_stderr(io.StringIO()):
        started = time.perf_counter()
        try:
            mined = mine_theirs(
                dataset,
                model,
                corpus=corpus,
                range_max=settings.range_max,
                num_negatives=settings.num_negatives,
                batch_size=settings.batch_size,
                use_faiss=search == "faiss",
                output_format="labeled-list",
                verbose=False,
                cache_folder=cache,
                **settings.shared_rules(),
            )
        # It counts in per cent of what is left, and does not ask whether anything is.
        except ZeroDivisionError as error:
            raise DataError(f"{settings.data}: the rules leave sentence-transformers nothing (loosen them)") from error
        seconds = time.perf_counter() - started
    found = {(query, texts[0]): set(texts[1:]) for query, texts in zip(mined["query"], mined["positive"], strict=True)}
    return found, seconds


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see {self.prog} --help)")


def run(argv: Sequence[str]) -> int:
    """``contaccum bench mine MODEL --data DATA [OPTIONS]``; returns the exit code."""
    from contaccum.benchmarks.command import machine
    from contaccum.evaluation.provenance import git_commit, package_versions
    from contaccum.evaluation.results import require_writable, write_atomically

    options = vars(_parser().parse_args(list(argv)))
    output: Path = options.pop("output")
    settings = MiningBenchSettings(**options)
    settings.check()
    require_writable(output)
    records = measure_mining(settings, progress=lambda line: print(line, flush=True))
    print(format_mining(records))
    result = {
        "command": redact(" ".join(["contaccum", "bench", "mine", *argv])),
        "settings": asdict(settings),
        "records": records,
        "machine": machine(settings.device),
        "versions": package_versions(),
        "git_commit": git_commit(),
    }
    write_atomically(output, [json.dumps(result, indent=1), "\n"])
    print(f"written: {output}")
    return 0


def format_mining(records: list[dict[str, Any]]) -> str:
    """Four lines a search: the whole, encoding, the rest, and whether both find the same. Above 1 we are faster."""
    lines = [f"{'theirs':<6} {'':<15} {'ours s':>8} {'theirs s':>9}  theirs over ours"]
    for record in records:
        for suffix, label in (("", "whole"), ("_encoding", "encoding"), ("_after_encoding", "after encoding")):
            lines.append(
                f"{record['search']:<6} {label:<15} {record[f'seconds{suffix}']:>8.2f} "
                f"{record[f'seconds{suffix}_sentence_transformers']:>9.2f}  {record[f'speedup{suffix}']:.2f} "
                f"({record[f'speedup{suffix}_low']:.2f} to {record[f'speedup{suffix}_high']:.2f})"
            )
        lines.append(f"{record['search']:<6} the same negatives for {record['same_negatives']:.2%} of pairs")
    return "\n".join(lines)


def _parser() -> _Parser:
    parser = _Parser(prog="contaccum bench mine", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("model", metavar="MODEL")
    add("--data", required=True)
    add("--corpus")
    add("--split", default="train")
    add("--limit", type=int, metavar="N", help="use the first N queries alone")
    add("--num_negatives", type=int, default=3)
    add("--range_min", type=int, default=0)
    add("--range_max", type=int, default=50)
    for name in ("absolute_margin", "relative_margin", "max_score", "min_score"):
        add(f"--{name}", type=float)
    add("--batch_size", type=int, default=32)
    add("--repeats", type=int, default=3)
    add("--device", default="cpu")
    add("--threads", type=int)
    add("--output", type=Path, default=Path("bench_mine.json"))
    return parser
